//! The files of a store and their names.

use std::fmt;

use crate::limits::NUMBER_MAX;

/// A folder of a store directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Folder {
    /// The store directory itself.
    Root,
    /// The folder of log segments.
    Log,
    /// The folder of images and tables.
    Pages,
    /// The folder of manifests.
    Snapshots,
}

impl Folder {
    /// The folders below the store directory.
    pub const INNER: [Folder; 3] = [Folder::Log, Folder::Pages, Folder::Snapshots];

    /// The folder's name within the store directory; empty for the directory itself.
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

/// A file of a store. Numbers are sixteen hexadecimal digits in the name, so that names sort.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FileName {
    /// `STORE`: the store's identity.
    Store,
    /// `LOCK`: held while the store is open.
    Lock,
    /// `READERS`: each reader locks the byte of the snapshot that it needs; the content means nothing.
    Readers,
    /// `log/<n>.log`: a segment of the log.
    Segment(u64),
    /// `log/<n>.spare`: a segment file waiting to be used.
    Spare(u64),
    /// `pages/<n>.pages`: a file of images.
    Pages(u64),
    /// `pages/<n>.spare`: an image file waiting to be written again.
    ImageSpare(u64),
    /// `pages/<n>.table`: the table of an old state that a restore record names.
    Table(u64),
    /// `snapshots/<n>.manifest`: the pages and images of snapshot n.
    Manifest(u64),
    /// `<folder>/<n>.tmp`: being built; left over after a crash.
    Temporary(Folder, u64),
}

impl FileName {
    /// The folder in which the file lies.
    #[must_use]
    pub const fn folder(self) -> Folder {
        match self {
            FileName::Store | FileName::Lock | FileName::Readers => Folder::Root,
            FileName::Segment(_) | FileName::Spare(_) => Folder::Log,
            FileName::Pages(_) | FileName::ImageSpare(_) | FileName::Table(_) => Folder::Pages,
            FileName::Manifest(_) => Folder::Snapshots,
            FileName::Temporary(folder, _) => folder,
        }
    }

    /// The file's name within its folder.
    #[must_use]
    pub fn name(self) -> String {
        match self {
            FileName::Store => "STORE".to_owned(),
            FileName::Lock => "LOCK".to_owned(),
            FileName::Readers => "READERS".to_owned(),
            FileName::Segment(n) => format!("{n:016x}.log"),
            FileName::Spare(n) | FileName::ImageSpare(n) => format!("{n:016x}.spare"),
            FileName::Pages(n) => format!("{n:016x}.pages"),
            FileName::Table(n) => format!("{n:016x}.table"),
            FileName::Manifest(n) => format!("{n:016x}.manifest"),
            FileName::Temporary(_, n) => format!("{n:016x}.tmp"),
        }
    }

    /// The file of that name in that folder; `None` if the name is not one of ours.
    #[must_use]
    pub fn parse(folder: Folder, name: &str) -> Option<Self> {
        let file = match (folder, name) {
            (Folder::Root, "STORE") => FileName::Store,
            (Folder::Root, "LOCK") => FileName::Lock,
            (Folder::Root, "READERS") => FileName::Readers,
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
        // Exactly one spelling a file: no upper case, no missing zeros.
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

/// Read access to a store directory: all that decoding needs of the outside world.
pub trait ReadAt {
    /// The names in a folder, in any order; empty if the folder does not exist.
    ///
    /// # Errors
    /// Any error of the medium.
    fn list(&self, folder: Folder) -> std::io::Result<Vec<String>>;

    /// A file's length in bytes; `None` if there is no such file.
    ///
    /// # Errors
    /// Any error of the medium.
    fn len(&self, file: FileName) -> std::io::Result<Option<u64>>;

    /// Fills `out` from `offset`.
    ///
    /// # Errors
    /// `UnexpectedEof` if the file ends before; else any error of the medium.
    fn read_at(&self, file: FileName, offset: u64, out: &mut [u8]) -> std::io::Result<()>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back_and_have_one_spelling() {
        for file in [
            FileName::Store,
            FileName::Lock,
            FileName::Readers,
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
