//! Caller-owned memory for the pages that an open loads. The memory is requested, checked and adopted before any page
//! is read.
//!
//! If the open fails, the caller must discard any bytes that were loaded into this memory.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use remanent_format::{PageId, PageInfo, PageTable};

use crate::base::sync::Mutex;
use crate::device::{CallerMemory, DeviceBytes, EngineDevice};
use crate::error::{Error, Refused, Result};
use crate::memory::arena::{Arena, PageMemory};
use crate::options::PageMemorySource;

/// Caller-owned memory by page. On drop, memory that no page uses is returned to the caller.
pub(super) struct LentPages<'a> {
    arena: &'a Arena,
    memory: Mutex<BTreeMap<PageId, PageMemory>>,
}

impl<'a> LentPages<'a> {
    /// Creates a set without caller-owned memory.
    pub fn none(arena: &'a Arena) -> Self {
        Self { arena, memory: Mutex::default() }
    }

    /// Asks the caller for memory for each non-empty page, and adopts the memory that the caller returns.
    ///
    /// # Errors
    /// [`Error::Refused`] for unsuitable memory, `Error::Panicked` if the caller's function panics, or a device error.
    pub fn ask(
        arena: &'a Arena,
        device: &Arc<EngineDevice>,
        source: Option<&PageMemorySource>,
        table: &PageTable,
    ) -> Result<Self> {
        let lent = Self::none(arena);
        let Some(PageMemorySource(source)) = source else { return Ok(lent) };
        for info in table.pages().filter(|info| info.len > 0) {
            // A panic is caught, because state that the callback leaves inconsistent belongs to the caller and is not
            // used here.
            let given = catch_unwind(AssertUnwindSafe(|| source(&info)));
            let Some(memory) =
                given.map_err(|_| Error::panicked("the source of `MemoryOptions::page_memory`"))?
            else {
                continue;
            };
            let memory = lent.take(device, &info, &memory)?;
            lent.memory.lock().insert(info.page, memory);
        }
        Ok(lent)
    }

    /// Checks and adopts caller-owned memory for a page.
    fn take(&self, device: &Arc<EngineDevice>, info: &PageInfo, memory: &CallerMemory) -> Result<PageMemory> {
        let refused = |reason| Err(Error::Refused(Refused::Memory { len: memory.byte_len(), reason }));
        let PageInfo { page, len, place, .. } = *info;
        if memory.byte_len() != len {
            return refused(format!("page {page} is {len} bytes long"));
        }
        let bytes = DeviceBytes::adopt(device, memory, self.arena.link())?;
        if bytes.place() != place {
            return refused(format!("it is in place {}, and page {page} lives in {place}", bytes.place()));
        }
        self.arena.lend(page, &bytes)
    }

    /// Returns whether the set contains memory for `page`.
    pub fn has(&self, page: PageId) -> bool {
        self.memory.lock().contains_key(&page)
    }

    pub fn take_out(&self, page: PageId) -> Option<PageMemory> {
        self.memory.lock().remove(&page)
    }
}

impl Drop for LentPages<'_> {
    fn drop(&mut self) {
        self.arena.discard_all(std::mem::take(&mut *self.memory.lock()).into_values());
    }
}
