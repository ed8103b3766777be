//! Deltas with bytes from device memory. The log and the page get the bytes that the device memory contained,
//! after the device checked the indices.

use std::sync::Arc;

use remanent::batch::Width;
use remanent::device::DeviceBytes;
use remanent::device::host::HostDevice;
use remanent::device::{Command, CommandList, Device, Lane};
use remanent::error::{Invalid, Refused};
use remanent::options::{LogOptions, MemoryOptions, SnapshotSchedule};
use remanent::testing::faulty_device::{DeviceFault, FaultyDevice};
use remanent::testing::late_device::LateDevice;
use remanent::testing::sim_disk::SimDisk;
use remanent::{Error, Options, PageId, Place, Store, WriteBatch};

use crate::gpu;
use crate::kill::workload::Random;

pub const PLACE: Place = Place::Device(0);
const WIDTHS: [Width; 5] = [Width::W1, Width::W2, Width::W4, Width::W8, Width::W16];

/// Returns devices that execute early, late and randomly, and a GPU if one is present.
pub fn devices() -> Vec<Arc<dyn Device>> {
    let host = || Arc::new(HostDevice::new());
    let mut devices: Vec<Arc<dyn Device>> =
        vec![host(), Arc::new(LateDevice::new(host())), Arc::new(LateDevice::seeded(host(), 3))];
    if let Some(gpu) = gpu::device() {
        devices.push(gpu);
    }
    devices
}

pub fn open(disk: &SimDisk, device: Arc<dyn Device>) -> Store {
    let options =
        Options::new().log(LogOptions::new().segment_len(1 << 20)).snapshots(SnapshotSchedule::never());
    Store::open_on(Arc::new(disk.clone()), device, options).unwrap()
}

/// Creates a page with these bytes.
pub fn page(store: &Store, bytes: &[u8]) -> PageId {
    let mut batch = store.batch();
    batch.create_from(bytes, PLACE);
    store.commit(batch).unwrap().pages[0]
}

pub fn content(store: &Store, page: PageId) -> Vec<u8> {
    let mut bytes = vec![0; store.page(page).unwrap().len as usize];
    store.read(page, 0, &mut bytes).unwrap();
    bytes
}

/// Returns the bytes of device memory.
pub fn bytes_of(memory: &DeviceBytes) -> Vec<u8> {
    let mut bytes = vec![0; memory.byte_len() as usize];
    memory.read(0, &mut bytes).unwrap();
    bytes
}

/// Allocates device memory that contains these bytes.
fn born(store: &Store, bytes: &[u8]) -> DeviceBytes {
    let memory = store.device_bytes(bytes.len() as u64, PLACE).unwrap();
    memory.write(0, bytes).unwrap();
    memory
}

fn index_bytes(indices: &[u32]) -> Vec<u8> {
    indices.iter().flat_map(|index| index.to_le_bytes()).collect()
}

/// Adds the same random operation to two batches. One batch takes the bytes from the host, and the other from
/// the device.
fn operation(
    random: &mut Random,
    page: PageId,
    page_len: u64,
    known: &mut WriteBatch,
    blank: &mut WriteBatch,
    store: &Store,
) {
    let width = WIDTHS[random.below(5) as usize];
    match random.below(4) {
        0 | 1 => {
            let len = random.below(page_len + 1).min([10, 100, page_len][random.below(3) as usize]);
            let (offset, bytes) = (random.below(page_len - len + 1), random.bytes(len));
            known.write(page, offset, &bytes);
            // The range is only a part of the memory.
            let memory = born(store, &[&[9, 9, 9][..], &bytes, &[9]].concat());
            blank.write_device(page, offset, &memory.part(3..3 + len).unwrap());
        }
        2 => {
            let bound = page_len / width.bytes() as u64;
            let mut indices: Vec<u32> = (0..bound as u32).filter(|_| random.below(20) == 0).collect();
            indices.reverse();
            let values = random.bytes((indices.len() * width.bytes()) as u64);
            known.scatter(page, width, &indices, &values);
            blank.scatter_device(page, width, &born(store, &index_bytes(&indices)), &born(store, &values));
        }
        _ => {
            known.fill(page, 0, 16, &[3]).set_root("r", random.below(9));
            blank.fill(page, 0, 16, &[3]).set_root("r", random.below(9));
        }
    }
}

#[test]
fn device_bytes_are_written_like_host_bytes() {
    for device in devices() {
        let label = device.label();
        let (disk, host) = (SimDisk::new(), SimDisk::new());
        let (store, plain) = (open(&disk, device), open(&host, Arc::new(HostDevice::new())));
        let mut random = Random(11);
        // Use lengths beyond those of the device's fast paths for small copies.
        let lens = [100_u64, 4096, 5000, 200_001];
        let begin = lens.map(|len| random.bytes(len));
        let pages = begin.each_ref().map(|bytes| (page(&store, bytes), page(&plain, bytes)).0);
        for round in 0..30 {
            let (mut known, mut blank) = (plain.batch(), store.batch());
            for _ in 0..1 + random.below(6) {
                let at = random.below(4) as usize;
                operation(&mut random, pages[at], lens[at], &mut known, &mut blank, &store);
            }
            plain.commit(known).unwrap();
            store.commit(blank).unwrap();
            let at = random.below(4) as usize;
            assert!(content(&store, pages[at]) == content(&plain, pages[at]), "round {round} on {label}");
        }
        drop(store);
        // The log has the same bytes.
        let store = open(&disk, Arc::new(HostDevice::new()));
        for page in pages {
            assert!(content(&store, page) == content(&plain, page), "{page} recovered from {label}");
        }
    }
}

