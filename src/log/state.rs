//! The state of the log: the current segment, the empty segments after it, and the ranges that are not synced.
//!
//! The lock of [`super::writer::Log`] guards this state. No function here blocks or accesses the disk, so a committer
//! holds the lock for about the time to copy its frame.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use remanent_format::frame::VerifiedSnapshot;
use remanent_format::limits::{FRAME_ALIGN, GROUP_ALIGN, align_up};
use remanent_format::segment::SEGMENT_HEADER_BLOCK;
use remanent_format::{FileName, LogPoint, Lsn};

use super::group_commit::Waiters;
use super::segments::{ClosedEnd, SegmentFile};
use crate::base::phases;
use crate::base::phases::Phase;
use crate::base::sync::Instant;
use crate::disk::Window;
use crate::error::Error;

/// The number of empty segments to keep after the current segment. I8 requires one. With two, the required successor of
/// the next segment already exists when the log enters that segment, so no frame waits for its creation.
pub(super) const EMPTY_COUNT: usize = 2;

/// The state that an open passes to [`Log::start`](super::writer::Log::start).
pub(crate) struct LogStart {
    /// The point after the last batch in the log.
    pub point: LogPoint,
    /// The chain hash that the next frame must state: the hash of the opening seal (I3).
    pub chain: u32,
    /// The offset at which the opening seal ends.
    pub offset: u64,
    /// The opening segment, which receives frames first.
    pub current: SegmentFile,
    /// The empty segment after the opening segment.
    pub next: SegmentFile,
    /// The snapshots that the opening seal records as verified.
    pub verified: Vec<VerifiedSnapshot>,
}

/// The minimum time since the previous batch for a mapped log to notify its followers of a batch. Followers
/// cannot detect an append to a mapping, because it makes no system call. They poll for longer than this time
/// after each batch, so they need no earlier notification. At most 200 notifications per second are sent.
pub(crate) const NOTIFY_AFTER: Duration = Duration::from_millis(5);

/// The time for which a check that no other writer has opened the store remains valid. Another writer cannot reuse a
/// segment of this writer within this time, because it first reads the log and syncs its opening. The check takes two
/// system calls, longer than writing a small frame.
const CHECK_AFTER: Duration = Duration::from_millis(1);

/// The minimum of [`LogState::sync_after_bytes`].
const SYNC_AFTER_MIN: u64 = 128 << 10;
const SYNC_AFTER_MAX: u64 = 8 << 20;

/// The minimum of [`LogState::upcoming_len`], used by a log that was idle.
const UPCOMING_MIN: u64 = 64 << 10;
const UPCOMING_MAX: u64 = 16 << 20;

/// Counters of the log since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LogStats {
    /// The number of batches appended.
    pub batches: u64,
    /// The number of seals appended.
    pub seals: u64,
    /// The number of bytes in appended frames, including padding.
    pub bytes: u64,
    /// The number of groups of frames made durable.
    pub syncs: u64,
    /// The number of times that the log entered a new segment.
    pub rolls: u64,
}

