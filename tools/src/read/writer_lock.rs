//! The writer's lock. This module uses only the disk layer of the engine, and does not open the store.

use std::path::Path;

use remanent::disk::Disk;
use remanent::disk::dir::DirDisk;

/// The writer's lock of a store directory. No engine opens the store for writing before the value is dropped.
#[cfg(feature = "archive")]
struct HeldLock(#[expect(dead_code, reason = "held until it is dropped")] Box<dyn remanent::disk::DiskLock>);

#[cfg(feature = "archive")]
impl std::fmt::Debug for HeldLock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("HeldLock")
    }
}

#[cfg(feature = "archive")]
impl remanent_archive::directory::WriterLock for HeldLock {}

/// Acquires the writer's lock for an archive. Creates LOCK and READERS if they do not exist.
#[cfg(feature = "archive")]
pub fn acquire(
    directory: &Path,
) -> Result<Box<dyn remanent_archive::directory::WriterLock>, crate::cli::exit::Failure> {
    match DirDisk::new(directory).lock() {
        Ok(lock) => Ok(Box::new(HeldLock(lock))),
        Err(error) => Err(crate::cli::engine::engine_failure(error)),
    }
}

/// Returns true if a writer holds the lock of the store in a directory, or `None` if the system cannot report locks.
pub fn is_held(directory: &Path) -> Option<bool> {
    DirDisk::new(directory).is_locked().ok()
}
