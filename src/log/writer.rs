//! Appending to the log. Waiting for durability is in `waits.rs`.
//!
//! A batch is `Logged` when [`Log::append`] returns: its frame and all earlier ones are complete in the
//! mapping or in the kernel's page cache, which outlive the process. The frames of a direct log are in the
//! process's own memory until a sync, so a batch there is `Logged` only once its group is synced.
//!
//! The frames of one group are contiguous. A sync closes the group, and the next frame starts on a new
//! 4096-byte boundary, so that nothing synced is written again (I5): a power cut during such a write could
//! destroy bytes that were already durable.
//!
//! A device or a snapshot may poison the store while the log is sound. Then no more batches are taken, but
//! everything that was logged is still synced and sealed. Only a failure of the log's own writes and syncs
//! ends that.
//!
//! Lock order: the store's submission lock, then `growth`, then `state`. The keeper does not take the
//! submission lock, so a committer that waits for a sync cannot block it.

use std::sync::Arc;

use remanent_format::frame::{FrameHeader, FrameKind, frame_len};
use remanent_format::limits::GROUP_ALIGN;
use remanent_format::segment::SEGMENT_HEADER_BLOCK;
use remanent_format::{FileName, LogPoint, Lsn, StoreId};

use super::segments::{SegmentPool, SpacePurpose};
use super::state::{DirtyRange, EMPTY_COUNT, LogStart, LogState, LogStats, Room, live};
use crate::base::cache_padded::CachePadded;
use crate::base::phases;
use crate::base::phases::Phase;
use crate::base::poison::Poison;
use crate::base::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::base::sync::thread::JoinHandle;
use crate::base::sync::threads;
use crate::base::sync::{Condvar, Instant, Mutex};
use crate::base::wakers::Wakers;
use crate::disk::DiskFile;
use crate::error::{Error, Result};
use crate::options::LogIo;

