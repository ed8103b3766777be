//! The disk space of a store depends on what is kept, never on how long the store has run.
//!
//! Bytes in `pages/` ≤ 2 × (images named by kept snapshots and by the running one) + images that batches
//! above the floor wrote before their frames + one file. The next snapshot removes an image that is no longer
//! needed, whichever segment contains its frame, and also after a reopen.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use remanent::disk::Disk;
use remanent::error::{FileName, Folder, NoSuchState};
use remanent::options::LogOptions;
use remanent::testing::sim_disk::SimDisk;
use remanent::{Error, Lsn, Options, PageId, Place, Retention, SnapshotOptions, StatePoint, Store, View};
use remanent_format::image::{ImageFileHeader, ImagePurpose};
use remanent_format::limits::{GROUP_ALIGN, align_up};
use remanent_format::log::LogWalk;
use remanent_format::op::{Op, decode_payload};
use remanent_format::state::reach::{Reach, Role};
use remanent_format::state::survey::Survey;

use crate::files::{Files, SPARES_FOR_OPENS, State, open_with, small};
use crate::kill::workload::Random;
use crate::with_options::With;

/// A page length for which a batch writes the page to an image file, even with the longest segments in these
/// tests.
const PAGE_LEN: usize = 256 << 10;

fn content(seed: u64) -> Vec<u8> {
    Random(seed).bytes(PAGE_LEN as u64)
}

fn overwrite(store: &Store, page: PageId, seed: u64) -> Lsn {
    let mut batch = store.batch();
    batch.write(page, 0, &content(seed));
    store.commit(batch).unwrap().position.lsn
}

fn create(store: &Store, seed: u64) -> PageId {
    let mut batch = store.batch();
    batch.create_from(content(seed), Place::Host);
    store.commit(batch).unwrap().pages[0]
}

fn read(past: &View, page: PageId) -> Vec<u8> {
    let mut bytes = vec![0; PAGE_LEN];
    past.read(page, 0, &mut bytes).unwrap();
    bytes
}

/// Returns the number of bytes in `pages/`, and the number that the rule permits.
fn page_bytes(disk: &SimDisk) -> (u64, u64) {
    let [pages, allowed, _] = bytes_kept(&Files::of(disk));
    (pages, allowed)
}

/// Returns the number of bytes in `pages/` including spare files, the number that the rule permits there, and
/// the number of bytes of the kept log.
fn bytes_kept(files: &Files) -> [u64; 3] {
    let survey = Survey::read(files).unwrap();
    let lens: BTreeMap<u64, u64> = files
        .0
        .iter()
        .filter_map(|(file, bytes)| match file {
            FileName::Pages(number) => Some((*number, bytes.len() as u64)),
            _ => None,
        })
        .collect();
    let resolution = survey.candidates().find_map(|base| {
        let base = base.ok()?;
        survey.resolve(files, base.as_ref(), None).ok()
    });
    let verified = resolution.unwrap().end.unwrap().verified;
    let reach = Reach::of(&survey, &verified);
    let named: BTreeMap<(u64, u64), u64> = verified
        .iter()
        .flat_map(|kept| {
            let entries = survey.entries(kept.snapshot).unwrap();
            entries
                .filter_map(|entry| entry.image)
                .map(|image| ((image.file, image.offset), image.stored_len))
                .collect::<Vec<_>>()
        })
        .collect();
    // The images that frames above the floor name.
    let start = verified
        .iter()
        .filter(|kept| reach.role(kept.snapshot) == Role::Start && kept.log_kept)
        .map(|kept| survey.links[&kept.snapshot].as_ref().unwrap().0.redo)
        .min_by_key(|redo| redo.lsn)
        .or_else(|| reach.beginning())
        .unwrap();
    let mut walk = LogWalk::new(files, &survey.log, start, survey.mark()).unwrap();
    let mut ahead = BTreeSet::new();
    let mut log = 0;
    while let Some(frame) = walk.next().unwrap() {
        // Each frame may start a group.
        log += align_up(frame.header.frame_len(), GROUP_ALIGN);
        for op in decode_payload(frame.payload).unwrap_or_default() {
            if let Op::Image { image, .. } = op.op {
                ahead.insert(image.file);
            }
        }
    }
    let spares = files.0.iter().filter(|(file, _)| matches!(file, FileName::ImageSpare(_)));
    let spares: u64 = spares.map(|(_, bytes)| bytes.len() as u64).sum();
    let ahead: u64 = ahead.iter().filter_map(|file| lens.get(file)).sum();
    let highest = lens.values().next_back().copied().unwrap_or(0);
    [lens.values().sum::<u64>() + spares, 2 * named.values().sum::<u64>() + ahead + highest + (64 << 10), log]
}