/// The state of an open log, guarded by the lock of [`super::writer::Log`].
pub(super) struct LogState {
    pub current: OpenSegment,
    pub empty: VecDeque<OpenSegment>,
    pub point: LogPoint,
    pub chain: u32,
    pub offset: u64,
    /// Whether the next frame joins the group of the last frame. A sync closes the group, because the last block of a
    /// synced group must not be written again (I5).
    pub group_open: bool,
    /// The ranges of frames that no sync covers yet.
    pub dirty: Vec<DirtyRange>,
    pub dirty_bytes: u64,
    pub dirty_since: Option<Instant>,
    /// The time of the last check that no other writer has opened the store. If `None`, a check is required before the
    /// next frame.
    pub checked: Option<Instant>,
    /// Earlier segments that are not completely durable, each with the last batch in it. An entry is removed when that
    /// batch is durable.
    pub left_behind: VecDeque<(u64, Lsn)>,
    /// The number of synced seals. A snapshot counts as recorded only after the seal that names it is synced (I7).
    pub seals_durable: u64,
    /// The number of seals that could not be written because the disk was full or another system resource was
    /// exhausted.
    pub seals_refused: u64,
    /// The error of the last seal that could not be written.
    pub seal_refusal: Option<Error>,
    pub durable: Lsn,
    /// The durable mark in the newest frame.
    pub mark: Lsn,
    /// The newest proven batch. A batch is proven if a durable mark covers it and the frame with that mark is itself
    /// durable. Every open can then prove that the batch was durable, so the log never continues after an earlier
    /// batch, even after a crash (I6).
    pub proven: Lsn,
    /// Whether a thread is syncing. Other threads must wait before they sync.
    pub is_syncing: bool,
    /// The newest batch that the current sync covers, or the last sync if none is running. Later batches wait for the
    /// next sync.
    pub sync_target: Lsn,
    /// The number of syncs begun. Its parity selects the condition variable on which a committer waits.
    pub syncs_begun: usize,
    pub waiters: Waiters,
    /// Whether the keeper sleeps until it is notified. If `false`, the keeper checks again before the next frame must
    /// be synced, and an append need not make the system call that notifies the keeper.
    pub is_keeper_asleep: bool,
    /// Whether a task, or a thread with a time limit, waits for the next sync. The keeper must then begin the sync
    /// immediately.
    pub is_sync_wanted: bool,
    /// Whether the last frame is a seal that covers all earlier frames.
    pub sealed: bool,
    pub must_seal_now: bool,
    /// Whether a seal could not be written, so that the seal at close may use the reserve.
    pub is_seal_missed: bool,
    pub last_append: Instant,
    /// The time of the last batch for which [`Self::ends_silence`] was called.
    last_batch: Option<Instant>,
    pub verified: Vec<VerifiedSnapshot>,
    pub grow_after: Option<Instant>,
    pub reserve_full: bool,
    pub must_stop: bool,
    pub watch: GrowthWatch,
    pub stats: LogStats,
    /// The number of image bytes that were written before the appended batches that name them.
    pub ahead_bytes: u64,
    /// The point before which the log is no longer kept. `None` keeps all of the log.
    pub replay_start: Option<LogPoint>,
}

/// A segment that receives frames now or later. Its window, through which frames are written, keeps the file open.
pub(super) struct OpenSegment {
    pub number: u64,
    pub len: u64,
    pub window: Arc<dyn Window>,
}

/// A range of stored frames that no sync covers yet.
pub(super) struct DirtyRange {
    pub window: Arc<dyn Window>,
    pub from: u64,
    pub to: u64,
}

/// A range of a segment that the next frames will fill.
pub(super) struct UpcomingRange {
    pub window: Arc<dyn Window>,
    pub from: u64,
    pub len: u64,
}

/// The action that is required before a frame of a given length can be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Room {
    /// No action is required, because the frame fits in the current segment.
    Ready,
    /// The log must enter the next segment with [`LogState::roll`]. The frame fits there.
    NextSegment,
    /// A segment must be created. Creation requires syncs, so the caller creates the segment without the state lock.
    AfterGrowth,
    /// The given batch must become durable first. Otherwise a power cut could leave more than two unsynced
    /// segments.
    AfterSync(Lsn),
}

