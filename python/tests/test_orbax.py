"""Trees that Orbax saves and loads with this package's handler."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

import remanent

pytestmark = pytest.mark.jax
jax = pytest.importorskip("jax")
ocp = pytest.importorskip("orbax.checkpoint.experimental.v1")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from remanent.integrations.orbax import RemanentHandler  # noqa: E402


@pytest.fixture
def context() -> Any:
    registry = ocp.handlers.local_registry()
    registry.add(RemanentHandler, checkpointable_name="weights")
    return ocp.Context(checkpointables_options=ocp.options.CheckpointablesOptions(registry=registry))


def tree() -> dict[str, Any]:
    return {"w": jnp.arange(6.0).reshape(2, 3), "half": jnp.ones((4,), jnp.bfloat16), "key": jax.random.key(7),
            "plain": [1, 2.5, "text", None], "array": np.arange(5, dtype=np.int16)}


def test_tree_is_restored_unchanged(tmp_path: Path, context: Any) -> None:
    state = tree()
    with context:
        ocp.save_checkpointables(tmp_path / "step", {"weights": state, "other": {"rate": 0.5}})
        state["array"][:] = 0
        found = ocp.load_checkpointables(tmp_path / "step", {"weights": tree()})["weights"]
        assert ocp.checkpointables_metadata(tmp_path / "step").metadata["weights"]["w"].shape == (2, 3)
        flat = ocp.load_checkpointables(tmp_path / "step")
    expected = tree()
    assert bool((found["w"] == expected["w"]).all()) and found["half"].dtype == jnp.bfloat16
    assert bool(found["key"] == expected["key"]) and found["plain"] == expected["plain"]
    assert found["array"].tolist() == [0, 1, 2, 3, 4]
    assert flat["other"] == {"rate": 0.5} and flat["weights"]["w"].shape == (2, 3)
    store = next((tmp_path / "step").rglob("STORE")).parent
    assert store.name == "remanent"
    assert remanent.jax.restore(store)["['plain'][0]"] == 1


class P(NamedTuple):
    a: Any
    b: Any


class Row(NamedTuple):
    """A tree that is saved and loaded: the result of Orbax's own handler, and of this package's if it differs."""

    saved: Any
    template: Any = None
    is_partial: bool = False
    # The expected result, or part of the expected error message. None expects the result of Orbax's own handler.
    ours: Any = None
    storage: Any = None


def sds(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))


def rows() -> dict[str, Row]:
    w, n = jnp.arange(4.0), np.arange(3)
    tree = {"w": w, "n": n, "step": 7, "layers": [jnp.ones(2), jnp.zeros(2)]}
    like = {"w": sds((4,), jnp.float32), "n": np.empty(3, np.int64), "step": 0,
            "layers": [sds((2,), jnp.float32)] * 2}
    without = {name: leaf for name, leaf in like.items() if name != "w"}
    return {
        "whole template": Row(tree, like),
        "no template": Row(tree),
        "int": Row(tree, {**like, "step": int}),
        "float of an int": Row(tree, {**like, "step": float}),
        "str of an int": Row({"s": 3}, {"s": str}),
        "bool of an int": Row({"s": 3}, {"s": bool}),
        "int of a float": Row({"s": 3.7}, {"s": int}),
        "value of another type": Row({"s": 3}, {"s": 0.0}),
        "int of an array": Row({"s": jnp.array(3)}, {"s": int}),
        "array of an int": Row({"s": 3}, {"s": np.zeros((), np.int64)}),
        "np.ndarray": Row(tree, {**like, "w": np.ndarray}),
        "NumPy template of an array of JAX": Row(tree, {**like, "w": np.empty(4, np.float32)}),
        "array of JAX of one of NumPy": Row({"n": np.ones(2, np.float32)}, {"n": sds((2,), jnp.float32)}),
        "bfloat16 of float32": Row(tree, {**like, "w": sds((4,), jnp.bfloat16)}),
        "float16 of NumPy": Row({"n": np.ones(2)}, {"n": np.empty(2, np.float16)}),
        "int32 of float32": Row({"w": jnp.array([1.7])}, {"w": sds((1,), jnp.int32)}),
        "placeholder": Row(tree, {**like, "w": ...}),
        "only placeholders": Row({"w": w}, {"w": ...}),
        "partial load": Row(tree, without, is_partial=True),
        "omitted leaf": Row(tree, without),
        "another shape": Row({"w": w}, {"w": sds((5,), jnp.float32)}),
        "text as an array": Row({"s": "text"}, {"s": np.empty(2)}),
        "text as an int": Row({"s": "text"}, {"s": int}),
        "a leaf alone": Row(jnp.arange(3)),
        "a leaf alone with a template": Row(jnp.arange(3), sds((3,), jnp.int32)),
        "a number alone": Row(3),
        "namedtuple": Row({"p": P(w, 2)}, {"p": P(sds((4,), jnp.float32), 0)}),
        "namedtuple without a template": Row({"p": P(w, 2)}),
        "dict for a namedtuple": Row({"p": P(w, 2)}, {"p": {"a": sds((4,), jnp.float32), "b": 0}}),
        "namedtuple for a dict": Row({"p": {"a": w, "b": 2}}, {"p": P(sds((4,), jnp.float32), 0)}),
        "list for a tuple": Row({"p": (w, 2)}, {"p": [sds((4,), jnp.float32), 0]}),
        "slash and quote": Row({"a/b": w, "c'd": 2, 'e"]["f': 3}),
        "empty nodes": Row({"a": {}, "b": [], "c": (), "d": None, "e": w}),
        "texts and numbers": Row({"s": "text", "f": 2.5, "b": True, "w": w}),
        "numbered keys with a template": Row({1: w, 2: 3}, {1: sds((4,), jnp.float32), 2: 0}),
        "key of random numbers": Row({"k": jax.random.key(3)}, {"k": jax.random.key(0)}),
        "storage dtype": Row({"w": w, "n": np.arange(3.0)}, storage=jnp.bfloat16),
        # Differences that the module's documentation states.
        "tuple without a template": Row({"p": (w, 2)}, ours={"p": (w, 2)}),
        "numbered keys": Row({1: w, 2: 3}, ours={1: w, 2: 3}),
        "None for a leaf": Row({"w": w}, {"w": None}, ours={"w": w}),
        "jax.Array": Row({"n": np.ones(2, np.float32)}, {"n": jax.Array}, ours={"n": jnp.ones(2)}),
        "jax.ShapeDtypeStruct": Row({"n": np.ones(2, np.float32)}, {"n": jax.ShapeDtypeStruct}, ours={"n": jnp.ones(2)}),
        "no sharding": Row({"w": np.ones(2, np.float32)}, {"w": jax.ShapeDtypeStruct((2,), jnp.float32)},
                           ours={"w": jnp.ones(2)}),
        "bytes": Row({"s": b"text"}, ours={"s": b"text"}),
        "scalar of NumPy": Row({"s": np.float32(3)}, ours={"s": np.float32(3)}),
        "a leaf that only the template has": Row({"w": w}, {"w": like["w"], "v": jnp.ones(1)}, is_partial=True,
                                                 ours="the version does not contain ['v']"),
        "storage dtype of a number": Row({"w": w, "s": 7}, storage=jnp.float16, ours={"w": w.astype(jnp.float16), "s": 7}),
        "placeholder to save": Row({"w": w, "s": ...}, ours="['s']"),
    }


def told(tree: Any) -> Any:
    """Returns leaves with their types, dtypes and bytes, so that two trees can be compared."""
    def of(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return str(leaf.dtype), np.asarray(jax.random.key_data(leaf)).tolist()
        if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
            kind = "jax" if isinstance(leaf, jax.Array) else type(leaf).__name__
            return kind, str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes()
        return type(leaf).__name__, leaf

    found, structure = jax.tree_util.tree_flatten(tree, is_leaf=lambda each: each is None)
    return [of(leaf) for leaf in found], str(structure)


def outcome(path: Path, row: Row, registry: Any) -> Any:
    """Returns the result of a handler for a row. If the handler fails, returns the text of the error and of its causes."""
    made = ocp.Context()
    if registry is not None:
        made.checkpointables.registry = registry
    made.pytree.loading.partial_load = row.is_partial
    if row.storage is not None:
        made.array.saving.storage_options.dtype = row.storage
    try:
        with made:
            ocp.save_checkpointables(path, {"weights": row.saved})
            template = () if row.template is None else ({"weights": row.template},)
            return told(ocp.load_checkpointables(path, *template)["weights"])
    except Exception as error:
        text, cause = "", error
        while cause is not None:
            text, cause = f"{text} {cause}", cause.__cause__ or cause.__context__
        return text


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", rows() if jax else ())
def test_rows_match_orbax_or_stated_difference(tmp_path: Path, name: str) -> None:
    row = rows()[name]
    registry = ocp.handlers.local_registry()
    registry.add(RemanentHandler, checkpointable_name="weights")
    theirs, ours = outcome(tmp_path / "theirs", row, None), outcome(tmp_path / "ours", row, registry)
    if isinstance(row.ours, str):
        assert isinstance(ours, str) and row.ours in ours
        assert not isinstance(theirs, str), "theirs refuses it, too"
    elif row.ours is not None:
        assert ours == told(row.ours) and ours != theirs
    elif isinstance(theirs, str):
        assert isinstance(ours, str), "theirs refuses it"
        assert any(f"['{leaf}']" in ours for leaf in row.saved), "the reason names the leaf"
    else:
        assert ours == theirs


def test_metadata_can_be_used_as_template(tmp_path: Path, context: Any) -> None:
    state = {**tree(), "pair": (jnp.ones(2), 3)}
    with context:
        ocp.save_checkpointables(tmp_path / "step", {"weights": state})
        found = ocp.checkpointables_metadata(tmp_path / "step").metadata["weights"]
        assert found["w"].shape == (2, 3) and found["pair"][1] == 3 and found["array"].dtype == np.int16
        again = ocp.load_checkpointables(tmp_path / "step", {"weights": found})["weights"]
    assert told(again) == told(state)


def test_leaf_storage_dtype_overrides_default(tmp_path: Path, context: Any) -> None:
    options = ocp.options.ArrayOptions.Saving.StorageOptions
    context.array.saving.storage_options.dtype = jnp.float16
    context.array.saving.scoped_storage_options_creator = \
        lambda path, leaf: options(dtype=jnp.bfloat16) if jax.tree_util.keystr(path) == "['w']" else None
    with context:
        ocp.save_checkpointables(tmp_path / "step", {"weights": tree()})
        found = ocp.load_checkpointables(tmp_path / "step")["weights"]
    assert (found["w"].dtype, found["half"].dtype, found["array"].dtype) == (jnp.bfloat16, jnp.float16, np.float16)
    assert bool(found["key"] == tree()["key"]) and found["plain"] == tree()["plain"]


def test_ocp_save_and_load_use_handler_named_state(tmp_path: Path) -> None:
    registry = ocp.handlers.local_registry(include_global_registry=False)
    registry.add(RemanentHandler, checkpointable_name="state")
    made = ocp.Context()
    made.checkpointables.registry = registry
    with made:
        ocp.save(tmp_path / "step", tree())
        assert told(ocp.load(tmp_path / "step")) == told(tree())
        assert told(ocp.load(tmp_path / "step", tree())) == told(tree())
    assert list((tmp_path / "step").rglob("STORE"))


def test_version_without_structure_is_read(tmp_path: Path, context: Any) -> None:
    with context:
        ocp.save_checkpointables(tmp_path / "step", {"weights": {"a": 1}})
        store = next((tmp_path / "step").rglob("STORE")).parent
        remanent.jax.save(tree(), store)  # writes no structure, as the handler did before
        flat = ocp.load_checkpointables(tmp_path / "step")["weights"]
        found = ocp.load_checkpointables(tmp_path / "step", {"weights": tree()})["weights"]
    assert flat["['plain'][0]"] == 1 and told(found) == told(tree())


@pytest.mark.parametrize(("leaf", "structure"), [
    ({"$": ["later", 1]}, ["dict", [["a", None]]]), (1, ["dict", [[{"$": ["later", 1]}, None]]]),
], ids=["value", "name"])
def test_values_of_later_releases_are_rejected(tmp_path: Path, context: Any, leaf: Any, structure: Any) -> None:
    with context:
        ocp.save_checkpointables(tmp_path / "step", {"weights": {"a": 1}})
        store = next((tmp_path / "step").rglob("STORE")).parent
        remanent.jax.write([["['a']", leaf]], {}, store, note=None, name=None, durable=True, structure=[structure])
        for template in (None, {"weights": {"a": 1}}, {"weights": {"a": None}}):
            with pytest.raises(Exception, match="weights") as raised:
                ocp.load_checkpointables(tmp_path / "step", template)
            assert isinstance(raised.value.__cause__, remanent.NoStateError)
            assert "a value of kind 'later', which this release" in str(raised.value.__cause__)


def test_background_save_has_values_of_call(tmp_path: Path, context: Any) -> None:
    array = np.arange(100_000)
    with context:
        response = ocp.save_checkpointables_async(tmp_path / "step", {"weights": {"a": array}})
        array[:] = -1
        response.result()
        found = ocp.load_checkpointables(tmp_path / "step", {"weights": {"a": np.zeros(100_000, int)}})["weights"]
    assert (found["a"] == np.arange(100_000)).all()


def test_damaged_arrays_are_not_loaded(tmp_path: Path, context: Any) -> None:
    with context:
        ocp.save_checkpointables(tmp_path / "step", {"weights": {"a": jnp.arange(100_000)}})
        changed = 0
        for file in (tmp_path / "step" / "weights").rglob("*"):
            data = bytearray(file.read_bytes()) if file.is_file() else bytearray()
            if (at := data.find(np.arange(50_000, 50_100, dtype=np.int32).tobytes())) >= 0:
                data[at] ^= 1
                changed += file.write_bytes(data) > 0
        assert changed
        with pytest.raises(Exception, match="weights") as raised:
            ocp.load_checkpointables(tmp_path / "step", {"weights": {"a": jnp.zeros(100_000, int)}})
    assert isinstance(raised.value.__cause__, remanent.DamagedError)


def test_unsupported_values_are_left_to_other_handlers() -> None:
    handler = RemanentHandler()
    assert handler.is_handleable(tree()) and handler.is_handleable({"a": 1})
    assert not handler.is_handleable({"a": object()})
