"""Closed objects: every method returns its result, or raises an error that names the closed object and a remedy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import remanent

Call = Callable[[Any], Any]

# The calls that are made on a closed reader.
READS: dict[str, Call] = {
    "lsn": lambda each: each.lsn, "root": lambda each: each.root, "page_count": lambda each: each.page_count,
    "info": lambda each: each.info("k"), "pages": lambda each: each.pages(), "keys": lambda each: each.keys(),
    "get": lambda each: each.get("k"), "read": lambda each: each.read("k"), "part": lambda each: each.read("k", 1, 1),
    "read_into": lambda each: each.read_into("k", bytearray(1)), "array": lambda each: each.array("k"),
    "numpy": lambda each: each.numpy("k"), "[]": lambda each: each["k"], "in": lambda each: "k" in each,
    "iter": lambda each: list(each), "len": lambda each: len(each),
}
STORE: dict[str, Call] = READS | {
    "directory": lambda each: each.directory, "id": lambda each: each.id, "recovered": lambda each: each.recovered,
    "stats": lambda each: each.stats(), "put": lambda each: each.put("k", b""), "batch": lambda each: each.batch(),
    "[]=": lambda each: each.__setitem__("k", b""), "del": lambda each: each.__delitem__("k"),
    "wait_durable": lambda each: each.wait_durable(), "ensure": lambda each: each.ensure(["k"], "host"),
    "prefetch": lambda each: each.prefetch(["k"], "host"), "read_ahead": lambda each: each.read_ahead([["k"]], "host"),
    "promote": lambda each: each.promote(["k"]), "demote": lambda each: each.demote(["k"]),
    "wait_loaded": lambda each: each.wait_loaded(), "view": lambda each: each.view(), "lease": lambda each: each.lease("k"),
    "pin": lambda each: each.pin("k"), "working_copy": lambda each: each.working_copy("k", bytearray(4)),
    "release": lambda each: each.release("k"), "read_many": lambda each: each.read_many(["k"]),
    "read_many_into": lambda each: each.read_many_into(["k"], [bytearray(4)]), "changes": lambda each: each.changes(),
    "blame": lambda each: each.blame("k", 0), "bisect": lambda each: each.bisect(bool, good=1),
    "snapshot": lambda each: each.snapshot(), "prove": lambda each: each.verify_pending_images(),
    "snapshots": lambda each: each.snapshots(), "restore": lambda each: each.restore(1),
    "restore_from_snapshot": lambda each: each.restore_from_snapshot(1),
    "fork": lambda each: each.fork("elsewhere", 1), "prune": lambda each: each.prune(),
    "compare": lambda each: each.compare("k", "k"), "scrub": lambda each: each.scrub(), "audit": lambda each: each.audit(),
    "trim": lambda each: each.trim(),
}
BATCH: dict[str, Call] = {
    "create": lambda each: each.create(1), "create_in": lambda each: each.create_in(bytearray(1)),
    "write": lambda each: each.write("k", 0, b"x"), "write_changes": lambda each: each.write_changes("k", b"a", b"b"),
    "update": lambda each: each.update("k", b"1234"), "write_masked": lambda each: each.write_masked("k", 0, b"\1", b"x"),
    "scatter": lambda each: each.scatter("k", [0], b"x"), "fill": lambda each: each.fill("k", 0, 1, b"x"),
    "resize": lambda each: each.resize("k", 1), "delete": lambda each: each.delete("k"),
    "move_to": lambda each: each.move_to("k", "disk"), "clone_page": lambda each: each.clone_page("k"),
    "copy": lambda each: each.copy("k", 0, 1, "k", 2), "set_metadata": lambda each: each.set_metadata("k", "a", 1),
    "remove_metadata": lambda each: each.remove_metadata("k", "a"), "set_root": lambda each: each.set_root("a", 1),
    "remove_root": lambda each: each.remove_root("a"), "note": lambda each: each.note("text"),
    "expect_epoch": lambda each: each.expect_epoch(1, 1),
}


def refused(each: Any, calls: dict[str, Call], message: str, remedy: str) -> None:
    for name, call in calls.items():
        with pytest.raises(remanent.ClosedError) as caught:
            call(each)
        assert str(caught.value) == message, name
        assert remedy in caught.value.remedy, name


def opened(path: Path) -> remanent.Store:
    store = remanent.Store(path / "s", device="host")
    store["k"] = b"1234"
    return store


def covers(kind: type, calls: dict[str, Call], others: str) -> None:
    """Asserts that each public method is in the table, or among those that work after a close."""
    known = {name.split("(")[0] for name in calls} | set(others.split())
    found = {name for name in dir(kind) if not name.startswith("_")}
    assert found <= known, found - known


def test_closed_store_error_names_store(tmp_path: Path) -> None:
    covers(remanent.Store, STORE, "closed close path commit submit verify_pending_images wait_archived")
    store = opened(tmp_path)
    batch, copy = store.batch(), store.working_copy("k", bytearray(4))
    ticket = store.submit(store.batch())
    read = store.read_many(["k"])
    store.close()
    refused(store, STORE, "the store is closed", "remanent.Store(path)")
    refused(copy, {"reload": lambda each: each.reload()}, "the store is closed", "remanent.Store(path)")
    refused(store, {"commit": lambda each: each.commit(batch)}, "the store is closed", "remanent.Store(path)")
    store.close()
    assert store.closed and store.path and repr(store).endswith("closed)")
    # Batches that were logged and reads that were completed before the close still return their results.
    assert ticket.wait() and ticket.is_acknowledged() and ticket.lsn == 2
    assert read.result()[0] == b"1234" and read.done() and copy.nbytes == 4


def test_closed_view_error_names_view(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        live, past = store.view(), remanent.View(tmp_path / "s")
        live.close(), past.close()
        refused(live, READS, "the view is closed", "store.view()")
        calls = READS | {"id": lambda each: each.id, "base": lambda each: each.base, "blame": lambda each: each.blame("k", 0),
                         "load": lambda each: each.load({"k": bytearray(4)}), "prove": lambda each: each.prove(["k"]),
                         "fork": lambda each: each.fork(tmp_path / "new")}
        covers(remanent.View, calls, "close open_archive")
        refused(past, calls, "the view is closed", "remanent.View(path)")
        live.close(), past.close()


def test_ended_lease_or_pin_error_names_it(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        lease = store.lease("k")
        lease.end()
        pin = store.pin("k")
        pin.end()
        calls: dict[str, Call] = {"address": lambda each: each.address, "descriptor": lambda each: each.descriptor(),
                                  "on": lambda each: each.on(0)}
        covers(remanent.Pin, calls, "end nbytes page")
        refused(pin, calls, "the pin has ended", "store.pin(page)")
        calls |= {"numpy": lambda each: each.numpy(), "memoryview": memoryview, "dlpack": lambda each: each.__dlpack__(),
                  "asarray": lambda each: np.from_dlpack(each)}
        covers(remanent.Lease, calls, "end nbytes info epoch lsn dtype shape")
        refused(lease, calls, "the lease has ended", "store.lease(page)")
        assert lease.nbytes == 4 and pin.nbytes == 4
        lease.end(), pin.end()


def test_used_batch_error_states_reason(tmp_path: Path) -> None:
    covers(remanent.Batch, BATCH, "capture pages lsn")
    with opened(tmp_path) as store:
        copy = store.working_copy("k", bytearray(b"1234"))
        calls = BATCH | {"capture": lambda each: each.capture(copy), "commit": lambda each: store.commit(each),
                         "submit": lambda each: store.submit(each)}
        batch = store.batch()
        batch.create(1)
        store.commit(batch)
        refused(batch, calls, "this batch was already committed as lsn 2", "store.batch()")
        assert batch.lsn == 2 and len(batch.pages) == 1
        failed = store.batch()
        failed.expect_epoch(1, 99)
        with pytest.raises(remanent.ConflictError):
            store.commit(failed)
        refused(failed, calls, "the commit of this batch failed, and nothing was logged", "store.batch()")
        with pytest.raises(ZeroDivisionError), store.batch() as left:
            _ = 1 // 0
        refused(left, calls, "this batch was discarded because its block raised an exception", "store.batch()")
        for each in (store.batch(), failed, left):
            refused(each, {"lsn": lambda each: each.lsn, "pages": lambda each: each.pages}, "the batch is not committed",
                    "commit it first")


def test_closed_stream_error_names_stream(tmp_path: Path) -> None:
    store = opened(tmp_path)
    stream, follower = store.changes(), remanent.Follower(tmp_path / "s")
    stream.close(), follower.close()
    refused(stream, {"next": lambda each: each.next(0)}, "the stream of changes is closed", "store.changes()")
    refused(follower, {"next": lambda each: each.next(0), "iter": lambda each: next(each)}, "the follower is closed",
            "remanent.Follower(path, follower.position)")
    assert list(stream) == [] and follower.position and stream.begin_lsn == 1
    open_stream = store.changes()
    steps = store.read_ahead([["k"]], "host")
    steps.close()
    assert list(steps) == []
    store.close()
    refused(open_stream, {"next": lambda each: each.next(0)}, "the store is closed", "open")
    assert list(open_stream) == []

    async def events() -> list[Any]:
        return [event async for event in stream]

    assert asyncio.run(events()) == []
