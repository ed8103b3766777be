"""Room in memory: where the bytes of a save wait to be written, while the state changes already.

One thread sends blocks, another one writes them. The sender copies each block into a ring of host memory, first in,
first out, and waits while it is full. The writer frees memory once the batch is committed that reads it. A block that
is longer than the ring is not copied: its sender waits until it is committed.

A GPU may have room of its own. What fits is copied aside there first, and leaves that copy for the ring.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch

from remanent._copy_streams import CopyStreams, Moment
from remanent._pages import Block

# Blocks that wait for the writer, of those that are not copied.
_COMING_MAX = 8
# Bytes of blocks that the writer is told of together: for each it would take the interpreter from the sender.
_PARCEL_BYTES = 8 << 20


class WriterEndedError(Exception):
    """The writer has ended before all was written; its own exception says why."""


class Room:
    """A ring of up to `nbytes` of host memory, and up to `device_nbytes` of each GPU's, for one save at a time."""

    def __init__(self, nbytes: int, device_nbytes: int = 0) -> None:
        self.nbytes = nbytes
        self.device_nbytes = device_nbytes
        self.streams = CopyStreams()
        # Memory of each GPU for what is copied aside, and how much of it has a copy.
        self._aside: dict[torch.device, torch.Tensor] = {}
        self._aside_used: dict[torch.device, int] = {}
        self._memory = torch.empty(0, dtype=torch.uint8)
        # The length that the memory has once a block is copied there.
        self._size = 0
        self._changed = threading.Condition()
        self._reset()

    def _reset(self) -> None:
        # Blocks on their way, and when their bytes are there; None at their end; an exception where there will be
        # no end.
        self._coming: deque[tuple[Block, Moment | None] | BaseException | None] = deque()
        # Blocks with a place in the ring that the writer does not know of yet, and their bytes.
        self._parcel: list[Block] = []
        self._parcel_bytes = 0
        # Where the blocks lie that are not committed yet, the oldest first; None for one that lies elsewhere.
        self._held: deque[tuple[int, int] | None] = deque()
        # How many of them the writer has, and has not taken for a batch.
        self._given = 0
        self._waits = self._ended = False

    # The sender's side.

    def begin(self, nbytes: int, devices: Iterable[torch.device] = ()) -> None:
        """Makes room for a save of these bytes, if that is not more than there may be, from these devices."""
        self._size = max(self._memory.numel(), min(nbytes, self.nbytes))
        self._reset()
        self._aside_used.clear()
        self.streams.begin(devices)

    def set_aside(self, blocks: Iterable[Block], aside: list[Block]) -> Iterator[Block]:
        """Copies blocks of a GPU aside as far as there is room, to the end of `aside`; yields the others."""
        for block in blocks:
            device, used = block.data.device if block.nbytes else None, 0
            if device is not None and device.type == "cuda":
                used = self._aside_used.get(device, 0)
            if device is None or device.type != "cuda" or used + block.nbytes > self.device_nbytes:
                yield block
                continue
            with self.streams.entered():
                if device not in self._aside:
                    self._aside[device] = torch.empty(self.device_nbytes, dtype=torch.uint8, device=device)
                memory = self._aside[device][used:used + block.nbytes]
                self.streams.copy(memory, block.data)
            # Elements of any width are copied fast from such a boundary.
            self._aside_used[device] = used + (block.nbytes + 255) // 256 * 256
            aside.append(Block(block.arrays, memory, block.nbytes))

    def send(self, blocks: Iterable[Block], *, copied: bool = True) -> None:
        """Returns once all blocks are copied or committed, or will be copied by what is queued on `streams`.

        :param copied: whether blocks that lie on the host are copied; else they must stay as they are until they are
            committed.
        :raises WriterEndedError: if nobody writes any more.
        """
        with self.streams.entered():
            self._send(blocks, copied)

    def _send(self, blocks: Iterable[Block], copied: bool) -> None:
        for block in blocks:
            if not block.nbytes or (not copied and block.data.device.type == "cpu"):
                self._post()
                # It may be a copy already, of a tensor that is not contiguous: few at a time.
                self._wait_until(lambda: len(self._coming) < _COMING_MAX, for_memory=False)
                self._push(block)
            elif block.nbytes > self._size:
                self._post()
                data = block.data.cpu()
                self._push(Block(block.arrays, data, block.nbytes))
                self._wait_until(lambda: not self._held)
            else:
                if self._memory.numel() < self._size:
                    # No block lies in the old memory: each save begins with an empty room.
                    self._memory = torch.empty(self._size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
                start = self._take_place(block.nbytes)
                memory = self._memory[start:start + block.nbytes]
                self.streams.copy(memory, block.data)
                self._parcel.append(Block(block.arrays, memory, block.nbytes))
                self._parcel_bytes += block.nbytes
                if self._parcel_bytes >= _PARCEL_BYTES:
                    self._post()
        self._post()

    def end(self) -> None:
        """All blocks were sent."""
        with self._changed:
            self._coming.append(None)
            self._changed.notify_all()

    def give_up(self, error: BaseException | None = None) -> None:
        """Has the writer end without the rest, with `error`."""
        with self._changed:
            self._coming.append(error or InterruptedError("the save was ended before all of its state was copied"))
            self._changed.notify_all()

    def _push(self, block: Block) -> None:
        """Hands a block to the writer that lies elsewhere."""
        with self._changed:
            self._coming.append((block, None))
            self._held.append(None)
            self._changed.notify_all()

    def _post(self) -> None:
        """Hands the blocks of the parcel to the writer."""
        if self._parcel:
            ready = self.streams.moment()
            with self._changed:
                self._coming.extend((block, ready) for block in self._parcel)
                self._changed.notify_all()
            self._parcel, self._parcel_bytes = [], 0

    def _wait_until(self, is_there: Callable[[], bool], *, for_memory: bool = True) -> None:
        with self._changed:
            while not is_there():
                if self._ended:
                    raise WriterEndedError
                self._waits = for_memory
                self._changed.notify_all()
                # In slices, so that Ctrl-C ends the wait.
                self._changed.wait(0.1)
            self._waits = False

    def _take_place(self, nbytes: int) -> int:
        while True:
            with self._changed:
                start = self._place(nbytes)
                if start is not None:
                    self._held.append((start, start + nbytes))
                    return start
            self._post()
            self._wait_until(lambda: self._place(nbytes) is not None)

    def _place(self, nbytes: int) -> int | None:
        """Where a block has room behind the newest one; None if nowhere."""
        oldest_place = next((place for place in self._held if place is not None), None)
        newest_place = next((place for place in reversed(self._held) if place is not None), None)
        if oldest_place is None or newest_place is None:
            return 0
        oldest, newest = oldest_place[0], newest_place[1]
        if newest > oldest:
            if newest + nbytes <= self._size:
                return newest
            return 0 if nbytes < oldest else None
        return newest if newest + nbytes < oldest else None

    # The writer's side.

    def blocks(self) -> Iterator[Block | None]:
        """The blocks as they come. None asks the writer to commit those that it has: the sender waits for them."""
        coming: tuple[Block | None, Moment | None] | BaseException | None
        while True:
            with self._changed:
                while not self._coming and not (self._waits and self._given):
                    self._changed.wait()
                if not self._coming:
                    coming = None, None
                else:
                    coming = self._coming.popleft()
                    self._changed.notify_all()
            if coming is None:
                return
            if isinstance(coming, BaseException):
                raise coming
            block, ready = coming
            if ready is not None:
                ready.wait()
            yield block
            # Here the writer has put it into its batch. Counted before, it would be of a batch that the writer ends
            # with the block in hand, and its memory would be free too early.
            if block is not None:
                with self._changed:
                    self._given += 1

    def take(self) -> int:
        """How many blocks came since the last call: those of the writer's batch."""
        with self._changed:
            taken, self._given = self._given, 0
            return taken

    def free(self, count: int) -> None:
        """Of the blocks that were taken, the oldest are committed: their memory is free."""
        with self._changed:
            for _ in range(count):
                self._held.popleft()
            self._changed.notify_all()

    @property
    def waits(self) -> bool:
        """Whether the sender waits for memory."""
        return self._waits

    def ended(self) -> None:
        """Nobody writes any more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
