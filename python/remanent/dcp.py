"""Checkpoints of `torch.distributed.checkpoint` (DCP) that are durable, proven and deduplicated.

    dcp.save(state, storage_writer=StorageWriter("runs/7/step-100"))
    dcp.load(state, storage_reader=StorageReader("runs/7/step-100"))
    dcp.async_save(state, storage_writer=StorageWriter("runs/7/step-100"), async_stager=stager)

A checkpoint's path is `root/name`. Each rank has a store, `root/.remanent/rank-K`, in which all checkpoints of the
root lie: pages that did not change since the one before are not written again. A checkpoint is a named snapshot of
each rank's store; `root/name/.metadata` names them. It is written last, once all ranks' snapshots are durable, in one
step: a crash of any rank at any moment leaves the checkpoint that was there before under that path, or none, and
never a mix. Without collectives (`use_collectives=False`) that holds for each rank alone.

`dcp_to_torch_save` and `torch_save_to_dcp` are DCP's converters for these checkpoints; others go from and to DCP's own
checkpoints and safetensors files.

To give a checkpoint up, remove `root/name`, or move it out of the root: the next save of the same ranks to the root,
a minute after it was saved or later, gives back its space. It may be renamed within the root.

Each byte is proven by checksums on the way back, and so is `.metadata`, which is JSON: nothing is unpickled, but what
DCP's own planner pickles into a value that is no tensor. Ranks need not be as many when a checkpoint is loaded as
when it was saved. All of them must see the root, as on a file system that they share. Saves to one root take turns: a
rank's store is open while the rank writes.
"""

from __future__ import annotations

import concurrent.futures
import fcntl
import functools
import io
import json
import logging
import math
import os
import time
import uuid
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem, storage
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from remanent import _durable, _native, _pages, _sealed, _tensors
from remanent._dcp_formats import (
    dcp_to_remanent,
    dcp_to_safetensors,
    dcp_to_torch_save,
    remanent_to_dcp,
    safetensors_to_dcp,
    torch_save_to_dcp,
)
from remanent._errors import DamagedError, Error, LockedError, NoStateError, RefusedError, TakenError
from remanent._stager import Stager
from remanent._storages import extents_there

__all__ = [
    "Stager", "StorageReader", "StorageWriter", "StoredItem", "dcp_to_remanent", "dcp_to_safetensors",
    "dcp_to_torch_save", "is_of_dcp", "remanent_to_dcp", "safetensors_to_dcp", "torch_save_to_dcp",
]

_Path = str | os.PathLike[str]

_STORES = ".remanent"
_METADATA = ".metadata"
_KIND = "checkpoint"
# What DCP's own metadata begins with.
_PICKLE = b"\x80"
# Bytes of one batch; a longer page has one of its own.
_BATCH_BYTES = 32 << 20
# What a short page takes of a batch beyond its bytes, at most.
_PAGE_BYTES = 16 << 10
# Pages that are deleted by one batch.
_DELETED_PAGES = 10_000
# Bytes of a page that are read at once.
_READ_BYTES = 8 << 20
# Seconds for which a save waits until another one has closed the rank's store.
_LOCK_WAIT = 60.0
# Seconds after which a file that one rank made is there for all: caches of file systems that are shared hold what
# they know of a folder for up to a minute.
_VISIBLE_AFTER = 60.0
# Bytes of a name that a page's metadata holds.
_NAME_BYTES_MAX = 32 << 10
# Threads that read or write for one rank: ranks share a machine.
_THREADS_MAX = 4
# Characters of a save's name at the end of its snapshots' names.
_TOKEN_LEN = 12
_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last,
            "preserve": torch.preserve_format}


@dataclass(frozen=True)
class StoredItem:
    """Where an item of a checkpoint lies: a page of a snapshot of a rank's store, and its length in bytes."""

    store: str
    store_id: str
    snapshot: str
    key: str
    length: int


