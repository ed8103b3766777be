//! An embedded store for pages that live in GPU memory and survive a crash.
//!
//! A store is a directory. An application creates pages in the memory of a GPU, in host memory or on disk, and changes
//! them by batches of deltas. Each batch reaches a write-ahead log before it changes a page. Snapshots are written
//! while batches are committed. After a crash, [`Store::open`] rebuilds the page table, the page memory and the
//! metadata exactly as they were after the last acknowledged batch.
//!
//! ```
//! use remanent::{Place, Store};
//! # let directory = tempfile::tempdir().unwrap();
//! # let path = directory.path().join("mystore");
//! let store = Store::open(&path)?;
//! let mut batch = store.batch();
//! let page = batch.create(16, Place::Host).page();
//! batch.write(page, 4, b"remanent").set_root("step", 1u64);
//! let committed = store.commit(batch)?;
//! drop(store); // or the process dies
//!
//! let store = Store::open(&path)?;
//! let mut bytes = [0; 16];
//! store.read(committed.pages[0], 0, &mut bytes)?;
//! assert_eq!(&bytes, b"\0\0\0\0remanent\0\0\0\0");
//! assert_eq!(store.recovered().position.lsn, committed.position.lsn);
//! # Ok::<(), remanent::Error>(())
//! ```
//!
//! [`Options::device`] selects the GPU. Without a GPU, host memory takes the place of GPU memory.
//!
//! # Terms
//!
//! ```text
//!                           the application
//!            submit | commit            ^ read, lease, view
//!                   v                   |
//!   batch ---> write-ahead log ---> pages in memory ---> snapshot: images and a manifest
//!   Lsn 8      ... 5 6 7 8          epoch of each        pages as of an Lsn
//!                   |                                       |
//!                   +----------- open after a crash --------+
//!                       newest snapshot + the log after it
//! ```
//!
//! | term | meaning |
//! |---|---|
//! | [`Store`] | a directory and its pages; one process writes to it at a time |
//! | page, [`PageId`] | a contiguous range of bytes in one place; ids increase and are never reused |
//! | [`Key`] | an optional unique name of a page, up to 64 bytes |
//! | [`Place`] | the memory that stores a page: a GPU, pinned host memory, host memory, or disk |
//! | [`Epoch`] | the version counter of a page: each batch that changes the page adds 1 |
//! | root | the store's own metadata, a map of names to values |
//! | [`WriteBatch`] | deltas and other operations that become visible and durable together |
//! | [`Lsn`] | the number of a committed batch: 1, 2, 3 and so on |
//! | [`Ticket`], [`Ack`] | a handle to a submitted batch, and the state to wait for: logged, applied or durable |
//! | [`Lease`], [`Pin`] | access to a page's memory: a lease preserves the bytes, a pin preserves the address |
//! | snapshot | a manifest and the page images that it names; an open starts from the newest snapshot |
//! | [`StatePoint`] | an earlier state, given by Lsn, snapshot or name, to view, restore or fork |
//! | [`View`] | a read-only handle to a state on disk or in an archive; a writer may continue at the same time |
//! | [`follow::Follower`] | a reader that receives each batch as it is logged |
//!
//! `docs/architecture.md` defines the terms that only the engine uses.
//!
//! # Modules
//!
//! The crate root exports the types that most programs need. [`batch`] contains the parts of a batch, [`options`] the
//! values of options, [`store`] the results of reads, [`follow`] readers of the log, [`stats`] counters, and [`error`]
//! the parts of an [`Error`]. [`snapshot`], [`history`] and [`tiers`] contain the types that snapshots, restores and
//! moves return. [`device`] contains devices and caller-owned memory. [`blocks`] and [`layout`] contain the key-value
//! blocks of an inference engine.
//!
//! # Processes, threads, tasks
//!
//! **Child processes.** A store belongs to the process that opened it. In a forked child, every call on an inherited
//! handle returns [`Error::Forked`] before it writes a byte or waits for a lock. Getters that cannot fail return empty
//! values. Dropping an inherited handle frees none of the parent's resources. A child may open other stores. A child
//! may open this store after the parent has closed it, whatever the parent's threads did at the fork. There is one
//! exception: a fork at the very start or end of a thread can inherit the locked list of threads that read without
//! locks. An `exec` is always safe. A [`follow::Replica`] is plain memory and works in both processes. The writer lock,
//! and the locks of a [`View`] on its snapshots, belong to the parent and are released when the parent ends, even if
//! children are still running. A child of a bare `clone` system call runs no handlers of `pthread_atfork`, and keeps
//! these locks until it ends. The driver does not support a GPU in a child of a process that used it.
//!
//! **What each call waits for.**
//!
//! | call | waits for |
//! |---|---|
//! | [`Store::submit`] | other submissions; room in the log, or for changes of pages on disk; pages to copy or load; sources; an image file; a full queue |
//! | [`Store::commit`], [`Ticket::wait`] | the requested [`Ack`]: nothing, the applier, or a sync of the log |
//! | [`Store::page`], [`Store::page_by_key`], [`Store::root`], [`Store::view`] and other lookups | nothing |
//! | [`Store::read`] and other reads | the applier: batches of that page, and on a GPU all earlier batches; the page's load; the disk |
//! | [`Store::read_many`] | pages that are not loaded |
//! | [`ChangeStream::next_timeout`](follow::ChangeStream::next_timeout) with a time of zero | nothing |
//! | [`Store::release`] | a sync of the log, the applier, and streams of ended leases of the page |
//! | [`Store::compare`] | the applier: all earlier batches; after two failed attempts it delays new batches |
//! | [`Store::snapshots`], [`Store::would_prune`], [`Store::stats`] | nothing, not even a running snapshot or scrub |
//! | [`Store::snapshot`] and its variants, [`Store::prune`] | each other, and a background snapshot, which then runs at full speed |
//! | [`Store::scrub`], [`Store::audit`] | the same; a scrub also for another scrub |
//! | [`Store::restore`] | the same; commits wait for it |
//! | `Store::agrees`, `nccl::QueuedCollective::wait`, an open with `MemoryOptions::gather` | the other ranks, up to their time limit |
//! | `nixl::Agent::write`, `nixl::Agent::read`, `nixl::Transfer::wait` | the transfer, up to the agent's time limit, and the library, which may copy the bytes in the call |
//! | calls of `nixl::PageClient` | the server, up to the agent's time limit |
//!
//! **Async.** Two calls return futures: [`Ticket::acknowledged`] and [`Store::read_many`]. All other calls, and
//! dropping a store, can block on a disk. Run them on a thread that may block (tokio's `spawn_blocking`).
//! [`Store::submit`], followed by one [`Ticket::wait`] for many batches, needs few such threads. Do not hold a pin
//! across an `await` if another task may commit to its page. Leases have no such limit.
//!
//! **Failures.** `docs/failures.md` lists the failures that stop a store and those that only fail a call.
//!
//! # Map
//!
//! Each folder imports only from folders below it in this table. The crate `remanent-format` defines the bytes
//! on disk. It also contains the pure function `rebuild`, whose result tests compare with that of recovery.
//!
//! | folder | purpose |
//! |---|---|
//! | `nixl/` | transfers of page memory between processes and hosts; only with the feature `nixl` |
//! | `blocks/` | blocks of an inference engine's cache, stored in pages or in the engine's own tensors |
//! | `store/` | the public handle of an open store |
//! | `archive/` | archiving an open store in an object store, and views of archives; only with the feature `archive` |
//! | `tiers/` | demotion of unused pages from a full place, and promotion on demand |
//! | `history/` | views of earlier states, restores, forks |
//! | `write/` | checks, encodes and logs a batch, and passes it to the applier |
//! | `recovery/` | the decision table of an open, and its steps |
//! | `snapshot/` | selecting, gathering, publishing and verifying snapshots; scrubs |
//! | `engine.rs` | the shared parts of an open store |
//! | `applier/` | the one thread that changes pages; leases and pins |
//! | `follower/` | reading batches as they are logged |
//! | `catalog/` | which snapshots, images and segments are kept, and why |
//! | `images/` | page contents in image files |
//! | `log/` | segments, group commit, syncing |
//! | `versions/` | lock-free lookups of pages and root |
//! | `memory/` | page memory, staging memory, and files that devices copy to |
//! | `testing/` | a simulated disk, devices that fail or lag; only with the feature `testing` |
//! | `device/` | the interface to devices: host, CUDA, several as one |
//! | `disk/` | the interface to files: a directory, and the ways to write it |
//! | `base/` | locks and threads, parallel work, the process, fallible allocation, poison |
//! | `options/` | how a store is opened |
//! | `eviction/` | policies that choose which page leaves a full place |
//! | `error/` | errors: cause, fault, state of the store, remedy |
//! | `layout/` | the addresses of an inference engine's blocks |
//!
//! # Invariants
//!
//! Comments in the code cite these invariants by number.
//!
//! - **I1** Log first: no page changes before the frame with the change is `Logged`. A batch gets its Lsn only once its
//!   payload and checksum are complete.
//! - **I2** The log contains after-images only: replaying a frame twice, or over a newer image, gives the same bytes.
//! - **I3** In log order a frame is valid if and only if its header checksum, payload checksum, store, incarnation, own
//!   position, Lsn and the chain hash of the previous frame are all correct.
//! - **I4** Every frame carries the durable mark known when it was written. The first invalid frame is a torn tail only
//!   if no mark covers it. Otherwise it is damage, and the open fails.
//! - **I5** No sector with a synced frame is written again while its segment belongs to the log. STORE, manifests and
//!   tables change by rename only. Recovery removes nothing that was acknowledged. Every writable open begins a new
//!   incarnation, whose opening segment is built completely and then renamed into place. That rename is the only commit
//!   point of recovery.
//! - **I6** Recovery copies all batches above the last mark, because they may exist only in the page cache. It
//!   reads the bytes under a mark from the medium at least once: bypassing the page cache, or by a read that
//!   found none of these bytes cached.
//! - **I7** A manifest is published only after everything that it names is synced, the log is durable up to the
//!   manifest's `end`, and all earlier named snapshots were read back and recorded. The data that a snapshot
//!   replaces is removed only once the snapshot was read back and a synced seal records that.
//! - **I8** Files that a kept snapshot needs or a kept frame names are not recycled. The newest snapshot is
//!   always kept, because the next snapshot shares its images. No frame enters a segment before the next segment
//!   exists and is synced with its name.
//! - **I9** Bytes from disk are untrusted. Every length is checked before it is used.
//! - **I10** Page memory and its copies stay within [`Options::memory`]. Recovery checks the final page table before it
//!   allocates.
//! - **I11** The host device defines correct results: every other device gives the same bytes.
//! - **I12** Images, payloads from a device, and long writes that cross a bus are checksummed on both sides of
//!   the bus before they are logged, named or read. An image that a device copies to a file's memory is
//!   checksummed before its snapshot counts as verified. If a device's checksum differs, the host computes the
//!   checksum of the bytes on disk, and only a mismatch there counts as damage.
//! - **I13** An image file is overwritten only when no durable record names the file and the file has no other
//!   name. The file loses its name first. Its new chunks are written after its next name, a new number, is
//!   durable. The file is neither truncated nor removed while a device has its memory registered.
//!
//! `docs/decisions.md` explains decisions that may seem surprising.

