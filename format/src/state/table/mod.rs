//! The page table, and the effects of batches on it.
//!
//! A pure function, [`PageTable::plan`], computes the changes that a batch makes, or the reason why the batch is
//! invalid. Commits, the applier, recovery and `rebuild` all use this function, so that a batch has only one
//! interpretation.

mod entry;
mod key_index;
mod plan;

use std::sync::Arc;

pub use self::entry::{PageEntry, PageShape};
use self::key_index::KeyIndex;
use self::plan::next_epoch;
pub use self::plan::{Changes, PlanMode, Refusal};
use crate::defect::Defect;
use crate::ids::{Epoch, Key, Lsn, PageId, Place};
use crate::limits::NUMBER_MAX;
use crate::op::{ByteChange, OpAt};
use crate::state::id_map::IdMap;
use crate::state::page_changes::{PageChange, PageChanges};
use crate::value::{Metadata, SharedMetadata};

/// The description of a page: all properties of the page except its bytes.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct PageInfo {
    /// The id of the page.
    pub page: PageId,
    /// The key of the page, or `None` if the page has no key.
    pub key: Option<Key>,
    /// The length of the page in bytes.
    pub len: u64,
    /// The epoch of the page, which is its version.
    pub epoch: Epoch,
    /// The batch that last changed or moved the page.
    pub lsn: Lsn,
    /// The place of the page.
    pub place: Place,
    /// The metadata of the page.
    pub metadata: SharedMetadata,
}

impl PageInfo {
    /// Creates the description of a page without a key and metadata.
    #[must_use]
    pub fn new(page: PageId, len: u64, place: Place) -> Self {
        Self {
            page,
            key: None,
            len,
            epoch: Epoch(0),
            lsn: Lsn(0),
            place,
            metadata: SharedMetadata::default(),
        }
    }
}

/// The pages and the root of a state, and two counters that never decrease: the next page id and the highest epoch.
#[derive(Clone, Debug, Default)]
pub struct PageTable {
    pages: IdMap<PageId, PageEntry>,
    /// Whether the table flags the pages that batches change.
    is_watched: bool,
    keys: KeyIndex,
    root: Arc<Metadata>,
    next_page: u64,
    epoch_high: Epoch,
    lsn: Lsn,
}

/// Compares the pages, the root and the counters. Flags of changed pages are not compared.
impl PartialEq for PageTable {
    fn eq(&self, other: &Self) -> bool {
        let numbers = |table: &Self| (table.next_page, table.epoch_high, table.lsn);
        self.pages == other.pages
            && self.keys == other.keys
            && self.root == other.root
            && numbers(self) == numbers(other)
    }
}

impl PageTable {
    /// Creates an empty table.
    #[must_use]
    pub fn new() -> Self {
        Self { next_page: 1, ..Self::default() }
    }

    /// Creates a table from the contents of a manifest. [`PageTable::get_key`] finds no page until
    /// [`PageTable::index_keys`] is called.
    ///
    /// # Panics
    /// Panics if the length of a page or the ordinal of its place exceeds a limit of the format.
    #[must_use]
    pub fn from_parts(
        pages: impl IntoIterator<Item = PageInfo>,
        root: Arc<Metadata>,
        next_page: u64,
        epoch_high: Epoch,
        lsn: Lsn,
    ) -> Self {
        let mut past_last = 1;
        let noted =
            pages.into_iter().inspect(|info| past_last = past_last.max(info.page.0.saturating_add(1)));
        let pages: IdMap<PageId, PageEntry> = noted.map(|info| (info.page, PageEntry::from(&info))).collect();
        let epoch_high = pages.values().map(|entry| entry.epoch).fold(epoch_high, Epoch::max);
        let next_page = next_page.max(past_last);
        Self { pages, is_watched: false, keys: KeyIndex::default(), root, next_page, epoch_high, lsn }
    }

    /// Adds the pages of another table. All their ids must be above the ids of this table.
    #[must_use]
    pub(crate) fn joined(mut self, behind: Self) -> Self {
        self.pages.absorb(behind.pages);
        self.next_page = self.next_page.max(behind.next_page);
        self.epoch_high = self.epoch_high.max(behind.epoch_high);
        self
    }

