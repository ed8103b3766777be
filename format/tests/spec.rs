//! Compares every table and example of SPEC.md with the code.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use remanent_format::frame::{FrameHeader, FrameHeaderRaw, FrameKind, VerifiedSnapshotRaw};
use remanent_format::image::{
    ChunkHeaderRaw, Codec, ImageFileHeaderRaw, ImageHeaderRaw, ImageRef, OverlayHeaderRaw, OverlayPieceRaw,
};
use remanent_format::layout::{Field, LayoutTable};
use remanent_format::limits::{self, align_up};
use remanent_format::manifest::{ManifestEntryRaw, ManifestHeaderRaw, OverlayBaseRaw, TombstoneRaw};
use remanent_format::op::{
    CreateBodyRaw, ImageBodyRaw, Indices, Op, OpHeaderRaw, PayloadHeadRaw, PayloadWriter, RestoreBodyRaw,
};
use remanent_format::segment::SegmentHeaderRaw;
use remanent_format::store::StoreHeaderRaw;
use remanent_format::value::{ENVELOPE_HEAD_LEN, encode_entry};
use remanent_format::{
    Defect, Incarnation, LogPoint, Lsn, Metadata, PageId, Place, StoreId, Value, Width, frame, image,
    manifest, segment, store,
};

const PAGE: &str = include_str!("../SPEC.md");

/// SPEC.md without the chapter on archives, which `remanent-archive` compares with its own constants.
static SPEC: LazyLock<&str> =
    LazyLock::new(|| PAGE.split_once("\n## Objects of an archive\n").expect("the last chapter").0);

const LAYOUTS: [LayoutTable; 18] = [
    StoreHeaderRaw::TABLE,
    SegmentHeaderRaw::TABLE,
    FrameHeaderRaw::TABLE,
    VerifiedSnapshotRaw::TABLE,
    PayloadHeadRaw::TABLE,
    OpHeaderRaw::TABLE,
    CreateBodyRaw::TABLE,
    ImageBodyRaw::TABLE,
    RestoreBodyRaw::TABLE,
    ImageFileHeaderRaw::TABLE,
    ChunkHeaderRaw::TABLE,
    ImageHeaderRaw::TABLE,
    OverlayHeaderRaw::TABLE,
    OverlayPieceRaw::TABLE,
    ManifestHeaderRaw::TABLE,
    ManifestEntryRaw::TABLE,
    OverlayBaseRaw::TABLE,
    TombstoneRaw::TABLE,
];

/// A row of an offset table.
#[derive(Debug, PartialEq, Eq)]
struct Row {
    offset: usize,
    size: usize,
    name: String,
    meaning: String,
}

/// Returns the cells of a table row, without code markup.
fn cells(line: &str) -> Vec<String> {
    line.trim().trim_matches('|').split('|').map(|cell| cell.trim().replace('`', "")).collect()
}

/// Returns the rows of the first table after `heading`, without its header.
fn table_after(heading: &str) -> Vec<Vec<String>> {
    let at = SPEC.find(heading).unwrap_or_else(|| panic!("SPEC.md says nothing of {heading:?}"));
    let lines = SPEC[at..].lines().skip_while(|line| !line.starts_with('|'));
    lines.take_while(|line| line.starts_with('|')).skip(2).map(cells).collect()
}

/// Returns the structures of SPEC.md by name, with length and rows.
fn structures() -> BTreeMap<String, (usize, Vec<Row>)> {
    let mut found = BTreeMap::new();
    for heading in SPEC.lines().filter(|line| line.starts_with("#### ")) {
        let name = heading.split('`').nth(1).expect("a structure's heading names it").to_owned();
        let len = heading.split(", ").nth(1).and_then(|text| text.strip_suffix(" bytes"));
        let len = len.and_then(|len| len.parse().ok()).expect("a structure's heading gives its length");
        let rows = table_after(heading)
            .into_iter()
            .map(|row| Row {
                offset: row[0].parse().expect("an offset"),
                size: row[1].parse().expect("a size"),
                name: row[2].clone(),
                meaning: row[3].clone(),
            })
            .collect();
        assert!(found.insert(name.clone(), (len, rows)).is_none(), "{name} appears twice");
    }
    found
}

