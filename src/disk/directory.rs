//! The directory in which the names of a store's files are resolved.
//!
//! A writer resolves names relative to the descriptor of the directory that it locked. If the directory is moved, its
//! lock file moves with it, and another store may be created at the old path. If the writer resolved names by path, it
//! would then create its files in the other store and destroy that store. Without a lock, names are resolved by path at
//! each call.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use remanent_format::{FileName, Folder};
use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags, Stat, StatVfs};
use rustix::io::retry_on_intr;

use super::claim::{Claim, superseded};
use crate::error::{Error, IoAction, Result};

/// The permissions of new files before the process's umask. With a umask of 002, the members of a group can share a
/// store.
const FILE_MODE: Mode = Mode::from_raw_mode(0o666);
const FOLDER_MODE: Mode = Mode::from_raw_mode(0o777);

const FOLDER_FLAGS: OFlags = OFlags::DIRECTORY.union(OFlags::CLOEXEC);

/// An open descriptor of a store directory, for calls that resolve names relative to the descriptor.
#[derive(Debug)]
pub(super) struct OpenDirectory {
    root: File,
    /// The descriptors of inner folders, in the order of [`Folder::INNER`]. Each is opened on first use or when the
    /// folder is synced.
    inner: [OnceLock<File>; Folder::INNER.len()],
    /// The claim of the writer that opened the directory, set after the writer has acquired the lock.
    claim: OnceLock<Claim>,
}

impl OpenDirectory {
    pub fn new(path: &Path) -> io::Result<Self> {
        Ok(Self {
            root: Directory::Path(path).open_folder(Folder::Root)?,
            inner: Default::default(),
            claim: OnceLock::new(),
        })
    }

    /// Records the claim of the writer that locked this directory.
    ///
    /// # Panics
    /// On a second call.
    pub fn claim(&self, claim: Claim) {
        let earlier = self.claim.set(claim);
        assert!(earlier.is_ok(), "a directory is opened anew for each lock");
    }

    /// Returns an error if another writer has claimed the store after this writer. The check makes two system calls.
    pub fn check_claim(&self) -> Result<()> {
        let Some(claim) = self.claim.get() else { return Ok(()) };
        let directory = Directory::Open(self);
        match directory.file_status(FileName::Lock) {
            Ok(named) => {
                claim.check((named.st_dev, named.st_ino), || directory.open(FileName::Lock, OFlags::RDONLY))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                // A removed directory has no other writer. If only the lock file was removed, another writer may have
                // locked a new lock file.
                if self.is_removed() { Ok(()) } else { Err(superseded(None)) }
            }
            Err(error) => Err(Error::io(IoAction::Inspect, FileName::Lock, None, error)),
        }
    }

    /// Returns the descriptor of `folder`. The descriptor stays open as long as this directory.
    pub fn kept(&self, folder: Folder) -> io::Result<&File> {
        let Some(index) = Folder::INNER.iter().position(|inner| *inner == folder) else {
            return Ok(&self.root);
        };
        if let Some(kept) = self.inner[index].get() {
            return Ok(kept);
        }
        let opened = Directory::Open(self).open_folder(folder)?;
        // If another thread was first, its descriptor is used.
        Ok(self.inner[index].get_or_init(|| opened))
    }

    /// Returns the current path of the directory, or `None` on a system without `/proc`.
    pub fn path(&self) -> Option<PathBuf> {
        std::fs::read_link(format!("/proc/self/fd/{}", self.root.as_raw_fd())).ok()
    }

    /// Returns whether the directory was removed. No files can be created in a removed directory.
    pub fn is_removed(&self) -> bool {
        rustix::fs::fstat(&self.root).is_ok_and(|root| root.st_nlink == 0)
    }
}

