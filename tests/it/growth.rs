//! Disk space of the log. The log of a new store is short, and grows only as far as its use and its options
//! require.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use remanent::device::host::HostDevice;
use remanent::disk::Disk;
use remanent::disk::dir::DirReader;
use remanent::error::{FileName, Folder};
use remanent::options::{LogIo, LogOptions, Retention, SnapshotSchedule};
use remanent::testing::sim_disk::SimDisk;
use remanent::{Ack, Error, Options, PageId, Place, Store};
use remanent_format::segment::{SegmentHeader, SegmentHeaderRaw};
use remanent_format::state::survey::Survey;

use crate::direct_io;
use crate::files::{Files, SPARES_FOR_OPENS, State, open_with, small};
use crate::with_options::With;

/// Length in bytes of the first segments.
const FIRST: u64 = 64 << 10;
/// The length of the next segment is four times that of the previous one up to this length in bytes, and
/// twice that length above it.
const STEEP: u64 = 256 << 10;

fn ways() -> [LogIo; 3] {
    [LogIo::Mapped, LogIo::Buffered, direct_io::log_io()]
}

/// Returns the files of the log, with their lengths in bytes.
fn log_files(directory: &Path) -> BTreeMap<FileName, u64> {
    let entries = std::fs::read_dir(directory.join("log")).unwrap().map(|entry| entry.unwrap());
    // A file may be renamed in the meantime.
    let file = |entry: std::fs::DirEntry| {
        let name = FileName::parse(Folder::Log, entry.file_name().to_str().unwrap()).unwrap();
        Some((name, entry.metadata().ok()?.len()))
    };
    entries.filter_map(file).collect()
}

/// Returns the lengths of the segments in bytes, in the order of their numbers.
fn segment_lens(directory: &Path) -> Vec<u64> {
    let files = log_files(directory);
    files.iter().filter(|(file, _)| matches!(file, FileName::Segment(_))).map(|(_, len)| *len).collect()
}

fn bytes_on_disk(directory: &Path) -> u64 {
    let of = |entry: std::fs::DirEntry| {
        let metadata = entry.metadata().unwrap();
        if metadata.is_dir() { bytes_on_disk(&entry.path()) } else { metadata.len() }
    };
    std::fs::read_dir(directory).unwrap().map(|entry| of(entry.unwrap())).sum()
}

/// Returns the default options, except that only the tests take snapshots.
fn options(log_io: LogIo) -> Options {
    Options::new().log(LogOptions::new().io(log_io)).snapshots(SnapshotSchedule::never())
}

fn create(store: &Store, len: u64) -> PageId {
    let mut batch = store.batch();
    batch.create(len, Place::Host);
    store.commit(batch).unwrap().pages[0]
}

fn write(store: &Store, page: PageId, len: usize, seed: u64) {
    let mut batch = store.batch();
    batch.write(page, 0, &vec![seed as u8; len]);
    store.commit(batch).unwrap();
}

/// Waits for files that the store's threads create, with a timeout.
fn wait_until(what: &str, is_made: impl Fn() -> bool) {
    let began = std::time::Instant::now();
    while !is_made() {
        assert!(began.elapsed().as_secs() < 60, "{what} is never made");
        std::thread::yield_now();
    }
}

/// Waits until all files that an open prepares in the background exist.
fn settle(store: &Store, directory: &Path) {
    let is_made = || {
        let files = log_files(directory);
        let spares = files.keys().filter(|file| matches!(file, FileName::Spare(_))).count();
        let is_temporary = |file: &FileName| matches!(file, FileName::Temporary(..));
        files.len() - spares >= 3 && spares >= 2 + SPARES_FOR_OPENS && !files.keys().any(is_temporary)
    };
    wait_until("what an open makes ahead", is_made);
    store.wait_durable(store.lsn()).unwrap();
}

