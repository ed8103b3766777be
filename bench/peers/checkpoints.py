#!/usr/bin/env python3
"""Compares checkpoint libraries with Remanent when the writer is killed or the files are damaged.

    python3 bench/peers/checkpoints.py [--kills 30] [--flips 100] [--cuts 30] [--seed 1] [--dir DIR] [NAME ...]

Each library saves a first version of a state, then a second version over it, as its documentation shows. The process is
killed at a random time during the second save. The state is then loaded. The result is *whole* if all bytes are those
of one version, *refused* for an error or a crash, and *wrong* for any other result without an error. Flipped bits and
truncations are applied to the first version: in every other trial to the longest file, otherwise to a random file.

Requires only Python. Libraries that are not installed are listed and skipped. Remanent is run as `$REMANENT` (a path;
`remanent` by default) and requires the library safetensors, whose files it imports.
"""

import argparse
import functools
import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

TENSORS = 8
TENSOR_LEN = 4 << 20
LOAD_SECONDS_MAX = 60
# The results of a child process, which are its exit status.
FIRST, SECOND, REFUSED, WRONG = range(4)


@functools.cache
def state(version):
    """Returns the tensors of a version as bytes, by name."""
    return {f"layer.{n}": random.Random(f"{version}.{n}").randbytes(TENSOR_LEN) for n in range(TENSORS)}


class TorchSave:
    name = "torch.save"
    needs = ["torch"]

    def save(self, path, tensors):
        import torch

        torch.save(as_torch(tensors), path + ".pt")

    def load(self, path):
        import torch

        return from_torch(torch.load(path + ".pt", weights_only=True))


class Safetensors:
    name = "safetensors"
    needs = ["safetensors", "numpy"]

    def save(self, path, tensors):
        from safetensors.numpy import save_file

        save_file(as_numpy(tensors), path + ".safetensors")

    def load(self, path):
        from safetensors.numpy import load_file

        return from_numpy(load_file(path + ".safetensors"))


class Dcp:
    name = "torch.distributed.checkpoint"
    needs = ["torch"]

    def save(self, path, tensors):
        import torch.distributed.checkpoint as dcp

        dcp.save(as_torch(tensors), checkpoint_id=path, no_dist=True)

    def load(self, path):
        import torch
        import torch.distributed.checkpoint as dcp

        found = {name: torch.zeros(TENSOR_LEN, dtype=torch.uint8) for name in state(0)}
        dcp.load(found, checkpoint_id=path, no_dist=True)
        return from_torch(found)


class TorchCheckpointing:
    """Saves each version to a separate folder. A load uses the newest readable version."""

    name = "torch_checkpointing"
    needs = ["torch", "torch_checkpointing"]

    def manager(self, path):
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.config import SyncCheckpointSaverConfig

        return CheckpointManager.Config(save=SyncCheckpointSaverConfig(), **self.storage(path)).build()

    def storage(self, path):
        return {}

    def versions(self, path):
        steps = (name for name in os.listdir(path) if name.startswith("step-")) if os.path.exists(path) else ()
        return sorted((int(name.removeprefix("step-")) for name in steps), reverse=True)

    def save(self, path, tensors):
        step = max(self.versions(path), default=0) + 1
        os.makedirs(path, exist_ok=True)
        manager = self.manager(path)
        manager.save(f"{path}/step-{step}", {"model": as_torch(tensors)})
        manager.close()

    def load(self, path):
        import torch

        for step in self.versions(path):
            found = {name: torch.zeros(TENSOR_LEN, dtype=torch.uint8) for name in state(0)}
            try:
                self.manager(path).load(f"{path}/step-{step}", into={"model": found})
            except Exception:
                continue
            return from_torch(found)
        raise LookupError("no version can be read")


class RemanentStorage(TorchCheckpointing):
    name = "the same with Remanent's storage"
    needs = ["torch", "torch_checkpointing", "remanent"]

    def storage(self, path):
        from remanent.integrations.torch_checkpointing import RemanentStorageConfig

        return {"storage_config": RemanentStorageConfig(path)}


