"""Measures which files methods of saving a tensor sync, the disk space of a second save, and whether saves are atomic.

    python3 bench/peers/saves.py [DIR]

Each library saves 16 MB as its documentation shows. *Synced* is the number of files and folders in DIR that the first
save syncs, counted by strace. *Second save* is the disk space of a save after one element changed. *One moment* counts,
of 20 saves that return before they are written, those that contain no value assigned after the call returned.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
WAYS = ["torch.save", "safetensors", "dcp", "orbax", "remanent", "remanent-digests", "remanent-save_file", "rocksdb"]
ELEMENTS, TRIES = 4_000_000, 20


def saver(way: str, folder: str) -> Any:
    """Returns `save(state, number, waits)`, which returns a function that waits and one that loads."""
    if way == "torch.save":
        import torch
        return lambda state, number, waits: torch.save(state, f"{folder}/{number}")
    if way == "safetensors":
        from safetensors.torch import save_file
        return lambda state, number, waits: save_file(state, f"{folder}/{number}")
    if way == "remanent-save_file":
        from remanent.torch import save_file as save_version
        return lambda state, number, waits: save_version(state, f"{folder}/versions")
    if way == "rocksdb":
        import rocksdict
        store, synced = rocksdict.Rdict(f"{folder}/rocksdb", rocksdict.Options(raw_mode=True)), rocksdict.WriteOptions()
        synced.sync = True
        return lambda state, number, waits: store.put(b"w", state["w"].numpy().tobytes(), write_opt=synced)
    if way == "dcp":
        import torch.distributed.checkpoint as dcp

        def save_dcp(state: Any, number: int, waits: bool) -> Any:
            path = f"{folder}/{number}"
            saving = (dcp.save if waits else dcp.async_save)(state, checkpoint_id=path, no_dist=True)

            def load() -> Any:
                getattr(saving, "upload_completion", saving).result()
                target = {"w": state["w"] * 0}
                dcp.load(target, checkpoint_id=path, no_dist=True)
                return target["w"]
            return load
        return save_dcp
    if way == "orbax":
        import numpy as np
        import orbax.checkpoint as ocp
        manager = ocp.CheckpointManager(f"{folder}/orbax")

        def save_orbax(state: Any, number: int, waits: bool) -> Any:
            manager.save(number, args=ocp.args.StandardSave({"w": state["w"].numpy()}))

            def load() -> Any:
                manager.wait_until_finished()
                target = {"w": np.zeros(ELEMENTS, "float32")}
                return manager.restore(number, args=ocp.args.StandardRestore(target))["w"]
            if waits:
                manager.wait_until_finished()
            return load
        return save_orbax
    import torch
    from remanent.torch import Checkpointer
    live = {"w": torch.zeros(ELEMENTS)}
    run = Checkpointer(f"{folder}/run", extra={"state": live}, rng=False, keep=99, digests=way.endswith("digests"))

    def save_run(state: Any, number: int, waits: bool) -> Any:
        live["w"].copy_(state["w"])
        saved = run.save(number, wait=waits)
        live["w"].fill_(-1)

        def load() -> Any:
            saved.wait()
            run.restore(number)
            return live["w"].clone()
        return load
    return save_run


def used(folder: str) -> int:
    return sum(os.stat(os.path.join(path, file)).st_blocks * 512 for path, _, files in os.walk(folder) for file in files)


def one(way: str, folder: str, syncs_only: bool) -> None:
    import torch
    save = saver(way, folder)
    weights = {"w": torch.rand(ELEMENTS, generator=torch.Generator().manual_seed(0))}
    save(weights, 0, True)
    if syncs_only:
        return
    first = used(folder)
    weights["w"][5] = -5
    save(weights, 1, True)
    added = used(folder) - first
    right = "-"
    if way in ("dcp", "orbax", "remanent"):
        hits = 0
        for number in range(2, 2 + TRIES):
            weights["w"].fill_(number)
            load = save(weights, number, False)
            weights["w"].fill_(-1)
            hits += bool((torch.as_tensor(load()) == number).all())
        right = f"{hits} of {TRIES}"
    print(f"{first / 1e6:.1f} | {added / 1e6:.1f} | {right}", flush=True)


def main() -> None:
    if len(sys.argv) > 2:
        one(sys.argv[1], sys.argv[2], sys.argv[3:] == ["syncs"])
        os._exit(0)
    where = sys.argv[1] if len(sys.argv) > 1 else None
    print("| way | synced | first save, MB | second save, MB | one moment |")
    print("|---|---|---|---|---|")
    for way in WAYS:
        folder = tempfile.mkdtemp(dir=where)
        trace = Path(folder + ".trace")
        strace = ["strace", "-f", "-y", "-e", "trace=fsync,fdatasync", "-o", str(trace)]
        subprocess.run([*strace, sys.executable, __file__, way, folder, "syncs"], check=True, capture_output=True)
        synced = set(re.findall(rf"f(?:data)?sync\(\d+<({re.escape(folder)}[^>]*)>", trace.read_text()))
        trace.unlink()
        shutil.rmtree(folder)
        os.mkdir(folder)
        result = subprocess.run([sys.executable, __file__, way, folder], check=True, capture_output=True, text=True)
        shutil.rmtree(folder)
        print(f"| {way} | {len(synced)} | {result.stdout.strip().splitlines()[-1]} |", flush=True)


if __name__ == "__main__":
    main()
