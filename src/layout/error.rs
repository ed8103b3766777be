//! Errors in block layouts and their use.

/// The maximum alignment of a run in bytes: the largest page size of a GPU.
pub(super) const ALIGN_MAX: u32 = 2 << 20;

/// The reason why a layout is invalid, or why a call cannot use it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// A dimension of the layout is zero.
    #[error("{dimension} is 0")]
    Zero {
        /// The name of the dimension.
        dimension: &'static str,
    },
    /// The alignment is not a power of two, or is too large.
    #[error("an alignment of {align} bytes is not a power of two up to {ALIGN_MAX}")]
    Align {
        /// The requested alignment.
        align: u32,
    },
    /// A length does not fit in 63 bits.
    #[error("{what} has more than 2^63 bytes")]
    TooLong {
        /// The name of the length.
        what: &'static str,
    },
    /// An index is not less than the length of its dimension.
    #[error("{dimension} {index} is out of range: the layout has {count}")]
    OutOfRange {
        /// The name of the dimension.
        dimension: &'static str,
        /// The requested index.
        index: u64,
        /// The length of the dimension.
        count: u64,
    },
    /// The blocks of two layouts have different shapes, so blocks cannot be copied from one layout to the other.
    #[error("blocks of {from} cannot be copied to blocks of {to}")]
    OtherShape {
        /// A description of the layout to copy from.
        from: String,
        /// A description of the layout to copy to.
        to: String,
    },
    /// A working copy must have the layout of its pages, but the two layouts differ.
    #[error("tensors of {tensors} cannot be working copies of pages of {pages}")]
    OtherLayout {
        /// A description of the layout of the tensors.
        tensors: String,
        /// A description of the layout of the pages.
        pages: String,
    },
    /// The number of regions differs from the number that the layout requires.
    #[error("{found} regions are given, and the layout has {expected}")]
    RegionCount {
        /// The number of regions given.
        found: usize,
        /// The number of regions that the layout requires.
        expected: usize,
    },
    /// A region is too short to contain its part of the layout.
    #[error("region {region} has {found} bytes, and the layout needs {expected}")]
    RegionLen {
        /// The index of the region.
        region: usize,
        /// The length of the region in bytes.
        found: u64,
        /// The length that the layout requires, in bytes.
        expected: u64,
    },
    /// The 32 bytes do not encode a layout, or were encoded with another version of the encoding.
    #[error("the bytes are not the fingerprint of a block layout: {reason}")]
    Fingerprint {
        /// The reason why the bytes are invalid.
        reason: &'static str,
    },
}