impl LogState {
    pub fn new(start: LogStart) -> Self {
        // I8: the empty segment after the opening exists, and the walk finds it by its number.
        assert!(start.next.number == start.current.number + 1);
        // I5: no frame is in the header block.
        assert!(start.offset >= SEGMENT_HEADER_BLOCK);
        let (current, next) = (live(start.current), live(start.next));
        let now = Instant::now();
        Self {
            current,
            empty: VecDeque::from([next]),
            point: start.point,
            chain: start.chain,
            offset: start.offset,
            group_open: false,
            dirty: Vec::new(),
            dirty_bytes: 0,
            dirty_since: None,
            checked: None,
            left_behind: VecDeque::new(),
            seals_durable: 0,
            seals_refused: 0,
            seal_refusal: None,
            durable: start.point.lsn,
            // The opening states that the batches before it are durable, and is synced.
            mark: start.point.lsn,
            proven: start.point.lsn,
            is_syncing: false,
            sync_target: start.point.lsn,
            syncs_begun: 0,
            waiters: Waiters::new(now),
            is_keeper_asleep: false,
            is_sync_wanted: false,
            sealed: true,
            must_seal_now: false,
            is_seal_missed: false,
            last_append: now,
            last_batch: None,
            verified: start.verified,
            grow_after: None,
            reserve_full: false,
            must_stop: false,
            watch: GrowthWatch::default(),
            stats: LogStats::default(),
            ahead_bytes: 0,
            replay_start: None,
        }
    }

    /// Returns whether this writer must check again for another writer before its next write to the log.
    pub fn is_check_due(&self, now: Instant) -> bool {
        self.checked.is_none_or(|at| now - at >= CHECK_AFTER)
    }

    /// Determines whether a frame of `frame_len` bytes can be stored now. If not, the caller releases the lock,
    /// performs the returned action, and calls this function again.
    ///
    /// This function does not enter the next segment, because storing the frame may still fail. A later, longer frame
    /// could then skip the segment that was entered, and the next open would report the empty segment as damage.
    pub fn room_for(&self, frame_len: u64) -> Room {
        if self.next_offset() + frame_len <= self.current.len {
            return Room::Ready;
        }
        let long_enough = self.empty.front().is_some_and(|next| SEGMENT_HEADER_BLOCK + frame_len <= next.len);
        // I8: when the log enters a segment, the following segment exists, is synced and has its name. A reader
        // therefore treats a missing newest segment as damage.
        if !long_enough || self.empty.len() < EMPTY_COUNT {
            return Room::AfterGrowth;
        }
        // A frame may enter the next segment only if the segment before the current one is durable. A power cut thus
        // never leaves more than two unsynced segments.
        if let Some(&(_, last)) = self.left_behind.back() {
            return Room::AfterSync(last);
        }
        Room::NextSegment
    }

    /// Enters the next segment, for a frame that the caller then stores under the same lock. [`Self::room_for`] must
    /// have returned [`Room::NextSegment`].
    pub fn roll(&mut self) {
        let _phase = phases::enter(Phase::SegmentRoll);
        if self.point.lsn > self.durable {
            self.left_behind.push_back((self.current.number, self.point.lsn));
        }
        let number_left = self.current.number;
        self.current = self.empty.pop_front().expect("two are ready");
        assert!(self.current.number == number_left + 1); // I3: the walk expects the next frame there.
        assert!(!self.empty.is_empty()); // I8
        self.offset = SEGMENT_HEADER_BLOCK;
        // A frame that joins a group directly follows the previous one, so the first frame of a segment starts a group.
        self.group_open = false;
        // Another writer may have opened the store and reused the empty segment, so the next frame requires a check.
        self.checked = None;
        self.stats.rolls += 1;
    }

    /// Returns whether a batch appended at `now` is the first batch after a pause, and records the time of this batch.
    pub fn ends_silence(&mut self, now: Instant) -> bool {
        let last = self.last_batch.replace(now);
        last.is_none_or(|last| last + NOTIFY_AFTER <= now)
    }

    /// Returns the expected number of bytes of frames before the keeper checks again. The estimate is four times the
    /// unsynced bytes, between [`UPCOMING_MIN`] and [`UPCOMING_MAX`], because several syncs may occur before that
    /// check.
    pub fn upcoming_len(&self) -> u64 {
        self.dirty_bytes.saturating_mul(4).clamp(UPCOMING_MIN, UPCOMING_MAX)
    }