fn assert_bounded(disk: &SimDisk, when: &str) {
    let (bytes, allowed) = page_bytes(disk);
    assert!(bytes <= allowed, "{when}: {bytes} bytes of images, {allowed} allowed");
}

/// Overwrites one page repeatedly, and checks the bound.
fn overwritten(options: &Options, reopened: bool) {
    let disk = SimDisk::new();
    let mut store = open_with(&disk, options.clone()).unwrap();
    let page = create(&store, 0);
    for round in 1..=60 {
        overwrite(&store, page, round);
        if round % 10 == 0 {
            store.snapshot().unwrap();
            assert_bounded(&disk, &format!("round {round}"));
        }
        if reopened && round % 7 == 0 {
            store.close().unwrap();
            store = open_with(&disk, options.clone()).unwrap();
        }
    }
    let state = State::of(&store);
    store.close().unwrap();
    let (bytes, _) = page_bytes(&disk);
    // Two snapshots with the log between them, and a file that both snapshots use.
    assert!(bytes < 13 * (PAGE_LEN as u64 + 8192), "{bytes}");
    let store = open_with(&disk, options.clone()).unwrap();
    assert_eq!(State::of(&store), state);
    assert_bounded(&disk, "opened again");
    // Only the last state is still needed.
    store.snapshot().unwrap();
    let pruned = store.prune(&store.retention().snapshots_kept(1)).unwrap();
    assert!(!pruned.files.is_empty());
    let (bytes, _) = page_bytes(&disk);
    assert!(bytes < 2 * (PAGE_LEN as u64 + 8192), "{bytes}");
    assert_eq!(State::of(&store), state);
}

#[test]
fn repeated_overwrites_use_bounded_space() {
    for segment_len in [16 << 10, 64 << 10, 1 << 20] {
        for reopened in [false, true] {
            overwritten(&small().with(|options| options.log.segment_len = segment_len), reopened);
        }
    }
}

/// Checks the whole directory of a store with default options and segments of 16 MiB. It may contain images
/// up to their bound, the kept log, and five more segments: the current one, two empty ones and two of the
/// reserve. A separate option bounds the segments that wait for reuse.
#[test]
fn disk_usage_is_bounded_with_default_options() {
    // Use a disk that does not report its size.
    const SPARE_BYTES: u64 = 512 << 20;
    bounded_directory(&Options::new(), SPARE_BYTES);
    bounded_directory(&Options::new().log(LogOptions::new().spare_bytes(SEGMENT_LEN)), SEGMENT_LEN);
}

const SEGMENT_LEN: u64 = 16 << 20;
/// Length of the first segments of a log. The spare segments for opens may include recycled segments of this
/// length.
const FIRST_LEN: u64 = 256 << 10;

