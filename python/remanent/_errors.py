"""The exceptions: one base, and a subclass for each kind that a caller acts on."""

from __future__ import annotations

from typing import Any

__all__ = [
    "ClosedError", "ConflictError", "DamagedError", "DeviceError", "DiskFullError", "DivergedError", "Error",
    "ForeignDirectoryError", "ForkedError", "InUseError", "InvalidError", "InvalidTypeError", "LeasedError",
    "LockedError", "MemoryRefusedError", "MismatchError", "NoStateError", "NoStoreError", "OutOfBoundsError", "OutOfMemoryError",
    "OverBudgetError", "OvertakenError", "PoisonedError", "RankFailedError", "RefusedError",
    "RestoreFailedError", "StoreIOError", "SupersededError", "TakenError", "UnknownKeyError", "UnknownPageError",
]


class Error(Exception):
    """The base of everything that the package raises on its own account.

    `remedy` says what helps, in words; `path` is the store's directory where one is concerned; `file`, `offset`
    and `lsn` say where in it, where that is known. Other attributes are the subclass's.

    >>> try:
    ...     remanent.View(directory + "/nothing")
    ... except remanent.Error as error:
    ...     print(type(error).__name__, "-", error.remedy)
    NoStoreError - check the path; to make a new store there, open it with permission to create one

    All functions of the package raise these for values and types that they refuse, as subclasses of `ValueError`,
    `TypeError` and so on, too. Python itself raises `TypeError` for arguments that are missing, too many or unknown.
    """

    # What helps if the call that raised it says nothing else.
    _remedy = "see the message, and give what it asks for"

    remedy: str
    path: str | None
    file: str | None
    offset: int | None
    lsn: int | None

    def __init__(self, message: str, remedy: str | None = None, *, path: str | None = None,
                 file: str | None = None, offset: int | None = None, lsn: int | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = self._remedy if remedy is None else remedy
        self.path, self.file, self.offset, self.lsn = path, file, offset, lsn
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

    _remedy = "read it with View, or close it there"

    holder: str


class SupersededError(Error):
    """Another writer, `holder`, has opened the store since this one did. This one acknowledges nothing more."""

    holder: str


class NoStoreError(Error, FileNotFoundError):
    """There is no store in the directory."""

    _remedy = "check the path"


class ForeignDirectoryError(Error, FileExistsError):
    """The directory holds something that is no store. Nothing was touched."""

    _remedy = "give an empty directory, or a path that does not exist yet"


class MismatchError(Error, RuntimeError):
    """Identity or layout fingerprint are not those with which the store was created."""

    _remedy = "give the identity and layout that the store was created with, or another directory"


class DamagedError(Error):
    """Bytes on disk are not what was written. `remanent verify` lists all damage. Nothing was changed."""

    _remedy = "run `remanent verify`, which lists all damage and what can be saved"


class PoisonedError(Error):
    """An earlier failure, which is this one's `__cause__`, stopped the store. Open it again."""

    _remedy = "close the store and open it again"


class DiskFullError(Error):
    """There is no space for `needed` bytes. Nothing changed; the store goes on when space returns."""

    _remedy = "free some space or delete pages, then try again"

    needed: int


class StoreIOError(Error, OSError):
    """The system refused a call: a file, a folder, a thread."""

    _remedy = "correct the path or the permissions that the error names, then try again"


class InvalidError(Error, ValueError):
    """An option, a key or an operation contradicts itself, or is over a limit. Nothing changed."""

    _remedy = "give a value that the error permits"


class InvalidTypeError(Error, TypeError):
    """An argument, or a value in it, is of a type that the call does not take. Nothing changed."""

    _remedy = "give a value of the type that the error names"


class UnknownPageError(Error, LookupError):
    """No page has this id."""

    _remedy = "list the pages that exist: the id of a deleted page is not given again"

    page: int


class UnknownKeyError(Error, KeyError):
    """No page has this key."""

    _remedy = "create the page first, or list the keys that exist"

    key: str | bytes


class OutOfBoundsError(Error, IndexError):
    """The range does not lie within the page, which is `page_length` bytes long."""

    _remedy = "give a range or an index that exists"

    page: int
    page_length: int


class TakenError(Error):
    """Another page has the key, or another snapshot the name. Nothing changed."""

    _remedy = "give another key or name, or give the old one up first"


class ConflictError(Error):
    """Another batch changed the page first: it is at epoch `found`, not `expected`. Nothing changed."""

    _remedy = "read the page again, and commit a new batch that is based on it"

    page: int
    expected: int
    found: int


class OverBudgetError(Error):
    """The budget of the place has no room: `asked` bytes, of which `available` are left. Nothing changed."""

    _remedy = "delete pages of that place or move them elsewhere, or open with a larger budget"

    place: str
    asked: int
    available: int


class OutOfMemoryError(Error, MemoryError):
    """The device's memory, or the host's, is exhausted. Nothing changed."""

    _remedy = "free memory, then try again"


class DeviceError(Error):
    """A device is missing, cannot hold such pages, or failed."""

    _remedy = 'open the store with another device or place, such as "host"'


class MemoryRefusedError(Error, BufferError):
    """Memory of the caller's is not what the call needs. Nothing changed."""

    _remedy = "give contiguous memory of the length and on the device that the call needs"


class LeasedError(Error):
    """The page is leased or pinned: end that first."""

    _remedy = "end the lease or pin first"

    page: int


class InUseError(Error, RuntimeError):
    """Leases, views or another thread use the object, or a save is under way. Nothing changed."""

    _remedy = "end what uses it first, then try again"


class NoStateError(Error, LookupError):
    """There is no such snapshot, or the state asked for is not kept."""

    _remedy = "list the snapshots or versions that are kept"


class OvertakenError(Error):
    """What was being read is not kept any more, or has changed since: start over."""

    _remedy = "start over from the newest snapshot"


class DivergedError(Error):
    """A follower's position, or its next batch, is not on the store's line: start over."""

    _remedy = "start over from the newest snapshot"


class ForkedError(Error):
    """The object was inherited by a forked child. Only the process that opened it, `opener`, may use it."""

    _remedy = "open the store in this process"

    opener: int


class ClosedError(Error):
    """The store, view, lease or batch is closed."""

    _remedy = "open it again"


class RankFailedError(Error):
    """Another rank failed, or cannot be reached; `rank` says which, where that is known.

    A version that was being saved is there on all ranks, or on none.
    """

    _remedy = "look at the error of the rank that failed first, and start the run again"

    rank: int | None


class RefusedError(Error, TypeError, ValueError):
    """A value cannot be stored faithfully, and is not stored otherwise; the message names it."""

    _remedy = "convert the value to one that can be stored, or leave it out"

class RestoreFailedError(Error):
    """A part of a run raised an exception, which is this one's `__cause__`, as it loaded its state; `part` names it.

    `changed` names the parts that have values of the version, in whole or in part. All others are as they were.
    """

    part: str
    changed: tuple[str, ...]

    _remedy = "repair the part that the error names, then restore again"
