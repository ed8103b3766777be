//! Appending to the log, and waiting until it is durable.
//!
//! A batch is `Logged` when [`Log::append`] returns: its frame and all before it are whole in the mapping or
//! in the kernel's page cache, which outlive the process. It is `Durable` when its group is synced. The
//! keeper ([`super::threads`]) syncs when a sync is due; a committer that waits syncs earlier if no other
//! thread does.
//!
//! The frames of a direct log lie in the process's own memory until a sync. So it says `Logged` only when it
//! can say `Durable` ([`Log::wait_logged`]).
//!
//! The frames of one group follow each other. A sync closes the group, and the next frame starts on a new
//! 4096-byte boundary, so that nothing synced is written again (I5): a power cut in the middle of such a
//! write could take what was already durable.
//!
//! A device or a snapshot may poison the store while the log is sound. Then no batch is taken any more, but
//! everything that was logged is still synced and sealed. Only a failure of the log's own writes and syncs
//! ends that.
//!
//! Lock order: the store's submission lock, then `growth`, then `state`. The keeper takes no submission lock,
//! so a committer that waits for a sync cannot block it.

use std::sync::Arc;

use remanent_format::frame::{FrameHeader, FrameKind, VerifiedSnapshot, frame_len};
use remanent_format::limits::GROUP_ALIGN;
use remanent_format::segment::SEGMENT_HEADER_BLOCK;
use remanent_format::{FileName, LogPoint, Lsn, StoreId};

use super::segments::{SegmentPool, SpacePurpose};
use super::state::{DirtyRange, EMPTY_COUNT, LogStart, LogState, LogStats, Room, live};
use crate::base::own_line::OwnLine;
use crate::base::phases;
use crate::base::phases::Phase;
use crate::base::poison::Poison;
use crate::base::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::base::sync::thread::JoinHandle;
use crate::base::sync::threads;
use crate::base::sync::{Condvar, Instant, Mutex, MutexGuard};
use crate::base::wakers::Wakers;
use crate::disk::DiskFile;
use crate::error::{Error, Result};
use crate::options::LogIo;

