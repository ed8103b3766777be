//! Ranges of callers' memory in which pages live, and those that callers' calls write to now. The two exclude
//! each other, and so do two pages.
//!
//! One of these serves all memory that a store gave out or took. Ranges are told apart by where they lie and
//! not by their handles, because a caller may tell the store of the same tensor twice. A lock is held for a
//! look at the list, and never while a device works.

use std::collections::BTreeMap;

use remanent_format::PageId;

use crate::base::sync::Mutex;

/// The ranges in use. Shared by threads.
#[derive(Default)]
pub(crate) struct LentRanges(Mutex<RangeUses>);

#[derive(Default)]
struct RangeUses {
    /// Ranges in which pages live, by their space and their start there. No two share a byte.
    pages: BTreeMap<(u64, u64), LentRange>,
    /// Ranges that calls write to now, each under a number of its own.
    writes: Vec<(u64, MemoryRange)>,
    next: u64,
}

struct LentRange {
    end: u64,
    page: PageId,
    /// Whether the page has given it up, and a lane may still use it.
    is_retired: bool,
}

/// A range by where it lies: a [space](super::Device::origin), and its bounds there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemoryRange {
    pub space: u64,
    pub start: u64,
    pub end: u64,
}

/// The use that keeps a range from being lent.
pub(crate) enum RangeInUse {
    /// This page lives in a part of it.
    Page(PageId),
    /// A page gave a part of it up, and a lane may still use that.
    Retired,
    /// A call writes to a part of it.
    Write,
}

impl MemoryRange {
    fn overlaps(&self, other: &Self) -> bool {
        self.space == other.space && self.start < other.end && other.start < self.end
    }
}

impl RangeUses {
    /// The page in a part of the range; of several, the one that begins last.
    fn page_in(&self, range: MemoryRange) -> Option<&LentRange> {
        // Of all that begin before this range's end, the last one to begin is the last one to end.
        let before = self.pages.range(..(range.space, range.end)).next_back();
        let is_in = |((space, _), lent): &(&(u64, u64), &LentRange)| {
            *space == range.space && lent.end > range.start && range.start < range.end
        };
        before.filter(is_in).map(|(_, lent)| lent)
    }
}

impl LentRanges {
    /// The page that lives in a part of the range.
    pub fn page_in(&self, range: MemoryRange) -> Option<PageId> {
        self.0.lock().page_in(range).map(|lent| lent.page)
    }

    /// Begins a write of a call's, and returns its number.
    ///
    /// # Errors
    /// The page that lives there.
    pub fn begin_write(&self, range: MemoryRange) -> Result<u64, PageId> {
        let mut uses = self.0.lock();
        if let Some(lent) = uses.page_in(range) {
            return Err(lent.page);
        }
        let number = uses.next;
        uses.next += 1;
        uses.writes.push((number, range));
        Ok(number)
    }

    /// Ends a write.
    pub fn end_write(&self, number: u64) {
        self.0.lock().writes.retain(|(of, _)| *of != number);
    }

    /// Lets a page live in the range, which is not empty.
    ///
    /// # Errors
    /// The use that is in the way.
    pub fn lend(&self, range: MemoryRange, page: PageId) -> Result<(), RangeInUse> {
        let mut uses = self.0.lock();
        if let Some(lent) = uses.page_in(range) {
            return Err(if lent.is_retired { RangeInUse::Retired } else { RangeInUse::Page(lent.page) });
        }
        if uses.writes.iter().any(|(_, written)| written.overlaps(&range)) {
            return Err(RangeInUse::Write);
        }
        let lent = LentRange { end: range.end, page, is_retired: false };
        uses.pages.insert((range.space, range.start), lent);
        Ok(())
    }

    /// Notes that the page has given its range up.
    pub fn retire(&self, range: MemoryRange) {
        let mut uses = self.0.lock();
        uses.pages.get_mut(&(range.space, range.start)).expect("a range that is lent").is_retired = true;
    }

    /// Nothing of the store uses the range any more.
    pub fn end(&self, range: MemoryRange) {
        let ended = self.0.lock().pages.remove(&(range.space, range.start));
        assert!(ended.is_some(), "a range that was not lent: {range:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(space: u64, start: u64, end: u64) -> MemoryRange {
        MemoryRange { space, start, end }
    }

    #[test]
    fn a_range_is_lent_once_and_its_neighbours_are_free() {
        let ranges = LentRanges::default();
        assert!(ranges.lend(range(1, 10, 20), PageId(1)).is_ok());
        for (start, end) in [(10, 20), (0, 11), (19, 30), (12, 13), (0, 100)] {
            assert_eq!(ranges.page_in(range(1, start, end)), Some(PageId(1)), "{start}..{end}");
            let in_use = ranges.lend(range(1, start, end), PageId(2));
            assert!(matches!(in_use, Err(RangeInUse::Page(PageId(1)))), "{start}..{end}");
            assert_eq!(ranges.begin_write(range(1, start, end)), Err(PageId(1)));
        }
        // Empty ranges, neighbours, and the same numbers in another space.
        for (space, start, end) in [(1, 15, 15), (1, 0, 10), (1, 20, 30), (0, 10, 20), (2, 10, 20)] {
            assert_eq!(ranges.page_in(range(space, start, end)), None, "{space}: {start}..{end}");
        }
        assert!(ranges.lend(range(1, 0, 10), PageId(3)).is_ok());
        ranges.retire(range(1, 10, 20));
        assert!(matches!(ranges.lend(range(1, 15, 25), PageId(4)), Err(RangeInUse::Retired)));
        ranges.end(range(1, 10, 20));
        assert!(ranges.lend(range(1, 10, 25), PageId(4)).is_ok());
    }

    #[test]
    fn a_range_that_is_being_written_to_is_not_lent() {
        let ranges = LentRanges::default();
        let writes = [(0, 5), (3, 9)].map(|(start, end)| ranges.begin_write(range(0, start, end)).unwrap());
        assert!(matches!(ranges.lend(range(0, 4, 5), PageId(1)), Err(RangeInUse::Write)));
        assert!(ranges.lend(range(0, 9, 12), PageId(1)).is_ok());
        ranges.end_write(writes[0]);
        assert!(matches!(ranges.lend(range(0, 4, 5), PageId(2)), Err(RangeInUse::Write)));
        ranges.end_write(writes[1]);
        assert!(ranges.lend(range(0, 4, 5), PageId(2)).is_ok());
    }
}
