//! The applier: the only thread that submits to [`Lane::Apply`], in log order.
//!
//! Committers pass logged batches to the applier (I1). The applier combines all queued batches into one command list,
//! so that one kernel launch applies many commits. Work that must be ordered with commits, such as reads and the
//! gathers of a snapshot, runs on this thread between two batches, as a closure that receives a [`Turn`].
//!
//! If the device did not accept or complete a command list, the list is lost, and memory no longer matches the page
//! table. The newest bytes of the pages exist only in that memory, so the store is poisoned: no later list is submitted
//! and no page is read. The log still contains every batch.

pub(crate) mod lease;
pub(crate) mod pin;
pub(crate) mod descriptor;
mod page_gather;
mod unloaded;
mod exact_cut;
mod handover;
mod provision;
mod filled;
mod readback;
mod arrival;
mod in_flight;
mod reads;
mod version_reads;
mod changes;
mod lease_table;
mod commands;
mod queue;
mod worker;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use remanent_format::state::id_map::IdMap;
use remanent_format::state::table::Changes;
use remanent_format::{LogPoint, Lsn, PageId, PageInfo, PageTable, Place};

pub(crate) use arrival::{ArrivalProof, ArrivalSums};
pub use changes::{AppliedBatch, AppliedChange, AppliedPage, ChangeEvent, ChangeStream};
pub(crate) use commands::{ListBuilder, ListRoom, PayloadAt, is_payload_enough, needs_aside, stage_aside};
pub(crate) use exact_cut::ExactCut;
pub(crate) use filled::FilledMemory;
pub(crate) use handover::Handover;
pub(crate) use lease_table::{LeaseId, Leases};
pub(crate) use page_gather::PageGather;
pub(crate) use provision::Provision;
pub(crate) use readback::{Drain, Drained, GatheredBytes};
pub(crate) use reads::{ReadOutcome, ReadState, Reads};
pub(crate) use unloaded::{UnloadedPage, UnloadedSet};
pub(crate) use version_reads::VersionRange;

use self::changes::ChangeFeed;
use self::queue::Requests;
use self::worker::Worker;
use crate::base::cache_padded::CachePadded;
use crate::base::sync::atomic::{AtomicU64, Ordering};
use crate::base::sync::thread::JoinHandle;
use crate::base::sync::threads;
use crate::base::sync::{Condvar, Instant, Mutex, mpsc};
use crate::device::sums::transfer_corrupted;
use crate::device::{CommandList, EngineDevice, Fence, Lane, Pending, SHORT_COPY_LEN_MAX, Span};
use crate::error::{Error, Result, Unavailable};
use crate::images::disk_pages::{DiskImage, DiskPage, DiskPageTable, DiskPages};
use crate::memory::arena::{Arena, PageMemory};
use crate::versions::Versions;

use crate::base::poison::Poison;
use crate::base::wakers::Wakers;
use crate::memory::staging::{GrownBytes, StagingBuf, StagingPool};

/// The number of payload bytes at which the list under construction is submitted.
const LIST_BYTES: usize = 256 << 10;

/// The images of the pages that a batch moves to disk, in ascending order of page id. Each image contains the page's
/// bytes before the batch. An empty page has no image.
pub(crate) type NewDiskImages = Vec<(PageId, Option<Arc<DiskImage>>)>;

/// A logged batch with everything that the applier needs to apply it. Committers pass it to [`Applier::push`].
pub(crate) struct ApplyWork {
    /// The position of the end of the batch's frame in the log.
    pub point: LogPoint,
    /// The batch's payload, as logged.
    pub payload: GrownBytes,
    /// The changes that the batch makes to the page table.
    pub changes: Changes,
    /// The other resources that are needed to apply the batch, or `None` if the payload suffices.
    pub provision: Option<Box<Provision>>,
}

