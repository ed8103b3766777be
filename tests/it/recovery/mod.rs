//! The decision table of recovery. Each row has one test, which has the name in the table.
//!
//! Each test brings a store into the row's state by a crash or by damage, opens it, and checks everything
//! that the open reports: the error with file, offset, Lsn and remedy, or `recovered()`. An open that fails
//! must not change any byte of the store.

mod bench;
mod log;
mod opens;
mod snapshots;
mod windows;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use remanent::disk::Disk;
use remanent::error::{Defect, FileName, Folder, Mismatch, Remedy};
use remanent::options::Create;
use remanent::testing::sim_disk::{CrashPlan, DiskFault, Operation, SimDisk};
use remanent::{Error, Lsn, Place, View};
use remanent_format::frame::{FrameHeader, FrameKind};
use remanent_format::image::{ImageFileHeader, ImagePurpose, ImageRef};
use remanent_format::segment::{SEGMENT_HEADER_BLOCK, SegmentHeader};
use remanent_format::state::survey::Survey;
use remanent_format::store::{Features, StoreFile};

use self::bench::{create_page, flip, frame_of, refused, refused_at, remove, step, stepped, with_snapshots};
use crate::files::{Files, State, open, open_with, small};

#[test]
fn empty_directory_is_created() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("new");
    let store = small().open(&path).unwrap();
    let recovered = store.recovered();
    assert!(recovered.created);
    assert_eq!((recovered.position.incarnation.number, recovered.position.lsn), (1, Lsn(0)));
    assert_eq!((recovered.previous, recovered.snapshot, &recovered.torn), (None, None, &None));
    let id = store.id();
    store.close().unwrap();
    assert!(path.join("STORE").is_file());

    let store = small().create(Create::Never).open(&path).unwrap();
    assert_eq!(store.id(), id);
    assert!(!store.recovered().created);
    assert_eq!(store.recovered().position.incarnation.number, 2);
}

#[test]
fn foreign_directory_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("thesis.tex"), "years of work").unwrap();
    let error = small().open(directory.path()).expect_err("the directory is refused");
    let Error::NoStore { path, found: Some(found) } = &error else { panic!("{error}") };
    assert_eq!((Path::new(path), found.as_str()), (directory.path(), "thesis.tex"));
    assert_eq!(error.remedy(), Remedy::ChangeCall);
    let names: Vec<_> =
        std::fs::read_dir(directory.path()).unwrap().map(|file| file.unwrap().path()).collect();
    assert_eq!(names, [directory.path().join("thesis.tex")], "not even a LOCK is left there");

    let error = refused(&SimDisk::new(), small().create(Create::Never));
    assert!(matches!(error, Error::NoStore { found: None, .. }), "{error}");
}

#[test]
fn interrupted_creation_starts_over() {
    let disk = SimDisk::new();
    let store = open(&disk).unwrap();
    let id = store.id();
    let created = disk.events();
    store.close().unwrap();
    let (mut unfinished, mut finished) = (0, 0);
    let plan = CrashPlan { events: 0..created, images_max: 24, ..CrashPlan::default() };
    let mut check = |image: remanent::testing::sim_disk::CrashImage| {
        let had_store = image.disk.bytes(FileName::Store).is_some();
        let name = image.to_string();
        // A reader before the open finds either the new store or no store.
        let view = View::open_on(&(Arc::new(image.disk.clone()) as Arc<dyn Disk>), None);
        match view {
            Err(Error::NoStore { found: None, .. }) => assert!(!had_store, "{name}"),
            found => assert!(found.is_ok() && had_store, "{name}: {:?}", found.err()),
        }
        let store = open(&image.disk).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(store.recovered().created, !had_store, "{name}");
        assert_eq!(store.id() == id, had_store, "{name}");
        let page = create_page(&store);
        assert_eq!(step(&store, page, 1), Lsn(2), "{name}");
        *(if had_store { &mut finished } else { &mut unfinished }) += 1;
    };
    disk.kill_images(&plan, &mut check);
    disk.power_images(&plan, &mut check);
    assert!(unfinished > 100 && finished > 0, "{unfinished} unfinished, {finished} finished");
}

