//! Bits that flip in transfers between host and device, in every copy of every operation whose bytes have checksums on
//! both sides (I12).
//!
//! A single bit flip is corrected by repeating the copy. If it happens again, the store stops with a device error. A
//! bit flip in a long write stops the store immediately, because later writes may have changed the same bytes, and the
//! next open can recover them from the log. Wrong bytes are never returned, logged or published, and no file is
//! reported as damaged. Images that a device copies to mapped files are tested in `in_place.rs`.

use std::sync::OnceLock;

use remanent::batch::{ByteSource, InitialCopy, Shadow, Width};
use remanent::device::CallerMemory;
use remanent::disk::Disk;
use remanent::error::IoObject;
use remanent::history::DeviceCopier;
use remanent::options::{MemoryOptions, PageLoad, SnapshotSchedule};
use remanent::testing::faulty_device::{BitFlip, BusTransfer, FaultyDevice};
use remanent::testing::late_device::LateDevice;
use remanent::{SnapshotOptions, View};

use super::*;
use crate::size::sized;

/// Lengths of pages, so that every kind of transfer occurs: captured together with other pages, as one chunk, in
/// pieces, and stored uncompressed and compressed.
const LENS: [u64; 5] = [3000, 70_000, (1 << 20) + 3, (5 << 20) + 5, 5 << 20];

/// Number of versions of a page. The first version is never written.
const VERSIONS: usize = 4;

/// Returns bytes that differ for each version, and are incompressible except for the last page. The bytes are computed
/// once, because thousands of cases compare with them.
fn content(page: usize, version: u64) -> &'static [u8] {
    static CONTENTS: [[OnceLock<Vec<u8>>; VERSIONS]; LENS.len()] =
        [const { [const { OnceLock::new() }; VERSIONS] }; LENS.len()];
    CONTENTS[page][version as usize].get_or_init(|| made(page, version))
}

fn made(page: usize, version: u64) -> Vec<u8> {
    let mut state = 0x9E37_79B9 * (page as u64 + 1) + version;
    let word = |at: u64| {
        if page == LENS.len() - 1 {
            return (at / 512 + version).to_le_bytes();
        }
        state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (state ^ state >> 31).to_le_bytes()
    };
    let mut bytes: Vec<u8> = (0..LENS[page].div_ceil(8)).flat_map(word).collect();
    bytes.truncate(LENS[page] as usize);
    bytes
}

fn options() -> Options {
    Options::new().snapshots(SnapshotSchedule::never())
}

fn host() -> Arc<dyn Device> {
    Arc::new(HostDevice::new())
}

/// Pages, and the expected version of each.
struct VersionedPages {
    pages: Vec<(PageId, u64)>,
}

impl VersionedPages {
    fn create(store: &Store) -> Self {
        let mut batch = store.batch();
        for len in LENS {
            batch.create(len, Place::Device(0));
        }
        let pages = store.commit(batch).unwrap().pages.into_iter().map(|page| (page, 0)).collect();
        let mut held = Self { pages };
        held.write(store, 1);
        held
    }

    fn write(&mut self, store: &Store, version: u64) {
        let mut batch = store.batch();
        for (index, (page, held)) in self.pages.iter_mut().enumerate() {
            batch.write(*page, 0, content(index, version));
            *held = version;
        }
        store.commit(batch).unwrap();
    }

    /// Checks that every page has the expected bytes, or that reading the page fails.
    fn check(&self, store: &Store) -> Result<()> {
        for (index, (page, version)) in self.pages.iter().enumerate() {
            let bytes = store.read_to_vec(*page)?;
            assert!(bytes == content(index, *version), "page {index} is not of version {version}");
        }
        Ok(())
    }
}

/// A store on a simulated disk, with a device whose transfers flip bits.
struct Bus {
    disk: SimDisk,
    device: Arc<FaultyDevice>,
}

impl Bus {
    fn open(&self, options: Options) -> Result<Store> {
        open_with(&self.disk, self.device.clone(), options)
    }

    /// After the store is closed, checks that the disk contains the state and that no file is damaged.
    fn check_disk(&self, held: &VersionedPages) {
        let store = open_with(&self.disk, host(), options()).unwrap();
        held.check(&store).unwrap();
        store.snapshot().unwrap();
        assert_eq!(store.scrub().unwrap().damage, []);
    }
}

