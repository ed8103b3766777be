//! Views of archives, without a restore.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use remanent::error::{ArchiveErrorKind, FileName, NoSuchState};
use remanent::options::{ArchiveOptions, Create};
use remanent::{Error, Lsn, SnapshotOptions, StatePoint, View};

use crate::bed::{Bed, archive_steps, check, check_view, files, pages, plain_options, step, step_of};

/// Commits steps to a store without an archive, takes a snapshot, and pushes the closed store.
fn push_steps(bed: &Bed, count: u64, name: Option<&str>) {
    let store = plain_options(Create::IfEmpty).open(bed.store()).unwrap();
    let pages = pages(&store);
    (0..count).for_each(|_| _ = step(&store, &pages).unwrap());
    let options = SnapshotOptions::new();
    store.snapshot_with(if let Some(name) = name { options.name(name) } else { options }).unwrap();
    store.close().unwrap();
    bed.push();
}

fn kind(error: &Error) -> ArchiveErrorKind {
    match error {
        Error::Archive(archive) => archive.kind,
        error => panic!("{error:?}"),
    }
}

/// Reads every page, and returns the first error.
fn read_all(view: &View) -> Result<(), Error> {
    view.pages().try_for_each(|info| view.read(info.page, 0, &mut vec![0; info.len as usize]))
}

/// Returns the data objects that a view of the newest state fetches when a page is read, and not when the view is
/// opened.
fn image_objects(bed: &Bed) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut images = files(&bed.bucket().join("data"));
    images.retain(|path, bytes| {
        fs::remove_file(path).unwrap();
        let is_image = View::open_archive(&bed.archive()).is_ok_and(|view| read_all(&view).is_err());
        fs::write(path, bytes).unwrap();
        is_image
    });
    images
}

#[test]
fn view_shows_newest_and_earlier_states() {
    let bed = Bed::new();
    let store = bed.open();
    let created = pages(&store);
    let mut steps = BTreeMap::new();
    for _ in 0..12 {
        archive_steps(&store, &created, 1);
        steps.insert(store.lsn(), step_of(&store));
    }
    let named = store.snapshot_with(SnapshotOptions::new().name("best")).unwrap();
    assert!(store.wait_archived(named.id, None).unwrap());
    archive_steps(&store, &created, 3);
    let (id, newest) = (store.id(), store.lsn());
    let view = View::open_archive(&bed.archive()).unwrap();
    assert_eq!((check_view(&view), view.id(), view.lsn()), (15, id, newest));
    // The writer continues, and the view still shows the same state.
    archive_steps(&store, &created, 1);
    assert_eq!(check_view(&view), 15);
    store.close().unwrap();

    let before = files(&bed.bucket());
    for (lsn, step) in &steps {
        let view = View::open_archive_at(&bed.archive(), StatePoint::Lsn(*lsn)).unwrap();
        assert_eq!((check_view(&view), view.lsn()), (*step, *lsn));
    }
    let first = View::open_archive_at(&bed.archive(), StatePoint::Lsn(Lsn(0))).unwrap();
    assert_eq!((first.pages().len(), first.lsn()), (0, Lsn(0)));
    for point in ["name:best".to_owned(), format!("snapshot:{}", named.id)] {
        assert_eq!(check_view(&View::open_archive_at(&bed.archive(), point.as_str()).unwrap()), 12);
    }
    View::open_archive(&bed.archive()).unwrap().prove_pages(&created).unwrap();
    assert!(before == files(&bed.bucket()), "a view has changed the archive");
    archive_steps(&bed.open(), &created, 1);
}

#[test]
fn states_outside_the_archive_are_refused() {
    let bed = Bed::new();
    let refused = |point: &str| View::open_archive_at(&bed.archive(), point).unwrap_err();
    let empty = View::open_archive(&bed.archive()).unwrap_err();
    assert_eq!(kind(&empty), ArchiveErrorKind::Lost, "{empty}");
    push_steps(&bed, 4, Some("first"));
    for _ in 0..3 {
        push_steps(&bed, 2, None);
    }
    let newest = View::open_archive(&bed.archive()).unwrap().lsn();
    let error = refused("name:frist");
    assert!(error.to_string().contains("\"first\""), "{error}");
    let error = refused("snapshot:77");
    assert!(matches!(error, Error::NoSuchState(NoSuchState::Snapshot { .. })), "{error:?}");
    for lsn in [1, newest.0 + 1] {
        let error = refused(&format!("lsn:{lsn}"));
        let Error::NoSuchState(NoSuchState::OutsideWindow { requested, oldest, newest: last, below }) =
            &error
        else {
            panic!("{error:?}");
        };
        assert_eq!((requested.0, *last), (lsn, newest), "{error}");
        assert!(*oldest > Lsn(5) && *oldest <= newest, "{error}");
        if lsn == 1 {
            assert_eq!(below, &[Lsn(5)], "{error}");
            assert_eq!(check_view(&View::open_archive_at(&bed.archive(), "lsn:5").unwrap()), 4);
        }
    }
    let error = View::open_archive(&ArchiveOptions::new("ftp://host/path")).unwrap_err();
    assert_eq!(kind(&error), ArchiveErrorKind::Settings, "{error}");
}

