//! The checks after a kill: the store, named snapshots, and forks.

use std::ops::RangeInclusive;
use std::path::Path;

use remanent::disk::dir::DirReader;
use remanent::snapshot::SnapshotInfo;
use remanent::{Lsn, Metadata, PageInfo, Place, StatePoint, Store};

use super::diary::Entry;
use super::model::State;
use super::{Ground, tiers};

impl Ground {
    /// Checks the directory after a kill with the pure rebuild, which reads the directory itself, and with
    /// the engine, which opens a copy, so that the next worker recovers from the same crash.
    pub fn check_what_is_left(&mut self, killed: &str) {
        let at = format!("killed {killed}, in {}", self.directory.display());
        let left = self.directory.join("store");
        let copy = tempfile::tempdir().unwrap();
        // A worker that was killed early enough has not created the fork.
        if left.exists() {
            copy_folder(&left, copy.path());
        }
        let certain = self.board.acknowledged()..=self.board.begun();
        let store = self.check_opening(copy.path(), certain, &at);
        let diary = self.diary.read();
        self.check_names(&diary, &store.snapshots(), copy.path(), &at);
        self.check_forks(&at);
    }

    /// Rebuilds and opens the store in a directory. Both results must have the model's state, and their last
    /// batch must be in the range `certain`.
    pub fn check_opening(&mut self, path: &Path, certain: RangeInclusive<Lsn>, at: &str) -> Store {
        // Without STORE, there is no store to rebuild.
        let rebuilt = path.join("STORE").exists().then(|| {
            let rebuilt =
                remanent_format::state::rebuild::rebuild(&DirReader::new(path), &Default::default());
            rebuilt.unwrap_or_else(|error| panic!("{error}, {at}"))
        });
        let store = self.manner.options(path).open(path).unwrap_or_else(|error| panic!("{error}, {at}"));
        let lsn = self.number_of(&store);
        let (acknowledged, begun) = (certain.start(), certain.end());
        assert!(*acknowledged <= lsn, "{acknowledged} was acknowledged, {lsn} recovered; {at}");
        assert!(lsn <= *begun, "{begun} was begun, {lsn} recovered; {at}");
        assert!(self.model.lsn <= lsn, "{} was there before, {lsn} now; {at}", self.model.lsn);
        if let (true, Some(highest)) = (self.manner.has_tiers, store.pages().unwrap().last()) {
            self.model.number_by(lsn, highest.page);
        }
        self.model.advance(lsn);
        if let Some(rebuilt) = rebuilt {
            let (table, contents) = (rebuilt.table, rebuilt.contents);
            if self.manner.has_tiers {
                tiers::check_places(&table, &store, self.board.moved(), at);
            } else {
                assert_eq!(table.lsn(), lsn, "{at}");
            }
            let read = |info: &PageInfo| contents[&info.page].clone();
            check_state(&self.model.state, table.pages(), table.root(), read, at);
        }
        self.check_store(&store, at);
        store
    }

    /// Asserts that an open store is in the model's state.
    pub fn check_store(&self, store: &Store, at: &str) {
        assert_eq!(self.number_of(store), self.model.lsn, "{at}");
        check_open(&self.model.state, store, at);
    }

    /// Returns the number of a store's newest batch in the workload.
    fn number_of(&self, store: &Store) -> Lsn {
        if self.manner.has_tiers { tiers::number(&store.root().unwrap()) } else { store.lsn() }
    }

    /// Asserts that every name in the diary that is not being released has its snapshot, with the state of
    /// its batch.
    pub fn check_names(&mut self, diary: &[Entry], snapshots: &[SnapshotInfo], path: &Path, at: &str) {
        let stays = |name: &str| {
            let given_up = Entry::GiveUp { name: name.to_owned() };
            !diary.contains(&given_up)
        };
        for entry in diary {
            let Entry::Named { name, end } = entry else { continue };
            if !stays(name) {
                continue;
            }
            let found = snapshots.iter().find(|info| info.name.as_ref() == Some(name));
            let found = found.unwrap_or_else(|| panic!("the snapshot {name:?} is gone, {at}"));
            assert_eq!((found.end, found.redo), (*end, *end), "{at}");
            let Some(state) = self.model.at(*end) else { continue };
            let old = Store::open_at(path, StatePoint::Name(name.clone()))
                .unwrap_or_else(|error| panic!("{error}, {at}"));
            let read = |info: &PageInfo| {
                let mut bytes = vec![0; info.len as usize];
                old.read(info.page, 0, &mut bytes).unwrap();
                bytes
            };
            check_state(state, old.pages(), old.root(), read, at);
            self.names += 1;
        }
    }

    /// Asserts that every fork reported as complete exists, and that each existing fork is complete. Then
    /// removes the forks.
    fn check_forks(&mut self, at: &str) {
        let forks = self.directory.join("forks");
        let diary = self.diary.read();
        let told = diary[self.diary_checked..].iter().filter_map(|entry| match entry {
            Entry::Forked { lsn } => Some(*lsn),
            _ => None,
        });
        for lsn in told {
            assert!(forks.join(lsn.to_string()).join("STORE").exists(), "the fork at {lsn} is gone, {at}");
        }
        self.diary_checked = diary.len();
        let Ok(made) = std::fs::read_dir(&forks) else { return };
        for fork in made.map(|entry| entry.unwrap().path()).filter(|path| path.join("STORE").exists()) {
            let lsn = Lsn(fork.file_name().unwrap().to_str().unwrap().parse().unwrap());
            let store = self
                .manner
                .options(&fork)
                .open(&fork)
                .unwrap_or_else(|error| panic!("the fork at {lsn}: {error}, {at}"));
            assert_eq!(store.lsn(), lsn, "{at}");
            // The state may be too old for the model to have kept it.
            if let Some(state) = self.model.at(lsn) {
                check_open(state, &store, at);
                self.forks += 1;
            }
        }
        std::fs::remove_dir_all(&forks).unwrap();
    }
}

/// Asserts that an open store is in this state.
pub fn check_open(state: &State, store: &Store, at: &str) {
    let read = |info: &PageInfo| {
        let mut bytes = vec![0; info.len as usize];
        store.read(info.page, 0, &mut bytes).unwrap();
        bytes
    };
    check_state(state, store.pages().unwrap(), &store.root().unwrap(), read, at);
}

fn check_state(
    state: &State,
    pages: impl Iterator<Item = PageInfo>,
    root: &Metadata,
    read: impl Fn(&PageInfo) -> Vec<u8>,
    at: &str,
) {
    let told = |mut info: PageInfo| {
        if state.is_tiered {
            (info.place, info.lsn) = (Place::Host, Lsn(0));
        }
        info
    };
    let expected = state.pages.values().map(|(info, _)| told(info.clone()));
    assert!(pages.map(told).eq(expected), "another page table, {at}");
    assert_eq!(root, &state.root, "{at}");
    for (info, bytes) in state.pages.values() {
        assert!(read(info) == **bytes, "page {} differs, {at}", info.page);
    }
}

pub fn copy_folder(source: &Path, target: &Path) {
    for entry in std::fs::read_dir(source).unwrap() {
        let entry = entry.unwrap();
        let target = target.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            std::fs::create_dir(&target).unwrap();
            copy_folder(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}
