//! Command lists in flight to the pages being loaded, limited in number and in bytes.

use std::collections::VecDeque;

use crate::applier::ArrivalProof;
use crate::device::{CommandList, Device, Lane, Pending};
use crate::error::Result;
use crate::memory::staging::StagingPool;

/// The maximum number of lists in flight. Each owns its staging until it is done, so this bounds that memory.
const IN_FLIGHT_MAX: usize = 8;
/// The maximum bytes of such staging. One more list may be in flight.
const IN_FLIGHT_BYTES_MAX: usize = 16 << 20;

/// Lists that were submitted and not waited for.
pub(super) struct SubmittedLists<'a> {
    pub device: &'a dyn Device,
    staging: &'a StagingPool,
    /// The lists, oldest first.
    pending: VecDeque<SubmittedList>,
    /// The total bytes of their staging.
    pending_bytes: usize,
}

struct SubmittedList {
    pending: Pending,
    /// The bytes of its staging.
    bytes: usize,
    /// The checksums of its long writes.
    proofs: Vec<ArrivalProof>,
}

impl<'a> SubmittedLists<'a> {
    /// Creates an empty queue.
    pub fn new(device: &'a dyn Device, staging: &'a StagingPool) -> Self {
        Self { device, staging, pending: VecDeque::new(), pending_bytes: 0 }
    }

    /// Submits a list, unless it is empty, and waits while too many are in flight.
    ///
    /// # Errors
    /// A device error, or a checksum mismatch of an earlier list.
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

    /// Waits until at most `in_flight_max` lists are in flight, and returns the staging of the others.
    pub fn drain(&mut self, in_flight_max: usize) -> Result<()> {
        while self.pending.len() > in_flight_max {
            self.finish_oldest()?;
        }
        Ok(())
    }

    /// Waits for the oldest list, which is done first because a lane executes its lists in order.
    fn finish_oldest(&mut self) -> Result<()> {
        let Some(SubmittedList { pending, bytes, proofs }) = self.pending.pop_front() else { return Ok(()) };
        self.pending_bytes -= bytes;
        let staging = pending.finish(self.device)?;
        let proven = proofs.iter().try_for_each(|proof| proof.check(&staging, self.device));
        self.staging.put_all(staging);
        proven
    }
}
