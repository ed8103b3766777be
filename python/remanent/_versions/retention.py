"""Lists the versions that `save_file` keeps in a directory, and removes older ones.

Each save is one batch. A version can be loaded as long as a snapshot at or before the version is kept, together with
the log after that snapshot. Saves therefore take a snapshot from time to time, and all versions between two snapshots
are removed together. A version with a name has a snapshot of its own, which needs no log.
"""

from __future__ import annotations

import contextlib
import operator
import os
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass

from remanent._store import _native
from remanent._store.errors import DiskFullError, InvalidError, NoStateError, RefusedError
from remanent._versions.run_versions import unnamed

_Path = str | os.PathLike[str]

# The default number of newest versions that a save keeps.
KEEP_DEFAULT = 20
# More snapshots than any store has.
_ALL = 1 << 31
# More bytes of log than any store has.
_ALL_BYTES = 1 << 62
# Versions are removed in fractions of what is kept: a snapshot is due once such a fraction was saved since the last
# one.
_PARTS_OF_COUNT = 2
_PARTS_OF_BYTES = 4
# The entry of the root with the time of the newest version, in seconds since 1970.
SAVED_AT = "saved at"


@dataclass(frozen=True)
class ListedVersion:
    """A version that can be loaded, as returned by `versions`."""

    #: The Lsn of the version's batch. `load_file(directory, at=lsn)` loads it.
    lsn: int
    #: The name that keeps the version, or None.
    name: str | None
    #: The note that was saved with the version, if its batch is still in the log.
    note: str | None
    #: The time of the save in seconds since 1970, or None if unknown.
    created: float | None
    #: The bytes that the version's batch wrote to the log and to images, or None if the batch is no longer in the log.
    nbytes: int | None
    #: The step of a version of a training run, or None.
    step: int | None = None
    #: The Lsn of each rank's batch, for a run with several ranks.
    ranks: tuple[int, ...] = ()


def versions(directory: _Path) -> list[ListedVersion]:
    """Returns the versions in `directory` that can be loaded, oldest first. No lock is taken. The log is read, but no
    tensors.

    The list contains versions that `save_file` and `remanent import` saved, and versions of a `Checkpointer`, including
    those of runs with several ranks. `remanent versions` prints the same list.

    :raises NoStoreError: the directory contains neither a store nor a run.
    :raises DamagedError: a file is damaged, so that versions may be missing in the list.

    >>> import torch, remanent.torch
    >>> for step in range(3):
    ...     _ = remanent.torch.save_file({"w": torch.full((2,), step)}, directory, note=f"step {step}")
    >>> [(version.lsn, version.note) for version in remanent.torch.versions(directory)]
    [(1, 'step 0'), (2, 'step 1'), (3, 'step 2')]
    """
    return [ListedVersion(lsn, name, note, created, nbytes, step, tuple(ranks))
            for lsn, step, name, note, created, nbytes, ranks in _native.versions(os.fspath(directory))]


def at_of(at: int | str | ListedVersion | None) -> int | str | None:
    """Returns a version in a form that `View` accepts."""
    return at.lsn if isinstance(at, ListedVersion) else at


