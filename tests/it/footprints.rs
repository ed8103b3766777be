//! The disk usage of a closed store is only slightly larger than the pages of its kept states. Usage is
//! counted in blocks, including those of directories, as `du` does.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use remanent::device::host::HostDevice;
use remanent::disk::Disk;
use remanent::error::{FileName, Folder};
use remanent::options::{LogIo, LogOptions, Retention, SnapshotSchedule};
use remanent::testing::sim_disk::{DiskFault, ENOSPC, Operation, SimDisk, SyncPoint};
use remanent::{DeviceChoice, Error, Options, PageId, Place, StatePoint, Store, View};

use crate::direct_io;
use crate::files::{Files, State, open_with, small};
use crate::kill::workload::Random;
use crate::machine::mounts::Mount;
use crate::machine::skipped;
use crate::with_options::With;

/// Number of bytes allowed in addition to 1.1 times the length of the pages.
const ALLOWANCE: u64 = 256 << 10;
const MIB: usize = 1 << 20;

fn blocks_of(path: &Path) -> u64 {
    let metadata = std::fs::symlink_metadata(path).unwrap();
    let entries = metadata.is_dir().then(|| std::fs::read_dir(path).unwrap());
    let below = entries.into_iter().flatten().map(|entry| blocks_of(&entry.unwrap().path()));
    512 * metadata.blocks() + below.sum::<u64>()
}

fn create(store: &Store, count: usize, len: usize) -> Vec<PageId> {
    let mut batch = store.batch();
    for page in 0..count {
        batch.create_from(Random(page as u64).bytes(len as u64), Place::Host);
    }
    store.commit(batch).unwrap().pages
}

fn rewrite(store: &Store, pages: &[PageId], len: usize, round: usize) {
    for page in pages {
        let mut batch = store.batch();
        batch.write(*page, 0, &Random(1000 + round as u64).bytes(len as u64));
        store.commit(batch).unwrap();
    }
}

fn delete(store: &Store, pages: &[PageId]) {
    let mut batch = store.batch();
    pages.iter().for_each(|page| _ = batch.delete(*page));
    store.commit(batch).unwrap();
}

/// Returns the number of log bytes that are kept for an older snapshot: all segments except the last one with
/// frames and the empty one.
fn kept_log(directory: &Path) -> u64 {
    let entries = std::fs::read_dir(directory.join("log")).unwrap().map(|entry| entry.unwrap());
    let segments = entries.filter_map(|entry| {
        let name = FileName::parse(Folder::Log, entry.file_name().to_str().unwrap());
        matches!(name, Some(FileName::Segment(_))).then(|| (name, blocks_of(&entry.path())))
    });
    let mut segments: Vec<_> = segments.collect();
    segments.sort_unstable();
    segments.iter().rev().skip(2).map(|(_, bytes)| bytes).sum()
}

/// The operations of a process on a store, and the length of the states that the store keeps.
struct Shape {
    name: &'static str,
    snapshots_kept: usize,
    life: fn(&Store),
    kept_bytes: usize,
}

fn shapes() -> Vec<Shape> {
    let shape = |name, snapshots_kept, kept_bytes, life| Shape { name, snapshots_kept, life, kept_bytes };
    vec![
        shape("no pages", 2, 0, |_| {}),
        shape("24 bytes", 2, 24, |store| _ = create(store, 1, 24)),
        shape("one page of 1 MiB", 2, MIB, |store| _ = create(store, 1, MIB)),
        // The log still contains the deleted pages. The first segment has 64 KiB.
        shape("100 small pages, half of them deleted", 2, 100_000 + (64 << 10), |store| {
            let pages = create(store, 100, 1000);
            delete(store, &pages[50..]);
        }),
        shape("deleted pages, a snapshot and a prune", 1, 0, |store| {
            let pages = create(store, 8, MIB);
            store.snapshot().unwrap();
            delete(store, &pages);
            store.snapshot().unwrap();
            store.prune(&store.retention()).unwrap();
        }),
        shape("three snapshots, all but one pruned", 1, MIB, |store| {
            let pages = create(store, 1, MIB);
            for round in 0..3 {
                rewrite(store, &pages, MIB, round);
                store.snapshot().unwrap();
            }
            store.prune(&store.retention()).unwrap();
        }),
        // The older snapshot and the log after it are also kept, including the page in the last segment.
        shape("two kept snapshots", 2, 3 * MIB, |store| {
            let pages = create(store, 1, MIB);
            for round in 0..3 {
                rewrite(store, &pages, MIB, round);
                store.snapshot().unwrap();
            }
        }),
    ]
}

