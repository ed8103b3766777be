//! The newest versions of pages that batches changed lately, for the writer alone.
//!
//! Many batches change the same pages again. Here the writer finds a page's version in plain memory. A reader
//! goes through three shared pointers, and each look at one is two atomic operations: 5 % of a small commit
//! in all. A page that is here has the same version as its slot; the writer changes both, under its lock.

use std::sync::Arc;

use remanent_format::PageId;

use super::chain::{PageState, Version};

/// The most pages that are remembered. A page replaces another one whose number ends alike.
pub(super) const PLACES: usize = if cfg!(shuttle) { 2 } else { 256 };

type PageVersion = Arc<Version<PageState>>;

/// Remembered pages, by the end of their ids.
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

    /// The page's newest version: the remembered one, or the result of `find`.
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

    /// Notes that the page has this version now.
    pub fn set(&mut self, page: PageId, version: PageVersion) {
        *self.place(page) = Some((page, version));
    }

    /// Notes that the page is gone.
    pub fn forget(&mut self, page: PageId) {
        let place = self.place(page);
        if place.as_ref().is_some_and(|(other, _)| *other == page) {
            *place = None;
        }
    }
}
