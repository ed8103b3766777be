//! What is kept on disk besides the log: snapshots, tables of old states, the files they need.

pub(crate) mod publish;
mod lock;
mod newest;
mod known_images;
mod classify;
#[cfg(test)]
pub(crate) mod sample;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use remanent_format::image::ImageRef;
use remanent_format::manifest::{Manifest, ManifestEntry};
use remanent_format::{LogPoint, Lsn, PageInfo, SnapshotId};

pub(crate) use self::classify::{Beginning, LOOK_PAGES, SnapshotWork};
pub(crate) use self::known_images::{KnownImages, ReplayImages};
pub(crate) use self::lock::{CatalogGuard, CatalogLock};
pub(crate) use self::newest::{ImageTotals, NewestSnapshot};
use crate::images::numbers::ImageFiles;

/// A snapshot that is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SnapshotInfo {
    /// Its number.
    pub id: SnapshotId,
    /// The user's name for it: a named snapshot is kept until it is pruned by its name.
    pub name: Option<String>,
    /// When it was written, in milliseconds since 1970; of a thin one, when the one was whose place it takes.
    pub created_unix_ms: u64,
    /// Replay starts after this batch.
    pub redo: Lsn,
    /// The state that it stands for, with the log from `redo` on.
    pub end: Lsn,
    /// Number of pages.
    pub pages: u64,
    /// Bytes of their images.
    pub bytes: u64,
    /// Bytes of the images that it wrote itself: of the pages that had changed since the snapshot before. It
    /// shares the others with that one. (Of the oldest that was found at open, some of those of the one before may be
    /// counted, too.)
    pub bytes_written: u64,
    /// Whether it was read back past the cache.
    pub verified: bool,
}

/// A snapshot that is kept, and what it needs.
#[derive(Clone)]
pub(crate) struct RetainedSnapshot {
    pub info: SnapshotInfo,
    pub redo: LogPoint,
    /// Its images lie in files of lower numbers.
    pub next_file: u64,
    /// The image files, with the bytes of each that it names.
    pub files: BTreeMap<u64, u64>,
    /// The links that its own follows, the newest first.
    pub links: Vec<SnapshotId>,
    pub manifest_crc: u32,
    /// Whether nothing that it needs was found damaged since the store was opened. One that does not hold stands
    /// in for no other; nothing on disk says so.
    pub holds: bool,
}

impl RetainedSnapshot {
    /// `manifest` is the snapshot's own link, whole or not; `is_own` tells the image files that were written for
    /// it, and `sums` are those of all its pages.
    pub fn new(
        manifest: &Manifest,
        is_own: impl Fn(u64) -> bool,
        sums: ImageTotals,
        links: Vec<SnapshotId>,
        manifest_crc: u32,
        verified: bool,
    ) -> Self {
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
                bytes_written: written.map(|image| image.stored_len).sum(),
                verified,
            },
            redo: manifest.redo,
            next_file: manifest.next_file,
            files,
            links,
            manifest_crc,
            holds: true,
        }
    }
}

/// The table of an old state that a restore record names, and what it needs.
#[derive(Clone)]
pub(crate) struct RetainedTable {
    /// The restore's batch.
    pub restored_at: Lsn,
    pub files: BTreeSet<u64>,
}

/// What is kept on disk, and the next numbers.
pub(crate) struct Catalog {
    pub snapshots: BTreeMap<SnapshotId, RetainedSnapshot>,
    pub tables: BTreeMap<u64, RetainedTable>,
    /// Replay may start at this `redo` and later ones, as the last seal says; `None` while the log from its
    /// beginning is kept.
    pub floor: Option<Lsn>,
    /// The newest batch at the open, if a manifest or a table could not be read then. Nothing says which files
    /// it needs: until the floor has come so far, none of an earlier run goes.
    pub unread: Option<Lsn>,
    pub next_snapshot: u64,
    pub files: Arc<ImageFiles>,
    /// The images that need not be written again.
    pub known: Arc<KnownImages>,
    /// Lengths of image files in bytes, without their headers, as far as somebody asked.
    pub file_lens: BTreeMap<u64, u64>,
}

impl Catalog {
    /// Whether the log after a snapshot is kept.
    pub fn reaches(&self, kept: &RetainedSnapshot) -> bool {
        self.floor.is_none_or(|floor| kept.redo.lsn >= floor)
    }

    /// A copy, to look at.
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

    /// The image files that something kept names.
    pub fn named_files(&self) -> BTreeSet<u64> {
        let by_snapshots = self.snapshots.values().flat_map(|kept| kept.files.keys());
        let by_tables = self.tables.values().flat_map(|table| &table.files);
        by_snapshots.chain(by_tables).copied().collect()
    }
}

/// A manifest's entry for a page.
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

/// The time, for people: nothing depends on it.
pub(crate) fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}
