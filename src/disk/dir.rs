//! `DirDisk`: a store directory of a real file system.
//!
//! Every method is one or two system calls; the standard library retries those that a signal interrupts.
//! Names are resolved anew at each call. Open files go on naming the file that they were opened on, so a
//! rename underneath does not disturb them.

use std::fs::{File, OpenOptions};
use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use remanent_format::limits::GROUP_ALIGN;
use remanent_format::{FileName, Folder, ReadAt, SnapshotId};
use rustix::fs::{Advice, FallocateFlags};
use rustix::io::Errno;

use super::buffered::BufferedWindow;
use super::cached::read_cached;
use super::capabilities::{direct_refused, mapping_refused};
use super::direct::{self, DirectWindow};
use super::direct_read::{read_direct, reopen, reopen_direct};
use super::mapped::{self, MappedWindow, PartWindow};
use super::{
    Disk, DiskFile, DiskLock, Hold, Watch, Window, ZEROS_LEN_MAX, lock, reader_locks, watch, zeros_by_pieces,
};
use crate::base::sync::Mutex;
use crate::error::{Error, Result};
use crate::options::{ImageIo, LogIo};

/// A store directory of a real file system.
///
/// ```
/// use remanent::disk::{Disk, dir::DirDisk};
/// use remanent::{FileName, Folder};
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
    /// Descriptors for the syncs of folders, by [`folder_index`].
    folders: Arc<[OnceLock<File>; 4]>,
}

impl DirDisk {
    /// Names the store directory at `path`, which need not exist yet. A relative path is resolved now, so
    /// that a later change of the working directory does not move the store.
    #[must_use]
    pub fn new(path: impl AsRef<Path>) -> Self {
        let path = path.as_ref();
        let root = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        Self { root, folders: Arc::default() }
    }

    /// The store directory's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.root
    }

    fn folder_path(&self, folder: Folder) -> PathBuf {
        match folder {
            Folder::Root => self.root.clone(),
            inner => self.root.join(inner.name()),
        }
    }

    fn file_path(&self, file: FileName) -> PathBuf {
        self.folder_path(file.folder()).join(file.name())
    }

    fn folder_error(&self, action: &'static str, folder: Folder, source: io::Error) -> Error {
        let path = self.folder_path(folder);
        let shown = if path.as_os_str().is_empty() { "an empty path".into() } else { path.to_string_lossy() };
        Error::Folder { action, path: shown.into_owned(), source: Arc::new(source) }
    }

    /// The error of the block that is written to try direct writes.
    fn trial_failed(&self, folder: Folder, source: io::Error) -> Error {
        let error = self.folder_error("write past the page cache below", folder, source);
        if error.is_no_space() {
            Error::disk_full(FileName::Temporary(folder, 0), GROUP_ALIGN)
        } else {
            error
        }
    }

    /// The folder, or the store directory as long as it is not there: a folder may be a mount of its own, on
    /// another file system.
    fn asked_path(&self, folder: Folder) -> PathBuf {
        let path = self.folder_path(folder);
        if path.is_dir() { path } else { self.root.clone() }
    }

    fn refuses_mappings(&self, folder: Folder) -> Result<Option<String>> {
        mapping_refused(&self.asked_path(folder))
            .map_err(|errno| self.folder_error("ask the file system of", Folder::Root, errno.into()))
    }

    fn refuses_direct(&self, folder: Folder) -> Result<Option<String>> {
        direct_refused(&self.asked_path(folder)).map_err(|error| self.trial_failed(folder, error))
    }

    fn file_system(&self) -> Result<rustix::fs::StatVfs> {
        rustix::fs::statvfs(&self.root)
            .map_err(|errno| self.folder_error("look at", Folder::Root, errno.into()))
    }
}

impl Disk for DirDisk {
    fn label(&self) -> String {
        self.root.display().to_string()
    }

    fn lock(&self) -> Result<Box<dyn DiskLock>> {
        let lock = lock::acquire(&self.root)?;
        reader_locks::make(&self.root)?;
        Ok(lock)
    }

