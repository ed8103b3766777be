//! The order of the log, one step of it: where the next frame may lie, and whether a header there is the next
//! one (I3). The walk goes by these rules, and so does a follower that reads a log while it is written.

use crate::defect::Defect;
use crate::frame::{FrameHeader, UncheckedFrame};
use crate::ids::{LogPoint, StoreId};
use crate::limits::{FRAME_ALIGN, GROUP_ALIGN, align_up};
use crate::segment::SEGMENT_HEADER_BLOCK;

/// The locations, segment and offset, at which the frame after a point may lie (SPEC W3): right after it, at
/// the next group boundary, at the start of the next segment. The first location at which a frame is valid
/// counts.
#[must_use]
pub fn next_locations(point: &LogPoint) -> [(u64, u64); 3] {
    [
        (point.segment, align_up(point.offset, FRAME_ALIGN)),
        (point.segment, align_up(point.offset, GROUP_ALIGN)),
        (point.segment.saturating_add(1), SEGMENT_HEADER_BLOCK),
    ]
}

/// The header in `bytes`, read at `offset` of `segment`, if it is the header of the frame after `before`
/// (SPEC F1 to F6), and the point after that frame. The payload is for [`crate::frame::check_payload`].
///
/// # Errors
/// A [`Defect`]: the header is not readable, or breaks the order.
pub fn header_in_order(
    bytes: &[u8],
    before: &LogPoint,
    store: StoreId,
    segment: u64,
    offset: u64,
) -> Result<(FrameHeader, LogPoint), Defect> {
    let (header, end) = UncheckedFrame::decode(bytes)?.follow(before, store, segment, offset)?;
    // A group begins at a boundary; a frame that does not begin one follows its group's last frame (SPEC F6).
    if header.group_start && !offset.is_multiple_of(GROUP_ALIGN) {
        return Err(Defect::Field { what: "start of a group", found: offset });
    }
    if !header.group_start && (segment, offset) != next_locations(before)[0] {
        return Err(Defect::Field { what: "place of a frame inside a group", found: offset });
    }
    Ok((header, end))
}
