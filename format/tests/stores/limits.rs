//! Limits of numbers: every structure rejects a number above `NUMBER_MAX`, and no counter exceeds it.

use remanent_format::frame::{UncheckedFrame, VerifiedSnapshot, decode_seal, encode_seal};
use remanent_format::limits::{NUMBER_MAX, SEGMENT_LEN_MAX, SEGMENT_LEN_MIN};
use remanent_format::manifest::Manifest;
use remanent_format::op::{Op, PayloadWriter, decode_payload};
use remanent_format::segment::{Opening, SegmentHeader};
use remanent_format::state::rebuild::{RebuildOptions, rebuild};
use remanent_format::{
    Defect, Epoch, FileName, Folder, Incarnation, LogPoint, Lsn, PageId, Place, SnapshotId,
};

use crate::maker::{Maker, PAGE, STORE};
use crate::verdict::{Clean, Refused, check, four, rebuilt, resum};

fn is_limit<T: std::fmt::Debug>(found: Result<T, Defect>) -> bool {
    match found {
        Err(Defect::Limit { .. }) => true,
        Err(other) => panic!("{other:?}"),
        Ok(_) => false,
    }
}

#[test]
fn restore_with_overflowing_batch_is_refused() {
    let decode = |restored: u64, table: u64| {
        let mut writer = PayloadWriter::default();
        writer.push(&Op::Restore { table: 1, table_crc: 7, restored: Lsn(1) }).unwrap();
        let mut payload = writer.finish();
        // Payload head, operation header, body.
        payload[16 + 16..16 + 24].copy_from_slice(&table.to_le_bytes());
        payload[16 + 32..16 + 40].copy_from_slice(&restored.to_le_bytes());
        decode_payload(&payload).map(|ops| ops.len())
    };
    assert!(!is_limit(decode(NUMBER_MAX, NUMBER_MAX)));
    assert!(is_limit(decode(NUMBER_MAX + 1, 1)), "the batch restored");
    assert!(is_limit(decode(1, NUMBER_MAX + 1)), "the table's number");
}

#[test]
fn seal_with_overflowing_snapshot_is_refused() {
    let seal = |snapshot| {
        encode_seal(&[VerifiedSnapshot { snapshot: SnapshotId(snapshot), manifest_crc: 1, log_kept: false }])
    };
    assert!(!is_limit(decode_seal(&seal(NUMBER_MAX))));
    assert!(is_limit(decode_seal(&seal(NUMBER_MAX + 1))));
}

#[test]
fn frame_with_overflowing_mark_is_refused() {
    let mut maker = four();
    let frame = maker.frame_at(4);
    let claim = |frame: &mut [u8], durable: u64| {
        frame[56..64].copy_from_slice(&durable.to_le_bytes());
        resum(frame);
        UncheckedFrame::decode(&frame[..80])
    };
    assert!(!is_limit(claim(frame, NUMBER_MAX)));
    assert!(is_limit(claim(frame, NUMBER_MAX + 1)));
}

#[test]
fn opening_with_impossible_point_is_refused() {
    let decode = |predecessor: LogPoint| {
        let opening = Opening {
            incarnation: Incarnation { number: 2, random: 1 },
            predecessor,
            accepted: Lsn(9),
            accepted_chain: 3,
        };
        let header =
            SegmentHeader { store: STORE, segment: 3, segment_len: SEGMENT_LEN_MIN, opening: Some(opening) };
        SegmentHeader::decode(&header.encode())
    };
    let incarnation = Incarnation { number: 1, random: 1 };
    let point = LogPoint { incarnation, lsn: Lsn(9), segment: NUMBER_MAX, offset: 4096, chain: 3 };
    assert!(!is_limit(decode(point)));
    assert!(is_limit(decode(LogPoint { segment: NUMBER_MAX + 1, ..point })));
    assert!(!is_limit(decode(LogPoint { offset: 2 * SEGMENT_LEN_MAX, ..point })));
    assert!(is_limit(decode(LogPoint { offset: 2 * SEGMENT_LEN_MAX + 16, ..point })));
}

#[test]
fn file_numbers_do_not_overflow() {
    for file in [
        FileName::Segment,
        FileName::Spare,
        FileName::Pages,
        FileName::ImageSpare,
        FileName::Table,
        FileName::Manifest,
    ] {
        let (highest, above) = (file(NUMBER_MAX), file(NUMBER_MAX + 1));
        assert_eq!(FileName::parse(highest.folder(), &highest.name()), Some(highest));
        assert_eq!(FileName::parse(above.folder(), &above.name()), None);
    }
    assert_eq!(FileName::parse(Folder::Log, "ffffffffffffffff.log"), None);
}

