"""Saves and restores trees of JAX arrays durably: `save(tree, directory)` and `restore(directory, template)`.

Leaves can be arrays of one process (including sharded arrays whose shards are all in this process), random keys, NumPy
arrays and plain values. As in `remanent.torch`, versions are durable, only changed elements are logged, loads are
verified by checksums, and nothing is pickled. A leaf that cannot be stored is rejected by its path.
"""

from __future__ import annotations

import itertools
import json
import os
import warnings
from collections.abc import Iterator
from typing import Any, cast

import jax
import numpy

from remanent._state import page_tree
from remanent._store import _native
from remanent._store._native import ArrayLayout, Block
from remanent._store.errors import NoStateError, RefusedError
from remanent._util.progress import Bar
from remanent._versions.retention import KEEP_DEFAULT, KeptVersions

__all__ = ["restore", "save", "shapes"]

_Path = str | os.PathLike[str]


def __dir__() -> list[str]:
    return __all__


def _is_key(leaf: object) -> bool:
    return isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def check(path: str, leaf: Any) -> None:
    """Checks that an array can be stored and restored exactly, without reading its elements.

    :raises RefusedError: the array cannot be stored. The message names its path.
    """
    if isinstance(leaf, jax.core.Tracer):
        raise RefusedError(f"{path}: a traced value has no elements", remedy="save outside of jit, grad and vmap")
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            raise RefusedError(f"{path}: the array was deleted or donated", remedy="save the array that replaced it")
        if not leaf.is_fully_addressable:
            raise RefusedError(f"{path}: some shards of the array are in other processes",
                               remedy="save with Orbax and `remanent.integrations.orbax`, or gather the array first")
        if leaf.weak_type and leaf.dtype != _weak((), leaf.dtype).dtype:
            raise RefusedError(f"{path}: a weakly typed array of {leaf.dtype} cannot be restored",
                               remedy="save x.astype(x.dtype), which is not weakly typed")
    elif type(leaf) is not numpy.ndarray and not isinstance(leaf, numpy.generic):
        raise RefusedError(f"{path}: a {type(leaf).__name__} cannot be stored, because it has state in addition to its "
                           "elements", remedy="save numpy.asarray of it, and the additional state separately")
    if not isinstance(leaf, jax.Array) and (leaf.dtype.hasobject or not leaf.dtype.isnative):
        raise RefusedError(f"{path}: elements of type {leaf.dtype!r} cannot be stored",
                           remedy="convert the array to a numeric dtype in the machine's byte order")
    try:
        _native.dtype(str(leaf.dtype))
    except ValueError:
        raise RefusedError(f"{path}: elements of type {leaf.dtype} cannot be stored",
                           remedy="convert the array to a dtype that `remanent.Array` lists") from None


def on_host(path: str, leaf: Any) -> numpy.ndarray[Any, Any]:
    """Returns the elements of an array on the host, in row-major order.

    :raises RefusedError: the array cannot be stored. The message names its path.
    """
    check(path, leaf)
    # An explicit transfer, which a guard against implicit ones permits.
    array = numpy.asarray(jax.device_get(leaf) if isinstance(leaf, jax.Array) else leaf)
    return numpy.ascontiguousarray(array).reshape(array.shape)


