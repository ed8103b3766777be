"""Directories given by relative paths and links, moved directories, and directories that a group shares."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import remanent

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed.checkpoint as dcp  # noqa: E402

from remanent.dcp import StorageReader, StorageWriter  # noqa: E402
from remanent.kv import BlockCache  # noqa: E402
from remanent.torch import Checkpointer, load_file, save_file  # noqa: E402
from remanent.weights import Publisher, Subscriber  # noqa: E402

# A generator for one entry point. It receives a path and a stack for objects to close, and yields once. The code after
# the yield runs in the changed situation, continues to use the object, and checks the earlier contents.
Entry = Callable[[Any, ExitStack], Iterator[None]]


def tensors(value: float) -> dict[str, Any]:
    return {"w": torch.full((30_000,), value)}


def a_store(path: Any, held: ExitStack) -> Iterator[None]:
    store = held.enter_context(remanent.Store(path))
    store["k"] = b"1"
    store.snapshot("one")
    yield
    store["k"] = b"2"
    store.snapshot("two")
    assert remanent.View(store.directory, "name:one")["k"] == b"1"
    assert [change.after for change in store.blame("k", 0)] == [b"1", b"2"]
    store.restore("name:one")
    assert store["k"] == b"1"


def a_view(path: Any, held: ExitStack) -> Iterator[None]:
    with remanent.Store(path) as store:
        store["k"] = b"1" * 5000
    view = held.enter_context(remanent.View(path))
    yield
    assert view["k"] == b"1" * 5000 and len(view.blame("k", 0, 1)) == 1


def a_checkpointer(path: Any, held: ExitStack) -> Iterator[None]:
    state = tensors(1)
    run = held.enter_context(Checkpointer(path, extra={"s": state}, rng=False))
    run.save(1)
    yield
    state["w"].fill_(2)
    run.save(2)
    assert run.restore(1) == 1 and state["w"][0] == 1
    assert [version.step for version in run.versions()] == [1, 2] and set(run.diff(1, 2)) == {"s/w"}


def a_cache(path: Any, held: ExitStack) -> Iterator[None]:
    cache = held.enter_context(BlockCache(path, identity={"m": 1}, capacity=1 << 20))
    assert cache.store([b"a"], [b"a" * 9000]).result() == 9000
    yield
    assert cache.store([b"b"], [b"b" * 9000]).result() == 9000
    assert [cache.length(key) for key in (b"a", b"b")] == [9000, 9000]


def a_publisher(path: Any, held: ExitStack) -> Iterator[None]:
    publisher = held.enter_context(Publisher(path))
    publisher.publish(tensors(1), 1)
    yield
    publisher.publish(tensors(2), 2)
    assert publisher.store.root["step"] == 2


def a_subscriber(path: Any, held: ExitStack) -> Iterator[None]:
    publisher, target = held.enter_context(Publisher(path)), tensors(0)
    publisher.publish(tensors(1), 1)
    subscriber = Subscriber(path)
    assert subscriber.apply_to(target) == 1
    yield
    publisher.publish({"w": torch.full((20_000,), 2.0)}, 2)
    target = {"w": torch.zeros(20_000)}
    assert subscriber.apply_to(target, timeout=10) == 2 and target["w"][0] == 2


def a_follower(path: Any, held: ExitStack) -> Iterator[None]:
    store = held.enter_context(remanent.Store(path))
    store["k"] = b"1"
    follower = held.enter_context(remanent.Follower(path))
    assert follower.next(10).lsn == 1
    yield
    store["k"] = b"2"
    assert follower.next(10).lsn == 2


def a_sharded_checkpoint(path: Any, held: ExitStack) -> Iterator[None]:
    writer, reader = StorageWriter(os.path.join(path, "1")), StorageReader(os.path.join(path, "1"))
    dcp.save(tensors(1), storage_writer=writer, no_dist=True)
    yield
    loaded = tensors(0)
    dcp.load(loaded, storage_reader=reader, no_dist=True)
    assert loaded["w"][0] == 1
    dcp.save(tensors(2), storage_writer=writer, no_dist=True)


# Each entry point, and whether it opens files by path again, so that it cannot follow a moved directory.
ENTRIES: dict[str, tuple[Entry, bool]] = {
    "Store": (a_store, False), "View": (a_view, False), "Checkpointer": (a_checkpointer, False),
    "BlockCache": (a_cache, False), "Publisher": (a_publisher, False), "Subscriber": (a_subscriber, True),
    "Follower": (a_follower, True), "dcp": (a_sharded_checkpoint, True),
}


@contextmanager
def below(folder: Path) -> Iterator[Path]:
    """Creates two directories, one of which becomes the working directory."""
    home, elsewhere = folder / "home", folder / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    before = os.getcwd()
    os.chdir(home)
    try:
        yield elsewhere
    finally:
        os.chdir(before)


@pytest.mark.parametrize("entry", ENTRIES)
def test_relative_path_is_resolved_at_call(entry: str, tmp_path: Path) -> None:
    with below(tmp_path) as elsewhere, ExitStack() as held:
        running = ENTRIES[entry][0]("store", held)
        next(running)
        os.chdir(elsewhere)
        assert next(running, "end") == "end"
        held.close()
        assert os.listdir(elsewhere) == []


@pytest.mark.parametrize("entry", ENTRIES)
def test_store_survives_retargeted_symlink(entry: str, tmp_path: Path) -> None:
    run, is_by_path = ENTRIES[entry]
    (tmp_path / "real").mkdir()
    (tmp_path / "other").mkdir()
    link = tmp_path / "link"
    link.symlink_to("real")
    with ExitStack() as held:
        running = run(link, held)
        next(running)
        if not is_by_path:
            link.unlink()
            link.symlink_to("other")
        assert next(running, "end") == "end"
    assert os.listdir(tmp_path / "other") == [] and link.is_symlink()


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("entry", [name for name, (_, is_by_path) in ENTRIES.items() if not is_by_path])
def test_store_survives_moved_directory(entry: str, replaced: bool, tmp_path: Path) -> None:
    run, _ = ENTRIES[entry]
    path, moved, other = tmp_path / "store", tmp_path / "moved", tmp_path / "other"
    with ExitStack() as held:
        running = run(path, held)
        next(running)
        path.rename(moved)
        if replaced:
            with ExitStack() as held_other:
                next(run(path, held_other))
            shutil.copytree(path, other)
        assert next(running, "end") == "end"
    assert path.exists() == replaced
    if replaced:
        contents = [{file.relative_to(root): file.read_bytes() for file in root.rglob("*") if file.is_file()}
                    for root in (path, other)]
        assert contents[0] == contents[1], "the other store was changed"


@pytest.mark.parametrize("mask", [0o002, 0o022, 0o077])
@pytest.mark.parametrize("entry", [*ENTRIES, "save_file"])
def test_files_respect_umask(entry: str, mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        with ExitStack() as held:
            if entry == "save_file":
                save_file(tensors(1), tmp_path / "store")
            else:
                [*_] = ENTRIES[entry][0](tmp_path / "store", held)
    finally:
        os.umask(before)
    for path in (tmp_path / "store", *(tmp_path / "store").rglob("*")):
        expected = (0o777 if path.is_dir() else 0o666) & ~mask
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


WAYS: dict[str, Callable[[Path, Path], object]] = {
    "copytree": shutil.copytree,
    "hard links": lambda source, target: shutil.copytree(source, target, copy_function=os.link),
    "archive": lambda source, target: shutil.unpack_archive(
        shutil.make_archive(str(target), "tar", source), target, filter="data"),
}


@pytest.mark.parametrize("way", WAYS)
def test_copies_and_originals_are_independent(way: str, tmp_path: Path) -> None:
    path, copy = tmp_path / "store", tmp_path / "copy"
    for value in range(4):
        save_file(tensors(value), path)
    WAYS[way](path, copy)
    for value in range(4, 12):
        save_file(tensors(value), path)
        assert load_file(copy)["w"][0] == (3 if value == 4 else 1 - value)
        save_file(tensors(-value), copy)
        assert load_file(path)["w"][0] == value and load_file(copy)["w"][0] == -value


def test_checkpoint_loads_through_symlinks(tmp_path: Path) -> None:
    save_file(tensors(1), tmp_path / "versions" / "one")
    (tmp_path / "latest").symlink_to(tmp_path / "versions" / "one")
    (tmp_path / "root").symlink_to(tmp_path / "versions")
    for path in (tmp_path / "latest", tmp_path / "root" / "one"):
        assert load_file(path)["w"][0] == 1
        save_file(tensors(1), path)
    assert (tmp_path / "latest").is_symlink()
    with Checkpointer(tmp_path / "run", extra={"s": tensors(1)}, rng=False) as run:
        run.save(1)
    (tmp_path / "link").symlink_to("run")
    state = tensors(0)
    with Checkpointer(tmp_path / "link", extra={"s": state}, rng=False) as run:
        assert run.restore() == 1 and state["w"][0] == 1
