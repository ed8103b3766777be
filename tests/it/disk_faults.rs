//! An error of a real file system is reported with the file, the offset and the system's message.

use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::sync::Arc;

use crate::with_options::With;
use remanent::device::host::HostDevice;
use remanent::disk::dir::{DirDisk, DirReader};
use remanent::disk::{Disk, DiskFile};
use remanent::error::{FileName, Folder, IoObject, Remedy};
use remanent::options::{Create, LogIo, LogOptions};
use remanent::testing::sim_disk::{DiskFault, Operation, SimDisk};
use remanent::{Error, Options, Place, Result, SnapshotOptions, StatePoint, Store, View};
use remanent_format::ReadAt;
use rustix::thread::CapabilitySet;

const SEGMENT: FileName = FileName::Segment(3);

fn with_folders() -> (tempfile::TempDir, DirDisk) {
    let directory = tempfile::tempdir().unwrap();
    let disk = DirDisk::new(directory.path().join("store"));
    for folder in [Folder::Root].into_iter().chain(Folder::INNER) {
        disk.make_folder(folder).unwrap();
    }
    (directory, disk)
}

/// Checks that the call failed on this file, with this error, at this offset.
#[track_caller]
fn refused<T>(result: Result<T>, file: FileName, offset: Option<u64>, kind: ErrorKind) {
    let error = result.map(drop).unwrap_err();
    let Error::Io { source, .. } = &error else { panic!("not an error of a file: {error}") };
    assert_eq!((error.file(), error.offset(), source.kind()), (Some(file), offset, kind), "{error}");
    assert!(error.to_string().contains(&file.to_string()), "{error}");
}

/// Checks that the call failed on this folder, with this error.
#[track_caller]
fn folder_refused<T>(result: Result<T>, folder: &Path, reason: ErrorKind) {
    match result.map(drop).unwrap_err() {
        Error::Io { object: IoObject::Folder { path }, source, .. } => {
            assert_eq!((Path::new(&path), source.kind()), (folder, reason));
        }
        other => panic!("not an error of a folder: {other}"),
    }
}

/// Runs `test` in a thread that is subject to file permissions, even if the user is root.
fn as_ordinary_user(test: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        let ordinary = scope.spawn(|| {
            let mut sets = rustix::thread::capabilities(None).unwrap();
            for right in [CapabilitySet::DAC_OVERRIDE, CapabilitySet::DAC_READ_SEARCH] {
                sets.effective.remove(right);
            }
            rustix::thread::set_capabilities(None, sets).unwrap();
            test();
        });
        ordinary.join().unwrap();
    });
}

#[test]
fn a_missing_folder_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("store");
    let disk = DirDisk::new(&root);
    assert_eq!(disk.list(Folder::Log).unwrap(), [""; 0], "a folder that does not exist holds nothing");
    folder_refused(disk.sync_folder(Folder::Root), &root, ErrorKind::NotFound);
    folder_refused(disk.make_folder(Folder::Log), &root.join("log"), ErrorKind::NotFound);
    folder_refused(disk.lock(), &root, ErrorKind::NotFound);
    refused(disk.create(SEGMENT), SEGMENT, None, ErrorKind::NotFound);
    disk.make_folder(Folder::Root).unwrap();
    disk.make_folder(Folder::Root).unwrap();
    refused(disk.create(SEGMENT), SEGMENT, None, ErrorKind::NotFound);
    disk.make_folder(Folder::Log).unwrap();
    disk.make_folder(Folder::Log).unwrap();
    disk.create(SEGMENT).unwrap();
    let nested = DirDisk::new(directory.path().join("a/b"));
    folder_refused(nested.make_folder(Folder::Root), &directory.path().join("a/b"), ErrorKind::NotFound);
}

#[test]
fn a_missing_file_is_named() {
    let (_directory, disk) = with_folders();
    refused(disk.open(SEGMENT, false), SEGMENT, None, ErrorKind::NotFound);
    refused(disk.open(SEGMENT, true), SEGMENT, None, ErrorKind::NotFound);
    refused(disk.remove(SEGMENT), SEGMENT, None, ErrorKind::NotFound);
    refused(disk.rename(SEGMENT, FileName::Spare(3)), SEGMENT, None, ErrorKind::NotFound);
}

