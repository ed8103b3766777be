//! Manifests: the files that say which pages and images a snapshot consists of.
//!
//! A snapshot is a base, or a base and a chain of changes; each is one file, and each names the link
//! before it by number and checksum. The table of an old state, which a restore record names, has the
//! same bytes under another kind.
//!
//! ```text
//! snapshots/<n>.manifest
//! 0      copy: header (256 bytes), entries, tombstones, root; zeros up to a multiple of 4096
//! half   the same copy again
//! ```
//!
//! `redo` and `end` make a fuzzy snapshot exact. Every batch up to `redo` is in the images, and replay starts
//! after that point. Only once replay has reached `end` do all pages stand at one Lsn. A manifest is
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

pub use self::chain::{check_link, merge};
pub(crate) use self::chain::{merged_entries, overlaid};
pub use self::decode::Share;
pub(crate) use self::decode::SingleThread;
pub use self::encode::EncodedEntries;
pub use self::layout::{
    ENTRY_ALIGN, MANIFEST_MAGIC, ManifestEntryRaw, ManifestHeaderRaw, OverlayBaseRaw, TombstoneRaw,
};
use self::layout::{KIND_BASE, KIND_CHANGE, KIND_TABLE};

/// Which part a manifest plays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ManifestKind {
    /// A base names all pages.
    Base,
    /// The pages that changed since the link before.
    Change {
        /// The link before.
        previous: SnapshotId,
        /// Its header checksum.
        previous_crc: u32,
    },
    /// All pages of an old state that a restore record names.
    Table,
}

impl ManifestKind {
    /// The kind's number on disk.
    #[must_use]
    pub fn to_raw(self) -> u32 {
        match self {
            ManifestKind::Base => KIND_BASE,
            ManifestKind::Change { .. } => KIND_CHANGE,
            ManifestKind::Table => KIND_TABLE,
        }
    }
}

/// A page as its snapshot caught it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManifestEntry {
    /// The page's id.
    pub page: PageId,
    /// The user's name for it.
    pub key: Option<Key>,
    /// Its length in bytes.
    pub len: u64,
    /// The page's epoch.
    pub epoch: Epoch,
    /// The newest batch that changed or moved it.
    pub lsn: Lsn,
    /// The page's place.
    pub place: Place,
    /// The page's metadata.
    pub metadata: SharedMetadata,
    /// Its bytes; none if and only if the page is empty.
    pub image: Option<ImageRef>,
}

/// A page that was deleted while the snapshot was taken, or since the link before: replay skips it.
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
    /// The part that the file plays in a snapshot.
    pub kind: ManifestKind,
    /// The store's id.
    pub store: StoreId,
    /// The snapshot's number, or the table's.
    pub snapshot: SnapshotId,
    /// The user's name for the snapshot: 1 to 64 bytes of UTF-8. A table has none.
    pub name: Option<String>,
    /// When it was written, in milliseconds since 1970.
    pub created_unix_ms: u64,
    /// Every batch up to this point is in the images; replay starts after it.
    pub redo: LogPoint,
    /// Replay must reach at least this batch; it is a durable mark (I4).
    pub end: Lsn,
    /// The next page id; all ids below it are used.
    pub next_page: u64,
    /// The highest epoch that any page ever had.
    pub epoch_high: Epoch,
    /// The next number of an image file.
    pub next_file: u64,
    /// No image file of a batch with a lower number was under way when the snapshot began, and no frame above
    /// `redo` names one. So images written ahead in such files belong to batches up to `redo`. Zero if that
    /// is not known, as in a table and in manifests of older builds.
    pub ahead_from: u64,
    /// The pages, ascending.
    pub entries: Vec<ManifestEntry>,
    /// The deleted pages, ascending.
    pub tombstones: Vec<Tombstone>,
    /// The root, as captured together with `end`.
    pub root: Arc<Metadata>,
}

/// The state of a manifest's two copies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyHealth {
    /// The defects of the first and the second copy.
    pub defects: [Option<Defect>; 2],
    /// The header checksum of the copy that was taken: the name under which the next link and the seals
    /// know this one.
    pub header_crc: u32,
}

impl CopyHealth {
    /// The health of a manifest with two good copies.
    pub(crate) fn whole(header_crc: u32) -> Self {
        Self { defects: [None, None], header_crc }
    }

    /// Whether both copies are good.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.defects.iter().all(Option::is_none)
    }
}

impl Manifest {
    /// The number of pages that the manifest names. For a change, that is its cost to read and to keep.
    #[must_use]
    pub fn changes(&self) -> usize {
        self.entries.len() + self.tombstones.len()
    }
}