#[test]
fn spec_offset_tables_match_code() {
    let mut spec = structures();
    for layout in LAYOUTS {
        let (len, rows) = spec.remove(layout.name).unwrap_or_else(|| panic!("SPEC.md lacks {}", layout.name));
        assert_eq!(len, layout.len, "{}", layout.name);
        let rows: Vec<_> = rows.iter().map(|row| (row.name.as_str(), row.offset, row.size)).collect();
        let fields: Vec<_> =
            layout.fields.iter().map(|field| (field.name, field.offset, field.size)).collect();
        assert_eq!(rows, fields, "{}", layout.name);
    }
    // These three have no layout table. The next tests check them.
    let rest: Vec<_> = spec.keys().map(String::as_str).collect();
    assert_eq!(rest, ["Envelope", "Incarnation", "LogPoint"]);
}

#[test]
fn every_source_layout_is_checked_against_spec() {
    let mut declared = Vec::new();
    for file in sources_in(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src")) {
        let text = std::fs::read_to_string(file).unwrap();
        declared.extend(text.split("\nlayout! {").skip(1).map(|block| {
            let name = block.split("pub struct ").nth(1).and_then(|rest| rest.split(':').next());
            name.expect("a layout declares a structure").to_owned()
        }));
    }
    declared.sort();
    let mut held: Vec<_> = LAYOUTS.iter().map(|layout| layout.name.to_owned()).collect();
    held.sort();
    assert_eq!(declared, held);
}

/// Returns every source file in a folder and its subfolders.
fn sources_in(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { sources_in(&path) } else { vec![path] }).collect()
}

/// Checks the position of each field of a composite by changing one field at a time.
fn check_composite<T: Field>(name: &str, zero: &T, changed: &[(&str, T)]) {
    let (len, rows) = &structures()[name];
    assert_eq!(*len, T::SIZE, "{name}");
    let bytes = |value: &T| {
        let mut out = vec![0; T::SIZE];
        value.put(&mut out);
        out
    };
    assert_eq!(bytes(zero), vec![0; T::SIZE], "{name}");
    assert_eq!(rows.len(), changed.len(), "{name}");
    for (row, (field, value)) in rows.iter().zip(changed) {
        assert_eq!(row.name, *field, "{name}");
        let mut expected = vec![0; T::SIZE];
        expected[row.offset..row.offset + row.size].fill(0xff);
        assert_eq!(bytes(value), expected, "{name}.{field}");
    }
}

#[test]
fn spec_composite_fields_match_code() {
    let all = Incarnation { number: u32::MAX, random: u32::MAX };
    check_composite(
        "Incarnation",
        &Incarnation::default(),
        &[("number", Incarnation { random: 0, ..all }), ("random", Incarnation { number: 0, ..all })],
    );
    let zero = LogPoint::default();
    check_composite(
        "LogPoint",
        &zero,
        &[
            ("incarnation", LogPoint { incarnation: all, ..zero }),
            ("lsn", LogPoint { lsn: Lsn(u64::MAX), ..zero }),
            ("segment", LogPoint { segment: u64::MAX, ..zero }),
            ("offset", LogPoint { offset: u64::MAX, ..zero }),
            ("chain", LogPoint { chain: u32::MAX, ..zero }),
        ],
    );
}

#[test]
fn spec_envelope_matches_code() {
    let (len, rows) = &structures()["Envelope"];
    assert_eq!(*len, ENVELOPE_HEAD_LEN);
    let bytes = encode_entry("a", &Value::Null, 100).unwrap();
    let field = |row: &Row| u32::get(&bytes[row.offset..row.offset + row.size]);
    assert_eq!((rows[0].name.as_str(), field(&rows[0])), ("len", (bytes.len() - len) as u32));
    assert_eq!((rows[1].name.as_str(), field(&rows[1])), ("crc", crc32fast::hash(&bytes[*len..])));
}

