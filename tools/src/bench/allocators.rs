//! The allocators that a trace is replayed through, each over the same source of memory.
//!
//! The one file of the tool with unsafe code: it gives back what it took, and uses none of it.

use std::sync::Arc;

use remanent::Result;
use remanent::device::RawStream;
use remanent::device::cuda::resource::{
    CachingMemory, DriverMemory, HostMemory, MemoryResource, Pool, StreamPoints,
};

use super::allocation_trace::Event;

type Source = Arc<dyn MemoryResource>;

/// One of the allocators that take turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllocatorKind {
    /// None: every block's address is known beforehand.
    Known,
    /// The driver, or the host's own allocator.
    Source,
    Pool,
    Caching,
    /// The same, with each block given back while work on a stream may still use it.
    BehindEvents,
}

impl AllocatorKind {
    /// Those that there are, in the order of their turns.
    pub fn all(is_gpu: bool) -> Vec<Self> {
        let mut all = vec![Self::Known, Self::Source, Self::Pool, Self::Caching];
        all.extend(is_gpu.then_some(Self::BehindEvents));
        all
    }

    pub fn name(self, is_gpu: bool) -> &'static str {
        match self {
            Self::Known => "addresses known beforehand",
            Self::Source if is_gpu => "driver",
            Self::Source => "the host's own",
            Self::Pool => "pool",
            Self::Caching => "caching",
            Self::BehindEvents => "caching, behind events",
        }
    }

    /// An allocator that holds nothing yet, over the driver's memory of this GPU or the host's.
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
                // SAFETY: the default stream is there as long as the process.
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
    /// The most bytes that it held so far; `None` where it holds no more than is asked for.
    pub fn reserved_peak_bytes(&self) -> Option<u64> {
        match self {
            Self::Known | Self::Source(_) => None,
            // It gives nothing back before it is asked to.
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

    /// Takes back a block.
    ///
    /// # Safety
    /// It gave the address, for this length, and nothing uses the memory.
    unsafe fn free(&self, address: u64, len: u64) -> Result<()> {
        match self {
            Self::Known => Ok(()),
            // SAFETY: the caller's promise.
            Self::Source(source) => unsafe { source.free(address, len) },
            // SAFETY: the same.
            Self::Pool(pool) => unsafe { pool.free(address, len) },
            // SAFETY: the same.
            Self::Caching(memory) => unsafe { memory.free(address, len) },
            // SAFETY: the same.
            Self::BehindEvents(memory, stream) => unsafe { memory.free_on(address, len, &[*stream]) },
        }
    }
}

/// The live blocks of one thread. Nothing uses them but for their addresses.
pub struct LiveBlocks<'a> {
    allocator: &'a Allocator,
    /// Addresses and lengths by slot.
    blocks: Vec<Option<(u64, u64)>>,
}

impl<'a> LiveBlocks<'a> {
    /// No block yet, and this number of slots.
    pub fn new(allocator: &'a Allocator, slots: usize) -> Self {
        Self { allocator, blocks: vec![None; slots] }
    }

    /// Makes a call of the trace's. A slot without a block is freed by no trace.
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
        // SAFETY: allocated for this slot, from which it was taken just now, and nothing uses the memory.
        unsafe { self.allocator.free(address, len) }
    }
}

impl Drop for LiveBlocks<'_> {
    /// Gives back what the trace left, or did not come to.
    fn drop(&mut self) {
        for slot in 0..self.blocks.len() {
            // The run ends with the first error, which was told.
            let _ = self.give_back(slot);
        }
    }
}
