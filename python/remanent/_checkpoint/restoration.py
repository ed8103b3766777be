"""Verifies a version of a run, and then loads the version into the run's own tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from remanent._checkpoint.restore_targets import Targets
from remanent._state import page_tree
from remanent._state.modules import Described, LiveModule, described_in
from remanent._state.page_tree import Arrays, Manifest
from remanent._state.run_state import made, parts_module
from remanent._store.errors import NoStateError
from remanent._tensors.conversion import DTYPE, device_name, is_cuda, load_pages, tensors_of, together
from remanent._tensors.gpu_scratch import Scratch, scratch_for
from remanent._util.progress import Bar
from remanent._versions.run_versions import Views

if TYPE_CHECKING:
    from remanent._checkpoint.replicas import Replicas


class Restoration:
    """A verified version that can be loaded into the run's tensors. Values without a tensor in the run are already
    read.

    :param views: the views of the version.
    :param targets: the tensors of the run.
    :param layouts: the layouts of the run's DTensors, or None if the run has a single process.
    :param bar: a progress bar that counts the verified bytes.
    :param cast: whether a model's element types may differ from the version's.
    :param replicas: the ranks with which pages are exchanged, or None if this rank loads all pages itself.
    :param is_equal: returns whether the tensor of a name is equal on all replicas.
    :raises InvalidError: the version does not fit the run. Nothing changed.
    """

    def __init__(self, views: Views, targets: Targets, layouts: Any, bar: Bar, *, cast: bool,
                 replicas: Replicas | None = None, is_equal: Callable[[str], bool] = lambda name: True) -> None:
        self._views = views
        # The verified bytes of pages on GPUs with enough free memory. Other pages are read again by `load`.
        self._scratch: dict[torch.device, Scratch] = {}
        # The memory of the run's tensors, by page.
        self._memory: dict[str, torch.Tensor] = {}

        def plan() -> _Plan:
            return self._planned(targets, layouts, cast=cast)

        plan_of_rank = plan() if replicas is None else replicas.in_step("read the version", plan)
        manifest, outline, names_now, wholes, names, lengths = plan_of_rank
        loaded = set() if replicas is None else self._exchanged(replicas, is_equal, manifest.pages, lengths, bar)
        for device, memory in self._memory_by_device():
            of_device = {key: lengths[key] for key in memory if key not in loaded}
            scratch = self._scratch.get(device) or scratch_for(device, of_device)
            if scratch is not None:
                self._scratch[device] = scratch
            for keys in together(of_device, device if scratch is not None else torch.device("cpu")):
                if scratch is not None:
                    views.own.load({key: scratch.pages[key] for key in keys}, device_name(device))
                else:
                    views.own.prove(keys)
                for key in keys:
                    bar.add(lengths[key])
        # Pages that cannot be read into that memory.
        read: dict[str, torch.Tensor] = {}
        for device, pages in _by_home(manifest, self._memory, targets, names).items():
            for page, arrays in load_pages(views.own, pages, device):
                read |= tensors_of(page, arrays, device)
                bar.add(page.numel())
        in_place = [array.name for key in self._memory for array in manifest.pages[key]]
        self._tensors = [targets.tensors[name] for name in in_place]
        tensors = read | dict(zip(in_place, self._tensors, strict=True))
        own_wholes = {name: targets.wholes[name] for name in in_place if name in targets.wholes}
        #: The state. It contains the run's own tensors, still unchanged, where bytes can be read into them.
        self.state: dict[str, Any] = _state(manifest, tensors, own_wholes, wholes)
        #: The modules, each with the names of its tensors into which bytes are read.
        self.modules: dict[str, tuple[LiveModule, set[str]]] = {}
        for part, names_of_part in names_now.items():
            live = targets.modules[part]
            self.modules[part] = live, {names_of_part[name] for name, said in outline[part].items()
                                        if isinstance(said, Described) and said.array in set(in_place)}
            self.state[part] = live.adopted(self.state[part], names_of_part)
        #: The parts with tensors into which bytes are read.
        self.parts_in_place = {part for part, said in outline.items()
                               if any(each.array in set(in_place) for each in described_in(said))}

    def _planned(self, targets: Targets, layouts: Any, *, cast: bool) -> _Plan:
        """Compares the version with the run, and finds the memory of the run's tensors for each page."""
        view = self._views.own
        manifest = page_tree.read_manifest(view)
        if manifest.tree is None:
            raise NoStateError("the store contains tensors, but no version of a run",
                               remedy="load the tensors with `load_file`")
        outline = _outline(manifest)
        names_now = targets.fit(outline, cast=cast)
        wholes = None if layouts is None else parts_module().Wholes(self._views, layouts)

        def is_own(name: str, said: Any) -> bool:
            return wholes is not None and name in targets.wholes and wholes.is_own(name, said)

        names = {name for kind, name, said in tensors_in(manifest.tree)
                 if (name not in targets.wholes if kind == "tensor" else is_own(name, said))}
        lengths = {key: view.info(key).length for key in manifest.pages}
        self._memory = targets.memory_of(manifest.pages, lengths, names)
        return _Plan(manifest, outline, names_now, wholes, names, lengths)

    def _exchanged(self, replicas: Replicas, is_equal: Callable[[str], bool], pages: Mapping[str, Arrays],
                   lengths: Mapping[str, int], bar: Bar) -> set[str]:
        """Loads the pages that are equal on all ranks into scratch memory, a share on each rank. Returns the pages that
        are loaded and verified."""
        def exchangeable() -> tuple[torch.device | None, list[str], dict[str, tuple[int, int]]]:
            by_device = dict(self._memory_by_device())
            # An optimizer may keep its counts of steps on the host.
            devices = [device for device in by_device if is_cuda(device)] or list(by_device)
            if len(devices) != 1 or not replicas.can_exchange(devices[0]):
                return None, [], {}
            keys = list(by_device[devices[0]])
            of_images = self._views.own._image_checksums(keys)
            # Other pages may differ between ranks. An equal checksum would not prove that their bytes are equal.
            return devices[0], keys, {key: (lengths[key], found) for key, found in zip(keys, of_images, strict=True)
                                      if found is not None and all(is_equal(each.name) for each in pages[key])}

        device, keys, checksums = replicas.in_step("list the pages", exchangeable)
        shared = replicas.shared_pages(checksums)
        if device is None or not shared:
            return set()
        ordered = {key: lengths[key] for key in dict.fromkeys([*shared, *keys])}
        scratch = replicas.scratch_of_all(device, lambda: scratch_for(device, ordered))
        if scratch is None:
            return set()
        self._scratch[device] = scratch
        return replicas.load(self._views.own, scratch, shared, checksums, bar)

    @property
    def nbytes(self) -> int:
        """The number of bytes that `load` reads."""
        return sum(memory.numel() for memory in self._memory.values())

    def _memory_by_device(self) -> Iterator[tuple[torch.device, dict[str, torch.Tensor]]]:
        for device in {memory.device for memory in self._memory.values()}:
            yield device, {key: each for key, each in self._memory.items() if each.device == device}

    def load(self, bar: Bar) -> None:
        """Loads the version into the run's own tensors. Bytes that are not on the GPU yet are read and verified again.

        The load runs after work that is queued on the current streams of the GPUs, and before work that is queued
        later.
        """
        try:
            for device, memory in self._memory_by_device():
                scratch = self._scratch.pop(device, None)
                if scratch is not None:
                    scratch.copy_to(memory)
                    scratch.free()
                    bar.add(sum(each.numel() for each in memory.values()))
                    continue
                for keys in together({key: each.numel() for key, each in memory.items()}, device):
                    self._views.own.load({key: memory[key] for key in keys}, device_name(device))
                    for key in keys:
                        bar.add(memory[key].numel())
        finally:
            # `copy_` does the same. It lets backward passes detect that their saved tensors were changed.
            for tensor in self._tensors:
                torch.autograd.graph.increment_version(tensor)

    def __enter__(self) -> Restoration:
        return self

    def __exit__(self, *given: object) -> None:
        for scratch in self._scratch.values():
            scratch.free()
        self._views.close()


