//! What is wrong with a block layout, or with its use.

/// The largest alignment of a run, in bytes: a page of the largest size that a GPU maps.
pub(super) const ALIGN_MAX: u32 = 2 << 20;

/// Why a layout cannot be, or cannot be used this way.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// A dimension is zero.
    #[error("{dimension} is 0")]
    Zero {
        /// The dimension's name.
        dimension: &'static str,
    },
    /// The alignment is not a power of two, or too large.
    #[error("an alignment of {align} bytes is not a power of two up to {ALIGN_MAX}")]
    Align {
        /// The alignment asked for.
        align: u32,
    },
    /// A length does not fit 63 bits.
    #[error("{what} has more than 2^63 bytes")]
    TooLong {
        /// What is too long.
        what: &'static str,
    },
    /// An index is not within its dimension.
    #[error("{dimension} {index} of {count}")]
    OutOfRange {
        /// The dimension's name.
        dimension: &'static str,
        /// The index asked for.
        index: u64,
        /// The dimension's length.
        count: u64,
    },
    /// The blocks of two layouts have other shapes, so they cannot be exchanged.
    #[error("blocks of {from} cannot be copied to blocks of {to}")]
    OtherShape {
        /// The layout to copy from.
        from: String,
        /// The layout to copy to.
        to: String,
    },
    /// A working copy has the layout of its pages, and these have another one.
    #[error("tensors of {tensors} cannot be working copies of pages of {pages}")]
    OtherLayout {
        /// The layout of the tensors.
        tensors: String,
        /// The layout of the pages.
        pages: String,
    },
    /// There are more or fewer regions than the layout has.
    #[error("{found} regions are given, and the layout has {expected}")]
    RegionCount {
        /// The number given.
        found: usize,
        /// The number that the layout has.
        expected: usize,
    },
    /// A region is too short.
    #[error("region {region} has {found} bytes, and the layout needs {expected}")]
    RegionLen {
        /// The region's index.
        region: usize,
        /// The length that it has.
        found: u64,
        /// The length that the layout needs.
        expected: u64,
    },
    /// These 32 bytes are no layout, or one of a later version.
    #[error("the fingerprint is not one of a block layout: {reason}")]
    Fingerprint {
        /// What is wrong with it.
        reason: &'static str,
    },
}
