//! Tests the judge's verdict on stores built by hand: states between snapshots, pages whose images are no longer
//! needed, and the number of bytes read.

use std::cell::Cell;
use std::io;

use remanent_format::frame::VerifiedSnapshot;
use remanent_format::judge::{ImageProofs, Verdict, judge};
use remanent_format::manifest::{Manifest, ManifestKind};
use remanent_format::op::Op;
use remanent_format::state::reach::{Reach, Role};
use remanent_format::state::rebuild::{RebuildOptions, rebuild};
use remanent_format::state::survey::Survey;
use remanent_format::state::trail::OpLocations;
use remanent_format::store::{Features, StoreFile};
use remanent_format::{FileName, Folder, Lsn, Place, ReadAt, SnapshotId, Value};

use crate::archive::Files;
use crate::maker::{Maker, PAGE, PAGE_LEN};
use crate::verdict::{four, segment};

fn entry(maker: &Maker, snapshot: u64, log_kept: bool) -> VerifiedSnapshot {
    let bytes = &maker.files.0[&FileName::Manifest(snapshot)];
    let manifest_crc = u32::from_le_bytes(bytes[252..256].try_into().unwrap());
    VerifiedSnapshot { snapshot: SnapshotId(snapshot), manifest_crc, log_kept }
}

fn judged(source: &dyn ReadAt) -> Verdict {
    judge(&Survey::read(source).unwrap(), source, &mut ImageProofs::new(source))
}

/// Returns the first and the last state of each gap.
fn gaps(verdict: &Verdict) -> Vec<(u64, u64)> {
    let gaps = verdict.starts.iter().flat_map(|start| &start.gaps);
    gaps.map(|gap| (gap.first.0, gap.last.0)).collect()
}

/// Creates a store with snapshot 1, which ends at batch 1, and snapshot 2, which ends at batch 4. Both are
/// starts.
fn two_starts() -> Maker {
    let mut maker = Maker::new();
    maker.batch().batch_with_image(7).batch_with_image(8).batch().batch().sync();
    maker.snapshot(1, 1, 1, 1).snapshot(2, 4, 4, 4);
    let seal = [entry(&maker, 1, true), entry(&maker, 2, true)];
    maker.seal(&seal);
    maker
}

#[test]
fn states_between_starts_are_proven() {
    let sound = judged(&two_starts().files);
    assert_eq!((gaps(&sound), sound.opens_from), (vec![], Some(0)));
    assert!(sound.lost.is_empty() && sound.starts.iter().all(|start| start.role == Role::Start));
    let damaged = |change: fn(&mut Maker)| {
        let mut maker = two_starts();
        change(&mut maker);
        let verdict = judged(&maker.files);
        assert_eq!(verdict.opens_from, Some(0), "the newest snapshot does not need it");
        gaps(&verdict)
    };
    assert_eq!(damaged(|maker| maker.frame_at(3)[90] ^= 1), [(3, 3)], "the log");
    assert_eq!(
        damaged(|maker| _ = maker.files.0.remove(&FileName::Pages(7))),
        [(2, 2)],
        "an image replaced since"
    );
    assert_eq!(damaged(|maker| _ = maker.files.0.remove(&FileName::Pages(8))), [(3, 3)], "another one");
}

#[test]
fn restore_table_and_images_are_verified() {
    let mut maker = four();
    maker.snapshot(1, 1, 1, 1);
    let table = Manifest { kind: ManifestKind::Table, end: Lsn(5), ..maker.manifest(9, 2, 2, 2) };
    let table_crc = maker.publish(FileName::Table(9), &table);
    maker.batch_of(&[Op::Restore { table: 9, table_crc, restored: Lsn(2) }], true).batch().sync();
    maker.snapshot(10, 6, 6, 6);
    let seal = [entry(&maker, 1, true), entry(&maker, 10, true)];
    maker.seal(&seal);
    assert_eq!(gaps(&judged(&maker.files)), []);
    for file in [FileName::Table(9), FileName::Pages(9)] {
        let mut without = maker.clone();
        without.files.0.remove(&file);
        assert_eq!(gaps(&judged(&without.files)).first().map(|gap| gap.0), Some(5), "{file}");
    }
}

/// If no seal flags a snapshot, the log is kept from its beginning.
#[test]
fn a_lost_beginning_of_the_log_is_reported() {
    let with = |log_kept, features: Features| {
        let mut maker = four();
        let file = StoreFile::decode(&maker.files.0[&FileName::Store]).unwrap();
        maker.files.0.insert(FileName::Store, StoreFile { features, ..file }.encode().unwrap());
        maker.sync().snapshot(1, 3, 3, 4);
        let seal = [entry(&maker, 1, log_kept)];
        maker.seal(&seal);
        assert_eq!(judged(&maker.files).lost_beginning, None);
        maker.files.0.remove(&FileName::Segment(1));
        let verdict = judged(&maker.files);
        assert_eq!(verdict.opens_from, Some(0));
        verdict.lost_beginning.map(|damage| damage.to_string())
    };
    let floor = Features::default().with_written();
    let missing = "log/0000000000000001.log at offset 0 (lsn 1): missing";
    assert_eq!(with(false, floor).as_deref(), Some(missing));
    assert_eq!(with(true, floor), None, "it was given up");
    assert_eq!(with(false, Features::default()), None, "it may have been recycled before there was a floor");
}

