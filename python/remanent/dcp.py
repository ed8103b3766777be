"""Durable, verified and deduplicated checkpoints for `torch.distributed.checkpoint` (DCP).

    dcp.save(state, storage_writer=StorageWriter("runs/7/step-100"))
    dcp.load(state, storage_reader=StorageReader("runs/7/step-100"))
    dcp.async_save(state, storage_writer=StorageWriter("runs/7/step-100"), async_stager=stager)

The path of a checkpoint is `root/name`. Each rank has a store, `root/.remanent/rank-K`, which contains all checkpoints
in the root, so pages that did not change since the previous checkpoint are not written again. A checkpoint is a named
snapshot of each rank's store, and `root/name/.metadata` lists these snapshots. That file is written last and
atomically, once the snapshots of all ranks are durable. After a crash of any rank at any time, the path therefore
contains the previous checkpoint or none, and never a mixture. Without collectives (`use_collectives=False`), this
applies to each rank separately.

`dcp_to_torch_save` and `torch_save_to_dcp` correspond to DCP's converters of the same names. Other functions convert to
and from DCP's own checkpoints and safetensors files.

To delete a checkpoint, remove `root/name` or move it out of the root. The next save of the same ranks to the root frees
its disk space, but not before one minute after the checkpoint was saved. A checkpoint may be renamed within the root.

Checksums verify every byte that is loaded, including `.metadata`, which is JSON. Nothing is unpickled, except values
that are not tensors, which DCP's own planner pickles. A checkpoint can be loaded by a different number of ranks than
the number that saved it. All ranks need access to the root, for example on a shared file system. Saves to the same root
wait for each other, because a rank's store is open while the rank writes.

With `StorageWriter(path, archive={"url": …})`, checkpoints are also in an object store when their saves return, and
`restore_from_archive` restores the root after the loss of all machines. `StorageReader(path, archive=…)` loads a
checkpoint without a restore.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
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
from typing import Any, NamedTuple, Unpack

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

from remanent._dcp.archives import (
    KIND,
    METADATA,
    STORES,
    Listed,
    RootArchive,
    restore_from_archive,
    store_of,
    sum_of,
    url_of_root,
)
from remanent._dcp.formats import (
    dcp_to_remanent,
    dcp_to_safetensors,
    dcp_to_torch_save,
    remanent_to_dcp,
    safetensors_to_dcp,
    torch_save_to_dcp,
)
from remanent._dcp.stager import Stager
from remanent._state import page_tree
from remanent._store import _native
from remanent._store.errors import (
    ArchiveError,
    DamagedError,
    Error,
    InvalidError,
    LockedError,
    NoStateError,
    RefusedError,
    TakenError,
)
from remanent._store.options import ArchiveOptions, StoreOptions, merged
from remanent._tensors import conversion
from remanent._tensors.storages import extents_there
from remanent._util import checksummed_json, durable_files

__all__ = [
    "Stager", "StorageReader", "StorageWriter", "StoredItem", "dcp_to_remanent", "dcp_to_safetensors",
    "dcp_to_torch_save", "is_of_dcp", "remanent_to_dcp", "restore_from_archive", "safetensors_to_dcp",
    "torch_save_to_dcp",
]

_Path = str | os.PathLike[str]

# The first byte of DCP's own metadata.
_PICKLE = b"\x80"
# The bytes of a batch; a longer page gets its own batch.
_BATCH_BYTES = 32 << 20
# The largest overhead of a short page in a batch, in bytes.
_PAGE_BYTES = 16 << 10
# The number of pages that one batch deletes.
_DELETED_PAGES = 10_000
# The number of bytes of a page that are read at once.
_READ_BYTES = 8 << 20
# The time in seconds for which a save waits until another one has closed the rank's store.
_LOCK_WAIT = 60.0
# The same time for a store with an archive, which stays open until the archive contains the checkpoint.
_ARCHIVED_LOCK_WAIT = 3600.0
# The time in seconds after which a file that one rank created is visible to all: shared file systems cache directory
# contents for up to a minute.
_VISIBLE_AFTER = 60.0
# The longest name that a page's metadata holds, in bytes.
_NAME_BYTES_MAX = 32 << 10
# The number of threads that read or write for one rank: ranks share a machine.
_THREADS_MAX = 4
# The number of characters of a save's id at the end of its snapshots' names.
_TOKEN_LEN = 12
_OWN_OPTIONS: StoreOptions = {
    "device": "host", "memory": {"load": "on_demand"}, "retention": {"snapshots_kept": 1},
    "images": {"compression": False}, "log": {"spare_bytes": 0},
}
_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last,
            "preserve": torch.preserve_format}


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True)
class StoredItem:
    """The location of an item of a checkpoint: a page in a snapshot of a rank's store. `length` is in bytes."""

    store: str
    store_id: str
    snapshot: str
    key: str
    length: int


