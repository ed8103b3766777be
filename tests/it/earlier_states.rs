//! Read-only views of earlier states: during writes, of damaged stores, and on file systems without locks.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Once};
use std::time::{Duration, Instant};

use remanent::disk::{Disk, DiskFile, DiskLock, Hold};
use remanent::error::{FileName, Folder, NoSuchState};
use remanent::history::{ChangeCause, KeptStates, ValueChange};
use remanent::options::{Compression, ImageIo, ImageOptions, LogIo, LogOptions, Retention};
use remanent::testing::sim_disk::{Moment, SimDisk};
use remanent::{Ack, Error, Key, Lsn, Options, PageId, Place, Result, SnapshotId, StatePoint, Store, View};

use crate::files::{open, open_with, small};

const LEN: usize = 600;

/// Creates the three pages of a store.
fn three_pages(store: &Store) -> Vec<PageId> {
    let mut batch = store.batch();
    for key in ["a", "b", "c"] {
        batch.create(LEN as u64, Place::Host).key(Key::new(key).unwrap());
    }
    store.commit(batch).unwrap().pages
}

/// Returns the bytes that batch `lsn` writes to the whole page.
fn content(page: PageId, lsn: u64) -> Vec<u8> {
    (0..LEN as u64).map(|at| (page.0 * 31 + lsn * 7 + at) as u8).collect()
}

/// Overwrites all pages.
fn rewrite(store: &Store, pages: &[PageId]) -> Lsn {
    let lsn = store.lsn().next();
    let mut batch = store.batch();
    for page in pages {
        batch.write(*page, 0, &content(*page, lsn.0));
    }
    batch.set_root("step", lsn.0);
    store.commit(batch).unwrap().position.lsn
}

fn at(disk: &SimDisk, point: &StatePoint) -> Result<View> {
    View::open_on(&(Arc::new(disk.clone()) as Arc<dyn Disk>), Some(point))
}

fn newest(disk: &SimDisk) -> Result<View> {
    View::open_on(&(Arc::new(disk.clone()) as Arc<dyn Disk>), None)
}

/// Asserts that all bytes have the values that the view's batch wrote.
fn check(old: &View, pages: &[PageId]) {
    for page in pages {
        let mut bytes = vec![0; LEN];
        old.read(*page, 0, &mut bytes).unwrap_or_else(|error| panic!("page {page}: {error}"));
        assert_eq!(bytes, content(*page, old.lsn().0), "page {page} at {}", old.lsn());
    }
}

#[test]
fn every_batch_in_window_can_be_viewed() {
    let disk = SimDisk::new();
    let store = open(&disk).unwrap();
    let pages = three_pages(&store);
    for step in 0..24 {
        rewrite(&store, &pages);
        if step % 7 == 3 {
            store.snapshot().unwrap();
        }
    }
    let (id, snapshots, last) = (store.id(), store.snapshots(), store.lsn());
    // An open store writes a seal when it is idle.
    drop(store);
    let events = disk.events();
    let window = snapshots[0].end.0..=last.0;
    assert!(window.clone().count() > 8, "{window:?}");
    for lsn in window.clone() {
        let old = at(&disk, &StatePoint::Lsn(Lsn(lsn))).unwrap();
        assert_eq!((old.lsn(), old.id()), (Lsn(lsn), id));
        check(&old, &pages);
        assert_eq!(old.page_by_key(Key::new("b").unwrap()).unwrap().page, pages[1]);
        assert_eq!(old.page(pages[0]).unwrap().lsn, Lsn(lsn));
        let mut bytes = [0; 9];
        old.read(pages[2], 100, &mut bytes).unwrap();
        assert_eq!(bytes, content(pages[2], lsn)[100..109]);
        let outside = old.read(pages[2], LEN as u64 - 8, &mut bytes);
        assert!(matches!(outside, Err(Error::OutOfBounds { page_len: 600, .. })), "{outside:?}");
        assert!(matches!(old.read(PageId(99), 0, &mut bytes), Err(Error::UnknownPage { .. })));
    }
    for snapshot in snapshots {
        let old = at(&disk, &StatePoint::Snapshot(snapshot.id)).unwrap();
        assert_eq!((old.lsn(), old.base()), (snapshot.end, Some(snapshot.id)));
        check(&old, &pages);
    }
    let (requested, newest) = (Lsn(window.end() + 1), last);
    let error = at(&disk, &StatePoint::Lsn(requested)).unwrap_err();
    assert!(
        matches!(error, Error::NoSuchState(NoSuchState::OutsideWindow { requested: a, newest: n, .. }) if a == requested && n == newest),
        "{error}"
    );
    let gone = at(&disk, &StatePoint::Snapshot(SnapshotId(99))).unwrap_err();
    assert!(matches!(gone, Error::NoSuchState(NoSuchState::Snapshot { snapshot: SnapshotId(99) })), "{gone}");
    let unknown = at(&disk, &StatePoint::Name("unknown".to_owned())).unwrap_err();
    assert!(matches!(unknown, Error::NoSuchState(NoSuchState::Name { .. })), "{unknown}");
    assert_eq!(disk.events(), events, "a look writes nothing");
}

