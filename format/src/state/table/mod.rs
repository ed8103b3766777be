//! The page table, and what a batch does to it.
//!
//! One pure function, [`PageTable::plan`], says what a batch changes or why it cannot. Commits validate
//! with it, the applier installs what it returned, recovery and `rebuild` replay through it: there is no
//! second opinion on what a batch means.

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
use crate::state::by_id::ById;
use crate::state::page_changes::{PageChange, PageChanges};
use crate::value::{Metadata, SharedMetadata};

/// The properties of a page besides its bytes.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct PageInfo {
    /// The page's id.
    pub page: PageId,
    /// The user's name for it.
    pub key: Option<Key>,
    /// Its length in bytes.
    pub len: u64,
    /// The page's version.
    pub epoch: Epoch,
    /// The batch that changed it last, or moved it.
    pub lsn: Lsn,
    /// The page's place.
    pub place: Place,
    /// The page's metadata.
    pub metadata: SharedMetadata,
}

impl PageInfo {
    /// A page as an image or a create describes it.
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

/// All pages, the root, and the numbers that never go back.
#[derive(Clone, Debug, Default)]
pub struct PageTable {
    pages: ById<PageId, PageEntry>,
    /// Whether pages are flagged when they change.
    is_watched: bool,
    keys: KeyIndex,
    root: Arc<Metadata>,
    next_page: u64,
    epoch_high: Epoch,
    lsn: Lsn,
}

/// Which pages are watched is no part of the state.
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
    /// An empty table.
    #[must_use]
    pub fn new() -> Self {
        Self { next_page: 1, ..Self::default() }
    }

