#!/usr/bin/env python3
"""Records the allocations of a training step, and replays any trace of allocations through PyTorch's allocator.

    allocations.py record steps.jsonl [--parameters 300e6] [--steps 5] [--batch 8] [--sequence 512] [--vary]
    allocations.py replay steps.jsonl kv.jsonl [--rounds 5] [--json]

`record` trains a transformer on random numbers, in bfloat16 with float32 parameters and AdamW. It writes all requests
to PyTorch's allocator to a file, from the first parameter to the last step. With `--vary`, each step has a different
sequence length, as batches of text do. `replay` makes the calls of a trace again on one thread and measures their time,
first with an empty cache, then with the cache of the previous replay. A call from Python takes longer than the
allocator itself, so the same loop is also measured with calls that do nothing. `remanent-bench allocations --trace
FILE` replays the same file, and writes the KV trace with `--save`.

A trace has one JSON object per line: {"alloc": ID, "len": BYTES, "stream": N} or {"free": ID}. Streams are numbered in
the order of their first use; the default stream is 0.

Requires torch with CUDA.
"""

import argparse
import json
import statistics
import sys
import time

import torch

VOCABULARY, WIDTH = 32_000, 1024


def model_of(parameters):
    """Returns a transformer with about this number of parameters."""
    layers = max(1, round((parameters - 2 * VOCABULARY * WIDTH) / (12 * WIDTH * WIDTH)))
    layer = torch.nn.TransformerEncoderLayer(WIDTH, WIDTH // 64, 4 * WIDTH, 0.0, "gelu", batch_first=True,
                                             norm_first=True)
    return torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, WIDTH),
                               torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False),
                               torch.nn.Linear(WIDTH, VOCABULARY))


