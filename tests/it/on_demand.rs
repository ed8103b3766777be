//! Stores that are in use before all their pages are loaded. An access to a page waits until the page is
//! complete, and damage to a page is reported for that page alone.
//!
//! The device blocks the thread that loads pages until the test opens a gate.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex};

use remanent::batch::{InitialCopy, Shadow, Width};
use remanent::device::host::HostDevice;
use remanent::device::{Command, CommandList, Device, Lane, MemoryId, Pending};
use remanent::error::{FileName, Remedy};
use remanent::options::{
    Compression, ImageOptions, LogOptions, MemoryOptions, PageLoad, ScrubSchedule, SnapshotSchedule,
};
use remanent::store::UnloadedPages;
use remanent::testing::late_device::LateDevice;
use remanent::testing::sim_disk::{Moment, Operation, SimDisk};
use remanent::{Error, Lsn, Options, PageId, Place, Result, SnapshotId, StatePoint, Store};
use remanent_format::state::survey::Survey;

use crate::files::{Files, State};
use crate::interrupted_reads::InterruptedDisk;

/// Number of pages. The image of each page is in a separate file, so no two are loaded together.
const PAGES: u64 = 12;
const LEN: u64 = 5000;
/// The only page that a batch after the newest snapshot changes.
const CHANGED: PageId = PageId(4);
/// The page that is loaded last, unless a caller requests it.
const LAST: PageId = PageId(PAGES);

/// A device that loads no page until the test opens the gate.
struct Gate {
    inner: Arc<dyn Device>,
    is_open: Mutex<bool>,
    opened: Condvar,
    live: Mutex<i64>,
}

impl Gate {
    fn new(inner: Arc<dyn Device>) -> Arc<Self> {
        Arc::new(Self { inner, is_open: Mutex::new(false), opened: Condvar::new(), live: Mutex::new(0) })
    }

    fn closed() -> Arc<Self> {
        Self::new(Arc::new(HostDevice::new()))
    }

    fn open(&self) {
        *self.is_open.lock().unwrap() = true;
        self.opened.notify_all();
    }
}

/// Opens a gate when dropped, because dropping a store waits for the thread that loads its pages.
struct OpenAtLast(Arc<Gate>);

impl Drop for OpenAtLast {
    fn drop(&mut self) {
        self.0.open();
    }
}

impl Device for Gate {
    forward!(inner: label staging reached wait after places_and_abilities);

    fn allocate(&self, place: Place, len: u64) -> Result<MemoryId> {
        *self.live.lock().unwrap() += 1;
        self.inner.allocate(place, len)
    }

    fn release(&self, memory: MemoryId) -> Result<()> {
        *self.live.lock().unwrap() -= 1;
        self.inner.release(memory)
    }

    fn submit(&self, lane: Lane, list: CommandList) -> Result<Pending> {
        let is_load = matches!(lane, Lane::Drain | Lane::Load)
            && list.commands.iter().any(|command| matches!(command, Command::Upload { .. }));
        if is_load {
            let _is_open = self.opened.wait_while(self.is_open.lock().unwrap(), |is_open| !*is_open).unwrap();
        }
        self.inner.submit(lane, list)
    }
}

fn options(restore: PageLoad) -> Options {
    let options = Options::new()
        .log(LogOptions::new().segment_len(64 << 10))
        .memory(MemoryOptions::new().load(restore));
    options.snapshots(SnapshotSchedule::never()).scrubs(ScrubSchedule::new().interval(None))
}

fn open_on(disk: &SimDisk, device: Arc<dyn Device>, restore: PageLoad) -> Result<Store> {
    Store::open_on(Arc::new(disk.clone()), device, options(restore))
}

fn open(disk: &SimDisk, restore: PageLoad) -> Result<Store> {
    open_on(disk, Arc::new(HostDevice::new()), restore)
}

fn content(page: PageId) -> Vec<u8> {
    let byte = |at: u64| (page.0 * 31 + at * at % 251) as u8;
    (0..LEN).map(byte).collect()
}

fn write(store: &Store, page: PageId, offset: u64, bytes: &[u8]) -> Lsn {
    let mut batch = store.batch();
    batch.write(page, offset, bytes);
    store.commit(batch).unwrap().position.lsn
}

fn read(store: &Store, page: PageId) -> Result<Vec<u8>> {
    let mut bytes = vec![0xee; LEN as usize];
    store.read(page, 0, &mut bytes).map(|_| bytes)
}

