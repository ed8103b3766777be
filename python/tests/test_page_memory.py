"""Pages in caller-owned memory, and page memory that is released to the caller."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import textwrap
import weakref
from typing import Any

import pytest

import remanent

numpy = pytest.importorskip("numpy", reason="NumPy is not installed")


def array(count: int, value: float = 0) -> Any:
    return numpy.full(count, value, "float32")


def tensor(count: int, value: float = 0) -> Any:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    return torch.full((count,), float(value))


MAKERS = [array, tensor]


def bytes_of(memory: Any) -> bytes:
    return numpy.asarray(memory).tobytes()  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", MAKERS)
def test_page_uses_caller_memory(directory: str, make: Any) -> None:
    memory = make(1000, 2)
    with remanent.Store(directory, device="host") as store:
        with store.batch() as batch:
            page = batch.create_in(memory, key="w", metadata={"dtype": "F32", "shape": [1000]})
            # The batch finds its own new page by key, too.
            batch.fill("w", 0, 4, bytes(4))
            batch.scatter(page, [7], numpy.float32([9]).tobytes(), width=4)
        assert store["w"] == bytes_of(memory) and memory[0] == 0 and memory[7] == 9 and memory[8] == 2
        assert store.info("w").place == "host" and store.numpy("w")[7] == 9
        assert store.stats()["places"]["host"]["used"] == 0, "it counts in no budget"
        other = make(10, 3)
        with store.batch() as batch:
            batch.create_in(other, key="zeros", zeros=True)
        assert store["zeros"] == bytes(40) == bytes_of(other)
        # No other page can be created in the same memory.
        for call in (lambda batch: batch.create_in(memory), lambda batch: batch.create_in(memory[10:20])):
            batch = store.batch()
            call(batch)
            with pytest.raises(remanent.MemoryRefusedError):
                store.commit(batch)
        with store.batch(ack="applied") as batch:
            batch.write("w", 4, numpy.float32([5, 6]).tobytes())
        assert list(memory[:4]) == [0, 5, 6, 2]
        assert store.audit() == []
        with store.lease("w") as lease:
            assert lease.nbytes == 4000
        # The next open places the page in the store's own memory.
    memory[0] = 77
    with remanent.Store(directory, device="host") as store:
        assert store.numpy("w")[1] == 5 and store.numpy("w")[0] == 0


@pytest.mark.parametrize("how", ["delete", "resize", "move", "release", "close", "failed", "dropped"])
@pytest.mark.parametrize("make", MAKERS)
def test_page_keeps_caller_memory_alive(directory: str, make: Any, how: str) -> None:
    store = remanent.Store(directory, device="host")
    memory = make(1000, 3)
    gone = weakref.ref(memory)
    if how in ("failed", "dropped"):
        batch = store.batch()
        batch.create_in(memory)
        if how == "failed":
            batch.delete(77)
            with pytest.raises(remanent.UnknownPageError):
                store.commit(batch)
        del memory, batch
    else:
        with store.batch() as batch:
            batch.create_in(memory, key="w")
        del memory, batch
        gc.collect()
        junk = [make(1000, 9) for _ in range(50)]
        assert store["w"] == bytes_of(make(1000, 3)) and junk
    if how in ("delete", "resize", "move"):
        with store.batch(ack="applied") as batch:
            if how == "delete":
                batch.delete("w")
            elif how == "resize":
                batch.resize("w", 8)
            else:
                batch.move_to("w", "disk")
        del batch
    released = store.release("w") if how == "release" else None
    if released is not None:
        assert released.read(4, 4) == numpy.float32([3]).tobytes() and "w" not in store
        released.write(0, b"abcd")
        assert released.read(0, 5)[:4] == b"abcd"
        del released
    if how == "close":
        store.close()
    else:
        store.trim()
    gc.collect()
    # The store had kept a NumPy array itself, and of a tensor the object that the tensor had exported.
    assert gone() is None
    store.close()


def test_objects_without_memory_are_rejected(directory: str) -> None:
    with remanent.Store(directory, device="host") as store:
        batch = store.batch()
        for wrong, error in ((b"only read", BufferError), (7, TypeError), (array(10)[::2], BufferError)):
            with pytest.raises(error):
                batch.create_in(wrong)
        read_only = array(3)
        read_only.flags.writeable = False
        with pytest.raises(BufferError):
            batch.create_in(read_only)
        with pytest.raises(remanent.InvalidError):
            batch.create_in(array(3), key="x" * 65)
        store.commit(batch)
        assert store.page_count == 0


def test_release_removes_page_and_returns_memory(directory: str) -> None:
    with remanent.Store(directory, device="host", memory={"budget": {"host": 4096}}) as store:
        store["w"] = bytes(range(100)) * 40
        with store.lease("w"), pytest.raises(remanent.LeasedError):
            store.release("w")
        store.put("on disk", b"bytes", place="disk")
        with pytest.raises(remanent.DeviceError, match="on disk has no memory"):
            store.release("on disk")
        assert store["on disk"] == b"bytes"
        del store["on disk"]
        memory = store.release("w")
        assert (memory.nbytes, memory.place, memory.address) == (4000, "host", None)
        assert memory.read() == bytes(range(100)) * 40 and memory.read(3990) == bytes(range(90, 100))
        memory.write(3999, b"!")
        assert memory.read(3998) == b"b!" and memory.read(7, 0) == b""
        for call in (lambda: memory.read(4001), lambda: memory.read(0, 4001), lambda: memory.write(3999, b"ab")):
            with pytest.raises(remanent.MemoryRefusedError):
                call()
        assert not hasattr(memory, "__cuda_array_interface__")
        for call in (lambda: store["w"], lambda: store.release("w")):
            with pytest.raises(LookupError):
                call()
        # The memory counts toward the budget until the object is deleted.
        with pytest.raises(remanent.OverBudgetError):
            store["other"] = bytes(4000)
        held = memory
        assert repr(held) == 'PageMemory(place="host", nbytes=4000)'
    # The memory outlives the store.
    assert memory.read(3999) == b"!"
    with remanent.Store(directory, device="host", memory={"budget": {"host": 4096}}) as store:
        assert store.page_count == 0
        store["other"] = bytes(4000)
        del store["other"]


@pytest.mark.parametrize("page_load", ["eager", "on_demand"])
@pytest.mark.parametrize("make", MAKERS)
def test_open_places_pages_in_caller_memory(directory: str, make: Any, page_load: Any) -> None:
    with remanent.Store(directory, device="host") as store:
        with store.batch() as batch:
            batch.create(array(1000, 4), key="a", metadata={"name": "first"})
            batch.create(array(500, 5), key="b")
            batch.create(array(70, 6), key="c", place="disk")
            batch.create(0, key="empty")
        store.snapshot()
        with store.batch() as batch:
            batch.scatter("a", [3], numpy.float32([8]).tobytes(), width=4)
    memory, asked = make(1000), []

    def source(info: remanent.PageInfo) -> Any:
        asked.append((info.key, info.length, info.place, dict(info.metadata)))
        return memory if info.key == "a" else None

    with remanent.Store(directory, device="host", memory={"load": page_load, "page_memory": source}) as store:
        assert store.wait_loaded(60)
        assert memory[3] == 8 and memory[0] == 4 and store["a"] == bytes_of(memory)
        assert {each[0] for each in asked} >= {"a", "b"} and ("a", 4000, "host", {"name": "first", "dtype": "F32", "shape": [1000]}) in asked
        assert "empty" not in {each[0] for each in asked}
        with store.batch(ack="applied") as batch:
            batch.write("a", 0, numpy.float32([1]).tobytes())
        assert memory[0] == 1 and store["b"] == bytes_of(array(500, 5))
    for wrong, error in ((make(999), remanent.MemoryRefusedError), (b"x" * 4000, BufferError), (3, TypeError)):
        with pytest.raises(error):
            remanent.Store(directory, device="host",
                           memory={"page_memory": lambda info: wrong if info.key == "a" else None})
    # The same memory for two pages.
    with pytest.raises(remanent.MemoryRefusedError):
        remanent.Store(directory, device="host", memory={"page_memory": lambda info: memory[:info.length // 4]})
    with remanent.Store(directory, device="host") as store:
        assert store.numpy("a").view("float32")[:4].tolist() == [1, 4, 4, 8]


def test_page_memory_error_ends_open(directory: str, capfd: pytest.CaptureFixture[str]) -> None:
    with remanent.Store(directory, device="host") as store:
        store["a"] = b"bytes"

    def source(info: Any) -> Any:
        raise KeyError(info.key)

    with pytest.raises(KeyError, match="a"):
        remanent.Store(directory, device="host", memory={"page_memory": source})
    assert capfd.readouterr() == ("", "")
    with remanent.Store(directory, device="host", memory={"page_memory": lambda info: None}) as store:
        assert store["a"] == b"bytes"


HELD = """
    import sys, numpy, remanent
    store = remanent.Store(sys.argv[1], device="host")
    with store.batch() as batch:
        batch.create_in(numpy.ones(100_000), key="w")
    with store.batch() as batch:
        batch.create(bytes(500), key="x")
    memory = store.release("x")
    # The interpreter exits with a page in the memory of an object, and with released page memory.
    print("fine", flush=True)
