//! Captures of pages on disk. The state exists in the caller's memory and on disk, not in the store's memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use remanent::batch::{InitialCopy, Shadow, Width};
use remanent::device::Device;
use remanent::device::host::HostDevice;
use remanent::error::{FileName, Unavailable};
use remanent::options::MemoryOptions;
use remanent::testing::late_device::LateDevice;
use remanent::testing::sim_disk::SimDisk;
use remanent::{Error, PageId, Place, Store};

use crate::files::Files;
use crate::kill::workload::Random;
use crate::pages_on_disk::{commit, move_to, opened, uncompressed};
use crate::with_options::With;

/// Length of a digested chunk, and of a page with 16 of them, in bytes.
const CHUNK: u64 = 64 << 10;
const PAGE: u64 = 16 * CHUNK;
const SHADOWS: [Shadow; 2] = [Shadow::Kept(Place::Host), Shadow::Digest];

/// Allocates caller memory for kernels to write. It contains these bytes.
fn tensor(store: &Store, bytes: &[u8]) -> remanent::device::DeviceBytes {
    let tensor = store.device_bytes(bytes.len() as u64, Place::Device(0)).unwrap();
    tensor.write(0, bytes).unwrap();
    tensor
}

/// Returns the number of bytes in a store's image files.
fn image_bytes(disk: &SimDisk) -> u64 {
    let files = Files::of(disk);
    let names = files.names(|file| matches!(file, FileName::Pages(_)));
    names.iter().map(|name| files.0[name].len() as u64).sum()
}

/// The state exists only in the caller's memory and on disk. A shadow finds the changes.
#[test]
fn working_copy_of_disk_page_is_captured() {
    let host = || Arc::new(HostDevice::new()) as Arc<dyn Device>;
    for shadow in SHADOWS {
        for device in [host(), Arc::new(LateDevice::seeded(host(), 8))] {
            stands_for_a_page_on_disk(shadow, &device);
        }
    }
}

