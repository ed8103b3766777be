"""Many threads use one object of each class: calls return the right bytes or a typed error, and never hang.

With the interpreter's lock, threads switch at many different points; in a free-threaded interpreter they execute the
same call at the same time.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import remanent

numpy = pytest.importorskip("numpy")

Work = Callable[[], object]

# The text of errors that calls may raise while another thread uses the object, apart from the package's own errors.
BUSY = "another thread"


@pytest.fixture(autouse=True)
def threads_take_turns_often() -> Iterator[None]:
    """Makes threads switch often, and prints their stacks if they hang."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    sys.setswitchinterval(interval)


def together(*works: Work) -> None:
    """Runs all functions at the same time in threads, and raises an exception of one of them."""
    failed: list[BaseException] = []
    begin = threading.Barrier(len(works))

    def run(work: Work) -> None:
        begin.wait()
        try:
            work()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def until_closed(call: Work, over: threading.Event | None = None) -> Work:
    """Repeats a call until its object is closed, or `over` is set."""

    def work() -> None:
        try:
            while over is None or not over.is_set():
                call()
        except remanent.ClosedError:
            pass

    return work


def collecting(over: threading.Event) -> Work:
    """Runs the garbage collector repeatedly until the test is over. In a free-threaded interpreter this stops all
    threads, and waits for each that is not within a call of the store.
    """

    def collect() -> None:
        gc.collect()
        time.sleep(0.001)

    return until_closed(collect, over)


def is_busy(error: RuntimeError) -> bool:
    return BUSY in str(error)


def test_threads_share_store(directory: str) -> None:
    store = remanent.Store(directory, device="host", retention={"log_kept": 1 << 20})
    store.put("shared", bytes(5000))
    store.put("far", b"far" * 1000, place="disk")
    written = [0] * 4
    over = threading.Event()

    def writer(number: int) -> Work:
        def put() -> None:
            step = written[number] + 1
            store.put(f"own {number}", bytes([step % 251]) * (100 + step % 50))
            written[number] = step
            with store.batch() as batch:
                batch.write("shared", 0, bytes([step % 251]) * 5000)
                batch.delete(batch.create(b"short-lived"))

        return until_closed(put)

    def uniform(content: Any) -> None:
        assert len(content) >= 100 and len(set(bytes(content))) == 1

    def read() -> None:
        uniform(store["shared"])
        uniform(store.array("shared").numpy())
        out = bytearray(5000)
        assert store.read_into("shared", out) == 5000
        uniform(out)
        try:
            many = store.read_many(["shared", "own 0"]).result()
            uniform(many[0])
            uniform(many.numpy(1))
        except remanent.OutOfBoundsError as error:
            assert error.page == store.info("own 0").page
        assert store.read("far", 3, 3) == b"far" and store.get("none") is None

    def look() -> None:
        infos = {info.key: info for info in store.pages()}
        assert infos["shared"].length == 5000 and store.info("far").page == infos["far"].page
        assert set(store.keys()) >= {"shared", "far"} and "far" in store and len(store) >= 2
        assert store.stats()["places"]["host"]["used"] > 0 and store.lsn > 0 and store.recovered["created"]
        assert repr(store) and store._repr_html_() and store.id and not store.root

    def keep() -> None:
        store.snapshot()
        store.prune()
        store.trim()
        assert store.audit() == [] and store.scrub() == []
        uniform(store.blame("shared", 0, 1)[-1].after * 100)

    def move() -> None:
        store.ensure(["far", "own 1"], "disk")
        store.ensure(["far", "own 1"], "host")
        store.wait_durable()
        assert store.compare("shared", "shared") == (0, None)

    for number in range(4):
        store.put(f"own {number}", bytes(100))

    def close() -> None:
        over.wait(2.5)
        while True:
            try:
                return store.close()
            except remanent.InUseError:
                continue

    together(*map(writer, range(4)), until_closed(read), until_closed(read), until_closed(look), until_closed(keep),
             until_closed(move), close)
    with remanent.Store(directory, device="host") as again:
        for number, step in enumerate(written):
            content = again[f"own {number}"]
            # The last acknowledged value, or the next one, for which the closing store raised an error.
            assert content in [bytes([at % 251]) * (100 + at % 50) for at in (step, step + 1)]
        uniform(again["shared"])
    assert all(step > 0 for step in written)