    /// Returns the description of a page, or `None` if the page does not exist.
    #[must_use]
    pub fn get(&self, page: PageId) -> Option<PageInfo> {
        Some(self.pages.get(page)?.info(page))
    }

    /// Returns the entry of a page without copying its key and metadata, or `None` if the page does not exist.
    #[must_use]
    pub fn entry(&self, page: PageId) -> Option<&PageEntry> {
        self.pages.get(page)
    }

    /// Returns the description of the page that has this key, or `None` if no page has the key.
    #[must_use]
    pub fn get_key(&self, key: impl AsRef<[u8]>) -> Option<PageInfo> {
        self.keys.get(key.as_ref()).and_then(|page| self.get(*page))
    }

    /// Returns the descriptions of all pages, in the order of their ids.
    pub fn pages(&self) -> impl ExactSizeIterator<Item = PageInfo> {
        self.pages.iter().map(|(page, entry)| entry.info(page))
    }

    /// Returns the ids and entries of all pages, in the order of their ids.
    pub fn entries(&self) -> impl ExactSizeIterator<Item = (PageId, &PageEntry)> {
        self.pages.iter()
    }

    /// Returns the ids, places and lengths of all pages, in the order of their ids.
    pub fn lens(&self) -> impl ExactSizeIterator<Item = (PageId, Place, u64)> {
        self.pages.iter().map(|(page, entry)| (page, entry.place(), entry.len()))
    }

    /// Returns the ids, places and lengths of the pages from `first` to `last`, inclusive.
    pub fn lens_between(&self, first: PageId, last: PageId) -> impl Iterator<Item = (PageId, Place, u64)> {
        self.pages.range(first, last).map(|(page, entry)| (page, entry.place(), entry.len()))
    }

    /// Returns the id of each page and the batch that last changed or moved the page, in the order of the ids.
    pub fn lsns(&self) -> impl ExactSizeIterator<Item = (PageId, Lsn)> {
        self.pages.iter().map(|(page, entry)| (page, entry.lsn))
    }

    /// Returns the entries of the root.
    #[must_use]
    pub fn root(&self) -> &Arc<Metadata> {
        &self.root
    }

    /// Returns the next page id to assign. All lower ids have been assigned.
    #[must_use]
    pub fn next_page(&self) -> u64 {
        self.next_page
    }

    /// Returns the highest epoch that any page ever had.
    #[must_use]
    pub fn epoch_high(&self) -> Epoch {
        self.epoch_high
    }

    /// Returns the Lsn of the last batch that was installed.
    #[must_use]
    pub fn lsn(&self) -> Lsn {
        self.lsn
    }

    /// Applies the changes of a planned batch, and updates the key index.
    pub fn install(&mut self, changes: &Changes) {
        for (page, state) in changes.pages() {
            if self.is_watched {
                self.pages.flag(*page);
            }
            let Some(info) = state else {
                // The batch may have freed the key and assigned it to another page.
                if let Some(entry) = self.pages.remove(*page)
                    && let Some(key) = entry.key()
                    && self.keys.get(key.as_bytes()) == Some(page)
                {
                    self.keys.remove(key);
                }
                continue;
            };
            self.epoch_high = self.epoch_high.max(info.epoch);
            match self.pages.get_mut(*page) {
                Some(old) if old.key() == info.key.as_ref() => old.become_newer(info),
                // The page is new. In a log from another program, the page may also exist.
                _ => {
                    self.pages.insert(*page, PageEntry::from(info));
                    if let Some(key) = &info.key {
                        self.keys.insert(key.clone(), *page);
                    }
                }
            }
        }
        if let Some(root) = &changes.root {
            self.root = root.clone();
        }
        self.next_page = self.next_page.max(changes.next_page);
        self.lsn = self.lsn.max(changes.lsn);
    }

