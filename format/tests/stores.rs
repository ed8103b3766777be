//! Tests of the rules of SPEC.md under "reading the log" and "the state of a store", on whole stores, valid
//! and damaged.

#[path = "support/maker.rs"]
mod maker;
#[path = "support/frames.rs"]
mod frames;
#[path = "../../fuzz/src/archive.rs"]
mod archive;
#[path = "../../fuzz/src/fit.rs"]
mod fit;
#[path = "../../fuzz/src/decoders.rs"]
mod decoders;
#[path = "stores/verdict.rs"]
mod verdict;
#[path = "stores/batches.rs"]
mod batches;
#[path = "stores/limits.rs"]
mod limits;
#[path = "stores/snapshots.rs"]
mod snapshots;
#[path = "stores/salvage.rs"]
mod salvage;
#[path = "stores/far.rs"]
mod far;
#[path = "support/far_store.rs"]
mod far_store;
#[path = "stores/statements.rs"]
mod statements;
#[path = "stores/verdicts.rs"]
mod verdicts;

use std::cell::Cell;
use std::io;
use std::path::Path;

use archive::Files;
use maker::{Maker, PAGE, STORE, content};
use remanent_format::image::ImagePurpose;
use remanent_format::log::{LogMap, LogWalk};
use remanent_format::manifest::{Manifest, ManifestKind};
use remanent_format::op::Op;
use remanent_format::segment::SegmentHeader;
use remanent_format::state::bases::Base;
use remanent_format::state::rebuild::{RebuildOptions, rebuild};
use remanent_format::state::window::load_base;
use remanent_format::{FileName, Folder, Lsn, Metadata, PageId, Place, ReadAt};
use verdict::{Clean, Refused, Torn, Verdict, check, four, rebuilt, resum, segment};

#[test]
fn four_batches_are_at_expected_offsets() {
    let maker = four();
    assert_eq!([1, 2, 3, 4].map(|lsn| maker.at(lsn)), [(1, 8192), (1, 12288), (2, 4096), (2, 8192)]);
    assert_eq!(maker.files.0.len(), 4, "STORE and three segments");
}

