//! The decision table of recovery: one test a row, under the name that the table gives it.
//!
//! Each test brings a store into the row's state by a crash or by damage, opens it, and looks at all that
//! the caller is told: the error with file, offset, Lsn and remedy, or what `recovered()` reports. A store
//! that is refused must be left as it was, to the byte.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use remanent::disk::Disk;
use remanent::disk::sim::{EIO, Fault, Moment, Operation, Plan, SimDisk, Tears};
use remanent::{
    Create, Defect, Error, FileName, Folder, Lsn, Metadata, Options, PageId, Place, Remedy, Snapshot,
    SnapshotId, Store,
};
use remanent_format::frame::{FrameHeader, FrameHeaderRaw, FrameKind, UncheckedFrame};
use remanent_format::image::{ImageFileHeader, ImagePurpose, ImageRef};
use remanent_format::limits::{FRAME_ALIGN, GROUP_ALIGN, align_up};
use remanent_format::rebuild::{Rebuilt, Survey, rebuild};
use remanent_format::segment::{SEGMENT_HEADER_BLOCK, SegmentHeader};
use remanent_format::store::{Features, StoreFile};

use crate::files::{Files, State, open, open_with, small};

/// Commits a batch that changes the page in a way of its own.
fn step(store: &Store, page: PageId, number: u8) -> Lsn {
    let mut batch = store.batch();
    batch.write(page, u64::from(number), &[number; 40]).set_root("step", u64::from(number));
    store.commit(batch).unwrap().position.lsn
}

fn create_page(store: &Store) -> PageId {
    let mut batch = store.batch();
    batch.create(600, Place::Host);
    store.commit(batch).unwrap().pages[0]
}

/// A store on a new disk with one page and a few steps, and the state at the end.
fn stepped(steps: u8) -> (SimDisk, PageId, State) {
    let disk = SimDisk::new();
    let store = open(&disk).unwrap();
    let page = create_page(&store);
    for number in 0..steps {
        step(&store, page, number);
    }
    let state = State::of(&store);
    store.close().unwrap();
    (disk, page, state)
}

/// A closed store with two snapshots, log behind each, and no log left from before the first.
fn with_snapshots() -> (SimDisk, State) {
    let disk = SimDisk::new();
    let store = open(&disk).unwrap();
    let page = create_page(&store);
    for _ in 0..2 {
        for number in 0..120 {
            step(&store, page, number);
        }
        store.snapshot().unwrap();
    }
    step(&store, page, 200);
    let state = State::of(&store);
    store.close().unwrap();
    assert!(Survey::read(&Files::of(&disk)).unwrap().log.beginning().is_none(), "the log was recycled");
    (disk, state)
}

/// The disk as the process left it when it died at the last moment of which `wanted` says true.
fn killed_when(disk: &SimDisk, wanted: impl Fn(&Rebuilt) -> bool) -> SimDisk {
    let mut found = None;
    disk.kill_images(&Plan { tears: Tears::None, ..Plan::default() }, |image| {
        if rebuild(&image.disk, &Default::default()).is_ok_and(|rebuilt| wanted(&rebuilt)) {
            found = Some(image.disk);
        }
    });
    found.expect("there is such a moment")
}

/// The disk at which `count` batches are logged, and no mark covers the last one.
fn killed_behind(disk: &SimDisk, count: u64) -> SimDisk {
    killed_when(disk, |rebuilt| {
        let end = rebuilt.end.as_ref().unwrap();
        end.accepted.lsn == Lsn(count) && end.proven.lsn < Lsn(count)
    })
}

/// The place of a batch's frame.
fn frame_of(files: &Files, lsn: u64) -> (FileName, u64) {
    frame_where(files, |header| header.kind == FrameKind::Batch && header.lsn == Lsn(lsn))
}

fn frame_where(files: &Files, wanted: impl Fn(&FrameHeader) -> bool) -> (FileName, u64) {
    let mut found = None;
    for file in files.segments() {
        let bytes = &files.0[&file];
        for at in (SEGMENT_HEADER_BLOCK as usize..bytes.len() - FrameHeaderRaw::LEN).step_by(16) {
            if let Ok(frame) = UncheckedFrame::decode(&bytes[at..])
                && FileName::Segment(frame.unproven().segment) == file
                && wanted(frame.unproven())
            {
                found = Some((file, at as u64));
            }
        }
    }
    found.expect("there is such a frame")
}

