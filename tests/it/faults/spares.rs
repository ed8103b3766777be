//! Segments that are no longer needed are kept for reuse. A call that finds the disk full removes them.

use remanent::disk::Disk;
use remanent::error::{FileName, Folder};
use remanent::options::{Compression, ImageOptions, Retention};
use remanent::testing::sim_disk::{CrashPlan, DiskFault, EIO, Operation, Tears};

use super::disk_full::{is_held, until};
use super::*;
use crate::files::{SPARES_FOR_OPENS, State};
use crate::with_options::With;

const SEGMENT: u64 = 16 << 10;
const RESERVE: usize = 2;
/// The spares of the reserve, and those for opens.
const HELD: usize = RESERVE + SPARES_FOR_OPENS;
/// Commits between two snapshots, which fill more than two segments.
const COMMITS: usize = 16;

/// Returns a store with recycled segments.
fn recycled() -> (SimDisk, Store, Line) {
    let disk = SimDisk::new();
    let options = small().with(|options| options.log.reserve_bytes = Some(RESERVE as u64 * SEGMENT));
    let store = open_with(&disk, Arc::new(HostDevice::new()), options).unwrap();
    let mut line = Line::begin(&store);
    for _ in 0..4 {
        line.commits(&store, COMMITS).unwrap();
        store.snapshot().unwrap();
    }
    (disk, store, line)
}

fn spares(disk: &SimDisk) -> usize {
    let names = Disk::list(disk, Folder::Log).unwrap();
    let is_spare = |name: &String| matches!(FileName::parse(Folder::Log, name), Some(FileName::Spare(_)));
    names.into_iter().filter(is_spare).count()
}

/// Returns the number of disk events of this kind for a file, from event `from` on.
fn told(disk: &SimDisk, from: usize, verb: &str, file: &str) -> usize {
    let is_told = |event: &&String| event.starts_with(verb) && event.ends_with(file);
    disk.history()[from..].iter().filter(is_told).count()
}

/// The number of segments that a round uses depends on how often the log thread syncs and seals. Whether a
/// segment is created or reused does not depend on it.
#[test]
fn segment_is_created_only_without_spare_beyond_reserve() {
    watched("rounds", || {
        let (disk, store, mut line) = recycled();
        let mut rolls = store.stats().log.rolls;
        for _ in 0..3 {
            line.commits(&store, COMMITS).unwrap();
            store.snapshot().unwrap();
        }
        rolls = store.stats().log.rolls - rolls;
        assert!(rolls >= 3, "{rolls} segments were entered");
        let (mut spares, mut used_again) = (0, 0);
        for event in disk.history().iter().filter(|event| event.contains(" log/")) {
            assert!(!event.starts_with("remove"), "nothing that was freed is lost: {event}");
            assert!(!event.starts_with("create") || spares <= HELD, "{spares} spares, and yet: {event}");
            let renamed = event.strip_prefix("rename ").and_then(|names| names.split_once(" to "));
            let (source, target) = renamed.unwrap_or_default();
            let is_taken = source.ends_with(".spare");
            spares = spares + usize::from(target.ends_with(".spare")) - usize::from(is_taken);
            used_again += usize::from(is_taken);
        }
        assert!(used_again >= 3, "{used_again} spares were used again");
        line.check(&store, line.logged);
    });
}

/// The old bytes of a spare have no effect. The log continues as if the segment contained zeros.
#[test]
fn open_reuses_spares_for_segments() {
    watched("opens", || {
        let (disk, mut store, mut line) = recycled();
        for _ in 0..4 {
            // The thread that creates segments fills the reserve.
            while spares(&disk) < HELD {
                std::thread::yield_now();
            }
            store.close().unwrap();
            let from = disk.events();
            let options = small().with(|options| options.log.reserve_bytes = Some(RESERVE as u64 * SEGMENT));
            store = open_with(&disk, Arc::new(HostDevice::new()), options).unwrap();
            let history = disk.history().split_off(from);
            let is_commit_point =
                |event: &String| event.contains(".tmp to log/") && !event.ends_with(".spare");
            let commit_point = history.iter().position(is_commit_point).expect("the opening's name");
            let made = history[..commit_point].iter().find(|event| event.starts_with("create log/"));
            assert_eq!(made, None, "before {}", history[commit_point]);
            assert_eq!(store.recovered().torn, None);
            line.check(&store, line.logged);
            line.commits(&store, COMMITS).unwrap();
        }
    });
}

/// If a file cannot be created, no file remains under its name, and no other file is removed.
#[test]
fn failed_creation_of_opening_segment_leaves_no_file() {
    for (operation, with_spares) in [(Operation::Rename, true), (Operation::Create, false)] {
        watched("an open", move || {
            let (disk, store, line) = recycled();
            store.close().unwrap();
            let spares = Disk::list(&disk, Folder::Log).unwrap();
            let spares = spares.iter().filter_map(|name| FileName::parse(Folder::Log, name));
            for spare in spares.filter(|file| matches!(file, FileName::Spare(_)) && !with_spares) {
                disk.remove(spare).unwrap();
            }
            disk.fail(DiskFault { operation, skip: 0, times: 1, errno: EIO });
            let removed = disk.calls(Operation::Remove);
            let refused = open_on_host(&disk).map(drop).unwrap_err();
            let is_expected = match refused.file() {
                Some(FileName::Spare(_)) => with_spares,
                Some(FileName::Temporary(Folder::Log, _)) => !with_spares,
                _ => false,
            };
            assert!(is_expected, "{refused}");
            assert_eq!(disk.calls(Operation::Remove), removed, "{operation:?}");
            line.check(&open_on_host(&disk).unwrap(), line.logged);
        });
    }
}

