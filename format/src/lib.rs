//! The bytes of a Remanent store. `SPEC.md` in this crate's folder is the same in prose.
//!
//! No I/O and no unsafe code here: an inspector built on this crate opens what the engine refuses.
//!
//! # Map
//!
//! A folder or file imports only from those below it.
//!
//! | folder | purpose |
//! |---|---|
//! | `judge/` | the verdict on a store: where recovery starts, what is lost |
//! | `salvage/` | the pages that a damaged store still proves |
//! | `state/` | from bytes to a state: table, log, survey, how far back a store goes, rebuild |
//! | `manifest/` | snapshots: bases, changes, chains |
//! | `op/` | a batch's operations |
//! | `image/` | image files and how they are read |
//! | `log/` | segments in their order, the walk, the end of the log |
//! | `store.rs` | the STORE file |
//! | `frame.rs` | the header of a frame |
//! | `segment.rs` | the header of a segment |
//! | `value/` | metadata values |
//! | `defect.rs` | defects of bytes |
//! | `names.rs` | the files of a store |
//! | `ids.rs` | newtypes: pages, versions, positions |
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

/// The step between cases of a test that tries every bit or byte. An interpreter takes a thousand times as
/// long for each case, so it tries only some.
#[cfg(test)]
const CASES_STEP: usize = if cfg!(miri) { 61 } else { 1 };