#[test]
fn empty_store_stays_small_across_opens() {
    for log_io in ways() {
        let directory = tempfile::tempdir().unwrap();
        let (mut settled, mut files_settled) = (0, 0);
        for open in 0..100 {
            let store = options(log_io).open(directory.path()).unwrap();
            settle(&store, directory.path());
            store.close().unwrap();
            let bytes = bytes_on_disk(directory.path());
            assert!(bytes <= 256 << 10, "{log_io}, open {open}: {bytes} bytes");
            let files = log_files(directory.path()).len();
            if open < 5 {
                (settled, files_settled) = (settled.max(bytes), files_settled.max(files));
            }
            assert!(bytes <= settled, "{log_io}, open {open}: {settled} bytes became {bytes}");
            assert!(files <= files_settled, "{log_io}, open {open}: {files_settled} files became {files}");
        }
    }
}

/// A store is reopened many times, with little or no work each time.
#[test]
fn thousand_opens_leave_disk_unchanged() {
    const OPENS: usize = 1000;
    let disk = SimDisk::new();
    let options = || small().with(|options| options.log.reserve_bytes = Some(64 << 10));
    let store = open_with(&disk, options()).unwrap();
    let page = create(&store, 5000);
    write(&store, page, 5000, 1);
    store.snapshot().unwrap();
    write(&store, page, 5000, 2);
    let state = State::of(&store);
    store.close().unwrap();
    let mut most = (0, 0);
    for open in 0..OPENS {
        let store = open_with(&disk, options()).unwrap();
        wait_until("the reserve", || has_reserve(&disk));
        if open % 100 == 0 {
            assert!(State::of(&store) == state, "open {open}");
        }
        store.close().unwrap();
        let files = Files::of(&disk);
        let found = (files.0.len(), files.bytes_len());
        if open < 5 {
            most = (most.0.max(found.0), most.1.max(found.1));
        }
        assert!(found.0 <= most.0 && found.1 <= most.1, "open {open}: {most:?} became {found:?}");
    }
}

#[test]
fn segments_grow_with_the_log() {
    for log_io in ways() {
        let directory = tempfile::tempdir().unwrap();
        let usual = 4 << 20;
        let store =
            options(log_io).with(|options| options.log.segment_len = usual).open(directory.path()).unwrap();
        let page = create(&store, 100_000);
        for seed in 0..2604 {
            write(&store, page, 10_000, seed);
        }
        let state = State::of(&store);
        // List the segments before the close, which shortens the last ones.
        let lens = segment_lens(directory.path());
        store.close().unwrap();
        assert_eq!(lens[..4], [FIRST; 4], "{lens:?}");
        for pair in lens[3..].windows(2) {
            let growth = if pair[0] < STEEP { 4 } else { 2 };
            assert_eq!(pair[1], usual.min(growth * pair[0]), "{lens:?}");
        }
        assert!(lens.iter().filter(|len| **len == usual).count() >= 3, "{lens:?}");

        // Existing segments of any length are followed by those of the next incarnation, which grow to the
        // length in its options.
        for segment_len in [64 << 10, 1 << 20] {
            let store = options(log_io)
                .with(|options| options.log.segment_len = segment_len)
                .open(directory.path())
                .unwrap();
            assert_eq!(State::of(&store).contents, state.contents);
            write(&store, page, 10, 0);
            write(&store, page, 10, 43);
            assert_eq!(State::of(&store).contents, state.contents);
            store.close().unwrap();
        }
        let store =
            options(log_io).with(|options| options.log.segment_len = usual).open(directory.path()).unwrap();
        assert_eq!(State::of(&store).contents, state.contents);
        store.snapshot().unwrap();
        write(&store, page, 10, 1);
        store.snapshot().unwrap();
        assert_eq!(State::of(&store).contents[&page][..10], [1; 10]);
    }
}

/// A frame that is longer than any segment of a new store can also be logged, and later segments are long.
#[test]
fn frame_longer_than_first_segments_is_logged() {
    for log_io in ways() {
        for len in [FIRST as usize - 4096, FIRST as usize, 3 << 20, 20 << 20] {
            let directory = tempfile::tempdir().unwrap();
            let store = options(log_io).open(directory.path()).unwrap();
            // The page is longer than the write, because a whole-page write would be stored in an image file.
            let page = create(&store, len as u64 + 4096);
            (0..4).for_each(|round| write(&store, page, len, round));
            let state = State::of(&store);
            store.close().unwrap();
            let store = options(log_io).open(directory.path()).unwrap();
            assert_eq!(State::of(&store), state, "{log_io}, {len} bytes");
        }
    }
}

