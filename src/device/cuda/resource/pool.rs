//! Blocks cut from slabs. A driver allocation takes up to milliseconds, and freeing one stops the whole GPU. A pool
//! therefore makes few of these calls.
//!
//! Free blocks are kept in shards. Each thread has a shard of its own, so threads that allocate concurrently acquire
//! different locks. If its own shard is empty, a thread takes half of another shard before it requests a new slab, so
//! that shards cost no memory. A free block stays with its class until [`trim`](MemoryResource::trim) is called.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::MemoryResource;
use super::classes::{CLASSES, Class, SLAB_LEN_MAX};
use crate::base::cache_padded::CachePadded;
use crate::base::sync::Mutex;
use crate::device::MemoryStats;
use crate::error::{Error, Result};

/// The number of shards. More shards would only spread the free blocks more thinly over the threads that allocate
/// concurrently.
pub(in crate::device::cuda) const SHARDS: usize = 8;

/// Serves blocks of a few lengths, called classes, from slabs of another source.
///
/// ```
/// use remanent::device::cuda::resource::{HostMemory, MemoryResource, Pool};
/// let pool = Pool::new(HostMemory);
/// let address = pool.allocate(1000)?;
/// // SAFETY: allocated just now, and nothing uses it.
/// unsafe { pool.free(address, 1000)? };
/// let stats = pool.stats();
/// assert_eq!((stats.used_bytes, stats.misses), (0, 1));
/// assert_eq!(pool.trim()?, stats.reserved_bytes);
/// # Ok::<(), remanent::Error>(())
/// ```
pub struct Pool<R: MemoryResource> {
    upstream: R,
    slab_len_max: u64,
    shared: Vec<SharedClass>,
    /// Addresses of free blocks that occupy slabs of their own, by length.
    dedicated: Mutex<BTreeMap<u64, Vec<u64>>>,
    counts: Counts,
}

#[derive(Default)]
struct SharedClass {
    slabs: Mutex<Vec<PoolSlab>>,
    /// Addresses of free blocks. A thread holds one shard's lock at a time, except when trimming. Each shard has its
    /// own cache line: on 16 cores, two threads whose shards shared a line needed 275 ns for a pop and a push, one
    /// thread 44 ns.
    shards: [CachePadded<Mutex<Vec<u64>>>; SHARDS],
}

#[derive(Clone, Copy)]
struct PoolSlab {
    address: u64,
    len: u64,
}

#[derive(Default)]
struct Counts {
    reserved_bytes: AtomicU64,
    used_bytes: AtomicU64,
    hits: AtomicU64,
    misses: AtomicU64,
}

impl<R: MemoryResource> Pool<R> {
    /// Creates an empty pool with the default maximum slab length.
    #[must_use]
    pub fn new(upstream: R) -> Self {
        Self::with_slabs_up_to(SLAB_LEN_MAX, upstream)
    }

    /// Creates an empty pool whose slabs are no longer than `slab_len_max` bytes, rounded up to whole blocks. Use it
    /// for a source that charges by bytes rather than by calls, and whose memory should not be idle.
    #[must_use]
    pub fn with_slabs_up_to(slab_len_max: u64, upstream: R) -> Self {
        let shared = (0..CLASSES).map(|_| SharedClass::default()).collect();
        Self { upstream, slab_len_max, shared, dedicated: Mutex::default(), counts: Counts::default() }
    }

    fn take(&self, class: Class) -> Option<u64> {
        match class {
            Class::Shared(index) => self.shared[index].take(),
            Class::Dedicated(len) => self.dedicated.lock().get_mut(&len)?.pop(),
        }
    }

    /// Requests a slab and allocates its first block. No lock is held during the request. Another thread may therefore
    /// also request a slab, which later allocations will use.
    fn grow(&self, class: Class) -> Result<u64> {
        let Class::Shared(index) = class else {
            return self.slab(class.block_len());
        };
        let shared = &self.shared[index];
        let count = shared.slabs.lock().len();
        let mut len = class.slab_len(count, self.slab_len_max);
        let address = match self.slab(len) {
            Err(Error::OutOfMemory { .. }) if class.slab_len(0, self.slab_len_max) < len => {
                len = class.slab_len(0, self.slab_len_max);
                self.slab(len)?
            }
            other => other?,
        };
        shared.slabs.lock().push(PoolSlab { address, len });
        // Reversed, because blocks are taken from the end of the list. The first block is returned to the caller
        // instead.
        let blocks = (1..len / class.block_len()).rev().map(|block| address + block * class.block_len());
        shared.shards[own_shard()].lock().extend(blocks);
        Ok(address)
    }

