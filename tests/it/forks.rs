//! Forks are complete or absent, have the requested state, and are independent of their source.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use remanent::disk::Disk;
use remanent::error::{FileName, NoSuchState};
use remanent::options::{Create, Retention};
use remanent::testing::sim_disk::{CrashPlan, SimDisk};
use remanent::{Error, Lsn, PageId, Place, StatePoint, Store, View};

use crate::earlier_states::unlockable;
use crate::files::{Files, State, open, open_with, small};

const LEN: u64 = 3000;

/// Commits a batch that overwrites all pages.
fn rewrite(store: &Store, pages: &[PageId]) -> Lsn {
    let mut batch = store.batch();
    for page in pages {
        let byte = (page.0 * 16 + store.lsn().0) as u8;
        batch.fill(*page, 0, LEN, &[byte]);
    }
    batch.set_root("step", store.lsn().0);
    store.commit(batch).unwrap().position.lsn
}

/// Creates three pages and takes a snapshot of them. Then changes one of them and the root, and creates a
/// fourth page. Returns the last batch.
fn work(store: &Store) -> (Vec<PageId>, Lsn) {
    let mut batch = store.batch();
    for _ in 0..3 {
        batch.create(LEN, Place::Host);
    }
    let mut pages = store.commit(batch).unwrap().pages;
    rewrite(store, &pages);
    store.snapshot().unwrap();
    let mut batch = store.batch();
    batch.create(LEN, Place::Host);
    batch.create(0, Place::Host);
    pages.push(store.commit(batch).unwrap().pages[0]);
    (pages.clone(), rewrite(store, &pages[2..]))
}

fn at(disk: &SimDisk, lsn: Lsn) -> View {
    let disk: Arc<dyn Disk> = Arc::new(disk.clone());
    View::open_on(&disk, Some(&StatePoint::Lsn(lsn))).unwrap()
}

fn fork(old: &View, target: &SimDisk) -> Result<remanent::StoreId, Error> {
    old.fork_on(&(Arc::new(target.clone()) as Arc<dyn Disk>))
}

/// After a power cut during a fork, the files either contain no store, and the fork can be repeated, or the
/// complete fork. Tests forks with linked image files and with copied pages.
#[test]
fn fork_is_complete_or_absent() {
    let source = SimDisk::new();
    let store = open(&source).unwrap();
    let (pages, lsn) = work(&store);
    let expected = State::of(&store);
    rewrite(&store, &pages);
    let unlinkable = unlockable(&source);
    let copied = View::open_on(&unlinkable, Some(&StatePoint::Lsn(lsn))).unwrap();
    for (old, links) in [(at(&source, lsn), 1), (copied, 0)] {
        let target = SimDisk::new();
        let id = fork(&old, &target).unwrap();
        assert_eq!(target.history().iter().filter(|event| event.starts_with("link")).count(), links);
        let (mut whole, mut absent) = (0, 0);
        target.power_images(&CrashPlan::default(), |image| {
            match open_with(&image.disk, small().create(Create::Never)) {
                Ok(fork) => {
                    whole += 1;
                    assert_eq!((fork.id(), fork.lsn()), (id, lsn));
                    assert_eq!(State::of(&fork), expected);
                }
                Err(Error::NoStore { found: None, .. }) => {
                    absent += 1;
                    // Test only every seventh disk state, because they differ only in unsynced bytes.
                    if absent % 7 == 1 {
                        fork(&old, &image.disk).unwrap();
                        assert_eq!(State::of(&open(&image.disk).unwrap()), expected);
                    } else if absent % 7 == 2 {
                        assert_eq!(open(&image.disk).unwrap().lsn(), Lsn(0), "creation starts over");
                    }
                }
                Err(error) => panic!("{error}\n{:#?}", image.disk.history()),
            }
        });
        assert!(whole > 0 && absent > 20, "{whole} whole, {absent} absent");
    }
}

