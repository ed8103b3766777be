//! The rows about damaged, missing and unrecorded snapshots.

use remanent::error::{Defect, FileName};
use remanent::testing::sim_disk::{Moment, Operation, SimDisk};
use remanent::{Error, PageId, SnapshotId, SnapshotOptions};
use remanent_format::state::survey::Survey;

use super::bench::{create_page, flip, refused_at, remove, step, with_snapshots};
use crate::files::{Files, State, open};

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
    // The log records that the snapshot existed. No other file would show that a kept snapshot is missing.
    remove(&disk, manifest);
    assert_eq!(falls_back(&disk), [manifest]);

    // Both snapshots are damaged, and the log after them does not start at the beginning.
    let disk = whole.disk();
    disk.damage_len(manifest, 100);
    disk.damage_len(FileName::Manifest(1), 100);
    let defect = refused_at(&disk, manifest, 0, None);
    assert!(matches!(defect, Defect::Truncated { .. }), "{defect}");
}

/// Only the manifest contains the name of a snapshot. Recovery starts from a newer snapshot, and the record
/// in the log reveals that the manifest is missing.
#[test]
fn missing_manifest_of_a_kept_snapshot_is_reported() {
    let disk = SimDisk::new();
    let store = open(&disk).unwrap();
    let page = create_page(&store);
    store.snapshot_with(SnapshotOptions::new().name("good")).unwrap();
    for number in 0..3 {
        step(&store, page, number);
        store.snapshot().unwrap();
    }
    store.close().unwrap();
    let named = FileName::Manifest(1);
    remove(&disk, named);
    let store = open(&disk).unwrap();
    let harmless = &store.recovered().harmless;
    assert!(
        harmless.iter().any(|damage| (damage.file, &damage.defect) == (named, &Defect::Missing)),
        "{harmless:?}"
    );
    assert!(store.snapshots().iter().all(|info| info.name.is_none()));
    store.close().unwrap();
    // The open has written a new record.
    assert_eq!(open(&disk).unwrap().recovered().harmless, []);
}

/// Returns a closed store with four snapshots, each of which follows the previous one, and its last state.
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
fn one_bad_copy_of_link_is_repaired() {
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
fn lost_link_loses_its_snapshot() {
    let (whole, state) = with_a_chain();
    for link in 1..=4 {
        let disk = whole.disk();
        remove(&disk, FileName::Manifest(link));
        // Recovery can start from a snapshot that does not depend on the link, if the log after that snapshot
        // is kept.
        match open(&disk) {
            Ok(store) => {
                assert_eq!(
                    (store.recovered().snapshot, State::of(&store)),
                    (link.checked_sub(1).filter(|id| *id > 0).map(SnapshotId), state.clone())
                );
                // Later snapshots are not based on a missing link.
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
fn links_kept_for_other_snapshots_are_not_listed() {
    let (whole, state) = with_a_chain();
    assert_eq!(whole.names(|file| matches!(file, FileName::Manifest(_))).len(), 4);
    let store = open(&whole.disk()).unwrap();
    let kept: Vec<SnapshotId> = store.snapshots().iter().map(|info| info.id).collect();
    assert_eq!(kept, [SnapshotId(3), SnapshotId(4)]);
    assert_eq!(State::of(&store), state);
}

#[test]
fn damaged_image_makes_open_use_older_snapshot() {
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
        let [skipped] = &recovered.harmless[..] else { panic!("{:?}", recovered.harmless) };
        assert_eq!((skipped.file, skipped.offset), (file, image.offset));
        // The next snapshot has another number and is complete.
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
fn unrecorded_manifest_is_published_again() {
    let disk = SimDisk::new();
    let store = open(&disk).unwrap();
    let page = create_page(&store);
    step(&store, page, 1);
    let state = State::of(&store);
    store.snapshot().unwrap();
    store.close().unwrap();
    let manifest = FileName::Manifest(1);
    // The process is killed directly after the rename. The name exists only in the page cache, and no seal
    // records it.
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
    assert_eq!(dead.calls(Operation::ReadProven), 0, "no thread had read its images back");
    let cut = dead.after_power_cut();
    assert_eq!(cut.bytes(manifest), Some(whole));
    let store = open(&cut).unwrap();
    assert_eq!(store.recovered().snapshot, Some(SnapshotId(1)));
    assert_eq!(State::of(&store), state);
    // A seal now records the snapshot, so it is not published again.
    let published = cut.history().iter().filter(|event| event.ends_with(&format!("to {manifest}"))).count();
    assert_eq!(published, 0);
    assert!(cut.calls(Operation::ReadProven) > 0, "its images were read back by the open before");
}
