"""The history of a value, and the first bad version."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest

import remanent


def test_blame_lists_each_batch_that_changed_element(directory: str) -> None:
    with remanent.Store(directory, device="host", retention={"log_kept": 1 << 30}) as store:
        with store.batch(note="start") as batch:
            batch.create(np.arange(4, dtype=np.float32), key="w", metadata={"dtype": "F32", "shape": [4]})
            batch.set_root("step", 0)
        for step in range(1, 4):
            with store.batch(note=f"step {step}") as batch:
                batch.write("w", 4, np.float32(step % 2).tobytes())
                batch.write("w", 12, bytes([step]))
                batch.set_root("step", step)
        restored = store.restore(1)
        changes = store.blame("w", 4)
        values = [np.frombuffer(change.after or b"", np.float32).tolist() for change in changes]
        # The first batch wrote the value that the page already had.
        assert [(change.lsn, change.cause) for change in changes] == [(1, "batch"), (3, "batch"), (4, "batch"), ]
        assert values == [[1.0], [0.0], [1.0]] and [change.before for change in changes[:2]] == [None, changes[0].after]
        assert [change.note for change in changes] == ["start", "step 2", "step 3"]
        assert [change.root for change in changes] == [{"step": 0}, {"step": 2}, {"step": 3}]
        assert repr(changes[1]) == 'ValueChange(lsn=3, cause="batch", note="step 2")'
        assert [change.lsn for change in store.blame("w", 12, 1)] == [1, 2, 3, 4, restored]
        assert store.blame("w", 12, 1)[-1].cause == "restore" and store.blame("w", 12, 1)[-1].note is None
        with remanent.View(directory, 3) as view:
            assert [change.lsn for change in view.blame("w", 4, 4)] == [1, 3]
        for page, offset, length, error in [("w", 16, None, remanent.OutOfBoundsError), ("x", 0, 1, KeyError),
                                            (77, 0, 1, remanent.UnknownPageError), ("w", 2**64 - 1, 9, IndexError)]:
            with pytest.raises(error):
                store.blame(page, offset, length)
        page = store.put("long", bytes(65537))
        with pytest.raises(remanent.InvalidError):
            store.blame(page, 0, 65537)
    with pytest.raises(remanent.ClosedError):
        view.blame("w", 0)
    with pytest.raises(remanent.ClosedError):
        store.blame("w", 0)


def test_blame_works_after_chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with remanent.Store("here", device="host", retention={"log_kept": 1 << 30}) as store:
        (tmp_path / "elsewhere").mkdir()
        os.chdir("elsewhere")
        for value in (b"good", b"bad!"):
            store["k"] = value
        assert [change.lsn for change in store.blame("k", 0)] == [1, 2]
        assert store.bisect(lambda view: view["k"] == b"good", good=1) == 2
        assert store.path == "here"


def test_bisect_finds_every_first_bad_version(directory: str) -> None:
    with remanent.Store(directory, device="host", retention={"log_kept": 1 << 30}) as store:
        for step in range(1, 33):
            with store.batch() as batch:
                batch.set_root("step", step)
        for first_bad in range(2, 33):
            looked: list[int] = []

            def is_good(view: remanent.View, first_bad: int = first_bad, looked: list[int] = looked) -> bool:
                looked.append(view.lsn)
                return bool(view.root["step"] < first_bad)

            assert remanent.bisect(directory, is_good, good=1, bad="lsn:32") == first_bad
            assert len(looked) <= math.ceil(math.log2(32)) and not {1, 32} & set(looked)
        # The search continues with other states if `is_good` returns None. NumPy's bool type is accepted.
        skipped = {16, 17, 20}
        found = store.bisect(lambda view: None if view.lsn in skipped else np.bool_(view.lsn < 10), good=1)
        assert found == 10
        with pytest.raises(remanent.NoStateError, match="between lsn 16 and 18"):
            store.bisect(lambda view: None if view.lsn in skipped else view.lsn < 17, good=1)
        with pytest.raises(remanent.InvalidError, match="not older"):
            store.bisect(lambda view: True, good=5, bad=5)
        with pytest.raises(ZeroDivisionError):
            store.bisect(lambda view: bool(1 // 0), good=1)
        with pytest.raises(remanent.NoStateError):
            store.bisect(lambda view: True, good="name:nothing")
        held: list[remanent.View] = []
        store.bisect(lambda view: bool(held.append(view)), good=1)
        with pytest.raises(remanent.ClosedError):
            held[0].lsn
    with pytest.raises(remanent.ClosedError):
        store.bisect(lambda view: True, good=1)
    with pytest.raises(remanent.NoStoreError):
        remanent.bisect(directory + "2", lambda view: True, good=1)
