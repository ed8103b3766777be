//! The resources, in addition to the payload, that are needed to apply a batch: page memory, staging, images.
//!
//! All of them are acquired before the batch is logged, because the applier cannot refuse a logged batch for a lack of
//! memory (I10).

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

/// The resources, in addition to the payload, with which the applier applies a batch. A batch that only writes to pages
/// in memory needs none.
#[derive(Default)]
pub(crate) struct Provision {
    /// Memory for the batch's creates, resizes and moves to another place, in order.
    pub memory: VecDeque<PageMemory>,
    /// The part of that memory that already contains its page's bytes.
    pub filled: FilledMemory,
    /// The images of the pages that the batch moves to disk. An empty page has no image.
    pub to_disk: NewDiskImages,
    /// The claim on memory for the batch's writes to pages on disk, held until they are applied.
    pub pending: Option<PendingClaim>,
    /// Memory for the leased pages that the batch changes. Each page first moves there, so that its leases still show
    /// the old bytes.
    pub relocations: Vec<(PageId, PageMemory)>,
    /// The staging buffers that [`stage_aside`](super::stage_aside) created for the operations, in order.
    pub asides: VecDeque<StagingBuf>,
    /// The sums of long writes, if the device can check whether they arrived intact.
    pub sums: Option<ArrivalSums>,
    /// Memory for the batch's list.
    pub room: ListRoom,
    /// The receiver for the memory of a page that the batch deletes. Without a receiver, the memory returns to the
    /// arena.
    pub handover: Option<Arc<Handover>>,
}

impl Provision {
    /// Frees the resources of a batch that is not applied. No list may name its memory.
    pub fn give_back(self, staging: &StagingPool, arena: &Arena) {
        for staged in self.asides.into_iter().chain(self.sums.map(|sums| sums.staging)) {
            staging.put(staged.into_staging());
        }
        let relocations = self.relocations.into_iter().map(|(_, memory)| memory);
        arena.discard_all(self.memory.into_iter().chain(relocations));
    }
}
