"""Each kind of value is restored with the same bits, type and sharing, or refused with its path before a save."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import remanent

torch = pytest.importorskip("torch", reason="torch is not installed")
numpy = pytest.importorskip("numpy", reason="NumPy is not installed")

import fidelity_rows as rows  # noqa: E402
from fidelity_rows import Row, difference  # noqa: E402

from remanent._state.page_tree import flatten, unflatten  # noqa: E402
from remanent._state.run_state import flatten_state, made  # noqa: E402
from remanent._tensors.conversion import SHORT, blocks, tensors_of  # noqa: E402
from remanent._tensors.storages import extents_there  # noqa: E402
from remanent.torch import Checkpointer, load_file, save_file  # noqa: E402

TABLES = {
    "value": rows.VALUES, "torch dtype": rows.torch_dtype_rows(SHORT), "array": rows.NUMPY_ARRAYS,
    "scalar": rows.NUMPY_SCALARS, "kind of array": rows.NUMPY_KINDS, "kind of tensor": rows.TENSOR_KINDS,
}
ALL = {f"{table}: {row.name}": row for table, of_table in TABLES.items() for row in of_table}
KEPT = {name: row for name, row in ALL.items() if row.refused is None}
LONG = bool(os.environ.get("REMANENT_LONG"))


def restored(value: Any) -> Any:
    """Returns the value after a save and a restore without a store in between."""
    tensors: dict[str, Any] = {}
    text = flatten_state({"part": {"of": value}}, tensors, of_rank=False)
    loaded = {}
    for block in blocks(extents_there(tensors)):
        data = torch.frombuffer(bytearray(bytes(block.data.tolist()) if block.nbytes else b""), dtype=torch.uint8) if (
            block.nbytes) else torch.empty(0, dtype=torch.uint8)
        loaded |= tensors_of(data, block.arrays, torch.device("cpu"))
    return unflatten(json.loads(text), lambda tag: made(tag, loaded))["part"]["of"]


@pytest.fixture(scope="module")
def through_a_store(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns all rows that are saved, after a save and a restore with one checkpoint."""
    directory = str(tmp_path_factory.mktemp("rows") / "run")
    with Checkpointer(directory, extra={"rows": {name: row.make() for name, row in KEPT.items()}}, rng=False) as run:
        run.save(1)
    found: dict[str, Any] = {}
    with Checkpointer(directory, extra={"rows": found}, rng=False) as run:
        run.restore()
    return found


@pytest.mark.parametrize("name", KEPT)
def test_supported_value_is_restored_unchanged(name: str, through_a_store: dict[str, Any]) -> None:
    assert difference(KEPT[name].make(), through_a_store[name]) is None


@pytest.mark.parametrize("name", [name for name in ALL if name not in KEPT])
def test_unsupported_value_is_named_before_save(name: str, directory: str) -> None:
    row = ALL[name]
    tensors: dict[str, Any] = {}
    with pytest.raises(remanent.RefusedError, match=f"^part/of[^:]*: {row.refused}") as caught:
        flatten_state({"part": {"of": row.make()}}, tensors, of_rank=False)
        extents_there(tensors)
    assert caught.value.remedy


def test_unsupported_value_keeps_previous_version(directory: str) -> None:
    state: dict[str, Any] = {"of": torch.ones(2)}
    with Checkpointer(directory, extra={"part": state}, rng=False) as run:
        run.save(1)
        before = run.store.lsn
        state["of"] = numpy.ma.masked_array([1.0], [True])
        with pytest.raises(remanent.RefusedError, match="part/of: a numpy.ma.MaskedArray"):
            run.save(2)
        assert run.store.lsn == before and [version.step for version in run.versions()] == [1]


@pytest.mark.parametrize("row", rows.KEYS, ids=lambda row: row.name)
def test_keys_with_equal_text_keep_their_values(row: Row) -> None:
    if row.refused is not None:
        with pytest.raises(remanent.RefusedError, match=f"^part/of: {row.refused}"):
            flatten("", {"part": {"of": row.make()}}, lambda path, value: None)
        return
    counted = iter(range(1 << 30))

    def numbered(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: numbered(each) for key, each in value.items()}
        return [numbered(each) for each in value] if isinstance(value, list) else torch.tensor(next(counted))

    value = numbered(row.make())
    assert difference(value, restored(value)) is None