#[test]
fn images_are_fetched_when_they_are_read() {
    let bed = Bed::new();
    push_steps(&bed, 8, None);
    push_steps(&bed, 1, None);
    assert!(image_objects(&bed).len() > 1);
    let view = View::open_archive(&bed.archive()).unwrap();
    fs::rename(bed.bucket().join("data"), bed.path("away")).unwrap();
    let error = read_all(&view).unwrap_err();
    assert_eq!(kind(&error), ArchiveErrorKind::Damaged, "{error}");
    // The next read tries again.
    fs::rename(bed.path("away"), bed.bucket().join("data")).unwrap();
    assert_eq!(check_view(&view), 9);
    // Pages that were read stay readable without the bucket.
    fs::rename(bed.bucket(), bed.path("away")).unwrap();
    assert_eq!(check_view(&view), 9);
    let error = View::open_archive(&bed.archive()).unwrap_err();
    assert_eq!(kind(&error), ArchiveErrorKind::Settings, "{error}");
}

#[test]
fn missing_and_damaged_images_are_named() {
    let bed = Bed::new();
    push_steps(&bed, 8, None);
    push_steps(&bed, 1, None);
    let images = image_objects(&bed);
    assert!(!images.is_empty());
    for (path, bytes) in images {
        let name = path.file_name().unwrap().to_str().unwrap();
        let view = View::open_archive(&bed.archive()).unwrap();
        let mut flipped = bytes.clone();
        *flipped.last_mut().unwrap() ^= 1;
        fs::write(&path, flipped).unwrap();
        let error = read_all(&view).unwrap_err();
        assert_eq!(kind(&error), ArchiveErrorKind::Damaged, "{error}");
        assert!(error.to_string().contains(name), "{error}");
        fs::remove_file(&path).unwrap();
        let error = read_all(&view).unwrap_err();
        assert_eq!(kind(&error), ArchiveErrorKind::Damaged, "{error}");
        assert!(error.to_string().contains(name) && error.to_string().contains("missing"), "{error}");
        fs::write(&path, bytes).unwrap();
        assert_eq!(check_view(&view), 9);
    }
}

/// Boundaries pass the state of an open view, and its images are deleted.
#[test]
fn images_behind_a_boundary_are_overtaken() {
    let bed = Bed::new();
    push_steps(&bed, 8, Some("kept"));
    push_steps(&bed, 4, None);
    let named = View::open_archive_at(&bed.archive(), "name:kept").unwrap();
    let view = View::open_archive(&bed.archive()).unwrap();
    let (read, lsn) = (View::open_archive(&bed.archive()).unwrap(), view.lsn());
    assert_eq!(check_view(&read), 12);
    for _ in 0..4 {
        push_steps(&bed, 12, None);
    }
    let error = read_all(&view).unwrap_err();
    assert!(matches!(error, Error::Overtaken { lsn: found, .. } if found == lsn), "{error:?}");
    // Images that were read before, and images that the archive keeps, are still readable.
    assert_eq!(check_view(&read), 12);
    assert_eq!(check_view(&named), 8);
    assert_eq!(check_view(&View::open_archive(&bed.archive()).unwrap()), 60);
}

/// Views are read in an asynchronous context, in which blocking on another runtime would panic.
#[test]
fn views_can_be_read_within_async_runtime() {
    let bed = Bed::new();
    push_steps(&bed, 7, None);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
    runtime.block_on(async {
        let view = View::open_archive(&bed.archive()).unwrap();
        assert_eq!(check_view(&view), 7);
    });
}

#[test]
fn fork_of_a_view_is_an_independent_store() {
    let bed = Bed::new();
    let id = {
        push_steps(&bed, 7, Some("seven"));
        push_steps(&bed, 6, None);
        let view = View::open_archive_at(&bed.archive(), "name:seven").unwrap();
        let id = view.fork(bed.path("fork")).unwrap();
        assert_ne!(id, view.id());
        id
    };
    let store = plain_options(Create::Never).open(bed.path("fork")).unwrap();
    assert_eq!((check(&store), store.id()), (7, id));
}

/// Returns the number of folders in the temporary folder of the system that contain the bed's store.
fn temporary_folders(bed: &Bed) -> usize {
    let record = |path: PathBuf| fs::read(path.join(FileName::Store.name())).ok();
    let own = record(bed.store());
    let folders = fs::read_dir(std::env::temp_dir()).unwrap();
    folders.filter(|entry| entry.as_ref().is_ok_and(|entry| record(entry.path()) == own)).count()
}

#[test]
fn dropped_view_removes_its_files() {
    let bed = Bed::new();
    push_steps(&bed, 7, None);
    let view = View::open_archive(&bed.archive()).unwrap();
    check_view(&view);
    assert_eq!(temporary_folders(&bed), 1);
    drop(view);
    assert_eq!(temporary_folders(&bed), 0);
    // A view that cannot be opened removes its files too.
    fs::remove_dir_all(bed.bucket().join("data")).unwrap();
    let error = View::open_archive(&bed.archive()).unwrap_err();
    assert_eq!(kind(&error), ArchiveErrorKind::Damaged, "{error}");
    assert_eq!(temporary_folders(&bed), 0);
}
