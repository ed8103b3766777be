//! Reading the log: which segments there are, which incarnations form the line, which frames are
//! valid in order (I3), and whether what follows the last of them is a torn tail or damage (I4).
//!
//! Read [`crate::segment`] and [`crate::frame`] first. Recovery, `rebuild` and the inspectors walk the log
//! through this file and no other.
//!
//! **The line.** Every writable open begins an incarnation with an *opening* segment, which names where
//! its predecessor ends. Walking from a point, frames of one incarnation follow each other until that
//! point is the predecessor's end of another; there the walk jumps to the opening. Nothing past a
//! predecessor's end is read again (I5), so what lies there needs no judgement.
//!
//! **The newest incarnation** is the one of the highest-numbered segment that is an opening or contains a
//! frame of its own position. An empty segment proves nothing: it may stem from an open that a crash cut
//! short before its rename.
//!
//! **The end.** The next frame lies at one of three places: right after the last one, at the next group
//! boundary, or at the start of the next segment. If none of them holds a valid frame, then in an older
//! incarnation that is damage; in the newest one it is the log's end, a torn tail, unless a durable mark
//! covers the batch that is missing. Marks come from valid frames, from the opening, from manifests, and
//! from frames beyond the end that testify.

mod map;
mod order;
mod reader;
mod walk;

pub use map::{LogMap, Segment};
pub use order::{header_in_order, places};
pub use reader::{Supply, frames_of_segment};
pub use walk::{Frame, LogEnd, LogWalk, TornTail};
