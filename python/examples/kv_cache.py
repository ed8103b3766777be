"""A cache of blocks with keys: filled, killed, and found again after the restart.

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

import remanent
from remanent.kv import BlockCache

BLOCK_LEN = 16 << 10
BLOCKS_MAX = 64
TOKENS_OF_BLOCK = 16


def open_cache(directory: str, model: str) -> BlockCache:
    identity = {"model": model, "dtype": "bfloat16", "tokens": TOKENS_OF_BLOCK, "hash": "blake2b-16"}
    return BlockCache(directory, identity=identity, capacity=BLOCKS_MAX * BLOCK_LEN)


def key_of(tokens: list[int]) -> bytes:
    return hashlib.blake2b(json.dumps(tokens).encode(), digest_size=16).digest()


def compute(tokens: list[int]) -> bytes:
    """Stands for the attention of a prefix."""
    return hashlib.shake_128(json.dumps(tokens).encode()).digest(BLOCK_LEN)


def serve(cache: BlockCache, tokens: list[int]) -> tuple[bytes, bool]:
    """The block of some tokens, and whether it was found: else it is computed, and stored for the next request."""
    key, block = key_of(tokens), bytearray(BLOCK_LEN)
    if cache.load([key], [block]).result() == [True]:
        return bytes(block), True
    computed = compute(tokens)
    cache.store([key], [computed]).result()
    return computed, False


def fill(directory: str) -> None:
    """Fills a cache, says each block once it is stored, and never ends by itself."""
    cache = open_cache(directory, "model-a")
    for number in range(1_000_000):
        serve(cache, [number, number + 1])
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

        with open_cache(directory, "model-a") as cache:
            # Every block that was reported and not pushed out is there, with its bytes. One more may have been stored.
            for number in range(last - BLOCKS_MAX + 2, last + 1):
                tokens = [number, number + 1]
                assert serve(cache, tokens) == (compute(tokens), True), number
            assert serve(cache, [0, 1]) == (compute([0, 1]), False)
            assert len(cache) == BLOCKS_MAX
            print(f"killed after block {last}; {len(cache)} blocks are there, those that were reported among them")
        try:
            open_cache(directory, "model-b")
        except remanent.MismatchError as error:
            print(f"another model: {error}")
        else:
            raise AssertionError("blocks of one model would be used for another")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        fill(sys.argv[1])
    else:
        main()
