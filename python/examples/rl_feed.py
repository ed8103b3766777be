"""Weights on their way from a trainer to a worker, step by step: only what changed, whole and in order.

    python rl_feed.py

The trainer changes a few rows of an embedding and a small head at each step, and publishes them. A worker in a process
of its own answers requests between two steps, with weights that it follows; it is killed once, and the next one begins
at the newest step. A checksum travels with each step, so that no answer comes from other weights than the trainer's.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile

import torch

from remanent.weights import Publisher, Subscriber, checksum

STEPS, KILLED_AFTER = 40, 15
ROWS, WIDTH = 20_000, 64


def make() -> torch.nn.ModuleDict:
    torch.manual_seed(0)
    return torch.nn.ModuleDict({"embed": torch.nn.Embedding(ROWS, WIDTH), "head": torch.nn.Linear(WIDTH, 1)})


def work(directory: str) -> None:
    """Answers with the newest weights, until the last step has come."""
    model, subscriber = make().requires_grad_(False), Subscriber(directory)
    while subscriber.step != STEPS:
        before = subscriber.step
        step = subscriber.apply_to(model, timeout=0.1)
        if step != before:
            answer = model["head"](model["embed"](torch.arange(8))).sum().item()
            print(step, checksum(model), f"{answer:.4f}", flush=True)


def start(directory: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, __file__, directory], stdout=subprocess.PIPE, text=True)


def told_by(worker: subprocess.Popen[str], sums: dict[int, int]) -> tuple[int, str]:
    """The next step that a worker has, and its answer; its weights are those that were published."""
    assert worker.stdout is not None
    step, its_sum, answer = worker.stdout.readline().split()
    assert int(its_sum) == sums[int(step)], f"step {step}"
    return int(step), answer


def main() -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sums: dict[int, int] = {}
    with tempfile.TemporaryDirectory() as folder, Publisher(folder, check=True) as publisher:
        # All of it is there once before a worker asks.
        publisher.publish(model, 0).wait()
        sums[0] = checksum(model)
        worker, size = start(folder), sum(parameter.nbytes for parameter in model.parameters())
        logged = publisher.store.stats()["log_bytes"]
        for step in range(1, STEPS + 1):
            seen = torch.randint(0, ROWS, (50,))
            optimizer.zero_grad()
            (model["head"](model["embed"](seen)).squeeze(1) - seen / ROWS).square().mean().backward()
            optimizer.step()
            publisher.publish(model, step)
            sums[step] = checksum(model)
            told, answer = told_by(worker, sums)
            if step == KILLED_AFTER:
                worker.send_signal(signal.SIGKILL)
                worker.wait()
                worker = start(folder)
                print(f"the worker was killed at step {told}")
        while told < STEPS:
            told, answer = told_by(worker, sums)
        assert worker.wait() == 0
        a_step = (publisher.store.stats()["log_bytes"] - logged) / STEPS
        print(f"{STEPS} steps followed, each with the trainer's checksum; {a_step / 1e3:.1f} kB a step of {size / 1e6:.1f} MB, "
              f"the last answer {answer}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        work(sys.argv[1])
    else:
        main()
