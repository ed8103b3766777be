//! A store directory as the format crate reads it: `ReadAt` over the disk seam.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use remanent_format::{FileName, Folder, ReadAt};

use crate::base::sync::Mutex;
use crate::disk::{Disk, DiskFile};
use crate::error::Error;

/// Files that one source keeps open: those of a long history would exceed what a process may have.
const FILES_OPEN_MAX: usize = 64;

/// Reads a store directory; files stay open while it lives, some of them.
pub(crate) struct DiskSource {
    disk: Arc<dyn Disk>,
    way: ReadPath,
    files: Mutex<HashMap<FileName, Arc<dyn DiskFile>>>,
    /// If it notes that.
    uncached: Option<Uncached>,
}

/// What the page cache did not have of segments when a source first opened them. What that source has read of it came
/// from the medium, so whoever wants the medium's bytes need not ask it again: a log that nobody has read yet is
/// replayed from ext4 in two thirds of the time. (To have the system fetch the next piece while one is checked, too,
/// gained nothing: it reads ahead by itself.)
type Uncached = Arc<Mutex<HashMap<FileName, Vec<Range<u64>>>>>;

/// Where bytes come from.
#[derive(Clone, Copy)]
enum ReadPath {
    /// Whatever a process would see.
    Visible,
    /// The medium, where the system lets us ask past its cache.
    PastCache,
    /// The cache where it has them at once, else the medium.
    Proven,
    /// The medium, but for what another source had from it.
    PastCacheOnce,
}

impl DiskSource {
    /// Reads what a process would see.
    pub fn new(disk: Arc<dyn Disk>) -> Self {
        Self::by(disk, ReadPath::Visible)
    }

    /// Reads what a process would see, and notes what of it comes from the medium. See
    /// [`past_cache_once`](Self::past_cache_once).
    pub fn noting(disk: Arc<dyn Disk>) -> Self {
        Self { uncached: Some(Arc::default()), ..Self::by(disk, ReadPath::Visible) }
    }

    /// Reads from the medium where the system lets us. Only for bytes that are synced.
    pub fn past_cache(disk: Arc<dyn Disk>) -> Self {
        Self::by(disk, ReadPath::PastCache)
    }

    /// Reads from the cache what it has, else from the medium. Only for bytes that were read past the cache once
    /// since they were synced.
    pub fn proven(disk: Arc<dyn Disk>) -> Self {
        Self::by(disk, ReadPath::Proven)
    }

    /// Reads from the medium what a source that notes such things may have had from the cache, and as a process would
    /// see it what that one had from the medium. Only for synced bytes that it has read, and that nobody wrote to
    /// since it was made.
    pub fn past_cache_once(&self) -> Self {
        let uncached = self.uncached.clone();
        Self { uncached, ..Self::by(self.disk.clone(), ReadPath::PastCacheOnce) }
    }

    fn by(disk: Arc<dyn Disk>, way: ReadPath) -> Self {
        Self { disk, way, files: Mutex::default(), uncached: None }
    }

    fn was_uncached(&self, file: FileName, range: &Range<u64>) -> bool {
        let Some(uncached) = &self.uncached else { return false };
        let uncached = uncached.lock();
        let ranges = uncached.get(&file).map_or(&[][..], Vec::as_slice);
        let before = ranges.partition_point(|uncached| uncached.end < range.end);
        ranges.get(before).is_some_and(|uncached| uncached.start <= range.start)
    }

    fn file(&self, file: FileName) -> Result<Arc<dyn DiskFile>, Error> {
        let mut files = self.files.lock();
        if let Some(open) = files.get(&file) {
            return Ok(open.clone());
        }
        let open = self.disk.open(file, false)?;
        // Before anything of it is read. Nobody asks about other files.
        if let (ReadPath::Visible, Some(uncached), FileName::Segment(_)) = (self.way, &self.uncached, file) {
            uncached.lock().entry(file).or_insert_with(|| open.uncached());
        }
        if files.len() == FILES_OPEN_MAX {
            files.clear();
        }
        files.insert(file, open.clone());
        Ok(open)
    }
}

impl ReadAt for DiskSource {
    fn list(&self, folder: Folder) -> io::Result<Vec<String>> {
        self.disk.list(folder).map_err(to_io)
    }

    fn len(&self, file: FileName) -> io::Result<Option<u64>> {
        match self.file(file).and_then(|open| open.len()).map_err(to_io) {
            Ok(len) => Ok(Some(len)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn read_at(&self, file: FileName, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let open = self.file(file).map_err(to_io)?;
        let read = match self.way {
            ReadPath::Visible => open.read_at(offset, out),
            ReadPath::PastCache => open.read_past_cache(offset, out),
            ReadPath::Proven => open.read_proven(offset, out),
            ReadPath::PastCacheOnce if self.was_uncached(file, &(offset..offset + out.len() as u64)) => {
                open.read_at(offset, out)
            }
            ReadPath::PastCacheOnce => open.read_past_cache(offset, out),
        };
        read.map_err(to_io)
    }
}

fn to_io(error: Error) -> io::Error {
    let kind = match &error {
        // By its number a decoder tells a shortage from a medium that fails.
        Error::Io { source, .. } | Error::Folder { source, .. } if error.is_shortage() => {
            return source.raw_os_error().map_or_else(|| source.kind().into(), io::Error::from_raw_os_error);
        }
        Error::Io { source, .. } | Error::Folder { source, .. } => source.kind(),
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error)
}
