//! The resources, in addition to the payload, that the applier needs to apply a batch: page memory, staging, images.
//!
//! The committer acquires all resources before it logs the batch, because the applier cannot reject a logged batch for
//! a lack of memory (I10).

use std::collections::VecDeque;
use std::sync::Arc;

use remanent_format::PageId;

use super::arrival::ArrivalSums;
use super::commands::ListRoom;
use super::filled::FilledMemory;
use super::{Handover, NewDiskImages};
use crate::images::disk_pages::PendingClaim;
use crate::memory::arena::{Arena, PageMemory};
use crate::memory::staging::{StagingBuf, StagingPool};

/// The resources, in addition to the payload, that a committer acquires for the applier before it logs a batch. A batch
/// that only changes bytes of pages in memory needs none.
#[derive(Default)]
pub(crate) struct Provision {
    /// Memory for the batch's creates, resizes and moves to another place, in order.
    pub memory: VecDeque<PageMemory>,
    /// The parts of `memory` that already contain their page's bytes.
    pub filled: FilledMemory,
    /// The images of the pages that the batch moves to disk. An empty page has no image.
    pub to_disk: NewDiskImages,
    /// The claim on host memory for the batch's writes to pages on disk. Released when the writes are applied.
    pub pending: Option<PendingClaim>,
    /// New memory for the leased pages that the batch changes. Each page is copied to this memory before the change, so
    /// that its leases still show the old bytes.
    pub relocations: Vec<(PageId, PageMemory)>,
    /// The staging buffers that [`stage_aside`](super::stage_aside) created for the operations, in order.
    pub asides: VecDeque<StagingBuf>,
    /// The expected checksums of long writes, or `None` if there are no long writes or the bytes cross no bus.
    pub sums: Option<ArrivalSums>,
    /// Memory for the command list of a batch with many operations.
    pub room: ListRoom,
    /// Receives the memory of the page that the batch deletes. If `None`, the memory is freed.
    pub handover: Option<Arc<Handover>>,
}

impl Provision {
    /// Frees the resources of a batch that is not applied. No command list may use the memory any more.
    pub fn give_back(self, staging: &StagingPool, arena: &Arena) {
        for staged in self.asides.into_iter().chain(self.sums.map(|sums| sums.staging)) {
            staging.put(staged.into_staging());
        }
        let relocations = self.relocations.into_iter().map(|(_, memory)| memory);
        arena.discard_all(self.memory.into_iter().chain(relocations));
    }
}
