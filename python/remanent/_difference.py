"""The tensors that differ between two versions of a run."""

from __future__ import annotations

import torch

from remanent import _native, _pages
from remanent._tensors import bytes_of, read_page, tensors_of


def difference(old: _native.View, new: _native.View) -> dict[str, int | None]:
    """Each by its name, with its number of changed elements: see `Checkpointer.diff`."""
    before = {array.name: (key, array) for key, arrays in _pages.read_manifest(old).pages.items() for array in arrays}
    after = {array.name: (key, array) for key, arrays in _pages.read_manifest(new).pages.items() for array in arrays}
    cpu = torch.device("cpu")
    differ: dict[str, int | None] = {name: None for name in before.keys() ^ after.keys()}
    for name in before.keys() & after.keys():
        (old_key, old_array), (new_key, new_array) = before[name], after[name]
        if (old_array.shape, old_array.dtype) != (new_array.shape, new_array.dtype):
            differ[name] = None
            continue
        was, now = old.info(old_key), new.info(new_key)
        is_same_page = (was.page, was.epoch, was.lsn) == (now.page, now.epoch, now.lsn)
        if is_same_page and (old_array.offset, old_array.stride) == (new_array.offset, new_array.stride):
            continue
        left = tensors_of(read_page(old, old_key), [old_array], cpu)[name]
        right = tensors_of(read_page(new, new_key), [new_array], cpu)[name]
        # By bits: a NaN equals itself, and 0.0 differs from -0.0.
        size = left.element_size()
        flat = [bytes_of(each.contiguous()).view(-1, size) for each in (left, right)]
        count = int((flat[0] != flat[1]).any(dim=1).sum()) if left.numel() else 0
        if count:
            differ[name] = count
    return dict(sorted(differ.items()))
