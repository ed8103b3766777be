//! The table that readers use: versions of pages, keys and root, which any thread finds without a lock.
//!
//! A batch installs its versions under the submission lock, right after its append to the log. The batch becomes
//! visible when two Lsns have reached it: `installed`, which states that all its versions are in place, and the log's
//! `logged`, if logging completes after the append. Both Lsns only increase, so their minimum increases too, and the
//! whole batch becomes visible at once. A batch that was acknowledged as logged to any caller is visible to every read
//! that begins afterwards. `installed` increases when the batch is passed to the applier. As a result, a read that a
//! thread queues on the applier after it has observed the new value runs after the batch. A reader that finds bytes
//! changed also finds the versions that the batch installed.
//!
//! A reader loads the visible Lsn, then the newest version of a page, and follows the chain back to a version that this
//! Lsn has reached. If the chain ends first, either the page did not exist yet or the Lsn was outdated. Loading the Lsn
//! again distinguishes the two cases. A view registers its Lsn, and no version that the view may need is unlinked until
//! the view is dropped.
//!
//! A change of bytes alone creates no version, and neither does a move. A version contains two states, (batch, epoch,
//! place), and the writer overwrites the older state. All fields are atomics, so no read is a data race. A reader finds
//! the required state for these reasons:
//!
//! 1. The writer overwrites the older state only if the newer state is at or below the *floor*, which is at most the
//!    visible Lsn at that time and the Lsn of every view. Otherwise the writer creates a version, as for any other
//!    change.
//! 2. Therefore a view never needs the overwritten state. A reader that has loaded the visible Lsn earlier may need it.
//!    Both states are then newer than the reader's Lsn, so the reader detects this and loads the Lsn again, which has
//!    increased.
//! 3. A state is read consistently: its batch is `NO_LSN` while the state changes, and no batch is stored twice.
//! 4. Both states are from the same point in time: the first state is the same before and after the read of the second
//!    state.
//! 5. A writer suspended halfway blocks no reader, because the other state is the newest installed one.
//!
//! One writer at a time, the holder of the submission lock, installs and unlinks versions. The bytes of pages are
//! stored elsewhere. The applier publishes the memory of a page ([`Versions::moved`]). After reading the bytes, a
//! reader checks whether the page still has the requested version.
//!
//! The versions are in memory only, so a crash loses nothing. An open creates the versions again.

mod chain;
mod directory;
mod recent_pages;
pub(crate) mod uses;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use remanent_format::state::table::{Changes, PageEntry, PageShape};
use remanent_format::{Key, Lsn, Metadata, PageId, PageInfo, PageTable};

pub(crate) use self::chain::SeenPage;
use self::chain::{PageState, ReadMiss, RootState, Version, VersionState, visible_at};
use self::directory::{Directory, PageSlot, SlotWalk};
use self::recent_pages::RecentPages;
use self::uses::PageUses;
use crate::base::allocation::set_of;
use crate::base::queue::Queue;
use crate::base::sync::atomic::{AtomicU64, Ordering};
use crate::base::sync::{Map, Mutex, Rank, Swap};
use crate::device::MemoryId;

/// The minimum number of superseded versions at which a batch unlinks unneeded versions.
const SUPERSEDED_MIN: usize = if cfg!(shuttle) || cfg!(miri) { 1 } else { 64 };

/// The number of versions that any batch may unlink, in addition to `UNLINKED_MAX_EACH` for each page that it changes.
/// After a long-lived view ends, many versions are unneeded, and no single committer should unlink all of them.
const UNLINKED_MIN: usize = 2;
const UNLINKED_MAX_EACH: usize = 2;

/// The current and recent versions of the pages, keys and root of an open store, shared by threads.
pub(crate) struct Versions {
    pages: Directory,
    keys: Map<Key, Holders>,
    root: Swap<Version<RootState>>,
    /// The newest logged batch, or `None` if every batch is logged before its versions are installed.
    logged: Option<Arc<AtomicU64>>,
    written: WriterLine,
    views: Views,
    /// The recorder of changes and reads of pages, or `None` if no eviction policy needs it.
    uses: Option<Arc<PageUses>>,
}

