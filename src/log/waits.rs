//! Waits until batches are logged or durable.
//!
//! The keeper thread ([`super::threads`]) syncs when a sync is due. A waiting committer syncs earlier if no other
//! thread is syncing.
//!
//! Until a sync, the frames of a direct log are in the process's own memory. Therefore a batch of a direct log is
//! `Logged` only once it is `Durable` ([`Log::wait_logged`]).

use remanent_format::Lsn;
use remanent_format::frame::VerifiedSnapshot;

use super::state::LogState;
use super::sync_guard::SyncGuard;
use super::writer::Log;
use crate::base::sync::{Instant, MutexGuard};
use crate::error::Result;
use crate::options::LogIo;

impl Log {
    /// Waits until the appended batch `lsn` survives the death of the process.
    pub fn wait_logged(&self, lsn: Lsn) -> Result<()> {
        match self.io {
            // The frame is in the kernel's page cache, which outlives the process.
            LogIo::Mapped | LogIo::Buffered => Ok(()),
            // The frame is in the memory of the process until a sync covers it.
            LogIo::Direct => self.wait_durable(lsn),
        }
    }

    /// Waits like [`wait_logged`](Self::wait_logged), but leaves the sync to committers if possible. The applier thread
    /// calls this function.
    ///
    /// No committer waits for the applier, and copies made by the applier take CPU time from committers. Therefore, if
    /// a committer will sync, the applier leaves the sync to that committer, and is woken after all committers.
    pub fn wait_logged_last(&self, lsn: Lsn) -> Result<()> {
        if self.io != LogIo::Direct {
            return Ok(());
        }
        let mut state = self.state.lock();
        while state.durable < lsn {
            if state.is_syncing {
                // A failure of the log does not end this wait: a batch that the current sync makes durable is visible
                // to readers, and must be applied.
                self.progress.wait(&mut state);
                continue;
            }
            self.check()?;
            if state.waiters.has_next() {
                self.progress.wait(&mut state);
            } else if let Some(until) = state.more_until() {
                self.progress.wait_until(&mut state, until);
            } else {
                state = self.sync_all(state)?;
            }
        }
        Ok(())
    }

    /// Waits until the appended batch `lsn` survives a power cut.
    ///
    /// If no sync is running, the caller syncs every batch appended so far. A sync by another thread would cost two
    /// more context switches: with 4 KiB commits of 8 threads on two cores, a mapped log then reached 0.27 of the raw
    /// loop's commits instead of 0.73. If more committers are expected ([`super::group_commit`]), the last committer to
    /// arrive begins the sync.
    pub fn wait_durable(&self, lsn: Lsn) -> Result<()> {
        let mut state = self.state.lock();
        if state.durable >= lsn {
            return Ok(());
        }
        // The current sync covers batches up to its target. A later batch needs the next sync.
        if state.is_syncing && lsn <= state.sync_target {
            state.waiters.arrive_late();
        } else {
            state.waiters.arrive();
        }
        while state.durable < lsn {
            // After a failure, no sync ever covers this batch.
            self.check()?;
            // Computed in each iteration, because a sync that has begun since the last iteration may cover this batch.
            let round = state.syncs_begun + usize::from(lsn > state.sync_target);
            let synced = &self.synced[round % 2];
            if state.is_syncing {
                synced.wait(&mut state);
                continue;
            }
            // Only one committer waits with a timeout, because waking all of them would be useless.
            match state.more_until() {
                None => state = self.sync_all(state)?,
                Some(_) if state.waiters.is_watched => synced.wait(&mut state),
                Some(until) => {
                    state.waiters.is_watched = true;
                    synced.wait_until(&mut state, until);
                    state.waiters.is_watched = false;
                }
            }
        }
        Ok(())
    }

    /// Returns whether batch `lsn` survives the death of the process.
    ///
    /// # Errors
    /// The log's error, if the log has failed and the batch can no longer be logged.
    pub fn is_logged(&self, lsn: Lsn) -> Result<bool> {
        match self.io {
            LogIo::Mapped | LogIo::Buffered => Ok(true),
            LogIo::Direct => self.is_durable(lsn),
        }
    }

    /// Returns whether batch `lsn` survives a power cut.
    ///
    /// # Errors
    /// The log's error, if the log has failed and the batch can no longer become durable.
    pub fn is_durable(&self, lsn: Lsn) -> Result<bool> {
        if self.durable() >= lsn {
            return Ok(true);
        }
        self.check()?;
        Ok(false)
    }

