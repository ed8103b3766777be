//! The spares by length, in three groups: those kept for opens, the reserve, and the surplus.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::base::sync::atomic::AtomicUsize;

/// The length in bytes of a log's first segments, unless the maximum length of segments is shorter.
///
/// A log with segments of 16 MiB takes 80 MB before anything is written. With this length, a young store or an opening
/// with few commits takes little space. With segments of 16 KiB, which contain three groups, an opening with few
/// commits would need two.
pub(super) const FIRST_LEN: u64 = 64 << 10;

/// The length below which segments grow by `STEEP_GROWTH` instead of `GROWTH`, so that a log that is busy from the
/// start quickly reaches long segments.
const STEEP_LEN: u64 = 256 << 10;
const STEEP_GROWTH: u64 = 4;
const GROWTH: u64 = 2;

/// The number of spares, of any length, that are kept in addition to the reserve, so that a store on a full disk can be
/// opened again.
///
/// An open uses two segments: its own, and an empty segment after it. The open gets back the empty segment at the end
/// of the log. Its own segment becomes a spare again only if the store commits nothing after the open. Otherwise the
/// log has grown by one segment. So two spares must remain after the next open, for later opens, and the next open
/// itself uses two more. The fifth is for the manifest of a snapshot that frees the space of deleted pages, even if the
/// store is opened between the delete and the snapshot.
pub(super) const SPARES_FOR_OPENS: usize = 5;

/// While segments grow, a spare in the reserve is at least as long as the next segment divided by this value.
/// With this bound, the reserve is not replaced at each growth step.
const RESERVE_SHARE: u64 = 4;

/// The limits on the length of segments and on the number of spares.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SegmentRules {
    /// The maximum length in bytes to which a log's segments grow.
    pub len: u64,
    /// The number of spares that are kept in reserve for a full disk.
    pub reserve: usize,
    /// The maximum number of bytes of spares in excess of the reserve. Unless this value is 0, one such spare is kept
    /// regardless of its length. The excess spares are removed when the disk is full.
    pub spare_bytes: u64,
}

impl SegmentRules {
    /// Returns the number of spares to keep for opens. The number is 0 without a reserve.
    pub(super) fn open_spare_count(&self) -> usize {
        if self.reserve == 0 { 0 } else { SPARES_FOR_OPENS }
    }

    /// Returns the total number of spares to keep in reserve and for opens.
    pub(super) fn reserved_spare_count(&self) -> usize {
        self.reserve.saturating_add(self.open_spare_count())
    }
}

/// A preallocated and synced file that can become a segment. Its name marks the file as a spare, so recovery does not
/// read it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spare {
    pub number: u64,
    pub len: u64,
}

/// The spares of a log, and the length of its next segment.
pub(super) struct Spares {
    /// The spares, in ascending order of length.
    pub files: Vec<Spare>,
    /// The length of the next segment that is created for growth.
    pub next_len: u64,
    /// Whether the log has created the three segments with which it begins.
    has_begun: bool,
    rules: SegmentRules,
    /// The number of spares, for readers without the lock.
    pub count: Arc<AtomicUsize>,
}

impl Spares {
    pub(super) fn new(rules: SegmentRules) -> Self {
        let next_len = FIRST_LEN.min(rules.len);
        Self { files: Vec::new(), next_len, has_begun: false, rules, count: Arc::default() }
    }

    /// Returns the minimum length of a spare in the reserve: the length of the current segment. After a crash, an open
    /// copies the batches that no durable mark covers, and on a full disk only the reserve has space for the copies.
    pub(super) fn reserve_len(&self) -> u64 {
        // While segments grow, the current segment is at most a quarter as long as the next one to be created.
        if self.next_len == self.rules.len { self.rules.len } else { self.next_len / RESERVE_SHARE }
    }

    /// Returns the number of existing spares that are kept for opens. These spares are the shortest.
    pub(super) fn open_spare_count(&self) -> usize {
        self.rules.open_spare_count().min(self.files.len())
    }

    /// Returns the indices of the spares that form the reserve: the shortest spares of sufficient length, or the
    /// longest spares if too few are long enough.
    pub(super) fn reserve(&self) -> Range<usize> {
        let count = self.rules.reserve;
        let long = self.files.partition_point(|spare| spare.len < self.reserve_len());
        let start = long.max(self.open_spare_count()).min(self.files.len().saturating_sub(count));
        start..(start + count).min(self.files.len())
    }

    /// Returns whether too few spares are long enough for the reserve.
    pub(super) fn is_short_of_long_spares(&self) -> bool {
        let short = self.files.partition_point(|spare| spare.len < self.reserve_len());
        self.files.len() - short < self.rules.reserve
    }

    /// Returns the number of spares that are missing from the reserve and from the spares for opens.
    pub(super) fn lacking(&self) -> usize {
        self.rules.reserved_spare_count().saturating_sub(self.files.len())
    }

    pub(super) fn is_full(&self) -> bool {
        self.lacking() == 0 && !self.is_short_of_long_spares()
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

    /// Returns the total length of the spares that are neither kept for opens nor in the reserve.
    pub(super) fn surplus_bytes(&self) -> u64 {
        let (kept, reserve) = (self.open_spare_count(), self.reserve());
        let surplus = self.files.iter().enumerate().filter(|(at, _)| *at >= kept && !reserve.contains(at));
        surplus.map(|(_, spare)| spare.len).sum()
    }

    /// Returns whether the spares beyond the reserve occupy more than [`SegmentRules::spare_bytes`]. Unless that value
    /// is 0, one spare of any length is permitted.
    pub(super) fn are_too_many(&self) -> bool {
        let longest = self.files.last().map_or(0, |spare| spare.len);
        let allowed = if self.rules.spare_bytes == 0 { 0 } else { self.rules.spare_bytes.max(longest) };
        self.surplus_bytes() > allowed
    }

    /// Records that the log added a segment of this length, either as growth or as one of its first segments.
    pub(super) fn grown(&mut self, len: u64) {
        // The first segments of an opening do not count as growth, so that an opening with few commits needs only a
        // short reserve.
        if !std::mem::replace(&mut self.has_begun, true) && len <= self.next_len {
            return;
        }
        let growth = if self.next_len < STEEP_LEN { STEEP_GROWTH } else { GROWTH };
        self.next_len = (growth * self.next_len).max(len).min(self.rules.len);
    }
}
