"""Saves each rank's part of a DTensor, and restores DTensors for the current ranks."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from remanent._state import page_tree
from remanent._state.plain_values import encode_or_leave
from remanent._store._native import ArrayLayout
from remanent._store.errors import NoStateError, RefusedError
from remanent._tensors.conversion import DTYPE, PLAIN_TYPES, bytes_of, read_page, tensors_of
from remanent._versions.run_versions import Views

_PLACEMENTS: dict[str, Callable[..., Placement]] = {
    "replicate": Replicate,
    "shard": Shard,
    "strided": lambda dim, split_factor: _StridedShard(dim, split_factor=split_factor),
}


class _Layout(NamedTuple):
    mesh: DeviceMesh
    placements: tuple[Placement, ...]


class _Part(NamedTuple):
    """A part of a DTensor as a rank saved it: the part's page and layout, and its offset in the DTensor."""

    rank: int
    key: str
    array: ArrayLayout
    offset: tuple[int, ...]


class _Parts(NamedTuple):
    """All saved parts of a DTensor, and the distinct layouts that ranks recorded for it."""

    parts: list[_Part]
    divisions: set[str]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a DTensor, or any other tensor unchanged. Must be called without gradients."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_local(tensor: DTensor, part: torch.Tensor) -> DTensor:
    """Returns a DTensor with the layout of `tensor` and `part` as this rank's part."""
    return DTensor(part, tensor._spec, requires_grad=False)


def own_rank() -> int:
    """Returns this process's rank in the numbering of device meshes."""
    return dist.get_rank()


def described(name: str, tensor: DTensor, rank: int) -> dict[str, Any]:
    """Returns the layout of a DTensor and the offset of this rank's part in it, as JSON values."""
    layout = _Layout(tensor.device_mesh, tensor.placements)
    return {"shape": list(tensor.shape), "stride": list(tensor.stride()),
            **_described(name, tensor.shape, layout, rank)}


@functools.lru_cache(1 << 14)
def _described(name: str, shape: torch.Size, layout: _Layout, rank: int) -> dict[str, Any]:
    _, offset = _box(shape, layout, rank)
    return {**_division(name, layout), "offset": None if offset is None else list(offset)}


def _division(name: str, layout: _Layout) -> dict[str, Any]:
    return {"mesh": _key(layout.mesh), "sizes": list(layout.mesh.shape),
            "placements": [_placement(name, each) for each in layout.placements]}


def _box(shape: torch.Size, layout: _Layout, rank: int) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Returns the shape and offset of a rank's part. A rank outside the mesh has an empty part without an offset."""
    # A mesh's own coordinate may be that of an earlier rank of this process: torch reuses equal meshes.
    [*found] = torch.argwhere(layout.mesh.mesh == rank).tolist()
    if not found:
        return (0,) if shape else (), None
    sizes = tuple(layout.mesh.shape)
    return _compute_local_shape_and_global_offset(shape, sizes, found[0], layout.placements)


def _has_boxes(division: Mapping[str, Any]) -> bool:
    """Returns whether each part of a DTensor with this layout is a single box.

    A strided shard is divided further by the placements that follow. Without those placements, its parts consist of
    several pieces.
    """
    placements = division["placements"]
    for at, (kind, *given) in enumerate(placements):
        if kind == "strided":
            dim, split_factor = given
            further = zip(division["sizes"][at + 1 :], placements[at + 1 :], strict=True)
            if math.prod(size for size, placement in further if placement == ["shard", dim]) != split_factor:
                return False
    return True


def _placement(name: str, placement: Placement) -> list[Any]:
    if isinstance(placement, _StridedShard):
        return ["strided", placement.dim, placement.split_factor]
    if isinstance(placement, Shard):
        return ["shard", placement.dim]
    if isinstance(placement, Replicate):
        return ["replicate"]
    raise RefusedError(f"{name}: a DTensor with the placement {placement} cannot be stored",
                       remedy="redistribute the tensor to a Shard or Replicate placement first")


