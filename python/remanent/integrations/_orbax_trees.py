"""Converts the structure of Orbax trees to JSON and back, and loads the leaves that a template requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy

from remanent import jax as trees
from remanent._state import page_tree
from remanent._store import _native
from remanent._store.errors import NoStateError

__all__ = ["ArrayMetadata", "Version", "is_template", "structure_of"]

# The structure of a version that was saved without one.
_UNKNOWN = object()
# The types to which a template can convert a number or text.
_SCALARS = (bool, int, float, str)


@dataclasses.dataclass(frozen=True)
class ArrayMetadata:
    """The shape and dtype of a NumPy array. As a leaf of a template, this class requests a NumPy array."""

    shape: tuple[int, ...]
    dtype: numpy.dtype[Any]


def structure_of(tree: Any) -> Any:
    """Returns the structure of a tree as JSON, with None in place of each leaf."""
    kind = type(tree)
    children = _children(tree)
    if children is None:
        return None
    if kind in (list, tuple):
        return [kind.__name__, [structure_of(child) for _, child in children]]
    # For other kinds of nodes, only the names of their parts are kept, and no code.
    return ["dict", [[page_tree.flatten("", _name(key), lambda path, value: None), structure_of(child)]
                     for key, child in children]]


def _children(tree: Any) -> list[tuple[Any, Any]] | None:
    """Returns the children of a node with their keys, or None for a leaf."""
    if tree is None:
        return None
    found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda each: each is not tree)[0]
    if len(found) == 1 and found[0][0] == ():
        return None
    return [(path[0], child) for path, child in found]


def _name(key: Any) -> Any:
    """Returns the name of a node's child: a dict key, an index or a field name."""
    return next(getattr(key, field) for field in ("key", "idx", "name") if hasattr(key, field))


def _names(path: Any) -> tuple[str, ...]:
    return tuple(str(_name(key)) for key in path)


def _built(structure: Any, leaves: Callable[[tuple[str, ...]], Any], at: tuple[str, ...] = ()) -> Any:
    """Builds a tree with the given structure. `leaves` returns the leaf for the names that lead to it."""
    if structure is None:
        return leaves(at)
    kind, parts = structure
    if kind == "dict":
        named = [(page_tree.unflatten(name), part) for name, part in parts]
        return {name: _built(part, leaves, (*at, str(name))) for name, part in named}
    built = [_built(part, leaves, (*at, str(number))) for number, part in enumerate(parts)]
    return tuple(built) if kind == "tuple" else built


