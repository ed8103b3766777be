//! A store directory as the format crate reads it: `ReadAt` over the disk seam.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use remanent_format::{FileName, Folder, ReadAt};

use crate::base::sync::Mutex;
use crate::disk::{Disk, DiskFile};
use crate::error::Error;

/// The most files that one source keeps open: those of a long history would exceed the limit of a process.
const FILES_OPEN_MAX: usize = 64;

/// Reads a store directory. Some of the files stay open while it lives.
pub(crate) struct DiskSource {
    disk: Arc<dyn Disk>,
    way: ReadPath,
    files: Mutex<HashMap<FileName, Arc<dyn DiskFile>>>,
    /// The uncached ranges, if this source notes them.
    uncached: Option<Uncached>,
}

/// The bytes of segments that the page cache did not have when a source first opened them. That source's
/// reads of them came from the medium, so a reader that wants the medium's bytes need not ask it again (I6).
/// A log that was not read before is replayed from ext4 in two thirds of the time.
type Uncached = Arc<Mutex<HashMap<FileName, Vec<Range<u64>>>>>;

/// The way by which a source gets its bytes.
#[derive(Clone, Copy)]
enum ReadPath {
    /// The bytes that any process would see.
    Visible,
    /// The medium, where the system lets a process ask past its cache.
    PastCache,
    /// The cache where it has the bytes at once, else the medium.
    Proven,
    /// The medium, except for bytes that another source had from it.
    PastCacheOnce,
}

impl DiskSource {
    /// Reads the bytes that any process would see.
    pub fn new(disk: Arc<dyn Disk>) -> Self {
        Self::by(disk, ReadPath::Visible)
    }

    /// Reads the bytes that any process would see, and notes which of them come from the medium. See
    /// [`past_cache_once`](Self::past_cache_once).
    pub fn noting(disk: Arc<dyn Disk>) -> Self {
        Self { uncached: Some(Arc::default()), ..Self::by(disk, ReadPath::Visible) }
    }

    /// Reads from the medium where the system allows it. Only for bytes that are synced.
    pub fn past_cache(disk: Arc<dyn Disk>) -> Self {
        Self::by(disk, ReadPath::PastCache)
    }

    /// The same directory, read past the cache.
    pub fn on_medium(&self) -> Self {
        Self::past_cache(self.disk.clone())
    }

    /// Reads from the cache the bytes that it has, and the rest from the medium. Only for bytes that were
    /// read past the cache once since they were synced (I6).
    pub fn proven(disk: Arc<dyn Disk>) -> Self {
        Self::by(disk, ReadPath::Proven)
    }

    /// Makes a source that takes each byte from the medium once. It reads from the medium the bytes that a
    /// noting source may have had from the cache, and as any process would the bytes that the noting source
    /// had from the medium (I6). Only for synced bytes that the noting source has read, and that no writer
    /// touched since it was made.
    pub fn past_cache_once(&self) -> Self {
        let uncached = self.uncached.clone();
        Self { uncached, ..Self::by(self.disk.clone(), ReadPath::PastCacheOnce) }
    }

    fn by(disk: Arc<dyn Disk>, way: ReadPath) -> Self {
        Self { disk, way, files: Mutex::default(), uncached: None }
    }

    /// Whether a file has lost its name, which this source may still keep open. An image file whose bytes are
    /// written over lost it before (I13): where it is gone, what was read proves nothing about the store. An
    /// error of the system's says nothing.
    pub fn is_gone(&self, file: FileName) -> bool {
        Self::new(self.disk.clone()).len(file).is_ok_and(|len| len.is_none())
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
        // Before anything of the file is read. Only for segments, because no reader asks about other files.
        if let (ReadPath::Visible, Some(uncached), FileName::Segment(_)) = (self.way, &self.uncached, file) {
            uncached.lock().entry(file).or_insert_with(|| {
                let ranges = open.uncached();
                // I6: the look-up halves them. Out of order it would take a cached range for an uncached one.
                assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start));
                ranges
            });
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
        // The error's number tells a decoder a shortage from a medium that fails.
        Error::Io { source, .. } | Error::Folder { source, .. } if error.is_shortage() => {
            return source.raw_os_error().map_or_else(|| source.kind().into(), io::Error::from_raw_os_error);
        }
        Error::Io { source, .. } | Error::Folder { source, .. } => source.kind(),
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error)
}