def test_parts_with_colliding_paths_stay_separate(directory: str) -> None:
    parts: dict[str, Any] = {"ema/fast": {"w": torch.ones(2)}, "ema": {"fast/w": torch.zeros(2)},
                             "ema~1fast": {"w": torch.full((2,), 5.0)}}
    with Checkpointer(directory, extra=parts, rng=False) as run:
        run.save(1)
    found: dict[str, Any] = {name: {} for name in parts}
    with Checkpointer(directory, extra=found, rng=False) as run:
        run.restore()
    assert difference(parts, found) is None


def _random_state(chance: random.Random, depth: int) -> Any:
    """Returns a random tree whose keys are often equal."""
    kind = chance.randrange(3) if depth else 3
    if kind == 3:
        return torch.tensor(chance.randrange(1 << 40))
    if kind == 2:
        return [_random_state(chance, depth - 1) for _ in range(chance.randrange(4))]
    keys: list[Any] = ["".join(chance.choices("a/~:01\"$", k=chance.randrange(4))) for _ in range(4)]
    if kind == 1:
        keys += [chance.choice([0, 1, -1, None, True, 0.5, (), (0,), ("0",), b"0", 10, "10", "null", "~:null"])
                 for _ in range(4)]
    return {key: _random_state(chance, depth - 1) for key in keys}


def test_random_states_have_unique_names() -> None:
    seed = int(os.environ.get("REMANENT_SEED", random.randrange(1 << 32)))
    chance = random.Random(seed)
    for round in range(2000 if LONG else 60):
        value = _random_state(chance, 4)
        assert difference(value, restored(value)) is None, f"REMANENT_SEED={seed}, round {round}"


def test_ordinary_names_are_unescaped_paths() -> None:
    state = {"model": {"layers.0.weight": 0, "0": 0},
             "optimizer": {"state": {0: {"exp_avg": 0}}, "param_groups": [{"lr": 0}]}}
    tensors: dict[str, Any] = {}

    def of_tensors(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: of_tensors(each) for key, each in value.items()}
        return [of_tensors(each) for each in value] if isinstance(value, list) else torch.ones(1)

    flatten_state(of_tensors(state), tensors, of_rank=False)
    assert list(tensors) == ["model/layers.0.weight", "model/0", "optimizer/state/0/exp_avg",
                             "optimizer/param_groups/0/lr"]


def test_version_of_first_format_is_restored(directory: str) -> None:
    held = json.loads((Path(__file__).parent / "golden" / "state-1.json").read_text())
    with remanent.Store(directory, device="host") as store:
        batch = store.batch()
        for key, (content, metadata) in held["pages"].items():
            batch.create(bytes.fromhex(content), key=key, place="disk", metadata=metadata)
        batch.create(json.dumps(held["manifest"]).encode(), key="remanent tensors")
        for name, value in held["root"].items():
            batch.set_root(name, value)
        store.commit(batch, "durable")
        store.snapshot("step 4")
    found: dict[str, Any] = {}
    with Checkpointer(directory, extra={"s/t": found}, rng=False) as run:
        run.restore()
    base = torch.arange(12.0).reshape(3, 4)
    from collections import OrderedDict

    expected = {
        "a/b": torch.full((2,), 1.0), "a": {"c": torch.full((2,), 2.0, dtype=torch.bfloat16)}, 1: torch.tensor(3),
        None: [torch.zeros(0, 3)], (0, 1): "pair", "~": {"x~y": base, "turned": base.t()}, "$": True,
        "array": numpy.arange(3, dtype=numpy.int16), "scalar": numpy.float32(1.5), "flag": numpy.bool_(True),
        "floats": [float("inf"), float("-inf"), -0.0, 1e300], "nan": float("nan"), "big": 1 << 70, "bytes": b"\x00x",
        "bytearray": bytearray(b"y"), "complex": complex(-0.0, float("inf")), "ordered": OrderedDict(b=1, a=2),
        "default": {"x": [1]}, "tuple": (1, (2,)), "dtype": torch.bfloat16, "device": torch.device("cpu"),
        "size": torch.Size([2, 3])}
    assert difference(expected, found["in"]) is None
    turned = found["in"]["~"]
    assert turned["turned"].data_ptr() == turned["x~y"].data_ptr()


