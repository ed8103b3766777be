//! Where the log stands: the segment that takes frames, those ahead, and what no sync has taken yet.
//!
//! Kept behind one lock of [`super::writer::Log`]; nothing here waits or touches the disk.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use remanent_format::frame::VerifiedSnapshot;
use remanent_format::limits::{FRAME_ALIGN, GROUP_ALIGN, align_up};
use remanent_format::segment::SEGMENT_HEADER_BLOCK;
use remanent_format::{FileName, LogPoint, Lsn};

use super::group_commit::Waiters;
use super::segments::SegmentFile;
use crate::base::phases;
use crate::base::phases::Phase;
use crate::base::sync::Instant;
use crate::disk::Window;
use crate::error::Error;

/// Empty segments kept ahead of the current one. One is demanded by I8; the second is there so that a
/// roll finds the one that it must have.
pub(super) const AHEAD: usize = 2;

/// The log as an open leaves it: where the next frame goes.
pub(crate) struct LogStart {
    /// The end of the last batch.
    pub point: LogPoint,
    /// The chain hash that the next frame names: that of the opening seal.
    pub chain: u32,
    /// Where the opening seal ends.
    pub offset: u64,
    /// The opening segment.
    pub current: SegmentFile,
    /// The empty segment after it.
    pub next: SegmentFile,
    /// Snapshots that the opening seal records as verified.
    pub verified: Vec<VerifiedSnapshot>,
}

/// A batch of a mapped log that comes this long after the one before is told to followers, because no system call of the
/// log's does so. A follower looks often for longer than that, and at most 200 batches a second pay for it.
pub(crate) const TELL_AFTER: Duration = Duration::from_millis(5);

/// Bounds of [`LogState::sync_after_bytes`].
const SYNC_AFTER_MIN: u64 = 128 << 10;
const SYNC_AFTER_MAX: u64 = 8 << 20;

/// Bounds of [`LogState::upcoming_len`].
const UPCOMING_MIN: u64 = 64 << 10;
const UPCOMING_MAX: u64 = 16 << 20;

/// What the log has done since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LogStats {
    /// Batches appended.
    pub batches: u64,
    /// Seals appended.
    pub seals: u64,
    /// Bytes of frames, padding included.
    pub bytes: u64,
    /// Groups made durable.
    pub syncs: u64,
    /// Segments entered.
    pub rolls: u64,
}

pub(super) struct LogState {
    pub current: LiveSegments,
    pub ahead: VecDeque<LiveSegments>,
    pub point: LogPoint,
    pub chain: u32,
    pub offset: u64,
    /// Whether the next frame joins the group of the last one.
    pub group_open: bool,
    /// Ranges that no sync has taken yet.
    pub dirty: Vec<DirtyRange>,
    pub dirty_bytes: u64,
    pub dirty_since: Option<Instant>,
    /// Segments left behind, with their last batch, until that is durable.
    pub left_behind: VecDeque<(u64, Lsn)>,
    /// Seals that are synced.
    pub seals_durable: u64,
    /// Seals given up because the disk is full, or the system short of something; and why the last one was.
    pub seals_refused: u64,
    pub seal_refusal: Option<Error>,
    pub durable: Lsn,
    /// Whether a thread is syncing; another one waits for it.
    pub syncing: bool,
    /// The newest batch that the last sync began with; what comes after it waits for the next one.
    pub sync_target: Lsn,
    /// Syncs begun.
    pub syncs_begun: usize,
    pub waiters: Waiters,
    /// Whether the keeper sleeps until it is woken. Else it looks again by itself before the next frame is due.
    pub keeper_asleep: bool,
    /// Whether the last frame is a seal that says all there is to say.
    pub sealed: bool,
    pub seal_now: bool,
    /// Whether a seal was given up that may take the reserve when the store closes.
    pub seal_missed: bool,
    pub last_append: Instant,
    /// When the newest batch was appended, of those since the log was opened, as far as [`Self::ends_silence`] knows.
    last_batch: Option<Instant>,
    pub verified: Vec<VerifiedSnapshot>,
    pub grow_after: Option<Instant>,
    pub reserve_full: bool,
    pub stop: bool,
    pub watch: GrowthWatch,
    pub stats: LogStats,
    /// Bytes of the images that were written ahead of batches appended.
    pub ahead_bytes: u64,
}

