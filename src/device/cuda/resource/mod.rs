//! Sources of a GPU's memory: one small trait, and the wrappers that can be put around it.
//!
//! The driver is such a source ([`DriverMemory`]). An allocator of the caller's own can be another, so that a
//! store and a framework share one pool instead of each holding back what the other lacks. The rest wrap a
//! source, in any order: [`Pool`] cuts blocks of few lengths from long ones, [`CachingMemory`] blocks of any
//! length, which it joins again, [`LimitedMemory`] holds a limit, [`LoggedMemory`] reports each call,
//! [`GuardedMemory`] finds writes where none may be.
//!
//! No other one knows of fences: a caller frees memory once it has waited for the last use. [`CachingMemory`]
//! takes it back before, where it is told the streams.

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

/// Every address is a multiple of this: four of the kernels' widest accesses, two of a GPU's sectors.
pub const ALIGN: u64 = 64;

/// A source of memory that a GPU can reach. Shared by threads.
///
/// # Safety
/// From `allocate` until `free` the `len` bytes at the address belong to the caller alone, and the kernels of
/// the device that the source is given to can read and write them; the host can too if the source is one of
/// pinned or managed memory. Addresses are multiples of [`ALIGN`] and never 0.
pub unsafe trait MemoryResource: Send + Sync + 'static {
    /// The address of `len` bytes, at least one, of unspecified content.
    ///
    /// # Errors
    /// `OutOfMemory` if there are none left: the caller may give back idle memory and ask again. A device
    /// error.
    fn allocate(&self, len: u64) -> Result<u64>;

    /// Allocates `count` times `len` bytes, as [`allocate`](Self::allocate) does, and adds the addresses to
    /// `found`; without success, those of what was allocated by then.
    ///
    /// # Errors
    /// As for `allocate`.
    fn allocate_all(&self, len: u64, count: usize, found: &mut Vec<u64>) -> Result<()> {
        for _ in 0..count {
            found.push(self.allocate(len)?);
        }
        Ok(())
    }

    /// Takes memory back from the caller.
    ///
    /// # Errors
    /// A device error; the memory is lost then.
    ///
    /// # Safety
    /// This source gave the address, for this length, and has not got it back; nothing uses the memory any
    /// more, on any stream.
    unsafe fn free(&self, address: u64, len: u64) -> Result<()>;

    /// Takes memory of one length back, as [`free`](Self::free) does. Tells `failed` of the addresses at
    /// which that failed, by their index.
    ///
    /// # Safety
    /// As for `free`, of each address.
    unsafe fn free_all(&self, addresses: &[u64], len: u64, failed: &mut dyn FnMut(usize, Error)) {
        for (index, address) in addresses.iter().enumerate() {
            // SAFETY: passed on.
            if let Err(error) = unsafe { self.free(*address, len) } {
                failed(index, error);
            }
        }
    }

    /// Gives unused memory back to its own source, and returns how many bytes that was. The driver waits for
    /// all the GPU's work then, the caller's own included, so this is for shortages and for callers that ask
    /// for it.
    ///
    /// # Errors
    /// A device error.
    fn trim(&self) -> Result<u64> {
        Ok(0)
    }

    /// The bytes asked for and the bytes held.
    fn stats(&self) -> MemoryStats {
        MemoryStats::default()
    }
}

// SAFETY: the promise of the source within.
unsafe impl<R: MemoryResource + ?Sized> MemoryResource for Arc<R> {
    fn allocate(&self, len: u64) -> Result<u64> {
        (**self).allocate(len)
    }

    fn allocate_all(&self, len: u64, count: usize, found: &mut Vec<u64>) -> Result<()> {
        (**self).allocate_all(len, count, found)
    }

    unsafe fn free(&self, address: u64, len: u64) -> Result<()> {
        // SAFETY: passed on.
        unsafe { (**self).free(address, len) }
    }

    unsafe fn free_all(&self, addresses: &[u64], len: u64, failed: &mut dyn FnMut(usize, Error)) {
        // SAFETY: passed on.
        unsafe { (**self).free_all(addresses, len, failed) }
    }

    fn trim(&self) -> Result<u64> {
        (**self).trim()
    }

    fn stats(&self) -> MemoryStats {
        (**self).stats()
    }
}
