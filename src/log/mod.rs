//! Writes the log to disk: segment files, appends, and the threads that sync, seal and create empty segments.
//!
//! An appended frame survives the death of the process, unless the log is direct. A synced frame survives a power cut.
//! A crash loses no acknowledged frame, because a frame is acknowledged only after the write or sync that makes it
//! survive.
//!
//! The format crate (`remanent_format::log`) reads the log, so that a verifier uses the same rules as recovery.

pub(crate) mod segments;
mod state;
mod group_commit;
pub(crate) mod writer;
mod sync_guard;
mod waits;
mod threads;
mod watch;
mod archived;

pub(crate) use archived::ArchiveProgress;
#[cfg(feature = "archive")]
pub use archived::ArchiveStats;
pub(crate) use segments::{SegmentPool, SegmentRules, SpacePurpose};
pub(crate) use state::LogStart;
pub use state::LogStats;
#[cfg(test)]
pub(crate) use state::NOTIFY_AFTER;
pub(crate) use writer::Log;