#[test]
fn full_disk_frees_spare_segments_beyond_reserve() {
    type Act = fn(&Store, &mut Line) -> Result<()>;
    let acts: [(&str, Act); 3] = [
        ("a snapshot", |store, _| store.snapshot().map(drop)),
        ("a whole page, written ahead of its batch", |store, line| {
            let mut batch = store.batch();
            let page = batch.create(8000, Place::Host).page();
            batch.write(page, 0, &[7; 8000]);
            let page = store.commit(batch)?.pages[0];
            let mut batch = store.batch();
            batch.delete(page);
            store.commit(batch)?;
            // The expected history omits both batches.
            let step = line.steps[line.logged as usize];
            line.steps.extend([step; 2]);
            line.logged += 2;
            Ok(())
        }),
        ("a restore", |store, line| {
            let oldest = store.snapshots()[0].id;
            line.restore(store, oldest)
        }),
    ];
    for (what, act) in acts {
        watched(what, move || {
            let (disk, store, mut line) = recycled();
            line.commits(&store, 1).unwrap();
            assert!(spares(&disk) > HELD, "{what}");
            let from = disk.events();
            disk.set_capacity(Some(disk.used_bytes()));
            act(&store, &mut line).unwrap_or_else(|error| panic!("{what}: {error}"));
            assert!(told(&disk, from, "remove", ".spare") > 0, "{what} needed no space");
            assert!(spares(&disk) >= HELD, "{what} took the reserve");
            line.check(&store, line.logged);
        });
    }
}

#[test]
fn a_prune_frees_the_space_of_segments_beyond_the_reserve() {
    watched("pruning", || {
        let (disk, store, line) = recycled();
        assert!(spares(&disk) > HELD);
        store.prune(&store.retention()).unwrap();
        assert_eq!(spares(&disk), HELD);
        line.check(&store, line.logged);
    });
}

/// A power cut may preserve both the spare's name and the manifest's name for one file. If the file were then
/// used as a segment, the log would overwrite the manifest.
#[test]
fn spare_reused_as_manifest_is_no_segment_after_power_cut() {
    watched("power cuts", || {
        // The manifest of these pages is longer than the shortest segment.
        const DELETES: usize = 1200;
        const LEN: u64 = 1 << 20;
        let options = || {
            small()
                .retention(Retention::new().snapshots_kept(1))
                .images(ImageOptions::new().compression(Compression::Off))
                .with(|options| options.log.segment_len = 64 << 10)
        };
        let open = |disk: &SimDisk| open_with(disk, Arc::new(HostDevice::new()), options()).unwrap();
        let disk = SimDisk::new();
        let store = open(&disk);
        let mut batch = store.batch();
        batch.create(LEN, Place::Host);
        let page = store.commit(batch).unwrap().pages[0];
        store.snapshot().unwrap();
        // The images of these pages are in a separate file.
        let mut batch = store.batch();
        (0..DELETES).for_each(|_| _ = batch.create(8, Place::Host).page());
        let going = store.commit(batch).unwrap().pages;
        store.snapshot().unwrap();
        // The next snapshot has to write an image, and there is no space for it.
        let mut batch = store.batch();
        batch.write(page, 8, b"changed");
        store.commit(batch).unwrap();
        until(|| is_held(&disk, RESERVE));
        disk.set_capacity(Some(disk.used_bytes() + 4096));
        disk.set_file_bytes(LEN);
        let mut batch = store.batch();
        going.iter().for_each(|page| _ = batch.delete(*page));
        let deleted = store.commit(batch).unwrap().position.lsn;
        store.wait_durable(deleted).unwrap();
        let from = disk.events();
        let refused = store.snapshot();
        assert!(matches!(refused, Err(Error::DiskFull { .. })), "{refused:?}");
        let is_made =
            |event: &String| event.starts_with("rename log/") && event.contains(".spare to snapshots/");
        assert!(disk.history()[from..].iter().any(is_made), "{:#?}", disk.history());
        let state = State::of(&store);
        let plan = CrashPlan { events: from..usize::MAX, tears: Tears::None, images_max: 16, seed: 0 };
        disk.power_images(&plan, |image| {
            // The disk is full, so the open reuses spares.
            image.disk.set_capacity(Some(image.disk.used_bytes()));
            let store = open(&image.disk);
            assert_eq!(State::of(&store), state, "{image}");
            image.disk.set_capacity(None);
            for value in 0..8 {
                let mut batch = store.batch();
                batch.write(page, 0, &[value; 15_000]);
                store.wait_durable(store.commit(batch).unwrap().position.lsn).unwrap();
            }
            let state = State::of(&store);
            store.close().unwrap();
            let store = open_with(&image.disk, Arc::new(HostDevice::new()), options());
            let store = store.unwrap_or_else(|error| panic!("{image}, opened again: {error}"));
            assert_eq!(State::of(&store), state, "{image}, opened again");
            assert_eq!(store.recovered().harmless, [], "{image}, opened again");
        });
    });
}