/// The state of the pages after all lists submitted so far. Accessed only on the applier's thread.
pub(crate) struct AppliedState {
    /// The page table after the last applied batch.
    pub table: PageTable,
    /// The memory of all loaded pages.
    pub memory: IdMap<PageId, PageMemory>,
    /// The pages of [`Place::Disk`], which have no memory.
    pub on_disk: DiskPageTable,
    /// The pages that an open has not loaded yet.
    pub unloaded: Arc<UnloadedSet>,
    /// The position of the end of the last applied batch in the log.
    pub point: LogPoint,
    /// The pages deleted since a snapshot began, each with the Lsn of the batch that deleted it. `None` while no
    /// snapshot needs deleted pages.
    pub deleted: Option<BTreeMap<PageId, Lsn>>,
    /// The exact cut of a snapshot in progress: the pages that the snapshot has not gathered yet. `None` without such a
    /// snapshot.
    pub cut: Option<ExactCut>,
    /// The long pages that a snapshot is gathering piece by piece.
    pub gathers: HashMap<PageId, PageGather>,
}

impl AppliedState {
    /// Returns the memory of a loaded page.
    ///
    /// # Errors
    /// `Unavailable` if the page is on disk and has no memory.
    pub fn memory_of(&self, page: PageId) -> Result<&PageMemory> {
        if self.on_disk.contains(page) {
            let reason = "a page on disk has no memory: move it to another place first";
            return Err(Error::Unavailable(Unavailable::Place { place: Place::Disk, reason }));
        }
        Ok(&self.memory[page])
    }

    /// Frees the memory of all pages after a failed open. No command list may use the memory any more.
    pub fn give_back(self, arena: &Arena) {
        let loaded = self.memory.into_items().map(|(_, memory)| memory);
        arena.discard_all(loaded.chain(self.unloaded.take_memory()));
    }
}

/// The components of a store from which [`Applier::start`] creates an applier.
#[derive(Clone)]
pub(crate) struct ApplierParts {
    pub device: Arc<EngineDevice>,
    pub arena: Arc<Arena>,
    pub staging: Arc<StagingPool>,
    pub poison: Arc<Poison>,
    pub leases: Arc<Leases>,
    /// The versions of pages for readers. The applier publishes each page's memory in this table.
    pub versions: Arc<Versions>,
    /// The state that all pages on disk share.
    pub disk_pages: Arc<DiskPages>,
}

/// The applier's state between two batches. A closure passed to [`Applier::turn`] receives this value, and can read
/// pages and submit command lists in batch order.
pub(crate) struct Turn<'a> {
    /// The state of the pages after all batches before the closure.
    pub applied: &'a mut AppliedState,
    /// The allocator of page memory.
    pub arena: &'a Arc<Arena>,
    /// The versions of pages for readers. A closure that moves a page's bytes must update the page's version.
    pub versions: &'a Versions,
    device: &'a EngineDevice,
    lost: &'a mut Option<Error>,
}

impl Turn<'_> {
    /// Submits a list to the lane, after every batch so far.
    ///
    /// # Errors
    /// A device error; the earlier error that lost the pages' bytes.
    pub fn submit(&self, list: CommandList) -> Result<Pending> {
        self.intact()?;
        self.device.submit(Lane::Apply, list)
    }

    /// Returns an error if memory no longer matches the page table because a command list was lost. Page memory must
    /// not be read then.
    ///
    /// # Errors
    /// The earlier error that lost the pages' bytes.
    pub fn intact(&self) -> Result<()> {
        self.lost.as_ref().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Returns whether kernels can access the memory of `span`. Kernels cannot access ordinary host memory, or memory
    /// of length 0.
    pub fn is_reached_by_kernels(&self, span: Span) -> bool {
        self.device.address(span.memory).is_some()
    }

    /// Records that memory no longer matches the table because of `error`. Memory is not read afterwards.
    pub fn mark_unknown(&mut self, error: &Error) {
        self.lost.get_or_insert_with(|| error.clone());
    }
}

