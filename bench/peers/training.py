#!/usr/bin/env python3
"""Measures the cost of saves for a training loop on a GPU: the added time per save, and the time until it is durable.

    training.py DIRECTORY [--parameters 350e6] [--every 40] [--saves 4] [--rounds 2] [--ranks 1] [NAME ...]

A transformer in bfloat16 is trained with AdamW on random numbers. Its whole state, all of which has changed, is saved
every `--every` steps. The loop runs without saves and with each method of saving in turn. The cost of a save is the
difference between these times. `copies alone` only copies the state to pinned memory on a separate stream and makes the
next step wait for the copies. Without a copy on the GPU, no method that saves a point-in-time state can cost less.
"stream stands" is the time for which the stream of the loop waits for a save, from the start to the end of the call and
before `optimizer.step`, measured with CUDA events. "interval" is the shortest interval between saves, measured with
consecutive saves that are one step apart.

With several ranks, each rank has one GPU, FSDP2 shards the model, and each rank saves its part. The results are those
of the first rank.

Requires torch with CUDA and `remanent` in the path. torch_checkpointing is measured if it is installed. The results are
medians of the rounds. `gpu.py` measures Orbax, which saves JAX arrays.
"""

import argparse
import contextlib
import os
import shutil
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from remanent.dcp import StorageWriter
from remanent.torch import Checkpointer

SEQUENCE, BATCH, VOCABULARY = 512, 24, 32_000


class Layer(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(width) for _ in range(2)])
        self.joined, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        heads = [each.unflatten(-1, (-1, 64)).transpose(1, 2) for each in self.joined(self.norms[0](x)).chunk(3, -1)]
        seen = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norms[1](x))))


class Transformer(torch.nn.Module):
    def __init__(self, parameters, width=1024):
        super().__init__()
        layers = max(1, round((parameters - 2 * VOCABULARY * width) / (12 * width * width)))
        self.embed = torch.nn.Embedding(VOCABULARY, width)
        self.layers = torch.nn.ModuleList([Layer(width) for _ in range(layers)])
        self.head = torch.nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def tensors_of(model, optimizer):
    """Returns this rank's part of the state."""
    tensors = list(model.state_dict().values())
    tensors += [each for state in optimizer.state.values() for each in state.values()]
    return [each.to_local() if isinstance(each, DTensor) else each for each in tensors]


class Nothing:
    """The loop without saves."""

    def __init__(self, directory, model, optimizer, size):
        self.model, self.optimizer = model, optimizer

    def save(self, step):
        pass

    def wait(self):
        pass

    def updating(self):
        """Returns a context manager in which `optimizer.step` must be called."""
        return contextlib.nullcontext()

    def close(self):
        pass


class Copies(Nothing):
    """Copies the state to pinned memory, which is the minimum work of a point-in-time save."""

    def __init__(self, directory, model, optimizer, size):
        super().__init__(directory, model, optimizer, size)
        self.stream, self.event = torch.cuda.Stream(), None
        self.tensors = tensors_of(model, optimizer)
        self.copies = [torch.empty_like(each, device="cpu", pin_memory=True) for each in self.tensors]
        self.hook = optimizer.register_step_pre_hook(self.before)

    def before(self, *given):
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)

    def save(self, step):
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for copy, tensor in zip(self.copies, self.tensors):
                copy.copy_(tensor, non_blocking=True)
            self.event = self.stream.record_event()

    def wait(self):
        self.event.synchronize()

    def close(self):
        self.hook.remove()


class Remanent(Nothing):
    def __init__(self, directory, model, optimizer, size, **options):
        ranks = dist.group.WORLD if dist.get_world_size() > 1 else None
        self.run = Checkpointer(directory, model, optimizer, process_group=ranks, **options)

    def save(self, step):
        self.saved = self.run.save(step, wait=False)

    def wait(self):
        self.saved.wait()

    def close(self):
        self.run.close()


class Dcp(Nothing):
    """PyTorch's distributed checkpoints, written in the background by each rank."""

    def __init__(self, directory, model, optimizer, size, writer=None):
        super().__init__(directory, model, optimizer, size)
        self.writer = writer
        self.directory = Path(directory)
        self.last, self.before, self.now = None, None, None
        # The fastest mode: staging in pinned memory that is allocated once.
        from torch.distributed.checkpoint.staging import BlockingAsyncStager

        self.stager = BlockingAsyncStager(cache_staged_state_dict=True)

    def save(self, step):
        self.wait()
        if self.before is not None and dist.get_rank() == 0:
            shutil.rmtree(self.before)
        self.before, self.now = self.now, self.directory / str(step)
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        writer = self.writer and self.writer(self.now)
        self.last = dcp.async_save(state, checkpoint_id=self.now, storage_writer=writer, async_stager=self.stager)

    def wait(self):
        if self.last is not None:
            self.last.result()


class TorchCheckpointing(Nothing):
    """The asynchronous saver of torch_checkpointing. It stages in pinned memory that it reuses, and another process
    writes."""

    def __init__(self, directory, model, optimizer, size):
        super().__init__(directory, model, optimizer, size)
        from torch_checkpointing import CheckpointManager

        self.directory, self.last, self.kept = Path(directory), None, []
        self.manager = CheckpointManager.Config.with_async_save().build()

    def save(self, step):
        self.wait()
        self.kept.append(self.directory / str(step))
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        self.last = self.manager.save(str(self.kept[-1]), state)
        for old in self.kept[:-2]:
            shutil.rmtree(old)
        del self.kept[:-2]

    def wait(self):
        if self.last is not None:
            self.last.result()

    def updating(self):
        return self.manager.lock()

    def close(self):
        self.manager.close()