fn footprints(log_io: LogIo) {
    for Shape { name, snapshots_kept, life, kept_bytes } in shapes() {
        let directory = tempfile::tempdir().unwrap();
        let open = || {
            let options = Options::new().device(DeviceChoice::Host).log(LogOptions::new().io(log_io));
            options
                .with(|options| options.retention.snapshots_kept = snapshots_kept)
                .open(directory.path())
                .unwrap()
        };
        let store = open();
        life(&store);
        let state = State::of(&store);
        store.close().unwrap();
        let allowed = kept_bytes as u64 + kept_bytes as u64 / 10 + ALLOWANCE;
        for opened in 0..3 {
            let found = blocks_of(directory.path());
            // Only a state with an older snapshot keeps log segments.
            let log = if name.starts_with("two kept") { kept_log(directory.path()) } else { 0 };
            let allowed = allowed + log;
            assert!(found <= allowed, "{log_io}, {name}, opened {opened} times: {found} bytes of {allowed}");
            let store = open();
            assert_eq!(State::of(&store).contents, state.contents, "{log_io}, {name}, opened {opened} times");
            store.close().unwrap();
        }
    }
}

#[test]
fn closed_store_takes_little_more_than_its_pages() {
    [LogIo::Mapped, LogIo::Buffered, direct_io::log_io()].into_iter().for_each(footprints);
}

/// A segment from which a close omitted frames has a hole. If a mapped log reused the segment, a full disk
/// would kill the process with SIGBUS.
#[test]
fn segment_with_hole_is_not_reused() {
    let directory = tempfile::tempdir().unwrap();
    let open = || {
        let options = Options::new().device(DeviceChoice::Host).log(LogOptions::new().io(LogIo::Mapped));
        options
            .with(|options| {
                options.retention.snapshots_kept = 1;
                options.snapshots.interval = None;
            })
            .open(directory.path())
            .unwrap()
    };
    let holes = || -> Vec<FileName> {
        let entries = std::fs::read_dir(directory.path().join("log")).unwrap().map(|entry| entry.unwrap());
        let with_hole = entries.filter(|entry| {
            let metadata = entry.metadata().unwrap();
            512 * metadata.blocks() < metadata.len()
        });
        with_hole
            .map(|entry| FileName::parse(Folder::Log, entry.file_name().to_str().unwrap()).unwrap())
            .collect()
    };
    let store = open();
    // The frames are in one segment and are omitted. The segment stays, because the next replay begins in it.
    let pages = create(&store, 1, 300_000);
    (0..5).for_each(|round| rewrite(&store, &pages, 300_000, round));
    store.snapshot().unwrap();
    let state = State::of(&store);
    store.close().unwrap();
    if holes().is_empty() {
        eprintln!("SKIPPED: this file system makes no holes");
        return;
    }
    let store = open();
    assert_eq!(State::of(&store).contents, state.contents);
    rewrite(&store, &pages, 300_000, 9);
    store.snapshot().unwrap();
    assert_eq!(holes(), []);
    store.close().unwrap();
}

/// Creates pages of 1 MiB until the disk is full.
fn fill(store: &Store) -> Vec<PageId> {
    let mut pages = Vec::new();
    loop {
        let mut batch = store.batch();
        batch.create_from(Random(pages.len() as u64).bytes(MIB as u64), Place::Host);
        match store.commit(batch) {
            Ok(committed) => pages.extend(committed.pages),
            Err(full) => {
                assert!(matches!(full, Error::DiskFull { .. }), "{full}");
                return pages;
            }
        }
    }
}

/// The next segment is shorter if the disk has no space for its usual length.
#[test]
fn segments_shrink_on_a_nearly_full_disk() {
    let disk = SimDisk::new();
    disk.set_capacity(Some(24 << 20));
    let options = Options::new()
        .retention(Retention::new().snapshots_kept(1))
        .snapshots(SnapshotSchedule::new().interval(None));
    let store = Store::open_on(Arc::new(disk.clone()), Arc::new(HostDevice::new()), options).unwrap();
    let pages = fill(&store);
    // On a busy machine, fewer spares are created in time, so fewer pages fit.
    assert!(pages.len() >= 7, "only {} pages of 1 MiB on 24 MiB", pages.len());
    delete(&store, &pages);
    store.snapshot().unwrap();
    store.close().unwrap();
}

