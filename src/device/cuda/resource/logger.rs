//! A source that reports each call as a tracing event.

use super::MemoryResource;
use crate::device::MemoryStats;
use crate::error::Result;

/// Reports every allocation and release of another source as a trace event, and every failure as a warning. Place it
/// behind a [`Pool`](super::Pool) to observe requests to the driver, or in front of the pool to observe requests for
/// pages.
pub struct LoggedMemory<R: MemoryResource> {
    upstream: R,
    name: &'static str,
}

impl<R: MemoryResource> LoggedMemory<R> {
    /// Wraps a source. The events contain `name`, which identifies the source.
    #[must_use]
    pub fn new(upstream: R, name: &'static str) -> Self {
        Self { upstream, name }
    }
}

// SAFETY: memory of the wrapped source, passed through unchanged.
unsafe impl<R: MemoryResource> MemoryResource for LoggedMemory<R> {
    fn allocate(&self, len: u64) -> Result<u64> {
        let allocated = self.upstream.allocate(len);
        match &allocated {
            Ok(address) => tracing::trace!(name = self.name, address, len, "memory allocated"),
            Err(error) => tracing::warn!(name = self.name, len, %error, "memory not allocated"),
        }
        allocated
    }

    unsafe fn free(&self, address: u64, len: u64) -> Result<()> {
        // SAFETY: the caller's promise.
        let freed = unsafe { self.upstream.free(address, len) };
        match &freed {
            Ok(()) => tracing::trace!(name = self.name, address, len, "memory freed"),
            Err(error) => tracing::warn!(name = self.name, address, len, %error, "memory not freed"),
        }
        freed
    }

    fn trim(&self) -> Result<u64> {
        let trimmed = self.upstream.trim()?;
        tracing::trace!(name = self.name, bytes = trimmed, "memory trimmed");
        Ok(trimmed)
    }

    fn stats(&self) -> MemoryStats {
        self.upstream.stats()
    }
}

impl<R: MemoryResource> std::fmt::Debug for LoggedMemory<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LoggedMemory").field("name", &self.name).finish_non_exhaustive()
    }
}
