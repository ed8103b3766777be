"""A cache of key-value blocks that survives a kill of its process.

    python kv_cache.py [--device cuda]

Blocks are the attention keys and values of a prompt's prefixes, named by a hash of all tokens up to their end. The
cache's identity contains all values on which the meaning of a block's bytes depends, so a cache of another model is
rejected. With `--device`, blocks are tensors on that device, which are copied through a buffer in host memory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from typing import Any

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
    """Computes a block. A real engine would run attention over the prefix."""
    return hashlib.shake_128(json.dumps(tokens).encode()).digest(BLOCK_LEN)


class OnHost:
    """Blocks in host memory."""

    def compute(self, tokens: list[int]) -> Any:
        return compute(tokens)

    def buffer(self) -> Any:
        return bytearray(BLOCK_LEN)

    def from_buffer(self, buffer: Any) -> Any:
        return bytes(buffer)

    def to_buffer(self, block: Any) -> Any:
        return block

    def content(self, block: Any) -> bytes:
        return bytes(block)


class OnGpu:
    """Blocks that are tensors on a GPU."""

    def __init__(self, device: str) -> None:
        import torch

        self._torch, self._device = torch, device

    def compute(self, tokens: list[int]) -> Any:
        return self.from_buffer(bytearray(compute(tokens)))

    def buffer(self) -> Any:
        pinned = self._torch.empty(BLOCK_LEN, dtype=self._torch.uint8, pin_memory=self._torch.cuda.is_available())
        return pinned.numpy()

    def from_buffer(self, buffer: Any) -> Any:
        return self._torch.frombuffer(buffer, dtype=self._torch.uint8).to(self._device)

    def to_buffer(self, block: Any) -> Any:
        return block.cpu().numpy()

    def content(self, block: Any) -> bytes:
        return bytes(self.to_buffer(block))


def serve(cache: BlockCache, where: OnHost | OnGpu, tokens: list[int]) -> tuple[Any, bool]:
    """Returns the block for `tokens` and whether the cache contained it. A missing block is computed and stored."""
    key, buffer = key_of(tokens), where.buffer()
    if cache.load([key], [buffer]).result() == [True]:
        return where.from_buffer(buffer), True
    computed = where.compute(tokens)
    cache.store([key], [where.to_buffer(computed)]).result()
    return computed, False


def fill(directory: str, where: OnHost | OnGpu) -> None:
    """Stores blocks until the process is killed, and prints the number of each stored block."""
    cache = open_cache(directory, "model-a")
    for number in range(1_000_000):
        serve(cache, where, [number, number + 1])
        print(number, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", help="where blocks are computed and used: cpu or cuda")
    parser.add_argument("--fill", help=argparse.SUPPRESS)
    given = parser.parse_args()
    where = OnHost() if given.device == "cpu" else OnGpu(given.device)
    if given.fill:
        fill(given.fill, where)
    else:
        restart(given.device, where)


def restart(device: str, where: OnHost | OnGpu) -> None:
    """Kills a process that fills a cache, and checks that the blocks it had stored are found."""
    with tempfile.TemporaryDirectory() as folder:
        directory = os.path.join(folder, "cache")
        command = [sys.executable, __file__, "--device", device, "--fill", directory]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        last = -1
        for line in process.stdout:
            last = int(line)
            if last == 200:
                process.send_signal(signal.SIGKILL)
        process.wait()

        with open_cache(directory, "model-a") as cache:
            # The newest blocks that were reported are found, with their bytes. One more may have been stored.
            for number in range(last - BLOCKS_MAX + 2, last + 1):
                tokens = [number, number + 1]
                block, is_found = serve(cache, where, tokens)
                assert is_found and where.content(block) == compute(tokens), number
            assert not serve(cache, where, [0, 1])[1]
            assert len(cache) == BLOCKS_MAX
            print(f"killed after block {last}; the newest {BLOCKS_MAX - 1} reported blocks were found, with their bytes")
        try:
            open_cache(directory, "model-b")
        except remanent.MismatchError as error:
            print(f"another model: {error}")
        else:
            raise AssertionError("blocks of another model were accepted")


if __name__ == "__main__":
    main()
