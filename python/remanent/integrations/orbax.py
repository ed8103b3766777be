"""An Orbax (v1) handler that saves trees of arrays durably and verifies them when they are loaded.

    import orbax.checkpoint.experimental.v1 as ocp
    from remanent.integrations.orbax import RemanentHandler

    registry = ocp.handlers.local_registry()
    registry.add(RemanentHandler, checkpointable_name="weights")
    context = ocp.Context()
    context.checkpointables.registry = registry
    with context:
        ocp.save_checkpointables(path, {"weights": tree})
        tree = ocp.load_checkpointables(path, {"weights": template})["weights"]

A checkpointable is stored in a folder of the checkpoint. The supported values are those of `remanent.jax`: arrays whose
shards are all in this process, random keys, NumPy arrays and plain values. Other values are rejected by path.

Templates are those of Orbax's own handler. Arrays, `jax.ShapeDtypeStruct`s and NumPy arrays convert to their dtype.
`int`, `float`, `bool` and `str`, as types or values, convert numbers. `...` omits a leaf. With the context's
`partial_load`, a template may omit leaves. The context's storage dtypes convert arrays when they are saved. Options for
the layout of Orbax's own files have no effect. This handler differs from Orbax's own handler as follows:

- Without a template, tuples and keys of dicts are restored with their original types.
- A template may contain the types `jax.Array` and `jax.ShapeDtypeStruct`. A template may request a sharding of None,
  which places the array on the default device. None in a template loads the leaf as it was saved.
- A leaf that only the template has is rejected, even with `partial_load`. Arrays of another shape are rejected
  regardless of `enable_padding_and_truncation`.
- A storage dtype converts only arrays, not Python numbers. `...` cannot be saved.
- Metadata contains numbers and strings themselves. For arrays, it contains values that load the arrays when used as a
  template.

To use the handler for `ocp.save` and `ocp.load`, register it for the name "state".
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import jax
import numpy

from remanent import jax as trees
from remanent._store._native import View
from remanent._store.errors import Error, RefusedError
from remanent._util import durable_files
from remanent.integrations import _hosts
from remanent.integrations._orbax_trees import ArrayMetadata, Version, is_template, structure_of

with _hosts.importing(_hosts.ORBAX):
    from orbax.checkpoint.experimental.v1._src.context.context import get_context

__all__ = ["ArrayMetadata", "RemanentHandler"]

# The name of the store's folder within the checkpointable's folder.
_STORE = "remanent"


def __dir__() -> list[str]:
    return __all__


class RemanentHandler:
    """Saves and loads trees for Orbax. Add the class to a registry, from which Orbax instantiates it."""

    def __init__(self) -> None:
        self._context = get_context()

    async def save(self, directory: Any, checkpointable: Any) -> Awaitable[None]:
        """Copies the arrays to the host and returns an awaitable that writes them in the background. The tree may
        change after the copy."""
        leaves, arrays = trees.taken(checkpointable)
        are_arrays = {path for path, held in leaves if trees.tag_of(held)[0] == "array"}
        dtypes = {path: dtype for path, dtype in self._storage_dtypes(checkpointable).items() if path in are_arrays}
        copied = {path: _copied(path, leaf, dtypes.get(path)) for path, leaf in arrays.items()}
        for path, held in leaves:
            if path in are_arrays and copied[path].dtype != arrays[path].dtype:
                # An array converted to another dtype is not weakly typed.
                trees.saved_properties(held).pop("weak", None)
        return _save(directory, leaves, copied, structure_of(checkpointable))

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Awaitable[Any]:
        """Loads a tree with the structure of the template and its leaves in the requested form. Without a template,
        loads the tree as it was saved."""
        is_partial = bool(self._context.pytree_options.loading.partial_load)
        return asyncio.to_thread(_load, _store_in(directory), abstract_checkpointable, is_partial)

    async def metadata(self, directory: Any) -> Any:
        """Returns the saved tree with shapes and dtypes in place of arrays, and with plain values unchanged."""
        return await asyncio.to_thread(_metadata, _store_in(directory))

    def is_handleable(self, checkpointable: Any) -> bool:
        """Returns whether all leaves can be stored. Elements of arrays are not read."""
        try:
            trees.taken(checkpointable)
        except Error:
            return False
        return True

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        """Returns whether the value can be used as a template."""
        return is_template(abstract_checkpointable) or self.is_handleable(abstract_checkpointable)

    def _storage_dtypes(self, tree: Any) -> dict[str, Any]:
        """Returns the storage dtypes that the context requests, by path. An option for a single leaf overrides the
        option for all leaves."""
        saving = self._context.array_options.saving
        found = {}
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda each: each is None)[0]:
            scoped = saving.scoped_storage_options_creator
            options = [scoped(path, leaf) if scoped is not None else None, saving.storage_options]
            dtype = next((each.dtype for each in options if each is not None and each.dtype is not None), None)
            if dtype is not None:
                found[jax.tree_util.keystr(path)] = numpy.dtype(dtype)
        return found


async def _save(directory: Any, leaves: list[Any], arrays: dict[str, Any], structure: Any) -> None:
    made = await directory.await_creation()
    await asyncio.to_thread(trees.write, leaves, arrays, _store_in(made), note=None, name=None, durable=True,
                            structure=[structure])
    # `ocp.load` only loads a tree from a folder that contains this file.
    await asyncio.to_thread(durable_files.publish, Path(os.fspath(made), "_METADATA"), b'{"store": "remanent"}\n')


def _load(store: str, template: Any, is_partial: bool) -> Any:
    with View(store) as view:
        version = Version(view)
        if template is not None:
            return version.load_as(template, is_partial)
        return version.tree(trees.restore(store, progress=False))


def _metadata(store: str) -> Any:
    with View(store) as view:
        return Version(view).metadata()


def _copied(path: str, leaf: Any, dtype: Any) -> Any:
    """Returns a copy of an array's elements on the host, converted to `dtype`. The copy stays valid even if a later
    step donates the array."""
    array = trees.on_host(path, leaf)
    if dtype is not None and array.dtype != dtype:
        try:
            return array.astype(dtype)
        except (TypeError, ValueError) as error:
            raise RefusedError(f"{path}: elements of type {array.dtype} cannot be converted to the storage dtype {dtype}",
                               remedy="use another storage dtype") from error
    return array if array is not leaf and array.flags.owndata else array.copy()


def _store_in(directory: Any) -> str:
    return os.path.join(os.fspath(directory), _STORE)
