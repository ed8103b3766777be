//! Commits during a snapshot or a long read, at points that the test chooses: when captured bytes are
//! downloaded to the host.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::thread::ThreadId;

use remanent::device::host::HostDevice;
use remanent::device::{Command, CommandList, Device, Lane, Pending};
use remanent::disk::Disk;
use remanent::disk::dir::{DirDisk, DirReader};
use remanent::options::MemoryOptions;
use remanent::snapshot::SnapshotPhase;
use remanent::stats::Purpose;
use remanent::testing::faulty_device::{DeviceCall, DeviceFault, FaultyDevice};
use remanent::testing::late_device::LateDevice;
use remanent::{
    Ack, Error, Lsn, Metadata, Options, PageId, Place, Result, SnapshotOptions, StatePoint, Store,
};
use remanent_format::image::read::read_image;
use remanent_format::state::survey::Survey;

mod long;

/// A function that the thread of the snapshot or the read calls, with the store and the number of ranges
/// captured so far.
type Between = Box<dyn FnMut(&Store, usize) + Send>;

/// A device that calls back before each download of captured bytes to the host.
struct Gathering {
    inner: Box<dyn Device>,
    gathered: AtomicUsize,
    between: Mutex<Option<Between>>,
    /// The thread that is executing the callback.
    inside: Mutex<Option<ThreadId>>,
    store: OnceLock<Weak<Store>>,
}

impl Device for Gathering {
    forward!(inner: label allocate release staging reached wait after places_and_abilities);

    fn submit(&self, lane: Lane, list: CommandList) -> Result<Pending> {
        for command in &list.commands {
            if let Command::Gather { sources, .. } = command {
                self.gathered.fetch_add(sources.len(), Ordering::SeqCst);
            }
        }
        if lane == Lane::Drain {
            // Call back on one thread at a time, and not for batches that the callback commits.
            let here = Some(std::thread::current().id());
            if *self.inside.lock().unwrap() != here
                // A store that is being opened takes no snapshot.
                && let Some(store) = self.store.get().and_then(Weak::upgrade)
                && let Some(between) = &mut *self.between.lock().unwrap()
            {
                *self.inside.lock().unwrap() = here;
                between(&store, self.gathered.load(Ordering::SeqCst));
                *self.inside.lock().unwrap() = None;
            }
        }
        self.inner.submit(lane, list)
    }
}

/// Opens a store in `directory` that calls `between` during its snapshots.
fn open(
    directory: &std::path::Path,
    options: Options,
    between: impl FnMut(&Store, usize) + Send + 'static,
) -> Arc<Store> {
    open_over(Box::new(HostDevice::new()), directory, options, between)
}

/// Opens such a store with this device. Unless the device is the host's, `between` is also called during long
/// reads.
fn open_over(
    inner: Box<dyn Device>,
    directory: &std::path::Path,
    options: Options,
    between: impl FnMut(&Store, usize) + Send + 'static,
) -> Arc<Store> {
    open_on(Arc::new(DirDisk::new(directory)), inner, options, between)
}

/// Opens such a store on this disk.
fn open_on(
    disk: Arc<dyn Disk>,
    inner: Box<dyn Device>,
    options: Options,
    between: impl FnMut(&Store, usize) + Send + 'static,
) -> Arc<Store> {
    let device = Arc::new(Gathering {
        inner,
        gathered: AtomicUsize::new(0),
        inside: Mutex::new(None),
        between: Mutex::new(Some(Box::new(between))),
        store: OnceLock::new(),
    });
    let store = Arc::new(Store::open_on(disk, device.clone(), options).unwrap());
    device.store.set(Arc::downgrade(&store)).expect("set once");
    store
}

fn bytes(store: &Store, page: PageId) -> Vec<u8> {
    let mut bytes = vec![0; store.page(page).unwrap().len as usize];
    store.read(page, 0, &mut bytes).unwrap();
    bytes
}

