//! Fixed structures of a manifest.

use crate::ids::{Epoch, LogPoint, Lsn, PageId, SnapshotId, StoreId};
use crate::image::Codec;
use crate::layout::layout;
use crate::limits::{GROUP_ALIGN, align_up};

/// First bytes of each copy of a manifest.
pub const MANIFEST_MAGIC: [u8; 8] = *b"RMNTMANI";
/// Alignment of entries in bytes, relative to the start of the body.
pub const ENTRY_ALIGN: u64 = 8;

pub(super) const KIND_BASE: u32 = 1;
pub(super) const KIND_CHANGE: u32 = 2;
pub(super) const KIND_TABLE: u32 = 3;

layout! {
    /// Encoded manifest header. The body follows.
    pub struct ManifestHeaderRaw: 256 {
        /// The magic `RMNTMANI`.
        0 => magic: [u8; 8],
        /// Format version, 1.
        8 => version: u32,
        /// 1: base, 2: change, 3: table of an old state.
        12 => kind: u32,
        /// The store's id.
        16 => store: StoreId,
        /// Number of the snapshot or table, as in the file name.
        32 => snapshot: SnapshotId,
        /// Previous link; zero unless this is a change.
        40 => previous: SnapshotId,
        /// Header checksum of the previous link; zero unless this is a change.
        48 => previous_crc: u32,
        /// Reserved, always zero.
        52 => flags: u32,
        /// Creation time, in milliseconds since 1970.
        56 => created_unix_ms: u64,
        /// Point where replay starts: every batch up to here is in the images.
        64 => redo: LogPoint,
        /// Reserved, always zero.
        100 => reserved: u32,
        /// Lsn that replay must at least reach.
        104 => end: Lsn,
        /// Next page id to assign; all lower ids have been assigned.
        112 => next_page: u64,
        /// Highest epoch that any page ever had.
        120 => epoch_high: Epoch,
        /// Next number for an image file.
        128 => next_file: u64,
        /// Number of entries.
        136 => entry_count: u64,
        /// Number of tombstones.
        144 => tombstone_count: u64,
        /// Length of the body in bytes.
        152 => body_len: u64,
        /// CRC-32 of the body.
        160 => body_crc: u32,
        /// Length of the name in bytes; zero if there is none.
        164 => name_len: u8,
        /// Name of the snapshot, padded with zeros.
        165 => name: [u8; 64],
        /// Reserved, always zero.
        229 => reserved_2: [u8; 3],
        /// Image files of batches with lower numbers belong to batches up to `redo`; zero if unknown.
        232 => ahead_from: u64,
        /// Reserved, always zero.
        240 => reserved_3: [u8; 12],
        /// CRC-32 of the preceding bytes, by which other structures identify this link.
        252 => header_crc: u32,
    }
}

layout! {
    /// Fixed part of an entry. For an overlay, its base follows; then the key, the metadata envelope, and
    /// zeros up to a multiple of 8.
    pub struct ManifestEntryRaw: 80 {
        /// The page's id.
        0 => page: PageId,
        /// Epoch of the page in the image.
        8 => epoch: Epoch,
        /// Newest batch in the image that changed or moved the page.
        16 => lsn: Lsn,
        /// Length of the page in bytes.
        24 => len: u64,
        /// Number of the image file. Zero, like all fields of the image, if the page is empty.
        32 => image_file: u64,
        /// Offset of the payload, in bytes from the start of the image file.
        40 => image_offset: u64,
        /// Stored length of the payload in bytes.
        48 => stored_len: u64,
        /// CRC-32 of the payload as stored.
        56 => stored_crc: u32,
        /// CRC-32 of the page's bytes.
        60 => raw_crc: u32,
        /// Ordinal of the place.
        64 => place_ordinal: u32,
        /// Length of the metadata envelope in bytes.
        68 => metadata_len: u32,
        /// Encoding of the payload; 2 is an overlay, whose base follows.
        72 => codec: u8,
        /// Kind of the place.
        73 => place_kind: u8,
        /// Length of the key in bytes; zero if the page has none.
        74 => key_len: u8,
        /// Reserved, always zero.
        75 => reserved: [u8; 5],
    }
}

layout! {
    /// Base of an overlay, as an entry names it.
    pub struct OverlayBaseRaw: 16 {
        /// Number of the base's image file.
        0 => file: u64,
        /// Stored length of the base's payload in bytes.
        8 => stored_len: u64,
    }
}

layout! {
    /// An encoded tombstone.
    pub struct TombstoneRaw: 16 {
        /// Page that was deleted.
        0 => page: PageId,
        /// Batch that deleted the page.
        8 => lsn: Lsn,
    }
}

impl ManifestEntryRaw {
    /// Returns the offset of the key from the start of the entry.
    pub(super) fn key_at(&self) -> usize {
        Self::LEN + if Codec::is_overlay(self.codec) { OverlayBaseRaw::LEN } else { 0 }
    }
}

/// Returns the length of one copy in bytes, including padding.
pub(super) fn copy_len(body_len: u64) -> u64 {
    align_up(ManifestHeaderRaw::LEN as u64 + body_len, GROUP_ALIGN)
}
