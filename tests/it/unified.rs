//! Hints for pages in unified memory. They change no byte, and fail where they would have no effect.

use std::sync::Arc;

use remanent::device::Device;
use remanent::device::host::HostDevice;
use remanent::device::multi::MultiDevice;
use remanent::device::{UnifiedHint, UnifiedSide};
use remanent::error::Refused;
use remanent::testing::sim_disk::SimDisk;
use remanent::{Error, Options, PageId, Place, Store};

use crate::gpu;

const LEN: u64 = 300_000;
const HINTS: [UnifiedHint; 8] = [
    UnifiedHint::Prefer(Some(UnifiedSide::Gpu)),
    UnifiedHint::Fetch(UnifiedSide::Gpu),
    UnifiedHint::ReadMostly(true),
    UnifiedHint::Fetch(UnifiedSide::Host),
    UnifiedHint::Prefer(Some(UnifiedSide::Host)),
    UnifiedHint::Fetch(UnifiedSide::Gpu),
    UnifiedHint::ReadMostly(false),
    UnifiedHint::Prefer(None),
];

fn page_in(store: &Store, place: Place, byte: u8) -> PageId {
    let mut batch = store.batch();
    batch.create_from(vec![byte; LEN as usize], place);
    store.commit(batch).unwrap().pages[0]
}

fn reason(refused: Result<(), Error>) -> (Place, &'static str) {
    match refused.unwrap_err() {
        Error::Refused(Refused::Hint { place, reason }) => (place, reason),
        other => panic!("{other}"),
    }
}

#[test]
fn host_device_refuses_unified_memory_hints() {
    let store =
        Store::open_on(Arc::new(SimDisk::new()), Arc::new(HostDevice::new()), Options::new()).unwrap();
    let support = store.unified_memory();
    assert!(support.has_pages && !support.takes_hints);
    for hint in HINTS {
        let page = page_in(&store, Place::Unified, 1);
        let (place, reason) = reason(store.hint_unified(page, hint));
        assert!(
            place == Place::Unified && reason.contains("between a GPU and the host"),
            "{place}: {reason}"
        );
    }
    let on_disk = page_in(&store, Place::Disk, 2);
    let (place, reason) = reason(store.hint_unified(on_disk, HINTS[0]));
    assert!(place == Place::Disk && reason.contains("unified memory"), "{place}: {reason}");
    let gone = PageId(1 << 40);
    let refused = store.hint_unified(gone, HINTS[0]).unwrap_err();
    assert!(matches!(refused, Error::UnknownPage { page } if page == gone), "{refused}");
}

/// Gives each hint between two batches, for a page that moves out of unified memory and back, and for a page
/// that stays.
#[test]
fn hints_change_no_bytes_batches_or_moves() {
    let Some(gpu) = gpu::device() else { return };
    let two = MultiDevice::new(vec![gpu.clone(), Arc::new(HostDevice::new())]);
    let devices: [Arc<dyn Device>; 2] = [gpu.clone(), Arc::new(two)];
    for device in devices {
        let disk = Arc::new(SimDisk::new());
        let store = Store::open_on(disk.clone(), device, Options::new()).unwrap();
        let support = store.unified_memory();
        if !support.takes_hints {
            crate::machine::skipped("hints", "this GPU takes none");
            return;
        }
        assert!(support.has_pages);
        let [moving, staying] = [1, 2].map(|byte| page_in(&store, Place::Unified, byte));
        for (round, hint) in HINTS.into_iter().enumerate() {
            let byte = 10 + round as u8;
            let before = store.page(staying).unwrap();
            for page in [moving, staying] {
                store.hint_unified(page, hint).unwrap();
            }
            assert_eq!(store.page(staying).unwrap(), before, "nothing is logged");
            let mut batch = store.batch();
            batch.fill(moving, 7, LEN - 7, &[byte]).fill(staying, 100_000, 100_000, &[byte]);
            store.commit(batch).unwrap();
            for place in [Place::Device(0), Place::Host, Place::Unified] {
                let mut batch = store.batch();
                batch.move_to(moving, place);
                store.commit(batch).unwrap();
                if place != Place::Unified {
                    assert_eq!(reason(store.hint_unified(moving, hint)).0, place);
                }
            }
            let bytes = store.read_to_vec(moving).unwrap();
            assert!(bytes[..7] == [1; 7] && bytes[7..].iter().all(|found| *found == byte), "{hint:?}");
            let bytes = store.read_to_vec(staying).unwrap();
            let as_written =
                |(at, found): (usize, &u8)| *found == if (100_000..200_000).contains(&at) { byte } else { 2 };
            assert!(bytes.iter().enumerate().all(as_written), "{hint:?}");
        }
        let mut batch = store.batch();
        batch.delete(moving);
        store.commit(batch).unwrap();
        drop(store);
        let store = Store::open_on(disk, gpu.clone(), Options::new()).unwrap();
        assert_eq!(store.read_to_vec(staying).unwrap()[..2], [2, 2]);
    }
}
