"""The tensors that a run has as a restore begins, and which pages of a version can go straight into their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch

from remanent import _pages
from remanent._optimizer_state import apart, loads_as_torch_does
from remanent._native import ArrayLayout
from remanent._pages import Arrays
from remanent._run_state import parts_module
from remanent._tensors import PLAIN_TYPES, SHORT, is_cuda

_Module = torch.nn.Module


class _Place(NamedTuple):
    """Where a tensor's elements lie, without gaps between them: in which storage, from which byte on."""

    device: torch.device
    base: int
    start: int
    nbytes: int

    @property
    def address(self) -> int:
        return self.base + self.start


class Targets:
    """The tensors of a run's parts, by the names that they have in a version.

    Those of parts whose loads are torch's own, and of dicts. A module or an optimizer that does something else with a
    state, or has a hook that does, may leave values out or make others of them: its tensors are none of these.

    :param of_rank: whether the run is one of several ranks: of a DTensor the part of this rank counts.
    """

    def __init__(self, parts: Mapping[str, Any], *, of_rank: bool) -> None:
        # A DTensor's local part stands for it.
        self.tensors: dict[str, torch.Tensor] = {}
        self.wholes: dict[str, Any] = {}
        # Of optimizers whose states torch loads: their parameters, in the order of the states' numbers.
        self._parameters: dict[str, list[torch.Tensor]] = {}
        # What torch holds a state against, as it loads it: those of modules, and of optimizers the lengths of groups.
        self.module_states: dict[str, Mapping[str, Any]] = {}
        self.group_sizes: dict[str, list[int]] = {}
        # Modules with a hook after the load, which may forgive names that are missing, or too many.
        self.forgiving: set[str] = set()
        # As the thread has it that restores, and not one that proves.
        self.is_in_inference = torch.is_inference_mode_enabled()
        others: list[torch.Tensor] = []
        for name, part in parts.items():
            found = _Found(of_rank)
            try:
                found.look(name, part)
            except Exception:
                # It may have no state before its first load, or one that could not be saved.
                continue
            self.tensors |= found.tensors
            self.wholes |= found.wholes
            others += found.others
            if isinstance(part, torch.optim.Optimizer) and loads_as_torch_does(part):
                self._parameters[name] = _in_order(part)
                self.group_sizes[name] = [len(group["params"]) for group in part.param_groups]
            elif isinstance(part, _Module) and found.state is not None:
                self.module_states[name] = found.state
                if any(module._load_state_dict_post_hooks for module in part.modules()):
                    self.forgiving.add(name)
        self._places = {name: place for name, tensor in self.tensors.items() if (place := _place(tensor)) is not None}
        self._together = _overlapping(self.tensors, others)

    def devices(self) -> set[torch.device]:
        """The GPUs of CUDA's on which the run has tensors, or will have some."""
        parameters = [parameter for of_part in self._parameters.values() for parameter in of_part]
        return {tensor.device for tensor in [*self.tensors.values(), *parameters] if is_cuda(tensor.device)}

    def home(self, names: list[str]) -> torch.device:
        """Where the tensors of a page live, or will: on the GPU where the run has all of them, or beside the parameter
        whose state an optimizer makes in its first step. Else on the host.
        """
        devices = {self._home(name) for name in names}
        return devices.pop() if len(devices) == 1 else torch.device("cpu")

    def _home(self, name: str) -> torch.device:
        part, _, rest = name.partition("/state/")
        number, _, key = rest.partition("/")
        parameters = self._parameters.get(part, [])
        device = torch.device("cpu")
        if name in self.tensors:
            device = self.tensors[name].device
        elif number.isdecimal() and int(number) < len(parameters) and key != "step":
            device = parameters[int(number)].device
        return device if is_cuda(device) else torch.device("cpu")

    def memory_of(self, pages: Mapping[str, Arrays], lengths: Mapping[str, int],
                  names: set[str]) -> dict[str, torch.Tensor]:
        """The memory that takes a page as it is, for each page of a version that has such.

        All arrays of such a page are tensors of the run, of their shapes, kinds and strides, and lie to each other as
        in the page; no byte of it is anything else's, and no other tensor of the run has any of it.

        :param names: the arrays that stand for tensors in the version, and may do so in the run.
        """
        found = {}
        for key, arrays in pages.items():
            memory = self._memory(arrays, lengths[key], names)
            if memory is not None:
                found[key] = memory
        return found

    def _memory(self, arrays: Arrays, length: int, names: set[str]) -> torch.Tensor | None:
        reached, begin = 0, None
        together: set[str] = set()
        for array in sorted(arrays, key=lambda array: array.offset):
            tensor, place = self.tensors.get(array.name), self._places.get(array.name)
            if tensor is None or place is None or array.name not in names or not _is_alike(tensor, array):
                return None
            together |= self._together[array.name]
            at = place._replace(start=place.start - array.offset, nbytes=length)
            if array.offset > reached or begin not in (None, at):
                return None
            reached, begin = max(reached, array.offset + place.nbytes), at
        if begin is None or reached != length or begin.start < 0 or together - {array.name for array in arrays}:
            return None
        with torch.no_grad():
            memory = torch.empty(0, dtype=torch.uint8, device=begin.device)
            return memory.set_(self.tensors[arrays[0].name].untyped_storage(), begin.start, (length,), (1,))


