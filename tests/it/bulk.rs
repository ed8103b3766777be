//! Whole pages in bulk. Their bytes are written once, to an image file that the log names. The file is kept
//! while a frame or a snapshot names it.

use std::sync::Arc;

use remanent::batch::Width;
use remanent::device::Device;
use remanent::device::host::HostDevice;
use remanent::disk::Disk;
use remanent::error::{FileName, Folder, Remedy};
use remanent::options::LogOptions;
use remanent::testing::late_device::LateDevice;
use remanent::testing::sim_disk::{DiskFault, EIO, Operation, SimDisk};
use remanent::{Ack, Epoch, Error, Key, Options, PageId, Place, Store, StoreId, WriteBatch};
use remanent_format::frame::FrameKind;
use remanent_format::image::{ImageFileHeader, ImagePurpose};
use remanent_format::log::LogWalk;
use remanent_format::op::decode_payload;
use remanent_format::state::rebuild::{RebuildOptions, rebuild};
use remanent_format::state::survey::Survey;

use crate::files::{Files, State, open, open_with, small};
use crate::kill::workload::Random;
use crate::with_options::With;

/// Length of a page, longer than a segment of these tests. A frame that contained the page would need its own
/// segment.
const PAGE_LEN: usize = 20 << 10;

/// Returns incompressible bytes.
fn content(seed: u8) -> Vec<u8> {
    Random(seed.into()).bytes(PAGE_LEN as u64)
}

/// Adds pages with distinct content to a batch.
fn create_pages(batch: &mut WriteBatch, seeds: std::ops::Range<u8>) {
    for seed in seeds {
        batch.create_from(content(seed), Place::Host).optional_key(Key::new([seed + 1]).ok());
    }
}

fn import(store: &Store, seeds: std::ops::Range<u8>) -> Vec<PageId> {
    let mut batch = store.batch();
    create_pages(&mut batch, seeds);
    store.commit(batch).unwrap().pages
}

fn image_files(disk: &SimDisk) -> Vec<FileName> {
    Files::of(disk).names(|file| matches!(file, FileName::Pages(_)))
}

/// Waits until the store's threads have the current segment and two spare ones ready.
fn until_segments_are_made(disk: &SimDisk) {
    let is_segment = |name: &String| matches!(FileName::parse(Folder::Log, name), Some(FileName::Segment(_)));
    while Disk::list(disk, Folder::Log).unwrap().iter().filter(|name| is_segment(name)).count() < 3 {
        std::thread::yield_now();
    }
}

/// Returns the number of operations of each kind in the log.
fn logged_kinds(disk: &SimDisk) -> std::collections::BTreeMap<&'static str, usize> {
    let files = Files::of(disk);
    let survey = Survey::read(&files).unwrap();
    let mut walk = LogWalk::new(&files, &survey.log, survey.log.beginning().unwrap(), survey.mark()).unwrap();
    let mut kinds = std::collections::BTreeMap::new();
    while let Some(frame) = walk.next().unwrap() {
        if frame.header.kind == FrameKind::Batch {
            for at in decode_payload(frame.payload).unwrap() {
                *kinds.entry(at.op.kind()).or_default() += 1;
            }
        }
    }
    kinds
}

