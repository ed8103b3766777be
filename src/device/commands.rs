//! The commands of a list, and the ranges and deltas that they name.
//!
//! A device may take these words literally: what a command does is said here, and how it is done is the
//! device's own. [`Device`](super::Device) says how lists run.

use remanent_format::Width;

use super::{Span, Staging};

/// Work for a lane, in order.
#[derive(Debug, Default)]
pub struct CommandList {
    /// The commands, in order.
    pub commands: Vec<Command>,
    /// The staging that the commands name by index.
    pub staging: Vec<Staging>,
}

/// A range of one of a list's stagings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagingSpan {
    /// Index into [`CommandList::staging`].
    pub index: usize,
    /// Offset of its first byte.
    pub offset: usize,
    /// Number of bytes.
    pub len: usize,
}

/// One step of a list. Ranges were checked by the caller; a device panics on one that is out of bounds.
#[derive(Clone, Debug)]
pub enum Command {
    /// Staging to page memory; equal lengths.
    Upload {
        /// The bytes copied.
        source: StagingSpan,
        /// The place they go to.
        target: Span,
    },
    /// Page memory to staging; equal lengths.
    Download {
        /// The bytes copied.
        source: Span,
        /// The place they go to.
        target: StagingSpan,
    },
    /// Deltas, in order. Pieces of one page are applied in the order of the list.
    Apply {
        /// The deltas, in order.
        pieces: Vec<Piece>,
    },
    /// Page memory to page memory; equal lengths, not overlapping.
    Copy {
        /// The bytes copied.
        source: Span,
        /// The place they go to.
        target: Span,
    },
    /// Repeats the first `width` bytes of `pattern` over the target, whose length is a multiple of it.
    Fill {
        /// The range that is filled.
        target: Span,
        /// The pattern, in its first `width` bytes.
        pattern: [u8; 16],
        /// Length of the pattern.
        width: Width,
    },
    /// Many pieces into one area: each source to its offset in `target`.
    Gather {
        /// The bytes copied, each with its offset in `target`.
        sources: Vec<(Span, u64)>,
        /// The area they go to.
        target: Span,
    },
    /// One area out to many pieces: each target from its offset in `source`.
    Scatter {
        /// The bytes copied.
        source: Span,
        /// The offset in `source`, and the place that its bytes go to.
        targets: Vec<(u64, Span)>,
    },
    /// One bit for each element, lowest bit first: 1 where the two differ. Equal lengths, multiples of
    /// `width`.
    Diff {
        /// One range compared.
        left: Span,
        /// The other range compared.
        right: Span,
        /// The element's width.
        width: Width,
        /// The range for the bits: one byte for eight elements, rounded up, overlapping neither.
        target: Span,
    },
    /// The indices of the bits that are set, rising. For each bitmap four little-endian bytes hold the number
    /// of set bits.
    Select {
        /// The bitmaps. None writes where another one reads or writes.
        bitmaps: Vec<Selection>,
        /// The place for the numbers of set bits.
        target: StagingSpan,
    },
    /// CRC-32 of each source, four little-endian bytes each.
    Crc {
        /// The ranges to sum.
        sources: Vec<Span>,
        /// The place for the sums.
        target: StagingSpan,
    },
    /// The digest of each chunk of each source, [`DIGEST_LEN`](super::DIGEST_LEN) bytes each. Chunks begin at
    /// a source's start; only its last one may be shorter than [`DIGEST_CHUNK_LEN`](super::DIGEST_CHUNK_LEN).
    Digest {
        /// The ranges to digest.
        sources: Vec<Span>,
        /// The key, from [`digest_key`](super::digest_key); it begins at a multiple of 8.
        key: Span,
        /// The place for the digests; it begins at a multiple of 8.
        target: StagingSpan,
    },
    /// Single elements, one after the other: element `i` of the target is the one of `source` that index `i`
    /// names.
    Pick {
        /// The elements to pick from.
        source: Span,
        /// The elements' width; both lengths are multiples of it.
        width: Width,
        /// Little-endian u32 indices into `source`, one for each element of `target`.
        indices: StagingSpan,
        /// The place for the picked elements; not overlapping the source.
        target: Span,
    },
    /// Looks at indices that only the device has seen. For each list four little-endian bytes hold the sum of
    /// [`INDEX_OUT_OF_BOUNDS`] and [`INDEX_TWICE`] as they are found, 0 if all indices are good.
    Validate {
        /// The lists to look at.
        lists: Vec<IndexList>,
        /// The place for the findings.
        target: StagingSpan,
    },
}

