//! A test bed: a store, its archive in a local folder, and restores of the archive.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use remanent::disk::dir::DirDisk;
use remanent::disk::{Disk, DiskLock};
use remanent::follow::Replica;
use remanent::options::{ArchiveOptions, Create, DeviceChoice, LogOptions, SnapshotSchedule};
use remanent::{Ack, Options, PageId, PageInfo, Place, Retention, StatePoint, Store, View};
use remanent_archive::directory::{ArchivedDirectory, RestoreTarget, WriterLock};
use remanent_archive::line::{Archive, RestoredEnd, SystemNonces, Takeover};
use remanent_archive::mirror::{self, Pushed};
use remanent_archive::remote::{RemoteBucket, RemoteOptions};
use remanent_archive::rules::Rules;

/// Number of short pages.
const SHORT_PAGES: u64 = 3;
const SHORT_LEN: u64 = 500;
/// Length of a page that is written as an image before its batch is committed.
const LONG_LEN: u64 = 70_000;
/// Number of steps after which the long page is replaced.
const LONG_EVERY: u64 = 5;

/// The engine's writer lock.
struct EngineLock(#[expect(dead_code, reason = "held until it is dropped")] Box<dyn DiskLock>);

impl fmt::Debug for EngineLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EngineLock")
    }
}

impl WriterLock for EngineLock {}

/// A directory that contains a store and the folder of its archive.
pub struct Bed {
    root: tempfile::TempDir,
}

impl Bed {
    pub fn new() -> Self {
        // Each create in a folder syncs, so the folder is on a memory file system if one is available.
        let memory = Path::new("/dev/shm");
        let root = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
        let bed = Self { root: root.unwrap() };
        fs::create_dir(bed.bucket()).unwrap();
        bed
    }