/// A restore writes new images of all pages that changed between their capture and the snapshot's end. Here
/// these are all pages, which are too many for one chunk.
#[test]
fn a_restore_of_many_tiny_pages_fills_several_chunks() {
    const COUNT: usize = 70_000;
    let directory = tempfile::tempdir().unwrap();
    let fill = |store: &Store, value: u64| {
        let mut batch = store.batch();
        for page in 1..=COUNT as u64 {
            batch.write(PageId(page), 0, &(page ^ value << 32).to_le_bytes());
        }
        store.commit(batch).unwrap();
    };
    let store = open(directory.path(), Options::new(), move |store, gathered| {
        if gathered == COUNT {
            fill(store, 1);
        }
    });
    let mut batch = store.batch();
    for _ in 0..COUNT {
        batch.create(8, Place::Host);
    }
    store.commit(batch).unwrap();
    let snapshot = store.snapshot().unwrap();
    assert!(snapshot.redo < snapshot.end, "{snapshot:?}");
    fill(&store, 2);
    store.restore(StatePoint::Snapshot(snapshot.id)).unwrap();
    let check = |store: &Store, step| {
        for page in (1..=COUNT as u64).step_by(step).chain([COUNT as u64]) {
            assert_eq!(bytes(store, PageId(page)), (page ^ 1 << 32).to_le_bytes(), "page {page}");
        }
    };
    check(&store, 997);
    drop(store);
    // Several threads load ranges of pages, and no page at the boundary of two ranges is missed.
    check(&Store::open(directory.path()).unwrap(), 1);
}

/// An exact snapshot contains the state of one batch without the log, whatever is committed while the
/// snapshot is taken.
#[test]
fn exact_snapshot_is_point_in_time() {
    const COUNT: u64 = 600;
    const LEN: usize = 20_000;
    let directory = tempfile::tempdir().unwrap();
    let (mut interrupted, mut created) = (0, Vec::new());
    let store = open(directory.path(), Options::new(), move |store, gathered| {
        interrupted += 1;
        // Change pages that are already captured and pages that are not: write, resize, delete and move them,
        // and set metadata. Also create a page.
        let mut batch = store.batch();
        for page in (interrupted..=COUNT).step_by(7) {
            let page = PageId(page);
            if created.contains(&page) || store.page(page).is_err() {
                continue;
            }
            match page.0 % 5 {
                0 => batch.delete(page),
                1 => batch.resize(page, 2 * LEN as u64).fill(page, 0, 8, &[0xbb]),
                2 => batch.set_metadata(page, "gathered", gathered as u64),
                // All pages were created in host memory.
                3 => batch.move_to(page, if page.0.is_multiple_of(2) { Place::Host } else { Place::Unified }),
                _ => {
                    batch.fill(page, 0, 100, &[0xcc]).scatter(page, remanent::batch::Width::W1, &[500], &[1])
                }
            };
        }
        batch.create(100, Place::Host);
        batch.set_root("interrupted", interrupted);
        created.extend(store.commit(batch).unwrap().pages);
    });
    let mut batch = store.batch();
    for page in 1..=COUNT {
        let page = batch.create(if page % 50 == 0 { 0 } else { LEN as u64 }, Place::Host).page();
        batch.set_metadata(page, "as", "it was");
    }
    store.commit(batch).unwrap();
    let mut batch = store.batch();
    for page in 1..=COUNT {
        let len = if page % 50 == 0 { 0 } else { LEN as u64 };
        batch.fill(PageId(page), 0, len, &[page as u8, 1]);
    }
    batch.set_root("interrupted", 0u64);
    store.commit(batch).unwrap();
    let before = state(&store);
    let used = store.stats().places;

    let snapshot = store.snapshot_with(SnapshotOptions::new().exact()).unwrap();
    assert_eq!((snapshot.redo, snapshot.end), (Lsn(2), Lsn(2)), "{snapshot:?}");
    assert!(store.lsn() > Lsn(5), "it was interrupted often enough");
    assert_eq!(store.stats().snapshots.pages_done, COUNT);

    // According to the manifest, the snapshot is of Lsn 2. Its images contain the pages' bytes, so no batch
    // is replayed.
    let reader = DirReader::new(directory.path());
    let survey = Survey::read(&reader).unwrap();
    let manifest = survey.snapshot(snapshot.id).unwrap();
    assert_eq!((manifest.redo.lsn, manifest.end, &manifest.tombstones[..]), (Lsn(2), Lsn(2), &[][..]));
    assert!(manifest.entries.iter().all(|entry| entry.lsn <= Lsn(2)));
    let images: Vec<_> = manifest
        .entries
        .iter()
        .map(|entry| {
            let bytes = entry.image.map(|image| read_image(&reader, &image, entry.len).unwrap());
            (entry.page, entry.epoch, entry.place, (*entry.metadata).clone(), bytes.unwrap_or_default())
        })
        .collect();
    assert!(images == before.0, "the images are the pages at batch 2");
    assert_eq!(manifest.root, before.1);

    // The memory of the copies is freed, the store continues to work, and the log after the snapshot contains
    // the later changes.
    store.snapshot().unwrap();
    let now = state(&store);
    let after = store.stats().places;
    let pages: u64 = store.pages().unwrap().map(|info| info.len).sum();
    let allocated: u64 = after.iter().map(|(_, usage)| usage.allocated_bytes).sum();
    assert!(used[0].1.peak_bytes < after[0].1.peak_bytes && allocated == pages, "{after:?}");
    drop(store);
    let store = Store::open(directory.path()).unwrap();
    assert!(state(&store) == now);
    store.restore(StatePoint::Snapshot(snapshot.id)).unwrap();
    let restored = state(&store);
    let old = images.iter().map(|(page, _, place, metadata, bytes)| (page, place, metadata, bytes));
    let restored = restored.0.iter();
    assert!(restored.map(|(page, _, place, metadata, bytes)| (page, place, metadata, bytes)).eq(old));
}

