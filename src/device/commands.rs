//! The commands of a list, and the ranges and deltas that commands name.
//!
//! These descriptions define the result of each command. The device chooses how to produce the result.
//! [`Device`](super::Device) describes how lists run.

use remanent_format::Width;

use super::{Span, Staging};

/// A list of commands for a lane.
#[derive(Debug, Default)]
pub struct CommandList {
    /// The commands, in execution order.
    pub commands: Vec<Command>,
    /// The staging buffers, to which commands refer by index.
    pub staging: Vec<Staging>,
}

/// A range of one of a list's staging buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagingSpan {
    /// Index into [`CommandList::staging`].
    pub index: usize,
    /// Offset of the first byte.
    pub offset: usize,
    /// Number of bytes.
    pub len: usize,
}

/// A command of a list. The caller must check all ranges: a device panics on a range that is out of bounds.
#[derive(Clone, Debug)]
pub enum Command {
    /// Copies staging to page memory. The lengths must be equal.
    Upload {
        /// The bytes to copy.
        source: StagingSpan,
        /// The range to write.
        target: Span,
    },
    /// Copies page memory to staging. The lengths must be equal.
    Download {
        /// The bytes to copy.
        source: Span,
        /// The range to write.
        target: StagingSpan,
    },
    /// Applies deltas. Deltas of one page are applied in the order of the list.
    Apply {
        /// The deltas, in order.
        pieces: Vec<Piece>,
    },
    /// Copies page memory to page memory. The lengths must be equal and the ranges must not overlap.
    Copy {
        /// The bytes to copy.
        source: Span,
        /// The range to write.
        target: Span,
    },
    /// Repeats the first `width` bytes of `pattern` over the target. The target's length must be a multiple
    /// of `width`.
    Fill {
        /// The range to fill.
        target: Span,
        /// The pattern, in its first `width` bytes.
        pattern: [u8; 16],
        /// The length of the pattern.
        width: Width,
    },
    /// Copies many ranges into one area, each range to its offset in `target`.
    Gather {
        /// The ranges to copy, each with its offset in `target`.
        sources: Vec<(Span, u64)>,
        /// The area to write.
        target: Span,
    },
    /// Copies from one area to many ranges, each range from its offset in `source`.
    Scatter {
        /// The area to copy from.
        source: Span,
        /// The ranges to write, each with its offset in `source`.
        targets: Vec<(u64, Span)>,
    },
    /// Compares two ranges and writes one bit for each element, lowest bit first: 1 if the elements differ. The lengths
    /// of the ranges must be equal and multiples of `width`.
    Diff {
        /// The first range to compare.
        left: Span,
        /// The second range to compare.
        right: Span,
        /// The element's width.
        width: Width,
        /// The range for the bits: one byte for eight elements, rounded up. It must not overlap `left` or `right`.
        target: Span,
    },
    /// Writes the indices of the set bits of each bitmap, in rising order. Also writes the number of set bits of each
    /// bitmap, as four little-endian bytes.
    Select {
        /// The bitmaps. No selection may write to a range that another selection reads or writes.
        bitmaps: Vec<Selection>,
        /// The range for the numbers of set bits.
        target: StagingSpan,
    },
    /// Computes the CRC-32 of each source, as four little-endian bytes each.
    Crc {
        /// The ranges to checksum.
        sources: Vec<Span>,
        /// The range for the checksums.
        target: StagingSpan,
    },
    /// Computes the digest of each chunk of each source, [`DIGEST_LEN`](super::DIGEST_LEN) bytes each. The first chunk
    /// begins at the source's start. Only the last chunk may be shorter than
    /// [`DIGEST_CHUNK_LEN`](super::DIGEST_CHUNK_LEN).
    Digest {
        /// The ranges to digest.
        sources: Vec<Span>,
        /// The key, from [`digest_key`](super::digest_key). Its offset must be a multiple of 8.
        key: Span,
        /// The range for the digests. Its offset must be a multiple of 8.
        target: StagingSpan,
    },
    /// Copies single elements: element `i` of the target is element `indices[i]` of `source`.
    Pick {
        /// The range that contains the elements.
        source: Span,
        /// The width of the elements. The lengths of `source` and `target` must be multiples of it.
        width: Width,
        /// Little-endian u32 indices into `source`, one for each element of `target`.
        indices: StagingSpan,
        /// The range for the picked elements. It must not overlap the source.
        target: Span,
    },
    /// Checks lists of indices in page memory, which the host cannot check itself. Writes, for each list, four
    /// little-endian bytes: the sum of the flags [`INDEX_OUT_OF_BOUNDS`] and [`INDEX_TWICE`] that apply, or 0 if all
    /// indices are valid.
    Validate {
        /// The lists to check.
        lists: Vec<IndexList>,
        /// The range for the results.
        target: StagingSpan,
    },
}

