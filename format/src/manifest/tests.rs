//! Tests of manifests: round trips, copies, and invalid input.

use super::*;
use crate::ids::Incarnation;
use crate::image::Codec;
use crate::limits::{CHAIN_LINKS_MAX, DEVICE_ORDINAL_MAX};
use crate::state::replay::Resolver;
use crate::value::Value;

/// Length in bytes of the root's envelope at the end of the sample's body.
const ROOT_LEN: usize = 40;

fn image(file: u64, len: u64) -> Option<ImageRef> {
    Some(ImageRef {
        file,
        offset: 4096 + 128,
        stored_len: len,
        stored_crc: 0xabcd,
        raw_crc: 0xabcd,
        codec: Codec::Raw,
    })
}

fn entry(page: u64, len: u64) -> ManifestEntry {
    ManifestEntry {
        page: PageId(page),
        key: Some(Key::new(format!("key {page}")).unwrap()),
        len,
        epoch: Epoch(3),
        lsn: Lsn(8),
        place: Place::Device(1),
        metadata: Metadata::from([("dtype".to_owned(), Value::from("bf16"))]).into(),
        image: (len > 0).then(|| image(2, len)).flatten(),
    }
}

fn sample() -> Manifest {
    let bare =
        ManifestEntry { key: None, place: Place::Host, metadata: SharedMetadata::default(), ..entry(4, 0) };
    Manifest {
        kind: ManifestKind::Change { previous: SnapshotId(6), previous_crc: 0x1234_5678 },
        store: StoreId([0x5a; 16]),
        snapshot: SnapshotId(7),
        name: Some("before the merge".to_owned()),
        created_unix_ms: 1_700_000_000_123,
        redo: LogPoint {
            incarnation: Incarnation { number: 2, random: 99 },
            lsn: Lsn(5),
            segment: 3,
            offset: 8192,
            chain: 0x0bad_cafe,
        },
        end: Lsn(9),
        next_page: 10,
        epoch_high: Epoch(4),
        next_file: 3,
        ahead_from: 2,
        entries: vec![entry(1, 100), bare, entry(9, 1 << 30)],
        tombstones: vec![Tombstone { page: PageId(2), lsn: Lsn(6) }],
        root: Arc::new([("step".to_owned(), Value::from(12_u64))].into()),
    }
}

fn first(bytes: &[u8]) -> Result<Manifest, Defect> {
    Manifest::decode_copy(bytes, 0).map(|(manifest, _)| manifest)
}

/// Encodes the sample with a modified first copy and the checksums of that copy.
fn with_copy(change: impl FnOnce(&mut ManifestHeaderRaw, &mut [u8])) -> Vec<u8> {
    let mut bytes = sample().encode().unwrap();
    let mut raw = ManifestHeaderRaw::from_bytes(bytes[..256].try_into().unwrap());
    let body_end = 256 + raw.body_len as usize;
    change(&mut raw, &mut bytes[256..body_end]);
    raw.body_crc = crc32fast::hash(&bytes[256..body_end]);
    raw.header_crc = crc32fast::hash(&raw.to_bytes()[..252]);
    bytes[..256].copy_from_slice(&raw.to_bytes());
    bytes
}

#[test]
fn manifest_round_trips_to_the_same_bytes() {
    let base = Manifest { kind: ManifestKind::Base, ..sample() };
    let table = Manifest { kind: ManifestKind::Table, name: None, ..sample() };
    let empty = Manifest {
        kind: ManifestKind::Base,
        redo: LogPoint::default(),
        end: Lsn(0),
        next_page: 1,
        epoch_high: Epoch(0),
        next_file: 1,
        ahead_from: 0,
        entries: vec![],
        tombstones: vec![],
        root: Arc::default(),
        ..sample()
    };
    let many =
        Manifest { next_page: 1000, entries: (1..900).map(|page| entry(page, 7)).collect(), ..sample() };
    let many = Manifest { tombstones: vec![], ..many };
    for manifest in [sample(), base, table, empty, many] {
        let bytes = manifest.encode().unwrap();
        assert_eq!(bytes.len() % 8192, 0);
        assert_eq!(bytes[..bytes.len() / 2], bytes[bytes.len() / 2..]);
        let (decoded, health) = Manifest::decode(&bytes).unwrap();
        assert!(health.is_whole());
        assert_eq!(health.header_crc.to_le_bytes(), bytes[252..256]);
        assert_eq!(decoded, manifest);
        assert_eq!(decoded.encode().unwrap(), bytes);
    }
}

