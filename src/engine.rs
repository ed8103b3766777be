//! The engine: the components that all parts of an open store share.
//!
//! Commits, reads, snapshots, restores, loads and tickets have their own types. Each of these types refers to the
//! engine by one `Arc`, so that all of them use the same disk, memory and poison. A ticket thus needs one reference
//! count instead of one per component.
//!
//! The log and the applier have threads. The applier is started after the log and stopped before it, because it waits
//! for the log before it applies a batch (I1).

use std::sync::{Arc, Weak};

use remanent_format::{LogPoint, Lsn, PageTable, StoreId};

use crate::applier::{AppliedState, Applier, ApplierParts, Leases};
use crate::base::poison::Poison;
use crate::device::{EngineDevice, Fence, MemoryOwner, StoreHandle};
use crate::disk::Disk;
use crate::error::{ArchiveError, Error, Result};
use crate::images::disk_pages::DiskPages;
use crate::log::{ArchiveProgress, Log, LogStart, SegmentPool, SpacePurpose};
use crate::memory::arena::Arena;
use crate::memory::staging::StagingPool;
use crate::options::LogIo;
use crate::versions::Versions;
use crate::versions::uses::PageUses;

/// The components that all parts of an open store share.
pub(crate) struct Engine {
    pub store: StoreId,
    /// The directory with the store's files.
    pub disk: Arc<dyn Disk>,
    /// The device that contains the pages, and the counters of its operations.
    pub device: Arc<EngineDevice>,
    /// The allocator of page memory, limited by the budget.
    pub arena: Arc<Arena>,
    /// The pool of staging memory for transfers between the host and the device.
    pub staging: Arc<StagingPool>,
    /// The state that is common to all pages on disk.
    pub disk_pages: Arc<DiskPages>,
    pub log: Arc<Log>,
    /// The applier, whose thread changes the pages' bytes.
    pub applier: Arc<Applier>,
    /// The leases and pins of page memory.
    pub leases: Arc<Leases>,
    /// The versions of pages and of the root, for lookups without a lock.
    pub versions: Arc<Versions>,
    /// The first failure that left the state of disk or memory unknown, if any. Later commits and snapshots
    /// return it.
    pub poison: Arc<Poison>,
    /// The progress of the archive, or `None` if the store has no archive.
    pub archive: Option<Arc<ArchiveProgress>>,
}

/// The results of recovery from which an engine starts.
pub(crate) struct EngineStart<'a> {
    pub store: StoreId,
    pub disk: Arc<dyn Disk>,
    pub device: Arc<EngineDevice>,
    pub arena: Arc<Arena>,
    pub staging: Arc<StagingPool>,
    pub disk_pages: Arc<DiskPages>,
    pub log_io: LogIo,
    /// The pool of log segments, including spare segments.
    pub pool: Arc<SegmentPool>,
    /// The position at which the log continues.
    pub log: LogStart,
    /// The payload of a batch whose changes are already in the pages but not in the log, if any. The engine logs this
    /// payload before any other batch.
    pub first_batch: Option<Vec<u8>>,
    /// The state of the pages from which the applier starts.
    pub applied: AppliedState,
    /// The table of the same pages, from which committers start.
    pub submitted: &'a PageTable,
    /// The recorder of page uses for the eviction policies, or `None` if the store has no eviction policies.
    pub uses: Option<Arc<PageUses>>,
    /// The progress of the archive, or `None` if the store has no archive.
    pub archive: Option<Arc<ArchiveProgress>>,
}

impl Engine {
    /// Starts the log and the applier. If either cannot be started, the pages' memory is freed.
    ///
    /// # Errors
    /// Errors of the disk; [`Error::Io`] if a thread cannot be started.
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
            uses,
            archive,
        } = start;
        let poison = Arc::new(Poison::none_in(disk.label()));
        let started =
            disk.keep_folders_open().and_then(|()| Log::start(store, log_io, pool, poison.clone(), log));
        let log = started.and_then(|log| {
            if let Some(payload) = first_batch {
                let logged = append_first(&log, &payload).inspect_err(|_| log.stop())?;
                assert!(logged.lsn == applied.table.lsn()); // I1: the tables contain this batch, and no later one.
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
        arena.link().connect(EngineHandle {
            poison: poison.clone(),
            applier: Arc::downgrade(&applier),
            arena: Arc::downgrade(&arena),
        });
        Ok(RunningEngine(Arc::new(Self {
            store,
            disk,
            device,
            arena,
            staging,
            disk_pages,
            log,
            applier,
            leases,
            versions,
            poison,
            archive,
        })))
    }

    /// Returns the progress of the archive.
    ///
    /// # Errors
    /// [`Error::Archive`] if the store has no archive.
    pub fn archive(&self) -> Result<&ArchiveProgress> {
        self.archive.as_deref().ok_or_else(|| ArchiveError::absent().into())
    }

    /// Asks the uploader to archive batch `lsn` immediately, and returns the progress of the archive.
    ///
    /// # Errors
    /// [`Error::Archive`] if the store has no archive.
    pub fn ask_to_archive(&self, lsn: Lsn) -> Result<&ArchiveProgress> {
        let archive = self.archive()?;
        archive.ask(lsn);
        #[cfg(feature = "archive")]
        self.log.wake_archiver();
        Ok(archive)
    }
}

/// Logs a batch before the store is available to callers. On a full disk, the batch may use the space that is reserved
/// for deletes. Otherwise a store whose pages had to be moved to slower places could not be opened, and its pages could
/// not be deleted to free space.
fn append_first(log: &Log, payload: &[u8]) -> Result<LogPoint> {
    let point = log.append(payload, crc32fast::hash(payload), SpacePurpose::Delete)?;
    log.wait_logged(point.lsn)?;
    Ok(point)
}

/// A handle through which caller-owned memory reaches the engine. The references to the applier and the arena
/// are weak, because the memory may outlive the engine.
struct EngineHandle {
    poison: Arc<Poison>,
    applier: Weak<Applier>,
    arena: Weak<Arena>,
}

impl StoreHandle for EngineHandle {
    fn report_failure(&self, error: Error) -> Error {
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

/// The owner of the engine's threads. Dropping this value stops the threads, even if other references to the engine
/// remain.
pub(crate) struct RunningEngine(pub Arc<Engine>);

impl Drop for RunningEngine {
    fn drop(&mut self) {
        self.0.applier.stop();
        self.0.log.stop();
        self.0.log.shrink();
        // No page is stored in caller-owned memory any more, so the handles to that memory are dropped.
        self.0.arena.drop_released();
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("disk", &self.disk.label()).finish_non_exhaustive()
    }
}
