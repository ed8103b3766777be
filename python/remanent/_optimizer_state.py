"""The state of an optimizer, put back into the tensors that it has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import torch

from remanent._run_state import parts_module
from remanent._tensors import PLAIN_TYPES


@torch.no_grad()
def loaded_in_place(optimizer: Any, state: Any) -> Any:
    """The state for `load_state_dict`, with the optimizer's own tensors in it, which have got the values.

    `load_state_dict` takes a tensor of the right kind and place as it is, so no memory is taken for another one, and a
    graph of CUDA finds the state where it was. That is so of torch's own; an optimizer with one of its own gets the
    state as it was loaded, and so do tensors of other shapes or kinds, and those that share memory with any others, in
    the optimizer or in the version.
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or "state" not in state:
        return state
    if not loads_as_torch_does(optimizer):
        return state
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    ids = [number for group in state["param_groups"] for number in group["params"]]
    if len(own) != len(ids):
        # It will say so.
        return state
    live = dict(_tensors((number, optimizer.state.get(parameter)) for number, parameter in zip(ids, own, strict=True)))
    loaded = dict(_tensors(state["state"].items()))
    # Those that are the optimizer's own have their values already.
    pairs = {key: (live[key], tensor) for key, tensor in loaded.items()
             if key in live and live[key] is not tensor and _is_alike(live[key], tensor)}
    taken = apart({key: pair[0] for key, pair in pairs.items()}, [*live.values(), *own])
    taken &= apart({key: pair[1] for key, pair in pairs.items()}, list(loaded.values()))
    held = {number: dict(values) if isinstance(values, dict) else values for number, values in state["state"].items()}
    for number, name in taken:
        target, source = pairs[number, name]
        _local(target).copy_(_local(source))
        held[number][name] = target
    return {**state, "state": held}


def loads_as_torch_does(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer takes each value of a state as it is: it has neither a load of its own nor a hook before
    that, which may see what there is."""
    is_own = type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
    return is_own and not getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None)


_Key = tuple[Any, Any]
_K = TypeVar("_K")


def _tensors(states: Any) -> Iterator[tuple[_Key, torch.Tensor]]:
    """The tensors of parameters' states: by the parameter's number, and the tensor's name."""
    for number, values in states:
        for name, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, torch.Tensor) and _is_strided(value):
                yield (number, name), value


def _is_strided(tensor: torch.Tensor) -> bool:
    parts = parts_module()
    if parts is not None and isinstance(tensor, parts.DTensor):
        tensor = parts.local(tensor)
    return type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided and not tensor.is_meta


def _is_alike(live: torch.Tensor, loaded: torch.Tensor) -> bool:
    """Whether a tensor can hold another one's elements as that one would."""
    parts = parts_module()
    if parts is not None and isinstance(live, parts.DTensor) | isinstance(loaded, parts.DTensor):
        if type(live) is not type(loaded):
            return False
        divided: Any = live, loaded
        if len({(each.device_mesh, each.placements, each.shape) for each in divided}) > 1:
            return False
        live, loaded = map(parts.local, divided)
    # What is expanded has one place for several elements.
    has_places = all(step for step, length in zip(live.stride(), live.shape, strict=True) if length > 1)
    is_there = not live.numel() or live.untyped_storage().nbytes() > 0
    return live.shape == loaded.shape and live.dtype == loaded.dtype and has_places and is_there and (
        not live.is_inference())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    parts = parts_module()
    held: torch.Tensor = tensor if parts is None else parts.local(tensor)
    return held


def apart(tensors: dict[_K, torch.Tensor], all_tensors: list[torch.Tensor]) -> set[_K]:
    """Those of the tensors that share no memory with another one of all."""
    shared: set[int] = set()
    # The one that reaches furthest, of those that were looked at.
    last: tuple[torch.device, int] | None = None
    reaching = -1
    for device, start, end, number in sorted(map(_addresses, all_tensors, range(len(all_tensors))), key=_order):
        if last is not None and device == last[0] and start < last[1]:
            shared |= {number, reaching}
        if last is None or device != last[0] or end > last[1]:
            last, reaching = (device, end), number
    numbers = {id(tensor): number for number, tensor in enumerate(all_tensors)}
    return {key for key, tensor in tensors.items() if numbers[id(tensor)] not in shared}


def _addresses(tensor: torch.Tensor, number: int) -> tuple[torch.device, int, int, int]:
    """The memory between a tensor's first and last element, and which one it is."""
    local = _local(tensor)
    if not local.numel() or not _is_strided(local):
        return local.device, 0, 0, number
    steps = sum(step * (length - 1) for step, length in zip(local.stride(), local.shape, strict=True))
    return local.device, local.data_ptr(), local.data_ptr() + (steps + 1) * local.itemsize, number


def _order(addresses: tuple[torch.device, int, int, int]) -> tuple[str, int]:
    return str(addresses[0]), addresses[1]