class _Found:
    """The tensors of one part."""

    def __init__(self, of_rank: bool) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.wholes: dict[str, Any] = {}
        # None where it has a load of its own.
        self.state: Any = None
        # The tensors of such a module.
        self.others: list[torch.Tensor] = []
        self._of_rank = of_rank
        self._parts = parts_module()

    def look(self, name: str, part: Any) -> None:
        self.state, own = _state_and_own(part)
        if self.state is None:
            with torch.no_grad():
                self.others = [self._local(tensor) for tensor in own or ()]
            return
        with torch.no_grad():
            _pages.flatten("", {name: self.state}, self._adapt, _pages.Leaves(PLAIN_TYPES, "tensor", self.tensors))
            # What a module's hook made for its state, as a copy, is not the module's.
            storages = None if own is None else {_storage(self._local(tensor)) for tensor in own}
        if storages is not None:
            self.tensors = {name: tensor for name, tensor in self.tensors.items() if _storage(tensor) in storages}
            self.wholes = {name: whole for name, whole in self.wholes.items() if name in self.tensors}
        if isinstance(part, torch.optim.Optimizer):
            # What shares memory with another one of its tensors is put back by the optimizer's own load.
            alone = apart(self.tensors, [*self.tensors.values(), *_in_order(part)])
            self.tensors = {name: tensor for name, tensor in self.tensors.items() if name in alone}
            self.wholes = {name: whole for name, whole in self.wholes.items() if name in alone}

    def _adapt(self, path: str, value: object) -> object:
        if self._parts is not None and isinstance(value, self._parts.DTensor) and self._of_rank:
            self.tensors[path[1:]], self.wholes[path[1:]] = self._local(value), value
        # Whatever it is: of this JSON nothing is kept.
        return None if isinstance(value, (dict, list, tuple)) else {}

    def _local(self, tensor: torch.Tensor) -> torch.Tensor:
        local: torch.Tensor = tensor if self._parts is None else self._parts.local(tensor)
        return local


def _state_and_own(part: Any) -> tuple[Any, Iterable[torch.Tensor] | None]:
    """The state of a part that may be written where it is, None if it may not; and the tensors that a module has."""
    if isinstance(part, MutableMapping):
        return dict(part), None
    if isinstance(part, torch.optim.Optimizer):
        return ({"state": part.state_dict()["state"]}, None) if loads_as_torch_does(part) else (None, None)
    if isinstance(part, _Module):
        return part.state_dict() if module_loads_as_torch_does(part) else None, [*part.parameters(), *part.buffers()]
    return None, None


def module_loads_as_torch_does(module: torch.nn.Module) -> bool:
    """Whether a module takes each value of a state as it is, by its name."""
    return type(module).load_state_dict is _Module.load_state_dict and all(map(_takes_values, module.modules()))


def _takes_values(module: torch.nn.Module) -> bool:
    hooks = [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]
    return all(map(_is_of_torch, [type(module)._load_from_state_dict, *hooks]))


def _is_of_torch(function: Callable[..., Any]) -> bool:
    return (getattr(function, "__module__", None) or type(function).__module__).split(".")[0] == "torch"


def _in_order(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Its parameters, each once, as they are numbered in its state."""
    return list(dict.fromkeys(parameter for group in optimizer.param_groups for parameter in group["params"]))


def _storage(tensor: torch.Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _place(tensor: torch.Tensor) -> _Place | None:
    """Where all bytes of a tensor lie that the store can write; None if they do not lie so, or elsewhere."""
    if (tensor.layout is not torch.strided or tensor.is_meta or tensor.dtype not in SHORT or tensor.is_conj()
            or tensor.is_neg() or tensor.is_inference() or tensor.is_nested):
        return None
    if not (tensor.device.type == "cpu" or is_cuda(tensor.device)):
        return None
    storage, nbytes = tensor.untyped_storage(), tensor.nbytes
    start = int(tensor.storage_offset()) * tensor.itemsize
    if nbytes == 0 or start + nbytes > storage.nbytes() or _span(tensor) != nbytes:
        return None
    return _Place(tensor.device, storage.data_ptr(), start, nbytes)


def _span(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last one."""
    last = sum(step * (length - 1) for step, length in zip(tensor.stride(), tensor.shape, strict=True))
    return (last + 1) * tensor.itemsize


def _is_alike(tensor: torch.Tensor, array: ArrayLayout) -> bool:
    """Whether the elements lie in the order in which the page has them."""
    if SHORT[tensor.dtype] != array.dtype or tuple(tensor.shape) != array.shape:
        return False
    stride = _pages.contiguous_stride(array.shape) if array.stride is None else array.stride
    return all(length == 1 or step == other
               for length, step, other in zip(array.shape, tensor.stride(), stride, strict=True))


def _overlapping(tensors: Mapping[str, torch.Tensor], others: Iterable[torch.Tensor]) -> dict[str, set[str]]:
    """For each tensor the names of those with which it shares memory, directly or over others; its own is one.
    Tensors without a name have the empty one."""
    ranges = []
    for name, tensor in [*tensors.items(), *(("", tensor) for tensor in others)]:
        start = tensor.data_ptr() if tensor.numel() and not tensor.is_meta and tensor.layout is torch.strided else 0
        ranges.append((str(tensor.device), start, start + _span(tensor) if start else 0, name))
    found: dict[str, set[str]] = {}
    group: set[str] = set()
    last, reached = "", 0
    for device, start, end, name in sorted(ranges):
        if not group or device != last or start >= reached:
            group, last, reached = set(), device, 0
        group.add(name)
        reached = max(reached, end)
        found[name] = group
    return found