class _AtPath:
    """The base class of `StorageWriter` and `StorageReader`, with the path of the checkpoint."""

    _path: Path

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._path)!r})"

    def _go_to(self, path: _Path) -> None:
        if "://" in os.fspath(path):
            raise InvalidError(f"path: {path!r} is a URL, not the path of a checkpoint",
                               remedy="use a local path, and pass the URL as archive={\"url\": …}")
        # Links are not followed, since their targets may change.
        self._path = Path(os.path.abspath(path))

    @property
    def checkpoint_id(self) -> _Path:
        """The path of the checkpoint."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: _Path) -> bool:
        """Returns whether `checkpoint_id` can be the path of a checkpoint."""
        return filesystem.FileSystem.validate_checkpoint_id(checkpoint_id)


class StorageWriter(_AtPath, storage.StorageWriter):
    """Saves checkpoints with `dcp.save` and `dcp.async_save`.

    :param path: the path of the checkpoint, `root/name`. A call's `checkpoint_id` overrides it.
    :param overwrite: whether an existing checkpoint at this path may be replaced. The existing checkpoint remains
        complete until the new one is complete.
    :param verify: whether to read back everything from the disk before the save returns. Loads verify every byte in
        either case.
    :param archive_timeout: the seconds for which requests to the archive may fail before a save fails. Slow uploads do
        not count.
    :param options: options of `Store`, such as `images={"io": "direct"}`. With `archive`, the checkpoints of the root
        are also copied to an object store; see below.

    With `archive={"url": …}`, which all ranks pass for all saves to a root, the checkpoints survive the loss of all
    machines. Each rank's store has its own archive, `URL/rank-K`. A checkpoint becomes visible once the archives of all
    ranks contain it, so once `save` returns, or the future of `async_save` is done, `restore_from_archive` can restore
    it on any machine. If an archive rejects a store or cannot be reached, the save raises `ArchiveError`, and the
    earlier checkpoints are unchanged. The archive does not contain checkpoints that were saved without it.
    `use_collectives=False` is rejected.

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

    def __init__(self, path: _Path, *, overwrite: bool = True, verify: bool = False, archive_timeout: float = 60.0,
                 **options: Unpack[StoreOptions]) -> None:
        super().__init__()
        has_archive = options.get("archive") is not None
        self._archive = RootArchive(options, archive_timeout) if has_archive else None
        self._go_to(path)
        self._overwrite, self._verify, self._options = overwrite, verify, options
        self.save_id = uuid.uuid4().hex
        self._saving: _Saving | None = None
        self._rank = 0
        self._together = True

    def reset(self, checkpoint_id: _Path | None = None) -> None:
        """Begins another checkpoint, at `checkpoint_id` if it is not None."""
        if checkpoint_id:
            self._go_to(checkpoint_id)
        self.save_id = uuid.uuid4().hex
        self._end_saving()

    # DCP looks for a parameter named `kwargs`.
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Records the number of this rank and whether the ranks save together. Called by DCP."""
        self._rank = _rank(kwargs)
        self._together = kwargs.get("use_collectives", True)
        if self._archive is not None and not self._together:
            raise InvalidError("archive: ranks that save separately have no common checkpoint to restore",
                               remedy="save with use_collectives=True")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Raises an error for items that cannot be stored, before anything is written.

        :raises RefusedError: an element type cannot be stored, or a name is too long.
        :raises TakenError: the checkpoint exists and `overwrite` is False.
        :raises ArchiveError: the checkpoints of the root are archived, but no archive was passed.
        """
        for item in plan.items:
            dtype = None if item.tensor_data is None else item.tensor_data.properties.dtype
            if dtype is not None and dtype not in conversion.SHORT:
                raise RefusedError(f"{item.index.fqn}: elements of type {dtype} cannot be stored",
                                   remedy="convert the tensor to another element type")
            if len(item.index.fqn.encode(errors="surrogatepass")) > _NAME_BYTES_MAX:
                raise RefusedError(f"{item.index.fqn[:100]}…: the name has more than {_NAME_BYTES_MAX} bytes",
                                   remedy="use a shorter name")
        if not self._overwrite and _metadata_files(self._path):
            raise TakenError(f"{self._path} already contains a checkpoint",
                             remedy="remove it, or save with overwrite=True")
        url = url_of_root(self._path.parent)
        if self._archive is not None:
            self._archive.check(self._path)
        elif url is not None:
            raise ArchiveError(f"the archive {url} follows the checkpoints in {self._path.parent}, but the save does "
                               "not name it", kind="not given", url=url, remedy="pass archive={\"url\": …}")
        durable_files.make_folder(self._path)
        durable_files.make_folder(self._stores)
        # Plans that a planner cached may contain the path of an earlier save.
        common = (str(self._path), self._archive and self._archive.url)
        return replace(plan, storage_data=common if self._together else store_of(self._rank))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Returns the plans without changes to their items, because each rank writes its own items to its own store.

        :raises InvalidError: the ranks passed different archives.
        """
        own = str(self._path), self._archive and self._archive.url
        for rank, plan in enumerate(plans):
            if isinstance(plan.storage_data, tuple) and plan.storage_data[0] == own[0] and plan.storage_data != own:
                raise InvalidError(f"archive: rank {rank} passed another URL than the coordinator",
                                   remedy="pass the same archive on all ranks")
        # Nothing else may be set here: a planner that caches plans gives ranks a plan of an earlier save.
        return [replace(plan, storage_data=store_of(rank)) for rank, plan in enumerate(plans)]

    @property
    def _stores(self) -> Path:
        return self._path.parent / STORES

    def _end_saving(self) -> None:
        if self._saving is not None:
            self._saving.end()
            self._saving = None

    def _open(self, store_name: str) -> _native.Store:
        options, lock_wait = self._options, _LOCK_WAIT
        if self._archive is not None:
            options, lock_wait = self._archive.options_of(store_name), _ARCHIVED_LOCK_WAIT
        try:
            return _open_store(self._stores / store_name, merged(_OWN_OPTIONS, options), lock_wait)
        except ArchiveError as error:
            if error.kind == "other store":
                error.remedy = "restore the checkpoints of the archive with restore_from_archive, or use another URL"
            raise

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's items and takes its snapshot. When the call returns, the snapshot is durable, and archived
        if there is an archive."""
        store_name = plan.storage_data if isinstance(plan.storage_data, str) else store_of(self._rank)
        self._end_saving()
        # The save is announced before the checkpoints are listed, so that another save that lists them later finds it.
        self._saving = _Saving(self._stores, self.save_id)
        with self._open(store_name) as store:
            # This happens before anything is written, so that the space of removed checkpoints is available.
            _give_up(store, store_name, self._path.parent)
            keys = _write_items(store, plan, planner)
            label = self._path.name.encode(errors="ignore")[:24].decode(errors="ignore")
            name = f"{label}@{store.lsn} {self._saving.token}"
            snapshot = store.snapshot(name, verify=self._verify)
            if self._archive is not None:
                self._archive.wait_kept(store, snapshot)
            results = []
            for item, (key, length) in zip(plan.items, keys, strict=True):
                stored = StoredItem(store_name, store.id, name, key, length)
                results.append(WriteResult(item.index, length, stored))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Makes the checkpoint visible. Called by DCP once the snapshots of all ranks are durable."""
        metadata.version = filesystem.CURRENT_DCP_VERSION
        metadata.storage_data = {result.index: result.storage_data for of_rank in results for result in of_rank}
        metadata.storage_meta = self.storage_meta()
        path = _metadata_path(self._path, None if self._together else self._rank)
        content = _encode(metadata)
        if self._archive is not None:
            # Once a checkpoint is visible, the next save may remove the one that it replaces from the archives.
            saving = _saving(self._stores)
            token = self.save_id[:_TOKEN_LEN]
            with self._open(store_of(0)) as store:
                self._archive.add(store, self._path, content, token, len(results), visible=_visible(self._path.parent),
                                  saving=saving, visible_after=_VISIBLE_AFTER)
        durable_files.publish(path, content)
        # Metadata that an earlier save of the other kind left here would be loaded instead.
        others = [each for each in _metadata_files(self._path) if (each.name == METADATA) != self._together]
        for other in others:
            other.unlink(missing_ok=True)
        if others:
            durable_files.sync_folder(self._path)
        self._end_saving()

    def storage_meta(self) -> StorageMeta | None:
        """Returns the path and the id of this save, which DCP stores in the metadata."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)


