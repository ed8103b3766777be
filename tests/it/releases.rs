//! Releases. The caller gets the memory of a page once the store no longer uses it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use remanent::device::host::HostDevice;
use remanent::device::{Command, CommandList, Device, Lane, StagingSpan};
use remanent::error::Unavailable;
use remanent::options::{MemoryOptions, PageLoad};
use remanent::stats::Purpose;
use remanent::testing::faulty_device::{DeviceCall, DeviceFault, FaultyDevice};
use remanent::testing::late_device::LateDevice;
use remanent::testing::sim_disk::{DiskFault, Operation, SimDisk};
use remanent::{Ack, Error, PageId, Place, Store, WriteBatch};

use crate::device_ops::bytes_of;
use crate::gpu;
use crate::lent_pages::{devices, options};

const LEN: u64 = 3000;
const PLACE: Place = Place::Device(0);

/// Creates a store with one page that is filled with ones.
fn bench(device: Arc<dyn Device>) -> (SimDisk, Store, PageId) {
    let disk = SimDisk::new();
    let store = Store::open_on(Arc::new(disk.clone()), device, options()).unwrap();
    let page = commit(&store, |batch| _ = batch.create_from(vec![1; LEN as usize], PLACE)).unwrap()[0];
    (disk, store, page)
}

fn commit(store: &Store, build: impl FnOnce(&mut WriteBatch)) -> remanent::Result<Vec<PageId>> {
    let mut batch = store.batch();
    build(&mut batch);
    Ok(store.commit(batch)?.pages)
}

fn content(store: &Store, page: PageId) -> remanent::Result<Vec<u8>> {
    let mut bytes = vec![0; LEN as usize];
    store.read(page, 0, &mut bytes).map(|_| bytes)
}

#[test]
fn released_page_is_deleted_and_caller_keeps_bytes() {
    for device in devices() {
        let (disk, store, page) = bench(device.clone());
        // The fill is queued in the lane and may not have been executed when the page is released.
        commit(&store, |batch| _ = batch.fill(page, 0, LEN / 2, &[2])).unwrap();
        let memory = store.release(page).unwrap();
        let expected = [vec![2; LEN as usize / 2], vec![1; LEN as usize / 2]].concat();
        assert_eq!((memory.byte_len(), memory.place(), bytes_of(&memory)), (LEN, PLACE, expected));
        assert!(matches!(content(&store, page), Err(Error::UnknownPage { .. })));
        assert!(matches!(store.release(page), Err(Error::UnknownPage { .. })));
        memory.write(0, &[7; LEN as usize]).unwrap();
        // Later writes of the store do not reach the memory.
        commit(&store, |batch| _ = batch.create_from(vec![8; LEN as usize], PLACE)).unwrap();
        store.snapshot().unwrap();
        store.trim().unwrap();
        assert_eq!(bytes_of(&memory), vec![7; LEN as usize]);
        // The memory can again be used for a page.
        let again = commit(&store, |batch| _ = batch.create_in(&memory)).unwrap()[0];
        assert_eq!(content(&store, again).unwrap(), vec![0; LEN as usize]);
        store.close().unwrap();
        let store = Store::open_on(Arc::new(disk), device, options()).unwrap();
        assert!(matches!(content(&store, page), Err(Error::UnknownPage { .. })));
    }
}

/// The release is durable when the call returns. If a power cut could undo the release, the caller could
/// write to memory of a page that still exists.
#[test]
fn a_release_is_durable_when_it_returns() {
    let (disk, store, page) = bench(devices()[0].clone());
    commit(&store, |batch| _ = batch.set_root("step", 1u64)).unwrap();
    let memory = store.release(page).unwrap();
    let after = disk.after_power_cut();
    memory.write(0, &[9; LEN as usize]).unwrap();
    let after = Store::open_on(Arc::new(after), devices()[0].clone(), options()).unwrap();
    assert!(matches!(content(&after, page), Err(Error::UnknownPage { .. })));

    // The caller gets no memory if the delete may not be durable.
    let (disk, store, page) = bench(devices()[0].clone());
    store.wait_durable(store.lsn()).unwrap();
    for operation in [Operation::Sync, Operation::SyncWindow] {
        disk.fail(DiskFault { operation, skip: 0, times: 1000, errno: 5 });
    }
    let refused = store.release(page);
    assert!(matches!(refused, Err(Error::Poisoned(_))), "{refused:?}");
}