#[test]
fn view_without_store_is_refused() {
    let disk = SimDisk::new();
    assert!(matches!(newest(&disk), Err(Error::NoStore { found: None, .. })));
    assert_eq!(disk.events(), 0);
    let directory = tempfile::tempdir().unwrap();
    assert!(matches!(Store::open_read_only(directory.path()), Err(Error::NoStore { found: None, .. })));
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
}

/// The pages share no image, so damage to an image makes only one page unreadable.
#[test]
fn damage_affects_only_its_page() {
    let disk = SimDisk::new();
    let store = open_with(&disk, small().images(ImageOptions::new().compression(Compression::Off))).unwrap();
    let pages = three_pages(&store);
    rewrite(&store, &pages);
    let snapshot = store.snapshot().unwrap();
    drop(store);
    let old = at(&disk, &StatePoint::Snapshot(snapshot.id)).unwrap();
    let files = disk.list(Folder::Pages).unwrap();
    let file = FileName::parse(Folder::Pages, &files[0]).unwrap();
    let bytes = disk.bytes(file).unwrap();
    let wanted = content(pages[1], old.lsn().0);
    let place = bytes.windows(LEN).position(|window| window == wanted).expect("an image holds the page");
    disk.damage(file, place as u64 + 17, &[!wanted[17]]);
    let mut out = vec![0; LEN];
    let error = old.read(pages[1], 0, &mut out).unwrap_err();
    assert_eq!((error.file(), error.offset()), (Some(file), Some(place as u64)), "{error}");
    check(&old, &[pages[0], pages[2]]);
    // Once the byte is restored, the image can be read.
    disk.damage(file, place as u64 + 17, &[wanted[17]]);
    check(&old, &pages);
}

#[test]
fn log_damage_loses_only_later_states() {
    let disk = SimDisk::new();
    let store = open(&disk).unwrap();
    let pages = three_pages(&store);
    let (good, lost) = (rewrite(&store, &pages), rewrite(&store, &pages));
    drop(store);
    let wanted = content(pages[0], lost.0);
    let place = disk
        .list(Folder::Log)
        .unwrap()
        .iter()
        .filter_map(|name| FileName::parse(Folder::Log, name))
        .find_map(|file| {
            let bytes = disk.bytes(file)?;
            Some((file, bytes.windows(LEN).position(|window| window == wanted)?))
        });
    let (file, offset) = place.expect("the log holds the batch");
    disk.damage(file, offset as u64, &[!wanted[0]]);
    check(&at(&disk, &StatePoint::Lsn(good)).unwrap(), &pages);
    for error in [newest(&disk).unwrap_err(), at(&disk, &StatePoint::Lsn(lost)).unwrap_err()] {
        assert_eq!((error.file(), error.lsn()), (Some(file), Some(lost)), "{error}");
    }
}

/// Readers always read the state of their batch while a writer commits, takes snapshots and recycles segments.
#[test]
fn readers_see_one_state_while_a_writer_recycles() {
    let disk = SimDisk::new();
    read_while_written(&disk, || newest(&disk), false);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    let store = small().retention(Retention::new().snapshots_kept(1)).open(&path).unwrap();
    read_while_store_commits(store, || Store::open_read_only(&path), false);
}