# The number of consecutive saves that measure the interval between saves.
SAVES_IN_A_ROW = 6

WAYS = {
    "no saves": Nothing,
    "copies alone": Copies,
    "host, overlap": lambda *given: Remanent(*given, room=given[3], overlap=True),
    "host": lambda *given: Remanent(*given, room=given[3]),
    "ring of 256 MiB, overlap": lambda *given: Remanent(*given, overlap=True),
    "aside on the GPU": lambda *given: Remanent(*given, device_room=given[3]),
    "DCP async": Dcp,
    "DCP async, our storage": lambda *given: Dcp(*given, writer=StorageWriter),
    "torch_checkpointing": TorchCheckpointing,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"ways to save: {', '.join(WAYS)}")
    parser.add_argument("--parameters", type=float, default=350e6)
    parser.add_argument("--every", type=int, default=40, help="steps between two saves")
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="processes, each with a GPU")
    chosen = parser.parse_intermixed_args()
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29511")
    # Fork before this process initializes CUDA.
    others = []
    for rank in range(1, chosen.ranks):
        pid = os.fork()
        if pid == 0:
            compare(rank, chosen)
            return
        others.append(pid)
    compare(0, chosen)
    sys.exit(max((os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in others), default=0))


def compare(rank, chosen):
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=chosen.ranks)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Transformer(chosen.parameters).to(torch.bfloat16)
    if chosen.ranks > 1:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), device="cuda")

    def moment():
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def step(way):
        """Returns the CUDA events between which the update of the weights was delayed."""
        optimizer.zero_grad()
        scores = model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        held = [moment()]
        with way.updating():
            # This hook runs after the hook of the method, which was registered earlier.
            hook = optimizer.register_step_pre_hook(lambda *given: held.append(moment()))
            optimizer.step()
            hook.remove()
        return held

    for _ in range(10):
        step(Nothing(None, model, optimizer, 0))
    tensors = tensors_of(model, optimizer)
    size = sum(each.numel() * each.element_size() for each in tensors) + len(tensors) * 256
    if rank == 0:
        print(f"{size / 1e9:.2f} GB of state a rank in {len(tensors)} tensors, {chosen.ranks} × "
              f"{torch.cuda.get_device_name()}, a save every {chosen.every} steps, in {chosen.directory}")
    found = {name: [] for name in WAYS if name in chosen.names or not chosen.names}
    for _ in range(chosen.rounds):
        for name in found:
            directory = chosen.directory / "training"
            if rank == 0:
                shutil.rmtree(directory, ignore_errors=True)
            dist.barrier()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            way = WAYS[name](directory, model, optimizer, size)
            calls, stands = [], []
            # The first save allocates memory.
            way.save(0)
            step(way)
            way.wait()
            torch.cuda.synchronize()
            began = time.perf_counter()
            for save in range(1, chosen.saves + 1):
                called = [moment()]
                at = time.perf_counter()
                way.save(save)
                calls.append(time.perf_counter() - at)
                called.append(moment())
                stands.append((called, step(way)))
                for _ in range(chosen.every - 1):
                    step(way)
            torch.cuda.synchronize()
            took = time.perf_counter() - began
            way.wait()
            at = time.perf_counter()
            way.save(chosen.saves + 1)
            way.wait()
            durable = time.perf_counter() - at
            at = time.perf_counter()
            for save in range(SAVES_IN_A_ROW):
                way.save(chosen.saves + 2 + save)
                step(way)
            way.wait()
            torch.cuda.synchronize()
            interval = (time.perf_counter() - at) / SAVES_IN_A_ROW
            extra = torch.cuda.memory_allocated() - before
            way.close()
            dist.barrier()
            stood = statistics.median(sum(begin.elapsed_time(end) for begin, end in each) for each in stands)
            call = statistics.median(calls)
            found[name].append((took / chosen.saves, call, max(calls), stood, durable, interval, extra))
            if rank == 0:
                print(f"  {name}: {took:.2f} s", file=sys.stderr, flush=True)
    dist.destroy_process_group()
    if rank:
        return
    alone = statistics.median(each[0] for each in found["no saves"])
    print(f"{'':28}{'ms in the call':>16}{'worst':>8}{'stream stands':>15}{'added to the loop, ms':>24}{'of it':>8}"
          f"{'durable, s':>12}{'interval, s':>13}{'MiB on GPU':>12}")
    for name, rounds in found.items():
        loop, call, worst, stood, durable, interval, extra = (statistics.median(each) for each in zip(*rounds))
        added = loop - alone
        print(f"{name:28}{call * 1e3:>16.1f}{worst * 1e3:>8.1f}{stood:>15.1f}{added * 1e3:>24.1f}{added / alone:>8.2%}"
              f"{durable:>12.2f}{interval:>13.2f}{extra / (1 << 20):>12.0f}")
    print(f"a step takes {alone / chosen.every * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
