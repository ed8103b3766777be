//! A temporary file system on a loop device. A point-in-time copy of the device can be made.
//!
//! The file of the loop device is on an XFS file system, because XFS can clone files. A clone is a point-in-time copy
//! of the device, even during writes. Dropping a [`Medium`] unmounts both file systems, even after Ctrl-C.

use std::path::{Path, PathBuf};

use super::loop_mounts::{clone, make, mount, unmount};
use crate::cli::exit::Failure;

const OUTER_LEN: u64 = 64 << 30;
const INNER_LEN: u64 = 4 << 30;

/// A mounted file system. Dropping this value unmounts it.
struct Mount(PathBuf);

/// An ext4 file system for a test store. Its device can be cloned. The fields are in the order in which they must be
/// dropped.
pub struct Medium {
    inner: Mount,
    clones: u64,
    outer: Mount,
}

/// A clone of the device, with the content that a power cut at the time of the clone would leave.
pub struct PowerCut {
    image: PathBuf,
    at: PathBuf,
}

impl Medium {
    /// Creates and mounts the file systems in a folder.
    pub fn new(folder: &Path) -> Result<Self, String> {
        let outer = make(&folder.join("outer"), OUTER_LEN, "mkfs.xfs", &["-q", "-f"])?;
        let outer = Mount::new(&outer, folder.join("clones"))?;
        let inner = make(&outer.0.join("image"), INNER_LEN, "mkfs.ext4", &["-q", "-F"])?;
        let inner = Mount::new(&inner, folder.join("disk"))?;
        Ok(Self { inner, clones: 0, outer })
    }

    /// Returns the folder on which the ext4 file system is mounted.
    pub fn path(&self) -> &Path {
        &self.inner.0
    }

    /// Clones the device in its current state.
    pub fn cut(&mut self) -> Result<PowerCut, Failure> {
        self.clones += 1;
        let image = self.outer.0.join(format!("clone-{}", self.clones));
        clone(&self.outer.0.join("image"), &image).map_err(|error| {
            Failure::Environment(format!("cannot clone into {}: {error}", image.display()))
        })?;
        Ok(PowerCut { at: image.with_extension("mounted"), image })
    }
}

impl PowerCut {
    /// Mounts the clone, calls `inspect` with the folder, and unmounts the clone.
    pub fn with_mount<T>(self, inspect: impl FnOnce(&Path) -> T) -> Result<T, Failure> {
        let mount = Mount::new(&self.image, self.at).map_err(Failure::Environment)?;
        let seen = inspect(&mount.0);
        drop(mount);
        super::remove_file(&self.image)?;
        Ok(seen)
    }
}

impl Mount {
    fn new(image: &Path, at: PathBuf) -> Result<Self, String> {
        mount(image, &at, &["-o", "loop"])?;
        Ok(Self(at))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // Ignore the error. If the file system stays mounted, removing the folder fails.
        let _ = unmount(&self.0);
    }
}
