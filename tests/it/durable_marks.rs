//! Durable batches are marked as durable, and marked batches are durable. Later opens use these marks to
//! distinguish damage from a torn tail (I4). Direct reads detect a disk whose syncs have no effect (I6).

use std::sync::Arc;

use remanent::device::host::HostDevice;
use remanent::disk::Disk;
use remanent::disk::dir::DirDisk;
use remanent::error::{FileName, Folder};
use remanent::options::{LogIo, LogOptions, SnapshotSchedule};
use remanent::testing::sim_disk::{Moment, Operation, SimDisk, SyncPoint};
use remanent::{Ack, Error, Lsn, Options, Place, Result, SnapshotId, Store};
use remanent_format::frame::{FrameHeader, FrameKind};
use remanent_format::limits::{GROUP_ALIGN, align_up};
use remanent_format::log::frames_of_segment;
use remanent_format::state::rebuild::{RebuildOptions, rebuild};
use remanent_format::state::survey::Survey;

use crate::faults::watched;

fn open(disk: &SimDisk) -> Result<Store> {
    let options =
        Options::new().log(LogOptions::new().segment_len(16 << 10)).snapshots(SnapshotSchedule::never());
    Store::open_on(Arc::new(disk.clone()), Arc::new(HostDevice::new()), options)
}

fn commit(store: &Store, ack: Ack) -> Lsn {
    let mut batch = store.batch();
    batch.create(40, Place::Host);
    let ticket = store.submit(batch).unwrap();
    ticket.wait(ack).unwrap();
    ticket.position().lsn
}

/// Returns the headers of all frames in the log.
fn frames(disk: &SimDisk) -> Vec<FrameHeader> {
    let survey = Survey::read(disk).unwrap();
    let of_segment = |number: &u64| frames_of_segment(disk, survey.store.store, *number);
    let frames = survey.log.segments().keys().flat_map(of_segment);
    frames.map(|frame| *frame.unproven()).collect()
}

/// Returns the disk as a kill of the process at this moment would leave it.
fn killed(disk: &SimDisk) -> SimDisk {
    disk.after_kill(Moment { event: disk.events(), tear: None })
}

/// A stale mark has no effect until bytes are damaged, and no crash reveals it. Therefore each mark is
/// checked here.
#[test]
fn every_frame_carries_the_newest_durable_batch() {
    let disk = SimDisk::new();
    let store = open(&disk).unwrap();
    // For each batch, the newest batch that was known to be durable at its submission.
    let (mut known, mut durable) = (vec![Lsn(0)], Lsn(0));
    for step in 0..40 {
        known.push(durable);
        let ack = if step % 3 == 0 { Ack::Durable } else { Ack::Logged };
        let lsn = commit(&store, ack);
        assert_eq!(lsn.0 as usize + 1, known.len());
        if ack == Ack::Durable {
            durable = lsn;
        }
    }
    store.close().unwrap();
    let frames = frames(&disk);
    let batches: Vec<&FrameHeader> = frames.iter().filter(|frame| frame.kind == FrameKind::Batch).collect();
    assert_eq!(batches.len(), 40);
    for frame in batches {
        assert!(frame.durable >= known[frame.lsn.0 as usize] && frame.durable < frame.lsn, "{frame:?}");
    }
    assert_eq!(known[40], Lsn(40 - 3));
}

#[test]
fn seal_follows_busy_period() {
    let disk = SimDisk::new();
    let store = open(&disk).unwrap();
    for _ in 0..3 {
        let lsn = commit(&store, Ack::Logged);
        // No call requests the seal. The log writes it automatically.
        let covers = |frame: &FrameHeader| frame.kind == FrameKind::Seal && frame.durable == lsn;
        while !frames(&disk).iter().any(covers) {
            std::thread::yield_now();
        }
    }
}

/// A batch after a pause finds as many prepared segments as a batch without a pause.
#[test]
fn seal_in_new_segment_creates_next() {
    watched("a roll", || {
        let disk = SimDisk::new();
        let store = open(&disk).unwrap();
        let wait_for = |files: &[FileName]| {
            while !files.iter().all(|file| disk.bytes(*file).is_some()) {
                std::thread::yield_now();
            }
        };
        // These files are created before the first commit.
        wait_for(&[FileName::Segment(3), FileName::Spare(0), FileName::Spare(1)]);
        let mut batch = store.batch();
        batch.note("x".repeat(5000));
        store.commit(batch).unwrap();
        let frame = *frames(&disk).iter().find(|frame| frame.kind == FrameKind::Batch).unwrap();
        assert_eq!((frame.segment, align_up(frame.end(), GROUP_ALIGN)), (1, 16 << 10), "no room for a seal");
        wait_for(&[FileName::Segment(4)]);
    });
}

