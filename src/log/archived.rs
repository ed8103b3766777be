//! The progress of the archive, and the waits until batches are archived.
#![cfg_attr(
    not(feature = "archive"),
    expect(dead_code, reason = "without the feature, no store has an archive")
)]

use std::collections::{BTreeMap, BTreeSet};

use remanent_format::{Lsn, SnapshotId};

use crate::base::sync::{Condvar, Instant, Mutex};
use crate::base::wakers::Wakers;
use crate::error::{Error, Result};

/// Counters of the archive since the store was opened. Returned in [`Stats::archive`](crate::stats::Stats::archive).
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ArchiveStats {
    /// The newest archived batch. If the machine were lost now, all batches after it up to `Stats::durable`
    /// would be lost.
    pub archived: Lsn,
    /// The fencing term of this writer in the archive, or 0 before its fence was created.
    pub term: u64,
    /// The number of archived runs, each of which contains consecutive batches.
    pub runs: u64,
    /// The number of archived snapshots. Named snapshots are not counted.
    pub snapshots: u64,
    /// The number of named snapshots that the archive keeps.
    pub named: u64,
    /// The number of times that the archive fell behind the kept log and continued with a snapshot.
    pub gaps: u64,
    /// The number of failed attempts. Each failed attempt is retried.
    pub failures: u64,
    /// The last failure, or `None` if the last attempt succeeded.
    pub last_failure: Option<Error>,
}

/// The progress of the uploader, shared by the uploader, the tickets and the stats.
pub(crate) struct ArchiveProgress {
    state: Mutex<ProgressState>,
    /// Notifies threads that wait for batches.
    advanced: Condvar,
    /// Notifies the uploader.
    called: Condvar,
    wakers: Wakers,
}

#[derive(Default)]
struct ProgressState {
    archived: Lsn,
    /// The newest batch for which a caller waits.
    wanted: Lsn,
    must_stop: bool,
    /// The named snapshots that the archive keeps.
    named: BTreeSet<SnapshotId>,
    /// The named snapshots that cannot be archived.
    refused: BTreeMap<SnapshotId, Error>,
    /// Whether snapshots were taken, verified or removed since the uploader looked.
    are_snapshots_changed: bool,
    /// The error that ended the archive.
    ended_by: Option<Error>,
    stats: ArchiveStats,
}

impl ArchiveProgress {
    pub fn new() -> Self {
        Self {
            state: Mutex::default(),
            advanced: Condvar::new(),
            called: Condvar::new(),
            wakers: Wakers::default(),
        }
    }

    /// Returns true if batch `lsn` is archived.
    ///
    /// # Errors
    /// The error that ended the archive, if the batch is not archived.
    pub fn is_archived(&self, lsn: Lsn) -> Result<bool> {
        self.state.lock().is_archived(lsn)
    }

    /// Asks the uploader to archive batch `lsn` immediately. If the uploader waits for the log, the caller must
    /// also wake it.
    pub fn ask(&self, lsn: Lsn) {
        let mut state = self.state.lock();
        state.wanted = state.wanted.max(lsn);
        self.called.notify_all();
    }

    /// Waits until batch `lsn` is archived, or until the time `until`. Returns whether the batch is archived.
    ///
    /// # Errors
    /// The error that ended the archive.
    pub fn wait(&self, lsn: Lsn, until: Option<Instant>) -> Result<bool> {
        let mut state = self.state.lock();
        while !state.is_archived(lsn)? {
            match until {
                None => self.advanced.wait(&mut state),
                Some(until) => {
                    if self.advanced.wait_until(&mut state, until).timed_out() {
                        return state.is_archived(lsn);
                    }
                }
            }
        }
        Ok(true)
    }

    /// Waits until the archive keeps a named snapshot, the snapshot no longer `exists`, or the time `until`. Returns
    /// whether the archive keeps it.
    ///
    /// # Errors
    /// The error because of which the snapshot cannot be archived, or that ended the archive.
    pub fn wait_named(
        &self,
        snapshot: SnapshotId,
        until: Option<Instant>,
        exists: impl Fn() -> bool,
    ) -> Result<bool> {
        let mut state = self.state.lock();
        while !state.is_named_archived(snapshot)? && exists() {
            match until {
                None => self.advanced.wait(&mut state),
                Some(until) => {
                    if self.advanced.wait_until(&mut state, until).timed_out() {
                        break;
                    }
                }
            }
        }
        state.is_named_archived(snapshot)
    }

