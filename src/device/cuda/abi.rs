//! The agreement between host and kernels: the rows of the tables that a launch reads.
//!
//! The other half is `kernels/common.cuh`, which declares the same structs; sizes are asserted on both sides,
//! and a test reads that file and compares the constants. Read `kernels/README.md` first.
//!
//! Every kernel has one shape: `kernel(rows, row_count)` or, for the two that apply, `kernel(parts,
//! part_count, pieces)`. A launch has [`Kernel::grid`] blocks of [`Kernel::threads`] threads in one
//! dimension, and no dynamic shared memory. A table lies anywhere that the device can read, mapped pinned
//! memory included, on a boundary of 16 bytes; it stays unchanged until the launch is done. Addresses are the
//! device's own. A launch of no rows is not made.
//!
//! The device checks nothing that a row says. Bounds were checked before, and indices that only the device
//! has seen go through [`VALIDATE`] first.

use remanent_format::Width;

use crate::device::{INDEX_OUT_OF_BOUNDS, INDEX_TWICE};

/// One delta, fill or copy. [`APPLY_BY_WARP`] and [`APPLY_BY_BLOCK`] read it through a [`PartRow`].
///
/// Copying is a dense piece whatever the direction: uploads and downloads of mapped pinned memory, copies
/// on the device, gathers and scatters are all tables of these.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PieceRow {
    /// Address of the range that the piece writes. Any alignment.
    pub target: u64,
    /// Dense: address of the bytes. Masked: of the bitmap. Sparse and pick: of the indices, u32
    /// little-endian. Fill: bytes 0 to 8 of the pattern, repeated to sixteen bytes.
    pub payload: u64,
    /// Masked and sparse: address of the elements' bytes. Pick: of the range that they come from. Fill: bytes
    /// 8 to 16 of the pattern.
    pub values: u64,
    /// Steps of work: bytes for dense and fill, elements of the range for masked, indices for sparse
    /// and pick.
    pub steps: u64,
    /// One of the `PIECE_` constants.
    pub kind: u32,
    /// The element's width in bytes: 1, 2, 4, 8 or 16. 1 for dense and fill.
    pub width: u32,
    /// Always 0: it fills the row to its size.
    pub reserved: u64,
}

/// Bytes replace the target.
pub const PIECE_DENSE: u32 = 0;
/// Elements whose bit is 1 are replaced.
pub const PIECE_MASKED: u32 = 1;
/// Elements at the indices, all different, are replaced.
pub const PIECE_SPARSE: u32 = 2;
/// A pattern is repeated over the target.
pub const PIECE_FILL: u32 = 3;
/// Elements at the indices are copied to the target, one after the other.
pub const PIECE_PICK: u32 = 4;

impl PieceRow {
    /// `len` bytes at `payload` replace those at `target`.
    #[must_use]
    pub const fn dense(target: u64, payload: u64, len: u64) -> Self {
        Self { target, payload, values: 0, steps: len, kind: PIECE_DENSE, width: 1, reserved: 0 }
    }

    /// The elements at `target` whose bit in `bitmap` is 1 become those of `values`. `count` is the number of
    /// elements in the range.
    #[must_use]
    pub const fn masked(target: u64, bitmap: u64, values: u64, count: u64, width: Width) -> Self {
        let width = width.bytes() as u32;
        Self { target, payload: bitmap, values, steps: count, kind: PIECE_MASKED, width, reserved: 0 }
    }

    /// The elements at `count` `indices`, counted from `target`, become `values`.
    #[must_use]
    pub const fn sparse(target: u64, indices: u64, values: u64, count: u64, width: Width) -> Self {
        let width = width.bytes() as u32;
        Self { target, payload: indices, values, steps: count, kind: PIECE_SPARSE, width, reserved: 0 }
    }

    /// The elements of `source` at `count` `indices`, one after the other, become the target.
    #[must_use]
    pub const fn pick(target: u64, indices: u64, source: u64, count: u64, width: Width) -> Self {
        Self { kind: PIECE_PICK, ..Self::sparse(target, indices, source, count, width) }
    }

    /// The first `width` bytes of `pattern`, again and again over `len` bytes.
    #[must_use]
    pub fn fill(target: u64, pattern: [u8; 16], width: Width, len: u64) -> Self {
        let tile =
            |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| pattern[(at + byte) % width.bytes()]));
        let (payload, values) = (tile(0), tile(8));
        Self { target, payload, values, steps: len, kind: PIECE_FILL, width: 1, reserved: 0 }
    }
}

