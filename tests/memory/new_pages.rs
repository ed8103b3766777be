//! A new page uses no memory bandwidth before it is written.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use remanent::device::host::HostDevice;
use remanent::device::{Command, CommandList, Device, Lane, Pending};
use remanent::disk::dir::DirDisk;
use remanent::{Options, Place, Store};

use crate::allocator::alone;

/// A host device that counts the bytes that it must fill.
#[derive(Default)]
struct Filling {
    inner: HostDevice,
    filled: AtomicU64,
}

impl Device for Filling {
    forward!(inner: label allocate release staging reached wait after places_and_abilities);

    fn allocates_zeros(&self, place: Place, len: u64) -> bool {
        self.inner.allocates_zeros(place, len)
    }

    fn submit(&self, lane: Lane, list: CommandList) -> remanent::Result<Pending> {
        let filled = list.commands.iter().map(|command| match command {
            Command::Fill { target, .. } => target.len,
            _ => 0,
        });
        self.filled.fetch_add(filled.sum(), Ordering::Relaxed);
        self.inner.submit(lane, list)
    }
}

/// The thread that submits a list executes it, so filling gigabytes would delay all later batches and reads.
#[test]
fn long_page_is_zeroed_lazily() {
    const LEN: u64 = 256 << 20;
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let device = Arc::new(Filling::default());
    let open = |device: &Arc<Filling>| {
        Store::open_on(Arc::new(DirDisk::new(directory.path())), device.clone(), Options::new()).unwrap()
    };
    let store = open(&device);
    let mut batch = store.batch();
    batch.create(LEN, Place::Host);
    batch.create(100, Place::Host);
    batch.create(1, Place::Host);
    let [long, short, longer] = store.commit(batch).unwrap().pages[..] else { panic!("three pages") };
    let mut batch = store.batch();
    batch.resize(longer, LEN);
    batch.write(long, LEN - 1, &[7]);
    store.commit(batch).unwrap();
    let check = |store: &Store| {
        for (page, offset, expected) in
            [(long, 0, 0), (long, LEN - 1, 7), (longer, LEN - 1, 0), (short, 99, 0)]
        {
            let mut found = [1];
            store.read(page, offset, &mut found).unwrap();
            assert_eq!(found, [expected], "page {page} at {offset}");
        }
    };
    check(&store);
    // The memory of a short page may have belonged to another page, so it is filled.
    assert_eq!(device.filled.load(Ordering::Relaxed), 101);
    store.close().unwrap();

    let device = Arc::new(Filling::default());
    check(&open(&device));
    assert_eq!(device.filled.load(Ordering::Relaxed), 100);
}
