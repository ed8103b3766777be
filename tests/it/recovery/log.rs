//! The rows about the log: torn tails, damage, missing segments, and interrupted opens.

use remanent::disk::Disk;
use remanent::error::{Defect, FileName, Remedy};
use remanent::testing::sim_disk::{CrashPlan, DiskFault, EIO, Operation, SimDisk};
use remanent::{Lsn, PageId};
use remanent_format::frame::{FrameHeader, FrameHeaderRaw, FrameKind, UncheckedFrame};
use remanent_format::limits::{FRAME_ALIGN, GROUP_ALIGN, align_up};
use remanent_format::state::survey::Survey;

use super::bench::{
    create_page, flip, frame_of, frame_where, killed_after_batch, refused_at, remove, step, stepped,
};
use crate::files::{Files, State, open, open_with, small};
use crate::with_options::With;

/// Returns a store that was killed after its third batch, and the state after two batches. A mark covers only
/// two of them. All batches are in one segment, even if each is synced and sealed separately, as on a busy
/// machine, because a segment that contains only cut frames would be recycled.
fn torn() -> (SimDisk, State) {
    let disk = SimDisk::new();
    let store = open_with(&disk, small().with(|options| options.log.segment_len = 64 << 10)).unwrap();
    let page = create_page(&store);
    let lsn = step(&store, page, 1);
    store.wait_durable(lsn).unwrap();
    let state = State::of(&store);
    step(&store, page, 2);
    store.close().unwrap();
    (killed_after_batch(&disk, 3), state)
}

#[test]
fn torn_tail_is_cut() {
    let (whole, state) = torn();
    let (segment, offset) = frame_of(&Files::of(&whole), 3);
    type Tear<'a> = (&'a str, &'a dyn Fn(&SimDisk));
    let tears: [Tear<'_>; 4] = [
        ("payload", &|disk| flip(disk, segment, offset + 80)),
        ("header", &|disk| flip(disk, segment, offset + 50)),
        ("own position", &|disk| flip(disk, segment, offset + 33)),
        ("half of the header", &|disk| disk.damage(segment, offset, &[0; 32])),
    ];
    for (what, tear) in tears {
        let disk = Files::of(&whole).disk();
        tear(&disk);
        let store = open(&disk).unwrap();
        assert_eq!(State::of(&store), state, "{what}");
        let recovered = store.recovered();
        assert_eq!((recovered.position.incarnation.number, recovered.position.lsn), (2, Lsn(2)), "{what}");
        assert_eq!(recovered.previous.map(|previous| previous.incarnation.number), Some(1), "{what}");
        // The marks of batches 1 and 2 may have been in the frame that was cut off. In that case, the batches
        // are copied.
        assert!(recovered.copied_batches <= 2, "{what}");
        let torn = recovered.torn.as_ref().unwrap_or_else(|| panic!("{what}: the cut is not reported"));
        assert_eq!((FileName::Segment(torn.segment), torn.offset), (segment, offset), "{what}");
        assert_eq!((torn.first, torn.last), (Lsn(3), Lsn(3)), "{what}");
        // The number is assigned again, because the lost batch 3 was not acknowledged as durable.
        assert_eq!(create_page(&store), PageId(2), "{what}");
        assert_eq!(store.lsn(), Lsn(3), "{what}");
    }

    // A complete frame that no mark covers is copied instead of cut off.
    let store = open(&whole).unwrap();
    assert_eq!((store.recovered().position.lsn, &store.recovered().torn), (Lsn(3), &None));
    assert_eq!(store.recovered().copied_batches, 1);
}

#[test]
fn damage_under_a_mark_is_refused() {
    let (disk, _, state) = stepped(3);
    let whole = Files::of(&disk);
    for lsn in 1..=4 {
        let (segment, offset) = frame_of(&whole, lsn);
        for within in [0, 50, 80] {
            let disk = whole.disk();
            flip(&disk, segment, offset + within);
            let defect = refused_at(&disk, segment, offset, Some(Lsn(lsn)));
            assert_eq!(matches!(defect, Defect::Checksum { what: "payload", .. }), within == 80, "{defect}");
        }
    }
    // The last seal covers no later frame.
    let (segment, offset) = frame_where(&whole, |header| header.kind == FrameKind::Seal);
    let disk = whole.disk();
    flip(&disk, segment, offset);
    assert_eq!(State::of(&open(&disk).unwrap()), state);

    // A frame that joined an open group may be the only frame with a newer mark. The segment has space for
    // both batches in any groups, and for two more.
    let disk = SimDisk::new();
    let store = open_with(&disk, small().with(|options| options.log.segment_len = 64 << 10)).unwrap();
    let page = create_page(&store);
    step(&store, page, 0);
    store.close().unwrap();
    let whole = Files::of(&killed_after_batch(&disk, 2));
    let (segment, offset) = frame_of(&whole, 2);
    let disk = whole.disk();
    let third = append(&disk, segment, offset, true, Lsn(1));
    append(&disk, segment, third, false, Lsn(2));
    assert_eq!(open(&Files::of(&disk).disk()).unwrap().lsn(), Lsn(4));
    flip(&disk, segment, offset + 80);
    refused_at(&disk, segment, offset, Some(Lsn(2)));
}

