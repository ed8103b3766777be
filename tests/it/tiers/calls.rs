//! Calls that move pages to a place: immediately, as a prefetch, and for a lease or pin.

use std::sync::atomic::Ordering;
use std::time::Duration;

use remanent::error::Unavailable;
use remanent::testing::sim_disk::SimDisk;
use remanent::{Error, PageId, Place};

use super::{DEVICE, LEN, ROOM, bytes, open, peak, place, places, put, two_tiers};
use crate::files::small;
use crate::gpu::on_each_device;

#[test]
fn allocations_of_one_request_are_all_or_nothing() {
    on_each_device(|| {
        let store = open(&SimDisk::new(), two_tiers());
        let pages: Vec<PageId> = (0..4 * ROOM).map(|number| put(&store, number, 0, DEVICE)).collect();
        // Some of the pages are already in the place. None of them is evicted for another.
        for from in (0..3 * ROOM as usize).step_by(5) {
            // A part of the place is kept free for new pages.
            let requested = &pages[from..from + ROOM as usize - 2];
            store.ensure(requested, DEVICE).unwrap();
            assert_eq!(places(&store, requested), vec![DEVICE; requested.len()]);
        }
        assert!(peak(&store, DEVICE) <= ROOM * LEN);
        let before = places(&store, &pages);
        let refused = store.ensure(&pages[..ROOM as usize + 1], DEVICE).unwrap_err();
        assert!(matches!(refused, Error::OverBudget { place: DEVICE, .. }), "{refused}");
        let came = |now: &[Place]| {
            before.iter().zip(now).filter(|(before, now)| before != now && **now == DEVICE).count()
        };
        assert_eq!(came(&places(&store, &pages)), 0);
        for (number, page) in (0..).zip(&pages) {
            assert_eq!(store.read_to_vec(*page).unwrap(), bytes(number, 0));
        }
    });
}

#[test]
fn pages_are_prefetched() {
    on_each_device(|| {
        let store = open(&SimDisk::new(), two_tiers());
        let pages: Vec<PageId> = (0..4 * ROOM).map(|number| put(&store, number, 0, DEVICE)).collect();
        let mut batch = store.batch();
        batch.delete(pages[1]);
        store.commit(batch).unwrap();
        // A deleted page is skipped.
        let coming = store.prefetch(&pages[..4], DEVICE).unwrap();
        coming.wait().unwrap();
        assert!(coming.is_done().unwrap());
        assert!(coming.wait_timeout(Duration::ZERO).unwrap());
        for page in [0, 2, 3] {
            assert_eq!(place(&store, pages[page]), DEVICE);
        }
        // The pages do not fit. The failure is reported once.
        let mut batch = store.batch();
        let mut long = Vec::new();
        for _ in 0..2 {
            long.push(batch.create((ROOM / 2 + 1) * LEN, Place::Disk).page());
        }
        let long = store.commit(batch).unwrap().pages;
        let coming = store.prefetch(&long, DEVICE).unwrap();
        assert!(matches!(coming.wait().unwrap_err(), Error::OverBudget { .. }));
        coming.wait().unwrap();
        // Cancel before the prefetch begins or while it is running. No thread hangs, and prefetched pages are
        // complete.
        for _ in 0..20 {
            let coming = store.prefetch(&pages[8..16], DEVICE).unwrap();
            coming.cancel().unwrap();
            assert!(coming.is_done().unwrap());
            coming.wait().unwrap();
            store.ensure(&pages[8..16], Place::Disk).unwrap();
        }
        let coming = store.prefetch(&pages[2..60], DEVICE).unwrap();
        store.close().unwrap();
        assert!(matches!(coming.wait(), Ok(()) | Err(Error::Closed | Error::OverBudget { .. })));
    });
}

/// A lease or pin needs an address, so the page is moved to memory. It is not evicted while the lease or pin
/// exists.
#[test]
fn leases_and_pins_move_pages_from_disk_to_memory() {
    let store = open(&SimDisk::new(), two_tiers());
    let pages: Vec<PageId> = (0..3 * ROOM).map(|number| put(&store, number, 0, Place::Disk)).collect();
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let store = &store;
        scope.spawn(|| {
            for number in 0.. {
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
                put(store, 1000 + number % ROOM, number, DEVICE);
            }
        });
        for round in 0..10_u64 {
            let of =
                |at: u64| ((5 * round + at) % (3 * ROOM), pages[((5 * round + at) % (3 * ROOM)) as usize]);
            let leases: Vec<_> = (0..4).map(|at| (of(at).0, store.lease(of(at).1).unwrap())).collect();
            let (number, pinned) = of(4);
            let pin = store.pin(pinned).unwrap();
            for (number, lease) in &leases {
                assert_eq!(lease.bytes().unwrap(), bytes(*number, 0), "page {number}");
                assert_eq!(place(store, lease.info().page), DEVICE);
            }
            assert_eq!(pin.byte_len(), LEN);
            assert_eq!(place(store, pinned), DEVICE);
            assert_eq!(store.read_to_vec(pinned).unwrap(), bytes(number, 0));
        }
        is_over.store(true, Ordering::Relaxed);
    });
    // Without tiers, there is no default place.
    let store = open(&SimDisk::new(), small());
    let page = put(&store, 0, 0, Place::Disk);
    for refused in [store.lease(page).map(drop), store.pin(page).map(drop)] {
        assert!(
            matches!(refused, Err(Error::Unavailable(Unavailable::Place { place: Place::Disk, .. }))),
            "{refused:?}"
        );
    }
    assert!(matches!(store.lease(PageId(999)), Err(Error::UnknownPage { .. })));
}
