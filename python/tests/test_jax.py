"""Trees of JAX's arrays."""

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
        "complex": jnp.ones(2, jnp.complex64) * 1j, "bool": jnp.array([True, False]),
    }


def same(left: Any, right: Any) -> bool:
    def alike(one: Any, other: Any) -> bool:
        if isinstance(one, jax.Array) and jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        if type(one) is not type(other):
            return False
        if hasattr(one, "dtype"):
            return one.dtype == other.dtype and np.asarray(one).tobytes() == np.asarray(other).tobytes()
        return bool(one == other)

    return all(jax.tree.leaves(jax.tree.map(alike, left, right, is_leaf=lambda each: each is None)))


def test_saving_and_restoring_are_counted(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Made] = []
    monkeypatch.setattr("remanent.jax.Bar", counted(made))
    tree = {"w": jnp.ones((10, 10)), "b": np.ones(3, np.int16), "step": 3, "empty": jnp.zeros((0, 2))}
    save(tree, directory, progress=True)
    restore(directory, tree)
    restore(directory, progress=False)
    assert [(what, total, shown) for what, total, shown, _ in made] == [
        ("saving", 406, True), ("loading", 406, None), ("loading", 406, False)]
    assert all(sum(counts) == 406 for *_, counts in made)


def test_a_tree_comes_back(directory: str) -> None:
    first = save(tree(), directory, note="first")
    assert same(restore(directory, tree()), tree())
    changed = tree()
    changed["params"][0]["w"] = changed["params"][0]["w"].at[0, 0].set(9)
    changed["step"] = 8
    save(changed, directory)
    assert same(restore(directory, tree()), changed) and same(restore(directory, tree(), at=first), tree())
    loose = restore(directory)
    assert loose["['step']"] == 8 and loose["['params'][0]['w']"][0, 0] == 9


def test_shards_go_where_the_templates_are(directory: str) -> None:
    mesh = jax.sharding.Mesh(jax.devices(), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    array = jax.device_put(jnp.arange(8.0), sharding)
    save({"w": array}, directory)
    assert restore(directory, {"w": array})["w"].sharding == sharding
    spec = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    again = restore(directory, {"w": spec})["w"]
    assert again.sharding == sharding and (again == array).all()


def test_what_does_not_fit_is_refused(directory: str) -> None:
    for wrong, path in (({"f": print}, "f"), ({"a": np.array([object()])}, "a"), ({"i": jnp.ones(2, jnp.int4)}, "i")):
        with pytest.raises(remanent.RefusedError, match=path):
            save(wrong, directory)
        assert not os.path.exists(directory)
    save({"w": jnp.ones(3)}, directory)
    for template in ({"w": jnp.ones(4)}, {"w": jnp.ones(3, jnp.int32)}, {"v": jnp.ones(3)}, {"w": jnp.ones(3), "v": 1}):
        with pytest.raises(remanent.NoStateError):
            restore(directory, template)