/// Consecutive pieces that one warp, or one block, applies one after the other.
///
/// No two parts of a launch may touch the same byte unless both only read it: pieces that overlap are in one
/// part, in Lsn order, or in launches one after the other.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartRow {
    /// The first piece's row.
    pub piece_first: u32,
    /// The number of pieces.
    pub piece_count: u32,
    /// First step of work, of each piece. Where several parts share a masked piece, a multiple of
    /// [`MASK_STEPS`]; 0 in a part of several pieces.
    pub begin: u64,
    /// Step at which the part stops. A piece of fewer steps ends before.
    pub end: u64,
}

impl PartRow {
    /// A part that is the whole of some consecutive pieces.
    #[must_use]
    pub const fn whole(piece_first: u32, piece_count: u32) -> Self {
        Self { piece_first, piece_count, begin: 0, end: u64::MAX }
    }
}

/// Boundary at which masked pieces are cut between parts: whole bytes of the bitmap, whole 16 bytes of the
/// smallest element.
pub const MASK_STEPS: u64 = 128;

/// A range whose checksum [`CRC_CHUNKS`] takes, or one chunk of such a range.
///
/// A source of up to [`CRC_CHUNK_LEN`] bytes is one chunk, [`CRC_FIRST`] and [`CRC_LAST`]. A longer one is
/// cut from its *end*, so that only the first chunk is shorter: then all chunks combine by one constant.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CrcRow {
    /// Address of the first byte. Any alignment.
    pub source: u64,
    /// Address of the four bytes of the result. The CRC-32 if the row is first and last, at any alignment;
    /// else the chunk's remainder, for [`CRC_COMBINE`], at a multiple of 4.
    pub target: u64,
    /// Number of bytes, at most [`CRC_CHUNK_LEN`]. 0 only in a row that is first and last.
    pub len: u32,
    /// [`CRC_FIRST`], [`CRC_LAST`], both or neither.
    pub flags: u32,
}

/// The chunk holds its source's first byte.
pub const CRC_FIRST: u32 = 1;
/// The chunk holds its source's last byte.
pub const CRC_LAST: u32 = 2;
/// The longest chunk, and the length of every chunk but a source's first. A team takes a chunk in turns of
/// 2 KiB, each of which waits for memory: one launch over one chunk of 64 KiB takes an H100 21 µs, over one
/// of 8 KiB 11 µs.
pub const CRC_CHUNK_LEN: u32 = 8 << 10;

/// A source of several chunks, whose remainders lie one after the other.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CombineRow {
    /// Address of the first chunk's remainder; a multiple of 4.
    pub remainders: u64,
    /// Address of the four bytes of the CRC-32. Any alignment.
    pub target: u64,
    /// Number of chunks, at least 2.
    pub count: u32,
    /// Always 0: it fills the row to its size.
    pub reserved: u32,
}

/// Two ranges, or two cuts of longer ones, whose differing elements [`DIFF`] finds.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiffRow {
    /// Address of one range. Any alignment.
    pub left: u64,
    /// Address of the other. Any alignment.
    pub right: u64,
    /// Address of the bits: one for each element, lowest first, whole bytes; unused bits of the last are 0.
    pub target: u64,
    /// Bytes of either range; whole elements. In all but the last row of a longer range, a multiple of eight
    /// elements.
    pub len: u32,
    /// The element's width in bytes.
    pub width: u32,
}

/// The length that a row of [`DIFF`] should not exceed, so that enough blocks share a long range.
pub const DIFF_LEN_MAX: u32 = 64 << 10;

/// The count that a row of [`VALIDATE`] should not exceed, so that enough blocks share a long list.
pub const INDEX_COUNT_MAX: u64 = 16 << 10;

/// The length that a row of [`SELECT_COUNT`] and [`SELECT_EMIT`] should not exceed, so that enough blocks
/// share a long bitmap. A multiple of 4.
pub const SELECT_LEN_MAX: u32 = 8 << 10;

/// A bitmap, or a cut of a longer one, whose set bits are counted and then numbered.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SelectRow {
    /// Address of the bits, lowest first. Any alignment.
    pub bits: u64,
    /// Address of the bitmap's numbers, u32, from the first on; a multiple of 4. Cuts of one bitmap share it.
    pub target: u64,
    /// Address of a u32. The count writes the number of set bits in the row there; the scan replaces it by
    /// the sum over the earlier rows of the bitmap.
    pub before: u64,
    /// Number of bytes of bits.
    pub len: u32,
    /// The number of the row's first bit in its bitmap.
    pub first: u32,
    /// The number of u32 that the target has room for.
    pub room: u32,
    /// Always 0: it fills the row to its size.
    pub reserved: u32,
}

