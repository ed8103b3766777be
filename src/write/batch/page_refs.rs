//! References to pages in a batch: by id, by key, or as a page that the same batch creates.
//!
//! Keys are looked up when the batch is submitted, because a batch under construction has no store. The operations keep
//! the result, so all later steps work with ids alone.

use std::collections::HashMap;

use remanent_format::{Key, PageId, PageInfo};

use super::{BatchStep, WriteBatch};
use crate::base::allocation::{insert, push};
use crate::error::{Error, Result};

/// An id that no page ever has, because ids begin at 1.
pub(super) const NO_PAGE: PageId = PageId(0);

/// A reference to a page in a batch: the id or key of an existing page, or a page that the same batch creates.
///
/// The operations of [`WriteBatch`] accept every type that converts to a `PageRef`: [`PageId`], [`PageInfo`],
/// [`NewPage`], and references to text, bytes or a [`Key`].
///
/// A key refers to the page that has the key when the batch is committed, after the earlier operations of the batch.
/// Thus it may refer to a page that the same batch creates, and not to a page that the batch deletes. The commit fails
/// with [`Error::UnknownKey`], and leaves the store unchanged, if no page has the key.
///
/// ```
/// use remanent::{Error, Place, Store};
/// let store = Store::temporary()?;
/// let mut batch = store.batch();
/// batch.create(4, Place::Host).key("bias");
/// batch.write("bias", 0, b"zero");
/// store.commit(batch)?;
///
/// let mut batch = store.batch();
/// batch.write("bias", 0, b"one!").set_metadata("bias", "step", 1u64);
/// store.commit(batch)?;
/// assert_eq!(store.get("bias")?.as_deref(), Some(&b"one!"[..]));
///
/// let unknown = store.commit(store.batch().delete("weight")).unwrap_err();
/// assert!(matches!(unknown, Error::UnknownKey { key } if key.as_str() == Some("weight")));
/// # Ok::<(), remanent::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageRef<'k>(Reference<'k>);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Reference<'k> {
    Id(PageId),
    New(NewPage),
    Key(&'k [u8]),
}

/// A page that a batch creates, as a target for later operations of the same batch. In any other batch the value refers
/// to no page.
///
/// Once the batch is committed, [`NewPage::index`] is the position of the page's id in [`crate::CommitReceipt::pages`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NewPage {
    /// The number of the batch ([`WriteBatch::number`]).
    pub(super) batch: u64,
    pub(super) index: usize,
}

impl NewPage {
    /// Returns the number of pages that the batch creates before this page.
    #[must_use]
    pub fn index(self) -> usize {
        self.index
    }
}

impl From<PageId> for PageRef<'_> {
    fn from(page: PageId) -> Self {
        Self(Reference::Id(page))
    }
}

impl From<PageInfo> for PageRef<'_> {
    fn from(info: PageInfo) -> Self {
        info.page.into()
    }
}

impl From<&PageInfo> for PageRef<'_> {
    fn from(info: &PageInfo) -> Self {
        info.page.into()
    }
}

impl From<NewPage> for PageRef<'_> {
    fn from(page: NewPage) -> Self {
        Self(Reference::New(page))
    }
}

macro_rules! page_ref_from_key {
    ($($key:ty),* $(,)?) => {$(
        impl<'k> From<&'k $key> for PageRef<'k> {
            fn from(key: &'k $key) -> Self {
                Self(Reference::Key(key.as_ref()))
            }
        }
    )*};
}
page_ref_from_key!(str, String, [u8], Vec<u8>, Key);

impl<'k, const N: usize> From<&'k [u8; N]> for PageRef<'k> {
    fn from(key: &'k [u8; N]) -> Self {
        Self(Reference::Key(key))
    }
}

/// The page of an operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    /// The page. If the caller gave a key, this is the result of the last lookup.
    page: TargetPage,
    /// The position of the key in [`WriteBatch::keys`], if the caller gave a key.
    key: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum TargetPage {
    Existing(PageId),
    /// A page that the batch creates, after this number of other pages.
    New(usize),
}

impl Target {
    pub fn existing(self) -> Option<PageId> {
        match self.page {
            TargetPage::Existing(page) => Some(page),
            TargetPage::New(_) => None,
        }
    }