/// Encoding entries in pieces of any length produces the same bytes, and each piece rejects the same defects.
#[test]
fn entries_encoded_in_pieces_have_equal_bytes() {
    let entries: Vec<ManifestEntry> = (1..900).map(|page| entry(page, 7)).collect();
    let whole = Manifest { next_page: 1000, entries, ..sample() };
    let whole = Manifest { tombstones: vec![Tombstone { page: PageId(950), lsn: Lsn(1) }], ..whole };
    let apart = |manifest: &Manifest, at_once: usize| {
        let count = manifest.entries.len();
        let shares = (0..count).step_by(at_once).map(|start| start..count.min(start + at_once));
        manifest.encode_around(shares.map(|share| manifest.encode_entries(share)).collect::<Result<_, _>>()?)
    };
    let bytes = whole.encode().unwrap();
    for at_once in [1, 2, 100, 898, 899, 1000] {
        let pieces = apart(&whole, at_once).unwrap();
        assert_eq!(pieces.len(), 899_usize.div_ceil(at_once));
        assert_eq!(pieces.concat(), bytes[..bytes.len() / 2], "{at_once}");
        // Damage the first entry of a piece, and an entry within a piece.
        for at in [100, 150] {
            let mut unordered = whole.clone();
            unordered.entries.swap(at, at - 1);
            assert!(apart(&unordered, at_once).is_err(), "{at_once}: {at}");
        }
    }
}

/// A pool whose pieces have the given number of entries. The last piece is decoded first.
struct Pieces(usize);

impl WorkPool for Pieces {
    fn pieces_len(&self) -> usize {
        self.0
    }

    fn map_pieces<P: Send, T: Send, E: Send>(
        &self,
        pieces: Vec<P>,
        work: impl Fn(P) -> Result<T, E> + Sync,
    ) -> Result<Vec<T>, E> {
        let backwards: Result<Vec<T>, E> = pieces.into_iter().rev().map(work).collect();
        backwards.map(|results| results.into_iter().rev().collect())
    }

    fn join<A: Send, B>(&self, other: impl FnOnce() -> A + Send, here: impl FnOnce() -> B) -> (A, B) {
        let here = here();
        (other(), here)
    }
}

/// Decoding entries in pieces of any length produces the same manifest and detects every defect.
#[test]
fn entries_decoded_in_pieces_form_the_same_manifest() {
    let named = |page| ManifestEntry {
        key: Some(Key::new(vec![7; 1 + page as usize % 64]).unwrap()),
        ..entry(page, 7)
    };
    let entries: Vec<ManifestEntry> = (1..300).map(named).collect();
    let tombstones = vec![Tombstone { page: PageId(950), lsn: Lsn(1) }];
    let whole = Manifest { next_page: 1000, entries, tombstones, ..sample() };
    for manifest in [whole, sample(), Manifest { entries: Vec::new(), ..sample() }] {
        let bytes = manifest.encode().unwrap();
        let half = &bytes[..bytes.len() / 2];
        for at_once in [1, 2, 100, 298, 299, 300, usize::MAX] {
            let (decoded, crc) = Manifest::decode_first_by(half, &Pieces(at_once)).unwrap();
            assert_eq!((&decoded, crc), (&manifest, Manifest::header_crc(&bytes).unwrap()), "{at_once}");
        }
    }
    // Valid checksums over a wrong length of metadata, or over bytes outside all entries.
    type Change = fn(&mut ManifestHeaderRaw, &mut [u8]);
    let changes: [Change; 4] = [
        |_, body| body[68] = 0xff,
        |_, body| body[74] += 8,
        |header, _| header.entry_count -= 1,
        |_, body| body[8] = 0,
    ];
    for change in changes {
        let bytes = with_copy(change);
        let half = &bytes[..bytes.len() / 2];
        assert!(Manifest::decode_copy(half, 0).is_err());
        assert!(
            [1, 2, 3].into_iter().all(|at_once| Manifest::decode_first_by(half, &Pieces(at_once)).is_none())
        );
    }
}

