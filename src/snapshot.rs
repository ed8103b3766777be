//! Floor 6. Snapshots: fuzzy, published in order, verified, and what they allow to be recycled.
//!
//! A snapshot stops nobody. In its phases:
//!
//! 1. **Begin** (a turn of the applier): `redo` is the last batch applied; note the pages that exist; from
//!    here on the applier notes deletes.
//! 2. **Gather** (a turn a chunk): pages are copied aside on the device, in lane order with the deltas,
//!    each with its table entry of that moment; the copy drains to disk while commits go on.
//! 3. **End** (a turn): `end` is the last batch applied; root, numbers, and tombstones of pages that were
//!    deleted before they were gathered.
//! 4. **Sync** the image file and its name; wait until the log is durable up to `end` (I7).
//! 5. **Publish** the manifest. From this rename on a crash starts from here.
//! 6. **Verify**: read images and manifest back past the cache; record that in a seal.
//! 7. **Recycle** what neither a kept snapshot nor the log behind the oldest of them needs (I8).
//!
//! A crash in 1 to 4 leaves an image file that is nobody's; in 5 to 7, a snapshot that the next open
//! publishes and verifies again. No space in 2 to 5 is a clean failure; everything else poisons.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;
use remanent_format::frame::VerifiedSnapshot;
use remanent_format::limits::{FRAME_ALIGN, align_up};
use remanent_format::manifest::{Manifest, ManifestEntry, ManifestKind, Tombstone};
use remanent_format::{
    Epoch, FileName, Folder, LogPoint, Lsn, Metadata, PageId, PageInfo, SnapshotId, StoreId,
};

use crate::applier::Applier;
use crate::device::{Command, CommandList, Device, Fence, Lane, MemoryId, Span, StagingSpan};
use crate::disk::Disk;
use crate::error::{Error, Result};
use crate::images::{CHUNK_BYTES, ImageWriter};
use crate::keeping::{Keeping, Kept, SnapshotInfo, entry, unix_ms};
use crate::log::{Log, SegmentPool};
use crate::phases::{self, Phase};
use crate::poison::Poison;
use crate::publish::{check_published, publish};
use crate::staging::{StagingBuf, StagingPool};

/// Pages of one chunk: a bound for stores of tiny ones.
const CHUNK_PAGES: usize = 4096;

/// Takes snapshots and recycles what they make superfluous.
pub(crate) struct Snapshots {
    pub disk: Arc<dyn Disk>,
    pub store: StoreId,
    pub device: Arc<dyn Device>,
    pub staging: Arc<StagingPool>,
    pub applier: Arc<Applier>,
    pub log: Arc<Log>,
    pub pool: Arc<SegmentPool>,
    pub poison: Arc<Poison>,
    pub count_kept: usize,
    pub log_kept: u64,
    /// Held while a snapshot is taken: one at a time.
    pub keeping: Mutex<Keeping>,
}

/// Pages caught by one gather.
struct Caught {
    pages: Vec<(PageInfo, usize)>,
    area: MemoryId,
    len: usize,
    fence: Fence,
}

impl Snapshots {
    /// Takes a full snapshot.
    pub fn take(&self) -> Result<SnapshotInfo> {
        let mut keeping = self.keeping.lock();
        self.take_holding(&mut keeping)
    }

    /// Takes a full snapshot for a caller who holds the lock on what is kept.
    pub fn take_holding(&self, keeping: &mut Keeping) -> Result<SnapshotInfo> {
        self.poison.check()?;
        let taken = self.write(keeping).and_then(|info| match self.retain(keeping) {
            // No space to record it: the snapshot stands, only nothing is recycled for it.
            Ok(()) | Err(Error::DiskFull { .. }) => Ok(info),
            Err(error) => Err(error),
        });
        taken.map_err(|error| match error {
            Error::DiskFull { .. } | Error::Closed | Error::OutOfMemory { .. } => error,
            error => self.poison.set(error),
        })
    }