#[test]
fn log_end_decisions_match_table() {
    type Change = fn(&mut Maker);
    let rows: &[(&str, Verdict, Change)] = &[
        ("nothing wrong", Clean(4), |_| {}),
        ("last payload damaged", Torn(3, 4), |m| m.frame_at(4)[90] ^= 1),
        ("last header damaged", Torn(3, 4), |m| m.frame_at(4)[50] ^= 1),
        ("last group never written", Clean(3), |m| m.frame_at(4)[..4096].fill(0)),
        ("only a later group was written", Torn(2, 4), |m| m.frame_at(3)[..4096].fill(0)),
        ("neither group was written", Clean(2), |m| segment(m, 2)[4096..].fill(0)),
        (
            "damage under a durable mark that only later frames contain",
            Refused("0000000000000001.log at offset 12288 (lsn 2)"),
            |m| {
                m.frame_at(2)[90] ^= 1;
            },
        ),
        (
            "damage under a durable mark, whose frame is damaged too",
            Refused("(lsn 2): payload checksum"),
            |m| {
                m.frame_at(2)[90] ^= 1;
                m.frame_at(3)[100] ^= 1;
                m.frame_at(4)[100] ^= 1;
            },
        ),
        ("damage under a durable mark, whose frame is lost", Torn(1, 2), |m| {
            m.frame_at(2)[90] ^= 1;
            segment(m, 2)[4096..].fill(0);
        }),
        ("a mark in a frame at a wrong location", Torn(1, 2), |m| {
            let group = m.frame_at(3)[..4096].to_vec();
            segment(m, 2)[4096..].fill(0);
            segment(m, 2)[12288..].copy_from_slice(&group);
            m.frame_at(2)[90] ^= 1;
        }),
        ("a mark in a frame of another store", Torn(1, 2), |m| {
            for lsn in [3, 4] {
                m.frame_at(lsn)[16] ^= 1;
                resum(m.frame_at(lsn));
            }
            m.frame_at(2)[90] ^= 1;
        }),
        ("a frame that breaks the chain", Torn(3, 4), |m| {
            m.frame_at(4)[72] ^= 1;
            resum(m.frame_at(4));
        }),
        ("a batch that skips a number", Torn(3, 5), |m| {
            m.frame_at(4)[48] = 5;
            resum(m.frame_at(4));
        }),
        (
            "the segment behind the newest frames is missing, and they lie beyond a break",
            Refused("0000000000000003.log at offset 0 (lsn 3): missing"),
            |m| {
                m.frame_at(3)[..4096].fill(0);
                m.files.0.remove(&FileName::Segment(3));
            },
        ),
        ("a group that lies off its boundary", Torn(2, 4), |m| {
            m.frame_at(3)[5] = 0;
            resum(m.frame_at(3));
        }),
        (
            "the empty newest segment is missing",
            Refused("0000000000000003.log at offset 0 (lsn 5): missing"),
            |m| {
                m.files.0.remove(&FileName::Segment(3));
            },
        ),
        (
            "a segment with frames is missing",
            Refused("0000000000000002.log at offset 0 (lsn 3): missing"),
            |m| {
                m.files.0.remove(&FileName::Segment(2));
            },
        ),
        (
            "the header of a segment with frames is damaged",
            Refused("0000000000000002.log at offset 0"),
            |m| {
                segment(m, 2)[40] ^= 1;
            },
        ),
        ("the header of the empty newest segment is damaged", Clean(4), |m| segment(m, 3)[40] ^= 1),
        ("a segment that is too short", Refused("segment's length is 16384, expected 12288"), |m| {
            segment(m, 2).truncate(12288);
        }),
        ("a segment under another name", Refused("segment's number is 3, expected 2"), |m| {
            let other = segment(m, 3).clone();
            *segment(m, 2) = other;
        }),
        (
            "another store's segment",
            Refused("0000000000000002.log at offset 0 (lsn 3): belongs to another store"),
            |m| {
                let header = SegmentHeader::decode(segment(m, 2)).unwrap();
                let foreign = SegmentHeader { store: remanent_format::StoreId([1; 16]), ..header }.encode();
                segment(m, 2)[..128].copy_from_slice(&foreign);
            },
        ),
        ("STORE is missing", Refused("STORE at offset 0: missing"), |m| {
            m.files.0.remove(&FileName::Store);
        }),
        ("STORE is another store's", Refused("missing"), |m| {
            let mut bytes = m.files.0[&FileName::Store].clone();
            bytes[24] ^= 1;
            let crc = crc32fast::hash(&bytes[..60]);
            bytes[60..64].copy_from_slice(&crc.to_le_bytes());
            m.files.0.insert(FileName::Store, bytes);
        }),
    ];
    for (why, verdict, change) in rows {
        let mut maker = four();
        change(&mut maker);
        check(why, &maker, verdict);
    }
}

#[test]
fn frames_of_one_group_are_validated_separately() {
    let mut maker = Maker::new();
    maker.batch().batch_in_group().batch_in_group();
    assert_eq!(maker.at(2).1 % 4096, maker.at(1).1 % 4096 + maker.at(2).1 - maker.at(1).1);
    check("three in a group", &maker, &Clean(3));
    let mut torn = maker.clone();
    torn.frame_at(3)[90] ^= 1;
    check("the third is torn", &torn, &Torn(2, 3));
    let mut stray = maker.clone();
    stray.frame_at(2)[5] = 1;
    resum(stray.frame_at(2));
    check("the second says that it starts a group", &stray, &Torn(1, 3));
    // The frame after the break is found even if it does not start a group, so the reported tail includes it.
    let mut torn = maker;
    torn.frame_at(2)[90] ^= 1;
    check("the second is torn", &torn, &Torn(1, 3));
}