fn links() -> [Manifest; 3] {
    let caught =
        |page, lsn, file| ManifestEntry { lsn: Lsn(lsn), image: image(file, 100), ..entry(page, 100) };
    let redo = |lsn| LogPoint { lsn: Lsn(lsn), ..sample().redo };
    let dead = |page, lsn| Tombstone { page: PageId(page), lsn: Lsn(lsn) };
    let base = Manifest {
        kind: ManifestKind::Base,
        snapshot: SnapshotId(4),
        redo: redo(3),
        end: Lsn(4),
        entries: vec![caught(1, 1, 1), caught(2, 2, 1), caught(3, 3, 1)],
        tombstones: vec![dead(9, 4)],
        ..sample()
    };
    let change = |before: &Manifest, number, at: u64| Manifest {
        kind: ManifestKind::Change { previous: before.snapshot, previous_crc: crc(before) },
        snapshot: SnapshotId(number),
        redo: redo(at),
        end: Lsn(at + 1),
        next_file: number + 1,
        ahead_from: 0,
        ..sample()
    };
    let second = change(&base, 5, 4);
    let second =
        Manifest { entries: vec![caught(2, 4, 2)], tombstones: vec![dead(1, 4), dead(3, 5)], ..second };
    let third = change(&second, 7, 6);
    // A restore created page 3 again.
    let third =
        Manifest { entries: vec![caught(3, 6, 3), caught(8, 6, 3)], tombstones: vec![dead(7, 7)], ..third };
    [base, second, third]
}

fn crc(manifest: &Manifest) -> u32 {
    u32::from_le_bytes(manifest.encode().unwrap()[252..256].try_into().unwrap())
}

#[test]
fn changes_replace_add_and_remove_pages() {
    let [base, second, third] = links();
    check_link(&third, &second, crc(&second)).unwrap();
    check_link(&second, &base, crc(&base)).unwrap();
    assert_eq!(merge(&[&base]).unwrap(), base);
    let merged = merge(&[&third, &second, &base]).unwrap();
    let pages: Vec<(u64, u64)> = merged.entries.iter().map(|entry| (entry.page.0, entry.lsn.0)).collect();
    assert_eq!(pages, [(2, 4), (3, 6), (8, 6)]);
    let entries = merged.entries.clone();
    assert_eq!(merged, Manifest { kind: ManifestKind::Base, entries, ..third.clone() });
    // The merged manifest is a valid base.
    assert_eq!(Manifest::decode(&merged.encode().unwrap()).unwrap().0, merged);
    assert_eq!(merge(&[&third, &second]), Err(Defect::Missing));
    assert_eq!(merge(&[]), Err(Defect::Missing));
    let many = vec![&base; CHAIN_LINKS_MAX + 1];
    assert!(matches!(merge(&many), Err(Defect::Limit { what: "links of a snapshot", .. })));
}

#[test]
fn change_that_contradicts_previous_link_is_refused() {
    let [base, second, _] = links();
    let table = Manifest { kind: ManifestKind::Table, name: None, ..base.clone() };
    for (expected, previous) in [
        ("another store", Manifest { store: StoreId([1; 16]), ..base.clone() }),
        ("another store", table),
        (
            "number of the previous link is 3, expected 4",
            Manifest { snapshot: SnapshotId(3), ..base.clone() },
        ),
        ("checksum of the previous link", Manifest { created_unix_ms: 1, ..base.clone() }),
        ("end of the previous link is 5, over the limit of 4", Manifest { end: Lsn(5), ..base.clone() }),
        ("next page id of the previous link is 11", Manifest { next_page: 11, ..base.clone() }),
        ("highest epoch of the previous link is 5", Manifest { epoch_high: Epoch(5), ..base.clone() }),
        ("next image file of the previous link is 7", Manifest { next_file: 7, ..base.clone() }),
    ] {
        // The change names the previous link correctly, so that only the tested field is wrong.
        let crc = crc(&previous);
        let previous_crc = if expected.starts_with("checksum") { crc ^ 1 } else { crc };
        let kind = ManifestKind::Change { previous: SnapshotId(4), previous_crc };
        let change = Manifest { kind, ..second.clone() };
        let found = check_link(&change, &previous, crc).unwrap_err().to_string();
        assert!(found.contains(expected), "{expected}: {found}");
    }
    assert!(check_link(&base, &second, crc(&second)).is_err(), "a base follows nothing");
}

