//! Alignments and limits of the format. A reader compares every length from disk with its limit before using the
//! length.

/// Alignment in bytes of groups, segment headers, chunks and manifest copies.
pub const GROUP_ALIGN: u64 = 4096;
/// Alignment in bytes of frames within a group, operations and image payloads.
pub const FRAME_ALIGN: u64 = 16;
/// Size of the smallest write that a medium performs atomically, in bytes.
pub const SECTOR_LEN: usize = 512;

/// Maximum of an Lsn, an epoch or a file number. Page ids are below this value. Adding small numbers to it cannot
/// overflow a `u64`.
pub const NUMBER_MAX: u64 = 1 << 62;
/// Minimum length of a segment, in bytes.
pub const SEGMENT_LEN_MIN: u64 = 16 << 10;
/// Maximum length of a segment, in bytes. Exception: a segment that contains one longer frame can be twice as long.
pub const SEGMENT_LEN_MAX: u64 = 4 << 30;
/// Maximum length of a frame payload, in bytes.
pub const FRAME_PAYLOAD_LEN_MAX: u64 = 1 << 30;

/// Maximum length of a page key, in bytes.
pub const KEY_LEN_MAX: usize = 64;
/// Maximum length of a page, in bytes.
pub const PAGE_LEN_MAX: u64 = 1 << 40;
/// Maximum ordinal of a logical device slot.
pub const DEVICE_ORDINAL_MAX: u32 = 63;
/// Maximum length of the encoding of a page's metadata, in bytes.
pub const METADATA_LEN_MAX: usize = 64 << 10;
/// Maximum length of the encoding of the root, in bytes.
pub const ROOT_LEN_MAX: usize = 1 << 20;
/// Maximum nesting depth of lists and maps in a metadata value.
pub const VALUE_DEPTH_MAX: usize = 32;
/// Maximum length of the name of a metadata or root entry, in bytes.
pub const NAME_LEN_MAX: usize = 255;
/// Maximum length of a note in a batch, in bytes.
pub const NOTE_LEN_MAX: usize = 64 << 10;
/// Maximum length of an identity blob, in bytes.
pub const IDENTITY_LEN_MAX: usize = 64 << 10;
/// Maximum number of ancestors of a store. A store shares image files with its ancestors.
pub const ANCESTORS_MAX: usize = 64;
/// Maximum length of the STORE record, in bytes: the identity blob, the ancestors and 57 bytes of other fields.
pub const STORE_RECORD_LEN_MAX: usize = IDENTITY_LEN_MAX + 16 * ANCESTORS_MAX + 57;
/// Maximum number of images in one chunk.
pub const CHUNK_IMAGES_MAX: u32 = 1 << 16;
/// Maximum length of a chunk, in bytes. A chunk can contain a page of the maximum length.
pub const CHUNK_LEN_MAX: u64 = 2 * PAGE_LEN_MAX;
/// Maximum number of links in the chain of a snapshot, including the base.
pub const CHAIN_LINKS_MAX: usize = 64;
/// Maximum length of a snapshot name, in bytes.
pub const SNAPSHOT_NAME_LEN_MAX: usize = 64;
/// Maximum number of entries in a manifest. The number of tombstones has the same maximum.
pub const MANIFEST_ENTRIES_MAX: u64 = 1 << 32;
/// Maximum length of the body of one manifest copy, in bytes.
pub const MANIFEST_BODY_LEN_MAX: u64 = 1 << 40;

/// Rounds `value` up to a multiple of `align`, which must be a power of two.
///
/// If the result does not fit in a `u64`, returns the largest multiple that fits.
#[must_use]
pub const fn align_up(value: u64, align: u64) -> u64 {
    assert!(align.is_power_of_two());
    match value.checked_add(align - 1) {
        Some(sum) => sum & !(align - 1),
        None => !(align - 1),
    }
}
