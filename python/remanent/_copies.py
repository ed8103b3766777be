"""Tensors as working copies of the pages that hold them: captured where they lie, not brought to the host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from remanent import _native
from remanent._native import Block, Extent
from remanent._tensors import blocks


class Copies:
    """Working copies of a store's pages, each for as long as its tensor lies where it did.

    A copy holds its tensor's memory: `end` lets go of those that are not in use any more.

    :param device: where tensors lie that are captured: where the store's kernels, or the host's loops, find them.
    :param shadow: what they are compared with, as in `Store.working_copy`.
    """

    def __init__(self, store: _native.Store, device: torch.device, shadow: str) -> None:
        self.device = device
        self._store = store
        self._shadow = shadow
        # By keys of pages, each with where its tensor lay.
        self._held: dict[str, tuple[tuple[int, int, int], _native.WorkingCopy]] = {}
        # Keys of those that were captured since `blocks` was called.
        self._used: set[str] = set()
        # What a batch has made pages for, to be captured by the next one.
        self._begun: list[tuple[str, Block, int]] = []

    def blocks(self, found: Iterable[Extent]) -> Iterator[Block]:
        """The pages of tensors; those that lie on the device are captured, the others brought to the host."""
        # Of a save that failed something may be left.
        self._begun, self._used = [], set()
        for block in blocks(found, on_host=False):
            if not block.nbytes:
                yield block
            elif block.data.device == self.device:
                yield Block(block.arrays, block.data, block.nbytes, captured=True)
            else:
                yield block.moved(block.data.cpu())

    def arrive(self) -> None:
        """Has captures come after what is queued on the device's current stream."""
        if self.device.type == "cuda":
            torch.cuda.default_stream(self.device).wait_stream(torch.cuda.current_stream(self.device))

    def capture(self, batch: _native.Batch, key: str, block: Block, width: int) -> None:
        """Has the batch make a page, which is as long as the block, what the block is."""
        info = self._store.info(key)
        while block.nbytes % width or block.data.data_ptr() % width:
            # Tensors of several widths overlap in it.
            width //= 2
        place = (block.data.data_ptr(), block.nbytes, width)
        held = self._held.get(key)
        # Another page, or changed by another batch: the memory is of none of its states.
        if held is None or held[0] != place or (held[1].page, held[1].epoch) != (info.page, info.epoch):
            # A thread's current GPU is the first one unless told, and torch lends no tensor of another one.
            with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
                copy = self._store.working_copy(info.page, block.data, width=width, shadow=self._shadow)
            self._held[key] = held = place, copy
        self._used.add(key)
        batch.capture(held[1])

    def begin(self, key: str, block: Block, width: int) -> None:
        """A batch makes a page of the block's length, for `capture_begun`."""
        self._begun.append((key, block, width))

    def capture_begun(self, batch: _native.Batch) -> None:
        """Captures what has begun: the batch that did it is committed."""
        begun, self._begun = self._begun, []
        for each in begun:
            self.capture(batch, *each)

    def end(self) -> None:
        """Lets go of all that was not captured since `blocks` was called."""
        for key in self._held.keys() - self._used - {key for key, _, _ in self._begun}:
            del self._held[key]

    def let_go(self) -> None:
        """Lets go of everything: the next captures know of nothing."""
        self._held, self._begun = {}, []
