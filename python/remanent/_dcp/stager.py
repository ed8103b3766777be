"""A stager for `dcp.async_save` that reuses its host memory from save to save."""

from __future__ import annotations

import concurrent.futures
import copy
import ctypes
import mmap
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager

from remanent._state.run_state import parts_module
from remanent._store._native import Extent
from remanent._store.errors import ClosedError, RefusedError
from remanent._tensors.conversion import PLAIN_TYPES, blocks, tensors_of
from remanent._tensors.copy_streams import CopyStreams, Moment
from remanent._tensors.storages import extents_there

# The alignment of tensors in memory: suits any element type, and is the size of a cache line.
_ALIGN = 64


class Stager(AsyncStager):
    """Copies the state to the host for `dcp.async_save(…, async_stager=Stager())`. Use one stager for all saves of a
    run.

    The copies occupy one piece of host memory, as long as this rank's tensors, which the next save reuses. The memory
    is pinned if there is a GPU. A save that begins while the previous save is being written allocates a second piece.
    Tensors on the host are copied once. Tensors that overlap in memory (tied weights, views) are copied together, and
    their copies overlap in the same way. For a DTensor, the part of this rank is copied. Values that are not tensors
    are copied during the call.

    The options determine when the state may change after `async_save`:

    - By default, immediately: by the host, and by work that is queued on the current streams of the GPUs after the
      call. Copies from GPUs are queued on separate streams, and the current streams wait for them. `async_save` returns
      an `AsyncSaveResponse`.
    - With `wait=True`, also immediately. The call returns after everything is copied, and `async_save` returns a plain
      future, which some trainers expect.
    - With `overlap=True`, once `staging_completion` of the response is done. Everything, including tensors on the host,
      is copied concurrently with training. Wait for it before `optimizer.step`.

    :raises RefusedError: raised by `async_save` if a value cannot be copied. The message names the value. Nothing is
        saved.

    >>> import torch, torch.distributed.checkpoint as dcp
    >>> from remanent.dcp import Stager, StorageReader, StorageWriter
    >>> state, stager = {"w": torch.ones(2, 3), "step": 1}, Stager()
    >>> writer = StorageWriter(directory + "/step-1")
    >>> saving = dcp.async_save(state, storage_writer=writer, async_stager=stager, no_dist=True)
    >>> _ = state["w"].zero_()
    >>> _ = saving.upload_completion.result()
    >>> dcp.load(state, storage_reader=StorageReader(directory + "/step-1"), no_dist=True)
    >>> state["w"].sum().item()
    6.0
    >>> stager.close()
    """

    # `stage` returns a complete copy or a future, so DCP need not synchronize after the call.
    _synchronize_after_execute = False

    def __init__(self, *, wait: bool = False, overlap: bool = False) -> None:
        if wait and overlap:
            raise ValueError("wait and overlap must not both be True")
        self._wait, self._overlap = wait, overlap
        self._streams = CopyStreams()
        self._memory = _Memory()
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "remanent-stage")
        self._last: concurrent.futures.Future[Any] | None = None
        self._is_closed = False
        weakref.finalize(self, self._memory.close).atexit = False

    def __repr__(self) -> str:
        return f"Stager(wait={self._wait}, overlap={self._overlap}{', closed' if self._is_closed else ''})"

    @torch.no_grad()
    def stage(self, state_dict: dict[str, Any]) -> concurrent.futures.Future[dict[str, Any]] | dict[str, Any]:
        """Copies `state_dict` and returns the copy. Without `wait`, returns a future of the copy."""
        if self._is_closed:
            raise ClosedError("the stager is closed")
        # Copies of only one save at a time are in flight.
        self._settle()
        taken = _Taken()
        tree = taken.tree("", state_dict)
        found = extents_there(taken.tensors)
        self._streams.begin({each.device for each in found if each.device.type == "cuda"})
        if self._overlap:
            self._last = self._worker.submit(self._copied, tree, found)
            return self._last
        tensors, moment = self._copy(found)
        moment.hold_back()
        if self._wait:
            return self._arrived(tree, tensors, moment)
        self._last = self._worker.submit(self._arrived, tree, tensors, moment)
        return self._last

    def synchronize_staging(self) -> None:
        """Waits until the copies of the last save are complete."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """Waits for the copies in flight. The memory is freed once the last save is written."""
        self._is_closed = True
        self._settle()
        self._worker.shutdown()
        self._memory.close()

    def _settle(self) -> None:
        """Waits until no copy is in flight, whether the copies succeeded or failed."""
        if self._last is not None:
            concurrent.futures.wait([self._last])
            self._last = None

    @torch.no_grad()
    def _copied(self, tree: Any, found: list[Extent]) -> dict[str, Any]:
        return self._arrived(tree, *self._copy(found))

    def _arrived(self, tree: Any, tensors: dict[str, torch.Tensor], moment: Moment) -> dict[str, Any]:
        moment.wait()
        filled = _filled(tree, tensors)
        assert isinstance(filled, dict)
        return filled

    def _copy(self, found: list[Extent]) -> tuple[dict[str, torch.Tensor], Moment]:
        """Copies tensors. Returns the copies by name, and the moment at which they are complete."""
        copies: dict[str, torch.Tensor] = {}
        # Tensors that share memory are all counted, each with the full length of its span.
        place = self._memory.take(sum(max(each.nbytes, each.end - each.start) + _ALIGN + 16 for each in found))
        try:
            with self._streams.entered():
                for block in blocks(found, on_host=False):
                    memory = place(block.nbytes)
                    if block.nbytes:
                        self._streams.copy(memory, block.data)
                    copies |= tensors_of(memory, block.arrays, torch.device("cpu"))
        except BaseException:
            # The memory is reused by the next save.
            self._streams.synchronize()
            raise
        return copies, self._streams.moment()


class _Slot:
    """A placeholder for a tensor in a tree. `made` converts the copy of the tensor named `name`."""

    def __init__(self, name: str, made: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.name, self.made = name, made


class _Taken:
    """Separates a state into its tensors, by name, and a tree of all other values."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._parts = parts_module()

    def tree(self, path: str, value: Any) -> Any:
        """Returns a copy of `value` with a `_Slot` in place of each tensor."""
        kind = type(value)
        name = path.removeprefix("/")
        if kind is dict or kind is OrderedDict:
            return kind((key, self.tree(f"{path}/{key}", each)) for key, each in value.items())
        if _is_sequence(value):
            return _like(value, [self.tree(f"{path}/{at}", each) for at, each in enumerate(value)])
        if kind in PLAIN_TYPES:
            return _Slot(self._take(name, value), lambda copied: copied)
        if self._parts is not None and kind is self._parts.DTensor:
            return _Slot(self._take(name, self._parts.local(value)),
                         lambda copied: self._parts.with_local(value, copied))
        try:
            return copy.deepcopy(value)
        except Exception as error:
            raise RefusedError(f"{name}: a {kind.__name__} cannot be copied: {error}") from error

    def _take(self, name: str, tensor: torch.Tensor) -> str:
        """Adds a tensor and returns the name of its slot. The name is extended if another tensor has the same path."""
        while name in self.tensors:
            name += "~"
        self.tensors[name] = tensor
        return name


