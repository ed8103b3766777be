"""Restores and compares ranks that are replicas: their models and optimizers are equal."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from remanent._checkpoint.ranks import Ranks
from remanent._store import _native
from remanent._store._native import Extent
from remanent._store.errors import InvalidError, ReplicasDivergedError
from remanent._tensors.conversion import bytes_of, device_name, is_cuda
from remanent._tensors.gpu_scratch import Scratch
from remanent._util.progress import Bar
from remanent._versions.history import Divergence

# Fewer bytes are loaded sooner than the link between the ranks is measured.
_BYTES_MIN = 64 << 20
# The rate in bytes per second that the link must reach. A bus between host and GPU does not reach it.
_RATE_MIN = 100e9
# The bytes of each rank with which the link is measured, and the number of measurements, of which the fastest counts.
_PROBE_LEN = 128 << 20
_PROBES = 3
# The bytes that a rank loads between two exchanges.
_ROUND_LEN = 512 << 20
# The number of tensors whose elements are compared. The others are only named.
_COMPARED_MAX = 16

_T = TypeVar("_T")


class Replicas:
    """The ranks of a process group that have equal models and optimizers."""

    def __init__(self, ranks: Ranks, process_group: dist.ProcessGroup) -> None:
        self._ranks, self._group = ranks, process_group
        self._members = dist.get_process_group_ranks(process_group)

    def all_or_none(self, work: Callable[[], _T]) -> _T:
        """Returns the result of `work` on this rank. If `work` fails on any rank, all ranks raise an error."""
        return self._ranks.all_or_none(work)

    # Restores.

    def of_all(self, work: Callable[[], _T | None]) -> _T | None:
        """Returns the result of `work` on this rank, or None if the result of any rank is None."""
        found = self._ranks.all_or_none(work)
        return found if all(self._ranks.gather(found is not None)) else None

    def shared_pages(self, checksums: Mapping[str, tuple[int, int]]) -> list[str]:
        """Returns the pages that all ranks have with the same bytes, in the same order on all ranks. All ranks must call
        this method.

        :param checksums: the length and the checksum of each page that this rank can exchange.
        """
        own = {key: list(each) for key, each in checksums.items()}
        of_first: dict[str, list[int]] = self._ranks.tell(own)
        lacking = [key for key, each in of_first.items() if own.get(key) != each]
        left_out = set().union(*self._ranks.gather(lacking))
        return [key for key in of_first if key not in left_out]

    def can_exchange(self, device: torch.device) -> bool:
        """Returns whether the process group has a backend for tensors on `device`."""
        try:
            self._group._get_backend(device)
        except RuntimeError:
            return False
        return self._ranks.count > 1

    def load(self, view: _native.View, scratch: Scratch, keys: Sequence[str], checksums: Mapping[str, tuple[int, int]],
             bar: Bar) -> set[str]:
        """Loads a share of `keys` into scratch memory and receives the other shares from the other ranks. All ranks must
        call this method with the same pages. Returns the pages that have arrived with the right checksum; it contains
        all of them unless the link is slow or a rank failed.

        :param keys: the pages in the order in which their memory lies in `scratch`.
        """
        nbytes = sum(checksums[key][0] for key in keys)
        if nbytes < _BYTES_MIN or not self._is_fast(scratch.memory):
            return set()
        shares = [list(_rounds(share, checksums)) for share in _shares(keys, checksums, self._ranks.count)]
        own: set[str] = set()
        failure: BaseException | None = None
        sent = []
        for number in range(max(map(len, shares))):
            for rank, share in enumerate(shares):
                if rank == self._ranks.rank and number < len(share) and failure is None:
                    try:
                        view.load({key: scratch.pages[key] for key in share[number]}, device_name(scratch.memory.device))
                    except BaseException as error:
                        # The other ranks wait for the share. They detect its checksums, and load its pages themselves.
                        failure = error
                    else:
                        own.update(share[number])
                        for key in share[number]:
                            bar.add(checksums[key][0])
            for rank, share in enumerate(shares):
                if number < len(share):
                    sent.append(dist.broadcast(scratch.span(share[number]), self._members[rank], self._group,
                                               async_op=True))
        for each in sent:
            each.wait()
        if failure is not None:
            raise failure
        received = [key for key in keys if key not in own]
        sums = checksums_of([scratch.pages[key] for key in received])
        arrived = {key for key, found in zip(received, sums, strict=True) if found == checksums[key][1]}
        for key in arrived:
            bar.add(checksums[key][0])
        return own | arrived

    def _is_fast(self, memory: torch.Tensor) -> bool:
        """Returns whether bytes of other ranks arrive fast enough on all ranks. Overwrites the beginning of `memory`."""
        count, rank = self._ranks.count, self._ranks.rank
        length = min(_PROBE_LEN, memory.numel() // count // 256 * 256)
        rate = 0.0
        # The first exchange makes the connections.
        for _ in range(1 + _PROBES):
            _synchronize(memory.device)
            began = time.perf_counter()
            dist.all_gather_into_tensor(memory[:count * length], memory[rank * length:(rank + 1) * length], self._group)
            _synchronize(memory.device)
            rate = max(rate, (count - 1) * length / (time.perf_counter() - began))
        return bool(min(self._ranks.gather(rate)) >= _RATE_MIN)

    def _exchanging(self, device: torch.device) -> torch.device:
        """Returns `device` if the process group exchanges tensors on it, and otherwise a device that it supports."""
        others = [torch.device("cpu")]
        if torch.cuda.is_available():
            others.append(torch.device("cuda", torch.cuda.current_device()))
        return next((each for each in (device, *others) if self.can_exchange(each)), device)

    # Comparisons.

    def compare(self, tensors: Sequence[Extent]) -> None:
        """Compares tensors of all ranks. All ranks must call this method.

        :raises ReplicasDivergedError: tensors differ, on all ranks.
        :raises InvalidError: the ranks have other tensors, or tensors of other shapes or element types.
        """
        own, sums = self._ranks.all_or_none(lambda: _summed(tensors))
        described = {name: [str(each.dtype), list(each.shape)] for name, each in own.items()}
        rows = self._ranks.gather([described, sums])
        for rank, (other, _) in enumerate(rows):
            for name in sorted(rows[0][0].keys() | other.keys()):
                if rows[0][0].get(name) != other.get(name):
                    raise InvalidError(f"{name}: rank 0 has {_said(rows[0][0].get(name))}, but rank {rank} has "
                                       f"{_said(other.get(name))}",
                                       remedy="pass `replicated` only if the ranks have the same model and optimizer")
        # The ranks may list the tensors in another order.
        by_rank = [dict(zip(other, of_rank, strict=True)) for other, of_rank in rows]
        diverged = [name for name in rows[0][0] if any(each[name] != by_rank[0][name] for each in by_rank)]
        if diverged:
            raise _diverged([self._divergence(name, [each[name] for each in by_rank], own[name], at < _COMPARED_MAX)
                             for at, name in enumerate(diverged)])

    def _divergence(self, name: str, sums: list[int], own: torch.Tensor, is_compared: bool) -> Divergence:
        groups: dict[int, list[int]] = {}
        for rank, found in enumerate(sums):
            groups.setdefault(found, []).append(rank)
        if not is_compared:
            return Divergence(name, list(groups.values()), None, None)
        mine = bytes_of(own, on_host=False)
        first = self._ranks.all_or_none(lambda: mine.to(self._exchanging(mine.device), copy=True))
        dist.broadcast(first, self._members[0], self._group)
        count, at = self._ranks.all_or_none(lambda: _differing(mine, first.to(mine.device), own.element_size()))
        told = self._ranks.gather([count, at])
        return Divergence(name, list(groups.values()), [count for count, _ in told],
                          min((at for _, at in told if at is not None), default=None))


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
            found = [zlib.crc32(memory[at].cpu().numpy()) for at in places]
        for at, each in zip(places, found, strict=True):
            sums[at] = each
    return sums


def _summed(tensors: Sequence[Extent]) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Returns the tensors by name, with their elements in row-major order, and their checksums."""
    packed = {each.name: each.tensor.detach().contiguous() for each in tensors}
    return packed, checksums_of([bytes_of(each, on_host=False) for each in packed.values()])


def _differing(own: torch.Tensor, other: torch.Tensor, element_len: int) -> tuple[int, int | None]:
    """Returns the number of elements that differ and the index of the first one, or None if none differs."""
    differs = (own != other).view(-1, element_len).any(1)
    count = int(differs.sum())
    return count, int(differs.nonzero()[0]) if count else None


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


def _rounds(share: Sequence[str], checksums: Mapping[str, tuple[int, int]]) -> Iterator[list[str]]:
    """Divides a share into the pages that are loaded between two exchanges."""
    group: list[str] = []
    held = 0
    for key in share:
        if group and held + checksums[key][0] > _ROUND_LEN:
            yield group
            group, held = [], 0
        group.append(key)
        held += checksums[key][0]
    if group:
        yield group


def _synchronize(device: torch.device) -> None:
    if is_cuda(device):
        torch.cuda.synchronize(device)


def _said(described: list[Any] | None) -> str:
    return "no such tensor" if described is None else f"{described[0]} of shape {described[1]}"
