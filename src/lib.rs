//! Floor 8. Remanent: pages that live in GPU memory and survive a crash.

pub mod arena;
pub mod device;
pub mod disk;
pub mod error;
pub mod options;
pub mod staging;

pub use error::{Error, Remedy, Result};
pub use options::{Ack, Budget, Create, DeviceChoice, LogIo, Options};
pub use remanent_format::{
    Epoch, FileName, Folder, Incarnation, Key, LogPoint, Lsn, PageId, Place, Position, SnapshotId, StoreId,
    Width,
};
