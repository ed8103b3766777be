//! Uses a local folder as a bucket.
//!
//! `object_store` follows symbolic links out of the folder, and recreates the folder if it was unmounted or removed.
//! This module returns an error in both cases. The check protects against mistakes, not against a user who changes the
//! folder concurrently.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::failure::io_failure;
use crate::bucket::{BucketError, FailureClass};
use crate::object::Folder;

/// A local folder that contains an archive.
#[derive(Clone, Debug)]
pub(super) struct LocalFolder {
    root: PathBuf,
    /// The open folder, whose inode number cannot be reused while it is open.
    opened: Arc<File>,
}

impl LocalFolder {
    /// Opens an existing folder.
    pub fn open(path: &Path) -> io::Result<Self> {
        let root = path.canonicalize()?;
        let opened = File::open(&root)?;
        if !opened.metadata()?.is_dir() {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        Ok(Self { root, opened: Arc::new(opened) })
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Checks that the folder was not replaced since it was opened, and that no component of `name` is a symbolic link.
    pub fn check(&self, name: &str) -> Result<(), BucketError> {
        if !self.is_in_place().map_err(|error| io_failure(&error))? {
            let message = format!("{} was removed, replaced or unmounted", self.root.display());
            return Err(BucketError { class: FailureClass::Unreachable, message });
        }
        let mut path = self.root.clone();
        for part in name.split('/') {
            path.push(part);
            match fs::symlink_metadata(&path) {
                Ok(metadata) if metadata.is_symlink() => {
                    let message =
                        format!("{} is a symbolic link, which an archive does not follow", path.display());
                    return Err(BucketError { class: FailureClass::Denied, message });
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
                Err(error) => return Err(io_failure(&error)),
            }
        }
        Ok(())
    }

    fn is_in_place(&self) -> io::Result<bool> {
        let opened = self.opened.metadata()?;
        match fs::metadata(&self.root) {
            Ok(found) => Ok((found.dev(), found.ino()) == (opened.dev(), opened.ino())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Returns true if the object `name` exists and is at most `offset` bytes long.
    pub fn ends_before(&self, name: &str, offset: u64) -> bool {
        fs::metadata(self.root.join(name)).is_ok_and(|metadata| metadata.len() <= offset)
    }

    /// Returns the names in a folder.
    pub fn list(&self, folder: Folder) -> Result<Vec<String>, BucketError> {
        self.check(folder.name())?;
        let entries = match fs::read_dir(self.root.join(folder.name())) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(|error| io_failure(&error))?,
        };
        let mut names = Vec::new();
        for entry in entries {
            let name = entry.map_err(|error| io_failure(&error))?.file_name();
            names.push(format!("{}/{}", folder.name(), name.to_string_lossy()));
        }
        Ok(names)
    }

    /// Syncs the folder that contains an existing object. The process that created the object may have crashed before
    /// it synced the folder, or the sync may have failed.
    pub fn sync_folder_of(&self, name: &str) -> Result<(), BucketError> {
        let path = self.root.join(name);
        let folder = path.parent().unwrap_or(&self.root);
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(|error| io_failure(&error))
    }
}
