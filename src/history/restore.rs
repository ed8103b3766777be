//! Restores an earlier state with one more batch, which replaces all pages and the root. The caller holds the
//! submission lock and the catalog lock, so no batch is committed and no snapshot is taken during the restore.
//!
//! 1. Find the old state on disk. Nothing has changed so far.
//! 2. Write a table of the old state. Pages that changed since then get an epoch above the highest ever used, so that
//!    preconditions remain reliable. Pages without an exact image are written again, chunk by chunk. Sync the files,
//!    and verify from the medium every image that the table names. The complete old state is then on disk and verified.
//! 3. Log the restore record, which names the table, and wait until the record is durable. Recovery now produces the
//!    restored state.
//! 4. Replace the tables and overwrite memory, one page at a time, from the images. A failure in this step poisons the
//!    store. Tables and disk are then correct, but memory is not and is no longer read.
//!
//! At any time, only a few pieces of the old state are in host memory, regardless of the length of a page.
//!
//! The caller then takes a snapshot, so that a later open need not replay the restore. A crash before step 3 leaves an
//! unreferenced table. A lack of space in step 2 or 3, and damage found in step 1 or 2, leave the store unchanged.
//! Every other failure after step 1 poisons the store.

use std::collections::BTreeMap;
use std::sync::Arc;

use remanent_format::image::{ImagePurpose, ImageRef};
use remanent_format::manifest::{Manifest, ManifestKind};
use remanent_format::op::{Op, PayloadWriter};
use remanent_format::{
    Epoch, FileName, Folder, LogPoint, Lsn, Metadata, PageId, PageInfo, PageTable, Place, SnapshotId,
};

use crate::applier::Turn;
use crate::base::allocation::{collected, push, set_of};
use crate::base::wall_clock::unix_ms;
use crate::catalog::publish::{publish_manifest, without_spare};
use crate::catalog::{Catalog, RetainedTable, entry};
use crate::device::{CommandList, EngineDevice, Lane};
use crate::disk::source::DiskSource;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::history::point::StatePoint;
use crate::history::state::PastState;
use crate::images::ImageWriter;
use crate::images::disk_pages::DiskPages;
use crate::images::read::{SummedBy, prove, wanted};
use crate::log::SpacePurpose;
use crate::memory::arena::{PageMemory, Purpose};
use crate::memory::staging::StagingPool;
use crate::options::{Budget, ImageOptions};
use crate::recovery::image_loader::{ImageLoader, threads};

/// Restores an earlier state in an open store. Created for one restore.
pub(crate) struct RestoreRun<'a> {
    pub engine: &'a Engine,
    pub budget: &'a Budget,
    pub images: ImageOptions,
}

/// The state to restore, once its table and all its images are on disk.
struct RestoreTarget {
    /// The pages with the versions that they have after the restore.
    pages: Vec<PageInfo>,
    root: Arc<Metadata>,
    /// The images of all pages with a nonzero length.
    images: BTreeMap<PageId, ImageRef>,
}