/// Creates a store with a page on disk, a snapshot of batch 2, and batches with these writes.
fn on_disk(writes: &[(u64, usize)]) -> Maker {
    let mut maker = Maker::new();
    maker.batch().batch().sync();
    let mut manifest = maker.manifest(1, 2, 2, 2);
    manifest.entries[0].place = Place::Disk;
    maker.publish(FileName::Manifest(1), &manifest);
    let seal = [entry(&maker, 1, true)];
    maker.seal(&seal);
    for (offset, len) in writes {
        maker.batch_of(&[Op::Write { page: PAGE, offset: *offset, bytes: &[9; PAGE_LEN][..*len] }], true);
    }
    maker
}

#[test]
fn overwritten_page_needs_no_image() {
    type Row = (&'static str, &'static [(u64, usize)], bool);
    let rows: [Row; 4] = [
        ("nothing written", &[], true),
        ("all but a byte", &[(1, PAGE_LEN - 1)], true),
        ("all at once", &[(0, PAGE_LEN)], false),
        ("all in two batches", &[(30, PAGE_LEN - 30), (0, 30)], false),
    ];
    for (why, writes, is_needed) in rows {
        let mut maker = on_disk(writes);
        maker.files.0.get_mut(&FileName::Pages(1)).unwrap()[4096 + 128] ^= 1;
        let verdict = judged(&maker.files);
        assert_eq!(verdict.start().unwrap().damaged_pages.len(), usize::from(is_needed), "{why}");
        assert_eq!(verdict.starts[0].lost_by.len(), 1, "{why}: the snapshot's own state is lost");
        let survey = Survey::read(&maker.files).unwrap();
        let base = survey.snapshot(SnapshotId(1)).unwrap();
        let mut op_locations = OpLocations::default();
        let state = op_locations.follow(&survey, &maker.files, Some(&base), None).unwrap();
        let loaded = op_locations.load(&maker.files, &state.resolved, PAGE);
        assert_eq!(loaded.ok(), (!is_needed).then(|| vec![9; PAGE_LEN]), "{why}: loaded whole");
        let mut into = vec![1; PAGE_LEN];
        let read = op_locations.read_into(&maker.files, &state.resolved, PAGE, &mut into);
        assert_eq!(read.ok().map(|_| into), (!is_needed).then(|| vec![9; PAGE_LEN]), "{why}: in place");
        let checked = op_locations.check(&maker.files, &state.resolved, PAGE);
        assert_eq!(checked.is_ok(), !is_needed, "{why}: only checked");
        let window = op_locations
            .prove(&maker.files, &state.resolved, PAGE)
            .and_then(|proven| op_locations.window(&maker.files, &proven, &(7..40)));
        assert_eq!(window.ok(), (!is_needed).then(|| vec![9; 33]), "{why}: by windows");
    }
}

/// Whether an image is read depends on the place of the page in the resulting state.
#[test]
fn final_place_decides_whether_an_image_is_read() {
    let moved = |from: Place, to: Place| {
        let mut maker = Maker::new();
        maker.batch().batch().sync();
        let mut manifest = maker.manifest(1, 2, 2, 2);
        manifest.entries[0].place = from;
        maker.publish(FileName::Manifest(1), &manifest);
        let seal = [entry(&maker, 1, true)];
        maker.seal(&seal).batch_of(&[Op::Move { page: PAGE, place: to }], true);
        maker.files.0.get_mut(&FileName::Pages(1)).unwrap()[4096 + 128] ^= 1;
        // The snapshot is the only remaining start.
        segment(&mut maker, 1)[4096] ^= 1;
        judged(&maker.files).opens_from
    };
    assert_eq!(moved(Place::Host, Place::Disk), Some(0), "it is on disk by now");
    assert_eq!(moved(Place::Disk, Place::Host), None, "it is not any more");
}

/// Counts the bytes read from files.
struct Counted {
    files: Files,
    bytes: Cell<u64>,
}

impl ReadAt for Counted {
    fn list(&self, folder: Folder) -> io::Result<Vec<String>> {
        self.files.list(folder)
    }

    fn len(&self, file: FileName) -> io::Result<Option<u64>> {
        self.files.len(file)
    }

