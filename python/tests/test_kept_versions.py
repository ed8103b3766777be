"""The number of versions that `save_file` keeps, their list, and the state after a save was killed."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from children import forked

import remanent

torch = pytest.importorskip("torch", reason="torch is not installed")

from remanent._versions.retention import open_store  # noqa: E402
from remanent.torch import (  # noqa: E402
    Checkpointer,
    ListedVersion,
    load_file,
    prune,
    safe_open,
    save_file,
    versions,
)

MIB = 1 << 20


def numbered(number: int, nbytes: int = 64) -> dict[str, torch.Tensor]:
    """Returns an incompressible state in which every element depends on the number."""
    return {"w": random_numbers(nbytes) + number}


@functools.cache
def random_numbers(nbytes: int) -> torch.Tensor:
    return torch.randint(1 << 24, (nbytes // 4,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)


def number_of(directory: str, at: int | str | ListedVersion | None = None) -> int:
    """Returns the number of the saved state, after checking that all elements belong to it."""
    w = load_file(directory, at=at)["w"]
    numbers = w - random_numbers(w.nbytes)
    assert bool((numbers == numbers[0]).all())
    return int(numbers[0])


def image_bytes(directory: str) -> int:
    return sum(each.stat().st_size for each in Path(directory, "pages").iterdir())


def test_newest_versions_are_kept(directory: str) -> None:
    for number in range(1, 10):
        assert save_file(numbered(number, 4 * MIB), directory, keep=2, durable=False) == number
        listed = [version.lsn for version in versions(directory)]
        assert listed == list(range(listed[0], number + 1))
        assert min(number, 2) <= len(listed) <= 3
        assert image_bytes(directory) <= 5 * 4 * MIB
    assert [number_of(directory, version) for version in versions(directory)] == listed
    with pytest.raises(remanent.NoStateError):
        load_file(directory, at=listed[0] - 1)


def test_default_keeps_twenty_versions(directory: str) -> None:
    with remanent.Store(directory, device="host") as store:
        for number in range(1, 31):
            store["other"] = bytes([number])
    save_file(numbered(31), directory, durable=False)
    save_file(numbered(32), directory, durable=False)
    assert len(versions(directory)) == 32, "the snapshot of the first save was the first one"
    for number in range(33, 51):
        save_file(numbered(number), directory, durable=False)
    assert 20 <= len(versions(directory)) <= 30


def test_keep_for_keeps_young_versions(directory: str) -> None:
    for number in range(1, 6):
        save_file(numbered(number), directory, keep=1, keep_for=3600)
    assert len(versions(directory)) == 5
    save_file(numbered(6), directory, keep=1, keep_for=0)
    assert [version.lsn for version in versions(directory)] == [6]


def test_keep_bytes_removes_oldest_versions(directory: str) -> None:
    for number in range(1, 13):
        save_file(numbered(number, 4 * MIB), directory, keep=None, keep_bytes=20 * MIB, durable=False)
        assert image_bytes(directory) <= 20 * MIB
    listed = versions(directory)
    assert 2 <= len(listed) <= 5 and number_of(directory, listed[0]) == listed[0].lsn


def test_name_keeps_version_until_pruned(directory: str) -> None:
    save_file(numbered(1), directory, keep=1, name="first", note="kept")
    for number in range(2, 6):
        save_file(numbered(number), directory, keep=1)
    assert [(version.lsn, version.name) for version in versions(directory)] == [(1, "first"), (5, None)]
    assert number_of(directory, "name:first") == 1
    with pytest.raises(remanent.TakenError, match="another version is named 'first'"):
        save_file(numbered(7), directory, name="first")
    assert number_of(directory) == 5, "nothing was saved"
    with pytest.raises(remanent.NoStateError, match="no version named 'last'"):
        prune(directory, give_up=["first", "last"])
    assert [version.lsn for version in prune(directory, give_up=["first"])] == [1]
    assert [version.lsn for version in versions(directory)] == [5]


def test_later_versions_survive_removed_name(directory: str) -> None:
    """Later versions are computed from the snapshot without the name, or from another one."""
    for number in range(1, 6):
        save_file(numbered(number), directory, keep=None, name="base" if number == 2 else None)
    prune(directory, keep=4)
    assert prune(directory, give_up=["base"]) == []
    assert [number_of(directory, version) for version in versions(directory)] == [2, 3, 4, 5]


def test_base_of_other_versions_is_not_removed(directory: str) -> None:
    with remanent.Store(directory, device="host", retention={"snapshots_kept": 1}) as store:
        for number in range(1, 6):
            store["w"] = bytes([number])
            if number in (2, 3):
                store.snapshot("alone" if number == 3 else None)
        store.prune(snapshots_kept=1)
    with pytest.raises(remanent.RefusedError, match="lsn 4 to 4"):
        prune(directory, give_up=["alone"])
    assert [version.lsn for version in versions(directory)] == [3, 4, 5]


def test_reader_keeps_its_version(directory: str) -> None:
    save_file(numbered(1, 4 * MIB), directory, keep=1)
    with safe_open(directory, at=1) as reading:
        for number in range(2, 5):
            save_file(numbered(number, 4 * MIB), directory, keep=1)
        assert torch.equal(reading.get_slice("w")[-9:], numbered(1, 4 * MIB)["w"][-9:])
    save_file(numbered(5, 4 * MIB), directory, keep=1)
    assert [version.lsn for version in versions(directory)] == [5]
    assert image_bytes(directory) <= 2 * 4 * MIB


def test_versions_list_time_note_and_bytes(directory: str) -> None:
    began = time.time()
    save_file(numbered(1, MIB), directory, note="first")
    state = numbered(1, MIB)
    state["w"][7] = -1
    save_file(state, directory, name="second")
    first, second = versions(directory)
    assert (first.lsn, first.note, first.name, first.step, first.ranks) == (1, "first", None, None, ())
    assert (second.lsn, second.note, second.name) == (2, None, "second")
    assert all(version.created is not None and began - 1 <= version.created <= time.time() + 1
               for version in (first, second))
    assert first.nbytes is not None and second.nbytes is not None
    assert second.nbytes < 4096 < first.nbytes
    with pytest.raises(remanent.NoStoreError):
        versions(directory + "-nothing")


def test_versions_lists_versions_of_run(directory: str) -> None:
    model = torch.nn.Linear(2, 1)
    with Checkpointer(directory, model, keep=2) as run:
        for step in range(1, 5):
            run.save(step, name="best" if step == 1 else None)
        kept = run.versions()
    assert [(version.step, version.lsn, version.name) for version in versions(directory)] == \
        [(version.step, version.lsn, version.name) for version in kept]
    with pytest.raises(remanent.RefusedError, match="contains the versions of a run"):
        prune(directory, keep=1, give_up=["best"])
    assert [version.name for version in versions(directory)] == [version.name for version in kept]


@pytest.mark.parametrize(("options", "said"), [({"keep": 0}, "keep: 0"), ({"keep_for": -1.0}, "keep_for: -1.0"),
                                               ({"keep_bytes": 0}, "keep_bytes: 0")])
def test_limits_that_keep_nothing_are_rejected(directory: str, options: dict[str, float], said: str) -> None:
    with pytest.raises(remanent.InvalidError, match=said):
        save_file(numbered(1), directory, **options)
    assert not Path(directory).exists()


def test_scattered_changes_of_many_tensors_are_logged_sparsely(directory: str) -> None:
    state = {f"w{number}": torch.randn(MIB) for number in range(14)}
    save_file(state, directory)
    for tensor in state.values():
        tensor[::1000] += 1
    save_file(state, directory)
    nbytes = versions(directory)[-1].nbytes
    assert nbytes is not None and nbytes < 14 * 4 * MIB / 200
    loaded = load_file(directory)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


def save_on(directory: str, number: int, progress: int) -> int:
    """Saves numbered states, of which two are kept, and reports each number once it is saved."""
    # Torch's threads do not exist in a forked child.
    torch.set_num_threads(1)
    while True:
        number += 1
        save_file(numbered(number, MIB), directory, keep=2, name="tenth" if number == 10 else None)
        os.write(progress, bytes([number]))


def test_open_replays_bounded_log(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves that change the same elements again and again do not make later saves replay more and more of the log."""
    monkeypatch.setattr("remanent._state.page_tree.REPLAYED_BYTES", 2 * MIB)
    state = {"w": random_numbers(32 * MIB).clone()}
    save_file(state, directory)
    for number in range(8):
        state["w"][: MIB // 4] = number
        save_file(state, directory, durable=False)
        with open_store(directory) as store:
            assert store.recovered["replayed_bytes"] <= 3 * MIB
    assert len(versions(directory)) == 9
    assert bool((load_file(directory)["w"] == state["w"]).all())


class WithoutSnapshots:
    """A store on a disk with room for batches and none for snapshots."""

    def __init__(self, store: remanent.Store) -> None:
        self._store = store
        self.refused = 0

    def snapshot(self, *args: object, **options: object) -> int:
        self.refused += 1
        raise remanent.DiskFullError("the disk is full", remedy="free space")

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def __contains__(self, key: str) -> bool:
        return key in self._store

    def __getitem__(self, key: str) -> bytes:
        return self._store[key]


@pytest.mark.parametrize(("keep", "replayed", "refused"), [(None, 0, 1), (1, MIB, 1), (1, 0, 2)])
def test_save_succeeds_without_room_for_snapshot(directory: str, monkeypatch: pytest.MonkeyPatch, keep: int | None,
                                                 replayed: int, refused: int) -> None:
    """A snapshot that only makes the next save faster, or old versions removable, does not fail a complete save."""
    monkeypatch.setattr("remanent._state.page_tree.REPLAYED_BYTES", replayed)
    stores = []

    @contextlib.contextmanager
    def opened(path: str) -> Iterator[WithoutSnapshots]:
        with open_store(path) as store:
            stores.append(WithoutSnapshots(store))
            yield stores[-1]

    monkeypatch.setattr("remanent._state.page_tree.open_store", opened)
    for number in (1, 2, 3):
        assert save_file(numbered(number), directory, keep=keep) == number
        assert number_of(directory) == number
    assert [store.refused for store in stores] == [refused] * 3
    assert len(versions(directory)) == 3


def test_killed_save_keeps_every_version_complete(directory: str) -> None:
    save_file(numbered(1, MIB), directory, keep=2)
    saved = 1
    chance = random.Random(int(os.environ.get("SEED", "7")))
    for _ in range(int(os.environ.get("KILLS", "3"))):
        reader, writer = os.pipe()
        newest = number_of(directory)
        pid = forked(lambda: save_on(directory, newest, writer))
        os.close(writer)
        saved = os.read(reader, 1)[0]
        time.sleep(chance.uniform(0, 0.4))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        saved = max([saved, *os.read(reader, 4096)])
        os.close(reader)
        listed = versions(directory)
        newest = number_of(directory)
        assert newest in (saved, saved + 1)
        assert {newest - 1, newest} <= {version.lsn for version in listed}
        assert [number_of(directory, version) for version in listed] == [version.lsn for version in listed]
        assert saved < 10 or "tenth" in {version.name for version in listed}
