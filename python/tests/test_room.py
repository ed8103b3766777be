"""Saves that do not wait: the memory that they copy to, and operations that wait for the copies."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from runs import copy_of, state_of

import remanent
from remanent._state import page_tree

torch = pytest.importorskip("torch", reason="torch is not installed")

from remanent._checkpoint import checkpointer, saves  # noqa: E402
from remanent._checkpoint.host_ring import Passage, Room  # noqa: E402
from remanent._tensors.conversion import extents  # noqa: E402
from remanent._tensors.copy_streams import CopyStreams  # noqa: E402
from remanent.torch import Checkpointer  # noqa: E402


def sizes_of(seed: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.choice([0, 1, drawn.randrange(300), drawn.randrange(2000)]) for _ in range(60)]


def fail_after_a_block(store: Any, batch: Any, blocks: Any, *given: Any, **named: Any) -> Any:
    """Replaces `page_tree.put`. Raises an error after the first block."""
    next(iter(blocks))
    raise OSError("as arranged")


def delay_later_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delays the copies that a save makes after its call has returned."""
    sound = Passage.send

    def late(self: Passage, *given: Any, **named: Any) -> None:
        if threading.current_thread().name.startswith("remanent-checkpoint-copy"):
            time.sleep(0.1)
        sound(self, *given, **named)

    monkeypatch.setattr(Passage, "send", late)


@pytest.mark.parametrize("nbytes", [0, 100, 1000, 4000, 1 << 20])
def test_blocks_pass_through_room_unchanged(nbytes: int) -> None:
    for seed in range(5):
        sizes = sizes_of(seed)
        data = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
        expected = [each.clone() for each in data]
        room = Room(nbytes).begin(extents({str(at): each for at, each in enumerate(data)}))
        room.start_writer()
        written: list[Any] = []
        held: list[Any] = []

        def write(room: Passage = room, written: list[Any] = written, held: list[Any] = held) -> None:
            drawn = random.Random(nbytes)
            for block in room.blocks():
                if block is not None:
                    held.append(block.data)
                if block is None or drawn.random() < 0.1:
                    # Simulates a commit, which reads the bytes.
                    written.extend(torch.as_tensor(data).clone() for data in held)
                    held.clear()
                    room.free(room.take())
            written.extend(torch.as_tensor(data).clone() for data in held)
            room.free(room.take())

        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        room.send(page_tree.Block((), each, each.numel()) for each in data)
        room.end()
        # From here on, the state may change.
        for each in data:
            each.fill_(0)
        writer.join(60)
        assert not writer.is_alive() and len(written) == len(expected)
        assert all(torch.equal(found, each) for found, each in zip(written, expected, strict=True)), (seed, nbytes)


