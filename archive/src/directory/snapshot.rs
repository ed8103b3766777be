//! Reads a snapshot as parts of its files (rules 10 and 28).

use std::collections::BTreeSet;
use std::io;

use remanent_format::judge::ImageProofs;
use remanent_format::manifest::ManifestEntry;
use remanent_format::state::reach::Role as StartRole;
use remanent_format::{Damage, SnapshotId};

use super::ArchivedDirectory;
use super::files::invalid;
use crate::line::SnapshotParts;
use crate::local::FilePiece;
use crate::object::{BatchPoint, Manifest, Part};

/// Returns the numbers of the image files that contain a page.
pub(super) fn image_files(entry: &ManifestEntry) -> impl Iterator<Item = u64> {
    entry.image.into_iter().flat_map(|image| image.files()).map(|(file, _)| file)
}

impl ArchivedDirectory {
    /// Returns the newest snapshot from which replay can start, with the parts of all its files. `archived` is the last
    /// archived batch. If the log after this batch was recycled, the result includes the frames that the snapshot
    /// needs.
    ///
    /// Verifies every image first. If an image is damaged, skips the snapshot and adds the damage to `damaged`. Returns
    /// `None` if there is no snapshot, or if the archive contains it already. `newest` is the newest manifest of the
    /// archive.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be read.
    pub fn newest_snapshot(
        &mut self,
        archived: &BatchPoint,
        newest: Option<&Manifest>,
        damaged: &mut Vec<Damage>,
    ) -> io::Result<Option<SnapshotParts>> {
        let follows_gap = !self.continues(archived)?;
        let is_start = |id: &SnapshotId| self.log.reach.role(*id) == StartRole::Start;
        let snapshots: Vec<SnapshotId> = self.survey.links.keys().rev().copied().filter(is_start).collect();
        for id in snapshots {
            if !follows_gap && newest.is_some_and(|newest| self.is_archived(id, newest)) {
                return Ok(None);
            }
            match self.files_of(id)? {
                Ok(files) => {
                    let (mut snapshot, pieces) = self.pieces_of_snapshot(id, files, follows_gap, archived)?;
                    snapshot.parts.extend(self.files.parts_of(&pieces)?);
                    return Ok(Some(snapshot));
                }
                Err(damage) => damaged.push(damage),
            }
        }
        Ok(None)
    }

    /// Returns true if the archive contains the snapshot `id` or a newer state.
    fn is_archived(&self, id: SnapshotId, newest: &Manifest) -> bool {
        let Some(Ok((link, _))) = self.survey.links.get(&id) else { return false };
        let is_same = id == newest.snapshot
            && (link.redo.lsn, link.redo.chain, link.end)
                == (newest.redo.lsn, newest.redo.chain, newest.end.lsn);
        is_same || link.redo.lsn < newest.redo.lsn || newest.follows_gap && link.redo.lsn < newest.end.lsn
    }

    /// Verifies the images of a snapshot. Returns the numbers of its image files, or the damage that it finds.
    pub(super) fn files_of(&self, id: SnapshotId) -> io::Result<Result<BTreeSet<u64>, Damage>> {
        let mut proofs = ImageProofs::new(&self.files);
        let mut files = BTreeSet::new();
        let entries = match self.survey.entries(id) {
            Ok(entries) => entries,
            Err(damage) => return Ok(Err(damage)),
        };
        for entry in entries {
            if let Some(damage) = proofs.check(entry.lsn, entry.image, entry.len) {
                if damage.defect.is_unreadable() {
                    return Err(invalid(damage));
                }
                return Ok(Err(damage));
            }
            files.extend(image_files(entry));
        }
        Ok(Ok(files))
    }

    /// Returns a snapshot and the pieces of its files. The snapshot has no parts until the caller has uploaded the
    /// pieces. After a gap, the snapshot has all its parts, and there are no pieces.
    pub(super) fn pieces_of_snapshot(
        &mut self,
        id: SnapshotId,
        files: BTreeSet<u64>,
        follows_gap: bool,
        archived: &BatchPoint,
    ) -> io::Result<(SnapshotParts, Vec<FilePiece>)> {
        let chain = self.survey.chain(id).map_err(invalid)?;
        let (redo, end) =
            chain.first().map(|link| (link.redo, link.end)).ok_or_else(|| invalid("no link"))?;
        let links: Vec<u64> = chain.iter().map(|link| link.snapshot.0).collect();
        let mut pieces = self.files.pieces_of_all(links, files)?;
        let mut parts = Vec::new();
        let end_point = if follows_gap {
            parts = self.files.parts_of(&std::mem::take(&mut pieces))?;
            let (of_log, end_point) = self.gap_parts(redo, end)?;
            let listed: BTreeSet<Part> = parts.iter().copied().collect();
            parts.extend(of_log.into_iter().filter(|part| !listed.contains(part)));
            end_point
        } else {
            let found = self.point_at(end)?;
            found.ok_or_else(|| {
                invalid(format!("the log does not contain lsn {end}, the end of snapshot {id}"))
            })?
        };
        self.log.push(end_point);
        let (redo, end) = (self.batch_point(redo), self.batch_point(end_point));
        if follows_gap {
            self.record_batches(&[*archived, end])?;
        }
        Ok((SnapshotParts { snapshot: id, redo, end, parts, follows_gap }, pieces))
    }
}
