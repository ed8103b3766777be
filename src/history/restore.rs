//! Going back to an earlier state, by going forward: one more batch that replaces everything. The caller
//! holds the submission lock and the catalog's lock, so that nothing is committed and no snapshot is
//! taken meanwhile.
//!
//! 1. Find the old state on disk. Until here nothing has changed.
//! 2. Write a table of it: pages that changed since get an epoch above the highest ever given, so that
//!    preconditions cannot be fooled; pages without an exact image are written anew, chunk by chunk. Synced,
//!    and every image that the table names is proven past the cache: now all of the old state is on disk, and
//!    known to be right.
//! 3. Log the restore record that names the table; wait until it is durable. From here on recovery arrives
//!    at the restored state.
//! 4. Replace the tables, overwrite memory, a page at a time from its image. A failure here poisons: tables
//!    and disk are right, memory is not, and is not read any more.
//!
//! So no more of the old state is in host memory at any moment than a few pieces of it, however long a page
//! is.
//!
//! The caller then takes a snapshot, so that a later open need not replay the restore. A crash before 3
//! leaves a table that no record names. No space in 2 or 3 is a clean failure, and so is damage that 1 or
//! 2 meets; everything else after 1 poisons.

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
use crate::catalog::publish::{of_no_spare, publish_manifest};
use crate::catalog::{Catalog, RetainedTable, entry};
use crate::device::{CommandList, Device, Lane};
use crate::disk::source::DiskSource;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::history::point::StatePoint;
use crate::history::state::PastState;
use crate::images::disk_pages::DiskPages;
use crate::images::read::{SummedBy, prove, wanted};
use crate::images::{ImageOptions, ImageWriter};
use crate::log::SpacePurpose;
use crate::memory::arena::{PageMemory, Purpose};
use crate::memory::staging::StagingPool;
use crate::options::Budget;
use crate::recovery::image_loader::{ImageLoader, threads};

/// The parts of a store that a restore works with.
pub(crate) struct RestoreRun<'a> {
    pub engine: &'a Engine,
    pub budget: &'a Budget,
    pub images: ImageOptions,
}

/// The old state, whole on disk.
struct RestoreTarget {
    /// The pages as they are after the restore.
    pages: Vec<PageInfo>,
    root: Arc<Metadata>,
    /// The bytes of all pages that have any.
    images: BTreeMap<PageId, ImageRef>,
}

