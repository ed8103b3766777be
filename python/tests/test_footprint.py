"""Disk usage of a store after its process has ended: little more than the bytes of its pages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

_MIB = 1 << 20
# For each entry point, a program that closes only what must be closed, and the bytes that it stores.
_PROGRAMS = {
    "save_file": ("from remanent.torch import save_file; save_file({'w': torch.zeros(6)}, directory)", 24),
    "store closed": ("with remanent.Store(directory, device='host') as store: store.put('k', bytes(24))", 24),
    "store left open": ("store = remanent.Store(directory, device='host'); store.put('k', bytes(24))", 24),
    "dcp": (
        "import torch.distributed.checkpoint as dcp\n"
        "from remanent.dcp import StorageWriter\n"
        "state = {str(index): torch.randn(256, 1024) for index in range(3)}\n"
        "dcp.save(state, storage_writer=StorageWriter(directory + '/run/step-1'), no_dist=True)", 3 * _MIB),
    "checkpointer": (
        "from remanent.torch import Checkpointer\n"
        "model = torch.nn.Linear(1024, 768)\n"
        "run = Checkpointer(directory, model, keep=1)\n"
        "for step in range(1, 4): run.save(step)", 3 * _MIB + 3 * 1024),
    "block cache": (
        "from remanent.kv import BlockCache\n"
        "cache = BlockCache(directory, identity={'model': 'm'}, capacity=64 << 20)\n"
        "cache.store([bytes([key]) for key in range(32)], [os.urandom(64 << 10) for _ in range(32)]).result()", 2 * _MIB),
    "publisher": (
        "from remanent.weights import Publisher\n"
        "publisher = Publisher(directory)\n"
        "publisher.publish({'w': torch.randn(256, 1024)}, step=1)", _MIB),
}


def _blocks(path: Path) -> int:
    return 512 * sum(each.lstat().st_blocks for each in [path, *path.rglob("*")])


@pytest.mark.parametrize("name", _PROGRAMS)
def test_ended_process_leaves_little_more_than_its_pages(name: str, directory: str) -> None:
    program, kept = _PROGRAMS[name]
    lines = f"import os, torch, remanent\ndirectory = {directory!r}\n{program}\n"
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", lines], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found = _blocks(Path(directory))
    assert kept * 0.9 < found <= 1.1 * kept + (256 << 10), f"{found >> 10} KiB for {kept >> 10} KiB"
