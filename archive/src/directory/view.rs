//! A directory in which the engine opens a state of an archive, without the image files of the state.

use std::io;
use std::path::Path;

use super::files::StoreFiles;
use super::restore::RestoredState;

/// A directory for one view of an archive: STORE, the log, manifests and tables, without image files. Its owner removes
/// it after the view is closed.
#[derive(Debug)]
pub struct ViewDirectory {
    files: StoreFiles,
}

impl ViewDirectory {
    /// Names an existing directory that is empty. No other process may use it.
    #[must_use]
    pub fn new(path: &Path) -> Self {
        Self { files: StoreFiles::new(path) }
    }

    /// Removes the files of an earlier attempt, and begins again.
    pub(crate) fn begin(&self) -> io::Result<RestoredState<'_>> {
        let mut state = RestoredState::begin(&self.files, None)?;
        state.deferred = Some(Vec::new());
        Ok(state)
    }
}
