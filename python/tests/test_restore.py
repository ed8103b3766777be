"""Versions of a run that are restored into its existing tensors."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from runs import copy_of, state_of

import remanent
from remanent._checkpoint import restoration
from remanent._state import page_tree

torch = pytest.importorskip("torch", reason="torch is not installed")

from remanent.torch import Checkpointer  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no GPU, and none of these runs on one"))]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.norm = torch.nn.BatchNorm2d(8)
        self.head = torch.nn.Linear(8, 40)
        self.tied = torch.nn.Linear(8, 40)
        self.tied.weight = self.head.weight
        self.register_buffer("turned", torch.arange(12.0).reshape(3, 4).T)
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("gaps", torch.arange(20.0).reshape(4, 5)[:, 1:3])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x)).mean((2, 3))
        return self.head(x) + self.tied(x)  # type: ignore[no-any-return]


def run_of(device: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    return model, optimizer


def train(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 3, 5, 5, device=model.turned.device)).square().sum().backward()
    optimizer.step()
    with torch.no_grad():
        for tensor in (model.turned, model.gaps):
            tensor += 1


def places(tensors: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {name: (tensor.data_ptr(), tensor.untyped_storage().data_ptr()) for name, tensor in tensors.items()}


@pytest.mark.parametrize("options", [{}, {"digests": True}])
@pytest.mark.parametrize("device", DEVICES)
def test_existing_tensors_stay_in_place(directory: str, device: str, options: dict[str, Any],
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = run_of(device)
    whole = torch.arange(40.0, device=device)
    held: dict[str, Any] = {
        "halves": [whole[:20], whole[20:]], "parameter": torch.nn.Parameter(torch.ones(7, device=device)),
        "shared": torch.zeros(9).share_memory_(), "bits": torch.tensor([True, False], device=device),
        "one": torch.tensor(3.0, device=device), "nested": {"views": (whole[3:9], whole[5:30:5])},
    }
    if device != "cpu":
        held["pinned"] = torch.zeros(1000).pin_memory()

    def tensors() -> dict[str, Any]:
        found = state_of(model, optimizer)
        for name, value in (*held.items(), *enumerate(held["halves"]), *enumerate(held["nested"]["views"])):
            if isinstance(value, torch.Tensor):
                found[f"held {name}"] = value.detach()
        return found

    with Checkpointer(directory, model, optimizer, extra={"held": held}, rng=False, **options) as run:
        run.save(1)
        expected, before = copy_of(tensors()), places(tensors())
        objects = {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}
        train(model, optimizer)
        with torch.no_grad():
            for value in (*objects.values(), whole):
                value.fill_(1 if value.dtype == torch.bool else 77)
        read: list[str] = []
        sound = restoration.load_pages
        monkeypatch.setattr(restoration, "load_pages", lambda view, pages, *where: read.extend(
            array.name for arrays in pages.values() for array in arrays) or sound(view, pages, *where))
        assert run.restore() == 1
        found = tensors()
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor) and found[name].stride() == tensors()[name].stride(), name
        # Only tensors whose pages contain other bytes or none are read into separate memory.
        views = [f"held/nested/views/{at}" for at in range(2)]
        others = {"model/gaps", "model/empty", "held/halves/0", "held/halves/1", *views}
        assert set(read) <= others, read
        now = places(tensors())
        assert {name for name in now if now[name] != before[name]} <= {"held 0", "held 1"}
        assert all(held[name] is value for name, value in objects.items())
        assert model.head.weight is model.tied.weight


def overwrite(path: Path, at: int, content: bytes) -> None:
    """Changes bytes of a file without changing its length, because the store is reading it."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def test_damaged_page_is_detected_before_changes(directory: str) -> None:
    model, optimizer = run_of("cpu")
    model.long = torch.nn.Parameter(torch.randn(3 << 20))
    with Checkpointer(directory, model, optimizer) as run:
        run.save(1)
        train(model, optimizer)
        with torch.no_grad():
            model.long[1 << 20] = 5
        before = copy_of(state_of(model, optimizer))
        at = run.versions()[0].lsn
        with remanent.View(directory, at) as view:
            contents = {key: view[key] for key in view if view.info(key).length >= 32}
        assert len(contents) > 15 and page_tree.MANIFEST_KEY in contents
        files = {path: path.read_bytes() for path in (Path(directory) / "pages").iterdir()}
        found = 0
        for key, content in contents.items():
            # In the middle of the page, so that most of the page is read before the damage is detected.
            needle = content[len(content) // 2:][:4096]
            for path, whole in files.items():
                place = whole.find(needle)
                if place >= 0 and whole.count(needle) == 1:
                    overwrite(path, place, bytes([whole[place] ^ 4]))
                    with pytest.raises(remanent.DamagedError):
                        run.restore(1)
                    overwrite(path, place, whole[place:place + 1])
                    now = state_of(model, optimizer)
                    assert all(torch.equal(now[name], tensor) for name, tensor in before.items()), key
                    found += 1
        assert found >= len(contents) - 5, (found, len(contents))
        assert run.restore(1) == 1 and not torch.equal(model.head.weight, before["model/head.weight"])


def test_damage_after_verification_is_reported(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"first": torch.randn(1000), "second": torch.randn(1000)}
    with Checkpointer(directory, extra={"state": state}, rng=False) as run:
        run.save(1)
        while not all(info.verified for info in run.store.snapshots()):
            time.sleep(0.01)
        sound = restoration.Restoration.load
        needle = state["second"][500:].numpy().tobytes()

        def late(self: Any, bar: Any) -> None:
            for path in (Path(directory) / "pages").iterdir():
                content = path.read_bytes()
                if (at := content.find(needle)) >= 0:
                    overwrite(path, at, b"!!")
            sound(self, bar)

        monkeypatch.setattr(restoration.Restoration, "load", late)
        with pytest.raises(remanent.DamagedError) as raised:
            run.restore()
        assert raised.value.__notes__ == [
            "changed completely or partly: state; restore a version again before the run continues"]


@pytest.mark.parametrize("how", ["shape", "more", "fewer", "groups", "inference", "shape of a rank"])
def test_misfit_is_rejected_before_changes(directory: str, how: str) -> None:
    first = torch.nn.Linear(5, 5)
    model = torch.nn.Sequential(first, torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9)
    first(torch.randn(3, 5)).sum().backward()
    optimizer.step()
    with Checkpointer(directory, model, optimizer) as run:
        run.save(1)
    if how.startswith("shape"):
        model[2] = torch.nn.Linear(5, 4) if how == "shape" else torch.nn.Linear(3, 5)
    if how == "more":
        model.register_parameter("more", torch.nn.Parameter(torch.zeros(1)))
    if how == "fewer":
        del model[2]
    if how == "groups":
        optimizer.add_param_group({"params": [model[2].weight]})
    if how == "inference":
        with torch.inference_mode():
            model[2].weight = torch.nn.Parameter(torch.zeros(3, 5))
    with torch.inference_mode():
        for tensor in state_of(model, optimizer).values():
            tensor.zero_()
    with Checkpointer(directory, model, optimizer) as run:
        with pytest.raises(remanent.InvalidError, match="model|optimizer"):
            run.restore()
    assert not any(tensor.any() for tensor in state_of(model, optimizer).values())


def test_modules_with_own_load_or_hook_get_saved_state(directory: str) -> None:
    class Own(torch.nn.Linear):
        def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
            # This module keeps its own bias.
            state[f"{prefix}bias"] = self.bias
            super()._load_from_state_dict(state, prefix, *rest)

    def keeps(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state[f"{prefix}bias"] = module.bias

    class Whole(torch.nn.Linear):
        def load_state_dict(self, state: Any, *rest: Any, **named: Any) -> Any:
            return super().load_state_dict({**state, "bias": self.bias}, *rest, **named)

    hooked = torch.nn.Linear(3, 4)
    hooked.register_load_state_dict_pre_hook(keeps)
    seen: list[Any] = []
    for number, model in enumerate((Own(3, 4), hooked, Whole(3, 4), torch.nn.Linear(3, 4))):
        model.register_load_state_dict_post_hook(lambda module, keys: seen.append(module.weight.clone()))
        with Checkpointer(f"{directory}{number}", model) as run:
            run.save(1)
            weight = model.weight.detach().clone()
            with torch.no_grad():
                model.weight.fill_(7)
                model.bias.fill_(7)
            run.restore()
        assert torch.equal(model.weight, weight) and torch.equal(seen.pop(), weight)
        assert bool((model.bias == 7).all()) == (number < 3), number


def test_optimizer_with_pre_hook_gets_saved_state(directory: str) -> None:
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def keeps(optimizer: Any, state: Any) -> Any:
        held = {number: dict(values) for number, values in state["state"].items()}
        held[0]["momentum_buffer"] = optimizer.state[model.weight]["momentum_buffer"]
        return {**state, "state": held}

    model(torch.ones(3)).sum().backward()
    optimizer.step()
    optimizer.register_load_state_dict_pre_hook(keeps)
    with Checkpointer(directory, optimizer=optimizer) as run:
        run.save(1)
        for values in optimizer.state.values():
            values["momentum_buffer"].fill_(7)
        run.restore()
    assert (optimizer.state[model.weight]["momentum_buffer"] == 7).all()
    assert (optimizer.state[model.bias]["momentum_buffer"] == 1).all()


def test_tensors_with_new_overlaps_get_saved_values(directory: str) -> None:
    apart = {"a": torch.arange(6.0), "b": torch.arange(6.0) + 10, "c": torch.arange(6.0) + 20}
    state = dict(apart)
    with Checkpointer(directory, extra={"state": state}, rng=False) as run:
        run.save(1)
        whole = torch.arange(12.0)
        state.update(a=whole[:6], b=whole[3:9])
        run.save(2)
        # The tensors as one page, and as separate pages.
        for step, expected in ((1, apart), (2, {"a": whole[:6], "b": whole[3:9], "c": apart["c"]})):
            expected = {name: tensor.clone() for name, tensor in expected.items()}
            for now in ({"a": whole[:6], "b": whole[3:9]}, {"a": torch.ones(6), "b": torch.ones(6)},
                        {"a": whole[:6], "b": whole[:6]}, {"a": torch.ones(6)[::2], "b": torch.ones(2, 3)},
                        {"a": torch.ones(6, dtype=torch.int32), "b": torch.ones(6).expand(6, 6)[0]}):
                kept = {name: tensor.clone() for name, tensor in now.items()}
                state.update(now)
                run.restore(step)
                assert state.keys() == expected.keys()
                for name, tensor in expected.items():
                    assert torch.equal(state[name], tensor), (step, name, kept)
                storages = {tensor.untyped_storage().data_ptr() for tensor in (state["a"], state["b"])}
                assert len(storages) == 3 - step


def test_tensors_keep_their_current_strides(directory: str) -> None:
    """Applies to modules and optimizers; tensors in a dict get the saved strides."""
    model = torch.nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = {"turned": torch.arange(6.0).reshape(2, 3).T}
    model(torch.randn(1, 3, 4, 4)).square().sum().backward()
    optimizer.step()
    with Checkpointer(directory, model, optimizer, extra={"state": state}) as run:
        run.save(1)
        expected = copy_of(state_of(model, optimizer))
        with torch.no_grad():
            model.weight.data = torch.zeros(5, 3, 2, 2)
            optimizer.state[model.weight]["momentum_buffer"] = torch.zeros(5, 3, 2, 2)
        state["turned"] = torch.zeros(3, 2)
        before = places(state_of(model, optimizer))
        run.restore()
        now = state_of(model, optimizer)
        assert all(torch.equal(now[name], tensor) for name, tensor in expected.items()) and places(now) == before
        assert model.weight.is_contiguous() and not expected["model/weight"].is_contiguous()
        assert torch.equal(state["turned"], torch.arange(6.0).reshape(2, 3).T)


def test_backward_detects_restored_tensors(directory: str) -> None:
    model = torch.nn.Linear(3, 4)
    state = {"w": torch.nn.Parameter(torch.ones(3, 4))}
    with Checkpointer(directory, model, extra={"state": state}) as run:
        run.save(1)
        for weight in (model.weight, state["w"]):
            x = torch.ones(3, 4, requires_grad=True)
            kept = (x * weight.view(3, 4)).sum()
            before = weight._version
            run.restore()
            assert weight._version > before
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                kept.backward()


MEMORY = """
    import resource, sys, torch, remanent.torch
    def tensors(value):
        return {f"w{n}": torch.nn.Parameter(torch.full((16 << 20,), float(value))) for n in range(5)}
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    model = torch.nn.ParameterDict(tensors(sys.argv[2]))
    run = remanent.torch.Checkpointer(sys.argv[1], model, rng=False)
    before = peak()
    if sys.argv[2] == "1":
        run.save(1)
    else:
        run.restore()
        assert all((tensor == 1).all() for tensor in model.values())
    print(peak() - before)
"""


def test_restore_uses_little_additional_memory(directory: str) -> None:
    for value in (1, 2):
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(MEMORY), directory, str(value)],
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    # In MiB, for a state of 320 MiB.
    assert int(done.stdout) < 100, done.stdout
