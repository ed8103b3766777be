//! The pages on disk, by their ids, and how many bytes they have together.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use remanent_format::PageId;
use remanent_format::state::by_id::ById;

use super::page::DiskPage;

/// Pages of [`Place::Disk`](remanent_format::Place::Disk), which have no memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DiskUsage {
    /// Number of pages, those of length 0 included.
    pub pages: u64,
    /// Their lengths together.
    pub bytes: u64,
}

/// How many pages there are, and their bytes, for threads that do not hold the table. The two numbers may be
/// of different moments.
#[derive(Debug, Default)]
pub(super) struct DiskCounts {
    pages: AtomicU64,
    bytes: AtomicU64,
}

/// The table of pages on disk. All changes go by its methods, which count.
#[derive(Debug)]
pub(crate) struct DiskPageTable {
    pages: ById<PageId, DiskPage>,
    counts: Arc<DiskCounts>,
}

impl DiskCounts {
    pub fn usage(&self) -> DiskUsage {
        DiskUsage { pages: self.pages.load(Ordering::Relaxed), bytes: self.bytes.load(Ordering::Relaxed) }
    }
}

impl DiskPageTable {
    /// A table of these pages. The counts are of no other one.
    pub(super) fn new(pages: ById<PageId, DiskPage>, counts: Arc<DiskCounts>) -> Self {
        counts.pages.store(pages.len() as u64, Ordering::Relaxed);
        counts.bytes.store(pages.values().map(DiskPage::byte_len).sum(), Ordering::Relaxed);
        Self { pages, counts }
    }

    /// Puts a page there, or in the place of the one that has its id.
    pub fn insert(&mut self, page: PageId, new: DiskPage) {
        self.counts.pages.fetch_add(1, Ordering::Relaxed);
        self.counts.bytes.fetch_add(new.byte_len(), Ordering::Relaxed);
        if let Some(old) = self.pages.insert(page, new) {
            self.left(&old);
        }
    }

    /// Takes a page out, if it is there.
    pub fn remove(&mut self, page: PageId) {
        if let Some(old) = self.pages.remove(page) {
            self.left(&old);
        }
    }

    /// Takes out all pages but those that are wanted.
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

    /// Changes a page where it is; `None` if it is not there.
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
    type Target = ById<PageId, DiskPage>;

    fn deref(&self) -> &Self::Target {
        &self.pages
    }
}
