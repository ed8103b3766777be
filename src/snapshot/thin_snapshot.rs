//! Snapshots on a full disk: pages that were deleted give their space back, though no image can be written.
//!
//! A snapshot writes an image of each page that changed. Without space for them, the images of deleted
//! pages would stay for good, because the newest snapshot names them. So a *thin* snapshot takes its
//! place first. It begins where the newest one begins, says which pages are gone since, and writes no
//! image: a few bytes a page, for which the reserve has space. The log goes on from where it was needed
//! before; replay leaves out what it says of those pages.
//!
//! It counts as the snapshot whose place it takes: were both kept, nothing would come back.
//!
//! A crash here leaves what a crash in the publication of any snapshot leaves.

use std::sync::Arc;

use remanent_format::manifest::{Manifest, ManifestKind, Tombstone};
use remanent_format::state::survey::{read_manifest, read_store};
use remanent_format::{FileName, Lsn, PageId, SnapshotId};

use super::Snapshots;
use super::bounds::{End, beginning};
use super::verify::WrittenSnapshot;
use crate::base::allocation::{append, collected};
use crate::catalog::{Catalog, LOOK_PAGES, Link, RetainedSnapshot};
use crate::disk::source::DiskSource;
use crate::error::Result;

impl Snapshots {
    /// Gives back the space that only deleted pages need. Returns whether any file went.
    pub(super) fn give_back(&self, catalog: &mut Catalog) -> Result<bool> {
        // If the image of an unloaded page turns out damaged, an older snapshot can stand in for it.
        if self.engine.applier.unloaded().is_any() {
            return Ok(false);
        }
        // The snapshot that it replaces goes only after it is verified (I7): `prune` sees to that.
        self.engine.log.pool.with_surplus(|| self.write_thin(catalog))?;
        let pruned = self.prune(catalog, &self.retention);
        self.catalog.tell(catalog);
        Ok(!pruned?.files.is_empty())
    }

    /// Publishes a snapshot that says which pages of the newest one are gone, if a file is there for them
    /// alone. Files hold many images, so without such a file it would give nothing back.
    fn write_thin(&self, catalog: &mut Catalog) -> Result<()> {
        // `None` if the chain of links would become too long.
        let Some((previous, previous_crc)) = catalog.known.newest_link() else { return Ok(()) };
        // A snapshot that a scrub found damaged is no place to begin at again.
        let newest = catalog.snapshots.get(&previous).filter(|kept| kept.is_sound);
        let Some(RetainedSnapshot { redo, info, .. }) = newest else { return Ok(()) };
        // Its `redo` stays: no image is written, so the log from there on is still needed.
        let (redo, newest_end, created_unix_ms) = (*redo, info.end, info.created_unix_ms);
        // A restore replaced everything since. The state before it is gone, and no snapshot reaches across.
        if catalog.tables.values().any(|table| table.restored_at > redo.lsn) {
            return Ok(());
        }
        let gone = self.gone(catalog)?;
        // It costs a manifest, and a link that replays follow: not for nothing.
        if !catalog.known.has_file_of(&gone) {
            return Ok(());
        }
        // After the look at the pages: if a page is deleted in between, replay from `redo` meets its delete.
        let end = self.end()?;
        let mut tombstones = self.tombstones_after(redo.lsn, previous, newest_end)?;
        // Any batch from the delete on will do: the page's number is never used again.
        append(&mut tombstones, gone.into_iter().map(|page| Tombstone { page, lsn: end.point.lsn }))?;
        tombstones.sort_unstable_by_key(|tombstone| tombstone.page);
        let End { point, root, next_page, epoch_high, .. } = end;
        // No file is taken for it.
        let next_file = catalog.files.next_number();
        let manifest = Manifest {
            kind: ManifestKind::Change { previous, previous_crc },
            store: self.engine.store,
            snapshot: SnapshotId(catalog.next_snapshot),
            name: None,
            // For retention it is as old as the snapshot whose place it takes.
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
        // From here on the number is taken, whatever happens: a name is never used for two contents.
        catalog.next_snapshot += 1;
        // As any snapshot's: the log is durable up to its end first (I7).
        let published = self.publish_all(None, &manifest, 1)?;
        let crc = published.header_crc;
        let (sums, before) =
            catalog.known.advance_by_change(&manifest, Link { manifest_crc: crc, ..link }, previous);
        // None of the images is its own.
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

    /// Finds the pages of the newest snapshot that were deleted.
    fn gone(&self, catalog: &Catalog) -> Result<Vec<PageId>> {
        let changed = self.engine.applier.turn(|turn| Ok(beginning(turn)?.changed))?;
        let mut gone = Vec::new();
        // Some at a time: a turn is a time in which no batch is applied.
        for pages in changed.chunks(LOOK_PAGES) {
            let (known, pages) = (catalog.known.clone(), Arc::new(pages.to_vec()));
            let looked_at = pages.clone();
            let standings = self
                .engine
                .applier
                .turn(move |turn| known.look(&mut turn.applied.table, None, &looked_at))?;
            let is_gone = pages.iter().zip(standings).filter(|(_, standing)| standing.is_gone());
            append(&mut gone, is_gone.map(|(page, _)| *page))?;
        }
        Ok(gone)
    }

    /// The tombstones that the newest snapshot has of pages deleted while it was taken. Replay from the
    /// same `redo` will meet batches of those pages again, and must know that they are gone.
    fn tombstones_after(&self, redo: Lsn, newest: SnapshotId, newest_end: Lsn) -> Result<Vec<Tombstone>> {
        // An exact snapshot was taken in one moment: no page was deleted meanwhile.
        if newest_end == redo {
            return Ok(Vec::new());
        }
        let source = DiskSource::new(self.engine.disk.clone());
        let store = read_store(&source)?;
        let (manifest, _) = read_manifest(&source, FileName::Manifest(newest.0), &store)?;
        collected(manifest.tombstones.into_iter().filter(|tombstone| tombstone.lsn > redo))
    }
}