#[cfg(not(target_os = "linux"))]
compile_error!(
    "Remanent runs on Linux only: it relies on how ext4, XFS and tmpfs write, and on locks of open file descriptions"
);

#[cfg(feature = "nixl")]
pub mod nixl;
pub mod blocks;
pub mod store;
#[cfg(feature = "archive")]
mod archive;
pub mod tiers;
pub mod history;
mod write;
mod recovery;
pub mod snapshot;
mod engine;
mod applier;
mod follower;
mod catalog;
mod images;
mod log;
mod versions;
mod memory;
#[cfg(feature = "testing")]
pub mod testing;
pub mod device;
pub mod disk;
mod base;
pub mod options;
mod eviction;
pub mod error;
pub mod layout;

use crate::error::{IoAction, Unavailable};
use std::path::Path;
use std::sync::Arc;

pub use applier::lease::Lease;
pub use applier::pin::Pin;
pub use error::{Error, Result};
pub use history::point::StatePoint;
pub use history::view::View;
pub use options::{Ack, DeviceChoice, Options, Retention, SnapshotOptions};
#[doc(hidden)]
pub use recovery::SurveyedStore;
pub use remanent_format::{
    Epoch, Key, Lsn, Metadata, PageId, PageInfo, Place, Position, SnapshotId, StoreId, Value,
};
pub use store::{CommitReceipt, Store, Ticket};
pub use write::batch::WriteBatch;

