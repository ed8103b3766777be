"""The locks of stores and views are released when their process ends, and only then."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import remanent

OPENS = "import sys, remanent\nremanent.Store(sys.argv[1]).close()"


def opens_elsewhere(path: Path) -> bool:
    """Returns whether another process can open the store."""
    run = subprocess.run([sys.executable, "-c", OPENS, str(path)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 or "LockedError" in run.stderr, run.stderr
    return run.returncode == 0


@contextmanager
def killed_with_a_living_child(script: str, path: Path) -> Iterator[None]:
    """Runs the script in a process that then forks and is killed; its child runs until the block ends."""
    script = textwrap.dedent(script) + textwrap.dedent("""
        if os.fork() == 0:
            os.read(0, 1)
            os._exit(0)
        print("ready", flush=True)
        time.sleep(60)
    """)
    owner = subprocess.Popen([sys.executable, "-c", "import os, sys, time, remanent\n" + script, str(path)],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdin is not None and owner.stdout is not None
    assert owner.stdout.readline() == "ready\n"
    owner.kill()
    owner.wait()
    yield
    # The child holds the write end of the pipe, so nothing can be read from this end while the child is alive.
    assert not select.select([owner.stdout], [], [], 0)[0]
    owner.stdin.close()
    owner.stdout.read()
    owner.stdout.close()


@contextmanager
def living_child() -> Iterator[None]:
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        while True:
            signal.pause()
    yield
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def test_copying_open_store_keeps_lock(tmp_path: Path) -> None:
    with remanent.Store(tmp_path / "store") as store:
        store["k"] = b"1"
        # The store creates and removes files during the copy.
        with contextlib.suppress(shutil.Error):
            shutil.copytree(tmp_path / "store", tmp_path / "copy")
        assert not opens_elsewhere(tmp_path / "store")
        with pytest.raises(remanent.LockedError):
            remanent.Store(tmp_path / "store")
        remanent.View(tmp_path / "store").close()
        command = [sys.executable, "-m", "remanent", "info", str(tmp_path / "store")]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        assert f"in process {os.getpid()}" in said
        assert not opens_elsewhere(tmp_path / "store")
        store["k"] = b"2"
    assert opens_elsewhere(tmp_path / "store")
    assert opens_elsewhere(tmp_path / "copy")


def test_killed_owner_leaves_no_lock_in_child(tmp_path: Path) -> None:
    opened = """
        store = remanent.Store(sys.argv[1])
        store["k"] = b"1"
    """
    with killed_with_a_living_child(opened, tmp_path / "store"), remanent.Store(tmp_path / "store") as store:
        assert store["k"] == b"1"


def held(store: remanent.Store) -> int:
    """Returns the number of snapshots that readers keep, after newer ones could have replaced them."""
    for number in range(3):
        store["k"] = bytes([number]) * 1000
        store.snapshot()
    return len(store.prune().held)


def test_closed_view_keeps_no_snapshot_in_child(tmp_path: Path) -> None:
    with remanent.Store(tmp_path / "store", retention={"snapshots_kept": 1}) as store:
        store["k"] = b"1"
        store.snapshot()
        view = remanent.View(tmp_path / "store", f"snapshot:{store.snapshots()[-1].id}")
        with living_child():
            assert held(store) == 1
            view.close()
            assert held(store) == 0


def test_killed_reader_keeps_no_snapshot_in_child(tmp_path: Path) -> None:
    with remanent.Store(tmp_path / "store", retention={"snapshots_kept": 1}) as store:
        store["k"] = b"1"
        store.snapshot()
        viewed = f"view = remanent.View(sys.argv[1], 'snapshot:{store.snapshots()[-1].id}')"
        with killed_with_a_living_child(viewed, tmp_path / "store"):
            assert held(store) == 0


def test_writer_without_lock_is_superseded(tmp_path: Path) -> None:
    store = remanent.Store(tmp_path / "store", ack="durable")
    store["k"] = b"1"
    (tmp_path / "store" / "LOCK").unlink()
    writes = "import sys, remanent\nwith remanent.Store(sys.argv[1]) as s: s['other'] = b'2'"
    subprocess.run([sys.executable, "-c", writes, str(tmp_path / "store")], check=True, timeout=60)
    with pytest.raises(remanent.PoisonedError) as poisoned:
        store["k"] = b"3"
    cause = poisoned.value.__cause__
    # Threads of the store may notice the missing file before the other writer opens the store.
    assert isinstance(cause, remanent.SupersededError) and cause.holder
    assert cause.path == str(tmp_path / "store") and "stop one of the two writers" in cause.remedy
    with pytest.raises(remanent.PoisonedError):
        store.close()
    with remanent.Store(tmp_path / "store") as store:
        assert (store["k"], store["other"]) == (b"1", b"2")
