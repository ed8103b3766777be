//! Looks up pages and the root in their state after one batch, while other threads commit.

use std::sync::Arc;

use remanent_format::{Lsn, Metadata, PageId, PageInfo};

use super::Store;
use crate::base::process::ForkGuard;
use crate::error::{Error, Result};
use crate::versions::TableView;

/// A consistent view of the pages and the root of an open store after one batch, unaffected by later commits. Returned
/// by [`Store::view`].
///
/// A view retains some hundred bytes for each change committed during its lifetime, but no page contents:
/// [`LiveView::read`] returns an error for a page that has changed since the view was created. To retain the bytes of a
/// page, use a [lease](Store::lease).
///
/// ```
/// use remanent::{Error, Place, Store};
/// let store = Store::temporary()?;
/// let mut batch = store.batch();
/// let page = batch.create(4, Place::Host).page();
/// batch.set_root("step", 1u64);
/// let page = store.commit(batch)?.pages[0];
///
/// let view = store.view()?;
/// let mut batch = store.batch();
/// batch.resize(page, 8).set_root("step", 2u64);
/// store.commit(batch)?;
/// assert_eq!((view.page(page)?.len, &view.root()["step"]), (4, &1u64.into()));
/// assert_eq!((store.page(page)?.len, &store.root()?["step"]), (8, &2u64.into()));
/// assert!(matches!(view.read(page, 0, &mut [0; 4]), Err(Error::Overtaken { .. })));
/// # Ok::<(), remanent::Error>(())
/// ```
pub struct LiveView<'s> {
    store: &'s Store,
    /// The view of the version table. Empty in a forked child.
    table: ForkGuard<TableView<'s>>,
}

/// An iterator over all pages of a store after one batch, in the order of their ids. Returned by [`Store::pages`] and
/// [`LiveView::pages`].
pub struct Pages<'s> {
    view: PagesView<'s>,
    next: Option<PageId>,
    left: u64,
}

/// The view that an iterator over pages reads. The iterator owns or borrows the view.
enum PagesView<'s> {
    Own(LiveView<'s>),
    Borrowed(&'s LiveView<'s>),
}

impl Store {
    /// Returns a view of the pages and the root after the newest logged batch. Never waits. In a forked child, an
    /// inherited view is empty.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn view(&self) -> Result<LiveView<'_>> {
        self.check_process()?;
        Ok(LiveView { store: self, table: ForkGuard::new(self.engine().versions.view()) })
    }
}

impl<'s> LiveView<'s> {
    pub(super) fn check_process(&self) -> Result<()> {
        self.table.check().map(drop)
    }

    /// Returns the newest batch that the view reflects, or 0 in a forked child.
    #[must_use]
    pub fn lsn(&self) -> Lsn {
        self.table.check().map_or(Lsn(0), TableView::lsn)
    }

    /// Returns the root, which is empty in a forked child.
    #[must_use]
    pub fn root(&self) -> Arc<Metadata> {
        self.table.check().map(|table| table.root().0).unwrap_or_default()
    }

    /// Returns a page's length, version, key and metadata.
    ///
    /// # Errors
    /// [`Error::UnknownPage`]; [`Error::Forked`].
    pub fn page(&self, page: PageId) -> Result<PageInfo> {
        self.table.check()?.page(page).ok_or(Error::UnknownPage { page })
    }

    /// Returns the information of the page with key `key`.
    ///
    /// # Errors
    /// [`Error::UnknownKey`]; [`Error::Forked`].
    pub fn page_by_key(&self, key: impl AsRef<[u8]>) -> Result<PageInfo> {
        let key = key.as_ref();
        self.table.check()?.page_by_key(key).ok_or_else(|| Error::unknown_key(key))
    }

    /// Returns whether the page exists. Always returns `false` in a forked child.
    #[must_use]
    pub fn contains(&self, page: PageId) -> bool {
        self.table.check().is_ok_and(|table| table.page(page).is_some())
    }

    /// Returns the number of pages, or 0 in a forked child.
    #[must_use]
    pub fn page_count(&self) -> u64 {
        self.table.check().map_or(0, |table| table.root().1)
    }

    /// Returns an iterator over all pages, in the order of their ids.
    #[must_use]
    pub fn pages(&'s self) -> Pages<'s> {
        Pages { left: self.page_count(), next: Some(PageId(0)), view: PagesView::Borrowed(self) }
    }

    pub(super) fn into_pages(self) -> Pages<'s> {
        Pages { left: self.page_count(), next: Some(PageId(0)), view: PagesView::Own(self) }
    }

    /// Fills `out` with the page's bytes starting at `offset`.
    ///
    /// # Errors
    /// [`Error::Overtaken`] if the page has changed since this view was created; otherwise the errors of
    /// [`Store::read`].
    pub fn read(&self, page: PageId, offset: u64, out: &mut [u8]) -> Result<()> {
        let info = self.page(page)?;
        self.store.engine().versions.used(page);
        let len = out.len() as u64;
        if offset.checked_add(len).is_none_or(|end| end > info.len) {
            return Err(Error::OutOfBounds { page, offset, len, page_len: info.len });
        }
        self.store.read_as_of(&info, offset, out)
    }
}

impl Iterator for Pages<'_> {
    type Item = PageInfo;

    fn next(&mut self) -> Option<PageInfo> {
        let view = match &self.view {
            PagesView::Own(view) => view,
            PagesView::Borrowed(view) => view,
        };
        let Ok(table) = view.table.check() else {
            self.left = 0;
            return None;
        };
        let info = table.next(self.next?)?;
        self.next = info.page.0.checked_add(1).map(PageId);
        self.left = self.left.saturating_sub(1);
        Some(info)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = usize::try_from(self.left).unwrap_or(usize::MAX);
        (left, Some(left))
    }
}

impl ExactSizeIterator for Pages<'_> {}

impl std::fmt::Debug for LiveView<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LiveView").field("lsn", &self.lsn()).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Pages<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pages").field("left", &self.left).finish_non_exhaustive()
    }
}
