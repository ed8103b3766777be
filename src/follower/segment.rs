//! One segment, read while a writer may be appending to it, or recycling it.
//!
//! The reader holds nothing, so every answer is "as of now". The bytes must prove themselves: a frame by its
//! checksums, its own position and its chain (I3), and the file by its header. The header is looked at again
//! after each frame, because a recycled file stays readable through an old handle.

use std::io::ErrorKind;
use std::sync::Arc;

use remanent_format::frame::{FRAME_HEADER_LEN, FrameHeader};
use remanent_format::segment::{Opening, SegmentHeader, SegmentHeaderRaw};
use remanent_format::{Defect, FileName, StoreId};
use zerocopy::FromZeros;

use crate::base::allocation::make_room;
use crate::disk::{Disk, DiskFile};
use crate::error::{Error, Result};

/// The fewest bytes that are read at a time: enough for both places in a segment at which the next frame may
/// lie.
const READ_MIN: usize = 8 << 10;
/// The most bytes that are read at a time while frame follows frame.
const READ_MAX: usize = 256 << 10;

/// An open segment that a writer may be changing.
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
    /// Opens segment `number` under its present name; `None` if there is none with a sound header.
    pub fn open(disk: &dyn Disk, store: StoreId, number: u64) -> Result<Option<Self>> {
        let Some(file) = unless_gone(disk.open(FileName::Segment(number), false))? else { return Ok(None) };
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

    /// `len` bytes at `offset`, perhaps as they were at an earlier call; `None` if the segment ends before
    /// them.
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
            if unless_gone(self.file.read_at(offset, &mut self.buffer))?.is_none() {
                self.buffer.clear();
                return Ok(None);
            }
            self.read_len = (2 * self.read_len).min(READ_MAX);
        }
        let at = (offset - self.buffer_at) as usize;
        Ok(Some(&self.buffer[at..at + len]))
    }

    /// A frame's payload, unchecked; `None` if the segment ends before.
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
        Ok(unless_gone(self.file.read_at(offset, &mut payload))?.map(|()| payload))
    }

    /// The bytes from `offset` on that were read last, if they were.
    pub fn seen(&self, offset: u64) -> Option<&[u8]> {
        self.has(offset, 1).then(|| &self.buffer[(offset - self.buffer_at) as usize..])
    }

    /// Whether bytes of an earlier moment are still in memory.
    pub fn has_read(&self) -> bool {
        !self.buffer.is_empty()
    }

    /// Forgets the bytes that were read, so that the next ones are those of now.
    pub fn forget(&mut self) {
        self.buffer.clear();
        self.read_len = READ_MIN;
    }

    /// Whether the file still is this segment.
    pub fn is_still(&self) -> Result<bool> {
        Ok(header(&*self.file, self.store, self.number)?.is_some())
    }

    fn has(&self, offset: u64, len: usize) -> bool {
        offset >= self.buffer_at && offset + len as u64 <= self.buffer_at + self.buffer.len() as u64
    }
}

/// The header of a file that should be segment `number`; `None` if it is not, or not any more.
/// Whether a segment is one of another store's: that lies in the directory now.
pub(super) fn is_foreign(disk: &dyn Disk, store: StoreId, number: u64) -> Result<bool> {
    let Some(file) = unless_gone(disk.open(FileName::Segment(number), false))? else { return Ok(false) };
    let header = header_bytes(&*file)?.and_then(|bytes| SegmentHeader::decode(&bytes).ok());
    Ok(header.is_some_and(|header| header.store != store))
}

fn header(file: &dyn DiskFile, store: StoreId, number: u64) -> Result<Option<SegmentHeader>> {
    let len = file.len()?;
    Ok(header_bytes(file)?.and_then(|bytes| SegmentHeader::decode_at(&bytes, store, number, len).ok()))
}

/// The bytes of a segment's header; `None` if they are not all there.
fn header_bytes(file: &dyn DiskFile) -> Result<Option<[u8; SegmentHeaderRaw::LEN]>> {
    let mut bytes = [0; SegmentHeaderRaw::LEN];
    Ok(unless_gone(file.read_at(0, &mut bytes))?.map(|()| bytes))
}

/// `None` if the file is not there, or ends too early: a reader beside a writer meets both.
pub(super) fn unless_gone<T>(result: Result<T>) -> Result<Option<T>> {
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
