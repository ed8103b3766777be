"""Ranks that save together and are killed at random times: each restart must find all of them at one version.

    python killed_ranks.py checkpointer|archive|dcp|dcp-archive DIRECTORY KILLS [SEED]

The ranks of each round, two to four, are forks of this process, which has imported torch. They restore, check that
every element belongs to the restored step, and save step after step, until some or all of them are killed. A save that
was reported as complete to any rank must exist in the next round. With "archive" and "dcp-archive", some rounds begin
with the loss of all directories, and find at least the last version that was reported as archived.
"""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from children import ended, forked
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import remanent
import remanent.dcp
from remanent._state import page_tree
from remanent.dcp import StorageReader, StorageWriter, restore_from_archive
from remanent.torch import Checkpointer

RANKS_MAX = 4
ROWS = 1003
# The exit status of a rank that detects the death of another rank.
LEFT_ALONE = 3
WAIT = 60.0
# The process ids of the current round's ranks, so that none outlives this process.
LIVE: list[int] = []


class Board:
    """Numbers that ranks report to their parent process, under a few names."""

    NAMES = ("restored", "saved", "archived")

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._memory = mmap.mmap(-1, 8 * ranks * len(self.NAMES))
        for name in self.NAMES:
            for rank in range(ranks):
                self.say(name, rank, -1)

    def _at(self, name: str, rank: int) -> int:
        return 8 * (self.NAMES.index(name) * self.ranks + rank)

    def say(self, name: str, rank: int, number: int) -> None:
        struct.pack_into("q", self._memory, self._at(name, rank), number)

    def said(self, name: str) -> list[int]:
        return [struct.unpack_from("q", self._memory, self._at(name, rank))[0] for rank in range(self.ranks)]