    fn is_locked(&self) -> Result<bool> {
        lock::is_locked(&self.root)
    }

    fn hold(&self, id: SnapshotId) -> Result<Hold> {
        reader_locks::hold(&self.root, id)
    }

    fn try_retire(&self, id: SnapshotId) -> Result<Option<Box<dyn DiskLock>>> {
        reader_locks::try_retire(&self.root, id)
    }

    fn is_held(&self, id: SnapshotId) -> Result<bool> {
        reader_locks::is_held(&self.root, id)
    }

    fn total_bytes(&self) -> Result<Option<u64>> {
        let system = self.file_system()?;
        // A file system may have no length.
        Ok(system.f_blocks.checked_mul(system.f_frsize).filter(|total| *total > 0))
    }

    fn free_bytes(&self) -> Result<Option<u64>> {
        let system = self.file_system()?;
        Ok(system.f_bavail.checked_mul(system.f_frsize).filter(|_| system.f_blocks > 0))
    }

    fn list(&self, folder: Folder) -> Result<Vec<String>> {
        list(&self.folder_path(folder)).map_err(|source| self.folder_error("list", folder, source))
    }

    fn make_folder(&self, folder: Folder) -> Result<()> {
        let path = self.folder_path(folder);
        let failed = |source| self.folder_error("make", folder, source);
        let existed = match std::fs::create_dir(&path) {
            Ok(()) => false,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => true,
            Err(error) => return Err(failed(error)),
        };
        // The entry of the store directory itself lies in a folder that no other call can name, so it is made
        // durable here. Also when it existed, because its maker may have died before its own sync.
        if folder == Folder::Root
            && let Some(parent) = path.parent()
        {
            match File::open(parent) {
                Ok(parent) => parent.sync_all().map_err(failed)?,
                // Another user's folder may be searchable without being readable. A process with more rights
                // made the entries of such a folder, and their durability is its concern.
                Err(error) if existed && error.kind() == io::ErrorKind::PermissionDenied => {}
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(())
    }

    fn make_parents(&self) -> Result<()> {
        let failed = |action, path: &Path| {
            let path = path.display().to_string();
            move |source| Error::Folder { action, path, source: Arc::new(source) }
        };
        let missing: Vec<&Path> = self.root.ancestors().skip(1).take_while(|path| !path.exists()).collect();
        for path in missing.into_iter().rev() {
            match std::fs::create_dir(path) {
                Ok(()) => {}
                // Another process made it first.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(failed("make", path)(error)),
            }
            // Its name is durable before anything is made in it.
            let above = path.parent().unwrap_or(Path::new("/"));
            File::open(above).and_then(|above| above.sync_all()).map_err(failed("sync", above))?;
        }
        Ok(())
    }

    fn sync_folder(&self, folder: Folder) -> Result<()> {
        let failed = |source| self.folder_error("sync", folder, source);
        match self.folders[folder_index(folder)].get() {
            Some(folder) => folder.sync_all().map_err(failed),
            None => File::open(self.folder_path(folder)).and_then(|opened| opened.sync_all()).map_err(failed),
        }
    }

    fn keep_folders_open(&self) -> Result<()> {
        for folder in [Folder::Root].into_iter().chain(Folder::INNER) {
            let kept = &self.folders[folder_index(folder)];
            if kept.get().is_none() {
                let opened = File::open(self.folder_path(folder));
                let opened = opened.map_err(|source| self.folder_error("open", folder, source))?;
                // If another thread was first, its descriptor serves as well.
                drop(kept.set(opened));
            }
        }
        Ok(())
    }

    fn create(&self, file: FileName) -> Result<Arc<dyn DiskFile>> {
        refuse_lock_file(file);
        OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o644)
            .open(self.file_path(file))
            .map(|opened| DirFile::shared(opened, file))
            .map_err(|source| Error::io("create", file, None, source))
    }

    fn open(&self, file: FileName, write: bool) -> Result<Arc<dyn DiskFile>> {
        refuse_lock_file(file);
        OpenOptions::new()
            .read(true)
            .write(write)
            .open(self.file_path(file))
            .map(|opened| DirFile::shared(opened, file))
            .map_err(|source| Error::io("open", file, None, source))
    }

    fn directory(&self) -> Option<&Path> {
        Some(&self.root)
    }

    fn link(&self, source: &dyn Disk, file: FileName) -> Result<bool> {
        let Some(source) = source.directory() else { return Ok(false) };
        let source = Self::new(source);
        match std::fs::hard_link(source.file_path(file), self.file_path(file)) {
            Ok(()) => Ok(true),
            // Another file system, one without links, too many links, or another user's file.
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
            Err(error) => Err(Error::io("link", file, None, error)),
        }
    }

    fn rename(&self, source: FileName, target: FileName) -> Result<()> {
        std::fs::rename(self.file_path(source), self.file_path(target))
            .map_err(|error| Error::io("rename", source, None, error))
    }

    fn remove(&self, file: FileName) -> Result<()> {
        std::fs::remove_file(self.file_path(file)).map_err(|source| Error::io("remove", file, None, source))
    }

    fn watch(&self, folder: Folder) -> Box<dyn Watch> {
        watch::watch(&self.folder_path(folder))
    }

    /// Closing a file that was open for writing is an event. It costs two system calls and changes nothing on
    /// disk.
    fn tell_watchers(&self, file: FileName) {
        refuse_lock_file(file);
        if let Err(error) = OpenOptions::new().write(true).open(self.file_path(file)) {
            tracing::debug!(%error, %file, "followers are not told of a batch");
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
            ImageIo::Mapped => self.refuses_mappings(Folder::Pages),
            ImageIo::Buffered => Ok(None),
            ImageIo::Direct => self.refuses_direct(Folder::Pages),
        }
    }
}

/// The index of a folder's kept descriptor.
fn folder_index(folder: Folder) -> usize {
    Folder::INNER.iter().position(|inner| *inner == folder).map_or(0, |inner| inner + 1)
}

/// Refuses `LOCK`, which only `lock.rs` may open: closing any descriptor of it drops the process's record
/// lock.
fn refuse_lock_file(file: FileName) {
    assert!(file != FileName::Lock, "LOCK is opened by the lock alone");
}

/// The names in a folder, sorted; empty if the folder does not exist. A name that is not UTF-8 is shown with
/// replacement characters: it is foreign in any case.
fn list(path: &Path) -> io::Result<Vec<String>> {
    let entries = match std::fs::read_dir(path) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut names = entries
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<io::Result<Vec<_>>>()?;
    names.sort_unstable();
    Ok(names)
}

/// One open file of the directory.
struct DirFile {
    file: File,
    name: FileName,
    /// A second descriptor that reads past the page cache, opened when first needed. Inside, `None` where the
    /// file system has no such reads.
    direct: Mutex<Option<Option<Arc<File>>>>,
    /// A descriptor that writes past the page cache, opened when first needed.
    direct_writes: Mutex<Option<Arc<File>>>,
    /// Whether the page cache has nothing that the medium lacks, as far as it was asked.
    is_synced: Mutex<bool>,
}

impl DirFile {
    fn shared(file: File, name: FileName) -> Arc<dyn DiskFile> {
        Arc::new(Self {
            file,
            name,
            direct: Mutex::new(None),
            direct_writes: Mutex::new(None),
            is_synced: Mutex::new(false),
        })
    }

