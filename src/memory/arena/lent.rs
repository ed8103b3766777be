//! Memory that callers lend for pages: which ranges hold one, and the handles that keep them.
//!
//! A lent range is beside the budget. It is the caller's own, or it is counted as the caller's already. The
//! handle is held until no lane uses the page's memory any more. What its owner does when it is dropped is
//! the caller's code, which must not run on the applier or under a lock; so a handle that is not needed any
//! more waits here for a thread of a caller's. A crash loses all of this.

use std::collections::{BTreeMap, HashMap};

use remanent_format::PageId;

use crate::base::sync::Mutex;
use crate::base::sync::atomic::{AtomicUsize, Ordering};
use crate::device::{Device, DeviceBytes, MemoryId};
use crate::error::{Error, Result};

/// All ranges that are lent to pages. Shared by threads.
#[derive(Default)]
pub(super) struct LentMemories {
    ranges: Mutex<LentRanges>,
    /// Handles whose ranges no page has any more.
    let_go: Mutex<Vec<DeviceBytes>>,
    let_go_count: AtomicUsize,
}

#[derive(Default)]
struct LentRanges {
    /// Ranges by their space and their start there. No two share a byte.
    by_start: BTreeMap<(u64, u64), LentRange>,
    /// The start of each range, by the name under which its page has it.
    starts: HashMap<MemoryId, (u64, u64)>,
}

struct LentRange {
    end: u64,
    page: PageId,
    bytes: DeviceBytes,
    /// Whether the page has given it up, and a lane may still use it.
    is_retired: bool,
}

/// Why a range could not be lent.
pub(super) enum LendRefusal {
    /// A page gave it up, and a lane may still use it.
    Retired,
    /// Another reason.
    Error(Error),
}

impl LentMemories {
    /// Lends a range to a page, and returns the page's name for it.
    pub fn lend(
        &self,
        device: &dyn Device,
        page: PageId,
        bytes: &DeviceBytes,
    ) -> Result<MemoryId, LendRefusal> {
        let span = bytes.span();
        let (space, origin) = device.origin(span.memory);
        let start = origin + span.offset;
        let mut ranges = self.ranges.lock();
        // The last range that begins before this one's end: of all that do, it ends last.
        let before = ranges.by_start.range(..(space, start + span.len)).next_back();
        if let Some(((_, _), other)) = before.filter(|((of, _), other)| *of == space && other.end > start) {
            let in_use = Error::MemoryInUse { len: span.len, page: other.page };
            return Err(if other.is_retired { LendRefusal::Retired } else { LendRefusal::Error(in_use) });
        }
        // That takes the handle's own lock, for a moment: no thread holds it while it waits.
        let memory = bytes.lend(page).map_err(LendRefusal::Error)?;
        let lent = LentRange { end: start + span.len, page, bytes: bytes.clone(), is_retired: false };
        ranges.by_start.insert((space, start), lent);
        ranges.starts.insert(memory, (space, start));
        Ok(memory)
    }

    /// Notes that the page has given its range up.
    pub fn retire(&self, memory: MemoryId) {
        let mut ranges = self.ranges.lock();
        let start = ranges.starts[&memory];
        ranges.by_start.get_mut(&start).expect("lent under this name").is_retired = true;
    }

    /// Ends the loan of a range that no lane uses any more. Returns the handle that kept it.
    pub fn end(&self, memory: MemoryId) -> DeviceBytes {
        let mut ranges = self.ranges.lock();
        let start = ranges.starts.remove(&memory).expect("lent, and not ended yet");
        let LentRange { bytes, page, .. } = ranges.by_start.remove(&start).expect("lent under this name");
        bytes.end_loan(page);
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
