//! A test bed: stores of the engine, a simulated bucket, and the states that restores must return.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use remanent::disk::dir::DirDisk;
use remanent::disk::{Disk, DiskLock};
use remanent::options::{Create, DeviceChoice, LogOptions, SnapshotSchedule};
use remanent::{
    Metadata, Options, PageId, PageInfo, Place, Retention, SnapshotOptions, StatePoint, Store, View,
};
use remanent_archive::directory::{ArchivedDirectory, RestoreTarget, WriterLock};
use remanent_archive::line::{Archive, RestoredEnd, Takeover, status};
use remanent_archive::mirror::{self, Pushed};
use remanent_archive::object::{DataKey, LineObject, ObjectKey};
use remanent_archive::rules::Rules;
use remanent_archive::testing::bucket::SimBucket;
use remanent_archive::testing::rng::Rng;
use remanent_archive::testing::world::{SharedWorld, World};

/// The engine's writer lock.
struct EngineLock(#[expect(dead_code, reason = "held until it is dropped")] Box<dyn DiskLock>);

impl fmt::Debug for EngineLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EngineLock")
    }
}

impl WriterLock for EngineLock {}

pub fn lock(path: &Path) -> Box<dyn WriterLock> {
    Box::new(EngineLock(DirDisk::new(path).lock().expect("no process has the store open")))
}

/// A bucket without faults.
pub struct Bed {
    pub world: SharedWorld,
}

impl Bed {
    pub fn new(seed: u64) -> Self {
        let mut world = World::new(seed);
        world.is_calm = true;
        Self { world: Rc::new(RefCell::new(world)) }
    }

    /// Returns a copy of the bucket that draws other random numbers than the original.
    pub fn copy(&self) -> Self {
        let copy = Self::new(1);
        let mut world = self.world.borrow_mut();
        let drawn = world.draw();
        copy.world.borrow_mut().objects = world.objects.clone();
        while copy.world.borrow_mut().draw() <= drawn + 1_000 {}
        copy
    }

    pub fn bucket(&self) -> SimBucket {
        let process = self.world.borrow_mut().draw() as u32;
        SimBucket { world: self.world.clone(), process, machine: None, ignores_condition: false }
    }

    pub fn has(&self, key: ObjectKey) -> bool {
        self.world.borrow().objects.contains_key(&key)
    }

    /// Returns the positions and contents of the catalogs that list the files of kept snapshots, oldest first.
    fn catalogs(&self) -> Vec<(u64, LineObject)> {
        let bucket = self.bucket();
        let archive = Archive { bucket: &bucket, nonces: &bucket, rules: Rules::default() };
        let named = block_on(status(archive)).unwrap().named;
        let object = |position| {
            let bytes = self.world.borrow().objects.get(&ObjectKey::Line(position)).cloned();
            bytes.map(|bytes| LineObject::decode(&bytes, position, None).unwrap())
        };
        named.into_iter().filter_map(|kept| Some((kept.position, object(kept.position)?))).collect()
    }

    /// Returns the positions of these catalogs, oldest first.
    pub fn catalog_positions(&self) -> Vec<u64> {
        let bucket = self.bucket();
        let archive = Archive { bucket: &bucket, nonces: &bucket, rules: Rules::default() };
        block_on(status(archive)).unwrap().named.into_iter().map(|kept| kept.position).collect()
    }

    /// Returns the keys of the data objects of the oldest kept snapshot.
    pub fn data_of_catalog(&self) -> Vec<DataKey> {
        self.catalogs()[0].1.data.iter().map(|entry| entry.key).collect()
    }

    pub fn push(&self, path: &Path) -> remanent_archive::Result<Pushed> {
        self.push_with(path, Takeover::Refused)
    }

    pub fn push_taking_over(&self, path: &Path) -> remanent_archive::Result<Pushed> {
        self.push_with(path, Takeover::Permitted)
    }

    fn push_with(&self, path: &Path, takeover: Takeover) -> remanent_archive::Result<Pushed> {
        let bucket = self.bucket();
        let archive = Archive { bucket: &bucket, nonces: &bucket, rules: Rules::default() };
        let mut directory =
            ArchivedDirectory::open(path, lock(path)).map_err(remanent_archive::Error::Local)?;
        block_on(mirror::push(archive, &mut directory, takeover))
    }

