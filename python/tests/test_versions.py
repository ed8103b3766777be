"""The versions of a run and of a directory of tensors: differences, the changes of an element, the first bad version.
"""

from __future__ import annotations

import math
import os
from typing import Any

import pytest

import remanent

torch = pytest.importorskip("torch", reason="torch is not installed")

from remanent._tensors.conversion import DTYPE  # noqa: E402
from remanent.torch import Checkpointer, Difference, Version, blame, diff, save_file  # noqa: E402


def saved(directory: str, state: dict[str, Any], steps: int, changed: Any, **options: Any) -> Checkpointer:
    """Returns a run with this number of versions, each changed in place before it is saved."""
    run = Checkpointer(directory, extra={"state": state}, rng=False, keep=1000, **options)
    for step in range(1, steps + 1):
        changed(step)
        run.save(step)
    return run


def test_diff_reports_count_index_and_size(directory: str) -> None:
    whole = torch.arange(24.0).reshape(2, 3, 4)
    state = {"w": whole, "turned": torch.arange(6.0).reshape(2, 3).T, "same": torch.ones(3), "gone": torch.ones(2),
             "other": torch.ones(4), "zero": torch.tensor([0.0, math.nan]), "lost": torch.tensor([1.0, 2.0, math.nan, 3.0]),
             "far": torch.ones(2),
             "n": torch.tensor(7)}
    first = save_file(state, directory)
    whole[0, 2, 1] += 0.5
    whole[1, 2, 3] -= 4
    state["turned"][2, 0] = 100
    state["zero"][0] = -0.0
    state["lost"][1:3] = torch.tensor([math.nan, 5.0])
    state["lost"][3] = math.inf
    state["far"][0] = -math.inf
    state["n"] -= 3
    del state["gone"]
    state["new"], state["other"] = torch.ones(1), torch.ones(2, 2)
    second = save_file(state, directory, name="second")
    expected = {"gone": None, "far": Difference(1, (0,), math.inf), "lost": None, "n": Difference(1, (), 3.0), "new": None,
                "other": None, "turned": Difference(1, (2, 0), 98.0), "w": Difference(2, (0, 2, 1), 4.0),
                "zero": Difference(1, (0,), 0.0)}
    for at in (None, second, "name:second"):
        found = diff(directory, first, at)
        lost = found["lost"]
        # The largest difference is NaN if one of the elements is NaN, and NaNs are counted.
        assert lost is not None and (lost.elements, lost.first, lost.nans) == (3, (1,), 2) and math.isnan(lost.largest)
        assert found | {"lost": None} == expected and list(found) == sorted(found), at
    assert diff(directory, second) == {}
    backward = diff(directory, second, first)
    assert backward["w"] == expected["w"] and backward.keys() == expected.keys()
    with pytest.raises(remanent.NoStateError):
        diff(directory, 99)
    with pytest.raises(remanent.NoStoreError):
        diff(directory + "-none", 1)


def test_run_history_works_after_move(directory: str) -> None:
    state, others = {"w": torch.zeros(3)}, {"w": torch.zeros(3)}
    with saved(directory, state, 3, lambda step: state["w"].fill_(step)) as run:
        os.rename(directory, directory + "-moved")
        assert run.store.directory == os.path.realpath(directory + "-moved")
        # Another run is created at the old path.
        saved(directory, others, 3, lambda step: others["w"].fill_(100 + step)).close()
        for at in (3, 1):
            assert run.restore(at) == at and state["w"].tolist() == [at] * 3
        assert [version.step for version in run.versions()] == [1, 2, 3]
        assert [change.after for change in run.blame("state/w", 1)][-1] == 3
        assert run.bisect(lambda version: run.restore(version) < 3, good=1).step == 3
        run.fork(directory + "-fork", at=2)
    with Checkpointer(directory + "-fork", extra={"state": state}, rng=False) as fork:
        assert fork.restore() == 2 and state["w"].tolist() == [2] * 3