/// Without locks, readers cannot keep their state, so they may be overtaken.
#[test]
fn readers_without_locks_are_overtaken_or_correct() {
    let disk = SimDisk::new();
    let unheld = unlockable(&disk);
    read_while_written(&disk, || View::open_on(&unheld, None), true);
}

/// A state is opened correctly or not at all from files that were read long before, while a writer recycles them.
#[test]
fn known_files_open_correct_states_of_a_changing_store() {
    let disk = SimDisk::new();
    let at: Arc<dyn Disk> = Arc::new(disk.clone());
    let known: Mutex<Option<(usize, KeptStates)>> = Mutex::default();
    let look = || {
        let mut known = known.lock().unwrap();
        if known.as_ref().is_none_or(|(uses, _)| *uses == 20) {
            *known = Some((0, KeptStates::read_on(&at)?));
        }
        let (uses, states) = known.as_mut().unwrap();
        *uses += 1;
        loop {
            let lsn = View::open_on(&at, None)?.lsn();
            match states.open(lsn) {
                // The writer has removed the state in the meantime.
                Err(Error::NoSuchState(NoSuchState::OutsideWindow { .. })) => {}
                opened => return opened,
            }
        }
    };
    read_while_written(&disk, look, false);
}

/// Files that were read once are not read again: a state is opened although its manifest was damaged in the meantime. A
/// state that is not among them is looked for in the directory.
#[test]
fn known_manifests_are_not_read_again() {
    let disk = SimDisk::new();
    let store = open(&disk).unwrap();
    let pages = three_pages(&store);
    rewrite(&store, &pages);
    let first = store.snapshot().unwrap();
    let states = KeptStates::read_on(&(Arc::new(disk.clone()) as Arc<dyn Disk>)).unwrap();
    rewrite(&store, &pages);
    let second = store.snapshot().unwrap();
    check(&states.open(second.end).unwrap(), &pages);
    let manifest = FileName::Manifest(first.id.0);
    let len = disk.bytes(manifest).unwrap().len();
    disk.damage(manifest, 0, &vec![7; len]);
    let old = states.open(first.end).unwrap();
    assert_eq!(old.lsn(), first.end);
    check(&old, &pages);
    let error = states.open(second.end.next()).unwrap_err();
    assert!(matches!(error, Error::NoSuchState(NoSuchState::OutsideWindow { .. })), "{error}");
}

/// A writer may remove images of a snapshot but keep its manifest as a link of later snapshots, and the log after it. A
/// reader without a lock has then lost its state, but no file is damaged.
#[test]
fn removed_images_of_a_kept_link_are_not_damage() {
    let disk = SimDisk::new();
    let store = open_with(&disk, small().retention(Retention::new().snapshots_kept(1))).unwrap();
    let pages = three_pages(&store);
    rewrite(&store, &pages);
    // Create more pages that do not change, so that a snapshot of one page is based on the previous snapshot.
    let mut batch = store.batch();
    (0..40).for_each(|_| _ = batch.create_from(vec![7; 40], Place::Host));
    store.commit(batch).unwrap();
    store.snapshot().unwrap();
    let change_one = || {
        let mut batch = store.batch();
        batch.write(pages[0], 0, &content(pages[0], store.lsn().0 + 1));
        store.commit(batch).unwrap();
        store.snapshot().unwrap()
    };
    let link = change_one();
    let view = View::open_on(&unlockable(&disk), None).unwrap();
    assert_eq!(view.base(), Some(link.id));
    change_one();
    let names = disk.list(Folder::Snapshots).unwrap();
    assert!(names.contains(&FileName::Manifest(link.id.0).name()), "the link is kept: {names:?}");
    let mut bytes = vec![0; LEN];
    let errors = [
        view.read(pages[0], 0, &mut bytes).unwrap_err(),
        view.prove_pages(&pages).unwrap_err(),
        view.blame(pages[0], 3..9).unwrap_err(),
    ];
    for error in errors {
        assert!(matches!(error, Error::Overtaken { lsn, .. } if lsn == view.lsn()), "{error}");
    }
}

