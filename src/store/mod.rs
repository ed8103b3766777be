//! The store: what a caller holds.
//!
//! These files only put the parts together: [`crate::write::commit`], [`crate::snapshot`],
//! [`crate::history::restore`] and [`crate::recovery`] say how things work. `open` makes a store of them,
//! `batches` changes pages, `pages` looks them up, `bytes` reads them, `read_many` reads many at once,
//! `device_reads` reads into memory of the device, `compare` compares them, `changes` tells what batches
//! change, `view` looks up and reads as of one batch, `history` goes back, `scrub` looks after the disk,
//! `unified` gives hints for unified memory, `stats` counts.

pub(crate) mod kernels;
mod batches;
mod bytes;
mod changes;
mod compare;
mod device_reads;
mod history;
#[cfg(feature = "metrics")]
mod metrics;
mod open;
mod pages;
mod read_many;
mod read_pages;
mod scrub;
mod stats;
mod ticket;
mod unified;
mod view;

use std::any::Any;
use std::path::PathBuf;
use std::sync::Arc;

use remanent_format::StoreId;

use crate::applier::Reads;
use crate::base::process::ForkGuard;
use crate::disk::{Disk, DiskLock};
use crate::engine::{Engine, RunningEngine};
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::history::audit::Auditor;
use crate::options::Options;
use crate::recovery::{PageLoader, RecoveryReport};
use crate::snapshot::{BackgroundSnapshots, Scrub, Scrubber, Snapshots};
use crate::tiers::{PageMover, PrefetchThread, TierThread};
use crate::write::commit::Committer;

pub use compare::Comparison;
pub use pages::UnloadedPages;
pub use read_many::{ManyBytes, ReadMany};
pub use read_pages::ReadPages;
pub use stats::Stats;
pub use ticket::{Acknowledged, CommitReceipt, Ticket};
pub use view::{LiveView, Pages};

/// A store directory, open for reading and writing: pages, root, log, snapshots.
///
/// A `tracing` subscriber sees spans for the long roads: `open` and `snapshot` (info), `sync` of the log
/// (debug) and `commit` (trace), each with the thread that is in it. Without a subscriber they cost a load
/// each.
///
/// One writer at a time; the handle is shared by threads by reference or in an `Arc`. Dropping it makes
/// everything durable and seals the log; [`Store::close`] does the same and reports errors.
///
/// ```
/// use remanent::{Key, Options, Place, Store};
/// let store = Store::temporary(Options::default())?;
/// let mut batch = store.batch();
/// let page = batch.create(4, Place::Host).key(Key::new("answer").unwrap()).page();
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
    /// Not dropped in a forked child: the parent's threads are not there, and the files are the parent's
    /// business.
    parts: ForkGuard<StoreParts>,
    recovered: RecoveryReport,
    /// Released last: until then no other process may open the directory.
    _lock: Box<dyn DiskLock>,
    /// A temporary directory lives as long as its store.
    _directory: ForkGuard<Option<Box<dyn Any + Send + Sync>>>,
}

/// The parts of an open store. The owners of threads are dropped in the order of the fields, so that no
/// thread outlives a thread that it waits for.
struct StoreParts {
    prefetcher: PrefetchThread,
    /// The thread that keeps places free, where there are tiers.
    _tiers: Option<TierThread>,
    mover: Arc<PageMover>,
    /// First: called off, a snapshot in the background lets go of the catalog, for which a scrub may wait.
    _background: BackgroundSnapshots,
    _scrubber: Scrubber,
    _loader: PageLoader,
    reads: Reads,
    /// After everything that gives turns to the applier.
    engine: RunningEngine,
    committer: Arc<Committer>,
    snapshots: Arc<Snapshots>,
    scrub: Arc<Scrub>,
    options: Options,
}

impl StoreParts {
    fn engine(&self) -> &Engine {
        &self.engine.0
    }
}

impl Store {
    /// The store's identity, drawn at random when it was created.
    #[must_use]
    pub fn id(&self) -> StoreId {
        self.engine().store
    }

    /// The store's directory, as an absolute path: where it is now, if it was moved since the store was
    /// opened. `None` for a store that lies in no file system.
    ///
    /// ```
    /// # let above = tempfile::tempdir().unwrap();
    /// # let above = above.path().canonicalize().unwrap();
    /// use remanent::{Options, Store};
    /// let store = Store::open(above.join("store"), Options::default())?;
    /// std::fs::rename(above.join("store"), above.join("moved")).unwrap();
    /// assert_eq!(store.directory()?, Some(above.join("moved")));
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::NoStore`](crate::Error::NoStore) if the directory was removed.
    pub fn directory(&self) -> Result<Option<PathBuf>> {
        self.check_process()?;
        self.disk().directory()
    }

    /// Where it lies.
    pub(crate) fn disk(&self) -> &Arc<dyn Disk> {
        &self.engine().disk
    }

    /// The parts that all roads share.
    pub(crate) fn engine(&self) -> &Engine {
        self.parts.engine()
    }

    /// What looks whether memory is what the batches say.
    pub(crate) fn auditor(&self) -> Auditor<'_> {
        Auditor { engine: self.engine(), catalog: &self.parts.snapshots.catalog }
    }

    /// What turns batches into commits.
    pub(crate) fn committer(&self) -> &Committer {
        &self.parts.committer
    }

    /// What this open found and did.
    #[must_use]
    pub fn recovered(&self) -> &RecoveryReport {
        &self.recovered
    }

    /// Makes everything durable, seals the log and releases the directory. If the log after the newest
    /// snapshot consists of more than 16 runs of the store, a snapshot is taken first, unless snapshots of
    /// the store's own accord are off.
    ///
    /// # Errors
    /// [`Error::Poisoned`] if the store failed, now or before. The directory is released all the same.
    pub fn close(self) -> Result<()> {
        self.check_process()?;
        let StoreParts { snapshots, options, .. } = &*self.parts;
        let poison = self.engine().poison.clone();
        if options.snapshot_log_bytes.is_some() || options.snapshot_interval.is_some() {
            // A failure that poisoned the store is told below.
            if let Err(error) = snapshots.take_at_close() {
                tracing::warn!(%error, "no snapshot at the close");
            }
        }
        drop(self);
        poison.check()
    }

    /// A result for the caller: an error says which store it is about.
    fn in_store<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| error.in_store(&self.disk().label()))
    }

    /// Threads do not survive a fork: in the child, nothing would answer. Comes first in every call: a lock
    /// may be held by a thread that is not there.
    pub(crate) fn check_process(&self) -> Result<()> {
        self.parts.check().map(drop)
    }
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store")
            .field("id", &self.id())
            .field("disk", &self.disk().label())
            .finish_non_exhaustive()
    }
}