impl RestoreRun<'_> {
    /// Restores the state after batch `restored` and returns the position of the restore in the log.
    pub fn run(&self, restored: Lsn, submitted: &mut PageTable, catalog: &mut Catalog) -> Result<LogPoint> {
        self.engine.poison.check()?;
        // Step 1.
        self.engine.log.wait_durable(submitted.lsn())?;
        let old = PastState::open(&self.engine.disk, Some(&StatePoint::Lsn(restored)))?;
        let in_memory = old.table().pages().filter(|info| info.place != Place::Disk);
        self.budget.check(in_memory.map(|info| (info.place, info.len)))?;
        // Step 2.
        let lsn = submitted.lsn().next();
        let epoch = Epoch(submitted.epoch_high().0 + 1);
        let pages = collected(old.table().pages().map(|info| at_restore(&info, submitted, lsn, epoch)))?;
        // If the restore changes no page, no page has the new epoch.
        let epoch_high = pages.iter().map(|info| info.epoch).fold(submitted.epoch_high(), Epoch::max);
        let number = catalog.files.take_number();
        let logged = self.write_images(&pages, &old, number).and_then(|images| {
            let target = RestoreTarget { pages, root: old.table().root().clone(), images };
            let table_crc = self.write_table(&target, submitted.next_page(), lsn, epoch_high, number)?;
            // Step 3.
            let mut payload = PayloadWriter::default();
            let record = Op::Restore { table: number, table_crc, restored };
            payload.push(&record).map_err(|defect| Error::from(defect.at(FileName::Table(number), 0)))?;
            let payload = payload.finish();
            let point = self.engine.log.append(&payload, crc32fast::hash(&payload), SpacePurpose::User)?;
            Ok((point, target))
        });
        let (point, target) = logged.map_err(|error| self.give_up(number, error))?;
        drop(old);
        let files = target.images.values().flat_map(ImageRef::files);
        let files = set_of(files.map(|(file, _)| file));
        catalog.tables.insert(number, RetainedTable { restored_at: lsn, files });
        // These images need not be written again: the next snapshot refers to them.
        for info in target.pages.iter().filter(|info| info.lsn == lsn) {
            catalog.known.note(info.page, lsn, target.images.get(&info.page).copied());
        }
        self.engine.log.wait_durable(point.lsn)?;
        // Step 4.
        let target = Arc::new(target);
        // From here on, lookups find the restored state. Reads of a page that the restore changes wait until its bytes
        // are replaced.
        self.engine.versions.replace(point.lsn, &target.pages, &target.root);
        let overwritten = self.overwrite(target.clone(), point);
        // The restore is in the log, so the table is replaced even if memory could not be overwritten.
        submitted.replace(point.lsn, target.pages.iter().cloned(), target.root.clone());
        submitted.index_keys().expect("the old state had unique keys");
        overwritten.map_err(|error| self.engine.poison.set(error))?;
        // No batch was committed during the restore, because the caller holds the submission lock. All pages may have
        // changed, so streams report a gap.
        self.engine.applier.changes().publish(Err(point.lsn));
        tracing::info!(%restored, lsn = %point.lsn, "restored");
        Ok(point)
    }

    /// Performs the first part of step 2: returns a verified image of every non-empty page. Pages that no image
    /// contains exactly are written again.
    fn write_images(
        &self,
        pages: &[PageInfo],
        old: &PastState,
        number: u64,
    ) -> Result<BTreeMap<PageId, ImageRef>> {
        let mut images = BTreeMap::new();
        let mut stale = Vec::new();
        for info in pages.iter().filter(|info| info.len > 0) {
            match old.exact_image(info.page) {
                Some(image) => _ = images.insert(info.page, image),
                None => push(&mut stale, info.clone())?,
            }
        }
        let source = DiskSource::bypassing_cache(self.engine.disk.clone());
        prove(&source, wanted(pages, &images))?;
        if stale.is_empty() {
            return Ok(images);
        }
        let (disk, purpose) = (self.engine.disk.clone(), ImagePurpose::Snapshot);
        let writer = ImageWriter::create(disk, self.engine.store, number, purpose, self.images)?;
        let written =
            writer.write_pages(&stale, &mut |info, offset, out| old.read(info.page, offset, out))?;
        writer.sync()?;
        writer.verify()?;
        images.extend(stale.iter().map(|info| info.page).zip(written));
        Ok(images)
    }

    /// Performs the second part of step 2: writes the table and returns its checksum.
    fn write_table(
        &self,
        target: &RestoreTarget,
        next_page: u64,
        lsn: Lsn,
        epoch_high: Epoch,
        number: u64,
    ) -> Result<u32> {
        let entries = target.pages.iter().map(|info| entry(info, target.images.get(&info.page).copied()));
        let table = Manifest {
            kind: ManifestKind::Table,
            store: self.engine.store,
            snapshot: SnapshotId(number),
            name: None,
            created_unix_ms: unix_ms(),
            redo: LogPoint::default(),
            end: lsn,
            next_page,
            epoch_high,
            next_file: number + 1,
            ahead_from: 0,
            entries: collected(entries)?,
            tombstones: Vec::new(),
            root: target.root.clone(),
        };
        publish_manifest(&self.engine.disk, &table, usize::MAX, &without_spare)
    }

    /// Ends a restore that was not logged, and returns the error for the caller.
    ///
    /// - If the disk is full, or the old state is damaged or too large, the store continues as if the restore had not
    ///   begun.
    /// - After any other failure, the store is poisoned. The next open removes the unreferenced files.
    fn give_up(&self, number: u64, error: Error) -> Error {
        if !error.is_passing() && !matches!(error, Error::Damaged(_)) {
            return self.engine.poison.set(error);
        }
        let present = self.engine.disk.list(Folder::Pages).unwrap_or_default();
        for file in [FileName::Table(number), FileName::Pages(number)] {
            if present.contains(&file.name())
                && let Err(error) = self.engine.disk.remove(file)
            {
                tracing::warn!(%error, "cannot remove what an unfinished restore wrote");
            }
        }
        error
    }

    /// Performs step 4: replaces the tables and overwrites page memory with the old state.
    fn overwrite(&self, target: Arc<RestoreTarget>, point: LogPoint) -> Result<()> {
        let source = DiskSource::bypassing_cache(self.engine.disk.clone());
        let (device, staging) = (self.engine.device.clone(), self.engine.staging.clone());
        let disk_pages = self.engine.disk_pages.clone();
        let overwritten = self.engine.applier.turn(move |turn| {
            overwrite_on_disk(turn, &disk_pages, &target, point);
            overwrite(turn, &source, &device, &staging, &target, point)
                .inspect_err(|error| turn.mark_unknown(error))
        });
        overwritten.map_err(|error| self.record_loss(error))
    }

    /// Marks page memory as lost, so that no caller reads it. The memory contains neither the old nor the new state.
    fn record_loss(&self, error: Error) -> Error {
        let reason = error.clone();
        let recorded = self.engine.applier.turn(move |turn| {
            turn.mark_unknown(&reason);
            Ok(())
        });
        recorded.err().unwrap_or(error)
    }
}

