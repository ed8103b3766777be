//! A full disk. Commits fail without effect, all other operations work, and no store has to be reopened.

use remanent::disk::Disk;
use remanent::error::{FileName, Folder, IoAction};
use remanent::options::{Compression, ImageIo, ImageOptions, Retention};
use remanent::testing::sim_disk::ENOSPC;
use remanent::{PageInfo, WriteBatch};

use super::*;
use crate::files::{Files, SPARES_FOR_OPENS, State};
use crate::with_options::With;

/// Length in bytes of the segments of a store.
const SEGMENT: u64 = 16 << 10;
/// Number of spares in the reserve. Segments of this length hold three groups, so seals and deletes need more
/// of them than with the default length; an open needs two.
const RESERVE: usize = 4;
const IMAGE_WAYS: [ImageIo; 3] = [ImageIo::Mapped, ImageIo::Buffered, ImageIo::Direct];

/// Returns a store with two snapshots, later commits and its reserve, on a disk with `free` more bytes.
/// Consecutive values of `free` cycle through the modes of writing images.
fn filled(free: u64) -> (SimDisk, Store, Line) {
    let disk = SimDisk::new();
    let images = IMAGE_WAYS[(free / 1000 % 3) as usize];
    let store =
        open_with(&disk, Arc::new(HostDevice::new()), with_reserve().images(ImageOptions::new().io(images)))
            .unwrap();
    let mut line = Line::begin(&store);
    for _ in 0..2 {
        line.commits(&store, 4).unwrap();
        store.snapshot().unwrap();
    }
    // Because of these commits, the next snapshot has images to write.
    line.commits(&store, 4).unwrap();
    line.check(&store, line.logged);
    until(|| is_held(&disk, RESERVE));
    disk.set_capacity(Some(disk.used_bytes() + free));
    (disk, store, line)
}

fn with_reserve() -> Options {
    small().with(|options| options.log.reserve_bytes = Some(RESERVE as u64 * SEGMENT))
}

fn open_with_reserve(disk: &SimDisk) -> Result<Store> {
    open_with(disk, Arc::new(HostDevice::new()), with_reserve())
}

/// Waits until the store's threads have made the condition true.
pub(crate) fn until(condition: impl Fn() -> bool) {
    while !condition() {
        std::thread::yield_now();
    }
}

/// Returns true if the disk has a reserve of this number of spares and those for opens, and no other segment
/// is being created.
pub(crate) fn is_held(disk: &(impl Disk + ?Sized), reserve: usize) -> bool {
    spares(disk) >= reserve + SPARES_FOR_OPENS
        && names(disk, Folder::Log).iter().all(|name| !is_temporary(name))
}

fn pages(store: &Store) -> Vec<PageInfo> {
    store.pages().unwrap().collect()
}

fn names(disk: &(impl Disk + ?Sized), folder: Folder) -> Vec<String> {
    disk.list(folder).unwrap()
}

fn is_temporary(name: &str) -> bool {
    matches!(FileName::parse(Folder::Log, name), Some(FileName::Temporary(..)))
}

fn spares(disk: &(impl Disk + ?Sized)) -> usize {
    let is_spare = |name: &String| matches!(FileName::parse(Folder::Log, name), Some(FileName::Spare(_)));
    names(disk, Folder::Log).into_iter().filter(is_spare).count()
}

fn segments(disk: &impl Disk) -> usize {
    let is_segment = |name: &String| matches!(FileName::parse(Folder::Log, name), Some(FileName::Segment(_)));
    names(disk, Folder::Log).into_iter().filter(is_segment).count()
}

/// Commits until the disk is full. Checks that the failed commit changed nothing.
fn fill(store: &Store, line: &mut Line) {
    for _ in 0..200 {
        // Memory that a batch frees counts until the batch is applied. All batches change this page, so a
        // read waits until the last batch is applied.
        store.read(line.page, 0, &mut [0]).unwrap();
        let before = (store.lsn(), pages(store), store.stats().places);
        match line.commit(store, Ack::Logged) {
            Ok(()) => {}
            Err(error) => {
                assert!(
                    matches!(error, Error::DiskFull { file: FileName::Segment(_), needed: SEGMENT, .. }),
                    "{error}"
                );
                assert_eq!(error.remedy(), remanent::error::Remedy::FreeSpace);
                let after = store.stats().places;
                assert_eq!((store.lsn(), pages(store)), (before.0, before.1));
                for ((place, before), (_, after)) in before.2.iter().zip(&after) {
                    assert_eq!(before.allocated_bytes, after.allocated_bytes, "memory in {place}");
                }
                line.check(store, line.logged);
                return;
            }
        }
    }
    panic!("the disk never got full");
}

