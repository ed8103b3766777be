//! The temporary directory in which the engine opens an archived state, without the image files of the state.

use std::io;
use std::path::Path;

use super::files::StoreFiles;
use super::part_writers::Durability;
use super::restore::RestoredState;

/// A directory for one view of an archive. It contains STORE, the log, manifests and tables, but no image files. The
/// owner removes the directory after the view is closed.
#[derive(Debug)]
pub struct ViewDirectory {
    files: StoreFiles,
}

impl ViewDirectory {
    /// Creates a handle to `path`, an existing empty directory that no other process uses.
    #[must_use]
    pub fn new(path: &Path) -> Self {
        Self { files: StoreFiles::new(path) }
    }

    /// Starts writing a state. Removes the files of an earlier attempt.
    pub(crate) fn begin(&self) -> io::Result<RestoredState<'_>> {
        let mut state = RestoredState::begin(&self.files, None, Durability::Temporary)?;
        state.deferred = Some(Vec::new());
        Ok(state)
    }
}
