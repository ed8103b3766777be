//! Detection of a writer. This module uses only the disk layer of the engine, and does not open the store.

use std::path::Path;

use remanent::disk::Disk;
use remanent::disk::dir::DirDisk;

/// Returns true if a writer holds the lock of the store in a directory, or `None` if the system cannot report locks.
pub fn is_held(directory: &Path) -> Option<bool> {
    DirDisk::new(directory).is_locked().ok()
}
