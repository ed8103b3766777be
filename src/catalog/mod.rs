//! The catalog of the files that a store keeps in addition to the log: snapshots, tables of restored states, and the
//! image files that the snapshots and tables name.

pub(crate) mod publish;
mod lock;
mod newest;
mod known_images;
mod classify;
#[cfg(test)]
pub(crate) mod sample;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use remanent_format::image::ImageRef;
use remanent_format::manifest::{Manifest, ManifestEntry};
use remanent_format::{LogPoint, Lsn, Metadata, PageInfo, SnapshotId};

pub(crate) use self::classify::{Beginning, CLASSIFIED_AT_ONCE, SnapshotWork};
pub(crate) use self::known_images::{KnownImages, ReplayImages};
pub(crate) use self::lock::CatalogLock;
pub(crate) use self::newest::{ImageTotals, Link, NewestSnapshot};
use crate::images::numbers::ImageFiles;

/// Information about a kept snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SnapshotInfo {
    /// The id of the snapshot.
    pub id: SnapshotId,
    /// The name of the snapshot, or `None` if it has no name. A named snapshot is kept until its name is removed.
    pub name: Option<String>,
    /// The creation time in milliseconds since the Unix epoch. A thin snapshot has the time of the snapshot that it
    /// replaces.
    pub created_unix_ms: u64,
    /// The last batch applied before the snapshot began. Replay starts after this batch.
    pub redo: Lsn,
    /// The last batch applied before the snapshot ended. Replaying the log from `redo` to this batch restores its
    /// state.
    pub end: Lsn,
    /// The number of pages in the snapshot.
    pub pages: u64,
    /// The total size of the pages' images in bytes.
    pub bytes: u64,
    /// The total size in bytes of the images that were written for this snapshot. For the oldest snapshot that an open
    /// found, the size may include images of the previous snapshot.
    pub bytes_written: u64,
    /// Whether the snapshot's files were read back from the disk, bypassing the page cache, and were intact.
    pub verified: bool,
    /// The root of the snapshot's state.
    pub root: Arc<Metadata>,
}

/// The catalog entry of a kept snapshot, including the files that the snapshot needs.
#[derive(Clone)]
pub(crate) struct RetainedSnapshot {
    pub info: SnapshotInfo,
    pub redo: LogPoint,
    /// A file number greater than that of every image file of the snapshot.
    pub next_file: u64,
    /// The number of bytes that the snapshot names in each image file, by file number.
    pub files: BTreeMap<u64, u64>,
    /// The links that precede the snapshot's own link, newest first.
    pub links: Vec<SnapshotId>,
    pub manifest_crc: u32,
    /// Whether a durable record names the snapshot. Without such a record, an open finds the snapshot only if it is the
    /// newest snapshot (I7).
    pub is_recorded: bool,
    /// Whether no damage was found since the open in the data that the snapshot needs. A damaged snapshot does not
    /// replace an older snapshot. This flag is not stored on disk.
    pub is_sound: bool,
}

impl RetainedSnapshot {
    /// Creates the catalog entry of a snapshot. `manifest` is the snapshot's own link, complete or not. `is_own`
    /// returns whether an image file was written for the snapshot. `sums` contains the totals of all images that the
    /// snapshot names.
    pub fn new(
        manifest: &Manifest,
        is_own: impl Fn(u64) -> bool,
        sums: ImageTotals,
        links: Vec<SnapshotId>,
        manifest_crc: u32,
        verified: bool,
    ) -> Self {
        assert!(manifest.redo.lsn <= manifest.end); // I7: a replay from `redo` reaches the end.
        let images = manifest.entries.iter().filter_map(|entry| entry.image);
        let written = images.filter(|image| is_own(image.file));
        let ImageTotals { pages, bytes, files } = sums;
        Self {
            info: SnapshotInfo {
                id: manifest.snapshot,
                name: manifest.name.clone(),
                created_unix_ms: manifest.created_unix_ms,
                redo: manifest.redo.lsn,
                end: manifest.end,
                pages,
                bytes,
                // The bytes of an overlay do not include its base, which an earlier snapshot wrote.
                bytes_written: written.map(|image| image.stored_len).sum(),
                verified,
                root: manifest.root.clone(),
            },
            redo: manifest.redo,
            next_file: manifest.next_file,
            files,
            links,
            manifest_crc,
            is_recorded: verified,
            is_sound: true,
        }
    }
}

