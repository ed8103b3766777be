//! Captures. A page receives the content of its working copy, only changed elements are logged, and no change
//! of another writer is lost.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use remanent::batch::{InitialCopy, Shadow, Width, WorkingCopy};
use remanent::device::host::HostDevice;
use remanent::device::{CallerMemory, DeviceBytes, HostMemory};
use remanent::device::{Command, CommandList, Device, DeviceStreams, Lane, Pending, RawStream};
use remanent::error::{Invalid, Refused};
use remanent::options::MemoryOptions;
use remanent::testing::late_device::LateDevice;
use remanent::testing::sim_disk::SimDisk;
use remanent::{Epoch, Error, Options, Place, Store};

use crate::device_ops::{PLACE, content, devices, open, page};
use crate::kill::workload::Random;

/// Shadows that are copies of the page.
const COPIES: [Shadow; 3] = [Shadow::Page, Shadow::Kept(Place::Device(0)), Shadow::Kept(Place::Pinned)];
const SHADOWS: [Shadow; 4] = [COPIES[0], COPIES[1], COPIES[2], Shadow::Digest];

fn host() -> Store {
    open(&SimDisk::new(), Arc::new(HostDevice::new()))
}

fn capture(store: &Store, copy: &WorkingCopy) -> remanent::Result<()> {
    let mut batch = store.batch();
    batch.capture(copy);
    store.commit(batch).map(drop)
}

fn capture_ranges(store: &Store, copy: &WorkingCopy, ranges: &[Range<u64>]) -> remanent::Result<()> {
    let mut batch = store.batch();
    batch.capture_ranges(copy, ranges);
    store.commit(batch).map(drop)
}

