//! A source that limits the number of bytes allocated from another source.

use std::sync::atomic::{AtomicU64, Ordering};

use remanent_format::Place;

use super::MemoryResource;
use crate::device::MemoryStats;
use crate::error::{Error, Result};

/// Limits the number of bytes allocated from another source. Behind a [`Pool`](super::Pool), it limits the memory that
/// the pool requests from the driver, including unused parts of slabs. In contrast, a
/// [`Budget`](crate::options::Budget) limits the lengths of the pages themselves.
///
/// ```
/// use remanent::device::cuda::resource::{HostMemory, LimitedMemory, MemoryResource};
/// let memory = LimitedMemory::new(HostMemory, 100);
/// let address = memory.allocate(60)?;
/// assert!(memory.allocate(41).is_err());
/// // SAFETY: allocated just now, and nothing uses it.
/// unsafe { memory.free(address, 60)? };
/// # Ok::<(), remanent::Error>(())
/// ```
pub struct LimitedMemory<R: MemoryResource> {
    upstream: R,
    bytes_max: u64,
    bytes: AtomicU64,
}

impl<R: MemoryResource> LimitedMemory<R> {
    /// Wraps a source so that at most `bytes_max` bytes are allocated from it at a time.
    #[must_use]
    pub fn new(upstream: R, bytes_max: u64) -> Self {
        Self { upstream, bytes_max, bytes: AtomicU64::new(0) }
    }

    /// Returns the number of bytes currently allocated from the wrapped source.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

// SAFETY: memory of the wrapped source, passed through unchanged.
unsafe impl<R: MemoryResource> MemoryResource for LimitedMemory<R> {
    fn allocate(&self, len: u64) -> Result<u64> {
        // Claimed before the source is called, so that concurrent threads do not exceed the limit together.
        let claim = |bytes: u64| bytes.checked_add(len).filter(|sum| *sum <= self.bytes_max);
        if self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, claim).is_err() {
            return Err(Error::OutOfMemory { place: Place::Device(0), len });
        }
        self.upstream.allocate(len).inspect_err(|_| {
            self.bytes.fetch_sub(len, Ordering::Relaxed);
        })
    }

    unsafe fn free(&self, address: u64, len: u64) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.upstream.free(address, len) }?;
        self.bytes.fetch_sub(len, Ordering::Relaxed);
        Ok(())
    }

    fn trim(&self) -> Result<u64> {
        self.upstream.trim()
    }

    fn stats(&self) -> MemoryStats {
        self.upstream.stats()
    }
}

impl<R: MemoryResource> std::fmt::Debug for LimitedMemory<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LimitedMemory")
            .field("bytes_max", &self.bytes_max)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}
