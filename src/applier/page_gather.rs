//! Gathers a long page for a snapshot piece by piece while batches continue. All gathered bytes belong to the page's
//! state when the gather began.
//!
//! Just before a batch writes to a part that is not gathered yet, the part is copied to separate device memory. If
//! these copies would exceed a limit, or if the page moves to other memory, the earlier state is lost, and the snapshot
//! gathers the page again from the start. No batch waits or fails because of this.

use std::collections::BTreeMap;

use remanent_format::{PageId, PageInfo};

use super::{ListBuilder, Turn};
use crate::device::{CommandList, Fence, MemoryId, Span};
use crate::error::Result;
use crate::memory::arena::{Arena, PageMemory, Purpose};

/// The length in bytes of the parts that are copied before a write.
const PART_LEN: u64 = 64 << 10;
/// The maximum number of bytes of one page that are copied before writes.
const ASIDE_BYTES_MAX: u64 = 64 << 20;

/// The state of a long page that a snapshot gathers piece by piece.
pub(crate) struct PageGather {
    info: PageInfo,
    memory: MemoryId,
    /// The offset in bytes up to which the snapshot has gathered the page.
    gathered: u64,
    /// Copies of the parts that batches have modified since the start of the gather, by part number.
    asides: BTreeMap<u64, PageMemory>,
    is_lost: bool,
}

impl PageGather {
    /// Copies the parts in this range that are not gathered yet, before a batch writes to the range.
    pub fn before_write(
        &mut self,
        (offset, len): (u64, u64),
        memory: &PageMemory,
        arena: &Arena,
        list: &mut ListBuilder,
    ) {
        let end = offset.saturating_add(len).min(self.info.len);
        let mut at = offset.max(self.gathered);
        while at < end && !self.is_lost {
            let part = at / PART_LEN;
            at = (part + 1) * PART_LEN;
            if self.asides.contains_key(&part) {
                continue;
            }
            let len = PART_LEN.min(self.info.len - part * PART_LEN);
            let has_room = (self.asides.len() as u64 + 1) * PART_LEN <= ASIDE_BYTES_MAX;
            let copy = has_room.then(|| arena.allocate_for_lane(Purpose::Aside, memory.place(), len));
            match copy {
                Some(Ok(copy)) => {
                    list.copy(memory.part(part * PART_LEN, len), copy.span());
                    self.asides.insert(part, copy);
                }
                _ => self.mark_lost(),
            }
        }
    }

    /// Records that the page's state at the start of the gather is lost, so that the snapshot gathers the page again.
    pub fn mark_lost(&mut self) {
        self.is_lost = true;
    }
}

impl Turn<'_> {
    /// Starts to gather a page in its current state.
    pub fn begin_gather(&mut self, info: PageInfo) {
        let memory = self.applied.memory[info.page].span().memory;
        let page = info.page;
        let gather = PageGather { info, memory, gathered: 0, asides: BTreeMap::new(), is_lost: false };
        let before = self.applied.gathers.insert(page, gather);
        assert!(before.is_none(), "a page is gathered once at a time");
    }

    /// Returns the spans that contain bytes `from..to` of the page in its state at the start of the gather, each with
    /// its offset in that range. Returns `None` if that state is lost.
    pub fn gather_spans(&self, page: PageId, from: u64, to: u64) -> Option<Vec<(Span, u64)>> {
        let gather = self.applied.gathers.get(&page).filter(|gather| !gather.is_lost)?;
        let memory = self.applied.memory.get(page)?;
        assert!(memory.span().memory == gather.memory, "a page that moved is lost");
        let mut sources = Vec::new();
        let mut at = from;
        for (part, aside) in gather.asides.range(from / PART_LEN..to.div_ceil(PART_LEN)) {
            let (start, end) = (part * PART_LEN, part * PART_LEN + aside.byte_len());
            let (first, last) = (start.max(from), end.min(to));
            if at < first {
                sources.push((memory.part(at, first - at), at - from));
            }
            sources.push((aside.part(first - start, last - first), first - from));
            at = last;
        }
        if at < to {
            sources.push((memory.part(at, to - at), at - from));
        }
        Some(sources)
    }

    /// Records that the page is gathered up to the offset `up_to`. The copies of parts before that offset are freed
    /// after `fence`.
    pub fn gathered(&mut self, page: PageId, up_to: u64, fence: Fence) {
        let Some(gather) = self.applied.gathers.get_mut(&page) else { return };
        gather.gathered = up_to;
        let kept = gather.asides.split_off(&(up_to / PART_LEN));
        for (_, aside) in std::mem::replace(&mut gather.asides, kept) {
            self.arena.retire(aside, fence);
        }
    }

    /// Ends the gather of the page, and frees its copies.
    ///
    /// # Errors
    /// A device error.
    pub fn end_gather(&mut self, page: PageId) -> Result<()> {
        let Some(gather) = self.applied.gathers.remove(&page) else { return Ok(()) };
        if gather.asides.is_empty() {
            return Ok(());
        }
        let last_use = self.submit(CommandList::default())?.fence();
        for aside in gather.asides.into_values() {
            self.arena.retire(aside, last_use);
        }
        Ok(())
    }
}
