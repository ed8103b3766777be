//! Manifests, which list the pages of a snapshot and their images.
//!
//! A snapshot consists of a base, or of a base and a chain of changes. The base and each change are separate files.
//! Each change names the previous link by number and checksum. The table of an earlier state has the layout of a base
//! and another kind; a restore names it.
//!
//! ```text
//! snapshots/<n>.manifest
//! 0      copy: header (256 bytes), entries, tombstones, root; zeros up to a multiple of 4096
//! half   the same copy again
//! ```
//!
//! The images of a snapshot are captured at different times. They include every batch up to `redo`, and replay starts
//! after that point. Once replay has reached `end`, all pages represent the same Lsn. A manifest is published after
//! everything that it names is synced (I7).

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

/// The kind of a manifest: a base, a change, or a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ManifestKind {
    /// A base. It lists all pages of a snapshot.
    Base,
    /// A change. It lists only the pages that changed since the previous link of the chain.
    Change {
        /// The number of the previous link.
        previous: SnapshotId,
        /// The header checksum of the previous link.
        previous_crc: u32,
    },
    /// The page table of an earlier state, which lists all pages. A restore operation names this manifest.
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

/// The description of one page in a snapshot, with the reference to its image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManifestEntry {
    /// The id of the page.
    pub page: PageId,
    /// The key of the page, or `None` if the page has no key.
    pub key: Option<Key>,
    /// The length of the page in bytes.
    pub len: u64,
    /// The epoch of the page.
    pub epoch: Epoch,
    /// The Lsn of the newest batch that changed or moved the page.
    pub lsn: Lsn,
    /// The place of the page.
    pub place: Place,
    /// The metadata of the page.
    pub metadata: SharedMetadata,
    /// The reference to the page's image, or `None` if the page is empty.
    pub image: Option<ImageRef>,
}

/// A record of a deleted page in a manifest. Replay skips operations on this page up to the deletion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tombstone {
    /// The id of the deleted page.
    pub page: PageId,
    /// The batch that deleted the page.
    pub lsn: Lsn,
}

/// The decoded content of a manifest file: one link of a snapshot, or the table of an earlier state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// The kind of the manifest: base, change or table.
    pub kind: ManifestKind,
    /// The id of the store.
    pub store: StoreId,
    /// The number of the snapshot or the table.
    pub snapshot: SnapshotId,
    /// The name that the caller assigned to the snapshot, of 1 to 64 bytes. A table has no name.
    pub name: Option<String>,
    /// The time at which the manifest was created, in milliseconds since 1970.
    pub created_unix_ms: u64,
    /// The point after which replay starts. The images include every batch up to this point.
    pub redo: LogPoint,
    /// The durable mark of the manifest (I4). Replay must apply all batches up to this Lsn.
    pub end: Lsn,
    /// The next page id to assign. All lower ids have been assigned.
    pub next_page: u64,
    /// The highest epoch that any page ever had.
    pub epoch_high: Epoch,
    /// The next number to assign to an image file.
    pub next_file: u64,
    /// A lower bound for the numbers of image files that batches after `redo` name. Zero if the bound is unknown, as in
    /// tables and in manifests of older builds. When the snapshot began, no file with a lower number was being written
    /// for a batch.
    pub ahead_from: u64,
    /// The pages, in the order of their ids.
    pub entries: Vec<ManifestEntry>,
    /// The deleted pages, in the order of their ids.
    pub tombstones: Vec<Tombstone>,
    /// The root of the store as of `end`.
    pub root: Arc<Metadata>,
}

/// The defects of the two copies in a manifest file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyHealth {
    /// The defects of the first and the second copy, in this order. `None` for a valid copy.
    pub defects: [Option<Defect>; 2],
    /// The header checksum of the copy that was decoded. Seals and the next link identify the manifest by this
    /// checksum.
    pub header_crc: u32,
}

impl CopyHealth {
    /// Returns the result for a file whose two copies are valid.
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
    /// Returns the number of entries and tombstones in the manifest. The cost of reading a change depends on this
    /// number.
    #[must_use]
    pub fn changes(&self) -> usize {
        self.entries.len() + self.tombstones.len()
    }
}
