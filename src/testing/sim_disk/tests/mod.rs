//! Tests that the simulated disk provides its own guarantees, and that it violates every guarantee that a real disk may
//! violate.

mod images;

use std::collections::BTreeSet;

use remanent_format::limits::SECTOR_LEN;

use super::*;
use crate::options::LogIo;

const SECTOR: u64 = SECTOR_LEN as u64;
const SEGMENT: FileName = FileName::Segment(0);
const TEMPORARY: FileName = FileName::Temporary(Folder::Log, 0);

/// Returns a plan that tears events at every byte and tries all combinations.
fn every() -> CrashPlan {
    CrashPlan { tears: Tears::Every, images_max: 100_000, ..CrashPlan::default() }
}

/// Returns a plan that contains only the moment after the last event.
fn at_the_end(disk: &SimDisk) -> CrashPlan {
    CrashPlan { events: disk.events()..usize::MAX, ..every() }
}

/// Creates a disk with a synced segment of `sectors` zero sectors.
fn with_segment(sectors: u64) -> (SimDisk, Arc<dyn DiskFile>) {
    let disk = SimDisk::new();
    disk.make_folder(Folder::Log).unwrap();
    disk.sync_folder(Folder::Root).unwrap();
    let file = disk.create(SEGMENT).unwrap();
    file.write_at(0, &vec![0; (sectors * SECTOR) as usize]).unwrap();
    file.sync().unwrap();
    disk.sync_folder(Folder::Log).unwrap();
    (disk, file)
}

/// Returns the first byte of every sector of the segment, or `None` if the segment does not exist.
fn heads(disk: &SimDisk) -> Option<Vec<u8>> {
    Some(disk.bytes(SEGMENT)?.chunks(SECTOR_LEN).map(|sector| sector[0]).collect())
}

/// Returns the results of `see` for each image that a power cut could leave after the last event.
fn after_power_cuts<T: Ord>(disk: &SimDisk, see: impl Fn(&SimDisk) -> T) -> BTreeSet<T> {
    let mut seen = BTreeSet::new();
    disk.power_images(&at_the_end(disk), |image| {
        seen.insert(see(&image.disk));
    });
    seen
}

#[test]
fn a_synced_sector_never_disappears_and_each_unsynced_one_may() {
    let (disk, file) = with_segment(4);
    file.write_at(0, &[1; SECTOR_LEN]).unwrap();
    file.sync().unwrap();
    file.write_at(SECTOR, &[2; 3 * SECTOR_LEN]).unwrap();
    let mut expected = BTreeSet::new();
    for choice in 0..8 {
        expected.insert(Some(vec![1, 2 * (choice & 1), (choice & 2), (choice & 4) / 2]));
    }
    assert_eq!(after_power_cuts(&disk, heads), expected);
    file.sync().unwrap();
    assert_eq!(after_power_cuts(&disk, heads), BTreeSet::from([Some(vec![1, 2, 2, 2])]));
}

#[test]
fn sector_may_keep_any_version() {
    let (disk, file) = with_segment(1);
    for byte in 1..=3 {
        file.write_at(0, &[byte]).unwrap();
    }
    let seen = after_power_cuts(&disk, heads);
    assert_eq!(seen, (0..=3).map(|byte| Some(vec![byte])).collect());
}

#[test]
fn name_needs_folder_sync_and_implies_nothing_about_content() {
    let (disk, _) = with_segment(1);
    let file = disk.create(FileName::Segment(1)).unwrap();
    file.write_at(0, b"abc").unwrap();
    let see = |disk: &SimDisk| disk.bytes(FileName::Segment(1));
    let bytes = |bytes: &[u8]| Some(bytes.to_vec());
    let empty_torn_or_whole = [bytes(b""), bytes(b"\0\0\0"), bytes(b"abc")];
    let seen = after_power_cuts(&disk, see);
    assert_eq!(seen, empty_torn_or_whole.iter().cloned().chain([None]).collect());
    disk.sync_folder(Folder::Log).unwrap();
    assert_eq!(after_power_cuts(&disk, see), empty_torn_or_whole.into());
    file.sync().unwrap();
    assert_eq!(after_power_cuts(&disk, see), [bytes(b"abc")].into());
}

