//! The cost of sparse deltas. Versions of weights are kept as deltas, so a batch must extend the log by only
//! slightly more than the changed elements.

use std::collections::BTreeMap;

use remanent::batch::Width;
use remanent::disk::dir::DirReader;
use remanent::options::LogOptions;
use remanent::{Lsn, Options, Place, Store};
use remanent_format::frame::FrameKind;
use remanent_format::limits::GROUP_ALIGN;
use remanent_format::log::LogWalk;
use remanent_format::segment::SEGMENT_HEADER_BLOCK;
use remanent_format::state::survey::Survey;

use crate::kill::workload::Random;

/// The length of a batch's frame, and the number of bytes by which the batch extended the log, including the
/// start of a new group.
struct Growth {
    frame_len: u64,
    log_len: u64,
}

fn growth_by_batch(directory: &std::path::Path) -> BTreeMap<Lsn, Growth> {
    let source = DirReader::new(directory);
    let survey = Survey::read(&source).unwrap();
    let from = survey.log.beginning().unwrap();
    let mut walk = LogWalk::new(&source, &survey.log, from, survey.mark()).unwrap();
    let mut growth = BTreeMap::new();
    let (mut segment, mut before) = (from.segment, from.offset);
    while let Some(frame) = walk.next().unwrap() {
        let end = frame.header.end();
        if frame.header.segment != segment {
            (segment, before) = (frame.header.segment, SEGMENT_HEADER_BLOCK);
        }
        if frame.header.kind == FrameKind::Batch {
            let (frame_len, log_len) = (frame.header.frame_len(), end - before);
            growth.insert(frame.header.lsn, Growth { frame_len, log_len });
        }
        before = end;
    }
    growth
}

#[test]
fn sparse_delta_of_one_percent_costs_little_overhead() {
    let directory = tempfile::tempdir().unwrap();
    let store = Options::new().log(LogOptions::new().segment_len(4 << 20)).open(directory.path()).unwrap();
    let mut random = Random(7);
    let mut cases = Vec::new();
    for (width, page_len) in
        [(Width::W4, 1 << 20), (Width::W4, 8 << 20), (Width::W2, 1 << 20), (Width::W2, 8 << 20)]
    {
        let mut batch = store.batch();
        let page = batch.create(page_len, Place::Host).page();
        let page = store.commit(batch).map(|committed| committed.pages[page.index()]).unwrap();
        let elements = page_len as u32 / width.bytes() as u32;
        let indices: Vec<u32> = (0..elements).filter(|_| random.below(100) == 0).collect();
        let values = random.bytes((indices.len() * width.bytes()) as u64);
        let mut expected = vec![0; page_len as usize];
        for (index, value) in indices.iter().zip(values.chunks_exact(width.bytes())) {
            expected[*index as usize * width.bytes()..][..width.bytes()].copy_from_slice(value);
        }
        let mut batch = store.batch();
        batch.scatter(page, width, &indices, &values);
        let lsn = store.commit(batch).unwrap().position.lsn;
        cases.push((lsn, page, width, indices.len(), expected));
    }
    drop(store);

    let growth = growth_by_batch(directory.path());
    let store = Store::open(directory.path()).unwrap();
    for (lsn, page, width, changed, expected) in cases {
        let mut found = vec![0; expected.len()];
        store.read(page, 0, &mut found).unwrap();
        assert!(found == expected, "{width:?} in {} bytes", expected.len());

        let plain = (changed * (4 + width.bytes())) as f64;
        let Growth { frame_len, log_len } = growth[&lsn];
        let factor = frame_len as f64 / plain;
        println!("{width:?}, page of {} bytes: {factor:.3} of {plain}", expected.len());
        // Four bytes per index would be a factor of 1. A gap takes 1.3 bytes.
        assert!(factor <= 0.70, "{width:?} in {} bytes: {factor}", expected.len());
        // Timing determines whether the log was synced just before, so that a new group begins. If so, up to
        // the alignment of a group is lost.
        assert!((frame_len..frame_len + GROUP_ALIGN).contains(&log_len), "{log_len} for {frame_len}");
        assert!(log_len as f64 <= 1.05 * plain, "{width:?} in {} bytes: {log_len}", expected.len());
    }
}