    fn direct(&self) -> Option<Arc<File>> {
        self.direct.lock().get_or_insert_with(|| reopen_direct(&self.file).map(Arc::new)).clone()
    }

    fn past_cache(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        if let Some(direct) = self.direct() {
            match read_direct(&direct, offset, out) {
                // Some file systems accept the flag at open and refuse the read.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => {}
                done => return done,
            }
        }
        // Synced pages are clean, so the kernel can drop them, and must then ask the medium again. If it
        // keeps them, this is an ordinary read.
        let len = NonZeroU64::new(out.len() as u64);
        if len.is_some() {
            let _ = rustix::fs::fadvise(&self.file, offset, len, Advice::DontNeed);
        }
        self.file.read_exact_at(out, offset)
    }

    fn failed(&self, action: &'static str, offset: u64) -> impl FnOnce(io::Error) -> Error {
        let name = self.name;
        move |source| Error::io(action, name, Some(offset), source)
    }
}

impl DiskFile for DirFile {
    fn len(&self) -> Result<u64> {
        let metadata = self.file.metadata();
        metadata.map(|found| found.len()).map_err(|source| Error::io("measure", self.name, None, source))
    }

    fn is_without_holes(&self) -> Result<bool> {
        // The unit of the system's count, whatever a file system's blocks are.
        const COUNTED_LEN: u64 = 512;
        let metadata = self.file.metadata();
        metadata
            .map(|found| found.blocks() * COUNTED_LEN >= found.len())
            .map_err(|source| Error::io("measure", self.name, None, source))
    }