#[test]
fn a_synced_file_without_a_synced_name_may_vanish() {
    let (disk, _) = with_segment(1);
    let file = disk.create(FileName::Segment(1)).unwrap();
    file.sync().unwrap();
    let seen = after_power_cuts(&disk, |disk| disk.bytes(FileName::Segment(1)).is_some());
    assert_eq!(seen, [false, true].into());
}

#[test]
fn lost_folder_name_loses_its_files() {
    let disk = SimDisk::new();
    disk.make_folder(Folder::Pages).unwrap();
    let file = disk.create(FileName::Pages(1)).unwrap();
    file.sync().unwrap();
    disk.sync_folder(Folder::Pages).unwrap();
    let see =
        |disk: &SimDisk| (Disk::list(disk, Folder::Root).unwrap(), Disk::list(disk, Folder::Pages).unwrap());
    let whole = (vec!["pages".to_owned()], vec![FileName::Pages(1).name()]);
    assert_eq!(after_power_cuts(&disk, see), [(vec![], vec![]), whole.clone()].into());
    // If the folder is created again after the cut, it does not contain its old files.
    let cut = disk.after_power_cut();
    cut.make_folder(Folder::Pages).unwrap();
    assert_eq!(see(&cut), (whole.0.clone(), vec![]));
    disk.sync_folder(Folder::Root).unwrap();
    assert_eq!(after_power_cuts(&disk, see), [whole].into());
}

#[test]
fn name_changes_stay_ordered_and_rename_is_atomic() {
    let (disk, _) = with_segment(1);
    let temporary = disk.create(TEMPORARY).unwrap();
    temporary.write_at(0, b"new").unwrap();
    temporary.sync().unwrap();
    disk.rename(TEMPORARY, SEGMENT).unwrap();
    disk.create(FileName::Segment(1)).unwrap();
    let old = Some(vec![0; SECTOR_LEN]);
    let new = Some(b"new".to_vec());
    let see = |disk: &SimDisk| {
        let bytes = |name| disk.bytes(name);
        (bytes(SEGMENT), bytes(TEMPORARY), bytes(FileName::Segment(1)).is_some())
    };
    let mut expected = BTreeSet::new();
    for other in [false, true] {
        expected.insert((old.clone(), None, other));
        expected.insert((old.clone(), new.clone(), other));
        expected.insert((new.clone(), None, other));
    }
    assert_eq!(after_power_cuts(&disk, see), expected);
}

#[test]
fn kill_tears_put_at_every_byte_and_keeps_earlier_bytes() {
    let (disk, file) = with_segment(1);
    let window = file.window(LogIo::Mapped).unwrap();
    window.put(0, b"abc").unwrap();
    let first = disk.events();
    window.put(3, b"defg").unwrap();
    let mut seen = BTreeSet::new();
    disk.kill_images(&CrashPlan { events: first..usize::MAX, ..every() }, |image| {
        seen.insert(image.disk.bytes(SEGMENT).unwrap()[..7].to_vec());
    });
    let expected = [
        b"abc\0\0\0\0",
        b"abcd\0\0\0",
        b"abcde\0\0",
        b"abcdef\0",
        b"abc\0\0\0g",
        b"abc\0\0fg",
        b"abc\0efg",
        b"abcdefg",
    ];
    assert_eq!(seen, expected.into_iter().map(|bytes| bytes.to_vec()).collect());
}

#[test]
fn few_tears_include_ends_middle_and_sector_borders() {
    let (disk, file) = with_segment(8);
    let first = disk.events();
    file.write_at(100, &[1; 3000]).unwrap();
    let heads = |tears| {
        let moments = disk.moments(first..first + 1, tears).into_iter();
        moments.filter_map(|moment| moment.tear).collect::<Vec<_>>()
    };
    let expected = [1, 412, 1436, 1500, 2460, 2972, 2999].map(Tear::Head);
    assert_eq!(heads(Tears::Few(3)), expected);
    assert_eq!(heads(Tears::None), []);
    assert_eq!(heads(Tears::Every).len(), 2999);
}

