"""Checkpoints of `torch.distributed.checkpoint` (DCP) that are durable, proven and deduplicated.

    dcp.save(state, storage_writer=StorageWriter("runs/7/step-100"))
    dcp.load(state, storage_reader=StorageReader("runs/7/step-100"))

A checkpoint's path is `root/name`. Each rank has a store, `root/.remanent/rank-K`, in which all checkpoints of the
root lie: pages that did not change since the one before are not written again. A checkpoint is a named snapshot of
each rank's store; `root/name/.metadata` names them. It is written last, once all ranks' snapshots are durable, in one
step: a crash of any rank at any moment leaves the checkpoint that was there before under that path, or none, and
never a mix. To give a checkpoint up, remove `root/name`; the next save to the root gives back its space.

Each byte is proven by checksums on the way back, and so is `.metadata`, which is JSON: nothing is unpickled, but what
DCP's own planner pickles into a value that is no tensor. Ranks need not be as many when a checkpoint is loaded as
when it was saved. All of them must see the root, as on a file system that they share.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import io
import json
import math
import os
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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

from remanent import _native, _pages, torch as _torch
from remanent._errors import DamagedError, NoStateError, RefusedError, TakenError

__all__ = ["StorageReader", "StorageWriter", "StoredItem"]

_Path = str | os.PathLike[str]

_STORES = ".remanent"
_METADATA = ".metadata"
_MAGIC = b'{"remanent checkpoint": 1, '
# Bytes of one batch; a longer page has one of its own.
_BATCH_BYTES = 32 << 20
# Threads that read or write for one rank: ranks share a machine.
_THREADS_MAX = 4
# Bytes that are compared at once.
_COMPARED_BYTES = 8 << 20
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


class StorageWriter(storage.StorageWriter):
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
        self._path = Path(path)
        self._overwrite, self._verify, self._options = overwrite, verify, options
        self._save_id = uuid.uuid4().hex
        self._rank = 0
        self._together = True

    @property
    def checkpoint_id(self) -> _Path:
        """The checkpoint's path."""
        return self._path

    def reset(self, checkpoint_id: _Path | None = None) -> None:
        """Begins another checkpoint, in another path if one is given."""
        if checkpoint_id:
            self._path = Path(checkpoint_id)
        self._save_id = uuid.uuid4().hex

    # DCP looks for a parameter of the name `kwargs`.
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Hears which rank this is, and whether the ranks save together."""
        self._rank = _rank(kwargs)
        self._together = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuses what cannot be stored, before anything is written."""
        for item in plan.items:
            dtype = None if item.tensor_data is None else item.tensor_data.properties.dtype
            if dtype is not None and dtype not in _torch._SHORT:
                raise RefusedError(f"{item.index.fqn}: elements of {dtype} cannot be stored")
        if not self._overwrite and _metadata_path(self._path, None if self._together else self._rank).exists():
            raise TakenError(f"there is a checkpoint in {self._path}", remedy="remove it, or save with `overwrite`")
        self._path.mkdir(parents=True, exist_ok=True)
        return replace(plan, storage_data=f"rank-{self._rank}")

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Nothing is divided anew: each rank writes what it has, to its own store."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's items and makes its snapshot; durable when this returns."""
        store_name = plan.storage_data or f"rank-{self._rank}"
        directory = self._path.parent / _STORES / store_name
        directory.parent.mkdir(exist_ok=True)
        own = {"device": "host", "page_load": "on_demand", "snapshots_kept": 1, "compression": False,
               "spare_bytes": 0}
        with _native.Store(directory, **{**own, **self._options}) as store:
            # Before anything is written: the space of checkpoints that are gone is there for this one.
            _give_up_unnamed(store, self._path.parent, store_name)
            keys = _write_items(store, plan, planner)
            label = self._path.name.encode()[:40].decode(errors="ignore")
            name = f"{label}@{store.lsn}"
            if all(info.name != name for info in store.snapshots()):
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
        _publish(path, _encode(metadata))

    def storage_meta(self) -> StorageMeta | None:
        """What DCP's planners are told of this save."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: _Path) -> bool:
        """Whether a checkpoint may have this path."""
        return filesystem.FileSystem.validate_checkpoint_id(checkpoint_id)


class StorageReader(storage.StorageReader):
    """Loads checkpoints that `StorageWriter` saved: for `dcp.load`. Takes no lock: a save may go on meanwhile.

    :param path: the checkpoint, `root/name`; `checkpoint_id` of a call takes its place.
    :raises NoStateError: if there is no checkpoint.
    :raises DamagedError: if bytes on disk are not what was written. Tensors that were loaded before keep what they got.
    """

    def __init__(self, path: _Path) -> None:
        super().__init__()
        self._path = Path(path)
        self._load_id = uuid.uuid4().hex
        self._items: dict[MetadataIndex, StoredItem] = {}

    @property
    def checkpoint_id(self) -> _Path:
        """The checkpoint's path."""
        return self._path

    def reset(self, checkpoint_id: _Path | None = None) -> None:
        """Begins to load another checkpoint, from another path if one is given."""
        if checkpoint_id:
            self._path = Path(checkpoint_id)
        self._load_id = uuid.uuid4().hex
        self._items = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint holds."""
        found = _read(_metadata_path(self._path, kwargs.get("rank")))
        if found.storage_meta is not None:
            found.storage_meta.load_id = self._load_id
        return found

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any,
                              **kwargs: Any) -> None:
        """Takes what `read_metadata` found."""
        self._items = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing is planned: each rank reads what it wants."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing is planned: each rank reads what it wants."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads items into the tensors that the planner names, and no more of a page than they want."""
        by_snapshot: defaultdict[tuple[str, str, str], list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            stored = self._items[item.storage_index]
            by_snapshot[stored.store, stored.store_id, stored.snapshot].append(item)
        for (store, store_id, snapshot), items in by_snapshot.items():
            with _native.View(self._path.parent / _STORES / store, f"name:{snapshot}") as view:
                if view.id != store_id:
                    raise DamagedError(f"the checkpoint lies in store {store_id}, and {store} is store {view.id}",
                                       remedy="put back the store that it was saved to", path=str(self._path))
                self._load(view, items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _load(self, view: _native.View, items: list[ReadItem], planner: LoadPlanner) -> None:
        targets = []
        with _Jobs() as jobs:
            for item in items:
                key = self._items[item.storage_index].key
                if item.type.name == "BYTE_IO":
                    planner.load_bytes(item, io.BytesIO(view.read(key)))
                    continue
                target = planner.resolve_tensor(item).detach()
                if target.size() != item.lengths:
                    raise RefusedError(f"{item.storage_index.fqn}: {tuple(item.lengths)} elements do not fit into "
                                       f"{tuple(target.size())}")
                targets.append((item, target))
                jobs.run(_read_part, view, key, tuple(item.storage_offsets), tuple(item.lengths), target)
        for item, target in targets:
            planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: _Path) -> bool:
        """Whether a checkpoint may have this path."""
        return filesystem.FileSystem.validate_checkpoint_id(checkpoint_id)


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
    content: torch.Tensor | None
    length: int
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
        for item in plan.items:
            said, content, length = _resolved(item, planner)
            was = before.pop(_identity(said), None)
            key = str(was.key) if was is not None else _pages.key_of(said["name"], taken.__contains__)
            taken.add(key)
            keys.append((key, length))
            group.append(_Write(key, said, content, length, was))
            if sum(write.length for write in group) >= _BATCH_BYTES:
                jobs.run(_write_group, store, group)
                group = []
        jobs.run(_write_group, store, group)
    # What the plan does not name is in this checkpoint no more.
    if before:
        batch = store.batch()
        for info in before.values():
            batch.delete(info.page)
        store.commit(batch)
    store.wait_durable()
    return keys


def _write_group(store: _native.Store, group: list[_Write]) -> None:
    batch, is_empty = store.batch(), True
    for write in group:
        was = write.before
        if was is not None and was.metadata != write.said:
            # Of another kind or shape: another page.
            batch.delete(was.page)
            was = None
        if was is None:
            batch.create(write.content if write.length else 0, key=write.key, place="disk", metadata=write.said)
            is_empty = False
            continue
        if was.length != write.length:
            batch.resize(was.page, write.length)
            is_empty = False
        if write.content is not None and not (was.length == write.length and _is_same(store, was.page, write.content)):
            batch.write(was.page, 0, write.content)
            is_empty = False
    if not is_empty:
        store.commit(batch)


class _Jobs:
    """Threads that copy, read and write, while the calling thread asks the planner for more. The engine's calls and
    torch's copies let go of the interpreter's lock. Work that waits holds bytes, so no more waits than can be done.
    """

    def __init__(self) -> None:
        threads = min(_THREADS_MAX, len(os.sched_getaffinity(0)))
        self._pool = concurrent.futures.ThreadPoolExecutor(threads, "remanent-dcp")
        self._room = threads + 1
        self._running: deque[concurrent.futures.Future[None]] = deque()

    def run(self, job: Callable[..., None], *arguments: Any) -> None:
        while len(self._running) >= self._room:
            self._running.popleft().result()
        self._running.append(self._pool.submit(job, *arguments))

    def __enter__(self) -> _Jobs:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=kind is not None)
        if kind is None:
            for running in self._running:
                running.result()


