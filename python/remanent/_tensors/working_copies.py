"""Registers tensors as working copies of pages, so that their changes are captured without a copy to the host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from remanent._store import _native
from remanent._store._native import Block, Extent
from remanent._tensors.conversion import blocks


class Copies:
    """The working copies of a store's pages. Each is valid as long as its tensor stays in place.

    A working copy keeps the memory of its tensor alive. `end` drops working copies that are no longer used.

    :param device: the device of the tensors to capture, which the store's kernels (or the host) must be able to access.
    :param shadow: the reference for comparisons, as in `Store.working_copy`.
    """

    def __init__(self, store: _native.Store, device: torch.device, shadow: str) -> None:
        self.device = device
        self._store = store
        self._shadow = shadow
        # The location of the tensor and its working copy, by page key.
        self._held: dict[str, tuple[tuple[int, int, int], _native.WorkingCopy]] = {}
        # The keys of the working copies that were captured since the last call of `blocks`.
        self._used: set[str] = set()
        # Blocks for which a batch has created pages, to be captured by the next batch.
        self._begun: list[tuple[str, Block, int]] = []

    def blocks(self, found: Iterable[Extent]) -> Iterator[Block]:
        """Yields the pages of tensors. Tensors on `device` are marked to be captured, and all others are copied to the
        host."""
        # A failed save may have left entries.
        self._begun, self._used = [], set()
        for block in blocks(found, on_host=False):
            if not block.nbytes:
                yield block
            elif block.data.device == self.device:
                yield Block(block.arrays, block.data, block.nbytes, captured=True)
            else:
                yield block.moved(block.data.cpu())

    def arrive(self) -> None:
        """Orders captures after work that is already queued on the device's current stream."""
        if self.device.type == "cuda":
            torch.cuda.default_stream(self.device).wait_stream(torch.cuda.current_stream(self.device))

    def capture(self, batch: _native.Batch, key: str, block: Block, width: int) -> None:
        """Adds a capture to `batch` that changes a page to the contents of `block`. The page must have the length of
        the block."""
        info = self._store.info(key)
        while block.nbytes % width or block.data.data_ptr() % width:
            # Tensors of several widths overlap in the block.
            width //= 2
        place = (block.data.data_ptr(), block.nbytes, width)
        held = self._held.get(key)
        # Create a new working copy if the tensor has moved, if the page is another one, or if another batch changed the
        # page.
        if held is None or held[0] != place or (held[1].page, held[1].epoch) != (info.page, info.epoch):
            # A thread's current GPU is the first one by default, and torch exports no tensor of another one.
            with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
                copy = self._store.working_copy(info.page, block.data, width=width, shadow=self._shadow)
            self._held[key] = held = place, copy
        self._used.add(key)
        batch.capture(held[1])

    def begin(self, key: str, block: Block, width: int) -> None:
        """Records that a batch creates a page for `block`, which `capture_begun` will capture."""
        self._begun.append((key, block, width))

    def capture_begun(self, batch: _native.Batch) -> None:
        """Captures the blocks that were passed to `begin`. The batch that creates their pages must be committed."""
        begun, self._begun = self._begun, []
        for each in begun:
            self.capture(batch, *each)

    def end(self) -> None:
        """Drops the working copies that were not captured since the last call of `blocks`."""
        for key in self._held.keys() - self._used - {key for key, _, _ in self._begun}:
            del self._held[key]

    def let_go(self) -> None:
        """Drops all working copies. The next captures create new ones."""
        self._held, self._begun = {}, []
