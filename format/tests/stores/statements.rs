//! Rules of SPEC.md about whole stores. Each rule is tested with variants of a store that distinguish the rule from
//! similar ones.

use std::cell::Cell;
use std::io;

use remanent_format::frame::{VerifiedSnapshot, encode_seal};
use remanent_format::limits::SEGMENT_LEN_MIN;
use remanent_format::manifest::{Manifest, ManifestKind, Tombstone};
use remanent_format::op::Op;
use remanent_format::segment::SegmentHeader;
use remanent_format::state::reach::{Reach, Role};
use remanent_format::state::rebuild::{RebuildOptions, rebuild};
use remanent_format::state::survey::Survey;
use remanent_format::{FileName, Folder, Incarnation, Lsn, PageId, ReadAt, SnapshotId, StoreId};

use crate::archive::Files;
use crate::maker::{Maker, STORE};
use crate::verdict::{Clean, Refused, Torn, Verdict, check, four, rebuilt, segment};

const SPEC: &str = include_str!("../../SPEC.md");

fn entry(snapshot: u64, log_kept: bool) -> VerifiedSnapshot {
    VerifiedSnapshot { snapshot: SnapshotId(snapshot), manifest_crc: 7, log_kept }
}

/// Bytes after the last frame match some fields of a frame header but are not a readable header.
#[test]
fn recycled_bytes_are_not_reported_as_a_torn_tail() {
    let mut base = four();
    base.reopen(4);
    let with = |incarnation: Incarnation, number: u64, magic: &[u8; 4], store: StoreId| {
        let mut maker = base.clone();
        let header = &mut segment(&mut maker, 3)[8192..8192 + 80];
        header[..4].copy_from_slice(magic);
        header[8..12].copy_from_slice(&incarnation.number.to_le_bytes());
        header[12..16].copy_from_slice(&incarnation.random.to_le_bytes());
        header[16..32].copy_from_slice(&store.0);
        header[32..40].copy_from_slice(&number.to_le_bytes());
        maker
    };
    let run = |number, random| Incarnation { number, random };
    let other = StoreId([1; 16]);
    type Row = (&'static str, Incarnation, u64, &'static [u8; 4], StoreId, Verdict);
    let rows: [Row; 8] = [
        ("an earlier run in a lower segment", run(1, 0x1001), 2, b"RMFR", STORE, Clean(4)),
        ("the same with any random part", run(1, 9), 2, b"RMFR", STORE, Clean(4)),
        ("this run's number with another random part", run(2, 9), 2, b"RMFR", STORE, Torn(4, 5)),
        ("a lower segment of this run", run(2, 0x1002), 1, b"RMFR", STORE, Torn(4, 5)),
        ("an earlier run in this segment", run(1, 0x1001), 3, b"RMFR", STORE, Torn(4, 5)),
        ("no incarnation", run(0, 0), 2, b"RMFR", STORE, Torn(4, 5)),
        ("no segment", run(1, 0x1001), 0, b"RMFR", STORE, Torn(4, 5)),
        ("one field alone", run(2, 0x1002), 1, b"RMFR", other, Clean(4)),
    ];
    for (why, incarnation, number, magic, store, verdict) in rows {
        check(why, &with(incarnation, number, magic, store), &verdict);
    }
}

/// Creates a store whose fifth batch is a restore that names this table.
fn restored(change: impl FnOnce(&mut Manifest)) -> Maker {
    let mut maker = four();
    let mut table =
        Manifest { kind: ManifestKind::Table, end: Lsn(5), next_page: 9, ..maker.manifest(9, 2, 2, 2) };
    change(&mut table);
    let table_crc = maker.publish(FileName::Table(9), &table);
    maker.batch_of(&[Op::Restore { table: 9, table_crc, restored: Lsn(2) }], true);
    maker
}