fn stands_for_a_page_on_disk(shadow: Shadow, device: &Arc<dyn Device>) {
    const LEN: usize = 600 << 10;
    // Digests detect changes per chunk of 64 KiB.
    let few = if shadow == Shadow::Digest { 96 << 10 } else { 4096 };
    let disk = SimDisk::new();
    let reopen = || Store::open_on(Arc::new(disk.clone()), device.clone(), uncompressed()).unwrap();
    let mut random = Random(21);
    let mut plain = random.bytes(LEN as u64);
    let mut store = reopen();
    let page = commit(&store, |batch| _ = batch.create_from(plain.clone(), Place::Disk))[0];
    // The page also changes after its image was written.
    plain[70..80].fill(1);
    commit(&store, |batch| _ = batch.write(page, 70, &[1; 10]));

    let memory = tensor(&store, &[0; LEN]);
    let refused = store.working_copy_in(page, &memory, Width::W4, Shadow::Page, InitialCopy::Load);
    assert!(
        matches!(&refused, Err(Error::Unavailable(Unavailable::Place { place: Place::Disk, reason })) if reason.contains("Shadow::Kept")),
        "{refused:?}"
    );
    let copy = store.working_copy_in(page, &memory, Width::W4, shadow, InitialCopy::Load).unwrap();
    let in_memory = |copy: &remanent::batch::WorkingCopy| {
        let mut found = vec![0; LEN];
        copy.bytes().read(0, &mut found).unwrap();
        found
    };
    assert!(in_memory(&copy) == plain, "what was loaded");
    assert_eq!(store.page(page).unwrap().place, Place::Disk);

    // A few changed elements are stored in the log.
    let capture = |store: &Store, plain: &mut Vec<u8>, changes: &[std::ops::Range<usize>], salt: u8| {
        for range in changes {
            plain[range.clone()].iter_mut().for_each(|byte| *byte = byte.wrapping_add(salt));
            copy.bytes().write(range.start as u64, &plain[range.clone()]).unwrap();
        }
        let before = (store.stats().log.bytes, image_bytes(&disk));
        commit(store, |batch| _ = batch.capture(&copy));
        assert!(store.read_to_vec(page).unwrap() == *plain, "{changes:?}");
        (store.stats().log.bytes - before.0, image_bytes(&disk) - before.1)
    };
    let (logged, in_images) = capture(&store, &mut plain, &[4..8, 9000..9100, LEN - 4..LEN], 3);
    assert!(logged < few && in_images == 0, "{logged} bytes in the log, {in_images} in images");
    // A large change is written once, as an image.
    let (logged, in_images) = capture(&store, &mut plain, std::slice::from_ref(&(100..LEN / 2)), 5);
    assert!(logged < 4096 && in_images >= LEN as u64, "{logged} bytes in the log, {in_images} in images");
    assert_eq!(store.stats().pending_bytes, 0, "the image has all of them");
    let (logged, in_images) = capture(&store, &mut plain, std::slice::from_ref(&(0..4)), 7);
    assert!(logged < few && in_images == 0, "{logged} bytes in the log, {in_images} in images");
    let written = store.snapshot().unwrap().bytes_written;
    assert!(written >= LEN as u64, "the page changed since its image: {written}");

    // Changes by other writers are not reverted.
    commit(&store, |batch| _ = batch.write(page, 0, &[9]));
    plain[0] = 9;
    let refused = store.commit({
        let mut batch = store.batch();
        batch.capture(&copy);
        batch
    });
    assert!(matches!(refused, Err(Error::Conflict { .. })), "{refused:?}");
    store.reload(&copy).unwrap();
    assert!(in_memory(&copy) == plain, "what was loaded again");
    // New memory is captured, which replaces the whole page.
    let fresh = random.bytes(LEN as u64);
    let memory = tensor(&store, &fresh);
    let copy = store.working_copy_in(page, &memory, Width::W1, shadow, InitialCopy::Store).unwrap();
    commit(&store, |batch| _ = batch.capture(&copy));
    assert!(store.read_to_vec(page).unwrap() == fresh);
    // The same copy is captured after the page moves to memory, and after it moves back to disk.
    let mut plain = fresh;
    for (place, at) in [(Place::Host, 10), (Place::Disk, 20), (Place::Pinned, 30)] {
        move_to(&store, page, place);
        plain[at] ^= 0xff;
        copy.bytes().write(at as u64, &plain[at..=at]).unwrap();
        commit(&store, |batch| _ = batch.capture(&copy));
        assert!(store.read_to_vec(page).unwrap() == plain, "in {place:?}");
    }
    drop((copy, memory));
    for _ in 0..2 {
        drop(store);
        store = reopen();
        assert!(store.read_to_vec(page).unwrap() == plain);
        store.snapshot().unwrap();
    }
}

/// Captured changes of a page on disk stay in memory until the next snapshot. If they would exceed the budget, pages
/// are written whole, starting with the pages that have the most changes.
#[test]
fn pages_with_too_many_changes_are_written_whole() {
    for shadow in SHADOWS {
        let disk = SimDisk::new();
        let memory = MemoryOptions::new().budget(Place::Disk, 800 << 10);
        let store = opened(&disk, uncompressed().memory(memory.clone()));
        let mut random = Random(5);
        let mut plain: Vec<Vec<u8>> = (0..4).map(|_| random.bytes(PAGE)).collect();
        let pages = commit(&store, |batch| {
            plain.iter().for_each(|bytes| _ = batch.create_from(bytes.clone(), Place::Disk));
        });
        let copy = |(page, bytes): (&PageId, &Vec<u8>)| {
            let memory = tensor(&store, bytes);
            store.working_copy_in(*page, &memory, Width::W1, shadow, InitialCopy::Load).unwrap()
        };
        let copies: Vec<_> = pages.iter().zip(&plain).map(copy).collect();
        // Number of changed chunks of each page, out of 16, never more than a quarter. The memory suffices for four
        // pages with such changes.
        let rounds =
            [([1, 2, 3, 4], 2..=2), ([4, 1, 1, 1], 1..=3), ([0, 0, 1, 0], 0..=1), ([4, 4, 4, 4], 3..=4)];
        for (round, (chunks, expected)) in rounds.into_iter().enumerate() {
            for ((copy, plain), chunks) in copies.iter().zip(&mut plain).zip(chunks) {
                for chunk in 0..chunks {
                    let at = 4 * chunk * CHUNK;
                    let bytes = &mut plain[at as usize..(at + CHUNK) as usize];
                    bytes.iter_mut().for_each(|byte| *byte ^= 1 + round as u8);
                    copy.bytes().write(at, bytes).unwrap();
                }
            }
            let before = image_bytes(&disk);
            commit(&store, |batch| copies.iter().for_each(|copy| _ = batch.capture(copy)));
            let whole = (image_bytes(&disk) - before) / PAGE;
            assert!(expected.contains(&whole), "{whole} pages written whole in round {round}, {shadow:?}");
            for (page, plain) in pages.iter().zip(&plain) {
                assert!(store.read_to_vec(*page).unwrap() == *plain, "round {round}, {shadow:?}");
            }
            assert!(store.stats().pending_bytes <= 800 << 10);
        }
        // If other operations use almost all memory, no capture has enough.
        store.snapshot().unwrap();
        let other = commit(&store, |batch| _ = batch.create(PAGE, Place::Disk))[0];
        for copy in &copies {
            copy.bytes().write(CHUNK, &[77; 100]).unwrap();
        }
        plain.iter_mut().for_each(|plain| plain[CHUNK as usize..][..100].fill(77));
        let written = vec![5; 640 << 10];
        commit(&store, |batch| {
            batch.write(other, 0, &written);
            copies.iter().for_each(|copy| _ = batch.capture(copy));
        });
        assert!(store.read_to_vec(other).unwrap()[..written.len()] == written);
        drop((copies, store));
        let store = opened(&disk, uncompressed().memory(memory));
        for (page, plain) in pages.iter().zip(&plain) {
            assert!(store.read_to_vec(*page).unwrap() == *plain);
        }
    }
}