/// Returns a closed store in which each page has a snapshot image in a separate file, and one page has
/// changed since.
fn closed() -> SimDisk {
    let disk = SimDisk::new();
    let store = open(&disk, PageLoad::Eager).unwrap();
    for page in (1..=PAGES).map(PageId) {
        let mut batch = store.batch();
        let new = batch.create(LEN, Place::Host).page();
        batch.write(new, 0, &content(page));
        assert_eq!(store.commit(batch).unwrap().pages, [page]);
        store.snapshot().unwrap();
    }
    write(&store, CHANGED, 7, b"changed");
    store.close().unwrap();
    disk
}

/// Returns the bytes of the pages of [`closed`].
fn contents() -> BTreeMap<PageId, Vec<u8>> {
    let mut contents: BTreeMap<_, _> = (1..=PAGES).map(PageId).map(|page| (page, content(page))).collect();
    contents.get_mut(&CHANGED).unwrap()[7..14].copy_from_slice(b"changed");
    contents
}

fn check(store: &Store) {
    for (page, expected) in contents() {
        assert!(read(store, page).unwrap() == expected, "page {page}");
    }
}

/// Returns the file and the offset of a page's image in the newest snapshot.
fn image_of(disk: &SimDisk, page: PageId) -> (FileName, u64) {
    let survey = Survey::read(disk).unwrap();
    let newest = survey.snapshot(*survey.links.keys().next_back().unwrap()).unwrap();
    let image = newest.entries.iter().find(|entry| entry.page == page).unwrap().image.unwrap();
    (FileName::Pages(image.file), image.offset)
}

#[test]
fn store_is_usable_before_pages_are_loaded() {
    let disk = closed();
    let device = Gate::closed();
    let store = open_on(&disk, device.clone(), PageLoad::OnDemand).unwrap();
    let _at_last = OpenAtLast(device.clone());
    let unloaded = store.unloaded_pages();
    assert_eq!((unloaded.pages, unloaded.bytes), (PAGES - 1, (PAGES - 1) * LEN));
    assert_eq!(store.recovered().unloaded_pages, PAGES - 1);
    // Pages that the log changed are loaded, and new pages are too.
    assert_eq!(read(&store, CHANGED).unwrap(), contents()[&CHANGED]);
    let mut batch = store.batch();
    let page = batch.create(LEN, Place::Host).page();
    batch.write(page, 0, &content(PageId(99)));
    let new = store.commit(batch).unwrap().pages[0];
    assert_eq!(read(&store, new).unwrap(), content(PageId(99)));
    assert_eq!(store.pages().unwrap().len() as u64, PAGES + 1);

    // A snapshot reuses the images of pages that are not loaded, and removes no file.
    let files = Files::of(&disk).0.into_keys().filter(|file| !matches!(file, FileName::Segment(_)));
    let files: Vec<FileName> = files.collect();
    let before = store.snapshots().len();
    let snapshot = store.snapshot().unwrap();
    assert_eq!((snapshot.pages, store.snapshots().len()), (PAGES + 1, before + 1));
    let now = Files::of(&disk).0;
    assert_eq!(files.iter().find(|file| !now.contains_key(file)), None);
    assert_eq!(store.unloaded_pages(), unloaded);

    std::thread::scope(|scope| {
        let reader = scope.spawn(|| read(&store, LAST));
        device.open();
        assert!(reader.join().unwrap().unwrap() == content(LAST));
    });
    store.wait_loaded().unwrap();
    assert_eq!(store.unloaded_pages(), UnloadedPages::default());
    check(&store);
    // From now on, the store behaves as if all pages had been loaded during the open.
    store.snapshot().unwrap();
    assert_eq!(store.snapshots().len(), 2);
    store.close().unwrap();
    check(&open(&disk, PageLoad::Eager).unwrap());
    assert_eq!(*device.live.lock().unwrap(), 0);
}

/// An access to a page that is not loaded.
type Use = fn(&Store) -> Result<()>;

fn commit(store: &Store, work: impl FnOnce(&mut remanent::WriteBatch)) -> Result<()> {
    let mut batch = store.batch();
    work(&mut batch);
    store.commit(batch).map(drop)
}

