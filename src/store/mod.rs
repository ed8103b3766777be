//! The store: what a caller holds.
//!
//! These files only put the parts together: [`crate::write::commit`], [`crate::snapshot`],
//! [`crate::history::restore`] and [`crate::recovery`] say how things work. `open` makes a store of them,
//! `batches` changes pages, `pages` looks them up, `bytes` reads them, `view` does both as of one batch,
//! `history` goes back, `scrub` looks after the disk, `stats` counts.

pub(crate) mod kernels;
mod batches;
mod bytes;
mod history;
mod open;
mod pages;
mod read_pages;
mod scrub;
mod stats;
mod ticket;
mod view;

use std::any::Any;
use std::sync::Arc;

use remanent_format::StoreId;

use crate::applier::{Applier, Leases};
use crate::base::poison::Poison;
use crate::base::process::ForkGuard;
use crate::device::Device;
use crate::disk::{Disk, DiskLock};
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::history::audit::Auditor;
use crate::log::Log;
use crate::memory::arena::Arena;
use crate::memory::staging::StagingPool;
use crate::options::{Ack, Options};
use crate::recovery::{PageLoader, RecoveryReport};
use crate::snapshot::{BackgroundSnapshots, Scrub, Scrubber, Snapshots};
use crate::versions::Versions;
use crate::write::commit::Committer;

pub use pages::UnloadedPages;
pub use read_pages::ReadPages;
pub use stats::Stats;
pub use ticket::{Acknowledged, CommitReceipt, Ticket};
pub use view::{LiveView, Pages};

/// A store directory, open for reading and writing: pages, root, log, snapshots.
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
    parts: ForkGuard<StoreParts>,
    id: StoreId,
    ack: Ack,
    recovered: RecoveryReport,
    /// Released last: until then no other process may open the directory.
    _lock: Box<dyn DiskLock>,
    /// A temporary directory lives as long as its store.
    _directory: ForkGuard<Option<Box<dyn Any + Send + Sync>>>,
}

struct StoreParts {
    committer: Committer,
    snapshots: Arc<Snapshots>,
    background: BackgroundSnapshots,
    scrub: Arc<Scrub>,
    scrubber: Scrubber,
    loader: PageLoader,
    options: Options,
    disk: Arc<dyn Disk>,
    device: Arc<dyn Device>,
    arena: Arc<Arena>,
    staging: Arc<StagingPool>,
    applier: Arc<Applier>,
    versions: Arc<Versions>,
    leases: Arc<Leases>,
    log: Arc<Log>,
    poison: Arc<Poison>,
}

impl Store {
    /// The store's identity, drawn at random when it was created.
    #[must_use]
    pub fn id(&self) -> StoreId {
        self.id
    }

    /// Where it lies.
    pub(crate) fn disk(&self) -> &Arc<dyn Disk> {
        &self.parts.disk
    }

    /// What looks whether memory is what the batches say.
    pub(crate) fn auditor(&self) -> Auditor<'_> {
        let StoreParts { disk, device, staging, applier, snapshots, .. } = &*self.parts;
        Auditor { disk, device, staging, applier, catalog: &snapshots.catalog }
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
        let StoreParts { poison, snapshots, options, .. } = &*self.parts;
        let poison = poison.clone();
        if options.snapshot_log_bytes.is_some() || options.snapshot_interval.is_some() {
            match snapshots.take_at_close() {
                Err(error) if error.is_passing() => tracing::warn!(%error, "no snapshot at the close"),
                // Every other failure has poisoned the store.
                _ => {}
            }
        }
        drop(self);
        poison.check()
    }

    /// A result for the caller: an error says which store it is about.
    fn in_store<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| error.in_store(&self.parts.disk.label()))
    }

    /// Threads do not survive a fork: in the child, nothing would answer. Comes first in every call: a lock
    /// may be held by a thread that is not there.
    pub(crate) fn check_process(&self) -> Result<()> {
        self.parts.check().map(drop)
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // In a forked child the parent's threads are not there, and the files are the parent's business.
        if self.parts.is_own() {
            self.parts.background.stop();
            self.parts.scrubber.stop();
            self.parts.snapshots.unverified.join();
            self.parts.loader.stop();
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