def _weak(shape: tuple[int, ...], dtype: Any, elements: Any = None) -> jax.Array:
    """Returns a weakly typed array with these elements, or with zeros. JAX has weak types only for the types of Python
    scalars."""
    dtype = numpy.dtype(dtype)
    kind = {"i": int, "u": int, "f": float, "c": complex}.get(dtype.kind, float)
    # The caller's settings apply to its computations. This code only copies elements, which may be NaNs, over zeros
    # that come from the host.
    with (jax.transfer_guard("allow"), jax.debug_nans(False), jax.debug_infs(False),
          jax.enable_x64(dtype.itemsize // (2 if kind is complex else 1) == 8)):
        zeros = jax.lax.full(shape, kind(0))
        return zeros if elements is None else zeros.at[...].set(elements)


def _flatten(tree: Any) -> list[tuple[str, Any]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda each: each is None)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


def save(tree: Any, directory: _Path, *, note: str | None = None, name: str | None = None, durable: bool = True,
         keep: int | None = KEEP_DEFAULT, keep_for: float | None = None, keep_bytes: int | None = None,
         progress: bool | None = None) -> int:
    """Saves `tree` as the newest version in `directory`, completely or not at all, and returns the Lsn of the version.

    :param note: a remark of up to 64 KiB.
    :param name: a name of 1 to 64 bytes that keeps the version until `remanent.torch.prune` removes the name
        (`give_up`).
    :param durable: whether to return only after the version survives a power cut. If False, the call returns once the
        version survives the death of the process.
    :param keep: the number of newest versions to keep; None keeps all.
    :param keep_for: versions younger than this many seconds are also kept.
    :param keep_bytes: the disk space in bytes beyond which older versions are removed, as for
        `remanent.torch.save_file`.
    :param progress: False disables the progress bar. None shows it for long saves if standard error is a terminal and
        tqdm is installed.
    :raises RefusedError: a leaf cannot be stored. The message names its path. Nothing is saved.
    :raises LockedError: another process has the store open.

    >>> import jax, jax.numpy as jnp, remanent.jax
    >>> tree = {"w": jnp.arange(6.0).reshape(2, 3), "key": jax.random.key(7), "step": 3}
    >>> lsn = remanent.jax.save(tree, directory)
    >>> again = remanent.jax.restore(directory, tree)
    >>> bool((again["w"] == tree["w"]).all()), again["step"], bool(again["key"] == tree["key"])
    (True, 3, True)
    """
    leaves, arrays = taken(tree)
    for path, leaf in arrays.items():
        check(path, leaf)
    kept = KeptVersions(keep, keep_for, keep_bytes)
    return write(leaves, arrays, directory, note=note, name=name, durable=durable, kept=kept, progress=progress)


def taken(tree: Any) -> tuple[list[Any], dict[str, Any]]:
    """Returns the leaves of a tree by path as JSON, and the arrays among them by path."""
    held: list[Any] = []
    arrays: dict[str, Any] = {}
    seen: set[str] = set()
    # NumPy arrays are tracked by identity, because a tree can contain the same array several times.
    shared: dict[int, str] = {}
    for path, leaf in _flatten(tree):
        if path in seen:
            raise RefusedError(f"{path}: two leaves have this path", remedy="rename a key of the tree")
        seen.add(path)
        if isinstance(leaf, numpy.ndarray) and shared.setdefault(id(leaf), path) != path:
            held.append([path, {"$": ["same", shared[id(leaf)]]}])
        elif _is_key(leaf):
            arrays[path] = jax.random.key_data(leaf)
            held.append([path, {"$": ["key", str(jax.random.key_impl(leaf)), _properties(leaf)]}])
        elif isinstance(leaf, jax.Array):
            check(path, leaf)
            arrays[path] = leaf
            held.append([path, {"$": ["array", "jax", _properties(leaf)]}])
        elif isinstance(leaf, (numpy.ndarray, numpy.generic)):
            arrays[path] = leaf
            held.append([path, {"$": ["array", "scalar" if isinstance(leaf, numpy.generic) else "numpy"]}])
        else:
            held.append([path, page_tree.flatten(path, leaf, lambda path, value: None)])
    _refuse_overlaps({path: leaf for path, leaf in arrays.items() if isinstance(leaf, numpy.ndarray)})
    return held, arrays


def _refuse_overlaps(arrays: dict[str, numpy.ndarray[Any, Any]]) -> None:
    """Raises `RefusedError` for NumPy arrays that share part of their memory, because they would be restored
    separately."""
    bounds = sorted((*numpy.lib.array_utils.byte_bounds(array), path) for path, array in arrays.items() if array.size)
    for at, (_, end, path) in enumerate(bounds):
        for start, _, other in itertools.islice(bounds, at + 1, None):
            if start >= end:
                break
            if numpy.shares_memory(arrays[path], arrays[other]):
                raise RefusedError(f"{other}: the array shares a part of its memory with {path}",
                                   remedy="save copies, or the array of which both are views")


def _properties(leaf: Any) -> dict[str, Any]:
    """Returns the properties of an array on which a compiled function also depends: whether its type is weak, and the
    device to which it is committed."""
    found: dict[str, Any] = {}
    if not _is_key(leaf) and leaf.weak_type:
        found["weak"] = True
    if leaf.committed:
        devices = leaf.sharding.device_set
        found["on"] = _name_of(*devices) if len(devices) == 1 else str(leaf.sharding)
    return found


def _name_of(device: Any) -> str:
    return f"{device.platform}:{device.id}"


def write(leaves: list[Any], arrays: dict[str, Any], directory: _Path, *, note: str | None, name: str | None,
          durable: bool, kept: KeptVersions = KeptVersions(KEEP_DEFAULT), progress: bool | None = False,
          structure: Any = None) -> int:
    """Saves the result of `taken` as the newest version. `structure` is stored with it as JSON."""
    def blocks() -> Iterator[Block]:
        for path, leaf in arrays.items():
            array = on_host(path, leaf)
            kind = ArrayLayout(path, _native.dtype(str(array.dtype))[1], array.shape)
            yield Block((kind,), array.reshape(-1).view(numpy.uint8), array.nbytes)

    with Bar(sum(leaf.nbytes for leaf in arrays.values()), "saving", progress) as bar:
        tree = {"leaves": leaves} if structure is None else {"leaves": leaves, "structure": structure}
        return page_tree.save(directory, bar.counting(blocks()), json.dumps(tree), note=note, name=name,
                              durable=durable, kept=kept)


def read_tree(view: _native.View) -> tuple[dict[str, Any], dict[str, tuple[str, ArrayLayout]]]:
    """Returns the leaves of a version, and the page and layout of each of its arrays, by path."""
    manifest = page_tree.read_manifest(view)
    if not isinstance(manifest.tree, dict) or "leaves" not in manifest.tree:
        raise NoStateError("the store contains no JAX tree", remedy="load it with `remanent.torch`")
    where = {array.name: (key, array) for key, arrays in manifest.pages.items() for array in arrays}
    return dict(map(tuple, manifest.tree["leaves"])), where


def read_elements(view: _native.View, key: str, array: ArrayLayout) -> numpy.ndarray[Any, Any]:
    """Reads the elements of an array to the host and verifies their checksums."""
    elements = numpy.empty(array.shape, jax.numpy.dtype(_native.dtype(array.dtype)[0]))
    if elements.nbytes:
        view.read_into(key, elements.reshape(-1).view(numpy.uint8))
    return elements


def tag_of(held: Any) -> list[Any]:
    return held.get("$", [""]) if isinstance(held, dict) else [""]


def _is_array(held: Any) -> bool:
    return tag_of(held)[0] in ("array", "key")


def same_as(held: Any) -> str | None:
    """Returns the path of the leaf with which this leaf is identical, or None."""
    kind, *rest = tag_of(held)
    return rest[0] if kind == "same" else None


def saved_properties(held: Any) -> dict[str, Any]:
    """Returns the properties that `_properties` recorded for an array. The result is empty for older versions without
    them."""
    _, _, *rest = tag_of(held)
    return rest[0] if rest else {}


def shapes(directory: _Path, *, at: int | str | None = None) -> dict[str, Any]:
    """Returns the contents of a version by path: shapes and element types of arrays, and plain values unchanged. No
    array is read.

    For a random key, the shape and type are those of the key's data.

    :param at: the version, as for `restore`.
    :raises NoStateError: the version does not exist, or is not a tree of this module.
    :raises NoStoreError: `directory` contains no store.

    >>> import jax.numpy as jnp, remanent.jax
    >>> lsn = remanent.jax.save({"w": jnp.zeros((2, 3)), "step": 3}, directory)
    >>> remanent.jax.shapes(directory)
    {"['step']": 3, "['w']": ShapeDtypeStruct(shape=(2, 3), dtype=float32)}
    """
    with _native.View(directory, at) as view:
        held, where = read_tree(view)
    found = {}
    for path, leaf in held.items():
        if _is_array(leaf):
            _, array = where[path]
            kind: Any = jax.ShapeDtypeStruct
            found[path] = kind(array.shape, jax.numpy.dtype(_native.dtype(array.dtype)[0]),
                               weak_type=saved_properties(leaf).get("weak", False))
        elif (first := same_as(leaf)) is not None:
            found[path] = found[first]
        else:
            found[path] = page_tree.unflatten(leaf)
    return found


def restore(directory: _Path, template: Any = None, *, at: int | str | None = None,
            progress: bool | None = None) -> Any:
    """Loads a version of a tree. Each byte is verified by a checksum.

    :param template: a tree of the same structure, with arrays or `jax.ShapeDtypeStruct`s. Arrays get the template's
        shardings. An array is uncommitted where the template has an uncommitted array or no sharding. Without a
        template, the result is a dict from paths to leaves, and each array is committed to the device to which it was
        committed when it was saved.
    :param at: an Lsn, "lsn:N", "snapshot:N" or the name of a version; None loads the newest.
    :param progress: as for `save`.
    :raises NoStateError: the version does not exist, or does not match the template's leaves, shapes and element types.
    :raises NoStoreError: `directory` contains no store.
    :raises DamagedError: bytes on disk differ from the bytes that were written.

    Weakly typed arrays are restored as weakly typed, with or without a template. Without a template, an array that was
    sharded, or committed to a device that this process does not have, is restored uncommitted on the default device,
    and a `UserWarning` names the array.
    """
    with _native.View(directory, at) as view:
        held, where = read_tree(view)
        nbytes = sum(view.info(key).length for key, _ in where.values())
        unplaced: list[str] = []

        def load(path: str, like: Any) -> Any:
            if not _is_array(held[path]):
                return page_tree.unflatten(held[path])
            kind, of, *_ = held[path]["$"]
            elements = read_elements(view, *where[path])
            bar.add(elements.nbytes)
            if kind == "array":
                refuse_other_elements(path, elements.shape, elements.dtype, like)
                if of != "jax" and not isinstance(like, (jax.Array, jax.ShapeDtypeStruct)):
                    return elements[()] if of == "scalar" else elements
            properties = saved_properties(held[path])
            sharding = sharding_of(like) if like is not None else _device_of(properties.get("on"))
            if like is None and sharding is None and "on" in properties:
                unplaced.append(f"{path} ({properties['on']})")
            placed = placed_array(path, elements, properties.get("weak", False), None if kind == "key" else sharding)
            if kind == "key":
                placed = jax.random.wrap_key_data(placed, impl=of)
                refuse_other_elements(path, placed.shape, placed.dtype, like)
                return placed if sharding is None else jax.device_put(placed, sharding)
            return placed

        if template is None:
            with Bar(nbytes, "loading", progress) as bar:
                loaded = {path: load(path, None) for path in held if same_as(held[path]) is None}
            if unplaced:
                warnings.warn(f"arrays were restored to the default device instead of their previous one: "
                              f"{', '.join(unplaced)}; pass a template with shardings to place them", stacklevel=2)
            return {path: loaded[same_as(leaf) or path] for path, leaf in held.items()}
        paths = _flatten(template)
        if [path for path, _ in paths] != list(held):
            differ = sorted(held.keys() ^ {path for path, _ in paths})
            raise NoStateError(f"the version and the template differ in {', '.join(differ[:5])}",
                           remedy="use a template with the structure that `shapes` shows")
        with Bar(nbytes, "loading", progress) as bar:
            loaded = {path: load(path, like if hasattr(like, "dtype") else None)
                      for path, like in paths if same_as(held[path]) is None}
        structure = jax.tree_util.tree_structure(template, is_leaf=lambda each: each is None)
        return jax.tree_util.tree_unflatten(structure, [loaded[same_as(held[path]) or path] for path, _ in paths])


def refuse_other_elements(path: str, shape: tuple[int, ...], dtype: Any, like: Any) -> None:
    if like is not None and (tuple(like.shape), like.dtype) != (shape, dtype):
        own, other = f"{dtype}{list(shape)}", f"{like.dtype}{list(like.shape)}"
        raise NoStateError(f"{path}: the version has {own}, but the template has {other}",
                           remedy="use a template with the shapes and types that `shapes` shows")


def sharding_of(like: Any) -> Any:
    """Returns the sharding that a template requests, or None if it leaves the array uncommitted."""
    return None if isinstance(like, jax.Array) and not like.committed else getattr(like, "sharding", None)


def _device_of(name: str | None) -> Any:
    """Returns the device with this name, or None if this process does not have it."""
    platform = (name or "").partition(":")[0]
    try:
        return next((each for each in jax.devices(platform) if _name_of(each) == name), None) if platform else None
    except RuntimeError:
        return None


def placed_array(path: str, elements: numpy.ndarray[Any, Any], is_weak: bool, sharding: Any) -> jax.Array:
    """Returns a JAX array with these elements and the requested sharding. Raises `NoStateError` if JAX would change
    their type."""
    placed = jax.device_put(elements)
    if placed.dtype != elements.dtype:
        raise NoStateError(f"{path}: JAX would convert {elements.dtype} to {placed.dtype}",
                           remedy="enable jax_enable_x64, as when the version was saved")
    if is_weak:
        placed = _weak(elements.shape, elements.dtype, placed)
    return placed if sharding is None else cast(jax.Array, jax.device_put(placed, sharding))