/// Pages can use most of a small file system, and the space of deleted pages is freed completely.
#[test]
fn small_file_system_can_be_filled_repeatedly() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mounted");
    let mount = match Mount::new(Path::new("tmpfs"), path, &["-t", "tmpfs", "-o", "size=24m"]) {
        Ok(mount) => mount,
        Err(reason) => return skipped("a small tmpfs", &reason),
    };
    let directory = mount.path.join("store");
    let open = || {
        let options =
            Options::new().device(DeviceChoice::Host).snapshots(SnapshotSchedule::new().interval(None));
        options.with(|options| options.retention.snapshots_kept = 1).open(&directory).unwrap()
    };
    let mut store = open();
    for round in 0..4 {
        let pages = fill(&store);
        assert!(pages.len() >= 15, "round {round}: only {} pages of 1 MiB on 24 MiB", pages.len());
        delete(&store, &pages);
        store.snapshot().unwrap();
        store.prune(&store.retention()).unwrap();
        let bytes = blocks_of(&directory);
        assert!(bytes <= 5 << 20, "round {round}: {bytes} bytes without a page");
        if round % 2 == 1 {
            store.close().unwrap();
            let bytes = blocks_of(&directory);
            assert!(bytes <= ALLOWANCE, "round {round}: {bytes} bytes");
            store = open();
        }
    }
}

/// An ineffective sync of a shortened segment is detected before the segment is replaced.
#[test]
fn ineffective_sync_at_close_loses_nothing() {
    let disk = SimDisk::new();
    let options = || small().with(|options| options.log.segment_len = 1 << 20);
    let store = open_with(&disk, options()).unwrap();
    create(&store, 1, 90_000);
    let state = State::of(&store);
    let segment = store.stats().segment;
    let copy = SyncPoint::File(FileName::Temporary(Folder::Log, segment));
    disk.skip_syncs(move |point| point == copy);
    store.close().unwrap();
    assert!(disk.history().iter().any(|event| event.starts_with("skipped sync")), "nothing was shortened");
    let store = open_with(&disk.after_power_cut(), options()).unwrap();
    assert_eq!(State::of(&store), state);
}

/// A close that cannot create files leaves a store that opens, and no temporary files.
#[test]
fn close_on_a_full_disk_loses_nothing() {
    let disk = SimDisk::new();
    let open = || {
        open_with(
            &disk,
            small().with(|options| {
                options.log.segment_len = 1 << 20;
                options.log.reserve_bytes = Some(1 << 20);
            }),
        )
        .unwrap()
    };
    let store = open();
    create(&store, 1, 90_000);
    let state = State::of(&store);
    disk.fail(DiskFault { operation: Operation::Create, skip: 0, times: usize::MAX, errno: ENOSPC });
    store.close().unwrap();
    let left = Files::of(&disk);
    assert!(left.names(|file| matches!(file, FileName::Temporary(..))).is_empty(), "{left:?}");
    let store = Store::open_on(Arc::new(left.disk()), Arc::new(HostDevice::new()), small()).unwrap();
    assert_eq!(State::of(&store), state);
}

/// If the replay of the older of two snapshots begins in an earlier segment, all frames of the last segment
/// stay.
#[test]
fn close_keeps_frames_of_kept_snapshots() {
    let disk = SimDisk::new();
    let open = || {
        open_with(
            &disk,
            small()
                .retention(Retention::new().snapshots_kept(2))
                .with(|options| options.log.segment_len = 1 << 20),
        )
        .unwrap()
    };
    let store = open();
    let pages = create(&store, 1, 100_000);
    // The older snapshot begins near the end of a segment, at a higher offset than later frames.
    (0..4).for_each(|round| rewrite(&store, &pages, 100_000, round));
    store.snapshot().unwrap();
    let (older, segment) = (State::of(&store), store.stats().segment);
    while store.stats().segment == segment {
        rewrite(&store, &pages, 100_000, 7);
    }
    let then = store.lsn();
    store.snapshot().unwrap();
    rewrite(&store, &pages, 100_000, 8);
    let newer = State::of(&store);
    store.close().unwrap();
    let source: Arc<dyn Disk> = Arc::new(disk.clone());
    let past = View::open_on(&source, Some(&StatePoint::Lsn(then))).unwrap();
    assert_eq!(past.lsn(), then);
    assert_eq!(State::of(&open()).contents, newer.contents);
    assert_ne!(older.contents, newer.contents);
}