/// The parts of a batch: new pages, operations on pages, sources of bytes, and working copies on a device.
pub mod batch {
    pub use remanent_format::Width;
    pub use remanent_format::op::{Indices, Op};

    pub use crate::write::batch::{ByteSource, CreatePage, NewPage, PageChanges, PageRef, WorkingCopy};
    pub use crate::write::commit::{InitialCopy, Shadow};
}

/// Readers that receive batches in order, as the batches are logged or applied.
pub mod follow {
    pub use crate::applier::{AppliedBatch, AppliedChange, AppliedPage, ChangeEvent, ChangeStream};
    pub use crate::follower::{
        Batches, FollowFrom, FollowedBatch, Follower, FollowerPosition, ParsePositionError, Replica,
        RestoredState,
    };
}

/// Collective operations between GPUs of several ranks, by NVIDIA's library NCCL, with the feature `nccl`.
#[cfg(feature = "nccl")]
pub mod nccl {
    pub use crate::device::cuda::nccl::{Nccl, Rank, UniqueId};
    pub use crate::device::{CollectiveSource, Communicator, Element, QueuedCollective, Reduction};
    pub use crate::error::NcclError;
    pub use crate::options::GatherMode;
    pub use crate::store::GatherReport;
    pub use crate::store::agreement::{Agreement, DivergedPage};
}

