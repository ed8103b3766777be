"""Checkpoints of torch.distributed.checkpoint in archives. Buckets are folders."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from children import ended, forked
from dcp_ranks import in_ranks

import remanent

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402

import remanent.dcp  # noqa: E402
from remanent._dcp.archives import RootArchive  # noqa: E402
from remanent.dcp import (  # noqa: E402
    Stager,
    StorageReader,
    StorageWriter,
    dcp_to_safetensors,
    dcp_to_torch_save,
    restore_from_archive,
    torch_save_to_dcp,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allows the next save to remove discarded checkpoints immediately."""
    monkeypatch.setattr(remanent.dcp, "_VISIBLE_AFTER", -1.0)


class Root:
    """A root of checkpoints with an archive. Each checkpoint has a tensor, a slowly changing tensor and a value."""

    def __init__(self, folder: Path) -> None:
        self.path, self.bucket = folder / "root", folder / "bucket"
        self.bucket.mkdir()
        self.archive: remanent.ArchiveOptions = {"url": self.bucket.as_uri(), "interval": 0.1}

    def state(self, value: int) -> dict[str, Any]:
        frozen = torch.arange(20_000.0)
        return {"w": torch.full((300, 4), float(value)), "frozen": frozen, "step": value}

    def writer(self, name: str, **options: Any) -> StorageWriter:
        return StorageWriter(self.path / name, **{"archive": self.archive, "archive_timeout": 0.3} | options)

    def save(self, name: str, value: int, **options: Any) -> None:
        dcp.save(self.state(value), storage_writer=self.writer(name, **options), no_dist=True)

    def fails(self, name: str, value: int, **options: Any) -> BaseException:
        """Saves, and returns the error of the rank."""
        with pytest.raises(CheckpointException) as raised:
            self.save(name, value, **options)
        failure = raised.value.failures[0]
        return failure[0] if isinstance(failure, tuple) else failure

    def value(self, name: str) -> int:
        """Returns the value of a checkpoint, all bytes of which are checked."""
        state = {"w": torch.zeros(300, 4), "frozen": torch.zeros(20_000), "step": -1}
        dcp.load(state, storage_reader=StorageReader(self.path / name), no_dist=True)
        for entry, expected in self.state(state["step"]).items():
            assert torch.equal(state[entry], expected) if entry != "step" else state[entry] == expected, entry
        return int(state["step"])

    def lose(self) -> None:
        shutil.rmtree(self.path)

    def restore(self) -> dict[str, int]:
        """Restores the root, and returns the values of all checkpoints by name, oldest first."""
        return {path.name: self.value(path.name) for path in restore_from_archive(self.path, self.archive)}

    def restore_stores_alone(self) -> None:
        """Restores the store of the first rank by the command, without the checkpoints."""
        url, store = (self.bucket / "rank-0").as_uri(), self.path / ".remanent" / "rank-0"
        store.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "remanent", "restore", "--from", url, os.fspath(store)]
        subprocess.run(command, check=True, capture_output=True)

    def files(self) -> list[str]:
        return sorted(os.fspath(path) for path in self.path.rglob("*"))


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path)


def test_checkpoints_survive_loss_of_the_root(root: Root) -> None:
    root.save("a", 1)
    root.save("b", 2)
    stager = Stager()
    saving = dcp.async_save(root.state(3), storage_writer=root.writer("c"), async_stager=stager, no_dist=True)
    saving.upload_completion.result()
    stager.close()
    root.save("b", 4)
    root.lose()
    assert root.restore() == {"a": 1, "c": 3, "b": 4}
    # A part of a checkpoint.
    part = {"w": torch.zeros(300, 4)}
    dcp.load(part, storage_reader=StorageReader(root.path / "c"), no_dist=True)
    assert bool((part["w"] == 3).all())
    assert root.restore() == {"a": 1, "c": 3, "b": 4}
    root.save("d", 5)
    root.lose()
    assert root.restore() == {"a": 1, "c": 3, "b": 4, "d": 5}