    /// The snapshots kept, oldest first.
    pub fn list(&self) -> Vec<SnapshotInfo> {
        self.keeping.lock().snapshots.values().map(|kept| kept.info).collect()
    }

    /// Phases 1 to 6.
    fn write(&self, keeping: &mut Keeping) -> Result<SnapshotInfo> {
        let (redo, pages) = self.applier.turn(|turn| {
            turn.applied.deleted = Some(HashMap::new());
            let pages: Vec<(PageId, u64)> =
                turn.applied.table.pages().map(|info| (info.page, info.len)).collect();
            Ok((turn.applied.point, pages))
        })?;
        let number = keeping.next_file;
        let mut writer = match ImageWriter::create(self.disk.clone(), self.store, number) {
            Ok(writer) => writer,
            Err(error) => {
                self.stop_watching()?;
                return Err(error);
            }
        };
        let written = self.gather_all(&mut writer, &pages);
        let (entries, end) = match written.and_then(|entries| Ok((entries, self.end()?))) {
            Ok(written) => written,
            Err(error) => {
                writer.abandon();
                self.stop_watching()?;
                return Err(error);
            }
        };
        let caught: BTreeSet<PageId> = entries.iter().map(|entry| entry.page).collect();
        let tombstones = pages.iter().filter(|(page, _)| !caught.contains(page)).map(|(page, _)| Tombstone {
            page: *page,
            lsn: *end.deleted.get(page).expect("a page that could not be gathered was deleted"),
        });
        let manifest = Manifest {
            kind: ManifestKind::Base,
            store: self.store,
            snapshot: SnapshotId(keeping.next_snapshot),
            created_unix_ms: unix_ms(),
            redo,
            end: end.point.lsn,
            next_page: end.next_page,
            epoch_high: end.epoch_high,
            next_file: number + 1,
            tombstones: tombstones.collect(),
            entries,
            root: end.root,
        };
        // From here on the numbers are taken, whatever happens: a name is never used for two contents.
        keeping.next_file += 1;
        keeping.next_snapshot += 1;
        if let Err(error) = writer.sync() {
            writer.abandon();
            return Err(error);
        }
        self.log.wait_durable(manifest.end)?; // I7
        let kept = match self.publish_manifest(&manifest) {
            Ok(kept) => kept,
            // Only a full disk leaves it certain that no manifest names the images.
            Err(error @ Error::DiskFull { .. }) => {
                writer.abandon();
                return Err(error);
            }
            Err(error) => return Err(error),
        };
        writer.verify()?;
        let info = SnapshotInfo { verified: true, ..kept.info };
        keeping.snapshots.insert(info.id, Kept { info, ..kept });
        tracing::info!(snapshot = %info.id, redo = %info.redo, end = %info.end, bytes = info.bytes, "snapshot published");
        Ok(info)
    }

    /// Ends the watch for deletes that a failed snapshot began.
    fn stop_watching(&self) -> Result<()> {
        self.applier.turn(|turn| {
            turn.applied.deleted = None;
            Ok(())
        })
    }

    /// Publishes a manifest and reads it back past the cache. On a full disk it may use the reserve.
    pub fn publish_manifest(&self, manifest: &Manifest) -> Result<Kept> {
        let _phase = phases::enter(Phase::Publish);
        let file = FileName::Manifest(manifest.snapshot.0);
        let bytes = manifest.encode().map_err(|defect| Error::from(defect.at(file, 0)))?;
        let published = publish(&self.disk, file, manifest.snapshot.0, &bytes);
        if let Err(Error::DiskFull { .. }) = published
            && self.pool.release_reserve()?
        {
            publish(&self.disk, file, manifest.snapshot.0, &bytes)?;
        } else {
            published?;
        }
        let manifest_crc = check_published(&self.disk, file, &bytes)?;
        Ok(Kept::new(manifest, manifest_crc, false))
    }

