//! A device copies pages directly to mapped image files if the files are on a memory file system and the
//! device supports it. The files have the same content as in the other modes of writing images, and the
//! images are verified in place. If the device or the file system does not permit it, the bytes are copied
//! through staging memory.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use remanent::device::Device;
use remanent::device::host::HostDevice;
use remanent::device::multi::MultiDevice;
use remanent::error::{FileName, Folder, Invalid};
use remanent::options::{Compression, ImageIo, ImageOptions, MemoryOptions};
use remanent::stats::Purpose;
use remanent::testing::faulty_device::{BitFlip, BusTransfer, DeviceCall, DeviceFault, FaultyDevice};
use remanent::testing::late_device::LateDevice;
use remanent::{Error, Options, PageId, Place, Result, Retention, SnapshotOptions, StatePoint, Store};

use crate::files::{State, small};
use crate::gpu;
use crate::kill::workload::Random;
use crate::machine::skipped;
use crate::with_options::With;

/// Length of a chunk. A snapshot has one chunk, or two if a page is longer than a piece.
const CHUNK_LEN: u64 = 64 << 10;
/// Lengths of pages, with gaps between their images. One page is empty, and one is copied in pieces.
const LENS: [u64; 6] = [1000, 4096, 77, 0, 30_000, 3 * CHUNK_LEN + 5];

/// Returns a folder on a memory file system, or prints a message and returns `None` if there is none.
fn in_memory() -> Option<tempfile::TempDir> {
    let folder = tempfile::tempdir_in("/dev/shm");
    folder.inspect_err(|error| skipped("files in memory", &format!("/dev/shm: {error}"))).ok()
}

fn options(io: ImageIo) -> Options {
    small()
        .retention(Retention::new().snapshots_kept(1))
        .images(ImageOptions::new().chunk_len(CHUNK_LEN).compression(Compression::Off).io(io))
}

fn in_place() -> Options {
    options(ImageIo::Mapped)
}

fn host() -> Arc<dyn Device> {
    Arc::new(HostDevice::new())
}

fn create(store: &Store, place: Place) -> Vec<PageId> {
    create_of(store, place, &LENS)
}

fn create_of(store: &Store, place: Place, lens: &[u64]) -> Vec<PageId> {
    let mut batch = store.batch();
    lens.iter().for_each(|len| _ = batch.create(*len, place));
    store.commit(batch).unwrap().pages
}

/// Changes a part of every page, so that the next snapshot writes all pages. A batch that writes a whole page
/// may already have written its image.
fn change(store: &Store, pages: &[PageId], seed: u64) {
    let mut batch = store.batch();
    let len = |page: &PageId| store.page(*page).unwrap().len;
    for (page, len) in pages.iter().map(|page| (page, len(page))).filter(|(_, len)| *len > 0) {
        batch.write(*page, 0, &Random(seed * 100 + page.0).bytes(len / 2));
    }
    store.commit(batch).unwrap();
}

/// Takes snapshots, each of which writes all pages.
fn snapshots(store: &Store, pages: &[PageId], seeds: std::ops::Range<u64>) -> Result<()> {
    seeds.into_iter().try_for_each(|seed| {
        change(store, pages, seed);
        store.snapshot().map(drop)
    })
}

fn bytes_in_place(store: &Store) -> u64 {
    store.stats().snapshots.bytes_in_place
}

fn registered_bytes(store: &Store) -> u64 {
    let stats = store.stats();
    let pinned = stats.places.iter().find(|(place, _)| *place == Place::Pinned);
    pinned.map_or(0, |(_, usage)| usage.bytes_for(Purpose::Image))
}

fn image_files(directory: &Path) -> BTreeMap<FileName, Vec<u8>> {
    let files = std::fs::read_dir(directory.join("pages")).unwrap().filter_map(|entry| {
        let entry = entry.unwrap();
        let name = FileName::parse(Folder::Pages, entry.file_name().to_str().unwrap());
        name.map(|name| (name, std::fs::read(entry.path()).unwrap()))
    });
    files.collect()
}

/// Asserts that the store opens with the expected state, and that no file is damaged.
fn opens_with(directory: &Path, state: &State) {
    let store = in_place().open_with(directory, host()).unwrap();
    assert_eq!(State::of(&store), *state);
    assert_eq!(store.scrub().unwrap().damage, []);
}

