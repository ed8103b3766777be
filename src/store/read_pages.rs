//! The trait [`ReadPages`], for code that reads pages of a store, of an earlier state, or of a replica.

use std::sync::Arc;

use remanent_format::{Lsn, Metadata, PageId, PageInfo};

use super::bytes::make_room;
use super::{LiveView, Store};
use crate::error::{Error, Result};
use crate::follower::Replica;
use crate::history::view::View;

/// Read access to pages and the root. The trait is implemented by an open [`Store`], a [`LiveView`], a [`View`] of an
/// earlier state, and a [`Replica`] in memory, so that code that only reads works with any of them.
///
/// ```
/// use remanent::store::ReadPages;
/// use remanent::{Place, Result, Store};
/// fn total(pages: &impl ReadPages) -> Result<u64> {
///     Ok(pages.pages()?.map(|info| info.len).sum())
/// }
///
/// # let directory = tempfile::tempdir().unwrap();
/// # let path = directory.path().join("mystore");
/// let store = Store::open(&path)?;
/// let mut batch = store.batch();
/// batch.create_from(*b"bias", Place::Host).key("bias");
/// store.commit(batch)?;
/// assert_eq!(total(&store)?, 4);
/// assert_eq!(total(&Store::open_read_only(&path)?)?, 4);
/// let view = store.view()?;
/// assert_eq!(ReadPages::read_to_vec(&view, view.page_by_key("bias")?.page)?, b"bias");
/// # Ok::<(), remanent::Error>(())
/// ```
pub trait ReadPages {
    /// Returns the newest visible batch.
    ///
    /// # Errors
    /// [`Error::Forked`](crate::Error::Forked), as for every method of this trait.
    fn lsn(&self) -> Result<Lsn>;

    /// Returns the root, which is the store's own metadata.
    ///
    /// # Errors
    /// Same as [`lsn`](Self::lsn).
    fn root(&self) -> Result<Arc<Metadata>>;

    /// Returns a page's length, version, key and metadata.
    ///
    /// # Errors
    /// [`Error::UnknownPage`](crate::Error::UnknownPage); the errors of [`lsn`](Self::lsn).
    fn page(&self, page: PageId) -> Result<PageInfo>;

    /// Returns the information of the page with key `key`.
    ///
    /// # Errors
    /// [`Error::UnknownKey`](crate::Error::UnknownKey); the errors of [`lsn`](Self::lsn).
    fn page_by_key(&self, key: &[u8]) -> Result<PageInfo>;

    /// Returns an iterator over all pages, in the order of their ids.
    ///
    /// # Errors
    /// Same as [`lsn`](Self::lsn).
    fn pages(&self) -> Result<Box<dyn Iterator<Item = PageInfo> + '_>>;

    /// Returns the number of pages.
    ///
    /// # Errors
    /// Same as [`lsn`](Self::lsn).
    fn page_count(&self) -> Result<u64>;

    /// Fills `out` with the page's bytes starting at `offset`.
    ///
    /// # Errors
    /// [`Error::UnknownPage`](crate::Error::UnknownPage), [`Error::OutOfBounds`](crate::Error::OutOfBounds); the errors
    /// of `read` of the implementing type.
    fn read(&self, page: PageId, offset: u64, out: &mut [u8]) -> Result<()>;

    /// Returns all bytes of a page.
    ///
    /// # Errors
    /// Same as [`read`](Self::read); [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    fn read_to_vec(&self, page: PageId) -> Result<Vec<u8>>;

    /// Returns an iterator over the pages whose keys begin with `prefix`, in the order of their ids. The iterator
    /// examines every page.
    ///
    /// ```
    /// use remanent::store::ReadPages;
    /// use remanent::{Place, Store};
    /// let store = Store::temporary()?;
    /// let mut batch = store.batch();
    /// for key in ["layer.0/w", "layer.1/w", "head"] {
    ///     batch.create(4, Place::Host).key(key);
    /// }
    /// store.commit(batch)?;
    /// assert_eq!(store.pages_with_prefix("layer.")?.count(), 2);
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// Same as [`lsn`](Self::lsn).
    fn pages_with_prefix<'s>(
        &'s self,
        prefix: impl AsRef<[u8]> + 's,
    ) -> Result<impl Iterator<Item = PageInfo> + 's>
    where
        Self: Sized,
    {
        let begins = move |info: &PageInfo| {
            info.key.as_ref().is_some_and(|key| key.as_bytes().starts_with(prefix.as_ref()))
        };
        Ok(self.pages()?.filter(begins))
    }
}

impl ReadPages for Store {
    fn lsn(&self) -> Result<Lsn> {
        self.check_process()?;
        Ok(self.lsn())
    }