    /// Returns the id of the page. `pages` contains the ids of the new pages.
    pub fn resolve(self, pages: &[PageId]) -> PageId {
        match self.page {
            TargetPage::Existing(page) => page,
            // The index may be out of range: the page may have been created in a clone of this batch that has more
            // pages.
            TargetPage::New(index) => pages.get(index).copied().unwrap_or(NO_PAGE),
        }
    }
}

impl From<NewPage> for Target {
    fn from(page: NewPage) -> Self {
        Self { page: TargetPage::New(page.index), key: None }
    }
}

impl WriteBatch {
    /// Converts a reference to a page to a target. If `page` belongs to another batch, the target is a page that never
    /// exists. If `page` is a key, the same is true until the first lookup.
    pub(super) fn target<'k>(&mut self, page: impl Into<PageRef<'k>>) -> Target {
        let nowhere = TargetPage::Existing(NO_PAGE);
        match page.into().0 {
            Reference::Id(page) => Target { page: TargetPage::Existing(page), key: None },
            Reference::New(page) if page.batch == self.number => page.into(),
            Reference::New(_) => Target { page: nowhere, key: None },
            Reference::Key(key) => {
                let added = Key::new(key).map_err(Error::from).and_then(|key| push(&mut self.keys, key));
                if let Err(error) = added {
                    self.refused.get_or_insert(error);
                }
                Target { page: nowhere, key: self.keys.len().checked_sub(1) }
            }
        }
    }

    /// Returns whether operations of the batch name pages by keys, which [`WriteBatch::look_up_keys`] must look up.
    pub(crate) fn has_keys(&self) -> bool {
        !self.keys.is_empty()
    }

    /// Looks up the pages that operations name by keys. `page_by_key` returns the page that has a key before the batch.
    /// Returns whether any result differs from that of the previous call.
    ///
    /// # Errors
    /// `UnknownKey` for a key that no page has at its point of the batch; `OutOfMemory`.
    pub(crate) fn look_up_keys(&mut self, page_by_key: impl Fn(&Key) -> Option<PageId>) -> Result<bool> {
        let mut is_changed = false;
        let (mut created, mut deleted) = (HashMap::new(), HashMap::new());
        let mut new_pages = (0..self.new_pages).map(TargetPage::New);
        for step in &mut self.steps {
            for target in step.targets_mut().into_iter().flatten() {
                let Some(key) = target.key.map(|index| &self.keys[index]) else { continue };
                let exists = |page: &TargetPage| !deleted.contains_key(page);
                let new = created.get(key).copied().filter(exists);
                let found = new.or_else(|| page_by_key(key).map(TargetPage::Existing).filter(exists));
                let page = found.ok_or_else(|| Error::UnknownKey { key: key.clone() })?;
                is_changed |= page != std::mem::replace(&mut target.page, page);
            }
            match step {
                BatchStep::Create { key, .. } => {
                    if let (Some(page), Some(key)) = (new_pages.next(), key) {
                        insert(&mut created, key.clone(), page)?;
                    }
                }
                BatchStep::Clone { .. } => drop(new_pages.next()),
                BatchStep::Delete { page } => insert(&mut deleted, page.page, ())?,
                _ => {}
            }
        }
        Ok(is_changed)
    }
}

impl BatchStep {
    /// Returns the pages that the operation names.
    fn targets_mut(&mut self) -> [Option<&mut Target>; 2] {
        match self {
            BatchStep::Clone { source: page }
            | BatchStep::Write { page, .. }
            | BatchStep::Source { page, .. }
            | BatchStep::Masked { page, .. }
            | BatchStep::Scatter { page, .. }
            | BatchStep::WriteDevice { page, .. }
            | BatchStep::ScatterDevice { page, .. }
            | BatchStep::Fill { page, .. }
            | BatchStep::Resize { page, .. }
            | BatchStep::Delete { page }
            | BatchStep::Move { page, .. }
            | BatchStep::SetMetadata { page, .. }
            | BatchStep::RemoveMetadata { page, .. } => [Some(page), None],
            BatchStep::Copy { source, target, .. } => [Some(source), Some(target)],
            BatchStep::Create { .. }
            | BatchStep::Capture { .. }
            | BatchStep::SetRoot { .. }
            | BatchStep::RemoveRoot { .. }
            | BatchStep::Note { .. } => [None, None],
        }
    }
}
