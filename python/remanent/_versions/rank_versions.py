"""Versions of a run with several ranks. A version is a *point* at which the states of all ranks are on disk.

A point is a file that lists a snapshot of each rank's store. The first rank creates the file once all of these
snapshots are durable. Snapshots that no point lists belong to no version. After a crash of any rank at any time, either
the newest point or the previous one remains, and never a mixture of both. Only the first rank creates and removes
points, because it holds the lock of its store, which is in the same directory.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

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
from remanent._util import checksummed_json, durable_files
from remanent._versions.removal import Removal
from remanent._versions.run_versions import Keep, Version, Views, no_version, of_step, unnamed

_Path = str | os.PathLike[str]
_T = TypeVar("_T")

_KIND = "version"
_ENDING = ".point"


class Part(NamedTuple):
    """One rank's part of a point: a snapshot of the rank's store, and the Lsn of its last batch."""

    store_id: str
    snapshot: str
    lsn: int


class Point(NamedTuple):
    """A version of all ranks. `created` is the time of its creation in seconds since 1970."""

    number: int
    step: int
    name: str | None
    created: float
    parts: list[Part]

    def part(self, rank: int) -> Part:
        """Returns the part from which a rank continues. If there are more ranks than parts, ranks use the parts in
        turn."""
        return self.parts[rank % len(self.parts)]

    def version(self, rank: int) -> Version:
        return Version(self.step, self.part(rank).lsn, self.name, self.created)


def _store_of(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}"


class SharedVersions:
    """The versions of a run with several ranks. All ranks must call the same methods in the same order, except for
    `check_name` and `listed`."""

    def __init__(self, ranks: Ranks, process_group: dist.ProcessGroup, directory: _Path, keep: Keep,
                 options: StoreOptions, *, always_prune: bool) -> None:
        self._ranks, self._keep = ranks, keep
        self._held = durable_files.HeldDirectory(Path(directory))
        self._points = _Points(lambda: self._held.path)
        # The newest save whose outcome this rank has reported.
        self._told = 0
        opened: list[_native.Store] = []
        try:
            ranks.by_first(self._check)
            ranks.all_or_none(lambda: opened.append(self._open(options)))
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

    def _check(self) -> None:
        if (self._held.path / "STORE").exists():
            raise RefusedError(f"{self._held.path} is a store, so it cannot contain the stores of ranks",
                               remedy="use another directory")

    def _open(self, options: StoreOptions) -> _native.Store:
        self._held.make()
        return _native.Store(_store_of(self._held.path, self._ranks.rank), **options)

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

    def begin(self, nbytes: int) -> None:
        # Snapshots that no point lists belong to no version.
        self._removal.make_room(nbytes)

    def keep(self, save: int, lsn: int, step: int, name: str | None) -> None:
        snapshot = of_step(step, lsn)
        try:
            self.store.snapshot(snapshot, verify=False)
            record = {"step": step, "name": name, "part": Part(self.store.id, snapshot, lsn)}
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
        self._give_up_all_but(self._ranks.by_first(lambda: self._publish(step, name, parts)))

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

    def _publish(self, step: int, name: str | None, parts: list[Part]) -> list[list[str]] | None:
        self._points.create(step, name, parts)
        points, all_read = self._points.readable()
        gone = self._keep.outlived(points)
        self._points.remove(gone)
        if not all_read:
            return None
        kept = [point for point in points if point not in gone]
        self._remove_left_stores(kept)
        return self._snapshots_of(kept)

    def _remove_left_stores(self, kept: list[Point]) -> None:
        """Removes the stores of ranks that no longer exist, unless a point lists a snapshot of such a store."""
        ranks, directory = max([self._ranks.count, *(len(point.parts) for point in kept)]), self._held.path
        try:
            for folder in directory.glob("rank-*"):
                number = folder.name.removeprefix("rank-")
                if number.isdecimal() and int(number) >= ranks:
                    removed = folder.with_name(f"removed-{number}")
                    if removed.exists():
                        # A process ended while it removed an earlier store of this rank.
                        shutil.rmtree(removed)
                    # A partly removed store would be unusable for a rank that is added later.
                    os.replace(folder, removed)
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
        view = _native.View(_store_of(self._held.path, rank), f"name:{part.snapshot}")
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
        def remove() -> list[list[str]] | None:
            point, newest = self._found(f"name:{name}"), self._points.newest()
            if newest is not None and point.number == newest.number:
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
            own = _store_of(target, self._ranks.rank)
            try:
                parts = self._ranks.gather(self._ranks.all_or_none(lambda: _forked(view, step, own)))
                points = _Points(lambda: target)
                self._ranks.by_first(lambda: points.create(step, None, [Part(*part) for part in parts]))
            except BaseException:
                shutil.rmtree(own, ignore_errors=True)
                raise

    def end(self) -> None:
        self._removal.end()
        self._aside.end()
        self._held.close()


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


class _Points:
    """Reads, creates and removes the files of a run's points."""

    def __init__(self, directory: Callable[[], Path]) -> None:
        self._directory = directory

    @property
    def _folder(self) -> Path:
        return self._directory() / "points"

    def readable(self) -> tuple[list[Point], bool]:
        """Returns the readable points, oldest first, and whether all points could be read."""
        points, all_read = [], True
        for path in self._paths():
            try:
                points.append(_read(path))
            except FileNotFoundError:
                # The point was removed between the listing and the read.
                continue
            except (DamagedError, OSError) as error:
                all_read = False
                logging.getLogger("remanent").warning("a version cannot be read: %s", error)
        return points, all_read

    def newest(self) -> Point | None:
        """Returns the newest point, or None if there is none.

        :raises DamagedError: the newest point is damaged. The previous point must not be used in its place.
        """
        paths = self._paths()
        return _read(paths[-1]) if paths else None

    def create(self, step: int, name: str | None, parts: list[Part]) -> None:
        folder = self._folder
        durable_files.make_folder(folder)
        for left in folder.glob(f"*{_ENDING}.tmp"):
            # A process was killed while it created a point.
            left.unlink()
        number = max(map(_number_of, self._paths()), default=0) + 1
        point = Point(number, step, name, time.time(), parts)
        durable_files.create(self._path(number), _encoded(point))

    def forget_name(self, point: Point) -> None:
        """Removes the name of a point."""
        durable_files.publish(self._path(point.number), _encoded(point._replace(name=None)))

    def remove(self, points: Iterable[Point]) -> None:
        durable_files.remove(self._path(point.number) for point in points)

    def _paths(self) -> list[Path]:
        try:
            found = [path for path in self._folder.iterdir() if path.suffix == _ENDING and path.stem.isdecimal()]
        except FileNotFoundError:
            return []
        return sorted(found, key=_number_of)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:010}{_ENDING}"


def _number_of(path: Path) -> int:
    return int(path.stem)


def _encoded(point: Point) -> bytes:
    record = point._asdict()
    del record["number"]
    return checksummed_json.seal(_KIND, [record])


def _read(path: Path) -> Point:
    [text] = checksummed_json.parts_of(_KIND, path.read_bytes(), path)
    record = json.loads(text)
    parts = [Part(*part) for part in record["parts"]]
    return Point(_number_of(path), record["step"], record["name"], record["created"], parts)
