"""What batches of a save may keep in memory until the next snapshot, told before they are committed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from remanent._native import Block

# A page on disk that is shorter is not written by itself. What a batch writes to it waits in blocks, and a commit
# claims two of them for each page, with the marks of what was written.
_SHORT_LEN = 8 << 10
_CLAIMED_BYTES = 2 * 4608
# Longer pages are logged, and wait, where all of a batch's together are no more than a quarter of a segment of the log.
_LONGER_MAX = 5 << 20


class WaitingBytes:
    """An upper bound for one batch after the other, counted as blocks go to it.

    The store tells what waits of batches that are applied; this is for those that are not.
    """

    def __init__(self) -> None:
        self._short = self._longer = 0
        # The last block may be the next batch's.
        self._last: Block | None = None

    def counting(self, blocks: Iterable[Block | None]) -> Iterator[Block | None]:
        """The blocks, each of which is counted before it is given on."""
        for block in blocks:
            self._count(block)
            yield block

    def begin_next(self) -> int:
        """The bytes of the batch that ends; the block that was given last counts for the next one, too."""
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