#[test]
fn importing_pages_writes_their_bytes_once() {
    let disk = SimDisk::new();
    let store = open(&disk).unwrap();
    let before = store.stats().log.bytes;
    let pages = import(&store, 0..10);
    let grown = store.stats().log.bytes - before;
    assert!(grown < 4096, "the log grew by {grown} bytes");
    let file_bytes: usize = image_files(&disk).iter().map(|file| disk.bytes(*file).unwrap().len()).sum();
    assert!(file_bytes <= 10 * PAGE_LEN + 2 * 4096, "images take {file_bytes} bytes");

    // Whole pages are replaced, one with an equal length and one with another length.
    let mut batch = store.batch();
    batch.write(pages[0], 0, &content(100));
    batch.resize(pages[1], 2 * PAGE_LEN as u64).write(pages[1], 0, &[content(101), content(102)].concat());
    // None of these operations only replaces all bytes of a page.
    batch.write(pages[2], 0, &content(103)[..PAGE_LEN - 1]);
    batch.write(pages[3], 0, &content(104)).write(pages[3], 5, b"more");
    let copy = batch.clone_page(pages[0]);
    let copy = store.commit(batch).unwrap().pages[copy.index()];
    let kinds = logged_kinds(&disk);
    assert_eq!((kinds["create"], kinds["image"], kinds["write"], kinds["resize"]), (11, 12, 4, 1));

    let state = State::of(&store);
    assert_eq!(state.contents[&pages[9]], content(9));
    assert_eq!(state.contents[&pages[0]], content(100));
    assert_eq!(state.contents[&copy], content(100), "a clone sees what its batch wrote before");
    assert_eq!(state.contents[&pages[3]][..10], [&content(104)[..5], b"more", &content(104)[9..10]].concat());
    let info = store.page(pages[0]).unwrap();
    assert_eq!((info.epoch, info.lsn.0), (Epoch(2), 2));
    store.close().unwrap();

    assert_eq!(State::rebuilt(&rebuild(&Files::of(&disk), &RebuildOptions::default()).unwrap()), state);
    let store = open(&disk).unwrap();
    assert_eq!(State::of(&store), state, "replayed from the images and the log");
    store.snapshot().unwrap();
    drop(store);
    let store = open(&disk).unwrap();
    assert_eq!(State::of(&store), state, "from the snapshot");
}

#[test]
fn next_snapshot_reuses_batch_images() {
    let disk = SimDisk::new();
    let store = open(&disk).unwrap();
    let pages = import(&store, 0..10);
    let info = store.snapshot().unwrap();
    assert_eq!((info.bytes, info.bytes_written), ((10 * PAGE_LEN) as u64, 0));
    assert_eq!(image_files(&disk).len(), 1);

    // A snapshot also uses images that an open finds in the log. A page that has changed since is captured
    // again.
    import(&store, 10..12);
    let mut batch = store.batch();
    batch.write(pages[0], 0, &[1]);
    store.commit(batch).unwrap();
    let state = State::of(&store);
    drop(store);
    let store = open(&disk).unwrap();
    assert_eq!(store.snapshot().unwrap().bytes_written, PAGE_LEN as u64);
    drop(store);
    let store = open(&disk).unwrap();
    assert_eq!((State::of(&store), store.recovered().replayed_batches), (state, 0));
}

#[test]
fn image_damaged_before_verification_is_rewritten() {
    let disk = SimDisk::new();
    let store = open(&disk).unwrap();
    import(&store, 0..10);
    let file = image_files(&disk)[0];
    let at = disk.bytes(file).unwrap().len() as u64 - 4096;
    disk.damage(file, at, &[0x55; 3]);
    assert_eq!(store.snapshot().unwrap().bytes_written, PAGE_LEN as u64);
    let state = State::of(&store);
    drop(store);
    assert_eq!(State::of(&open(&disk).unwrap()), state);
}

#[test]
fn refused_batch_removes_its_images() {
    type Spoil = fn(&mut WriteBatch, PageId);
    let rows: &[(&str, Spoil)] = &[
        ("a conflict", |batch, page| _ = batch.expect_epoch(page, Epoch(9))),
        ("a page that is not there", |batch, _| _ = batch.delete(PageId(77))),
        ("a key that is taken", |batch, _| create_pages(batch, 0..1)),
        ("a range outside its page", |batch, page| _ = batch.write(page, 1, &content(1))),
        ("an operation that is none", |batch, page| _ = batch.fill(page, 0, 3, &[1, 2])),
    ];
    for (why, spoil) in rows {
        let disk = SimDisk::new();
        let store = open(&disk).unwrap();
        let page = import(&store, 0..1)[0];
        let (state, files) = (State::of(&store), image_files(&disk));
        let mut batch = store.batch();
        create_pages(&mut batch, 1..4);
        spoil(&mut batch, page);
        let error = store.commit(batch).unwrap_err();
        assert!(!matches!(error, Error::Poisoned(_)), "{why}: {error}");
        assert_eq!((State::of(&store), image_files(&disk)), (state, files), "{why}: {error}");
        import(&store, 1..2);
    }
}