fn copy_folder(source: &Path, target: &Path) {
    std::fs::create_dir_all(target).unwrap();
    for entry in std::fs::read_dir(source).unwrap() {
        let (entry, name) = entry.map(|entry| (entry.path(), entry.file_name())).unwrap();
        match entry.is_dir() {
            true => copy_folder(&entry, &target.join(name)),
            false => _ = std::fs::copy(&entry, target.join(name)).unwrap(),
        }
    }
}

/// Each snapshot has one chunk, so that the order of images does not depend on the timing of threads.
#[test]
fn in_place_copies_write_the_same_files_as_other_modes() {
    lie_there_as_other_ways_write_them(&LENS[..5]);
    lie_there_as_other_ways_write_them(&LENS[5..]);
}

fn lie_there_as_other_ways_write_them(lens: &[u64]) {
    let Some(folder) = in_memory() else { return };
    let made = folder.path().join("made");
    let store = options(ImageIo::Buffered).open_with(&made, host()).unwrap();
    let pages = create_of(&store, Place::Device(0), lens);
    store.close().unwrap();
    let mut found = Vec::new();
    for io in [ImageIo::Buffered, ImageIo::Mapped] {
        let path = folder.path().join(io.to_string());
        copy_folder(&made, &path);
        let store = options(io).open_with(&path, host()).unwrap();
        snapshots(&store, &pages, 1..3).unwrap();
        assert_eq!(bytes_in_place(&store), 0, "{io}: the first files are new");
        let mut images = Vec::new();
        for seed in 3..7 {
            snapshots(&store, &pages, seed..seed + 1).unwrap();
            let mut newest =
                image_files(&path).into_iter().filter(|(name, _)| matches!(name, FileName::Pages(_)));
            images.push(newest.next_back().unwrap());
        }
        let all: u64 = 4 * lens.iter().sum::<u64>();
        assert_eq!(bytes_in_place(&store), if io == ImageIo::Mapped { all } else { 0 }, "{io}");
        assert_eq!(registered_bytes(&store) > 0, io == ImageIo::Mapped, "{io}");
        let state = State::of(&store);
        store.close().unwrap();
        opens_with(&path, &state);
        found.push(images);
    }
    for ((name, buffered), (other, mapped)) in found[0].iter().zip(&found[1]) {
        assert_eq!(name, other);
        // A file that is written in place keeps its length.
        assert!(mapped[..buffered.len()] == buffered[..], "{name}: other bytes");
    }
}

/// Late devices and combined devices produce the same state. A list that uses a mapping which was released
/// too early would panic.
#[test]
fn every_kind_of_device_copies_in_place() {
    let late = |seed| Arc::new(LateDevice::seeded(host(), seed)) as Arc<dyn Device>;
    let both = || Arc::new(MultiDevice::new(vec![host(), host()])) as Arc<dyn Device>;
    let mut devices: Vec<(String, Arc<dyn Device>, u32)> =
        (0..20).map(|seed| (format!("late {seed}"), late(seed), 0)).collect();
    devices.push(("two".to_owned(), both(), 1));
    for (name, device, slot) in devices {
        let Some(folder) = in_memory() else { return };
        works_in_place(&name, folder.path(), device, slot, in_place());
    }
}

#[test]
fn a_gpu_copies_in_place() {
    let Some(device) = gpu::device() else { return };
    let Some(folder) = in_memory() else { return };
    works_in_place("a GPU", folder.path(), device, 0, in_place());
}

fn works_in_place(name: &str, directory: &Path, device: Arc<dyn Device>, slot: u32, options: Options) {
    let store = options.open_with(directory, device).unwrap();
    let pages = create(&store, Place::Device(slot));
    snapshots(&store, &pages, 1..5).unwrap();
    change(&store, &pages, 5);
    store.snapshot_with(SnapshotOptions::new().name("exact")).unwrap();
    // Long pages are captured while batches change them.
    std::thread::scope(|scope| {
        scope.spawn(|| (6..30).for_each(|seed| change(&store, &pages, seed)));
        store.snapshot().unwrap();
    });
    assert!(bytes_in_place(&store) > 0, "{name}: none was in place");
    let state = State::of(&store);
    store.close().unwrap();
    opens_with(directory, &state);
}

/// After a bit flip that happens once or every time, the snapshot is not recorded as verified, and the
/// previous snapshot is used.
#[test]
fn bit_flip_on_transfer_to_file_is_detected_before_use() {
    each_flip(BusTransfer::File, |_, verified| assert_told(&verified.unwrap_err()));
}