fn at_every_level(case: impl Fn(u64) + Send + Copy + 'static) {
    for free in (0..6 * SEGMENT).step_by(4096) {
        watched(&format!("with {free} bytes free"), move || case(free));
    }
}

#[test]
fn full_disk_refuses_commits_until_space_returns() {
    at_every_level(|free| {
        let (disk, store, mut line) = filled(free);
        fill(&store, &mut line);
        // A frame that needs its own segment does not fit either, and leaves no file on the disk.
        let mut batch = store.batch();
        batch.write(line.page, 0, &[7; PAGE_LEN as usize]).note("n".repeat(40_000));
        assert!(matches!(store.commit(batch), Err(Error::DiskFull { .. })));
        fill(&store, &mut line);
        assert!(spares(&disk) >= RESERVE, "commits took the reserve");

        disk.set_capacity(None);
        line.commits(&store, 20).unwrap();
        store.snapshot().unwrap();
        store.close().unwrap();
        let store = open_on_host(&disk).unwrap();
        assert_eq!(store.lsn().0, line.logged);
        line.check(&store, line.logged);
    });
}

#[test]
fn deletes_on_full_disk_use_reserve_and_close_succeeds() {
    at_every_level(|free| {
        let (disk, store, mut line) = filled(free);
        let full = loop {
            let mut batch = store.batch();
            batch.note("n".repeat(3000));
            match store.commit(batch) {
                Ok(_) => line.logged += 1,
                Err(error) => break error,
            }
        };
        assert!(matches!(full, Error::DiskFull { .. }), "{full}");
        // The first deletion would not fit as an ordinary batch.
        for (page, note_len) in [(line.second, 3000), (line.page, 10)] {
            let mut batch = store.batch();
            batch.delete(page).note("d".repeat(note_len));
            store.commit(batch).unwrap();
            line.logged += 1;
        }
        assert_eq!(pages(&store), []);
        store.wait_durable(store.lsn()).unwrap();
        store.close().unwrap();
        disk.set_capacity(None);
        let store = open_on_host(&disk.after_power_cut()).unwrap();
        assert_eq!(store.lsn().0, line.logged);
        assert_eq!(pages(&store), []);
    });
}

/// The reserve guarantees the number of deletes that [`remanent::LogOptions::reserve_bytes`] documents.
#[test]
fn reserve_covers_one_delete_batch_per_block() {
    const DELETES: usize = 100;
    for segment_len in [SEGMENT, 4 * SEGMENT] {
        // The last segment used for deletes is a short one, because the long one is kept for the next open.
        let batches = [vec![segment_len; RESERVE - 1], vec![SEGMENT]].concat();
        let batches: usize = batches.iter().map(|len| *len as usize / 4096 - 1).sum();
        at_every_level(move |free| deletes(segment_len, batches, DELETES, free));
    }
}

/// On a disk with `free` bytes left, on which no other batch fits, the store accepts `batches` batches of
/// deletes. An idle seal uses the space of one of them. On a busy machine, the store may be idle between any
/// two batches.
fn deletes(segment_len: u64, batches: usize, deletes: usize, free: u64) {
    let disk = SimDisk::new();
    let options = small().with(|options| {
        options.log.segment_len = segment_len;
        options.log.reserve_bytes = Some(RESERVE as u64 * segment_len);
    });
    let store = Store::open_on(Arc::new(disk.clone()), Arc::new(HostDevice::new()), options).unwrap();
    let mut batch = store.batch();
    (0..batches * deletes).for_each(|_| _ = batch.create(0, Place::Host).page());
    let pages = store.commit(batch).unwrap().pages;
    // Two empty segments follow the current one.
    until(|| is_held(&disk, RESERVE) && segments(&disk) == 3 + store.stats().log.rolls as usize);
    disk.set_capacity(Some(disk.used_bytes() + free));
    for len in [3000, 10] {
        let note = || {
            let mut batch = store.batch();
            batch.note("n".repeat(len));
            batch
        };
        while store.commit(note()).is_ok() {}
    }
    let seals = store.stats().log.seals;
    for (done, pages) in pages.chunks(deletes).enumerate() {
        let mut batch = store.batch();
        pages.iter().for_each(|page| _ = batch.delete(*page));
        match store.commit(batch) {
            Ok(committed) => store.wait_durable(committed.position.lsn).unwrap(),
            Err(error) => {
                let sealed = (store.stats().log.seals - seals) as usize;
                assert!(done + sealed >= batches, "after {done} of {batches} and {sealed} seals: {error}");
                break;
            }
        }
    }
    let state = State::of(&store);
    store.close().unwrap();
    for _ in 0..3 {
        let store = open_with_reserve(&disk).unwrap();
        assert_eq!(State::of(&store), state);
        store.close().unwrap();
    }
}