    fn root(&self) -> Result<Arc<Metadata>> {
        self.root()
    }

    fn page(&self, page: PageId) -> Result<PageInfo> {
        self.page(page)
    }

    fn page_by_key(&self, key: &[u8]) -> Result<PageInfo> {
        self.page_by_key(key)
    }

    fn pages(&self) -> Result<Box<dyn Iterator<Item = PageInfo> + '_>> {
        Ok(Box::new(self.pages()?))
    }

    fn page_count(&self) -> Result<u64> {
        self.page_count()
    }

    fn read(&self, page: PageId, offset: u64, out: &mut [u8]) -> Result<()> {
        self.read(page, offset, out).map(drop)
    }

    fn read_to_vec(&self, page: PageId) -> Result<Vec<u8>> {
        self.read_to_vec(page)
    }
}

impl ReadPages for LiveView<'_> {
    fn lsn(&self) -> Result<Lsn> {
        self.check_process()?;
        Ok(self.lsn())
    }

    fn root(&self) -> Result<Arc<Metadata>> {
        self.check_process()?;
        Ok(self.root())
    }

    fn page(&self, page: PageId) -> Result<PageInfo> {
        self.page(page)
    }

    fn page_by_key(&self, key: &[u8]) -> Result<PageInfo> {
        self.page_by_key(key)
    }

    fn pages(&self) -> Result<Box<dyn Iterator<Item = PageInfo> + '_>> {
        self.check_process()?;
        Ok(Box::new(self.pages()))
    }

    fn page_count(&self) -> Result<u64> {
        self.check_process()?;
        Ok(self.page_count())
    }

    fn read(&self, page: PageId, offset: u64, out: &mut [u8]) -> Result<()> {
        self.read(page, offset, out)
    }

    fn read_to_vec(&self, page: PageId) -> Result<Vec<u8>> {
        let mut bytes = zeros(self.page(page)?.len)?;
        self.read(page, 0, &mut bytes)?;
        Ok(bytes)
    }
}

impl ReadPages for View {
    fn lsn(&self) -> Result<Lsn> {
        self.past()?;
        Ok(self.lsn())
    }

    fn root(&self) -> Result<Arc<Metadata>> {
        self.past()?;
        Ok(self.root().clone())
    }

    fn page(&self, page: PageId) -> Result<PageInfo> {
        self.page(page)
    }

    fn page_by_key(&self, key: &[u8]) -> Result<PageInfo> {
        self.page_by_key(key)
    }

    fn pages(&self) -> Result<Box<dyn Iterator<Item = PageInfo> + '_>> {
        self.past()?;
        Ok(Box::new(self.pages()))
    }

    fn page_count(&self) -> Result<u64> {
        self.past()?;
        Ok(self.pages().len() as u64)
    }

    fn read(&self, page: PageId, offset: u64, out: &mut [u8]) -> Result<()> {
        self.read(page, offset, out)
    }

    fn read_to_vec(&self, page: PageId) -> Result<Vec<u8>> {
        let mut bytes = zeros(self.page(page)?.len)?;
        self.read(page, 0, &mut bytes)?;
        Ok(bytes)
    }
}

impl ReadPages for Replica {
    fn lsn(&self) -> Result<Lsn> {
        Ok(self.lsn())
    }

    fn root(&self) -> Result<Arc<Metadata>> {
        Ok(self.root().clone())
    }

    fn page(&self, page: PageId) -> Result<PageInfo> {
        self.page(page).ok_or(Error::UnknownPage { page })
    }

    fn page_by_key(&self, key: &[u8]) -> Result<PageInfo> {
        self.page_by_key(key).ok_or_else(|| Error::unknown_key(key))
    }

    fn pages(&self) -> Result<Box<dyn Iterator<Item = PageInfo> + '_>> {
        Ok(Box::new(self.pages()))
    }

    fn page_count(&self) -> Result<u64> {
        Ok(self.pages().len() as u64)
    }

    fn read(&self, page: PageId, offset: u64, out: &mut [u8]) -> Result<()> {
        let info = ReadPages::page(self, page)?;
        let len = out.len() as u64;
        if offset.checked_add(len).is_none_or(|end| end > info.len) {
            return Err(Error::OutOfBounds { page, offset, len, page_len: info.len });
        }
        out.copy_from_slice(&self.bytes(page).unwrap_or_default()[offset as usize..][..out.len()]);
        Ok(())
    }

    fn read_to_vec(&self, page: PageId) -> Result<Vec<u8>> {
        let mut bytes = zeros(ReadPages::page(self, page)?.len)?;
        ReadPages::read(self, page, 0, &mut bytes)?;
        Ok(bytes)
    }
}

fn zeros(len: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    make_room(&mut bytes, len)?;
    Ok(bytes)
}
