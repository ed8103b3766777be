"""Features of safetensors files: metadata, selected tensors, parts of one, bytes, models; and which values are refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import remanent

torch = pytest.importorskip("torch", reason="torch is not installed")

from remanent.torch import (  # noqa: E402
    load,
    load_file,
    load_model,
    safe_open,
    save,
    save_file,
    save_model,
    versions,
)


MIB = 1 << 20


def test_metadata_is_restored_and_exported(directory: str, tmp_path: Path) -> None:
    w = torch.arange(6.0)
    save_file({"w": w}, directory, metadata={"format": "pt", "é": "\n"})
    with safe_open(directory) as version:
        assert version.metadata() == {"format": "pt", "é": "\n"}
    # A change of the metadata alone creates a version.
    assert save_file({"w": w}, directory, {"format": "2"}) == 2
    assert save_file({"w": w}, directory, {"format": "2"}) == 2
    assert safe_open(directory, at=1).metadata() == {"format": "pt", "é": "\n"}
    save_file({"w": w, "tied": w[:2]}, directory, {"format": "3"})
    assert safe_open(directory).metadata() == {"format": "3"}, "of tensors that share memory, too"
    save_file({"w": w}, directory)
    assert safe_open(directory).metadata() is None


@pytest.mark.parametrize("metadata", [{"step": 3}, {3: "step"}, {"a": None}, ["step"], {"a": {"b": "c"}}])
def test_metadata_that_is_not_text_is_rejected(directory: str, metadata: Any) -> None:
    with pytest.raises(remanent.RefusedError, match="metadata(: .* must be a str| must be a dict of text by name)"):
        save_file({"w": torch.ones(1)}, directory, metadata)
    assert not Path(directory).exists()


def tensors() -> dict[str, Any]:
    base = torch.arange(60.0).reshape(3, 4, 5)
    return {"base": base, "columns": base[:, 1:3], "turned": base.permute(2, 0, 1), "bf16": torch.randn(7, 3).bfloat16(),
            "scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "long": torch.arange(300_000).reshape(3, -1)}


INDEXES: list[Any] = [..., 0, -1, slice(1, None), slice(None, None, 2), slice(2, 1), (slice(1, 2), 0), (..., 1),
                      (..., slice(0, 2)), (None, 0), (0, ..., slice(1, None, 2))]


def test_slice_equals_indexed_tensor(directory: str) -> None:
    state = tensors()
    save_file(state, directory)
    with safe_open(directory) as version:
        assert version.keys() == sorted(state) and set(version.offset_keys()) == set(state)
        assert set(version.get_tensors(["scalar", "empty"])) == {"scalar", "empty"}
        assert set(version.get_tensors()) == set(tensors())
        for name, tensor in state.items():
            part = version.get_slice(name)
            assert part.get_shape() == list(tensor.shape)
            assert torch.equal(version.get_tensor(name), tensor) and version.get_tensor(name).is_contiguous()
            for index in INDEXES:
                try:
                    expected = tensor[index]
                except (IndexError, ValueError) as error:
                    with pytest.raises(type(error)):
                        part[index]
                    continue
                found = part[index]
                assert found.dtype == tensor.dtype and torch.equal(found, expected), (name, index)
        assert version.get_slice("bf16").get_dtype() == "BF16"


def test_damaged_tensor_does_not_affect_others(directory: str) -> None:
    state = {"w": torch.randn(MIB), "v": torch.randn(MIB)}
    save_file(state, directory)
    row = state["w"][700_000:700_100].numpy().tobytes()
    [(image, at)] = [(each, each.read_bytes().find(row)) for each in Path(directory, "pages").iterdir()
                     if row in each.read_bytes()]
    with open(image, "r+b") as file:
        file.seek(at)
        file.write(b"damage")
    with safe_open(directory) as version:
        assert torch.equal(version.get_tensor("v"), state["v"])
        for read in (lambda: version.get_tensor("w"), lambda: version.get_slice("w")[:10]):
            with pytest.raises(remanent.DamagedError):
                read()
    assert torch.equal(load_file(directory, names=["v"])["v"], state["v"])


def test_names_select_tensors(directory: str) -> None:
    state = tensors()
    save_file(state, directory)
    loaded = load_file(directory, names=["turned", "base"])
    assert loaded.keys() == {"turned", "base"} and loaded["turned"].data_ptr() == loaded["base"].data_ptr()
    assert load_file(directory, names=[]) == {}
    with pytest.raises(remanent.UnknownKeyError, match="named 'bas'.*most similar of its .* names are 'base'"):
        load_file(directory, names=["bas"])
    with pytest.raises(remanent.InvalidError, match="names must be a list, not the str 'base'"):
        load_file(directory, names="base")
    with safe_open(directory) as version, pytest.raises(KeyError):
        version.get_tensor("nothing")


def test_devices_are_accepted_in_all_forms(directory: str) -> None:
    save_file({"w": torch.ones(2)}, directory)
    for device in ("cpu", torch.device("cpu"), "cpu:0"):
        assert load_file(directory, device)["w"].device.type == "cpu"
    gpus = torch.cuda.device_count()
    for absent in (gpus, f"cuda:{gpus}", torch.device("cuda", gpus)):
        with pytest.raises(remanent.DeviceError, match=f"cuda:{gpus} does not exist"):
            load_file(directory, device=absent)
    with pytest.raises(remanent.InvalidError, match="is not a torch device"):
        load_file(directory, device="gpu")


W = torch.ones(2)


@pytest.mark.parametrize(("given", "said"), [
    ("weights", "tensors must be a dict of tensors by name, not a str"),
    ([W], "tensors must be a dict of tensors by name, not a list"),
    ({"w": 3}, "w: an int is not a tensor; save it as text in `metadata`"),
    ({"w": {"a": W}}, "w: a dict is not a tensor; save its tensors under names"),
    ({"w": None}, "w: a NoneType is not a tensor"),
    ({1: W}, "tensors: the name 1 must be a str, not an int; use the name '1'"),
])
def test_non_tensor_error_states_remedy(directory: str, given: Any, said: str) -> None:
    for call in (lambda: save_file(given, directory), lambda: save(given)):
        with pytest.raises(remanent.RefusedError) as raised:
            call()
        assert said in str(raised.value)
    assert not Path(directory).exists()


def test_file_in_place_of_directory_is_rejected(tmp_path: Path) -> None:
    file, other = tmp_path / "model.safetensors", tmp_path / "other"
    file.write_bytes((13).to_bytes(8, "little") + b'{"__metadata__":{}}')
    other.write_bytes(b"text")
    calls: list[Callable[[Path], Any]] = [load_file, safe_open, versions, lambda path: load_model(torch.nn.Linear(1, 1), path)]
    for call in calls[:2] + calls[3:]:
        with pytest.raises(remanent.NoStoreError, match="a safetensors file.*remanent import DIRECTORY"):
            call(file)
        with pytest.raises(remanent.NoStoreError, match="is a file"):
            call(other)
    for path in (file, other):
        before = path.read_bytes()
        with pytest.raises(remanent.ForeignDirectoryError, match="is a file, but versions are saved to a directory"):
            save_file({"w": W}, path)
        assert path.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "other"]


def test_save_returns_bytes_of_safetensors_file() -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    state = {name: tensor.contiguous() for name, tensor in tensors().items() if name not in ("columns", "turned")}
    data = save(state, {"format": "pt"})
    loaded = safetensors.load(data)
    assert loaded.keys() == state.keys() and all(torch.equal(loaded[name], state[name]) for name in state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in load(safetensors.save(state)).items())
    with pytest.raises(remanent.RefusedError, match="a, b: these tensors share memory"):
        save({"a": W, "b": W[:1]})
    with pytest.raises(remanent.RefusedError, match="complex128"):
        save({"c": torch.zeros(1, dtype=torch.complex128)})
    for bad in (b"", data[:-1], data + b"x", b"\xff" * 16):
        with pytest.raises(remanent.InvalidError, match="data: [0-9]+ bytes are not a valid safetensors file"):
            load(bad)


def test_errors_are_subclasses_that_safetensors_users_catch(directory: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    file, linear = str(tmp_path / "file"), torch.nn.Linear(2, 2)
    safetensors.save_model(linear, file)
    save_model(linear, directory)
    other = str(tmp_path / "other")
    calls: dict[str, tuple[Callable[[], Any], ...]] = {
        str(given): (lambda given=given: safetensors.save(given), lambda given=given: save(given),
                     lambda given=given: save_file(given, other))
        for given in ("weights", [W], {"w": 3}, {"w": None}, {"w": [W]}, {1: W}, {"w": W.to_sparse()})
    } | {
        "metadata": (lambda: safetensors.save({"w": W}, {"a": 1}), lambda: save({"w": W}, {"a": 1})),
        "no file": (lambda: safetensors.load_file(other), lambda: load_file(other), lambda: safe_open(other)),
    } | {
        str(model): (lambda model=model: safetensors.load_model(model, file), lambda model=model: load_model(model, directory))
        for model in (torch.nn.Linear(2, 3), torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(3, 2))
    }
    for what, (theirs, *ours) in calls.items():
        with pytest.raises((ValueError, TypeError, RuntimeError, OSError)) as raised:
            theirs()
        for call in ours:
            with pytest.raises(remanent.Error) as caught:
                call()
            assert isinstance(caught.value, raised.type), what


class Tied(torch.nn.Module):
    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.versions: list[Any] = []

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *more: Any) -> None:
        self.versions.append(local_metadata.get("version"))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *more)


def test_model_is_restored_with_ties_and_versions(directory: str) -> None:
    model, other = Tied(), Tied()
    save_model(model, directory, {"format": "pt"}, note="trained")
    assert load_model(other, directory) == ([], [])
    assert other.head.weight is other.embed.weight
    assert all(torch.equal(other.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    assert other.versions == [3]
    assert other.norm.num_batches_tracked == 0, "a batch norm of version 1 would get a new counter"
    assert versions(directory)[0].note == "trained"


def test_misfitting_version_leaves_model_unchanged(directory: str) -> None:
    save_model(torch.nn.Linear(2, 1), directory)
    for model, said in [(torch.nn.Linear(3, 1), "shape"), (torch.nn.Linear(2, 1).bfloat16(), "bfloat16"),
                        (torch.nn.Linear(2, 1, bias=False), "unexpected \\['bias'\\]"),
                        (torch.nn.Linear(2, 1, device="meta"), "meta device")]:
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(remanent.MismatchError, match=said):
            load_model(model, directory)
        if not model.weight.is_meta:
            assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    smaller = torch.nn.Linear(2, 1, bias=False)
    assert load_model(smaller, directory, strict=False) == ([], ["bias"])
    larger = torch.nn.Sequential()
    larger.register_parameter("weight", torch.nn.Parameter(torch.zeros(1, 2)))
    larger.register_parameter("more", torch.nn.Parameter(torch.zeros(1)))
    assert load_model(larger, directory, strict=False) == (["more"], ["bias"])
