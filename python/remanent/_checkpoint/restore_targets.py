"""Finds the tensors of a run into whose memory a restore can read pages directly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch

from remanent._state import page_tree
from remanent._state.modules import Described, LiveModule, is_lazy, refuse_misfit, renamed
from remanent._state.optimizers import apart, in_order, loads_as_torch_does, refuse_other_groups
from remanent._state.page_tree import Arrays
from remanent._state.plain_values import encode_or_leave
from remanent._state.run_state import parts_module
from remanent._store._native import ArrayLayout
from remanent._tensors.conversion import PLAIN_TYPES, SHORT, is_cuda


class _Place(NamedTuple):
    """The location of a tensor without gaps between its elements: the address of its storage, the offset and length in
    bytes."""

    device: torch.device
    base: int
    start: int
    nbytes: int

    @property
    def address(self) -> int:
        return self.base + self.start


class Targets:
    """The tensors of a run's parts, by their names in a version.

    Only tensors of dicts and of parts that torch's own code loads are included. A module or optimizer with its own load
    method or hook may omit or convert values.

    :param of_rank: whether the run is one of several ranks. If True, a DTensor is represented by this rank's part.
    """

    def __init__(self, parts: Mapping[str, Any], *, of_rank: bool) -> None:
        # A DTensor is represented by its local part.
        self.tensors: dict[str, torch.Tensor] = {}
        self.wholes: dict[str, Any] = {}
        #: The modules among the parts, in their current state.
        self.modules: dict[str, LiveModule] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        # The parameters of optimizers whose states torch loads, by their numbers in a version.
        self._parameters: dict[str, dict[int, torch.Tensor]] = {}
        # Whether the calling thread is in inference mode. Another thread verifies the version.
        self._is_in_inference = torch.is_inference_mode_enabled()
        self._others: list[torch.Tensor] = []
        self._places: dict[str, _Place] = {}
        self._together: dict[str, set[str]] = {}
        for name, part in parts.items():
            found = _Found(of_rank)
            try:
                found.look(name, part)
            except Exception:
                # The part may have no state before its first load, or one that could not be saved.
                continue
            finally:
                if found.module is not None:
                    self.modules[name] = found.module
                if isinstance(part, torch.optim.Optimizer):
                    self.optimizers[name] = part
            self.tensors |= found.tensors
            self.wholes |= found.wholes
            self._others += found.others
            if isinstance(part, torch.optim.Optimizer) and loads_as_torch_does(part):
                self._parameters[name] = dict(enumerate(in_order(part)))

    def fit(self, outline: Mapping[str, Any], *, cast: bool) -> dict[str, dict[str, str]]:
        """Checks that a version fits the run, and renames the tensors to the version's names.

        :param outline: the version's state, with `Described` in place of tensors.
        :param cast: whether a model's element types may differ from the version's.
        :returns: for each module, a dict from names in the version to names in the model.
        :raises InvalidError: the version does not fit the run. Nothing changed.
        """
        names: dict[str, dict[str, str]] = {}
        for part, module in self.modules.items():
            saved = outline.get(part)
            if isinstance(saved, Mapping):
                names[part] = renamed(module, saved)
                state = {names[part][name]: value for name, value in saved.items()}
                refuse_misfit(part, module, state, cast=cast, in_inference=self._is_in_inference)
                self._rename({array.array: page_tree.path_of(part, names[part][name]) for name, array in saved.items()
                              if isinstance(array, Described) and names[part][name] != name})
        for part, optimizer in self.optimizers.items():
            saved = outline.get(part)
            if isinstance(saved, Mapping) and "param_groups" in saved:
                numbers = refuse_other_groups(part, optimizer, saved["param_groups"])
                if part in self._parameters and not _are_same(numbers, self._parameters[part]):
                    # The version numbers the parameters in another order, so names of the version do not match the
                    # run's tensors. These values are read separately and copied into the tensors.
                    self._parameters[part] = numbers
                    self._leave_out(f"{page_tree.segment(part)}/")
        self._places = {name: place for name, tensor in self.tensors.items() if (place := _place(tensor)) is not None}
        self._together = _overlapping(self.tensors, self._others)
        return names

    def _rename(self, names: Mapping[str, str]) -> None:
        """Renames tensors. `names` maps the names in a version to the current names."""
        held = [(then, self.tensors.pop(now, None), self.wholes.pop(now, None)) for then, now in names.items()]
        for then, tensor, whole in held:
            if tensor is not None:
                self.tensors[then] = tensor
            if whole is not None:
                self.wholes[then] = whole

    def _leave_out(self, prefix: str) -> None:
        self._others += [tensor for name, tensor in self.tensors.items() if name.startswith(prefix)]
        self.tensors = {name: tensor for name, tensor in self.tensors.items() if not name.startswith(prefix)}
        self.wholes = {name: whole for name, whole in self.wholes.items() if not name.startswith(prefix)}

    def devices(self) -> set[torch.device]:
        """Returns the CUDA devices of the run's tensors and of its optimizers' parameters."""
        parameters = [parameter for of_part in self._parameters.values() for parameter in of_part.values()]
        return {tensor.device for tensor in [*self.tensors.values(), *parameters] if is_cuda(tensor.device)}

    def home(self, names: list[str]) -> torch.device:
        """Returns the GPU on which the run has all tensors in `names`, or on which an optimizer creates them at its
        first step. Returns the host if there is no such GPU."""
        devices = {self._home(name) for name in names}
        return devices.pop() if len(devices) == 1 else torch.device("cpu")

    def _home(self, name: str) -> torch.device:
        device = torch.device("cpu")
        if name in self.tensors:
            device = self.tensors[name].device
        elif (parameter := self._parameter(name)) is not None:
            device = parameter.device
        return device if is_cuda(device) else torch.device("cpu")

    def _parameter(self, name: str) -> torch.Tensor | None:
        """Returns the parameter to which the optimizer state `name` belongs, or None."""
        for part, parameters in self._parameters.items():
            prefix = f"{page_tree.segment(part)}/state/"
            if name.startswith(prefix):
                number, _, key = name[len(prefix) :].partition("/")
                return parameters.get(int(number)) if number.isdecimal() and key != "step" else None
        return None

    def memory_of(self, pages: Mapping[str, Arrays], lengths: Mapping[str, int],
                  names: set[str]) -> dict[str, torch.Tensor]:
        """Returns the memory into which a page of a version can be read unchanged, for each page with such memory.

        All arrays of such a page are tensors of the run with the same shapes, element types and strides, and at the
        same relative locations as in the page. Each byte of the page belongs to one of these tensors, and no other
        tensor of the run overlaps them.

        :param names: the arrays that are tensors in the version and may be tensors of the run.
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
    """Collects the tensors of one part."""

    def __init__(self, of_rank: bool) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.wholes: dict[str, Any] = {}
        self.module: LiveModule | None = None
        # The tensors that are not written in place.
        self.others: list[torch.Tensor] = []
        self._of_rank = of_rank
        self._parts = parts_module()

    def look(self, name: str, part: Any) -> None:
        state: Any = None
        if isinstance(part, MutableMapping):
            state = dict(part)
        elif isinstance(part, torch.optim.Optimizer):
            state = {"state": part.state_dict()["state"]} if loads_as_torch_does(part) else None
        elif isinstance(part, torch.nn.Module):
            self.module = LiveModule(part)
            state = {key: value for key, value in self.module.state.items()
                     if not (self.module.loads_itself(key) or self.module.is_extra(key))}
        with torch.no_grad():
            if state is not None:
                page_tree.flatten("", {name: state}, self._adapt, page_tree.Leaves(PLAIN_TYPES, "tensor", self.tensors))
            if self.module is not None:
                objects = {key: self._local(each) for key, each in self.module.objects.items() if not is_lazy(each)}
                own = {_storage(tensor) for tensor in objects.values() if tensor.layout is torch.strided}
                # Exclude tensors that a hook of the module created for the state, such as copies.
                self._keep({name for name, tensor in self.tensors.items() if _storage(tensor) in own})
                self.others = [tensor for key, tensor in objects.items()
                               if self.module.loads_itself(key) or key not in self.module.state]
        if isinstance(part, torch.optim.Optimizer):
            # A tensor that shares memory with another of its tensors is restored by the optimizer's own load.
            self._keep(apart(self.tensors, [*self.tensors.values(), *in_order(part)]))

    def _keep(self, names: set[str]) -> None:
        self.tensors = {name: tensor for name, tensor in self.tensors.items() if name in names}
        self.wholes = {name: whole for name, whole in self.wholes.items() if name in names}

    def _adapt(self, path: str, value: object) -> object:
        if self._parts is not None and isinstance(value, self._parts.DTensor) and self._of_rank:
            self.tensors[path[1:]], self.wholes[path[1:]] = self._local(value), value
            return {}
        # The result does not matter: this JSON is discarded.
        return encode_or_leave(path, value)

    def _local(self, tensor: torch.Tensor) -> torch.Tensor:
        local: torch.Tensor = tensor if self._parts is None else self._parts.local(tensor)
        return local


