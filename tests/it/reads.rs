//! Lookups and reads during commits: which version they return, and that they wait only for the batches that
//! they need.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use remanent::device::host::HostDevice;
use remanent::device::{Abilities, CommandList, Device, Lane, MemoryId, Pending};
use remanent::options::{LogIo, LogOptions, ScrubSchedule, SnapshotSchedule};
use remanent::testing::sim_disk::SimDisk;
use remanent::{Ack, Error, Key, Lsn, Options, PageId, PageInfo, Place, Result, StatePoint, Store, Value};

use crate::faults::watched;
use crate::with_options::With;

const LEN: u64 = 200 << 10;

/// A host device that executes no list of the lane for deltas while it is blocked.
struct Shut {
    inner: HostDevice,
    is_shut: Mutex<bool>,
    opened: Condvar,
}

impl Shut {
    fn new() -> Arc<Self> {
        Arc::new(Self { inner: HostDevice::new(), is_shut: Mutex::new(false), opened: Condvar::new() })
    }

    fn shut(&self, is_shut: bool) {
        *self.is_shut.lock().unwrap() = is_shut;
        self.opened.notify_all();
    }
}

impl Device for Shut {
    forward!(inner: label allocate release staging reached wait after);

    fn submit(&self, lane: Lane, list: CommandList) -> Result<Pending> {
        if lane == Lane::Apply && !list.commands.is_empty() {
            let is_shut = self.is_shut.lock().unwrap();
            drop(self.opened.wait_while(is_shut, |is_shut| *is_shut).unwrap());
        }
        self.inner.submit(lane, list)
    }

    fn read_places(&self, read: &mut dyn FnMut(&dyn Fn(MemoryId) -> Place)) {
        self.inner.read_places(read);
    }

    fn abilities(&self) -> Abilities<'_> {
        let Abilities { bytes, direct_reads, .. } = self.inner.abilities();
        Abilities { bytes, direct_reads, ..Abilities::default() }
    }
}

fn options() -> Options {
    let options =
        Options::new().log(LogOptions::new().segment_len(1 << 20).io(LogIo::Mapped)).ack(Ack::Logged);
    options.snapshots(SnapshotSchedule::never()).scrubs(ScrubSchedule::new().interval(None))
}

fn open_on(device: Arc<dyn Device>, options: Options) -> Store {
    Store::open_on(Arc::new(SimDisk::new()), device, options).unwrap()
}

fn open() -> Store {
    open_on(Arc::new(HostDevice::new()), options())
}

fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}

/// Creates pages of `LEN` bytes. The first one has a key.
fn create(store: &Store, count: usize) -> Vec<PageId> {
    let mut batch = store.batch();
    for number in 0..count {
        batch.create(LEN, Place::Host).optional_key((number == 0).then(|| key("first")));
    }
    let created = store.submit(batch).unwrap();
    created.wait(Ack::Applied).unwrap();
    created.pages().to_vec()
}

fn count_of(root: &remanent::Metadata) -> u64 {
    match root.get("count") {
        Some(Value::U64(count)) => *count,
        other => panic!("{other:?}"),
    }
}

#[test]
fn lookups_and_reads_of_other_pages_do_not_wait_for_the_applier() {
    watched("a device that stands still", || {
        let device = Shut::new();
        let store = open_on(device.clone(), options());
        let pages = create(&store, 2);
        let mut batch = store.batch();
        batch.fill(pages[1], 0, LEN, &[7]);
        store.submit(batch).unwrap().wait(Ack::Applied).unwrap();

        device.shut(true);
        let mut batch = store.batch();
        batch.fill(pages[0], 0, LEN, &[9]).set_root("count", 1u64);
        batch.create(5, Place::Host).key(key("new"));
        let ticket = store.submit(batch).unwrap();
        ticket.wait(Ack::Logged).unwrap();
        // A caller that was notified that the batch is logged reads the batch.
        let lsn = ticket.position().lsn;
        assert_eq!((store.lsn(), store.page(pages[0]).unwrap().lsn), (lsn, lsn));
        let new = store.page_by_key(key("new")).unwrap();
        assert_eq!((new.page, new.len), (ticket.pages()[0], 5));
        assert!(store.contains(new.page).unwrap() && store.contains_key(key("first")).unwrap());
        assert!(!store.contains(PageId(99)).unwrap() && !store.contains_key(key("other")).unwrap());
        assert_eq!((count_of(&store.root().unwrap()), store.page_count().unwrap()), (1, 3));
        assert_eq!(store.pages().unwrap().map(|info| info.len).collect::<Vec<_>>(), [LEN, LEN, 5]);
        // Read a page that no running batch changes.
        assert_eq!(store.read_to_vec(pages[1]).unwrap(), vec![7; LEN as usize]);
        let view = store.view().unwrap();
        view.read(pages[1], 1, &mut [0; 9]).unwrap();
        drop(view);

        thread::scope(|scope| {
            // A read of a page that the batch changes waits for the batch.
            let read = scope.spawn(|| store.read_to_vec(pages[0]).unwrap());
            device.shut(false);
            assert_eq!(read.join().unwrap(), vec![9; LEN as usize]);
        });
        store.close().unwrap();
    });
}

