//! Floor 6. What an open keeps of what lies on disk: snapshots, tables of old states, the files they need, the images
//! that need not be written again. None of it is needed to load pages, so it is put together beside that.
//!
//! Looking changes nothing. What nothing names is removed only when the new incarnation has begun.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use remanent_format::frame::VerifiedSnapshot;
use remanent_format::image::{ImageFileHeader, ImageFileHeaderRaw, ImagePurpose};
use remanent_format::manifest::Manifest;
use remanent_format::rebuild::{Resolution, Survey, read_manifest};
use remanent_format::{FileName, Folder, PageId, PageTable, ReadAt, SnapshotId};

use super::Recovery;
use crate::error::Result;
use crate::image_files::ImageFiles;
use crate::images::IMAGE_FILES_MAX;
use crate::keeping::{Beside, Keeping, Kept, KeptTable, KnownImages, Sums};
use crate::source::DiskSource;

/// What will be kept, if the pages can be loaded.
pub(super) struct Found<'s> {
    /// The snapshots that the new incarnation records as verified.
    pub verified: Vec<VerifiedSnapshot>,
    /// The links that are published anew before that.
    pub anew: Vec<&'s Manifest>,
    /// The table, for who watches it: the pages that are not as the newest snapshot has them.
    pub changed: Vec<PageId>,
    /// The same table, for commits.
    pub submitted: PageTable,
    snapshots: BTreeMap<SnapshotId, Kept>,
    tables: BTreeMap<u64, KeptTable>,
    known: KnownImages,
    /// Image files that batches may name.
    for_batches: BTreeSet<u64>,
    next_file: u64,
}

impl Recovery<'_> {
    /// Looks what will be kept. `base` is the snapshot that is loaded, whole.
    pub(super) fn find<'s>(
        &self,
        source: &DiskSource,
        survey: &'s Survey,
        base: Option<&Manifest>,
        resolution: &Resolution,
        beside: Beside,
    ) -> Result<Found<'s>> {
        let table = &resolution.resolved.table;
        let end = resolution.end.as_ref().expect("followed to its end");
        let (verified, anew) = self.verified(survey, end, resolution.base);
        let known = KnownImages::recovered(survey, base, beside)?;
        let mut for_batches = BTreeSet::new();
        let mut tables = BTreeMap::new();
        let mut next_file = survey.readable().map(|manifest| manifest.next_file).max().unwrap_or(1);
        for name in self.disk.list(Folder::Pages)? {
            match FileName::parse(Folder::Pages, &name) {
                Some(FileName::Pages(number)) => {
                    next_file = next_file.max(number + 1);
                    if may_be_for_a_batch(source, number) {
                        for_batches.insert(number);
                    }
                }
                Some(file @ FileName::Table(number)) => {
                    next_file = next_file.max(number + 1);
                    // A table that cannot be read is needed only by log that is older than what was
                    // replayed; its images stay, for nothing says which they are.
                    if let Ok((table, _)) = read_manifest(source, file, &survey.store) {
                        let files =
                            table.entries.iter().filter_map(|entry| entry.image).map(|image| image.file);
                        let files: BTreeSet<u64> = files.collect();
                        tables.insert(number, KeptTable { restored_at: table.end, files });
                    }
                }
                _ => {}
            }
        }
        // Other links that can be read are there for these, or will go with the next snapshot.
        let mut snapshots = BTreeMap::new();
        for VerifiedSnapshot { snapshot, manifest_crc } in &verified {
            let chain = survey.chain(*snapshot)?;
            let links = chain[1..].iter().map(|link| link.snapshot).collect();
            let sums = match resolution.base == Some(*snapshot) {
                true => known.sums(),
                false => Sums::of(survey.entries(*snapshot)?.map(|entry| entry.image)),
            };
            // A snapshot takes the numbers of its image files together, behind those of the snapshot before. Where that
            // is gone, one of its files may be taken for one of these.
            let next = chain[0].next_file;
            let first = match survey.links.get(&SnapshotId(snapshot.0 - 1)) {
                Some(Ok((before, _))) => before.next_file,
                _ => next.saturating_sub(IMAGE_FILES_MAX),
            };
            let is_other = |file: u64| for_batches.contains(&file) || tables.contains_key(&file);
            let is_own = |file: u64| (first..next).contains(&file) && !is_other(file);
            snapshots.insert(*snapshot, Kept::new(chain[0], is_own, sums, links, *manifest_crc, true));
        }
        let (changed, submitted) = (known.changed(table), table.clone());
        Ok(Found { verified, anew, changed, submitted, snapshots, tables, known, for_batches, next_file })
    }

    /// What is kept on disk from now on; `opening` is the segment that the new incarnation begins with. What nothing names
    /// is removed.
    pub(super) fn keep(
        &self,
        found: Found<'_>,
        survey: &Survey,
        base: Option<SnapshotId>,
        opening: u64,
    ) -> Result<Keeping> {
        let Found { snapshots, tables, known, for_batches, next_file, .. } = found;
        // Which frames name them is not known for the log before the snapshot used: as if the newest one did.
        let for_batches: BTreeMap<u64, u64> =
            for_batches.into_iter().map(|number| (number, opening)).collect();
        let newest = survey.links.keys().next_back().copied();
        let keeping = Keeping {
            snapshots,
            tables,
            next_snapshot: newest.map_or(1, |last| last.0 + 1),
            files: Arc::new(ImageFiles::new(self.disk.clone(), next_file, for_batches)),
            known: Arc::new(known),
            file_lens: BTreeMap::new(),
        };
        // Image files of snapshots that nothing names stem from a snapshot that a crash cut short. Where a snapshot was
        // passed over, its images stay until newer ones take its place: they are evidence.
        if newest == base && survey.links.keys().all(|snapshot| survey.chain(*snapshot).is_ok()) {
            self.remove_unnamed_images(&keeping)?;
        }
        Ok(keeping)
    }

    fn remove_unnamed_images(&self, keeping: &Keeping) -> Result<()> {
        let named = keeping.named_files();
        for name in self.disk.list(Folder::Pages)? {
            if let Some(file @ FileName::Pages(number)) = FileName::parse(Folder::Pages, &name)
                && !named.contains(&number)
                && !keeping.files.is_for_batch(number, 0)
            {
                self.disk.remove(file)?;
            }
        }
        Ok(())
    }
}

/// Whether an image file may have been written for a batch. One that does not say what it was written for may.
fn may_be_for_a_batch(source: &DiskSource, number: u64) -> bool {
    let mut bytes = [0; ImageFileHeaderRaw::LEN];
    let read = source.read_at(FileName::Pages(number), 0, &mut bytes);
    let header = read.ok().and_then(|()| ImageFileHeader::decode(&bytes).ok());
    header.is_none_or(|header| header.purpose == ImagePurpose::Batch)
}
