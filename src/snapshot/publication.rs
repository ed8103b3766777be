//! Publication of a snapshot: builds the manifest, and renames the manifest to its final name once every file that the
//! manifest names is durable (I7).
//!
//! A crash before the rename leaves unreferenced image files. A crash after the rename leaves a snapshot that the next
//! open publishes and verifies again.

use std::collections::BTreeMap;

use remanent_format::manifest::{Manifest, ManifestEntry, ManifestKind, Tombstone};
use remanent_format::{LogPoint, Lsn, PageId, SnapshotId};

use super::Snapshots;
use super::bounds::End;
use crate::base::allocation::{append, collected};
use crate::base::parallel;
use crate::base::phases;
use crate::base::phases::Phase;
use crate::base::wall_clock::unix_ms;
use crate::catalog::publish::{PublishedFile, publish_unchecked};
use crate::catalog::{ImageTotals, KnownImages, Link, NewestSnapshot, SnapshotWork};
use crate::error::{Error, Result};
use crate::images::ImageWriters;
use crate::log::SpacePurpose;

/// The values from which a manifest is built.
pub(super) struct ManifestParts {
    pub snapshot: SnapshotId,
    pub name: Option<String>,
    pub redo: LogPoint,
    /// The entries of unchanged pages, and the pages that were gathered.
    pub sorted: SnapshotWork,
    pub gathered_entries: Vec<ManifestEntry>,
    pub end: End,
    pub next_file: u64,
    pub ahead_from: u64,
}

impl Snapshots {
    /// Builds the manifest from the entries of unchanged pages, the entries of gathered pages, and tombstones for pages
    /// deleted since the snapshot began.
    pub(super) fn manifest(&self, parts: ManifestParts) -> Result<Manifest> {
        let ManifestParts { snapshot, name, redo, sorted, gathered_entries, end, next_file, ahead_from } =
            parts;
        Ok(Manifest {
            kind: sorted.follows.map_or(ManifestKind::Base, |(previous, previous_crc)| {
                ManifestKind::Change { previous, previous_crc }
            }),
            store: self.engine.store,
            snapshot,
            name,
            created_unix_ms: unix_ms(),
            redo,
            end: end.point.lsn,
            next_page: end.next_page,
            epoch_high: end.epoch_high,
            next_file,
            ahead_from,
            tombstones: tombstones(&sorted, &gathered_entries, redo.lsn, &end.deleted)?,
            entries: in_order(sorted.entries, gathered_entries)?,
            root: end.root,
        })
    }

    /// Runs phases 4 and 5, then updates the catalog of known images to this snapshot. Returns the published file, the
    /// totals of the named images, and the previous links.
    ///
    /// If publication fails, the catalog remains unchanged, and the next snapshot follows the previous snapshot.
    pub(super) fn publish_newest(
        &self,
        known: &KnownImages,
        writers: Option<&ImageWriters>,
        manifest: &Manifest,
        follows: Option<(SnapshotId, u32)>,
        threads_max: usize,
    ) -> Result<(PublishedFile, (ImageTotals, Vec<SnapshotId>))> {
        let publish = || self.publish_all(writers, manifest, threads_max);
        let Some((previous, _)) = follows else {
            // If the manifest lists all pages, the catalog's representation of it is built while the file is written.
            let base = || NewestSnapshot::of_base(manifest);
            let (base, published) = if threads_max == 1 {
                let published = publish();
                (base(), published)
            } else {
                parallel::join(base, publish)
            };
            let published = published?;
            let named = known.advance_to_base(manifest, published.header_crc, base);
            return Ok((published, named));
        };
        let link = Link::of(manifest, 0)?;
        let published = publish()?;
        let link = Link { manifest_crc: published.header_crc, ..link };
        let named = known.advance_by_change(manifest, link, previous);
        Ok((published, named))
    }

