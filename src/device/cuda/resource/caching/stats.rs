//! Counts and sizes of a cache, and its fragmentation.

/// Counts and sizes of a [`CachingMemory`](super::CachingMemory).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheStats {
    /// Bytes of blocks in use, after rounding.
    pub allocated_bytes: u64,
    /// The highest value of `allocated_bytes` since the peaks were reset.
    pub allocated_peak_bytes: u64,
    /// Total bytes of all segments.
    pub reserved_bytes: u64,
    /// The highest value of `reserved_bytes` since the peaks were reset.
    pub reserved_peak_bytes: u64,
    /// Segments obtained from the source.
    pub segments: u64,
    /// Blocks in use.
    pub blocks: u64,
    /// Free blocks, which any request may get.
    pub free_blocks: u64,
    /// Freed blocks that work on a stream may still use.
    pub waiting_blocks: u64,
    /// Total bytes of the free blocks.
    pub free_bytes: u64,
    /// Length in bytes of the longest free block.
    pub free_longest_bytes: u64,
}

impl CacheStats {
    /// Returns the fraction of free bytes outside the longest free block: 0 if all free bytes are in one
    /// block, approaching 1 if they are spread over many.
    #[must_use]
    pub fn fragmentation(&self) -> f64 {
        if self.free_bytes == 0 {
            return 0.0;
        }
        1.0 - self.free_longest_bytes as f64 / self.free_bytes as f64
    }
}