/// A segment that is created for one frame is written directly with the payload of that frame, without
/// writing zeros first. Frames of a direct log stay in memory until the next sync writes them.
#[test]
fn frame_in_own_segment_is_written_once() {
    const LEN: usize = 1 << 20;
    for (log_io, times) in [(LogIo::Mapped, 1), (LogIo::Buffered, 1), (LogIo::Direct, 2)] {
        let disk = SimDisk::new();
        let store = open_with(&disk, small().with(|options| options.log.io = Some(log_io))).unwrap();
        let page = create(&store, LEN as u64 + 4096);
        for round in 0..3 {
            let before = disk.events();
            write(&store, page, LEN, round);
            let mut written: BTreeMap<String, usize> = BTreeMap::new();
            for event in &disk.history()[before..] {
                if let Some((file, len)) = written_bytes(event) {
                    *written.entry(file.to_owned()).or_default() += len;
                }
            }
            // If a seal is logged first, the frame gets another segment, so all files are counted. In a direct log, only
            // zeros were written to the first one.
            let long: Vec<usize> = written.values().copied().filter(|bytes| *bytes >= LEN).collect();
            let has = |bytes: &usize, times: usize| (times * LEN..times * LEN + LEN / 4).contains(bytes);
            let is_written_once = (1..=2).contains(&long.len())
                && long.iter().any(|bytes| has(bytes, times))
                && long.iter().all(|bytes| has(bytes, times) || has(bytes, 1));
            assert!(is_written_once, "{log_io}: {written:?}");
        }
        let state = State::of(&store);
        drop(store);
        assert_eq!(
            State::of(&open_with(&disk, small().with(|options| options.log.io = Some(log_io))).unwrap()),
            state,
            "{log_io}"
        );
    }
}

/// Returns the file that an event writes to, and the number of written bytes.
fn written_bytes(event: &str) -> Option<(&str, usize)> {
    let written = ["write ", "put "].iter().find_map(|kind| event.strip_prefix(kind))?;
    let (file, _) = written.split_once(' ').expect("a file and a range");
    let (_, len) = written.rsplit_once('+').expect("offset and length");
    Some((file, len.parse().expect("a length")))
}

/// Each process commits a little and closes the store. After several such processes, the log triggers a
/// snapshot, which removes their segments.
#[test]
fn restarts_that_commit_a_little_are_bounded() {
    for log_io in ways() {
        let directory = tempfile::tempdir().unwrap();
        let mut page = None;
        let (mut bytes, mut openings) = (0, 0);
        for run in 0..200 {
            let store = Options::new().log(LogOptions::new().io(log_io)).open(directory.path()).unwrap();
            let page = *page.get_or_insert_with(|| create(&store, 4096));
            write(&store, page, 1024, run);
            store.close().unwrap();
            bytes = bytes.max(bytes_on_disk(directory.path()));
            let survey = Survey::read(&DirReader::new(directory.path())).unwrap();
            openings = openings.max(survey.log.line().len());
        }
        // After the older of two snapshots, there are at most two times sixteen incarnations, with one
        // segment each.
        assert!(openings <= 2 * 17 + 1, "{log_io}: {openings} openings");
        assert!(bytes <= (2 * 17 + 12) * FIRST, "{log_io}: {bytes} bytes");
        let store = Store::open(directory.path()).unwrap();
        let mut content = [0; 1024];
        store.read(page.unwrap(), 0, &mut content).unwrap();
        assert_eq!(content, [199; 1024], "{log_io}");
    }
}

