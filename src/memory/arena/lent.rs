//! The handles of callers' memory in which pages live.
//!
//! Such memory is beside the budget: it is the caller's own, or it is counted as the caller's already. The
//! handle is held until no lane uses the page's memory any more. What its owner does when it is dropped is
//! the caller's code, which must not run on the applier or under a lock; so a handle that is not needed any
//! more waits here for a thread of a caller's. A crash loses all of this.

use std::collections::HashMap;

use crate::base::sync::Mutex;
use crate::base::sync::atomic::{AtomicUsize, Ordering};
use crate::device::{DeviceBytes, MemoryId};

/// The handles of memory that is lent to pages. Shared by threads.
#[derive(Default)]
pub(super) struct LentMemories {
    /// Handles by the names under which pages have them.
    handles: Mutex<HashMap<MemoryId, DeviceBytes>>,
    /// Handles of memory that no page has any more.
    let_go: Mutex<Vec<DeviceBytes>>,
    let_go_count: AtomicUsize,
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
        let mut let_go = self.let_go.lock();
        let_go.push(bytes);
        self.let_go_count.store(let_go.len(), Ordering::Release);
    }

    /// Drops the handles that were let go. Called by a thread that may run a caller's code.
    pub fn drop_let_go(&self) {
        if self.let_go_count.load(Ordering::Acquire) == 0 {
            return;
        }
        let let_go = {
            let mut let_go = self.let_go.lock();
            self.let_go_count.store(0, Ordering::Release);
            std::mem::take(&mut *let_go)
        };
        // Without the lock: an owner that drops more handles of its own must not wait for this thread.
        drop(let_go);
    }
}