#[test]
fn power_cut_may_drop_changes_pending_at_kill() {
    let (disk, file) = with_segment(2);
    let window = file.window(LogIo::Mapped).unwrap();
    window.put(0, &[1]).unwrap();
    let moment = Moment { event: disk.events(), tear: None };
    let killed = disk.after_kill(moment);
    assert_eq!(heads(&killed), Some(vec![1, 0]));
    // After the kill, another process continues writing, and syncs only what it wrote.
    let window = killed.open(SEGMENT, true).unwrap().window(LogIo::Mapped).unwrap();
    window.put(SECTOR, &[2]).unwrap();
    window.sync(SECTOR, 1).unwrap();
    assert_eq!(after_power_cuts(&killed, heads), [Some(vec![0, 2]), Some(vec![1, 2])].into());
    window.sync(0, 1).unwrap();
    assert_eq!(after_power_cuts(&killed, heads), [Some(vec![1, 2])].into());
    // Names behave likewise: a name that was created before the kill does not become durable because another process
    // has read it.
    disk.create(FileName::Segment(1)).unwrap();
    let killed = disk.after_kill(Moment { event: disk.events(), tear: None });
    let seen = after_power_cuts(&killed, |disk| disk.bytes(FileName::Segment(1)).is_some());
    assert_eq!(seen, [false, true].into());
}

#[test]
fn a_power_cut_leaves_nothing_pending() {
    let (disk, file) = with_segment(2);
    file.write_at(0, &[1; 2 * SECTOR_LEN]).unwrap();
    disk.create(FileName::Segment(1)).unwrap();
    let mut images = 0;
    disk.power_images(&at_the_end(&disk), |image| {
        let again =
            after_power_cuts(&image.disk, |disk| (heads(disk), Disk::list(disk, Folder::Log).unwrap()));
        assert_eq!(again.len(), 1, "{image}");
        images += 1;
    });
    assert_eq!(images, 8);
}

#[test]
fn window_sync_covers_exactly_its_range() {
    for io in [LogIo::Mapped, LogIo::Buffered] {
        let (disk, file) = with_segment(3);
        let window = file.window(io).unwrap();
        window.put(0, &[1; 3 * SECTOR_LEN]).unwrap();
        window.sync(SECTOR, SECTOR).unwrap();
        let expected = [[0, 1, 0], [0, 1, 1], [1, 1, 0], [1, 1, 1]].map(|heads| Some(heads.to_vec()));
        assert_eq!(after_power_cuts(&disk, heads), expected.into(), "{io:?}");
    }
}

/// A frame without a payload, such as the seal of a store without snapshots, causes an empty put. The empty put
/// directly follows its group and belongs to no other group.
#[test]
fn direct_window_accepts_empty_put() {
    let (_, file) = with_segment(16);
    let window = file.window(LogIo::Direct).unwrap();
    window.put(80, &[]).unwrap();
    window.put(0, &[1; 80]).unwrap();
    window.sync(0, 80).unwrap();
    window.put(4096, &[2; 80]).unwrap();
    window.sync(4096, 80).unwrap();
    let mut bytes = [0; 4176];
    file.read_bypassing_cache(0, &mut bytes).unwrap();
    assert_eq!([bytes[79], bytes[80], bytes[4096], bytes[4175]], [1, 0, 2, 2]);
}

#[test]
fn later_sync_does_not_repair_failed_sync() {
    let (disk, file) = with_segment(2);
    file.write_at(0, &[1]).unwrap();
    disk.fail(DiskFault { operation: Operation::Sync, skip: 0, times: 1, errno: EIO });
    let error = file.sync().unwrap_err();
    assert_eq!(error.file(), Some(SEGMENT));
    file.write_at(SECTOR, &[2]).unwrap();
    file.sync().unwrap();
    assert_eq!(heads(&disk), Some(vec![1, 2]));
    assert_eq!(after_power_cuts(&disk, heads), [Some(vec![0, 2]), Some(vec![1, 2])].into());
    // A read that bypasses the cache returns the old bytes.
    let mut byte = [9];
    file.read_bypassing_cache(0, &mut byte).unwrap();
    assert_eq!(byte, [0]);
    // If the bytes are written again, they are dirty again.
    file.write_at(0, &[1]).unwrap();
    file.sync().unwrap();
    assert_eq!(after_power_cuts(&disk, heads), [Some(vec![1, 2])].into());
}

