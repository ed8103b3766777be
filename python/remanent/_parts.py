"""DTensors: what a rank holds of one, and the tensor made of it again."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from remanent._errors import NoStateError, RefusedError


_PLACEMENTS: dict[str, Callable[..., Placement]] = {
    "replicate": Replicate,
    "shard": Shard,
    "strided": lambda dim, split_factor: _StridedShard(dim, split_factor=split_factor),
}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: all of it, if it is no DTensor."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def described(name: str, tensor: DTensor) -> dict[str, Any]:
    """How the whole is divided, as JSON."""
    return {"mesh": _key(tensor.device_mesh), "shape": list(tensor.shape), "stride": list(tensor.stride()),
            "placements": [_placement(name, each) for each in tensor.placements]}


def _placement(name: str, placement: Placement) -> list[Any]:
    if isinstance(placement, _StridedShard):
        return ["strided", placement.dim, placement.split_factor]
    if isinstance(placement, Shard):
        return ["shard", placement.dim]
    if isinstance(placement, Replicate):
        return ["replicate"]
    raise RefusedError(f"{name}: a DTensor with a placement of {placement} cannot be stored",
                       remedy="redistribute it: its ranks hold parts of sums")


@functools.lru_cache(64)
def _key(mesh: DeviceMesh) -> str:
    """A mesh by its kind of device, its shape with its dimensions' names, and a hash of its ranks."""
    ranks = mesh.mesh.tolist()
    names = mesh.mesh_dim_names or [""] * mesh.ndim
    shape = ", ".join(f"{name}={size}" if name else str(size) for name, size in zip(names, mesh.shape, strict=True))
    return f"{mesh.device_type} ({shape}) {hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()}"


class Meshes:
    """The meshes over which the tensors of a run are divided."""

    def __init__(self, parts: Iterable[Any]) -> None:
        self._by_key: dict[str, DeviceMesh] = {}
        for part in parts:
            tensors = list(getattr(part, "parameters", tuple)()) + list(getattr(part, "buffers", tuple)())
            for group in getattr(part, "param_groups", ()):
                tensors += group["params"]
            for tensor in tensors:
                if isinstance(tensor, DTensor):
                    self._by_key.setdefault(_key(tensor.device_mesh), tensor.device_mesh)

    def whole(self, name: str, part: torch.Tensor, said: Any) -> DTensor:
        """The tensor of which a rank holds this part. Its bytes stay where they are, on the host."""
        mesh = self._by_key.get(said["mesh"])
        if mesh is None:
            raise NoStateError(f"{name}: it is divided over the mesh {said['mesh']}, over which the model is not",
                               remedy="make the model as the run had it")
        placements = tuple(_PLACEMENTS[kind](*given) for kind, *given in said["placements"])
        meta = TensorMeta(torch.Size(said["shape"]), tuple(said["stride"]), part.dtype)
        return DTensor(part, DTensorSpec(mesh, placements, tensor_meta=meta), requires_grad=False)
