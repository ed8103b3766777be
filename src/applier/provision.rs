//! What applying a batch takes besides its payload: memory for pages, staging, images.
//!
//! All of it is there before the batch is logged. After that, a lack of memory would come too late: the
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

/// What the applier takes for a batch besides its payload. A batch that only writes to pages in memory takes
/// nothing.
#[derive(Default)]
pub(crate) struct Provision {
    /// Memory for the batch's creates and resizes, and for its moves to another place, in their order.
    pub memory: VecDeque<PageMemory>,
    /// The part of that memory that holds its page's bytes already.
    pub filled: FilledMemory,
    /// The images of the pages that it takes to disk; an empty page has none.
    pub to_disk: NewDiskImages,
    /// Room for what it writes to pages on disk, until it has.
    pub pending: Option<PendingClaim>,
    /// Memory for the pages that it changes while they are leased; each moves there first, so that a lease
    /// goes on showing the bytes that it showed.
    pub relocations: Vec<(PageId, PageMemory)>,
    /// Staging that [`stage_aside`](super::stage_aside) made of its operations, in their order.
    pub asides: VecDeque<StagingBuf>,
    /// The sums of its long writes, where a device can tell whether they arrived.
    pub sums: Option<ArrivalSums>,
    /// Memory for its list.
    pub room: ListRoom,
    /// Where the memory of a page goes that it deletes; without it, back to the arena.
    pub handover: Option<Arc<Handover>>,
}

impl Provision {
    /// Gives back what a batch brought that is not applied. No list names its memory.
    pub fn give_back(self, staging: &StagingPool, arena: &Arena) {
        for staged in self.asides.into_iter().chain(self.sums.map(|sums| sums.staging)) {
            staging.give(staged.into_staging());
        }
        let relocations = self.relocations.into_iter().map(|(_, memory)| memory);
        arena.discard_all(self.memory.into_iter().chain(relocations));
    }
}
