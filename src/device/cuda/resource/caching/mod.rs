//! Blocks of exact length cut from a few segments, by the rules of PyTorch's allocator: lengths are rounded up to 512
//! bytes, short blocks share segments of 2 MiB and longer ones segments of 20 MiB, a free block is split for a shorter
//! request, and free neighbors are joined.
//!
//! [`Pool`](super::Pool) never joins blocks, so freeing a block does not examine others. It is intended for pages, many
//! of which have the same length. This cache is for lengths that vary. In a pool, free blocks of one length would
//! occupy the memory that other lengths need.
//!
//! A block can be freed before the work that uses it is done, if the caller names the work's streams: the driver's
//! events report when the work is done. Until then only work on the same stream can get the block, because that work
//! runs later anyway.
//!
//! One lock guards the whole cache. It is also held while a segment is requested. Two threads therefore never both
//! request a segment when one segment would suffice.

mod blocks;
mod stats;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use remanent_format::Place;

use self::blocks::{BLOCK_LEN_MIN, Cache, SHORT_LEN_MAX, SHORT_SEGMENT_LEN};
pub use self::stats::CacheStats;
use super::MemoryResource;
use crate::base::sync::Mutex;
use crate::device::{MemoryStats, RawStream};
use crate::error::{Error, Refused, Result};

/// The shortest block, in bytes, that has a segment of its own.
const DEDICATED_LEN_MIN: u64 = 10 << 20;
/// The length in bytes of a segment for blocks that are neither short nor in a segment of their own.
const LONG_SEGMENT_LEN: u64 = 20 << 20;
/// The unit, in bytes, of the lengths of segments with a single block.
const SEGMENT_ROUND: u64 = 2 << 20;
/// `CU_STREAM_PER_THREAD`: the handle that denotes a different stream in each thread.
const PER_THREAD: u64 = 2;

/// Records points of streams, so that a [`CachingMemory`] can detect when the work that uses a freed block is done.
pub trait StreamPoints: Send + Sync + 'static {
    /// Records the current point of the stream.
    ///
    /// # Errors
    /// `Refused` if the stream cannot be used; a device error.
    fn point(&self, stream: RawStream) -> Result<Box<dyn StreamPoint>>;
}

/// A recorded point of a stream.
pub trait StreamPoint: Send {
    /// Returns whether all work before the point is done.
    ///
    /// # Errors
    /// A device error.
    fn has_passed(&self) -> Result<bool>;
}

/// Serves blocks of any length from segments of another source, splitting and joining them.
///
/// ```
/// use remanent::device::cuda::resource::{CachingMemory, HostMemory, MemoryResource};
/// let memory = CachingMemory::new(HostMemory);
/// let (one, other) = (memory.allocate(1000)?, memory.allocate(3 << 20)?);
/// let stats = memory.cache_stats();
/// assert_eq!((stats.allocated_bytes, stats.reserved_bytes), (1024 + (3 << 20), 22 << 20));
/// // SAFETY: allocated just now, and nothing uses them.
/// unsafe { memory.free(one, 1000)? };
/// unsafe { memory.free(other, 3 << 20)? };
/// assert_eq!(memory.trim()?, 22 << 20);
/// # Ok::<(), remanent::Error>(())
/// ```
pub struct CachingMemory<R: MemoryResource> {
    upstream: R,
    points: Option<Arc<dyn StreamPoints>>,
    state: Mutex<Cache>,
}

impl<R: MemoryResource> CachingMemory<R> {
    /// Creates an empty cache without stream support.
    #[must_use]
    pub fn new(upstream: R) -> Self {
        Self { upstream, points: None, state: Mutex::default() }
    }

    /// Creates an empty cache whose blocks may be freed on streams.
    #[must_use]
    pub fn with_streams(upstream: R, points: Arc<dyn StreamPoints>) -> Self {
        Self { upstream, points: Some(points), state: Mutex::default() }
    }

    /// Allocates memory like [`allocate`](MemoryResource::allocate), but only for work on this stream. The block may
    /// have been freed on this stream before the work that uses it was done.
    ///
    /// # Errors
    /// Same as `allocate`.
    pub fn allocate_on(&self, len: u64, stream: RawStream) -> Result<u64> {
        self.take(len, Some(stream))
    }

    /// Frees memory that work already queued on these streams may still use.
    ///
    /// # Errors
    /// [`Error::Refused`], with nothing freed, if the cache has no stream support or a graph is being captured from a
    /// stream; a device error.
    ///
    /// # Safety
    /// Same as [`free`](MemoryResource::free), except for work already queued on these streams. A stream may be
    /// destroyed only after that work is done. Otherwise its handle must not be passed to
    /// [`allocate_on`](Self::allocate_on) again.
    pub unsafe fn free_on(&self, address: u64, len: u64, streams: &[RawStream]) -> Result<()> {
        let point = |stream: &RawStream| match &self.points {
            Some(points) => Ok((stream.handle(), points.point(*stream)?)),
            None => {
                let reason = "this memory was made without streams";
                Err(Error::Refused(Refused::Stream { stream: stream.handle(), reason }))
            }
        };
        let points = streams.iter().map(point).collect::<Result<Vec<_>>>()?;
        let first = streams.first().map(|stream| stream.handle());
        let is_one =
            |first: &u64| *first != PER_THREAD && streams.iter().all(|stream| stream.handle() == *first);
        let only = first.filter(is_one);
        let mut state = self.state.lock();
        state.put_back(address, len);
        if points.is_empty() {
            state.join(address);
        } else {
            state.wait(address, points, only);
        }
        Ok(())
    }

