//! An output file that a command writes for the user. The file appears complete or not at all, and can replace an older
//! file.

use std::fs::{self, File, Metadata, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use tempfile::{Builder, NamedTempFile};

/// Permissions of a new file before the umask is applied.
const NEW_MODE: u32 = 0o666;

/// An output file that is written under a temporary name. [`Replacement::put`] renames the file to its final name. If
/// the value is dropped before, the temporary file is removed.
pub struct Replacement {
    target: PathBuf,
    /// Metadata of the file that will be replaced, or `None` if the target does not exist.
    old: Option<Metadata>,
    file: NamedTempFile,
}

impl Replacement {
    /// Creates the temporary file in the folder of the target. If `path` is a symbolic link, the target is the file
    /// that the link points to.
    ///
    /// # Errors
    /// Returns `InvalidInput` if the target is not a regular file, or an error of the system.
    pub fn begin(path: &Path) -> io::Result<Self> {
        let target = match fs::canonicalize(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && path.is_symlink() => {
                let message = "symbolic link to a file that does not exist; remove the link first";
                return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => path.to_owned(),
            target => target?,
        };
        let old = target.exists().then(|| target.metadata()).transpose()?;
        if old.as_ref().is_some_and(|old| !old.is_file()) {
            let message = "not a regular file; use another path";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        let mut builder = Builder::new();
        builder.prefix(".remanent-");
        // A file that will replace another one is readable only by its owner until it has the permissions of the
        // replaced file.
        if old.is_none() {
            builder.permissions(Permissions::from_mode(NEW_MODE));
        }
        let file = builder.tempfile_in(folder_of(&target))?;
        Ok(Self { target, old, file })
    }

    pub fn file(&self) -> &File {
        self.file.as_file()
    }

    /// Syncs the temporary file and renames it to its final name. If it replaces a file, it first receives the owner,
    /// group and permissions of that file.
    ///
    /// # Errors
    /// Returns an error of the system. The replaced file is then unchanged.
    pub fn put(self) -> io::Result<()> {
        if let Some(old) = &self.old {
            let mut mode = old.mode() & 0o7777;
            if fchown(self.file(), Some(old.uid()), Some(old.gid())).is_err() {
                // The new file belongs to another group, whose permissions are reduced to those of others.
                mode = mode & 0o707 | mode << 3 & 0o070;
            }
            self.file().set_permissions(Permissions::from_mode(mode))?;
        }
        self.file().sync_all()?;
        let folder = File::open(folder_of(&self.target))?;
        self.file.persist(&self.target).map_err(|error| error.error)?;
        // The rename survives a power cut only after a sync of the folder.
        folder.sync_all()
    }
}

/// Returns the folder that contains a file.
fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::symlink;

    use super::*;

    fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
        let replacement = Replacement::begin(path)?;
        replacement.file().write_all(bytes)?;
        replacement.put()
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o7777
    }

    #[test]
    fn new_file_has_default_permissions() {
        let folder = tempfile::tempdir().unwrap();
        let (path, other) = (folder.path().join("new"), folder.path().join("other"));
        replace(&path, b"new").unwrap();
        fs::write(&other, "").unwrap();
        assert_eq!(mode(&path), mode(&other));
    }

    #[test]
    fn replaced_file_keeps_permissions_and_links() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        for kept in [0o600, 0o640, 0o444, 0o664] {
            fs::write(&file, "old").unwrap();
            fs::set_permissions(&file, Permissions::from_mode(kept)).unwrap();
            let _ = symlink("file", &link);
            replace(&link, b"new").unwrap();
            assert_eq!((mode(&file), fs::read(&file).unwrap()), (kept, b"new".to_vec()));
            assert!(link.is_symlink());
            fs::remove_file(&file).unwrap();
        }
    }

    #[test]
    fn non_file_target_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let dangling = folder.path().join("dangling");
        symlink("nowhere", &dangling).unwrap();
        for path in [folder.path(), Path::new("/dev/null"), &dangling] {
            let error = Replacement::begin(path).err().unwrap();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{}", path.display());
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "a file was left behind");
    }

    #[test]
    fn dropped_replacement_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "old").unwrap();
        drop(Replacement::begin(&path).unwrap());
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
