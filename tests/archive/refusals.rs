//! Directories that must not continue an archive, and calls that need an archive.

use std::fs;
use std::path::Path;
use std::time::Duration;

use remanent::error::ArchiveErrorKind;
use remanent::options::Create;
use remanent::{Ack, Error, SnapshotOptions, Store};

use crate::bed::{Bed, archive_steps, check, copy_directory, files, pages, pause, plain_options, step};

fn kind(error: &Error) -> ArchiveErrorKind {
    match error {
        Error::Archive(archive) => archive.kind,
        Error::Poisoned(cause) => kind(cause),
        error => panic!("{error:?}"),
    }
}

fn assert_refused(bed: &Bed, path: &Path, expected: ArchiveErrorKind) {
    let before = (files(path), files(&bed.bucket()));
    let error = bed.options().open(path).unwrap_err();
    assert_eq!(kind(&error), expected, "{error}");
    assert!(before == (files(path), files(&bed.bucket())), "the refused open has changed something");
}

#[test]
fn older_copy_of_directory_is_refused() {
    let bed = Bed::new();
    let store = bed.open();
    let created = pages(&store);
    archive_steps(&store, &created, 3);
    store.close().unwrap();
    copy_directory(&bed.store(), &bed.path("copy"));
    let store = bed.open();
    archive_steps(&store, &created, 3);
    store.close().unwrap();
    assert_refused(&bed, &bed.path("copy"), ArchiveErrorKind::Diverged);
    assert_eq!(bed.restored_step("restored"), 6);
}

#[test]
fn superseded_store_acknowledges_nothing_and_serves_reads() {
    let bed = Bed::new();
    let store = bed.open();
    let created = pages(&store);
    archive_steps(&store, &created, 5);
    bed.restore("successor").unwrap();
    let successor = bed.options().open(bed.path("successor")).unwrap();
    let error = step(&store, &created).unwrap().wait(Ack::Archived).unwrap_err();
    assert_eq!(kind(&error), ArchiveErrorKind::Superseded, "{error}");
    let mut error = None;
    for _ in 0..1000 {
        match step(&store, &created) {
            Ok(_) => pause(Duration::from_millis(5)),
            Err(refused) => {
                error = Some(refused);
                break;
            }
        }
    }
    assert_eq!(kind(&error.expect("commits are refused")), ArchiveErrorKind::Superseded);
    check(&store);
    drop(store);
    archive_steps(&successor, &pages(&successor), 4);
    assert_eq!(bed.restored_step("restored"), 9);
    successor.close().unwrap();
    assert_refused(&bed, &bed.store(), ArchiveErrorKind::Diverged);
}

#[test]
fn other_stores_are_refused() {
    let bed = Bed::new();
    let store = bed.open();
    archive_steps(&store, &pages(&store), 2);
    store.close().unwrap();
    let other = bed.path("other");
    let store = plain_options(Create::IfEmpty).open(&other).unwrap();
    pages(&store);
    store.close().unwrap();
    assert_refused(&bed, &other, ArchiveErrorKind::OtherStore);
    // No store is created in the directory, because its archive belongs to another store.
    let new = bed.path("new");
    let error = bed.options().open(&new).unwrap_err();
    assert_eq!(kind(&error), ArchiveErrorKind::OtherStore, "{error}");
    assert!(Store::open_read_only(&new).is_err());
}

#[test]
fn lost_archive_is_refused() {
    let bed = Bed::new();
    let store = bed.open();
    archive_steps(&store, &pages(&store), 2);
    store.close().unwrap();
    for folder in ["line", "data", "bound"] {
        let _ = fs::remove_dir_all(bed.bucket().join(folder)); // The folder `bound` may be missing.
    }
    assert_refused(&bed, &bed.store(), ArchiveErrorKind::Lost);
}

/// A copy of the directory has recorded the newest fence and contains all batches, but lacks a named snapshot of the
/// archive.
#[test]
fn copy_without_named_snapshot_is_refused() {
    let bed = Bed::new();
    let store = bed.open();
    let created = pages(&store);
    archive_steps(&store, &created, 3);
    copy_directory(&bed.store(), &bed.path("copy"));
    let named = store.snapshot_with(SnapshotOptions::new().name("a")).unwrap();
    assert!(store.wait_archived(named.id, None).unwrap());
    drop(store);
    assert_refused(&bed, &bed.path("copy"), ArchiveErrorKind::Diverged);
    assert_eq!(bed.restored_names("restored").len(), 1);
    // A takeover removes the named snapshot.
    let archive = bed.archive().takeover(true);
    let copy = plain_options(Create::Never).archive(archive).open(bed.path("copy")).unwrap();
    assert_eq!(bed.restored_names("restored").len(), 0);
    let named = copy.snapshot_with(SnapshotOptions::new().name("b")).unwrap();
    assert!(copy.wait_archived(named.id, None).unwrap());
    assert_eq!(bed.restored_names("restored"), [("b".to_owned(), 3)].into());
}

/// A directory that is archived while it is open cannot be opened without its archive. The same applies to a directory
/// that was restored from such an archive.
#[test]
fn open_without_archive_of_directory_is_refused() {
    let bed = Bed::new();
    let store = bed.open();
    archive_steps(&store, &pages(&store), 3);
    store.close().unwrap();
    bed.restore("restored").unwrap();
    for path in [bed.store(), bed.path("restored")] {
        let before = files(&path);
        let error = plain_options(Create::IfEmpty).open(&path).unwrap_err();
        assert_eq!(kind(&error), ArchiveErrorKind::NotGiven, "{error}");
        assert!(error.to_string().contains(&bed.url()), "{error}");
        assert!(before == files(&path), "the refused open has changed something");
        // A read-only open needs no archive, and a fork is a new store without an archive.
        let view = Store::open_read_only(&path).unwrap();
        let fork = bed.path(&format!("{}-fork", path.file_name().unwrap().display()));
        view.fork(&fork).unwrap();
        let fork = plain_options(Create::Never).open(&fork).unwrap();
        assert_eq!(check(&fork), 3);
    }
    let store = bed.options().open(bed.path("restored")).unwrap();
    archive_steps(&store, &pages(&store), 1);
}

#[test]
fn calls_without_archive_are_refused() {
    let bed = Bed::new();
    let error = plain_options(Create::IfEmpty).ack(Ack::Archived).open(bed.store()).unwrap_err();
    assert_eq!(kind(&error), ArchiveErrorKind::NoArchive, "{error}");
    let store = plain_options(Create::IfEmpty).open(bed.store()).unwrap();
    let ticket = step(&store, &pages(&store)).unwrap();
    for error in [ticket.wait(Ack::Archived).unwrap_err(), ticket.is_acknowledged(Ack::Archived).unwrap_err()]
    {
        assert_eq!(kind(&error), ArchiveErrorKind::NoArchive, "{error}");
    }
}

#[test]
fn unusable_urls_are_refused() {
    let bed = Bed::new();
    for url in ["", "ftp://host/path", "s3://", "file:///no/such/folder", "s3://user:secret@bucket/path"] {
        let archive = remanent::options::ArchiveOptions::new(url);
        let error = plain_options(Create::IfEmpty).archive(archive).open(bed.store()).unwrap_err();
        assert_eq!(kind(&error), ArchiveErrorKind::Settings, "{url}: {error}");
        assert!(!error.to_string().contains("secret"), "{error}");
    }
}