/// The fields that every batch changes. They share a cache line, so that only this line moves from core to core with
/// the committers.
#[repr(align(64))]
struct WriterLine {
    /// The newest batch whose versions are all in place.
    installed: AtomicU64,
    writer: Mutex<Writer>,
}

#[cfg(not(any(shuttle, debug_assertions)))]
const _: () = assert!(size_of::<WriterLine>() == 64);

/// The number of views at each Lsn. The field is on a separate cache line from the fields that every reader loads.
#[repr(align(64))]
#[derive(Default)]
struct Views(Mutex<BTreeMap<Lsn, usize>>);

/// The writer's state, which only the holder of the submission lock uses.
#[derive(Default)]
struct Writer {
    /// A cache of the newest versions of recently changed pages.
    recent: RecentPages,
    /// The versions whose older versions are not unlinked yet, in batch order.
    superseded: Queue<Superseded>,
    /// A batch that all readers and views have reached. Versions superseded up to this batch can be unlinked.
    floor: Lsn,
}

/// The page that has a key, and the earlier pages with the same key that a reader may still need.
#[derive(Clone)]
struct Holders {
    newest: PageId,
    earlier: Vec<PageId>,
}

/// A version that superseded another version. It refers to the older version until the older version is unlinked.
enum Superseded {
    Page(PageId, Arc<Version<PageState>>),
    Root(Arc<Version<RootState>>),
}

impl Versions {
    /// Creates versions of the pages of a table. The table's last batch must be logged. `memory` returns the memory
    /// that contains a page's bytes, or `None` if the page is not loaded. Changes and reads are recorded in `uses`.
    pub fn new(
        table: &PageTable,
        logged: Option<Arc<AtomicU64>>,
        memory: impl Fn(PageId) -> Option<MemoryId>,
        uses: Option<Arc<PageUses>>,
    ) -> Self {
        let state = |(page, entry): (PageId, &PageEntry)| {
            (page, PageState::present(entry.shape().clone(), entry.epoch, entry.lsn), memory(page))
        };
        let keyed = || table.entries().filter_map(|(page, entry)| Some((page, entry.key()?)));
        let keys = Map::with_capacity(keyed().count());
        keyed().for_each(|(page, key)| keys.set(key.clone(), Holders { newest: page, earlier: Vec::new() }));
        let root = RootState {
            lsn: table.lsn(),
            root: table.root().clone(),
            page_count: table.entries().len() as u64,
        };
        Self {
            pages: Directory::new(table.entries().map(state)),
            keys,
            root: Swap::new(Some(Version::new(root, None))),
            logged,
            written: WriterLine {
                installed: AtomicU64::new(table.lsn().0),
                writer: Mutex::of_rank(Rank::STATE, Writer::default()),
            },
            views: Views::default(),
            uses,
        }
    }

    /// Records a read of a page if an eviction policy needs it.
    pub fn used(&self, page: PageId) {
        self.uses.iter().for_each(|uses| uses.read(page));
    }

    /// Returns the newest visible batch.
    pub fn visible(&self) -> Lsn {
        // Acquire: a reader that observes this Lsn also observes all versions installed before it.
        let installed = self.written.installed.load(Ordering::Acquire);
        let logged = self.logged.as_ref().map_or(u64::MAX, |logged| logged.load(Ordering::Acquire));
        Lsn(installed.min(logged))
    }

