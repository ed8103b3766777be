//! The spares by length: which are kept for opens, which are the reserve, and which are surplus.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::base::sync::atomic::AtomicUsize;

/// The length of a log's first segments, unless segments are shorter anyway. A log of 16 MiB segments takes
/// 80 MB before anything is written; with this length a young store, or an opening that commits little, takes
/// little.
pub(super) const FIRST_LEN: u64 = 256 << 10;

/// Spares of any length that are held in addition to the reserve, so that a store on a full disk can be
/// opened again.
///
/// An open takes two segments: its own, and an empty one after it. It gets back the empty one that the log
/// ended with. It gets back the other one only if the store committed nothing since it was opened; otherwise
/// the log has grown by one segment. So two must be left after the next open, for the opens that follow, and
/// the next open itself takes two more. The fifth is for the manifest of a snapshot that gives back the space
/// of deleted pages, also if the store is opened between the delete and the snapshot.
pub(super) const KEPT_FOR_OPENS: usize = 5;

/// While segments grow, a spare is long enough for the reserve if it has this part of the next segment's
/// length. So the reserve is not made anew at each step.
const RESERVE_SHARE: u64 = 4;

/// How long segments are, and how many spares wait.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SegmentRules {
    /// The length in bytes up to which a log's segments grow.
    pub len: u64,
    /// Number of spares that are kept back for a full disk.
    pub reserve: usize,
    /// Bytes of spares that are kept in addition to those. One spare is kept in any case, unless this is 0.
    /// They give way to every caller that finds the disk full.
    pub spare_bytes: u64,
}

impl SegmentRules {
    /// Number of spares that are kept for opens: none if nothing is kept back at all.
    pub(super) fn kept_for_opens(&self) -> usize {
        if self.reserve == 0 { 0 } else { KEPT_FOR_OPENS }
    }

    /// Number of spares that are kept back in all.
    pub(super) fn kept_back(&self) -> usize {
        self.reserve.saturating_add(self.kept_for_opens())
    }
}

/// A file that is ready to become a segment: preallocated, synced, under a name that recovery does not read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spare {
    pub number: u64,
    pub len: u64,
}

/// The spares by length, and how long the next segment is.
pub(super) struct Spares {
    /// The spares, from the shortest to the longest.
    pub files: Vec<Spare>,
    /// The length of the next segment that is made because the log grows.
    pub next_len: u64,
    rules: SegmentRules,
    /// How many spares there are, for readers that hold no lock.
    pub count: Arc<AtomicUsize>,
}

impl Spares {
    pub(super) fn new(rules: SegmentRules) -> Self {
        Self { files: Vec::new(), next_len: FIRST_LEN.min(rules.len), rules, count: Arc::default() }
    }

    /// How long a spare of the reserve must be: as long as the segment that takes frames. After a crash an
    /// open copies the batches that no mark proves, and on a full disk it has only the reserve for them.
    pub(super) fn reserve_len(&self) -> u64 {
        // While segments grow, the one in use is at most a quarter as long as the next one that is made.
        if self.next_len == self.rules.len { self.rules.len } else { self.next_len / RESERVE_SHARE }
    }

    /// How many spares are kept for opens now; they are the shortest ones.
    pub(super) fn kept_for_opens(&self) -> usize {
        self.rules.kept_for_opens().min(self.files.len())
    }

    /// The places of the reserve among the spares: the shortest that are long enough, otherwise the longest.
    pub(super) fn reserve(&self) -> Range<usize> {
        let count = self.rules.reserve;
        let long = self.files.partition_point(|spare| spare.len < self.reserve_len());
        let start = long.max(self.kept_for_opens()).min(self.files.len().saturating_sub(count));
        start..(start + count).min(self.files.len())
    }

    /// Whether fewer spares are long enough for the reserve than it should have.
    pub(super) fn lacks_long(&self) -> bool {
        let short = self.files.partition_point(|spare| spare.len < self.reserve_len());
        self.files.len() - short < self.rules.reserve
    }

    /// How many spares are missing, of the reserve and of those kept for opens.
    pub(super) fn lacking(&self) -> usize {
        self.rules.kept_back().saturating_sub(self.files.len())
    }

    pub(super) fn is_full(&self) -> bool {
        self.lacking() == 0 && !self.lacks_long()
    }

    pub(super) fn add(&mut self, spare: Spare) {
        let at = self.files.partition_point(|other| other.len <= spare.len);
        self.files.insert(at, spare);
        self.count.store(self.files.len(), Ordering::Release);
    }

    pub(super) fn take(&mut self, at: usize) -> Spare {
        let spare = self.files.remove(at);
        self.count.store(self.files.len(), Ordering::Release);
        spare
    }

    pub(super) fn next_number(&self) -> u64 {
        self.files.iter().map(|spare| spare.number + 1).max().unwrap_or(0)
    }

    /// Bytes of the spares that are neither kept for opens nor the reserve's.
    pub(super) fn surplus_bytes(&self) -> u64 {
        let (kept, reserve) = (self.kept_for_opens(), self.reserve());
        let surplus = self.files.iter().enumerate().filter(|(at, _)| *at >= kept && !reserve.contains(at));
        surplus.map(|(_, spare)| spare.len).sum()
    }

    /// Whether more bytes of spares lie beyond the reserve than may. The allowance is at least the longest
    /// spare.
    pub(super) fn are_too_many(&self) -> bool {
        let longest = self.files.last().map_or(0, |spare| spare.len);
        let allowed = if self.rules.spare_bytes == 0 { 0 } else { self.rules.spare_bytes.max(longest) };
        self.surplus_bytes() > allowed
    }

    /// Notes that the log has got a segment of this length because it grew.
    pub(super) fn grown(&mut self, len: u64) {
        self.next_len = (2 * self.next_len).max(len).min(self.rules.len);
    }
}
