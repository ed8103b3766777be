"""An on-disk L2 adapter for LMCache whose blocks survive restarts.

LMCache keeps blocks of KV caches in host memory, and queries L2 adapters for missing blocks. This adapter is based on
`remanent.kv.BlockCache`. A block that was reported as stored can be loaded after the process was killed. Each block is
verified by its checksum before it is returned, and a block of another type or shape is never returned. LMCache 0.5.0 or
later is required. LMCache's server loads the adapter with this option:

    lmcache server --l2-adapter '{
        "type": "plugin", "module_path": "remanent.integrations.lmcache", "class_name": "RemanentL2Adapter",
        "adapter_params": {"path": "/mnt/nvme/kv", "capacity": 1000000000000, "revision": "main of 2026-11-26",
                           "chunk_size": 256}}'

The adapter evicts the least recently used blocks once they exceed `capacity` bytes. LMCache may delete more blocks, by
its own eviction or by quotas.
"""

from __future__ import annotations

import heapq
import logging
import os
import threading
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any

from remanent._store.errors import InvalidError
from remanent.integrations import _hosts
from remanent.kv import BlockCache

with _hosts.importing(_hosts.LMCACHE):
    from lmcache.v1.distributed.api import KeyEntry, KeyListPage, ObjectKey
    from lmcache.v1.distributed.internal_api import L2StoreResult
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
    from lmcache.v1.platform import create_event_notifier

    try:
        from lmcache.lmcache_native import Bitmap
    except ImportError:
        # The location in releases before 0.5.4.
        from lmcache.native_storage_ops import Bitmap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from lmcache.v1.distributed.api import MemoryLayoutDesc, MemoryTags
    from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2AdapterListener
    from lmcache.v1.memory_management import MemoryObj

__all__ = ["RemanentL2Adapter"]

_logger = logging.getLogger("remanent.lmcache")

# Separates the parts of a key. LMCache allows it in none of them.
_SEPARATOR = "@"
# The number of keys that are reported to LMCache at once when the adapter starts.
_TOLD_AT_ONCE = 10_000


def __dir__() -> list[str]:
    return __all__