def train(options):
    torch.manual_seed(1)
    model = model_of(options.parameters).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(options.steps):
        length = options.sequence
        if options.vary:
            length = int(torch.randint(options.sequence // 8, options.sequence // 4 + 1, ())) * 4
        tokens = torch.randint(0, VOCABULARY, (options.batch, length + 1), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            guesses = model(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(guesses.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}", file=sys.stderr)
    return sum(parameter.numel() for parameter in model.parameters())


def events_of(entries):
    """Returns the events of PyTorch's memory history. Each block gets a unique number, because PyTorch reuses
    addresses."""
    live, streams, events, next_id = {}, {0: 0}, [], 0
    for entry in entries:
        if entry["action"] == "alloc" and entry["size"] > 0:
            live[entry["addr"]] = next_id
            stream = streams.setdefault(entry["stream"], len(streams))
            events.append({"alloc": next_id, "len": entry["size"], "stream": stream})
            next_id += 1
        elif entry["action"] == "free_requested" and entry["addr"] in live:
            events.append({"free": live.pop(entry["addr"])})
    return events


def record(options):
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(context=None)
    parameters = train(options)
    torch.cuda.synchronize()
    history = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    torch.cuda.memory._record_memory_history(enabled=None)
    events = events_of(history)
    with open(options.trace, "w") as file:
        for event in events:
            file.write(json.dumps(event) + "\n")
    peaks = Torch.peaks()
    print(f"{len(events)} events of {options.steps} steps, {parameters / 1e6:.0f} million parameters, "
          f"torch {torch.__version__}, {torch.cuda.get_device_name()}: live at most "
          f"{peaks['live'] / 2**20:.1f} MiB, reserved {peaks['reserved'] / 2**20:.1f}")


class Nothing:
    """Calls of the same shape that allocate nothing."""

    allocate, free = staticmethod(max), staticmethod(abs)
    peaks = staticmethod(dict)


class Torch:
    """PyTorch's allocator, called in the same way as by `torch.cuda.caching_allocator_alloc`."""

    allocate = staticmethod(torch._C._cuda_cudaCachingAllocator_raw_alloc)
    free = staticmethod(torch._C._cuda_cudaCachingAllocator_raw_delete)

    @staticmethod
    def peaks():
        stats = torch.cuda.memory_stats()
        names = {"live": "requested_bytes", "allocated": "allocated_bytes", "reserved": "reserved_bytes"}
        return {name: stats[f"{counted}.all.peak"] for name, counted in names.items()}


def read(path):
    """Returns the events of a trace, the number of slots and the number of streams. An event is a slot with a length
    and a stream, or a slot alone, which is freed."""
    slots, unused, live, events, streams = 0, [], {}, [], 1
    with open(path) as file:
        for line in file:
            event = json.loads(line)
            if "alloc" in event:
                if unused:
                    slot = unused.pop()
                else:
                    slot, slots = slots, slots + 1
                assert event["alloc"] not in live, line
                live[event["alloc"]] = slot
                stream = event.get("stream", 0)
                streams = max(streams, stream + 1)
                events.append((slot, event["len"], stream))
            else:
                slot = live.pop(event["free"])
                unused.append(slot)
                events.append((slot, 0, 0))
    return events, slots, streams


def play(allocator, events, slots, times=None):
    """Makes all calls and returns their total duration in nanoseconds."""
    blocks, now = [0] * slots, time.perf_counter_ns
    allocate, free = allocator.allocate, allocator.free
    begun = now()
    if times is None:
        for slot, size, stream in events:
            if size:
                blocks[slot] = allocate(size, stream)
            else:
                free(blocks[slot])
                blocks[slot] = 0
    else:
        for slot, size, stream in events:
            before = now()
            if size:
                blocks[slot] = allocate(size, stream)
            else:
                free(blocks[slot])
                blocks[slot] = 0
            times.append(now() - before)
    took = now() - begun
    for block in blocks:
        if block:
            free(block)
    return took


def replay_one(path, rounds):
    events, slots, streams = read(path)
    # The default stream, and new streams that exist as long as the replay.
    made = [torch.cuda.Stream() for _ in range(streams - 1)]
    handles = [0] + [stream.cuda_stream for stream in made]
    events = [(slot, size, handles[stream]) for slot, size, stream in events]
    figures = {}
    for round_ in range(rounds):
        for allocator in (Nothing, Torch) if round_ % 2 == 0 else (Torch, Nothing):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            times = []
            first, again = (play(allocator, events, slots) / len(events) for _ in range(2))
            play(allocator, events, slots, times)
            times.sort()
            figure = {"first": first, "again": again, "p50": times[len(times) // 2],
                      "p99": times[len(times) * 99 // 100], **allocator.peaks()}
            figures.setdefault(allocator, []).append(figure)
    return len(events), {
        allocator.__name__: {name: statistics.median(figure[name] for figure in taken) for name in taken[0]}
        for allocator, taken in figures.items()}


def replay(options):
    torch.cuda.init()
    for path in options.trace:
        events, figures = replay_one(path, options.rounds)
        if options.json:
            print(json.dumps({"trace": path, "events": events, "torch": torch.__version__,
                              "device": torch.cuda.get_device_name(), **figures}))
            continue
        print(f"{path}: {events} events, medians of {options.rounds} rounds, ns an event, torch {torch.__version__}, "
              f"{torch.cuda.get_device_name()}")
        print(f"{'':10}{'first':>10}{'again':>10}{'p50':>8}{'p99':>10}")
        for name, figure in figures.items():
            print(f"{name:10}{figure['first']:10.0f}{figure['again']:10.0f}{figure['p50']:8.0f}{figure['p99']:10.0f}")
        peaks = figures["Torch"]
        print(f"live at most {peaks['live'] / 2**20:.1f} MiB, rounded {peaks['allocated'] / 2**20:.1f}, reserved "
              f"{peaks['reserved'] / 2**20:.1f}: {1 - peaks['live'] / peaks['reserved']:.4f} of it beyond what is live")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("record")
    command.add_argument("trace")
    command.add_argument("--parameters", type=float, default=300e6)
    command.add_argument("--steps", type=int, default=5)
    command.add_argument("--batch", type=int, default=8)
    command.add_argument("--sequence", type=int, default=512)
    command.add_argument("--vary", action="store_true")
    command.set_defaults(run=record)
    command = commands.add_parser("replay")
    command.add_argument("trace", nargs="+")
    command.add_argument("--rounds", type=int, default=5)
    command.add_argument("--json", action="store_true")
    command.set_defaults(run=replay)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
