"""Checkpoints with digests: unchanged parts are not read, written or copied."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import remanent

torch = pytest.importorskip("torch", reason="torch is not installed")

from runs import copy_of, state_of  # noqa: E402

from remanent._state import page_tree  # noqa: E402
from remanent._tensors.working_copies import Copies  # noqa: E402
from remanent.torch import Checkpointer  # noqa: E402

CHUNK = 65536


class Adapted(torch.nn.Module):
    """Frozen layers, and a small one that is trained."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.frozen = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, device=device) for _ in range(4)))
        self.frozen.requires_grad_(False)
        self.tied = self.frozen[0].weight
        self.adapter = torch.nn.Linear(1024, 4, device=device)

    def forward(self, x: Any) -> Any:
        return self.adapter(self.frozen(x))


def make(device: str = "cpu") -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Adapted(device)
    return model, torch.optim.AdamW(model.adapter.parameters(), lr=0.01)


def train(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    x = torch.randn(8, 1024, device=model.adapter.weight.device)
    model(x).square().mean().backward()
    optimizer.step()


def equal(state: dict[str, Any], other: dict[str, Any]) -> bool:
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


def folder_bytes(run: Checkpointer) -> int:
    # `versions` waits until the removal of old versions has ended.
    run.versions()
    return sum(file.stat().st_size for file in Path(run.store.path, "pages").iterdir())


@pytest.mark.parametrize("options", [{}, {"wait": False}])
def test_run_continues_without_writing_frozen_layers(directory: str, options: dict[str, Any]) -> None:
    model, optimizer = make()
    states = {}
    with Checkpointer(directory, model, optimizer, keep=3, digests=True, log={"spare_bytes": 0}) as run:
        for step in range(6):
            train(model, optimizer)
            if step == 4:
                model.frozen[2].bias[5] = 7
            states[step] = copy_of(state_of(model, optimizer))
            before, logged = folder_bytes(run), run.store.stats()["log_bytes"]
            saved = run.save(step, **options)
            model.frozen[3].bias.add_(0)
            saved.wait()
            written = run.store.stats()["log_bytes"] - logged + folder_bytes(run) - before
            assert step == 0 or written < 500_000, "of 17 MB"
        for step in (3, 5, 4):
            assert run.restore(step) == step
            assert equal(state_of(model, optimizer), states[step])
        # After a restore, the restored values are saved like any other change.
        run.save(6)
        train(model, optimizer)
        assert run.restore() == 6 and equal(state_of(model, optimizer), states[4])
    model, optimizer = make()
    with Checkpointer(directory, model, optimizer, digests=True) as run:
        assert run.restore() == 6 and equal(state_of(model, optimizer), states[4])
        assert model.tied is model.frozen[0].weight
        train(model, optimizer)
        expected = copy_of(state_of(model, optimizer))
        run.save(7)
        run.restore(6)
        assert run.restore(7) == 7 and equal(state_of(model, optimizer), expected)
    # A run without digests can continue.
    model, optimizer = make()
    with Checkpointer(directory, model, optimizer) as run:
        assert run.restore() == 7 and equal(state_of(model, optimizer), expected)


def test_only_changed_chunks_are_written(directory: str) -> None:
    state = {"w": torch.randn(400 * CHUNK // 4)}
    changed = [0, 3, 4, 77, 399]
    # The changes of one save fit in this memory, but not those of two saves.
    options: dict[str, Any] = {"keep": 20, "log": {"spare_bytes": 0}, "memory": {"budget": {"disk": 1200 << 10}}}
    with Checkpointer(directory, extra={"state": state}, rng=False, digests=True, **options) as run:
        run.save(0)
        run.save(1)
        for step in range(2, 5):
            for chunk in changed:
                state["w"][chunk * CHUNK // 4 + step] = step
            logged, before = run.store.stats()["log_bytes"], folder_bytes(run)
            run.save(step)
            logged = run.store.stats()["log_bytes"] - logged
            assert len(changed) * CHUNK <= logged < len(changed) * CHUNK * 1.02 + 30_000
            # A snapshot writes the changed parts of a page once more if the page's base image is kept.
            assert folder_bytes(run) - before < 3 * len(changed) * CHUNK
        expected = state["w"].clone()
        state["w"].zero_()
        assert run.restore() == 4 and torch.equal(state["w"], expected)


@pytest.mark.parametrize("keep", [1, 20])
def test_changes_beyond_memory_limit_are_written(directory: str, keep: int) -> None:
    state = {f"w{at}": torch.randn(20 * CHUNK // 4) for at in range(8)}
    budget = {"disk": 4 << 20}
    with Checkpointer(directory, extra={"state": state}, rng=False, keep=keep, digests=True,
                      memory={"budget": budget}) as run:
        for step, count in enumerate([0, 3, 3, 3, 5, 20, 3]):
            for tensor in state.values():
                tensor.view(20, -1)[:count] += 1
            run.save(step)
        expected = copy_of(state)
        for tensor in state.values():
            tensor.zero_()
        assert run.restore() == 6 and equal(state, expected)


def test_tensors_may_be_added_removed_and_reshaped(directory: str) -> None:
    state: dict[str, Any] = {}
    with Checkpointer(directory, extra={"state": state}, rng=False, keep=20, digests=True) as run:
        kept = []
        for step in range(12):
            torch.manual_seed(step)
            state["grows"] = torch.randn(1000 * step + 1)
            state["stays"] = state.get("stays", torch.zeros(100_000))
            state["stays"][step::1000] += 1
            state[f"new {step}"] = torch.randn(20_000)
            state.pop(f"new {step - 3}", None)
            base = torch.randn(300, 300)
            state["views"] = [base[:100], base[50:150], base.T]
            state["apart"] = torch.randn(300, 100).T
            state["empty"], state["scalar"] = torch.empty(0, 3), torch.tensor(step)
            state["kind"] = torch.randn(5000).to([torch.float32, torch.bfloat16, torch.complex128][step % 3])
            kept.append({name: [each.clone() for each in value] if isinstance(value, list) else value.clone()
                         for name, value in state.items()})
            run.save(step)
            # The tensor is packed again at each save, so its memory is different each time and cannot be captured.
            assert run._copies is not None and "state/apart" not in run._copies._held
            assert "state/grows" in run._copies._held
        for step, expected in enumerate(kept):
            run.restore(step)
            assert state.keys() == expected.keys()
            for name, value in expected.items():
                found = state[name]
                pairs = zip(found, value, strict=True) if isinstance(value, list) else [(found, value)]
                assert all(torch.equal(one, other) for one, other in pairs), (step, name)
            views = state["views"]
            assert views[0].untyped_storage().data_ptr() == views[2].untyped_storage().data_ptr()


@pytest.mark.parametrize("room", [50_000, 1 << 30])
def test_state_may_change_after_save_returns(directory: str, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    # Each save consists of several batches, and tensors that are not captured are copied to the room.
    monkeypatch.setattr(page_tree, "_BATCH_BYTES", 20_000)
    sound = page_tree.update

    def late(*given: Any, **named: Any) -> bool:
        time.sleep(0.005)
        return sound(*given, **named)

    monkeypatch.setattr(page_tree, "update", late)
    state = {f"w{at}": torch.full([10_000 + at], float(at)) for at in range(20)}
    state |= {f"t{at}": torch.full([500, 10 + at], float(at)).T for at in range(20)}
    with Checkpointer(directory, extra={"state": state}, rng=False, digests=True, room=room) as run:
        for step in range(8):
            expected = copy_of(state)
            saved = run.save(step, wait=False)
            for tensor in state.values():
                tensor += 1
            saved.wait()
            changed = copy_of(state)
            run.restore()
            assert equal(state, expected)
            state.update(changed)


@pytest.mark.parametrize("wait", [True, False])
def test_failed_save_keeps_previous_version(directory: str, monkeypatch: pytest.MonkeyPatch, wait: bool) -> None:
    monkeypatch.setattr(page_tree, "_BATCH_BYTES", 60_000)
    state = {f"w{at}": torch.full([10_000], float(at)) for at in range(6)}
    sound = Copies.capture
    with Checkpointer(directory, extra={"state": state}, rng=False, digests=True) as run:
        run.save(0)
        before = copy_of(state)
        ended = set()
        for count in range(8):
            # The new tensor comes first, so that its capture has begun when that of another tensor fails.
            others = copy_of(state)
            state.clear()
            state[f"new {count}"] = torch.ones(10_000)
            state.update(others)
            for tensor in state.values():
                tensor += 1
            calls: Iterator[int] = iter(range(100))

            def failing(self: Copies, *given: Any, calls: Iterator[int] = calls, count: int = count) -> None:
                if next(calls) == count:
                    raise InterruptedError
                sound(self, *given)

            monkeypatch.setattr(Copies, "capture", failing)
            with pytest.raises(InterruptedError):
                run.save(1, wait=wait)
            monkeypatch.setattr(Copies, "capture", sound)
            ended.add("saving" in run.store.root)
            changed = copy_of(state)
            assert run.restore() == 0 and equal(state, before)
            state.clear()
            state.update(changed)
        assert ended == {False, True}
        run.save(1)
        expected = copy_of(state)
        state.clear()
        assert run.restore() == 1 and equal(state, expected) and "saving" not in run.store.root


def test_small_tensors_are_saved_with_many_changes(directory: str) -> None:
    state = {f"w{at}": torch.randn(25 * CHUNK // 4) for at in range(8)}
    state |= {f"small {at}": torch.zeros(64) for at in range(100)}
    state |= {f"packed {at}": torch.zeros(10, 20).T for at in range(100)}
    with Checkpointer(directory, extra={"state": state}, rng=False, digests=True,
                      memory={"budget": {"disk": 8 << 20}}) as run:
        for step in range(6):
            for name, tensor in state.items():
                (tensor.view(25, -1)[:5] if name.startswith("w") else tensor).add_(1)
            run.save(step)
        expected = copy_of(state)
        state.clear()
        assert run.restore() == 5 and equal(state, expected)


def test_overlapping_tensors_of_several_widths_are_saved(directory: str) -> None:
    base = torch.zeros(200_101, dtype=torch.uint8)
    state = {"a": base[:200_000].view(torch.float32), "b": base[1:], "c": base[:0]}
    with Checkpointer(directory, extra={"state": state}, rng=False, digests=True) as run:
        for step in range(3):
            base[step::1000] = step
            run.save(step)
        expected = copy_of(state)
        state.clear()
        assert run.restore() == 2 and equal(state, expected)


def test_other_device_and_forked_child_are_rejected(directory: str) -> None:
    with pytest.raises(remanent.InvalidError, match="device"):
        Checkpointer(directory, extra={"state": {}}, digests=True, device="host")
    with Checkpointer(directory, extra={"state": {"a": torch.ones(3)}}, rng=False, digests=True) as run:
        run.save(0)
        child = os.fork()
        if child == 0:
            try:
                run.save(1)
            except remanent.ForkedError:
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        run.save(1)


def test_captured_memory_is_released(directory: str) -> None:
    state = {"a": torch.randn(100_000), "b": torch.randn(100_000)}
    with Checkpointer(directory, extra={"state": state}, rng=False, digests=True) as run:
        run.save(0)
        assert run._copies is not None and len(run._copies._held) == 2
        del state["a"]
        run.save(1)
        assert len(run._copies._held) == 1
        # A tensor that must be packed is no longer captured, although its page stays.
        state["c"] = torch.randn(100_000)
        run.save(2)
        state["b"] = torch.randn(300, 300).T
        run.save(3)
        assert run._copies._held.keys() == {"state/c"}
        run.restore()
        assert not run._copies._held
        run.save(4)
        assert run._copies._held
    assert not run._copies._held
