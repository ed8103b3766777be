//! A map from ids to items, which are stored in rows of 256 consecutive ids.
//!
//! Ids are assigned in ascending order, so consecutive pages share a row. A lookup among ten million items causes
//! hardly more cache misses than a lookup among a thousand items. The overhead per item is a few bytes. With a tree
//! that has one entry per page, a commit among a million pages takes 2.8 times as long as among a thousand pages, and
//! ascending ids fill the nodes of the tree only halfway.
//!
//! Ids can be *flagged* for later processing. An id stays flagged when its item is removed.

use std::collections::{BTreeMap, BTreeSet};
use std::marker::PhantomData;
use std::ops::Index;

use crate::defect::{Defect, collected};
use crate::ids::Number;

/// Number of consecutive ids in a row.
pub const ROW: u64 = WORDS as u64 * WORD;
/// Number of words in a set of [`ROW`] bits.
const WORDS: usize = 4;
/// Number of bits in a word.
const WORD: u64 = u64::BITS as u64;

/// A set of the ids of one row, which has [`ROW`] consecutive ids. Bit `id % ROW` represents `id`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Bits([u64; WORDS]);

impl Bits {
    /// Returns the index of the word that contains the bit of `number`, and a mask for the bit.
    fn at(number: u64) -> (usize, u64) {
        let number = number % ROW;
        ((number / WORD) as usize, 1 << (number % WORD))
    }

    fn has(&self, number: u64) -> bool {
        let (word, bit) = Self::at(number);
        self.0[word] & bit != 0
    }

    fn insert(&mut self, number: u64) {
        let (word, bit) = Self::at(number);
        self.0[word] |= bit;
    }

    fn remove(&mut self, number: u64) {
        let (word, bit) = Self::at(number);
        self.0[word] &= !bit;
    }

    fn is_empty(&self) -> bool {
        self.0 == [0; WORDS]
    }

    /// Returns the number of ids in the set that are below `number`.
    fn count_below(&self, number: u64) -> usize {
        let (word, bit) = Self::at(number);
        let of_words: u32 = self.0[..word].iter().map(|word| word.count_ones()).sum();
        (of_words + (self.0[word] & (bit - 1)).count_ones()) as usize
    }

    /// Returns the ids in the set in ascending order. `first` is the first id of the row.
    fn numbers(self, first: u64) -> impl Iterator<Item = u64> {
        self.0.into_iter().enumerate().flat_map(move |(at, mut word)| {
            std::iter::from_fn(move || {
                let lowest = (word != 0).then(|| u64::from(word.trailing_zeros()))?;
                word &= word - 1;
                Some(first + at as u64 * WORD + lowest)
            })
        })
    }
}

/// Up to [`ROW`] items, in the order of their ids.
#[derive(Clone, Debug)]
struct Row<T> {
    items: Vec<T>,
    /// Ids that have an item.
    present: Bits,
}

impl<T> Default for Row<T> {
    fn default() -> Self {
        Self { items: Vec::new(), present: Bits::default() }
    }
}

impl<T> Row<T> {
    /// Returns the index of an item, or the index at which to insert it. The bits of a full row are not read, which
    /// saves a cache miss in most lookups.
    fn position(&self, number: u64) -> Result<usize, usize> {
        if self.items.len() as u64 == ROW {
            return Ok((number % ROW) as usize);
        }
        let at = self.present.count_below(number);
        if self.present.has(number) { Ok(at) } else { Err(at) }
    }

    fn get(&self, number: u64) -> Option<&T> {
        self.position(number).ok().map(|at| &self.items[at])
    }

    fn get_mut(&mut self, number: u64) -> Option<&mut T> {
        self.position(number).ok().map(|at| &mut self.items[at])
    }

    fn insert(&mut self, number: u64, item: T) -> Option<T> {
        match self.position(number) {
            Ok(at) => Some(std::mem::replace(&mut self.items[at], item)),
            Err(at) => {
                self.items.insert(at, item);
                self.present.insert(number);
                None
            }
        }
    }

    fn remove(&mut self, number: u64) -> Option<T> {
        let removed = self.items.remove(self.position(number).ok()?);
        self.present.remove(number);
        Some(removed)
    }

