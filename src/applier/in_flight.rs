//! Command lists in flight, and batches that are not reported as applied yet.
//!
//! The applier submits one list after another, and waits for one only if it must. A list with long writes is verified
//! when it completes (I12). Until then, its batches and all later batches are not reported as applied, and no read or
//! other closure between batches runs.

use std::collections::VecDeque;

use remanent_format::Lsn;

use super::arrival::ArrivalProof;
use super::changes::AppliedBatch;
use crate::device::{EngineDevice, Pending, Staging};
use crate::error::Result;

/// The lists that were submitted and are not complete, and the batches that are not reported as applied, both in
/// submission order.
#[derive(Default)]
pub(super) struct InFlight {
    lists: VecDeque<SubmittedList>,
    unreported: VecDeque<UnreportedBatches>,
}

struct SubmittedList {
    pending: Pending,
    /// The expected checksums of the list's long writes. Empty if the list has no long writes.
    proofs: Vec<ArrivalProof>,
}

/// Batches whose lists are submitted, and that are not reported as applied yet.
pub(super) struct UnreportedBatches {
    /// The Lsn of the newest of the batches.
    pub applied: Lsn,
    /// The value of a fence that passes after the lists of all these batches.
    pub fence: u64,
    /// The changes of the batches, for change streams. `Err` with the batch's Lsn if there was no memory to record
    /// them.
    pub changes: Vec<Result<AppliedBatch, Lsn>>,
}

impl InFlight {
    /// Adds a list that was just submitted.
    pub fn push(&mut self, pending: Pending, proofs: Vec<ArrivalProof>) {
        self.lists.push_back(SubmittedList { pending, proofs });
    }

    /// Adds batches whose lists were all added with [`push`](Self::push).
    pub fn note(&mut self, batches: UnreportedBatches) {
        self.unreported.push_back(batches);
    }

    /// Returns the number of lists in flight.
    pub fn len(&self) -> usize {
        self.lists.len()
    }

    /// Returns whether a list in flight has long writes that are not verified yet.
    pub fn is_unproven(&self) -> bool {
        self.lists.iter().any(|list| !list.proofs.is_empty())
    }

    /// Returns the fence value of the oldest list.
    pub fn oldest(&self) -> Option<u64> {
        self.lists.front().map(|list| list.pending.fence().value)
    }

    /// Waits for the oldest list and verifies its long writes. Returns the list's staging and the result of the
    /// verification, or `None` if there is no list.
    ///
    /// # Errors
    /// A device error.
    pub fn finish_oldest(&mut self, device: &EngineDevice) -> Result<Option<(Vec<Staging>, Result<()>)>> {
        let Some(SubmittedList { pending, proofs }) = self.lists.pop_front() else { return Ok(None) };
        let staging = device.finish(pending)?;
        let proven = proofs.iter().try_for_each(|proof| proof.check(&staging, device));
        Ok(Some((staging, proven)))
    }

    /// Removes and returns the next batches to report. Returns `None` if their lists or earlier lists must still be
    /// verified.
    pub fn next_reportable(&mut self) -> Option<UnreportedBatches> {
        let unproven = self.lists.iter().find(|list| !list.proofs.is_empty());
        let bound = unproven.map_or(u64::MAX, |list| list.pending.fence().value);
        let is_reportable = self.unreported.front().is_some_and(|batches| batches.fence < bound);
        if is_reportable { self.unreported.pop_front() } else { None }
    }
}
