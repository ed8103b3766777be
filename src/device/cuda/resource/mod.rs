//! Sources of a GPU's memory: the trait [`MemoryResource`], and wrappers that implement it.
//!
//! The driver is one such source ([`DriverMemory`]). A caller's allocator can be another: a store and a framework then
//! share one pool, and neither keeps idle memory that the other needs. The other types wrap a source, in any order:
//!
//! - [`Pool`] divides long blocks into blocks of a few lengths.
//! - [`CachingMemory`] divides long blocks into blocks of any length and joins free ones.
//! - [`LimitedMemory`] enforces a limit.
//! - [`LoggedMemory`] reports each call.
//! - [`GuardedMemory`] detects invalid writes.
//!
//! A source does not wait for fences: a caller frees memory after waiting for its last use. Only [`CachingMemory`]
//! accepts memory earlier, if the caller names the streams that use it.

mod caching;
mod classes;
mod driver;
mod guard;
mod limit;
mod logger;
mod pool;
#[cfg(test)]
mod tests;

use std::sync::Arc;

pub use self::caching::{CacheStats, CachingMemory, StreamPoint, StreamPoints};
pub(super) use self::driver::Kind;
pub use self::driver::{DriverMemory, HostMemory};
pub use self::guard::{GuardedMemory, MemoryAccess};
pub use self::limit::LimitedMemory;
pub use self::logger::LoggedMemory;
pub use self::pool::Pool;
pub(super) use self::pool::{SHARDS, own_shard};
use crate::device::MemoryStats;
use crate::error::{Error, Result};

/// The alignment of every address in bytes: four of the kernels' widest accesses, two of a GPU's sectors.
pub const ALIGN: u64 = 64;

/// A source of memory that a GPU can access, shared by threads.
///
/// # Safety
/// From `allocate` until `free`, the `len` bytes at the address must belong to the caller alone, and the kernels of the
/// device that uses the source must be able to read and write these bytes. If the source provides pinned or managed
/// memory, the host must be able to as well. Addresses must be multiples of [`ALIGN`] and never 0.
pub unsafe trait MemoryResource: Send + Sync + 'static {
    /// Allocates `len` bytes, at least one, with unspecified contents, and returns their address.
    ///
    /// # Errors
    /// `OutOfMemory` if the source is exhausted; the caller may then free idle memory and try again. A device error.
    fn allocate(&self, len: u64) -> Result<u64>;

    /// Makes `count` allocations of `len` bytes, as [`allocate`](Self::allocate) does, and appends their addresses to
    /// `found`. On failure, `found` contains the addresses of the allocations made before the failure.
    ///
    /// # Errors
    /// Same as `allocate`.
    fn allocate_all(&self, len: u64, count: usize, found: &mut Vec<u64>) -> Result<()> {
        for _ in 0..count {
            found.push(self.allocate(len)?);
        }
        Ok(())
    }

    /// Frees allocated memory.
    ///
    /// # Errors
    /// A device error; the memory is then leaked.
    ///
    /// # Safety
    /// The address must come from this source, with this length, and must not have been freed. No work on any stream
    /// may use the memory any more.
    unsafe fn free(&self, address: u64, len: u64) -> Result<()>;

    /// Frees several allocations of the same length, as [`free`](Self::free) does. Calls `failed` with the index of
    /// each address that could not be freed, and the error.
    ///
    /// # Safety
    /// Same as `free`, for each address.
    unsafe fn free_all(&self, addresses: &[u64], len: u64, failed: &mut dyn FnMut(usize, Error)) {
        for (index, address) in addresses.iter().enumerate() {
            // SAFETY: the caller's promise.
            if let Err(error) = unsafe { self.free(*address, len) } {
                failed(index, error);
            }
        }
    }

    /// Gives unused memory back to the wrapped source, and returns its length in bytes. The driver then waits for all
    /// work of the GPU, including the caller's own. Call this only in a shortage or when the user requests it.
    ///
    /// # Errors
    /// A device error.
    fn trim(&self) -> Result<u64> {
        Ok(0)
    }

    /// Returns the number of bytes requested and held, and the number of requests.
    fn stats(&self) -> MemoryStats {
        MemoryStats::default()
    }
}

// SAFETY: the promise of the wrapped source.
unsafe impl<R: MemoryResource + ?Sized> MemoryResource for Arc<R> {
    fn allocate(&self, len: u64) -> Result<u64> {
        (**self).allocate(len)
    }

    fn allocate_all(&self, len: u64, count: usize, found: &mut Vec<u64>) -> Result<()> {
        (**self).allocate_all(len, count, found)
    }

    unsafe fn free(&self, address: u64, len: u64) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { (**self).free(address, len) }
    }

    unsafe fn free_all(&self, addresses: &[u64], len: u64, failed: &mut dyn FnMut(usize, Error)) {
        // SAFETY: the caller's promise.
        unsafe { (**self).free_all(addresses, len, failed) }
    }

    fn trim(&self) -> Result<u64> {
        (**self).trim()
    }

    fn stats(&self) -> MemoryStats {
        (**self).stats()
    }
}