def test_shared_container_is_restored_as_one_object() -> None:
    shared: list[Any] = [1, {"w": torch.ones(2)}]
    config = rows.Config(0.5, shared)
    value = {"a": shared, "b": (shared, config), "c": {"deep": [config]}, "d": [1, {"w": torch.ones(2)}],
             "e": bytearray(b"")}
    found = restored(value)
    assert difference(value, found) is None
    assert found["a"] is found["b"][0] is found["b"][1].layers and found["b"][1] is found["c"]["deep"][0]
    assert found["d"] is not found["a"]


def test_tensors_and_arrays_share_memory_again() -> None:
    base, array = torch.arange(12.0), numpy.arange(12.0).reshape(3, 4)
    value = {"whole": base, "row": base[2:5], "tied": [base], "expanded": base[:1].expand(4), "array": array,
             "column": array[:, 1], "turned": array.T, "flipped": numpy.arange(3)[::-1]}
    found = restored(value)
    assert difference(value, found) is None
    found["whole"][0], found["whole"][2], found["array"][1, 1] = 50.0, 60.0, 70.0
    assert found["row"][0] == 60 and found["tied"][0][0] == 50 and found["expanded"].tolist() == [50.0] * 4
    assert found["column"][1] == 70 and found["turned"][1, 1] == 70


def test_elements_of_expanded_tensor_share_memory_again() -> None:
    # Overlapping windows of two rows that are far apart.
    windows = torch.arange(100.0).as_strided((2, 2, 2), (50, 1, 1))
    found = restored(windows)
    assert difference(windows, found) is None
    found[1, 0, 1] = -1.0
    assert found[1, 1, 0] == -1


def _apart() -> dict[str, dict[str, Any]]:
    array, flat, raw = numpy.arange(8.0), torch.arange(8.0), bytearray(range(8))
    return {
        "halves of a buffer": {"a": numpy.frombuffer(raw, "u1", 4), "b": numpy.frombuffer(raw, "u1", 4, 4)},
        "parts in two storages": {"a": flat[:3], "b": torch.from_dlpack(flat[3:])},
        "an array and an empty part of it": {"a": array, "b": array[:0], "t": torch.from_numpy(array[2:2])},
        "a reversed array": {"a": numpy.arange(3)[::-1], "b": numpy.arange(3)},
        "a conjugate": {"a": torch.tensor([1 + 2j]).conj(), "b": torch.tensor([1 + 2j])},
    }


@pytest.mark.parametrize("name", _apart())
def test_values_with_separate_memory_are_restored(name: str) -> None:
    value = _apart()[name]
    assert difference(value, restored(value)) is None


def _sharing() -> dict[str, dict[str, Any]]:
    array, number, flat = numpy.arange(8.0), torch.tensor([1 + 2j]), torch.arange(8.0)
    return {
        "array and a part's tensor": {"a": array, "t": torch.from_numpy(array[2:])},
        "array and its reverse": {"a": array, "b": array[::-1]},
        "reverse and a part's tensor": {"a": array[::-1], "t": torch.from_numpy(array[2:])},
        "columns with gaps": {"a": flat.view(2, 4)[:, :2].numpy(), "b": flat.view(2, 4)[:, 1:3].numpy()},
        "columns with gaps and their tensor": {"a": flat.view(2, 4)[:, :2].numpy(), "b": flat},
        "tensor and its conjugate": {"a": number, "b": number.conj()},
        "tensor and its negative part": {"a": number, "b": number.conj().imag},
        "two storages": {"a": flat, "b": torch.from_dlpack(flat[3:])},
    }


@pytest.mark.parametrize("name", _sharing())
def test_unpreservable_sharing_is_rejected(name: str) -> None:
    with pytest.raises(remanent.RefusedError, match="shares? memory"):
        restored(_sharing()[name])


