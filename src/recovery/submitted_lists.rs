//! Lists of commands on their way to the pages that are loaded, up to a number and a sum of bytes.

use std::collections::VecDeque;

use crate::device::{CommandList, Device, Lane, Pending};
use crate::error::Result;
use crate::memory::staging::StagingPool;

/// Lists in flight while pages are loaded. Each owns its staging until it is done, so this bounds that
/// memory.
const IN_FLIGHT_MAX: usize = 8;
/// Bytes of such staging. One list more may be in flight.
const IN_FLIGHT_BYTES_MAX: usize = 16 << 20;

/// Lists that were submitted and not waited for.
pub(super) struct SubmittedLists<'a> {
    pub device: &'a dyn Device,
    staging: &'a StagingPool,
    /// The oldest list first, each with the bytes of its staging.
    pending: VecDeque<(Pending, usize)>,
    /// The sum of these bytes.
    pending_bytes: usize,
}

impl<'a> SubmittedLists<'a> {
    /// No list yet.
    pub fn new(device: &'a dyn Device, staging: &'a StagingPool) -> Self {
        Self { device, staging, pending: VecDeque::new(), pending_bytes: 0 }
    }

    /// Submits a list, unless it is empty, and waits while too many are in flight.
    pub fn submit(&mut self, list: CommandList) -> Result<()> {
        if list.commands.is_empty() && list.staging.is_empty() {
            return Ok(());
        }
        let bytes = list.staging.iter().map(|staging| staging.len()).sum();
        self.pending.push_back((self.device.submit(Lane::Apply, list)?, bytes));
        self.pending_bytes += bytes;
        while self.pending.len() > 1 && self.pending_bytes > IN_FLIGHT_BYTES_MAX {
            self.finish_oldest()?;
        }
        self.drain(IN_FLIGHT_MAX)
    }

    /// Waits until at most `in_flight_max` lists are in flight, and gives the staging of the others back.
    pub fn drain(&mut self, in_flight_max: usize) -> Result<()> {
        while self.pending.len() > in_flight_max {
            self.finish_oldest()?;
        }
        Ok(())
    }

    /// Waits for the oldest list: it is done first, for a lane does its lists in order.
    fn finish_oldest(&mut self) -> Result<()> {
        let Some((oldest, bytes)) = self.pending.pop_front() else { return Ok(()) };
        self.pending_bytes -= bytes;
        for staging in oldest.finish(self.device)? {
            self.staging.give(staging);
        }
        Ok(())
    }
}