/// A single bit flip on a transfer from a file has no effect, because the transfer is repeated.
#[test]
fn bit_flip_on_transfer_from_file_is_reread() {
    each_flip(BusTransfer::FromFile, |count, verified| match verified {
        Ok(()) => assert!(count == 1, "{count} copies changed, and nothing was said"),
        Err(error) => {
            assert!(count > 1, "{count} changed: {error}");
            assert_told(&error);
        }
    });
}

fn assert_told(error: &Error) {
    assert!(error.to_string().contains("changed in transit"), "{error}");
}

/// Flips a bit in the first, second, … copy of a snapshot, alone or together with all later copies, until
/// there are no more copies. `check` receives the number of flips and the result of the snapshot's
/// verification.
fn each_flip(way: BusTransfer, check: impl Fn(u64, Result<()>)) {
    let mut struck = 0;
    for nth in 1.. {
        let mut flipped = false;
        for times in [1, u64::MAX] {
            let Some(folder) = in_memory() else { return };
            let device = Arc::new(FaultyDevice::across_a_bus(host()));
            let store = in_place().open_with(folder.path(), device.clone()).unwrap();
            let pages = create(&store, Place::Device(0));
            snapshots(&store, &pages, 1..3).unwrap();
            change(&store, &pages, 3);
            let (state, known) = (State::of(&store), store.snapshots());
            assert!(known.iter().all(|snapshot| snapshot.verified));
            device.flip(BitFlip { way, nth, times });
            let verified = store.snapshot().map(drop);
            let count = device.end_flips();
            let newest = store.snapshots().pop().unwrap();
            assert_eq!(newest.verified, verified.is_ok(), "{way:?} {nth} {times}");
            if verified.is_err() {
                // The snapshots that the new one would have replaced are kept.
                assert!(known.iter().all(|before| store.snapshots().contains(before)), "{way:?} {nth}");
            }
            match count {
                0 => verified.unwrap(),
                _ => check(count, verified),
            }
            flipped = count > 0;
            drop(store);
            opens_with(folder.path(), &state);
        }
        if !flipped {
            break;
        }
        struck += 1;
    }
    assert!(struck >= 2, "{struck} copies changed");
}

/// Whichever call fails, the state is recovered and no file is damaged.
#[test]
fn device_failure_loses_no_state() {
    let calls = [
        DeviceCall::Register,
        DeviceCall::Unregister,
        DeviceCall::Submit,
        DeviceCall::Wait,
        DeviceCall::After,
        DeviceCall::Staging,
        DeviceCall::Release,
    ];
    for (call, context_lost) in calls.iter().flat_map(|call| [(*call, false), (*call, true)]) {
        for nth in 1..40 {
            let Some(folder) = in_memory() else { return };
            let device = Arc::new(FaultyDevice::across_a_bus(host()));
            let store = in_place().open_with(folder.path(), device.clone()).unwrap();
            let pages = create(&store, Place::Device(0));
            snapshots(&store, &pages, 1..2).unwrap();
            change(&store, &pages, 2);
            let before = store.lsn();
            device.arm(DeviceFault { call: Some(call), nth, context_lost });
            // The first snapshot registers the file, and later snapshots copy to the registered file.
            let taken = (0..3).try_for_each(|_| {
                let mut batch = store.batch();
                let changed = pages.iter().zip(LENS).filter(|(_, len)| *len > 0);
                changed.for_each(|(page, len)| _ = batch.fill(*page, 0, len / 2, &[7]));
                store.commit(batch)?;
                store.snapshot().map(drop)
            });
            let struck = device.struck();
            if call == DeviceCall::Register && struck && !context_lost {
                taken.unwrap();
            }
            drop(store);
            let store = in_place().open_with(folder.path(), host()).unwrap();
            let found = State::of(&store);
            assert!(store.lsn() >= before && found.pages.len() == LENS.len(), "{call:?} {nth}");
            assert_eq!(store.scrub().unwrap().damage, [], "{call:?} {nth}");
            if !struck {
                break;
            }
        }
    }
}

