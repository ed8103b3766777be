"""Tensors as working copies of the pages that hold them: captured where they lie, not brought to the host."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from remanent import _native
from remanent._pages import Block


class Copies:
    """Working copies of a store's pages, each for as long as its tensor lies where it did.

    A copy holds its tensor's memory: `keep` lets go of those that are not in use any more.
    """

    def __init__(self, store: _native.Store, shadow: str) -> None:
        self._store = store
        self._shadow = shadow
        # By keys of pages, each with where its tensor lay, and its page.
        self._held: dict[str, tuple[tuple[int, int, int], _native.WorkingCopy]] = {}

    def takes(self, block: Block) -> bool:
        """Whether the block lies where a page can be compared with it."""
        return block.nbytes > 0 and bool(block.data.is_cuda)

    def of(self, key: str, info: _native.PageInfo, block: Block, width: int) -> _native.WorkingCopy:
        """The block as a working copy of its page, which is as long: the next capture takes what changed."""
        place = (block.data.data_ptr(), block.nbytes, width)
        held = self._held.get(key)
        # Another page, or changed by another batch: the memory is of none of its states.
        if held is None or held[0] != place or (held[1].page, held[1].epoch) != (info.page, info.epoch):
            copy = self._store.working_copy(info.page, block.data, width=width, shadow=self._shadow)
            self._held[key] = held = place, copy
        return held[1]

    def keep(self, keys: Iterable[str]) -> None:
        """Lets go of the copies of all other pages."""
        kept = set(keys)
        for key in self._held.keys() - kept:
            del self._held[key]


def arrive(devices: Iterable[torch.device]) -> None:
    """Has captures come after what is queued on the current streams of these devices."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.default_stream(device).wait_stream(torch.cuda.current_stream(device))
