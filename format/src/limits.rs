//! Alignments and limits. A length read from disk is checked against these before it is used.

/// Groups, segments' headers, chunks and manifests' copies start on multiples of this many bytes.
pub const GROUP_ALIGN: u64 = 4096;
/// Frames within a group, operations and images start on multiples of this many bytes.
pub const FRAME_ALIGN: u64 = 16;
/// The smallest write that a medium makes as a whole.
pub const SECTOR_LEN: usize = 512;

/// The highest page id, Lsn, epoch, or number of a file: so that counting on never overflows.
pub const NUMBER_MAX: u64 = 1 << 62;
/// The shortest segment.
pub const SEGMENT_LEN_MIN: u64 = 16 << 10;
/// The longest segment. A frame that is too long for a segment of the usual length gets one of its own.
pub const SEGMENT_LEN_MAX: u64 = 4 << 30;
/// The longest payload of a frame.
pub const FRAME_PAYLOAD_LEN_MAX: u64 = 1 << 30;

/// The longest key of a page.
pub const KEY_LEN_MAX: usize = 64;
/// The longest page.
pub const PAGE_LEN_MAX: u64 = 1 << 40;
/// The largest number of logical device slots.
pub const DEVICE_ORDINAL_MAX: u32 = 63;
/// The longest encoding of one page's metadata.
pub const METADATA_LEN_MAX: usize = 64 << 10;
/// The longest encoding of the root.
pub const ROOT_LEN_MAX: usize = 1 << 20;
/// The deepest nesting of lists and maps in a value.
pub const VALUE_DEPTH_MAX: usize = 32;
/// The longest name of a metadata or root entry.
pub const NAME_LEN_MAX: usize = 255;
/// The longest note of a batch.
pub const NOTE_LEN_MAX: usize = 64 << 10;
/// The longest identity blob.
pub const IDENTITY_LEN_MAX: usize = 64 << 10;
/// The most stores whose image files a store shares.
pub const ANCESTORS_MAX: usize = 64;
/// The longest record in STORE: the identity blob, the ancestors, and 57 bytes around them.
pub const STORE_RECORD_LEN_MAX: usize = IDENTITY_LEN_MAX + 16 * ANCESTORS_MAX + 57;
/// The most images in one chunk.
pub const CHUNK_IMAGES_MAX: u32 = 1 << 16;
/// The longest chunk: one page of the largest length always fits.
pub const CHUNK_LEN_MAX: u64 = 2 * PAGE_LEN_MAX;
/// The most links of a snapshot, its base among them: up to that number are read before a chain is given up.
pub const CHAIN_LINKS_MAX: usize = 64;
/// The longest name of a snapshot.
pub const SNAPSHOT_NAME_LEN_MAX: usize = 64;
/// The most pages, images or tombstones that one manifest names.
pub const MANIFEST_ENTRIES_MAX: u64 = 1 << 32;
/// The longest body of one copy of a manifest.
pub const MANIFEST_BODY_LEN_MAX: u64 = 1 << 40;

/// The next multiple of `align`, a power of two. Saturates at the top of the range, where no length on
/// disk can lie.
#[must_use]
pub const fn align_up(value: u64, align: u64) -> u64 {
    assert!(align.is_power_of_two());
    match value.checked_add(align - 1) {
        Some(sum) => sum & !(align - 1),
        None => !(align - 1),
    }
}