/// The log of an open store.
pub(crate) struct Log {
    store: StoreId,
    pub(super) io: LogIo,
    pub pool: Arc<SegmentPool>,
    pub(super) poison: Arc<Poison>,
    /// Whether a frame could not be written or synced, or a segment could not be created: nothing more
    /// becomes durable. The store is poisoned before this is set, so that a thread which sees the flag finds
    /// the reason.
    pub(super) failed: AtomicBool,
    pub(super) state: CachePadded<Mutex<LogState>>,
    /// The newest logged batch, in a direct log, where a batch is appended before it is logged.
    pub(super) logged: Option<Arc<AtomicU64>>,
    /// Held while segments are created, which takes syncs; `state` stays free meanwhile, so that frames which
    /// fit are appended.
    growth: Mutex<()>,
    /// Notifies the keeper that something is due.
    pub(super) work: Condvar,
    /// Notifies waiters that `durable`, `seals_durable` or `failed` changed.
    pub(super) progress: Condvar,
    /// Tasks that wait for batches to become durable.
    pub(super) wakers: Wakers,
    /// Notify committers that their batches are durable. The two alternate: one serves the committers of the
    /// current sync, the other those of the next sync. A committer of the next sync is woken before all
    /// others, because it begins that sync. When it was woken last, each of 8 threads waited half a sync
    /// longer.
    pub(super) synced: [Condvar; 2],
    /// Notifies the maker that something must be created.
    pub(super) room: Condvar,
    /// Notifies the watcher that the log has reached the requested growth.
    pub(super) grown: Condvar,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Log {
    /// Takes over the log as recovery left it, and starts the keeper and the maker.
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
            state: CachePadded(Mutex::new(LogState::new(start))),
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
            // A thread that did start must not continue with a log that the caller never gets.
            log.stop();
        }
        started.map(|()| log)
    }

    fn spawn(self: &Arc<Self>, name: &str, life: impl FnOnce(&Self) + Send + 'static) -> Result<()> {
        let log = self.clone();
        let thread = threads::start(name, move || {
            // A thread that panics poisons the store, so that no committer waits for it forever.
            let _heard_of = LogThreadGuard(&log);
            life(&log);
        });
        let thread = thread.map_err(|error| Error::thread("one of the log's threads", error))?;
        self.threads.lock().push(thread);
        Ok(())
    }

    /// Appends a batch, which is `Logged` on return unless the log is direct. Callers take turns, in the
    /// order of their batches. A lack of space changes nothing; any other failure poisons.
    ///
    /// Payload and checksum exist before the batch gets its Lsn (I1), so a failure to encode one leaves no
    /// gap in the Lsns.
    pub fn append(&self, payload: &[u8], payload_crc: u32, purpose: SpacePurpose) -> Result<LogPoint> {
        let _phase = phases::enter(Phase::Commit);
        let frame_len = frame_len(payload.len() as u64);
        let mut leaves_enough = false;
        // The segment that was created with the payload already in it.
        let mut made_with_it = None;
        let mut state = loop {
            let mut state = self.state.lock();
            // Inside the loop: the store may have been poisoned while this thread created a segment or waited
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
                    // On a full disk the next open has priority: the log grows by a segment with each opening
                    // that commits something. Checked only once, because a `hold_reserve` that found space
                    // leaves filling the reserve to the maker.
                    drop(state);
                    let kept = self.pool.hold_reserve(number, empty, purpose);
                    kept.map_err(|error| self.unless_passing(error))?;
                    leaves_enough = true;
                }
                Room::AfterGrowth => {
                    drop(state);
                    made_with_it = self.grow(payload, purpose)?;
                }
                Room::AfterSync(lsn) => {
                    drop(state);
                    self.sync_up_to(lsn)?;
                }
            }
        };
        let is_in_place =
            made_with_it == Some(state.current.number) && state.next_offset() == SEGMENT_HEADER_BLOCK;
        let point = self.put(&mut state, FrameKind::Batch, payload, payload_crc, is_in_place)?;
        let now = state.last_append;
        let is_to_tell = self.io == LogIo::Mapped && state.ends_silence(now);
        // A wake-up is a system call, so the keeper is woken only out of an indefinite sleep. A keeper that
        // has yet to seal checks again in time for this frame.
        if state.dirty_since.is_none() {
            state.dirty_since = Some(state.last_append);
        }
        // Only the frame that crosses the bound wakes the keeper; later ones would wake it in vain.
        let much = state.sync_after_bytes();
        let is_much = state.dirty_bytes >= much && state.dirty_bytes - frame_len < much;
        if std::mem::take(&mut state.is_keeper_asleep) || is_much {
            self.work.notify_one();
        }
        if state.watch.is_reached(state.point.lsn, state.replay_bytes()) {
            self.grown.notify_one();
        }
        drop(state);
        if is_to_tell {
            self.pool.notify_followers(point.segment);
        }
        Ok(point)
    }

    /// Returns the tasks that wait for batches to become durable.
    pub fn wakers(&self) -> &Wakers {
        &self.wakers
    }

    /// Returns the newest logged batch, which only rises; `None` if each batch is logged once it is appended.
    pub fn logged_lsn(&self) -> Option<Arc<AtomicU64>> {
        self.logged.clone()
    }

    /// Returns the newest durable batch.
    pub fn durable(&self) -> Lsn {
        self.state.lock().durable
    }

    /// Returns the number of the segment that receives frames.
    pub fn current_segment(&self) -> u64 {
        self.state.lock().current.number
    }

    /// Returns the counters of the log since it was opened.
    pub fn stats(&self) -> LogStats {
        self.state.lock().stats
    }

    /// Makes a small file from a spare, unless the next open needs the spare ([`SegmentPool::make_small`]).
    pub fn make_small(
        &self,
        temporary: FileName,
        len: u64,
        purpose: SpacePurpose,
    ) -> Result<Option<Arc<dyn DiskFile>>> {
        let empty = self.state.lock().empty.len();
        self.pool.make_small(temporary, len, empty, purpose)
    }

    /// Releases a spare so that a small file finds space, unless the next open needs the spare. Returns
    /// whether it did.
    pub fn release_one(&self, purpose: SpacePurpose) -> Result<bool> {
        let empty = self.state.lock().empty.len();
        self.pool.release_one(empty, purpose)
    }

    /// Makes everything durable, seals, and ends the threads. Tolerates threads that were not started,
    /// because a failed start also calls this.
    pub fn stop(&self) {
        // The keeper ends only after it has synced and sealed: marks cover all of a closed log (I4).
        self.state.lock().must_stop = true;
        self.work.notify_one();
        self.room.notify_one();
        for thread in self.threads.lock().drain(..) {
            if thread.join().is_err() {
                tracing::error!("one of the log's threads panicked");
            }
        }
    }

    /// Frees the space that only an open log needs, once the log has stopped. A log that failed or did not
    /// sync all its frames is left unchanged.
    pub fn shrink(&self) {
        if self.check().is_err() || self.poison.check().is_err() {
            return;
        }
        let Some(end) = self.state.lock().closed_end() else { return };
        // A failure loses nothing: the next open finds every frame, and its close tries again.
        if let Err(error) = self.pool.shrink(end) {
            tracing::warn!(%error, "the closed store takes more space than it needs");
        }
    }

    /// Sets the point before which the log is no longer kept. `None` keeps all of it.
    pub fn set_replay_start(&self, point: Option<LogPoint>) {
        self.state.lock().replay_start = point;
    }

    /// Creates segments until two are ready, and the first of them is long enough for a frame with this
    /// payload. Returns the number of a segment that already contains the payload, for a frame that becomes
    /// its first.
    pub(super) fn grow(&self, payload: &[u8], purpose: SpacePurpose) -> Result<Option<u64>> {
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
            // The lock was not held while the segment was created. Only a thread with `growth` appends to the
            // list, so the number is still the next one.
            let mut state = self.state.lock();
            let last = state.empty.back().map_or(state.current.number, |last| last.number);
            assert!(made.number == last + 1); // I8: the walk finds the segment by its number.
            state.empty.push_back(live(made));
            // The reserve grows with the segments, so it may be too short now.
            state.reserve_full = false;
            self.room.notify_one();
        }
        // The short segment leaves the list while it is replaced, so that no thread rolls into it: none does
        // with fewer than two ready. A seal that the keeper had put there would be lost with the file that
        // the rename replaces. The next open then found a broken chain under a mark and refused the store, in
        // three of four runs of the kill suite.
        let short = {
            let mut state = self.state.lock();
            let next = state.empty.front();
            let needed = SEGMENT_HEADER_BLOCK + frame_len(payload.len() as u64);
            let too_short = next.is_some_and(|next| needed > next.len);
            if too_short { state.empty.pop_front() } else { None }
        };
        if let Some(short) = short {
            let made = self
                .pool
                .with_surplus(|| self.pool.make_long(short.number, payload, EMPTY_COUNT - 1, purpose));
            let (next, result) = match made {
                Ok(long) => (live(long.segment), Ok(long.holds_payload.then_some(short.number))),
                // If the error is transient, the rename did not happen: the short segment still has its name,
                // and takes shorter frames.
                Err(error) => (short, Err(self.unless_passing(error))),
            };
            self.state.lock().empty.push_front(next);
            return result;
        }
        Ok(None)
    }

    /// Fails the log for an error in creating a segment, unless the error is transient. A full disk and a
    /// shortage are transient: the file that was built has no name yet, or is empty and is created again.
    /// After any other error the folder's state is unknown.
    fn unless_passing(&self, error: Error) -> Error {
        if error.is_passing() { error } else { self.fail(error) }
    }

    /// Stores a frame where it fits, and advances the log's state by it. The caller has checked
    /// [`LogState::room_for`] under the same lock. `is_in_place` says that the payload is already in place.
    pub(super) fn put(
        &self,
        state: &mut LogState,
        kind: FrameKind,
        payload: &[u8],
        payload_crc: u32,
        is_in_place: bool,
    ) -> Result<LogPoint> {
        let now = Instant::now();
        if state.is_check_due(now) {
            self.pool.check_writer().map_err(|error| self.fail(error))?;
            state.checked = Some(now);
        }
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
        assert!(!header.group_start || offset.is_multiple_of(GROUP_ALIGN)); // I5: not in a synced block.
        assert!(header.end() <= state.current.len); // I3: a frame is within its segment.
        let (bytes, chain) = header.encode();
        // The payload first: if the process is killed in between, there is no header, so no reader takes the
        // payload for a frame.
        let header_len = bytes.len() as u64;
        let window = &state.current.window;
        let payload_put = if is_in_place { Ok(()) } else { window.put(offset + header_len, payload) };
        let written = payload_put.and_then(|()| window.put(offset, &bytes));
        // A failed put may have stored a part of the frame. The log ends here, because a retry would write
        // over bytes in an unknown state.
        written.map_err(|error| self.fail(error))?;

        let end = header.end();
        // Ranges of one segment are merged, so that a sync takes one call per segment.
        match state.dirty.last_mut() {
            Some(dirty) if Arc::ptr_eq(&dirty.window, window) => dirty.to = end,
            _ => state.dirty.push(DirtyRange { window: window.clone(), from: offset, to: end }),
        }
        state.dirty_bytes += end - offset;
        state.stats.bytes += end - offset;
        state.group_open = true;
        state.chain = chain;
        state.offset = end;
        state.last_append = now;
        // Any frame, including a seal, may have been the first of its segment, which needs another empty one.
        if state.empty.len() < EMPTY_COUNT {
            self.room.notify_one();
        }
        // A seal takes no Lsn and does not move the point, but the next frame still names its chain hash.
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

    /// Fails if another writer has opened the store since, unless that was checked a moment ago.
    pub(super) fn check_writer_again(&self) -> Result<()> {
        if self.state.lock().is_check_due(Instant::now()) { self.pool.check_writer() } else { Ok(()) }
    }

    /// Returns the log's error if it has failed.
    pub(super) fn check(&self) -> Result<()> {
        if self.failed.load(Ordering::Acquire) { self.poison.check() } else { Ok(()) }
    }

    /// Fails the log. Returns the error that every caller gets from now on, which may be an earlier one.
    ///
    /// The caller may hold locks, so the keeper wakes the waiting tasks: an executor may poll a task in the
    /// call that wakes it.
    pub(super) fn fail(&self, error: Error) -> Error {
        let error = self.poison.set(error);
        self.failed.store(true, Ordering::Release);
        // A thread that found the log sound and is about to wait does so under the lock. By the time the
        // keeper has checked, under the same lock, that thread waits, and the keeper wakes it.
        self.work.notify_one();
        self.notify_threads();
        error
    }

    /// Wakes all threads that wait for progress.
    pub(super) fn notify_threads(&self) {
        self.progress.notify_all();
        self.synced.iter().for_each(Condvar::notify_all);
    }

    /// Wakes all waiting tasks of a log that has failed. The caller holds no lock.
    pub(super) fn wake_tasks_of_failed(&self) {
        if self.failed.load(Ordering::Acquire) {
            self.wakers.wake(Lsn(u64::MAX));
        }
    }
}

/// Guards one of the log's threads. If the thread panics, the log fails, because no caller may be left
/// waiting for it.
struct LogThreadGuard<'a>(&'a Log);

impl Drop for LogThreadGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail(Error::panicked("one of the log's threads"));
            self.0.wake_tasks_of_failed();
        }
    }
}
