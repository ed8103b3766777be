//! The claim of a writer in `LOCK`, which the next writer overwrites if no lock keeps it out.
//!
//! A writer writes its description there before it reads the log. An earlier writer then finds a different
//! description, or a different file under that name, at its next check.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

use remanent_format::FileName;

use crate::base::closed_on_fork::ClosedOnFork;
use crate::error::{Error, Result};

/// The maximum number of bytes read from `LOCK`. A description is shorter, even with the longest file name.
const TEXT_LEN_MAX: usize = 1024;

/// A file's device and inode.
pub(super) type FileId = (u64, u64);

/// The claim of a writer.
#[derive(Debug)]
pub(super) struct Claim {
    file: Arc<ClosedOnFork>,
    id: FileId,
    /// The bytes of the file.
    text: Vec<u8>,
}

impl Claim {
    /// Creates the claim of this process, which has just written its description to the file.
    pub fn of(file: Arc<ClosedOnFork>) -> io::Result<Self> {
        let metadata = file.file().metadata()?;
        let mut bytes = [0; TEXT_LEN_MAX];
        let text = content(file.file(), &mut bytes)?.to_vec();
        Ok(Self { id: (metadata.dev(), metadata.ino()), file, text })
    }

    /// Fails if this claim is no longer the newest one. `named` is the file that has the name now;
    /// `open_named` opens it.
    pub fn check(&self, named: FileId, open_named: impl FnOnce() -> io::Result<File>) -> Result<()> {
        if named != self.id {
            return Err(superseded(open_named().ok().as_ref()));
        }
        let mut bytes = [0; TEXT_LEN_MAX];
        let found = content(self.file.file(), &mut bytes)
            .map_err(|source| Error::io("read", FileName::Lock, None, source))?;
        if found == self.text { Ok(()) } else { Err(superseded(Some(self.file.file()))) }
    }
}

/// Returns the error for a writer that finds another writer's description in this file, or no file.
pub(super) fn superseded(other: Option<&File>) -> Error {
    let holder = other.map(description).filter(|text| !text.is_empty());
    Error::Superseded { holder: holder.unwrap_or_else(|| "an unknown process".to_owned()), store: None }
}

/// Reads the bytes of `LOCK`.
fn content<'b>(file: &File, bytes: &'b mut [u8; TEXT_LEN_MAX]) -> io::Result<&'b [u8]> {
    loop {
        match file.read_at(bytes, 0) {
            Ok(len) => return Ok(&bytes[..len]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Returns the first line of a writer's description.
pub(super) fn description(file: &File) -> String {
    let mut bytes = [0; TEXT_LEN_MAX];
    let text = String::from_utf8_lossy(content(file, &mut bytes).unwrap_or_default());
    text.lines().next().unwrap_or("").chars().filter(|c| !c.is_control()).collect()
}
