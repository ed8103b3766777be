"""Checks of ranks whose stores are archived, for `rank_checks.py`. Buckets are folders.

Each check has stages with different numbers of ranks. A stage of one rank loses and restores the directory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import remanent
from remanent.torch import Checkpointer

Check = Callable[[Path], None]
WAIT = 60.0


class Run:
    """A rank of an archived run, with a tensor whose values depend on the rank, the step and the attempt."""

    def __init__(self, directory: Path, *, attempt: int = 0, keep: int = 1, **archive: Any) -> None:
        if dist.get_rank() == 0:
            (directory / "bucket").mkdir(exist_ok=True)
        dist.barrier()
        self.attempt, self.own = attempt, {"w": torch.zeros(1000)}
        self.checkpoints = Checkpointer(
            directory / "run", extra={"own": self.own}, rng=False, keep=keep, process_group=dist.group.WORLD,
            archive={"url": (directory / "bucket").as_uri(), "interval": 0.1} | archive)

    def value(self, step: int, attempt: int) -> float:
        return 1000 * attempt + 10 * step + dist.get_rank()

    def save(self, step: int, *, archived: bool = True, name: str | None = None) -> Any:
        self.own["w"].fill_(self.value(step, self.attempt))
        saved = self.checkpoints.save(step, name=name)
        if archived:
            assert saved.wait_archived(WAIT)
        return saved

    def restored(self, step: int, attempt: int, at: int | str | None = None) -> None:
        """Restores a version, and checks that all of its bytes are those of this rank, step and attempt."""
        self.own["w"].fill_(-1)
        assert self.checkpoints.restore(at) == step
        assert self.own["w"].eq(self.value(step, attempt)).all(), self.own["w"]

    def versions(self) -> list[tuple[int, str | None]]:
        return [(version.step, version.name) for version in self.checkpoints.versions()]

    def snapshots(self) -> list[str]:
        return [info.name for info in self.checkpoints.store.snapshots() if info.name is not None]

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        # No rank changes the buckets while another rank closes its store.
        self.checkpoints.close()
        if kind is None:
            dist.barrier()


@contextlib.contextmanager
def bucket_is_away(directory: Path, rank: int) -> Iterator[None]:
    """Moves the bucket of a rank away, and back at the end."""
    bucket, away = directory / "bucket" / f"rank-{rank}", directory / f"away-{rank}"
    for source, target in ((bucket, away), (away, bucket)):
        dist.barrier()
        if dist.get_rank() == 0:
            os.rename(source, target)
        dist.barrier()
        if target == away:
            yield


def restore(directory: Path, rank: int, target: Path) -> None:
    url = (directory / "bucket" / f"rank-{rank}").as_uri()
    command = [sys.executable, "-m", "remanent", "restore", "--from", url, os.fspath(target)]
    subprocess.run(command, check=True, capture_output=True)


def lose(directory: Path, *, ranks: int = 2) -> None:
    """Removes the directory of the run, and restores the stores of the first `ranks` ranks."""
    shutil.rmtree(directory / "run")
    for rank in range(ranks):
        restore(directory, rank, directory / "run" / f"rank-{rank}")


def begin(directory: Path) -> None:
    with Run(directory, keep=2) as run:
        for step in range(1, 6):
            run.save(step, name="best" if step == 2 else None)
        assert run.versions() == [(2, "best"), (4, None), (5, None)]


def continue_from_archives(directory: Path) -> None:
    with Run(directory, keep=2) as run:
        # The archives may also contain versions that were removed last.
        assert (2, "best") in run.versions() and run.versions()[-2:] == [(4, None), (5, None)], run.versions()
        run.restored(2, 0, "best")
        run.restored(4, 0, 4)
        run.restored(5, 0)
        run.save(6)
        run.checkpoints.give_up("best")
        run.save(7)
        # Each version that is removed waits until the newest one is archived.
        run.save(8)
        assert run.versions() == [(7, None), (8, None)]


def continue_again(directory: Path) -> None:
    with Run(directory, keep=2) as run:
        assert run.versions()[-2:] == [(7, None), (8, None)]
        run.restored(8, 0)


def begin_with_common_version(directory: Path) -> None:
    with Run(directory) as run:
        run.save(1)
        run.save(2)


def save_without_bucket_of(rank: int, attempt: int) -> Check:
    """Returns a stage that continues from step 2, and saves step 3 while the bucket of one rank is away."""
    def stage(directory: Path) -> None:
        run = Run(directory, attempt=attempt)
        run.restored(2, 0)
        with bucket_is_away(directory, rank):
            with run:
                saved = run.save(3, archived=False)
                assert not saved.wait_archived(0.3)
                if dist.get_rank() != rank:
                    newest = run.checkpoints.store.snapshots()[-1]
                    assert newest.name is not None and newest.name.startswith("step 3 ")
                    assert run.checkpoints.store.wait_archived(newest, WAIT)

    return stage


def continue_from_common_version(directory: Path) -> None:
    with Run(directory, attempt=3) as run:
        assert run.versions()[-1] == (2, None), run.versions()
        # The archive of each rank contains step 3, but of different attempts.
        assert run.snapshots()[-1].startswith("step 3 "), run.snapshots()
        run.restored(2, 0)
        run.save(3)
        assert run.versions()[-1] == (3, None)
        run.restored(3, 3)


def continue_from_third_attempt(directory: Path) -> None:
    with Run(directory) as run:
        assert run.versions()[-1] == (3, None)
        run.restored(3, 3)


def archive_of_one_rank_lags(directory: Path) -> None:
    with Run(directory) as run:
        run.save(1)
        run.save(2)
        with bucket_is_away(directory, 1):
            for step in range(3, 9):
                saved = run.save(step, archived=False, name="named" if step == 5 else None)
            assert not saved.wait_archived(0.3)
            # The newest version of all archives, the next one for them, the named one and the newest one.
            assert run.versions() == [(2, None), (3, None), (5, "named"), (8, None)]
            assert [name.split("@")[0] for name in run.snapshots()] == ["step 2 ", "step 3 ", "step 5 ", "step 8 "]
        assert saved.wait_archived(WAIT)
        run.save(9)
        assert run.versions() == [(5, "named"), (8, None), (9, None)], run.versions()
        with bucket_is_away(directory, 1):
            run.save(10, archived=False, name="ten")
            run.save(11, archived=False)
            # The next version for the archives loses only its name.
            run.checkpoints.give_up("ten")
            assert run.versions() == [(5, "named"), (9, None), (10, None), (11, None)]


def lose_before_the_archive_follows(directory: Path) -> None:
    """Saves versions that only the first rank archives, and closes the stores."""
    run = Run(directory)
    run.save(1)
    with bucket_is_away(directory, 1):
        with run:
            for step in range(2, 6):
                run.save(step, archived=False)
            if dist.get_rank() == 0:
                for info in run.checkpoints.store.snapshots():
                    assert run.checkpoints.store.wait_archived(info, WAIT)


def continue_from_first(directory: Path) -> None:
    with Run(directory) as run:
        assert run.versions() == [(1, None)]
        run.restored(1, 0)


def archive_rejects_one_rank(directory: Path) -> None:
    rank = dist.get_rank()
    bucket, store = directory / "bucket" / "rank-1", directory / "run" / "rank-1"

    def on_first(work: Callable[[], Any]) -> None:
        dist.barrier()
        if rank == 0:
            work()
        dist.barrier()

    def is_rejected(kind: str, **archive: Any) -> None:
        with pytest.raises(remanent.ArchiveError) as raised:
            Run(directory, **archive)
        assert raised.value.kind == kind and str(raised.value).startswith("rank 1: ") == (rank != 1), raised.value
        assert raised.value.url.rstrip("/").endswith("rank-1"), raised.value.url

    with Run(directory) as run:
        run.save(1)
    on_first(lambda: shutil.copytree(store, directory / "older"))
    with Run(directory) as run:
        run.save(2)
    on_first(lambda: (os.rename(bucket, directory / "away"), bucket.mkdir()))
    is_rejected("lost")
    on_first(lambda: (shutil.rmtree(bucket), os.rename(directory / "away", bucket)))
    on_first(lambda: (os.rename(store, directory / "newer"), os.rename(directory / "older", store)))
    is_rejected("diverged")
    on_first(lambda: (shutil.rmtree(store), os.rename(directory / "newer", store)))
    with pytest.raises(remanent.InvalidError, match="archive: rank 1 passed another URL than rank 0"):
        Run(directory, **({"url": (directory / "other").as_uri()} if rank == 1 else {}))
    run = Run(directory)
    run.restored(2, 0)
    on_first(lambda: restore(directory, 1, directory / "elsewhere"))
    # The other machine has claimed the archive of the second rank.
    saved = run.save(3, archived=False)
    with pytest.raises(remanent.Error) as raised:
        saved.wait_archived(WAIT)
    assert str(raised.value).startswith("rank 1: ") == (rank != 1), raised.value
    with pytest.raises(remanent.Error):
        run.save(4)
    assert run.versions()[-1] == (3, None)
    with pytest.raises(remanent.PoisonedError) if rank == 1 else contextlib.nullcontext():
        run.checkpoints.close()


def begin_with_two(directory: Path) -> None:
    with Run(directory) as run:
        run.save(1, name="one")


def continue_with_one(directory: Path) -> None:
    with Run(directory) as run:
        run.restored(1, 0)
        run.save(2)
        # No version has a part of the second rank any more.
        run.checkpoints.give_up("one")
        run.save(3)
        assert run.versions() == [(2, None), (3, None)]
    assert (directory / "run" / "rank-1").is_dir()


def continue_with_two(directory: Path) -> None:
    with Run(directory) as run:
        assert run.checkpoints.restore() == 3
        run.save(4)
        run.restored(4, 0)


def lose_second_store(directory: Path) -> None:
    shutil.rmtree(directory / "run")
    restore(directory, 0, directory / "run" / "rank-0")
    with pytest.raises(remanent.NoStateError, match="lacks the store of rank 1, .* of step 4"):
        Run(directory)
    assert not (directory / "run" / "points").exists()
    restore(directory, 1, directory / "run" / "rank-1")


def continue_with_both(directory: Path) -> None:
    with Run(directory) as run:
        run.restored(4, 0)


CHECKS: dict[str, list[tuple[int, Check]]] = {
    "archives_survive_loss_of_all_machines": [
        (2, begin), (1, lose), (2, continue_from_archives), (1, lose), (2, continue_again)],
    "attempts_at_one_step_are_not_combined": [
        (2, begin_with_common_version), (2, save_without_bucket_of(1, 1)), (1, lose),
        (2, save_without_bucket_of(0, 2)), (1, lose), (2, continue_from_common_version), (1, lose),
        (2, continue_from_third_attempt)],
    "version_of_all_archives_outlives_newer_ones": [(2, archive_of_one_rank_lags)],
    "version_of_some_archives_is_not_restored": [
        (2, lose_before_the_archive_follows), (1, lose), (2, continue_from_first)],
    "archive_that_rejects_one_rank_fails_all": [(2, archive_rejects_one_rank)],
    "archived_ranks_may_change_in_number": [
        (2, begin_with_two), (1, continue_with_one), (2, continue_with_two), (1, lose_second_store),
        (2, continue_with_both)],
}
