//! Passes a page's memory to the caller that released the page.
//!
//! The applier leaves the memory here when the batch that deletes the page is in the lane. If the caller no longer
//! waits for the memory, the memory returns to the arena. A crash loses all memory.

use remanent_format::PageId;

use crate::base::sync::Mutex;
use crate::device::Fence;
use crate::memory::arena::PageMemory;

/// The receiver for the memory of one page, which a batch deletes.
#[derive(Debug)]
pub(crate) struct Handover {
    pub page: PageId,
    state: Mutex<HandoverState>,
}

#[derive(Debug)]
enum HandoverState {
    /// The applier has not reached the batch.
    Waiting,
    /// The memory, and the fence of its last use.
    Given(PageMemory, Fence),
    /// No caller waits for the memory, or it was taken.
    Over,
}

impl Handover {
    pub fn new(page: PageId) -> Self {
        Self { page, state: Mutex::new(HandoverState::Waiting) }
    }

    /// Leaves the memory, whose last use ends with the fence. Returns the memory as an error if no caller waits for it.
    pub fn deliver(&self, memory: PageMemory, fence: Fence) -> Result<(), PageMemory> {
        let mut state = self.state.lock();
        match *state {
            HandoverState::Over => Err(memory),
            HandoverState::Waiting | HandoverState::Given(..) => {
                *state = HandoverState::Given(memory, fence);
                Ok(())
            }
        }
    }

    /// Removes and returns the memory, if it is available. Later deliveries are rejected.
    pub fn take(&self) -> Option<(PageMemory, Fence)> {
        match std::mem::replace(&mut *self.state.lock(), HandoverState::Over) {
            HandoverState::Given(memory, fence) => Some((memory, fence)),
            HandoverState::Waiting | HandoverState::Over => None,
        }
    }
}
