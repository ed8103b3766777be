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
        assert ticket.wait(60.0, "archived") and ticket.is_("archived")
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


def test_writers_of_versions_refuse_archives(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from remanent.dcp import StorageWriter
    from remanent.torch import Checkpointer

    archive: remanent.ArchiveOptions = {"url": _url(tmp_path / "bucket")}
    with pytest.raises(remanent.InvalidError, match="archive"):
        Checkpointer(tmp_path / "run", torch.nn.Linear(2, 2), archive=archive)
    with pytest.raises(remanent.InvalidError, match="archive"):
        StorageWriter(tmp_path / "step", archive=archive)
    assert not (tmp_path / "run").exists() and not (tmp_path / "step").exists()


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
