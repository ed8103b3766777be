"""The exceptions of the package: a base class, and a subclass for each kind of error that a caller can handle."""

from __future__ import annotations

from typing import Any

__all__ = [
    "ArchiveError", "ClosedError", "ConflictError", "DamagedError", "DeviceError", "DiskFullError", "DivergedError", "Error",
    "ForeignDirectoryError", "ForkedError", "InUseError", "InvalidError", "InvalidTypeError", "LeasedError",
    "LockedError", "MemoryRefusedError", "MismatchError", "NoStateError", "NoStoreError", "OutOfBoundsError", "OutOfMemoryError",
    "OverBudgetError", "OvertakenError", "PoisonedError", "RankFailedError", "RefusedError",
    "ReplicasDivergedError", "RestoreFailedError", "StoreIOError", "SupersededError", "TakenError", "UnknownKeyError", "UnknownPageError",
]


class Error(Exception):
    """The base class of all exceptions that the package raises itself.

    `remedy` states how to resolve the error. `path` is the store's directory, or None. `file`, `offset` and `lsn` are
    the location of damage, or None if it is unknown. Subclasses add other attributes.

    >>> try:
    ...     remanent.View(directory + "/nothing")
    ... except remanent.Error as error:
    ...     print(type(error).__name__, "-", error.remedy)
    NoStoreError - check the path; to make a new store there, open it with permission to create one

    All functions of the package raise these exceptions also for arguments with a wrong value or type. These classes are
    then subclasses of `ValueError`, `TypeError` and so on. Python itself raises `TypeError` for missing, surplus or
    unknown arguments.
    """

    # The remedy if the call that raises the error gives none.
    _remedy = "correct the argument or state that the message names, then try again"

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
    """The store is open in another process, or by another handle in this process; `holder` identifies the process."""

    _remedy = "open a View to read it, or close it in the other process"

    holder: str


class SupersededError(Error):
    """Another process, `holder`, has opened the store for writing since. This handle no longer acknowledges batches."""

    holder: str


class ArchiveError(Error):
    """The archive rejected the store, or failed. Nothing was changed, unless `kind` is "superseded".

    `url` is the URL of the archive, and `kind` is one of:

    - "no archive": the store was opened without an archive.
    - "settings": the URL or a setting cannot be used.
    - "superseded": another directory continues the archive. This store acknowledges no more batches.
    - "diverged", "lost", "other store": the archive does not end in the history of this directory.
    - "bucket", "unsupported": the bucket cannot be reached, or lacks an ability.
    - "damaged": an object of the archive is damaged; `remanent archive verify URL` lists all damage.
    - "limit": an object would exceed a limit of archives.
    - "directory": the directory of the store could not be read.
    - "unnamed": a snapshot without a name cannot be archived.
    - "not given": the archive follows the directory, but the open or save does not name it.
    - "restore": the archive could not be restored; the message is that of `remanent restore`.
    """

    url: str
    kind: str


class NoStoreError(Error, FileNotFoundError):
    """The directory contains no store."""

    _remedy = "check the path; to create a store there, call Store(path, create=True)"


class ForeignDirectoryError(Error, FileExistsError):
    """The directory contains something other than a store. Nothing was changed."""

    _remedy = "use an empty directory, or a path that does not exist"


class MismatchError(Error, RuntimeError):
    """The identity or layout fingerprint differs from the one with which the store was created."""

    _remedy = "pass the identity and layout fingerprint with which the store was created, or use another directory"


class DamagedError(Error):
    """Bytes on disk differ from the written bytes. `remanent verify` lists all damage. Nothing was changed."""

    _remedy = "run `remanent verify` to list all damage and its consequences"


class PoisonedError(Error):
    """An earlier failure, the `__cause__` of this exception, stopped the store. Open the store again."""

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

    _remedy = "pass a value that the message permits"


class InvalidTypeError(Error, TypeError):
    """An argument, or a value in it, has a type that the call does not accept. Nothing changed."""

    _remedy = "pass a value of the type that the message names"


class UnknownPageError(Error, LookupError):
    """No page has this id."""

    _remedy = "list the existing pages with pages(); the id of a deleted page is never reused"

    page: int


class UnknownKeyError(Error, KeyError):
    """No page has this key."""

    _remedy = "create the page first, or list the existing keys with keys()"

    key: str | bytes


class OutOfBoundsError(Error, IndexError):
    """The range is not within the page, which is `page_length` bytes long."""

    _remedy = "pass a range within the page, or an existing index"

    page: int
    page_length: int


class TakenError(Error):
    """Another page already has the key, or another snapshot already has the name. Nothing changed."""

    _remedy = "use another key or name, or delete the page or snapshot that has it"


class ConflictError(Error):
    """Another batch changed the page first: the page has epoch `found`, not `expected`. Nothing changed."""

    _remedy = "read the page again, then commit a new batch with its current epoch"

    page: int
    expected: int
    found: int


class OverBudgetError(Error):
    """`asked` bytes exceed the budget of a place, of which `available` bytes are free. Nothing changed."""

    _remedy = "delete or move pages of this place, or open the store with a larger memory.budget"

    place: str
    asked: int
    available: int


class OutOfMemoryError(Error, MemoryError):
    """The memory of the device or the host is exhausted. Nothing changed."""

    _remedy = "free memory, then try again"


class DeviceError(Error):
    """A device does not exist, has failed, or does not support the operation."""

    _remedy = 'open the store with another device or place, such as "host"'


class MemoryRefusedError(Error, BufferError):
    """Caller-owned memory does not meet the requirements of the call. Nothing changed."""

    _remedy = "pass contiguous memory with the length and on the device that the call requires"


class LeasedError(Error):
    """The page is leased or pinned. End the lease or pin first."""

    _remedy = "end the lease or pin first"

    page: int


class InUseError(Error, RuntimeError):
    """The object is in use by leases, views or another thread, or a save is in progress. Nothing changed."""

    _remedy = "end the leases, views or calls that use it, then try again"


class NoStateError(Error, LookupError):
    """The snapshot does not exist, or the requested state is not kept or not committed yet."""

    _remedy = "list the kept states with snapshots() or versions()"


class OvertakenError(Error):
    """The data to read is no longer kept, or has changed. Read again from the newest snapshot."""

    _remedy = "read or follow again from the newest snapshot"


class DivergedError(Error):
    """A follower's position or next batch is not in the store's history. Follow again from the newest snapshot."""

    _remedy = "read or follow again from the newest snapshot"


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

    _remedy = "correct the error of the rank that failed first, then restart the run"

    rank: int | None


class ReplicasDivergedError(Error):
    """Parameters or optimizer states that must be equal on all ranks differ. Nothing was saved.

    `tensors` lists the tensors as `remanent.torch.Divergence`.
    """

    _remedy = "restore a version in which the ranks were equal, or make all ranks continue with the state of one rank"

    tensors: list[Any]


class RefusedError(Error, TypeError, ValueError):
    """A value cannot be stored faithfully, so nothing is stored. The message names the value."""

    _remedy = "convert the value to one that can be stored, or remove it from the state"

class RestoreFailedError(Error):
    """A part of a run, `part`, raised an exception while it loaded its state: the `__cause__` of this exception.

    `changed` names the parts that were changed to values of the version, completely or partly. All other parts are
    unchanged.
    """

    part: str
    changed: tuple[str, ...]

    _remedy = "correct the error of the part that the message names, then restore again"


# Tracebacks, pickles and `help` name the public module.
for _name in __all__:
    globals()[_name].__module__ = "remanent"
