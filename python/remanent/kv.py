"""A cache of blocks with keys, on disk, that is found again after a restart.

Blocks are the attention keys and values of a stretch of tokens, as inference engines cut them, named by a hash of all
tokens up to their end. The store is the index: what was reported as stored is there after the process was killed,
under its key, and every block is proven by its checksum before it is handed out. `remanent.vllm` and
`remanent.lmcache` are made of it.

>>> from remanent.kv import BlockCache
>>> identity = {"model": "a model", "revision": "1", "dtype": "bfloat16", "tokens": 16, "hash": "sha256"}
>>> with BlockCache(directory, identity=identity, capacity=1 << 20) as cache:
...     cache.store([b"first", b"second"], [b"K" * 4096, b"V" * 4096]).result()
8192

>>> cache, out = BlockCache(directory, identity=identity, capacity=1 << 20), bytearray(4096)
>>> b"first" in cache, b"third" in cache
(True, False)
>>> cache.load([b"first"], [out]).result(), bytes(out[:3])
([True], b'KKK')
>>> cache.close()
>>> try:
...     BlockCache(directory, identity={**identity, "revision": "2"}, capacity=1 << 20)
... except remanent.MismatchError as error:
...     print(error)
the cache holds blocks of another kind: revision is '1' there and '2' here
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, ParamSpec, Self, TypeVar

from remanent._errors import DamagedError, Error, InvalidError, MismatchError, OverBudgetError, StoreIOError
from remanent._native import PageInfo, Store, View

__all__ = ["BlockCache"]

_logger = logging.getLogger("remanent.kv")
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

# The value in the store's root that says of what the blocks are.
_IDENTITY = "identity"
# Values in a block's metadata: its kind; the number of its last use, which rises from use to use; and its key, if
# that is longer than a page's can be.
_KIND = "kind"
_KEY = "key"
_USES = "uses"
_PAGE_KEY_MAX = 64
# Bytes of blocks that one batch stores.
_BATCH_BYTES = 256 << 20
# Bytes of blocks after which a snapshot gives back the space of those that are gone: an eighth of the capacity,
# within these.
_INTERVAL_MIN, _INTERVAL_MAX = 32 << 20, 4 << 30
# Blocks whose use waits for a batch that logs it.
_USES_WAITING_MAX = 4096


@dataclass(slots=True)
class _Block:
    """What is known of a block that is there."""

    nbytes: int
    kind: str | None
    # How often it must stay: for callers, for jobs that read it, for the job that brought it.
    locks: int = 0


@dataclass(slots=True, frozen=True)
class _Task:
    """A block to store, or a buffer to fill, as bytes."""

    key: bytes
    data: memoryview
    kind: str | None


class BlockCache:
    """Blocks of bytes by key, up to `capacity` bytes; those that were not used for longest make room for new ones.

    `path` is the directory of a store of the cache's own, made if there is none. `identity` is everything on which
    the meaning of a block's bytes depends, in plain Python values: blocks of one model are never handed to another. A
    cache with another identity is refused (`MismatchError`), and the message says what differs.

    `capacity` counts bytes of blocks. The directory takes up to twice as much, and up to 1 GiB for the log. If more
    is there than `capacity`, the oldest blocks go.

    `ack` says when blocks count as stored: "logged", the death of the process does not lose them, or "durable", nor
    does a power cut. `readers` threads read blocks from disk.

    `on_stored` and `on_deleted` are called with keys and lengths once a batch has changed what is there, on a thread
    of the cache's: they must not wait for the cache. Its methods can be called from any thread.
    """

    def __init__(self, path: str | os.PathLike[str], *, identity: Mapping[str, Any], capacity: int, readers: int = 4,
                 ack: Literal["logged", "durable"] = "logged",
                 on_stored: Callable[[list[bytes], list[int]], None] | None = None,
                 on_deleted: Callable[[list[bytes], list[int]], None] | None = None) -> None:
        if capacity <= 0 or readers <= 0:
            raise InvalidError(f"a cache needs room and a reader: capacity is {capacity}, readers are {readers}")
        interval = min(max(capacity // 8, _INTERVAL_MIN), _INTERVAL_MAX)
        self._store = _open(path, identity, interval)
        self._space = _Space(self._store, interval)
        self._capacity = capacity
        self._ack: Literal["logged", "durable"] = ack
        self._on_stored, self._on_deleted = on_stored, on_deleted
        # Held for what follows, and never while the store is waited for.
        self._lock = threading.Lock()
        # The block that was not used for longest is the first.
        self._blocks: OrderedDict[bytes, _Block] = OrderedDict()
        self._nbytes = self._locked_nbytes = 0
        # Keys of jobs that store and are not finished, and in how many.
        self._arriving: Counter[bytes] = Counter()
        # Blocks whose use no batch has logged.
        self._used: dict[bytes, None] = {}
        self._jobs: set[Future[Any]] = set()
        # One thread writes: batches that store, delete and log uses follow each other.
        self._writer = ThreadPoolExecutor(1, "remanent-kv-write")
        self._readers = ThreadPoolExecutor(readers, "remanent-kv-read")
        self._uses = 0
        self._read_index()
        if self._nbytes > capacity:
            self._submit(self._writer, self._write_quietly)

    def __contains__(self, key: bytes) -> bool:
        """Whether the block is there. Never waits."""
        return key in self._blocks

    def __len__(self) -> int:
        """The number of blocks that are there."""
        return len(self._blocks)

    def __iter__(self) -> Iterator[bytes]:
        """The keys, those that were not used for longest first."""
        with self._lock:
            return iter(list(self._blocks))

    @property
    def path(self) -> str:
        """The directory."""
        return self._store.path

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that are there."""
        return self._nbytes

    @property
    def capacity(self) -> int:
        """Bytes of blocks that may be there."""
        return self._capacity

    def length(self, key: bytes) -> int | None:
        """The bytes of a block, or None if it is not there. Never waits."""
        block = self._blocks.get(key)
        return None if block is None else block.nbytes

    def is_arriving(self, key: bytes) -> bool:
        """Whether a job that is not finished stores the block. Never waits."""
        return key in self._arriving

    def store(self, keys: Iterable[bytes], blocks: Iterable[Any], kinds: Iterable[str] | None = None) -> Future[int]:
        """Stores blocks. The future holds the bytes of those that were new; the call itself does not wait.

        A block is whatever has the buffer protocol; it must stay as it is until the future is done. A block that is
        there is not written again: equal keys mean equal bytes. Only one of another length or kind is replaced,
        unless it is locked; `kinds` are a word for each block that says how its bytes are meant (type and shape, for
        example). Keys that come first are taken for the beginning of what follows, and stay longer than those after
        them.

        The future fails unless all blocks are there: `OverBudgetError` if they are more than the cache can hold,
        otherwise what the store raised (`DiskFullError`, for example). Some of the blocks may be there then.
        """
        work = _tasks(keys, blocks, kinds)
        with self._lock:
            self._arriving.update(task.key for task in work)
        try:
            return self._submit(self._writer, self._store_all, work)
        except RuntimeError:
            self._arrived(work)
            raise

    def load(self, keys: Iterable[bytes], outs: Iterable[Any],
             kinds: Iterable[str] | None = None) -> Future[list[bool]]:
        """Reads blocks into writable buffers of their lengths. The future holds, for each, whether its buffer has it.

        What the buffer has is proven by the block's checksum. If it says False, the block is not there, is of another
        length or kind than its buffer, or was found damaged and is given up; the buffer may hold anything then. The
        call itself does not wait.
        """
        return self._submit(self._readers, self._load_all, _tasks(keys, outs, kinds))

    def touch(self, keys: Iterable[bytes]) -> None:
        """Says that blocks were used, in the order in which a request uses them. Loading says it, too."""
        with self._lock:
            self._touch(keys)
            is_due = len(self._used) >= _USES_WAITING_MAX
        if is_due:
            with contextlib.suppress(RuntimeError):  # closed meanwhile, which logs them
                self._submit(self._writer, self._write_quietly)

    def lock(self, keys: Iterable[bytes]) -> list[bool]:
        """Keeps blocks from making room for others. Says of each whether it is there, and so locked. Never waits.

        Locks are counted. Each is given back by `unlock`, and none outlives the process.
        """
        with self._lock:
            return [self._lock_one(key) for key in keys]

    def unlock(self, keys: Iterable[bytes]) -> None:
        """Gives locks back. Never waits."""
        with self._lock:
            for key in keys:
                self._unlock_one(key)

    def delete(self, keys: Iterable[bytes]) -> Future[int]:
        """Deletes blocks. The future holds their number; blocks that are locked or not there are left out."""
        return self._submit(self._writer, self._delete_all, list(keys))

    def drain(self) -> None:
        """Waits until all that was begun has ended, well or not."""
        while True:
            with self._lock:
                jobs = list(self._jobs)
            if not jobs:
                return
            for job in jobs:
                job.exception()

    def close(self) -> None:
        """Ends what was begun, and closes the store. What was stored is found by the next `BlockCache`."""
        if self._store.closed:
            return
        self._readers.shutdown()
        with contextlib.suppress(RuntimeError):
            self._submit(self._writer, self._write_quietly)
        self._writer.shutdown()
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<BlockCache {self._store.path}: {len(self)} blocks, {self._nbytes} of {self._capacity} bytes>"

    def _read_index(self) -> None:
        """The pages are their own index: by key, and by the batch that changed them last.

        A batch logs uses, in their order, before it stores. Of what it stores, the first blocks are the last to go.
        """
        def last_use(info: PageInfo) -> tuple[int, bool, int]:
            use = info.metadata.get(_USES)
            return info.lsn, use is None, -info.page if use is None else use

        for info in sorted(self._store.pages(), key=last_use):
            if info.key is not None:
                key = info.metadata.get(_KEY, info.key)
                block = _Block(info.length, info.metadata.get(_KIND))
                self._add(key.encode() if isinstance(key, str) else key, block)
                self._uses = max(self._uses, info.metadata.get(_USES, 0))

    def _submit(self, threads: ThreadPoolExecutor, run: Callable[_Arguments, _Result], *arguments: _Arguments.args,
                **named: _Arguments.kwargs) -> Future[_Result]:
        job = threads.submit(run, *arguments, **named)
        with self._lock:
            self._jobs.add(job)
        job.add_done_callback(self._finished)
        return job

    def _finished(self, job: Future[Any]) -> None:
        with self._lock:
            self._jobs.discard(job)

    def _arrived(self, work: list[_Task]) -> None:
        with self._lock:
            self._arriving.subtract(task.key for task in work)
            for task in work:
                if self._arriving[task.key] <= 0:
                    del self._arriving[task.key]

    # With the lock held.

    def _has(self, task: _Task) -> bool:
        block = self._blocks.get(task.key)
        return block is not None and (block.nbytes, block.kind) == (task.data.nbytes, task.kind)

    def _lock_one(self, key: bytes) -> bool:
        block = self._blocks.get(key)
        if block is None:
            return False
        if block.locks == 0:
            self._locked_nbytes += block.nbytes
        block.locks += 1
        return True

    def _unlock_one(self, key: bytes) -> None:
        block = self._blocks.get(key)
        if block is not None and block.locks > 0:
            block.locks -= 1
            if block.locks == 0:
                self._locked_nbytes -= block.nbytes

    def _touch(self, keys: Iterable[bytes]) -> None:
        for key in reversed(list(keys)):
            if key in self._blocks:
                self._blocks.move_to_end(key)
                self._used.pop(key, None)
                self._used[key] = None

    def _add(self, key: bytes, block: _Block) -> None:
        self._blocks[key] = block
        self._nbytes += block.nbytes
        self._locked_nbytes += block.nbytes if block.locks else 0

    def _remove(self, key: bytes) -> _Block:
        block = self._blocks.pop(key)
        self._used.pop(key, None)
        self._nbytes -= block.nbytes
        self._locked_nbytes -= block.nbytes if block.locks else 0
        return block

    def _make_room(self, nbytes: int) -> dict[bytes, _Block]:
        """Takes blocks out of the index, the oldest first, until so many bytes are free or none can go."""
        excess = self._nbytes + nbytes - self._capacity
        keys = []
        for key, block in self._blocks.items():
            if excess <= 0:
                break
            if block.locks == 0:
                keys.append(key)
                excess -= block.nbytes
        return {key: self._remove(key) for key in keys}

    # On the thread that writes.

    def _store_all(self, work: list[_Task]) -> int:
        staying: list[bytes] = []
        try:
            return sum(self._store_some(some, staying) for some in _in_batches(work))
        finally:
            self.unlock(staying)
            self._arrived(work)

    def _store_some(self, work: list[_Task], staying: list[bytes]) -> int:
        """Stores blocks in one batch. What is there afterwards is in `staying`, and locked."""
        new: dict[bytes, _Task] = {}
        refused = 0
        with self._lock:
            here = [task.key for task in work if self._has(task)]
            self._touch(here)
            staying += [key for key in here if self._lock_one(key)]
            room = self._capacity - self._locked_nbytes
            replaced: dict[bytes, _Block] = {}
            for task in work:
                block = self._blocks.get(task.key)
                if task.key in new or self._has(task):
                    continue
                if task.data.nbytes > room or (block is not None and block.locks > 0):
                    refused += 1
                    continue
                room -= task.data.nbytes
                new[task.key] = task
                if block is not None:
                    replaced[task.key] = self._remove(task.key)
            nbytes = sum(task.data.nbytes for task in new.values())
            out = replaced | self._make_room(nbytes)
        self._write(out, list(new.values()))
        with self._lock:
            for key, task in reversed(new.items()):
                self._add(key, _Block(task.data.nbytes, task.kind, locks=1))
        staying += new
        if new and self._on_stored is not None:
            self._on_stored(list(new), [task.data.nbytes for task in new.values()])
        if refused:
            raise OverBudgetError(f"{refused} of {len(work)} blocks do not fit into the {self._capacity} bytes of the "
                                  "cache beside what must stay", path=self._store.path)
        return nbytes

    def _delete_all(self, keys: list[bytes]) -> int:
        with self._lock:
            out = {key: self._remove(key) for key in dict.fromkeys(keys)
                   if (block := self._blocks.get(key)) is not None and block.locks == 0}
        self._write(out, [])
        return len(out)

    def _write_quietly(self) -> None:
        """Logs uses, and brings the cache down to its capacity: work for which no caller waits."""
        with self._lock:
            out = self._make_room(0)
        try:
            self._write(out, [])
        except Error as error:
            _logger.warning("%s: which blocks were used last is not logged: %s", self._store.path, error)

    def _write(self, out: Mapping[bytes, _Block], new: list[_Task]) -> None:
        """One batch: deletes, stores, and logs what was used. If it fails, what was to go is in the index again."""
        with self._lock:
            used, self._used = self._used, {}
        if not (out or new or used):
            return
        try:
            batch = self._store.batch()
            for key in out:
                batch.delete(_page(key))
            for self._uses, key in enumerate(used, self._uses + 1):
                batch.set_metadata(_page(key), _USES, self._uses)
            for task in new:
                page = _page(task.key)
                # Of a page that the index does not know, damaged once, nothing is trusted.
                if task.key not in out and page in self._store:
                    batch.delete(page)
                metadata = {name: value for name, value in ((_KIND, task.kind), (_KEY, task.key))
                            if value is not None and value != page}
                batch.create(task.data, key=page, metadata=metadata, place="disk", at_commit=True)
            self._space.claim(sum(task.data.nbytes for task in new))
            self._store.commit(batch, ack=self._ack)
        except BaseException:
            with self._lock:
                for key, block in reversed(list(out.items())):
                    self._add(key, block)
                    self._blocks.move_to_end(key, last=False)
                self._used = {**used, **self._used}
            raise
        if out and self._on_deleted is not None:
            self._on_deleted(list(out), [block.nbytes for block in out.values()])

    def _delete_damaged(self, key: bytes) -> None:
        """Deletes a block that the index has given up, unless it was stored anew."""
        if key in self._blocks or _page(key) not in self._store:
            return
        try:
            with self._store.batch(ack=self._ack) as batch:
                batch.delete(_page(key))
        except Error as error:
            _logger.warning("%s: a damaged block cannot be deleted: %s", self._store.path, error)

    # On the threads that read.

    def _load_all(self, work: list[_Task]) -> list[bool]:
        with self._lock:
            here = [self._has(task) and self._lock_one(task.key) for task in work]
        found = [is_here and self._load_one(task) for task, is_here in zip(work, here, strict=True)]
        with self._lock:
            self._touch(task.key for task, is_found in zip(work, found, strict=True) if is_found)
        return found

    def _load_one(self, task: _Task) -> bool:
        """Reads a locked block, and gives its lock back. A damaged one is given up."""
        try:
            self._store.read_into(_page(task.key), task.data)
            return True
        except (DamagedError, StoreIOError) as error:
            _logger.warning("%s: a block is given up: %s", self._store.path, error)
            self._give_up(task.key)
            return False
        finally:
            self.unlock([task.key])

    def _give_up(self, key: bytes) -> None:
        with self._lock:
            if key not in self._blocks:
                return
            block = self._remove(key)
        if self._on_deleted is not None:
            self._on_deleted([key], [block.nbytes])
        with contextlib.suppress(RuntimeError):  # closed meanwhile: the next reader finds it
            self._submit(self._writer, self._delete_damaged, key)


