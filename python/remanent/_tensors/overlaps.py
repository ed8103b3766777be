"""Determines how tensors that overlap in memory are stored without unused bytes.

If overlapping tensors use at least half of the memory between their first and last byte, their page contains all of
that memory. Otherwise, tensors without common bytes are stored in separate pages. The others are packed, provided that
each of them still has a single stride per dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from remanent._store._native import Extent

# The share of the memory that must be in use; for sparser groups, only the bytes in use are stored.
_USED_MIN = 0.5
_ALIGN = 16
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Part(NamedTuple):
    """The tensors that share one page."""

    extents: tuple[Extent, ...]
    # The offset of each tensor in the packed page, in bytes, and its strides there, in elements; None for a page that
    # is the tensors' memory unchanged.
    places: dict[str, tuple[int, tuple[int, ...]]] | None

    def packed(self) -> torch.Tensor:
        """Returns the bytes of the packed page, copied on the current stream."""
        assert self.places is not None
        ends = [start + span(each.tensor.shape, stride) * each.tensor.itemsize
                for each in self.extents for start, stride in (self.places[each.name],)]
        device = self.extents[0].tensor.device
        page = torch.zeros(-(-max(ends) // _ALIGN) * _ALIGN, dtype=torch.uint8, device=device)
        for each in self.extents:
            start, stride = self.places[each.name]
            source = bits(each.tensor)
            target = torch.empty(0, dtype=source.dtype, device=device)
            target.set_(page.untyped_storage(), start // source.itemsize, source.shape, stride)
            squeezed(target).copy_(squeezed(source))
            if each.tensor.is_cuda:
                each.tensor.record_stream(torch.cuda.current_stream(device))
        return page


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of the tensor whose elements have an integer type of the same width, since torch cannot copy all
    types."""
    return tensor.view(_BITS[tensor.itemsize])


def squeezed(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of the tensor without the repetitions of `expand`, or the tensor itself if there are none."""
    for dim, (length, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if step == 0 and length > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def expanded_stride(tensor: torch.Tensor, stride: Sequence[int]) -> tuple[int, ...]:
    """Returns `stride`, the strides of `squeezed(tensor)`, with zeros for dimensions that `expand` repeated."""
    return tuple(0 if own == 0 and length > 1 else step
                 for length, own, step in zip(tensor.shape, tensor.stride(), stride, strict=True))


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Returns the number of elements from the first element to the end of the last one, including gaps."""
    return 1 + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))


def together_or_apart(group: tuple[Extent, ...]) -> list[Part]:
    """Returns the pages in which overlapping tensors are stored."""
    used = sum(squeezed(each.tensor).nbytes for each in group)
    if used >= _USED_MIN * (max(each.end for each in group) - group[0].start):
        return [Part(group, None)]
    runs = [_Runs(each) for each in group]
    return [_part([runs[at] for at in members]) for members in _components(runs)]


class _Runs:
    """The bytes of a tensor as runs of equal length."""

    def __init__(self, extent: Extent) -> None:
        self.extent = extent
        tensor = squeezed(extent.tensor)
        width = tensor.itemsize
        dims = sorted((step, dim) for dim, (length, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
                      if length > 1)
        self.length = width
        #: The other dimensions, with their lengths and their steps in bytes, ordered from the longest step to the
        #: shortest.
        self.outer: list[tuple[int, int, int]] = []
        for step, dim in dims:
            if not self.outer and step * width == self.length:
                self.length *= tensor.shape[dim]
            else:
                self.outer.insert(0, (dim, tensor.shape[dim], step * width))
        starts = torch.tensor([extent.start], device="cpu")
        for _, count, step in self.outer:
            starts = (starts[:, None] + torch.arange(count, device="cpu") * step).reshape(-1)
        #: The starts of the runs in the storage, in the order of the outer dimensions.
        self.starts = starts


def _components(runs: list[_Runs]) -> Iterator[list[int]]:
    """Yields groups of tensors that share bytes, directly or through other tensors, as indices into `runs`."""
    starts = torch.cat([each.starts for each in runs])
    ends = torch.cat([each.starts + each.length for each in runs])
    owners = torch.cat([torch.full_like(each.starts, at) for at, each in enumerate(runs)])
    order = starts.argsort(stable=True)
    starts, owners = starts[order], owners[order]
    reached = ends[order].cummax(0).values
    # Runs without a gap between them belong to the same segment.
    begins = (starts[1:] >= reached[:-1]).long()
    segment = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), begins.cumsum(0)])
    found = list(range(len(runs)))

    def root(at: int) -> int:
        while found[at] != at:
            found[at] = at = found[found[at]]
        return at

    # Neighbors in a segment belong to the same component.
    pairs = torch.stack([owners[:-1], owners[1:]], 1)[segment[1:] == segment[:-1]]
    for left, right in sorted(set(map(tuple, pairs.tolist()))):
        found[root(left)] = root(right)
    members: dict[int, list[int]] = {}
    for at in range(len(runs)):
        members.setdefault(root(at), []).append(at)
    yield from members.values()


def _part(runs: list[_Runs]) -> Part:
    """Returns one page for tensors that share bytes. If possible, the page contains no bytes that no tensor uses."""
    extents = tuple(each.extent for each in runs)
    if len(runs) == 1:
        return Part(extents, None)
    starts, order = torch.cat([each.starts for each in runs]).sort(stable=True)
    ends = torch.cat([each.starts + each.length for each in runs])[order]
    reached = ends.cummax(0).values
    # The location of each segment in use, in memory and in the packed page.
    is_first = torch.cat([torch.ones(1, dtype=torch.bool, device="cpu"), starts[1:] > reached[:-1]])
    begins = starts[is_first]
    last = torch.cat([is_first[1:], torch.ones(1, dtype=torch.bool, device="cpu")])
    lengths = (reached[last] - begins + _ALIGN - 1) // _ALIGN * _ALIGN if _is_ragged(runs) else reached[last] - begins
    packed = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), lengths.cumsum(0)[:-1]])
    places: dict[str, tuple[int, tuple[int, ...]]] = {}
    for each in runs:
        at = torch.searchsorted(begins, each.starts, right=True) - 1
        place = _place(each, packed[at] + each.starts - begins[at])
        if place is None:
            return Part(extents, None)
        places[each.extent.name] = place
    return Part(extents, places)


def _is_ragged(runs: list[_Runs]) -> bool:
    """Returns whether the tensors have elements of several widths."""
    return len({each.extent.tensor.itemsize for each in runs}) > 1


def _place(runs: _Runs, starts: torch.Tensor) -> tuple[int, tuple[int, ...]] | None:
    """Returns the offset and strides of a tensor whose runs begin at `starts`, or None if no strides describe these
    locations."""
    width = runs.extent.tensor.itemsize
    grid = starts.reshape([count for _, count, _ in runs.outer])
    steps: dict[int, int] = {}
    expected = grid.reshape(-1)[0]
    for axis, (dim, count, _) in enumerate(runs.outer):
        step = int(grid.select(axis, 1).reshape(-1)[0] - grid.reshape(-1)[0])
        shape = [1] * grid.ndim
        shape[axis] = count
        expected = expected + (torch.arange(count, device="cpu") * step).reshape(shape)
        steps[dim] = step
    if not torch.equal(expected.reshape(grid.shape) if grid.ndim else expected, grid) or int(starts[0]) % width or any(
            step % width or step < 0 for step in steps.values()):
        return None
    tensor = runs.extent.tensor
    stride = [steps[dim] // width if dim in steps else step for dim, step in enumerate(tensor.stride())]
    return int(starts[0]), expanded_stride(tensor, stride)