/// If STORE exists only under its temporary name, the files of a fork are those of a crash just before its
/// last rename. Without such a file, they are a store that lost its STORE.
#[test]
fn interrupted_fork_starts_over() {
    let (source, ..) = stepped(3);
    let source: Arc<dyn Disk> = Arc::new(source);
    let target = SimDisk::new();
    let forked: Arc<dyn Disk> = Arc::new(target.clone());
    View::open_on(&source, None).unwrap().fork_on(&forked).unwrap();
    target.rename(FileName::Store, FileName::Temporary(Folder::Root, 0)).unwrap();
    let unfinished: Arc<dyn Disk> = Arc::new(target.clone());
    assert!(matches!(View::open_on(&unfinished, None), Err(Error::NoStore { found: None, .. })));
    let claimed = Files::of(&target);
    assert!(claimed.0.contains_key(&FileName::Manifest(1)));
    let store = open(&claimed.disk()).unwrap();
    assert!(store.recovered().created);

    let mut lost = claimed;
    lost.0.remove(&FileName::Temporary(Folder::Root, 0));
    let error = open(&lost.disk()).unwrap_err();
    assert_eq!(error.file(), Some(FileName::Store), "{error}");
    let lost: Arc<dyn Disk> = Arc::new(lost.disk());
    let error = View::open_on(&lost, None).expect_err("it is no whole store");
    assert_eq!(error.file(), Some(FileName::Store), "{error}");
}

#[test]
fn missing_store_file_is_refused() {
    let missing = |disk: &SimDisk| {
        let defect = refused_at(disk, FileName::Store, 0, None);
        assert_eq!(defect, Defect::Missing);
    };
    // The log contains a batch that is alone in its group.
    let (disk, ..) = stepped(1);
    remove(&disk, FileName::Store);
    missing(&disk);

    // The log contains a batch after a seal in one group, so that no batch is at the start of a group.
    let disk = SimDisk::new();
    open(&disk).unwrap().close().unwrap();
    let segment = FileName::Segment(1);
    let opening = SegmentHeader::decode(&disk.bytes(segment).unwrap()).unwrap();
    let header = FrameHeader {
        kind: FrameKind::Batch,
        group_start: false,
        incarnation: opening.opening.unwrap().incarnation,
        store: opening.store,
        segment: 1,
        offset: SEGMENT_HEADER_BLOCK + 80,
        lsn: Lsn(1),
        durable: Lsn(0),
        payload_len: 0,
        payload_crc: 0,
        chain_prev: 0,
    };
    disk.damage(segment, header.offset, &header.encode().0);
    remove(&disk, FileName::Store);
    missing(&disk);

    // The whole log is missing, but images or a manifest exist.
    for lost in [Folder::Snapshots, Folder::Pages] {
        let (disk, _) = with_snapshots();
        for file in Files::of(&disk).names(|file| file.folder() == Folder::Log || file.folder() == lost) {
            disk.remove(file).unwrap();
        }
        remove(&disk, FileName::Store);
        missing(&disk);
    }
}

#[test]
fn damaged_store_file_is_refused() {
    let (disk, ..) = stepped(1);
    let bytes = disk.bytes(FileName::Store).unwrap();
    flip(&disk, FileName::Store, 30);
    let defect = refused_at(&disk, FileName::Store, 0, None);
    assert!(matches!(defect, Defect::Checksum { what: "STORE header", .. }), "{defect}");

    disk.damage(FileName::Store, 0, &bytes);
    disk.damage_len(FileName::Store, bytes.len() as u64 - 1);
    let defect = refused_at(&disk, FileName::Store, 0, None);
    assert!(matches!(defect, Defect::Truncated { .. }), "{defect}");

    // STORE was written by a newer version of the library, which it records.
    let file = StoreFile::decode(&bytes).unwrap();
    disk.damage_len(FileName::Store, bytes.len() as u64);
    for features in [
        Features { incompatible: 1 << 31, ..Features::default() },
        Features { read_compatible: 1 << 31, ..Features::default() },
    ] {
        disk.damage(FileName::Store, 0, &StoreFile { features, ..file.clone() }.encode().unwrap());
        let defect = refused_at(&disk, FileName::Store, 0, None);
        assert!(matches!(defect, Defect::Version { version: 1, features: 0x8000_0000 }), "{defect}");
    }
    let mut newer = bytes.clone();
    newer[8..12].copy_from_slice(&2u32.to_le_bytes());
    let header_crc = crc32fast::hash(&newer[..60]);
    newer[60..64].copy_from_slice(&header_crc.to_le_bytes());
    disk.damage(FileName::Store, 0, &newer);
    let defect = refused_at(&disk, FileName::Store, 0, None);
    assert!(matches!(defect, Defect::Version { version: 2, features: 0 }), "{defect}");
}

