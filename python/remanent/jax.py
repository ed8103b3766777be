"""Trees of JAX's arrays that survive: `save(tree, directory)` and `restore(directory, template)`.

Leaves are arrays of one process (sharded ones too, if all their shards are here), keys of random numbers, NumPy's
arrays and plain values. As in `remanent.torch`: durable, in versions, only changed elements logged, proven on the way
back, nothing pickled, and what cannot be stored refused by its path.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import jax
import numpy

from remanent import _native, _pages
from remanent._errors import NoStateError, RefusedError
from remanent._native import ArrayLayout, Block
from remanent._progress import Bar

__all__ = ["restore", "save", "shapes"]

_Path = str | os.PathLike[str]


def _is_key(leaf: object) -> bool:
    return isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def on_host(path: str, leaf: Any) -> numpy.ndarray[Any, Any]:
    """A leaf's elements on the host."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise RefusedError(f"{path}: not all shards of the array are in this process")
    array = numpy.asarray(leaf)
    if array.dtype.hasobject or not array.dtype.isnative:
        raise RefusedError(f"{path}: elements of {array.dtype} cannot be stored")
    try:
        _native.dtype(str(array.dtype))
    except ValueError:
        raise RefusedError(f"{path}: elements of {array.dtype} cannot be stored") from None
    return numpy.ascontiguousarray(array).reshape(array.shape)


def _flatten(tree: Any) -> list[tuple[str, Any]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda each: each is None)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


def save(tree: Any, directory: _Path, *, note: str | None = None, name: str | None = None, durable: bool = True,
         progress: bool | None = None) -> int:
    """Makes `tree` the newest version in `directory`, whole or not at all; returns its Lsn.

    :param note: a remark of up to 64 KiB. :param name: keeps the version until it is given up; 1 to 64 bytes.
    :param durable: whether the call returns once the version survives a power cut, or only the death of the process.
    :param progress: False draws no bar; None draws one for long work if standard error is a terminal and tqdm is
        installed.
    :raises RefusedError: for a leaf that cannot be stored, by its path. Nothing is saved. LockedError.

    >>> import jax, jax.numpy as jnp, remanent.jax
    >>> tree = {"w": jnp.arange(6.0).reshape(2, 3), "key": jax.random.key(7), "step": 3}
    >>> lsn = remanent.jax.save(tree, directory)
    >>> again = remanent.jax.restore(directory, tree)
    >>> bool((again["w"] == tree["w"]).all()), again["step"], bool(again["key"] == tree["key"])
    (True, 3, True)
    """
    leaves, arrays = taken(tree)
    for path, leaf in arrays.items():
        on_host(path, leaf)
    return write(leaves, arrays, directory, note=note, name=name, durable=durable, progress=progress)


def taken(tree: Any) -> tuple[list[Any], dict[str, Any]]:
    """A tree as it is stored: its leaves by path, and those of them that are arrays."""
    held: list[Any] = []
    arrays: dict[str, Any] = {}
    seen: set[str] = set()
    for path, leaf in _flatten(tree):
        if path in seen:
            raise RefusedError(f"{path}: two leaves have this path")
        seen.add(path)
        if _is_key(leaf):
            arrays[path] = jax.random.key_data(leaf)
            held.append([path, {"$": ["key", str(jax.random.key_impl(leaf))]}])
        elif isinstance(leaf, (jax.Array, numpy.ndarray, numpy.generic)):
            arrays[path] = leaf
            held.append([path, {"$": ["array", "jax" if isinstance(leaf, jax.Array) else "numpy"]}])
        else:
            held.append([path, _pages.flatten(path, leaf, lambda path, value: None)])
    return held, arrays


def write(leaves: list[Any], arrays: dict[str, Any], directory: _Path, *, note: str | None, name: str | None,
          durable: bool, progress: bool | None = False) -> int:
    """Makes what `taken` gave the newest version."""
    def blocks() -> Iterator[Block]:
        for path, leaf in arrays.items():
            array = on_host(path, leaf)
            kind = ArrayLayout(path, _native.dtype(str(array.dtype))[1], array.shape)
            yield Block((kind,), array.reshape(-1).view(numpy.uint8), array.nbytes)

    with Bar(sum(leaf.nbytes for leaf in arrays.values()), "saving", progress) as bar:
        return _pages.save(directory, bar.counting(blocks()), json.dumps({"leaves": leaves}), note=note,
                           name=name, durable=durable)


