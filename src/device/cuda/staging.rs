//! Staging: pinned host memory that the GPU reads and writes at the host's own addresses.
//!
//! The host may touch it while it owns it. While a list owns it, no other code has it: the lane keeps it
//! until the list's fence has passed.

use std::any::Any;

use super::memory::{DeviceBlock, PlaceMemory};
use crate::device::{Staging, StagingMemory};
use crate::error::{Error, Result};

/// A block of pinned memory.
struct PinnedStaging {
    block: DeviceBlock,
    len: usize,
}

/// Staging of `len` bytes, all zero.
///
/// # Errors
/// `OutOfMemory`, a device error.
pub(super) fn staging(memory: &PlaceMemory, len: usize) -> Result<Staging> {
    // A slice can span no more, so the driver is not asked.
    if isize::try_from(len).is_err() {
        return Err(Error::OutOfMemory { place: remanent_format::Place::Pinned, len: len as u64 });
    }
    let block = memory.allocate(len as u64)?;
    // SAFETY: the block is at least this long, pinned memory is the host's to write, and no other code has it
    // yet.
    unsafe { std::ptr::write_bytes(block.address as *mut u8, 0, len) };
    Ok(Staging::new(PinnedStaging { block, len }))
}

/// The address of a staging, to GPU and host alike.
///
/// # Panics
/// If another kind of device made it: the GPU cannot reach it.
pub(super) fn address_of(staging: &Staging) -> u64 {
    let memory: &dyn Any = staging.memory();
    let pinned = memory.downcast_ref::<PinnedStaging>();
    pinned.expect("a list's staging comes from the device that runs the list").block.address
}

impl StagingMemory for PinnedStaging {
    fn bytes(&self) -> &[u8] {
        // SAFETY: the block is at least this long, was zeroed when it was made, and is this value's alone.
        // The GPU writes to it only while a list owns this value, and then there is no borrow of it.
        unsafe { std::slice::from_raw_parts(self.block.address as *const u8, self.len) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `bytes`; the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.block.address as *mut u8, self.len) }
    }
}
