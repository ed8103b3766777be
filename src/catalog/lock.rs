//! The lock on the catalog. A thread holds the lock for the duration of a snapshot, a prune or a restore.
//!
//! A rate-limited background snapshot may take hours. While a caller waits for the lock, the rate limit is suspended
//! ([`Pace`]). A caller that only reads the catalog does not wait ([`CatalogLock::latest`]).

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, OnceLock};

use super::{Catalog, SnapshotInfo};
use crate::base::fair_mutex::FairMutex;
use crate::base::pace::Pace;
use crate::base::sync::{Mutex, MutexGuard, Rank};

/// The catalog behind its lock, and a copy of the catalog for readers that must not wait for the lock.
pub(crate) struct CatalogLock {
    catalog: FairMutex<Catalog>,
    latest: Mutex<Arc<CatalogCopy>>,
    /// The rate limit of background snapshots, suspended while a caller waits for the lock.
    pace: Arc<Pace>,
    watcher: Watcher,
}

/// A function that is called whenever a copy of the catalog was published, or nothing. It must not lock the catalog.
type Watcher = OnceLock<Box<dyn Fn() + Send + Sync>>;

/// A copy of the catalog from the last release of the catalog's lock.
pub(crate) struct CatalogCopy {
    pub catalog: Catalog,
    /// The number of the next file at the time of the copy. Image files and tables with this number or a greater number
    /// may since have been written.
    pub next_file: u64,
}

impl CatalogCopy {
    fn of(catalog: &Catalog) -> Arc<Self> {
        let next_file = catalog.files.next_number();
        Arc::new(Self { catalog: catalog.copy(), next_file })
    }
}

impl CatalogLock {
    pub fn new(catalog: Catalog, pace: Arc<Pace>) -> Self {
        Self {
            latest: Mutex::new(CatalogCopy::of(&catalog)),
            catalog: FairMutex::of_rank([Rank::CATALOG_TURN, Rank::CATALOG], catalog),
            pace,
            watcher: OnceLock::new(),
        }
    }

    /// Calls `watcher` whenever a copy of the catalog was published. Only the first watcher counts.
    #[cfg(feature = "archive")]
    pub fn watch(&self, watcher: Box<dyn Fn() + Send + Sync>) {
        self.watcher.get_or_init(|| watcher);
    }

    /// Locks the catalog. While the caller waits, the rate limit of background snapshots is suspended.
    pub fn lock(&self) -> CatalogGuard<'_> {
        let _hurry = self.pace.expedite();
        self.lock_patiently()
    }

    /// Locks the catalog for a background thread. The rate limit of a background snapshot stays in force while the
    /// thread waits.
    pub fn lock_patiently(&self) -> CatalogGuard<'_> {
        let (latest, watcher) = (&self.latest, &self.watcher);
        CatalogGuard { catalog: self.catalog.lock(), latest, watcher, is_changed: false }
    }

    /// Publishes a copy of `catalog` before the lock is released. A lock holder calls this function before it reports
    /// the end of an operation.
    pub fn publish_copy(&self, catalog: &Catalog) {
        *self.latest.lock() = CatalogCopy::of(catalog);
        self.watcher.get().inspect(|watcher| watcher());
    }

    /// Returns the copy of the catalog that was made when the lock was last released, without waiting.
    pub fn latest(&self) -> Arc<CatalogCopy> {
        self.latest.lock().clone()
    }

    /// Returns the kept snapshots, oldest first, without waiting.
    pub fn list(&self) -> Vec<SnapshotInfo> {
        self.latest().catalog.snapshots.values().map(|kept| kept.info.clone()).collect()
    }
}

/// A guard of the catalog's lock.
pub(crate) struct CatalogGuard<'a> {
    catalog: MutexGuard<'a, Catalog>,
    latest: &'a Mutex<Arc<CatalogCopy>>,
    watcher: &'a Watcher,
    is_changed: bool,
}

impl Deref for CatalogGuard<'_> {
    type Target = Catalog;

    fn deref(&self) -> &Catalog {
        &self.catalog
    }
}

impl DerefMut for CatalogGuard<'_> {
    fn deref_mut(&mut self) -> &mut Catalog {
        self.is_changed = true;
        &mut self.catalog
    }
}

impl Drop for CatalogGuard<'_> {
    /// Publishes a copy of the changed catalog before the lock is released. A caller that locks the catalog afterwards
    /// and releases the lock therefore finds these changes in the copy.
    fn drop(&mut self) {
        if self.is_changed {
            let latest = CatalogCopy::of(&self.catalog);
            let before = std::mem::replace(&mut *self.latest.lock(), latest);
            // The previous copy is dropped after the locks are released, so that no reader waits for the drop.
            drop(before);
            self.watcher.get().inspect(|watcher| watcher());
        }
    }
}
