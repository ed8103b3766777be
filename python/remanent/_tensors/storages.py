"""Checks the storages of tensors, which may be freed or shortened while the tensors exist."""

from __future__ import annotations

from collections import Counter

import torch

from remanent._store._native import Extent
from remanent._store.errors import RefusedError
from remanent._tensors.conversion import extents


def extents_there(tensors: dict[str, torch.Tensor]) -> list[Extent]:
    """Returns the memory extents of tensors. Raises `RefusedError` for a tensor that cannot be stored, or whose storage
    does not contain all of its elements.

    Sharded trainers free a storage with `resize_(0)`. Its tensors then keep their shapes and have an invalid address.
    """
    found = extents(tensors)
    _refuse_shared_views(tensors, found)
    for each in found:
        if not each.is_there:
            raise RefusedError(f"{each.name}: the tensor's storage was freed or shortened",
                               remedy="save at a time when the trainer has not freed it")
    return found


def _refuse_shared_views(tensors: dict[str, torch.Tensor], found: list[Extent]) -> None:
    """Raises `RefusedError` for a conjugate or negative view of memory that another tensor also uses, because such a
    view is stored as a copy."""
    views = {name: given for each, (name, given) in zip(found, tensors.items(), strict=True)
             if each.tensor is not given and (given.is_conj() or given.is_neg())}
    if not views:
        return
    held = Counter(each.storage for each in found if each.name not in views) + Counter(map(_storage, views.values()))
    for name, view in views.items():
        if held[_storage(view)] > 1:
            raise RefusedError(f"{name}: a conjugate or negative view that shares memory with another tensor cannot be "
                               "stored", remedy="store a copy, as returned by resolve_conj or resolve_neg")


def _storage(tensor: torch.Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()