    fn iter(&self) -> impl DoubleEndedIterator<Item = &T> {
        self.items.iter()
    }
}

/// The items and the flags of [`ROW`] consecutive ids.
#[derive(Clone, Debug)]
struct IdChunk<T> {
    /// First id of the chunk, divided by [`ROW`].
    number: u64,
    row: Row<T>,
    flagged: Bits,
}

/// A map from ids to items in the order of the ids, with a set of flagged ids.
#[derive(Clone, Debug)]
pub struct IdMap<K, T> {
    /// Rows of chunks, keyed by the first id divided by the square of [`ROW`]. No row is empty, and every chunk
    /// contains an item or a flag.
    rows: BTreeMap<u64, Row<IdChunk<T>>>,
    count: usize,
    /// Numbers of the chunks that may contain flagged ids, in ascending order.
    flagged: BTreeSet<u64>,
    numbers: PhantomData<K>,
}

impl<K, T> Default for IdMap<K, T> {
    fn default() -> Self {
        Self { rows: BTreeMap::new(), count: 0, flagged: BTreeSet::new(), numbers: PhantomData }
    }
}

impl<K: Number, T> IdMap<K, T> {
    fn chunk(&self, number: u64) -> Option<&IdChunk<T>> {
        self.rows.get(&(number / ROW / ROW))?.get(number / ROW)
    }

    fn chunk_mut(&mut self, number: u64) -> Option<&mut IdChunk<T>> {
        self.rows.get_mut(&(number / ROW / ROW))?.get_mut(number / ROW)
    }

    fn chunk_or_new(&mut self, number: u64) -> &mut IdChunk<T> {
        let row = self.rows.entry(number / ROW / ROW).or_default();
        let number = number / ROW;
        if row.position(number).is_err() {
            row.insert(number, IdChunk { number, row: Row::default(), flagged: Bits::default() });
        }
        row.get_mut(number).expect("put there just now")
    }

    /// Removes a chunk if it contains no item and no flag.
    fn forget_if_empty(&mut self, number: u64) {
        let is_empty = |chunk: &IdChunk<T>| chunk.row.items.is_empty() && chunk.flagged.is_empty();
        if !self.chunk(number).is_some_and(is_empty) {
            return;
        }
        let row = self.rows.get_mut(&(number / ROW / ROW)).expect("found just now");
        row.remove(number / ROW);
        if row.items.is_empty() {
            self.rows.remove(&(number / ROW / ROW));
        }
    }

    /// Returns the item with this id, or `None` if there is none.
    #[must_use]
    pub fn get(&self, key: K) -> Option<&T> {
        self.chunk(key.number())?.row.get(key.number())
    }

    /// Returns the item of an id for modification, or `None` if the id has no item.
    #[must_use]
    pub fn get_mut(&mut self, key: K) -> Option<&mut T> {
        self.chunk_mut(key.number())?.row.get_mut(key.number())
    }

    /// Returns true if the id has an item.
    #[must_use]
    pub fn contains(&self, key: K) -> bool {
        self.get(key).is_some()
    }

    /// Sets the item of an id. Returns the previous item, if any.
    pub fn insert(&mut self, key: K, item: T) -> Option<T> {
        let before = self.chunk_or_new(key.number()).row.insert(key.number(), item);
        self.count += usize::from(before.is_none());
        before
    }

    /// Removes the item of an id and returns it.
    pub fn remove(&mut self, key: K) -> Option<T> {
        let removed = self.chunk_mut(key.number())?.row.remove(key.number())?;
        self.count -= 1;
        self.forget_if_empty(key.number());
        Some(removed)
    }

    /// Returns the number of items.
    #[must_use]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Returns true if there are no items.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the item with the highest id, or `None` if the map is empty.
    #[must_use]
    pub fn last(&self) -> Option<&T> {
        let chunks = self.rows.values().rev().flat_map(|row| row.iter().rev());
        chunks.filter_map(|chunk| chunk.row.items.last()).next()
    }

    fn chunks(&self) -> impl Iterator<Item = &IdChunk<T>> {
        self.rows.values().flat_map(Row::iter)
    }

    /// Returns an iterator over all items in the order of their ids.
    pub fn values(&self) -> impl ExactSizeIterator<Item = &T> {
        CountedIter { items: self.chunks().flat_map(|chunk| chunk.row.iter()), left: self.count }
    }

