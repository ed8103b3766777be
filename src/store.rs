//! Floor 7. The store: what a caller holds.
//!
//! This file only puts the parts together: [`crate::commit`], [`crate::snapshot`], [`crate::restore`] and
//! [`crate::recovery`] say how things work.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use remanent_format::limits::SNAPSHOT_NAME_LEN_MAX;
use remanent_format::{Key, Lsn, Metadata, PageId, PageInfo, Position, SnapshotId, StoreId};

use crate::applier::{Applier, Leases};
use crate::arena::{Arena, PlaceUsage};
use crate::batch::WriteBatch;
use crate::commit::Committer;
use crate::device::{Device, MemoryStats, RawStream};
use crate::disk::{Disk, DiskLock};
use crate::error::{Error, Result};
use crate::keeping::{Keeping, SnapshotInfo};
use crate::lease::Lease;
use crate::log::{Log, LogStats};
use crate::options::{Ack, LogIo, Options};
use crate::poison::Poison;
use crate::recovery::{Opened, Recovered, Recovery, check_directory};
use crate::restore::Restore;
use crate::retention::Retention;
use crate::snapshot::{Background, Mark, Pace, Progress, Pruned, Rules, SnapshotStats, Snapshots, Wanted};
use crate::staging::StagingPool;

/// A batch whose whole pages take more than this share of a segment, one in so many, writes them to an image
/// file: the log would hold them until a snapshot writes them once more.
const BULK_SHARE: u64 = 4;
/// Staging kept for reuse.
const STAGING_IDLE_BYTES: usize = 64 << 20;

/// A store directory, open for reading and writing: pages, root, log, snapshots.
///
/// One writer at a time; the handle is shared by threads by reference or in an `Arc`. Dropping it makes
/// everything durable and seals the log; [`Store::close`] does the same and reports errors.
///
/// ```
/// use remanent::{Key, Options, Place, Store};
/// let store = Store::temporary(Options::default())?;
/// let mut batch = store.batch();
/// let page = batch.create_with(4, Place::Host, Some(Key::new("answer").unwrap()), Default::default());
/// batch.write(page, 0, &[42, 0, 0, 0]);
/// store.commit(batch)?;
///
/// let info = store.page_by_key(&Key::new("answer").unwrap())?;
/// let mut bytes = [0; 4];
/// store.read(info.page, 0, &mut bytes)?;
/// assert_eq!(u32::from_le_bytes(bytes), 42);
/// # Ok::<(), remanent::Error>(())
/// ```
pub struct Store {
    parts: Parts,
    id: StoreId,
    ack: Ack,
    opener: u32,
    recovered: Recovered,
    /// Released last: until then nobody else may open the directory.
    _lock: Box<dyn DiskLock>,
    /// A temporary directory lives as long as its store.
    _directory: Option<Box<dyn Any + Send + Sync>>,
}

struct Parts {
    committer: Committer,
    snapshots: Arc<Snapshots>,
    background: Background,
    options: Options,
    disk: Arc<dyn Disk>,
    device: Arc<dyn Device>,
    arena: Arc<Arena>,
    staging: Arc<StagingPool>,
    applier: Arc<Applier>,
    leases: Arc<Leases>,
    log: Arc<Log>,
    poison: Arc<Poison>,
}

/// A committed batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    /// Its place in the log.
    pub position: Position,
    /// The pages that it created, in the order of its creates and clones.
    pub pages: Vec<PageId>,
}

/// A submitted batch, to wait for.
#[derive(Clone)]
pub struct Ticket {
    committed: Committed,
    log: Arc<Log>,
    applier: Arc<Applier>,
    leases: Arc<Leases>,
}

/// Counts and sizes of an open store.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Stats {
    /// The newest batch logged.
    pub logged: Lsn,
    /// The newest batch in the device's queue.
    pub applied: Lsn,
    /// The newest batch that survives a power cut.
    pub durable: Lsn,
    /// What the log did since it was opened.
    pub log: LogStats,
    /// The segment that takes frames.
    pub segment: u64,
    /// Page memory by place.
    pub places: Vec<(remanent_format::Place, PlaceUsage)>,
    /// What the device holds from its driver for places that share it, in use or idle; empty where the device
    /// keeps nothing back.
    pub device_memory: Vec<(remanent_format::Place, MemoryStats)>,
    /// Bytes of staging that lie idle.
    pub staging_idle_bytes: usize,
    /// Snapshots taken, and how far the one being taken has come.
    pub snapshots: SnapshotStats,
}