#[test]
fn snapshot_names_are_limited_and_tables_have_none() {
    let named = |name: &str| Manifest { name: Some(name.to_owned()), ..sample() };
    for name in ["x", "ünïcode", &"x".repeat(64)] {
        assert_eq!(first(&named(name).encode().unwrap()).unwrap(), named(name));
    }
    assert!(named("").encode().is_err());
    assert!(named(&"x".repeat(65)).encode().is_err());
    assert!(Manifest { kind: ManifestKind::Table, ..named("x") }.encode().is_err());
}

#[test]
fn manifest_with_one_valid_copy_reports_the_other() {
    let bytes = sample().encode().unwrap();
    let body_end = 256 + u64::from_le_bytes(bytes[152..160].try_into().unwrap()) as usize;
    for (copy, at) in [(0, 0), (1, bytes.len() / 2)] {
        for index in 0..body_end {
            let mut damaged = bytes.clone();
            damaged[at + index] ^= 0x40;
            let (decoded, health) = Manifest::decode(&damaged).unwrap();
            assert_eq!(decoded, sample(), "copy {copy}, byte {index}");
            assert!(
                matches!(health.defects[copy], Some(Defect::Magic { .. } | Defect::Checksum { .. })),
                "copy {copy}, byte {index}: {health:?}"
            );
            assert_eq!(health.defects[1 - copy], None, "copy {copy}, byte {index}");
        }
    }
    let mut both = bytes;
    both[260] ^= 1;
    let second = both.len() / 2 + 300;
    both[second] ^= 1;
    assert!(matches!(Manifest::decode(&both), Err(Defect::Checksum { what: "manifest body", .. })));
}

#[test]
fn wrong_file_length_invalidates_second_copy() {
    let bytes = sample().encode().unwrap();
    for (len, found) in [(bytes.len() - 4096, "cut by a page"), (4096 + 300, "cut within the copy")] {
        let (decoded, health) = Manifest::decode(&bytes[..len]).unwrap();
        assert_eq!(decoded, sample());
        assert!(matches!(health.defects, [None, Some(Defect::Truncated { .. })]), "{found}: {health:?}");
    }
    let longer = [&bytes[..], &[0; 8192]].concat();
    let (_, health) = Manifest::decode(&longer).unwrap();
    assert!(matches!(health.defects, [None, Some(Defect::Mismatch { what: "manifest file length", .. })]));
    assert!(matches!(Manifest::decode(&bytes[..300]), Err(Defect::Truncated { .. })));
    assert!(matches!(Manifest::decode(&[]), Err(Defect::Truncated { .. })));
}

#[test]
fn valid_manifest_copies_that_differ_are_reported() {
    let mut bytes = sample().encode().unwrap();
    let other = Manifest { created_unix_ms: 1, ..sample() }.encode().unwrap();
    let half = bytes.len() / 2;
    bytes[half..].copy_from_slice(&other[half..]);
    let (decoded, health) = Manifest::decode(&bytes).unwrap();
    assert_eq!(decoded, sample());
    assert!(matches!(health.defects, [None, Some(Defect::Mismatch { what: "second copy's checksum", .. })]));
}

