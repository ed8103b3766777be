//! Named snapshots in archives.

use remanent_archive::line::{Archive, Pruned, audit, status};
use remanent_archive::object::ObjectKey;
use remanent_archive::rules::Rules;
use remanent_archive::testing::world::Effect;

use crate::bed::{Bed, Life, block_on, open_state};

/// Returns the names of the named snapshots in a summary of the archive.
fn listed(bed: &Bed) -> Vec<String> {
    let bucket = bed.bucket();
    let archive = Archive { bucket: &bucket, nonces: &bucket, rules: Rules::default() };
    block_on(status(archive)).unwrap().named.into_iter().map(|kept| kept.name).collect()
}

/// Boundaries pass the catalog of a named snapshot, and the other objects below them are deleted.
#[test]
fn named_snapshot_is_kept_below_boundaries() {
    let bed = Bed::new(21);
    let mut life = Life::new(21);
    let store = life.work(6);
    life.name(&store, "first");
    store.close().unwrap();
    bed.push(&life.path).unwrap();
    let mut boundaries = 0;
    let mut removed = 0;
    for _ in 0..5 {
        let store = life.work(4);
        store.snapshot().unwrap();
        store.close().unwrap();
        if let Pruned::Boundary { swept, .. } = bed.push(&life.path).unwrap().pruned {
            boundaries += 1;
            removed += swept.line_objects;
        }
        let (state, names) = bed.restored();
        life.check_names(&names, "after a push");
        assert!(state == life.states[&state.lsn]);
    }
    assert!(boundaries >= 4 && removed > 10, "{boundaries} boundaries, {removed} objects");
    assert_eq!(listed(&bed), ["first"]);

    // After its name is given up, the objects of the snapshot are deleted.
    let position = bed.catalog_positions()[0];
    assert!(bed.has(ObjectKey::Line(position)));
    for round in 0..4 {
        let store = life.work(3);
        if round == 0 {
            life.give_up(&store, "first");
        }
        store.snapshot().unwrap();
        store.close().unwrap();
        bed.push(&life.path).unwrap();
        assert_eq!(bed.restored().1.len(), 0);
    }
    assert_eq!(listed(&bed), [""; 0]);
    assert!(!bed.has(ObjectKey::Line(position)), "the catalog of the snapshot was not deleted");
}

/// A name is given up between two pushes and used for another snapshot.
#[test]
fn reused_name_belongs_to_newer_snapshot() {
    let bed = Bed::new(22);
    let mut life = Life::new(22);
    for _ in 0..3 {
        let store = life.work(4);
        if !life.names.is_empty() {
            store.snapshot().unwrap();
            life.give_up(&store, "best");
        }
        life.name(&store, "best");
        store.close().unwrap();
        bed.push(&life.path).unwrap();
        life.check_names(&bed.restored().1, "after a push");
        assert_eq!(listed(&bed), ["best"]);
    }
}

/// A restored directory contains the named snapshots. It continues the archive with a new one and without one that was
/// given up.
#[test]
fn restored_directory_continues_names() {
    let bed = Bed::new(23);
    let mut life = Life::new(23);
    let store = life.work(5);
    life.name(&store, "a");
    life.name(&store, "b");
    store.close().unwrap();
    bed.push(&life.path).unwrap();
    for generation in 0..3 {
        let mut next = Life::new(30 + generation);
        std::fs::create_dir_all(&next.path).unwrap();
        bed.restore(&next.path).unwrap();
        next.states = life.states.clone();
        next.names = life.names.clone();
        let state = open_state(&next.path);
        assert!(state == life.states[&state.lsn]);
        let store = next.work(3);
        let oldest = next.names.keys().next().unwrap().clone();
        next.give_up(&store, &oldest);
        next.name(&store, &format!("generation {generation}"));
        if generation == 1 {
            store.snapshot().unwrap();
        }
        store.close().unwrap();
        let pushed = bed.push(&next.path).unwrap();
        assert_eq!(pushed.named, 1);
        next.check_names(&bed.restored().1, &format!("generation {generation}"));
        life = next;
    }
}

