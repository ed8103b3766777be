"""Compares tensors of two versions, and finds the history of an element across versions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from remanent._state import page_tree
from remanent._store import _native
from remanent._store._native import ArrayLayout
from remanent._store.errors import InvalidError, NoStateError, OutOfBoundsError
from remanent._tensors.conversion import DTYPE, read_page, tensor_of, tensors_of
from remanent._versions.run_versions import Version, did_you_mean, no_version, whole

_Path = str | os.PathLike[str]
Content = tuple[bytes, Any] | NoStateError | OutOfBoundsError

# Integer types by width in bytes, for comparing the bits of elements.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@dataclass(frozen=True)
class Difference:
    """The difference between a tensor in one version and in another. Elements are compared by their bits, so a NaN
    equals itself, and 0.0 differs from -0.0."""

    #: The number of elements that differ.
    elements: int
    #: The index of the first differing element in row-major order, with one entry per dimension.
    first: tuple[int, ...]
    #: The largest absolute difference of two elements. This is `inf` if a difference is infinite, and `nan` if one of
    #: the differing elements is NaN in either version.
    largest: float
    #: The number of differing elements that are NaN in either version.
    nans: int = 0


@dataclass(frozen=True)
class ElementChange:
    """A change of an element of a tensor, with its values before and after. A value is None if the element did not
    exist."""

    #: The Lsn of the batch that made the change. For a run, this is the last batch of the first version with the
    #: change.
    lsn: int
    #: The step of the version, or None if the version does not belong to a run.
    step: int | None
    #: The note of the batch. For a run, this is the name of the version.
    note: str | None
    #: A bool, int, float or complex, or None.
    before: Any
    after: Any


@dataclass(frozen=True)
class Divergence:
    """A tensor that differs between replicas. Listed in `ReplicasDivergedError.tensors`."""

    #: The name of the tensor in a version.
    name: str
    #: The ranks, in groups with equal bytes. The first group contains rank 0.
    groups: list[list[int]]
    #: For each rank, the number of elements that differ from rank 0, or None if the elements were not compared.
    differing: list[int] | None
    #: The flat index of the first element that differs on any rank, or None if the elements were not compared.
    first: int | None


def diff(directory: _Path, before: int | str, after: int | str | None = None) -> dict[str, Difference | None]:
    """Compares two versions in a directory of `save_file`, and returns a `Difference` for each tensor that differs, by
    name.

    The value is None for a tensor that only one version contains, or whose shape or element type differs. Pages that no
    batch changed between the two versions are not read. No lock is taken, so a writer can continue concurrently. For
    runs, use `Checkpointer.diff`.

    :param before: an Lsn, "lsn:N", "snapshot:N" or the name of a version, as for `load_file`.
    :param after: another version; None uses the newest.
    :raises NoStoreError: `directory` contains no store.
    :raises NoStateError: one of the versions does not exist.
    :raises DamagedError: bytes on disk differ from the bytes that were written.

    >>> import torch, remanent.torch
    >>> tensors = {"w": torch.zeros(2, 3), "b": torch.ones(3)}
    >>> first = remanent.torch.save_file(tensors, directory)
    >>> tensors["w"][1, :2] = torch.tensor([0.5, -2.0])
    >>> second = remanent.torch.save_file(tensors, directory)
    >>> remanent.torch.diff(directory, first)
    {'w': Difference(elements=2, first=(1, 0), largest=2.0, nans=0)}
    """
    with _native.View(directory, before) as old, _native.View(directory, after) as new:
        return difference(whole(old), whole(new))


def blame(directory: _Path, name: str, index: int | Sequence[int], *, at: int | str | None = None
          ) -> list[ElementChange]:
    """Returns the changes of an element of a tensor in a directory of `save_file`, oldest first.

    The result covers the versions in the log. Earlier changes are found by comparing the snapshots that are still kept.
    No lock is taken. For runs, use `Checkpointer.blame`.

    :param name: the name of the tensor.
    :param index: an index for each dimension of the tensor, or a single int; negative indices count from the end.
    :param at: the last version to consider, as for `load_file`; None uses the newest.
    :raises NoStateError: the version does not exist, or has no tensor of this name.
    :raises OutOfBoundsError: the tensor has no such element.
    :raises NoStoreError: `directory` contains no store.
    :raises DamagedError: bytes on disk differ from the bytes that were written.

    >>> import torch, remanent.torch
    >>> w = torch.zeros(2, 3)
    >>> for step in range(4):
    ...     w[1, 2] = step // 2
    ...     _ = remanent.torch.save_file({"w": w}, directory, note=f"step {step}")
    >>> [(change.note, change.before, change.after) for change in remanent.torch.blame(directory, "w", (1, 2))]
    [('step 0', None, 0.0), ('step 2', 0.0, 1.0)]
    """
    with _native.View(directory, at) as view:
        key, array = _found(_arrays(whole(view)), name)
        offset, size = _place(array, _checked(index))
        changes = view.blame(key, offset, size)

    def value(content: bytes | None) -> Any:
        return None if content is None else _value(content, array)

    return [ElementChange(change.lsn, None, change.note, value(change.before), value(change.after))
            for change in changes]


def difference(old: _native.View, new: _native.View) -> dict[str, Difference | None]:
    """Returns the differences between the tensors of two versions; see `diff`."""
    before, after = _arrays(old), _arrays(new)
    cpu = torch.device("cpu")
    differ: dict[str, Difference | None] = {name: None for name in before.keys() ^ after.keys()}
    for name in before.keys() & after.keys():
        (old_key, old_array), (new_key, new_array) = before[name], after[name]
        if (old_array.shape, old_array.dtype) != (new_array.shape, new_array.dtype):
            differ[name] = None
            continue
        was, now = old.info(old_key), new.info(new_key)
        is_same_page = (was.page, was.epoch, was.lsn) == (now.page, now.epoch, now.lsn)
        if is_same_page and (old_array.offset, old_array.stride) == (new_array.offset, new_array.stride):
            continue
        left = tensors_of(read_page(old, old_key), (old_array,), cpu)[name]
        right = tensors_of(read_page(new, new_key), (new_array,), cpu)[name]
        found = _compared(left, right)
        if found is not None:
            differ[name] = found
    return dict(sorted(differ.items()))


def _compared(left: torch.Tensor, right: torch.Tensor) -> Difference | None:
    """Compares two tensors of the same shape and element type. Returns None if they are equal."""
    if not left.numel():
        return None
    flat = [each.contiguous().reshape(-1) for each in (left, right)]
    size = left.element_size()
    bits = [each.view(_BITS[size]).view(left.numel(), -1) for each in flat]
    [changed] = (bits[0] != bits[1]).any(dim=1).nonzero(as_tuple=True)
    if not len(changed):
        return None
    first = tuple(int(at) for at in torch.unravel_index(changed[0], left.shape))
    wide = torch.complex128 if left.is_complex() else torch.float64
    apart = [each[changed].to(torch.float32 if each.element_size() == 1 and each.is_floating_point() else wide)
             for each in flat]
    nans = int((apart[0].isnan() | apart[1].isnan()).sum())
    if nans:
        return Difference(len(changed), first, float("nan"), nans)
    # Two different infinities are infinitely far apart; the difference of complex ones may contain a NaN.
    largest = (apart[1] - apart[0]).abs().nan_to_num(nan=torch.inf, posinf=torch.inf).max()
    return Difference(len(changed), first, float(largest))


def element_changes(versions: Sequence[Version], contents: Iterable[Content]) -> list[ElementChange]:
    """Returns the versions in which an element differs from the previous version; see `Checkpointer.blame`.

    :param contents: the result of `content_of` for each version.
    """
    changes: list[ElementChange] = []
    held: bytes | None = None
    before: Any = None
    # The reason why the last version does not contain the element.
    missing: Exception | None = NoStateError("the run has no version yet", remedy="save a version first")
    for version, found in zip(versions, contents, strict=True):
        after: Any = None
        content: bytes | None = None
        if isinstance(found, Exception):
            missing = missing and found
        else:
            content, after, missing = *found, None
        if content != held:
            changes.append(ElementChange(version.lsn, version.step, version.name, before, after))
        held, before = content, after
    if missing is not None:
        raise missing
    return changes


class Layouts:
    """The tensors of the version that was read last. Most versions of a run have the same tensors."""

    def __init__(self) -> None:
        self._of: tuple[int, int, int] | None = None
        self._arrays: dict[str, tuple[str, ArrayLayout]] = {}

    def of(self, view: _native.View) -> dict[str, tuple[str, ArrayLayout]]:
        """Returns, for each tensor of the version, the key of its page and its layout in the page."""
        of = None
        if page_tree.MANIFEST_KEY in view:
            info = view.info(page_tree.MANIFEST_KEY)
            # A page with the same batch has the same bytes.
            of = info.page, info.epoch, info.lsn
        if of is None or of != self._of:
            self._arrays = _arrays(view)
            self._of = of
        return self._arrays


def content_of(view: _native.View, name: str, index: int | Sequence[int], layouts: Layouts) -> Content:
    """Returns the bytes and the value of an element, or the error that states why the version does not contain it."""
    try:
        key, array = _found(layouts.of(whole(view)), name)
        place = _place(array, _checked(index))
    except (NoStateError, OutOfBoundsError) as error:
        return error
    content = view.read(key, *place)
    return content, _value(content, array)


def first_bad(versions: Sequence[Version], good: int, bad: int, is_good: Callable[[Version], bool | None]) -> Version:
    """Returns the first bad version between a good and a later bad one. `good` and `bad` are indices into
    `versions`."""
    if good >= bad:
        raise InvalidError("good: the good version is not older than the bad one",
                           remedy="pass an older version as good, or a later one as bad")
    search = _native.Bisect(good, bad)
    while (number := search.next()) is not None:
        search.tell(number, is_good(versions[number]))
    newest_good, first = search.bounds()
    if first - newest_good > 1:
        steps = f"{versions[newest_good + 1].step} to {versions[first].step}"
        raise NoStateError(f"the first bad version is one of steps {steps}; is_good returned None for the versions in "
                           "between", remedy="return True or False for more versions")
    return versions[first]


def number_of(versions: Sequence[Version], at: int | str | Version | None) -> int:
    """Returns the index of a version in `versions`. The version is given by its step, its name or itself, and None
    selects the newest."""
    kind, value = _native.state_point(at) if isinstance(at, str) else ("step", at)
    if kind == "snapshot":
        raise InvalidError(f"{at!r} is not a version of a run", remedy="pass a step, a name, \"lsn:N\" or a Version")
    for number in range(len(versions) - 1, -1, -1):
        version = versions[number]
        if isinstance(at, Version):
            # On a new rank, the Lsns of earlier versions are those of another rank's batches.
            is_it = (at.step, at.lsn) == (version.step, version.lsn)
        else:
            is_it = at is None or value == {"step": version.step, "lsn": version.lsn, "name": version.name}[kind]
        if is_it:
            return number
    if at is None:
        raise NoStateError("the run has no version yet", remedy="save a version first")
    raise no_version(at, versions)


def _arrays(view: _native.View) -> dict[str, tuple[str, ArrayLayout]]:
    """Returns a dict from the name of each tensor of a version to the key of its page and its layout in the page."""
    return {array.name: (key, array) for key, arrays in page_tree.read_manifest(view).pages.items() for array in arrays}


def _found(arrays: Mapping[str, tuple[str, ArrayLayout]], name: str) -> tuple[str, ArrayLayout]:
    if name not in arrays:
        raise NoStateError(f"the version has no tensor named {name!r}{did_you_mean(name, arrays)}",
                           remedy="use one of the names that `load_file` or `diff` returns")
    return arrays[name]


def _checked(index: int | Sequence[int]) -> tuple[int, ...]:
    return (index,) if isinstance(index, int) else tuple(index)


def _place(array: ArrayLayout, index: tuple[int, ...]) -> tuple[int, int]:
    """Returns the offset of an element in its page and the length of the element, in bytes."""
    shape = array.shape
    if len(index) != len(shape) or any(not -length <= at < length for at, length in zip(index, shape, strict=False)):
        raise OutOfBoundsError(f"{array.name}: index {index} is outside a tensor of shape {shape}")
    stride = page_tree.contiguous_stride(shape) if array.stride is None else array.stride
    size = DTYPE[array.dtype].itemsize
    steps = sum(at % length * step for at, length, step in zip(index, shape, stride, strict=True))
    return array.offset + steps * size, size


def _value(content: bytes, array: ArrayLayout) -> Any:
    return tensor_of(content).view(DTYPE[array.dtype]).item()