def test_concurrent_closes_all_return(directory: str) -> None:
    for _ in range(10):
        store = remanent.Store(directory, device="host")
        store["a"] = bytes(1 << 20)
        first = threading.Lock()

        def close() -> None:
            store.close()
            assert store.closed
            if first.acquire(blocking=False):
                # After the call has returned, the directory is unlocked.
                remanent.Store(directory, device="host").close()

        together(*[close] * 4, until_closed(lambda: store.put("a", bytes(1 << 20))),
                 until_closed(lambda: store.snapshot()))


def test_threads_share_batch_under_contention(store: remanent.Store) -> None:
    store["there"] = bytes(64)
    for turn in range(10):
        batch = store.batch()
        common = batch.create(1000, key=f"{turn} common")
        created: list[list[str]] = [[] for _ in range(4)]
        begun, over = threading.Barrier(5), threading.Event()

        def add(number: int) -> Work:
            def work() -> None:
                begun.wait()
                for at in range(10_000):
                    key = f"{turn} {number} {at}"
                    page = batch.create(key.encode(), key=key, metadata={"at": at})
                    created[number].append(key)
                    batch.write(common, number * 100, bytes([number]) * 100)
                    batch.write("there", number, b"!")
                    batch.set_metadata(page, "more", [at])
                    batch.scatter(common, [number * 100 + 1], bytes([number]))
                    batch.fill(common, number * 100, 4, bytes([number]))
                    batch.set_root(f"{number}", at)

            def to_the_end() -> None:
                with pytest.raises(remanent.ClosedError):
                    work()
                # A batch that has ended rejects all operations, from any number of threads.
                for _ in range(100):
                    with pytest.raises(remanent.ClosedError):
                        batch.create(b"late", key="late")

            return to_the_end

        def commit() -> None:
            begun.wait()
            time.sleep(0.002)
            store.commit(batch)
            over.set()

        together(*map(add, range(4)), commit, collecting(over))
        assert len(batch.pages) == len([key for key in store.keys() if str(key).startswith(f"{turn} ")])
        for number, keys in enumerate(created):
            assert all(store[key] == key.encode() for key in keys)
            assert set(store[f"{turn} common"][number * 100:number * 100 + 100]) <= {0, number}
        assert "late" not in store


def test_shared_batch_is_committed_once(store: remanent.Store) -> None:
    for turn in range(15):
        batch = store.batch()
        batch.create(b"once", key=f"{turn}")
        lsns: list[int] = []
        over = threading.Event()

        def commit() -> None:
            try:
                lsns.append(store.commit(batch).lsn)
                over.set()
            except remanent.ClosedError:
                pass

        def ask() -> None:
            while True:
                try:
                    assert batch.lsn and batch.pages
                    return
                except remanent.ClosedError as error:
                    assert "not committed" in str(error)

        together(*[commit] * 4, ask, ask, collecting(over))
        assert lsns == [batch.lsn] == [turn + 1]


def test_batch_is_discarded_during_additions(store: remanent.Store) -> None:
    for _ in range(15):
        batch, content, over = store.batch(), bytearray(100), threading.Event()

        def give_up() -> None:
            with pytest.raises(KeyError):
                with batch:
                    raise KeyError
            over.set()

        together(*[until_closed(lambda: batch.create(content, at_commit=True))] * 3, give_up, collecting(over))
        # No operation holds the bytes any more.
        content.append(1)
    assert len(store) == 0


def test_page_is_updated_once_per_batch(store: remanent.Store) -> None:
    store["k"] = bytes(10_000)
    for turn in range(1, 30):
        batch = store.batch()
        refused: list[str] = []

        def update() -> None:
            try:
                batch.update("k", bytes([turn]) + bytes(9_999))
            except ValueError as error:
                refused.append(str(error))

        together(*[update] * 4)
        store.commit(batch)
        assert store["k"] == bytes([turn]) + bytes(9_999)
        assert refused == ["the batch already contains an update of this page"] * 3


def test_threads_share_ticket(store: remanent.Store) -> None:
    async def awaited(ticket: remanent.Ticket) -> None:
        await asyncio.gather(ticket, ticket.acknowledged("applied"), ticket)

    for turn in range(10):
        batch = store.batch()
        batch.create(bytes(1 << 16), key=f"{turn}")
        ticket = store.submit(batch)

        def wait() -> None:
            assert ticket.wait(60) and ticket.is_acknowledged() and ticket.wait(60, "applied")
            assert ticket.lsn == turn + 1 and ticket.pages == [store.info(f"{turn}").page] and repr(ticket)

        together(wait, wait, lambda: asyncio.run(awaited(ticket)), lambda: asyncio.run(awaited(ticket)))