#[test]
fn obstructing_file_is_named() {
    let (_directory, disk) = with_folders();
    std::fs::create_dir(disk.path().join("STORE")).unwrap();
    refused(disk.create(FileName::Store), FileName::Store, None, ErrorKind::IsADirectory);
    refused(disk.remove(FileName::Store), FileName::Store, None, ErrorKind::IsADirectory);
    let in_file = disk.path().join("file");
    std::fs::write(&in_file, b"").unwrap();
    let disk = DirDisk::new(&in_file);
    folder_refused(disk.make_folder(Folder::Root), &in_file, ErrorKind::AlreadyExists);
    folder_refused(disk.list(Folder::Root), &in_file, ErrorKind::NotADirectory);
    refused(disk.create(FileName::Store), FileName::Store, None, ErrorKind::NotADirectory);
}

#[test]
fn permission_denied_is_reported() {
    let (_directory, disk) = with_folders();
    disk.create(SEGMENT).unwrap();
    let log = disk.path().join("log");
    let permit = |path: &Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    let denied = ErrorKind::PermissionDenied;
    as_ordinary_user(|| {
        permit(&log.join(SEGMENT.name()), 0o400);
        refused(disk.open(SEGMENT, true), SEGMENT, None, denied);
        disk.open(SEGMENT, false).unwrap();
        permit(&log, 0o500);
        refused(disk.create(FileName::Segment(4)), FileName::Segment(4), None, denied);
        refused(disk.remove(SEGMENT), SEGMENT, None, denied);
        refused(disk.rename(SEGMENT, FileName::Spare(3)), SEGMENT, None, denied);
        permit(&log, 0o300);
        folder_refused(disk.list(Folder::Log), &log, denied);
        folder_refused(disk.sync_folder(Folder::Log), &log, denied);
        permit(disk.path(), 0o500);
        refused(disk.lock().map(drop), FileName::Lock, None, denied);
    });
    for path in [disk.path(), &log] {
        permit(path, 0o700);
    }
    // The failed attempt left no lock.
    disk.lock().unwrap();
}

#[test]
fn store_opens_in_unreadable_folder() {
    let directory = tempfile::tempdir().unwrap();
    let outer = directory.path().join("outer");
    let disk = DirDisk::new(outer.join("store"));
    std::fs::create_dir(&outer).unwrap();
    disk.make_folder(Folder::Root).unwrap();
    std::fs::set_permissions(&outer, std::fs::Permissions::from_mode(0o300)).unwrap();
    as_ordinary_user(|| {
        disk.make_folder(Folder::Root).unwrap();
        // No store is created there, because the name of its directory could not be made durable.
        let new = DirDisk::new(outer.join("new"));
        folder_refused(new.make_folder(Folder::Root), new.path(), ErrorKind::PermissionDenied);
    });
    std::fs::set_permissions(&outer, std::fs::Permissions::from_mode(0o700)).unwrap();
}

#[test]
fn short_file_is_error_with_offset_not_zeros() {
    let (_directory, disk) = with_folders();
    let file = disk.create(SEGMENT).unwrap();
    file.write_at(0, &[7; 5000]).unwrap();
    file.sync().unwrap();
    type Read = fn(&dyn DiskFile, u64, &mut [u8]) -> Result<()>;
    let ways: [Read; 3] = [
        |f, offset, out| f.read_at(offset, out),
        |f, offset, out| f.read_bypassing_cache(offset, out),
        |f, offset, out| f.read_proven(offset, out),
    ];
    for read in ways {
        let mut out = [0; 1000];
        read(&*file, 4000, &mut out).unwrap();
        assert_eq!(out, [7; 1000]);
        for offset in [4001, 4999, 5000, 8192, 1 << 40] {
            refused(read(&*file, offset, &mut out), SEGMENT, Some(offset), ErrorKind::UnexpectedEof);
        }
    }
    let reader = DirReader::new(disk.path());
    assert_eq!(reader.len(SEGMENT).unwrap(), Some(5000));
    assert_eq!(reader.len(FileName::Store).unwrap(), None);
    let mut out = [0; 2];
    reader.read_at(SEGMENT, 4998, &mut out).unwrap();
    assert_eq!(out, [7; 2]);
    assert_eq!(reader.read_at(SEGMENT, 4999, &mut out).unwrap_err().kind(), ErrorKind::UnexpectedEof);
    assert_eq!(reader.read_at(FileName::Store, 0, &mut out).unwrap_err().kind(), ErrorKind::NotFound);
}

