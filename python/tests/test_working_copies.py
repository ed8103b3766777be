"""Working copies: caller-owned memory whose changes are captured into pages."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy
import pytest

import remanent

SHADOWS = ["page", "host", "digests"]


def capture(store: remanent.Store, *copies: remanent.WorkingCopy, **given: Any) -> int:
    """Captures in one batch; returns the number of bytes that it logged."""
    before = store.stats()["log_bytes"]
    with store.batch() as batch:
        for copy in copies:
            batch.capture(copy, **given)
    return int(store.stats()["log_bytes"] - before)


@pytest.mark.parametrize("shadow", SHADOWS)
def test_capture_updates_page(tmp_path: Path, shadow: str) -> None:
    weights = numpy.arange(200_000, dtype="<u4")
    with remanent.Store(tmp_path / "store", device="host") as store:
        store["w"] = weights
        copy = store.working_copy("w", weights, width=4, shadow=shadow, load=True)
        assert (copy.page, copy.nbytes) == (store.info("w").page, 800_000)
        assert capture(store, copy) < 1000, "nothing changed"
        for step in range(3):
            weights[7::50_000] = step
            before = store["w"]
            assert numpy.frombuffer(before, "<u4")[7] != step, "until it is captured"
            logged = capture(store, copy)
            assert store["w"] == weights.tobytes()
            assert logged < (5 * 65_536 if shadow == "digests" else 1000)
            assert copy.epoch == store.info("w").epoch
        assert repr(copy) == f"WorkingCopy(page={copy.page}, nbytes=800000, epoch={copy.epoch})"
    with remanent.Store(tmp_path / "store", device="host") as store:
        assert store["w"] == weights.tobytes()


def test_changes_outside_ranges_wait_for_later_capture(tmp_path: Path) -> None:
    memory = bytearray(300_000)
    with remanent.Store(tmp_path / "store", device="host") as store:
        store["k"] = bytes(memory)
        copy = store.working_copy("k", memory)
        memory[10] = memory[200_000] = 1
        capture(store, copy, ranges=[(0, 20), (100, 200)])
        assert (store["k"][10], store["k"][200_000]) == (1, 0)
        capture(store, copy)
        assert store["k"] == memory


@pytest.mark.parametrize("shadow", SHADOWS[1:])
def test_capture_into_page_on_disk(tmp_path: Path, shadow: str) -> None:
    memory = numpy.random.default_rng(1).bytes(8 << 20)
    array = numpy.frombuffer(bytearray(memory), "u1")
    with remanent.Store(tmp_path / "store", device="host") as store:
        with store.batch() as batch:
            batch.create(memory, key="k", place="disk")
        with pytest.raises(remanent.Error, match="no memory to compare"):
            store.working_copy("k", array)
        copy = store.working_copy("k", array, shadow=shadow, load=True)
        assert capture(store, copy) < 1000
        array[5] ^= 1
        assert capture(store, copy) < 70_000
        array ^= 1
        assert capture(store, copy) < 70_000, "all of it goes to a file of its own"
        assert store["k"] == array.tobytes()


def test_capture_after_other_batch_conflicts(tmp_path: Path) -> None:
    memory = bytearray(b"0123456789")
    with remanent.Store(tmp_path / "store", device="host") as store:
        store["k"] = bytes(memory)
        copy = store.working_copy("k", memory)
        with store.batch() as batch:
            batch.write("k", 0, b"!")
        memory[9] = 33
        with pytest.raises(remanent.ConflictError):
            capture(store, copy)
        copy.reload()
        assert memory == b"!123456789"
        memory[9] = 33
        capture(store, copy)
        assert store["k"] == b"!12345678!"


def test_unsuitable_memory_is_rejected(tmp_path: Path) -> None:
    with remanent.Store(tmp_path / "store", device="host") as store:
        store["k"] = bytes(10)
        for refused in (bytearray(9), bytearray(11)):
            with pytest.raises(remanent.MemoryRefusedError):
                store.working_copy("k", refused)
        with pytest.raises(remanent.MemoryRefusedError):
            store.working_copy("k", bytearray(10), width=4)
        with pytest.raises(BufferError):
            store.working_copy("k", bytes(10))
        with pytest.raises(BufferError):
            store.working_copy("k", numpy.zeros(20, "u1")[::2])
        with pytest.raises(TypeError):
            store.working_copy("k", 10)
        with pytest.raises(remanent.InvalidError):
            store.working_copy("k", bytearray(10), shadow="nowhere")
        with pytest.raises(remanent.UnknownKeyError):
            store.working_copy("other", bytearray(10))


def test_copy_keeps_memory_alive(tmp_path: Path) -> None:
    class Memory(numpy.ndarray[Any, Any]):
        pass

    memory = numpy.zeros(100_000, "u1").view(Memory)
    alive = weakref.ref(memory)
    with remanent.Store(tmp_path / "store", device="host") as store:
        store["k"] = bytes(100_000)
        copy = store.working_copy("k", memory, shadow="digests")
        memory[70_000] = 3
        del memory
        gc.collect()
        assert alive() is not None
        capture(store, copy)
        assert store["k"][70_000] == 3
        del copy
        gc.collect()
        assert alive() is None
        # A batch that is not committed keeps its working copies alive.
        memory = numpy.ones(100_000, "u1").view(Memory)
        alive = weakref.ref(memory)
        batch = store.batch()
        batch.capture(store.working_copy("k", memory))
        del memory
        gc.collect()
        assert alive() is not None
        store.commit(batch)
        assert store["k"] == bytes([1]) * 100_000
        del batch
        gc.collect()
        assert alive() is None


def test_copy_of_closed_store_raises(tmp_path: Path) -> None:
    store = remanent.Store(tmp_path / "store", device="host")
    store["k"] = bytes(10)
    copy = store.working_copy("k", bytearray(10))
    store.close()
    assert copy.nbytes == 10
    with pytest.raises(remanent.ClosedError):
        copy.reload()


def test_copy_of_other_store_is_rejected(tmp_path: Path) -> None:
    with (remanent.Store(tmp_path / "one", device="host") as one,
          remanent.Store(tmp_path / "two", device="host") as two):
        one["k"] = two["k"] = bytes(10)
        memory = bytearray(b"0123456789")
        copy = one.working_copy("k", memory)
        batch = two.batch()
        batch.capture(copy)
        with pytest.raises(remanent.MemoryRefusedError):
            two.commit(batch)
        assert two["k"] == bytes(10)
