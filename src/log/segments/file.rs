//! Writes and syncs a complete segment file under a temporary name, before the file is renamed to its segment name.

use std::sync::Arc;

use remanent_format::limits::GROUP_ALIGN;
use remanent_format::segment::{Opening, SEGMENT_HEADER_BLOCK, SegmentHeader};
use remanent_format::{FileName, Folder};

use super::SegmentPool;
use crate::disk::{DiskFile, Window};
use crate::error::{Error, Result};
use crate::options::LogIo;

/// The number of bytes by which a folder grows when a new name does not fit. XFS fails a rename if this space is not
/// free.
const FOLDER_BLOCK: u64 = 4096;

/// A completely written segment file, and the window through which frames are written to it.
pub(crate) struct SegmentFile {
    pub number: u64,
    pub len: u64,
    pub file: Arc<dyn DiskFile>,
    pub window: Arc<dyn Window>,
}

impl SegmentFile {
    /// Opens the window of a segment file that still has its temporary name. If opening the window failed after the
    /// rename to the segment's name, the log would continue with the replaced segment, and write frames to a file
    /// without a name.
    pub(super) fn new(number: u64, len: u64, file: Arc<dyn DiskFile>, io: LogIo) -> Result<Self> {
        let window = Arc::from(file.window(io)?);
        Ok(Self { number, len, file, window })
    }
}

impl SegmentPool {
    pub(super) fn header(&self, segment: u64, segment_len: u64, opening: Option<Opening>) -> SegmentHeader {
        SegmentHeader { store: self.store, segment, segment_len, opening }
    }

    /// Writes and syncs a complete segment under a temporary name. If there is no space, the call fails and nothing has
    /// changed. `content` contains the offset and the bytes of the segment's content after its header.
    pub(super) fn build(
        &self,
        number: u64,
        len: u64,
        opening: Option<Opening>,
        content: (u64, &[u8]),
    ) -> Result<Arc<dyn DiskFile>> {
        assert!(len.is_multiple_of(GROUP_ALIGN)); // I5: the last group of a segment ends on a block.
        let (at, bytes) = content;
        // I3: a frame is within its segment.
        assert!(at >= SEGMENT_HEADER_BLOCK && at + bytes.len() as u64 <= len);
        // If there is no space, spare image files are removed, because a store can work without them.
        self.image_spares.retry_without_spares(|| self.build_once(number, len, opening, content))
    }

    fn build_once(
        &self,
        number: u64,
        len: u64,
        opening: Option<Opening>,
        (at, bytes): (u64, &[u8]),
    ) -> Result<Arc<dyn DiskFile>> {
        let make = |temporary| self.disk.create(temporary);
        self.written(number, len, make, |file| {
            let mut front = header_block(&self.header(number, len, opening));
            front.resize(at as usize, 0);
            file.write_at(0, &front)?;
            file.write_at(at, bytes)?;
            // Every byte is written before the file is mapped. A hole, which `ftruncate` would create, would turn a
            // full disk into SIGBUS.
            let end = at + bytes.len() as u64;
            // In a direct log, the zeros also bypass the page cache. Over cached zeros, 256 KiB took 212 to 252 us to
            // write instead of 189 to 215.
            file.write_zeros(end, len, self.io)?;
            file.sync()?;
            Ok(file)
        })
    }

    /// Creates a file with `make` and fills it with `write`. If `write` fails, the file is removed, because its space
    /// may be needed on a full disk.
    pub(super) fn written<T>(
        &self,
        number: u64,
        len: u64,
        make: impl FnOnce(FileName) -> Result<T>,
        write: impl FnOnce(T) -> Result<Arc<dyn DiskFile>>,
    ) -> Result<Arc<dyn DiskFile>> {
        let temporary = FileName::Temporary(Folder::Log, number);
        // If `make` has failed, there is no file to remove.
        let remove = |_: &Error| self.remove_unfinished(temporary);
        make(temporary).and_then(|made| write(made).inspect_err(remove)).map_err(|error| {
            if error.is_no_space() { Error::disk_full(FileName::Segment(number), len) } else { error }
        })
    }

    pub(super) fn remove_unfinished(&self, temporary: FileName) {
        if let Err(error) = self.disk.remove(temporary) {
            tracing::warn!(%error, "cannot remove an unfinished segment; the next open will");
        }
    }

    /// Renames a file of the log. If there is no space for the name, the rename fails and nothing has changed.
    pub(super) fn rename(&self, source: FileName, target: FileName) -> Result<()> {
        self.image_spares.retry_without_spares(|| {
            self.disk.rename(source, target).map_err(|error| {
                if error.is_no_space() { Error::disk_full(target, FOLDER_BLOCK) } else { error }
            })
        })
    }

    /// Durably renames a completely written and synced file to its segment name. The folder is synced, because a power
    /// cut could otherwise undo the rename after frames were written to the preceding segment (I8).
    pub(super) fn publish(&self, source: FileName, number: u64) -> Result<()> {
        self.rename(source, FileName::Segment(number))?;
        self.disk.sync_folder(Folder::Log)
    }
}

/// Returns the header block of a segment. The block is padded with zeros, which overwrite the older header in a spare.
pub(super) fn header_block(header: &SegmentHeader) -> Vec<u8> {
    let mut block = header.encode().to_vec();
    block.resize(SEGMENT_HEADER_BLOCK as usize, 0);
    block
}