#[test]
fn device_without_file_copies_uses_staging() {
    let Some(folder) = in_memory() else { return };
    let device = Arc::new(FaultyDevice::new(host()));
    let store = in_place().open_with(folder.path(), device.clone()).unwrap();
    let pages = create(&store, Place::Device(0));
    snapshots(&store, &pages, 1..2).unwrap();
    for seed in 2..5 {
        device.arm(DeviceFault { call: Some(DeviceCall::Register), nth: 1, context_lost: false });
        snapshots(&store, &pages, seed..seed + 1).unwrap();
        assert!(device.struck(), "it was asked");
    }
    assert_eq!((bytes_in_place(&store), registered_bytes(&store)), (0, 0));
    // From now on, registration succeeds, and the second snapshot finds a registered file.
    snapshots(&store, &pages, 5..7).unwrap();
    assert!(bytes_in_place(&store) > 0);
    let state = State::of(&store);
    store.close().unwrap();
    opens_with(folder.path(), &state);
}

#[test]
fn registered_files_respect_budget_and_yield_to_pages() {
    let Some(folder) = in_memory() else { return };
    let open = |budget: Option<u64>| {
        let memory = budget
            .into_iter()
            .fold(MemoryOptions::new(), |memory, bytes| memory.budget(Place::Pinned, bytes));
        in_place().memory(memory).open_with(folder.path(), host()).unwrap()
    };
    let store = open(None);
    let pages = create(&store, Place::Device(0));
    snapshots(&store, &pages, 1..3).unwrap();
    let len = registered_bytes(&store);
    assert!(len > 0);
    let spare =
        image_files(folder.path()).into_iter().find(|(name, _)| matches!(name, FileName::ImageSpare(_)));
    assert_eq!(len, spare.unwrap().1.len() as u64);
    store.close().unwrap();

    let store = open(Some(len - 1));
    snapshots(&store, &pages, 3..6).unwrap();
    assert_eq!((bytes_in_place(&store), registered_bytes(&store)), (0, 0), "a byte too little");
    store.close().unwrap();

    let store = open(Some(len));
    snapshots(&store, &pages, 6..9).unwrap();
    assert_eq!(registered_bytes(&store), len, "one of two files");
    assert!(bytes_in_place(&store) > 0);
    // Pages have priority over registered files.
    let mut batch = store.batch();
    let page = batch.create(len, Place::Pinned).page();
    batch.write(page, 0, b"first");
    store.commit(batch).unwrap();
    assert_eq!(registered_bytes(&store), 0);
    let before = bytes_in_place(&store);
    snapshots(&store, &pages, 9..12).unwrap();
    assert_eq!(bytes_in_place(&store), before);
    let state = State::of(&store);
    store.close().unwrap();
    opens_with(folder.path(), &state);
}

/// A fork has a hard link to the file, so the file is not overwritten, and its mapping is released.
#[test]
fn file_shared_with_fork_is_dropped_not_reused() {
    let Some(folder) = in_memory() else { return };
    let (path, fork) = (folder.path().join("store"), folder.path().join("fork"));
    let store = in_place().open_with(&path, host()).unwrap();
    let pages = create(&store, Place::Device(0));
    snapshots(&store, &pages, 1..5).unwrap();
    let state = State::of(&store);
    store.fork(&fork, StatePoint::Lsn(store.lsn())).unwrap();
    let shared = registered_bytes(&store);
    snapshots(&store, &pages, 5..7).unwrap();
    assert!(registered_bytes(&store) <= shared);
    snapshots(&store, &pages, 7..10).unwrap();
    drop(store);
    let forked = in_place().open_with(&fork, host()).unwrap();
    assert_eq!(State::of(&forked).pages, state.pages);
    assert_eq!(forked.scrub().unwrap().damage, []);
}

/// A mapping that outlived its file would keep the file's disk space and its part of the memory budget.
#[test]
fn removed_file_is_released() {
    let Some(folder) = in_memory() else { return };
    let store = in_place().open_with(folder.path(), host()).unwrap();
    let pages = create(&store, Place::Device(0));
    snapshots(&store, &pages, 1..5).unwrap();
    let both = registered_bytes(&store);
    // A prune by the caller also removes spares.
    store.prune(&Retention::default().snapshots_kept(1)).unwrap();
    let one = registered_bytes(&store);
    let left = image_files(folder.path());
    assert_eq!((left.len(), one), (1, left.values().next().unwrap().len() as u64));
    assert_eq!(both, 2 * one);
}

