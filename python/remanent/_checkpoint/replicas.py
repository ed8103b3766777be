"""Restores and compares ranks that are replicas, so that their models and optimizers are equal."""

from __future__ import annotations

import contextlib
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from remanent._checkpoint.ranks import TIMEOUT, Ranks
from remanent._store import _native
from remanent._store._native import Extent
from remanent._store.errors import InvalidError, ReplicasDivergedError
from remanent._tensors.conversion import bytes_of, device_name, in_groups, is_cuda
from remanent._tensors.gpu_scratch import Scratch
from remanent._util.progress import Bar
from remanent._versions.history import Divergence

# The minimum number of bytes to exchange: loading fewer bytes takes less time than measuring the link.
_BYTES_MIN = 64 << 20
# The rate in bytes per second that the link must reach. A bus between host and GPU does not reach it.
_RATE_MIN = 100e9
# The number of bytes per rank with which the link is measured, and the number of measurements. The fastest one counts.
_PROBE_LEN = 128 << 20
_PROBES = 3
# The bytes that a rank loads between two exchanges, and the number of rounds in flight.
_ROUND_LEN = 512 << 20
_ROUNDS_MAX = 2
# The bytes of copies of non-contiguous tensors that are checksummed together.
_PACKED_LEN = 256 << 20
# The maximum number of differing tensors whose elements are compared. Further tensors are only named.
_COMPARED_MAX = 16

_T = TypeVar("_T")