    /// Returns the ranges of segments that the next `len` bytes of frames will fill.
    pub fn upcoming(&self, len: u64) -> Vec<UpcomingRange> {
        let mut left = len;
        let here = (&self.current, self.offset);
        let segments = [here].into_iter().chain(self.empty.front().map(|next| (next, SEGMENT_HEADER_BLOCK)));
        let upcoming = segments.map(|(segment, from)| {
            let len = left.min(segment.len.saturating_sub(from));
            left -= len;
            UpcomingRange { window: segment.window.clone(), from, len }
        });
        upcoming.filter(|upcoming| upcoming.len > 0).collect()
    }

    /// Returns the time until which the next sync waits for more committers, or `None` if the sync may begin now.
    pub fn more_until(&self) -> Option<Instant> {
        self.waiters.more_until(self.dirty_bytes, Instant::now())
    }

    /// Returns the number of unsynced bytes at which the keeper syncs immediately. After a crash, an open copies the
    /// unsynced bytes. On a full disk, only the reserve has space for the copy, and its segments have the length of the
    /// current segment.
    pub fn sync_after_bytes(&self) -> u64 {
        (self.current.len / 2).clamp(SYNC_AFTER_MIN, SYNC_AFTER_MAX)
    }

    /// Returns the number of bytes that a replay of the appended batches reads, including the images that the batches
    /// name.
    pub fn replay_bytes(&self) -> u64 {
        self.stats.bytes + self.ahead_bytes
    }

    /// Returns the end position of a log that has stopped, or `None` if the log is still running or a frame is not
    /// synced.
    pub fn closed_end(&self) -> Option<ClosedEnd> {
        if !self.must_stop || self.is_syncing || !self.dirty.is_empty() {
            return None;
        }
        let OpenSegment { number, len, .. } = self.current;
        let from = self.replay_start.filter(|from| from.segment == number);
        let start = from.map_or(SEGMENT_HEADER_BLOCK, |from| from.offset - from.offset % GROUP_ALIGN);
        Some(ClosedEnd {
            incarnation: self.point.incarnation,
            number,
            len,
            needed: start..self.offset,
            empty: self.empty.iter().map(|segment| (segment.number, segment.len)).collect(),
        })
    }

    /// Returns the offset of the next frame: directly after the last frame in an open group, otherwise on a new block
    /// (I5).
    pub fn next_offset(&self) -> u64 {
        align_up(self.offset, if self.group_open { FRAME_ALIGN } else { GROUP_ALIGN })
    }
}

pub(super) fn live(segment: SegmentFile) -> OpenSegment {
    let SegmentFile { number, len, window, .. } = segment;
    tracing::debug!(segment = %FileName::Segment(number), len, "segment ready");
    OpenSegment { number, len, window }
}

/// The growth of the log that ends the watcher's wait.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct GrowthWatch {
    /// The batch and the number of replay bytes at which the wait ends, whichever the log reaches first. `None` if no
    /// watcher waits.
    pub(super) wanted: Option<(Lsn, u64)>,
    /// Whether another thread has asked the watching thread to stop waiting. If it is not waiting, its next wait ends
    /// at once.
    pub(super) is_called: bool,
}

impl GrowthWatch {
    /// Returns whether the log, with newest batch `lsn` and `bytes` replay bytes, has reached the growth that the
    /// watcher waits for.
    pub fn is_reached(&self, lsn: Lsn, bytes: u64) -> bool {
        self.wanted.is_some_and(|wanted| lsn >= wanted.0 || bytes >= wanted.1)
    }
}

#[cfg(test)]
mod tests {
    use remanent_format::{Folder, StoreId};

    use super::super::segments::{SegmentPool, SegmentRules, SpacePurpose};
    use super::*;
    use crate::disk::Disk;
    use crate::disk::image_spares::ImageSpares;
    use crate::options::LogIo;
    use crate::testing::sim_disk::SimDisk;

