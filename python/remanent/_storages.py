"""The storages of tensors, which may be freed or shortened while their tensors are there."""

from __future__ import annotations

import torch

from remanent._errors import RefusedError
from remanent._native import Extent
from remanent._tensors import extents


def extents_there(tensors: dict[str, torch.Tensor]) -> list[Extent]:
    """What is to be stored of tensors whose elements are all there. What cannot be is refused by its name.

    Of a storage that `resize_(0)` freed, as sharded trainers do it, tensors keep their shapes, and an address of
    nothing.
    """
    found = extents(tensors)
    for each in found:
        if not each.is_there:
            raise RefusedError(f"{each.name}: its storage was freed or shortened, and does not hold its elements",
                               remedy="save while they are there, between the passes that free and fetch them")
    return found
