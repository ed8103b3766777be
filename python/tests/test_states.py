"""All calls accept the same texts for states: an Lsn, "lsn:N", "snapshot:N", a snapshot's name, or "name:S"."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import remanent

# All functions that accept a state, as calls with the store's directory, the open store and the state.
ENTRIES: dict[str, Callable[[Path, remanent.Store, Any], Any]] = {
    "View": lambda path, store, at: remanent.View(path, at)["k"],
    "Store.restore": lambda path, store, at: store.restore(at) and store["k"],
    "Store.fork": lambda path, store, at: store.fork(path.with_name("fork"), at) and remanent.View(path.with_name("fork"))["k"],
    "Store.bisect": lambda path, store, at: store.bisect(lambda view: view["k"] == b"one", good=at) and b"one",
    "bisect": lambda path, store, at: remanent.bisect(path, lambda view: view["k"] == b"one", good=1, bad=at) or b"one",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.fixture
def filled(path: Path) -> Any:
    with remanent.Store(path, device="host", retention={"log_kept": 1 << 20}) as store:
        store["k"] = b"one"
        store.snapshot("warm")
        store["k"] = b"two"
        yield store


@pytest.mark.parametrize("at", [1, "lsn:1", "snapshot:1", "warm", "name:warm"])
@pytest.mark.parametrize("entry", [name for name in ENTRIES if name != "bisect"])
def test_every_call_accepts_every_state_form(path: Path, filled: remanent.Store, entry: str, at: Any) -> None:
    assert ENTRIES[entry](path, filled, at) == b"one"


@pytest.mark.parametrize("entry", ENTRIES)
def test_wrong_state_error_lists_forms(path: Path, filled: remanent.Store, entry: str) -> None:
    for at, kind, message in [
        ("wram", remanent.NoStateError, "there is no snapshot named \"wram\"; did you mean \"warm\"?"),
        ("name:3", remanent.NoStateError, "there is no snapshot named \"3\""),
        ("3", remanent.InvalidError, "expected lsn:N, snapshot:N or the name of a snapshot, found \"3\""),
        ("lsn:x", remanent.InvalidError, "found \"lsn:x\""),
        ("", remanent.InvalidError, "found \"\""),
        ("snapshot:9", remanent.NoStateError, "there is no snapshot 9"),
        (-1, remanent.InvalidError, "an Lsn must be 0 to 2^64 - 1, not -1"),
        (1.5, remanent.InvalidTypeError, "expected an Lsn"),
    ]:
        with pytest.raises(kind) as caught:
            ENTRIES[entry](path, filled, at)
        assert message in str(caught.value) and caught.value.remedy
    assert filled["k"] == b"two"


def test_torch_calls_accept_every_state_form(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from remanent.torch import blame, diff, load_file, save_file

    directory = tmp_path / "f"
    save_file({"w": torch.zeros(2)}, directory, name="warm")
    save_file({"w": torch.ones(2)}, directory)
    for at in (1, "lsn:1", "snapshot:1", "warm", "name:warm"):
        assert load_file(directory, at=at)["w"].tolist() == [0, 0]
        assert diff(directory, at)["w"].elements == 2
        assert len(blame(directory, "w", 0, at=at)) == 1
    for call in (lambda: load_file(directory, at="wram"), lambda: diff(directory, "wram"),
                 lambda: blame(directory, "w", 0, at="wram")):
        with pytest.raises(remanent.NoStateError, match='did you mean "warm"'):
            call()
    with pytest.raises(remanent.NoStateError, match="no tensor named 'v'"):
        blame(directory, "v", 0)


def test_runs_accept_every_state_form(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from remanent.torch import Checkpointer

    w = torch.zeros(2)
    with Checkpointer(tmp_path / "run", extra={"state": {"w": w, "pos": 1}}, rng=False, keep=9) as run:
        run.save(10, name="warm")
        w += 1
        run.save(20)
        first, _ = run.versions()
        forms = (10, f"lsn:{first.lsn}", "warm", "name:warm", first)
        for at in forms:
            assert run.restore(at) == 10
            assert run.diff(at)["state/w"].elements == 2
            assert run.bisect(lambda version: version.step < 20, good=at).step == 20
        for call in (run.restore, run.diff, lambda at: run.bisect(bool, good=at), run.give_up,
                     lambda at: run.fork(tmp_path / "new", at)):
            with pytest.raises(remanent.NoStateError, match="no version named 'wram'; did you mean 'warm'"):
                call("wram")
        for call in (run.restore, run.diff, lambda at: run.bisect(bool, good=at)):
            with pytest.raises(remanent.InvalidError, match="expected lsn:N"):
                call("10")
            with pytest.raises(remanent.NoStateError, match="no version of step 11"):
                call(11)
        with pytest.raises(remanent.NoStateError, match="did you mean 'state/w'"):
            run.blame("w", 0)


def test_steps_must_not_decrease(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from remanent.torch import Checkpointer

    w = torch.zeros(2)

    def opened() -> Checkpointer:
        return Checkpointer(tmp_path / "run", extra={"state": {"w": w}}, rng=False, keep=9)

    def steps(run: Checkpointer) -> list[int]:
        return [version.step for version in run.versions()]

    with opened() as run:
        with pytest.raises(remanent.InvalidError, match="step: -1 is below 0"):
            run.save(-1)
        run.save(0), run.save(10), run.save(20)
        for wait in (True, False):
            with pytest.raises(remanent.InvalidError, match="step: 3 is below 20") as caught:
                run.save(3, wait=wait)
            assert "restore an earlier version first" in caught.value.remedy
        # A rejected save does not change the current step of the run.
        with pytest.raises(remanent.InvalidError, match="64 bytes"):
            run.save(30, name="n" * 65)
        # The last step of a run can be saved again under a name.
        run.save(20, name="last")
        assert steps(run) == [0, 10, 20, 20]
        run.restore(10)
        run.save(11), run.save(12)
        with pytest.raises(remanent.InvalidError, match="step: 11 is below 12"):
            run.save(11)
        assert steps(run) == [0, 10, 20, 20, 11, 12]
    with opened() as run:
        with pytest.raises(remanent.InvalidError, match="step: 1 is below 12"):
            run.save(1)
        run.save(13)
        run.restore(0)
        run.save(1)
        assert steps(run) == [0, 10, 20, 20, 11, 12, 13, 1]


def test_missing_key_error_suggests_similar_key(store: remanent.Store) -> None:
    store["model/pos"], store["config"] = b"", b""
    for wanted, found in [("pos", "model/pos"), ("confg", "config")]:
        for call in (store.info, lambda key: store[key], store.read, store.numpy, store.lease, store.pin, store.__delitem__):
            with pytest.raises(remanent.UnknownKeyError, match=f"did you mean \"{found}\"") as caught:
                call(wanted)
            assert isinstance(caught.value, KeyError) and caught.value.key == wanted
    with pytest.raises(remanent.UnknownKeyError) as caught:
        store["else"]
    assert str(caught.value) == "there is no page with key else"