impl RestoreRun<'_> {
    /// Takes everything back to the state after batch `restored`; returns the restore's own place in the
    /// log.
    pub fn run(&self, restored: Lsn, submitted: &mut PageTable, catalog: &mut Catalog) -> Result<LogPoint> {
        self.engine.poison.check()?;
        // 1.
        self.engine.log.wait_durable(submitted.lsn())?;
        let old = PastState::open(&self.engine.disk, Some(&StatePoint::Lsn(restored)))?;
        let in_memory = old.table().pages().filter(|info| info.place != Place::Disk);
        self.budget.check(in_memory.map(|info| (info.place, info.len)))?;
        // 2.
        let lsn = submitted.lsn().next();
        let epoch = Epoch(submitted.epoch_high().0 + 1);
        let pages = collected(old.table().pages().map(|info| at_restore(&info, submitted, lsn, epoch)))?;
        // Where no page changed, none has the new epoch.
        let epoch_high = pages.iter().map(|info| info.epoch).fold(submitted.epoch_high(), Epoch::max);
        let number = catalog.files.take_number();
        let logged = self.write_images(&pages, &old, number).and_then(|images| {
            let target = RestoreTarget { pages, root: old.table().root().clone(), images };
            let table_crc = self.write_table(&target, submitted.next_page(), lsn, epoch_high, number)?;
            // 3.
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
        // The next snapshot names the table's images: they need not be written again.
        for info in target.pages.iter().filter(|info| info.lsn == lsn) {
            catalog.known.note(info.page, lsn, target.images.get(&info.page).copied());
        }
        self.engine.log.wait_durable(point.lsn)?;
        // 4.
        let target = Arc::new(target);
        // Readers see the restored state from here on, and wait for the bytes of what it changes.
        self.engine.versions.replace(point.lsn, &target.pages, &target.root);
        let overwritten = self.overwrite(target.clone(), point);
        // The log has the restore, so this is the state now, even if memory could not follow.
        submitted.replace(point.lsn, target.pages.iter().cloned(), target.root.clone());
        submitted.index_keys().expect("the old state had unique keys");
        overwritten.map_err(|error| self.engine.poison.set(error))?;
        // No batch comes in between: the caller holds the submission lock.
        self.engine.applier.changes().tell(Err(point.lsn));
        tracing::info!(%restored, lsn = %point.lsn, "restored");
        Ok(point)
    }

    /// Step 2: an image for every page, proven. Those that are not exact are written anew.
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
        let source = DiskSource::past_cache(self.engine.disk.clone());
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

    /// Step 2: the table. Returns its checksum.
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
        publish_manifest(&self.engine.disk, &table, usize::MAX, &of_no_spare)
    }

    /// Ends a restore of which nothing was logged. After a full disk, or if the old state is damaged or
    /// too large, all goes on as if the restore had never begun. After any other failure the next open
    /// removes the files that are left, or nothing ever names them.
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

    /// Step 4: memory becomes the old state.
    fn overwrite(&self, target: Arc<RestoreTarget>, point: LogPoint) -> Result<()> {
        let source = DiskSource::past_cache(self.engine.disk.clone());
        let (device, staging) = (self.engine.device.clone(), self.engine.staging.clone());
        let disk_pages = self.engine.disk_pages.clone();
        let overwritten = self.engine.applier.turn(move |turn| {
            overwrite_on_disk(turn, &disk_pages, &target, point);
            overwrite(turn, &source, &*device, &staging, &target, point).inspect_err(|error| turn.lose(error))
        });
        overwritten.map_err(|error| self.lose(error))
    }

    /// Memory is neither the old state nor the new one: nothing may read it any more.
    fn lose(&self, error: Error) -> Error {
        let reason = error.clone();
        let told = self.engine.applier.turn(move |turn| {
            turn.lose(&reason);
            Ok(())
        });
        told.err().unwrap_or(error)
    }
}

/// A page of the old state, as it is after the restore: one that did not change since keeps its version, and
/// one that only moved its epoch.
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

/// Replaces the applier's pages on disk: each has the image of the old state.
fn overwrite_on_disk(turn: &mut Turn<'_>, disk_pages: &DiskPages, target: &RestoreTarget, point: LogPoint) {
    let RestoreTarget { pages, images, .. } = target;
    let is_on_disk = |page: PageId| {
        let at = pages.binary_search_by_key(&page, |info| info.page);
        at.is_ok_and(|at| pages[at].place == Place::Disk)
    };
    turn.applied.on_disk.retain(is_on_disk);
    let changed = pages.iter().filter(|info| info.lsn == point.lsn && info.place == Place::Disk);
    for info in changed {
        // The images were proven before the restore was logged, and the table names them: their files stay.
        let image = images.get(&info.page).map(|image| disk_pages.proven_image(*image, info.len));
        turn.versions.moved_to_disk(info.page);
        turn.applied.on_disk.insert(info.page, disk_pages.page(image));
    }
    disk_pages.note(pages.iter().map(|info| info.place));
}

/// Replaces the applier's pages in memory. When it returns, memory holds the old state.
fn overwrite(
    turn: &mut Turn<'_>,
    source: &DiskSource,
    device: &dyn Device,
    staging: &StagingPool,
    target: &RestoreTarget,
    point: LogPoint,
) -> Result<()> {
    let RestoreTarget { pages, root, images } = target;
    turn.applied.table.replace(point.lsn, pages.iter().cloned(), root.clone());
    turn.applied.table.index_keys().expect("the old state had unique keys");
    turn.applied.point = point;
    // All pages ascend.
    let staying = |page: PageId| {
        let at = pages.binary_search_by_key(&page, |info| info.page).ok()?;
        Some((pages[at].place, pages[at].len))
    };
    // Memory that goes, goes first: the budget has room only for the pages that stay (I10).
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
    // The images were proven before the restore was logged. They are read again, because they are not
    // kept in memory, and a read that fails once gets a second chance: memory is half overwritten by then.
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