/// If there is no memory for a copy of a page, the snapshot fails and the batch succeeds.
#[test]
fn an_exact_snapshot_without_room_for_copies_changes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    // The budget suffices for capturing all pages except the last, but not for a copy of that page. The page
    // is so late in the order that it has not been captured at the first callback, with any number of
    // threads.
    const CHUNK: u64 = 2 << 20;
    const LAST: u64 = 16 << 20;
    let memory = MemoryOptions::new().budget(Place::Host, 5 * CHUNK + LAST + LAST - 1);
    let store = open(directory.path(), Options::new().memory(memory), |store, gathered| {
        if gathered < 6 {
            let mut batch = store.batch();
            batch.fill(PageId(6), 0, LAST, &[9]);
            store.commit(batch).unwrap();
        }
    });
    let mut batch = store.batch();
    for len in [CHUNK, CHUNK, CHUNK, CHUNK, CHUNK, LAST] {
        batch.create(len, Place::Host);
    }
    store.commit(batch).unwrap();
    let refused = store.snapshot_with(SnapshotOptions::new().exact()).unwrap_err();
    assert!(matches!(refused, Error::OverBudget { place: Place::Host, requested: LAST, .. }), "{refused}");
    let stats = store.stats().snapshots;
    assert_eq!((stats.taken, stats.failed, stats.phase), (0, 1, SnapshotPhase::Idle));
    assert!(matches!(stats.last, Some(Err(Error::OverBudget { .. }))), "{stats:?}");
    assert!(bytes(&store, PageId(6)).iter().all(|byte| *byte == 9));
    assert_eq!(store.snapshots(), []);
    let names = std::fs::read_dir(directory.path().join("pages")).unwrap().count();
    assert_eq!(names, 0, "the unfinished file is gone");
    // A snapshot that is not exact needs no memory for copies.
    store.snapshot().unwrap();
}