#[test]
fn memory_stays_counted_until_the_last_handle_is_dropped() {
    let options = options().memory(MemoryOptions::new().budget(PLACE, LEN));
    let store = Store::open_on(Arc::new(SimDisk::new()), devices()[0].clone(), options).unwrap();
    let page = commit(&store, |batch| _ = batch.create_from(vec![1; LEN as usize], PLACE)).unwrap()[0];
    let memory = store.release(page).unwrap();
    let usage = store.stats().places[0].1;
    assert_eq!((usage.bytes_for(Purpose::Page), usage.bytes_for(Purpose::Caller)), (0, LEN));
    let another = || commit(&store, |batch| _ = batch.create(LEN, PLACE));
    assert!(matches!(another(), Err(Error::OverBudget { .. })));
    drop(memory);
    another().unwrap();
}

#[test]
fn releasing_lent_page_returns_callers_handle() {
    for device in devices() {
        let (_, store, _) = bench(device);
        let tensor = store.device_bytes(LEN + 5, PLACE).unwrap();
        let build = |batch: &mut WriteBatch| {
            let page = batch.create_in(&tensor.part(5..LEN + 5).unwrap()).page();
            batch.fill(page, 0, LEN, &[4]);
        };
        let page = commit(&store, build).unwrap()[0];
        let memory = store.release(page).unwrap();
        assert_eq!((bytes_of(&memory), tensor.page()), (vec![4; LEN as usize], None));
        memory.write(0, &[5]).unwrap();
        assert_eq!(bytes_of(&tensor)[4..7], [0, 5, 4]);
    }
}

#[test]
fn leased_or_pinned_page_cannot_be_released() {
    let late = Arc::new(LateDevice::new(Arc::new(HostDevice::new())));
    let (_, store, page) = bench(late.clone());
    let lsn = store.lsn();
    let pin = store.pin(page).unwrap();
    assert!(matches!(store.release(page), Err(Error::Leased { .. })));
    drop(pin);
    let (lease, second) = (store.lease(page).unwrap(), store.lease(page).unwrap());
    assert!(matches!(store.release(page), Err(Error::Leased { .. })));
    drop(second);
    assert!(matches!(store.release(page), Err(Error::Leased { .. })));
    assert_eq!((store.lsn(), content(&store, page).unwrap()), (lsn, vec![1; LEN as usize]));

    // A kernel that started under a lease reads the page's bytes, although the lease has ended.
    let stream = late.stream();
    lease.on(stream).unwrap();
    let source = late.span_at(lease.address().unwrap(), LEN);
    let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
    let told = seen.clone();
    late.queue(stream, move |inner| {
        let target = StagingSpan { index: 0, offset: 0, len: LEN as usize };
        let staging = vec![inner.staging(LEN as usize).unwrap()];
        let list = CommandList { commands: vec![Command::Download { source, target }], staging };
        *told.lock().unwrap() = inner.submit(Lane::Drain, list).unwrap().finish(inner).unwrap()[0].to_vec();
    });
    drop(lease);
    let memory = store.release(page).unwrap();
    memory.write(0, &[9; LEN as usize]).unwrap();
    late.synchronize(stream).unwrap();
    assert_eq!(*seen.lock().unwrap(), vec![1; LEN as usize]);
}