def _key(mesh: DeviceMesh) -> str:
    """Returns a key for a mesh: its device type, its shape with dimension names, and a hash of its ranks."""
    names = mesh.mesh_dim_names or [""] * mesh.ndim
    shape = ", ".join(f"{name}={size}" if name else str(size) for name, size in zip(names, mesh.shape, strict=True))
    ranks = repr(mesh.mesh.tolist()).encode()
    return f"{mesh.device_type} ({shape}) {hashlib.blake2b(ranks, digest_size=8).hexdigest()}"


class Layouts:
    """The current layouts of a run's DTensors.

    :param run: the parts of the run, by name.
    """

    def __init__(self, run: Mapping[str, Any]) -> None:
        self._by_name: dict[str, _Layout] = {}
        self._parameters: dict[str, list[torch.Tensor]] = {}
        for part, held in run.items():
            try:
                state = dict(held) if isinstance(held, Mapping) else held.state_dict()
            except Exception:
                # The part may have no state before its first load.
                state = {}
            for name, tensor in _dtensors(part, state).items():
                self._by_name[name] = _Layout(tensor.device_mesh, tensor.placements)
            groups = getattr(held, "param_groups", ())
            self._parameters[page_tree.segment(part)] = [parameter for group in groups for parameter in group["params"]]
        parameters = [each for of_part in self._parameters.values() for each in of_part if isinstance(each, DTensor)]
        meshes = [layout.mesh for layout in self._by_name.values()] + [each.device_mesh for each in parameters]
        self._meshes = {_key(mesh): mesh for mesh in meshes}

    def of(self, name: str, shape: torch.Size, said: Any) -> _Layout:
        if name in self._by_name:
            return self._by_name[name]
        # An optimizer that has made no step has no state yet: it will have the layout of the parameters.
        found = re.fullmatch(r"([^/]+)/state/(\d+)/.*", name)
        if found and int(found[2]) < len(self._parameters.get(found[1], ())):
            parameter = self._parameters[found[1]][int(found[2])]
            if isinstance(parameter, DTensor) and parameter.shape == shape:
                return _Layout(parameter.device_mesh, parameter.placements)
        mesh = self._meshes.get(said["mesh"])
        if mesh is None:
            raise NoStateError(f"{name}: the version has this tensor on the mesh {said['mesh']}, which the model does not "
                               "use", remedy="create the model as it was when the version was saved")
        return _Layout(mesh, tuple(_PLACEMENTS[kind](*given) for kind, *given in said["placements"]))


