"""Separates the state of a training run into tensors and a tree of plain values."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from remanent._store import _native
from remanent._store.errors import RefusedError
from remanent._state import plain_values
from remanent._state import page_tree
from remanent._tensors import numpy_arrays


def flatten_state(state: object, tensors: dict[str, torch.Tensor], *, of_rank: bool) -> str:
    """Returns the state as JSON text and adds its tensors to `tensors`, by their paths.

    :param of_rank: whether the state belongs to one of several ranks. If True, this rank's part of each DTensor is
        added.
    """
    leaves = page_tree.Leaves(frozenset((torch.Tensor,)), "tensor", tensors, "requires_grad")
    # The local parts of DTensors must be taken without gradients.
    with torch.no_grad():
        capture = _Capture(tensors, of_rank)
        text = _native.flatten("", state, capture, leaves)
        capture.arrays.refuse_shared(tensors)
        return text


class _Capture:
    """Extracts torch and NumPy values from a state."""

    def __init__(self, tensors: dict[str, torch.Tensor], of_rank: bool) -> None:
        self.tensors = tensors
        self.arrays = numpy_arrays.Arrays()
        self._of_rank = of_rank
        self._parts = parts_module()
        self._rank = self._parts.own_rank() if of_rank and self._parts is not None else 0

    def __call__(self, path: str, value: object) -> object | None:
        name = path[1:]
        parts = self._parts
        if parts is not None and isinstance(value, parts.DTensor):
            if not self._of_rank:
                raise RefusedError(f"{name}: other ranks have parts of this DTensor",
                                   remedy="pass the `process_group` of these ranks to the checkpointer")
            self._take(name, parts.local(value))
            return {"$": ["dtensor", name, parts.described(name, value, self._rank)]}
        if isinstance(value, torch.Tensor):
            self._take(name, value)
            return {"$": ["tensor", name, type(value).__name__, value.requires_grad]}
        if isinstance(value, torch.dtype):
            return {"$": ["dtype", str(value).removeprefix("torch.")]}
        if isinstance(value, torch.device):
            return {"$": ["device", str(value)]}
        if type(value) is torch.Size:
            return {"$": ["size", list(value)]}
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray):
            tensor, tag_elements = self.arrays.taken(name, value)
            self._take(name, tensor)
            return {"$": ["ndarray", name, *tag_elements]}
        return None

    def _take(self, name: str, tensor: torch.Tensor) -> None:
        if name in self.tensors:
            raise RefusedError(f"{name}: another value has this path", remedy="rename a key of the state")
        self.tensors[name] = tensor


def made(tag: list[Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    """Returns the value that a tag of `flatten_state` represents, except for DTensors.

    :param tensors: the tensors by name, including those that contain arrays.
    :raises NoStateError: the tag was written by a later release.
    """
    kind, *rest = tag
    if kind == "tensor":
        return _typed(tensors[rest[0]], *rest[1:])
    if kind == "ndarray":
        return numpy_arrays.made(tensors[rest[0]], *rest[1:])
    if kind == "dtype":
        return getattr(torch, rest[0])
    if kind == "device":
        return torch.device(rest[0])
    if kind == "size":
        return torch.Size(rest[0])
    return plain_values.unknown(tag)


def _typed(tensor: torch.Tensor, kind: str | None = None, requires_grad: bool = False) -> torch.Tensor:
    """Returns the tensor, or a view of it, with the type and `requires_grad` that it had when it was saved."""
    wanted = torch.nn.Parameter if kind == "Parameter" else torch.Tensor
    if kind is None or type(tensor) is wanted and tensor.requires_grad == requires_grad:
        return tensor
    plain = tensor.detach()
    return torch.nn.Parameter(plain, requires_grad) if kind == "Parameter" else plain.requires_grad_(requires_grad)


def parts_module() -> Any:
    """Returns the module `dtensors` if the program has imported DTensors, else None. Importing DTensors takes a
    while."""
    if "torch.distributed.tensor" not in sys.modules:
        return None
    from remanent._tensors import dtensors

    return dtensors


def layouts_of(run: Mapping[str, Any]) -> Any:
    """Returns the layouts of a run's DTensors, or None if the program has not imported DTensors."""
    parts = parts_module()
    return None if parts is None else parts.Layouts(run)
