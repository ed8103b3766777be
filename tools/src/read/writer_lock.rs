//! Whether a store has a writer. Of the engine, this asks the disk alone: it opens no store.

use std::path::Path;

use remanent::disk::Disk;
use remanent::disk::dir::DirDisk;

/// Whether a writer holds the lock of the store in this directory; `None` if the system does not say.
pub fn is_held(directory: &Path) -> Option<bool> {
    DirDisk::new(directory).is_locked().ok()
}
