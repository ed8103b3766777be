//! Compares the fast path for batches that only change bytes with the general path.

use super::*;
use crate::frame::{FrameHeader, FrameKind};
use crate::ids::{Incarnation, StoreId, Width};
use crate::op::{Indices, Op, PayloadWriter, decode_payload};

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

const BYTES: [u8; 60] = [7; 60];
const INDICES: [u8; 8] = [0, 0, 0, 0, 9, 0, 0, 0];

/// Returns a random operation on one of the pages 1 to 9. Most operations are valid for a page of 100 bytes.
fn draw(random: &mut Random) -> Op<'static> {
    let page = PageId(1 + random.below(9));
    let offset = random.below(45);
    let bytes = &BYTES[..random.below(58) as usize];
    match random.below(5) {
        0 | 1 => Op::Write { page, offset, bytes },
        2 => Op::Masked { page, offset, width: Width::W1, mask: &[255; 5], bytes: &BYTES[..40] },
        3 => {
            let (indices, values) = (Indices::plain(&INDICES), &BYTES[..8]);
            Op::Scatter { page, width: Width::W4, base: offset, indices, values }
        }
        _ => Op::Fill { page, offset, len: 50, pattern: &BYTES[..2] },
    }
}

#[test]
fn combined_byte_changes_equal_batch_application() {
    let mut random = Random(1);
    let page = |number| PageInfo::new(PageId(number), 100, Place::Host);
    let new = || PageTable::from_parts((1..9).map(page), Arc::default(), 12, Epoch(3), Lsn(0));
    let (mut table, mut expected) = (new(), new());
    let (mut refused, mut changed) = (0, 0);
    for lsn in (1..4000).map(Lsn) {
        // About two of three batches have so few operations that all are valid.
        let count = random.below(4) * random.below(4);
        let ops: Vec<OpAt<'_>> = (0..count).map(|_| OpAt { op: draw(&mut random), body_at: 0 }).collect();
        let plan = expected.plan(lsn, &ops, PlanMode::Replay).map_err(|(_, refusal)| refusal);
        let found = table.change_bytes(lsn, &ops).expect("they change bytes alone");
        assert_eq!(found, plan.as_ref().map(drop).map_err(Clone::clone), "{lsn}: {ops:?}");
        match plan {
            Ok(changes) => {
                expected.install(&changes);
                changed += usize::from(count > 1);
            }
            Err(_) => refused += 1,
        }
        assert!(table == expected, "{lsn}: {ops:?}");
    }
    assert!(changed > 300 && refused > 300, "{changed} changed, {refused} refused");
}

/// Returns frame headers for batches with these payloads, numbered from `first` on.
fn frames(first: u64, payloads: &[Vec<u8>]) -> Vec<FrameHeader> {
    let header = |(payload, lsn): (&Vec<u8>, u64)| FrameHeader {
        kind: FrameKind::Batch,
        group_start: false,
        incarnation: Incarnation::default(),
        store: StoreId([1; 16]),
        segment: 1,
        offset: 4096 * lsn,
        lsn: Lsn(lsn),
        durable: Lsn(0),
        payload_len: payload.len() as u32,
        payload_crc: 0,
        chain_prev: 0,
    };
    payloads.iter().zip(first..).map(header).collect()
}

/// Applies batches with [`PageTable::change_bytes`] until a batch is invalid.
fn followed(mut table: PageTable, first: u64, payloads: &[Vec<u8>]) -> Result<PageTable, Refusal> {
    for (payload, lsn) in payloads.iter().zip(first..) {
        table.change_bytes(Lsn(lsn), &decode_payload(payload).unwrap()).expect("bytes alone")?;
    }
    Ok(table)
}

#[test]
fn combined_batches_equal_individual_application() {
    let mut random = Random(3);
    let page = |number| PageInfo::new(PageId(number), 100, Place::Host);
    let mut table = PageTable::from_parts((1..9).map(page), Arc::default(), 12, Epoch(3), Lsn(0));
    let (mut refused, mut changed, mut lsn) = (0, 0, 1);
    for round in 0..2000 {
        let payloads: Vec<Vec<u8>> = (0..1 + random.below(30))
            .map(|_| {
                let mut payload = PayloadWriter::on(Vec::new());
                for _ in 0..1 + random.below(4) {
                    // Occasionally name a missing page, or exceed the page.
                    let pages = if random.below(300) == 0 { 9 } else { 8 };
                    let page = PageId(1 + random.below(pages));
                    let offset_end = if random.below(300) == 0 { 80 } else { 40 };
                    let offset = random.below(offset_end);
                    let bytes = &BYTES[..random.below(58) as usize];
                    payload.push(&Op::Write { page, offset, bytes }).unwrap();
                }
                payload.finish()
            })
            .collect();
        let headers = frames(lsn, &payloads);
        let batches = headers.iter().zip(payloads.iter().map(Vec::as_slice));
        let summed = PageChanges::of(batches).unwrap();
        assert_eq!((summed.batches, summed.last.0), (payloads.len(), lsn + payloads.len() as u64 - 1));
        let frame_bytes: u64 = headers.iter().map(FrameHeader::frame_len).sum();
        assert_eq!(summed.frame_bytes, frame_bytes);
        assert!(summed.pages.is_sorted_by(|one, next| one.page < next.page));
        let before = table.clone();
        match followed(before.clone(), lsn, &payloads) {
            Ok(expected) => {
                assert!(table.change_pages(&summed) && table == expected, "round {round}");
                changed += 1;
                // Changes that the table already includes are not applied again.
                assert!(!table.change_pages(&summed) && table == expected, "round {round}");
            }
            Err(_) => {
                assert!(!table.change_pages(&summed) && table == before, "round {round}");
                refused += 1;
            }
        }
        lsn += payloads.len() as u64;
    }
    assert!(changed > 300 && refused > 30, "{changed} changed, {refused} refused");
}

