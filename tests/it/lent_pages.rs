//! Pages in caller-owned memory: which bytes the store writes, when a page leaves the memory, and which calls
//! fail.
//!
//! Most tests run twice: on the host device, and on a device that executes all work as late as permitted,
//! which detects memory that is returned too early.

use std::sync::Arc;
use std::thread::{self, ThreadId};

use remanent::batch::{InitialCopy, Shadow, Width};
use remanent::device::Device;
use remanent::device::cuda::CudaDevice;
use remanent::device::host::HostDevice;
use remanent::device::{CallerMemory, DeviceBytes, KernelAddresses};
use remanent::error::Refused;
use remanent::options::{LogOptions, MemoryOptions, SnapshotSchedule};
use remanent::stats::Purpose;
use remanent::testing::late_device::LateDevice;
use remanent::testing::sim_disk::SimDisk;
use remanent::{Ack, Error, Options, PageId, Place, SnapshotOptions, StatePoint, Store, WriteBatch};

use crate::device_ops::bytes_of;
use crate::gpu;

const LEN: u64 = 2000;
const PLACE: Place = Place::Device(0);

pub fn options() -> Options {
    Options::new().log(LogOptions::new().segment_len(64 << 10)).snapshots(SnapshotSchedule::never())
}

/// Returns the host device, alone and wrapped in a device whose fences pass late.
pub fn devices() -> [Arc<dyn Device>; 2] {
    [Arc::new(HostDevice::new()), Arc::new(LateDevice::new(Arc::new(HostDevice::new())))]
}

/// A store, and a page in the middle of a longer caller-owned memory that is filled with ones.
struct Bench {
    disk: SimDisk,
    device: Arc<dyn Device>,
    store: Store,
    whole: DeviceBytes,
    memory: DeviceBytes,
    page: PageId,
}

impl Bench {
    fn new(device: Arc<dyn Device>) -> Self {
        let disk = SimDisk::new();
        let store = Store::open_on(Arc::new(disk.clone()), device.clone(), options()).unwrap();
        let whole = store.device_bytes(LEN + 96, PLACE).unwrap();
        whole.write(0, &[9; LEN as usize + 96]).unwrap();
        let memory = whole.part(32..LEN + 32).unwrap();
        let mut batch = store.batch();
        let page = batch.create_in(&memory).key("lent").page();
        batch.fill(page, 0, LEN / 2, &[1]);
        let page = store.commit(batch).unwrap().pages[0];
        Self { disk, device, store, whole, memory, page }
    }

    fn commit(&self, build: impl FnOnce(&mut WriteBatch)) -> remanent::Result<Vec<PageId>> {
        commit(&self.store, build)
    }

    fn read(&self) -> Vec<u8> {
        content(&self.store, self.page)
    }

    /// Returns the bytes of the memory after all batches are applied.
    fn memory(&self) -> Vec<u8> {
        self.store.submit(self.store.batch().set_root("step", 1u64)).unwrap().wait(Ack::Applied).unwrap();
        // On a late device, a read is executed after all batches.
        commit(&self.store, |batch| _ = batch.create(1, PLACE).key("last")).unwrap();
        let last = self.store.page_by_key("last").unwrap().page;
        content(&self.store, last);
        commit(&self.store, |batch| _ = batch.delete(last)).unwrap();
        bytes_of(&self.memory)
    }

    /// Returns true if the memory was returned to the caller, so that the store no longer writes to it.
    fn is_free(&self) -> bool {
        self.store.trim().unwrap();
        if self.memory.page().is_some() {
            return false;
        }
        self.memory.write(0, &[77; LEN as usize]).unwrap();
        self.store.snapshot().unwrap();
        bytes_of(&self.memory) == [77; LEN as usize]
    }
}

fn commit(store: &Store, build: impl FnOnce(&mut WriteBatch)) -> remanent::Result<Vec<PageId>> {
    let mut batch = store.batch();
    build(&mut batch);
    Ok(store.commit(batch)?.pages)
}

fn content(store: &Store, page: PageId) -> Vec<u8> {
    let mut bytes = vec![0; store.page(page).unwrap().len as usize];
    store.read(page, 0, &mut bytes).unwrap();
    bytes
}