    fn slab(&self, len: u64) -> Result<u64> {
        let address = self.upstream.allocate(len)?;
        self.counts.reserved_bytes.fetch_add(len, Ordering::Relaxed);
        Ok(address)
    }
}

// SAFETY: a block is within a slab that the wrapped source allocated, or is one; blocks of a slab do not
// overlap, and an allocated block is in no shard until it is freed. Slabs begin at multiples of `ALIGN`, and
// so do their blocks, because the lengths of all classes are multiples of it.
unsafe impl<R: MemoryResource> MemoryResource for Pool<R> {
    fn allocate(&self, len: u64) -> Result<u64> {
        let out_of_memory = Error::OutOfMemory { place: remanent_format::Place::Device(0), len };
        let class = Class::of(len).ok_or(out_of_memory)?;
        let (address, counted) = match self.take(class) {
            Some(address) => (address, &self.counts.hits),
            None => (self.grow(class)?, &self.counts.misses),
        };
        counted.fetch_add(1, Ordering::Relaxed);
        self.counts.used_bytes.fetch_add(class.block_len(), Ordering::Relaxed);
        Ok(address)
    }

    /// Acquires the lock of each shard only once, and takes as many blocks from the shard as it has.
    fn allocate_all(&self, len: u64, count: usize, found: &mut Vec<u64>) -> Result<()> {
        let Some(class @ Class::Shared(index)) = Class::of(len) else {
            for _ in 0..count {
                found.push(self.allocate(len)?);
            }
            return Ok(());
        };
        let mut left = count;
        while left > 0 {
            let before = found.len();
            self.shared[index].take_up_to(left, found);
            let taken = found.len() - before;
            self.counts.hits.fetch_add(taken as u64, Ordering::Relaxed);
            self.counts.used_bytes.fetch_add(taken as u64 * class.block_len(), Ordering::Relaxed);
            left -= taken;
            if left > 0 {
                // Allocates a slab, or finds a block that another thread freed in between.
                found.push(self.allocate(len)?);
                left -= 1;
            }
        }
        Ok(())
    }

    unsafe fn free(&self, address: u64, len: u64) -> Result<()> {
        let class = Class::of(len).expect("a length that was allocated");
        self.counts.used_bytes.fetch_sub(class.block_len(), Ordering::Relaxed);
        match class {
            Class::Shared(index) => self.shared[index].shards[own_shard()].lock().push(address),
            Class::Dedicated(len) => self.dedicated.lock().entry(len).or_default().push(address),
        }
        Ok(())
    }

    unsafe fn free_all(&self, addresses: &[u64], len: u64, failed: &mut dyn FnMut(usize, Error)) {
        let class = Class::of(len).expect("a length that was allocated");
        let Class::Shared(index) = class else {
            for (index, address) in addresses.iter().enumerate() {
                // SAFETY: the caller's promise.
                if let Err(error) = unsafe { self.free(*address, len) } {
                    failed(index, error);
                }
            }
            return;
        };
        let bytes = addresses.len() as u64 * class.block_len();
        self.counts.used_bytes.fetch_sub(bytes, Ordering::Relaxed);
        // Reversed, because blocks are taken from the end of the list. Pages with adjacent memory thus stay adjacent.
        self.shared[index].shards[own_shard()].lock().extend(addresses.iter().rev());
    }

    fn trim(&self) -> Result<u64> {
        let mut empty: Vec<PoolSlab> =
            self.shared.iter().enumerate().flat_map(SharedClass::take_empty).collect();
        for (len, addresses) in std::mem::take(&mut *self.dedicated.lock()) {
            empty.extend(addresses.into_iter().map(|address| PoolSlab { address, len }));
        }
        let mut trimmed = Ok(0);
        for PoolSlab { address, len } in empty {
            // SAFETY: the source allocated it, all its blocks are free, and it is in no list any more.
            let freed = unsafe { self.upstream.free(address, len) };
            self.counts.reserved_bytes.fetch_sub(len, Ordering::Relaxed);
            // A slab that cannot be freed does not prevent freeing the others.
            trimmed = trimmed.and_then(|bytes| freed.map(|()| bytes + len));
        }
        Ok(trimmed? + self.upstream.trim()?)
    }

