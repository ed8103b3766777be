"""Computes an upper bound on the memory that a batch of a save will occupy until the next snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from remanent._store._native import Block

# Changes of a page on disk that is shorter than this are held in memory until the next snapshot. For each such page, a
# commit reserves two memory blocks for the changed bytes and their ranges.
_SHORT_LEN = 8 << 10
_CLAIMED_BYTES = 2 * 4608
# The largest total length of longer pages that a batch logs and holds in memory: a quarter of a log segment.
_LONGER_MAX = 5 << 20


class WaitingBytes:
    """Computes the upper bound for one batch at a time, from the blocks added to the batch.

    The store reports the bytes of applied batches. This class covers batches that are not applied yet.
    """

    def __init__(self) -> None:
        self._short = self._longer = 0
        # The last block may belong to the next batch.
        self._last: Block | None = None

    def counting(self, blocks: Iterable[Block | None]) -> Iterator[Block | None]:
        """Yields the blocks, each counted before it is yielded."""
        for block in blocks:
            self._count(block)
            yield block

    def begin_next(self) -> int:
        """Returns the bytes of the current batch and begins the next one. The last block counts for both batches."""
        total = self._short * _CLAIMED_BYTES + min(self._longer, _LONGER_MAX)
        self._short = self._longer = 0
        self._count(self._last)
        return total

    def _count(self, block: Block | None) -> None:
        self._last = block
        if block is not None and block.nbytes < _SHORT_LEN:
            self._short += 1
        elif block is not None:
            self._longer += block.nbytes
