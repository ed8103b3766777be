//! Read-only access to a store directory, without locks or writes.

use std::cell::RefCell;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirEntryExt, FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use remanent_format::{FileName, Folder, ReadAt};
use rustix::process::{Flock, FlockType};

use crate::cli::exit::Failure;
use crate::cli::memory::available;
use crate::read::writer_lock;

/// A store directory that is open for reading.
pub struct StoreDir {
    path: PathBuf,
    /// Maximum length in bytes of a file that is read with a single call.
    whole_max: u64,
    /// File that was read last. It stays open, because the next read is usually in the same file.
    last: RefCell<Option<(FileName, File)>>,
}

impl StoreDir {
    /// Opens a directory. Returns an error if it does not exist or cannot be read.
    pub fn open(path: &Path) -> Result<Self, Failure> {
        match fs::read_dir(path) {
            Ok(_) => Ok(Self { path: path.to_owned(), whole_max: available(), last: RefCell::new(None) }),
            Err(error) => Err(Failure::Environment(format!("cannot read {}: {error}", path.display()))),
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the failure for a directory that is not a store. If its subfolders are stores, such as those of a run
    /// with several ranks, the message names them.
    pub fn no_store(&self) -> Failure {
        let here = self.path.display();
        let entries = fs::read_dir(&self.path).into_iter().flatten().filter_map(Result::ok);
        let inner = entries.map(|entry| entry.path());
        let mut stores: Vec<PathBuf> =
            inner.filter(|path| path.join(FileName::Store.name()).is_file()).collect();
        // Sort rank-2 before rank-10.
        stores.sort_by_key(|path| (path.as_os_str().len(), path.clone()));
        Failure::Environment(match &stores[..] {
            [] => format!("there is no store in {here}"),
            [only] => format!("there is no store in {here}, but there is a store in {}", only.display()),
            [first, .., last] => format!(
                "there is no store in {here}, but its folders contain {} stores, from {} to {}; use one of them",
                stores.len(),
                first.display(),
                last.display()
            ),
        })
    }

    /// Returns the folder, name and length in bytes of every file in the directory, including files that do not belong
    /// to the store.
    pub fn files(&self) -> io::Result<Vec<(Folder, String, u64)>> {
        let mut files = Vec::new();
        for folder in [Folder::Root].into_iter().chain(Folder::INNER) {
            for name in self.list(folder)? {
                // A writer may have removed or renamed the file after its name was listed.
                let metadata = match fs::symlink_metadata(self.path.join(folder.name()).join(&name)) {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                    metadata => metadata?,
                };
                let inner = folder == Folder::Root && Folder::INNER.iter().any(|inner| inner.name() == name);
                if !inner {
                    files.push((folder, name, metadata.len()));
                }
            }
        }
        files.sort();
        Ok(files)
    }

    /// Returns the folder, name and inode of every file in the directory. The inode changes if a file is replaced.
    pub fn inodes(&self) -> io::Result<Vec<(Folder, String, u64)>> {
        let mut inodes = Vec::new();
        for folder in [Folder::Root].into_iter().chain(Folder::INNER) {
            let entries = match fs::read_dir(self.path.join(folder.name())) {
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                entries => entries?,
            };
            for entry in entries {
                let entry = entry?;
                inodes.push((folder, entry.file_name().to_string_lossy().into_owned(), entry.ino()));
            }
        }
        inodes.sort();
        Ok(inodes)
    }

    /// Returns the id of the process that has the store open, or 0 if the id is unknown. Returns `None` if no process
    /// has the store open.
    pub fn holder(&self) -> Option<u32> {
        self.len(FileName::Lock).ok()??;
        // These calls query locks without taking any.
        let lock = File::open(self.file(FileName::Lock)).ok()?;
        // The owner locks the first byte for its process, and the system reports that process. The lock on all other
        // bytes belongs to an open file, for which the system reports no process.
        let first = Flock { length: 1, ..Flock::from(FlockType::WriteLock) };
        let named = rustix::process::fcntl_getlk(&lock, &first).ok().flatten();
        if let Some(pid) = named.and_then(|held| held.pid) {
            return u32::try_from(pid.as_raw_pid()).ok();
        }
        // The process lock is released if the owner's process closes any descriptor of the file. The lock of the open
        // file and the text in the file then remain.
        if !writer_lock::is_held(&self.path)? {
            return None;
        }
        let description = fs::read_to_string(self.file(FileName::Lock)).unwrap_or_default();
        let number = description.strip_prefix("process ").and_then(|rest| rest.split(',').next());
        Some(number.and_then(|number| number.parse().ok()).unwrap_or(0))
    }

    /// Reads all bytes of a file. Returns `None` if the file does not exist.
    pub fn read_whole(&self, file: FileName) -> io::Result<Option<Vec<u8>>> {
        let Some(len) = self.len(file)? else { return Ok(None) };
        let len = usize::try_from(len).map_err(|_| io::Error::from(ErrorKind::FileTooLarge))?;
        let mut bytes = vec![0; len];
        self.read_at(file, 0, &mut bytes)?;
        Ok(Some(bytes))
    }

    /// Returns an error if an output file is inside the directory, because an inspecting command must not write to the
    /// store.
    pub fn refuse_to_write_into(&self, file: &Path) -> Result<(), Failure> {
        // A new file will be created in its parent folder. An existing file may be a symbolic link.
        let folder = match file.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        let target = fs::canonicalize(file).or_else(|_| fs::canonicalize(folder));
        match (target, fs::canonicalize(&self.path)) {
            (Ok(target), Ok(store)) if target.starts_with(&store) => Err(Failure::Environment(format!(
                "{} is inside the store; use a path outside the store",
                file.display()
            ))),
            _ => Ok(()),
        }
    }

    /// Returns the path of a file of the store.
    fn file(&self, file: FileName) -> PathBuf {
        self.path.join(file.folder().name()).join(file.name())
    }
}

impl ReadAt for StoreDir {
    fn list(&self, folder: Folder) -> io::Result<Vec<String>> {
        match fs::read_dir(self.path.join(folder.name())) {
            // A name that is not UTF-8 cannot belong to the store, so it may be displayed inexactly.
            Ok(entries) => {
                entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    fn len(&self, file: FileName) -> io::Result<Option<u64>> {
        match fs::metadata(self.file(file)) {
            // These files are read as a whole, and a sparse file can have any length.
            Ok(metadata) if metadata.is_file() && is_whole(file) && metadata.len() > self.whole_max => {
                Err(io::Error::new(ErrorKind::OutOfMemory, "the file is longer than the available memory"))
            }
            Ok(metadata) if metadata.is_file() => Ok(Some(metadata.len())),
            // Opening a named pipe would block until a writer opens it.
            Ok(_) => Err(io::Error::new(ErrorKind::InvalidData, "not a regular file")),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn read_at(&self, file: FileName, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let mut last = self.last.borrow_mut();
        if !matches!(&*last, Some((name, _)) if *name == file) {
            if self.len(file)?.is_none() {
                return Err(ErrorKind::NotFound.into());
            }
            *last = Some((file, File::open(self.file(file))?));
        }
        let (_, open) = last.as_ref().expect("the file was stored above");
        open.read_exact_at(out, offset)?;
        // A writer removes the name of an image file before it overwrites the file.
        let is_there = |now: fs::Metadata| Ok(now.ino() == open.metadata()?.ino());
        match file {
            FileName::Pages(_) if !fs::metadata(self.file(file)).and_then(is_there)? => {
                *last = None;
                Err(ErrorKind::NotFound.into())
            }
            _ => Ok(()),
        }
    }
}

/// Returns true for files that are read with a single call.
fn is_whole(file: FileName) -> bool {
    matches!(file, FileName::Store | FileName::Manifest(_) | FileName::Table(_))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directory_is_listed_and_missing_files_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let missing = dir.path().join("missing");
        assert!(matches!(StoreDir::open(&missing), Err(Failure::Environment(_))));

        fs::create_dir(dir.path().join("log")).unwrap();
        fs::write(dir.path().join("STORE"), b"identity").unwrap();
        fs::write(dir.path().join(format!("log/{}", FileName::Segment(1).name())), b"segment").unwrap();
        fs::write(dir.path().join("log/notes.txt"), b"foreign").unwrap();
        let store = StoreDir::open(dir.path()).unwrap();
        assert_eq!(
            store.files().unwrap(),
            [
                (Folder::Root, "STORE".to_owned(), 8),
                (Folder::Log, FileName::Segment(1).name(), 7),
                (Folder::Log, "notes.txt".to_owned(), 7),
            ]
        );
        assert_eq!(store.list(Folder::Snapshots).unwrap(), Vec::<String>::new());
        assert_eq!(store.len(FileName::Segment(1)).unwrap(), Some(7));
        assert_eq!(store.len(FileName::Segment(2)).unwrap(), None);
        let mut out = [0; 3];
        store.read_at(FileName::Segment(1), 4, &mut out).unwrap();
        assert_eq!(&out, b"ent");
        for (file, offset, kind) in [
            (FileName::Segment(1), 5, ErrorKind::UnexpectedEof),
            (FileName::Segment(2), 0, ErrorKind::NotFound),
        ] {
            assert_eq!(store.read_at(file, offset, &mut out).unwrap_err().kind(), kind);
        }
    }

    #[test]
    fn directory_at_file_name_is_unreadable_not_missing() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("STORE")).unwrap();
        let store = StoreDir::open(dir.path()).unwrap();
        assert_eq!(store.len(FileName::Store).unwrap_err().kind(), ErrorKind::InvalidData);
    }
}
