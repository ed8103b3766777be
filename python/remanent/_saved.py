"""A save that is under way: what it captures, what still reads the state, and when it is durable."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Iterator

from remanent import _native
from remanent._copies import Copies
from remanent._copy_streams import Moment
from remanent._errors import InUseError
from remanent._native import Extent
from remanent._pages import Block


class Reading:
    """The copies of a save that read the state itself."""

    def __init__(self) -> None:
        self._queued = threading.Event()
        self._end = Moment({})

    def ends(self, end: Moment) -> None:
        """All of them are queued, and run until then. Later calls change nothing."""
        if not self._queued.is_set():
            self._end = end
            self._queued.set()

    def hold_back(self) -> None:
        """Has what the caller does from now on come after them, on the host and on its current streams."""
        self._queued.wait()
        self._end.hold_back()

    def wait(self) -> None:
        """Waits for them."""
        self._queued.wait()
        self._end.wait()


class Capture:
    """What a save captures where it lies, in its first batches."""

    def __init__(self, copies: Copies | None, tensors: list[Extent]) -> None:
        self._copies = copies
        self._tensors = tensors
        # Set once the state may change: all of it is logged.
        self.ended = threading.Event()
        if copies is None or not tensors:
            self.ended.set()
        else:
            copies.arrive()

    def blocks(self) -> Iterator[Block | None]:
        """The blocks, for `_pages.put`, which commits at each None."""
        if self._copies is not None and not self.ended.is_set():
            yield from self._copies.blocks(self._tensors)
            # New pages are made by the first batch, and captured by the second.
            yield None
            yield None
            self.ended.set()

    def begin(self, batch: _native.Batch) -> _native.Batch:
        """Captures what the batch before has made pages for."""
        assert self._copies is not None
        self._copies.capture_begun(batch)
        return batch


class Saved:
    """A save that may still be under way: its state is captured, and becomes durable in the background.

    One that was left to the next save (`busy="coalesce"`) has captured nothing, and ends as that one does.
    """

    def __init__(self, step: int, done: concurrent.futures.Future[tuple[int, float]], reading: Reading,
                 began: float, version_step: int | None) -> None:
        self.step = step
        #: The step of the version, which is a later one for a save that was left to the next; None until that began.
        self.version_step = version_step
        self._done = done
        self._reading = reading
        self._began = began
        # Whether its end was told to a caller.
        self._told = False

    @property
    def seconds(self) -> float | None:
        """Seconds from the call to the durable version; None if there is none, or not yet.

        Saves at shorter intervals wait for each other.
        """
        return self._done.result()[1] - self._began if self.done() else None

    @property
    def lsn(self) -> int:
        """The version's batch; waits until it is durable."""
        self.wait()
        return self._done.result()[0]

    def done(self) -> bool:
        """Whether the version is durable and kept."""
        return self._done.done() and self._done.exception() is None

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the version is durable and kept, up to `timeout` seconds; says whether it is.

        :raises InUseError: without `timeout`, if the save was left to the next one, and that has not begun.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            # In slices, so that Ctrl-C ends the wait.
            if until is None and self.version_step is None and not self._done.done():
                raise InUseError(f"the save of step {self.step} was left to the next one, which has not begun",
                                 remedy="save once more, and wait")
            left = 0.1 if until is None else max(0.0, min(0.1, until - time.monotonic()))
            if concurrent.futures.wait([self._done], left).done:
                # Raises what the save failed with.
                self._told = True
                self._done.result()
                return True
            if until is not None and time.monotonic() >= until:
                return False

    def wait_copied(self) -> None:
        """Waits until nothing reads the state any more: all of it may change then, whatever changes it."""
        self._reading.wait()

    def __repr__(self) -> str:
        return f"Saved(step={self.step}, done={self._done.done()})"


class LeftSaves:
    """Saves that came while one was under way, and are left to the next one."""

    def __init__(self) -> None:
        self._saves: list[Saved] = []

    def add(self, step: int, began: float) -> Saved:
        """A save that is left."""
        reading = Reading()
        reading.ends(Moment({}))
        saved = Saved(step, concurrent.futures.Future(), reading, began, version_step=None)
        self._saves.append(saved)
        return saved

    def go_with(self, saved: Saved) -> None:
        """This one is the next: those that were left end as it does."""
        going, self._saves = self._saves, []
        for left in going:
            left.version_step = saved.version_step

        def end(done: concurrent.futures.Future[tuple[int, float]]) -> None:
            error = done.exception()
            for left in going:
                if error is not None:
                    left._done.set_exception(error)
                else:
                    left._done.set_result(done.result())

        saved._done.add_done_callback(end)

    def end(self, why: str) -> InUseError | None:
        """There is no next one: those that were left fail. Returns how, if there are any."""
        going, self._saves = self._saves, []
        error = None
        for left in going:
            error = InUseError(f"the save of step {left.step} was left to the next one, but {why}",
                               remedy="let the last save of a run wait")
            left._done.set_exception(error)
        return error
