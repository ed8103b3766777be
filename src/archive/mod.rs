//! Continuous archiving of an open store to an object store, with the feature `archive`.
//!
//! The crate [`remanent_archive`] contains the protocol. This module decides what is archived when:
//!
//! - **Before the store changes**, an open finds the end of the archive and checks that it is in the history of the
//!   directory. After recovery has written the new opening, the thread `remanent-archive` creates a fence.
//! - **Runs:** a batch is archived at most [`ArchiveOptions::interval`](crate::options::ArchiveOptions) after it was
//!   proven, or at once if a caller waits for [`Ack::Archived`](crate::Ack).
//! - **Snapshots:** after 1,024 runs or 1 GiB of log or of image files, so that a restore reads a bounded number of
//!   objects.
//! - **Named snapshots:** once verified, oldest first. A name that was given up is also removed from the archive.
//! - **Holds:** the thread holds the newest snapshot from which the log leads to the first batch that is not archived, as a
//!   reader does. If the log exceeds `ArchiveOptions::log_len_max`, the hold ends: the archive then falls behind, and
//!   continues with the next snapshot.
//!
//! Failed requests stop no commit. Only a fence of another writer does: it poisons the store.
//!
//! | file | purpose |
//! |---|---|
//! | `archiver.rs` | the handle: begin, connect to the engine, stop |
//! | `uploader.rs` | the thread |
//! | `names.rs` | named snapshots |
//! | `holds.rs` | the snapshot that keeps the log |
//! | `failures.rs` | errors of the protocol as errors of the store |
//!
//! `log/archived.rs` contains the progress, for which tickets wait.

mod archiver;
mod uploader;
mod names;
mod holds;
mod failures;

pub(crate) use archiver::{Archiver, CheckedArchive};