#[test]
fn logged_batch_is_visible_after_call_returns() {
    for log_io in [LogIo::Mapped, LogIo::Buffered, LogIo::Direct] {
        let store =
            open_on(Arc::new(HostDevice::new()), options().with(|options| options.log.io = Some(log_io)));
        let pages = create(&store, 3);
        for count in 1..=30_u64 {
            let mut batch = store.batch();
            batch.fill(pages[1], 0, LEN, &count.to_le_bytes()).set_root("count", count);
            let ticket = store.submit(batch).unwrap();
            ticket.wait([Ack::Logged, Ack::Durable, Ack::Applied][count as usize % 3]).unwrap();
            let lsn = ticket.position().lsn;
            assert!(store.lsn() >= lsn);
            assert_eq!(count_of(&store.root().unwrap()), count);
            assert_eq!(store.page(pages[1]).unwrap().lsn, lsn);
            let mut bytes = [0; 8];
            assert!(store.read(pages[1], LEN - 8, &mut bytes).unwrap() >= lsn);
            assert_eq!(u64::from_le_bytes(bytes), count);
        }
        store.close().unwrap();
    }
}

/// Runs a writer that counts in two pages, in a page that it replaces under one key, and in the root. Calls
/// `each` concurrently.
fn write_during(store: &Store, pages: &[PageId], count: u64, each: impl Fn() + Sync) {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            while !is_over.load(Ordering::Acquire) {
                each();
            }
            each();
        });
        let mut last = store.page_by_key(key("first")).unwrap().page;
        for count in 1..=count {
            let mut batch = store.batch();
            batch.set_root("count", count).delete(last);
            let len = 8 * (1 + count % 40_000);
            let new = batch.create(len, Place::Host).key(key("first")).page();
            batch.fill(new, 0, len, &count.to_le_bytes());
            batch.resize(pages[1], len).fill(pages[1], 0, len, &count.to_le_bytes());
            batch.fill(pages[2], 0, LEN, &count.to_le_bytes());
            last = store.commit(batch).unwrap().pages[0];
            if reader.is_finished() {
                break;
            }
        }
        is_over.store(true, Ordering::Release);
        reader.join().unwrap();
    });
}

/// Returns the count that all of these bytes repeat.
fn counted(bytes: &[u8]) -> u64 {
    let first = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes"));
    for at in bytes.chunks(8) {
        assert_eq!(at, first.to_le_bytes(), "bytes of one page are of two batches");
    }
    first
}

#[test]
fn bytes_and_page_info_are_from_one_batch() {
    let store = open();
    let pages = create(&store, 3);
    let (last, tries) = (Mutex::new((0, Vec::new())), AtomicU64::new(0));
    write_during(&store, &pages, 300, || {
        let (last, buffer) = &mut *last.lock().unwrap();
        // Read by key. The key always exists, because a batch that deletes its page assigns it to another
        // page.
        let mut start = [0; 8];
        let info = store.read_key(key("first"), 0, &mut start).unwrap();
        let count = counted(&start);
        assert!(count >= *last, "what was seen once stays");
        assert!(count == 0 || info.len == 8 * (1 + count % 40_000));
        *last = count;
        // Read the whole page, whatever its length.
        let info = store.read_into(pages[1], buffer).unwrap();
        let count = counted(buffer);
        assert_eq!(info.len, buffer.len() as u64);
        assert!(count == 0 || (info.len == 8 * (1 + count % 40_000) && info.epoch.0 > count));
        *last = count.max(*last);
        // Read the page in many pieces.
        let count = counted(&store.read_to_vec(pages[2]).unwrap());
        assert!(count >= *last);
        *last = count;
        tries.fetch_add(1, Ordering::Relaxed);
    });
    assert!(tries.into_inner() > 1);
    store.close().unwrap();
}

