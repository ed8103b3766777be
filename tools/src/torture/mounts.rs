//! A temporary file system on a loop device, and the content of its device at one moment.
//!
//! The device's file is on an XFS file system, which can clone files. A clone captures one moment of the
//! device while it is written to. Both file systems stay mounted until this value is dropped, which happens
//! also after Ctrl-C.

use std::path::{Path, PathBuf};

use super::loop_mounts::{clone, make, mount, unmount};
use crate::cli::exit::Failure;

const OUTER_LEN: u64 = 64 << 30;
const INNER_LEN: u64 = 4 << 30;

/// One mounted file system.
struct Mount(PathBuf);

/// An ext4 file system whose device can be cloned. Fields are in the order in which they must be dropped.
pub struct Medium {
    inner: Mount,
    clones: u64,
    outer: Mount,
}

/// A clone of the device at one moment.
pub struct PowerCut {
    image: PathBuf,
    at: PathBuf,
}

impl Medium {
    /// Creates the file systems in a folder.
    pub fn new(folder: &Path) -> Result<Self, String> {
        let outer = make(&folder.join("outer"), OUTER_LEN, "mkfs.xfs", &["-q", "-f"])?;
        let outer = Mount::new(&outer, folder.join("clones"))?;
        let inner = make(&outer.0.join("image"), INNER_LEN, "mkfs.ext4", &["-q", "-F"])?;
        let inner = Mount::new(&inner, folder.join("disk"))?;
        Ok(Self { inner, clones: 0, outer })
    }

    /// Returns the folder where the ext4 file system is mounted.
    pub fn path(&self) -> &Path {
        &self.inner.0
    }

    /// Clones the device at this moment.
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
    /// Mounts the clone while `inspect` runs.
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
        // A drop cannot report a failure; removing the folder fails for the caller then.
        let _ = unmount(&self.0);
    }
}
