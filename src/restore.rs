//! Floor 6. Going back to a snapshot's state, by going forward: one more batch that replaces everything.
//!
//! The caller holds the submission lock and the lock on what is kept, so that nothing is committed and no
//! snapshot is taken meanwhile.
//!
//! 1. Rebuild the old state from disk, every byte checked. Until here nothing has changed.
//! 2. Write a table of it: pages that changed since get an epoch above the highest ever given, so that
//!    preconditions cannot be fooled; images that are not exact are written anew. Synced.
//! 3. Log the restore record that names the table; wait until it is durable. From here on recovery arrives
//!    at the restored state.
//! 4. Replace the tables, overwrite memory. A failure here poisons: tables and disk are right, memory is
//!    not, and is not read any more.
//!
//! The caller then takes a snapshot, so that a later open need not replay the restore. A crash before 3
//! leaves a table that no record names. No space in 2 or 3 is a clean failure; everything else after 1
//! poisons.

use std::collections::HashMap;
use std::sync::Arc;

use remanent_format::image::{ImagePurpose, ImageRef};
use remanent_format::manifest::{Manifest, ManifestEntry, ManifestKind};
use remanent_format::op::{Op, PayloadWriter};
use remanent_format::rebuild::{RebuildOptions, Rebuilt, Survey, rebuild};
use remanent_format::store::StoreFile;
use remanent_format::{Epoch, FileName, Folder, LogPoint, Lsn, PageId, PageInfo, PageTable, SnapshotId};

use crate::applier::{Applier, Turn};
use crate::device::{Command, CommandList, Device, Pending, StagingSpan};
use crate::disk::Disk;
use crate::error::{Error, Result};
use crate::images::{ImageWriter, next_chunk};
use crate::keeping::{Keeping, KeptTable, entry, unix_ms};
use crate::log::{Log, SpacePurpose};
use crate::options::{Budget, Compression};
use crate::poison::Poison;
use crate::publish::{check_published, publish};
use crate::source::DiskSource;
use crate::staging::StagingPool;

/// What a restore works with.
pub(crate) struct Restore<'a> {
    pub disk: &'a Arc<dyn Disk>,
    pub store: &'a StoreFile,
    pub device: &'a dyn Device,
    pub staging: &'a Arc<StagingPool>,
    pub applier: &'a Applier,
    pub log: &'a Log,
    pub budget: &'a Budget,
    pub compression: Compression,
    pub poison: &'a Poison,
}

