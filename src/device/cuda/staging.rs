//! Staging: pinned host memory that the GPU reads and writes at the host's addresses.
//!
//! The host may access staging that no list owns. While a list owns staging, no other code can access it, and the lane
//! keeps it allocated until the list's fence has passed.

use std::any::Any;

use super::memory::{DeviceBlock, PlaceMemory};
use crate::device::{Staging, StagingMemory};
use crate::error::{Error, Result};

/// A block of pinned memory.
struct PinnedStaging {
    block: DeviceBlock,
    len: usize,
}

/// Allocates `len` bytes of zeroed staging.
///
/// # Errors
/// `OutOfMemory`, a device error.
pub(super) fn staging(memory: &PlaceMemory, len: usize) -> Result<Staging> {
    // No slice can be that long, so the driver is not called.
    if isize::try_from(len).is_err() {
        return Err(Error::OutOfMemory { place: remanent_format::Place::Pinned, len: len as u64 });
    }
    let block = memory.allocate(len as u64)?;
    // SAFETY: the block is at least this long, the host may write pinned memory, and no other code has the
    // block yet.
    unsafe { std::ptr::write_bytes(block.address as *mut u8, 0, len) };
    Ok(Staging::new(PinnedStaging { block, len }))
}

/// Returns the address of a staging buffer, which is the same for GPU and host.
///
/// # Panics
/// If a device of another kind created the staging: the GPU cannot access it.
pub(super) fn address_of(staging: &Staging) -> u64 {
    let memory: &dyn Any = staging.memory();
    let pinned = memory.downcast_ref::<PinnedStaging>();
    pinned.expect("a list's staging comes from the device that runs the list").block.address
}

impl StagingMemory for PinnedStaging {
    fn bytes(&self) -> &[u8] {
        // SAFETY: the block is at least this long, was zeroed when it was created, and belongs to this value
        // only. The GPU writes to it only while a list owns this value, when no borrow of it exists.
        unsafe { std::slice::from_raw_parts(self.block.address as *const u8, self.len) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: same as `bytes`; the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.block.address as *mut u8, self.len) }
    }
}