impl Command {
    /// Returns the deltas that the command applies; empty for any other command.
    pub(super) fn deltas(&self) -> &[Piece] {
        match self {
            Self::Apply { pieces } => pieces,
            _ => &[],
        }
    }
}

/// A bitmap in page memory, lowest bit first, and the range that receives the indices of its set bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Selection {
    /// The bitmap, shorter than [`BITMAP_LEN_END`] bytes.
    pub bits: Span,
    /// The range for little-endian u32 indices. It must not overlap the bits, and its offset and length must be
    /// multiples of 4. Indices that do not fit are dropped, and unused space keeps its contents.
    pub indices: Span,
}

impl Selection {
    /// Checks that the fields follow their documented rules. For implementations of devices.
    ///
    /// # Panics
    /// If the selection violates a rule.
    pub fn check(&self) {
        let Self { bits, indices } = *self;
        assert!(bits.len < BITMAP_LEN_END, "a bitmap of {} bytes", bits.len);
        assert!(indices.offset.is_multiple_of(4) && indices.len.is_multiple_of(4), "room for whole indices");
        let are_disjoint = bits.memory != indices.memory
            || bits.offset.saturating_add(bits.len) <= indices.offset
            || indices.offset.saturating_add(indices.len) <= bits.offset;
        assert!(are_disjoint, "indices where their bitmap is: {self:?}");
    }
}

/// The smallest length, in bytes, of a bitmap whose bit numbers no longer fit in 32 bits.
pub const BITMAP_LEN_END: u64 = 1 << 29;

/// A list of indices in page memory, for [`Command::Validate`]. The list is valid if all indices are different and
/// below `bound`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexList {
    /// Little-endian u32 indices; offset and length must be multiples of 4.
    pub indices: Span,
    /// The number of elements to which the indices refer; every index must be below it.
    pub bound: u64,
}

/// Flag of [`Command::Validate`]: an index is not below its bound.
pub const INDEX_OUT_OF_BOUNDS: u32 = 1;

/// Flag of [`Command::Validate`]: an index occurs twice in its list.
pub const INDEX_TWICE: u32 = 2;

/// One delta: bytes from staging or from page memory, merged into a range of page memory.
#[derive(Clone, Debug)]
pub struct Piece {
    /// The range of page memory to change. For `Sparse`, the range that contains the elements.
    pub target: Span,
    /// The location of the delta's bytes: staging or page memory.
    pub payload: Payload,
    /// The method by which the bytes are merged into the target.
    pub kind: PieceKind,
}

/// The location of a delta's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payload {
    /// The bytes are in one of the list's staging buffers.
    Staging {
        /// Index into [`CommandList::staging`].
        index: usize,
        /// Offset of the first byte.
        offset: usize,
    },
    /// The bytes are in a range of page memory.
    Device(Span),
}

/// The method by which a delta's bytes are merged into its target. Offsets are relative to the payload's first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PieceKind {
    /// The payload's first `target.len` bytes replace the target.
    Dense,
    /// The payload has a bitmap at offset 0 (one bit for each element, lowest bit first), and bytes for the whole
    /// target at `bytes_at`. Elements whose bit is 1 are replaced.
    Masked {
        /// The element's width; `target.len` must be a multiple of it.
        width: Width,
        /// Offset, in bytes, of the new contents of the target.
        bytes_at: usize,
    },
    /// The payload has `count` little-endian u32 element indices at offset 0, all different, and the bytes of
    /// the elements at `values_at`.
    Sparse {
        /// The element's width.
        width: Width,
        /// Number of elements.
        count: usize,
        /// Offset, in bytes, of the new values of the elements.
        values_at: usize,
    },
}
