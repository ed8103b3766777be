"""An on-disk cache of blocks by key that survives restarts.

A block contains the attention keys and values of a run of tokens, as an inference engine divides them, and is named by
a hash of all tokens up to its end. The store serves as the index, so a block that was reported as stored can be loaded
under its key after the process was killed. Every block is verified by its checksum before it is returned.
`remanent.integrations.vllm` and `remanent.integrations.lmcache` are based on this module.

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
the cache contains blocks of another identity: revision is "1" in the cache and "2" here
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import hashlib
import logging
import os
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, ParamSpec, Self, TypeVar

from remanent._kv.block_index import Block, BlockIndex
from remanent._kv.block_store import Space, identity_of, open_store, snapshot_interval
from remanent._kv.peers import Peers
from remanent._store._native import PageInfo
from remanent._store.errors import (
    ClosedError,
    DamagedError,
    DiskFullError,
    Error,
    ForkedError,
    InvalidError,
    OverBudgetError,
    StoreIOError,
    UnknownKeyError,
)

__all__ = ["BlockCache"]

_logger = logging.getLogger("remanent.kv")
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Told = Callable[[list[bytes], list[int]], None]

# Entries of a block's metadata: its kind; the number of its last use, which increases from use to use; and its key, if
# that is too long for a page.
_KIND = "kind"
_USES = "uses"
_KEY = "key"
_PAGE_KEY_MAX = 64
# The largest number of bytes and of blocks that one batch stores.
_BATCH_BYTES = 256 << 20
_BATCH_BLOCKS = 4096
# The largest number of blocks whose use is not yet logged.
_USES_WAITING_MAX = 4096
# The time in seconds for which a block counts as missing after the system failed to read it.
_UNREADABLE_FOR = 10.0
# The maximum number of bytes of fetched blocks that wait to be stored.
_FETCHED_BYTES = 64 << 20


def __dir__() -> list[str]:
    return __all__


@dataclass(slots=True, frozen=True)
class _Task:
    """A block to store, or a buffer to fill."""

    key: bytes
    data: memoryview
    kind: str | None

    def release(self) -> None:
        """Releases the buffer to its owner. The frames of an exception may keep the task alive longer than its job."""
        with contextlib.suppress(BufferError):
            self.data.release()

    def is_of(self, block: Block | None) -> bool:
        return block is not None and (block.nbytes, block.kind) == (self.data.nbytes, self.kind)


class _StoreJob:
    """A call of `store`, and the future that the call returned."""

    def __init__(self, work: list[_Task]) -> None:
        self.work = work
        self.nbytes = sum(task.data.nbytes for task in work)
        self.future: Future[int] = Future()

    def release(self) -> None:
        """Releases the blocks' buffers to their owners."""
        for task in self.work:
            task.release()