#[test]
fn only_byte_changing_batches_are_combined() {
    let write = |page| Op::Write { page: PageId(page), offset: 1, bytes: &BYTES };
    let payload = |ops: &[Op<'_>]| {
        let mut payload = PayloadWriter::on(Vec::new());
        ops.iter().for_each(|op| payload.push(op).unwrap());
        payload.finish()
    };
    let note = payload(&[write(2), Op::Note { text: "text" }]);
    let broken = payload(&[write(2), write(2)])[..100].to_vec();
    for other in [note, broken] {
        let payloads = [payload(&[write(1), write(3)]), payload(&[write(3)]), other, payload(&[write(1)])];
        let headers = frames(5, &payloads);
        let batches = || headers.iter().zip(payloads.iter().map(Vec::as_slice));
        let change = |page, batches, lsn| PageChange { page: PageId(page), batches, lsn: Lsn(lsn), end: 61 };
        let summed = PageChanges::of(batches()).unwrap();
        assert_eq!((summed.first, summed.last, summed.batches), (Lsn(5), Lsn(6), 2));
        assert_eq!(summed.pages, [change(1, 1, 5), change(3, 2, 6)]);
        assert_eq!(PageChanges::of(batches().skip(2)), None);
        assert_eq!(PageChanges::of(batches().skip(3)).unwrap().pages, [change(1, 1, 8)]);
    }
    assert_eq!(PageChanges::of(std::iter::empty()), None);
}

#[test]
fn epoch_overflow_in_batch_summary_is_refused() {
    let page = |epoch| PageInfo { epoch: Epoch(epoch), ..PageInfo::new(PageId(1), 100, Place::Host) };
    let summed = PageChanges {
        first: Lsn(5),
        last: Lsn(7),
        batches: 3,
        frame_bytes: 0,
        pages: vec![PageChange { page: PageId(1), batches: 3, lsn: Lsn(7), end: 100 }],
    };
    for (epoch, do_follow) in [(NUMBER_MAX - 3, true), (NUMBER_MAX - 2, false)] {
        let mut table = PageTable::from_parts([page(epoch)], Arc::default(), 2, Epoch(epoch), Lsn(4));
        assert_eq!(table.change_pages(&summed), do_follow, "{epoch}");
    }
}

#[test]
fn fast_path_refuses_other_operations() {
    let page = PageId(1);
    let new = || {
        let pages = [PageInfo::new(page, 100, Place::Host)];
        PageTable::from_parts(pages, Arc::default(), 2, Epoch(1), Lsn(0))
    };
    let mut table = new();
    let mores = [
        Op::Resize { page, len: 50 },
        Op::Delete { page },
        Op::Move { page, place: Place::Pinned },
        Op::RemoveMetadata { page, name: "name" },
        Op::RemoveRoot { name: "name" },
        Op::Note { text: "text" },
    ];
    for more in mores {
        let write = Op::Write { page, offset: 0, bytes: &BYTES };
        let ops = [write, more].map(|op| OpAt { op, body_at: 0 });
        assert!(table.change_bytes(Lsn(1), &ops).is_none(), "{ops:?}");
        assert!(table == new(), "{ops:?}");
    }
}

/// If a page were not found again, it would be listed twice and its epoch would be raised twice.
#[test]
fn pages_are_found_in_any_batch_order() {
    let mut random = Random(7);
    for count in [1, 2, 8, 9, 10, 300] {
        let page = |number| PageInfo::new(PageId(number), 100, Place::Host);
        let table = PageTable::from_parts((1..=count).map(page), Arc::default(), count + 1, Epoch(1), Lsn(0));
        let rising: Vec<u64> = (1..=count).collect();
        let falling = rising.iter().rev().copied().collect();
        let mut shuffled = rising.clone();
        (1..count).for_each(|at| shuffled.swap(at as usize, random.below(at + 1) as usize));
        // Ascends up to the middle, then continues from the start.
        let late_fall = rising.iter().map(|page| (page + count / 2) % count + 1).collect();
        for order in [&rising, &falling, &shuffled, &late_fall] {
            for again in [&rising, &falling, &shuffled] {
                let write = |page: &u64| Op::Write { page: PageId(*page), offset: 0, bytes: &BYTES };
                let ops = order.iter().chain(again).map(|page| OpAt { op: write(page), body_at: 0 });
                let ops: Vec<OpAt<'_>> = ops.collect();
                let changes = table.plan(Lsn(1), &ops, PlanMode::Commit).unwrap();
                let found = changes.pages().iter().map(|(page, info)| (page.0, info.as_ref().unwrap().epoch));
                let expected = order.iter().map(|page| (*page, Epoch(1)));
                assert!(found.eq(expected), "{count} pages, {order:?} and {again:?}");
            }
        }
    }
}