/// A writer locks a state against readers while it removes the state. On a busy disk, this takes longer than many
/// attempts of a reader.
#[test]
fn a_reader_waits_until_a_removal_ends() {
    let disk = SimDisk::new();
    let store = open(&disk).unwrap();
    let pages = three_pages(&store);
    let lsn = rewrite(&store, &pages);
    let (holds, since) = (disk.clone(), Instant::now());
    let hold = move |id| {
        if since.elapsed() < Duration::from_millis(300) { Ok(Hold::Retiring) } else { holds.hold(id) }
    };
    let busy: Arc<dyn Disk> = Arc::new(HoldsBy(disk, hold));
    for point in [Some(StatePoint::Lsn(lsn)), None] {
        check(&View::open_on(&busy, point.as_ref()).unwrap(), &pages);
    }
}

fn read_while_written(disk: &SimDisk, look: impl Fn() -> Result<View> + Sync, overtaken_allowed: bool) {
    read_while_store_commits(
        open_with(disk, small().retention(Retention::new().snapshots_kept(1))).unwrap(),
        look,
        overtaken_allowed,
    );
}

fn read_while_store_commits(store: Store, look: impl Fn() -> Result<View> + Sync, overtaken_allowed: bool) {
    const STATES: usize = 12;
    let pages = three_pages(&store);
    rewrite(&store, &pages);
    let done = AtomicBool::new(false);
    let seen: Mutex<BTreeMap<u64, usize>> = Mutex::default();
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    while !done.load(Ordering::Relaxed) && seen.lock().unwrap().len() < STATES {
                        let old = match look() {
                            Ok(old) => old,
                            Err(Error::Overtaken { .. }) if overtaken_allowed => continue,
                            Err(error) => panic!("{error}"),
                        };
                        *seen.lock().unwrap().entry(old.lsn().0).or_default() += 1;
                        match old.blame(pages[0], 3..9) {
                            Ok(changes) => check_changes(&changes, pages[0], old.lsn()),
                            // The reader keeps only its own state.
                            Err(Error::Overtaken { .. }) => {}
                            Err(error) => panic!("at {}: {error}", old.lsn()),
                        }
                        for page in &pages {
                            let mut bytes = vec![0; LEN];
                            match old.read(*page, 0, &mut bytes) {
                                Ok(()) => assert_eq!(bytes, content(*page, old.lsn().0), "at {}", old.lsn()),
                                Err(Error::Overtaken { .. }) if overtaken_allowed => {}
                                Err(error) => panic!("page {page} at {}: {error}", old.lsn()),
                            }
                        }
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            let _ends = Ends(&done);
            while !done.load(Ordering::Relaxed) {
                for _ in 0..20 {
                    rewrite(&store, &pages);
                }
                store.snapshot().unwrap();
            }
        });
        let ended: Vec<_> = readers.into_iter().map(|reader| reader.join()).collect();
        done.store(true, Ordering::Relaxed);
        ended.into_iter().for_each(|ended| ended.unwrap());
    });
    assert!(seen.into_inner().unwrap().len() >= STATES, "the writer ended first");
}

/// Asserts that the changes of bytes 3 to 9 of a page have the values that `rewrite` wrote, follow each other
/// without a gap, and end at batch `last`.
fn check_changes(changes: &[ValueChange], page: PageId, last: Lsn) {
    for change in changes.iter().filter(|change| change.before.is_some()) {
        assert_eq!(change.after.as_deref(), Some(&content(page, change.lsn.0)[3..9]), "{change:?}");
    }
    for pair in changes.windows(2) {
        assert!(pair[0].lsn < pair[1].lsn && pair[0].after == pair[1].before, "{pair:?}");
    }
    let newest = changes.last().expect("the page was created once");
    assert_eq!((newest.lsn, newest.after.as_deref()), (last, Some(&content(page, last.0)[3..9])));
}