class RemanentPython:
    name = "Remanent, from Python"
    needs = ["torch", "remanent"]

    def save(self, path, tensors):
        from remanent.torch import save_file

        save_file(as_torch(tensors), path)

    def load(self, path):
        from remanent.torch import load_file

        return from_torch(load_file(path))


class Orbax:
    name = "orbax"
    needs = ["orbax.checkpoint", "jax", "numpy"]

    def save(self, path, tensors):
        import orbax.checkpoint as ocp

        with ocp.CheckpointManager(path, options=ocp.CheckpointManagerOptions(max_to_keep=1)) as manager:
            step = (manager.latest_step() or 0) + 1
            manager.save(step, args=ocp.args.StandardSave(as_numpy(tensors)))
            manager.wait_until_finished()

    def load(self, path):
        import numpy
        import orbax.checkpoint as ocp

        like = {name: numpy.zeros(TENSOR_LEN, numpy.uint8) for name in state(0)}
        with ocp.CheckpointManager(path) as manager:
            found = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(like))
        return from_numpy(found)


class RocksDb:
    """Writes all tensors in one synced batch."""

    name = "rocksdb"
    needs = ["rocksdict"]

    def save(self, path, tensors):
        import rocksdict

        batch, synced = rocksdict.WriteBatch(raw_mode=True), rocksdict.WriteOptions()
        synced.sync = True
        for name, data in tensors.items():
            batch.put(name.encode(), data)
        store = rocksdict.Rdict(path, rocksdict.Options(raw_mode=True))
        store.write(batch, synced)
        store.close()

    def load(self, path):
        import rocksdict

        store = rocksdict.Rdict(path, access_type=rocksdict.AccessType.read_only())
        # Its iterator ends at a damaged block without an error.
        return {name: bytes(store[name.encode()]) for name in state(0)}


class Remanent:
    name = "Remanent"
    needs = ["safetensors", "numpy"]

    def save(self, path, tensors):
        from safetensors.numpy import save_file

        file = path + ".import.safetensors"
        save_file(as_numpy(tensors), file)
        tool("import", path, file)
        os.remove(file)

    def load(self, path):
        from safetensors.numpy import load_file

        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "found.safetensors")
            tool("export", path, file)
            return from_numpy(load_file(file))


def tool(*arguments):
    subprocess.run([os.environ.get("REMANENT", "remanent"), "-q", *arguments], check=True, capture_output=True)


def as_numpy(tensors):
    import numpy

    return {name: numpy.frombuffer(data, numpy.uint8) for name, data in tensors.items()}


def from_numpy(arrays):
    import numpy

    return {name: numpy.asarray(array).tobytes() for name, array in arrays.items()}


def as_torch(tensors):
    import torch

    return {name: torch.frombuffer(bytearray(data), dtype=torch.uint8) for name, data in tensors.items()}


def from_torch(tensors):
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def in_child(work):
    """Starts `work` in a child process, whose own children are killed with it, and returns the process id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    os.setsid()
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    try:
        status = work()
    except BaseException:  # any error of a library about its input
        status = REFUSED
    os._exit(status)


def ended(child, seconds):
    """Returns the exit status of a process, or None if the process is still running after `seconds` seconds."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.0005)
    return None


def kill(child):
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:  # it does not lead a group yet
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def loaded(peer, path):
    """Returns the version that a library loads from a path. A hang or a crash counts as REFUSED."""

    def load():
        found = peer.load(path)
        return next((which for which, version in ((FIRST, 1), (SECOND, 2)) if found == state(version)), WRONG)

    child = in_child(load)
    status = ended(child, LOAD_SECONDS_MAX)
    if status is None:
        kill(child)
    return status if status in (FIRST, SECOND, WRONG) else REFUSED


def saving(peer, path, version):
    """Starts a save in a child process and returns once the process has imported its libraries."""
    reader, writer = os.pipe()
    tensors = state(version)

    def save():
        for need in peer.needs:
            importlib.import_module(need)
        os.write(writer, b".")
        peer.save(path, tensors)
        return 0

    child = in_child(save)
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)
    return child


