//! Lookups, leases and pins of pages.

use std::sync::Arc;

use remanent_format::{Metadata, PageId, PageInfo, Place};

use super::{Pages, Store};
use crate::applier::lease::Lease;
use crate::applier::pin::{Pin, PinSource};
use crate::engine::Engine;
use crate::error::{Error, Result, Unavailable};

#[cfg(doc)]
use crate::options::PageLoad;

/// The maximum number of times that one call moves a page from disk to memory, if the page is evicted each time.
const PROMOTE_ATTEMPTS: usize = 8;

/// The number and size of the pages that are not loaded yet, returned by [`Store::unloaded_pages`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct UnloadedPages {
    /// The number of pages that are not loaded.
    pub pages: u64,
    /// The total length of the pages that are not loaded, in bytes.
    pub bytes: u64,
}

impl Store {
    /// Leases a page, so that its bytes can be read directly from page memory. The lease shows the page after the
    /// newest batch submitted before this call, or after a later batch.
    ///
    /// Batches may still change a leased page. Each such batch needs room for a copy of the page in the budget of its
    /// place.
    ///
    /// A page on disk has no address. With [`Tiers`](crate::tiers::Tiers), it is first moved to the first tier in
    /// memory, like [`Store::ensure`] does, and remains there until the lease ends.
    ///
    /// ```
    /// use remanent::options::MemoryOptions;
    /// use remanent::tiers::Tiers;
    /// use remanent::{DeviceChoice, Options, Place};
    /// let store = Options::new()
    ///     .device(DeviceChoice::Host)
    ///     .memory(MemoryOptions::new().budget(Place::Host, 1 << 20))
    ///     .tiers(Tiers::new([Place::Host, Place::Disk]))
    ///     .open_temporary()?;
    /// let mut batch = store.batch();
    /// batch.create_from(b"cold".to_vec(), Place::Disk);
    /// let page = store.commit(batch)?.pages[0];
    /// assert_eq!(store.lease(page)?.bytes()?, b"cold");
    /// assert_eq!(store.page(page)?.place, Place::Host);
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::UnknownPage`]; [`Error::Unavailable`] if the page is on disk and the store has no tiers;
    /// [`Error::Leased`] if the page is pinned; [`Error::Damaged`] as for [`Store::read`]; [`Error::Poisoned`] if the
    /// device has failed, now or in an earlier batch; for a page on disk, the errors of [`Store::ensure`].
    pub fn lease(&self, page: PageId) -> Result<Lease<'_>> {
        self.check_process()?;
        self.in_memory(page, || self.take_lease(page))
    }

    fn take_lease(&self, page: PageId) -> Result<Lease<'_>> {
        let Engine { applier, leases, device, versions, poison, store, .. } = self.engine();
        versions.used(page);
        applier.unloaded().wait([page])?;
        let id = {
            let _every_later_batch_knows = self.committer().lock();
            leases.begin(page)?
        };
        Lease::take(applier, leases, device, *store, page, id).map_err(|error| poison.set_by_device(error))
    }

    /// Pins a page. Until the pin is dropped, the page keeps its address, and batches change the page in place. A page
    /// on disk is first moved to memory, like [`Store::lease`] does.
    ///
    /// # Errors
    /// [`Error::UnknownPage`]; [`Error::Unavailable`] if the page is on disk and the store has no tiers;
    /// [`Error::Leased`] if the page is leased, or work on the stream of an ended lease may still read it;
    /// [`Error::Damaged`] as for [`Store::read`]; [`Error::Poisoned`] if the device has failed, now or in an earlier
    /// batch; for a page on disk, the errors of [`Store::ensure`].
    pub fn pin(&self, page: PageId) -> Result<Pin<'_>> {
        self.check_process()?;
        self.in_memory(page, || self.take_pin(page))
    }

    /// Moves the page to memory if it is on disk, and calls `take`. Retries several times, because other calls may
    /// cause the page's eviction before `take` runs.
    fn in_memory<T>(&self, page: PageId, take: impl Fn() -> Result<T>) -> Result<T> {
        let tiers = self.parts.options.tiers.as_ref();
        let memory = tiers.and_then(|tiers| tiers.places().iter().find(|place| **place != Place::Disk));
        for _ in 0..PROMOTE_ATTEMPTS {
            match (take(), memory) {
                (Err(Error::Unavailable(Unavailable::Place { place: Place::Disk, .. })), Some(place)) => {
                    self.in_store(self.parts.mover.move_to_place(&[page], *place))?;
                }
                (taken, _) => return taken,
            }
        }
        take()
    }

    fn take_pin(&self, page: PageId) -> Result<Pin<'_>> {
        let Engine { applier, leases, device, versions, poison, store, .. } = self.engine();
        versions.used(page);
        applier.unloaded().wait([page])?;
        {
            let _every_later_batch_knows = self.committer().lock();
            leases.pin(page)?;
        }
        let source = PinSource { applier, leases, device, id: *store };
        Pin::take(source, page).map_err(|error| poison.set_by_device(error))
    }

    /// Returns the number and size of the pages that are not loaded yet. Pages that cannot be loaded are not counted.
    /// Both values are 0 unless the store was opened with [`PageLoad::OnDemand`], and 0 in a forked child.
    #[must_use]
    pub fn unloaded_pages(&self) -> UnloadedPages {
        if self.check_process().is_err() {
            return UnloadedPages::default();
        }
        let (pages, bytes) = self.engine().applier.unloaded().left();
        UnloadedPages { pages, bytes }
    }

    /// Waits until all pages are loaded.
    ///
    /// # Errors
    /// [`Error::Damaged`] if a page cannot be loaded. The call returns this error after all other pages are loaded.
    /// [`Error::Poisoned`] if loading stopped.
    pub fn wait_loaded(&self) -> Result<()> {
        self.check_process()?;
        self.engine().applier.unloaded().wait_all()
    }

    /// Returns a page's length, version, key and metadata, without waiting for batches in flight or for a sync.
    ///
    /// Like every lookup and read, this call reflects at least every batch that any call, on any thread, had
    /// acknowledged as logged before this call began. A batch that is submitted but not yet logged is not visible. All
    /// changes of a batch become visible at once.
    ///
    /// # Errors
    /// [`Error::UnknownPage`]; [`Error::Forked`].
    pub fn page(&self, page: PageId) -> Result<PageInfo> {
        self.check_process()?;
        let info = self.engine().versions.page(page, |entry| entry.info(page));
        info.ok_or(Error::UnknownPage { page })
    }

    /// Returns the information of the page with key `key`. Never waits, like [`Store::page`].
    ///
    /// # Errors
    /// [`Error::UnknownKey`]; [`Error::Forked`].
    pub fn page_by_key(&self, key: impl AsRef<[u8]>) -> Result<PageInfo> {
        self.check_process()?;
        let key = key.as_ref();
        let info = self.engine().versions.page_by_key(key, |page, entry| entry.info(page));
        info.ok_or_else(|| Error::unknown_key(key))
    }

    /// Returns whether the page exists. Never waits, like [`Store::page`].
    ///
    /// ```
    /// use remanent::{Key, Place, Store};
    /// let store = Store::temporary()?;
    /// let key = Key::new("block/7").unwrap();
    /// let mut batch = store.batch();
    /// batch.create(8, Place::Host).key(key.clone());
    /// let page = store.commit(batch)?.pages[0];
    /// assert!(store.contains(page)? && store.contains_key(&key)?);
    /// assert_eq!(store.page_count()?, 1);
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn contains(&self, page: PageId) -> Result<bool> {
        self.check_process()?;
        Ok(self.engine().versions.page(page, |_| ()).is_some())
    }

