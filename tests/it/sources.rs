//! Pages from sources. The bytes are read once, for the image, and not again for memory. A source that fails
//! leaves no trace. A whole page never exists in memory in addition to its place.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use remanent::batch::ByteSource;
use remanent::device::host::HostDevice;
use remanent::error::{FileName, Invalid, IoObject, Remedy, Unavailable};
use remanent::options::{Compression, ImageOptions, MemoryOptions};
use remanent::testing::late_device::LateDevice;
use remanent::testing::sim_disk::{DiskFault, EIO, Operation, SimDisk};
use remanent::{Ack, Error, Options, PageId, Place, Store, WriteBatch};
use remanent_format::state::rebuild::{RebuildOptions, rebuild};

use crate::files::{Files, State, open, open_with, small};
use crate::kill::workload::Random;
use crate::with_options::With;

/// Length of a page, longer than a segment of these tests.
const LEN: u64 = 20 << 10;
/// Length of a page, longer than two pieces.
const LONG: u64 = (9 << 20) + 5;

/// A source of bytes that records its reads.
#[derive(Debug)]
struct Noted {
    bytes: Vec<u8>,
    /// The requested ranges, in order.
    reads: Mutex<Vec<(u64, u64)>>,
}

impl Noted {
    fn new(bytes: Vec<u8>) -> Arc<Self> {
        Arc::new(Self { bytes, reads: Mutex::default() })
    }

    fn reads(&self) -> Vec<(u64, u64)> {
        self.reads.lock().unwrap().clone()
    }
}

impl ByteSource for Noted {
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.reads.lock().unwrap().push((offset, bytes.len() as u64));
        let there = self.bytes.get(offset as usize..).unwrap_or_default();
        let there = there.get(..bytes.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
        bytes.copy_from_slice(there);
        Ok(())
    }
}

/// A source that returns different bytes at each read.
#[derive(Debug, Default)]
struct Changing {
    turn: AtomicU64,
    compresses: bool,
}

impl ByteSource for Changing {
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        if self.compresses {
            bytes.fill(turn as u8);
        } else {
            bytes.copy_from_slice(&Random(turn ^ offset).bytes(bytes.len() as u64));
        }
        Ok(())
    }
}

/// A source that fails with this error from this offset on.
#[derive(Debug)]
struct FailsFrom(u64, fn() -> io::Error);

impl ByteSource for FailsFrom {
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        if offset + bytes.len() as u64 > self.0 {
            return Err(self.1());
        }
        bytes.fill(7);
        Ok(())
    }
}

/// A source that panics.
#[derive(Debug)]
struct Panics;

impl ByteSource for Panics {
    fn read_at(&self, _: u64, _: &mut [u8]) -> io::Result<()> {
        panic!("a source of a test");
    }
}

fn noise(seed: u64, len: u64) -> Vec<u8> {
    Random(seed).bytes(len)
}

fn raw() -> Options {
    small().images(ImageOptions::new().compression(Compression::Off))
}

/// Opens a store on a device whose new memory is not zeroed and which executes lists as late as possible.
fn open_late(disk: &SimDisk, options: Options) -> Store {
    let device = LateDevice::seeded(Arc::new(HostDevice::new()), 1);
    Store::open_on(Arc::new(disk.clone()), Arc::new(device), options).unwrap()
}

fn image_files(disk: &SimDisk) -> Vec<FileName> {
    Files::of(disk).names(|file| matches!(file, FileName::Pages(_)))
}

fn allocated(store: &Store) -> u64 {
    // Reads wait until batches are applied, so that memory freed by batches no longer counts.
    store.pages().unwrap().for_each(|info| _ = store.read(info.page, 0, &mut []).unwrap());
    store.stats().places.iter().map(|(_, usage)| usage.used()).sum()
}

/// Asserts that the store, an open and a rebuild of its files all have these pages.
fn check_lasts(disk: &SimDisk, store: Store, options: Options) {
    let state = State::of(&store);
    assert!(store.audit().unwrap().changed.is_empty());
    store.close().unwrap();
    assert!(State::rebuilt(&rebuild(&Files::of(disk), &RebuildOptions::default()).unwrap()) == state);
    let store = open_with(disk, options).unwrap();
    assert!(State::of(&store) == state, "replayed from the images and the log");
    let taken = store.snapshot().unwrap();
    assert_eq!(taken.bytes_written, 0, "the images of the batches are the snapshot's");
    drop(store);
    assert!(State::of(&open(disk).unwrap()) == state, "from the snapshot");
}

