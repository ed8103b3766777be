//! Builds the catalog of an open: snapshots, tables of restored states, the files that they need, and the images that
//! need not be written again. Loading pages does not depend on the catalog, so it is built concurrently.
//!
//! Building the catalog changes nothing on disk. Unneeded files are removed only after the new incarnation has begun.
//! If they were removed earlier, an open that fails would have modified the store, and a crash could leave less data
//! than recovery needs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use remanent_format::frame::VerifiedSnapshot;
use remanent_format::image::{ImageFileHeader, ImageFileHeaderRaw, ImagePurpose};
use remanent_format::manifest::Manifest;
use remanent_format::state::follow::Resolution;
use remanent_format::state::reach::Reach;
use remanent_format::state::survey::{Survey, read_manifest};
use remanent_format::{FileName, Folder, Lsn, PageId, PageTable, ReadAt, SnapshotId};

use super::Recovery;
use super::verified_snapshots::verified;
use crate::base::allocation::set_of;
use crate::catalog::{Catalog, ImageTotals, KnownImages, ReplayImages, RetainedSnapshot, RetainedTable};
use crate::disk::Disk;
use crate::disk::image_spares::ImageSpares;
use crate::disk::source::DiskSource;
use crate::error::Result;
use crate::images::IMAGE_FILES_MAX;
use crate::images::disk_pages::DiskPages;
use crate::images::numbers::ImageFiles;

/// The snapshots, tables and files that the open will keep. The draft becomes the catalog once the pages are loaded.
pub(super) struct CatalogDraft<'s> {
    /// The snapshots that the new incarnation records as verified.
    pub verified: Vec<VerifiedSnapshot>,
    /// The manifests to publish again, before the seal that records their snapshots is written (I7).
    pub anew: Vec<&'s Manifest>,
    /// The pages that differ from the newest snapshot. The next snapshot checks only these pages.
    pub changed: Vec<PageId>,
    /// The page table after the last batch of the log, to which new commits apply.
    pub submitted: PageTable,
    /// The kept snapshots, with the files that they need.
    snapshots: BTreeMap<SnapshotId, RetainedSnapshot>,
    /// The tables of restores that a replay may still reach.
    tables: BTreeMap<u64, RetainedTable>,
    /// The images that the next snapshot may refer to without writing them again. Without this information, the first
    /// snapshot after an open would write every page.
    known: KnownImages,
    /// The numbers of the image files that batches may name, each with the newest batch that may name the file.
    for_batches: BTreeMap<u64, Lsn>,
    /// The next number of an image file or table, which is above all numbers in use. A number is never assigned twice,
    /// because a removed frame may still refer to it, and would then find the images of another file.
    next_file: u64,
    /// The lowest `redo` at which replay may start, or `None` if replay may also start at the beginning of the log.
    floor: Option<Lsn>,
    /// Whether a manifest or table is unreadable. The files that it needs are then unknown.
    is_unread: bool,
}

impl<'s> CatalogDraft<'s> {
    /// Determines the files to keep. `base` is the loaded snapshot, with its complete list of entries.
    pub fn read(
        disk: &dyn Disk,
        source: &DiskSource,
        survey: &'s Survey,
        base: Option<&Manifest>,
        resolution: &Resolution,
        replay_images: ReplayImages,
    ) -> Result<Self> {
        let table = &resolution.resolved.table;
        let end = resolution.end.as_ref().expect("followed to its end");
        let reach = Reach::of(survey, &end.verified);
        let (mut verified, anew) = verified(survey, end, resolution.base);
        let floor = floor(survey, &reach, &verified);
        // Records whether the log after the snapshot is kept. If it is not, replay cannot start from the snapshot.
        for entry in &mut verified {
            let redo = survey.chain(entry.snapshot)?[0].redo.lsn;
            entry.log_kept = floor.is_some_and(|floor| redo >= floor);
        }
        let is_readable = |snapshot: &SnapshotId| survey.chain(*snapshot).is_ok();
        let is_unread = !survey.links.keys().all(is_readable);
        let known = KnownImages::recovered(survey, base, replay_images)?;
        let folder = PagesFolder::read(disk, source, survey, resolution)?;
        let snapshots = retained(survey, &verified, resolution.base, &known, &folder)?;
        let (changed, submitted) = (known.changed(table)?, table.clone());
        let PagesFolder { for_batches, tables, next_file, has_unread_table } = folder;
        Ok(Self {
            verified,
            anew,
            changed,
            submitted,
            snapshots,
            tables,
            known,
            for_batches,
            next_file,
            floor,
            is_unread: is_unread || has_unread_table,
        })
    }

