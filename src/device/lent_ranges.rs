//! The ranges of callers' memory in which pages are stored, and the ranges that callers' calls and streams currently
//! use. A page is stored only in a range without any other use.
//!
//! One instance covers all memory that a store has returned to callers or adopted from them. Ranges are identified by
//! address and not by handle, because a caller may register the same tensor twice. The lock is held only to access the
//! list, never while a device works.

use std::collections::BTreeMap;
use std::sync::Arc;

use remanent_format::PageId;

use super::stream_uses::Access;
use crate::base::sync::Mutex;

/// The ranges of callers' memory in use, shared by threads.
#[derive(Default)]
pub(crate) struct LentRanges(Mutex<RangeUses>);

#[derive(Default)]
struct RangeUses {
    /// Ranges in which pages are stored, by address space and start. No two ranges share a byte.
    pages: BTreeMap<(u64, u64), LentRange>,
    /// Ranges that callers currently use. Each use has a unique number.
    callers: Vec<(u64, MemoryRange, CallerUse)>,
    next: u64,
}

/// A caller's use of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallerUse {
    /// A call that writes.
    Call,
    /// A stream with an open guard.
    Stream(Access),
}

/// The right of a call or a guard to use a range. No page is stored in the range until this value is dropped.
pub(crate) struct RangeUse {
    ranges: Arc<LentRanges>,
    number: u64,
}

impl Drop for RangeUse {
    fn drop(&mut self) {
        self.ranges.0.lock().callers.retain(|(number, ..)| *number != self.number);
    }
}

struct LentRange {
    end: u64,
    page: PageId,
    /// Whether the page has left the range while a lane may still use it.
    is_retired: bool,
}

/// The location of a range: a [space](super::LentMemory::origin), and its bounds in that space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemoryRange {
    pub space: u64,
    pub start: u64,
    pub end: u64,
}

/// The reason why a page cannot be stored in a range.
pub(crate) enum RangeInUse {
    /// This page is stored in a part of the range.
    Page(PageId),
    /// A page has left a part of the range while a lane may still use that part.
    Retired,
    /// A caller uses a part of the range.
    Caller,
}

impl MemoryRange {
    pub fn overlaps(&self, other: &Self) -> bool {
        self.space == other.space && self.start < other.end && other.start < self.end
    }
}

impl RangeUses {
    /// Returns the page in a part of the range. If there are several, returns the one that begins last.
    fn page_in(&self, range: MemoryRange) -> Option<&LentRange> {
        // The ranges are disjoint. Of all ranges that begin before the end of `range`, the one that begins last also
        // ends last.
        let before = self.pages.range(..(range.space, range.end)).next_back();
        let is_in = |((space, _), lent): &(&(u64, u64), &LentRange)| {
            *space == range.space && lent.end > range.start && range.start < range.end
        };
        before.filter(is_in).map(|(_, lent)| lent)
    }
}

impl LentRanges {
    /// Returns the page that is stored in a part of the range.
    pub fn page_in(&self, range: MemoryRange) -> Option<PageId> {
        self.0.lock().page_in(range).map(|lent| lent.page)
    }

    /// Begins a caller's use of a range.
    ///
    /// # Errors
    /// If the use writes and a page is stored in the range, returns the id of that page, because only the store may write
    /// to a page.
    pub fn begin(self: &Arc<Self>, range: MemoryRange, by: CallerUse) -> Result<RangeUse, PageId> {
        let mut uses = self.0.lock();
        if by != CallerUse::Stream(Access::Read)
            && let Some(lent) = uses.page_in(range)
        {
            return Err(lent.page);
        }
        let number = uses.next;
        uses.next += 1;
        uses.callers.push((number, range, by));
        Ok(RangeUse { ranges: self.clone(), number })
    }

    /// Returns whether a stream currently uses a part of the range in a way that excludes `access`.
    pub fn is_excluded_by_stream(&self, range: MemoryRange, access: Access) -> bool {
        let is_in_the_way = |(_, used, by): &(u64, MemoryRange, CallerUse)| match by {
            CallerUse::Stream(other) => access.excludes(*other) && used.overlaps(&range),
            CallerUse::Call => false,
        };
        self.0.lock().callers.iter().any(is_in_the_way)
    }

    /// Records that a page is stored in the range, which must not be empty.
    ///
    /// # Errors
    /// The conflicting use.
    pub fn lend(&self, range: MemoryRange, page: PageId) -> Result<(), RangeInUse> {
        let mut uses = self.0.lock();
        if let Some(lent) = uses.page_in(range) {
            return Err(if lent.is_retired { RangeInUse::Retired } else { RangeInUse::Page(lent.page) });
        }
        if uses.callers.iter().any(|(_, used, _)| used.overlaps(&range)) {
            return Err(RangeInUse::Caller);
        }
        let lent = LentRange { end: range.end, page, is_retired: false };
        uses.pages.insert((range.space, range.start), lent);
        Ok(())
    }

    /// Records that the page has left its range while a lane may still use it.
    pub fn retire(&self, range: MemoryRange) {
        let mut uses = self.0.lock();
        uses.pages.get_mut(&(range.space, range.start)).expect("a range that is lent").is_retired = true;
    }

    /// Removes the range. The store no longer uses it.
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
        let ranges = Arc::new(LentRanges::default());
        assert!(ranges.lend(range(1, 10, 20), PageId(1)).is_ok());
        for (start, end) in [(10, 20), (0, 11), (19, 30), (12, 13), (0, 100)] {
            assert_eq!(ranges.page_in(range(1, start, end)), Some(PageId(1)), "{start}..{end}");
            let in_use = ranges.lend(range(1, start, end), PageId(2));
            assert!(matches!(in_use, Err(RangeInUse::Page(PageId(1)))), "{start}..{end}");
            let uses = [CallerUse::Call, CallerUse::Stream(Access::Write), CallerUse::Stream(Access::Read)];
            let refused = uses.map(|by| ranges.begin(range(1, start, end), by).err());
            assert_eq!(refused, [Some(PageId(1)), Some(PageId(1)), None], "only the store writes there");
        }
        // An empty range, adjacent ranges, and the same offsets in another address space.
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
    fn range_in_use_is_not_lent() {
        for by in [CallerUse::Call, CallerUse::Stream(Access::Read), CallerUse::Stream(Access::Write)] {
            let ranges = Arc::new(LentRanges::default());
            let begin = |(start, end)| ranges.begin(range(0, start, end), by).ok().unwrap();
            let [first, second] = [(0, 5), (3, 9)].map(begin);
            assert!(matches!(ranges.lend(range(0, 4, 5), PageId(1)), Err(RangeInUse::Caller)));
            assert!(ranges.lend(range(0, 9, 12), PageId(1)).is_ok());
            drop(first);
            assert!(matches!(ranges.lend(range(0, 4, 5), PageId(2)), Err(RangeInUse::Caller)));
            let excluded = [Access::Read, Access::Write].map(|access| {
                [4, 9].map(|start| ranges.is_excluded_by_stream(range(0, start, start + 1), access))
            });
            let expected = match by {
                CallerUse::Call => [false, false],
                CallerUse::Stream(Access::Read) => [false, true],
                CallerUse::Stream(Access::Write) => [true, true],
            };
            assert_eq!(excluded, expected.map(|is_excluded| [is_excluded, false]), "{by:?}");
            drop(second);
            assert!(ranges.lend(range(0, 4, 5), PageId(2)).is_ok());
        }
    }
}