#[test]
fn releasing_disk_page_is_refused() {
    for device in devices() {
        let (_, store, page) = bench(device);
        commit(&store, |batch| _ = batch.move_to(page, Place::Disk)).unwrap();
        let lsn = store.lsn();
        assert!(matches!(
            store.release(page),
            Err(Error::Unavailable(Unavailable::Place { place: Place::Disk, .. }))
        ));
        assert_eq!((store.lsn(), content(&store, page).unwrap()), (lsn, vec![1; LEN as usize]));
        commit(&store, |batch| _ = batch.move_to(page, PLACE)).unwrap();
        assert_eq!(bytes_of(&store.release(page).unwrap()), vec![1; LEN as usize]);
    }
}

/// Readers without a lock may be reading the page's memory while it is released.
#[test]
fn readers_never_see_uncommitted_caller_writes() {
    let (_, store, _) = bench(devices()[0].clone());
    let is_over = AtomicBool::new(false);
    let newest = std::sync::Mutex::new(PageId(1));
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let page = *newest.lock().unwrap();
                    match content(&store, page) {
                        Ok(bytes) => assert!(bytes.iter().all(|byte| *byte == 1), "the caller's bytes"),
                        Err(error) => assert!(matches!(error, Error::UnknownPage { .. }), "{error}"),
                    }
                }
            });
        }
        for _ in 0..300 {
            let build = |batch: &mut WriteBatch| _ = batch.create_from(vec![1; LEN as usize], PLACE);
            let page = commit(&store, build).unwrap()[0];
            *newest.lock().unwrap() = page;
            let memory = store.release(page).unwrap();
            memory.write(0, &[9; LEN as usize]).unwrap();
        }
        is_over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn unloaded_page_is_loaded_first() {
    for device in devices() {
        let (disk, store, page) = bench(device.clone());
        store.snapshot().unwrap();
        store.close().unwrap();
        let options = options().memory(MemoryOptions::new().load(PageLoad::OnDemand));
        let store = Store::open_on(Arc::new(disk), device, options).unwrap();
        assert_eq!(store.recovered().unloaded_pages, 1);
        assert_eq!(bytes_of(&store.release(page).unwrap()), vec![1; LEN as usize]);
    }
}

/// After any error, and after the next open, the page exists or does not exist, as the log states.
#[test]
fn device_error_loses_only_released_pages() {
    for call in [DeviceCall::Submit, DeviceCall::Wait, DeviceCall::Rename, DeviceCall::Release] {
        for nth in 1..6 {
            let device = Arc::new(FaultyDevice::new(Arc::new(HostDevice::new())));
            let (disk, store, page) = bench(device.clone());
            store.submit(store.batch().set_root("step", 1u64)).unwrap().wait(Ack::Applied).unwrap();
            device.arm(DeviceFault { call: Some(call), nth, context_lost: false });
            let released = store.release(page);
            if !device.struck() {
                released.unwrap();
                break;
            }
            let is_listed = store.page(page).is_ok();
            assert!(released.is_ok() || matches!(released, Err(Error::Poisoned(_))), "{released:?}");
            drop(store);
            let store = Store::open_on(Arc::new(disk), Arc::new(HostDevice::new()), options()).unwrap();
            assert_eq!(content(&store, page).is_ok(), is_listed, "{call:?} number {nth}");
        }
    }
}

#[test]
fn gpu_memory_is_lent_at_its_address() {
    let Some(gpu) = gpu::device() else { return };
    let (_, store, _) = bench(gpu);
    for place in [PLACE, Place::Pinned, Place::Unified] {
        let build = |batch: &mut WriteBatch| _ = batch.create_from(vec![3; LEN as usize], place);
        let page = commit(&store, build).unwrap()[0];
        let address = store.pin(page).unwrap().address();
        let memory = store.release(page).unwrap();
        assert_eq!((memory.address(), memory.place()), (address, place));
        memory.write(0, &[4]).unwrap();
        assert_eq!(bytes_of(&memory)[..3], [4, 3, 3]);
        // The memory is freed like any other memory.
        drop(memory);
        store.trim().unwrap();
        let usage = |(of, usage): &(Place, remanent::stats::PlaceUsage)| (*of == place).then(|| usage.used());
        assert_eq!(store.stats().places.iter().find_map(usage), Some(if place == PLACE { LEN } else { 0 }));
    }
}
