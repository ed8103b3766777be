//! Histories of archived stores: every restore returns a state of the store.

use std::time::Duration;

use remanent::{Ack, SnapshotOptions};

use crate::bed::{Bed, archive_steps, check, pages, pause, step, step_of};

#[test]
fn archived_batches_survive_loss_of_machine() {
    let bed = Bed::new();
    let store = bed.open();
    let pages = pages(&store);
    for round in 1..=4 {
        archive_steps(&store, &pages, 7);
        assert!(bed.restored_step(&format!("restored-{round}")) >= 7 * round);
        if round == 2 {
            store.snapshot().unwrap();
        }
    }
    let archive = store.stats().archive.unwrap();
    assert_eq!((archive.archived, archive.failures, archive.gaps), (store.lsn(), 0, 0));
    assert!(archive.term > 0 && archive.runs >= 4, "{archive:?}");
}

/// The interval of the archive is one hour, so only the close archives.
#[test]
fn close_archives_every_batch() {
    let bed = Bed::new();
    let options = || {
        let archive = bed.archive().interval(Duration::from_secs(3600));
        crate::bed::plain_options(Default::default()).archive(archive)
    };
    for life in 1..=3 {
        let store = options().open(bed.store()).unwrap();
        let pages = pages(&store);
        (0..10).for_each(|_| _ = step(&store, &pages).unwrap());
        store.close().unwrap();
        assert_eq!(bed.restored_step("restored"), 10 * life);
    }
}

#[test]
fn batches_are_archived_without_a_waiting_caller() {
    let bed = Bed::new();
    let store = bed.open();
    let pages = pages(&store);
    let ticket = step(&store, &pages).unwrap();
    let mut polls = 0;
    while !ticket.is_acknowledged(Ack::Archived).unwrap() {
        pause(Duration::from_millis(10));
        polls += 1;
        assert!(polls < 6000, "{:?}", store.stats().archive);
    }
    assert!(ticket.is_acknowledged(Ack::Durable).unwrap());
    assert_eq!(bed.restored_step("restored"), 1);
}

/// A restored directory continues the archive. The directory of the lost machine cannot.
#[test]
fn restored_store_continues_archive() {
    let bed = Bed::new();
    let store = bed.open();
    let created = pages(&store);
    archive_steps(&store, &created, 12);
    store.close().unwrap();
    for life in 1..=3 {
        let name = format!("machine-{life}");
        bed.restore(&name).unwrap();
        let store = bed.options().open(bed.path(&name)).unwrap();
        assert_eq!(check(&store), 12 * life);
        archive_steps(&store, &pages(&store), 12);
        store.close().unwrap();
    }
    assert_eq!(bed.restored_step("restored"), 48);
}

/// A close writes the position of the end to the hint. A wrong hint does not change which end is found.
#[test]
fn close_writes_hint_and_wrong_hint_is_harmless() {
    let bed = Bed::new();
    let store = bed.open();
    let created = pages(&store);
    archive_steps(&store, &created, 4);
    store.close().unwrap();
    let newest = bed.bucket().join("newest");
    let hint = remanent_archive::object::Hint::decode(&std::fs::read(&newest).unwrap(), None).unwrap();
    let objects = std::fs::read_dir(bed.bucket().join("line")).unwrap().count() as u64;
    assert_eq!((hint.end, hint.bound), (objects, 0));
    let old = std::fs::read(&newest).unwrap();
    let store = bed.open();
    archive_steps(&store, &created, 4);
    store.close().unwrap();
    for bytes in [&old[..], b"no hint"] {
        std::fs::write(&newest, bytes).unwrap();
        assert_eq!(bed.restored_step("restored"), 8);
    }
}

#[test]
fn opens_without_commits_leave_no_gap() {
    let bed = Bed::new();
    (0..3).for_each(|_| bed.open().close().unwrap());
    let store = bed.open();
    let created = pages(&store);
    archive_steps(&store, &created, 4);
    let archive = store.stats().archive.unwrap();
    assert_eq!((archive.gaps, archive.failures, archive.snapshots), (0, 0, 0));
    store.close().unwrap();
    (0..3).for_each(|_| bed.open().close().unwrap());
    let store = bed.open();
    archive_steps(&store, &created, 4);
    let archive = store.stats().archive.unwrap();
    assert_eq!((archive.gaps, archive.failures, archive.snapshots), (0, 0, 0));
    assert_eq!(bed.restored_step("restored"), 8);
}

/// The archive follows a moved store, and ignores another store at the old path.
#[test]
fn moved_store_is_archived() {
    let bed = Bed::new();
    let store = bed.open();
    let created = pages(&store);
    archive_steps(&store, &created, 3);
    let moved = bed.path("moved");
    std::fs::rename(bed.store(), &moved).unwrap();
    let other = crate::bed::plain_options(Default::default()).open(bed.store()).unwrap();
    pages(&other);
    archive_steps(&store, &created, 3);
    assert_eq!(bed.restored_step("restored"), 6);
    assert!(!bed.store().join("ARCHIVE").exists() && moved.join("ARCHIVE").exists());
}

/// Snapshots are archived often enough to bound the number of runs that a restore reads, and the objects before them
/// are deleted.
#[test]
fn snapshot_is_archived_after_many_runs() {
    let bed = Bed::new();
    let store = bed.open();
    let pages = pages(&store);
    archive_steps(&store, &pages, 5);
    let first = store.snapshot_with(SnapshotOptions::new().name("first")).unwrap();
    assert!(store.wait_archived(first.id, None).unwrap());
    let count = |folder: &str| std::fs::read_dir(bed.bucket().join(folder)).map_or(0, Iterator::count);
    while count("bound") < 2 {
        archive_steps(&store, &pages, 1);
        assert!(step_of(&store) < 4000, "{:?}", store.stats().archive);
    }
    // This step is archived only after the objects below the first boundary were deleted.
    archive_steps(&store, &pages, 1);
    assert_eq!(store.stats().archive.unwrap().snapshots, 2);
    assert!(count("line") < 2500, "{} objects", count("line"));
    assert_eq!(bed.restored_step("restored"), step_of(&store));
    // The catalog of the named snapshot is below the objects that were deleted.
    assert_eq!(bed.restored_names("restored"), [("first".to_owned(), 5)].into());
}
