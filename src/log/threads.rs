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
use super::writer::Log;
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
                    // The length is determined before the sync, which resets the byte count that it depends on.
                    let len = self.state.lock().upcoming_len();
                    self.or_fail(Self::sync);
                    self.prefault(len);
                    // Prefaulting follows the sync that is due, because it may also wait on a busy disk.
                }
                KeeperTask::Seal => self.or_fail(Self::seal),
                KeeperTask::Stop => break,
            }
        }
        // This is the last notification: threads and tasks that wait for progress must find out that there will be
        // none.
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
                // The log has failed, so no further batch becomes durable. Waiting threads must be notified: a thread
                // that checked the log just before the failure may have gone to sleep since, under this lock.
                if state.must_stop {
                    return KeeperTask::Stop;
                }
                self.notify_threads();
                drop(state);
                self.wake_tasks_of_failed();
                state = self.state.lock();
                // If the log was stopped in between, its notification was already sent.
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
            // A waiting committer begins its own sync. The deadline is for batches without a waiting committer.
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
                    self.put(&mut state, FrameKind::Seal, &payload, crc32fast::hash(&payload), false)?;
                    // A seal among unsynced frames covers only the durable ones, so it does not seal the log.
                    state.sealed = clean;
                    state.must_seal_now = false;
                    state.is_seal_missed = false;
                    state.stats.seals += 1;
                    break;
                }
                Room::AfterGrowth => {
                    // A seal that only ends a busy period must not use the reserve. Batches would follow it into the
                    // segment that it took from the reserve. On a full disk, slow commits used up the whole reserve
                    // that way.
                    let last = state.must_seal_now || state.must_stop;
                    drop(state);
                    match self.grow(&[], if last { SpacePurpose::Seal } else { SpacePurpose::User }) {
                        Ok(_) => {}
                        Err(error) if error.is_passing() => {
                            let mut state = self.state.lock();
                            // The seal is given up until the next batch. Otherwise the keeper would retry without a
                            // pause.
                            state.sealed = true;
                            state.is_seal_missed = !last;
                            if last {
                                state.must_seal_now = false;
                                state.seals_refused += 1;
                                state.seal_refusal = Some(error);
                            }
                            return Ok(());
                        }
                        Err(error) => return Err(error),
                    }
                }
                Room::AfterSync(_) => {
                    // The segment before the last one is not durable yet, so the seal waits like a batch.
                    drop(state);
                    self.sync()?;
                }
            }
        }
        self.sync()
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
                    // Space that is too small for a segment may suffice for the reserve.
                    let grown = self.grow(&[], SpacePurpose::User);
                    let reserve_full = self.pool.add_to_reserve();
                    state = self.state.lock();
                    state.reserve_full = matches!(reserve_full, Ok(true));
                    match grown.and(reserve_full) {
                        Ok(_) => state.grow_after = None,
                        // A committer that needs the segment now gets this error from its own attempt.
                        Err(error) if error.is_passing() => {
                            tracing::debug!(%error, "no empty segment was made; it is tried again later");
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