    fn has_one_name(&self) -> Result<bool> {
        let metadata = self.file.metadata();
        metadata
            .map(|found| found.nlink() == 1)
            .map_err(|source| Error::io("measure", self.name, None, source))
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.file.write_all_at(bytes, offset).map_err(self.failed("write", offset))
    }

    /// Writes zeros in pieces that suit the window.
    ///
    /// The kernel may keep the bytes of one write in its page cache as one page as long as the write. A
    /// mapped log would pay for that: where its zeros had come 256 KiB at a time, syncing 4 KiB of it wrote
    /// 256 KiB (Linux 6.18, ext4), and a store next to those 4 KiB waited for that write. So a mapped log
    /// gets its zeros page by page.
    fn write_zeros(&self, offset: u64, end: u64, io: LogIo) -> Result<()> {
        let piece_len = match io {
            LogIo::Mapped => rustix::param::page_size() as u64,
            LogIo::Direct | LogIo::Buffered => ZEROS_LEN_MAX,
        };
        let direct = match io {
            LogIo::Direct => offset.next_multiple_of(GROUP_ALIGN).min(end),
            LogIo::Mapped | LogIo::Buffered => end,
        };
        zeros_by_pieces(offset, direct, piece_len, |at, zeros| self.write_at(at, zeros))?;
        direct::write_zeros(&self.file, direct, end).map_err(self.failed("write", direct))
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(out, offset).map_err(self.failed("read", offset))
    }

    fn read_past_cache(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.past_cache(offset, out).map_err(self.failed("read", offset))
    }

    /// Reads from the cache what it has, once the file is synced. A store that a program copied here a moment
    /// ago, without a sync, lies in the cache alone, so the file is synced first, once (I6). For a clean file
    /// that is no work.
    fn read_proven(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let mut is_synced = self.is_synced.lock();
        if !*is_synced {
            self.sync()?;
            *is_synced = true;
        }
        drop(is_synced);
        let cached = read_cached(&self.file, offset, out);
        match &mut out[cached..] {
            [] => Ok(()),
            rest => self.past_cache(offset + cached as u64, rest).map_err(self.failed("read", offset)),
        }
    }

    /// Counts ranges that cannot be asked about as cached, so that they are read past the cache (I6).
    fn uncached(&self) -> Vec<Range<u64>> {
        mapped::uncached(&self.file).unwrap_or_default()
    }

    fn reserve(&self, offset: u64, end: u64) -> Result<bool> {
        loop {
            match rustix::fs::fallocate(&self.file, FallocateFlags::empty(), offset, end - offset) {
                Ok(()) => return Ok(true),
                Err(Errno::INTR) => {}
                Err(Errno::OPNOTSUPP | Errno::NOSYS) => return Ok(false),
                Err(errno) => return Err(self.failed("make space in", offset)(errno.into())),
            }
        }
    }