    /// Builds the catalog of the open store. `end` is the newest batch. Files that an unreadable manifest or table may
    /// need are kept until replay can no longer start at or before `end`.
    pub fn into_catalog(
        self,
        disk: &Arc<dyn Disk>,
        spares: Arc<ImageSpares>,
        disk_pages: Arc<DiskPages>,
        survey: &Survey,
        end: Lsn,
    ) -> Catalog {
        let Self { snapshots, tables, known, for_batches, next_file, floor, is_unread, .. } = self;
        let newest = survey.links.keys().next_back();
        Catalog {
            snapshots,
            tables,
            floor,
            unread: is_unread.then_some(end),
            next_snapshot: newest.map_or(1, |last| last.0 + 1),
            files: Arc::new(ImageFiles::new(disk.clone(), spares, disk_pages, next_file, for_batches)),
            known: Arc::new(known),
            file_lens: BTreeMap::new(),
        }
    }
}

/// The image files and tables in the pages folder.
struct PagesFolder {
    for_batches: BTreeMap<u64, Lsn>,
    tables: BTreeMap<u64, RetainedTable>,
    next_file: u64,
    has_unread_table: bool,
}

impl PagesFolder {
    fn read(disk: &dyn Disk, source: &DiskSource, survey: &Survey, resolution: &Resolution) -> Result<Self> {
        // The numbers of files that were removed are known only from the manifests.
        let next_file = survey.readable().map(|manifest| manifest.next_file).max().unwrap_or(1);
        let (for_batches, tables) = (BTreeMap::new(), BTreeMap::new());
        let mut folder = Self { for_batches, tables, next_file, has_unread_table: false };
        let unfetched = disk.unfetched_files();
        for name in disk.list(Folder::Pages)? {
            let Some(file) = FileName::parse(Folder::Pages, &name) else { continue };
            match file {
                FileName::Pages(number) => {
                    folder.note_number(number);
                    // A frame may name the file although this open does not read it: in older log, or in the torn tail
                    // that this open removes.
                    // The header of an unfetched file is not read, so that the open does not wait for it.
                    if unfetched.contains(&number) || may_be_for_a_batch(source, number, survey) {
                        folder.for_batches.insert(number, newest_batch(survey, resolution, number));
                    }
                }
                // I13: the chunks in a spare contain the spare's number.
                FileName::ImageSpare(number) => folder.note_number(number),
                FileName::Table(number) => {
                    folder.note_number(number);
                    // An unreadable table is needed only by log that is older than the replayed part. Which images it
                    // names is unknown, so all images are kept.
                    let Ok((table, _)) = read_manifest(source, file, &survey.store) else {
                        folder.has_unread_table = true;
                        continue;
                    };
                    let images = table.entries.iter().filter_map(|entry| entry.image);
                    let files = set_of(images.flat_map(|image| image.files()).map(|(file, _)| file));
                    folder.tables.insert(number, RetainedTable { restored_at: table.end, files });
                }
                _ => {}
            }
        }
        Ok(folder)
    }

    fn note_number(&mut self, number: u64) {
        self.next_file = self.next_file.max(number + 1);
    }
}

/// Returns the verified snapshots with the files that they need. `base` is the loaded snapshot.
fn retained(
    survey: &Survey,
    verified: &[VerifiedSnapshot],
    base: Option<SnapshotId>,
    known: &KnownImages,
    folder: &PagesFolder,
) -> Result<BTreeMap<SnapshotId, RetainedSnapshot>> {
    // Snapshots from other readable manifests are not listed: later snapshots are based on them, or they are removed
    // with the next snapshot.
    let mut snapshots = BTreeMap::new();
    for VerifiedSnapshot { snapshot, manifest_crc, .. } in verified {
        let chain = survey.chain(*snapshot)?;
        let links = chain[1..].iter().map(|link| link.snapshot).collect();
        // The totals of the loaded snapshot were computed together with `known`, so its entries are not visited again.
        let sums = match base == Some(*snapshot) {
            true => known.sums(),
            false => ImageTotals::of(survey.entries(*snapshot)?.map(|entry| entry.image)),
        };
        // The image files of a snapshot have consecutive numbers after those of the previous snapshot. If the previous
        // snapshot was removed, its last file may be attributed to this one.
        let next = chain[0].next_file;
        let first = match survey.links.get(&SnapshotId(snapshot.0 - 1)) {
            Some(Ok((before, _))) => before.next_file,
            _ => next.saturating_sub(IMAGE_FILES_MAX),
        };
        let is_other = |file| folder.for_batches.contains_key(&file) || folder.tables.contains_key(&file);
        let is_own = |file: u64| (first..next).contains(&file) && !is_other(file);
        let kept = RetainedSnapshot::new(chain[0], is_own, sums, links, *manifest_crc, true);
        snapshots.insert(*snapshot, kept);
    }
    Ok(snapshots)
}

