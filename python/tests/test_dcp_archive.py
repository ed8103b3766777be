"""Checkpoints of torch.distributed.checkpoint in archives. Buckets are folders."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
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
from remanent._dcp import archives  # noqa: E402
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

    def value(self, name: str, *, archived: bool = False) -> int:
        """Returns the value of a checkpoint, all bytes of which are checked.

        :param archived: whether to read the checkpoint from the archive.
        """
        state = {"w": torch.zeros(300, 4), "frozen": torch.zeros(20_000), "step": -1}
        reader = StorageReader(self.path / name, archive=self.archive if archived else None)
        dcp.load(state, storage_reader=reader, no_dist=True)
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


def test_checkpoints_are_read_from_the_archive(root: Root) -> None:
    root.save("a", 1)
    root.save("last", 2)
    root.save("last", 3)
    assert (root.value("a", archived=True), root.value("last", archived=True)) == (1, 3)
    part = {"w": torch.zeros(300, 4)}
    dcp.load(part, storage_reader=StorageReader("a", archive=root.archive), no_dist=True)
    assert bool((part["w"] == 1).all())
    with pytest.raises(remanent.NoStateError, match="contains no checkpoint 'b'") as raised:
        StorageReader("b", archive=root.archive).read_metadata()
    assert "['a', 'last']" in raised.value.remedy
    # The readers did not disturb the writer.
    root.save("b", 4)
    root.lose()
    assert [root.value(name, archived=True) for name in ("a", "last", "b")] == [1, 3, 4]
    assert not root.path.exists()
    root.bucket.rename(root.bucket.with_name("away"))
    with pytest.raises(CheckpointException):
        root.value("a", archived=True)
    with pytest.raises(remanent.ArchiveError):
        StorageReader("a", archive=root.archive).read_metadata()


def test_removed_parts_are_not_read_from_the_archive(root: Root) -> None:
    root.save("a", 1)
    root.save("b", 2)
    shutil.rmtree(root.path / "a")
    _killed(root, RootArchive, "add", before=True)
    assert root.value("b", archived=True) == 2
    with pytest.raises(remanent.NoStateError, match="contains no checkpoint 'a'"):
        StorageReader("a", archive=root.archive).read_metadata()


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


def test_first_save_that_was_killed_leaves_no_checkpoint(root: Root, tmp_path: Path) -> None:
    _killed(root, RootArchive, "add", before=True)
    # The store of another rank of the same save.
    (root.bucket / "rank-1").mkdir()
    with remanent.Store(tmp_path / "second", archive={"url": (root.bucket / "rank-1").as_uri()}) as store:
        store["k"] = b"v"
    root.lose()
    assert root.restore() == {}
    assert (root.path / ".remanent" / "rank-1" / "STORE").exists()
    root.save("a", 1)
    root.lose()
    assert root.restore() == {"a": 1}


def test_removed_parts_belong_to_no_checkpoint(root: Root, caplog: pytest.LogCaptureFixture) -> None:
    root.save("a", 1)
    root.save("b", 2)
    shutil.rmtree(root.path / "a")
    # The save removes the snapshot of the checkpoint, and is killed before it removes the listing.
    _killed(root, RootArchive, "add", before=True)
    root.lose()
    with caplog.at_level("WARNING", "remanent"):
        assert root.restore() == {"b": 2}
    assert "root/a is not restored" in caplog.text


def test_concurrent_saves_are_both_archived(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = RootArchive.add

    def add(archive: RootArchive, store: Any, checkpoint: Path, *given: Any, **options: Any) -> None:
        sound(archive, store, checkpoint, *given, **options)
        if checkpoint.name == "slow":
            store.close()
            root.save("other", 2)

    monkeypatch.setattr(RootArchive, "add", add)
    root.save("slow", 1)
    root.lose()
    assert root.restore() == {"slow": 1, "other": 2}


def test_concurrent_restores_wait_for_each_other(root: Root) -> None:
    root.save("a", 1)
    root.lose()
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(restore_from_archive, root.path, root.archive) for _ in range(3)]
        assert [call.result() for call in calls] == [[root.path / "a"]] * 3
    assert root.value("a") == 1


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
    assert root.restore() == {"a": 1, "b": 2}
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


# Ranks.


ARCHIVED = """
        import remanent, remanent.dcp
        from torch.distributed.checkpoint.api import CheckpointException
        remanent.dcp._VISIBLE_AFTER = -1.0
        torch.set_num_threads(1)

        def writer(folder, name, bucket="bucket"):
            archive = {"url": f"file://{folder}/{bucket}", "interval": 0.1} if bucket else None
            return StorageWriter(f"{folder}/root/{name}", archive=archive, archive_timeout=0.3)

        def one_after_the_other(rank, work):
            for each in range(dist.get_world_size()):
                if each == rank == dist.get_rank():
                    work()
                dist.barrier()
