//! Snapshots and restores lead to the same state wherever replay starts, and never to a wrong one.

use std::io;

use remanent_format::frame::VerifiedSnapshot;
use remanent_format::limits::CHAIN_LINKS_MAX;
use remanent_format::manifest::{Manifest, ManifestKind, Tombstone};
use remanent_format::op::Op;
use remanent_format::state::rebuild::{RebuildOptions, rebuild};
use remanent_format::state::survey::Survey;
use remanent_format::{FileName, Folder, Lsn, Metadata, PageId, Place, ReadAt, SnapshotId, Value};

use crate::maker::{Maker, PAGE, content};
use crate::verdict::{Clean, Refused, check, check_state, four, rebuilt, segment};

#[test]
fn all_starts_recover_the_same_state() {
    let mut maker = four();
    maker.sync().batch();
    for (why, redo, caught, end) in [
        ("exact", 3, 3, 3),
        ("the page was caught late", 1, 3, 4),
        ("the page was caught early", 2, 2, 4),
        ("all was caught late", 1, 4, 4),
    ] {
        let mut with = maker.clone();
        with.snapshot(1, redo, caught, end);
        check(why, &with, &Clean(5));
        let found = rebuilt(&with).unwrap();
        assert_eq!(found.base, Some(SnapshotId(1)), "{why}");
        // The snapshot is sufficient: the log before `redo` may be lost.
        segment(&mut with, 1)[4096..8192].fill(0);
        check(why, &with, &Clean(5));
    }
}

/// A store in which one file is removed after its folder has been listed.
struct RemovedFile<'a> {
    maker: &'a Maker,
    removed: FileName,
}

impl ReadAt for RemovedFile<'_> {
    fn list(&self, folder: Folder) -> io::Result<Vec<String>> {
        self.maker.files.list(folder)
    }

    fn len(&self, file: FileName) -> io::Result<Option<u64>> {
        if file == self.removed { Ok(None) } else { self.maker.files.len(file) }
    }

    fn read_at(&self, file: FileName, offset: u64, out: &mut [u8]) -> io::Result<()> {
        if file == self.removed {
            return Err(io::ErrorKind::NotFound.into());
        }
        self.maker.files.read_at(file, offset, out)
    }
}

#[test]
fn file_removed_after_listing_is_not_damage() {
    let mut maker = four();
    maker.snapshot(1, 2, 2, 2).snapshot(2, 3, 3, 4);
    let removed = RemovedFile { maker: &maker, removed: FileName::Manifest(1) };
    let survey = Survey::read(&removed).unwrap();
    assert_eq!(survey.links.keys().collect::<Vec<_>>(), [&SnapshotId(2)]);
    let rebuilt = rebuild(&removed, &RebuildOptions::default()).unwrap();
    assert_eq!((rebuilt.base, rebuilt.skipped), (Some(SnapshotId(2)), Vec::new()));

    let recycled = RemovedFile { maker: &maker, removed: FileName::Segment(1) };
    let survey = Survey::read(&recycled).unwrap();
    assert!(!survey.log.segments().contains_key(&1));
    assert_eq!(survey.log.chain_break(), None);
}

