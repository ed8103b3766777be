//! Reading of the log. This module determines which segments exist, which incarnations form the line, which frames are
//! valid in order (I3), and whether the bytes after the last valid frame are a torn tail or damage (I4).
//!
//! Read [`crate::segment`] and [`crate::frame`] first. Recovery, `rebuild` and the inspectors all read the log through
//! this module.
//!
//! **The line.** Every open for writing begins an incarnation with an *opening* segment, which names the end of its
//! predecessor. The walk follows the frames of an incarnation up to the end that the successor names, and continues at
//! the successor's opening. No reader reads past a predecessor's end (I5), so the bytes after that end need no verdict.
//!
//! **The newest incarnation** is determined by the highest-numbered segment that is an opening, or that contains at a
//! multiple of 4096 a frame whose header names its own location. An empty segment proves nothing, because it may be
//! left over from an open that crashed before its rename.
//!
//! **The end.** The next frame is at one of three locations: directly after the last frame, at the next group boundary,
//! or at the start of the next segment (SPEC W3 and W4). If there is no valid frame at these locations, the incarnation
//! determines the verdict. In an older incarnation, the log is damaged. In the newest incarnation, the log ends there
//! with a torn tail, unless a durable mark covers the missing batch. Marks come from valid frames, from the opening,
//! from manifests, and from the headers of frames beyond the end.

mod failed_starts;
mod map;
mod order;
mod reader;
mod sums;
mod walk;

pub use map::{LogMap, Segment};
pub use order::{header_in_order, next_locations};
pub use reader::{AllocateBuffer, ReadChunks, Reading, Windows, frames_of_segment};
pub use sums::ChunkSums;
pub use walk::{Frame, LogEnd, LogWalk, TornTail};