impl Recovery<'_> {
    /// Builds the catalog of the open store and removes unneeded files. `end` is the newest batch.
    pub(super) fn keep(
        &self,
        draft: CatalogDraft<'_>,
        spares: Arc<ImageSpares>,
        survey: &Survey,
        base: Option<SnapshotId>,
        end: Lsn,
    ) -> Result<Catalog> {
        let (is_unread, newest) = (draft.is_unread, survey.links.keys().next_back().copied());
        let batch_files: BTreeSet<u64> = draft.for_batches.keys().copied().collect();
        let catalog = draft.into_catalog(&self.disk, spares, self.disk_pages.clone(), survey, end);
        // Unnamed image files usually come from a snapshot that a crash interrupted. If this open has skipped a damaged
        // snapshot, its images are kept to help diagnose the damage, until newer images replace them.
        if newest == base && !is_unread {
            self.remove_unneeded_images(&catalog, survey, &batch_files)?;
        }
        Ok(catalog)
    }

    /// Removes image files that a crash left behind and that nothing needs. The opening seal, which is durable by now,
    /// states the floor, so no replay begins below it (I8).
    fn remove_unneeded_images(
        &self,
        catalog: &Catalog,
        survey: &Survey,
        batch_files: &BTreeSet<u64>,
    ) -> Result<()> {
        // A reader may have started from a snapshot from which replay can no longer start. If there is such a reader,
        // all files are kept until the next snapshot. Otherwise its lock is held until the removal is complete, so that
        // no reader starts in between.
        let starts = |id: &SnapshotId| catalog.snapshots.get(id).is_some_and(|kept| catalog.reaches(kept));
        // A reader may have started from any manifest that existed at the survey, or from the beginning of the log.
        let begun = [SnapshotId(0)].into_iter().chain(survey.links.keys().copied());
        let mut going = Vec::new();
        for id in begun.filter(|id| !starts(id)) {
            match self.disk.try_retire(id)? {
                Some(lock) => going.push(lock),
                None => return Ok(()),
            }
        }
        // Files are identified by number. By now it is known which files are named and which belong to a batch.
        let named = catalog.named_files();
        let next_file = catalog.snapshots.values().map(|kept| kept.next_file).max().unwrap_or(1);
        let floor = catalog.floor.unwrap_or_default();
        for name in self.disk.list(Folder::Pages)? {
            // Tables are not removed here. The next snapshot applies retention to them.
            let Some(file @ FileName::Pages(number)) = FileName::parse(Folder::Pages, &name) else {
                continue;
            };
            // Unless a manifest states that the highest file number is in use, only the file itself proves this. A
            // removed frame may name the number, and must not find another file under it.
            let is_highest = number + 1 == catalog.files.first() && number >= next_file;
            let is_needed = named.contains(&number)
                || catalog.files.is_for_batch(number, floor)
                || catalog.files.is_read_from(number);
            if !(is_needed || is_highest && batch_files.contains(&number)) {
                self.disk.remove(file)?;
            }
        }
        // Files that only batches up to the floor name are no longer tracked.
        catalog.files.recycled(floor);
        Ok(())
    }
}

/// Returns the batch from which replay may start once the new incarnation has begun.
///
/// Usually a seal states this batch. In a fork, and in a store of an older build, there is no such seal yet, and the
/// beginning of the log is missing. The result is then the `redo` of the oldest recorded snapshot whose log exists.
fn floor(survey: &Survey, reach: &Reach, verified: &[VerifiedSnapshot]) -> Option<Lsn> {
    if reach.floor().is_some() || reach.beginning().is_some() {
        return reach.floor();
    }
    let starts = verified.iter().filter(|entry| reach.is_start(Some(entry.snapshot)));
    let links = starts.filter_map(|entry| survey.links[&entry.snapshot].as_ref().ok());
    links.map(|(link, _)| link.redo.lsn).min()
}

/// Returns the newest batch that may name an image file that was written for a batch. A lower result frees the file
/// earlier.
///
/// - If a replayed frame names the file, the result is that frame's batch.
/// - Otherwise a frame that names the file is at or before the `redo` of the loaded snapshot. It is also at or before
///   the `redo` of each snapshot whose manifest states that the files of later batches have higher numbers.
fn newest_batch(survey: &Survey, resolution: &Resolution, number: u64) -> Lsn {
    if let Some(lsn) = resolution.ahead.get(&number) {
        return *lsn;
    }
    let base = resolution.base.and_then(|base| survey.links[&base].as_ref().ok());
    let replayed_from = base.map_or(Lsn(0), |(link, _)| link.redo.lsn);
    let before = survey.readable().filter(|link| number < link.ahead_from).map(|link| link.redo.lsn);
    before.fold(replayed_from, Lsn::min)
}

/// Returns whether an image file may have been written for a batch of this store. A file with an unreadable header
/// counts as such a file. A file of an ancestor store does not count, because only snapshots share such files.
fn may_be_for_a_batch(source: &DiskSource, number: u64, survey: &Survey) -> bool {
    let mut bytes = [0; ImageFileHeaderRaw::LEN];
    let read = source.read_at(FileName::Pages(number), 0, &mut bytes);
    let header = read.ok().and_then(|()| ImageFileHeader::decode(&bytes).ok());
    let is_shared = |header: &ImageFileHeader| survey.store.record.ancestors.contains(&header.store);
    header.is_none_or(|header| header.purpose == ImagePurpose::Batch && !is_shared(&header))
}
