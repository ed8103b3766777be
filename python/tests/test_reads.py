"""Pins, and ranges of many pages read by one call."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest
from children import in_child, run_script

import remanent


def test_pinned_page_keeps_address_during_batches(store: remanent.Store, directory: str) -> None:
    store["a"], store["b"] = b"here", b"there"
    with store.pin("a") as pin:
        assert (pin.page, pin.nbytes) == (store.info("a").page, 4)
        assert pin.address is None, "pages live in the host's ordinary memory"
        with store.batch() as batch:
            batch.write("a", 0, b"new!")
        assert store["a"] == b"new!"

        def change(name: str, *arguments: object) -> None:
            with store.batch() as batch:
                getattr(batch, name)("a", *arguments)

        refused: list[Callable[[], object]] = [
            lambda: change("resize", 8), lambda: change("delete"), lambda: change("move_to", "pinned"),
            lambda: store.lease("a"), lambda: store.restore(1),
        ]
        lsn = store.lsn
        for call in refused:
            with pytest.raises(remanent.LeasedError) as caught:
                call()
            assert caught.value.page == pin.page
        assert store.lsn == lsn and store["a"] == b"new!"
        with pytest.raises(remanent.DeviceError):
            pin.on(0)
        with pytest.raises(remanent.InUseError):
            store.close()
        # A page can be pinned twice, and stays pinned until the last pin ends.
        store.pin("a").end()
        with pytest.raises(remanent.LeasedError):
            change("delete")
    pin.end()
    with pytest.raises(remanent.ClosedError):
        pin.address
    assert repr(pin) == f"Pin(page={pin.page}, nbytes=4)"
    change("resize", 8)
    with store.lease("b"), pytest.raises(remanent.LeasedError):
        store.pin("b")
    with pytest.raises(remanent.UnknownKeyError):
        store.pin("c")
    kept = store.pin("a")
    del kept
    gc.collect()
    change("delete")


def test_pin_block_raises_its_own_exception(store: remanent.Store) -> None:
    store["a"] = b"x"
    with pytest.raises(ZeroDivisionError):
        with store.pin("a"):
            raise ZeroDivisionError
    del store["a"]


def test_read_many_returns_all_ranges(store: remanent.Store) -> None:
    store["a"], store["b"], store["empty"] = b"remanent", b"pages", b""
    page = store.info("b").page
    read = store.read_many(["a", (page, 1), ("a", 2, 3), (store.info("a"), 8), "empty", (b"a", 0, None)])
    assert read.wait() and read.wait(0) and read.done() and repr(read) == "ReadMany(ranges=6)"
    many = read.result()
    assert many.tolist() == [b"remanent", b"ages", b"man", b"", b"", b"remanent"]
    assert (len(many), many.nbytes, many.lsn) == (6, 23, 3) and many[-6] == many[0] == b"remanent"
    assert read.result().tolist() == many.tolist(), "as often as one asks"
    assert list(many) == many.tolist() and repr(many) == "ManyBytes(ranges=6, nbytes=23)"
    view = memoryview(many)
    assert view.readonly and bytes(view) == b"".join(many.tolist())
    for index in (6, -7):
        with pytest.raises(IndexError):
            many[index]
    assert store.read_many([]).result().tolist() == [] and bytes(memoryview(store.read_many([]).result())) == b""
    # The bytes do not change with later commits or when the store is closed.
    store["a"] = b"REMANENT"
    store.close()
    assert many[0] == b"remanent" and bytes(view[:8]) == b"remanent"
    with pytest.raises(remanent.ClosedError):
        store.read_many(["a"])


def test_read_many_exposes_numpy_without_copy(store: remanent.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    with store.batch() as batch:
        batch.create(b"odd", key="odd")
        batch.create(array, key="x", metadata={"dtype": "F32", "shape": [3, 4]})
        batch.create(bytes(4), key="bf", metadata={"dtype": "BF16", "shape": [2]})
        batch.create(b"", key="empty", metadata={"dtype": "F32", "shape": [0, 3]})
    many = store.read_many(["odd", "x", ("x", 16, 16), "bf", "empty"]).result()
    whole, row = many.numpy(1), many.numpy(2)
    assert (whole == array).all() and whole.dtype == np.float32 and (row == array[1]).all()
    assert not whole.flags.writeable and np.shares_memory(whole, np.frombuffer(many, np.uint8))
    assert many.numpy(0).tolist() == list(b"odd") and many.numpy(4).shape == (0, 3)
    assert many.numpy(1, "uint8").shape == (48,) and many.numpy(-4, "F64", [6]).shape == (6,)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(BufferError):
        many.numpy(3)
    for wrong in ({"dtype": "float64", "shape": [5]}, {"dtype": "float99"}):
        with pytest.raises(ValueError):
            many.numpy(1, **wrong)
    del many
    gc.collect()
    assert (whole == array).all(), "the array keeps the buffer"


def test_read_many_into_fills_caller_buffers(store: remanent.Store) -> None:
    store["a"], store["b"] = bytes(range(8)), b"pages"
    out, array = bytearray(b"....."), np.zeros(2, dtype=np.uint32)
    assert store.read_many_into(["b", "a"], [out, array]) == 2
    assert out == b"pages" and array.tobytes() == bytes(range(8))
    out[:] = b"....."
    wrong: list[tuple[list[object], list[object], type[Exception]]] = [
        (["b"], [out, array], ValueError), (["b", "a"], [out], ValueError), (["a"], [out], ValueError),
        (["b"], [b"....."], BufferError), (["b"], ["....."], TypeError), (["b", "c"], [out, array], KeyError),
        ([("b", 1)], [out], ValueError), ([("b", 1, 5)], [out], remanent.OutOfBoundsError),
        ([("b", 6)], [out], remanent.OutOfBoundsError), ([("b", 1, 2, 3)], [out], TypeError), ([1.5], [out], TypeError),
        ([("b", 2**64 - 1, 2**64 - 1)], [out], remanent.OutOfBoundsError), ([77], [out], remanent.UnknownPageError),
    ]
    for pages, outs, error in wrong:
        with pytest.raises(error):
            store.read_many_into(pages, outs)
    assert out == b"....."


def test_read_many_reads_state_of_one_batch(store: remanent.Store) -> None:
    pages = [store.put(f"k{n}", bytes(1000)) for n in range(8)]
    done = threading.Event()

    def write() -> None:
        step = 0
        while not done.is_set():
            step = (step + 1) % 256
            with store.batch() as batch:
                for page in pages:
                    batch.write(page, 0, bytes([step]) * 1000)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = set()
        for _ in range(300):
            before = store.lsn
            many = store.read_many(pages).result()
            assert len(set(many.tolist())) == 1, "a mix of batches"
            assert many.lsn >= before
            seen.add(many.lsn)
    finally:
        done.set()
        writer.join()


def test_read_many_can_be_awaited(store: remanent.Store) -> None:
    for n in range(20):
        store[f"k{n}"] = bytes([n]) * 100_000

    async def one(number: int) -> bytes:
        many = await store.read_many([f"k{number}"])
        return many[0][:1]

    async def all_of_them() -> None:
        assert await asyncio.gather(*(one(number) for number in range(20))) == [bytes([n]) for n in range(20)]
        # Several tasks and a thread wait for the same read, and one of the tasks is canceled.
        read = store.read_many([f"k{n}" for n in range(20)])

        async def wait() -> remanent.ManyBytes:
            return await read

        tasks = [asyncio.ensure_future(wait()) for _ in range(5)]
        thread = threading.Thread(target=read.wait)
        thread.start()
        await asyncio.sleep(0)
        tasks[0].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, remanent.ManyBytes) for result in results[1:])
        thread.join(60)
        assert not thread.is_alive()

    asyncio.run(all_of_them())
    assert asyncio.run(one(3)) == b"\3"


def test_forked_child_raises_forked_error(store: remanent.Store) -> None:
    store["a"] = b"x"
    pin, read = store.pin("a"), store.read_many(["a"])
    many = read.result()
    uses: list[Callable[[], object]] = [
        lambda: pin.address, lambda: pin.end(), lambda: pin.on(0), lambda: read.wait(1), lambda: read.done(),
        lambda: read.result(), lambda: many[0], lambda: many.tolist(), lambda: memoryview(many), lambda: many.lsn,
        lambda: many.numpy(0), lambda: store.read_many(["a"]), lambda: store.pin("a"),
    ]
    for use in uses:
        assert in_child(lambda: use() and None) == "ForkedError"
    # If the child drops a pin, the parent's pin remains.
    with pytest.raises(remanent.LeasedError):
        del store["a"]
    pin.end()
    assert many[0] == b"x"


@pytest.mark.parametrize("held", ["pin = store.pin('a')", "read = store.read_many(['a'])",
                                  "many = store.read_many(['a']).result(); view = memoryview(many)",
                                  "sys.keep = [store.pin('a'), store.read_many(['a']).result()]"])
def test_interpreter_exits_with_live_buffer(directory: str, held: str) -> None:
    with remanent.Store(directory) as store:
        store["a"] = b"x"
    done = run_script(f"import sys, remanent; store = remanent.Store(sys.argv[1]); {held}", directory)
    assert (done.returncode, done.stderr) == (0, "")
    with remanent.Store(directory) as store:
        assert store["a"] == b"x"


def test_view_loads_many_pages(directory: str) -> None:
    rng = np.random.default_rng(2)
    content = {f"p{at}": rng.bytes(length) for at, length in enumerate([5, 0, 70_000, 5 << 20, (4 << 20) + 1])}
    with remanent.Store(directory, device="host") as store:
        with store.batch() as batch:
            for at, (key, value) in enumerate(content.items()):
                batch.create(value or 0, key=key, place="disk" if at % 2 else "host")
        store.snapshot()
        with store.batch() as batch:
            batch.write("p2", 9, b"later")
    content["p2"] = content["p2"][:9] + b"later" + content["p2"][14:]
    view = remanent.View(directory)
    out = {key: bytearray(b"\xee" * len(value)) for key, value in content.items()}
    by_page: dict[object, object] = {view.info(key).page: memory for key, memory in out.items()}
    view.load(by_page)
    assert out == content
    view.prove(content)
    view.prove([view.info("p3"), view.info("p2").page, "p2"])
    for page, raised in ((99, remanent.UnknownPageError), ("p9", KeyError), (None, TypeError)):
        with pytest.raises(raised):
            view.prove(["p0", page])
    view.load({})
    array = np.zeros((7, 10_000), np.uint8)
    view.load({"p2": array}, device="host")
    assert array.tobytes() == content["p2"]
    refused: list[tuple[dict[object, object], str, type[Exception]]] = [
        ({"p0": bytearray(4)}, "host", remanent.OutOfBoundsError),
        ({"p0": bytearray(6)}, "host", remanent.OutOfBoundsError),
        ({"p1": bytearray(1)}, "host", remanent.OutOfBoundsError),
        ({"p0": bytes(5)}, "host", BufferError),
        ({"p0": np.zeros(10, np.uint8)[::2]}, "host", BufferError),
        ({"p9": bytearray(5)}, "host", KeyError),
        ({99: bytearray(5)}, "host", remanent.UnknownPageError),
        ({"p0": bytearray(5)}, "cuda:0", BufferError),
        ({"p0": bytearray(5)}, "auto", ValueError),
        ({"p0": bytearray(5)}, "somewhere", ValueError),
        ({"p0": 5}, "host", TypeError),
        ({"p2": array, "p0": array.reshape(-1)[69_995:]}, "host", remanent.MemoryRefusedError),
    ]
    for pages, device, error in refused:
        with pytest.raises(error):
            view.load(pages, device)
    view.close()
    with pytest.raises(remanent.ClosedError):
        view.load({"p0": bytearray(5)})
