//! Floor 0. The bytes of a Remanent store. `SPEC.md` beside this crate is the same in prose.
//!
//! No I/O and no unsafe code here: an inspector built on this crate opens what the engine refuses.
#![forbid(unsafe_code)]
// Modules are listed in reading order.

pub mod by_id;
pub mod ids;
pub mod names;
pub mod limits;
pub mod layout;
pub mod defect;
pub mod value;
pub mod store;
pub mod segment;
pub mod frame;
pub mod op;
pub mod table;
pub mod apply;
pub mod head;
pub mod log;
pub mod image;
pub mod manifest;
pub mod bases;
pub mod replay;
pub mod follow;
pub mod rebuild;
pub mod reach;
pub mod judge;
pub mod trail;
pub mod salvage;

pub use defect::{Damage, Defect, SHORTAGES};
pub use ids::{
    Epoch, Incarnation, Key, KeyLenError, LogPoint, Lsn, PageId, Place, Position, SnapshotId, StoreId,
    UnknownPlace, Width,
};
pub use names::{FileName, Folder, ReadAt};
pub use table::{PageInfo, PageTable};
pub use value::{Metadata, SharedMetadata, Value};

/// From one case to the next where a test tries every bit or byte: an interpreter takes a thousand times as long for
/// each, and tries some.
#[cfg(test)]
const CASES_STEP: usize = if cfg!(miri) { 61 } else { 1 };
