//! The applier: the one thread that submits to the apply lane, in the order of the log.
//!
//! Committers hand it batches that are `Logged` (I1). It takes what is queued as one list, so that many
//! commits become one launch. Everything that must see commits in order, such as reads and a snapshot's
//! gathers, runs as a *turn* between batches, on this thread.
//!
//! A list that the device did not take, or did not finish, is lost, and with it the only way to the pages'
//! bytes: what is in memory then is not what the table says. The store is poisoned, no later list goes out
//! and nothing is read any more. The log has it all.

pub(crate) mod lease;
pub(crate) mod pin;
mod catch;
mod unloaded;
mod exact_cut;
mod readback;
mod lease_table;
mod commands;
mod queue;
mod worker;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use remanent_format::state::by_id::ById;
use remanent_format::state::table::Changes;
use remanent_format::{LogPoint, Lsn, PageId, PageInfo, PageTable, Place};

pub(crate) use catch::Catch;
pub(crate) use commands::{ListBuilder, PayloadAt, stage_aside};
pub(crate) use exact_cut::ExactCut;
pub(crate) use lease_table::{LeaseId, Leases};
pub(crate) use readback::Drain;
pub(crate) use unloaded::{UnloadedPage, UnloadedSet};

use self::queue::Requests;
use self::worker::Worker;
use crate::base::sync::atomic::{AtomicU64, Ordering};
use crate::base::sync::thread::JoinHandle;
use crate::base::sync::threads;
use crate::base::sync::{Condvar, Mutex, mpsc};
use crate::device::{CommandList, Device, Fence, Lane, Pending, SHORT_COPY_LEN_MAX};
use crate::error::{Error, Result};
use crate::memory::arena::{Arena, PageMemory};
use crate::versions::Versions;

use crate::base::poison::Poison;
use crate::memory::staging::{StagingBuf, StagingPool};

/// A list is submitted when its payloads reach this many bytes.
const LIST_BYTES: usize = 256 << 10;

/// A logged batch on its way to the device.
pub(crate) struct ApplyWork {
    /// The end of its frame.
    pub point: LogPoint,
    /// Its payload, as logged.
    pub payload: StagingBuf,
    /// What it does to the table.
    pub changes: Changes,
    /// Memory for its creates and resizes, and for its moves to another place, in their order.
    pub memory: VecDeque<PageMemory>,
    /// Memory for the pages that it changes while they are leased; each moves there first.
    pub spares: Vec<(PageId, PageMemory)>,
    /// What [`stage_aside`] made of its operations, in their order.
    pub asides: VecDeque<StagingBuf>,
}

/// Pages as the lane sees them: what every list submitted so far makes of them.
pub(crate) struct AppliedState {
    /// The table.
    pub table: PageTable,
    /// The bytes, of all pages that are warm.
    pub memory: ById<PageId, PageMemory>,
    /// The other pages.
    pub unloaded: Arc<UnloadedSet>,
    /// The end of the last batch.
    pub point: LogPoint,
    /// Pages deleted since a snapshot began to watch, and by which batch.
    pub deleted: Option<HashMap<PageId, Lsn>>,
    /// Pages that an exact snapshot has yet to gather.
    pub cut: Option<ExactCut>,
    /// Pages of which a snapshot has gathered a part.
    pub catches: HashMap<PageId, Catch>,
}

impl AppliedState {
    /// Gives back the memory of all pages, of a store that does not open after all. No list names it any more.
    pub fn give_back(self, arena: &Arena) {
        let loaded = self.memory.into_items().map(|(_, memory)| memory);
        for memory in loaded.chain(self.unloaded.take_memory()) {
            if let Err(error) = arena.discard(memory) {
                tracing::warn!(%error, "cannot give page memory back");
            }
        }
    }
}

/// What the applier works with.
#[derive(Clone)]
pub(crate) struct ApplierParts {
    pub device: Arc<dyn Device>,
    pub arena: Arc<Arena>,
    pub staging: Arc<StagingPool>,
    pub poison: Arc<Poison>,
    pub leases: Arc<Leases>,
    /// What readers see of the pages: it is told where their bytes are.
    pub versions: Arc<Versions>,
}

