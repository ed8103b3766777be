//! Memory of one place, for those here who use it: blocks of a source that nothing outside can misuse.

use std::fmt;
use std::sync::Arc;

use remanent_format::Place;

use super::resource::MemoryResource;
use crate::device::MemoryStats;
use crate::error::{Error, Result};

/// Memory of one place. Shared by threads.
#[derive(Clone)]
pub(super) struct PlaceMemory {
    /// What a shortage is reported as.
    pub place: Place,
    source: Arc<dyn MemoryResource>,
}

/// Memory handed out; given back when it is dropped. Who cannot know that nothing uses it any more forgets it.
pub(super) struct DeviceBlock {
    /// The first byte, to GPU and host alike.
    pub address: u64,
    /// Length in bytes, as it was asked for.
    pub len: u64,
    memory: PlaceMemory,
}

impl PlaceMemory {
    /// Memory of a source.
    pub fn new(place: Place, source: Arc<dyn MemoryResource>) -> Self {
        Self { place, source }
    }

    /// `len` bytes, whose content is what their last user left; at least one is allocated.
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

    /// A block again of what [`DeviceBlock::into_raw`] took apart.
    ///
    /// # Safety
    /// The block was of this memory, and this is done once.
    pub unsafe fn block(&self, address: u64, len: u64) -> DeviceBlock {
        DeviceBlock { address, len, memory: self.clone() }
    }

    /// Gives back what nobody uses, and returns how many bytes that was.
    ///
    /// # Errors
    /// A device error.
    pub fn trim(&self) -> Result<u64> {
        self.source.trim()
    }

    /// What was asked for and what is held.
    pub fn stats(&self) -> MemoryStats {
        self.source.stats()
    }
}

impl DeviceBlock {
    /// Gives it back, and says so if that fails.
    ///
    /// # Errors
    /// A device error; the block is lost then.
    pub fn free(self) -> Result<()> {
        let freed = self.give_back();
        self.into_raw();
        freed
    }

    /// Its address, for who keeps account of it otherwise.
    pub fn into_raw(self) -> u64 {
        let mut block = std::mem::ManuallyDrop::new(self);
        let address = block.address;
        // SAFETY: the block is not dropped as a whole, and its memory is not used again.
        unsafe { std::ptr::drop_in_place(&raw mut block.memory) };
        address
    }

    fn give_back(&self) -> Result<()> {
        // SAFETY: a block stands for memory that its source gave, and is given back once; who holds one hands
        // out its address only to work that ends before the block does.
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