/// Each access to an unloaded page waits only for this page. A batch has the same result as if the page had
/// been loaded during the open, even on a late device.
#[test]
fn an_access_to_an_unloaded_page_waits_for_it() {
    let uses: [(&str, Use); 20] = [
        ("read", |store| read(store, LAST).map(|bytes| assert!(bytes == content(LAST)))),
        ("lease", |store| {
            let lease = store.lease(LAST)?;
            assert!(lease.bytes()? == content(LAST));
            lease.end()
        }),
        ("pin", |store| store.pin(LAST).map(drop)),
        ("write", |store| commit(store, |batch| _ = batch.write(LAST, 100, b"after"))),
        ("whole page", |store| commit(store, |batch| _ = batch.write(LAST, 0, &content(PageId(77))))),
        ("fill", |store| commit(store, |batch| _ = batch.fill(LAST, 8, 16, &[1, 2]))),
        ("resize", |store| commit(store, |batch| _ = batch.resize(LAST, LEN + 100))),
        ("delete", |store| commit(store, |batch| _ = batch.delete(LAST))),
        ("move", |store| commit(store, |batch| _ = batch.move_to(LAST, Place::Pinned))),
        ("metadata", |store| commit(store, |batch| _ = batch.set_metadata(LAST, "name", 5_i64))),
        ("clone", |store| commit(store, |batch| _ = batch.clone_page(LAST))),
        ("compare", |store| store.compare(LAST, LAST, Width::W1).map(|found| assert!(found.is_equal))),
        ("copy", |store| commit(store, |batch| _ = batch.copy(LAST, 5..900, LAST, 100))),
        ("working copy", |store| {
            let copy = store.working_copy(LAST, Width::W1, Shadow::Page)?;
            let mut bytes = vec![0; LEN as usize];
            copy.bytes().read(0, &mut bytes)?;
            assert!(bytes == content(LAST));
            copy.bytes().write(9, b"captured")?;
            commit(store, |batch| _ = batch.capture(&copy))
        }),
        ("capture", |store| {
            let memory = store.device_bytes(LEN, Place::Host)?;
            memory.write(0, &content(PageId(55)))?;
            let copy = store.working_copy_in(LAST, &memory, Width::W1, Shadow::Page, InitialCopy::Store)?;
            commit(store, |batch| _ = batch.capture(&copy))
        }),
        ("audit", |store| {
            let audit = store.audit()?;
            assert_eq!((audit.pages, audit.changed.len()), (PAGES, 0));
            Ok(())
        }),
        ("restore", |store| store.restore(StatePoint::Snapshot(store.snapshots()[0].id)).map(drop)),
        ("prefetch", |store| store.prefetch(&[LAST], Place::Host)?.wait()),
        ("read ahead", |store| {
            let mut ahead = store.read_ahead(Place::Host)?;
            ahead.push(&[LAST])?;
            ahead.next_step().map(|step| assert_eq!(step, Some(vec![LAST])))
        }),
        ("prune", |store| store.prune(&store.retention()).map(drop)),
    ];
    let disk = closed();
    for (name, work) in uses {
        let expected = {
            let store = open(&disk.after_power_cut(), PageLoad::Eager).unwrap();
            work(&store).unwrap();
            State::of(&store)
        };
        let inner: [Arc<dyn Device>; 2] =
            [Arc::new(HostDevice::new()), Arc::new(LateDevice::seeded(Arc::new(HostDevice::new()), 3))];
        for inner in inner {
            let (disk, device) = (disk.after_power_cut(), Gate::new(inner));
            let store = open_on(&disk, device.clone(), PageLoad::OnDemand).unwrap();
            std::thread::scope(|scope| {
                let _at_last = OpenAtLast(device.clone());
                let user = scope.spawn(|| work(&store));
                // In the meantime, the applier handles other pages.
                for _ in 0..50 {
                    assert_eq!(store.pages().unwrap().len() as u64, PAGES, "{name}");
                    assert!(!user.is_finished(), "{name} did not wait for its page");
                }
                device.open();
                user.join().unwrap().unwrap();
            });
            assert_eq!(State::of(&store), expected, "{name}");
            store.close().unwrap();
            assert_eq!(*device.live.lock().unwrap(), 0, "{name}: page memory was not given back");
            assert_eq!(State::of(&open(&disk, PageLoad::Eager).unwrap()), expected, "{name}, later");
        }
    }
}