class BlockCache:
    """A cache of up to `capacity` bytes of blocks by key. The least recently used blocks are evicted to make room for
    new ones.

    :param path: the directory of the cache's store, which is created if it does not exist.
    :param identity: all values on which the meaning of a block's bytes depends, as plain values by name. Blocks of one
        model are therefore never returned for another.
    :param capacity: the largest total bytes of blocks. Each block counts as at least 4 KiB. The directory uses up to
        twice as much disk space, plus 300 MB for the log and spare files. If an existing cache contains more, its
        oldest blocks are deleted.
    :param readers: the number of threads that read blocks from disk.
    :param ack: the event after which a block counts as stored. With "logged", stored blocks survive the death of the
        process. With "durable", they also survive a power cut.
    :param on_stored: called with keys and lengths after a batch has added blocks. The call is made on a thread of the
        cache, and must neither wait for the cache nor close it.
    :param on_deleted: called with keys and lengths after a batch has deleted blocks, in the same way as `on_stored`.
    :raises MismatchError: the existing cache has another identity. The message states the values that differ.
    :raises InvalidError: `capacity`, `readers` or `ack` is out of range.

    The methods can be called from any thread.
    """

    def __init__(self, path: str | os.PathLike[str], *, identity: Mapping[str, Any], capacity: int, readers: int = 4,
                 ack: Literal["logged", "durable"] = "logged", on_stored: _Told | None = None,
                 on_deleted: _Told | None = None) -> None:
        for name, number in (("capacity", capacity), ("readers", readers)):
            if not isinstance(number, int) or number <= 0:
                raise InvalidError(f"{name} must be an int above 0, not {number!r}")
        if ack not in ("logged", "durable"):
            raise InvalidError(f"ack must be 'logged' or 'durable', not {ack!r}")
        interval = snapshot_interval(capacity)
        self._store = open_store(path, identity, interval)
        self._opener = os.getpid()
        self._ack: Literal["logged", "durable"] = ack
        self._space = Space(self._store, interval)
        self._peers = Peers(self._store, identity_of(self._store))
        # Protects the following fields. It is never held while waiting for the store.
        self._lock = threading.Lock()
        self._index = BlockIndex(capacity)
        # The keys that unfinished jobs store, with the number of these jobs.
        self._arriving: Counter[bytes] = Counter()
        # Calls of `store` that wait to form one batch with others.
        self._waiting: deque[_StoreJob] = deque()
        self._jobs: set[Future[Any]] = set()
        self._is_write_queued = self._is_closing = False
        self._uses = self._read_index()
        # Blocks for which `on_stored` was not called. If such a block is evicted, `on_deleted` is not called either.
        self._on_stored = self._on_deleted = None
        self._write_quietly()
        self._on_stored, self._on_deleted = on_stored, on_deleted
        # A single thread writes: batches that store, delete and log uses follow each other.
        self._writer = ThreadPoolExecutor(1, "remanent-kv-write")
        self._readers = ThreadPoolExecutor(readers, "remanent-kv-read")

    def __contains__(self, key: bytes) -> bool:
        """Returns whether the cache contains a block with this key, without waiting. A block that could not be read
        recently counts as missing."""
        block = self._index.get(key)
        return block is not None and (block.unreadable_until == 0 or time.monotonic() >= block.unreadable_until)

    def __len__(self) -> int:
        """Returns the number of blocks in the cache."""
        return len(self._index)

    def __iter__(self) -> Iterator[bytes]:
        """Returns an iterator over the keys, least recently used first."""
        with self._lock:
            return iter(list(self._index))

    @property
    def path(self) -> str:
        """The path of the cache's directory."""
        return self._store.path

    @property
    def nbytes(self) -> int:
        """The total length of the blocks in bytes."""
        return self._index.nbytes

    @property
    def capacity(self) -> int:
        """The capacity of the cache in bytes of blocks."""
        return self._index.capacity

    def length(self, key: bytes) -> int | None:
        """Returns the length of a block in bytes, or None if the block is not in the cache, without waiting."""
        block = self._index.get(key)
        return None if block is None else block.nbytes

    def is_arriving(self, key: bytes) -> bool:
        """Returns whether a call of `store` for this block is unfinished, without waiting."""
        return key in self._arriving

    def store(self, keys: Iterable[bytes], blocks: Iterable[Any], kinds: Iterable[str] | None = None) -> Future[int]:
        """Stores blocks, without waiting for the disk. Returns a future of the number of bytes in new blocks.

        Equal keys imply equal bytes, so a block that is already in the cache is not written again. A block is replaced
        only if the new block has another length or kind and the existing block is not locked. Earlier keys are treated
        as prefixes of later ones and are evicted later.

        :param blocks: objects with the buffer protocol, one per key. A block must not change until the future is done
            or canceled. The cache keeps a reference until then. If a buffer does not own its memory, the caller must
            keep the owner alive.
        :param kinds: a word per block that describes how its bytes are interpreted, such as its type and shape.

        If not all blocks are in the cache at the end, the future raises an error: `OverBudgetError` if the blocks
        exceed the capacity, and otherwise the error of the store, such as `DiskFullError`. Some of the blocks may have
        been stored.
        """
        self._check_process()
        job = _StoreJob(_tasks(keys, blocks, kinds))
        with self._lock:
            self._arriving.update(task.key for task in job.work)
            self._waiting.append(job)
        try:
            self._submit(self._writer, self._store_waiting)
        except BaseException:
            with self._lock:
                is_waiting = job in self._waiting
                if is_waiting:
                    self._waiting.remove(job)
            if is_waiting:
                self._arrived(job)
                job.release()
                raise
            # The cache was closed after the writing thread had received the job.
        return job.future

    def load(self, keys: Iterable[bytes], outs: Iterable[Any],
             kinds: Iterable[str] | None = None) -> Future[list[bool]]:
        """Reads blocks into buffers, without waiting for the disk. Returns a future of a list that states whether each
        buffer was filled.

        :param outs: writable buffers with the lengths of the blocks, one per key. The cache keeps references to the
            buffers until the future is done. See `store` for buffers that do not own their memory.

        A block that the cache lacks is fetched from the peers that were added by `add_peer`, and stored. The contents
        of a filled buffer are verified by the block's checksum. A result of False means that the block is missing, has
        another length or kind than the buffer, could not be read, or was damaged and therefore deleted.
        The buffer's contents are then undefined. A block that could not be read counts as missing for ten seconds.
        """
        return self._submit(self._readers, self._load_all, _tasks(keys, outs, kinds))

    def serve(self) -> bytes:
        """Starts to send blocks to other caches over NIXL, until the cache is closed. Returns the address that another
        cache passes to `add_peer`.

        Requires NIXL (`pip install --no-deps nixl-cu12`). A process with the address can read all blocks of the cache.

        :raises Error: NIXL is missing or cannot be used. The message lists the paths that were searched.
        """
        self._check_process()
        return self._peers.serve()

    def add_peer(self, address: bytes, *, length_max: int = 16 << 20, timeout: float = 5.0) -> None:
        """Adds a peer: a cache in another process or on another host. `load` and `fetch` request missing blocks from
        the peer.

        The connection is made when the first block is requested. A peer that is unreachable, or does not answer within
        `timeout` seconds, counts as a cache without blocks for a minute, and is reported by one warning.

        :param address: the result of `serve` in the other process.
        :param length_max: the length of the longest block in bytes. Four times as much memory is allocated.
        :raises MismatchError: the other cache has another identity. The message states the values that differ.
        """
        self._check_process()
        if not isinstance(length_max, int) or length_max <= 0:
            raise InvalidError(f"length_max must be an int above 0, not {length_max!r}")
        if not isinstance(timeout, (int, float)) or not timeout > 0:
            raise InvalidError(f"timeout must be a number of seconds above 0, not {timeout!r}")
        self._peers.add(address, length_max, timeout)

    def fetch(self, keys: Iterable[bytes]) -> Future[list[bool]]:
        """Fetches blocks that the cache lacks from peers and stores them, without waiting. Returns a future of a list
        that states whether each block is in the cache."""
        return self._submit(self._readers, self._fetch_all, list(keys))

    def touch(self, keys: Iterable[bytes]) -> None:
        """Marks blocks as used, in the order in which a request uses them. `load` also marks its blocks."""
        keys = list(keys)
        with self._lock:
            self._index.touch(keys)
        self._log_uses_if_many()

    def lock(self, keys: Iterable[bytes]) -> list[bool]:
        """Protects blocks from eviction. Returns, for each key, whether the block is in the cache and therefore locked.

        Locks are counted. Each lock is released by one call of `unlock`, or when the process ends.
        """
        keys = list(keys)
        with self._lock:
            return [key in self and self._index.keep(key) for key in keys]

    def unlock(self, keys: Iterable[bytes]) -> None:
        """Releases one lock of each block."""
        keys = list(keys)
        with self._lock:
            for key in keys:
                self._index.let_go(key)

    def delete(self, keys: Iterable[bytes]) -> Future[int]:
        """Deletes blocks and returns a future of their number. Locked and missing blocks are skipped."""
        return self._submit(self._writer, self._delete_all, list(keys))

    def drain(self) -> None:
        """Waits until all jobs that have begun are finished or have failed."""
        while True:
            with self._lock:
                jobs = list(self._jobs)
            if not jobs:
                return
            concurrent.futures.wait(jobs)

    def close(self) -> None:
        """Finishes the jobs in progress and closes the store. A later `BlockCache` finds the stored blocks."""
        self._is_closing = True
        if self._store.closed:
            return
        self._readers.shutdown()
        self._peers.close()
        with contextlib.suppress(ClosedError, RuntimeError):
            self._submit(self._writer, self._write_quietly)
        self._writer.shutdown()
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<BlockCache {self._store.path}: {len(self)} blocks, {self.nbytes} of {self.capacity} bytes>"

    def _read_index(self) -> int:
        """Reads the index from the metadata of all pages. Returns the number of the last use.

        The last use of a block is the batch that last changed its page. A batch logs uses, in order, before it stores
        blocks. Of the blocks that a batch stores, the first ones are evicted last.
        """
        def last_use(info: PageInfo) -> tuple[int, bool, int]:
            use = info.metadata.get(_USES)
            return info.lsn, use is None, -info.page if use is None else use

        uses = 0
        found = []
        for info in sorted(self._store.pages(), key=last_use):
            if info.key is not None:
                key = info.metadata.get(_KEY, info.key)
                block = Block(info.length, info.metadata.get(_KIND))
                found.append((key.encode() if isinstance(key, str) else key, block))
                uses = max(uses, info.metadata.get(_USES, 0))
        self._index.add(reversed(found))
        return uses

    def _submit(self, threads: ThreadPoolExecutor, run: Callable[_Arguments, _Result], *arguments: _Arguments.args,
                **named: _Arguments.kwargs) -> Future[_Result]:
        self._check_process()
        try:
            job = threads.submit(run, *arguments, **named)
        except RuntimeError:
            if not self._is_closing:
                raise
            raise ClosedError("the cache is closed", path=self._store.path, remedy="open the cache again") from None
        with self._lock:
            self._jobs.add(job)
        job.add_done_callback(self._finished)
        return job

    def _check_process(self) -> None:
        if os.getpid() != self._opener:
            raise ForkedError("the cache belongs to the process that opened it", path=self._store.path,
                              remedy="open the cache in this process")

    def _finished(self, job: Future[Any]) -> None:
        with self._lock:
            self._jobs.discard(job)

    def _arrived(self, job: _StoreJob) -> None:
        with self._lock:
            self._arriving.subtract(task.key for task in job.work)
            for task in job.work:
                if self._arriving[task.key] <= 0:
                    del self._arriving[task.key]

    def _log_uses_if_many(self) -> None:
        with self._lock:
            if self._is_write_queued or self._index.uses_waiting < _USES_WAITING_MAX:
                return
            self._is_write_queued = True
        with contextlib.suppress(ClosedError, RuntimeError):  # the cache was closed, which logs the uses
            self._submit(self._writer, self._write_quietly)

    def _tell(self, told: _Told | None, blocks: Mapping[bytes, int]) -> None:
        if blocks and told is not None:
            try:
                told(list(blocks), list(blocks.values()))
            except Exception:
                _logger.exception("%s: a callback failed", self._store.path)

    # Methods of the writing thread.

    def _store_waiting(self) -> None:
        """Stores the waiting blocks of several calls in one batch: as many calls as fit, and at least one. Combining
        calls makes short calls cheap."""
        jobs: list[_StoreJob] = []
        nbytes = blocks = 0
        with self._lock:
            while self._waiting:
                job = self._waiting[0]
                nbytes += job.nbytes
                blocks += len(job.work)
                if jobs and (nbytes > _BATCH_BYTES or blocks > _BATCH_BLOCKS):
                    break
                jobs.append(self._waiting.popleft())
        begun = [job for job in jobs if job.future.set_running_or_notify_cancel()]
        for job in jobs:
            if job not in begun:
                self._arrived(job)
                job.release()
        if begun:
            self._store_jobs(begun, {})

    def _store_jobs(self, jobs: list[_StoreJob], stored: dict[bytes, int]) -> None:
        """Stores the blocks of calls and completes their futures. `stored` contains new blocks that no future has
        counted yet."""
        held: list[Block] = []
        refused: set[bytes] = set()
        failure: BaseException | None = None
        try:
            # Within a batch, the first blocks are treated as the most recently used.
            for some in _in_batches([task for job in reversed(jobs) for task in job.work]):
                self._store_some(some, held, stored, refused)
        except BaseException as error:
            failure = error
        finally:
            with self._lock:
                for block in held:
                    self._index.hold(block, -1)
                if len(jobs) == 1 and (len(jobs[0].work) > _BATCH_BLOCKS or jobs[0].nbytes > _BATCH_BYTES):
                    # If the blocks of the first call were stored in several batches, update their order, so that the
                    # first block is evicted last.
                    self._index.touch(task.key for task in jobs[0].work)
        if failure is not None:
            _clear_frames(failure)
        if len(jobs) > 1 and (failure is not None or refused):
            # A failure of one call must not affect other calls.
            for job in jobs:
                self._store_jobs([job], stored)
            return
        if refused:
            failure = OverBudgetError(f"{len(refused)} of {len(jobs[0].work)} blocks do not fit into the cache of "
                                      f"{self.capacity} bytes, or would replace locked blocks", path=self._store.path,
                                      remedy="unlock blocks, or use a larger capacity")
        for job in jobs:
            self._arrived(job)
            # The buffers are released before the future is done, since its caller may then free the memory.
            job.release()
            if failure is None:
                job.future.set_result(sum(stored.pop(task.key, 0) for task in job.work))
            else:
                job.future.set_exception(failure)

    def _store_some(self, work: list[_Task], held: list[Block], stored: dict[bytes, int], refused: set[bytes]) -> None:
        """Stores blocks in one batch. Blocks that are in the cache afterwards are locked and added to `held`."""
        new: list[_Task] = []
        made: dict[bytes, Block] = {}
        with self._lock:
            here = {task.key: block for task in work if task.is_of(block := self._index.get(task.key)) and block}
            self._index.touch(here)
            for block in here.values():
                self._index.hold(block, 1)
            held += here.values()
            room = self.capacity - self._index.locked
            out: dict[bytes, Block] = {}
            for task in work:
                if task.is_of(here.get(task.key) or made.get(task.key)):
                    continue
                old = self._index.get(task.key)
                fresh = Block(task.data.nbytes, task.kind)
                if task.key in made or fresh.charge > room or (old is not None and old.is_locked):
                    refused.add(task.key)
                    continue
                room -= fresh.charge
                new.append(task)
                made[task.key] = fresh
                if old is not None:
                    out[task.key] = self._index.remove(task.key)
            out |= self._index.make_room(sum(block.charge for block in made.values()))
        self._write(out, new)
        with self._lock:
            self._index.add(made.items())
            for block in made.values():
                self._index.hold(block, 1)
        held += made.values()
        stored |= {key: block.nbytes for key, block in made.items()}
        self._tell_written(out, made)

    def _delete_all(self, keys: list[bytes]) -> int:
        with self._lock:
            out = {key: self._index.remove(key) for key in dict.fromkeys(keys)
                   if (block := self._index.get(key)) is not None and not block.is_locked}
        self._write(out, [])
        self._tell_written(out, {})
        return len(out)

    def _write_quietly(self) -> None:
        """Logs uses and evicts blocks down to the capacity. Failures are logged, because no caller waits for this
        work."""
        with self._lock:
            self._is_write_queued = False
            out = self._index.make_room(0)
        try:
            self._write(out, [])
        except Error as error:
            _logger.warning("%s: the last use of blocks cannot be logged: %s", self._store.path, error)
        else:
            self._tell_written(out, {})

    def _tell_written(self, out: Mapping[bytes, Block], made: Mapping[bytes, Block]) -> None:
        """Calls `on_deleted` and `on_stored` for the changes of a batch, after the index was updated."""
        self._tell(self._on_deleted, {key: block.nbytes for key, block in out.items()})
        self._tell(self._on_stored, {key: block.nbytes for key, block in made.items()})

    def _write(self, out: Mapping[bytes, Block], new: list[_Task]) -> None:
        """Writes one batch that deletes blocks, stores blocks and logs uses. If the batch fails, deleted blocks are
        added to the index again."""
        with self._lock:
            used = self._index.take_uses()
        if not (out or new or used):
            return
        try:
            self._space.claim(sum(task.data.nbytes for task in new))
            try:
                self._commit(out, new, used)
            except DiskFullError:
                # Deleted blocks take space until a snapshot frees it.
                self._space.give_back()
                self._commit(out, new, used)
        except BaseException:
            with self._lock:
                self._index.put_back(out)
                self._index.put_uses_back(used)
            raise

    def _commit(self, out: Iterable[bytes], new: list[_Task], used: Iterable[bytes]) -> None:
        # Pages that the index does not know, because they were damaged, are created again; a page that only the index
        # knows is skipped.
        gone = {page for page in map(_page, out) if page in self._store}
        gone |= {page for task in new if (page := _page(task.key)) in self._store}
        batch = self._store.batch()
        for page in gone:
            batch.delete(page)
        for key in used:
            if (page := _page(key)) in self._store and page not in gone:
                self._uses += 1
                batch.set_metadata(page, _USES, self._uses)
        for task in new:
            page = _page(task.key)
            metadata = {name: value for name, value in ((_KIND, task.kind), (_KEY, task.key))
                        if value is not None and value != page}
            batch.create(task.data, key=page, metadata=metadata, place="disk", at_commit=True)
        self._store.commit(batch, ack=self._ack)

    def _delete_damaged(self, key: bytes) -> None:
        """Deletes a block that was removed from the index, unless it was stored again."""
        if key in self._index or _page(key) not in self._store:
            return
        try:
            self._commit([key], [], [])
        except Error as error:
            _logger.warning("%s: a damaged block cannot be deleted: %s", self._store.path, error)

    # Methods of the reading threads.

    def _load_all(self, work: list[_Task]) -> list[bool]:
        try:
            return self._load_held(work)
        finally:
            for task in work:
                task.release()

    def _load_held(self, work: list[_Task]) -> list[bool]:
        with self._lock:
            blocks = [block if task.is_of(block := self._index.get(task.key)) else None for task in work]
            held = [block for block in blocks if block is not None]
            for block in held:
                self._index.hold(block, 1)
        try:
            found = [(block is not None and self._load_one(task, block)) or self._load_from_peers(task)
                     for task, block in zip(work, blocks, strict=True)]
        finally:
            with self._lock:
                for block in held:
                    self._index.hold(block, -1)
        with self._lock:
            self._index.touch(task.key for task, is_found in zip(work, found, strict=True) if is_found)
        self._log_uses_if_many()
        return found

    def _load_one(self, task: _Task, block: Block) -> bool:
        try:
            self._store.read_into(_page(task.key), task.data)
            block.unreadable_until = 0.0
            return True
        except UnknownKeyError:
            # Another reader found that the block is damaged.
            self._give_up(task.key, block)
        except (DamagedError, StoreIOError) as error:
            if isinstance(error, StoreIOError) and error.errno != errno.EIO:
                _logger.warning("%s: a block cannot be read: %s", self._store.path, error)
                block.unreadable_until = time.monotonic() + _UNREADABLE_FOR
            else:
                _logger.warning("%s: a damaged block is removed from the cache: %s", self._store.path, error)
                self._give_up(task.key, block)
        return False

    def _load_from_peers(self, task: _Task) -> bool:
        """Fills a buffer with a block of a peer, and stores the block."""
        found = self._block_of_peers(task.key)
        if found is None or (len(found[0]), found[1]) != (task.data.nbytes, task.kind):
            return False
        task.data[:] = found[0]
        with contextlib.suppress(ClosedError, RuntimeError):  # the cache was closed
            self.store([task.key], [found[0]], None if found[1] is None else [found[1]])
        return True

    def _block_of_peers(self, key: bytes) -> tuple[bytes, str | None] | None:
        """Returns the bytes and the kind of a block of a peer."""
        page = _page(key)
        found = self._peers.fetch(page)
        if found is None or found[1].get(_KEY, page) != key:
            return None
        return found[0], found[1].get(_KIND)

    def _fetch_all(self, keys: list[bytes]) -> list[bool]:
        # The jobs that store fetched blocks, with the lengths of the blocks. A block that does not fit, or for which the
        # disk is full, counts as missing.
        storing: deque[tuple[Future[int], int]] = deque()
        waiting = 0
        for key in dict.fromkeys(keys):
            if key in self or (found := self._block_of_peers(key)) is None:
                continue
            data, kind = found
            storing.append((self.store([key], [data], None if kind is None else [kind]), len(data)))
            waiting += len(data)
            while waiting > _FETCHED_BYTES:
                job, length = storing.popleft()
                job.exception()
                waiting -= length
        for job, _ in storing:
            job.exception()
        return [key in self for key in keys]

    def _give_up(self, key: bytes, block: Block) -> None:
        with self._lock:
            if self._index.get(key) is not block:
                return
            self._index.remove(key)
        with contextlib.suppress(ClosedError, RuntimeError):  # the cache was closed
            self._submit(self._writer, self._delete_damaged, key)
        self._tell(self._on_deleted, {key: block.nbytes})


