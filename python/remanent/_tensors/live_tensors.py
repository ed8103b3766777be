"""Writes the changes of a publisher's steps into live tensors."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy
import torch

from remanent._state.page_tree import Arrays, contiguous_stride
from remanent._store import _native
from remanent._store._native import ArrayLayout
from remanent._store.errors import NoStateError
from remanent._tensors.conversion import DTYPE, tensor_of

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The largest number of bytes of host memory that are pinned for uploads.
_PINNED_MAX = 32 << 20
# A longer batch is uploaded one operation at a time, because the whole batch would need as much GPU memory.
_PACKED_MAX = 256 << 20
# The bytes of gaps that are decoded at a time, which takes about thirty times as much device memory.
_GAPS_LEN = 4 << 20
_GAP_LEN_MAX = 5
# The bytes of live tensors per sum, so that the sums need a thousandth of the memory of the tensors.
_ROW_LEN = 8 << 10


# The device, address, element type, shape and strides of a tensor.
Place = tuple[torch.device, int, torch.dtype, tuple[int, ...], tuple[int, ...]]


class Changes(Protocol):
    """The changes of a batch. Both methods return tensors on `device`."""

    operations: Sequence[Any]

    def bytes_of(self, operation: Any, name: str, device: torch.device) -> torch.Tensor: ...

    def indices_of(self, operation: Any, device: torch.device) -> Iterator[torch.Tensor]:
        """Yields the indices of the elements that a sparse delta changes, in order and in pieces."""


class Plain:
    """Changes whose bytes are copied to a device separately for each operation."""

    def __init__(self, batch: _native.FollowedBatch) -> None:
        self.operations: Sequence[Any] = batch.operations

    def bytes_of(self, operation: Any, name: str, device: torch.device) -> torch.Tensor:
        return tensor_of(operation[name]).to(device)

    def indices_of(self, operation: Any, device: torch.device) -> Iterator[torch.Tensor]:
        yield torch.utils.dlpack.from_dlpack(operation["indices"]).to(device).to(torch.int64)


class Packed:
    """Changes whose bytes are uploaded to a GPU together, as they are in the log. The GPU decodes the indices.

    :param device: the GPU. The bytes of operations for other devices are copied separately.
    """

    def __init__(self, batch: _native.FollowedBatch, device: torch.device, uploads: Uploads) -> None:
        self.operations: Sequence[Any] = batch._layout()
        for number, operation in enumerate(self.operations):
            operation["number"] = number
        self._batch = batch
        self._bytes = memoryview(batch)
        self._device = device
        self._payload = uploads.brought(self._bytes, device)
        # Sparse deltas whose indices are decoded together, in order, and the position of each among them.
        self._sparse = [each for each in self.operations if each["kind"] == "scatter" and _is_short(each)]
        self._numbers = {each["number"]: at for at, each in enumerate(self._sparse)}
        # Decoded indices, by the operation's number.
        self._read: dict[int, torch.Tensor] = {}

    @functools.cached_property
    def _plain(self) -> Plain:
        return Plain(self._batch)

    def bytes_of(self, operation: Any, name: str, device: torch.device) -> torch.Tensor:
        start, end = operation[name]
        if device != self._device:
            return tensor_of(self._bytes[start:end]).to(device)
        return self._payload[start:end]

    def indices_of(self, operation: Any, device: torch.device) -> Iterator[torch.Tensor]:
        start, end = operation["indices"]
        number = operation["number"]
        if device != self._device:
            yield from self._plain.indices_of(self._plain.operations[number], device)
        elif not operation["gaps"]:
            yield self._payload[start:end].view(torch.int32).to(torch.int64) & 0xFFFF_FFFF
        elif _is_short(operation):
            if number not in self._read:
                self._read_together(self._numbers[number])
            yield self._read.pop(number)
        else:
            following: torch.Tensor | int = 0
            while start < end:
                piece = min(start + _GAPS_LEN, end)
                # The last byte of a gap is below 128, so this never splits one.
                while self._bytes[piece - 1] >= 0x80:
                    piece -= 1
                skipped = _skipped(self._payload[start:piece])
                indices = skipped + torch.arange(len(skipped), device=device) + following
                yield indices
                start, following = piece, indices[-1] + 1

    def _read_together(self, first: int) -> None:
        """Decodes the indices of several sparse deltas at once, from number `first` on. A GPU decodes many
        deltas in the time of one."""
        together: list[Any] = []
        length = 0
        for operation in self._sparse[first:]:
            start, end = operation["indices"]
            length += end - start
            if together and length > _GAPS_LEN:
                break
            together.append(operation)
        skipped = _skipped(torch.cat([self._payload[slice(*operation["indices"])] for operation in together]))
        places = torch.arange(max(operation["count"] for operation in together), device=self._device)
        before: torch.Tensor | int = 0
        done = 0
        for operation in together:
            count = operation["count"]
            of_this = skipped[done : done + count]
            self._read[operation["number"]] = of_this - before + places[:count]
            done, before = done + count, of_this[-1]


def _reads_gaps(device: torch.device) -> bool:
    """Returns whether a device decodes packed indices faster than the host does."""
    return device.type == "cuda"


def _is_short(operation: Any) -> bool:
    """Returns whether the operation is a sparse delta that can be decoded together with others."""
    return bool(operation["gaps"]) and 0 < operation["indices"][1] - operation["indices"][0] <= _GAPS_LEN


def _skipped(gaps: torch.Tensor) -> torch.Tensor:
    """Returns, for each gap, the sum of all gaps up to it. `gaps` contains the encoding of `FollowedBatch._layout`.

    >>> import torch
    >>> from remanent._tensors.live_tensors import _skipped
    >>> _skipped(torch.tensor([3, 0, 0xef, 0x03], dtype=torch.uint8))
    tensor([  3,   3, 498])
    """
    is_last = gaps < 0x80
    # Whether a byte follows another byte of the same gap, and the number of preceding ones.
    follows = (~is_last).roll(1)
    shift, more = torch.zeros_like(gaps), follows.to(torch.uint8)
    for _ in range(_GAP_LEN_MAX - 1):
        shift += 7 * more
        more = more.roll(1) * follows
    return ((gaps & 0x7F).to(torch.int64) << shift).cumsum(0)[is_last]


class Uploads:
    """Uploads bytes to GPUs through pinned memory that is reused from batch to batch."""

    def __init__(self) -> None:
        self._pinned: torch.Tensor | None = None
        # The event that follows the last copy from the pinned memory.
        self._taken: Any = None

    def brought(self, given: memoryview, device: torch.device) -> torch.Tensor:
        """Returns the bytes on a device. On a GPU, they can be used by work on the current stream."""
        if device.type != "cuda":
            return tensor_of(given).to(device)
        bytes_there = torch.empty(len(given), dtype=torch.uint8, device=device)
        if self._pinned is None or len(self._pinned) < min(len(given), _PINNED_MAX):
            self._pinned = torch.empty(min(2 * len(given), _PINNED_MAX), dtype=torch.uint8, pin_memory=True)
        room = self._pinned.numpy()
        for start in range(0, len(given), len(room)):
            piece = given[start : start + len(room)]
            if self._taken is not None:
                self._taken.synchronize()
            room[: len(piece)] = numpy.frombuffer(piece, dtype=numpy.uint8)
            bytes_there[start : start + len(piece)].copy_(self._pinned[: len(piece)], non_blocking=True)
            # A new event: an event belongs to one device.
            self._taken = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._taken.record(torch.cuda.current_stream(device))
        return bytes_there


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a contiguous tensor as a view of its storage."""
    tensor = tensor.detach()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    start = int(tensor.storage_offset()) * tensor.element_size()
    return flat.set_(tensor.untyped_storage(), start, (tensor.numel() * tensor.element_size(),), (1,))