/// What a turn may use: the state between two batches, and the lane.
pub(crate) struct Turn<'a> {
    /// The state.
    pub applied: &'a mut AppliedState,
    /// For memory that comes and goes.
    pub arena: &'a Arc<Arena>,
    /// What readers see: to be told where a page's bytes are now.
    pub versions: &'a Versions,
    device: &'a dyn Device,
    lost: &'a mut Option<Error>,
}

impl Turn<'_> {
    /// Queues a list behind every batch so far.
    ///
    /// # Errors
    /// A device error; the one with which the pages' bytes were lost.
    pub fn submit(&self, list: CommandList) -> Result<Pending> {
        self.intact()?;
        self.device.submit(Lane::Apply, list)
    }

    /// Fails if memory is not what the table says: a page may have none at all.
    ///
    /// # Errors
    /// The one with which the pages' bytes were lost.
    pub fn intact(&self) -> Result<()> {
        self.lost.as_ref().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Says that memory is not what the table says, for this reason: nothing is read from it any more.
    pub fn lose(&mut self, error: &Error) {
        self.lost.get_or_insert_with(|| error.clone());
    }
}

/// The handle to the applier.
pub(crate) struct Applier {
    requests: Requests,
    progress: Mutex<ApplierProgress>,
    /// `progress` changed.
    moved: Condvar,
    /// What `progress` says is applied, for readers that take no lock: nothing is, once anything is lost.
    applied: AtomicU64,
    poison: Arc<Poison>,
    unloaded: Arc<UnloadedSet>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct ApplierProgress {
    /// The newest batch whose list is in the lane.
    applied: Lsn,
    /// The value of a fence behind it.
    fence: u64,
    /// Whether no later batch will be applied; the store is poisoned then.
    lost: bool,
}

impl Applier {
    /// Starts the thread with the pages that recovery loaded. No batch is applied before `wait_logged` has
    /// returned for it (I1).
    pub fn start(
        parts: ApplierParts,
        wait_logged: impl Fn(Lsn) -> Result<()> + Send + 'static,
        applied: AppliedState,
    ) -> Result<Arc<Self>> {
        let applier = Arc::new(Self {
            requests: Requests::new(),
            progress: Mutex::new(ApplierProgress { applied: applied.point.lsn, fence: 0, lost: false }),
            moved: Condvar::new(),
            applied: AtomicU64::new(applied.point.lsn.0),
            poison: parts.poison.clone(),
            unloaded: applied.unloaded.clone(),
            thread: Mutex::new(None),
        });
        let arena = parts.arena.clone();
        // Where the thread is not started, the pages are still here to be given back.
        let handed = Arc::new(Mutex::new(Some(applied)));
        let thread = threads::start("remanent-apply", {
            let (shared, handed) = (applier.clone(), handed.clone());
            move || {
                let _heard_of = ApplierGuard(shared.clone());
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

    /// The pages that are not loaded yet: to be waited for before a turn looks for their memory.
    pub fn unloaded(&self) -> &Arc<UnloadedSet> {
        &self.unloaded
    }

    /// Hands over a batch, of whose pages none is cold. Called in the order of the log. Waits where too much is
    /// queued; the applier takes no lock of the caller's.
    pub fn push(&self, work: ApplyWork) {
        self.requests.push(work);
    }

    /// Runs `turn` after every batch handed over so far, and returns its result.
    pub fn turn<T: Send + 'static>(
        &self,
        turn: impl FnOnce(&mut Turn<'_>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.turn_ahead(turn)()
    }

    /// Has `turn` run after every batch handed over so far; what this gives waits for its result.
    pub fn turn_ahead<T: Send + 'static>(
        &self,
        turn: impl FnOnce(&mut Turn<'_>) -> Result<T> + Send + 'static,
    ) -> impl FnOnce() -> Result<T> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let turn = Box::new(move |state: &mut Turn<'_>| {
            // Where nobody waits any more, nobody wants the result.
            let _receiver_gone = sender.send(turn(state));
        });
        self.requests.turn(turn);
        move || receiver.recv().unwrap_or_else(|_| self.poison.check().and(Err(Error::Closed)))
    }

    /// A page's information and a range of its bytes, as of the batch returned with them; `len_known` is how many
    /// they are as far as the caller knows. A long range leaves a GPU past the lane of deltas, which go on meanwhile.
    pub fn read(
        &self,
        device: &dyn Device,
        staging: &Arc<StagingPool>,
        page: PageId,
        len_known: u64,
        range: impl FnOnce(&PageInfo) -> (u64, u64) + Send + 'static,
    ) -> Result<(PageInfo, Lsn, StagingBuf)> {
        self.unloaded.wait([page])?;
        let staged = staging.take(host_len(len_known)?)?;
        let pool = staging.clone();
        let (info, lsn, drain) = self.turn(move |turn| {
            let info = turn.applied.table.get(page).ok_or(Error::UnknownPage { page })?;
            let (offset, len) = range(&info);
            if offset.checked_add(len).is_none_or(|end| end > info.len) {
                return Err(Error::OutOfBounds { page, offset, len, page_len: info.len });
            }
            turn.intact()?;
            // The page may have grown since, and the range with it.
            let staged = pool.cut(staged, host_len(len)?)?;
            let source = turn.applied.memory[page].part(offset, len);
            // From memory of the host bytes come as soon as they would be copied aside.
            let is_far =
                matches!(info.place, Place::Device(_)) && turn.device.address(source.memory).is_some();
            let drain = if is_far && len > SHORT_COPY_LEN_MAX {
                turn.drain(info.place, vec![(source, 0)], len, staged, 0)?
            } else {
                turn.drain_in_order(vec![(source, 0)], staged, 0)?
            };
            Ok((info, turn.applied.point.lsn, drain))
        })?;
        Ok((info, lsn, drain.finish(device)?))
    }

    /// Waits until batch `lsn` is in the lane, and returns a fence behind it.
    pub fn wait_applied(&self, lsn: Lsn) -> Result<Fence> {
        let mut progress = self.progress.lock();
        if progress.applied < lsn {
            drop(progress);
            self.requests.hurry(lsn);
            progress = self.progress.lock();
        }
        while progress.applied < lsn {
            if progress.lost {
                self.poison.check()?;
            }
            self.moved.wait(&mut progress);
        }
        Ok(Fence { lane: Lane::Apply, value: progress.fence })
    }

    /// The newest batch in the lane.
    pub fn applied(&self) -> Lsn {
        self.progress.lock().applied
    }

    /// Ends the thread when the queue is empty, and waits for it.
    pub fn stop(&self) {
        self.requests.stop();
        let thread = self.thread.lock().take();
        if let Some(thread) = thread
            && thread.join().is_err()
        {
            tracing::error!("the applier's thread panicked");
        }
    }

    /// Whether batch `lsn` is in the lane, and nothing was lost that memory should hold.
    pub fn has_applied(&self, lsn: Lsn) -> bool {
        let applied = self.applied.load(Ordering::Acquire);
        applied > 0 && applied >= lsn.0
    }

    /// Changes the progress and wakes whoever waits for it. Under the lock: who has just looked and is
    /// about to wait must not miss it.
    fn progress(&self, change: impl FnOnce(&mut ApplierProgress)) {
        let mut progress = self.progress.lock();
        change(&mut progress);
        let applied = if progress.lost { 0 } else { progress.applied.0 };
        self.applied.store(applied, Ordering::Release);
        drop(progress);
        self.moved.notify_all();
    }
}

/// Lives as long as the thread. Where that ends in a panic, nobody must wait for it.
struct ApplierGuard(Arc<Applier>);

impl Drop for ApplierGuard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.poison.set(Error::panicked("the applier's thread"));
            self.0.progress(|progress| progress.lost = true);
        }
        self.0.requests.end();
    }
}

fn host_len(len: u64) -> Result<usize> {
    usize::try_from(len).map_err(|_| Error::OutOfMemory { place: Place::Host, len })
}