/// Captured bytes count toward the memory budget under their own purpose, and are released at the end.
#[test]
fn gathered_pages_count_toward_the_budget() {
    let directory = tempfile::tempdir().unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let told = seen.clone();
    let store = open(directory.path(), Options::new(), move |store, _| {
        let usage = store.stats().places[0].1;
        told.lock().unwrap().push((usage.bytes_for(Purpose::Page), usage.bytes_for(Purpose::Gather)));
    });
    let pages = |store: &Store, count| {
        let mut batch = store.batch();
        (0..count).for_each(|_| _ = batch.create(50_000, Place::Host).page());
        store.commit(batch).unwrap();
    };
    pages(&store, 60);
    store.snapshot().unwrap();
    // There are two chunks of at most 2 MiB, which may exist at the same time.
    let pages_gathered = |(pages, gathered): &(u64, u64)| {
        assert_eq!((*pages, *gathered % 50_000), (3_000_000, 0));
        *gathered / 50_000
    };
    let gathered: Vec<u64> = seen.lock().unwrap().iter().map(pages_gathered).collect();
    assert!(gathered.len() == 2 && gathered.iter().all(|pages| [41, 19, 60].contains(pages)), "{gathered:?}");
    let usage = store.stats().places[0].1;
    assert_eq!((usage.used(), usage.bytes_for(Purpose::Gather)), (3_000_000, 0));
    drop(store);

    // The budget is exhausted, so pages are downloaded to the host without additional device memory.
    seen.lock().unwrap().clear();
    let memory = MemoryOptions::new().budget(Place::Host, 3_500_000);
    let store =
        open(directory.path(), Options::new().memory(memory), |_, _| panic!("something was gathered"));
    pages(&store, 10);
    let mut batch = store.batch();
    (1..=60_u8).for_each(|number| _ = batch.fill(PageId(number.into()), 0, 50_000, &[number]));
    store.commit(batch).unwrap();
    let exact = store.snapshot_with(SnapshotOptions::new().exact()).unwrap();
    assert_eq!((exact.pages, exact.redo), (70, exact.end));
    let usage = store.stats().places[0].1;
    assert_eq!((usage.peak_bytes, usage.used()), (3_500_000, 3_500_000));
    let now = state(&store);
    drop(store);
    let store = Store::open(directory.path()).unwrap();
    assert_eq!(store.recovered().replayed_batches, 0);
    assert!(state(&store) == now);
}

/// With a budget for one more page, a snapshot that captures pages into that memory releases it when a batch
/// needs it.
#[test]
fn a_batch_that_fits_is_not_refused_during_snapshots() {
    const LEN: u64 = 100_000;
    const LONG: u64 = 2_000_000;
    let directory = tempfile::tempdir().unwrap();
    let options = Options::new()
        .device(remanent::DeviceChoice::Host)
        .memory(MemoryOptions::new().budget(Place::Host, 7 * LEN + LONG));
    let store = options.open(directory.path()).unwrap();
    let mut batch = store.batch();
    (0..7).for_each(|_| _ = batch.create(LEN, Place::Host).page());
    store.commit(batch).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Acquire) {
                store.snapshot().unwrap();
            }
        });
        for round in 0..300_u32 {
            let mut batch = store.batch();
            batch.create(LONG, Place::Host);
            (1..=7).for_each(|page| _ = batch.write(PageId(page), 0, &round.to_le_bytes()));
            let page = store.commit(batch).map(|committed| committed.pages[0]);
            if page.is_err() {
                done.store(true, Ordering::Release);
            }
            let mut batch = store.batch();
            batch.delete(page.unwrap_or_else(|error| panic!("round {round}: {error}")));
            store.commit(batch).unwrap();
        }
        done.store(true, Ordering::Release);
    });
    assert!(store.stats().snapshots.taken > 0);
}

