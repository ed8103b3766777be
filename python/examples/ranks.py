"""A run with four ranks that loses one of them and continues with two.

    python ranks.py [--device cuda]

Four processes train a model that FSDP2 shards among them, and save each step. One process is killed with SIGKILL, and
the others detect this and end. Two processes then continue from the newest version that was durable on all four ranks:
each restores a half of the model from the saved quarters. Apart from rounding, the final weights equal those of a
single process. With CUDA, there are as many ranks as GPUs, up to four.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from remanent import RankFailedError
from remanent.torch import Checkpointer

STEPS = 40
BATCH = 32


def run(directory: Path, device: str, rank: int, ranks: int) -> None:
    """Trains to step STEPS, from the newest version in `directory` on. The first rank prints each step."""
    meeting = directory.with_name(f"{directory.name}-meeting-{ranks}")
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(device)
    fully_shard(model, mesh=init_device_mesh(device, (ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with Checkpointer(directory, model, optimizer, rng=False, process_group=dist.group.WORLD) as checkpoints:
        step = checkpoints.restore() if checkpoints.versions() else 0
        if rank == 0:
            print(f"{ranks} ranks begin after step {step}", flush=True)
        while step < STEPS:
            # Each rank trains on its part of the batch.
            x = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(step))[rank::ranks].to(device)
            loss = (model(x).squeeze(1) - x.sum(dim=1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            checkpoints.save(step, wait=False)
            if rank == 0:
                print(step, flush=True)
    weights = [each.full_tensor() if isinstance(each, DTensor) else each for each in model.state_dict().values()]
    if rank == 0:
        torch.save([each.cpu() for each in weights], directory / "weights")


def train(directory: Path, device: str, ranks: int, *, killed_at: int | None = None) -> None:
    """Trains with `ranks` processes. The last one is killed once the first one has completed step `killed_at`."""
    command = [sys.executable, "-W", "ignore", __file__, "--device", device, "--run", str(directory), str(ranks)]
    processes = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE if rank == 0 else None, text=True)
                 for rank in range(ranks)]
    said = processes[0].stdout
    assert said is not None
    for line in said:
        if "begin" in line:
            print(line.strip())
        elif killed_at == int(line):
            processes[-1].send_signal(signal.SIGKILL)
            print(f"rank {ranks - 1} is killed after step {killed_at}")
    ends = [process.wait() for process in processes]
    assert killed_at is not None or not any(ends), f"the ranks ended with {ends}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", help="device of the model: cpu or cuda")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        directory, ranks, rank = given.run
        try:
            run(Path(directory), given.device, int(rank), int(ranks))
        except (RankFailedError, RuntimeError) as error:
            # Torch raises RuntimeError if a rank dies during a step.
            sys.exit(f"rank {rank} ends: {str(error)[:60]}")
    else:
        lose_one(given.device)


def lose_one(device: str) -> None:
    """Trains with all ranks until one is killed, then with half of them, and compares the result with a single rank."""
    ranks = 4 if device == "cpu" else min(4, torch.cuda.device_count())
    if ranks < 2:
        print(f"SKIPPED: needs at least 2 GPUs, found {torch.cuda.device_count()}")
        return
    with tempfile.TemporaryDirectory() as folder:
        alone, together = Path(folder) / "alone", Path(folder) / "together"
        train(alone, device, 1)
        train(together, device, ranks, killed_at=STEPS // 2)
        train(together, device, ranks // 2)
        expected, found = torch.load(alone / "weights"), torch.load(together / "weights")
    apart = max(float((left - right).abs().max()) for left, right in zip(expected, found, strict=True))
    assert apart < 1e-4, f"the weights differ by {apart}"
    print(f"after {STEPS} steps, the weights differ by {apart:.1e} from those of an undisturbed run")


if __name__ == "__main__":
    main()