pub(super) struct LiveSegments {
    pub number: u64,
    pub len: u64,
    pub window: Arc<dyn Window>,
}

pub(super) struct DirtyRange {
    pub window: Arc<dyn Window>,
    pub from: u64,
    pub to: u64,
}

/// Where frames will go.
pub(super) struct NextSegments {
    pub window: Arc<dyn Window>,
    pub from: u64,
    pub len: u64,
}

pub(super) enum Room {
    Ready,
    AfterGrowth,
    AfterSync(Lsn),
}

impl LogState {
    /// The log of an open store, to which nothing was appended yet.
    pub fn new(start: LogStart) -> Self {
        let (current, next) = (live(start.current), live(start.next));
        let now = Instant::now();
        Self {
            current,
            ahead: VecDeque::from([next]),
            point: start.point,
            chain: start.chain,
            offset: start.offset,
            group_open: false,
            dirty: Vec::new(),
            dirty_bytes: 0,
            dirty_since: None,
            left_behind: VecDeque::new(),
            seals_durable: 0,
            seals_refused: 0,
            seal_refusal: None,
            durable: start.point.lsn,
            syncing: false,
            sync_target: start.point.lsn,
            syncs_begun: 0,
            waiters: Waiters::new(now),
            keeper_asleep: false,
            sealed: true,
            seal_now: false,
            seal_missed: false,
            last_append: now,
            last_batch: None,
            verified: start.verified,
            grow_after: None,
            reserve_full: false,
            stop: false,
            watch: GrowthWatch::default(),
            stats: LogStats::default(),
            ahead_bytes: 0,
        }
    }

    /// Finds room for a frame of `frame_len` bytes, going on to the next segment where that is allowed.
    pub fn room_for(&mut self, frame_len: u64) -> Room {
        if self.next_offset() + frame_len <= self.current.len {
            return Room::Ready;
        }
        let long_enough = self.ahead.front().is_some_and(|next| SEGMENT_HEADER_BLOCK + frame_len <= next.len);
        // I8: the segment after the one that we enter exists, synced, with its name.
        if !long_enough || self.ahead.len() < AHEAD {
            return Room::AfterGrowth;
        }
        // No frame enters a segment before the last but one is durable, so that a power cut never finds
        // more than two of them unsynced.
        if let Some(&(_, last)) = self.left_behind.back() {
            return Room::AfterSync(last);
        }
        let _phase = phases::enter(Phase::SegmentRoll);
        if self.point.lsn > self.durable {
            self.left_behind.push_back((self.current.number, self.point.lsn));
        }
        self.current = self.ahead.pop_front().expect("two are ahead");
        self.offset = SEGMENT_HEADER_BLOCK;
        self.group_open = false;
        self.stats.rolls += 1;
        Room::Ready
    }

    /// Whether a batch that was appended `now` is the first one in a while.
    pub fn ends_silence(&mut self, now: Instant) -> bool {
        let last = self.last_batch.replace(now);
        last.is_none_or(|last| last + TELL_AFTER <= now)
    }

    /// How many bytes of frames may come until the keeper looks again: four times as many as no sync has taken yet, for
    /// it may be some syncs until then, and some where there are few.
    pub fn upcoming_len(&self) -> u64 {
        self.dirty_bytes.saturating_mul(4).clamp(UPCOMING_MIN, UPCOMING_MAX)
    }

