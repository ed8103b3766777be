"""Restores the state of an optimizer as it was saved, where possible into the tensors that the optimizer already
has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.utils import _pytree

from remanent._state.run_state import parts_module
from remanent._store.errors import InvalidError
from remanent._tensors.conversion import PLAIN_TYPES

_Optimizer = torch.optim.Optimizer
_AS_RUN_HAD_IT = "create the optimizer as it was when the version was saved"


def loads_as_torch_does(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer loads each value of a state unchanged. An optimizer does so if it has neither its
    own `load_state_dict` nor a pre-hook, which may inspect the current state."""
    return _has_load_of_torch(optimizer) and not getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None)


def _has_load_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).load_state_dict is _Optimizer.load_state_dict


def in_order(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Returns the parameters of an optimizer, each once, in the order in which its state numbers them."""
    return list(dict.fromkeys(parameter for group in optimizer.param_groups for parameter in group["params"]))


_Group = Mapping[str, Any]
_Pairs = list[tuple[dict[str, Any], _Group]]


def refuse_other_groups(part: str, optimizer: torch.optim.Optimizer, saved: Sequence[_Group]) -> dict[int, torch.Tensor]:
    """Checks that a version's parameter groups fit the optimizer, and returns the optimizer's parameters by their
    numbers in the version.

    If the optimizer has its own load method, only the names of parameters and their order are checked. If the optimizer
    has a pre-hook, nothing is checked. The result is empty in both cases.

    :raises InvalidError: the parameters differ. Nothing changed.
    """
    if loads_as_torch_does(optimizer):
        return _numbers(_paired(part, optimizer.param_groups, saved))
    if getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None):
        return {}
    now, then = (_names(groups) for groups in (optimizer.param_groups, saved))
    if now is not None and then is not None and now != then:
        raise InvalidError(f"{part}: the version's parameter groups are {then}, but those of the optimizer are {now}, "
                           f"and {type(optimizer).__name__} has its own load_state_dict", remedy=_AS_RUN_HAD_IT)
    return {}


def _names(groups: Sequence[_Group]) -> list[list[str]] | None:
    """Returns the names of parameters by group, or None if a parameter has no name or two have the same name."""
    names = [list(group["param_names"]) for group in groups if group.get("param_names") is not None]
    every = [name for of_group in names for name in of_group]
    return names if len(names) == len(groups) and len(set(every)) == len(every) else None


def _paired(part: str, groups: list[dict[str, Any]], saved: Sequence[_Group]) -> _Pairs:
    """Pairs each group with the version's group of the same parameters. The parameters are matched by name if both
    sides have names, and otherwise in order."""
    sizes, saved_sizes = ([len(group["params"]) for group in each] for each in (groups, saved))
    now, then = _names(groups), _names(saved)
    if now is not None and then is not None and now != then:
        held = {frozenset(names): group for names, group in zip(then, saved, strict=True)}
        if len(held) != len(saved) or {frozenset(names) for names in now} != held.keys():
            raise InvalidError(f"{part}: the version's parameter groups are {then}, but those of the optimizer are {now}",
                               remedy=_AS_RUN_HAD_IT)
        return [(group, held[frozenset(names)]) for names, group in zip(now, groups, strict=True)]
    if sizes != saved_sizes:
        raise InvalidError(f"{part}: the version's parameter groups have {saved_sizes} parameters, but those of the "
                           f"optimizer have {sizes}", remedy=_AS_RUN_HAD_IT)
    return list(zip(groups, saved, strict=True))


def _numbers(pairs: _Pairs) -> dict[int, torch.Tensor]:
    """Returns the optimizer's parameters by their numbers in the version."""
    found: dict[int, torch.Tensor] = {}
    for group, saved in pairs:
        names, saved_names = group.get("param_names"), saved.get("param_names")
        numbers = saved["params"]
        if names is not None and saved_names is not None and names != saved_names:
            by_name = dict(zip(saved_names, saved["params"], strict=True))
            # Groups with repeated names are paired in order, and so are their parameters.
            if by_name.keys() == set(names) and len(by_name) == len(names):
                numbers = [by_name[name] for name in names]
        found.update(zip(numbers, group["params"], strict=True))
    return found


class OptimizerLoad:
    """The load of a state into a torch optimizer. The constructor checks that the load will succeed.

    `Optimizer.load_state_dict` casts a state to the type of its parameter. This class instead restores each value as it
    was saved. If the optimizer already has a tensor of the same type and shape, the value is copied into that tensor,
    so that no additional memory is needed and CUDA graphs remain valid. Tensors of other shapes or types, and tensors
    that share memory with others, are replaced. Hooks and `__setstate__` run as in `load_state_dict`. The
    `load_state_dict` of an optimizer that has its own is called, and values that it cast are then restored as they were
    saved.

    :param cast: whether to cast states to the types of their parameters, as `Optimizer.load_state_dict` does.
    :raises InvalidError: the version has other parameter groups. Nothing changed.
    """

    def __init__(self, part: str, optimizer: torch.optim.Optimizer, state: dict[str, Any], *, cast: bool) -> None:
        self._optimizer, self._cast = optimizer, cast
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._before = {"state": optimizer.state, "param_groups": optimizer.param_groups}
        self._given = state
        self._state: dict[Any, Any] = {}
        self._groups: list[dict[str, Any]] = []
        self._has_own_load = not _has_load_of_torch(optimizer) or "param_groups" not in state
        if self._has_own_load:
            return
        state = dict(state)
        for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
            adapted = hook(optimizer, state)
            state = state if adapted is None else adapted
        pairs = _paired(part, optimizer.param_groups, state["param_groups"])
        numbers = _numbers(pairs)
        held = self._in_place(state["state"], numbers) if loads_as_torch_does(optimizer) else state["state"]
        options = {number: saved for _, saved in pairs for number in saved["params"]}
        self._state = defaultdict(dict)
        for number, values in held.items():
            is_parameter = isinstance(number, int) and number in numbers
            self._state[numbers[number] if is_parameter else number] = (
                self._placed(numbers[number], values, options[number], number) if is_parameter else values)
        stays = self._options_that_stay(pairs)
        self._groups = [self._group(at, *pair, stays) for at, pair in enumerate(pairs)]

    def _in_place(self, state: Mapping[Any, Any], numbers: Mapping[int, torch.Tensor]) -> dict[Any, Any]:
        """Returns the version's state with the optimizer's own tensors in place of those whose values can be copied."""
        own = list(numbers.values())
        live = dict(_tensors((number, self._optimizer.state.get(parameter)) for number, parameter in numbers.items()))
        loaded = dict(_tensors(state.items()))
        # Tensors that are already the optimizer's own get their values from the version's files.
        pairs = {key: (live[key], tensor) for key, tensor in loaded.items()
                 if key in live and live[key] is not tensor and _is_alike(live[key], tensor)}
        taken = apart({key: pair[0] for key, pair in pairs.items()}, [*live.values(), *own])
        taken &= apart({key: pair[1] for key, pair in pairs.items()}, list(loaded.values()))
        held = {number: dict(values) if type(values) is dict else values for number, values in state.items()}
        for number, name in taken:
            self._copies.append(pairs[number, name])
            held[number][name] = pairs[number, name][0]
        return held

    def _placed(self, parameter: torch.Tensor, values: Any, group: _Group, number: int) -> Any:
        """Returns a parameter's state on the devices on which the optimizer keeps that state."""
        live = self._optimizer.state.get(parameter)
        live = live if isinstance(live, Mapping) else {}
        stays = not (group.get("capturable") or group.get("fused"))

        def place(path: Any, tensor: torch.Tensor) -> torch.Tensor:
            name = path[0].key if path and isinstance(path[0], _pytree.MappingKey) else None
            there: object = live.get(name) if len(path) == 1 else None
            if there is tensor:
                return tensor
            if self._cast:
                return _Optimizer._process_value_according_to_param_policy(
                    parameter, tensor, number, self._given["param_groups"], name)
            if isinstance(there, torch.Tensor) and not there.is_meta:
                return tensor.to(there.device)
            return tensor if name == "step" and stays else tensor.to(parameter.device)

        if not self._cast and not live and parameter.device.type == "cpu":
            return values
        return _pytree.tree_map_with_path(
            lambda path, value: place(path, value) if isinstance(value, torch.Tensor) else value, values)

    def _options_that_stay(self, pairs: _Pairs) -> set[tuple[int, str]]:
        """Returns the tensors among the groups' options into which the version's values can be copied."""
        live = {(at, name): value for at, (group, _) in enumerate(pairs) for name, value in group.items()
                if isinstance(value, torch.Tensor) and _is_strided(value)}
        loaded = {(at, name): value for at, (_, saved) in enumerate(pairs) for name, value in saved.items()
                  if isinstance(value, torch.Tensor) and _is_strided(value)}
        alike = {key for key in live.keys() & loaded.keys()
                 if _is_alike(live[key], loaded[key]) and not live[key].requires_grad}
        every = [*live.values(), *in_order(self._optimizer)]
        stays = apart({key: live[key] for key in alike}, every)
        stays &= apart({key: loaded[key] for key in alike}, list(loaded.values()))
        self._copies += [(live[key], loaded[key]) for key in stays]
        return stays

    def _group(self, at: int, group: dict[str, Any], saved: _Group, stays: set[tuple[int, str]]) -> dict[str, Any]:
        """Returns a parameter group of the optimizer with the version's options."""
        made = {}
        for name, value in saved.items():
            own = group.get(name)
            if (at, name) in stays:
                value = own
            elif isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor):
                value = value.to(own.device)
            made[name] = value
        made["params"] = group["params"]
        names, saved_names = group.get("param_names"), made.get("param_names")
        if names is not None and (saved_names is None or sorted(saved_names) == sorted(names)):
            made["param_names"] = names
        return made

    def load(self) -> None:
        """Loads the state. Bytes must already have been read into the optimizer's own tensors."""
        optimizer = self._optimizer
        if self._has_own_load:
            optimizer.load_state_dict(self._given)
            if not self._cast and "param_groups" in self._given:
                self._put_back_what_was_cast()
            return
        with torch.no_grad():
            for target, source in self._copies:
                _local(target).copy_(_local(source))
        optimizer.__setstate__({"state": self._state, "param_groups": self._groups})
        for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
            hook(optimizer)

    def undo(self) -> None:
        """Restores the previous state and groups of the optimizer. Values that were copied into its tensors remain."""
        self._optimizer.__dict__.update(self._before)

    def _put_back_what_was_cast(self) -> None:
        """Restores the saved values of tensors that torch cast to other types when the optimizer loaded them."""
        ids = [number for group in self._given["param_groups"] for number in group["params"]]
        own = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        for number, parameter in zip(ids, own, strict=False):
            values = self._given["state"].get(number)
            held = self._optimizer.state.get(parameter)
            if isinstance(values, dict) and isinstance(held, dict):
                _uncast(values, held)


