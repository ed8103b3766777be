//! `DirDisk`: a store directory in a real file system.
//!
//! Every method is one or two system calls. `directory.rs` resolves the names of files. They are relative to the
//! directory that a writer has locked or that a reader holds open. Without such a directory, each call resolves a path.
//! `dir_file.rs` contains open files.

use std::any::Any;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use remanent_format::limits::GROUP_ALIGN;
use remanent_format::{FileName, Folder, ReadAt, SnapshotId};
use rustix::fs::{FileType, OFlags};

use super::capabilities::{direct_refused, is_below_tmpfs, mapping_refused};
use super::dir_file::DirFile;
use super::directory::{Directory, OpenDirectory, file_path, folder_path};
use super::{Disk, DiskFile, DiskLock, Hold, Watch, lock, reader_locks, watch};
use crate::base::sync::Mutex;
use crate::error::{Error, IoAction, Result};
use crate::options::{ImageIo, LogIo};

/// A store directory in a real file system.
///
/// ```
/// use remanent::disk::{Disk, dir::DirDisk};
/// use remanent::error::{FileName, Folder};
/// let directory = tempfile::tempdir()?;
/// let disk = DirDisk::new(directory.path().join("store"));
/// disk.make_folder(Folder::Root)?;
/// let file = disk.create(FileName::Store)?;
/// file.write_at(0, b"bytes")?;
/// file.sync()?;
/// disk.sync_folder(Folder::Root)?;
/// assert_eq!(disk.list(Folder::Root)?, ["STORE"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct DirDisk {
    root: PathBuf,
    /// The directory of the current writer lock. The reference is dangling if this disk holds no lock.
    locked: Arc<Mutex<Weak<OpenDirectory>>>,
    /// The directory that this disk holds open for a reader, or `None` if it holds no directory open.
    held: Option<Arc<OpenDirectory>>,
}

impl DirDisk {
    /// Creates a disk for the store directory at `path`. The directory need not exist. A relative path is resolved
    /// immediately, so later changes of the working directory have no effect.
    #[must_use]
    pub fn new(path: impl AsRef<Path>) -> Self {
        let path = path.as_ref();
        let root = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        Self { root, locked: Arc::default(), held: None }
    }

    /// Creates a disk for the store directory at `path`, and holds the directory open. The names of files are then
    /// resolved in this directory even if it is moved, and never in another directory that replaces it. If there is no
    /// directory at `path`, each call resolves the path.
    #[must_use]
    pub fn held(path: impl AsRef<Path>) -> Self {
        let disk = Self::new(path);
        let held = OpenDirectory::new(&disk.root).map(Arc::new).ok();
        Self { held, ..disk }
    }

    /// Returns the absolute path of the store directory at the time when the disk was created.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.root
    }

    fn folder_path(&self, folder: Folder) -> PathBuf {
        match folder {
            Folder::Root => self.root.clone(),
            inner => self.root.join(folder_path(inner)),
        }
    }

    fn file_path(&self, file: FileName) -> PathBuf {
        self.root.join(file_path(file))
    }

    /// Returns the directory that is locked or held open, or `None` if there is no such directory.
    fn kept_open(&self) -> Option<Arc<OpenDirectory>> {
        self.held.clone().or_else(|| self.locked.lock().upgrade())
    }

    /// Returns the locked directory of this writer, for the files that the writer opens.
    fn writer(&self) -> Weak<OpenDirectory> {
        self.locked.lock().clone()
    }

    /// Calls `work` with the directory in which file names are resolved.
    fn within<T>(&self, work: impl FnOnce(Directory<'_>) -> T) -> T {
        match self.kept_open() {
            Some(open) => work(Directory::Open(&open)),
            None => work(Directory::Path(&self.root)),
        }
    }

    fn folder_error(&self, action: IoAction, folder: Folder, source: io::Error) -> Error {
        let path = self.folder_path(folder);
        let shown = if path.as_os_str().is_empty() { "an empty path".into() } else { path.to_string_lossy() };
        Error::folder(action, shown.into_owned(), source)
    }

    /// Converts the I/O error of a test for direct writes.
    fn trial_failed(&self, folder: Folder, source: io::Error) -> Error {
        let error = self.folder_error(IoAction::WriteDirect, folder, source);
        if error.is_no_space() {
            Error::disk_full(FileName::Temporary(folder, 0), GROUP_ALIGN)
        } else {
            error
        }
    }

    /// Returns the path to pass to queries about the file system. This is the folder's own path, because a folder may
    /// be a mount point, or the store directory's path if the folder does not exist.
    fn asked_path(&self, folder: Folder) -> PathBuf {
        let path = self.folder_path(folder);
        if path.is_dir() { path } else { self.root.clone() }
    }

    fn refuses_mappings(&self, folder: Folder) -> Result<Option<String>> {
        mapping_refused(&self.asked_path(folder))
            .map_err(|errno| self.folder_error(IoAction::Inspect, Folder::Root, errno.into()))
    }

    fn refuses_direct(&self, folder: Folder) -> Result<Option<String>> {
        direct_refused(&self.asked_path(folder)).map_err(|error| self.trial_failed(folder, error))
    }

    /// Returns whether the files exist only in memory.
    fn is_in_memory(&self) -> Result<bool> {
        let path = self.asked_path(Folder::Root);
        is_below_tmpfs(&path).map_err(|errno| self.trial_failed(Folder::Root, errno.into()))
    }

    fn file_system(&self) -> Result<rustix::fs::StatVfs> {
        self.within(|directory| directory.file_system())
            .map_err(|source| self.folder_error(IoAction::Inspect, Folder::Root, source))
    }

    /// Returns the error for a file that could not be created or renamed in this directory.
    fn naming_failed(&self, action: IoAction, file: FileName, source: io::Error) -> Error {
        if self.kept_open().is_some_and(|locked| locked.is_removed()) {
            return self.folder_error(IoAction::CreateInRemoved, Folder::Root, source);
        }
        Error::io(action, file, None, source)
    }
}

