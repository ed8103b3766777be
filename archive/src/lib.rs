//! Archives a Remanent store in an object store, so that it survives the loss of its machine.
//!
//! An archive is a continuous copy of one store in an object store. This crate defines the objects of an archive, and
//! the functions that create, find, read and delete them. [`Bucket`](bucket::Bucket) is the interface to an object
//! store, and [`LocalStore`](local::LocalStore) is the interface to the archived directory. The functions return
//! futures that any runtime can poll. The feature `object_store` adds `remote`, which implements `Bucket` for real
//! object stores.
//!
//! [`mirror::push`] archives the directory of a store that is not open. [`mirror::restore`] writes a directory that the
//! engine can open and that continues the archive. The command `remanent archive` uses both. The engine archives an
//! open store with the functions of [`line`](mod@line).
//!
//! # The line
//!
//! ```text
//! line/<n>                     create-only, dense from 1: a fence, run, manifest, catalog or boundary
//! bound/<k>                    create-only, dense from 1, never deleted: a copy of the k-th boundary of the line
//! data/<term>-<random>-<i>     created once: parts of images, tables, manifests and long runs
//! newest                       a hint at the position of the end; may be missing, old or wrong
//! ```
//!
//! A writer first creates a *fence*, whose position is its *term*. Then it appends *runs* of log frames and *manifests*
//! of snapshots, each at the next position of the line. A *boundary* permits deleting objects below its start. A single
//! create decides which object gets a position: a writer that finds another writer's fence at its position is
//! superseded.
//!
//! Comments in the code cite the rules of this protocol by number, for example "rule 5". [`rules`] lists all rules.
//!
//! # Terms
//!
//! - **opening**: the segment header that starts an *incarnation*, the part of the log that one open of the store
//!   writes. It names its *predecessor*, the last earlier batch that it continues. The open drops all batches above the
//!   predecessor.
//! - **mark**: a statement in a frame that the log was synced up to an earlier batch. A batch under a mark that is
//!   itself synced is *proven*: every later open keeps it.
//! - **redo** and **end** of a snapshot: a restore of the snapshot replays the log after `redo` and up to `end`.
//! - **link**: a manifest file of the directory. A snapshot consists of a chain of links.
//! - **catalog**: the line object that lists the *named snapshots* that the archive keeps.
//! - **bound**: a copy of a boundary in `bound/`. Readers use the copies to find the newest boundary.
//! - **hole**: the positions whose objects were deleted because of a boundary. A stalled process may create objects at
//!   these positions again.
//! - **sweep**: the deletion of the objects that a boundary has released.
//! - **cut**: a fence that continues the line at an earlier batch.
//! - **gap**: batches that were never archived, because the log with these batches was recycled first.
//!
//! # Promises
//!
//! - A restore of the end of the line contains every batch that was acknowledged as archived before the restore
//!   started, unless a user cuts the line.
//! - A restore returns a state of the line. Two restores never disagree on a common prefix.
//! - After its successor has created a fence, a superseded writer acknowledges no batch.
//!
//! These promises hold if creates and reads of one key are linearizable and if only the archive removes its objects.
//! They do not depend on listings or clocks. A request may fail, be repeated, be delayed without limit, take effect
//! after its sender died, or report that an object exists although nothing was written. `tests/it/campaign.rs` checks
//! the promises in a simulation with these faults. `tests/it/rules.rs` checks that each rule of [`rules::Rule`] is
//! needed.
//!
//! # Map
//!
//! A folder or file imports only from rows below its own.
//!
//! | folder | purpose |
//! |---|---|
//! | `testing/` | a simulated bucket and simulated machines; only with the feature `testing` |
//! | `mirror.rs` | archives the directory of a closed store, and restores one |
//! | `directory/` | reads and writes the directory of a store without the engine |
//! | `line/` | implements the protocol: find, fence, append, prune, read |
//! | `local.rs` | the interface to the local directory that is archived |
//! | `error.rs` | errors, with their remedies |
//! | `read_ahead.rs` | prefetches the objects to which a hint refers |
//! | `remote/` | buckets in S3, Google Cloud Storage, Azure and local folders; only with the feature `object_store` |
//! | `bucket.rs` | the interface to an object store |
//! | `rules.rs` | the rules of the protocol, and those that a test can leave out |
//! | `object/` | encoding and keys of the objects |
#![forbid(unsafe_code)]

#[cfg(feature = "testing")]
pub mod testing;
pub mod mirror;
pub mod directory;
pub mod line;
pub mod local;
pub mod error;
mod read_ahead;
#[cfg(feature = "object_store")]
pub mod remote;
pub mod bucket;
pub mod rules;
pub mod object;

pub use error::{Error, Result};