def state_of(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a tensor that is shared by all ranks, and one of this rank."""
    return torch.arange(3.0 * ROWS).view(ROWS, 3) + 10_000 * step, torch.full((5000 + rank,), step * RANKS_MAX + rank)


class Run:
    """A rank of a run that saves with `Checkpointer`."""

    def __init__(self, rank: int, directory: Path, divided: torch.Tensor, own: torch.Tensor, **options: Any) -> None:
        self.model = torch.nn.Module()
        self.model.register_buffer("divided", divided)
        self.state = {"own": own, "step": -1, "ranks": 0}
        self.checkpoints = Checkpointer(directory, self.model, extra={"state": self.state},
                                        process_group=dist.group.WORLD, **options)

    def restore(self) -> int:
        return self.checkpoints.restore() if self.checkpoints.versions() else 0

    def found(self) -> tuple[Any, Any, Any, Any]:
        return self.model.divided, self.state["own"], self.state["step"], self.state["ranks"]

    def save(self, step: int, divided: torch.Tensor, own: torch.Tensor, chance: random.Random) -> bool:
        """Saves a step. Returns whether the step is known to be durable."""
        self.model.divided.copy_(divided)
        self.state |= {"own": own, "step": step, "ranks": dist.get_world_size()}
        saved = self.checkpoints.save(step, wait=chance.random() < 0.5, name=f"n{step}" if step % 20 == 0 else None)
        if step % 20 == 10:
            for version in self.checkpoints.versions()[:-1]:
                if version.name is not None:
                    self.checkpoints.give_up(version.name)
        self.last = saved
        return chance.random() < 0.7 and saved.wait()

    def is_archived(self, chance: random.Random) -> bool:
        """Returns whether the last step is known to be archived."""
        return False

    def close(self) -> None:
        self.checkpoints.close()


class ArchivedRun(Run):
    """A rank of a run whose stores are archived in folders."""

    def __init__(self, rank: int, directory: Path, divided: torch.Tensor, own: torch.Tensor) -> None:
        bucket = bucket_of(directory)
        bucket.mkdir(exist_ok=True)
        super().__init__(rank, directory, divided, own, archive={"url": bucket.as_uri(), "interval": 0.02})

    def is_archived(self, chance: random.Random) -> bool:
        return chance.random() < 0.2 and self.last.wait_archived(WAIT)


class Dcp:
    """A rank that saves with DCP and replaces its previous checkpoint."""

    def __init__(self, rank: int, directory: Path, divided: torch.Tensor, own: torch.Tensor) -> None:
        self.path, self.own = directory / "last", f"own {rank}"
        self.state = {"divided": divided, "step": -1, "ranks": 0}

    def restore(self) -> int:
        if not (self.path / ".metadata").exists():
            return 0
        dcp.load(self.state, storage_reader=StorageReader(self.path))
        # The tensor of each rank has a separate name. Additional ranks load the tensors of the saved ranks in turn.
        self.taken = dist.get_rank() % self.state["ranks"]
        own = {f"own {self.taken}": torch.zeros_like(state_of(0, self.taken)[1])}
        dcp.load(own, storage_reader=StorageReader(self.path))
        self.state |= own
        return int(self.state["step"])

    def found(self) -> tuple[Any, Any, Any, Any]:
        return self.state["divided"], self.state[f"own {self.taken}"], self.state["step"], self.state["ranks"]

    def save(self, step: int, divided: torch.Tensor, own: torch.Tensor, chance: random.Random) -> bool:
        self.state = {"divided": divided, self.own: own, "step": step, "ranks": dist.get_world_size()}
        dcp.save(self.state, storage_writer=self.writer())
        return True

    def writer(self) -> StorageWriter:
        return StorageWriter(self.path)

    def is_archived(self, chance: random.Random) -> bool:
        return False

    def close(self) -> None:
        pass


class ArchivedDcp(Dcp):
    """A rank that saves with DCP, and whose checkpoints are archived in folders."""

    def __init__(self, rank: int, directory: Path, divided: torch.Tensor, own: torch.Tensor) -> None:
        super().__init__(rank, directory, divided, own)
        # Checkpoints that were replaced are removed by the next save.
        remanent.dcp._VISIBLE_AFTER = -1.0
        bucket = bucket_of(directory)
        bucket.mkdir(exist_ok=True)
        self.archive: remanent.ArchiveOptions = {"url": bucket.as_uri(), "interval": 0.02}

    def writer(self) -> StorageWriter:
        return StorageWriter(self.path, archive=self.archive)

    def is_archived(self, chance: random.Random) -> bool:
        return True


KINDS: dict[str, type[Run] | type[Dcp]] = {
    "checkpointer": Run, "archive": ArchivedRun, "dcp": Dcp, "dcp-archive": ArchivedDcp}


def bucket_of(directory: Path) -> Path:
    return directory.with_name("bucket")


def lose(kind: str, directory: Path) -> None:
    """Removes the stores of all ranks, and restores them from their archives."""
    shutil.rmtree(directory)
    if kind == "dcp-archive":
        if (bucket_of(directory) / "rank-0" / "line").exists():
            restore_from_archive(directory, {"url": bucket_of(directory).as_uri()})
        return
    for bucket in sorted(bucket_of(directory).iterdir()):
        if (bucket / "line").exists():
            command = [sys.executable, "-m", "remanent", "restore", "--from", bucket.as_uri(), directory / bucket.name]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def run(kind: str, rank: int, directory: Path, meeting: Path, board: Board, seed: int, steps_max: int) -> None:
    """Runs one rank: restores, and saves until it is killed or has done a number of steps."""
    chance = random.Random(seed)
    if chance.random() < 0.5:
        # Short batches, so that a kill can interrupt a save between two of them.
        page_tree._BATCH_BYTES = remanent.dcp._BATCH_BYTES = 16 << 10
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=board.ranks)
    mesh = init_device_mesh("cpu", (board.ranks,))

    def tensors_of(step: int, own_of: int = rank) -> tuple[torch.Tensor, torch.Tensor]:
        whole, own = state_of(step, own_of)
        return distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None), own

    saver = KINDS[kind](rank, directory, *tensors_of(-1))
    step = saver.restore()
    if step:
        divided, own, found, ranks = saver.found()
        expected, expected_own = tensors_of(step, rank % ranks)
        assert found == step, f"rank {rank}: step {found} in the version of {step}"
        assert torch.equal(own, expected_own), f"rank {rank}: its own tensor is not of step {step}"
        assert isinstance(divided, DTensor) and isinstance(expected, DTensor)
        assert torch.equal(divided.to_local(), expected.to_local()), f"rank {rank}: its part is not of step {step}"
    board.say("restored", rank, step)
    for step in range(step + 1, step + 1 + steps_max):
        if saver.save(step, *tensors_of(step), chance):
            board.say("saved", rank, step)
        if saver.is_archived(chance):
            board.say("archived", rank, step)
    saver.close()
    # No rank exits before all ranks have finished their communication.
    dist.barrier()


def start(kind: str, directory: Path, board: Board, seed: int, steps_max: int) -> list[int]:
    meeting = directory.parent / f"meet-{seed}"
    # An earlier process with the same seed may have left its rendezvous file.
    meeting.unlink(missing_ok=True)

    def work(rank: int) -> int:
        try:
            run(kind, rank, directory, meeting, board, seed, steps_max)
        except remanent.RankFailedError:
            return LEFT_ALONE
        except (CheckpointException, RuntimeError) as error:
            # DCP raises torch's own errors if a rank has died.
            if kind.startswith("dcp") and board.said("restored")[rank] >= 0:
                return LEFT_ALONE
            raise error
        return 0

    LIVE[:] = [forked(functools.partial(work, rank)) for rank in range(board.ranks)]
    return list(LIVE)


def end_of(pid: int) -> int:
    status = ended(pid)
    LIVE.remove(pid)
    return status


def wait_restored(board: Board, pids: list[int]) -> list[int]:
    until = time.monotonic() + WAIT
    while -1 in board.said("restored"):
        assert time.monotonic() < until, f"ranks have not restored a version in time: {board.said('restored')}"
        for pid in pids:
            found, status = os.waitpid(pid, os.WNOHANG)
            assert not found, f"a rank ended with {os.waitstatus_to_exitcode(status)} before it was killed"
        time.sleep(0.005)
    return board.said("restored")


def killed(pids: list[int], chance: random.Random) -> str:
    """Kills some or all of the ranks, and waits until all have ended."""
    how = chance.choice(["all", "one by one", "one"])
    order = chance.sample(pids, len(pids))
    if how == "one":
        # The other ranks detect the death at any point.
        os.kill(order[0], signal.SIGKILL)
        end_of(order[0])
        for pid in order[1:]:
            status = end_of(pid)
            assert status == LEFT_ALONE, f"a rank that was left alone ended with {status}"
        return how
    for pid in order:
        os.kill(pid, signal.SIGKILL)
        if how == "one by one":
            time.sleep(chance.random() * 0.02)
    for pid in order:
        end_of(pid)
    return how


def main(kind: str, directory: Path, kills: int, seed: int) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    chance = random.Random(seed)
    acknowledged, archived, counts = 0, 0, {"all": 0, "one by one": 0, "one": 0}
    for kill in range(kills):
        if kind.endswith("archive") and kill and chance.random() < 0.5:
            lose(kind, directory)
            acknowledged, counts["losses"] = archived, counts.get("losses", 0) + 1
        board = Board(chance.choice([2, 3, RANKS_MAX, RANKS_MAX]))
        pids = start(kind, directory, board, seed * 100_000 + kill, 1_000_000)
        restored = wait_restored(board, pids)
        assert len(set(restored)) == 1, f"ranks are at different versions: {restored}"
        assert restored[0] >= acknowledged, f"step {acknowledged} was acknowledged, but {restored[0]} was restored"
        time.sleep(chance.random() ** 2 * 0.5)
        counts[killed(pids, chance)] += 1
        archived = max(archived, *board.said("archived"))
        acknowledged = max(restored[0], archived, *board.said("saved"))
    # A last round without a kill, after which the store contains only the kept versions.
    board = Board(RANKS_MAX)
    for pid in start(kind, directory, board, seed * 100_000 + kills, 3):
        assert end_of(pid) == 0
    assert board.said("restored")[0] >= acknowledged
    stores = directory / ".remanent" if kind.startswith("dcp") else directory
    kept = []
    for rank in range(RANKS_MAX):
        archive: Any = {"url": (bucket_of(directory) / f"rank-{rank}").as_uri()} if kind.endswith("archive") else None
        with remanent.Store(stores / f"rank-{rank}", device="host", memory={"load": "on_demand"},
                            archive=archive) as store:
            kept.append(sum(info.name is not None for info in store.snapshots()))
    if not kind.startswith("dcp"):
        ranks = [len(json.loads(path.read_bytes().splitlines()[1])["parts"])
                 for path in (directory / "points").glob("*.point")]
        named = [sum(count > rank for count in ranks) for rank in range(RANKS_MAX)]
        assert kept == named, f"of {named} versions of each rank {kept} are kept"
    last = board.said("restored")[0] + 3
    print(f"{kills} kills of 2 to {RANKS_MAX} ranks, up to step {last}: {counts}; {kept} versions kept")


if __name__ == "__main__":
    given = sys.argv[1:]
    try:
        main(given[0], Path(given[1]), int(given[2]), int(given[3]) if len(given) > 3 else 1)
    finally:
        for pid in LIVE:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