/// A page moves to memory and back during a capture of the whole page. The image that was written for the page on disk
/// must not be used for the page in memory.
#[test]
fn a_page_moves_while_it_is_captured() {
    SHADOWS.into_iter().for_each(a_page_moves_while_it_is_captured_with);
}

fn a_page_moves_while_it_is_captured_with(shadow: Shadow) {
    const LEN: usize = 64 << 10;
    let disk = SimDisk::new();
    let store = opened(&disk, uncompressed().with(|options| options.retention.log_kept = 0));
    let page = commit(&store, |batch| _ = batch.create(LEN as u64, Place::Disk))[0];
    let memory = tensor(&store, &[0; LEN]);
    let copy = store.working_copy_in(page, &memory, Width::W1, shadow, InitialCopy::Load).unwrap();
    let is_over = AtomicBool::new(false);
    // Captures the page. Returns true if the capture wrote an image.
    let capture = |round: u8| {
        copy.bytes().write(0, &[round; LEN]).unwrap();
        let logged = store.stats().log.bytes;
        commit(&store, |batch| _ = batch.capture(&copy));
        assert!(store.read_to_vec(page).unwrap() == [round; LEN], "round {round}");
        store.stats().log.bytes - logged < LEN as u64
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for place in [Place::Host, Place::Disk].into_iter().cycle() {
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
                move_to(&store, page, place);
            }
        });
        for round in 1..=200 {
            capture(round);
        }
        is_over.store(true, Ordering::Relaxed);
    });
    for (round, place) in [(201, Place::Host), (202, Place::Disk)] {
        move_to(&store, page, place);
        assert_eq!(capture(round), place == Place::Disk, "{place}");
    }
}

/// A capture that conflicts with another change removes the image that it wrote.
#[test]
fn refused_capture_removes_its_image() {
    SHADOWS.into_iter().for_each(an_image_of_a_capture_that_is_refused_goes_with);
}

fn an_image_of_a_capture_that_is_refused_goes_with(shadow: Shadow) {
    const LEN: usize = 64 << 10;
    let disk = SimDisk::new();
    let store = opened(&disk, uncompressed());
    let page = commit(&store, |batch| _ = batch.create(LEN as u64, Place::Disk))[0];
    let memory = tensor(&store, &[7; LEN]);
    let copy = store.working_copy_in(page, &memory, Width::W1, shadow, InitialCopy::Store).unwrap();
    let before = image_bytes(&disk);
    let mut batch = store.batch();
    batch.capture(&copy).expect_epoch(page, remanent::Epoch(99));
    let refused = store.commit(batch);
    assert!(matches!(refused, Err(Error::Conflict { .. })), "{refused:?}");
    assert_eq!(image_bytes(&disk), before);
    commit(&store, |batch| _ = batch.capture(&copy));
    assert!(store.read_to_vec(page).unwrap() == [7; LEN]);
    assert!(image_bytes(&disk) > before);
}
