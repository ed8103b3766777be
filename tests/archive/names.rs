//! Named snapshots of archived stores.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use remanent::error::ArchiveErrorKind;
use remanent::options::Create;
use remanent::{Error, Retention, SnapshotId, SnapshotOptions, Store};

use crate::bed::{Bed, archive_steps, check, pages, pause, plain_options, step, step_of};

fn name(store: &Store, name: &str) -> SnapshotId {
    store.snapshot_with(SnapshotOptions::new().name(name)).unwrap().id
}

/// Takes a named snapshot, and waits until it is archived.
fn archive_name(store: &Store, text: &str) {
    assert!(store.wait_archived(name(store, text), None).unwrap());
}

/// Gives up a name. Retries while the archive holds the snapshot.
fn give_up(store: &Store, text: &str) {
    let is_kept = || store.snapshots().iter().any(|info| info.name.as_deref() == Some(text));
    while is_kept() {
        store.prune(&store.retention().give_up(text)).unwrap();
        pause(Duration::from_millis(10));
    }
}

fn steps<const N: usize>(expected: [(&str, u64); N]) -> BTreeMap<String, u64> {
    expected.map(|(name, step)| (name.to_owned(), step)).into()
}

#[test]
fn named_snapshots_survive_loss_of_machine() {
    let bed = Bed::new();
    let store = bed.open();
    let pages = pages(&store);
    archive_steps(&store, &pages, 7);
    archive_name(&store, "seven");
    archive_steps(&store, &pages, 5);
    // This call returns before the snapshot is verified.
    let taken = store.snapshot_with(SnapshotOptions::new().name("twelve").only_published()).unwrap();
    assert!(store.wait_archived(taken.id, None).unwrap());
    archive_steps(&store, &pages, 2);
    assert_eq!(bed.restored_names("restored"), steps([("seven", 7), ("twelve", 12)]));
    let archive = store.stats().archive.unwrap();
    assert_eq!((archive.named, archive.failures), (2, 0));
}

#[test]
fn close_archives_named_snapshots() {
    let bed = Bed::new();
    for life in 1..=3 {
        let archive = bed.archive().interval(Duration::from_secs(3600));
        let store = plain_options(Default::default()).archive(archive).open(bed.store()).unwrap();
        let pages = pages(&store);
        (0..4).for_each(|_| _ = step(&store, &pages).unwrap());
        name(&store, &format!("life {life}"));
        store.close().unwrap();
        assert_eq!(bed.restored_names("restored").len(), life);
    }
}

/// When a name is given up, the store removes it from the archive, either immediately or at its next open.
#[test]
fn given_up_names_are_removed_from_archive() {
    let bed = Bed::new();
    let store = bed.open();
    let pages = pages(&store);
    archive_steps(&store, &pages, 3);
    archive_name(&store, "a");
    archive_name(&store, "b");
    archive_steps(&store, &pages, 1);
    give_up(&store, "a");
    archive_name(&store, "c");
    assert_eq!(bed.restored_names("restored"), steps([("b", 3), ("c", 4)]));
    give_up(&store, "b");
    store.close().unwrap();
    assert_eq!(bed.restored_names("restored"), steps([("c", 4)]));
    // A name that was given up can be used again.
    let store = bed.open();
    archive_steps(&store, &pages, 1);
    store.snapshot().unwrap();
    give_up(&store, "c");
    archive_name(&store, "c");
    store.close().unwrap();
    assert_eq!(bed.restored_names("restored"), steps([("c", 5)]));
}

#[test]
fn restored_store_continues_names() {
    let bed = Bed::new();
    let store = bed.open();
    archive_steps(&store, &pages(&store), 3);
    archive_name(&store, "start");
    store.close().unwrap();
    for life in 1..=3 {
        let path = format!("machine-{life}");
        bed.restore(&path).unwrap();
        let store = bed.options().open(bed.path(&path)).unwrap();
        assert_eq!(check(&store), 3 * life);
        let names = store.snapshots().iter().filter(|info| info.name.is_some()).count();
        assert_eq!(names as u64, life);
        archive_steps(&store, &pages(&store), 3);
        archive_name(&store, &format!("life {life}"));
        store.close().unwrap();
    }
    let restored = bed.restored_names("restored");
    assert_eq!(restored, steps([("start", 3), ("life 1", 6), ("life 2", 9), ("life 3", 12)]));
}

