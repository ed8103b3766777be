//! The interface between host and kernels: the rows of the tables that a launch reads.
//!
//! `kernels/common.cuh` declares the same structs. Both sides assert the sizes, and a test reads that file and compares
//! the constants. Read `kernels/README.md` first.
//!
//! Every kernel has the signature `kernel(rows, row_count)`, except for the two apply kernels, whose signature is
//! `kernel(parts, part_count, pieces)`. A launch has [`Kernel::grid`] blocks of [`Kernel::threads`] threads in one
//! dimension, and no dynamic shared memory. Every launch has at least one row. A table may be in any memory that the
//! device can read, including mapped pinned memory, aligned to 16 bytes. It must stay unchanged until the launch is
//! done. Addresses are device addresses.
//!
//! The device does not check the contents of a row. The host checks bounds before the launch. [`VALIDATE`] checks
//! indices that only the device has seen, before another kernel uses them.

use remanent_format::Width;

use crate::device::{INDEX_OUT_OF_BOUNDS, INDEX_TWICE};

/// The row of one delta, fill or copy. [`APPLY_BY_WARP`] and [`APPLY_BY_BLOCK`] read it through a [`PartRow`].
///
/// Every copy is a dense piece: tables of these rows describe uploads and downloads through mapped pinned memory,
/// copies on the device, gathers and scatters.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PieceRow {
    /// Address of the range that the piece writes. Any alignment.
    pub target: u64,
    /// The address that the piece reads, by kind:
    ///
    /// - Dense: the new bytes.
    /// - Masked: the bitmap.
    /// - Sparse and pick: the indices, u32 little-endian.
    /// - Fill: not an address, but bytes 0 to 8 of the pattern, repeated to sixteen bytes.
    pub payload: u64,
    /// The second address that the piece reads, by kind:
    ///
    /// - Masked and sparse: the new bytes of the elements.
    /// - Pick: the range that contains the elements.
    /// - Fill: not an address, but bytes 8 to 16 of the pattern.
    pub values: u64,
    /// The number of steps of work. A step is a byte for dense and fill, an element of the range for masked, and an
    /// index for sparse and pick.
    pub steps: u64,
    /// The kind of the piece: one of the `PIECE_` constants.
    pub kind: u32,
    /// The element's width in bytes: 1, 2, 4, 8 or 16. It is 1 for dense and fill.
    pub width: u32,
    /// Padding; always 0.
    pub reserved: u64,
}

/// Kind of a piece whose bytes replace the target.
pub const PIECE_DENSE: u32 = 0;
/// Kind of a piece that replaces the elements whose bit in a bitmap is 1.
pub const PIECE_MASKED: u32 = 1;
/// Kind of a piece that replaces the elements at some indices, which are all different.
pub const PIECE_SPARSE: u32 = 2;
/// Kind of a piece that repeats a pattern over the target.
pub const PIECE_FILL: u32 = 3;
/// Kind of a piece that copies the elements at some indices to consecutive elements of the target.
pub const PIECE_PICK: u32 = 4;

impl PieceRow {
    /// Returns a row that replaces `len` bytes at `target` with those at `payload`.
    #[must_use]
    pub const fn dense(target: u64, payload: u64, len: u64) -> Self {
        Self { target, payload, values: 0, steps: len, kind: PIECE_DENSE, width: 1, reserved: 0 }
    }

    /// Returns a row that replaces elements at `target` with those of `values`, if the element's bit in `bitmap` is 1.
    /// `count` is the number of elements in the range.
    #[must_use]
    pub const fn masked(target: u64, bitmap: u64, values: u64, count: u64, width: Width) -> Self {
        let width = width.bytes() as u32;
        Self { target, payload: bitmap, values, steps: count, kind: PIECE_MASKED, width, reserved: 0 }
    }