#[test]
fn unpersisted_bytes_count_as_cached() {
    let (disk, file) = with_segment(4);
    let (all, all_but_one) = (0..4 * SECTOR, [0..SECTOR, 2 * SECTOR..4 * SECTOR]);
    assert_eq!(file.uncached(), std::slice::from_ref(&all));
    file.write_at(SECTOR, &[1]).unwrap();
    assert_eq!(file.uncached(), all_but_one);
    disk.fail(DiskFault { operation: Operation::Sync, skip: 0, times: 1, errno: EIO });
    file.sync().unwrap_err();
    file.sync().unwrap();
    assert_eq!(file.uncached(), all_but_one, "it is clean, and lost");
    file.write_at(SECTOR, &[1]).unwrap();
    file.sync().unwrap();
    file.write_at(4 * SECTOR, &[1; 10]).unwrap();
    assert_eq!(file.uncached(), std::slice::from_ref(&all));
    file.sync().unwrap();
    assert_eq!(file.uncached(), std::slice::from_ref(&(0..4 * SECTOR + 10)));
}

#[test]
fn failed_sync_may_lose_file_length() {
    let (disk, file) = with_segment(1);
    file.write_at(SECTOR, &[1; SECTOR_LEN]).unwrap();
    disk.fail(DiskFault { operation: Operation::Sync, skip: 0, times: 1, errno: EIO });
    file.sync().unwrap_err();
    file.sync().unwrap();
    let see = |disk: &SimDisk| disk.bytes(SEGMENT).unwrap().len();
    assert_eq!(after_power_cuts(&disk, see), [SECTOR_LEN, 2 * SECTOR_LEN].into());
}

#[test]
fn skipped_syncs_succeed_and_do_nothing() {
    let (disk, file) = with_segment(1);
    let window = file.window(LogIo::Mapped).unwrap();
    let points = Arc::new(Mutex::new(Vec::new()));
    let log = points.clone();
    disk.skip_syncs(move |point| {
        log.lock().push(point);
        log.lock().len() != 4
    });
    disk.create(FileName::Segment(1)).unwrap();
    window.put(0, &[1]).unwrap();
    file.sync().unwrap();
    window.sync(0, 1).unwrap();
    disk.sync_folder(Folder::Log).unwrap();
    let see = |disk: &SimDisk| (heads(disk).unwrap()[0], disk.bytes(FileName::Segment(1)).is_some());
    let all = [(0, false), (0, true), (1, false), (1, true)];
    assert_eq!(after_power_cuts(&disk, see), all.into());
    disk.sync_folder(Folder::Log).unwrap();
    assert_eq!(after_power_cuts(&disk, see), [(0, true), (1, true)].into());
    let folder = SyncPoint::Folder(Folder::Log);
    assert_eq!(*points.lock(), [SyncPoint::File(SEGMENT), SyncPoint::Window(SEGMENT), folder, folder]);
}

#[test]
fn full_disk_fails_only_at_allocation() {
    let (disk, file) = with_segment(2);
    disk.set_capacity(Some(2 * SECTOR + 100));
    let other = disk.create(FileName::Segment(1)).unwrap();
    let error = other.write_at(0, &[1; 101]).unwrap_err();
    assert!(error.is_no_space(), "{error}");
    assert_eq!(other.len().unwrap(), 100, "the bytes that fitted were written");
    assert!(other.write_at(100, &[1]).unwrap_err().is_no_space());
    // Overwriting in place always succeeds.
    file.write_at(0, &[1; 2 * SECTOR_LEN]).unwrap();
    file.window(LogIo::Mapped).unwrap().put(0, &[2]).unwrap();
    other.write_at(0, &[3; 100]).unwrap();
    disk.remove(FileName::Segment(1)).unwrap();
    disk.create(FileName::Segment(2)).unwrap().write_at(0, &[1; 100]).unwrap();
}