    /// Calls `read` with a page as it was after batch `at`, which must be a visible Lsn or the Lsn of a view.
    fn page_at<R>(
        &self,
        page: PageId,
        at: Lsn,
        read: impl FnOnce(&SeenPage<'_>) -> R,
    ) -> Result<R, ReadMiss> {
        let state = self.pages.with(page, |slot| visible_at(&slot.newest, at));
        let state = state.unwrap_or(Err(ReadMiss::Absent))?;
        state.seen(at).map(|seen| read(&seen))
    }

    /// Calls `read` with the current version of a page and returns the result, or `None` if the page does not exist.
    pub fn page<R>(&self, page: PageId, read: impl Fn(&SeenPage<'_>) -> R) -> Option<R> {
        loop {
            match self.page_at(page, self.visible(), &read) {
                Ok(made) => return Some(made),
                // If the oldest remaining version is visible by now, the Lsn `at` was outdated, and the version for it
                // is already unlinked: retry. Otherwise the page does not exist yet.
                Err(ReadMiss::Later(lsn)) if lsn <= self.visible() => {}
                Err(_) => return None,
            }
        }
    }

    /// Calls `read` with the page that currently has the key `key` and returns the result, or `None` if no page has the
    /// key.
    pub fn page_by_key<R>(&self, key: &[u8], read: impl Fn(PageId, &SeenPage<'_>) -> R) -> Option<R> {
        loop {
            let at = self.visible();
            let found = self.page_by_key_at(key, at, &read);
            // If the visible Lsn has increased, the key may have passed from a deleted page to another page: retry.
            if found.is_some() || self.visible() == at {
                return found;
            }
        }
    }

    /// Calls `read` with the page that had the key `key` after batch `at`, which must be a visible Lsn or the Lsn of a
    /// view.
    fn page_by_key_at<R>(&self, key: &[u8], at: Lsn, read: impl Fn(PageId, &SeenPage<'_>) -> R) -> Option<R> {
        let found = self.keys.with(key, |holders| {
            let mut pages = std::iter::once(&holders.newest).chain(&holders.earlier);
            let has_key = |page: &PageId, entry: &SeenPage<'_>| {
                (entry.key().map(Key::as_bytes) == Some(key)).then(|| read(*page, entry))
            };
            pages.find_map(|page| self.page_at(*page, at, |entry| has_key(page, entry)).ok().flatten())
        });
        found.flatten()
    }

    /// Calls `read` with the current root and number of pages.
    pub fn root<R>(&self, read: impl Fn(&Arc<Metadata>, u64) -> R) -> R {
        loop {
            if let Ok(state) = visible_at(&self.root, self.visible()) {
                return read(&state.root, state.page_count);
            }
        }
    }

    /// Returns whether a page still has the version that batch `lsn` created.
    pub fn is_at(&self, page: PageId, lsn: Lsn) -> bool {
        self.page(page, |entry| entry.lsn) == Some(lsn)
    }

    /// Starts a sequence of lookups within one call or batch, in which adjacent pages are found faster than with
    /// [`page`](Self::page).
    pub fn walk(&self) -> PageWalk<'_> {
        PageWalk { versions: self, slots: self.pages.walk() }
    }

    /// Returns the memory that contains a page's bytes after the last applied batch.
    pub fn memory(&self, page: PageId) -> Option<MemoryId> {
        self.pages.with(page, |slot| slot.memory()).flatten()
    }

    /// Publishes new memory for a page's bytes. The applier calls this before it reports that the batch is applied.
    pub fn moved(&self, page: PageId, memory: MemoryId) {
        self.walk().moved(page, memory);
    }

    /// Publishes that a page no longer has memory. Must be called before that memory is assigned to another page.
    pub fn moved_to_disk(&self, page: PageId) {
        self.pages.with(page, |slot| slot.set_memory(None));
    }

    /// Installs a batch's versions, which [`show`](Self::show) makes visible. The caller must hold the submission lock.
    pub fn install(&self, changes: &Changes) {
        let pages = changes.pages().iter().map(|(page, state)| (*page, state.as_ref()));
        self.install_all(changes.lsn, pages, changes.root.as_ref());
    }

    /// Makes an installed batch visible to readers, once the batch is also logged (I1).
    pub fn show(&self, lsn: Lsn) {
        // Release: a reader that observes this Lsn also observes all installed versions.
        self.written.installed.store(lsn.0, Ordering::Release);
    }

    /// Installs a batch that replaces all pages and the root, and makes it visible. Unchanged pages keep their
    /// versions.
    pub fn replace(&self, lsn: Lsn, pages: &[PageInfo], root: &Arc<Metadata>) {
        let staying = set_of(pages.iter().map(|info| info.page));
        let mut gone = Vec::new();
        let is_gone = |page: PageId, slot: &PageSlot| {
            let newest = slot.newest.load();
            (newest.as_ref()?.state.page().is_some() && !staying.contains(&page)).then_some(page)
        };
        let mut from = Some(PageId(0));
        while let Some(page) = from.and_then(|from| self.pages.find(from, is_gone)) {
            gone.push((page, None));
            from = page.0.checked_add(1).map(PageId);
        }
        let changed = pages.iter().filter(|info| info.lsn == lsn).map(|info| (info.page, Some(info)));
        self.install_all(lsn, gone.into_iter().chain(changed), Some(root));
        self.show(lsn);
    }

    fn install_all<'a>(
        &self,
        lsn: Lsn,
        pages: impl Iterator<Item = (PageId, Option<&'a PageInfo>)>,
        root: Option<&Arc<Metadata>>,
    ) {
        let pages = pages.inspect(|(page, info)| {
            if let Some(uses) = &self.uses {
                uses.changed(*page, info.map(|info| (info.place, info.len)));
            }
        });
        let mut writer = self.written.writer.lock();
        // Unlink versions that earlier batches superseded. Those batches are visible by now.
        self.unlink(&mut writer, pages.size_hint().0);
        let (mut created, mut deleted) = (0, 0);
        let mut walk = self.pages.walk();
        // A batch with more pages than the cache can hold would only evict the cached pages.
        let is_short = pages.size_hint().0 <= recent_pages::PLACES;
        let mut pages = pages.peekable();
        while let Some((page, info)) = pages.next() {
            let advanced = info.is_some_and(|info| match is_short {
                true => self.advance_recent(&mut writer, lsn, page, info),
                false => {
                    let advance = |slot: &PageSlot| {
                        let newest = slot.newest.load();
                        newest
                            .as_ref()
                            .is_some_and(|newest| self.advance(&mut writer.floor, newest, lsn, info))
                    };
                    walk.with(page, advance) == Some(true)
                }
            });
            if advanced {
                continue;
            }
            let superseding = walk.with(page, |slot| self.supersede(slot, lsn, page, info)).flatten();
            match (superseding, info) {
                (Some((version, was_there)), _) => {
                    created += u64::from(!was_there);
                    deleted += u64::from(info.is_none());
                    writer.recent.set(page, version.clone());
                    writer.superseded.push_back(Superseded::Page(page, version));
                }
                (None, Some(info)) => {
                    let mut new = |page, info: &PageInfo| {
                        created += 1;
                        info.key.iter().for_each(|key| self.assign_key(key, page));
                        PageState::present(PageShape::from(info), info.epoch, info.lsn)
                    };
                    if !self.pages.lacks_chunk(page) {
                        self.pages.set(page, Version::new(new(page, info), None));
                        continue;
                    }
                    // A batch that creates many pages adds them chunk by chunk.
                    let mut last = page;
                    let mut chunk = vec![(page, new(page, info))];
                    while let Some((next, Some(info))) = pages.next_if(|(next, info)| {
                        info.is_some() && *next > last && Directory::are_neighbours(page, *next)
                    }) {
                        chunk.push((next, new(next, info)));
                        last = next;
                    }
                    self.pages.add(chunk);
                }
                // The page was created and deleted in this batch, or is already deleted.
                (None, None) => {}
            }
        }
        if root.is_some() || created != deleted {
            let before = self.root.get().expect("there is always a root");
            let root = root.unwrap_or(&before.state.root).clone();
            let page_count = before.state.page_count + created - deleted;
            let version = Version::new(RootState { lsn, root, page_count }, Some(before));
            writer.superseded.push_back(Superseded::Root(version.clone()));
            self.root.set(Some(version));
        }
    }

    /// Advances a page of a short batch like [`advance`](Self::advance), and adds it to the cache.
    fn advance_recent(&self, writer: &mut Writer, lsn: Lsn, page: PageId, info: &PageInfo) -> bool {
        let Writer { recent, floor, .. } = writer;
        let find = || self.pages.with(page, |slot| slot.newest.get()).flatten();
        let newest = recent.get_or(page, find);
        newest.is_some_and(|newest| self.advance(floor, newest, lsn, info))
    }

    /// Updates Lsn, epoch and place in the existing version of a page. Returns whether the version was updated. The
    /// version is not updated if another property changed, or if a reader needs the state that would be overwritten.
    fn advance(&self, floor: &mut Lsn, newest: &Version<PageState>, lsn: Lsn, info: &PageInfo) -> bool {
        if !newest.state.page().is_some_and(|shape| shape.is_same_but_place(info)) {
            return false;
        }
        let newest_lsn = newest.state.newest_lsn();
        if newest_lsn > *floor {
            *floor = self.floor();
        }
        let may = newest_lsn <= *floor;
        if may {
            newest.state.advance(lsn, info.epoch, info.place);
        }
        may
    }

    /// Stores a newer version in the slot of a page that already has a version. Returns the new version, and whether
    /// the page existed before.
    fn supersede(
        &self,
        slot: &PageSlot,
        lsn: Lsn,
        page: PageId,
        info: Option<&PageInfo>,
    ) -> Option<(Arc<Version<PageState>>, bool)> {
        let before = slot.newest.get()?;
        let shape = before.state.page();
        let state = match (info, shape) {
            (Some(info), Some(shape)) if shape.key() == info.key.as_ref() => {
                let mut shape = shape.clone();
                shape.become_newer(info);
                PageState::present(shape, info.epoch, info.lsn)
            }
            (Some(info), _) => {
                info.key.iter().for_each(|key| self.assign_key(key, page));
                PageState::present(PageShape::from(info), info.epoch, info.lsn)
            }
            (None, Some(_)) => PageState::gone(&before.state, lsn),
            (None, None) => return None,
        };
        let was_there = shape.is_some();
        let version = Version::new(state, Some(before));
        slot.newest.set(Some(version.clone()));
        Some((version, was_there))
    }

    /// Assigns a key to a page. Another page may have had the key before.
    fn assign_key(&self, key: &Key, page: PageId) {
        let before = self.keys.with(key, Holders::clone);
        let earlier =
            before.into_iter().flat_map(|Holders { newest, earlier }| [newest].into_iter().chain(earlier));
        let earlier = earlier.filter(|other| *other != page).collect();
        self.keys.set(key.clone(), Holders { newest: page, earlier });
    }

    /// Unlinks some versions that no reader needs, because all readers and views have reached the batches that
    /// superseded them. `count` is the number of pages in the batch. The number of unlinked versions is limited in
    /// proportion to `count`, so that no committer unlinks many.
    fn unlink(&self, writer: &mut Writer, count: usize) {
        let Writer { recent, superseded, floor } = writer;
        if superseded.len() < SUPERSEDED_MIN {
            return;
        }
        // Computing the floor requires a lock, so the last value is used as long as it permits unlinking a version.
        if superseded.front().is_some_and(|oldest| oldest.lsn() > *floor) {
            *floor = self.floor();
        }
        for _ in 0..UNLINKED_MIN + UNLINKED_MAX_EACH * count {
            if superseded.front().is_none_or(|oldest| oldest.lsn() > *floor) {
                return;
            }
            let oldest = superseded.pop_front().expect("looked at just now");
            match oldest {
                Superseded::Root(version) => version.unlink(),
                Superseded::Page(page, version) => {
                    version.unlink();
                    if version.state.page().is_none() {
                        self.forget(recent, page, &version);
                    }
                }
            }
        }
    }

    /// Removes a deleted page and its record, unless a restore has created the page again.
    fn forget(&self, recent: &mut RecentPages, page: PageId, version: &Arc<Version<PageState>>) {
        let is_it = |newest: &Arc<Version<PageState>>| Arc::ptr_eq(newest, version);
        if !self.pages.with(page, |slot| slot.newest.load().as_ref().is_some_and(is_it)).unwrap_or(false) {
            return;
        }
        self.pages.clear(page);
        recent.forget(page);
        let Some(key) = version.state.last().key() else { return };
        let Some(Holders { newest, earlier }) = self.keys.with(key, Holders::clone) else { return };
        let mut left = [newest].into_iter().chain(earlier).filter(|other| *other != page);
        match left.next() {
            Some(newest) => self.keys.set(key.clone(), Holders { newest, earlier: left.collect() }),
            None => self.keys.remove(key),
        }
    }

    /// Returns the newest batch that all views and all future readers have reached.
    fn floor(&self) -> Lsn {
        // The visible Lsn is read under the lock. A view that registers later therefore gets an Lsn that is at least as
        // high.
        let views = self.views.0.lock();
        let visible = self.visible();
        views.keys().next().map_or(visible, |oldest| visible.min(*oldest))
    }

    /// Creates a view of the visible batch. The versions visible to the view are kept until it is dropped.
    pub fn view(&self) -> TableView<'_> {
        let mut views = self.views.0.lock();
        let at = self.visible();
        *views.entry(at).or_default() += 1;
        TableView { versions: self, at }
    }
}

/// A sequence of lookups of pages, which is fast for adjacent pages.
pub(crate) struct PageWalk<'v> {
    versions: &'v Versions,
    slots: SlotWalk<'v>,
}