#[test]
fn spec_magics_and_versions_match_code() {
    let structures = structures();
    for (name, magic) in [
        ("StoreHeaderRaw", &store::STORE_MAGIC[..]),
        ("SegmentHeaderRaw", &segment::SEGMENT_MAGIC),
        ("FrameHeaderRaw", &frame::FRAME_MAGIC),
        ("ImageFileHeaderRaw", &image::IMAGE_FILE_MAGIC),
        ("ChunkHeaderRaw", &image::CHUNK_MAGIC),
        ("OverlayHeaderRaw", &image::OVERLAY_MAGIC),
        ("ManifestHeaderRaw", &manifest::MANIFEST_MAGIC),
    ] {
        assert_eq!(structures[name].1[0].meaning.as_bytes(), magic, "{name}");
    }
    let with_magic = structures.values().filter(|(_, rows)| rows[0].name == "magic").count();
    assert_eq!(with_magic, 7);
    let versions = structures.values().flat_map(|(_, rows)| rows).filter(|row| row.name == "version");
    let versions: Vec<u32> = versions.map(|row| row.meaning.parse().unwrap()).collect();
    assert_eq!(versions, [segment::FORMAT_VERSION; 4]);
    let title = format!("# The bytes of a Remanent store, version {}\n", segment::FORMAT_VERSION);
    assert!(SPEC.starts_with(&title));
}

#[test]
fn spec_feature_bits_match_code() {
    let table = SPEC.split("| bit | name | feature |\n|---|---|---|\n").nth(1).unwrap();
    let rows = table.lines().take_while(|line| line.starts_with('|')).map(|line| {
        let mut cells = line.split('|').skip(1).map(str::trim);
        (cells.next().unwrap().parse().unwrap(), cells.next().unwrap().trim_matches('`'))
    });
    assert_eq!(rows.collect::<Vec<(u32, &str)>>(), store::INCOMPATIBLE);
}

macro_rules! values {
    ($($name:ident),* $(,)?) => { [$((stringify!($name), limits::$name as u64)),*] };
}

#[test]
fn spec_limits_match_code() {
    let values = values![
        GROUP_ALIGN,
        FRAME_ALIGN,
        SECTOR_LEN,
        NUMBER_MAX,
        SEGMENT_LEN_MIN,
        SEGMENT_LEN_MAX,
        FRAME_PAYLOAD_LEN_MAX,
        KEY_LEN_MAX,
        PAGE_LEN_MAX,
        DEVICE_ORDINAL_MAX,
        METADATA_LEN_MAX,
        ROOT_LEN_MAX,
        VALUE_DEPTH_MAX,
        NAME_LEN_MAX,
        NOTE_LEN_MAX,
        IDENTITY_LEN_MAX,
        ANCESTORS_MAX,
        STORE_RECORD_LEN_MAX,
        CHUNK_IMAGES_MAX,
        CHUNK_LEN_MAX,
        CHAIN_LINKS_MAX,
        SNAPSHOT_NAME_LEN_MAX,
        MANIFEST_ENTRIES_MAX,
        MANIFEST_BODY_LEN_MAX,
    ];
    let rows = table_after("\n## Limits\n");
    let rows: Vec<_> = rows.iter().map(|row| (row[0].as_str(), row[1].parse::<u64>().unwrap())).collect();
    assert_eq!(rows, values);
    let source = include_str!("../src/limits.rs");
    let declared = source.lines().filter(|line| line.starts_with("pub const ") && !line.contains(" fn "));
    let declared: Vec<_> = declared.map(|line| line[10..].split(':').next().unwrap()).collect();
    assert_eq!(declared, values.map(|(name, _)| name), "a limit that the page does not list");
}

#[test]
fn spec_value_kinds_match_code() {
    let samples = [
        ("Null", Value::Null),
        ("Bool", Value::from(true)),
        ("I64", Value::from(1_i64)),
        ("U64", Value::from(1_u64)),
        ("F64", Value::from(1.0)),
        ("String", Value::from("")),
        ("Bytes", Value::Bytes(vec![])),
        ("List", Value::List(vec![])),
        ("Map", Value::from(Metadata::new())),
    ];
    let rows = table_after("**A value** is a kind");
    assert_eq!(rows.len(), samples.len());
    for (row, (name, value)) in rows.iter().zip(samples) {
        assert_eq!(row[1], name);
        let bytes = encode_entry("", &value, 100).unwrap();
        // Envelope, then the length of the empty name, then the value.
        assert_eq!(u32::get(&bytes[16..]).to_string(), row[0], "{name}");
    }
}