    pub fn restore(&self, path: &Path) -> remanent_archive::Result<RestoredEnd> {
        fs::create_dir_all(path).unwrap();
        let bucket = self.bucket();
        let archive = Archive { bucket: &bucket, nonces: &bucket, rules: Rules::default() };
        let target = RestoreTarget::open(path, lock(path)).map_err(remanent_archive::Error::Local)?;
        block_on(mirror::restore(archive, &target))
    }

    /// Restores a copy of the bucket, and returns the state after the engine has opened the restored store.
    pub fn restored_state(&self) -> State {
        self.restored().0
    }

    /// Restores a copy of the bucket. Returns the state after the engine has opened the restored store, and the states
    /// of the named snapshots.
    pub fn restored(&self) -> (State, BTreeMap<String, State>) {
        let directory = tempfile::tempdir().unwrap();
        self.copy().restore(directory.path()).unwrap();
        // Named snapshots are read before the open, which could change the directory, and again after it.
        let before = named_states(directory.path());
        let state = open_state(directory.path());
        assert!(named_states(directory.path()) == before, "an open changes the named snapshots");
        (state, before)
    }
}

pub fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return output;
        }
    }
}

/// Polls a future at most `count` times. Returns `None` if it is not complete by then; the caller drops it.
pub fn poll_times<F: Future>(future: F, count: u32) -> Option<F::Output> {
    let mut future = pin!(future);
    for _ in 0..count {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return Some(output);
        }
    }
    None
}

/// The state of a store, as read by a caller.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    pub lsn: u64,
    pages: BTreeMap<PageId, (PageInfo, Vec<u8>)>,
    root: Arc<Metadata>,
}

pub fn state_of(store: &Store) -> State {
    let infos: Vec<PageInfo> = store.pages().unwrap().collect();
    let page = |info: PageInfo| (info.page, (info.clone(), store.read_to_vec(info.page).unwrap()));
    let pages: BTreeMap<_, _> = infos.into_iter().map(page).collect();
    for (info, _) in pages.values() {
        if let Some(key) = &info.key {
            assert_eq!(store.page_by_key(key).unwrap().page, info.page);
        }
    }
    State { lsn: store.lsn().0, pages, root: store.root().unwrap() }
}

/// Returns the state of each named snapshot.
pub fn named_states(path: &Path) -> BTreeMap<String, State> {
    let copy = tempfile::tempdir().unwrap();
    copy_directory(path, copy.path());
    let store = options(Create::Never).open(copy.path()).unwrap();
    let names: Vec<String> = store.snapshots().into_iter().filter_map(|info| info.name).collect();
    store.close().unwrap();
    names.into_iter().map(|name| (name.clone(), state_at(path, &name))).collect()
}

fn state_at(path: &Path, name: &str) -> State {
    State::of_view(&Store::open_at(path, StatePoint::Name(name.to_owned())).unwrap())
}

impl State {
    pub fn of_view(view: &View) -> Self {
        let page = |info: PageInfo| {
            let mut bytes = vec![0; info.len as usize];
            view.read(info.page, 0, &mut bytes).unwrap();
            (info.page, (info, bytes))
        };
        Self { lsn: view.lsn().0, pages: view.pages().map(page).collect(), root: view.root().clone() }
    }
}

pub fn options(create: Create) -> Options {
    Options::new()
        .create(create)
        .device(DeviceChoice::Host)
        .snapshots(SnapshotSchedule::never())
        .retention(Retention::new().snapshots_kept(1))
        .log(LogOptions::new().segment_len(64 << 10))
}

pub fn open(path: &Path) -> Store {
    options(Create::IfEmpty).open(path).unwrap()
}

/// Opens a restored store and returns its state. The open must not find damage.
pub fn open_state(path: &Path) -> State {
    let store = options(Create::Never).open(path).unwrap();
    assert_eq!(store.recovered().torn, None);
    assert_eq!(store.recovered().harmless, []);
    let state = state_of(&store);
    store.close().unwrap();
    state
}

/// Copies a directory in the state that a crash of the process would leave. If files are created, renamed or removed
/// concurrently, copies it again.
pub fn copy_directory(from: &Path, to: &Path) {
    loop {
        let before = names(from);
        let copied = try_copy(from, to);
        if before.is_ok() && before.as_ref().ok() == names(from).as_ref().ok() && copied.is_ok() {
            return;
        }
        fs::remove_dir_all(to).unwrap();
    }
}

/// Returns the paths of all files in a directory.
fn names(directory: &Path) -> io::Result<BTreeSet<PathBuf>> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            found.extend(names(&entry.path())?);
        }
        found.insert(entry.path());
    }
    Ok(found)
}

