"""A version of a run, proven first and then put into the run's own tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from remanent import _pages
from remanent._errors import Error, InvalidError, NoStateError
from remanent._pages import Arrays, Manifest
from remanent._progress import Bar
from remanent._restore_targets import Targets
from remanent._run_state import parts_module
from remanent._tensors import is_cuda, load_pages, tensors_of, together
from remanent._versions import Views


class Restoration:
    """A version of which every byte is proven, and as much read as has no memory in the run.

    :param views: the version.
    :param targets: the tensors of the run, which nothing has changed yet.
    :param layouts: how its DTensors are divided.
    :param bar: told of the bytes that are proven.
    """

    def __init__(self, views: Views, targets: Targets, layouts: Any, bar: Bar) -> None:
        self._views = views
        manifest = _pages.read_manifest(views.own)
        if manifest.tree is None:
            raise NoStateError("the store holds tensors, and no state of a run", remedy="use `load_file`")
        wholes = None if layouts is None else parts_module().Wholes(views, layouts)

        def is_own(name: str, said: Any) -> bool:
            return wholes is not None and name in targets.wholes and wholes.is_own(name, said)

        names = {name for kind, name, said in _tensors_in(manifest.tree)
                 if (name not in targets.wholes if kind == "tensor" else is_own(name, said))}
        lengths = {key: views.own.info(key).length for key in manifest.pages}
        # The memory of the run's tensors by page.
        self._memory = targets.memory_of(manifest.pages, lengths, names)
        for keys in together({key: lengths[key] for key in self._memory}):
            views.own.prove(keys)
            for key in keys:
                bar.add(lengths[key])
        # Pages that cannot be read into them.
        read: dict[str, torch.Tensor] = {}
        for device, pages in _by_home(manifest, self._memory, targets, names).items():
            for page, arrays in load_pages(views.own, pages, device):
                read |= tensors_of(page, arrays, device)
                bar.add(page.numel())
        in_place = [array.name for key in self._memory for array in manifest.pages[key]]
        self._tensors = [targets.tensors[name] for name in in_place]
        tensors = read | dict(zip(in_place, self._tensors, strict=True))
        own_wholes = {name: targets.wholes[name] for name in in_place if name in targets.wholes}
        #: The state: of what can be read into the run's own tensors, it has these, as they are now.
        self.state: dict[str, Any] = _state(manifest, tensors, own_wholes, wholes)

    @property
    def nbytes(self) -> int:
        """Bytes that `load` reads."""
        return sum(memory.numel() for memory in self._memory.values())

    def load(self, bar: Bar) -> None:
        """Reads the version into the run's own tensors, each proven once more.

        What the current streams of their GPUs do is done before, and what they are given from then on comes after it.
        """
        try:
            for device in {memory.device for memory in self._memory.values()}:
                memory = {key: each for key, each in self._memory.items() if each.device == device}
                for keys in together({key: each.numel() for key, each in memory.items()}, device):
                    self._views.own.load({key: memory[key] for key in keys}, str(device) if is_cuda(device) else "host")
                    for key in keys:
                        bar.add(memory[key].numel())
        except Error as error:
            error.add_note("Some tensors have the version's values, and others their own: restore a version anew.")
            raise
        finally:
            # As `copy_` does: backward passes find that what they have kept was changed.
            for tensor in self._tensors:
                torch.autograd.graph.increment_version(tensor)

    def __enter__(self) -> Restoration:
        return self

    def __exit__(self, *given: object) -> None:
        self._views.close()


def _by_home(manifest: Manifest, in_place: Iterable[str], targets: Targets,
             names: set[str]) -> dict[torch.device, dict[str, Arrays]]:
    """The other pages, by where their bytes are wanted."""
    found: dict[torch.device, dict[str, Arrays]] = {}
    for key, arrays in manifest.pages.items():
        if key not in in_place:
            of_page = [array.name for array in arrays]
            device = targets.home(of_page) if names.issuperset(of_page) else torch.device("cpu")
            found.setdefault(device, {})[key] = arrays
    return found


def _tensors_in(tree: Any) -> Iterator[tuple[str, str, Any]]:
    """The tensors and DTensors in the JSON of a state: kind, name, and what is said of it."""
    if isinstance(tree, dict):
        kind, *rest = tree.get(_pages.TAG, [None])
        if kind in ("tensor", "dtensor"):
            yield kind, rest[0], rest[1] if len(rest) > 1 else None
            return
        tree = list(tree.values())
    for each in tree if isinstance(tree, list) else ():
        yield from _tensors_in(each)


def _state(manifest: Manifest, tensors: Mapping[str, torch.Tensor], own_wholes: Mapping[str, Any],
           wholes: Any) -> dict[str, Any]:
    """The state as the run had it. DTensors are the run's own, or divided as `layouts_of` says."""
    def adapt(tag: list[Any]) -> Any:
        kind, *rest = tag
        if kind == "tensor":
            return tensors[rest[0]]
        if kind == "dtensor":
            if wholes is None:
                raise NoStateError(f"{rest[0]}: it is a DTensor, and the model has none",
                                   remedy="make the model as the run had it")
            return own_wholes[rest[0]] if rest[0] in own_wholes else wholes.whole(rest[0], tensors[rest[0]], rest[1])
        if kind == "ndarray":
            return tensors[rest[0]].numpy()
        if kind == "dtype":
            return getattr(torch, rest[0])
        if kind == "device":
            return torch.device(rest[0])
        if kind == "size":
            return torch.Size(rest[0])
        if kind == "scalar":
            import numpy

            return numpy.dtype(rest[0]).type(_pages.unflatten(rest[1], adapt))
        raise NoStateError(f"the version holds a {kind}, which this package does not know", remedy="use a newer one")

    state = _pages.unflatten(manifest.tree, adapt)
    assert isinstance(state, dict)
    return state


