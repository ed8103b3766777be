"""Streams on which the bytes of a save leave the GPUs, beside the work of their owner."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch


class Moment:
    """A moment in the copies of a save, on each of its GPUs."""

    def __init__(self, events: dict[torch.device, torch.cuda.Event]) -> None:
        self._events = events

    def hold_back(self) -> None:
        """Has what the caller queues on its current streams from now on wait for it. The caller does not wait."""
        for device, event in self._events.items():
            torch.cuda.current_stream(device).wait_event(event)

    def wait(self) -> None:
        """Waits for it."""
        for event in self._events.values():
            event.synchronize()


class CopyStreams:
    """A stream for each GPU, one save at a time."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def begin(self, devices: Iterable[torch.device]) -> None:
        """Puts the copies of a save after the work that is queued now on the current streams of these devices."""
        # A save that failed may have left copies under way, into memory that is used again.
        self.synchronize()
        for device in devices:
            if device.type == "cuda":
                if device not in self._streams:
                    self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                self._streams[device].wait_stream(torch.cuda.current_stream(device))

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """What the calling thread queues in this block runs on these streams."""
        with contextlib.ExitStack() as stack:
            for stream in self._streams.values():
                stack.enter_context(torch.cuda.stream(stream))
            yield

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event | None:
        """Copies bytes in the block of `entered`. Returns when they will be there; None if they are already."""
        stream = self._streams.get(source.device)
        if stream is None:
            target.copy_(source)
            return None
        target.copy_(source, non_blocking=True)
        # The owner may free the source before the copy has run.
        source.record_stream(stream)
        return self._event(stream)

    def moment(self) -> Moment:
        """The end of all copies that were queued so far."""
        return Moment({device: self._event(stream) for device, stream in self._streams.items()})

    def synchronize(self) -> None:
        """Waits for all copies."""
        for stream in self._streams.values():
            stream.synchronize()

    def _event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        # One whose waiter sleeps: the thread that waits is not the one that trains.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event
