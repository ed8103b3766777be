"""A training run that is killed several times and has the same losses as an undisturbed run.

    python train_kill_resume.py [--device cuda] [--plot losses.svg]

The run is killed with SIGKILL at random steps and started again. Each start restores the newest version. The
losses equal those of a run without kills, bit for bit. Both curves are plotted to the file `--plot`, which is
`train_kill_resume.svg` by default.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

# Must be set before CUDA is initialized. Matrix products then add in the same order each time.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

from remanent.torch import Checkpointer

STEPS, KILLS = 60, 4


def run(directory: str, device: str) -> None:
    """Trains to step STEPS, from the newest version in `directory` on. Prints each step, and all losses at the end."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1)]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    progress: dict[str, list[str]] = {"losses": []}
    with Checkpointer(directory, model, optimizer, scheduler, extra={"progress": progress}) as checkpoints:
        step = checkpoints.restore() if checkpoints.versions() else 0
        while step < STEPS:
            # Batches are drawn from torch's random numbers, whose state is part of each version.
            x = torch.randn(32, 16, device=device)
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


def start(directory: str, device: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--device", device, "--run", directory]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def losses_with_kills(directory: str, device: str, kills: int) -> tuple[list[str], list[int]]:
    """Returns the losses of a run that is killed `kills` times, and the steps after which it was killed."""
    chance = random.Random(7)
    killed: list[int] = []
    while True:
        process = start(directory, device)
        assert process.stdout is not None
        steps_left = chance.randrange(2, STEPS // kills) if len(killed) < kills else None
        for line in process.stdout:
            if line.startswith("["):
                process.wait()
                losses: list[str] = json.loads(line)
                return losses, killed
            if steps_left is not None:
                steps_left -= 1
                if steps_left == 0:
                    process.send_signal(signal.SIGKILL)
                    print(f"killed after step {line.strip()}")
                    killed.append(int(line))
                    break
        process.wait()


STYLE = """<style>
.back { fill: #ffffff } .ink { fill: #1d2430 } .soft { fill: #5b6675 } .mark { fill: #b83225 } .grid { stroke: #dfe4ea }
.whole { fill: none; stroke: #a9c6ec; stroke-width: 6 } .killed { fill: none; stroke: #1d2430; stroke-width: 1.5 }
.kill { stroke: #b83225; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) {
.back { fill: #0d1117 } .ink { fill: #e6edf3 } .soft { fill: #9aa4b0 } .mark { fill: #ff7b72 } .grid { stroke: #30363d }
.whole { stroke: #1f4f8b } .killed { stroke: #e6edf3 } .kill { stroke: #ff7b72 }
}
</style>"""


def drawn(whole: list[float], killed: list[float], kills: list[int]) -> str:
    """Returns both curves as an SVG for light and dark pages: loss by step, on a logarithmic scale."""
    left, right, top, bottom = 60, 700, 50, 300
    high, low = math.log10(max(whole + killed)), math.log10(min(whole + killed))

    def x_of(step: float) -> float:
        return left + (right - left) * (step - 1) / (STEPS - 1)

    def y_of(loss: float) -> float:
        return top + (bottom - top) * (high - math.log10(loss)) / (high - low)

    def curve(losses: list[float], style: str) -> str:
        points = " ".join(f"{x_of(at):.1f},{y_of(loss):.1f}" for at, loss in enumerate(losses, 1))
        return f'<polyline {style} points="{points}"/>'

    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 360" font-family="sans-serif" font-size="12">',
             "<title>Training loss by step: a run that was killed, and a run that was not</title>", STYLE,
             '<rect class="back" width="100%" height="100%"/>']
    for power in range(math.ceil(low), math.floor(high) + 1):
        y = y_of(10.0**power)
        parts.append(f'<path class="grid" d="M{left} {y:.1f}H{right}"/>'
                     f'<text class="soft" x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    for step in range(10, STEPS + 1, 10):
        parts.append(f'<text class="soft" x="{x_of(step):.1f}" y="{bottom + 18}" text-anchor="middle">{step}</text>')
    parts.append(f'<text class="soft" x="{(left + right) // 2}" y="{bottom + 40}" text-anchor="middle">training step</text>')
    for step in kills:
        parts.append(f'<path class="kill" d="M{x_of(step + 0.5):.1f} {top}V{bottom}"/>')
    title = "Training loss: an undisturbed run (wide line) and a killed run (narrow line on top of it)"
    parts += [curve(whole, 'class="whole"'), curve(killed, 'class="killed"'),
              f'<text class="ink" x="{left}" y="20">{title}</text>',
              f'<text class="mark" x="{left}" y="38">dashed: SIGKILL, then a new process restores the newest version</text>',
              "</svg>"]
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", help="device of the model: cpu or cuda")
    parser.add_argument("--plot", default="train_kill_resume.svg", help="output file of the plot (SVG)")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        run(given.run, given.device)
        return
    with tempfile.TemporaryDirectory() as folder:
        whole, _ = losses_with_kills(str(Path(folder) / "whole"), given.device, 0)
        killed, kills = losses_with_kills(str(Path(folder) / "killed"), given.device, KILLS)
    assert len(whole) == STEPS and whole == killed, "the losses differ"
    curves = [list(map(float.fromhex, losses)) for losses in (whole, killed)]
    Path(given.plot).write_text(drawn(curves[0], curves[1], kills))
    print(f"all {STEPS} losses of the killed run equal those of the undisturbed run, bit for bit")
    print(f"wrote both curves to {given.plot}")


if __name__ == "__main__":
    main()
