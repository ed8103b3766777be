"""Saves and restores the state of a training run as versions in a store."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import operator
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, Unpack

import torch

from remanent._checkpoint.host_ring import Passage, Room, WriterEndedError
from remanent._checkpoint.restoration import Restoration, tensors_in
from remanent._checkpoint.restore_targets import Targets
from remanent._checkpoint.run_parts import TrainedNames, device_of, parts_of, refuse_overlap, stepped
from remanent._checkpoint.saves import Capture, Kept, LeftSaves, Reading, Saved
from remanent._checkpoint.waiting_bytes import WaitingBytes
from remanent._state import page_tree
from remanent._state.put_back import PutBack
from remanent._state.rng import rng_state
from remanent._state.run_state import flatten_state, layouts_of
from remanent._store import _native
from remanent._store._native import Block, Extent
from remanent._store.errors import (
    ClosedError,
    ForkedError,
    InUseError,
    InvalidError,
    NoStateError,
    RefusedError,
)
from remanent._store.options import StoreOptions, merged
from remanent._tensors.conversion import blocks
from remanent._tensors.copy_streams import CurrentStreams, Moment
from remanent._tensors.storages import extents_there
from remanent._tensors.torch_modes import refuse_fake_tensors
from remanent._tensors.working_copies import Copies
from remanent._util.progress import Bar
from remanent._util.threads import started
from remanent._versions.history import (
    Content,
    Difference,
    ElementChange,
    Layouts,
    content_of,
    difference,
    element_changes,
    first_bad,
    number_of,
)
from remanent._versions.run_versions import (
    RANKS,
    SAVING,
    STEP,
    Keep,
    OwnVersions,
    Version,
    Versions,
    Views,
    named,
    whole,
)

if TYPE_CHECKING:
    import torch.distributed

    from remanent._checkpoint.ranks import Ranks
    from remanent._checkpoint.replicas import Replicas

_Path = str | os.PathLike[str]

# The number of batches of a save that are written concurrently.
_WRITERS = min(4, os.cpu_count() or 1)
# The number of pages of an interrupted save that one batch removes.
_DELETED_AT_ONCE = 10_000
# Longer tensors are not captured: if a quarter of one changed, its changes would exceed the limit of a batch.
_CAPTURED_MAX = 2 << 30
# The default budget in bytes for changes of pages on disk that are held in memory. Changes that digests find use up to
# half of it.
_PENDING_BYTES = 512 << 20
_NAME_LEN_MAX = 64

_T = TypeVar("_T")


class Checkpointer:
    """Saves and restores the state of a training run: model, optimizer, scheduler, random number generators, and other
    objects with a state.

    `save(step)` saves the state as the newest version. A version is saved completely or not at all, and only changed
    bytes are written. `restore()` loads a version into the existing objects. The process can be killed at any time. The
    next process finds either the last version whose save returned or the version that was being saved, never a mixture
    of both. A save needs a few megabytes of host memory in addition to the tensors, regardless of their number. A save
    with `wait=False` needs up to `room` bytes.

    Python's garbage collector periodically scans all objects, which takes 0.1 s or more after torch is imported. The
    objects that `state_dict` creates make these scans more frequent. Call `gc.collect()` and `gc.freeze()` before the
    training loop to keep the scans short.

    :param directory: the directory of the run's store, which is created if it does not exist. Only one process at a
        time can open the store.
    :param model: a module, or any object with `state_dict` and `load_state_dict`.
    :param extra: other objects with these two methods, by name, or dicts of plain values, such as the position of a
        data loader. `restore` fills the dicts.
    :param rng: whether to save the random states of Python, NumPy (if it is imported), torch and all GPUs.
    :param keep: the number of newest unnamed versions to keep. Older unnamed versions are removed in the background.
    :param keep_for: unnamed versions younger than this many seconds are also kept.
    :param room: the bytes of host memory for saves with `wait=False`. State that fits is copied into this memory, and
        is written after the call returns. If the state is larger, the call first waits until all but `room` bytes are
        written.
    :param device_room: the bytes of additional memory on each GPU for these saves. State that fits is copied within the
        GPU, which takes a hundredth of the time of a copy to the host.
    :param overlap: whether a save with `wait=False` copies parameters and optimizer state concurrently with the next
        forward and backward pass. `optimizer.step` waits for the copies. Before that step, nothing else may change
        these tensors: no CUDA graph that contains the step, no compiled step, no optimizer that changes parameters
        outside of `step`, and no assignment. `Saved.wait_copied` waits for the copies earlier.
    :param digests: whether to capture tensors on the model's GPU by digests. The GPU finds the chunks of 64 KiB that
        changed since the previous save, and only these chunks are copied to the host. These chunks are logged before
        the call returns and need no `room`. Use digests if only a small part of the state changes, for example if
        layers are frozen. The first save of a process and the first save after `restore` write everything. Changes are
        held in host memory until their version is on disk, in up to half of `memory={"budget": {"disk": bytes}}`,
        which is 512 MiB by default. Tensors beyond that are written completely. Tensors of more than 2 GiB,
        non-contiguous tensors and tensors on other devices are saved without digests. The memory of captured tensors
        is kept alive until the next save. For a model on the host, the host finds the changes.
    :param process_group: the ranks that save together, each with its own state; see below.
    :param replicated: whether the ranks of `process_group` are replicas, as with DistributedDataParallel. Each rank still
        saves its own copy. `restore` reads a share of the equal pages from each rank's copy and exchanges the shares
        between the GPUs, if their link is faster than the bus to the host. Each page is verified where it arrives,
        by the checksum in the receiving rank's own copy. That copy itself is not read then, so damage in it is found later.
    :param compare_every: compare the parameters and the optimizer state of replicas at every nth save. If they differ,
        the save raises `ReplicasDivergedError` and saves nothing. None compares nothing.
    :param options: options of `Store`, such as `log={"io": "direct"}`. A budget of less than 32 MiB for "disk" may be
        too small for one batch of a save, which is then rejected. `images={"compression": True}` reduces the disk space
        of bfloat16 weights by a fifth and makes saves two to three times slower. With `archive`, every version is also
        copied to an object store, as long as it is kept; see below.

    With `process_group`, each rank creates one checkpointer for the same directory, which all ranks must be able to
    access. All ranks make the same calls in the same order. Only `versions` and `close` may be called by a single rank.
    A version exists once it is durable on all ranks. Even if ranks are killed at any time, `restore` therefore restores
    the same version on all ranks. If one rank cannot save, no rank saves. If one rank cannot read, no rank changes its
    state. Each rank saves its part of a DTensor, and its own copy of any other tensor. The store of rank N is the
    subdirectory `rank-N`.

    A run can continue with another number of ranks or another mesh. `restore` redistributes DTensors to the layout of
    the model. Tensors for which the redistribution is ambiguous are rejected, such as tensors of different pipeline
    stages with the same name. A DTensor can only be restored to a DTensor. Rank K restores all other values from rank K
    of the saved version. Additional ranks restore these values from the saved ranks in turn, and keep their own random
    states.

    With `archive={"url": …}`, the run survives the loss of its machine: `Saved.wait_archived` returns once the archive
    keeps a version. On another machine, `remanent restore DIRECTORY --from URL` creates the directory with all versions
    that the archive keeps, and a checkpointer with the same `archive` continues the run there.

    With `archive` and `process_group`, each rank has its own archive, `URL/rank-N`. After the loss of all machines,
    `remanent restore DIRECTORY/rank-N --from URL/rank-N` for each N restores the stores of the ranks, and the run
    continues with the newest version that all archives have. There is one as soon as one was archived: at most two
    versions in addition to those of `keep` are kept until newer ones are in all archives. If the archive of one rank
    rejects its store, the constructor raises the error on all ranks.

    Values can be tensors as in `save_file`, None, bool, int, float, complex, str, bytes, list, tuple, dict, NumPy
    arrays, `torch.dtype`, `torch.device` and `torch.Size`. Any other value is rejected by an error that names the
    value, before anything is saved.

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
                 keep_for: float | None = None, room: int = 256 << 20, device_room: int = 0, overlap: bool = False,
                 digests: bool = False, process_group: torch.distributed.ProcessGroup | None = None,
                 replicated: bool = False, compare_every: int | None = None, **options: Unpack[StoreOptions]) -> None:
        self._opener = os.getpid()
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "remanent-checkpoint")
        self._ranks: Ranks | None = None
        self._replicas: Replicas | None = None
        self._compare_every = compare_every
        # The number of saves since the replicas were compared.
        self._uncompared = 0
        device = torch.device("cpu")

        def checked() -> dict[str, Any]:
            nonlocal device
            _check_numbers(keep, room, device_room)
            _check_replicas(replicated, compare_every, process_group is not None)
            if overlap:
                refuse_overlap(optimizer)
            if digests and "device" in options:
                raise InvalidError("digests: the store must be on the model's device", remedy="omit `device`")
            device = device_of(model) if digests else device
            return parts_of(model, optimizer, scheduler, extra or {})

        self._versions: Versions
        try:
            if process_group is not None:
                from remanent._checkpoint.ranks import Ranks
                from remanent._versions.rank_versions import SharedVersions

                self._ranks = ranks = self._waited(lambda: Ranks(process_group))
                self._parts = self._waited(lambda: ranks.all_or_none(checked))
                self._waited(lambda: _agree_on_replicas(ranks, replicated, compare_every))
                if replicated:
                    from remanent._checkpoint.replicas import Replicas

                    gpu = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
                    self._replicas = self._waited(lambda: Replicas(ranks, process_group, gpu))
            else:
                self._parts = checked()
            self._rng = rng
            opened = _store_options(device, digests, options)
            kept = Keep(keep, keep_for)
            if process_group is not None:
                shared = self._waited(lambda: SharedVersions(ranks, process_group, directory, kept, opened,
                                                             always_prune=digests))
                self._versions, self.store = shared, shared.store
            else:
                self.store = _native.Store(directory, **opened)
                self._versions = OwnVersions(self.store, kept, always_prune=digests)
        except BaseException:
            if self._ranks is not None:
                self._ranks.end()
            self._worker.shutdown(wait=False)
            raise
        # Without an explicit budget, the engine's default of 128 MiB applies.
        budget = opened.get("memory", {}).get("budget") or {}
        self._pending_max: int = budget.get("disk", 128 << 20)
        self._copies = Copies(self.store, device, "digests") if digests else None
        self._writers = concurrent.futures.ThreadPoolExecutor(_WRITERS, "remanent-checkpoint-write")
        self._sender = concurrent.futures.ThreadPoolExecutor(1, "remanent-checkpoint-copy")
        self._manifest = page_tree.LastManifest()
        self._last: Saved | None = None
        self._left = LeftSaves()
        self._reading: Reading | None = None
        self._room = Room(room, device_room)
        self._stepping = optimizer if overlap else None
        self._hook = optimizer.register_step_pre_hook(self._before_step) if overlap else None
        # The number of saves begun.
        self._saves = 0
        # The step of the newest save known to have succeeded, or of a later restore; None until it is looked up.
        self._step: int | None = None

    def _waited(self, work: Callable[[], _T]) -> _T:
        """Runs `work` on the worker thread and returns the result. Ctrl-C ends the wait but not the work, so that all
        ranks still complete the same calls."""
        done = self._worker.submit(work)
        while not concurrent.futures.wait([done], 0.1).done:
            pass
        return done.result()

    def _after_saves(self, doing: str, work: Callable[[], _T]) -> _T:
        """Runs `work` after the save in progress, on all ranks if there are several, and returns the result.

        :param doing: the operation as an infinitive without "to", for messages that compare ranks.
        """
        self._check_open()
        ranks = self._ranks
        if ranks is None:
            self._finish()
            return work()

        def in_step() -> _T:
            ranks.doing = doing
            ranks.all_or_none(self._tell_failure)
            return work()

        return self._waited(in_step)

    def _tell_failure(self) -> None:
        """Raises the error of the last save unless a caller has already received that error."""
        last = self._last
        if last is not None and last._has_ended and not last._told.is_set():
            last.wait()

    # Saving.

    def save(self, step: int, name: str | None = None, *, note: str | None = None, wait: bool = True,
             busy: str = "wait", progress: bool | None = None) -> Saved:
        """Saves the current state as the version of `step`.

        If the previous save is still in progress, `busy` determines whether this save waits, is refused or is left to
        the next save. After the call returns, the host may change the state, and so may work that is queued on the
        current streams of the GPUs from then on. Work on other streams must first be ordered after these streams, as
        for any torch operation. With `overlap`, only `optimizer.step` may change parameters and optimizer state.

        :param step: an integer that is at least 0 and at least the step of the newest version. After `restore`, history
            continues from the restored version, and the step must be at least that version's step. Saving a step again
            replaces its previous version.
        :param name: a name of 1 to 64 bytes that keeps the version until `give_up(name)`. The name must not begin with
            "step ", "lsn:", "snapshot:" or "name:".
        :param note: a remark to store with the version. The default is "step N".
        :param wait: whether to return only after the version is durable. If False, the call returns once the state is
            copied or its copies are queued on streams, and `Saved.wait` waits for durability. If the process is killed
            before then, the next process finds the previous version.
        :param busy: what to do while the previous save is in progress: "wait" for it, "refuse" this save, or
            "coalesce". A coalesced save returns immediately without saving; the returned object completes with the next
            save, whose step is `Saved.version_step`. Saves with a name, saves with `wait=True`, and saves for which
            another rank waits are never coalesced. Make the last save of a run one of these, or `close` raises an
            error. `Saved.seconds` is the duration of a save.
        :param progress: whether a save with `wait=True` shows a progress bar. False disables the bar. None shows it for
            long saves if standard error is a terminal and tqdm is installed. With several ranks, only the first rank
            shows it.
        :raises InvalidError: the step is below the run's current step, or another argument is invalid. Nothing is
            saved.
        :raises InUseError: `busy` is "refuse" and the previous save is in progress. Nothing is saved.
        :raises RefusedError: a value cannot be stored (the message names the value), or a CUDA graph is being captured.
            Nothing is saved.
        :raises ReplicasDivergedError: replicas differ (see `compare_every`). Nothing is saved.
        """
        began = time.monotonic()
        self._check_open()
        self._saves += 1
        reading = Reading()
        passage: Passage | None = None
        done: concurrent.futures.Future[Kept] | None = None
        bar: Bar | None = None
        is_left = is_next = False
        try:
            is_left = self._is_left_to_next(busy, wait or name is not None)
            is_next = not is_left
            if is_next:
                _refuse_modes()
                # The step of the previous save counts only if that save succeeds.
                self._finish()
            step = self._next_step(step)
            if is_left:
                _refuse_capture()
                return self._left.add(step, self._reading or reading, began, self._wait_archived)
            tree, captured, tensors = self._checked(name)
            replicas, every = self._replicas, self._compare_every
            if replicas is not None and every is not None:
                save = self._saves
                self._waited(lambda: self._compare_if_due(replicas, every, save, tree, captured + tensors))
            passage = self._room.begin(tensors)
            capture = Capture(self._copies, captured)
            note = note or f"step {step}"
            nbytes = sum(each.nbytes for each in itertools.chain(captured, tensors))
            bar = self._bar(nbytes, "saving", progress if wait else False)
            done = self._worker.submit(self._write_and_keep, passage, capture, self._saves, step, name, note, tree,
                                       nbytes, bar)
            self._last = saved = Saved(step, reading, began, self._wait_archived)
            saved._begins(done)
            self._left.go_with(saved)
            self._reading = reading
            if captured:
                passage.start_writer()
            self._copy(passage, tensors, reading, wait)
            passage.start_writer()
            while not (capture.ended.wait(0.1) or done.done()):
                pass
            if not capture.ended.is_set():
                raise WriterEndedError
            if wait:
                saved.wait()
            bar.close()
        except BaseException as error:
            if bar is not None:
                bar.close()
            if done is None and not is_left:
                # The failure is reported in the order of the saves, since other ranks may be writing theirs. At
                # interpreter exit no thread can do this.
                with contextlib.suppress(RuntimeError):
                    self._worker.submit(self._versions.failed, self._saves, error)
            if done is None and is_next:
                self._left.fail(error)
            if passage is None:
                raise
            # End the writer and all copies before the exception propagates, so that no thread reads the state
            # afterwards.
            passage.give_up()
            try:
                self._settle(patient=True)
                self._room.streams.synchronize()
            finally:
                reading.ends(Moment({}))
                self._forget_last()
            if done is not None and isinstance(error, WriterEndedError):
                # Raises the error with which the writer ended.
                done.result()
            raise
        return saved

    def _compare_if_due(self, replicas: Replicas, every: int, save: int, tree: str, tensors: list[Extent]) -> None:
        """Compares the parameters and the optimizer state of replicas at every nth save. Runs on the worker thread of all
        ranks, even of those whose caller has left the call."""
        self._uncompared += 1
        # The ranks have counted differently if a save failed early on one of them.
        if not self._versions.any_of(save, self._uncompared >= every):
            return

        def trained() -> list[Extent]:
            sharded = {name for kind, name, _ in tensors_in(json.loads(tree)) if kind == "dtensor"}
            names = TrainedNames(self._parts)
            return [each for each in tensors if each.name in names and each.name not in sharded]

        replicas.compare(trained)
        # After a failure, the next save compares again.
        self._uncompared = 0

    def _wait_archived(self, saved: Saved, timeout: float | None) -> bool:
        """Waits until the archives of all ranks keep a version. See `Saved.wait_archived`."""
        ranks = self._ranks
        if ranks is None:
            until = None if timeout is None else time.monotonic() + timeout
            if not saved.wait(timeout):
                return False
            left = None if until is None else max(0.0, until - time.monotonic())
            return self.store.wait_archived(saved._snapshot, left)
        self._check_open()
        has_left = threading.Event()

        def is_archived() -> bool:
            snapshot = saved._snapshot
            until = None if timeout is None else time.monotonic() + timeout
            while True:
                left = 0.1 if until is None else max(0.0, min(0.1, until - time.monotonic()))
                if self.store.wait_archived(snapshot, left):
                    return True
                if until is not None and time.monotonic() >= until:
                    return False
                if has_left.is_set():
                    raise InUseError(f"the wait for the archive of step {saved.step} was interrupted",
                                     remedy="wait again on all ranks")

        def in_step() -> bool:
            ranks.doing = f"wait for the archives of step {saved.step}"
            return all(ranks.gather(ranks.all_or_none(is_archived)))

        try:
            return self._waited(in_step)
        except BaseException:
            # Ctrl-C ends this wait, and then the wait of the other ranks.
            has_left.set()
            raise

    def _next_step(self, step: int) -> int:
        """Returns `step` as an int after checking that it is not below the run's current step."""
        step = _whole_number("step", step)
        if step < 0:
            raise InvalidError(f"step: {step} is below 0", remedy="count steps from 0")
        before = self._reached()
        if before is not None and step < before:
            raise InvalidError(f"step: {step} is below {before}, the current step of the run",
                               remedy="restore an earlier version first, pass a later step, or use another directory")
        return step

    def _reached(self) -> int | None:
        """Returns the step of the newest save that has not failed, or of a later restore; None if the run has no
        version."""
        last, left = self._last, self._left.newest_step
        if left is not None:
            return left
        if last is not None and not last._has_failed:
            return last.step
        return self._versions.newest_step() if self._step is None else self._step

    def _forget_last(self) -> None:
        """Clears the last save, whose threads have finished, and records its step if the save succeeded."""
        last, self._last = self._last, None
        if last is not None and last.done():
            self._step = last.step

    def _bar(self, nbytes: int, what: str, progress: bool | None) -> Bar:
        return Bar(nbytes, what, progress if self._ranks is None or self._ranks.rank == 0 else False)

    def _is_left_to_next(self, busy: str, waits: bool) -> bool:
        """Returns whether a save is coalesced because the previous one is in progress."""
        if busy not in ("wait", "refuse", "coalesce"):
            raise InvalidError(f"busy: {busy!r} must be \"wait\", \"refuse\" or \"coalesce\"")
        if busy == "wait":
            return False
        last = self._last
        is_busy = last is not None and not last._has_ended
        if not self._versions.is_busy(self._saves, is_busy, busy == "coalesce" and waits):
            return False
        if busy == "refuse":
            which = "the previous save" if last is None else f"the save of step {last.step}"
            raise InUseError(f"{which} is in progress", remedy="wait until it is durable, or save less often")
        return True

    def _checked(self, name: str | None) -> tuple[str, list[Extent], list[Extent]]:
        """Checks that the state can be saved. Returns its tree, the tensors to capture in place, and all other
        tensors."""
        if name is not None:
            _check_name(name)
            self._versions.check_name(name)
        found: dict[str, torch.Tensor] = {}
        tree = flatten_state(self._state(), found, of_rank=self._ranks is not None)
        return tree, *self._divided(extents_there(found))

    def _divided(self, found: list[Extent]) -> tuple[list[Extent], list[Extent]]:
        """Divides tensors into those that are captured in place and all others.

        Tensors that share a storage are always in the same list.
        """
        if self._copies is None:
            return [], found
        device = self._copies.device
        others = {each.storage for each in found
                  if each.device != device or each.nbytes > _CAPTURED_MAX or not each.tensor.is_contiguous()}
        captured = [each for each in found if each.nbytes and each.storage not in others]
        return captured, [each for each in found if not each.nbytes or each.storage in others]

    def _settle(self, *, patient: bool = False) -> None:
        """Waits until no thread works on a save, whether the save succeeded or failed.

        :param patient: whether to continue waiting after Ctrl-C.
        """
        while True:
            try:
                for pool in (self._sender, self._worker):
                    # At interpreter exit, the threads have already finished their work.
                    with contextlib.suppress(RuntimeError):
                        pool.submit(int).result()
                return
            except KeyboardInterrupt:
                if not patient:
                    raise

    def _copy(self, passage: Passage, tensors: list[Extent], reading: Reading, wait: bool) -> None:
        """Copies the state for the writer. Copies that may be made after `save` returns are left to `_copy_later`."""
        streams = self._room.streams
        if wait:
            # This call returns only after the state is durable, so bytes on the host need no copy and are read in
            # place.
            passage.start_writer()
            passage.send(blocks(tensors, on_host=False), copied=False)
            passage.end()
            reading.ends(streams.moment())
            return
        aside: list[Block] = []
        at_step, at_once = stepped(self._stepping, tensors)
        passage.send(passage.set_aside(blocks(at_once, on_host=False), aside))
        read = streams.moment()
        read.hold_back()
        if not at_step:
            reading.ends(read)
        if aside or at_step:
            self._sender.submit(self._copy_later, passage, at_step, aside, reading)
        else:
            passage.end()

    def _copy_later(self, passage: Passage, at_step: list[Extent], aside: list[Block],
                    reading: Reading) -> None:
        streams = self._room.streams
        try:
            passage.send(passage.set_aside(blocks(at_step, on_host=False), aside))
            reading.ends(streams.moment())
            passage.send(aside)
            passage.end()
        except WriterEndedError:
            # The writer has failed, and its own exception is reported.
            pass
        except BaseException as error:
            passage.give_up(error)
        finally:
            try:
                reading.ends(streams.moment())
            finally:
                # Even after an error, release the optimizer steps that wait for the copies.
                reading.ends(Moment({}))

    def _before_step(self, *given: Any) -> None:
        if self._reading is not None:
            _refuse_capture()
            self._reading.hold_back()

    def _write(self, passage: Passage, capture: Capture, step: int, note: str, tree: str, bar: Bar,
               label: dict[str, Any] | None) -> _native.Ticket:
        """Writes a version: first the captured tensors, then the blocks that arrive through `passage`.

        A long version consists of several batches. Batches with blocks from `passage` are written concurrently.
        """
        batch = self.store.batch(note=note)
        running: deque[_Running] = deque()
        waiting = WaitingBytes()

        def finish() -> None:
            each = running.popleft()
            each.committed.result()
            passage.free(each.blocks)

        def commit(batch: _native.Batch, updates: list[page_tree.Update]) -> None:
            page_tree.update(batch, updates, logged_max=0)
            ticket = self.store.submit(batch)
            ticket.wait(ack="logged")
            # Once the batch is applied, `pending_bytes` includes the memory that it occupies.
            ticket.wait(ack="applied")

        def make_room(needed: int) -> None:
            # Changes of short pages, by earlier batches and by batches in flight, are held in memory until a snapshot.
            room = self._pending_max * 3 // 4 - needed
            while running and self.store.stats()["pending_bytes"] + sum(each.waiting for each in running) > room:
                finish()
            if self.store.stats()["pending_bytes"] > max(0, min(room, self._pending_max // 4)):
                while running:
                    finish()
                # A snapshot frees memory once it is verified. Wait for the verification only if memory is still short.
                self.store.snapshot(verify=False)
                if self.store.stats()["pending_bytes"] > max(0, room):
                    self.store.snapshot()

        def flush(updates: list[page_tree.Update]) -> _native.Batch:
            # From here to the last batch the store is between two versions, and its root records this.
            nonlocal batch
            batch.set_root(SAVING, step)
            needed = waiting.begin_next()
            make_room(needed)
            if not capture.ended.is_set():
                commit(batch, updates)
                batch = capture.begin(self.store.batch(note=note))
                return batch
            running.append(_Running(started(self._writers, commit, batch, updates), passage.take(), needed))
            while running and (len(running) > _WRITERS or passage.waits or running[0].committed.done()):
                finish()
            batch = self.store.batch(note=note)
            return batch

        try:
            # Each version is a snapshot, for which a changed page is written whole.
            coming = waiting.counting(bar.counting(itertools.chain(capture.blocks(), passage.blocks())))
            page_tree.put(self.store, batch, coming, tree, logged_max=0, captures=self._copies, flush=flush,
                          last=self._manifest)
            make_room(waiting.begin_next())
            while running:
                finish()
        finally:
            # Even after an error, wait for the batches in flight, because the next save reuses the memory that they
            # read.
            concurrent.futures.wait([each.committed for each in running])
        root = self.store.root
        if SAVING in root:
            batch.remove_root(SAVING)
        if label is not None:
            batch.set_root(RANKS, label)
        elif RANKS in root:
            batch.remove_root(RANKS)
        batch.set_root("step", step)
        batch.set_root("saved_unix_ms", time.time_ns() // 1_000_000)
        ticket = self.store.submit(batch)
        passage.free(passage.take())
        return ticket

    def _make_way(self, nbytes: int) -> None:
        """Keeps the current version before a save overwrites its pages, or removes the pages of an interrupted save."""
        root = self.store.root
        if SAVING in root:
            held = page_tree.read_manifest(self.store).pages if page_tree.MANIFEST_KEY in self.store else {}
            left = [info.page for info in self.store.pages() if info.key not in held and "dtype" in info.metadata]
            for at in range(0, len(left), _DELETED_AT_ONCE):
                batch = self.store.batch()
                for page in left[at:at + _DELETED_AT_ONCE]:
                    batch.delete(page)
                self.store.commit(batch, "logged")
            # Without a snapshot, the changes that it captured would stay in memory and leave no room for later saves.
            self.store.snapshot()
        else:
            self._versions.begin(nbytes)

    def _write_and_keep(self, passage: Passage, capture: Capture, save: int, step: int, name: str | None, note: str,
                        tree: Any, nbytes: int, bar: Bar) -> Kept:
        """Writes the version, and returns once it is durable and kept."""
        try:
            try:
                passage.wait_for_start()
                self._make_way(nbytes)
                ticket = self._write(passage, capture, step, note, tree, bar, self._versions.label(save, name))
            finally:
                passage.ended()
            ticket.wait()
        except BaseException as error:
            self._versions.failed(save, error)
            raise
        snapshot = self._versions.keep(save, ticket.lsn, step, name)
        return Kept(ticket.lsn, time.monotonic(), snapshot)

    def _state(self) -> dict[str, Any]:
        state = {name: dict(part) if isinstance(part, MutableMapping) else part.state_dict()
                 for name, part in self._parts.items()}
        if self._rng:
            state["rng"] = rng_state()
        return state

    def _check_open(self) -> None:
        if os.getpid() != self._opener:
            # The threads of a save in progress do not exist in this process.
            raise ForkedError("the checkpointer belongs to another process", remedy="create one in this process",
                              opener=self._opener)
        if self.store.closed:
            raise ClosedError("the checkpointer is closed")

    def _finish(self) -> None:
        self._check_open()
        last = self._last
        try:
            # A failure that the caller was notified of is not raised again.
            if last is not None and not last._told.is_set():
                last.wait()
        finally:
            # After Ctrl-C the save is still in progress.
            if last is None or last._has_ended:
                self._forget_last()
        self._settle()

    # Restoring.

    def restore(self, at: int | str | Version | None = None, *, cast: bool = False, progress: bool | None = None) -> int:
        """Loads a version in place into the model, the optimizer and the other objects, and returns the version's step.

        Values are restored exactly as they were saved. If a value does not fit, the call raises an error that names the
        value and changes nothing. All bytes of the version are verified before the first change. A GPU with enough free
        memory holds the verified bytes until then; otherwise the version is read twice, the second time mostly from the
        page cache.

        Tensors, including those of optimizers and dicts, stay in place if they have the saved shapes, element types and
        strides. The bytes of these tensors are read from the files into their memory. For tensors on a GPU, no copy of
        the version is made on the host. An optimizer's state is not cast to the type of its parameters. Parameter
        groups with `param_names` are matched by these names. A version of a compiled model or of a model in
        DistributedDataParallel fits the plain model, and vice versa.

        Values without such memory are held in host memory until the whole version is verified. The state of an
        optimizer that has made no step yet is held on the GPU instead. The same applies to modules and optimizers that
        load through their own method or hook.

        Objects with their own `load_state_dict`, and dicts, receive their state first. Then the bytes are read, and
        modules and optimizers load the new values of their tensors. Random states are restored last. If an object
        raises an error, changes are reverted as far as that is possible without a copy of the tensors, and the error
        names the changes that remain. Random states of GPUs that this process does not have are skipped.

        The load runs after work that is already queued on the current streams of the GPUs, and before work that is
        queued later.

        :param at: a step (int), a name, or a `Version`; None restores the newest version. Without `process_group`,
            "lsn:N" and "snapshot:N" are also accepted. Write a name that has one of these forms as "name:S".
        :param cast: whether to convert elements of the model and of its optimizer's state to the types of the model, as
            `load_state_dict` does. If False, a version with other element types is rejected.
        :param progress: as for `save`. One bar shows the verification and another one the load.
        :raises NoStateError: the version does not exist.
        :raises InvalidError: the model has other tensors, shapes or element types than the version, or is on the meta
            device; or the optimizer has other parameter groups. Nothing changed.
        :raises RestoreFailedError: an object could not load its state. `changed` names the objects that now have values
            of the version.
        :raises DamagedError: bytes on disk differ from the bytes that were written. If the damage occurred after the
            verification, a note names the changed objects.
        :raises RefusedError: a CUDA graph is being captured.
        """
        if not (at is None or isinstance(at, (str, Version))):
            at = _whole_number("at", at)
        _refuse_modes()
        targets = Targets(self._parts, of_rank=self._ranks is not None)
        layouts = layouts_of(self._parts) if self._ranks is not None else None
        streams = CurrentStreams(targets.devices())

        def proven() -> tuple[int, Restoration, PutBack]:
            views = self._versions.views(at)
            try:
                with streams.entered():
                    return self._versions.proven(lambda: self._proven(views, targets, layouts, cast, progress))
            except BaseException:
                views.close()
                raise

        step, restoration, changes = self._after_saves(f"restore {named(at)}", proven)
        with restoration:
            self._left.end(f"`restore` loaded step {step} before the next save")
            if self._copies is not None:
                # An optimizer may receive new tensors, which need the memory of the old tensors.
                self._copies.let_go()
            with self._bar(restoration.nbytes, "loading", progress) as bar:
                changes.run(lambda: restoration.load(bar))
        self._last, self._step = None, step
        return step

    def _proven(self, views: Views, targets: Targets, layouts: Any, cast: bool,
                progress: bool | None) -> tuple[int, Restoration, PutBack]:
        """Verifies a version and returns its step, the `Restoration` that loads its bytes, and the `PutBack` that loads
        its values."""
        root = views.own.root
        if "step" not in root:
            raise NoStateError("the state is not a version of a run", remedy="choose one of `versions()`")
        whole(views.own)
        nbytes = sum(info.length for info in views.own.pages() if "dtype" in info.metadata)
        with self._bar(nbytes, "proving", progress) as bar:
            restoration = Restoration(views, targets, layouts, bar, cast=cast, replicas=self._replicas,
                                      is_equal=TrainedNames(self._parts).__contains__)
        state = restoration.state
        if views.number is None or not self._rng:
            # Two ranks with the same random numbers would train on the same noise.
            state.pop("rng", None)
        missing = self._parts.keys() - state.keys()
        if missing:
            raise NoStateError(f"the version does not contain {', '.join(sorted(missing))}",
                               remedy="create the checkpointer with the objects that the version contains")
        changes = PutBack(self._parts, state, restoration.modules, restoration.parts_in_place, cast=cast)
        return int(root["step"]), restoration, changes

    def versions(self) -> list[Version]:
        """Waits for the save in progress and returns the kept versions, oldest first."""
        self._finish()
        return self._versions.listed()

    def give_up(self, name: str) -> None:
        """Removes the name of a version, and the version with it. The newest version is kept without its name, and so is
        a version that the archives of several ranks still need.

        :raises NoStateError: no version has this name.
        :raises RefusedError: the version is the newest one, and a later save was interrupted. Nothing changed.
        """
        self._after_saves(f"give up {name!r}", lambda: self._versions.give_up(name))

    def diff(self, before: int | str | Version, after: int | str | Version | None = None
             ) -> dict[str, Difference | None]:
        """Compares two versions and returns a `Difference` for each tensor that differs, by name.

        The value is None for a tensor that only one version contains, or whose shape or element type differs. Pages
        that no batch changed between the two versions are not read. With `process_group`, only tensors of this rank are
        compared.

        :param before: a step, a name or a Version, as for `restore`.
        :param after: another version; None uses the newest.
        :raises NoStateError: a version does not exist.
        :raises DamagedError: bytes on disk differ from the bytes that were written.

        >>> import torch, remanent.torch
        >>> state = {"w": torch.zeros(2, 3)}
        >>> with remanent.torch.Checkpointer(directory, extra={"state": state}, rng=False) as run:
        ...     _ = run.save(1), state["w"][1, :2].fill_(-0.5), run.save(2)
        ...     run.diff(1, 2)
        {'state/w': Difference(elements=2, first=(1, 0), largest=0.5, nans=0)}
        """
        def differing() -> dict[str, Difference | None]:
            with self._versions.view(before) as old:
                with self._versions.view(after) as new:
                    return difference(whole(old), whole(new))

        return self._after_saves(f"compare {named(before)} and {named(after)}", differing)

    def blame(self, name: str, index: int | Sequence[int]) -> list[ElementChange]:
        """Returns the kept versions in which an element of a tensor differs from the previous version, oldest first.

        Several changes between two kept versions are reported as one. With `process_group`, only this rank's part of
        the tensor is searched, in versions with the same number of ranks.

        :param name: the tensor's name as in the result of `diff`: "model/…", "optimizer/…", or a name in `extra`.
        :param index: an index for each dimension of the tensor, or a single int; negative indices count from the end.
        :raises NoStateError: no version has this tensor.
        :raises OutOfBoundsError: the element exists in no version.
        :raises DamagedError: bytes on disk differ from the bytes that were written.

        >>> import torch, remanent.torch
        >>> state = {"w": torch.zeros(2, 3)}
        >>> with remanent.torch.Checkpointer(directory, extra={"state": state}, rng=False, keep=9) as run:
        ...     for step in range(1, 7):
        ...         state["w"][1, 2] = step // 3
        ...         _ = run.save(step)
        ...     [(change.step, change.before, change.after) for change in run.blame("state/w", (1, 2))]
        [(1, None, 0.0), (3, 0.0, 1.0), (6, 1.0, 2.0)]
        """
        def changes() -> list[ElementChange]:
            versions = self._versions.agreed()
            opened, layouts = self._versions.viewer(), Layouts()

            def content(version: Version) -> Content:
                with opened(version) as view:
                    return self._versions.proven(lambda: content_of(view, name, index, layouts))

            return element_changes(versions, map(content, versions))

        return self._after_saves(f"look for {name!r} {index!r}", changes)

    def bisect(self, is_good: Callable[[Version], bool | None], *, good: int | str | Version,
               bad: int | str | Version | None = None) -> Version:
        """Returns the first version for which `is_good` returns False, found by binary search between a good version
        and a later bad version.

        About log2(n) of n versions are tested. `is_good` may call `restore` and evaluate the model, or read the version
        by other means. The state that `is_good` restored last remains in place. With `process_group`, all ranks test
        the same versions, and a version is good if it is good on all ranks.

        :param is_good: receives a `Version` and returns True for a good version, False for a bad one, and None if the
            result cannot be determined. An exception ends the search on all ranks.
        :param good: a version known to be good: its step, its name, or a Version.
        :param bad: a later version known to be bad; None uses the newest.
        :raises InvalidError: the good version is not older than the bad one.
        :raises NoStateError: `good` or `bad` is not kept, or `is_good` returned None for versions next to the first bad
            one.

        >>> import torch, remanent.torch
        >>> state = {"w": torch.zeros(3)}
        >>> with remanent.torch.Checkpointer(directory, extra={"state": state}, rng=False, keep=99) as run:
        ...     for step in range(1, 31):
        ...         state["w"][0] = 0.1 if step < 21 else float("nan")
        ...         _ = run.save(step)
        ...     def is_good(version):
        ...         _ = run.restore(version)
        ...         return not state["w"].isnan().any()
        ...     run.bisect(is_good, good=1).step
        21
        """
        versions = self._after_saves("bisect", self._versions.agreed)
        ranks = self._ranks

        def judged(version: Version) -> bool | None:
            failure: BaseException | None = None
            verdict: bool | None = None
            try:
                found = is_good(version)
                verdict = None if found is None else bool(found)
            except BaseException as error:
                failure = error
            if ranks is not None:
                # Ranks without a failure would otherwise wait for those with one.
                said = self._after_saves(f"judge step {version.step}", lambda: _gathered(ranks, verdict, failure))
                verdict = False if False in said else None if None in said else True
            elif failure is not None:
                raise failure
            return verdict

        return first_bad(versions, number_of(versions, good), number_of(versions, bad), judged)

    def fork(self, directory: _Path, at: int | str | Version | None = None) -> None:
        """Creates a store in `directory` whose history begins at a version of this run. Images are shared, not copied.

        With `process_group`, the new run has as many ranks as saved the version.

        :param at: the version, as for `restore`; None uses the newest.
        :raises NoStateError: the version does not exist.
        """
        self._after_saves(f"fork {named(at)}", lambda: self._versions.fork(directory, at))

    def close(self) -> None:
        """Waits for the save in progress and closes the store.

        :raises InUseError: the last save was coalesced, and no save followed.
        """
        try:
            if not self.store.closed:
                self._finish()
        finally:
            if self._hook is not None:
                self._hook.remove()
            if self._copies is not None:
                self._copies.let_go()
            self._sender.shutdown()
            self._worker.shutdown()
            self._writers.shutdown()
            self._versions.end()
            if self._ranks is not None:
                self._ranks.end()
            self.store.close()
            untold = self._left.end("no save followed")
        if untold is not None:
            raise untold

    def __repr__(self) -> str:
        last, step = self._last, self._step
        state = ", closed" if self.store.closed else ""
        if last is not None and last.done():
            step = last.step
        elif last is not None and not last._has_ended and not state:
            state = f", saving={last.step}"
        # The step is unknown before the first save or restore in this process.
        return f"Checkpointer({self.store.path!r}{'' if step is None else f', step={step}'}{state})"

    def __enter__(self) -> Checkpointer:
        if self.store.closed:
            raise ClosedError("the checkpointer is closed")
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        try:
            self.close()
        except Exception:
            # Report the exception of the block and not this error, which that exception may have caused.
            if kind is None:
                raise


class _Running(NamedTuple):
    """A batch that a writer thread is committing."""

    committed: concurrent.futures.Future[Any]
    # The number of blocks in the ring that the batch uses.
    blocks: int
    # The bytes of memory that the batch may occupy until the next snapshot.
    waiting: int


def _gathered(ranks: Ranks, verdict: bool | None, failure: BaseException | None) -> list[bool | None]:
    """Returns the verdicts of all ranks, or raises the failure of the first rank that failed."""
    def told() -> bool | None:
        if failure is not None:
            raise failure
        return verdict

    return ranks.gather(ranks.all_or_none(told))


def _agree_on_replicas(ranks: Ranks, replicated: bool, compare_every: int | None) -> None:
    """Raises `InvalidError` on all ranks unless all ranks pass the same arguments."""
    own = [bool(replicated), compare_every]
    for rank, other in enumerate(ranks.gather(own)):
        if other != own:
            raise InvalidError(f"replicated, compare_every: rank {rank} passed {other[0]}, {other[1]}, but rank "
                               f"{ranks.rank} passed {own[0]}, {own[1]}", remedy="pass the same arguments on all ranks")


def _check_numbers(keep: int, room: int, device_room: int) -> None:
    if keep < 1:
        raise InvalidError(f"keep: {keep} is below 1, the smallest number of versions to keep")
    if room < 0 or device_room < 0:
        raise InvalidError(f"room and device_room must be at least 0 bytes, not {room} and {device_room}")


def _check_replicas(replicated: bool, compare_every: int | None, has_group: bool) -> None:
    if replicated and not has_group:
        raise InvalidError("replicated: a single process has no replicas", remedy="pass `process_group`")
    if compare_every is not None and not replicated:
        raise InvalidError("compare_every: only replicas can be compared", remedy="pass `replicated=True`")
    if compare_every is not None and _whole_number("compare_every", compare_every) < 1:
        raise InvalidError(f"compare_every: {compare_every} is below 1, which compares at every save")


def _store_options(device: torch.device, digests: bool, options: StoreOptions) -> StoreOptions:
    """Returns the options of the run's store: the caller's, and defaults for those that the caller does not pass."""
    # Each save takes a snapshot, so periodic ones are not needed.
    own: StoreOptions = {"device": "host" if device.type == "cpu" else str(device),
                         "images": {"compression": False}, "retention": {"snapshots_kept": 1},
                         "snapshots": {"log_bytes": None, "interval": None}}
    if digests:
        own["memory"] = {"budget": {"disk": _PENDING_BYTES}}
    return merged(own, options)


def _check_name(name: str) -> None:
    length = len(name.encode())
    if not 1 <= length <= _NAME_LEN_MAX:
        raise InvalidError(f"name: {length} bytes long; must have 1 to {_NAME_LEN_MAX} bytes")
    if name.startswith(STEP) or "\0" in name:
        raise InvalidError(f"name: {name!r} must not begin with {STEP!r} or contain a NUL byte")
    if name.startswith(("lsn:", "snapshot:", "name:")):
        raise InvalidError(f"name: {name!r} must not begin with \"lsn:\", \"snapshot:\" or \"name:\"")


def _whole_number(what: str, number: Any) -> int:
    try:
        return operator.index(number)
    except TypeError as error:
        raise InvalidError(f"{what}: {number!r} is not an integer") from error


def _refuse_modes() -> None:
    """Raises `RefusedError` under a torch mode that records operations instead of running them."""
    refuse_fake_tensors()
    _refuse_capture()


def _refuse_capture() -> None:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        raise RefusedError("a CUDA graph is being captured, and its replay would not save, restore or wait for a save",
                           remedy="capture after `Saved.wait`; do not use `overlap` with captured steps")
