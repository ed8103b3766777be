//! Reading the log: which segments there are, which incarnations form the line, which frames are valid in
//! order (I3), and whether the bytes after the last of them are a torn tail or damage (I4).
//!
//! Read [`crate::segment`] and [`crate::frame`] first. Recovery, `rebuild` and the inspectors walk the log
//! through this file and no other.
//!
//! **The line.** Every writable open begins an incarnation with an *opening* segment, which names the end of
//! its predecessor. From a point on, frames of one incarnation follow each other until that point is the end
//! that a successor names; there the walk jumps to the successor's opening. Nothing past a predecessor's end
//! is read again (I5), so the bytes there need no judgement.
//!
//! **The newest incarnation** is the one of the highest-numbered segment that is an opening, or holds an own
//! frame at a multiple of 4096. An empty segment proves nothing: it may stem from an open that a crash cut
//! short before its rename.
//!
//! **The end.** The next frame lies at one of three places: right after the last one, at the next group
//! boundary, or at the start of the next segment (SPEC W3 and W4). If none of them holds a valid frame, then
//! in an older incarnation that is damage. In the newest one it is the log's end, a torn tail, unless a
//! durable mark covers the batch that is missing. Marks come from valid frames, from the opening, from
//! manifests, and from frames beyond the end that testify.

mod dead_ends;
mod map;
mod order;
mod reader;
mod sums;
mod walk;

pub use map::{LogMap, Segment};
pub use order::{header_in_order, next_locations};
pub use reader::{ReadChunks, Reading, Supply, Windows, frames_of_segment};
pub use sums::ChunkSums;
pub use walk::{Frame, LogEnd, LogWalk, TornTail};