fn bounded_directory(options: &Options, spare_bytes: u64) {
    const ROUND_BYTES: u64 = 40 << 20;
    let disk = SimDisk::new();
    let open = || open_with(&disk, options.clone()).unwrap();
    let mut store = open();
    let noise = Random(1).bytes(2 * PAGE_LEN as u64);
    let mut batch = store.batch();
    for _ in 0..24 {
        batch.create(PAGE_LEN as u64, Place::Host);
    }
    let pages = store.commit(batch).unwrap().pages;
    let mut most = 0;
    for round in 0..6 {
        let mut written = 0;
        for number in 0.. {
            let mut batch = store.batch();
            // Write either whole pages, which get images, or a short change of one page.
            let (count, len) = if number % 40 == 7 { (20, PAGE_LEN) } else { (1, PAGE_LEN / 5) };
            for page in &pages[..count] {
                batch.write(*page, 0, &noise[number % PAGE_LEN..][..len]);
            }
            store.commit(batch).unwrap();
            written += (count * len) as u64;
            if written >= ROUND_BYTES {
                break;
            }
        }
        if round != 2 {
            store.snapshot().unwrap();
        }
        if round % 2 == 1 {
            store.close().unwrap();
            store = open();
        }
        let files = Files::of(&disk);
        let [pages_bytes, allowed, log] = bytes_kept(&files);
        assert!(pages_bytes <= allowed, "round {round}: {pages_bytes} bytes of images, {allowed} allowed");
        let spares = files.0.iter().filter(|(file, _)| matches!(file, FileName::Spare(_)));
        let spares: u64 = spares.map(|(_, content)| content.len() as u64).sum();
        let found = files.bytes_len() as u64;
        let (used, bound) = (found - spares, allowed + log + 3 * SEGMENT_LEN);
        assert!(used <= bound, "round {round}: {used} bytes without spares, {bound} allowed");
        // The reserve, the short spare segments for opens, and segments that wait for reuse.
        let bound = 2 * SEGMENT_LEN + SPARES_FOR_OPENS as u64 * FIRST_LEN + spare_bytes;
        assert!(spares <= bound, "round {round}: {spares} bytes of spares, {bound} allowed");
        most = most.max(found);
    }
    assert!(most > 2 * ROUND_BYTES, "{most}");
    // The total number of written bytes exceeds this limit.
    assert!(most < 6 * ROUND_BYTES, "{most}");
}

/// A prune removes exactly the files that the store lists as removable, and none is listed afterwards.
#[test]
fn would_prune_matches_prune() {
    let disk = SimDisk::new();
    let store = open_with(
        &disk,
        small()
            .retention(Retention::new().snapshots_kept(4))
            .with(|options| options.log.segment_len = 1 << 20),
    )
    .unwrap();
    let page = create(&store, 0);
    for round in 1..=12 {
        overwrite(&store, page, round);
        if round % 3 == 0 {
            store.snapshot().unwrap();
        }
    }
    for kept in [3, 1] {
        let retention = store.retention().snapshots_kept(kept);
        let would = store.would_prune(&retention).unwrap();
        assert!(would.files.iter().any(|(file, _)| matches!(file, FileName::Pages(_))), "{would:?}");
        let before = Files::of(&disk);
        assert_eq!(store.prune(&retention).unwrap(), would);
        let after = Files::of(&disk);
        for (file, _) in &would.files {
            assert!(before.0.contains_key(file) && !after.0.contains_key(file), "{file}");
        }
        assert_eq!(store.would_prune(&retention).unwrap().files, []);
    }
}

/// The inspector lists the same removable snapshots as the store, while the store is open and after it is
/// closed, and changes no file.
#[test]
fn inspection_lists_prunable_snapshots() {
    for seed in 1..=6 {
        let mut random = Random(seed);
        let disk = SimDisk::new();
        let looked_at: Arc<dyn Disk> = Arc::new(disk.clone());
        let mut store = open_with(
            &disk,
            small()
                .retention(Retention::new().snapshots_kept(3))
                .with(|options| options.log.segment_len = 256 << 10),
        )
        .unwrap();
        let page = create(&store, 0);
        let (mut listed, mut named) = (0, 0);
        for round in 1..=30 {
            match random.below(6) {
                0..=2 => _ = overwrite(&store, page, round),
                3 => _ = store.snapshot().unwrap(),
                4 if named < 3 => {
                    named += 1;
                    _ = store.snapshot_with(SnapshotOptions::new().name(named.to_string())).unwrap();
                }
                _ => {
                    let newest = store.snapshots().last().map(|info| info.id);
                    newest.map(|newest| store.restore(StatePoint::Snapshot(newest)).unwrap());
                }
            }
            let rules = [
                store.retention(),
                store.retention().snapshots_kept(1),
                store.retention().snapshots_kept(1).give_up("1").give_up("3"),
                store.retention().give_up("2").names_only(true),
            ];
            for rule in &rules {
                let would = store.would_prune(rule).unwrap();
                assert_eq!(Store::would_prune_on(&looked_at, rule).unwrap(), would, "seed {seed}, {round}");
                listed += would.files.len();
            }

            let rule = &rules[random.below(4) as usize];
            let closed = random.below(2) == 0;
            if closed {
                store.close().unwrap();
                store = open_with(
                    &disk,
                    small()
                        .retention(Retention::new().snapshots_kept(3))
                        .with(|options| options.log.segment_len = 256 << 10),
                )
                .unwrap();
            }
            let would = Store::would_prune_on(&looked_at, rule).unwrap();
            if random.below(4) == 0 {
                assert_eq!(store.prune(rule).unwrap(), would, "seed {seed}, {round}");
                assert_eq!(
                    Store::would_prune_on(&looked_at, rule).unwrap().files,
                    [],
                    "seed {seed}, {round}"
                );
            }
        }
        assert!(listed > 100, "seed {seed}: only {listed} files ever might have gone");
        store.close().unwrap();
        let before = Files::of(&disk).0;
        Store::would_prune_on(&looked_at, &Retention::default()).unwrap();
        assert!(Files::of(&disk).0 == before, "seed {seed}: it was written to");
    }
}