fn flip(disk: &SimDisk, file: FileName, offset: u64) {
    let byte = disk.bytes(file).unwrap()[offset as usize];
    disk.damage(file, offset, &[byte ^ 0x10]);
}

fn remove(disk: &SimDisk, file: FileName) {
    disk.remove(file).unwrap();
    disk.sync_folder(file.folder()).unwrap();
}

/// Opening fails, and nothing is changed by that.
fn refused(disk: &SimDisk, options: Options) -> Error {
    let before = Files::of(disk);
    let error = open_with(disk, options).expect_err("the store is refused");
    assert!(Files::of(disk) == before, "a refused store was modified: {error}");
    error
}

/// Opening fails because of damage, here.
fn refused_at(disk: &SimDisk, file: FileName, offset: u64, lsn: Option<Lsn>) -> Defect {
    let error = refused(disk, small());
    assert_eq!((error.file(), error.offset(), error.lsn()), (Some(file), Some(offset), lsn), "{error}");
    assert_eq!(error.remedy(), Remedy::Inspect);
    match error {
        Error::Damaged(damage) => damage.defect,
        error => panic!("not damage: {error}"),
    }
}

#[test]
fn empty_directory_is_created() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("new");
    let store = Store::open(&path, small()).unwrap();
    let recovered = store.recovered();
    assert!(recovered.created);
    assert_eq!((recovered.position.incarnation.number, recovered.position.lsn), (1, Lsn(0)));
    assert_eq!((recovered.previous, recovered.snapshot, &recovered.torn), (None, None, &None));
    let id = store.id();
    store.close().unwrap();
    assert!(path.join("STORE").is_file());

    let store = Store::open(&path, small().create(Create::Never)).unwrap();
    assert_eq!(store.id(), id);
    assert!(!store.recovered().created);
    assert_eq!(store.recovered().position.incarnation.number, 2);
}

#[test]
fn foreign_directory_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("thesis.tex"), "years of work").unwrap();
    let error = Store::open(directory.path(), small()).expect_err("the directory is refused");
    let Error::ForeignDirectory { path, found } = &error else { panic!("{error}") };
    assert_eq!((Path::new(path), found.as_str()), (directory.path(), "thesis.tex"));
    assert_eq!(error.remedy(), Remedy::ChangeCall);
    let names: Vec<_> =
        std::fs::read_dir(directory.path()).unwrap().map(|file| file.unwrap().path()).collect();
    assert_eq!(names, [directory.path().join("thesis.tex")], "not even a LOCK is left behind");

    let error = refused(&SimDisk::new(), small().create(Create::Never));
    assert!(matches!(error, Error::NoStore { .. }), "{error}");
}

