//! Compares the chapter "Objects of an archive" of `format/SPEC.md` with the code.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use remanent_archive::object::{
    BatchPoint, BoundRaw, BoundaryRaw, CatalogRaw, DATA_OBJECT_LEN_MAX, DataKeyRaw, DataRefRaw, FenceRaw,
    HintRaw, KeptSnapshotRaw, Kind, LINE_OBJECT_LEN_MAX, LineHeadRaw, ManifestRaw, OBJECT_MAGIC,
    ObjectHeaderRaw, PART_LEN_MAX, Role, RunRaw, crc64,
};
use remanent_format::layout::{Field, LayoutTable};
use remanent_format::{Incarnation, Lsn};

const PAGE: &str = include_str!("../../../format/SPEC.md");

const LAYOUTS: [LayoutTable; 12] = [
    ObjectHeaderRaw::TABLE,
    LineHeadRaw::TABLE,
    DataRefRaw::TABLE,
    FenceRaw::TABLE,
    RunRaw::TABLE,
    ManifestRaw::TABLE,
    BoundaryRaw::TABLE,
    CatalogRaw::TABLE,
    KeptSnapshotRaw::TABLE,
    BoundRaw::TABLE,
    HintRaw::TABLE,
    DataKeyRaw::TABLE,
];

fn chapter() -> &'static str {
    PAGE.split_once("\n## Objects of an archive\n").expect("the chapter exists").1
}

/// Returns the rows of the first table after `heading`, without its header and without code markup.
fn table_after(heading: &str) -> Vec<Vec<String>> {
    let at = chapter().find(heading).unwrap_or_else(|| panic!("the chapter lacks {heading:?}"));
    let lines = chapter()[at..].lines().skip_while(|line| !line.starts_with('|'));
    let cells = |line: &str| -> Vec<String> {
        line.trim().trim_matches('|').split('|').map(|cell| cell.trim().replace('`', "")).collect()
    };
    lines.take_while(|line| line.starts_with('|')).skip(2).map(cells).collect()
}

/// The length of a structure, and the offset, size and name of each of its fields.
type Structure = (usize, Vec<(usize, usize, String)>);

/// Returns the structures in the chapter by name.
fn structures() -> BTreeMap<String, Structure> {
    let headings = chapter().lines().filter(|line| line.starts_with("#### "));
    let structure = |heading: &str| {
        let name = heading.split('`').nth(1).expect("a heading names its structure").to_owned();
        let len = heading.split(", ").nth(1).and_then(|text| text.strip_suffix(" bytes"));
        let len = len.and_then(|len| len.parse().ok()).expect("a heading states the length");
        let number = |text: &str| text.parse().expect("a number");
        let rows = table_after(heading);
        (name, (len, rows.iter().map(|row| (number(&row[0]), number(&row[1]), row[2].clone())).collect()))
    };
    headings.map(structure).collect()
}

#[test]
fn spec_offset_tables_match_code() {
    let mut spec = structures();
    for layout in LAYOUTS {
        let (len, rows) = spec.remove(layout.name).unwrap_or_else(|| panic!("SPEC.md lacks {}", layout.name));
        let fields: Vec<_> =
            layout.fields.iter().map(|field| (field.offset, field.size, field.name.to_owned())).collect();
        assert_eq!((len, rows), (layout.len, fields), "{}", layout.name);
    }
    assert_eq!(spec.keys().collect::<Vec<_>>(), ["BatchPoint"]);
}

#[test]
fn spec_batch_point_matches_code() {
    let (len, rows) = &structures()["BatchPoint"];
    assert_eq!(*len, BatchPoint::SIZE);
    let zero = BatchPoint::default();
    let all = Incarnation { number: u32::MAX, random: u32::MAX };
    let changed = [
        BatchPoint { incarnation: all, ..zero },
        BatchPoint { lsn: Lsn(u64::MAX), ..zero },
        BatchPoint { chain: u32::MAX, ..zero },
    ];
    assert_eq!(rows.len(), changed.len());
    for ((offset, size, name), point) in rows.iter().zip(changed) {
        let mut expected = [0; BatchPoint::SIZE];
        expected[*offset..offset + size].fill(0xff);
        let mut bytes = [0; BatchPoint::SIZE];
        point.put(&mut bytes);
        assert_eq!(bytes, expected, "{name}");
    }
}

