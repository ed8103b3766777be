"""Stores that are archived while they are open."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import remanent


def _url(path: Path) -> str:
    path.mkdir(exist_ok=True)
    return path.as_uri()


def _restore(url: str, path: Path) -> None:
    command = [sys.executable, "-m", "remanent", "restore", "--from", url, os.fspath(path)]
    subprocess.run(command, check=True, capture_output=True)


def test_archived_batches_survive_loss_of_the_directory(tmp_path: Path) -> None:
    url = _url(tmp_path / "bucket")
    with remanent.Store(tmp_path / "store", ack="archived", archive={"url": url}) as store:
        for number in range(5):
            store[f"k{number}"] = bytes([number]) * 1000
        batch = store.batch()
        batch.set_root("step", 5)
        ticket = store.submit(batch)
        assert ticket.wait(60.0, "archived") and ticket.is_acknowledged("archived")
        lsn, archive = store.lsn, store.stats()["archive"]
    assert archive["archived"] == lsn and archive["failures"] == 0 and archive["last_failure"] is None
    shutil.rmtree(tmp_path / "store")
    _restore(url, tmp_path / "restored")
    with remanent.Store(tmp_path / "restored", archive={"url": url}) as store:
        assert {key: store[key] for key in store} == {f"k{n}": bytes([n]) * 1000 for n in range(5)}
        assert store.root["step"] == 5


def test_failures_name_their_kind(tmp_path: Path) -> None:
    url = _url(tmp_path / "bucket")
    with remanent.Store(tmp_path / "store", archive={"url": url}) as store:
        store["k"] = b"1"
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    with remanent.Store(tmp_path / "store", archive={"url": url}) as store:
        store["k"] = b"2"
    for path, given, kind in [
        (tmp_path / "copy", {"url": url}, "diverged"),
        (tmp_path / "new", {"url": url}, "other store"),
        (tmp_path / "store", {"url": _url(tmp_path / "empty")}, "lost"),
        (tmp_path / "store", {"url": "ftp://host/path"}, "settings"),
        (tmp_path / "store", {"url": (tmp_path / "missing").as_uri()}, "settings"),
    ]:
        with pytest.raises(remanent.ArchiveError) as raised:
            remanent.Store(path, archive=given)  # type: ignore[arg-type]
        assert raised.value.kind == kind and raised.value.remedy, raised.value
    with pytest.raises(remanent.ArchiveError) as raised:
        remanent.Store(tmp_path / "plain", ack="archived")
    assert raised.value.kind == "no archive"
    with remanent.Store(tmp_path / "plain") as store:
        assert store.stats()["archive"] is None
        batch = store.batch()
        batch.set_root("step", 1)
        ticket = store.submit(batch)
        with pytest.raises(remanent.ArchiveError):
            ticket.wait(1.0, "archived")


def test_named_snapshots_survive_loss_of_the_directory(tmp_path: Path) -> None:
    url = _url(tmp_path / "bucket")
    with remanent.Store(tmp_path / "store", archive={"url": url}) as store:
        store["k"] = b"1"
        assert store.wait_archived(store.snapshot("one"), timeout=60)
        store["k"] = b"2"
        two = store.snapshot("two", verify=False)
        assert store.wait_archived(two.id)
        # The newest two snapshots are kept in any case.
        for value in (b"3", b"4"):
            store["k"] = value
            unnamed = store.snapshot()
        store.prune(give_up=["one"])
        for snapshot, error in [(unnamed, remanent.ArchiveError), (99, remanent.NoStateError)]:
            with pytest.raises(error):
                store.wait_archived(snapshot, timeout=60)
        archive = store.stats()["archive"]
        assert archive is not None
    shutil.rmtree(tmp_path / "store")
    _restore(url, tmp_path / "restored")
    with remanent.Store(tmp_path / "restored", archive={"url": url}) as store:
        assert [info.name for info in store.snapshots() if info.name is not None] == ["two"]
        with remanent.View(tmp_path / "restored", "two") as view:
            assert view["k"] == b"2"


@pytest.mark.parametrize("is_killed", [False, True])
def test_names_may_be_given_up_while_others_are_archived(tmp_path: Path, is_killed: bool) -> None:
    url = _url(tmp_path / "bucket")
    code = f"""