def _filled(tree: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Returns the tree with the copies of tensors in place of its slots."""
    if isinstance(tree, _Slot):
        return tree.made(tensors[tree.name])
    kind = type(tree)
    if kind is dict or kind is OrderedDict:
        return kind((key, _filled(each, tensors)) for key, each in tree.items())
    if _is_sequence(tree):
        return _like(tree, [_filled(each, tensors) for each in tree])
    return tree


def _is_sequence(value: Any) -> bool:
    kind = type(value)
    return kind is list or kind is tuple or isinstance(value, tuple) and hasattr(kind, "_fields")


def _like(value: Any, made: list[Any]) -> Any:
    """Converts a list to a sequence of the same type as `value`."""
    kind = type(value)
    return made if kind is list else tuple(made) if kind is tuple else kind(*made)


class _Memory:
    """Allocates host memory for copies in one piece per save, and reuses pieces that are free."""

    def __init__(self) -> None:
        # Unused pieces. The garbage collector returns them, in any thread, so there is no lock.
        self._free: deque[_Piece] = deque()
        self._is_closed = False

    def take(self, size: int) -> Callable[[int], torch.Tensor]:
        """Reserves a piece of memory, and returns a function that allocates tensors of a number of bytes from that
        piece.

        The piece is free again when the last of these tensors and their views is deleted.
        """
        piece = self._piece(max(size, 1))
        lease = (ctypes.c_ubyte * len(piece.memory)).from_buffer(piece.memory)
        weakref.finalize(lease, self._give_back, piece).atexit = False
        given = 0

        def place(nbytes: int) -> torch.Tensor:
            nonlocal given
            if not nbytes:
                return torch.empty(0, dtype=torch.uint8)
            start, given = given, given + (nbytes + _ALIGN - 1) // _ALIGN * _ALIGN
            # An inference tensor could not be written to outside of inference mode.
            with torch.inference_mode(False):
                return torch.frombuffer(lease, dtype=torch.uint8, count=nbytes, offset=start)

        return place

    def close(self) -> None:
        """Frees the unused pieces now, and each other piece when its last tensor is deleted."""
        self._is_closed = True
        self._drop_free()

    def _piece(self, size: int) -> _Piece:
        while (piece := self._taken()) is not None:
            if len(piece.memory) >= size:
                return piece
            # The piece is too short, because the state has become larger.
            piece.end()
        return _Piece(size)

    def _taken(self) -> _Piece | None:
        try:
            return self._free.popleft()
        except IndexError:
            return None

    def _give_back(self, piece: _Piece) -> None:
        self._free.append(piece)
        if self._is_closed:
            self._drop_free()

    def _drop_free(self) -> None:
        while (piece := self._taken()) is not None:
            piece.end()


class _Piece:
    """A piece of host memory, pinned if there is a GPU."""

    def __init__(self, size: int) -> None:
        self.memory = mmap.mmap(-1, size)
        self._pinned: int | None = None
        if torch.cuda.is_available():
            held = ctypes.c_ubyte.from_buffer(self.memory)
            address = ctypes.addressof(held)
            # If pinning fails, copies take longer but remain correct.
            if int(torch.cuda.cudart().cudaHostRegister(address, size, 0)) == 0:  # type: ignore[no-untyped-call]
                self._pinned = address

    def end(self) -> None:
        """Unpins the piece. No copy may use the piece any more."""
        if self._pinned is not None:
            torch.cuda.cudart().cudaHostUnregister(self._pinned)  # type: ignore[no-untyped-call]
            self._pinned = None