def _are_same(numbers: Mapping[int, torch.Tensor], others: Mapping[int, torch.Tensor]) -> bool:
    return numbers.keys() == others.keys() and all(others[at] is tensor for at, tensor in numbers.items())


def _storage(tensor: torch.Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _place(tensor: torch.Tensor) -> _Place | None:
    """Returns the location of a tensor's bytes if they have no gaps and the store can write them, else None."""
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
    """Returns the bytes from the first element to the end of the last one."""
    last = sum(step * (length - 1) for step, length in zip(tensor.stride(), tensor.shape, strict=True))
    return (last + 1) * tensor.itemsize


def _is_alike(tensor: torch.Tensor, array: ArrayLayout) -> bool:
    """Returns whether a tensor has the element type, shape and order of elements of an array in a page."""
    if SHORT[tensor.dtype] != array.dtype or tuple(tensor.shape) != array.shape:
        return False
    stride = page_tree.contiguous_stride(array.shape) if array.stride is None else array.stride
    return all(length == 1 or step == other
               for length, step, other in zip(array.shape, tensor.stride(), stride, strict=True))


def _overlapping(tensors: Mapping[str, torch.Tensor], others: Iterable[torch.Tensor]) -> dict[str, set[str]]:
    """Returns, for each name, the names of all tensors that share memory with that tensor, directly or through other
    tensors. Each set includes the tensor's own name. Tensors in `others` have the empty name."""
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
