"""Asynchronous waits. The event loop watches an eventfd, which store threads signal without the interpreter lock."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from remanent._store import _native

if TYPE_CHECKING:
    from remanent._store._native import (
        AppliedBatch,
        ChangeStream,
        FollowedBatch,
        Follower,
        Lagged,
        ManyBytes,
        ReadMany,
        Ticket,
        Waiting,
    )

# How long a thread waits for a batch before it checks whether the batch is still wanted.
_SLICE = 0.25


class _LoopWaker:
    """The eventfd of one event loop, and the tasks that wait for its signals."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.event_fd = _native.EventFd()
        self.numbers = itertools.count()
        self.waiting: dict[int, asyncio.Future[None]] = {}
        loop.add_reader(self.event_fd.fileno(), self.wake_ready)

    def wake_ready(self) -> None:
        for number in self.event_fd.take():
            future = self.waiting.get(number)
            if future is not None and not future.done():
                future.set_result(None)


_wakers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopWaker] = weakref.WeakKeyDictionary()


async def _poll_until_ready(poll: Callable[[_native.EventFd, int], tuple[bool, Waiting | None]]) -> None:
    """Calls `poll` until it returns True as its first value. Between calls, waits until the eventfd reports the number
    that was passed to `poll`."""
    loop = asyncio.get_running_loop()
    waker = _wakers.get(loop)
    if waker is None:
        waker = _wakers[loop] = _LoopWaker(loop)
    number = next(waker.numbers)
    try:
        while True:
            future: asyncio.Future[None] = loop.create_future()
            waker.waiting[number] = future
            done, waiting = poll(waker.event_fd, number)
            if done:
                return
            await future
            # `waiting` is kept until here: dropping it would end the wait.
            del waiting
    finally:
        waker.waiting.pop(number, None)


async def acknowledged(ticket: Ticket, ack: str) -> None:
    """Waits until the ticket's batch is acknowledged. Cancellation ends the wait, and the batch stays submitted."""

    def poll(event_fd: _native.EventFd, number: int) -> tuple[bool, Waiting | None]:
        waiting = ticket._poll(event_fd, number, ack)
        return waiting is None, waiting

    await _poll_until_ready(poll)


async def read(reading: ReadMany) -> ManyBytes:
    """Waits for the bytes of a read and returns them. Cancellation ends the wait, and the read continues."""
    await _poll_until_ready(lambda event_fd, number: (reading._poll(event_fd, number), None))
    return reading.result()


# Each follower or stream that tasks wait for uses one thread. If there are more of them than threads, the others wait
# until a thread is free.
def _threads() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(32, "remanent-follower")


_readers = _threads()
_beginning = threading.Lock()
_reading: weakref.WeakKeyDictionary[Follower | ChangeStream, concurrent.futures.Future[bool | None]] = (
    weakref.WeakKeyDictionary()
)


async def _done(reading: concurrent.futures.Future[bool | None]) -> None:
    """Waits until the read has ended. Cancellation does not cancel the read, as `wrap_future` would, because other
    tasks may wait for it."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not over.done():
            over.set_result(None)

    def tell(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(wake)

    reading.add_done_callback(tell)
    await over


async def _fetched(source: Follower | ChangeStream) -> bool:
    """Waits until the source has an item that can be taken. Returns False if the source has ended."""
    while True:
        # Only one thread at a time reads from a source, for the tasks of all loops. A read started for a cancelled task
        # is awaited.
        with _beginning:
            reading = _reading.get(source)
            if reading is None or reading.done():
                reading = _reading[source] = _readers.submit(source._fetch, _SLICE)
        await _done(reading)
        fetched = reading.result()
        if fetched is None:
            return False
        if fetched:
            return True


async def next_batch(follower: Follower) -> FollowedBatch:
    """Returns the follower's next batch. If the task is canceled, the batch stays in the follower for the next call."""
    while True:
        await _fetched(follower)
        batch = follower._take()
        # Another task may have taken the batch first.
        if batch is not None:
            return batch


async def next_event(stream: ChangeStream) -> AppliedBatch | Lagged:
    """Returns the stream's next event. If the task is canceled, the event stays in the stream for the next call."""
    while await _fetched(stream):
        event = stream._take()
        if event is not None:
            return event
    raise StopAsyncIteration


def _begin_anew() -> None:
    """Resets the module in a forked child, where the parent's threads do not exist."""
    global _readers, _beginning
    _readers, _beginning = _threads(), threading.Lock()
    _reading.clear()
    _wakers.clear()


os.register_at_fork(after_in_child=_begin_anew)
