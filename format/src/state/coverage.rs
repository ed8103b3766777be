//! Tracks which bytes of a page's image are still part of the page after later operations.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::op::Op;
use crate::state::apply::each_write;

/// The ranges of a page that operations have written, and the length of the image under them.
#[derive(Clone, Debug)]
pub(crate) struct Coverage {
    /// Number of bytes at the start of the image that remained after the shortest resize.
    image_len: u64,
    /// Written ranges. The key is the start and the value is the end of a range. No two ranges overlap or touch.
    written: BTreeMap<u64, u64>,
}

impl Coverage {
    /// Creates the coverage of a page that consists of an image of `image_len` bytes.
    pub fn new(image_len: u64) -> Self {
        Self { image_len, written: BTreeMap::new() }
    }

    /// Records the effect of an operation on the page.
    pub fn apply(&mut self, op: &Op<'_>) {
        match op {
            Op::Resize { len, .. } => {
                // Bytes that a resize cuts off become zero if the page is extended again.
                self.image_len = self.image_len.min(*len);
            }
            _ => each_write(op, |offset, bytes| self.write(offset..offset + bytes.len() as u64)),
        }
    }

    /// Records that a range was written.
    pub fn write(&mut self, range: Range<u64>) {
        let Range { mut start, mut end } = range;
        if start >= end {
            return;
        }
        while let Some((from, to)) = self.written.range(..=end).next_back().map(|(from, to)| (*from, *to))
            && to >= start
        {
            self.written.remove(&from);
            (start, end) = (start.min(from), end.max(to));
        }
        self.written.insert(start, end);
    }

    /// Returns true if operations have overwritten or cut off every byte of the image.
    pub fn is_whole(&self) -> bool {
        self.image_len == 0 || self.written.get(&0).is_some_and(|end| *end >= self.image_len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::PageId;

    /// Compares the coverage with one flag per byte.
    #[test]
    fn coverage_equals_a_flag_per_byte() {
        const LEN: u64 = 24;
        let page = PageId(1);
        let mut drawn = 7_u64;
        let mut draw = |below: u64| {
            drawn = drawn.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (drawn >> 33) % below
        };
        let mut outcomes = [0; 2];
        for _ in 0..2000 {
            let mut coverage = Coverage::new(LEN);
            let (mut is_image, mut len) = (vec![true; LEN as usize], LEN);
            for _ in 0..draw(9) {
                if draw(6) == 0 {
                    len = draw(2 * LEN);
                    coverage.apply(&Op::Resize { page, len });
                    is_image.iter_mut().skip(len as usize).for_each(|byte| *byte = false);
                } else if len > 0 {
                    let from = draw(len);
                    let to = from + draw(len - from + 1);
                    let pattern = &[1];
                    coverage.apply(&Op::Fill { page, offset: from, len: to - from, pattern });
                    let written = is_image.iter_mut().skip(from as usize).take((to - from) as usize);
                    written.for_each(|byte| *byte = false);
                }
            }
            let is_whole = !is_image.contains(&true);
            assert_eq!(coverage.is_whole(), is_whole, "{coverage:?}");
            outcomes[usize::from(is_whole)] += 1;
        }
        assert!(outcomes.iter().all(|count| *count > 100), "{outcomes:?}");
    }
}