impl Disk for DirDisk {
    fn label(&self) -> String {
        self.root.display().to_string()
    }

    fn lock(&self) -> Result<Box<dyn DiskLock>> {
        let open = OpenDirectory::new(&self.root);
        let open = Arc::new(open.map_err(|source| self.folder_error(IoAction::Open, Folder::Root, source))?);
        let lock = lock::acquire(open.clone())?;
        reader_locks::make(Directory::Open(&open))?;
        *self.locked.lock() = Arc::downgrade(&open);
        Ok(lock)
    }

    fn check_writer(&self) -> Result<()> {
        self.writer().upgrade().map_or(Ok(()), |open| open.check_claim())
    }

    fn is_locked(&self) -> Result<bool> {
        self.within(lock::is_locked)
    }

    fn hold(&self, id: SnapshotId) -> Result<Hold> {
        self.within(|directory| reader_locks::hold(directory, id))
    }

    fn try_retire(&self, id: SnapshotId) -> Result<Option<Box<dyn DiskLock>>> {
        self.within(|directory| reader_locks::try_retire(directory, id))
    }

    fn is_held(&self, id: SnapshotId) -> Result<bool> {
        self.within(|directory| reader_locks::is_held(directory, id))
    }

    fn total_bytes(&self) -> Result<Option<u64>> {
        let system = self.file_system()?;
        // The file system may report a length of 0.
        Ok(system.f_blocks.checked_mul(system.f_frsize).filter(|total| *total > 0))
    }

    fn free_bytes(&self) -> Result<Option<u64>> {
        let system = self.file_system()?;
        Ok(system.f_bavail.checked_mul(system.f_frsize).filter(|_| system.f_blocks > 0))
    }

    fn list(&self, folder: Folder) -> Result<Vec<String>> {
        self.within(|directory| directory.list(folder))
            .map_err(|source| self.folder_error(IoAction::List, folder, source))
    }

