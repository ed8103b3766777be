"""Weights on their way from a trainer to a worker, step by step: only what changed, whole and in order.

    python rl_feed.py [--device cuda]

The trainer changes a few rows of an embedding and a small head at each step, and publishes them. A worker in a process
of its own answers requests between two steps, with weights that it follows; it is killed once, and the next one begins
at the newest step. A checksum travels with each step, so that no answer comes from other weights than the trainer's.
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
    """Answers with the newest weights, until the last step has come."""
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
    """The next step that a worker has, and its answer; its weights are those that were published."""
    assert worker.stdout is not None
    step, its_sum, answer = worker.stdout.readline().split()
    assert int(its_sum) == sums[int(step)], f"step {step}"
    return int(step), answer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", help="where trainer and worker have the weights: cpu or cuda")
    parser.add_argument("--follow", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.follow:
        work(given.follow, given.device)
    else:
        train(given.device)


def train(device: str) -> None:
    """Publishes each step, and hears from the worker that it has it."""
    model = make(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sums: dict[int, int] = {}
    with (tempfile.TemporaryDirectory() as folder,
          Publisher(folder, check=True, device="host" if device == "cpu" else device) as publisher):
        # All of it is there once before a worker asks.
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
        print(f"{STEPS} steps followed, each with the trainer's checksum; {a_step / 1e3:.1f} kB a step of {size / 1e6:.1f} MB, "
              f"the last answer {answer}")


if __name__ == "__main__":
    main()
