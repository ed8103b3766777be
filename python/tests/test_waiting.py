"""Tickets, event loops, Ctrl-C, forks, the interpreter's lock and its end."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from children import in_child, run_script

import remanent


def test_ticket_reports_acknowledgement(store: remanent.Store) -> None:
    batch = store.batch()
    batch.create(4, key="a")
    ticket = store.submit(batch)
    assert ticket.is_acknowledged("logged") and ticket.wait(60) and ticket.is_acknowledged()
    # A wait with a timeout of 0 is only certain to succeed once the batch is applied.
    assert ticket.wait(60, "applied") and ticket.wait(0, "applied")
    assert ticket.pages == batch.pages == [store.info("a").page] and ticket.lsn == batch.lsn == 1
    assert ticket.position.endswith(":1")
    receipt = store.commit(store.batch(note="empty"), ack="durable")
    assert receipt.lsn == 2 and receipt.pages == []
    with pytest.raises(ValueError):
        ticket.wait(1, "soon")
    with pytest.raises(ValueError):
        ticket.wait(float("nan"))


def test_tickets_can_be_awaited(store: remanent.Store) -> None:
    async def put(number: int) -> int:
        batch = store.batch()
        batch.create(bytes([number]), key=f"k{number}")
        ticket = store.submit(batch)
        await ticket
        await ticket.acknowledged("applied")
        assert ticket.is_acknowledged("durable")
        return ticket.lsn

    async def all_of_them() -> list[int]:
        return await asyncio.gather(*(put(number) for number in range(100)))

    assert sorted(asyncio.run(all_of_them())) == list(range(1, 101))
    # Each event loop has its own eventfd.
    assert asyncio.run(put(100)) == 101


def test_canceled_wait_keeps_batch(store: remanent.Store) -> None:
    async def main() -> None:
        ticket = store.submit(store.batch(note="x"))
        task = asyncio.ensure_future(ticket.acknowledged("durable"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await ticket

    asyncio.run(main())


def test_follower_returns_every_batch_once(store: remanent.Store, directory: str) -> None:
    follower = remanent.Follower(directory)
    assert follower.next(0) is None
    replica = remanent.Replica()
    for number in range(5):
        with store.batch(note=f"n{number}") as batch:
            batch.create(bytes([number]) * 3, key=f"k{number}", metadata={"n": number})
            batch.set_root("n", number)
    seen = []
    for followed in follower:
        replica.apply(followed)
        seen.append((followed.lsn, followed.note))
        if len(seen) == 5:
            break
    assert seen == [(n + 1, f"n{n}") for n in range(5)]
    assert list(replica) == [f"k{n}" for n in range(5)] and replica["k3"] == b"\3\3\3" and replica.root == {"n": 4}
    assert replica.position == follower.position
    kinds = [operation["kind"] for operation in followed.operations]
    assert kinds == ["note", "create", "write", "set_root"]
    assert followed.operations[1]["metadata"] == {"n": 4} and followed.operations[2]["bytes"] == b"\4\4\4"
    later = remanent.Follower(directory, follower.position)
    assert later.next(0) is None
    store.restore(2)
    followed = later.next(10)
    assert followed is not None and followed.restored == 2
    assert [info.key for info in followed.restored_pages] == ["k0", "k1"]
    replica.apply(followed)
    assert list(replica) == ["k0", "k1"]
    with pytest.raises(remanent.DivergedError):
        replica.apply(followed)
    snapshot = remanent.Replica(directory)
    assert list(snapshot) == ["k0", "k1"]
    with pytest.raises(ValueError):
        remanent.Follower(directory, "nowhere")
    follower.close()
    with pytest.raises(remanent.ClosedError):
        follower.next(0)


def test_follower_reads_images_of_whole_pages(store: remanent.Store, directory: str) -> None:
    store["big"] = bytes(range(256)) * (64 << 10)
    followed = remanent.Follower(directory).next(10)
    assert followed is not None
    image = next(operation for operation in followed.operations if operation["kind"] == "image")
    assert followed.image(image["page"]) == store["big"]


def test_async_follower_loses_no_batch(store: remanent.Store, directory: str) -> None:
    follower = remanent.Follower(directory)

    async def called_off() -> None:
        # A batch that a thread reads for a canceled task is not lost.
        waiting = asyncio.ensure_future(follower.__anext__())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    async def three() -> list[int]:
        await called_off()
        store["a"] = b"1"
        await called_off()
        seen = []
        async for batch in follower:
            seen.append(batch.lsn)
            if len(seen) == 3:
                return seen
            store["a"] = b"2"
        raise AssertionError("a follower has no end")

    asyncio.run(called_off())
    store["a"] = b"0"
    assert asyncio.run(three()) == [1, 2, 3]


def test_canceled_task_leaves_others_waiting(store: remanent.Store) -> None:
    async def main() -> None:
        # As many tasks as threads, so the next read waits for a free thread.
        first = [asyncio.ensure_future(store.changes().__anext__()) for _ in range(32)]
        stream = store.changes()
        called_off, waiting = (asyncio.ensure_future(stream.__anext__()) for _ in range(2))
        await asyncio.sleep(0.01)
        called_off.cancel()
        await asyncio.sleep(0)
        store["a"] = b"x"
        assert [event.lsn for event in await asyncio.gather(waiting, *first)] == [1] * 33  # type: ignore[union-attr]

    asyncio.run(main())


def test_interpreter_lock_is_free_during_waits(store: remanent.Store, directory: str) -> None:
    store["a"] = b"0"
    follower = remanent.Follower(directory, "snapshot")
    follower.next(0)
    waited = threading.Thread(target=lambda: follower.next(5))
    waited.start()
    with pytest.raises(RuntimeError):
        for _ in range(10_000):
            follower.next(0)
    store["a"] = b"1"
    waited.join(60)
    assert not waited.is_alive()


def test_ctrl_c_ends_wait(directory: str) -> None:
    remanent.Store(directory).close()
    done = run_script("""
        import os, signal, sys, threading, remanent
        # A process that was started in the background ignores SIGINT by default.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        follower = remanent.Follower(sys.argv[1])
        def interrupt():
            # Raises RuntimeError once the main thread is waiting. It may begin to wait between two of these calls.
            pause = threading.Event()
            try:
                while True:
                    pause.wait(0.001)
                    follower.next(0)
            except RuntimeError:
                os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=interrupt).start()
        while True:
            try:
                follower.next()
            except RuntimeError:
                continue
            except KeyboardInterrupt:
                print("interrupted")
                break
    """, directory)
    assert done.stdout == "interrupted\n" and done.returncode == 0, done


def test_forked_child_raises_forked_error(store: remanent.Store, directory: str) -> None:
    store["a"] = b"x"
    ticket, view, past = store.submit(store.batch(note="n")), store.view(), remanent.View(directory)
    lease, batch, follower = store.lease("a"), store.batch(), remanent.Follower(directory)
    uses: list[Callable[[], object]] = [
        lambda: store["a"], lambda: store.lsn, lambda: store.put("a", b"y"), lambda: store.commit(batch),
        lambda: batch.write("a", 0, b"y"), lambda: ticket.wait(1), lambda: ticket.is_acknowledged(), lambda: view["a"],
        lambda: past["a"], lambda: lease.address, lambda: memoryview(lease), lambda: lease.end(),
        lambda: follower.next(0), lambda: store.close(), lambda: store.view(), lambda: store.snapshot(),
        lambda: view.close(), lambda: past.close(), lambda: follower.position,
    ]
    for use in uses:
        assert in_child(lambda: use() and None) == "ForkedError"
    # The children did not change the parent's store, which continues to work.
    assert store["a"] == b"x" and bytes(lease) == b"x" and view["a"] == b"x"
    view.close()
    lease.end()
    assert in_child(lambda: remanent.Store(directory)) == "LockedError"
    assert in_child(lambda: remanent.Store(directory + "2").close()) == "fine"


def test_forked_child_tasks_wait_for_own_stores(store: remanent.Store, directory: str) -> None:
    async def use(path: str, own: remanent.Store) -> None:
        await own.submit(own.batch(note="awaited"))
        async for batch in remanent.Follower(path):
            assert batch.note == "awaited"
            return

    # The parent has threads for its followers, which do not exist in the child.
    asyncio.run(use(directory, store))

    def child() -> None:
        signal.alarm(30)
        with remanent.Store(directory + "2") as own:
            asyncio.run(use(directory + "2", own))

    assert in_child(child) == "fine"


def test_exiting_child_leaves_store_open(store: remanent.Store) -> None:
    store["a"] = b"x"
    pid = os.fork()
    if pid == 0:
        sys.exit = None  # type: ignore[assignment]
        # Runs the exit handlers and then deletes the objects, as at an ordinary exit.
        import atexit

        atexit._run_exitfuncs()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    store["a"] = b"y"
    assert store["a"] == b"y"


@pytest.mark.parametrize("held", ["store = remanent.Store(p)", "store = remanent.Store(p); lease = store.lease('a')",
                                  "store = remanent.Store(p); view = store.view()",
                                  "sys.keep = remanent.Store(p)", "store = remanent.Store(p); store.self = [store]"])
def test_interpreter_exits_with_open_store(directory: str, held: str) -> None:
    with remanent.Store(directory) as store:
        store["a"] = b"x"
    if "self" in held:
        held = "store = remanent.Store(p); cycle = [store]; cycle.append(cycle)"
    done = run_script(f"import sys, remanent; p = sys.argv[1]; {held}; remanent.Store", directory)
    assert (done.returncode, done.stderr) == (0, "")
    with remanent.Store(directory) as store:
        assert store["a"] == b"x"


def test_interpreter_exits_while_threads_wait(directory: str) -> None:
    remanent.Store(directory).close()
    done = run_script("""
        import sys, threading, remanent
        follower = remanent.Follower(sys.argv[1])
        thread = threading.Thread(target=follower.next, daemon=True)
        thread.start()
        store = remanent.Store(sys.argv[1])
        other = threading.Thread(target=lambda: [store.put("a", bytes(100000)) for _ in range(100000)], daemon=True)
        other.start()
        second = remanent.Follower(sys.argv[1])
        def work():
            while True:
                second.next(0.0005)
        threading.Thread(target=work, daemon=True).start()
    """, directory)
    assert done.returncode == 0 and "panicked" not in done.stderr, done
    remanent.Store(directory).close()


def test_threads_share_a_store(store: remanent.Store) -> None:
    def work(number: int) -> None:
        for step in range(50):
            store.put(f"k{number}", bytes([step]) * 100)
            assert store[f"k{number}"] == bytes([step]) * 100

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.lsn == 400 and len(store) == 8


def test_close_waits_for_running_calls(directory: str) -> None:
    store = remanent.Store(directory, device="host")
    failed: list[BaseException] = []

    def work() -> None:
        try:
            while True:
                store.put("a", bytes(1000))
        except remanent.ClosedError:
            pass
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    store.close()
    for thread in threads:
        thread.join(60)
    assert not failed
    remanent.Store(directory).close()


def test_dropped_objects_release_directory(directory: str, tmp_path: Path) -> None:
    store = remanent.Store(directory, device="host")
    store["a"] = b"x"
    lease, view = store.lease("a"), store.view()
    del store, lease, view
    gc.collect()
    remanent.Store(directory).close()
