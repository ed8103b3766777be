//! The handles of caller-owned memory in which pages are stored.
//!
//! Such memory is outside the budget, because it belongs to the caller or is already counted as the caller's. A handle
//! is kept until no lane uses the page's memory. Dropping the handle may run the caller's code, which must not run on
//! the applier or under a lock. Therefore an unneeded handle is kept in a list until a caller's thread drops it. A
//! crash loses all of these handles.

use std::collections::HashMap;

use crate::base::sync::Mutex;
use crate::base::sync::atomic::{AtomicUsize, Ordering};
use crate::device::{DeviceBytes, EngineDevice, Fence, MemoryId, MemoryOwner, drop_when_passed};

/// The handles of caller-owned memory in which pages are stored, shared by threads.
#[derive(Default)]
pub(super) struct LentMemories {
    /// The handles of memory in use, by the memory id that a page uses.
    handles: Mutex<HashMap<MemoryId, DeviceBytes>>,
    /// The handles of memory that no page uses any more, to be dropped by a caller's thread.
    released_handles: Mutex<Vec<DeviceBytes>>,
    /// The owners of memory that callers' streams may still use. Each owner has the fence that follows those uses.
    leaving: Mutex<Vec<(MemoryOwner, Fence)>>,
    /// The total number of entries in `released_handles` and `leaving`.
    waiting_count: AtomicUsize,
}

impl LentMemories {
    /// Stores the handle of the memory that a page uses.
    pub fn keep(&self, memory: MemoryId, bytes: DeviceBytes) {
        self.handles.lock().insert(memory, bytes);
    }

    /// Records that a page has left its memory.
    pub fn retire(&self, memory: MemoryId) {
        self.handles.lock()[&memory].retire_loan();
    }

    /// Ends the loan of memory that no lane uses any more, and returns the memory's handle.
    pub fn end(&self, memory: MemoryId) -> DeviceBytes {
        let bytes = self.handles.lock().remove(&memory).expect("lent, and not ended yet");
        bytes.end_loan();
        bytes
    }

    /// Adds a handle to the list that [`drop_released`](Self::drop_released) drops.
    pub fn release_handle(&self, bytes: DeviceBytes) {
        self.released_handles.lock().push(bytes);
        self.waiting_count.fetch_add(1, Ordering::AcqRel);
    }

    /// Adds an owner, which [`drop_released`](Self::drop_released) drops once the fence has passed.
    pub fn keep_until(&self, owner: MemoryOwner, fence: Fence) {
        self.leaving.lock().push((owner, fence));
        self.waiting_count.fetch_add(1, Ordering::AcqRel);
    }

    /// Drops the released handles, and the owners whose fences have passed. The calling thread must be allowed to run a
    /// caller's code.
    pub fn drop_released(&self, device: &EngineDevice) {
        if self.waiting_count.load(Ordering::Acquire) == 0 {
            return;
        }
        let released_handles = std::mem::take(&mut *self.released_handles.lock());
        let has_passed = |(_, fence): &mut (MemoryOwner, Fence)| device.reached(fence.lane) >= fence.value;
        let passed: Vec<_> = self.leaving.lock().extract_if(.., has_passed).collect();
        self.waiting_count.fetch_sub(released_handles.len() + passed.len(), Ordering::AcqRel);
        // The values are dropped after the locks are released. Dropping an owner may run code that acquires these
        // locks.
        drop((released_handles, passed));
    }

    /// Drops each owner once its fence has passed. An owner whose fence never passes is leaked.
    pub fn drop_leaving(&mut self, device: &EngineDevice) {
        for (owner, fence) in self.leaving.get_mut().drain(..) {
            drop_when_passed(device, owner, fence);
        }
    }
}
