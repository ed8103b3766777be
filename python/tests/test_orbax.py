"""Trees that Orbax saves and loads by our handler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import remanent

pytestmark = pytest.mark.jax
jax = pytest.importorskip("jax")
ocp = pytest.importorskip("orbax.checkpoint.experimental.v1")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from remanent.orbax import RemanentHandler  # noqa: E402


@pytest.fixture
def context() -> Any:
    registry = ocp.handlers.local_registry()
    registry.add(RemanentHandler, checkpointable_name="weights")
    return ocp.Context(checkpointables_options=ocp.options.CheckpointablesOptions(registry=registry))


def tree() -> dict[str, Any]:
    return {"w": jnp.arange(6.0).reshape(2, 3), "half": jnp.ones((4,), jnp.bfloat16), "key": jax.random.key(7),
            "plain": [1, 2.5, "text", None], "array": np.arange(5, dtype=np.int16)}


def test_a_tree_comes_back_as_it_was(tmp_path: Path, context: Any) -> None:
    state = tree()
    with context:
        ocp.save_checkpointables(tmp_path / "step", {"weights": state, "other": {"rate": 0.5}})
        state["array"][:] = 0
        found = ocp.load_checkpointables(tmp_path / "step", {"weights": tree()})["weights"]
        assert ocp.checkpointables_metadata(tmp_path / "step").metadata["weights"]["['w']"].shape == (2, 3)
        flat = ocp.load_checkpointables(tmp_path / "step")
    expected = tree()
    assert bool((found["w"] == expected["w"]).all()) and found["half"].dtype == jnp.bfloat16
    assert bool(found["key"] == expected["key"]) and found["plain"] == expected["plain"]
    assert found["array"].tolist() == [0, 1, 2, 3, 4]
    assert flat["other"] == {"rate": 0.5} and flat["weights"]["['w']"].shape == (2, 3)
    store = next((tmp_path / "step").rglob("STORE")).parent
    assert store.name == "remanent"
    assert remanent.jax.restore(store)["['plain'][0]"] == 1


def test_what_is_saved_in_the_background_is_what_was_there(tmp_path: Path, context: Any) -> None:
    array = np.arange(100_000)
    with context:
        response = ocp.save_checkpointables_async(tmp_path / "step", {"weights": {"a": array}})
        array[:] = -1
        response.result()
        found = ocp.load_checkpointables(tmp_path / "step", {"weights": {"a": np.zeros(100_000, int)}})["weights"]
    assert (found["a"] == np.arange(100_000)).all()


def test_changed_bytes_are_not_loaded(tmp_path: Path, context: Any) -> None:
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


def test_what_cannot_be_stored_is_left_to_other_handlers() -> None:
    handler = RemanentHandler()
    assert handler.is_handleable(tree()) and handler.is_handleable({"a": 1})
    assert not handler.is_handleable({"a": object()})