    /// Returns an iterator over all items with their ids, in ascending order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (K, &T)> {
        let numbered = |chunk: &'_ IdChunk<T>| chunk.row.present.numbers(chunk.number * ROW).map(K::of);
        let items = self.chunks().flat_map(move |chunk| numbered(chunk).zip(chunk.row.iter()));
        CountedIter { items, left: self.count }
    }

    /// Returns an iterator over the items with ids from `first` to `last`, inclusive.
    pub fn range(&self, first: K, last: K) -> impl Iterator<Item = (K, &T)> {
        let (first, last) = (first.number(), last.number());
        let rows = self.rows.range(first / ROW / ROW..=last / ROW / ROW);
        let chunks = rows.flat_map(|(_, row)| row.iter());
        let chunks = chunks.filter(move |chunk| (first / ROW..=last / ROW).contains(&chunk.number));
        let numbered = |chunk: &'_ IdChunk<T>| chunk.row.present.numbers(chunk.number * ROW);
        let items = chunks.flat_map(move |chunk| numbered(chunk).zip(chunk.row.iter()));
        items
            .filter(move |(number, _)| (first..=last).contains(number))
            .map(|(number, item)| (K::of(number), item))
    }

    /// Consumes the map and returns all items with their ids, in ascending order.
    pub fn into_items(self) -> impl Iterator<Item = (K, T)> {
        let chunks = self.rows.into_values().flat_map(|row| row.items);
        chunks.flat_map(|chunk| chunk.row.present.numbers(chunk.number * ROW).map(K::of).zip(chunk.row.items))
    }

    /// Keeps only the items for which `wanted` returns true.
    pub fn retain(&mut self, mut wanted: impl FnMut(K, &T) -> bool) {
        let gone: Vec<K> =
            self.iter().filter(|(key, item)| !wanted(*key, item)).map(|(key, _)| key).collect();
        gone.into_iter().for_each(|key| _ = self.remove(key));
    }

    /// Moves all items and flags of another map into this map. An item of `other` replaces an item with the same id. A
    /// chunk that exists in only one of the maps is moved without reading its items.
    pub fn absorb(&mut self, other: Self) {
        for chunk in other.rows.into_values().flat_map(|row| row.items) {
            let first = chunk.number * ROW;
            chunk.flagged.numbers(first).for_each(|number| self.flag(K::of(number)));
            match self.chunk_mut(first) {
                Some(here) if here.row.items.is_empty() => here.row = chunk.row,
                Some(_) => {
                    self.extend(chunk.row.present.numbers(first).map(K::of).zip(chunk.row.items));
                    continue;
                }
                None if chunk.row.items.is_empty() => continue,
                None => self.chunk_or_new(first).row = chunk.row,
            }
            self.count += self.chunk(first).map_or(0, |here| here.row.items.len());
        }
    }

    /// Flags an id, even if it has no item.
    pub fn flag(&mut self, key: K) {
        let chunk = self.chunk_or_new(key.number());
        let (number, is_first) = (chunk.number, chunk.flagged.is_empty());
        chunk.flagged.insert(key.number());
        if is_first {
            self.flagged.insert(number);
        }
    }

    /// Flags all ids that have an item.
    pub fn flag_all(&mut self) {
        for chunk in self.rows.values_mut().flat_map(|row| &mut row.items) {
            let (present, flagged) = (chunk.row.present.0, &mut chunk.flagged.0);
            flagged.iter_mut().zip(present).for_each(|(flagged, present)| *flagged |= present);
            self.flagged.insert(chunk.number);
        }
    }

    /// Returns an iterator over the flagged ids in ascending order.
    pub fn each_flagged(&self) -> impl Iterator<Item = K> {
        let chunks = self.flagged.iter().filter_map(|number| self.chunk(number * ROW));
        chunks.flat_map(|chunk| chunk.flagged.numbers(chunk.number * ROW).map(K::of))
    }

    /// Returns a list of the flagged ids in ascending order.
    ///
    /// # Errors
    /// Returns [`Defect::Memory`] if there is not enough memory for the list.
    pub fn flagged(&mut self) -> Result<Vec<K>, Defect> {
        let mut chunks = std::mem::take(&mut self.flagged);
        chunks.retain(|number| self.chunk(number * ROW).is_some_and(|chunk| !chunk.flagged.is_empty()));
        self.flagged = chunks;
        collected(self.each_flagged())
    }

    /// Removes the flag of an id.
    pub fn unflag(&mut self, key: K) {
        let Some(chunk) = self.chunk_mut(key.number()) else { return };
        chunk.flagged.remove(key.number());
        if chunk.flagged.is_empty() {
            self.forget_if_empty(key.number());
        }
    }
}