"""


def whole(step: int) -> Any:
    return torch.arange(60.0).reshape(10, 6) + 1000 * step


def assert_loads(root: Root, name: str, step: int, *, archived: bool = False) -> None:
    found = {"by rows": torch.zeros(10, 6), "by columns": torch.zeros(10, 6)}
    reader = StorageReader(root.path / name, archive=root.archive if archived else None)
    dcp.load(found, storage_reader=reader, no_dist=True)
    assert torch.equal(found["by rows"], whole(step)) and torch.equal(found["by columns"], whole(step + 1))


def test_checkpoints_of_ranks_survive_loss_of_all_machines(root: Root, tmp_path: Path) -> None:
    in_ranks(2, ARCHIVED + """
        def run(rank, ranks, folder):
            mesh = begin(rank, ranks, folder)
            state = {"by rows": of_step(1, mesh, 0), "by columns": of_step(2, mesh, 1)}
            dcp.save(state, storage_writer=writer(folder, "one"))
            state = {"by rows": of_step(3, mesh, 0), "by columns": of_step(4, mesh, 1)}
            dcp.async_save(state, storage_writer=writer(folder, "two")).result()
            end(rank, ranks, folder)
    """, str(tmp_path))
    root.lose()
    # The archive of one rank cannot be reached.
    bucket, away = root.bucket / "rank-1", tmp_path / "away"
    bucket.rename(away)
    with pytest.raises(remanent.ArchiveError) as raised:
        restore_from_archive(root.path, root.archive)
    assert raised.value.kind == "restore" and raised.value.url.endswith("rank-1")
    assert not list(root.path.glob("*/.metadata")) and not bucket.exists()
    assert isinstance(root.fails("three", 3), remanent.RefusedError)
    with pytest.raises(remanent.RefusedError, match="is being restored from"):
        restore_from_archive(root.path, {"url": tmp_path.as_uri()})
    away.rename(bucket)
    assert [path.name for path in restore_from_archive(root.path, root.archive)] == ["one", "two"]
    # One process loads what two ranks saved.
    assert_loads(root, "one", 1)
    assert_loads(root, "two", 3)
    assert_loads(root, "two", 3, archived=True)
    # The store of one rank is lost, and another one is in its place.
    second = root.path / ".remanent" / "rank-1"
    shutil.rmtree(second)
    remanent.Store(second).close()
    with pytest.raises(remanent.RefusedError, match="rank-1 contains store"):
        restore_from_archive(root.path, root.archive)
    shutil.rmtree(second)
    assert [path.name for path in restore_from_archive(root.path, root.archive)] == ["one", "two"]
    assert_loads(root, "two", 3)
    in_ranks(3, ARCHIVED + """
        def run(rank, ranks, folder):
            mesh = begin(rank, ranks, folder)
            state = {"by rows": of_step(0, mesh, 1), "by columns": of_step(0, mesh, 0)}
            dcp.load(state, storage_reader=StorageReader(folder + "/root/two"))
            assert torch.equal(state["by rows"].full_tensor(), torch.arange(60.0).reshape(10, 6) + 3000)
            # The third rank has no item, but its store is archived, too.
            dcp.save({"by rows": of_step(5, mesh, 0), "by columns": of_step(6, mesh, 1)},
                     storage_writer=writer(folder, "three"))
            dcp.save({"all": torch.ones(2)}, storage_writer=writer(folder, "four"))
            end(rank, ranks, folder)
    """, str(tmp_path))
    root.lose()
    assert [path.name for path in restore_from_archive(root.path, root.archive)] == ["one", "two", "three", "four"]
    assert_loads(root, "one", 1)
    assert_loads(root, "three", 5)
    assert (root.path / ".remanent" / "rank-2" / "STORE").exists()


def test_ranks_keep_a_common_checkpoint_in_all_archives(root: Root, tmp_path: Path) -> None:
    said = in_ranks(2, ARCHIVED + """
        def fails(folder, name, bucket="bucket"):
            try:
                dcp.save({"own": torch.full((1000,), 7.0), f"of {dist.get_rank()}": torch.ones(9)},
                         storage_writer=writer(folder, name, bucket))
            except CheckpointException as error:
                [(rank, (failure, _))] = error.failures.items()
                return rank, failure
            assert False

        def run(rank, ranks, folder):
            mesh = begin(rank, ranks, folder)
            # Before the first save, no store knows its archive.
            for bucket in ("other", None):
                failed, failure = fails(folder, "last", bucket if rank == 1 else "bucket")
                assert failed == 0 and isinstance(failure, remanent.InvalidError), failure
                assert "rank 1 passed another URL" in str(failure), failure
                assert not os.path.exists(f"{folder}/bucket/rank-0") and not os.path.exists(f"{folder}/other")
            for step in (1, 2):
                state = {"by rows": of_step(step, mesh, 0), "by columns": of_step(step + 1, mesh, 1)}
                dcp.save(state, storage_writer=writer(folder, "last"))
            sound = remanent.dcp._write_items
            bucket, away = f"{folder}/bucket/rank-1", f"{folder}/away"

            def lose_bucket(*given):
                keys = sound(*given)
                if rank == 1:
                    os.rename(bucket, away)
                return keys

            for attempt in range(3):
                remanent.dcp._write_items = lose_bucket
                failed, failure = fails(folder, "last")
                assert failed == 1 and isinstance(failure, remanent.ArchiveError), failure
                assert "not archived" in str(failure) and failure.url.endswith("bucket"), failure
                one_after_the_other(1, lambda: os.rename(away, bucket))
                # The next attempt archives what the last one left, and removes it.
                remanent.dcp._write_items = sound
            os.write(1, f"rank {rank}: fine\\n".encode())
            end(rank, ranks, folder)
    """, str(tmp_path))
    assert said == ["rank 0: fine", "rank 1: fine"]
    assert_loads(root, "last", 2)
    root.lose()
    assert restore_from_archive(root.path, root.archive) == [root.path / "last"]
    assert_loads(root, "last", 2)


class _FailingStore:
    """A store whose archive reports these counters one after another."""

    def __init__(self, *reported: tuple[str | None, int]) -> None:
        self._reported = iter(reported)

    def stats(self) -> dict[str, Any]:
        failure, count = next(self._reported)
        return {"archive": {"last_failure": failure, "failures": count}}


def test_save_fails_only_after_repeated_failures() -> None:
    once: Any = _FailingStore(("lost", 1), ("lost", 1), ("lost", 1))
    check = archives._Failing(once, "url", 0.0)
    for _ in range(3):
        check()  # A long upload may follow the failure.
    healed: Any = _FailingStore(("lost", 1), (None, 1), ("lost", 2), ("lost", 3))
    check = archives._Failing(healed, "url", 0.0)
    for _ in range(3):
        check()
    with pytest.raises(remanent.ArchiveError, match="lost"):
        check()


def test_error_of_a_restore_passes_its_lock(tmp_path: Path) -> None:
    # This error is also a `FileNotFoundError`, which the lock handles for its own file.
    with pytest.raises(remanent.NoStoreError, match="not here"), archives._locked(tmp_path / "restoring"):
        raise remanent.NoStoreError("not here")