def _read_tree(view: _native.View) -> tuple[dict[str, Any], dict[str, tuple[str, ArrayLayout]]]:
    """The leaves that a version holds, and where its arrays lie: by path."""
    manifest = _pages.read_manifest(view)
    if not isinstance(manifest.tree, dict) or "leaves" not in manifest.tree:
        raise NoStateError("the store holds no tree of JAX's", remedy="use `remanent.torch`")
    where = {array.name: (key, array) for key, arrays in manifest.pages.items() for array in arrays}
    return dict(map(tuple, manifest.tree["leaves"])), where


def _is_array(held: Any) -> bool:
    return isinstance(held, dict) and held.get("$", [""])[0] in ("array", "key")


def shapes(directory: _Path, *, at: int | str | None = None) -> dict[str, Any]:
    """What a version holds, by path: shapes and types of arrays, and plain values themselves. No array is read.

    Of a key of random numbers, those of its data. `at` and errors are those of `restore`.

    >>> import jax.numpy as jnp, remanent.jax
    >>> lsn = remanent.jax.save({"w": jnp.zeros((2, 3)), "step": 3}, directory)
    >>> remanent.jax.shapes(directory)
    {"['step']": 3, "['w']": ShapeDtypeStruct(shape=(2, 3), dtype=float32)}
    """
    with _native.View(directory, at) as view:
        held, where = _read_tree(view)
    found = {}
    for path, leaf in held.items():
        if _is_array(leaf):
            _, array = where[path]
            kind: Any = jax.ShapeDtypeStruct
            found[path] = kind(array.shape, jax.numpy.dtype(_native.dtype(array.dtype)[0]))
        else:
            found[path] = _pages.unflatten(leaf, lambda tag: None)
    return found


def restore(directory: _Path, template: Any = None, *, at: int | str | None = None,
            progress: bool | None = None) -> Any:
    """A version of a tree, each byte proven by checksums.

    :param template: a tree of the same structure, of arrays or `jax.ShapeDtypeStruct`s: arrays are put where its own
        lie, by their shardings. Without one, a dict from paths to leaves, arrays on the default device.
    :param at: an Lsn, "lsn:N", "snapshot:N" or "name:S"; the newest version if None.
    :param progress: as for `save`.
    :raises NoStateError: the version is not kept, or has not the template's leaves, shapes and kinds of elements.
    """
    with _native.View(directory, at) as view:
        held, where = _read_tree(view)
        nbytes = sum(view.info(key).length for key, _ in where.values())

        def load(path: str, like: Any) -> Any:
            if not _is_array(held[path]):
                return _pages.unflatten(held[path], lambda tag: None)
            kind, of = held[path]["$"]
            key, array = where[path]
            dtype = jax.numpy.dtype(_native.dtype(array.dtype)[0])
            elements = numpy.empty(array.shape, dtype)
            if elements.nbytes:
                view.read_into(key, elements.reshape(-1).view(numpy.uint8))
                bar.add(elements.nbytes)
            if kind == "key":
                return jax.random.wrap_key_data(jax.numpy.asarray(elements), impl=of)
            if like is not None and (tuple(like.shape), like.dtype) != (array.shape, dtype):
                own, other = f"{dtype}{list(array.shape)}", f"{like.dtype}{list(like.shape)}"
                raise NoStateError(f"{path}: the version has {own}, the template {other}")
            if of == "numpy" and not isinstance(like, (jax.Array, jax.ShapeDtypeStruct)):
                return elements
            placed = jax.device_put(elements, getattr(like, "sharding", None))
            if placed.dtype != dtype:
                raise NoStateError(f"{path}: this JAX makes {placed.dtype} of {dtype}",
                                   remedy="switch jax_enable_x64 on, as when it was saved")
            return placed

        if template is None:
            with Bar(nbytes, "loading", progress) as bar:
                return {path: load(path, None) for path in held}
        paths = _flatten(template)
        if [path for path, _ in paths] != list(held):
            differ = sorted(held.keys() ^ {path for path, _ in paths})
            raise NoStateError(f"the version and the template differ in {', '.join(differ[:5])}")
        with Bar(nbytes, "loading", progress) as bar:
            leaves = [load(path, like if hasattr(like, "dtype") and not _is_key(like) else None)
                      for path, like in paths]
        structure = jax.tree_util.tree_structure(template, is_leaf=lambda each: each is None)
        return jax.tree_util.tree_unflatten(structure, leaves)