def test_threads_share_live_view(store: remanent.Store) -> None:
    store["still"], store["moving"] = b"still" * 100, bytes(100)
    for _ in range(20):
        view = store.view()
        over = threading.Event()

        def read() -> None:
            assert view["still"] == b"still" * 100 and view.array("still").nbytes == 500
            assert list(view) == ["still", "moving"] and repr(view) and view.lsn
            try:
                assert len(set(view["moving"])) == 1
            except remanent.OvertakenError:
                pass

        def change() -> None:
            for step in range(20):
                store["moving"] = bytes([step]) * 100
            view.close()

        together(*[until_closed(read, over)] * 3, change, change)
        with pytest.raises(remanent.ClosedError):
            view["still"]


def test_threads_share_view(store: remanent.Store, directory: str) -> None:
    for step in range(20):
        store["k"] = bytes([step]) * 1000
    for at in range(1, 20):
        view = remanent.View(directory, at)
        expected = bytes([at - 1]) * 1000

        def read() -> None:
            out = bytearray(1000)
            view.load({"k": out})
            view.prove(["k"])
            assert out == view["k"] == expected and view.id == store.id
            assert view.blame("k", 5)[-1].after == expected[:1] and view.base is None

        def close() -> None:
            time.sleep(0.002)
            view.close()

        together(*[until_closed(read)] * 4, close, close)


def test_threads_share_lease(store: remanent.Store) -> None:
    store["k"] = expected = bytes(range(250)) * 4
    page = store.info("k").page
    for _ in range(30):
        lease = store.lease("k")

        def look() -> None:
            try:
                with memoryview(lease) as seen:
                    assert seen == expected
                assert bytes(lease.numpy()) == expected
                assert bytes(numpy.from_dlpack(lease)) == expected
                assert lease.info.page == page and lease.address is None and repr(lease)
            except BufferError as error:
                # NumPy wraps the error of the ended lease.
                assert isinstance(error.__cause__, remanent.ClosedError) or "held" in str(error), error

        def end() -> None:
            while True:
                try:
                    lease.end()
                    break
                except BufferError as error:
                    assert "views of the lease's memory still exist" in str(error)
            with pytest.raises(remanent.ClosedError):
                memoryview(lease)

        def change() -> None:
            store["k"] = expected

        together(*[until_closed(look)] * 3, end, end, change)
        # No view is counted any more, so the page can be moved.
        store.ensure(["k"], "disk")
        store.ensure(["k"], "host")


def test_threads_share_pin(store: remanent.Store) -> None:
    store["k"] = bytes(1000)
    for _ in range(30):
        pin = store.pin("k")

        def look() -> None:
            assert pin.address is None and pin.nbytes == 1000 and pin.page and repr(pin)

        def change() -> None:
            for step in range(5):
                store["k"] = bytes([step]) * 1000

        def end() -> None:
            with pytest.raises(remanent.LeasedError):
                store.ensure(["k"], "disk")
            pin.end()

        together(*[until_closed(look)] * 3, change, end)
        store.ensure(["k"], "disk")
        assert store["k"] == bytes([4]) * 1000
        store.ensure(["k"], "host")


def in_turns(call: Callable[[], object]) -> object:
    """Returns the result of the call, which only one thread makes at a time."""
    while True:
        try:
            return call()
        except RuntimeError as error:
            if not is_busy(error):
                raise
            time.sleep(0)


def source_of(kind: str, store: remanent.Store, directory: str) -> Any:
    """Returns a follower of the log, or a change stream of the open store: both return each batch once."""
    return remanent.Follower(directory) if kind == "follower" else store.changes()


@pytest.mark.parametrize("kind", ["follower", "changes"])
def test_threads_share_source(store: remanent.Store, directory: str, kind: str) -> None:
    count = 200
    source = source_of(kind, store, directory)
    seen: list[int] = []

    def is_whole(batch: Any) -> bool:
        if kind == "changes":
            return batch.pages[0].created and batch.pages[0].page == batch.lsn
        kinds = [operation["kind"] for operation in batch.operations]
        return kinds == ["create", "write"] and bytes(batch.lsn) in bytes(memoryview(batch)) and bool(batch.position)

    def read() -> None:
        while len(seen) < count:
            batch: Any = in_turns(lambda: source.next(0.01))
            if batch is not None:
                assert is_whole(batch) and repr(batch)
                seen.append(batch.lsn)

    def write() -> None:
        for lsn in range(1, count + 1):
            store[f"{lsn}"] = bytes(lsn)

    together(read, read, read, write)
    assert sorted(seen) == list(range(1, count + 1))
    if kind == "follower":
        assert remanent.Follower(directory, source.position).next(0) is None

    def close() -> None:
        in_turns(source.close)

    together(*[until_closed(lambda: in_turns(lambda: source.next(0.001)))] * 3, close, close)


