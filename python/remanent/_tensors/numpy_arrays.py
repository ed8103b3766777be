"""Converts NumPy arrays to tensors and back. The dtype, shape, memory order and overlaps are preserved.

An array without gaps is stored from its own memory, with its strides. An array with negative strides, or an array of
strings, is stored as a copy and restored in C order. Restored arrays are writable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from remanent._state.plain_values import numpy_dtype
from remanent._store.errors import RefusedError

# Element types that torch has under the same names.
_OF_TORCH = ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
_INTEGERS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "int64"}


class Arrays:
    """Converts the arrays of one state to tensors."""

    def __init__(self) -> None:
        # The memory of arrays that are stored as copies, as start and end addresses.
        self._copied: dict[str, tuple[int, int]] = {}

    def taken(self, name: str, array: Any) -> tuple[torch.Tensor, list[Any]]:
        """Returns the array as a tensor, and the elements of its tag that follow the name.

        :raises RefusedError: the array could not be restored exactly.
        """
        import numpy

        kind, dtype = type(array), array.dtype
        if kind is not numpy.ndarray:
            raise RefusedError(f"{name}: a {kind.__module__}.{kind.__name__} cannot be stored, because it has state in "
                               "addition to its elements", remedy="store numpy.asarray of it, and the mask of a masked "
                               "array")
        said = _said(name, dtype)
        owner = _owner(array)
        tensor = None if owner is None or dtype.kind in "SU" else _in_place(array, owner)
        if tensor is None:
            if array.nbytes:
                self._copied[name] = _bounds(array)
            tensor = _in_place(copied := _as_numbers(array), copied)
            assert tensor is not None
        if said and said[0] in _OF_TORCH:
            tensor = tensor.view(getattr(torch, said[0]))
        return tensor, said

    def refuse_shared(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises `RefusedError` if an array that is stored as a copy shares memory with another value, because the
        sharing would be lost.

        :param tensors: all tensors of the state, including those that contain arrays.
        """
        if not self._copied:
            return
        others = [(*_extent(tensor), name) for name, tensor in tensors.items()
                  if name not in self._copied and _has_memory(tensor)]
        # The highest end address so far, with the name: among the copied arrays, and among all values.
        copied_end = any_end = (0, "")
        for start, end, name in sorted([*((*bounds, name) for name, bounds in self._copied.items()), *others]):
            reached, other = any_end if name in self._copied else copied_end
            if start < reached:
                raise RefusedError(f"{name}: the array shares memory with {other}, and one of the two is stored as a copy "
                                   "because of its strings, negative strides or gaps", remedy="store array.copy()")
            any_end = max(any_end, (end, name))
            if name in self._copied:
                copied_end = max(copied_end, (end, name))


def _bounds(array: Any) -> tuple[int, int]:
    """Returns the addresses of an array's first byte and of the end of its last byte."""
    steps = [(length - 1) * step for length, step in zip(array.shape, array.strides, strict=True)]
    start = array.__array_interface__["data"][0]
    return (start + sum(step for step in steps if step < 0),
            start + sum(step for step in steps if step > 0) + array.itemsize)


def _has_memory(tensor: torch.Tensor) -> bool:
    return (tensor.layout is torch.strided and tensor.device.type == "cpu" and tensor.numel() > 0
            and type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_nested
            and not torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    steps = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (steps + 1) * tensor.itemsize


def made(tensor: torch.Tensor, name: str | None = None) -> Any:
    """Returns the array for a tensor and the tag elements that `Arrays.taken` returned."""
    if name is None:
        return tensor.numpy()
    dtype = numpy_dtype(name)
    if tensor.dtype is getattr(torch, name, None):
        tensor = tensor.view(getattr(torch, _INTEGERS[tensor.itemsize]))
    array = tensor.numpy()
    if dtype.kind in "SU":
        return array.view(dtype)[..., 0]
    return array.view(dtype)


def _said(name: str, dtype: Any) -> list[Any]:
    """Returns the name of a dtype for which torch has no type, in a list. The list is empty for other dtypes."""
    reason = None
    if dtype.type.__module__ == "ml_dtypes":
        return [dtype.name]
    if dtype.hasobject or dtype.kind == "T":
        reason = "its elements are objects"
    elif not dtype.isnative:
        reason = "its byte order is not that of this machine"
    elif dtype.char in "gG":
        reason = "its bits depend on the platform"
    elif not dtype.itemsize:
        reason = "its elements have no bytes"
    elif dtype.kind == "V":
        reason = "its elements are structures"
    if reason is not None:
        raise RefusedError(f"{name}: an array of {dtype} cannot be stored, because {reason}",
                           remedy="convert it to arrays of plain numbers")
    return [dtype.str] if dtype.kind in "mMSU" else []


def _as_numbers(array: Any) -> Any:
    """Returns a copy in C order. For an array of strings, the copy has an additional dimension with their bytes."""
    import numpy

    copied = numpy.array(array, order="C", copy=True)
    if array.dtype.kind not in "SU":
        return copied
    shape = (*array.shape, array.dtype.itemsize)
    return copied.reshape(-1).view(numpy.uint8).reshape(shape)


def _owner(array: Any) -> Any:
    """Returns the array that owns the memory of `array`, or None if the owner's memory has gaps."""
    import numpy

    owner = array
    while isinstance(owner.base, numpy.ndarray):
        owner = owner.base
    owner = numpy.asarray(owner)
    return owner if (owner.flags.c_contiguous or owner.flags.f_contiguous) and not owner.dtype.hasobject else None


def _in_place(array: Any, owner: Any) -> torch.Tensor | None:
    """Returns a tensor over the array's memory, whose storage spans the owner. Returns None if that is not possible."""
    import numpy

    kind = _kind(array.dtype)
    if not array.nbytes:
        return torch.empty(array.shape, dtype=kind, device="cpu")
    offset = array.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
    steps = [divmod(step, array.itemsize) for step in array.strides]
    if offset % array.itemsize or any(rest or step < 0 for step, rest in steps):
        return None
    flat = (owner if owner.flags.c_contiguous else owner.T).reshape(-1).view(numpy.uint8)
    whole = torch.from_numpy(flat if flat.flags.writeable else numpy.asarray(_Writable(flat)))
    return torch.empty(0, dtype=kind, device="cpu").set_(whole.untyped_storage(), offset // array.itemsize, array.shape,
                                           [step for step, _ in steps])


class _Writable:
    """Wraps an array so that torch does not warn about read-only memory. The memory is not written."""

    def __init__(self, array: Any) -> None:
        self._array = array
        held = array.__array_interface__
        self.__array_interface__ = {**held, "data": (held["data"][0], False)}


def _kind(dtype: Any) -> torch.dtype:
    """Returns the torch element type whose elements have the same bits."""
    if dtype.kind in "mM" or dtype.type.__module__ == "ml_dtypes":
        found: torch.dtype = getattr(torch, _INTEGERS[dtype.itemsize])
    else:
        found = getattr(torch, dtype.name)
    return found