/// A snapshot rewrites the images of a file that is mostly unused, so that the file can be removed. It also
/// rewrites the images of pages that are not loaded yet.
#[test]
fn snapshot_waits_for_unloaded_pages_it_rewrites() {
    let disk = SimDisk::new();
    let options = options(PageLoad::Eager).images(ImageOptions::new().compression(Compression::Off));
    let store = Store::open_on(Arc::new(disk.clone()), Arc::new(HostDevice::new()), options).unwrap();
    commit(&store, |batch| {
        for page in (1..=PAGES).map(PageId) {
            let new = batch.create(LEN, Place::Host).page();
            batch.write(new, 0, &content(page));
        }
    })
    .unwrap();
    store.snapshot().unwrap();
    commit(&store, |batch| (1..PAGES - 1).for_each(|page| _ = batch.delete(PageId(page)))).unwrap();
    // The snapshot that also names the other images is no longer kept.
    (0..2).for_each(|_| drop(store.snapshot().unwrap()));
    store.close().unwrap();
    let (file, _) = image_of(&disk, LAST);

    let device = Gate::closed();
    let store = open_on(&disk, device.clone(), PageLoad::OnDemand).unwrap();
    assert_eq!(store.unloaded_pages().pages, 2);
    std::thread::scope(|scope| {
        let _at_last = OpenAtLast(device.clone());
        let taker = scope.spawn(|| store.snapshot());
        for _ in 0..50 {
            assert_eq!(store.pages().unwrap().len(), 2);
            assert!(!taker.is_finished(), "it did not wait");
        }
        device.open();
        taker.join().unwrap().unwrap();
    });
    assert_ne!(image_of(&disk, LAST).0, file, "nothing was written again");
    let check = |store: &Store| {
        for page in [PageId(PAGES - 1), LAST] {
            assert!(read(store, page).unwrap() == content(page), "page {page}");
        }
    };
    check(&store);
    store.close().unwrap();
    check(&open(&disk, PageLoad::Eager).unwrap());
}

/// A working copy was created by a store that is closed. The next store has not loaded the page yet, so a
/// capture waits until it is loaded.
#[test]
fn working_copy_outlives_store_and_is_captured_on_load() {
    let (disk, device) = (closed(), Gate::closed());
    device.open();
    let store = open_on(&disk, device.clone(), PageLoad::Eager).unwrap();
    let copy = store.working_copy(LAST, Width::W1, Shadow::Page).unwrap();
    copy.bytes().write(9, b"captured").unwrap();
    store.close().unwrap();

    *device.is_open.lock().unwrap() = false;
    let store = open_on(&disk, device.clone(), PageLoad::OnDemand).unwrap();
    std::thread::scope(|scope| {
        let _at_last = OpenAtLast(device.clone());
        let user = scope.spawn(|| commit(&store, |batch| _ = batch.capture(&copy)));
        for _ in 0..50 {
            assert_eq!(store.pages().unwrap().len() as u64, PAGES);
            assert!(!user.is_finished(), "it did not wait for its page");
        }
        device.open();
        user.join().unwrap().unwrap();
    });
    let mut expected = content(LAST);
    expected[9..17].copy_from_slice(b"captured");
    assert!(read(&store, LAST).unwrap() == expected);
}

/// A damaged image makes only its own page unreadable. The store then neither commits nor removes anything,
/// so that an open which loads all pages at once falls back to the previous snapshot.
#[test]
fn damage_names_page_and_recurs_on_eager_open() {
    let disk = closed();
    let (file, offset) = image_of(&disk, LAST);
    disk.damage(file, offset + 100, &[content(LAST)[100] ^ 1]);
    let store = open(&disk, PageLoad::OnDemand).unwrap();
    let is_it = |error: &Error| {
        assert_eq!((error.file(), error.offset()), (Some(file), Some(offset)), "{error}");
        assert_eq!(error.remedy(), Remedy::Inspect, "{error}");
    };
    for _ in 0..2 {
        let error = read(&store, LAST).unwrap_err();
        assert!(matches!(error, Error::Damaged(_)), "{error}");
        is_it(&error);
    }
    let error = store.wait_loaded().unwrap_err();
    is_it(&error);
    for (page, expected) in contents().into_iter().filter(|(page, _)| *page != LAST) {
        assert!(read(&store, page).unwrap() == expected, "page {page}");
    }
    assert_eq!(store.unloaded_pages(), UnloadedPages::default());
    let refused = commit(&store, |batch| _ = batch.set_root("step", 1_u64)).unwrap_err();
    assert!(matches!(refused, Error::Poisoned(_)), "{refused}");
    is_it(&refused);
    for refused in [store.snapshot().map(drop), store.prune(&store.retention()).map(drop)] {
        is_it(&refused.unwrap_err());
    }
    is_it(&store.close().unwrap_err());

    let store = open(&disk, PageLoad::Eager).unwrap();
    assert_eq!(store.recovered().snapshot, Some(SnapshotId(PAGES - 1)));
    let [damage] = &store.recovered().harmless[..] else { panic!("{:?}", store.recovered()) };
    assert_eq!((damage.file, damage.offset), (file, offset));
    check(&store);
}