#[test]
fn spec_operation_kinds_match_code() {
    let page = PageId(1);
    let (codec, stored_len) = (Codec::Raw, 1);
    let image = ImageRef { file: 1, offset: 4096, stored_len, stored_crc: 1, raw_crc: 1, codec };
    let samples = [
        Op::Create { page, len: 1, place: Place::Host, key: None, metadata: Metadata::new() },
        Op::Write { page, offset: 0, bytes: b"1" },
        Op::Masked { page, offset: 0, width: Width::W1, mask: &[1], bytes: &[1] },
        Op::Scatter { page, width: Width::W1, base: 0, indices: Indices::plain(&[0; 4]), values: &[1] },
        Op::Fill { page, offset: 0, len: 1, pattern: &[1] },
        Op::Resize { page, len: 1 },
        Op::Delete { page },
        Op::SetMetadata { page, name: "a".into(), value: Value::Null },
        Op::RemoveMetadata { page, name: "a" },
        Op::SetRoot { name: "a".into(), value: Value::Null },
        Op::RemoveRoot { name: "a" },
        Op::Note { text: "a" },
        Op::Restore { table: 1, table_crc: 1, restored: Lsn(1) },
        Op::Image { page, len: 1, image },
        Op::Move { page, place: Place::Device(1) },
    ];
    let rows = table_after("| kind | name | `width` |");
    assert_eq!(rows.len(), samples.len());
    for (row, op) in rows.iter().zip(samples) {
        assert_eq!(row[1], op.kind());
        let mut writer = PayloadWriter::default();
        writer.push(&op).unwrap();
        let payload = writer.finish();
        let header = OpHeaderRaw::from_bytes(payload[16..48].try_into().unwrap());
        assert_eq!(header.kind.to_string(), row[0], "{}", op.kind());
        assert_eq!(row[2] == "–", header.width == 0, "{}: width", op.kind());
        assert_eq!(header.page == page, op.page().is_some(), "{}: page", op.kind());
        assert_eq!(row[5] == "–", header.body_len == 0, "{}: body", op.kind());
        let padded = 48 + align_up(header.body_len.into(), limits::FRAME_ALIGN) as usize;
        assert_eq!(payload.len(), padded, "{}: padding", op.kind());
    }
}

/// A write whose bytes are filled in later is encoded like a write of zeros.
#[test]
fn placeholder_write_equals_write_of_zeros() {
    for len in [0, 1, 15, 16, 17, 5000] {
        let (mut blank, mut known) = (PayloadWriter::default(), PayloadWriter::default());
        for writer in [&mut blank, &mut known] {
            writer.push(&Op::Note { text: "before" }).unwrap();
        }
        let (page, offset, bytes) = (PageId(7), 3, vec![0; len]);
        blank.push_placeholder_write(page, offset, len as u64).unwrap();
        known.push(&Op::Write { page, offset, bytes: &bytes }).unwrap();
        assert_eq!(blank.len(), known.len());
        assert_eq!(blank.finish(), known.finish(), "{len} bytes");
    }
    let too_long = limits::FRAME_PAYLOAD_LEN_MAX + 1;
    let refused = PayloadWriter::default().push_placeholder_write(PageId(7), 0, too_long);
    assert!(matches!(refused, Err(Defect::Limit { .. })), "{refused:?}");
}

#[test]
fn spec_frame_kinds_and_places_match_code() {
    let header = |kind| FrameHeader {
        kind,
        group_start: false,
        incarnation: Incarnation::default(),
        store: StoreId([0; 16]),
        segment: 0,
        offset: 0,
        lsn: Lsn(0),
        durable: Lsn(0),
        payload_len: 0,
        payload_crc: 0,
        chain_prev: 0,
    };
    let kinds = structures()["FrameHeaderRaw"].1[1].meaning.clone();
    let byte = |kind| header(kind).encode().0[4];
    assert_eq!(kinds, format!("{}: batch, {}: seal", byte(FrameKind::Batch), byte(FrameKind::Seal)));

    let rows = table_after("Places, here, in moves and in manifests");
    let rows: Vec<_> = rows.iter().map(|row| (row[0].clone(), row[1].clone())).collect();
    let places = [Place::Device(0), Place::Pinned, Place::Host, Place::Unified, Place::Disk];
    let kinds = places.map(|place| {
        let name = place.to_string();
        (place.to_raw().0.to_string(), name.trim_end_matches(":0").to_owned())
    });
    assert_eq!(rows, kinds);
}

