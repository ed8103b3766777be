"""Stores, batches and reads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import remanent


def test_batch_is_atomic(store: remanent.Store) -> None:
    with store.batch(note="first") as batch:
        page = batch.create(8, key="a", metadata={"kind": "test", "n": -3, "list": [1, None, True, 0.5, b"x"]})
        batch.write(page, 2, b"xy")
        batch.write("a", 4, b"z")
        batch.set_root("step", 1)
    assert store["a"] == b"\0\0xyz\0\0\0"
    assert store.root == {"step": 1}
    assert store.info("a").metadata == {"kind": "test", "n": -3, "list": [1, None, True, 0.5, b"x"]}
    assert batch.pages == [store.info("a").page] and batch.lsn == store.lsn == 1

    with pytest.raises(ZeroDivisionError):
        with store.batch() as batch:
            batch.write("a", 0, b"never")
            batch.set_root("step", 1 // 0)
    assert store["a"] == b"\0\0xyz\0\0\0" and store.lsn == 1
    with pytest.raises(remanent.ClosedError):
        batch.write("a", 0, b"late")


def test_store_is_mapping(store: remanent.Store) -> None:
    store["a"] = b"1"
    store[b"\xff\0"] = b"22"
    assert list(store) == ["a", b"\xff\0"] and len(store) == 2
    assert "a" in store and b"a" in store and "b" not in store and 99 not in store
    assert store.get("b", b"none") == b"none"
    store["a"] = b"longer"
    assert store["a"] == b"longer"
    del store["a"]
    with pytest.raises(KeyError) as caught:
        store["a"]
    assert isinstance(caught.value, remanent.UnknownKeyError) and caught.value.key == "a"
    assert str(caught.value) == "there is no page with key a"


def test_every_operation_is_applied(store: remanent.Store) -> None:
    with store.batch() as batch:
        batch.create(bytes(range(16)), key="p")
        copy = batch.clone_page("p")
        batch.copy("p", 0, 4, copy, 12)
        batch.scatter("p", [0, 3], b"AAAADDDD", width=4)
        batch.scatter("p", np.array([15], dtype=np.uint32), b"!", width=1)
        batch.write_masked("p", 4, b"\x05", b"abcd")
        batch.fill("p", 8, 4, b"\1\2")
    expected = b"AAAA" + b"a\x05c\x07" + b"\1\2\1\2" + b"DDD!"
    assert store["p"] == expected
    assert store[batch.pages[1]] == bytes(range(12)) + bytes(range(4))
    assert store.compare("p", batch.pages[1], width=4) == (4, 0)
    with store.batch() as batch:
        batch.resize("p", 20)
        batch.set_metadata("p", "x", {"y": [1]})
        batch.move_to("p", "pinned")
    info = store.info("p")
    assert (info.length, info.place, info.metadata) == (20, "pinned", {"x": {"y": [1]}})
    with store.batch() as batch:
        batch.remove_metadata("p", "x")
        batch.write_changes("p", expected + bytes(4), expected + b"\0\0\0!", width=4)
        batch.expect_epoch(info.page, info.epoch)
        batch.set_root("gone", 1)
        batch.remove_root("gone")
    assert store["p"] == expected + b"\0\0\0!" and store.info("p").metadata == {} and store.root == {}
    with pytest.raises(remanent.ConflictError) as caught:
        with store.batch() as batch:
            batch.expect_epoch(info.page, info.epoch)
            batch.delete("p")
    assert caught.value.expected == info.epoch and caught.value.found == info.epoch + 1
    assert "read page 1 again" in caught.value.remedy


def test_pages_are_read_in_all_ways(store: remanent.Store) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    with store.batch() as batch:
        batch.create(array, key="x", metadata={"dtype": "F32", "shape": [3, 4]})
        batch.create(b"", key="empty")
    assert store.read("x", 4, 4) == array.tobytes()[4:8] and store.read("x", 44) == array.tobytes()[44:]
    assert store["empty"] == b"" and store.numpy("empty").shape == (0,)
    out = np.zeros(4, dtype=np.float32)
    assert store.read_into("x", out, 16) == 16 and (out == array[1]).all()
    assert (store.numpy("x") == array).all() and store.numpy("x").dtype == np.float32
    assert store.numpy("x", "uint8").shape == (48,)
    copy = store.array("x")
    assert (copy.dtype, copy.shape, copy.nbytes) == ("float32", (3, 4), 48)
    shared = np.from_dlpack(copy)
    assert (shared == array).all()
    shared[0, 0] = 7
    assert copy.numpy()[0, 0] == 7 and store.numpy("x")[0, 0] == 0, "a copy is the caller's own"
    for call in (lambda: store.read("x", 40, 9), lambda: store.read_into("x", out, 36), lambda: store.read("x", 49)):
        with pytest.raises(remanent.OutOfBoundsError):
            call()
    for wrong in ({"dtype": "float99"}, {"dtype": "float64", "shape": [5]}):
        with pytest.raises(ValueError):
            store.array("x", **wrong)
    with pytest.raises(BufferError):
        store.read_into("x", b"readonly")


def test_noncontiguous_or_object_data_is_rejected(store: remanent.Store) -> None:
    with store.batch() as batch:
        batch.create(8, key="p")
        for wrong in (np.zeros((4, 4))[:, 1], memoryview(b"abcdef")[::2]):
            with pytest.raises(BufferError):
                batch.write("p", 0, wrong)
        with pytest.raises(TypeError):
            batch.write("p", 0, "text")
        for value in (object(), {1: 2}, {"a": {1, 2}}):
            with pytest.raises(TypeError):
                batch.set_root("x", value)
        with pytest.raises(remanent.InvalidError):
            batch.set_root("x", 1 << 64)
        recursive: list[object] = []
        recursive.append(recursive)
        with pytest.raises(TypeError):
            batch.set_root("x", recursive)
    assert store.root == {}


def test_root_values_are_restored_unchanged(store: remanent.Store) -> None:
    root = {"null": None, "no": False, "big": 2**64 - 1, "small": -(2**63), "nan": float("inf"), "text": "ä",
            "bytes": b"\0\xff", "list": [1, [2]], "map": {"a": {"b": 1}}}
    with store.batch() as batch:
        for name, value in root.items():
            batch.set_root(name, value)
    assert store.root == root


def test_reopening_finds_everything(directory: str) -> None:
    with remanent.Store(directory, device="host") as store:
        store["a"] = b"remains"
        assert store.recovered["created"] and not store.closed
    assert store.closed
    with pytest.raises(remanent.ClosedError):
        store["a"]
    with pytest.raises(remanent.ClosedError):
        store.lsn
    store.close()
    with remanent.Store(directory, device="host", create=False) as store:
        assert store["a"] == b"remains" and not store.recovered["created"]


def test_batch_belongs_to_one_store(store: remanent.Store, tmp_path: Path) -> None:
    with remanent.Store(tmp_path / "other", device="host") as other:
        with pytest.raises(ValueError):
            other.commit(store.batch())


def test_errors_are_typed_with_remedy(directory: str, store: remanent.Store, tmp_path: Path) -> None:
    with pytest.raises(remanent.LockedError) as locked:
        remanent.Store(directory, device="host")
    assert locked.value.path == directory and str(os.getpid()) in locked.value.holder
    with pytest.raises(FileNotFoundError) as missing:
        remanent.Store(tmp_path / "nothing", create=False)
    assert isinstance(missing.value, remanent.NoStoreError) and missing.value.path == str(tmp_path / "nothing")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "file").write_text("x")
    with pytest.raises(remanent.ForeignDirectoryError):
        remanent.Store(tmp_path / "foreign")
    with pytest.raises(remanent.InvalidError):
        remanent.Store(tmp_path / "other", log={"segment_len": 5})
    for options in ({"ack": "soon"}, {"device": "abacus"}, {"memory": {"load": "never"}}, {"log": {"io": "by hand"}}):
        with pytest.raises(ValueError):
            remanent.Store(tmp_path / "other", **options)
    with pytest.raises(remanent.UnknownPageError):
        store[77]
    with pytest.raises(remanent.InvalidError):
        store["x" * 65] = b""
    with pytest.raises(remanent.NoStateError):
        store.restore("name:nothing")
    with pytest.raises(remanent.OverBudgetError) as over:
        with remanent.Store(tmp_path / "small", device="host", memory={"budget": {"host": 100}}) as small:
            small["a"] = bytes(101)
    assert over.value.available == 100 and over.value.place == "host"
    with remanent.Store(tmp_path / "own", identity=b"mine"):
        pass
    with pytest.raises(remanent.MismatchError):
        remanent.Store(tmp_path / "own", identity=b"yours")


def test_errors_can_be_pickled(store: remanent.Store) -> None:
    import pickle

    with pytest.raises(remanent.UnknownKeyError) as caught:
        store["nothing"]
    error = pickle.loads(pickle.dumps(caught.value))
    assert type(error) is remanent.UnknownKeyError and error.key == "nothing" and "list the keys" in error.remedy


def test_damage_error_names_file(directory: str) -> None:
    with remanent.Store(directory, device="host") as store:
        for n in range(3):
            store[f"k{n}"] = bytes(1000)
            store.wait_durable()
        assert store.scrub() == [] and store.audit() == []
    segments = sorted((Path(directory) / "log").iterdir())
    damaged = 0
    for segment in segments:
        content = bytearray(segment.read_bytes())
        at = content.find(b"k1")
        if at > 0:
            content[at] ^= 1
            segment.write_bytes(content)
            damaged += 1
    assert damaged
    with pytest.raises(remanent.DamagedError) as caught:
        remanent.Store(directory, device="host")
    assert caught.value.path == directory and caught.value.file and caught.value.offset is not None


def test_snapshots_and_views_show_earlier_states(store: remanent.Store, directory: str, tmp_path: Path) -> None:
    store["w"] = b"old!"
    named = store.snapshot("before")
    assert named.name == "before" and named.end == store.lsn and named in store.snapshots()
    with store.view() as view:
        store["w"] = b"new!"
        store["x"] = b"x"
        assert list(view) == ["w"] and list(store) == ["w", "x"]
        with pytest.raises(remanent.OvertakenError):
            view["w"]
        with pytest.raises(remanent.InUseError):
            store.close()
    with pytest.raises(remanent.ClosedError):
        view.lsn
    for at in ("name:before", named, named.end, f"lsn:{named.end}"):
        with remanent.View(directory, at) as past:
            assert past["w"] == b"old!" and past.lsn == named.end and past.id == store.id
            assert isinstance(past, remanent.Reader) and past.page_count == 1
    newest = remanent.View(directory)
    assert newest["w"] == b"new!"
    identity = newest.fork(tmp_path / "fork")
    newest.close()
    assert identity != store.id
    assert store.fork(tmp_path / "fork2", "name:before") not in (identity, store.id)
    with remanent.Store(tmp_path / "fork2", device="host") as fork:
        assert fork["w"] == b"old!"
    lsn = store.restore("name:before")
    assert store["w"] == b"old!" and store.lsn == lsn and "x" not in store
    store.snapshot()
    assert [info.name for info in store.prune(give_up=["before"], snapshots_kept=1, dry_run=True).snapshots]
    pruned = store.prune(give_up=["before"], snapshots_kept=1)
    assert "before" in [info.name for info in pruned.snapshots] and pruned.bytes >= 0
    with pytest.raises(remanent.NoStateError):
        remanent.View(directory, "name:before")


def test_wheel_contains_command(store: remanent.Store, directory: str) -> None:
    store["a"] = b"x"
    store.close()
    command = [sys.executable, "-m", "remanent"]
    done = subprocess.run([*command, "verify", directory], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("clean: "), done
    done = subprocess.run([*command, "verify", directory + "x"], capture_output=True, text=True)
    assert done.returncode == 2 and "remanent: " in done.stderr
    done = subprocess.run([*command, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "Usage: remanent" in done.stdout
    # The command starts itself in child processes and kills them.
    done = subprocess.run([*command, "demo", "--kills", "2", "--requests", "400"], capture_output=True, text=True)
    assert done.returncode == 0 and "kill" in done.stdout, done


def test_command_archives_and_restores(store: remanent.Store, directory: str, tmp_path: Path) -> None:
    store["a"] = b"x" * 5000
    store.close()
    (tmp_path / "archive").mkdir()
    url, restored = f"file://{tmp_path}/archive", str(tmp_path / "restored")
    for arguments in (["archive", "push", directory, url], ["restore", "--from", url, restored]):
        command = [sys.executable, "-m", "remanent", *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done
    with remanent.Store(restored, device="host") as copy:
        assert copy["a"] == b"x" * 5000


def test_tiers_hold_more_pages_than_memory(tmp_path: Path) -> None:
    room, length = 8, 4096
    pages = {f"page {number}": bytes([number]) * length for number in range(4 * room)}
    options = {"device": "host", "memory": {"budget": {"host": room * length}}}
    for eviction in ("lru", "s3-fifo"):
        path = tmp_path / eviction
        with remanent.Store(path, tiers={"places": ["host", "disk"], "eviction": eviction}, **options) as store:
            for key, data in pages.items():
                store[key] = data
            assert {key: store[key] for key in store} == pages
            on_disk = [key for key in store if store.info(key).place == "disk"]
            assert len(on_disk) >= 3 * room
            assert store.promote(on_disk[:2]) is not None and store.promote(on_disk[:2]) is None
            assert [store.info(key).place for key in on_disk[:2]] == ["host", "host"]
            # A lease needs an address, so the page is moved to memory.
            with store.lease(on_disk[3]) as lease:
                assert bytes(lease) == pages[on_disk[3]] and store.info(on_disk[3]).place == "host"
            store.demote(on_disk[:1])
            assert store.info(on_disk[0]).place == "disk"
            lsn = store.ensure([store.info(on_disk[0]).page], "host")
            assert lsn == store.lsn and store.ensure(iter([on_disk[0]]), "host") is None
        with remanent.Store(path, tiers={"places": ["host", "disk"], "eviction": eviction}, **options) as store:
            assert {key: store[key] for key in store} == pages


def test_open_with_less_memory_demotes_pages(directory: str) -> None:
    with remanent.Store(directory, device="host") as store:
        for number in range(32):
            store[f"block {number}"] = bytes([number]) * 4096
        store.snapshot()
    small = {"device": "host", "memory": {"budget": {"host": 8 * 4096}}}
    with pytest.raises(remanent.OverBudgetError):
        remanent.Store(directory, **small)
    with remanent.Store(directory, **small, tiers={"places": ["host", "disk"]}) as store:
        assert store.recovered["lowered_pages"] == 32 - 7, "a part of eight is kept free"
        assert all(store[f"block {number}"] == bytes([number]) * 4096 for number in range(32))
        assert [store.info(f"block {number}").place for number in (0, 31)] == ["disk", "host"]


def test_invalid_tiers_are_rejected(tmp_path: Path) -> None:
    for tiers in ({"places": ["host", "shelf"]}, {"places": ["host", "disk"], "eviction": "random"}, {"places": []}):
        with pytest.raises((remanent.InvalidError, ValueError)):
            remanent.Store(tmp_path / "store", device="host", tiers=tiers)
    with remanent.Store(tmp_path / "store", device="host") as store:
        store["a"] = b"1"
        for call in (store.promote, store.demote):
            with pytest.raises(remanent.InvalidError, match="tiers"):
                call(["a"])
        with pytest.raises(remanent.UnknownKeyError):
            store.ensure(["b"], "disk")
        with pytest.raises(TypeError):
            store.ensure([1.5], "disk")
        assert store.ensure([], "disk") is None


@pytest.mark.parametrize("place", ["host", "disk"])
def test_update_sets_page_contents(directory: str, place: str) -> None:
    with remanent.Store(directory) as store:
        held = bytearray(os.urandom(300_000))
        with store.batch() as batch:
            batch.create(bytes(held), key="k", place=place)

        def update(data: bytes, **options: int) -> int | None:
            with store.batch() as batch:
                return batch.update("k", data, **options)

        assert update(bytes(held)) == 0
        for at in (0, 3, 200_000, 299_999):
            held[at] ^= 1
        assert update(bytes(held), width=4) == 3, "bytes 0 and 3 are of one element"
        assert store["k"] == held
        # A large part, more than may be logged, the whole page, and other lengths are written as whole pages.
        held[100_000:200_000] = bytes(100_000)
        assert update(bytes(held)) is None and store["k"] == held
        held[5] ^= 1
        assert update(bytes(held), logged_max=0) is None and store["k"] == held
        assert update(os.urandom(300_000)) is None
        for data in (b"short", b"", os.urandom(500_000)):
            assert update(data) is None or not data, len(data)
            assert store["k"] == data
        with pytest.raises(ValueError), store.batch() as batch:
            batch.update(batch.create(b"new"), b"old")
        with pytest.raises(ValueError), store.batch() as batch:
            batch.update("k", bytes(500_000))
            batch.update("k", data)
        with pytest.raises(remanent.ConflictError), store.batch() as batch:
            batch.update("k", data)
            store["k"] = bytes(500_000)


def test_updates_by_threads_equal_updates_one_by_one(tmp_path: Path) -> None:
    one_by_one = remanent.Store(tmp_path / "one by one", device="host")
    together = remanent.Store(tmp_path / "together", device="host")
    old = [os.urandom(1_500_000 + 1000 * number) for number in range(30)]
    new = []
    for number, data in enumerate(old):
        changed = bytearray(data)
        if number % 5 == 1:
            changed[::10_000] = bytes(len(changed[::10_000]))
        elif number % 5 == 2:
            changed[700_000:800_000] = os.urandom(100_000)
        elif number % 5 == 3:
            changed = bytearray(os.urandom(len(data)))
        elif number % 5 == 4:
            del changed[number * 1000:]
        new.append(bytes(changed))
    with one_by_one, together:
        for store in (one_by_one, together):
            with store.batch() as batch:
                for number, data in enumerate(old):
                    batch.create(data, key=f"k{number}", place="disk" if number % 2 else "host")
        with one_by_one.batch() as batch:
            counts = [batch.update(f"k{number}", data, width=4) for number, data in enumerate(new)]
        with together.batch() as batch:
            assert batch._update_many([(f"k{number}", data, 4) for number, data in enumerate(new)]) == counts
        assert set(counts) > {None, 0} and len(set(counts)) > 4
        for number, data in enumerate(new):
            assert together[f"k{number}"] == data, number
        # A refused update adds nothing.
        batch = together.batch()
        with pytest.raises(remanent.UnknownKeyError):
            batch._update_many([("k0", old[0], 1), ("missing", b"", 1)])
        assert "operations=0" in repr(batch)
        with pytest.raises(ValueError, match="already contains"):
            batch._update_many([("k0", old[0], 1), ("k0", new[0], 1)])


def test_updates_by_threads_share_limit_of_log(store: remanent.Store) -> None:
    pages = {f"k{number}": bytearray(os.urandom(2_000_000)) for number in range(16)}
    for key, data in pages.items():
        store[key] = bytes(data)
        data[500_000:600_000] = os.urandom(100_000)
    with store.batch() as batch:
        counts = batch._update_many([(key, data, 1) for key, data in pages.items()], logged_max=250_000)
    assert sum(count is not None for count in counts) == 2
    assert all(store[key] == data for key, data in pages.items())


def test_threads_share_a_batch(store: remanent.Store) -> None:
    page = store.put("k", bytes(1 << 20))
    batch = store.batch()

    def write(number: int) -> None:
        for at in range(200):
            batch.write(page, 1000 * at + number, bytearray(b"x") * 100)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    store.commit(batch)


def test_updates_of_page_follow_each_other(directory: str) -> None:
    with remanent.Store(directory) as store:
        held = bytearray(os.urandom(9_000_000))
        with store.batch() as batch:
            batch.create(bytes(held), key="k", place="disk")
        # Only a small part of the blocks changed, at the start of a long page.
        held[:70_000] = os.urandom(70_000)
        with store.batch() as batch:
            assert batch.update("k", held) is not None
        held[:] = os.urandom(len(held))
        with store.batch() as batch:
            assert batch.update("k", held) is None
        assert store["k"] == held
        with pytest.raises(remanent.UnknownKeyError), store.batch() as batch:
            batch.update("none", b"")


def test_at_commit_reads_bytes_at_commit(directory: str) -> None:
    with remanent.Store(directory) as store:
        copied, read = bytearray(b"copied"), bytearray(b"before")
        with store.batch() as batch:
            batch.create(copied, key="copied")
            batch.create(read, key="read", at_commit=True)
            batch.create(bytearray(), key="empty", at_commit=True)
            copied[:] = read[:] = b"after!"
        assert (store["copied"], store["read"], store["empty"]) == (b"copied", b"after!", b"")


def test_metadata_may_change_during_conversion(store: remanent.Store) -> None:
    values: dict[str, object] = {}

    class Number:
        def __index__(self) -> int:
            values["later"] = 1
            return 7

    values["now"] = Number()
    with store.batch() as batch:
        batch.create(b"", key="k", metadata=values)
        batch.set_root("values", {"first": 1, "more": values})
    assert store.info("k").metadata == {"now": 7} and "later" in store.root["values"]["more"]


def test_newest_snapshot_survives_removed_name(directory: str) -> None:
    options = {"retention": {"snapshots_kept": 1}, "snapshots": {"log_bytes": None}}
    with remanent.Store(directory, device="host", **options) as store:
        for number in range(20):
            store[f"k{number}"] = bytes(5000)
        store.snapshot("a", verify=False)
        assert not store.prune(give_up=["a"], names_only=True).snapshots
        store.snapshot("b", verify=False)
        store["k1"] = b"x" * 5000
        store.snapshot("c")
        assert [info.name for info in store.prune(give_up=["a"], names_only=True).snapshots] in (["a"], [])
    with remanent.Store(directory, device="host") as store:
        assert store["k1"] == b"x" * 5000 and store["k2"] == bytes(5000)
        assert "a" not in [info.name for info in store.snapshots()]
