//! Computes the difference between two versions of a page, as single elements and as ranges in which changed elements
//! are close together.

use std::ops::Range;

use remanent_format::Width;

use super::{PageRef, WriteBatch};
use crate::images::disk_pages::{pending_bytes_of_elements, pending_bytes_of_write};

/// The overhead in bytes of logging a range: the header of an operation, and padding.
const RANGE_COST: u64 = 40;
/// The length in bytes of an element's index in the log if the previous index is close.
const INDEX_COST: u64 = 1;
/// The maximum number of unchanged bytes within a range. More unchanged bytes would cost more than a separate range.
const BRIDGED_MAX: u64 = RANGE_COST;
/// The number of bytes that are compared at once while nothing differs, a multiple of every element width. More bytes at
/// once were slower if one element in a hundred or more differed.
const COMPARED_AT_ONCE: usize = 16;
/// The number of changed elements after which a range is kept as a range or split. If it is kept, further changed
/// elements of the range are no longer recorded individually.
const SETTLED_AFTER: usize = 4096;

/// The changes of one page, collected piece by piece from the start of the page to its end. Use this type if the two
/// versions of the page are never in memory as a whole. Otherwise use [`WriteBatch::write_changes`].
///
/// ```
/// use remanent::batch::{PageChanges, Width};
/// use remanent::{Place, Store};
/// let store = Store::temporary()?;
/// let (before, after) = ([7; 4096], { let mut after = [7; 4096]; after[100] = 8; after });
/// let mut batch = store.batch();
/// batch.create_from(before, Place::Host);
/// let page = store.commit(batch)?.pages[0];
///
/// let mut changes = PageChanges::new(Width::W1);
/// for (index, (old, new)) in before.chunks(1024).zip(after.chunks(1024)).enumerate() {
///     changes.compare(index as u64 * 1024, old, new);
/// }
/// assert_eq!(changes.count(), 1);
/// let mut batch = store.batch();
/// changes.put(&mut batch, page);
/// store.commit(batch)?;
/// assert_eq!(store.read_to_vec(page)?, after);
/// # Ok::<(), remanent::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct PageChanges {
    width: Width,
    /// The number of changed elements so far.
    count: u64,
    /// The approximate number of bytes that the changes so far take in the log.
    cost: u64,
    indices: Vec<u32>,
    values: Vec<u8>,
    ranges: Vec<ChangedRange>,
    open: Option<OpenRange>,
    /// The empty buffers of the last range that was split into elements, reused for the next range. Most ranges contain
    /// one element, so allocating buffers for each would be slow.
    room: (Vec<u8>, Vec<u64>),
}

/// A range of a page, with the bytes that it has after the change.
#[derive(Clone, Debug)]
struct ChangedRange {
    offset: u64,
    bytes: Vec<u8>,
}

/// The range that is being extended. It may still grow, or be split into single elements.
#[derive(Clone, Debug)]
struct OpenRange {
    range: ChangedRange,
    /// The offsets in the page of the changed elements in the range. Empty once `settled` is set.
    changed: Vec<u64>,
    settled: bool,
}

impl OpenRange {
    fn end(&self) -> u64 {
        self.range.offset + self.range.bytes.len() as u64
    }

    fn is_cheaper_whole(&self, width: u64) -> bool {
        let whole = RANGE_COST + self.range.bytes.len() as u64;
        self.settled || whole < self.changed.len() as u64 * (INDEX_COST + width)
    }
}

impl PageChanges {
    /// Creates an empty set of changes for a page whose elements have this width.
    #[must_use]
    pub fn new(width: Width) -> Self {
        let (indices, values, ranges) = (Vec::new(), Vec::new(), Vec::new());
        Self { width, count: 0, cost: 0, indices, values, ranges, open: None, room: Default::default() }
    }

    /// Compares one piece of both versions of the page, and adds the differences. `offset` is the piece's position in
    /// the page, and must be the end of the previous piece. An incomplete last element counts as one element.
    pub fn compare(&mut self, offset: u64, before: &[u8], after: &[u8]) {
        if before == after {
            return;
        }
        match self.width {
            Width::W1 => self.compare_elements::<1>(offset, before, after),
            Width::W2 => self.compare_elements::<2>(offset, before, after),
            Width::W4 => self.compare_elements::<4>(offset, before, after),
            Width::W8 => self.compare_elements::<8>(offset, before, after),
            Width::W16 => self.compare_elements::<16>(offset, before, after),
        }
    }

