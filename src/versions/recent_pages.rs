//! A cache of the newest versions of recently changed pages, used only by the writer.
//!
//! Many batches change the same pages again. With this cache, the writer finds the version of a page in plain memory.
//! Without the cache, the writer would follow three shared pointers like a reader, with two atomic operations for each,
//! which would take 5 % of the time of a small commit. A cached page has the same version as its slot, and the writer
//! changes both under its lock.

use std::sync::Arc;

use remanent_format::PageId;

use super::chain::{PageState, Version};

/// The maximum number of cached pages. A page replaces another page with the same id modulo this number.
pub(super) const PLACES: usize = if cfg!(shuttle) { 2 } else { 256 };

type PageVersion = Arc<Version<PageState>>;

/// The cached pages, by id modulo [`PLACES`].
pub(super) struct RecentPages(Box<[Option<(PageId, PageVersion)>; PLACES]>);

impl Default for RecentPages {
    fn default() -> Self {
        Self(Box::new([const { None }; PLACES]))
    }
}

impl RecentPages {
    fn place(&mut self, page: PageId) -> &mut Option<(PageId, PageVersion)> {
        &mut self.0[page.0 as usize % PLACES]
    }

    /// Returns the newest version of the page from the cache, or the result of `find`.
    pub fn get_or(
        &mut self,
        page: PageId,
        find: impl FnOnce() -> Option<PageVersion>,
    ) -> Option<&PageVersion> {
        let place = self.place(page);
        if place.as_ref().is_none_or(|(other, _)| *other != page) {
            *place = Some((page, find()?));
        }
        place.as_ref().map(|(_, version)| version)
    }

    pub fn set(&mut self, page: PageId, version: PageVersion) {
        *self.place(page) = Some((page, version));
    }

    /// Removes a deleted page from the cache.
    pub fn forget(&mut self, page: PageId) {
        let place = self.place(page);
        if place.as_ref().is_some_and(|(other, _)| *other == page) {
            *place = None;
        }
    }
}
