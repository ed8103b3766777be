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

mod gather;
mod retain;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;
use remanent_format::image::ImagePurpose;
use remanent_format::manifest::{Manifest, ManifestKind, Tombstone};
use remanent_format::{Epoch, FileName, LogPoint, Lsn, Metadata, PageId, SnapshotId, StoreId};

use crate::applier::Applier;
use crate::device::Device;
use crate::disk::Disk;
use crate::error::{Error, Result};
use crate::images::ImageWriter;
use crate::keeping::{Keeping, Kept, SnapshotInfo, unix_ms};
use crate::log::{Log, SegmentPool};
use crate::options::Compression;
use crate::phases::{self, Phase};
use crate::poison::Poison;
use crate::publish::{check_published, publish};
use crate::staging::StagingPool;

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
    pub compression: Compression,
    /// Held while a snapshot is taken: one at a time.
    pub keeping: Mutex<Keeping>,
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
        let (disk, purpose) = (self.disk.clone(), ImagePurpose::Snapshot);
        let mut writer = match ImageWriter::create(disk, self.store, number, purpose, self.compression) {
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
            name: None,
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
        Ok(Kept::new(manifest, Vec::new(), manifest_crc, false))
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
}

struct End {
    point: LogPoint,
    root: Arc<Metadata>,
    next_page: u64,
    epoch_high: Epoch,
    deleted: HashMap<PageId, Lsn>,
}