class Replicas:
    """The ranks of a process group that have equal models and optimizers. All ranks must call the same methods in the
    same order.

    Tensors are exchanged in a separate process group, so that an abandoned call does not interfere with the collectives
    of the training. The group exists until torch destroys all groups, because a single rank can close its checkpointer
    but cannot destroy an NCCL communicator.

    :param device: the GPU of this rank, or None if it has none.
    """

    def __init__(self, ranks: Ranks, process_group: dist.ProcessGroup, device: torch.device | None) -> None:
        self._ranks, self._device = ranks, device
        self._members = dist.get_process_group_ranks(process_group)
        self._group: Any = dist.new_group(self._members, timeout=TIMEOUT, use_local_synchronization=True)
        # Whether bytes of other ranks arrive fast enough, or None before the measurement.
        self._is_fast: bool | None = None

    @contextlib.contextmanager
    def _step(self, name: str) -> Iterator[None]:
        """Begins the next step of the current operation, whose messages have a name of their own. Otherwise, if one
        rank fails between two steps, the ranks would confuse the messages of the two steps."""
        doing = self._ranks.doing
        self._ranks.doing = f"{doing}: {name}"
        try:
            yield
        finally:
            self._ranks.doing = doing

    def in_step(self, name: str, work: Callable[[], _T]) -> _T:
        """Returns the result of `work` on this rank. If `work` fails on any rank, all ranks raise an error."""
        with self._step(name):
            return self._ranks.all_or_none(work)

    # Restores.

    def can_exchange(self, device: torch.device) -> bool:
        """Returns whether the group has a backend for tensors on `device`."""
        try:
            self._group._get_backend(device)
        except RuntimeError:
            return False
        return self._ranks.count > 1

    def shared_pages(self, checksums: Mapping[str, tuple[int, int]]) -> list[str]:
        """Returns the pages that all ranks have with the same length and checksum, in the same order on all ranks.

        :param checksums: the length and the checksum of each page that this rank can exchange.
        """
        own = {key: list(each) for key, each in checksums.items()}
        with self._step("compare the pages"):
            of_first: dict[str, list[int]] = self._ranks.tell(own)
            lacking = [key for key, each in of_first.items() if own.get(key) != each]
            left_out = set().union(*self._ranks.gather(lacking))
        return [key for key in of_first if key not in left_out]

    def scratch_of_all(self, device: torch.device, make: Callable[[], Scratch | None]) -> Scratch | None:
        """Returns the memory that `make` allocates on this rank, or None if any rank has too little memory."""
        # The library for collectives allocates its own memory first.
        self.in_step("connect", lambda: self._connect(device))
        scratch = self.in_step("allocate", make)
        with self._step("compare the memory"):
            has_all = all(self._ranks.gather(scratch is not None))
        if scratch is not None and not has_all:
            scratch.free()
        return scratch if has_all else None

    def _connect(self, device: torch.device) -> None:
        dist.all_reduce(torch.zeros(1, device=device), group=self._group)
        _synchronize(device)

    def load(self, view: _native.View, scratch: Scratch, keys: Sequence[str], checksums: Mapping[str, tuple[int, int]],
             bar: Bar) -> set[str]:
        """Loads a share of `keys` into scratch memory and receives the other shares from the other ranks. Returns the
        pages that were loaded or that arrived with the right checksum. These are all pages, unless the link is slow or
        a rank failed.

        :param keys: the same pages on all ranks, in the order of their memory in `scratch`.
        """
        nbytes = sum(checksums[key][0] for key in keys)
        if nbytes < _BYTES_MIN or not self._has_fast_link(scratch.memory, nbytes):
            return set()
        # The pages of each rank, in the groups that are loaded between two exchanges.
        shares = [list(in_groups({key: checksums[key][0] for key in share}, _ROUND_LEN))
                  for share in _shares(keys, checksums, self._ranks.count)]
        own: set[str] = set()
        failure: BaseException | None = None
        sent: deque[list[Any]] = deque()
        for number in range(max(map(len, shares))):
            mine = shares[self._ranks.rank][number:number + 1]
            if mine and failure is None:
                try:
                    view.load({key: scratch.pages[key] for key in mine[0]}, device_name(scratch.memory.device))
                except BaseException as error:
                    # The other ranks wait for the share. Its checksums do not match, so they load its pages themselves.
                    failure = error
                else:
                    own.update(mine[0])
            sent.append([dist.broadcast(scratch.span(share[number]), self._members[rank], self._group, async_op=True)
                         for rank, share in enumerate(shares) if number < len(share)])
            while len(sent) > _ROUNDS_MAX:
                _wait(sent.popleft())
        for each in sent:
            _wait(each)
        if failure is not None:
            raise failure
        received = [key for key in keys if key not in own]
        sums = checksums_of([scratch.pages[key] for key in received])
        arrived = own.union(key for key, found in zip(received, sums, strict=True) if found == checksums[key][1])
        bar.add(sum(checksums[key][0] for key in arrived))
        return arrived

    def _has_fast_link(self, memory: torch.Tensor, nbytes: int) -> bool:
        """Returns whether bytes of other ranks arrive fast enough on all ranks. Measures with the first `nbytes` of
        `memory`, which are then undefined."""
        if self._is_fast is None:
            length = min(_PROBE_LEN, nbytes // self._ranks.count // 256 * 256)
            rate = self.in_step("measure the link", lambda: self._rate(memory, length))
            with self._step("compare the rates"):
                self._is_fast = bool(min(self._ranks.gather(rate)) >= _RATE_MIN)
        return self._is_fast

    def _rate(self, memory: torch.Tensor, length: int) -> float:
        """Returns the rate in bytes per second at which `length` bytes of each other rank arrive."""
        count, rank = self._ranks.count, self._ranks.rank
        seconds = []
        # The first exchange of a given length also sets up the connections, so it is not measured.
        for _ in range(1 + _PROBES):
            _synchronize(memory.device)
            began = time.perf_counter()
            dist.all_gather_into_tensor(memory[:count * length], memory[rank * length:(rank + 1) * length], self._group)
            _synchronize(memory.device)
            seconds.append(time.perf_counter() - began)
        return (count - 1) * length / min(seconds)

    # Comparisons.

    def compare(self, trained: Callable[[], Sequence[Extent]]) -> None:
        """Compares tensors of all ranks.

        :param trained: returns the tensors of this rank.
        :raises ReplicasDivergedError: tensors differ. All ranks raise it.
        :raises InvalidError: the ranks have different tensors, or the shapes, element types or kinds of devices of the
            tensors differ.
        """
        def summed() -> tuple[dict[str, torch.Tensor], list[int]]:
            tensors = trained()
            return {each.name: each.tensor.detach() for each in tensors}, _checksums_of_tensors(tensors)

        own, sums = self.in_step("digest", summed)
        described = {name: [str(each.dtype), list(each.shape), each.device.type] for name, each in own.items()}
        with self._step("compare the digests"):
            rows = self._ranks.gather([described, sums])
        first = rows[0][0]
        for rank, (other, _) in enumerate(rows):
            for name in sorted(first.keys() | other.keys()):
                if first.get(name) != other.get(name):
                    raise InvalidError(f"{name}: rank 0 has {_said(first.get(name))}, but rank {rank} has "
                                       f"{_said(other.get(name))}",
                                       remedy="pass `replicated` only if the ranks have the same model and optimizer")
        # The ranks may list the tensors in another order.
        by_rank = [dict(zip(other, of_rank, strict=True)) for other, of_rank in rows]
        diverged = [name for name in first if any(each[name] != by_rank[0][name] for each in by_rank)]
        if diverged:
            raise _diverged([self._divergence(name, [each[name] for each in by_rank], own[name], at < _COMPARED_MAX)
                             for at, name in enumerate(diverged)])

    def _divergence(self, name: str, sums: list[int], own: torch.Tensor, is_compared: bool) -> Divergence:
        groups: dict[int, list[int]] = {}
        for rank, found in enumerate(sums):
            groups.setdefault(found, []).append(rank)
        if not is_compared:
            return Divergence(name, list(groups.values()), None, None)

        def copied() -> tuple[torch.Tensor, torch.Tensor]:
            mine = bytes_of(own.contiguous(), on_host=False)
            return mine, mine.to(self._exchanging(mine.device), copy=True)

        mine, of_first = self.in_step("copy a tensor", copied)
        dist.broadcast(of_first, self._members[0], self._group)
        differing = self.in_step("compare a tensor",
                                 lambda: _differing(mine, of_first.to(mine.device), own.element_size()))
        with self._step("compare the elements"):
            told = self._ranks.gather(differing)
        return Divergence(name, list(groups.values()), [count for count, _ in told],
                          min((at for _, at in told if at is not None), default=None))

    def _exchanging(self, device: torch.device) -> torch.device:
        """Returns `device` if the group exchanges tensors on it, and otherwise a device that the group supports."""
        others = [torch.device("cpu"), *([] if self._device is None else [self._device])]
        return next((each for each in (device, *others) if self.can_exchange(each)), device)


def checksums_of(memory: Sequence[torch.Tensor]) -> list[int]:
    """Returns the CRC-32 of each tensor of bytes."""
    sums: list[int] = [0] * len(memory)
    by_device: dict[torch.device, list[int]] = {}
    for at, each in enumerate(memory):
        by_device.setdefault(each.device, []).append(at)
    for device, places in by_device.items():
        if is_cuda(device):
            _synchronize(device)
            found = _native.gpu_checksums([memory[at] for at in places], device_name(device))
        else:
            contents: list[Any] = [memory[at].cpu().numpy() for at in places]
            found = [zlib.crc32(content) for content in contents]
        for at, checksum in zip(places, found, strict=True):
            sums[at] = checksum
    return sums


def _checksums_of_tensors(tensors: Sequence[Extent]) -> list[int]:
    """Returns the CRC-32 of each tensor's elements in row-major order. Few copies exist at a time."""
    # The tensors may be written on any stream.
    for device in {each.tensor.device for each in tensors}:
        _synchronize(device)
    sums: list[int] = []
    group: list[torch.Tensor] = []
    copied = 0
    for each in tensors:
        packed = each.tensor.detach().contiguous()
        copied += 0 if packed.data_ptr() == each.tensor.data_ptr() else packed.nbytes
        group.append(bytes_of(packed, on_host=False))
        if copied > _PACKED_LEN:
            sums += checksums_of(group)
            group, copied = [], 0
    return sums + checksums_of(group)


def _differing(own: torch.Tensor, other: torch.Tensor, element_len: int) -> tuple[int, int | None]:
    """Returns the number of elements that differ and the index of the first one, or None if none differs."""
    differs = (own != other).view(-1, element_len).any(1)
    count = int(differs.sum())
    return count, int(differs.to(torch.uint8).argmax()) if count else None


def _diverged(tensors: list[Divergence]) -> ReplicasDivergedError:
    first = tensors[0]
    others = ", ".join(str(rank) for group in first.groups[1:] for rank in group)
    message = f"{first.name} differs between rank 0 and rank {others}"
    if first.differing is not None:
        message += f" in up to {max(first.differing)} elements, the first at index {first.first}"
    if len(tensors) > 1:
        message += f"; {len(tensors) - 1} more tensors differ"
    return ReplicasDivergedError(message, tensors=tensors)


def _shares(keys: Sequence[str], checksums: Mapping[str, tuple[int, int]], count: int) -> list[list[str]]:
    """Divides pages into one consecutive share per rank, of about the same number of bytes."""
    total = sum(checksums[key][0] for key in keys)
    shares: list[list[str]] = [[] for _ in range(count)]
    before = 0
    for key in keys:
        length = checksums[key][0]
        shares[min((before + length // 2) * count // total, count - 1)].append(key)
        before += length
    return shares


def _wait(sent: list[Any]) -> None:
    for each in sent:
        each.wait()


def _synchronize(device: torch.device) -> None:
    if is_cuda(device):
        torch.cuda.synchronize(device)


def _said(described: list[Any] | None) -> str:
    return "no such tensor" if described is None else f"{described[0]} of shape {described[1]} on {described[2]}"
