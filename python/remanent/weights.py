"""Weights that one process publishes and others follow: the changed elements of each step, whole and in order.

    publisher = Publisher(directory)          subscriber = Subscriber(directory)
    publisher.publish(model, step)            subscriber.apply_to(model)      # between two batches of work

The publisher's store holds the newest weights and the log of what each step changed. A subscriber, in any process on
the machine, holds no copy: it scatters what a step changed straight into its live tensors, on whatever device. One
that falls back too far begins again at the newest snapshot, and says so.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from remanent import _native, _pages
from remanent._copies import Copies
from remanent._errors import DivergedError, InvalidError, OvertakenError
from remanent._live import Live, Uploads
from remanent._storages import extents_there
from remanent._tensors import blocks, bytes_of, tensor_of

__all__ = ["Publisher", "Subscriber", "checksum"]

_Path = str | os.PathLike[str]


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    state = model if isinstance(model, Mapping) else model.state_dict()
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def checksum(model: Any) -> int:
    """The CRC-32 of all tensors of a model, or of a dict of tensors, in the order of their names.

    >>> import torch, remanent.weights
    >>> one = {"a": torch.ones(3), "b": torch.zeros(2)}
    >>> remanent.weights.checksum(one) == remanent.weights.checksum(dict(reversed(one.items())))
    True
    """
    total = 0
    for name, tensor in sorted(_tensors(model).items()):
        total = zlib.crc32(bytes_of(tensor.detach().contiguous()).numpy().data, zlib.crc32(name.encode(), total))
    return total


class Publisher:
    """Publishes the weights of a model, step by step. One process at a time publishes to a directory.

    :param check: whether each step carries the checksum of all weights, which subscribers then compare.
    :param log_kept: bytes of the log that are kept for subscribers that fall back.
    :param device: where pages lie, which weights are compared with, and take as much memory. "host": weights on a GPU
        are brought there at each step. "cuda:0", or another GPU that they are on: it finds what changed, and nothing
        else leaves it.
    :param options: options of `Store`.

    >>> import torch, remanent.weights
    >>> source, target = {"w": torch.zeros(1000)}, {"w": torch.ones(1000)}
    >>> publisher = remanent.weights.Publisher(directory, check=True)
    >>> _ = publisher.publish(source, step=1)
    >>> subscriber = remanent.weights.Subscriber(directory)
    >>> subscriber.apply_to(target), int(target["w"].sum())
    (1, 0)
    >>> source["w"][::100] = 5
    >>> _ = publisher.publish(source, step=2)
    >>> subscriber.apply_to(target, timeout=10), int(target["w"].sum())
    (2, 50)
    >>> publisher.close()
    """

    def __init__(self, directory: _Path, *, check: bool = False, log_kept: int = 1 << 30, device: str = "host",
                 **options: Any) -> None:
        if device == "auto":
            raise InvalidError("device: \"auto\" does not say where the weights are", remedy="name it, as in \"cuda:0\"")
        self._check = check
        self.store = _native.Store(directory, device=device, log_kept=log_kept, **options)
        self._manifest = _pages.LastManifest()
        self._copies = None if device == "host" else Copies(self.store, torch.device(device), "page")

    def publish(self, model: Any, step: int) -> _native.Ticket:
        """Logs what changed since the step before; subscribers see it from now on. Returns a ticket to wait for.

        The weights are read as the current streams of their devices leave them, and may change once this returns. What
        is logged of a step is one batch, at most 1 GiB: an element that changed takes its own bytes and up to four.

        :param model: a module, or tensors by name. :raises RefusedError: for a tensor that is not plain, by its name.
        """
        tensors = _tensors(model)
        batch = self.store.batch(note=f"step {step}")
        found = extents_there(tensors)
        copies = self._copies
        if copies is None:
            _pages.put(self.store, batch, blocks(found), place="host", last=self._manifest)
        else:
            copies.arrive()
            place = "host" if copies.device.type == "cpu" else "device:0"
            _pages.put(self.store, batch, copies.blocks(found), place=place, captures=copies,
                       last=self._manifest)
        batch.set_root("step", step)
        if self._check:
            batch.set_root("weights.crc32", checksum(tensors))
        elif "weights.crc32" in self.store.root:
            # That of a step before, by a publisher that checked.
            batch.remove_root("weights.crc32")
        return self.store.submit(batch)

    def close(self) -> None:
        """Closes the store. Subscribers go on, and find no more steps until it is opened again."""
        self.store.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Subscriber:
    """Follows the weights that a publisher publishes to `directory`; see `Publisher` for an example.

    `step` is that of the weights applied last, None before the first. `restarts` counts how often it began anew: at
    first, when it was overtaken, and when tensors came, went or changed their shapes.

    Of tensors on a GPU the bytes of a step come there as the log has them, and the GPU reads which elements they are:
    that takes the step's bytes of its memory, 256 MiB at most, and some 100 MB for the indices. Tensors on other GPUs,
    and longer steps, take the way over the host.
    """

    def __init__(self, directory: _Path) -> None:
        self._directory = directory
        self._follower: _native.Follower | None = None
        self._arrays: dict[int, _pages.Arrays] = {}
        self._uploads = Uploads()
        self.step: int | None = None
        self.restarts = 0

    def apply_to(self, model: Any, *, timeout: float = 0.0) -> int | None:
        """Brings the tensors of `model`, in place, to the newest step; returns it, None if there is none yet.

        Call it between two uses of the weights: meanwhile they are of two steps.

        :param model: a module, or tensors by name, of the publisher's shapes and kinds, contiguous.
        :param timeout: seconds to wait for a step if none has come since the last call.
        :raises NoStateError: the publisher's tensors are others. DivergedError: a checksum differs, or a crash took
            what was applied: the next call begins anew.
        """
        live = Live(_tensors(model), self._uploads)
        try:
            applied = False
            if self._follower is None:
                applied = self._restart(live)
            assert self._follower is not None
            while (batch := self._follower.next(0 if applied else timeout)) is not None:
                applied = True
                try:
                    self._apply(live, batch)
                except _Another:
                    self._restart(live)
        except OvertakenError:
            self._follower = None
            return self.apply_to(model)
        except BaseException:
            # Some of a step may be applied: the next call begins anew.
            self._follower = None
            raise
        return self.step

    def _restart(self, live: Live) -> bool:
        """Takes all weights of the newest snapshot, or waits at the beginning; says whether there are any."""
        self.restarts += 1
        replica = _native.Replica(self._directory)
        self._follower = _native.Follower(self._directory, replica.position)
        # The log after the snapshot, read to its end: what follows is then from the same pages.
        while (batch := self._follower.next(0)) is not None:
            replica.apply(batch)
        self._arrays = {}
        if _pages.MANIFEST_KEY not in replica:
            return False
        for key, arrays in _pages.read_manifest(replica).pages.items():
            info = replica.info(key)
            self._arrays[info.page] = arrays
            live.check(arrays)
            if info.length:
                live.write(arrays, 0, tensor_of(replica[key]))
        self._seen(live, replica.root)
        return True

    def _apply(self, live: Live, batch: _native.FollowedBatch) -> None:
        root: dict[str, Any] = {}
        changes = live.changes(batch)
        for operation in changes.operations:
            kind = operation["kind"]
            if kind == "set_root":
                root[operation["name"]] = operation["value"]
            elif kind in ("note", "remove_root"):
                continue
            elif kind in ("write", "scatter", "image") and operation["page"] in self._arrays:
                arrays = self._arrays[operation["page"]]
                if kind == "write":
                    given = changes.bytes_of(operation, "bytes", live.device_of(arrays))
                    live.write(arrays, operation["offset"], given)
                elif kind == "image":
                    live.write(arrays, 0, tensor_of(batch.image(operation["page"])))
                else:
                    live.scatter(arrays, changes, operation)
            else:
                # Pages come, go or change their length, or it is a restore: nothing of that is a step's changes.
                raise _Another
        self._seen(live, root)

    def _seen(self, live: Live, root: Mapping[str, Any]) -> None:
        self.step = root.get("step", self.step)
        expected = root.get("weights.crc32")
        if expected is not None and checksum(live.tensors) != expected:
            raise DivergedError(f"the weights of step {self.step} have another checksum than the publisher's",
                                remedy="apply again: it begins anew")


class _Another(Exception):
    """The batch changes more than elements."""