    /// Returns a row that replaces `count` elements with `values`. `indices` contains the element numbers, counted from
    /// `target`.
    #[must_use]
    pub const fn sparse(target: u64, indices: u64, values: u64, count: u64, width: Width) -> Self {
        let width = width.bytes() as u32;
        Self { target, payload: indices, values, steps: count, kind: PIECE_SPARSE, width, reserved: 0 }
    }

    /// Returns a row that copies `count` elements of `source` to consecutive elements of `target`. `indices` contains
    /// the element numbers in `source`.
    #[must_use]
    pub const fn pick(target: u64, indices: u64, source: u64, count: u64, width: Width) -> Self {
        Self { kind: PIECE_PICK, ..Self::sparse(target, indices, source, count, width) }
    }

    /// Returns a row that repeats the first `width` bytes of `pattern` over `len` bytes.
    #[must_use]
    pub fn fill(target: u64, pattern: [u8; 16], width: Width, len: u64) -> Self {
        let tile =
            |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| pattern[(at + byte) % width.bytes()]));
        let (payload, values) = (tile(0), tile(8));
        Self { target, payload, values, steps: len, kind: PIECE_FILL, width: 1, reserved: 0 }
    }
}

/// Consecutive pieces that one warp or one block applies in order.
///
/// No two parts of a launch may access the same byte unless both parts only read it. Overlapping pieces are therefore
/// in one part, in Lsn order, or in consecutive launches.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartRow {
    /// Row number of the first piece.
    pub piece_first: u32,
    /// The number of pieces.
    pub piece_count: u32,
    /// The first step of each piece. It is 0 in a part with several pieces, and a multiple of [`MASK_STEPS`] if several
    /// parts share a masked piece.
    pub begin: u64,
    /// The step before which the part stops. If a piece has fewer steps, the part stops at the piece's end.
    pub end: u64,
}

impl PartRow {
    /// Returns a part that covers some consecutive pieces completely.
    #[must_use]
    pub const fn whole(piece_first: u32, piece_count: u32) -> Self {
        Self { piece_first, piece_count, begin: 0, end: u64::MAX }
    }
}

/// Masked pieces are split between parts at multiples of this number of elements. These are whole bytes of the bitmap,
/// and at least 16 bytes of the smallest element.
pub const MASK_STEPS: u64 = 128;

/// A range that [`CRC_CHUNKS`] checksums, or one chunk of such a range.
///
/// A source of up to [`CRC_CHUNK_LEN`] bytes is one chunk with both flags, [`CRC_FIRST`] and [`CRC_LAST`]. A longer
/// source is split from its *end*, so that only the first chunk is shorter. All chunks then combine with one constant.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CrcRow {
    /// Address of the first byte. Any alignment.
    pub source: u64,
    /// Address of the four-byte result. The result is the CRC-32, at any alignment, if the row has both flags.
    /// Otherwise the result is the chunk's remainder for [`CRC_COMBINE`], at a multiple of 4.
    pub target: u64,
    /// Number of bytes, at most [`CRC_CHUNK_LEN`]. It may be 0 only in a row with both flags.
    pub len: u32,
    /// [`CRC_FIRST`], [`CRC_LAST`], both or neither.
    pub flags: u32,
}

/// Flag: the chunk contains its source's first byte.
pub const CRC_FIRST: u32 = 1;
/// Flag: the chunk contains its source's last byte.
pub const CRC_LAST: u32 = 2;
/// The longest chunk, in bytes, and the length of every chunk except a source's first. A team of lanes processes a
/// chunk in steps of 2 KiB, each of which waits for memory: on an H100, one launch over one chunk of 64 KiB takes 21
/// µs, over one chunk of 8 KiB 11 µs.
pub const CRC_CHUNK_LEN: u32 = 8 << 10;

/// A source of several chunks, whose contiguous remainders [`CRC_COMBINE`] combines into a CRC-32.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CombineRow {
    /// Address of the first chunk's remainder; a multiple of 4.
    pub remainders: u64,
    /// Address of the four bytes of the CRC-32. Any alignment.
    pub target: u64,
    /// Number of chunks, at least 2.
    pub count: u32,
    /// Padding; always 0.
    pub reserved: u32,
}

