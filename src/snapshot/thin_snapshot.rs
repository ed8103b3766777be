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
    /// Removes the files that only contain images of deleted pages. Returns whether any file was removed.
    pub(super) fn release_empty(&self, catalog: &mut Catalog) -> Result<bool> {
        // If the image of a page that is not loaded yet is damaged, the page is rebuilt from an older snapshot, so
        // nothing is removed.
        if self.engine.applier.unloaded().is_any() {
            return Ok(false);
        }
        // The replaced snapshot is removed only after this one is verified (I7), which `prune` ensures.
        self.engine.log.pool.with_surplus(|| self.write_thin(catalog))?;
        let pruned = self.prune(catalog, &self.retention);
        self.catalog.publish_copy(catalog);
        Ok(!pruned?.files.is_empty())
    }

    /// Publishes a thin snapshot if at least one file contains images of deleted pages only. Files contain many images,
    /// so without such a file the thin snapshot would free no space.
    fn write_thin(&self, catalog: &mut Catalog) -> Result<()> {
        // `None` if the chain of manifests is already at its maximum length.
        let Some((previous, previous_crc)) = catalog.known.newest_link() else { return Ok(()) };
        // A snapshot that a scrub found damaged is not a valid start.
        let newest = catalog.snapshots.get(&previous).filter(|kept| kept.is_sound);
        let Some(RetainedSnapshot { redo, info, .. }) = newest else { return Ok(()) };
        // `redo` is unchanged: no image is written, so the log after `redo` is still needed.
        let (redo, newest_end, created_unix_ms) = (*redo, info.end, info.created_unix_ms);
        // A restore after `redo` has replaced all pages, so the snapshot's images are not those of the current state.
        if catalog.tables.values().any(|table| table.restored_at > redo.lsn) {
            return Ok(());
        }
        let gone = self.deleted_pages(catalog)?;
        // The manifest costs space and makes every later open slower, so it must free at least one file.
        if !catalog.known.has_file_of(&gone) {
            return Ok(());
        }
        // The end is determined after the pages are classified. A page that is deleted in between is handled by replay,
        // which starts at `redo`.
        let end = self.end()?;
        let mut tombstones = self.tombstones_after(redo.lsn, previous, newest_end)?;
        // Any batch from the delete on is correct, because the page's number is never reused.
        append(&mut tombstones, gone.into_iter().map(|page| Tombstone { page, lsn: end.point.lsn }))?;
        tombstones.sort_unstable_by_key(|tombstone| tombstone.page);
        let End { point, root, next_page, epoch_high, .. } = end;
        // This snapshot writes no image file, so it takes no file number.
        let next_file = catalog.files.next_number();
        let manifest = Manifest {
            kind: ManifestKind::Change { previous, previous_crc },
            store: self.engine.store,
            snapshot: SnapshotId(catalog.next_snapshot),
            name: None,
            // The creation time is that of the replaced snapshot, so that retention treats both as equally old.
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
        // From here on, the number counts as used even after a failure, because a file name is never used for two
        // contents.
        catalog.next_snapshot += 1;
        // As for any snapshot, the log is first made durable up to its end (I7).
        let published = self.publish_all(None, &manifest, 1)?;
        let crc = published.header_crc;
        let (sums, before) =
            catalog.known.advance_by_change(&manifest, Link { manifest_crc: crc, ..link }, previous);
        // This snapshot wrote no image.
        let kept = RetainedSnapshot::new(&manifest, |_| false, sums, before, crc, false);
        let id = kept.info.id;
        tracing::info!(
            snapshot = %id, redo = %redo.lsn, end = %manifest.end, gone = manifest.tombstones.len(),
            "published a snapshot of deletions only, because the disk has no space for images"
        );
        self.unverified.push(WrittenSnapshot {
            snapshot: id,
            manifest: published,
            images: None,
            of_batches: Vec::new(),
            on_disk: Vec::new(),
        });
        catalog.snapshots.insert(id, kept);
        Ok(())
    }

    /// Returns the pages of the newest snapshot that have been deleted since.
    fn deleted_pages(&self, catalog: &Catalog) -> Result<Vec<PageId>> {
        let changed = self.engine.applier.turn(|turn| Ok(beginning(turn)?.changed))?;
        let mut gone = Vec::new();
        // The pages are processed in groups, because no batch is applied while the applier classifies a group.
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

    /// Returns the newest snapshot's tombstones, for pages that were deleted while that snapshot was taken. Replay from
    /// the same `redo` finds batches of those pages again and must skip them.
    fn tombstones_after(&self, redo: Lsn, newest: SnapshotId, newest_end: Lsn) -> Result<Vec<Tombstone>> {
        // An exact snapshot begins and ends at the same batch, so no page was deleted in between.
        if newest_end == redo {
            return Ok(Vec::new());
        }
        let source = DiskSource::new(self.engine.disk.clone());
        let store = read_store(&source)?;
        let (manifest, _) = read_manifest(&source, FileName::Manifest(newest.0), &store)?;
        collected(manifest.tombstones.into_iter().filter(|tombstone| tombstone.lsn > redo))
    }
}