/// The counters that [`Store::stats`] returns.
pub mod stats {
    pub use crate::device::counts::{AllocationStats, LaneStats, TransferStats};
    pub use crate::images::disk_pages::DiskUsage;
    #[cfg(feature = "archive")]
    pub use crate::log::ArchiveStats;
    pub use crate::log::LogStats;
    pub use crate::memory::arena::{PlaceUsage, Purpose};
    pub use crate::snapshot::progress::SnapshotStats;
    pub use crate::snapshot::scrub::ScrubStats;
    pub use crate::store::stats::Stats;
    pub use crate::tiers::stats::{MoveStats, TierStats};
}

use device::Device;
use device::host::HostDevice;
use device::multi::MultiDevice;
use disk::Disk;
use disk::dir::DirDisk;
use follow::{FollowFrom, Follower, Replica};
use history::DeviceCopier;
use snapshot::PruneReport;

impl Store {
    /// Opens the store in `directory`. If the directory is missing or empty and [`Options::create`] allows it, creates
    /// the directory, its missing parents, and a new store.
    ///
    /// The whole recovery runs in this call. On return, the store contains every acknowledged batch, except batches
    /// acknowledged only as logged that a power cut has removed. [`Store::recovered`] returns a report of the recovery.
    ///
    /// # Errors
    /// [`Error::Locked`] if another process or handle has the store open; [`Error::NoStore`],
    /// [`Error::Mismatch`], [`Error::OverBudget`],
    /// [`Error::Invalid`], [`Error::Unavailable`]; [`Error::Damaged`] if bytes that were synced have
    /// changed; errors of the file system.
    pub fn open(directory: impl AsRef<Path>) -> Result<Self> {
        Options::new().open(directory)
    }

    /// Opens a read-only view of a store's state at an earlier point.
    ///
    /// The call needs no device and no writer lock, and writes nothing. A writer in this or another process may have
    /// the store open. Pages are read from disk on demand. The state remains readable until the handle is dropped.
    ///
    /// ```
    /// use remanent::{Place, StatePoint, Store};
    /// # let directory = tempfile::tempdir().unwrap();
    /// # let path = directory.path().join("mystore");
    /// let store = Store::open(&path)?;
    /// let mut batch = store.batch();
    /// let page = batch.create(4, Place::Host).page();
    /// batch.write(page, 0, b"then");
    /// let then = store.commit(batch)?;
    /// let mut batch = store.batch();
    /// batch.write(then.pages[0], 0, b"now!");
    /// store.commit(batch)?;
    ///
    /// let old = Store::open_at(&path, &StatePoint::Lsn(then.position.lsn))?;
    /// let mut bytes = [0; 4];
    /// old.read(then.pages[0], 0, &mut bytes)?;
    /// assert_eq!(&bytes, b"then");
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::NoStore`]; [`Error::NoSuchState`] if the state
    /// does not exist; [`Error::Damaged`] if the state cannot be rebuilt from any snapshot and the log;
    /// [`Error::Overtaken`] if a writer removes the state's files while they are being read.
    pub fn open_at<P>(directory: impl AsRef<Path>, point: P) -> Result<View>
    where
        P: TryInto<StatePoint, Error: Into<Error>>,
    {
        let point = point.try_into().map_err(Into::into)?;
        View::open_on(&(Arc::new(DirDisk::held(directory)) as Arc<dyn Disk>), Some(&point))
    }

    /// Opens a read-only view of a store's newest state, like [`Store::open_at`].
    ///
    /// If a writer has the store open, the view shows the newest state at some moment during this call. The view
    /// includes logged batches that are not yet durable, which a power cut may still remove.
    ///
    /// # Errors
    /// Same as [`Store::open_at`].
    pub fn open_read_only(directory: impl AsRef<Path>) -> Result<View> {
        View::open_on(&(Arc::new(DirDisk::held(directory)) as Arc<dyn Disk>), None)
    }

    /// Returns what [`Store::prune`] would remove from a store, without removing it. The store may be open or closed.
    ///
    /// The call needs no device and no writer lock, writes nothing, and reads no images. The result also lists files
    /// that any open of the store would remove because they are unused. Files that a writer is still creating are not
    /// listed.
    ///
    /// ```
    /// use remanent::{Retention, SnapshotOptions, Store};
    /// # let directory = tempfile::tempdir().unwrap();
    /// # let path = directory.path().join("mystore");
    /// let store = Store::open(&path)?;
    /// for name in ["first", "second"] {
    ///     store.snapshot_with(SnapshotOptions::new().name(name))?;
    /// }
    /// let given_up = Retention::default().give_up("first").names_only(true);
    /// let would_go = Store::would_prune_at(&path, &given_up)?;
    /// assert_eq!(would_go.snapshots[0].name.as_deref(), Some("first"));
    /// assert_eq!(store.snapshots().len(), 2, "nothing was done");
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::NoStore`]; [`Error::Damaged`] if opening the store would fail; errors of the file system.
    pub fn would_prune_at(directory: impl AsRef<Path>, retention: &Retention) -> Result<PruneReport> {
        Self::would_prune_on(&(Arc::new(DirDisk::new(directory)) as Arc<dyn Disk>), retention)
    }

    /// Opens a store with default options in a new temporary directory, for tests. The directory is removed when the
    /// store is dropped.
    ///
    /// # Errors
    /// Same as [`Store::open`].
    pub fn temporary() -> Result<Self> {
        Options::new().open_temporary()
    }
}

impl history::KeptStates {
    /// Reads the manifests and the headers of the log's segments.
    ///
    /// # Errors
    /// [`Error::NoStore`]; [`Error::Damaged`] if STORE is damaged or a folder cannot be listed; [`Error::OutOfMemory`].
    pub fn read(directory: impl AsRef<Path>) -> Result<Self> {
        Self::read_on(&(Arc::new(DirDisk::held(directory)) as Arc<dyn Disk>))
    }
}

impl Options {
    /// Opens the store in `directory` with these options. [`Store::open`] uses the default options.
    ///
    /// ```
    /// use remanent::{Ack, DeviceChoice, Options};
    /// # let directory = tempfile::tempdir().unwrap();
    /// # let path = directory.path().join("mystore");
    /// let store = Options::new().device(DeviceChoice::Host).ack(Ack::Durable).open(&path)?;
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// Same as [`Store::open`].
    pub fn open(self, directory: impl AsRef<Path>) -> Result<Store> {
        let device = device_of(&self)?;
        self.open_with(directory, device)
    }

