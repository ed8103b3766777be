//! Divides the ranges of a page that a capture examines into parts of bounded length.
//!
//! The ranges of a caller may overlap and come in any order, at any offset. The device compares vectors, so the host
//! first widens, merges and splits the ranges.

use std::ops::Range;

use remanent_format::{Epoch, PageId};

use crate::device::Span;
use crate::error::{Error, Result};

/// The parts of a page that a capture examines: ranges of the page, each with its offset in the staged bytes.
pub(super) type RangeParts = [(Range<u64>, u64)];

/// The alignment in bytes to which ranges are widened, because the device compares vectors of sixteen bytes.
pub(super) const RANGE_ALIGN: u64 = 16;

/// The maximum length of a part in bytes, so that the elements of a part can be counted with 32 bits.
const PART_LEN_MAX: u64 = 256 << 20;

/// Widens the ranges to multiples of `align`, or to the end of the page, and then merges and splits them. Without
/// ranges, the parts cover the whole page. Returns the parts, each with its offset in staging memory that contains all
/// parts one after another, aligned.
///
/// # Errors
/// `OutOfBounds` for a range that is not within the page, or that ends before it begins.
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
        // The added bytes are examined too. If they have changed, capturing these changes is harmless.
        wanted.push(start..range.end.next_multiple_of(align).min(page_len));
    }
    wanted.sort_unstable_by_key(|range| range.start);
    let mut merged: Vec<Range<u64>> = Vec::new();
    for range in wanted {
        // Ranges are merged so that no element is found twice, because a sparse delta with duplicates is refused.
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

/// Returns the part of `span` that `range` covers.
pub(super) fn part(span: Span, range: &Range<u64>) -> Span {
    Span { offset: span.offset + range.start, len: range.end - range.start, ..span }
}

/// Returns an error if a page does not have the epoch `expected` of its working copy. The changes found in the copy
/// would then revert changes of other batches.
pub(super) fn check_epoch(page: PageId, expected: Epoch, found: Epoch) -> Result<()> {
    if expected == found { Ok(()) } else { Err(Error::Conflict { page, expected, found }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tests ranges as callers may specify them: empty, overlapping, unordered, reversed, past the end.
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