#[test]
fn damaged_snapshot_is_skipped_without_data_loss() {
    let mut maker = four();
    maker.snapshot(1, 2, 2, 2).snapshot(2, 3, 3, 4);
    type Change = fn(&mut Maker);
    let rows: &[(&str, Option<u64>, usize, Change)] = &[
        ("nothing wrong", Some(2), 0, |_| {}),
        ("one copy damaged", Some(2), 0, |m| manifest_bytes(m, 2)[300] ^= 1),
        ("both copies damaged", Some(1), 1, |m| {
            manifest_bytes(m, 2)[300] ^= 1;
            manifest_bytes(m, 2)[4096 + 300] ^= 1;
        }),
        ("the manifest is cut", Some(1), 1, |m| manifest_bytes(m, 2).truncate(100)),
        ("the manifest has another number", Some(1), 1, |m| {
            *manifest_bytes(m, 2) = manifest_bytes(m, 1).clone();
        }),
        ("a change", Some(2), 0, |m| change(m, 2, 1, 0)),
        ("a change that names the page as the base has it", Some(2), 0, |m| {
            let (image, crc) = (m.manifest(1, 2, 2, 2).entries, manifest_crc(m, 1));
            let kind = ManifestKind::Change { previous: SnapshotId(1), previous_crc: crc };
            let manifest = Manifest { kind, entries: image, ..m.manifest(2, 2, 3, 4) };
            m.publish(FileName::Manifest(2), &manifest);
        }),
        ("a change, and one copy of its base damaged", Some(2), 0, |m| {
            change(m, 2, 1, 0);
            manifest_bytes(m, 1)[300] ^= 1;
        }),
        ("a change that follows another one than the one there", Some(1), 1, |m| change(m, 2, 1, 1)),
        ("a change whose base is lost", None, 2, |m| {
            change(m, 2, 1, 0);
            manifest_bytes(m, 1).clear();
        }),
        ("a change whose base is gone", None, 1, |m| {
            change(m, 2, 1, 0);
            m.files.0.remove(&FileName::Manifest(1));
        }),
        ("a change that begins before its base ends", Some(1), 1, |m| {
            let kind = ManifestKind::Change { previous: SnapshotId(1), previous_crc: manifest_crc(m, 1) };
            let manifest = Manifest { kind, ..m.manifest(2, 1, 3, 4) };
            m.publish(FileName::Manifest(2), &manifest);
        }),
        ("as many links as may be", Some(CHAIN_LINKS_MAX as u64), 0, |m| {
            (2..=CHAIN_LINKS_MAX as u64).for_each(|number| change(m, number, number - 1, 0));
        }),
        ("one link too many", Some(CHAIN_LINKS_MAX as u64), 1, |m| {
            (2..=CHAIN_LINKS_MAX as u64 + 1).for_each(|number| change(m, number, number - 1, 0));
        }),
        ("a table among the snapshots", Some(1), 1, |m| {
            let manifest = Manifest { kind: ManifestKind::Table, ..m.manifest(2, 3, 3, 4) };
            m.publish(FileName::Manifest(2), &manifest);
        }),
        ("another store's manifest", Some(1), 1, |m| {
            let store = remanent_format::StoreId([1; 16]);
            let manifest = Manifest { store, ..m.manifest(2, 3, 3, 4) };
            m.publish(FileName::Manifest(2), &manifest);
        }),
        ("an image is damaged", Some(1), 1, |m| {
            m.files.0.get_mut(&FileName::Pages(2)).unwrap()[4096 + 128] ^= 1;
        }),
        ("an image file is missing", Some(1), 1, |m| _ = m.files.0.remove(&FileName::Pages(2))),
        ("both snapshots are lost", None, 2, |m| {
            m.files.0.remove(&FileName::Pages(1));
            m.files.0.remove(&FileName::Pages(2));
        }),
    ];
    for (why, base, skipped, change) in rows {
        let mut maker = maker.clone();
        change(&mut maker);
        check(why, &maker, &Clean(4));
        let found = rebuilt(&maker).unwrap();
        assert_eq!(found.base, base.map(SnapshotId), "{why}");
        assert_eq!(found.skipped.len(), *skipped, "{why}");
    }
}

/// Turns snapshot `number` into a change that follows `previous`, whose checksum is off by `error`.
fn change(maker: &mut Maker, number: u64, previous: u64, error: u32) {
    let previous_crc = manifest_crc(maker, previous) + error;
    let kind = ManifestKind::Change { previous: SnapshotId(previous), previous_crc };
    let manifest = Manifest { kind, ..maker.manifest(number, if number == 2 { 3 } else { 4 }, 4, 4) };
    maker.publish(FileName::Manifest(number), &manifest);
}

