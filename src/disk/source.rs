//! Implements the format crate's `ReadAt` for the files of a [`Disk`].

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use remanent_format::{Damage, Defect, FileName, Folder, ReadAt};

use crate::base::sync::Mutex;
use crate::base::{huge_pages, parallel};
use crate::disk::{Disk, DiskFile};
use crate::error::Error;

/// The maximum number of files that one source keeps open. Keeping all files of a long history open would exceed the
/// process's limit.
const FILES_OPEN_MAX: usize = 64;

/// The minimum length in bytes of a read that several threads share. Only batches of this length are read at once.
const SPLIT_LEN_MIN: usize = 16 << 20;
/// The number of bytes that a thread reads at a time.
const SPLIT_LEN: usize = 2 << 20;
/// The maximum number of threads that share a read.
const READERS_MAX: usize = 8;

/// A reader of a store directory for the decoders of the format crate. The source keeps some files open between reads.
pub(crate) struct DiskSource {
    disk: Arc<dyn Disk>,
    way: ReadPath,
    files: Mutex<HashMap<FileName, Arc<dyn DiskFile>>>,
    /// The last failure of an archive for each file, which an I/O error cannot contain.
    failures: Mutex<HashMap<FileName, Error>>,
    /// The record of the uncached ranges of segments, or `None` if this source does not record them.
    uncached: Option<Uncached>,
}

/// The byte ranges of segments that were not in the page cache when the recording source first opened each segment.
/// That source read these ranges from the medium, so a reader that needs the medium's bytes can skip them (I6).
/// Skipping the ranges reduces the time to replay an uncached log from ext4 by a third.
type Uncached = Arc<Mutex<HashMap<FileName, Vec<Range<u64>>>>>;

/// The place from which a source reads bytes: the page cache, the medium, or a combination of them.
#[derive(Clone, Copy)]
enum ReadPath {
    /// Through the page cache, so that the source sees the same bytes as other processes.
    Visible,
    /// From the medium, if the system allows reads that bypass the page cache.
    BypassingCache,
    /// From the page cache where bytes are cached, otherwise from the medium.
    Proven,
    /// From the medium, except for the bytes that the recording source has already read from the medium.
    BypassingCacheOnce,
}

impl DiskSource {
    /// Creates a source that reads through the page cache.
    pub fn new(disk: Arc<dyn Disk>) -> Self {
        Self::by(disk, ReadPath::Visible)
    }

    /// Creates a source that reads through the page cache and records the bytes that it reads from the medium, for
    /// [`bypassing_cache_once`](Self::bypassing_cache_once).
    pub fn noting(disk: Arc<dyn Disk>) -> Self {
        Self { uncached: Some(Arc::default()), ..Self::by(disk, ReadPath::Visible) }
    }

    /// Creates a source that reads from the medium, if the system allows reads that bypass the page cache. The bytes
    /// must have been synced.
    pub fn bypassing_cache(disk: Arc<dyn Disk>) -> Self {
        Self::by(disk, ReadPath::BypassingCache)
    }

    /// Returns a source for the same directory that reads from the medium.
    pub fn on_medium(&self) -> Self {
        Self::bypassing_cache(self.disk.clone())
    }

    /// Creates a source that reads cached bytes from the page cache, and all others from the medium. The bytes must
    /// have been read from the medium after their last sync (I6).
    pub fn proven(disk: Arc<dyn Disk>) -> Self {
        Self::by(disk, ReadPath::Proven)
    }

    /// Returns a source that reads from the medium the bytes that this recording source may have read from the page
    /// cache. Together, the two sources read each byte from the medium once (I6).
    ///
    /// The bytes must have been synced and read by this source, and no writer may have modified them since this source
    /// was created.
    pub fn bypassing_cache_once(&self) -> Self {
        let uncached = self.uncached.clone();
        Self { uncached, ..Self::by(self.disk.clone(), ReadPath::BypassingCacheOnce) }
    }

    fn by(disk: Arc<dyn Disk>, way: ReadPath) -> Self {
        Self { disk, way, files: Mutex::default(), failures: Mutex::default(), uncached: None }
    }

    /// Returns whether a file no longer exists under its name, even if this source keeps the file open. An image file
    /// loses its name before it is overwritten (I13), so bytes read from a file without a name prove nothing about the
    /// store. Returns `false` if the system returns an error.
    pub fn is_gone(&self, file: FileName) -> bool {
        Self::new(self.disk.clone()).len(file).is_ok_and(|len| len.is_none())
    }