#[test]
fn faults_hit_named_operation_when_due() {
    let (disk, file) = with_segment(1);
    let window = file.window(LogIo::Mapped).unwrap();
    let other = SimDisk::new();
    other.make_folder(Folder::Log).unwrap();
    let linked = FileName::Segment(9);
    other.create(linked).unwrap();
    let operations: [(Operation, &dyn Fn() -> Result<()>); 15] = [
        (Operation::Create, &|| disk.create(TEMPORARY).map(drop)),
        (Operation::Open, &|| disk.open(SEGMENT, false).map(drop)),
        (Operation::Window, &|| file.window(LogIo::Mapped).map(drop)),
        (Operation::Link, &|| disk.link(&other, linked).and_then(|_| disk.remove(linked))),
        (Operation::Rename, &|| disk.rename(SEGMENT, SEGMENT)),
        (Operation::Remove, &|| disk.create(TEMPORARY).and_then(|_| disk.remove(TEMPORARY))),
        (Operation::MakeFolder, &|| disk.make_folder(Folder::Pages)),
        (Operation::SyncFolder, &|| disk.sync_folder(Folder::Log)),
        (Operation::Read, &|| file.read_at(0, &mut [0])),
        (Operation::ReadBypassingCache, &|| file.read_bypassing_cache(0, &mut [0])),
        (Operation::ReadProven, &|| file.read_proven(0, &mut [0])),
        (Operation::Write, &|| file.write_at(0, &[1, 2])),
        (Operation::Sync, &|| file.sync()),
        (Operation::Put, &|| window.put(0, &[3, 4])),
        (Operation::SyncWindow, &|| window.sync(0, 1)),
    ];
    for (operation, call) in operations {
        disk.fail(DiskFault { operation, skip: 1, times: 2, errno: ENOSPC });
        let results: Vec<bool> = (0..4).map(|_| call().is_ok()).collect();
        assert_eq!(results, [true, false, false, true], "{operation:?}");
        disk.fail(DiskFault { operation, skip: 0, times: usize::MAX, errno: EIO });
        assert!(call().is_err(), "{operation:?}");
        disk.clear_faults();
        call().unwrap();
    }
    // A failing write stores half of the bytes.
    file.write_at(0, &[0, 0]).unwrap();
    disk.fail(DiskFault { operation: Operation::Write, skip: 0, times: 1, errno: EIO });
    file.write_at(0, &[7, 7]).unwrap_err();
    assert_eq!(disk.bytes(SEGMENT).unwrap()[..2], [7, 0]);
}

#[test]
fn linked_file_is_complete_and_outlives_first_name() {
    let (source, file) = with_segment(2);
    file.write_at(0, &[1]).unwrap();
    file.sync().unwrap();
    file.write_at(SECTOR, &[2]).unwrap();
    let target = SimDisk::new();
    assert!(target.link(&source, SEGMENT).is_err(), "there is no such folder yet");
    target.make_folder(Folder::Log).unwrap();
    target.sync_folder(Folder::Root).unwrap();
    assert!(target.link(&source, SEGMENT).unwrap());
    assert!(target.link(&source, SEGMENT).is_err(), "the name is taken");
    assert!(target.link(&source, TEMPORARY).is_err(), "there is no such file");
    source.remove(SEGMENT).unwrap();
    assert_eq!(heads(&target), Some(vec![1, 2]));
    // Bytes that were not synced under the first name are not durable under the second.
    let whole = [Some(vec![1, 0]), Some(vec![1, 2])];
    assert_eq!(after_power_cuts(&target, heads), BTreeSet::from([None, whole[0].clone(), whole[1].clone()]));
    target.sync_folder(Folder::Log).unwrap();
    assert_eq!(after_power_cuts(&target, heads), BTreeSet::from(whole));
}

#[test]
fn the_lock_is_held_once_and_a_crash_frees_it() {
    let disk = SimDisk::new();
    let lock = disk.lock().unwrap();
    assert!(matches!(disk.clone().lock(), Err(Error::Locked { .. })));
    disk.after_kill(Moment { event: 0, tear: None }).lock().unwrap();
    drop(lock);
    disk.lock().unwrap();
}

#[test]
fn recreate_truncates_file_and_reads_past_end_fail() {
    let (disk, file) = with_segment(2);
    file.write_at(SECTOR, &[5; SECTOR_LEN]).unwrap();
    file.sync().unwrap();
    disk.create(SEGMENT).unwrap();
    assert_eq!(file.len().unwrap(), 0);
    let error = file.read_at(0, &mut [0]).unwrap_err();
    assert!(matches!(&error, Error::Io { source, .. } if source.kind() == io::ErrorKind::UnexpectedEof));
    // The removed sector does not reappear when the file grows over it.
    file.write_at(2 * SECTOR, &[1]).unwrap();
    assert_eq!(heads(&disk), Some(vec![0, 0, 1]));
    file.sync().unwrap();
    assert_eq!(after_power_cuts(&disk, heads), [Some(vec![0, 0, 1])].into());
}

