//! The lock on what is kept: held by one who takes a snapshot, prunes or restores, for as long as that takes.
//!
//! A snapshot in the background may be written so slowly that it takes hours. A caller who waits for the lock has it
//! written at full speed ([`Pace`]); a caller who only asks what is kept does not wait ([`KeepingLock::latest`]).

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::{Keeping, SnapshotInfo};
use crate::base::pace::Pace;
use crate::base::sync::{Mutex, MutexGuard};

/// What is kept, behind its lock.
pub(crate) struct KeepingLock {
    keeping: Mutex<Keeping>,
    latest: Mutex<Arc<Latest>>,
    /// Of background snapshots.
    pace: Arc<Pace>,
}

/// What was kept when the lock was last given back.
pub(crate) struct Latest {
    pub keeping: Keeping,
    /// Image files and tables from this number on are being written, or were written since.
    pub next_file: u64,
}

impl Latest {
    fn of(keeping: &Keeping) -> Arc<Self> {
        let next_file = keeping.files.next_number();
        Arc::new(Self { keeping: keeping.copy(), next_file })
    }
}

impl KeepingLock {
    pub fn new(keeping: Keeping, pace: Arc<Pace>) -> Self {
        Self { latest: Mutex::new(Latest::of(&keeping)), keeping: Mutex::new(keeping), pace }
    }

    /// Waits for the lock, and has a snapshot in the background hurry meanwhile.
    pub fn lock(&self) -> KeepingGuard<'_> {
        let _hurry = self.pace.hurry();
        self.lock_patiently()
    }

    /// Waits for the lock, for who is in no hurry: threads in the background.
    pub fn lock_patiently(&self) -> KeepingGuard<'_> {
        KeepingGuard { keeping: self.keeping.lock(), latest: &self.latest, is_changed: false }
    }

    /// Tells what is kept by now, for who holds the lock and says next that something has ended.
    pub fn tell(&self, keeping: &Keeping) {
        *self.latest.lock() = Latest::of(keeping);
    }

    /// What was kept when the lock was last given back; waits for nothing.
    pub fn latest(&self) -> Arc<Latest> {
        self.latest.lock().clone()
    }

    /// The snapshots kept, oldest first; waits for nothing.
    pub fn list(&self) -> Vec<SnapshotInfo> {
        self.latest().keeping.snapshots.values().map(|kept| kept.info.clone()).collect()
    }
}

/// The lock, held.
pub(crate) struct KeepingGuard<'a> {
    keeping: MutexGuard<'a, Keeping>,
    latest: &'a Mutex<Arc<Latest>>,
    is_changed: bool,
}

impl Deref for KeepingGuard<'_> {
    type Target = Keeping;

    fn deref(&self) -> &Keeping {
        &self.keeping
    }
}

impl DerefMut for KeepingGuard<'_> {
    fn deref_mut(&mut self) -> &mut Keeping {
        self.is_changed = true;
        &mut self.keeping
    }
}

impl Drop for KeepingGuard<'_> {
    /// Before the lock is given back: who takes it next and is done sees what it did in what is told.
    fn drop(&mut self) {
        if self.is_changed {
            let latest = Latest::of(&self.keeping);
            let before = std::mem::replace(&mut *self.latest.lock(), latest);
            // Not while others wait for it.
            drop(before);
        }
    }
}
