//! Assembles a store from its parts when it is opened.

use std::any::Any;
use std::sync::Arc;

use remanent_format::{Folder, Lsn, PageTable, Place};

use super::{Store, StoreParts};
use crate::applier::Reads;
#[cfg(feature = "archive")]
use crate::archive::CheckedArchive;
use crate::base::cache_padded::CachePadded;
use crate::base::pace::Pace;
use crate::base::process::ForkGuard;
use crate::base::sync::atomic::AtomicU64;
use crate::base::sync::{Instant, Mutex, Rank};
use crate::catalog::{Catalog, CatalogLock};
use crate::device::{Device, EngineDevice};
use crate::disk::{Disk, DiskLock};
use crate::engine::{Engine, EngineStart};
use crate::error::{Error, Invalid, Result};
use crate::images::CHUNK_BYTES;
use crate::images::disk_pages::DiskPages;
use crate::memory::arena::Arena;
use crate::memory::staging::StagingPool;
use crate::options::{Ack, Create, ImageIo, LogIo, Options};
use crate::recovery::create::check_directory;
use crate::recovery::{PageLoader, RecoveredStore, Recovery, ReplayBacklog};
use crate::snapshot::{
    BackgroundSnapshots, LastSnapshot, Rules, Scrub, Scrubber, SnapshotProgress, Snapshots,
};
use crate::tiers::{PageMover, PrefetchThread, TierCounts, TierKeeper, TierThread};
use crate::versions::uses::PageUses;
use crate::write::commit::{CombineQueue, Committer, DigestKeys};

/// A batch writes its whole pages to an image file if their total length is at least a segment's length divided by this
/// number. In the log, the bytes of these pages would remain until a snapshot wrote them a second time.
const BULK_SHARE: u64 = 4;
/// The maximum number of bytes of idle staging memory that is kept for reuse.
const STAGING_IDLE_BYTES: usize = 64 << 20;

impl Store {
    /// Opens a store on any disk and device, like [`Store::open`]. Tests use this function with a simulated disk or
    /// device.
    ///
    /// # Errors
    /// Same as [`Store::open`].
    #[doc(hidden)]
    pub fn open_on(disk: Arc<dyn Disk>, device: Arc<dyn Device>, options: Options) -> Result<Self> {
        Self::open_keeping(disk, device, options, None)
    }

    pub(crate) fn open_keeping(
        disk: Arc<dyn Disk>,
        device: Arc<dyn Device>,
        options: Options,
        directory: Option<Box<dyn Any + Send + Sync>>,
    ) -> Result<Self> {
        let label = disk.label();
        Self::open_in(disk, device, options, directory).map_err(|error| error.in_store(&label))
    }

