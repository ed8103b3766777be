"""Binary search for the first bad state of a store."""

from __future__ import annotations

import os
from collections.abc import Callable

from remanent._store import _native
from remanent._store.errors import InvalidTypeError, NoStateError

_At = int | str | _native.SnapshotInfo


def bisect(path: str | os.PathLike[str], is_good: Callable[[_native.View], bool | None], *, good: _At,
           bad: _At | None = None) -> int:
    """Returns the Lsn of the first state for which `is_good` returns False, found by binary search between a good state
    and a later bad state.

    The search takes no lock and writes nothing. About log2(n) of n states are tested, each as a `View` that is closed
    after the test.

    :param is_good: receives a `View` and returns True for a good state, False for a bad one, and None if the result
        cannot be determined. An exception ends the search.
    :param good: a state known to be good: an Lsn, "lsn:N", "snapshot:N", the name of a snapshot or a SnapshotInfo.
    :param bad: a later state known to be bad; None uses the newest.
    :raises InvalidError: the good state is not older than the bad one.
    :raises NoStateError: a state between `good` and `bad` is not retained, or `is_good` returned None for states next
        to the first bad one.
    :raises NoStoreError: the directory contains no store.
    :raises DamagedError: a file of the store is damaged.

    >>> with remanent.Store(directory, retention={"log_kept": 1 << 30}) as store:
    ...     for step in range(100):
    ...         with store.batch(note=f"step {step}") as batch:
    ...             batch.set_root("loss", 0.5 if step < 70 else float("nan"))
    >>> remanent.bisect(directory, lambda view: view.root["loss"] == 0.5, good=1)
    71
    """
    if not callable(is_good):
        raise InvalidTypeError(f"is_good must be a function of a View, not {type(is_good).__name__}",
                               remedy="pass a function that returns True, False or None")
    with _native.View(path, good) as oldest, _native.View(path, bad) as newest:
        search = _native.Bisect(oldest.lsn, newest.lsn)
    while (lsn := search.next()) is not None:
        with _native.View(path, lsn) as view:
            verdict = is_good(view)
        search.tell(lsn, None if verdict is None else bool(verdict))
    newest_good, first_bad = search.bounds()
    if first_bad - newest_good > 1:
        raise NoStateError(f"the first bad version is between lsn {newest_good + 1} and {first_bad}; is_good returned "
                           "None for the versions in between", remedy="return True or False for more versions",
                           path=os.fspath(path))
    return first_bad