#[test]
fn spec_crc_matches_code() {
    assert!(SPEC.contains("`123456789` is 0xCBF43926"));
    assert_eq!(crc32fast::hash(b"123456789"), 0xcbf4_3926);
}

/// The annotated bytes of STORE, a segment and a frame in SPEC.md equal those of the golden files.
#[test]
fn annotated_examples_match_golden_files() {
    let golden = ["store", "segment-opening", "frame-batch"];
    let shown: Vec<&str> =
        SPEC.split("```dump\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    assert_eq!(shown.len(), golden.len());
    for (name, shown) in golden.into_iter().zip(shown) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/sound/{name}.txt"));
        let whole = std::fs::read_to_string(path).unwrap();
        assert!(shown.lines().count() > 15 && whole.contains(shown), "{name}:\n{shown}");
    }
}

/// Returns the labels that SPEC.md defines, sorted: list items, rows of the table of verdicts, and W1, which
/// is defined within a sentence.
fn labels() -> Vec<String> {
    let given = |line: &str| {
        let label = line.strip_prefix("- **").and_then(|rest| rest.split_once("**")).map(|(label, _)| label);
        let of_row = line.strip_prefix("| E").and_then(|rest| rest.split_once(" |"));
        label.map(str::to_owned).or(of_row.map(|(number, _)| format!("E{number}")))
    };
    let mut labels: Vec<String> = SPEC.lines().filter_map(given).filter(|label| is_label(label)).collect();
    labels.push("W1".to_owned());
    labels.sort_unstable();
    labels
}

fn is_label(text: &str) -> bool {
    text.len() == 2
        && text.starts_with(|c| "SFWEHCMLR".contains(c))
        && text.ends_with(|c: char| c.is_ascii_digit())
}

/// SPEC.md defines each label once, and defines every label that it cites.
#[test]
fn spec_labels_are_unique() {
    let mut labels = labels();
    let count = labels.len();
    labels.dedup();
    assert_eq!(labels.len(), count, "{labels:?}");
    assert!(count > 40, "{labels:?}");
    let words = SPEC.split(|c: char| !c.is_ascii_alphanumeric());
    let unknown: Vec<&str> =
        words.filter(|word| is_label(word) && !labels.iter().any(|label| label == word)).collect();
    assert_eq!(unknown, Vec::<&str>::new());
}

/// Comments in the sources cite every label, as in `SPEC F6`, and no label that SPEC.md does not define.
#[test]
fn code_cites_every_spec_label() {
    let mut cited = BTreeSet::new();
    for file in sources_in(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src")) {
        let text = std::fs::read_to_string(file).unwrap();
        let comments = text.lines().filter_map(|line| line.split_once("//").map(|(_, comment)| comment));
        for citation in comments.flat_map(|comment| comment.split("SPEC ").skip(1)) {
            let words = citation.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
            let list = words.take_while(|word| is_label(word) || ["to", "and"].contains(word));
            let mut before: Option<(&str, bool)> = None;
            for word in list {
                match (word, before) {
                    ("to" | "and", Some((label, _))) => before = Some((label, word == "to")),
                    (_, Some((first, true))) => {
                        let digit = |label: &str| label.as_bytes()[1];
                        let run = digit(first)..=digit(word);
                        cited.extend(run.map(|digit| format!("{}{}", &first[..1], char::from(digit))));
                        before = Some((word, false));
                    }
                    _ => {
                        cited.insert(word.to_owned());
                        before = Some((word, false));
                    }
                }
            }
        }
    }
    assert_eq!(cited, labels().into_iter().collect());
}