    fn read_at(&self, file: FileName, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.bytes.set(self.bytes.get() + out.len() as u64);
        self.files.read_at(file, offset, out)
    }
}

/// Creates a store with `count` snapshots, one after each batch, which share the page's image.
fn snapshots(count: u64, change: fn(&mut Maker)) -> Maker {
    let mut maker = Maker::new();
    maker.batch();
    let image = maker.manifest(1, 1, 1, 1).entries;
    for number in 2..count + 2 {
        maker.batch_of(&[Op::SetRoot { name: "n".into(), value: Value::from(number) }], true);
        let names_one = Manifest { entries: image.clone(), ..maker.manifest(number, number, 1, number) };
        maker.files.0.remove(&FileName::Pages(number));
        maker.publish(FileName::Manifest(number), &names_one);
    }
    maker.batch().sync().batch();
    change(&mut maker);
    maker
}

/// If the number of snapshots and the length of the log double, the bytes read at most slightly more than double.
#[test]
fn damage_shared_by_snapshots_is_read_once() {
    type Look = fn(&dyn ReadAt);
    let looks: [(&str, Look); 3] = [
        ("the judge", |source| _ = judged(source)),
        ("a rebuild", |source| _ = rebuild(source, &RebuildOptions::default())),
        ("how far back", |source| _ = Reach::at_the_end(&Survey::read(source).unwrap(), source)),
    ];
    type Row = (&'static str, fn(&mut Maker), usize);
    let refused = |files: &Files| judged(files).opens_from.is_none();
    let rows: [Row; 3] = [
        ("nothing damaged", |_| {}, 3),
        (
            "the log after all snapshots",
            |maker| {
                let last = maker.last();
                maker.frame_at(last - 1)[90] ^= 1;
            },
            3,
        ),
        (
            "the image of all snapshots",
            |maker| maker.files.0.get_mut(&FileName::Pages(1)).unwrap()[4096 + 128] ^= 1,
            1,
        ),
    ];
    for (damage, change, counted) in rows {
        let is_of_the_log = damage == "the log after all snapshots";
        assert_eq!(refused(&snapshots(3, change).files), is_of_the_log, "{damage}");
        for (name, look) in &looks[..counted] {
            let bytes = |count: u64| {
                let source = Counted { files: snapshots(count, change).files, bytes: Cell::new(0) };
                look(&source);
                source.bytes.get()
            };
            let (one, twice) = (bytes(20), bytes(40));
            assert!(10 * twice <= 22 * one, "{name}, {damage}: {one} bytes, then {twice}");
        }
    }
}

/// A view of a store that is being written restarts from the last batch that it reached.
#[test]
fn second_walk_returns_the_batches_before_the_damage() {
    let mut maker = Maker::new();
    maker.batch().batch().sync().batch();
    maker.frame_at(2)[90] ^= 1;
    let survey = Survey::read(&maker.files).unwrap();
    assert!(Reach::at_the_end(&survey, &maker.files).is_none());
    let mut op_locations = OpLocations::default();
    op_locations.follow(&survey, &maker.files, None, None).unwrap_err();
    assert_eq!(op_locations.point().lsn, Lsn(1));
}

/// A snapshot with one valid copy is used, and a snapshot with no valid copy is not. In the second case, the store can
/// be opened only if the log still has its beginning.
#[test]
fn unreadable_snapshot_requires_log_from_beginning() {
    for name in [None, Some("kept".to_owned())] {
        for (trim, copies_bad) in (0..3).flat_map(|trim| (0..4).map(move |copies| (trim, copies))) {
            let mut maker = four();
            maker.sync().batch();
            let manifest = Manifest { name: name.clone(), ..maker.manifest(1, 3, 3, 3) };
            maker.publish(FileName::Manifest(1), &manifest);
            let bytes = maker.files.0.get_mut(&FileName::Manifest(1)).unwrap();
            let half = bytes.len() / 2;
            for copy in (0..2).filter(|copy| copies_bad >> copy & 1 == 1) {
                bytes[copy * half + 300] ^= 1;
            }
            // The snapshot's redo is in segment 2.
            for number in 1..=trim {
                maker.files.0.remove(&FileName::Segment(number));
            }
            let what = format!("named {name:?}, {trim} segments trimmed, copies {copies_bad:02b}");
            let found = rebuild(&maker.files, &RebuildOptions::default());
            let opens_from = judged(&maker.files).opens_from;
            match (trim, copies_bad) {
                (0, 3) => assert_eq!(found.unwrap().base, None, "{what}: from the log's beginning"),
                (0 | 1, 0..3) => assert_eq!(found.unwrap().base, Some(SnapshotId(1)), "{what}"),
                _ => {
                    assert_eq!(opens_from, None, "{what}");
                    found.expect_err(&what);
                    continue;
                }
            }
            assert!(opens_from.is_some(), "{what}");
        }
    }
}
