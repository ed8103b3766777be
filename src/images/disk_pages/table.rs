//! The table of pages on disk by id, with their total size.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use remanent_format::PageId;
use remanent_format::state::id_map::IdMap;

use super::page::DiskPage;

/// Number and size of the pages in [`Place::Disk`](remanent_format::Place::Disk), which have no memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DiskUsage {
    /// Number of pages, including those of length 0.
    pub pages: u64,
    /// Sum of their lengths.
    pub bytes: u64,
}

/// Number and bytes of the pages, for threads that do not hold the table. The two values may be of different
/// moments.
#[derive(Debug, Default)]
pub(super) struct DiskCounts {
    pages: AtomicU64,
    bytes: AtomicU64,
}

/// The table of pages on disk. All changes go through its methods, which keep the counts.
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
    /// Creates a table of these pages. The counts must belong to no other table.
    pub(super) fn new(pages: IdMap<PageId, DiskPage>, counts: Arc<DiskCounts>) -> Self {
        counts.pages.store(pages.len() as u64, Ordering::Relaxed);
        counts.bytes.store(pages.values().map(DiskPage::byte_len).sum(), Ordering::Relaxed);
        Self { pages, counts }
    }

    /// Inserts a page, replacing one with the same id.
    pub fn insert(&mut self, page: PageId, new: DiskPage) {
        self.counts.pages.fetch_add(1, Ordering::Relaxed);
        self.counts.bytes.fetch_add(new.byte_len(), Ordering::Relaxed);
        if let Some(old) = self.pages.insert(page, new) {
            self.left(&old);
        }
    }

    /// Removes a page if it exists.
    pub fn remove(&mut self, page: PageId) {
        if let Some(old) = self.pages.remove(page) {
            self.left(&old);
        }
    }

    /// Removes all pages except the wanted ones.
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

    /// Changes a page in place. Returns `None` if it does not exist.
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
