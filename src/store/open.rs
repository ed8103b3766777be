//! Assembles a store from its parts when it is opened.

use std::any::Any;
use std::sync::Arc;

use remanent_format::{Folder, Lsn, PageTable, Place};

use super::{Store, StoreParts};
use crate::applier::Reads;
#[cfg(feature = "archive")]
use crate::archive::{CheckedArchive, FetchingDisk};
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
use crate::recovery::archive_url::check_unarchived;
use crate::recovery::create::check_directory;
use crate::recovery::{PageLoader, RecoveredStore, Recovery, RecoveryReport, ReplayBacklog};
use crate::snapshot::{
    BackgroundSnapshots, LastSnapshot, Rules, Scrub, Scrubber, SnapshotProgress, Snapshots,
};
use crate::tiers::{PageMover, PrefetchThread, Residents, TierCounts, TierKeeper, TierThread, Tiers};
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
        #[cfg(feature = "archive")]
        let has_archive = options.archive.is_some();
        #[cfg(not(feature = "archive"))]
        let has_archive = false;
        if !has_archive {
            check_unarchived(&*disk)?;
        }
        #[cfg(feature = "archive")]
        let fetching =
            options.archive.as_ref().map(|to| FetchingDisk::find(&disk, to)).transpose()?.flatten();
        #[cfg(feature = "archive")]
        let disk = fetching.clone().map_or(disk, |fetching| fetching as Arc<dyn Disk>);
        // Refuses a directory that must not continue the archive before anything is changed.
        #[cfg(feature = "archive")]
        let archive = options.archive.as_ref().map(|to| CheckedArchive::new(to, &*disk)).transpose()?;
        let (log_io, log_io_reason) = choose_log_io(&*disk, &options)?;
        options.images.io = choose_image_io(&*disk, options.images.io)?;
        let resources = StoreResources::new(disk, device, log_io, &options);
        let found = resources.recover(&options)?;
        let recovered = RecoveryReport {
            log_io: log_io_reason,
            image_io: options.images.io.to_string(),
            ..found.recovered.clone()
        };
        let parts = StoreParts::start(
            resources,
            found,
            options,
            #[cfg(feature = "archive")]
            archive,
            #[cfg(feature = "archive")]
            fetching,
        )?;
        Ok(Self {
            recovered,
            parts: ForkGuard::new(parts),
            _lock: lock,
            _directory: ForkGuard::new(directory),
        })
    }
}

/// The resources that exist before the engine, and that recovery and the engine share.
struct StoreResources {
    disk: Arc<dyn Disk>,
    device: Arc<EngineDevice>,
    arena: Arc<Arena>,
    staging: Arc<StagingPool>,
    disk_pages: Arc<DiskPages>,
    log_io: LogIo,
}

impl StoreResources {
    fn new(disk: Arc<dyn Disk>, device: Arc<EngineDevice>, log_io: LogIo, options: &Options) -> Self {
        let budget = &options.memory.budget;
        Self {
            arena: Arc::new(Arena::new(device.clone(), budget.clone())),
            staging: Arc::new(StagingPool::new(device.clone(), STAGING_IDLE_BYTES)),
            disk_pages: Arc::new(DiskPages::new(disk.clone(), budget.limit(Place::Disk))),
            disk,
            device,
            log_io,
        }
    }

    /// Creates or recovers the store, and registers its pages on disk.
    fn recover(&self, options: &Options) -> Result<RecoveredStore> {
        let recovery = Recovery {
            disk: self.disk.clone(),
            device: self.device.clone(),
            arena: &self.arena,
            staging: &self.staging,
            options,
            log_io: self.log_io,
            disk_pages: self.disk_pages.clone(),
            #[cfg(feature = "nccl")]
            gather: crate::recovery::OpenGather::new(options),
        };
        let found = recovery.open()?;
        self.disk_pages.note(found.submitted.lens().map(|(_, place, _)| place));
        Ok(found)
    }
}

