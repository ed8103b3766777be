"""Publishes the changed weights of each training step to a worker process.

    python rl_feed.py [--device cuda]

At each step, the trainer changes a few rows of an embedding and a small head, and publishes the changes. A worker in
another process applies each step and then answers with the new weights. The worker is killed once, and its successor
starts with the newest step. Each step contains a checksum of the trainer's weights, which the worker compares.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile

import torch

from remanent.weights import Publisher, Subscriber, checksum

STEPS, KILLED_AFTER = 40, 15
ROWS, WIDTH = 20_000, 64


def make(device: str) -> torch.nn.ModuleDict:
    torch.manual_seed(0)
    layers = {"embed": torch.nn.Embedding(ROWS, WIDTH), "head": torch.nn.Linear(WIDTH, 1)}
    return torch.nn.ModuleDict(layers).to(device)


def work(directory: str, device: str) -> None:
    """Applies each step and prints an answer computed with its weights, until the last step."""
    model, subscriber = make(device).requires_grad_(False), Subscriber(directory)
    while subscriber.step != STEPS:
        before = subscriber.step
        step = subscriber.apply_to(model, timeout=0.1)
        if step != before:
            answer = model["head"](model["embed"](torch.arange(8, device=device))).sum().item()
            print(step, checksum(model), f"{answer:.4f}", flush=True)


def start(directory: str, device: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--device", device, "--follow", directory]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def told_by(worker: subprocess.Popen[str], sums: dict[int, int]) -> tuple[int, str]:
    """Returns the next step of a worker and its answer, after comparing its checksum with the trainer's."""
    assert worker.stdout is not None
    step, its_sum, answer = worker.stdout.readline().split()
    assert int(its_sum) == sums[int(step)], f"step {step}"
    return int(step), answer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", help="device of the weights: cpu or cuda")
    parser.add_argument("--follow", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.follow:
        work(given.follow, given.device)
    else:
        train(given.device)


def train(device: str) -> None:
    """Publishes each step and waits until the worker has applied it."""
    model = make(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sums: dict[int, int] = {}
    with (tempfile.TemporaryDirectory() as folder,
          Publisher(folder, check=True, device="host" if device == "cpu" else device) as publisher):
        # The first step contains all weights.
        publisher.publish(model, 0).wait()
        sums[0] = checksum(model)
        worker, size = start(folder, device), sum(parameter.nbytes for parameter in model.parameters())
        logged = publisher.store.stats()["log_bytes"]
        for step in range(1, STEPS + 1):
            seen = torch.randint(0, ROWS, (50,), device=device)
            optimizer.zero_grad()
            (model["head"](model["embed"](seen)).squeeze(1) - seen / ROWS).square().mean().backward()
            optimizer.step()
            publisher.publish(model, step)
            sums[step] = checksum(model)
            told, answer = told_by(worker, sums)
            if step == KILLED_AFTER:
                worker.send_signal(signal.SIGKILL)
                worker.wait()
                worker = start(folder, device)
                print(f"the worker was killed at step {told}")
        while told < STEPS:
            told, answer = told_by(worker, sums)
        assert worker.wait() == 0
        a_step = (publisher.store.stats()["log_bytes"] - logged) / STEPS
        print(f"the worker applied {STEPS} steps with equal checksums; a step of {size / 1e6:.1f} MB of weights logged "
              f"{a_step / 1e3:.1f} kB; the last answer was {answer}")


if __name__ == "__main__":
    main()
