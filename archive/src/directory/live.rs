//! Reads the directory of a store that this process has open.

use std::collections::BTreeSet;
use std::io;

use remanent_format::log::LogMap;
use remanent_format::state::survey::read_links;
use remanent_format::{Lsn, SnapshotId};

use super::files::invalid;
use super::snapshot::image_files;
use super::{ArchivedDirectory, read_store};
use crate::line::SnapshotParts;
use crate::local::FilePiece;
use crate::object::BatchPoint;

impl ArchivedDirectory {
    /// Reads STORE again. An open of the store may have added features to the file since the last read.
    ///
    /// # Errors
    /// Returns an error if STORE cannot be read or is damaged.
    pub fn reload_store(&mut self) -> io::Result<()> {
        (self.store_file, self.survey.store) = read_store(&self.files)?;
        Ok(())
    }

    /// Reads the list of segments again, and permits archiving the log up to batch `proven`, the newest batch under a
    /// durable mark that is itself synced. No later open drops this batch (rule 7).
    ///
    /// # Errors
    /// Returns an error if the directory cannot be read.
    pub fn advance(&mut self, proven: Lsn) -> io::Result<()> {
        self.survey.log = LogMap::read(&self.files, self.survey.store.store).map_err(invalid)?;
        // Reading the log up to a proven batch needs no manifests, which use much memory in a large store.
        self.survey.links.clear();
        self.log.advance(proven, &self.survey.log);
        Ok(())
    }

    /// Returns a snapshot that was published and verified after the directory was read, and the pieces of its files,
    /// which must be uploaded as parts. After a gap, the snapshot already has all its parts, and there are no pieces.
    /// The caller must retain the snapshot and the log after its `redo` (rule 13). `archived` is the last archived
    /// batch; see [`newest_snapshot`](Self::newest_snapshot).
    ///
    /// # Errors
    /// Returns an error if the directory cannot be read.
    pub fn snapshot(
        &mut self,
        id: SnapshotId,
        archived: &BatchPoint,
    ) -> io::Result<(SnapshotParts, Vec<FilePiece>)> {
        self.survey.links = read_links(&self.files, &self.survey.store, &|_| None).map_err(invalid)?;
        let mut files = BTreeSet::new();
        for entry in self.survey.entries(id).map_err(invalid)? {
            files.extend(image_files(entry));
        }
        let follows_gap = !self.continues(archived)?;
        let pieces = self.pieces_of_snapshot(id, files, follows_gap, archived);
        self.survey.links.clear();
        pieces
    }

    /// Fills `out` with the bytes of a piece of a file, and returns their CRC-64.
    ///
    /// # Errors
    /// Returns the error of reading from the disk.
    pub fn read_piece(&self, piece: &FilePiece, out: &mut [u8]) -> io::Result<u64> {
        self.files.read_piece(piece, out)
    }
}
