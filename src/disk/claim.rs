//! The claim of a writer: a description of the writer in `LOCK`. Where locks do not work, the claim shows an earlier
//! writer that another writer has opened the store.
//!
//! A writer writes its description to `LOCK` before it reads the log, over the description of the previous writer. At
//! its next check, the previous writer therefore finds a different description, or a different file named `LOCK`.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

use remanent_format::FileName;

use crate::base::closed_on_fork::ClosedOnFork;
use crate::error::{Error, IoAction, Result};

/// The maximum number of bytes read from `LOCK`. Every description is shorter, even with the longest possible file
/// name.
const TEXT_LEN_MAX: usize = 1024;

/// The device number and the inode number of a file.
pub(super) type FileId = (u64, u64);

/// The claim of this process to be the newest writer of the store.
#[derive(Debug)]
pub(super) struct Claim {
    file: Arc<ClosedOnFork>,
    id: FileId,
    /// The content of `LOCK` after this writer wrote its description.
    text: Vec<u8>,
}

impl Claim {
    /// Creates the claim of this process, after the process has written its description to `file`.
    pub fn of(file: Arc<ClosedOnFork>) -> io::Result<Self> {
        let metadata = file.file().metadata()?;
        let mut bytes = [0; TEXT_LEN_MAX];
        let text = content(file.file(), &mut bytes)?.to_vec();
        Ok(Self { id: (metadata.dev(), metadata.ino()), file, text })
    }

    /// Returns an error if another writer has claimed the store after this claim. `named` identifies the file that
    /// currently has the name `LOCK`, and `open_named` opens that file.
    pub fn check(&self, named: FileId, open_named: impl FnOnce() -> io::Result<File>) -> Result<()> {
        if named != self.id {
            return Err(superseded(open_named().ok().as_ref()));
        }
        let mut bytes = [0; TEXT_LEN_MAX];
        let found = content(self.file.file(), &mut bytes)
            .map_err(|source| Error::io(IoAction::Read, FileName::Lock, None, source))?;
        if found == self.text { Ok(()) } else { Err(superseded(Some(self.file.file()))) }
    }
}

/// Returns the error for a writer that is no longer the newest. `other` is the current `LOCK` file, if any.
pub(super) fn superseded(other: Option<&File>) -> Error {
    let holder = other.map(description).filter(|text| !text.is_empty());
    Error::Superseded { holder: holder.unwrap_or_else(|| "an unknown process".to_owned()), store: None }
}

fn content<'b>(file: &File, bytes: &'b mut [u8; TEXT_LEN_MAX]) -> io::Result<&'b [u8]> {
    loop {
        match file.read_at(bytes, 0) {
            Ok(len) => return Ok(&bytes[..len]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Returns the first line of `LOCK`, the description of the writer.
pub(super) fn description(file: &File) -> String {
    let mut bytes = [0; TEXT_LEN_MAX];
    let text = String::from_utf8_lossy(content(file, &mut bytes).unwrap_or_default());
    text.lines().next().unwrap_or("").chars().filter(|c| !c.is_control()).collect()
}
