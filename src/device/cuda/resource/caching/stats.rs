//! Counts and sizes of a cache, and what they say of its fragmentation.

/// Counts and sizes of a [`CachingMemory`](super::CachingMemory).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheStats {
    /// Bytes of blocks in use, as they are handed out.
    pub allocated_bytes: u64,
    /// The most that it was since the peaks began.
    pub allocated_peak_bytes: u64,
    /// Bytes of segments.
    pub reserved_bytes: u64,
    /// The most that it was since the peaks began.
    pub reserved_peak_bytes: u64,
    /// Segments held from the source.
    pub segments: u64,
    /// Blocks in use.
    pub blocks: u64,
    /// Blocks that any taker may have.
    pub free_blocks: u64,
    /// Blocks that were given back, and that work on a stream may still use.
    pub waiting_blocks: u64,
    /// Bytes of the free blocks.
    pub free_bytes: u64,
    /// Bytes of the longest free block.
    pub free_longest_bytes: u64,
}

impl CacheStats {
    /// The share of the free bytes that lie in other blocks than the longest one: 0 where all that is free is
    /// one block, towards 1 where it is in many.
    #[must_use]
    pub fn fragmentation(&self) -> f64 {
        if self.free_bytes == 0 {
            return 0.0;
        }
        1.0 - self.free_longest_bytes as f64 / self.free_bytes as f64
    }
}