    /// Opens the store in `directory` with pages on a device that the caller created. Such a device may take its memory
    /// from the caller's allocator, combine several devices, or be another implementation of [`Device`]. The options
    /// [`device`](Self::device) and [`slots`](Self::slots) are ignored.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use remanent::Options;
    /// use remanent::device::host::HostDevice;
    /// # let directory = tempfile::tempdir().unwrap();
    /// # let path = directory.path().join("mystore");
    /// let store = Options::new().open_with(&path, Arc::new(HostDevice::new()))?;
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// Same as [`Store::open`].
    pub fn open_with(self, directory: impl AsRef<Path>, device: Arc<dyn Device>) -> Result<Store> {
        Store::open_on(Arc::new(DirDisk::new(directory)), device, self)
    }

    /// Opens a store with these options in a new temporary directory, for tests. The directory is removed when the
    /// store is dropped.
    ///
    /// # Errors
    /// Same as [`Store::open`].
    pub fn open_temporary(self) -> Result<Store> {
        let directory = temporary_directory()?;
        let device = device_of(&self)?;
        let disk = Arc::new(DirDisk::new(directory.path()));
        Store::open_keeping(disk, device, self, Some(Box::new(directory)))
    }
}

impl Follower {
    /// Opens a follower of the store in `directory`. The call takes no lock and writes nothing, so read access to the
    /// directory is sufficient. The store may be open in any process, or closed.
    ///
    /// # Errors
    /// [`Error::NoStore`]; [`Error::Overtaken`] if batches after `from` are no longer kept; [`Error::Diverged`] if a
    /// crash removed the batch at `from`, or if the batch belongs to another store; [`Error::Damaged`].
    pub fn open(directory: impl AsRef<Path>, from: FollowFrom) -> Result<Self> {
        Self::open_on(Arc::new(DirDisk::new(directory)), from)
    }
}

impl Replica {
    /// Loads the state of the newest snapshot of the store in `directory` into memory. Returns an empty replica if the
    /// store has no snapshot. A [`Follower`] opened at the replica's position continues with the next batch.
    ///
    /// # Errors
    /// [`Error::NoStore`], [`Error::Damaged`]; errors of the file system.
    pub fn from_snapshot(directory: impl AsRef<Path>) -> Result<Self> {
        let disk: Arc<dyn disk::Disk> = Arc::new(DirDisk::new(directory));
        Self::from_snapshot_on(&disk)
    }
}

