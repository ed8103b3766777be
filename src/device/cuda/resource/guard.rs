//! A source that detects misuse. Each allocation is recorded, placed between canaries, and filled with poison when it
//! is allocated and when it is freed.
//!
//! Each allocation and each release makes at least three copies and waits for each of them. Place the guard in front of
//! a [`Pool`](super::Pool). Behind a pool, it would guard slabs and miss a page that writes into its neighbor in the
//! same slab.

use std::collections::BTreeMap;

use super::{ALIGN, MemoryResource};
use crate::base::sync::Mutex;
use crate::device::MemoryStats;
use crate::error::{Error, Result};

/// The length of each canary in bytes.
const CANARY_LEN: u64 = ALIGN;
/// The byte that fills canaries.
const CANARY: u8 = 0xC5;
/// The byte that fills memory before it is first written and after it is freed. Interpreted as a float of any width, it
/// yields a value that no computation expects.
const POISON: u8 = 0xDB;
/// The number of bytes of poison written per copy.
const STEP: usize = 1 << 20;

/// Host access to a source's memory, which may be GPU or host memory. A [`GuardedMemory`] uses it for canaries and
/// poison.
///
/// # Safety
/// When a call returns, its write or read must be complete.
pub unsafe trait MemoryAccess {
    /// Writes `bytes` at the address.
    ///
    /// # Errors
    /// A device error.
    ///
    /// # Safety
    /// The range must be within allocated memory of this source, and nothing else may use it.
    unsafe fn write(&self, address: u64, bytes: &[u8]) -> Result<()>;

    /// Reads bytes at the address.
    ///
    /// # Errors
    /// A device error.
    ///
    /// # Safety
    /// The range must be within allocated memory of this source, and no other code may write to it.
    unsafe fn read(&self, address: u64, bytes: &mut [u8]) -> Result<()>;
}

/// Detects writes beyond the ends of an allocation, memory that is freed twice or with another length, and memory that
/// is never freed. Uninitialized and freed memory is poisoned, so that a read of such memory is noticeable.
///
/// ```
/// use remanent::device::cuda::resource::{GuardedMemory, HostMemory, MemoryAccess, MemoryResource, Pool};
/// let memory = GuardedMemory::new(Pool::new(HostMemory), HostMemory);
/// let address = memory.allocate(100)?;
/// assert_eq!(memory.live(), [(address, 100)]);
/// // SAFETY: the byte after the allocation is the guard's own.
/// unsafe { HostMemory.write(address + 100, &[1])? };
/// // SAFETY: allocated above, and nothing uses it.
/// let freed = unsafe { memory.free(address, 100) };
/// assert!(freed.unwrap_err().to_string().contains("byte 0 past the end"));
/// # Ok::<(), remanent::Error>(())
/// ```
pub struct GuardedMemory<R: MemoryResource, A: MemoryAccess> {
    upstream: R,
    access: A,
    /// The length of each live allocation in bytes, by address.
    live: Mutex<BTreeMap<u64, u64>>,
}

impl<R: MemoryResource, A: MemoryAccess> GuardedMemory<R, A> {
    /// Wraps a source. The guard reads and writes the source's memory through `access`.
    #[must_use]
    pub fn new(upstream: R, access: A) -> Self {
        Self { upstream, access, live: Mutex::default() }
    }

    /// Returns the address and the length of each allocation that is not freed yet.
    #[must_use]
    pub fn live(&self) -> Vec<(u64, u64)> {
        self.live.lock().iter().map(|(address, len)| (*address, *len)).collect()
    }

    /// Fills a range with one byte.
    ///
    /// # Safety
    /// Same as [`MemoryAccess::write`].
    unsafe fn fill(&self, address: u64, len: u64, byte: u8) -> Result<()> {
        let bytes = vec![byte; STEP.min(len as usize)];
        for begin in (0..len).step_by(STEP) {
            let step_len = STEP.min((len - begin) as usize);
            // SAFETY: a part of the range that the caller promises.
            unsafe { self.access.write(address + begin, &bytes[..step_len]) }?;
        }
        Ok(())
    }