def saved(peer, path, version):
    """Saves a version and returns the duration in seconds."""
    child = saving(peer, path, version)
    began = time.monotonic()
    status = ended(child, 10 * LOAD_SECONDS_MAX)
    if status != 0:
        sys.exit(f"{peer.name} cannot save: its process ended with {status}")
    return time.monotonic() - began


def files(folder):
    found = (os.path.join(inner, name) for inner, _, names in os.walk(folder) for name in names)
    return sorted(file for file in found if os.path.getsize(file) > 0)


def row(counts):
    return "".join(f"{counts.get(which, 0):>9}" for which in ("whole", "refused", "wrong"))


def tally(outcomes):
    counts = {}
    for outcome in outcomes:
        which = {FIRST: "whole", SECOND: "whole", REFUSED: "refused", WRONG: "wrong"}[outcome]
        counts[which] = counts.get(which, 0) + 1
    return counts


def kills(peer, folder, count, chance):
    home = os.path.join(folder, "first")
    os.mkdir(home)
    saved(peer, os.path.join(home, "state"), 1)
    trial = os.path.join(folder, "trial")
    shutil.copytree(home, trial)
    took = saved(peer, os.path.join(trial, "state"), 2)
    for _ in range(count):
        shutil.rmtree(trial)
        shutil.copytree(home, trial)
        child = saving(peer, os.path.join(trial, "state"), 2)
        if ended(child, chance.uniform(0, took)) is None:
            kill(child)
        yield loaded(peer, os.path.join(trial, "state"))


def damages(peer, folder, count, chance, damage):
    home, trial = os.path.join(folder, "first"), os.path.join(folder, "trial")
    for number in range(count):
        shutil.rmtree(trial)
        shutil.copytree(home, trial)
        found = files(trial)
        file = max(found, key=os.path.getsize) if number % 2 else chance.choice(found)
        with open(file, "r+b") as opened:
            damage(opened, os.path.getsize(file), chance)
        outcome = loaded(peer, os.path.join(trial, "state"))
        # The second version was never saved.
        yield WRONG if outcome == SECOND else outcome


def flip(file, length, chance):
    at = chance.randrange(length)
    file.seek(at)
    byte = file.read(1)[0] ^ 1 << chance.randrange(8)
    file.seek(at)
    file.write(bytes([byte]))


def cut(file, length, chance):
    file.truncate(chance.randrange(length))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="libraries to try; all, if none is named")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--flips", type=int, default=100)
    parser.add_argument("--cuts", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", help="where to save; a temporary folder is made in it")
    asked = parser.parse_args()
    peers = [Remanent(), RemanentPython(), RemanentStorage(), TorchSave(), Safetensors(), Dcp(), TorchCheckpointing(),
             Orbax(), RocksDb()]
    unknown = set(asked.names) - {peer.name for peer in peers}
    if unknown:
        parser.error(f"no such library: {', '.join(sorted(unknown))}")
    heads = [f"killed while saving, {asked.kills}", f"one bit flipped, {asked.flips}", f"cut short, {asked.cuts}"]
    print(f"{'':<34}" + "".join(f"{head:>27}" for head in heads))
    print(f"{'':<34}" + "".join(f"{which:>9}" for which in ("whole", "refused", "wrong")) * 3)
    for peer in peers:
        if asked.names and peer.name not in asked.names:
            continue
        missing = [need for need in peer.needs if importlib.util.find_spec(need.split(".")[0]) is None]
        if missing:
            print(f"{peer.name:<34} SKIPPED: there is no {', '.join(missing)}")
            continue
        chance = random.Random(asked.seed)
        with tempfile.TemporaryDirectory(dir=asked.dir) as folder:
            columns = [
                tally(kills(peer, folder, asked.kills, chance)),
                tally(damages(peer, folder, asked.flips, chance, flip)),
                tally(damages(peer, folder, asked.cuts, chance, cut)),
            ]
        print(f"{peer.name:<34}" + "".join(row(counts) for counts in columns), flush=True)


if __name__ == "__main__":
    main()
