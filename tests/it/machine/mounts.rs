//! File systems for one test, on loop devices over files in memory, and copies of these devices at some
//! instant.
//!
//! The file behind a loop device is on a file system that can clone files. A clone is a consistent copy of
//! the device while it is being written. The file system on the device cannot distinguish it from the result
//! of a power cut.

#[path = "../../../tools/src/torture/loop_mounts.rs"]
mod loop_mounts;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// A kind of file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Ext4,
    /// XFS whose files may share extents, which is the default of its `mkfs`.
    Xfs,
    XfsWithoutReflinks,
    Btrfs,
}

impl Kind {
    pub const ALL: [Self; 4] = [Self::Ext4, Self::Xfs, Self::XfsWithoutReflinks, Self::Btrfs];

    /// Returns the program that creates the file system, its options, the minimum size in bytes, and the
    /// options for mounting a copy of a mounted file system.
    fn recipe(self) -> (&'static str, &'static [&'static str], u64, &'static str) {
        match self {
            Self::Ext4 => ("mkfs.ext4", &["-q", "-F"], 64 << 20, "loop"),
            Self::Xfs => ("mkfs.xfs", &["-q", "-f"], 320 << 20, "loop,nouuid"),
            Self::XfsWithoutReflinks => {
                ("mkfs.xfs", &["-q", "-f", "-m", "reflink=0"], 320 << 20, "loop,nouuid")
            }
            Self::Btrfs => ("mkfs.btrfs", &["-q", "-f"], 256 << 20, "loop"),
        }
    }
}

/// A mounted file system. Unmounted when dropped.
#[derive(Debug)]
pub struct Mount {
    pub path: PathBuf,
}

impl Mount {
    /// Mounts a file system, and creates the folder if necessary.
    pub fn new(what: &Path, path: PathBuf, arguments: &[&str]) -> Result<Self, String> {
        loop_mounts::mount(what, &path, arguments)?;
        Ok(Self { path })
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // A worker that a failed test leaves running must not keep the devices in use.
        let unmounted = loop_mounts::unmount(&self.path);
        // A failing test has already reported its reason.
        assert!(std::thread::panicking() || unmounted.is_ok(), "{unmounted:?}");
    }
}

/// A file system on a device that can be cloned. The order of the fields is the order in which they must be
/// dropped.
pub struct Medium {
    _mount: Mount,
    kind: Kind,
    clones: usize,
    _outer: Mount,
    folder: tempfile::TempDir,
}

impl Medium {
    /// Creates an empty file system, and mounts it at `path`.
    pub fn new(kind: Kind, path: PathBuf) -> Result<Self, String> {
        // The file system is in memory, because the test checks which writes arrive, not how fast they are.
        let folder = tempfile::tempdir_in("/dev/shm").map_err(|error| format!("/dev/shm: {error}"))?;
        let outer = make(Kind::Xfs, &folder.path().join("outer"), 8 << 30)?;
        let outer = Mount::new(&outer, folder.path().join("mounted"), &["-o", "loop"])?;
        let (.., len, _) = kind.recipe();
        let image = make(kind, &outer.path.join("image"), len)?;
        let mount = Mount::new(&image, path, &["-o", "loop"])?;
        // A store must be created in an empty folder.
        if kind == Kind::Ext4 {
            std::fs::remove_dir(mount.path.join("lost+found")).unwrap();
        }
        Ok(Self { _mount: mount, kind, clones: 0, _outer: outer, folder })
    }

    /// Returns the device's current content.
    pub fn cut(&mut self) -> Cut {
        self.cut_of(&self.image("image"))
    }

    /// Returns the current content of the device of an earlier cut.
    pub fn cut_again(&mut self, cut: &Cut) -> Cut {
        self.cut_of(&cut.image)
    }

    fn image(&self, name: &str) -> PathBuf {
        self.folder.path().join("mounted").join(name)
    }

    fn cut_of(&mut self, source: &Path) -> Cut {
        self.clones += 1;
        let image = self.image(&format!("clone-{}", self.clones));
        loop_mounts::clone(source, &image).unwrap();
        let (.., options) = self.kind.recipe();
        let path = self.folder.path().join(format!("mounted-{}", self.clones));
        Cut { image, path, options }
    }
}

/// The content of a device at some instant.
pub struct Cut {
    image: PathBuf,
    path: PathBuf,
    options: &'static str,
}

impl Cut {
    /// Mounts the content of the device. The file system first recovers.
    pub fn mount(&self) -> Mount {
        Mount::new(&self.image, self.path.clone(), &["-o", self.options]).unwrap()
    }
}

impl Drop for Cut {
    fn drop(&mut self) {
        // The remaining files are removed with the folder.
        let _ = std::fs::remove_file(&self.image);
    }
}

/// Creates a file that contains a file system.
pub fn make(kind: Kind, path: &Path, len: u64) -> Result<PathBuf, String> {
    let (program, options, ..) = kind.recipe();
    loop_mounts::make(path, len, program, options)
}

/// Returns the reason why this kind of file system is not available, or `None` if it is available. Creates a
/// file system to determine this.
pub fn missing(kind: Kind) -> Option<&'static str> {
    static REASONS: [OnceLock<Option<String>>; Kind::ALL.len()] =
        [const { OnceLock::new() }; Kind::ALL.len()];
    let folder = || tempfile::tempdir().unwrap();
    let ask = || {
        let folder = folder();
        Medium::new(kind, folder.path().join("mounted")).err()
    };
    REASONS[kind as usize].get_or_init(ask).as_deref()
}
