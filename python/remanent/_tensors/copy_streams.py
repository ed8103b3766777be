"""CUDA streams that copy the bytes of a save from the GPUs, concurrently with the work of the caller."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch

_WIDE = torch.int64


class Moment:
    """A point in the copies of a save, on each of its GPUs: all copies queued before that point are complete."""

    def __init__(self, events: dict[torch.device, torch.cuda.Event]) -> None:
        self._events = events

    def hold_back(self) -> None:
        """Makes work that the caller queues on its current streams from now on wait for this moment. Does not block the
        host."""
        for device, event in self._events.items():
            torch.cuda.current_stream(device).wait_event(event)

    def wait(self) -> None:
        """Blocks the calling thread until this moment is reached on all GPUs."""
        for event in self._events.values():
            event.synchronize()


class CurrentStreams:
    """The streams of some GPUs that were current at construction, for use by another thread."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._streams = [torch.cuda.current_stream(device) for device in devices]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Makes these streams the current ones of the calling thread within the block."""
        with contextlib.ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(torch.cuda.stream(stream))
            yield


class CopyStreams:
    """One copy stream per GPU, used by one save at a time."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def begin(self, devices: Iterable[torch.device]) -> None:
        """Orders copies from these GPUs after work that is already queued on their current streams."""
        # A failed save may have left copies in flight into memory that is reused.
        self.synchronize()
        for device in devices:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._streams[device].wait_stream(torch.cuda.current_stream(device))

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Makes these streams the current ones of the calling thread within the block."""
        with contextlib.ExitStack() as stack:
            for stream in self._streams.values():
                stack.enter_context(torch.cuda.stream(stream))
            yield

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies bytes. Must be called within `entered`. A copy from a GPU is complete at the next `moment`."""
        stream = self._streams.get(source.device)
        target.copy_(source, non_blocking=stream is not None)
        if stream is not None:
            # The owner may free the source before the copy has run.
            source.record_stream(stream)

    def copy_within(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Copies bytes within a GPU in one operation. Must be called within `entered`. Many short copies would take
        longer to start than to run, and a GPU queues only about a thousand operations."""
        by_width: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = defaultdict(lambda: ([], []))
        for target, source in zip(targets, sources, strict=True):
            # A GPU thread copies a few elements at a time, whatever their width.
            is_wide = not any(number % _WIDE.itemsize for each in (target, source)
                              for number in (each.numel(), each.storage_offset(), each.data_ptr()))
            dtype = _WIDE if is_wide else torch.uint8
            for held, each in zip(by_width[dtype], (target, source), strict=True):
                held.append(each.view(dtype))
        for wide_targets, wide_sources in by_width.values():
            torch._foreach_copy_(wide_targets, wide_sources)
        stream = self._streams[targets[0].device]
        for source in sources:
            source.record_stream(stream)

    def moment(self) -> Moment:
        """Returns the moment at which all copies queued so far are complete."""
        events = {}
        for device, stream in self._streams.items():
            # With `blocking=True`, a thread that waits for the event sleeps and takes no CPU time from the training
            # thread.
            events[device] = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            events[device].record(stream)
        return Moment(events)

    def synchronize(self) -> None:
        """Blocks the calling thread until all copies are complete."""
        for stream in self._streams.values():
            stream.synchronize()
