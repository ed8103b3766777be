//! Counts and sizes of a cache, and its fragmentation.

/// Counts and sizes of a [`CachingMemory`](super::CachingMemory), such as its fragmentation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheStats {
    /// Total bytes of the blocks in use, after lengths were rounded up.
    pub allocated_bytes: u64,
    /// The highest value of `allocated_bytes` since the last reset.
    pub allocated_peak_bytes: u64,
    /// Total bytes of all segments.
    pub reserved_bytes: u64,
    /// The highest value of `reserved_bytes` since the last reset.
    pub reserved_peak_bytes: u64,
    /// Number of segments obtained from the source.
    pub segments: u64,
    /// Number of blocks in use.
    pub blocks: u64,
    /// Number of free blocks that any request may get.
    pub free_blocks: u64,
    /// Number of freed blocks that work on a stream may still use.
    pub waiting_blocks: u64,
    /// Total bytes of the free blocks.
    pub free_bytes: u64,
    /// Length in bytes of the longest free block.
    pub free_longest_bytes: u64,
}

impl CacheStats {
    /// Returns the fraction of free bytes outside the longest free block. The result is 0 if all free bytes are in one
    /// block, and approaches 1 if they are in many.
    #[must_use]
    pub fn fragmentation(&self) -> f64 {
        if self.free_bytes == 0 {
            return 0.0;
        }
        1.0 - self.free_longest_bytes as f64 / self.free_bytes as f64
    }
}
