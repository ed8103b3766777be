#!/usr/bin/env python3
"""Compares `remanent.dcp` with DCP's own files: one process saves and loads tensors of 16 MiB.

    python3 bench/peers/sharded.py DIR [--tensors 40] [--device cpu] [--rounds 3]

In each round, a state is saved three times, each time to a new path: as it is, with a tenth of the tensors changed, and
with all tensors changed. The last checkpoint is then loaded. The results are medians, in GB of state per second.
Remanent reads back the written bytes before a checkpoint becomes visible. DCP syncs its files.

Requires torch and the package in `python/`.
"""

import argparse
import os
import pathlib
import shutil
import statistics
import time
import warnings

import torch
import torch.distributed.checkpoint as dcp

import remanent.dcp

LEN = 16 << 20
KINDS = {
    "dcp": (dcp.FileSystemWriter, dcp.FileSystemReader),
    "remanent": (remanent.dcp.StorageWriter, remanent.dcp.StorageReader),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--tensors", type=int, default=40)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    state = {f"layer.{n}": torch.randn(LEN // 4, device=asked.device) for n in range(asked.tensors)}
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    gigabytes = asked.tensors * LEN / 1e9
    figures = {}
    for number in range(asked.rounds):
        for kind in sorted(KINDS, reverse=bool(number % 2)):
            one_round(f"{asked.directory}/{kind}", KINDS[kind], state, loaded, figures.setdefault(kind, {}), gigabytes)
    print(f"{'':32}" + "".join(f"{kind:>10}" for kind in figures))
    for name in next(iter(figures.values())):
        print(f"{name:32}" + "".join(f"{statistics.median(found[name]):10.2f}" for found in figures.values()))


def one_round(root, kind, state, loaded, figures, gigabytes):
    writer, reader = kind

    def timed(name, call):
        os.sync()
        began = time.perf_counter()
        call()
        if state["layer.0"].is_cuda:
            torch.cuda.synchronize()
        figures.setdefault(name, []).append(gigabytes / (time.perf_counter() - began))

    def save(name, part, step):
        for tensor in list(state.values())[::part]:
            tensor += 1
        path = f"{root}/{step}"
        timed(name, lambda: dcp.save(state, storage_writer=writer(path), no_dist=True))

    shutil.rmtree(root, ignore_errors=True)
    os.makedirs(root)
    save("first save", 1, 1)
    save("a tenth changed", 10, 2)
    save("all changed", 1, 3)
    timed("warm load", lambda: dcp.load(loaded, storage_reader=reader(f"{root}/3"), no_dist=True))
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in state.items())
    held = sum(path.stat().st_size for path in pathlib.Path(root).rglob("*") if path.is_file())
    figures.setdefault("GB on disk, three checkpoints", []).append(held / 1e9)
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
