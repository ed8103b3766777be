//! Stores whose directory is moved or removed while they are open, when another store is created at the same
//! path.

use std::path::Path;
use std::time::Duration;

use remanent::error::Remedy;
use remanent::follow::{FollowFrom, Follower};
use remanent::{Ack, Error, Lsn, PageId, Place, Retention, StatePoint, Store};

use crate::files::{State, small};

const LEN: u64 = 8 << 10;

/// Number of writes, whose bytes do not fit into the segments that a store has prepared.
const WRITES: u8 = 40;

fn open(path: &Path) -> Store {
    small().ack(Ack::Durable).open(path).unwrap()
}

fn create(store: &Store, byte: u8) -> PageId {
    let mut batch = store.batch();
    let page = batch.create(LEN, Place::Host).page();
    batch.write(page, 0, &[byte; LEN as usize]);
    store.commit(batch).unwrap().pages[0]
}

fn write(store: &Store, page: PageId, byte: u8) -> Result<(), Error> {
    let mut batch = store.batch();
    batch.write(page, 0, &[byte; LEN as usize]);
    store.commit(batch).map(drop)
}

/// Creates another store with its own state, and closes it.
fn made(path: &Path) -> State {
    made_with(path, 1)
}

/// Like [`made`], but with bytes from `first` on. An existing store gets another page.
fn made_with(path: &Path, first: u8) -> State {
    let store = open(path);
    let page = create(&store, first);
    for byte in first + 1..first + 5 {
        write(&store, page, byte).unwrap();
    }
    store.snapshot().unwrap();
    let state = State::of(&store);
    store.close().unwrap();
    state
}

#[test]
fn store_continues_in_moved_directory() {
    let above = tempfile::tempdir().unwrap();
    let (path, moved) = (above.path().join("store"), above.path().join("moved"));
    let store = open(&path);
    let page = create(&store, 0);
    std::fs::rename(&path, &moved).unwrap();
    let other = made(&path);
    for byte in 0..WRITES {
        write(&store, page, byte).unwrap();
        if byte % 16 == 0 {
            store.snapshot().unwrap();
        }
    }
    store.scrub().unwrap();
    let state = State::of(&store);
    assert_eq!(store.directory().unwrap(), Some(moved.canonicalize().unwrap()));
    store.close().unwrap();
    assert_eq!(State::of(&open(&path)), other);
    assert_eq!(State::of(&open(&moved)), state);
}

#[test]
fn view_follows_moved_directory() {
    let above = tempfile::tempdir().unwrap();
    let (path, moved) = (above.path().join("store"), above.path().join("moved"));
    let mine = made(&path);
    let view = Store::open_read_only(&path).unwrap();
    let earlier = Store::open_at(&path, StatePoint::Lsn(Lsn(2))).unwrap();
    std::fs::rename(&path, &moved).unwrap();
    // Test once without a directory at the old path, and once with another store there.
    for _ in 0..2 {
        for (page, bytes) in &mine.contents {
            let mut read = vec![0; bytes.len()];
            view.read(*page, 0, &mut read).unwrap();
            assert_eq!(read, *bytes);
            assert_eq!(view.blame(*page, 0..1).unwrap().len(), 5);
            earlier.read(*page, 0, &mut read).unwrap();
            assert_eq!(read, vec![2; bytes.len()]);
        }
        made_with(&path, 9);
    }
    // The files that the view needs are kept while the view exists.
    let store = open(&moved);
    write(&store, *mine.contents.keys().next().unwrap(), 7).unwrap();
    store.snapshot().unwrap();
    store.snapshot().unwrap();
    assert!(!store.prune(&Retention::default().snapshots_kept(1)).unwrap().held.is_empty());
}

#[test]
fn view_of_removed_directory_reports_missing_store() {
    let above = tempfile::tempdir().unwrap();
    let path = above.path().join("store");
    let mine = made(&path);
    let view = Store::open_read_only(&path).unwrap();
    std::fs::remove_dir_all(&path).unwrap();
    made_with(&path, 9);
    let page = *mine.contents.keys().next().unwrap();
    let read = view.read(page, 0, &mut [0; LEN as usize]).unwrap_err();
    let blamed = view.blame(page, 0..1).unwrap_err();
    for error in [read, blamed] {
        assert!(matches!(error, Error::NoStore { found: None, .. }), "{error}");
    }
}

#[test]
fn follower_detects_replaced_store() {
    let above = tempfile::tempdir().unwrap();
    let path = above.path().join("store");
    let store = open(&path);
    create(&store, 0);
    let mut follower = Follower::open(&path, FollowFrom::Beginning).unwrap();
    while follower.next(Duration::ZERO).unwrap().is_some() {}
    store.close().unwrap();
    std::fs::rename(&path, above.path().join("moved")).unwrap();
    made(&path);
    let error = follower.next(Duration::from_secs(60)).unwrap_err();
    assert!(matches!(error, Error::Diverged { .. }), "{error}");
}

#[test]
fn removed_store_directory_does_not_affect_others() {
    let above = tempfile::tempdir().unwrap();
    let path = above.path().join("store");
    let store = open(&path);
    let page = create(&store, 0);
    // Repeat, because the store may be creating a file.
    assert!((0..1000).any(|_| std::fs::remove_dir_all(&path).is_ok()));
    let other = made(&path);
    let error = (0..=255).find_map(|byte| write(&store, page, byte).err()).unwrap();
    assert_eq!(error.remedy(), Remedy::Reopen, "{error}");
    assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
    assert!(matches!(store.directory(), Err(Error::NoStore { found: None, .. })));
    store.close().unwrap_err();
    assert_eq!(State::of(&open(&path)), other);
}