def _uncast(saved: Any, now: Any) -> Any:
    """Returns `now` with each tensor replaced by the saved one if it is the result of torch's cast of that tensor."""
    if isinstance(saved, torch.Tensor) and isinstance(now, torch.Tensor):
        is_cast = saved.dtype != now.dtype and saved.shape == now.shape and torch.equal(
            saved.to(now.device, now.dtype), now)
        return saved.to(now.device) if is_cast else now
    if isinstance(saved, dict) and isinstance(now, dict):
        for key in saved.keys() & now.keys():
            now[key] = _uncast(saved[key], now[key])
    elif isinstance(saved, list) and isinstance(now, list) and len(saved) == len(now):
        now[:] = map(_uncast, saved, now)
    elif type(saved) is tuple and type(now) is tuple and len(saved) == len(now):
        return tuple(map(_uncast, saved, now))
    return now


_Key = tuple[Any, Any]
_K = TypeVar("_K")


def _tensors(states: Any) -> Iterator[tuple[_Key, torch.Tensor]]:
    """Yields the tensors in parameters' states, with the parameter's number and the tensor's name as the key."""
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
    """Returns whether the elements of `loaded` can be copied into `live` unchanged."""
    parts = parts_module()
    if parts is not None and isinstance(live, parts.DTensor) | isinstance(loaded, parts.DTensor):
        if type(live) is not type(loaded):
            return False
        divided: Any = live, loaded
        if len({(each.device_mesh, each.placements, each.shape) for each in divided}) > 1:
            return False
        live, loaded = map(parts.local, divided)
    # An expanded tensor has one location for several elements.
    has_places = all(step for step, length in zip(live.stride(), live.shape, strict=True) if length > 1)
    is_there = not live.numel() or live.untyped_storage().nbytes() > 0
    return live.shape == loaded.shape and live.dtype == loaded.dtype and has_places and is_there and (
        not live.is_inference())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    parts = parts_module()
    held: torch.Tensor = tensor if parts is None else parts.local(tensor)
    return held


def apart(tensors: dict[_K, torch.Tensor], all_tensors: list[torch.Tensor]) -> set[_K]:
    """Returns the keys of the tensors that share no memory with any other tensor in `all_tensors`."""
    shared: set[int] = set()
    # The device and the highest end address of the tensors so far, and the tensor with that end.
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
    """Returns a tensor's device, the addresses of its first byte and of the end of its last element, and `number`."""
    local = _local(tensor)
    if not local.numel() or not _is_strided(local):
        return local.device, 0, 0, number
    steps = sum(step * (length - 1) for step, length in zip(local.stride(), local.shape, strict=True))
    return local.device, local.data_ptr(), local.data_ptr() + (steps + 1) * local.itemsize, number


def _order(addresses: tuple[torch.device, int, int, int]) -> tuple[str, int]:
    return str(addresses[0]), addresses[1]