    fn opened() -> LogState {
        let disk = SimDisk::new();
        disk.make_folder(Folder::Log).unwrap();
        let rules = SegmentRules { len: 16 << 10, reserve: 0, spare_bytes: 0 };
        let (disk, store): (Arc<dyn Disk>, _) = (Arc::new(disk), StoreId([1; 16]));
        let image_spares = Arc::new(ImageSpares::none(disk.clone(), store));
        let pool = SegmentPool::new(disk, store, rules, LogIo::Mapped, image_spares).unwrap();
        let [current, next] = [1, 2].map(|number| pool.make(number, 0, SpacePurpose::User).unwrap());
        let (point, offset) = (LogPoint::default(), SEGMENT_HEADER_BLOCK);
        LogState::new(LogStart { point, chain: 0, offset, current, next, verified: Vec::new() })
    }

    #[test]
    fn sync_waits_until_enough_bytes() {
        let mut state = opened();
        // Two syncs, which took hours, have each served two threads. One of these threads has appended again.
        for began in [state.last_append; 2] {
            (0..2).for_each(|_| state.waiters.arrive());
            state.waiters.begin(began);
            state.waiters.end(began + Duration::from_secs(10_000));
        }
        state.waiters.arrive();
        for (dirty_bytes, waits) in [(0, true), (4096, true), (1 << 30, false)] {
            state.dirty_bytes = dirty_bytes;
            assert_eq!(state.more_until().is_some(), waits, "{dirty_bytes} bytes");
        }
    }

    /// Storing a frame may fail after the call of `room_for`. The log must then be unchanged.
    #[test]
    fn room_request_does_not_move_log() {
        let mut state = opened();
        let frame_len = state.current.len - SEGMENT_HEADER_BLOCK;
        assert_eq!(state.room_for(frame_len), Room::Ready);
        let OpenSegment { number, len, ref window } = state.empty[0];
        let second = OpenSegment { number: number + 1, len, window: window.clone() };
        state.empty.push_back(second);
        state.offset = state.current.len - 16;
        for _ in 0..2 {
            assert_eq!(state.room_for(frame_len), Room::NextSegment);
        }
        let number = state.current.number;
        state.roll();
        assert_eq!(
            (state.current.number, state.room_for(frame_len), state.stats.rolls),
            (number + 1, Room::Ready, 1)
        );
    }

    /// A seal between two batches is not a batch, and followers are not notified of the seal.
    #[test]
    fn first_batch_and_batches_after_idle_are_notified() {
        let mut state = opened();
        let begun = state.last_append;
        let mut ends_after = |after: u64| state.ends_silence(begun + Duration::from_micros(after));
        assert_eq!(
            [0, 1, 4_999, 9_998, 14_998, 14_999].map(&mut ends_after),
            [true, false, false, false, true, false]
        );
    }

    #[test]
    fn next_frames_fill_segment_then_roll_to_next() {
        let mut state = opened();
        let upcoming = |state: &LogState| -> Vec<_> {
            state
                .upcoming(state.upcoming_len())
                .iter()
                .map(|upcoming| (upcoming.from, upcoming.len))
                .collect()
        };
        let long = |state: &mut LogState, len: u64| {
            state.current.len = len;
            state.empty[0].len = len;
        };
        assert_eq!(upcoming(&state), [(4096, 12 << 10), (4096, 12 << 10)], "no more than there is");
        long(&mut state, 64 << 20);
        assert_eq!(upcoming(&state), [(4096, 64 << 10)], "some, for a log that was idle");
        (state.offset, state.dirty_bytes) = (5000, 1 << 20);
        assert_eq!(upcoming(&state), [(5000, 4 << 20)], "four times as much as came");
        state.dirty_bytes = 1 << 40;
        assert_eq!(upcoming(&state), [(5000, 16 << 20)], "and not too much");
        state.offset = (64 << 20) - 1000;
        assert_eq!(upcoming(&state), [((64 << 20) - 1000, 1000), (4096, (16 << 20) - 1000)]);
        state.offset = 64 << 20;
        assert_eq!(upcoming(&state), [(4096, 16 << 20)]);
    }
}