impl Restore<'_> {
    /// Takes everything back to the state of `snapshot`; returns the restore's own place in the log.
    pub fn run(
        &self,
        snapshot: SnapshotId,
        submitted: &mut PageTable,
        keeping: &mut Keeping,
    ) -> Result<LogPoint> {
        self.poison.check()?;
        let kept = keeping.snapshots.get(&snapshot).ok_or(Error::NoSnapshot { snapshot })?;
        // 1.
        self.log.wait_durable(submitted.lsn())?;
        let source = DiskSource::new(self.disk.clone());
        let options =
            RebuildOptions { base: Some(snapshot), until: Some(kept.info.end), ..RebuildOptions::default() };
        let old = rebuild(&source, &options)?;
        self.budget.check(old.table.pages().map(|info| (info.place, info.len)))?;
        let manifest = Survey::read(&source)?.snapshot(snapshot)?;
        // 2.
        let lsn = submitted.lsn().next();
        let epoch = Epoch(submitted.epoch_high().0 + 1);
        let pages: Vec<PageInfo> =
            old.table.pages().map(|info| at_restore(info, submitted, lsn, epoch)).collect();
        // The number is taken, whatever happens: a name is never used for two contents.
        let number = keeping.next_file;
        keeping.next_file += 1;
        let table = self.write_table(&pages, &old, &manifest, submitted, lsn, epoch, number);
        // 3.
        let logged = table.and_then(|(table_crc, entries)| {
            let mut payload = PayloadWriter::default();
            let record = Op::Restore { table: number, table_crc, restored: old.table.lsn() };
            payload.push(&record).map_err(|defect| Error::from(defect.at(FileName::Table(number), 0)))?;
            let payload = payload.finish();
            let point = self.log.append(&payload, crc32fast::hash(&payload), SpacePurpose::User)?;
            Ok((point, entries))
        });
        let (point, entries) = logged.map_err(|error| self.give_up(number, error))?;
        let files = entries.iter().filter_map(|entry| entry.image).map(|image| image.file).collect();
        keeping.tables.insert(number, KeptTable { restored_at: lsn, files });
        // The next snapshot names the table's images: they need not be written again.
        for entry in entries.iter().filter(|entry| entry.lsn == lsn) {
            keeping.known.note(entry.page, lsn, entry.image);
        }
        self.log.wait_durable(point.lsn)?;
        // 4.
        let root = old.table.root().clone();
        let overwritten = self.overwrite(pages.clone(), old, point);
        // Whatever became of memory, this is the state now.
        submitted.replace(point.lsn, pages, root);
        submitted.index_keys().expect("the old state had unique keys");
        overwritten.map_err(|error| self.poison.set(error))?;
        tracing::info!(%snapshot, lsn = %point.lsn, "restored");
        Ok(point)
    }

    /// Step 2: images that are not exact, then the table. Returns its checksum, and its entries.
    #[expect(clippy::too_many_arguments, reason = "one call, one purpose: the parts of a manifest")]
    fn write_table(
        &self,
        pages: &[PageInfo],
        old: &Rebuilt,
        manifest: &Manifest,
        submitted: &PageTable,
        lsn: Lsn,
        epoch: Epoch,
        number: u64,
    ) -> Result<(u32, Vec<ManifestEntry>)> {
        // An image is exact if the page did not change between its capture and the snapshot's end.
        let images: HashMap<PageId, (Lsn, Option<ImageRef>)> =
            manifest.entries.iter().map(|entry| (entry.page, (entry.lsn, entry.image))).collect();
        let exact = |info: &PageInfo| {
            let (caught, image) = images.get(&info.page)?;
            let then = old.table.get(info.page)?;
            (*caught == then.lsn).then_some(*image)
        };
        let stale: Vec<&PageInfo> =
            pages.iter().filter(|info| info.len > 0 && exact(info).is_none()).collect();
        let fresh = if stale.is_empty() { HashMap::new() } else { self.write_images(&stale, old, number)? };
        let entries: Vec<ManifestEntry> = pages
            .iter()
            .map(|info| entry(info, fresh.get(&info.page).copied().or_else(|| exact(info).flatten())))
            .collect();
        let table = Manifest {
            kind: ManifestKind::Table,
            store: self.store.store,
            snapshot: SnapshotId(number),
            name: None,
            created_unix_ms: unix_ms(),
            redo: LogPoint::default(),
            end: lsn,
            next_page: submitted.next_page(),
            epoch_high: epoch,
            next_file: number + 1,
            entries: entries.clone(),
            tombstones: Vec::new(),
            root: old.table.root().clone(),
        };
        let file = FileName::Table(number);
        let bytes = table.encode().map_err(|defect| Error::from(defect.at(file, 0)))?;
        publish(self.disk, file, number, &bytes)?;
        let table_crc = check_published(self.disk, file, &bytes)?;
        Ok((table_crc, entries))
    }

    fn write_images(
        &self,
        stale: &[&PageInfo],
        old: &Rebuilt,
        number: u64,
    ) -> Result<HashMap<PageId, ImageRef>> {
        let mut fresh = HashMap::new();
        let (store, purpose) = (self.store.store, ImagePurpose::Snapshot);
        let mut writer = ImageWriter::create(self.disk.clone(), store, number, purpose, self.compression)?;
        let mut rest = stale;
        while !rest.is_empty() {
            let (chunk, after) = rest.split_at(next_chunk(rest.iter().map(|info| info.len)));
            rest = after;
            let images: Vec<(&PageInfo, &[u8])> =
                chunk.iter().map(|info| (*info, old.contents[&info.page].as_slice())).collect();
            let references = writer.write_chunk(&images)?;
            fresh.extend(chunk.iter().map(|info| info.page).zip(references));
        }
        writer.sync()?;
        writer.verify()?;
        Ok(fresh)
    }

    /// Ends a restore of which nothing was logged. After a full disk all goes on as if it had never begun;
    /// after any other failure the next open removes what is left, or nothing ever names it.
    fn give_up(&self, number: u64, error: Error) -> Error {
        if !matches!(error, Error::DiskFull { .. }) {
            return self.poison.set(error);
        }
        let present = self.disk.list(Folder::Pages).unwrap_or_default();
        for file in [FileName::Table(number), FileName::Pages(number)] {
            if present.contains(&file.name())
                && let Err(error) = self.disk.remove(file)
            {
                tracing::warn!(%error, "cannot remove what an unfinished restore wrote");
            }
        }
        error
    }

    /// Step 4.
    fn overwrite(&self, pages: Vec<PageInfo>, old: Rebuilt, point: LogPoint) -> Result<()> {
        let staging = self.staging.clone();
        let pending = self.applier.turn(move |turn| {
            overwrite(turn, &staging, pages, old, point).inspect_err(|error| turn.lose(error))
        })?;
        for list in pending {
            let used = list.finish(self.device).map_err(|error| self.lose(error))?;
            used.into_iter().for_each(|used| self.staging.give(used));
        }
        Ok(())
    }

    /// Memory is neither the old state nor the new one: nobody may read it.
    fn lose(&self, error: Error) -> Error {
        let reason = error.clone();
        let told = self.applier.turn(move |turn| {
            turn.lose(&reason);
            Ok(())
        });
        told.err().unwrap_or(error)
    }
}

