//! The encoding of objects: golden files, flipped bits, and invented contents with matching checksums.
//!
//! `golden/` contains an object of each kind and variant. Only this test writes the files:
//!
//! ```text
//! REMANENT_GOLDEN=write cargo test -p remanent-archive --test objects
//! ```
//!
//! A change that alters an existing file changes the format. It needs a new format version and new golden files.

mod samples;
mod spec;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use remanent_archive::object::{
    BoundRaw, BoundaryRaw, CatalogRaw, DataRefRaw, Defect, FenceRaw, HintRaw, KeptSnapshotRaw, LineHeadRaw,
    ManifestRaw, ObjectHeaderRaw, ObjectKey, RunRaw, crc64,
};
use remanent_format::layout::LayoutTable;
use samples::{STORE, Sample, read_and_write, samples};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// Returns the layouts of the structures at the start of an object, in order.
fn structures(sample: &Sample) -> Vec<LayoutTable> {
    let mut tables = vec![ObjectHeaderRaw::TABLE];
    let kind = sample.name.split('-').next().unwrap_or_default();
    if kind == "bound" {
        tables.push(BoundRaw::TABLE);
    }
    if matches!(sample.key, ObjectKey::Line(_) | ObjectKey::Bound(_)) {
        tables.push(LineHeadRaw::TABLE);
        let head = ObjectHeaderRaw::LEN + if kind == "bound" { BoundRaw::LEN } else { 0 };
        let listed = sample.bytes[head + 52];
        tables.extend(std::iter::repeat_n(DataRefRaw::TABLE, listed.into()));
    }
    tables.extend(match kind {
        "fence" => Some(FenceRaw::TABLE),
        "run" => Some(RunRaw::TABLE),
        "manifest" => Some(ManifestRaw::TABLE),
        "boundary" | "bound" => Some(BoundaryRaw::TABLE),
        "catalog" => Some(CatalogRaw::TABLE),
        "hint" => Some(HintRaw::TABLE),
        _ => None,
    });
    tables
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns a text that lists every field of an object.
fn annotated(sample: &Sample) -> String {
    let mut text = format!("{} ({} bytes)\n", sample.key, sample.bytes.len());
    let mut at = 0;
    for table in structures(sample) {
        _ = writeln!(text, "{}", table.name);
        for field in table.fields {
            let bytes = &sample.bytes[at + field.offset..][..field.size];
            _ = writeln!(text, "{:6} {:<14} {}", at + field.offset, field.name, hex(bytes));
        }
        at += table.len;
    }
    for (row, bytes) in sample.bytes[at..].chunks(32).enumerate() {
        _ = writeln!(text, "{:6} {}", at + 32 * row, hex(bytes));
    }
    text
}

#[test]
fn golden_files_match_the_encoder() {
    let samples = samples();
    if std::env::var_os("REMANENT_GOLDEN").is_some_and(|value| value == "write") {
        _ = fs::remove_dir_all(golden("")); // The folder may not exist.
        fs::create_dir_all(golden("")).unwrap();
        for sample in &samples {
            fs::write(golden(&format!("{}.bin", sample.name)), &sample.bytes).unwrap();
            fs::write(golden(&format!("{}.txt", sample.name)), annotated(sample)).unwrap();
        }
    }
    let mut expected = BTreeSet::new();
    for sample in &samples {
        let on_disk = fs::read(golden(&format!("{}.bin", sample.name))).unwrap();
        assert!(on_disk == sample.bytes, "{}.bin is not what the encoder makes", sample.name);
        let text = fs::read_to_string(golden(&format!("{}.txt", sample.name))).unwrap();
        assert_eq!(text, annotated(sample), "{}.txt", sample.name);
        expected.extend(["bin", "txt"].map(|extension| format!("{}.{extension}", sample.name)));
    }
    let found: BTreeSet<String> = fs::read_dir(golden(""))
        .unwrap()
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(found, expected);
}

#[test]
fn valid_objects_round_trip_to_the_same_bytes() {
    for sample in samples() {
        assert_eq!(read_and_write(sample.key, &sample.bytes), Ok(sample.bytes), "{}", sample.name);
    }
}

#[test]
fn every_flipped_bit_is_detected() {
    for sample in samples() {
        for bit in 0..8 * sample.bytes.len() {
            let mut bytes = sample.bytes.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let read = remanent_archive::object::decode_header(&bytes);
            let defect = read.expect_err(&format!("{}: bit {bit}", sample.name));
            assert!(defect.offset < bytes.len() as u64, "{}: bit {bit}: {defect}", sample.name);
        }
    }
}

#[test]
fn every_wrong_length_is_detected() {
    for sample in samples() {
        for len in 0..sample.bytes.len() {
            let read = read_and_write(sample.key, &sample.bytes[..len]);
            assert!(read.is_err(), "{}: {len} bytes", sample.name);
        }
        let mut longer = sample.bytes.clone();
        longer.push(0);
        assert!(read_and_write(sample.key, &longer).is_err(), "{}", sample.name);
    }
}

#[test]
fn object_under_another_key_or_store_is_refused() {
    let wrong = |key, bytes: &[u8]| read_and_write(key, bytes).expect_err("a defect").defect;
    for sample in samples() {
        let other = match sample.key {
            ObjectKey::Line(number) => ObjectKey::Line(number + 1),
            ObjectKey::Bound(number) => ObjectKey::Bound(number + 1),
            _ => continue,
        };
        assert_eq!(wrong(other, &sample.bytes), Defect::Misplaced, "{}", sample.name);
        let mut foreign = sample.bytes.clone();
        foreign[16] ^= 1;
        assert_eq!(wrong(sample.key, &seal(foreign)), Defect::Foreign, "{}", sample.name);
    }
    assert_ne!(STORE.0[0], 0);
}

/// Corrects the length and the checksums in the header of an object.
fn seal(mut bytes: Vec<u8>) -> Vec<u8> {
    let body = bytes.split_off(ObjectHeaderRaw::LEN);
    let head: [u8; ObjectHeaderRaw::LEN] = bytes.try_into().expect("a whole header");
    let mut raw = ObjectHeaderRaw::from_bytes(&head);
    raw.body_len = body.len() as u64;
    raw.body_crc = crc64(&body);
    raw.header_crc = crc32fast::hash(&raw.to_bytes()[..124]);
    [&raw.to_bytes()[..], &body].concat()
}

/// Checks that bytes are rejected, or are the only encoding of the object that they decode to.
fn check_canonical(key: ObjectKey, bytes: &[u8], what: &str) {
    if let Ok(written) = read_and_write(key, bytes) {
        assert!(written == bytes, "{what}: another encoding of the same object is accepted");
    }
}

#[test]
fn changed_bytes_with_valid_checksums_have_one_encoding() {
    for sample in samples() {
        for at in 0..sample.bytes.len() {
            for value in [0, 1, 0x7f, 0x80, 0xff] {
                let mut bytes = sample.bytes.clone();
                bytes[at] = value;
                check_canonical(sample.key, &seal(bytes), &format!("{}: byte {at}", sample.name));
            }
        }
        for len in ObjectHeaderRaw::LEN..sample.bytes.len() {
            let bytes = seal(sample.bytes[..len].to_vec());
            check_canonical(sample.key, &bytes, &format!("{}: {len} bytes", sample.name));
        }
    }
}

/// Kept snapshots must be in order, have unique names, and agree with the data objects that the object lists.
#[test]
fn contradictory_catalogs_are_refused() {
    let first = ObjectHeaderRaw::LEN + LineHeadRaw::LEN + DataRefRaw::LEN + CatalogRaw::LEN;
    let second = first + KeptSnapshotRaw::LEN;
    let sample = samples().into_iter().find(|sample| sample.name == "catalog").expect("a sample");
    let changes: [(&str, usize, &[u8]); 11] = [
        ("position above its own", second, &[23]),
        ("position that does not ascend", first, &[22]),
        ("position zero", first, &[0]),
        ("other nonce than its own", second + 8, &[9]),
        ("no nonce", first + 8, &[0; 16]),
        ("number that does not ascend", first + 24, &[5]),
        ("number zero", first + 24, &[0]),
        ("empty name", first + 52, &[0]),
        ("long name", first + 52, &[65]),
        ("name that is not UTF-8", first + 56, &[0xff]),
        ("other number of bytes", second + 120, &[1]),
    ];
    for (what, at, bytes) in changes {
        let mut changed = sample.bytes.clone();
        changed[at..at + bytes.len()].copy_from_slice(bytes);
        let refused = read_and_write(sample.key, &seal(changed));
        assert!(
            matches!(&refused, Err(defect) if matches!(defect.defect, Defect::Field { .. } | Defect::Limit { .. })),
            "{what}: {refused:?}"
        );
    }
    let mut same_name = sample.bytes.clone();
    same_name.copy_within(first + 52..first + 120, second + 52);
    read_and_write(sample.key, &seal(same_name)).expect_err("two snapshots have one name");
}

/// A count that exceeds the length of the object is rejected before memory is reserved.
#[test]
fn counts_beyond_the_object_are_refused() {
    let body = ObjectHeaderRaw::LEN + LineHeadRaw::LEN;
    let fields = [
        ("run", ObjectHeaderRaw::LEN + 52),
        ("fence", body + 4),
        ("fence", body + 8),
        ("boundary-first", body + 52),
        ("catalog-removal", body),
    ];
    for (name, at) in fields {
        let sample = samples().into_iter().find(|sample| sample.name == name).expect("a sample");
        for count in [u32::MAX, 1 << 20] {
            let mut bytes = sample.bytes.clone();
            bytes[at..at + 4].copy_from_slice(&count.to_le_bytes());
            let refused = read_and_write(sample.key, &seal(bytes)).expect_err("a defect");
            let expected = matches!(refused.defect, Defect::Truncated { .. } | Defect::Limit { .. });
            assert!(expected, "{name}, offset {at}: {refused}");
        }
    }
}

#[test]
fn invalid_keys_are_not_parsed() {
    for sample in samples() {
        assert_eq!(ObjectKey::parse(&sample.key.to_string()), Some(sample.key));
    }
    let names = [
        "",
        "line/",
        "line/1",
        "line/0000000000000000",
        "line/000000000000000A",
        "line/000000000000000a0",
        "line/ffffffffffffffff",
        "line/+00000000000000a",
        "lines/000000000000000a",
        "bound/0000000000000000",
        "data/0000000000000001-0000000000000001",
        "data/0000000000000001-0000000000000001-0000000000000001-0000000000000001",
        "newest/",
        "newest.tmp",
    ];
    for name in names {
        assert_eq!(ObjectKey::parse(name), None, "{name:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
        for sample in samples() {
            prop_assert!(read_and_write(sample.key, &bytes).is_err());
        }
    }

    #[test]
    fn arbitrary_bodies_with_valid_checksums_have_one_encoding(
        index in 0usize..16,
        body in proptest::collection::vec(prop_oneof![3 => Just(0u8), 1 => any::<u8>()], 0..400),
    ) {
        let sample = &samples()[index];
        let bytes = seal([&sample.bytes[..ObjectHeaderRaw::LEN], &body].concat());
        check_canonical(sample.key, &bytes, sample.name);
    }

    #[test]
    fn several_changed_bytes_have_one_encoding(
        index in 0usize..16,
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let sample = &samples()[index];
        let mut bytes = sample.bytes.clone();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        check_canonical(sample.key, &seal(bytes), sample.name);
    }
}
