//! One scrub pass over the files on disk. At its start, the pass determines which batches and images to check, and then
//! reads them at a limited rate.
//!
//! Snapshots are taken during a pass, and the files that they supersede are recycled. The numbers of image files are
//! never reused, so a missing image file is one that is no longer needed. A recycled log segment may contain other
//! bytes, so damage in the log counts only if replay may still begin before it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use remanent_format::frame::FrameKind;
use remanent_format::image::ImageRef;
use remanent_format::log::{LogMap, LogWalk};
use remanent_format::manifest::{CopyHealth, Manifest};
use remanent_format::op::{Op, decode_payload};
use remanent_format::state::survey::{Survey, read_manifest};
use remanent_format::store::StoreFile;
use remanent_format::{Damage, Defect, FileName, LogPoint, Lsn, PageId, ReadAt};

use super::super::Snapshots;
use super::ScrubReport;
use crate::base::allocation::collected;
use crate::base::pace::Pace;
use crate::base::sync::Instant;
use crate::catalog::Catalog;
use crate::disk::source::DiskSource;
use crate::error::Result;
use crate::images::read::{ImageRequest, runs};

/// The damage that a pass found, grouped by the repair that it needs.
#[derive(Default)]
pub(super) struct ScrubFindings {
    /// The counters and the damage to report to the caller.
    pub scrubbed: ScrubReport,
    /// Whether the STORE file is damaged.
    pub store: bool,
    /// The links with one damaged copy.
    pub copies: Vec<Arc<Manifest>>,
    /// The damaged images, as pairs of the image file's number and the offset in the file.
    pub images: BTreeSet<(u64, u64)>,
    /// The damaged images that overlays are based on, as pairs of the image file's number and the page of the image.
    pub bases: BTreeSet<(u64, PageId)>,
    /// The batches that cannot be replayed because the log, a table or an image is damaged.
    pub batches: Vec<Lsn>,
}

/// An image that the pass reads and verifies.
struct ScrubImage {
    image: ImageRef,
    page: PageId,
    len: u64,
    /// The batch whose replay needs the image, or `None` if no batch needs it.
    batch: Option<Lsn>,
}

/// The state of one scrub pass: the files and batches to check, and the damage found so far.
pub(super) struct ScrubPass<'a> {
    snapshots: &'a Snapshots,
    /// The source of all reads from disk. It bypasses the page cache, because the cache may contain bytes that the
    /// medium has lost.
    source: DiskSource,
    pace: &'a Pace,
    began: Instant,
    /// The log segments that existed when the pass began.
    log: LogMap,
    /// The last batch that was durable when the pass began.
    until: Lsn,
    /// The images to read, by file number and offset. An image that several snapshots share is read once.
    images: BTreeMap<(u64, u64), ScrubImage>,
    /// The damage found so far.
    found: ScrubFindings,
}

impl<'a> ScrubPass<'a> {
    /// Reads the files that list images and log: STORE, links, tables and segment headers. Holds the catalog lock while
    /// it reads, so that no listed snapshot is removed before it is checked.
    pub fn begin(snapshots: &'a Snapshots, store: &StoreFile, pace: &'a Pace) -> Result<Self> {
        // The rate limit of the pass counts from here.
        let began = Instant::now();
        let catalog = snapshots.catalog.lock();
        let source = DiskSource::bypassing_cache(snapshots.engine.disk.clone());
        let mut found = ScrubFindings::default();
        // Determined before the files are listed. A batch that becomes durable later may be in a segment that is not in
        // the list, and would look lost.
        let until = snapshots.engine.log.durable();
        // STORE can be damaged too. Its contents are in memory, and all other files are checked against these contents.
        let survey = match Survey::read(&source) {
            Ok(survey) if survey.store == *store => survey,
            Err(damage) if damage.file != FileName::Store => return Err(damage.into()),
            other => {
                found.store = true;
                found.scrubbed.damage.push(other.err().unwrap_or(Defect::Foreign.at(FileName::Store, 0)));
                Survey::read_as(&source, store.clone())?
            }
        };
        // Only these parts of the survey are kept, because the survey contains the entries of all manifests.
        let (log, images) = (survey.log.clone(), BTreeMap::new());
        let mut pass = Self { snapshots, source, pace, began, log, until, images, found };
        pass.read_links(&catalog, &survey);
        pass.read_tables(&catalog, store);
        Ok(pass)
    }

    /// Reads the log and the images, and returns the damage.
    ///
    /// # Errors
    /// Returns the system's error if a resource ran short, because a file that was not checked must not be reported as
    /// damaged.
    pub fn run(mut self) -> Result<ScrubFindings> {
        self.read_log()?;
        self.read_images()?;
        // An incomplete pass must not be reported as a complete one.
        let damage = &self.found.scrubbed.damage;
        match damage.iter().find(|damage| damage.defect.is_shortage()) {
            Some(shortage) => Err(shortage.clone().into()),
            None => Ok(self.found),
        }
    }

