//! Floor 0. Reading one segment through a buffer, and looking in it for the frames that were written there.

use std::io::ErrorKind;

use crate::defect::Defect;
use crate::frame::{FRAME_MAGIC, FrameHeaderRaw, UncheckedFrame};
use crate::ids::StoreId;
use crate::limits::{FRAME_ALIGN, GROUP_ALIGN, align_up};
use crate::names::{FileName, ReadAt};
use crate::segment::SEGMENT_HEADER_BLOCK;

/// How much of a segment is read at a time.
const READ_AHEAD: usize = 1 << 20;

/// Reads one segment through a buffer.
pub(super) struct SegmentReader<'s> {
    source: &'s dyn ReadAt,
    number: u64,
    file_len: Option<u64>,
    buffer: Vec<u8>,
    buffer_at: u64,
    read_ahead: usize,
}

impl<'s> SegmentReader<'s> {
    pub fn new(source: &'s dyn ReadAt, number: u64) -> Self {
        Self { source, number, file_len: None, buffer: Vec::new(), buffer_at: 0, read_ahead: READ_AHEAD }
    }

    /// Forgets what was read ahead.
    pub fn forget(&mut self) {
        self.buffer.clear();
    }

    pub fn file_len(&mut self) -> Result<u64, Defect> {
        match self.file_len {
            Some(len) => Ok(len),
            None => {
                let len = self.source.len(FileName::Segment(self.number)).map_err(unreadable)?;
                Ok(*self.file_len.insert(len.ok_or(Defect::Missing)?))
            }
        }
    }

    /// `len` bytes at `offset`, which must lie within the file: so no buffer is longer than the file.
    pub fn bytes(&mut self, offset: u64, len: usize) -> Result<&[u8], Defect> {
        let file_len = self.file_len()?;
        let end = offset.saturating_add(len as u64);
        if end > file_len {
            return Err(Defect::Truncated { needed: end, have: file_len });
        }
        let buffered = offset >= self.buffer_at && end <= self.buffer_at + self.buffer.len() as u64;
        if !buffered && self.fill(offset, len.max(self.read_ahead.min((file_len - offset) as usize))).is_err()
        {
            // A sector that cannot be read must not cost what lies before it.
            self.read_ahead = 0;
            self.fill(offset, len)?;
        }
        let start = (offset - self.buffer_at) as usize;
        Ok(&self.buffer[start..start + len])
    }

    fn fill(&mut self, offset: u64, len: usize) -> Result<(), Defect> {
        self.buffer.resize(len, 0);
        self.buffer_at = offset;
        self.source.read_at(FileName::Segment(self.number), offset, &mut self.buffer).map_err(|error| {
            self.buffer.clear();
            unreadable(error)
        })
    }
}

fn unreadable(error: std::io::Error) -> Defect {
    match error.kind() {
        ErrorKind::NotFound => Defect::Missing,
        _ => Defect::Unreadable(error.to_string()),
    }
}

/// The frames from `offset` on, at multiples of `step`, that were written at their place. What cannot be
/// read is skipped.
pub(super) fn own_frames<'r>(
    reader: &'r mut SegmentReader<'_>,
    store: StoreId,
    number: u64,
    offset: u64,
    step: u64,
) -> impl Iterator<Item = UncheckedFrame> + 'r {
    let file_len = reader.file_len().unwrap_or(0);
    let mut at = align_up(offset, step);
    std::iter::from_fn(move || {
        while at < file_len {
            let here = at;
            at += step;
            match reader.bytes(here, FrameHeaderRaw::LEN) {
                Ok(bytes) if bytes.starts_with(&FRAME_MAGIC) => {
                    if let Ok(frame) = UncheckedFrame::decode(bytes)
                        && frame.lies_at(store, number, here)
                    {
                        return Some(frame);
                    }
                }
                Ok(_) => {}
                // Each attempt at a bad sector may take seconds.
                Err(_) => at = align_up(at, GROUP_ALIGN),
            }
        }
        None
    })
}

/// All frames of a segment that were written at their place, whatever became of those around them and of the
/// segment's header. Each is proven by its own header's checksum and no more.
pub fn frames_of_segment(source: &dyn ReadAt, store: StoreId, number: u64) -> Vec<UncheckedFrame> {
    let mut reader = SegmentReader::new(source, number);
    let mut end = 0;
    own_frames(&mut reader, store, number, SEGMENT_HEADER_BLOCK, FRAME_ALIGN)
        .filter(|frame| {
            // What lies inside of a frame is payload, whatever it looks like.
            let header = frame.unproven();
            let is_outside = header.offset >= end;
            end = end.max(header.end());
            is_outside
        })
        .collect()
}
