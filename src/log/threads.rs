//! The log's two threads: the keeper, which syncs and seals, and the maker, which makes segments
//! ahead. Two, because making one takes syncs of its own, and a frame must not wait for them longer than it
//! was promised.

use std::time::Duration;

use remanent_format::frame::{FrameKind, encode_seal, frame_len};

use super::segments::SpacePurpose;
use super::state::{AHEAD, Room};
use super::writer::{Log, SyncGuard};
use crate::base::sync::Instant;
use crate::error::Result;

/// A frame is synced at the latest this long after it was logged.
const SYNC_AFTER: Duration = Duration::from_millis(10);
/// A busy period ends when nothing came for this long; then a seal says that all of it is durable.
const SEAL_AFTER: Duration = Duration::from_millis(10);
/// How long the maker leaves a full disk alone, or a system that is short of something.
const GROW_AGAIN_AFTER: Duration = Duration::from_millis(500);

impl Log {
    /// The keeper's life.
    pub fn keep(&self) {
        loop {
            match self.next_duty() {
                Duty::Sync => {
                    let len = self.state.lock().upcoming_len();
                    self.or_fail(Self::sync);
                    self.prefault(len);
                }
                Duty::Seal => self.or_fail(Self::seal),
                Duty::Stop => break,
            }
        }
        self.notify_all();
    }

    fn or_fail(&self, duty: impl Fn(&Self) -> Result<()>) {
        if let Err(error) = duty(self) {
            self.fail(error);
        }
        self.progress.notify_all();
    }

    /// Waits for something to do.
    fn next_duty(&self) -> Duty {
        let mut state = self.state.lock();
        loop {
            if self.check().is_err() {
                if state.stop {
                    return Duty::Stop;
                }
                self.notify_all();
                self.work.wait(&mut state);
                continue;
            }
            state.keeper_asleep = false;
            let now = Instant::now();
            let sync_at = state.dirty_since.map(|since| since + SYNC_AFTER);
            if state.seal_now {
                return Duty::Seal;
            }
            let is_much = state.dirty_bytes >= state.sync_after_bytes();
            let due = state.stop || state.sync_wanted || is_much || sync_at.is_some_and(|at| at <= now);
            if !state.dirty.is_empty() && due {
                return Duty::Sync;
            }
            let unsealed = !state.sealed || (state.stop && state.seal_missed);
            let idle = state.dirty.is_empty() && !state.syncing && unsealed;
            let seal_at = idle.then(|| state.last_append + SEAL_AFTER);
            if seal_at.is_some_and(|at| at <= now || state.stop) {
                return Duty::Seal;
            }
            if state.stop {
                return Duty::Stop;
            }
            match [sync_at, seal_at].into_iter().flatten().min() {
                Some(at) => {
                    self.work.wait_until(&mut state, at);
                }
                None => {
                    state.keeper_asleep = true;
                    self.work.wait(&mut state);
                }
            }
        }
    }

    /// Brings the memory of the next frames in, so that who commits need not wait for it: beside a snapshot that
    /// keeps the disk busy, a first store into a page took 2 to 4 ms at times, and with this 0.2. A segment that is
    /// recycled meanwhile loses nothing: no byte is changed. It comes behind the sync that is due: on a busy disk this
    /// may wait, too.
    fn prefault(&self, len: u64) {
        let upcoming = self.state.lock().upcoming(len);
        for place in upcoming {
            place.window.prefault(place.from, place.len);
        }
    }

    /// Makes durable what was logged so far.
    fn sync(&self) -> Result<()> {
        let mut state = self.state.lock();
        while !state.dirty.is_empty() || state.syncing {
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

    /// Appends a seal and syncs it. The seal of an idle log says that everything is durable; a batch that
    /// came in between goes first, and the seal gets another turn. A seal that records snapshots cannot wait
    /// for a pause that may never come: it says what is durable so far. A disk too full for a seal, or a shortage,
    /// costs the seal, nothing else: the batches before it are durable, only the log does not say so yet.
    fn seal(&self) -> Result<()> {
        loop {
            let mut state = self.state.lock();
            let clean = state.dirty.is_empty() && !state.syncing;
            if !clean && !state.seal_now {
                break;
            }
            let payload = encode_seal(&state.verified);
            match state.room_for(frame_len(payload.len() as u64)) {
                Room::Ready => {
                    self.put(&mut state, FrameKind::Seal, &payload, crc32fast::hash(&payload))?;
                    state.sealed = clean;
                    state.seal_now = false;
                    state.seal_missed = false;
                    state.stats.seals += 1;
                    break;
                }
                Room::AfterGrowth => {
                    // A seal that only ends a busy period leaves the reserve alone: batches would follow it into
                    // the segment that it took from there.
                    let last = state.seal_now || state.stop;
                    drop(state);
                    match self.grow(0, if last { SpacePurpose::Seal } else { SpacePurpose::User }) {
                        Ok(()) => {}
                        Err(error) if error.is_passing() => {
                            let mut state = self.state.lock();
                            state.sealed = true;
                            state.seal_missed = !last;
                            if last {
                                state.seal_now = false;
                                state.seals_refused += 1;
                                state.seal_refusal = Some(error);
                            }
                            return Ok(());
                        }
                        Err(error) => return Err(error),
                    }
                }
                Room::AfterSync(_) => {
                    drop(state);
                    self.sync()?;
                }
            }
        }
        self.sync()
    }

    /// The maker's life.
    pub fn stay_ahead(&self) {
        let mut state = self.state.lock();
        while !state.stop {
            let lacking = state.ahead.len() < AHEAD || !state.reserve_full;
            match state.grow_after {
                _ if !lacking || self.poison.check().is_err() => self.room.wait(&mut state),
                Some(at) if at > Instant::now() => {
                    self.room.wait_until(&mut state, at);
                }
                _ => {
                    drop(state);
                    // Space that is too little for a segment may do for the reserve.
                    let grown = self.grow(0, SpacePurpose::User);
                    let reserve_full = self.pool.add_to_reserve();
                    state = self.state.lock();
                    state.reserve_full = matches!(reserve_full, Ok(true));
                    match grown.and(reserve_full) {
                        Ok(_) => state.grow_after = None,
                        // Whoever needs the segment now will be told.
                        Err(error) if error.is_passing() => {
                            tracing::debug!(%error, "no segment was made ahead; it is tried again later");
                            state.grow_after = Some(Instant::now() + GROW_AGAIN_AFTER);
                        }
                        Err(error) => drop(self.fail(error)),
                    }
                }
            }
        }
    }
}

enum Duty {
    Sync,
    Seal,
    Stop,
}
