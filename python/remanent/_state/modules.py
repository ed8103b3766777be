"""Describes a live module for a restore: its tensors by name, and which of them its own code loads."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from remanent._state.page_tree import path_of
from remanent._state.run_state import parts_module
from remanent._store.errors import InvalidError
from remanent._tensors.conversion import PLAIN_TYPES
from remanent._tensors.torch_modes import parameters_in_place

_Module = torch.nn.Module
# Segments that wrappers add to the names of their modules, which states may lack.
_WRAPPERS = ("_orig_mod", "module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_EXTRA_STATE = "_extra_state"
_AS_RUN_HAD_IT = "create the model as it was when the version was saved"


class Described(NamedTuple):
    """The description of a tensor in a version, which is known before any bytes are read."""

    array: str
    shape: tuple[int, ...]
    # None for an element type that this torch lacks.
    dtype: torch.dtype | None


class LiveModule:
    """The tensors of a module by their names in its state, and the submodules that load values with their own code."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.state: Mapping[str, Any] = module.state_dict()
        #: The module's own tensor objects. A state of the module contains views of these tensors.
        self.objects: dict[str, torch.Tensor] = dict(
            [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])
        own: list[str] = []
        self._special: dict[str, torch.nn.Module] = {}
        self._extra: set[str] = set()
        renaming: list[str] = []
        if type(module).load_state_dict is not _Module.load_state_dict:
            own.append("")
        for path, each in module.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            if not _loads_by_torch(each):
                # The name is added with the segments of wrappers, and without them.
                own += [prefix, without(prefix, _WRAPPERS[2:])]
            elif type(each)._load_from_state_dict is not _Module._load_from_state_dict or each._load_state_dict_pre_hooks:
                self._special[prefix] = each
            if each._load_state_dict_pre_hooks:
                renaming.append(prefix)
            if type(each).set_extra_state is not _Module.set_extra_state:
                self._extra.add(prefix + _EXTRA_STATE)
        self._own = tuple(own)
        self._renaming = tuple(renaming)
        #: Whether hooks may tolerate missing or unexpected names.
        self.is_forgiving = bool(own) or any(each._load_state_dict_post_hooks for each in module.modules())

    def loads_itself(self, name: str) -> bool:
        """Returns whether code outside of torch loads the value `name`."""
        return name.startswith(self._own)

    def is_extra(self, name: str) -> bool:
        """Returns whether the value `name` is passed unchanged to a module's `set_extra_state`."""
        return name in self._extra

    def special(self, name: str) -> tuple[str, torch.nn.Module] | None:
        """Returns the torch module that loads the value `name` with its own code, such as an observer, and the module's
        prefix. Returns None if there is no such module."""
        prefix = name[: name.rfind(".") + 1]
        module = self._special.get(prefix)
        return None if module is None else (prefix, module)

    def refused_plain(self, name: str) -> str | None:
        """Returns the reason why torch would reject a plain tensor for `name` in the model's state, or None."""
        if self.loads_itself(name) or self.is_extra(name) or self.special(name):
            return None
        tensor = self.state[name]
        parts = parts_module()
        kind = type(tensor)
        if not (kind in PLAIN_TYPES or is_lazy(tensor) or (parts is not None and kind is parts.DTensor)):
            return f"the version contains a plain tensor, but the model has a {kind.__module__}.{kind.__name__}"
        if tensor.layout is not torch.strided or tensor.is_nested:
            layout = "nested" if tensor.is_nested else tensor.layout
            return f"the version contains a dense tensor, but the model has one of layout {layout}"
        # Hooks may rename values before the load, or tolerate unexpected names after it.
        if name not in self.objects and not self.is_forgiving and not name.startswith(self._renaming):
            return "the model's own code adds this value to its state, but torch's load_state_dict does not accept it"
        return None

    def adopted(self, state: Mapping[str, Any], names: Mapping[str, str]) -> Mapping[str, Any]:
        """Returns `state` with its names, and the module paths in its metadata, replaced by those of the model."""
        if all(then == now for then, now in names.items()):
            return state
        made: OrderedDict[str, Any] = OrderedDict((names[name], value) for name, value in state.items())
        metadata = getattr(state, "_metadata", None)
        if metadata is not None:
            made.__dict__["_metadata"] = _versions_by_now(self, metadata, names)
        return made


def _loads_by_torch(module: torch.nn.Module) -> bool:
    hooks = [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]
    return all(map(_is_of_torch, [type(module)._load_from_state_dict, *hooks]))


def _is_of_torch(function: Callable[..., Any]) -> bool:
    return (getattr(function, "__module__", None) or type(function).__module__).split(".")[0] == "torch"


