//! Limits the number and the bytes of the command lists in flight to the pages that an open loads.

use std::collections::VecDeque;

use crate::applier::ArrivalProof;
use crate::device::{CommandList, EngineDevice, Lane, Pending};
use crate::error::Result;
use crate::memory::staging::StagingPool;

/// The maximum number of lists in flight, which also bounds the staging memory. Each list owns its staging until it
/// completes.
const IN_FLIGHT_MAX: usize = 8;
/// The maximum number of bytes of staging that lists in flight own. The last submitted list may exceed this limit.
const IN_FLIGHT_BYTES_MAX: usize = 16 << 20;

/// A queue of command lists that were submitted and may not have completed.
pub(super) struct SubmittedLists<'a> {
    pub device: &'a EngineDevice,
    staging: &'a StagingPool,
    /// The submitted lists, oldest first.
    pending: VecDeque<SubmittedList>,
    /// The total number of bytes of staging that the submitted lists own.
    pending_bytes: usize,
}

struct SubmittedList {
    pending: Pending,
    /// The number of bytes of staging that the list owns.
    bytes: usize,
    /// The expected checksums of the list's long writes.
    proofs: Vec<ArrivalProof>,
}

impl<'a> SubmittedLists<'a> {
    pub fn new(device: &'a EngineDevice, staging: &'a StagingPool) -> Self {
        Self { device, staging, pending: VecDeque::new(), pending_bytes: 0 }
    }

    /// Submits a list, unless the list is empty. Waits while too many lists are in flight.
    ///
    /// # Errors
    /// A device error, or a checksum mismatch in an earlier list.
    pub fn submit(&mut self, (list, proofs): (CommandList, Vec<ArrivalProof>)) -> Result<()> {
        if list.commands.is_empty() && list.staging.is_empty() {
            return Ok(());
        }
        let bytes = list.staging.iter().map(|staging| staging.len()).sum();
        let pending = self.device.submit(Lane::Apply, list)?;
        self.pending.push_back(SubmittedList { pending, bytes, proofs });
        self.pending_bytes += bytes;
        while self.pending.len() > 1 && self.pending_bytes > IN_FLIGHT_BYTES_MAX {
            self.finish_oldest()?;
        }
        self.drain(IN_FLIGHT_MAX)
    }

    /// Waits until at most `in_flight_max` lists are in flight, and returns the staging of the completed lists to the
    /// pool.
    pub fn drain(&mut self, in_flight_max: usize) -> Result<()> {
        while self.pending.len() > in_flight_max {
            self.finish_oldest()?;
        }
        Ok(())
    }

    /// Waits for the oldest list, which completes first because a lane executes its lists in order.
    fn finish_oldest(&mut self) -> Result<()> {
        let Some(SubmittedList { pending, bytes, proofs }) = self.pending.pop_front() else { return Ok(()) };
        self.pending_bytes -= bytes;
        let staging = self.device.finish(pending)?;
        let proven = proofs.iter().try_for_each(|proof| proof.check(&staging, self.device));
        self.staging.put_all(staging);
        proven
    }
}
