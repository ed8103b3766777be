//! The space of a place: how calls share it, which calls wait for it, and which calls fail without it.

use std::sync::Arc;
use std::time::Duration;

use remanent::device::host::HostDevice;
use remanent::options::{ImageOptions, MemoryOptions};
use remanent::testing::faulty_device::FaultyDevice;
use remanent::testing::sim_disk::SimDisk;
use remanent::tiers::Tiers;
use remanent::{Error, PageId, Place, Store};

use super::{DEVICE, LEN, ROOM, bytes, key, open, peak, place, places, put, tier, two_tiers};
use crate::faults::disk_full::{is_held, until};
use crate::files::small;
use crate::gpu::on_each_device;
use crate::interrupted_reads::InterruptedDisk;
use crate::with_options::With;

#[test]
fn leased_and_pinned_pages_are_not_evicted() {
    on_each_device(|| {
        let store = open(&SimDisk::new(), two_tiers());
        let pages: Vec<PageId> = (0..8).map(|number| put(&store, number, 0, DEVICE)).collect();
        let leases: Vec<_> = pages[..4].iter().map(|page| store.lease(*page).unwrap()).collect();
        let pins: Vec<_> = pages[4..].iter().map(|page| store.pin(*page).unwrap()).collect();
        for number in 8..8 + 3 * ROOM {
            put(&store, number, 0, DEVICE);
        }
        assert_eq!(places(&store, &pages), [DEVICE; 8]);
        // No other page is left in the place.
        let mut batch = store.batch();
        batch.create((ROOM - 7) * LEN, DEVICE);
        let refused = store.commit(batch).unwrap_err();
        assert!(matches!(refused, Error::OverBudget { place: DEVICE, .. }), "{refused}");
        assert_eq!(places(&store, &pages), [DEVICE; 8]);
        assert!(tier(&store, DEVICE).waits > 0);
        drop((leases, pins));
        let mut batch = store.batch();
        batch.create((ROOM - 7) * LEN, DEVICE);
        store.commit(batch).unwrap();
        // The page is longer than the whole place.
        let mut batch = store.batch();
        batch.create((ROOM + 1) * LEN, DEVICE);
        assert!(matches!(store.commit(batch).unwrap_err(), Error::OverBudget { .. }));
    });
}

/// Threads concurrently create, change, read and promote pages. No call fails, and the place never exceeds
/// its budget.
#[test]
fn concurrent_threads_share_full_place_within_budget() {
    on_each_device(|| {
        let store = open(&SimDisk::new(), two_tiers());
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let store = &store;
                scope.spawn(move || {
                    for round in 0..40 {
                        let number = 1000 * thread + round % 13;
                        let page = put(store, number, round, DEVICE);
                        let other = store.page_by_key(key(1000 * thread + round % 5)).unwrap().page;
                        store.ensure(&[other], DEVICE).unwrap();
                        assert_eq!(store.read_to_vec(page).unwrap(), bytes(number, round));
                    }
                });
            }
        });
        assert!(peak(&store, DEVICE) <= ROOM * LEN);
        for thread in 0..4 {
            for number in 0..13 {
                let page = store.page_by_key(key(1000 * thread + number)).unwrap().page;
                let version = (0..40).rev().find(|round| round % 13 == number).unwrap();
                assert_eq!(store.read_to_vec(page).unwrap(), bytes(1000 * thread + number, version));
            }
        }
        assert!(store.audit().unwrap().changed.is_empty());
    });
}

/// The device counts its allocations. No place exceeds its budget by a byte, even while snapshots copy pages.
#[test]
fn device_allocations_stay_within_place_budgets() {
    let budgets = [(DEVICE, ROOM * LEN), (Place::Pinned, 6 * LEN + 100), (Place::Host, 4 * LEN)];
    let budget =
        budgets.iter().fold(MemoryOptions::new(), |budget, (place, bytes)| budget.budget(*place, *bytes));
    let tiers = Tiers::new([DEVICE, Place::Pinned, Place::Host, Place::Disk]);
    let device = Arc::new(FaultyDevice::new(Arc::new(HostDevice::new())));
    let options = small().memory(budget).tiers(tiers);
    let store = Store::open_on(Arc::new(SimDisk::new()), device.clone(), options).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..3_u64 {
            let store = &store;
            scope.spawn(move || {
                let mut pages = Vec::new();
                for round in 0..60 {
                    let number = 1000 * thread + round * 7 % 23;
                    let mut batch = store.batch();
                    batch.create((1 + number % 3) * LEN / 2 + number, DEVICE);
                    pages.push(store.commit(batch).unwrap().pages[0]);
                    put(store, number, round, DEVICE);
                    let page = |at: u64| pages[(round * at) as usize % pages.len()];
                    store.ensure(&[page(3), page(5)], DEVICE).unwrap();
                    store.demote(&[page(7)]).unwrap_or_else(|error| panic!("{error}"));
                    assert!(store.read_to_vec(page(11)).is_ok());
                    if round % 20 == thread {
                        store.snapshot().unwrap();
                    }
                }
            });
        }
    });
    for (place, budget) in budgets {
        let peak = device.peak_bytes(place);
        assert!((budget / 2..=budget).contains(&peak), "{peak} bytes in {place}, of {budget}");
    }
}

