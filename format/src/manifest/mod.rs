//! Manifests: files that list the pages and images of a snapshot.
//!
//! A snapshot is a base, or a base and a chain of changes. Each of them is one file, and each change names
//! the previous link by number and checksum. The table of an old state, named by a restore, has the same
//! layout but another kind.
//!
//! ```text
//! snapshots/<n>.manifest
//! 0      copy: header (256 bytes), entries, tombstones, root; zeros up to a multiple of 4096
//! half   the same copy again
//! ```
//!
//! `redo` and `end` make a fuzzy snapshot exact. Every batch up to `redo` is in the images, and replay starts
//! after that point. Only when replay has reached `end` do all pages represent the same Lsn. A manifest is
//! published after everything that it names is synced (I7).

mod chain;
mod check;
mod decode;
mod encode;
mod layout;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use crate::defect::Defect;
use crate::ids::{Epoch, Key, LogPoint, Lsn, PageId, Place, SnapshotId, StoreId};
use crate::image::ImageRef;
use crate::value::{Metadata, SharedMetadata};

pub(crate) use self::chain::{apply_changes, merged_entries};
pub use self::chain::{check_link, merge};
pub(crate) use self::decode::SingleThread;
pub use self::decode::WorkPool;
pub use self::encode::EncodedEntries;
pub use self::layout::{
    ENTRY_ALIGN, MANIFEST_MAGIC, ManifestEntryRaw, ManifestHeaderRaw, OverlayBaseRaw, TombstoneRaw,
};
use self::layout::{KIND_BASE, KIND_CHANGE, KIND_TABLE};

/// The role of a manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ManifestKind {
    /// A base, which names all pages.
    Base,
    /// A change, which names the pages that changed since the previous link.
    Change {
        /// The previous link.
        previous: SnapshotId,
        /// The header checksum of the previous link.
        previous_crc: u32,
    },
    /// The table of an old state, named by a restore. It names all pages.
    Table,
}

impl ManifestKind {
    /// Returns the number that represents the kind on disk.
    #[must_use]
    pub fn to_raw(self) -> u32 {
        match self {
            ManifestKind::Base => KIND_BASE,
            ManifestKind::Change { .. } => KIND_CHANGE,
            ManifestKind::Table => KIND_TABLE,
        }
    }
}

/// A page as captured by a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManifestEntry {
    /// The page's id.
    pub page: PageId,
    /// The user's key for the page.
    pub key: Option<Key>,
    /// The length of the page in bytes.
    pub len: u64,
    /// The page's epoch.
    pub epoch: Epoch,
    /// The newest batch that changed or moved the page.
    pub lsn: Lsn,
    /// The page's place.
    pub place: Place,
    /// The page's metadata.
    pub metadata: SharedMetadata,
    /// The image with the page's bytes; `None` if and only if the page is empty.
    pub image: Option<ImageRef>,
}

/// A page that was deleted while the snapshot was taken, or since the previous link. Replay skips its
/// operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tombstone {
    /// The page's id.
    pub page: PageId,
    /// The batch that deleted it.
    pub lsn: Lsn,
}

/// One link of a snapshot, or the table of an old state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// The role of the manifest.
    pub kind: ManifestKind,
    /// The store's id.
    pub store: StoreId,
    /// The number of the snapshot or the table.
    pub snapshot: SnapshotId,
    /// The user's name for the snapshot: 1 to 64 bytes of UTF-8. A table has none.
    pub name: Option<String>,
    /// Creation time, in milliseconds since 1970.
    pub created_unix_ms: u64,
    /// The point where replay starts: every batch up to here is in the images.
    pub redo: LogPoint,
    /// The batch that replay must at least reach. It is a durable mark (I4).
    pub end: Lsn,
    /// The next page id to assign; all lower ids have been assigned.
    pub next_page: u64,
    /// The highest epoch that any page ever had.
    pub epoch_high: Epoch,
    /// The next number for an image file.
    pub next_file: u64,
    /// A lower bound on the image file numbers of batches after `redo`. When the snapshot began, no image
    /// file of a batch with a lower number was being written, and no frame above `redo` names one, so images
    /// written ahead in lower files belong to batches up to `redo`. Zero if unknown, as in tables and in
    /// manifests of older builds.
    pub ahead_from: u64,
    /// The pages, in ascending order of ids.
    pub entries: Vec<ManifestEntry>,
    /// The deleted pages, in ascending order of ids.
    pub tombstones: Vec<Tombstone>,
    /// The root, captured together with `end`.
    pub root: Arc<Metadata>,
}

/// The condition of a manifest's two copies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyHealth {
    /// The defects of the first and the second copy, if any.
    pub defects: [Option<Defect>; 2],
    /// The header checksum of the copy used, by which the next link and seals identify this manifest.
    pub header_crc: u32,
}

impl CopyHealth {
    /// Describes a manifest with two valid copies.
    pub(crate) fn whole(header_crc: u32) -> Self {
        Self { defects: [None, None], header_crc }
    }

    /// Returns true if both copies are valid.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.defects.iter().all(Option::is_none)
    }
}

impl Manifest {
    /// Returns the number of pages that the manifest names. For a change, this determines its cost.
    #[must_use]
    pub fn changes(&self) -> usize {
        self.entries.len() + self.tombstones.len()
    }
}