/// Sets a flag when dropped, so that other threads notice that its thread ended, even by a panic.
pub struct Ends<'a>(pub &'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Returns a disk whose files can be neither locked nor linked, as on read-only media.
pub fn unlockable(disk: &SimDisk) -> Arc<dyn Disk> {
    Arc::new(HoldsBy(disk.clone(), |_| Ok(Hold::Impossible)))
}

/// A disk on which the given function locks states, and whose files cannot be linked.
struct HoldsBy<H>(SimDisk, H);

impl<H: Fn(SnapshotId) -> Result<Hold> + Send + Sync + 'static> Disk for HoldsBy<H> {
    fn label(&self) -> String {
        self.0.label()
    }

    fn check_writer(&self) -> Result<()> {
        self.0.check_writer()
    }

    fn lock(&self) -> Result<Box<dyn DiskLock>> {
        self.0.lock()
    }

    fn is_locked(&self) -> Result<bool> {
        self.0.is_locked()
    }

    fn hold(&self, id: SnapshotId) -> Result<Hold> {
        (self.1)(id)
    }

    fn is_held(&self, id: SnapshotId) -> Result<bool> {
        self.0.is_held(id)
    }

    fn try_retire(&self, id: SnapshotId) -> Result<Option<Box<dyn DiskLock>>> {
        self.0.try_retire(id)
    }

    fn list(&self, folder: Folder) -> Result<Vec<String>> {
        Disk::list(&self.0, folder)
    }

    fn make_folder(&self, folder: Folder) -> Result<()> {
        self.0.make_folder(folder)
    }

    fn sync_folder(&self, folder: Folder) -> Result<()> {
        self.0.sync_folder(folder)
    }

    fn create(&self, file: FileName) -> Result<Arc<dyn DiskFile>> {
        self.0.create(file)
    }

    fn open(&self, file: FileName, write: bool) -> Result<Arc<dyn DiskFile>> {
        self.0.open(file, write)
    }

    fn rename(&self, source: FileName, target: FileName) -> Result<()> {
        self.0.rename(source, target)
    }

    fn remove(&self, file: FileName) -> Result<()> {
        self.0.remove(file)
    }

    fn refuses(&self, io: LogIo) -> Result<Option<String>> {
        self.0.refuses(io)
    }

    fn refuses_images(&self, io: ImageIo) -> Result<Option<String>> {
        self.0.refuses_images(io)
    }
}

/// A state that a reader locks is kept longer than retention requires, and removed after its release.
#[test]
fn state_locked_by_reader_stays_until_released() {
    let disk = SimDisk::new();
    let store = open_with(&disk, small().retention(Retention::new().snapshots_kept(1))).unwrap();
    let pages = three_pages(&store);
    rewrite(&store, &pages);
    let first = store.snapshot().unwrap();
    let manifest = FileName::Manifest(first.id.0);
    let old = at(&disk, &StatePoint::Lsn(rewrite(&store, &pages))).unwrap();
    assert_eq!(old.base(), Some(first.id));
    let other = at(&disk, &StatePoint::Snapshot(first.id)).unwrap();
    for _ in 0..3 {
        for _ in 0..12 {
            rewrite(&store, &pages);
        }
        store.snapshot().unwrap();
    }
    // These images are read for the first time, so this read proves that no file was removed.
    check(&old, &pages);
    check(&other, &pages);
    drop(old);
    rewrite(&store, &pages);
    store.snapshot().unwrap();
    check(&at(&disk, &StatePoint::Snapshot(first.id)).unwrap(), &pages);
    assert!(disk.bytes(manifest).is_some(), "the other reader holds it still");
    drop(other);
    rewrite(&store, &pages);
    store.snapshot().unwrap();
    assert!(disk.bytes(manifest).is_none(), "no reader holds it any more");
    let window = at(&disk, &StatePoint::Lsn(first.end)).unwrap_err();
    assert!(matches!(window, Error::NoSuchState(NoSuchState::OutsideWindow { .. })), "{window}");
}