/// Writes STORE as a version of the library without features would.
fn without_features(disk: &SimDisk) -> Vec<u8> {
    let whole = disk.bytes(FileName::Store).unwrap();
    let file = StoreFile::decode(&whole).unwrap();
    assert_eq!(file.features, Features::WRITTEN);
    let bare = StoreFile { features: Features::default(), ..file }.encode().unwrap();
    disk.damage(FileName::Store, 0, &bare);
    whole
}

const EIO: i32 = 5;

#[test]
fn features_are_added_to_older_store_before_other_writes() {
    let (disk, _, state) = stepped(3);
    let whole = without_features(&disk);
    // A reader adds no features.
    let source: Arc<dyn Disk> = Arc::new(disk.clone());
    drop(View::open_on(&source, None).unwrap());
    let is_lasting = |file: &FileName| !matches!(file, FileName::Temporary(..) | FileName::Spare(_));
    let lasting = || {
        let mut files = Files::of(&disk);
        files.0.retain(|file, _| is_lasting(file));
        files.0
    };
    let before = lasting();
    // The first file that the open renames is STORE. Until then, the content of no file changes.
    for operation in [Operation::Create, Operation::Write, Operation::Sync, Operation::Rename] {
        disk.fail(DiskFault { operation, skip: 0, times: 1, errno: EIO });
        open(&disk).map(|_| ()).unwrap_err();
        assert!(lasting() == before, "{operation:?}");
    }
    let store = open(&disk).unwrap();
    assert_eq!(disk.bytes(FileName::Store).unwrap(), whole);
    assert_eq!(State::of(&store), state);
    store.close().unwrap();
    // The open does not publish the manifest again.
    let published = || {
        let from = disk.history().len();
        open(&disk).unwrap().close().unwrap();
        disk.history()[from..].iter().filter(|event| event.ends_with("to STORE")).count()
    };
    assert_eq!(published(), 0);
    without_features(&disk);
    assert_eq!(published(), 1);
}

#[test]
fn other_identity_is_refused() {
    let disk = SimDisk::new();
    let ours = || small().identity(*b"llama").layout_fingerprint([7; 32]);
    open_with(&disk, ours()).unwrap().close().unwrap();

    let error = refused(&disk, ours().identity(*b"mistral"));
    assert!(matches!(&error, Error::Mismatch(Mismatch::Identity { found }) if found == b"llama"), "{error}");
    assert_eq!(error.remedy(), Remedy::ChangeCall);
    let error = refused(&disk, ours().layout_fingerprint([8; 32]));
    assert!(
        matches!(&error, Error::Mismatch(Mismatch::Layout { found: Some(found), .. }) if *found == [7; 32]),
        "{error}"
    );
    assert_eq!(error.remedy(), Remedy::ChangeCall);

    open_with(&disk, ours()).unwrap().close().unwrap();
    open(&disk).unwrap();
}

#[test]
fn missing_log_is_refused() {
    let (disk, _) = with_snapshots();
    let last = Survey::read(&Files::of(&disk)).unwrap().mark();
    for file in Files::of(&disk).names(|file| file.folder() == Folder::Log) {
        disk.remove(file).unwrap();
    }
    disk.sync_folder(Folder::Log).unwrap();
    assert_eq!(refused_at(&disk, FileName::Segment(1), 0, Some(last)), Defect::Missing);
}

#[test]
fn temporary_files_are_removed() {
    let (disk, _, state) = stepped(2);
    let folders = [Folder::Root, Folder::Log, Folder::Pages, Folder::Snapshots];
    let temporaries = folders.map(|folder| FileName::Temporary(folder, 1));
    for file in temporaries {
        disk.create(file).unwrap().write_at(0, b"half a file").unwrap();
    }
    // These files belong to no store, but an open that fails does not change the directory.
    let whole = disk.bytes(FileName::Store).unwrap();
    let (segment, offset) = frame_of(&Files::of(&disk), 1);
    flip(&disk, segment, offset);
    refused_at(&disk, segment, offset, Some(Lsn(1)));
    flip(&disk, segment, offset);

    let store = open(&disk).unwrap();
    assert_eq!(State::of(&store), state);
    store.close().unwrap();
    let left = Files::of(&disk);
    assert_eq!(left.names(|file| matches!(file, FileName::Temporary(..))), []);
    assert_eq!(left.0[&FileName::Store], whole);
}