@pytest.mark.parametrize("room", [0, 5000, 30_000, 1 << 20])
def test_background_save_succeeds_with_room_for_part_of_state(
    directory: str, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A batch may end while a block is not assigned to it yet. Freeing the batch must not free that block's memory.
    monkeypatch.setattr(page_tree, "_BATCH_BYTES", 9000)
    state = {f"w{number}": torch.randn(size) for number, size in enumerate(sizes_of(9))}
    state["shared"] = state["w3"][:1]
    with Checkpointer(directory, extra={"state": state}, rng=False, room=room) as run:
        expected = {}
        for step in range(4):
            for tensor in state.values():
                tensor.normal_()
            expected[step] = {name: tensor.clone() for name, tensor in state.items()}
            saved = run.save(step, wait=False, name=f"v{step}")
            for tensor in state.values():
                tensor.fill_(7)
        assert saved.lsn == run.versions()[-1].lsn
        for step in range(4):
            assert run.restore(at=f"v{step}") == step
            assert all(torch.equal(state[name], tensor) for name, tensor in expected[step].items()), step


def test_failed_background_save_raises(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"a": torch.ones(1000), "b": torch.ones(1000)}
    with Checkpointer(directory, extra={"state": state}, rng=False, room=5000) as run:
        run.save(1)
        sound = page_tree.put

        # The failure occurs while the state is copied, or after the copy.
        for size in (1000, 10):
            monkeypatch.setattr(page_tree, "put", fail_after_a_block)
            state["a"], state["b"] = torch.zeros(size), torch.zeros(size)
            with pytest.raises(OSError, match="as arranged"):
                run.save(2, wait=False).wait()
            monkeypatch.setattr(page_tree, "put", sound)
            assert run.restore() == 1 and state["a"].sum() == 1000
        blocks = checkpointer.blocks

        def ending(*given: Any, **named: Any) -> Iterator[Any]:
            yield next(blocks(*given, **named))
            raise InterruptedError

        monkeypatch.setattr(checkpointer, "blocks", ending)
        with pytest.raises(InterruptedError):
            run.save(2, wait=False)
        monkeypatch.setattr(checkpointer, "blocks", blocks)
        assert run.restore() == 1
        state["a"].fill_(3)
        run.save(2, wait=False).wait()
        state["a"].fill_(4)
        assert run.restore() == 2 and state["a"].sum() == 3000
    with pytest.raises(remanent.InvalidError):
        Checkpointer(directory, extra={"state": state}, room=-1)


def test_step_of_failed_save_does_not_count(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"a": torch.ones(1000)}
    go_on, sound = threading.Event(), page_tree.put

    def failing(*given: Any, **named: Any) -> Any:
        assert go_on.wait(60)
        raise OSError("as arranged")

    with Checkpointer(directory, extra={"state": state}, rng=False, keep=9) as run:
        run.save(3)
        monkeypatch.setattr(page_tree, "put", failing)
        failed = run.save(10, wait=False)
        with pytest.raises(remanent.InvalidError, match="step: 5 is below 10"):
            run.save(5, wait=False, busy="coalesce")
        left = run.save(12, wait=False, busy="coalesce")
        with pytest.raises(remanent.InvalidError, match="step: 11 is below 12"):
            run.save(11, wait=False, busy="coalesce")
        go_on.set()
        with pytest.raises(OSError, match="as arranged"):
            failed.wait()
        with pytest.raises(OSError, match="as arranged"):
            run.save(12)
        with pytest.raises(OSError, match="as arranged"):
            left.wait()
        # The next call raises a failure that no other call has raised.
        run.save(10, wait=False)
        with pytest.raises(OSError, match="as arranged"):
            run.save(4)
        monkeypatch.setattr(page_tree, "put", sound)
        run.save(4, wait=False)
        with pytest.raises(remanent.InvalidError, match="step: 3 is below 4"):
            run.save(3)
        run.save(5)
        run.restore(3)
        run.save(4)
        assert [version.step for version in run.versions()] == [3, 5, 4]


def test_save_is_refused_while_busy(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"a": torch.ones(1000)}
    go_on, sound = threading.Event(), page_tree.put

    def held(*given: Any, **named: Any) -> Any:
        assert go_on.wait(60)
        return sound(*given, **named)

    monkeypatch.setattr(page_tree, "put", held)
    with Checkpointer(directory, extra={"state": state}, rng=False) as run:
        saved = run.save(1, wait=False, busy="refuse")
        with pytest.raises(remanent.InUseError, match="step 1"):
            run.save(2, wait=False, busy="refuse")
        assert saved.seconds is None and not saved.done()
        go_on.set()
        saved.wait()
        assert saved.done() and saved.seconds is not None and saved.seconds > 0
        run.save(3, busy="refuse")
        with pytest.raises(remanent.InvalidError, match="busy"):
            run.save(4, busy="skip")
        assert [version.step for version in run.versions()] == [1, 3]


def test_coalesced_saves_complete_with_next_save(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"a": torch.ones(1000)}
    turn, sound = threading.Semaphore(0), page_tree.put

    def in_turn(*given: Any, **named: Any) -> Any:
        assert turn.acquire(timeout=60)
        return sound(*given, **named)

    def save(step: int, **named: Any) -> Any:
        state["a"].fill_(step)
        return run.save(step, **{"wait": False, "busy": "coalesce", **named})

    monkeypatch.setattr(page_tree, "put", in_turn)
    with Checkpointer(directory, extra={"state": state}, rng=False) as run:
        first = save(1)
        left = [save(2), save(3)]
        assert (first.version_step, [each.version_step for each in left]) == (1, [None, None])
        for each in left:
            assert not each.done() and not each.wait(0.01) and each.seconds is None
            with pytest.raises(remanent.InUseError, match=f"the save of step {each.step} was left to the next save"):
                each.wait()
        with pytest.raises(remanent.InvalidError, match="is not an integer"):
            save(3.5)
        turn.release()
        first.wait()
        # The previous save is done, so this save is not coalesced.
        fourth = save(4)
        turn.release()
        assert all(each.wait(60) and each.done() and each.lsn == fourth.lsn for each in left)
        assert [each.version_step for each in left] == [4, 4] and left[0].seconds > fourth.seconds
        # Saves with a name and saves with `wait=True` are never coalesced.
        save(5)
        turn.release(3)
        assert save(6, name="six").version_step == 6 and save(7, wait=True).done()
        # If the next save fails, the saves that were coalesced with it fail as well.
        save(8)
        left = [save(9)]
        turn.release()
        run._finish()

        def failing(*given: Any, **named: Any) -> Any:
            raise OSError("as arranged")

        monkeypatch.setattr(page_tree, "put", failing)
        with pytest.raises(OSError, match="as arranged"):
            save(10) and left[0].wait()
        # A failure that one of the two objects has raised is not raised again by the next save.
        monkeypatch.setattr(page_tree, "put", in_turn)
        # The same applies to a save that cannot begin.
        save(10)
        left = [save(10)]
        turn.release()
        run._finish()
        state["odd"] = object()  # type: ignore[assignment]
        with pytest.raises(remanent.RefusedError, match="odd"):
            save(10)
        del state["odd"]
        with pytest.raises(remanent.RefusedError, match="odd"):
            left[0].wait()
        # The restored state is not the state of the coalesced save, so that save fails.
        save(11)
        left = [save(12)]
        turn.release()
        assert run.restore() == 11 and (state["a"] == 11).all()
        with pytest.raises(remanent.InUseError, match="step 12 was left to .*, but `restore` loaded step 11"):
            left[0].wait()
        save(13)
        last = save(14)
        turn.release()
        with pytest.raises(remanent.InUseError, match="step 14 was left to the next save, but no save followed"):
            run.close()
        with pytest.raises(remanent.InUseError, match="no save followed"):
            last.wait()
    with Checkpointer(directory, extra={"state": state}, rng=False) as run:
        assert run.restore() == 13 and (state["a"] == 13).all()


def test_coalesced_saves_wait_for_running_copies(directory: str) -> None:
    model, optimizer = small_run()
    with Checkpointer(directory, model, optimizer, rng=False, overlap=True) as run:
        before = [parameter.detach().clone() for parameter in model.parameters()]
        # The copies of the first save are made only after this wait.
        held = run._sender.submit(threading.Event().wait, 0.5)
        first = run.save(1, wait=False)
        left = run.save(2, wait=False, busy="coalesce")
        left.wait_copied()
        assert held.done() and left.version_step is None
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        first.wait()
        run.save(3)
        assert left.done() and left.version_step == 3
        run.restore(at=1)
        assert all(torch.equal(*pair) for pair in zip(before, model.parameters()))


def small_run(kind: Any = torch.optim.SGD, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 1))
    return model, kind(model.parameters(), lr=0.1, **options)


