"""Waiting as a task. The store's threads ring a bell that the event loop watches; none takes the interpreter's lock."""

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

from remanent import _native

if TYPE_CHECKING:
    from remanent._native import (
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

# How long a thread waits for a batch before it looks whether it is still wanted.
_SLICE = 0.25


class _Ringer:
    """The bell of one event loop, and the tasks that wait for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.bell = _native.Bell()
        self.numbers = itertools.count()
        self.waiting: dict[int, asyncio.Future[None]] = {}
        loop.add_reader(self.bell.fileno(), self.ring)

    def ring(self) -> None:
        for number in self.bell.take():
            future = self.waiting.get(number)
            if future is not None and not future.done():
                future.set_result(None)


_ringers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Ringer] = weakref.WeakKeyDictionary()


async def _rung(poll: Callable[[_native.Bell, int], tuple[bool, Waiting | None]]) -> None:
    """Waits until `poll` says so. It is asked again each time that the bell has rung with the number it was given."""
    loop = asyncio.get_running_loop()
    ringer = _ringers.get(loop)
    if ringer is None:
        ringer = _ringers[loop] = _Ringer(loop)
    number = next(ringer.numbers)
    try:
        while True:
            future: asyncio.Future[None] = loop.create_future()
            ringer.waiting[number] = future
            done, waiting = poll(ringer.bell, number)
            if done:
                return
            await future
            # Held until here: dropped, it would wait no more.
            del waiting
    finally:
        ringer.waiting.pop(number, None)


async def acknowledged(ticket: Ticket, ack: str) -> None:
    """Waits until the ticket's batch is acknowledged. Called off, it waits no more; the batch stays submitted."""

    def poll(bell: _native.Bell, number: int) -> tuple[bool, Waiting | None]:
        waiting = ticket._poll(bell, number, ack)
        return waiting is None, waiting

    await _rung(poll)


async def read(reading: ReadMany) -> ManyBytes:
    """Waits for the bytes. Called off, it waits no more; the read goes on."""
    await _rung(lambda bell, number: (reading._poll(bell, number), None))
    return reading.result()


# A thread for each follower and stream that tasks wait for; more of them take turns.
def _threads() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(32, "remanent-follower")


_readers = _threads()
_beginning = threading.Lock()
_reading: weakref.WeakKeyDictionary[Follower | ChangeStream, concurrent.futures.Future[bool | None]] = (
    weakref.WeakKeyDictionary()
)


async def _done(reading: concurrent.futures.Future[bool | None]) -> None:
    """Waits until the reading is over. A task that is called off leaves it to the others; `wrap_future` would not."""
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
    """Waits until the source keeps what comes next; False says that nothing will."""
    while True:
        # One thread at a time reads from a source, for the tasks of all loops: that of a task which was called off is
        # waited for.
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
    """The next batch. A batch that is read for a task which was called off stays within the follower, for the next."""
    while True:
        await _fetched(follower)
        batch = follower._take()
        # Another task may have been quicker.
        if batch is not None:
            return batch


async def next_event(stream: ChangeStream) -> AppliedBatch | Lagged:
    """The next event. One that is taken for a task which was called off stays within the stream, for the next."""
    while await _fetched(stream):
        event = stream._take()
        if event is not None:
            return event
    raise StopAsyncIteration


def _begin_anew() -> None:
    """Lets a forked child begin with threads and bells of its own: the parent's threads are not there."""
    global _readers, _beginning
    _readers, _beginning = _threads(), threading.Lock()
    _reading.clear()
    _ringers.clear()


os.register_at_fork(after_in_child=_begin_anew)