/// If the start of a group is lost, the durable marks of the other frames in the group still count.
#[test]
fn mark_inside_a_group_counts_without_the_group_start() {
    let mut maker = Maker::new();
    maker.batch().batch().sync();
    maker.batch().batch_in_group();
    assert_eq!((maker.at(2).0, maker.at(3), maker.at(4).0), (1, (2, 4096), 2));
    maker.frame_at(3)[..80].fill(0);
    check("the start of the group is gone", &maker, &Torn(2, 4));
    maker.frame_at(2)[90] ^= 1;
    let damage = Refused("0000000000000001.log at offset 12288 (lsn 2)");
    check("and what the frame behind it covers is damaged", &maker, &damage);
}

/// A source in which most of segment 2 is temporarily unreadable.
struct TemporarilyUnreadable {
    files: Files,
    is_sick: Cell<bool>,
}

impl ReadAt for TemporarilyUnreadable {
    fn list(&self, folder: Folder) -> io::Result<Vec<String>> {
        self.files.list(folder)
    }

    fn len(&self, file: FileName) -> io::Result<Option<u64>> {
        self.files.len(file)
    }

    fn read_at(&self, file: FileName, offset: u64, out: &mut [u8]) -> io::Result<()> {
        if self.is_sick.get() && file == FileName::Segment(2) && offset + out.len() as u64 > 4096 {
            return Err(io::Error::other("a bad sector"));
        }
        self.files.read_at(file, offset, out)
    }
}

#[test]
fn segment_is_used_once_it_becomes_readable() {
    let mut maker = four();
    maker.frame_at(2)[90] ^= 1;
    let source = TemporarilyUnreadable { files: maker.files, is_sick: Cell::new(true) };
    let map = LogMap::read(&source, STORE).unwrap();
    assert!(map.segments()[&2].header.is_ok() && map.segments()[&2].frames.is_none());
    source.is_sick.set(false);
    let mut walk = LogWalk::new(&source, &map, map.beginning().unwrap(), Lsn(0)).unwrap();
    let damage = loop {
        match walk.next() {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the log ends: {:?}", walk.end()),
            Err(damage) => break damage,
        }
    };
    assert_eq!((damage.file, damage.lsn), (FileName::Segment(1), Some(Lsn(2))));
}

#[test]
fn incarnation_continues_at_proven_end() {
    let mut maker = four();
    maker.reopen(2);
    check("the copied tail", &maker, &Clean(4));
    maker.batch().sync().batch();
    check("batches behind the copied tail", &maker, &Clean(6));

    let mut ended = maker.clone();
    segment(&mut ended, 2)[4096..].fill(0xee);
    check("what lies past the predecessor's end is not read", &ended, &Clean(6));

    let mut damaged = maker.clone();
    segment(&mut damaged, 1)[12288 + 90] ^= 1;
    check("damage before the predecessor's end", &damaged, &Refused("at offset 12288 (lsn 2): payload"));

    let mut unopened = maker.clone();
    segment(&mut unopened, 3)[60] ^= 1;
    check("the opening segment's header is damaged", &unopened, &Refused("segment header checksum"));

    let mut copied = maker;
    copied.frame_at(3)[90] ^= 1;
    check("the copied tail is durable", &copied, &Refused("(lsn 3): payload checksum"));
}

/// Only the opening states where the previous incarnation ends, and that the accepted batches are durable.
#[test]
fn changed_opening_record_is_detected() {
    let mut maker = four();
    maker.reopen(2);
    let with_header = |change: fn(&mut [u8])| {
        let mut maker = maker.clone();
        let header = &mut segment(&mut maker, 3)[..128];
        change(header);
        let crc = crc32fast::hash(&header[..124]);
        header[124..].copy_from_slice(&crc.to_le_bytes());
        maker
    };
    let chain = with_header(|header| header[88] ^= 1);
    check("another chain", &chain, &Refused("chain hash at the incarnation's end"));
    let passed = with_header(|header| header[80] += 16);
    check("an end between two frames", &passed, &Refused("end of the incarnation"));

    let mut lost = maker.clone();
    segment(&mut lost, 3)[4096..].fill(0);
    check("the copied tail is gone", &lost, &Refused("(lsn 3)"));
    segment(&mut lost, 2)[4096..].fill(0);
    segment(&mut lost, 1)[12288 + 90] ^= 1;
    check("and a batch before it is damaged", &lost, &Refused("at offset 12288 (lsn 2): payload"));
}

