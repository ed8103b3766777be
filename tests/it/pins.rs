//! Pins. A page keeps its address while batches change it, and an operation that would move it fails.
//!
//! The device executes all work as late as permitted, and assigns artificial addresses to a host device's memory.

use std::sync::{Arc, Mutex};

use remanent::device::host::HostDevice;
use remanent::device::{Command, CommandList, Lane, StagingSpan};
use remanent::error::{Remedy, Unavailable};
use remanent::options::{LogOptions, SnapshotSchedule};
use remanent::store::MemoryKind;
use remanent::testing::late_device::LateDevice;
use remanent::testing::sim_disk::SimDisk;
use remanent::{Error, Lsn, Options, PageId, Place, StatePoint, Store, WriteBatch};

const LEN: u64 = 64;
const PLACE: Place = Place::Device(0);

fn late() -> (Arc<LateDevice>, Store, PageId) {
    let device = Arc::new(LateDevice::new(Arc::new(HostDevice::new())));
    let options =
        Options::new().log(LogOptions::new().segment_len(16 << 10)).snapshots(SnapshotSchedule::never());
    let store = Store::open_on(Arc::new(SimDisk::new()), device.clone(), options).unwrap();
    let mut batch = store.batch();
    let page = batch.create(LEN, PLACE).page();
    batch.fill(page, 0, LEN, &[1]);
    let page = store.commit(batch).unwrap().pages[0];
    (device, store, page)
}

fn commit(store: &Store, build: impl FnOnce(&mut WriteBatch)) -> remanent::Result<()> {
    let mut batch = store.batch();
    build(&mut batch);
    store.commit(batch).map(drop)
}

fn read(store: &Store, page: PageId) -> Vec<u8> {
    let mut bytes = vec![0; LEN as usize];
    store.read(page, 0, &mut bytes).unwrap();
    bytes
}

#[test]
fn pinned_page_is_changed_in_place() {
    let (device, store, page) = late();
    let stream = device.stream();
    let pin = store.pin(page).unwrap();
    let address = pin.address().expect("a late device makes one up");
    let seen = Arc::new(Mutex::new(Vec::new()));
    for number in 2..=5 {
        // The thread that holds the pin may use all operations that change bytes.
        commit(&store, |batch| _ = batch.clone_page(page)).unwrap();
        commit(&store, |batch| _ = batch.fill(page, 0, LEN, &[0]).write(page, 0, &[number; LEN as usize]))
            .unwrap();
        // From now on, only the stream waits for the batch, not the host.
        pin.on(stream).unwrap();
        let (source, told) = (device.span_at(address, LEN), seen.clone());
        device.queue(stream, move |inner| {
            let target = StagingSpan { index: 0, offset: 0, len: LEN as usize };
            let staging = vec![inner.staging(LEN as usize).unwrap()];
            let list = CommandList { commands: vec![Command::Download { source, target }], staging };
            let bytes = inner.submit(Lane::Drain, list).unwrap().finish(inner).unwrap();
            told.lock().unwrap().push(bytes[0].to_vec());
        });
        device.synchronize(stream).unwrap();
        store.snapshot().unwrap();
        assert_eq!(seen.lock().unwrap().pop(), Some(vec![number; LEN as usize]));
        assert_eq!((pin.address(), read(&store, page)), (Some(address), vec![number; LEN as usize]));
        // Only the page itself and its clones use memory.
        let (_, usage) = store.stats().places[0];
        assert_eq!(usage.allocated_bytes, LEN * u64::from(number));
    }
    assert_eq!((pin.page(), pin.byte_len()), (page, LEN));
}

#[test]
fn moving_pinned_page_is_refused() {
    let (_, store, page) = late();
    let (first, second) = (store.pin(page).unwrap(), store.pin(page).unwrap());
    let refused = |result: remanent::Result<()>, what: &str| {
        let error = result.expect_err(what);
        assert!(matches!(error, Error::Leased { page: found } if found == page), "{what}: {error}");
        assert_eq!(error.remedy(), Remedy::Retry);
    };
    let all = || {
        refused(commit(&store, |batch| _ = batch.resize(page, 2 * LEN)), "resized");
        refused(commit(&store, |batch| _ = batch.resize(page, LEN)), "resized to what it is");
        refused(commit(&store, |batch| _ = batch.delete(page)), "deleted");
        refused(commit(&store, |batch| _ = batch.move_to(page, Place::Pinned)), "moved");
        refused(
            commit(&store, |batch| {
                _ = batch.move_to(page, PLACE).move_to(page, Place::Pinned).move_to(page, PLACE)
            }),
            "moved and back",
        );
        refused(store.lease(page).map(drop), "leased");
        refused(store.restore(StatePoint::Lsn(Lsn(1))).map(drop), "restored");
    };
    all();
    // A rejected batch changes nothing, and a move to the current place has no effect.
    commit(&store, |batch| _ = batch.move_to(page, PLACE)).unwrap();
    assert_eq!((read(&store, page), store.lsn()), (vec![1; LEN as usize], Lsn(2)));
    drop(first);
    all();
    drop(second);
    drop(store.lease(page).unwrap());
    commit(&store, |batch| _ = batch.move_to(page, Place::Pinned).resize(page, 2 * LEN)).unwrap();
    store.restore(StatePoint::Lsn(Lsn(1))).unwrap();
    commit(&store, |batch| _ = batch.delete(page)).unwrap();
    let gone = store.pin(page).unwrap_err();
    assert!(matches!(gone, Error::UnknownPage { page: found } if found == page), "{gone}");
    // The rejected pin does not keep the page in place.
    assert!(store.restore(StatePoint::Lsn(Lsn(2))).is_ok());
}

