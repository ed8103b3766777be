//! Floor 0. Pages by their ids. Ids are given out one after the other, so pages lie together by the 64: among ten
//! million of them one is found with as few misses of the cache as among a thousand, nearly, and beside each lie
//! no more than a few bytes. (A tree of single pages took 2.8 times as long for a commit among a million as among
//! a thousand, and half of it was empty: ids that rise fill its nodes half.)

use std::collections::BTreeMap;

use crate::ids::PageId;
use crate::table::PageInfo;

/// How many ids a chunk covers: one bit each.
const CHUNK_IDS: u64 = u64::BITS as u64;

/// Pages, in the order of their ids.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Pages {
    /// By the ids divided by [`CHUNK_IDS`]; none is empty.
    chunks: BTreeMap<u64, Chunk>,
    count: usize,
}

/// The pages among consecutive ids.
#[derive(Clone, Debug, Default, PartialEq)]
struct Chunk {
    /// Which of the ids are pages, the lowest first.
    present: u64,
    /// Those pages.
    pages: Vec<PageInfo>,
}

impl Chunk {
    /// Where a page is, or where it would be.
    fn position(&self, page: PageId) -> Result<usize, usize> {
        let bit = 1 << (page.0 % CHUNK_IDS);
        let at = (self.present & (bit - 1)).count_ones() as usize;
        if self.present & bit == 0 { Err(at) } else { Ok(at) }
    }
}

impl Pages {
    pub fn get(&self, page: PageId) -> Option<&PageInfo> {
        let chunk = self.chunks.get(&(page.0 / CHUNK_IDS))?;
        chunk.position(page).ok().map(|at| &chunk.pages[at])
    }

    pub fn get_mut(&mut self, page: PageId) -> Option<&mut PageInfo> {
        let chunk = self.chunks.get_mut(&(page.0 / CHUNK_IDS))?;
        chunk.position(page).ok().map(|at| &mut chunk.pages[at])
    }

    /// Puts a page where its id says, in place of the one that is there.
    pub fn insert(&mut self, info: PageInfo) {
        let page = info.page;
        let chunk = self.chunks.entry(page.0 / CHUNK_IDS).or_default();
        match chunk.position(page) {
            Ok(at) => chunk.pages[at] = info,
            Err(at) => {
                chunk.pages.insert(at, info);
                chunk.present |= 1 << (page.0 % CHUNK_IDS);
                self.count += 1;
            }
        }
    }

    pub fn remove(&mut self, page: PageId) -> Option<PageInfo> {
        let chunk = self.chunks.get_mut(&(page.0 / CHUNK_IDS))?;
        let removed = chunk.pages.remove(chunk.position(page).ok()?);
        chunk.present &= !(1 << (page.0 % CHUNK_IDS));
        if chunk.present == 0 {
            self.chunks.remove(&(page.0 / CHUNK_IDS));
        }
        self.count -= 1;
        Some(removed)
    }

    /// The page with the highest id.
    pub fn last(&self) -> Option<&PageInfo> {
        self.chunks.last_key_value().and_then(|(_, chunk)| chunk.pages.last())
    }

    pub fn iter(&self) -> impl ExactSizeIterator<Item = &PageInfo> {
        Counted { pages: self.chunks.values().flat_map(|chunk| &chunk.pages), left: self.count }
    }
}

impl FromIterator<PageInfo> for Pages {
    /// Of pages with the same id the last one stays.
    fn from_iter<I: IntoIterator<Item = PageInfo>>(pages: I) -> Self {
        let mut all = Self::default();
        pages.into_iter().for_each(|info| all.insert(info));
        // Pages that are all known by now need no room to grow.
        all.chunks.values_mut().for_each(|chunk| chunk.pages.shrink_to_fit());
        all
    }
}

/// An iterator of which one knows how many it has left.
struct Counted<I> {
    pages: I,
    left: usize,
}

impl<I: Iterator> Iterator for Counted<I> {
    type Item = I::Item;

    fn next(&mut self) -> Option<I::Item> {
        let next = self.pages.next()?;
        self.left -= 1;
        Some(next)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl<I: Iterator> ExactSizeIterator for Counted<I> {}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::ids::Place;

    /// Whatever is done to them, they are what an ordinary map is.
    #[test]
    fn pages_are_found_under_their_ids_and_in_order() {
        let ids = [1, 63, 64, 65, 127, 128, 5000, u64::MAX - 1, u64::MAX, 2, 0];
        let (mut pages, mut expected) = (Pages::default(), BTreeMap::new());
        // Steps that share no factor with the number of ids put and take each of them in many orders.
        for step in 0..2000_u64 {
            let page = PageId(ids[(step * 7 % 11) as usize]);
            if step * step % 5 < 2 {
                assert_eq!(pages.remove(page), expected.remove(&page));
            } else {
                let info = PageInfo::new(page, step, Place::Host);
                pages.insert(info.clone());
                expected.insert(page, info);
            }
            if let Some(info) = pages.get_mut(page) {
                info.len += 1;
                expected.get_mut(&page).expect("there in both").len += 1;
            }
            assert!(ids.iter().all(|id| pages.get(PageId(*id)) == expected.get(&PageId(*id))));
            assert!(pages.iter().eq(expected.values()), "after step {step}");
            assert_eq!(pages.iter().len(), expected.len());
            assert_eq!(pages.last(), expected.values().last());
            assert_eq!(pages, expected.values().cloned().collect());
        }
    }
}