/// The log of an open store.
pub(crate) struct Log {
    store: StoreId,
    io: LogIo,
    pub pool: Arc<SegmentPool>,
    pub(super) poison: Arc<Poison>,
    /// Whether a frame could not be written or synced, or a segment not be made: nothing more becomes
    /// durable. The store is poisoned before this is set, so that a thread which sees the flag finds the
    /// reason.
    pub(super) failed: AtomicBool,
    pub(super) state: OwnLine<Mutex<LogState>>,
    /// The newest logged batch, where a batch is appended before it is logged: in a direct log.
    logged: Option<Arc<AtomicU64>>,
    /// Held while segments are made, which takes syncs; `state` stays free meanwhile, so that frames which
    /// have room are appended.
    growth: Mutex<()>,
    /// Tells the keeper that something is due.
    pub(super) work: Condvar,
    /// Tells that `durable`, `seals_durable` or `failed` changed.
    pub(super) progress: Condvar,
    /// Tasks that wait for batches to be durable.
    wakers: Wakers,
    /// Tell committers that their batches are durable. In turn, one serves the committers of the sync under
    /// way, the other those of the next sync. A committer of the next sync is woken before all others,
    /// because it begins that sync. Where it was woken last, each of 8 threads waited for half a sync more.
    synced: [Condvar; 2],
    /// Tells the maker that something is to be made.
    pub(super) room: Condvar,
    /// Tells the watcher that the log is as long as it waits for.
    pub(super) grown: Condvar,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Log {
    /// Takes over the log where recovery left it, and starts the keeper and the maker.
    pub fn start(
        store: StoreId,
        io: LogIo,
        pool: Arc<SegmentPool>,
        poison: Arc<Poison>,
        start: LogStart,
    ) -> Result<Arc<Self>> {
        let logged = (io == LogIo::Direct).then(|| Arc::new(AtomicU64::new(start.point.lsn.0)));
        let log = Arc::new(Self {
            store,
            io,
            logged,
            pool,
            poison,
            failed: AtomicBool::new(false),
            state: OwnLine(Mutex::new(LogState::new(start))),
            growth: Mutex::new(()),
            work: Condvar::new(),
            progress: Condvar::new(),
            wakers: Wakers::default(),
            synced: [Condvar::new(), Condvar::new()],
            room: Condvar::new(),
            grown: Condvar::new(),
            threads: Mutex::default(),
        });
        let started = log
            .spawn("remanent-keeper", Self::keep)
            .and_then(|()| log.spawn("remanent-maker", Self::keep_segments_ready));
        if started.is_err() {
            // A thread that did start must not go on with a log that the caller never gets.
            log.stop();
        }
        started.map(|()| log)
    }

    fn spawn(self: &Arc<Self>, name: &str, life: impl FnOnce(&Self) + Send + 'static) -> Result<()> {
        let log = self.clone();
        let thread = threads::start(name, move || {
            // A thread that panics poisons the store, so that no committer waits for it for ever.
            let _heard_of = LogThreadGuard(&log);
            life(&log);
        });
        let thread = thread.map_err(|error| Error::thread("one of the log's threads", error))?;
        self.threads.lock().push(thread);
        Ok(())
    }

    /// Appends a batch; it is `Logged` when this returns, unless the log is direct. Callers come one at a
    /// time, in the order of their batches. If there is no space, nothing happened; any other failure
    /// poisons.
    ///
    /// Payload and checksum are in hand before the batch gets its Lsn (I1), so a failure to encode one leaves
    /// no gap in the Lsns.
    pub fn append(&self, payload: &[u8], payload_crc: u32, purpose: SpacePurpose) -> Result<LogPoint> {
        let _phase = phases::enter(Phase::Commit);
        let frame_len = frame_len(payload.len() as u64);
        let mut leaves_enough = false;
        let mut state = loop {
            let mut state = self.state.lock();
            // Inside the loop: the store may have been poisoned while this thread made a segment or waited
            // for a sync.
            self.poison.check()?;
            match state.room_for(frame_len) {
                room @ (Room::Ready | Room::NextSegment) => {
                    let rolls = room == Room::NextSegment;
                    let (number, empty) = (state.current.number, state.empty.len() - usize::from(rolls));
                    if leaves_enough || self.pool.leaves_enough(empty, purpose) {
                        if rolls {
                            state.roll();
                        }
                        break state;
                    }
                    // On a full disk the next open comes first: the log grows by a segment with each opening
                    // that commits something. Looked at once, because a `hold` that found space leaves
                    // filling the reserve to the maker.
                    drop(state);
                    let kept = self.pool.keep_back(number, empty, purpose);
                    kept.map_err(|error| self.unless_passing(error))?;
                    leaves_enough = true;
                }
                Room::AfterGrowth => {
                    drop(state);
                    self.grow(frame_len, purpose)?;
                }
                Room::AfterSync(lsn) => {
                    drop(state);
                    self.sync_up_to(lsn)?;
                }
            }
        };
        let point = self.put(&mut state, FrameKind::Batch, payload, payload_crc)?;
        let now = state.last_append;
        let is_to_tell = self.io == LogIo::Mapped && state.ends_silence(now);
        // A wake-up is a system call, so the keeper is woken only out of a sleep without an end. A keeper
        // that has yet to seal looks again in time for this frame.
        if state.dirty_since.is_none() {
            state.dirty_since = Some(state.last_append);
        }
        // Only the frame that crosses the bound wakes the keeper; the frames after it would call it in vain.
        let much = state.sync_after_bytes();
        let is_much = state.dirty_bytes >= much && state.dirty_bytes - frame_len < much;
        if std::mem::take(&mut state.keeper_asleep) || is_much {
            self.work.notify_one();
        }
        if state.watch.is_reached(state.point.lsn, state.replay_bytes()) {
            self.grown.notify_one();
        }
        drop(state);
        if is_to_tell {
            self.pool.tell_followers(point.segment);
        }
        Ok(point)
    }

    /// Waits until batch `lsn`, which was appended, survives the death of the process.
    pub fn wait_logged(&self, lsn: Lsn) -> Result<()> {
        match self.io {
            // The kernel's page cache has the frame, and outlives the process.
            LogIo::Mapped | LogIo::Buffered => Ok(()),
            // The frame lies in the memory of the process until a sync takes it.
            LogIo::Direct => self.wait_durable(lsn),
        }
    }

    /// As [`wait_logged`](Self::wait_logged), for the applier.
    ///
    /// No committer waits for the applier, and the copies that it makes take processor time from them. So
    /// where a committer will sync, the applier leaves the sync to it, and is woken after all committers.
    pub fn wait_logged_last(&self, lsn: Lsn) -> Result<()> {
        if self.io != LogIo::Direct {
            return Ok(());
        }
        let mut state = self.state.lock();
        while state.durable < lsn {
            if state.syncing {
                // Also where the log has failed meanwhile: a batch that this sync makes durable is visible to
                // readers, and must be applied.
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

    /// Waits until batch `lsn`, which was appended, survives a power cut.
    ///
    /// If no sync is running, the caller syncs for every batch appended so far. Handing the sync to another
    /// thread would cost two more context switches: with 4 KiB commits of 8 threads on two cores, a mapped
    /// log then made 0.27 of the raw loop's commits instead of 0.73. Where more committers are expected
    /// ([`super::group_commit`]), the last one to come begins the sync.
    pub fn wait_durable(&self, lsn: Lsn) -> Result<()> {
        let mut state = self.state.lock();
        if state.durable >= lsn {
            return Ok(());
        }
        // The sync under way took the bytes of batches up to its target; a later batch needs the next sync.
        if state.syncing && lsn <= state.sync_target {
            state.waiters.come_late();
        } else {
            state.waiters.come();
        }
        while state.durable < lsn {
            // First in the loop: after a failure no sync will ever reach this batch.
            self.check()?;
            // Anew in each turn: a sync that began meanwhile may have taken this batch.
            let round = state.syncs_begun + usize::from(lsn > state.sync_target);
            let synced = &self.synced[round % 2];
            if state.syncing {
                synced.wait(&mut state);
                continue;
            }
            // One committer watches the clock for all that wait; a wake-up for each would be in vain.
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

    /// Whether batch `lsn` survives the death of the process. An error says that it never will.
    pub fn is_logged(&self, lsn: Lsn) -> Result<bool> {
        match self.io {
            LogIo::Mapped | LogIo::Buffered => Ok(true),
            LogIo::Direct => self.is_durable(lsn),
        }
    }

    /// Whether batch `lsn` survives a power cut. An error says that it never will.
    pub fn is_durable(&self, lsn: Lsn) -> Result<bool> {
        if self.durable() >= lsn {
            return Ok(true);
        }
        self.check()?;
        Ok(false)
    }

    /// As [`wait_logged`](Self::wait_logged), up to a time; whether the batch is logged then.
    pub fn wait_logged_until(&self, lsn: Lsn, until: Instant) -> Result<bool> {
        match self.io {
            LogIo::Mapped | LogIo::Buffered => Ok(true),
            LogIo::Direct => self.wait_durable_until(lsn, until),
        }
    }

    /// As [`wait_durable`](Self::wait_durable), up to a time; whether the batch is durable then. The keeper
    /// syncs: a sync cannot be given up halfway.
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

    /// Lets the keeper make durable what was logged so far, at once and not when it is due.
    pub fn ask_for_sync(&self) {
        let mut state = self.state.lock();
        if !state.dirty.is_empty() {
            state.sync_wanted = true;
            state.keeper_asleep = false;
            self.work.notify_one();
        }
    }

    /// The tasks that wait for batches to be durable.
    pub fn wakers(&self) -> &Wakers {
        &self.wakers
    }

    /// As [`wait_durable`](Self::wait_durable), for the holder of the submission lock. It waits for no
    /// further committer, because none can append before it gives the lock back.
    fn sync_up_to(&self, lsn: Lsn) -> Result<()> {
        let mut state = self.state.lock();
        while state.durable < lsn {
            self.check()?;
            if state.syncing {
                self.progress.wait(&mut state);
            } else {
                state = self.sync_all(state)?;
            }
        }
        Ok(())
    }

    /// Makes durable everything that was logged so far, unless another thread is syncing.
    fn sync_all<'a>(&'a self, mut state: MutexGuard<'a, LogState>) -> Result<MutexGuard<'a, LogState>> {
        // Without the lock: committers append the next group while this one is written.
        let Some(syncing) = SyncGuard::begin(self, &mut state) else { return Ok(state) };
        drop(state);
        syncing.sync()?;
        Ok(self.state.lock())
    }

    /// Records these snapshots as verified in a seal, and waits until that seal is durable. Only then may
    /// anything go that they replace (I7): a crash in between would leave an open without proof that they
    /// hold.
    pub fn record_verified(&self, verified: Vec<VerifiedSnapshot>) -> Result<()> {
        let mut state = self.state.lock();
        state.verified = verified;
        // Every seal appended from now on names the new list. One that is not synced yet may name the old
        // one.
        let (seals, refused) = (state.stats.seals, state.seals_refused);
        while state.seals_durable <= seals {
            self.check()?;
            // A full disk costs the record, and the caller learns of it now: it keeps what it wanted to
            // remove.
            if state.seals_refused > refused
                && let Some(refusal) = &state.seal_refusal
            {
                return Err(refusal.clone());
            }
            state.seal_now = true;
            self.work.notify_one();
            self.progress.wait(&mut state);
        }
        Ok(())
    }

    /// The newest logged batch; it only rises. `None` where each batch is logged once it is
    /// appended.
    pub fn logged_lsn(&self) -> Option<Arc<AtomicU64>> {
        self.logged.clone()
    }

    /// The newest durable batch.
    pub fn durable(&self) -> Lsn {
        self.state.lock().durable
    }

    /// The segment that takes frames.
    pub fn current_segment(&self) -> u64 {
        self.state.lock().current.number
    }

    /// Counts of what the log has done since it was opened.
    pub fn stats(&self) -> LogStats {
        self.state.lock().stats
    }

    /// Makes a small file of a spare, unless the next open needs it ([`SegmentPool::make_small`]).
    pub fn make_small(
        &self,
        temporary: FileName,
        len: u64,
        purpose: SpacePurpose,
    ) -> Result<Option<Arc<dyn DiskFile>>> {
        let empty = self.state.lock().empty.len();
        self.pool.make_small(temporary, len, empty, purpose)
    }

    /// Gives up a spare so that a small file finds space, unless the next open needs it. Returns whether it
    /// did.
    pub fn release_one(&self, purpose: SpacePurpose) -> Result<bool> {
        let empty = self.state.lock().empty.len();
        self.pool.release_one(empty, purpose)
    }

    /// Makes everything durable, seals, and ends the threads. Threads that were not started are no error,
    /// because a start that failed half way calls this as well.
    pub fn stop(&self) {
        // The keeper ends only after it has synced and sealed: marks cover all of a log that was closed (I4).
        self.state.lock().stop = true;
        self.work.notify_one();
        self.room.notify_one();
        for thread in self.threads.lock().drain(..) {
            if thread.join().is_err() {
                tracing::error!("one of the log's threads panicked");
            }
        }
    }

    /// Makes segments until two are ready, and the first of them is long enough.
    pub(super) fn grow(&self, frame_len: u64, purpose: SpacePurpose) -> Result<()> {
        let _one_maker = self.growth.lock();
        loop {
            let (count, next) = {
                let state = self.state.lock();
                (state.empty.len(), state.empty.back().map_or(state.current.number, |last| last.number) + 1)
            };
            if count >= EMPTY_COUNT {
                break;
            }
            let made = self.pool.make(next, count, purpose);
            let made = made.map_err(|error| self.unless_passing(error))?;
            // The lock was not held while the segment was made. Only a thread with `growth` appends to the
            // list, so the number is still the next one.
            let mut state = self.state.lock();
            let last = state.empty.back().map_or(state.current.number, |last| last.number);
            assert!(made.number == last + 1); // I8: the walk finds the segment by its number.
            state.empty.push_back(live(made));
            // The reserve grows with the segments, so it may be too short now.
            state.reserve_full = false;
            self.room.notify_one();
        }
        // The short segment leaves the list while it is replaced, so that no thread rolls into it: with fewer
        // than two ready none does. A seal that the keeper had put there would be lost with the file that the
        // rename replaces. The next open then found a broken chain under a mark and refused the store, in
        // three of four runs of the kill suite.
        let short = {
            let mut state = self.state.lock();
            let next = state.empty.front();
            let too_short = next.is_some_and(|next| SEGMENT_HEADER_BLOCK + frame_len > next.len);
            if too_short { state.empty.pop_front() } else { None }
        };
        if let Some(short) = short {
            let made = self
                .pool
                .with_surplus(|| self.pool.make_long(short.number, frame_len, EMPTY_COUNT - 1, purpose));
            let (next, result) = match made {
                Ok(long) => (live(long), Ok(())),
                // Where the error passes, the rename did not happen: the short segment has its name still,
                // and takes shorter frames.
                Err(error) => (short, Err(self.unless_passing(error))),
            };
            self.state.lock().empty.push_front(next);
            return result;
        }
        Ok(())
    }

    /// Ends the log for an error in making a segment, unless the error passes. A full disk and a shortage
    /// pass: the file that was built has no name yet, or is empty and is made once more. After any other
    /// error the folder's state is not known.
    fn unless_passing(&self, error: Error) -> Error {
        if error.is_passing() { error } else { self.fail(error) }
    }

    /// Puts a frame where there is room for it, and advances the log's state by it. The caller has asked
    /// [`LogState::room_for`] under the same lock.
    pub(super) fn put(
        &self,
        state: &mut LogState,
        kind: FrameKind,
        payload: &[u8],
        payload_crc: u32,
    ) -> Result<LogPoint> {
        let offset = state.next_offset();
        let lsn = match kind {
            FrameKind::Batch => state.point.lsn.next(),
            FrameKind::Seal => state.point.lsn,
        };
        let header = FrameHeader {
            kind,
            group_start: !state.group_open,
            incarnation: state.point.incarnation,
            store: self.store,
            segment: state.current.number,
            offset,
            lsn,
            durable: state.durable,
            payload_len: u32::try_from(payload.len()).expect("payloads are at most 1 GiB"),
            payload_crc,
            chain_prev: state.chain,
        };
        assert!(state.durable <= lsn); // I4: a mark is never above the end of the log.
        assert!(!header.group_start || offset.is_multiple_of(GROUP_ALIGN)); // I5: in no synced block.
        assert!(header.end() <= state.current.len); // I3: a frame lies within its segment.
        let (bytes, chain) = header.encode();
        // The payload first: a kill in between leaves no header, so no reader takes the payload for a frame.
        let header_len = bytes.len() as u64;
        let window = &state.current.window;
        let written = window.put(offset + header_len, payload).and_then(|()| window.put(offset, &bytes));
        // A failed put may have stored a part of the frame. The log ends here, because a second try would
        // write over bytes in an unknown state.
        written.map_err(|error| self.fail(error))?;

        let end = header.end();
        // Ranges of one segment join, so that a sync takes one call for each segment.
        match state.dirty.last_mut() {
            Some(dirty) if Arc::ptr_eq(&dirty.window, window) => dirty.to = end,
            _ => state.dirty.push(DirtyRange { window: window.clone(), from: offset, to: end }),
        }
        state.dirty_bytes += end - offset;
        state.stats.bytes += end - offset;
        state.group_open = true;
        state.chain = chain;
        state.offset = end;
        state.last_append = Instant::now();
        // Any frame, a seal as well, may have been the first of its segment, which needs another empty one.
        if state.empty.len() < EMPTY_COUNT {
            self.room.notify_one();
        }
        // A seal takes no Lsn and moves no point: the next frame names its chain hash all the same.
        if kind == FrameKind::Batch {
            state.sealed = false;
            state.stats.batches += 1;
            state.point = LogPoint {
                incarnation: header.incarnation,
                lsn,
                segment: header.segment,
                offset: end,
                chain,
            };
        }
        Ok(state.point)
    }

    /// Returns the log's error if it has failed.
    pub(super) fn check(&self) -> Result<()> {
        if self.failed.load(Ordering::Acquire) { self.poison.check() } else { Ok(()) }
    }

    /// Ends the log. Returns the error that every caller gets from now on, which may be an earlier one.
    pub(super) fn fail(&self, error: Error) -> Error {
        let error = self.poison.set(error);
        self.failed.store(true, Ordering::Release);
        // A thread that found the log sound and is about to wait does so under the lock. By the time the
        // keeper has looked, under the same lock, that thread waits, and the keeper wakes it.
        self.work.notify_one();
        self.notify_all();
        error
    }

    /// Wakes all threads that wait for progress.
    pub(super) fn notify_all(&self) {
        self.progress.notify_all();
        self.synced.iter().for_each(Condvar::notify_all);
        if self.failed.load(Ordering::Acquire) {
            self.wakers.wake(Lsn(u64::MAX));
        }
    }
}

/// The right to sync, which one thread has at a time. Two syncs at once could end in the wrong order, and the
/// mark would go back (I4).
pub(super) struct SyncGuard<'a> {
    log: &'a Log,
    dirty: Vec<DirtyRange>,
    /// The newest batch among the frames that are synced.
    target: Lsn,
    /// Number of seals that were appended by then.
    seals: u64,
}

impl<'a> SyncGuard<'a> {
    /// Takes everything that was logged so far; frames logged from here on form the next group. `None` while
    /// another thread syncs.
    pub fn begin(log: &'a Log, state: &mut LogState) -> Option<Self> {
        if std::mem::replace(&mut state.syncing, true) {
            return None;
        }
        state.group_open = false;
        state.dirty_bytes = 0;
        state.dirty_since = None;
        state.sync_wanted = false;
        state.sync_target = state.point.lsn;
        state.syncs_begun += 1;
        state.waiters.begin(Instant::now());
        let dirty = std::mem::take(&mut state.dirty);
        Some(Self { log, dirty, target: state.point.lsn, seals: state.stats.seals })
    }

    /// Makes the taken frames durable.
    ///
    /// # Errors
    /// The system's error. The log has failed then, for good: the system may have dropped the bytes that it
    /// could not write, and would report success next time.
    pub fn sync(self) -> Result<()> {
        self.make_durable().map_err(|error| self.log.fail(error))
    }

    fn make_durable(&self) -> Result<()> {
        let _phase = phases::enter(Phase::GroupSync);
        let _span = tracing::debug_span!("sync", lsn = self.target.0).entered();
        for range in &self.dirty {
            range.window.sync(range.from, range.to - range.from)?;
        }
        // The mark advances only now: a frame that carried it earlier would turn a torn tail into damage
        // (I4).
        let mut state = self.log.state.lock();
        assert!(self.target >= state.durable); // I4: the mark only rises.
        assert!(self.target <= state.point.lsn); // I4: the mark covers only what was appended.
        state.durable = self.target;
        if let Some(logged) = &self.log.logged {
            // Under the lock, so that a caller that finds the batch durable finds it logged.
            logged.store(self.target.0, Ordering::Release);
        }
        state.seals_durable = self.seals;
        while state.left_behind.front().is_some_and(|(_, last)| *last <= self.target) {
            state.left_behind.pop_front();
        }
        state.stats.syncs += 1;
        Ok(())
    }
}

impl Drop for SyncGuard<'_> {
    /// Wakes every thread that waits for this sync: its batch is durable, or the log has failed, or it begins
    /// the next sync.
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.log.fail(Error::panicked("a thread that syncs the log"));
        }
        // The right is given back before the threads are woken, so that the first of them can begin the next
        // sync.
        let mut state = self.log.state.lock();
        state.syncing = false;
        if std::mem::take(&mut state.keeper_asleep) {
            // The keeper slept because there was nothing to sync and nothing to seal. There may be something
            // by now.
            self.log.work.notify_one();
        }
        let durable = state.durable;
        let round = state.syncs_begun;
        let served = state.waiters.end(Instant::now());
        drop(state);
        // The committers of the next sync first: one of them begins it while the others wake up.
        self.log.synced[(round + 1) % 2].notify_one();
        let synced = &self.log.synced[round % 2];
        // One by one. After a call to all at once, each thread is woken by the one before it when that
        // releases the lock, and 8 threads on 2 cores made a fifth fewer commits of 4 KiB.
        (0..served).for_each(|_| synced.notify_one());
        // At most one more is left: it waits for the sync after the next and was called instead of another.
        synced.notify_all();
        self.log.progress.notify_all();
        self.log.wakers.wake(durable);
    }
}

/// Watches one of the log's threads for as long as it lives. If the thread panics, the log fails, because no
/// caller may wait for it.
struct LogThreadGuard<'a>(&'a Log);

impl Drop for LogThreadGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail(Error::panicked("one of the log's threads"));
        }
    }
}