    /// Compares one piece whose elements are `WIDTH` bytes wide. Finds consecutive changed elements first and adds them
    /// together, because adding each element takes longer than comparing it.
    fn compare_elements<const WIDTH: usize>(&mut self, offset: u64, before: &[u8], after: &[u8]) {
        let ((old, old_tail), (new, new_tail)) = (before.as_chunks::<WIDTH>(), after.as_chunks::<WIDTH>());
        let elements = |at: usize| old[at..].iter().zip(&new[at..]);
        let at_once = const { COMPARED_AT_ONCE / WIDTH };
        let block = |part: &[[u8; WIDTH]]| <[u8; COMPARED_AT_ONCE]>::try_from(part.as_flattened()).ok();
        let mut at = 0;
        loop {
            let blocks = old[at..].chunks_exact(at_once).zip(new[at..].chunks_exact(at_once));
            at += blocks.take_while(|(old, new)| block(old) == block(new)).count() * at_once;
            at += elements(at).take_while(|(old, new)| old == new).count();
            let changed = elements(at).take_while(|(old, new)| old != new).count();
            if changed == 0 {
                break;
            }
            self.add(offset, at * WIDTH..(at + changed) * WIDTH, after);
            at += changed;
        }
        if old_tail != new_tail {
            self.add(offset, at * WIDTH..after.len(), after);
        }
    }

    /// Adds consecutive changed elements at the positions `changed` of a piece that begins at `offset` and has the new
    /// bytes `after`.
    fn add(&mut self, offset: u64, changed: Range<usize>, after: &[u8]) {
        let width = self.width.bytes();
        let Range { mut start, end } = changed;
        while start < end {
            let page_at = offset + start as u64;
            let bridged = self.open.as_ref().map(|open| page_at - open.end());
            // The gap before this element is too long, or begins in an earlier piece, whose bytes are no longer available.
            if bridged.is_some_and(|bridged| bridged > BRIDGED_MAX || bridged > start as u64) {
                self.settle();
            }
            let open = self.open.get_or_insert_with(|| {
                let (bytes, changed) = std::mem::take(&mut self.room);
                OpenRange { range: ChangedRange { offset: page_at, bytes }, changed, settled: false }
            });
            let room = if open.settled { usize::MAX } else { (SETTLED_AFTER - open.changed.len()) * width };
            let added = start..start.saturating_add(room).min(end);
            self.count += added.len().div_ceil(width) as u64;
            open.range.bytes.extend_from_slice(&after[(open.end() - offset) as usize..added.end]);
            start = added.end;
            if open.settled {
                continue;
            }
            open.changed.extend(added.step_by(width).map(|at| offset + at as u64));
            if open.changed.len() < SETTLED_AFTER {
                continue;
            }
            if open.is_cheaper_whole(width as u64) {
                (open.settled, open.changed) = (true, Vec::new());
            } else {
                self.settle();
            }
        }
    }

    /// Completes the open range. Keeps the range or splits it into elements, whichever takes less log space.
    fn settle(&mut self) {
        let Some(open) = self.open.take() else { return };
        let width = self.width.bytes();
        let last = open.end() / width as u64;
        // A sparse delta cannot contain an incomplete last element, or an element whose number takes more than 32 bits.
        let in_reach = last <= u64::from(u32::MAX) && open.range.bytes.len() % width == 0;
        if open.is_cheaper_whole(width as u64) || !in_reach {
            self.cost += RANGE_COST + open.range.bytes.len() as u64;
            self.ranges.push(open.range);
            return;
        }
        let OpenRange { range: ChangedRange { offset, mut bytes }, mut changed, .. } = open;
        for at in changed.drain(..) {
            self.cost += INDEX_COST + width as u64;
            self.indices.push((at / width as u64) as u32);
            let start = (at - offset) as usize;
            self.values.extend_from_slice(&bytes[start..start + width]);
        }
        bytes.clear();
        self.room = (bytes, changed);
    }

    /// Returns the number of changed elements.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns the approximate number of bytes that the changes take in the log.
    pub fn cost(&mut self) -> u64 {
        self.settle();
        self.cost
    }

    /// Returns an upper bound of the host memory, in bytes, that the changes of a page on disk take until the next
    /// snapshot. The commit claims this number of bytes.
    pub fn pending_bytes(&mut self) -> u64 {
        self.settle();
        let ranges = self.ranges.iter().map(|range| (range.offset, range.bytes.len() as u64));
        let of_ranges = ranges.map(|(offset, len)| pending_bytes_of_write(offset, len));
        let (count, width) = (self.indices.len() as u64, self.width.bytes() as u64);
        let end = self.indices.last().map_or(0, |last| (u64::from(*last) + 1) * width);
        of_ranges.fold(pending_bytes_of_elements(count, 0, end), u64::saturating_add)
    }

    /// Adds the changes to a batch, as writes to `page`.
    pub fn put<'k>(mut self, batch: &mut WriteBatch, page: impl Into<PageRef<'k>>) {
        self.settle();
        let page = page.into();
        for range in &self.ranges {
            batch.write(page, range.offset, &range.bytes);
        }
        if !self.indices.is_empty() {
            batch.scatter(page, self.width, &self.indices, &self.values);
        }
    }
}