/// A bad image among images that are read together does not affect the others.
#[test]
fn damage_does_not_affect_adjacent_frames() {
    let disk = SimDisk::new();
    let store = open(&disk, PageLoad::Eager).unwrap();
    let mut batch = store.batch();
    for page in (1..=PAGES).map(PageId) {
        let new = batch.create(LEN, Place::Host).page();
        batch.write(new, 0, &content(page));
    }
    store.commit(batch).unwrap();
    store.snapshot().unwrap();
    store.close().unwrap();
    let (file, offset) = image_of(&disk, PageId(5));
    disk.damage(file, offset, &[!content(PageId(5))[0]]);
    let store = open(&disk, PageLoad::OnDemand).unwrap();
    for page in (1..=PAGES).map(PageId) {
        match read(&store, page) {
            Ok(bytes) => assert!(page != PageId(5) && bytes == content(page), "page {page}"),
            Err(error) => assert_eq!((page, error.offset()), (PageId(5), Some(offset)), "{error}"),
        }
    }
}

/// Only pages whose images were verified on the medium may stay unloaded.
#[test]
fn unrecorded_snapshot_is_verified_at_open() {
    let disk = SimDisk::new();
    let store = open(&disk, PageLoad::Eager).unwrap();
    commit(&store, |batch| {
        let new = batch.create(LEN, Place::Host).page();
        batch.write(new, 0, &content(PageId(1)));
    })
    .unwrap();
    store.snapshot().unwrap();
    store.close().unwrap();
    let renamed =
        disk.history().iter().position(|event| event.ends_with(&format!("to {}", FileName::Manifest(1))));
    let dead = disk.after_kill(Moment { event: renamed.unwrap() + 1, tear: None });
    let store = open(&dead, PageLoad::OnDemand).unwrap();
    assert_eq!((store.recovered().snapshot, store.recovered().unloaded_pages), (Some(SnapshotId(1)), 0));
    assert!(read(&store, PageId(1)).unwrap() == content(PageId(1)));
    store.close().unwrap();
    let store = open(&dead, PageLoad::OnDemand).unwrap();
    assert_eq!(store.recovered().unloaded_pages, 1, "now it is recorded");
    assert!(read(&store, PageId(1)).unwrap() == content(PageId(1)));
}

/// A store may be closed or killed while pages are unloaded, because no file on disk depends on whether they
/// are loaded.
#[test]
fn store_may_close_while_pages_are_unloaded() {
    let disk = closed();
    let state = State::of(&open(&disk.after_power_cut(), PageLoad::Eager).unwrap());
    let device = Gate::new(Arc::new(HostDevice::new()));
    for round in 0..20 {
        let store = open_on(&disk, device.clone(), PageLoad::OnDemand).unwrap();
        let _at_last = OpenAtLast(device.clone());
        if round == 10 {
            let dead = disk.after_kill(Moment { event: disk.events(), tear: None });
            assert_eq!(State::of(&open(&dead, PageLoad::Eager).unwrap()), state);
        }
        device.open();
        store.close().unwrap();
        assert_eq!(*device.live.lock().unwrap(), 0, "page memory was not given back");
    }
    assert_eq!(State::of(&open(&disk, PageLoad::Eager).unwrap()), state);
}

#[test]
fn cache_only_damage_is_reread_from_medium() {
    for restore in [PageLoad::Eager, PageLoad::OnDemand] {
        let disk = closed();
        let damaged = Arc::new(InterruptedDisk::with_damaged_cache(&disk));
        let store = Store::open_on(damaged, Arc::new(HostDevice::new()), options(restore)).unwrap();
        store.wait_loaded().unwrap();
        check(&store);
        assert!(disk.calls(Operation::ReadProven) > 0, "nothing was read from the cache");
    }
}
