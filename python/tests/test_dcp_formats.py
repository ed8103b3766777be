"""Conversions between checkpoints and files of other formats."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

import remanent

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint import format_utils  # noqa: E402

from remanent._dcp import formats  # noqa: E402
from remanent.dcp import (  # noqa: E402
    StorageReader,
    StorageWriter,
    dcp_to_remanent,
    dcp_to_safetensors,
    dcp_to_torch_save,
    is_of_dcp,
    remanent_to_dcp,
    safetensors_to_dcp,
    torch_save_to_dcp,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state() -> dict[str, Any]:
    return {"model": {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)},
            "optimizer": {"state": {"w": {"step": torch.tensor(3), "moments": torch.randn(2, 3)}}, "lr": 0.1},
            "step": 7, "names": ["a", "b"]}


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return isinstance(right, dict) and left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return bool(left == right)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def checkpoint(root: Path) -> Path:
    dcp.save(state_of := state(), storage_writer=StorageWriter(root / "step-7"), no_dist=True)
    torch.save(state_of, root / "expected.pt")
    return root / "step-7"


def expected(root: Path) -> Any:
    return torch.load(root / "expected.pt", weights_only=True)


def loaded(path: Path) -> Any:
    dcp_to_torch_save(path, path.with_name("loaded.pt"))
    return torch.load(path.with_name("loaded.pt"), weights_only=True)


def test_checkpoint_converts_to_torch_save_and_back(root: Path, checkpoint: Path) -> None:
    dcp_to_torch_save(checkpoint, root / "file.pt")
    assert same(torch.load(root / "file.pt", weights_only=True), expected(root))
    torch_save_to_dcp(root / "file.pt", root / "again")
    assert not is_of_dcp(root / "again") and same(loaded(root / "again"), expected(root))
    assert not [name for name in os.listdir(root) if name.endswith(".tmp")]
    with pytest.raises(remanent.TakenError, match="already contains a checkpoint"):
        torch_save_to_dcp(root / "file.pt", root / "again")


class Ran:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["RAN"],)


def test_conversion_runs_no_code_of_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir()
    monkeypatch.setenv("RAN", str(root / "ran"))
    torch.save({"w": Ran()}, root / "file.pt")
    with pytest.raises(pickle.UnpicklingError):
        torch_save_to_dcp(root / "file.pt", root / "step-1")
    assert os.listdir(root) == ["file.pt"]


def test_checkpoints_convert_from_and_to_dcp(root: Path, checkpoint: Path) -> None:
    remanent_to_dcp(checkpoint, root / "theirs")
    format_utils.dcp_to_torch_save(root / "theirs", root / "theirs.pt")
    assert same(torch.load(root / "theirs.pt", weights_only=True), expected(root))
    dcp_to_remanent(root / "theirs", root / "again")
    assert same(loaded(root / "again"), expected(root))
    with pytest.raises(remanent.ForeignDirectoryError, match="is not empty"):
        remanent_to_dcp(checkpoint, root / "theirs")
    with pytest.raises(remanent.TakenError):
        dcp_to_remanent(root / "theirs", root / "again")


def test_checkpoint_converts_to_safetensors_and_back(root: Path, checkpoint: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    from safetensors import safe_open

    with pytest.raises(remanent.RefusedError, match="optimizer.lr: a float is not a tensor"):
        dcp_to_safetensors(checkpoint, root / "model.safetensors")
    with pytest.raises(remanent.NoStateError, match="no entry 'modle'"):
        dcp_to_safetensors(checkpoint, root / "model.safetensors", key="modle")
    assert not (root / "model.safetensors").exists()
    dcp_to_safetensors(checkpoint, root / "model.safetensors", key="model", metadata={"format": "pt"})
    found = safetensors.load_file(root / "model.safetensors")
    assert same(found, expected(root)["model"])
    with safe_open(root / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    safetensors_to_dcp(root / "model.safetensors", root / "again", key="model")
    assert same(loaded(root / "again"), {"model": found})

    folder = root / "hugging-face"
    folder.mkdir()
    for number, name in enumerate(found):
        safetensors.save_file({name: found[name]}, folder / f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text("{}")
    safetensors_to_dcp(folder, root / "of-folder")
    target = {name: torch.zeros_like(tensor) for name, tensor in found.items()}
    dcp.load(target, storage_reader=StorageReader(root / "of-folder"), no_dist=True)
    assert same(target, found)
    safetensors.save_file({"w": found["w"]}, folder / "model-9.safetensors")
    with pytest.raises(remanent.InvalidError, match="w: model-9.safetensors and another file contain"):
        safetensors_to_dcp(folder, root / "twice")
    with pytest.raises(remanent.NoStateError):
        safetensors_to_dcp(root / "nothing", root / "twice")
    assert not (root / "twice").exists()


def test_invalid_checkpoint_creates_no_file(root: Path) -> None:
    root.mkdir()
    with pytest.raises(dcp.CheckpointException):
        dcp_to_torch_save(root / "nothing", root / "file.pt")
    assert os.listdir(root) == []


def test_equal_joined_names_are_rejected() -> None:
    # DCP itself cannot create such a checkpoint.
    with pytest.raises(remanent.RefusedError, match="a.b: two tensors of the state have this name"):
        formats._flatten("", {"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2)}, {})


def test_failed_write_keeps_previous_file(root: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "file.pt").write_bytes(b"before")
    sound, names = torch.save, sorted(os.listdir(root))

    def failing(state: Any, path: Path) -> None:
        sound(state, path)
        raise OSError("as arranged")

    monkeypatch.setattr(torch, "save", failing)
    with pytest.raises(OSError, match="as arranged"):
        dcp_to_torch_save(checkpoint, root / "file.pt")
    assert (root / "file.pt").read_bytes() == b"before" and sorted(os.listdir(root)) == names


def test_file_is_synced_before_rename(root: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def recorded(name: str) -> Any:
        sound = getattr(os, name)

        def call(*given: Any) -> Any:
            calls.append(name)
            return sound(*given)

        return call

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, recorded(name))
    dcp_to_torch_save(checkpoint, root / "file.pt")
    # First the file is synced, and then the folder with its name.
    assert calls == ["fsync", "replace", "fsync"]
