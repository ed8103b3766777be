"""A cache of blocks with keys: filled, evicted, killed, and found again after the restart.

    python kv_cache.py

Blocks are the attention keys and values of a prompt's prefixes, named by a hash of all tokens up to their end. The
cache's identity holds everything on which the meaning of its bytes depends: a cache of another model is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import OrderedDict

import remanent

BLOCK_LEN = 16 << 10
BLOCKS_MAX = 64
TOKENS_OF_BLOCK = 16


class Cache:
    """Blocks in the order of their last use, the oldest first. The store is the index: nothing else is written."""

    def __init__(self, directory: str, model: str) -> None:
        identity = json.dumps({"model": model, "dtype": "bfloat16", "block": TOKENS_OF_BLOCK, "hash": "blake2b-16"})
        self.store = remanent.Store(directory, device="host", identity=identity.encode())
        # After a restart the pages are their own index: by key, and by the batch that wrote them last.
        blocks = sorted(self.store.pages("block/"), key=lambda info: info.lsn)
        self.order = OrderedDict((info.key, None) for info in blocks)

    def get(self, key: str) -> bytes | None:
        block: bytes | None = self.store.get(key)
        if block is not None:
            self.order.move_to_end(key)
        return block

    def put(self, key: str, block: bytes) -> None:
        """Adds a block and evicts the oldest in the same batch: after a crash it is one or the other."""
        if key in self.order:
            return
        with self.store.batch() as batch:
            if len(self.order) >= BLOCKS_MAX:
                oldest, _ = self.order.popitem(last=False)
                assert oldest is not None
                batch.delete(oldest)
            batch.create(block, key=key, metadata={"sum": hashlib.blake2b(block, digest_size=16).digest()})
        self.order[key] = None


def key_of(tokens: list[int]) -> str:
    return "block/" + hashlib.blake2b(json.dumps(tokens).encode(), digest_size=16).hexdigest()


def compute(tokens: list[int]) -> bytes:
    """Stands for the attention of a prefix."""
    return hashlib.shake_128(json.dumps(tokens).encode()).digest(BLOCK_LEN)


def fill(directory: str) -> None:
    """Fills a cache, says each block once it is logged, and never ends by itself."""
    cache = Cache(directory, "model-a")
    for number in range(1_000_000):
        tokens = [number, number + 1]
        cache.put(key_of(tokens), compute(tokens))
        print(number, flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = os.path.join(folder, "cache")
        process = subprocess.Popen([sys.executable, __file__, directory], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        last = -1
        for line in process.stdout:
            last = int(line)
            if last == 200:
                process.send_signal(signal.SIGKILL)
        process.wait()

        cache = Cache(directory, "model-a")
        # Every block that was reported and not evicted is there, with its bytes. One more may have been logged.
        for number in range(last - BLOCKS_MAX + 2, last + 1):
            tokens = [number, number + 1]
            assert cache.get(key_of(tokens)) == compute(tokens), number
        assert cache.get(key_of([0, 1])) is None
        print(f"killed after block {last}; {len(cache.order)} blocks are found again, all of them right")
        cache.put(key_of([-1]), compute([-1]))
        assert len(cache.order) == BLOCKS_MAX
        cache.store.close()
        try:
            Cache(directory, "model-b")
        except remanent.MismatchError as error:
            print(f"another model's cache: {error}")
        else:
            raise AssertionError("blocks of one model would be used for another")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        fill(sys.argv[1])
    else:
        main()