class _Plan(NamedTuple):
    """How the tensors of a version fit the run."""

    manifest: Manifest
    #: The state with a description in place of each tensor.
    outline: dict[str, Any]
    #: The names of the run's tensors by those of the version, for each module.
    names_now: dict[str, dict[str, str]]
    #: The layouts of DTensors, or None if the run has a single process.
    wholes: Any
    #: The names of tensors whose bytes this rank reads as they are.
    names: set[str]
    #: The length of each page in bytes.
    lengths: dict[str, int]


def _by_home(manifest: Manifest, in_place: Iterable[str], targets: Targets,
             names: set[str]) -> dict[torch.device, dict[str, Arrays]]:
    """Returns the pages that are not in `in_place`, grouped by the device that needs their bytes."""
    found: dict[torch.device, dict[str, Arrays]] = {}
    for key, arrays in manifest.pages.items():
        if key not in in_place:
            of_page = [array.name for array in arrays]
            device = targets.home(of_page) if names.issuperset(of_page) else torch.device("cpu")
            found.setdefault(device, {})[key] = arrays
    return found


def _outline(manifest: Manifest) -> dict[str, Any]:
    """Returns the state with a `Described` in place of each tensor. A value that JSON cannot represent is replaced by
    its kind."""
    arrays = {array.name: array for of_page in manifest.pages.values() for array in of_page}

    def adapt(tag: list[Any]) -> Any:
        kind, *rest = tag
        if kind not in ("tensor", "dtensor"):
            return kind
        array = arrays[rest[0]]
        shape = rest[1]["shape"] if kind == "dtensor" else array.shape
        return Described(array.name, tuple(shape), DTYPE.get(array.dtype))

    outline = page_tree.unflatten(manifest.tree, adapt)
    assert isinstance(outline, dict)
    return outline


def tensors_in(tree: Any) -> Iterator[tuple[str, str, Any]]:
    """Yields the kind, name and description of each tensor and DTensor in the JSON of a state."""
    if isinstance(tree, dict):
        kind, *rest = tree.get(page_tree.TAG, [None])
        if kind in ("tensor", "dtensor"):
            yield kind, rest[0], rest[1] if len(rest) > 1 else None
            return
        tree = list(tree.values())
    for each in tree if isinstance(tree, list) else ():
        yield from tensors_in(each)


def _state(manifest: Manifest, tensors: Mapping[str, torch.Tensor], own_wholes: Mapping[str, Any],
           wholes: Any) -> dict[str, Any]:
    """Returns the state as it was saved. DTensors in the state are the run's own, or have the layouts of `wholes`."""
    def adapt(tag: list[Any]) -> Any:
        kind, *rest = tag
        if kind == "dtensor":
            if wholes is None:
                raise NoStateError(f"{rest[0]}: the version has a DTensor, but the model has none",
                                   remedy="create the model as it was when the version was saved")
            return own_wholes[rest[0]] if rest[0] in own_wholes else wholes.whole(rest[0], tensors[rest[0]], rest[1])
        return made(tag, tensors)

    state = page_tree.unflatten(manifest.tree, adapt)
    assert isinstance(state, dict)
    return state