/// Returns bytes of which the first half are ones and the second half are zeros.
fn first() -> Vec<u8> {
    [vec![1; LEN as usize / 2], vec![0; LEN as usize / 2]].concat()
}

#[test]
fn lent_page_touches_no_adjacent_caller_byte() {
    for device in devices() {
        let bench = Bench::new(device);
        assert_eq!((bench.read(), bench.memory()), (first(), first()));
        assert_eq!((bench.memory.page(), bench.whole.page()), (Some(bench.page), Some(bench.page)));
        assert_eq!(bench.whole.part(0..32).unwrap().page(), None);
        bench.commit(|batch| _ = batch.write(bench.page, 1990, &[5; 10])).unwrap();
        let mut expected = first();
        expected[1990..].fill(5);
        assert_eq!((bench.read(), bench.memory()), (expected.clone(), expected));
        for beside in [0..32, LEN + 32..LEN + 96] {
            assert!(bytes_of(&bench.whole.part(beside).unwrap()).iter().all(|byte| *byte == 9));
        }
        // The caller may still write to adjacent bytes.
        bench.whole.part(0..32).unwrap().write(0, &[8; 32]).unwrap();
    }
}

#[test]
fn lent_memory_bytes_become_page_bytes_in_same_batch() {
    for device in devices() {
        let store = Store::open_on(Arc::new(SimDisk::new()), device, options()).unwrap();
        let memory = store.device_bytes(LEN, PLACE).unwrap();
        memory.write(0, &[6; LEN as usize]).unwrap();
        let build = |batch: &mut WriteBatch| {
            let page = batch.create_in(&memory).page();
            batch.write_device(page, 0, &memory);
        };
        let page = commit(&store, build).unwrap()[0];
        assert_eq!((content(&store, page), bytes_of(&memory)), (vec![6; 2000], vec![6; 2000]));
    }
}

/// The fate of the page.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    /// The page stays in the memory.
    Stays,
    /// The page moves to another place.
    Leaves,
    /// The page is deleted.
    Goes,
}

#[test]
fn each_operation_keeps_or_moves_lent_page_and_open_restores_it() {
    type Build = fn(&mut WriteBatch, PageId);
    let operations: [(&str, Fate, Build); 12] = [
        ("write", Fate::Stays, |batch, page| _ = batch.write(page, 3, &[2; 100])),
        ("whole", Fate::Stays, |batch, page| _ = batch.write(page, 0, &[2; LEN as usize])),
        ("masked", Fate::Stays, |batch, page| {
            batch.write_masked(page, 0, Width::W1, &[0b101], &[7; 8]);
        }),
        ("scatter", Fate::Stays, |batch, page| {
            batch.scatter(page, Width::W2, &[1, 999], &[1, 2, 3, 4]);
        }),
        ("fill", Fate::Stays, |batch, page| _ = batch.fill(page, 0, LEN, &[3])),
        ("copy", Fate::Stays, |batch, page| _ = batch.copy(page, 0..100, page, 1500)),
        ("clone", Fate::Stays, |batch, page| _ = batch.clone_page(page)),
        ("metadata", Fate::Stays, |batch, page| _ = batch.set_metadata(page, "name", "value")),
        ("move to its own place", Fate::Stays, |batch, page| _ = batch.move_to(page, PLACE)),
        ("move", Fate::Leaves, |batch, page| _ = batch.move_to(page, Place::Pinned).write(page, 0, &[4])),
        ("resize", Fate::Leaves, |batch, page| _ = batch.resize(page, LEN + 1).write(page, LEN, &[4])),
        ("delete", Fate::Goes, |batch, page| _ = batch.delete(page)),
    ];
    for device in devices() {
        for (what, fate, build) in operations {
            let what = format!("{what} on {}", device.label());
            let bench = Bench::new(device.clone());
            bench.store.snapshot().unwrap();
            bench.commit(|batch| build(batch, bench.page)).unwrap();
            let bytes = (fate != Fate::Goes).then(|| bench.read());
            if fate == Fate::Stays {
                assert_eq!(Some(bench.memory()), bytes, "{what}");
                assert!(!bench.is_free(), "{what}");
                assert!(bench.store.audit().unwrap().changed.is_empty(), "{what}");
            } else {
                assert!(bench.is_free(), "{what}");
            }
            bench.store.snapshot().unwrap();
            let Bench { disk, device, store, page, .. } = bench;
            store.close().unwrap();
            let store = Store::open_on(Arc::new(disk), device, options()).unwrap();
            match bytes {
                Some(bytes) => assert_eq!(content(&store, page), bytes, "{what}"),
                None => assert!(matches!(store.page(page), Err(Error::UnknownPage { .. })), "{what}"),
            }
        }
    }
}