def take_steps(model: Any, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 30)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("room", [100, 3000, 1 << 20])
def test_step_waits_for_pending_copies(directory: str, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = small_run(momentum=0.9)
    take_steps(model, optimizer, 1)
    delay_later_copies(monkeypatch)
    with Checkpointer(directory, model, optimizer, rng=False, room=room, overlap=True, keep=9) as run:
        expected = {}
        for step in range(3):
            expected[step] = copy_of(state_of(model, optimizer))
            saved = run.save(step, wait=False)
            # The forward pass changes the statistics of the batch normalization.
            take_steps(model, optimizer, 2)
        saved.wait_copied()
        with torch.no_grad():
            model[0].weight.zero_()
        for step in range(3):
            assert run.restore(at=step) == step
            now = state_of(model, optimizer)
            assert all(torch.equal(now[name], tensor) for name, tensor in expected[step].items()), step
    optimizer.step()


def test_step_continues_after_failed_save(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = small_run(torch.optim.AdamW)
    take_steps(model, optimizer, 1)
    with Checkpointer(directory, model, optimizer, room=500, overlap=True) as run:
        run.save(1)
        sound_put, sound_blocks = page_tree.put, checkpointer.blocks

        def ending(*given: Any, **named: Any) -> Iterator[Any]:
            yield next(sound_blocks(*given, **named))
            raise OSError("as arranged")

        for patched in ((page_tree, "put", fail_after_a_block), (checkpointer, "blocks", ending)):
            monkeypatch.setattr(*patched)
            with pytest.raises(OSError, match="as arranged"):
                run.save(2, wait=False).wait()
            take_steps(model, optimizer, 1)
            monkeypatch.setattr(page_tree, "put", sound_put)
            monkeypatch.setattr(checkpointer, "blocks", sound_blocks)
            assert [version.step for version in run.versions()] == [1]
        run.save(3, wait=False).wait()


def test_overlap_rejects_undetectable_steps(directory: str) -> None:
    model, optimizer = small_run(torch.optim.AdamW, capturable=True)
    for given in (optimizer, None):
        with pytest.raises(remanent.InvalidError, match="overlap"):
            Checkpointer(directory, model, given, overlap=True)
    assert not os.path.exists(directory)


def many(value: float) -> dict[str, Any]:
    return {f"w{number:02}": torch.full((1000,), value) for number in range(40)}


def slowly(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Stores batches of few blocks with a slow writer."""
    sound = page_tree.put

    def slow(store: Any, batch: Any, blocks: Any, *given: Any, **named: Any) -> Any:
        def late() -> Iterator[Any]:
            for block in blocks:
                time.sleep(seconds)
                yield block

        return sound(store, batch, late(), *given, **named)

    monkeypatch.setattr(page_tree, "_BATCH_BYTES", 20_000)
    monkeypatch.setattr(page_tree, "put", slow)


def fill(state: dict[str, Any], value: float) -> None:
    for tensor in state.values():
        tensor.fill_(value)


@pytest.fixture
def interrupt() -> Iterator[Any]:
    """Returns a function that interrupts this process after some seconds."""
    # A shell starts its background processes with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def after(*seconds: float) -> None:
        for each in seconds:
            threading.Timer(each, os.kill, (os.getpid(), signal.SIGINT)).start()

    yield after
    signal.signal(signal.SIGINT, before)


def test_wait_for_previous_save_can_be_interrupted(
    directory: str, interrupt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = many(1)
    with Checkpointer(directory, extra={"state": state}, rng=False, room=1 << 20) as run:
        slowly(monkeypatch, 0.02)
        first = run.save(1, wait=False, name="one")
        fill(state, 2)
        interrupt(0.2)
        with pytest.raises(KeyboardInterrupt):
            run.save(2, wait=False)
        with pytest.raises(remanent.InUseError):
            run.save(2, busy="refuse")
        second = run.save(2, wait=False, name="two")
        fill(state, 3)
        assert first.wait() and second.wait()
        for step, name in ((1, "one"), (2, "two")):
            assert run.restore(at=name) == step and all((tensor == step).all() for tensor in state.values())


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("number", range(3))
def test_interrupted_save_leaves_no_thread_running(
    directory: str, number: int, wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = many(1)
    with Checkpointer(directory, extra={"state": state}, rng=False, room=1 << 20) as run:
        slowly(monkeypatch, 0.01)
        # Interrupts the start of the writer, the copies, or the end of the call.
        owner, name = [(run._worker, "submit"), (run, "_copy"), (saves.Reading, "ends")][number]
        sound = getattr(owner, name)

        def interrupted(*given: Any, **named: Any) -> Any:
            monkeypatch.setattr(owner, name, sound)
            sound(*given, **named)
            raise KeyboardInterrupt

        monkeypatch.setattr(owner, name, interrupted)
        if number == 0:
            monkeypatch.setattr(run, "_finish", lambda: None)
        with pytest.raises(KeyboardInterrupt):
            run.save(1, wait=wait)
        fill(state, 2)
        run.save(2, wait=False, name="two").wait()
        fill(state, 3)
        assert run.restore(at="two") == 2 and all((tensor == 2).all() for tensor in state.values())
        assert [version.step for version in run.versions()] in ([2], [1, 2])
        if len(run.versions()) == 2:
            assert run.restore(at=1) == 1 and all((tensor == 1).all() for tensor in state.values())


def test_second_interrupt_does_not_end_wait(directory: str, interrupt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    state, sound = many(1), page_tree.put

    def slow(*given: Any, **named: Any) -> Any:
        done = sound(*given, **named)
        time.sleep(1)
        return done

    monkeypatch.setattr(page_tree, "put", slow)
    with Checkpointer(directory, extra={"state": state}, rng=False) as run:
        interrupt(0.3, 0.6)
        with pytest.raises(KeyboardInterrupt):
            # The commit reads the bytes after all blocks were sent, so they must not have changed by then.
            run.save(1)
        fill(state, 3)
        assert run.restore() == 1 and all((tensor == 1).all() for tensor in state.values())


def test_failed_save_sends_nothing_to_next_save(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = small_run(torch.optim.AdamW)
    take_steps(model, optimizer, 1)
    with Checkpointer(directory, model, optimizer, rng=False, room=1 << 20, overlap=True) as run:
        sound_put, sound_copy = page_tree.put, CopyStreams.copy

        def slow(self: CopyStreams, *given: Any) -> None:
            time.sleep(0.02)
            sound_copy(self, *given)

        def failing(*given: Any, **named: Any) -> Any:
            raise OSError("as arranged")

        monkeypatch.setattr(CopyStreams, "copy", slow)
        monkeypatch.setattr(page_tree, "put", failing)
        with pytest.raises(OSError, match="as arranged"):
            run.save(1, wait=False).wait()
        monkeypatch.setattr(page_tree, "put", sound_put)
        take_steps(model, optimizer, 1)
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        run.save(2)
        names = [array.name for arrays in page_tree.read_manifest(run.store).pages.values() for array in arrays]
        assert len(names) == len(set(names))
        take_steps(model, optimizer, 1)
        assert run.restore() == 2
        assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_buffer_in_parameter_storage_is_copied_first(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flat = torch.zeros(2000)
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(flat[:1000])
    model.register_buffer("mean", flat[1000:])
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    delay_later_copies(monkeypatch)
    with Checkpointer(directory, model, optimizer, overlap=True) as run:
        saved = run.save(1, wait=False)
        model.mean.add_(1)
        saved.wait()
        assert run.restore() == 1 and not model.mean.any()


def test_room_is_allocated_in_any_torch_mode(directory: str) -> None:
    state = {"a": torch.ones(1000)}
    with Checkpointer(directory, extra={"state": state}, rng=False) as run:
        with torch.inference_mode(), torch.device("meta"):
            run.save(1, wait=False).wait()
        state["a"].fill_(2)
        run.save(2, wait=False).wait()
        state["a"].fill_(3)
        with torch.device("meta"):
            assert run.restore() == 2 and (state["a"] == 2).all()


def test_process_exit_finishes_save(directory: str) -> None:
    code = f"""
import time, torch
from remanent._state import page_tree
from remanent.torch import Checkpointer
page_tree._BATCH_BYTES = 1 << 16
state = {{f"a{{number}}": torch.ones(1 << 14) for number in range(40)}}
run = Checkpointer({directory!r}, extra={{"state": state}}, rng=False)
sound = page_tree.put
def slow(store, batch, blocks, *given, **named):
    return sound(store, batch, (time.sleep(0.02) or block for block in blocks), *given, **named)
page_tree.put = slow
run.save(1, wait=False)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    with Checkpointer(directory, rng=False) as run:
        assert [version.step for version in run.versions()] == [1]
