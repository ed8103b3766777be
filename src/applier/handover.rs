//! Passes a deleted page's memory from the applier to the caller that released the page.
//!
//! The applier delivers the memory when the batch that deletes the page is in the lane. If the caller no longer waits
//! for the memory, the memory returns to the arena. A crash loses all memory.

use remanent_format::PageId;

use crate::base::sync::Mutex;
use crate::device::Fence;
use crate::memory::arena::PageMemory;

/// The slot through which a caller receives the memory of a page that its batch deletes.
#[derive(Debug)]
pub(crate) struct Handover {
    pub page: PageId,
    state: Mutex<HandoverState>,
}

#[derive(Debug)]
enum HandoverState {
    /// The applier has not applied the batch yet.
    Waiting,
    /// The memory of the page, with the fence of the memory's last use.
    Given(PageMemory, Fence),
    /// No caller waits for the memory, or the caller has received it.
    Over,
}

impl Handover {
    pub fn new(page: PageId) -> Self {
        Self { page, state: Mutex::new(HandoverState::Waiting) }
    }

    /// Delivers the memory to the waiting caller. `fence` ends the memory's last use. Returns the memory as an error if
    /// no caller waits for it.
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