/// A handle to the applier's thread. Committers pass batches to it, and readers run closures between batches on it.
pub(crate) struct Applier {
    requests: CachePadded<Requests>,
    progress: CachePadded<Mutex<ApplierProgress>>,
    /// Notified when `progress` changes.
    moved: Condvar,
    /// The tasks that wait for a change of `progress`.
    wakers: Wakers,
    /// The Lsn of the newest applied batch, for readers that take no lock. 0 once a command list is lost.
    applied: CachePadded<AtomicU64>,
    poison: Arc<Poison>,
    unloaded: Arc<UnloadedSet>,
    /// The streams that report the changes of batches.
    changes: Arc<ChangeFeed>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct ApplierProgress {
    /// The Lsn of the newest batch whose command list was submitted.
    applied: Lsn,
    /// The value of a fence that passes after the list of the batch `applied`.
    fence: u64,
    /// Whether a command list was lost. No later batch is applied then, and the store is poisoned.
    is_lost: bool,
}

impl Applier {
    /// Starts the applier's thread with the pages that recovery loaded. The thread applies a batch only after
    /// `wait_logged` has returned for the batch (I1).
    pub fn start(
        parts: ApplierParts,
        wait_logged: impl Fn(Lsn) -> Result<()> + Send + 'static,
        applied: AppliedState,
    ) -> Result<Arc<Self>> {
        let applier = Arc::new(Self {
            requests: CachePadded(Requests::new()),
            progress: CachePadded(Mutex::new(ApplierProgress {
                applied: applied.point.lsn,
                fence: 0,
                is_lost: false,
            })),
            moved: Condvar::new(),
            wakers: Wakers::default(),
            applied: CachePadded(AtomicU64::new(applied.point.lsn.0)),
            poison: parts.poison.clone(),
            unloaded: applied.unloaded.clone(),
            changes: Arc::default(),
            thread: Mutex::new(None),
        });
        let arena = parts.arena.clone();
        // The pages are passed through a shared slot. If the thread cannot be started, they are taken back from it and
        // freed.
        let handed = Arc::new(Mutex::new(Some(applied)));
        let thread = threads::start("remanent-apply", {
            let (shared, handed) = (applier.clone(), handed.clone());
            move || {
                let _end_guard = ApplierGuard(shared.clone());
                let Some(applied) = handed.lock().take() else { return };
                let wait_logged = Box::new(wait_logged);
                Worker::new(shared, parts, wait_logged, applied).run();
            }
        });
        let thread = thread.map_err(|error| {
            let applied = handed.lock().take();
            applied.into_iter().for_each(|applied| applied.give_back(&arena));
            Error::thread("the applier's thread", error)
        })?;
        *applier.thread.lock() = Some(thread);
        Ok(applier)
    }

    /// Returns the set of pages that are not loaded yet. A caller must wait for a page here before it runs a closure
    /// that uses the page's memory.
    pub fn unloaded(&self) -> &Arc<UnloadedSet> {
        &self.unloaded
    }

    /// Returns the streams that report the changes of batches.
    pub fn changes(&self) -> &Arc<ChangeFeed> {
        &self.changes
    }

    /// Passes a batch to the applier. All pages of the batch must be loaded, and calls must be in log order. Waits
    /// while too many bytes are queued. The applier takes no lock of the caller, so the wait cannot deadlock.
    ///
    /// `show` makes the batch visible and must not wait. Any closure that is passed to [`turn`](Self::turn) after
    /// `show` runs after the batch.
    pub fn push(&self, work: ApplyWork, show: impl FnOnce()) {
        self.requests.push(work, show);
    }

    /// Runs the closure `turn` on the applier's thread after every batch passed to the applier so far, and
    /// returns its result.
    pub fn turn<T: Send + 'static>(
        &self,
        turn: impl FnOnce(&mut Turn<'_>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.queue_turn(turn)()
    }

