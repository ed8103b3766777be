//! Tracks the pages in each place for the eviction policies.

use std::collections::{HashMap, VecDeque};

use remanent_format::{PageId, Place};

use crate::eviction::EvictionPolicy;
use crate::versions::uses::PageUse;

/// The pages of all places except the last, with an eviction policy for each of these places.
pub(crate) struct Residents {
    tiers: Vec<(Place, Box<dyn EvictionPolicy>)>,
    pages: HashMap<PageId, Resident>,
    /// The pages that are not evicted, because calls move pages to their place.
    held: PageCounts,
    /// The pages of the steps of read-aheads, which are evicted only if no other page can be.
    kept: PageCounts,
}

/// Pages with the number of callers that protect each page from eviction.
#[derive(Default)]
struct PageCounts(HashMap<PageId, usize>);

struct Resident {
    tier: usize,
    len: u64,
}

impl Residents {
    pub fn new(tiers: Vec<(Place, Box<dyn EvictionPolicy>)>) -> Self {
        Self { tiers, pages: HashMap::new(), held: PageCounts::default(), kept: PageCounts::default() }
    }

    /// Records a change or a read of a page.
    pub fn record(&mut self, page_use: PageUse) {
        match page_use {
            PageUse::Read(page) => self.used(page),
            PageUse::Changed(page, at) => {
                // Evicting a page without bytes would free nothing, so such a page is not tracked.
                let at = at.filter(|(_, len)| *len > 0).and_then(|(place, len)| {
                    let tier = self.tiers.iter().position(|(of_tier, _)| *of_tier == place)?;
                    Some(Resident { tier, len })
                });
                let is_where_it_was = match (self.pages.get(&page), &at) {
                    (Some(before), Some(now)) => (before.tier, before.len) == (now.tier, now.len),
                    _ => false,
                };
                if is_where_it_was {
                    return self.used(page);
                }
                if let Some(before) = self.pages.remove(&page) {
                    self.tiers[before.tier].1.left(page);
                }
                if let Some(now) = at {
                    self.tiers[now.tier].1.arrived(page, now.len);
                    self.pages.insert(page, now);
                }
            }
        }
    }

    fn used(&mut self, page: PageId) {
        if let Some(resident) = self.pages.get(&page) {
            self.tiers[resident.tier].1.used(page);
        }
    }

    /// Chooses victims from a tier until they have at least `bytes` bytes or there are `count` victims. Held pages, and
    /// pages for which `may_leave` returns `false`, are not chosen. Kept pages are chosen only if the others do not
    /// suffice. The policy forgets the chosen pages. If a chosen page is not evicted, the caller must pass it to
    /// [`return_to_policy`](Self::return_to_policy).
    pub fn choose(
        &mut self,
        tier: usize,
        (bytes, count): (u64, usize),
        may_leave: impl Fn(PageId) -> bool,
    ) -> Vec<(PageId, u64)> {
        let (mut chosen, mut kept, mut staying) = (Vec::new(), VecDeque::new(), Vec::new());
        let mut sum = 0;
        while sum < bytes && chosen.len() < count {
            let Some(page) = self.tiers[tier].1.victim() else { break };
            let Some(resident) = self.pages.get(&page).filter(|resident| resident.tier == tier) else {
                continue;
            };
            if self.held.contains(page) || !may_leave(page) {
                staying.push(page);
            } else if self.kept.contains(page) {
                kept.push_back((page, resident.len));
            } else {
                sum += resident.len;
                chosen.push((page, resident.len));
            }
        }
        while sum < bytes
            && chosen.len() < count
            && let Some((page, len)) = kept.pop_front()
        {
            sum += len;
            chosen.push((page, len));
        }
        staying.extend(kept.into_iter().map(|(page, _)| page));
        staying.into_iter().for_each(|page| self.return_to_policy(page));
        chosen
    }

    /// Returns a chosen page to the policy of its tier.
    pub fn return_to_policy(&mut self, page: PageId) {
        if let Some(resident) = self.pages.get(&page) {
            self.tiers[resident.tier].1.arrived(page, resident.len);
        }
    }

    /// Prevents the eviction of pages until [`release`](Self::release).
    pub fn hold(&mut self, pages: &[PageId]) {
        self.held.add(pages);
    }