def refuse_misfits(state: Mapping[str, Any], targets: Targets) -> None:
    """Refuses a state that torch would not load, before anything has changed: what torch refuses, it refuses halfway.

    Of modules and optimizers with a load or hooks of their own only these can tell.
    """
    for name, own in targets.module_states.items():
        tensors = [key for key, value in own.items() if isinstance(value, torch.Tensor) and value.is_inference()]
        if tensors and not targets.is_in_inference:
            raise InvalidError(f"{name}: {', '.join(tensors)} cannot be changed outside of torch.inference_mode",
                               remedy="restore within it")
        if isinstance(state[name], Mapping):
            _refuse_other_tensors(name, own, state[name], all_names=name not in targets.forgiving)
    for name, sizes in targets.group_sizes.items():
        found = [len(group["params"]) for group in state[name].get("param_groups", ())]
        if found != sizes:
            raise InvalidError(f"{name}: the version's parameter groups have {found} parameters, and these {sizes}",
                               remedy="make the optimizer as the run had it")


def _refuse_other_tensors(part: str, own: Mapping[str, Any], given: Mapping[str, Any], *, all_names: bool) -> None:
    remedy = "make the model as the run had it"
    # Torch makes these counts where there are none.
    missing = [name for name in own.keys() - given.keys() if not name.endswith("num_batches_tracked")]
    more = given.keys() - own.keys()
    for names, where in ((missing, "the version"), (more, "the model")) if all_names else ():
        if names:
            raise InvalidError(f"{part}: {where} has no {', '.join(sorted(names))}", remedy=remedy)
    shapes = {name: (own[name].shape, given[name].shape) for name in own.keys() & given.keys()
              if _has_shape(own[name]) and isinstance(given[name], torch.Tensor)}
    for name, (now, then) in sorted(shapes.items()):
        # A single element may be a row of one, as in old versions of torch.
        if now != then and len(now):
            raise InvalidError(f"{part}/{name}: the version has the shape {list(then)}, and the model {list(now)}",
                               remedy=remedy)


def _has_shape(tensor: Any) -> bool:
    is_lazy: Callable[[Any], bool] = torch.nn.parameter.is_lazy
    return isinstance(tensor, torch.Tensor) and not is_lazy(tensor)
