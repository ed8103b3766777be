//! Reads a segment while a writer may be appending to the segment or recycling it.
//!
//! The reader holds no lock, so every result describes the moment of the call. The reader verifies all data: a frame by
//! its checksums, its position and its chain (I3), and the file by its header. The header is checked again after each
//! frame, because a recycled file remains readable through an open handle.

use std::io::ErrorKind;
use std::sync::Arc;

use remanent_format::frame::{FRAME_HEADER_LEN, FrameHeader, FrameHeaderRaw, UncheckedFrame};
use remanent_format::segment::{Opening, SEGMENT_HEADER_BLOCK, SegmentHeader, SegmentHeaderRaw};
use remanent_format::{Defect, FileName, StoreId};
use zerocopy::FromZeros;

use crate::base::allocation::make_room;
use crate::disk::{Disk, DiskFile};
use crate::error::{Error, Result};

/// The minimum number of bytes per read. One such read covers both possible positions of the next frame in a segment.
const READ_MIN: usize = 8 << 10;
/// The maximum number of bytes per read. Consecutive frames are read in such long reads.
const READ_MAX: usize = 256 << 10;

/// An open segment that a writer may be modifying.
pub(super) struct LiveSegment {
    pub number: u64,
    pub opening: Option<Opening>,
    store: StoreId,
    len: u64,
    file: Arc<dyn DiskFile>,
    buffer: Vec<u8>,
    buffer_at: u64,
    read_len: usize,
}

impl LiveSegment {
    /// Opens segment `number` by its current name. Returns `None` if no file with a valid header has that name.
    pub fn open(disk: &dyn Disk, store: StoreId, number: u64) -> Result<Option<Self>> {
        let Some(file) = none_if_missing(disk.open(FileName::Segment(number), false))? else {
            return Ok(None);
        };
        let Some(header) = header(&*file, store, number)? else { return Ok(None) };
        Ok(Some(Self {
            number,
            opening: header.opening,
            store,
            len: header.segment_len,
            file,
            buffer: Vec::new(),
            buffer_at: 0,
            read_len: READ_MIN,
        }))
    }

    /// Returns `len` bytes at `offset`, from the buffer or from the file. Returns `None` if the segment is too short.
    pub fn bytes(&mut self, offset: u64, len: usize) -> Result<Option<&[u8]>> {
        if self.len.saturating_sub(offset) < len as u64 {
            return Ok(None);
        }
        if !self.has(offset, len) {
            let room = usize::try_from(self.len - offset).unwrap_or(usize::MAX);
            let wanted = self.read_len.max(len).min(room);
            let more = wanted.saturating_sub(self.buffer.len());
            make_room(&mut self.buffer, more)?;
            self.buffer.resize(wanted, 0);
            self.buffer_at = offset;
            if none_if_missing(self.file.read_at(offset, &mut self.buffer))?.is_none() {
                self.buffer.clear();
                return Ok(None);
            }
            self.read_len = (2 * self.read_len).min(READ_MAX);
        }
        let at = (offset - self.buffer_at) as usize;
        Ok(Some(&self.buffer[at..at + len]))
    }

    /// Returns the unverified payload of a frame, or `None` if the segment is too short.
    pub fn payload(&mut self, header: &FrameHeader) -> Result<Option<Vec<u8>>> {
        let (offset, len) = (header.offset + FRAME_HEADER_LEN, header.payload_len as usize);
        if self.len.saturating_sub(offset) < len as u64 {
            return Ok(None);
        }
        let mut payload = u8::new_vec_zeroed(len).map_err(|_| {
            let defect = Defect::Memory { needed: len as u64 };
            defect.at_lsn(FileName::Segment(self.number), header.offset, header.lsn)
        })?;
        if self.has(offset, len) {
            let at = (offset - self.buffer_at) as usize;
            payload.copy_from_slice(&self.buffer[at..at + len]);
            return Ok(Some(payload));
        }
        Ok(none_if_missing(self.file.read_at(offset, &mut payload))?.map(|()| payload))
    }

    /// Returns the buffered bytes from `offset` on, or `None` if the byte at `offset` is not in the buffer.
    pub fn seen(&self, offset: u64) -> Option<&[u8]> {
        self.has(offset, 1).then(|| &self.buffer[(offset - self.buffer_at) as usize..])
    }

    /// Returns whether the buffer contains bytes of an earlier read.
    pub fn has_read(&self) -> bool {
        !self.buffer.is_empty()
    }

    /// Discards the buffered bytes, so that the next call reads the file again.
    pub fn forget(&mut self) {
        self.buffer.clear();
        self.read_len = READ_MIN;
    }

    /// Returns whether the open file is still this segment and was not recycled.
    pub fn is_still(&self) -> Result<bool> {
        Ok(header(&*self.file, self.store, self.number)?.is_some())
    }

    fn has(&self, offset: u64, len: usize) -> bool {
        offset >= self.buffer_at && offset + len as u64 <= self.buffer_at + self.buffer.len() as u64
    }
}

/// Returns whether the writer omitted the first frames of segment `number` when it closed the store.
pub(super) fn lacks_first_frames(disk: &dyn Disk, store: StoreId, number: u64) -> Result<bool> {
    let Some(mut open) = LiveSegment::open(disk, store, number)? else { return Ok(false) };
    let Some(bytes) = open.bytes(SEGMENT_HEADER_BLOCK, FrameHeaderRaw::LEN)? else { return Ok(false) };
    let first = UncheckedFrame::decode(bytes);
    Ok(!first.is_ok_and(|frame| frame.is_at(store, number, SEGMENT_HEADER_BLOCK)))
}

/// Returns whether the file of segment `number` in the directory belongs to another store.
pub(super) fn is_foreign(disk: &dyn Disk, store: StoreId, number: u64) -> Result<bool> {
    let Some(file) = none_if_missing(disk.open(FileName::Segment(number), false))? else { return Ok(false) };
    let header = header_bytes(&*file)?.and_then(|bytes| SegmentHeader::decode(&bytes).ok());
    Ok(header.is_some_and(|header| header.store != store))
}

/// Returns the header of segment `number`, or `None` if the file is not that segment or was recycled.
fn header(file: &dyn DiskFile, store: StoreId, number: u64) -> Result<Option<SegmentHeader>> {
    let len = file.len()?;
    Ok(header_bytes(file)?.and_then(|bytes| SegmentHeader::decode_at(&bytes, store, number, len).ok()))
}

/// Returns the bytes of a segment's header, or `None` if the file is too short.
fn header_bytes(file: &dyn DiskFile) -> Result<Option<[u8; SegmentHeaderRaw::LEN]>> {
    let mut bytes = [0; SegmentHeaderRaw::LEN];
    Ok(none_if_missing(file.read_at(0, &mut bytes))?.map(|()| bytes))
}

/// Converts the error for a file that does not exist or is too short to `None`. Both errors are expected while a writer
/// is active.
pub(super) fn none_if_missing<T>(result: Result<T>) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(Error::Io { source, .. })
            if matches!(source.kind(), ErrorKind::NotFound | ErrorKind::UnexpectedEof) =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}
