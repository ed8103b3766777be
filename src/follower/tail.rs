//! Reads the next complete frame of a log, by the same rules as recovery (I3), while a writer may be appending to the
//! log. An incomplete frame is treated as not yet written, and never reported as damage by this module.

use std::sync::Arc;

use remanent_format::frame::{FrameHeader, FrameHeaderRaw, check_payload, looks_like_frame};
use remanent_format::log::{header_in_order, next_locations};
use remanent_format::{LogPoint, StoreId};

use super::segment::LiveSegment;
use crate::disk::Disk;
use crate::error::Result;

/// A reader at one point of a log that a writer may be extending. Keeps the segments around the point open.
pub(super) struct Tail {
    pub disk: Arc<dyn Disk>,
    pub store: StoreId,
    point: LogPoint,
    /// The open segment that contains the current point, or `None` before the segment is opened.
    segment: Option<LiveSegment>,
    /// The following segment, or `None` if the last [`peek`](Tail::peek) found none.
    next: Option<LiveSegment>,
}

/// A complete frame whose position and chain hash follow the previous frame.
pub(super) struct TakenFrame {
    pub header: FrameHeader,
    pub payload: Vec<u8>,
    /// The point in the log after the frame.
    pub end: LogPoint,
}

impl Tail {
    pub fn new(disk: Arc<dyn Disk>, store: StoreId, point: LogPoint) -> Self {
        Self { disk, store, point, segment: None, next: None }
    }

    /// Returns the point after the last frame taken.
    pub fn point(&self) -> LogPoint {
        self.point
    }

    pub fn go_to(&mut self, point: LogPoint) {
        self.point = point;
    }

    /// Returns the frame after the point if it is complete, without moving the point.
    pub fn peek(&mut self) -> Result<Option<TakenFrame>> {
        let [(here, after), (_, group), (next, start)] = next_locations(&self.point);
        if self.segment.as_ref().is_none_or(|open| open.number != here) {
            self.segment = LiveSegment::open(&*self.disk, self.store, here)?;
        }
        if let Some(open) = &mut self.segment {
            loop {
                let fresh = !open.has_read();
                for offset in [after, group] {
                    if let Some(taken) = peek_at(open, &self.point, self.store, offset)? {
                        return Ok(Some(taken));
                    }
                }
                if fresh {
                    break;
                }
                // The buffered bytes may be outdated, so the file is read again.
                open.forget();
            }
        }
        // The segment is reopened each time, because an empty segment may be replaced by another file with its name.
        self.next = LiveSegment::open(&*self.disk, self.store, next)?;
        if let Some(open) = &mut self.next
            && let Some(taken) = peek_at(open, &self.point, self.store, start)?
        {
            self.segment = self.next.take();
            return Ok(Some(taken));
        }
        Ok(None)
    }

    /// Returns whether the last [`peek`](Self::peek) found bytes that may belong to an incomplete frame.
    pub fn looks_like_frame(&self) -> bool {
        next_locations(&self.point).into_iter().any(|(number, offset)| {
            let mut open = [&self.segment, &self.next].into_iter().flatten();
            let bytes = open.find(|open| open.number == number).and_then(|open| open.seen(offset));
            bytes.is_some_and(|bytes| {
                looks_like_frame(bytes, self.store, self.point.incarnation, number, offset)
            })
        })
    }
}

fn peek_at(
    open: &mut LiveSegment,
    before: &LogPoint,
    store: StoreId,
    offset: u64,
) -> Result<Option<TakenFrame>> {
    let number = open.number;
    let Some(bytes) = open.bytes(offset, FrameHeaderRaw::LEN)? else { return Ok(None) };
    let Ok((header, end)) = header_in_order(bytes, before, store, number, offset) else {
        return Ok(None);
    };
    let Some(payload) = open.payload(&header)? else { return Ok(None) };
    // The file's header is checked last. If the file was recycled before this check, the header belongs to another
    // segment.
    let whole = check_payload(&header, &payload).is_ok() && open.is_still()?;
    Ok(whole.then_some(TakenFrame { header, payload, end }))
}