@dataclass(frozen=True)
class KeptVersions:
    """Determines which earlier versions are kept.

    :param count: the number of newest versions to keep; None keeps all.
    :param seconds: versions younger than this many seconds are also kept.
    :param nbytes: the disk space that the directory may use. Beyond this, versions are removed even if `count` and
        `seconds` keep them.
    """

    count: int | None
    seconds: float | None = None
    nbytes: int | None = None

    def __post_init__(self) -> None:
        if self.count is not None and operator.index(self.count) < 1:
            raise InvalidError(f"keep: {self.count} is less than 1", remedy="keep at least 1 version; None keeps all")
        if self.seconds is not None and not self.seconds >= 0:
            raise InvalidError(f"keep_for: {self.seconds} is not a valid number of seconds",
                               remedy="pass 0 or more seconds")
        if self.nbytes is not None and operator.index(self.nbytes) < 1:
            raise InvalidError(f"keep_bytes: {self.nbytes} is less than 1", remedy="pass at least 1 byte; None sets no "
                               "limit")

    def apply(self, store: _native.Store, segments: Set[str]) -> None:
        """Removes the versions that are not kept. The caller must be the only writer of the store during the call.

        :param segments: the result of `log_files` before the store was opened.
        """
        if self.count is None and self.nbytes is None:
            return
        used = _disk_bytes(store, segments) if self.nbytes is not None else 0
        if self._is_snapshot_due(store, used):
            # On a full disk, fewer versions are removed. The newest one is complete without the snapshot.
            with contextlib.suppress(DiskFullError):
                store.snapshot(exact=True)
        if self.count is not None:
            _remove(store, _snapshots_from(store, self._oldest(store, self.count)))
        if self.nbytes is not None and used > self.nbytes:
            self._fit(store, segments, self.nbytes)

    def _oldest(self, store: _native.Store, count: int) -> int:
        """Returns the Lsn of the oldest version that `count` and `seconds` keep."""
        oldest = store.lsn - count + 1
        if self.seconds is not None:
            since = (time.time() - self.seconds) * 1000
            # A younger version was saved after an older snapshot.
            outlived = (info.end for info in store.snapshots() if info.created_unix_ms <= since)
            oldest = min(oldest, max(outlived, default=0))
        return oldest

    def _is_snapshot_due(self, store: _native.Store, used: int) -> bool:
        """Returns whether enough was saved since the newest snapshot that a new snapshot allows versions to be
        removed."""
        snapshots = store.snapshots()
        newest = max((info.end for info in snapshots), default=0)
        since = store.lsn - newest
        if self.count is not None and since >= max(1, self.count // _PARTS_OF_COUNT):
            return True
        if self.nbytes is None or since == 0:
            return False
        held = store.lsn - min((info.end for info in snapshots), default=0)
        return used > self.nbytes or used * since // max(1, held) >= self.nbytes // _PARTS_OF_BYTES

    def _fit(self, store: _native.Store, segments: Set[str], nbytes: int) -> None:
        """Removes the oldest versions until the directory uses at most `nbytes` of disk space or one version is
        left."""
        used = _disk_bytes(store, segments)
        for count in range(len(store.snapshots()), 0, -1):
            if used <= nbytes:
                return
            going = store.prune(snapshots_kept=count, log_kept=0, dry_run=True)
            if count == 1 or used - going.bytes <= nbytes:
                store.prune(snapshots_kept=count, log_kept=0)
                return


def _snapshots_from(store: _native.Store, lsn: int) -> int:
    """Returns the number of newest snapshots that are needed to load version `lsn` and all later ones."""
    snapshots = store.snapshots()
    first = max((info.id for info in snapshots if info.end <= lsn), default=None)
    return _ALL if first is None else sum(info.id >= first for info in snapshots)


def _remove(store: _native.Store, snapshots_kept: int) -> None:
    going = store.prune(snapshots_kept=snapshots_kept, log_kept=0, dry_run=True)
    # Removing needs a sync of the log, a dry run does not.
    if going.files or going.snapshots:
        store.prune(snapshots_kept=snapshots_kept, log_kept=0)


def log_files(directory: _Path) -> frozenset[str]:
    """Returns the names of the files in the log folder."""
    try:
        return frozenset(os.listdir(os.path.join(directory, "log")))
    except FileNotFoundError:
        return frozenset()


def _disk_bytes(store: _native.Store, segments: Set[str]) -> int:
    """Returns the disk space that the store's directory uses, in bytes. Space that only an open store reserves for its
    log is not counted.

    :param segments: the log files that existed before the store was opened. For other log files, the logged bytes are
        counted instead of the file length.
    """
    found = int(store.stats()["log_bytes"])
    for folder, _, names in os.walk(store.directory):
        is_log = os.path.basename(folder) == "log"
        for name in names:
            if is_log and (name not in segments or name.endswith(".spare")):
                continue
            try:
                found += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:
                # A store thread renames files.
                continue
    return found


def keep_named(store: _native.Store, name: str) -> None:
    """Keeps the newest version under a name.

    A second snapshot of the same state, which writes no page, allows the versions after it to be loaded even after the
    name is removed.
    """
    store.snapshot(name)
    store.snapshot(exact=True)


def prune(directory: _Path, *, keep: int | None = None, keep_for: float | None = None, keep_bytes: int | None = None,
          give_up: Sequence[str] = ()) -> list[ListedVersion]:
    """Removes versions from a directory of `save_file`, and returns those that can no longer be loaded.

    `keep`, `keep_for` and `keep_bytes` have the meaning of `save_file`, and None sets no limit. Versions between two
    snapshots are removed together, so up to half as many additional versions as are kept may remain. The newest version
    is never removed.

    :param give_up: names to remove, which then no longer keep their versions.
    :raises NoStateError: no version has one of the names. Nothing is removed.
    :raises RefusedError: later versions are computed from a version in `give_up`, or the directory belongs to a
        `Checkpointer`, which has its own `keep` and `give_up`. Nothing is removed.
    :raises NoStoreError: `directory` contains no store.
    :raises LockedError: another process has the store open.

    >>> import torch, remanent.torch
    >>> for step in range(6):
    ...     _ = remanent.torch.save_file({"w": torch.full((2,), step)}, directory, keep=None)
    >>> [version.lsn for version in remanent.torch.prune(directory, keep=1)]
    [1, 2, 3, 4, 5]
    >>> [version.lsn for version in remanent.torch.versions(directory)]
    [6]
    """
    kept = KeptVersions(keep, keep_for, keep_bytes)
    if isinstance(give_up, str):
        raise InvalidError(f"give_up must be a list, not the str {give_up!r}", remedy=f"pass a list, such as [{give_up!r}]")
    before = versions(directory)
    named = {version.name for version in before}
    for name in give_up:
        if name not in named:
            raise NoStateError(f"there is no version named {name!r}", remedy=f"use one of {sorted(filter(None, named))}")
    segments = log_files(directory)
    with open_store(directory, create=False) as store:
        if any(unnamed(store)):
            raise RefusedError(f"{os.fspath(directory)} contains the versions of a run", path=os.fspath(directory),
                               remedy="open the run with `Checkpointer(directory, keep=…)`, which removes old versions, "
                               "or remove a named version with its `give_up`")
        if store.lsn and not any(info.end == store.lsn and info.name is None for info in store.snapshots()):
            store.snapshot(exact=True)
        for name in give_up:
            _check_alone(store, before, name)
        if give_up:
            store.prune(give_up=list(give_up), names_only=True)
        kept.apply(store, segments)
    after = {version.lsn for version in versions(directory)}
    return [version for version in before if version.lsn not in after]


def _check_alone(store: _native.Store, listed: Sequence[ListedVersion], name: str) -> None:
    """Raises `RefusedError` if `name` has the only snapshot from which later unnamed versions are computed."""
    snapshots = store.snapshots()
    [own] = [info for info in snapshots if info.name == name]
    lsns = {version.lsn for version in listed}
    others = [info.end for info in snapshots if info.id != own.id]
    if own.end in others or own.end - 1 in lsns or own.end + 1 not in lsns or own.end + 1 in others:
        return
    last = own.end + 1
    while last + 1 in lsns and last + 1 not in others:
        last += 1
    raise RefusedError(f"the versions of lsn {own.end + 1} to {last} are computed from the version named {name!r}",
                       remedy="remove those versions first, by keeping fewer versions")


# The host memory that holds changes of a save until a snapshot; by default, the changes of a single-batch save may take
# as much.
PENDING_BYTES = 1 << 30
# The bytes of log that an open may have to replay. Saves that change the same elements again use no additional memory
# for pending changes, but each adds its bytes to the log.
REPLAYED_BYTES = 256 << 20


def open_store(directory: _Path, *, create: bool = True) -> _native.Store:
    """Opens a directory of versions for a save. The store itself takes no snapshots and removes nothing; `save` and
    `KeptVersions` do."""
    return _native.Store(directory, create=create, device="host",
                         memory={"load": "on_demand", "budget": {"disk": PENDING_BYTES}}, log={"spare_bytes": 0},
                         images={"compression": False}, snapshots={"log_bytes": None, "interval": None},
                         retention={"snapshots_kept": _ALL, "log_kept": _ALL_BYTES})


def replayed_bytes(store: _native.Store) -> int:
    """Returns the bytes of log that the next open replays if no snapshot is taken first. The store must have taken no
    snapshot since it was opened."""
    return int(store.recovered["replayed_bytes"]) + int(store.stats()["log_bytes"])
