//! The handles of callers' memory in which pages live.
//!
//! Such memory is beside the budget: it is the caller's own, or it is counted as the caller's already. The
//! handle is held until no lane uses the page's memory any more. What its owner does when it is dropped is
//! the caller's code, which must not run on the applier or under a lock; so a handle that is not needed any
//! more waits here for a thread of a caller's. A crash loses all of this.

use std::collections::HashMap;

use crate::base::sync::Mutex;
use crate::base::sync::atomic::{AtomicUsize, Ordering};
use crate::device::{Device, DeviceBytes, Fence, MemoryId, MemoryOwner, drop_when_passed};

/// The handles of memory that is lent to pages. Shared by threads.
#[derive(Default)]
pub(super) struct LentMemories {
    /// Handles by the names under which pages have them.
    handles: Mutex<HashMap<MemoryId, DeviceBytes>>,
    /// Handles of memory that no page has any more.
    let_go: Mutex<Vec<DeviceBytes>>,
    /// Owners of memory that callers' streams may still use, each with the fence after that.
    leaving: Mutex<Vec<(MemoryOwner, Fence)>>,
    /// How many of both there are.
    waiting_count: AtomicUsize,
}

impl LentMemories {
    /// Keeps a handle for a page.
    pub fn keep(&self, memory: MemoryId, bytes: DeviceBytes) {
        self.handles.lock().insert(memory, bytes);
    }

    /// Notes that the page has given its memory up.
    pub fn retire(&self, memory: MemoryId) {
        self.handles.lock()[&memory].retire_loan();
    }

    /// Ends the loan of memory that no lane uses any more. Returns the handle.
    pub fn end(&self, memory: MemoryId) -> DeviceBytes {
        let bytes = self.handles.lock().remove(&memory).expect("lent, and not ended yet");
        bytes.end_loan();
        bytes
    }

    /// Leaves a handle to the next thread that may drop it.
    pub fn let_go(&self, bytes: DeviceBytes) {
        self.let_go.lock().push(bytes);
        self.waiting_count.fetch_add(1, Ordering::AcqRel);
    }

    /// Leaves an owner to the first thread that may drop it after the fence has passed.
    pub fn keep_until(&self, owner: MemoryOwner, fence: Fence) {
        self.leaving.lock().push((owner, fence));
        self.waiting_count.fetch_add(1, Ordering::AcqRel);
    }

    /// Drops the handles that were let go, and the owners whose fences have passed. Called by a thread that
    /// may run a caller's code.
    pub fn drop_let_go(&self, device: &dyn Device) {
        if self.waiting_count.load(Ordering::Acquire) == 0 {
            return;
        }
        let let_go = std::mem::take(&mut *self.let_go.lock());
        let has_passed = |(_, fence): &mut (MemoryOwner, Fence)| device.reached(fence.lane) >= fence.value;
        let gone: Vec<_> = self.leaving.lock().extract_if(.., has_passed).collect();
        self.waiting_count.fetch_sub(let_go.len() + gone.len(), Ordering::AcqRel);
        // Without the locks: an owner that drops more handles of its own must not wait for this thread.
        drop((let_go, gone));
    }

    /// Drops all owners, once their fences have passed. Those whose fences never pass stay.
    pub fn drop_leaving(&mut self, device: &dyn Device) {
        for (owner, fence) in self.leaving.get_mut().drain(..) {
            drop_when_passed(device, owner, fence);
        }
    }
}