    /// Records that snapshots have changed, so that the uploader checks for named snapshots. Wakes the callers that
    /// wait for a named snapshot. Afterwards, the caller must wake the uploader if it waits for the log.
    pub fn note_snapshots(&self) {
        self.state.lock().are_snapshots_changed = true;
        self.called.notify_all();
        self.advanced.notify_all();
    }

    pub fn wakers(&self) -> &Wakers {
        &self.wakers
    }

    pub fn stats(&self) -> ArchiveStats {
        let state = self.state.lock();
        let (archived, named) = (state.archived, state.named.len() as u64);
        ArchiveStats { archived, named, ..state.stats.clone() }
    }
}

/// Methods for the uploader.
impl ArchiveProgress {
    /// Returns the newest batch for which a caller waits.
    pub fn wanted(&self) -> Lsn {
        self.state.lock().wanted
    }

    /// Clears the record that snapshots have changed. The uploader calls this before it checks for named snapshots.
    pub fn take_note_of_snapshots(&self) {
        self.state.lock().are_snapshots_changed = false;
    }

    /// Records the named snapshots that the archive keeps, and wakes the callers that wait for them.
    pub fn set_named(&self, named: impl Iterator<Item = SnapshotId>) {
        self.state.lock().named = named.collect();
        self.advanced.notify_all();
    }

    /// Records that a named snapshot cannot be archived, and wakes the callers that wait for it.
    pub fn refuse_named(&self, snapshot: SnapshotId, error: Error) {
        self.state.lock().refused.insert(snapshot, error);
        self.advanced.notify_all();
    }

    /// Returns true if a named snapshot cannot be archived.
    pub fn is_refused(&self, snapshot: SnapshotId) -> bool {
        self.state.lock().refused.contains_key(&snapshot)
    }

    pub fn must_stop(&self) -> bool {
        self.state.lock().must_stop
    }

    /// Returns whether the uploader has work to do even if the log proves no further batch durable.
    pub fn is_called(&self) -> bool {
        self.state.lock().is_called()
    }

    /// Waits until the time `until`, until a caller waits for a batch that is not archived, until snapshots change,
    /// or until the store closes.
    pub fn pause(&self, until: Instant) {
        let mut state = self.state.lock();
        while !state.is_called() {
            if self.called.wait_until(&mut state, until).timed_out() {
                return;
            }
        }
    }

    /// Waits until the time `until`, or until the store closes.
    pub fn pause_after_failure(&self, until: Instant) {
        let mut state = self.state.lock();
        while !state.must_stop {
            if self.called.wait_until(&mut state, until).timed_out() {
                return;
            }
        }
    }

    pub fn stop(&self) {
        self.state.lock().must_stop = true;
        self.called.notify_all();
    }

    /// Records that batches up to `lsn` are archived, and wakes the callers that wait for them.
    pub fn advance(&self, lsn: Lsn) {
        self.state.lock().archived = lsn;
        self.advanced.notify_all();
        self.wakers.wake(lsn);
    }

    /// Updates the counters with `change`.
    pub fn count(&self, change: impl FnOnce(&mut ArchiveStats)) {
        change(&mut self.state.lock().stats);
    }

    /// Records the error that ended the archive, and wakes all callers.
    pub fn end(&self, error: Error) {
        let mut state = self.state.lock();
        state.stats.last_failure.get_or_insert_with(|| error.clone());
        state.ended_by.get_or_insert(error);
        drop(state);
        self.advanced.notify_all();
        self.wakers.wake(Lsn(u64::MAX));
    }
}

impl ProgressState {
    fn is_archived(&self, lsn: Lsn) -> Result<bool> {
        match &self.ended_by {
            _ if self.archived >= lsn => Ok(true),
            Some(error) => Err(error.clone()),
            None => Ok(false),
        }
    }

    fn is_named_archived(&self, snapshot: SnapshotId) -> Result<bool> {
        match self.refused.get(&snapshot).or(self.ended_by.as_ref()) {
            _ if self.named.contains(&snapshot) => Ok(true),
            Some(error) => Err(error.clone()),
            None => Ok(false),
        }
    }

    fn is_called(&self) -> bool {
        self.must_stop || self.wanted > self.archived || self.are_snapshots_changed
    }
}
