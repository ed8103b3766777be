"""Buffers the bytes of a save in memory, so that the state can change while the bytes are being written.

One thread sends blocks, and another thread writes them. The sender copies each block into a ring of host memory, and
waits while the ring is full. The writer frees a block's memory once the batch with the block is committed. A block
longer than the ring is not copied; the sender waits until the block is committed.

A GPU may have a buffer of its own. Blocks that fit are first copied into this buffer, and from there into the ring.

The next save reuses the memory. A `Passage` tracks the blocks of a single save.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from remanent._store._native import Block, Extent
from remanent._tensors.copy_streams import CopyStreams, Moment

# The largest number of uncopied blocks that wait for the writer.
_COMING_MAX = 8
# The smallest number of bytes in a parcel, which is a group of blocks that is reported to the writer at once. Fewer
# reports take the interpreter lock from the sender less often.
_PARCEL_BYTES = 8 << 20
# The largest number of parcels in a ring. Only about fifty events with a sleeping waiter can be queued: the next one,
# and all work queued after it, waits until the GPU has reached an earlier one.
_PARCELS_MAX = 16
# The alignment in GPU memory at which elements of any width are copied fast.
_ALIGN = 256


class WriterEndedError(Exception):
    """Raised in the sender if the writer ended before all blocks were written. The writer's own exception states the
    reason."""


class Room:
    """The memory for one save at a time: up to `nbytes` on the host and `device_nbytes` on each GPU."""

    def __init__(self, nbytes: int, device_nbytes: int = 0) -> None:
        self.nbytes = nbytes
        self.device_nbytes = device_nbytes
        self.streams = CopyStreams()
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        # Memory on each GPU for copies within the GPU.
        self._aside: dict[torch.device, torch.Tensor] = {}

    def begin(self, tensors: Iterable[Extent]) -> Passage:
        """Starts a save of `tensors` and returns its `Passage`. No block of an earlier save may be in flight."""
        # Tensors that share memory are all counted.
        lengths: dict[torch.device, list[int]] = defaultdict(list)
        for each in tensors:
            lengths[each.device].append(each.nbytes)
        gpus = [device for device in lengths if device.type == "cuda"]
        self.streams.begin(gpus)
        size = max(self._memory.numel(), min(sum(map(sum, lengths.values())), self.nbytes))
        aside = {device: sum(lengths[device]) + len(lengths[device]) * _ALIGN for device in gpus}
        return Passage(self, size, {device: min(aside[device], self.device_nbytes) for device in gpus})

    def memory(self, size: int) -> torch.Tensor:
        """Returns the ring's memory, allocated again if it is shorter than `size` bytes. No save may use the memory at
        that time."""
        if self._memory.numel() < size:
            # An inference tensor could not be written to outside of inference mode.
            with torch.inference_mode(False):
                self._memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=torch.cuda.is_available())
        return self._memory

    def memory_aside(self, device: torch.device, size: int) -> torch.Tensor:
        """Returns at least `size` bytes of memory on a GPU for copies within the GPU."""
        if device not in self._aside or self._aside[device].numel() < size:
            with torch.inference_mode(False):
                self._aside[device] = torch.empty(size, dtype=torch.uint8, device=device)
        return self._aside[device]


class Passage:
    """Passes the blocks of one save from its sender to its writer through a ring of `size` bytes."""

    def __init__(self, room: Room, size: int, aside_sizes: dict[torch.device, int]) -> None:
        self._room = room
        self._size = size
        self._aside_sizes = aside_sizes
        # The bytes of each GPU's memory that hold a copy.
        self._aside_used: dict[torch.device, int] = defaultdict(int)
        self._changed = threading.Condition()
        # The parcels in flight, each with the `Moment` at which its bytes have arrived. A final None marks the end of
        # the save.
        self._coming: deque[tuple[list[Block], Moment | None] | None] = deque()
        # Blocks that have memory in the ring but were not reported to the writer yet, and their total length in bytes.
        self._parcel: list[Block] = []
        self._parcel_bytes = 0
        # The offset and length in the ring of each block that is not committed yet, oldest first; None for a block
        # outside the ring.
        self._held: deque[tuple[int, int] | None] = deque()
        # The number of blocks in `_held` that the writer has received but not assigned to a batch.
        self._given = 0
        self._waits = self._started = self._ended = False
        self._error: BaseException | None = None

    # The sender's side.

    def set_aside(self, blocks: Iterable[Block], aside: list[Block]) -> Iterator[Block]:
        """Copies blocks within their GPU while its buffer has room, appends the copies to `aside`, and yields all other
        blocks.

        Pass the generator to `send`, which runs it on the copy streams. The copies are made when the generator is
        exhausted.
        """
        together: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = defaultdict(lambda: ([], []))
        for block in blocks:
            device = block.data.device if block.nbytes else torch.device("cpu")
            used, size = self._aside_used[device], self._aside_sizes.get(device, 0)
            if device.type != "cuda" or used + block.nbytes > size:
                yield block
                continue
            memory = self._room.memory_aside(device, size)[used:used + block.nbytes]
            targets, sources = together[device]
            targets.append(memory)
            sources.append(block.data)
            self._aside_used[device] = used + (block.nbytes + _ALIGN - 1) // _ALIGN * _ALIGN
            aside.append(block.moved(memory))
        for targets, sources in together.values():
            self._room.streams.copy_within(targets, sources)

    def start_writer(self) -> None:
        """Allows the writer to begin. From then on, the writer and the sender compete for the interpreter lock."""
        if not self._started:
            with self._changed:
                self._started = True
                self._changed.notify_all()

    def send(self, blocks: Iterable[Block], *, copied: bool = True) -> None:
        """Sends blocks to the writer. Returns once each block is copied or committed, or its copy is queued on the
        copy streams.

        :param copied: whether to copy blocks in host memory. If False, these blocks must not change until they are
            committed.
        :raises WriterEndedError: the writer has ended.
        """
        with self._room.streams.entered():
            self._send(blocks, copied)

    def _send(self, blocks: Iterable[Block], copied: bool) -> None:
        for block in blocks:
            if not block.nbytes or (not copied and block.data.device.type == "cpu"):
                self._post()
                # The block may be a temporary copy of a non-contiguous tensor, so only a few such blocks may wait for
                # the writer.
                self._wait_until(lambda: len(self._coming) < _COMING_MAX, for_memory=False)
                self._push(block)
            elif block.nbytes > self._size:
                self._post()
                data = block.data.cpu()
                self._push(block.moved(data))
                self._wait_until(lambda: not self._held)
            else:
                start = self._take_place(block.nbytes)
                placed = block.moved(self._room.memory(self._size), start=start)
                self._room.streams.copy(placed.data, block.data)
                self._parcel.append(placed)
                self._parcel_bytes += block.nbytes
                if self._parcel_bytes >= max(_PARCEL_BYTES, self._size // _PARCELS_MAX):
                    self._post()
        self._post()

    def end(self) -> None:
        """Records that all blocks were sent, so that the writer ends after the last one."""
        with self._changed:
            self._coming.append(None)
            self._changed.notify_all()

    def give_up(self, error: BaseException | None = None) -> None:
        """Ends the sender and the writer as soon as possible. The writer raises `error`."""
        self.start_writer()
        with self._changed:
            self._error = error or InterruptedError("the save was canceled before all of its state was copied")
            self._changed.notify_all()

    def _check(self) -> None:
        if self._ended or self._error is not None:
            raise WriterEndedError

    def _push(self, block: Block) -> None:
        """Passes a block outside the ring to the writer."""
        with self._changed:
            self._check()
            self._coming.append(([block], None))
            self._held.append(None)
            self._changed.notify_all()

    def _post(self) -> None:
        """Passes the blocks of the parcel to the writer."""
        if self._parcel:
            ready = self._room.streams.moment()
            with self._changed:
                self._coming.append((self._parcel, ready))
                self._changed.notify_all()
            self._parcel, self._parcel_bytes = [], 0

    def _wait_until(self, is_there: Callable[[], bool], *, for_memory: bool = True) -> None:
        self.start_writer()
        with self._changed:
            while not is_there():
                self._check()
                self._waits = for_memory
                self._changed.notify_all()
                # The wait is in slices, so that Ctrl-C ends it.
                self._changed.wait(0.1)
            self._waits = False

    def _take_place(self, nbytes: int) -> int:
        while True:
            with self._changed:
                self._check()
                start = self._place(nbytes)
                if start is not None:
                    self._held.append((start, start + nbytes))
                    return start
            self._post()
            self._wait_until(lambda: self._place(nbytes) is not None)

    def _place(self, nbytes: int) -> int | None:
        """Returns the offset of `nbytes` free bytes in the ring after the newest block, or None if the ring is too
        full."""
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

    def wait_for_start(self) -> None:
        with self._changed:
            while not self._started:
                self._changed.wait()

    def blocks(self) -> Iterator[Block | None]:
        """Yields the blocks as they arrive. A None asks the writer to commit the blocks that it has received, because
        the sender waits for their memory."""
        parcel: Sequence[Block | None]
        while True:
            with self._changed:
                while self._error is None and not self._coming and not (self._waits and self._given):
                    self._changed.wait()
                if self._error is not None:
                    raise self._error
                coming = self._coming.popleft() if self._coming else ((None,), None)
                self._changed.notify_all()
            if coming is None:
                return
            parcel, ready = coming
            if ready is not None:
                ready.wait()
            for block in parcel:
                yield block
                # At this point the writer has added the block to its batch. If it were counted earlier, it would belong
                # to a batch that the writer ends before adding it, and its memory would be freed too early.
                if block is not None:
                    with self._changed:
                        self._given += 1
                        if self._error is not None:
                            raise self._error

    def take(self) -> int:
        """Returns the number of blocks received since the last call, which belong to the writer's current batch."""
        with self._changed:
            taken, self._given = self._given, 0
            return taken

    def free(self, count: int) -> None:
        """Frees the memory of the `count` oldest blocks, whose batch is committed."""
        with self._changed:
            for _ in range(count):
                self._held.popleft()
            self._changed.notify_all()

    @property
    def waits(self) -> bool:
        """Whether the sender is waiting for free memory in the ring."""
        return self._waits

    def ended(self) -> None:
        """Records that the writer has ended, so that the sender stops."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