/// A long read first copies the bytes on the device, so batches can be committed while the bytes are
/// downloaded to the host.
#[test]
fn long_read_blocks_no_batch() {
    const LEN: u64 = (64 << 10) + 16;
    let late = || Box::new(LateDevice::new(Arc::new(HostDevice::new())));
    let directory = tempfile::tempdir().unwrap();
    let calls = Arc::new(AtomicUsize::new(0));
    let called = calls.clone();
    let (long, short) = (PageId(1), PageId(2));
    let store = open_over(late(), directory.path(), Options::new(), move |store, _| {
        let number = called.fetch_add(1, Ordering::SeqCst) as u8;
        let mut batch = store.batch();
        batch.fill(long, 0, LEN, &[number + 1]).fill(short, 0, 16, &[number + 1]);
        store.submit(batch).unwrap().wait(Ack::Applied).unwrap();
        assert_eq!(bytes(store, short), [number + 1; 16]);
        assert_eq!(store.stats().places[0].1.bytes_for(Purpose::Gather), LEN);
    });
    let mut batch = store.batch();
    batch.create(LEN, Place::Device(0));
    batch.create(16, Place::Device(0));
    store.commit(batch).unwrap();
    for round in 0..3 {
        assert_eq!(calls.load(Ordering::SeqCst), usize::from(round));
        assert!(bytes(&store, long) == [round; LEN as usize], "round {round}");
    }
    // The range is so short that no copy is made.
    let mut out = vec![0; 64 << 10];
    store.read(long, 16, &mut out).unwrap();
    assert!(out == [3; 64 << 10] && calls.load(Ordering::SeqCst) == 3);
    assert_eq!(store.stats().places[0].1.used(), LEN + 16);
    drop(store);

    // If there is no memory for a copy, the read succeeds without one.
    let memory = MemoryOptions::new().budget(Place::Device(0), 2 * LEN + 15);
    let store = open_over(late(), directory.path(), Options::new().memory(memory), |_, _| {
        panic!("something was gathered")
    });
    assert!(bytes(&store, long) == [3; LEN as usize]);
}

/// Allocating staging memory takes long. If the pages were copied first, the copies would occupy memory that
/// batches need in the meantime.
#[test]
fn staging_is_allocated_before_pages_are_copied() {
    const LEN: u64 = 5 << 20;
    let takes: [fn(&Store, PageId) -> Result<()>; 2] = [
        |store, page| store.read(page, 0, &mut vec![0; LEN as usize]).map(drop),
        |store, _| store.snapshot().map(drop),
    ];
    for take in takes {
        let late = LateDevice::new(Arc::new(HostDevice::new()));
        let faulty = Arc::new(FaultyDevice::new(Arc::new(late)));
        let directory = tempfile::tempdir().unwrap();
        let disk = Arc::new(DirDisk::new(directory.path()));
        let store = Store::open_on(disk, faulty.clone(), Options::new()).unwrap();
        let mut batch = store.batch();
        batch.create(LEN, Place::Device(0));
        let page = store.commit(batch).unwrap().pages[0];
        faulty.arm(DeviceFault { call: Some(DeviceCall::Staging), nth: 1, context_lost: false });
        let refused = take(&store, page).unwrap_err();
        assert!(faulty.struck(), "{refused}");
        let usage = store.stats().places[0].1;
        assert_eq!((usage.peak_bytes, usage.used()), (LEN, LEN));
    }
}

type Pages = Vec<(PageId, remanent::Epoch, Place, Metadata, Vec<u8>)>;

/// Returns the state of a store without its keys.
fn state(store: &Store) -> (Pages, Arc<Metadata>) {
    let pages = store.pages().unwrap();
    let pages = pages
        .map(|info| (info.page, info.epoch, info.place, (*info.metadata).clone(), bytes(store, info.page)));
    (pages.collect(), store.root().unwrap())
}