def without(name: str, wrappers: tuple[str, ...], *, leading: bool = False) -> str:
    """Returns a name without the segments that wrappers add, either all of them or only leading ones."""
    segments = name.split(".")
    if leading:
        while len(segments) > 1 and segments[0] in wrappers:
            segments.pop(0)
        return ".".join(segments)
    return ".".join(each for at, each in enumerate(segments) if each not in wrappers)


def renamed(live: LiveModule, saved: Mapping[str, Any]) -> dict[str, str]:
    """Returns the model's name for each name in a version's state. Names may differ by the segments that wrappers add.

    For example, names of a compiled model begin with `_orig_mod.`, and names of a model in DataParallel with `module.`.
    If the names are not equal without these segments, the version's names are returned unchanged.
    """
    names = live.state.keys()
    if names != saved.keys():
        for simplify in _SIMPLIFICATIONS:
            now = {simplify(name): name for name in names}
            then = {simplify(name): name for name in saved}
            if len(now) == len(names) and len(then) == len(saved) and now.keys() == then.keys():
                return {then[name]: now[name] for name in now}
    return {name: name for name in saved}


_SIMPLIFICATIONS: tuple[Callable[[str], str], ...] = (
    lambda name: without(name, ("_orig_mod",)),
    lambda name: without(name, _WRAPPERS, leading=True),
    lambda name: without(without(name, _WRAPPERS, leading=True), ("_orig_mod", *_WRAPPERS[2:])),
)