#[test]
fn mismatched_restore_table_is_refused() {
    let lsn = |maker: &Maker| rebuilt(maker).map(|found| found.table.lsn().0);
    assert_eq!(lsn(&restored(|_| {})), Ok(5));
    assert_eq!(lsn(&restored(|table| table.redo.segment = 1 << 40)), Ok(5), "redo is not used");
    type Row = (&'static str, fn(&mut Manifest), &'static str);
    let rows: [Row; 4] = [
        ("an end below", |table| table.end = Lsn(4), "end of the restored table is 4, expected 5"),
        ("an end above", |table| table.end = Lsn(6), "end of the restored table is 6, expected 5"),
        (
            "an entry that is newer than the restore",
            |table| (table.end, table.entries[0].lsn) = (Lsn(6), Lsn(6)),
            "end of the restored table is 6, expected 5",
        ),
        (
            "a tombstone",
            |table| table.tombstones = vec![Tombstone { page: PageId(2), lsn: Lsn(2) }],
            "tombstones of the restored table is 1, expected 0",
        ),
    ];
    for (why, change, expected) in rows {
        let found = lsn(&restored(change)).unwrap_err();
        assert!(found.contains(expected), "{why}: {found}");
    }
    // A `redo` above the limit makes the table invalid, although the `redo` of a table is not used.
    let mut maker = restored(|_| {});
    let bytes = maker.files.0.get_mut(&FileName::Table(9)).unwrap();
    let half = bytes.len() / 2;
    for copy in bytes.chunks_mut(half) {
        copy[64 + 8..64 + 16].copy_from_slice(&6_u64.to_le_bytes());
        let crc = crc32fast::hash(&copy[..252]);
        copy[252..256].copy_from_slice(&crc.to_le_bytes());
    }
    let found = lsn(&maker).unwrap_err();
    assert!(found.contains("redo lsn is 6, over the limit of 5"), "{found}");
}

#[test]
fn a_seal_with_an_invalid_payload_is_corruption() {
    let valid = encode_seal(&[entry(1, false)]);
    let mut flagged = valid.clone();
    flagged[12] |= 2;
    for (why, payload, verdict) in [
        ("as it should be", &valid[..], Clean(4)),
        ("half an entry", &valid[..8], Refused("seal length is 8")),
        ("an unknown flag", &flagged[..], Refused("unknown flags of a seal's entry")),
    ] {
        let mut maker = four();
        maker.sync().seal_of(payload);
        check(why, &maker, &verdict);
    }
}

fn reach(maker: &Maker) -> Reach {
    let survey = Survey::read(&maker.files).unwrap();
    Reach::at_the_end(&survey, &maker.files).expect("the log is whole").1
}

#[test]
fn first_of_two_snapshot_entries_wins() {
    let mut maker = four();
    maker.snapshot(1, 2, 2, 2).snapshot(2, 3, 3, 4).sync();
    for (first, second) in [(true, false), (false, true)] {
        let mut maker = maker.clone();
        maker.seal(&[entry(1, first), entry(1, second), entry(2, true)]);
        let expected = if first { Role::Start } else { Role::EndOnly };
        assert_eq!(reach(&maker).role(SnapshotId(1)), expected);
    }
    // The repeated entry of snapshot 2 is ignored, so no snapshot is flagged and no floor is recorded.
    maker.seal(&[entry(1, false), entry(2, false), entry(2, true)]);
    assert_eq!(reach(&maker).role(SnapshotId(1)), Role::Start);
}

