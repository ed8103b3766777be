//! The catalog of the files that are kept on disk in addition to the log: snapshots, tables of restored states, and the
//! images that these need.

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
use remanent_format::{LogPoint, Lsn, PageInfo, SnapshotId};

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
    /// The name of the snapshot, if it has one. A named snapshot is kept until its name is given up.
    pub name: Option<String>,
    /// The time of creation in milliseconds since 1970. A thin snapshot has the time of the snapshot that it replaces.
    pub created_unix_ms: u64,
    /// The batch after which replay starts.
    pub redo: Lsn,
    /// The batch whose state the snapshot and the log from `redo` on produce.
    pub end: Lsn,
    /// The number of pages.
    pub pages: u64,
    /// The total size of the pages' images in bytes.
    pub bytes: u64,
    /// The number of image bytes written for this snapshot, which contain the pages that had changed since the previous
    /// snapshot. For the oldest snapshot found at an open, the number may include some images of the previous snapshot.
    pub bytes_written: u64,
    /// Whether the snapshot was read back past the cache.
    pub verified: bool,
}

/// A kept snapshot, with the files that it needs.
#[derive(Clone)]
pub(crate) struct RetainedSnapshot {
    pub info: SnapshotInfo,
    pub redo: LogPoint,
    /// A file number above those of all images of the snapshot.
    pub next_file: u64,
    /// The image files, with the number of bytes in each that the snapshot names.
    pub files: BTreeMap<u64, u64>,
    /// The links that the snapshot's own link follows, newest first.
    pub links: Vec<SnapshotId>,
    pub manifest_crc: u32,
    /// Whether a durable record names the snapshot. An open finds a snapshot through that record, unless it is the
    /// newest (I7).
    pub is_recorded: bool,
    /// Whether no damage was found since the open in data that the snapshot needs. A snapshot that is not sound
    /// replaces no other. The flag is not recorded on disk.
    pub is_sound: bool,
}

impl RetainedSnapshot {
    /// Creates the catalog entry of a snapshot. `manifest` is the snapshot's own link, complete or not. `is_own`
    /// returns whether an image file was written for the snapshot, and `sums` contains the totals of all its pages.
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
                // The bytes of an overlay do not include its base, which was written earlier.
                bytes_written: written.map(|image| image.stored_len).sum(),
                verified,
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

/// The table of a restored state, which a restore record names, with the files that it needs.
#[derive(Clone)]
pub(crate) struct RetainedTable {
    /// The Lsn of the restore.
    pub restored_at: Lsn,
    pub files: BTreeSet<u64>,
}

/// The catalog of an open store, and the next numbers of snapshots and files.
pub(crate) struct Catalog {
    pub snapshots: BTreeMap<SnapshotId, RetainedSnapshot>,
    pub tables: BTreeMap<u64, RetainedTable>,
    /// The oldest `redo` from which replay may start, according to the last seal. `None` while the log is kept from its
    /// beginning.
    pub floor: Option<Lsn>,
    /// The newest batch at the open, if a manifest or a table could not be read then. The files that it needs are
    /// unknown (I8), so no file of an earlier run is removed until the floor has passed this batch.
    pub unread: Option<Lsn>,
    pub next_snapshot: u64,
    pub files: Arc<ImageFiles>,
    /// The images that need not be written again.
    pub known: Arc<KnownImages>,
    /// The lengths of image files in bytes, without their headers, as far as they were requested.
    pub file_lens: BTreeMap<u64, u64>,
}

impl Catalog {
    /// Returns whether the log after a snapshot is kept.
    pub fn reaches(&self, kept: &RetainedSnapshot) -> bool {
        self.floor.is_none_or(|floor| kept.redo.lsn >= floor)
    }

    /// Returns the point at which the kept log begins. Returns `None` if no snapshot begins at the floor, in which case
    /// retention keeps log that no snapshot needs.
    pub fn replay_start(&self) -> Option<LogPoint> {
        let floor = self.floor?;
        let starts = self.snapshots.values().map(|kept| kept.redo).filter(|redo| redo.lsn == floor);
        starts.min_by_key(|redo| (redo.segment, redo.offset))
    }

    /// Copies the catalog for read-only callers.
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

    /// Returns the maximum number of bytes of an image file that any kept snapshot names. The bytes that only older
    /// snapshots name are freed together with them.
    pub fn live_bytes(&self, file: u64) -> u64 {
        self.snapshots.values().filter_map(|kept| kept.files.get(&file)).max().copied().unwrap_or(0)
    }

    /// Returns whether a kept table names an image file. Tables do not record how many of its bytes they need.
    pub fn is_in_table(&self, file: u64) -> bool {
        self.tables.values().any(|table| table.files.contains(&file))
    }

    /// Returns the image files that a kept snapshot or table names.
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
