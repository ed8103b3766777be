//! Names of the files and folders of a store.

use std::fmt;

use crate::limits::NUMBER_MAX;

/// A folder of a store: the store directory, or one of the folders in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Folder {
    /// The directory of the store.
    Root,
    /// The folder `log`, which contains log segments.
    Log,
    /// The folder `pages`, which contains image files and tables.
    Pages,
    /// The folder `snapshots`, which contains manifests.
    Snapshots,
}

impl Folder {
    /// All folders inside the directory of a store.
    pub const INNER: [Folder; 3] = [Folder::Log, Folder::Pages, Folder::Snapshots];

    /// Returns the name of the folder within the store directory. The name of [`Folder::Root`] is empty.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Folder::Root => "",
            Folder::Log => "log",
            Folder::Pages => "pages",
            Folder::Snapshots => "snapshots",
        }
    }
}

/// A file of a store. Numbers in file names have exactly sixteen hexadecimal digits, so that names sort by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FileName {
    /// `STORE`, the file that contains the identity of the store.
    Store,
    /// `LOCK`, the file that a writer locks while it has the store open.
    Lock,
    /// `READERS`, the lock file of readers. A reader of snapshot *n* locks the byte at offset *n*. The bytes of the
    /// file have no meaning.
    Readers,
    /// `ARCHIVE`, the fences that this directory created in the archive of its store, and the last batches that it
    /// archived. Opens and tools only list this file.
    Archive,
    /// `UNFETCHED`, the parts of image files that a restore on demand has not fetched yet. The directory is a store only
    /// together with its archive until this file is removed.
    Unfetched,
    /// `log/<n>.log`, a segment of the log.
    Segment(u64),
    /// `log/<n>.spare`, a segment file that is kept for reuse.
    Spare(u64),
    /// `pages/<n>.pages`, an image file.
    Pages(u64),
    /// `pages/<n>.spare`, an image file that is kept for reuse.
    ImageSpare(u64),
    /// `pages/<n>.table`, the page table of an earlier state. A restore operation names this file.
    Table(u64),
    /// `snapshots/<n>.manifest`, the manifest of snapshot *n*, which lists its pages and their images.
    Manifest(u64),
    /// `<folder>/<n>.tmp`, a file that is being written, or that a crash left unfinished.
    Temporary(Folder, u64),
}

impl FileName {
    /// Returns the folder that contains the file.
    #[must_use]
    pub const fn folder(self) -> Folder {
        match self {
            FileName::Store
            | FileName::Lock
            | FileName::Readers
            | FileName::Archive
            | FileName::Unfetched => Folder::Root,
            FileName::Segment(_) | FileName::Spare(_) => Folder::Log,
            FileName::Pages(_) | FileName::ImageSpare(_) | FileName::Table(_) => Folder::Pages,
            FileName::Manifest(_) => Folder::Snapshots,
            FileName::Temporary(folder, _) => folder,
        }
    }

    /// Returns the file's name within its folder.
    #[must_use]
    pub fn name(self) -> String {
        match self {
            FileName::Store => "STORE".to_owned(),
            FileName::Lock => "LOCK".to_owned(),
            FileName::Readers => "READERS".to_owned(),
            FileName::Archive => "ARCHIVE".to_owned(),
            FileName::Unfetched => "UNFETCHED".to_owned(),
            FileName::Segment(n) => format!("{n:016x}.log"),
            FileName::Spare(n) | FileName::ImageSpare(n) => format!("{n:016x}.spare"),
            FileName::Pages(n) => format!("{n:016x}.pages"),
            FileName::Table(n) => format!("{n:016x}.table"),
            FileName::Manifest(n) => format!("{n:016x}.manifest"),
            FileName::Temporary(_, n) => format!("{n:016x}.tmp"),
        }
    }

