"""Ranks of torch.distributed.checkpoint in processes of their own, with gloo."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

RANKS = """
import os, sys, time
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp, torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from remanent.dcp import StorageReader, StorageWriter

def begin(rank, ranks, root):
    dist.init_process_group("gloo", init_method=f"file://{root}/meet-{os.getppid()}", rank=rank, world_size=ranks)
    return init_device_mesh("cpu", (ranks,))

def end(rank, ranks, root):
    # All ranks exit together and immediately: torch sometimes aborts at exit, as do ranks whose peers have exited.
    mine = f"{root}/end-{os.getppid()}-"
    open(mine + str(rank), "w").close()
    while not all(os.path.exists(mine + str(each)) for each in range(ranks)):
        time.sleep(0.01)
    os._exit(0)

def of_step(step, mesh, dim):
    whole = torch.arange(60.0).reshape(10, 6) + 1000 * step
    return distribute_tensor(whole, mesh, [Shard(dim)])
"""


def in_ranks(count: int, body: str, *arguments: str) -> list[str]:
    """Runs `run(rank, ranks, *arguments)`, defined by this source code, in a process per rank. Returns their output in
    order.
    """
    script = RANKS + textwrap.dedent(body) + textwrap.dedent("""
        if __name__ == "__main__":
            ranks = int(sys.argv[1])
            # Forked processes have already imported torch.
            mp.start_processes(run, (ranks, *sys.argv[2:]), nprocs=ranks, start_method="fork")
    """)
    path = Path(arguments[0]) / "ranks.py"
    path.write_text(script)
    command = [sys.executable, str(path), str(count), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.split("\n"))[1:]