/// A dry run lists files that a crash left behind, although an open removes them before any prune. It does
/// not list files that a writer is still writing.
#[test]
fn dry_run_lists_removals_without_work_in_progress() {
    let disk = SimDisk::new();
    let looked_at: Arc<dyn Disk> = Arc::new(disk.clone());
    let store = open_with(&disk, small().with(|options| options.log.segment_len = 1 << 20)).unwrap();
    // The page is so short that only a snapshot writes an image of it.
    let mut batch = store.batch();
    batch.create(4096, Place::Host);
    store.commit(batch).unwrap();
    store.snapshot().unwrap();
    let nothing = Retention::default().names_only(true);
    let named = Store::would_prune_on(&looked_at, &nothing).unwrap().files;
    let image = Files::of(&disk).0.into_iter().find(|(file, _)| matches!(file, FileName::Pages(_))).unwrap();
    let next = store.snapshots().last().map(|info| info.id).unwrap();
    let survey = Survey::read(&Files::of(&disk)).unwrap();
    let number = survey.snapshot(next).unwrap().next_file;
    // Two image files of an unfinished snapshot. The file with the higher number stays, because it records
    // that its number is taken.
    for number in [number, number + 1] {
        let file = disk.create(FileName::Pages(number)).unwrap();
        file.write_at(0, &image.1).unwrap();
    }
    assert_eq!(Store::would_prune_on(&looked_at, &nothing).unwrap().files, named, "a writer may be at it");
    store.close().unwrap();
    let left: Vec<FileName> = Store::would_prune_on(&looked_at, &nothing)
        .unwrap()
        .files
        .into_iter()
        .map(|(file, _)| file)
        .collect();
    assert!(left.contains(&FileName::Pages(number)), "{left:?}");
    drop(open_with(&disk, small().with(|options| options.log.segment_len = 1 << 20)).unwrap());
    let files = Files::of(&disk).0;
    assert!(left.iter().all(|file| !files.contains_key(file)), "{left:?}");
}

/// A named snapshot and a later snapshot of the same batch, taken after a restart. The log after that batch
/// is kept, so recovery can start from either of them.
#[test]
fn equal_snapshots_before_and_after_restart_are_both_valid() {
    let disk = SimDisk::new();
    let open = || open_with(&disk, small().retention(Retention::new().snapshots_kept(1))).unwrap();
    let store = open();
    let page = create(&store, 0);
    overwrite(&store, page, 1);
    let named = store.snapshot_with(SnapshotOptions::new().name("first")).unwrap();
    store.close().unwrap();
    let store = open();
    let later = store.snapshot().unwrap();
    assert_eq!((named.redo, named.end), (later.redo, later.end));
    overwrite(&store, page, 2);
    let state = State::of(&store);
    store.prune(&store.retention()).unwrap();
    assert_eq!(store.snapshots().len(), 2);
    assert_eq!(store.scrub().unwrap().damage, []);
    store.close().unwrap();
    let store = open();
    assert_eq!(store.scrub().unwrap().damage, []);
    assert_eq!(State::of(&store), state);
    store.close().unwrap();
    // Without the later snapshot, recovery starts from the named one.
    disk.remove(FileName::Manifest(later.id.0)).unwrap();
    assert_eq!(State::of(&open()), state);
}

