//! Reads the named snapshots of a directory, and determines which names were given up (rule 17).

use std::collections::BTreeSet;
use std::io;

use remanent_format::state::reach::Role as StartRole;
use remanent_format::state::survey::read_links;
use remanent_format::{Damage, SnapshotId};

use super::ArchivedDirectory;
use super::files::invalid;
use super::record::ArchiveRecord;
use super::snapshot::image_files;
use crate::line::NamedParts;
use crate::local::FilePiece;
use crate::object::KeptSnapshot;

/// The differences between the named snapshots of a directory and of its archive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NameChanges {
    /// Snapshots that the archive keeps, and whose names were given up in the directory.
    pub given_up: Vec<SnapshotId>,
    /// Snapshots that both the directory and the archive contain.
    pub common: Vec<SnapshotId>,
}

impl ArchivedDirectory {
    /// Returns the named snapshots that are newer than `newest`, oldest first, with the parts of all their files.
    /// `newest` is the newest named snapshot in the archive, or `None` if it has none.
    ///
    /// Verifies every image first. If an image is damaged, skips the snapshot and adds the damage to `damaged`.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be read.
    pub fn new_named(
        &self,
        newest: Option<SnapshotId>,
        damaged: &mut Vec<Damage>,
    ) -> io::Result<Vec<NamedParts>> {
        let mut found = Vec::new();
        for id in self.named_ids().filter(|id| newest.is_none_or(|newest| *id > newest)) {
            match self.files_of(id)? {
                Ok(files) => {
                    let (mut named, pieces) = self.named_pieces(id, files)?;
                    named.parts = self.files.parts_of(&pieces)?;
                    found.push(named);
                }
                Err(damage) => damaged.push(damage),
            }
        }
        Ok(found)
    }

    /// Compares the named snapshots of a closed store with those of the archive.
    #[must_use]
    pub fn name_changes(&self, catalog: &[KeptSnapshot]) -> NameChanges {
        let named: BTreeSet<SnapshotId> = self.named_ids().collect();
        self.name_changes_of(catalog, !self.has_lost_snapshots(), |kept| named.contains(&kept.snapshot))
    }

    /// Returns true if the manifest of a snapshot of the closed store is damaged.
    pub(crate) fn has_lost_snapshots(&self) -> bool {
        self.survey.links.values().any(Result::is_err)
    }

    /// Compares the named snapshots of the directory with those of the archive. `has` returns whether the directory
    /// contains a snapshot. `is_complete` states that the directory has currently lost no snapshot. A name counts as
    /// given up only if `is_complete` is true, and if the directory earlier contained the snapshot and has not recorded
    /// it as lost.
    #[must_use]
    pub fn name_changes_of(
        &self,
        catalog: &[KeptSnapshot],
        is_complete: bool,
        has: impl Fn(&KeptSnapshot) -> bool,
    ) -> NameChanges {
        let known: BTreeSet<SnapshotId> = self.record.borrow().named.iter().copied().collect();
        let (common, lacking): (Vec<_>, Vec<_>) = catalog.iter().partition(|kept| has(kept));
        let lacking = lacking.into_iter().filter(|kept| is_complete && known.contains(&kept.snapshot));
        NameChanges {
            given_up: lacking.map(|kept| kept.snapshot).collect(),
            common: common.into_iter().map(|kept| kept.snapshot).collect(),
        }
    }

    /// Records in ARCHIVE which named snapshots of the archive the directory contains, which it contained until their
    /// names were given up, and which it has lost. `common` lists the snapshots that it contains. If `has_lost` is
    /// true, each snapshot that it contained and no longer contains counts as lost. Without this record, the directory
    /// appears never to have contained a snapshot that it lacks (rule 5). Returns after the record is durable.
    ///
    /// # Errors
    /// Returns an error if the record cannot be written.
    pub fn record_names(
        &self,
        catalog: &[KeptSnapshot],
        common: &[SnapshotId],
        has_lost: bool,
    ) -> io::Result<()> {
        let mut record = self.record.borrow_mut();
        let (mut named, mut lost) = (Vec::new(), Vec::new());
        for id in catalog.iter().map(|kept| kept.snapshot) {
            let was_named = record.named.contains(&id);
            if common.contains(&id) || (was_named && !has_lost) {
                named.push(id);
            } else if was_named || record.lost.contains(&id) {
                lost.push(id);
            }
        }
        if record.named == named && record.lost == lost {
            return Ok(());
        }
        let new = ArchiveRecord { named, lost, ..record.clone() };
        new.publish(&self.files)?;
        *record = new;
        Ok(())
    }

    /// Records a named snapshot before it is added to the catalog of the archive. Returns after the record is durable.
    ///
    /// # Errors
    /// Returns an error if the record cannot be written.
    pub fn record_name_ahead(&self, snapshot: SnapshotId) -> io::Result<()> {
        let mut record = self.record.borrow_mut();
        if record.named.contains(&snapshot) {
            return Ok(());
        }
        let mut new = record.clone();
        new.named.push(snapshot);
        new.publish(&self.files)?;
        *record = new;
        Ok(())
    }

    /// Returns a named snapshot that was published and verified after the directory was read, and the pieces of its
    /// files, which must be uploaded as parts. [`read_piece`](Self::read_piece) reads them. The caller must retain the
    /// snapshot (rule 13).
    ///
    /// # Errors
    /// Returns an error if the directory cannot be read.
    pub fn named_snapshot(&mut self, id: SnapshotId) -> io::Result<(NamedParts, Vec<FilePiece>)> {
        self.survey.links = read_links(&self.files, &self.survey.store, &|_| None).map_err(invalid)?;
        let files =
            self.survey.entries(id).map_err(invalid).map(|entries| entries.flat_map(image_files).collect());
        let pieces = files.and_then(|files| self.named_pieces(id, files));
        self.survey.links.clear();
        pieces
    }

    /// Returns the named snapshots that can be archived, oldest first: those that need no replay and whose manifests
    /// are not merely links of other snapshots.
    fn named_ids(&self) -> impl Iterator<Item = SnapshotId> {
        let links = self.survey.readable();
        let is_kept = |id| self.log.reach.role(id) != StartRole::Link;
        let named = links.filter(|link| link.name.is_some() && link.redo.lsn == link.end);
        named.map(|link| link.snapshot).filter(move |id| is_kept(*id))
    }

    fn named_pieces(&self, id: SnapshotId, files: BTreeSet<u64>) -> io::Result<(NamedParts, Vec<FilePiece>)> {
        let chain = self.survey.chain(id).map_err(invalid)?;
        let link = chain.first().ok_or_else(|| invalid("no link"))?;
        let name = link.name.clone().filter(|_| link.redo.lsn == link.end);
        let name = name.ok_or_else(|| invalid(format!("snapshot {id} has no name or needs replay")))?;
        let pieces = self.files.pieces_of_all(chain.iter().map(|link| link.snapshot.0), files)?;
        let batch = self.batch_point(link.redo);
        Ok((NamedParts { snapshot: id, name, batch, parts: Vec::new() }, pieces))
    }
}