#[test]
fn truncated_bytes_do_not_return_when_file_grows() {
    let bytes = |disk: &SimDisk| disk.bytes(SEGMENT).unwrap();
    for (synced_before, grown_to) in [(false, 400), (true, 400), (false, SECTOR + 1), (true, SECTOR + 1)] {
        let (disk, file) = with_segment(1);
        file.write_at(0, &[7; SECTOR_LEN]).unwrap();
        if synced_before {
            file.sync().unwrap();
        }
        file.cut(100).unwrap();
        file.write_at(grown_to - 1, &[9]).unwrap();
        let mut expected = vec![0; grown_to as usize];
        expected[..100].fill(7);
        expected[grown_to as usize - 1] = 9;
        assert_eq!(bytes(&disk), expected);
        file.sync().unwrap();
        let mut on_the_medium = vec![0; expected.len()];
        file.read_bypassing_cache(0, &mut on_the_medium).unwrap();
        assert_eq!(on_the_medium, expected, "grown to {grown_to}, synced before: {synced_before}");
        assert_eq!(after_power_cuts(&disk, bytes), [expected].into());
    }
}

#[test]
fn open_file_outlives_its_name() {
    let (disk, file) = with_segment(1);
    disk.remove(SEGMENT).unwrap();
    file.write_at(0, b"x").unwrap();
    let mut byte = [0];
    file.read_at(0, &mut byte).unwrap();
    assert_eq!(byte, *b"x");
    assert!(
        matches!(disk.open(SEGMENT, false), Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound)
    );
    // The removal is not durable, so the old file may reappear, with or without later writes.
    let seen = after_power_cuts(&disk, |disk| disk.bytes(SEGMENT).map(|bytes| bytes[0]));
    assert_eq!(seen, [None, Some(0), Some(b'x')].into());
}

#[test]
fn injected_damage_is_immediate() {
    let (disk, file) = with_segment(2);
    file.write_at(SECTOR, &[1]).unwrap();
    disk.damage(SEGMENT, 3, b"!");
    let seen = after_power_cuts(&disk, |disk| (disk.bytes(SEGMENT).unwrap()[3], heads(disk).unwrap()[1]));
    assert_eq!(seen, [(b'!', 0), (b'!', 1)].into());
    disk.damage_len(SEGMENT, 10);
    assert_eq!(after_power_cuts(&disk, |disk| disk.bytes(SEGMENT).unwrap().len()), [10].into());
}

#[test]
fn threads_share_the_disk_and_no_event_is_lost() {
    let (disk, file) = with_segment(8);
    let first = disk.events();
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let window = file.window(LogIo::Mapped).unwrap();
            scope.spawn(move || {
                for byte in 1..=20 {
                    window.put(thread * SECTOR, &[byte]).unwrap();
                    window.sync(thread * SECTOR, 1).unwrap();
                }
            });
        }
    });
    assert_eq!(disk.events() - first, 8 * 20 * 2);
    assert_eq!(heads(&disk), Some(vec![20; 8]));
    let end = disk.after_kill(Moment { event: disk.events(), tear: None });
    assert_eq!(heads(&end), heads(&disk), "the history leads to the disk");
}

#[test]
fn decoders_agree_with_engine() {
    let (disk, _) = with_segment(1);
    disk.damage(SEGMENT, 1, b"ab");
    let reader: &dyn ReadAt = &disk;
    assert_eq!(reader.list(Folder::Log).unwrap(), [SEGMENT.name()]);
    assert_eq!(reader.list(Folder::Pages).unwrap(), [""; 0]);
    assert_eq!(reader.len(SEGMENT).unwrap(), Some(SECTOR));
    assert_eq!(reader.len(FileName::Store).unwrap(), None);
    let mut out = [0; 3];
    reader.read_at(SEGMENT, 0, &mut out).unwrap();
    assert_eq!(&out, b"\0ab");
    let error = reader.read_at(SEGMENT, SECTOR - 2, &mut out).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
}
