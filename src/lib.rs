//! Remanent: pages that live in GPU memory and survive a crash.
//!
//! A store is a directory and the pages in it. Pages are changed by batches of deltas; each batch reaches a
//! write-ahead log before it is applied; snapshots are taken while mutation goes on; after a crash
//! [`Store::open`] rebuilds page table, memory and root up to the last acknowledged batch, bit for bit.
//!
//! Pages live in the memory of a GPU, in pinned host memory, or, where there is no GPU, in the host's
//! ordinary memory; [`Options::device`] says which.
//!
//! ```
//! use remanent::{Options, Place, Store};
//! # let directory = tempfile::tempdir().unwrap();
//! # let path = directory.path().join("mystore");
//! let store = Store::open(&path, Options::default())?;
//! let mut batch = store.batch();
//! let page = batch.create(16, Place::Host).page();
//! batch.write(page, 4, b"remanent").set_root("step", 1u64);
//! let committed = store.commit(batch)?;
//! drop(store); // or the process dies
//!
//! let store = Store::open(&path, Options::default())?;
//! let mut bytes = [0; 16];
//! store.read(committed.pages[0], 0, &mut bytes)?;
//! assert_eq!(&bytes, b"\0\0\0\0remanent\0\0\0\0");
//! assert_eq!(store.recovered().position.lsn, committed.position.lsn);
//! # Ok::<(), remanent::Error>(())
//! ```
//!
//! # Words
//!
//! One word, one meaning.
//!
//! | word | meaning |
//! |---|---|
//! | Store | one directory and the pages in it; one writer at a time |
//! | Page, [`PageId`] | bytes in one place; ids rise and are never used again |
//! | [`Key`] | the user's own name for a page, at most 64 bytes, unique, free again after a delete |
//! | [`Place`] | where a page lives |
//! | [`Epoch`] | counts a page's contents: +1 for each batch that changes bytes, length, metadata; not place |
//! | Root | the store's own metadata, committed in the same batches as pages |
//! | Delta | after-image bytes for one page: dense range, masked range, or sparse elements |
//! | [`WriteBatch`] | operations that become visible and durable together or not at all |
//! | [`Lsn`] | number of a committed batch: dense, +1 each; seals take none |
//! | [`Position`] | an Lsn and the incarnation in which it was acknowledged |
//! | [`Incarnation`] | one run of the log, begun by every writable open |
//! | Frame | one batch, or a seal, as bytes in the log |
//! | Group | the frames that one sync makes durable; starts on a 4096-byte boundary |
//! | Segment | one preallocated file of the log |
//! | Seal | a frame without a batch that says what is durable: at the end of each busy period, not of a segment |
//! | Mark | the newest durable Lsn, as a frame, an opening or a manifest states it |
//! | Opening | the first segment of an incarnation: built whole, renamed into place |
//! | Keeper, maker | the log's threads: one syncs and seals, the other makes segments in advance |
//! | Draft | a batch that is encoded and has its memory, before it has an Lsn |
//! | Image | one page's bytes in an image file, with page, epoch, Lsn, length, checksum |
//! | Snapshot | a manifest and the images it names: with the log after it, enough to rebuild everything |
//! | Redo, end | of a snapshot: the last batches applied before its first and after its last page was gathered |
//! | Tombstone | in a manifest: a page that an earlier link names is gone |
//! | Thin snapshot | one that writes no images, so that a full disk gives back what deleted pages held |
//! | Floor | the oldest batch from which replay is promised; below it only the ends of snapshots can be had |
//! | Retention | what is kept beyond the newest snapshot: by number, age, bytes of log, name |
//! | Hold | a reader's lock on a snapshot or on the log's beginning: retention passes over what it holds |
//! | Exact cut | pages as they were after one batch, kept until an exact snapshot has gathered them |
//! | Fork | a new store that begins at a state of another one |
//! | Tier | a place in the order through which pages that are not used go down |
//! | Eviction | a page leaves a place to make room; the policy says which |
//! | Whole page | a page that a batch writes from first byte to last; a long one goes to an image first |
//! | [`ByteSource`] | bytes that a batch takes for a page when it is committed, piece by piece |
//! | [`Follower`] | a reader of batches as they are logged, in order, each once |
//! | [`Replica`] | pages in host memory that a follower's batches are applied to |
//! | Scrub | a reading of what lies on disk and is needed, which mends from memory what is damaged |
//! | Link | one manifest of a snapshot: a base names all pages, a change those changed since the link before |
//! | Recovery | opening what a crash left |
//! | Restore | one more batch that makes the state an earlier one; the states in between stay reachable |
//! | On disk | of a page: it has no memory; its bytes are an image's, under what batches wrote since |
//! | Unloaded | of a page: its bytes are on disk only, and are loaded before any reader or batch gets to them |
//! | Lane | an ordered queue of device work |
//! | Staging | host memory that a lane copies to or from |
//! | Lent memory | memory of the caller's in which a page lives; only the store writes there |
//! | [`StreamGuard`] | a use of memory by a caller's stream; what comes next is ordered after it |
//! | Working copy | device memory that the caller's kernels write; a capture commits what changed there |
//! | Shadow | what a working copy was when it was captured last: the page, a copy, or digests of its chunks |
//! | Slot | the *n* of `Place::Device(n)`; bound to a device at open |
//! | Fence, Pending | a point in a lane; a list in flight that owns its staging |
//! | [`Ticket`] | a submitted batch: what one waits on |
//! | [`Lease`] | the right to read a page where it lies, for a while |
//! | [`Pin`] | the promise that a page keeps its address while batches change it |
//! | Version | what a page, or the root, is after one batch: lookups find it without a lock |
//! | Visible | of a batch: its versions are in place and it is logged, so that lookups and reads see it |
//! | [`LiveView`] | root and page table of an open store as of one batch, and bytes that are unchanged since |
//! | [`Audit`] | a look whether memory is what the batches say |
//! | Registered file | an image file whose memory the device copies to |
//! | Spare, reserve | a segment or image file that waits to be used again; segments kept back for a full disk |
//! | Relocation | memory to which a leased page moves when a batch changes it |
//! | Turn | work that runs on the applier between two batches |
//! | [`Budget`] | limits in bytes, one per place, checked before anything is allocated |
//!
//! # Processes, threads, tasks
//!
//! **Child processes.** A store belongs to the process that opened it. In a forked child every call on an
//! inherited store, [`Ticket`], [`Lease`], [`Pin`], [`LiveView`], [`ReadMany`], [`ChangeStream`],
//! [`Follower`], [`View`], [`StreamGuard`] or [`device::DeviceBytes`] says [`Error::Forked`], before it
//! writes a byte or waits for a lock; getters that cannot fail return empty values. Dropping what was
//! inherited gives nothing back, and the parent goes on. A child may open other stores, and this one once its
//! parent has closed it, whatever the parent's threads were at (but not at the very start or end of a thread,
//! when the list of threads that read without locks may be held; an `exec` is always safe); a [`Replica`] is
//! plain memory and goes on in both. The writer's lock and the snapshots that a [`View`] holds are the
//! parent's: they end with the parent, whatever children live on. A child of a bare `clone` system call,
//! which runs no handlers of `pthread_atfork`, keeps them until it ends. A GPU cannot be used in a child of a
//! process that used it: that is the driver's rule.
//!
//! **What waits for what.**
//!
//! | call | waits for |
//! |---|---|
//! | [`Store::submit`] | other submissions; room in the log, or for changes of pages on disk; pages to copy or load; sources; an image file; a full queue |
//! | [`Store::commit`], [`Ticket::wait`] | what [`Ack`] says: nothing, the applier, or a sync of the log |
//! | [`Store::page`], [`Store::page_by_key`], [`Store::root`], [`Store::view`] and other lookups | nothing |
//! | [`Store::read`] and its kin | the applier: batches of that page; on a GPU, all batches before; a page's load; the disk |
//! | [`Store::read_many`] | pages that are not loaded |
//! | [`ChangeStream::next_timeout`] with a time of zero | nothing |
//! | [`Store::release`] | a sync of the log, the applier, and streams of leases of the page that have ended |
//! | [`Store::compare`] | the applier: all batches before; after two tries in vain it holds batches up |
//! | [`Store::snapshots`], [`Store::would_prune`], [`Store::stats`] | nothing, not even a running snapshot or scrub |
//! | [`Store::snapshot`] and its kin, [`Store::prune`] | each other, and a background snapshot, which goes on at full speed |
//! | [`Store::scrub`], [`Store::audit`] | the same; a scrub for another scrub |
//! | [`Store::restore`] | the same, and commits wait for it |
//!
//! **Async.** Two calls give futures, [`Ticket::acknowledged`] and [`Store::read_many`]. A call that waits
//! for a disk belongs on a thread that may block (tokio's `spawn_blocking`); so does dropping a store.
//! [`Store::submit`] and, later, one [`Ticket::wait`] for many batches keep such threads few. A pin is not
//! held across an `await` if another task may commit to its page; a lease may be.
//!
//! **Failures.** Which of them stop a store is listed in `docs/failures.md`.
//!
//! # Map
//!
//! A folder imports only from those below it. Bytes on disk, and the pure `rebuild` that recovery is held
//! against, are the crate `remanent-format`'s.
//!
//! | folder | what it is for |
//! |---|---|
//! | `blocks/` | blocks of an inference engine's cache: in pages, and in the engine's own tensors |
//! | `store/` | the handle that a caller holds |
//! | `tiers/` | pages that go down where a place is full, and come up when they are asked for |
//! | `history/` | looking at, going back to, and branching from earlier states |
//! | `write/` | a batch as the caller asks for it, and as it is checked, encoded, logged and handed over |
//! | `recovery/` | the decision table of an open, and the recipe that follows it |
//! | `snapshot/` | choosing, gathering, publishing and verifying snapshots; scrubs |
//! | `engine.rs` | the parts of an open store that all of these share |
//! | `applier/` | the one thread that changes pages; leases and pins |
//! | `follower/` | reading batches as they are logged |
//! | `catalog/` | which snapshots, images and segments are kept, and why |
//! | `images/` | pages' bytes in image files |
//! | `log/` | segments, group commit, syncing |
//! | `versions/` | what lookups find of pages and root without a lock |
//! | `memory/` | page memory, host memory that lanes copy through, and files that they copy to |
//! | `testing/` | a simulated disk, devices that fail or lag; only with the feature `testing` |
//! | `device/` | the seam to devices: host, CUDA, several as one |
//! | `disk/` | the seam to files: a directory, and its ways to write |
//! | `base/` | locks and threads, parallel work, the process, memory that can be refused, poison |
//! | `options/` | how a store is opened |
//! | `eviction/` | policies: which page leaves a place that is full |
//! | `error/` | what can go wrong, whose fault it is, and what helps |
//! | `layout/` | where the bytes of such blocks lie: addresses alone |
//!
//! # Invariants
//!
//! Cited in the code by their numbers.
//!
//! - **I1** Log first: no page changes before the frame that holds the change is `Logged`. An Lsn is
//!   assigned only when payload and checksum are in hand.
//! - **I2** The log holds after-images only: replaying a frame twice, or over a newer image, gives the same
//!   bytes.
//! - **I3** In the order of the log a frame is valid if and only if header checksum, payload checksum, store,
//!   incarnation, own position, Lsn and the chain hash of the frame before it all hold.
//! - **I4** Every frame carries the durable mark known when it was written. The first invalid frame is a
//!   torn tail only if no mark covers it; else it is damage, and opening is refused.
//! - **I5** No sector that holds a synced frame is written again while its segment belongs to the log. STORE,
//!   manifests and tables change by rename only. Recovery removes nothing that was acknowledged. Every
//!   writable open begins a new incarnation, whose opening segment is built whole and renamed into place;
//!   that rename is the only commit point of recovery.
//! - **I6** Recovery treats batches above the last mark as if only the page cache had them, even when it can
//!   read them: it copies them. Bytes under a mark it reads from the medium at least once, past the page
//!   cache or by a read that found none of them cached.
//! - **I7** A manifest is published only after all that it names is synced and the log is durable up to the
//!   manifest's `end`, and a snapshot with a name was read back and recorded before the next manifest. What a
//!   snapshot replaces goes only once the snapshot was read back and a synced seal says so.
//! - **I8** Nothing is recycled that a kept snapshot needs or a kept frame names. The newest snapshot is
//!   kept, whatever is given up: the next one shares its images. No frame enters a segment before the next
//!   one exists, synced, with its name.
//! - **I9** What is read from disk is untrusted: lengths are checked before they are used.
//! - **I10** Page memory and the copies beside it stay within [`Options::budget`]; recovery checks the final
//!   page table before it allocates.
//! - **I11** The host device defines "correct": every other device gives the same bytes.
//! - **I12** Images, payloads born on a device, and long writes that cross a bus are summed on both sides of
//!   it before anything logs, names or serves what arrived; an image that a device copies to the memory of a
//!   file, before its snapshot counts as verified. A device's sum that differs is not damage on disk: the
//!   host's sum of what lies there decides.
//! - **I13** An image file is written over only when nothing names it, durably, and no other name leads to
//!   it. It loses its name before. Its next chunks are written after its next name, a new number, is durable.
//!   It is neither cut nor removed while a device knows its memory.
//!
//! Decisions that may surprise, with their reasons: `docs/decisions.md`.

