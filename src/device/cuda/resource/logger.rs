//! A source that reports each call: as an event, to any subscriber.

use super::MemoryResource;
use crate::device::MemoryStats;
use crate::error::Result;

/// Reports every allocation, every release and every refusal of another source as events of level trace;
/// those that fail as warnings. Put it behind a [`Pool`](super::Pool) to see what the driver is asked for, in
/// front of it to see what pages ask for.
pub struct LoggedMemory<R: MemoryResource> {
    upstream: R,
    name: &'static str,
}

impl<R: MemoryResource> LoggedMemory<R> {
    /// A source whose events carry this name.
    #[must_use]
    pub fn new(upstream: R, name: &'static str) -> Self {
        Self { upstream, name }
    }
}

// SAFETY: memory of the source within, passed on as it is.
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
        // SAFETY: passed on.
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
