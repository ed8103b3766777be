"""Removes versions in the background, since deleting gigabytes of files takes a while."""

from __future__ import annotations

import concurrent.futures
import logging
import os

from remanent._store import _native
from remanent._store.errors import Error
from remanent._util.threads import started


class Removal:
    """Removes versions of a store, and the data that only they use, on a separate thread.

    :param always: whether to run after each save even if no version is to be removed. Captured changes stay in memory
        until their version has been read back, which the removal does first.
    """

    def __init__(self, store: _native.Store, *, always: bool) -> None:
        self._store, self._always = store, always
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "remanent-checkpoint-remove")
        self._last: concurrent.futures.Future[None] | None = None

    def begin(self, gone: list[str]) -> None:
        """Starts to remove versions, given by the names of their snapshots. No other removal may be in progress."""
        if gone or self._always:
            self._last = started(self._thread, self._remove, gone)

    def _remove(self, gone: list[str]) -> None:
        try:
            self._store.prune(give_up=gone, names_only=True)
        except Error as error:
            # The next save tries again.
            logging.getLogger("remanent").warning("versions that are no longer kept cannot be removed: %s", error)

    def wait(self) -> None:
        """Waits until the removal in progress has ended."""
        if self._last is not None:
            self._last.result()

    def make_room(self, nbytes: int) -> None:
        """Waits for the removal in progress if a save of `nbytes` bytes needs the memory or disk space that it
        frees."""
        if self._last is None or self._last.done():
            return
        found = os.statvfs(self._store.directory)
        if self._always or found.f_bavail * found.f_frsize < 2 * nbytes:
            self.wait()

    def end(self) -> None:
        self._thread.shutdown()
