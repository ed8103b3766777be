"""Changes between two saves: each kind is detected, whatever a save reuses from the previous one."""

from __future__ import annotations

import json
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import remanent
from remanent._state import page_tree

torch = pytest.importorskip("torch", reason="torch is not installed")

import numpy as np  # noqa: E402

from remanent.torch import Checkpointer  # noqa: E402


class Run:
    """The objects of a run, which the rows of the tables change between saves."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4])
        base = torch.arange(24.0)
        self.own: dict[str, Any] = {
            "w": torch.arange(12.0).reshape(3, 4), "column": torch.arange(12.0).reshape(3, 4)[:, 1],
            "left": base[:12], "right": base[6:20], "empty": torch.empty(0, 3), "ints": torch.arange(4),
            "nested": {"a": [1, 2.5, None], "t": (True, "x"), 3: b"y", "deque": deque([1], 4), "count": Counter("aab")},
            "more": [torch.ones(2), {"x": torch.zeros(3)}], "one": {"n": 1}, "two": {"n": 1}, "lr": 0.1, "zero": 0.0}
        self.step()

    def step(self) -> None:
        self.model(torch.ones(3, 4)).square().sum().backward()
        self.optimizer.step()
        self.scheduler.step()

    def opened(self, path: Path, **options: Any) -> Checkpointer:
        return Checkpointer(path, self.model, self.optimizer, self.scheduler, extra={"own": self.own}, rng=False,
                            **options)

    @property
    def first(self) -> Any:
        return self.model[0]

    @property
    def moments(self) -> Any:
        return self.optimizer.state[self.first.weight]


def set_own(name: str, make: Callable[[Run], Any]) -> Callable[[Run], None]:
    def change(run: Run) -> None:
        run.own[name] = make(run)
    return change


def with_data(make: Callable[[Any], Any], name: str = "w") -> Callable[[Run], None]:
    """Assigns other data to a tensor, which stays the same object."""
    def change(run: Run) -> None:
        run.own[name].data = make(run.own[name])
    return change


def reorder(run: Run) -> None:
    run.own["w"] = run.own.pop("w")


def exchange(run: Run) -> None:
    run.own["left"], run.own["right"] = run.own["right"], run.own["left"]


def replace_parameter(run: Run) -> None:
    state = run.optimizer.state.pop(run.first.weight)
    run.first.weight = torch.nn.Parameter(run.first.weight.detach() + 1)
    run.optimizer.param_groups[0]["params"][0] = run.first.weight
    run.optimizer.state[run.first.weight] = state


def add_group(run: Run) -> None:
    run.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.5})


def share_container(run: Run) -> None:
    run.own["two"] = run.own["one"]


def share_state(run: Run) -> None:
    run.own["of optimizer"] = run.moments


def swap_storages(run: Run) -> None:
    torch.utils.swap_tensors(run.own["w"], run.own["ints"])


CHANGES: dict[str, Callable[[Run], Any]] = {
    "nothing": lambda run: None,
    "elements": lambda run: run.own["w"].add_(1),
    "a step": Run.step,
    "a tensor is replaced": set_own("w", lambda run: run.own["w"] + 1),
    "a tensor of other data": with_data(lambda w: w + 1),
    "another shape": with_data(lambda w: w.view(4, 3)),
    "another shape in place": lambda run: run.own["w"].resize_(4, 3),
    "fewer elements in place": lambda run: run.own["w"].resize_(2, 4),
    "more elements in place": lambda run: run.own["w"].resize_(5, 4).fill_(1),
    "other strides in place": lambda run: run.own["w"].t_(),
    "a dimension of one": lambda run: run.own["w"].unsqueeze_(0),
    "another type of the same width": with_data(lambda w: w.view(torch.int32)),
    "another type": with_data(lambda w: w.to(torch.bfloat16)),
    "another offset": with_data(lambda w: w[1:], "left"),
    "another storage": lambda run: run.own["w"].set_(torch.full((3, 4), 5.0)),
    "exchanged tensors": swap_storages,
    "a negative view": with_data(lambda w: torch._neg_view(w)),
    "a parameter": set_own("w", lambda run: torch.nn.Parameter(run.own["w"])),
    "a gradient": lambda run: run.own["w"].requires_grad_(),
    "a number for a tensor": set_own("w", lambda run: 3.5),
    "a tensor for a number": set_own("lr", lambda run: torch.tensor(0.1)),
    "an array for a tensor": set_own("w", lambda run: np.arange(3)),
    "a type for a tensor": set_own("w", lambda run: torch.bfloat16),
    "a tensor is removed": lambda run: run.own.pop("w"),
    "a tensor is added": set_own("new", lambda run: torch.ones(3)),
    "another name": lambda run: run.own.update(v=run.own.pop("w")),
    "another order": reorder,
    "two tensors trade names": exchange,
    "views begin to share": set_own("w", lambda run: run.own["left"][:4]),
    "views cease to share": set_own("right", lambda run: run.own["right"].clone()),
    "other overlap": lambda run: run.own["right"].set_(run.own["right"].untyped_storage(), 14, (10,), (1,)),
    "the same tensor twice": set_own("w", lambda run: run.own["left"]),
    "tied to the model": set_own("w", lambda run: run.first.weight.detach()),
    "an expanded tensor": set_own("w", lambda run: torch.ones(1, 4).expand(3, 4)),
    "a complex tensor": set_own("w", lambda run: torch.ones(3, dtype=torch.complex64).conj()),
    "a filled empty tensor": lambda run: run.own["empty"].resize_(2, 3).fill_(1),
    "a plain value": set_own("lr", lambda run: 0.2),
    "an equal value of another type": set_own("lr", lambda run: np.float64(0.1)),
    "the sign of zero": set_own("zero", lambda run: -0.0),
    "an int for a float": set_own("zero", lambda run: 0),
    "a bool for an int": lambda run: run.own["one"].update(n=True),
    "a key of another type": lambda run: run.own.update(nested={3.0 if key == 3 else key: value for key, value
                                                                in run.own["nested"].items()}),
    "a NaN with other bits": set_own("zero", lambda run: np.array(0x7FF8000000000001).view(float).item()),
    "a list for a tuple": lambda run: run.own["nested"].update(t=[True, "x"]),
    "another dict type": set_own("one", lambda run: OrderedDict(n=1)),
    "an attribute of a dict": set_own("one", lambda run: vars(made := OrderedDict(n=1)).update(a=1) or made),
    "a longer list": lambda run: run.own["nested"]["a"].append(4),
    "a new key": set_own("new", lambda run: {}),
    "a deque": lambda run: run.own["nested"]["deque"].append(2),
    "a count": lambda run: run.own["nested"]["count"].update("a"),
    "shared containers": share_container,
    "a container of the optimizer": share_state,
    "a nested container twice": set_own("more", lambda run: [run.own["nested"]["a"]]),
    "a learning rate": lambda run: run.optimizer.param_groups[0].update(lr=0.3),
    "a replaced parameter": replace_parameter,
    "a new parameter group": add_group,
    "a replaced moment": lambda run: run.moments.update(exp_avg=run.moments["exp_avg"] + 1),
    "a new moment": lambda run: run.moments.update(max_exp_avg_sq=torch.ones(6, 4)),
    "a removed state": lambda run: run.optimizer.state.pop(run.first.bias),
    "a moment as a number": lambda run: run.moments.update(step=3),
    "a parameter of other data": lambda run: setattr(run.first.weight, "data", run.first.weight.data + 1),
    "a model of another type": lambda run: run.model.to(torch.bfloat16),
    "tied parameters": lambda run: setattr(run.model[2], "bias", torch.nn.Parameter(run.first.weight.detach()[0])),
    "a buffer": lambda run: run.first.register_buffer("extra", torch.ones(2)),
    "no buffer": lambda run: run.model[1].register_buffer("running_mean", torch.zeros(6), persistent=False),
    "a module": lambda run: run.model.append(torch.nn.Linear(4, 1)),
    "the version of a module": lambda run: setattr(run.model[1], "_version", 1),
    "a hook": lambda run: run.model.register_state_dict_post_hook(lambda *given: given[1].update(h=torch.ones(1))),
}


def contents(path: Path) -> tuple[str, dict[str, Any], dict[str, bytes]]:
    """Returns the tree as JSON, the layouts of the arrays by page, and the bytes of the pages of the newest version."""
    with remanent.View(path) as view:
        manifest = page_tree.read_manifest(view)
        # Values such as 0, -0.0 and False are equal, but their JSON differs.
        return json.dumps(manifest.tree), manifest.pages, {key: bytes(view[key]) for key in manifest.pages}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_change_between_saves_is_saved(tmp_path: Path, change: str, overlap: bool) -> None:
    run = Run()
    with run.opened(tmp_path / "run", overlap=overlap) as saved, run.opened(tmp_path / "first") as first:
        for step in range(2):
            saved.save(step, wait=False).wait()
        CHANGES[change](run)
        saved.save(2, wait=False).wait()
        first.save(2)
    assert contents(tmp_path / "run") == contents(tmp_path / "first")
    # The next save, of the same state, is equal, too.
    with run.opened(tmp_path / "run") as saved:
        saved.save(3, wait=False).wait()
        saved.save(4, wait=False).wait()
    assert contents(tmp_path / "run") == contents(tmp_path / "first")


def freed(run: Run) -> None:
    run.own["w"].untyped_storage().resize_(0)


def shortened(run: Run) -> None:
    """The storage has the same address, as after an allocator reused it."""
    run.own["w"].untyped_storage().resize_(44)


def over_other_storage(run: Run) -> None:
    run.own["w"] = torch.from_numpy(run.own["left"].numpy()[2:])


REFUSED: dict[str, tuple[Callable[[Run], Any], str]] = {
    "freed": (freed, "own/w: the tensor's storage was freed"),
    "shortened": (shortened, "own/w: the tensor's storage was freed or shortened"),
    "over another storage": (over_other_storage, "shares memory with own/"),
    "sparse": (set_own("w", lambda run: torch.eye(3).to_sparse()), "own/w: a tensor of layout"),
    "meta": (set_own("w", lambda run: torch.empty(3, device="meta")), "own/w: a tensor on the meta device"),
    "a view": (set_own("ints", lambda run: torch._neg_view(run.own["w"])), "own/ints: a conjugate or negative view"),
    "a lock": (set_own("new", lambda run: threading.Lock()), "own/new: a lock cannot be stored"),
    "a cycle": (lambda run: run.own["more"].append(run.own["more"]), "own/more/2: the value contains itself"),
    "a lock in the optimizer": (lambda run: run.moments.update(x=threading.Lock()), "optimizer/state/0/x: a lock"),
    "a NaN key": (set_own("new", lambda run: {float("nan"): 1}), "own/new: a NaN as a key"),
}


@pytest.mark.parametrize("change", REFUSED)
def test_change_between_saves_is_refused(tmp_path: Path, change: str) -> None:
    run = Run()
    with run.opened(tmp_path / "run") as saved:
        for step in range(2):
            saved.save(step, wait=False).wait()
        before = contents(tmp_path / "run")
        make, message = REFUSED[change]
        make(run)
        with pytest.raises(remanent.RefusedError) as raised:
            saved.save(2, wait=False)
        assert message in str(raised.value)
        assert [each.step for each in saved.versions()] == [0, 1]
    assert contents(tmp_path / "run") == before


def test_every_save_equals_first_save(tmp_path: Path) -> None:
    changes = ("elements", "a step", "a plain value", "a tensor is added", "nothing", "shared containers", "a step",
               "a new moment", "views cease to share", "a step")
    run = Run()
    with run.opened(tmp_path / "run", overlap=True) as saved:
        for step, change in enumerate(changes):
            CHANGES[change](run)
            saved.save(step, wait=False).wait()
            with run.opened(tmp_path / f"first-{step}") as first:
                first.save(0)
            assert contents(tmp_path / "run") == contents(tmp_path / f"first-{step}"), change
