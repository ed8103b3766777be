//! Floor 5. The log's way to the disk: segment files, appending, and the thread that syncs and seals.
//!
//! Reading it back is the format crate's (`remanent_format::log`).

pub(crate) mod segments;
pub(crate) mod writer;

pub(crate) use segments::{SegmentFile, SegmentPool, SpacePurpose};
pub use writer::LogStats;
pub(crate) use writer::{Log, LogStart};
