"""The files of discarded versions are removed concurrently with the run, and operations that depend on the removal wait
for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from types import SimpleNamespace
from typing import Any

import pytest

import remanent

torch = pytest.importorskip("torch", reason="torch is not installed")

from remanent._versions.removal import Removal  # noqa: E402
from remanent.torch import Checkpointer  # noqa: E402


class SlowStore:
    """A store whose removals wait until the test releases them."""

    def __init__(self, store: Any) -> None:
        self._store, self.may_end, self.begun = store, threading.Event(), threading.Event()
        self.error: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def prune(self, **given: Any) -> Any:
        self.begun.set()
        assert self.may_end.wait(60)
        if self.error is not None:
            raise self.error
        return self._store.prune(**given)


def snapshots(run: Checkpointer) -> list[str]:
    return [info.name for info in run.store.snapshots() if info.name is not None]


def test_save_returns_before_removal_ends(directory: str) -> None:
    state = {"w": torch.arange(5.0)}
    with Checkpointer(directory, extra={"state": state}, rng=False, keep=1) as run:
        run.save(1)
        removal = run._versions._removal
        removal._store = slow = SlowStore(run.store)
        assert run.save(2).done()
        assert slow.begun.wait(60) and len(snapshots(run)) == 2
        # The next save writes concurrently, and removes its predecessor after the removal in progress.
        state["w"] += 1
        third = run.save(3, wait=False)
        assert not third.wait(0.3) and len(snapshots(run)) == 3
        threading.Timer(0.2, slow.may_end.set).start()
        assert third.wait()
        # `versions` waits for the removal and lists the kept versions.
        assert [version.step for version in run.versions()] == [3]
        assert [name.split(" @")[0] for name in snapshots(run)] == ["step 3"]
        assert run.restore() == 3


def test_save_waits_for_needed_space(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with remanent.Store(directory, device="host") as store:
        slow = SlowStore(store)
        removal = Removal(slow, always=False)  # type: ignore[arg-type]
        removal.make_room(1 << 60)
        removal.begin([])
        assert not slow.begun.is_set(), "there is nothing to remove"
        for name in ("first", "second"):
            store["a"] = name.encode()
            store.snapshot(name)
        removal.begin(["first"])
        assert slow.begun.wait(60)
        removal.make_room(1)
        assert [info.name for info in store.snapshots()] == ["first", "second"], "there is space beside it"
        monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=199, f_frsize=1))
        threading.Timer(0.2, slow.may_end.set).start()
        removal.make_room(100)
        assert [info.name for info in store.snapshots()] == ["second"]
        removal.end()


def test_failed_removal_is_logged_and_fails_no_save(directory: str, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(directory, extra={"state": {"w": torch.arange(5.0)}}, rng=False, keep=1) as run:
        run.save(1)
        run._versions._removal._store = slow = SlowStore(run.store)
        slow.error = remanent.DiskFullError("there is no space")
        slow.may_end.set()
        run.save(2)
        assert [version.step for version in run.versions()] == [1, 2]
        assert "versions that are no longer kept cannot be removed: there is no space" in caplog.text
        slow.error = None
        run.save(3)
        assert [version.step for version in run.versions()] == [3]


def test_giving_up_name_keeps_newest_version(directory: str) -> None:
    for digests in (False, True):
        where = f"{directory}/{digests}"
        model = torch.nn.Linear(64, 64)
        kept: dict[int, Any] = {}

        def save(run: Checkpointer, step: int, name: str | None = None) -> None:
            with torch.no_grad():
                model.weight.fill_(step)
            run.save(step, name=name)
            kept[step] = model.weight.clone()

        with Checkpointer(where, model, keep=1, digests=digests) as run:
            save(run, 1, "first")
            run.give_up("first")
            assert [(version.step, version.name) for version in run.versions()] == [(1, None)]
            with pytest.raises(remanent.NoStateError):
                run.give_up("first")
            assert run.restore() == 1 and torch.equal(model.weight, kept[1])
            save(run, 2)
            assert [(version.step, version.name) for version in run.versions()] == [(2, None)]
            save(run, 3, "third")
            save(run, 4)
            run.give_up("third")
            assert [(version.step, version.name) for version in run.versions()] == [(4, None)]
        with Checkpointer(where, model, keep=1, digests=digests) as run:
            assert run.restore() == 4 and torch.equal(model.weight, kept[4])


def test_run_can_be_closed_at_exit(directory: str) -> None:
    script = """
        import atexit, sys, torch
        from remanent.torch import Checkpointer
        run = Checkpointer(sys.argv[1], extra={"state": {"w": torch.arange(5.0)}}, rng=False)
        run.save(1)

        def end():
            try:
                run.save(2)
            except RuntimeError as error:
                print("refused:", error)
            run.close()
            print("closed:", run.store.closed)

        atexit.register(end)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), directory], capture_output=True, text=True,
                          timeout=120, check=True)
    assert "closed: True" in done.stdout and "refused: cannot schedule new futures" in done.stdout, done
    with Checkpointer(directory, extra={"state": {"w": torch.zeros(5)}}, rng=False) as run:
        assert [version.step for version in run.versions()] == [1]
