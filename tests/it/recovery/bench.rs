//! Stores in the states of the decision table, and checks of the error of a failed open.

use remanent::disk::Disk;
use remanent::error::{Defect, FileName, Remedy};
use remanent::testing::sim_disk::{CrashPlan, SimDisk, Tears};
use remanent::{Error, Lsn, Options, PageId, Place, Store};
use remanent_format::frame::{FrameHeader, FrameHeaderRaw, FrameKind, UncheckedFrame};
use remanent_format::segment::SEGMENT_HEADER_BLOCK;
use remanent_format::state::rebuild::{RebuiltStore, rebuild};
use remanent_format::state::survey::Survey;

use crate::files::{Files, State, open, open_with, small};

/// Commits a batch that changes the page in a way that depends on `number`.
pub fn step(store: &Store, page: PageId, number: u8) -> Lsn {
    let mut batch = store.batch();
    batch.write(page, u64::from(number), &[number; 40]).set_root("step", u64::from(number));
    store.commit(batch).unwrap().position.lsn
}

pub fn create_page(store: &Store) -> PageId {
    let mut batch = store.batch();
    batch.create(600, Place::Host);
    store.commit(batch).unwrap().pages[0]
}

/// Returns a store on a new disk with one page and some batches. Also returns the page and the last state.
pub fn stepped(steps: u8) -> (SimDisk, PageId, State) {
    let disk = SimDisk::new();
    let store = open(&disk).unwrap();
    let page = create_page(&store);
    for number in 0..steps {
        step(&store, page, number);
    }
    let state = State::of(&store);
    store.close().unwrap();
    (disk, page, state)
}

/// Returns a closed store with two snapshots, a log after each, and no log from before the first.
pub fn with_snapshots() -> (SimDisk, State) {
    let disk = SimDisk::new();
    let store = open(&disk).unwrap();
    let page = create_page(&store);
    for _ in 0..2 {
        for number in 0..120 {
            step(&store, page, number);
        }
        store.snapshot().unwrap();
    }
    step(&store, page, 200);
    let state = State::of(&store);
    store.close().unwrap();
    assert!(Survey::read(&Files::of(&disk)).unwrap().log.beginning().is_none(), "the log was recycled");
    (disk, state)
}

/// Returns the disk state after a kill at the last point that `wanted` accepts.
pub fn killed_when(disk: &SimDisk, wanted: impl Fn(&RebuiltStore) -> bool) -> SimDisk {
    let mut found = None;
    disk.kill_images(&CrashPlan { tears: Tears::None, ..CrashPlan::default() }, |image| {
        if rebuild(&image.disk, &Default::default()).is_ok_and(|rebuilt| wanted(&rebuilt)) {
            found = Some(image.disk);
        }
    });
    found.expect("there is such a moment")
}

/// Returns the disk state when `count` batches are logged and no mark covers the last one.
pub fn killed_after_batch(disk: &SimDisk, count: u64) -> SimDisk {
    killed_when(disk, |rebuilt| {
        let end = rebuilt.end.as_ref().unwrap();
        end.accepted.lsn == Lsn(count) && end.proven.lsn < Lsn(count)
    })
}

/// Returns the segment and the offset of a batch's frame.
pub fn frame_of(files: &Files, lsn: u64) -> (FileName, u64) {
    frame_where(files, |header| header.kind == FrameKind::Batch && header.lsn == Lsn(lsn))
}

pub fn frame_where(files: &Files, wanted: impl Fn(&FrameHeader) -> bool) -> (FileName, u64) {
    let mut found = None;
    for file in files.segments() {
        let bytes = &files.0[&file];
        for at in (SEGMENT_HEADER_BLOCK as usize..bytes.len() - FrameHeaderRaw::LEN).step_by(16) {
            if let Ok(frame) = UncheckedFrame::decode(&bytes[at..])
                && FileName::Segment(frame.unproven().segment) == file
                && wanted(frame.unproven())
            {
                found = Some((file, at as u64));
            }
        }
    }
    found.expect("there is such a frame")
}

pub fn flip(disk: &SimDisk, file: FileName, offset: u64) {
    let byte = disk.bytes(file).unwrap()[offset as usize];
    disk.damage(file, offset, &[byte ^ 0x10]);
}

pub fn remove(disk: &SimDisk, file: FileName) {
    disk.remove(file).unwrap();
    disk.sync_folder(file.folder()).unwrap();
}

/// Asserts that an open fails and changes nothing.
pub fn refused(disk: &SimDisk, options: Options) -> Error {
    let before = Files::of(disk);
    let error = open_with(disk, options).expect_err("the store is refused");
    assert!(Files::of(disk) == before, "a refused store was modified: {error}");
    error
}

/// Asserts that an open fails because of damage in this file and at this offset.
pub fn refused_at(disk: &SimDisk, file: FileName, offset: u64, lsn: Option<Lsn>) -> Defect {
    let error = refused(disk, small());
    assert_eq!((error.file(), error.offset(), error.lsn()), (Some(file), Some(offset), lsn), "{error}");
    assert_eq!(error.remedy(), Remedy::Inspect);
    match error {
        Error::Damaged(damage) => damage.damage.defect,
        error => panic!("not damage: {error}"),
    }
}