def _sums_of(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the 64-bit sum of each row of `_ROW_LEN` bytes, and the sum of the remaining bytes."""
    whole = len(flat) // _ROW_LEN * _ROW_LEN
    # The widest integers to which the bytes are aligned.
    width = math.gcd(8, int(flat.storage_offset()))
    yield flat[:whole].view(_INTEGERS[width]).view(-1, _ROW_LEN // width).sum(1, dtype=torch.int64)
    yield flat[whole:].sum(dtype=torch.int64).view(1)


class Live:
    """Live tensors, accessed through the byte offsets of a publisher's pages."""

    def __init__(self, tensors: dict[str, torch.Tensor], uploads: Uploads) -> None:
        self.tensors = tensors
        self._uploads = uploads

    def changes(self, batch: _native.FollowedBatch) -> Changes:
        """Returns the changes of a batch, packed for the GPU with most of the tensors, or plain if no tensor is on a
        GPU or the batch is too long."""
        by_device = collections.Counter(tensor.device for tensor in self.tensors.values() if _reads_gaps(tensor.device))
        if not by_device or len(memoryview(batch)) > _PACKED_MAX:
            return Plain(batch)
        [(device, _)] = by_device.most_common(1)
        return Packed(batch, device, self._uploads)

    def check(self, arrays: Arrays) -> None:
        for array in arrays:
            tensor = self.tensors.get(array.name)
            if tensor is None or tuple(tensor.shape) != array.shape or tensor.dtype != DTYPE.get(array.dtype):
                own = "none" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}"
                raise NoStateError(f"{array.name}: the publisher has {array.dtype}{list(array.shape)}, but the model has "
                                   f"{own}", remedy="use a model with the publisher's names, shapes and element types")
            if not tensor.is_contiguous() or array.stride not in (None, contiguous_stride(array.shape)):
                raise NoStateError(f"{array.name}: the tensor is not contiguous in the publisher or in the model",
                                   remedy="use contiguous tensors on both sides")

    def places(self, names: Iterable[str]) -> list[Place | None]:
        """Returns the device, address, element type, shape and strides of each tensor, or None for a tensor that the
        model lacks.

        :raises NoStateError: the memory of a tensor was freed, for example by an engine in sleep mode.
        """
        found: list[Place | None] = []
        for name in names:
            tensor = self.tensors.get(name)
            if tensor is None:
                found.append(None)
                continue
            start = int(tensor.storage_offset()) * tensor.element_size()
            if start + tensor.nbytes > tensor.untyped_storage().nbytes():
                raise NoStateError(f"{name}: the tensor's storage was freed or shortened",
                                   remedy="allocate the model's memory again, then call apply_to again")
            found.append((tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()))
        return found

    def sums(self, names: Iterable[str]) -> dict[torch.device, torch.Tensor]:
        """Returns sums of the bytes in these tensors, by device. Each byte is read once, in place.

        Sums detect memory that was cleared, discarded or filled with other weights. Sums do not detect 8-byte words
        that were swapped within a row of 8 KiB.
        """
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in map(self.tensors.__getitem__, names):
            if tensor.numel():
                by_device.setdefault(tensor.device, []).extend(_sums_of(_bytes_of(tensor)))
        return {device: torch.cat(sums) for device, sums in by_device.items()}

    def device_of(self, arrays: Arrays) -> torch.device:
        """Returns the device of the first tensor of a page."""
        return self.tensors[arrays[0].name].device

    def _flat(self, array: ArrayLayout) -> torch.Tensor:
        return _bytes_of(self.tensors[array.name])

    def write(self, arrays: Arrays, offset: int, given: torch.Tensor) -> None:
        """Writes bytes of a page, beginning at `offset`, to the page's tensors."""
        for array in arrays:
            flat = self._flat(array)
            start, end = max(offset, array.offset), min(offset + len(given), array.offset + flat.numel())
            if start < end:
                flat[start - array.offset : end - array.offset].copy_(given[start - offset : end - offset])

    def scatter(self, arrays: Arrays, changes: Changes, operation: Any) -> None:
        """Writes the elements of a sparse delta to the page's tensors."""
        width, device = operation["width"], self.device_of(arrays)
        values = changes.bytes_of(operation, "values", device)
        values = values.view(_INTEGERS[width]) if width in _INTEGERS else values.view(-1, width)
        done = 0
        for indices in changes.indices_of(operation, device):
            rows = values[done : done + len(indices)]
            done += len(indices)
            for array in arrays:
                flat = self._flat(array)
                whole = flat.view(_INTEGERS[width]) if width in _INTEGERS else flat.view(-1, width)
                where, of_array = indices + (operation["base"] - array.offset) // width, rows
                if len(arrays) > 1:
                    inside = (where >= 0) & (where < len(whole))
                    where, of_array = where[inside], rows[inside]
                whole.index_copy_(0, where.to(flat.device), of_array.to(flat.device))
