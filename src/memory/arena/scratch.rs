//! Scratch: memory that snapshots gather into, and long reads. It gives way to all other memory.

use std::collections::BTreeMap;
use std::time::Duration;

use remanent_format::Place;

use super::{Arena, PageMemory, Purpose};
use crate::device::Lane;
use crate::error::{Error, Result};

/// The lanes to wait for where nothing may be waited for, not even for memory that the device keeps back.
const NO_LANES: [Lane; 0] = [];

/// Scratch longer than this comes in pieces of this length, which a GPU cuts from blocks that all allocations
/// share. A longer block would be one of its own, which serves no other length, and giving it back to the
/// driver waits for all work of the GPU. So the memory that scratch leaves behind never exceeds its own
/// limit.
pub(super) const SCRATCH_PIECE_LEN: u64 = 16 << 20;
/// The most scratch of a place. A longer read goes to the host in lane order, 20 ms for this length on an
/// H200.
pub(super) const SCRATCH_BYTES_MAX: u64 = 1 << 30;
/// The longest wait for scratch. Scratch is on its way to the host, which takes milliseconds. If that never
/// ends, the device has stopped, and the waiting thread learns it from its next call.
pub(super) const SCRATCH_WAIT_MAX: Duration = Duration::from_secs(10);

/// Scratch that snapshots gather into, and long reads. It takes all the room there is, so it must not keep an
/// allocation out. An allocation that would fit without it waits until it is given back, which never waits
/// for a commit. No scratch is given out meanwhile.
#[derive(Default)]
pub(super) struct ScratchMemory {
    /// Claimed and allocated bytes of scratch.
    pub bytes: BTreeMap<Place, u64>,
    pub waiting: usize,
}

impl Arena {
    /// Whether this number of bytes would fit if nothing were retired, and nothing on its way to the host.
    pub(super) fn fits_without_scratch(&self, place: Place, len: u64) -> bool {
        let scratch = self.scratch.lock().bytes.get(&place).copied();
        scratch.is_some_and(|scratch| self.account(place).fits_without_retired(len.saturating_sub(scratch)))
    }

    /// Scratch for a snapshot or a read: at least `len` bytes, in pieces of [`SCRATCH_PIECE_LEN`] or in one
    /// that is shorter. The caller submits to the lanes, so nothing is waited for: scratch is only the memory
    /// that the budget and the device have at once. None is given out while an allocation waits for scratch.
    ///
    /// # Errors
    /// `OverBudget`, also for more than [`SCRATCH_BYTES_MAX`] together; `OutOfMemory`, `PlaceUnavailable`, a
    /// device error. Nothing is allocated then.
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
                return Err(Error::OverBudget { place, asked: len, available, budget });
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
                self.scratch_is_back(place, whole_len - piece_len * pieces.len() as u64);
                pieces.into_iter().try_for_each(|piece| self.discard(piece))?;
                Err(error)
            }
        }
    }

    /// Scratch as [`allocate_scratch`](Self::allocate_scratch) gives it; `None` without room for it. All that
    /// wants scratch has another way then.
    ///
    /// # Errors
    /// `PlaceUnavailable`, a device error.
    pub(crate) fn scratch_if_there_is_room(&self, place: Place, len: u64) -> Result<Option<Vec<PageMemory>>> {
        match self.allocate_scratch(place, len) {
            Err(Error::OverBudget { .. } | Error::OutOfMemory { .. }) => Ok(None),
            allocated => allocated.map(Some),
        }
    }

    pub(super) fn scratch_is_back(&self, place: Place, len: u64) {
        let mut scratch = self.scratch.lock();
        if let Some(left) = scratch.bytes.get_mut(&place) {
            *left -= len;
            if *left == 0 {
                scratch.bytes.remove(&place);
            }
        }
        self.scratch_given_back.notify_all();
    }
}