def test_diff_and_blame_support_all_element_types(directory: str) -> None:
    # Torch can neither convert to packed elements nor assign one.
    state = {short: torch.zeros(5, dtype=torch.uint8).to(dtype) if dtype.is_floating_point or dtype.is_complex
             else torch.zeros(5, dtype=dtype) for short, dtype in DTYPE.items() if "float4" not in str(dtype)}
    first = save_file(state, directory)
    for tensor in state.values():
        tensor[3] = 1
    save_file(state, directory)
    found = diff(directory, first)
    assert found.keys() == state.keys() and all(each and each.first == (3,) for each in found.values())
    for short, each in found.items():
        # This element type has no zero.
        assert each == Difference(1, (3,), each.largest if short == "F8_E8M0" else 1.0), short
        [*changes] = blame(directory, short, -2)
        assert [change.after == 1 for change in changes] == [False, True], short


def test_blame_works_in_directory_and_in_run(directory: str) -> None:
    base = torch.zeros(3, 4)
    for step in range(6):
        base[1, 2] = step // 2
        base[0, 0] += 1
        save_file({"w": base, "t": base.T, "s": torch.tensor(step > 2)}, directory, note=f"step {step}")
    expected = [("step 0", None, 0.0), ("step 2", 0.0, 1.0), ("step 4", 1.0, 2.0)]
    for name, index in (("w", (1, 2)), ("w", (-2, -2)), ("t", (2, 1)), ("w", [1, 2])):
        assert [(each.note, each.before, each.after) for each in blame(directory, name, index)] == expected
        assert all(each.step is None for each in blame(directory, name, index))
    assert [each.after for each in blame(directory, "s", ())] == [False, True]
    assert [each.after for each in blame(directory, "w", (1, 2), at=4)] == [0.0, 1.0]
    for index in ((1, 4), (3, 0), (1,), (1, 2, 0), 1, (-4, 0)):
        with pytest.raises(remanent.OutOfBoundsError, match=r"w: index .* is outside a tensor of shape \(3, 4\)"):
            blame(directory, "w", index)
    with pytest.raises(remanent.NoStateError, match="no tensor named 'x'"):
        blame(directory, "x", 0)


def test_blame_works_across_versions_of_run(directory: str) -> None:
    state = {"w": torch.zeros(2, 3), "still": torch.ones(100)}

    def change(step: int) -> None:
        state["w"][1, 2] = step // 3

    with saved(directory, state, 4, change) as run:
        # The tensor is missing in one version, too short in the next one, and then has another element type.
        state["w"][1, 2] = 9
        state["aside"] = state.pop("w")
        run.save(5, name="without")
        state["w"] = torch.zeros(2, 2)
        run.save(6)
        state["w"] = state.pop("aside").double()
        run.save(7)
        changes = run.blame("state/w", (1, 2))
        assert [(each.step, each.note, each.before, each.after) for each in changes] == [
            (1, None, None, 0.0), (3, None, 0.0, 1.0), (5, "without", 1.0, None), (7, None, None, 9.0)]
        assert [each.lsn for each in changes] == [run.versions()[at].lsn for at in (0, 2, 4, 6)]
        assert [each.step for each in run.blame("state/still", -1)] == [1]
        for name, index, error in (("w", 0, remanent.NoStateError), ("state/w", (2, 3), remanent.OutOfBoundsError),
                                   ("state/w", 0, remanent.OutOfBoundsError)):
            with pytest.raises(error):
                run.blame(name, index)
        assert run.diff(4, 5) == {"state/aside": None, "state/w": None}
    with Checkpointer(directory + "-new") as run, pytest.raises(remanent.NoStateError, match="no version yet"):
        run.blame("state/w", 0)


