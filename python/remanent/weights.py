"""Synchronizes weights between processes. One process publishes the changed elements of each step, and other processes
apply them in order.

    publisher = Publisher(directory)          subscriber = Subscriber(directory)
    publisher.publish(model, step)            subscriber.apply_to(model)      # between two batches of work

The publisher's store contains the newest weights, and a log of the changes in each step. A subscriber, in any process
on the same machine, keeps no copy of the weights. Changes of a step are written directly into its live tensors, on any
device. A subscriber that falls too far behind reads all weights again and counts this in `restarts`.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from remanent._state import page_tree
from remanent._store import _native
from remanent._store.errors import DivergedError, InvalidError, OvertakenError
from remanent._store.options import merged
from remanent._tensors.conversion import blocks, bytes_of, tensor_of
from remanent._tensors.live_tensors import Live, Place, Uploads
from remanent._tensors.storages import extents_there
from remanent._tensors.working_copies import Copies

__all__ = ["Publisher", "Subscriber", "checksum"]

_Path = str | os.PathLike[str]

# The number of bytes of a tensor that `checksum` copies to the host at a time.
_CHECKED_AT_ONCE = 32 << 20


def __dir__() -> list[str]:
    return __all__


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    state = model if isinstance(model, Mapping) else model.state_dict()
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def checksum(model: Any) -> int:
    """Returns the CRC-32 of all tensors of a module, or of a dict of tensors, in the order of their names.

    >>> import torch, remanent.weights
    >>> one = {"a": torch.ones(3), "b": torch.zeros(2)}
    >>> remanent.weights.checksum(one) == remanent.weights.checksum(dict(reversed(one.items())))
    True
    """
    total = 0
    scratch = torch.empty(0, dtype=torch.uint8, device="cpu")
    for name, tensor in sorted(_tensors(model).items()):
        total = zlib.crc32(name.encode(), total)
        flat = bytes_of(tensor.detach().resolve_conj().resolve_neg().contiguous(), on_host=False)
        for start in range(0, len(flat), _CHECKED_AT_ONCE):
            piece = flat[start : start + _CHECKED_AT_ONCE]
            if len(scratch) < len(piece):
                scratch = torch.empty(len(piece), dtype=torch.uint8, device="cpu")
            # Copy the bytes, because torch cannot resize a storage after its memory was exposed to NumPy, and engines
            # with a sleep mode resize their storages.
            scratch[: len(piece)].copy_(piece)
            total = zlib.crc32(scratch[: len(piece)].numpy().data, total)
    return total


class Publisher:
    """Publishes the weights of a model step by step. Only one process at a time can publish to a directory.

    :param directory: the directory of the publisher's store, which is created if it does not exist.

    :param check: whether each step contains a checksum of all weights, which subscribers compare with their own.
    :param log_kept: the bytes of log to keep for subscribers that fall behind.
    :param device: the device of the pages, which are compared with the weights and occupy as much memory. With "host",
        weights on a GPU are copied to the host at each step. With "cuda:0", or another GPU that contains the weights,
        the GPU finds the changes, and only these are copied from it.
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
            raise InvalidError("device: \"auto\" is not supported by a publisher",
                               remedy="pass the device of the weights, such as \"cuda:0\"")
        self._check = check
        opened = merged({"device": device, "retention": {"log_kept": log_kept}}, options)
        self.store = _native.Store(directory, **opened)
        self._manifest = page_tree.LastManifest()
        self._copies = None if device == "host" else Copies(self.store, torch.device(device), "page")

    def __repr__(self) -> str:
        return f"Publisher({self.store!r})"

    def publish(self, model: Any, step: int) -> _native.Ticket:
        """Logs the changes since the previous step and makes them visible to subscribers. Returns a `Ticket` to wait
        on.

        The weights are read after work that is already queued on the current streams of their devices. The weights may
        change once the call returns. The changes of a step are logged as one batch of at most 1 GiB. A changed element
        needs its own bytes and up to four more.

        :param model: a module, or a dict of tensors by name.
        :param step: the number of the step, which subscribers report.
        :raises RefusedError: a value is not a plain tensor. The message names the value.
        """
        tensors = _tensors(model)
        batch = self.store.batch(note=f"step {step}")
        found = extents_there(tensors)
        copies = self._copies
        if copies is None:
            page_tree.put(self.store, batch, blocks(found), place="host", last=self._manifest)
        else:
            copies.arrive()
            place = "host" if copies.device.type == "cpu" else "device:0"
            page_tree.put(self.store, batch, copies.blocks(found), place=place, captures=copies,
                          last=self._manifest)
        batch.set_root("step", step)
        if self._check:
            batch.set_root("weights.crc32", checksum(tensors))
        elif "weights.crc32" in self.store.root:
            # Remove the checksum of an earlier step, which a publisher with `check=True` has set.
            batch.remove_root("weights.crc32")
        return self.store.submit(batch)

    def close(self) -> None:
        """Closes the store. Subscribers remain usable, and find new steps once a publisher opens the store again."""
        self.store.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Subscriber:
    """Applies the weights that a publisher publishes to `directory`. See `Publisher` for an example.

    `step` is the last step that was applied, or None. `restarts` counts how often all weights were read: at the first
    call, after the subscriber fell too far behind, after tensors were added, removed or changed their shape, and
    whenever the tensors are not in the state in which the last call left them.

    A step is applied only to the bytes from which it was computed. Each call compares the locations of the tensors with
    those at the last call. Before it applies a step, it also compares the sums of their bytes with those after the last
    call. A model that was replaced or cleared, or whose memory was freed and allocated again, therefore receives all
    weights. Without a new step, the bytes are not read. If an engine wakes up with other contents and needs its weights
    immediately, create a new `Subscriber`.

    For tensors on a GPU, the bytes of a step are copied to the GPU as they are in the log, and the GPU decodes which
    elements they change. The decoding needs GPU memory for the bytes of the step, 256 MiB at most, and about 100 MB for
    the indices. For longer steps, and for tensors on a second GPU, the host decodes the changes.
    """

    def __init__(self, directory: _Path) -> None:
        # The working directory may change before the store is read again.
        self._directory = os.path.abspath(directory)
        self._follower: _native.Follower | None = None
        self._arrays: dict[int, page_tree.Arrays] = {}
        self._uploads = Uploads()
        # The locations of the tensors after the last call, and the sums of their bytes.
        self._places: list[Place | None] = []
        self._sums: dict[torch.device, torch.Tensor] = {}
        self.step: int | None = None
        self.restarts = 0

    def __repr__(self) -> str:
        return f"Subscriber({self._directory!r}, step={self.step}, restarts={self.restarts})"

    def apply_to(self, model: Any, *, timeout: float = 0.0) -> int | None:
        """Updates the tensors of `model` in place to the newest step. Returns that step, or None if no step was
        published yet.

        Do not use the weights during the call, because the tensors then contain a mixture of two steps.

        :param model: a module, or a dict of tensors by name. The tensors must be contiguous and have the publisher's
            shapes and element types.
        :param timeout: the seconds to wait for a step if no step is new since the last call.
        :raises NoStateError: the publisher has other tensors, or the memory of one of the model's tensors was freed.
            The next call reads all weights again.
        :raises DivergedError: a checksum differs, or a crash removed a step that was already applied. The next call
            reads all weights again.
        """
        live = Live(_tensors(model), self._uploads)
        try:
            names = self._names()
            applied = False
            if self._follower is None or live.places(names) != self._places:
                applied = self._restart(live)
            assert self._follower is not None
            while (batch := self._follower.next(0 if applied else timeout)) is not None:
                try:
                    if not applied and not _are_equal(live.sums(names), self._sums):
                        raise _Another
                    self._apply(live, batch)
                except _Another:
                    self._restart(live)
                applied = True
            if applied:
                names = self._names()
                self._places, self._sums = live.places(names), live.sums(names)
        except OvertakenError:
            self._follower = None
            return self.apply_to(model)
        except BaseException:
            # The step may be partly applied. Discard the follower, so that the next call reads all weights again.
            self._follower = None
            raise
        return self.step

    def _names(self) -> list[str]:
        return sorted(array.name for arrays in self._arrays.values() for array in arrays)

    def _restart(self, live: Live) -> bool:
        """Reads all weights and returns True. If there are none yet, returns False, and the subscriber waits for the
        first batch of the log."""
        self.restarts += 1
        replica = _native.Replica(self._directory)
        self._follower = _native.Follower(self._directory, replica.position)
        # Reads the log to its end, so that later batches are applied to the pages from which they were computed.
        while (batch := self._follower.next(0)) is not None:
            replica.apply(batch)
        self._arrays = {}
        if page_tree.MANIFEST_KEY not in replica:
            return False
        for key, arrays in page_tree.read_manifest(replica).pages.items():
            info = replica.info(key)
            live.check(arrays)
            live.places(array.name for array in arrays)
            self._arrays[info.page] = arrays
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
                # Pages are created, deleted or resized, or this is a restore: the changes of a step contain none of
                # these.
                raise _Another
        self._seen(live, root)

    def _seen(self, live: Live, root: Mapping[str, Any]) -> None:
        self.step = root.get("step", self.step)
        expected = root.get("weights.crc32")
        if expected is not None and checksum(live.tensors) != expected:
            raise DivergedError(f"the checksum of the weights of step {self.step} differs from the publisher's",
                                remedy="call apply_to again, which reads all weights again")


def _are_equal(sums: dict[torch.device, torch.Tensor], others: dict[torch.device, torch.Tensor]) -> bool:
    return sums.keys() == others.keys() and all(torch.equal(each, others[device]) for device, each in sums.items())


class _Another(Exception):
    """Raised if a batch changes more than elements, or if the tensors differ from those for which the batch was
    computed."""
