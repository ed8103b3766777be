//! Reads of many ranges in one call that does not block the caller.
//!
//! 1. One closure on the applier, between two batches, captures all ranges in the same state and starts their transfer
//!    to the host.
//! 2. A thread of the store waits for the transfers in the same order, and passes each result to the caller's handle.
//!
//! The first such read starts the thread. The total number of bytes of reads in flight and of results that callers keep
//! is limited. Otherwise a caller that never drops its handles could exhaust pinned memory.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use remanent_format::{Lsn, PageId, Place};

use super::readback::Drain;
use super::{Applier, Turn};
use crate::base::allocation::{make_room, push};
use crate::base::poison::Poison;
use crate::base::sync::atomic::{AtomicU64, Ordering};
use crate::base::sync::thread::JoinHandle;
use crate::base::sync::threads;
use crate::base::sync::{Condvar, Instant, Mutex};
use crate::device::{EngineDevice, SHORT_COPY_LEN_MAX};
use crate::error::{Error, Result};
use crate::images::disk_pages::DiskPage;
use crate::memory::staging::{StagingBuf, StagingPool};

/// The maximum total number of bytes of reads in flight and of results that callers keep.
pub(crate) const READ_BYTES_MAX: u64 = 256 << 20;

/// Byte ranges of pages, to be read in one call.
pub(crate) type PageRanges = Vec<(PageId, Range<u64>)>;

/// The thread that completes reads, and its queue.
pub(crate) struct Reads {
    applier: Arc<Applier>,
    device: Arc<EngineDevice>,
    staging: Arc<StagingPool>,
    poison: Arc<Poison>,
    shared: Arc<ReadQueue>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// The queue of captured reads, shared by the thread, the applier and the handles.
#[derive(Default)]
struct ReadQueue {
    state: Mutex<QueueState>,
    more: Condvar,
    /// The total number of bytes of reads in flight and of results that callers keep.
    bytes: AtomicU64,
}

#[derive(Default)]
struct QueueState {
    reads: VecDeque<CapturedRead>,
    is_over: bool,
}

/// A read whose ranges were captured, and whose bytes are being transferred to the host.
struct CapturedRead {
    lsn: Lsn,
    drain: Drain,
    on_disk: Vec<DiskRead>,
    open: OpenRead,
}

/// A range of a read that must be read from disk.
pub(super) struct DiskRead {
    page: DiskPage,
    range: Range<u64>,
    /// The offset of the range's bytes in the buffer of the read.
    at: usize,
}

/// The part of a read that sets its result. Dropping it without a result makes the read fail with `Closed`.
struct OpenRead {
    state: Arc<ReadState>,
    reserved: Option<ReservedBytes>,
    poison: Arc<Poison>,
}

/// The result of a read, shared by the caller's handle and the thread that completes the read.
#[derive(Default)]
pub(crate) struct ReadState {
    slot: Mutex<ReadSlot>,
    done: Condvar,
}

#[derive(Default)]
struct ReadSlot {
    outcome: Option<Result<ReadOutcome>>,
    is_done: bool,
    waker: Option<Waker>,
}

/// The bytes of a completed read, in a staging buffer.
pub(crate) struct ReadOutcome {
    pub lsn: Lsn,
    staged: Option<StagingBuf>,
    pool: Arc<StagingPool>,
    _reserved: Option<ReservedBytes>,
}

/// A number of bytes reserved from [`READ_BYTES_MAX`]. Dropping this value releases the bytes.
struct ReservedBytes {
    queue: Arc<ReadQueue>,
    len: u64,
}

impl Drop for ReservedBytes {
    fn drop(&mut self) {
        self.queue.bytes.fetch_sub(self.len, Ordering::Relaxed);
    }
}

impl ReadOutcome {
    /// Returns the bytes of all ranges, one after another.
    pub fn bytes(&self) -> &[u8] {
        self.staged.as_deref().unwrap_or_default()
    }
}

impl Drop for ReadOutcome {
    fn drop(&mut self) {
        if let Some(staged) = self.staged.take() {
            self.pool.put(staged.into_staging());
        }
    }
}

impl Reads {
    /// Creates a reader, whose thread is started by the first read.
    pub fn new(
        applier: Arc<Applier>,
        device: Arc<EngineDevice>,
        staging: Arc<StagingPool>,
        poison: Arc<Poison>,
    ) -> Self {
        Self { applier, device, staging, poison, shared: Arc::default(), thread: Mutex::new(None) }
    }