    /// Checks both copies of every kept link, and collects the images of every kept snapshot.
    fn read_links(&mut self, catalog: &Catalog, survey: &Survey) {
        // Snapshots share links, and each link is checked once.
        let mut seen = BTreeSet::new();
        for kept in catalog.snapshots.values().filter(|kept| kept.is_sound) {
            match survey.snapshot(kept.info.id) {
                Ok(snapshot) => self.want_all(&snapshot, None),
                Err(damage) => self.damaged(damage),
            }
            // The manifests on which a snapshot is based are needed as much as its own.
            for link in kept.links.iter().chain([&kept.info.id]) {
                // An unreadable manifest was reported together with its snapshot above.
                let Some(Ok((manifest, health))) = survey.links.get(link) else { continue };
                if seen.insert(*link) && !health.is_whole() {
                    self.copy_damaged(manifest, health);
                }
            }
        }
    }

    /// Reports the damaged copy of a link. Opening a store needs only one copy, but a damaged copy must be repaired
    /// before the other copy is damaged, too.
    fn copy_damaged(&mut self, manifest: &Arc<Manifest>, health: &CopyHealth) {
        let file = FileName::Manifest(manifest.snapshot.0);
        // Both copies have the same length.
        let second = self.source.len(file).ok().flatten().unwrap_or(0) / 2;
        for (defect, offset) in health.defects.iter().zip([0, second]) {
            if let Some(defect) = defect {
                self.damaged(defect.clone().at(file, offset));
            }
        }
        // The other copy is complete, so both can be rewritten.
        self.found.copies.push(manifest.clone());
    }

    /// Reads the tables of restores that a replay may still reach, and collects the images in the tables.
    fn read_tables(&mut self, catalog: &Catalog, store: &StoreFile) {
        let oldest = self.starts(catalog).first().map(|oldest| oldest.lsn);
        // Replay does not reach a restore below the oldest start, so its table is not needed.
        let is_met = |restored_at| oldest.is_some_and(|oldest| oldest < restored_at);
        for (number, table) in catalog.tables.iter().filter(|(_, table)| is_met(table.restored_at)) {
            match read_manifest(&self.source, FileName::Table(*number), store) {
                Ok((manifest, _)) => self.want_all(&manifest, Some(table.restored_at)),
                Err(damage) => {
                    // Without its table the restore cannot be replayed, so recovery must begin after it.
                    self.found.batches.push(table.restored_at);
                    self.damaged(damage);
                }
            }
        }
    }

    /// Adds the images of a manifest to the images that the pass reads. `batch` is the batch whose replay needs them,
    /// or `None` if no batch does.
    fn want_all(&mut self, manifest: &Manifest, batch: Option<Lsn>) {
        for entry in &manifest.entries {
            let Some(image) = entry.image else { continue };
            let wanted = ScrubImage { image, page: entry.page, len: entry.len, batch };
            let known = self.images.entry((image.file, image.offset)).or_insert(wanted);
            // If a snapshot and a batch share an image, both need it, and the latest batch determines where recovery
            // may begin.
            known.batch = known.batch.max(batch);
        }
    }

    /// Returns the points at which replay may begin, in log order.
    fn starts(&self, catalog: &Catalog) -> Vec<LogPoint> {
        // A missing segment was recycled: no replay begins in it.
        let is_there = |point: &LogPoint| {
            let file = FileName::Segment(point.segment);
            DiskSource::new(self.snapshots.engine.disk.clone()).len(file).is_ok_and(|len| len.is_some())
        };
        // Replay may begin at the beginning of the log only while no floor is recorded.
        let beginning = self.log.beginning().filter(|point| catalog.floor.is_none() && is_there(point));
        let kept = catalog.snapshots.values().filter(|kept| kept.is_sound && kept.redo.lsn <= self.until);
        // A named snapshot may be kept without the log after it.
        let kept = kept.filter(|kept| catalog.reaches(kept));
        let mut starts: Vec<LogPoint> = beginning.into_iter().chain(kept.map(|kept| kept.redo)).collect();
        starts.sort_unstable_by_key(|point| point.lsn);
        starts
    }

    /// Reads the log from the earliest start of replay to the last durable batch. After damage, continues at the next
    /// start.
    fn read_log(&mut self) -> Result<()> {
        let starts = self.starts(&self.snapshots.catalog.lock());
        let mut next = starts.first().copied();
        while let Some(from) = next {
            let Some((at, damage)) = self.walk(from)? else { break };
            let starts = self.starts(&self.snapshots.catalog.lock());
            // If replay can no longer begin before the damage, the damaged part was recycled while it was read.
            let is_needed = starts.first().is_some_and(|oldest| oldest.lsn <= at.lsn);
            // The frame after `at` is lost, so replay must begin after that frame.
            let lost = if is_needed { at.lsn.next() } else { at.lsn };
            if is_needed {
                self.found.batches.push(lost);
                self.damaged(damage);
            }
            // The search terminates, because each start is later than the previous one.
            next = starts.into_iter().find(|start| start.lsn >= lost && start.lsn > from.lsn);
        }
        Ok(())
    }

