//! A page that a batch creates, while its key and metadata are being said.

use remanent_format::{Key, Metadata};

use super::{BatchStep, NewPage, WriteBatch};
use crate::error::Error;

/// The creation of one page in a batch: key and metadata may follow, [`page`](Self::page) names it for later
/// calls.
///
/// ```
/// use remanent::{Metadata, Options, Place, Store};
/// let store = Store::temporary(Options::default())?;
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
    /// Which step of the batch creates it.
    pub(super) step: usize,
    pub(super) page: NewPage,
}

impl<'b> CreatePage<'b> {
    pub(super) fn new(batch: &'b mut WriteBatch, step: usize, page: NewPage) -> Self {
        Self { batch, step, page }
    }

    /// Gives the page a key, which must be no other page's. Bytes or text of 1 to 64 bytes will do: with any
    /// other length the commit fails with [`Error::InvalidKey`].
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

    /// As [`key`](Self::key), where a page may have none.
    pub fn optional_key(self, key: impl Into<Option<Key>>) -> Self {
        if let Some(BatchStep::Create { key: own, .. }) = self.batch.created(self.step) {
            *own = key.into();
        }
        self
    }

    /// Gives the page its metadata.
    pub fn metadata(self, metadata: Metadata) -> Self {
        if let Some(BatchStep::Create { metadata: own, .. }) = self.batch.created(self.step) {
            *own = metadata;
        }
        self
    }

    /// The page, for the calls of this batch that follow.
    #[must_use]
    pub fn page(self) -> NewPage {
        self.page
    }
}
