//! Locks by which readers keep the writer from removing what they read: on bytes of `READERS`.
//!
//! A reader of snapshot *n* holds a shared lock on byte *n*; byte 0 stands for the log's beginning. Before
//! the writer removes what only snapshot *n* needs, it tries the exclusive lock of that byte, and keeps it
//! until all is removed. So no reader begins to read what is going (I8). The file stays empty.
//!
//! The locks belong to open files (`F_OFD_SETLK`), not to processes as the lock on `LOCK` does. They conflict
//! within a process too, and closing another descriptor of the file drops nothing. A forked child shares
//! them. The parent's guard unlocks for both; a child's copy of it unlocks nothing. So a child keeps a lock
//! only if its parent died without dropping it. Such a lock costs space until the child ends. A writer's lock
//! that is left so keeps readers waiting for some seconds, until they give that state up.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use remanent_format::{FileName, SnapshotId};
use rustix::fs::OFlags;

use super::directory::Directory;
use super::lock::open_lock_file;
use super::{DiskLock, Hold};
use crate::base::process::Process;
use crate::error::{Error, Result};

/// Makes the file, unless it is there. Only the writer does: a reader never makes a file.
pub(super) fn make(directory: Directory<'_>) -> Result<()> {
    open_lock_file(directory, FileName::Readers).map(drop)
}

/// Holds the files that snapshot `id` needs.
pub(super) fn hold(directory: Directory<'_>, id: SnapshotId) -> Result<Hold> {
    let file = match directory.open(FileName::Readers, OFlags::RDONLY) {
        Ok(file) => file,
        // A copy on a read-only medium, or a store of another user.
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied) => {
            return Ok(Hold::Impossible);
        }
        Err(error) => return Err(Error::io("open", FileName::Readers, None, error)),
    };
    match set(&file, libc::F_RDLCK, id) {
        Ok(true) => Ok(Hold::Held(Box::new(ByteLock::new(file, id)))),
        Ok(false) => Ok(Hold::Going),
        Err(error) if knows_no_locks(&error) => Ok(Hold::Impossible),
        Err(error) => Err(Error::io("lock", FileName::Readers, Some(id.0), error)),
    }
}

/// Takes snapshot `id` away from readers; `None` if a reader holds it.
pub(super) fn try_retire(directory: Directory<'_>, id: SnapshotId) -> Result<Option<Box<dyn DiskLock>>> {
    let file = open_lock_file(directory, FileName::Readers)?;
    match set(&file, libc::F_WRLCK, id) {
        Ok(true) => Ok(Some(Box::new(ByteLock::new(file, id)))),
        Ok(false) => Ok(None),
        // No reader can hold anything here either.
        Err(error) if knows_no_locks(&error) => Ok(Some(Box::new(NoLock))),
        Err(error) => Err(Error::io("lock", FileName::Readers, Some(id.0), error)),
    }
}

/// Whether a reader holds snapshot `id`; takes nothing.
pub(super) fn is_held(directory: Directory<'_>, id: SnapshotId) -> Result<bool> {
    let file = match directory.open(FileName::Readers, OFlags::RDONLY) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(Error::io("open", FileName::Readers, None, error)),
    };
    match conflicting(&file, id) {
        Ok(kind) => Ok(kind == libc::F_RDLCK),
        Err(error) if knows_no_locks(&error) => Ok(false),
        Err(error) => Err(Error::io("look at", FileName::Readers, Some(id.0), error)),
    }
}

/// The kind of lock that keeps a writer from a snapshot's byte; `F_UNLCK` if there is none.
fn conflicting(file: &File, id: SnapshotId) -> io::Result<libc::c_int> {
    let mut lock = byte_lock(libc::F_WRLCK, id)?;
    // SAFETY: the descriptor is open for as long as `file` is borrowed, and `F_OFD_GETLK` reads and writes
    // only the structure it is given, which lives until the call returns.
    let done = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
    if done == 0 { Ok(lock.l_type.into()) } else { Err(io::Error::last_os_error()) }
}

/// Whether the file system, or the kernel, has no locks of this kind.
fn knows_no_locks(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOLCK | libc::EOPNOTSUPP))
}

/// Stands for a lock where there are none.
struct NoLock;

impl DiskLock for NoLock {}

/// Sets or clears the lock on a snapshot's byte; `false` if another lock is in the way.
fn set(file: &File, kind: libc::c_int, id: SnapshotId) -> io::Result<bool> {
    let lock = byte_lock(kind, id)?;
    // SAFETY: the descriptor is open for as long as `file` is borrowed, and `F_OFD_SETLK` only reads the
    // structure it is given, which lives until the call returns.
    let done = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) };
    if done == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => Ok(false),
        _ => Err(error),
    }
}

/// Describes a lock on a snapshot's byte to the system.
fn byte_lock(kind: libc::c_int, id: SnapshotId) -> io::Result<libc::flock> {
    Ok(libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: libc::off_t::try_from(id.0).map_err(io::Error::other)?,
        l_len: 1,
        l_pid: 0,
    })
}

/// A held lock on one byte.
struct ByteLock {
    file: File,
    id: SnapshotId,
    owner: Process,
}

impl ByteLock {
    fn new(file: File, id: SnapshotId) -> Self {
        Self { file, id, owner: Process::current() }
    }
}

impl DiskLock for ByteLock {}

impl Drop for ByteLock {
    fn drop(&mut self) {
        // In a forked child this is the parent's lock, which stays.
        if self.owner.is_current()
            && let Err(error) = set(&self.file, libc::F_UNLCK, self.id)
        {
            tracing::warn!(%error, snapshot = %self.id, "a reader's lock goes only with its last descriptor");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const THIRD: SnapshotId = SnapshotId(3);

    fn held(root: Directory<'_>, id: SnapshotId) -> Box<dyn DiskLock> {
        match hold(root, id).unwrap() {
            Hold::Held(lock) => lock,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn many_readers_hold_a_snapshot_and_the_writer_waits_for_the_last() {
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
    fn what_is_going_cannot_be_held() {
        let directory = tempfile::tempdir().unwrap();
        let root = Directory::Path(directory.path());
        let going = try_retire(root, SnapshotId(0)).unwrap().unwrap();
        assert!(!is_held(root, SnapshotId(0)).unwrap(), "no reader does");
        assert!(matches!(hold(root, SnapshotId(0)).unwrap(), Hold::Going));
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
    fn a_guard_inherited_by_a_forked_child_frees_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let (path, root) = (directory.path(), Directory::Path(directory.path()));
        make(root).unwrap();
        let file = File::open(path.join("READERS")).unwrap();
        assert!(set(&file, libc::F_RDLCK, THIRD).unwrap());
        // A child finds a guard of another process's over the same open file.
        drop(ByteLock { file: file.try_clone().unwrap(), id: THIRD, owner: Process::parent() });
        assert!(try_retire(root, THIRD).unwrap().is_none());
        // The parent's own guard unlocks although a copy of the descriptor is open.
        drop(ByteLock::new(file.try_clone().unwrap(), THIRD));
        assert!(try_retire(root, THIRD).unwrap().is_some());
    }
}