@pytest.mark.parametrize("loops", [1, 2])
@pytest.mark.parametrize("kind", ["follower", "changes"])
def test_tasks_share_source(store: remanent.Store, directory: str, kind: str, loops: int) -> None:
    """Exactly one task gets each batch, whatever event loop the task belongs to."""
    count = 150
    source = source_of(kind, store, directory)
    seen: list[int] = []

    async def read() -> None:
        async for batch in source:
            seen.append(batch.lsn)

    async def read_all() -> None:
        tasks = [asyncio.ensure_future(read()) for _ in range(3)]
        while len(seen) < count:
            await asyncio.sleep(0.001)
            for task in tasks:
                if task.done():
                    task.result()
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(ended, asyncio.CancelledError), ended

    def write() -> None:
        for lsn in range(1, count + 1):
            store[f"{lsn}"] = bytes(lsn)

    together(*[lambda: asyncio.run(read_all())] * loops, write)
    assert sorted(seen) == list(range(1, count + 1))


def test_threads_share_replica(store: remanent.Store, directory: str) -> None:
    replica, follower = remanent.Replica(), remanent.Follower(directory)
    over = threading.Event()
    with store.batch() as batch:
        batch.create(bytes(1000), key="k")
    replica.apply(follower.next(10))  # type: ignore[arg-type]

    def follow() -> None:
        for step in range(1, 200):
            store["k"] = bytes([step]) * 1000
            batch = follower.next(10)
            assert batch is not None
            replica.apply(batch)
        over.set()

    def read() -> None:
        assert len(set(replica["k"])) == 1 and len(set(replica.array("k").numpy().tolist())) == 1
        assert replica.position and replica.lsn and len(replica) == 1 and repr(replica)

    together(follow, *[until_closed(read, over)] * 3)
    assert replica["k"] == bytes([199]) * 1000


def test_waiting_replica_read_blocks_no_thread(store: remanent.Store, directory: str) -> None:
    replica, follower = remanent.Replica(), remanent.Follower(directory)
    nbytes = 16 << 20
    with store.batch() as batch:
        batch.create(nbytes, key="k")
    replica.apply(follower.next(10))  # type: ignore[arg-type]
    over = threading.Event()
    ticks = 0

    def tick() -> None:
        nonlocal ticks
        while not over.is_set():
            ticks += 1

    def has_waited_beside_others() -> bool:
        with store.batch() as batch:
            for value in range(20):
                batch.fill("k", 0, nbytes, bytes([value]))
        fills = follower.next(10)
        assert fills is not None
        begun = threading.Event()

        def apply() -> None:
            begun.set()
            replica.apply(fills)

        thread = threading.Thread(target=apply)
        thread.start()
        begun.wait()
        before = ticks
        assert replica.lsn in (fills.lsn - 1, fills.lsn)
        after = ticks
        thread.join()
        # More ticks than one time slice of the interpreter allows, so the other thread ran during the wait.
        return after > before + 10_000

    def look() -> None:
        try:
            # A read before or after the batch is applied does not wait.
            assert any(has_waited_beside_others() for _ in range(20))
        finally:
            over.set()

    together(look, tick)


def test_threads_share_read_many(store: remanent.Store) -> None:
    for number in range(20):
        store[f"{number}"] = bytes([number]) * 10_000
    names = [f"{number}" for number in range(20)]
    expected = [bytes([number]) * 10_000 for number in range(20)]

    async def awaited(read: remanent.ReadMany) -> None:
        for many in await asyncio.gather(_awaited(read), _awaited(read)):
            assert many.tolist() == expected

    for _ in range(10):
        read = store.read_many(names)

        def wait() -> None:
            assert read.wait(60) and read.done()
            many = read.result()
            assert many.tolist() == expected and many[3] == expected[3] and len(many) == 20
            assert bytes(memoryview(many)) == b"".join(expected) and many.numpy(-1, "uint16").size == 5000

        together(wait, wait, lambda: asyncio.run(awaited(read)), lambda: asyncio.run(awaited(read)))


async def _awaited(read: remanent.ReadMany) -> remanent.ManyBytes:
    return await read


