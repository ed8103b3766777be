"""The state of a training run as tensors and a tree of plain values."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from remanent import _native, _pages
from remanent._errors import RefusedError
from remanent._tensors import PLAIN_TYPES


def flatten_state(state: object, tensors: dict[str, torch.Tensor], *, of_rank: bool) -> str:
    """The state as text of JSON; its tensors go to `tensors`, by the paths at which they lie.

    :param of_rank: whether it is the state of one of several ranks: of a DTensor this rank's part is taken.
    """
    leaves = _pages.Leaves(PLAIN_TYPES, "tensor", tensors)
    # The parts of DTensors, and no gradients of them.
    with torch.no_grad():
        return _native.flatten("", state, _Capture(tensors, of_rank), leaves)


class _Capture:
    """Takes what is of torch or NumPy out of a state."""

    def __init__(self, tensors: dict[str, torch.Tensor], of_rank: bool) -> None:
        self.tensors = tensors
        self._of_rank = of_rank
        self._parts = parts_module()
        self._rank = self._parts.own_rank() if of_rank and self._parts is not None else 0

    def __call__(self, path: str, value: object) -> object | None:
        name = path[1:]
        parts = self._parts
        if parts is not None and isinstance(value, parts.DTensor):
            if not self._of_rank:
                raise RefusedError(f"{name}: the other parts of a DTensor are on other ranks",
                                   remedy="give the `process_group` of these ranks")
            self.tensors[name] = parts.local(value)
            return {"$": ["dtensor", name, parts.described(name, value, self._rank)]}
        if isinstance(value, torch.Tensor):
            self.tensors[name] = value
            return {"$": ["tensor", name]}
        if isinstance(value, torch.dtype):
            return {"$": ["dtype", str(value).removeprefix("torch.")]}
        if isinstance(value, torch.device):
            return {"$": ["device", str(value)]}
        if type(value) is torch.Size:
            return {"$": ["size", list(value)]}
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray):
            if value.dtype.hasobject or not value.dtype.isnative:
                raise RefusedError(f"{name}: an array of {value.dtype} cannot be stored")
            try:
                self.tensors[name] = torch.from_numpy(numpy.ascontiguousarray(value).reshape(value.shape))
            except TypeError as error:
                raise RefusedError(f"{name}: an array of {value.dtype} cannot be stored") from error
            return {"$": ["ndarray", name]}
        if numpy is not None and isinstance(value, (numpy.bool_, numpy.number)):
            # NumPy's float64 is a float of Python's, too; what it is comes back by its dtype.
            return {"$": ["scalar", str(value.dtype), _pages.flatten(path, value.item(), self)]}
        return None


def parts_module() -> Any:
    """`_parts`, once DTensors were imported; before there is none, and importing them takes a while."""
    if "torch.distributed.tensor" not in sys.modules:
        return None
    from remanent import _parts

    return _parts


def layouts_of(run: Mapping[str, Any]) -> Any:
    """How the DTensors of a run are divided now; None if there are none."""
    parts = parts_module()
    return None if parts is None else parts.Layouts(run)