/// A page of the old state, as it is after the restore: one that did not change since keeps its version.
fn at_restore(info: &PageInfo, now: &PageTable, lsn: Lsn, epoch: Epoch) -> PageInfo {
    let unchanged =
        now.get(info.page).is_some_and(|current| (current.epoch, current.lsn) == (info.epoch, info.lsn));
    let mut info = info.clone();
    if !unchanged {
        (info.lsn, info.epoch) = (lsn, epoch);
    }
    info
}

/// Replaces the applier's pages.
fn overwrite(
    turn: &mut Turn<'_>,
    staging: &Arc<StagingPool>,
    pages: Vec<PageInfo>,
    old: Rebuilt,
    point: LogPoint,
) -> Result<Vec<Pending>> {
    turn.applied.table.replace(point.lsn, pages.iter().cloned(), old.table.root().clone());
    turn.applied.table.index_keys().expect("the old state had unique keys");
    turn.applied.point = point;
    let wanted: HashMap<PageId, &PageInfo> = pages.iter().map(|info| (info.page, info)).collect();
    // What goes, goes first: the budget holds for what stays.
    let last_use = turn.submit(CommandList::default())?.fence();
    let fits = |page: &PageId, len: u64| wanted.get(page).is_some_and(|info| info.len == len);
    let leaving: Vec<PageId> = turn
        .applied
        .memory
        .iter()
        .filter(|(page, memory)| !fits(page, memory.byte_len()))
        .map(|(page, _)| *page)
        .collect();
    for page in leaving {
        let memory = turn.applied.memory.remove(&page).expect("listed just now");
        turn.arena.retire(memory, last_use);
    }
    let mut pending = Vec::new();
    for info in pages.iter().filter(|info| info.lsn == point.lsn) {
        if !turn.applied.memory.contains_key(&info.page) {
            let memory = turn.arena.allocate(info.place, info.len)?;
            turn.applied.memory.insert(info.page, memory);
        }
        if info.len > 0 {
            let bytes = &old.contents[&info.page];
            let mut staged = staging.take(bytes.len())?;
            staged.copy_from_slice(bytes);
            let source = StagingSpan { index: 0, offset: 0, len: bytes.len() };
            let commands = vec![Command::Upload { source, target: turn.applied.memory[&info.page].span() }];
            pending.push(turn.submit(CommandList { commands, staging: vec![staged.into_staging()] })?);
        }
    }
    Ok(pending)
}