class Wholes:
    """The DTensors of a version in the current layout of the run."""

    def __init__(self, views: Views, layouts: Layouts) -> None:
        self._views, self._layouts = views, layouts

    def is_own(self, name: str, said: Any) -> bool:
        """Returns whether this rank's part of the tensor is the same part that this rank saved."""
        shape = torch.Size(said["shape"])
        # All of `described` except the shape and strides of the whole.
        now = _described(name, shape, self._layouts.of(name, shape, said), own_rank())
        return self._views.number is not None and all(said[key] == value for key, value in now.items())

    def whole(self, name: str, part: torch.Tensor, said: Any) -> DTensor:
        """Returns the DTensor whose saved part is `part`, in the current layout. If the part is still this rank's own,
        its bytes stay in place."""
        shape = torch.Size(said["shape"])
        layout = self._layouts.of(name, shape, said)
        if not self.is_own(name, said):
            part = self._joined(name, shape, layout, part.dtype)
        meta = TensorMeta(shape, tuple(said["stride"]), part.dtype)
        return DTensor(part, DTensorSpec(layout.mesh, layout.placements, tensor_meta=meta), requires_grad=False)

    def _joined(self, name: str, shape: torch.Size, layout: _Layout, dtype: torch.dtype) -> torch.Tensor:
        """Returns this rank's part, assembled from the parts that other ranks saved."""
        own_shape, own_offset = _box(shape, layout, own_rank())
        joined = torch.zeros(own_shape, dtype=dtype, device="cpu")
        if own_offset is None:
            return joined
        saved = self._parts.get(name, _Parts([], set()))
        if len(saved.divisions) != 1:
            raise NoStateError(f"{name}: the version has several tensors of this name on different ranks, so the "
                               "redistribution is ambiguous", remedy="restore with the same ranks as at the save")
        for division in (json.loads(*saved.divisions), _division(name, layout)):
            if not _has_boxes(division):
                raise NoStateError(f"{name}: with the placements {division['placements']}, its parts are not contiguous "
                                   "boxes", remedy="restore with the layout of the saved tensor")
        missing = joined.numel()
        # Parts are equal or disjoint: ranks with copies hold the same part.
        seen = set()
        for part in saved.parts if missing else ():
            box = part.offset, part.array.shape
            begin = [max(at, own) for at, own in zip(part.offset, own_offset, strict=True)]
            end = [min(at + length, own + own_length) for at, length, own, own_length
                   in zip(part.offset, part.array.shape, own_offset, own_shape, strict=True)]
            if box in seen or any(last <= first for first, last in zip(begin, end, strict=True)):
                continue
            seen.add(box)
            there, within = (tuple(slice(first - at, last - at)
                                   for first, last, at in zip(begin, end, start, strict=True))
                             for start in (own_offset, part.offset))
            joined[there] = self._read(part, within)
            missing -= math.prod(last - first for first, last in zip(begin, end, strict=True))
        if missing:
            raise NoStateError(f"{name}: {missing} elements are missing in the version")
        return joined

    @functools.cached_property
    def _parts(self) -> dict[str, _Parts]:
        """The parts that all ranks saved, by tensor."""
        found: dict[str, _Parts] = {}
        for rank in range(self._views.count):
            manifest = page_tree.read_manifest(self._views.of(rank))
            arrays = {array.name: (key, array) for key, of_page in manifest.pages.items() for array in of_page}
            for name, said in _described_in(manifest.tree):
                key, array = arrays[name]
                of_name = found.setdefault(name, _Parts([], set()))
                division = {each: said[each] for each in ("mesh", "sizes", "placements", "shape")}
                of_name.divisions.add(json.dumps(division | {"dtype": array.dtype}, sort_keys=True))
                if said["offset"] is not None:
                    of_name.parts.append(_Part(rank, key, array, tuple(said["offset"])))
        return found

    def _read(self, part: _Part, within: tuple[slice, ...]) -> torch.Tensor:
        """Reads a box of a part. If the part's rows are contiguous, only the rows of the box are read."""
        view, array = self._views.of(part.rank), part.array
        if array.stride is not None or not within:
            page = read_page(view, part.key)
            return tensors_of(page, (array,), torch.device("cpu"))[array.name][within]
        rows, *columns = within
        dtype = DTYPE[array.dtype]
        row = dtype.itemsize * math.prod(array.shape[1:])
        read = torch.empty((rows.stop - rows.start, *array.shape[1:]), dtype=dtype, device="cpu")
        view.read_into(part.key, bytes_of(read), array.offset + rows.start * row)
        return read[(slice(None), *columns)]


def _dtensors(part: str, state: Any) -> dict[str, DTensor]:
    """Returns the DTensors in a part's state, by their names in a version."""
    found: dict[str, DTensor] = {}

    def adapt(path: str, value: object) -> Any:
        if isinstance(value, DTensor):
            found[path[1:]] = value
            return {}
        return encode_or_leave(path, value)

    with contextlib.suppress(RefusedError):
        page_tree.flatten("", {part: state}, adapt, page_tree.Leaves(PLAIN_TYPES, "tensor", {}))
    return found


def _described_in(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields the name and description of each DTensor in the JSON of a state."""
    if isinstance(tree, dict):
        kind, *rest = tree.get(page_tree.TAG, [None])
        if kind == "dtensor":
            yield rest[0], rest[1]
            return
        for each in tree.values():
            yield from _described_in(each)
    elif isinstance(tree, list):
        for each in tree:
            yield from _described_in(each)
