//! Opens with less memory than the pages need. Pages that do not fit are demoted before any page is loaded.

use std::sync::Arc;

use remanent::device::host::HostDevice;
use remanent::options::{MemoryOptions, PageLoad};
use remanent::testing::sim_disk::{CrashImage, SimDisk};
use remanent::tiers::Tiers;
use remanent::{Ack, Error, PageId, Place, Store};

use super::{
    DEVICE, LEN, ROOM, bytes, each_crash, goes_on, open, open_after, peak, places, places_after, put,
};
use crate::files::small;
use crate::gpu::on_each_device;
use crate::with_options::With;

/// A life without a memory limit is followed by an open with little memory. Pages that do not fit are demoted
/// before any page is loaded. Commits, restarts and audits find the pages unchanged.
#[test]
fn open_with_less_memory_demotes_pages() {
    on_each_device(|| {
        let page_loads = [PageLoad::Eager, PageLoad::OnDemand];
        for (page_load, snapshot) in page_loads.into_iter().flat_map(|load| [(load, false), (load, true)]) {
            let disk = SimDisk::new();
            let roomy = open(&disk, small());
            let pages: Vec<PageId> = (0..4 * ROOM).map(|number| put(&roomy, number, 0, DEVICE)).collect();
            roomy.snapshot().unwrap();
            // The content of these pages differs from their images.
            let changed = 4 * ROOM - 3;
            for number in 0..4 * ROOM {
                if number >= changed {
                    put(&roomy, number, 1, DEVICE);
                }
            }
            let lsn = roomy.lsn();
            roomy.close().unwrap();
            let options = || {
                let memory = MemoryOptions::new()
                    .budget(DEVICE, ROOM * LEN)
                    .budget(Place::Host, ROOM * LEN)
                    .load(page_load);
                let tiers = Tiers::new([DEVICE, Place::Host, Place::Disk]).lru();
                small().memory(memory).tiers(tiers)
            };
            let check = |store: &Store| {
                for (number, page) in (0..).zip(&pages) {
                    let version = u64::from(number >= changed);
                    assert_eq!(store.read_to_vec(*page).unwrap(), bytes(number, version), "page {number}");
                }
                assert!(peak(store, DEVICE) <= ROOM * LEN && peak(store, Place::Host) <= ROOM * LEN);
            };
            let store = open(&disk, options());
            assert_eq!(store.recovered().lowered_pages, 4 * ROOM - (ROOM - 1), "one part in 16 is kept free");
            assert_eq!(store.lsn(), lsn.next(), "one batch says so");
            let found = places(&store, &pages);
            let count = |place| found.iter().filter(|of| **of == place).count() as u64;
            assert_eq!((count(DEVICE), count(Place::Host)), (ROOM - 1, ROOM - 1));
            // The least recently changed pages are evicted, and the most recently changed pages stay.
            assert!(found[..2 * ROOM as usize].iter().all(|place| *place == Place::Disk));
            assert!(found[changed as usize..].iter().all(|place| *place == DEVICE));
            check(&store);
            store.audit().unwrap();
            if snapshot {
                store.snapshot().unwrap();
            }
            store.close().unwrap();
            // The next open finds the pages in these places.
            let store = open(&disk, options());
            assert_eq!((places(&store, &pages), store.recovered().lowered_pages), (found.clone(), 0));
            check(&store);
            store.snapshot().unwrap();
            store.close().unwrap();
            // After a snapshot, the pages are still in these places.
            let store = open(&disk, options());
            assert_eq!((places(&store, &pages), store.recovered().lowered_pages), (found, 0));
            check(&store);
            put(&store, 0, 7, DEVICE);
            store.ensure(&pages[..ROOM as usize / 2], DEVICE).unwrap();
            assert_eq!(store.read_to_vec(pages[0]).unwrap(), bytes(0, 7));
            assert!(store.audit().unwrap().changed.is_empty());
        }
    });
}

/// For a demoted page, the changes since its image are kept in host memory, within the budget for them. If
/// they do not fit, the open fails as it does without tiers, and no data is lost.
#[test]
fn open_limits_demoted_changed_bytes() {
    let disk = SimDisk::new();
    // The segments are so long that the log contains the pages' bytes, and no image is written.
    let long = || small().with(|options| options.log.segment_len = 1 << 20);
    let roomy = open(&disk, long());
    let pages: Vec<PageId> = (0..2 * ROOM).map(|number| put(&roomy, number, 3, DEVICE)).collect();
    roomy.close().unwrap();
    let options = |waiting: u64| {
        let memory = MemoryOptions::new().budget(DEVICE, ROOM * LEN).budget(Place::Disk, waiting);
        long().memory(memory).tiers(Tiers::new([DEVICE, Place::Disk]))
    };
    let opened = Store::open_on(Arc::new(disk.clone()), Arc::new(HostDevice::new()), options(ROOM * LEN));
    let refused = opened.unwrap_err();
    assert!(
        matches!(refused, Error::OverBudget { place: DEVICE, requested, .. } if requested == 2 * ROOM * LEN),
        "{refused}"
    );
    let store = open(&disk, options(2 * ROOM * LEN));
    assert_eq!(store.recovered().lowered_pages, ROOM + 1);
    for (number, page) in (0..).zip(&pages) {
        assert_eq!(store.read_to_vec(*page).unwrap(), bytes(number, 3));
    }
    store.snapshot().unwrap();
    store.close().unwrap();
    // Once images of the pages exist, the pages need no memory.
    open(&disk, options(ROOM * LEN)).audit().unwrap();
}

/// After a crash at any point of a life without a memory limit, of the open that demotes pages, or after it,
/// an open with little memory finds every acknowledged page.
#[test]
fn crash_around_open_with_less_memory_loses_nothing() {
    let disk = SimDisk::new();
    let tiers = || {
        let memory = MemoryOptions::new().budget(DEVICE, 5 * LEN).budget(Place::Host, 3 * LEN);
        small().memory(memory).tiers(Tiers::new([DEVICE, Place::Host, Place::Disk])).ack(Ack::Durable)
    };
    let (mut round, number_of) = (0, |round: u64| round * 7 % 13);
    let mut live = |store: Store, rounds: u64| {
        for _ in 0..rounds {
            put(&store, number_of(round), round, DEVICE);
            disk.note_ack(round);
            round += 1;
            if round % 16 == 9 {
                store.snapshot().unwrap();
            }
        }
    };
    live(open(&disk, small().ack(Ack::Durable)), 24);
    let lowering = open(&disk, tiers());
    assert_eq!(lowering.recovered().lowered_pages, 13 - 4, "a part of five is kept free");
    live(lowering, 6);
    let (mut images, mut lowered) = (0, 0);
    let mut check = |image: CrashImage| {
        let store = open_after(&image, tiers());
        places_after(&store, &image, number_of);
        assert!(peak(&store, DEVICE) <= 5 * LEN && peak(&store, Place::Host) <= 3 * LEN, "{image}");
        (images, lowered) = (images + 1, lowered + u64::from(store.recovered().lowered_pages > 0));
        if images % 16 == 0 {
            goes_on(&store, &image);
        }
    };
    each_crash(&disk, &mut check);
    assert!(images > 500 && lowered > images / 4, "{images} images, {lowered} opens took pages down");
}
