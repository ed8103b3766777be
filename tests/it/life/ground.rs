//! The file system of a store.

use std::path::{Path, PathBuf};

use crate::machine::mounts::{self, Kind as FileSystem, Mount};
use crate::machine::skipped;

/// The location of a store: its own file system, so that it can be full, or a temporary folder.
pub struct Ground {
    folder: PathBuf,
    /// The mounted file system. Dropped before the folder in which it is mounted.
    pub mount: Option<Mount>,
}

impl Ground {
    pub fn new(len: u64) -> Self {
        // The folder is removed only after success.
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

    /// Returns the worker's folder.
    pub fn path(&self) -> &Path {
        self.mount.as_ref().map_or(&self.folder, |mount| &mount.path)
    }

    pub fn remove(self) {
        drop(self.mount);
        std::fs::remove_dir_all(self.folder).unwrap();
    }
}