impl Command {
    /// The deltas that it applies; none if it does something else.
    pub(super) fn deltas(&self) -> &[Piece] {
        match self {
            Self::Apply { pieces } => pieces,
            _ => &[],
        }
    }
}

/// A bitmap in page memory, lowest bit first, and the place for the indices of its set bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Selection {
    /// The bits; fewer bytes than [`BITMAP_LEN_END`].
    pub bits: Span,
    /// Room for little-endian u32, not overlapping the bits; offset and length are multiples of 4. Indices
    /// beyond the room are left out; room beyond the indices stays as it is.
    pub indices: Span,
}

impl Selection {
    /// Refuses a selection that breaks these rules. For devices.
    ///
    /// # Panics
    /// If it breaks one.
    pub fn check(&self) {
        let Self { bits, indices } = *self;
        assert!(bits.len < BITMAP_LEN_END, "a bitmap of {} bytes", bits.len);
        assert!(indices.offset.is_multiple_of(4) && indices.len.is_multiple_of(4), "room for whole indices");
        let are_apart = bits.memory != indices.memory
            || bits.offset.saturating_add(bits.len) <= indices.offset
            || indices.offset.saturating_add(indices.len) <= bits.offset;
        assert!(are_apart, "indices where their bitmap is: {self:?}");
    }
}

/// The length in bytes from which a bitmap has bits whose number takes more than 32 bits.
pub const BITMAP_LEN_END: u64 = 1 << 29;

/// Indices in page memory, all of which should be different and below a bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexList {
    /// Little-endian u32 indices; offset and length are multiples of 4.
    pub indices: Span,
    /// The number of elements that the indices name.
    pub bound: u64,
}

/// An index is not below its bound.
pub const INDEX_OUT_OF_BOUNDS: u32 = 1;

/// An index is in its list twice.
pub const INDEX_TWICE: u32 = 2;

/// One delta: bytes from a staging (or from page memory) merged into a range of page memory.
#[derive(Clone, Debug)]
pub struct Piece {
    /// The range of page memory concerned. For `Sparse`, the range in which the elements lie.
    pub target: Span,
    /// The place of the delta's bytes.
    pub payload: Payload,
    /// The way they are merged.
    pub kind: PieceKind,
}

/// The place of a delta's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payload {
    /// In one of the list's stagings, from this offset on.
    Staging {
        /// Index into [`CommandList::staging`].
        index: usize,
        /// Offset of the first byte.
        offset: usize,
    },
    /// In a range of page memory.
    Device(Span),
}

/// The way a delta's bytes are merged. Offsets are relative to the payload's first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PieceKind {
    /// `target.len` bytes replace the target.
    Dense,
    /// A bitmap at 0 (one bit for each element, lowest bit first), bytes of the whole range at
    /// `bytes_at`: elements whose bit is 1 are replaced.
    Masked {
        /// The element's width; `target.len` is a multiple of it.
        width: Width,
        /// Offset of the bytes.
        bytes_at: usize,
    },
    /// `count` little-endian u32 element indices at 0, all different; the elements' bytes at `values_at`.
    Sparse {
        /// The element's width.
        width: Width,
        /// Number of elements.
        count: usize,
        /// Offset of the values.
        values_at: usize,
    },
}