#[test]
fn invalid_fields_with_valid_checksums_are_refused() {
    assert_eq!(first(&with_copy(|_, _| ())), Ok(sample()));
    type Change = fn(&mut ManifestHeaderRaw, &mut [u8]);
    let rows: [(&str, Change); 31] = [
        ("manifest flags is 1", |header, _| header.flags = 1),
        ("reserved manifest bytes is 1", |header, _| header.reserved_2[2] = 1),
        ("reserved manifest bytes is 1", |header, _| header.reserved_3[11] = 1),
        ("lowest image file of later batches is 4, over the limit of 3", |header, _| header.ahead_from = 4),
        ("snapshot name length is 65", |header, _| header.name_len = 65),
        ("bytes after the snapshot's name is 101", |header, _| header.name_len = 15),
        ("non-UTF-8 byte in a snapshot name is 255", |header, _| header.name[3] = 0xff),
        ("manifest kind is 4", |header, _| header.kind = 4),
        ("previous link of a base or table is 6", |header, _| header.kind = KIND_BASE),
        ("previous link of a change is 0", |header, _| header.previous = SnapshotId(0)),
        ("previous link is 7, over the limit of 6", |header, _| header.previous = SnapshotId(7)),
        ("snapshot number is 0", |header, _| {
            (header.kind, header.snapshot) = (KIND_BASE, SnapshotId(0));
            (header.previous, header.previous_crc) = (SnapshotId(0), 0);
        }),
        ("redo lsn is 10, over the limit of 9", |header, _| header.redo.lsn = Lsn(10)),
        ("page id is 9, over the limit of 8", |header, _| header.next_page = 9),
        ("next page id is 0", |header, _| header.next_page = 0),
        ("page's epoch is 3, over the limit of 2", |header, _| header.epoch_high = Epoch(2)),
        ("image file is 2, over the limit of 1", |header, _| header.next_file = 2),
        ("page's lsn is 8, over the limit of 7", |header, _| header.end = Lsn(7)),
        ("manifest body length is", |header, _| header.body_len = u64::MAX),
        ("entry count is", |header, _| header.entry_count = u64::MAX),
        ("tombstone count is", |header, _| header.tombstone_count = u64::MAX),
        ("metadata checksum is", |header, _| header.entry_count -= 1),
        ("metadata checksum is", |header, _| header.tombstone_count -= 1),
        ("page out of order is 4", |_, body| body[0] = 5),
        ("page id or lsn is 0", |_, body| body[0] = 0),
        ("tombstone of an existing page is 1", |_, body| body[body.len() - ROOT_LEN - 16] = 1),
        ("page's epoch is 0", |_, body| body[8] = 0),
        ("stored length of a raw image is 101", |_, body| body[48] += 1),
        ("image codec is 3", |_, body| body[72] = 3),
        ("place is 9", |_, body| body[73] = 9),
        ("key length is 65", |_, body| body[74] = 65),
    ];
    for (expected, change) in rows {
        let found = first(&with_copy(change)).unwrap_err().to_string();
        assert!(found.contains(expected), "{expected}: {found}");
    }
    let newer = with_copy(|header, _| header.version = 2);
    assert_eq!(first(&newer), Err(Defect::Version { version: 2, features: 0 }));
}

#[test]
fn inconsistent_manifest_is_not_encoded() {
    for (why, manifest) in [
        ("entries descend", Manifest { entries: vec![entry(2, 1), entry(1, 1)], ..sample() }),
        ("a page without its image", {
            Manifest { entries: vec![ManifestEntry { image: None, ..entry(1, 1) }], ..sample() }
        }),
        ("an image of an empty page", {
            Manifest { entries: vec![ManifestEntry { image: image(1, 1), ..entry(1, 0) }], ..sample() }
        }),
        ("a device that cannot be", {
            let place = Place::Device(DEVICE_ORDINAL_MAX + 1);
            Manifest { entries: vec![ManifestEntry { place, ..entry(1, 1) }], ..sample() }
        }),
        ("no page was ever given out", {
            Manifest { next_page: 0, entries: vec![entry(1, 1)], tombstones: Vec::new(), ..sample() }
        }),
        ("no file was ever written", Manifest { next_file: 0, entries: vec![entry(1, 1)], ..sample() }),
    ] {
        assert!(manifest.encode().is_err(), "{why}");
        assert!(
            manifest.encode_entries(0..manifest.entries.len()).is_err()
                || manifest.check_header_fields().is_err(),
            "{why}"
        );
    }
}

/// Merging entries in pieces of any length produces the same page table, even if consecutive ids span two pieces.
#[test]
fn table_merged_in_pieces_equals_whole_table() {
    let entries = (1..=700).map(|page| ManifestEntry { epoch: Epoch(page % 7), ..entry(3 * page, page) });
    let entries: Vec<ManifestEntry> = entries.collect();
    let redo = LogPoint { lsn: Lsn(9), ..sample().redo };
    for (next_page, epoch_high) in [(1, Epoch(0)), (9000, Epoch(99))] {
        let entries = entries.clone();
        let whole = Arc::new(Manifest { redo, next_page, epoch_high, entries, ..sample() });
        let expected = Resolver::from_manifest(&whole).finish().unwrap().table;
        assert_eq!(expected.pages().len(), 700);
        for at_once in [1, 2, 85, 86, 255, 256, 257, 699, 700, 701] {
            let joined = Resolver::from_manifest_by(&whole, &Pieces(at_once)).finish().unwrap().table;
            assert_eq!(joined, expected, "{at_once}");
        }
    }
    let none = Arc::new(Manifest { redo, entries: Vec::new(), ..sample() });
    assert_eq!(Resolver::from_manifest_by(&none, &Pieces(2)).finish().unwrap().table.next_page(), 10);
}
