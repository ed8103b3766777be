"""Change streams."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable

import pytest
from children import in_child, run_script

import remanent


def told(stream: remanent.ChangeStream) -> remanent.AppliedBatch:
    event = stream.next(60)
    assert isinstance(event, remanent.AppliedBatch), event
    return event


def test_stream_reports_changes_of_each_batch(store: remanent.Store) -> None:
    store["before"] = b"x"
    with store.changes() as changes:
        assert changes.begin_lsn == 1 and changes.next(0) is None and changes.next(0.01) is None
        with store.batch() as batch:
            batch.create(100, key="a")
        page = store.info("a").page
        created = told(changes)
        assert created.lsn == 2 and not created.root_changed and repr(created) == "AppliedBatch(lsn=2, pages=1)"
        (change,) = created.pages
        assert (change.page, change.epoch, change.created, change.ranges) == (page, 1, True, [])
        with store.batch() as batch:
            batch.write("a", 10, b"abc")
            batch.write("a", 13, b"de")
            batch.write("a", 50, b"f")
            batch.set_metadata("a", "n", 1)
            batch.set_root("step", 1)
        written = told(changes)
        (change,) = written.pages
        assert written.root_changed and change.ranges == [(10, 15), (50, 51)] and change.metadata_changed
        assert not change.created and not change.deleted and change.length is None and change.place is None
        assert repr(change) == f"AppliedPage(page={page}, epoch=2, changes=written+metadata)"
        with store.batch() as batch:
            batch.resize("a", 40)
            batch.move_to("a", "pinned")
        (change,) = told(changes).pages
        assert (change.length, change.place) == (40, "pinned")
        del store["a"]
        (change,) = told(changes).pages
        assert change.deleted and change.page == page
        lsn = store.restore(2)
        lagged = changes.next(60)
        assert isinstance(lagged, remanent.Lagged)
        assert lagged.lsn == lsn and repr(lagged) == f"Lagged(lsn={lsn})"
        store["b"] = b"y"
        assert told(changes).lsn == lsn + 1
    with pytest.raises(remanent.ClosedError):
        changes.next(0)
    assert list(changes) == []


def test_slow_consumer_receives_lagged(store: remanent.Store) -> None:
    store["a"] = bytes(64 << 10)
    changes = store.changes()
    for _ in range(3):
        with store.batch() as batch:
            for index in range(0, 60000, 2):
                batch.write("a", index, b"x")
    # A batch is reported after it is acknowledged as applied, and before the next batch that is then submitted.
    for note in ("more", "and more"):
        store.commit(store.batch(note=note), ack="applied")
    first = told(changes)
    assert first.lsn == 2 and len(first.pages[0].ranges) == 30000
    assert told(changes).lsn == 3
    lagged = changes.next(60)
    assert isinstance(lagged, remanent.Lagged) and lagged.lsn == 4
    store["b"] = b"y"
    # The event of the last note is either within the gap or reported after it.
    after = told(changes)
    while after.lsn < 7:
        after = told(changes)
    assert after.lsn == 7


def test_iterator_ends_when_store_closes(directory: str) -> None:
    store = remanent.Store(directory, device="host")
    changes, seen = store.changes(), []
    waiting = threading.Thread(target=lambda: seen.extend(changes))
    waiting.start()
    for n in range(5):
        store["a"] = bytes([n])
    store.close()
    waiting.join(60)
    assert not waiting.is_alive() and [batch.lsn for batch in seen] == [1, 2, 3, 4, 5]
    with pytest.raises(remanent.ClosedError):
        changes.next(0)
    # The existing stream does not keep the directory locked.
    with remanent.Store(directory, device="host") as store:
        assert store.lsn == 5
        with pytest.raises(remanent.ClosedError):
            changes.next(0)


def test_stream_has_one_reader(store: remanent.Store) -> None:
    changes = store.changes()
    waiting = threading.Thread(target=lambda: changes.next(60))
    waiting.start()
    with pytest.raises(RuntimeError):
        while True:
            changes.next(0)
    store["a"] = b"x"
    waiting.join(60)
    assert not waiting.is_alive()


def test_async_iteration_loses_no_event(store: remanent.Store) -> None:
    changes = store.changes()

    async def called_off() -> None:
        waiting = asyncio.ensure_future(changes.__anext__())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    async def three() -> list[int]:
        await called_off()
        store["a"] = b"1"
        await called_off()
        seen = []
        async for batch in changes:
            seen.append(batch.lsn)
            if len(seen) == 3:
                break
            store["a"] = b"2"
        return seen

    async def to_the_end() -> list[int]:
        return [batch.lsn async for batch in changes]

    store["a"] = b"0"
    assert asyncio.run(three()) == [1, 2, 3]
    store["a"] = b"3"
    store.close()
    assert asyncio.run(to_the_end()) == [4, 5]


def test_forked_child_raises_forked_error(store: remanent.Store, directory: str) -> None:
    changes = store.changes()
    uses: list[Callable[[], object]] = [
        lambda: changes.next(0), lambda: next(changes), lambda: changes.close(), lambda: store.changes(),
    ]
    for use in uses:
        assert in_child(lambda: use() and None) == "ForkedError"

    async def use_own() -> None:
        with remanent.Store(directory + "2") as own:
            changes = own.changes()
            own["a"] = b"x"
            async for batch in changes:
                assert batch.lsn == 1
                return

    def child() -> None:
        signal.alarm(30)
        asyncio.run(use_own())

    assert in_child(child) == "fine"
    store["a"] = b"x"
    assert told(changes).lsn == 1


def test_ctrl_c_ends_wait(directory: str) -> None:
    done = run_script("""
        import os, signal, sys, threading, remanent
        # A process that was started in the background ignores SIGINT by default.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        store = remanent.Store(sys.argv[1])
        changes = store.changes()
        def interrupt():
            # Raises RuntimeError once the main thread is waiting.
            pause = threading.Event()
            try:
                while True:
                    pause.wait(0.001)
                    changes.next(0)
            except RuntimeError:
                os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=interrupt).start()
        while True:
            try:
                next(changes)
            except RuntimeError:
                continue
            except KeyboardInterrupt:
                print("interrupted")
                break
        store["a"] = b"x"
        print(changes.next(60).lsn)
    """, directory)
    assert done.stdout == "interrupted\n1\n" and done.returncode == 0, done


@pytest.mark.parametrize("threaded", [False, True])
def test_interpreter_exits_with_open_stream(directory: str, threaded: bool) -> None:
    waits = "threading.Thread(target=lambda: list(changes), daemon=True).start()" if threaded else "pass"
    done = run_script(f"""
        import sys, threading, remanent
        store = remanent.Store(sys.argv[1])
        changes = store.changes()
        {waits}
        store["a"] = b"x"
    """, directory)
    assert (done.returncode, done.stderr) == (0, "")
    with remanent.Store(directory) as store:
        assert store["a"] == b"x"
