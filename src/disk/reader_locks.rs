//! Locks on bytes of `READERS`. They let readers prevent the writer from removing the files that they read.
//!
//! A reader of snapshot *n* holds a shared lock on byte *n*. Byte 0 represents the beginning of the log. Before the
//! writer removes files that only snapshot *n* needs, it tries to acquire the exclusive lock on that byte, and holds
//! the lock until the files are removed. Thus no reader starts reading files that are being removed (I8). The file
//! `READERS` stays empty.
//!
//! The locks belong to open files, unlike the process lock on `LOCK`. Locks of open files also conflict within a
//! process, and closing another descriptor of the file does not release them. A forked child closes its copy of the
//! descriptor, so a lock ends with the process that acquired it.

use std::io;
use std::ops::Range;

use remanent_format::{FileName, SnapshotId};
use rustix::fs::OFlags;

use super::directory::Directory;
use super::lock::open_lock_file;
use super::record_locks::{self, Mode, Owner, is_lock_unsupported};
use super::{DiskLock, Hold};
use crate::base::closed_on_fork::ClosedOnFork;
use crate::error::{Error, IoAction, Result};

/// Creates `READERS` if it does not exist. Only the writer calls this function, because readers create no files.
pub(super) fn make(directory: Directory<'_>) -> Result<()> {
    open_lock_file(directory, FileName::Readers).map(drop)
}

/// Prevents the writer from removing the files that snapshot `id` needs, until the guard in the result is dropped.
pub(super) fn hold(directory: Directory<'_>, id: SnapshotId) -> Result<Hold> {
    let file = match ClosedOnFork::open(|| directory.open(FileName::Readers, OFlags::RDONLY)) {
        Ok(file) => file,
        // The store is a copy on a read-only medium, or belongs to another user.
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied) => {
            return Ok(Hold::Impossible);
        }
        Err(error) => return Err(Error::io(IoAction::Open, FileName::Readers, None, error)),
    };
    match ByteLock::take(file, Mode::Shared, id) {
        Ok(Some(lock)) => Ok(Hold::Held(Box::new(lock))),
        Ok(None) => Ok(Hold::Retiring),
        Err(error) if is_lock_unsupported(&error) => Ok(Hold::Impossible),
        Err(error) => Err(Error::io(IoAction::Lock, FileName::Readers, Some(id.0), error)),
    }
}

/// Makes snapshot `id` unavailable to new readers until the guard is dropped. Returns `None` if a reader holds the
/// snapshot.
pub(super) fn try_retire(directory: Directory<'_>, id: SnapshotId) -> Result<Option<Box<dyn DiskLock>>> {
    let file = open_lock_file(directory, FileName::Readers)?;
    match ByteLock::take(file, Mode::Exclusive, id) {
        Ok(Some(lock)) => Ok(Some(Box::new(lock))),
        Ok(None) => Ok(None),
        // Locks are not supported, so no reader can hold a snapshot either.
        Err(error) if is_lock_unsupported(&error) => Ok(Some(Box::new(NoLock))),
        Err(error) => Err(Error::io(IoAction::Lock, FileName::Readers, Some(id.0), error)),
    }
}

/// Returns whether a reader holds snapshot `id`. The check acquires no lock.
pub(super) fn is_held(directory: Directory<'_>, id: SnapshotId) -> Result<bool> {
    let file = match directory.open(FileName::Readers, OFlags::RDONLY) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(Error::io(IoAction::Open, FileName::Readers, None, error)),
    };
    match record_locks::conflict(&file, byte(id)) {
        Ok(conflict) => Ok(conflict.is_some_and(|held| held.mode == Mode::Shared)),
        Err(error) if is_lock_unsupported(&error) => Ok(false),
        Err(error) => Err(Error::io(IoAction::Inspect, FileName::Readers, Some(id.0), error)),
    }
}