fn try_copy(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            try_copy(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}

/// A store directory, and the states after each batch.
pub struct Life {
    root: tempfile::TempDir,
    copies: u32,
    pub path: PathBuf,
    pub rng: Rng,
    pub states: BTreeMap<u64, State>,
    /// The current names, and the batch of each named snapshot.
    pub names: BTreeMap<String, u64>,
}

impl Life {
    pub fn new(seed: u64) -> Self {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("store");
        Self { root, copies: 0, path, rng: Rng::new(seed), states: BTreeMap::new(), names: BTreeMap::new() }
    }

    /// Opens the store, commits `batches` batches, and returns the open store.
    pub fn work(&mut self, batches: usize) -> Store {
        let store = open(&self.path);
        self.note(&store);
        for _ in 0..batches {
            self.commit(&store);
        }
        store
    }

    /// Takes a named snapshot.
    pub fn name(&mut self, store: &Store, name: &str) {
        let taken = store.snapshot_with(SnapshotOptions::new().name(name)).unwrap();
        self.names.insert(name.to_owned(), taken.end.0);
    }

    /// Gives up a name.
    pub fn give_up(&mut self, store: &Store, name: &str) {
        store.prune(&store.retention().give_up(name)).unwrap();
        // The newest snapshot and its name are always kept.
        if store.snapshots().iter().all(|info| info.name.as_deref() != Some(name)) {
            self.names.remove(name);
        }
    }

    /// Asserts that `restored` contains exactly the current names, each with the state of its batch.
    pub fn check_names(&self, restored: &BTreeMap<String, State>, what: &str) {
        assert_eq!(restored.keys().collect::<Vec<_>>(), self.names.keys().collect::<Vec<_>>(), "{what}");
        for (name, state) in restored {
            assert_eq!(state.lsn, self.names[name], "{what}: {name}");
            assert!(*state == self.states[&state.lsn], "{what}: {name} has another state");
        }
    }

    pub fn note(&mut self, store: &Store) {
        let state = state_of(store);
        if let Some(known) = self.states.get(&state.lsn) {
            assert_eq!(known, &state, "lsn {} has one state", state.lsn);
        }
        self.states.insert(state.lsn, state);
    }

    /// Commits a random batch, or restores an earlier state of the store.
    fn commit(&mut self, store: &Store) {
        let pages: Vec<PageInfo> = store.pages().unwrap().collect();
        let lsns: Vec<u64> = self.states.keys().copied().collect();
        if lsns.len() > 3 && self.rng.chance(0.06) {
            let lsn = self.rng.choice(&lsns[lsns.len() - 3..]);
            if store.restore(StatePoint::Lsn(remanent::Lsn(lsn))).is_ok() {
                return self.note(store);
            }
        }
        let mut batch = store.batch();
        for _ in 0..=self.rng.below(3) {
            let place = self.rng.choice(&[Place::Host, Place::Host, Place::Disk]);
            let len = self.rng.choice(&[0, 1, 100, 5_000, 40_000]);
            let bytes: Vec<u8> = (0..len).map(|_| self.rng.draw() as u8).collect();
            let page = (!pages.is_empty()).then(|| pages[self.rng.below(pages.len())].page);
            match (page, self.rng.below(7)) {
                (Some(page), 0) if len > 0 && store.page(page).unwrap().len >= len as u64 => {
                    batch.write(page, 0, &bytes);
                }
                (Some(page), 1) if pages.len() > 4 => {
                    batch.delete(page);
                    break;
                }
                (Some(page), 2) => {
                    batch.resize(page, self.rng.below(9_000) as u64);
                    break;
                }
                (Some(page), 3) => {
                    batch.set_metadata(page, "note", self.rng.draw());
                }
                (Some(page), 4) => {
                    batch.move_to(page, place);
                    break;
                }
                (_, 5) => {
                    let key = format!("key {}", self.rng.draw());
                    batch.create_from(bytes, place).key(&key);
                }
                _ => {
                    batch.create_from(bytes, place);
                }
            }
        }
        batch.set_root("step", self.rng.draw());
        store.commit(batch).unwrap();
        self.note(store);
    }

    /// Continues with a copy of the directory, as after a crash of the process.
    pub fn crash(&mut self, store: Store) {
        self.copies += 1;
        let copy = self.root.path().join(format!("copy-{}", self.copies));
        copy_directory(&self.path, &copy);
        store.close().unwrap();
        self.path = copy;
    }
}