#[test]
fn unnamed_images_are_removed() {
    let (disk, state) = with_snapshots();
    let named: BTreeSet<FileName> =
        Files::of(&disk).names(|file| file.folder() == Folder::Pages).into_iter().collect();
    let unnamed = FileName::Pages(77);
    let store = Survey::read(&Files::of(&disk)).unwrap().store.store;
    let header = ImageFileHeader { store, file: 77, purpose: ImagePurpose::Snapshot };
    disk.create(unnamed).unwrap().write_at(0, &header.encode()).unwrap();
    let store = open(&disk).unwrap();
    assert_eq!(State::of(&store), state);
    let left = Files::of(&disk).names(|file| file.folder() == Folder::Pages);
    assert_eq!(left.into_iter().collect::<BTreeSet<_>>(), named);
    // The number is not assigned to another file.
    store.snapshot().unwrap();
    assert!(disk.bytes(FileName::Pages(78)).is_some());
}

/// Returns a closed store whose only page was written whole by a batch. Also returns the state and the page's
/// image.
fn with_image_of_a_batch() -> (SimDisk, State, ImageRef) {
    let disk = SimDisk::new();
    let store = open(&disk).unwrap();
    let mut batch = store.batch();
    batch.create_from(vec![7; 20 << 10], Place::Host);
    let page = store.commit(batch).unwrap().pages[0];
    step(&store, page, 1);
    let state = State::of(&store);
    store.close().unwrap();
    let files = Files::of(&disk);
    let resolution = Survey::read(&files).unwrap().resolve(&files, None, None).unwrap();
    let image = resolution.resolved.bases.get(page).unwrap().image.expect("the batch names it");
    (disk, state, image)
}

#[test]
fn images_of_batches_stay() {
    let (disk, state, image) = with_image_of_a_batch();
    // The other image file is left over from a crash before its batch was logged.
    let (named, unnamed) = (FileName::Pages(image.file), FileName::Pages(77));
    let store = Survey::read(&Files::of(&disk)).unwrap().store.store;
    let header = ImageFileHeader { store, file: 77, purpose: ImagePurpose::Batch };
    disk.create(unnamed).unwrap().write_at(0, &header.encode()).unwrap();
    let store = open(&disk).unwrap();
    assert_eq!(State::of(&store), state);
    for file in [named, unnamed] {
        assert!(disk.bytes(file).is_some(), "{file} may be named by log from before the snapshot used");
    }
}

#[test]
fn bad_image_of_a_batch_is_refused() {
    let (disk, _, image) = with_image_of_a_batch();
    let file = FileName::Pages(image.file);
    flip(&disk, file, image.offset);
    let defect = refused_at(&disk, file, image.offset, None);
    assert!(matches!(defect, Defect::Checksum { what: "image", .. }), "{defect}");
    remove(&disk, file);
    let defect = refused_at(&disk, file, image.offset, None);
    assert!(matches!(defect, Defect::Missing | Defect::Truncated { .. }), "{defect}");
}

/// Returns the tests that the decision table names.
fn tests_of_the_table(source: &str) -> BTreeSet<String> {
    let rows = source.lines().filter_map(|line| line.strip_prefix("//! | "));
    let cells = rows.filter_map(|row| row.trim_end_matches([' ', '|']).rsplit_once('|'));
    cells.filter_map(|(_, last)| Some(last.trim().strip_prefix('`')?.strip_suffix('`')?.to_owned())).collect()
}

/// Returns the tests of a source file.
fn tests_of(source: &str) -> BTreeSet<String> {
    let after = source.split("#[test]\nfn ").skip(1);
    after.filter_map(|text| Some(text.split_once('(')?.0.to_owned())).collect()
}

#[test]
fn every_row_of_the_table_has_its_test() {
    let read =
        |path: &str| std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap();
    let table = tests_of_the_table(&read("src/recovery/mod.rs"));
    let files = ["recovery/mod.rs", "recovery/log.rs", "recovery/opens.rs", "recovery/snapshots.rs"];
    let mut tests: BTreeSet<String> =
        files.iter().flat_map(|file| tests_of(&read(&format!("tests/it/{file}")))).collect();
    assert!(
        tests.remove("every_row_of_the_table_has_its_test") && tests.remove("row_without_test_is_detected")
    );
    assert!(table.len() > 20, "the table is not recognized: {table:?}");
    assert_eq!(table, tests);
}

#[test]
fn row_without_test_is_detected() {
    let table = "//! # Head\n//! | a | b | test |\n//! |---|---|---|\n//! | x | y | `no_such_row` |\n";
    assert_eq!(tests_of_the_table(table), BTreeSet::from(["no_such_row".to_owned()]));
    assert_eq!(tests_of("#[test]\nfn a_row() {}\nfn helper() {}"), BTreeSet::from(["a_row".to_owned()]));
}
