//! The engine: the parts of an open store that all its roads share.
//!
//! Commits, reads, snapshots, restores, loads and tickets have types of their own. Each of them holds this
//! one behind an `Arc`, so that all of them see the same disk, the same memory and the same poison, and a
//! ticket counts one handle and not one for each part.
//!
//! Two of the parts have threads. The applier is started after the log and stopped before it: a batch is
//! applied only once it is logged, and the applier waits at the log for that (I1).

use std::sync::{Arc, Weak};

use remanent_format::{LogPoint, PageTable, StoreId};

use crate::applier::{AppliedState, Applier, ApplierParts, Leases};
use crate::base::poison::Poison;
use crate::device::{Device, DeviceCounts, Fence, MemoryOwner, StoreEnd};
use crate::disk::Disk;
use crate::error::{Error, Result};
use crate::images::disk_pages::DiskPages;
use crate::log::{Log, LogStart, SegmentPool, SpacePurpose};
use crate::memory::arena::Arena;
use crate::memory::staging::StagingPool;
use crate::options::LogIo;
use crate::versions::Versions;
use crate::versions::uses::PageUses;

/// The shared parts of an open store.
pub(crate) struct Engine {
    pub store: StoreId,
    /// The directory that holds the files.
    pub disk: Arc<dyn Disk>,
    /// The device that the pages lie on.
    pub device: Arc<dyn Device>,
    /// What the device did since the store was opened.
    pub counts: Arc<DeviceCounts>,
    /// Page memory, within its budget.
    pub arena: Arc<Arena>,
    /// Host memory that lanes copy through.
    pub staging: Arc<StagingPool>,
    /// The parts that pages on disk share.
    pub disk_pages: Arc<DiskPages>,
    pub log: Arc<Log>,
    /// The owner of the pages' bytes.
    pub applier: Arc<Applier>,
    /// Page memory that callers use.
    pub leases: Arc<Leases>,
    /// Pages and root as lookups find them.
    pub versions: Arc<Versions>,
    /// Set by every failure after which it is unknown what lies on disk or in memory.
    pub poison: Arc<Poison>,
}

/// What recovery leaves for an engine to start from.
pub(crate) struct EngineStart<'a> {
    pub store: StoreId,
    pub disk: Arc<dyn Disk>,
    pub device: Arc<dyn Device>,
    pub arena: Arc<Arena>,
    pub staging: Arc<StagingPool>,
    pub disk_pages: Arc<DiskPages>,
    pub log_io: LogIo,
    /// The segments, to which recycled ones go.
    pub pool: Arc<SegmentPool>,
    /// Where the log goes on.
    pub log: LogStart,
    /// The payload of a batch that the pages have and the log does not: it is logged first.
    pub first_batch: Option<Vec<u8>>,
    /// The pages and their memory.
    pub applied: AppliedState,
    /// The same pages, as committers and readers see them.
    pub submitted: &'a PageTable,
    /// What the device does.
    pub counts: Arc<DeviceCounts>,
    /// What policies hear of pages, where there are any.
    pub uses: Option<Arc<PageUses>>,
}

impl Engine {
    /// Starts the log and the applier. If one of them does not start, the pages' memory is given back.
    ///
    /// # Errors
    /// What the disk says; [`Error::Thread`](crate::Error::Thread) where there is no thread.
    pub fn start(start: EngineStart<'_>) -> Result<RunningEngine> {
        let EngineStart {
            store,
            disk,
            device,
            arena,
            staging,
            disk_pages,
            log_io,
            pool,
            log,
            first_batch,
            mut applied,
            submitted,
            counts,
            uses,
        } = start;
        let poison = Arc::new(Poison::none_in(disk.label()));
        let started =
            disk.keep_folders_open().and_then(|()| Log::start(store, log_io, pool, poison.clone(), log));
        let log = started.and_then(|log| {
            if let Some(payload) = first_batch {
                let logged = append_first(&log, &payload).inspect_err(|_| log.stop())?;
                assert!(logged.lsn == applied.table.lsn()); // I1: the tables have this batch, and no other.
                applied.point = logged;
            }
            Ok(log)
        });
        let log = match log {
            Ok(log) => log,
            Err(error) => {
                applied.give_back(&arena);
                return Err(error);
            }
        };
        let leases = Arc::new(Leases::new(device.clone(), arena.clone(), poison.clone()));
        let memory = |page| applied.memory.get(page).map(|memory| memory.span().memory);
        let versions = Arc::new(Versions::new(submitted, log.logged_lsn(), memory, uses));
        let parts = ApplierParts {
            device: device.clone(),
            arena: arena.clone(),
            staging: staging.clone(),
            poison: poison.clone(),
            leases: leases.clone(),
            versions: versions.clone(),
            disk_pages: disk_pages.clone(),
        };
        let wait_logged = {
            let log = log.clone();
            move |lsn| log.wait_logged_last(lsn)
        };
        let applier = Applier::start(parts, wait_logged, applied).inspect_err(|_| log.stop())?;
        arena.link().connect(CallersEnd {
            poison: poison.clone(),
            applier: Arc::downgrade(&applier),
            arena: Arc::downgrade(&arena),
        });
        Ok(RunningEngine(Arc::new(Self {
            store,
            disk,
            device,
            counts,
            arena,
            staging,
            disk_pages,
            log,
            applier,
            leases,
            versions,
            poison,
        })))
    }
}

/// Logs a batch before the store can be used. It takes no more of a full disk than a batch of deletes: with
/// pages in slower places the store opens, and can be emptied.
fn append_first(log: &Log, payload: &[u8]) -> Result<LogPoint> {
    let point = log.append(payload, crc32fast::hash(payload), SpacePurpose::Delete)?;
    log.wait_logged(point.lsn)?;
    Ok(point)
}

/// The engine's end of the link to callers' memory, which may outlive the engine.
struct CallersEnd {
    poison: Arc<Poison>,
    applier: Weak<Applier>,
    arena: Weak<Arena>,
}

impl StoreEnd for CallersEnd {
    fn hear(&self, error: Error) -> Error {
        self.poison.set_by_device(error)
    }

    fn applied(&self) -> Result<Fence> {
        let applier = self.applier.upgrade().ok_or(Error::Closed)?;
        applier.turn(|turn| Ok(turn.submit(Default::default())?.fence()))
    }

    fn keep(&self, owner: MemoryOwner, fence: Fence) -> Result<(), MemoryOwner> {
        match self.arena.upgrade() {
            Some(arena) => {
                arena.keep_until(owner, fence);
                Ok(())
            }
            None => Err(owner),
        }
    }
}

/// The owner of the engine's threads: they end when it is dropped, whatever else still holds the engine.
pub(crate) struct RunningEngine(pub Arc<Engine>);

impl Drop for RunningEngine {
    fn drop(&mut self) {
        self.0.applier.stop();
        self.0.log.stop();
        // The pages have left by now: what callers lent for them is theirs again.
        self.0.arena.drop_let_go();
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("disk", &self.disk.label()).finish_non_exhaustive()
    }
}
