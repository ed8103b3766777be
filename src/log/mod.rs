//! The log's way to the disk: segment files, appending, and the threads that sync, seal and make empty
//! segments.
//!
//! A frame that was appended survives the death of the process, unless the log is direct; a frame that was
//! synced survives a power cut. A crash inside this folder loses no frame that a caller was told of, because
//! each answer is given only after the write or sync that it names.
//!
//! Reading the log back is the format crate's work (`remanent_format::log`), so that a verifier uses the same
//! rules as recovery.

pub(crate) mod segments;
mod state;
mod group_commit;
pub(crate) mod writer;
mod sync_guard;
mod waits;
mod threads;
mod watch;

pub(crate) use segments::{SegmentPool, SegmentRules, SpacePurpose};
pub(crate) use state::LogStart;
pub use state::LogStats;
#[cfg(test)]
pub(crate) use state::TELL_AFTER;
pub(crate) use writer::Log;