    /// A table as a manifest describes it. Keys are indexed later, by [`PageTable::index_keys`].
    ///
    /// # Panics
    /// If a page is longer, or its place's number higher, than the format allows.
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
        let pages: ById<PageId, PageEntry> = noted.map(|info| (info.page, PageEntry::from(&info))).collect();
        let epoch_high = pages.values().map(|entry| entry.epoch).fold(epoch_high, Epoch::max);
        let next_page = next_page.max(past_last);
        Self { pages, is_watched: false, keys: KeyIndex::default(), root, next_page, epoch_high, lsn }
    }

    /// This table with the pages of another one, whose ids are all above its own.
    #[must_use]
    pub(crate) fn joined(mut self, behind: Self) -> Self {
        self.pages.absorb(behind.pages);
        self.next_page = self.next_page.max(behind.next_page);
        self.epoch_high = self.epoch_high.max(behind.epoch_high);
        self
    }

    /// Looks up a page.
    #[must_use]
    pub fn get(&self, page: PageId) -> Option<PageInfo> {
        Some(self.pages.get(page)?.info(page))
    }

    /// Looks up a page as the table holds it: neither key nor metadata is copied.
    #[must_use]
    pub fn entry(&self, page: PageId) -> Option<&PageEntry> {
        self.pages.get(page)
    }

    /// The page that has a key.
    #[must_use]
    pub fn get_key(&self, key: &Key) -> Option<PageInfo> {
        self.keys.get(key).and_then(|page| self.get(*page))
    }

    /// All pages, in the order of their ids.
    pub fn pages(&self) -> impl ExactSizeIterator<Item = PageInfo> {
        self.pages.iter().map(|(page, entry)| entry.info(page))
    }

    /// All pages as the table holds them, in the order of their ids.
    pub fn entries(&self) -> impl ExactSizeIterator<Item = (PageId, &PageEntry)> {
        self.pages.iter()
    }

    /// Places and lengths of all pages, in the order of their ids: the parts that take memory, without the
    /// rest.
    pub fn lens(&self) -> impl ExactSizeIterator<Item = (PageId, Place, u64)> {
        self.pages.iter().map(|(page, entry)| (page, entry.place(), entry.len()))
    }

    /// The same of these two pages, and of those between them.
    pub fn lens_between(&self, first: PageId, last: PageId) -> impl Iterator<Item = (PageId, Place, u64)> {
        self.pages.range(first, last).map(|(page, entry)| (page, entry.place(), entry.len()))
    }

    /// The batches that changed or moved all pages last, in the order of the pages' ids.
    pub fn lsns(&self) -> impl ExactSizeIterator<Item = (PageId, Lsn)> {
        self.pages.iter().map(|(page, entry)| (page, entry.lsn))
    }

    /// The root's metadata.
    #[must_use]
    pub fn root(&self) -> &Arc<Metadata> {
        &self.root
    }

    /// The next page id; all ids below it are used.
    #[must_use]
    pub fn next_page(&self) -> u64 {
        self.next_page
    }

    /// The highest epoch that any page ever had.
    #[must_use]
    pub fn epoch_high(&self) -> Epoch {
        self.epoch_high
    }

    /// The last batch installed.
    #[must_use]
    pub fn lsn(&self) -> Lsn {
        self.lsn
    }

    /// Makes a plan real. Keys follow, so that a table that serves lookups stays indexed.
    pub fn install(&mut self, changes: &Changes) {
        for (page, state) in changes.pages() {
            if self.is_watched {
                self.pages.flag(*page);
            }
            let Some(info) = state else {
                // A key may already be another page's: freed and given again in one batch.
                if let Some(entry) = self.pages.remove(*page)
                    && let Some(key) = entry.key()
                    && self.keys.get(key) == Some(page)
                {
                    self.keys.remove(key);
                }
                continue;
            };
            self.epoch_high = self.epoch_high.max(info.epoch);
            match self.pages.get_mut(*page) {
                Some(old) if old.key() == info.key.as_ref() => old.become_newer(info),
                // A new page. A log that another program wrote may create a page that is there.
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

    /// As [`PageTable::plan`] and [`PageTable::install`], for a batch that changes bytes and nothing else, as
    /// nearly all batches of a long log do: it works on the pages in place. In a profile of the replay of
    /// 256-byte deltas, copies of their states, and the map of those copies, took an eighth of all time.
    /// `None`, with nothing done, if the batch does more. No page has a batch as late as this one.
    ///
    /// # Errors
    /// A [`Refusal`]; nothing is changed.
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
            // Once a batch.
            if entry.lsn < lsn {
                entry.lsn = lsn;
                entry.epoch.0 += 1;
                self.epoch_high = self.epoch_high.max(entry.epoch);
            }
        }
        self.lsn = self.lsn.max(lsn);
        Some(Ok(()))
    }

    /// As [`change_bytes`](Self::change_bytes), of many batches at once, none of which the table has. Returns
    /// whether each of them can follow the one before; if not, nothing is changed.
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

    /// Replaces pages and root by those of an earlier state; the numbers that never go back stay.
    ///
    /// # Panics
    /// As for [`PageTable::from_parts`].
    pub fn replace(&mut self, lsn: Lsn, pages: impl IntoIterator<Item = PageInfo>, root: Arc<Metadata>) {
        let new = Self::from_parts(pages, root, self.next_page, self.epoch_high, lsn);
        let mut before = std::mem::replace(self, new);
        if before.is_watched {
            before.pages.flag_all();
            self.pages.flag_all();
            self.watch(before.pages.each_flagged());
        }
    }

    /// Begins to note which pages [`PageTable::install`] and [`PageTable::replace`] change. These pages count
    /// as changed already.
    pub fn watch(&mut self, changed: impl IntoIterator<Item = PageId>) {
        self.is_watched = true;
        changed.into_iter().for_each(|page| self.pages.flag(page));
    }

    /// The pages that changed, or are gone, and were not settled since; ascending. None if the table is not
    /// watched.
    ///
    /// # Errors
    /// [`Defect::Memory`].
    pub fn changed(&mut self) -> Result<Vec<PageId>, Defect> {
        self.pages.flagged()
    }

    /// Forgets that these pages changed: the caller knows them as they are now.
    pub fn settle(&mut self, pages: impl IntoIterator<Item = PageId>) {
        pages.into_iter().for_each(|page| self.pages.unflag(page));
    }

    /// Indexes the keys of the final state.
    ///
    /// # Errors
    /// [`Refusal::KeyTaken`] if two pages have the same key.
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