def _identity(said: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    """Which item a page holds: the name of the whole, and where in it the page's part begins."""
    return said.get("part of", said["name"]), tuple(said.get("offset", ()))


def _resolved(item: WriteItem, planner: SavePlanner) -> tuple[dict[str, Any], torch.Tensor | None, int]:
    """What an item's page says of it, its bytes and their number."""
    data = planner.resolve_data(item)
    if isinstance(data, io.BytesIO):
        content = torch.frombuffer(data.getbuffer(), dtype=torch.uint8) if data.getbuffer().nbytes else None
        length = data.getbuffer().nbytes
        return {"name": item.index.fqn}, content, length
    name = item.index.fqn
    tensor = _torch._plain(name, data)
    bytes_ = _torch._bytes_of(tensor.contiguous())
    said: dict[str, Any] = {"name": name, "dtype": _torch._SHORT[tensor.dtype], "shape": list(map(int, tensor.shape))}
    if item.index.offset is not None and any(item.index.offset):
        offset = [int(each) for each in item.index.offset]
        # A name of its own, for what looks at the store; another item may have the very same one.
        said |= {"name": f"{name}@{','.join(map(str, offset))}", "part of": name, "offset": offset}
    return said, bytes_ if bytes_.numel() else None, bytes_.numel()


def _is_same(store: _native.Store, page: int, content: torch.Tensor) -> bool:
    """Whether a page has these bytes, piece by piece: the page is on disk, and no longer than memory."""
    piece = torch.empty(min(_COMPARED_BYTES, content.numel()), dtype=torch.uint8)
    for at in range(0, content.numel(), _COMPARED_BYTES):
        now = content[at:at + _COMPARED_BYTES]
        before = piece[:now.numel()]
        store.read_into(page, before, at)
        if not torch.equal(before, now):
            return False
    return True


def _read_part(view: _native.View, key: str, offsets: tuple[int, ...], lengths: tuple[int, ...],
               target: torch.Tensor) -> None:
    """Reads a block of a page's tensor: the rows that it lies in, of which the rest is cut off."""
    if target.numel() == 0:
        return
    said = view.info(key).metadata
    dtype, shape = _torch._DTYPE[said["dtype"]], tuple(said["shape"])
    rows, first = (lengths[0], offsets[0]) if shape else (1, 0)
    row = dtype.itemsize * math.prod(shape[1:])
    is_whole = lengths[1:] == shape[1:]
    if is_whole and target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous():
        # Where they are wanted, without a copy.
        view.read_into(key, _torch._bytes_of(target), first * row)
        return
    part = torch.empty(rows * row, dtype=torch.uint8)
    view.read_into(key, part, first * row)
    found = torch.empty(0, dtype=dtype)
    of_rows = (rows, *shape[1:]) if shape else ()
    found.set_(part.untyped_storage(), 0, of_rows, _pages.contiguous_stride(of_rows))
    for dim in range(1, len(shape)):
        found = found.narrow(dim, offsets[dim], lengths[dim])
    target.copy_(found)


def _give_up_unnamed(store: _native.Store, root: Path, store_name: str) -> None:
    """Gives up the snapshots that no checkpoint of the root names. If one cannot be read, none is given up."""
    named = set()
    for path in _metadata_paths(root):
        try:
            stored = _read(path).storage_data.values()
        except NoStateError:
            continue
        except (DamagedError, OSError):
            return
        named |= {item.snapshot for item in stored if item.store == store_name and item.store_id == store.id}
    gone = [info.name for info in store.snapshots() if info.name is not None and info.name not in named]
    if gone:
        store.prune(give_up=gone, names_only=True)


# The metadata.

def _metadata_path(checkpoint: Path, rank: int | None) -> Path:
    return checkpoint / (_METADATA if rank is None else f"__{rank}{_METADATA}")


def _metadata_paths(root: Path) -> Iterator[Path]:
    yield from root.glob(f"*/{_METADATA}")
    yield from root.glob(f"*/__*{_METADATA}")


def _publish(path: Path, content: bytes) -> None:
    """Puts a file in the place of another one, whole or not at all; durable when this returns."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    # The file's name, and the folder's.
    for folder in (path.parent, path.parent.parent):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _encode(found: Metadata) -> bytes:
    """The metadata as two lines of JSON; the first one has the sum of the second."""
    tensors: dict[str, Any] = {}
    for name, entry in found.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            tensors[name] = None
            continue
        kind = entry.properties
        memory_format = next(name for name, format_ in _FORMATS.items() if format_ == kind.memory_format)
        strides = getattr(kind, "strides", None)
        tensors[name] = {
            "dtype": _torch._SHORT[kind.dtype], "requires_grad": kind.requires_grad, "pin_memory": kind.pin_memory,
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
        "version": found.version, "tensors": tensors, "stores": stores, "items": items,
        "planner": _pages.flatten("planner_data", found.planner_data, _adapt),
        "save_id": None if meta is None else meta.save_id,
        "checkpoint_id": None if meta is None else str(meta.checkpoint_id),
    }
    body = json.dumps(held, separators=(",", ":"), allow_nan=False).encode() + b"\n"
    return _MAGIC + b'"blake2b": "' + hashlib.blake2b(body, digest_size=16).hexdigest().encode() + b'"}\n' + body


def _adapt(path: str, value: object) -> object | None:
    return {"$": ["size", list(value)]} if type(value) is torch.Size else None


def _read(path: Path) -> Metadata:
    """The metadata in a file, proven by its sum.

    :raises NoStateError: if there is none, or it is not ours.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise NoStateError(f"there is no checkpoint in {path.parent}: {path.name} is missing",
                           remedy="give the path of a checkpoint that was saved whole") from error
    if content[:1] == b"\x80":
        raise NoStateError(f"{path} is of DCP's own format", remedy="load it with DCP's FileSystemReader")
    first, _, body = content.partition(b"\n")
    wanted = _MAGIC + b'"blake2b": "' + hashlib.blake2b(body, digest_size=16).hexdigest().encode() + b'"}'
    if first != wanted:
        raise DamagedError(f"{path} is not what was written", remedy="load another checkpoint", path=str(path.parent))
    held = json.loads(body)
    entries: dict[str, Any] = {}
    for name, entry in held["tensors"].items():
        if entry is None:
            entries[name] = BytesStorageMetadata()
            continue
        kind = TensorProperties(
            dtype=_torch._DTYPE[entry["dtype"]], requires_grad=entry["requires_grad"],
            memory_format=_FORMATS[entry["memory_format"]], pin_memory=entry["pin_memory"])
        if entry["strides"] is not None and hasattr(kind, "strides"):
            kind.strides = tuple(entry["strides"])
        chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                  for offsets, sizes in entry["chunks"]]
        entries[name] = TensorStorageMetadata(kind, torch.Size(entry["size"]), chunks)
    items = {}
    for fqn, offset, hint, store, key, length in held["items"]:
        store_id, snapshot = held["stores"][store]
        items[MetadataIndex(fqn, offset, hint)] = StoredItem(store, store_id, snapshot, key, length)
    meta = StorageMeta(checkpoint_id=held["checkpoint_id"], save_id=held["save_id"])
    adapt = {"size": torch.Size}
    planner_data = _pages.unflatten(held["planner"], lambda tag: adapt[tag[0]](tag[1]))
    return Metadata(entries, planner_data, items, meta, held["version"])