impl<K: Number, T> Index<K> for IdMap<K, T> {
    type Output = T;

    /// Returns the item of an id.
    ///
    /// # Panics
    /// Panics if the id has no item.
    fn index(&self, key: K) -> &T {
        self.get(key).unwrap_or_else(|| panic!("no item has the id {}", key.number()))
    }
}

/// Compares the items but not the flags.
impl<K: Number, T: PartialEq> PartialEq for IdMap<K, T> {
    fn eq(&self, other: &Self) -> bool {
        let is_same = |((key, item), (other_key, other)): ((K, &T), (K, &T))| {
            key.number() == other_key.number() && item == other
        };
        self.count == other.count && self.iter().zip(other.iter()).all(is_same)
    }
}

impl<K: Number, T> Extend<(K, T)> for IdMap<K, T> {
    /// Sets the items of several ids. If an id is repeated, its last item is kept.
    fn extend<I: IntoIterator<Item = (K, T)>>(&mut self, items: I) {
        let mut items = items.into_iter().peekable();
        while let Some((key, item)) = items.next() {
            let number = key.number() / ROW;
            let chunk = self.chunk_or_new(key.number());
            // Consecutive ids fill the chunk, so reserve space for a full chunk.
            if chunk.row.items.is_empty() {
                chunk.row.items.reserve_exact(ROW as usize);
            }
            let mut count = usize::from(chunk.row.insert(key.number(), item).is_none());
            // The next items of the same chunk need no lookup.
            while let Some((key, item)) = items.next_if(|(key, _)| key.number() / ROW == number) {
                count += usize::from(chunk.row.insert(key.number(), item).is_none());
            }
            chunk.row.items.shrink_to_fit();
            self.count += count;
        }
    }
}

impl<K: Number, T> FromIterator<(K, T)> for IdMap<K, T> {
    fn from_iter<I: IntoIterator<Item = (K, T)>>(items: I) -> Self {
        let mut all = Self::default();
        all.extend(items);
        all
    }
}

/// An iterator that counts its remaining items.
struct CountedIter<I> {
    items: I,
    left: usize,
}

impl<I: Iterator> Iterator for CountedIter<I> {
    type Item = I::Item;