#[test]
fn page_created_and_moved_in_one_batch_needs_no_lent_memory() {
    for device in devices() {
        let bench = Bench::new(device);
        let other = bench.store.device_bytes(LEN, PLACE).unwrap();
        let build = |batch: &mut WriteBatch| {
            let page = batch.create_in(&other).page();
            batch.write(page, 0, &[5]).resize(page, 3);
        };
        let page = bench.commit(build).unwrap()[0];
        assert_eq!(content(&bench.store, page), [5, 0, 0]);
        bench.store.trim().unwrap();
        assert_eq!(other.page(), None);
    }
}

#[test]
fn leased_page_moves_on_change_and_pinned_page_stays() {
    for device in devices() {
        let bench = Bench::new(device);
        let lease = bench.store.lease(bench.page).unwrap();
        bench.commit(|batch| _ = batch.fill(bench.page, 0, LEN, &[2])).unwrap();
        assert_eq!((lease.bytes().unwrap(), bench.read()), (&first()[..], vec![2; LEN as usize]));
        bench.store.trim().unwrap();
        // The lease still contains the memory's bytes.
        assert_eq!((bench.memory.page(), bytes_of(&bench.memory)), (Some(bench.page), first()));
        drop(lease);
        assert!(bench.is_free());
        assert_eq!(bench.read(), vec![2; LEN as usize]);

        let bench = Bench::new(bench.device.clone());
        let pin = bench.store.pin(bench.page).unwrap();
        for byte in 2..5 {
            bench.commit(|batch| _ = batch.fill(bench.page, 0, LEN, &[byte])).unwrap();
            assert_eq!(bench.memory(), vec![byte; LEN as usize]);
        }
        let operations: [fn(&mut WriteBatch, PageId); 3] = [
            |batch, page| _ = batch.delete(page),
            |batch, page| _ = batch.resize(page, 4),
            |batch, page| _ = batch.move_to(page, Place::Pinned),
        ];
        for build in operations {
            let refused = bench.commit(|batch| build(batch, bench.page));
            assert!(matches!(refused, Err(Error::Leased { .. })), "{refused:?}");
        }
        drop(pin);
        assert_eq!(bench.memory.page(), Some(bench.page));
    }
}

#[test]
fn restore_rewrites_lent_page_in_place_or_returns_memory() {
    for device in devices() {
        let bench = Bench::new(device);
        let then = bench.store.lsn();
        bench.commit(|batch| _ = batch.fill(bench.page, 0, LEN, &[2])).unwrap();
        bench.store.restore(StatePoint::Lsn(then)).unwrap();
        assert_eq!((bench.read(), bench.memory()), (first(), first()));
        assert_eq!(bench.memory.page(), Some(bench.page));
        let before = remanent::Lsn(then.0 - 1);
        bench.store.restore(StatePoint::Lsn(before)).unwrap();
        assert!(bench.is_free());
    }
}

#[test]
fn fork_has_own_page_memory() {
    let bench = Bench::new(Arc::new(HostDevice::new()));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("fork");
    bench.store.fork(&path, StatePoint::Lsn(bench.store.lsn())).unwrap();
    let fork = options().open_with(&path, bench.device.clone()).unwrap();
    commit(&fork, |batch| _ = batch.fill(bench.page, 0, LEN, &[4])).unwrap();
    assert_eq!((content(&fork, bench.page), bench.memory()), (vec![4; LEN as usize], first()));
}

/// An exact snapshot keeps the memory of a deleted page until the snapshot has captured the page.
#[test]
fn each_snapshot_kind_contains_the_page() {
    for device in devices() {
        let bench = Bench::new(device);
        bench.store.snapshot_with(SnapshotOptions::new().name("exact").exact()).unwrap();
        bench.commit(|batch| _ = batch.delete(bench.page)).unwrap();
        assert!(bench.is_free());
        let then = StatePoint::Name("exact".to_owned());
        bench.store.restore(&then).unwrap();
        assert_eq!((bench.read(), bench.memory.page()), (first(), None));
    }
}

