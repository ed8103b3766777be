//! The publication of a snapshot: its manifest is put together, and gets its name once all that it names is
//! durable (I7).
//!
//! A crash before the rename leaves image files that nothing names; after it, a snapshot that the next open
//! publishes and verifies again.

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

impl Snapshots {
    /// Puts the manifest together: entries that were known before, those that were gathered, and
    /// tombstones of pages that were deleted meanwhile.
    #[expect(clippy::too_many_arguments, reason = "a manifest says all of this, and is put together once")]
    pub(super) fn manifest(
        &self,
        number: u64,
        name: Option<String>,
        redo: LogPoint,
        sorted: SnapshotWork,
        caught: Vec<ManifestEntry>,
        end: End,
        next_file: u64,
        ahead_from: u64,
    ) -> Result<Manifest> {
        Ok(Manifest {
            kind: sorted.follows.map_or(ManifestKind::Base, |(previous, previous_crc)| {
                ManifestKind::Change { previous, previous_crc }
            }),
            store: self.engine.store,
            snapshot: SnapshotId(number),
            name,
            created_unix_ms: unix_ms(),
            redo,
            end: end.point.lsn,
            next_page: end.next_page,
            epoch_high: end.epoch_high,
            next_file,
            ahead_from,
            tombstones: tombstones(&sorted, &caught, redo.lsn, &end.deleted)?,
            entries: in_order(sorted.entries, caught)?,
            root: end.root,
        })
    }

    /// Phases 4 and 5, after which the catalog of known images goes on to this snapshot. Returns what it
    /// names, together, and the links before it.
    ///
    /// The known images go on only once it is published: after a failure the next snapshot follows the
    /// one before.
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
            // It names all pages: its form in memory is made while it is written.
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

    /// Phases 4 and 5: I7, step by step.
    ///
    /// 1. **Sync** the image files and their names. A manifest that is published before could name bytes
    ///    that a power cut takes away.
    /// 2. **Wait** until the log is durable up to `end`. An image may hold batches up to there: published
    ///    before, a crash could lose their frames, and leave pages of a state that no prefix of the log
    ///    has.
    /// 3. **Publish** the manifest. From this rename on a crash starts from here.
    pub(super) fn publish_all(
        &self,
        writers: Option<&ImageWriters>,
        manifest: &Manifest,
        threads_max: usize,
    ) -> Result<PublishedFile> {
        assert!(manifest.redo.lsn <= manifest.end); // I7: a replay from `redo` comes to `end`.
        writers.map_or(Ok(()), ImageWriters::sync)?;
        self.engine.log.wait_durable(manifest.end)?;
        assert!(manifest.end <= self.engine.log.durable()); // I7: the manifest's end is a mark (I4).
        self.publish_manifest(manifest, threads_max)
    }

    /// Publishes a manifest, by up to `threads_max` threads. On a full disk it may use the reserve.
    pub(super) fn publish_manifest(&self, manifest: &Manifest, threads_max: usize) -> Result<PublishedFile> {
        let _phase = phases::enter(Phase::Publish);
        // A manifest without images takes little, and gives back what deleted pages took. So it may go
        // deeper into the reserve, as a seal may.
        let purpose = if manifest.entries.is_empty() { SpacePurpose::Seal } else { SpacePurpose::User };
        let spare = |temporary, len| self.engine.log.make_small(temporary, len, purpose);
        loop {
            match publish_unchecked(&self.engine.disk, manifest, threads_max, &spare) {
                // Without it the images would have been written for nothing. One spare may be too little for
                // one that is longer than a spare.
                Err(Error::DiskFull { .. }) if self.engine.log.release_one(purpose)? => {}
                published => return published,
            }
        }
    }
}

/// The pages that were to be gathered and were deleted before they could be; and, in a change, those that
/// were gone when it began. Without tombstones, replay would meet batches of pages that no entry has, and
/// the link before would bring others back.
fn tombstones(
    sorted: &SnapshotWork,
    caught: &[ManifestEntry],
    redo: Lsn,
    deleted: &BTreeMap<PageId, Lsn>,
) -> Result<Vec<Tombstone>> {
    // Both lists ascend. Mostly all pages are caught, and none has to be looked for.
    let mut caught = caught.iter().peekable();
    let all_are_caught = caught.len() == sorted.gather.len();
    let mut is_caught = |page| all_are_caught || caught.next_if(|entry| entry.page == page).is_some();
    let missed = sorted.gather.iter().filter(|(page, _)| !is_caught(*page));
    let missed = missed.map(|(page, _)| Tombstone {
        page: *page,
        lsn: *deleted.get(page).expect("a page that could not be gathered was deleted"),
    });
    // Replay begins after their deletion, so any Lsn up to `redo` will do.
    let gone = sorted.gone.iter().filter(|_| sorted.follows.is_some());
    let gone = gone.map(|page| Tombstone { page: *page, lsn: redo });
    let mut tombstones = collected(missed.chain(gone))?;
    tombstones.sort_unstable_by_key(|tombstone| tombstone.page);
    Ok(tombstones)
}

/// All entries in the order of their pages: those with known images, and those that were gathered.
fn in_order(known: Vec<ManifestEntry>, caught: Vec<ManifestEntry>) -> Result<Vec<ManifestEntry>> {
    let mut entries = known;
    if entries.is_empty() {
        return Ok(caught);
    }
    append(&mut entries, caught)?;
    // No page is among both. (A stable sort takes memory that cannot be refused.)
    entries.sort_unstable_by_key(|entry| entry.page);
    Ok(entries)
}
