//! Passes a deleted page's memory from the applier to the caller of [`Store::release`](crate::Store::release).
//!
//! The applier delivers the memory after it has submitted the batch that deletes the page. If the caller has stopped
//! waiting, for example after an error, the memory is freed.

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

    /// Passes the memory to the waiting caller. `fence` follows the store's last use of the memory. Returns the memory
    /// as an error if the caller has stopped waiting.
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