#[test]
fn page_from_source_is_logged_by_reference() {
    let disk = SimDisk::new();
    let store = open_late(&disk, raw());
    let before = store.stats().log.bytes;
    let lens = [LEN, LONG, 4096, LEN + 3];
    let sources: Vec<_> = (0..).zip(lens).map(|(seed, len)| Noted::new(noise(seed, len + 9))).collect();
    let mut batch = store.batch();
    for (source, len) in sources.iter().zip(lens) {
        batch.create_from_source(len, source.clone(), Place::Host).key(format!("{len}"));
    }
    // Add bytes from the caller and a page that moves to the same batch.
    batch.create_from(noise(9, LEN), Place::Host);
    let moved = batch.create_from_source(LEN, sources[1].clone(), Place::Host).page();
    batch.move_to(moved, Place::Pinned).set_metadata(moved, "is", "moved");
    let pages = store.commit(batch).unwrap().pages;
    assert!(store.stats().log.bytes - before < 4096, "the log names the pages");
    for ((source, len), page) in sources.iter().zip(lens).zip(&pages) {
        assert!(store.read_to_vec(*page).unwrap() == source.bytes[..len as usize], "{len} bytes");
    }
    assert!(store.read_to_vec(pages[4]).unwrap() == noise(9, LEN));
    assert!(store.read_to_vec(pages[5]).unwrap() == sources[1].bytes[..LEN as usize]);
    assert_eq!(store.page(pages[5]).unwrap().place, Place::Pinned);
    // For uncompressed images, every byte is read once, in pieces, because memory is filled from the image.
    let long: Vec<_> = sources[1].reads().into_iter().filter(|(_, len)| *len != LEN).collect();
    assert_eq!(long, [(0, 4 << 20), (4 << 20, 4 << 20), (8 << 20, (1 << 20) + 5)]);
    assert_eq!(sources[0].reads(), [(0, LEN)]);
    check_lasts(&disk, store, raw());
}

#[test]
fn replace_from_source_changes_only_bytes_and_length() {
    let disk = SimDisk::new();
    let store = open_late(&disk, small());
    let mut batch = store.batch();
    for (key, len) in [("longer", 100), ("shorter", LEN), ("as long", LEN), ("leased", LEN)] {
        batch.create_from(noise(1, len), Place::Pinned).key(key);
    }
    let empty = batch.create(0, Place::Host).page();
    // Replace a page that the same batch creates.
    batch.replace_from_source(empty, LEN, Noted::new(noise(50, LEN)));
    let pages = store.commit(batch).unwrap().pages;
    assert!(store.read_to_vec(pages[4]).unwrap() == noise(50, LEN));
    let keys: Vec<_> = store.pages().unwrap().map(|info| info.key).collect();
    let lens = [LEN, 5000, LEN, LEN + 1];

    let lease = store.lease(pages[3]).unwrap();
    let mut batch = store.batch();
    // The earlier bytes are copied before they are replaced.
    batch.copy(pages[0], 0..100, pages[4], 3);
    for ((seed, len), page) in (20..).zip(lens).zip(&pages) {
        batch.replace_from_source(*page, len, Noted::new(noise(seed, len)));
    }
    store.commit(batch).unwrap();
    for ((seed, len), page) in (20..).zip(lens).zip(&pages) {
        assert!(store.read_to_vec(*page).unwrap() == noise(seed, len), "page {page}");
        assert_eq!((store.page(*page).unwrap().len, store.page(*page).unwrap().place), (len, Place::Pinned));
    }
    assert!(store.read_to_vec(pages[4]).unwrap()[3..103] == noise(1, 100));
    assert!(lease.bytes().unwrap()[..] == noise(1, LEN), "a lease shows what was there");
    lease.end().unwrap();
    assert_eq!(store.pages().unwrap().map(|info| info.key).collect::<Vec<_>>(), keys);
    let state = State::of(&store);
    store.close().unwrap();
    assert!(State::of(&open(&disk).unwrap()) == state);
}

#[test]
fn short_sources_are_logged_and_empty_ones_not_read() {
    let disk = SimDisk::new();
    let store = open_with(&disk, small().with(|options| options.log.segment_len = 1 << 20)).unwrap();
    let empty = Noted::new(Vec::new());
    let mut batch = store.batch();
    batch.create_from_source(0, empty.clone(), Place::Host);
    batch.create_from_source(5, Noted::new(noise(1, 5)), Place::Host);
    batch.create_from_source(LEN, Noted::new(noise(2, LEN)), Place::Host);
    let pages = store.commit(batch).unwrap().pages;
    store.commit(store.batch().replace_from_source(pages[2], 0, empty.clone())).unwrap();
    store.commit(store.batch().replace_from_source(pages[0], 7, Noted::new(noise(3, 7)))).unwrap();
    assert_eq!(image_files(&disk), []);
    assert_eq!(empty.reads(), []);
    let read = pages.iter().map(|page| store.read_to_vec(*page).unwrap());
    assert_eq!(read.collect::<Vec<_>>(), [noise(3, 7), noise(1, 5), vec![]]);
    let state = State::of(&store);
    drop(store);
    assert!(State::of(&open(&disk).unwrap()) == state);
}

