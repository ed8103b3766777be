#!/usr/bin/env python3
"""Compares ways to load a state that is the same on several GPUs of one host.

    python3 bench/peers/replicas.py DIR --gib 4

Each GPU has a process with the same model. All ways take turns in each round, and each load ends when all ranks have
all tensors, which are then compared with the saved ones outside of the measured time. The files are in the page cache.
`Checkpointer` verifies every byte by a checksum; the other ways verify nothing. At the end, calls of `save` that
compare the replicas take turns with calls that do not.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp

from remanent.torch import Checkpointer

TENSOR_LEN = 64 << 20
GIB = 1 << 30


class Model(torch.nn.Module):
    def __init__(self, gib):
        super().__init__()
        torch.manual_seed(0)
        count = int(gib * GIB) // TENSOR_LEN
        self.tensors = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(TENSOR_LEN // 4, device="cuda"), requires_grad=False) for _ in range(count))


def work(rank, ranks, root, gib, rounds):
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{root}/meeting", rank=rank, world_size=ranks)
    model = Model(gib)
    nbytes = sum(each.nbytes for each in model.parameters())

    def opened(name, **options):
        run = Checkpointer(f"{root}/{name}", model, process_group=dist.group.WORLD, rng=False, **options)
        run.save(1)
        return run

    whole, shares = opened("whole"), opened("shares", replicated=True, compare_every=1)
    expected = [each.clone() for each in model.parameters()]
    if rank == 0:
        torch.save(model.state_dict(), f"{root}/state.pt")
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{root}/dcp")

    def torch_load():
        if rank == 0:
            model.load_state_dict(torch.load(f"{root}/state.pt", map_location="cuda"))
        for each in model.parameters():
            dist.broadcast(each, 0)

    ways = {
        "Checkpointer, each rank loads all": whole.restore,
        "Checkpointer(replicated=True)": shares.restore,
        "torch.load on rank 0, broadcast": torch_load,
        "DCP, each rank loads all": lambda: dcp.load({"model": model.state_dict()}, checkpoint_id=f"{root}/dcp"),
    }
    times = {name: [] for name in ways}
    # The first round makes connections and is not counted.
    for number in range(rounds + 1):
        for name, load in ways.items():
            for each in model.parameters():
                each.zero_()
            torch.cuda.synchronize()
            dist.barrier()
            began = time.perf_counter()
            load()
            torch.cuda.synchronize()
            dist.barrier()
            if number:
                times[name].append(time.perf_counter() - began)
            assert all(map(torch.equal, model.parameters(), expected)), name
    calls = {"save(wait=False) without a comparison": whole, "save(wait=False) with a comparison": shares}
    blocked = {name: [] for name in calls}
    for step in range(2, rounds + 3):
        for name, run in calls.items():
            dist.barrier()
            began = time.perf_counter()
            saved = run.save(step, wait=False)
            if step > 2:
                blocked[name].append(time.perf_counter() - began)
            saved.wait()
    if rank == 0:
        print(f"{ranks} ranks, {nbytes / GIB:.1f} GiB each, medians of {rounds} rounds")
        for name, each in times.items():
            print(f"{name:40} {nbytes / statistics.median(each) / 1e9:7.2f} GB/s of one replica")
        for name, each in blocked.items():
            print(f"{name:40} {1000 * statistics.median(each):7.1f} ms")
    whole.close()
    shares.close()
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("directory", help="where to make a temporary directory")
    parser.add_argument("--gib", type=float, default=4, help="GiB of state of each rank")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    ranks = torch.cuda.device_count()
    if ranks < 2:
        raise SystemExit(f"needs two GPUs, and there are {ranks}")
    # NVLink multicast is not available on all hosts.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    root = tempfile.mkdtemp(prefix="remanent-replicas-", dir=options.directory)
    try:
        mp.spawn(work, (ranks, root, options.gib, options.rounds), ranks)
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