import os, remanent, signal
options = {{"archive": {{"url": {url!r}, "interval": 0.01}}, "retention": {{"snapshots_kept": 1}}}}
store = remanent.Store({os.fspath(tmp_path / "store")!r}, **options)
for number in range(40):
    store["k"] = bytes([number]) * 200_000
    store.snapshot(f"n{{number}}")
    if number >= 2:
        store.prune(give_up=[f"n{{number - 2}}"])
os.kill(os.getpid(), signal.SIGKILL) if {is_killed} else store.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == (-9 if is_killed else 0), done.stderr.decode()
    with remanent.Store(tmp_path / "store", archive={"url": url}) as store:
        named = [info for info in store.snapshots() if info.name is not None]
        assert all(store.wait_archived(info, timeout=60) for info in named)
    shutil.rmtree(tmp_path / "store")
    _restore(url, tmp_path / "restored")
    with remanent.Store(tmp_path / "restored", archive={"url": url}) as store:
        assert [info.name for info in store.snapshots() if info.name is not None] == [info.name for info in named]


def test_open_without_the_archive_is_refused(tmp_path: Path) -> None:
    url = _url(tmp_path / "bucket")
    with remanent.Store(tmp_path / "store", archive={"url": url}) as store:
        store["k"] = b"1"
    with pytest.raises(remanent.ArchiveError, match="follows this store") as raised:
        remanent.Store(tmp_path / "store")
    assert (raised.value.kind, raised.value.url) == ("not given", url)
    with remanent.View(tmp_path / "store") as view:
        assert view["k"] == b"1"


