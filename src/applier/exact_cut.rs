//! Preserves pages in the state after one batch (the cut) until a snapshot has gathered them, while later batches
//! continue.
//!
//! Creating a cut copies nothing. Just before a batch changes a page that is not gathered yet, the page is copied to
//! separate device memory. If a batch deletes or moves such a page, the cut takes over the memory that the page leaves.
//! If there is no room for a copy, the snapshot fails, but the batch does not.

use std::collections::{BTreeMap, BTreeSet};

use remanent_format::{PageId, PageInfo};

use super::ListBuilder;
use crate::base::allocation::{make_room, set_of};
use crate::device::Fence;
use crate::error::{Error, Result};
use crate::images::disk_pages::DiskPage;
use crate::memory::arena::{Arena, PageMemory, Purpose};

/// Pages that an exact snapshot has not gathered yet, preserved in their state after one batch.
pub(crate) struct ExactCut {
    /// Pages that have not changed since the cut.
    untouched: BTreeSet<PageId>,
    /// Pages that have changed since the cut, in their state at the cut.
    aside: BTreeMap<PageId, (PageInfo, PageMemory)>,
    /// Pages on disk that have changed since the cut, in their state at the cut.
    on_disk: BTreeMap<PageId, (PageInfo, DiskPage)>,
    /// Memory of gathered copies, which the command list under construction still reads.
    used: Vec<PageMemory>,
    /// The error that prevented a page from being preserved, if any. The snapshot then fails.
    failed: Option<Error>,
}

impl ExactCut {
    /// Creates a cut that preserves `pages` in their current state.
    pub fn new(pages: impl IntoIterator<Item = PageId>) -> Self {
        let untouched = set_of(pages);
        Self { untouched, aside: BTreeMap::new(), on_disk: BTreeMap::new(), used: Vec::new(), failed: None }
    }

    /// Copies a page to separate memory before a batch changes the page in place. Does nothing if the page was already
    /// gathered or copied.
    pub fn before_change(
        &mut self,
        info: &PageInfo,
        memory: &PageMemory,
        arena: &Arena,
        list: &mut ListBuilder,
    ) {
        if !self.untouched.remove(&info.page) {
            return;
        }
        match arena.allocate_for_lane(Purpose::Aside, memory.place(), memory.byte_len()) {
            Ok(copy) => {
                list.copy(memory.span(), copy.span());
                self.aside.insert(info.page, (info.clone(), copy));
            }
            Err(error) => {
                tracing::warn!(%error, page = %info.page, "no room to keep a page for an exact snapshot");
                self.failed = Some(error);
                // The snapshot fails in any case, so no more pages are preserved.
                self.untouched.clear();
            }
        }
    }

    /// Takes over the memory that a page is about to leave, if the page is not gathered yet. Otherwise returns the
    /// memory.
    pub fn before_removal(&mut self, info: &PageInfo, memory: PageMemory) -> Option<PageMemory> {
        if !self.untouched.remove(&info.page) {
            return Some(memory);
        }
        self.aside.insert(info.page, (info.clone(), memory));
        None
    }

    /// Preserves the current state of a page on disk before a batch changes or removes the page.
    pub fn before_change_on_disk(&mut self, info: &PageInfo, page: &DiskPage) {
        if self.untouched.remove(&info.page) {
            self.on_disk.insert(info.page, (info.clone(), page.clone()));
        }
    }

    /// Removes and returns a page on disk in its state at the cut, for gathering. Returns `None` if the page has not
    /// changed since the cut, or was not on disk at the cut.
    ///
    /// # Errors
    /// The error that prevented a page from being preserved.
    pub fn take_on_disk(&mut self, page: PageId) -> Result<Option<(PageInfo, DiskPage)>> {
        match &self.failed {
            Some(error) => Err(error.clone()),
            None => Ok(self.on_disk.remove(&page)),
        }
    }

    /// Removes and returns a page in its state at the cut, for gathering. Returns `None` if the page has not changed
    /// since the cut, so that the caller can gather the page itself.
    ///
    /// # Errors
    /// The error that prevented a page from being preserved.
    pub fn take(&mut self, page: PageId) -> Result<Option<(PageInfo, &PageMemory)>> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        make_room(&mut self.used, 1)?;
        let Some((info, memory)) = self.aside.remove(&page) else {
            assert!(self.untouched.remove(&page), "a page of the cut, gathered once");
            return Ok(None);
        };
        self.used.push(memory);
        Ok(self.used.last().map(|memory| (info, memory)))
    }

    /// Returns the page like [`take`](Self::take), but continues to preserve it, because only a part of it is gathered
    /// now.
    ///
    /// # Errors
    /// Same as `take`.
    pub fn find(&self, page: PageId) -> Result<Option<(PageInfo, &PageMemory)>> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        Ok(self.aside.get(&page).map(|(info, memory)| (info.clone(), memory)))
    }

    /// Frees the copies that [`take`](Self::take) returned, after `fence`. All commands that read them must precede
    /// `fence`.
    pub fn retire_used(&mut self, arena: &Arena, fence: Fence) {
        for memory in self.used.drain(..) {
            arena.retire(memory, fence);
        }
    }

    /// Frees all copies, after `fence`. All commands that read them must precede `fence`.
    pub fn retire(mut self, arena: &Arena, fence: Fence) {
        self.retire_used(arena, fence);
        for (_, (_, memory)) in self.aside {
            arena.retire(memory, fence);
        }
    }
}
