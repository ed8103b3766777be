//! A disk for the directory of a store that was restored on demand. Reads of image files fetch missing parts, so that
//! the files appear complete.

use std::io::ErrorKind;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use remanent_format::{FileName, Folder, SnapshotId};

use super::unfetched_files::{FetchThreads, UnfetchedFiles};
use crate::disk::{Disk, DiskFile, DiskLock, FileMemory, Hold, Watch, Window};
use crate::engine::Engine;
use crate::error::{Error, IoAction, Result};
use crate::options::{ArchiveOptions, ImageIo, LogIo};

/// A directory that lacks parts of image files. Reads fetch the missing parts.
pub(crate) struct FetchingDisk {
    disk: Arc<dyn Disk>,
    files: Arc<UnfetchedFiles>,
}

/// An image file that may lack parts, open for reading.
struct FetchingFile {
    number: u64,
    file: Arc<dyn DiskFile>,
    files: Arc<UnfetchedFiles>,
}

impl FetchingDisk {
    /// Returns a disk that fetches missing parts, or `None` if the directory contains all parts.
    ///
    /// # Errors
    /// [`Error::Damaged`] if UNFETCHED is damaged; [`Error::Archive`] if the options are invalid.
    pub fn find(disk: &Arc<dyn Disk>, options: &ArchiveOptions) -> Result<Option<Arc<Self>>> {
        let files = UnfetchedFiles::read(disk.clone(), options)?;
        Ok(files.map(|files| Arc::new(Self { disk: disk.clone(), files: Arc::new(files) })))
    }

    /// Starts fetching all parts in the background.
    ///
    /// # Errors
    /// The error of the system if a thread cannot be started.
    pub fn fetch_all(&self, engine: Arc<Engine>) -> Result<FetchThreads> {
        FetchThreads::start(self.files.clone(), move || {
            // The archive can continue with snapshots.
            if let Some(archive) = &engine.archive {
                archive.note_snapshots();
                engine.log.wake_archiver();
            }
        })
    }

    /// Removes a file from UNFETCHED, before the file's name is given to another file.
    fn forget(&self, file: FileName) -> Result<()> {
        if let FileName::Pages(number) = file { self.files.forget(number) } else { Ok(()) }
    }
}

impl Disk for FetchingDisk {
    fn label(&self) -> String {
        self.disk.label()
    }

    fn lock(&self) -> Result<Box<dyn DiskLock>> {
        self.disk.lock()
    }

    fn check_writer(&self) -> Result<()> {
        self.disk.check_writer()
    }

    fn is_locked(&self) -> Result<bool> {
        self.disk.is_locked()
    }

    fn hold(&self, id: SnapshotId) -> Result<Hold> {
        self.disk.hold(id)
    }

    fn try_retire(&self, id: SnapshotId) -> Result<Option<Box<dyn DiskLock>>> {
        self.disk.try_retire(id)
    }

    fn is_held(&self, id: SnapshotId) -> Result<bool> {
        self.disk.is_held(id)
    }

    fn list(&self, folder: Folder) -> Result<Vec<String>> {
        let mut names = self.disk.list(folder)?;
        if folder == Folder::Root {
            names.retain(|name| *name != FileName::Unfetched.name());
        }
        Ok(names)
    }

    fn unfetched_files(&self) -> Vec<u64> {
        self.files.numbers()
    }

    fn make_folder(&self, folder: Folder) -> Result<()> {
        self.disk.make_folder(folder)
    }

    fn make_parents(&self) -> Result<()> {
        self.disk.make_parents()
    }

    fn sync_folder(&self, folder: Folder) -> Result<()> {
        self.disk.sync_folder(folder)
    }

    fn keep_folders_open(&self) -> Result<()> {
        self.disk.keep_folders_open()
    }

    fn total_bytes(&self) -> Result<Option<u64>> {
        self.disk.total_bytes()
    }