    fn write_direct(&self, offset: u64, blocks: &[u8]) -> Result<()> {
        let opened = {
            let mut opened = self.direct_writes.lock();
            match &*opened {
                Some(file) => file.clone(),
                None => {
                    let file = direct::open_writer(&self.file).map_err(self.failed("open", offset))?;
                    opened.insert(Arc::new(file)).clone()
                }
            }
        };
        direct::write_blocks(&opened, offset, blocks).map_err(self.failed("write", offset))
    }

    fn cut(&self, len: u64) -> Result<()> {
        self.file.set_len(len).map_err(self.failed("cut", len))
    }

    fn mapped_part(&self, range: Range<u64>) -> Result<Box<dyn Window>> {
        let failed = self.failed("map", range.start);
        Ok(Box::new(PartWindow::new(&self.file, self.name, range).map_err(failed)?))
    }

    /// Advises the kernel to forget the pages. It writes dirty ones first, and does not wait for that.
    fn write_back(&self, offset: u64, len: u64) {
        let _advice = rustix::fs::fadvise(&self.file, offset, NonZeroU64::new(len), Advice::DontNeed);
    }

    fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(|source| Error::io("sync", self.name, None, source))
    }

    fn window(&self, io: LogIo) -> Result<Box<dyn Window>> {
        let failed = |source| Error::io("map", self.name, None, source);
        Ok(match io {
            LogIo::Mapped => Box::new(MappedWindow::new(&self.file, self.name).map_err(failed)?),
            LogIo::Buffered => {
                let file = self.file.try_clone().map_err(failed)?;
                Box::new(BufferedWindow::new(file, self.name, self.len()?))
            }
            LogIo::Direct => {
                let file = reopen(&self.file, direct::FLAGS).map_err(|errno| failed(errno.into()))?;
                Box::new(DirectWindow::new(file, self.name, self.len()?).map_err(failed)?)
            }
        })
    }
}

/// Reads a store directory for the pure decoders, without a lock.
///
/// Keeps the file that was read last open, because decoders read a file in many small pieces.
#[derive(Debug)]
pub struct DirReader {
    disk: DirDisk,
    last: Mutex<Option<(FileName, Arc<File>)>>,
}

