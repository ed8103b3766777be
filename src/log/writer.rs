//! Appends to the log. `waits.rs` implements waiting for durability.
//!
//! A batch is `Logged` when [`Log::append`] returns: its frame and all earlier frames are complete in the mapping or in
//! the kernel's page cache, which outlive the process. Until a sync, the frames of a direct log are in the process's
//! own memory, so a batch of a direct log is `Logged` only once its group is synced.
//!
//! The frames of one group are contiguous. A sync closes the group, and the next frame starts on a new 4096-byte
//! boundary, so that no synced byte is written again (I5). A power cut during such a write could destroy bytes that
//! were already durable.
//!
//! A device or a snapshot may poison the store while the log is intact. The store then accepts no more batches, but all
//! logged batches are still synced and sealed, unless the log's own writes and syncs fail.
//!
//! Lock order: the store's submission lock, then `growth`, then `state`. The keeper does not take the submission lock,
//! so a committer that waits for a sync cannot block the keeper.

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
use crate::base::sync::{Condvar, Instant, Mutex, Rank};
use crate::base::wakers::Wakers;
use crate::disk::DiskFile;
use crate::error::{Error, Result};
use crate::options::LogIo;

/// The log of an open store. Its keeper and maker threads run until [`stop`](Self::stop).
pub(crate) struct Log {
    store: StoreId,
    pub(super) io: LogIo,
    pub pool: Arc<SegmentPool>,
    pub(super) poison: Arc<Poison>,
    /// Whether writing or syncing a frame or creating a segment failed. No further batch then becomes durable. The
    /// store is poisoned before this flag is set, so that a thread that reads the flag finds the error.
    pub(super) failed: AtomicBool,
    pub(super) state: CachePadded<Mutex<LogState>>,
    /// The newest logged batch of a direct log, where a batch is logged only after its sync. `None` for other logs,
    /// which log a batch when they append it.
    pub(super) logged: Option<Arc<AtomicU64>>,
    /// A lock that a thread holds while it creates segments. Creating segments requires syncs, so `state` stays
    /// unlocked, and frames that fit are still appended.
    growth: Mutex<()>,
    /// Notifies the keeper that a sync or a seal is due.
    pub(super) work: Condvar,
    /// Notifies waiters that `durable`, `seals_durable` or `failed` changed.
    pub(super) progress: Condvar,
    /// The async tasks that wait for batches to become durable.
    pub(super) wakers: Wakers,
    /// The condition variables that wake committers when their batches are durable. The committers of the current sync
    /// and the committers of the next sync use different variables, alternating with each sync. A committer of the next
    /// sync is woken before all others, because it begins that sync. When it was woken last, each of 8 threads waited
    /// half a sync longer.
    pub(super) synced: [Condvar; 2],
    /// Notifies the maker that a segment or a spare must be created.
    pub(super) room: Condvar,
    /// Notifies the watcher that the log has reached the requested growth.
    pub(super) grown: Condvar,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// The way in which the payload of a frame is stored in its segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PayloadStored {
    /// [`Log::put`] stores the payload before the header.
    ByPut,
    /// The segment was created with the payload in it, so only the header is stored.
    WithSegment,
}