def test_archive_follows_renamed_and_removed_checkpoints(root: Root) -> None:
    for value, name in enumerate("abc"):
        root.save(name, value)
    (root.path / "a").rename(root.path / "best")
    shutil.rmtree(root.path / "b")
    shutil.copytree(root.path / "c", root.path / "copy")
    # A checkpoint of DCP's own in the same root is ignored.
    dcp.save({"w": torch.zeros(2)}, checkpoint_id=root.path / "theirs", no_dist=True)
    root.save("d", 3)
    root.lose()
    assert root.restore() == {"c": 2, "best": 0, "copy": 2, "d": 3}
    # The snapshots of the removed checkpoint are not in the archive, either.
    with remanent.Store(root.path / ".remanent" / "rank-0", device="host",
                        archive={"url": (root.bucket / "rank-0").as_uri()}) as store:
        assert [info.name.split("@")[0] for info in store.snapshots() if info.name is not None] == ["a", "c", "d"]


def _moving_bucket(root: Root, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, before: bool) -> Path:
    """Moves the bucket away before or after the next call of a function, and returns its new path."""
    sound, away = getattr(owner, name), root.bucket.with_name("away")

    def moving(*given: Any, **options: Any) -> Any:
        if before:
            root.bucket.rename(away)
        result = sound(*given, **options)
        if not before:
            root.bucket.rename(away)
        return result

    monkeypatch.setattr(owner, name, moving)
    return away


@pytest.mark.parametrize("in_finish", [False, True])
def test_unreachable_archive_fails_the_save(root: Root, monkeypatch: pytest.MonkeyPatch, in_finish: bool) -> None:
    root.save("last", 1)
    owner, name = (remanent.dcp, "_visible") if in_finish else (remanent.dcp, "_write_items")
    with monkeypatch.context() as patched:
        away = _moving_bucket(root, patched, owner, name, before=False)
        error = root.fails("last", 2)
    assert isinstance(error, remanent.ArchiveError) and "the checkpoint was not archived" in str(error), error
    assert error.kind == "bucket" and error.url == root.archive["url"]
    assert root.value("last") == 1
    # The bucket is still away, so the store cannot be opened.
    error = root.fails("other", 3)
    assert isinstance(error, remanent.ArchiveError), error
    assert not (root.path / "other" / ".metadata").exists()
    away.rename(root.bucket)
    root.save("next", 4)
    assert root.value("last") == 1 and root.value("next") == 4
    root.lose()
    assert root.restore() == {"last": 1, "next": 4}


def _killed(root: Root, owner: Any, name: str, *, before: bool) -> None:
    """Saves in a child, which is killed before or after it calls a function."""
    def work() -> int:
        # Threads of the parent do not exist in the child.
        torch.set_num_threads(1)
        sound = getattr(owner, name)

        def kill(*given: Any, **options: Any) -> None:
            if not before:
                sound(*given, **options)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(owner, name, kill)
        root.save("last", 2)
        return 0

    assert ended(forked(work)) == -signal.SIGKILL


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("is_listed", [False, True])
def test_killed_save_leaves_the_earlier_checkpoint(root: Root, is_listed: bool, is_lost: bool) -> None:
    root.save("last", 1)
    _killed(root, RootArchive, "add", before=not is_listed)
    assert root.value("last") == 1
    if is_lost:
        root.lose()
        # All of the checkpoint is archived once its listing is.
        assert root.restore() == {"last": 2 if is_listed else 1}
    root.save("next", 3)
    assert root.value("last") == (2 if is_listed and is_lost else 1)
    root.lose()
    assert root.restore() == {"last": 2 if is_listed and is_lost else 1, "next": 3}


def test_first_save_that_was_killed_leaves_no_checkpoint(root: Root) -> None:
    _killed(root, RootArchive, "add", before=True)
    root.lose()
    assert root.restore() == {}
    root.save("a", 1)
    root.lose()
    assert root.restore() == {"a": 1}


def test_save_to_archived_root_needs_the_archive(root: Root) -> None:
    root.save("a", 1)
    files = root.files()
    error = root.fails("b", 2, archive=None)
    assert isinstance(error, remanent.ArchiveError) and "the save does not name it" in str(error)
    assert (error.kind, error.url) == ("not given", root.archive["url"])
    with pytest.raises(CheckpointException, match="does not name it"):
        torch.save({"w": torch.ones(2)}, root.bucket / "w.pt")
        torch_save_to_dcp(root.bucket / "w.pt", root.path / "c")
    assert root.files() == files