#[test]
fn concurrently_resized_page_is_written_as_intended() {
    let disk = SimDisk::new();
    let store = Arc::new(open(&disk).unwrap());
    let page = import(&store, 0..1)[0];
    // One thread writes the page with its last known length while the other changes the length.
    let resizer = std::thread::spawn({
        let store = store.clone();
        move || {
            for turn in 0..50 {
                let mut batch = store.batch();
                batch.resize(page, (PAGE_LEN + turn % 2 * 4096) as u64);
                store.commit(batch).unwrap();
            }
        }
    });
    // Make at least one attempt, however fast the other thread is.
    loop {
        let mut batch = store.batch();
        batch.write(page, 0, &content(5));
        store.commit(batch).unwrap();
        if resizer.is_finished() {
            break;
        }
    }
    resizer.join().unwrap();
    let state = State::of(&store);
    assert!(state.contents[&page][..PAGE_LEN] == content(5));
    drop(store);
    assert_eq!(State::of(&open(&disk).unwrap()), state);
}

#[test]
fn image_enospc_refuses_batch_without_leftovers() {
    for free in (0..8 * PAGE_LEN as u64).step_by(4096) {
        let disk = SimDisk::new();
        let store = open_with(&disk, small().with(|options| options.log.reserve_bytes = Some(0))).unwrap();
        import(&store, 0..1);
        until_segments_are_made(&disk);
        let (state, files) = (State::of(&store), image_files(&disk));
        disk.set_capacity(Some(disk.used_bytes() + free));
        let mut batch = store.batch();
        create_pages(&mut batch, 1..11);
        let error = store.commit(batch).unwrap_err();
        assert!(matches!(error, Error::DiskFull { file: FileName::Pages(_), .. }), "{free} free: {error}");
        assert_eq!((State::of(&store), image_files(&disk)), (state, files), "{free} free");
        disk.set_capacity(None);
        import(&store, 1..11);
        let state = State::of(&store);
        store.close().unwrap();
        assert_eq!(State::of(&open(&disk).unwrap()), state, "{free} free");
    }
}

#[test]
fn unwritable_images_poison_without_logging() {
    for operation in [Operation::Create, Operation::Write, Operation::Sync, Operation::SyncFolder] {
        let disk = SimDisk::new();
        let store = open(&disk).unwrap();
        import(&store, 0..1);
        let state = State::of(&store);
        // From now on, only image files are created, written and synced.
        until_segments_are_made(&disk);
        disk.fail(DiskFault { operation, skip: 0, times: 1, errno: EIO });
        let mut batch = store.batch();
        create_pages(&mut batch, 1..4);
        let error = store.commit(batch).unwrap_err();
        assert_eq!(error.remedy(), Remedy::Reopen, "{operation:?}: {error}");
        assert!(matches!(store.commit(store.batch()), Err(Error::Poisoned(_))), "{operation:?}");
        drop(store);
        disk.clear_faults();
        assert_eq!(State::of(&open(&disk).unwrap()), state, "{operation:?}");
    }
}

/// Recovery may replay the log after any kept snapshot. An image file that a batch of that log names
/// therefore stays, whatever newer snapshots name.
#[test]
fn files_stay_as_long_as_a_kept_frame_or_snapshot_names_them() {
    let disk = SimDisk::new();
    let store = open(&disk).unwrap();
    store.snapshot().unwrap();
    let pages = import(&store, 0..3);
    let (named, segment) = (image_files(&disk)[0], FileName::Segment(store.stats().segment));
    let mut is_gone = Vec::new();
    for turn in 0..4 {
        // Every page changes, so that no later snapshot can name these images.
        for number in 0..40 {
            let mut batch = store.batch();
            pages.iter().for_each(|page| _ = batch.write(*page, number, &[turn; 300]));
            store.commit(batch).unwrap();
        }
        store.snapshot().unwrap();
        let files = Files::of(&disk);
        is_gone.push(!files.0.contains_key(&segment));
        assert_eq!(!files.0.contains_key(&named), is_gone[usize::from(turn)], "after snapshot {turn}");
        assert_eq!(State::rebuilt(&rebuild(&files, &RebuildOptions::default()).unwrap()), State::of(&store));
    }
    assert_eq!(is_gone, [false, true, true, true], "two snapshots are kept, and the log since the older one");
}