    fn next(&mut self) -> Option<I::Item> {
        let next = self.items.next()?;
        self.left -= 1;
        Some(next)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl<I: Iterator> ExactSizeIterator for CountedIter<I> {}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;
    use crate::ids::PageId;

    /// Compares a map and its flags with a standard map and a standard set.
    #[test]
    fn items_are_found_by_id_and_iterated_in_order() {
        let ids = [1, 63, 64, 255, 256, 257, 70_000, u64::MAX - 1, u64::MAX, 2, 0];
        let (mut items, mut expected) = (IdMap::default(), BTreeMap::new());
        let mut flagged = BTreeSet::new();
        // The steps are coprime to the number of ids, so each id is inserted and removed in many orders.
        for step in (0..2000_u64).step_by(crate::CASES_STEP) {
            let page = PageId(ids[(step * 7 % 11) as usize]);
            if step * step % 5 < 2 {
                assert_eq!(items.remove(page), expected.remove(&page));
            } else {
                assert_eq!(items.insert(page, step), expected.insert(page, step));
            }
            if step % 3 == 0 {
                items.flag(page);
                flagged.insert(page);
            }
            if step % 70 == 69 {
                // Also removes the flags of ids that are not flagged or have no item.
                let settled: Vec<PageId> = ids.iter().step_by(3).copied().map(PageId).collect();
                settled.iter().for_each(|page| items.unflag(*page));
                flagged.retain(|page| !settled.contains(page));
            }
            if let Some(item) = items.get_mut(page) {
                *item += 1;
                *expected.get_mut(&page).expect("there in both") += 1;
            }
            assert!(ids.iter().all(|id| items.get(PageId(*id)) == expected.get(&PageId(*id))));
            assert!(items.iter().eq(expected.iter().map(|(page, item)| (*page, item))), "after step {step}");
            assert!(items.values().eq(expected.values()));
            assert_eq!((items.len(), items.iter().len()), (expected.len(), expected.len()));
            assert_eq!(items.last(), expected.values().last());
            assert_eq!(items.flagged().unwrap(), flagged.iter().copied().collect::<Vec<_>>());
            let anew: IdMap<PageId, u64> = expected.iter().map(|(page, item)| (*page, *item)).collect();
            assert_eq!(items, anew);
            assert!(items.clone().into_items().eq(expected.clone()));
            for (first, last) in [(0, u64::MAX), (63, 256), (257, 70_000), (256, 256), (3, 62)] {
                let within = expected.range(PageId(first)..=PageId(last));
                let found = items.range(PageId(first), PageId(last));
                assert!(found.eq(within.map(|(page, item)| (*page, item))), "{first}..={last}");
            }
        }
        ids.iter().for_each(|id| items.unflag(PageId(*id)));
        items.insert(PageId(64), 0);
        items.retain(|page, _| page == PageId(64));
        assert_eq!(items.iter().map(|(page, _)| page.0).collect::<Vec<_>>(), [64]);
        assert_eq!((items.rows.len(), items.chunks().count()), (1, 1), "what is empty takes no room");
    }

    /// Merging two maps keeps all items and flags, for all divisions of the items and both directions.
    #[test]
    fn absorb_keeps_all_items_and_flags() {
        let numbers = [0, 1, 255, 256, 300, 511, 70_000, 70_001, u64::MAX];
        for parted in 0..=numbers.len() {
            for (here, there) in [numbers.split_at(parted), (&numbers[parted..], &numbers[..parted])] {
                let part = |numbers: &[u64]| {
                    let mut part: IdMap<PageId, u64> =
                        numbers.iter().map(|number| (PageId(*number), *number)).collect();
                    numbers.iter().for_each(|number| part.flag(PageId(number ^ 2)));
                    part
                };
                let mut items = part(here);
                items.absorb(part(there));
                let expected = part(&numbers);
                assert_eq!((&items, items.len()), (&expected, numbers.len()), "{parted}");
                assert!(items.values().eq(&numbers), "{parted}");
                assert_eq!(items.flagged().unwrap(), expected.clone().flagged().unwrap(), "{parted}");
            }
        }
        // The item of the absorbed map replaces the existing one.
        let mut items: IdMap<PageId, u64> = [(PageId(1), 1), (PageId(2), 1)].into_iter().collect();
        items.absorb([(PageId(2), 2), (PageId(3), 2)].into_iter().collect());
        assert_eq!(
            items.into_items().map(|(page, item)| (page.0, item)).collect::<Vec<_>>(),
            [(1, 1), (2, 2), (3, 2)]
        );
    }

    /// In a full row, the index of an item is its id modulo the length of the row. In other rows, the index is lower by
    /// the number of missing items before it.
    #[test]
    fn items_are_found_in_full_and_in_sparse_rows() {
        let numbers = || (0..5 * ROW).map(PageId);
        for missing in [ROW, ROW + 63, ROW + 64, 2 * ROW - 1, 2 * ROW] {
            let mut items: IdMap<PageId, u64> = numbers().map(|page| (page, page.0)).collect();
            assert_eq!(items.remove(PageId(missing)), Some(missing));
            assert_eq!(items.remove(PageId(missing)), None);
            let expected = |page: PageId| (page.0 != missing).then_some(page.0);
            assert!(numbers().all(|page| items.get(page).copied() == expected(page)), "without {missing}");
            assert_eq!(items.insert(PageId(missing), 7), None);
            assert_eq!(items.insert(PageId(missing), missing), Some(7));
            assert!(
                items.iter().eq(numbers().zip(&(0..5 * ROW).collect::<Vec<_>>())),
                "with {missing} again"
            );
        }
    }
}