/// The table of a restored state, and the files that the table needs. A restore record in the log names the table.
#[derive(Clone)]
pub(crate) struct RetainedTable {
    /// The Lsn of the restore that created the table.
    pub restored_at: Lsn,
    pub files: BTreeSet<u64>,
}

/// The snapshots, tables and image files of an open store, and the numbers of the next snapshot and file.
pub(crate) struct Catalog {
    pub snapshots: BTreeMap<SnapshotId, RetainedSnapshot>,
    pub tables: BTreeMap<u64, RetainedTable>,
    /// The oldest `redo` from which replay may start, according to the last seal. `None` if the log is kept from its
    /// first batch.
    pub floor: Option<Lsn>,
    /// The newest batch at the open if a manifest or a table could not be read during the open, otherwise `None`. The
    /// files that the unreadable manifest or table needs are unknown (I8), so no file that was written before this open
    /// is removed until the floor has passed this batch.
    pub unread: Option<Lsn>,
    pub next_snapshot: u64,
    pub files: Arc<ImageFiles>,
    /// The images that are already on disk, so that a snapshot need not write them again.
    pub known: Arc<KnownImages>,
    /// The lengths of image files in bytes, without their headers, by file number. Contains only lengths that were
    /// requested before.
    pub file_lens: BTreeMap<u64, u64>,
}

impl Catalog {
    /// Returns whether the log from the snapshot's `redo` on is kept.
    pub fn reaches(&self, kept: &RetainedSnapshot) -> bool {
        self.floor.is_none_or(|floor| kept.redo.lsn >= floor)
    }

    /// Returns whether every sound named snapshot is in a durable record.
    pub fn are_named_recorded(&self) -> bool {
        self.snapshots.values().all(|kept| kept.is_recorded || kept.info.name.is_none() || !kept.is_sound)
    }

    /// Returns the point at which the kept log begins. Returns `None` if no snapshot begins at the floor. The kept log
    /// then begins earlier than any snapshot needs.
    pub fn replay_start(&self) -> Option<LogPoint> {
        let floor = self.floor?;
        let starts = self.snapshots.values().map(|kept| kept.redo).filter(|redo| redo.lsn == floor);
        starts.min_by_key(|redo| (redo.segment, redo.offset))
    }

    /// Copies the parts of the catalog that read-only callers need.
    fn copy(&self) -> Self {
        Self {
            snapshots: self.snapshots.clone(),
            tables: self.tables.clone(),
            floor: self.floor,
            unread: self.unread,
            next_snapshot: self.next_snapshot,
            files: self.files.clone(),
            known: self.known.clone(),
            file_lens: BTreeMap::new(),
        }
    }

    /// Returns the largest number of bytes of image file `file` that a single kept snapshot names. Bytes that only
    /// older snapshots name are freed when those snapshots are removed.
    pub fn live_bytes(&self, file: u64) -> u64 {
        self.snapshots.values().filter_map(|kept| kept.files.get(&file)).max().copied().unwrap_or(0)
    }

    /// Returns whether a kept table names image file `file`. A table does not record how many bytes of the file it
    /// needs.
    pub fn is_in_table(&self, file: u64) -> bool {
        self.tables.values().any(|table| table.files.contains(&file))
    }

    /// Returns the numbers of the image files that a kept snapshot or table names.
    pub fn named_files(&self) -> BTreeSet<u64> {
        let by_snapshots = self.snapshots.values().flat_map(|kept| kept.files.keys());
        let by_tables = self.tables.values().flat_map(|table| &table.files);
        by_snapshots.chain(by_tables).copied().collect()
    }
}

/// Creates the manifest entry of a page.
pub(crate) fn entry(info: &PageInfo, image: Option<ImageRef>) -> ManifestEntry {
    ManifestEntry {
        page: info.page,
        key: info.key.clone(),
        len: info.len,
        epoch: info.epoch,
        lsn: info.lsn,
        place: info.place,
        metadata: info.metadata.clone(),
        image,
    }
}
