//! The log's two threads: the keeper, which syncs and seals, and the maker, which creates empty segments.
//!
//! Creating segments has its own thread because it requires syncs. A frame must be synced at most [`SYNC_AFTER`] after
//! it was logged, and filling the reserve takes longer than that.
//!
//! A crash here loses only frames that were not acknowledged as durable. A segment that is being created is a temporary
//! file, which the next open removes.

use std::time::Duration;

use remanent_format::frame::{FrameKind, encode_seal, frame_len};

use super::segments::SpacePurpose;
use super::state::{EMPTY_COUNT, Room};
use super::sync_guard::SyncGuard;
use super::writer::{Log, PayloadStored};
use crate::base::sync::Instant;
use crate::error::Result;

/// The maximum time from logging a frame until the keeper syncs it, if no committer syncs earlier.
const SYNC_AFTER: Duration = Duration::from_millis(10);
/// The time without appends after which the keeper writes a seal. The seal records that all frames are durable.
const SEAL_AFTER: Duration = Duration::from_millis(10);
/// The time that the maker waits after a full disk or another shortage. An immediate retry would only compete for CPU
/// time with the thread that frees space.
const GROW_AGAIN_AFTER: Duration = Duration::from_millis(500);

impl Log {
    /// Runs the keeper thread until the log stops. The keeper syncs when a sync is due, and seals an idle log.
    pub fn keep(&self) {
        loop {
            match self.next_task() {
                KeeperTask::Sync => {
                    // The length is determined before the sync, which resets the count of unsynced bytes from which it
                    // is computed.
                    let len = self.state.lock().upcoming_len();
                    self.or_fail(Self::sync);
                    self.prefault(len);
                    // The sync is due and therefore comes first. Prefaulting may also wait for a busy disk.
                }
                KeeperTask::Seal => self.or_fail(Self::seal),
                KeeperTask::Stop => break,
            }
        }
        // The keeper ends here, so threads and tasks that wait for progress are woken for the last time.
        self.notify_threads();
        self.wake_tasks_of_failed();
    }

    fn or_fail(&self, duty: impl Fn(&Self) -> Result<()>) {
        if let Err(error) = duty(self) {
            self.fail(error);
        }
        self.progress.notify_all();
    }

    /// Waits until a sync or a seal is due or the log stops, and returns the task to perform.
    fn next_task(&self) -> KeeperTask {
        let mut state = self.state.lock();
        loop {
            if self.check().is_err() {
                // The log has failed, so no more batches become durable. Waiting threads are woken under this lock.
                // Otherwise a thread that checked the log just before the failure could sleep forever.
                if state.must_stop {
                    return KeeperTask::Stop;
                }
                self.notify_threads();
                drop(state);
                self.wake_tasks_of_failed();
                state = self.state.lock();
                // If the log was stopped while the lock was released, the notification was sent before this wait, and
                // must not be waited for.
                if !state.must_stop {
                    self.work.wait(&mut state);
                }
                continue;
            }
            // The flag is set only before an indefinite sleep. An append that finds it unset saves the system call of a
            // notification.
            state.is_keeper_asleep = false;
            let now = Instant::now();
            let sync_at = state.dirty_since.map(|since| since + SYNC_AFTER);
            // A seal that records a snapshot has priority and waits for no pause, because a steady stream of commits
            // would otherwise keep the snapshot from completing.
            if state.must_seal_now {
                return KeeperTask::Seal;
            }
            let is_much = state.dirty_bytes >= state.sync_after_bytes();
            // A committer that waits for its batch syncs by itself. The deadline matters for batches that no committer
            // waits for.
            let due =
                state.must_stop || state.is_sync_wanted || is_much || sync_at.is_some_and(|at| at <= now);
            if !state.dirty.is_empty() && due {
                return KeeperTask::Sync;
            }
            // I4: after a seal, durable marks cover every acknowledged batch. Without the seal, bit rot in the last
            // group of an idle log would look like a torn tail.
            let unsealed = !state.sealed || (state.must_stop && state.is_seal_missed);
            let idle = state.dirty.is_empty() && !state.is_syncing && unsealed;
            let seal_at = idle.then(|| state.last_append + SEAL_AFTER);
            if seal_at.is_some_and(|at| at <= now || state.must_stop) {
                return KeeperTask::Seal;
            }
            if state.must_stop {
                return KeeperTask::Stop;
            }
            match [sync_at, seal_at].into_iter().flatten().min() {
                Some(at) => {
                    self.work.wait_until(&mut state, at);
                }
                None => {
                    state.is_keeper_asleep = true;
                    self.work.wait(&mut state);
                }
            }
        }
    }

    /// Prefaults the memory of the next `len` bytes of frames, so that no committer waits for page faults. While a
    /// snapshot kept the disk busy, a first store into a page sometimes took 2 to 4 ms without prefaulting, and 0.2 ms
    /// with it. Prefaulting changes no byte, so a segment may be recycled concurrently.
    fn prefault(&self, len: u64) {
        let upcoming = self.state.lock().upcoming(len);
        for range in upcoming {
            range.window.prefault(range.from, range.len);
        }
    }

