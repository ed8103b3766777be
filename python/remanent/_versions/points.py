"""The files of a run with several ranks that list the parts of each version."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from remanent._store.errors import DamagedError
from remanent._util import checksummed_json, durable_files
from remanent._versions.run_versions import Version

_KIND = "version"
_ENDING = ".point"
_STORE = "rank-"


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


def store_of(directory: Path, rank: int) -> Path:
    """Returns the directory of a rank's store."""
    return directory / f"{_STORE}{rank}"


def numbered_stores(directory: Path) -> list[int]:
    """Returns the numbers of the ranks that have a directory, in order."""
    numbers = (path.name.removeprefix(_STORE) for path in directory.glob(f"{_STORE}*"))
    return sorted(int(number) for number in numbers if number.isdecimal())


class Points:
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

    def exist(self) -> bool:
        """Returns whether the run has any point, even if it is damaged."""
        return bool(self._paths())

    def create(self, step: int, name: str | None, parts: list[Part]) -> None:
        folder = self._folder
        durable_files.make_folder(folder)
        for left in folder.glob(f"*{_ENDING}.tmp"):
            # A process was killed while it created a point.
            left.unlink()
        number = max(map(_number_of, self._paths()), default=0) + 1
        point = Point(number, step, name, time.time(), parts)
        durable_files.create(self._path(number), _encoded(point))

    def create_all(self, points: Iterable[Point]) -> None:
        """Creates all points of a run that has none, or none of them."""
        folder = self._folder
        made = folder.with_name(f"{folder.name}.tmp")
        if made.exists():
            # A process was killed in this function.
            shutil.rmtree(made)
        durable_files.make_folder(made)
        for point in points:
            durable_files.publish(made / self._path(point.number).name, _encoded(point))
        os.replace(made, folder)
        durable_files.sync_folder(folder.parent)

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
