"""The exceptions of the package: a base class, and a subclass for each kind of error that a caller can handle."""

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
    """The base class of all exceptions that the package raises itself.

    `remedy` describes what helps; `path` is the store's directory, if one is concerned; `file`, `offset` and `lsn` give
    the location in it, if known. Subclasses add other attributes.

    >>> try:
    ...     remanent.View(directory + "/nothing")
    ... except remanent.Error as error:
    ...     print(type(error).__name__, "-", error.remedy)
    NoStoreError - check the path; to make a new store there, open it with permission to create one

    All functions of the package also raise these for values and types that they reject, as subclasses of `ValueError`,
    `TypeError` and so on. Python itself raises `TypeError` for missing, surplus or unknown arguments.
    """

    # The remedy if the call that raises the error gives none.
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
        # Exceptions are pickled to cross processes, such as those of `concurrent.futures`.
        return (_again, (type(self), self.message, dict(self.__dict__)))


def _again(kind: type[Error], message: str, state: dict[str, Any]) -> Error:
    error = kind(message)
    error.__dict__.update(state)
    return error


class LockedError(Error):
    """Another process, or another handle in this one, has the store open; `holder` identifies it."""

    _remedy = "read it with View, or close it there"

    holder: str


class SupersededError(Error):
    """Another writer, `holder`, has opened the store since this one did. This one acknowledges nothing more."""

    holder: str


class NoStoreError(Error, FileNotFoundError):
    """The directory contains no store."""

    _remedy = "check the path"


class ForeignDirectoryError(Error, FileExistsError):
    """The directory contains something other than a store. Nothing was changed."""

    _remedy = "give an empty directory, or a path that does not exist yet"


class MismatchError(Error, RuntimeError):
    """The identity or layout fingerprint differs from the one with which the store was created."""

    _remedy = "give the identity and layout that the store was created with, or another directory"


class DamagedError(Error):
    """Bytes on disk are not what was written. `remanent verify` lists all damage. Nothing was changed."""

    _remedy = "run `remanent verify`, which lists all damage and what can be saved"


class PoisonedError(Error):
    """An earlier failure, the `__cause__` of this exception, stopped the store. Open it again."""

    _remedy = "close the store and open it again"


class DiskFullError(Error):
    """The disk has no space for `needed` bytes. Nothing changed; the store continues when space is available again."""

    _remedy = "free some space or delete pages, then try again"

    needed: int


class StoreIOError(Error, OSError):
    """The operating system rejected a call for a file, a folder or a thread."""

    _remedy = "correct the path or the permissions that the error names, then try again"


class InvalidError(Error, ValueError):
    """An option, a key or an operation is inconsistent or over a limit. Nothing changed."""

    _remedy = "give a value that the error permits"


class InvalidTypeError(Error, TypeError):
    """An argument, or a value in it, has a type that the call does not accept. Nothing changed."""

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
    """The range is not within the page, which is `page_length` bytes long."""

    _remedy = "give a range or an index that exists"

    page: int
    page_length: int


class TakenError(Error):
    """Another page already has the key, or another snapshot the name. Nothing changed."""

    _remedy = "give another key or name, or give the old one up first"


class ConflictError(Error):
    """Another batch changed the page first: it is at epoch `found`, not `expected`. Nothing changed."""

    _remedy = "read the page again, and commit a new batch that is based on it"

    page: int
    expected: int
    found: int


class OverBudgetError(Error):
    """The budget of the place is exceeded: `asked` bytes were requested and `available` are left. Nothing changed."""

    _remedy = "delete pages of that place or move them elsewhere, or open with a larger budget"

    place: str
    asked: int
    available: int


class OutOfMemoryError(Error, MemoryError):
    """The memory of the device or the host is exhausted. Nothing changed."""

    _remedy = "free memory, then try again"


class DeviceError(Error):
    """A device is missing, cannot hold such pages, or failed."""

    _remedy = 'open the store with another device or place, such as "host"'


class MemoryRefusedError(Error, BufferError):
    """Caller-owned memory does not meet the requirements of the call. Nothing changed."""

    _remedy = "give contiguous memory of the length and on the device that the call needs"


class LeasedError(Error):
    """The page is leased or pinned. End the lease or pin first."""

    _remedy = "end the lease or pin first"

    page: int


class InUseError(Error, RuntimeError):
    """The object is in use by leases, views or another thread, or a save is in progress. Nothing changed."""

    _remedy = "end what uses it first, then try again"


class NoStateError(Error, LookupError):
    """The snapshot does not exist, or the requested state is not kept or not committed yet."""

    _remedy = "list the snapshots or versions that are kept"


class OvertakenError(Error):
    """The data being read is no longer kept, or has changed. Start over."""

    _remedy = "start over from the newest snapshot"


class DivergedError(Error):
    """A follower's position, or its next batch, is not part of the store's history. Start over."""

    _remedy = "start over from the newest snapshot"


class ForkedError(Error):
    """The object was inherited by a forked child. Only the process that opened it, `opener`, may use it."""

    _remedy = "open the store in this process"

    opener: int


class ClosedError(Error):
    """The store, view, lease or batch is closed."""

    _remedy = "open it again"


class RankFailedError(Error):
    """Another rank failed or cannot be reached; `rank` is its number, if known.

    A version that was being saved exists on all ranks or on none.
    """

    _remedy = "look at the error of the rank that failed first, and start the run again"

    rank: int | None


class RefusedError(Error, TypeError, ValueError):
    """A value cannot be stored faithfully, so nothing is stored. The message names the value."""

    _remedy = "convert the value to one that can be stored, or leave it out"

class RestoreFailedError(Error):
    """A part of a run, `part`, raised an exception while it loaded its state: the `__cause__` of this exception.

    `changed` names the parts that have values of the version, completely or partly. All others are unchanged.
    """

    part: str
    changed: tuple[str, ...]

    _remedy = "repair the part that the error names, then restore again"