#[cfg(not(target_os = "linux"))]
compile_error!(
    "Remanent runs on Linux only: it relies on how ext4, XFS and tmpfs write, and on locks of open file descriptions"
);

mod blocks;
mod store;
mod tiers;
mod history;
mod write;
mod recovery;
mod snapshot;
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
/// What users of other systems know, and what does its work here.
#[cfg(doc)]
#[doc = include_str!("../docs/coming-from.md")]
pub mod coming_from {}

use std::path::Path;
use std::sync::Arc;

pub use applier::descriptor::{MemoryDescriptor, MemoryKind};
pub use applier::lease::Lease;
pub use applier::pin::Pin;
pub use applier::{AppliedBatch, AppliedChange, AppliedPage, ChangeEvent, ChangeStream};
pub use blocks::{BlockPages, BlockTensors, PagedBlock, WorkingBlocks};
pub use catalog::SnapshotInfo;
pub use device::{Access, AllocationStats, DeviceBytes, LaneStats, RawStream, StreamGuard, TransferStats};
pub use device::{UnifiedHint, UnifiedSide, UnifiedSupport};
#[doc(hidden)]
pub use error::nearest;
pub use error::{Error, Remedy, Result, StoreDamage};
pub use eviction::{EvictionPolicy, Lru, S3Fifo};
pub use follower::{
    Batches, FollowFrom, FollowedBatch, Follower, FollowerPosition, ParsePositionError, Replica,
    RestoredState,
};
pub use history::audit::{Audit, ChangedPage};
pub use history::copier::DeviceCopier;
pub use history::point::StatePoint;
#[doc(hidden)]
pub use history::seed::Seed;
pub use history::view::View;
pub use images::disk_pages::DiskUsage;
pub use log::LogStats;
pub use memory::arena::{PlaceUsage, Purpose};
pub use options::{
    Ack, Budget, CallerMemory, Compression, Create, DeviceChoice, HostMemory, ImageIo, LogIo, Options,
    PageLoad, Retention, SnapshotOptions, Tiers,
};
pub use recovery::RecoveryReport;
pub use remanent_format::log::TornTail;
pub use remanent_format::op::{Indices, Op};
pub use remanent_format::state::bisection::{BisectVerdict, Bisection};
pub use remanent_format::state::blame::{ChangeCause, ValueChange};
pub use remanent_format::{
    Damage, Defect, Epoch, FileName, Folder, Incarnation, Key, KeyLenError, LogPoint, Lsn, Metadata, PageId,
    PageInfo, Place, Position, SharedMetadata, SnapshotId, StoreId, UnknownPlace, Value, Width,
};
pub use snapshot::{PruneReport, ScrubReport, ScrubStats, SnapshotPhase, SnapshotStats};
pub use store::{
    Acknowledged, CommitReceipt, Comparison, LiveView, ManyBytes, Pages, ReadMany, ReadPages, Stats, Store,
    Ticket, UnloadedPages,
};
pub use tiers::{MoveStats, Prefetch, ReadAhead, TierStats};
pub use write::batch::{ByteSource, CreatePage, NewPage, PageChanges, PageRef, WorkingCopy, WriteBatch};
pub use write::commit::{Direction, Shadow};