/// Asserts that the commit fails in this way and changes nothing, and that the store continues to work.
fn refuses(
    why: &str,
    options: &Options,
    fill: impl Fn(&mut WriteBatch, PageId, &SimDisk),
    is_it: impl Fn(&Error) -> bool,
) {
    let disk = SimDisk::new();
    let store = open_with(&disk, options.clone()).unwrap();
    let mut batch = store.batch();
    batch.create_from_source(LEN, Noted::new(noise(1, LEN)), Place::Host);
    let page = store.commit(batch).unwrap().pages[0];
    let before = (State::of(&store), image_files(&disk), allocated(&store), store.lsn());
    let mut batch = store.batch();
    fill(&mut batch, page, &disk);
    let error = store.commit(batch).unwrap_err();
    disk.clear_faults();
    disk.set_capacity(None);
    assert!(is_it(&error), "{why}: {error}");
    let after = (State::of(&store), image_files(&disk), allocated(&store), store.lsn());
    assert!(after == before, "{why}: something is left");
    let mut batch = store.batch();
    batch.create_from_source(LEN, Noted::new(noise(2, LEN)), Place::Host);
    store.commit(batch).unwrap();
    let state = State::of(&store);
    store.close().unwrap();
    assert!(State::of(&open(&disk).unwrap()) == state, "{why}");
}

fn create(batch: &mut WriteBatch, len: u64, source: impl ByteSource + 'static) {
    batch.create_from_source(LEN, Noted::new(noise(3, LEN)), Place::Host);
    batch.create_from_source(len, Arc::new(source), Place::Host);
}

#[test]
fn failed_source_is_named_and_changes_nothing() {
    let broken = || io::Error::other("the tape broke");
    let failed_at = |at: u64, says: &'static str, remedy| {
        move |error: &Error| {
            let Error::Io { object: IoObject::Source { index: 3, offset }, .. } = error else { return false };
            *offset == at && error.to_string().contains(says) && error.remedy() == remedy
        }
    };
    // Fail in the second piece of a long page, also with compression, in a page of one piece, and in a page
    // that is logged.
    let second = failed_at(4 << 20, "the tape broke", Remedy::Permit);
    refuses("in the middle", &raw(), |b, _, _| create(b, LONG, FailsFrom(5 << 20, broken)), second);
    let is_told =
        |error: &Error| matches!(error, Error::Io { object: IoObject::Source { index: 3, .. }, .. });
    refuses("compressed", &small(), |b, _, _| create(b, LONG, FailsFrom(5 << 20, broken)), is_told);
    let at_once = failed_at(0, "the tape broke", Remedy::Permit);
    refuses("a short one", &raw(), |b, _, _| create(b, 5000, FailsFrom(5, broken)), at_once);
    refuses("in the log", &raw(), |b, _, _| create(b, 50, FailsFrom(5, broken)), at_once);
    refuses(
        "longer than its source",
        &raw(),
        |b, _, _| create(b, LONG, FailsFrom(LONG - 1, || io::ErrorKind::UnexpectedEof.into())),
        failed_at(8 << 20, "end of file", Remedy::Permit),
    );
    let short_of_memory = || io::Error::from_raw_os_error(12);
    let passes = failed_at(0, "memory", Remedy::Retry);
    refuses("a shortage", &raw(), |b, _, _| create(b, LEN, FailsFrom(0, short_of_memory)), passes);
}

