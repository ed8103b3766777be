"""Ranks that save together: four processes and gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

HERE = Path(__file__).parent


def said_by(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", str(HERE / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=480)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ranks_save_together(tmp_path: Path, device: str) -> None:
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip(f"there are {torch.cuda.device_count()} GPUs, and ranks need one each")
    done = said_by("rank_checks.py", device, str(tmp_path))
    found = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert len(found) > 2 and set(found.values()) == {"fine"}, f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("check", [
    "archives_survive_loss_of_all_machines", "attempts_at_one_step_are_not_combined",
    "version_of_all_archives_outlives_newer_ones", "version_of_some_archives_is_not_restored",
    "archive_that_rejects_one_rank_fails_all", "archived_ranks_may_change_in_number"])
def test_ranks_continue_from_archives(tmp_path: Path, check: str) -> None:
    done = said_by("rank_checks.py", "cpu", str(tmp_path), check)
    assert done.stdout == f"{check} fine\n", f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("kind", ["checkpointer", "archive", "dcp", "dcp-archive"])
def test_killed_ranks_agree_on_version(tmp_path: Path, kind: str) -> None:
    done = said_by("killed_ranks.py", kind, str(tmp_path / "run"), "10", "7")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("10 kills of 2 to 4 ranks"), done.stdout
