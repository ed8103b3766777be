//! The allocators through which a trace is replayed. All of them use the same source of memory.
//!
//! This is the only file of the tool with unsafe code: it frees the memory that it allocated, and never
//! accesses it.

use std::sync::Arc;

use remanent::Result;
use remanent::device::RawStream;
use remanent::device::cuda::resource::{
    CachingMemory, DriverMemory, HostMemory, MemoryResource, Pool, StreamPoints,
};

use crate::allocation_trace::Event;

type Source = Arc<dyn MemoryResource>;

/// One of the allocators under comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllocatorKind {
    /// No allocator: every block's address is known in advance.
    Known,
    /// The driver, or the host's own allocator.
    Source,
    Pool,
    Caching,
    /// The caching allocator. Each block is freed while work on a stream may still use the block.
    BehindEvents,
}

impl AllocatorKind {
    /// Returns the available allocators, in the order of measurement.
    pub fn all(is_gpu: bool) -> Vec<Self> {
        let mut all = vec![Self::Known, Self::Source, Self::Pool, Self::Caching];
        all.extend(is_gpu.then_some(Self::BehindEvents));
        all
    }

    pub fn name(self, is_gpu: bool) -> &'static str {
        match self {
            Self::Known => "known addresses",
            Self::Source if is_gpu => "driver",
            Self::Source => "host allocator",
            Self::Pool => "pool",
            Self::Caching => "caching",
            Self::BehindEvents => "caching, behind events",
        }
    }

    /// Creates an allocator that holds no memory, over the memory of this GPU or of the host.
    pub fn make(self, gpu: Option<u32>) -> Result<Allocator> {
        let source: Source = match gpu {
            Some(ordinal) => Arc::new(DriverMemory::of(ordinal)?),
            None => Arc::new(HostMemory),
        };
        Ok(match (self, gpu) {
            (Self::Known, _) => Allocator::Known,
            (Self::Source, _) => Allocator::Source(source),
            (Self::Pool, _) => Allocator::Pool(Pool::new(source)),
            (Self::BehindEvents, Some(ordinal)) => {
                let points: Arc<dyn StreamPoints> = Arc::new(DriverMemory::of(ordinal)?);
                // SAFETY: the default stream exists as long as the process.
                let stream = unsafe { RawStream::from_cuda(0) };
                Allocator::BehindEvents(CachingMemory::with_streams(source, points), stream)
            }
            (Self::Caching | Self::BehindEvents, _) => Allocator::Caching(CachingMemory::new(source)),
        })
    }
}

/// An allocator, shared by threads.
pub enum Allocator {
    Known,
    Source(Source),
    Pool(Pool<Source>),
    Caching(CachingMemory<Source>),
    BehindEvents(CachingMemory<Source>, RawStream),
}

impl Allocator {
    /// Returns the maximum number of bytes that the allocator has held so far. `None` if it holds only the requested
    /// bytes.
    pub fn reserved_peak_bytes(&self) -> Option<u64> {
        match self {
            Self::Known | Self::Source(_) => None,
            // The pool never returns memory to its source on its own.
            Self::Pool(pool) => Some(pool.stats().reserved_bytes),
            Self::Caching(memory) | Self::BehindEvents(memory, _) => {
                Some(memory.cache_stats().reserved_peak_bytes)
            }
        }
    }

    fn allocate(&self, slot: usize, len: u64) -> Result<u64> {
        match self {
            Self::Known => Ok(64 * (slot as u64 + 1)),
            Self::Source(source) => source.allocate(len),
            Self::Pool(pool) => pool.allocate(len),
            Self::Caching(memory) => memory.allocate(len),
            Self::BehindEvents(memory, stream) => memory.allocate_on(len, *stream),
        }
    }

    /// Frees a block.
    ///
    /// # Safety
    /// The allocator returned `address` for this length, and nothing uses the memory.
    unsafe fn free(&self, address: u64, len: u64) -> Result<()> {
        match self {
            Self::Known => Ok(()),
            // SAFETY: required by this function's safety section.
            Self::Source(source) => unsafe { source.free(address, len) },
            // SAFETY: as above.
            Self::Pool(pool) => unsafe { pool.free(address, len) },
            // SAFETY: as above.
            Self::Caching(memory) => unsafe { memory.free(address, len) },
            // SAFETY: as above.
            Self::BehindEvents(memory, stream) => unsafe { memory.free_on(address, len, &[*stream]) },
        }
    }
}

/// The live blocks of one thread. Only their addresses are used.
pub struct LiveBlocks<'a> {
    allocator: &'a Allocator,
    /// Addresses and lengths, by slot.
    blocks: Vec<Option<(u64, u64)>>,
}

impl<'a> LiveBlocks<'a> {
    /// Creates `slots` slots without blocks.
    pub fn new(allocator: &'a Allocator, slots: usize) -> Self {
        Self { allocator, blocks: vec![None; slots] }
    }

    /// Makes one call of the trace. Freeing a slot without a block has no effect.
    pub fn call(&mut self, event: Event) -> Result<()> {
        match event {
            Event::Allocate { slot, len } => {
                self.blocks[slot] = Some((self.allocator.allocate(slot, len)?, len));
                Ok(())
            }
            Event::Free { slot } => self.give_back(slot),
        }
    }

    fn give_back(&mut self, slot: usize) -> Result<()> {
        let Some((address, len)) = self.blocks[slot].take() else { return Ok(()) };
        // SAFETY: the block was allocated for this slot and was just taken out of it, and nothing uses the
        // memory.
        unsafe { self.allocator.free(address, len) }
    }
}

impl Drop for LiveBlocks<'_> {
    /// Frees the blocks that the trace has not freed, because it ended or failed before that.
    fn drop(&mut self) {
        for slot in 0..self.blocks.len() {
            // The run ends with the first error, which was already reported.
            let _ = self.give_back(slot);
        }
    }
}