    /// Returns the index of the first overwritten byte of a canary, or `None` if the canary is intact.
    ///
    /// # Safety
    /// Same as [`MemoryAccess::read`], for a canary's length.
    unsafe fn broken(&self, address: u64) -> Result<Option<usize>> {
        let mut canary = [0; CANARY_LEN as usize];
        // SAFETY: the caller's promise.
        unsafe { self.access.read(address, &mut canary) }?;
        Ok(canary.iter().position(|byte| *byte != CANARY))
    }
}

/// Returns the length of an allocation together with its two canaries. The end of an allocation need not be aligned.
fn outer_len(len: u64) -> Option<u64> {
    len.checked_add(2 * CANARY_LEN)
}

fn misuse(reason: String) -> Error {
    Error::Device { reason: format!("misuse of memory: {reason}"), context_lost: false }
}

// SAFETY: the part between the canaries of memory of the wrapped source. It begins at a multiple of `ALIGN`,
// where a canary ends.
unsafe impl<R: MemoryResource, A: MemoryAccess + Send + Sync + 'static> MemoryResource
    for GuardedMemory<R, A>
{
    fn allocate(&self, len: u64) -> Result<u64> {
        let too_long = Error::OutOfMemory { place: remanent_format::Place::Device(0), len };
        let outer = self.upstream.allocate(outer_len(len).ok_or(too_long)?)?;
        let address = outer + CANARY_LEN;
        for (begin, len, byte) in
            [(outer, CANARY_LEN, CANARY), (address, len, POISON), (address + len, CANARY_LEN, CANARY)]
        {
            // SAFETY: within the memory allocated above.
            unsafe { self.fill(begin, len, byte) }?;
        }
        self.live.lock().insert(address, len);
        Ok(address)
    }

    /// Checks the canaries of an allocation, fills it with poison, and frees it.
    ///
    /// # Errors
    /// A device error that describes the misuse. If a canary was overwritten, the memory is not freed, so that it can
    /// be inspected.
    unsafe fn free(&self, address: u64, len: u64) -> Result<()> {
        match self.live.lock().remove(&address) {
            Some(allocated) if allocated == len => {}
            Some(allocated) => {
                return Err(misuse(format!("{allocated} bytes at {address:#x} are freed as {len}")));
            }
            None => return Err(misuse(format!("{len} bytes at {address:#x} are freed and not allocated"))),
        }
        // SAFETY: the canary before the allocation, which no other code may use.
        if let Some(byte) = unsafe { self.broken(address - CANARY_LEN) }? {
            let distance = CANARY_LEN as usize - byte;
            let reason = format!("{len} bytes at {address:#x}: the byte {distance} before them was written");
            return Err(misuse(reason));
        }
        // SAFETY: the same for the canary after it.
        if let Some(byte) = unsafe { self.broken(address + len) }? {
            let reason = format!("{len} bytes at {address:#x}: byte {byte} past the end was written");
            return Err(misuse(reason));
        }
        // SAFETY: the caller has freed the memory, and the wrapped source still counts it as allocated by the
        // guard.
        unsafe { self.fill(address, len, POISON) }?;
        let outer = outer_len(len).expect("a length that was allocated");
        // SAFETY: the address that `allocate` got, for the same length; the caller's promise for the rest.
        unsafe { self.upstream.free(address - CANARY_LEN, outer) }
    }

    fn trim(&self) -> Result<u64> {
        self.upstream.trim()
    }

    fn stats(&self) -> MemoryStats {
        self.upstream.stats()
    }
}

impl<R: MemoryResource, A: MemoryAccess> Drop for GuardedMemory<R, A> {
    fn drop(&mut self) {
        let live = self.live.get_mut();
        if !live.is_empty() {
            let bytes: u64 = live.values().sum();
            tracing::warn!(count = live.len(), bytes, first = live.keys().next(), "memory was never freed");
        }
    }
}

impl<R: MemoryResource, A: MemoryAccess> std::fmt::Debug for GuardedMemory<R, A> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GuardedMemory").finish_non_exhaustive()
    }
}