def test_run_continues_on_another_machine(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from remanent.torch import Checkpointer

    archive: remanent.ArchiveOptions = {"url": _url(tmp_path / "bucket")}
    state = {"w": torch.zeros(1000), "position": 0}

    def run(machine: str) -> Checkpointer:
        return Checkpointer(tmp_path / machine, extra={"state": state}, rng=False, keep=2, archive=archive)

    with run("first") as first:
        for step in range(1, 6):
            state["w"].fill_(step)
            state["position"] = 10 * step
            saved = first.save(step, name="best" if step == 2 else None, wait=step != 4)
            assert saved.wait_archived(60.0)
        versions = [(version.step, version.name, version.created) for version in first.versions()]
    assert [version[:2] for version in versions] == [(2, "best"), (4, None), (5, None)]
    shutil.rmtree(tmp_path / "first")

    _restore(archive["url"], tmp_path / "second")
    state = {"w": torch.zeros(1000), "position": 0}
    with run("second") as second:
        assert [(version.step, version.name, version.created) for version in second.versions()] == versions
        assert second.restore() == 5 and state["position"] == 50 and (state["w"] == 5).all()
        assert second.restore(at="best") == 2 and state["position"] == 20 and (state["w"] == 2).all()
        assert second.restore(at=4) == 4 and (state["w"] == 4).all()
        # History continues from the restored version. A version that is given up leaves the archive, too.
        state["w"].fill_(6)
        assert second.save(6).wait_archived(60.0)
        second.give_up("best")
    shutil.rmtree(tmp_path / "second")
    _restore(archive["url"], tmp_path / "third")
    with run("third") as third:
        # The removal of a version does nothing while the archive uploads it, and is repeated by a later save.
        steps = [version.step for version in third.versions()]
        assert steps[-2:] == [5, 6] and 2 not in steps
        assert third.restore() == 6 and (state["w"] == 6).all()


def test_killed_save_keeps_the_last_version(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    url = _url(tmp_path / "bucket")
    code = f"""
import os, signal, torch
from remanent.torch import Checkpointer
state = {{"w": torch.zeros(2_000_000)}}
run = Checkpointer({os.fspath(tmp_path / "run")!r}, extra={{"state": state}}, rng=False, archive={{"url": {url!r}}})
state["w"].fill_(1)
assert run.save(1).wait_archived(60.0)
state["w"].fill_(2)
run.save(2, wait=False)
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert killed.returncode == -9, killed.stderr.decode()
    shutil.rmtree(tmp_path / "run")
    _restore(url, tmp_path / "restored")
    import torch

    from remanent.torch import Checkpointer

    state = {"w": torch.zeros(2_000_000)}
    with Checkpointer(tmp_path / "restored", extra={"state": state}, rng=False, archive={"url": url}) as run:
        step = run.restore()
        assert step in (1, 2) and (state["w"] == step).all()


def test_view_shows_states_of_an_archive(tmp_path: Path) -> None:
    url = _url(tmp_path / "bucket")
    archive: remanent.ArchiveOptions = {"url": url}
    with remanent.Store(tmp_path / "store", archive=archive) as store:
        store["k"] = b"1" * 100_000
        assert store.wait_archived(store.snapshot("best"), timeout=60)
        store["k"] = b"2" * 100_000
        batch = store.batch(ack="archived")
        batch.set_root("step", 2)
        store.commit(batch)
        with remanent.View.open_archive(archive) as newest, remanent.View.open_archive(archive, "best") as best:
            assert newest["k"] == b"2" * 100_000 and newest.root["step"] == 2 and newest.id == store.id
            assert best["k"] == b"1" * 100_000 and best.lsn == 1 and "step" not in best.root
            assert remanent.View.open_archive(archive, 2)["k"] == b"2" * 100_000
            assert url in repr(best)
            out = bytearray(100_000)
            best.load({"k": out})
            assert out == b"1" * 100_000
            best.prove(["k"])
            best.fork(tmp_path / "fork")
        # The writer was not disturbed, and the store continues.
        with store.batch(ack="archived") as batch:
            batch.set_root("step", 3)
        with pytest.raises(remanent.Error, match="closed"):
            best["k"]
    shutil.rmtree(tmp_path / "store")
    with remanent.View.open_archive({**archive, "cache_len_max": 0}) as view:
        assert view["k"] == b"2" * 100_000 and view.root["step"] == 3
    with remanent.Store(tmp_path / "fork") as fork:
        assert fork["k"] == b"1" * 100_000


def test_view_of_an_archive_names_its_failures(tmp_path: Path) -> None:
    url = _url(tmp_path / "bucket")
    with remanent.Store(tmp_path / "store", archive={"url": url}) as store:
        store["k"] = b"1" * 100_000
        assert store.wait_archived(store.snapshot("best"), timeout=60)
    for at in ("better", "lsn:9", "snapshot:7"):
        with pytest.raises(remanent.NoStateError):
            remanent.View.open_archive({"url": url}, at)
    for given, kind in [({"url": _url(tmp_path / "empty")}, "lost"), ({"url": "ftp://host/path"}, "settings"),
                        ({"url": (tmp_path / "missing").as_uri()}, "settings")]:
        with pytest.raises(remanent.ArchiveError) as raised:
            remanent.View.open_archive(given)  # type: ignore[arg-type]
        assert raised.value.kind == kind and raised.value.remedy, raised.value
    for wrong in (url, {}, {"url": 3}, {"url": url, "cache_len_max": "4"}, {"url": url, "cache": 4}):
        with pytest.raises(remanent.InvalidTypeError, match="archive"):
            remanent.View.open_archive(wrong)  # type: ignore[arg-type]
    files = {path: path.read_bytes() for path in (tmp_path / "bucket").rglob("*") if path.is_file()}
    with remanent.View.open_archive({"url": url}, "best") as view:
        for path in files:
            if path.parent.name == "data":
                path.unlink()
        with pytest.raises(remanent.ArchiveError) as raised:
            view["k"]
        assert raised.value.kind == "damaged", raised.value


def test_run_without_archive_cannot_wait_for_it(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from remanent.torch import Checkpointer

    with Checkpointer(tmp_path / "plain", torch.nn.Linear(2, 2)) as run:
        with pytest.raises(remanent.ArchiveError):
            run.save(1).wait_archived(60.0)


def test_options_are_checked(tmp_path: Path) -> None:
    for given, error in [
        ({}, remanent.InvalidTypeError),
        ({"url": 3}, remanent.InvalidTypeError),
        ({"url": "s3://b", "settings": {"region": 1}}, remanent.InvalidTypeError),
        ({"url": "s3://b", "intervall": 1.0}, remanent.InvalidTypeError),
        ({"url": "s3://b", "interval": float("nan")}, remanent.InvalidError),
        ({"url": "s3://b", "interval": 1e6}, remanent.InvalidError),
    ]:
        with pytest.raises(error):
            remanent.Store(tmp_path / "store", archive=given)
    assert not (tmp_path / "store").exists()