/// The writer reuses the first segment after a reader listed the store's files and before the reader locks the
/// beginning of the log. The reader, which has the file open, must not treat the reused segment as the beginning of a
/// log.
#[test]
fn recycled_beginning_is_not_a_restorable_state() {
    let disk = SimDisk::new();
    let store = Arc::new(open_with(&disk, small().retention(Retention::new().snapshots_kept(1))).unwrap());
    let pages = three_pages(&store);
    rewrite(&store, &pages);
    let goes_on = Once::new();
    let (held, writer, rewritten) = (disk.clone(), store.clone(), pages.clone());
    let overtaken: Arc<dyn Disk> = Arc::new(HoldsBy(disk.clone(), move |id| {
        goes_on.call_once(|| {
            for _ in 0..4 {
                (0..12).for_each(|_| _ = rewrite(&writer, &rewritten));
                writer.snapshot().unwrap();
            }
        });
        held.hold(id)
    }));
    let old = View::open_on(&overtaken, None).unwrap();
    assert!(store.lsn().0 > 40, "the writer went on in between");
    check(&old, &pages);
}

/// Returns the disk state after a kill this number of batches after the snapshot. None of these batches may be synced.
fn killed_after(batches: usize) -> (SimDisk, Vec<PageId>) {
    let disk = SimDisk::new();
    let store = open_with(&disk, small().ack(Ack::Logged)).unwrap();
    let pages = three_pages(&store);
    rewrite(&store, &pages);
    store.snapshot().unwrap();
    (0..batches).for_each(|_| _ = rewrite(&store, &pages));
    (disk.after_kill(Moment { event: disk.events(), tear: None }), pages)
}

fn segments(disk: &SimDisk) -> BTreeSet<u64> {
    let names = disk.list(Folder::Log).unwrap();
    let number = |name: &String| match FileName::parse(Folder::Log, name) {
        Some(FileName::Segment(number)) => Some(number),
        _ => None,
    };
    names.iter().filter_map(number).collect()
}

/// A recovering writer copies the batches that may exist only in the page cache, and removes their segments. The
/// segments that a reader is reading are kept.
#[test]
fn recovering_writer_keeps_segments_locked_by_reader() {
    let mut went = 0;
    for batches in 1..30 {
        let (disk, pages) = killed_after(batches);
        let unread = disk.after_kill(Moment { event: disk.events(), tear: None });
        let old = newest(&disk).unwrap();
        drop(open(&unread).unwrap());
        let gone: BTreeSet<u64> = segments(&disk).difference(&segments(&unread)).copied().collect();
        went += gone.len();
        let store = open_with(&disk, small().retention(Retention::new().snapshots_kept(1))).unwrap();
        check(&old, &pages);
        drop(old);
        for _ in 0..2 {
            rewrite(&store, &pages);
            store.snapshot().unwrap();
        }
        assert!(segments(&disk).is_disjoint(&gone), "{batches} batches: the reader has gone");
        check(&newest(&disk).unwrap(), &pages);
    }
    assert!(went > 0, "no segment went without a reader");
}

/// The writer recovers after a reader listed the store's files and before the reader locks any of them.
#[test]
fn segments_removed_before_lock_are_not_damage() {
    for batches in 1..30 {
        let (disk, pages) = killed_after(batches);
        let recovers = Once::new();
        let held = disk.clone();
        let overtaken: Arc<dyn Disk> = Arc::new(HoldsBy(disk.clone(), move |id| {
            recovers.call_once(|| drop(open(&held).unwrap()));
            held.hold(id)
        }));
        check(&View::open_on(&overtaken, None).unwrap(), &pages);
    }
}

/// The beginning of the log is locked with number 0.
#[test]
fn log_beginning_can_be_locked() {
    let disk = SimDisk::new();
    let store = open_with(&disk, small().retention(Retention::new().snapshots_kept(1))).unwrap();
    let pages = three_pages(&store);
    let old = at(&disk, &StatePoint::Lsn(rewrite(&store, &pages))).unwrap();
    assert_eq!(old.base(), None);
    for _ in 0..3 {
        for _ in 0..12 {
            rewrite(&store, &pages);
        }
        store.snapshot().unwrap();
    }
    check(&old, &pages);
    drop(old);
    rewrite(&store, &pages);
    store.snapshot().unwrap();
    assert!(matches!(
        at(&disk, &StatePoint::Lsn(Lsn(2))),
        Err(Error::NoSuchState(NoSuchState::OutsideWindow { .. }))
    ));
}