    /// Plans and installs a batch that only changes bytes of pages, as nearly all batches of a long log do. The entries
    /// are modified in place, because copying the entries took an eighth of the time to replay 256-byte deltas.
    ///
    /// Returns `None`, with nothing changed, if the batch has other operations. No page may already include this batch
    /// or a later batch.
    ///
    /// # Errors
    /// Returns a [`Refusal`], with nothing changed, if an operation is invalid.
    pub(crate) fn change_bytes(&mut self, lsn: Lsn, ops: &[OpAt<'_>]) -> Option<Result<(), Refusal>> {
        if ops.iter().any(|at| at.op.byte_change().is_none()) {
            return None;
        }
        let changes = || ops.iter().filter_map(|at| at.op.byte_change());
        let check = |ByteChange { page, offset, len }| {
            let entry = self.pages.get(page).ok_or(Refusal::UnknownPage(page))?;
            next_epoch(entry.epoch)?;
            entry.check_range(page, offset, len)
        };
        if let Err(refusal) = changes().try_for_each(check) {
            return Some(Err(refusal));
        }
        for ByteChange { page, .. } in changes() {
            if self.is_watched {
                self.pages.flag(page);
            }
            let entry = self.pages.get_mut(page).expect("it was there just now");
            // The epoch rises once per batch.
            if entry.lsn < lsn {
                entry.lsn = lsn;
                entry.epoch.0 += 1;
                self.epoch_high = self.epoch_high.max(entry.epoch);
            }
        }
        self.lsn = self.lsn.max(lsn);
        Some(Ok(()))
    }

    /// Installs the batches that a summary describes. The result is the same as that of calling
    /// [`change_bytes`](Self::change_bytes) for each batch. Returns false, with nothing changed, if the table already
    /// includes one of the batches, or if a batch is invalid.
    pub(crate) fn change_pages(&mut self, changes: &PageChanges) -> bool {
        let fits = |change: &PageChange| {
            self.pages.get(change.page).is_some_and(|entry| {
                let epoch = entry.epoch.0.saturating_add(change.batches);
                entry.lsn < changes.first && epoch <= NUMBER_MAX && change.end <= entry.len()
            })
        };
        let do_follow = changes.pages.iter().all(fits);
        if do_follow {
            for PageChange { page, batches, lsn, .. } in &changes.pages {
                if self.is_watched {
                    self.pages.flag(*page);
                }
                let entry = self.pages.get_mut(*page).expect("it was there just now");
                entry.lsn = *lsn;
                entry.epoch.0 += batches;
                self.epoch_high = self.epoch_high.max(entry.epoch);
            }
            self.lsn = self.lsn.max(changes.last);
        }
        do_follow
    }

    /// Replaces the pages and the root with those of an earlier state. The next page id and the highest epoch do not
    /// decrease.
    ///
    /// # Panics
    /// Panics as [`PageTable::from_parts`] does.
    pub fn replace(&mut self, lsn: Lsn, pages: impl IntoIterator<Item = PageInfo>, root: Arc<Metadata>) {
        let new = Self::from_parts(pages, root, self.next_page, self.epoch_high, lsn);
        let mut before = std::mem::replace(self, new);
        if before.is_watched {
            before.pages.flag_all();
            self.pages.flag_all();
            self.watch(before.pages.each_flagged());
        }
    }

    /// Starts flagging the pages that [`PageTable::install`] and [`PageTable::replace`] change. Flags the pages in
    /// `changed` immediately.
    pub fn watch(&mut self, changed: impl IntoIterator<Item = PageId>) {
        self.is_watched = true;
        changed.into_iter().for_each(|page| self.pages.flag(page));
    }

    /// Returns the ids of the flagged pages in ascending order, including ids of deleted pages. The list is empty
    /// unless [`PageTable::watch`] was called.
    ///
    /// # Errors
    /// Returns [`Defect::Memory`] if there is not enough memory for the list.
    pub fn changed(&mut self) -> Result<Vec<PageId>, Defect> {
        self.pages.flagged()
    }

    /// Removes the flags of `pages`. Call this method once the changes of these pages are processed.
    pub fn settle(&mut self, pages: impl IntoIterator<Item = PageId>) {
        pages.into_iter().for_each(|page| self.pages.unflag(page));
    }

    /// Builds the index that maps keys to pages.
    ///
    /// # Errors
    /// Returns [`Refusal::KeyTaken`] if two pages have the same key.
    pub fn index_keys(&mut self) -> Result<(), Refusal> {
        self.keys.clear();
        for (page, entry) in self.pages.iter() {
            if let Some(key) = entry.key()
                && let Some(holder) = self.keys.insert(key.clone(), page)
            {
                return Err(Refusal::KeyTaken { key: key.clone(), holder });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
