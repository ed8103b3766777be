"""Collects the objects of a training run that have a state, and finds the devices of their tensors."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from remanent._state.run_state import parts_module
from remanent._store import _native
from remanent._store._native import Extent
from remanent._store.errors import InvalidError, RefusedError
from remanent._tensors.conversion import PLAIN_TYPES


def parts_of(model: Any, optimizer: Any, scheduler: Any, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the objects that have a state, by their names in a version."""
    parts: dict[str, Any] = {}
    for name, part in (("model", model), ("optimizer", optimizer), ("scheduler", scheduler)):
        if part is not None:
            parts[name] = part
    for name, part in extra.items():
        if name in parts or name == "rng":
            raise InvalidError(f"extra: {name!r} is the name of another part", remedy="use another name")
        parts[name] = part
    for name, part in parts.items():
        has_state = hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
        if not (has_state or isinstance(part, MutableMapping)):
            kind = type(part).__name__
            raise RefusedError(f"{name}: a {kind} is neither a dict nor has state_dict and load_state_dict")
    return parts


def device_of(model: Any) -> torch.device:
    """Returns the device of the model's first parameter on a GPU, or the host if there is none."""
    parameters = model.parameters() if hasattr(model, "parameters") else ()
    return next((each.device for each in parameters if each.is_cuda), torch.device("cpu"))


def refuse_overlap(optimizer: Any) -> None:
    """Raises `InvalidError` if the steps of `optimizer` cannot be intercepted."""
    if not hasattr(optimizer, "register_step_pre_hook"):
        raise InvalidError("overlap: the optimizer has no register_step_pre_hook, so its steps cannot wait for copies",
                           remedy="use a torch optimizer, or save without overlap")
    if any(group.get("capturable") for group in optimizer.param_groups):
        raise InvalidError("overlap: steps of a capturable optimizer may be replayed from a CUDA graph, which does not "
                           "wait for copies", remedy="save without overlap")


def stepped(optimizer: Any, tensors: list[Extent]) -> tuple[list[Extent], list[Extent]]:
    """Divides tensors into those that only `optimizer.step` changes and all others.

    A tensor that shares a storage with a tensor of the second list is also in the second list.
    """
    if optimizer is None:
        return [], tensors
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for state in optimizer.state.values():
        own += [value for value in state.values() if isinstance(value, torch.Tensor)]
    parts = parts_module()
    if parts is not None:
        with torch.no_grad():
            own = [tensor if type(tensor) in PLAIN_TYPES else parts.local(tensor) for tensor in own]
    return _native.extents_within(tensors, [tensor for tensor in own if tensor.layout is torch.strided])


class TrainedNames:
    """The names of the tensors that are equal on all replicas: the parameters of the model and the state of the
    optimizer. Buffers, such as the statistics of a BatchNorm, may differ, and so may the values in `extra`."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        model = parts.get("model")
        buffers = model.named_buffers(remove_duplicate=False) if isinstance(model, torch.nn.Module) else ()
        self._buffers = {f"model/{_native.segment(name)}" for name, _ in buffers}

    def __contains__(self, name: str) -> bool:
        return name.startswith(("model/", "optimizer/")) and name not in self._buffers