fn manifest_crc(maker: &mut Maker, number: u64) -> u32 {
    u32::from_le_bytes(manifest_bytes(maker, number)[252..256].try_into().unwrap())
}

fn manifest_bytes(maker: &mut Maker, number: u64) -> &mut Vec<u8> {
    maker.files.0.get_mut(&FileName::Manifest(number)).expect("a manifest")
}

#[test]
fn manifest_end_is_a_durable_mark() {
    let mut maker = four();
    maker.snapshot(1, 2, 4, 4);
    maker.frame_at(4)[90] ^= 1;
    check("a batch below the end is damaged", &maker, &Refused("at offset 8192 (lsn 4): payload checksum"));
    segment(&mut maker, 2)[8192..].fill(0);
    check("a batch below the end is gone", &maker, &Refused("at offset 4304 (lsn 4)"));
}

#[test]
fn the_last_seal_names_the_verified_snapshots() {
    let seal =
        |snapshot| [VerifiedSnapshot { snapshot: SnapshotId(snapshot), manifest_crc: 7, log_kept: false }];
    let seen = |maker: &Maker| rebuilt(maker).unwrap().end.unwrap().verified;
    let mut maker = four();
    assert_eq!(seen(&maker), []);
    maker.sync().seal(&seal(1));
    assert_eq!(seen(&maker), seal(1));
    maker.batch().sync().batch();
    assert_eq!(seen(&maker), seal(1), "batches behind it take nothing back");
    maker.seal(&seal(2));
    assert_eq!(seen(&maker), seal(2));
}

#[test]
fn pages_deleted_while_a_snapshot_was_taken_stay_deleted() {
    // Batch 5 creates page 2, batch 6 changes it, and batch 7 deletes it. No snapshot contains page 2.
    let page = PageId(2);
    let mut maker = four();
    let create = Op::Create { page, len: 8, place: Place::Host, key: None, metadata: Metadata::new() };
    maker.batch_of(&[create], true);
    maker.batch_of(&[Op::Write { page, offset: 0, bytes: b"gone" }], true);
    maker.batch_of(&[Op::Delete { page }], true);
    let manifest = Manifest { next_page: 3, ..maker.manifest(1, 5, 4, 7) };

    let mut without = maker.clone();
    without.publish(FileName::Manifest(1), &manifest);
    // The state can still be computed from the log's beginning, but not from the snapshot.
    let found = rebuilt(&without).unwrap();
    assert_eq!(found.base, None);
    assert!(found.skipped[0].to_string().contains("page 2 does not exist"), "{:?}", found.skipped);

    let tombstones = vec![Tombstone { page, lsn: Lsn(7) }];
    maker.publish(FileName::Manifest(1), &Manifest { tombstones, ..manifest });
    let found = rebuilt(&maker).unwrap();
    assert_eq!((found.base, found.skipped.len()), (Some(SnapshotId(1)), 0));
    assert_eq!(found.table.get(page), None);
    assert_eq!(found.table.next_page(), 3);
    assert_eq!(found.contents[&PAGE], content(4));
}

