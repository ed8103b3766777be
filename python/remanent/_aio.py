"""Waiting as a task. The store's threads ring a bell that the event loop watches; none takes the interpreter's lock."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import os
import weakref
from typing import TYPE_CHECKING

from remanent import _native

if TYPE_CHECKING:
    from remanent._native import FollowedBatch, Follower, Ticket

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


async def acknowledged(ticket: Ticket, ack: str) -> None:
    """Waits until the ticket's batch is acknowledged. Called off, it waits no more; the batch stays submitted."""
    loop = asyncio.get_running_loop()
    ringer = _ringers.get(loop)
    if ringer is None:
        ringer = _ringers[loop] = _Ringer(loop)
    number = next(ringer.numbers)
    try:
        while True:
            future: asyncio.Future[None] = loop.create_future()
            ringer.waiting[number] = future
            waiting = ticket._poll(ringer.bell, number, ack)
            if waiting is None:
                return
            await future
            # Held until here: dropped, it would wait no more.
            del waiting
    finally:
        ringer.waiting.pop(number, None)


# A thread for each follower that tasks wait for; more of them take turns.
def _threads() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(32, "remanent-follower")


_readers = _threads()
_reading: weakref.WeakKeyDictionary[Follower, concurrent.futures.Future[bool]] = weakref.WeakKeyDictionary()


async def next_batch(follower: Follower) -> FollowedBatch:
    """The next batch. A batch that is read for a task which was called off stays within the follower, for the next."""
    while True:
        # One thread at a time reads from a follower: that of a task which was called off is waited for.
        reading = _reading.get(follower)
        if reading is None or reading.done():
            reading = _reading[follower] = _readers.submit(follower._fetch, _SLICE)
        if await asyncio.wrap_future(reading):
            batch = follower.next(0)
            if batch is not None:
                return batch


def _begin_anew() -> None:
    """Lets a forked child begin with threads and bells of its own: the parent's threads are not there."""
    global _readers
    _readers = _threads()
    _reading.clear()
    _ringers.clear()


os.register_at_fork(after_in_child=_begin_anew)
