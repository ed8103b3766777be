//! The lock on the catalog: held for as long as a snapshot, a prune or a restore takes.
//!
//! A snapshot in the background may be written slowly enough to take hours. A caller that waits for the lock
//! has it written at full speed ([`Pace`]). A caller that only asks what is kept does not wait
//! ([`CatalogLock::latest`]).

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::{Catalog, SnapshotInfo};
use crate::base::fair_mutex::FairMutex;
use crate::base::pace::Pace;
use crate::base::sync::{Mutex, MutexGuard};

/// The catalog behind its lock, and a copy that needs no wait.
pub(crate) struct CatalogLock {
    catalog: FairMutex<Catalog>,
    latest: Mutex<Arc<CatalogCopy>>,
    /// The pace of background snapshots.
    pace: Arc<Pace>,
}

/// The catalog as it was when the lock was last given back.
pub(crate) struct CatalogCopy {
    pub catalog: Catalog,
    /// Image files and tables from this number on are being written, or were written after the copy was made.
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
        Self { latest: Mutex::new(CatalogCopy::of(&catalog)), catalog: FairMutex::new(catalog), pace }
    }

    /// Waits for the lock, and makes a snapshot in the background hurry meanwhile.
    pub fn lock(&self) -> CatalogGuard<'_> {
        let _hurry = self.pace.hurry();
        self.lock_patiently()
    }

    /// Waits for the lock without hurry, for threads in the background.
    pub fn lock_patiently(&self) -> CatalogGuard<'_> {
        CatalogGuard { catalog: self.catalog.lock(), latest: &self.latest, is_changed: false }
    }

    /// Publishes the catalog as it is now. For a lock holder that then reports that something has ended.
    pub fn tell(&self, catalog: &Catalog) {
        *self.latest.lock() = CatalogCopy::of(catalog);
    }

    /// The catalog as it was when the lock was last given back; waits for nothing.
    pub fn latest(&self) -> Arc<CatalogCopy> {
        self.latest.lock().clone()
    }

    /// The snapshots kept, oldest first; waits for nothing.
    pub fn list(&self) -> Vec<SnapshotInfo> {
        self.latest().catalog.snapshots.values().map(|kept| kept.info.clone()).collect()
    }
}

/// The lock on the catalog, held.
pub(crate) struct CatalogGuard<'a> {
    catalog: MutexGuard<'a, Catalog>,
    latest: &'a Mutex<Arc<CatalogCopy>>,
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
    /// Publishes a copy before the lock is given back: a caller that takes the lock next and is done finds
    /// the changes of this one in the copy.
    fn drop(&mut self) {
        if self.is_changed {
            let latest = CatalogCopy::of(&self.catalog);
            let before = std::mem::replace(&mut *self.latest.lock(), latest);
            // Dropped last, so that no reader waits for it.
            drop(before);
        }
    }
}