/// `/dev/full` accepts every call except writes.
#[test]
fn enospc_is_reported_with_offset() {
    let (_directory, disk) = with_folders();
    symlink("/dev/full", disk.path().join("log").join(SEGMENT.name())).unwrap();
    let file = disk.open(SEGMENT, true).unwrap();
    refused(file.write_at(4096, b"bytes"), SEGMENT, Some(4096), ErrorKind::StorageFull);
}

#[test]
fn a_file_opened_for_reading_is_not_written() {
    let (_directory, disk) = with_folders();
    disk.create(SEGMENT).unwrap().write_at(0, &[1; 4096]).unwrap();
    let file = disk.open(SEGMENT, false).unwrap();
    assert!(matches!(
        file.write_at(0, b"x"),
        Err(Error::Io { object: IoObject::File { offset: Some(0), .. }, .. })
    ));
    refused(file.window(LogIo::Mapped), SEGMENT, None, ErrorKind::PermissionDenied);
    let window = file.window(LogIo::Buffered).unwrap();
    assert!(matches!(
        window.put(5, b"x"),
        Err(Error::Io { object: IoObject::File { offset: Some(5), .. }, .. })
    ));
}

#[test]
fn foreign_names_are_listed_as_they_are() {
    let (_directory, disk) = with_folders();
    std::fs::write(disk.path().join(std::ffi::OsStr::from_bytes(b"caf\xe9")), b"").unwrap();
    std::fs::write(disk.path().join("notes.txt"), b"").unwrap();
    disk.create(FileName::Store).unwrap();
    let expected = ["STORE", "caf\u{fffd}", "log", "notes.txt", "pages", "snapshots"];
    assert_eq!(disk.list(Folder::Root).unwrap(), expected);
}

#[test]
fn a_relative_path_does_not_follow_the_working_directory() {
    let disk = DirDisk::new("some/store");
    let here = std::env::current_dir().unwrap();
    assert_eq!(disk.path(), here.join("some/store"));
    assert_eq!(disk.label(), here.join("some/store").display().to_string());
}

#[test]
#[should_panic(expected = "LOCK is opened by the lock alone")]
fn the_lock_file_is_never_opened_as_a_file() {
    let (_directory, disk) = with_folders();
    let _lock = disk.lock().unwrap();
    let _ = disk.open(FileName::Lock, false);
}

#[test]
fn refused_open_names_store() {
    let (_directory, disk) = with_folders();
    let path = disk.path();
    let permit = |mode| std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    permit(0o500);
    as_ordinary_user(|| {
        let error = Store::open(path).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("LOCK of the store in ") && text.contains(path.to_str().unwrap()), "{text}");
        assert_eq!(error.remedy(), Remedy::Permit, "{text}");
        assert!(error.advice().contains("try again"), "{text}");
    });
    permit(0o700);
    let error = Store::open("").unwrap_err();
    assert!(error.to_string().contains("an empty path"), "{error}");
}

#[test]
fn store_creation_creates_parent_directories() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("not/there/yet/store");
    let options = || Options::new().log(LogOptions::new().segment_len(16 << 10));
    let refused = options().create(Create::Never).open(&path).unwrap_err();
    assert!(matches!(refused, Error::NoStore { found: None, .. }), "{refused}");
    assert!(!directory.path().join("not").exists(), "where nothing may be made, nothing is");
    options().open(&path).unwrap().close().unwrap();
    options().create(Create::Never).open(&path).unwrap();
    std::fs::write(directory.path().join("file"), b"").unwrap();
    let refused = options().open(directory.path().join("file/store")).unwrap_err();
    assert!(refused.to_string().contains("file/store"), "{refused}");
}