#[test]
fn spares_beyond_reserve_use_allowed_space() {
    for (spare_bytes, allowed) in [(0, 0), (3 << 20, 3 << 20), (1 << 30, 1 << 30)] {
        let disk = SimDisk::new();
        let options = options(LogIo::Mapped).retention(Retention::new().snapshots_kept(1)).with(|options| {
            options.log.segment_len = 1 << 20;
            options.log.spare_bytes = Some(spare_bytes);
        });
        let store = Store::open_on(Arc::new(disk.clone()), Arc::new(HostDevice::new()), options).unwrap();
        let page = create(&store, 100_000);
        (0..150).for_each(|seed| write(&store, page, 100_000, seed));
        store.snapshot().unwrap();
        // Take the files that a killed process leaves, because a close would remove most spares.
        let files = Files::of(&disk);
        drop(store);
        let disk = files.disk();
        let spares = files.0.iter().filter(|(file, _)| matches!(file, FileName::Spare(_)));
        let bytes: u64 = spares.map(|(_, content)| content.len() as u64).sum();
        // The spares for opens may be recycled first segments of the log.
        let reserve = (2 << 20) + SPARES_FOR_OPENS as u64 * STEEP;
        assert!(bytes <= reserve + allowed, "{spare_bytes}: {bytes} bytes");
        // The snapshot made more than 10 MiB of log obsolete.
        assert!(spare_bytes < 1 << 30 || bytes > 8 << 20, "{bytes} bytes");
        // The options of a later open may permit fewer spare bytes.
        for (spare_bytes, allowed) in [(2 << 20, 2 << 20), (0, 0)] {
            let options = small().with(|options| {
                options.log.segment_len = 1 << 20;
                options.log.spare_bytes = Some(spare_bytes);
            });
            let store = Store::open_on(Arc::new(disk.clone()), Arc::new(HostDevice::new()), options).unwrap();
            let files = Files::of(&disk);
            drop(store);
            let spares = files.0.iter().filter(|(file, _)| matches!(file, FileName::Spare(_)));
            let bytes: u64 = spares.map(|(_, content)| content.len() as u64).sum();
            assert!(bytes <= reserve + allowed, "then {spare_bytes}: {bytes} bytes");
        }
    }
}

/// A batch with deletes whose frame is longer than the shortest spare uses a longer spare of the reserve.
#[test]
fn long_delete_batch_uses_a_long_reserve_segment() {
    let disk = SimDisk::new();
    let open = || {
        let options = options(LogIo::Mapped).with(|options| options.log.segment_len = 4 << 20);
        Store::open_on(Arc::new(disk.clone()), Arc::new(HostDevice::new()), options).unwrap()
    };
    // The segments that one open prepares are short spares for the next one.
    open().close().unwrap();
    let store = open();
    let mut batch = store.batch();
    let pages: Vec<_> = (0..40_000).map(|_| batch.create(0, Place::Host).page()).collect();
    let committed = store.commit(batch).unwrap();
    let pages: Vec<PageId> = pages.iter().map(|page| committed.pages[page.index()]).collect();
    (0..200).for_each(|_| _ = store.commit(noted(&store, 60_000)).unwrap());
    wait_until("the reserve", || has_reserve(&disk));
    disk.set_capacity(Some(disk.used_bytes()));
    for half in pages.chunks(20_000) {
        // Fill the current segment until no ordinary batch fits into it.
        for len in [60_000, 1000] {
            while store.commit(noted(&store, len)).is_ok() {}
        }
        let mut batch = store.batch();
        half.iter().for_each(|page| _ = batch.delete(*page));
        store.commit(batch).unwrap();
    }
    assert_eq!(store.pages().unwrap().len(), 0);
    let state = State::of(&store);
    store.close().unwrap();
    disk.set_capacity(None);
    assert_eq!(State::of(&open()), state);
}

fn noted(store: &Store, len: usize) -> remanent::WriteBatch {
    let mut batch = store.batch();
    batch.note("n".repeat(len));
    batch
}

/// An open that finds no space for its second segment keeps the first one as a spare, however often it is
/// retried.
#[test]
fn open_failing_without_space_keeps_spares() {
    let disk = SimDisk::new();
    let open = || {
        let options = options(LogIo::Mapped).with(|options| {
            options.log.segment_len = 16 << 10;
            options.log.reserve_bytes = Some(16 << 10);
            options.log.spare_bytes = Some(0);
        });
        Store::open_on(Arc::new(disk.clone()), Arc::new(HostDevice::new()), options)
    };
    let store = open().unwrap();
    let page = create(&store, 4096);
    write(&store, page, 4096, 7);
    let state = State::of(&store);
    let spares = || {
        let files = Files::of(&disk);
        files.0.keys().filter(|file| matches!(file, FileName::Spare(_))).count()
    };
    wait_until("the reserve", || spares() == 1 + SPARES_FOR_OPENS);
    store.close().unwrap();
    let files = Files::of(&disk).0;
    let held = files.keys().filter(|file| matches!(file, FileName::Spare(_)));
    held.skip(1).for_each(|spare| disk.remove(*spare).unwrap());
    assert_eq!(spares(), 1, "the spares were tidied up");
    disk.set_capacity(Some(disk.used_bytes()));
    for attempt in 0..5 {
        let error = open().unwrap_err();
        assert!(matches!(error, Error::DiskFull { file: FileName::Segment(_), .. }), "{attempt}: {error}");
        assert_eq!(spares(), 1, "attempt {attempt}");
    }
    disk.set_capacity(None);
    assert_eq!(State::of(&open().unwrap()), state);
}

