//! A file system of our own on a loop device, and the content of its device at one moment.
//!
//! The device's file lies on an XFS, which can clone files. A clone is one moment of the device, taken while
//! it is written to. Both stay mounted for as long as this value lives, also when Ctrl-C ends the command.

use std::path::{Path, PathBuf};

use super::loop_mounts::{clone, make, mount, unmount};
use crate::cli::exit::Failure;

const OUTER_LEN: u64 = 64 << 30;
const INNER_LEN: u64 = 4 << 30;

/// One mounted file system.
struct Mount(PathBuf);

/// An ext4 whose moments can be kept. Fields in the order in which they must go.
pub struct Medium {
    inner: Mount,
    clones: u64,
    outer: Mount,
}

/// One moment of it.
pub struct PowerCut {
    image: PathBuf,
    at: PathBuf,
}

impl Medium {
    /// Makes one in a folder.
    pub fn new(folder: &Path) -> Result<Self, String> {
        let outer = make(&folder.join("outer"), OUTER_LEN, "mkfs.xfs", &["-q", "-f"])?;
        let outer = Mount::new(&outer, folder.join("clones"))?;
        let inner = make(&outer.0.join("image"), INNER_LEN, "mkfs.ext4", &["-q", "-F"])?;
        let inner = Mount::new(&inner, folder.join("disk"))?;
        Ok(Self { inner, clones: 0, outer })
    }

    /// The folder where it is mounted.
    pub fn path(&self) -> &Path {
        &self.inner.0
    }

    /// Takes the content of the device at this moment.
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
    /// Mounts it, for the time of a look.
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
        // A drop cannot report a failure; the caller that removes the folder meets it.
        let _ = unmount(&self.0);
    }
}