#[test]
fn view_is_one_batch_while_commits_continue() {
    let store = open();
    let pages = create(&store, 3);
    let mut batch = store.batch();
    batch.set_root("count", 0u64).resize(pages[1], 8).fill(pages[1], 0, 8, &[0]);
    store.commit(batch).unwrap();
    write_during(&store, &pages, 300, || {
        let view = store.view().unwrap();
        let count = count_of(&view.root());
        let held = view.page_by_key(key("first")).unwrap();
        assert_eq!(view.lsn(), Lsn(2 + count));
        let lens = [held.len, view.page(pages[1]).unwrap().len];
        assert_eq!(lens, if count == 0 { [LEN, 8] } else { [8 * (1 + count % 40_000); 2] });
        assert!(view.pages().all(|info| info.lsn <= view.lsn()));
        assert_eq!((view.pages().len(), view.pages().count(), view.page_count()), (3, 3, 3));
        assert!(view.contains(held.page));
        let mut bytes = vec![0; LEN as usize];
        match view.read(pages[2], 0, &mut bytes) {
            Ok(()) => assert_eq!(counted(&bytes), count),
            Err(error) => {
                assert!(matches!(error, Error::Overtaken { lsn, .. } if lsn <= view.lsn()), "{error}");
                assert!(store.lsn() > view.lsn());
            }
        }
    });
    let view = store.view().unwrap();
    let mut bytes = vec![0; LEN as usize];
    view.read(pages[2], 0, &mut bytes).unwrap();
    assert_eq!(counted(&bytes), count_of(&view.root()));
    assert!(matches!(view.read(pages[2], LEN, &mut [0]), Err(Error::OutOfBounds { .. })));
    assert!(matches!(view.read(PageId(999), 0, &mut [0]), Err(Error::UnknownPage { .. })));
}

#[test]
fn page_listing_is_point_in_time() {
    let store = open();
    let mut batch = store.batch();
    for len in 1..=1000 {
        batch.create(len, Place::Host);
    }
    let pages = store.commit(batch).unwrap().pages;
    let expected: Vec<PageInfo> = pages.iter().map(|page| store.page(*page).unwrap()).collect();
    let mut listed = store.pages().unwrap();
    let mut seen: Vec<PageInfo> = listed.by_ref().take(300).collect();
    assert_eq!(listed.len(), 700);
    // Create pages with keys before and after those that are already listed.
    let mut batch = store.batch();
    for page in pages.iter().step_by(2) {
        batch.delete(*page);
    }
    batch.resize(pages[501], 7).create(9, Place::Host);
    store.commit(batch).unwrap();
    seen.extend(listed);
    assert_eq!(seen, expected);
    assert_eq!((store.page_count().unwrap(), store.pages().unwrap().count()), (501, 501));
    assert_eq!(store.read_to_vec(pages[501]).unwrap(), [0; 7]);
    assert!(matches!(store.read_to_vec(pages[500]), Err(Error::UnknownPage { .. })));
}

#[test]
fn a_restored_store_shows_the_old_state_to_every_lookup() {
    let store = open();
    let pages = create(&store, 3);
    let mut batch = store.batch();
    batch.fill(pages[0], 0, LEN, &[1]).fill(pages[2], 0, LEN, &[3]).set_root("count", 1u64);
    let then = store.commit(batch).unwrap().position.lsn;
    let before: Vec<PageInfo> = store.pages().unwrap().collect();
    let mut batch = store.batch();
    batch.fill(pages[1], 0, LEN, &[2]).delete(pages[0]).set_root("count", 2u64);
    batch.create(1, Place::Host).key(key("first"));
    let new = store.commit(batch).unwrap().pages[0];
    let view = store.view().unwrap();
    store.restore(StatePoint::Lsn(then)).unwrap();
    // The view keeps the state before the restore.
    assert_eq!((view.page_by_key(key("first")).unwrap().page, count_of(&view.root())), (new, 2));
    drop(view);
    assert_eq!(store.page_by_key(key("first")).unwrap().page, pages[0]);
    assert!(matches!(store.page(new), Err(Error::UnknownPage { .. })));
    assert_eq!(count_of(&store.root().unwrap()), 1);
    let after: Vec<PageInfo> = store.pages().unwrap().collect();
    let known = |infos: &[PageInfo]| infos.iter().map(|info| (info.page, info.len)).collect::<Vec<_>>();
    assert_eq!(known(&after), known(&before));
    for (page, byte) in pages.iter().zip([1, 0, 3]) {
        assert_eq!(store.read_to_vec(*page).unwrap(), vec![byte; LEN as usize]);
    }
    store.close().unwrap();
}