    /// Reads the log from a point to the last durable batch. Returns the first damage with the last point before it, or
    /// `None` if the log is intact.
    fn walk(&mut self, from: LogPoint) -> Result<Option<(LogPoint, Damage)>> {
        // All of this log is durable (I4): an invalid frame is damage, never a torn tail.
        let mut walk = match LogWalk::new(&self.source, &self.log, from, self.until) {
            Ok(walk) => walk,
            Err(damage) => return Ok(Some((from, damage))),
        };
        let scrubbed = &mut self.found.scrubbed;
        // The walk stops at the last batch that was durable when the pass began, because the log after it is still
        // being written.
        while walk.point().lsn < self.until {
            // The last verified point, after which damage is located.
            let at = walk.point();
            let file = FileName::Segment(at.segment);
            // A log that ends earlier is damaged, too.
            let missing = || Defect::Missing.at_lsn(file, at.offset, at.lsn.next());
            let frame = match walk.next().and_then(|frame| frame.ok_or_else(missing)) {
                Ok(frame) => frame,
                Err(damage) => return Ok(Some((at, damage))),
            };
            let lsn = frame.header.lsn;
            // The rate limit counts these bytes.
            scrubbed.log_bytes += frame.header.frame_len();
            if frame.header.kind == FrameKind::Batch {
                scrubbed.batches += 1;
                // The location to report if the payload cannot be decoded.
                let here = (FileName::Segment(frame.header.segment), frame.header.offset);
                // A payload that cannot be decoded cannot be replayed, like one with a wrong checksum.
                let ops = match decode_payload(frame.payload) {
                    Ok(ops) => ops,
                    Err(defect) => return Ok(Some((at, defect.at_lsn(here.0, here.1, lsn)))),
                };
                for op in ops {
                    if let Op::Image { page, len, image } = op.op {
                        let wanted = ScrubImage { image, page, len, batch: Some(lsn) };
                        // The batch cannot be replayed without the image, so the image is checked like the log.
                        self.images.insert((image.file, image.offset), wanted);
                    }
                }
            }
            self.pace.keep(self.began, scrubbed.log_bytes + scrubbed.image_bytes)?;
        }
        Ok(None)
    }

    /// Reads the images at the limited rate, in file order. The log must be read first, because batches name some of
    /// the images.
    fn read_images(&mut self) -> Result<()> {
        let wanted =
            |image: &ScrubImage| ImageRequest { page: image.page, len: image.len, image: image.image };
        let mut wanted = collected(self.images.values().map(wanted))?;
        // The images are in file order, so one read covers several of them.
        for run in runs(&mut wanted) {
            for (image, damage) in run.damaged(&self.source)? {
                // A part that cannot be fetched is not damage of the directory.
                if let Some(failure) = self.source.archive_failure(&damage) {
                    return Err(failure);
                }
                self.image_damaged(&image, damage);
            }
            let scrubbed = &mut self.found.scrubbed;
            scrubbed.images += run.count();
            scrubbed.image_bytes += run.bytes();
            self.pace.keep(self.began, scrubbed.log_bytes + scrubbed.image_bytes)?;
        }
        Ok(())
    }

    /// Reports a damaged image, unless its file was recycled during the pass.
    fn image_damaged(&mut self, image: &ImageRef, damage: Damage) {
        let place = (image.file, image.offset);
        // The damage may be in the base of an overlay, and other overlays may have the same base.
        let damaged_file = match damage.file {
            FileName::Pages(file) => file,
            _ => image.file,
        };
        let catalog = self.snapshots.catalog.lock();
        let is_named = catalog.named_files().contains(&damaged_file);
        if !is_named && !catalog.files.is_for_batch(damaged_file, Lsn(0)) {
            return;
        }
        // Recorded immediately, so that a snapshot taken during the pass writes the page again.
        let ScrubImage { page, batch, .. } = &self.images[&place];
        // A shortage does not indicate damage, and the page would be rewritten unnecessarily.
        if !damage.defect.is_shortage() {
            catalog.known.mark_damaged(*page, image, (damaged_file, damage.offset));
        }
        self.found.batches.extend(*batch);
        self.found.images.insert(place);
        if damaged_file != image.file {
            self.found.bases.insert((damaged_file, *page));
        }
        self.damaged(damage);
    }

    fn damaged(&mut self, damage: Damage) {
        self.found.scrubbed.damage.push(damage);
    }
}
