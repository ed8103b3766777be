//! The fixed structures of a manifest.

use crate::ids::{Epoch, LogPoint, Lsn, PageId, SnapshotId, StoreId};
use crate::image::Codec;
use crate::layout::layout;
use crate::limits::{GROUP_ALIGN, align_up};

/// The first bytes of each copy of a manifest.
pub const MANIFEST_MAGIC: [u8; 8] = *b"RMNTMANI";
/// Entries start on multiples of this many bytes, counted from the start of the body.
pub const ENTRY_ALIGN: u64 = 8;

pub(super) const KIND_BASE: u32 = 1;
pub(super) const KIND_CHANGE: u32 = 2;
pub(super) const KIND_TABLE: u32 = 3;

layout! {
    /// The bytes of a manifest's header; the body follows.
    pub struct ManifestHeaderRaw: 256 {
        /// The magic `RMNTMANI`.
        0 => magic: [u8; 8],
        /// Format version, 1.
        8 => version: u32,
        /// 1: base, 2: change, 3: table of an old state.
        12 => kind: u32,
        /// The store's id.
        16 => store: StoreId,
        /// The snapshot's number, or the table's, as in the file's name.
        32 => snapshot: SnapshotId,
        /// The link before; zero unless this is a change.
        40 => previous: SnapshotId,
        /// The header checksum of the link before; zero unless this is a change.
        48 => previous_crc: u32,
        /// Reserved, always zero.
        52 => flags: u32,
        /// When the manifest was written, in milliseconds since 1970.
        56 => created_unix_ms: u64,
        /// The point where replay starts: every batch up to here is in the images.
        64 => redo: LogPoint,
        /// Reserved, always zero.
        100 => reserved: u32,
        /// The Lsn that replay must reach at least.
        104 => end: Lsn,
        /// The next page id; all ids below it are used.
        112 => next_page: u64,
        /// The highest epoch that any page ever had.
        120 => epoch_high: Epoch,
        /// The next number of an image file.
        128 => next_file: u64,
        /// Number of entries.
        136 => entry_count: u64,
        /// Number of tombstones.
        144 => tombstone_count: u64,
        /// Length of the body.
        152 => body_len: u64,
        /// CRC-32 of the body.
        160 => body_crc: u32,
        /// Length of the name; zero if there is none.
        164 => name_len: u8,
        /// The name, then zeros.
        165 => name: [u8; 64],
        /// Reserved, always zero.
        229 => reserved_2: [u8; 3],
        /// Image files of batches below this number belong to batches up to `redo`; zero if that is not
        /// known.
        232 => ahead_from: u64,
        /// Reserved, always zero.
        240 => reserved_3: [u8; 12],
        /// CRC-32 of the bytes before; the link's own checksum.
        252 => header_crc: u32,
    }
}

layout! {
    /// The fixed start of an entry. The base of an overlay follows, if the image is one; then key, metadata
    /// envelope and zeros up to a multiple of 8.
    pub struct ManifestEntryRaw: 80 {
        /// The page's id.
        0 => page: PageId,
        /// Its epoch in the image.
        8 => epoch: Epoch,
        /// The newest batch that changed or moved it, in the image.
        16 => lsn: Lsn,
        /// The page's length.
        24 => len: u64,
        /// The image file's number; zero, as all fields of the image, if the page is empty.
        32 => image_file: u64,
        /// The payload's offset, in bytes from the image file's start.
        40 => image_offset: u64,
        /// Length of the payload as it is stored.
        48 => stored_len: u64,
        /// CRC-32 of the payload as it is stored.
        56 => stored_crc: u32,
        /// CRC-32 of the page's bytes.
        60 => raw_crc: u32,
        /// The place's ordinal.
        64 => place_ordinal: u32,
        /// Length of the metadata envelope.
        68 => metadata_len: u32,
        /// How the payload is stored; 2 is an overlay, whose base follows.
        72 => codec: u8,
        /// The place's kind.
        73 => place_kind: u8,
        /// Length of the key; zero if there is none.
        74 => key_len: u8,
        /// Reserved, always zero.
        75 => reserved: [u8; 5],
    }
}

layout! {
    /// What an entry says of the base of an overlay.
    pub struct OverlayBaseRaw: 16 {
        /// The base's image file.
        0 => file: u64,
        /// Length of the base's payload as it is stored.
        8 => stored_len: u64,
    }
}

layout! {
    /// The bytes of a tombstone.
    pub struct TombstoneRaw: 16 {
        /// The page that was deleted.
        0 => page: PageId,
        /// The batch that deleted it.
        8 => lsn: Lsn,
    }
}

impl ManifestEntryRaw {
    /// Where the key begins, counted from the entry's start.
    pub(super) fn key_at(&self) -> usize {
        Self::LEN + if Codec::is_overlay(self.codec) { OverlayBaseRaw::LEN } else { 0 }
    }
}

/// Bytes of one copy, padding included.
pub(super) fn copy_len(body_len: u64) -> u64 {
    align_up(ManifestHeaderRaw::LEN as u64 + body_len, GROUP_ALIGN)
}