impl Store {
    /// Creates a new store in `directory_new` from a state of this store, and returns the id of the new store. The
    /// directory must be missing or empty.
    ///
    /// The new store shares image files through hard links where the file system permits. Pages without an image of
    /// exactly that state are copied. Lsns, epochs and page ids continue from the state.
    ///
    /// ```
    /// use remanent::{Place, StatePoint, Store};
    /// # let directory = tempfile::tempdir().unwrap();
    /// # let (path, path_new) = (directory.path().join("mystore"), directory.path().join("trial"));
    /// let store = Store::open(&path)?;
    /// let mut batch = store.batch();
    /// let page = batch.create(4, Place::Host).page();
    /// batch.write(page, 0, b"base");
    /// let base = store.commit(batch)?;
    /// store.fork(&path_new, &StatePoint::Lsn(base.position.lsn))?;
    ///
    /// let trial = Store::open(&path_new)?;
    /// let mut bytes = [0; 4];
    /// trial.read(base.pages[0], 0, &mut bytes)?;
    /// assert_eq!((&bytes, trial.lsn()), (b"base", base.position.lsn));
    /// assert_ne!(trial.id(), store.id());
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// Same as [`Store::open_at`] and [`View::fork`].
    pub fn fork<P>(&self, directory_new: impl AsRef<Path>, point: P) -> Result<StoreId>
    where
        P: TryInto<StatePoint, Error: Into<Error>>,
    {
        let point = point.try_into().map_err(Into::into)?;
        self.wait_durable(self.lsn())?;
        View::open_on(self.disk(), Some(&point))?.fork(directory_new)
    }
}

impl Store {
    /// Creates a new store from a state that was assembled outside the engine, for example salvaged from a store that
    /// can no longer be opened. Returns the new store's id.
    ///
    /// `read` fills a slice with a page's bytes starting at an offset, and may be called twice for the same bytes. If
    /// `read` fails or the process crashes, the directory contains no store.
    ///
    /// # Errors
    /// Same as [`View::fork`]; the errors of `read`.
    #[doc(hidden)]
    pub fn create_at<E: From<Error>>(
        directory: impl AsRef<Path>,
        origin: &history::InitialState,
        mut read: impl FnMut(&PageInfo, u64, &mut [u8]) -> Result<(), E>,
    ) -> Result<StoreId, E> {
        let disk: Arc<dyn Disk> = Arc::new(DirDisk::new(directory));
        history::seed::create_alone(origin, &disk, &mut read)
    }

    /// Checks that `directory` contains no store and no other files, as [`Store::create_at`] requires.
    ///
    /// # Errors
    /// [`Error::NoStore`] if the directory is not empty; errors of the file system.
    #[doc(hidden)]
    pub fn check_create_at(directory: impl AsRef<Path>) -> Result<()> {
        history::seed::check_directory_is_free(&DirDisk::new(directory))
    }
}

impl DeviceCopier {
    /// Creates a copier on the chosen device.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if the device cannot be opened.
    pub fn open(device: DeviceChoice) -> Result<Self> {
        Ok(Self::open_on(device_for(device)?))
    }
}

impl View {
    /// Creates a new store in `directory_new` from the state of this view, like [`Store::fork`], and returns the new
    /// store's id. If the process crashes during the call, the directory contains either no store or a complete store.
    ///
    /// # Errors
    /// [`Error::NoStore`] if the directory is not empty; [`Error::Locked`]; [`Error::Damaged`],
    /// [`Error::Overtaken`] and [`Error::OutOfMemory`] while reading the state; [`Error::DiskFull`]; errors of the file
    /// system.
    pub fn fork(&self, directory_new: impl AsRef<Path>) -> Result<StoreId> {
        self.fork_on(&(Arc::new(DirDisk::new(directory_new)) as Arc<dyn Disk>))
    }

    /// Forks the state like [`View::fork`], but onto any disk. Tests use this method with simulated disks.
    ///
    /// # Errors
    /// Same as [`View::fork`].
    #[doc(hidden)]
    pub fn fork_on(&self, disk: &Arc<dyn Disk>) -> Result<StoreId> {
        history::fork::fork(self.past()?, disk)
    }
}