#[test]
fn refused_source_batch_removes_its_images() {
    type Fill = fn(&mut WriteBatch, PageId);
    let rows: &[(&str, Fill)] = &[
        ("written before", |b, page| _ = b.write(page, 1, &[1]).replace_from_source(page, 9, some())),
        ("written after", |b, page| _ = b.replace_from_source(page, LEN, some()).write(page, 1, &[1])),
        ("filled after", |b, page| _ = b.replace_from_source(page, LEN, some()).fill(page, 0, 2, &[1])),
        ("resized after", |b, page| _ = b.replace_from_source(page, LEN, some()).resize(page, 3)),
        ("deleted after", |b, page| _ = b.replace_from_source(page, LEN, some()).delete(page)),
        ("twice", |b, page| {
            _ = b.replace_from_source(page, LEN, some()).replace_from_source(page, LEN, some());
        }),
        ("cloned", |b, page| _ = b.replace_from_source(page, LEN, some()).clone_page(page)),
        ("copied from", |b, page| _ = b.replace_from_source(page, LEN, some()).copy(page, 0..9, page, 0)),
        ("copied to another page", |b, page| {
            let other = b.create(9, Place::Host).page();
            b.replace_from_source(page, LEN, some()).copy(page, 0..9, other, 0);
        }),
        ("a new page is written", |b, _| {
            let page = b.create_from_source(LEN, some(), Place::Host).page();
            b.write(page, 1, &[1]);
        }),
        ("an empty one is written", |b, _| {
            let page = b.create_from_source(0, some(), Place::Host).page();
            b.resize(page, 9);
        }),
    ];
    for (why, fill) in rows {
        let is_it = |error: &Error| {
            matches!(error, Error::Invalid(Invalid::Operation { .. })) && error.remedy() == Remedy::ChangeCall
        };
        refuses(why, &raw(), |batch, page, _| fill(batch, page), is_it);
    }
    let unknown = |error: &Error| matches!(error, Error::UnknownPage { .. });
    type IsIt = fn(&Error) -> bool;
    let later: &[(&str, Fill, IsIt)] = &[
        ("no page", |b, _| _ = b.replace_from_source(PageId(99), LEN, some()), unknown),
        (
            "another batch's page",
            |b, _| {
                let foreign = WriteBatch::default().create(9, Place::Host).page();
                b.replace_from_source(foreign, LEN, some());
            },
            unknown,
        ),
        (
            "a page that is not there",
            |b, page| _ = b.replace_from_source(page, LEN, some()).delete(PageId(99)),
            unknown,
        ),
        (
            "longer than any page",
            |b, _| create(b, u64::MAX, Changing::default()),
            |error| matches!(error, Error::Limit { what: "page length", .. }),
        ),
        (
            "over the budget",
            |b, _| create(b, 5 << 20, Changing::default()),
            |error| matches!(error, Error::OverBudget { .. }),
        ),
        (
            "no such place",
            |b, _| _ = b.create_from_source(LEN, some(), Place::Device(64)),
            |error| matches!(error, Error::Unavailable(Unavailable::Place { .. })),
        ),
    ];
    let tight = raw().memory(MemoryOptions::new().budget(Place::Host, 4 << 20));
    for (why, fill, is_it) in later {
        refuses(why, &tight, |batch, page, _| fill(batch, page), is_it);
    }
}

fn some() -> Arc<Noted> {
    Noted::new(noise(4, LEN))
}

#[test]
fn disk_full_during_source_changes_nothing() {
    for free in (0..LONG).step_by(700_001) {
        let fill = |batch: &mut WriteBatch, _: PageId, disk: &SimDisk| {
            disk.set_capacity(Some(disk.used_bytes() + free));
            create(batch, LONG, Changing::default());
        };
        let is_it = |error: &Error| {
            matches!(error, Error::DiskFull { file: FileName::Pages(_), .. })
                && error.remedy() == Remedy::FreeSpace
        };
        refuses(
            &format!("{free} bytes free"),
            &raw().with(|options| options.log.reserve_bytes = Some(0)),
            fill,
            is_it,
        );
    }
}

/// Memory is filled from the image, so both have the same bytes even if the source changes between reads.
#[test]
fn source_changing_between_reads_yields_consistent_page() {
    for compresses in [false, true] {
        let disk = SimDisk::new();
        let store = open(&disk).unwrap();
        let source = || Arc::new(Changing { compresses, ..Changing::default() });
        let mut batch = store.batch();
        batch.create_from_source(LONG, source(), Place::Host);
        batch.create_from_source(LEN, source(), Place::Host);
        store.commit(batch).unwrap();
        check_lasts(&disk, store, small());
    }
}

