"""Callers' buffers: each call keeps them alive until its last access and no longer, whatever else the caller drops."""

from __future__ import annotations

import ast
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from children import in_child

import remanent
from remanent.kv import BlockCache

LENGTH = 256 << 10
WORK = 60
OLD, NEW = bytes([1]) * LENGTH, bytes([2]) * LENGTH


class Owner(bytearray):
    """Caller-owned memory to which a weak reference can be made; it is freed with its last reference."""


class Taken(NamedTuple):
    """A call that takes bytes from an owner of `NEW`, and whether the owner must live until the commit."""

    call: Callable[[remanent.Batch, Owner], object]
    is_held: bool = False
    expected: bytes = NEW


# All methods of a batch that take bytes, called for the page "old" of ones or for a new page "new".
TAKEN = {
    "create": Taken(lambda batch, owner: batch.create(owner, key="new")),
    "create at_commit": Taken(lambda batch, owner: batch.create(owner, key="new", at_commit=True), is_held=True),
    "create at_commit on disk": Taken(
        lambda batch, owner: batch.create(owner, key="new", at_commit=True, place="disk"), is_held=True),
    "write": Taken(lambda batch, owner: batch.write("old", 0, owner)),
    "write_changes": Taken(lambda batch, owner: batch.write_changes("old", OLD, owner)),
    "write_masked": Taken(lambda batch, owner: batch.write_masked("old", 0, b"\xff" * (LENGTH // 8), owner)),
    "scatter": Taken(lambda batch, owner: batch.scatter("old", list(range(LENGTH)), owner)),
    "update": Taken(lambda batch, owner: batch.update("old", owner), is_held=True),
    "_update_many": Taken(lambda batch, owner: batch._update_many([("old", owner, 1)]), is_held=True),
}


@pytest.fixture
def pages(store: remanent.Store) -> remanent.Store:
    store["old"] = OLD
    return store


# Calls outside of batches that take a buffer and no longer access it when they return.
RETURNED = {"put", "__setitem__", "read_into", "read_many_into", "load"}
# Calls that continue to use the memory; see test_page_memory.py, test_working_copies.py and test_gpu.py.
KEPT = {"create_in", "working_copy", "page_memory", "write of PageMemory"}


def test_tables_list_every_call_with_buffer() -> None:
    stub = ast.parse((Path(remanent.__file__).parent / "_store" / "_native.pyi").read_text())
    found = set()
    for owner in (each for each in stub.body if isinstance(each, ast.ClassDef)):
        for call in (each for each in owner.body if isinstance(each, ast.FunctionDef)):
            given = [*call.args.posonlyargs, *call.args.args, *call.args.kwonlyargs]
            kinds = {each.arg: ast.unparse(each.annotation) for each in given if each.annotation is not None}
            if call.name == "__new__":
                # The default values of the option groups list their options.
                members = {each.value for each in ast.walk(call) if isinstance(each, ast.Constant)}
                found |= {name for name in members if name == "page_memory"}
            elif any("_Bytes" in kind for kind in kinds.values()) or "memory" in kinds or call.name == "load":
                found.add(f"{call.name} of PageMemory" if owner.name == "PageMemory" else call.name)
    assert found == {name.split()[0] for name in TAKEN} | RETURNED | KEPT


@pytest.mark.parametrize("name", TAKEN)
def test_batch_keeps_bytes_until_read(pages: remanent.Store, name: str) -> None:
    owner = Owner(NEW)
    gone = weakref.ref(owner)
    batch = pages.batch()
    TAKEN[name].call(batch, owner)
    del owner
    gc.collect()
    assert (gone() is not None) == TAKEN[name].is_held
    junk = [Owner(b"\xee" * LENGTH) for _ in range(8)]
    pages.commit(batch, ack="durable")
    page = "new" if "new" in pages else "old"
    assert pages[page] == TAKEN[name].expected and junk
    assert gone() is None, "held after the commit"


@pytest.mark.parametrize("end", ["dropped", "failed", "closed"])
@pytest.mark.parametrize("name", [name for name in TAKEN if TAKEN[name].is_held])
def test_uncommitted_batch_frees_bytes(pages: remanent.Store, name: str, end: str) -> None:
    owner = Owner(NEW)
    gone = weakref.ref(owner)
    batch: Any = pages.batch()
    TAKEN[name].call(batch, owner)
    del owner
    if end == "failed":
        batch.delete(77)
        with pytest.raises(remanent.UnknownPageError):
            pages.commit(batch)
    elif end == "closed":
        pages.close()
        with pytest.raises(remanent.ClosedError):
            pages.commit(batch)
    if end != "failed":
        del batch
    assert gone() is None


@pytest.mark.parametrize("name", sorted(RETURNED))
def test_call_accesses_no_buffer_after_return(pages: remanent.Store, name: str) -> None:
    owner = Owner(NEW)
    gone = weakref.ref(owner)
    if name == "load":
        pages.snapshot()
        with remanent.View(pages.path) as view:
            view.load({"old": owner})
    elif name == "put":
        pages.put("new", owner)
    elif name == "__setitem__":
        pages["new"] = owner
    elif name == "read_into":
        pages.read_into("old", owner)
    else:
        pages.read_many_into(["old"], [owner])
    assert owner == (NEW if "new" in pages else OLD)
    del owner
    assert gone() is None


# All objects of the package that export their memory, created from a store with the page "old".
LENT: dict[str, Callable[[remanent.Store], Any]] = {
    "lease": lambda store: memoryview(store.lease("old")),
    "array": lambda store: memoryview(store.array("old")),
    "numpy of an array": lambda store: memoryview(store.numpy("old")),
    "read_many": lambda store: memoryview(store.read_many(["old"]).result()),
    "followed batch": lambda store: memoryview(remanent.Follower(store.path).next(WORK)),
}


@pytest.mark.parametrize("name", LENT)
def test_view_of_lent_memory_keeps_it_unchanged(pages: remanent.Store, name: str) -> None:
    if "numpy" in name:
        pytest.importorskip("numpy")
    view = LENT[name](pages)
    before = bytes(view)
    assert OLD in before
    for number in range(4):
        pages["old"] = bytes([0xEE]) * LENGTH
        pages[f"junk {number}"] = bytes([0xEE]) * LENGTH
    pages.trim()
    gc.collect()
    assert bytes(view) == before
    view.release()
    pages.close()  # raises an error while a lease exists


class Blocked:
    """A cache whose threads wait until the test releases them."""

    def __init__(self, directory: str) -> None:
        self.cache = BlockCache(directory, identity={"model": "m"}, capacity=64 * LENGTH, readers=1)
        self._may_go_on = threading.Event()

    def hold(self) -> None:
        self._may_go_on.clear()
        for threads in (self.cache._writer, self.cache._readers):
            threads.submit(self._may_go_on.wait, WORK)

    def let_go(self) -> None:
        self._may_go_on.set()


@pytest.mark.parametrize("end", ["done", "failed", "cancelled", "closed", "timed out"])
@pytest.mark.parametrize("call", ["store", "load"])
def test_cache_keeps_buffers_until_job_ends(directory: str, call: str, end: str) -> None:
    blocked = Blocked(directory)
    cache = blocked.cache
    cache.store([b"there"], [OLD]).result(WORK)
    owner = Owner(NEW)
    gone = weakref.ref(owner)
    gc.disable()  # memory that only the collector would free counts as leaked
    try:
        blocked.hold()
        job: Any = cache.store([b"new"], [owner]) if call == "store" else cache.load([b"there"], [owner])
        found: list[bytes] = []
        weakref.finalize(owner, lambda: found.append(b"freed"))
        del owner
        assert gone() is not None
        if end == "cancelled":
            assert job.cancel()
        if end == "timed out":
            with pytest.raises(TimeoutError):
                job.result(0)
            assert gone() is not None
        if end == "failed":
            cache._store = None  # type: ignore[assignment]
        store = cache._store
        blocked.let_go()
        if end == "closed":
            cache.close()
        if end == "failed":
            assert job.exception(WORK) is not None
        elif end != "cancelled":
            assert job.result(WORK) == (LENGTH if call == "store" else [True])
        if end == "cancelled":
            cache.drain()
            cache.delete([b"nothing"]).result(WORK)  # after this, the writing thread no longer references the job
            cache.load([], []).result(WORK)
        assert gone() is None and found == [b"freed"]
        if call == "store" and end in ("done", "timed out"):
            assert store.read(b"new") == NEW
    finally:
        gc.enable()


def test_forked_child_ignores_buffers_of_jobs(directory: str) -> None:
    blocked = Blocked(directory)
    blocked.hold()
    owner = Owner(NEW)
    gone = weakref.ref(owner)
    job = blocked.cache.store([b"new"], [owner])
    del owner

    def child() -> None:
        held = gone()
        assert held is not None and held == NEW
        blocked.cache.store([b"of the child"], [OLD])

    assert in_child(child) == "ForkedError"
    blocked.let_go()
    assert job.result(WORK) == LENGTH and gone() is None
    out = bytearray(LENGTH)
    assert blocked.cache.load([b"new"], [out]).result(WORK) == [True] and out == NEW
    blocked.cache.close()


def test_torch_checkpointing_stream_frees_written_buffers(tmp_path: Path) -> None:
    pytest.importorskip("torch_checkpointing")
    from remanent.integrations.torch_checkpointing import RemanentStorageConfig

    storage = RemanentStorageConfig(str(tmp_path)).create_storage()
    owner = Owner(NEW * (40 << 20 >> 18))
    expected = bytes(owner)
    gone = weakref.ref(owner)
    stream = storage.stream_write(tmp_path / "file")
    stream.write(owner)
    del owner
    assert gone() is None
    stream.close()
    with storage.stream_read(tmp_path / "file") as reader:
        out = Owner(expected)
        gone = weakref.ref(out)
        assert reader.readinto(out) == len(expected) and out == expected
        del out
        assert gone() is None