    fn make_folder(&self, folder: Folder) -> Result<()> {
        self.check_writer()?;
        let failed = |source| self.folder_error(IoAction::Create, folder, source);
        let is_there = |directory: Directory<'_>| {
            directory.status(folder).is_ok_and(|found| FileType::from_raw_mode(found.st_mode).is_dir())
        };
        let existed = self.within(|directory| match directory.make_folder(folder) {
            Ok(()) => Ok(false),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && is_there(directory) => Ok(true),
            Err(error) => Err(failed(error)),
        })?;
        // The entry of the store directory itself is in a folder that no other call can name, so it is synced here.
        // This includes an existing directory, whose creator may have died before its own sync.
        if folder == Folder::Root
            && let Some(parent) = self.root.parent()
        {
            match File::open(parent) {
                Ok(parent) => parent.sync_all().map_err(failed)?,
                // The parent folder belongs to another user, and this process may enter but not read it. The process
                // that created the directory had to make it durable.
                Err(error) if existed && error.kind() == io::ErrorKind::PermissionDenied => {}
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(())
    }

    fn make_parents(&self) -> Result<()> {
        let failed = |action, path: &Path| {
            let path = path.display().to_string();
            move |source| Error::folder(action, path, source)
        };
        let missing: Vec<&Path> = self.root.ancestors().skip(1).take_while(|path| !path.exists()).collect();
        for path in missing.into_iter().rev() {
            match std::fs::create_dir(path) {
                Ok(()) => {}
                // Another process created the directory first.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(failed(IoAction::Create, path)(error)),
            }
            // The name becomes durable before anything is created below it.
            let above = path.parent().unwrap_or(Path::new("/"));
            File::open(above).and_then(|above| above.sync_all()).map_err(failed(IoAction::Sync, above))?;
        }
        Ok(())
    }

    fn sync_folder(&self, folder: Folder) -> Result<()> {
        let failed = |source| self.folder_error(IoAction::Sync, folder, source);
        match self.kept_open() {
            Some(open) => open.kept(folder).and_then(File::sync_all).map_err(failed),
            None => {
                let opened = Directory::Path(&self.root).open_folder(folder);
                opened.and_then(|opened| opened.sync_all()).map_err(failed)
            }
        }
    }

    fn keep_folders_open(&self) -> Result<()> {
        if let Some(open) = self.kept_open() {
            for folder in Folder::INNER {
                open.kept(folder).map_err(|source| self.folder_error(IoAction::Open, folder, source))?;
            }
        }
        Ok(())
    }

    fn create(&self, file: FileName) -> Result<Arc<dyn DiskFile>> {
        refuse_lock_file(file);
        self.check_writer()?;
        self.within(|directory| directory.open(file, OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC))
            .map(|opened| DirFile::shared(opened, file, self.writer()))
            .map_err(|source| self.naming_failed(IoAction::Create, file, source))
    }

    fn open(&self, file: FileName, write: bool) -> Result<Arc<dyn DiskFile>> {
        refuse_lock_file(file);
        let flags = if write { OFlags::RDWR } else { OFlags::RDONLY };
        if write {
            self.check_writer()?;
        }
        self.within(|directory| directory.open(file, flags))
            .map(|opened| DirFile::shared(opened, file, self.writer()))
            .map_err(|source| Error::io(IoAction::Open, file, None, source))
    }

    fn directory(&self) -> Result<Option<PathBuf>> {
        let Some(open) = self.kept_open() else { return Ok(Some(self.root.clone())) };
        if open.is_removed() {
            return Err(Error::NoStore { path: self.label(), found: None });
        }
        Ok(Some(open.path().unwrap_or_else(|| self.root.clone())))
    }

    fn link(&self, source: &dyn Disk, file: FileName) -> Result<bool> {
        let Some(source) = (source as &dyn Any).downcast_ref::<Self>() else { return Ok(false) };
        self.check_writer()?;
        let linked = self.within(|target| source.within(|source| target.link(source, file)));
        match linked {
            Ok(()) => Ok(true),
            // The files are on different file systems, the file system has no links or too many, or the file belongs to
            // another user.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::CrossesDevices
                        | io::ErrorKind::Unsupported
                        | io::ErrorKind::TooManyLinks
                        | io::ErrorKind::PermissionDenied
                ) =>
            {
                Ok(false)
            }
            Err(error) => Err(Error::io(IoAction::Link, file, None, error)),
        }
    }

    fn rename(&self, source: FileName, target: FileName) -> Result<()> {
        self.check_writer()?;
        self.within(|directory| directory.rename(source, target))
            .map_err(|error| self.naming_failed(IoAction::Rename, source, error))
    }

    fn remove(&self, file: FileName) -> Result<()> {
        self.check_writer()?;
        self.within(|directory| directory.remove(file))
            .map_err(|source| Error::io(IoAction::Remove, file, None, source))
    }

    fn watch(&self, folder: Folder) -> Box<dyn Watch> {
        watch::watch(&self.folder_path(folder))
    }

    /// Opens the file for writing and closes it, so that watchers receive an event. The call makes two system calls and
    /// changes nothing on disk.
    fn notify_watchers(&self, file: FileName) {
        refuse_lock_file(file);
        if let Err(error) = self.within(|directory| directory.open(file, OFlags::WRONLY)) {
            tracing::debug!(%error, %file, "cannot notify followers of a batch");
        }
    }

    fn refuses(&self, io: LogIo) -> Result<Option<String>> {
        match io {
            LogIo::Mapped => self.refuses_mappings(Folder::Log),
            LogIo::Buffered => Ok(None),
            LogIo::Direct => self.refuses_direct(Folder::Log),
        }
    }

    fn refuses_images(&self, io: ImageIo) -> Result<Option<String>> {
        match io {
            ImageIo::Auto if self.is_in_memory()? => Ok(Some("tmpfs has no medium".to_owned())),
            ImageIo::Auto => self.refuses_direct(Folder::Pages),
            ImageIo::Mapped => self.refuses_mappings(Folder::Pages),
            ImageIo::Buffered => Ok(None),
            ImageIo::Direct => self.refuses_direct(Folder::Pages),
        }
    }
}