/// Two ranges, or two sections of longer ranges, whose differing elements [`DIFF`] finds.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiffRow {
    /// Address of the first range. Any alignment.
    pub left: u64,
    /// Address of the second range. Any alignment.
    pub right: u64,
    /// Address of the bits: one for each element, lowest first, in whole bytes. Unused bits of the last byte
    /// are 0.
    pub target: u64,
    /// Number of bytes in each of the two ranges; whole elements. In all but the last row of a longer range, it is a
    /// multiple of eight elements.
    pub len: u32,
    /// The element's width in bytes.
    pub width: u32,
}

/// The number of bytes that a row of [`DIFF`] should not exceed, so that enough blocks share a long range.
pub const DIFF_LEN_MAX: u32 = 64 << 10;

/// The number of indices that a row of [`VALIDATE`] should not exceed, so that enough blocks share a long list.
pub const INDEX_COUNT_MAX: u64 = 16 << 10;

/// The number of bitmap bytes that a row of [`SELECT_COUNT`] and [`SELECT_EMIT`] should not exceed, so that enough
/// blocks share a long bitmap. A multiple of 4.
pub const SELECT_LEN_MAX: u32 = 8 << 10;

/// A bitmap, or a section of a longer one. Kernels count its set bits and convert them to indices.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SelectRow {
    /// Address of the bits, lowest first. Any alignment.
    pub bits: u64,
    /// Address of the bitmap's first index, u32; a multiple of 4. All sections of a bitmap have this address in common.
    pub target: u64,
    /// Address of a u32 that passes a number between the kernels. [`SELECT_COUNT`] writes the number of set bits in the
    /// row to it. [`SELECT_SCAN`] replaces that number with the sum over the earlier rows of the bitmap.
    pub before: u64,
    /// Number of bytes of bits.
    pub len: u32,
    /// The index, within the bitmap, of the row's first bit.
    pub first: u32,
    /// The number of u32 indices that fit in the target.
    pub room: u32,
    /// Padding; always 0.
    pub reserved: u32,
}

/// The numbers of set bits in the rows of a bitmap, which [`SELECT_SCAN`] sums.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScanRow {
    /// Address of an array with one u32 for each row. Each number is replaced with the sum of the numbers before it.
    pub numbers: u64,
    /// Address of the u32 that receives the total number of set bits.
    pub target: u64,
    /// The number of rows.
    pub count: u32,
    /// Padding; always 0.
    pub reserved: u32,
}

/// Indices in device memory, or a section of a longer list, that [`VALIDATE`] checks.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexRow {
    /// Address of the indices, u32 little-endian; a multiple of 4.
    pub indices: u64,
    /// Address of a bitmap with one bit for each element of the range, in whole u32, all 0 before the launch. All
    /// sections of a list have the same address.
    pub seen: u64,
    /// Address of a u32 that is 0 before the launch and receives the sum of the flags that apply: [`OUT_OF_BOUNDS`],
    /// [`TWICE`]. All sections of a list have the same address.
    pub target: u64,
    /// Number of elements in the range.
    pub bound: u64,
    /// Number of indices.
    pub count: u64,
}

/// Flag of [`VALIDATE`]: an index is not below the bound.
pub const OUT_OF_BOUNDS: u32 = INDEX_OUT_OF_BOUNDS;
/// Flag of [`VALIDATE`]: an index occurs twice in its list.
pub const TWICE: u32 = INDEX_TWICE;

/// Consecutive chunks whose digests [`DIGEST`] computes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DigestRow {
    /// Address of the first byte. Any alignment.
    pub source: u64,
    /// Address of the key, [`DIGEST_KEY_LEN`](crate::device::DIGEST_KEY_LEN) bytes; a multiple of 8.
    pub key: u64,
    /// Address of the digests, sixteen bytes for each chunk; a multiple of 8.
    pub target: u64,
    /// Number of bytes. Only the last chunk may be shorter than [`DIGEST_CHUNK_LEN`].
    pub len: u32,
    /// Padding; always 0.
    pub reserved: u32,
}

