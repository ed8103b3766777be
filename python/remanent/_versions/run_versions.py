"""Keeps, finds and removes the versions of a run."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from remanent._store import _native
from remanent._store.errors import InvalidError, NoStateError, RefusedError
from remanent._versions.removal import Removal

_Path = str | os.PathLike[str]
_T = TypeVar("_T")

STEP = "step "
# The entry of the root that is set while a save has written part of its version.
SAVING = "saving"
# The entry of the root that is equal on all ranks of a version.
RANKS = "ranks"


_R = TypeVar("_R", bound=_native.Reader)


def whole(reader: _R) -> _R:
    """Returns `reader` after checking that its state is not that of an interrupted save."""
    if SAVING in reader.root:
        raise NoStateError("the state is that of an interrupted save", remedy="use one of the versions in `versions()`")
    return reader


@dataclass(frozen=True)
class Version:
    """A kept version of a run: its step, the Lsn of its batch, its name or None, and the time of the save in seconds
    since 1970."""

    step: int
    lsn: int
    name: str | None
    created: float


def did_you_mean(wanted: str, known: Iterable[str]) -> str:
    """Returns a suggestion to append to an error about an unknown name: the most similar known name, if any."""
    near = _native.nearest(wanted, list(known))
    return "" if near is None else f"; did you mean {near!r}?"


def no_version(at: int | str | Version, kept: Iterable[_Kept]) -> NoStateError:
    """Returns the error for a version that a run does not keep."""
    names = [each.name for each in kept if each.name is not None]
    if isinstance(at, str):
        name = at.removeprefix("name:")
        message = f"there is no version named {name!r}{did_you_mean(name, names)}"
    else:
        message = f"there is no version {named(at) if isinstance(at, Version) else f'of step {at}'}"
    return NoStateError(message, remedy="use the step or name of a version in `versions()`")


def named(at: int | str | Version | None) -> str:
    """Returns the text by which errors name a version. The text is the same on all ranks."""
    if isinstance(at, Version):
        return f"of step {at.step}" if at.name is None else f"named {at.name!r}"
    return repr(at)


class _Kept(Protocol):
    """The properties of a version that determine whether it is removed."""

    @property
    def step(self) -> object: ...

    @property
    def name(self) -> str | None: ...

    @property
    def created(self) -> float: ...


_K = TypeVar("_K", bound=_Kept)


@dataclass(frozen=True)
class Keep:
    """The number of newest unnamed versions to keep, and the age in seconds up to which older ones are also kept."""

    count: int
    seconds: float | None

    def outlived(self, kept: Iterable[_K]) -> list[_K]:
        """Returns the versions to remove. `kept` contains versions in order. If a step was saved again, only its newest
        version is kept."""
        newest: dict[object, _K] = {}
        gone = []
        for version in kept:
            if version.name is None:
                if version.step in newest:
                    gone.append(newest.pop(version.step))
                newest[version.step] = version
        since = time.time() - self.seconds if self.seconds is not None else float("inf")
        return gone + [version for version in list(newest.values())[: -self.count] if version.created < since]


class Views:
    """The opened parts of a version: this rank's own part, and on request those of other ranks.

    :param own: the part from which this rank continues.
    :param number: the number of that part if this rank saved it, or None if this rank was not among the ranks that
        saved.
    :param opened: opens the part of a rank, given by the rank's number.
    """

    def __init__(self, own: _native.View, number: int | None, count: int,
                 opened: Callable[[int], _native.View]) -> None:
        self.own, self.number, self.count = own, number, count
        self._opened = opened
        self._others: dict[int, _native.View] = {}

    def of(self, rank: int) -> _native.View:
        """Returns the part that rank `rank` saved."""
        if rank == self.number:
            return self.own
        if rank not in self._others:
            self._others[rank] = self._opened(rank)
        return self._others[rank]

    def close(self) -> None:
        for view in (self.own, *self._others.values()):
            view.close()


class Versions(Protocol):
    """The versions that a run keeps."""

    def check_name(self, name: str) -> None:
        """Raises `InvalidError` if another version has this name."""

    def is_busy(self, save: int, own: bool, waits: bool) -> bool:
        """Returns whether a save of any rank is in progress when save number `save` begins, and no rank waits for
        it."""

    def any_of(self, save: int, own: bool) -> bool:
        """Returns whether `own` is true on any rank when save number `save` begins. If a rank could not begin the save,
        raises its error."""

    def label(self, save: int, name: str | None) -> dict[str, Any] | None:
        """Returns the entry of the root that identifies the version of a save on all ranks, or None for a single
        process."""

    def begin(self, nbytes: int) -> None:
        """Prepares a save of `nbytes` bytes. The newest version is kept if it is not kept yet."""

    def keep(self, save: int, lsn: int, step: int, name: str | None) -> int:
        """Keeps the durable version of batch `lsn`, and starts to remove the versions that it replaces. Returns the
        number of the version's snapshot in this rank's store.

        :param save: the number of the save, as for `failed`. For each save, `keep`, `failed` or both in this order are
            called.
        """

    def failed(self, save: int, error: BaseException) -> None:
        """Records that this save created no version."""

    def view(self, at: int | str | Version | None) -> _native.View:
        """Opens this rank's part of a version, given by step or name. None opens the newest version."""

    def viewer(self) -> Callable[[Version], _native.View]:
        """Returns a function that opens this rank's part of a kept version, for a caller that opens many of them."""

    def views(self, at: int | str | Version | None) -> Views:
        """Opens a version with the parts of all ranks, even on a rank that did not save a part."""

    def proven(self, read: Callable[[], _T]) -> _T:
        """Returns the result of `read` if all ranks can read the version completely."""

    def newest_step(self) -> int | None:
        """Returns the step of the newest version, or None if there is no version."""

    def listed(self) -> list[Version]:
        """Returns the kept versions, oldest first."""

    def agreed(self) -> list[Version]:
        """Returns the kept versions that all ranks see, oldest first. All ranks must call this method."""

    def give_up(self, name: str) -> None: ...

    def fork(self, directory: _Path, at: int | str | Version | None) -> None: ...

    def end(self) -> None: ...


