//! Memory of one place, allocated in owned blocks for internal use.

use std::fmt;
use std::sync::Arc;

use remanent_format::Place;

use super::resource::MemoryResource;
use crate::device::MemoryStats;
use crate::error::{Error, Result};

/// The memory of one place: its source, and the place to report in errors. Clones share the source.
#[derive(Clone)]
pub(super) struct PlaceMemory {
    /// The place to report in errors about a shortage.
    pub place: Place,
    source: Arc<dyn MemoryResource>,
}

/// An allocated block, freed when it is dropped. If an owner cannot tell whether the block is still in use, it leaks
/// the block.
pub(super) struct DeviceBlock {
    /// The address of the first byte, the same for GPU and host.
    pub address: u64,
    /// Length in bytes, as requested.
    pub len: u64,
    memory: PlaceMemory,
}

impl PlaceMemory {
    /// Wraps the memory of a source.
    pub fn new(place: Place, source: Arc<dyn MemoryResource>) -> Self {
        Self { place, source }
    }

    /// Allocates a block of `len` bytes, at least one byte, with unspecified contents.
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

    /// Allocates `count` blocks like [`allocate`](Self::allocate), and appends their raw addresses to `found`. On
    /// failure, `found` contains the addresses of the blocks allocated before the failure.
    ///
    /// # Errors
    /// Same as `allocate`.
    pub fn allocate_all(&self, len: u64, count: usize, found: &mut Vec<u64>) -> Result<()> {
        let place = self.place;
        self.source.allocate_all(len, count, found).map_err(|error| match error {
            Error::OutOfMemory { .. } => Error::OutOfMemory { place, len },
            other => other,
        })
    }

    /// Frees blocks by their raw addresses. Calls `failed` for each block that could not be freed.
    ///
    /// # Safety
    /// The blocks must belong to this memory and have this length, and each must be freed only once.
    pub unsafe fn free_all(&self, addresses: &[u64], len: u64, failed: &mut dyn FnMut(usize, Error)) {
        // SAFETY: the caller's promise.
        unsafe { self.source.free_all(addresses, len, failed) }
    }

    /// Restores the block that [`DeviceBlock::into_raw`] converted to an address.
    ///
    /// # Safety
    /// The block must belong to this memory, and must be restored only once.
    pub unsafe fn block(&self, address: u64, len: u64) -> DeviceBlock {
        DeviceBlock { address, len, memory: self.clone() }
    }

    /// Frees unused memory, and returns the number of bytes freed.
    ///
    /// # Errors
    /// A device error.
    pub fn trim(&self) -> Result<u64> {
        self.source.trim()
    }

    /// Returns the number of bytes requested and held.
    pub fn stats(&self) -> MemoryStats {
        self.source.stats()
    }
}

impl DeviceBlock {
    /// Frees the block and returns any error.
    ///
    /// # Errors
    /// A device error; the block is then leaked.
    pub fn free(self) -> Result<()> {
        let freed = self.give_back();
        self.into_raw();
        freed
    }

    /// Converts the block to its address, for an owner that frees it by address.
    pub fn into_raw(self) -> u64 {
        let mut block = std::mem::ManuallyDrop::new(self);
        let address = block.address;
        // SAFETY: the block is not dropped as a whole, and its memory is not used again.
        unsafe { std::ptr::drop_in_place(&raw mut block.memory) };
        address
    }

    fn give_back(&self) -> Result<()> {
        // SAFETY: a block represents memory that its source allocated, and is freed once; the holder of a
        // block passes its address only to work that ends before the block does.
        unsafe { self.memory.source.free(self.address, self.len.max(1)) }
    }
}

impl Drop for DeviceBlock {
    fn drop(&mut self) {
        if let Err(error) = self.give_back() {
            tracing::warn!(%error, "cannot free device memory");
        }
    }
}

impl fmt::Debug for DeviceBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Block({} bytes at {:#x})", self.len, self.address)
    }
}
