#!/usr/bin/env python3
"""Compares Remanent with common methods of saving and loading the state of one GPU.

    cargo build --release
    python3 bench/peers/gpu.py DIR --gib 1 8 16    # on a disk
    python3 bench/peers/gpu.py /dev/shm            # in memory: the cost of the software alone

All methods are measured in turn, round by round, each in a separate process. The state is random bytes in GPU memory. A
save ends when the whole state is durable. If a library does not sync its files, this script syncs them and includes the
time. Before a cold load, the files are dropped from the page cache. Before a warm load, all files are in the page
cache. A load ends when the state is in GPU memory. The loaded state is compared with the saved state, which is not
included in the time. "caller held up" is the time until the caller may change the state again. Remanent permits commits
during a save, so its value is the longest duration of such a commit. Remanent verifies a checksum of every page during
a load; the other libraries verify none. `remanent.torch` is the same store used from Python: `save_file` and
`load_file`, and a `Checkpointer` whose `room` fits the whole state. The checkpointer is opened before the measurement
and restores into the existing tensors. Libraries that are not installed are listed and skipped.

`--device host` runs everything on a machine without a GPU.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GIB = 1 << 30
TENSORS = 64
PAGE_LEN = "2MiB"
ROOT = Path(__file__).resolve().parents[2]


def files_of(folder):
    return [path for path in Path(folder).rglob("*") if path.is_file()]


def sync(folder):
    """Syncs files and their folder."""
    for path in [*files_of(folder), *(path for path in Path(folder).rglob("*") if path.is_dir()), Path(folder)]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def forget(folder):
    """Drops synced files from the page cache."""
    for path in files_of(folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


class Torch:
    """A state of PyTorch tensors."""

    def __init__(self, device, size):
        import torch

        self.torch = torch
        self.device = "cpu" if device == "host" else device
        each = size // TENSORS
        make = lambda: torch.randint(0, 256, (each,), dtype=torch.uint8, device=self.device)
        self.state = {f"t{index}": make() for index in range(TENSORS)}
        self.bytes = each * TENSORS
        self.wait()

    # The duration of the last load, if the method `load` also does other work.
    took = None

    def prepare(self, folder):
        """Creates an empty folder for a save. Not included in the time."""
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)

    def wait(self):
        if self.device != "cpu":
            self.torch.cuda.synchronize()

    def equals(self, loaded):
        return all(self.torch.equal(value, loaded[name]) for name, value in self.state.items())


class TorchSave(Torch):
    def save(self, folder):
        self.torch.save(self.state, f"{folder}/state.pt")

    def load(self, folder):
        return self.torch.load(f"{folder}/state.pt", map_location=self.device, weights_only=True)


class SaveFile(Torch):
    """`remanent.torch.save_file` and `load_file`."""

    def __init__(self, device, size):
        import remanent.torch

        self.library = remanent.torch
        super().__init__(device, size)

    def save(self, folder):
        self.library.save_file(self.state, folder)

    def load(self, folder):
        return self.library.load_file(folder, device=self.device)


class Run(SaveFile):
    """`remanent.torch.Checkpointer`, as used in a training loop."""

    run = None

    def prepare(self, folder):
        if self.run is not None:
            self.run.close()
        super().prepare(folder)
        held = self.torch.nn.ParameterDict(
            {name: self.torch.nn.Parameter(value, requires_grad=False) for name, value in self.state.items()})
        self.run = self.library.Checkpointer(folder, held, rng=False, room=self.bytes + (64 << 20))

    def begin(self, folder):
        return self.run.save(1, wait=False).wait

    def save(self, folder):
        self.begin(folder)()

    def load(self, folder):
        if not hasattr(self, "expected"):
            self.expected = {name: value.clone() for name, value in self.state.items()}
        for value in self.state.values():
            value.zero_()
        self.wait()
        started = time.perf_counter()
        self.run.restore()
        self.wait()
        self.took = time.perf_counter() - started
        return self.expected


class Safetensors(Torch):
    def save(self, folder):
        from safetensors.torch import save_file

        save_file(self.state, f"{folder}/state.safetensors")

    def load(self, folder):
        from safetensors.torch import load_file

        return load_file(f"{folder}/state.safetensors", device=self.device)


class Dcp(Torch):
    """torch.distributed.checkpoint with one rank."""

    def __init__(self, device, size):
        super().__init__(device, size)
        import torch.distributed as distributed
        import torch.distributed.checkpoint as checkpoint

        self.checkpoint = checkpoint
        self.rendezvous = tempfile.NamedTemporaryFile()
        distributed.init_process_group("gloo", init_method=f"file://{self.rendezvous.name}", rank=0, world_size=1)

    def writer(self, folder):
        return self.checkpoint.FileSystemWriter(
            folder, thread_count=8, sync_files=True, overwrite=True, cache_staged_state_dict=self.is_staged
        )

    is_staged = False

    def save(self, folder):
        self.checkpoint.save(self.state, storage_writer=self.writer(folder))

    def load(self, folder):
        loaded = {name: self.torch.empty_like(value) for name, value in self.state.items()}
        self.checkpoint.load(loaded, checkpoint_id=folder)
        return loaded


class DcpAsync(Dcp):
    """`dcp.async_save`, with staging memory that is reused by the next save."""

    is_staged = True
    kept_writer = None

    def begin(self, folder):
        if self.kept_writer is None:
            self.kept_writer = self.writer(folder)
        saving = self.checkpoint.async_save(self.state, storage_writer=self.kept_writer)
        saving = getattr(saving, "upload_completion", saving)
        return saving.result

    def save(self, folder):
        self.begin(folder)()


class Orbax:
    """A state of JAX arrays."""

    def __init__(self, device, size):
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        if device == "host":
            os.environ["JAX_PLATFORMS"] = "cpu"
        import jax
        import orbax.checkpoint

        self.jax = jax
        each = size // TENSORS // 4
        key = jax.random.key(0)
        bits = lambda index: jax.random.bits(jax.random.fold_in(key, index), (each,), dtype="uint32")
        self.state = {f"t{index}": bits(index) for index in range(TENSORS)}
        self.bytes = each * TENSORS * 4
        self.wait()
        self.checkpointer = orbax.checkpoint.StandardCheckpointer()

    took, prepare = None, Torch.prepare

    def wait(self):
        self.jax.block_until_ready(self.state)

    def begin(self, folder):
        self.checkpointer.save(f"{folder}/state", self.state)
        return self.checkpointer.wait_until_finished

    def save(self, folder):
        self.begin(folder)()

    def load(self, folder):
        return self.jax.block_until_ready(self.checkpointer.restore(f"{folder}/state", self.state))

    def equals(self, loaded):
        return all(bool((value == loaded[name]).all()) for name, value in self.state.items())


PEERS = {
    "remanent.torch, save_file": SaveFile,
    "remanent.torch, Checkpointer": Run,
    "torch.save": TorchSave,
    "safetensors": Safetensors,
    "DCP": Dcp,
    "DCP, async": DcpAsync,
    "Orbax": Orbax,
}


def one_peer(name, folder, device, size):
    """Measures one round of one method in the child process, and prints the result as one line of JSON."""
    try:
        peer = PEERS[name](device, size)
    except ImportError as error:
        return {"left_out": str(error)}
    target = f"{folder}/peer"

    def save():
        peer.prepare(target)
        peer.wait()
        started = time.perf_counter()
        finish = peer.begin(target) if hasattr(peer, "begin") else None
        stalled = time.perf_counter() - started
        if finish:
            finish()
        else:
            peer.save(target)
            stalled = time.perf_counter() - started
        sync(target)
        return time.perf_counter() - started, stalled

    def load():
        started = time.perf_counter()
        loaded = peer.load(target)
        peer.wait()
        took = peer.took or time.perf_counter() - started
        if not peer.equals(loaded):
            raise SystemExit(f"{name} loaded something else than it saved")
        return took

    # The first save allocates memory that later saves reuse.
    save()
    saved, stalled = save()
    forget(target)
    cold = load()
    warm = load()
    rate = lambda seconds: peer.bytes / seconds / 1e9
    return {"save": rate(saved), "stall_ms": 1e3 * stalled, "cold": rate(cold), "warm": rate(warm)}


def ours(folder, device, size, program):
    """Measures one round of Remanent, and of raw reads and writes of the same bytes."""

    def figures(what):
        command = [program, what, folder, "--device", device, "--bytes", str(size)]
        command += ["--page-len", PAGE_LEN, "--rounds", "1", "--json"]
        lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
        found = map(json.loads, lines)
        return {figure["figure"]: figure for figure in found if "figure" in figure}

    saved, loaded = figures("snapshot"), figures("restore")
    gigabytes = lambda figure: figure["median"] / 1e9
    us = {
        "save": gigabytes(saved["full, durable"]),
        # The longest duration of a commit during the save.
        "stall_ms": saved["hot page, Applied, during a snapshot"]["latency_us"]["worst"] / 1e3,
        "cold": gigabytes(loaded["open, cold"]),
        "warm": gigabytes(loaded["open, warm"]),
    }
    raw = {
        "save": gigabytes(saved["raw, 4 threads past the cache, synced"]),
        "cold": gigabytes(loaded["raw, 4 threads past the cache"]),
        "warm": gigabytes(loaded["raw, 4 threads through the cache"]),
    }
    return {"Remanent": us, "raw, 4 threads": raw}


def child(name, gib, arguments):
    """Measures one round of a method in a child process."""
    command = [sys.executable, __file__, arguments.dir, "--peer", name]
    command += ["--device", arguments.device, "--gib", str(gib)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if ended.returncode != 0:
        said = ended.stderr.strip().splitlines()
        return {"left_out": said[-1] if said else f"it ended with {ended.returncode}"}
    return json.loads(ended.stdout.splitlines()[-1])


def compare(gib, arguments):
    rounds, left_out = {}, {}

    def note(number, found):
        for name, values in found.items():
            shown = ", ".join(f"{column} {value:.2f}" for column, value in values.items())
            print(f"round {number + 1} of {arguments.rounds}: {name}: {shown}", file=sys.stderr)
            for column, value in values.items():
                rounds.setdefault(name, {}).setdefault(column, []).append(value)

    for number in range(arguments.rounds):
        with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
            note(number, ours(folder, arguments.device, int(gib * GIB), arguments.bench))
        for name in arguments.only or PEERS:
            if name not in left_out:
                result = child(name, gib, arguments)
                if "left_out" in result:
                    left_out[name] = result["left_out"]
                else:
                    note(number, {name: result})

    columns = {
        "save": "saved, durable, GB/s",
        "stall_ms": "caller held up, ms",
        "cold": "loaded cold, GB/s",
        "warm": "loaded warm, GB/s",
    }
    print(f"{gib:g} GiB in {arguments.dir}, {arguments.device}, medians of {arguments.rounds} rounds\n")
    print(f"| | {' | '.join(columns.values())} |\n|---|{'---|' * len(columns)}")
    for name, values in rounds.items():
        shown = [f"{statistics.median(values[column]):.2f}" if column in values else "" for column in columns]
        print(f"| {name} | {' | '.join(shown)} |")
    for name, reason in left_out.items():
        print(f"\nleft out: {name}: {reason}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", help="where to save; its disk, or memory, is what is measured")
    parser.add_argument("--gib", type=float, nargs="+", default=[4], help="sizes of the state (4)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these peers alone")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda:0", help="`cuda:0`, or `host`")
    parser.add_argument("--bench", default=str(ROOT / "target/release/remanent-bench"), help="the built program")
    parser.add_argument("--peer", choices=PEERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
            print(json.dumps(one_peer(arguments.peer, folder, arguments.device, int(arguments.gib[0] * GIB))))
        return
    for gib in arguments.gib:
        compare(gib, arguments)


if __name__ == "__main__":
    main()