/// The second snapshot has the same `redo` as the first and only records the pages deleted since. Batch 8
/// deletes page 1. Batch 6 changes page 2 and batch 7 deletes it, both while the first snapshot is taken.
#[test]
fn thin_snapshot_begins_at_previous_link() {
    let other = PageId(2);
    let mut maker = four();
    let create = Op::Create { page: other, len: 8, place: Place::Host, key: None, metadata: Metadata::new() };
    maker.batch_of(&[create], true);
    maker.batch_of(&[Op::Write { page: other, offset: 0, bytes: b"gone" }], true);
    maker.batch_of(&[Op::Delete { page: other }], true);
    let base = Manifest { next_page: 3, ..maker.manifest(1, 5, 4, 7) };
    let tombstones = vec![Tombstone { page: other, lsn: Lsn(7) }];
    let base = Manifest { tombstones: tombstones.clone(), ..base };
    let previous_crc = maker.publish(FileName::Manifest(1), &base);
    maker.batch_of(&[Op::Delete { page: PAGE }], true);
    maker.batch_of(&[Op::SetRoot { name: "after".into(), value: Value::from(true) }], true);
    let thin = |tombstones: Vec<Tombstone>| Manifest {
        kind: ManifestKind::Change { previous: SnapshotId(1), previous_crc },
        snapshot: SnapshotId(2),
        end: Lsn(8),
        entries: Vec::new(),
        tombstones,
        ..base.clone()
    };
    let gone = Tombstone { page: PAGE, lsn: Lsn(8) };
    let found_with = |manifest: &Manifest| {
        let mut maker = maker.clone();
        maker.publish(FileName::Manifest(2), manifest);
        // The previous snapshot now serves only as a link.
        maker.files.0.remove(&FileName::Pages(1));
        rebuilt(&maker)
    };
    let whole = thin([gone].into_iter().chain(tombstones).collect());
    let found = found_with(&whole).unwrap();
    assert_eq!((found.base, found.skipped.len()), (Some(SnapshotId(2)), 0), "{:?}", found.skipped);
    assert_eq!((found.table.pages().len(), found.table.lsn()), (0, Lsn(9)));
    assert_eq!(found.table.next_page(), 3);

    // The previous snapshot is used if the change omits the tombstone of page 2, ends earlier, or has an
    // earlier `redo` although it contains all changes.
    for (why, wrong) in [
        ("page 2 does not exist", thin(vec![gone])),
        ("end of the previous link is 7, over the limit of 6", Manifest { end: Lsn(6), ..thin(vec![]) }),
        ("end of the previous link is 7, over the limit of 6", Manifest { redo: maker.end(6), ..whole }),
    ] {
        let found = found_with(&wrong).unwrap();
        assert_eq!(found.base, Some(SnapshotId(1)), "{why}");
        assert!(found.skipped[0].to_string().contains(why), "{:?}", found.skipped);
    }
}

#[test]
fn restore_replaces_pages_and_root_with_its_table() {
    let mut maker = four();
    let table = Manifest { kind: ManifestKind::Table, end: Lsn(6), ..maker.manifest(9, 2, 2, 2) };
    let table_crc = maker.publish(FileName::Table(9), &table);
    let other = PageId(2);
    let create = Op::Create { page: other, len: 8, place: Place::Host, key: None, metadata: Metadata::new() };
    maker.batch_of(&[create], true);
    let mut wrong = maker.clone();
    maker.batch_of(&[Op::Restore { table: 9, table_crc, restored: Lsn(2) }], true);
    maker.batch_of(&[Op::SetRoot { name: "after".into(), value: Value::from(true) }], true);
    let found = rebuilt(&maker).unwrap();
    assert_eq!(found.table.lsn(), Lsn(7));
    assert_eq!(found.contents[&PAGE], content(2));
    assert_eq!(found.table.get(other), None, "a page created after the old state is gone");
    assert_eq!(found.table.next_page(), 3, "and its id is not used again");
    assert_eq!(found.table.root().len(), 2);

    let mut crowded = wrong.clone();
    let restore = Op::Restore { table: 9, table_crc, restored: Lsn(2) };
    crowded.batch_of(&[restore, Op::Note { text: "and more" }], true);
    check("a restore among others", &crowded, &Refused("a restore must be the only operation of its batch"));

    let table_crc = table_crc ^ 1;
    wrong.batch_of(&[Op::Restore { table: 9, table_crc, restored: Lsn(2) }], true);
    check(
        "another table",
        &wrong,
        &Refused("0000000000000009.table at offset 0: checksum of the restored table"),
    );
    maker.files.0.remove(&FileName::Table(9));
    check("no table", &maker, &Refused("0000000000000009.table at offset 0: missing"));
}

