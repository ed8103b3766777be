//! Lists that are under way, and batches of which nothing is told yet.
//!
//! The thread submits list after list, and does not wait for what it need not. A list that brings long writes
//! is proven when it is done (I12). Until then neither its batches nor any after them are told as applied,
//! and no turn runs.

use std::collections::VecDeque;

use remanent_format::Lsn;

use super::arrival::ArrivalProof;
use super::changes::AppliedBatch;
use crate::device::{Device, Pending, Staging};
use crate::error::Result;

/// Lists under way, and what is to be told of them, both in the order of the lane.
#[derive(Default)]
pub(super) struct InFlight {
    lists: VecDeque<SubmittedList>,
    untold: VecDeque<UntoldBatches>,
}

struct SubmittedList {
    pending: Pending,
    /// The sums of its long writes.
    proofs: Vec<ArrivalProof>,
}

/// Batches that are in the lane.
pub(super) struct UntoldBatches {
    /// The newest of them.
    pub applied: Lsn,
    /// The value of a fence after their lists.
    pub fence: u64,
    /// What they changed, for streams; the batch alone where there was no memory for that.
    pub changes: Vec<Result<AppliedBatch, Lsn>>,
}

impl InFlight {
    /// Takes a list that was submitted just now.
    pub fn push(&mut self, pending: Pending, proofs: Vec<ArrivalProof>) {
        self.lists.push_back(SubmittedList { pending, proofs });
    }

    /// Takes batches whose lists were taken.
    pub fn note(&mut self, batches: UntoldBatches) {
        self.untold.push_back(batches);
    }

    /// How many lists are under way.
    pub fn len(&self) -> usize {
        self.lists.len()
    }

    /// Whether a list under way is to be proven.
    pub fn is_unproven(&self) -> bool {
        self.lists.iter().any(|list| !list.proofs.is_empty())
    }

    /// The fence of the oldest list.
    pub fn oldest(&self) -> Option<u64> {
        self.lists.front().map(|list| list.pending.fence().value)
    }

    /// Waits for the oldest list and proves it. Returns its staging, and whether it holds; `None` if there is
    /// no list.
    ///
    /// # Errors
    /// A device error.
    pub fn finish_oldest(&mut self, device: &dyn Device) -> Result<Option<(Vec<Staging>, Result<()>)>> {
        let Some(SubmittedList { pending, proofs }) = self.lists.pop_front() else { return Ok(None) };
        let staging = pending.finish(device)?;
        let proven = proofs.iter().try_for_each(|proof| proof.check(&staging, device));
        Ok(Some((staging, proven)))
    }

    /// The next batches that may be told: no list up to theirs is still to be proven.
    pub fn next_told(&mut self) -> Option<UntoldBatches> {
        let unproven = self.lists.iter().find(|list| !list.proofs.is_empty());
        let bound = unproven.map_or(u64::MAX, |list| list.pending.fence().value);
        let may_be_told = self.untold.front().is_some_and(|batches| batches.fence < bound);
        if may_be_told { self.untold.pop_front() } else { None }
    }
}
