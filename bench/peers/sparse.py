#!/usr/bin/env python3
"""Measures the cost of saving and of publishing a state of which only a small part changes.

    sparse.py saves DIRECTORY [--gib 8] [--rounds 5] [--device cuda:0] [--ways NAME…]
    sparse.py publish DIRECTORY [--gb 1.2] [--rounds 10] [--device cuda:0]

`saves`: The state consists of tensors of 64 MiB. Between two saves, one in a hundred chunks of 64 KiB changes. The
changed chunks are adjacent or spread. *call* is the duration of the call, after which the state may change. *durable*
is the time until the save survives a power cut. The methods are `Checkpointer` with digests, `Checkpointer` with `room`
for the whole state, and `torch.save` to a new file with a sync. *logged* is the number of bytes written to the log, or
the length of the file for `torch.save`. Pages that are written completely go to other files and are not included.

`publish`: One in a hundred bfloat16 elements changes, at random positions. *call* is the duration of
`Publisher.publish`. *applied* is the time until another process has applied the step to its own tensors on the same
device and has reported so through a pipe. *of it* is the duration of the subscriber's call.

Requires torch and `remanent` in the path. The results are medians of the rounds after two uncounted rounds.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from remanent.torch import Checkpointer
from remanent.weights import Publisher, Subscriber

CHUNK, TENSOR = 64 << 10, 64 << 20


def settle(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


class Ours:
    def __init__(self, directory, state, **options):
        self.run = Checkpointer(directory, extra={"state": state}, rng=False, model=torch.nn.ParameterDict(state),
                                log={"spare_bytes": 256 << 20}, **options)

    def save(self, step):
        self.saved = self.run.save(step, wait=False)

    def wait(self):
        self.saved.wait()

    def written(self):
        return self.run.store.stats()["log_bytes"]

    def close(self):
        self.run.close()


class Whole:
    """`torch.save` of the whole state to a new file, followed by a sync."""

    def __init__(self, directory, state):
        self.directory, self.state, self.bytes = Path(directory), state, 0
        self.directory.mkdir(parents=True)

    def save(self, step):
        path = self.directory / f"{step % 2}"
        with open(path, "wb") as file:
            torch.save(self.state, file)
            file.flush()
            os.fsync(file.fileno())
        self.bytes += path.stat().st_size

    def wait(self):
        pass

    def written(self):
        return self.bytes

    def close(self):
        pass


WAYS = {
    "digests": lambda directory, state, size: Ours(directory, state, digests=True),
    "room for all": lambda directory, state, size: Ours(directory, state, room=size + (64 << 20)),
    "torch.save": lambda directory, state, size: Whole(directory, state),
}


def saves(chosen, device):
    count = max(1, int(chosen.gib * (1 << 30)) // TENSOR)
    state = {f"w{at}": torch.randn(TENSOR // 2, device=device, dtype=torch.bfloat16) for at in range(count)}
    size, chunks = count * TENSOR, count * TENSOR // CHUNK
    print(f"{size / (1 << 30):.2f} GiB on {device}, {max(1, chunks // 100)} of {chunks} chunks change")
    print(f"{'':28}{'call, ms':>10}{'durable, ms':>13}{'MB logged':>12}")
    for where in ("in a row", "spread"):
        for name in chosen.ways:
            make = WAYS[name]
            directory = chosen.directory / "sparse"
            shutil.rmtree(directory, ignore_errors=True)
            way = make(directory, state, size)
            calls, ends, written = [], [], []
            for step in range(chosen.rounds + 2):
                first = step * 7
                changed = range(first, chunks, 100) if where == "spread" else range(first, first + max(1, chunks // 100))
                for chunk in changed:
                    tensor, at = divmod(chunk * CHUNK, TENSOR)
                    state[f"w{tensor}"].view(torch.int16)[at // 2 + step] ^= 1
                settle(device)
                before, began = way.written(), time.perf_counter()
                way.save(step)
                calls.append(time.perf_counter() - began)
                way.wait()
                ends.append(time.perf_counter() - began)
                written.append(way.written() - before)
            way.close()
            call, end, more = (statistics.median(each[2:]) for each in (calls, ends, written))
            print(f"{where + ', ' + name:28}{call * 1e3:>10.1f}{end * 1e3:>13.1f}{more / 1e6:>12.1f}", flush=True)
            shutil.rmtree(directory, ignore_errors=True)


def model_of(gb, device):
    count = max(1, round(gb * 1e9 / 30e6))
    return {f"w{at}": torch.zeros(15_000_000, device=device, dtype=torch.bfloat16) for at in range(count)}


def subscribe(chosen, device):
    """Applies steps in the other process. Reports the time of each step and the duration of the call."""
    subscriber, model = Subscriber(chosen.directory / "weights"), model_of(chosen.gb, device)
    while True:
        began, last = time.perf_counter(), subscriber.step
        step = subscriber.apply_to(model, timeout=0.001)
        settle(device)
        if step != last:
            print(step, time.monotonic(), time.perf_counter() - began, flush=True)
            if step is not None and step >= chosen.rounds + 2:
                return


def publish(chosen, device):
    for place in dict.fromkeys(("host", str(device).replace("cpu", "host"))):
        directory = chosen.directory / "weights"
        shutil.rmtree(directory, ignore_errors=True)
        model, calls, ends, own = model_of(chosen.gb, device), [], [], []
        size = sum(tensor.nbytes for tensor in model.values())
        with Publisher(directory, device=place, log_kept=64 << 20) as publisher:
            publisher.publish(model, 0).wait()
            arguments = [sys.executable, __file__, "subscribe", *sys.argv[2:]]
            other = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
            other.stdout.readline()
            logged = publisher.store.stats()["log_bytes"]
            for step in range(1, chosen.rounds + 3):
                for tensor in model.values():
                    where = torch.randint(0, len(tensor), (len(tensor) // 100,), device=device)
                    tensor.view(torch.int16)[where] ^= step
                settle(device)
                began, at = time.perf_counter(), time.monotonic()
                publisher.publish(model, step)
                calls.append(time.perf_counter() - began)
                told, applied, took = other.stdout.readline().split()
                assert int(told) == step, (told, step)
                ends.append(float(applied) - at)
                own.append(float(took))
            logged = (publisher.store.stats()["log_bytes"] - logged) / (chosen.rounds + 2)
            other.wait()
        call, end, its = (statistics.median(each[2:]) * 1e3 for each in (calls, ends, own))
        changed = sum(len(tensor) // 100 for tensor in model.values())
        print(f"{size / 1e9:.2f} GB on {device}, pages on {place}: call {call:.1f} ms, applied {end:.1f} ms, "
              f"of it {its:.1f} ms; {logged / changed:.2f} bytes logged for a changed element", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["saves", "publish", "subscribe"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--gib", type=float, default=8)
    parser.add_argument("--gb", type=float, default=1.2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda:0", help="`cuda:0`, or `cpu`")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="NAME")
    chosen = parser.parse_args()
    {"saves": saves, "publish": publish, "subscribe": subscribe}[chosen.what](chosen, torch.device(chosen.device))


if __name__ == "__main__":
    main()