    /// Queues the closure `turn` to run after every batch passed to the applier so far. Returns a function that
    /// waits for the result.
    pub fn queue_turn<T: Send + 'static>(
        &self,
        turn: impl FnOnce(&mut Turn<'_>) -> Result<T> + Send + 'static,
    ) -> impl FnOnce() -> Result<T> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let turn = Box::new(move |state: &mut Turn<'_>| {
            // Fails if no caller waits for the result any more.
            let _receiver_gone = sender.send(turn(state));
        });
        self.requests.turn(turn);
        move || receiver.recv().unwrap_or_else(|_| self.poison.check().and(Err(Error::Closed)))
    }

    /// Reads a range of a page, and returns the page's information, the newest batch that the bytes reflect, and the
    /// bytes. `range` computes the range from the page's information, and `len_known` is its expected length. The bytes
    /// of a long range on a GPU are transferred in a separate lane, so that deltas continue.
    pub fn read(
        &self,
        device: &EngineDevice,
        staging: &Arc<StagingPool>,
        page: PageId,
        len_known: u64,
        range: impl FnOnce(&PageInfo) -> (u64, u64) + Send + 'static,
    ) -> Result<(PageInfo, Lsn, StagingBuf)> {
        let (info, lsn, gathered) = self.read_by(staging, page, len_known, range, false)?;
        Ok((info, lsn, gathered.finish(device)?))
    }

    /// Reads bytes that will be logged, like [`read`](Self::read), and compares checksums from both sides of the bus.
    ///
    /// # Errors
    /// Same as `read`.
    pub fn read_proven(
        &self,
        device: &EngineDevice,
        staging: &Arc<StagingPool>,
        page: PageId,
        len_known: u64,
        range: impl Fn(&PageInfo) -> (u64, u64) + Clone + Send + 'static,
    ) -> Result<(PageInfo, StagingBuf)> {
        let once = || {
            let (info, _, gathered) = self.read_by(staging, page, len_known, range.clone(), true)?;
            Ok::<_, Error>(gathered.finish_once(device)?.map(|bytes| (info, bytes)))
        };
        if let Some(read) = once()? {
            return Ok(read);
        }
        once()?.ok_or_else(|| transfer_corrupted(device, "bytes of a page"))
    }

    /// Reads a range of a page after all batches so far. If `is_summed`, checksums from both sides of the bus are
    /// compared.
    fn read_by(
        &self,
        staging: &Arc<StagingPool>,
        page: PageId,
        len_known: u64,
        range: impl FnOnce(&PageInfo) -> (u64, u64) + Send + 'static,
        is_summed: bool,
    ) -> Result<(PageInfo, Lsn, GatheredRange)> {
        self.unloaded.wait([page])?;
        let staged = staging.take(host_len(len_known)?)?;
        let pool = staging.clone();
        self.turn(move |turn| {
            let info = turn.applied.table.get(page).ok_or(Error::UnknownPage { page })?;
            let (offset, len) = range(&info);
            if offset.checked_add(len).is_none_or(|end| end > info.len) {
                return Err(Error::OutOfBounds { page, offset, len, page_len: info.len });
            }
            turn.intact()?;
            // The page, and with it the range, may be longer than expected.
            let staged = pool.shorten(staged, host_len(len)?)?;
            if let Some(on_disk) = turn.applied.on_disk.get(page) {
                let gathered = GatheredRange::OnDisk(on_disk.part(&(offset..offset + len)), offset, staged);
                return Ok((info, turn.applied.point.lsn, gathered));
            }
            let source = turn.applied.memory[page].part(offset, len);
            let sums = is_summed.then_some(&pool);
            // Only long ranges in GPU memory are copied to separate device memory first. From host memory, that copy
            // would take as long as the transfer.
            let is_far = matches!(info.place, Place::Device(_)) && turn.is_reached_by_kernels(source);
            let drain = if is_far && len > SHORT_COPY_LEN_MAX {
                turn.drain(info.place, vec![(source, 0)], len, staged, 0, sums)?
            } else {
                turn.drain_in_order(vec![(source, 0)], staged, 0, sums)?
            };
            Ok((info, turn.applied.point.lsn, GatheredRange::InMemory(drain)))
        })
    }

    /// Waits until the command list of batch `lsn` is submitted, and returns a fence that passes after the batch.
    pub fn wait_applied(&self, lsn: Lsn) -> Result<Fence> {
        let mut progress = self.progress.lock();
        if progress.applied < lsn {
            drop(progress);
            self.requests.expedite(lsn);
            progress = self.progress.lock();
        }
        while progress.applied < lsn {
            if progress.is_lost {
                self.poison.check()?;
            }
            self.moved.wait(&mut progress);
        }
        Ok(Fence { lane: Lane::Apply, value: progress.fence })
    }

    /// Waits until the command list of batch `lsn` is submitted, but at most until `until`. Returns whether it is
    /// submitted.
    pub fn wait_applied_until(&self, lsn: Lsn, until: Instant) -> Result<bool> {
        self.expedite(lsn);
        let mut progress = self.progress.lock();
        while progress.applied < lsn {
            if progress.is_lost {
                self.poison.check()?;
            }
            if self.moved.wait_until(&mut progress, until).timed_out() {
                return Ok(progress.applied >= lsn);
            }
        }
        Ok(true)
    }

    /// Returns whether the command list of batch `lsn` is submitted.
    ///
    /// # Errors
    /// `Poisoned` if the batch will never be submitted.
    pub fn is_applied(&self, lsn: Lsn) -> Result<bool> {
        let progress = self.progress.lock();
        if progress.applied < lsn && progress.is_lost {
            self.poison.check()?;
        }
        Ok(progress.applied >= lsn)
    }

    /// Makes the applier process batch `lsn` immediately instead of collecting more batches.
    pub fn expedite(&self, lsn: Lsn) {
        if !self.has_applied(lsn) {
            self.requests.expedite(lsn);
        }
    }

    /// Returns the set of tasks to wake when the command list of a batch is submitted.
    pub fn wakers(&self) -> &Wakers {
        &self.wakers
    }

    /// Returns the Lsn of the newest batch whose command list is submitted.
    pub fn applied(&self) -> Lsn {
        self.progress.lock().applied
    }

    /// Stops the thread once the queue is empty, and waits until the thread has ended.
    pub fn stop(&self) {
        self.requests.stop();
        let thread = self.thread.lock().take();
        if let Some(thread) = thread
            && thread.join().is_err()
        {
            tracing::error!("the applier's thread panicked");
        }
    }

    /// Returns whether the command list of batch `lsn` is submitted, and no list was lost.
    pub fn has_applied(&self, lsn: Lsn) -> bool {
        let applied = self.applied.load(Ordering::Acquire);
        applied > 0 && applied >= lsn.0
    }

    /// Changes the progress and wakes its waiters. The change is made under the lock, so that a caller that is about to
    /// wait cannot miss it.
    fn progress(&self, change: impl FnOnce(&mut ApplierProgress)) {
        let mut progress = self.progress.lock();
        change(&mut progress);
        let applied = if progress.is_lost { 0 } else { progress.applied.0 };
        self.applied.store(applied, Ordering::Release);
        let reached = if progress.is_lost { Lsn(u64::MAX) } else { progress.applied };
        drop(progress);
        self.moved.notify_all();
        self.wakers.wake(reached);
    }
}

