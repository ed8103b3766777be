"""A run of four ranks that loses one of them, and goes on with two.

    python ranks.py

Four processes train a model that FSDP2 divides among them, and save each step. One of them is killed with SIGKILL; the
others hear of it and end. Two processes go on from the newest version that all four had on disk: each restores its half
of what was quarters. In the end the weights are those of one process that trained alone, but for rounding.
"""

from __future__ import annotations

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


def run(directory: Path, rank: int, ranks: int) -> None:
    """Trains up to STEPS, from wherever the run in `directory` is; the first rank says each step."""
    meeting = directory.with_name(f"{directory.name}-meeting-{ranks}")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with Checkpointer(directory, model, optimizer, rng=False, process_group=dist.group.WORLD) as checkpoints:
        step = checkpoints.restore() if checkpoints.versions() else 0
        if rank == 0:
            print(f"{ranks} ranks begin after step {step}", flush=True)
        while step < STEPS:
            # Each step has its batch, of which each rank takes a part.
            x = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(step))[rank::ranks]
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
        torch.save(weights, directory / "weights")


def train(directory: Path, ranks: int, *, killed_at: int | None = None) -> None:
    """Has this number of ranks train; one of them is killed once the first one has made a step."""
    command = [sys.executable, "-W", "ignore", __file__, str(directory), str(ranks)]
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
    with tempfile.TemporaryDirectory() as folder:
        alone, together = Path(folder) / "alone", Path(folder) / "together"
        train(alone, 1)
        train(together, 4, killed_at=STEPS // 2)
        train(together, 2)
        expected, found = torch.load(alone / "weights"), torch.load(together / "weights")
    apart = max(float((left - right).abs().max()) for left, right in zip(expected, found, strict=True))
    assert apart < 1e-4, f"the weights differ by {apart}"
    print(f"after {STEPS} steps the weights differ by {apart:.1e} from those of a run that nothing disturbed")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        try:
            run(Path(sys.argv[1]), int(sys.argv[3]), int(sys.argv[2]))
        except (RankFailedError, RuntimeError) as error:
            # What torch says if a rank is gone in the middle of a step is a RuntimeError.
            sys.exit(f"rank {sys.argv[3]} ends: {str(error)[:60]}")
    else:
        main()