/// A crash happened between the publication of a snapshot and the frame that records it. The open publishes
/// the manifest again.
#[test]
fn open_on_full_disk_republishes_manifest() {
    at_every_level(|free| {
        let disk = SimDisk::new();
        let store = open_with_reserve(&disk).unwrap();
        let mut line = Line::begin(&store);
        line.commits(&store, 4).unwrap();
        store.snapshot().unwrap();
        line.commits(&store, 4).unwrap();
        store.wait_durable(store.lsn()).unwrap();
        until(|| is_held(&disk, RESERVE));
        let before = Files::of(&disk);
        store.snapshot().unwrap();
        let mut files = Files::of(&disk);
        let is_log = |file: &FileName| file.folder() == Folder::Log;
        files.0.retain(|file, _| !is_log(file));
        files.0.extend(before.0.into_iter().filter(|(file, _)| is_log(file)));
        let crashed = files.disk();
        crashed.set_capacity(Some(crashed.used_bytes() + free));
        let from = crashed.events();
        line.check(&open_with_reserve(&crashed).unwrap(), line.logged);
        let is_anew = |event: &String| event.starts_with("rename") && event.ends_with(".manifest");
        assert!(crashed.history()[from..].iter().any(is_anew), "{:#?}", crashed.history());
    });
}

#[test]
fn a_snapshot_on_a_full_disk_fails_cleanly_and_succeeds_later() {
    watched("every level", || {
        let mut outcomes = [0, 0];
        // There is one image file and one manifest. Either of them may not fit.
        for free in (0..20_000).step_by(1000) {
            let (disk, store, mut line) = filled(free);
            let allocated =
                || store.stats().places.iter().map(|(_, usage)| usage.allocated_bytes).sum::<u64>();
            let allocated_before = allocated();
            let pages = names(&disk, Folder::Pages);
            let manifests = names(&disk, Folder::Snapshots);
            let kept = store.snapshots();
            match store.snapshot() {
                Ok(taken) => {
                    outcomes[0] += 1;
                    assert_eq!(store.snapshots().last(), Some(&taken));
                }
                Err(error) => {
                    outcomes[1] += 1;
                    assert!(matches!(error, Error::DiskFull { .. }), "{error}");
                    assert_eq!(names(&disk, Folder::Pages), pages, "leftovers");
                    assert_eq!(names(&disk, Folder::Snapshots), manifests, "leftovers");
                    assert_eq!(store.snapshots(), kept);
                    assert_eq!(allocated(), allocated_before);
                }
            }
            line.check(&store, line.logged);
            disk.set_capacity(None);
            line.commits(&store, 3).unwrap();
            let taken = store.snapshot().unwrap();
            store.close().unwrap();
            let store = open_on_host(&disk).unwrap();
            assert_eq!(store.recovered().snapshot, Some(taken.id));
            line.check(&store, line.logged);
        }
        assert!(outcomes.iter().all(|count| *count > 0), "taken, refused: {outcomes:?}");
    });
}

/// The file system allocates space for buffered images when they are synced. In the other modes, space was
/// allocated before. If the file system then reports that there is no space, its guarantee was wrong, and the
/// store stops.
#[test]
fn enospc_at_image_sync_stops_store_unless_buffered() {
    for io in IMAGE_WAYS {
        watched(&format!("{io} images"), move || {
            // The first sync is that of an image, unless the log thread syncs at the same time. In that case,
            // the test repeats.
            loop {
                let disk = SimDisk::new();
                let options = with_reserve().images(ImageOptions::new().io(io));
                let store = open_with(&disk, Arc::new(HostDevice::new()), options).unwrap();
                let mut line = Line::begin(&store);
                line.commits(&store, 3).unwrap();
                until(|| is_held(&disk, RESERVE));
                disk.fail(DiskFault { operation: Operation::Sync, skip: 0, times: 1, errno: ENOSPC });
                let taken = store.snapshot();
                assert_eq!(disk.faults_left(), 0, "no sync of an image: {taken:?}");
                let Err(error) = taken else { continue };
                if !matches!(error.file(), Some(FileName::Pages(_))) {
                    continue;
                }
                if io == ImageIo::Buffered {
                    assert!(matches!(error, Error::DiskFull { .. }), "{error}");
                    line.commits(&store, 3).unwrap();
                    store.snapshot().unwrap();
                } else {
                    let cause = poisoned(&store);
                    assert!(matches!(&*cause, Error::Io { action: IoAction::Sync, .. }), "{cause}");
                }
                drop(store);
                line.check(&open_on_host(&disk).unwrap(), line.logged);
                return;
            }
        });
    }
}