    fn free_bytes(&self) -> Result<Option<u64>> {
        self.disk.free_bytes()
    }

    fn create(&self, file: FileName) -> Result<Arc<dyn DiskFile>> {
        self.forget(file)?;
        self.disk.create(file)
    }

    fn open(&self, file: FileName, write: bool) -> Result<Arc<dyn DiskFile>> {
        match file {
            FileName::Unfetched => Err(Error::io(IoAction::Open, file, None, ErrorKind::NotFound.into())),
            FileName::Pages(number) if self.files.contains(number) => {
                if write {
                    self.files.provide(number, 0..u64::MAX)?;
                    self.files.forget(number)?;
                    return self.disk.open(file, true);
                }
                let (file, files) = (self.disk.open(file, false)?, self.files.clone());
                Ok(Arc::new(FetchingFile { number, file, files }))
            }
            file => self.disk.open(file, write),
        }
    }

    fn directory(&self) -> Result<Option<PathBuf>> {
        self.disk.directory()
    }

    fn link(&self, source: &dyn Disk, file: FileName) -> Result<bool> {
        self.disk.link(source, file)
    }

    fn rename(&self, source: FileName, target: FileName) -> Result<()> {
        self.forget(source)?;
        self.forget(target)?;
        self.disk.rename(source, target)
    }

    fn remove(&self, file: FileName) -> Result<()> {
        if let FileName::Pages(number) = file { self.files.remove(number) } else { self.disk.remove(file) }
    }

    fn watch(&self, folder: Folder) -> Box<dyn Watch> {
        self.disk.watch(folder)
    }

    fn notify_watchers(&self, file: FileName) {
        self.disk.notify_watchers(file);
    }

    fn refuses(&self, io: LogIo) -> Result<Option<String>> {
        self.disk.refuses(io)
    }

    fn refuses_images(&self, io: ImageIo) -> Result<Option<String>> {
        self.disk.refuses_images(io)
    }
}

impl FetchingFile {
    /// Fetches the missing parts of a range. Returns false if the whole file was read back from the medium.
    fn provide(&self, offset: u64, len: usize) -> Result<bool> {
        self.files.provide(self.number, offset..offset.saturating_add(len as u64))
    }
}

impl DiskFile for FetchingFile {
    fn len(&self) -> Result<u64> {
        self.file.len()
    }

    fn is_without_holes(&self) -> Result<bool> {
        self.file.is_without_holes()
    }

    fn has_one_name(&self) -> Result<bool> {
        self.file.has_one_name()
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.file.write_at(offset, bytes)
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.provide(offset, out.len())?;
        self.file.read_at(offset, out)
    }

    fn read_bypassing_cache(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        // Fetched bytes may not be synced yet.
        if self.provide(offset, out.len())? {
            return self.file.read_at(offset, out);
        }
        self.file.read_bypassing_cache(offset, out)
    }

    fn read_proven(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.provide(offset, out.len())?;
        self.file.read_proven(offset, out)
    }

    fn reserve(&self, offset: u64, end: u64) -> Result<bool> {
        self.file.reserve(offset, end)
    }

    fn write_direct(&self, offset: u64, blocks: &[u8]) -> Result<()> {
        self.file.write_direct(offset, blocks)
    }

    fn cut(&self, len: u64) -> Result<()> {
        self.file.cut(len)
    }

    fn mapped_part(&self, range: Range<u64>) -> Result<Box<dyn Window>> {
        self.file.mapped_part(range)
    }

    fn memory(&self) -> Result<Option<Box<dyn FileMemory>>> {
        if self.files.contains(self.number) { Ok(None) } else { self.file.memory() }
    }

    fn write_back(&self, offset: u64, len: u64) {
        self.file.write_back(offset, len);
    }

    fn sync(&self) -> Result<()> {
        self.file.sync()
    }

    fn window(&self, io: LogIo) -> Result<Box<dyn Window>> {
        self.file.window(io)
    }
}
