//! The directory of a store that this process has open.

use std::collections::BTreeSet;
use std::io;

use remanent_format::log::LogMap;
use remanent_format::state::survey::read_links;
use remanent_format::{Lsn, SnapshotId};

use super::files::invalid;
use super::snapshot::image_files;
use super::{ArchivedDirectory, read_store};
use crate::line::SnapshotParts;
use crate::object::BatchPoint;

impl ArchivedDirectory {
    /// Reads STORE again, to which an open may have added features.
    ///
    /// # Errors
    /// Returns the error of the disk.
    pub fn reload_store(&mut self) -> io::Result<()> {
        (self.store_file, self.survey.store) = read_store(&self.files)?;
        Ok(())
    }

    /// Records which batches were appended, and the opening that they follow. `proven` is the newest batch under a durable
    /// mark that is itself synced: no later open of the directory drops it (rule 7).
    ///
    /// # Errors
    /// Returns the error of the disk.
    pub fn advance(&mut self, proven: Lsn) -> io::Result<()> {
        self.survey.log = LogMap::read(&self.files, self.survey.store.store).map_err(invalid)?;
        // A walk to a proven batch needs no manifest, and those of a large store take much memory.
        self.survey.links.clear();
        self.log.advance(proven, &self.survey.log);
        Ok(())
    }

    /// Returns the parts of a snapshot that was published and verified since the directory was read. The caller holds the
    /// snapshot, and the log from its `redo` on (rule 13). `archived` is the last archived batch, as for
    /// [`newest_snapshot`](Self::newest_snapshot).
    ///
    /// # Errors
    /// Returns the error of the disk.
    pub fn snapshot(&mut self, id: SnapshotId, archived: &BatchPoint) -> io::Result<SnapshotParts> {
        self.survey.links = read_links(&self.files, &self.survey.store, &|_| None).map_err(invalid)?;
        let mut files = BTreeSet::new();
        for entry in self.survey.entries(id).map_err(invalid)? {
            files.extend(image_files(entry));
        }
        let follows_gap = !self.continues(archived)?;
        let parts = self.parts_of_snapshot(id, files, follows_gap, archived);
        self.survey.links.clear();
        parts
    }
}
