//! The log's way to the disk: segment files, appending, and the threads that sync, seal and make
//! segments ahead.
//!
//! Reading it back is the format crate's (`remanent_format::log`).

pub(crate) mod segments;
mod state;
mod group_commit;
pub(crate) mod writer;
mod threads;
mod watch;

pub(crate) use segments::{SegmentPool, SegmentRules, SpacePurpose};
pub(crate) use state::LogStart;
pub use state::LogStats;
#[cfg(test)]
pub(crate) use state::TELL_AFTER;
pub(crate) use writer::Log;