#[test]
fn logged_bytes_equal_merged_bytes_despite_later_caller_writes() {
    for seed in 0..20 {
        let disk = SimDisk::new();
        let device = Arc::new(LateDevice::seeded(Arc::new(HostDevice::new()), seed));
        let store = open(&disk, device);
        let page = page(&store, &[0; 4096]);
        let memory = born(&store, &[1; 4096]);
        for step in 2..10 {
            let mut batch = store.batch();
            batch.write_device(page, 0, &memory);
            store.submit(batch).unwrap();
            memory.write(0, &[step; 4096]).unwrap();
            // The batch contains the bytes that the memory had at submission.
            assert_eq!(content(&store, page), [step - 1; 4096], "seed {seed}");
        }
        let live = content(&store, page);
        drop(store);
        assert_eq!(content(&open(&disk, Arc::new(HostDevice::new())), page), live, "seed {seed}");
    }
}

#[test]
fn device_bytes_are_read_after_their_stream_wrote_them() {
    let device = Arc::new(LateDevice::new(Arc::new(HostDevice::new())));
    let store = open(&SimDisk::new(), device.clone());
    let page = page(&store, &[0; 8]);
    let stream = device.stream();
    // A kernel that fills memory with a pattern.
    let make = |memory: &DeviceBytes, pattern: [u8; 16]| {
        let target = device.span_at(memory.address().unwrap(), memory.byte_len());
        device.queue(stream, move |inner| {
            let commands = vec![Command::Fill { target, pattern, width: Width::W4 }];
            let list = CommandList { commands, staging: Vec::new() };
            inner.submit(Lane::Drain, list).unwrap().finish(inner).unwrap();
        });
    };
    let bytes = born(&store, &[1; 8]);
    make(&bytes, [2; 16]);
    let mut batch = store.batch();
    batch.write_device(page, 0, &bytes.on(stream));
    store.commit(batch).unwrap();
    assert_eq!(content(&store, page), [2; 8]);

    let (indices, values) = (born(&store, &index_bytes(&[0])), born(&store, &[3; 4]));
    make(&values, [4; 16]);
    let mut batch = store.batch();
    batch.scatter_device(page, Width::W4, &indices, &values.on(stream));
    store.commit(batch).unwrap();
    assert_eq!(content(&store, page), [4, 4, 4, 4, 2, 2, 2, 2], "the values come from the stream");

    make(&indices, [1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0]);
    let mut batch = store.batch();
    batch.scatter_device(page, Width::W4, &indices.on(stream), &values);
    store.commit(batch).unwrap();
    assert_eq!(content(&store, page), [4; 8], "the indices do");
}

#[test]
fn memory_for_callers_is_zero_at_first() {
    for device in devices() {
        let store = open(&SimDisk::new(), device);
        for _ in 0..2 {
            // New memory must not show the bytes of an earlier allocation.
            let memory = store.device_bytes(1000, PLACE).unwrap();
            let mut bytes = [1; 1000];
            memory.read(0, &mut bytes).unwrap();
            assert_eq!(bytes, [0; 1000]);
            memory.write(0, &[0xEE; 1000]).unwrap();
        }
    }
}