impl DirReader {
    /// Makes a reader of the store directory at `path`.
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
        list(&self.disk.folder_path(folder))
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
            // Closing it again would drop this process's own record lock on it.
            return Err(io::ErrorKind::Unsupported.into());
        }
        let open = self.open(file)?;
        open.read_exact_at(out, offset)?;
        // A writer takes an image file's name away before it writes over it (I13).
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
    use super::super::capabilities::direct_verdict;
    use super::super::direct_read::BOUNCE_LEN_MAX;
    use super::*;
    use crate::error::Remedy;

    #[test]
    fn a_disk_that_is_full_or_fails_is_no_reason_against_direct_writes() {
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
    fn a_real_file_system_is_asked() {
        let reason = DirDisk::new("/proc").refuses(LogIo::Mapped).unwrap().unwrap();
        assert!(reason.contains("0x9fa0"), "{reason}");
        let missing = DirDisk::new("/proc/no such folder").refuses(LogIo::Mapped);
        assert!(matches!(missing, Err(Error::Folder { .. })));
    }

    #[test]
    fn zeros_are_where_the_window_looks_for_them() {
        let directory = tempfile::tempdir().unwrap();
        let disk = DirDisk::new(directory.path());
        let len = 3 << 20;
        for (number, io) in [(1, LogIo::Direct), (2, LogIo::Buffered), (3, LogIo::Mapped)] {
            let name = FileName::Temporary(Folder::Root, number);
            let file = disk.create(name).unwrap();
            file.write_at(0, &[7; 5000]).unwrap();
            file.write_zeros(5000, len, io).unwrap();
            file.sync().unwrap();
            let path = disk.file_path(name);
            let cached = read_cached(&File::open(&path).unwrap(), 8192, &mut [0; 4096]);
            if io == LogIo::Direct && disk.refuses(io).unwrap().is_some() {
                eprintln!("SKIPPED: no direct writes in {}", path.display());
            } else {
                assert_eq!(cached > 0, io != LogIo::Direct, "{io}");
            }
            let found = std::fs::read(path).unwrap();
            assert_eq!(found.len() as u64, len, "{io}");
            assert!(found[..5000] == [7; 5000] && found[5000..].iter().all(|byte| *byte == 0), "{io}");
        }
    }

    /// A page of the cache that is longer than the processor's would be written whole, and a store to its
    /// other parts would wait.
    #[test]
    fn a_sync_of_a_mapped_page_leaves_the_others_alone() {
        let directory = tempfile::tempdir().unwrap();
        let disk = DirDisk::new(directory.path());
        if let Some(reason) = disk.refuses(LogIo::Mapped).unwrap() {
            eprintln!("SKIPPED: no mapped log in {}: {reason}", directory.path().display());
            return;
        }
        let file = disk.create(FileName::Temporary(Folder::Root, 1)).unwrap();
        let len = 1 << 20;
        file.write_zeros(0, len, LogIo::Mapped).unwrap();
        file.sync().unwrap();
        let window = file.window(LogIo::Mapped).unwrap();
        window.prefault(0, len);
        let page_len = rustix::param::page_size() as u64;
        let put = |at: u64| {
            let before = mapped::faults();
            window.put(at, b"stored").unwrap();
            mapped::faults() - before
        };
        let mut faults = 0;
        for at in (0..len).step_by(page_len as usize) {
            faults += put(at);
            window.sync(at, page_len).unwrap();
        }
        // A process that has the system write everything dirty makes some of them fault anew.
        assert!(faults < len / page_len / 4, "{faults}");
    }

    /// Past the cache the same bytes come for every alignment of offset, length and end of file.
    #[test]
    fn reads_past_the_cache_need_no_alignment() {
        let directory = tempfile::tempdir().unwrap();
        let disk = DirDisk::new(directory.path());
        let file = disk.create(FileName::Store).unwrap();
        let len = 2 * BOUNCE_LEN_MAX + 5000;
        let bytes: Vec<u8> = (0..len).map(|index| (index % 251) as u8).collect();
        file.write_at(0, &bytes).unwrap();
        file.sync().unwrap();
        // A file keeps its bytes under another name.
        disk.rename(FileName::Store, FileName::Temporary(Folder::Root, 1)).unwrap();
        for (offset, len) in [
            (0, len),
            (1, len - 1),
            (0, 0),
            (4095, 2),
            (4096, 4096),
            (len - 1, 1),
            (len - 5001, 5001),
            (123, BOUNCE_LEN_MAX),
        ] {
            let mut out = vec![0; len];
            file.read_past_cache(offset as u64, &mut out).unwrap();
            assert!(out == bytes[offset..offset + len], "{offset}+{len}");
        }
        for (offset, len) in [(len, 1), (len - 1, 2), (len + 5000, 1), (0, len + 1)] {
            let error = file.read_past_cache(offset as u64, &mut vec![0; len]).unwrap_err();
            let Error::Io { source, .. } = &error else { panic!("{error}") };
            assert_eq!(source.kind(), io::ErrorKind::UnexpectedEof, "{offset}+{len}");
        }
    }

    #[test]
    fn the_plain_way_past_the_cache_reads_the_same() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("STORE"), b"some bytes").unwrap();
        let file = File::open(directory.path().join("STORE")).unwrap();
        // As on a file system that has no direct reads.
        let file = DirFile {
            file,
            name: FileName::Store,
            direct: Mutex::new(Some(None)),
            direct_writes: Mutex::new(None),
            is_synced: Mutex::new(false),
        };
        let mut out = [0; 5];
        file.read_past_cache(5, &mut out).unwrap();
        assert_eq!(&out, b"bytes");
        assert_eq!(file.read_past_cache(6, &mut out).unwrap_err().offset(), Some(6));
    }
}