    fn open_in(
        disk: Arc<dyn Disk>,
        device: Arc<dyn Device>,
        mut options: Options,
        directory: Option<Box<dyn Any + Send + Sync>>,
    ) -> Result<Self> {
        options.check()?;
        options.retention = options.retention.without_given_up_names();
        let _span = tracing::info_span!("open", directory = disk.label()).entered();
        let device = EngineDevice::new(device);
        let lock = lock_directory(&*disk, options.create)?;
        // Refuses a directory that must not continue the archive before anything is changed.
        #[cfg(feature = "archive")]
        let archive = options.archive.as_ref().map(|to| CheckedArchive::new(to, &*disk)).transpose()?;
        let (log_io, log_io_reason) = choose_log_io(&*disk, &options)?;
        options.images.io = choose_image_io(&*disk, options.images.io)?;
        let arena = Arc::new(Arena::new(device.clone(), options.memory.budget.clone()));
        let staging = Arc::new(StagingPool::new(device.clone(), STAGING_IDLE_BYTES));
        let disk_pages = Arc::new(DiskPages::new(disk.clone(), options.memory.budget.limit(Place::Disk)));
        let recovery = Recovery {
            disk: disk.clone(),
            device: device.clone(),
            arena: &arena,
            staging: &staging,
            options: &options,
            log_io,
            disk_pages: disk_pages.clone(),
            #[cfg(feature = "nccl")]
            gather: crate::recovery::OpenGather::new(&options),
        };
        let RecoveredStore {
            store,
            mut applied,
            submitted,
            changed,
            log,
            first_batch,
            pool,
            catalog,
            behind,
            mut recovered,
        } = recovery.open()?;
        recovered.log_io = log_io_reason;
        recovered.image_io = options.images.io.to_string();
        disk_pages.note(submitted.lens().map(|(_, place, _)| place));
        // Only the applier's table tracks changes, because snapshots are taken from that table.
        applied.table.watch(changed);
        let tiers = options.tiers.as_ref().map(|tiers| {
            let residents = TierKeeper::residents(tiers, &submitted);
            (tiers, Arc::<PageUses>::default(), residents)
        });
        // From here on, a failure drops the parts that are already started, newest first.
        let start = EngineStart {
            store: store.store,
            disk,
            device,
            arena,
            staging,
            disk_pages,
            log_io,
            pool,
            log,
            first_batch,
            applied,
            submitted: &submitted,
            uses: tiers.as_ref().map(|(_, uses, _)| uses.clone()),
            #[cfg(feature = "archive")]
            archive: archive.as_ref().map(|archive| archive.progress().clone()),
            #[cfg(not(feature = "archive"))]
            archive: None,
        };
        let running = Engine::start(start)?;
        let engine = &running.0;
        let loader = PageLoader::start(engine.clone())?;
        let Engine { applier, device, staging, poison, .. } = &**engine;
        let reads = Reads::new(applier.clone(), device.clone(), staging.clone(), poison.clone());
        let committer = Arc::new(committer(engine, &catalog, submitted, &options));
        let counts = Arc::<TierCounts>::default();
        let keeper = tiers.map(|(tiers, uses, residents)| {
            let (engine, committer) = (engine.clone(), committer.clone());
            Arc::new(TierKeeper::new(engine, committer, tiers, uses, residents, counts.clone()))
        });
        let mover = PageMover {
            engine: engine.clone(),
            committer: committer.clone(),
            keeper: keeper.clone(),
            counts,
        };
        let mover = Arc::new(mover);
        let tiers = keeper.map(TierThread::start).transpose()?;
        let last_lsn = Lsn(recovered.position.lsn.0.saturating_sub(recovered.replayed_batches));
        let snapshots = Arc::new(snapshots(engine, catalog, &options, last_snapshot(last_lsn, behind)));
        let rules = Rules { log_bytes: options.snapshots.log_bytes, interval: options.snapshots.interval };
        #[cfg(feature = "archive")]
        let archiver =
            archive.map(|archive| archive.connect(engine.clone(), snapshots.clone())).transpose()?;
        let background = BackgroundSnapshots::start(snapshots.clone(), rules)?;
        let scrub_pace = Pace::new(options.scrubs.bytes_per_second);
        let scrub = Arc::new(Scrub::new(snapshots.clone(), store.clone(), scrub_pace));
        let scrubber = Scrubber::start(scrub.clone(), options.scrubs.interval)?;
        Ok(Self {
            recovered,
            parts: ForkGuard::new(StoreParts {
                #[cfg(feature = "archive")]
                _archiver: archiver,
                prefetcher: PrefetchThread::new(mover.clone()),
                _tiers: tiers,
                mover,
                _background: background,
                _scrubber: scrubber,
                _loader: loader,
                reads,
                engine: running,
                committer,
                snapshots,
                scrub,
                options,
            }),
            _lock: lock,
            _directory: ForkGuard::new(directory),
        })
    }
}