/// While a place has space, commits do not wait, even if the disk to which pages are evicted does not
/// respond.
#[test]
fn commits_do_not_wait_for_slow_disk_while_memory_has_room() {
    const ROOM: u64 = 64;
    let memory = MemoryOptions::new().budget(DEVICE, ROOM * LEN);
    let options = || {
        small()
            .memory(memory.clone())
            .tiers(Tiers::new([DEVICE, Place::Disk]).free_part(4))
            .with(|options| options.log.segment_len = 4 << 20)
    };
    let (stands, goes) = (std::sync::mpsc::channel(), std::sync::mpsc::channel::<()>());
    // The thread of the tiers verifies its writes before it frees memory.
    let disk = InterruptedDisk::of_thread(&SimDisk::new(), "remanent-tiers", move || {
        stands.0.send(()).unwrap();
        goes.1.recv().unwrap();
    });
    let store = Store::open_on(Arc::new(disk), Arc::new(HostDevice::new()), options()).unwrap();
    let mut count = 0;
    while stands.1.try_recv().is_err() {
        put(&store, count, 0, DEVICE);
        count += 1;
        if count == ROOM - 4 {
            // Less than half of the free part of the place is left, so the thread was started.
            stands.1.recv_timeout(Duration::from_secs(60)).expect("it reads what it has written");
            break;
        }
    }
    let before = count;
    assert!(before < ROOM, "there is room left");
    (before..ROOM).for_each(|number| _ = put(&store, number, 0, DEVICE));
    let waits = |store: &Store| store.stats().tiers.iter().map(|tier| tier.waits).sum::<u64>();
    assert_eq!(waits(&store), 0);
    goes.0.send(()).unwrap();
    (ROOM..2 * ROOM).for_each(|number| _ = put(&store, number, 0, DEVICE));
    for number in 0..2 * ROOM {
        let page = store.page_by_key(key(number)).unwrap().page;
        assert_eq!(store.read_to_vec(page).unwrap(), bytes(number, 0));
    }
}

/// On a full disk, pages cannot be demoted. A call that needs space in memory fails, and no data is lost.
/// Once the disk has space, pages are demoted as before, even after a restart.
#[test]
fn full_disk_keeps_pages_in_place() {
    on_each_device(|| {
        let disk = SimDisk::new();
        let options =
            || two_tiers().images(ImageOptions::new().compression(remanent::options::Compression::Off));
        let mut store = open(&disk, options());
        let mut held: Vec<(u64, PageId)> = Vec::new();
        let mut next = 0;
        for turn in 0..3 {
            for number in next..next + ROOM {
                held.push((number, put(&store, number, 0, DEVICE)));
            }
            next += ROOM;
            // Another thread creates the files that the next open needs. On a full disk, existing files can
            // only be kept.
            until(|| is_held(&disk, 1));
            disk.set_capacity(Some(disk.used_bytes()));
            let mut refusals = 0;
            for number in next..next + 2 * ROOM {
                match store.put(key(number), bytes(number, 0), DEVICE) {
                    Ok((page, _)) => held.push((number, page)),
                    Err(Error::OverBudget { place: DEVICE, .. } | Error::DiskFull { .. }) => refusals += 1,
                    Err(error) => panic!("turn {turn}: {error}"),
                }
            }
            next += 2 * ROOM;
            assert!(refusals > 0, "turn {turn}: there was no room for {} pages", 2 * ROOM);
            let check = |store: &Store, what: &str| {
                for (number, page) in &held {
                    assert_eq!(store.read_to_vec(*page).unwrap(), bytes(*number, 0), "{what}: page {number}");
                }
            };
            check(&store, "on the full disk");
            assert!(peak(&store, DEVICE) <= ROOM * LEN);
            drop(store);
            store = open(&disk, options());
            check(&store, "on the full disk, opened anew");
            disk.set_capacity(None);
            for number in next..next + ROOM {
                put(&store, number, 0, DEVICE);
            }
            next += ROOM;
            check(&store, "with space");
        }
    });
}

/// A page in caller-owned memory does not count toward the budget. It is not evicted, because that would free
/// no memory.
#[test]
fn lent_page_stays_in_place() {
    on_each_device(|| {
        let store = open(&SimDisk::new(), two_tiers());
        let memory = store.device_bytes(LEN, DEVICE).unwrap();
        let mut batch = store.batch();
        let page = batch.create_in(&memory).page();
        batch.write(page, 0, &bytes(0, 0));
        let lent = store.commit(batch).unwrap().pages[0];
        let pages: Vec<PageId> = (1..3 * ROOM).map(|number| put(&store, number, 0, DEVICE)).collect();
        assert!(places(&store, &pages).contains(&Place::Disk));
        assert_eq!(place(&store, lent), DEVICE);
        assert_eq!(store.read_to_vec(lent).unwrap(), bytes(0, 0));
    });
}