#[test]
fn memory_of_existing_page_is_refused() {
    for device in devices() {
        let bench = Bench::new(device);
        let in_use = |result: remanent::Result<()>| match result {
            Err(Error::Refused(Refused::MemoryInUse { page, .. })) => page,
            other => panic!("{other:?}"),
        };
        let create =
            |memory: &DeviceBytes| bench.commit(|batch| _ = batch.create_in(memory).page()).map(drop);
        let part = |from: u64, to: u64| bench.whole.part(from..to).unwrap();
        for memory in [&bench.memory, &bench.whole, &part(0, 33), &part(LEN + 31, LEN + 40), &part(500, 501)]
        {
            assert_eq!(in_use(create(memory)), bench.page);
            assert_eq!(in_use(memory.write(0, &vec![3; memory.byte_len() as usize])), bench.page);
        }
        let copy = bench.store.working_copy_in(
            bench.page,
            &bench.memory,
            Width::W1,
            Shadow::Page,
            InitialCopy::Load,
        );
        assert_eq!(in_use(copy.map(drop)), bench.page);
        // This includes batches that also delete the page or create two pages, because the memory is needed
        // immediately.
        let build = |batch: &mut WriteBatch| _ = batch.delete(bench.page).create_in(&bench.memory).page();
        assert_eq!(in_use(bench.commit(build).map(drop)), bench.page);
        let free = part(0, 32);
        let twice = |batch: &mut WriteBatch| {
            batch.create_in(&free);
            batch.create_in(&free.part(31..32).unwrap());
        };
        in_use(bench.commit(twice).map(drop));
        assert_eq!((free.page(), bench.store.page_count().unwrap()), (None, 1));

        assert_eq!((bench.read(), bench.memory()), (first(), first()));

        // Adjacent memory and memory of length 0 are accepted.
        create(&free).unwrap();
        create(&part(LEN + 32, LEN + 96)).unwrap();
        create(&part(40, 40)).unwrap();
        assert_eq!(bench.store.page_count().unwrap(), 4);
    }
}

#[test]
fn foreign_device_or_store_memory_is_refused() {
    let device = devices()[0].clone();
    let [bench, same_device] = [device.clone(), device].map(Bench::new);
    let other_device = Bench::new(devices()[1].clone());
    let create = |other: &Bench| bench.commit(|batch| _ = batch.create_in(&other.whole));
    let refused = create(&other_device);
    assert!(matches!(refused, Err(Error::Refused(Refused::Memory { .. }))), "{refused:?}");
    let refused = create(&same_device);
    assert!(matches!(refused, Err(Error::Refused(Refused::MemoryInUse { .. }))), "{refused:?}");
    assert_eq!(bench.store.page_count().unwrap(), 1);
}

/// A logged delete may not have been executed on the device yet, but the memory can already be lent again.
#[test]
fn memory_is_lent_again_as_soon_as_a_delete_is_committed() {
    for device in devices() {
        let bench = Bench::new(device);
        let mut page = bench.page;
        for byte in 0..20 {
            bench.commit(|batch| _ = batch.delete(page)).unwrap();
            let build = |batch: &mut WriteBatch| {
                let page = batch.create_in(&bench.memory).page();
                batch.fill(page, 0, LEN, &[byte]);
            };
            page = bench.commit(build).unwrap()[0];
        }
        assert_eq!((content(&bench.store, page), bench.memory()), (vec![19; 2000], vec![19; 2000]));
    }
}