    fn stats(&self) -> MemoryStats {
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        MemoryStats {
            reserved_bytes: count(&self.counts.reserved_bytes),
            used_bytes: count(&self.counts.used_bytes),
            hits: count(&self.counts.hits),
            misses: count(&self.counts.misses),
        }
    }
}

impl<R: MemoryResource> Drop for Pool<R> {
    /// Returns free slabs to the source. Slabs with blocks that were never freed stay allocated, because they may still
    /// be in use.
    fn drop(&mut self) {
        if let Err(error) = self.trim() {
            tracing::warn!(%error, "cannot return memory to the driver");
        }
        let still_reserved = *self.counts.reserved_bytes.get_mut();
        if still_reserved > 0 {
            tracing::warn!(bytes = still_reserved, "memory that is still in use stays allocated");
        }
    }
}

impl SharedClass {
    /// Takes a free block from the thread's own shard. If that shard is empty, first moves half of another shard to it.
    fn take(&self) -> Option<u64> {
        let own = own_shard();
        if let Some(address) = self.shards[own].lock().pop() {
            return Some(address);
        }
        for other in (1..SHARDS).map(|distance| (own + distance) % SHARDS) {
            let mut moved = {
                let mut free = self.shards[other].lock();
                let kept = free.len() / 2;
                free.split_off(kept)
            };
            if let Some(address) = moved.pop() {
                self.shards[own].lock().append(&mut moved);
                return Some(address);
            }
        }
        None
    }

    /// Takes up to `count` free blocks, first from the thread's own shard, then from others.
    fn take_up_to(&self, count: usize, found: &mut Vec<u64>) {
        let (own, end) = (own_shard(), found.len() + count);
        for shard in (0..SHARDS).map(|distance| (own + distance) % SHARDS) {
            let mut free = self.shards[shard].lock();
            let kept = free.len().saturating_sub(end - found.len());
            found.extend(free.drain(kept..).rev());
        }
    }

    /// Removes and returns the slabs whose blocks are all free.
    fn take_empty((index, class): (usize, &Self)) -> Vec<PoolSlab> {
        let block_len = Class::Shared(index).block_len();
        let mut slabs = class.slabs.lock();
        let mut shards: Vec<_> = class.shards.iter().map(|shard| shard.lock()).collect();
        let mut free: Vec<u64> = shards.iter().flat_map(|shard| shard.iter().copied()).collect();
        free.sort_unstable();
        let free_in = |slab: &PoolSlab| {
            let until = |end: u64| free.partition_point(|address| *address < end);
            (until(slab.address + slab.len) - until(slab.address)) as u64
        };
        let (mut empty, used): (Vec<PoolSlab>, Vec<PoolSlab>) =
            slabs.iter().partition(|slab| free_in(slab) * block_len == slab.len);
        // There may be thousands of slabs and a hundred times as many blocks, so slabs are found by binary search.
        empty.sort_unstable_by_key(|slab| slab.address);
        let is_within_empty = |address: u64| {
            let after = empty.partition_point(|slab| slab.address <= address);
            after.checked_sub(1).is_some_and(|last| address < empty[last].address + empty[last].len)
        };
        if !empty.is_empty() {
            for shard in &mut shards {
                shard.retain(|address| !is_within_empty(*address));
            }
        }
        *slabs = used;
        empty
    }
}

/// Returns the index of the calling thread's shard. Shards are assigned to threads in turn on first use.
pub(in crate::device::cuda) fn own_shard() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static OWN: Cell<usize> = const { Cell::new(usize::MAX) });
    OWN.with(|own| {
        if own.get() == usize::MAX {
            own.set(NEXT.fetch_add(1, Ordering::Relaxed) % SHARDS);
        }
        own.get()
    })
}

impl<R: MemoryResource> std::fmt::Debug for Pool<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("slab_len_max", &self.slab_len_max).finish_non_exhaustive()
    }
}
