//! Restores from damaged files fail and change nothing.

use super::*;

fn flip(disk: &SimDisk, file: FileName, offset: usize) {
    let byte = disk.bytes(file).unwrap()[offset];
    disk.damage(file, offset as u64, &[byte ^ 0x10]);
}

/// Asserts that a restore fails because of damage, and that the store continues to work.
fn check_refused(disk: &SimDisk, store: &Store, id: SnapshotId, pages: &[PageId]) {
    let (lsn, state, before) = (store.lsn(), State::of(store), Files::of(disk));
    let refused = store.restore(remanent::StatePoint::Snapshot(id)).unwrap_err();
    assert!(matches!(refused, Error::Damaged(_)), "{refused}");
    assert_eq!(store.lsn(), lsn, "nothing was logged");
    assert!(State::of(store) == state, "no page changed");
    let names = |files: &Files| files.names(|file| matches!(file, FileName::Pages(_) | FileName::Table(_)));
    assert_eq!(names(&Files::of(disk)), names(&before), "nothing is left of it");
    change(store, pages, 77);
    assert!(State::of(store) != state, "the store goes on");
}

#[test]
fn restore_from_damaged_image_is_refused() {
    let disk = SimDisk::new();
    let (store, pages) = store_of(&disk, small(), 3);
    let first = store.snapshot_with(remanent::SnapshotOptions::new().name("before")).unwrap();
    change(&store, &pages, 1);
    let whole = Survey::read(&Files::of(&disk)).unwrap().snapshot(first.id).unwrap();
    let image = whole.entries[0].image.unwrap();
    flip(&disk, FileName::Pages(image.file), image.offset as usize + 9);
    check_refused(&disk, &store, first.id, &pages);
    let state = State::of(&store);
    store.close().unwrap();
    // The log from the beginning replaces the snapshot.
    assert!(State::of(&open_with(&disk, small()).unwrap()) == state);
}

/// The restored state is computed from an earlier restore, whose table is damaged.
#[test]
fn restore_from_damaged_table_is_refused() {
    let disk = SimDisk::new();
    let (store, pages) = store_of(&disk, small(), 3);
    let first = store.snapshot_with(remanent::SnapshotOptions::new().name("before")).unwrap();
    change(&store, &pages, 1);
    store.restore(remanent::StatePoint::Snapshot(first.id)).unwrap();
    let restored = store.lsn();
    change(&store, &pages, 2);
    let files = Files::of(&disk);
    let [table] = files.names(|file| matches!(file, FileName::Table(_)))[..] else { panic!("one table") };
    let half = files.0[&table].len() / 2;
    [20, half + 20].into_iter().for_each(|at| flip(&disk, table, at));
    // The snapshot of the restored state needs no table. Without this snapshot, the table is needed.
    let newest = store.snapshots().last().unwrap().id;
    let manifest = FileName::Manifest(newest.0);
    let half = files.0[&manifest].len() / 2;
    [20, half + 20].into_iter().for_each(|at| flip(&disk, manifest, at));

    let (lsn, state) = (store.lsn(), State::of(&store));
    let refused = store.restore(remanent::StatePoint::Lsn(restored)).unwrap_err();
    assert!(matches!(refused, Error::Damaged(_)), "{refused}");
    assert!((store.lsn(), State::of(&store)) == (lsn, state), "nothing changed");
    assert_eq!(Files::of(&disk).names(|file| matches!(file, FileName::Table(_))), [table]);
    change(&store, &pages, 3);
}
