//! An incomplete frame is either not yet written or damaged. A durable mark distinguishes the two cases.

use remanent::error::FileName;

use super::*;

/// Returns a closed store of six batches, all of which the mark of the last seal covers.
fn closed_store() -> SimDisk {
    let (sim, disk) = sim();
    let mut writer = Writer::open(&disk, options());
    writer.commit(6);
    writer.store.close().unwrap();
    sim
}

/// Returns the segment, offset and length of each batch's frame, as found by the format crate.
fn frames(disk: &SimDisk) -> Vec<(FileName, u64, u64)> {
    use remanent_format::log::LogWalk;
    let survey = remanent_format::state::survey::Survey::read(disk).unwrap();
    let mut walk = LogWalk::new(disk, &survey.log, survey.log.beginning().unwrap(), Lsn(0)).unwrap();
    let mut frames = Vec::new();
    while let Some(frame) = walk.next().unwrap() {
        if frame.header.kind == remanent_format::frame::FrameKind::Batch {
            let (segment, offset) = (frame.header.segment, frame.header.offset);
            frames.push((FileName::Segment(segment), offset, frame.header.frame_len()));
        }
    }
    frames
}

/// Returns a copy of the disk with a part of one file overwritten.
fn with(disk: &SimDisk, file: FileName, offset: u64, bytes: &[u8]) -> Arc<dyn Disk> {
    let copy = disk.after_kill(Moment { event: disk.events(), tear: None });
    copy.damage(file, offset, bytes);
    Arc::new(copy)
}

#[test]
fn partial_frame_is_not_followed_yet() {
    let (sim, disk) = sim();
    let mut writer = Writer::open(&disk, options());
    writer.commit(4);
    // Take the disk state before a sync or a seal records anything about the last batch.
    let now = sim.after_kill(Moment { event: sim.events(), tear: None });
    let &(file, offset, len) = frames(&now).last().unwrap();
    let whole = now.bytes(file).unwrap()[offset as usize..][..len as usize].to_vec();
    let marks = remanent_format::state::rebuild::rebuild(&now, &Default::default()).unwrap().end.unwrap();
    assert!(marks.proven.lsn < Lsn(4), "a mark covers the batch that this test tears");
    let step = (len as usize / 40).max(1);
    for written in (0..len as usize).step_by(step) {
        // Only the first or the last part of the frame is visible, as can happen on another processor core.
        for part in [0..written, written..len as usize] {
            let mut torn = vec![0; len as usize];
            torn[part.clone()].copy_from_slice(&whole[part.clone()]);
            if torn == whole {
                continue;
            }
            let copy = now.after_kill(Moment { event: 0, tear: None });
            copy.damage(file, offset, &torn);
            let disk: Arc<dyn Disk> = Arc::new(copy.clone());
            let mut reader = Reader::open(&disk);
            assert_eq!(reader.catch_up().unwrap(), Lsn(3), "{part:?}");
            // This is long enough for the follower to check for damage.
            assert!(reader.follower.next(Duration::from_millis(25)).unwrap().is_none());
            // The rest of the frame becomes visible.
            copy.damage(file, offset, &whole);
            assert_eq!(reader.catch_up().unwrap(), Lsn(4), "{part:?}");
        }
    }
}

#[test]
fn damage_below_durable_mark_is_reported_with_position() {
    let sim = closed_store();
    let frames = frames(&sim);
    for (index, &(file, offset, len)) in frames.iter().enumerate() {
        let lsn = Lsn(index as u64 + 1);
        // Damage the magic, incarnation, Lsn, payload checksum, chain, header checksum and payload.
        for at in [0, 8, 48, 68, 72, 76, 80, 80 + (len - 80) / 2] {
            let byte = sim.bytes(file).unwrap()[(offset + at) as usize];
            let disk = with(&sim, file, offset + at, &[byte ^ 0x10]);
            check_damage(&disk, lsn, Some((file, offset)));
        }
        // No remaining bytes show where the frame was, so only its absence is known.
        let disk = with(&sim, file, offset, &vec![0; len as usize]);
        check_damage(&disk, lsn, None);
    }
}

/// Batches before the damage are delivered. The next call and each later call report the damage.
fn check_damage(disk: &Arc<dyn Disk>, lsn: Lsn, place: Option<(FileName, u64)>) {
    let mut reader = Reader::open(disk);
    for _ in 1..lsn.0 {
        assert!(reader.step().unwrap().is_some());
    }
    for _ in 0..2 {
        let Err(Error::Damaged(damage)) = reader.step() else { panic!("batch {lsn} is damaged") };
        assert_eq!(damage.lsn, Some(lsn), "{damage}");
        assert!(place.is_none_or(|place| place == (damage.file, damage.offset)), "{place:?}: {damage}");
        reader.reopen(disk).unwrap();
    }
}

#[test]
fn waiting_follower_detects_new_damage() {
    let (sim, disk) = sim();
    let mut writer = Writer::open(&disk, options());
    let mut reader = Reader::open(&disk);
    writer.commit(2);
    reader.catch_up().unwrap();
    writer.commit(3);
    writer.store.close().unwrap();
    let (file, offset, _) = frames(&sim)[3];
    sim.damage(file, offset + 80, &[0xff; 16]);
    assert_eq!(reader.step().unwrap().unwrap().lsn(), Lsn(3));
    let Err(Error::Damaged(damage)) = reader.follower.next(Duration::MAX) else { panic!("it is damaged") };
    assert_eq!((damage.file, damage.offset, damage.lsn), (file, offset, Some(Lsn(4))));
}

#[test]
fn lost_unrecycled_segment_is_damage() {
    let (sim, disk) = sim();
    let mut writer = Writer::open(&disk, options());
    while writer.store.stats().log.rolls < 3 {
        writer.commit(1);
    }
    writer.store.close().unwrap();
    let mut reader = Reader::open(&disk);
    reader.step().unwrap();
    let FileName::Segment(here) = frames(&sim)[0].0 else { panic!("frames lie in segments") };
    let lost = FileName::Segment(here + 1);
    sim.remove(lost).unwrap();
    let error = loop {
        match reader.step() {
            Ok(batch) => assert!(batch.is_some(), "a lost segment is not late"),
            Err(error) => break error,
        }
    };
    assert!(matches!(&error, Error::Damaged(damage) if damage.file == lost), "{error}");
}