class StorageReader(_AtPath, storage.StorageReader):
    """Loads checkpoints of `StorageWriter` with `dcp.load`. No lock is taken, so a save may run concurrently.

    :param path: the path of the checkpoint, `root/name`. A call's `checkpoint_id` overrides it.
    :param cast: whether to convert elements to the types of the target tensors, as DCP's own reader does. If False,
        tensors with other element types are rejected.
    :param archive: the archive with which the checkpoint was saved. The checkpoint is then read from the archive
        without a restore. `path` need not exist, and only its last component, the name of the checkpoint, is used. The
        archive is not changed, and its writer can continue. Each rank fetches only the parts that it needs, of up to 8
        MiB each.

    DCP raises a `CheckpointException` that contains the errors of the ranks. `NoStateError` means that the checkpoint
    does not exist. `RefusedError` means that a tensor cannot represent the checkpoint's values; no tensor of that rank
    has changed. `DamagedError` means that bytes on disk differ from the bytes written; tensors that were already loaded
    keep their new values. `ArchiveError` means that an archive cannot be reached or is damaged.

    >>> import pathlib, torch, torch.distributed.checkpoint as dcp
    >>> from remanent.dcp import StorageReader, StorageWriter
    >>> bucket = pathlib.Path(directory + "-bucket")
    >>> bucket.mkdir()
    >>> archive = {"url": bucket.as_uri()}
    >>> writer = StorageWriter(directory + "/step-1", archive=archive)
    >>> _ = dcp.save({"w": torch.ones(2, 3)}, storage_writer=writer, no_dist=True)
    >>> state = {"w": torch.zeros(2, 3)}
    >>> dcp.load(state, storage_reader=StorageReader("step-1", archive=archive), no_dist=True)
    >>> state["w"].sum().item()
    6.0
    """

    def __init__(self, path: _Path, *, cast: bool = False, archive: ArchiveOptions | None = None) -> None:
        super().__init__()
        self._archive = None if archive is None else RootArchive({"archive": archive}, 0.0)
        self._go_to(path)
        self._cast = cast
        # The element types of tensors, by name.
        self._dtypes: dict[str, torch.dtype] = {}
        self.load_id = uuid.uuid4().hex
        self._save_id: str | None = None
        self._items: dict[MetadataIndex, StoredItem] = {}

    def reset(self, checkpoint_id: _Path | None = None) -> None:
        """Begins to load another checkpoint, at `checkpoint_id` if it is not None."""
        if checkpoint_id:
            self._go_to(checkpoint_id)
        self.load_id = uuid.uuid4().hex
        self._items = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the metadata of the checkpoint, which lists its items.

        :raises NoStateError: there is no checkpoint at this path.
        :raises DamagedError: the metadata is damaged.
        """
        if self._archive is not None:
            found = _metadata_in(self._archive.metadata_of(self._path), _metadata_path(self._path, None))
        else:
            found = self._read_metadata(kwargs.get("rank"))
        if found.storage_meta is not None:
            found.storage_meta.load_id = self.load_id
        return found

    def _read_metadata(self, rank: int | None) -> Metadata:
        if rank is not None and _metadata_path(self._path, None).exists():
            # If the metadata of all ranks cannot be read, DCP requests the metadata of a single rank, which would
            # belong to another save.
            _proven(_metadata_path(self._path, None))
        path = _metadata_path(self._path, rank)
        return _metadata_in(_checked(path), path)

    def _view(self, store: str, snapshot: str) -> _native.View:
        if self._archive is not None:
            return self._archive.view(store, f"name:{snapshot}")
        return _native.View(_root_of(self._path) / STORES / store, f"name:{snapshot}")

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any,
                              **kwargs: Any) -> None:
        """Records the items in `metadata`, the result of `read_metadata`. Called by DCP."""
        self._items = metadata.storage_data
        self._dtypes = {name: said.properties.dtype for name, said in metadata.state_dict_metadata.items()
                        if isinstance(said, TensorStorageMetadata)}
        self._save_id = None if metadata.storage_meta is None else metadata.storage_meta.save_id

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Returns the plan with the id of the save. The items are unchanged, because each rank reads the items that it
        needs."""
        return replace(plan, storage_data=self._save_id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raises `RefusedError` if the checkpoint was replaced after some of the ranks had read its metadata."""
        if len({plan.storage_data for plan in plans}) > 1:
            raise RefusedError(f"{self._path} was replaced while ranks were beginning to load it", remedy="load again")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads items into the planner's tensors. Only the rows of a page that contain an item are read."""
        by_snapshot: defaultdict[tuple[str, str, str], list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            if item.type.name != "BYTE_IO":
                self._refuse_misfit(item, planner.resolve_tensor(item))
            stored = self._items[item.storage_index]
            by_snapshot[stored.store, stored.store_id, stored.snapshot].append(item)
        for (store, store_id, snapshot), items in by_snapshot.items():
            try:
                view = self._view(store, snapshot)
            except NoStateError as error:
                raise NoStateError(f"{self._path} was replaced or removed during the load", remedy="load again") from error
            with view:
                if view.id != store_id:
                    raise DamagedError(f"the checkpoint was saved to store {store_id}, but {store} is store {view.id}",
                                       remedy="restore the original store from a backup", path=str(self._path))
                with _Jobs() as jobs:
                    for item in items:
                        self._load(jobs, view, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _refuse_misfit(self, item: ReadItem, target: torch.Tensor) -> None:
        """Raises `RefusedError` if a tensor cannot represent the values of an item unchanged."""
        name = item.storage_index.fqn
        saved = self._dtypes.get(name, target.dtype)
        if target.size() != item.lengths:
            raise RefusedError(f"{name}: the checkpoint has shape {tuple(item.lengths)}, but the tensor has shape "
                               f"{tuple(target.size())}", remedy="load into a tensor of the checkpoint's shape")
        if target.dtype != saved and not self._cast:
            raise RefusedError(f"{name}: the checkpoint has elements of type {saved}, but the tensor has {target.dtype}",
                               remedy=f"load into a tensor of {saved}, or convert with StorageReader(path, cast=True)")

    def _load(self, jobs: _Jobs, view: _native.View, item: ReadItem, planner: LoadPlanner) -> None:
        key = self._items[item.storage_index].key
        if item.type.name == "BYTE_IO":
            planner.load_bytes(item, io.BytesIO(view.read(key)))
            return
        target = planner.resolve_tensor(item).detach()
        if target.numel():
            for block in _row_blocks(view, key, item, target):
                # The copy runs in the calling thread, whose streams and modes apply to the target.
                jobs.run(block.read, block.copy)
        # Jobs finish in order, so this runs after the last block.
        jobs.run(None, functools.partial(planner.commit_tensor, item, target))


def is_of_dcp(path: _Path) -> bool:
    """Returns whether DCP's own `FileSystemWriter` saved a checkpoint, so that `FileSystemReader` can load it.

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
    """A page to write: its contents, and the existing page of the same item or None."""

    key: str
    said: dict[str, Any]
    content: torch.Tensor
    before: _native.PageInfo | None


def _write_items(store: _native.Store, plan: SavePlan, planner: SavePlanner) -> list[tuple[str, int]]:
    """Changes the store to contain exactly these items. Returns the key and the length in bytes of each item's page.

    The changes are committed in several concurrent batches of limited length. States between these batches belong to no
    checkpoint, because no snapshot contains them.
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
            key = str(was.key) if was is not None else page_tree.key_of(said["name"], taken.__contains__)
            taken.add(key)
            keys.append((key, length))
            group.append(_Write(key, said, content, was))
            group_bytes += length + _PAGE_BYTES
            if group_bytes >= _BATCH_BYTES:
                jobs.run(functools.partial(_write_group, store, group))
                group, group_bytes = [], 0
        jobs.run(functools.partial(_write_group, store, group))
    # Items that the plan does not name are not in this checkpoint.
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
            # A page with another element type or shape is a different page.
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
    """Runs reads and writes on threads while the calling thread requests more items from the planner. The number of
    waiting jobs is limited, because each job keeps bytes in memory."""

    def __init__(self) -> None:
        threads = min(_THREADS_MAX, len(os.sched_getaffinity(0)))
        self._pool = concurrent.futures.ThreadPoolExecutor(threads, "remanent-dcp")
        self._room = 2 * threads
        self._running: deque[tuple[concurrent.futures.Future[None] | None, Callable[[], None] | None]] = deque()

    def run(self, job: Callable[[], None] | None, finish: Callable[[], None] | None = None) -> None:
        """Runs `job` on a thread, and then `finish` on the calling thread. `finish` is called in the order of the
        jobs."""
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
    """Returns the identity of a page's item: the name of the whole tensor, and the offset of the item in the tensor."""
    return said.get("part of", said["name"]), tuple(said.get("offset", ()))


def _resolved(item: WriteItem, planner: SavePlanner) -> tuple[dict[str, Any], torch.Tensor]:
    """Returns the metadata for an item's page, and the item's bytes."""
    data = planner.resolve_data(item)
    if isinstance(data, io.BytesIO):
        held = data.getbuffer()
        empty = torch.empty(0, dtype=torch.uint8)
        return {"name": item.index.fqn}, torch.frombuffer(held, dtype=torch.uint8) if held.nbytes else empty
    name = item.index.fqn
    [extent] = extents_there({name: data})
    tensor = extent.tensor
    said: dict[str, Any] = {"name": name, "dtype": conversion.SHORT[tensor.dtype],
                            "shape": list(map(int, tensor.shape))}
    if item.index.offset is not None and any(item.index.offset):
        offset = [int(each) for each in item.index.offset]
        # A separate name for programs that read the store. Another item may have the name of the whole tensor.
        said |= {"name": f"{name}@{','.join(map(str, offset))}", "part of": name, "offset": offset}
    return said, conversion.bytes_of(tensor.contiguous())


@dataclass
class _RowBlock:
    """A block of consecutive rows of a page, and the part of the target tensor that receives these rows."""

    view: _native.View
    key: str
    offset: int
    # The destination of the bytes: the target's own memory, or memory from which `copied` is copied to the target.
    memory: torch.Tensor
    copied: torch.Tensor | None
    target: torch.Tensor

    def read(self) -> None:
        self.view.read_into(self.key, self.memory, self.offset)

    def copy(self) -> None:
        if self.copied is not None:
            self.target.copy_(self.copied)


def _row_blocks(view: _native.View, key: str, item: ReadItem, target: torch.Tensor) -> Iterator[_RowBlock]:
    """Yields the rows of a page that contain an item, in blocks of up to `_READ_BYTES` bytes."""
    said = view.info(key).metadata
    dtype, shape = conversion.DTYPE[said["dtype"]], tuple(said["shape"])
    offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
    rows, first = (lengths[0], offsets[0]) if shape else (1, 0)
    row = dtype.itemsize * math.prod(shape[1:])
    # Whether the bytes are read directly into the target, without a copy.
    in_place = (lengths[1:] == shape[1:] and target.device.type == "cpu" and target.dtype == dtype
                and target.is_contiguous() and not target.is_conj() and not target.is_neg())
    at_once = max(1, _READ_BYTES // row)
    for at in range(0, rows, at_once):
        count = min(at_once, rows - at)
        part = target.narrow(0, at, count) if shape else target
        if in_place:
            yield _RowBlock(view, key, (first + at) * row, conversion.bytes_of(part), None, part)
            continue
        memory = torch.empty(count * row, dtype=torch.uint8)
        found = torch.empty(0, dtype=dtype)
        of_rows = (count, *shape[1:]) if shape else ()
        found.set_(memory.untyped_storage(), 0, of_rows, page_tree.contiguous_stride(of_rows))
        for dim in range(1, len(shape)):
            found = found.narrow(dim, offsets[dim], lengths[dim])
        yield _RowBlock(view, key, (first + at) * row, memory, found, part)


# Stores.

def _open_store(directory: Path, options: StoreOptions, lock_wait: float) -> _native.Store:
    until = time.monotonic() + lock_wait
    while True:
        try:
            return _native.Store(directory, **options)
        except LockedError:
            # Another save to this root is writing, which takes as long as the bytes of a checkpoint take.
            if time.monotonic() >= until:
                raise
            time.sleep(0.05)


def _give_up(store: _native.Store, store_name: str, root: Path) -> None:
    """Removes the snapshots that no checkpoint of the root lists and that no save in progress will list."""
    saving, stores = _saving(root / STORES), _kept_snapshots(root)
    named = {snapshot for store_id, snapshot in (stores or {}).get(store_name, ()) if store_id == store.id}
    if not named:
        # The root may be unreadable, or may differ from the root that other ranks see.
        return
    since = (time.time() - _VISIBLE_AFTER) * 1000
    gone = [info.name for info in store.snapshots()
            if info.name is not None and info.name not in named and info.name[-_TOKEN_LEN:] not in saving
            and info.created_unix_ms <= since]
    if gone:
        store.prune(give_up=gone, names_only=True)


class _Saving:
    """Announces a save in progress by a locked file, until the save ends or its process dies."""

    def __init__(self, stores: Path, save_id: str) -> None:
        self.token = save_id[:_TOKEN_LEN]
        self._path = stores / f"saving-{self.token}"
        # The file has another name until it is locked: an unlocked file would be taken for one that a dead process
        # left.
        unlocked = stores / f"unlocked-{self.token}"
        self._file = os.open(unlocked, os.O_CREAT | os.O_RDWR, 0o644)
        _savings.add(self)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        os.replace(unlocked, self._path)

    def end(self) -> None:
        """Removes the file. The checkpoint is then either visible or abandoned."""
        if self._file >= 0:
            self._path.unlink(missing_ok=True)
            self.leave()

    def leave(self) -> None:
        """Closes the file without removing it. The lock is released with the last descriptor."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self.end()


_savings: weakref.WeakSet[_Saving] = weakref.WeakSet()


def _leave_savings() -> None:
    """Closes the files of the parent's saves in a forked child, so that the child neither keeps the locks nor removes
    the files."""
    for saving in list(_savings):
        saving.leave()


os.register_at_fork(after_in_child=_leave_savings)


def _saving(stores: Path) -> frozenset[str]:
    """Returns the tokens of the saves in progress, and removes the files of saves whose process died."""
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
    """Returns the snapshots that checkpoints of the root list, by store. Returns None if a checkpoint cannot be read,
    or may be in the middle of a rename."""
    kept: dict[str, set[tuple[str, str]]] = {}
    try:
        listed = _listed(root)
        folders = [root / name for name, _ in listed.folders if name != STORES]
        for path in [path for folder in folders for path in _metadata_files(folder, is_there=True)]:
            try:
                stores = json.loads(_proven(path)[0])
            except NoStateError as error:
                if path.exists():
                    # The file belongs to another program.
                    continue
                # The file existed when the folder was listed, so it may be in the middle of a rename.
                raise error
            for store, (store_id, snapshot) in stores.items():
                kept.setdefault(store, set()).add((store_id, snapshot))
        if _listed(root) != listed:
            # A folder that is renamed while others are listed may be found under neither name.
            return None
    except (Error, OSError) as error:
        logging.getLogger("remanent").warning(
            "a checkpoint in %s cannot be read, so the space of removed checkpoints is not freed: %s", root, error)
        return None
    return kept


def _visible(root: Path) -> list[Listed] | None:
    """Returns the checkpoints in a root that all ranks saved together. Returns None if the root cannot be read, or may
    be in the middle of a rename."""
    found = []
    try:
        listed = _listed(root)
        for name, _ in listed.folders:
            with contextlib.suppress(FileNotFoundError, UnicodeDecodeError, UnicodeEncodeError):
                name.encode()
                with (root / name / METADATA).open("rb") as file:
                    found.append(Listed(name, sum_of(file.readline())))
        return found if _listed(root) == listed else None
    except OSError as error:
        logging.getLogger("remanent").warning("a checkpoint in %s cannot be read, so the archive keeps its names: %s",
                                              root, error)
        return None


# Paths.

def _root_of(checkpoint: Path) -> Path:
    """Returns the folder that contains a checkpoint's stores. The checkpoint's path may be a symbolic link in another
    folder."""
    if (checkpoint.parent / STORES).is_dir():
        return checkpoint.parent
    return checkpoint.resolve().parent


# The metadata.

def _metadata_path(checkpoint: Path, rank: int | None) -> Path:
    return checkpoint / (METADATA if rank is None else f"__{rank}{METADATA}")


class _Listed(NamedTuple):
    """The folders of a root, and the time in nanoseconds at which the root last changed."""

    changed: int
    # Names and inodes.
    folders: list[tuple[str, int]]


def _listed(root: Path) -> _Listed:
    return _Listed(root.stat().st_mtime_ns,
                   sorted((entry.name, entry.inode()) for entry in os.scandir(root) if entry.is_dir()))


def _metadata_files(checkpoint: Path, *, is_there: bool = False) -> list[Path]:
    """Returns the metadata files in a folder: the file of all ranks, and the files of ranks that saved separately.

    :param is_there: whether to raise an error if the folder does not exist.
    """
    try:
        names = [entry.name for entry in os.scandir(checkpoint)]
    except (FileNotFoundError, NotADirectoryError):
        if is_there:
            raise
        return []
    return [checkpoint / name for name in names if name == METADATA or (name.startswith("__") and
                                                                        name.endswith(METADATA))]


def _encode(found: Metadata) -> bytes:
    """Returns the metadata as three lines of JSON: a checksum of the other lines, the stores, and all other values."""
    tensors: dict[str, Any] = {}
    for name, entry in found.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            tensors[name] = None
            continue
        kind = entry.properties
        memory_format = next(name for name, format_ in _FORMATS.items() if format_ == kind.memory_format)
        strides = getattr(kind, "strides", None)
        tensors[name] = {
            "dtype": conversion.SHORT[kind.dtype], "requires_grad": kind.requires_grad, "pin_memory": kind.pin_memory,
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
        "planner": page_tree.flatten("planner_data", found.planner_data, _adapt),
        "save_id": None if meta is None else meta.save_id,
        "checkpoint_id": None if meta is None else str(meta.checkpoint_id),
    }
    return checksummed_json.seal(KIND, [stores, held])


def _adapt(path: str, value: object) -> object | None:
    return {"$": ["size", list(value)]} if type(value) is torch.Size else None


def _proven(path: Path) -> tuple[bytes, bytes]:
    """Reads a metadata file and verifies its checksum. Returns the JSON of the stores and of all other values.

    :raises NoStateError: the file does not exist, or was not written by this package.
    """
    return _parts_of(_checked(path), path)


def _parts_of(content: bytes, path: Path) -> tuple[bytes, bytes]:
    stores, rest = checksummed_json.parts_of(KIND, content, path)
    return stores, rest


def _checked(path: Path) -> bytes:
    """Returns the contents of a metadata file.

    :raises NoStateError: the file does not exist, or was not written by this package.
    """
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NoStateError(f"there is no checkpoint in {path.parent}: {path.name} is missing",
                           remedy="use the path of a complete checkpoint") from error
    except IsADirectoryError as error:
        raise NoStateError(f"{path} is a folder, not a metadata file",
                           remedy="use the path of a complete checkpoint") from error
    if content[:1] == _PICKLE:
        raise NoStateError(f"{path} has DCP's own format", remedy="load it with DCP's FileSystemReader")
    beginning = checksummed_json.begins(KIND)
    if len(content) >= len(beginning) and not content.startswith(beginning):
        raise NoStateError(f"{path} is not a checkpoint of this package")
    return content


def _metadata_in(content: bytes, path: Path) -> Metadata:
    """Returns the metadata in the contents of a metadata file."""
    stores, held = (json.loads(part) for part in _parts_of(content, path))
    entries: dict[str, Any] = {}
    for name, entry in held["tensors"].items():
        if entry is None:
            entries[name] = BytesStorageMetadata()
            continue
        kind = TensorProperties(
            dtype=conversion.DTYPE[entry["dtype"]], requires_grad=entry["requires_grad"],
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
    planner_data = page_tree.unflatten(held["planner"], lambda tag: adapt[tag[0]](tag[1]))
    return Metadata(entries, planner_data, items, meta, held["version"])
