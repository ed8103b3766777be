//! The file system that a store lies on.

use std::path::{Path, PathBuf};

use crate::machine::mounts::{self, Kind as FileSystem, Mount};
use crate::machine::skipped;

/// The place of a store: a file system of its own, so that it can be full, or a temporary folder.
pub struct Ground {
    folder: PathBuf,
    /// Dropped before the folder in which it is mounted.
    pub mount: Option<Mount>,
}

impl Ground {
    pub fn new(len: u64) -> Self {
        // Kept until all went well.
        let folder = tempfile::tempdir().unwrap().keep();
        let mounted = mounts::make(FileSystem::Ext4, &folder.join("image"), len)
            .and_then(|image| Mount::new(&image, folder.join("mounted"), &["-o", "loop"]));
        match mounted {
            Ok(mount) => Self { folder, mount: Some(mount) },
            Err(reason) => {
                skipped("a full disk", &reason);
                Self { folder, mount: None }
            }
        }
    }

    /// The folder that the worker works in.
    pub fn path(&self) -> &Path {
        self.mount.as_ref().map_or(&self.folder, |mount| &mount.path)
    }

    pub fn remove(self) {
        drop(self.mount);
        std::fs::remove_dir_all(self.folder).unwrap();
    }
}
