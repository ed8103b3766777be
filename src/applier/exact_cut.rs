//! The exact cut: pages stay as they were after one batch, for a snapshot to gather, while later batches go
//! on.
//!
//! Nothing is copied at the moment of the cut. Just before a batch changes a page that is not gathered yet,
//! the page is copied aside on the device. A page that is deleted or moved leaves its memory to the cut. If
//! there is no room for a copy, the snapshot fails and the batch does not.

use std::collections::{BTreeMap, BTreeSet};

use remanent_format::{PageId, PageInfo};

use super::ListBuilder;
use crate::base::allocation::{make_room, set_of};
use crate::device::Fence;
use crate::error::{Error, Result};
use crate::images::disk_pages::DiskPage;
use crate::memory::arena::{Arena, PageMemory, Purpose};

/// Pages as they were after one batch.
pub(crate) struct ExactCut {
    /// Pages that have not changed since the cut.
    untouched: BTreeSet<PageId>,
    /// Pages that have changed since, as they were at the cut.
    aside: BTreeMap<PageId, (PageInfo, PageMemory)>,
    /// The same, of pages on disk.
    on_disk: BTreeMap<PageId, (PageInfo, DiskPage)>,
    /// Copies in use by a list that is not submitted yet.
    used: Vec<PageMemory>,
    /// Why not all pages could be kept.
    failed: Option<Error>,
}

impl ExactCut {
    /// Keeps these pages as they are now.
    pub fn new(pages: impl IntoIterator<Item = PageId>) -> Self {
        let untouched = set_of(pages);
        Self { untouched, aside: BTreeMap::new(), on_disk: BTreeMap::new(), used: Vec::new(), failed: None }
    }

    /// Keeps a page that is about to be changed where it lies.
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
                // The snapshot fails anyway: keeping more pages would only take memory.
                self.untouched.clear();
            }
        }
    }

    /// Keeps the memory that a page is about to give up. The memory comes back if the page need not be kept.
    pub fn before_removal(&mut self, info: &PageInfo, memory: PageMemory) -> Option<PageMemory> {
        if !self.untouched.remove(&info.page) {
            return Some(memory);
        }
        self.aside.insert(info.page, (info.clone(), memory));
        None
    }

    /// Keeps a page on disk that is about to be changed, or to go.
    pub fn before_change_on_disk(&mut self, info: &PageInfo, page: &DiskPage) {
        if self.untouched.remove(&info.page) {
            self.on_disk.insert(info.page, (info.clone(), page.clone()));
        }
    }

    /// Takes a page on disk that is gathered now, as it was at the cut; `None` if it has not changed since,
    /// or was not on disk then.
    ///
    /// # Errors
    /// The error that kept some page from being kept.
    pub fn take_on_disk(&mut self, page: PageId) -> Result<Option<(PageInfo, DiskPage)>> {
        match &self.failed {
            Some(error) => Err(error.clone()),
            None => Ok(self.on_disk.remove(&page)),
        }
    }

    /// Takes a page that is gathered now: as it was at the cut, or `None` if it has not changed since. The
    /// cut does not keep it any longer.
    ///
    /// # Errors
    /// The error that kept some page from being kept.
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

    /// As [`take`](Self::take), for a page that is gathered later.
    ///
    /// # Errors
    /// As for `take`.
    pub fn look(&self, page: PageId) -> Result<Option<(PageInfo, &PageMemory)>> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        Ok(self.aside.get(&page).map(|(info, memory)| (info.clone(), memory)))
    }

    /// Gives back the copies that were taken; their last use ends with this fence.
    pub fn retire_used(&mut self, arena: &Arena, fence: Fence) {
        for memory in self.used.drain(..) {
            arena.retire(memory, fence);
        }
    }

    /// Gives back all copies. No use of them comes after this fence.
    pub fn retire(mut self, arena: &Arena, fence: Fence) {
        self.retire_used(arena, fence);
        for (_, (_, memory)) in self.aside {
            arena.retire(memory, fence);
        }
    }
}