def test_run_bisect_finds_every_first_bad_version(directory: str) -> None:
    state = {"w": torch.zeros(3), "big": torch.zeros(1000)}
    with saved(directory, state, 24, lambda step: state["w"].fill_(step)) as run:
        versions = run.versions()
        for first in range(2, 25):
            looked: list[int] = []

            def is_good(version: Version, first: int = first, looked: list[int] = looked) -> bool:
                looked.append(run.restore(version))
                return bool((state["w"] < first).all())

            assert run.bisect(is_good, good=1, bad=24) == versions[first - 1]
            assert len(looked) <= 5 and not {1, 24} & set(looked)
        # Versions are given by name or as objects, and `bad` defaults to the newest. NumPy's and torch's bool types are
        # accepted.
        run.save(25, name="last")
        assert run.bisect(lambda version: torch.tensor(version.step < 9), good=versions[3], bad="last").step == 9
        assert run.bisect(lambda version: version.step < 25, good=1).name == "last"
        skipped = {12, 13}
        assert run.bisect(lambda version: None if version.step in skipped else version.step < 10, good=1).step == 10
        with pytest.raises(remanent.NoStateError, match="the first bad version is one of steps 12 to 14"):
            run.bisect(lambda version: None if version.step in skipped else version.step < 13, good=1)
        for good, bad in ((5, 5), (6, 5), ("last", 3), (25, None)):
            with pytest.raises(remanent.InvalidError, match="not older"):
                run.bisect(lambda version: True, good=good, bad=bad)
        for good, bad in ((99, None), ("none", None), (1, 99)):
            with pytest.raises(remanent.NoStateError, match="there is no version"):
                run.bisect(lambda version: True, good=good, bad=bad)
        with pytest.raises(ZeroDivisionError):
            run.bisect(lambda version: bool(1 // 0), good=1)
        run.fork(directory + "-fork", versions[2])
        assert run.diff(versions[2], versions[3])["state/w"] == Difference(3, (0,), 1.0)
        # A Version object remains valid after its name was removed.
        named = run.versions()[-1]
        run.give_up("last")
        assert run.restore(named) == 25
    with Checkpointer(directory + "-fork", extra={"state": state}, rng=False) as fork:
        assert fork.restore() == 3 and bool((state["w"] == 3).all())


def test_bisect_tests_each_version_of_same_step(directory: str) -> None:
    state = {"w": torch.zeros(3)}
    with saved(directory, state, 3, lambda step: state["w"].fill_(step)) as run:
        run.save(3, name="again")
        state["w"].fill_(7)
        run.save(3, name="changed")
        seen: list[float] = []

        def is_good(version: Version) -> bool:
            run.restore(version)
            seen.append(float(state["w"][0]))
            return seen[-1] < 7

        assert run.bisect(is_good, good=1).name == "changed" and seen == [3.0, 3.0]
        versions = run.versions()
        with pytest.raises(remanent.InvalidError, match="not older"):
            run.bisect(is_good, good=versions[4], bad=versions[2])
        assert run.bisect(lambda version: False, good=versions[2], bad=versions[4]) == versions[3]
        assert [each.note for each in run.blame("state/w", 0)] == [None, None, None, "changed"]


def test_newest_version_survives_interrupted_save(directory: str) -> None:
    state = {"w": torch.zeros(3)}
    with Checkpointer(directory, extra={"state": state}, rng=False, keep=1) as run:
        run.save(1, name="a")
        # Simulates a save of several batches that was killed after a snapshot.
        with run.store.batch() as batch:
            batch.set_root("saving", 2)
        run.store.snapshot()
        with pytest.raises(remanent.RefusedError, match="a later save was interrupted"):
            run.give_up("a")
        state["w"] += 1
        assert [version.name for version in run.versions()] == ["a"]
        assert run.restore() == 1 and not state["w"].any()
        state["w"] += 2
        run.save(2)
        run.give_up("a")
        assert [version.step for version in run.versions()] == [2]
        assert run.restore() == 2 and bool((state["w"] == 2).all())


def test_partly_removed_name_is_removed(directory: str) -> None:
    state = {"w": torch.zeros(3)}
    with Checkpointer(directory, extra={"state": state}, rng=False) as run:
        run.save(1, name="a")
        # Simulates a process that was killed while it removed the name.
        run.store.snapshot(f"step 1 @{run.store.lsn}")
        assert [(version.step, version.name) for version in run.versions()] == [(1, "a")]
        run.give_up("a")
        assert [(version.step, version.name) for version in run.versions()] == [(1, None)]
        with pytest.raises(remanent.NoStateError, match="no version named 'a'"):
            run.give_up("a")
        assert run.restore() == 1


def test_names_like_state_points_are_rejected(directory: str) -> None:
    with Checkpointer(directory, extra={"state": {"w": torch.zeros(3)}}, rng=False) as run:
        for name in ("lsn:1", "snapshot:1", "name:x", "step 1", ""):
            with pytest.raises(remanent.InvalidError, match="name"):
                run.save(1, name=name)
        assert run.versions() == []