    /// Begins a read of all ranges in the same state. The state includes every batch passed to the applier so far. The
    /// call waits only for pages that are not loaded.
    ///
    /// # Errors
    /// `OutOfMemory`, with the requested length, if the read would exceed [`READ_BYTES_MAX`]; `Damaged` for a page that
    /// cannot be loaded; a device error. Errors in the ranges are part of the read's result.
    pub fn begin(&self, ranges: PageRanges) -> Result<Arc<ReadState>> {
        let len = ranges.iter().fold(0, |sum: u64, (_, range)| sum.saturating_add(len_of(range)));
        let reserved = self.reserve(len)?;
        self.start()?;
        self.applier.unloaded().wait(ranges.iter().map(|(page, _)| *page))?;
        let staged = self.staging.take(usize::try_from(len).map_err(|_| refused(len))?)?;
        let state = Arc::new(ReadState::default());
        let open = OpenRead { state: state.clone(), reserved: Some(reserved), poison: self.poison.clone() };
        let shared = self.shared.clone();
        // The closure's own result is not needed: it passes the read to the thread, which sets the read's result.
        let _waits = self.applier.queue_turn(move |turn| {
            match gather_ranges(turn, &ranges, len, staged, None) {
                Ok((lsn, drain, on_disk)) => shared.push(CapturedRead { lsn, drain, on_disk, open }),
                Err(error) => {
                    let error = open.poison.set_by_device(error);
                    open.finish(Err(error));
                }
            }
            Ok(())
        });
        Ok(state)
    }

    fn reserve(&self, len: u64) -> Result<ReservedBytes> {
        let fits = |bytes: u64| bytes.checked_add(len).filter(|bytes| *bytes <= READ_BYTES_MAX);
        let reserved = self.shared.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits);
        match reserved {
            Ok(_) => Ok(ReservedBytes { queue: self.shared.clone(), len }),
            Err(_) => Err(refused(len)),
        }
    }

    /// Starts the thread, unless it is running.
    fn start(&self) -> Result<()> {
        let mut thread = self.thread.lock();
        if thread.is_none() {
            let (shared, device, staging) = (self.shared.clone(), self.device.clone(), self.staging.clone());
            let life = move || shared.run(&device, &staging);
            let started = threads::start("remanent-read", life);
            *thread = Some(started.map_err(|error| Error::thread("the thread for reads", error))?);
        }
        Ok(())
    }
}

impl Drop for Reads {
    /// Completes all reads. This must happen before the arena is dropped, which owns the memory of copied ranges.
    fn drop(&mut self) {
        let Some(thread) = self.thread.lock().take() else { return };
        // The empty closure runs after the closures of all reads, so no read is added to the queue after the flag is
        // set. If the applier has ended, no closure runs any more.
        let _gone = self.applier.turn(|_| Ok(()));
        self.shared.state.lock().is_over = true;
        self.shared.more.notify_all();
        if thread.join().is_err() {
            tracing::error!("the thread for reads panicked");
        }
    }
}

impl ReadQueue {
    fn push(&self, read: CapturedRead) {
        let mut state = self.state.lock();
        // The rejected read is dropped after the lock is released.
        if state.is_over {
            drop(state);
            return drop(read);
        }
        state.reads.push_back(read);
        self.more.notify_one();
    }

    fn run(&self, device: &EngineDevice, staging: &Arc<StagingPool>) {
        // If this thread panics, the guard drops the queued reads and later ones, so that no caller waits forever.
        let _end_guard = QueueGuard(self);
        while let Some(CapturedRead { lsn, drain, on_disk, mut open }) = self.next() {
            let drained = drain.finish(device).map_err(|error| open.poison.set_by_device(error));
            let outcome = drained.and_then(|mut drained| {
                for DiskRead { page, range, at } in on_disk {
                    page.read(range.start, &mut drained.bytes[at..at + len_of(&range) as usize])?;
                }
                Ok(drained)
            });
            let reserved = open.reserved.take();
            open.finish(outcome.map(|drained| ReadOutcome {
                lsn,
                staged: Some(drained.bytes),
                pool: staging.clone(),
                _reserved: reserved,
            }));
        }
    }

    /// Returns the next captured read, or `None` when the store closes.
    fn next(&self) -> Option<CapturedRead> {
        let mut state = self.state.lock();
        loop {
            if let Some(read) = state.reads.pop_front() {
                return Some(read);
            }
            if state.is_over {
                return None;
            }
            self.more.wait(&mut state);
        }
    }
}

struct QueueGuard<'q>(&'q ReadQueue);

impl Drop for QueueGuard<'_> {
    fn drop(&mut self) {
        let left = {
            let mut state = self.0.state.lock();
            state.is_over = true;
            std::mem::take(&mut state.reads)
        };
        drop(left);
    }
}

