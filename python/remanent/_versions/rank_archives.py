"""The archives of a run with several ranks: one for each rank's store.

An archive contains named snapshots and no points. After the loss of all machines, the points are derived from the
snapshots in the restored stores. The root of each version has an entry that is equal on all ranks and differs from that
of any other save, so that parts of different saves of a step are never combined. The newest version that all archives
contain is never removed, so that there is always a version to restore.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import unquote, urlsplit

from remanent._store import _native
from remanent._store.errors import ArchiveError, InvalidError, NoStateError, NoStoreError
from remanent._store.options import StoreOptions
from remanent._util import durable_files
from remanent._versions.points import Part, Point, numbered_stores, store_of
from remanent._versions.run_versions import RANKS, STEP, of_step


def label(attempt: str, save: int, count: int, name: str | None) -> dict[str, Any]:
    """Returns the entry of the root that identifies a version.

    :param attempt: a random text, equal on all ranks and different each time that the run is opened.
    :param save: the number of the save within the attempt.
    :param count: the number of ranks.
    """
    return {"attempt": attempt, "save": save, "count": count, "name": name}


def url_of(options: StoreOptions) -> str | None:
    """Returns the URL of the archives, or None if there is none or if the store will reject it."""
    archive = options.get("archive")
    url: object = archive.get("url") if isinstance(archive, Mapping) else None
    return url if isinstance(url, str) else None


def url_of_rank(url: str, rank: int) -> str:
    """Returns the URL of a rank's archive."""
    return f"{url.removesuffix('/')}/rank-{rank}"


def of_rank(options: StoreOptions, rank: int, of_first: str | None) -> StoreOptions:
    """Returns the options for the store of a rank, whose archive has its own URL.

    :param of_first: the URL that the first rank passed.
    """
    url = url_of(options)
    if url != of_first:
        raise InvalidError(f"archive: rank {rank} passed another URL than rank 0",
                           remedy="pass the same archive on all ranks")
    if url is None:
        return options
    own = url_of_rank(url, rank)
    parts = urlsplit(own)
    if parts.scheme == "file" and not parts.netloc:
        # Only the folder of all ranks must exist.
        folder = Path(unquote(parts.path))
        if folder.parent.is_dir():
            durable_files.make_folder(folder)
    return cast(StoreOptions, {**options, "archive": {**cast(Mapping[str, Any], options["archive"]), "url": own}})


class ArchivedSnapshots(NamedTuple):
    """The snapshots of a rank's store that its archive keeps, and the snapshots that the archive refused."""

    archived: list[str]
    refused: list[str]


def archived_snapshots(store: _native.Store) -> ArchivedSnapshots:
    """Returns the state of the snapshots of versions in the archive of a store, without waiting."""
    found = ArchivedSnapshots([], [])
    for info in store.snapshots():
        if info.name is None or not info.name.startswith(STEP):
            continue
        try:
            if store.wait_archived(info, 0.0):
                found.archived.append(info.name)
        except NoStateError:
            # The snapshot was removed after it was listed.
            continue
        except ArchiveError:
            found.refused.append(info.name)
    return found


def needed(points: Iterable[Point], of_ranks: list[ArchivedSnapshots]) -> list[Point]:
    """Returns the points that must not be removed, given all points, oldest first.

    These are the newest point that all archives contain, and the oldest later point that some archives do not contain
    yet. If the latter were removed, the archives might never have a newer point in common.
    """
    kept: list[Point] = []
    next_one: Point | None = None
    for point in sorted(points, key=lambda point: point.number, reverse=True):
        parts = list(zip(point.parts, of_ranks))
        if any(part.snapshot in each.refused for part, each in parts):
            continue
        if not all(part.snapshot in each.archived for part, each in parts):
            next_one = point
            continue
        kept.append(point)
        # The archives of former ranks are not open, so whether they contain the point is unknown.
        if len(point.parts) <= len(of_ranks):
            break
    return kept if next_one is None else [*kept, next_one]


class _Identity(NamedTuple):
    """The values that all parts of a version share."""

    attempt: str
    save: int
    step: int
    name: str | None
    ranks: int


class _Found(NamedTuple):
    part: Part
    created: float


def derived(directory: Path) -> list[Point]:
    """Returns the points of the versions of which the stores in a directory contain all parts, oldest first.

    :raises NoStateError: the directory lacks the store of a rank that has a part of the newest version.
    """
    stores: set[int] = set()
    versions: dict[_Identity, dict[int, _Found]] = {}
    for rank in numbered_stores(directory):
        try:
            for identity, found in _parts_in(store_of(directory, rank)):
                versions.setdefault(identity, {})[rank] = found
        except NoStoreError:
            # An interrupted restore leaves a directory without the identity of its store.
            continue
        stores.add(rank)
    whole = {identity: parts for identity, parts in versions.items() if len(parts) == identity.ranks}
    newest = max((parts[0].part.lsn for parts in whole.values()), default=-1)
    for identity, parts in versions.items():
        missing = sorted(set(range(identity.ranks)) - parts.keys())
        if not missing or not stores.isdisjoint(missing):
            continue
        if 0 not in parts or parts[0].part.lsn > newest:
            raise NoStateError(f"{directory} lacks the store of rank {missing[0]}, which has a part of the version of "
                               f"step {identity.step}", remedy=f"restore rank-{missing[0]} from its archive")
        logging.getLogger("remanent").warning("the version of step %d is not restored, because the directory lacks "
                                              "the store of rank %d", identity.step, missing[0])
    points: list[Point] = []
    names: set[str | None] = set()
    for identity in sorted(whole, key=lambda identity: whole[identity][0].part.lsn, reverse=True):
        parts = whole[identity]
        # A name that was given up, and then used again, may still be in the archives.
        name = None if identity.name in names else identity.name
        names.add(name)
        points.append(Point(len(whole) - len(points), identity.step, name, parts[0].created,
                            [parts[rank].part for rank in range(identity.ranks)]))
    return points[::-1]


def _parts_in(store: Path) -> Iterable[tuple[_Identity, _Found]]:
    """Yields the kept parts of versions in a rank's store, with their identities."""
    for lsn, step, _, _, created, _, _ in _native.versions(str(store)):
        if step is None or created is None:
            continue
        snapshot = of_step(step, lsn)
        try:
            view = _native.View(store, f"name:{snapshot}")
        except NoStateError:
            # The state is between two snapshots, so it is no part of a version.
            continue
        with view:
            found = view.root.get(RANKS)
            if found is not None:
                identity = _Identity(found["attempt"], found["save"], step, found["name"], found["count"])
                yield identity, _Found(Part(view.id, snapshot, lsn), created)