#[test]
fn files_found_at_open_stay_until_their_log_is_recycled() {
    let disk = SimDisk::new();
    let store = open(&disk).unwrap();
    let page = import(&store, 0..1)[0];
    store.close().unwrap();
    let named = image_files(&disk)[0];
    // Create the state after a crash between the writes of the images and of their batch.
    let unnamed = FileName::Pages(70);
    disk.create(unnamed).unwrap().write_at(0, &disk.bytes(named).unwrap()).unwrap();
    let header = ImageFileHeader { store: StoreId([1; 16]), file: 70, purpose: ImagePurpose::Batch };
    disk.damage(unnamed, 0, &header.encode());

    let store = open(&disk).unwrap();
    assert!(image_files(&disk).contains(&unnamed), "the log may name it");
    let state = State::of(&store);
    store.snapshot().unwrap();
    for turn in 0..2 {
        fill_segments(&store, page, turn);
        store.snapshot().unwrap();
    }
    assert!(!image_files(&disk).contains(&unnamed));
    assert_ne!(State::of(&store), state);
}

/// Commits until several segments are full.
fn fill_segments(store: &Store, page: PageId, turn: u8) {
    for number in 0..100 {
        let mut batch = store.batch();
        batch.write(page, number, &[turn; 900]);
        store.commit(batch).unwrap();
    }
}

#[test]
fn long_pages_keep_their_order_among_other_commits() {
    let disk = SimDisk::new();
    let device = Arc::new(HostDevice::new());
    let options = Options::new().log(LogOptions::new().segment_len(16 << 10)).ack(Ack::Durable);
    let store = Store::open_on(Arc::new(disk.clone()), device, options).unwrap();
    let page = import(&store, 0..1)[0];
    for turn in 1..20u8 {
        let mut small = store.batch();
        small.write(page, 0, &[turn; 9]);
        store.submit(small).unwrap();
        let mut whole = store.batch();
        whole.write(page, 0, &content(turn));
        store.submit(whole).unwrap();
        let mut after = store.batch();
        after.write(page, 100, &[turn; 9]);
        store.commit(after).unwrap();
        let mut expected = content(turn);
        expected[100..109].fill(turn);
        assert_eq!(State::of(&store).contents[&page], expected);
    }
    let state = State::of(&store);
    drop(store);
    assert_eq!(State::of(&open(&disk).unwrap()), state);
}

/// A batch that moves a page, changes other pages and then overwrites the whole page leaves the new bytes in
/// the page, for every pair of places, before and after a restart.
#[test]
fn moved_and_overwritten_page_has_new_bytes() {
    const PLACES: [Place; 3] = [Place::Disk, Place::Host, Place::Pinned];
    let host = || Arc::new(HostDevice::new()) as Arc<dyn Device>;
    for device in [host(), Arc::new(LateDevice::seeded(host(), 3))] {
        let disk = SimDisk::new();
        let reopen = || Store::open_on(Arc::new(disk.clone()), device.clone(), small()).unwrap();
        let mut store = reopen();
        let mut seed = 0;
        for (from, to) in PLACES.iter().flat_map(|from| PLACES.iter().map(move |to| (*from, *to))) {
            for is_adjacent in [true, false] {
                seed += 2;
                let mut batch = store.batch();
                batch.create_from(content(seed), from);
                batch.create(5, Place::Host);
                let [page, other] = store.commit(batch).unwrap().pages[..] else { panic!("two pages") };
                let mut batch = store.batch();
                batch.move_to(page, to);
                if !is_adjacent {
                    batch.set_metadata(page, "between", 1_i64);
                    batch.write(other, 0, b"hello");
                }
                batch.write(page, 0, &content(seed + 1));
                // Elements with gaps between them are staged in the same way as whole pages.
                batch.scatter(other, Width::W1, &[1, 3], b"ab");
                store.commit(batch).unwrap();
                let check = |store: &Store| {
                    let what = format!("{from:?} to {to:?}, adjacent: {is_adjacent}");
                    assert!(store.read_to_vec(page).unwrap() == content(seed + 1), "{what}");
                    let expected = if is_adjacent { b"\0a\0b\0" } else { b"halbo" };
                    assert_eq!(store.read_to_vec(other).unwrap(), expected, "{what}");
                };
                check(&store);
                drop(store);
                store = reopen();
                check(&store);
            }
        }
    }
}