fn copied(copy: &WorkingCopy) -> Vec<u8> {
    let mut bytes = vec![0; copy.bytes().byte_len() as usize];
    copy.bytes().read(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn capture_makes_page_and_log_equal_working_copy() {
    for device in devices() {
        let label = device.label();
        let disk = SimDisk::new();
        let store = open(&disk, device);
        let mut random = Random(5);
        let mut pages = Vec::new();
        // In the last of these pages, the device computes the indices of the changed elements.
        let lens = [
            (64, Width::W1),
            (4096, Width::W4),
            (100_000, Width::W16),
            (300_002, Width::W2),
            (700_001, Width::W1),
        ];
        for (len, width) in lens {
            for shadow in SHADOWS {
                let page = page(&store, &random.bytes(len));
                let copy = store.working_copy(page, width, shadow).unwrap();
                assert!(copied(&copy) == content(&store, page), "{len} bytes loaded on {label}");
                for round in 0..4 {
                    // Change a few elements, or many adjacent ones.
                    for _ in 0..random.below(8) {
                        let changed = 1 + random.below([4, len / 3][round % 2]);
                        let (offset, bytes) = (random.below(len - changed + 1), random.bytes(changed));
                        copy.bytes().write(offset, &bytes).unwrap();
                    }
                    let expected = copied(&copy);
                    capture(&store, &copy).unwrap();
                    assert!(
                        content(&store, page) == expected,
                        "{len} bytes, {shadow:?}, round {round} on {label}"
                    );
                    assert_eq!(copy.epoch(), store.page(page).unwrap().epoch);
                }
                pages.push((page, copied(&copy)));
            }
        }
        drop(store);
        let store = open(&disk, Arc::new(HostDevice::new()));
        for (page, expected) in pages {
            assert!(content(&store, page) == expected, "{page} recovered from {label}");
        }
    }
}

/// The bytes of each working copy are kept until the batch is logged, but all captures of the batch share the
/// bitmap memory of one.
#[test]
fn captures_of_batch_share_bitmap_memory() {
    const LEN: u64 = 1 << 20;
    const COUNT: u64 = 6;
    const BITS: u64 = 2 * (LEN / 8);
    let budget = COUNT * 3 * LEN + BITS + 4096;
    let options = Options::new().memory(MemoryOptions::new().budget(PLACE, budget));
    let store = Store::open_on(Arc::new(SimDisk::new()), Arc::new(HostDevice::new()), options).unwrap();
    let mut batch = store.batch();
    let mut copies = Vec::new();
    for number in 0..COUNT {
        let page = page(&store, &[0; LEN as usize]);
        let copy = store.working_copy(page, Width::W1, Shadow::Page).unwrap();
        copy.bytes().write(1000 * number, &[1, 2]).unwrap();
        batch.capture(&copy);
        copies.push(copy);
    }
    store.commit(batch).unwrap();
    assert!(copies.iter().all(|copy| content(&store, copy.page()) == copied(copy)));
}

/// All working copies of a batch are compared in one pass, each with its own element width and shadow.
#[test]
fn copies_of_every_kind_are_captured_by_one_batch() {
    for device in devices() {
        let label = device.label();
        let disk = SimDisk::new();
        let store = open(&disk, device);
        let mut random = Random(6);
        let mut copies = Vec::new();
        for (len, width) in [(48, Width::W4), (70_000, Width::W2), (0, Width::W1), (900_000, Width::W1)] {
            for shadow in SHADOWS {
                let page = page(&store, &random.bytes(len));
                copies.push(store.working_copy(page, width, shadow).unwrap());
            }
        }
        for round in 0..6 {
            let mut batch = store.batch();
            for copy in &copies {
                let len = copy.bytes().byte_len();
                let mut ranges = Vec::new();
                ranges.push(0..len.min(16));
                for _ in 0..random.below(30).min(len) {
                    let (offset, byte) = (random.below(len), random.bytes(1));
                    copy.bytes().write(offset, &byte).unwrap();
                    ranges.push(offset..offset + 1);
                }
                if random.below(3) == 0 {
                    batch.capture_ranges(copy, &ranges);
                } else {
                    batch.capture(copy);
                }
            }
            store.commit(batch).unwrap();
            for copy in &copies {
                let (page, width) = (copy.page(), copy.width());
                assert!(
                    content(&store, page) == copied(copy),
                    "{page} of {width:?}, round {round} on {label}"
                );
            }
        }
        let expected: Vec<_> = copies.iter().map(|copy| (copy.page(), copied(copy))).collect();
        drop((copies, store));
        let store = open(&disk, Arc::new(HostDevice::new()));
        for (page, expected) in expected {
            assert!(content(&store, page) == expected, "{page} recovered from {label}");
        }
    }
}

/// A capture claims all its memory in one step: the ranges to compare, and two bits for each element.
#[test]
fn capture_claims_all_memory_in_one_step() {
    const LEN: u64 = 1 << 20;
    const ASKED: u64 = LEN + 2 * (LEN / 2 / 8);
    let open = |extra: u64| {
        let options = Options::new().memory(MemoryOptions::new().budget(PLACE, 2 * LEN + extra));
        let device = Arc::new(HostDevice::new());
        let store = Store::open_on(Arc::new(SimDisk::new()), device, options).unwrap();
        let page = page(&store, &[0; LEN as usize]);
        let copy = store.working_copy(page, Width::W2, Shadow::Page).unwrap();
        copy.bytes().write(4000, &[1, 2]).unwrap();
        store.reset_peaks();
        (store, copy)
    };
    let (store, copy) = open(ASKED - 1);
    let refused = capture(&store, &copy).unwrap_err();
    let expected = Error::OverBudget {
        place: PLACE,
        requested: ASKED,
        available: ASKED - 1,
        budget: 2 * LEN + ASKED - 1,
    };
    assert_eq!(refused.to_string(), expected.to_string());
    let (peak, lsn) = (store.stats().places[0].1.peak_bytes, store.lsn().0);
    assert_eq!((peak, lsn), (2 * LEN, 1), "nothing was copied, nothing logged");
    capture_ranges(&store, &copy, &[4000..4002, 8000..8016]).unwrap();
    // Open another store whose budget also includes the payload.
    let (store, copy) = open(ASKED + 4096);
    capture(&store, &copy).unwrap();
    assert_eq!(store.lsn().0, 2);
}

#[test]
fn capture_logs_only_changes() {
    let store = host();
    let page = page(&store, &[0; 1 << 20]);
    let copy = store.working_copy(page, Width::W2, Shadow::Page).unwrap();
    let mut logged = store.stats().log.bytes;
    let mut grown = || {
        let before = std::mem::replace(&mut logged, store.stats().log.bytes);
        logged - before
    };
    // Change one element in a hundred: two bytes for its value, and one for its index.
    for element in (0..1 << 19).step_by(100) {
        copy.bytes().write(2 * element, &[1, 1]).unwrap();
    }
    capture(&store, &copy).unwrap();
    let (changed, found) = ((1 << 19) / 100, grown());
    assert!((3 * changed..3 * changed + 8192).contains(&found), "{found} bytes for {changed} elements");
    // Change a range, and one element far from it.
    copy.bytes().write(1000, &[2; 50_000]).unwrap();
    copy.bytes().write(900_000, &[2; 2]).unwrap();
    capture(&store, &copy).unwrap();
    let found = grown();
    assert!((50_000..50_000 + 8192).contains(&found), "{found} bytes for a range of 50,000");
    // Capture without any write, then after a write of equal bytes.
    copy.bytes().write(1000, &[2; 100]).unwrap();
    let epoch = copy.epoch();
    capture(&store, &copy).unwrap();
    assert!(grown() <= 4096);
    assert_eq!((copy.epoch(), store.page(page).unwrap().epoch), (epoch, epoch));
}

/// A host device that counts the bytes that it downloads on the staging lane.
struct Counting {
    inner: HostDevice,
    brought: AtomicU64,
}

impl Device for Counting {
    forward!(inner: label allocate release staging reached wait after places_and_abilities);

    fn submit(&self, lane: Lane, list: CommandList) -> remanent::Result<Pending> {
        let brought = list.commands.iter().map(|command| match command {
            Command::Download { source, .. } => source.len,
            Command::Select { target, .. } | Command::Crc { target, .. } => target.len as u64,
            _ => 0,
        });
        self.brought.fetch_add(if lane == Lane::Stage { brought.sum() } else { 0 }, Ordering::Relaxed);
        self.inner.submit(lane, list)
    }
}

/// The download depends neither on the number of unchanged bytes nor on the number of elements.
#[test]
fn capture_downloads_indices_and_values() {
    const LEN: usize = 4 << 20;
    let device = Arc::new(Counting { inner: HostDevice::new(), brought: AtomicU64::new(0) });
    let store = open(&SimDisk::new(), device.clone());
    let page = page(&store, &[7; LEN]);
    for shadow in COPIES {
        let copy = store.working_copy(page, Width::W1, shadow).unwrap();
        // If at least one element in thirty-two changes, a bitmap is shorter than indices.
        for (every, per_element) in [(LEN, 0), (1000, 5), (40, 5), (20, 0)] {
            let mut bytes = content(&store, page);
            bytes.iter_mut().step_by(every).for_each(|byte| *byte = byte.wrapping_add(1));
            copy.bytes().write(0, &bytes).unwrap();
            device.brought.store(0, Ordering::Relaxed);
            capture(&store, &copy).unwrap();
            let brought = device.brought.load(Ordering::Relaxed) as usize;
            let changed = LEN.div_ceil(every);
            // An index takes four bytes, and a value one byte. Bytes that the host already has are not
            // downloaded.
            let expected = match per_element {
                0 if every == 20 => LEN / 8 + changed,
                _ => per_element * changed,
            };
            let spare = brought.checked_sub(expected).unwrap_or_else(|| panic!("{brought} < {expected}"));
            assert!(spare < 400 + changed / 100, "{brought} bytes for {changed} changes, {shadow:?}");
            assert!(content(&store, page) == bytes);
        }
    }
}

fn fill_on(device: &LateDevice, stream: RawStream, memory: &DeviceBytes, byte: u8) {
    let target = device.span_at(memory.address().unwrap(), memory.byte_len());
    device.queue(stream, move |inner| {
        let commands = vec![Command::Fill { target, pattern: [byte; 16], width: Width::W1 }];
        let list = CommandList { commands, staging: Vec::new() };
        inner.submit(Lane::Drain, list).unwrap().finish(inner).unwrap();
    });
}

fn late() -> (Arc<LateDevice>, Store) {
    let device = Arc::new(LateDevice::new(Arc::new(HostDevice::new())));
    (device.clone(), open(&SimDisk::new(), device))
}

#[test]
fn copy_load_and_capture_follow_stream_order() {
    for shadow in SHADOWS {
        let (device, store) = late();
        let page = page(&store, &[1; 64]);
        let (stream, memory) = (device.stream(), store.device_bytes(64, PLACE).unwrap());
        fill_on(&device, stream, &memory, 9);
        let copy =
            store.working_copy_in(page, &memory.on(stream), Width::W1, shadow, InitialCopy::Load).unwrap();
        device.synchronize(stream).unwrap();
        assert_eq!(copied(&copy), [1; 64], "what was on the stream came before");
        fill_on(&device, stream, &memory, 7);
        capture(&store, &copy).unwrap();
        assert_eq!(content(&store, page), [7; 64], "{shadow:?}");
    }
}

#[test]
fn copy_written_after_staging_is_captured_as_staged() {
    let (device, store) = late();
    let page = page(&store, &[0; 64]);
    let copy = store.working_copy(page, Width::W1, Shadow::Page).unwrap();
    copy.bytes().write(10, &[5; 3]).unwrap();
    // Between staging and the comparison with the page, a kernel reverts the change.
    let stream = device.stream();
    fill_on(&device, stream, copy.bytes(), 0);
    device.wait_external(Lane::Apply, stream).unwrap();
    capture(&store, &copy).unwrap();
    let mut expected = [0; 64];
    expected[10..13].fill(5);
    assert_eq!((content(&store, page), copied(&copy)), (expected.to_vec(), vec![0; 64]));
    capture(&store, &copy).unwrap();
    assert_eq!(content(&store, page), [0; 64], "the next capture has that, too");
}

#[test]
fn staged_bytes_stay_until_shadow_is_updated() {
    let (_, store) = late();
    let captured = page(&store, &[0; 64]);
    let copy = store.working_copy(captured, Width::W1, Shadow::Kept(PLACE)).unwrap();
    for round in 1..4 {
        copy.bytes().write(u64::from(round), &[round]).unwrap();
        capture(&store, &copy).unwrap();
        // An allocation first frees unused memory. Commands of the device must not use freed memory.
        page(&store, &[round; 64]);
    }
    assert_eq!(content(&store, captured)[..5], [0, 1, 2, 3, 0]);
}

#[test]
fn only_declared_ranges_are_compared() {
    for shadow in COPIES {
        let store = host();
        let page = page(&store, &[0; 1000]);
        let copy = store.working_copy(page, Width::W1, shadow).unwrap();
        copy.bytes().write(0, &[1; 1000]).unwrap();
        capture_ranges(&store, &copy, &[600..640, 16..32, 620..656]).unwrap();
        let mut expected = vec![0; 1000];
        expected[16..32].fill(1);
        expected[600 / 16 * 16..656].fill(1);
        assert_eq!(content(&store, page), expected, "{shadow:?}");
        capture_ranges(&store, &copy, &[]).unwrap();
        assert_eq!(content(&store, page), expected, "{shadow:?}");
        // A changed range that was not passed to the call remains uncaptured.
        capture(&store, &copy).unwrap();
        assert_eq!(content(&store, page), [1; 1000], "{shadow:?}");
        let outside = capture_ranges(&store, &copy, &[0..1, 990..1001]);
        assert!(matches!(outside, Err(Error::OutOfBounds { page_len: 1000, .. })), "{outside:?}");
    }
}

#[test]
fn concurrent_changes_are_never_undone() {
    for shadow in SHADOWS {
        let store = host();
        let page = page(&store, &[0; 100]);
        let copy = store.working_copy(page, Width::W1, shadow).unwrap();
        copy.bytes().write(0, &[1]).unwrap();
        let mut batch = store.batch();
        batch.write(page, 50, &[9]);
        store.commit(batch).unwrap();
        let conflict = capture(&store, &copy).unwrap_err();
        let expected = matches!(conflict, Error::Conflict { expected: Epoch(1), found: Epoch(2), .. });
        assert!(expected, "{conflict}");
        assert_eq!(content(&store, page)[0], 0);

        store.reload(&copy).unwrap();
        assert_eq!(copied(&copy), content(&store, page));
        copy.bytes().write(0, &[2]).unwrap();
        capture(&store, &copy).unwrap();
        let found = content(&store, page);
        assert_eq!((found[0], found[50]), (2, 9), "{shadow:?}");
    }
}

/// Two threads repeatedly capture working copies of the same page. At the end, each change exists exactly
/// once.
#[test]
fn one_of_two_conflicting_captures_fails() {
    for (seed, shadow) in (0..4).flat_map(|seed| [(seed, Shadow::Page), (seed, Shadow::Digest)]) {
        let device: Arc<dyn Device> = if seed == 0 {
            Arc::new(HostDevice::new())
        } else {
            Arc::new(LateDevice::seeded(Arc::new(HostDevice::new()), seed))
        };
        let store = open(&SimDisk::new(), device);
        let page = page(&store, &[0; 16]);
        std::thread::scope(|scope| {
            for thread in 0..2_u64 {
                let store = &store;
                scope.spawn(move || {
                    let copy = store.working_copy(page, Width::W1, shadow).unwrap();
                    for _ in 0..20 {
                        // Both threads increment the same byte, and each thread increments one byte that only
                        // it writes.
                        loop {
                            for at in [0, 1 + thread] {
                                let mut byte = [0];
                                copy.bytes().read(at, &mut byte).unwrap();
                                copy.bytes().write(at, &[byte[0] + 1]).unwrap();
                            }
                            match capture(store, &copy) {
                                Ok(()) => break,
                                Err(Error::Conflict { .. }) => store.reload(&copy).unwrap(),
                                Err(error) => panic!("{error}"),
                            }
                        }
                    }
                });
            }
        });
        assert_eq!(content(&store, page)[..4], [40, 20, 20, 0], "seed {seed}, {shadow:?}");
    }
}

#[test]
fn captures_of_one_batch_are_atomic() {
    SHADOWS.into_iter().for_each(several_captures_are_one_batch_or_none_with);
}

fn several_captures_are_one_batch_or_none_with(shadow: Shadow) {
    let store = host();
    let pages = [page(&store, &[0; 40]), page(&store, &[0; 40])];
    let copies = pages.map(|page| store.working_copy(page, Width::W4, shadow).unwrap());
    copies.iter().for_each(|copy| copy.bytes().write(4, &[1; 4]).unwrap());
    let both = || {
        let mut batch = store.batch();
        copies.iter().for_each(|copy| _ = batch.capture(copy));
        batch.set_root("step", 1_u64).set_metadata(pages[0], "seen", true);
        store.commit(batch)
    };
    both().unwrap();
    assert_eq!(pages.map(|page| content(&store, page)[4]), [1, 1]);
    copies.iter().for_each(|copy| copy.bytes().write(4, &[2; 4]).unwrap());
    let mut batch = store.batch();
    batch.write(pages[1], 0, &[5]);
    store.commit(batch).unwrap();
    assert!(matches!(both(), Err(Error::Conflict { .. })));
    assert_eq!(pages.map(|page| content(&store, page)[4]), [1, 1]);
    // The first working copy still corresponds to its page.
    capture(&store, &copies[0]).unwrap();
    assert_eq!(content(&store, pages[0])[4], 2);
}

#[test]
fn captured_page_allows_no_other_change_in_batch() {
    let store = host();
    let page = page(&store, &[0; 40]);
    let copy = store.working_copy(page, Width::W4, Shadow::Page).unwrap();
    copy.bytes().write(0, &[1]).unwrap();
    let mut writes = store.batch();
    writes.write(page, 8, &[2]).capture(&copy);
    let mut twice = store.batch();
    twice.capture(&copy).capture(&copy);
    let mut resized = store.batch();
    resized.capture(&copy).resize(page, 80);
    let mut cloned = store.batch();
    cloned.capture(&copy);
    cloned.clone_page(page);
    for batch in [writes, twice, resized, cloned] {
        let error = store.commit(batch).unwrap_err();
        assert!(matches!(error, Error::Invalid(Invalid::Operation { .. })), "{error}");
    }
    assert_eq!(content(&store, page), [0; 40]);
    capture(&store, &copy).unwrap();
    assert_eq!(content(&store, page)[0], 1);
}

#[test]
fn initial_copy_option_sets_copy_direction() {
    for shadow in SHADOWS {
        let store = host();
        let page = page(&store, b"recovered");
        let tensor = store.device_bytes(9, PLACE).unwrap();
        tensor.write(0, b"brand new").unwrap();
        let copy = store.working_copy_in(page, &tensor, Width::W1, shadow, InitialCopy::Load).unwrap();
        capture(&store, &copy).unwrap();
        assert_eq!((copied(&copy), content(&store, page)), (b"recovered".to_vec(), b"recovered".to_vec()));

        tensor.write(0, b"brand new").unwrap();
        let copy = store.working_copy_in(page, &tensor, Width::W1, shadow, InitialCopy::Store).unwrap();
        assert_eq!(content(&store, page), b"recovered", "until it is captured");
        capture(&store, &copy).unwrap();
        assert_eq!(content(&store, page), b"brand new", "{shadow:?}");
    }
}

/// A host array with an external owner. The array records when it is dropped.
struct Array(Vec<u8>, Arc<AtomicU64>);

impl HostMemory for Array {
    fn byte_len(&self) -> u64 {
        self.0.len() as u64
    }

    fn bytes(&self, range: Range<usize>) -> &[u8] {
        &self.0[range]
    }

    fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        &mut self.0[range]
    }
}

impl Drop for Array {
    fn drop(&mut self) {
        self.1.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn external_array_is_captured_in_place() {
    for shadow in SHADOWS {
        let (store, gone) = (host(), Arc::new(AtomicU64::new(0)));
        let mut plain = Random(9).bytes(3 * 65_536 + 10);
        let page = page(&store, &plain);
        let array = Array(vec![0; plain.len()], gone.clone());
        let array = CallerMemory::from_host(array, Place::Host);
        let bytes = store.caller_bytes(&array).unwrap();
        let copy = store.working_copy_in(page, &bytes, Width::W2, shadow, InitialCopy::Load).unwrap();
        assert!(copied(&copy) == plain, "{shadow:?}");
        for (at, byte) in [(0, 1), (70_001, 2), (plain.len() - 1, 3)] {
            plain[at] = byte;
            // Write through another handle to the same bytes, as the array's library does.
            store.caller_bytes(&array).unwrap().write(at as u64, &[byte]).unwrap();
        }
        let logged = store.stats().log.bytes;
        capture(&store, &copy).unwrap();
        assert!(content(&store, page) == plain, "{shadow:?}");
        assert!(shadow == Shadow::Digest || store.stats().log.bytes - logged < 8192, "{shadow:?}");
        // Changes of other batches are copied to the array only by a reload.
        let mut batch = store.batch();
        batch.write(page, 5, &[9]);
        store.commit(batch).unwrap();
        assert!(copied(&copy) == plain);
        store.reload(&copy).unwrap();
        assert_eq!(copied(&copy)[5], 9);
        drop((array, bytes, copy));
        store.close().unwrap();
        assert_eq!(gone.load(Ordering::Relaxed), 1, "{shadow:?}");
    }
}

#[test]
fn memory_without_working_copy_is_refused() {
    let (store, other) = (host(), host());
    let page = page(&store, &[0; 12]);
    let copy_in = |memory: &remanent::device::DeviceBytes, width| {
        store.working_copy_in(page, memory, width, Shadow::Page, InitialCopy::Load).map(drop)
    };
    let bytes = |len| store.device_bytes(len, PLACE).unwrap();
    let rows = [
        ("longer", copy_in(&bytes(16), Width::W4)),
        ("shorter", copy_in(&bytes(8), Width::W4)),
        ("half an element", copy_in(&bytes(12), Width::W8)),
        ("another store's", copy_in(&other.device_bytes(12, PLACE).unwrap(), Width::W4)),
        ("half an element", store.working_copy(page, Width::W8, Shadow::Page).map(drop)),
    ];
    for (what, refused) in rows {
        assert!(matches!(refused, Err(Error::Refused(Refused::Memory { .. }))), "{what}: {refused:?}");
    }
    let (_, late) = late();
    let of_late = self::page(&late, &[0; 12]);
    let shifted = late.device_bytes(13, PLACE).unwrap().part(1..13).unwrap();
    let odd = late.working_copy_in(of_late, &shifted, Width::W4, Shadow::Page, InitialCopy::Load);
    assert!(
        matches!(odd, Err(Error::Refused(Refused::Memory { len: 12, .. }))),
        "elements off their boundary: {odd:?}"
    );
    // The length of the page has changed since.
    let copy = store.working_copy(page, Width::W4, Shadow::Page).unwrap();
    let mut batch = store.batch();
    batch.resize(page, 16);
    store.commit(batch).unwrap();
    assert!(matches!(capture(&store, &copy), Err(Error::Conflict { .. })));
    assert!(matches!(store.reload(&copy), Err(Error::Refused(Refused::Memory { len: 12, .. }))));
    // After a failed load, a working copy corresponds to no state of its page.
    assert!(matches!(capture(&store, &copy), Err(Error::Conflict { expected: Epoch(0), .. })));
}