    /// Returns the failure to fetch a part from an archive that made a file unreadable, if `damage` reports an unreadable
    /// file.
    pub fn archive_failure(&self, damage: &Damage) -> Option<Error> {
        let is_unreadable = matches!(damage.defect, Defect::Unreadable(_));
        self.failures.lock().get(&damage.file).filter(|_| is_unreadable).cloned()
    }

    /// Returns the error for damage that a read from this source has found: the failure of the archive, if it made the
    /// file unreadable.
    pub fn error_of(&self, damage: Damage) -> Error {
        self.archive_failure(&damage).unwrap_or_else(|| damage.into())
    }

    /// Returns the failure of an archive that `error` reports as damage, and otherwise `error` itself.
    pub fn cause_of(&self, error: Error) -> Error {
        let Error::Damaged(damaged) = &error else { return error };
        self.archive_failure(&damaged.damage).unwrap_or(error)
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
        // The cache is queried before any byte of the file is read. Only segments are queried, because readers need the
        // ranges of no other file.
        if let (ReadPath::Visible, Some(uncached), FileName::Segment(_)) = (self.way, &self.uncached, file) {
            uncached.lock().entry(file).or_insert_with(|| {
                let ranges = open.uncached();
                // I6: the lookup is a binary search. Unordered ranges would make it treat a cached range as uncached.
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

    fn allocate(&self, len: usize) -> io::Result<Vec<u8>> {
        huge_pages::allocate(len)
    }

    fn read_at(&self, file: FileName, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let open = self.file(file).map_err(to_io)?;
        let read = match self.way {
            ReadPath::Visible if out.len() >= SPLIT_LEN_MIN => read_by_threads(&*open, offset, out),
            ReadPath::Visible => open.read_at(offset, out),
            ReadPath::BypassingCache => open.read_bypassing_cache(offset, out),
            ReadPath::Proven => open.read_proven(offset, out),
            ReadPath::BypassingCacheOnce if self.was_uncached(file, &(offset..offset + out.len() as u64)) => {
                open.read_at(offset, out)
            }
            ReadPath::BypassingCacheOnce => open.read_bypassing_cache(offset, out),
        };
        read.map_err(|error| {
            let mut failures = self.failures.lock();
            if matches!(error, Error::Archive(_) | Error::Overtaken { .. }) || error.is_no_space() {
                failures.insert(file, error.clone());
            } else {
                // An earlier failure of the archive must not hide one of the medium.
                failures.remove(&file);
            }
            to_io(error)
        })
    }
}

/// Reads a long range with several threads, which also share the page faults of memory that is touched for the first
/// time.
fn read_by_threads(file: &dyn DiskFile, offset: u64, out: &mut [u8]) -> Result<(), Error> {
    let pieces = (offset..).step_by(SPLIT_LEN).zip(out.chunks_mut(SPLIT_LEN));
    let read = |(offset, piece): (u64, &mut [u8])| file.read_at(offset, piece);
    parallel::for_each(parallel::threads(READERS_MAX), pieces, read).map(drop)
}

fn to_io(error: Error) -> io::Error {
    let kind = match &error {
        // The error number is preserved, so that a decoder can distinguish a shortage of memory or file handles from a
        // failing medium.
        Error::Io { source, .. } if error.is_shortage() => {
            return source.raw_os_error().map_or_else(|| source.kind().into(), io::Error::from_raw_os_error);
        }
        Error::Io { source, .. } => source.kind(),
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::sim_disk::SimDisk;

    #[test]
    fn long_reads_return_the_same_bytes_or_errors() {
        let bytes: Vec<u8> =
            (0..SPLIT_LEN_MIN + 5 * SPLIT_LEN).map(|at| (at / 3 + at / 70_001) as u8).collect();
        let (disk, file) = (SimDisk::new(), FileName::Segment(1));
        disk.make_folder(Folder::Log).unwrap();
        disk.create(file).unwrap().write_at(0, &bytes).unwrap();
        let source = DiskSource::new(Arc::new(disk));
        for (offset, len) in
            [(0, bytes.len()), (77, SPLIT_LEN_MIN), (SPLIT_LEN + 1, SPLIT_LEN_MIN + 3), (5, 9)]
        {
            let mut read = source.allocate(len).unwrap();
            source.read_at(file, offset as u64, &mut read).unwrap();
            assert!(read == bytes[offset..offset + len], "{len} bytes at {offset}");
        }
        let mut read = vec![0; SPLIT_LEN_MIN];
        let after_end = (bytes.len() - SPLIT_LEN_MIN + 1) as u64;
        let error = source.read_at(file, after_end, &mut read).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        assert!(source.read_at(FileName::Segment(2), 0, &mut read).is_err());
    }
}
