//! Scratch: memory in which snapshots and long reads gather bytes. Scratch has the lowest priority of all memory.

use std::collections::BTreeMap;
use std::time::Duration;

use remanent_format::Place;

use super::{Arena, PageMemory, Purpose};
use crate::device::Lane;
use crate::error::{Error, Result};

/// An empty list of lanes, for allocations that must not wait, not even for memory that the device caches.
const NO_LANES: [Lane; 0] = [];

/// The length in bytes of one piece of scratch. Longer scratch consists of several pieces.
///
/// A GPU cuts pieces of this length from blocks that all allocations share. A longer piece would have a separate block,
/// which can serve no other length, and whose release to the driver waits for all work of the GPU. With short pieces,
/// the memory that the device caches after scratch is released never exceeds the limit on scratch.
pub(super) const SCRATCH_PIECE_LEN: u64 = 16 << 20;
/// The maximum number of bytes of scratch in a place. A longer read is copied to the host in batch order, which takes
/// 20 ms for a read of this length on an H200.
pub(super) const SCRATCH_BYTES_MAX: u64 = 1 << 30;
/// The maximum time to wait for scratch. Scratch in use is being copied to the host, which takes milliseconds. If the
/// copy never completes, the device has stopped, and the next call of the waiting thread reports the error.
pub(super) const SCRATCH_WAIT_MAX: Duration = Duration::from_secs(10);

/// The scratch memory in use, and the number of allocations that wait for it.
///
/// Scratch may use all free memory, so it must not prevent other allocations. An allocation that would fit without
/// scratch waits until scratch is freed, which never depends on a commit. No scratch is allocated during that wait.
#[derive(Default)]
pub(super) struct ScratchMemory {
    /// The number of claimed and allocated bytes of scratch, by place.
    pub bytes: BTreeMap<Place, u64>,
    pub waiting: usize,
}

impl Arena {
    /// Returns whether `len` bytes would fit into the budget if no memory were retired and no scratch were in use.
    pub(super) fn fits_without_scratch(&self, place: Place, len: u64) -> bool {
        let scratch = self.scratch.lock().bytes.get(&place).copied();
        scratch.is_some_and(|scratch| self.account(place).fits_without_retired(len.saturating_sub(scratch)))
    }

    /// Allocates scratch for a snapshot or a read: at least `len` bytes, in pieces of [`SCRATCH_PIECE_LEN`] or in one
    /// shorter piece.
    ///
    /// The calling thread submits to the lanes, so the call never waits. Scratch uses only memory that the budget and
    /// the device have immediately available. No scratch is allocated while another allocation waits for scratch to be
    /// freed.
    ///
    /// # Errors
    /// `OverBudget`, including the case that the total exceeds [`SCRATCH_BYTES_MAX`]; `OutOfMemory`, `Unavailable`, a
    /// device error. On failure no scratch is allocated.
    pub(super) fn allocate_scratch(&self, place: Place, len: u64) -> Result<Vec<PageMemory>> {
        if len == 0 {
            return Ok(Vec::new());
        }
        let piece_len = len.min(SCRATCH_PIECE_LEN);
        let whole_len = len.checked_next_multiple_of(piece_len).unwrap_or(u64::MAX);
        {
            let mut scratch = self.scratch.lock();
            let left = SCRATCH_BYTES_MAX - scratch.bytes.get(&place).copied().unwrap_or(0);
            if scratch.waiting > 0 || whole_len > left {
                let available = self.available(place).min(left);
                let budget = self.budget.limit(place);
                return Err(Error::OverBudget { place, requested: len, available, budget });
            }
            *scratch.bytes.entry(place).or_default() += whole_len;
        }
        let mut pieces = Vec::new();
        let allocated = self.reserve_awaiting(&NO_LANES, Purpose::Gather, &[(place, whole_len)]);
        let allocated = allocated.and_then(|reserved| {
            for _ in 0..whole_len / piece_len {
                pieces.push(reserved.allocate(place, piece_len)?);
            }
            Ok(())
        });
        match allocated {
            Ok(()) => Ok(pieces),
            Err(error) => {
                self.return_scratch(place, whole_len - piece_len * pieces.len() as u64);
                pieces.into_iter().try_for_each(|piece| self.discard(piece))?;
                Err(error)
            }
        }
    }

    /// Allocates scratch like [`allocate_scratch`](Self::allocate_scratch), but returns `None` if there is no room.
    /// Callers then continue without scratch.
    ///
    /// # Errors
    /// `Unavailable`, a device error.
    pub(crate) fn try_scratch(&self, place: Place, len: u64) -> Result<Option<Vec<PageMemory>>> {
        match self.allocate_scratch(place, len) {
            Err(Error::OverBudget { .. } | Error::OutOfMemory { .. }) => Ok(None),
            allocated => allocated.map(Some),
        }
    }

    pub(super) fn return_scratch(&self, place: Place, len: u64) {
        let mut scratch = self.scratch.lock();
        if let Some(left) = scratch.bytes.get_mut(&place) {
            *left -= len;
            if *left == 0 {
                scratch.bytes.remove(&place);
            }
        }
        self.scratch_returned.notify_all();
    }
}