#[test]
fn unwritable_target_is_refused_without_changes() {
    for device in devices() {
        let (disk, other) = (SimDisk::new(), SimDisk::new());
        let (store, other) = (open(&disk, device), open(&other, Arc::new(HostDevice::new())));
        let page = page(&store, &[7; 64]);
        let before = store.lsn();
        let indices = |indices: &[u32]| born(&store, &index_bytes(indices));
        let bytes = |len: usize| born(&store, &vec![1; len]);
        let invalid: fn(&Error) -> bool =
            |error| matches!(error, Error::Invalid(Invalid::Operation { index: 1, .. }));
        type Row<'a> = (&'a str, Box<dyn Fn(&mut WriteBatch) + 'a>, fn(&Error) -> bool);
        let scatter = |list: &[u32], len| {
            let (indices, values) = (indices(list), bytes(len));
            move |batch: &mut WriteBatch| _ = batch.scatter_device(page, Width::W4, &indices, &values)
        };
        let rows: Vec<Row<'_>> = vec![
            ("an index past the page", Box::new(scatter(&[3, 16], 8)), invalid),
            ("an element twice", Box::new(scatter(&[3, 5, 3], 12)), invalid),
            ("fewer values than indices", Box::new(scatter(&[3, 5], 4)), invalid),
            (
                "a cut index",
                Box::new(|batch| _ = batch.scatter_device(page, Width::W4, &bytes(3), &bytes(0))),
                invalid,
            ),
            (
                "a page that is cloned",
                Box::new(|batch| {
                    batch.write_device(page, 0, &bytes(4));
                    batch.clone_page(page);
                }),
                invalid,
            ),
            (
                "past the end of the page",
                Box::new(|batch| _ = batch.write_device(page, 60, &bytes(5))),
                |error| matches!(error, Error::OutOfBounds { offset: 60, len: 5, page_len: 64, .. }),
            ),
            (
                "no page",
                Box::new(|batch| _ = batch.scatter_device(PageId(99), Width::W4, &indices(&[0]), &bytes(4))),
                |error| matches!(error, Error::UnknownPage { page: PageId(99) }),
            ),
            (
                "another store's memory",
                Box::new(|batch| _ = batch.write_device(page, 0, &born(&other, &[1]))),
                |error| matches!(error, Error::Refused(Refused::Memory { len: 1, .. })),
            ),
        ];
        for (what, add, expected) in rows {
            let mut batch = store.batch();
            batch.write(page, 0, &[9]);
            add(&mut batch);
            let error = store.commit(batch).unwrap_err();
            assert!(expected(&error), "{what}: {error}");
        }
        assert_eq!((store.lsn(), content(&store, page)), (before, vec![7; 64]));
        let memory = bytes(8);
        for (from, to) in [(9, 9), (3, 9), (4, 3)] {
            assert!(matches!(memory.part(from..to), Err(Error::Refused(Refused::Memory { len: 8, .. }))));
        }
        assert!(matches!(memory.write(5, &[0; 4]), Err(Error::Refused(Refused::Memory { .. }))));
        assert!(matches!(memory.read(u64::MAX, &mut [0]), Err(Error::Refused(Refused::Memory { .. }))));
    }
}

#[test]
fn page_grown_in_batch_accepts_elements_at_new_length() {
    let store = open(&SimDisk::new(), Arc::new(HostDevice::new()));
    let old = page(&store, &[7; 8]);
    let (indices, values) = (born(&store, &index_bytes(&[9, 0])), born(&store, &[1, 2]));
    let mut batch = store.batch();
    batch.resize(old, 10).scatter_device(old, Width::W1, &indices, &values);
    let new = batch.create(10, PLACE).page();
    batch.scatter_device(new, Width::W1, &indices, &values);
    let committed = store.commit(batch).unwrap();
    assert_eq!(content(&store, old), [2, 7, 7, 7, 7, 7, 7, 7, 0, 1]);
    assert_eq!(content(&store, committed.pages[0]), [2, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
}

#[test]
fn device_bytes_count_in_the_budget_until_dropped() {
    let device: Arc<dyn Device> = Arc::new(LateDevice::new(Arc::new(HostDevice::new())));
    let options = Options::new().memory(MemoryOptions::new().budget(PLACE, 3000));
    let store = Store::open_on(Arc::new(SimDisk::new()), device, options).unwrap();
    let page = page(&store, &[0; 1000]);
    let memory = born(&store, &[5; 1000]);
    assert!(matches!(store.device_bytes(1001, PLACE), Err(Error::OverBudget { available: 1000, .. })));
    let write = |len| {
        let mut batch = store.batch();
        batch.write_device(page, 0, &memory.part(0..len).unwrap());
        store.commit(batch)
    };
    for _ in 0..5 {
        // The payload is built on the device. With its headers, it is longer than the bytes that it writes.
        assert!(matches!(write(1000), Err(Error::OverBudget { .. })));
        write(900).unwrap();
    }
    assert_eq!(content(&store, page), [&[5; 900][..], &[0; 100]].concat());
    drop(memory);
    drop(store.device_bytes(2000, PLACE).unwrap());
    store.device_bytes(2000, PLACE).unwrap();
}

#[test]
fn device_error_leaves_batch_atomic() {
    for late in [false, true] {
        for nth in 1.. {
            let disk = SimDisk::new();
            let host: Arc<dyn Device> = Arc::new(HostDevice::new());
            let inner = if late { Arc::new(LateDevice::seeded(host, nth)) } else { host };
            let device = Arc::new(FaultyDevice::new(inner));
            let store = open(&disk, device.clone());
            let page = page(&store, &[0; 100]);
            let (bytes, indices) = (born(&store, &[1; 100]), born(&store, &index_bytes(&[1, 0])));
            let mut batch = store.batch();
            batch.write_device(page, 0, &bytes);
            batch.scatter_device(page, Width::W1, &indices, &bytes.part(0..2).unwrap());
            device.arm(DeviceFault { call: None, nth, context_lost: false });
            let outcome = store.commit(batch);
            let struck = device.struck();
            let (logged, last) = (store.lsn().0 == 2, outcome.as_ref().err());
            assert!(last.is_none_or(|error| error.to_string().contains("as arranged")), "{last:?}");
            assert!(outcome.is_err() || logged);
            drop(store);
            let store = open(&disk, Arc::new(HostDevice::new()));
            assert_eq!(content(&store, page), [u8::from(logged); 100], "call {nth}");
            if !struck {
                assert!(nth > 5, "a commit makes several calls");
                break;
            }
        }
    }
}