impl Ticket {
    /// Where the batch lies in the log.
    #[must_use]
    pub fn position(&self) -> Position {
        self.committed.position
    }

    /// The pages that the batch created, in the order of its creates and clones.
    #[must_use]
    pub fn pages(&self) -> &[PageId] {
        &self.committed.pages
    }

    /// Waits until the batch is acknowledged at this level.
    ///
    /// # Errors
    /// [`Error::Poisoned`] if the store failed before.
    pub fn wait(&self, ack: Ack) -> Result<()> {
        match ack {
            Ack::Logged => self.log.wait_logged(self.committed.position.lsn),
            Ack::Applied => self.applier.wait_applied(self.committed.position.lsn).map(drop),
            Ack::Durable => self.log.wait_durable(self.committed.position.lsn),
        }
    }

    /// Lets work that is put on the caller's stream from now on see the batch. The stream waits on the device
    /// until the batch is applied; the host waits only until it is in the device's queue.
    ///
    /// # Errors
    /// [`Error::StreamRefused`] if a graph is being captured from the stream, if it is another device's, or if
    /// pages live in host memory; [`Error::Poisoned`] if the store failed before; a device error.
    pub fn wait_on(&self, stream: RawStream) -> Result<()> {
        let fence = self.applier.wait_applied(self.committed.position.lsn)?;
        self.leases.signal(stream, fence)
    }
}