/// The result of an operation, and the pages that the store must contain after it.
type Ended = (VersionedPages, Result<()>);

/// Runs an operation with a flipped bit in its first, second, … copy of each kind, once and permanently, up to its last
/// copy. In a sample, tests one of four copies. `work` prepares a store, enables the bit flips with the function that
/// it receives, and disables them with [`FaultyDevice::end_flips`].
fn at_every_copy(
    name: &'static str,
    ways: &[BusTransfer],
    work: impl Fn(&Bus, &dyn Fn()) -> Ended + Send + Sync + Copy + 'static,
) {
    at_each(name, ways, 1, work);
}

/// Like [`at_every_copy`], but up to `mended` flipped copies are corrected without an error.
fn at_each(
    name: &'static str,
    ways: &[BusTransfer],
    mended: u64,
    work: impl Fn(&Bus, &dyn Fn()) -> Ended + Send + Sync + Copy + 'static,
) {
    for &way in ways {
        for (times, late) in [(1, false), (1, true), (u64::MAX, false), (u64::MAX, true)] {
            for nth in (1..).step_by(sized(4, 1)) {
                let flip = BitFlip { way, nth, times };
                let struck = Arc::new(AtomicBool::new(false));
                let told = struck.clone();
                let case = move || told.store(flip_once(flip, late, mended, work), Ordering::SeqCst);
                watched(&format!("{name}, late {late}, {flip:?}"), case);
                if !struck.load(Ordering::SeqCst) {
                    assert!(nth > 1, "{name}: nothing goes {way:?}");
                    break;
                }
            }
        }
    }
}

/// Runs an operation with this bit flip. Returns true if a copy was changed.
fn flip_once(flip: BitFlip, late: bool, mended: u64, work: impl Fn(&Bus, &dyn Fn()) -> Ended) -> bool {
    let inner = if late { Arc::new(LateDevice::seeded(host(), flip.nth)) } else { host() };
    let bus = Bus { disk: SimDisk::new(), device: Arc::new(FaultyDevice::across_a_bus(inner)) };
    let (held, outcome) = work(&bus, &|| bus.device.flip(flip));
    let flipped = bus.device.end_flips();
    let is_told = |error: &Error| error.to_string().contains("changed in transit");
    match &outcome {
        Ok(()) => assert!(flipped <= mended, "{flipped} copies changed, and nothing was said"),
        Err(Error::Poisoned(cause)) => assert!(is_told(cause), "{cause}"),
        Err(error @ Error::Io { object: IoObject::Source { .. }, .. }) => assert!(is_told(error), "{error}"),
        Err(error) => assert!(matches!(error, Error::Device { .. }) && is_told(error), "{error}"),
    }
    assert!(outcome.is_ok() || flipped > mended, "{flipped} copies changed: {outcome:?}");
    bus.check_disk(&held);
    flipped > 0
}

const DOWN: &[BusTransfer] = &[BusTransfer::Down, BusTransfer::Sums];
const UP: &[BusTransfer] = &[BusTransfer::Up, BusTransfer::Sums];

/// Takes a snapshot of pages in device memory.
fn snapshot(bus: &Bus, flips: &dyn Fn(), options: Options, with: SnapshotOptions) -> Ended {
    let store = bus.open(options).unwrap();
    let held = VersionedPages::create(&store);
    flips();
    let taken = store.snapshot_with(with).map(drop);
    bus.device.end_flips();
    held.check(&store).unwrap();
    assert_eq!(store.snapshots().is_empty(), taken.is_err(), "nothing wrong is published");
    (held, taken)
}

#[test]
fn snapshot_rejects_bit_flips() {
    at_every_copy("a snapshot", DOWN, |bus, flips| snapshot(bus, flips, options(), SnapshotOptions::new()));
}

#[test]
fn exact_snapshot_rejects_bit_flips() {
    at_every_copy("an exact snapshot", DOWN, |bus, flips| {
        snapshot(bus, flips, options(), SnapshotOptions::new().name("exact"))
    });
}

