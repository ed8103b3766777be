//! Thin snapshots free the space of deleted pages on a full disk that has no space for images.
//!
//! A snapshot writes an image of each changed page. Without space for these images, the images of deleted pages would
//! remain forever, because the newest snapshot names them. Therefore a *thin* snapshot replaces the newest snapshot
//! first. The thin snapshot begins at the same point, lists the pages deleted since, and writes no images. Its manifest
//! takes a few bytes per page, for which the disk reserve has space. The log is kept from the same point as before.
//! Replay skips the records of the deleted pages.
//!
//! A crash here has the same effects as a crash during the publication of any snapshot.

use std::sync::Arc;

use remanent_format::manifest::{Manifest, ManifestKind, Tombstone};
use remanent_format::state::survey::{read_manifest, read_store};
use remanent_format::{FileName, Lsn, PageId, SnapshotId};

use super::Snapshots;
use super::bounds::{End, beginning};
use super::verify::WrittenSnapshot;
use crate::base::allocation::{append, collected};
use crate::catalog::{CLASSIFIED_AT_ONCE, Catalog, Link, RetainedSnapshot};
use crate::disk::source::DiskSource;
use crate::error::Result;

impl Snapshots {
    /// Removes the files that only deleted pages need. Returns whether any file was removed.
    pub(super) fn release_empty(&self, catalog: &mut Catalog) -> Result<bool> {
        // If the image of an unloaded page is damaged, an older snapshot can replace it.
        if self.engine.applier.unloaded().is_any() {
            return Ok(false);
        }
        // The replaced snapshot is removed only after this one is verified (I7); `prune` ensures that.
        self.engine.log.pool.with_surplus(|| self.write_thin(catalog))?;
        let pruned = self.prune(catalog, &self.retention);
        self.catalog.publish_copy(catalog);
        Ok(!pruned?.files.is_empty())
    }

    /// Publishes a thin snapshot if at least one file contains images of deleted pages only. Files contain many images,
    /// so without such a file the thin snapshot would free no space.
    fn write_thin(&self, catalog: &mut Catalog) -> Result<()> {
        // `None` if the chain of links would become too long.
        let Some((previous, previous_crc)) = catalog.known.newest_link() else { return Ok(()) };
        // A snapshot that a scrub found damaged is not a valid start.
        let newest = catalog.snapshots.get(&previous).filter(|kept| kept.is_sound);
        let Some(RetainedSnapshot { redo, info, .. }) = newest else { return Ok(()) };
        // `redo` is unchanged: no image is written, so the log after `redo` is still needed.
        let (redo, newest_end, created_unix_ms) = (*redo, info.end, info.created_unix_ms);
        // A restore replaced the whole state since. The state before it no longer exists, and no snapshot can span it.
        if catalog.tables.values().any(|table| table.restored_at > redo.lsn) {
            return Ok(());
        }
        let gone = self.deleted_pages(catalog)?;
        // A thin snapshot costs a manifest and a link that replays follow, so it must free space.
        if !catalog.known.has_file_of(&gone) {
            return Ok(());
        }
        // Determined after the pages are classified: if a page is deleted in between, replay from `redo` finds its
        // delete.
        let end = self.end()?;
        let mut tombstones = self.tombstones_after(redo.lsn, previous, newest_end)?;
        // Any batch from the delete on is correct, because the page's number is never reused.
        append(&mut tombstones, gone.into_iter().map(|page| Tombstone { page, lsn: end.point.lsn }))?;
        tombstones.sort_unstable_by_key(|tombstone| tombstone.page);
        let End { point, root, next_page, epoch_high, .. } = end;
        // The snapshot takes no file number.
        let next_file = catalog.files.next_number();
        let manifest = Manifest {
            kind: ManifestKind::Change { previous, previous_crc },
            store: self.engine.store,
            snapshot: SnapshotId(catalog.next_snapshot),
            name: None,
            // Retention treats this snapshot as being as old as the one that it replaces.
            created_unix_ms,
            redo,
            end: point.lsn,
            next_page,
            epoch_high,
            next_file,
            ahead_from: catalog.files.ahead_from(redo.lsn),
            tombstones,
            entries: Vec::new(),
            root,
        };
        let link = Link::of(&manifest, 0)?;
        self.record_named(catalog)?;
        // From here on the number is used even after a failure, because a file name never has two contents.
        catalog.next_snapshot += 1;
        // As for any snapshot, the log is first made durable up to its end (I7).
        let published = self.publish_all(None, &manifest, 1)?;
        let crc = published.header_crc;
        let (sums, before) =
            catalog.known.advance_by_change(&manifest, Link { manifest_crc: crc, ..link }, previous);
        // None of the images was written for this snapshot.
        let kept = RetainedSnapshot::new(&manifest, |_| false, sums, before, crc, false);
        let id = kept.info.id;
        tracing::info!(
            snapshot = %id, redo = %redo.lsn, end = %manifest.end, gone = manifest.tombstones.len(),
            "no space for images: a snapshot says what was deleted"
        );
        self.unverified.push(WrittenSnapshot {
            snapshot: id,
            manifest: published,
            images: None,
            on_disk: Vec::new(),
        });
        catalog.snapshots.insert(id, kept);
        Ok(())
    }

    /// Returns the pages of the newest snapshot that have been deleted since.
    fn deleted_pages(&self, catalog: &Catalog) -> Result<Vec<PageId>> {
        let changed = self.engine.applier.turn(|turn| Ok(beginning(turn)?.changed))?;
        let mut gone = Vec::new();
        // The pages are processed in portions, because no batch is applied during a turn.
        for pages in changed.chunks(CLASSIFIED_AT_ONCE) {
            let (known, pages) = (catalog.known.clone(), Arc::new(pages.to_vec()));
            let looked_at = pages.clone();
            let classes = self
                .engine
                .applier
                .turn(move |turn| known.classify(&mut turn.applied.table, None, &looked_at))?;
            let is_gone = pages.iter().zip(classes).filter(|(_, class)| class.is_gone());
            append(&mut gone, is_gone.map(|(page, _)| *page))?;
        }
        Ok(gone)
    }

    /// Returns the tombstones of the newest snapshot for pages that were deleted while the snapshot was taken. Replay
    /// from the same `redo` finds batches of those pages again and must be able to skip them.
    fn tombstones_after(&self, redo: Lsn, newest: SnapshotId, newest_end: Lsn) -> Result<Vec<Tombstone>> {
        // An exact snapshot was taken at a single moment, so no page was deleted in between.
        if newest_end == redo {
            return Ok(Vec::new());
        }
        let source = DiskSource::new(self.engine.disk.clone());
        let store = read_store(&source)?;
        let (manifest, _) = read_manifest(&source, FileName::Manifest(newest.0), &store)?;
        collected(manifest.tombstones.into_iter().filter(|tombstone| tombstone.lsn > redo))
    }
}
