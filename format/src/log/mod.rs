//! Reading the log: which segments exist, which incarnations form the line, which frames are valid in order
//! (I3), and whether the bytes after the last valid frame are a torn tail or damage (I4).
//!
//! Read [`crate::segment`] and [`crate::frame`] first. Recovery, `rebuild` and the inspectors all walk the
//! log through this module.
//!
//! **The line.** Every writable open begins an incarnation with an *opening* segment, which names the end of
//! its predecessor. Frames of one incarnation follow each other up to the end that a successor names; there
//! the walk jumps to the successor's opening. Nothing past a predecessor's end is ever read again (I5), so
//! the bytes there need no verdict.
//!
//! **The newest incarnation** is that of the highest-numbered segment that is an opening, or that holds an
//! own frame at a multiple of 4096. An empty segment proves nothing: it may be left over from an open that a
//! crash cut short before its rename.
//!
//! **The end.** The next frame is at one of three locations: directly after the last one, at the next group
//! boundary, or at the start of the next segment (SPEC W3 and W4). If none of them holds a valid frame, the
//! log is damaged if the incarnation is an older one. In the newest incarnation, the log ends there with a
//! torn tail, unless a durable mark covers the missing batch. Marks come from valid frames, from the opening,
//! from manifests, and from the testimony of frames beyond the end.

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
