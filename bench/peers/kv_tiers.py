#!/usr/bin/env python3
"""Compares Remanent's tier for vLLM with vLLM's own file tier: storing, finding and loading blocks.

    python3 kv_tiers.py DIR [--blocks 256] [--length 2MiB] [--rounds 3]

Requires vLLM 0.33 and this package. Blocks are rows of the host memory to which vLLM offloads. A job has 16 blocks, and
all jobs are submitted at once. The file tier writes with direct I/O, does not sync, and renames each file. Remanent
appends blocks to files in order, and verifies the checksum of each block that it loads. "found" is measured after the
process that stored the blocks was killed.
"""

from __future__ import annotations

import argparse
import gc
import mmap
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from remanent.integrations.vllm import RemanentTier

REQUEST = ReqContext(req_id="a request")
JOB = 16


def spec() -> Any:
    parallel = SimpleNamespace(rank=0, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, data_parallel_index=0,
                               data_parallel_size=1, is_parallelism_agnostic=False)
    config = SimpleNamespace(
        model=SimpleNamespace(name="a model", dtype="bfloat16"), kv_cache_layout="NHD", canonical_layout=False,
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1), replicated_layout=False, parallel=parallel,
        groups=(SimpleNamespace(tokens_per_block=16, layer_names=("layer",)),))
    return SimpleNamespace(config=config, blocks_per_chunk=1,
                           kv_events_config=SimpleNamespace(enable_kv_cache_events=False))


def make(kind: str, directory: str, rows: Any) -> Any:
    view = memoryview(rows)
    if kind == "files":
        return FileSystemTierManager(spec(), view, "fs", root_dir=directory)
    return RemanentTier(spec(), view, "remanent", path=directory, capacity=4 * rows.nbytes, revision="1")


def keys(blocks: int) -> list[Any]:
    return [make_offload_key(number.to_bytes(32, "big"), 0) for number in range(blocks)]


def jobs(blocks: int, loads: bool) -> list[TransferJob]:
    all_keys = keys(blocks)
    return [TransferJob(job_id=at, keys=all_keys[at : at + JOB], chunk_ids=np.arange(at, min(at + JOB, blocks)),
                        is_promotion=loads, req_context=REQUEST) for at in range(0, blocks, JOB)]


def run(tier: Any, begin: Any, blocks: int, loads: bool) -> float:
    begun = time.perf_counter()
    for job in jobs(blocks, loads):
        begin(job)
    tier.drain_jobs()
    seconds = time.perf_counter() - begun
    assert all(result.success for result in tier.get_finished_jobs())
    return seconds


def find(tier: Any, blocks: int) -> tuple[int, float]:
    """Returns the number of blocks that are found, and the duration of the lookups in seconds."""
    begun = time.perf_counter()
    found = {}
    while len(found) < blocks:
        for key in keys(blocks):
            if key not in found and (result := tier.lookup(key, REQUEST)) is not LookupResult.RETRY:
                found[key] = result is LookupResult.HIT
        tier.on_schedule_end(ScheduleEndContext(new_req_ids=[], preempted_req_ids=()))
    return sum(found.values()), time.perf_counter() - begun


def memory(blocks: int, length: int) -> Any:
    rows = np.frombuffer(mmap.mmap(-1, blocks * length), dtype=np.uint8).reshape(blocks, length)
    rows[:] = np.random.default_rng(1).integers(0, 256, length, dtype=np.uint8)
    rows[:, :8] = np.arange(blocks, dtype=np.int64).view(np.uint8).reshape(blocks, 8)
    return rows


def store_and_wait(kind: str, directory: str, blocks: int, length: int) -> None:
    """Stores the blocks, prints the duration, and waits to be killed. Runs in a child process."""
    tier = make(kind, directory, memory(blocks, length))
    print(run(tier, tier.submit_store, blocks, False), flush=True)
    time.sleep(600)


def parse_bytes(text: str) -> int:
    for unit, factor in (("KiB", 1 << 10), ("MiB", 1 << 20)):
        if text.endswith(unit):
            return int(text.removesuffix(unit)) * factor
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--length", type=parse_bytes, default="2MiB")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    blocks, length = options.blocks, options.length
    figures: dict[str, list[tuple[float, float, float, float]]] = {"files": [], "remanent": []}
    expected = memory(blocks, length)
    for round_ in range(options.rounds):
        for kind, taken in list(figures.items())[:: 1 if round_ % 2 == 0 else -1]:
            directory = str(options.directory / f"kv-{kind}")
            shutil.rmtree(directory, ignore_errors=True)
            child = subprocess.Popen([sys.executable, __file__, "--child", kind, directory, str(blocks), str(length)],
                                     stdout=subprocess.PIPE, text=True)
            assert child.stdout is not None
            stored = next(float(line) for line in child.stdout if line[:1].isdigit())
            child.kill()
            child.wait()
            rows = np.frombuffer(mmap.mmap(-1, blocks * length), dtype=np.uint8).reshape(blocks, length)
            rows[:] = 0
            begun = time.perf_counter()
            tier = make(kind, directory, rows)
            opened = time.perf_counter() - begun
            found, looked_up = find(tier, blocks)
            assert found == blocks, f"{kind}: {found} of {blocks} blocks"
            loaded = min(run(tier, tier.submit_load, blocks, True) for _ in range(2))
            assert (rows == expected).all()
            tier.shutdown()
            taken.append((stored, loaded, looked_up / blocks, opened))
            shutil.rmtree(directory, ignore_errors=True)
    total = blocks * length
    print(f"{blocks} blocks of {length >> 10} KiB, medians of {options.rounds} rounds, all found after a kill")
    print(f"{'':10}{'store GB/s':>12}{'load GB/s':>12}{'lookup µs':>12}{'open ms':>10}")
    for kind, taken in figures.items():
        stored, loaded, looked_up, opened = (statistics.median(column) for column in zip(*taken, strict=True))
        print(f"{kind:10}{total / stored / 1e9:12.2f}{total / loaded / 1e9:12.2f}{looked_up * 1e6:12.1f}"
              f"{opened * 1e3:10.1f}")


if __name__ == "__main__":
    # Exclude imported objects from garbage collection, as vLLM's engine does. A scan of them takes 0.4 s.
    gc.freeze()
    if sys.argv[1:2] == ["--child"]:
        store_and_wait(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    else:
        main()