#[test]
fn only_marks_of_the_newest_incarnation_count() {
    let mut maker = four();
    let mut stale = maker.frame_at(2)[..80].to_vec();
    maker.reopen(2);
    maker.batch();
    // A frame of the previous incarnation, at its own position after the end, with a mark that covers
    // everything.
    let at = 12288_u64;
    stale[32..40].copy_from_slice(&3_u64.to_le_bytes());
    stale[40..48].copy_from_slice(&at.to_le_bytes());
    stale[48..64].fill(0);
    stale[48] = 9;
    stale[56] = 9;
    resum(&mut stale);
    assert_eq!(maker.at(5).0, 3);
    segment(&mut maker, 3)[at as usize..][..80].copy_from_slice(&stale);
    check("it is cut, and nothing else", &maker, &Torn(5, 6));
    maker.frame_at(5)[90] ^= 1;
    check("the last batch is torn", &maker, &Torn(4, 5));
}

#[test]
fn interrupted_open_changes_nothing_before_its_rename() {
    let sound = four();
    let mut attempt = four();
    attempt.reopen(4);
    // The attempt's opening segment still has its temporary name. The other empty segment exists.
    let mut maker = sound;
    let opening = attempt.files.0[&FileName::Segment(3)].clone();
    maker.files.0.insert(FileName::Temporary(remanent_format::Folder::Log, 3), opening);
    maker.files.0.insert(FileName::Segment(4), attempt.files.0[&FileName::Segment(4)].clone());
    check("before the rename", &maker, &Clean(4));
}

#[test]
fn rebuild_refuses_pages_over_the_limit() {
    let maker = four();
    let options = RebuildOptions { page_bytes_max: 63, ..RebuildOptions::default() };
    let damage = rebuild(&maker.files, &options).unwrap_err();
    assert!(damage.to_string().contains("bytes of all pages is 64, over the limit of 63"), "{damage}");
}

#[test]
fn huge_length_is_an_error_not_an_abort() {
    let len = 1 << 40;
    let (page, key, metadata) = (PageId(2), None, Metadata::new());
    let create = Op::Create { page, len, place: Place::Host, key, metadata };
    let resize = |len| Op::Resize { page: PAGE, len };
    for (why, op) in [("created so", create), ("resized so", resize(len))] {
        let mut maker = four();
        maker.batch_of(&[op], true);
        let options = RebuildOptions { page_bytes_max: 1 << 30, ..RebuildOptions::default() };
        let damage = rebuild(&maker.files, &options).unwrap_err().to_string();
        assert!(damage.contains("bytes of all pages is 1099511"), "{why}: {damage}");
    }
    let base = Base { image: None, len: u64::MAX, lsn: Lsn(1), resized: true };
    let damage = load_base(&four().files, &base, u64::MAX).unwrap_err();
    assert_eq!(damage.defect, remanent_format::Defect::Memory { needed: u64::MAX });
}

#[test]
fn shrunk_page_needs_memory_only_for_final_length() {
    let len = 1 << 40;
    let mut maker = four();
    let resize = |len| Op::Resize { page: PAGE, len };
    let write = Op::Write { page: PAGE, offset: 60, bytes: &[7; 10] };
    let (page, key, metadata) = (PageId(2), None, Metadata::new());
    let create = Op::Create { page, len, place: Place::Host, key, metadata };
    maker.batch_of(&[resize(len), write, resize(5), resize(len), create], true);
    maker.batch_of(&[resize(64), Op::Resize { page, len: 3 }], true);
    let options = RebuildOptions { page_bytes_max: 67, ..RebuildOptions::default() };
    let rebuilt = rebuild(&maker.files, &options).unwrap();
    let cut: Vec<u8> = content(4)[..5].iter().copied().chain([0; 59]).collect();
    assert_eq!(rebuilt.contents, [(PAGE, cut), (page, vec![0; 3])].into());
}