/// A guard that the applier's thread owns while it runs. If the thread panics, the guard wakes callers that would
/// otherwise wait forever.
struct ApplierGuard(Arc<Applier>);

impl Drop for ApplierGuard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.poison.set(Error::panicked("the applier's thread"));
            self.0.progress(|progress| progress.is_lost = true);
        }
        self.0.changes.end();
        self.0.requests.end();
    }
}

/// The bytes of a range of a page, before they have reached the host.
enum GatheredRange {
    /// The bytes are being transferred from page memory.
    InMemory(Drain),
    /// The bytes must be read from the page on disk, starting at this offset. The staging buffer has the length of the
    /// range.
    OnDisk(DiskPage, u64, StagingBuf),
}

impl GatheredRange {
    /// Waits until the range's bytes are at the host. Must not be called on the applier's thread.
    fn finish(self, device: &EngineDevice) -> Result<StagingBuf> {
        match self {
            GatheredRange::InMemory(drain) => Ok(drain.finish(device)?.bytes),
            GatheredRange::OnDisk(page, offset, staged) => read_from_disk(&page, offset, staged),
        }
    }

    /// Waits like [`finish`](Self::finish), but returns `None` if the bytes changed in transit.
    fn finish_once(self, device: &EngineDevice) -> Result<Option<StagingBuf>> {
        match self {
            GatheredRange::InMemory(drain) => Ok(drain.finish_once(device)?.map(|drained| drained.bytes)),
            GatheredRange::OnDisk(page, offset, staged) => read_from_disk(&page, offset, staged).map(Some),
        }
    }
}

fn read_from_disk(page: &DiskPage, offset: u64, mut staged: StagingBuf) -> Result<StagingBuf> {
    page.read(offset, &mut staged)?;
    Ok(staged)
}

fn host_len(len: u64) -> Result<usize> {
    usize::try_from(len).map_err(|_| Error::OutOfMemory { place: Place::Host, len })
}