def test_only_used_elements_are_stored(directory: str) -> None:
    big = torch.arange(1 << 20, dtype=torch.float32)
    tensors = {
        "expanded": torch.arange(3.0).reshape(3, 1).expand(3, 1 << 20), "first": big[6:11], "last": big[-3:],
        "even": big[::1 << 16], "odd": big[5::1 << 16], "every other": big[:: 1 << 17],
        "block": big.view(1024, 1024)[3:5, 4:9], "inside": big.view(1024, 1024)[4, 5:8],
    }
    save_file(tensors, directory)
    found = load_file(directory)
    assert difference(tensors["expanded"], found["expanded"]) is None
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    with remanent.View(directory) as view:
        assert sum(page.length for page in view.pages() if page.key != "remanent tensors") < 500
    found["even"][2] = -1.0
    found["block"][1, 2] = -2.0
    assert found["every other"][1] == -1 and found["inside"][1] == -2, "elements that were shared are shared"
    assert -1 not in found["odd"] and found["odd"].is_contiguous()


def test_random_views_of_storage_are_restored() -> None:
    seed = int(os.environ.get("REMANENT_SEED", random.randrange(1 << 32)))
    chance = random.Random(seed)
    for round in range(500 if LONG else 40):
        flat = torch.arange(1 << 12, dtype=torch.int32)
        views = {}
        for number in range(chance.randrange(1, 6)):
            shape = [chance.randrange(1, 5) for _ in range(chance.randrange(4))]
            stride = [chance.choice([0, 1, 2, 3, 7, 64, 128, 300]) for _ in shape]
            views[f"v{number}"] = flat.as_strided(shape, stride, chance.randrange(400))
        found = restored(views)
        replay = f"REMANENT_SEED={seed}, round {round}"
        assert all(torch.equal(found[name], view) for name, view in views.items()), replay
        # Elements share a memory location after the restore if and only if they did before.
        places = {pair for name, view in views.items()
                  for pair in zip(_places(view), _places(found[name]), strict=True)}
        assert len(places) == len({then for then, _ in places}) == len({now for _, now in places}), replay


def _places(tensor: torch.Tensor) -> list[int]:
    """Returns the addresses of a tensor's elements."""
    at = torch.arange(tensor.untyped_storage().nbytes() // tensor.itemsize)
    first = tensor.untyped_storage().data_ptr()
    found = at.as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset()))
    return [first + tensor.itemsize * int(each) for each in found.reshape(-1)]


@pytest.mark.parametrize("change, reason", {
    "gone": "which the program has not imported", "a value": "which is no longer a dataclass",
    "other fields": "which is no longer a dataclass with the fields n",
}.items())
def test_changed_class_is_rejected(change: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("codec_models")
    monkeypatch.setitem(sys.modules, "codec_models", module)
    exec("import dataclasses\n@dataclasses.dataclass\nclass Model:\n    n: int\n", module.__dict__)
    held = flatten("", module.Model(3), lambda path, value: None)
    assert unflatten(held) == module.Model(3)
    if change == "gone":
        monkeypatch.delitem(sys.modules, "codec_models")
    elif change == "a value":
        module.__dict__["Model"] = print
    else:
        exec("@dataclasses.dataclass\nclass Model:\n    m: int\n", module.__dict__)
    with pytest.raises(remanent.NoStateError, match=reason):
        unflatten(held)


def test_restore_runs_and_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(sys.modules)
    module = types.ModuleType("codec_traps")
    monkeypatch.setitem(sys.modules, "codec_traps", module)
    exec("def __getattr__(name): raise AssertionError(name)\n"
         "called = []\n"
         "def trap(*given): called.append(given)\n", module.__dict__)
    for tag in (["namedtuple", "codec_traps:trap", ["a"], [1]], ["enum", "codec_traps:trap", "a"],
                ["flag", "os:system", 1],
                ["dataclass", "codec_traps:missing", {"a": 1}], ["subclass", "str", "codec_traps:trap", "x"],
                ["namedtuple", "antigravity:x", ["a"], [1]], ["subclass", "str", "fidelity_rows:Meters", "x"],
                ["enum", "fidelity_rows:Config", "x"], ["nothing that is known", 1]):
        with pytest.raises(remanent.NoStateError):
            unflatten({"$": tag})
    assert module.called == [] and set(sys.modules) - before <= {"codec_traps"}


def test_changed_enumeration_is_rejected() -> None:
    held = flatten("", rows.Color.RED, lambda path, value: None)
    other = copy.deepcopy(held)
    other["$"][-1] = "another"
    assert unflatten(held) is rows.Color.RED
    with pytest.raises(remanent.NoStateError, match=re.escape("with the value 'another', which is now 'r'")):
        unflatten(other)