/// Creates the directory if the options permit it, and locks it.
fn lock_directory(disk: &dyn Disk, create: Create) -> Result<Box<dyn DiskLock>> {
    check_directory(disk, create)?;
    if create == Create::IfEmpty {
        disk.make_parents()?;
    }
    disk.make_folder(Folder::Root)?;
    disk.lock()
}

fn committer(engine: &Arc<Engine>, catalog: &Catalog, submitted: PageTable, options: &Options) -> Committer {
    Committer {
        engine: engine.clone(),
        next_page: CachePadded(AtomicU64::new(submitted.next_page())),
        submitted: CachePadded(Mutex::of_rank(Rank::SUBMITTED, submitted)),
        waiting: CachePadded(CombineQueue::new()),
        files: catalog.files.clone(),
        known: catalog.known.clone(),
        takes_snapshots: options.snapshots.is_enabled(),
        digest_keys: Mutex::of_rank(Rank::WAITING, DigestKeys::default()),
        images: options.images,
        ahead_bytes_min: engine.log.pool.segment_len() / BULK_SHARE,
    }
}

fn snapshots(engine: &Arc<Engine>, catalog: Catalog, options: &Options, last: LastSnapshot) -> Snapshots {
    let pace = Arc::new(Pace::new(options.snapshots.bytes_per_second));
    Snapshots {
        engine: engine.clone(),
        retention: options.retention.clone(),
        images: options.images,
        chunk_len: options.images.chunk_len.map_or(CHUNK_BYTES, |len| len.max(1)),
        keeps_spares: options.log.spare_bytes != Some(0),
        catalog: CatalogLock::new(catalog, pace.clone()),
        unverified: Default::default(),
        progress: SnapshotProgress::default(),
        pace,
        last: Mutex::new(last),
    }
}

/// Returns the newest snapshot, from which the schedule of background snapshots counts.
fn last_snapshot(lsn: Lsn, behind: ReplayBacklog) -> LastSnapshot {
    LastSnapshot {
        lsn,
        bytes: -i64::try_from(behind.bytes).unwrap_or(i64::MAX),
        restarts: behind.restarts,
        at: Instant::now(),
    }
}

/// Returns the I/O mode for images, or an error if the disk does not support the requested mode. Returns
/// [`ImageIo::Auto`] only if direct I/O is useful.
fn choose_image_io(disk: &dyn Disk, io: ImageIo) -> Result<ImageIo> {
    match (disk.refuses_images(io)?, io) {
        (None, io) => Ok(io),
        (Some(reason), ImageIo::Auto) => {
            tracing::info!(reason, "images are written through the page cache");
            Ok(ImageIo::Buffered)
        }
        (Some(reason), io) => {
            Err(Error::Invalid(Invalid::Option { option: "images.io", reason: format!("{io}: {reason}") }))
        }
    }
}

/// Chooses the log's I/O mode from the options and the disk's features. Returns the mode and a text that explains the
/// choice.
fn choose_log_io(disk: &dyn Disk, options: &Options) -> Result<(LogIo, String)> {
    if let Some(io) = options.log.io {
        let refused = disk.refuses(io)?;
        return match refused {
            Some(reason) => {
                Err(Error::Invalid(Invalid::Option { option: "log.io", reason: format!("{io}: {reason}") }))
            }
            None => Ok((io, format!("{io}, as asked for"))),
        };
    }
    // `msync` takes longer than any other kind of sync (`remanent-bench commit --log-io
    // direct,buffered,mapped`).
    let (wanted, why) = match options.ack {
        Ack::Durable => (LogIo::Direct, ": every commit waits for a sync"),
        Ack::Applied | Ack::Logged | Ack::Archived => (LogIo::Mapped, ""),
    };
    Ok(match disk.refuses(wanted)? {
        None => (wanted, format!("{wanted}{why}")),
        Some(reason) => {
            tracing::info!(reason, "the log is written through the page cache");
            (LogIo::Buffered, format!("{}: {reason}", LogIo::Buffered))
        }
    })
}