/// A restore keeps the state before it, so that a later restore can return to it.
#[test]
fn restore_can_be_undone() {
    let disk = SimDisk::new();
    let store = open_with(&disk, small().retention(Retention::new().snapshots_kept(1))).unwrap();
    let pages = three_pages(&store);
    let lsns: Vec<Lsn> = (0..6).map(|_| rewrite(&store, &pages)).collect();
    store.snapshot().unwrap();
    let later: Vec<Lsn> = (0..6).map(|_| rewrite(&store, &pages)).collect();
    let read = |page: PageId| {
        let mut bytes = vec![0; LEN];
        store.read(page, 0, &mut bytes).unwrap();
        bytes
    };
    assert!(matches!(
        store.restore(StatePoint::Lsn(lsns[0])),
        Err(Error::NoSuchState(NoSuchState::OutsideWindow { .. }))
    ));
    store.restore(StatePoint::Lsn(later[1])).unwrap();
    assert_eq!(read(pages[0]), content(pages[0], later[1].0));
    store.restore(StatePoint::Lsn(later[4])).unwrap();
    assert_eq!(read(pages[2]), content(pages[2], later[4].0));
    let first = store.snapshots()[0].id;
    store.restore(StatePoint::Snapshot(first)).unwrap();
    assert_eq!(read(pages[1]), content(pages[1], lsns[5].0));
    assert_eq!(store.snapshots().len(), 4, "a restore retires no snapshot");
}

#[test]
fn read_only_directory_is_readable() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    let store = Options::new().log(LogOptions::new().segment_len(16 << 10)).open(&path).unwrap();
    let pages = three_pages(&store);
    rewrite(&store, &pages);
    store.snapshot().unwrap();
    rewrite(&store, &pages);
    drop(store);
    // A copy on read-only media has no files to lock.
    for file in ["READERS", "LOCK"] {
        std::fs::remove_file(path.join(file)).unwrap();
    }
    let old = Store::open_read_only(&path).unwrap();
    check(&old, &pages);
    assert!(!path.join("READERS").exists() && !path.join("LOCK").exists());
}

/// Commits and takes snapshots until the first segments of the log are removed. The last operation is a snapshot.
fn forget_the_beginning(store: &Store, pages: &[PageId]) {
    for _ in 0..20 {
        (0..5).for_each(|_| _ = rewrite(store, pages));
        store.snapshot().unwrap();
    }
}

