//! Encodes the changes that a capture found: as a range where changed elements are close together, and as single
//! elements elsewhere.
//!
//! In the log, a range takes the header of an operation, padding, and the unchanged elements between the changed ones.
//! A single element takes its index and its bytes. A masked delta would need the whole range plus a mask, so it is
//! never shorter.

use std::ops::Range;

use remanent_format::Width;
use remanent_format::op::OP_HEADER_LEN;

use crate::base::allocation::make_room;
use crate::error::Result;

/// The overhead in bytes of logging a range: the header of an operation, and the padding of its body.
const RANGE_COST: u64 = OP_HEADER_LEN as u64 + 16;
/// The length in bytes of an index in the log. Almost every index takes one byte.
const INDEX_COST: u64 = 1;

/// The changed elements of a part of a page, divided into ranges and single elements.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ElementChanges {
    /// Changes that are logged as ranges of elements.
    pub runs: Vec<Range<u32>>,
    /// The changed elements outside `runs`, in ascending order. They are logged as single elements.
    pub elements: Vec<u32>,
}

impl ElementChanges {
    /// Finds the changes in a bitmap with one bit per element, lowest bit first. A set bit marks a changed element.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn of_bitmap(bitmap: &[u8], width: Width) -> Result<Self> {
        Self::of(set_bits(bitmap), width)
    }

    /// Finds the changes in a sequence of changed elements, given as ascending indices.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn of(changed_elements: impl Iterator<Item = u32>, width: Width) -> Result<Self> {
        let width = width.bytes() as u64;
        let mut changed = Self::default();
        make_room(&mut changed.elements, changed_elements.size_hint().0)?;
        // The range being extended, and the position in `elements` of its first element.
        let (mut run, mut first) = (0..0, 0);
        for element in changed_elements {
            let gap = u64::from(element - run.end) * width;
            if changed.elements.len() == first || gap >= RANGE_COST {
                changed.close(&run, first, width);
                (run, first) = (element..element, changed.elements.len());
            }
            run.end = element + 1;
            changed.elements.push(element);
        }
        changed.close(&run, first, width);
        // The list is kept until the batch is logged, so excess capacity is released.
        changed.elements.shrink_to(2 * changed.elements.len());
        Ok(changed)
    }

    /// Completes the current range. If single elements are shorter in the log, the range is split into its changed
    /// elements.
    fn close(&mut self, run: &Range<u32>, first: usize, width: u64) {
        let as_elements = (self.elements.len() - first) as u64 * (width + INDEX_COST);
        if RANGE_COST + run.len() as u64 * width < as_elements {
            self.elements.truncate(first);
            self.runs.push(run.clone());
        }
    }
}

/// Returns the positions of the set bits in ascending order.
fn set_bits(bitmap: &[u8]) -> impl Iterator<Item = u32> {
    let words = bitmap.chunks(8).map(|bytes| {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(word)
    });
    words.enumerate().flat_map(|(at, mut word)| {
        std::iter::from_fn(move || {
            let bit = (word != 0).then(|| 64 * at as u32 + word.trailing_zeros())?;
            word &= word - 1;
            Some(bit)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One test case: name, element width, changed elements, expected ranges, expected single elements.
    type Row<'a> = (&'a str, Width, Vec<u32>, &'a [(u32, u32)], &'a [u32]);

    fn bitmap(elements: impl IntoIterator<Item = u32>, count: u32) -> Vec<u8> {
        let mut bitmap = vec![0; count.div_ceil(8) as usize];
        elements.into_iter().for_each(|element| bitmap[element as usize / 8] |= 1 << (element % 8));
        bitmap
    }

    #[test]
    fn adjacent_changes_become_ranges_and_others_elements() {
        let every_other: Vec<u32> = (0..1000).step_by(2).collect();
        let few: Vec<u32> = (10..58).collect();
        let rows: [Row<'_>; 10] = [
            ("nothing", Width::W2, vec![], &[], &[]),
            ("the first and the last", Width::W2, vec![0, 999], &[], &[0, 999]),
            ("all", Width::W2, (0..1000).collect(), &[(0, 1000)], &[]),
            ("too few for a range", Width::W2, few.clone(), &[], &few),
            ("just enough", Width::W2, (10..59).collect(), &[(10, 59)], &[]),
            ("a hole cheaper than a range", Width::W2, (0..100).chain(123..300).collect(), &[(0, 300)], &[]),
            ("a hole as dear", Width::W2, (0..100).chain(124..300).collect(), &[(0, 100), (124, 300)], &[]),
            ("long elements", Width::W16, (0..60).chain([70]).collect(), &[(0, 60)], &[70]),
            ("every other one", Width::W4, every_other.clone(), &[], &every_other),
            (
                "among elements",
                Width::W1,
                [5].into_iter().chain(200..400).chain([700]).collect(),
                &[(200, 400)],
                &[5, 700],
            ),
        ];
        for (what, width, changed, runs, elements) in rows {
            let found = ElementChanges::of_bitmap(&bitmap(changed.iter().copied(), 1000), width).unwrap();
            assert_eq!(found, ElementChanges::of(changed.into_iter(), width).unwrap(), "{what}");
            let found_runs: Vec<(u32, u32)> = found.runs.iter().map(|run| (run.start, run.end)).collect();
            assert_eq!((&*found_runs, &*found.elements), (runs, elements), "{what}");
        }
    }

    #[test]
    fn ranges_and_elements_cover_all_changes_at_minimal_length() {
        for seed in 0..200_u32 {
            let density = 1 + seed % 17;
            let mut state = seed;
            let mut next = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                state >> 16
            };
            let changed: Vec<u32> = (0..3000)
                .filter(|n| if n / 500 % 2 == 0 { next() % density == 0 } else { next() % 50 == 0 })
                .collect();
            let found = ElementChanges::of_bitmap(&bitmap(changed.iter().copied(), 3000), Width::W2).unwrap();
            let covered = |element: u32| {
                found.runs.iter().any(|run| run.contains(&element)) || found.elements.contains(&element)
            };
            assert!(changed.iter().all(|element| covered(*element)), "seed {seed}");
            let in_runs: u64 = found.runs.iter().map(|run| RANGE_COST + 2 * run.len() as u64).sum();
            let cost = in_runs + 3 * found.elements.len() as u64;
            assert!(cost <= 3 * changed.len() as u64, "seed {seed}");
            assert!(cost <= RANGE_COST + 2 * 3000, "seed {seed}");
        }
    }
}