/// The numbers of a bitmap's rows, which [`SELECT_SCAN`] sums up.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScanRow {
    /// Address of u32, one for each row, which becomes the sum of those before it.
    pub numbers: u64,
    /// Address of a u32, which becomes the sum of all.
    pub target: u64,
    /// The number of rows.
    pub count: u32,
    /// Always 0: it fills the row to its size.
    pub reserved: u32,
}

/// Indices that lie on the device, or a cut of a longer list, that [`VALIDATE`] proves.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexRow {
    /// Address of the indices, u32 little-endian; a multiple of 4.
    pub indices: u64,
    /// Address of one bit for each element of the range, in whole u32, all 0 before the launch. Cuts of one
    /// list share it.
    pub seen: u64,
    /// Address of a u32 that was 0 before the launch. It becomes the sum of the faults found:
    /// [`OUT_OF_BOUNDS`], [`TWICE`]. Cuts of one list share it.
    pub target: u64,
    /// Number of elements in the range.
    pub bound: u64,
    /// Number of indices.
    pub count: u64,
}

/// An index is not below the bound.
pub const OUT_OF_BOUNDS: u32 = INDEX_OUT_OF_BOUNDS;
/// An index occurs twice.
pub const TWICE: u32 = INDEX_TWICE;

/// Chunks that follow each other, whose digests [`DIGEST`] makes.
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
    /// Always 0: it fills the row to its size.
    pub reserved: u32,
}

/// The length of every chunk but the last of a range.
pub const DIGEST_CHUNK_LEN: u32 = crate::device::DIGEST_CHUNK_LEN as u32;

/// The sizes that `kernels/common.cuh` asserts too.
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

/// An entry point, and how it is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// The function's name in its module.
    pub name: &'static str,
    /// The module that holds it, an index: apply, crc, diff, digest, select, validate.
    pub module: usize,
    /// Threads of each block.
    pub threads: u32,
    /// Rows that one block works on.
    pub rows_per_block: u32,
}

impl Kernel {
    /// The number of blocks of a launch over this number of rows.
    #[must_use]
    pub const fn grid(&self, rows: u32) -> u32 {
        rows.div_ceil(self.rows_per_block)
    }
}

/// [`PartRow`]s of little work: each takes a warp.
pub const APPLY_BY_WARP: Kernel =
    Kernel { name: "apply_by_warp", module: 0, threads: 128, rows_per_block: 4 };
/// [`PartRow`]s of much work: each takes a block.
pub const APPLY_BY_BLOCK: Kernel =
    Kernel { name: "apply_by_block", module: 0, threads: 256, rows_per_block: 1 };
/// [`CrcRow`]s: each takes sixteen lanes.
pub const CRC_CHUNKS: Kernel = Kernel { name: "crc_chunks", module: 1, threads: 128, rows_per_block: 8 };
/// [`CombineRow`]s: each takes a block. After [`CRC_CHUNKS`], in the same stream.
pub const CRC_COMBINE: Kernel = Kernel { name: "crc_combine", module: 1, threads: 256, rows_per_block: 1 };
/// [`DiffRow`]s: each takes a block.
pub const DIFF: Kernel = Kernel { name: "diff", module: 2, threads: 256, rows_per_block: 1 };
/// [`DigestRow`]s: each takes a block.
pub const DIGEST: Kernel = Kernel { name: "digest", module: 3, threads: 256, rows_per_block: 1 };
/// [`SelectRow`]s: each takes a block.
pub const SELECT_COUNT: Kernel = Kernel { name: "select_count", module: 4, threads: 256, rows_per_block: 1 };
/// [`ScanRow`]s: each takes a block. After [`SELECT_COUNT`], in the same stream.
pub const SELECT_SCAN: Kernel = Kernel { name: "select_scan", module: 4, threads: 256, rows_per_block: 1 };
/// [`SelectRow`]s again: each takes a block. After [`SELECT_SCAN`], in the same stream.
pub const SELECT_EMIT: Kernel = Kernel { name: "select_emit", module: 4, threads: 256, rows_per_block: 1 };
/// [`IndexRow`]s: each takes a block.
pub const VALIDATE: Kernel = Kernel { name: "validate", module: 5, threads: 256, rows_per_block: 1 };

/// All entry points, by rising module.
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