#[test]
fn a_restore_on_a_full_disk_fails_cleanly_and_succeeds_later() {
    // A snapshot contains images of all pages. If pages changed since, the restore writes images of the
    // changed pages.
    for batches_behind in [0, 2] {
        watched(&format!("{batches_behind} batches after a snapshot, every level"), move || {
            restores_at_every_level(batches_behind);
        });
    }
}

fn restores_at_every_level(batches_behind: u64) {
    let mut outcomes = [0, 0];
    for free in (0..30_000).step_by(2000) {
        let (disk, store, mut line) = filled(free);
        let pages = names(&disk, Folder::Pages);
        let target = Lsn(store.snapshots()[0].end.0 + batches_behind);
        let (logged, before) = (line.logged, line.clone());
        match line.restore_to(&store, target) {
            Ok(()) => outcomes[0] += 1,
            Err(error) => {
                outcomes[1] += 1;
                assert!(matches!(error, Error::DiskFull { .. }), "{error}");
                assert_eq!(names(&disk, Folder::Pages), pages, "leftovers");
                line = before;
                assert_eq!(store.lsn().0, logged);
                line.check(&store, logged);
                disk.set_capacity(None);
                line.restore_to(&store, target).unwrap();
            }
        }
        line.check(&store, line.logged);
        disk.set_capacity(None);
        line.commits(&store, 3).unwrap();
        drop(store);
        line.check(&open_on_host(&disk).unwrap(), line.logged);
    }
    assert!(outcomes.iter().all(|count| *count > 0), "done, refused: {outcomes:?}");
}

#[test]
fn store_on_full_disk_opens_from_reserve() {
    at_every_level(|free| {
        let (disk, store, mut line) = filled(free);
        fill(&store, &mut line);
        store.close().unwrap();
        let store = open_with_reserve(&disk).unwrap();
        line.check(&store, line.logged);
        let outcome = line.clone().commit(&store, Ack::Durable);
        assert!(
            outcome.as_ref().err().is_none_or(|error| matches!(error, Error::DiskFull { .. })),
            "{outcome:?}"
        );
        line.logged += u64::from(outcome.is_ok());
        line.steps.resize(line.logged as usize + 1, line.logged);
        drop(store);
        disk.set_capacity(None);
        line.check(&open_on_host(&disk).unwrap(), line.logged);
    });
}

#[test]
fn open_failed_by_full_disk_succeeds_once_space_returns() {
    watched("without a reserve", || {
        let disk = SimDisk::new();
        let store = Store::open_on(
            Arc::new(disk.clone()),
            Gauge::host(),
            small().with(|options| options.log.reserve_bytes = Some(0)),
        )
        .unwrap();
        let mut line = Line::begin(&store);
        line.commits(&store, 4).unwrap();
        drop(store);
        let before: Vec<_> = Folder::INNER.map(|folder| names(&disk, folder)).into();
        disk.set_capacity(Some(disk.used_bytes()));
        let device = Gauge::host();
        for _ in 0..3 {
            let error = open(&disk, device.clone()).unwrap_err();
            assert!(matches!(error, Error::DiskFull { file: FileName::Segment(_), .. }), "{error}");
            assert_eq!(Vec::from(Folder::INNER.map(|folder| names(&disk, folder))), before, "leftovers");
            assert_eq!(device.live(), 0);
        }
        disk.set_capacity(None);
        line.check(&open_on_host(&disk).unwrap(), line.logged);
    });
}

/// If no image fits on the disk, the space of deleted pages is freed page by page until a snapshot fits
/// again. The store can be closed and opened after each step.
#[test]
fn deleted_pages_free_space_when_no_image_fits() {
    for kept in [1, 2] {
        watched(&format!("{kept} kept"), move || give_back(kept));
    }
}