    /// Returns whether a page with key `key` exists. Never waits, like [`Store::page`].
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn contains_key(&self, key: impl AsRef<[u8]>) -> Result<bool> {
        self.check_process()?;
        Ok(self.engine().versions.page_by_key(key.as_ref(), |_, _| ()).is_some())
    }

    /// Returns the number of pages. Never waits, like [`Store::page`].
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn page_count(&self) -> Result<u64> {
        self.check_process()?;
        Ok(self.engine().versions.root(|_, page_count| page_count))
    }

    /// Returns an iterator over all pages, in the order of their ids, in their state after the newest logged batch.
    /// Pages are looked up as the iterator advances. Concurrent batches do not affect the result.
    ///
    /// ```
    /// use remanent::{Place, Store};
    /// let store = Store::temporary()?;
    /// let mut batch = store.batch();
    /// batch.create(4, Place::Host);
    /// batch.create(8, Place::Host);
    /// store.commit(batch)?;
    /// let lens: Vec<u64> = store.pages()?.map(|info| info.len).collect();
    /// assert_eq!(lens, [4, 8]);
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn pages(&self) -> Result<Pages<'_>> {
        Ok(self.view()?.into_pages())
    }

    /// Returns the root, which is the store's own metadata. Never waits, like [`Store::page`].
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn root(&self) -> Result<Arc<Metadata>> {
        self.check_process()?;
        Ok(self.engine().versions.root(|root, _| root.clone()))
    }
}
