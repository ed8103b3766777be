//! Memory of one place, for the users in this folder: blocks of a source that no outside code can misuse.

use std::fmt;
use std::sync::Arc;

use remanent_format::Place;

use super::resource::MemoryResource;
use crate::device::MemoryStats;
use crate::error::{Error, Result};

/// The memory of one place. Shared by threads.
#[derive(Clone)]
pub(super) struct PlaceMemory {
    /// The place that a shortage is reported for.
    pub place: Place,
    source: Arc<dyn MemoryResource>,
}

/// Memory handed out; given back when it is dropped. An owner that cannot know whether it is still used
/// forgets it.
pub(super) struct DeviceBlock {
    /// The address of the first byte, to GPU and host alike.
    pub address: u64,
    /// Length in bytes, as it was asked for.
    pub len: u64,
    memory: PlaceMemory,
}

impl PlaceMemory {
    /// The memory of a source.
    pub fn new(place: Place, source: Arc<dyn MemoryResource>) -> Self {
        Self { place, source }
    }

    /// A block of `len` bytes, which hold whatever their last user left; at least one is allocated.
    ///
    /// # Errors
    /// `OutOfMemory`, a device error.
    pub fn allocate(&self, len: u64) -> Result<DeviceBlock> {
        let place = self.place;
        let address = self.source.allocate(len.max(1)).map_err(|error| match error {
            Error::OutOfMemory { .. } => Error::OutOfMemory { place, len },
            other => other,
        })?;
        Ok(DeviceBlock { address, len, memory: self.clone() })
    }

    /// As [`allocate`](Self::allocate), for `count` blocks that are taken apart already; adds their addresses
    /// to `found`, without success those of what was allocated by then.
    ///
    /// # Errors
    /// As for `allocate`.
    pub fn allocate_all(&self, len: u64, count: usize, found: &mut Vec<u64>) -> Result<()> {
        let place = self.place;
        self.source.allocate_all(len, count, found).map_err(|error| match error {
            Error::OutOfMemory { .. } => Error::OutOfMemory { place, len },
            other => other,
        })
    }

    /// Gives back blocks that were taken apart, and tells `failed` of those for which that failed.
    ///
    /// # Safety
    /// They were of this memory and of this length, and this is done once.
    pub unsafe fn free_all(&self, addresses: &[u64], len: u64, failed: &mut dyn FnMut(usize, Error)) {
        // SAFETY: passed on.
        unsafe { self.source.free_all(addresses, len, failed) }
    }

    /// The block that [`DeviceBlock::into_raw`] took apart.
    ///
    /// # Safety
    /// The block was of this memory, and this is done once.
    pub unsafe fn block(&self, address: u64, len: u64) -> DeviceBlock {
        DeviceBlock { address, len, memory: self.clone() }
    }

    /// Gives back unused memory, and returns how many bytes that was.
    ///
    /// # Errors
    /// A device error.
    pub fn trim(&self) -> Result<u64> {
        self.source.trim()
    }

    /// The bytes asked for and the bytes held.
    pub fn stats(&self) -> MemoryStats {
        self.source.stats()
    }
}

impl DeviceBlock {
    /// Gives the block back, and reports whether that failed.
    ///
    /// # Errors
    /// A device error; the block is lost then.
    pub fn free(self) -> Result<()> {
        let freed = self.give_back();
        self.into_raw();
        freed
    }

    /// The block's address, for an owner that keeps account of it otherwise.
    pub fn into_raw(self) -> u64 {
        let mut block = std::mem::ManuallyDrop::new(self);
        let address = block.address;
        // SAFETY: the block is not dropped as a whole, and its memory is not used again.
        unsafe { std::ptr::drop_in_place(&raw mut block.memory) };
        address
    }

    fn give_back(&self) -> Result<()> {
        // SAFETY: a block stands for memory that its source gave, and is given back once; the holder of one
        // hands out its address only to work that ends before the block does.
        unsafe { self.memory.source.free(self.address, self.len.max(1)) }
    }
}

impl Drop for DeviceBlock {
    fn drop(&mut self) {
        if let Err(error) = self.give_back() {
            tracing::warn!(%error, "memory could not be given back");
        }
    }
}

impl fmt::Debug for DeviceBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Block({} bytes at {:#x})", self.len, self.address)
    }
}