def _page(key: bytes) -> bytes:
    """Returns the page key of a block: the block's key if that is shorter than 64 bytes, and otherwise a hash of 64
    bytes."""
    return key if len(key) < _PAGE_KEY_MAX else hashlib.blake2b(key, digest_size=_PAGE_KEY_MAX).digest()


def _tasks(keys: Iterable[bytes], blocks: Iterable[Any], kinds: Iterable[str] | None) -> list[_Task]:
    pairs = list(zip(keys, blocks, strict=True))
    for key, _ in pairs:
        if not isinstance(key, bytes) or not key:
            raise InvalidError(f"a block's key must be bytes of length 1 or more, not {key!r}")
    words = [None] * len(pairs) if kinds is None else list(kinds)
    return [_Task(key, _as_bytes(block), kind) for (key, block), kind in zip(pairs, words, strict=True)]


def _as_bytes(block: Any) -> memoryview:
    view = memoryview(block)
    return view if view.ndim == 1 and view.itemsize == 1 else view.cast("B")


def _clear_frames(error: BaseException | None) -> None:
    """Clears the frames in an exception's traceback, which reference batches and thereby callers' buffers."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _in_batches(work: list[_Task]) -> Iterator[list[_Task]]:
    some: list[_Task] = []
    nbytes = 0
    for task in work:
        if len(some) == _BATCH_BLOCKS or (some and nbytes + task.data.nbytes > _BATCH_BYTES):
            yield some
            some, nbytes = [], 0
        some.append(task)
        nbytes += task.data.nbytes
    if some:
        yield some