    /// Phase 2.
    fn gather_all(&self, writer: &mut ImageWriter, pages: &[(PageId, u64)]) -> Result<Vec<ManifestEntry>> {
        let mut entries = Vec::with_capacity(pages.len());
        let mut rest = pages;
        while !rest.is_empty() {
            let _phase = phases::enter(Phase::SnapshotGather);
            let mut bytes = 0;
            let count = rest.iter().take(CHUNK_PAGES).take_while(|(_, len)| {
                let fits = bytes == 0 || bytes + len <= CHUNK_BYTES;
                bytes += len;
                fits
            });
            let (chunk, after) = rest.split_at(count.count().max(1));
            rest = after;
            let caught = self.gather(chunk.iter().map(|(page, _)| *page).collect())?;
            let drained = self.drain(&caught)?;
            let images: Vec<(&PageInfo, &[u8])> = caught
                .pages
                .iter()
                .filter(|(info, _)| info.len > 0)
                .map(|(info, at)| (info, &drained[*at..*at + info.len as usize]))
                .collect();
            let mut references =
                if images.is_empty() { Vec::new() } else { writer.write_chunk(&images)? }.into_iter();
            for (info, _) in &caught.pages {
                let image = if info.len > 0 { references.next() } else { None };
                entries.push(entry(info, image));
            }
            self.staging.give(drained.into_staging());
        }
        entries.sort_unstable_by_key(|entry| entry.page);
        Ok(entries)
    }

    /// Copies pages aside on the device, in lane order with the deltas. Pages that are gone are left out.
    fn gather(&self, pages: Vec<PageId>) -> Result<Caught> {
        let device = self.device.clone();
        self.applier.turn(move |turn| {
            turn.intact()?;
            let mut caught = Vec::with_capacity(pages.len());
            let mut sources = Vec::new();
            let mut at = 0;
            for page in pages {
                let Some(info) = turn.applied.table.get(page).cloned() else { continue };
                if info.len > 0 {
                    sources.push((turn.applied.memory[&page].span(), at));
                }
                let here = at as usize;
                at = align_up(at + info.len, FRAME_ALIGN);
                caught.push((info, here));
            }
            // The area is scratch: it lives for one chunk and belongs to no page, so no budget covers it.
            let place = caught.first().map_or(remanent_format::Place::Host, |(info, _)| info.place);
            let area = device.allocate(place, at)?;
            let target = Span { memory: area, offset: 0, len: at };
            let list =
                CommandList { commands: vec![Command::Gather { sources, target }], staging: Vec::new() };
            match turn.submit(list) {
                Ok(pending) => Ok(Caught { pages: caught, area, len: at as usize, fence: pending.fence() }),
                Err(error) => {
                    give_back(device.release(area));
                    Err(error)
                }
            }
        })
    }

    /// Brings a gathered area to the host, on a lane of its own, and gives the area back.
    fn drain(&self, caught: &Caught) -> Result<StagingBuf> {
        let Caught { area, len, fence, .. } = *caught;
        let queued = self.staging.take(len).and_then(|staging| {
            self.device.after(Lane::Drain, fence)?;
            let source = Span { memory: area, offset: 0, len: len as u64 };
            let target = StagingSpan { index: 0, offset: 0, len };
            let commands = vec![Command::Download { source, target }];
            self.device.submit(Lane::Drain, CommandList { commands, staging: vec![staging.into_staging()] })
        });
        let drained = match queued {
            // An area whose last use cannot be waited for is not given back: it may still be in use.
            Ok(pending) => pending.finish(&*self.device)?,
            Err(error) => {
                give_back(self.device.wait(fence).and_then(|()| self.device.release(area)));
                return Err(error);
            }
        };
        self.device.release(area)?;
        Ok(StagingBuf::new(drained.into_iter().next().expect("one staging went in"), len))
    }

    /// Phase 3.
    fn end(&self) -> Result<End> {
        self.applier.turn(|turn| {
            let table = &turn.applied.table;
            Ok(End {
                point: turn.applied.point,
                root: table.root().clone(),
                next_page: table.next_page(),
                epoch_high: table.epoch_high(),
                deleted: turn.applied.deleted.take().unwrap_or_default(),
            })
        })
    }

