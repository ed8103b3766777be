//! The next frame, if it is there: one step along the log, by the rules of the walk (I3), while a writer
//! appends. A frame that is not whole is not there yet; nothing here calls it damage.

use std::sync::Arc;

use remanent_format::frame::{FrameHeader, FrameHeaderRaw, check_payload, resembles_frame};
use remanent_format::log::{header_in_order, next_locations};
use remanent_format::{LogPoint, StoreId};

use super::segment::LiveSegment;
use crate::disk::Disk;
use crate::error::Result;

/// A point in a log that a writer may be extending.
pub(super) struct Tail {
    pub disk: Arc<dyn Disk>,
    pub store: StoreId,
    point: LogPoint,
    /// The segment in which the point lies.
    segment: Option<LiveSegment>,
    /// The segment after it, as the last peek found it.
    next: Option<LiveSegment>,
}

/// A whole frame, valid in the order of the log.
pub(super) struct TakenFrame {
    pub header: FrameHeader,
    pub payload: Vec<u8>,
    /// The point after the frame.
    pub end: LogPoint,
}

impl Tail {
    pub fn new(disk: Arc<dyn Disk>, store: StoreId, point: LogPoint) -> Self {
        Self { disk, store, point, segment: None, next: None }
    }

    /// The point that was reached.
    pub fn point(&self) -> LogPoint {
        self.point
    }

    /// Goes on from another point: the end of the frame that was taken.
    pub fn go_to(&mut self, point: LogPoint) {
        self.point = point;
    }

    /// The frame after the point, if it is there; the point stays until [`Tail::go_to`] moves it.
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
                // Bytes that were read ahead may be older than those that are there now.
                open.forget();
            }
        }
        // Opened anew each time: an empty segment may be replaced by another file of its name.
        self.next = LiveSegment::open(&*self.disk, self.store, next)?;
        if let Some(open) = &mut self.next
            && let Some(taken) = peek_at(open, &self.point, self.store, start)?
        {
            self.segment = self.next.take();
            return Ok(Some(taken));
        }
        Ok(None)
    }

    /// Whether the last peek saw bytes at one of its places that were meant to be a frame there.
    pub fn resembles_frame(&self) -> bool {
        next_locations(&self.point).into_iter().any(|(number, offset)| {
            let mut open = [&self.segment, &self.next].into_iter().flatten();
            let bytes = open.find(|open| open.number == number).and_then(|open| open.seen(offset));
            bytes.is_some_and(|bytes| {
                resembles_frame(bytes, self.store, self.point.incarnation, number, offset)
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
    // The file's header last: if the file was recycled before, the header is another segment's.
    let whole = check_payload(&header, &payload).is_ok() && open.is_still()?;
    Ok(whole.then_some(TakenFrame { header, payload, end }))
}