    /// Returns the current counts and sizes of the cache.
    #[must_use]
    pub fn cache_stats(&self) -> CacheStats {
        let state = self.state.lock();
        let free = || state.free.iter().flatten();
        CacheStats {
            segments: state.segments.len() as u64,
            free_blocks: free().count() as u64,
            waiting_blocks: state.waiting.len() as u64,
            free_bytes: free().map(|(len, _)| len).sum(),
            free_longest_bytes: free().map(|(len, _)| *len).max().unwrap_or(0),
            ..state.stats
        }
    }

    /// Resets the peak values of [`CacheStats`] to the current values.
    pub fn reset_peaks(&self) {
        let CacheStats { allocated_bytes, allocated_peak_bytes, reserved_bytes, reserved_peak_bytes, .. } =
            &mut self.state.lock().stats;
        (*allocated_peak_bytes, *reserved_peak_bytes) = (*allocated_bytes, *reserved_bytes);
    }

    fn take(&self, len: u64, stream: Option<RawStream>) -> Result<u64> {
        let out_of_memory = || Error::OutOfMemory { place: Place::Device(0), len };
        let block_len = len.max(1).checked_next_multiple_of(BLOCK_LEN_MIN).ok_or_else(out_of_memory)?;
        let segment_len = if block_len <= SHORT_LEN_MAX {
            SHORT_SEGMENT_LEN
        } else if block_len < DEDICATED_LEN_MIN {
            LONG_SEGMENT_LEN
        } else {
            block_len.checked_next_multiple_of(SEGMENT_ROUND).ok_or_else(out_of_memory)?
        };
        let mut state = self.state.lock();
        state.free_finished()?;
        let found = stream.and_then(|stream| state.exact_block_of_stream(block_len, stream.handle()));
        let address = match found.or_else(|| state.best_fit(block_len)) {
            Some(address) => {
                state.hits += 1;
                address
            }
            None => {
                let address = self.upstream.allocate(segment_len)?;
                state.misses += 1;
                state.add_segment(address, segment_len);
                address
            }
        };
        state.hand_out(address, block_len);
        Ok(address)
    }
}

// SAFETY: a block is within a segment that the wrapped source allocated; the blocks of a segment do not
// overlap, and an allocated block is neither free nor waiting until it is freed. A waiting block is allocated
// on the stream whose work uses it, and so after that work, or when its points have passed. Segments begin at
// multiples of `ALIGN`, and so do their blocks, whose lengths are multiples of 512.
unsafe impl<R: MemoryResource> MemoryResource for CachingMemory<R> {
    fn allocate(&self, len: u64) -> Result<u64> {
        self.take(len, None)
    }

    unsafe fn free(&self, address: u64, len: u64) -> Result<()> {
        // SAFETY: nothing uses the memory, on any stream.
        unsafe { self.free_on(address, len, &[]) }
    }

    fn trim(&self) -> Result<u64> {
        let free = {
            let mut state = self.state.lock();
            state.free_finished()?;
            state.take_free_segments()
        };
        let mut trimmed = Ok(0);
        for (address, len) in free {
            // SAFETY: the source allocated it, it is one free block, and it is in no list any more.
            let freed = unsafe { self.upstream.free(address, len) };
            // A segment that cannot be freed does not prevent freeing the others.
            trimmed = trimmed.and_then(|bytes| freed.map(|()| bytes + len));
        }
        Ok(trimmed? + self.upstream.trim()?)
    }

    fn stats(&self) -> MemoryStats {
        let Cache { stats, hits, misses, .. } = &*self.state.lock();
        MemoryStats {
            reserved_bytes: stats.reserved_bytes,
            used_bytes: stats.allocated_bytes,
            hits: *hits,
            misses: *misses,
        }
    }
}

impl<R: MemoryResource> Drop for CachingMemory<R> {
    /// Returns free segments to the source. Segments with blocks that were never freed, or whose work is not done, stay
    /// allocated, because they may still be in use.
    fn drop(&mut self) {
        if let Err(error) = self.trim() {
            tracing::warn!(%error, "cannot return memory to the driver");
        }
        let still_reserved = self.state.get_mut().stats.reserved_bytes;
        if still_reserved > 0 {
            tracing::warn!(bytes = still_reserved, "memory that is still in use stays allocated");
        }
    }
}

impl<R: MemoryResource> std::fmt::Debug for CachingMemory<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CachingMemory").field("stats", &self.cache_stats()).finish_non_exhaustive()
    }
}