def _leaf_names(structure: Any, at: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Returns the names that lead to each leaf, in the order of the leaves."""
    if structure is None:
        return [at]
    kind, parts = structure
    if kind == "dict":
        parts = [(page_tree.unflatten(name), part) for name, part in parts]
    else:
        parts = list(enumerate(parts))
    return [found for name, part in parts for found in _leaf_names(part, (*at, str(name)))]


def is_template(tree: Any) -> bool:
    """Returns whether each leaf states what to load: a value, an array, a shape and dtype, a type or a placeholder."""
    return all(leaf is None or leaf is ... or isinstance(leaf, (type, *_SCALARS))
               or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))
               for leaf in jax.tree_util.tree_leaves(tree, is_leaf=lambda each: each is None))


class Version:
    """A version of a tree in a store. Loads the leaves that templates request."""

    def __init__(self, view: _native.View) -> None:
        self._view = view
        self._held, self._where = trees.read_tree(view)
        tree = page_tree.read_manifest(view).tree
        # Versions without a structure have their leaves only by path.
        (self._structure,) = tree.get("structure", [_UNKNOWN])
        names = [] if self._structure is _UNKNOWN else _leaf_names(self._structure)
        # If the names of two leaves are equal as text, leaves can only be found by path.
        is_clear = len(set(names)) == len(names) == len(self._held)
        self._paths = dict(zip(names, self._held, strict=True)) if is_clear else {}
        # Loaded NumPy arrays by path and dtype, so that leaves that were saved as one array are loaded as one array.
        self._loaded: dict[tuple[str, Any], Any] = {}

    def metadata(self) -> Any:
        """Returns the tree with shapes and dtypes in place of arrays, and with plain values unchanged. The result can
        be used as a template that loads the version."""
        return self.tree({path: self._abstract(path) for path in self._held})

    def tree(self, leaves: Mapping[str, Any]) -> Any:
        """Returns the tree with these leaves, which are given by path. Nodes other than dicts, lists and tuples become
        dicts."""
        if self._structure is _UNKNOWN:
            return dict(leaves)
        if not self._paths:
            found = iter(leaves.values())
            return _built(self._structure, lambda names: next(found))
        return _built(self._structure, lambda names: leaves[self._paths[names]])

    def _source(self, path: str) -> str:
        return trees.same_as(self._held[path]) or path

    def _abstract(self, path: str) -> Any:
        path = self._source(path)
        tag = trees.tag_of(self._held[path])
        if tag[0] not in ("array", "key"):
            return page_tree.unflatten(self._held[path])
        _, array = self._where[path]
        shape, dtype = array.shape, jax.numpy.dtype(_native.dtype(array.dtype)[0])
        abstract: Any = jax.ShapeDtypeStruct
        if tag[0] == "key":
            return jax.eval_shape(lambda data: jax.random.wrap_key_data(data, impl=tag[1]),
                                  abstract(shape, dtype))
        return abstract(shape, dtype) if tag[1] == "jax" else ArrayMetadata(tuple(shape), dtype)

    def load_as(self, template: Any, is_partial: bool) -> Any:
        """Returns a tree with the structure of `template`, and each leaf loaded in the form that the template requests.

        :param is_partial: whether the template may omit leaves of the version.
        :raises NoStateError: the version does not contain a leaf of the template, or cannot be converted to the
            requested form.
        """
        leaves, structure = jax.tree_util.tree_flatten_with_path(template, is_leaf=lambda each: each is None)
        found = {jax.tree_util.keystr(path): self._path_of(path) for path, _ in leaves}
        missing = sorted(path for path, own in found.items() if own is None)
        omitted = sorted(set(self._held) - set(found.values()))
        if missing or (omitted and not is_partial):
            parts = [f"the version does not contain {', '.join(missing[:5])}"] if missing else []
            parts += [f"the template omits {', '.join(omitted[:5])}"] if omitted and not is_partial else []
            raise NoStateError(f"the version and the template differ: {'; '.join(parts)}",
                               remedy="load what `checkpointables_metadata` shows, or set `partial_load` to omit leaves")
        loaded = [self._leaf(found[jax.tree_util.keystr(path)], like) for path, like in leaves]
        return jax.tree_util.tree_unflatten(structure, loaded)

    def _path_of(self, path: Any) -> str | None:
        exact = jax.tree_util.keystr(path)
        return exact if exact in self._held else self._paths.get(_names(path))

    def _leaf(self, path: Any, like: Any) -> Any:
        """Returns one leaf in the form that `like`, a leaf of the template, requests."""
        if like is ...:
            return like
        source = self._source(path)
        tag = trees.tag_of(self._held[source])
        is_array = tag[0] in ("array", "key")
        if like is None:
            return self._as_saved(source)
        kind = like if isinstance(like, type) else type(like)
        if issubclass(kind, _SCALARS):
            return self._scalar(path, source, kind)
        is_jax = issubclass(kind, (jax.Array, jax.ShapeDtypeStruct)) or hasattr(like, "sharding")
        if not is_array and not isinstance(page_tree.unflatten(self._held[source]), (int, float)):
            raise NoStateError(f"{path}: the version has a plain value, not an array",
                               remedy="omit the leaf, or use the value's type in the template")
        if tag[0] == "key":
            return self._key(path, source, tag, like)
        if not isinstance(like, type):
            self._check_shape(path, source, tuple(like.shape))
        dtype = None if isinstance(like, type) else like.dtype
        if not is_jax:
            elements = self._loaded.get((source, dtype))
            if elements is None:
                elements = self._loaded[source, dtype] = self._elements(path, source, dtype)
            return elements[()] if issubclass(kind, numpy.generic) else elements
        is_weak = dtype is None and trees.saved_properties(self._held[source]).get("weak", False)
        return trees.placed_array(path, self._elements(path, source, dtype), is_weak or getattr(like, "weak_type", False),
                            None if isinstance(like, type) else trees.sharding_of(like))

    def _as_saved(self, source: str) -> Any:
        tag = trees.tag_of(self._held[source])
        if tag[0] == "key":
            return self._key(source, source, tag, None)
        if tag[0] != "array":
            return page_tree.unflatten(self._held[source])
        elements = self._elements(source, source, None)
        if tag[1] == "jax":
            return trees.placed_array(source, elements, trees.saved_properties(self._held[source]).get("weak", False), None)
        return elements[()] if tag[1] == "scalar" else elements

    def _key(self, path: str, source: str, tag: list[Any], like: Any) -> Any:
        key = jax.random.wrap_key_data(self._elements(path, source, None), impl=tag[1])
        if like is not None and not isinstance(like, type):
            trees.refuse_other_elements(path, key.shape, key.dtype, like)
        sharding = None if like is None or isinstance(like, type) else trees.sharding_of(like)
        return key if sharding is None else jax.device_put(key, sharding)

    def _check_shape(self, path: str, source: str, asked: tuple[int, ...]) -> None:
        has = tuple(self._where[source][1].shape) if source in self._where else ()
        if has != asked:
            raise NoStateError(f"{path}: the version has shape {list(has)}, but the template has shape {list(asked)}",
                               remedy="use the shape that `checkpointables_metadata` shows")

    def _elements(self, path: str, source: str, dtype: Any) -> Any:
        """Returns the elements of an array, or a number as an array, converted to `dtype` if that is not None."""
        if source in self._where:
            key, array = self._where[source]
            elements = trees.read_elements(self._view, key, array)
        else:
            elements = numpy.asarray(page_tree.unflatten(self._held[source]))
        if dtype is None or elements.dtype == dtype:
            return elements
        try:
            return elements.astype(dtype)
        except (TypeError, ValueError) as error:
            raise NoStateError(f"{path}: elements of type {elements.dtype} cannot be converted to {dtype}",
                               remedy=f"use {elements.dtype} in the template") from error

    def _scalar(self, path: str, source: str, kind: Any) -> Any:
        """Returns a number or text, converted to the Python type `kind`."""
        value = self._as_saved(source)
        if isinstance(value, (jax.Array, numpy.ndarray, numpy.generic)) and not value.shape:
            value = value.item()
        if not isinstance(value, _SCALARS):
            raise NoStateError(f"{path}: the template requests {kind.__name__}, but the version has {_described(value)}",
                               remedy="use the type that `checkpointables_metadata` shows")
        try:
            return value if type(value) is kind else kind(value)
        except ValueError as error:
            raise NoStateError(f"{path}: {value!r} cannot be converted to {kind.__name__}",
                               remedy="use the type that `checkpointables_metadata` shows") from error


def _described(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if hasattr(value, "shape") else f"a {type(value).__name__}"