impl Store {
    /// Opens a store on any disk and device: the way in for tests, which bring simulated ones. Callers use
    /// [`Store::open`].
    ///
    /// # Errors
    /// As for [`Store::open`].
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
        options.check()?;
        check_directory(&*disk, options.create)?;
        disk.make_folder(remanent_format::Folder::Root)?;
        let lock = disk.lock()?;
        let (log_io, log_io_reason) = choose_log_io(&*disk, &options)?;
        let arena = Arc::new(Arena::new(device.clone(), options.budget.clone()));
        let staging = Arc::new(StagingPool::new(device.clone(), STAGING_IDLE_BYTES));
        let recovery = Recovery {
            disk: disk.clone(),
            device: device.clone(),
            arena: &arena,
            staging: &staging,
            options: &options,
        };
        let Opened { store, applied, log, pool, keeping, mut recovered } = recovery.open()?;
        recovered.log_io = log_io_reason;
        let poison = Arc::new(Poison::default());
        let table = applied.table.clone();
        let log = Log::start(store.store, log_io, pool.clone(), poison.clone(), log)?;
        let leases = Arc::new(Leases::new(device.clone(), arena.clone(), poison.clone()));
        let applier = Applier::start(
            device.clone(),
            arena.clone(),
            staging.clone(),
            poison.clone(),
            leases.clone(),
            {
                let log = log.clone();
                move |lsn| log.wait_logged(lsn)
            },
            applied,
        );
        let applier = applier.inspect_err(|_| log.stop())?;
        let committer = Committer {
            next_page: AtomicU64::new(table.next_page()),
            submitted: parking_lot::Mutex::new(table),
            store: store.store,
            log: log.clone(),
            applier: applier.clone(),
            leases: leases.clone(),
            device: device.clone(),
            arena: arena.clone(),
            staging: staging.clone(),
            poison: poison.clone(),
            files: keeping.files.clone(),
            known: keeping.known.clone(),
            compression: options.compression,
            ahead_bytes_min: options.segment_len / BULK_SHARE,
        };
        let snapshots = Arc::new(Snapshots {
            disk: disk.clone(),
            store: store.store,
            device: device.clone(),
            staging: staging.clone(),
            applier: applier.clone(),
            log: log.clone(),
            pool,
            poison: poison.clone(),
            retention: Retention::of(&options),
            compression: options.compression,
            keeping: parking_lot::Mutex::new(keeping),
            progress: Progress::default(),
            pace: Pace::new(options.snapshot_bytes_per_second),
            last: parking_lot::Mutex::new(Mark {
                lsn: Lsn(recovered.position.lsn.0.saturating_sub(recovered.replayed_batches)),
                bytes: -i64::try_from(recovered.replayed_bytes).unwrap_or(i64::MAX),
                at: std::time::Instant::now(),
            }),
        });
        let rules = Rules { log_bytes: options.snapshot_log_bytes, interval: options.snapshot_interval };
        let background = Background::start(snapshots.clone(), rules).inspect_err(|_| {
            applier.stop();
            log.stop();
        })?;
        Ok(Self {
            id: store.store,
            ack: options.ack,
            opener: std::process::id(),
            recovered,
            parts: Parts {
                committer,
                snapshots,
                background,
                options,
                disk,
                device,
                arena,
                staging,
                applier,
                leases,
                log,
                poison,
            },
            _lock: lock,
            _directory: directory,
        })
    }

    /// The store's identity, drawn at random when it was created.
    #[must_use]
    pub fn id(&self) -> StoreId {
        self.id
    }

    /// Where it lies.
    pub(crate) fn disk(&self) -> &Arc<dyn Disk> {
        &self.parts.disk
    }

    /// What turns batches into commits.
    pub(crate) fn committer(&self) -> &Committer {
        &self.parts.committer
    }

    /// An empty batch.
    pub fn batch(&self) -> WriteBatch {
        WriteBatch::default()
    }

    /// Logs a batch, and returns at once with what one waits on. The batch is `Logged` then, so that it survives
    /// the death of the process; where the log is written directly ([`LogIo::Direct`]), that too is waited for.
    ///
    /// # Errors
    /// If the batch cannot be committed, with nothing changed: [`Error::UnknownPage`],
    /// [`Error::OutOfBounds`], [`Error::Conflict`], [`Error::KeyTaken`], [`Error::InvalidOperation`],
    /// [`Error::Limit`], [`Error::OverBudget`], [`Error::DiskFull`]. [`Error::Poisoned`] after a failure.
    pub fn submit(&self, batch: WriteBatch) -> Result<Ticket> {
        self.check_process()?;
        let (point, pages) = self.parts.committer.submit(&batch)?;
        let position = Position { incarnation: point.incarnation, lsn: point.lsn };
        Ok(Ticket {
            committed: Committed { position, pages },
            log: self.parts.log.clone(),
            applier: self.parts.applier.clone(),
            leases: self.parts.leases.clone(),
        })
    }

    /// Submits a batch and waits for the acknowledgement that [`Options::ack`] names.
    ///
    /// # Errors
    /// As for [`Store::submit`], and [`Error::Poisoned`] if the store fails while waiting.
    pub fn commit(&self, batch: WriteBatch) -> Result<Committed> {
        let ticket = self.submit(batch)?;
        ticket.wait(self.ack)?;
        Ok(ticket.committed)
    }

    /// Waits until batch `lsn`, and every one before it, survives a power cut.
    ///
    /// # Errors
    /// [`Error::Limit`] if there is no such batch yet; [`Error::Poisoned`].
    pub fn wait_durable(&self, lsn: Lsn) -> Result<()> {
        self.check_process()?;
        let newest = self.parts.committer.lock().lsn();
        if lsn > newest {
            return Err(Error::Limit { what: "lsn to wait for", found: lsn.0, limit: newest.0 });
        }
        self.parts.log.wait_durable(lsn)
    }

    /// The newest batch that is logged.
    #[must_use]
    pub fn lsn(&self) -> Lsn {
        let Parts { committer, log, .. } = &self.parts;
        committer.lock().lsn().min(log.logged())
    }

    /// Fills `out` with the page's bytes from `offset` on, as of the batch returned: the newest one
    /// submitted before the call, or a later one. It is logged, but perhaps not yet durable.
    ///
    /// # Errors
    /// [`Error::UnknownPage`], [`Error::OutOfBounds`]; [`Error::Poisoned`] if the device failed, now or
    /// with a batch before. A store that is poisoned by its disk goes on being read.
    pub fn read(&self, page: PageId, offset: u64, out: &mut [u8]) -> Result<Lsn> {
        self.check_process()?;
        let len = out.len() as u64;
        let Parts { applier, device, staging, poison, .. } = &self.parts;
        let read = applier.read(&**device, staging, page, move |_| (offset, len));
        let (_, lsn, bytes) = read.map_err(|error| poison.set_by_device(error))?;
        out.copy_from_slice(&bytes);
        staging.give(bytes.into_staging());
        Ok(lsn)
    }

    /// Leases a page: its bytes are read where they lie, as they are behind the newest batch submitted before
    /// the call, or a later one. Batches that change the page go on; each needs room for a copy of it, in the
    /// budget of its place.
    ///
    /// # Errors
    /// [`Error::UnknownPage`]; [`Error::Poisoned`] if the device failed, now or with a batch before.
    pub fn lease(&self, page: PageId) -> Result<Lease<'_>> {
        self.check_process()?;
        let Parts { committer, applier, leases, device, poison, .. } = &self.parts;
        let id = {
            let _every_later_batch_knows = committer.lock();
            leases.begin(page)
        };
        Lease::take(applier, leases, device, page, id).map_err(|error| poison.set_by_device(error))
    }

    /// A page's length, version, key and metadata.
    ///
    /// # Errors
    /// [`Error::UnknownPage`].
    pub fn page(&self, page: PageId) -> Result<PageInfo> {
        self.look(move |table| table.get(page).cloned().ok_or(Error::UnknownPage { page }))
    }

    /// The page that has this key.
    ///
    /// # Errors
    /// [`Error::UnknownKey`].
    pub fn page_by_key(&self, key: &Key) -> Result<PageInfo> {
        let key = key.clone();
        self.look(move |table| table.get_key(&key).cloned().ok_or(Error::UnknownKey { key }))
    }

    /// All pages, in the order of their ids.
    ///
    /// # Errors
    /// [`Error::Closed`], [`Error::Forked`].
    pub fn pages(&self) -> Result<Vec<PageInfo>> {
        self.look(|table| Ok(table.pages().cloned().collect()))
    }

    /// The root: the store's own metadata.
    ///
    /// # Errors
    /// [`Error::Closed`], [`Error::Forked`].
    pub fn root(&self) -> Result<Arc<Metadata>> {
        self.look(|table| Ok(table.root().clone()))
    }

    /// Takes a snapshot while commits go on, verifies it, and removes what is not kept any more. It writes the
    /// pages that changed since the snapshot before, and shares the images of all others with it. One at a
    /// time; a second caller waits.
    ///
    /// Image files of which less than half is still named give their last images to the next snapshot, as many
    /// as it writes anyway, or 4 MiB, so that they can go.
    ///
    /// # Errors
    /// [`Error::DiskFull`] changes nothing; any other failure poisons the store.
    pub fn snapshot(&self) -> Result<SnapshotInfo> {
        self.check_process()?;
        self.parts.snapshots.take(Wanted::default())
    }

    /// Takes a snapshot of the state at one moment: that of the newest batch submitted before the call, or of
    /// a later one. It needs no log behind it to stand for that state. Commits go on; a page that they change
    /// before it is gathered is copied aside first, within the budget of its place.
    ///
    /// ```
    /// use remanent::{Options, Place, Store};
    /// let store = Store::temporary(Options::default())?;
    /// let mut batch = store.batch();
    /// batch.create(4096, Place::Host);
    /// let committed = store.commit(batch)?;
    /// let snapshot = store.snapshot_exact()?;
    /// assert_eq!((snapshot.redo, snapshot.end), (committed.position.lsn, committed.position.lsn));
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::DiskFull`] and, where there is no room to copy pages aside, [`Error::OverBudget`] and
    /// [`Error::OutOfMemory`] change nothing; any other failure poisons the store.
    pub fn snapshot_exact(&self) -> Result<SnapshotInfo> {
        self.check_process()?;
        self.parts.snapshots.take(Wanted { exact: true, ..Wanted::default() })
    }

    /// Waits until so many snapshots have ended since the store was opened, well or not: for tests, which
    /// must not guess when one in the background is through.
    #[doc(hidden)]
    pub fn wait_for_snapshots(&self, count: u64) {
        self.parts.snapshots.progress.wait_ended(count);
    }

    /// Takes a snapshot with a name, of 1 to 64 bytes, which is kept until [`Store::prune`] gives its name up.
    /// It is the state of one moment, as by [`Store::snapshot_exact`], so that it needs no log.
    ///
    /// # Errors
    /// [`Error::NameTaken`], [`Error::Limit`]; as for [`Store::snapshot_exact`].
    pub fn snapshot_named(&self, name: &str) -> Result<SnapshotInfo> {
        self.check_process()?;
        let (found, limit) = (name.len() as u64, SNAPSHOT_NAME_LEN_MAX as u64);
        if !(1..=limit).contains(&found) {
            return Err(Error::Limit { what: "snapshot name length", found, limit });
        }
        let mut keeping = self.parts.snapshots.keeping.lock();
        let holder = keeping.snapshots.values().find(|kept| kept.info.name.as_deref() == Some(name));
        if let Some(holder) = holder {
            return Err(Error::NameTaken { name: name.to_owned(), snapshot: holder.info.id });
        }
        self.parts.snapshots.take_named(&mut keeping, name.to_owned())
    }

    /// What the store keeps of the past: the rules of the options with which it was opened.
    #[must_use]
    pub fn retention(&self) -> Retention {
        Retention::of(&self.parts.options)
    }

    /// Says what [`Store::prune`] would remove now, and removes nothing.
    ///
    /// # Errors
    /// What the system says.
    pub fn would_prune(&self, retention: &Retention) -> Result<Pruned> {
        self.check_process()?;
        let snapshots = &self.parts.snapshots;
        snapshots.would_prune(&snapshots.keeping.lock(), retention)
    }

    /// Removes what these rules do not keep, and nothing that a kept snapshot, the log behind it or a reader
    /// needs. A snapshot whose name is given up stays as long as another rule keeps it, and has its name
    /// again then. The store goes on by its own rules.
    ///
    /// # Errors
    /// [`Error::DiskFull`] changes nothing; any other failure poisons the store.
    pub fn prune(&self, retention: &Retention) -> Result<Pruned> {
        self.check_process()?;
        let Parts { snapshots, poison, .. } = &self.parts;
        poison.check()?;
        snapshots.prune(&mut snapshots.keeping.lock(), retention).map_err(|error| match error {
            Error::DiskFull { .. } => error,
            error => poison.set(error),
        })
    }

    /// The snapshots kept, oldest first.
    #[must_use]
    pub fn snapshots(&self) -> Vec<SnapshotInfo> {
        self.parts.snapshots.list()
    }

    /// Takes all pages and the root back to the state of a kept snapshot: [`Store::restore_to`] its end.
    ///
    /// # Errors
    /// [`Error::NoSnapshot`]; else as for [`Store::restore_to`].
    pub fn restore_from_snapshot(&self, snapshot: SnapshotId) -> Result<Position> {
        self.check_process()?;
        self.parts.poison.check()?;
        let mut keeping = self.parts.snapshots.keeping.lock();
        let end = keeping.snapshots.get(&snapshot).ok_or(Error::NoSnapshot { snapshot })?.info.end;
        self.restore(end, &mut keeping)
    }

    /// Takes all pages and the root back to the state right behind batch `lsn`. This goes forward: it is one
    /// more batch, and what it leaves can be gone back to in turn. Page ids given meanwhile are not given
    /// again; pages that change get an epoch above all that were ever given. Commits wait.
    ///
    /// The window opens at the end of the oldest snapshot that is kept, and closes at the newest batch. The
    /// snapshot of the restored state that is taken at the end removes nothing; later ones do as ever.
    ///
    /// ```
    /// use remanent::{Options, Place, Store};
    /// let store = Store::temporary(Options::default())?;
    /// let mut batch = store.batch();
    /// let page = batch.create(4, Place::Host);
    /// batch.write(page, 0, b"good");
    /// let good = store.commit(batch)?;
    /// let mut batch = store.batch();
    /// batch.write(good.pages[0], 0, b"bad!");
    /// store.commit(batch)?;
    ///
    /// let restored = store.restore_to(good.position.lsn)?;
    /// assert_eq!(restored.lsn.0, 3);
    /// let mut bytes = [0; 4];
    /// store.read(good.pages[0], 0, &mut bytes)?;
    /// assert_eq!(&bytes, b"good");
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::OutsideWindow`], [`Error::Damaged`], [`Error::OverBudget`], [`Error::DiskFull`] and, while any
    /// page is leased, [`Error::Leased`] change nothing; a failure later poisons the store, whose directory then holds the restored state.
    pub fn restore_to(&self, lsn: Lsn) -> Result<Position> {
        self.check_process()?;
        let mut keeping = self.parts.snapshots.keeping.lock();
        self.restore(lsn, &mut keeping)
    }

    fn restore(&self, lsn: Lsn, keeping: &mut Keeping) -> Result<Position> {
        let Parts {
            committer, snapshots, options, disk, device, staging, applier, leases, log, poison, ..
        } = &self.parts;
        let mut submitted = committer.lock();
        leases.check_none().map_err(|error| poison.set_by_device(error))?;
        let restore = Restore {
            disk,
            store: self.id,
            device,
            staging,
            applier,
            log,
            budget: &options.budget,
            compression: options.compression,
            poison,
        };
        let point = restore.run(lsn, &mut submitted, keeping)?;
        // Still under both locks: this snapshot is exact, and later opens start from it.
        match snapshots.take_keeping_all(keeping) {
            // The restore stands without it: recovery replays the record.
            Ok(_) | Err(Error::DiskFull { .. } | Error::OutOfMemory { .. }) => {}
            Err(error) => return Err(error),
        }
        Ok(Position { incarnation: point.incarnation, lsn: point.lsn })
    }

    /// What this open found and did.
    #[must_use]
    pub fn recovered(&self) -> &Recovered {
        &self.recovered
    }

    /// Counts and sizes.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let Parts { log, applier, device, arena, staging, snapshots, .. } = &self.parts;
        Stats {
            logged: self.lsn(),
            applied: applier.applied(),
            durable: log.durable(),
            log: log.stats(),
            segment: log.current_segment(),
            places: arena.usages().into_iter().collect(),
            device_memory: device.memory_stats(),
            staging_idle_bytes: staging.idle_bytes(),
            snapshots: snapshots.progress.stats(),
        }
    }

    /// Gives back memory that no page uses any more: what deletes left, idle staging, and what the device keeps
    /// from its driver. Returns how many bytes went back to the driver. On a GPU this waits for everything that
    /// the GPU has to do, the caller's own work included, so it is for a caller who needs the memory elsewhere.
    ///
    /// ```
    /// use remanent::{Options, Place, Store};
    /// let store = Store::temporary(Options::default())?;
    /// let mut batch = store.batch();
    /// batch.create(1 << 20, Place::Host);
    /// let created = store.commit(batch)?;
    /// let mut batch = store.batch();
    /// batch.delete(created.pages[0]);
    /// store.commit(batch)?;
    /// store.trim()?;
    /// let usage = store.stats().places[0].1;
    /// assert_eq!((usage.used(), usage.peak_bytes), (0, 1 << 20));
    /// store.reset_peaks();
    /// assert_eq!(store.stats().places[0].1.peak_bytes, 0);
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// A device error.
    pub fn trim(&self) -> Result<u64> {
        self.check_process()?;
        let Parts { applier, device, arena, staging, .. } = &self.parts;
        // Behind the deletes submitted so far.
        applier.turn(|_| Ok(()))?;
        arena.reap_all()?;
        staging.trim();
        device.trim()
    }

    /// Lets the peak of every place begin anew, at what is in use now: [`Stats::places`] then tells the most
    /// that was in use since.
    pub fn reset_peaks(&self) {
        self.parts.arena.reset_peaks();
    }

    /// Makes everything durable, seals the log and releases the directory.
    ///
    /// # Errors
    /// [`Error::Poisoned`] if the store failed, now or before. The directory is released all the same.
    pub fn close(self) -> Result<()> {
        self.check_process()?;
        let poison = self.parts.poison.clone();
        drop(self);
        poison.check()
    }

    /// Looks at the applier's table, behind every batch submitted so far.
    fn look<T: Send + 'static>(
        &self,
        look: impl FnOnce(&remanent_format::PageTable) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.check_process()?;
        self.parts.applier.turn(move |turn| look(&turn.applied.table))
    }

    /// Threads do not survive a fork: in the child nobody would answer.
    pub(crate) fn check_process(&self) -> Result<()> {
        if std::process::id() == self.opener { Ok(()) } else { Err(Error::Forked { opener: self.opener }) }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // In a forked child the parent's threads are not there, and the files are the parent's business.
        if self.check_process().is_ok() {
            self.parts.background.stop();
            self.parts.applier.stop();
            self.parts.log.stop();
        }
    }
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store")
            .field("id", &self.id)
            .field("disk", &self.parts.disk.label())
            .finish_non_exhaustive()
    }
}

/// How the log is written, and a sentence on why.
fn choose_log_io(disk: &dyn Disk, options: &Options) -> Result<(LogIo, String)> {
    if let Some(io) = options.log_io {
        let refused = disk.refuses(io)?;
        return match refused {
            Some(reason) => Err(Error::InvalidOption { option: "log_io", reason: format!("{io}: {reason}") }),
            None => Ok((io, format!("{io}, as asked for"))),
        };
    }
    // `msync` waits longer than any other way to sync (`cargo bench -p remanent --bench core`).
    let (wanted, why) = match options.ack {
        Ack::Durable => (LogIo::Direct, ": every commit waits for a sync"),
        Ack::Applied | Ack::Logged => (LogIo::Mapped, ""),
    };
    Ok(match disk.refuses(wanted)? {
        None => (wanted, format!("{wanted}{why}")),
        Some(reason) => {
            tracing::info!(reason, "the log is written through the page cache");
            (LogIo::Buffered, format!("{}: {reason}", LogIo::Buffered))
        }
    })
}