    pub fn root(&self) -> &Path {
        self.root.path()
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    pub fn store(&self) -> PathBuf {
        self.path("store")
    }

    pub fn bucket(&self) -> PathBuf {
        self.path("bucket")
    }

    pub fn url(&self) -> String {
        format!("file://{}", self.bucket().display())
    }

    /// Returns options for this archive. Batches for which no caller waits are archived after 20 ms.
    pub fn archive(&self) -> ArchiveOptions {
        ArchiveOptions::new(self.url()).interval(Duration::from_millis(20))
    }

    pub fn options(&self) -> Options {
        plain_options(Create::IfEmpty).archive(self.archive())
    }

    pub fn open(&self) -> Store {
        self.options().open(self.store()).unwrap()
    }

    /// Archives the closed store.
    pub fn push(&self) -> Pushed {
        self.try_push(&self.store()).unwrap()
    }

    /// Archives the closed store in a directory.
    pub fn try_push(&self, path: &Path) -> remanent_archive::Result<Pushed> {
        let bucket = RemoteBucket::open(&self.url(), RemoteOptions::default()).unwrap();
        let archive = Archive { bucket: &bucket, nonces: &SystemNonces, rules: Rules::default() };
        let lock = Box::new(EngineLock(DirDisk::new(path).lock().unwrap()));
        let mut directory = ArchivedDirectory::open(path, lock).unwrap();
        bucket.block_on(mirror::push(archive, &mut directory, Takeover::Refused))
    }

    /// Restores the end of the archive into a new directory.
    pub fn restore(&self, name: &str) -> remanent_archive::Result<RestoredEnd> {
        restore(&self.url(), &self.path(name))
    }

    /// Restores a copy of the archive, so that no fence is created in the archive itself. Checks the bytes of every
    /// page of the restored store, and returns its step.
    pub fn restored_step(&self, name: &str) -> u64 {
        self.restored(name).0
    }

    /// Restores a copy of the archive. Returns the name and the step of each named snapshot in the restored store.
    pub fn restored_names(&self, name: &str) -> BTreeMap<String, u64> {
        self.restored(name).1
    }

    fn restored(&self, name: &str) -> (u64, BTreeMap<String, u64>) {
        let copy = self.path(&format!("{name}.bucket"));
        copy_directory(&self.bucket(), &copy);
        let path = self.path(name);
        restore(&format!("file://{}", copy.display()), &path).unwrap();
        let archive = ArchiveOptions::new(format!("file://{}", copy.display()));
        let store = plain_options(Create::Never).archive(archive).open(&path).unwrap();
        let step = check(&store);
        let names: Vec<String> = store.snapshots().into_iter().filter_map(|info| info.name).collect();
        store.close().unwrap();
        let names = names.into_iter().map(|name| {
            let view = Store::open_at(&path, StatePoint::Name(name.clone())).unwrap();
            (name, check_view(&view))
        });
        let names = names.collect();
        fs::remove_dir_all(copy).unwrap();
        fs::remove_dir_all(path).unwrap();
        (step, names)
    }
}

pub fn plain_options(create: Create) -> Options {
    Options::new()
        .create(create)
        .device(DeviceChoice::Host)
        .snapshots(SnapshotSchedule::never())
        .retention(Retention::new().snapshots_kept(1))
        .log(LogOptions::new().segment_len(64 << 10))
}

pub fn restore(url: &str, path: &Path) -> remanent_archive::Result<RestoredEnd> {
    let (bucket, target) = restore_target(url, path)?;
    let archive = Archive { bucket: &bucket, nonces: &SystemNonces, rules: Rules::default() };
    bucket.block_on(mirror::restore(archive, &target))
}

/// Restores an archive without the contents of image files.
pub fn restore_on_demand(url: &str, path: &Path) -> remanent_archive::Result<RestoredEnd> {
    let (bucket, target) = restore_target(url, path)?;
    let archive = Archive { bucket: &bucket, nonces: &SystemNonces, rules: Rules::default() };
    bucket.block_on(mirror::restore_on_demand(archive, &target))
}

fn restore_target(url: &str, path: &Path) -> remanent_archive::Result<(RemoteBucket, RestoreTarget)> {
    fs::create_dir_all(path).unwrap();
    let bucket = RemoteBucket::open(url, RemoteOptions::default()).unwrap();
    let lock = Box::new(EngineLock(DirDisk::new(path).lock().unwrap()));
    let target = RestoreTarget::open(path, lock).map_err(remanent_archive::Error::Local)?.url(url);
    Ok((bucket, target))
}

/// Restores the archive in the folder `bucket` of `root`, unless it was restored earlier, and archives one more step.
/// Checks the bytes of every page, and returns the step.
pub fn continue_restored(root: &Path) -> u64 {
    let (url, path) = (format!("file://{}", root.join("bucket").display()), root.join("restored"));
    if !path.join("STORE").exists() {
        restore(&url, &path).unwrap();
    }
    let archive = ArchiveOptions::new(url).interval(Duration::from_millis(1));
    let store = plain_options(Create::Never).archive(archive).open(&path).unwrap();
    archive_steps(&store, &pages(&store), 1);
    let step = check(&store);
    store.close().unwrap();
    step
}

/// Returns the pages in order of creation. Creates them if the store is new.
pub fn pages(store: &Store) -> Vec<PageId> {
    let mut pages: Vec<PageId> = store.pages().unwrap().map(|info| info.page).collect();
    if pages.is_empty() {
        let mut batch = store.batch();
        (0..SHORT_PAGES).for_each(|_| _ = batch.create(SHORT_LEN, Place::Host));
        batch.create(LONG_LEN, Place::Host);
        batch.set_root("step", 0_u64);
        pages = store.commit(batch).unwrap().pages;
    }
    pages
}

fn bytes(page: u64, step: u64, len: u64) -> Vec<u8> {
    if step == 0 {
        return vec![0; len as usize];
    }
    (0..len).map(|at| (at * 7 + step * 31 + page * 101 + (at >> 8)) as u8).collect()
}

/// Commits one step and returns its ticket.
pub fn step(store: &Store, pages: &[PageId]) -> remanent::Result<remanent::Ticket> {
    let step = step_of(store) + 1;
    let mut batch = store.batch();
    batch.write(pages[(step % SHORT_PAGES) as usize], 0, &bytes(step % SHORT_PAGES, step, SHORT_LEN));
    if step.is_multiple_of(LONG_EVERY) {
        batch.write(pages[SHORT_PAGES as usize], 0, &bytes(SHORT_PAGES, step, LONG_LEN));
    }
    batch.set_root("step", step);
    store.submit(batch)
}

/// Commits steps, and waits until the last one is archived.
pub fn archive_steps(store: &Store, pages: &[PageId], count: u64) {
    let mut last = None;
    (0..count).for_each(|_| last = Some(step(store, pages).unwrap()));
    last.unwrap().wait(Ack::Archived).unwrap();
}

pub fn step_of(store: &Store) -> u64 {
    let root = store.root().unwrap();
    match root.get("step") {
        Some(remanent::Value::U64(step)) => *step,
        found => panic!("{found:?}"),
    }
}

/// Asserts that every page has the bytes of the store's step. Returns the step.
pub fn check(store: &Store) -> u64 {
    let infos: Vec<_> = store.pages().unwrap().collect();
    check_pages(step_of(store), &infos, |page| store.read_to_vec(page).unwrap())
}

/// Asserts that every page of a view has the bytes of the view's step. Returns the step.
pub fn check_view(view: &View) -> u64 {
    let Some(remanent::Value::U64(now)) = view.root().get("step") else { panic!("{:?}", view.root()) };
    let infos: Vec<_> = view.pages().collect();
    check_pages(*now, &infos, |page| {
        let mut bytes = vec![0; view.page(page).unwrap().len as usize];
        view.read(page, 0, &mut bytes).unwrap();
        bytes
    })
}

/// Asserts that every page of a replica has the bytes of the replica's step. Returns the step.
pub fn check_replica(replica: &Replica) -> u64 {
    let Some(remanent::Value::U64(now)) = replica.root().get("step") else { panic!("{:?}", replica.root()) };
    let infos: Vec<_> = replica.pages().collect();
    check_pages(*now, &infos, |page| replica.bytes(page).unwrap().to_vec())
}

fn check_pages(now: u64, infos: &[PageInfo], read: impl Fn(PageId) -> Vec<u8>) -> u64 {
    let mut written: BTreeMap<u64, u64> = BTreeMap::new();
    for step in 1..=now {
        written.insert(step % SHORT_PAGES, step);
        if step.is_multiple_of(LONG_EVERY) {
            written.insert(SHORT_PAGES, step);
        }
    }
    assert_eq!(infos.len() as u64, SHORT_PAGES + 1);
    for (number, info) in infos.iter().enumerate() {
        let number = number as u64;
        let step = written.get(&number).copied().unwrap_or_default();
        let found = read(info.page);
        assert!(found == bytes(number, step, info.len), "page {number} at step {now}");
    }
    now
}

/// Returns all files below a directory, except LOCK, with their bytes.
pub fn files(directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path));
        } else if path.file_name().unwrap() != "LOCK" {
            found.insert(path.clone(), fs::read(&path).unwrap());
        }
    }
    found
}

#[expect(clippy::disallowed_methods, reason = "the archive follows by itself, and gives no signal")]
pub fn pause(time: Duration) {
    std::thread::sleep(time);
}

/// Copies a directory whose files may be created and removed concurrently.
pub fn copy_directory(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_directory(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}