fn give_back(kept: usize) {
    const LEN: u64 = 64 << 10;
    let disk = SimDisk::new();
    let options = || {
        small()
            .retention(Retention::new().snapshots_kept(kept))
            .images(ImageOptions::new().compression(Compression::Off))
    };
    let open = || Store::open_on(Arc::new(disk.clone()), Arc::new(HostDevice::new()), options()).unwrap();
    let mut store = open();
    // Each page's image is in a separate file.
    let pages: Vec<PageId> = (0..6)
        .map(|_| {
            let mut batch = store.batch();
            batch.create(LEN, Place::Host);
            let page = store.commit(batch).unwrap().pages[0];
            store.snapshot().unwrap();
            page
        })
        .collect();
    // All pages change, so that a snapshot has to write all remaining pages.
    let mut batch = store.batch();
    pages.iter().for_each(|page| _ = batch.write(*page, 8, b"changed"));
    store.commit(batch).unwrap();
    until(|| is_held(&disk, 2));
    disk.set_capacity(Some(disk.used_bytes() + 4096));

    let mut fits = Vec::new();
    for (left, page) in (1..6).rev().zip(&pages) {
        let mut batch = store.batch();
        batch.delete(*page);
        store.commit(batch).unwrap();
        let images = names(&disk, Folder::Pages).len();
        let taken = store.snapshot();
        match &taken {
            Ok(_) => {}
            Err(Error::DiskFull { needed, .. }) => {
                assert!(*needed >= left * LEN, "{needed} for {left} pages")
            }
            Err(error) => panic!("{error}"),
        }
        fits.push(taken.is_ok());
        // The previous snapshot also names the page.
        store.prune(&store.retention().snapshots_kept(1)).unwrap();
        if taken.is_err() {
            assert_eq!(names(&disk, Folder::Pages).len(), images - 1, "{page} gave nothing back");
        }
        let state = State::of(&store);
        store.close().unwrap();
        store = open();
        assert_eq!(State::of(&store), state, "{page}");
        assert_eq!(store.scrub().unwrap().damage, []);
    }
    assert!(fits.is_sorted() && !fits[0] && fits[4], "{fits:?}");
}

/// Regression test. A commit that was refused just after the log moved to the next segment left that segment
/// empty. A longer frame then skipped the empty segment, and the next open reported the gap as damage. To
/// reproduce this, deletes use more of the reserve than writes may, while two segments are prepared. Either
/// the log gets one more segment, or a delete that is too long for a segment is refused after the preceding
/// segment was created.
#[test]
fn refused_append_leaves_no_empty_segment() {
    watched("refusals and longer frames", || {
        for deletes in 0..DELETES {
            for blocks in 3..8 {
                refusal(deletes, blocks << 12, false);
            }
            refusal(deletes, 0, true);
        }
    });
}

/// Number of deletes, which is more than the reserve guarantees.
const DELETES: usize = 32;

fn refusal(deletes: usize, space: u64, is_long_refused: bool) {
    let disk = SimDisk::new();
    let store = open_with_reserve(&disk).unwrap();
    let mut batch = store.batch();
    batch.create(64 << 10, Place::Host);
    (0..DELETES).for_each(|_| _ = batch.create(100, Place::Host));
    let pages = store.commit(batch).unwrap().pages;
    until(|| is_held(&disk, RESERVE));
    // Each batch forms a group, so that a segment holds three batches.
    let commit = |batch: WriteBatch| -> Result<()> { store.wait_durable(store.commit(batch)?.position.lsn) };
    let write = |len: usize, value: u8| {
        let mut batch = store.batch();
        batch.write(pages[0], 0, &vec![value; len]);
        commit(batch)
    };
    let fill = || {
        let refused = (0..200).find_map(|_| write(100, 1).err());
        assert!(matches!(refused, Some(Error::DiskFull { .. })), "{refused:?}");
    };
    disk.set_capacity(Some(disk.used_bytes()));
    fill();
    for page in &pages[1..=deletes] {
        let mut batch = store.batch();
        batch.delete(*page);
        if commit(batch).is_err() {
            break;
        }
    }
    if is_long_refused {
        let mut batch = store.batch();
        batch.delete(*pages.last().unwrap()).note("d".repeat(2 * SEGMENT as usize));
        let refused = commit(batch);
        assert!(matches!(refused, Err(Error::DiskFull { .. })), "{refused:?}");
    }
    disk.set_capacity(Some(disk.used_bytes() + space));
    fill();
    disk.set_capacity(None);
    write(40_000, 2).unwrap();
    store.close().unwrap();
    let store = open_with_reserve(&disk);
    let store = store.unwrap_or_else(|error| panic!("{deletes} deletes, then {space} bytes: {error}"));
    let mut bytes = vec![0; 40_000];
    store.read(pages[0], 0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 2));
}
