//! Detection of a writer. This module uses only the engine's disk layer and opens no store.

use std::path::Path;

use remanent::disk::Disk;
use remanent::disk::dir::DirDisk;

/// Returns whether a writer holds the lock of the store in this directory, or `None` if the system cannot
/// tell.
pub fn is_held(directory: &Path) -> Option<bool> {
    DirDisk::new(directory).is_locked().ok()
}