use device::Device;
use device::host::HostDevice;
use device::multi::MultiDevice;
use disk::Disk;
use disk::dir::DirDisk;

impl Store {
    /// Opens the store in `directory`; creates it, with the directories above it, if the directory is missing
    /// or empty and [`Options::create`] allows it. This is the whole recovery: when it returns, every batch
    /// that was acknowledged at the level that survived the crash is there, and [`Store::recovered`] says
    /// what was done.
    ///
    /// # Errors
    /// [`Error::Locked`] if another process or handle has it open, [`Error::NoStore`],
    /// [`Error::ForeignDirectory`], [`Error::IdentityMismatch`], [`Error::LayoutMismatch`],
    /// [`Error::OverBudget`], [`Error::InvalidOption`], [`Error::DeviceUnavailable`]; [`Error::Damaged`] if
    /// bytes under a durable mark are not what they were; what the file system says.
    pub fn open(directory: impl AsRef<Path>, options: Options) -> Result<Self> {
        let device = device_of(&options)?;
        Self::open_on(Arc::new(DirDisk::new(directory)), device, options)
    }

    /// Opens a store as [`Store::open`] does, with pages on a device that the caller made: one whose memory
    /// comes from the caller's own source, several devices as one, or the caller's own implementation of
    /// [`Device`]. [`Options::device`] and [`Options::slots`] are not looked at.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use remanent::device::host::HostDevice;
    /// use remanent::{Options, Store};
    /// # let directory = tempfile::tempdir().unwrap();
    /// # let path = directory.path().join("mystore");
    /// let store = Store::open_with(&path, Arc::new(HostDevice::new()), Options::default())?;
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Store::open`].
    pub fn open_with(directory: impl AsRef<Path>, device: Arc<dyn Device>, options: Options) -> Result<Self> {
        Self::open_on(Arc::new(DirDisk::new(directory)), device, options)
    }

    /// Looks at the state of a store at an earlier point: read-only, without a device, without the writer's
    /// lock, beside a writer in this process or another one. Writes nothing. Pages are read when they are
    /// asked for. The state stays reachable while the handle lives.
    ///
    /// ```
    /// use remanent::{Options, Place, StatePoint, Store};
    /// # let directory = tempfile::tempdir().unwrap();
    /// # let path = directory.path().join("mystore");
    /// let store = Store::open(&path, Options::default())?;
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
    /// [`Error::NoStore`]; [`Error::NoSnapshot`], [`Error::NoSnapshotNamed`] and [`Error::OutsideWindow`] if
    /// there is no such state; [`Error::Damaged`] if neither a snapshot nor the log leads to it;
    /// [`Error::Overtaken`] if a writer removes it faster than it can be read.
    pub fn open_at(directory: impl AsRef<Path>, point: &StatePoint) -> Result<View> {
        View::open_on(&(Arc::new(DirDisk::held(directory)) as Arc<dyn Disk>), Some(point))
    }

