//! File systems of a test's own, on loop devices over files in memory, and the content of their devices at a
//! moment.
//!
//! The file behind a loop device lies on a file system that can clone files. A clone is one moment of the
//! device, taken while it is written to: a power cut, as far as the file system above it can tell.

#[path = "../../../tools/src/torture/loop_mounts.rs"]
mod loop_mounts;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// A kind of file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Ext4,
    /// XFS whose files may share extents, as it is made by default.
    Xfs,
    XfsWithoutReflinks,
    Btrfs,
}

impl Kind {
    pub const ALL: [Self; 4] = [Self::Ext4, Self::Xfs, Self::XfsWithoutReflinks, Self::Btrfs];

    /// The program that makes it, its options, the least bytes that it takes, options to mount a copy of a
    /// mounted one.
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

/// A mounted file system, for as long as this lives.
#[derive(Debug)]
pub struct Mount {
    pub path: PathBuf,
}

impl Mount {
    /// Mounts a file system; the folder is made if need be.
    pub fn new(what: &Path, path: PathBuf, arguments: &[&str]) -> Result<Self, String> {
        loop_mounts::mount(what, &path, arguments)?;
        Ok(Self { path })
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // A worker that a failing test leaves behind does not keep the devices.
        let unmounted = loop_mounts::unmount(&self.path);
        // A test that fails already says why.
        assert!(std::thread::panicking() || unmounted.is_ok(), "{unmounted:?}");
    }
}

/// A file system on a device whose moments can be kept. Fields in the order in which they must go.
pub struct Medium {
    _mount: Mount,
    kind: Kind,
    clones: usize,
    _outer: Mount,
    folder: tempfile::TempDir,
}

impl Medium {
    /// Makes one, mounted at `path`, with nothing in it.
    pub fn new(kind: Kind, path: PathBuf) -> Result<Self, String> {
        // In memory: the test is about which writes arrive, not how fast.
        let folder = tempfile::tempdir_in("/dev/shm").map_err(|error| format!("/dev/shm: {error}"))?;
        let outer = make(Kind::Xfs, &folder.path().join("outer"), 8 << 30)?;
        let outer = Mount::new(&outer, folder.path().join("mounted"), &["-o", "loop"])?;
        let (.., len, _) = kind.recipe();
        let image = make(kind, &outer.path.join("image"), len)?;
        let mount = Mount::new(&image, path, &["-o", "loop"])?;
        // A store is made in an empty folder.
        if kind == Kind::Ext4 {
            std::fs::remove_dir(mount.path.join("lost+found")).unwrap();
        }
        Ok(Self { _mount: mount, kind, clones: 0, _outer: outer, folder })
    }

    /// The device's content at this moment.
    pub fn cut(&mut self) -> Cut {
        self.cut_of(&self.image("image"))
    }

    /// The content of an earlier cut's device at this moment.
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

/// One moment of a device.
pub struct Cut {
    image: PathBuf,
    path: PathBuf,
    options: &'static str,
}

impl Cut {
    /// Mounts it: the file system recovers first.
    pub fn mount(&self) -> Mount {
        Mount::new(&self.image, self.path.clone(), &["-o", self.options]).unwrap()
    }
}

impl Drop for Cut {
    fn drop(&mut self) {
        // The rest goes with the folder.
        let _ = std::fs::remove_file(&self.image);
    }
}

/// Makes a file with a file system in it.
pub fn make(kind: Kind, path: &Path, len: u64) -> Result<PathBuf, String> {
    let (program, options, ..) = kind.recipe();
    loop_mounts::make(path, len, program, options)
}

/// The reason why this kind of file system cannot be had here, if so: one is made to find out.
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
