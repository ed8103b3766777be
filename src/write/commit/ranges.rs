//! The ranges of a page that a capture looks at, in parts of bounded length.
//!
//! Ranges that a caller names may overlap, come in any order, and lie anywhere. The device compares
//! vectors, so they are widened, merged and cut here, once, on the host.

use std::ops::Range;

use remanent_format::{Epoch, PageId};

use crate::device::Span;
use crate::error::{Error, Result};

/// Parts to look at: ranges of a page, each with where it begins in the staged bytes.
pub(super) type RangeParts = [(Range<u64>, u64)];

/// The boundary to which ranges are widened: the device compares vectors of sixteen bytes.
pub(super) const RANGE_ALIGN: u64 = 16;

/// The longest part that is compared as one, so that a part's elements are counted in 32 bits.
const PART_LEN_MAX: u64 = 256 << 20;

/// Widens the ranges to boundaries, multiples of `align` and the page's end, merges and cuts them. Each part
/// comes with where it begins when they lie one after the other, on boundaries again. Without ranges it is
/// the whole page.
///
/// # Errors
/// `OutOfBounds` for a range that is not within the page, or ends before it begins: a caller's mistake
/// must not wrap around.
pub(super) fn parts(
    page: PageId,
    ranges: Option<&[Range<u64>]>,
    page_len: u64,
    align: u64,
) -> Result<Vec<(Range<u64>, u64)>> {
    let mut wanted = Vec::new();
    let all = 0..page_len;
    for range in ranges.unwrap_or(std::slice::from_ref(&all)) {
        if range.start > range.end || range.end > page_len {
            let len = range.end.saturating_sub(range.start);
            return Err(Error::OutOfBounds { page, offset: range.start, len, page_len });
        }
        if range.is_empty() {
            continue;
        }
        let start = range.start / align * align;
        // Widened bytes are compared like the others: a change in them is captured, too, and nothing is
        // lost by it.
        wanted.push(start..range.end.next_multiple_of(align).min(page_len));
    }
    wanted.sort_unstable_by_key(|range| range.start);
    let mut merged: Vec<Range<u64>> = Vec::new();
    for range in wanted {
        // Merged, so that no element is found twice: twice in one sparse delta would be refused.
        match merged.last_mut().filter(|last| range.start <= last.end) {
            Some(last) => last.end = last.end.max(range.end),
            None => merged.push(range),
        }
    }
    let parts = merged.into_iter().flat_map(|range| {
        let end = range.end;
        range.step_by(PART_LEN_MAX as usize).map(move |start| start..end.min(start + PART_LEN_MAX))
    });
    let mut next = 0;
    Ok(parts
        .map(|range| {
            let at = next;
            next = (at + range.end - range.start).next_multiple_of(RANGE_ALIGN);
            (range, at)
        })
        .collect())
}

/// A range of a span, as a span of its own.
pub(super) fn part(span: Span, range: &Range<u64>) -> Span {
    Span { offset: span.offset + range.start, len: range.end - range.start, ..span }
}

/// Refuses a page that is not at the epoch that its working copy belongs to: the changes found would take
/// back the changes of others.
pub(super) fn check_epoch(page: PageId, expected: Epoch, found: Epoch) -> Result<()> {
    if expected == found { Ok(()) } else { Err(Error::Conflict { page, expected, found }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ranges as callers give them: empty, overlapping, in any order, reversed, past the end.
    #[test]
    fn ranges_are_widened_merged_and_cut() {
        let of = |ranges: &[Range<u64>], len| parts(PageId(1), Some(ranges), len, RANGE_ALIGN).unwrap();
        assert_eq!(of(&[], 100), []);
        assert_eq!(of(&[5..5, 100..100], 100), []);
        assert_eq!(of(&[70..71, 3..4, 17..20], 100), [(0..32, 0), (64..80, 32)]);
        assert_eq!(of(&[0..20, 50..99], 99), [(0..32, 0), (48..99, 32)]);
        assert_eq!(of(&[0..60, 3..4], 100), [(0..64, 0)], "one range within another");
        let long = PART_LEN_MAX + 20;
        assert_eq!(of(&[0..9, 9..long], long), [(0..PART_LEN_MAX, 0), (PART_LEN_MAX..long, PART_LEN_MAX)]);
        assert_eq!(parts(PageId(1), None, 7, RANGE_ALIGN).unwrap(), [(0..7, 0)]);
        assert!(matches!(
            parts(PageId(1), Some(&[0..1, 90..101]), 100, RANGE_ALIGN),
            Err(Error::OutOfBounds { len: 11, .. })
        ));
        #[allow(clippy::reversed_empty_ranges, reason = "a caller may")]
        let reversed = parts(PageId(1), Some(&[9..3, 0..1]), 100, RANGE_ALIGN);
        assert!(reversed.is_err());
    }
}