    /// Parses the name of a file in `folder`. Returns `None` if the name is not that of a file of a store.
    #[must_use]
    pub fn parse(folder: Folder, name: &str) -> Option<Self> {
        let file = match (folder, name) {
            (Folder::Root, "STORE") => FileName::Store,
            (Folder::Root, "LOCK") => FileName::Lock,
            (Folder::Root, "READERS") => FileName::Readers,
            (Folder::Root, "ARCHIVE") => FileName::Archive,
            (Folder::Root, "UNFETCHED") => FileName::Unfetched,
            _ => {
                let (digits, extension) = name.split_once('.')?;
                let n = u64::from_str_radix(digits, 16).ok().filter(|n| *n <= NUMBER_MAX)?;
                match (folder, extension) {
                    (Folder::Log, "log") => FileName::Segment(n),
                    (Folder::Log, "spare") => FileName::Spare(n),
                    (Folder::Pages, "pages") => FileName::Pages(n),
                    (Folder::Pages, "spare") => FileName::ImageSpare(n),
                    (Folder::Pages, "table") => FileName::Table(n),
                    (Folder::Snapshots, "manifest") => FileName::Manifest(n),
                    (_, "tmp") => FileName::Temporary(folder, n),
                    _ => return None,
                }
            }
        };
        // Each file has exactly one spelling: reject upper-case digits and missing zeros.
        (file.name() == name).then_some(file)
    }
}

impl fmt::Display for FileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.folder() {
            Folder::Root => f.write_str(&self.name()),
            folder => write!(f, "{}/{}", folder.name(), self.name()),
        }
    }
}

/// Read access to the directory of a store. This crate reads stores only through this trait, so that a caller can
/// supply the files from disk, from memory or from a test.
pub trait ReadAt {
    /// Returns the names of all files in a folder, in any order. The list is empty if the folder does not exist.
    ///
    /// # Errors
    /// Returns an I/O error if the medium cannot be read.
    fn list(&self, folder: Folder) -> std::io::Result<Vec<String>>;

    /// Returns the length of a file in bytes, or `None` if the file does not exist.
    ///
    /// # Errors
    /// Returns an I/O error if the medium cannot be read.
    fn len(&self, file: FileName) -> std::io::Result<Option<u64>>;

    /// Fills `out` with the bytes of `file` that start at `offset`.
    ///
    /// # Errors
    /// Returns `UnexpectedEof` if the file ends before `out` is full, or an I/O error if the medium cannot be
    /// read.
    fn read_at(&self, file: FileName, offset: u64, out: &mut [u8]) -> std::io::Result<()>;

    /// Allocates a buffer of `len` bytes, into which a walk of the log reads. The contents are unspecified. An
    /// implementation can return memory with fewer page faults, such as huge pages.
    ///
    /// # Errors
    /// Returns `OutOfMemory` if there is not enough memory for a buffer of more than 64 KiB. For a shorter buffer, the
    /// process aborts.
    fn allocate(&self, len: usize) -> std::io::Result<Vec<u8>> {
        allocate(len)
    }
}

/// Allocations up to this length, in bytes, abort the process if they fail; longer ones return an error. A search skips
/// headers that cannot be read. If the allocation for a header returned an error, the search would skip a valid frame.
pub(crate) const NEVER_REFUSED_LEN: usize = 64 << 10;

/// Allocates a buffer with the global allocator.
pub(crate) fn allocate(len: usize) -> std::io::Result<Vec<u8>> {
    if len <= NEVER_REFUSED_LEN {
        return Ok(vec![0; len]);
    }
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len).map_err(|_| std::io::ErrorKind::OutOfMemory)?;
    bytes.resize(len, 0);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_names_round_trip_and_have_one_spelling() {
        for file in [
            FileName::Store,
            FileName::Lock,
            FileName::Readers,
            FileName::Archive,
            FileName::Unfetched,
            FileName::Segment(17),
            FileName::Spare(NUMBER_MAX),
            FileName::Pages(0),
            FileName::ImageSpare(9),
            FileName::Table(5),
            FileName::Manifest(0xabc),
            FileName::Temporary(Folder::Root, 1),
            FileName::Temporary(Folder::Log, 1),
        ] {
            assert_eq!(FileName::parse(file.folder(), &file.name()), Some(file));
        }
        for (folder, foreign) in [
            (Folder::Log, "1.log"),
            (Folder::Log, "000000000000000A.log"),
            (Folder::Log, "+00000000000000a.log"),
            (Folder::Log, "4000000000000001.log"),
            (Folder::Log, "0000000000000001.pages"),
            (Folder::Root, "0000000000000001.log"),
            (Folder::Pages, "STORE"),
        ] {
            assert_eq!(FileName::parse(folder, foreign), None, "{foreign}");
        }
    }
}