def test_threads_share_working_copy(store: remanent.Store) -> None:
    memory = numpy.zeros(10_000, "uint32")
    store["k"] = memory
    for shadow in ("page", "host", "digests"):
        copy = store.working_copy("k", memory, width=4, shadow=shadow)

        def change(number: int) -> Work:
            def work() -> None:
                for step in range(20):
                    memory[number * 1000 + step] += 1
                    try:
                        with store.batch() as batch:
                            batch.capture(copy)
                    except remanent.ConflictError:
                        # Another thread captured first. The changes remain to be captured.
                        pass
                    assert copy.page and copy.nbytes == 40_000 and repr(copy)

            return work

        together(*map(change, range(4)))
        with store.batch() as batch:
            batch.capture(copy)
        assert store["k"] == memory.tobytes()


def test_threads_share_page_memory_and_array(store: remanent.Store) -> None:
    store["k"] = expected = bytes(range(200)) * 10
    array, memory = store.array("k"), store.release("k")

    def use(number: int) -> Work:
        def work() -> None:
            for _ in range(100):
                assert memory.read() == expected and memory.read(number * 4, 4) == expected[number * 4:number * 4 + 4]
                memory.write(number * 4, expected[number * 4:number * 4 + 4])
                with memoryview(array) as seen:
                    assert seen == expected
                assert bytes(numpy.from_dlpack(array)) == bytes(array.numpy()) == expected
                assert repr(memory) and repr(array) and memory.place == "host"

        return work

    together(*map(use, range(4)))


def test_threads_share_prefetch(store: remanent.Store) -> None:
    pages = [store.put(f"{number}", bytes([number]) * 5000, place="disk") for number in range(20)]
    for _ in range(10):
        coming = store.prefetch(pages, "host")
        together(*[lambda: coming.wait(60)] * 3, coming.cancel, lambda: [coming.done() for _ in range(100)],
                 lambda: [store[page] for page in pages])
        assert coming.done()
        store.ensure(pages, "disk")
    assert [store[page] for page in pages] == [bytes([number]) * 5000 for number in range(20)]


def test_threads_share_read_ahead(store: remanent.Store) -> None:
    pages = [store.put(f"{number}", bytes([number]) * 5000, place="disk") for number in range(40)]
    seen: list[int] = []
    ahead = store.read_ahead([[page] for page in pages], "host")

    def step() -> None:
        while True:
            pages: Any = in_turns(lambda: next(ahead, None))
            if pages is None:
                return
            assert store.info(pages[0]).place == "host"
            seen.extend(pages)

    together(step, step, step)
    assert sorted(seen) == pages
    in_turns(ahead.close)


def test_stores_open_and_close_concurrently(tmp_path: Path) -> None:
    """There is one list of open stores, and one queue of the engine's events."""
    heard: list[logging.LogRecord] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record)

    handler, logger = Heard(), logging.getLogger("remanent")
    logger.setLevel(logging.DEBUG)

    def use(number: int) -> Work:
        def work() -> None:
            for step in range(10):
                with remanent.Store(tmp_path / f"{number}", device="host") as store:
                    store["k"] = bytes([step])
                    store.snapshot()
                assert remanent.View(tmp_path / f"{number}")["k"] == bytes([step])

        return work

    def listen() -> None:
        for _ in range(50):
            logger.addHandler(handler)
            remanent.update_logging()
            assert remanent.flush_logging()
            logger.removeHandler(handler)
            remanent.update_logging()

    try:
        together(*map(use, range(4)), listen, listen)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
        remanent.update_logging()


def test_tasks_of_several_event_loops_share_objects(store: remanent.Store) -> None:
    async def put(number: int, step: int) -> None:
        batch = store.batch()
        batch.create(bytes([step]), key=f"{number} {step}")
        await store.submit(batch)

    async def put_all(number: int) -> None:
        await asyncio.gather(*(put(number, step) for step in range(50)))

    together(*[lambda number=number: asyncio.run(put_all(number)) for number in range(4)])  # type: ignore[misc]
    assert len(store) == 200


def test_arguments_may_change_during_call(store: remanent.Store) -> None:
    """Another thread changes lists and dicts during the call that takes them."""
    pages = [store.put(f"{number}", bytes([number])) for number in range(10)]
    names: list[Any] = list(pages)
    values: dict[str, Any] = {"a": 1}
    over = threading.Event()

    def change() -> None:
        for step in range(3000):
            names.append(pages[step % 10])
            values[f"{step % 7}"] = [step]
            names.pop(0)
            values.pop(f"{(step + 3) % 7}", None)
        over.set()

    def use() -> None:
        assert set(store.read_many(names).result().tolist()) <= {bytes([number]) for number in range(10)}
        store.ensure(names, "host")
        with store.batch() as batch:
            batch.create(b"m", metadata=values)
            batch.set_root("values", values)

    together(change, *[until_closed(use, over)] * 3)