/// The length, in bytes, of every chunk except the last of a range.
pub const DIGEST_CHUNK_LEN: u32 = crate::device::DIGEST_CHUNK_LEN as u32;

/// The sizes of the rows, which `kernels/common.cuh` asserts too.
const _: () = {
    assert!(size_of::<PieceRow>() == 48);
    assert!(size_of::<PartRow>() == 24);
    assert!(size_of::<CrcRow>() == 24);
    assert!(size_of::<CombineRow>() == 24);
    assert!(size_of::<DiffRow>() == 32);
    assert!(size_of::<DigestRow>() == 32);
    assert!(size_of::<SelectRow>() == 40);
    assert!(size_of::<ScanRow>() == 24);
    assert!(size_of::<IndexRow>() == 40);
};

/// A kernel's entry point and launch shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// The function's name in its module.
    pub name: &'static str,
    /// The index in [`MODULES`](super::modules::MODULES) of the module that contains the function.
    pub module: usize,
    /// Threads per block.
    pub threads: u32,
    /// Rows per block.
    pub rows_per_block: u32,
}

impl Kernel {
    /// Returns the number of blocks of a launch over this number of rows.
    #[must_use]
    pub const fn grid(&self, rows: u32) -> u32 {
        rows.div_ceil(self.rows_per_block)
    }
}

/// Applies [`PartRow`]s with little work, one warp each.
pub const APPLY_BY_WARP: Kernel =
    Kernel { name: "apply_by_warp", module: 0, threads: 128, rows_per_block: 4 };
/// Applies [`PartRow`]s with much work, one block each.
pub const APPLY_BY_BLOCK: Kernel =
    Kernel { name: "apply_by_block", module: 0, threads: 256, rows_per_block: 1 };
/// Checksums [`CrcRow`]s, with sixteen lanes of a warp for each row.
pub const CRC_CHUNKS: Kernel = Kernel { name: "crc_chunks", module: 1, threads: 128, rows_per_block: 8 };
/// Combines [`CombineRow`]s, one block each. Runs after [`CRC_CHUNKS`] in the same stream.
pub const CRC_COMBINE: Kernel = Kernel { name: "crc_combine", module: 1, threads: 256, rows_per_block: 1 };
/// Compares [`DiffRow`]s, one block each.
pub const DIFF: Kernel = Kernel { name: "diff", module: 2, threads: 256, rows_per_block: 1 };
/// Digests [`DigestRow`]s, one block each.
pub const DIGEST: Kernel = Kernel { name: "digest", module: 3, threads: 256, rows_per_block: 1 };
/// Counts the set bits of [`SelectRow`]s, one block each.
pub const SELECT_COUNT: Kernel = Kernel { name: "select_count", module: 4, threads: 256, rows_per_block: 1 };
/// Sums the counts of [`ScanRow`]s, one block each. Runs after [`SELECT_COUNT`] in the same stream.
pub const SELECT_SCAN: Kernel = Kernel { name: "select_scan", module: 4, threads: 256, rows_per_block: 1 };
/// Writes the indices of [`SelectRow`]s, one block each. Runs after [`SELECT_SCAN`] in the same stream.
pub const SELECT_EMIT: Kernel = Kernel { name: "select_emit", module: 4, threads: 256, rows_per_block: 1 };
/// Checks [`IndexRow`]s, one block each.
pub const VALIDATE: Kernel = Kernel { name: "validate", module: 5, threads: 256, rows_per_block: 1 };

/// The entry points of all kernels, in order of module.
pub const KERNELS: [Kernel; 10] = [
    APPLY_BY_WARP,
    APPLY_BY_BLOCK,
    CRC_CHUNKS,
    CRC_COMBINE,
    DIFF,
    DIGEST,
    SELECT_COUNT,
    SELECT_SCAN,
    SELECT_EMIT,
    VALIDATE,
];
