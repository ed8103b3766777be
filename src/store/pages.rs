//! Floor 7. Reading pages: what is in them, and what is known of them.

use std::sync::Arc;

use remanent_format::{Key, Lsn, Metadata, PageId, PageInfo};

use super::{Parts, Store};
use crate::error::{Error, Result};
use crate::lease::Lease;
use crate::pin::{Pin, Pinning};

#[cfg(doc)]
use crate::options::Restore;

/// Pages that are yet to be loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Cold {
    /// How many there are.
    pub pages: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl Store {
    /// Fills `out` with the page's bytes from `offset` on, as of the batch returned: the newest one
    /// submitted before the call, or a later one. It is logged, but perhaps not yet durable.
    ///
    /// More than 64 KiB of a GPU's memory are copied aside there first, so that commits go on while the bytes come
    /// to the host. Where the budget has no room for that, where so many reads are under way that they have copied
    /// 1 GiB, or where this one alone is longer, deltas are applied when the read is done.
    ///
    /// # Errors
    /// [`Error::UnknownPage`], [`Error::OutOfBounds`]; [`Error::Damaged`] if the page was cold
    /// ([`Restore::OnDemand`]) and its image does not hold; [`Error::Poisoned`] if the device failed, now or
    /// with a batch before. A store that is poisoned by its disk goes on being read.
    pub fn read(&self, page: PageId, offset: u64, out: &mut [u8]) -> Result<Lsn> {
        self.check_process()?;
        let len = out.len() as u64;
        let Parts { applier, device, staging, poison, .. } = &*self.parts;
        let read = applier.read(&**device, staging, page, len, move |_| (offset, len));
        let (_, lsn, bytes) = read.map_err(|error| poison.set_by_device(error))?;
        out.copy_from_slice(&bytes);
        staging.give(bytes.into_staging());
        Ok(lsn)
    }

    /// Leases a page: its bytes are read where they lie, as they are behind the newest batch submitted before
    /// the call, or a later one. Batches that change the page go on; each needs room for a copy of it, in the
    /// budget of its place.
    ///
    /// # Errors
    /// [`Error::UnknownPage`]; [`Error::Leased`] if the page is pinned; [`Error::Damaged`] as for [`Store::read`];
    /// [`Error::Poisoned`] if the device failed, now or with a batch before.
    pub fn lease(&self, page: PageId) -> Result<Lease<'_>> {
        self.check_process()?;
        let Parts { committer, applier, leases, device, poison, .. } = &*self.parts;
        applier.cold().wait([page])?;
        let id = {
            let _every_later_batch_knows = committer.lock();
            leases.begin(page)?
        };
        Lease::take(applier, leases, device, page, id).map_err(|error| poison.set_by_device(error))
    }

    /// Pins a page: as long as the pin, it keeps its address, and batches change it there.
    ///
    /// # Errors
    /// [`Error::UnknownPage`]; [`Error::Leased`] while the page is leased, or work on a lease's streams may still
    /// read it; [`Error::Damaged`] as for [`Store::read`]; [`Error::Poisoned`] if the device failed, now or with a
    /// batch before.
    pub fn pin(&self, page: PageId) -> Result<Pin<'_>> {
        self.check_process()?;
        let Parts { committer, applier, leases, device, poison, .. } = &*self.parts;
        applier.cold().wait([page])?;
        {
            let _every_later_batch_knows = committer.lock();
            leases.pin(page)?;
        }
        Pin::take(Pinning { applier, leases, device }, page).map_err(|error| poison.set_by_device(error))
    }

    /// How many pages are yet to be loaded: none, unless the store was opened with [`Restore::OnDemand`]. One that
    /// cannot be loaded is not counted. None in a forked child.
    #[must_use]
    pub fn cold(&self) -> Cold {
        if self.check_process().is_err() {
            return Cold::default();
        }
        let (pages, bytes) = self.parts.applier.cold().left();
        Cold { pages, bytes }
    }

    /// Waits until all pages are loaded.
    ///
    /// # Errors
    /// [`Error::Damaged`] if one of them cannot be, once all others are; [`Error::Poisoned`] if loading stopped.
    pub fn wait_warm(&self) -> Result<()> {
        self.check_process()?;
        self.parts.applier.cold().wait_all()
    }

    /// A page's length, version, key and metadata.
    ///
    /// # Errors
    /// [`Error::UnknownPage`].
    pub fn page(&self, page: PageId) -> Result<PageInfo> {
        self.look(move |table| table.get(page).ok_or(Error::UnknownPage { page }))
    }

    /// The page that has this key.
    ///
    /// # Errors
    /// [`Error::UnknownKey`].
    pub fn page_by_key(&self, key: &Key) -> Result<PageInfo> {
        let key = key.clone();
        self.look(move |table| table.get_key(&key).ok_or(Error::UnknownKey { key }))
    }

    /// All pages, in the order of their ids.
    ///
    /// # Errors
    /// [`Error::Closed`], [`Error::Forked`].
    pub fn pages(&self) -> Result<Vec<PageInfo>> {
        self.look(|table| Ok(table.pages().collect()))
    }

    /// The root: the store's own metadata.
    ///
    /// # Errors
    /// [`Error::Closed`], [`Error::Forked`].
    pub fn root(&self) -> Result<Arc<Metadata>> {
        self.look(|table| Ok(table.root().clone()))
    }
}