def of_step(step: int, lsn: int) -> str:
    """Returns the name of an unnamed version's snapshot. The Lsn distinguishes it from an earlier save of the same
    step."""
    return f"{STEP}{step} @{lsn}"


class _Snapshot(NamedTuple):
    """An unnamed version, as derived from its snapshot."""

    # The step as it appears in the snapshot's name.
    step: str
    name: None
    created: float
    snapshot: str


def unnamed(store: _native.Store) -> Iterator[_Snapshot]:
    """Yields the snapshots of unnamed versions, oldest first."""
    for info in store.snapshots():
        found = re.fullmatch(STEP + r"(.*) @\d+", info.name or "")
        if found and info.name:
            yield _Snapshot(found[1], None, info.created_unix_ms / 1000, info.name)


class OwnVersions:
    """The versions of a run with one process, which are named snapshots of its store."""

    def __init__(self, store: _native.Store, keep: Keep, *, always_prune: bool) -> None:
        self._store, self._keep = store, keep
        self._removal = Removal(store, always=always_prune)

    def check_name(self, name: str) -> None:
        if any(info.name == name for info in self._store.snapshots()):
            raise InvalidError(f"name: another version is named {name!r}", remedy="remove that name with give_up first")

    def is_busy(self, save: int, own: bool, waits: bool) -> bool:
        return own and not waits

    def any_of(self, save: int, own: bool) -> bool:
        return own

    def label(self, save: int, name: str | None) -> dict[str, Any] | None:
        return None

    def begin(self, nbytes: int) -> None:
        self._removal.make_room(nbytes)
        self._keep_newest()

    def _keep_newest(self) -> None:
        """Keeps the newest version if it is not kept yet. This applies to the first version of a fork, and to a version
        whose process ended before it was kept."""
        root = self._store.root
        kept = max((info.end for info in self._store.snapshots() if info.name is not None), default=-1)
        if "step" in root and SAVING not in root and kept < self._store.lsn:
            self._store.snapshot(of_step(root["step"], self._store.lsn), verify=False)

    def keep(self, save: int, lsn: int, step: int, name: str | None) -> int:
        # The snapshot contains exactly this version, because the next save begins only after this one has ended.
        snapshot = self._store.snapshot(name or of_step(step, lsn), verify=False)
        self._removal.wait()
        self._removal.begin([version.snapshot for version in self._keep.outlived(unnamed(self._store))])
        return snapshot.id

    def failed(self, save: int, error: BaseException) -> None:
        pass

    def view(self, at: int | str | Version | None) -> _native.View:
        if isinstance(at, Version):
            at = f"lsn:{at.lsn}"
        if at is None:
            root = self._store.root
            if "step" in root and SAVING not in root:
                return _native.View(self._store.directory)
            # A save was interrupted before its last batch: the newest complete version is a snapshot.
            versions = self.listed()
            if not versions:
                raise NoStateError("the run has no version yet", remedy="save a version first")
            return _native.View(self._store.directory, f"lsn:{versions[-1].lsn}")
        if isinstance(at, int):
            for version in reversed(self.listed()):
                if version.step == at:
                    return _native.View(self._store.directory, f"lsn:{version.lsn}")
            raise no_version(at, self.listed())
        try:
            return _native.View(self._store.directory, at)
        except NoStateError:
            if _native.state_point(at)[0] == "name":
                raise no_version(at, self.listed()) from None
            raise

    def viewer(self) -> Callable[[Version], _native.View]:
        states = _native.KeptStates(self._store.directory)
        return lambda version: states.view(version.lsn)

    def views(self, at: int | str | Version | None) -> Views:
        own = self.view(at)
        return Views(own, 0, 1, lambda rank: own)

    def proven(self, read: Callable[[], _T]) -> _T:
        return read()

    def agreed(self) -> list[Version]:
        return self.listed()

    def newest_step(self) -> int | None:
        root = self._store.root
        if "step" in root and SAVING not in root:
            return int(root["step"])
        versions = self.listed()
        return versions[-1].step if versions else None

    def listed(self) -> list[Version]:
        self._removal.wait()
        versions: dict[int, Version] = {}
        for info in self._store.snapshots():
            if info.name is None:
                continue
            root = info.root
            if "step" in root and SAVING not in root:
                name = None if info.name.startswith(STEP) else info.name
                if name is not None or info.end not in versions:
                    # A process that ended while it gave up a name leaves a version with two snapshots.
                    versions[info.end] = Version(root["step"], info.end, name, info.created_unix_ms / 1000)
        return sorted(versions.values(), key=lambda version: version.lsn)

    def give_up(self, name: str) -> None:
        self._removal.wait()
        self._keep_newest()
        kept = {info.name: info for info in self._store.snapshots()}
        if name not in kept:
            raise no_version(name, self.listed())
        newest = self.listed()[-1:]
        if [version.lsn for version in newest] == [kept[name].end]:
            # The newest version is kept without its name, and counts toward the limit.
            unnamed = of_step(newest[0].step, newest[0].lsn)
            if unnamed not in kept and SAVING in self._store.root:
                raise RefusedError(f"{name!r} is the newest version, and a later save was interrupted",
                                   remedy="save again first")
            if unnamed not in kept:
                self._store.snapshot(unnamed, verify=False)
        self._store.prune(give_up=[name], names_only=True)

    def fork(self, directory: _Path, at: int | str | Version | None) -> None:
        with self.view(at) as view:
            whole(view).fork(directory)

    def end(self) -> None:
        self._removal.end()
