//! The protocol of an archive: a store that survives its machine.
//!
//! An archive is a continuous copy of one store in an object store. This crate defines its objects, and the functions
//! that create, find, read and delete them. An object store is a [`Bucket`](bucket::Bucket), the directory that is
//! archived a [`LocalStore`](local::LocalStore). The functions are plain futures that need no runtime. The feature
//! `object_store` adds `remote`, which reaches real object stores.
//!
//! [`mirror::push`] archives the directory of a store that no process has open, and [`mirror::restore`] writes a directory
//! that the engine opens and that continues the archive. The command `remanent archive` uses them. The engine archives an
//! open store with the functions of `line`.
//!
//! # The line
//!
//! ```text
//! line/<n>                     create-only, dense from 1: a fence, run, manifest or boundary
//! bound/<k>                    create-only, dense from 1, never deleted: a copy of the k-th boundary of the line
//! data/<term>-<random>-<i>     written once: parts of images, tables, manifests and long runs
//! newest                       a hint: where the end was; may be missing, old or wrong
//! ```
//!
//! A writer begins with a *fence*, whose position is its *term*. It appends *runs* of log frames and *manifests* of
//! snapshots, each at the next position of the line. A *boundary* permits deleting what lies below it. Each position is
//! taken by one create: a writer that finds a fence at its position was superseded.
//!
//! # Promises
//!
//! - Every restore of the end of the line that begins after a batch was acknowledged as archived contains the batch,
//!   unless a user cuts the line.
//! - A restore gives a state of the line. Two restores never disagree on a common prefix.
//! - Nothing is acknowledged from a superseded writer after the fence of its successor.
//!
//! They hold if creates and reads of one key are linearizable and objects are removed only by the archive. Nothing is
//! assumed of listings and clocks. Requests may fail, be repeated, be delayed without bound, take effect after their
//! sender died, or report an existing object without having written. `tests/campaign.rs` checks the promises in a
//! simulation with these faults, and that each rule of the protocol is needed.
//!
//! # Map
//!
//! A folder or file imports only from those below it.
//!
//! | folder | purpose |
//! |---|---|
//! | `testing/` | a simulated bucket and simulated machines; only with the feature `testing` |
//! | `mirror.rs` | push of a directory, and restore into one |
//! | `directory/` | the directory of a store on disk, read and written without the engine |
//! | `line/` | the protocol: find, fence, append, prune, read |
//! | `local.rs` | the interface to the directory that is archived |
//! | `error.rs` | errors: what was found, and the remedy |
//! | `remote/` | buckets in S3, Google Cloud Storage and Azure, and local folders; only with the feature `object_store` |
//! | `bucket.rs` | the interface to an object store |
//! | `rules.rs` | the rules that a test can leave out |
//! | `object/` | bytes and names of the objects |
#![forbid(unsafe_code)]

#[cfg(feature = "testing")]
pub mod testing;
pub mod mirror;
pub mod directory;
pub mod line;
pub mod local;
pub mod error;
#[cfg(feature = "object_store")]
pub mod remote;
pub mod bucket;
pub mod rules;
pub mod object;

pub use error::{Error, Result};