    /// Looks at the newest state of a store, as [`Store::open_at`] does at an earlier one. Beside a writer
    /// that is the newest state at some moment during this call. It shows what is logged, which a power cut
    /// may still take.
    ///
    /// # Errors
    /// As for [`Store::open_at`].
    pub fn open_read_only(directory: impl AsRef<Path>) -> Result<View> {
        View::open_on(&(Arc::new(DirDisk::held(directory)) as Arc<dyn Disk>), None)
    }

    /// Says what [`Store::prune`] would remove of a store, whether it is open elsewhere or not: read-only,
    /// without a device, without the writer's lock. An open by itself removes what nothing needs, so that is
    /// listed, too; what a writer has under way is not. Images are not read.
    ///
    /// ```
    /// use remanent::{Options, Retention, SnapshotOptions, Store};
    /// # let directory = tempfile::tempdir().unwrap();
    /// # let path = directory.path().join("mystore");
    /// let store = Store::open(&path, Options::default())?;
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
    /// [`Error::NoStore`]; [`Error::Damaged`] if an open would fail; what the file system says.
    pub fn would_prune_at(directory: impl AsRef<Path>, retention: &Retention) -> Result<PruneReport> {
        Self::would_prune_on(&(Arc::new(DirDisk::new(directory)) as Arc<dyn Disk>), retention)
    }