class RemanentL2Adapter(L2AdapterInterface):
    """An L2 adapter for LMCache that stores blocks in a directory. `adapter_params` has these entries:

    - `path`: the directory.
    - `capacity`: the bytes of blocks to keep. The directory uses up to twice as much disk space.
    - `revision`: the commit of the model, or a name that you change with the weights.
    - `chunk_size`: LMCache's chunk size, in tokens.
    - `hash_algorithm`: LMCache's hash algorithm, "blake3" by default.
    - `durable`: whether stored blocks must survive a power cut and not only the death of the process. If true, stores
      complete later. The default is false.
    - `readers`: the number of threads that read from the disk, 4 by default.

    A directory whose blocks have another revision, chunk size, hash algorithm or seed is rejected with an error that
    states the differences. Models, ranks and salts are part of the keys. Types and shapes are compared with those of
    the buffers.
    """

    def __init__(self, config: Mapping[str, Any], l1_memory_desc: L1MemoryDesc | None = None) -> None:
        self._params = _params(config)
        super().__init__(max_capacity_bytes=self._params["capacity"])
        self._lock = threading.Lock()
        self._next_task = 0
        self._stored: dict[int, L2StoreResult] = {}
        self._looked_up: dict[int, Bitmap] = {}
        self._loaded: dict[int, Bitmap] = {}
        self._is_closed = False
        algorithm = self._params["hash_algorithm"]
        identity = {"engine": "lmcache", "revision": self._params["revision"], "chunk": self._params["chunk_size"],
                    "hash": algorithm, "seed": _seed(algorithm)}
        self._cache = BlockCache(self._params["path"], identity=identity, capacity=self._params["capacity"],
                                 readers=self._params["readers"],
                                 ack="durable" if self._params["durable"] else "logged",
                                 on_stored=self._tell_stored, on_deleted=self._tell_deleted)
        self._store_event, self._lookup_event, self._load_event = (create_event_notifier() for _ in range(3))
        # LMCache counts bytes by what is reported to it.
        for keys, lengths in self._there():
            self._tell_stored(keys, lengths)

    @property
    def cache(self) -> BlockCache:
        """The `BlockCache` that contains the blocks."""
        return self._cache

    def get_store_event_fd(self) -> int:
        return int(self._store_event.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._lookup_event.fileno())

    def get_load_event_fd(self) -> int:
        return int(self._load_event.fileno())

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        task = self._new_task()

        def finish(stored: Future[int]) -> None:
            error = _error_of(stored)
            if error is not None:
                _logger.warning("%s: blocks were not stored: %r", self._cache.path, error)
            with self._lock:
                self._stored[task] = L2StoreResult(error is None, 0 if error is not None else stored.result())
            self._ring(self._store_event)

        self._begin(self._cache.store, keys, objects, finish)
        return task

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        with self._lock:
            completed, self._stored = self._stored, {}
        return completed

    def submit_lookup_and_lock_task(self, keys: list[ObjectKey],
                                    group_layout_descs: dict[int, MemoryLayoutDesc]) -> int:
        task = self._new_task()
        found = _bitmap(self._cache.lock(map(_encode, keys)))
        with self._lock:
            self._looked_up[task] = found
        self._ring(self._lookup_event)
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._looked_up.pop(task_id, None)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        self._cache.unlock(map(_encode, keys))

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        task = self._new_task()

        def finish(loading: Future[list[bool]]) -> None:
            error = _error_of(loading)
            if error is not None:
                _logger.warning("%s: blocks were not loaded: %r", self._cache.path, error)
            loaded = [False] * len(keys) if error is not None else loading.result()
            accessed = [key for key, is_loaded in zip(keys, loaded, strict=True) if is_loaded]
            try:
                if accessed:
                    self._notify_keys_accessed(accessed)
            except Exception:
                # LMCache waits for the result, not for its listeners.
                _logger.exception("%s: a listener failed", self._cache.path)
            with self._lock:
                self._loaded[task] = _bitmap(loaded)
            self._ring(self._load_event)

        self._begin(self._cache.load, keys, objects, finish)
        return task

    def query_load_result(self, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._loaded.pop(task_id, None)

    def submit_touch(self, keys: list[ObjectKey]) -> None:
        """Marks blocks as used without reading them. Called by LMCache 0.5.7 and later."""
        self._cache.touch(map(_encode, keys))
        self._notify_keys_accessed(keys)

    def get_memory_tags(self) -> MemoryTags:
        """Returns the kind of memory that contains the blocks: storage that is local to this host. Called by LMCache
        0.5.7 and later."""
        from lmcache.v1.distributed.api import MemoryResidency, MemorySegment, MemoryTags

        return MemoryTags(MemorySegment.STORAGE, MemoryResidency.LOCAL)

    def delete(self, keys: list[ObjectKey]) -> None:
        """Deletes blocks that are not locked. A failure is logged, because an exception would end LMCache's thread."""
        try:
            self._cache.delete(map(_encode, keys)).result()
        except Exception as error:
            _logger.warning("%s: blocks cannot be deleted: %r", self._cache.path, error)

    def list_l2_keys(self, model_name: str | None = None, page_size: int = 500,
                     cursor: str | None = None) -> KeyListPage:
        """Returns a page of up to `page_size` keys in ascending order. `cursor` is the last key of the previous
        page."""
        if page_size <= 0:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        if cursor is not None:
            _decode(cursor.encode())
        prefix = b"" if model_name is None else (model_name + _SEPARATOR).encode()
        rest = (key for key in self._cache if key.startswith(prefix) and (cursor is None or key > cursor.encode()))
        found = heapq.nsmallest(page_size + 1, rest)
        page = found[:page_size]
        entries = tuple(KeyEntry(_decode(key).to_encoded_object_key(), self._cache.length(key) or 0) for key in page)
        return KeyListPage(entries, page[-1].decode() if len(found) > len(page) else None)

    def close(self) -> None:
        """Finishes the tasks in progress, and closes the store and the event descriptors."""
        self._cache.close()
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        for event in (self._store_event, self._lookup_event, self._load_event):
            event.close()

    def report_status(self) -> dict[str, Any]:
        return {"is_healthy": not self._is_closed, "type": type(self).__name__, "path": self._cache.path,
                "stored_object_count": len(self._cache), "current_size_bytes": self._cache.nbytes,
                "max_capacity_bytes": self._cache.capacity}

    def _new_task(self) -> int:
        with self._lock:
            self._next_task += 1
            return self._next_task

    def _begin(self, begin: Callable[..., Future[Any]], keys: list[ObjectKey], objects: list[MemoryObj],
               finish: Callable[[Future[Any]], None]) -> None:
        """Starts to store or load blocks, and calls `finish` with the future. If the task cannot begin, the future has
        failed.

        The objects are kept alive until then, because `byte_array` is only an address. LMCache frees the memory at this
        address with the last reference to the object.
        """
        held = list(objects)

        def done(future: Future[Any]) -> None:
            held.clear()
            finish(future)

        try:
            future = begin(map(_encode, keys), (each.byte_array for each in held), map(_kind, held))
        except Exception as error:
            future = Future()
            # The traceback is dropped because its frames hold buffers.
            future.set_exception(error.with_traceback(None))
        future.add_done_callback(done)

    def _ring(self, event: Any) -> None:
        with self._lock:
            if not self._is_closed:
                event.notify()

    def _tell_stored(self, keys: list[bytes], lengths: list[int]) -> None:
        self._notify_keys_stored([_decode(key) for key in keys], lengths)

    def _tell_deleted(self, keys: list[bytes], lengths: list[int]) -> None:
        self._notify_keys_deleted([_decode(key) for key in keys], lengths)

    def register_listener(self, listener: L2AdapterListener) -> None:
        """Adds a listener and reports the existing blocks to it. LMCache's own eviction only deletes blocks that were
        reported."""
        super().register_listener(listener)
        for keys, lengths in self._there():
            listener.on_l2_keys_stored([_decode(key) for key in keys], lengths)

    def _there(self) -> Iterator[tuple[list[bytes], list[int]]]:
        """Yields keys and lengths of the blocks in the cache, in pieces. The oldest piece is first, and within a piece
        the newest block is first.

        LMCache treats the first key of a report as the most recently used.
        """
        keys = list(self._cache)
        for begin in range(0, len(keys), _TOLD_AT_ONCE):
            some = keys[begin : begin + _TOLD_AT_ONCE][::-1]
            yield some, [self._cache.length(key) or 0 for key in some]


def _params(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters with their defaults. Raises `InvalidError` for missing and unknown names and for wrong
    types."""
    defaults = {"hash_algorithm": "blake3", "durable": False, "readers": 4}
    needed = {"path": str, "capacity": int, "revision": str, "chunk_size": int}
    unknown = sorted(set(config) - set(defaults) - set(needed))
    missing = sorted(set(needed) - set(config))
    if unknown or missing:
        raise InvalidError(f"adapter_params: missing {missing}, unknown {unknown}",
                           remedy=f"required are {list(needed)}, optional are {list(defaults)}")
    params = {**defaults, **config}
    kinds = {**needed, **{name: type(value) for name, value in defaults.items()}}
    for name, kind in kinds.items():
        if not isinstance(params[name], kind) or (kind is int and isinstance(params[name], bool)):
            raise InvalidError(f"adapter_params: {name} must be of type {kind.__name__}, not {params[name]!r}")
    return params


def _seed(algorithm: str) -> str:
    """Returns the seed of the hashes in block keys, which is empty for blake3."""
    if algorithm == "blake3":
        return ""
    seed = os.environ.get("PYTHONHASHSEED")
    if seed in (None, "random"):
        raise InvalidError(f"the seed of {algorithm} may differ in each process, so later processes would find no blocks",
                           remedy="set PYTHONHASHSEED, or use blake3")
    return str(seed)


def _error_of(job: Future[Any]) -> BaseException | None:
    return CancelledError() if job.cancelled() else job.exception()


def _encode(key: ObjectKey) -> bytes:
    parts = (key.model_name, f"{key.kv_rank:08x}", f"{key.object_group_id:x}", key.chunk_hash.hex(), key.cache_salt)
    return _SEPARATOR.join(parts).encode()


def _decode(key: bytes) -> ObjectKey:
    model, rank, group, chunk, salt = key.decode().split(_SEPARATOR)
    return ObjectKey(chunk_hash=bytes.fromhex(chunk), model_name=model, kv_rank=int(rank, 16),
                     object_group_id=int(group, 16), cache_salt=salt)


def _kind(each: MemoryObj) -> str:
    """Returns the format, types and shapes of a block's contents as text."""
    meta = each.metadata
    pairs = [(meta.dtype, meta.shape)] if meta.shapes is None or meta.dtypes is None else \
        zip(meta.dtypes, meta.shapes, strict=True)
    return " ".join([meta.fmt.name, *(f"{dtype}{list(shape)}" for dtype, shape in pairs)])


def _bitmap(bits: list[bool]) -> Bitmap:
    bitmap = Bitmap(len(bits))
    for index, is_set in enumerate(bits):
        if is_set:
            bitmap.set(index)
    return bitmap
