//! Compares LRU with a simple model, and checks the bookkeeping and scan resistance of S3-FIFO.

use super::s3_fifo::STALE_MAX;
use super::*;

const LEN: u64 = 100;

/// Returns a generator of pseudorandom numbers that are the same in each run.
fn numbers(mut seed: u64) -> impl FnMut(u64) -> u64 {
    move |limit| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % limit
    }
}

/// A simple model of LRU: a list of pages in the order of their last use.
#[derive(Default)]
struct ListLru(Vec<PageId>);

impl EvictionPolicy for ListLru {
    fn arrived(&mut self, page: PageId, _len: u64) {
        self.left(page);
        self.0.push(page);
    }

    fn used(&mut self, page: PageId) {
        if self.0.contains(&page) {
            self.arrived(page, 0);
        }
    }

    fn left(&mut self, page: PageId) {
        self.0.retain(|other| *other != page);
    }

    fn victim(&mut self) -> Option<PageId> {
        (!self.0.is_empty()).then(|| self.0.remove(0))
    }
}

#[test]
fn the_least_recently_used_page_leaves_first() {
    let mut next = numbers(7);
    let (mut policy, mut list) = (Lru::default(), ListLru::default());
    for _ in 0..20_000 {
        let page = PageId(next(40));
        match next(5) {
            0 => {
                policy.arrived(page, LEN);
                list.arrived(page, LEN);
            }
            1 | 2 => {
                policy.used(page);
                list.used(page);
            }
            3 => {
                policy.left(page);
                list.left(page);
            }
            _ => assert_eq!(policy.victim(), list.victim()),
        }
        assert_eq!(policy.by_use.len(), policy.uses.len());
    }
}

/// Every resident page is evicted exactly once, and no other page is evicted.
#[test]
fn each_page_leaves_queues_once() {
    let mut next = numbers(11);
    let mut policy = S3Fifo::default();
    let mut there = std::collections::BTreeSet::new();
    for _ in 0..50_000 {
        let page = PageId(next(60));
        match next(6) {
            0 | 1 => {
                policy.arrived(page, 1 + next(LEN));
                there.insert(page);
            }
            2 | 3 => policy.used(page),
            4 => {
                policy.left(page);
                there.remove(&page);
            }
            _ => {
                let victim = policy.victim();
                assert_eq!(victim.is_none(), there.is_empty());
                victim.iter().for_each(|page| assert!(there.remove(page), "{page} was not there"));
            }
        }
        assert_eq!(policy.pages.len(), there.len());
        assert_eq!(policy.small.count + policy.main.count, there.len());
        let bytes: u64 = policy.pages.values().map(|page| page.len).sum();
        assert_eq!(policy.small.bytes + policy.main.bytes, bytes);
        // The numbers of stale entries and remembered ids do not grow with the lifetime of a store.
        assert!(policy.small.entries.len() + policy.main.entries.len() <= 2 * there.len() + 3 * STALE_MAX);
        assert!(policy.ghosts.order.len() <= 61);
    }
    while let Some(page) = policy.victim() {
        assert!(there.remove(&page));
    }
    assert!(there.is_empty());
}

/// Returns the number of requests that find their page in a cache of `capacity` pages.
fn hits(policy: &mut dyn EvictionPolicy, capacity: usize, requests: impl Iterator<Item = u64>) -> usize {
    let mut there = std::collections::HashSet::new();
    let mut hits = 0;
    for page in requests.map(PageId) {
        if there.contains(&page) {
            hits += 1;
            policy.used(page);
            continue;
        }
        if there.len() == capacity {
            let victim = policy.victim().expect("the cache is full");
            assert!(there.remove(&victim));
        }
        there.insert(page);
        policy.arrived(page, LEN);
    }
    hits
}

#[test]
fn scan_evicts_reused_pages_with_lru_but_not_s3_fifo() {
    // Each of ten rounds uses 50 pages repeatedly, and then 200 other pages once.
    let requests = || {
        (0..10u64).flat_map(|round| {
            let hot = (0..3).flat_map(|_| 0..50);
            hot.chain((0..200).map(move |at| 1000 + 200 * round + at))
        })
    };
    let lru = hits(&mut Lru::default(), 100, requests());
    let s3 = hits(&mut S3Fifo::default(), 100, requests());
    assert_eq!(lru, 10 * 100, "each scan drives all of them out");
    assert_eq!(s3, 10 * 150 - 50, "only the first use of each is a miss");
}