    /// A store in a new temporary directory, which is removed when the store is dropped: for tests.
    ///
    /// # Errors
    /// As for [`Store::open`].
    pub fn temporary(options: Options) -> Result<Self> {
        let directory = tempfile::tempdir().map_err(|source| Error::Folder {
            action: "make",
            path: format!("a directory in {}", std::env::temp_dir().display()),
            source: Arc::new(source),
        })?;
        let device = device_of(&options)?;
        let disk = Arc::new(DirDisk::new(directory.path()));
        Self::open_keeping(disk, device, options, Some(Box::new(directory)))
    }
}

impl Follower {
    /// Follows the store in `directory`. Nothing is locked and nothing is written: a directory that can only
    /// be read will do, and the store may be open in this process or another one, or in none.
    ///
    /// # Errors
    /// [`Error::NoStore`]; [`Error::Overtaken`] if batches after `from` are not kept any more,
    /// [`Error::Diverged`] if a crash took the batch at `from`, or it is another store's; [`Error::Damaged`].
    pub fn open(directory: impl AsRef<Path>, from: FollowFrom) -> Result<Self> {
        Self::open_on(Arc::new(DirDisk::new(directory)), from)
    }
}

impl Replica {
    /// The state of the newest snapshot of the store in `directory`, with all its bytes; the empty store
    /// where there is no snapshot. A [`Follower`] from its position goes on from there.
    ///
    /// # Errors
    /// [`Error::NoStore`], [`Error::Damaged`]; what the file system says.
    pub fn from_snapshot(directory: impl AsRef<Path>) -> Result<Self> {
        let disk: Arc<dyn disk::Disk> = Arc::new(DirDisk::new(directory));
        Self::from_snapshot_on(&disk)
    }
}