class _AtPath:
    """What a writer and a reader of a checkpoint have in common."""

    _path: Path

    def _go_to(self, path: _Path) -> None:
        # Without following links: what a link names may change.
        self._path = Path(os.path.abspath(path))

    @property
    def checkpoint_id(self) -> _Path:
        """The checkpoint's path."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: _Path) -> bool:
        """Whether a checkpoint may have this path."""
        return filesystem.FileSystem.validate_checkpoint_id(checkpoint_id)


class StorageWriter(_AtPath, storage.StorageWriter):
    """Saves checkpoints of DCP: for `dcp.save` and `dcp.async_save`.

    :param path: the checkpoint, `root/name`; `checkpoint_id` of a call takes its place.
    :param overwrite: whether a checkpoint of that name may be there. It is whole until the new one is.
    :param verify: whether the save returns only once all that it wrote was read back from the disk. A load proves each
        byte either way.
    :param options: options of `Store`, such as `image_io`.

    >>> import torch, torch.distributed.checkpoint as dcp
    >>> from remanent.dcp import StorageReader, StorageWriter
    >>> state = {"w": torch.ones(2, 3), "step": 1}
    >>> _ = dcp.save(state, storage_writer=StorageWriter(directory + "/step-1"), no_dist=True)
    >>> state["w"][0] = 7
    >>> _ = dcp.save(state, storage_writer=StorageWriter(directory + "/step-2"), no_dist=True)
    >>> found = {"w": torch.zeros(2, 3), "step": 0}
    >>> dcp.load(found, storage_reader=StorageReader(directory + "/step-1"), no_dist=True)
    >>> found["w"].sum().item(), found["step"]
    (6.0, 1)
    """

    def __init__(self, path: _Path, *, overwrite: bool = True, verify: bool = False, **options: Any) -> None:
        super().__init__()
        self._go_to(path)
        self._overwrite, self._verify, self._options = overwrite, verify, options
        self.save_id = uuid.uuid4().hex
        self._saving: _Saving | None = None
        self._rank = 0
        self._together = True

    def reset(self, checkpoint_id: _Path | None = None) -> None:
        """Begins another checkpoint, in another path if one is given."""
        if checkpoint_id:
            self._go_to(checkpoint_id)
        self.save_id = uuid.uuid4().hex
        self._end_saving()

    # DCP looks for a parameter of the name `kwargs`.
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Hears which rank this is, and whether the ranks save together."""
        self._rank = _rank(kwargs)
        self._together = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuses what cannot be stored, before anything is written."""
        for item in plan.items:
            dtype = None if item.tensor_data is None else item.tensor_data.properties.dtype
            if dtype is not None and dtype not in _tensors.SHORT:
                raise RefusedError(f"{item.index.fqn}: elements of {dtype} cannot be stored")
            if len(item.index.fqn.encode(errors="surrogatepass")) > _NAME_BYTES_MAX:
                raise RefusedError(f"{item.index.fqn[:100]}…: a name of more than {_NAME_BYTES_MAX} bytes")
        if not self._overwrite and _metadata_files(self._path):
            raise TakenError(f"Checkpoint already exists: {self._path}", remedy="remove it, or save with `overwrite`")
        _durable.make_folder(self._path)
        _durable.make_folder(self._stores)
        return plan if self._together else replace(plan, storage_data=_store_of(self._rank))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Nothing is divided anew: each rank writes what it has, to its own store."""
        # No more than that: a planner that caches plans gives ranks one of an earlier save.
        return [replace(plan, storage_data=_store_of(rank)) for rank, plan in enumerate(plans)]

    @property
    def _stores(self) -> Path:
        return self._path.parent / _STORES

    def _end_saving(self) -> None:
        if self._saving is not None:
            self._saving.end()
            self._saving = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's items and makes its snapshot; durable when this returns."""
        store_name = plan.storage_data or _store_of(self._rank)
        self._end_saving()
        # Said before the checkpoints are looked at: another save that looks later finds this one.
        self._saving = _Saving(self._stores, self.save_id)
        own = {"device": "host", "page_load": "on_demand", "snapshots_kept": 1, "compression": False,
               "spare_bytes": 0}
        with _open_store(self._stores / store_name, {**own, **self._options}) as store:
            # Before anything is written: the space of checkpoints that are gone is there for this one.
            _give_up(store, store_name, self._path.parent)
            keys = _write_items(store, plan, planner)
            label = self._path.name.encode(errors="ignore")[:24].decode(errors="ignore")
            name = f"{label}@{store.lsn} {self._saving.token}"
            store.snapshot(name, verify=self._verify)
            results = []
            for item, (key, length) in zip(plan.items, keys, strict=True):
                stored = StoredItem(store_name, store.id, name, key, length)
                results.append(WriteResult(item.index, length, stored))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Makes the checkpoint visible: all ranks have theirs on disk."""
        metadata.version = filesystem.CURRENT_DCP_VERSION
        metadata.storage_data = {result.index: result.storage_data for of_rank in results for result in of_rank}
        metadata.storage_meta = self.storage_meta()
        path = _metadata_path(self._path, None if self._together else self._rank)
        _durable.publish(path, _encode(metadata))
        # What an earlier save of the other kind left here would be loaded in its place.
        others = [each for each in _metadata_files(self._path) if (each.name == _METADATA) != self._together]
        for other in others:
            other.unlink(missing_ok=True)
        if others:
            _durable.sync_folder(self._path)
        self._end_saving()

    def storage_meta(self) -> StorageMeta | None:
        """What DCP's planners are told of this save."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)


