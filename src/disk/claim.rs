//! The announcement of a writer in `LOCK`, which the next writer overwrites where no lock keeps it out.
//!
//! A writer describes itself there before it reads the log. The writer before it finds another description,
//! or another file of that name, when it looks next.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

use remanent_format::FileName;

use crate::base::closed_on_fork::ClosedOnFork;
use crate::error::{Error, Result};

/// The most bytes that are read of `LOCK`. A description is shorter, also with the longest name of a file.
const TEXT_LEN_MAX: usize = 1024;

/// A file's device and inode.
pub(super) type FileId = (u64, u64);

/// The announcement of a writer.
#[derive(Debug)]
pub(super) struct Claim {
    file: Arc<ClosedOnFork>,
    id: FileId,
    /// The bytes of the file.
    text: Vec<u8>,
}

impl Claim {
    /// The claim of the process that has just described itself in the file.
    pub fn of(file: Arc<ClosedOnFork>) -> io::Result<Self> {
        let metadata = file.file().metadata()?;
        let mut bytes = [0; TEXT_LEN_MAX];
        let text = content(file.file(), &mut bytes)?.to_vec();
        Ok(Self { id: (metadata.dev(), metadata.ino()), file, text })
    }

    /// Refuses a writer whose claim is not the newest one. `named` is the file that has the name now, which
    /// `open_named` opens.
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

/// The error of a writer that finds another one's description in this file, or no file.
pub(super) fn superseded(other: Option<&File>) -> Error {
    let holder = other.map(description).filter(|text| !text.is_empty());
    Error::Superseded { holder: holder.unwrap_or_else(|| "an unknown process".to_owned()), store: None }
}

/// The bytes of `LOCK`.
fn content<'b>(file: &File, bytes: &'b mut [u8; TEXT_LEN_MAX]) -> io::Result<&'b [u8]> {
    loop {
        match file.read_at(bytes, 0) {
            Ok(len) => return Ok(&bytes[..len]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// The first line of a writer's description of itself.
pub(super) fn description(file: &File) -> String {
    let mut bytes = [0; TEXT_LEN_MAX];
    let text = String::from_utf8_lossy(content(file, &mut bytes).unwrap_or_default());
    text.lines().next().unwrap_or("").chars().filter(|c| !c.is_control()).collect()
}
