//! One step in the order of the log: the possible locations of the next frame, and the check of a frame header (I3).
//! The walk of a log and followers of a running writer use these functions.

use crate::defect::Defect;
use crate::frame::{FrameHeader, UncheckedFrame};
use crate::ids::{LogPoint, StoreId};
use crate::limits::{FRAME_ALIGN, GROUP_ALIGN, align_up};
use crate::segment::SEGMENT_HEADER_BLOCK;

/// Returns the three locations at which the frame after `point` can start, in the order in which a reader must try them
/// (SPEC W3): directly after `point`, at the next group boundary, and at the start of the next segment. A location is a
/// segment number and an offset.
#[must_use]
pub fn next_locations(point: &LogPoint) -> [(u64, u64); 3] {
    [
        (point.segment, align_up(point.offset, FRAME_ALIGN)),
        (point.segment, align_up(point.offset, GROUP_ALIGN)),
        (point.segment.saturating_add(1), SEGMENT_HEADER_BLOCK),
    ]
}

/// Decodes a frame header that was read at `offset` of `segment`, and checks that the frame follows the point `before`
/// in the order of the log (SPEC F1 to F6). Returns the header and the point at the end of the frame.
///
/// The payload is not checked; see [`crate::frame::check_payload`].
///
/// # Errors
/// Returns a [`Defect`] if the bytes are not a valid header, or if the frame is not the next in the order of the log.
pub fn header_in_order(
    bytes: &[u8],
    before: &LogPoint,
    store: StoreId,
    segment: u64,
    offset: u64,
) -> Result<(FrameHeader, LogPoint), Defect> {
    let (header, end) = UncheckedFrame::decode(bytes)?.follow(before, store, segment, offset)?;
    // A group starts at a boundary. Every other frame directly follows the previous frame of its group (SPEC F6).
    if header.group_start && !offset.is_multiple_of(GROUP_ALIGN) {
        return Err(Defect::Field { what: "start of a group", found: offset });
    }
    if !header.group_start && (segment, offset) != next_locations(before)[0] {
        return Err(Defect::Field { what: "offset of a frame inside a group", found: offset });
    }
    Ok((header, end))
}
