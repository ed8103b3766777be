//! What applying a batch takes besides its payload: page memory, staging, images.
//!
//! All of it is acquired before the batch is logged. Afterwards, a lack of memory would come too late: the
//! applier cannot refuse what is in the log (I10).

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

/// What the applier needs for a batch besides its payload. A batch that only writes to pages in memory needs
/// nothing.
#[derive(Default)]
pub(crate) struct Provision {
    /// Memory for the batch's creates, resizes and moves to another place, in their order.
    pub memory: VecDeque<PageMemory>,
    /// The part of that memory that already holds its page's bytes.
    pub filled: FilledMemory,
    /// The images of the pages that the batch moves to disk. An empty page has none.
    pub to_disk: NewDiskImages,
    /// Room for what the batch writes to pages on disk, held until it has been written.
    pub pending: Option<PendingClaim>,
    /// Memory for the leased pages that the batch changes. Each page moves there first, so that its leases
    /// still show the old bytes.
    pub relocations: Vec<(PageId, PageMemory)>,
    /// The staging that [`stage_aside`](super::stage_aside) made for the operations, in their order.
    pub asides: VecDeque<StagingBuf>,
    /// The sums of long writes, if the device can check whether they arrived intact.
    pub sums: Option<ArrivalSums>,
    /// Memory for the batch's list.
    pub room: ListRoom,
    /// The receiver for the memory of a page that the batch deletes. Without it, the memory returns to the
    /// arena.
    pub handover: Option<Arc<Handover>>,
}

impl Provision {
    /// Releases the resources of a batch that is not applied. No list names its memory.
    pub fn give_back(self, staging: &StagingPool, arena: &Arena) {
        for staged in self.asides.into_iter().chain(self.sums.map(|sums| sums.staging)) {
            staging.put(staged.into_staging());
        }
        let relocations = self.relocations.into_iter().map(|(_, memory)| memory);
        arena.discard_all(self.memory.into_iter().chain(relocations));
    }
}