#[test]
fn blame_lists_each_changing_batch_in_retained_range() {
    let disk = SimDisk::new();
    let store =
        open_with(&disk, small().retention(Retention::new().snapshots_kept(1).log_kept(1 << 30))).unwrap();
    let pages = three_pages(&store);
    let lsns: Vec<Lsn> = (0..4).map(|_| rewrite(&store, &pages)).collect();
    store.snapshot().unwrap();
    let mut batch = store.batch();
    // A write of equal bytes does not count as a change, and writes to other pages do not either.
    batch.write(pages[0], 0, &content(pages[0], lsns[3].0)).write(pages[1], 0, b"other").note("nothing");
    store.commit(batch).unwrap();
    let mut batch = store.batch();
    batch.write(pages[0], 3, b"culprit").set_root("step", 99u64).note("step 99");
    let culprit = store.commit(batch).unwrap().position.lsn;
    let restored = store.restore(StatePoint::Lsn(lsns[3])).unwrap().lsn;
    let view = newest(&disk).unwrap();
    let changes = view.blame(pages[0], 3..9).unwrap();
    let told: Vec<(Lsn, ChangeCause)> = changes.iter().map(|change| (change.lsn, change.cause)).collect();
    let mut expected = vec![(Lsn(1), ChangeCause::Batch)];
    expected.extend(lsns.iter().map(|lsn| (*lsn, ChangeCause::Batch)));
    expected.extend([(culprit, ChangeCause::Batch), (restored, ChangeCause::Restore)]);
    assert_eq!(told, expected);
    let change = &changes[5];
    assert_eq!((change.note.as_deref(), change.after.as_deref()), (Some("step 99"), Some(&b"culpri"[..])));
    assert_eq!(change.root.as_ref().unwrap()["step"], 99u64.into());
    assert_eq!(changes[6].after.as_deref(), Some(&content(pages[0], lsns[3].0)[3..9]));
    // The history up to an earlier state does not include later batches.
    let then = at(&disk, &StatePoint::Lsn(lsns[1])).unwrap();
    check_changes(&then.blame(pages[0], 3..9).unwrap(), pages[0], lsns[1]);
    for (page, range) in [(pages[0], 599..601), (pages[0], u64::MAX - 1..u64::MAX)] {
        assert!(matches!(view.blame(page, range), Err(Error::OutOfBounds { page_len: 600, .. })));
    }
    assert!(matches!(view.blame(PageId(77), 0..1), Err(Error::UnknownPage { page: PageId(77) })));

    // After the log before a snapshot is removed, the history starts with the snapshot's version of the page. An open
    // view would keep that log, so close it first.
    drop((view, then, store));
    let store = open_with(&disk, small().retention(Retention::new().snapshots_kept(1))).unwrap();
    forget_the_beginning(&store, &pages);
    let last = rewrite(&store, &pages);
    let changes = newest(&disk).unwrap().blame(pages[0], 3..9).unwrap();
    assert_eq!(changes[0].cause, ChangeCause::Snapshot, "{changes:?}");
    assert_eq!(changes.last().unwrap().lsn, last);
    let long = 65_537;
    let mut batch = store.batch();
    let page = batch.create(long, Place::Host).page();
    let page = store.commit(batch).unwrap().pages[page.index()];
    let refused = newest(&disk).unwrap().blame(page, 0..long).unwrap_err();
    assert!(matches!(refused, Error::Limit { found: 65_537, limit: 65_536, .. }), "{refused}");
}

/// A snapshot that is kept only as a link of later snapshots may have lost images of its own, so the history cannot
/// start from it.
#[test]
fn history_does_not_start_at_a_link() {
    let disk = SimDisk::new();
    let store = open_with(&disk, small().retention(Retention::new().snapshots_kept(1))).unwrap();
    let pages = three_pages(&store);
    // Create more pages that do not change, so that a snapshot of the three pages is based on the previous snapshot.
    let mut batch = store.batch();
    (0..40).for_each(|_| _ = batch.create_from(vec![7; 40], Place::Host));
    store.commit(batch).unwrap();
    for _ in 0..20 {
        let lsn = rewrite(&store, &pages);
        store.snapshot().unwrap();
        let changes = newest(&disk).unwrap().blame(pages[0], 3..9).unwrap();
        assert_eq!(changes.last().unwrap().lsn, lsn);
    }
}

#[test]
fn blame_stops_at_damaged_image() {
    let disk = SimDisk::new();
    let store = open_with(
        &disk,
        small()
            .images(ImageOptions::new().compression(Compression::Off))
            .retention(Retention::new().snapshots_kept(1)),
    )
    .unwrap();
    let pages = three_pages(&store);
    forget_the_beginning(&store, &pages);
    drop(store);
    let view = newest(&disk).unwrap();
    let wanted = content(pages[0], view.lsn().0);
    let files = disk.list(Folder::Pages).unwrap();
    let mut damaged = 0;
    for file in files.iter().filter_map(|name| FileName::parse(Folder::Pages, name)) {
        let bytes = disk.bytes(file).unwrap();
        if let Some(at) = bytes.windows(LEN).position(|window| window == wanted) {
            disk.damage(file, at as u64 + 500, &[!wanted[500]]);
            damaged += 1;
        }
    }
    assert!(damaged > 0);
    // The damage is far from the requested bytes but within the image.
    let told = view.blame(pages[0], 3..9);
    assert!(matches!(told, Err(Error::Damaged(_))), "{told:?}");
    view.blame(pages[1], 3..9).unwrap();
}
