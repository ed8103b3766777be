"""A handler for Orbax's checkpoints (v1), by which trees of arrays are durable and proven on the way back.

    import orbax.checkpoint.experimental.v1 as ocp
    from remanent.orbax import RemanentHandler

    registry = ocp.handlers.local_registry()
    registry.add(RemanentHandler, checkpointable_name="weights")
    context = ocp.Context()
    context.checkpointables.registry = registry
    with context:
        ocp.save_checkpointables(path, {"weights": tree})
        tree = ocp.load_checkpointables(path, {"weights": template})["weights"]

A checkpointable is a store in a folder of the checkpoint. What it can hold, and what it refuses by its path, are those
of `remanent.jax`: arrays whose shards are all in this process, keys of random numbers, NumPy's arrays, plain values.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from typing import Any

import jax

from remanent import jax as trees
from remanent._errors import Error

__all__ = ["RemanentHandler"]

# The store's folder in that of the checkpointable.
_STORE = "remanent"


class RemanentHandler:
    """Saves and loads trees for Orbax, which makes it: add the class to a registry."""

    async def save(self, directory: Any, checkpointable: Any) -> Awaitable[None]:
        """Takes the arrays to the host, and writes them in the background: the tree may change after this."""
        leaves, arrays = trees.taken(checkpointable)
        return _save(directory, leaves, {path: _copied(path, leaf) for path, leaf in arrays.items()})

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Awaitable[Any]:
        """A tree of the template's structure and shardings; without one, a dict from paths to leaves."""
        return asyncio.to_thread(trees.restore, _store_in(directory), abstract_checkpointable, progress=False)

    async def metadata(self, directory: Any) -> dict[str, Any]:
        """By path: the shape and type of arrays, and plain values themselves."""
        return trees.shapes(_store_in(directory))

    def is_handleable(self, checkpointable: Any) -> bool:
        """Whether all leaves can be stored. Of arrays only the type is looked at."""
        try:
            trees.taken(checkpointable)
        except Error:
            return False
        return True

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        """Whether this can be a template: a tree of what can be stored, or of shapes and types."""
        return self.is_handleable(jax.tree_util.tree_map(
            lambda leaf: None if isinstance(leaf, jax.ShapeDtypeStruct) else leaf, abstract_checkpointable))


async def _save(directory: Any, leaves: list[Any], arrays: dict[str, Any]) -> None:
    made = await directory.await_creation()
    await asyncio.to_thread(trees.write, leaves, arrays, _store_in(made), note=None, name=None, durable=True)


def _copied(path: str, leaf: Any) -> Any:
    """An array's elements in memory that nobody else writes, also where a step donates what it was made of."""
    array = trees.on_host(path, leaf)
    return array if array is not leaf and array.flags.owndata else array.copy()


def _store_in(directory: Any) -> str:
    return os.path.join(os.fspath(directory), _STORE)
