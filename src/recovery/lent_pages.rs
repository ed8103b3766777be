//! Caller-owned memory for the pages that an open loads: requested, checked and lent before anything is read.
//!
//! Nothing on disk changes here. If the open fails, the caller must discard any bytes that it loaded into
//! this memory.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use remanent_format::{PageId, PageInfo, PageTable};

use crate::base::sync::Mutex;
use crate::device::{CallerMemory, Device, DeviceBytes};
use crate::error::{Error, Result};
use crate::memory::arena::{Arena, PageMemory};
use crate::options::PageMemorySource;

/// Lent memory by page. Memory that no page has taken is returned when this is dropped.
pub(super) struct LentPages<'a> {
    arena: &'a Arena,
    memory: Mutex<BTreeMap<PageId, PageMemory>>,
}

impl<'a> LentPages<'a> {
    /// Creates an empty set: no page is in caller-owned memory.
    pub fn none(arena: &'a Arena) -> Self {
        Self { arena, memory: Mutex::default() }
    }

    /// Asks the caller for memory for each non-empty page, and accepts what is offered.
    ///
    /// # Errors
    /// `MemoryRefused`, `MemoryInUse`, `Panicked`; a device error.
    pub fn ask(
        arena: &'a Arena,
        device: &Arc<dyn Device>,
        source: Option<&PageMemorySource>,
        table: &PageTable,
    ) -> Result<Self> {
        let lent = Self::none(arena);
        let Some(PageMemorySource(source)) = source else { return Ok(lent) };
        for info in table.pages().filter(|info| info.len > 0) {
            // Caller code: whatever it leaves half done belongs to the caller and is not used here.
            let given = catch_unwind(AssertUnwindSafe(|| source(&info)));
            let Some(memory) = given.map_err(|_| Error::panicked("the source of `Options::page_memory`"))?
            else {
                continue;
            };
            let memory = lent.take(device, &info, &memory)?;
            lent.memory.lock().insert(info.page, memory);
        }
        Ok(lent)
    }

    /// Checks and accepts caller-owned memory for a page.
    fn take(&self, device: &Arc<dyn Device>, info: &PageInfo, memory: &CallerMemory) -> Result<PageMemory> {
        let refused = |reason| Err(Error::MemoryRefused { len: memory.byte_len(), reason });
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

    /// Whether a page has lent memory.
    pub fn has(&self, page: PageId) -> bool {
        self.memory.lock().contains_key(&page)
    }

    /// Removes and returns a page's memory.
    pub fn take_out(&self, page: PageId) -> Option<PageMemory> {
        self.memory.lock().remove(&page)
    }
}

impl Drop for LentPages<'_> {
    fn drop(&mut self) {
        self.arena.discard_all(std::mem::take(&mut *self.memory.lock()).into_values());
    }
}