#[test]
fn messages_state_the_problem() {
    let directory = tempfile::tempdir().unwrap();
    let options = || Options::new().log(LogOptions::new().segment_len(16 << 10));
    let text = options()
        .with(|options| options.log.segment_len = 8 << 30)
        .open(directory.path())
        .unwrap_err()
        .to_string();
    assert!(text.contains("from 16 KiB to 4096 MiB"), "{text}");
    let store = options().open(directory.path().join("store")).unwrap();
    let text = options().open(directory.path().join("store")).unwrap_err().to_string();
    assert!(text.contains(" UTC") && !text.contains("Unix"), "{text}");
    store.commit(store.batch()).unwrap();
    let refused = store.fork(directory.path().join("store"), StatePoint::Lsn(store.lsn())).unwrap_err();
    let text = refused.to_string();
    assert!(text.contains("not empty (it contains STORE)") && !text.contains("no file of a store"), "{text}");
    let text = options().open("").unwrap_err().to_string();
    assert!(text.starts_with("cannot create an empty path: "), "{text}");
    let path = directory.path().join("another");
    std::fs::create_dir_all(path.join("LOCK")).unwrap();
    let text = options().open(&path).unwrap_err().to_string();
    assert!(text.starts_with(&format!("cannot open LOCK of the store in {}: ", path.display())), "{text}");
}

/// An application may have many stores open, so each error names the store's directory.
#[test]
fn an_error_of_an_open_store_names_its_directory() {
    let disk = SimDisk::new();
    let options = Options::new().log(LogOptions::new().segment_len(16 << 10).reserve_bytes(0));
    let store = Store::open_on(Arc::new(disk.clone()), Arc::new(HostDevice::new()), options).unwrap();
    let mut batch = store.batch();
    let page = batch.create(4096, Place::Host).page();
    batch.fill(page, 0, 4096, &[7]);
    let page = store.commit(batch).unwrap().pages[0];
    let snapshot = store.snapshot().unwrap();
    let named = |error: Error| {
        let text = error.to_string();
        assert!(text.contains("the store in a simulated disk"), "{text}");
        error
    };
    // The disk is full.
    disk.set_capacity(Some(disk.used_bytes()));
    let full = (0..100).find_map(|_| {
        let mut batch = store.batch();
        batch.note("n".repeat(5000));
        store.commit(batch).err()
    });
    assert!(matches!(named(full.unwrap()), Error::DiskFull { .. }));
    assert!(matches!(
        named(store.snapshot_with(SnapshotOptions::new().name("x")).unwrap_err()),
        Error::DiskFull { .. }
    ));
    disk.set_capacity(None);
    // A file is damaged.
    let images = FileName::Pages(1);
    let len = disk.bytes(images).unwrap().len();
    disk.damage(images, 4096, &vec![0xA5; len - 4096]);
    let seen: Arc<dyn Disk> = Arc::new(disk.clone());
    for refused in [
        store.restore(StatePoint::Snapshot(snapshot.id)).map(drop),
        View::open_on(&seen, Some(&StatePoint::Snapshot(snapshot.id)))
            .and_then(|view| view.read(page, 0, &mut [0; 8])),
    ] {
        assert!(matches!(named(refused.unwrap_err()), Error::Damaged(_)));
    }
    // The store is poisoned.
    disk.fail(DiskFault { operation: Operation::SyncWindow, skip: 0, times: 1, errno: 5 });
    let mut batch = store.batch();
    batch.set_root("step", 1u64);
    let stopped = store.submit(batch).and_then(|ticket| ticket.wait(remanent::Ack::Durable));
    assert!(matches!(named(stopped.unwrap_err()), Error::Poisoned(_)));
}
