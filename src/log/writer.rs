//! Appending to the log, and waiting until it is durable.
//!
//! A batch is `Logged` when [`Log::append`] returns: its frame and all before it are whole in the mapping
//! or in the kernel's page cache, which outlive the process. It is `Durable` when its group is synced: by the
//! keeper ([`super::threads`]) when it is due, or by the first who waits for it, while nobody else syncs. A
//! direct log's frames lie in the process's own memory until then: it says `Logged` only when it can say
//! `Durable` ([`Log::wait_logged`]). Frames of one group follow each other; a sync closes the group, and the
//! next frame starts on a new 4096-byte boundary, so that nothing synced is written again (I5).
//!
//! The store may be poisoned while the log is sound, by a device or by a snapshot: then no batch is taken
//! any more, but what was logged is still synced and sealed. Only a failure of the log's own writes and
//! syncs ends that.
//!
//! Lock order: the store's submission lock, then `growth`, then `state`. The keeper takes no submission
//! lock, so a committer that waits for a sync cannot block it.

use std::sync::Arc;

use remanent_format::frame::{FrameHeader, FrameKind, VerifiedSnapshot, frame_len};
use remanent_format::segment::SEGMENT_HEADER_BLOCK;
use remanent_format::{LogPoint, Lsn, StoreId};

use super::segments::{SegmentPool, SpacePurpose};
use super::state::{AHEAD, DirtyRange, LogStart, LogState, LogStats, Room, live};
use crate::base::phases;
use crate::base::phases::Phase;
use crate::base::poison::Poison;
use crate::base::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::base::sync::thread::JoinHandle;
use crate::base::sync::threads;
use crate::base::sync::{Condvar, Instant, Mutex, MutexGuard};
use crate::error::{Error, Result};
use crate::options::LogIo;