class StorageReader(_AtPath, storage.StorageReader):
    """Loads checkpoints that `StorageWriter` saved: for `dcp.load`. Takes no lock: a save may go on meanwhile.

    :param path: the checkpoint, `root/name`; `checkpoint_id` of a call takes its place.
    :param cast: whether elements become those of the tensors that they are loaded into, as with DCP's own reader. If
        False, tensors of other kinds of elements are refused.

    DCP raises a `CheckpointException` with what a rank failed with: `NoStateError` if there is no such checkpoint,
    `RefusedError` for a tensor that cannot have the checkpoint's values, before any tensor of the rank changes,
    `DamagedError` if bytes on disk are not what was written. Tensors that were loaded before keep what they got.
    """

    def __init__(self, path: _Path, *, cast: bool = False) -> None:
        super().__init__()
        self._go_to(path)
        self._cast = cast
        # Of tensors, by their names.
        self._dtypes: dict[str, torch.dtype] = {}
        self.load_id = uuid.uuid4().hex
        self._save_id: str | None = None
        self._items: dict[MetadataIndex, StoredItem] = {}

    def reset(self, checkpoint_id: _Path | None = None) -> None:
        """Begins to load another checkpoint, from another path if one is given."""
        if checkpoint_id:
            self._go_to(checkpoint_id)
        self.load_id = uuid.uuid4().hex
        self._items = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint holds."""
        rank = kwargs.get("rank")
        if rank is not None and _metadata_path(self._path, None).exists():
            # DCP asks for a rank's own if that of all ranks cannot be read: it would be of another save.
            _proven(_metadata_path(self._path, None))
        found = _read(_metadata_path(self._path, rank))
        if found.storage_meta is not None:
            found.storage_meta.load_id = self.load_id
        return found

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any,
                              **kwargs: Any) -> None:
        """Takes what `read_metadata` found."""
        self._items = metadata.storage_data
        self._dtypes = {name: said.properties.dtype for name, said in metadata.state_dict_metadata.items()
                        if isinstance(said, TensorStorageMetadata)}
        self._save_id = None if metadata.storage_meta is None else metadata.storage_meta.save_id

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Each rank reads what it wants; it says of which save."""
        return replace(plan, storage_data=self._save_id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Refuses a load of which some ranks would have an earlier save than others."""
        if len({plan.storage_data for plan in plans}) > 1:
            raise RefusedError(f"{self._path} was saved over while its ranks began to load", remedy="load again")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads items into the tensors that the planner names: of a page the rows that they lie in."""
        by_snapshot: defaultdict[tuple[str, str, str], list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            if item.type.name != "BYTE_IO":
                self._refuse_misfit(item, planner.resolve_tensor(item))
            stored = self._items[item.storage_index]
            by_snapshot[stored.store, stored.store_id, stored.snapshot].append(item)
        for (store, store_id, snapshot), items in by_snapshot.items():
            try:
                view = _native.View(_root_of(self._path) / _STORES / store, f"name:{snapshot}")
            except NoStateError as error:
                raise NoStateError(f"{self._path} was saved over or removed meanwhile", remedy="load again") from error
            with view:
                if view.id != store_id:
                    raise DamagedError(f"the checkpoint lies in store {store_id}, and {store} is store {view.id}",
                                       remedy="put back the store that it was saved to", path=str(self._path))
                with _Jobs() as jobs:
                    for item in items:
                        self._load(jobs, view, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _refuse_misfit(self, item: ReadItem, target: torch.Tensor) -> None:
        """Refuses a tensor that cannot have the values of an item as they are."""
        name = item.storage_index.fqn
        saved = self._dtypes.get(name, target.dtype)
        if target.size() != item.lengths:
            raise RefusedError(f"{name}: {tuple(item.lengths)} elements do not fit into {tuple(target.size())}",
                               remedy="load into a tensor of the checkpoint's shape")
        if target.dtype != saved and not self._cast:
            raise RefusedError(f"{name}: the checkpoint has elements of {saved}, and the tensor of {target.dtype}",
                               remedy=f"load into a tensor of {saved}, or convert with StorageReader(path, cast=True)")

    def _load(self, jobs: _Jobs, view: _native.View, item: ReadItem, planner: LoadPlanner) -> None:
        key = self._items[item.storage_index].key
        if item.type.name == "BYTE_IO":
            planner.load_bytes(item, io.BytesIO(view.read(key)))
            return
        target = planner.resolve_tensor(item).detach()
        if target.numel():
            for block in _row_blocks(view, key, item, target):
                # Copied in the calling thread, whose streams and modes are those that the target is changed by.
                jobs.run(block.read, block.copy)
        # Jobs end in their order, so after the last block.
        jobs.run(None, functools.partial(planner.commit_tensor, item, target))


def is_of_dcp(path: _Path) -> bool:
    """Whether a checkpoint is one of DCP's own `FileSystemWriter`, and so for its `FileSystemReader`.

    >>> import torch, torch.distributed.checkpoint as dcp
    >>> from remanent.dcp import StorageWriter, is_of_dcp
    >>> _ = dcp.save({"w": torch.ones(2)}, checkpoint_id=directory + "/theirs", no_dist=True)
    >>> _ = dcp.save({"w": torch.ones(2)}, storage_writer=StorageWriter(directory + "/ours"), no_dist=True)
    >>> is_of_dcp(directory + "/theirs"), is_of_dcp(directory + "/ours")
    (True, False)
    """
    try:
        with _metadata_path(Path(path), None).open("rb") as file:
            return file.read(1) == _PICKLE
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False


def _rank(kwargs: dict[str, Any]) -> int:
    rank = kwargs.get("rank")
    if rank is None:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return int(rank)


# Pages.

@dataclass
class _Write:
    """A page to be written: its content, and what was there before, if anything."""

    key: str
    said: dict[str, Any]
    content: torch.Tensor
    before: _native.PageInfo | None


def _write_items(store: _native.Store, plan: SavePlan, planner: SavePlanner) -> list[tuple[str, int]]:
    """Makes the store hold these items and no others; returns each one's key and length.

    By batches of a bounded length, several at a time: what is between two checkpoints is in no snapshot, and so in
    none of them.
    """
    before = {_identity(info.metadata): info for info in store.pages() if "name" in info.metadata}
    taken = set(store.keys())
    keys: list[tuple[str, int]] = []
    with _Jobs() as jobs:
        group: list[_Write] = []
        group_bytes = 0
        for item in plan.items:
            said, content = _resolved(item, planner)
            length = content.numel()
            was = before.pop(_identity(said), None)
            key = str(was.key) if was is not None else _pages.key_of(said["name"], taken.__contains__)
            taken.add(key)
            keys.append((key, length))
            group.append(_Write(key, said, content, was))
            group_bytes += length + _PAGE_BYTES
            if group_bytes >= _BATCH_BYTES:
                jobs.run(functools.partial(_write_group, store, group))
                group, group_bytes = [], 0
        jobs.run(functools.partial(_write_group, store, group))
    # What the plan does not name is in this checkpoint no more.
    gone = [info.page for info in before.values()]
    for at in range(0, len(gone), _DELETED_PAGES):
        batch = store.batch()
        for page in gone[at:at + _DELETED_PAGES]:
            batch.delete(page)
        store.commit(batch)
    store.wait_durable()
    return keys


def _write_group(store: _native.Store, group: list[_Write]) -> None:
    batch, is_empty = store.batch(), True
    for write in group:
        was, length = write.before, write.content.numel()
        if was is not None and was.metadata != write.said:
            # Of another kind or shape: another page.
            batch.delete(was.page)
            was = None
        if was is None:
            content = write.content if length else 0
            batch.create(content, key=write.key, place="disk", metadata=write.said, at_commit=True)
        elif batch.update(was.page, write.content if length else b"", logged_max=0) == 0:
            continue
        is_empty = False
    if not is_empty:
        store.commit(batch)


class _Jobs:
    """Threads that read and write, while the calling thread asks the planner for more. The engine's calls let go of
    the interpreter's lock. Work that waits holds bytes, so no more waits than can be done.
    """

    def __init__(self) -> None:
        threads = min(_THREADS_MAX, len(os.sched_getaffinity(0)))
        self._pool = concurrent.futures.ThreadPoolExecutor(threads, "remanent-dcp")
        self._room = 2 * threads
        self._running: deque[tuple[concurrent.futures.Future[None] | None, Callable[[], None] | None]] = deque()

    def run(self, job: Callable[[], None] | None, finish: Callable[[], None] | None = None) -> None:
        """Has a thread do a job, and the calling thread what comes after it, in the order of the jobs."""
        while len(self._running) >= self._room:
            self._finish()
        self._running.append((None if job is None else self._pool.submit(job), finish))

    def _finish(self) -> None:
        running, finish = self._running.popleft()
        if running is not None:
            running.result()
        if finish is not None:
            finish()

    def __enter__(self) -> _Jobs:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            while kind is None and self._running:
                self._finish()
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)


def _identity(said: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    """Which item a page holds: the name of the whole, and where in it the page's part begins."""
    return said.get("part of", said["name"]), tuple(said.get("offset", ()))


def _resolved(item: WriteItem, planner: SavePlanner) -> tuple[dict[str, Any], torch.Tensor]:
    """What an item's page says of it, and its bytes."""
    data = planner.resolve_data(item)
    if isinstance(data, io.BytesIO):
        held = data.getbuffer()
        empty = torch.empty(0, dtype=torch.uint8)
        return {"name": item.index.fqn}, torch.frombuffer(held, dtype=torch.uint8) if held.nbytes else empty
    name = item.index.fqn
    [extent] = extents_there({name: data})
    tensor = extent.tensor
    said: dict[str, Any] = {"name": name, "dtype": _tensors.SHORT[tensor.dtype], "shape": list(map(int, tensor.shape))}
    if item.index.offset is not None and any(item.index.offset):
        offset = [int(each) for each in item.index.offset]
        # A name of its own, for what looks at the store; another item may have the very same one.
        said |= {"name": f"{name}@{','.join(map(str, offset))}", "part of": name, "offset": offset}
    return said, _tensors.bytes_of(tensor.contiguous())


@dataclass
class _RowBlock:
    """Some rows of a page, and the part of the target that they go to."""

    view: _native.View
    key: str
    offset: int
    # Where the bytes come to: the target's own memory, or memory of which `copied` is what the target gets.
    memory: torch.Tensor
    copied: torch.Tensor | None
    target: torch.Tensor

    def read(self) -> None:
        self.view.read_into(self.key, self.memory, self.offset)

    def copy(self) -> None:
        if self.copied is not None:
            self.target.copy_(self.copied)


def _row_blocks(view: _native.View, key: str, item: ReadItem, target: torch.Tensor) -> Iterator[_RowBlock]:
    """The rows of a page that a tensor lies in, some megabytes at a time."""
    said = view.info(key).metadata
    dtype, shape = _tensors.DTYPE[said["dtype"]], tuple(said["shape"])
    offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
    rows, first = (lengths[0], offsets[0]) if shape else (1, 0)
    row = dtype.itemsize * math.prod(shape[1:])
    # Where they are wanted, without a copy.
    in_place = (lengths[1:] == shape[1:] and target.device.type == "cpu" and target.dtype == dtype
                and target.is_contiguous() and not target.is_conj() and not target.is_neg())
    at_once = max(1, _READ_BYTES // row)
    for at in range(0, rows, at_once):
        count = min(at_once, rows - at)
        part = target.narrow(0, at, count) if shape else target
        if in_place:
            yield _RowBlock(view, key, (first + at) * row, _tensors.bytes_of(part), None, part)
            continue
        memory = torch.empty(count * row, dtype=torch.uint8)
        found = torch.empty(0, dtype=dtype)
        of_rows = (count, *shape[1:]) if shape else ()
        found.set_(memory.untyped_storage(), 0, of_rows, _pages.contiguous_stride(of_rows))
        for dim in range(1, len(shape)):
            found = found.narrow(dim, offsets[dim], lengths[dim])
        yield _RowBlock(view, key, (first + at) * row, memory, found, part)


# Stores.

def _open_store(directory: Path, options: dict[str, Any]) -> _native.Store:
    until = time.monotonic() + _LOCK_WAIT
    while True:
        try:
            return _native.Store(directory, **options)
        except LockedError:
            # Another save to this root writes: it takes as long as a checkpoint's bytes take.
            if time.monotonic() >= until:
                raise
            time.sleep(0.05)


def _give_up(store: _native.Store, store_name: str, root: Path) -> None:
    """Gives up the snapshots that no checkpoint of the root names, and no save is about to name."""
    saving, stores = _saving(root / _STORES), _kept_snapshots(root)
    named = {snapshot for store_id, snapshot in (stores or {}).get(store_name, ()) if store_id == store.id}
    if not named:
        # Perhaps the root cannot be read, or it is not the one that the other ranks see.
        return
    since = (time.time() - _VISIBLE_AFTER) * 1000
    gone = [info.name for info in store.snapshots()
            if info.name is not None and info.name not in named and info.name[-_TOKEN_LEN:] not in saving
            and info.created_unix_ms <= since]
    if gone:
        store.prune(give_up=gone, names_only=True)


def _store_of(rank: int) -> str:
    return f"rank-{rank}"


class _Saving:
    """Says that a save is under way, until it ends or its process dies."""

    def __init__(self, stores: Path, save_id: str) -> None:
        self.token = save_id[:_TOKEN_LEN]
        self._path = stores / f"saving-{self.token}"
        # Under another name until it is locked: unlocked, it would be taken for what a dead process left.
        unlocked = stores / f"unlocked-{self.token}"
        self._file = os.open(unlocked, os.O_CREAT | os.O_RDWR, 0o644)
        _savings.add(self)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        os.replace(unlocked, self._path)

    def end(self) -> None:
        """The checkpoint can be seen, or will never be."""
        if self._file >= 0:
            self._path.unlink(missing_ok=True)
            self.leave()

    def leave(self) -> None:
        """Closes the file. The lock ends with its last descriptor."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self.end()


_savings: weakref.WeakSet[_Saving] = weakref.WeakSet()


def _leave_savings() -> None:
    """Leaves the parent's saves to the parent: a forked child neither keeps their locks nor ends them."""
    for saving in list(_savings):
        saving.leave()


os.register_at_fork(after_in_child=_leave_savings)


def _saving(stores: Path) -> frozenset[str]:
    """The tokens of the saves that are under way. What is left of those that died is removed."""
    tokens = set()
    for entry in os.scandir(stores):
        if not entry.name.startswith("saving-"):
            continue
        try:
            file = os.open(entry.path, os.O_RDWR)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            Path(entry.path).unlink(missing_ok=True)
        except OSError:
            tokens.add(entry.name.removeprefix("saving-"))
        finally:
            os.close(file)
    return frozenset(tokens)


def _kept_snapshots(root: Path) -> dict[str, set[tuple[str, str]]] | None:
    """The snapshots that checkpoints of the root name, by store; None if there is one that cannot be read, or that may
    be on its way to another name."""
    kept: dict[str, set[tuple[str, str]]] = {}
    try:
        listed = _listed(root)
        folders = [root / name for name, _ in listed.folders if name != _STORES]
        for path in [path for folder in folders for path in _metadata_files(folder, is_there=True)]:
            try:
                stores = json.loads(_proven(path)[0])
            except NoStateError as error:
                if path.exists():
                    # Another program's.
                    continue
                # It was there just now: it may be on its way to another name.
                raise error
            for store, (store_id, snapshot) in stores.items():
                kept.setdefault(store, set()).add((store_id, snapshot))
        if _listed(root) != listed:
            # A folder that is renamed while others are listed may be found by neither name.
            return None
    except (Error, OSError) as error:
        logging.getLogger("remanent").warning(
            "a checkpoint in %s cannot be read, so the space of those that are gone is not given back: %s", root, error)
        return None
    return kept


# Paths.

def _root_of(checkpoint: Path) -> Path:
    """The folder that a checkpoint's stores lie in. Its path may be a link from elsewhere."""
    if (checkpoint.parent / _STORES).is_dir():
        return checkpoint.parent
    return checkpoint.resolve().parent


# The metadata.

def _metadata_path(checkpoint: Path, rank: int | None) -> Path:
    return checkpoint / (_METADATA if rank is None else f"__{rank}{_METADATA}")


class _Listed(NamedTuple):
    """The folders of a root, and when it was changed last."""

    changed: int
    # Names and inodes.
    folders: list[tuple[str, int]]


def _listed(root: Path) -> _Listed:
    return _Listed(root.stat().st_mtime_ns,
                   sorted((entry.name, entry.inode()) for entry in os.scandir(root) if entry.is_dir()))


def _metadata_files(checkpoint: Path, *, is_there: bool = False) -> list[Path]:
    """The files of metadata in a folder: that of all ranks, and those of ranks that saved alone.

    :param is_there: whether a folder that is not there any more raises what was found.
    """
    try:
        names = [entry.name for entry in os.scandir(checkpoint)]
    except (FileNotFoundError, NotADirectoryError):
        if is_there:
            raise
        return []
    return [checkpoint / name for name in names if name == _METADATA or (name.startswith("__") and
                                                                        name.endswith(_METADATA))]


def _encode(found: Metadata) -> bytes:
    """The metadata as three lines of JSON: a sum of the others, the stores, and all the rest."""
    tensors: dict[str, Any] = {}
    for name, entry in found.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            tensors[name] = None
            continue
        kind = entry.properties
        memory_format = next(name for name, format_ in _FORMATS.items() if format_ == kind.memory_format)
        strides = getattr(kind, "strides", None)
        tensors[name] = {
            "dtype": _tensors.SHORT[kind.dtype], "requires_grad": kind.requires_grad, "pin_memory": kind.pin_memory,
            "memory_format": memory_format, "strides": None if strides is None else list(strides),
            "size": list(entry.size), "chunks": [[list(chunk.offsets), list(chunk.sizes)] for chunk in entry.chunks],
        }
    stores: dict[str, list[str]] = {}
    items = []
    for index, stored in found.storage_data.items():
        stores[stored.store] = [stored.store_id, stored.snapshot]
        offset = None if index.offset is None else list(index.offset)
        items.append([index.fqn, offset, index.index, stored.store, stored.key, stored.length])
    meta = found.storage_meta
    held = {
        "version": found.version, "tensors": tensors, "items": items,
        "planner": _pages.flatten("planner_data", found.planner_data, _adapt),
        "save_id": None if meta is None else meta.save_id,
        "checkpoint_id": None if meta is None else str(meta.checkpoint_id),
    }
    return _sealed.seal(_KIND, [stores, held])


def _adapt(path: str, value: object) -> object | None:
    return {"$": ["size", list(value)]} if type(value) is torch.Size else None


def _proven(path: Path) -> tuple[bytes, bytes]:
    """What a file says of stores, and of all the rest, proven by its sum.

    :raises NoStateError: if there is none, or it is not ours.
    """
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NoStateError(f"there is no checkpoint in {path.parent}: {path.name} is missing",
                           remedy="give the path of a checkpoint that was saved whole") from error
    except IsADirectoryError as error:
        raise NoStateError(f"{path} is a folder") from error
    if content[:1] == _PICKLE:
        raise NoStateError(f"{path} is of DCP's own format", remedy="load it with DCP's FileSystemReader")
    beginning = _sealed.begins(_KIND)
    if len(content) >= len(beginning) and not content.startswith(beginning):
        raise NoStateError(f"{path} is not a checkpoint of this package")
    stores, rest = _sealed.parts_of(_KIND, content, path)
    return stores, rest


def _read(path: Path) -> Metadata:
    stores, held = (json.loads(part) for part in _proven(path))
    entries: dict[str, Any] = {}
    for name, entry in held["tensors"].items():
        if entry is None:
            entries[name] = BytesStorageMetadata()
            continue
        kind = TensorProperties(
            dtype=_tensors.DTYPE[entry["dtype"]], requires_grad=entry["requires_grad"],
            memory_format=_FORMATS[entry["memory_format"]], pin_memory=entry["pin_memory"])
        if entry["strides"] is not None and hasattr(kind, "strides"):
            kind.strides = tuple(entry["strides"])
        chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                  for offsets, sizes in entry["chunks"]]
        entries[name] = TensorStorageMetadata(kind, torch.Size(entry["size"]), chunks)
    items = {}
    for fqn, offset, hint, store, key, length in held["items"]:
        store_id, snapshot = stores[store]
        items[MetadataIndex(fqn, offset, hint)] = StoredItem(store, store_id, snapshot, key, length)
    meta = StorageMeta(checkpoint_id=held["checkpoint_id"], save_id=held["save_id"])
    adapt = {"size": torch.Size}
    planner_data = _pages.unflatten(held["planner"], lambda tag: adapt[tag[0]](tag[1]))
    return Metadata(entries, planner_data, items, meta, held["version"])