impl Store {
    /// Makes a new store, with an id of its own, that begins at a state of this one. The directory must be
    /// missing or empty. Image files are shared by hard links where that can be; the pages that have no image
    /// of exactly that state are copied. Lsns, epochs and page ids go on from the state's.
    ///
    /// ```
    /// use remanent::{Options, Place, StatePoint, Store};
    /// # let directory = tempfile::tempdir().unwrap();
    /// # let (path, path_new) = (directory.path().join("mystore"), directory.path().join("trial"));
    /// let store = Store::open(&path, Options::default())?;
    /// let mut batch = store.batch();
    /// let page = batch.create(4, Place::Host).page();
    /// batch.write(page, 0, b"base");
    /// let base = store.commit(batch)?;
    /// store.fork(&path_new, &StatePoint::Lsn(base.position.lsn))?;
    ///
    /// let trial = Store::open(&path_new, Options::default())?;
    /// let mut bytes = [0; 4];
    /// trial.read(base.pages[0], 0, &mut bytes)?;
    /// assert_eq!((&bytes, trial.lsn()), (b"base", base.position.lsn));
    /// assert_ne!(trial.id(), store.id());
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Store::open_at`] and [`View::fork`].
    pub fn fork(&self, directory_new: impl AsRef<Path>, point: &StatePoint) -> Result<StoreId> {
        self.wait_durable(self.lsn())?;
        View::open_on(self.disk(), Some(point))?.fork(directory_new)
    }
}

impl Store {
    /// Makes a new store, with an id of its own, of a state that was put together outside of the engine, page
    /// by page; `read` fills a slice with a page's bytes from an offset on, and may be asked twice. This is
    /// the way in for salvage: the state of a store that does not open any more. A crash, or a failure of
    /// `read`, leaves no store in the directory.
    ///
    /// # Errors
    /// As for [`View::fork`]; what `read` fails with.
    #[doc(hidden)]
    pub fn create_at<E: From<Error>>(
        directory: impl AsRef<Path>,
        origin: &Seed,
        mut read: impl FnMut(&PageInfo, u64, &mut [u8]) -> Result<(), E>,
    ) -> Result<StoreId, E> {
        let disk: Arc<dyn Disk> = Arc::new(DirDisk::new(directory));
        history::seed::create_alone(origin, &disk, &mut read)
    }

    /// Refuses a directory in which [`Store::create_at`] would find something, before the work is done.
    ///
    /// # Errors
    /// [`Error::ForeignDirectory`]; what the file system says.
    #[doc(hidden)]
    pub fn check_create_at(directory: impl AsRef<Path>) -> Result<()> {
        history::seed::check_directory_is_free(&DirDisk::new(directory))
    }
}

impl DeviceCopier {
    /// Opens a device.
    ///
    /// # Errors
    /// [`Error::DeviceUnavailable`].
    pub fn open(device: DeviceChoice) -> Result<Self> {
        Ok(Self::open_on(device_for(device)?))
    }
}

impl View {
    /// Makes a new store, with an id of its own, that begins at this state: [`Store::fork`] for a store that
    /// is not open here. A crash at any point leaves no store in the directory, or the whole one.
    ///
    /// # Errors
    /// [`Error::ForeignDirectory`] if the directory holds anything, [`Error::Locked`]; [`Error::Damaged`],
    /// [`Error::Overtaken`] and [`Error::OutOfMemory`] in reading the state; [`Error::DiskFull`]; what the
    /// file system says.
    pub fn fork(&self, directory_new: impl AsRef<Path>) -> Result<StoreId> {
        self.fork_on(&(Arc::new(DirDisk::new(directory_new)) as Arc<dyn Disk>))
    }

    /// Makes a fork on any disk: the way in for tests, which bring simulated ones.
    ///
    /// # Errors
    /// As for [`View::fork`].
    #[doc(hidden)]
    pub fn fork_on(&self, disk: &Arc<dyn Disk>) -> Result<StoreId> {
        history::fork::fork(self.past()?, disk)
    }
}

/// The device for these options: one, or several as one.
fn device_of(options: &Options) -> Result<Arc<dyn Device>> {
    match &options.slots[..] {
        [] => device_for(options.device),
        slots => {
            let parts = slots.iter().map(|choice| device_for(*choice)).collect::<Result<_>>()?;
            Ok(Arc::new(MultiDevice::new(parts)))
        }
    }
}

/// The device for a choice.
fn device_for(choice: DeviceChoice) -> Result<Arc<dyn Device>> {
    match choice {
        DeviceChoice::Host => Ok(Arc::new(HostDevice::new())),
        DeviceChoice::Cuda(ordinal) => gpu(ordinal),
        DeviceChoice::Auto => match gpu(0) {
            // Whatever else goes wrong with a GPU that is there is no reason to do without it.
            Err(Error::DeviceUnavailable { reason, .. }) => {
                tracing::info!(reason, "no GPU: pages live in host memory");
                Ok(Arc::new(HostDevice::instead_of_a_gpu(reason)))
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
    Err(Error::DeviceUnavailable { device: format!("cuda:{ordinal}"), reason })
}

/// Handles are shared by threads, and what they give can be sent to others.
const _: () = {
    const fn shared<T: Send + Sync + ?Sized>() {}
    const fn sent<T: Send>() {}
    shared::<Store>();
    shared::<View>();
    shared::<DeviceCopier>();
    shared::<LiveView<'_>>();
    shared::<Lease<'_>>();
    shared::<Ticket>();
    shared::<Acknowledged>();
    shared::<ReadMany>();
    shared::<ManyBytes>();
    shared::<ChangeStream>();
    shared::<Replica>();
    shared::<FollowedBatch>();
    shared::<DeviceBytes>();
    shared::<CallerMemory>();
    shared::<StreamGuard>();
    shared::<Error>();
    shared::<Options>();
    sent::<Follower>();
    sent::<WriteBatch>();
    shared::<dyn ByteSource>();
    sent::<Pin<'_>>();
    sent::<Pages<'_>>();
};

/// The README's example, run as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