/// A store that was created from a salvaged state has no earlier incarnation but does have earlier batches,
/// so its log does not begin with the empty store.
#[test]
fn store_created_from_a_state_has_no_empty_beginning() {
    let with_predecessor = |predecessor: LogPoint| {
        let mut files = Maker::new().files;
        let segment = files.0.get_mut(&FileName::Segment(1)).unwrap();
        let header = SegmentHeader::decode(&segment[..128]).unwrap();
        let before = header.opening.unwrap();
        let opening = Opening { predecessor, accepted: predecessor.lsn, ..before };
        segment.truncate(4096);
        segment.resize(header.segment_len as usize, 0);
        segment[..128].copy_from_slice(&SegmentHeader { opening: Some(opening), ..header }.encode());
        rebuild(&files, &RebuildOptions::default()).map(|found| found.table.lsn())
    };
    assert_eq!(with_predecessor(LogPoint::default()), Ok(Lsn(0)));
    for predecessor in [
        LogPoint { lsn: Lsn(9), ..LogPoint::default() },
        LogPoint { segment: 4, ..LogPoint::default() },
        LogPoint { chain: 4, ..LogPoint::default() },
        LogPoint { incarnation: Incarnation { number: 0, random: 3 }, ..LogPoint::default() },
    ] {
        let found = with_predecessor(predecessor);
        assert!(found.is_err(), "{predecessor:?}: {found:?}");
    }
}

/// Replay starts at a manifest's `redo`. If `redo` is past the end of its segment, a walk would find neither
/// a frame nor damage.
#[test]
fn walk_start_outside_its_segment_is_refused() {
    let publish = |change: fn(&mut Manifest)| {
        let mut maker = four();
        let mut manifest = maker.manifest(1, 2, 2, 2);
        change(&mut manifest);
        maker.files.0.insert(FileName::Manifest(1), manifest.encode().unwrap_or_default());
        // Damage the start of the log, which would otherwise be used instead.
        let opening = maker.files.0.get_mut(&FileName::Segment(1)).unwrap();
        opening[4096..4096 + 80].fill(0);
        maker
    };
    check("as it is written", &publish(|_| {}), &Clean(4));
    let segment_len = SEGMENT_LEN_MIN;
    for offset in [segment_len + 16, 1 << 40, u64::MAX - 15, u64::MAX, 4080, 0, 4097] {
        let mut maker = four();
        maker.snapshot(1, 2, 2, 2);
        let bytes = maker.files.0.get_mut(&FileName::Manifest(1)).unwrap();
        let half = bytes.len() / 2;
        for copy in bytes.chunks_mut(half) {
            copy[64 + 24..64 + 32].copy_from_slice(&offset.to_le_bytes());
            let crc = crc32fast::hash(&copy[..252]);
            copy[252..256].copy_from_slice(&crc.to_le_bytes());
        }
        maker.files.0.get_mut(&FileName::Segment(1)).unwrap()[4096] ^= 1;
        let found = rebuilt(&maker);
        assert!(found.is_err(), "redo at offset {offset}: {:?}", found.map(|found| found.table.lsn()));
    }
    check(
        "in a segment that no number can name",
        &publish(|manifest| manifest.redo.segment = NUMBER_MAX + 1),
        &Refused(""),
    );
}

#[test]
fn epoch_and_page_id_do_not_overflow() {
    let at_epoch = |epoch: u64| {
        let mut maker = four();
        let mut manifest = maker.manifest(1, 4, 4, 4);
        manifest.entries[0].epoch = Epoch(epoch);
        manifest.epoch_high = Epoch(epoch);
        maker.publish(FileName::Manifest(1), &manifest);
        maker
    };
    let write = Op::Write { page: PAGE, offset: 0, bytes: &[1; 8] };
    let set = Op::RemoveMetadata { page: PAGE, name: "a" };
    let epoch_after = |maker: &Maker| rebuilt(maker).map(|found| found.table.get(PAGE).unwrap().epoch);
    for op in [&write, &set] {
        let mut below = at_epoch(NUMBER_MAX - 1);
        below.batch_of(std::slice::from_ref(op), true);
        assert_eq!(epoch_after(&below), Ok(Epoch(NUMBER_MAX)));
        let mut highest = at_epoch(NUMBER_MAX);
        assert_eq!(epoch_after(&highest), Ok(Epoch(NUMBER_MAX)));
        highest.batch_of(std::slice::from_ref(op), true);
        // From the beginning of the log, replay reaches another epoch. Without the beginning, the snapshot is
        // the only start.
        highest.files.0.get_mut(&FileName::Segment(1)).unwrap()[4096] ^= 1;
        assert!(epoch_after(&highest).is_err_and(|damage| damage.contains("epoch")), "{op:?}");
    }
    let create = |page| Op::Create {
        page: PageId(page),
        len: 0,
        place: Place::Host,
        key: None,
        metadata: Default::default(),
    };
    let mut last = four();
    last.batch_of(&[create(NUMBER_MAX - 1)], true);
    assert_eq!(rebuilt(&last).unwrap().table.next_page(), NUMBER_MAX);
    let mut past = four();
    past.batch_of(&[create(NUMBER_MAX)], true);
    assert!(rebuilt(&past).unwrap_err().contains("page id"));
}

/// A valid frame header beyond the end of the log provides a durable mark, like a frame in order.
#[test]
fn mark_beyond_the_end_advances_the_proven_end() {
    let mut maker = Maker::new();
    maker.batch().batch().batch();
    maker.sync().batch();
    let end = |maker: &Maker| rebuilt(maker).unwrap().end.unwrap();
    assert_eq!(end(&maker).proven.lsn, Lsn(3));
    // The payload of the last batch is missing. Its header states that the three previous batches are durable.
    maker.frame_at(4)[90] ^= 1;
    let found = end(&maker);
    assert_eq!((found.accepted.lsn, found.proven), (Lsn(3), maker.end(3)));
    assert_eq!(found.torn.map(|torn| torn.first), Some(Lsn(4)));
}