    /// Runs phases 4 and 5 in the order that I7 requires.
    ///
    /// 1. **Sync** the image files and their directory entries. A manifest published earlier could name bytes that a
    ///    power cut removes.
    /// 2. **Wait** until the log is durable up to `end`, because images may contain batches up to `end`. If the
    ///    manifest were published earlier, a crash could lose the frames of those batches and leave pages in a state
    ///    that no prefix of the log produces.
    /// 3. **Publish** the manifest. After this rename, recovery starts from the new snapshot.
    pub(super) fn publish_all(
        &self,
        writers: Option<&ImageWriters>,
        manifest: &Manifest,
        threads_max: usize,
    ) -> Result<PublishedFile> {
        assert!(manifest.redo.lsn <= manifest.end); // I7: a replay from `redo` reaches `end`.
        writers.map_or(Ok(()), ImageWriters::sync)?;
        self.engine.log.wait_durable(manifest.end)?;
        assert!(manifest.end <= self.engine.log.durable()); // I7: the manifest's end is a durable mark (I4).
        self.publish_manifest(manifest, threads_max)
    }

    /// Publishes a manifest with up to `threads_max` threads. On a full disk, a manifest may use reserved log segments.
    pub(super) fn publish_manifest(&self, manifest: &Manifest, threads_max: usize) -> Result<PublishedFile> {
        let _phase = phases::enter(Phase::Publish);
        // A manifest without images is small and leads to freed space. Therefore it may use as much of the reserved
        // space as a seal.
        let purpose = if manifest.entries.is_empty() { SpacePurpose::Seal } else { SpacePurpose::User };
        let spare = |temporary, len| self.engine.log.make_small(temporary, len, purpose);
        loop {
            match publish_unchecked(&self.engine.disk, manifest, threads_max, &spare) {
                // Without the manifest, the images already written would be useless. One reserved segment may not
                // suffice for it.
                Err(Error::DiskFull { .. }) if self.engine.log.release_one(purpose)? => {}
                published => return published,
            }
        }
    }
}

/// Returns tombstones for pages that were deleted before they could be gathered. If the snapshot follows a previous
/// link, pages that were already deleted when the snapshot began get tombstones as well.
///
/// Without tombstones, replay would find batches of pages that have no entry, and the previous link would restore
/// deleted pages.
fn tombstones(
    sorted: &SnapshotWork,
    gathered_entries: &[ManifestEntry],
    redo: Lsn,
    deleted: &BTreeMap<PageId, Lsn>,
) -> Result<Vec<Tombstone>> {
    // Both lists ascend. Usually every page was gathered, so no lookup is needed.
    let mut gathered_entries = gathered_entries.iter().peekable();
    let all_are_gathered = gathered_entries.len() == sorted.gather.len();
    let mut is_gathered =
        |page| all_are_gathered || gathered_entries.next_if(|entry| entry.page == page).is_some();
    let missed = sorted.gather.iter().filter(|(page, _)| !is_gathered(*page));
    let missed = missed.map(|(page, _)| Tombstone {
        page: *page,
        lsn: *deleted.get(page).expect("a page that could not be gathered was deleted"),
    });
    // Replay begins after the deletion of these pages, so any Lsn up to `redo` is correct.
    let tombstoned = sorted.tombstoned.iter().filter(|_| sorted.follows.is_some());
    let tombstoned = tombstoned.map(|page| Tombstone { page: *page, lsn: redo });
    let mut tombstones = collected(missed.chain(tombstoned))?;
    tombstones.sort_unstable_by_key(|tombstone| tombstone.page);
    Ok(tombstones)
}

/// Merges the entries of unchanged and gathered pages in page order.
fn in_order(known: Vec<ManifestEntry>, gathered_entries: Vec<ManifestEntry>) -> Result<Vec<ManifestEntry>> {
    let mut entries = known;
    if entries.is_empty() {
        return Ok(gathered_entries);
    }
    append(&mut entries, gathered_entries)?;
    // No page is in both lists. A stable sort would allocate memory infallibly.
    entries.sort_unstable_by_key(|entry| entry.page);
    Ok(entries)
}
