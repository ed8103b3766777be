//! Eviction policies: which page is evicted, which events a policy receives, and a policy implemented by the
//! caller.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use remanent::testing::sim_disk::SimDisk;
use remanent::tiers::{EvictionPolicy, Tiers};
use remanent::{Ack, PageId, Place};

use super::{DEVICE, LEN, ROOM, open, places, put, tier, two_tiers};
use crate::gpu::on_each_device;

#[test]
fn recently_used_pages_are_not_evicted() {
    on_each_device(|| {
        let store = open(&SimDisk::new(), two_tiers());
        let used: Vec<PageId> = (0..4).map(|number| put(&store, number, 0, DEVICE)).collect();
        for number in 4..200 {
            put(&store, number, 0, DEVICE);
            // Each page is used in a different way.
            store.read_to_vec(used[0]).unwrap();
            store.lease(used[1]).unwrap().end().unwrap();
            put(&store, 2, number, DEVICE);
            store.ensure(&used[3..4], DEVICE).unwrap();
        }
        assert_eq!(places(&store, &used), [DEVICE; 4]);
        let found = tier(&store, DEVICE);
        assert_eq!((found.hits, found.misses), (196, 0));
    });
}

#[test]
fn custom_policy_decides_evictions() {
    /// Evicts the page with the highest id first.
    #[derive(Default)]
    struct Highest(std::collections::BTreeSet<PageId>);

    impl EvictionPolicy for Highest {
        fn arrived(&mut self, page: PageId, len: u64) {
            assert_eq!(len, LEN);
            assert!(self.0.insert(page), "it is new here");
        }

        fn used(&mut self, _page: PageId) {}

        fn left(&mut self, page: PageId) {
            self.0.remove(&page);
        }

        fn victim(&mut self) -> Option<PageId> {
            self.0.pop_last()
        }
    }

    let made = Arc::new(AtomicU64::new(0));
    let counts = made.clone();
    let tiers = Tiers::new([DEVICE, Place::Disk]).policy(move |place| {
        assert_eq!(place, DEVICE);
        counts.fetch_add(1, Ordering::Relaxed);
        Box::<Highest>::default()
    });
    let options = two_tiers().tiers(tiers).ack(Ack::Applied);
    let store = open(&SimDisk::new(), options);
    let pages: Vec<PageId> = (0..3 * ROOM).map(|number| put(&store, number, 0, DEVICE)).collect();
    assert_eq!(made.load(Ordering::Relaxed), 1);
    let found = places(&store, &pages);
    assert_eq!(found[..8], [DEVICE; 8], "the first ones never leave");
    assert!(
        found[8..].contains(&Place::Disk) && found.iter().filter(|place| **place == DEVICE).count() <= 16
    );
}

/// The promotion of a page does not count as an access. Otherwise, each promoted page would seem to be
/// accessed repeatedly. A second request for the page counts as an access.
#[test]
fn promoted_page_counts_as_used_when_requested_again() {
    /// Evicts the oldest page first, and records all events.
    #[derive(Default)]
    struct Heard(std::collections::VecDeque<PageId>, Arc<Mutex<Vec<(&'static str, PageId)>>>);

    impl EvictionPolicy for Heard {
        fn arrived(&mut self, page: PageId, _len: u64) {
            self.0.push_back(page);
            self.1.lock().unwrap().push(("arrived", page));
        }

        fn used(&mut self, page: PageId) {
            self.1.lock().unwrap().push(("used", page));
        }

        fn left(&mut self, page: PageId) {
            self.0.retain(|other| *other != page);
        }

        fn victim(&mut self) -> Option<PageId> {
            self.0.pop_front()
        }
    }

    let all = Arc::<Mutex<Vec<_>>>::default();
    let heard = all.clone();
    let tiers = Tiers::new([DEVICE, Place::Disk])
        .policy(move |_| Box::new(Heard(std::collections::VecDeque::new(), heard.clone())));
    let store = open(&SimDisk::new(), two_tiers().tiers(tiers).ack(Ack::Applied));
    let coming = put(&store, 999, 0, Place::Disk);
    // Create other pages until the policy has received the events.
    let fill = |from: u64| (from..from + 3 * ROOM).for_each(|number| _ = put(&store, number, 0, DEVICE));
    let of_page = || {
        let heard = all.lock().unwrap();
        heard.iter().filter(|(_, page)| *page == coming).map(|(what, _)| *what).collect::<Vec<_>>()
    };
    store.ensure(&[coming], DEVICE).unwrap();
    fill(0);
    assert_eq!(of_page(), ["arrived"]);
    store.ensure(&[coming], DEVICE).unwrap();
    store.ensure(&[coming], DEVICE).unwrap();
    fill(100);
    assert_eq!(of_page(), ["arrived", "arrived", "used"]);
}