#[test]
fn closed_log_ends_with_covering_seal() {
    let disk = SimDisk::new();
    let store = open(&disk).unwrap();
    let lsn = commit(&store, Ack::Durable);
    store.close().unwrap();
    let end = rebuild(&disk.after_power_cut(), &RebuildOptions::default()).unwrap().end.unwrap();
    assert_eq!((end.accepted.lsn, end.proven.lsn), (lsn, lsn));
}

#[test]
fn unsynced_write_is_detected_at_next_open() {
    let disk = SimDisk::new();
    let store = open(&disk).unwrap();
    commit(&store, Ack::Durable);
    disk.skip_syncs(|point| matches!(point, SyncPoint::Window(_)));
    let lied_about = commit(&store, Ack::Durable);
    // The frame of this batch records that the previous batch is durable.
    commit(&store, Ack::Durable);
    let left = killed(&disk);
    drop(store);
    rebuild(&left, &RebuildOptions::default()).expect("through the cache all is there");
    match open(&left) {
        Err(Error::Damaged(damage)) => assert_eq!(damage.lsn, Some(lied_about), "{damage}"),
        other => panic!("not refused: {:?}", other.map(|store| store.lsn())),
    }
}

/// Returns the number of direct reads of an open whose log has at least `segments_min` segments.
fn reads_past_the_cache(segments_min: usize) -> usize {
    let disk = SimDisk::new();
    let store = open(&disk).unwrap();
    let is_segment = |name: &String| matches!(FileName::parse(Folder::Log, name), Some(FileName::Segment(_)));
    while disk.list(Folder::Log).unwrap().iter().filter(|name| is_segment(name)).count() < segments_min {
        commit(&store, Ack::Logged);
    }
    let last = commit(&store, Ack::Durable);
    store.close().unwrap();
    let reopened = disk.after_power_cut();
    let store = open(&reopened).unwrap();
    assert_eq!(store.lsn(), last);
    reopened.calls(Operation::ReadBypassingCache)
}

/// A follower that reads the log to its end has verified the bytes on the medium. A replay of the same log
/// then needs no more direct reads.
#[test]
fn a_log_is_read_from_the_medium_once() {
    assert_eq!(reads_past_the_cache(20), reads_past_the_cache(5));
}

/// The images that a snapshot names, and the record of that snapshot, do not prove other images.
#[test]
fn unsynced_batch_image_is_detected_at_next_open() {
    let disk = SimDisk::new();
    let store = open(&disk).unwrap();
    commit(&store, Ack::Durable);
    store.snapshot().unwrap();
    disk.skip_syncs(|point| matches!(point, SyncPoint::File(FileName::Pages(_))));
    let mut batch = store.batch();
    batch.create_from(vec![7; 64 << 10], Place::Host);
    store.commit(batch).unwrap();
    let left = killed(&disk);
    drop(store);
    let rebuilt = rebuild(&left, &RebuildOptions::default()).expect("through the cache all is there");
    assert_eq!(rebuilt.base, Some(SnapshotId(1)));
    match open(&left) {
        Err(Error::Damaged(damage)) => assert!(matches!(damage.file, FileName::Pages(_)), "{damage}"),
        other => panic!("not refused: {:?}", other.map(|store| store.lsn())),
    }
}

/// Returns the number of minor page faults of this thread. This number is the tenth field of its `stat` file,
/// whose second field is a name.
fn faults() -> u64 {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
    let (_, behind_name) = stat.rsplit_once(')').unwrap();
    behind_name.split_whitespace().nth(7).unwrap().parse().unwrap()
}

/// On a busy disk, a page fault waits for the disk, and all committers wait for the thread that caused it.
/// Another thread therefore touches the log's memory first.
#[test]
fn busy_log_memory_is_prefaulted_for_committers() {
    let directory = tempfile::tempdir().unwrap();
    if let Some(refusal) = DirDisk::new(directory.path()).refuses(LogIo::Mapped).unwrap() {
        println!("SKIPPED: no log is mapped here: {refusal}");
        return;
    }
    let options =
        Options::new().log(LogOptions::new().io(LogIo::Mapped)).snapshots(SnapshotSchedule::never());
    let store = options.open(directory.path()).unwrap();
    let mut batch = store.batch();
    batch.create(2048, Place::Host);
    let page = store.commit(batch).unwrap().pages[0];
    let write = |step: u64| {
        let mut batch = store.batch();
        batch.write(page, 0, &[step as u8; 2048]);
        store.submit(batch).unwrap();
    };
    let mut of_rounds = Vec::new();
    for _ in 0..50 {
        let syncs = store.stats().log.syncs;
        write(0);
        while store.stats().log.syncs == syncs {
            std::thread::yield_now();
        }
        let before = faults();
        (0..20).for_each(write);
        of_rounds.push(faults() - before);
    }
    // Each round writes 11 pages. The memory is touched after the sync is counted, so on a busy machine a
    // committer may touch it first in some rounds.
    of_rounds.sort_unstable();
    assert!(of_rounds[of_rounds.len() / 2] < 2, "{of_rounds:?}");
}
