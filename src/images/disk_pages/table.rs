//! The table of pages on disk by id. The table counts the pages and their total length.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use remanent_format::PageId;
use remanent_format::state::id_map::IdMap;

use super::page::DiskPage;

/// The number and size of the pages in [`Place::Disk`](remanent_format::Place::Disk).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DiskUsage {
    /// The number of pages, including those of length 0.
    pub pages: u64,
    /// The total length of the pages, in bytes.
    pub bytes: u64,
}

/// Counters of the pages on disk, for threads without access to the table. The two values may be read at different
/// moments.
#[derive(Debug, Default)]
pub(super) struct DiskCounts {
    pages: AtomicU64,
    bytes: AtomicU64,
}

/// The table of pages on disk. Its methods make all changes, and update the counters.
#[derive(Debug)]
pub(crate) struct DiskPageTable {
    pages: IdMap<PageId, DiskPage>,
    counts: Arc<DiskCounts>,
}

impl DiskCounts {
    pub fn usage(&self) -> DiskUsage {
        DiskUsage { pages: self.pages.load(Ordering::Relaxed), bytes: self.bytes.load(Ordering::Relaxed) }
    }
}

impl DiskPageTable {
    /// Creates a table with `pages`. `counts` must not belong to another table.
    pub(super) fn new(pages: IdMap<PageId, DiskPage>, counts: Arc<DiskCounts>) -> Self {
        counts.pages.store(pages.len() as u64, Ordering::Relaxed);
        counts.bytes.store(pages.values().map(DiskPage::byte_len).sum(), Ordering::Relaxed);
        Self { pages, counts }
    }

    /// Inserts a page, and replaces a page with the same id.
    pub fn insert(&mut self, page: PageId, new: DiskPage) {
        self.counts.pages.fetch_add(1, Ordering::Relaxed);
        self.counts.bytes.fetch_add(new.byte_len(), Ordering::Relaxed);
        if let Some(old) = self.pages.insert(page, new) {
            self.left(&old);
        }
    }

    pub fn remove(&mut self, page: PageId) {
        if let Some(old) = self.pages.remove(page) {
            self.left(&old);
        }
    }

    /// Removes all pages for which `wanted` returns `false`.
    pub fn retain(&mut self, wanted: impl Fn(PageId) -> bool) {
        let counts = &self.counts;
        self.pages.retain(|page, old| {
            let stays = wanted(page);
            if !stays {
                counts.pages.fetch_sub(1, Ordering::Relaxed);
                counts.bytes.fetch_sub(old.byte_len(), Ordering::Relaxed);
            }
            stays
        });
    }

    /// Calls `change` with a page and returns the result of `change`. Returns `None` if the page does not exist.
    pub fn change<T>(&mut self, page: PageId, change: impl FnOnce(&mut DiskPage) -> T) -> Option<T> {
        let changed = self.pages.get_mut(page)?;
        let before = changed.byte_len();
        let out = change(changed);
        self.counts.bytes.fetch_add(changed.byte_len(), Ordering::Relaxed);
        self.counts.bytes.fetch_sub(before, Ordering::Relaxed);
        Some(out)
    }

    fn left(&self, old: &DiskPage) {
        self.counts.pages.fetch_sub(1, Ordering::Relaxed);
        self.counts.bytes.fetch_sub(old.byte_len(), Ordering::Relaxed);
    }
}

impl Deref for DiskPageTable {
    type Target = IdMap<PageId, DiskPage>;

    fn deref(&self) -> &Self::Target {
        &self.pages
    }
}