#[test]
fn image_longer_than_final_page_is_verified_whole() {
    let resize = |len| Op::Resize { page: PAGE, len };
    for compress in [false, true] {
        let mut maker = Maker::new();
        maker.compress = compress;
        maker.batch().batch_with_image(7).batch_of(&[resize(6), resize(9)], true);
        let options = RebuildOptions { page_bytes_max: 9, ..RebuildOptions::default() };
        let contents = rebuild(&maker.files, &options).unwrap().contents;
        assert_eq!(contents[&PAGE], [2, 2, 2, 2, 2, 2, 0, 0, 0], "compressed: {compress}");

        // Damage the last stored byte. The shortened page does not contain the bytes that it encodes.
        let stored_len = maker.image(7, ImagePurpose::Batch, 2).stored_len as usize;
        maker.files.0.get_mut(&FileName::Pages(7)).unwrap()[4096 + 128 + stored_len - 1] ^= 1;

        let damage = rebuilt(&maker).unwrap_err();
        assert!(damage.contains("0000000000000007.pages at offset 4224: image checksum"), "{damage}");
    }
}

#[test]
fn archives_contain_complete_stores() {
    let mut maker = four();
    maker.snapshot(1, 2, 4, 4);
    maker.reopen(4);
    assert_eq!(maker.files.0[&FileName::Store][24..40], STORE.0);
    assert_eq!(Files::from_archive(&maker.files.to_archive()), maker.files);
}

/// Seeds for the fuzz target that reads whole stores.
fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let mut snapshots = four();
    snapshots.snapshot(1, 2, 2, 2).snapshot(2, 3, 3, 4);
    let mut reopened = snapshots.clone();
    reopened.reopen(3);
    reopened.batch().sync().batch();
    let mut restored = four();
    let table = Manifest { kind: ManifestKind::Table, end: Lsn(5), ..restored.manifest(9, 2, 2, 2) };
    let table_crc = restored.publish(FileName::Table(9), &table);
    restored.batch_of(&[Op::Restore { table: 9, table_crc, restored: Lsn(2) }], true);
    let mut compressed = four();
    compressed.compress = true;
    compressed.snapshot(1, 2, 3, 4);
    let mut moved = batches::moved();
    batches::snapshot_of_moved(&mut moved, 2, 3, 4);
    let names = ["four", "snapshots", "reopened", "restored", "compressed", "moved"];
    names
        .into_iter()
        .zip([four(), snapshots, reopened, restored, compressed, moved])
        .map(|(name, maker)| (name, maker.files.to_archive()))
        .collect()
}

#[test]
fn fuzzer_seeds_match_sample_stores() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds/rebuild");
    let write = std::env::var_os("REMANENT_GOLDEN").is_some_and(|value| value == "write");
    for (name, bytes) in seeds() {
        let path = folder.join(format!("{name}.bin"));
        if write {
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(&path, &bytes).unwrap();
        }
        assert!(std::fs::read(&path).unwrap() == bytes, "{name}: run this test with REMANENT_GOLDEN=write");
        let files = Files::from_archive(&bytes);
        let rebuilt = rebuild(&files, &RebuildOptions::default());
        assert!(rebuilt.is_ok(), "{name}: {rebuilt:?}");
    }
}

#[test]
fn repository_inputs_pass_every_fuzz_target() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folders = ["tests/golden/sound", "tests/golden/damaged", "../fuzz/seeds/rebuild", "../fuzz/found"];
    let mut inputs = 0;
    for folder in folders {
        for entry in std::fs::read_dir(root.join(folder)).unwrap() {
            let path = entry.unwrap().path();
            let bytes = std::fs::read(&path).unwrap();
            for (_, target) in decoders::TARGETS {
                target(&bytes);
            }
            inputs += 1;
        }
    }
    assert!(inputs > 200, "only {inputs} inputs were found");
}