    /// Phases 6 (the record of it) and 7.
    pub fn retain(&self, keeping: &mut Keeping) -> Result<()> {
        let verified: Vec<SnapshotId> =
            keeping.snapshots.values().filter(|kept| kept.info.verified).map(|kept| kept.info.id).collect();
        let oldest = verified.iter().rev().nth(self.count_kept - 1).copied();
        let kept_ids = |id: &SnapshotId| oldest.is_none_or(|oldest| *id >= oldest);
        let record = keeping.snapshots.values().filter(|kept| kept.info.verified && kept_ids(&kept.info.id));
        let record =
            record.map(|kept| VerifiedSnapshot { snapshot: kept.info.id, manifest_crc: kept.manifest_crc });
        // Only a record that is durable licenses recycling: a manifest that a lost rename takes away must
        // not have cost us the one before.
        self.log.record_verified(record.collect())?;
        let Some(oldest) = oldest else { return Ok(()) };
        let _phase = phases::enter(Phase::Recycle);
        keeping.snapshots.retain(|id, _| *id >= oldest);
        let redo = keeping.snapshots[&oldest].redo;
        keeping.tables.retain(|_, table| table.restored_at > redo.lsn);

        // Manifests first, and durably, then what only they named. Manifests that could not be read go
        // with the ones of their age.
        let manifests = |file: &FileName| matches!(file, FileName::Manifest(id) if *id < oldest.0);
        self.remove_all(Folder::Snapshots, manifests)?;
        self.remove_unnamed_images(keeping)?;
        let bound = self.log_bound(redo.segment)?;
        let segments = self.numbers(Folder::Log, |file| match file {
            FileName::Segment(number) if number < bound => Some(number),
            _ => None,
        })?;
        self.pool.recycle(&segments)
    }

    /// Removes image files and tables that nothing kept names.
    pub fn remove_unnamed_images(&self, keeping: &Keeping) -> Result<()> {
        let named = keeping.named_files();
        self.remove_all(Folder::Pages, |file| match file {
            FileName::Pages(number) => !named.contains(number),
            FileName::Table(number) => !keeping.tables.contains_key(number),
            _ => false,
        })
    }

    /// The lowest segment to keep when replay may start in `needed`: lower, if the caller wants more log.
    fn log_bound(&self, needed: u64) -> Result<u64> {
        let mut older = self.numbers(Folder::Log, |file| match file {
            FileName::Segment(number) if number < needed => Some(number),
            _ => None,
        })?;
        let (mut bound, mut kept_bytes) = (needed, 0);
        while kept_bytes < self.log_kept
            && let Some(number) = older.pop()
        {
            kept_bytes += self.disk.open(FileName::Segment(number), false)?.len()?;
            bound = number;
        }
        Ok(bound)
    }

    fn numbers(&self, folder: Folder, wanted: impl Fn(FileName) -> Option<u64>) -> Result<Vec<u64>> {
        let names = self.disk.list(folder)?;
        Ok(names.iter().filter_map(|name| FileName::parse(folder, name)).filter_map(wanted).collect())
    }

    fn remove_all(&self, folder: Folder, unwanted: impl Fn(&FileName) -> bool) -> Result<()> {
        let names = self.disk.list(folder)?;
        let files: Vec<FileName> = names
            .iter()
            .filter_map(|name| FileName::parse(folder, name))
            .filter(|file| unwanted(file))
            .collect();
        for file in &files {
            self.disk.remove(*file)?;
        }
        if files.is_empty() { Ok(()) } else { self.disk.sync_folder(folder) }
    }
}

struct End {
    point: LogPoint,
    root: Arc<Metadata>,
    next_page: u64,
    epoch_high: Epoch,
    deleted: HashMap<PageId, Lsn>,
}

/// After a failure: a second one, in giving scratch memory back, is only noted.
fn give_back(released: Result<()>) {
    if let Err(error) = released {
        tracing::warn!(%error, "cannot give a gathered area back");
    }
}