/// The guard that replaces a lock on a system without support for locks.
struct NoLock;

impl DiskLock for NoLock {}

/// Returns the byte range in `READERS` that represents snapshot `id`.
fn byte(id: SnapshotId) -> Range<u64> {
    id.0..id.0 + 1
}

/// A lock on the byte of one snapshot, released on drop.
struct ByteLock {
    file: ClosedOnFork,
    id: SnapshotId,
}

impl ByteLock {
    fn take(file: ClosedOnFork, mode: Mode, id: SnapshotId) -> io::Result<Option<Self>> {
        let is_taken = record_locks::try_lock(file.file(), Owner::OpenFile, mode, byte(id))?;
        Ok(is_taken.then_some(Self { file, id }))
    }
}

impl DiskLock for ByteLock {}

impl Drop for ByteLock {
    fn drop(&mut self) {
        // The lock is released explicitly, because a child created by a bare `clone` may have a copy of the descriptor
        // that would keep the lock. A forked child does not release the lock, which belongs to its parent.
        if self.file.is_own()
            && let Err(error) = record_locks::unlock(self.file.file(), byte(self.id))
        {
            tracing::warn!(%error, snapshot = %self.id, "cannot release a reader's lock before its last descriptor");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    const THIRD: SnapshotId = SnapshotId(3);

    fn held(root: Directory<'_>, id: SnapshotId) -> Box<dyn DiskLock> {
        match hold(root, id).unwrap() {
            Hold::Held(lock) => lock,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn writer_waits_for_last_reader_of_snapshot() {
        let directory = tempfile::tempdir().unwrap();
        let (path, root) = (directory.path(), Directory::Path(directory.path()));
        make(root).unwrap();
        assert!(!is_held(root, THIRD).unwrap());
        let (first, second) = (held(root, THIRD), held(root, THIRD));
        assert!(is_held(root, THIRD).unwrap() && !is_held(root, SnapshotId(2)).unwrap());
        assert!(try_retire(root, THIRD).unwrap().is_none());
        drop(first);
        assert!(try_retire(root, THIRD).unwrap().is_none(), "dropping one reader's lock dropped another's");
        assert!(try_retire(root, SnapshotId(2)).unwrap().is_some(), "a hold is on one snapshot alone");
        drop(second);
        assert!(!is_held(root, THIRD).unwrap());
        assert!(try_retire(root, THIRD).unwrap().is_some());
        assert_eq!(std::fs::metadata(path.join("READERS")).unwrap().len(), 0);
    }

    #[test]
    fn snapshot_under_removal_cannot_be_held() {
        let directory = tempfile::tempdir().unwrap();
        let root = Directory::Path(directory.path());
        let going = try_retire(root, SnapshotId(0)).unwrap().unwrap();
        assert!(!is_held(root, SnapshotId(0)).unwrap(), "no reader does");
        assert!(matches!(hold(root, SnapshotId(0)).unwrap(), Hold::Retiring));
        drop(going);
        held(root, SnapshotId(0));
    }

    #[test]
    fn a_reader_makes_no_file() {
        let directory = tempfile::tempdir().unwrap();
        let root = Directory::Path(directory.path());
        assert!(matches!(hold(root, THIRD).unwrap(), Hold::Impossible));
        assert!(!is_held(root, THIRD).unwrap());
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn dropping_a_lock_frees_it_despite_a_copied_descriptor() {
        let directory = tempfile::tempdir().unwrap();
        let root = Directory::Path(directory.path());
        make(root).unwrap();
        let file = open_lock_file(root, FileName::Readers).unwrap();
        let _copy_of_a_child: File = file.file().try_clone().unwrap();
        let lock = ByteLock::take(file, Mode::Shared, THIRD).unwrap().unwrap();
        assert!(try_retire(root, THIRD).unwrap().is_none());
        drop(lock);
        assert!(try_retire(root, THIRD).unwrap().is_some());
    }
}