/// Opens a store with images and a later log.
fn open_again(bus: &Bus, flips: &dyn Fn(), options: Options) -> Ended {
    let store = open_with(&bus.disk, host(), options.clone()).unwrap();
    let mut held = VersionedPages::create(&store);
    store.snapshot().unwrap();
    // The length of one page changes, so the page is assembled in host memory.
    let page = held.pages[1].0;
    let mut batch = store.batch();
    batch.resize(page, 10).resize(page, LENS[1]).write(page, 0, content(1, 2));
    store.commit(batch).unwrap();
    held.pages[1].1 = 2;
    drop(store);
    flips();
    let opened = bus.open(options);
    let loaded = opened.and_then(|store| {
        let loaded = store.wait_loaded();
        bus.device.end_flips();
        // Reading a page that could not be loaded fails, and all other pages are correct.
        let read = held.check(&store);
        assert_eq!(read.is_ok(), loaded.is_ok(), "{read:?} after {loaded:?}");
        loaded
    });
    (held, loaded)
}

/// The bytes of a page's source are written to memory before the batch is logged.
#[test]
fn page_from_source_rejects_bit_flips() {
    /// The bytes of a page in one version.
    #[derive(Debug)]
    struct Source(&'static [u8]);

    impl ByteSource for Source {
        fn read_at(&self, offset: u64, bytes: &mut [u8]) -> std::io::Result<()> {
            bytes.copy_from_slice(&self.0[offset as usize..][..bytes.len()]);
            Ok(())
        }
    }

    at_every_copy("pages from sources", UP, |bus, flips| {
        let store = bus.open(options()).unwrap();
        let mut held = VersionedPages::create(&store);
        flips();
        let mut batch = store.batch();
        for (index, (page, _)) in held.pages.iter().enumerate() {
            batch.replace_from_source(*page, LENS[index], Arc::new(Source(content(index, 2))));
        }
        let committed = store.commit(batch);
        bus.device.end_flips();
        if committed.is_ok() {
            held.pages.iter_mut().for_each(|(_, version)| *version = 2);
        }
        held.check(&store).unwrap();
        (held, committed.map(drop))
    });
}

/// New pages with bytes from the caller are uploaded before the batch is logged. A wrong upload is corrected from their
/// images.
#[test]
fn new_whole_pages_reject_bit_flips() {
    at_every_copy("new whole pages", UP, |bus, flips| {
        let store = bus.open(options()).unwrap();
        let mut held = VersionedPages::create(&store);
        flips();
        let mut batch = store.batch();
        for index in 0..held.pages.len() {
            batch.create_from(content(index, 2), Place::Device(0));
        }
        let committed = store.commit(batch);
        bus.device.end_flips();
        if let Ok(committed) = &committed {
            held.pages = committed.pages.iter().map(|page| (*page, 2)).collect();
        }
        held.check(&store).unwrap();
        (held, committed.map(drop))
    });
}

/// Captures of pages on disk download the bytes into an image, not into the store's memory.
#[test]
fn captured_image_rejects_bit_flips() {
    for (what, shadow) in [
        ("captured pages on disk", Shadow::Kept(Place::Host)),
        ("captured pages on disk, by digests", Shadow::Digest),
    ] {
        captured_at_every_copy(what, shadow);
    }
}

fn captured_at_every_copy(what: &'static str, shadow: Shadow) {
    at_every_copy(what, &[BusTransfer::Down], move |bus, flips| {
        let store = bus.open(options()).unwrap();
        let mut held = VersionedPages::create(&store);
        let mut batch = store.batch();
        held.pages.iter().for_each(|(page, _)| _ = batch.move_to(*page, Place::Disk));
        store.commit(batch).unwrap();
        let copies = held.pages.iter().enumerate().map(|(index, (page, _))| {
            let tensor = store.device_bytes(LENS[index], Place::Device(0)).unwrap();
            tensor.write(0, content(index, 2)).unwrap();
            let initial_copy = InitialCopy::Store;
            store.working_copy_in(*page, &tensor, Width::W1, shadow, initial_copy).unwrap()
        });
        let copies = copies.collect::<Vec<_>>();
        flips();
        let mut batch = store.batch();
        copies.iter().for_each(|copy| _ = batch.capture(copy));
        let committed = store.commit(batch);
        bus.device.end_flips();
        if committed.is_ok() {
            held.pages.iter_mut().for_each(|(_, version)| *version = 2);
        }
        held.check(&store).unwrap();
        (held, committed.map(drop))
    });
}

#[test]
fn open_rejects_bit_flips() {
    at_every_copy("an open", UP, |bus, flips| open_again(bus, flips, options()));
}

#[test]
fn on_demand_load_rejects_bit_flips() {
    at_every_copy("an open on demand", UP, |bus, flips| {
        open_again(bus, flips, options().memory(MemoryOptions::new().load(PageLoad::OnDemand)))
    });
}

/// Moves every page to a place, and reads all of them.
fn moved(bus: &Bus, flips: &dyn Fn(), first: Place, then: Place) -> Ended {
    let store = bus.open(options()).unwrap();
    let held = VersionedPages::create(&store);
    let pages: Vec<PageId> = held.pages.iter().map(|(page, _)| *page).collect();
    store.ensure(&pages, first).unwrap();
    flips();
    let moved = store.ensure(&pages, then).map(drop);
    bus.device.end_flips();
    let read = held.check(&store);
    assert!(read.is_ok() || moved.is_err(), "{read:?} after {moved:?}");
    (held, moved)
}

#[test]
fn demote_to_disk_rejects_bit_flips() {
    at_every_copy("to disk", DOWN, |bus, flips| moved(bus, flips, Place::Device(0), Place::Disk));
}

#[test]
fn promote_from_disk_rejects_bit_flips() {
    at_every_copy("from disk", UP, |bus, flips| moved(bus, flips, Place::Disk, Place::Device(0)));
}

#[test]
fn load_without_store_rejects_bit_flips() {
    at_every_copy("a load", UP, |bus, flips| {
        let store = open_with(&bus.disk, host(), options()).unwrap();
        let mut held = VersionedPages::create(&store);
        store.snapshot().unwrap();
        // One page is changed by a batch after its image.
        let page = held.pages[1].0;
        store
            .commit({
                let mut batch = store.batch();
                batch.write(page, 0, content(1, 2));
                batch
            })
            .unwrap();
        held.pages[1].1 = 2;
        drop(store);
        let view = View::open_on(&(Arc::new(bus.disk.clone()) as Arc<dyn Disk>), None).unwrap();
        let loader = DeviceCopier::open_on(bus.device.clone());
        let memory = LENS.map(|len| {
            let memory = CallerMemory::from_vec(vec![0; len as usize], Place::Device(0));
            loader.caller_bytes(&memory).unwrap()
        });
        let pages: Vec<_> = held.pages.iter().map(|(page, _)| *page).zip(&memory).collect();
        flips();
        let loaded = loader.load(&view, &pages);
        bus.device.end_flips();
        for ((index, (_, version)), memory) in held.pages.iter().enumerate().zip(&memory) {
            let mut bytes = vec![0; LENS[index] as usize];
            memory.read(0, &mut bytes).unwrap();
            assert!(loaded.is_err() || bytes == content(index, *version), "page {index}");
        }
        (held, loaded)
    });
}

#[test]
fn page_from_other_device_rejects_bit_flips() {
    at_every_copy("a page from elsewhere", DOWN, |bus, flips| {
        let store = open_with(&bus.disk, host(), options()).unwrap();
        let mut held = VersionedPages { pages: Vec::new() };
        let copier = DeviceCopier::open_on(bus.device.clone());
        let mut batch = store.batch();
        for (index, len) in LENS.into_iter().enumerate() {
            let memory = CallerMemory::from_vec(content(index, 1).to_vec(), Place::Device(0));
            let source = copier.source(copier.caller_bytes(&memory).unwrap()).unwrap();
            batch.create_from_source(len, Arc::new(source), Place::Disk);
        }
        flips();
        let committed = store.commit(batch);
        bus.device.end_flips();
        let committed =
            committed.map(|receipt| held.pages.extend(receipt.pages.iter().map(|page| (*page, 1))));
        held.check(&store).unwrap();
        (held, committed)
    });
}

#[test]
fn restore_rejects_bit_flips() {
    at_every_copy("a restore", &[BusTransfer::Up, BusTransfer::Down, BusTransfer::Sums], |bus, flips| {
        let store = bus.open(options()).unwrap();
        let mut held = VersionedPages::create(&store);
        let before = store.snapshot_with(SnapshotOptions::new().name("before")).unwrap();
        held.write(&store, 2);
        flips();
        let restored = store.restore(StatePoint::Snapshot(before.id)).map(drop);
        bus.device.end_flips();
        // After a restore that failed after it was logged, some memory must no longer be read.
        held.pages.iter_mut().for_each(|(_, version)| *version = 1);
        match held.check(&store) {
            Ok(()) => {}
            Err(error) => assert!(restored.is_err(), "{error}"),
        }
        (held, restored)
    });
}

#[test]
fn log_rejects_bit_flips() {
    at_every_copy("a batch of bytes on the device", DOWN, |bus, flips| {
        let store = bus.open(options()).unwrap();
        let mut held = VersionedPages::create(&store);
        let memory = store.device_bytes(LENS[2], Place::Device(0)).unwrap();
        memory.write(0, content(2, 3)).unwrap();
        let mut batch = store.batch();
        // In the payload, bytes from the host are between bytes from the device.
        batch.write_device(held.pages[2].0, 0, &memory.part(0..100_001).unwrap());
        batch.write(held.pages[0].0, 0, content(0, 3));
        batch.write_device(held.pages[2].0, 100_001, &memory.part(100_001..LENS[2]).unwrap());
        flips();
        let committed = store.commit(batch).map(drop);
        bus.device.end_flips();
        if committed.is_ok() {
            (held.pages[0].1, held.pages[2].1) = (3, 3);
        }
        held.check(&store).unwrap();
        (held, committed)
    });
}

#[test]
fn clone_rejects_bit_flips() {
    at_every_copy("a clone", DOWN, |bus, flips| {
        let store = bus.open(options()).unwrap();
        let held = VersionedPages::create(&store);
        let mut batch = store.batch();
        batch.clone_page(held.pages[0].0);
        batch.clone_page(held.pages[3].0);
        flips();
        let committed = store.commit(batch);
        bus.device.end_flips();
        if let Ok(committed) = &committed {
            for (index, clone) in [0, 3].into_iter().zip(&committed.pages) {
                assert!(store.read_to_vec(*clone).unwrap() == content(index, 1));
            }
        }
        held.check(&store).unwrap();
        (held, committed.map(drop))
    });
}

const LONG_WRITES: &[BusTransfer] = &[BusTransfer::LongWrites, BusTransfer::WriteSums];

/// Writes all bytes except the first of two pages, so that the log contains the bytes and no image is written.
fn write_most(store: &Store, held: &mut VersionedPages, version: u64) {
    let mut batch = store.batch();
    for (index, (page, held)) in held.pages.iter_mut().enumerate().skip(2).take(2) {
        let bytes = content(index, version);
        *held = version;
        // A later write of the batch overlaps a long write.
        batch.write(*page, 1, &bytes[1..]).write(*page, 1, &bytes[1..2]).write(*page, 0, &bytes[..1]);
    }
    store.commit(batch).unwrap();
}

/// Waits until all batches are applied.
fn wait_applied(store: &Store) -> Result<()> {
    let mut batch = store.batch();
    batch.note("the last one");
    store.submit(batch).and_then(|ticket| ticket.wait(Ack::Applied))
}

#[test]
fn long_write_rejects_bit_flips() {
    at_each("long writes", LONG_WRITES, 0, |bus, flips| {
        let store = bus.open(options()).unwrap();
        let mut held = VersionedPages::create(&store);
        wait_applied(&store).unwrap();
        flips();
        write_most(&store, &mut held, 2);
        // Check immediately, not only after the batch is applied.
        let read = held.check(&store);
        // Write whole pages, whose images are written before the batch is logged.
        let written = read.and_then(|()| {
            held.write(&store, 3);
            wait_applied(&store)
        });
        bus.device.end_flips();
        assert_eq!(held.check(&store).is_ok(), written.is_ok(), "{written:?}");
        (held, written)
    });
}

#[test]
fn replay_of_long_writes_rejects_bit_flips() {
    at_each("a replay", LONG_WRITES, 0, |bus, flips| {
        let store = open_with(&bus.disk, host(), options()).unwrap();
        let mut held = VersionedPages::create(&store);
        store.snapshot().unwrap();
        (2..4).for_each(|version| write_most(&store, &mut held, version));
        // Write to a page that is deleted before the writes are verified.
        let mut batch = store.batch();
        let page = batch.create(1 << 20, Place::Device(0)).page();
        batch.write(page, 1, &content(2, 1)[..1 << 19]);
        let page = store.commit(batch).unwrap().pages[0];
        let mut batch = store.batch();
        batch.delete(page);
        store.commit(batch).unwrap();
        drop(store);
        flips();
        let opened = bus.open(options());
        bus.device.end_flips();
        let opened = opened.and_then(|store| held.check(&store));
        (held, opened)
    });
}