/// Returns true if two spares have the length that the log's segments require, the reserve is complete, and
/// no file is being created.
fn has_reserve(disk: &SimDisk) -> bool {
    let files = Files::of(disk).0;
    let of = |wanted: fn(&FileName) -> bool| {
        files.iter().filter(move |(file, _)| wanted(file)).map(|(_, bytes)| bytes.len())
    };
    let longest = of(|file| matches!(file, FileName::Segment(_))).max().unwrap();
    let is_made = of(|file| matches!(file, FileName::Temporary(..))).count() == 0;
    let spares: Vec<usize> = of(|file| matches!(file, FileName::Spare(_))).collect();
    is_made
        && spares.len() >= 2 + SPARES_FOR_OPENS
        // The reserve of a new store has shorter segments.
        && (longest <= FIRST as usize || spares.iter().filter(|len| **len >= longest / 2).count() >= 2)
}

/// A store fills the disk, its pages are deleted as the error advises, and it is closed and opened. Each step
/// works for stores of any age.
#[test]
fn a_store_that_filled_the_disk_opens_after_each_step() {
    for batches in [0, 3, 10, 30, 100, 300] {
        let disk = SimDisk::new();
        let options =
            || options(LogIo::Mapped).ack(Ack::Logged).with(|options| options.log.segment_len = 2 << 20);
        let open = || Store::open_on(Arc::new(disk.clone()), Arc::new(HostDevice::new()), options());
        let store = open().unwrap();
        let pages = [create(&store, 50_000), create(&store, 50_000)];
        (0..batches).for_each(|seed| write(&store, pages[0], 50_000, seed));
        wait_until("the reserve", || has_reserve(&disk));
        disk.set_capacity(Some(disk.used_bytes() + 4096));
        let full = loop {
            let mut batch = store.batch();
            batch.write(pages[0], 0, &[1; 50_000]);
            if let Err(error) = store.commit(batch) {
                break error;
            }
        };
        assert!(matches!(full, Error::DiskFull { .. }), "{batches}: {full}");
        let mut state = State::of(&store);
        let mut store = Some(store);
        for page in [None, Some(pages[1]), Some(pages[0])] {
            // Test the store as left by a kill and by a power cut.
            if let Some(page) = page {
                let store = store.as_ref().unwrap();
                let mut batch = store.batch();
                batch.delete(page);
                store.commit(batch).unwrap_or_else(|error| panic!("{batches}, {page}: {error}"));
                state = State::of(store);
            }
            store.take().unwrap().close().unwrap();
            let opened = open().unwrap_or_else(|error| panic!("{batches}, {page:?}: {error}"));
            assert_eq!(State::of(&opened), state, "{batches}, {page:?}");
            store = Some(opened);
        }
    }
}

/// The length in the header of the first segment of an open is the length of its file.
#[test]
fn segment_header_states_length() {
    let disk = SimDisk::new();
    let options = options(LogIo::Mapped);
    let store = Store::open_on(Arc::new(disk.clone()), Arc::new(HostDevice::new()), options).unwrap();
    let page = create(&store, 100_000);
    (0..60).for_each(|seed| write(&store, page, 100_000, seed));
    store.close().unwrap();
    let files = Files::of(&disk);
    for (file, bytes) in &files.0 {
        if let FileName::Segment(_) = file {
            let header = SegmentHeader::decode(bytes[..SegmentHeaderRaw::LEN].try_into().unwrap()).unwrap();
            assert_eq!(header.segment_len, bytes.len() as u64, "{file}");
        }
    }
}