/// Panics if `file` is `LOCK`. Only `lock.rs` may open `LOCK`, because closing any of its descriptors releases the
/// process's record lock.
fn refuse_lock_file(file: FileName) {
    assert!(file != FileName::Lock, "LOCK is opened by the lock alone");
}

/// A reader of a store directory that acquires no lock, for the decoders of the format crate.
///
/// The most recently read file is kept open, because decoders read a file in many small pieces.
#[derive(Debug)]
pub struct DirReader {
    disk: DirDisk,
    last: Mutex<Option<(FileName, Arc<File>)>>,
}

impl DirReader {
    /// Creates a reader of the store directory at `path`. The directory need not exist.
    #[must_use]
    pub fn new(path: impl AsRef<Path>) -> Self {
        Self { disk: DirDisk::new(path), last: Mutex::new(None) }
    }

    fn open(&self, file: FileName) -> io::Result<Arc<File>> {
        let mut last = self.last.lock();
        if let Some((name, open)) = &*last
            && *name == file
        {
            return Ok(open.clone());
        }
        let open = Arc::new(File::open(self.disk.file_path(file))?);
        *last = Some((file, open.clone()));
        Ok(open)
    }
}

impl ReadAt for DirReader {
    fn list(&self, folder: Folder) -> io::Result<Vec<String>> {
        Directory::Path(&self.disk.root).list(folder)
    }

    fn len(&self, file: FileName) -> io::Result<Option<u64>> {
        match std::fs::metadata(self.disk.file_path(file)) {
            Ok(metadata) => Ok(Some(metadata.len())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn read_at(&self, file: FileName, offset: u64, out: &mut [u8]) -> io::Result<()> {
        if file == FileName::Lock {
            // Closing `LOCK` again would release this process's own record lock on the file.
            return Err(io::ErrorKind::Unsupported.into());
        }
        let open = self.open(file)?;
        open.read_exact_at(out, offset)?;
        // A new file may now have this name, because a writer removes an image file's name before it overwrites the
        // file (I13).
        let is_there = |now: std::fs::Metadata| Ok(now.ino() == open.metadata()?.ino());
        match file {
            FileName::Pages(_) if !std::fs::metadata(self.disk.file_path(file)).and_then(is_there)? => {
                *self.last.lock() = None;
                Err(io::ErrorKind::NotFound.into())
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::super::capabilities::direct_verdict;
    use super::*;
    use crate::error::{IoObject, Remedy};

    #[test]
    fn full_or_failing_disk_does_not_disable_direct_writes() {
        assert_eq!(direct_verdict(Ok(())).unwrap(), None);
        for errno in [Errno::INVAL, Errno::OPNOTSUPP, Errno::ISDIR, Errno::NOENT] {
            let reason = direct_verdict(Err(errno.into())).unwrap().unwrap();
            assert!(reason.contains(&io::Error::from(errno).to_string()), "{reason}");
        }
        let disk = DirDisk::new("/nowhere");
        for errno in [Errno::NOSPC, Errno::DQUOT] {
            let error = disk.trial_failed(Folder::Log, direct_verdict(Err(errno.into())).unwrap_err());
            assert_eq!((error.remedy(), error.file().is_some()), (Remedy::FreeSpace, true), "{error}");
        }
        let error = disk.trial_failed(Folder::Log, direct_verdict(Err(Errno::IO.into())).unwrap_err());
        assert_eq!(error.remedy(), Remedy::Reopen);
        assert!(error.to_string().contains("/nowhere/log"), "{error}");
    }

    #[test]
    fn create_in_removed_directory_names_the_cause() {
        let above = tempfile::tempdir().unwrap();
        let disk = DirDisk::new(above.path().join("store"));
        disk.make_folder(Folder::Root).unwrap();
        let lock = disk.lock().unwrap();
        std::fs::remove_dir_all(disk.path()).unwrap();
        std::fs::create_dir(disk.path()).unwrap();
        let error = disk.create(FileName::Store).err().unwrap();
        let expected = format!("cannot create a file in the removed directory {}", disk.path().display());
        assert!(error.to_string().starts_with(&expected), "{error}");
        // Without the lock, names are resolved by path.
        drop(lock);
        disk.create(FileName::Store).unwrap();
        assert_eq!(Disk::list(&disk, Folder::Root).unwrap(), ["STORE"]);
    }

    #[test]
    fn capabilities_are_probed_on_real_file_system() {
        let reason = DirDisk::new("/proc").refuses(LogIo::Mapped).unwrap().unwrap();
        assert!(reason.contains("0x9fa0"), "{reason}");
        let missing = DirDisk::new("/proc/no such folder").refuses(LogIo::Mapped);
        assert!(matches!(missing, Err(Error::Io { object: IoObject::Folder { .. }, .. })));
    }
}