#[cfg(feature = "archive")]
impl View {
    /// Opens a view of the newest state of the archive at `archive.url`, without restoring it.
    ///
    /// The call fetches the log after the newest snapshot into a temporary folder in [`std::env::temp_dir`], which is
    /// removed with the view. Images are fetched when a page in them is read, in parts of at most 8 MiB, and up to
    /// [`cache_len_max`](options::ArchiveOptions::cache_len_max) bytes of them are kept in the folder. Everything is
    /// verified by checksums. Of `archive`, only the URL, the settings and this length are used.
    ///
    /// The archive is not changed, and its writer continues. The credential needs to read, and neither to write nor to
    /// list. If the writer deletes data that the view needs, after two newer snapshots, reads fail with
    /// [`Error::Overtaken`].
    ///
    /// ```
    /// use remanent::options::ArchiveOptions;
    /// use remanent::{Ack, Options, Place, SnapshotOptions, View};
    /// # let directory = tempfile::tempdir()?;
    /// # let (path, archive) = (directory.path().join("store"), directory.path().join("archive"));
    /// # std::fs::create_dir(&archive)?;
    /// let archive = ArchiveOptions::new(format!("file://{}", archive.display()));
    /// let store = Options::new().archive(archive.clone()).open(&path)?;
    /// let mut batch = store.batch();
    /// batch.create_from(b"weights".to_vec(), Place::Host);
    /// let ticket = store.submit(batch)?;
    /// let page = ticket.pages()[0];
    /// let snapshot = store.snapshot_with(SnapshotOptions::new().name("best"))?;
    /// store.wait_archived(snapshot.id, None)?;
    ///
    /// // On any machine.
    /// let view = View::open_archive_at(&archive, "name:best")?;
    /// let mut bytes = [0; 7];
    /// view.read(page, 0, &mut bytes)?;
    /// assert_eq!(&bytes, b"weights");
    /// # ticket.wait(Ack::Archived)?;
    /// assert_eq!(View::open_archive(&archive)?.lsn(), store.lsn());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Archive`] if the bucket cannot be reached, the archive is empty, or an object is damaged or missing;
    /// [`Error::Overtaken`] if a writer deletes data faster than the call reads it; errors of the temporary folder.
    pub fn open_archive(archive: &options::ArchiveOptions) -> Result<Self> {
        open_archive(archive, None)
    }

    /// Opens a view of an earlier state of an archive, like [`View::open_archive`]: the state after a batch that the
    /// archive keeps, the newest snapshot, or a named snapshot. A named snapshot needs no log.
    ///
    /// # Errors
    /// [`Error::NoSuchState`] if the archive does not keep the state; the errors of [`View::open_archive`].
    pub fn open_archive_at<P>(archive: &options::ArchiveOptions, point: P) -> Result<Self>
    where
        P: TryInto<StatePoint, Error: Into<Error>>,
    {
        let point = point.try_into().map_err(Into::into)?;
        open_archive(archive, Some(&point))
    }
}

#[cfg(feature = "archive")]
impl Follower {
    /// Opens a follower of the archive at `archive.url`. It returns each batch once the batch is archived, so that no
    /// returned batch is lost in a crash.
    ///
    /// Positions of followers of the store and of its archive are the same: one can continue after the other. A position
    /// that is not archived yet is awaited.
    ///
    /// While the follower waits, it sends one GET per [`interval`](options::ArchiveOptions::interval) (1 second by
    /// default, $1.20 a month at the list price of S3), however often [`Follower::next`] is called, and every tenth time
    /// another one. After a batch, it sends two GETs for each object of the archive that is new, and fetches images only
    /// when they are read. It uses up to 64 MiB of memory and a temporary folder with up to
    /// [`cache_len_max`](options::ArchiveOptions::cache_len_max) bytes of images. The archive is not changed, and the
    /// credential needs to read only.
    ///
    /// Besides its own errors, [`Follower::next`] then returns [`Error::Archive`] if the bucket cannot be reached, or
    /// if an object is damaged or missing; after the former, the follower can continue. [`Error::Overtaken`] means that
    /// the archive has deleted or never contained the next batch, and [`Error::Diverged`] that the archive was continued
    /// at an earlier batch.
    ///
    /// ```
    /// use std::time::Duration;
    /// use remanent::follow::{FollowFrom, Follower, Replica};
    /// use remanent::options::ArchiveOptions;
    /// use remanent::{Ack, Options, Place};
    /// # let directory = tempfile::tempdir()?;
    /// # let (path, archive) = (directory.path().join("store"), directory.path().join("archive"));
    /// # std::fs::create_dir(&archive)?;
    /// let archive = ArchiveOptions::new(format!("file://{}", archive.display()));
    /// let store = Options::new().archive(archive.clone()).open(&path)?;
    /// let mut batch = store.batch();
    /// batch.create_from(b"weights".to_vec(), Place::Host);
    /// let ticket = store.submit(batch)?;
    /// ticket.wait(Ack::Archived)?;
    ///
    /// // On any machine.
    /// let mut follower = Follower::open_archive(&archive, FollowFrom::Beginning)?;
    /// let mut replica = Replica::default();
    /// replica.apply(&follower.next(Duration::from_secs(10))?.expect("it is archived"))?;
    /// assert_eq!(replica.bytes(ticket.pages()[0]), Some(&b"weights"[..]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Overtaken`] if the archive does not keep the batches after `from`; [`Error::Diverged`] if it contains
    /// another batch instead of the one at `from`; [`Error::Archive`] if the bucket cannot be reached, the archive is
    /// empty, or an object is damaged or missing; errors of the temporary folder.
    pub fn open_archive(archive: &options::ArchiveOptions, from: FollowFrom) -> Result<Self> {
        let folder = temporary_directory()?;
        let disk = Arc::new(DirDisk::new(folder.path()));
        archive::open_follower(archive, from, folder, disk)
    }
}