impl WriteBatch {
    /// Changes the bytes of a page from `before` to `after`, with single elements and ranges that take little log
    /// space.
    ///
    /// Both slices must start at the beginning of the page and have equal length. Elements are `width` bytes wide. Only
    /// the differences are written, so `before` should be the page's current contents.
    ///
    /// ```
    /// use remanent::batch::Width;
    /// use remanent::{Place, Store};
    /// let store = Store::temporary()?;
    /// let before = vec![1; 1 << 20];
    /// let mut batch = store.batch();
    /// batch.create_from(before.clone(), Place::Host);
    /// let page = store.commit(batch)?.pages[0];
    ///
    /// let mut after = before.clone();
    /// (0..1 << 20).step_by(1000).for_each(|at| after[at] = 2);
    /// let logged = store.stats().log.bytes;
    /// store.commit(store.batch().write_changes(page, Width::W1, &before, &after))?;
    /// assert_eq!(store.read_to_vec(page)?, after);
    /// assert!(store.stats().log.bytes - logged < 8192, "one byte in a thousand changed");
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Panics
    /// If `before` and `after` have different lengths.
    pub fn write_changes<'k>(
        &mut self,
        page: impl Into<PageRef<'k>>,
        width: Width,
        before: &[u8],
        after: &[u8],
    ) -> &mut Self {
        assert_eq!(before.len(), after.len(), "both versions of a page are equally long");
        let mut changes = PageChanges::new(width);
        changes.compare(0, before, after);
        changes.put(self, page);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Place, Store};

    /// Compares two versions of a page piece by piece, and applies the changes in a store. Returns the numbers of
    /// changed elements, of single elements, and of ranges.
    fn check(width: Width, piece: usize, before: &[u8], after: &[u8]) -> (u64, usize, usize) {
        let mut changes = PageChanges::new(width);
        for (index, (old, new)) in before.chunks(piece).zip(after.chunks(piece)).enumerate() {
            changes.compare((index * piece) as u64, old, new);
        }
        changes.settle();
        let found = (changes.count(), changes.indices.len(), changes.ranges.len());

        let store = Store::temporary().unwrap();
        let mut batch = store.batch();
        let page = batch.create(before.len() as u64, Place::Host).page();
        batch.write(page, 0, before);
        changes.put(&mut batch, page);
        let page = store.commit(batch).unwrap().pages[0];
        let mut bytes = vec![0; after.len()];
        store.read(page, 0, &mut bytes).unwrap();
        assert!(bytes == after, "the changes make another page");
        found
    }

    fn changed(before: &[u8], at: impl IntoIterator<Item = usize>) -> Vec<u8> {
        let mut after = before.to_vec();
        at.into_iter().for_each(|at| after[at] ^= 0x55);
        after
    }

    #[test]
    fn elements_and_ranges_are_distinguished_across_pieces() {
        let before: Vec<u8> = (0..64 << 10).map(|index| (index % 251) as u8).collect();
        for piece in [1 << 10, 1 << 12, 64 << 10] {
            let check = |width, at: Vec<usize>| check(width, piece, &before, &changed(&before, at));
            assert_eq!(check(Width::W4, vec![]), (0, 0, 0));
            assert_eq!(check(Width::W4, vec![3, 4, 9000, 65535]), (4, 4, 0));
            // A change of two bytes in one element counts once.
            assert_eq!(check(Width::W4, vec![4, 7]), (1, 1, 0));
            assert_eq!(check(Width::W4, (100..5000).collect()).1, 0, "a long range");
            assert_eq!(check(Width::W2, (0..64 << 10).collect()), (32 << 10, 0, 1));
            assert_eq!(check(Width::W1, (0..64 << 10).filter(|at| at % 3 != 0).collect()).1, 0, "bridged");
            let (_, single, ranges) = check(Width::W8, (0..64 << 10).step_by(4096).chain(64..1024).collect());
            assert!(single >= 14 && ranges >= 1, "{single} single, {ranges} ranges");
        }
    }

    #[test]
    fn incomplete_last_element_is_captured() {
        let before = [7; 11];
        assert_eq!(check(Width::W4, 64, &before, &changed(&before, [10])), (1, 0, 1));
        assert_eq!(check(Width::W4, 64, &before, &changed(&before, [0])), (1, 1, 0));
    }

    #[test]
    fn random_diffs_reproduce_the_other_version() {
        // SplitMix64 reproduces the same numbers from a seed, so that a failure can be repeated.
        let mut state = 42_u64;
        let mut random = |below: usize| {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((mixed ^ (mixed >> 31)) % below as u64) as usize
        };
        for _ in 0..40 {
            let len = 1 + random(40_000);
            let before: Vec<u8> = (0..len).map(|_| random(256) as u8).collect();
            let mut after = before.clone();
            for _ in 0..random(30) {
                let (start, run) = (random(len), 1 + random(2000));
                let step = 1 + random(20);
                (start..len.min(start + run)).step_by(step).for_each(|at| after[at] = random(256) as u8);
            }
            let width = [Width::W1, Width::W2, Width::W4, Width::W8, Width::W16][random(5)];
            let piece = width.bytes() * (1 + random(500));
            check(width, piece, &before, &after);
        }
    }
}
