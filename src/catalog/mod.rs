//! The catalog of the files that are kept on disk besides the log: snapshots, tables of old states, and the
//! images that they need.

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

pub(crate) use self::classify::{Beginning, LOOK_PAGES, SnapshotWork};
pub(crate) use self::known_images::{KnownImages, ReplayImages};
pub(crate) use self::lock::CatalogLock;
pub(crate) use self::newest::{ImageTotals, Link, NewestSnapshot};
use crate::images::numbers::ImageFiles;

/// A snapshot that is kept, as a caller sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SnapshotInfo {
    /// The snapshot's number.
    pub id: SnapshotId,
    /// The user's name for it: a named snapshot is kept until it is pruned by its name.
    pub name: Option<String>,
    /// When it was written, in milliseconds since 1970. A thin snapshot has the time of the one that it
    /// replaces.
    pub created_unix_ms: u64,
    /// Replay starts after this batch.
    pub redo: Lsn,
    /// The state that the snapshot and the log from `redo` on lead to.
    pub end: Lsn,
    /// Number of pages.
    pub pages: u64,
    /// Bytes of the pages' images.
    pub bytes: u64,
    /// Bytes of the images that it wrote itself: of the pages that had changed since the snapshot before. It
    /// shares the others with that one. (For the oldest snapshot that was found at open, this may count some
    /// images of the one before.)
    pub bytes_written: u64,
    /// Whether the snapshot was read back past the cache.
    pub verified: bool,
}

/// A snapshot that is kept, and the files that it needs.
#[derive(Clone)]
pub(crate) struct RetainedSnapshot {
    pub info: SnapshotInfo,
    pub redo: LogPoint,
    /// The snapshot's images lie in files of lower numbers.
    pub next_file: u64,
    /// The image files, with the bytes that the snapshot names in each.
    pub files: BTreeMap<u64, u64>,
    /// The links that the snapshot's own link follows, the newest first.
    pub links: Vec<SnapshotId>,
    pub manifest_crc: u32,
    /// Whether a durable record names it. An open finds it by that, unless it is the newest one (I7).
    pub is_recorded: bool,
    /// Whether nothing that the snapshot needs was found damaged since the store was opened. A snapshot that
    /// is not sound stands in for no other; nothing on disk says so.
    pub is_sound: bool,
}

impl RetainedSnapshot {
    /// Makes the catalog's entry of a snapshot. `manifest` is the snapshot's own link, whole or not; `is_own`
    /// tells the image files that were written for it, and `sums` covers all its pages.
    pub fn new(
        manifest: &Manifest,
        is_own: impl Fn(u64) -> bool,
        sums: ImageTotals,
        links: Vec<SnapshotId>,
        manifest_crc: u32,
        verified: bool,
    ) -> Self {
        assert!(manifest.redo.lsn <= manifest.end); // I7: the log leads from the images to the end.
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
                // Of an overlay without its base: that was written before.
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

/// The table of an old state that a restore record names, and the files that it needs.
#[derive(Clone)]
pub(crate) struct RetainedTable {
    /// The Lsn of the restore.
    pub restored_at: Lsn,
    pub files: BTreeSet<u64>,
}

/// The catalog of an open store, and the next numbers.
pub(crate) struct Catalog {
    pub snapshots: BTreeMap<SnapshotId, RetainedSnapshot>,
    pub tables: BTreeMap<u64, RetainedTable>,
    /// Replay may start at this `redo` and later ones, as the last seal says. `None` while the log from its
    /// beginning is kept.
    pub floor: Option<Lsn>,
    /// The newest batch at the open, if a manifest or a table could not be read then. Nothing says which
    /// files that one needs (I8). So no file of an earlier run goes until the floor has passed this batch.
    pub unread: Option<Lsn>,
    pub next_snapshot: u64,
    pub files: Arc<ImageFiles>,
    /// The images that need not be written again.
    pub known: Arc<KnownImages>,
    /// Lengths of image files in bytes, without their headers, as far as a caller asked for them.
    pub file_lens: BTreeMap<u64, u64>,
}

impl Catalog {
    /// Whether the log after a snapshot is kept.
    pub fn reaches(&self, kept: &RetainedSnapshot) -> bool {
        self.floor.is_none_or(|floor| kept.redo.lsn >= floor)
    }

    /// Copies the catalog for callers that only look.
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

    /// The most bytes that any kept snapshot names of an image file. What only older snapshots name comes
    /// free when they go.
    pub fn live_bytes(&self, file: u64) -> u64 {
        self.snapshots.values().filter_map(|kept| kept.files.get(&file)).max().copied().unwrap_or(0)
    }

    /// Whether a kept table names an image file. It does not say how much of it.
    pub fn is_in_table(&self, file: u64) -> bool {
        self.tables.values().any(|table| table.files.contains(&file))
    }

    /// The image files that a kept snapshot or table names.
    pub fn named_files(&self) -> BTreeSet<u64> {
        let by_snapshots = self.snapshots.values().flat_map(|kept| kept.files.keys());
        let by_tables = self.tables.values().flat_map(|table| &table.files);
        by_snapshots.chain(by_tables).copied().collect()
    }
}

/// Makes a manifest's entry for a page.
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