#[cfg(feature = "archive")]
impl Replica {
    /// Loads the state of the newest snapshot in an archive into memory, like [`Replica::from_snapshot`]. A follower that
    /// [`Follower::open_archive`] opens at the replica's position continues with the next batch.
    ///
    /// # Errors
    /// The errors of [`View::open_archive`]; [`Error::OutOfMemory`].
    pub fn from_archive(archive: &options::ArchiveOptions) -> Result<Self> {
        let folder = temporary_directory()?;
        let disk = Arc::new(DirDisk::held(folder.path()));
        archive::open_replica(archive, folder, disk)
    }
}

#[cfg(feature = "archive")]
fn open_archive(options: &options::ArchiveOptions, point: Option<&StatePoint>) -> Result<View> {
    let folder = temporary_directory()?;
    let disk = Arc::new(DirDisk::held(folder.path()));
    archive::open_view(options, point, folder, disk)
}

fn temporary_directory() -> Result<tempfile::TempDir> {
    tempfile::tempdir().map_err(|source| {
        let path = format!("a directory in {}", std::env::temp_dir().display());
        Error::folder(IoAction::Create, path, source)
    })
}

/// Opens the device that the options select: a single device, or several combined into one.
fn device_of(options: &Options) -> Result<Arc<dyn Device>> {
    match &options.slots[..] {
        [] => device_for(options.device),
        slots => {
            let parts = slots.iter().map(|choice| device_for(*choice)).collect::<Result<_>>()?;
            Ok(Arc::new(MultiDevice::new(parts)))
        }
    }
}

fn device_for(choice: DeviceChoice) -> Result<Arc<dyn Device>> {
    match choice {
        DeviceChoice::Host => Ok(Arc::new(HostDevice::new())),
        DeviceChoice::Cuda(ordinal) => gpu(ordinal),
        DeviceChoice::Auto => match gpu(0) {
            // A GPU that exists but fails is an error: only a missing GPU is replaced by host memory.
            Err(Error::Unavailable(Unavailable::Device { reason, .. })) => {
                tracing::info!(reason, "no GPU: pages live in host memory");
                Ok(Arc::new(HostDevice::replacing_gpu(reason)))
            }
            chosen => chosen,
        },
    }
}

#[cfg(feature = "cuda")]
fn gpu(ordinal: u32) -> Result<Arc<dyn Device>> {
    Ok(Arc::new(device::cuda::CudaDevice::open(ordinal)?))
}

#[cfg(not(feature = "cuda"))]
fn gpu(ordinal: u32) -> Result<Arc<dyn Device>> {
    let reason = "this build is without the feature `cuda`".to_owned();
    Err(Error::Unavailable(Unavailable::Device { device: format!("cuda:{ordinal}"), reason }))
}

/// Checks at compile time that handles can be shared by threads, and that the values they return can be sent to other
/// threads.
const _: () = {
    const fn shared<T: Send + Sync + ?Sized>() {}
    const fn sent<T: Send>() {}
    shared::<Store>();
    shared::<View>();
    shared::<DeviceCopier>();
    shared::<store::LiveView<'_>>();
    shared::<Lease<'_>>();
    shared::<Ticket>();
    shared::<store::Acknowledged>();
    shared::<store::ReadMany>();
    shared::<store::ManyBytes>();
    shared::<follow::ChangeStream>();
    shared::<Replica>();
    shared::<follow::FollowedBatch>();
    shared::<device::DeviceBytes>();
    shared::<device::CallerMemory>();
    shared::<device::StreamGuard>();
    shared::<Error>();
    shared::<Options>();
    sent::<Follower>();
    sent::<WriteBatch>();
    shared::<dyn batch::ByteSource>();
    sent::<Pin<'_>>();
    sent::<store::Pages<'_>>();
};

/// Runs the README's example as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// Runs the example of the guide for services as a test.
#[cfg(doctest)]
#[doc = include_str!("../docs/guides/rust-service.md")]
struct RustServiceGuide;
