"""An in-memory index of a cache's blocks, with the order of their last use and their locks."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping

__all__ = ["Block", "BlockIndex"]

# The smallest size in bytes that is charged for a block, because even a short page takes some disk space.
_CHARGE_MIN = 4096


class Block:
    """The index entry of a block: its length in bytes, its kind and its locks."""

    __slots__ = ("_is_there", "_locks", "charge", "kind", "nbytes", "unreadable_until")

    def __init__(self, nbytes: int, kind: str | None) -> None:
        self.nbytes, self.kind = nbytes, kind
        self.charge = max(nbytes, _CHARGE_MIN)
        # The time until which it counts as missing because the system failed to read it.
        self.unreadable_until = 0.0
        self._locks = 0
        self._is_there = False

    @property
    def is_locked(self) -> bool:
        return self._locks > 0


class BlockIndex:
    """The blocks of a cache by key. The caller must hold the cache's lock, except for `get`, `in` and `len`."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        # The bytes of all blocks, the total size they count as, and the part of it that is locked.
        self.nbytes = self.charged = self.locked = 0
        # The least recently used block is first.
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()
        # The locks of callers, by key. If a locked block is dropped, its locks apply to the next block with the same
        # key.
        self._kept: Counter[bytes] = Counter()
        # Blocks whose last use is not logged, in the order of that use.
        self._used: dict[bytes, None] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._blocks)

    def get(self, key: bytes) -> Block | None:
        return self._blocks.get(key)

    @property
    def uses_waiting(self) -> int:
        """The number of blocks whose last use is not logged yet."""
        return len(self._used)

    def add(self, blocks: Iterable[tuple[bytes, Block]]) -> None:
        """Adds blocks as the most recently used ones, after blocks whose use is not logged yet. The first of `blocks`
        is evicted last."""
        for key, block in reversed(list(blocks)):
            self._insert(key, block)
        for used in self._used:
            self._blocks.move_to_end(used)

    def put_back(self, blocks: Mapping[bytes, Block]) -> None:
        """Adds removed blocks that the store still contains, as the least recently used ones."""
        for key, block in reversed(list(blocks.items())):
            self._insert(key, block)
            self._blocks.move_to_end(key, last=False)

    def _insert(self, key: bytes, block: Block) -> None:
        block._locks += self._kept[key]
        block._is_there = True
        self._blocks[key] = block
        self.nbytes += block.nbytes
        self.charged += block.charge
        self.locked += block.charge if block.is_locked else 0

    def remove(self, key: bytes) -> Block:
        block = self._blocks.pop(key)
        self._used.pop(key, None)
        block._is_there = False
        self.nbytes -= block.nbytes
        self.charged -= block.charge
        self.locked -= block.charge if block.is_locked else 0
        # Callers' locks belong to the key, and apply to the next block.
        block._locks -= self._kept[key]
        return block

    def hold(self, block: Block, change: int) -> None:
        """Adds (1) or removes (-1) a lock of a block. The number of locked bytes changes only if the index contains the
        block."""
        was_locked = block.is_locked
        block._locks += change
        if block._is_there and was_locked != block.is_locked:
            self.locked += block.charge if block.is_locked else -block.charge

    def keep(self, key: bytes) -> bool:
        """Locks the block with `key` against eviction. Returns False if the index does not contain the block."""
        block = self._blocks.get(key)
        if block is None:
            return False
        self._kept[key] += 1
        self.hold(block, 1)
        return True

    def let_go(self, key: bytes) -> None:
        """Removes a lock that `keep` added."""
        if key not in self._kept:
            return
        self._kept[key] -= 1
        if self._kept[key] == 0:
            del self._kept[key]
        block = self._blocks.get(key)
        if block is not None:
            self.hold(block, -1)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Records a use of blocks. Earlier blocks are prefixes of later ones, so they are evicted later."""
        for key in reversed(list(keys)):
            if key in self._blocks:
                self._blocks.move_to_end(key)
                self._used.pop(key, None)
                self._used[key] = None

    def take_uses(self) -> list[bytes]:
        """Returns the blocks whose use is not logged yet, in the order of that use, and clears the list."""
        used, self._used = list(self._used), {}
        return used

    def put_uses_back(self, used: Iterable[bytes]) -> None:
        """Puts back uses that could not be logged. These uses count as older than uses recorded since."""
        there = {key: None for key in used if key in self._blocks}
        self._used = {**there, **self._used}

    def make_room(self, needed: int) -> dict[bytes, Block]:
        """Removes unlocked blocks, least recently used first, until `needed` bytes are free. Returns the removed
        blocks."""
        excess = self.charged + needed - self.capacity
        keys = []
        for key, block in self._blocks.items():
            if excess <= 0:
                break
            if not block.is_locked:
                keys.append(key)
                excess -= block.charge
        return {key: self.remove(key) for key in keys}