/// States below the floor cannot be restored, even if the segment and its frames still exist.
#[test]
fn states_below_floor_are_unreachable_except_named() {
    let disk = SimDisk::new();
    let store = open_with(
        &disk,
        small()
            .retention(Retention::new().snapshots_kept(1))
            .with(|options| options.log.segment_len = 1 << 20),
    )
    .unwrap();
    let page = create(&store, 0);
    let named = store.snapshot_with(SnapshotOptions::new().name("first")).unwrap();
    let then = State::of(&store);
    let gone = overwrite(&store, page, 1);
    overwrite(&store, page, 2);
    store.snapshot().unwrap();
    let source: Arc<dyn Disk> = Arc::new(disk.clone());
    let check = |when: &str| {
        let error = View::open_on(&source, Some(&StatePoint::Lsn(gone))).map(|_| ()).unwrap_err();
        let said = error.to_string();
        let Error::NoSuchState(NoSuchState::OutsideWindow { requested, oldest, newest, below }) = error
        else {
            panic!("{when}: {said}")
        };
        assert_eq!((requested, oldest, newest), (gone, Lsn(3), Lsn(3)), "{when}");
        assert_eq!(below, [named.end], "{when}");
        assert!(said.contains("of the older states, that at batch 1 is kept; "), "{said}");
        let first = View::open_on(&source, Some(&StatePoint::Name("first".to_owned()))).unwrap();
        let bytes = read(&first, page);
        assert_eq!((first.lsn(), &bytes), (named.end, &then.contents[&page]), "{when}");
    };
    check("as it is");
    assert!(disk.bytes(FileName::Segment(1)).is_some(), "the log itself is all there");
    assert!(matches!(
        store.restore(StatePoint::Lsn(gone)),
        Err(Error::NoSuchState(NoSuchState::OutsideWindow { .. }))
    ));
    store.close().unwrap();
    check("closed");
    // A restart writes a new seal, which contains the floor.
    let store = open_with(&disk, small().with(|options| options.log.segment_len = 1 << 20)).unwrap();
    check("opened again");
    store.restore(StatePoint::Lsn(named.end)).unwrap();
    assert_eq!(State::of(&store).contents, then.contents);
}

/// A prune removes the table of a restore together with the last state that needs it. Later states are then
/// outside of the restore window.
#[test]
fn states_after_restore_without_table_are_unreachable() {
    let disk = SimDisk::new();
    let store = open_with(
        &disk,
        small()
            .retention(Retention::new().snapshots_kept(1))
            .with(|options| options.log.segment_len = 1 << 20),
    )
    .unwrap();
    let page = create(&store, 0);
    let first = overwrite(&store, page, 1);
    overwrite(&store, page, 2);
    store.restore(StatePoint::Lsn(first)).unwrap();
    let behind = overwrite(&store, page, 3);
    overwrite(&store, page, 4);
    store.snapshot().unwrap();
    let tables = Files::of(&disk).names(|file| matches!(file, FileName::Table(_)));
    assert_eq!(tables, []);
    let source: Arc<dyn Disk> = Arc::new(disk.clone());
    for requested in [first, behind] {
        let error = View::open_on(&source, Some(&StatePoint::Lsn(requested))).map(|_| ()).unwrap_err();
        assert!(
            matches!(error, Error::NoSuchState(NoSuchState::OutsideWindow { .. })),
            "{requested}: {error}"
        );
        assert!(
            matches!(
                store.restore(StatePoint::Lsn(requested)),
                Err(Error::NoSuchState(NoSuchState::OutsideWindow { .. }))
            ),
            "{requested}"
        );
    }
}