/// Until a fork is opened for writing, no frame records its snapshot as verified. This must not make its
/// images less reliable.
#[test]
fn lost_image_file_costs_new_fork_only_its_pages() {
    let source = SimDisk::new();
    let store = open(&source).unwrap();
    let (_, lsn) = work(&store);
    let expected = State::of(&store);
    let target = SimDisk::new();
    fork(&at(&source, lsn), &target).unwrap();
    let files = Files::of(&target).names(|file| matches!(file, FileName::Pages(_)));
    let lost = files[0];
    target.remove(lost).unwrap();
    let seen = at(&target, lsn);
    let (mut there, mut gone) = (0, 0);
    for (page, bytes) in &expected.contents {
        let mut found = vec![0; bytes.len()];
        match seen.read(*page, 0, &mut found) {
            Ok(_) => {
                assert_eq!(found, *bytes, "{page}");
                there += 1;
            }
            Err(Error::Damaged(damage)) => {
                assert_eq!(damage.file, lost, "{damage}");
                gone += 1;
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert!(there > 0 && gone > 0, "{there} there, {gone} gone");
}

#[test]
fn fork_is_independent_store() {
    let source = SimDisk::new();
    let store = open(&source).unwrap();
    let (pages, lsn) = work(&store);
    let expected = State::of(&store);
    let target = SimDisk::new();
    let id = fork(&at(&source, lsn), &target).unwrap();
    assert_ne!(id, store.id());

    let forked = open(&target).unwrap();
    assert_eq!((forked.id(), forked.lsn(), forked.recovered().created), (id, lsn, false));
    assert_eq!(State::of(&forked), expected);
    let of_source = rewrite(&store, &pages);
    let mut batch = forked.batch();
    batch.fill(pages[0], 0, LEN, &[0xff]).create(5, Place::Host);
    assert_eq!(forked.commit(batch).unwrap().position.lsn, of_source);
    forked.snapshot().unwrap();
    let now = State::of(&forked);
    assert_ne!(now, State::of(&store));
    drop(forked);
    let forked = open(&target).unwrap();
    assert_eq!(State::of(&forked), now);
    // No state before the fork can be restored.
    assert!(matches!(
        forked.restore(StatePoint::Lsn(Lsn(lsn.0 - 1))),
        Err(Error::NoSuchState(NoSuchState::OutsideWindow { .. }))
    ));
    forked.restore(StatePoint::Lsn(lsn)).unwrap();
    assert_eq!(State::of(&forked).contents, expected.contents);
}

#[test]
fn fork_into_nonempty_directory_is_refused() {
    let source = SimDisk::new();
    let store = open(&source).unwrap();
    let (_, lsn) = work(&store);
    let old = at(&source, lsn);
    let target = SimDisk::new();
    let other = open(&target).unwrap();
    rewrite(&other, &[]);
    // An open store would free space in the background.
    other.close().unwrap();
    let events = target.events();
    assert!(matches!(fork(&old, &target), Err(Error::NoStore { found: Some(_), .. })));
    assert_eq!(target.events(), events);
    assert!(matches!(fork(&old, &source), Err(Error::NoStore { found: Some(_), .. })));
}

/// Image files are shared until one of the stores removes them.
#[test]
fn a_fork_shares_image_files() {
    let directory = tempfile::tempdir().unwrap();
    let (path, first, second) =
        (directory.path().join("store"), directory.path().join("first"), directory.path().join("second"));
    let options = || small().retention(Retention::new().snapshots_kept(1));
    let store = options().open(&path).unwrap();
    let (pages, lsn) = work(&store);
    let expected = State::of(&store);
    store.fork(&first, StatePoint::Lsn(lsn)).unwrap();
    assert_eq!(links(&path).iter().max(), Some(&2));
    assert_eq!(links(&first), [2, 1], "shared images, and those of the pages that changed since");

    // A fork of the fork shares files with both stores.
    let forked = options().open(&first).unwrap();
    forked.fork(&second, StatePoint::Lsn(lsn)).unwrap();
    drop(forked);
    assert_eq!(links(&second), [3, 2]);

    // One store changes all pages and removes its snapshots. The other stores keep their states.
    for _ in 0..3 {
        rewrite(&store, &pages);
        store.snapshot().unwrap();
    }
    drop(store);
    assert_eq!(links(&second), [2, 2]);
    std::fs::remove_dir_all(&path).unwrap();
    std::fs::remove_dir_all(&first).unwrap();
    assert_eq!(links(&second), [1, 1]);
    assert_eq!(State::of(&options().open(&second).unwrap()), expected);
}

/// Returns the number of links of each image file of a store.
fn links(store: &Path) -> Vec<u64> {
    let mut files: Vec<_> =
        std::fs::read_dir(store.join("pages")).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "pages"));
    files.sort_unstable();
    files.iter().map(|path| std::fs::metadata(path).unwrap().nlink()).collect()
}