#[test]
fn lent_memory_is_outside_budget_and_counted_separately() {
    let memory = MemoryOptions::new().budget(PLACE, LEN);
    let store =
        Store::open_on(Arc::new(SimDisk::new()), devices()[0].clone(), options().memory(memory)).unwrap();
    let lent = || {
        let stats = store.stats();
        let usage = stats.places.iter().find(|(place, _)| *place == PLACE).map(|(_, usage)| *usage).unwrap();
        (usage.bytes_for(Purpose::Lent), usage.bytes_for(Purpose::Caller), usage.used())
    };
    // The whole budget is used by memory that the store allocated for the caller.
    let memory = store.device_bytes(LEN, PLACE).unwrap();
    let page = commit(&store, |batch| _ = batch.create_in(&memory)).unwrap()[0];
    assert_eq!(lent(), (LEN, LEN, LEN));
    let foreign = CallerMemory::from_vec(vec![1; 5000], PLACE);
    let foreign = store.caller_bytes(&foreign).unwrap();
    let other = commit(&store, |batch| _ = batch.create_in(&foreign)).unwrap()[0];
    assert_eq!((content(&store, other), bytes_of(&foreign)), (vec![0; 5000], vec![0; 5000]));
    assert_eq!(lent(), (LEN + 5000, LEN, LEN));
    let refused = commit(&store, |batch| _ = batch.create(1, PLACE));
    assert!(matches!(refused, Err(Error::OverBudget { .. })), "{refused:?}");
    commit(&store, |batch| _ = batch.delete(page).delete(other)).unwrap();
    // The memory was dropped by the caller and is used by the page. It is freed once both no longer need it.
    drop((memory, foreign));
    store.trim().unwrap();
    assert_eq!(lent(), (0, 0, 0));
    commit(&store, |batch| _ = batch.create(LEN, PLACE)).unwrap();
}

/// A tensor that records which thread dropped it.
struct Tensor(Arc<std::sync::Mutex<Vec<ThreadId>>>);

impl Drop for Tensor {
    fn drop(&mut self) {
        self.0.lock().unwrap().push(thread::current().id());
    }
}

#[test]
fn page_lives_in_gpu_tensor_until_moved() {
    let (Some(gpu), Some(callers)) = (gpu::device(), gpu::device()) else { return };
    let disk = SimDisk::new();
    let store = Store::open_on(Arc::new(disk.clone()), gpu.clone(), options()).unwrap();
    for place in [PLACE, Place::Pinned] {
        let memory = callers.allocate(place, 2 * LEN).unwrap();
        let address = callers.address(memory).unwrap();
        let dropped = Arc::default();
        // SAFETY: the device keeps the memory until it is released below.
        let tensor = || unsafe { CallerMemory::from_cuda(address + 16, LEN, Tensor(Arc::clone(&dropped))) };
        let bytes = store.caller_bytes(&tensor()).unwrap();
        let build = |batch: &mut WriteBatch| {
            let page = batch.create_in(&bytes).page();
            batch.fill(page, 0, LEN, &[5]);
        };
        let page = commit(&store, build).unwrap()[0];
        let pin = store.pin(page).unwrap();
        assert_eq!(pin.address(), Some(address + 16), "where the tensor is");
        drop(pin);
        commit(&store, |batch| _ = batch.write(page, 7, &[6; 9])).unwrap();
        let mut expected = vec![5; LEN as usize];
        expected[7..16].fill(6);
        assert_eq!((content(&store, page), seen(&callers, memory, 16)), (expected.clone(), expected));
        // Pass the same memory to the store a second time.
        let again = store.caller_bytes(&tensor()).unwrap();
        let refused = commit(&store, |batch| _ = batch.create_in(&again.part(8..9).unwrap()));
        assert!(
            matches!(refused, Err(Error::Refused(Refused::MemoryInUse { page: of, .. })) if of == page),
            "{refused:?}"
        );
        drop((again, bytes));
        dropped.lock().unwrap().clear();
        store.snapshot().unwrap();
        assert!(dropped.lock().unwrap().is_empty(), "the page lives there");
        commit(&store, |batch| _ = batch.delete(page)).unwrap();
        store.trim().unwrap();
        assert_eq!(*dropped.lock().unwrap(), [thread::current().id()], "by a thread of the caller's");
        callers.release(memory).unwrap();
    }
    store.close().unwrap();
}

fn seen(device: &CudaDevice, memory: remanent::device::MemoryId, offset: u64) -> Vec<u8> {
    use remanent::device::{Command, CommandList, Lane, Span, StagingSpan};
    let target = StagingSpan { index: 0, offset: 0, len: LEN as usize };
    let commands = vec![Command::Download { source: Span { memory, offset, len: LEN }, target }];
    let list = CommandList { commands, staging: vec![device.staging(LEN as usize).unwrap()] };
    device.submit(Lane::Drain, list).unwrap().finish(device).unwrap()[0].to_vec()
}