/// The log is kept from its beginning until it is longer than the options request.
#[test]
fn log_is_kept_up_to_requested_length() {
    let disk = SimDisk::new();
    let store =
        open_with(&disk, small().retention(Retention::new().log_kept(u64::MAX).snapshots_kept(1))).unwrap();
    let page = create(&store, 0);
    let mut states = vec![State::of(&store)];
    for round in 1..=12 {
        overwrite(&store, page, round);
        states.push(State::of(&store));
        if round % 3 == 0 {
            store.snapshot().unwrap();
        }
    }
    // The oldest snapshot, from which recovery starts, and the newest one are kept. The other snapshots are
    // removed, with the images that no batch names.
    assert_eq!(store.snapshots().len(), 2);
    let source: Arc<dyn Disk> = Arc::new(disk.clone());
    for (lsn, state) in (1..).zip(&states) {
        let past = View::open_on(&source, Some(&StatePoint::Lsn(Lsn(lsn)))).unwrap();
        assert_eq!(read(&past, page), state.contents[&page], "batch {lsn}");
    }
}

/// Large whole-page writes leave only small frames in the log, but their images count as log growth that
/// triggers a snapshot.
#[test]
fn batch_images_trigger_a_snapshot() {
    let disk = SimDisk::new();
    let options = small().with(|options| options.log.segment_len = 1 << 20);
    let store = open_with(
        &disk,
        options.clone().with(|options| options.snapshots.log_bytes = Some(4 * PAGE_LEN as u64)),
    )
    .unwrap();
    let page = create(&store, 0);
    (1..4).for_each(|round| _ = overwrite(&store, page, round));
    store.wait_for_snapshots(1);
    store.close().unwrap();
    // Images of batches that an open replays also count as log growth.
    let disk = SimDisk::new();
    let store = open_with(&disk, options.clone()).unwrap();
    let page = create(&store, 0);
    (1..5).for_each(|round| _ = overwrite(&store, page, round));
    store.close().unwrap();
    let store =
        open_with(&disk, options.with(|options| options.snapshots.log_bytes = Some(4 * PAGE_LEN as u64)))
            .unwrap();
    store.wait_for_snapshots(1);
}

/// A crash left a file whose batch was never logged. This file must stay, because it is the only record that
/// its number is taken.
#[test]
fn highest_numbered_file_stays_until_a_manifest_uses_it() {
    let disk = SimDisk::new();
    let options = small()
        .retention(Retention::new().snapshots_kept(1))
        .with(|options| options.log.segment_len = 1 << 20);
    let store = open_with(&disk, options.clone()).unwrap();
    create(&store, 0);
    store.snapshot().unwrap();
    let id = store.id();
    store.close().unwrap();
    let header = ImageFileHeader { store: id, file: 70, purpose: ImagePurpose::Batch };
    let left = FileName::Pages(70);
    disk.create(left).unwrap().write_at(0, &header.encode()).unwrap();
    for _ in 0..2 {
        let store = open_with(&disk, options.clone()).unwrap();
        store.prune(&store.retention()).unwrap();
        store.close().unwrap();
        assert!(disk.bytes(left).is_some());
    }
    let store = open_with(&disk, options).unwrap();
    let next = create(&store, 1);
    assert!(disk.bytes(FileName::Pages(71)).is_some(), "the next number");
    store.snapshot().unwrap();
    assert!(disk.bytes(left).is_none());
    assert_eq!(State::of(&store).contents[&next], content(1));
}

/// Numbers of image files are never reused, even after the file with the highest number was removed.
#[test]
fn image_file_numbers_are_never_reused() {
    let disk = SimDisk::new();
    let options = small()
        .retention(Retention::new().snapshots_kept(1))
        .with(|options| options.log.segment_len = 1 << 20);
    let mut seen: BTreeMap<FileName, Vec<u8>> = BTreeMap::new();
    let mut store = open_with(&disk, options.clone()).unwrap();
    let page = create(&store, 0);
    for round in 1..30 {
        overwrite(&store, page, round);
        if round % 4 == 0 {
            store.snapshot().unwrap();
        }
        for (file, bytes) in Files::of(&disk).0 {
            if file.folder() == Folder::Pages && !matches!(file, FileName::Temporary(..)) {
                assert_eq!(seen.entry(file).or_insert_with(|| bytes.clone()), &bytes, "{file}");
            }
        }
        if round % 3 == 0 {
            store.close().unwrap();
            store = open_with(&disk, options.clone()).unwrap();
        }
    }
}
