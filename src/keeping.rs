//! Floor 5. What is kept on disk besides the log: snapshots, tables of old states, the files they need.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{SystemTime, UNIX_EPOCH};

use remanent_format::image::ImageRef;
use remanent_format::manifest::{Manifest, ManifestEntry};
use remanent_format::{LogPoint, Lsn, PageInfo, SnapshotId};

/// A snapshot that is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SnapshotInfo {
    /// Its number.
    pub id: SnapshotId,
    /// Replay starts after this batch.
    pub redo: Lsn,
    /// The state that it stands for, with the log from `redo` on.
    pub end: Lsn,
    /// Number of pages.
    pub pages: u64,
    /// Bytes of their images.
    pub bytes: u64,
    /// Whether it was read back past the cache.
    pub verified: bool,
}

/// A snapshot that is kept, and what it needs.
pub(crate) struct Kept {
    pub info: SnapshotInfo,
    pub redo: LogPoint,
    pub files: BTreeSet<u64>,
    /// The links that its own follows, the newest first.
    pub links: Vec<SnapshotId>,
    pub manifest_crc: u32,
}

impl Kept {
    /// `manifest` is the whole snapshot, its links merged.
    pub fn new(manifest: &Manifest, links: Vec<SnapshotId>, manifest_crc: u32, verified: bool) -> Self {
        let images = || manifest.entries.iter().filter_map(|entry| entry.image.as_ref());
        Self {
            info: SnapshotInfo {
                id: manifest.snapshot,
                redo: manifest.redo.lsn,
                end: manifest.end,
                pages: manifest.entries.len() as u64,
                bytes: images().map(|image| image.stored_len).sum(),
                verified,
            },
            redo: manifest.redo,
            files: images().map(|image| image.file).collect(),
            links,
            manifest_crc,
        }
    }
}

/// The table of an old state that a restore record names, and what it needs.
pub(crate) struct KeptTable {
    /// The restore's batch.
    pub restored_at: Lsn,
    pub files: BTreeSet<u64>,
}

/// What is kept on disk, and the next numbers.
pub(crate) struct Keeping {
    pub snapshots: BTreeMap<SnapshotId, Kept>,
    pub tables: BTreeMap<u64, KeptTable>,
    pub next_snapshot: u64,
    pub next_file: u64,
}

impl Keeping {
    /// The image files that something kept names.
    pub fn named_files(&self) -> BTreeSet<u64> {
        let by_snapshots = self.snapshots.values().map(|kept| &kept.files);
        let by_tables = self.tables.values().map(|table| &table.files);
        by_snapshots.chain(by_tables).flatten().copied().collect()
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