impl OpenRead {
    /// Frees everything that the result does not need, and then publishes the result. In this order, a caller that
    /// receives an error can immediately request as many bytes again.
    fn finish(mut self, outcome: Result<ReadOutcome>) {
        self.reserved = None;
        self.state.finish(outcome);
    }
}

impl Drop for OpenRead {
    fn drop(&mut self) {
        self.reserved = None;
        self.state.finish(self.poison.check().and(Err(Error::Closed)));
    }
}

impl ReadState {
    /// Sets the result, unless a result was already set.
    fn finish(&self, outcome: Result<ReadOutcome>) {
        let waker = {
            let mut slot = self.slot.lock();
            if slot.is_done {
                return;
            }
            (slot.outcome, slot.is_done) = (Some(outcome), true);
            slot.waker.take()
        };
        self.done.notify_all();
        // The waker is called outside the lock, because an executor may poll the task during this call.
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    pub fn is_done(&self) -> bool {
        self.slot.lock().is_done
    }

    /// Waits for the result until `until`, or without limit if `until` is `None`. Returns whether there is a result.
    pub fn wait(&self, until: Option<Instant>) -> bool {
        let mut slot = self.slot.lock();
        while !slot.is_done {
            match until {
                None => self.done.wait(&mut slot),
                Some(until) => {
                    if self.done.wait_until(&mut slot, until).timed_out() {
                        return slot.is_done;
                    }
                }
            }
        }
        true
    }

    /// Removes and returns the result. Returns `None` if there is no result yet, or if it was already taken.
    pub fn take(&self) -> Option<Result<ReadOutcome>> {
        self.slot.lock().outcome.take()
    }

    /// Takes the result like [`take`](Self::take). If there is no result yet, registers the task's waker.
    pub fn poll(&self, context: &Context<'_>) -> Poll<Result<ReadOutcome>> {
        let mut slot = self.slot.lock();
        if slot.is_done {
            let taken = slot.outcome.take();
            return Poll::Ready(taken.unwrap_or(Err(Error::Closed)));
        }
        match &mut slot.waker {
            Some(waker) => waker.clone_from(context.waker()),
            none => *none = Some(context.waker().clone()),
        }
        Poll::Pending
    }
}

impl std::fmt::Debug for ReadState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReadState").field("is_done", &self.is_done()).finish_non_exhaustive()
    }
}

/// Captures all ranges in the current state, and transfers them one after another to `staged`. If `sums` is present,
/// checksums of the ranges are computed on the device and again on the host.
pub(super) fn gather_ranges(
    turn: &Turn<'_>,
    ranges: &[(PageId, Range<u64>)],
    len: u64,
    staged: StagingBuf,
    sums: Option<&Arc<StagingPool>>,
) -> Result<(Lsn, Drain, Vec<DiskRead>)> {
    turn.intact()?;
    let mut sources = Vec::new();
    make_room(&mut sources, ranges.len())?;
    let (mut at, mut places, mut on_disk) = (0, Vec::new(), Vec::new());
    for (page, range) in ranges {
        let page = *page;
        let info = turn.applied.table.get(page).ok_or(Error::UnknownPage { page })?;
        if range.start > range.end || range.end > info.len {
            let len = len_of(range);
            return Err(Error::OutOfBounds { page, offset: range.start, len, page_len: info.len });
        }
        if range.is_empty() {
            continue;
        }
        if let Some(page) = turn.applied.on_disk.get(page) {
            push(&mut on_disk, DiskRead { page: page.part(range), range: range.clone(), at: at as usize })?;
            at += len_of(range);
            continue;
        }
        let source = turn.applied.memory[page].part(range.start, len_of(range));
        let is_far = matches!(info.place, Place::Device(_)) && turn.is_reached_by_kernels(source);
        let place = is_far.then_some(info.place);
        if places.last() != Some(&place) {
            push(&mut places, place)?;
        }
        sources.push((source, at));
        at += source.len;
    }
    let lsn = turn.applied.point.lsn;
    // Long ranges of one GPU are first copied to separate memory there, so that deltas continue during the transfer.
    let drain = match places[..] {
        [Some(place)] if len > SHORT_COPY_LEN_MAX => turn.drain(place, sources, len, staged, 0, sums)?,
        _ => turn.drain_in_order(sources, staged, 0, sums)?,
    };
    Ok((lsn, drain, on_disk))
}

pub(super) fn len_of(range: &Range<u64>) -> u64 {
    range.end.saturating_sub(range.start)
}

/// Returns the error for a read of `len` bytes that would exceed [`READ_BYTES_MAX`].
fn refused(len: u64) -> Error {
    Error::OutOfMemory { place: Place::Pinned, len }
}
