//! Continuously archives an open store to an object store, with the feature `archive`.
//!
//! The crate [`remanent_archive`] implements the protocol. This module decides what is archived and when:
//!
//! - **Open:** before an open changes the directory, it finds the end of the archive and checks that it is in the
//!   history of the directory. After recovery has written the new opening, the thread `remanent-archive` creates a
//!   fence.
//! - **Runs:** a batch is archived at most [`ArchiveOptions::interval`](crate::options::ArchiveOptions) after it was
//!   proven, or at once if a caller waits for [`Ack::Archived`](crate::Ack).
//! - **Snapshots:** a snapshot is archived after 1,024 runs or 1 GiB of log or of image files, which bounds the number
//!   of objects that a restore reads.
//! - **Named snapshots:** each one is archived once it is verified, oldest first. If its name is given up, it is
//!   removed from the archive.
//! - **Holds:** the thread holds the newest snapshot from which the log leads to the first batch that is not archived,
//!   as a reader does. If the unarchived log exceeds `ArchiveOptions::log_len_max`, the thread releases the snapshot.
//!   The archive then falls behind, and continues with a later snapshot.
//!
//! A failed request never stops a commit. If another writer creates a fence, the store is poisoned and rejects later
//! commits.
//!
//! A [`View`](crate::View) also opens a state of an archive without restoring it: the log, manifests and tables of the
//! state are written into a temporary folder, and parts of image files are fetched when a page in them is read. A
//! [`Follower`](crate::follow::Follower) of an archive reads the runs as they are appended, and decodes their frames.
//!
//! A directory that was restored on demand lacks parts of image files. An open with the archive fetches them when they
//! are read, and all others in the background. Until all are durable, the archive gets runs but no snapshots.
//!
//! | file | purpose |
//! |---|---|
//! | `view.rs` | opens a view of an archive, and loads a replica from one |
//! | `follower.rs` | returns the batches of an archive in order |
//! | `archived_disk.rs` | reads the files of a view or of a batch: local files, and files in the archive |
//! | `part_cache.rs` | keeps fetched parts of files |
//! | `fetching_disk.rs` | the directory of a store that was restored on demand, as a disk |
//! | `unfetched_files.rs` | fetches parts of image files, when they are read or in the background |
//! | `archiver.rs` | starts, connects and stops the thread |
//! | `uploader.rs` | the thread |
//! | `names.rs` | archives named snapshots |
//! | `holds.rs` | retains the log that is not archived |
//! | `bucket.rs` | opens a bucket with the options of an archive |
//! | `failures.rs` | converts errors of the protocol to errors of the store |
//!
//! `log/archived.rs` contains the progress that tickets wait for.

mod view;
mod follower;
mod archived_disk;
mod part_cache;
mod fetching_disk;
mod unfetched_files;
mod archiver;
mod uploader;
mod names;
mod holds;
mod bucket;
mod failures;

pub(crate) use archiver::{Archiver, CheckedArchive};
pub(crate) use fetching_disk::FetchingDisk;
pub(crate) use follower::open_follower;
pub(crate) use unfetched_files::FetchThreads;
pub(crate) use view::{open_replica, open_view};