    /// Allows the eviction of pages again, once each call that held them has released them.
    pub fn release(&mut self, pages: &[PageId]) {
        self.held.remove(pages);
    }

    /// Protects pages from eviction while other pages can be evicted, until [`unkeep`](Self::unkeep).
    pub fn keep(&mut self, pages: &[PageId]) {
        self.kept.add(pages);
    }

    /// Ends the protection of pages by [`keep`](Self::keep), once each caller that kept them has called this method.
    pub fn unkeep(&mut self, pages: &[PageId]) {
        self.kept.remove(pages);
    }
}

impl PageCounts {
    fn contains(&self, page: PageId) -> bool {
        self.0.contains_key(&page)
    }

    fn add(&mut self, pages: &[PageId]) {
        pages.iter().for_each(|page| *self.0.entry(*page).or_default() += 1);
    }

    fn remove(&mut self, pages: &[PageId]) {
        for page in pages {
            let count = self.0.get_mut(page).expect("a page that was added");
            *count -= 1;
            if *count == 0 {
                self.0.remove(page);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eviction::Lru;

    const PAGES: [PageId; 4] = [PageId(1), PageId(2), PageId(3), PageId(4)];

    fn residents() -> Residents {
        let tiers = [Place::Device(0), Place::Host];
        Residents::new(tiers.map(|place| (place, Box::<Lru>::default() as Box<dyn EvictionPolicy>)).into())
    }

    fn chosen(residents: &mut Residents, tier: usize, bytes: u64) -> Vec<PageId> {
        residents.choose(tier, (bytes, 9), |_| true).into_iter().map(|(page, _)| page).collect()
    }

    #[test]
    fn eviction_takes_pages_from_their_place() {
        let mut residents = residents();
        let [a, b, c, d] = PAGES;
        for (page, at) in [
            (a, Some((Place::Device(0), 10))),
            (b, Some((Place::Device(0), 10))),
            (c, Some((Place::Host, 10))),
            (d, Some((Place::Disk, 10))),
            // A change that moves nothing counts as a use.
            (a, Some((Place::Device(0), 10))),
        ] {
            residents.record(PageUse::Changed(page, at));
        }
        assert_eq!(chosen(&mut residents, 0, 1), [b]);
        // A batch has moved page `b` to the lower place, where it is the most recently used page.
        residents.record(PageUse::Changed(b, Some((Place::Host, 10))));
        residents.record(PageUse::Read(c));
        assert_eq!(chosen(&mut residents, 1, 100), [b, c]);
        residents.record(PageUse::Changed(a, None));
        assert_eq!(chosen(&mut residents, 0, 100), []);
        assert!(residents.pages.keys().all(|page| [b, c].contains(page)));
    }

    #[test]
    fn pages_held_or_in_use_are_chosen_later() {
        let mut residents = residents();
        for page in PAGES {
            residents.record(PageUse::Changed(page, Some((Place::Host, 10))));
        }
        residents.hold(&PAGES[..2]);
        residents.hold(&PAGES[..1]);
        let leased = PAGES[2];
        let free = residents.choose(1, (100, 9), |page| page != leased);
        assert_eq!(free, [(PAGES[3], 10)]);
        residents.release(&PAGES[..2]);
        assert_eq!(residents.choose(1, (100, 9), |_| true).len(), 2, "one is held twice");
        residents.release(&PAGES[..1]);
        assert_eq!(chosen(&mut residents, 1, 100), PAGES[..1]);
        assert!(residents.held.0.is_empty());
    }

    #[test]
    fn kept_pages_are_chosen_last() {
        let mut residents = residents();
        for page in PAGES {
            residents.record(PageUse::Changed(page, Some((Place::Host, 10))));
        }
        let [a, b, c, d] = PAGES;
        residents.keep(&[a, c]);
        residents.keep(&[c]);
        residents.hold(&[d]);
        assert_eq!(chosen(&mut residents, 1, 10), [b]);
        residents.return_to_policy(b);
        assert_eq!(chosen(&mut residents, 1, 15), [b, c], "the others do not suffice");
        residents.return_to_policy(c);
        residents.unkeep(&[a, c]);
        assert_eq!(chosen(&mut residents, 1, 10), [a], "the other one is kept twice");
        residents.unkeep(&[c]);
        assert_eq!(chosen(&mut residents, 1, 100), [c]);
        assert!(residents.kept.0.is_empty());
    }
}