/// Without memory for copies of pages, batches wait, and the host computes checksums of the bytes that it
/// writes. All bytes are read back.
#[test]
fn without_copy_room_pages_use_staging() {
    let Some(folder) = in_memory() else { return };
    let memory = MemoryOptions::new().budget(Place::Device(0), LENS.iter().sum());
    let store = in_place().memory(memory).open_with(folder.path(), host()).unwrap();
    let pages = create(&store, Place::Device(0));
    snapshots(&store, &pages, 1..6).unwrap();
    assert_eq!(bytes_in_place(&store), 0);
    assert!(registered_bytes(&store) > 0);
    let state = State::of(&store);
    store.close().unwrap();
    opens_with(folder.path(), &state);
}

/// When a file grows, its new end is first written through staging, and later registered.
#[test]
fn grown_file_is_registered_again() {
    let Some(folder) = in_memory() else { return };
    let store = in_place().open_with(folder.path(), host()).unwrap();
    let pages = create(&store, Place::Device(0));
    snapshots(&store, &pages, 1..5).unwrap();
    let mut batch = store.batch();
    let longer = batch.create(CHUNK_LEN / 4, Place::Device(0)).page();
    batch.fill(longer, 0, 10, &[1]);
    let longer = store.commit(batch).unwrap().pages[0];
    let mut taken = Vec::new();
    for seed in 5..12 {
        let mut batch = store.batch();
        batch.fill(longer, 0, 10, &[seed as u8]);
        store.commit(batch).unwrap();
        let before = bytes_in_place(&store);
        snapshots(&store, &pages, seed..seed + 1).unwrap();
        taken.push(bytes_in_place(&store) - before);
    }
    let all = LENS.iter().sum::<u64>() + CHUNK_LEN / 4;
    assert!(taken[0] < all && taken[6] == all, "{taken:?} of {all}");
    let state = State::of(&store);
    store.close().unwrap();
    opens_with(folder.path(), &state);
}

/// The mapping of an overlong file is released before the file is truncated, and later images are written
/// correctly.
#[test]
fn overlong_files_are_truncated_except_mapped() {
    let Some(folder) = in_memory() else { return };
    let store = in_place().open_with(folder.path(), host()).unwrap();
    let pages = create(&store, Place::Device(0));
    snapshots(&store, &pages, 1..5).unwrap();
    let mut batch = store.batch();
    batch.delete(pages[4]).resize(pages[5], 2 * CHUNK_LEN + 5);
    store.commit(batch).unwrap();
    for seed in 5..9 {
        let mut batch = store.batch();
        for page in [0, 1, 2, 5] {
            batch.write(pages[page], 0, &Random(seed).bytes(77));
        }
        store.commit(batch).unwrap();
        store.snapshot().unwrap();
    }
    let longest = image_files(folder.path()).values().map(Vec::len).max().unwrap() as u64;
    assert!(longest < 3 * CHUNK_LEN + 30_000, "{longest}");
    let state = State::of(&store);
    store.close().unwrap();
    opens_with(folder.path(), &state);
}

/// The host compresses pages, and a file on a block device cannot be registered. Both cases use staging.
#[test]
fn registration_is_skipped_if_host_needs_bytes() {
    let Some(memory) = in_memory() else { return };
    for compression in [Compression::Zstd, Compression::Off] {
        for io in [ImageIo::Mapped, ImageIo::Buffered] {
            let folder = tempfile::tempdir_in(memory.path()).unwrap();
            let store = options(io)
                .with(|options| options.images.compression = compression)
                .open_with(folder.path(), host())
                .unwrap();
            let pages = create(&store, Place::Device(0));
            snapshots(&store, &pages, 1..5).unwrap();
            let expected = (io, compression) == (ImageIo::Mapped, Compression::Off);
            assert_eq!(bytes_in_place(&store) > 0, expected, "{io} {compression:?}");
        }
    }
    let on_medium = env!("CARGO_TARGET_TMPDIR");
    std::fs::create_dir_all(on_medium).unwrap();
    let folder = tempfile::tempdir_in(on_medium).unwrap();
    match in_place().open_with(folder.path(), host()) {
        Err(Error::Invalid(Invalid::Option { .. })) => {
            skipped("mapped images on a medium", "it refuses them")
        }
        opened => {
            let store = opened.unwrap();
            let pages = create(&store, Place::Device(0));
            snapshots(&store, &pages, 1..5).unwrap();
            assert_eq!((bytes_in_place(&store), registered_bytes(&store)), (0, 0));
        }
    }
}