def _versions_by_now(live: LiveModule, metadata: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Returns `metadata`, which contains the version of each module of a state, by the paths of the modules in the
    model."""
    if all(then == now for then, now in names.items()):
        return dict(metadata)
    every = _SIMPLIFICATIONS[-1]
    # A wrapper and its module simplify to the same path; the module comes last.
    simple = {every(f"{path}."): each for path, each in sorted(metadata.items(), key=lambda item: len(item[0]))}
    paths = [path for path, _ in live.module.named_modules(remove_duplicate=False)]
    return {path: simple[every(f"{path}.")] for path in paths if every(f"{path}.") in simple}


def described_in(value: Any) -> Iterator[Described]:
    """Yields the `Described` tensors in the outline of a state."""
    if isinstance(value, Described):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from described_in(each)


def refuse_misfit(part: str, live: LiveModule, saved: Mapping[str, Any], *, cast: bool, in_inference: bool) -> None:
    """Raises `InvalidError` if torch would not load a state unchanged. Torch itself raises only after it has loaded a
    part of the state.

    :param saved: the version's state by the model's names, with `Described` in place of tensors.
    :param cast: whether elements may be converted to the model's types.
    """
    _refuse_places(part, live, saved, in_inference)
    if not live.is_forgiving:
        # Torch creates these counts if they are missing.
        missing = [name for name in live.state.keys() - saved.keys() if not name.endswith("num_batches_tracked")]
        for names, where in ((missing, "the version"), (saved.keys() - live.state.keys(), "the model")):
            if names:
                raise InvalidError(f"{part}: {where} does not contain {', '.join(sorted(names))}",
                                   remedy=_AS_RUN_HAD_IT)
    for name in sorted(live.state.keys() & saved.keys()):
        now, then = live.state[name], saved[name]
        if not isinstance(now, torch.Tensor) or live.is_extra(name):
            continue
        if not isinstance(then, Described):
            if not live.loads_itself(name):
                raise InvalidError(f"{path_of(part, name)}: the version has a {type(then).__name__}, but the model has "
                                   "a tensor", remedy=_AS_RUN_HAD_IT)
            continue
        if (reason := live.refused_plain(name)) is not None:
            raise InvalidError(f"{path_of(part, name)}: {reason}",
                               remedy="restore into a model with plain tensors, then convert it")
        if not (live.loads_itself(name) or live.special(name) or is_lazy(now)) and tuple(now.shape) != then.shape:
            raise InvalidError(f"{path_of(part, name)}: the version has shape {list(then.shape)}, but the model has "
                               f"shape {list(now.shape)}", remedy=_AS_RUN_HAD_IT)
        if now.dtype != then.dtype and not cast:
            raise InvalidError(f"{path_of(part, name)}: the version has elements of type {then.dtype}, but the model "
                               f"has {now.dtype}",
                               remedy=f"create the model with {then.dtype}, or convert the version's elements with "
                               "restore(cast=True)")


def _refuse_places(part: str, live: LiveModule, saved: Mapping[str, Any], in_inference: bool) -> None:
    """Raises `InvalidError` for tensors whose memory does not exist or cannot be written."""
    for name, tensor in live.objects.items():
        if name not in saved or live.is_extra(name) or is_lazy(tensor):
            continue
        if tensor.is_meta:
            raise InvalidError(f"{path_of(part, name)}: the tensor is on the meta device and has no memory",
                               remedy="allocate memory first, for example with model.to_empty(device=\"cpu\")")
        if tensor.is_inference() and not in_inference:
            raise InvalidError(f"{path_of(part, name)}: the tensor was created in torch.inference_mode and cannot be "
                               "changed outside of that mode", remedy="restore within torch.inference_mode")
        if type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided:
            if tensor.nbytes and not tensor.untyped_storage().nbytes():
                raise InvalidError(f"{path_of(part, name)}: the tensor's storage of {tensor.nbytes} bytes was freed",
                                   remedy="allocate the storage again before the restore")


def is_lazy(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is uninitialized and has no shape yet."""
    has_none: Callable[[Any], bool] = torch.nn.parameter.is_lazy
    return has_none(tensor)


class ModuleLoad:
    """The load of a state into one module. The constructor checks that the load will succeed.

    :param state: the version's state by the model's names. Where bytes are read into the module's own tensors, the
        state contains these tensors.
    :param in_place: the names of the tensors into which bytes are read.
    :raises InvalidError: torch would reject a value. Nothing changed.
    """

    def __init__(self, part: str, live: LiveModule, state: dict[str, Any], in_place: set[str],
                 metadata: Mapping[str, Any] | None) -> None:
        self._module = live.module
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        # Torch's own states are of this type, whose attribute `_metadata` contains the modules' versions.
        self._state: OrderedDict[str, Any] = OrderedDict()
        for name, value in state.items():
            own = live.objects.get(name)
            if own is not None and not live.loads_itself(name) and not live.is_extra(name):
                if name in in_place:
                    # Torch detects that it is the same tensor and copies nothing.
                    value = own
                elif (squeezed := _squeezed(own)) is not None and isinstance(value, torch.Tensor):
                    self._copies.append(_fitting(path_of(part, name), own, squeezed, value))
                    value = own
            self._state[name] = value
        if metadata is not None:
            self._state.__dict__["_metadata"] = metadata
        _rehearse(part, live, self._state)

    def load(self) -> None:
        """Loads all values of the version except the bytes of the module's own tensors, which the caller has already
        read."""
        with torch.no_grad():
            for target, source in self._copies:
                target.copy_(source)
        with parameters_in_place():
            self._module.load_state_dict(self._state)


def _squeezed(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns a view of an expanded tensor in which each memory location occurs once. Returns None if the tensor is not
    expanded."""
    if is_lazy(tensor) or type(tensor) not in PLAIN_TYPES or tensor.layout is not torch.strided or tensor.is_meta:
        return None
    expanded = [dim for dim, (length, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
                if length > 1 and step == 0]
    if not expanded or not tensor.numel():
        return None
    view = tensor.detach()
    for dim in expanded:
        view = view.narrow(dim, 0, 1)
    return view


def _fitting(name: str, own: torch.Tensor, squeezed: torch.Tensor,
             value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the view of an expanded tensor to write to, and the part of `value` to write. Raises `InvalidError` if
    `value` differs in elements that share a memory location."""
    narrow = value
    for dim, length in enumerate(squeezed.shape):
        if length < own.shape[dim]:
            narrow = narrow.narrow(dim, 0, 1)
    if not torch.equal(narrow.expand(value.shape).contiguous().view(-1).view(torch.uint8),
                       value.contiguous().view(-1).view(torch.uint8)):
        raise InvalidError(f"{name}: the tensor is expanded, and the version has different values for elements that "
                           "share memory", remedy="replace the tensor in the model with its clone()")
    return squeezed, narrow


def _rehearse(part: str, live: LiveModule, state: Mapping[str, Any]) -> None:
    """Tests values of other shapes on copies of the torch modules that resize their tensors during a load."""
    tried: set[str] = set()
    for name, value in state.items():
        own = live.state.get(name)
        if not (isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor)) or is_lazy(own):
            continue
        is_of_torch = own.shape != value.shape and not live.loads_itself(name) and not live.is_extra(name)
        found = live.special(name) if is_of_torch else None
        if found is None or found[0] in tried:
            continue
        prefix, module = found
        tried.add(prefix)
        of_module = {key: each for key, each in state.items() if key.startswith(prefix)}
        errors: list[str] = []
        metadata = dict((getattr(state, "_metadata", None) or {}).get(prefix[:-1], {}))
        try:
            copy.deepcopy(module)._load_from_state_dict(of_module, prefix, metadata, True, [], [], errors)
        except Exception as error:
            raise InvalidError(f"{path_of(part, name)}: a copy of its module cannot load the version's shape "
                               f"{list(value.shape)}: {error}", remedy=_AS_RUN_HAD_IT) from error
        if errors:
            raise InvalidError(f"{path_of(part, name)}: {errors[0]}", remedy=_AS_RUN_HAD_IT)
