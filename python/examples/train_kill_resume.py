"""A training run that is killed again and again, and ends with the losses of one that never was.

    python train_kill_resume.py

The run is a process of its own. It is killed with SIGKILL at random moments, and started again; each
start restores the newest version. In the end its losses are those of a run without a kill, bit for bit.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from remanent.torch import Checkpointer

STEPS = 60


def run(directory: str) -> None:
    """Trains up to STEPS, from wherever the store in `directory` is; says each step and its loss."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    progress: dict[str, list[str]] = {"losses": []}
    with Checkpointer(directory, model, optimizer, scheduler, extra={"progress": progress}) as checkpoints:
        step = checkpoints.restore() if checkpoints.versions() else 0
        while step < STEPS:
            # Its batches come from torch's random numbers, which are part of each version.
            x = torch.randn(32, 16)
            loss = (model(x).squeeze(1) - x.sum(dim=1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            progress["losses"].append(loss.item().hex())
            checkpoints.save(step)
            print(step, flush=True)
        print(json.dumps(progress["losses"]), flush=True)


def start(directory: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, __file__, directory], stdout=subprocess.PIPE, text=True)


def losses_with_kills(directory: str, kills: int) -> list[str]:
    """The losses of a run that is killed this number of times."""
    chance = random.Random(7)
    while True:
        process = start(directory)
        assert process.stdout is not None
        steps_left = chance.randrange(2, STEPS // kills) if kills else None
        for line in process.stdout:
            if line.startswith("["):
                process.wait()
                losses: list[str] = json.loads(line)
                return losses
            if steps_left is not None:
                steps_left -= 1
                if steps_left == 0:
                    process.send_signal(signal.SIGKILL)
                    print(f"killed after step {line.strip()}")
                    kills -= 1
                    break
        process.wait()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole = losses_with_kills(str(Path(folder) / "whole"), 0)
        killed = losses_with_kills(str(Path(folder) / "killed"), 4)
    assert len(whole) == STEPS and whole == killed, "the losses differ"
    print(f"{STEPS} losses of the run that was killed are those of the one that was not, to the last bit")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run(sys.argv[1])
    else:
        main()