/// The `redo` of a snapshot taken right after an open is at the start of an incarnation without batches.
#[test]
fn names_in_incarnations_without_batches_are_restored() {
    for with_snapshot in [false, true] {
        let bed = Bed::new(24);
        let mut life = Life::new(24);
        let store = life.work(4);
        life.name(&store, "before the close");
        if with_snapshot {
            store.snapshot().unwrap();
        }
        store.close().unwrap();
        bed.push(&life.path).unwrap();
        for round in 0..3 {
            let store = life.work(0);
            if with_snapshot && round == 1 {
                store.snapshot().unwrap();
            }
            life.name(&store, &format!("after open {round}"));
            store.close().unwrap();
            bed.push(&life.path).unwrap();
            life.check_names(&bed.restored().1, &format!("round {round}"));
        }
        life.work(3).close().unwrap();
        bed.push(&life.path).unwrap();
        let (state, names) = bed.restored();
        life.check_names(&names, "after more batches");
        assert!(state == life.states[&state.lsn]);
    }
}

/// An older copy of a directory lacks a named snapshot of the archive. A takeover removes the snapshot from the
/// archive, because the copy reuses the numbers of its files.
#[test]
fn takeover_removes_unknown_names() {
    let bed = Bed::new(25);
    let mut life = Life::new(25);
    let store = life.work(4);
    life.name(&store, "known");
    store.close().unwrap();
    bed.push(&life.path).unwrap();
    let mut copy = Life::new(26);
    crate::bed::copy_directory(&life.path, &copy.path);
    copy.states = life.states.clone();
    copy.names = life.names.clone();
    let store = life.work(0);
    life.name(&store, "unknown");
    store.close().unwrap();
    bed.push(&life.path).unwrap();
    assert_eq!(listed(&bed), ["known", "unknown"]);

    let store = copy.work(0);
    copy.name(&store, "of the copy");
    store.close().unwrap();
    let error = bed.push(&copy.path).unwrap_err();
    assert!(matches!(error, remanent_archive::Error::Diverged { .. }), "{error}");
    bed.push_taking_over(&copy.path).unwrap();
    copy.check_names(&bed.restored().1, "after the takeover");
}

/// If the catalog of a kept snapshot is missing, nothing is deleted, and an audit reports the catalog.
#[test]
fn missing_catalog_stops_deletes_and_is_reported() {
    let bed = Bed::new(27);
    let mut life = Life::new(27);
    let store = life.work(4);
    life.name(&store, "first");
    store.close().unwrap();
    bed.push(&life.path).unwrap();
    for round in 0..4 {
        if round == 2 {
            let key = ObjectKey::Line(bed.catalog_positions()[0]);
            bed.world.borrow_mut().apply(&Effect::Delete(key));
        }
        let store = life.work(3);
        store.snapshot().unwrap();
        store.close().unwrap();
        let pushed = bed.push(&life.path).unwrap();
        let Pruned::Boundary { swept, .. } = pushed.pruned else { continue };
        assert!(round < 2 || swept == Default::default(), "round {round}: {swept:?}");
    }
    let bucket = bed.bucket();
    let archive = Archive { bucket: &bucket, nonces: &bucket, rules: Rules::default() };
    let audited = block_on(audit(archive, 1.0)).unwrap();
    let damaged: Vec<ObjectKey> = audited.damaged.iter().map(|damaged| damaged.key).collect();
    assert_eq!(damaged, [ObjectKey::Line(bed.catalog_positions()[0])]);
    let scratch = tempfile::tempdir().unwrap();
    let error = bed.copy().restore(scratch.path()).unwrap_err();
    assert!(matches!(error, remanent_archive::Error::Damaged { key, .. } if key == damaged[0]), "{error}");
}

/// An audit and a restore detect damage to each data object of a named snapshot.
#[test]
fn damage_of_named_snapshots_is_reported() {
    let bed = Bed::new(28);
    let mut life = Life::new(28);
    let store = life.work(6);
    life.name(&store, "first");
    store.close().unwrap();
    bed.push(&life.path).unwrap();
    let store = life.work(2);
    store.snapshot().unwrap();
    store.close().unwrap();
    bed.push(&life.path).unwrap();
    let bucket = bed.bucket();
    let archive = Archive { bucket: &bucket, nonces: &bucket, rules: Rules::default() };
    assert_eq!(block_on(audit(archive, 1.0)).unwrap().damaged, []);
    for key in bed.data_of_catalog() {
        let damaged = bed.copy();
        damaged.world.borrow_mut().apply(&Effect::Delete(ObjectKey::Data(key)));
        let bucket = damaged.bucket();
        let archive = Archive { bucket: &bucket, nonces: &bucket, rules: Rules::default() };
        let audited = block_on(audit(archive, 1.0)).unwrap();
        assert_eq!(audited.damaged.len(), 1, "{:?}", audited.damaged);
        let scratch = tempfile::tempdir().unwrap();
        damaged.restore(scratch.path()).unwrap_err();
    }
}
