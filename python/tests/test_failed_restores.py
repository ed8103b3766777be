"""A restore that fails at any point leaves everything unchanged, or reports what it changed."""

from __future__ import annotations

import copy
import os
import random
import sys
from collections import UserDict
from typing import Any

import pytest

import remanent

torch = pytest.importorskip("torch", reason="torch is not installed")
numpy = pytest.importorskip("numpy", reason="NumPy is not installed")

from kinds import same  # noqa: E402
from test_restored_kinds import History, Resized  # noqa: E402

from remanent._state import put_back  # noqa: E402
from remanent._state.rng import RngLoad, rng_state  # noqa: E402
from remanent.torch import Checkpointer  # noqa: E402

# The tests inject a failure at every STRIDE-th call. Set it to 1 to test each call.
STRIDE = int(os.environ.get("REMANENT_TEST_FAILURE_STRIDE", "41"))


class Loader:
    def __init__(self) -> None:
        self.position, self.seen = 0, [1.0]

    def state_dict(self) -> Any:
        return {"position": self.position, "seen": list(self.seen)}

    def load_state_dict(self, state: Any) -> None:
        self.position = state["position"]
        self.seen[:] = state["seen"]


class OwnLoad(torch.optim.SGD):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)


class Run:
    """A run with every kind of part."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(History(), torch.nn.BatchNorm1d(2), Resized(3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=torch.tensor(0.1))
        schedules = torch.optim.lr_scheduler
        self.scheduler = schedules.SequentialLR(
            self.optimizer, [schedules.StepLR(self.optimizer, 2), schedules.ExponentialLR(self.optimizer, 0.9)], [3])
        own = OwnLoad(self.model.parameters(), lr=0.1, momentum=0.9)
        self.optimizer.register_load_state_dict_post_hook(lambda optimizer: None)
        self.extra: dict[str, Any] = {
            "scaler": torch.amp.GradScaler("cpu"), "loader": Loader(), "own": own,
            "dict": {"w": torch.ones(3), "n": 1, "inner": {"v": [torch.zeros(2), 5]}}, "mapping": UserDict({"a": 1}),
        }

    def train(self) -> None:
        for optimizer in (self.optimizer, self.extra["own"]):
            optimizer.zero_grad()
            self.model[:2](torch.randn(4, 2)).square().sum().backward()
            optimizer.step()
        self.scheduler.step()
        self.model[0].history += b"more"
        self.extra["loader"].position += 1
        self.extra["loader"].seen.append(2.0)
        self.extra["dict"]["w"] += 1
        self.extra["dict"]["n"] += 1
        self.extra["dict"]["inner"]["v"][0] -= 1
        self.extra["mapping"]["a"] += 1
        random.random(), numpy.random.random()

    def states(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, **self.extra}
        states = {name: dict(part) if isinstance(part, (dict, UserDict)) else part.state_dict()
                  for name, part in parts.items()}
        return copy.deepcopy(states | {"rng": rng_state()})


class Injected(Exception):
    pass


def failing_at(number: int, kind: type[BaseException]) -> Any:
    """Returns a replacement of `PutBack.run` that raises an exception at its call number `number` of a function."""
    sound = put_back.PutBack.run
    calls = [0]

    def run(self: Any, load: Any) -> None:
        def count(frame: Any, event: str, arg: Any) -> None:
            # The call of `sys.setprofile` that ends the counting does not belong to the restore.
            if event in ("call", "c_call") and arg is not sys.setprofile:
                calls[0] += 1
                if calls[0] == number:
                    sys.setprofile(None)
                    raise kind(f"injected at call {number}")

        sys.setprofile(count)
        try:
            sound(self, load)
        finally:
            sys.setprofile(None)
            # The failure may have occurred at the end of a `torch.no_grad` block.
            torch.set_grad_enabled(True)

    return run


def named(error: BaseException) -> set[str]:
    """Returns the parts that an error reports as changed."""
    if isinstance(error, remanent.RestoreFailedError):
        return set(error.changed)
    notes = [note for note in getattr(error, "__notes__", ()) if "changed completely or partly: " in note]
    return {name for note in notes for name in note.partition(": ")[2].partition(";")[0].split(", ")}


@pytest.mark.parametrize("kind", [Injected, KeyboardInterrupt])
def test_failure_at_any_call_is_reverted_or_reported(
    directory: str, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    held = Run()
    held.train()
    with Checkpointer(directory, held.model, held.optimizer, held.scheduler, extra=held.extra) as run:
        run.save(1)
        saved = held.states()
        outcomes = set()
        held.train()
        held.train()
        before = held.states()
        assert all(not same(before[name], value) for name, value in saved.items() if name != "scaler")
        number = 1
        while True:
            with monkeypatch.context() as patched:
                patched.setattr(put_back.PutBack, "run", failing_at(number, kind))
                try:
                    run.restore()
                    break
                except (remanent.RestoreFailedError, kind) as error:
                    changed = {name for name, value in held.states().items() if not same(value, before[name])}
                    assert changed <= named(error), (number, changed, str(error))
                    outcomes.add(bool(named(error)))
                    if changed:
                        # The next failures occur in another state: the version, followed by one more step.
                        run.restore()
                        held.train()
                        before = held.states()
            number += STRIDE
        assert outcomes == {False, True} and number > 20 * STRIDE
        run.restore()
        assert all(same(held.states()[name], value) for name, value in saved.items())


class Refuses(Loader):
    def load_state_dict(self, state: Any) -> None:
        raise KeyError("position")


def test_failing_part_leaves_all_parts_unchanged(directory: str) -> None:
    held = Run()
    held.train()
    with Checkpointer(directory, held.model, held.optimizer, held.scheduler, extra=held.extra) as run:
        run.save(1)
    held.train()
    held.extra["loader"] = Refuses()
    before = held.states()
    with Checkpointer(directory, held.model, held.optimizer, held.scheduler, extra=held.extra) as run:
        with pytest.raises(remanent.RestoreFailedError, match="loader: loading its state failed with KeyError") as raised:
            run.restore()
    assert (raised.value.part, raised.value.changed) == ("loader", ("loader",))
    assert isinstance(raised.value.__cause__, KeyError)
    assert all(same(held.states()[name], value) for name, value in before.items())


def test_settings_of_optimizers_and_random_states_are_restored(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Run()
    held.train()
    optimizers = held.optimizer, held.extra["own"]
    set_state, refused = numpy.random.set_state, []

    def refuse_once(state: Any) -> None:
        if not refused:
            refused.append(state)
            raise ValueError("refused")
        set_state(state)

    with Checkpointer(directory, held.model, held.optimizer, held.scheduler, extra=held.extra) as run:
        run.save(1)
        held.train()
        for optimizer in optimizers:
            optimizer.param_groups[0]["weight_decay"] = 0.25
        before = rng_state()
        # The last generator, which is set after the optimizers were restored.
        monkeypatch.setattr(numpy.random, "set_state", refuse_once)
        with pytest.raises(remanent.RestoreFailedError, match="rng: loading its state failed with ValueError") as raised:
            run.restore()
        assert "rng" not in raised.value.changed and same(rng_state(), before)
        assert [optimizer.param_groups[0]["weight_decay"] for optimizer in optimizers] == [0.25, 0.25]
        run.restore()
        assert [optimizer.param_groups[0]["weight_decay"] for optimizer in optimizers] == [0.01, 0]


def test_random_states_of_absent_devices_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[Any] = [torch.full((16,), 9, dtype=torch.uint8)]

    def set_state(state: Any, index: int) -> None:
        states[index] = state

    for name, value in {"is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: 1,
                        "get_rng_state_all": lambda: list(states), "set_rng_state": set_state}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    saved = {**rng_state(), "cuda": [torch.full((16,), at, dtype=torch.uint8) for at in (1, 2)]}
    RngLoad(saved).load()
    assert [state[0].item() for state in states] == [1]
    saved["cuda"] = saved["cuda"][:0]
    RngLoad(saved).load()
    assert [state[0].item() for state in states] == [1]
    saved["cuda"] = [torch.zeros(17, dtype=torch.uint8)]
    with pytest.raises(remanent.InvalidError, match="rng/cuda/0: the version's state has 17 bytes"):
        RngLoad(saved)


@pytest.mark.parametrize("name", ["python", "torch", "numpy"])
def test_rejected_random_state_changes_no_generator(name: str) -> None:
    saved = {**rng_state(), name: torch.zeros(3, dtype=torch.uint8)}
    before = rng_state()
    with pytest.raises(remanent.InvalidError, match=f"rng/{name}: the generator does not accept"):
        RngLoad(saved)
    assert same(rng_state(), before)