/// A commit holds no lock while it reads a source, so a panic in the source leaves no lock held.
#[test]
fn source_may_use_store_and_its_panic_fails_only_the_batch() {
    /// A source that reads a page of the store, and commits to it.
    #[derive(Debug)]
    struct OfTheStore(Arc<Store>, PageId);

    impl ByteSource for OfTheStore {
        fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
            let Self(store, page) = self;
            store.commit(store.batch().set_metadata(*page, "read", offset)).map_err(io::Error::other)?;
            store.read(*page, offset, bytes).map(drop).map_err(io::Error::other)
        }
    }

    let disk = SimDisk::new();
    let store = Arc::new(open(&disk).unwrap());
    let mut batch = store.batch();
    batch.create_from(noise(1, LEN), Place::Host);
    let page = store.commit(batch).unwrap().pages[0];
    let mut batch = store.batch();
    batch.create_from_source(LEN, Arc::new(OfTheStore(store.clone(), page)), Place::Host);
    let copy = store.commit(batch).unwrap().pages[0];
    assert!(store.read_to_vec(copy).unwrap() == noise(1, LEN));

    let (state, files) = (State::of(&store), image_files(&disk));
    let mut batch = store.batch();
    batch.create_from_source(LEN, Arc::new(Panics), Place::Host);
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| store.commit(batch))).unwrap_err();
    assert!((State::of(&store), image_files(&disk)) == (state, files));
    store.commit(store.batch().replace_from_source(page, LEN, some())).unwrap();
    assert!(store.read_to_vec(page).unwrap() == noise(4, LEN));
}

/// A commit that must be prepared again does not read the source again.
#[test]
fn sources_are_read_once_across_batch_retries() {
    let disk = SimDisk::new();
    let store = open_with(&disk, raw().ack(Ack::Logged)).unwrap();
    let mut batch = store.batch();
    batch.create_from(noise(1, LEN), Place::Host);
    let page = store.commit(batch).unwrap().pages[0];
    std::thread::scope(|scope| {
        // The place of the page determines what memory a replacement needs.
        let mover = scope.spawn(|| {
            for turn in 0..60 {
                let place = if turn % 2 == 0 { Place::Pinned } else { Place::Host };
                store.commit(store.batch().move_to(page, place)).unwrap();
            }
        });
        for seed in 0.. {
            let source = Noted::new(noise(seed, LEN));
            store.commit(store.batch().replace_from_source(page, LEN, source.clone())).unwrap();
            assert_eq!(source.reads(), [(0, LEN)]);
            assert!(store.read_to_vec(page).unwrap() == noise(seed, LEN));
            if mover.is_finished() {
                break;
            }
        }
        mover.join().unwrap();
    });
    let state = State::of(&store);
    drop(store);
    assert!(State::of(&open(&disk).unwrap()) == state, "every image is there that a frame names");
}

#[test]
fn unwritable_source_image_poisons_but_unreadable_does_not() {
    let cases = [Operation::Create, Operation::Write, Operation::Sync, Operation::SyncFolder];
    for operation in cases {
        let disk = SimDisk::new();
        let store = open(&disk).unwrap();
        let state = State::of(&store);
        disk.fail(DiskFault { operation, skip: 0, times: 1, errno: EIO });
        let mut batch = store.batch();
        batch.create_from_source(LEN, some(), Place::Host);
        let error = store.commit(batch).unwrap_err();
        assert_eq!(error.remedy(), Remedy::Reopen, "{operation:?}: {error}");
        drop(store);
        disk.clear_faults();
        assert!(State::of(&open(&disk).unwrap()) == state, "{operation:?}");
    }
    let fill = |batch: &mut WriteBatch, _: PageId, disk: &SimDisk| {
        // Reads fail from both the page cache and the medium.
        for operation in [Operation::Read, Operation::ReadBypassingCache] {
            disk.fail(DiskFault { operation, skip: 0, times: usize::MAX, errno: EIO });
        }
        create(batch, LONG, Changing::default());
    };
    refuses("read back", &raw(), fill, |error| matches!(error, Error::Damaged(_) | Error::Io { .. }));
}

/// A batch that waits for the submission lock may be logged by another thread, which must keep the batch's
/// image file.
#[test]
fn source_images_are_kept_under_any_lock_holder() {
    let disk = SimDisk::new();
    let store = open_with(&disk, raw()).unwrap();
    let mut batch = store.batch();
    for seed in 1..4 {
        batch.create_from(noise(seed, 9), Place::Host);
    }
    let others = store.commit(batch).unwrap().pages;
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for other in others {
            let (store, is_done) = (&store, &is_done);
            scope.spawn(move || {
                for turn in 0_u64.. {
                    if is_done.load(Ordering::Relaxed) {
                        break;
                    }
                    store.submit(store.batch().set_metadata(other, "turn", turn)).unwrap();
                }
            });
        }
        // Each image is needed, because no later batch writes its page.
        for seed in 0..300 {
            let mut batch = store.batch();
            batch.create_from_source(4096, Noted::new(noise(seed, 4096)), Place::Host);
            store.submit(batch).unwrap();
        }
        is_done.store(true, Ordering::Relaxed);
    });
    let state = State::of(&store);
    drop(store);
    assert!(State::of(&open(&disk).unwrap()) == state, "every image is there that a frame names");
}
