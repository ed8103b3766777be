//! The memory of loaded pages. If the open fails, the memory is freed.

use remanent_format::PageId;
use remanent_format::state::id_map::IdMap;

use super::lowered_pages::LoweredPages;
use crate::applier::{UnloadedPage, UnloadedSet};
use crate::error::Result;
use crate::images::disk_pages::DiskPage;
use crate::memory::arena::{Arena, PageMemory};

/// The loaded pages, after all command lists have completed. Dropping this value frees the memory of the pages, so that
/// an attempt with an older snapshot has the whole budget (I10).
pub(super) struct LoadedPages<'a> {
    pub arena: &'a Arena,
    pub pages: PageSet,
    /// The payloads of the batches above the last durable mark, in log order. The new incarnation copies them (I5, I6).
    pub tail: Vec<Vec<u8>>,
    /// The pages that were moved to slower places because they exceeded the budget.
    pub lowered: Option<LoweredPages>,
}

/// The pages of the table, grouped by whether they are in memory, on disk, or not loaded yet.
#[derive(Default)]
pub(super) struct PageSet {
    /// The memory of each loaded page.
    pub memory: IdMap<PageId, PageMemory>,
    /// The pages on disk, which have no page memory.
    pub on_disk: IdMap<PageId, DiskPage>,
    /// The pages that are not loaded yet, each of which equals its image.
    pub unloaded: Vec<UnloadedPage>,
}

/// The memory of loaded pages, the pages on disk, and the pages not loaded yet.
pub(super) type KeptPages = (IdMap<PageId, PageMemory>, IdMap<PageId, DiskPage>, UnloadedSet);

impl PageSet {
    /// Frees all memory. The caller must ensure that no command list uses the memory.
    pub fn give_back(self, arena: &Arena) {
        let loaded = self.memory.into_items().map(|(_, memory)| memory);
        arena.discard_all(loaded.chain(self.unloaded.into_iter().map(|unloaded| unloaded.memory)));
    }
}

impl LoadedPages<'_> {
    /// Returns the pages. Dropping this value no longer frees their memory.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn keep(mut self) -> Result<KeptPages> {
        let PageSet { memory, on_disk, unloaded } = &mut self.pages;
        let unloaded = UnloadedSet::new(std::mem::take(unloaded)).map_err(|(error, pages)| {
            *unloaded = pages;
            error
        })?;
        Ok((std::mem::take(memory), std::mem::take(on_disk), unloaded))
    }
}

impl Drop for LoadedPages<'_> {
    fn drop(&mut self) {
        std::mem::take(&mut self.pages).give_back(self.arena);
    }
}