/// Appends a frame for the next batch after the frame of batch `before`. Returns the offset of the new frame.
fn append(disk: &SimDisk, segment: FileName, before: u64, group_start: bool, durable: Lsn) -> u64 {
    let bytes = disk.bytes(segment).unwrap();
    let header = *UncheckedFrame::decode(&bytes[before as usize..]).unwrap().unproven();
    let offset = align_up(header.end(), if group_start { GROUP_ALIGN } else { FRAME_ALIGN });
    let payload = before as usize + FrameHeaderRaw::LEN;
    let payload = &bytes[payload..payload + header.payload_len as usize];
    let next = FrameHeader {
        group_start,
        offset,
        lsn: header.lsn.next(),
        durable,
        chain_prev: header.encode().1,
        ..header
    };
    disk.damage(segment, offset, &next.encode().0);
    disk.damage(segment, offset + FrameHeaderRaw::LEN as u64, payload);
    offset
}

#[test]
fn unreadable_log_is_refused() {
    let (whole, _) = torn();
    let expected = State::of(&open(&Files::of(&whole).disk()).unwrap());
    let (mut refused, mut opened) = (0, 0);
    // Unreadable bytes are read again. Only several consecutive failures end a walk, and the following bytes
    // are then still examined.
    for times in [1, 2, 3, 4, 5, 6, usize::MAX] {
        for skip in 0..40 {
            let disk = Files::of(&whole).disk();
            disk.fail(DiskFault { operation: Operation::Read, skip, times, errno: EIO });
            match open(&disk) {
                Ok(store) => {
                    // The failed read was repeated, or its bytes were not needed. It was not mistaken for the
                    // end of the log.
                    assert_eq!(store.recovered().torn, None, "read {skip}");
                    assert_eq!(store.lsn(), Lsn(3), "read {skip}");
                    opened += 1;
                }
                Err(error) => {
                    assert!(matches!(error.remedy(), Remedy::Inspect | Remedy::Reopen), "{error}");
                    refused += 1;
                }
            }
            disk.clear_faults();
            assert_eq!(State::of(&open(&disk).unwrap()), expected, "read {skip}, later");
        }
    }
    assert!(refused > 10 && opened > 10, "{refused} refused, {opened} opened");
}

#[test]
fn truncated_frames_stay_truncated() {
    let (disk, _) = torn();
    let (segment, offset) = frame_of(&Files::of(&disk), 3);
    flip(&disk, segment, offset + 80);
    let store = open(&disk).unwrap();
    assert!(store.recovered().torn.is_some());
    let page = create_page(&store);
    let state = State::of(&store);
    store.close().unwrap();
    // The medium returns the old bytes. They are after the end of their incarnation, where no open reads.
    flip(&disk, segment, offset + 80);
    for incarnation in 3..6 {
        let store = open(&disk).unwrap();
        assert_eq!(State::of(&store), state);
        let recovered = store.recovered();
        assert_eq!((recovered.position.incarnation.number, recovered.position.lsn), (incarnation, Lsn(3)));
        assert_eq!(recovered.torn, None);
        store.close().unwrap();
    }
    let store = open(&disk).unwrap();
    assert_eq!(step(&store, page, 9), Lsn(4));
}

#[test]
fn missing_newest_segment_is_refused() {
    let (disk, ..) = stepped(100);
    let whole = Files::of(&disk);
    let (FileName::Segment(last), _) = frame_where(&whole, |header| header.lsn == Lsn(101)) else {
        unreachable!("frames lie in segments")
    };
    let disk = whole.disk();
    for file in whole.segments().into_iter().filter(|file| *file > FileName::Segment(last)) {
        disk.remove(file).unwrap();
    }
    let defect = refused_at(&disk, FileName::Segment(last + 1), 0, Some(Lsn(102)));
    assert_eq!(defect, Defect::Missing);
    // If the segment of the last frames is also missing, the previous segment has no successor.
    remove(&disk, FileName::Segment(last));
    let defect = refused_at(&disk, FileName::Segment(last), 0, None.or(lost_after(&whole, last - 1)));
    assert_eq!(defect, Defect::Missing);
}

