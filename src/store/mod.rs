//! The public handle of an open store.
//!
//! The modules below only connect the components. The modules `write::commit`, `snapshot`, `history::restore` and
//! `recovery` describe how the components work.
//!
//! | module | contents |
//! |---|---|
//! | `open` | assembles a store from its parts |
//! | `batches` | commits batches and moves pages |
//! | `pages` | looks pages up, leases them and pins them |
//! | `bytes` | reads the bytes of one page |
//! | `read_many` | reads many ranges in one call |
//! | `device_reads` | reads into device memory |
//! | `read_pages` | the trait of all types from which pages can be read |
//! | `compare` | compares two pages |
//! | `agreement` | compares the pages of several ranks' stores |
//! | `changes` | reports the changes of each batch |
//! | `view` | looks up and reads pages in their state after one batch |
//! | `history` | takes, verifies, prunes and restores snapshots |
//! | `kernels` | device memory and working copies for the caller's kernels; audits |
//! | `scrub` | finds and repairs damage on disk |
//! | `unified` | hints for unified memory |
//! | `ticket` | waits for a submitted batch |
//! | `stats`, `metrics` | counters and sizes |

#[cfg(feature = "nccl")]
pub(crate) mod agreement;
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
pub(crate) mod stats;
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
use crate::recovery::PageLoader;
use crate::snapshot::{BackgroundSnapshots, Scrub, Scrubber, Snapshots};
use crate::tiers::{PageMover, PrefetchThread, TierThread};
use crate::write::commit::Committer;

pub use compare::Comparison;
pub use pages::UnloadedPages;
pub use read_many::{ManyBytes, ReadMany};
pub use read_pages::ReadPages;
pub use ticket::{Acknowledged, CommitReceipt, Ticket};
pub use view::{LiveView, Pages};

pub use remanent_format::SharedMetadata;

pub use crate::applier::descriptor::{MemoryDescriptor, MemoryKind};
#[cfg(feature = "nccl")]
pub use crate::recovery::GatherReport;
pub use crate::recovery::RecoveryReport;

/// A store directory that is open for reading and writing: its pages, root, log and snapshots.
///
/// A store has one writer at a time. Threads share the handle by reference or in an `Arc`. Dropping the store
/// makes every batch durable and seals the log; [`Store::close`] does the same and returns errors.
///
/// ```
/// use remanent::{Key, Place, Store};
/// let store = Store::temporary()?;
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
///
/// # Tracing
///
/// A `tracing` subscriber receives spans for the long operations, each from the thread that runs it: `open`
/// and `snapshot` (info), `sync` of the log (debug) and `commit` (trace). Without a subscriber a span costs
/// one load.
pub struct Store {
    /// The parts of the store. In a forked child, the guard does not drop them, because the parent's threads do not
    /// exist and the files belong to the parent.
    parts: ForkGuard<StoreParts>,
    recovered: RecoveryReport,
    /// The lock on the directory. This field is dropped last, so that no other process can open the directory earlier.
    _lock: Box<dyn DiskLock>,
    /// The directory of a temporary store, or `None`. The directory is removed on drop.
    _directory: ForkGuard<Option<Box<dyn Any + Send + Sync>>>,
}

/// The parts of an open store. Fields that own threads are declared in drop order, so that no thread outlives another
/// thread for which it waits.
struct StoreParts {
    /// The thread that archives the store, or `None`. It is dropped first, because it makes the last batches durable
    /// and takes snapshots.
    #[cfg(feature = "archive")]
    _archiver: Option<crate::archive::Archiver>,
    /// The threads that fetch pages from the archive after a restore on demand, or `None`. They are dropped before the
    /// threads that wait for pages.
    #[cfg(feature = "archive")]
    _fetcher: Option<crate::archive::FetchThreads>,
    prefetcher: PrefetchThread,
    /// The thread that evicts pages from full tiers, or `None` if the store has no tiers.
    _tiers: Option<TierThread>,
    mover: Arc<PageMover>,
    /// The thread of background snapshots. This thread is dropped before the scrubber, because canceling a background
    /// snapshot releases the catalog lock, which a scrub may be waiting for.
    _background: BackgroundSnapshots,
    _scrubber: Scrubber,
    _loader: PageLoader,
    reads: Reads,
    /// The engine, dropped after every part whose threads run closures on the applier.
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
    /// Returns the store's identity, a random number chosen when the store was created.
    #[must_use]
    pub fn id(&self) -> StoreId {
        self.engine().store
    }

    /// Returns the absolute path of the store's directory. If the directory was moved since the store was
    /// opened, this is its current path. Returns `None` for a store that is not in a file system.
    ///
    /// ```
    /// # let above = tempfile::tempdir().unwrap();
    /// # let above = above.path().canonicalize().unwrap();
    /// use remanent::Store;
    /// let store = Store::open(above.join("store"))?;
    /// std::fs::rename(above.join("store"), above.join("moved")).unwrap();
    /// assert_eq!(store.directory()?, Some(above.join("moved")));
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::NoStore`] if the directory was removed.
    pub fn directory(&self) -> Result<Option<PathBuf>> {
        self.check_process()?;
        self.disk().directory()
    }

    pub(crate) fn disk(&self) -> &Arc<dyn Disk> {
        &self.engine().disk
    }

    pub(crate) fn engine(&self) -> &Engine {
        self.parts.engine()
    }

    pub(crate) fn auditor(&self) -> Auditor<'_> {
        Auditor { engine: self.engine(), catalog: &self.parts.snapshots.catalog }
    }

    pub(crate) fn committer(&self) -> &Committer {
        &self.parts.committer
    }

    /// Returns a report of the findings and actions of recovery when this store was opened.
    #[must_use]
    pub fn recovered(&self) -> &RecoveryReport {
        &self.recovered
    }

    /// Makes every batch durable, seals the log, frees the space that only an open store needs, and releases the
    /// directory.
    ///
    /// Unless the disk is nearly full, a closed store occupies at most 1.1 times the bytes of the images and the log
    /// that its [`Retention`](crate::Retention) keeps, plus 256 KiB. A failure to free space is reported only as a
    /// `tracing` event.
    ///
    /// A store with an archive first archives its last batches, for at most 30 seconds, unless a request fails.
    ///
    /// If the log after the newest snapshot spans more than 16 incarnations, and automatic snapshots are enabled, a
    /// snapshot is taken first.
    ///
    /// # Errors
    /// [`Error::Poisoned`] if the store has failed, now or earlier. The directory is released in any case.
    pub fn close(self) -> Result<()> {
        self.check_process()?;
        let StoreParts { snapshots, options, .. } = &*self.parts;
        let poison = self.engine().poison.clone();
        if options.snapshots.is_enabled() {
            // A failure that poisoned the store is returned at the end of this function.
            if let Err(error) = snapshots.take_at_close() {
                tracing::warn!(%error, "cannot take a snapshot at close");
            }
        }
        drop(self);
        poison.check()
    }

    /// Adds the store's label to the error of `result`, before the error is returned to the caller.
    fn in_store<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| error.in_store(&self.disk().label()))
    }

    /// Returns an error in a forked child, where the store's threads do not exist. Every call checks this before it
    /// takes a lock, because a thread of the parent may have held that lock at the fork.
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