"""


def test_interpreter_exits_with_pages_in_caller_memory(directory: str) -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(HELD), directory], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")
    with remanent.Store(directory, device="host") as store:
        assert store["w"] == numpy.ones(100_000).tobytes() and "x" not in store


class Cuda:
    """A producer that claims to have GPU memory, which is in fact host memory."""

    def __init__(self, count: int) -> None:
        self.memory = ctypes.create_string_buffer(max(count, 1))
        self.count = count

    @property
    def __cuda_array_interface__(self) -> Any:
        return {"data": (ctypes.addressof(self.memory), False), "shape": (self.count,), "typestr": "|u1", "version": 3}


def test_gpu_memory_is_rejected_by_host_store(directory: str) -> None:
    with remanent.Store(directory, device="host") as store:
        store["w"] = b"weights"
        out = bytearray(7)
        for call in (lambda: store.read_into("w", Cuda(7)), lambda: store.read_many_into(["w"], [Cuda(7)]),
                     lambda: store.read_many_into(["w", "w"], [Cuda(7), out]),
                     lambda: remanent.View(directory).read_into("w", Cuda(7)),
                     lambda: store.batch().create_in(Cuda(7))):
            with pytest.raises(BufferError):
                call()
        with pytest.raises(ValueError, match="has 6 bytes, but its range has 7"):
            store.read_many_into(["w"], [Cuda(6)])
        assert out == bytes(7) and store["w"] == b"weights"
        # Empty memory is accepted if the offset is within the page.
        assert store.read_into("w", Cuda(0), 7) == 0
        with pytest.raises(remanent.OutOfBoundsError):
            store.read_into("w", Cuda(0), 8)
    with pytest.raises(remanent.MemoryRefusedError):
        remanent.Store(directory, device="host", memory={"page_memory": lambda info: Cuda(7)})