/// A store directory, identified by its path or by an open descriptor.
#[derive(Clone, Copy)]
pub(super) enum Directory<'a> {
    Path(&'a Path),
    Open(&'a OpenDirectory),
}

impl Directory<'_> {
    /// Returns a descriptor, and the path relative to that descriptor at which `inner` can be looked up. `inner` is a
    /// path within the store directory.
    fn at(&self, inner: &Path) -> (BorrowedFd<'_>, PathBuf) {
        match self {
            Self::Path(root) if inner.as_os_str().is_empty() => (CWD, root.to_path_buf()),
            Self::Path(root) => (CWD, root.join(inner)),
            Self::Open(open) => (open.root.as_fd(), Path::new(".").join(inner)),
        }
    }

    pub fn open(&self, file: FileName, flags: OFlags) -> io::Result<File> {
        self.open_at(&file_path(file), flags)
    }

    pub fn open_folder(&self, folder: Folder) -> io::Result<File> {
        self.open_at(folder_path(folder), FOLDER_FLAGS)
    }

    fn open_at(&self, inner: &Path, flags: OFlags) -> io::Result<File> {
        let (directory, path) = self.at(inner);
        let open = || rustix::fs::openat(directory, &path, flags | OFlags::CLOEXEC, FILE_MODE);
        Ok(retry_on_intr(open)?.into())
    }

    pub fn make_folder(&self, folder: Folder) -> io::Result<()> {
        let (directory, path) = self.at(folder_path(folder));
        Ok(rustix::fs::mkdirat(directory, path, FOLDER_MODE)?)
    }

    pub fn status(&self, folder: Folder) -> io::Result<Stat> {
        let (directory, path) = self.at(folder_path(folder));
        Ok(rustix::fs::statat(directory, path, AtFlags::empty())?)
    }

    pub fn file_status(&self, file: FileName) -> io::Result<Stat> {
        let (directory, path) = self.at(&file_path(file));
        Ok(rustix::fs::statat(directory, path, AtFlags::SYMLINK_NOFOLLOW)?)
    }

    pub fn file_system(&self) -> io::Result<StatVfs> {
        Ok(match self {
            Self::Path(root) => rustix::fs::statvfs(*root),
            Self::Open(open) => rustix::fs::fstatvfs(&open.root),
        }?)
    }

    /// Returns the names in a folder, sorted. Returns an empty list if the folder does not exist. Bytes that are not
    /// UTF-8 are replaced, because the store uses no such names.
    pub fn list(&self, folder: Folder) -> io::Result<Vec<String>> {
        let folder = match self.open_folder(folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            folder => folder?,
        };
        let mut names = Vec::new();
        for entry in Dir::new(folder)? {
            let name = entry?.file_name().to_bytes().to_owned();
            if name != b"." && name != b".." {
                names.push(OsStr::from_bytes(&name).to_string_lossy().into_owned());
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    pub fn rename(&self, source: FileName, target: FileName) -> io::Result<()> {
        let ((directory, source), (_, target)) = (self.at(&file_path(source)), self.at(&file_path(target)));
        Ok(rustix::fs::renameat(directory, source, directory, target)?)
    }

    pub fn remove(&self, file: FileName) -> io::Result<()> {
        let (directory, path) = self.at(&file_path(file));
        Ok(rustix::fs::unlinkat(directory, path, AtFlags::empty())?)
    }

    /// Creates a hard link to `file` of the directory `other`, under the same name.
    pub fn link(&self, other: Directory<'_>, file: FileName) -> io::Result<()> {
        let file = file_path(file);
        let ((other, source), (directory, target)) = (other.at(&file), self.at(&file));
        Ok(rustix::fs::linkat(other, source, directory, target, AtFlags::empty())?)
    }
}

pub(super) fn folder_path(folder: Folder) -> &'static Path {
    match folder {
        Folder::Root => Path::new(""),
        inner => Path::new(inner.name()),
    }
}

pub(super) fn file_path(file: FileName) -> PathBuf {
    folder_path(file.folder()).join(file.name())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(path: &Path, folder: Folder) -> Vec<String> {
        Directory::Path(path).list(folder).unwrap()
    }

    #[test]
    fn open_directory_is_followed_when_moved() {
        let above = tempfile::tempdir().unwrap();
        let (old, new) = (above.path().join("old"), above.path().join("new"));
        Directory::Path(&old).make_folder(Folder::Root).unwrap();
        let open = OpenDirectory::new(&old).unwrap();
        let directory = Directory::Open(&open);
        assert_eq!(open.path().unwrap(), old.canonicalize().unwrap());
        std::fs::rename(&old, &new).unwrap();
        assert_eq!(open.path().unwrap(), new.canonicalize().unwrap());
        // Another directory replaces the moved one at the old path.
        for folder in [Folder::Root, Folder::Pages] {
            Directory::Path(&old).make_folder(folder).unwrap();
        }
        let make = OFlags::RDWR | OFlags::CREATE;
        let theirs = FileName::Pages(1);
        Directory::Path(&old).open(theirs, make).unwrap();
        directory.make_folder(Folder::Pages).unwrap();
        open.kept(Folder::Pages).unwrap().sync_all().unwrap();
        let temporary = FileName::Temporary(Folder::Pages, 1);
        directory.open(temporary, make).unwrap();
        directory.rename(temporary, FileName::Pages(2)).unwrap();
        assert!(directory.remove(theirs).is_err_and(|error| error.kind() == io::ErrorKind::NotFound));
        assert_eq!(names(&new, Folder::Root), ["pages"]);
        assert_eq!(names(&new, Folder::Pages), [FileName::Pages(2).name()]);
        assert_eq!(directory.list(Folder::Pages).unwrap(), [FileName::Pages(2).name()]);
        assert_eq!(names(&old, Folder::Pages), [theirs.name()]);
        // Links can be created from one directory to the other.
        directory.link(Directory::Path(&old), theirs).unwrap();
        directory.remove(FileName::Pages(2)).unwrap();
        assert_eq!(names(&new, Folder::Pages), [theirs.name()]);
        assert_eq!(names(&old, Folder::Pages), [theirs.name()]);
    }

    #[test]
    fn removed_directory_is_reported() {
        let above = tempfile::tempdir().unwrap();
        let path = above.path().join("directory");
        Directory::Path(&path).make_folder(Folder::Root).unwrap();
        let open = OpenDirectory::new(&path).unwrap();
        assert!(!open.is_removed());
        std::fs::remove_dir(&path).unwrap();
        assert!(open.is_removed());
        Directory::Path(&path).make_folder(Folder::Root).unwrap();
        assert!(open.is_removed());
    }
}