#[test]
fn earlier_state_equals_log_prefix() {
    let mut maker = four();
    maker.snapshot(1, 2, 2, 2).snapshot(2, 3, 3, 4);
    for lsn in 1..=4 {
        let options = RebuildOptions { until: Some(Lsn(lsn)), ..RebuildOptions::default() };
        let found = rebuild(&maker.files, &options).unwrap();
        check_state("until", &found, lsn);
        let base = [None, None, Some(1), Some(1), Some(2)][lsn as usize];
        assert_eq!(found.base, base.map(SnapshotId), "the newest snapshot that ends at or before {lsn}");
    }
}

#[test]
fn a_state_is_rebuilt_from_compressed_images() {
    let mut maker = four();
    maker.compress = true;
    maker.snapshot(1, 3, 3, 4);
    let rebuilt = rebuild(&maker.files, &RebuildOptions { base: Some(SnapshotId(1)), ..Default::default() });
    assert_eq!(rebuilt.unwrap().contents[&PAGE], content(4));
    // Flip one bit of the payload.
    maker.files.0.get_mut(&FileName::Pages(1)).unwrap()[4096 + 128 + 9] ^= 1;
    let rebuilt = rebuild(&maker.files, &RebuildOptions { base: Some(SnapshotId(1)), ..Default::default() });
    let damage = rebuilt.unwrap_err().to_string();
    assert!(damage.contains("image checksum is"), "{damage}");
}

/// The last seal keeps the log after snapshot 2, but for snapshot 1 only the state at its end. All segments still
/// exist, so only the seal determines this.
#[test]
fn rebuild_never_starts_below_floor() {
    let mut maker = four();
    maker.snapshot(1, 2, 2, 2).snapshot(2, 3, 3, 4);
    let entry = |snapshot, log_kept| {
        [VerifiedSnapshot { snapshot: SnapshotId(snapshot), manifest_crc: 7, log_kept }].into_iter()
    };
    let found = |maker: &Maker, base: Option<u64>, until: Option<u64>| {
        let options =
            RebuildOptions { base: base.map(SnapshotId), until: until.map(Lsn), ..RebuildOptions::default() };
        rebuild(&maker.files, &options).map_err(|damage| damage.to_string())
    };
    let check =
        |maker: &Maker, why: &str, base: Option<u64>, until: Option<u64>, expected: Option<u64>| match (
            found(maker, base, until),
            expected,
        ) {
            (Ok(rebuilt), Some(lsn)) => check_state(why, &rebuilt, lsn),
            (Err(damage), None) => assert!(damage.contains("missing"), "{why}: {damage}"),
            (found, _) => panic!("{why}: {found:?}"),
        };
    // Without a floor, replay starts wherever the log exists.
    for (base, until) in [(Some(1), None), (Some(1), Some(3)), (None, Some(1))] {
        check(&maker, "no floor", base, until, Some(until.unwrap_or(4)));
    }
    maker.seal(&entry(1, false).chain(entry(2, true)).collect::<Vec<_>>());
    check(&maker, "the newest state", None, None, Some(4));
    check(&maker, "snapshot 1's own state", Some(1), Some(2), Some(2));
    check(&maker, "the same, asked for by its batch", None, Some(2), Some(2));
    check(&maker, "from snapshot 1 to the end", Some(1), None, None);
    check(&maker, "from snapshot 1 to batch 3", Some(1), Some(3), None);
    check(&maker, "batch 3", None, Some(3), None);
    check(&maker, "batch 1, from the log's beginning", None, Some(1), None);
    // Without the floor's snapshot there is no start, although the whole log exists.
    maker.files.0.remove(&FileName::Manifest(2));
    check(&maker, "the floor's snapshot is lost", None, None, None);
}