class _Space:
    """Keeps the space of deleted blocks from piling up while blocks come faster than the disk takes them.

    A snapshot gives it back. The engine takes one in the background after `interval` bytes; once as many again were
    stored and none is there, the next batch waits for one.
    """

    def __init__(self, store: Store, interval: int) -> None:
        self._store, self._interval = store, interval
        self._snapshots = 0
        # Bytes that were stored since the last snapshot was there.
        self._stored = 0

    def claim(self, nbytes: int) -> None:
        """Called before so many bytes are stored."""
        snapshots = self._store.stats()["snapshots_taken"]
        if snapshots != self._snapshots:
            self._snapshots, self._stored = snapshots, 0
        self._stored += nbytes
        if self._stored < 2 * self._interval:
            return
        self._stored = nbytes
        try:
            self._store.snapshot()
        except Error as error:
            _logger.warning("%s: a snapshot failed, and space was not given back: %s", self._store.path, error)


def _open(path: str | os.PathLike[str], identity: Mapping[str, Any], interval: int) -> Store:
    try:
        text = json.dumps(dict(identity), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidError(f"the identity of a cache is plain values by name: {error}") from error
    plain = json.loads(text)
    try:
        store = Store(path, device="host", identity=text.encode(), compression=False, snapshots_kept=1,
                      snapshot_log_bytes=interval)
    except MismatchError as error:
        there = None
        with contextlib.suppress(Error), View(path) as view:
            there = view.root.get(_IDENTITY)
        if not isinstance(there, dict):
            raise
        raise MismatchError(f"the cache holds blocks of another kind: {_difference(there, plain)}",
                            remedy="give these blocks another directory", path=os.fspath(path)) from error
    if _IDENTITY not in store.root:
        with store.batch() as batch:
            batch.set_root(_IDENTITY, plain)
    return store


def _difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    return ", ".join(f"{name} is {there.get(name)!r} there and {here.get(name)!r} here" for name in names)


def _page(key: bytes) -> bytes:
    """The key of a block's page, of 64 bytes at most. Of a long key it is a hash, as long as no short key is."""
    return key if len(key) < _PAGE_KEY_MAX else hashlib.blake2b(key, digest_size=_PAGE_KEY_MAX).digest()


def _tasks(keys: Iterable[bytes], blocks: Iterable[Any], kinds: Iterable[str] | None) -> list[_Task]:
    pairs = list(zip(keys, blocks, strict=True))
    words = [None] * len(pairs) if kinds is None else list(kinds)
    return [_Task(key, _as_bytes(block), kind) for (key, block), kind in zip(pairs, words, strict=True)]


def _as_bytes(block: Any) -> memoryview:
    view = memoryview(block)
    return view if view.ndim == 1 and view.itemsize == 1 else view.cast("B")


def _in_batches(work: list[_Task]) -> Iterator[list[_Task]]:
    some: list[_Task] = []
    nbytes = 0
    for task in work:
        if some and nbytes + task.data.nbytes > _BATCH_BYTES:
            yield some
            some, nbytes = [], 0
        some.append(task)
        nbytes += task.data.nbytes
    if some:
        yield some
