//! On-disk format of a Remanent store: encoding, decoding and validation.
//!
//! `SPEC.md`, in this crate's directory, specifies the same format in prose.
//!
//! The crate does no I/O and contains no unsafe code. An inspector that uses only this crate can read stores that the
//! engine cannot open.
//!
//! # Map
//!
//! A folder or file imports only from those below it.
//!
//! | folder | purpose |
//! |---|---|
//! | `judge/` | verdict on a store: where recovery starts and what is lost |
//! | `salvage/` | pages of a damaged store whose contents can still be proven |
//! | `state/` | from bytes to a state: page table, log, survey, reachable states, rebuild |
//! | `manifest/` | snapshots: bases, changes, chains |
//! | `op/` | operations of a batch |
//! | `image/` | image files and how to read them |
//! | `log/` | segments in order, the walk, the end of the log |
//! | `store.rs` | the STORE file |
//! | `frame.rs` | frame headers |
//! | `segment.rs` | segment headers |
//! | `value/` | metadata values |
//! | `defect.rs` | defects found in bytes |
//! | `names.rs` | file names of a store |
//! | `ids.rs` | newtypes for pages, versions and positions |
//! | `layout.rs` | tables of fixed little-endian fields |
//! | `limits.rs` | alignments and limits |
#![forbid(unsafe_code)]

pub mod judge;
pub mod salvage;
pub mod state;
pub mod manifest;
pub mod op;
pub mod image;
pub mod log;
pub mod store;
pub mod frame;
pub mod segment;
pub mod value;
pub mod defect;
pub mod names;
pub mod ids;
pub mod layout;
pub mod limits;

pub use defect::{Damage, Defect, SHORTAGES};
pub use ids::{
    Epoch, Incarnation, Key, KeyLenError, LogPoint, Lsn, PageId, Place, Position, SnapshotId, StoreId,
    UnknownPlace, Width,
};
pub use names::{FileName, Folder, ReadAt};
pub use state::table::{PageInfo, PageTable};
pub use value::{Metadata, SharedMetadata, Value};

/// Step between the cases of tests that try every bit or byte. Under Miri, where a case takes about a thousand times as
/// long, these tests try only a sample.
#[cfg(test)]
const CASES_STEP: usize = if cfg!(miri) { 61 } else { 1 };