    /// The places of the next `len` bytes of frames.
    pub fn upcoming(&self, len: u64) -> Vec<NextSegments> {
        let mut left = len;
        let here = (&self.current, self.offset);
        let places = [here].into_iter().chain(self.ahead.front().map(|next| (next, SEGMENT_HEADER_BLOCK)));
        let upcoming = places.map(|(segment, from)| {
            let len = left.min(segment.len.saturating_sub(from));
            left -= len;
            NextSegments { window: segment.window.clone(), from, len }
        });
        upcoming.filter(|upcoming| upcoming.len > 0).collect()
    }

    /// Until when the next sync waits for more; `None` if it may begin.
    pub fn more_until(&self) -> Option<Instant> {
        self.waiters.more_until(self.dirty_bytes, Instant::now())
    }

    /// The keeper syncs at once when so many bytes are not synced yet. After a crash an open copies them, and on a full
    /// disk it has only the reserve for it, of which each segment is as long as this one.
    pub fn sync_after_bytes(&self) -> u64 {
        (self.current.len / 2).clamp(SYNC_AFTER_MIN, SYNC_AFTER_MAX)
    }

    /// Bytes that a replay reads of what was appended: frames, and the images that they name.
    pub fn replay_bytes(&self) -> u64 {
        self.stats.bytes + self.ahead_bytes
    }

    /// Where the next frame begins.
    pub fn next_offset(&self) -> u64 {
        align_up(self.offset, if self.group_open { FRAME_ALIGN } else { GROUP_ALIGN })
    }
}

pub(super) fn live(segment: SegmentFile) -> LiveSegments {
    let SegmentFile { number, len, window, .. } = segment;
    tracing::debug!(segment = %FileName::Segment(number), len, "segment ready");
    LiveSegments { number, len, window }
}

/// What the watcher waits for.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct GrowthWatch {
    /// A batch, or bytes of frames and of images written ahead: either is enough.
    pub(super) wanted: Option<(Lsn, u64)>,
    /// Whether the watcher was called before it could wait.
    pub(super) called: bool,
}

impl GrowthWatch {
    /// Whether the watcher waits for what has just come about.
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
    use crate::options::LogIo;
    use crate::testing::sim_disk::SimDisk;

    fn opened() -> LogState {
        let disk = SimDisk::new();
        disk.make_folder(Folder::Log).unwrap();
        let rules = SegmentRules { len: 16 << 10, reserve: 0, spare_bytes: 0 };
        let pool = SegmentPool::new(Arc::new(disk), StoreId([1; 16]), rules, LogIo::Mapped).unwrap();
        let [current, next] = [1, 2].map(|number| pool.make(number, 0, SpacePurpose::User).unwrap());
        let (point, offset) = (LogPoint::default(), SEGMENT_HEADER_BLOCK);
        LogState::new(LogStart { point, chain: 0, offset, current, next, verified: Vec::new() })
    }

    #[test]
    fn a_sync_waits_for_more_until_it_takes_enough_bytes() {
        let mut state = opened();
        // Two syncs that took hours have served two threads, and one of them is back.
        for began in [state.last_append; 2] {
            (0..2).for_each(|_| state.waiters.come());
            state.waiters.begin(began);
            state.waiters.end(began + Duration::from_secs(10_000));
        }
        state.waiters.come();
        for (dirty_bytes, waits) in [(0, true), (4096, true), (1 << 30, false)] {
            state.dirty_bytes = dirty_bytes;
            assert_eq!(state.more_until().is_some(), waits, "{dirty_bytes} bytes");
        }
    }

    /// A seal in between, which nobody is told of, is no batch.
    #[test]
    fn the_first_batch_and_those_after_a_silence_are_told() {
        let mut state = opened();
        let begun = state.last_append;
        let mut tells = |after: u64| state.ends_silence(begun + Duration::from_micros(after));
        assert_eq!(
            [0, 1, 4_999, 9_998, 14_998, 14_999].map(&mut tells),
            [true, false, false, false, true, false]
        );
    }

    #[test]
    fn the_next_frames_go_to_the_rest_of_the_segment_and_into_the_next_one() {
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
            state.ahead[0].len = len;
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