/// The log of an open store.
pub(crate) struct Log {
    store: StoreId,
    io: LogIo,
    pub pool: Arc<SegmentPool>,
    pub(super) poison: Arc<Poison>,
    /// Whether a frame could not be written or synced, or a segment not be made: nothing more becomes
    /// durable. The store is poisoned before this is set.
    pub(super) failed: AtomicBool,
    pub(super) state: Mutex<LogState>,
    /// The newest logged batch, where a batch is appended before it is logged: with a direct log.
    logged: Option<Arc<AtomicU64>>,
    /// Held while segments are made, which takes syncs; `state` stays free meanwhile.
    growth: Mutex<()>,
    /// Something for the keeper to do.
    pub(super) work: Condvar,
    /// `durable`, `seals` or `failed` changed.
    pub(super) progress: Condvar,
    /// The same, for who waits for a batch to be durable: in turn for those whom the sync under way will serve, and
    /// for those whom the next one will. One of the latter is woken before all of the former, for it begins that
    /// sync: where it came last, each of 8 threads waited for half a sync more.
    synced: [Condvar; 2],
    /// Something for the maker to do.
    pub(super) room: Condvar,
    /// The log is as long as the watcher waits for.
    pub(super) grown: Condvar,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Log {
    /// Takes over the log where recovery left it, and starts the keeper.
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
            state: Mutex::new(LogState::new(start)),
            growth: Mutex::new(()),
            work: Condvar::new(),
            progress: Condvar::new(),
            synced: [Condvar::new(), Condvar::new()],
            room: Condvar::new(),
            grown: Condvar::new(),
            threads: Mutex::default(),
        });
        let started = log
            .spawn("remanent-keeper", Self::keep)
            .and_then(|()| log.spawn("remanent-maker", Self::stay_ahead));
        if started.is_err() {
            log.stop();
        }
        started.map(|()| log)
    }

    fn spawn(self: &Arc<Self>, name: &str, life: impl FnOnce(&Self) + Send + 'static) -> Result<()> {
        let log = self.clone();
        let thread = threads::start(name, move || {
            let _heard_of = LogThreadGuard(&log);
            life(&log);
        });
        let thread = thread.map_err(|error| Error::thread("one of the log's threads", error))?;
        self.threads.lock().push(thread);
        Ok(())
    }

    /// Appends a batch; it is `Logged` when this returns, unless the log is direct. Callers come one at a time, in the order of
    /// their batches. If there is no space nothing happened; any other failure poisons.
    pub fn append(&self, payload: &[u8], payload_crc: u32, purpose: SpacePurpose) -> Result<LogPoint> {
        let _phase = phases::enter(Phase::Commit);
        let frame_len = frame_len(payload.len() as u64);
        let mut is_held = false;
        let mut state = loop {
            let mut state = self.state.lock();
            self.poison.check()?;
            match state.room_for(frame_len) {
                Room::Ready if is_held || self.pool.is_held(state.ahead.len(), purpose) => break state,
                // On a full disk the next open comes first: for each opening that committed something the log grows.
                Room::Ready => {
                    let (number, ahead) = (state.current.number, state.ahead.len());
                    drop(state);
                    let held = self.pool.hold(number, ahead, purpose);
                    held.map_err(|error| self.unless_passing(error))?;
                    is_held = true;
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
        // A wake-up is a system call. A keeper that has yet to seal looks again in time for this frame.
        if state.dirty_since.is_none() {
            state.dirty_since = Some(state.last_append);
        }
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
            LogIo::Mapped | LogIo::Buffered => Ok(()),
            LogIo::Direct => self.wait_durable(lsn),
        }
    }

    /// As [`wait_logged`](Self::wait_logged), for the applier. Nobody who commits waits for it, and its copies take time
    /// of a processor: so where one of them will sync, it leaves that to them, and it is woken after them.
    pub fn wait_logged_last(&self, lsn: Lsn) -> Result<()> {
        if self.io != LogIo::Direct {
            return Ok(());
        }
        let mut state = self.state.lock();
        while state.durable < lsn {
            if state.syncing {
                // Also where the log has failed meanwhile: what this sync makes durable is seen, and must be applied.
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

    /// Waits until batch `lsn`, which was appended, survives a power cut. Who finds nobody syncing syncs, for all
    /// who have appended: handed to another thread, a sync would cost two changes of threads more. Where others are
    /// expected ([`super::group_commit`]), the last one to come does.
    pub fn wait_durable(&self, lsn: Lsn) -> Result<()> {
        let mut state = self.state.lock();
        if state.durable >= lsn {
            return Ok(());
        }
        if state.syncing && lsn <= state.sync_target {
            state.waiters.come_late();
        } else {
            state.waiters.come();
        }
        while state.durable < lsn {
            self.check()?;
            let round = state.syncs_begun + usize::from(lsn > state.sync_target);
            let synced = &self.synced[round % 2];
            if state.syncing {
                synced.wait(&mut state);
                continue;
            }
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

    /// As [`wait_durable`](Self::wait_durable), for who holds the submission lock: without it nobody comes.
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

    /// Makes durable what was logged so far, if nobody else does.
    fn sync_all<'a>(&'a self, mut state: MutexGuard<'a, LogState>) -> Result<MutexGuard<'a, LogState>> {
        let Some(syncing) = SyncGuard::begin(self, &mut state) else { return Ok(state) };
        drop(state);
        syncing.sync()?;
        Ok(self.state.lock())
    }

    /// Records these snapshots as verified in a seal, and waits until that is durable.
    pub fn record_verified(&self, verified: Vec<VerifiedSnapshot>) -> Result<()> {
        let mut state = self.state.lock();
        state.verified = verified;
        // Every seal appended from now on names the new list.
        let (seals, refused) = (state.stats.seals, state.seals_refused);
        while state.seals_durable <= seals {
            self.check()?;
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

    /// The mark that says which is the newest logged batch; it only rises. `None` where each batch is logged once it is
    /// appended.
    pub fn logged_mark(&self) -> Option<Arc<AtomicU64>> {
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

    /// Counts since the log was opened.
    pub fn stats(&self) -> LogStats {
        self.state.lock().stats
    }

    /// Gives up a spare so that a small file finds space, if the next open can spare it. Returns whether it did.
    pub fn release_one(&self, purpose: SpacePurpose) -> Result<bool> {
        let ahead = self.state.lock().ahead.len();
        self.pool.release_one(ahead, purpose)
    }

    /// Makes everything durable, seals, and ends the threads.
    pub fn stop(&self) {
        self.state.lock().stop = true;
        self.work.notify_one();
        self.room.notify_one();
        for thread in self.threads.lock().drain(..) {
            if thread.join().is_err() {
                tracing::error!("one of the log's threads panicked");
            }
        }
    }

    /// Makes segments until two are ahead, and the first of them is long enough.
    pub(super) fn grow(&self, frame_len: u64, purpose: SpacePurpose) -> Result<()> {
        let _one_maker = self.growth.lock();
        loop {
            let (count, next) = {
                let state = self.state.lock();
                (state.ahead.len(), state.ahead.back().map_or(state.current.number, |last| last.number) + 1)
            };
            if count >= AHEAD {
                break;
            }
            let made = self.pool.make(next, count, purpose);
            let made = made.map_err(|error| self.unless_passing(error))?;
            let mut state = self.state.lock();
            state.ahead.push_back(live(made));
            // The reserve grows with the segments.
            state.reserve_full = false;
            self.room.notify_one();
        }
        // Taken out while it is replaced: with fewer than two ahead nobody rolls. A seal of the keeper's that
        // rolled into it now would be lost with the file that the rename replaces.
        let short = {
            let mut state = self.state.lock();
            let next = state.ahead.front();
            let too_short = next.is_some_and(|next| SEGMENT_HEADER_BLOCK + frame_len > next.len);
            if too_short { state.ahead.pop_front() } else { None }
        };
        if let Some(short) = short {
            let made =
                self.pool.with_surplus(|| self.pool.make_long(short.number, frame_len, AHEAD - 1, purpose));
            let (next, result) = match made {
                Ok(long) => (live(long), Ok(())),
                Err(error) => (short, Err(self.unless_passing(error))),
            };
            self.state.lock().ahead.push_front(next);
            return result;
        }
        Ok(())
    }

    /// A full disk is no failure where space is made, nor is a shortage: what was built has no name yet, or is empty
    /// and is made once more. Everything else is.
    fn unless_passing(&self, error: Error) -> Error {
        if error.is_passing() { error } else { self.fail(error) }
    }

    /// Puts a frame where there is room for it.
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
        assert!(state.durable <= lsn); // I4: a mark never runs ahead of the log.
        let (bytes, chain) = header.encode();
        // The payload first: a kill in between leaves no header, and nothing to wonder about.
        let header_len = bytes.len() as u64;
        let window = &state.current.window;
        let written = window.put(offset + header_len, payload).and_then(|()| window.put(offset, &bytes));
        written.map_err(|error| self.fail(error))?;

        let end = header.end();
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
        // Whatever the frame is, it may have been the first of its segment.
        if state.ahead.len() < AHEAD {
            self.room.notify_one();
        }
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

    /// Fails if the log did.
    pub(super) fn check(&self) -> Result<()> {
        if self.failed.load(Ordering::Acquire) { self.poison.check() } else { Ok(()) }
    }

    /// Ends the log. Returns what everybody is told.
    pub(super) fn fail(&self, error: Error) -> Error {
        let error = self.poison.set(error);
        self.failed.store(true, Ordering::Release);
        // Whoever found the log sound and is about to wait, waits by the time the keeper has looked: it
        // does so under the lock, and wakes them all.
        self.work.notify_one();
        self.notify_all();
        error
    }

    /// Wakes all who wait for progress.
    pub(super) fn notify_all(&self) {
        self.progress.notify_all();
        self.synced.iter().for_each(Condvar::notify_all);
    }
}

/// The right to sync: one thread has it.
pub(super) struct SyncGuard<'a> {
    log: &'a Log,
    dirty: Vec<DirtyRange>,
    /// The newest batch among what is synced, and how many seals there are by then.
    target: Lsn,
    seals: u64,
}

impl<'a> SyncGuard<'a> {
    /// Takes what was logged so far; frames logged from here on form the next group. `None` while another thread
    /// syncs.
    pub fn begin(log: &'a Log, state: &mut LogState) -> Option<Self> {
        if std::mem::replace(&mut state.syncing, true) {
            return None;
        }
        state.group_open = false;
        state.dirty_bytes = 0;
        state.dirty_since = None;
        state.sync_target = state.point.lsn;
        state.syncs_begun += 1;
        state.waiters.begin(Instant::now());
        let dirty = std::mem::take(&mut state.dirty);
        Some(Self { log, dirty, target: state.point.lsn, seals: state.stats.seals })
    }

    /// Makes it durable.
    ///
    /// # Errors
    /// What the system says; the log has failed then.
    pub fn sync(self) -> Result<()> {
        self.make_durable().map_err(|error| self.log.fail(error))
    }

    fn make_durable(&self) -> Result<()> {
        let _phase = phases::enter(Phase::GroupSync);
        for range in &self.dirty {
            range.window.sync(range.from, range.to - range.from)?;
        }
        let mut state = self.log.state.lock();
        assert!(self.target >= state.durable);
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
    /// Whoever waits for it goes on: it is durable, or the log has failed, or one of them syncs.
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.log.fail(Error::panicked("a thread that syncs the log"));
        }
        let mut state = self.log.state.lock();
        state.syncing = false;
        if std::mem::take(&mut state.keeper_asleep) {
            // Meanwhile there was nothing to sync and nothing to seal.
            self.log.work.notify_one();
        }
        let round = state.syncs_begun;
        let served = state.waiters.end(Instant::now());
        drop(state);
        self.log.synced[(round + 1) % 2].notify_one();
        let synced = &self.log.synced[round % 2];
        // One by one: called all at once, each is woken by the one before it, when that lets go of the lock, and
        // 8 threads on 2 cores made a fifth fewer commits of 4 KiB.
        (0..served).for_each(|_| synced.notify_one());
        // Nobody is left, but for one who waits for the sync after the next and was called instead of another.
        synced.notify_all();
        self.log.progress.notify_all();
    }
}

/// Lives as long as one of the log's threads. Where that ends in a panic, nobody must wait for it.
struct LogThreadGuard<'a>(&'a Log);

impl Drop for LogThreadGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail(Error::panicked("one of the log's threads"));
        }
    }
}