    /// Makes all frames logged so far durable.
    fn sync(&self) -> Result<()> {
        let mut state = self.state.lock();
        // Another thread's sync may have begun before the newest frame, so the keeper checks again after that sync.
        while !state.dirty.is_empty() || state.is_syncing {
            self.check()?;
            match SyncGuard::begin(self, &mut state) {
                Some(syncing) => {
                    drop(state);
                    return syncing.sync();
                }
                None => self.progress.wait(&mut state),
            }
        }
        Ok(())
    }

    /// Appends a seal and syncs it.
    ///
    /// The seal of an idle log states that all batches are durable (I4). If a batch arrives before the seal is
    /// appended, the batch is synced first, and the seal is retried later. A seal that records snapshots does not wait
    /// for an idle log, because the log may never be idle. Such a seal states which batches are durable so far.
    ///
    /// If the disk is too full for a seal, or the system is short of a resource, only the seal is lost. The batches
    /// before the seal are durable, but the log does not record that yet.
    fn seal(&self) -> Result<()> {
        loop {
            let mut state = self.state.lock();
            let clean = state.dirty.is_empty() && !state.is_syncing;
            if !clean && !state.must_seal_now {
                break;
            }
            // Encoded under the lock, so that a list recorded concurrently is in this seal or the next one.
            let payload = encode_seal(&state.verified);
            match state.room_for(frame_len(payload.len() as u64)) {
                room @ (Room::Ready | Room::NextSegment) => {
                    if room == Room::NextSegment {
                        state.roll();
                    }
                    let payload_crc = crc32fast::hash(&payload);
                    self.put(&mut state, FrameKind::Seal, &payload, payload_crc, PayloadStored::ByPut)?;
                    // A seal among unsynced frames covers only the durable ones, so it does not seal the log.
                    state.sealed = clean;
                    state.must_seal_now = false;
                    state.is_seal_missed = false;
                    state.stats.seals += 1;
                    break;
                }
                Room::AfterGrowth => {
                    // A seal that only marks the end of a busy period must not use reserved segments. On a full disk,
                    // each slow commit would otherwise be followed by a seal in a reserved segment, until none is left.
                    let is_last = state.must_seal_now || state.must_stop;
                    drop(state);
                    if !self.grow_for_seal(if is_last { SpacePurpose::Seal } else { SpacePurpose::User })? {
                        return Ok(());
                    }
                }
                Room::AfterSync(_) => {
                    // An earlier segment is not durable yet. The seal waits for it, as a batch would.
                    drop(state);
                    self.sync()?;
                }
            }
        }
        self.sync()
    }

    /// Creates segments for a seal. Returns whether the seal has room now. Otherwise the seal is abandoned.
    fn grow_for_seal(&self, purpose: SpacePurpose) -> Result<bool> {
        match self.grow(&[], purpose) {
            Ok(_) => Ok(true),
            Err(error) if error.is_passing() => {
                let is_last = purpose == SpacePurpose::Seal;
                let mut state = self.state.lock();
                // No seal is attempted until the next batch. Otherwise the keeper would retry without a pause.
                state.sealed = true;
                state.is_seal_missed = !is_last;
                if is_last {
                    state.must_seal_now = false;
                    state.seals_refused += 1;
                    state.seal_refusal = Some(error);
                }
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Runs the maker thread until the log stops. The maker keeps two empty segments ready and the reserve full.
    pub fn keep_segments_ready(&self) {
        let mut state = self.state.lock();
        while !state.must_stop {
            let lacking = state.empty.len() < EMPTY_COUNT || !state.reserve_full;
            match state.grow_after {
                // No segments are created for a poisoned store, which accepts no more batches.
                _ if !lacking || self.poison.check().is_err() => self.room.wait(&mut state),
                Some(at) if at > Instant::now() => {
                    self.room.wait_until(&mut state, at);
                }
                _ => {
                    drop(state);
                    // If the space is too short for a segment, it may still suffice for the reserve.
                    let grown = self.grow(&[], SpacePurpose::User);
                    let reserve_full = self.pool.add_to_reserve();
                    state = self.state.lock();
                    state.reserve_full = matches!(reserve_full, Ok(true));
                    match grown.and(reserve_full) {
                        Ok(_) => state.grow_after = None,
                        // If a committer needs the segment now, its own attempt returns this error.
                        Err(error) if error.is_passing() => {
                            tracing::debug!(%error, "cannot create an empty segment; will retry");
                            state.grow_after = Some(Instant::now() + GROW_AGAIN_AFTER);
                        }
                        Err(error) => drop(self.fail(error)),
                    }
                }
            }
        }
    }
}

/// The next task of the keeper thread, chosen under the state lock and performed without the lock.
enum KeeperTask {
    Sync,
    Seal,
    Stop,
}
