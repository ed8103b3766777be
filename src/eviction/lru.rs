//! The least-recently-used policy, which evicts the page that has not been used for the longest time.

use std::collections::{BTreeMap, HashMap};

use remanent_format::PageId;

use super::EvictionPolicy;

/// An eviction policy that evicts the least recently used page first.
#[derive(Debug, Default)]
pub struct Lru {
    /// The pages of the place, sorted by the time of their last use.
    pub(super) by_use: BTreeMap<u64, PageId>,
    /// The time of each page's last use, as a key of `by_use`.
    pub(super) uses: HashMap<PageId, u64>,
    /// The number of uses so far. This number serves as the current time.
    now: u64,
}

impl Lru {
    fn note(&mut self, page: PageId) {
        self.now += 1;
        self.by_use.insert(self.now, page);
        if let Some(before) = self.uses.insert(page, self.now) {
            self.by_use.remove(&before);
        }
    }
}

impl EvictionPolicy for Lru {
    fn arrived(&mut self, page: PageId, _len: u64) {
        self.note(page);
    }

    fn used(&mut self, page: PageId) {
        if self.uses.contains_key(&page) {
            self.note(page);
        }
    }

    fn left(&mut self, page: PageId) {
        if let Some(used) = self.uses.remove(&page) {
            self.by_use.remove(&used);
        }
    }

    fn victim(&mut self) -> Option<PageId> {
        let (_, page) = self.by_use.pop_first()?;
        self.uses.remove(&page);
        Some(page)
    }
}
