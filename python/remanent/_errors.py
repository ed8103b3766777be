"""The exceptions: one base, and a subclass for each kind that a caller acts on."""

from __future__ import annotations

from typing import Any

__all__ = [
    "ClosedError", "ConflictError", "DamagedError", "DeviceError", "DiskFullError", "DivergedError", "Error",
    "ForeignDirectoryError", "ForkedError", "InUseError", "InvalidError", "LeasedError", "LockedError",
    "MemoryRefusedError", "MismatchError", "NoStateError", "NoStoreError", "OutOfBoundsError", "OutOfMemoryError",
    "OverBudgetError", "OvertakenError", "PoisonedError", "RankFailedError", "RefusedError",
    "RestoreFailedError", "StoreIOError", "TakenError", "UnknownKeyError", "UnknownPageError",
]


class Error(Exception):
    """The base of everything that the package raises on its own account.

    `remedy` says what helps, in words; `path` is the store's directory where one is concerned; `file`, `offset`
    and `lsn` say where in it, where that is known. Other attributes are the subclass's.

    >>> try:
    ...     remanent.View(directory + "/nothing")
    ... except remanent.Error as error:
    ...     print(type(error).__name__, "-", error.remedy)
    NoStoreError - change the call
    """

    remedy: str
    path: str | None
    file: str | None
    offset: int | None
    lsn: int | None

    def __init__(self, message: str, *, remedy: str = "change the call", path: str | None = None,
                 file: str | None = None, offset: int | None = None, lsn: int | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.remedy, self.path, self.file, self.offset, self.lsn = remedy, path, file, offset, lsn
        for name, value in details.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions cross processes, as those of `concurrent.futures` do.
        return (_again, (type(self), self.message, dict(self.__dict__)))


def _again(kind: type[Error], message: str, state: dict[str, Any]) -> Error:
    error = kind(message)
    error.__dict__.update(state)
    return error


class LockedError(Error):
    """Another process, or another handle in this one, has the store open; `holder` says which."""

    holder: str


class NoStoreError(Error, FileNotFoundError):
    """There is no store in the directory."""


class ForeignDirectoryError(Error, FileExistsError):
    """The directory holds something that is no store. Nothing was touched."""


class MismatchError(Error):
    """Identity or layout fingerprint are not those with which the store was created."""


class DamagedError(Error):
    """Bytes on disk are not what was written. `remanent verify` lists all damage. Nothing was changed."""


class PoisonedError(Error):
    """An earlier failure, which is this one's `__cause__`, stopped the store. Open it again."""


class DiskFullError(Error):
    """There is no space for `needed` bytes. Nothing changed; the store goes on when space returns."""

    needed: int


class StoreIOError(Error, OSError):
    """The system refused a call: a file, a folder, a thread."""


class InvalidError(Error, ValueError):
    """An option, a key or an operation contradicts itself, or is over a limit. Nothing changed."""


class UnknownPageError(Error, LookupError):
    """No page has this id."""

    page: int


class UnknownKeyError(Error, KeyError):
    """No page has this key."""

    key: str | bytes


class OutOfBoundsError(Error, IndexError):
    """The range does not lie within the page, which is `page_length` bytes long."""

    page: int
    page_length: int


class TakenError(Error):
    """Another page has the key, or another snapshot the name. Nothing changed."""


class ConflictError(Error):
    """Another batch changed the page first: it is at epoch `found`, not `expected`. Nothing changed."""

    page: int
    expected: int
    found: int


class OverBudgetError(Error):
    """The budget of the place has no room: `asked` bytes, of which `available` are left. Nothing changed."""

    place: str
    asked: int
    available: int


class OutOfMemoryError(Error, MemoryError):
    """The device's memory, or the host's, is exhausted. Nothing changed."""


class DeviceError(Error):
    """A device is missing, cannot hold such pages, or failed."""


class MemoryRefusedError(Error, BufferError):
    """Memory of the caller's is not what the call needs. Nothing changed."""


class LeasedError(Error):
    """The page is leased or pinned: end that first."""

    page: int


class InUseError(Error):
    """Leases or views still use the store that is to be closed, or a save is under way. Nothing changed."""


class NoStateError(Error, LookupError):
    """There is no such snapshot, or the state asked for is not kept."""


class OvertakenError(Error):
    """What was being read is not kept any more, or has changed since: start over."""


class DivergedError(Error):
    """A follower's position, or its next batch, is not on the store's line: start over."""


class ForkedError(Error):
    """The object was inherited by a forked child. Only the process that opened it, `opener`, may use it."""

    opener: int


class ClosedError(Error):
    """The store, view, lease or batch is closed."""


class RankFailedError(Error):
    """Another rank failed, or cannot be reached; `rank` says which, where that is known.

    A version that was being saved is there on all ranks, or on none.
    """

    rank: int | None


class RefusedError(Error, TypeError):
    """A value cannot be stored faithfully, and is not stored otherwise; the message names it."""


class RestoreFailedError(Error):
    """A part of a run raised an exception, which is this one's `__cause__`, as it loaded its state; `part` names it.

    `changed` names the parts that have values of the version, in whole or in part. All others are as they were.
    """

    part: str
    changed: tuple[str, ...]