/// Returns the page information that a page of the old state has after the restore. A page that has not changed since
/// the old state keeps its version, and a page that was only moved keeps its epoch.
fn at_restore(info: &PageInfo, now: &PageTable, lsn: Lsn, epoch: Epoch) -> PageInfo {
    let current = now.get(info.page).map(|current| (current.epoch, current.lsn));
    let mut info = info.clone();
    if current != Some((info.epoch, info.lsn)) {
        info.lsn = lsn;
    }
    if current.map(|(epoch, _)| epoch) != Some(info.epoch) {
        info.epoch = epoch;
    }
    info
}

/// Replaces the applier's pages on disk with the pages of the old state. Each page has the bytes of its image.
fn overwrite_on_disk(turn: &mut Turn<'_>, disk_pages: &DiskPages, target: &RestoreTarget, point: LogPoint) {
    let RestoreTarget { pages, images, .. } = target;
    let is_on_disk = |page: PageId| {
        let at = pages.binary_search_by_key(&page, |info| info.page);
        at.is_ok_and(|at| pages[at].place == Place::Disk)
    };
    turn.applied.on_disk.retain(is_on_disk);
    let changed = pages.iter().filter(|info| info.lsn == point.lsn && info.place == Place::Disk);
    for info in changed {
        // The images were verified before the restore was logged, and the table names them, so their files are kept.
        let image = images.get(&info.page).map(|image| disk_pages.proven_image(*image, info.len));
        turn.versions.moved_to_disk(info.page);
        turn.applied.on_disk.insert(info.page, disk_pages.page(image));
    }
    disk_pages.note(pages.iter().map(|info| info.place));
}

/// Replaces the applier's pages in memory. On return, page memory contains the old state.
fn overwrite(
    turn: &mut Turn<'_>,
    source: &DiskSource,
    device: &EngineDevice,
    staging: &StagingPool,
    target: &RestoreTarget,
    point: LogPoint,
) -> Result<()> {
    let RestoreTarget { pages, root, images } = target;
    turn.applied.table.replace(point.lsn, pages.iter().cloned(), root.clone());
    turn.applied.table.index_keys().expect("the old state had unique keys");
    turn.applied.point = point;
    // The pages are sorted by id, so a binary search finds the page's new place and length.
    let staying = |page: PageId| {
        let at = pages.binary_search_by_key(&page, |info| info.page).ok()?;
        Some((pages[at].place, pages[at].len))
    };
    // Memory that is no longer needed is freed first. The budget may not have room for both states (I10).
    let last_use = turn.submit(CommandList::default())?.fence();
    let fits = |page: PageId, memory: &PageMemory| staying(page) == Some((memory.place(), memory.byte_len()));
    let leaving = turn.applied.memory.iter().filter(|(page, memory)| !fits(*page, memory));
    let leaving = collected(leaving.map(|(page, _)| page))?;
    for page in leaving {
        let memory = turn.applied.memory.remove(page).expect("listed just now");
        turn.arena.retire(memory, last_use);
    }
    let changed = || pages.iter().filter(|info| info.lsn == point.lsn && info.place != Place::Disk);
    let missing = collected(changed().filter(|info| !turn.applied.memory.contains(info.page)))?;
    let wanted_memory = collected(missing.iter().map(|info| (info.place, info.len)))?;
    let memory = turn.arena.allocate_all(Purpose::Page, &wanted_memory)?;
    for (info, memory) in missing.iter().zip(&memory) {
        turn.versions.moved(info.page, memory.span().memory);
    }
    turn.applied.memory.extend(missing.iter().map(|info| info.page).zip(memory));
    // The images were verified before the restore was logged, but were not kept in memory, so they are read again. A
    // failed read is retried once, because some pages are already overwritten.
    let mut images = collected(wanted(changed(), images))?;
    let memory = &turn.applied.memory;
    let target = |page: PageId| Ok(memory[page].span());
    let (lanes, summed_by) = (&[Lane::Apply], SummedBy::Device);
    let loader = ImageLoader { device, staging, source, lanes, target: &target, summed_by };
    match loader.load(std::iter::once(&mut *images), threads()) {
        Err(Error::Damaged(_)) => loader.load(std::iter::once(&mut *images), threads()),
        loaded => loaded,
    }
}