/// A restored store can restore a named snapshot by its name, and this restore is archived as well.
#[test]
fn restored_store_can_restore_named_snapshot() {
    let bed = Bed::new();
    let store = bed.open();
    let created = pages(&store);
    archive_steps(&store, &created, 4);
    archive_name(&store, "good");
    archive_steps(&store, &created, 5);
    store.close().unwrap();
    bed.restore("second").unwrap();
    let store = bed.options().open(bed.path("second")).unwrap();
    store.restore("name:good".parse::<remanent::StatePoint>().unwrap()).unwrap();
    assert_eq!(check(&store), 4);
    archive_steps(&store, &pages(&store), 1);
    assert_eq!(bed.restored_step("restored"), 5);
    assert_eq!(bed.restored_names("restored"), steps([("good", 4)]));
}

#[test]
fn waits_for_other_snapshots_are_refused() {
    let bed = Bed::new();
    let store = bed.open();
    archive_steps(&store, &pages(&store), 2);
    let unnamed = store.snapshot().unwrap().id;
    let kind = |error: Error| match error {
        Error::Archive(error) => error.kind,
        error => panic!("{error:?}"),
    };
    assert_eq!(kind(store.wait_archived(unnamed, None).unwrap_err()), ArchiveErrorKind::Unnamed);
    let error = store.wait_archived(SnapshotId(99), None).unwrap_err();
    assert!(matches!(error, Error::NoSuchState(_)), "{error:?}");
    let plain = plain_options(Create::IfEmpty).open(bed.path("plain")).unwrap();
    pages(&plain);
    let named = name(&plain, "a");
    assert_eq!(kind(plain.wait_archived(named, None).unwrap_err()), ArchiveErrorKind::NoArchive);
}

/// While the bucket is unreachable, a wait for a named snapshot ends by its timeout or when the snapshot is removed.
#[test]
fn waits_end_while_bucket_is_unreachable() {
    let bed = Bed::new();
    let store = bed.open();
    let pages = pages(&store);
    archive_steps(&store, &pages, 2);
    std::fs::rename(bed.bucket(), bed.path("away")).unwrap();
    let (a, b) = (name(&store, "a"), name(&store, "b"));
    assert!(!store.wait_archived(a, Some(Duration::from_millis(30))).unwrap());
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| store.wait_archived(a, None));
        give_up(&store, "a");
        let error = waiter.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::NoSuchState(_)), "{error:?}");
    });
    std::fs::rename(bed.path("away"), bed.bucket()).unwrap();
    assert!(store.wait_archived(b, None).unwrap());
    assert_eq!(bed.restored_names("restored"), steps([("b", 2)]));
    assert_eq!(step_of(&store), 2);
}

/// Names are given up while newer snapshots are being archived. A later open must know that all of these names were
/// given up.
#[test]
fn names_may_be_given_up_during_archiving() {
    let bed = Bed::new();
    for life in 0..3 {
        let store = bed.open();
        let pages = pages(&store);
        for number in 0..30 {
            step(&store, &pages).unwrap();
            name(&store, &format!("{life} {number}"));
            if number > 1 {
                // Does nothing while the archive holds the snapshot.
                store.prune(&store.retention().give_up(format!("{life} {}", number - 2))).unwrap();
            }
        }
        store.close().unwrap();
    }
    let store = bed.open();
    let (mut names, mut given_up) = (Vec::new(), 90);
    for info in store.snapshots() {
        if let Some(name) = info.name {
            assert!(store.wait_archived(info.id, None).unwrap());
            names.push(name);
            given_up -= 1;
        }
    }
    assert!(given_up > 0);
    archive_steps(&store, &pages(&store), 1);
    store.close().unwrap();
    names.sort_unstable();
    assert_eq!(bed.restored_names("restored").into_keys().collect::<Vec<_>>(), names);
}

/// The archive keeps a named snapshot that the directory has lost because of damage, however often the store is opened.
#[test]
fn archive_keeps_lost_named_snapshots() {
    let bed = Bed::new();
    // The log after the older snapshot is kept, so that the store can be opened without the newer one.
    let open = || bed.options().retention(Retention::new().snapshots_kept(9)).open(bed.store()).unwrap();
    let store = open();
    let pages = pages(&store);
    archive_steps(&store, &pages, 2);
    archive_name(&store, "kept");
    archive_steps(&store, &pages, 2);
    let lost = name(&store, "lost");
    assert!(store.wait_archived(lost, None).unwrap());
    store.close().unwrap();
    fs::remove_file(bed.store().join("snapshots").join(format!("{:016x}.manifest", lost.0))).unwrap();
    for _ in 0..3 {
        let store = open();
        assert!(!store.snapshots().iter().any(|info| info.id == lost));
        archive_steps(&store, &pages, 1);
        archive_name(&store, &format!("after {}", step_of(&store)));
        store.close().unwrap();
    }
    let expected = steps([("after 5", 5), ("after 6", 6), ("after 7", 7), ("kept", 2), ("lost", 4)]);
    assert_eq!(bed.restored_names("restored"), expected);
}