#[test]
fn leased_page_cannot_be_pinned() {
    let (device, store, page) = late();
    let stream = device.stream();
    let lease = store.lease(page).unwrap();
    lease.on(stream).unwrap();
    device.queue(stream, |_| ());
    assert!(matches!(store.pin(page), Err(Error::Leased { page: found }) if found == page));
    device.hold(stream, true);
    drop(lease);
    // The kernel that reads the page is still on the stream, so a batch would move the page.
    assert!(matches!(store.pin(page), Err(Error::Leased { .. })));
    // A batch has moved the page, so the stream no longer uses its memory.
    commit(&store, |batch| _ = batch.fill(page, 0, LEN, &[2])).unwrap();
    assert_eq!(read(&store, page), [2; LEN as usize]);
    let pin = store.pin(page).unwrap();
    let address = pin.address();
    commit(&store, |batch| _ = batch.fill(page, 0, LEN, &[3])).unwrap();
    assert_eq!((pin.address(), read(&store, page)), (address, vec![3; LEN as usize]));
    device.hold(stream, false);
    device.synchronize(stream).unwrap();
}

/// A transport library gets a stable address, and the version of the content.
#[test]
fn descriptor_contains_page_address_and_version() {
    let (_device, store, page) = late();
    let id = store.id();
    let lease = store.lease(page).unwrap();
    let leased = lease.descriptor().unwrap();
    assert_eq!((Some(leased.address), leased.len, leased.kind), (lease.address(), LEN, MemoryKind::Device));
    assert_eq!((leased.store, leased.page, leased.epoch, leased.gpu), (id, page, lease.epoch(), None));
    commit(&store, |batch| _ = batch.fill(page, 0, LEN, &[2])).unwrap();
    assert_eq!(read(&store, page), [2; LEN as usize]);
    assert_eq!(lease.descriptor().unwrap(), leased, "the lease still shows what it showed");
    drop(lease);
    let pin = store.pin(page).unwrap();
    let pinned = pin.descriptor().unwrap();
    assert_eq!(Some(pinned.address), pin.address());
    assert_ne!(pinned.address, leased.address, "the page has moved since");
    assert_eq!(pinned.epoch, store.page(page).unwrap().epoch);
    drop(pin);

    for (place, kind) in [
        (Place::Pinned, MemoryKind::Pinned),
        (Place::Host, MemoryKind::Host),
        (Place::Unified, MemoryKind::Unified),
    ] {
        let page = {
            let mut batch = store.batch();
            batch.create(LEN, place);
            store.commit(batch).unwrap().pages[0]
        };
        let pin = store.pin(page).unwrap();
        assert_eq!(pin.descriptor().unwrap().kind, kind);
        assert!(pin.descriptor().unwrap().to_json().contains(&format!("\"kind\":\"{kind}\"")));
    }
    // If a page has no address, the call returns none.
    let nowhere = |found: remanent::Result<remanent::store::MemoryDescriptor>, why: &str| {
        assert!(
            matches!(&found, Err(Error::Unavailable(Unavailable::Place { reason, .. })) if reason.contains(why)),
            "{found:?}"
        );
    };
    let mut batch = store.batch();
    batch.create(0, PLACE);
    let empty = store.commit(batch).unwrap().pages[0];
    nowhere(store.pin(empty).unwrap().descriptor(), "an empty page");
    let host = Options::new().device(remanent::DeviceChoice::Host).open_temporary().unwrap();
    let mut batch = host.batch();
    batch.create(LEN, PLACE);
    let page = host.commit(batch).unwrap().pages[0];
    nowhere(host.lease(page).unwrap().descriptor(), "memory of the host alone");
}