#[test]
fn every_source_layout_is_checked_against_spec() {
    let mut declared = Vec::new();
    for file in sources_in(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src")) {
        let text = fs::read_to_string(file).unwrap();
        declared.extend(text.split("\nlayout! {").skip(1).map(|block| {
            let name = block.split("pub struct ").nth(1).and_then(|rest| rest.split(':').next());
            name.expect("a layout declares a structure").to_owned()
        }));
    }
    // These structures are private. Unit tests in `directory/record.rs` and `directory/unfetched.rs` check them.
    let of_directory = ["ArchiveFileRaw", "FenceRecordRaw", "ArchivedBatchRaw"];
    let of_unfetched = ["UnfetchedFileRaw", "UnfetchedPartRaw"];
    let is_private = |name: &str| of_directory.contains(&name) || of_unfetched.contains(&name);
    declared.retain(|name| !is_private(name));
    declared.sort();
    let mut checked: Vec<_> = LAYOUTS.iter().map(|layout| layout.name.to_owned()).collect();
    checked.sort();
    assert_eq!(declared, checked);
}

#[test]
fn spec_kinds_roles_and_limits_match_code() {
    let kinds: Vec<_> =
        table_after("| kind | name |").into_iter().map(|row| (row[0].clone(), row[1].clone())).collect();
    assert_eq!(kinds, Kind::ALL.map(|kind| ((kind as u32).to_string(), kind.name().to_owned())));
    let roles: Vec<_> =
        table_after("| role | name |").into_iter().map(|row| (row[0].clone(), row[1].clone())).collect();
    assert_eq!(roles, Role::ALL.map(|role| ((role as u32).to_string(), role.name().to_owned())));
    let magic = std::str::from_utf8(&OBJECT_MAGIC).unwrap();
    assert!(chapter().contains(&format!("| `magic` | `{magic}` |")));
    for limit in [LINE_OBJECT_LEN_MAX, DATA_OBJECT_LEN_MAX, PART_LEN_MAX] {
        assert!(chapter().contains(&limit.to_string()), "{limit}");
    }
    assert!(chapter().contains("`123456789` is 0x995DC9BBDF1939FA"));
    assert_eq!(crc64(b"123456789"), 0x995d_c9bb_df19_39fa);
}

/// Comments in the code cite exactly the labels of the chapter.
#[test]
fn code_cites_every_label() {
    let label = |line: &str| line.strip_prefix("- **")?.split_once("**").map(|(label, _)| label.to_owned());
    let labels: BTreeSet<String> = chapter().lines().filter_map(label).collect();
    assert_eq!(labels.len(), 15);
    let mut cited = BTreeSet::new();
    for file in sources_in(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src")) {
        let text = fs::read_to_string(file).unwrap();
        for citation in text.split("(SPEC ").skip(1) {
            let list = citation.split(')').next().unwrap_or_default();
            let words: Vec<&str> = list.split([' ', ',']).filter(|word| !word.is_empty()).collect();
            for (at, word) in words.iter().enumerate().filter(|(_, word)| word.len() == 2 && **word != "to") {
                let first = if at > 1 && words[at - 1] == "to" { words[at - 2] } else { word };
                let digit = |label: &str| label.as_bytes()[1];
                cited.extend(
                    (digit(first)..=digit(word)).map(|to| format!("{}{}", &word[..1], char::from(to))),
                );
            }
        }
    }
    assert_eq!(cited, labels);
}

fn sources_in(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { sources_in(&path) } else { vec![path] }).collect()
}
