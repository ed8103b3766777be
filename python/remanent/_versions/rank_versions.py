"""Versions of a run with several ranks. A version is a *point* at which the states of all ranks are on disk.

A point is a file that lists a snapshot of each rank's store. The first rank creates the file once all of these
snapshots are durable. Snapshots that no point lists belong to no version. After a crash of any rank at any time, either
the newest point or the previous one remains, and never a mixture of both. Only the first rank creates and removes
points, because it holds the lock of its store, which is in the same directory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from remanent._checkpoint.ranks import Ranks, described, raise_first
from remanent._store import _native
from remanent._store.errors import (
    DamagedError,
    Error,
    ForeignDirectoryError,
    InvalidError,
    NoStateError,
    RankFailedError,
    RefusedError,
)
from remanent._store.options import StoreOptions
from remanent._util import durable_files
from remanent._versions import rank_archives
from remanent._versions.points import Part, Point, Points, numbered_stores, store_of
from remanent._versions.rank_archives import ArchivedSnapshots
from remanent._versions.removal import Removal
from remanent._versions.run_versions import Keep, Version, Views, no_version, of_step, unnamed

_Path = str | os.PathLike[str]
_T = TypeVar("_T")


class SharedVersions:
    """The versions of a run with several ranks. All ranks must call the same methods in the same order, except for
    `check_name` and `listed`."""

    def __init__(self, ranks: Ranks, process_group: dist.ProcessGroup, directory: _Path, keep: Keep,
                 options: StoreOptions, *, always_prune: bool) -> None:
        self._ranks, self._keep = ranks, keep
        self._held = durable_files.HeldDirectory(Path(directory))
        self._points = Points(lambda: self._held.path)
        # The newest save whose outcome this rank has reported.
        self._told = 0
        opened: list[_native.Store] = []
        # Points to create, on the first rank.
        self._derived: list[Point] = []
        try:
            first = ranks.by_first(lambda: self._check(rank_archives.url_of(options)))
            self._attempt, self._has_archive = first["attempt"], first["url"] is not None
            ranks.all_or_none(lambda: opened.append(self._open(options, first["url"])))
            if first["is_restored"]:
                ranks.by_first(lambda: self._points.create_all(self._derived))
            # A second group for queries while a save is in progress. This code runs on the worker thread, so a rank
            # that dies during the creation does not block the main thread.
            self._aside = Ranks(process_group)
        except BaseException:
            for store in opened:
                store.close()
            self._held.close()
            raise
        [self.store] = opened
        self._removal = Removal(self.store, always=always_prune)

    def _check(self, url: str | None) -> dict[str, Any]:
        """Checks the directory before it is changed, and returns what all ranks must have in common."""
        if (self._held.path / "STORE").exists():
            raise RefusedError(f"{self._held.path} is a store, so it cannot contain the stores of ranks",
                               remedy="use another directory")
        if not self._points.exist():
            self._derived = rank_archives.derived(self._held.path)
        return {"attempt": uuid.uuid4().hex, "url": url, "is_restored": bool(self._derived)}

    def _open(self, options: StoreOptions, url: str | None) -> _native.Store:
        rank = self._ranks.rank
        own = rank_archives.of_rank(options, rank, url)
        self._held.make()
        return _native.Store(store_of(self._held.path, rank), **own)

    def check_name(self, name: str) -> None:
        if any(point.name == name for point in self._points.readable()[0]):
            raise InvalidError(f"name: another version is named {name!r}", remedy="remove that name with give_up first")

    def is_busy(self, save: int, own: bool, waits: bool) -> bool:
        self._aside.doing = f"begin save {save}"
        is_busy, one_waits = map(any, zip(*self._aside.gather([own, waits])))
        return is_busy and not one_waits

    def any_of(self, save: int, own: bool) -> bool:
        self._ranks.doing = f"make save {save}"
        rows = self._ranks.gather({"own": own})
        failures = [each.get("failed") for each in rows]
        if any(failures):
            # The rank that failed has reported this save, and removes what it left.
            self._told = save
            self._give_up_unnamed()
            raise_first(failures)
        return any(each["own"] for each in rows)

    def label(self, save: int, name: str | None) -> dict[str, Any] | None:
        return rank_archives.label(self._attempt, save, self._ranks.count, name)

    def _archived(self) -> ArchivedSnapshots | None:
        return rank_archives.archived_snapshots(self.store) if self._has_archive else None

    def begin(self, nbytes: int) -> None:
        # Snapshots that no point lists belong to no version.
        self._removal.make_room(nbytes)

    def keep(self, save: int, lsn: int, step: int, name: str | None) -> int:
        snapshot = of_step(step, lsn)
        try:
            kept = self.store.snapshot(snapshot, verify=False).id
            record = {"step": step, "name": name, "part": Part(self.store.id, snapshot, lsn),
                      "archived": self._archived()}
        except BaseException as error:
            self.failed(save, error)
            raise
        all_records = self._tell(save, record)
        try:
            raise_first([each.get("failed") for each in all_records])
            for rank, each in enumerate(all_records):
                if (each["step"], each["name"]) != (step, name):
                    raise RefusedError(f"rank {rank} saved step {each['step']} as {each['name']!r}, but rank "
                                       f"{self._ranks.rank} saved step {step} as {name!r}",
                                       remedy="save the same step on all ranks")
        except Error:
            self._give_up_unnamed()
            raise
        parts = [Part(*each["part"]) for each in all_records]
        archived = _of_all([each["archived"] for each in all_records])
        self._give_up_all_but(self._ranks.by_first(lambda: self._publish(step, name, parts, archived)))
        return kept

    def failed(self, save: int, error: BaseException) -> None:
        # The error of the save itself is raised, not an error of reporting it.
        with contextlib.suppress(RankFailedError):
            if save > self._told:
                self._tell(save, {"failed": described(error)})
                self._give_up_unnamed()

    def _tell(self, save: int, record: Any) -> list[Any]:
        self._told = save
        self._ranks.doing = f"make save {save}"
        return self._ranks.gather(record)

    def _publish(self, step: int, name: str | None, parts: list[Part],
                 archived: list[ArchivedSnapshots]) -> list[list[str]] | None:
        self._points.create(step, name, parts)
        points, all_read = self._points.readable()
        needed = rank_archives.needed(points, archived) if self._has_archive else []
        gone = [point for point in self._keep.outlived(points) if point not in needed]
        self._points.remove(gone)
        if not all_read:
            return None
        kept = [point for point in points if point not in gone]
        if not self._has_archive:
            # A later rank of this number could not continue the archive of a removed store.
            self._remove_left_stores(kept)
        return self._snapshots_of(kept)

    def _remove_left_stores(self, kept: list[Point]) -> None:
        """Removes the stores of ranks that no longer exist, unless a point lists a snapshot of such a store."""
        ranks, directory = max([self._ranks.count, *(len(point.parts) for point in kept)]), self._held.path
        try:
            for number in numbered_stores(directory):
                if number >= ranks:
                    removed = directory / f"removed-{number}"
                    if removed.exists():
                        # A process ended while it removed an earlier store of this rank.
                        shutil.rmtree(removed)
                    # A partly removed store would be unusable for a rank that is added later.
                    os.replace(store_of(directory, number), removed)
                    durable_files.sync_folder(directory)
            for folder in directory.glob("removed-*"):
                shutil.rmtree(folder)
        except OSError as error:
            # The next save tries again.
            logging.getLogger("remanent").warning("a store that is no longer needed cannot be removed: %s", error)

    def _kept_snapshots(self) -> list[list[str]] | None:
        """Returns the snapshots that points list, by rank. Returns None if a point cannot be read, because that point
        may list any snapshot."""
        points, all_read = self._points.readable()
        return self._snapshots_of(points) if all_read else None

    def _snapshots_of(self, points: list[Point]) -> list[list[str]]:
        return [[point.parts[rank].snapshot for point in points if rank < len(point.parts)]
                for rank in range(self._ranks.count)]

    def _give_up_unnamed(self) -> None:
        """Removes the snapshots of a save that failed on one rank, and of earlier failed saves, on all ranks."""
        self._give_up_all_but(self._ranks.by_first(self._kept_snapshots))

    def _give_up_all_but(self, kept: list[list[str]] | None) -> None:
        """Starts to remove the snapshots of this rank's store that no point lists. `kept` contains the listed snapshots
        by rank; None removes nothing."""
        self._removal.wait()
        # The first rank decides: others may see an earlier state of a shared folder.
        own = None if kept is None else set(kept[self._ranks.rank])
        self._removal.begin([] if own is None else
                            [each.snapshot for each in unnamed(self.store) if each.snapshot not in own])

    def view(self, at: int | str | Version | None) -> _native.View:
        parts = self._parts_of(at)
        if len(parts) != self._ranks.count:
            raise RefusedError(f"the version has {len(parts)} ranks, but the run has {self._ranks.count}",
                               remedy="restore the version, and save it again")
        return self._ranks.all_or_none(lambda: self._view(parts, self._ranks.rank))

    def viewer(self) -> Callable[[Version], _native.View]:
        return self.view

    def views(self, at: int | str | Version | None) -> Views:
        parts = self._parts_of(at)
        count, rank = len(parts), self._ranks.rank
        own = self._ranks.all_or_none(lambda: self._view(parts, rank % count))
        return Views(own, rank if rank < count else None, count, lambda other: self._view(parts, other))

    def _parts_of(self, at: int | str | Version | None) -> list[Part]:
        return [Part(*part) for part in self._ranks.by_first(lambda: self._found(at).parts)]

    def _found(self, at: int | str | Version | None) -> Point:
        if at is None:
            newest = self._points.newest()
            if newest is None:
                raise NoStateError("the run has no version yet", remedy="save a version first")
            return newest
        kind, value = _native.state_point(at) if isinstance(at, str) else ("step", at)
        if kind in ("lsn", "snapshot"):
            raise InvalidError(f"at: {at!r} refers to the store of one rank", remedy="pass a step or a name")
        points = self._points.readable()[0]
        for point in reversed(points):
            if isinstance(at, Version):
                # The comparison uses this rank's part, as `at` does. The batch may have been another rank's when there
                # were fewer ranks.
                is_it = (point.part(self._ranks.rank).lsn, point.step, point.created) == (at.lsn, at.step, at.created)
            else:
                is_it = value == (point.step if kind == "step" else point.name)
            if is_it:
                return point
        raise no_version(at, points)

    def _view(self, parts: list[Part], rank: int) -> _native.View:
        part = parts[rank]
        view = _native.View(store_of(self._held.path, rank), f"name:{part.snapshot}")
        if view.id != part.store_id:
            found = view.id
            view.close()
            raise DamagedError(f"the version was saved to store {part.store_id}, but the directory contains store {found}",
                               remedy="restore the original store from a backup", path=str(self._held.path))
        return view

    def proven(self, read: Callable[[], _T]) -> _T:
        return self._ranks.all_or_none(read)

    def newest_step(self) -> int | None:
        points = self._points.readable()[0]
        return points[-1].step if points else None

    def listed(self) -> list[Version]:
        self._removal.wait()
        return [point.version(self._ranks.rank) for point in self._points.readable()[0]]

    def agreed(self) -> list[Version]:
        numbers = self._ranks.by_first(lambda: [point.number for point in self._points.readable()[0]])
        own = {point.number: point for point in self._points.readable()[0]}

        def found() -> list[Version]:
            try:
                return [own[number].version(self._ranks.rank) for number in numbers]
            except KeyError as error:
                raise NoStateError(f"rank {self._ranks.rank} does not see version file {error}, but the first rank does",
                                   remedy="use the same directory on all ranks") from error

        return self._ranks.all_or_none(found)

    def give_up(self, name: str) -> None:
        archived = _of_all(self._ranks.gather(self._ranks.all_or_none(self._archived))) if self._has_archive else []

        def remove() -> list[list[str]] | None:
            point, newest = self._found(f"name:{name}"), self._points.newest()
            needed = rank_archives.needed(self._points.readable()[0], archived) if self._has_archive else []
            if newest is not None and point.number == newest.number or point in needed:
                self._points.forget_name(point)
            else:
                self._points.remove([point])
            return self._kept_snapshots()

        self._give_up_all_but(self._ranks.by_first(remove))
        self._removal.wait()

    def fork(self, directory: _Path, at: int | str | Version | None) -> None:
        target = Path(directory).absolute()
        self._ranks.by_first(lambda: _check_free(target))
        with self.view(at) as view:
            step = int(view.root["step"])
            own = store_of(target, self._ranks.rank)
            try:
                parts = self._ranks.gather(self._ranks.all_or_none(lambda: _forked(view, step, own)))
                points = Points(lambda: target)
                self._ranks.by_first(lambda: points.create(step, None, [Part(*part) for part in parts]))
            except BaseException:
                shutil.rmtree(own, ignore_errors=True)
                raise

    def end(self) -> None:
        self._removal.end()
        self._aside.end()
        self._held.close()


def _of_all(gathered: list[list[list[str]] | None]) -> list[ArchivedSnapshots]:
    """Returns the archived snapshots of all ranks from the values that they sent."""
    return [ArchivedSnapshots(*each) for each in gathered if each is not None]


def _check_free(directory: Path) -> None:
    if directory.exists() and any(directory.iterdir()):
        raise ForeignDirectoryError(f"{directory} is not empty", remedy="use a new directory")


def _forked(view: _native.View, step: int, target: Path) -> Part:
    durable_files.make_folder(target.parent)
    view.fork(target)
    with _native.Store(target, device="host", memory={"load": "on_demand"}) as store:
        snapshot = of_step(step, store.lsn)
        store.snapshot(snapshot, verify=False)
        return Part(store.id, snapshot, store.lsn)
