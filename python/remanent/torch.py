"""Tensors of torch that survive: files of tensors with versions, and checkpoints of a training run.

    save_file(tensors, directory, note=…)      load_file(directory, device=…, at=…)
    Checkpointer(directory, model, optimizer, …).save(step)      .restore(at=…)

Both keep state in a store: durable, in versions, with only the changed elements of a version logged, and proven by
checksums on the way back. Nothing is pickled: tensors are pages, all other values are typed, and what cannot be
stored faithfully is refused by its name. What is saved lies on disk, and in no memory beside the tensors themselves.
`save_file` holds copies of those on a GPU, and of those that are not contiguous, until all is written.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from remanent import _native, _pages
from remanent._errors import ClosedError, InvalidError, NoStateError, OvertakenError, RefusedError
from remanent._pages import Array, Block
from remanent._progress import Bar
from remanent._room import Room, WriterEndedError

__all__ = ["Checkpointer", "Saved", "Version", "load_file", "save_file"]

_Path = str | os.PathLike[str]

# Names of kinds as the store has them, for every kind of torch's that a store can hold.
_SHORT: dict[torch.dtype, str] = {}
for _name in ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16",
              "float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
              "float8_e5m2fnuz", "float8_e8m0fnu"):
    if hasattr(torch, _name):
        _SHORT[getattr(torch, _name)] = _native.dtype(_name)[1]
_DTYPE = {short: dtype for dtype, short in _SHORT.items()}


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, if it is one whose elements lie in one storage as they are; else it is refused by its name."""
    kind = type(tensor)
    if kind not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise RefusedError(f"{name}: a {kind.__name__} is more than its elements: save what it is made of")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise RefusedError(f"{name}: a tensor of layout {tensor.layout} cannot be stored: make it dense first")
    if tensor.device.type == "meta":
        raise RefusedError(f"{name}: a tensor on the meta device has no elements")
    if tensor.dtype not in _SHORT:
        raise RefusedError(f"{name}: elements of {tensor.dtype} cannot be stored")
    tensor = tensor.detach()
    return tensor.resolve_conj().resolve_neg()


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of the storage that the tensor uses, and the end of its last one."""
    start = int(tensor.storage_offset())
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    last = start + sum((int(size) - 1) * int(stride) for size, stride in dims)
    return start * tensor.element_size(), (last + 1) * tensor.element_size()


@dataclass
class _Group:
    """Tensors that share memory, from byte `start` of their storage to byte `end`."""

    start: int
    end: int
    tensors: list[tuple[str, torch.Tensor]]


def _blocks(tensors: Mapping[str, torch.Tensor], *, on_host: bool = True) -> Iterator[Block]:
    """The pages that hold these tensors: tensors that overlap in memory share one, so that they share memory again.

    Their bytes lie on the host, or where the tensors are.
    """
    by_storage: dict[tuple[str, int], list[tuple[str, torch.Tensor]]] = {}
    alone: list[tuple[str, torch.Tensor]] = []
    for name, given in tensors.items():
        tensor = _plain(name, given)
        if tensor.numel() == 0:
            alone.append((name, tensor))
            continue
        where = (str(tensor.device), tensor.untyped_storage().data_ptr())
        by_storage.setdefault(where, []).append((name, tensor))
    for name, tensor in alone:
        yield Block([Array(name, _SHORT[tensor.dtype], tuple(tensor.shape))], b"", 0)
    for shared in by_storage.values():
        groups: list[_Group] = []
        for name, tensor in sorted(shared, key=lambda item: _extent(item[1])):
            start, end = _extent(tensor)
            if groups and start < groups[-1].end:
                groups[-1].end = max(end, groups[-1].end)
                groups[-1].tensors.append((name, tensor))
            else:
                groups.append(_Group(start, end, [(name, tensor)]))
        for group in groups:
            yield _block(group, on_host)


def _block(group: _Group, on_host: bool) -> Block:
    name, tensor = group.tensors[0]
    if len(group.tensors) == 1:
        holes = group.end - group.start > tensor.numel() * tensor.element_size()
        if holes or tensor.is_contiguous():
            # A tensor that uses little of its extent is stored without the rest, and comes back contiguous.
            bytes_ = _bytes_of(tensor.contiguous(), on_host)
            return Block([Array(name, _SHORT[tensor.dtype], tuple(tensor.shape))], bytes_, bytes_.numel())
    # A boundary of the widest elements, so that each tensor begins at a whole element of its own.
    start = group.start - group.start % 16
    arrays = []
    # In the order of names, so that the page is found again whichever tensor comes first in memory.
    for name, each in sorted(group.tensors, key=lambda item: item[0]):
        offset = int(each.storage_offset()) * each.element_size() - start
        arrays.append(Array(name, _SHORT[each.dtype], tuple(each.shape), tuple(each.stride()), offset))
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    whole.set_(tensor.untyped_storage(), start, (group.end - start,), (1,))
    return Block(arrays, whole.cpu() if on_host else whole, group.end - start)


def _bytes_of(tensor: torch.Tensor, on_host: bool = True) -> torch.Tensor:
    """A contiguous tensor's bytes, on the host or where they are."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    start = tensor.storage_offset() * tensor.element_size()
    flat.set_(tensor.untyped_storage(), start, (tensor.numel() * tensor.element_size(),), (1,))
    return flat.cpu() if on_host else flat