    /// Waits until batch `lsn` is logged, or until the time `until`. Returns whether the batch is logged.
    pub fn wait_logged_until(&self, lsn: Lsn, until: Instant) -> Result<bool> {
        match self.io {
            LogIo::Mapped | LogIo::Buffered => Ok(true),
            LogIo::Direct => self.wait_durable_until(lsn, until),
        }
    }

    /// Waits until batch `lsn` is durable, or until the time `until`. Returns whether the batch is durable. The keeper
    /// runs the sync, because a caller that syncs could not stop at `until`.
    pub fn wait_durable_until(&self, lsn: Lsn, until: Instant) -> Result<bool> {
        self.ask_for_sync();
        let mut state = self.state.lock();
        while state.durable < lsn {
            self.check()?;
            if self.progress.wait_until(&mut state, until).timed_out() {
                return Ok(state.durable >= lsn);
            }
        }
        Ok(true)
    }

    /// Makes the keeper sync all logged frames immediately.
    pub fn ask_for_sync(&self) {
        let mut state = self.state.lock();
        if !state.dirty.is_empty() {
            state.is_sync_wanted = true;
            state.is_keeper_asleep = false;
            self.work.notify_one();
        }
    }

    /// Waits until a batch after `lsn` is proven durable, or `is_called` returns true. Another thread that
    /// changes the result of `is_called` must then call [`wake_archiver`](Self::wake_archiver).
    #[cfg(feature = "archive")]
    pub fn wait_proven_after(&self, lsn: Lsn, is_called: impl Fn() -> bool) {
        let mut state = self.state.lock();
        while state.proven <= lsn && !is_called() {
            self.progress.wait(&mut state);
        }
    }

    /// Wakes the threads in [`wait_proven_after`](Self::wait_proven_after).
    #[cfg(feature = "archive")]
    pub fn wake_archiver(&self) {
        // Acquiring the lock ensures that a thread that has just found no work already waits, and thus is
        // notified.
        drop(self.state.lock());
        self.progress.notify_all();
    }

    /// Makes batch `lsn` durable, and writes a seal that proves this unless a later frame already does. Returns
    /// the newest proven batch, which is older than `lsn` if there is no space for a seal.
    ///
    /// # Errors
    /// The log's error, if it has failed.
    #[cfg(feature = "archive")]
    pub fn prove(&self, lsn: Lsn) -> Result<Lsn> {
        self.sync_up_to(lsn)?;
        let mut state = self.state.lock();
        let refused = state.seals_refused;
        while state.proven < lsn && state.seals_refused == refused {
            self.check()?;
            state.must_seal_now = true;
            self.work.notify_one();
            self.progress.wait(&mut state);
        }
        Ok(state.proven)
    }

    /// Returns the newest proven batch.
    #[cfg(feature = "archive")]
    pub fn proven(&self) -> Lsn {
        self.state.lock().proven
    }

    /// Records `verified` snapshots in a seal, and waits until that seal is durable. The files that these snapshots
    /// supersede must not be removed earlier (I7). After a crash before the seal, an open would have no proof that the
    /// snapshots are intact.
    pub fn record_verified(&self, verified: Vec<VerifiedSnapshot>) -> Result<()> {
        let mut state = self.state.lock();
        state.verified = verified;
        // Every seal appended from now on names the new list. An earlier seal that is not synced yet may name the old
        // list.
        let (seals, refused) = (state.stats.seals, state.seals_refused);
        while state.seals_durable <= seals {
            self.check()?;
            // If the disk is full, the seal is abandoned, and the caller must keep the files that it wanted to remove.
            if state.seals_refused > refused
                && let Some(refusal) = &state.seal_refusal
            {
                return Err(refusal.clone());
            }
            state.must_seal_now = true;
            self.work.notify_one();
            self.progress.wait(&mut state);
        }
        Ok(())
    }

    /// Waits until batch `lsn` is durable, for a caller that holds the submission lock. The sync waits for no further
    /// committer, because no batch can be appended before the caller releases the lock.
    pub(super) fn sync_up_to(&self, lsn: Lsn) -> Result<()> {
        let mut state = self.state.lock();
        while state.durable < lsn {
            self.check()?;
            if state.is_syncing {
                self.progress.wait(&mut state);
            } else {
                state = self.sync_all(state)?;
            }
        }
        Ok(())
    }

    /// Makes all frames logged so far durable, unless another thread is syncing.
    fn sync_all<'a>(&'a self, mut state: MutexGuard<'a, LogState>) -> Result<MutexGuard<'a, LogState>> {
        // The lock is released during the sync, so that committers append the next group.
        let Some(syncing) = SyncGuard::begin(self, &mut state) else { return Ok(state) };
        drop(state);
        syncing.sync()?;
        Ok(self.state.lock())
    }
}