def test_arguments_are_checked_before_anything_changes(root: Root) -> None:
    for wrong, kind, text in [
        ({"archive": 3}, remanent.InvalidTypeError, "archive: must be a dict"),
        ({"archive": {}}, remanent.InvalidTypeError, "archive: must be a dict"),
        ({"archive_timeout": -1}, remanent.InvalidError, "archive_timeout: -1"),
        ({"archive_timeout": float("nan")}, remanent.InvalidError, "archive_timeout: nan"),
    ]:
        with pytest.raises(kind, match=text):
            root.writer("a", **wrong)
    for maker in (StorageWriter, StorageReader):
        with pytest.raises(remanent.InvalidError, match="is a URL, not the path of a checkpoint"):
            maker(f"{root.archive['url']}/a")
    with pytest.raises(remanent.InvalidError, match="ranks that save separately"):
        dcp.save(root.state(1), storage_writer=root.writer("a"), no_dist=True, use_collectives=False)
    error = root.fails(os.fsdecode(b"a\xff"), 1)
    assert isinstance(error, remanent.RefusedError) and "not UTF-8" in str(error)
    error = root.fails("a", 1, archive={"url": (root.path / "missing").as_uri()})
    assert isinstance(error, remanent.ArchiveError) and error.kind == "settings"
    settings = {"endpoint": "http://127.0.0.1:9000", "aws_region": "r"}
    given = RootArchive({"archive": {"url": "s3://b/run", "settings": settings}}, 0.0)
    assert given.settings == {"AWS_ENDPOINT": "http://127.0.0.1:9000", "AWS_REGION": "r"}


def test_restored_stores_need_their_checkpoints(root: Root) -> None:
    root.save("a", 1)
    root.save("b", 2)
    root.lose()
    # A new root cannot continue the archive.
    error = root.fails("c", 3)
    assert isinstance(error, remanent.ArchiveError) and error.kind == "other store"
    assert "restore_from_archive" in error.remedy
    root.lose()
    root.restore_stores_alone()
    files = root.files()
    error = root.fails("c", 3)
    assert isinstance(error, remanent.RefusedError) and "without the checkpoints" in str(error)
    assert root.files() == files
    assert root.restore() == {"a": 1, "b": 2}
    root.save("c", 3)
    assert root.value("a") == 1


def test_restore_rejects_other_roots_and_archives(root: Root, tmp_path: Path) -> None:
    root.save("a", 1)
    other = Root.__new__(Root)
    other.path, other.bucket, other.archive = tmp_path / "other", tmp_path / "none", root.archive
    dcp.save(root.state(2), storage_writer=StorageWriter(other.path / "b"), no_dist=True)
    files = other.files()
    with pytest.raises(remanent.RefusedError, match="already contains the checkpoint b"):
        restore_from_archive(other.path, root.archive)
    assert [each for each in other.files() if "restoring" not in each] == files
    shutil.rmtree(other.path / "b")
    with pytest.raises(remanent.RefusedError, match="rank-0 contains a store without archived checkpoints"):
        restore_from_archive(other.path, root.archive)
    other.lose()
    (tmp_path / "empty").mkdir()
    for url in ((tmp_path / "empty").as_uri(), (tmp_path / "missing").as_uri()):
        with pytest.raises(remanent.ArchiveError) as raised:
            restore_from_archive(other.path, {"url": url})
        assert raised.value.kind == "restore" and raised.value.url == f"{url}/rank-0", raised.value
        assert not other.path.exists()
    assert [path.name for path in restore_from_archive(other.path, root.archive)] == ["a"]


def test_formats_read_and_write_archived_checkpoints(root: Root, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    torch.save({"model": {"w": torch.ones(2, 3)}, "step": 3}, tmp_path / "in.pt")
    torch_save_to_dcp(tmp_path / "in.pt", root.path / "step-3", archive=root.archive)
    root.lose()
    assert restore_from_archive(root.path, root.archive) == [root.path / "step-3"]
    dcp_to_torch_save(root.path / "step-3", tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(found["model"]["w"], torch.ones(2, 3)) and found["step"] == 3
    dcp_to_safetensors(root.path / "step-3", tmp_path / "out.safetensors", key="model")