def _read_page(reader: _native.Reader, key: str) -> torch.Tensor:
    page = torch.empty(reader.info(key).length, dtype=torch.uint8)
    if page.numel():
        reader.read_into(key, page)
    return page


def _read_pages(reader: _native.Reader, pages: Mapping[str, list[Array]]) -> Iterator[tuple[torch.Tensor, list[Array]]]:
    """The bytes of pages, in their order: read by several threads, a few pages ahead of the caller."""
    threads = min(_THREADS_MAX, os.cpu_count() or 1)
    coming: deque[tuple[concurrent.futures.Future[torch.Tensor], list[Array]]] = deque()
    with concurrent.futures.ThreadPoolExecutor(threads, "remanent-load") as pool:
        try:
            for key, arrays in pages.items():
                coming.append((pool.submit(_read_page, reader, key), arrays))
                if len(coming) > threads:
                    read, of = coming.popleft()
                    yield read.result(), of
            while coming:
                read, of = coming.popleft()
                yield read.result(), of
        finally:
            for read, _ in coming:
                read.cancel()


def _tensors_of(page: torch.Tensor, arrays: list[Array], device: torch.device) -> dict[str, torch.Tensor]:
    page = page.to(device)
    loaded = {}
    for array in arrays:
        dtype = _DTYPE.get(array.dtype)
        if dtype is None:
            raise RefusedError(f"{array.name}: this torch has no elements of {array.dtype}")
        tensor = torch.empty(0, dtype=dtype, device=device)
        stride = _pages.contiguous_stride(array.shape) if array.stride is None else array.stride
        # Of one storage, so that tensors that shared memory share it again.
        tensor.set_(page.untyped_storage(), array.offset // tensor.element_size(), array.shape, stride)
        loaded[array.name] = tensor
    return loaded


def save_file(tensors: Mapping[str, torch.Tensor], directory: _Path, *, note: str | None = None,
              name: str | None = None, durable: bool = True, progress: bool | None = None) -> int:
    """Makes `tensors` the newest version in `directory`, whole or not at all; returns its Lsn.

    The directory is a store, made if there is none. Only what differs from the version before is logged; tensors that
    are gone are deleted. Tensors that overlap in memory (tied weights, views) are stored once and overlap again when
    they are loaded. Any shape and stride, empty and scalar tensors, all kinds of elements up to `complex128`.

    :param note: a remark of up to 64 KiB that stays with the version in the log.
    :param name: a name of 1 to 64 bytes, which keeps the version until it is given up (`Store.prune`). Versions
        without a name can be loaded as long as the log from a kept snapshot on is there.
    :param durable: whether the call returns once the version survives a power cut; else once it survives the death
        of the process.
    :param progress: False draws no bar; None draws one for long work if standard error is a terminal and tqdm is
        installed.
    :raises RefusedError: for a tensor that is not plain: sparse, quantized, a subclass such as DTensor. Nothing is
        saved.
    :raises LockedError: if another process has the store open.

    >>> import torch, remanent.torch
    >>> tied = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    >>> first = remanent.torch.save_file({"embed": tied, "head": tied.T}, directory, note="step 1")
    >>> tied[0, 0] = 7
    >>> second = remanent.torch.save_file({"embed": tied, "head": tied.T}, directory, note="step 2")
    >>> remanent.torch.load_file(directory)["head"][0, 0]
    tensor(7., dtype=torch.bfloat16)
    >>> remanent.torch.load_file(directory, at=first)["embed"][0, 0]
    tensor(0., dtype=torch.bfloat16)
    """
    for given, tensor in tensors.items():
        _plain(given, tensor)
    # Of tensors that share memory each counts here, so the bar may end early.
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    with Bar(total, "saving", progress) as bar:
        blocks = _counted(_blocks(tensors), bar)
        return _pages.save(directory, blocks, note=note, name=name, durable=durable)


def _counted(blocks: Iterator[Block], bar: Bar) -> Iterator[Block]:
    for block in blocks:
        yield block
        # The next one is asked for once this one is in the batch.
        bar.add(block.nbytes)


def load_file(directory: _Path, *, device: str | torch.device = "cpu",
              at: int | str | None = None, progress: bool | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a version in `directory`, by name; each byte is proven by checksums before it is returned.

    Takes no lock: a writer may go on meanwhile, and the tensors are all of one version. Loads what `save_file` and
    `remanent import` saved.

    :param device: where the tensors are to lie.
    :param at: the version: an Lsn, "lsn:N", "snapshot:N" or "name:S"; the newest if None.
    :param progress: as for `save_file`.
    :raises NoStoreError: if there is no store.
    :raises NoStateError: if it holds no tensors, or the version is not kept.
    :raises DamagedError: if bytes on disk are not what was written.

    >>> import torch, remanent.torch
    >>> lsn = remanent.torch.save_file({"w": torch.ones(2, 2), "empty": torch.empty(0, 3)}, directory, name="start")
    >>> loaded = remanent.torch.load_file(directory, at="name:start")
    >>> {name: tuple(tensor.shape) for name, tensor in sorted(loaded.items())}
    {'empty': (0, 3), 'w': (2, 2)}
    """
    where = torch.device(device)
    with _native.View(directory, at) as view:
        _whole(view)
        loaded: dict[str, torch.Tensor] = {}
        pages = _pages.read_manifest(view).pages
        with Bar(sum(view.info(key).length for key in pages), "loading", progress) as bar:
            for page, arrays in _read_pages(view, pages):
                loaded |= _tensors_of(page, arrays, where)
                bar.add(page.numel())
        return loaded


@dataclass(frozen=True)
class Version:
    """A version of a run that is kept: its step, its batch, its name if it was given one, its time in seconds."""

    step: int
    lsn: int
    name: str | None
    created: float


class Saved:
    """A save that may still be under way: its state is captured, and becomes durable in the background."""

    def __init__(self, step: int, done: concurrent.futures.Future[int]) -> None:
        self.step = step
        self._done = done

    @property
    def lsn(self) -> int:
        """The version's batch; waits until it is durable."""
        self.wait()
        return self._done.result()

    def done(self) -> bool:
        """Whether the version is durable and kept."""
        return self._done.done() and self._done.exception() is None

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the version is durable and kept, up to `timeout` seconds; says whether it is."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            # In slices, so that Ctrl-C ends the wait.
            left = 0.1 if until is None else max(0.0, min(0.1, until - time.monotonic()))
            if concurrent.futures.wait([self._done], left).done:
                # Raises what the save failed with.
                self._done.result()
                return True
            if until is not None and time.monotonic() >= until:
                return False

    def __repr__(self) -> str:
        return f"Saved(step={self.step}, done={self._done.done()})"


# Threads that read for one load.
_THREADS_MAX = 4
# How often versions are listed anew while files are going.
_LIST_TRIES = 5
# Batches of a save that are written at a time.
_WRITERS = min(4, os.cpu_count() or 1)
_STEP = "step "
# The entry of the root that stands while a save has written a part of its version.
_SAVING = "saving"


class Checkpointer:
    """Keeps the state of a training run: model, optimizer, scheduler, random numbers, and what else has a state.

    `save(step)` makes the state the newest version, whole or not at all; only what changed is written. `restore()`
    puts a version back into the objects that are there. A process that is killed at any moment finds the last version
    whose save had returned, or the one that was under way, and never a mix. A save takes some megabytes of host memory
    beside the tensors, however many they are; one that does not wait, up to `room` bytes.

    :param directory: the store of the run; made if there is none. One process at a time has it open.
    :param model: a module, or anything with `state_dict` and `load_state_dict`.
    :param extra: more of those by name; or dicts of plain values, such as a loader's position, which `restore` fills.
    :param rng: whether the random states of Python, NumPy (if it is imported), torch and all GPUs are kept.
    :param keep: how many of the newest versions without a name are kept.
    :param keep_for: seconds for which versions without a name are kept beyond that.
    :param room: bytes of host memory for saves that do not wait: what fits is copied there, and the call returns while
        it is being written. Of a longer state the rest is written first.
    :param options: options of `Store`, such as `log_io`.

    Values are tensors as in `save_file`, None, bool, int, float, complex, str, bytes, list, tuple, dict, and NumPy's
    arrays; `torch.dtype`, `torch.device` and `torch.Size`. All else is refused by its name, before anything is saved.

    >>> import torch, remanent.torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    >>> run = remanent.torch.Checkpointer(directory, model, optimizer, extra={"loader": {"position": 0}})
    >>> def train():
    ...     optimizer.zero_grad()
    ...     loss = model(torch.randn(8, 2)).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     return loss.item()
    >>> _ = train(), run.save(1, name="start")
    >>> losses = [train() for step in range(3)]
    >>> run.restore(at="start")
    1
    >>> losses == [train() for step in range(3)]
    True
    >>> run.close()
    """

    def __init__(self, directory: _Path, model: Any = None, optimizer: Any = None, scheduler: Any = None, *,
                 extra: Mapping[str, Any] | None = None, rng: bool = True, keep: int = 2,
                 keep_for: float | None = None, room: int = 256 << 20, **options: Any) -> None:
        if keep < 1:
            raise InvalidError("keep: at least one version must be kept")
        if room < 0:
            raise InvalidError("room: that is a number of bytes")
        self._parts: dict[str, Any] = {}
        for name, part in (("model", model), ("optimizer", optimizer), ("scheduler", scheduler)):
            if part is not None:
                self._parts[name] = part
        for name, part in (extra or {}).items():
            if name in self._parts or name == "rng":
                raise InvalidError(f"extra: {name!r} is taken")
            self._parts[name] = part
        for name, part in self._parts.items():
            has_state = hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
            if not (has_state or isinstance(part, MutableMapping)):
                kind = type(part).__name__
                raise RefusedError(f"{name}: a {kind} has no state_dict and load_state_dict, and is no dict")
        self._rng, self._keep, self._keep_for = rng, keep, keep_for
        self._directory = directory
        # Each save makes a snapshot of its own: no others are needed.
        own = {"device": "host", "snapshot_log_bytes": None, "snapshot_interval": None, "snapshots_kept": 1}
        self.store = _native.Store(directory, **{**own, **options})
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "remanent-checkpoint")
        self._writers = concurrent.futures.ThreadPoolExecutor(_WRITERS, "remanent-checkpoint-write")
        self._last: Saved | None = None
        self._room = Room(room)

    # Saving.

    def save(self, step: int, name: str | None = None, *, note: str | None = None, wait: bool = True) -> Saved:
        """Makes the present state the version of `step`.

        A save while the one before is under way waits for that first. The state may change once this returns.

        :param name: keeps the version until `give_up(name)`; 1 to 64 bytes, not beginning with "step ".
        :param wait: whether to return only once the version is durable. Else the call returns once the state is
            copied, and `Saved.wait` says when the version is durable; a process that is killed before that finds the
            version before.
        :raises RefusedError: for what cannot be stored, by its name. Nothing is saved.
        """
        if name is not None and (name.startswith(_STEP) or not name):
            raise InvalidError(f"name: {name!r} is empty, or a name for steps without one")
        self._finish()
        if name is not None and any(info.name == name for info in self.store.snapshots()):
            raise InvalidError(f"name: another version is named {name!r}", remedy="give it up first")
        tensors: dict[str, torch.Tensor] = {}
        tree = _pages.flatten("", self._state(), _Capture(tensors))
        for path, tensor in tensors.items():
            _plain(path, tensor)
        note = note or f"step {step}"
        # Of tensors that share memory each counts here.
        self._room.begin(sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()))
        done = self._worker.submit(self._write_and_keep, step, name, note, tree)
        try:
            # Where the call waits anyway, bytes on the host are read where they are.
            self._room.send(_blocks(tensors, on_host=False), copied=not wait)
        except WriterEndedError:
            # Raises what it ended with.
            done.result()
            raise
        except BaseException:
            self._room.give_up()
            concurrent.futures.wait([done])
            raise
        self._last = saved = Saved(step, done)
        if wait:
            try:
                saved.wait()
            finally:
                # After Ctrl-C, too: the bytes are read where they are, and may change once this returns.
                concurrent.futures.wait([done])
        return saved

    def _write(self, step: int, note: str, tree: Any) -> _native.Ticket:
        """Writes a version from the room, by several batches if it is long, some of them at a time."""
        self._make_way()
        room, batch = self._room, self.store.batch(note=note)
        running: deque[tuple[concurrent.futures.Future[Any], int]] = deque()

        def finish() -> None:
            committed, count = running.popleft()
            committed.result()
            room.free(count)

        def flush() -> _native.Batch:
            # From here to the last batch the store is in between two versions, and says so.
            nonlocal batch
            batch.set_root(_SAVING, step)
            running.append((self._writers.submit(self.store.commit, batch, "logged"), room.take()))
            while len(running) > _WRITERS or running and room.waits:
                finish()
            batch = self.store.batch(note=note)
            return batch

        try:
            # Each version is a snapshot, for which a page that changed is written whole.
            _pages.put(self.store, batch, room.blocks(), tree, elements=False, flush=flush)
            while running:
                finish()
        finally:
            # Whatever fails: the memory that they read is the next save's, and so is the store.
            concurrent.futures.wait([committed for committed, _ in running])
        if _SAVING in self.store.root:
            batch.remove_root(_SAVING)
        batch.set_root("step", step)
        batch.set_root("saved_unix_ms", time.time_ns() // 1_000_000)
        ticket = self.store.submit(batch)
        room.free(room.take())
        return ticket

    def _make_way(self) -> None:
        """Keeps what there is before a save writes over it; removes what one that was ended halfway has left."""
        root = self.store.root
        if _SAVING in root:
            held = _pages.read_manifest(self.store).pages if _pages.MANIFEST_KEY in self.store else {}
            left = [info.page for info in self.store.pages() if info.key not in held and "dtype" in info.metadata]
            batch = self.store.batch()
            for page in left:
                batch.delete(page)
            if left:
                self.store.commit(batch, "logged")
        elif "step" in root:
            kept = max((info.end for info in self.store.snapshots() if info.name is not None), default=-1)
            if kept < self.store.lsn:
                # A fork's first version, or one whose process ended before it was kept.
                self.store.snapshot(f"{_STEP}{root['step']} @{self.store.lsn}", verify=False)

    def _write_and_keep(self, step: int, name: str | None, note: str, tree: Any) -> int:
        try:
            ticket = self._write(step, note, tree)
        finally:
            self._room.ended()
        return self._keep_version(ticket, step, name)

    def _state(self) -> dict[str, Any]:
        state = {name: dict(part) if isinstance(part, MutableMapping) else part.state_dict()
                 for name, part in self._parts.items()}
        if self._rng:
            state["rng"] = _rng_state()
        return state

    def _keep_version(self, ticket: _native.Ticket, step: int, name: str | None) -> int:
        ticket.wait()
        # No batch comes before the snapshot is taken: the next save waits for this one. The Lsn makes the name
        # another one than that of an earlier save of the step, which may be the newest snapshot and stays until then.
        self.store.snapshot(name or f"{_STEP}{step} @{ticket.lsn}", verify=False)
        again = f"{_STEP}{step} @"
        again_by = [info.name for info in self.store.snapshots() if info.name and info.name.startswith(again)][:-1]
        if name is None and again_by:
            self.store.prune(give_up=again_by, names_only=True)
        unnamed = [info for info in self.store.snapshots() if info.name and info.name.startswith(_STEP)]
        since = time.time() - self._keep_for if self._keep_for is not None else float("inf")
        gone = [info.name for info in unnamed[: -self._keep] if info.name and info.created_unix_ms / 1000 < since]
        if gone:
            self.store.prune(give_up=gone, names_only=True)
        return ticket.lsn

    def _finish(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last.wait()

    # Going back.

    def restore(self, at: int | str | None = None) -> int:
        """Puts a version into model, optimizer and the rest, in place; returns its step.

        All of it is read and proven before the first tensor changes: a version that is damaged changes nothing.

        :param at: a step (int), a name, or "lsn:N", "snapshot:N"; the newest version if None.
        :raises NoStateError: if there is no such version.
        :raises DamagedError: if bytes on disk are not what was written.
        """
        self._finish()
        with self._view(at) as view:
            return self._restore_from(view)

    def _restore_from(self, reader: _native.Reader) -> int:
        root = reader.root
        if "step" not in root:
            raise NoStateError("the version is none of a run", remedy="`versions` lists those that are kept")
        _whole(reader)
        state = _load_state(reader)
        missing = self._parts.keys() - state.keys()
        if missing:
            raise NoStateError(f"the version has no {', '.join(sorted(missing))}")
        for name, part in self._parts.items():
            if isinstance(part, MutableMapping):
                part.clear()
                part.update(state[name])
            else:
                part.load_state_dict(state[name])
        if self._rng and "rng" in state:
            _set_rng_state(state["rng"])
        return int(root["step"])

    def _view(self, at: int | str | None) -> _native.View:
        if at is None:
            self._finish()
            root = self.store.root
            if "step" in root and _SAVING not in root:
                return _native.View(self._directory)
            # A save was ended before its last batch: the newest whole version is a snapshot.
            versions = self.versions()
            if not versions:
                raise NoStateError("the run has no version yet", remedy="save one first")
            return _native.View(self._directory, f"lsn:{versions[-1].lsn}")
        if isinstance(at, int):
            for version in reversed(self.versions()):
                if version.step == at:
                    return _native.View(self._directory, f"lsn:{version.lsn}")
            raise NoStateError(f"there is no version of step {at}", remedy="`versions` lists those that are kept")
        if not at.startswith(("lsn:", "snapshot:", "name:")):
            at = f"name:{at}"
        return _native.View(self._directory, at)

    def versions(self) -> list[Version]:
        """The versions that are kept, the oldest first."""
        self._finish()
        for _ in range(_LIST_TRIES):
            with contextlib.suppress(OvertakenError):
                return self._listed()
        return self._listed()

    def _listed(self) -> list[Version]:
        # The files of versions that were given up may be going still: a reader that is overtaken looks again.
        versions = []
        for info in self.store.snapshots():
            if info.name is None:
                continue
            with _native.View(self._directory, info) as view:
                root = view.root
            if "step" in root and _SAVING not in root:
                name = None if info.name.startswith(_STEP) else info.name
                versions.append(Version(root["step"], info.end, name, info.created_unix_ms / 1000))
        return sorted(versions, key=lambda version: version.lsn)

    def give_up(self, name: str) -> None:
        """Gives up a version by its name; what only it needs is removed. The newest version stays for now."""
        self._finish()
        if all(info.name != name for info in self.store.snapshots()):
            raise NoStateError(f"there is no version named {name!r}", remedy="`versions` lists those that are kept")
        self.store.prune(give_up=[name], names_only=True)

    def diff(self, before: int | str, after: int | str | None = None) -> dict[str, int | None]:
        """The tensors that differ between two versions, each with its number of changed elements.

        None stands for a tensor that only one of them has, or that has another shape or kind of elements.
        Pages that no batch changed in between are not read.
        """
        self._finish()
        with self._view(before) as old:
            with self._view(after) as new:
                return _diff(_whole(old), _whole(new))

    def fork(self, directory: _Path, at: int | str | None = None) -> None:
        """Makes a new store in `directory` that begins at a version of this one. Images are shared, not copied."""
        self._finish()
        with self._view(at) as view:
            _whole(view).fork(directory)

    def close(self) -> None:
        """Waits for the save under way and closes the store."""
        try:
            if not self.store.closed:
                self._finish()
        finally:
            self._worker.shutdown()
            self._writers.shutdown()
            self.store.close()

    def __enter__(self) -> Checkpointer:
        if self.store.closed:
            raise ClosedError("the checkpointer is closed")
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        try:
            self.close()
        except Exception:
            # The block's own exception says more than what it did to the store.
            if kind is None:
                raise


class _Capture:
    """Takes tensors out of a state, by the paths at which they lie."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def __call__(self, path: str, value: object) -> object | None:
        name = path.removeprefix("/")
        if isinstance(value, torch.Tensor):
            self.tensors[name] = value
            return {"$": ["tensor", name]}
        if isinstance(value, torch.dtype):
            return {"$": ["dtype", str(value).removeprefix("torch.")]}
        if isinstance(value, torch.device):
            return {"$": ["device", str(value)]}
        if type(value) is torch.Size:
            return {"$": ["size", list(value)]}
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray):
            if value.dtype.hasobject or not value.dtype.isnative:
                raise RefusedError(f"{name}: an array of {value.dtype} cannot be stored")
            try:
                self.tensors[name] = torch.from_numpy(numpy.ascontiguousarray(value).reshape(value.shape))
            except TypeError as error:
                raise RefusedError(f"{name}: an array of {value.dtype} cannot be stored") from error
            return {"$": ["ndarray", name]}
        if numpy is not None and isinstance(value, (numpy.bool_, numpy.number)):
            # NumPy's float64 is a float of Python's, too; what it is comes back by its dtype.
            return {"$": ["scalar", str(value.dtype), _pages.flatten(path, value.item(), self)]}
        return None


_R = TypeVar("_R", bound=_native.Reader)


def _whole(reader: _R) -> _R:
    """The reader, if what it reads is no half of a save."""
    if _SAVING in reader.root:
        raise NoStateError("a save of a run was ended halfway there", remedy="give a version: `versions` lists them")
    return reader


def _load_state(reader: _native.Reader) -> dict[str, Any]:
    manifest = _pages.read_manifest(reader)
    if manifest.tree is None:
        raise NoStateError("the store holds tensors, and no state of a run", remedy="use `load_file`")
    cpu = torch.device("cpu")
    tensors: dict[str, torch.Tensor] = {}
    for page, arrays in _read_pages(reader, manifest.pages):
        tensors |= _tensors_of(page, arrays, cpu)

    def adapt(tag: list[Any]) -> Any:
        kind, *rest = tag
        if kind == "tensor":
            return tensors[rest[0]]
        if kind == "ndarray":
            return tensors[rest[0]].numpy()
        if kind == "dtype":
            return getattr(torch, rest[0])
        if kind == "device":
            return torch.device(rest[0])
        if kind == "size":
            return torch.Size(rest[0])
        if kind == "scalar":
            import numpy

            return numpy.dtype(rest[0]).type(_pages.unflatten(rest[1], adapt))
        raise NoStateError(f"the version holds a {kind}, which this package does not know", remedy="use a newer one")

    state = _pages.unflatten(manifest.tree, adapt)
    assert isinstance(state, dict)
    return state


def _diff(old: _native.View, new: _native.View) -> dict[str, int | None]:
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
        left = _tensors_of(_read_page(old, old_key), [old_array], cpu)[name]
        right = _tensors_of(_read_page(new, new_key), [new_array], cpu)[name]
        # By bits: a NaN equals itself, and 0.0 differs from -0.0.
        size = left.element_size()
        flat = [_bytes_of(each.contiguous()).view(-1, size) for each in (left, right)]
        count = int((flat[0] != flat[1]).any(dim=1).sum()) if left.numel() else 0
        if count:
            differ[name] = count
    return dict(sorted(differ.items()))


def _rng_state() -> dict[str, Any]:
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = list(torch.cuda.get_rng_state_all())
    return state


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