impl Log {
    /// Starts the log from the state that recovery established, including the keeper and maker threads.
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
            state: CachePadded(Mutex::of_rank(Rank::STATE, LogState::new(start))),
            growth: Mutex::of_rank(Rank::LOG_GROWTH, ()),
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
            // If the second thread cannot be started, the first thread must end, because the log is not returned.
            log.stop();
        }
        started.map(|()| log)
    }

    fn spawn(self: &Arc<Self>, name: &str, life: impl FnOnce(&Self) + Send + 'static) -> Result<()> {
        let log = self.clone();
        let thread = threads::start(name, move || {
            // A thread that panics poisons the store, so that no committer waits for the thread forever.
            let _guard = LogThreadGuard(&log);
            life(&log);
        });
        let thread = thread.map_err(|error| Error::thread("one of the log's threads", error))?;
        self.threads.lock().push(thread);
        Ok(())
    }

    /// Appends a batch and returns its position. The batch is `Logged` on return, unless the log is direct. Calls must
    /// be serialized, in the order of the batches.
    ///
    /// The payload and its checksum are complete before the batch gets its Lsn (I1), so a failure to encode a batch
    /// leaves no gap in the Lsns.
    ///
    /// # Errors
    /// [`Error::DiskFull`] or another transient error, without any change. Any other failure poisons the store.
    pub fn append(&self, payload: &[u8], payload_crc: u32, purpose: SpacePurpose) -> Result<LogPoint> {
        let _phase = phases::enter(Phase::Commit);
        let frame_len = frame_len(payload.len() as u64);
        let mut leaves_enough = false;
        // The number of the segment that was created with the payload already in it.
        let mut made_with_it = None;
        let mut state = loop {
            let mut state = self.state.lock();
            // Checked inside the loop: the store may have been poisoned while this thread created a segment or waited
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
                    // On a full disk, space for the next open has priority, because each opening that commits a batch
                    // adds a segment to the log. Checked only once: if the disk has space, `hold_reserve` leaves the
                    // creation of reserved segments to the maker thread.
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
        let is_first = state.next_offset() == SEGMENT_HEADER_BLOCK;
        let stored = if made_with_it == Some(state.current.number) && is_first {
            PayloadStored::WithSegment
        } else {
            PayloadStored::ByPut
        };
        let point = self.put(&mut state, FrameKind::Batch, payload, payload_crc, stored)?;
        let now = state.last_append;
        let is_to_tell = self.io == LogIo::Mapped && state.ends_silence(now);
        // Notifying the keeper is a system call, which is needed only if the keeper sleeps without a timeout. A keeper
        // that still has to seal wakes up in time for this frame.
        if state.dirty_since.is_none() {
            state.dirty_since = Some(state.last_append);
        }
        // Only the frame that exceeds the bound wakes the keeper. Later frames need not do so again.
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

    pub fn wakers(&self) -> &Wakers {
        &self.wakers
    }

    /// Returns the newest logged batch of a direct log, as a counter that only increases. Returns `None` for other
    /// logs, which log a batch when they append it.
    pub fn logged_lsn(&self) -> Option<Arc<AtomicU64>> {
        self.logged.clone()
    }

    pub fn durable(&self) -> Lsn {
        self.state.lock().durable
    }

    /// Returns the number of the segment that receives new frames.
    pub fn current_segment(&self) -> u64 {
        self.state.lock().current.number
    }

    pub fn stats(&self) -> LogStats {
        self.state.lock().stats
    }

    /// Creates a small file from a spare segment ([`SegmentPool::make_small`]). Returns `None` if the next open needs
    /// all spares.
    pub fn make_small(
        &self,
        temporary: FileName,
        len: u64,
        purpose: SpacePurpose,
    ) -> Result<Option<Arc<dyn DiskFile>>> {
        let empty = self.state.lock().empty.len();
        self.pool.make_small(temporary, len, empty, purpose)
    }

    /// Removes a spare segment to make space for a small file, unless the next open needs it. Returns whether one was
    /// removed.
    pub fn release_one(&self, purpose: SpacePurpose) -> Result<bool> {
        let empty = self.state.lock().empty.len();
        self.pool.release_one(empty, purpose)
    }

    /// Makes all batches durable, seals the log, and ends its threads. May be called after a failed start, when some
    /// threads were not started.
    pub fn stop(&self) {
        // The keeper ends only after it has synced and sealed, so durable marks cover all of a closed log (I4).
        self.state.lock().must_stop = true;
        self.work.notify_one();
        self.room.notify_one();
        for thread in self.threads.lock().drain(..) {
            if thread.join().is_err() {
                tracing::error!("one of the log's threads panicked");
            }
        }
    }

    /// Frees the space that only an open log needs. The log must have stopped. If the log failed or has unsynced
    /// frames, its files are left unchanged.
    pub fn shrink(&self) {
        if self.check().is_err() || self.poison.check().is_err() {
            return;
        }
        let Some(end) = self.state.lock().closed_end() else { return };
        // A failure leaves the store valid: the next open finds every frame, and frees the space when it closes.
        if let Err(error) = self.pool.shrink(end) {
            tracing::warn!(%error, "cannot shrink the log at close");
        }
    }

    /// Sets the point before which the log is no longer kept. `None` keeps all of the log.
    pub fn set_replay_start(&self, point: Option<LogPoint>) {
        self.state.lock().replay_start = point;
    }

    /// Creates segments until two empty segments exist and the first of them is long enough for a frame with `payload`.
    /// If a created segment already contains the payload, returns the segment's number. The caller must then store the
    /// frame as the first frame of that segment.
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
            // The state lock was not held while the segment was created, but the number is still the next one: only a
            // thread that holds `growth` adds segments.
            let mut state = self.state.lock();
            let last = state.empty.back().map_or(state.current.number, |last| last.number);
            assert!(made.number == last + 1); // I8: the walk finds the segment by its number.
            state.empty.push_back(live(made));
            // The reserved segments must be about as long as the log's segments, so the reserve may no longer suffice.
            state.reserve_full = false;
            self.room.notify_one();
        }
        // The short segment is removed from the list while it is replaced, so that no thread enters it: a thread enters
        // a segment only if at least two are ready. Otherwise the keeper could write a seal into the short segment, and
        // lose it together with the replaced file. In three of four runs of the kill suite, the next open then found a
        // broken chain under a durable mark and refused the store.
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
                // After a transient error, the rename did not happen. The short segment still has its name, and can
                // receive shorter frames.
                Err(error) => (short, Err(self.unless_passing(error))),
            };
            self.state.lock().empty.push_front(next);
            return result;
        }
        Ok(None)
    }

    /// Fails the log because a segment could not be created, unless the error is transient. A full disk or another
    /// shortage is transient: the new file has no segment name yet, or is empty and will be created again. After any
    /// other error, the state of the folder is unknown.
    fn unless_passing(&self, error: Error) -> Error {
        if error.is_passing() { error } else { self.fail(error) }
    }

    /// Stores a frame in the current segment, and advances the log's state. The caller must have checked
    /// [`LogState::room_for`] under the same lock.
    pub(super) fn put(
        &self,
        state: &mut LogState,
        kind: FrameKind,
        payload: &[u8],
        payload_crc: u32,
        stored: PayloadStored,
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
        // The payload is stored first. If the process is killed before the header is stored, no reader treats the
        // payload as a frame.
        let header_len = bytes.len() as u64;
        let window = &state.current.window;
        let payload_put = match stored {
            PayloadStored::WithSegment => Ok(()),
            PayloadStored::ByPut => window.put(offset + header_len, payload),
        };
        let written = payload_put.and_then(|()| window.put(offset, &bytes));
        // A part of the frame may have been stored. The log fails, because a retry would overwrite bytes in an unknown
        // state.
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
        state.mark = header.durable;
        state.chain = chain;
        state.offset = end;
        state.last_append = now;
        // This frame may have been the first frame of its segment. The log then has one empty segment less.
        if state.empty.len() < EMPTY_COUNT {
            self.room.notify_one();
        }
        // A seal has no Lsn and does not move the point, but the next frame still states its chain hash.
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

    /// Returns an error if another writer has opened the store after this writer. A check made within the last
    /// millisecond is not repeated.
    pub(super) fn check_writer_again(&self) -> Result<()> {
        if self.state.lock().is_check_due(Instant::now()) { self.pool.check_writer() } else { Ok(()) }
    }

    /// Returns the store's error if the log has failed.
    pub fn check(&self) -> Result<()> {
        if self.failed.load(Ordering::Acquire) { self.poison.check() } else { Ok(()) }
    }

    /// Marks the log as failed with `error`. Returns the error that every later call returns, which may be the error of
    /// an earlier failure.
    ///
    /// The keeper wakes the waiting tasks, because the caller may hold locks, and an executor may poll a task in the
    /// call that wakes it.
    pub(super) fn fail(&self, error: Error) -> Error {
        let error = self.poison.set(error);
        self.failed.store(true, Ordering::Release);
        // A thread that is about to wait has checked `failed` under the state lock. The keeper acquires the same lock
        // before it notifies, so that thread is already waiting and is woken.
        self.work.notify_one();
        self.notify_threads();
        error
    }

    /// Wakes all threads that wait for progress of the log.
    pub(super) fn notify_threads(&self) {
        self.progress.notify_all();
        self.synced.iter().for_each(Condvar::notify_all);
    }

    /// Wakes all waiting tasks of a log that has failed. The caller must hold no lock.
    pub(super) fn wake_tasks_of_failed(&self) {
        if self.failed.load(Ordering::Acquire) {
            self.wakers.wake(Lsn(u64::MAX));
        }
    }
}

/// A guard for one of the log's threads. If the thread panics, the guard fails the log, so that no caller waits
/// forever.
struct LogThreadGuard<'a>(&'a Log);

impl Drop for LogThreadGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail(Error::panicked("one of the log's threads"));
            self.0.wake_tasks_of_failed();
        }
    }
}
