"""The state of a save in progress: its captured tensors, its pending copies and its result."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from remanent._store import _native
from remanent._store._native import Block, Extent
from remanent._store.errors import InUseError
from remanent._tensors.copy_streams import Moment
from remanent._tensors.working_copies import Copies


class Reading:
    """The pending copies of a save, during which the state must not change."""

    def __init__(self) -> None:
        self._queued = threading.Event()
        self._end = Moment({})

    def ends(self, end: Moment) -> None:
        """Records that all copies are queued and will be complete at `end`. Later calls have no effect."""
        if not self._queued.is_set():
            self._end = end
            self._queued.set()

    def hold_back(self) -> None:
        """Waits until the copies are queued, and orders the caller's current streams after the copies."""
        self._queued.wait()
        self._end.hold_back()

    def wait(self) -> None:
        """Waits until all copies are complete."""
        self._queued.wait()
        self._end.wait()


class Capture:
    """The tensors of a save that are captured in place and written in its first batches."""

    def __init__(self, copies: Copies | None, tensors: list[Extent]) -> None:
        self._copies = copies
        self._tensors = tensors
        # Set once the state may change because all of it is logged.
        self.ended = threading.Event()
        if copies is None or not tensors:
            self.ended.set()
        else:
            copies.arrive()

    def blocks(self) -> Iterator[Block | None]:
        """Yields the blocks for `page_tree.put`, which commits a batch at each None."""
        if self._copies is not None and not self.ended.is_set():
            yield from self._copies.blocks(self._tensors)
            # The first batch creates new pages, and the second batch captures the tensors of these pages.
            yield None
            yield None
            self.ended.set()

    def begin(self, batch: _native.Batch) -> _native.Batch:
        """Captures the tensors for which the previous batch created pages, and returns `batch`."""
        assert self._copies is not None
        self._copies.capture_begun(batch)
        return batch


class Kept(NamedTuple):
    """A version that is durable and kept."""

    lsn: int
    # The time of the monotonic clock, in seconds.
    at: float
    # The number of its snapshot in the store of this rank.
    snapshot: int


class Saved:
    """Handle to a save, returned by `Checkpointer.save`. The version becomes durable in the background.

    A coalesced save (`busy="coalesce"`) captures nothing, and completes when the next save does.
    """

    def __init__(self, step: int, reading: Reading, began: float,
                 archived: Callable[[Saved, float | None], bool]) -> None:
        self.step = step
        #: The step of the saved version. For a coalesced save, this is the step of the next save, or None until that
        #: save begins.
        self.version_step: int | None = None
        self._reading = reading
        self._began = began
        self._archived = archived
        # None until the save has begun.
        self._done: concurrent.futures.Future[Kept] | None = None
        # Set once its outcome was reported to a caller.
        self._told = threading.Event()

    def _begins(self, done: concurrent.futures.Future[Kept]) -> None:
        """Records that the save was not coalesced and writes a version."""
        self.version_step, self._done = self.step, done

    def _goes_with(self, other: Saved) -> None:
        """Joins `other`, the next save. A caller that receives the outcome of one of the two saves has received
        both."""
        self.version_step, self._told, self._done = other.version_step, other._told, other._done

    def _fails(self, error: BaseException) -> None:
        """Records that a coalesced save failed, because the next save could not begin or was never made."""
        done: concurrent.futures.Future[Kept] = concurrent.futures.Future()
        done.set_exception(error)
        self._done = done

    @property
    def _has_ended(self) -> bool:
        return self._done is not None and self._done.done()

    @property
    def _has_failed(self) -> bool:
        return self._done is not None and self._done.done() and self._done.exception() is not None

    @property
    def seconds(self) -> float | None:
        """The seconds from the call of `save` until the version was durable. None if the save has failed or is in
        progress.

        Saves at shorter intervals than this wait for each other.
        """
        return self._done.result().at - self._began if self._done is not None and self.done() else None

    @property
    def lsn(self) -> int:
        """The Lsn of the version's batch. Waits until the version is durable."""
        self.wait()
        assert self._done is not None
        return self._done.result().lsn

    def done(self) -> bool:
        """Returns whether the version is durable and kept."""
        return self._done is not None and self._done.done() and self._done.exception() is None

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the version is durable and kept. Returns False if that takes more than `timeout` seconds.

        :raises InUseError: the call has no `timeout`, and the next save, to which this save was left, has not begun.
        :raises Error: the save failed. The error is that of the save.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            # The wait is in slices, so that Ctrl-C ends the wait and a coalesced save notices that the next save has
            # begun.
            left = 0.1 if until is None else max(0.0, min(0.1, until - time.monotonic()))
            if self._done is not None:
                if concurrent.futures.wait([self._done], left).done:
                    # Raises the error of the save.
                    self._told.set()
                    self._done.result()
                    return True
            elif until is None:
                raise InUseError(f"the save of step {self.step} was left to the next save, which has not begun",
                                 remedy="save again with wait=True")
            else:
                time.sleep(left)
            if until is not None and time.monotonic() >= until:
                return False

    def wait_archived(self, timeout: float | None = None) -> bool:
        """Waits until the archive of the run keeps the version, so that the version survives the loss of this machine.
        Returns False if that takes more than `timeout` seconds. Versions are archived in the order of their saves.

        With several ranks, all ranks make this call, with the same `timeout`. It returns True once the archives of all
        ranks keep the version, and False if one of them does not in time. The time begins when the save has ended.

        :raises ArchiveError: the run has no archive, the archive has ended, or the version cannot be archived.
        :raises NoStateError: the version was removed before it was archived, because newer ones replaced it.
        :raises InUseError: as for `wait`.
        :raises Error: the save failed. The error is that of the save.
        """
        return self._archived(self, timeout)

    @property
    def _snapshot(self) -> int:
        """The number of the version's snapshot. Waits until the version is durable."""
        self.wait()
        assert self._done is not None
        return self._done.result().snapshot

    def wait_copied(self) -> None:
        """Waits until the state is copied. From then on, all of it may be changed in any way."""
        self._reading.wait()

    def __repr__(self) -> str:
        return f"Saved(step={self.step}, done={self._has_ended})"


class LeftSaves:
    """The coalesced saves, which complete with the next save."""

    def __init__(self) -> None:
        self._saves: list[Saved] = []

    @property
    def newest_step(self) -> int | None:
        """The step of the last coalesced save, or None."""
        return self._saves[-1].step if self._saves else None

    def add(self, step: int, reading: Reading, began: float,
            archived: Callable[[Saved, float | None], bool]) -> Saved:
        """Adds a coalesced save and returns its handle. `reading` belongs to the save in progress."""
        saved = Saved(step, reading, began, archived)
        self._saves.append(saved)
        return saved

    def go_with(self, saved: Saved) -> None:
        """Completes the coalesced saves with the result of `saved`, the save that includes them."""
        for left in self._saves:
            left._goes_with(saved)
        self._saves = []

    def fail(self, error: BaseException) -> None:
        """Fails the coalesced saves, because the next save could not begin."""
        for left in self._saves:
            left._fails(error)
        self._saves = []

    def end(self, why: str) -> InUseError | None:
        """Fails the coalesced saves, because no save follows. Returns the error of the last of them, or None."""
        error = None
        for left in self._saves:
            error = InUseError(f"the save of step {left.step} was left to the next save, but {why}",
                               remedy="use wait=True for the last save of a run")
            left._fails(error)
        self._saves = []
        return error