#[test]
fn creation_cut_short_starts_over() {
    let disk = SimDisk::new();
    let store = open(&disk).unwrap();
    let id = store.id();
    let created = disk.events();
    store.close().unwrap();
    let (mut unfinished, mut finished) = (0, 0);
    let plan = Plan { events: 0..created, images_max: 24, ..Plan::default() };
    let mut check = |image: remanent::disk::sim::Image| {
        let had_store = image.disk.bytes(FileName::Store).is_some();
        let name = image.to_string();
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

/// The files of a fork without STORE are what a crash just before its last rename leaves, if STORE is there
/// under its temporary name; without that they are a store that lost its STORE.
#[test]
fn fork_cut_short_starts_over() {
    let (source, ..) = stepped(3);
    let source: Arc<dyn Disk> = Arc::new(source);
    let target = SimDisk::new();
    let forked: Arc<dyn Disk> = Arc::new(target.clone());
    Snapshot::open_on(&source, None).unwrap().fork_on(&forked).unwrap();
    target.rename(FileName::Store, FileName::Temporary(Folder::Root, 0)).unwrap();
    let claimed = Files::of(&target);
    assert!(claimed.0.contains_key(&FileName::Manifest(1)));
    let store = open(&claimed.disk()).unwrap();
    assert!(store.recovered().created);

    let mut lost = claimed;
    lost.0.remove(&FileName::Temporary(Folder::Root, 0));
    let error = open(&lost.disk()).unwrap_err();
    assert_eq!(error.file(), Some(FileName::Store), "{error}");
}

#[test]
fn missing_store_file_is_refused() {
    let missing = |disk: &SimDisk| {
        let defect = refused_at(disk, FileName::Store, 0, None);
        assert_eq!(defect, Defect::Missing);
    };
    // A batch, alone in its group.
    let (disk, ..) = stepped(1);
    remove(&disk, FileName::Store);
    missing(&disk);

    // A batch behind a seal in one group, so that no batch lies at a group's start.
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

    // Nothing of the log, but images or a manifest.
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

    // A store of a newer build: it says so itself.
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

#[test]
fn other_identity_is_refused() {
    let disk = SimDisk::new();
    let ours = || small().identity(*b"llama").layout_fingerprint([7; 32]);
    open_with(&disk, ours()).unwrap().close().unwrap();

    let error = refused(&disk, ours().identity(*b"mistral"));
    assert!(matches!(&error, Error::IdentityMismatch { found } if found == b"llama"), "{error}");
    assert_eq!(error.remedy(), Remedy::ChangeCall);
    let error = refused(&disk, ours().layout_fingerprint([8; 32]));
    assert!(matches!(&error, Error::LayoutMismatch { found: Some(found) } if *found == [7; 32]), "{error}");
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
    // They are nobody's, but a store that is refused stays as it is.
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
    // Its number is not given to another file.
    store.snapshot().unwrap();
    assert!(disk.bytes(FileName::Pages(78)).is_some());
}

/// A closed store on whose only page a batch wrote whole, and the image.
fn with_image_of_a_batch() -> (SimDisk, State, ImageRef) {
    let disk = SimDisk::new();
    let store = open(&disk).unwrap();
    let mut batch = store.batch();
    batch.create_from(vec![7; 20 << 10], Place::Host, None, Metadata::new());
    let page = store.commit(batch).unwrap().pages[0];
    step(&store, page, 1);
    let state = State::of(&store);
    store.close().unwrap();
    let files = Files::of(&disk);
    let resolution = Survey::read(&files).unwrap().resolve(&files, None, None).unwrap();
    let image = resolution.resolved.bases[page].image.expect("the batch names it");
    (disk, state, image)
}

#[test]
fn images_of_batches_stay() {
    let (disk, state, image) = with_image_of_a_batch();
    // The other one is as a crash leaves it that strikes before the batch is logged.
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

#[test]
fn one_bad_manifest_copy_costs_nothing() {
    for copy in 0..2 {
        let (disk, state) = with_snapshots();
        let manifest = FileName::Manifest(2);
        let whole = disk.bytes(manifest).unwrap();
        flip(&disk, manifest, (copy * whole.len() / 2 + 300) as u64);
        let store = open(&disk).unwrap();
        assert_eq!(State::of(&store), state);
        let recovered = store.recovered();
        assert_eq!((recovered.snapshot, recovered.replayed_batches), (Some(SnapshotId(2)), 1));
        assert_eq!((&recovered.torn, &recovered.harmless[..]), (&None, &[][..]));
        assert_eq!(disk.bytes(manifest), Some(whole), "the bad copy is mended");
    }
}

#[test]
fn bad_manifest_falls_back() {
    let (disk, state) = with_snapshots();
    let manifest = FileName::Manifest(2);
    let whole = Files::of(&disk);
    let len = whole.0[&manifest].len() as u64;
    let falls_back = |disk: &SimDisk| {
        let store = open(disk).unwrap();
        assert_eq!(State::of(&store), state);
        let recovered = store.recovered();
        assert_eq!((recovered.snapshot, recovered.replayed_batches), (Some(SnapshotId(1)), 121));
        assert_eq!(recovered.torn, None);
        recovered.harmless.iter().map(|damage| damage.file).collect::<Vec<_>>()
    };
    flip(&disk, manifest, 20);
    flip(&disk, manifest, len / 2 + 20);
    assert_eq!(falls_back(&disk), [manifest]);

    let disk = whole.disk();
    remove(&disk, manifest);
    assert_eq!(falls_back(&disk), []);

    // Both bad: the log behind them does not reach back to the beginning.
    let disk = whole.disk();
    disk.damage_len(manifest, 100);
    disk.damage_len(FileName::Manifest(1), 100);
    let defect = refused_at(&disk, manifest, 0, None);
    assert!(matches!(defect, Defect::Truncated { .. }), "{defect}");
}

/// A closed store of four snapshots, each of which follows the one before, and the state at the end.
fn with_a_chain() -> (Files, State) {
    let disk = SimDisk::new();
    let store = open(&disk).unwrap();
    let pages: Vec<PageId> = (0..24).map(|_| create_page(&store)).collect();
    for number in 0..4 {
        step(&store, pages[0], number);
        store.snapshot().unwrap();
    }
    let state = State::of(&store);
    store.close().unwrap();
    let files = Files::of(&disk);
    assert_eq!(Survey::read(&files).unwrap().chain(SnapshotId(4)).unwrap().len(), 4);
    (files, state)
}

#[test]
fn one_bad_copy_of_a_link_is_mended() {
    let (whole, state) = with_a_chain();
    for link in 1..=4 {
        let manifest = FileName::Manifest(link);
        for copy in 0..2 {
            let disk = whole.disk();
            flip(&disk, manifest, (copy * whole.0[&manifest].len() / 2 + 280) as u64);
            let store = open(&disk).unwrap();
            assert_eq!((store.recovered().snapshot, State::of(&store)), (Some(SnapshotId(4)), state.clone()));
            assert_eq!(disk.bytes(manifest).as_ref(), whole.0.get(&manifest), "link {link}, copy {copy}");
        }
    }
}

#[test]
fn lost_link_is_a_lost_snapshot() {
    let (whole, state) = with_a_chain();
    for link in 1..=4 {
        let disk = whole.disk();
        remove(&disk, FileName::Manifest(link));
        // What does not follow the link is there to start from, if the log behind it still is.
        match open(&disk) {
            Ok(store) => {
                assert_eq!(
                    (store.recovered().snapshot, State::of(&store)),
                    (link.checked_sub(1).filter(|id| *id > 0).map(SnapshotId), state.clone())
                );
                // What goes on from here follows no link that is not there.
                let next = store.snapshot().unwrap();
                store.close().unwrap();
                assert_eq!(open(&disk).unwrap().recovered().snapshot, Some(next.id));
            }
            Err(Error::Damaged(damage)) => {
                assert_eq!((link < 4, damage.file), (true, FileName::Manifest(link)))
            }
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn links_of_others_are_no_snapshots() {
    let (whole, state) = with_a_chain();
    assert_eq!(whole.names(|file| matches!(file, FileName::Manifest(_))).len(), 4);
    let store = open(&whole.disk()).unwrap();
    let kept: Vec<SnapshotId> = store.snapshots().iter().map(|info| info.id).collect();
    assert_eq!(kept, [SnapshotId(3), SnapshotId(4)]);
    assert_eq!(State::of(&store), state);
}

#[test]
fn bad_image_falls_back() {
    let (disk, state) = with_snapshots();
    let survey = Survey::read(&Files::of(&disk)).unwrap();
    let manifest = survey.snapshot(SnapshotId(2)).unwrap();
    let image = manifest.entries[0].image.unwrap();
    let file = FileName::Pages(image.file);
    let whole = Files::of(&disk);
    let damages: [&dyn Fn(&SimDisk); 3] = [
        &|disk| flip(disk, file, image.offset + 5),
        &|disk| disk.damage_len(file, image.offset + 5),
        &|disk| remove(disk, file),
    ];
    for damage in damages {
        let disk = whole.disk();
        damage(&disk);
        let store = open(&disk).unwrap();
        assert_eq!(State::of(&store), state);
        let recovered = store.recovered();
        assert_eq!((recovered.snapshot, recovered.replayed_batches), (Some(SnapshotId(1)), 121));
        let [passed_over] = &recovered.harmless[..] else { panic!("{:?}", recovered.harmless) };
        assert_eq!((passed_over.file, passed_over.offset), (file, image.offset));
        // The next snapshot takes another number, and is as good as any.
        assert_eq!(store.snapshot().unwrap().id, SnapshotId(3));
        store.close().unwrap();
        let store = open(&disk).unwrap();
        assert_eq!(store.recovered().snapshot, Some(SnapshotId(3)));
        assert_eq!(State::of(&store), state);
    }
}

#[test]
fn bad_shared_image_is_refused() {
    let (disk, _) = with_snapshots();
    let survey = Survey::read(&Files::of(&disk)).unwrap();
    let images = [1, 2].map(|snapshot| {
        let manifest = survey.snapshot(SnapshotId(snapshot)).unwrap();
        manifest.entries[0].image.unwrap()
    });
    for image in images {
        flip(&disk, FileName::Pages(image.file), image.offset);
    }
    let defect = refused_at(&disk, FileName::Pages(images[1].file), images[1].offset, None);
    assert!(matches!(defect, Defect::Checksum { what: "image", .. }), "{defect}");
}

#[test]
fn unrecorded_manifest_is_published_anew() {
    let disk = SimDisk::new();
    let store = open(&disk).unwrap();
    let page = create_page(&store);
    step(&store, page, 1);
    let state = State::of(&store);
    store.snapshot().unwrap();
    store.close().unwrap();
    let manifest = FileName::Manifest(1);
    // The process died right after the rename: the name is in the cache only, and no seal speaks of it.
    let renamed = disk.history().iter().position(|event| event.ends_with(&format!("to {manifest}"))).unwrap();
    let dead = disk.after_kill(Moment { event: renamed + 1, tear: None });
    let whole = dead.bytes(manifest).unwrap();
    assert_eq!(dead.after_power_cut().bytes(manifest), None);

    let store = open(&dead).unwrap();
    assert_eq!(store.recovered().snapshot, Some(SnapshotId(1)));
    assert_eq!(State::of(&store), state);
    assert!(store.snapshots()[0].verified);
    let published = dead.history().iter().filter(|event| event.ends_with(&format!("to {manifest}"))).count();
    assert_eq!(published, 1, "it is published anew, once");
    assert_eq!(dead.calls(Operation::ReadProven), 0, "nobody had read its images back");
    let cut = dead.after_power_cut();
    assert_eq!(cut.bytes(manifest), Some(whole));
    let store = open(&cut).unwrap();
    assert_eq!(store.recovered().snapshot, Some(SnapshotId(1)));
    assert_eq!(State::of(&store), state);
    // Now a seal records it, and it is left alone.
    let published = cut.history().iter().filter(|event| event.ends_with(&format!("to {manifest}"))).count();
    assert_eq!(published, 0);
    assert!(cut.calls(Operation::ReadProven) > 0, "its images were read back by the open before");
}

/// A store that died behind its third batch, of which only two are covered by a mark, with the state
/// after two. All of it lies in one segment, also where each batch is synced and sealed by itself, as on a busy
/// machine: a segment with nothing but what is cut would be recycled.
fn torn() -> (SimDisk, State) {
    let disk = SimDisk::new();
    let store = open_with(&disk, small().segment_len(64 << 10)).unwrap();
    let page = create_page(&store);
    let lsn = step(&store, page, 1);
    store.wait_durable(lsn).unwrap();
    let state = State::of(&store);
    step(&store, page, 2);
    store.close().unwrap();
    (killed_behind(&disk, 3), state)
}

#[test]
fn torn_tail_is_cut() {
    let (whole, state) = torn();
    let (segment, offset) = frame_of(&Files::of(&whole), 3);
    type Tear<'a> = (&'a str, &'a dyn Fn(&SimDisk));
    let tears: [Tear<'_>; 4] = [
        ("payload", &|disk| flip(disk, segment, offset + 80)),
        ("header", &|disk| flip(disk, segment, offset + 50)),
        ("own position", &|disk| flip(disk, segment, offset + 33)),
        ("half of the header", &|disk| disk.damage(segment, offset, &[0; 32])),
    ];
    for (what, tear) in tears {
        let disk = Files::of(&whole).disk();
        tear(&disk);
        let store = open(&disk).unwrap();
        assert_eq!(State::of(&store), state, "{what}");
        let recovered = store.recovered();
        assert_eq!((recovered.position.incarnation.number, recovered.position.lsn), (2, Lsn(2)), "{what}");
        assert_eq!(recovered.previous.map(|previous| previous.incarnation.number), Some(1), "{what}");
        // The marks of batches 1 and 2 may have been in the frame that was cut: they are copied then.
        assert!(recovered.copied_batches <= 2, "{what}");
        let torn = recovered.torn.as_ref().unwrap_or_else(|| panic!("{what}: the cut is not reported"));
        assert_eq!((FileName::Segment(torn.segment), torn.offset), (segment, offset), "{what}");
        assert_eq!((torn.first, torn.last), (Lsn(3), Lsn(3)), "{what}");
        // The number is given again: nobody was told that the first batch 3 was durable.
        assert_eq!(create_page(&store), PageId(2), "{what}");
        assert_eq!(store.lsn(), Lsn(3), "{what}");
    }

    // Whole, it is not torn, but copied: a mark does not cover it.
    let store = open(&whole).unwrap();
    assert_eq!((store.recovered().position.lsn, &store.recovered().torn), (Lsn(3), &None));
    assert_eq!(store.recovered().copied_batches, 1);
}

#[test]
fn damage_under_a_mark_is_refused() {
    let (disk, _, state) = stepped(3);
    let whole = Files::of(&disk);
    for lsn in 1..=4 {
        let (segment, offset) = frame_of(&whole, lsn);
        for within in [0, 50, 80] {
            let disk = whole.disk();
            flip(&disk, segment, offset + within);
            let defect = refused_at(&disk, segment, offset, Some(Lsn(lsn)));
            assert_eq!(matches!(defect, Defect::Checksum { what: "payload", .. }), within == 80, "{defect}");
        }
    }
    // The last seal covers nothing that lies behind it.
    let (segment, offset) = frame_where(&whole, |header| header.kind == FrameKind::Seal);
    let disk = whole.disk();
    flip(&disk, segment, offset);
    assert_eq!(State::of(&open(&disk).unwrap()), state);

    // A frame that joined an open group may be the only one that knows a newer mark.
    // The segment has room for both batches in any groups, and two more.
    let disk = SimDisk::new();
    let store = open_with(&disk, small().segment_len(64 << 10)).unwrap();
    let page = create_page(&store);
    step(&store, page, 0);
    store.close().unwrap();
    let whole = Files::of(&killed_behind(&disk, 2));
    let (segment, offset) = frame_of(&whole, 2);
    let disk = whole.disk();
    let third = append(&disk, segment, offset, true, Lsn(1));
    append(&disk, segment, third, false, Lsn(2));
    assert_eq!(open(&Files::of(&disk).disk()).unwrap().lsn(), Lsn(4));
    flip(&disk, segment, offset + 80);
    refused_at(&disk, segment, offset, Some(Lsn(2)));
}

/// Appends a frame like the one before it, as the batch after it; returns its place.
fn append(disk: &SimDisk, segment: FileName, before: u64, group_start: bool, durable: Lsn) -> u64 {
    let bytes = disk.bytes(segment).unwrap();
    let header = *UncheckedFrame::decode(&bytes[before as usize..]).unwrap().unproven();
    let offset = align_up(header.end(), if group_start { GROUP_ALIGN } else { FRAME_ALIGN });
    let payload = before as usize + FrameHeaderRaw::LEN;
    let payload = &bytes[payload..payload + header.payload_len as usize];
    let next = FrameHeader {
        group_start,
        offset,
        lsn: header.lsn.next(),
        durable,
        chain_prev: header.encode().1,
        ..header
    };
    disk.damage(segment, offset, &next.encode().0);
    disk.damage(segment, offset + FrameHeaderRaw::LEN as u64, payload);
    offset
}

#[test]
fn unreadable_log_is_refused() {
    let (whole, _) = torn();
    let expected = State::of(&open(&Files::of(&whole).disk()).unwrap());
    let (mut refused, mut opened) = (0, 0);
    for times in [1, usize::MAX] {
        for skip in 0..40 {
            let disk = Files::of(&whole).disk();
            disk.fail(Fault { operation: Operation::Read, skip, times, errno: EIO });
            match open(&disk) {
                Ok(store) => {
                    // What failed was read again, or not needed; it is not taken for the log's end.
                    assert_eq!(store.recovered().torn, None, "read {skip}");
                    assert_eq!(store.lsn(), Lsn(3), "read {skip}");
                    opened += 1;
                }
                Err(error) => {
                    assert!(matches!(error.remedy(), Remedy::Inspect | Remedy::Reopen), "{error}");
                    refused += 1;
                }
            }
            disk.clear_faults();
            assert_eq!(State::of(&open(&disk).unwrap()), expected, "read {skip}, later");
        }
    }
    assert!(refused > 10 && opened > 10, "{refused} refused, {opened} opened");
}

#[test]
fn cut_frames_stay_cut() {
    let (disk, _) = torn();
    let (segment, offset) = frame_of(&Files::of(&disk), 3);
    flip(&disk, segment, offset + 80);
    let store = open(&disk).unwrap();
    assert!(store.recovered().torn.is_some());
    let page = create_page(&store);
    let state = State::of(&store);
    store.close().unwrap();
    // The medium gives the old bytes back: they lie past their incarnation's end, where nobody reads.
    flip(&disk, segment, offset + 80);
    for incarnation in 3..6 {
        let store = open(&disk).unwrap();
        assert_eq!(State::of(&store), state);
        let recovered = store.recovered();
        assert_eq!((recovered.position.incarnation.number, recovered.position.lsn), (incarnation, Lsn(3)));
        assert_eq!(recovered.torn, None);
        store.close().unwrap();
    }
    let store = open(&disk).unwrap();
    assert_eq!(step(&store, page, 9), Lsn(4));
}

#[test]
fn missing_newest_segment_is_refused() {
    let (disk, ..) = stepped(100);
    let whole = Files::of(&disk);
    let (FileName::Segment(last), _) = frame_where(&whole, |header| header.lsn == Lsn(101)) else {
        unreachable!("frames lie in segments")
    };
    let disk = whole.disk();
    for file in whole.segments().into_iter().filter(|file| *file > FileName::Segment(last)) {
        disk.remove(file).unwrap();
    }
    let defect = refused_at(&disk, FileName::Segment(last + 1), 0, Some(Lsn(102)));
    assert_eq!(defect, Defect::Missing);
    // With the last frames' own segment gone as well, the one before it misses its successor.
    remove(&disk, FileName::Segment(last));
    let defect = refused_at(&disk, FileName::Segment(last), 0, None.or(lost_behind(&whole, last - 1)));
    assert_eq!(defect, Defect::Missing);
}

/// The batch after the last one in a segment.
fn lost_behind(files: &Files, segment: u64) -> Option<Lsn> {
    let bytes = &files.0[&FileName::Segment(segment)];
    let lsns = (0..bytes.len() - FrameHeaderRaw::LEN).step_by(16).filter_map(|at| {
        let frame = UncheckedFrame::decode(&bytes[at..]).ok()?;
        (frame.unproven().segment == segment).then_some(frame.unproven().lsn)
    });
    lsns.max().map(Lsn::next)
}

#[test]
fn missing_segment_is_refused() {
    let (disk, ..) = stepped(100);
    let whole = Files::of(&disk);
    let (file, _) = frame_of(&whole, 50);
    let FileName::Segment(number) = file else { unreachable!("frames lie in segments") };
    let lost = lost_behind(&whole, number - 1);

    let disk = whole.disk();
    remove(&disk, file);
    assert_eq!(refused_at(&disk, file, 0, lost), Defect::Missing);

    let (other, ..) = stepped(100);
    let disk = whole.disk();
    disk.damage(file, 0, &other.bytes(file).unwrap());
    assert_eq!(refused_at(&disk, file, 0, lost), Defect::Foreign);

    let disk = whole.disk();
    disk.damage_len(file, 8192);
    let defect = refused_at(&disk, file, 0, lost);
    assert!(matches!(defect, Defect::Mismatch { what: "segment's length", .. }), "{defect}");

    let disk = whole.disk();
    let next = FileName::Segment(number + 1);
    disk.damage(file, 0, &whole.0[&next]);
    disk.damage(next, 0, &whole.0[&file]);
    let defect = refused_at(&disk, file, 0, lost);
    assert!(matches!(defect, Defect::Mismatch { what: "segment's number", .. }), "{defect}");
}

#[test]
fn bad_segment_header_is_refused() {
    let (disk, ..) = stepped(100);
    open(&disk).unwrap().close().unwrap();
    let whole = Files::of(&disk);
    let survey = Survey::read(&whole).unwrap();
    let openings: Vec<u64> = survey.log.line().iter().map(|(segment, _)| *segment).collect();
    let with_frames = survey.log.segments().iter().filter(|(_, segment)| segment.frames.is_some());
    let with_frames: Vec<u64> = with_frames.map(|(number, _)| *number).collect();
    assert!(openings.len() == 2 && with_frames.len() > 3, "{openings:?} {with_frames:?}");
    for number in with_frames {
        let disk = whole.disk();
        flip(&disk, FileName::Segment(number), 20);
        let lost = if openings.contains(&number) { None } else { lost_behind(&whole, number - 1) };
        let defect = refused_at(&disk, FileName::Segment(number), 0, lost);
        assert!(matches!(defect, Defect::Checksum { what: "segment header", .. }), "{defect}");
    }
}

#[test]
fn bad_header_of_empty_segment_is_harmless() {
    let (disk, _, state) = stepped(3);
    let newest = *Files::of(&disk).segments().last().unwrap();
    flip(&disk, newest, 20);
    let store = open(&disk).unwrap();
    assert_eq!(State::of(&store), state);
    assert_eq!(store.recovered().torn, None);
    let [harmless] = &store.recovered().harmless[..] else { panic!("{:?}", store.recovered().harmless) };
    assert_eq!((harmless.file, harmless.offset), (newest, 0));
    store.close().unwrap();
    let store = open(&disk).unwrap();
    assert_eq!(State::of(&store), state);
    assert_eq!(store.recovered().harmless, []);
}

#[test]
fn crash_before_the_rename_changes_nothing() {
    let (disk, _) = torn();
    let state = State::of(&open(&Files::of(&disk).disk()).unwrap());
    let disk = Files::of(&disk).disk();
    let from = disk.events();
    let store = open(&disk).unwrap();
    let id = store.id();
    let plan = Plan { events: from..disk.events(), images_max: 16, ..Plan::default() };
    drop(store);
    let (mut before, mut after) = (0, 0);
    let mut check = |image: remanent::disk::sim::Image| {
        let name = image.to_string();
        let survey = Survey::read(&image.disk).unwrap();
        let number = survey.log.newest().unwrap().number;
        *(if number == 1 { &mut before } else { &mut after }) += 1;
        let store = open(&image.disk).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(State::of(&store), state, "{name}");
        assert_eq!(store.id(), id);
        let recovered = store.recovered();
        assert_eq!(recovered.position.incarnation.number, number + 1, "{name}");
        assert_eq!((recovered.position.lsn, &recovered.torn), (Lsn(3), &None), "{name}");
    };
    disk.kill_images(&plan, &mut check);
    disk.power_images(&plan, &mut check);
    assert!(before > 20 && after > 0, "{before} before the rename, {after} after it");
}

/// The tests that the decision table names.
fn tests_of_the_table(source: &str) -> BTreeSet<String> {
    let rows = source.lines().filter_map(|line| line.strip_prefix("//! | "));
    let cells = rows.filter_map(|row| row.trim_end_matches([' ', '|']).rsplit_once('|'));
    cells.filter_map(|(_, last)| Some(last.trim().strip_prefix('`')?.strip_suffix('`')?.to_owned())).collect()
}

/// The tests of a source file.
fn tests_of(source: &str) -> BTreeSet<String> {
    let after = source.split("#[test]\nfn ").skip(1);
    after.filter_map(|text| Some(text.split_once('(')?.0.to_owned())).collect()
}

#[test]
fn every_row_of_the_table_has_its_test() {
    let read =
        |path: &str| std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap();
    let table = tests_of_the_table(&read("src/recovery/mod.rs"));
    let mut tests = tests_of(&read("tests/it/recovery.rs"));
    assert!(
        tests.remove("every_row_of_the_table_has_its_test") && tests.remove("a_row_without_a_test_is_found")
    );
    assert!(table.len() > 20, "the table is not recognized: {table:?}");
    assert_eq!(table, tests);
}

#[test]
fn a_row_without_a_test_is_found() {
    let table = "//! # Head\n//! | a | b | test |\n//! |---|---|---|\n//! | x | y | `no_such_row` |\n";
    assert_eq!(tests_of_the_table(table), BTreeSet::from(["no_such_row".to_owned()]));
    assert_eq!(tests_of("#[test]\nfn a_row() {}\nfn helper() {}"), BTreeSet::from(["a_row".to_owned()]));
}