/// Returns the batch after the last one in a segment.
fn lost_after(files: &Files, segment: u64) -> Option<Lsn> {
    let bytes = &files.0[&FileName::Segment(segment)];
    let lsns = (0..bytes.len() - FrameHeaderRaw::LEN).step_by(16).filter_map(|at| {
        let frame = UncheckedFrame::decode(&bytes[at..]).ok()?;
        (frame.unproven().segment == segment).then_some(frame.unproven().lsn)
    });
    lsns.max().map(Lsn::next)
}

#[test]
fn missing_segment_is_refused() {
    let (disk, ..) = stepped(100);
    let whole = Files::of(&disk);
    let (file, _) = frame_of(&whole, 50);
    let FileName::Segment(number) = file else { unreachable!("frames lie in segments") };
    let lost = lost_after(&whole, number - 1);

    let disk = whole.disk();
    remove(&disk, file);
    assert_eq!(refused_at(&disk, file, 0, lost), Defect::Missing);

    let (other, ..) = stepped(100);
    let disk = whole.disk();
    disk.damage(file, 0, &other.bytes(file).unwrap());
    assert_eq!(refused_at(&disk, file, 0, lost), Defect::Foreign);

    let disk = whole.disk();
    disk.damage_len(file, 8192);
    let defect = refused_at(&disk, file, 0, lost);
    assert!(matches!(defect, Defect::Mismatch { what: "segment's length", .. }), "{defect}");

    let disk = whole.disk();
    let next = FileName::Segment(number + 1);
    disk.damage(file, 0, &whole.0[&next]);
    disk.damage(next, 0, &whole.0[&file]);
    let defect = refused_at(&disk, file, 0, lost);
    assert!(matches!(defect, Defect::Mismatch { what: "segment's number", .. }), "{defect}");
}

#[test]
fn bad_segment_header_is_refused() {
    let (disk, ..) = stepped(100);
    open(&disk).unwrap().close().unwrap();
    let whole = Files::of(&disk);
    let survey = Survey::read(&whole).unwrap();
    let openings: Vec<u64> = survey.log.line().iter().map(|(segment, _)| *segment).collect();
    let with_frames = survey.log.segments().iter().filter(|(_, segment)| segment.frames.is_some());
    let with_frames: Vec<u64> = with_frames.map(|(number, _)| *number).collect();
    assert!(openings.len() == 2 && with_frames.len() > 3, "{openings:?} {with_frames:?}");
    for number in with_frames {
        let disk = whole.disk();
        flip(&disk, FileName::Segment(number), 20);
        let lost = if openings.contains(&number) { None } else { lost_after(&whole, number - 1) };
        let defect = refused_at(&disk, FileName::Segment(number), 0, lost);
        assert!(matches!(defect, Defect::Checksum { what: "segment header", .. }), "{defect}");
    }
}

#[test]
fn bad_header_of_empty_segment_is_harmless() {
    let (disk, _, state) = stepped(3);
    let newest = *Files::of(&disk).segments().last().unwrap();
    flip(&disk, newest, 20);
    let store = open(&disk).unwrap();
    assert_eq!(State::of(&store), state);
    assert_eq!(store.recovered().torn, None);
    let [harmless] = &store.recovered().harmless[..] else { panic!("{:?}", store.recovered().harmless) };
    assert_eq!((harmless.file, harmless.offset), (newest, 0));
    store.close().unwrap();
    let store = open(&disk).unwrap();
    assert_eq!(State::of(&store), state);
    assert_eq!(store.recovered().harmless, []);
}

#[test]
fn crash_before_the_rename_changes_nothing() {
    let (disk, _) = torn();
    let state = State::of(&open(&Files::of(&disk).disk()).unwrap());
    let disk = Files::of(&disk).disk();
    let from = disk.events();
    let store = open(&disk).unwrap();
    let id = store.id();
    let plan = CrashPlan { events: from..disk.events(), images_max: 16, ..CrashPlan::default() };
    drop(store);
    let (mut before, mut after) = (0, 0);
    let mut check = |image: remanent::testing::sim_disk::CrashImage| {
        let name = image.to_string();
        let survey = Survey::read(&image.disk).unwrap();
        let number = survey.log.newest().unwrap().number;
        *(if number == 1 { &mut before } else { &mut after }) += 1;
        let store = open(&image.disk).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(State::of(&store), state, "{name}");
        assert_eq!(store.id(), id);
        let recovered = store.recovered();
        assert_eq!(recovered.position.incarnation.number, number + 1, "{name}");
        assert_eq!((recovered.position.lsn, &recovered.torn), (Lsn(3), &None), "{name}");
    };
    disk.kill_images(&plan, &mut check);
    disk.power_images(&plan, &mut check);
    assert!(before > 20 && after > 0, "{before} before the rename, {after} after it");
}