/// Tests each row of SPEC.md's table with stores that differ only in the properties that the columns name.
#[test]
fn snapshot_roles_match_documentation() {
    let at = SPEC.find("| the seal flags |").expect("the table of roles");
    let rows: Vec<Vec<&str>> = SPEC[at..]
        .lines()
        .take_while(|line| line.starts_with('|'))
        .skip(2)
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    let mut asked = vec![0; rows.len()];
    for flags_some in [true, false] {
        for in_seal in ["with bit 0", "without bit 0", "none"] {
            for (is_named, is_exact, is_newest, has_segment) in
                (0..16).map(|bits| (bits & 1 > 0, bits & 2 > 0, bits & 4 > 0, bits & 8 > 0))
            {
                if !flags_some && in_seal == "with bit 0" || is_newest && in_seal != "none" {
                    continue;
                }
                // The tested snapshot is 5 or 2. Snapshot 3 is another one, and the log ends in the segment
                // of its redo.
                let mut maker = four();
                maker.sync();
                let number = if is_newest { 5 } else { 2 };
                let mut manifest = maker.manifest(number, if is_exact { 1 } else { 2 }, 1, 1);
                manifest.redo = maker.end(1);
                manifest.end = if is_exact { Lsn(1) } else { Lsn(3) };
                manifest.name = is_named.then(|| "kept".to_owned());
                maker.publish(FileName::Manifest(number), &manifest);
                maker.snapshot(3, 3, 3, 4);
                let mut entries = vec![entry(3, flags_some)];
                if in_seal != "none" {
                    entries.push(entry(number, in_seal == "with bit 0"));
                }
                maker.seal(&entries);
                if !has_segment {
                    maker.files.0.remove(&FileName::Segment(1));
                }
                let role = match reach(&maker).role(SnapshotId(number)) {
                    Role::Start => "a start",
                    Role::EndOnly => "end only",
                    Role::Link => "held",
                };
                let is_row = |row: &&Vec<&str>| {
                    let column = match in_seal {
                        "none" if is_newest => "none, its number is above all in the seal",
                        "none" => "none, its number is not",
                        _ if !flags_some && has_segment => "any, the segment of its `redo` is there",
                        _ if !flags_some => "any, that segment is not there",
                        other => other,
                    };
                    let is =
                        |cell: &str, value: bool| cell == "any" || cell == if value { "yes" } else { "no" };
                    (row[0] == "some") == flags_some
                        && row[1] == column
                        && row[2] == "any"
                        && is(row[3], is_exact)
                };
                let matching: Vec<usize> = (0..rows.len()).filter(|index| is_row(&&rows[*index])).collect();
                let what = format!("{flags_some} {in_seal} {is_named} {is_exact} {is_newest} {has_segment}");
                let [index] = matching[..] else { panic!("{what}: rows {matching:?}") };
                assert_eq!(role, rows[index][4], "{what}");
                asked[index] += 1;
            }
        }
    }
    assert!(asked.iter().all(|count| *count > 0), "{asked:?}");
}

/// If the newest seal is torn off, the previous seal determines the verified snapshots.
#[test]
fn previous_seal_is_used_if_the_newest_is_torn() {
    let mut maker = four();
    maker.snapshot(1, 2, 2, 2).sync().seal(&[entry(1, true)]);
    maker.snapshot(2, 3, 3, 4).seal(&[entry(2, true)]);
    assert_eq!(reach(&maker).role(SnapshotId(1)), Role::Link);
    // Find the last frame of the log.
    let last = {
        let bytes = segment(&mut maker, 3);
        (0..bytes.len()).step_by(4096).rev().find(|at| bytes[*at..].starts_with(b"RMFR")).unwrap()
    };
    segment(&mut maker, 3)[last + 40] ^= 1;
    let found = reach(&maker);
    assert_eq!([1, 2].map(|id| found.role(SnapshotId(id))), [Role::Start, Role::Start]);
    check("the state stands", &maker, &Torn(4, 5));
    // The remaining seal names a snapshot that may have been removed since.
    maker.files.0.remove(&FileName::Manifest(1));
    assert_eq!(rebuilt(&maker).unwrap().base, Some(SnapshotId(2)));
}

#[test]
fn incarnation_is_read_after_its_opening_is_recycled() {
    let mut maker = four();
    maker.sync().snapshot(1, 3, 3, 4);
    let mut newest = maker.clone();
    newest.files.0.remove(&FileName::Segment(1));
    check("the newest one's", &newest, &Clean(4));
    maker.reopen(4);
    maker.batch();
    maker.files.0.remove(&FileName::Segment(1));
    check("that of the one before", &maker, &Clean(5));
    // The opening of the older incarnation is gone, so the line of incarnations ends before it.
    let mut older = maker;
    older.reopen(5);
    older.batch();
    older.files.0.remove(&FileName::Segment(3));
    check(
        "that of the one before the oldest that is named",
        &older,
        &Refused("incarnation of the first frame"),
    );
}

