//! A store directory as the format crate reads it: `ReadAt` on top of [`Disk`].

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use remanent_format::{FileName, Folder, ReadAt};

use crate::base::sync::Mutex;
use crate::disk::{Disk, DiskFile};
use crate::error::Error;

/// The maximum number of files that one source keeps open: those of a long history would exceed the process's
/// limit.
const FILES_OPEN_MAX: usize = 64;

/// Reads a store directory. Keeps some of the files open.
pub(crate) struct DiskSource {
    disk: Arc<dyn Disk>,
    way: ReadPath,
    files: Mutex<HashMap<FileName, Arc<dyn DiskFile>>>,
    /// The uncached ranges, if this source records them.
    uncached: Option<Uncached>,
}

/// The bytes of segments that were not in the page cache when a source first opened them. That source read
/// them from the medium, so a reader that needs the medium's bytes need not read them again (I6). This
/// replays an uncached log from ext4 in two thirds of the time.
type Uncached = Arc<Mutex<HashMap<FileName, Vec<Range<u64>>>>>;

/// How a source reads its bytes.
#[derive(Clone, Copy)]
enum ReadPath {
    /// The bytes that other processes see, through the page cache.
    Visible,
    /// The medium, if the system allows reads past its cache.
    PastCache,
    /// Cached bytes from the cache, the rest from the medium.
    Proven,
    /// The medium, except for bytes that another source read from it.
    PastCacheOnce,
}

impl DiskSource {
    /// Creates a source that reads through the page cache, like any other process.
    pub fn new(disk: Arc<dyn Disk>) -> Self {
        Self::by(disk, ReadPath::Visible)
    }

    /// Creates a source that reads through the page cache, and records which bytes come from the medium. See
    /// [`past_cache_once`](Self::past_cache_once).
    pub fn noting(disk: Arc<dyn Disk>) -> Self {
        Self { uncached: Some(Arc::default()), ..Self::by(disk, ReadPath::Visible) }
    }

    /// Creates a source that reads from the medium if the system allows it. Use this only for synced bytes.
    pub fn past_cache(disk: Arc<dyn Disk>) -> Self {
        Self::by(disk, ReadPath::PastCache)
    }

    /// Returns a source for the same directory that reads past the cache.
    pub fn on_medium(&self) -> Self {
        Self::past_cache(self.disk.clone())
    }

    /// Creates a source that reads cached bytes from the cache, and the rest from the medium. Use this only
    /// for bytes that were read past the cache since they were synced (I6).
    pub fn proven(disk: Arc<dyn Disk>) -> Self {
        Self::by(disk, ReadPath::Proven)
    }

    /// Returns a source that reads each byte from the medium once (I6): past the cache for bytes that this
    /// recording source may have read from the cache, and normally for bytes that this source read from the
    /// medium. Use this only for synced bytes that this source has read, and that no writer touched since it
    /// was created.
    pub fn past_cache_once(&self) -> Self {
        let uncached = self.uncached.clone();
        Self { uncached, ..Self::by(self.disk.clone(), ReadPath::PastCacheOnce) }
    }

    fn by(disk: Arc<dyn Disk>, way: ReadPath) -> Self {
        Self { disk, way, files: Mutex::default(), uncached: None }
    }

    /// Whether a file, which this source may still keep open, has lost its name. An image file loses its name
    /// before its bytes are overwritten (I13): if the name is gone, the bytes read prove nothing about the
    /// store. A system error counts as unknown and returns `false`.
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
        // Queried before anything of the file is read. Only for segments, because no reader asks about other
        // files.
        if let (ReadPath::Visible, Some(uncached), FileName::Segment(_)) = (self.way, &self.uncached, file) {
            uncached.lock().entry(file).or_insert_with(|| {
                let ranges = open.uncached();
                // I6: the lookup is a binary search. Unordered ranges would make it treat a cached range as
                // uncached.
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
        // The error number lets a decoder distinguish a shortage from a failing medium.
        Error::Io { source, .. } | Error::Folder { source, .. } if error.is_shortage() => {
            return source.raw_os_error().map_or_else(|| source.kind().into(), io::Error::from_raw_os_error);
        }
        Error::Io { source, .. } | Error::Folder { source, .. } => source.kind(),
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error)
}
