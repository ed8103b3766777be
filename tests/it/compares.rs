//! Comparisons of two pages return the result of a byte-by-byte loop, on the pages' device and on the host, as of one
//! batch.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use remanent::batch::Width;
use remanent::device::Device;
use remanent::device::host::HostDevice;
use remanent::error::Invalid;
use remanent::options::{MemoryOptions, SnapshotSchedule};
use remanent::testing::late_device::LateDevice;
use remanent::testing::sim_disk::SimDisk;
use remanent::{Ack, Error, Options, PageId, Place, Store};

use crate::device_ops::{PLACE, devices, open};
use crate::kill::workload::Random;

const WIDTHS: [Width; 5] = [Width::W1, Width::W2, Width::W4, Width::W8, Width::W16];

/// Creates two pages with these bytes.
fn pair(store: &Store, [left, right]: [&[u8]; 2], places: [Place; 2]) -> [PageId; 2] {
    let mut batch = store.batch();
    batch.create_from(left, places[0]);
    batch.create_from(right, places[1]);
    let pages = store.commit(batch).unwrap().pages;
    [pages[0], pages[1]]
}

/// Counts the differing elements and finds the first, in a simple loop.
fn by_hand(left: &[u8], right: &[u8], width: Width) -> (u64, Option<u64>) {
    let (mut count, mut first) = (0, None);
    for index in 0..left.len().div_ceil(width.bytes()) {
        let range = index * width.bytes()..left.len().min((index + 1) * width.bytes());
        if left[range.clone()] != right[range] {
            count += 1;
            first.get_or_insert(index as u64);
        }
    }
    (count, first)
}

fn check(store: &Store, bytes: [&[u8]; 2], places: [Place; 2], what: &str) {
    let [left, right] = pair(store, bytes, places);
    for width in WIDTHS {
        let found = store.compare(left, right, width).unwrap();
        let expected = by_hand(bytes[0], bytes[1], width);
        assert_eq!((found.differing, found.first), expected, "{width:?}, {what}, {places:?}");
        assert_eq!(found.is_equal, expected.0 == 0);
        assert_eq!(found.lsn, store.lsn());
    }
    store.commit(store.batch().delete(left).delete(right)).unwrap();
}

#[test]
fn comparison_matches_naive_loop() {
    for device in devices() {
        let label = device.label();
        let store = open(&SimDisk::new(), device);
        let mut random = Random(21);
        for len in [0_u64, 1, 7, 15, 16, 17, 100, 4099, 200_001, (1 << 20) + 24] {
            let left = random.bytes(len);
            for changes in [0, 1, 3, len / 2, 2 * len] {
                let mut right = left.clone();
                for _ in 0..changes.min(len * 2) {
                    // Often change the last bytes of the page, where an element may be incomplete.
                    let at = if random.below(4) == 0 { len - 1 } else { random.below(len) };
                    right[at as usize] ^= random.below(3) as u8;
                }
                let places = match random.below(3) {
                    0 => [Place::Pinned, PLACE],
                    _ => [PLACE, PLACE],
                };
                check(&store, [&left, &right], places, &format!("{changes} of {len} on {label}"));
            }
        }
    }
}

/// A long page is compared in several parts. The marks of each part overwrite those of the previous part.
#[test]
fn a_long_page_is_compared_part_by_part() {
    const PART_LEN: usize = 64 << 20;
    let late = Arc::new(LateDevice::new(Arc::new(HostDevice::new())));
    let store = open(&SimDisk::new(), late);
    let left = vec![3; PART_LEN + 21];
    for at in [&[][..], &[PART_LEN - 1], &[PART_LEN], &[PART_LEN + 20], &[5, PART_LEN + 7, PART_LEN + 20]] {
        let mut right = left.clone();
        at.iter().for_each(|at| right[*at] ^= 1);
        let [one, other] = pair(&store, [&left, &right], [PLACE; 2]);
        let found = store.compare(one, other, Width::W16).unwrap();
        assert_eq!((found.differing, found.first), by_hand(&left, &right, Width::W16), "{at:?}");
        store.commit(store.batch().delete(one).delete(other)).unwrap();
    }
}

/// The host compares the pages if the memory budget is too small for the marks.
#[test]
fn comparison_works_at_full_budget() {
    let late: Arc<dyn Device> = Arc::new(LateDevice::new(Arc::new(HostDevice::new())));
    let memory = MemoryOptions::new().budget(PLACE, 2 * 5000);
    let options = Options::new().memory(memory).snapshots(SnapshotSchedule::never());
    let store = Store::open_on(Arc::new(SimDisk::new()), late, options).unwrap();
    let (left, mut right) = (vec![1; 5000], vec![1; 5000]);
    right[4999] = 2;
    check(&store, [&left, &right], [PLACE; 2], "no room for marks");
}

#[test]
fn pages_that_cannot_be_compared_are_named() {
    for device in devices() {
        let store = open(&SimDisk::new(), device);
        for places in [[PLACE; 2], [PLACE, Place::Pinned]] {
            let pages = pair(&store, [&[1; 64], &[1; 65]], places);
            let error = store.compare(pages[0], pages[1], Width::W1).unwrap_err();
            let is_it = matches!(error, Error::Invalid(Invalid::LengthsDiffer { pages: named, lens: [64, 65] }) if named == pages);
            assert!(is_it, "{error}");
            let error = store.compare(pages[0], PageId(99), Width::W1).unwrap_err();
            assert!(matches!(error, Error::UnknownPage { page: PageId(99) }), "{error}");
        }
    }
}

/// Each batch changes both pages in the same way, so the pages are equal as of any batch, whether they are compared in
/// place or one of them is read in pieces.
#[test]
fn pages_are_compared_as_of_one_batch() {
    const LEN: usize = 300_000;
    let host = || Arc::new(HostDevice::new());
    let devices: [Arc<dyn Device>; 2] = [host(), Arc::new(LateDevice::seeded(host(), 4))];
    for (device, place) in
        devices.into_iter().zip([PLACE; 2]).flat_map(|(d, p)| [(d.clone(), p), (d, Place::Pinned)])
    {
        let store = open(&SimDisk::new(), device);
        let [left, right] = pair(&store, [&[0; LEN]; 2], [place, PLACE]);
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in (0_u8..=255).cycle().take_while(|_| !is_done.load(Ordering::Relaxed)) {
                    let mut batch = store.batch();
                    for page in [left, right] {
                        batch.fill(page, 0, LEN as u64, &[number]);
                    }
                    // A comparison waits for all earlier batches, so batches must not accumulate.
                    store.submit(batch).unwrap().wait(Ack::Applied).unwrap();
                }
            });
            for _ in 0..20 {
                let found = store.compare(left, right, Width::W4);
                is_done.store(!found.as_ref().is_ok_and(|found| found.is_equal), Ordering::Relaxed);
                let found = found.unwrap();
                assert!(found.is_equal, "{found:?}, {place}");
            }
            is_done.store(true, Ordering::Relaxed);
        });
    }
}
