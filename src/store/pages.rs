//! Reading pages: what is in them, and what is known of them.

use std::sync::Arc;

use remanent_format::{Key, Metadata, PageId, PageInfo, Place};

use super::{Pages, Store};
use crate::applier::lease::Lease;
use crate::applier::pin::{Pin, PinSource};
use crate::engine::Engine;
use crate::error::{Error, Result};

#[cfg(doc)]
use crate::options::PageLoad;

/// How often a page on disk is brought to memory for one call.
const COMING_TRIES: usize = 8;

/// Pages that are yet to be loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct UnloadedPages {
    /// How many there are.
    pub pages: u64,
    /// Bytes of these pages.
    pub bytes: u64,
}

impl Store {
    /// Leases a page: its bytes are read where they lie, as they are after the newest batch submitted before
    /// the call, or a later one. Batches that change the page go on; each needs room for a copy of it, in the
    /// budget of its place.
    ///
    /// A page on disk has no address. Where there are [`Tiers`](crate::Tiers) it comes to the first of them
    /// that is memory, as by [`Store::ensure`], and stays there as long as it is leased.
    ///
    /// ```
    /// use remanent::{Budget, DeviceChoice, Options, Place, Store, Tiers};
    /// let budget = Budget::default().with(Place::Host, 1 << 20);
    /// let tiers = Tiers::new([Place::Host, Place::Disk]);
    /// let options = Options::default().device(DeviceChoice::Host).budget(budget).tiers(tiers);
    /// let store = Store::temporary(options)?;
    /// let mut batch = store.batch();
    /// batch.create_from(b"cold".to_vec(), Place::Disk);
    /// let page = store.commit(batch)?.pages[0];
    /// assert_eq!(store.lease(page)?.bytes()?, b"cold");
    /// assert_eq!(store.page(page)?.place, Place::Host);
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::UnknownPage`]; [`Error::PlaceUnavailable`] if the page is on disk, and there are no tiers;
    /// [`Error::Leased`] if it is pinned; [`Error::Damaged`] as for [`Store::read`]; [`Error::Poisoned`] if
    /// the device failed, now or with a batch before; for a page on disk as for [`Store::ensure`].
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

    /// Pins a page: as long as the pin, it keeps its address, and batches change it there. A page on disk
    /// comes to memory as for [`Store::lease`].
    ///
    /// # Errors
    /// [`Error::UnknownPage`]; [`Error::PlaceUnavailable`] if the page is on disk, and there are no tiers;
    /// [`Error::Leased`] while it is leased, or work on a lease's streams may still read it;
    /// [`Error::Damaged`] as for [`Store::read`]; [`Error::Poisoned`] if the device failed, now or with a
    /// batch before; for a page on disk as for [`Store::ensure`].
    pub fn pin(&self, page: PageId) -> Result<Pin<'_>> {
        self.check_process()?;
        self.in_memory(page, || self.take_pin(page))
    }

    /// Calls `take`, and brings the page to memory first if it is on disk. Meanwhile other pages may need the
    /// room, and it leaves again: so it is tried several times.
    fn in_memory<T>(&self, page: PageId, take: impl Fn() -> Result<T>) -> Result<T> {
        let tiers = self.parts.options.tiers.as_ref();
        let memory = tiers.and_then(|tiers| tiers.places().iter().find(|place| **place != Place::Disk));
        for _ in 0..COMING_TRIES {
            match (take(), memory) {
                (Err(Error::PlaceUnavailable { place: Place::Disk, .. }), Some(place)) => {
                    self.in_store(self.parts.mover.bring(&[page], *place))?;
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

    /// How many pages are yet to be loaded: none, unless the store was opened with [`PageLoad::OnDemand`].
    /// One that cannot be loaded is not counted. None in a forked child.
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
    /// [`Error::Damaged`] if one of them cannot be, once all others are; [`Error::Poisoned`] if loading
    /// stopped.
    pub fn wait_loaded(&self) -> Result<()> {
        self.check_process()?;
        self.engine().applier.unloaded().wait_all()
    }

    /// A page's length, version, key and metadata. Waits for nothing: neither for batches under way nor for a
    /// sync.
    ///
    /// Here as in all lookups and reads, what is seen is at least every batch that any call, of any thread,
    /// was told is logged before this one began. A batch that was submitted and is not logged yet is not
    /// seen; all of a batch is seen from one moment on.
    ///
    /// # Errors
    /// [`Error::UnknownPage`]; [`Error::Forked`].
    pub fn page(&self, page: PageId) -> Result<PageInfo> {
        self.check_process()?;
        let info = self.engine().versions.page(page, |entry| entry.info(page));
        info.ok_or(Error::UnknownPage { page })
    }

    /// The page that has this key. Waits for nothing, as [`Store::page`].
    ///
    /// # Errors
    /// [`Error::UnknownKey`]; [`Error::Forked`].
    pub fn page_by_key(&self, key: &Key) -> Result<PageInfo> {
        self.check_process()?;
        let info = self.engine().versions.page_by_key(key, |page, entry| entry.info(page));
        info.ok_or_else(|| Error::UnknownKey { key: key.clone() })
    }

    /// Whether there is such a page. Waits for nothing, as [`Store::page`].
    ///
    /// ```
    /// use remanent::{Key, Options, Place, Store};
    /// let store = Store::temporary(Options::default())?;
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

    /// Whether a page has this key. Waits for nothing, as [`Store::page`].
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn contains_key(&self, key: &Key) -> Result<bool> {
        self.check_process()?;
        Ok(self.engine().versions.page_by_key(key, |_, _| ()).is_some())
    }

    /// How many pages there are. Waits for nothing, as [`Store::page`].
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn page_count(&self) -> Result<u64> {
        self.check_process()?;
        Ok(self.engine().versions.root(|_, page_count| page_count))
    }

    /// All pages as they are now, in the order of their ids. They are listed as they are asked for: batches
    /// go on meanwhile, and change nothing of what is listed.
    ///
    /// ```
    /// use remanent::{Options, Place, Store};
    /// let store = Store::temporary(Options::default())?;
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

    /// The root: the store's own metadata. Waits for nothing, as [`Store::page`].
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn root(&self) -> Result<Arc<Metadata>> {
        self.check_process()?;
        Ok(self.engine().versions.root(|root, _| root.clone()))
    }
}