#[test]
fn lower_of_two_openings_of_an_incarnation_is_used() {
    let mut maker = four();
    let opening = SegmentHeader::decode(segment(&mut maker, 1)).unwrap().opening;
    assert!(opening.is_some());
    for (number, opening) in [(3, opening), (4, None)] {
        let header = SegmentHeader { store: STORE, segment: number, segment_len: SEGMENT_LEN_MIN, opening };
        let mut bytes = header.encode().to_vec();
        bytes.resize(SEGMENT_LEN_MIN as usize, 0);
        maker.files.0.insert(FileName::Segment(number), bytes);
    }
    check("the log begins in the lower one", &maker, &Clean(4));
}

/// Files that belong to another store, or contain another number than their names.
#[test]
fn foreign_files_are_invalid_not_skipped() {
    let other = StoreId([1; 16]);
    let alien = |maker: &mut Maker, number: u64, change: fn(&mut SegmentHeader)| {
        let mut header = SegmentHeader::decode(segment(maker, number)).unwrap();
        change(&mut header);
        segment(maker, number)[..128].copy_from_slice(&header.encode());
    };
    let changes: [fn(&mut SegmentHeader); 2] =
        [|header| header.store = StoreId([1; 16]), |header| header.segment += 7];
    for change in changes {
        let mut maker = four();
        alien(&mut maker, 3, change);
        check("the empty highest segment", &maker, &Clean(4));
        let mut maker = four();
        alien(&mut maker, 2, change);
        check("a segment in the log", &maker, &Refused("0000000000000002.log at offset 0"));
    }
    let mut maker = four();
    maker.snapshot(1, 2, 2, 2);
    let manifest = Manifest { store: other, ..maker.manifest(2, 3, 3, 4) };
    maker.publish(FileName::Manifest(2), &manifest);
    let found = rebuilt(&maker).unwrap();
    assert_eq!((found.base, found.skipped.len()), (Some(SnapshotId(1)), 1), "a link");
    let mut maker = four();
    maker.snapshot(1, 2, 2, 2);
    maker.files.0.get_mut(&FileName::Pages(1)).unwrap()[16..32].copy_from_slice(&other.0);
    assert_eq!(rebuilt(&maker).unwrap().base, Some(SnapshotId(1)), "an image file");
    let found = rebuilt(&restored(|table| table.store = StoreId([1; 16]))).unwrap_err();
    assert!(found.contains("0000000000000009.table at offset 0: belongs to another store"), "{found}");
}

/// A source in which the first sector of segment 3 after its header is unreadable.
struct Unreadable {
    files: Files,
    reads: Cell<usize>,
}

impl ReadAt for Unreadable {
    fn list(&self, folder: Folder) -> io::Result<Vec<String>> {
        self.files.list(folder)
    }

    fn len(&self, file: FileName) -> io::Result<Option<u64>> {
        self.files.len(file)
    }

    fn read_at(&self, file: FileName, offset: u64, out: &mut [u8]) -> io::Result<()> {
        if file == FileName::Segment(3) && offset < 4096 + 512 && offset + out.len() as u64 > 4096 {
            self.reads.set(self.reads.get() + 1);
            return Err(io::Error::other("a bad sector"));
        }
        self.files.read_at(file, offset, out)
    }
}

/// A torn frame at the first possible location does not prove that the other two locations contain no frame.
#[test]
fn unreadable_location_next_to_torn_frame_is_corruption() {
    for is_torn in [false, true] {
        let mut maker = four();
        if is_torn {
            maker.batch();
            maker.frame_at(5)[90] ^= 1;
            assert_eq!(maker.at(5), (2, 12288));
        }
        let source = Unreadable { files: maker.files, reads: Cell::new(0) };
        let damage = rebuild(&source, &RebuildOptions::default()).unwrap_err().to_string();
        assert!(damage.contains("0000000000000003.log") && damage.contains("a bad sector"), "{damage}");
        assert!(source.reads.get() > 0);
    }
}
