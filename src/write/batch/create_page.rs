//! The builder for a page that a batch creates.

use remanent_format::{Key, Metadata};

use super::{BatchStep, NewPage, WriteBatch};
use crate::error::Error;

/// The builder for a page that a batch creates, returned by [`WriteBatch::create`]. Chain [`key`](Self::key) and
/// [`metadata`](Self::metadata) to set these properties. [`page`](Self::page) returns a reference to the page for later
/// calls.
///
/// ```
/// use remanent::{Metadata, Place, Store};
/// let store = Store::temporary()?;
/// let mut batch = store.batch();
/// batch.create(8, Place::Host).key("bias");
/// let page = batch.create(4, Place::Host).key("weight").metadata(Metadata::new()).page();
/// batch.write(page, 0, b"w0w1");
/// let pages = store.commit(batch)?.pages;
/// assert_eq!(store.page(pages[1])?.key.unwrap().as_str(), Some("weight"));
/// # Ok::<(), remanent::Error>(())
/// ```
#[derive(Debug)]
pub struct CreatePage<'b> {
    batch: &'b mut WriteBatch,
    /// The index of the step that creates the page.
    pub(super) step: usize,
    pub(super) page: NewPage,
}

impl<'b> CreatePage<'b> {
    pub(super) fn new(batch: &'b mut WriteBatch, step: usize, page: NewPage) -> Self {
        Self { batch, step, page }
    }

    /// Sets the key of the page. No other page may have the same key. A key consists of 1 to 64 bytes, often text. With
    /// any other length the commit fails with [`Error::Invalid`].
    pub fn key<K>(self, key: K) -> Self
    where
        K: TryInto<Key>,
        K::Error: Into<Error>,
    {
        match key.try_into() {
            Ok(key) => self.optional_key(key),
            Err(error) => {
                self.batch.refused.get_or_insert(error.into());
                self
            }
        }
    }

    /// Sets the key of the page like [`key`](Self::key), or sets no key if `key` is `None`.
    pub fn optional_key(self, key: impl Into<Option<Key>>) -> Self {
        if let Some(BatchStep::Create { key: own, .. }) = self.batch.created(self.step) {
            *own = key.into();
        }
        self
    }

    /// Sets the metadata of the page, and replaces any metadata set before.
    pub fn metadata(self, metadata: Metadata) -> Self {
        if let Some(BatchStep::Create { metadata: own, .. }) = self.batch.created(self.step) {
            *own = metadata;
        }
        self
    }

    /// Returns a reference to the page, for later calls on this batch.
    #[must_use]
    pub fn page(self) -> NewPage {
        self.page
    }
}
