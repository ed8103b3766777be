//! Structures of a manifest with a fixed layout.

use crate::ids::{Epoch, LogPoint, Lsn, PageId, SnapshotId, StoreId};
use crate::image::Codec;
use crate::layout::layout;
use crate::limits::{GROUP_ALIGN, align_up};

/// Magic bytes at the start of each copy of a manifest.
pub const MANIFEST_MAGIC: [u8; 8] = *b"RMNTMANI";
/// Alignment in bytes of the entries in the body of a manifest.
pub const ENTRY_ALIGN: u64 = 8;

pub(super) const KIND_BASE: u32 = 1;
pub(super) const KIND_CHANGE: u32 = 2;
pub(super) const KIND_TABLE: u32 = 3;

layout! {
    /// The encoded header of a manifest. The body follows.
    pub struct ManifestHeaderRaw: 256 {
        /// Magic bytes, always `RMNTMANI`.
        0 => magic: [u8; 8],
        /// Format version; always 1.
        8 => version: u32,
        /// Kind of the manifest. 1: base, 2: change, 3: table of an earlier state.
        12 => kind: u32,
        /// The id of the store.
        16 => store: StoreId,
        /// Number of the snapshot or table. The file name contains the same number.
        32 => snapshot: SnapshotId,
        /// Number of the previous link if the kind is a change; zero for other kinds.
        40 => previous: SnapshotId,
        /// Header checksum of the previous link if the kind is a change; zero for other kinds.
        48 => previous_crc: u32,
        /// Reserved, always zero.
        52 => flags: u32,
        /// Time at which the manifest was created, in milliseconds since 1970.
        56 => created_unix_ms: u64,
        /// Point after which replay starts. The images include every batch up to this point.
        64 => redo: LogPoint,
        /// Reserved, always zero.
        100 => reserved: u32,
        /// Durable mark. Replay must apply all batches up to this Lsn.
        104 => end: Lsn,
        /// Next page id to assign. All lower ids have been assigned.
        112 => next_page: u64,
        /// Highest epoch that any page ever had.
        120 => epoch_high: Epoch,
        /// Next number to assign to an image file.
        128 => next_file: u64,
        /// Number of entries in the body.
        136 => entry_count: u64,
        /// Number of tombstones in the body.
        144 => tombstone_count: u64,
        /// Length of the body in bytes.
        152 => body_len: u64,
        /// CRC-32 of the body.
        160 => body_crc: u32,
        /// Length of the name in bytes, or zero if the snapshot has no name.
        164 => name_len: u8,
        /// Name of the snapshot, padded with zeros.
        165 => name: [u8; 64],
        /// Reserved, always zero.
        229 => reserved_2: [u8; 3],
        /// Lower bound for the numbers of image files that batches after `redo` name, or zero if unknown.
        232 => ahead_from: u64,
        /// Reserved, always zero.
        240 => reserved_3: [u8; 12],
        /// CRC-32 of the preceding bytes. Seals and the next link identify this manifest by this checksum.
        252 => header_crc: u32,
    }
}

layout! {
    /// The fixed part of an encoded entry. It is followed by the base of an overlay, the key, the metadata envelope,
    /// and zeros up to a multiple of 8.
    pub struct ManifestEntryRaw: 80 {
        /// Id of the page.
        0 => page: PageId,
        /// Epoch of the page in the image.
        8 => epoch: Epoch,
        /// Lsn of the newest batch in the image that changed or moved the page.
        16 => lsn: Lsn,
        /// Length of the page in bytes.
        24 => len: u64,
        /// Number of the image file. Zero if the page is empty, as are all other image fields.
        32 => image_file: u64,
        /// Offset of the payload, in bytes from the start of the image file.
        40 => image_offset: u64,
        /// Length of the stored payload in bytes.
        48 => stored_len: u64,
        /// CRC-32 of the stored payload.
        56 => stored_crc: u32,
        /// CRC-32 of the page's bytes.
        60 => raw_crc: u32,
        /// Ordinal of the page's place.
        64 => place_ordinal: u32,
        /// Length of the metadata envelope in bytes.
        68 => metadata_len: u32,
        /// Encoding of the payload. 0: uncompressed, 1: zstd, 2: overlay.
        72 => codec: u8,
        /// Number that represents the kind of the page's place.
        73 => place_kind: u8,
        /// Length of the key in bytes, or zero if the page has no key.
        74 => key_len: u8,
        /// Reserved, always zero.
        75 => reserved: [u8; 5],
    }
}

layout! {
    /// The encoded reference from an overlay to its base. The reference follows the fixed part of an entry.
    pub struct OverlayBaseRaw: 16 {
        /// Number of the image file that contains the base.
        0 => file: u64,
        /// Length of the base's stored payload in bytes.
        8 => stored_len: u64,
    }
}

layout! {
    /// The encoded record that a page was deleted.
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

/// Returns the length of one copy of a manifest in bytes, including padding.
pub(super) fn copy_len(body_len: u64) -> u64 {
    align_up(ManifestHeaderRaw::LEN as u64 + body_len, GROUP_ALIGN)
}