impl PageWalk<'_> {
    /// Calls `read` with the current version of a page, like [`Versions::page`].
    pub fn page<R>(&mut self, page: PageId, read: impl Fn(&SeenPage<'_>) -> R) -> Option<R> {
        let at = self.versions.visible();
        let state = self.slots.with(page, |slot| visible_at(&slot.newest, at))?.ok();
        let seen = state.as_ref().and_then(|state| state.seen(at).ok());
        match seen {
            Some(seen) => Some(read(&seen)),
            // The page does not exist, or not at the Lsn of this sequence, which may be outdated by now.
            None => self.versions.page(page, read),
        }
    }

    /// Publishes new memory for a page's bytes, like [`Versions::moved`].
    pub fn moved(&mut self, page: PageId, memory: MemoryId) {
        // The page may not exist: a batch that the applier has not reached yet may have deleted it, possibly with its
        // whole chunk. If a restore has created the page again, the restore publishes its memory itself.
        self.slots.with(page, |slot| slot.set_memory(Some(memory)));
    }
}

impl Superseded {
    fn lsn(&self) -> Lsn {
        match self {
            Superseded::Page(_, version) => version.state.lsn(),
            Superseded::Root(version) => version.state.lsn,
        }
    }
}

/// A view of the pages, keys and root after one batch.
pub(crate) struct TableView<'v> {
    versions: &'v Versions,
    at: Lsn,
}