impl StoreParts {
    /// Starts the engine and the other parts of a recovered store. A failure drops the parts that are already started,
    /// newest first.
    fn start(
        resources: StoreResources,
        mut found: RecoveredStore,
        options: Options,
        #[cfg(feature = "archive")] archive: Option<CheckedArchive>,
        #[cfg(feature = "archive")] fetching: Option<Arc<FetchingDisk>>,
    ) -> Result<Self> {
        // Only the applier's table tracks changes, because snapshots are taken from that table.
        found.applied.table.watch(found.changed);
        let tiers = options.tiers.as_ref().map(|tiers| TierStart::new(tiers, &found.submitted));
        let start = EngineStart {
            store: found.store.store,
            disk: resources.disk,
            device: resources.device,
            arena: resources.arena,
            staging: resources.staging,
            disk_pages: resources.disk_pages,
            log_io: resources.log_io,
            pool: found.pool,
            log: found.log,
            first_batch: found.first_batch,
            applied: found.applied,
            submitted: &found.submitted,
            uses: tiers.as_ref().map(|tiers| tiers.uses.clone()),
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
        let committer = Arc::new(committer(engine, &found.catalog, found.submitted, &options));
        let StartedMover { mover, tiers } = start_mover(engine, &committer, tiers)?;
        let last = last_snapshot(&found.recovered, found.behind);
        let snapshots = Arc::new(snapshots(engine, found.catalog, &options, last));
        #[cfg(feature = "archive")]
        let archiver = archive
            .map(|archive| archive.connect(engine.clone(), snapshots.clone(), &found.recovered))
            .transpose()?;
        #[cfg(feature = "archive")]
        let fetcher = fetching.map(|disk| disk.fetch_all(engine.clone())).transpose()?;
        let rules = Rules { log_bytes: options.snapshots.log_bytes, interval: options.snapshots.interval };
        let background = BackgroundSnapshots::start(snapshots.clone(), rules)?;
        let scrub_pace = Pace::new(options.scrubs.bytes_per_second);
        let scrub = Arc::new(Scrub::new(snapshots.clone(), found.store, scrub_pace));
        let scrubber = Scrubber::start(scrub.clone(), options.scrubs.interval)?;
        Ok(Self {
            #[cfg(feature = "archive")]
            _archiver: archiver,
            #[cfg(feature = "archive")]
            _fetcher: fetcher,
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
        })
    }
}

/// The values from which the tiers start. They exist before the engine, which records page uses for the tiers.
struct TierStart<'o> {
    options: &'o Tiers,
    uses: Arc<PageUses>,
    residents: Residents,
}

impl<'o> TierStart<'o> {
    fn new(options: &'o Tiers, pages: &PageTable) -> Self {
        Self { options, uses: Arc::default(), residents: TierKeeper::residents(options, pages) }
    }
}

/// The mover of pages, and the thread that evicts pages if the store has tiers.
struct StartedMover {
    mover: Arc<PageMover>,
    tiers: Option<TierThread>,
}

fn start_mover(
    engine: &Arc<Engine>,
    committer: &Arc<Committer>,
    tiers: Option<TierStart<'_>>,
) -> Result<StartedMover> {
    let counts = Arc::<TierCounts>::default();
    let keeper = tiers.map(|TierStart { options, uses, residents }| {
        let (engine, committer) = (engine.clone(), committer.clone());
        Arc::new(TierKeeper::new(engine, committer, options, uses, residents, counts.clone()))
    });
    let mover =
        PageMover { engine: engine.clone(), committer: committer.clone(), keeper: keeper.clone(), counts };
    let mover = Arc::new(mover);
    let tiers = keeper.map(TierThread::start).transpose()?;
    Ok(StartedMover { mover, tiers })
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
fn last_snapshot(recovered: &RecoveryReport, behind: ReplayBacklog) -> LastSnapshot {
    LastSnapshot {
        lsn: Lsn(recovered.position.lsn.0.saturating_sub(recovered.replayed_batches)),
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
