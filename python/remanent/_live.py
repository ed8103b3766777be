"""Live tensors that take what the steps of a publisher changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy
import torch

from remanent import _native
from remanent._errors import NoStateError
from remanent._pages import Array, contiguous_stride
from remanent._tensors import DTYPE

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Bytes that are pinned, to bring those of batches to a GPU.
_PINNED_MAX = 32 << 20
# Bytes of gaps that are read at a time, which takes some twenty times as much of the device's memory.
_GAPS_LEN = 4 << 20
_GAP_LEN_MAX = 5


class Changes(Protocol):
    """What a batch changed. Bytes of an operation come to the device that is named."""

    operations: list[Any]

    def bytes_of(self, operation: Any, name: str, device: torch.device) -> torch.Tensor: ...

    def indices_of(self, operation: Any, device: torch.device) -> Iterator[torch.Tensor]:
        """The elements that a sparse delta changes, in their order, some at a time."""


class Plain:
    """The bytes of each operation by themselves."""

    def __init__(self, batch: _native.FollowedBatch) -> None:
        self.operations: list[Any] = batch.operations

    def bytes_of(self, operation: Any, name: str, device: torch.device) -> torch.Tensor:
        return torch.frombuffer(bytearray(operation[name]), dtype=torch.uint8).to(device)

    def indices_of(self, operation: Any, device: torch.device) -> Iterator[torch.Tensor]:
        yield torch.utils.dlpack.from_dlpack(operation["indices"]).to(device).to(torch.int64)


class Packed:
    """The bytes of all operations as the log has them, brought to a GPU as they are: it reads the indices."""

    def __init__(self, batch: _native.FollowedBatch, uploads: Uploads) -> None:
        self.operations: list[Any] = batch._layout()
        self._bytes = memoryview(batch)
        self._uploads = uploads
        self._on: dict[torch.device, torch.Tensor] = {}
        # Sparse deltas whose indices are read together, in their order, and where each is among them.
        self._sparse = [each for each in self.operations if each["kind"] == "scatter" and _is_short(each)]
        self._numbers = {each["indices"][0]: number for number, each in enumerate(self._sparse)}
        # Indices that were read, by where they are in the bytes.
        self._read: dict[int, torch.Tensor] = {}

    def _payload(self, device: torch.device) -> torch.Tensor:
        if device not in self._on:
            self._on[device] = self._uploads.brought(self._bytes, device)
        return self._on[device]

    def bytes_of(self, operation: Any, name: str, device: torch.device) -> torch.Tensor:
        start, end = operation[name]
        return self._payload(device)[start:end]

    def indices_of(self, operation: Any, device: torch.device) -> Iterator[torch.Tensor]:
        start, end = operation["indices"]
        if not operation["gaps"]:
            stored = self.bytes_of(operation, "indices", device)
            yield stored.view(torch.int32).to(torch.int64) & 0xFFFF_FFFF
        elif _is_short(operation):
            if start not in self._read or self._read[start].device != device:
                self._read_together(self._numbers[start], device)
            yield self._read.pop(start)
        else:
            following: torch.Tensor | int = 0
            while start < end:
                piece = min(start + _GAPS_LEN, end)
                # A gap is of a few bytes, and its last one below 128: none is cut.
                while self._bytes[piece - 1] >= 0x80:
                    piece -= 1
                skipped = _skipped(self._payload(device)[start:piece])
                indices = skipped + torch.arange(len(skipped), device=device) + following
                yield indices
                start, following = piece, indices[-1] + 1

    def _read_together(self, first: int, device: torch.device) -> None:
        """Reads the indices of sparse deltas from this one on: a GPU takes as long for many as for one."""
        together: list[Any] = []
        length = 0
        for operation in self._sparse[first:]:
            start, end = operation["indices"]
            length += end - start
            if together and length > _GAPS_LEN:
                break
            together.append(operation)
        skipped = _skipped(torch.cat([self.bytes_of(operation, "indices", device) for operation in together]))
        places = torch.arange(max(operation["count"] for operation in together), device=device)
        before: torch.Tensor | int = 0
        done = 0
        for operation in together:
            count = operation["count"]
            of_this = skipped[done : done + count]
            self._read[operation["indices"][0]] = of_this - before + places[:count]
            done, before = done + count, of_this[-1]


def _is_short(operation: Any) -> bool:
    """Whether it is a sparse delta with gaps that may be read together with others."""
    return bool(operation["gaps"]) and 0 < operation["indices"][1] - operation["indices"][0] <= _GAPS_LEN


def _skipped(gaps: torch.Tensor) -> torch.Tensor:
    """How many elements are skipped up to each, all together; the bytes are as `FollowedBatch._layout` says.

    >>> import torch
    >>> from remanent._live import _skipped
    >>> _skipped(torch.tensor([3, 0, 0xef, 0x03], dtype=torch.uint8))
    tensor([  3,   3, 498])
    """
    is_last = gaps < 0x80
    # Whether a byte follows another one of its gap, and by how many.
    follows = (~is_last).roll(1)
    shift, more = torch.zeros_like(gaps), follows.to(torch.uint8)
    for _ in range(_GAP_LEN_MAX - 1):
        shift += 7 * more
        more = more.roll(1) * follows
    return ((gaps & 0x7F).to(torch.int64) << shift).cumsum(0)[is_last]


class Uploads:
    """Memory from which a GPU takes bytes at the rate of the bus, kept from one batch to the next."""

    def __init__(self) -> None:
        self._pinned: torch.Tensor | None = None
        self._taken = torch.cuda.Event() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]

    def brought(self, given: memoryview, device: torch.device) -> torch.Tensor:
        """These bytes, on a device; a GPU has them once its current stream comes there."""
        if device.type != "cuda" or self._taken is None:
            return torch.frombuffer(bytearray(given), dtype=torch.uint8).to(device)
        bytes_there = torch.empty(len(given), dtype=torch.uint8, device=device)
        if self._pinned is None or len(self._pinned) < min(len(given), _PINNED_MAX):
            self._pinned = torch.empty(min(2 * len(given), _PINNED_MAX), dtype=torch.uint8, pin_memory=True)
        room = self._pinned.numpy()
        for start in range(0, len(given), len(room)):
            piece = given[start : start + len(room)]
            # The piece before is under way from there.
            self._taken.synchronize()
            room[: len(piece)] = numpy.frombuffer(piece, dtype=numpy.uint8)
            bytes_there[start : start + len(piece)].copy_(self._pinned[: len(piece)], non_blocking=True)
            self._taken.record(torch.cuda.current_stream(device))
        return bytes_there


class Live:
    """Live tensors, as bytes of a publisher's pages."""

    def __init__(self, tensors: dict[str, torch.Tensor], uploads: Uploads) -> None:
        self.tensors = tensors
        self._uploads = uploads

    def changes(self, batch: _native.FollowedBatch) -> Changes:
        """What a batch changed, in the form that suits the tensors' devices."""
        packed = any(tensor.is_cuda for tensor in self.tensors.values())
        return Packed(batch, self._uploads) if packed else Plain(batch)

    def check(self, arrays: list[Array]) -> None:
        for array in arrays:
            tensor = self.tensors.get(array.name)
            if tensor is None or tuple(tensor.shape) != array.shape or tensor.dtype != DTYPE.get(array.dtype):
                own = "none" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}"
                raise NoStateError(f"{array.name}: the publisher has {array.dtype}{list(array.shape)}, the model {own}")
            if not tensor.is_contiguous() or array.stride not in (None, contiguous_stride(array.shape)):
                raise NoStateError(f"{array.name}: weights that are followed lie row by row, on both sides")

    def device_of(self, arrays: list[Array]) -> torch.device:
        """Where the tensor of a page lies; of several, that of the first one."""
        return self.tensors[arrays[0].name].device

    def _flat(self, array: Array) -> torch.Tensor:
        """A live tensor's bytes, to be written."""
        tensor = self.tensors[array.name].detach()
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        start = int(tensor.storage_offset()) * tensor.element_size()
        return flat.set_(tensor.untyped_storage(), start, (tensor.numel() * tensor.element_size(),), (1,))

    def write(self, arrays: list[Array], offset: int, given: torch.Tensor) -> None:
        """Writes bytes of a page, from `offset` on, to its tensors."""
        for array in arrays:
            flat = self._flat(array)
            start, end = max(offset, array.offset), min(offset + len(given), array.offset + flat.numel())
            if start < end:
                flat[start - array.offset : end - array.offset].copy_(given[start - offset : end - offset])

    def scatter(self, arrays: list[Array], changes: Changes, operation: Any) -> None:
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