impl<'v> TableView<'v> {
    pub fn lsn(&self) -> Lsn {
        self.at
    }

    /// Returns a page after the view's batch, or `None` if it does not exist.
    pub fn page(&self, page: PageId) -> Option<PageInfo> {
        self.versions.page_at(page, self.at, |entry| entry.info(page)).ok()
    }

    /// Returns the page that has a key after the view's batch, or `None` if no page has the key.
    pub fn page_by_key(&self, key: &[u8]) -> Option<PageInfo> {
        self.versions.page_by_key_at(key, self.at, |page, entry| entry.info(page))
    }

    /// Returns the root and the number of pages after the view's batch.
    pub fn root(&self) -> (Arc<Metadata>, u64) {
        let state = visible_at(&self.versions.root, self.at).ok();
        let state = state.expect("no version is unlinked that a view wants");
        (state.root.clone(), state.page_count)
    }

    /// Returns the page with the lowest id not below `from`, in the state after the view's batch.
    pub fn next(&self, from: PageId) -> Option<PageInfo> {
        self.versions.pages.find(from, |page, slot| {
            let state = visible_at(&slot.newest, self.at).ok()?;
            state.seen(self.at).ok().map(|seen| seen.info(page))
        })
    }
}

impl Drop for TableView<'_> {
    fn drop(&mut self) {
        let mut views = self.versions.views.0.lock();
        let count = views.get_mut(&self.at).expect("it was registered");
        *count -= 1;
        if *count == 0 {
            views.remove(&self.at);
        }
    }
}
