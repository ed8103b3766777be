"""Trees of JAX arrays."""

from __future__ import annotations

import os
from typing import Any

import pytest
from bars import Made, counted

import remanent

# Two devices, so that arrays have shards.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
jax = pytest.importorskip("jax", reason="JAX is not installed")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from remanent.jax import restore, save  # noqa: E402

pytestmark = pytest.mark.jax


def tree() -> dict[str, Any]:
    return {
        "params": [{"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3, jnp.bfloat16)}, {"w": jnp.zeros((0, 4))}],
        "key": jax.random.key(3), "old_key": jax.random.PRNGKey(4), "step": 7, "name": "run", "none": None,
        "scalar": jnp.float32(0.5), "numpy": np.arange(3, dtype=np.int16), "f8": jnp.ones(4, jnp.float8_e4m3fn),
        "weak": jnp.asarray(1.5), "weak_int": jax.lax.full((2, 2), 3), "weak_nan": jax.lax.full((2,), float("nan")),
        "committed": jax.device_put(jnp.ones(2), jax.devices()[1]), "np_scalar": np.float16(1.5), "empty_weak":
        jax.lax.full((0, 3), 1.0), "complex": jnp.ones(2, jnp.complex64) * 1j, "bool": jnp.array([True, False]),
    }


def same(left: Any, right: Any) -> bool:
    def alike(one: Any, other: Any) -> bool:
        if isinstance(one, jax.Array) and jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        if type(one) is not type(other):
            return False
        if isinstance(one, jax.Array) and (one.weak_type, one.committed) != (other.weak_type, other.committed):
            return False
        if hasattr(one, "dtype"):
            return one.dtype == other.dtype and np.asarray(one).tobytes() == np.asarray(other).tobytes()
        return bool(one == other)

    return all(jax.tree.leaves(jax.tree.map(alike, left, right, is_leaf=lambda each: each is None)))


def test_progress_counts_saved_and_restored_bytes(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Made] = []
    monkeypatch.setattr("remanent.jax.Bar", counted(made))
    tree = {"w": jnp.ones((10, 10)), "b": np.ones(3, np.int16), "step": 3, "empty": jnp.zeros((0, 2))}
    save(tree, directory, progress=True)
    restore(directory, tree)
    restore(directory, progress=False)
    assert [(what, total, shown) for what, total, shown, _ in made] == [
        ("saving", 406, True), ("loading", 406, None), ("loading", 406, False)]
    assert all(sum(counts) == 406 for *_, counts in made)


def test_tree_is_restored(directory: str) -> None:
    first = save(tree(), directory, note="first")
    assert same(restore(directory, tree()), tree())
    changed = tree()
    changed["params"][0]["w"] = changed["params"][0]["w"].at[0, 0].set(9)
    changed["step"] = 8
    save(changed, directory)
    assert same(restore(directory, tree()), changed) and same(restore(directory, tree(), at=first), tree())
    loose = restore(directory)
    assert loose["['step']"] == 8 and loose["['params'][0]['w']"][0, 0] == 9


def test_shards_follow_template(directory: str) -> None:
    mesh = jax.sharding.Mesh(jax.devices(), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    array = jax.device_put(jnp.arange(8.0), sharding)
    save({"w": array}, directory)
    assert restore(directory, {"w": array})["w"].sharding == sharding
    spec = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    again = restore(directory, {"w": spec})["w"]
    assert again.sharding == sharding and (again == array).all()


def test_incompatible_template_is_rejected(directory: str) -> None:
    for wrong, path in (({"f": print}, "f"), ({"a": np.array([object()])}, "a"), ({"i": jnp.ones(2, jnp.int4)}, "i")):
        with pytest.raises(remanent.RefusedError, match=path):
            save(wrong, directory)
        assert not os.path.exists(directory)
    save({"w": jnp.ones(3)}, directory)
    for template in ({"w": jnp.ones(4)}, {"w": jnp.ones(3, jnp.int32)}, {"v": jnp.ones(3)}, {"w": jnp.ones(3), "v": 1}):
        with pytest.raises(remanent.NoStateError):
            restore(directory, template)


# Properties of values other than shape, type and bytes, with an expression that depends on each.
PROPERTIES: dict[str, tuple[Any, Any]] = {
    "weak type": (lambda: jnp.asarray(2.0), lambda x: (x * jnp.bfloat16(1)).dtype),
    "strong type": (lambda: jnp.float32(2.0), lambda x: (x * jnp.bfloat16(1)).dtype),
    "committed": (lambda: jax.device_put(jnp.ones(4), jax.devices()[1]), lambda x: (x.committed, x.devices())),
    "uncommitted": (lambda: jnp.ones(4), lambda x: (x.committed, x.devices())),
    "committed and weak": (lambda: jax.device_put(jnp.asarray(1.0), jax.devices()[1]),
                           lambda x: (x.committed, x.weak_type, x.devices())),
    "key, batched": (lambda: jax.random.split(jax.random.key(3), 4), lambda x: (x.dtype, x.shape)),
    "key, committed": (lambda: jax.device_put(jax.random.key(3), jax.devices()[1]), lambda x: x.devices()),
    "scalar of NumPy": (lambda: np.int16(3), type),
    "array of NumPy without a dimension": (lambda: np.array(3, np.int16), type),
}


@pytest.mark.parametrize("with_template", [True, False])
@pytest.mark.parametrize("row", PROPERTIES)
def test_compiled_step_sees_restored_properties(directory: str, row: str, with_template: bool) -> None:
    make, seen = PROPERTIES[row]
    save({"x": make()}, directory)
    restored = restore(directory, {"x": make()})["x"] if with_template else restore(directory)["['x']"]
    assert seen(restored) == seen(make())


def test_restore_does_not_recompile_step(directory: str) -> None:
    compiled = []

    @jax.jit
    def step(state: Any) -> Any:
        compiled.append(1)
        return jax.tree.map(lambda x: x * 2, state)

    state = {"strong": jnp.ones(3), "weak": jnp.asarray(1.0), "scalar": jnp.int32(3)}
    step(state)
    save(state, directory)
    step(restore(directory, state))
    assert len(compiled) == 1


def test_lost_placement_is_reported(directory: str) -> None:
    mesh = jax.sharding.Mesh(jax.devices(), ("x",))
    sharded = jax.device_put(jnp.arange(8.0), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))
    save({"w": sharded, "b": jnp.ones(2)}, directory)
    with pytest.warns(UserWarning, match=r"\['w'\] \(NamedSharding"):
        restored = restore(directory)
    assert (restored["['w']"] == sharded).all() and not restored["['w']"].committed


def test_shared_numpy_arrays_are_shared_again(directory: str) -> None:
    shared = np.arange(6.0)
    state = {"a": shared, "b": [shared], "c": shared.copy()}
    save(state, directory)
    restored, loose = restore(directory, state), restore(directory)
    assert restored["a"] is restored["b"][0] and restored["c"] is not restored["a"]
    assert loose["['a']"] is loose["['b'][0]"]
    save({"even": shared[::2], "odd": shared[1::2]}, directory)
    with pytest.raises(remanent.RefusedError, match=r"\['tail'\].*\['whole'\]"):
        save({"whole": shared, "tail": shared[3:]}, directory)


def test_arrays_without_own_elements_are_rejected(directory: str) -> None:
    gone = jnp.ones(3)
    gone.delete()
    weak = jax.lax.full((2,), 1.0).astype(jnp.bfloat16)
    refused = {"gone": gone, "masked": np.ma.masked_array([1.0], [True]),
               "objects": np.array([object()]), "swapped": np.arange(3, dtype=">i4"), "nibbles": jnp.ones(2, jnp.int4),
               "dates": np.array(["2020-01-01"], "datetime64[D]"), "structured": np.zeros(2, "i4,f4")}
    assert not weak.weak_type
    for name, leaf in refused.items():
        with pytest.raises(remanent.RefusedError, match=name) as caught:
            save({"fits": jnp.ones(2), name: leaf}, directory)
        assert caught.value.remedy
        assert not os.path.exists(directory)
    with pytest.raises(remanent.RefusedError, match="traced"):
        jax.jit(lambda x: save({"x": x}, directory))(jnp.ones(2))


SETTINGS: dict[str, Any] = {
    "x64": lambda: jax.enable_x64(True), "no transfers": lambda: jax.transfer_guard("disallow"),
    "NaNs are errors": lambda: jax.debug_nans(True), "no jit": lambda: jax.disable_jit(),
    "strict promotion": lambda: jax.numpy_dtype_promotion("strict"), "no leaks": lambda: jax.checking_leaks(),
    "rank promotion is an error": lambda: jax.numpy_rank_promotion("raise"),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_jax_settings_change_nothing(directory: str, setting: str) -> None:
    state = tree()
    with SETTINGS[setting]():
        save(state, directory)
        assert same(restore(directory, state), state)
        restore(directory)


@pytest.mark.parametrize("name", [
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "float16", "bfloat16", "float32", "complex64",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "int4", "uint4",
    "float4_e2m1fn"])
def test_arrays_are_stored_byte_for_byte(directory: str, name: str) -> None:
    array = jnp.arange(8).astype(name)
    with remanent.Store(directory) as store:
        if name in ("int4", "uint4", "float4_e2m1fn"):
            with pytest.raises(Exception, match="bits|DLPack"):
                store["k"] = array
            assert "k" not in store
        else:
            store["k"] = array
            assert store["k"] == np.asarray(array).tobytes()
