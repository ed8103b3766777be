//! What a store has for kernels: memory, working copies of pages, and a look at what they did.

use std::sync::Arc;

use remanent_format::{PageId, Place, Width};

use crate::applier::Handover;
use crate::device::{CallerMemory, DeviceBytes};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::history::audit::Audit;
use crate::store::Store;
use crate::write::batch::WorkingCopy;
use crate::write::commit::{Direction, Shadow};

#[cfg(doc)]
use crate::write::batch::WriteBatch;

impl Store {
    /// `len` zeros in the memory of the store's device, for kernels to write and for batches to take bytes
    /// from. They count in the budget of their place, beside pages, and are given back with the last handle
    /// to them; the caller's kernels must be done by then.
    ///
    /// # Errors
    /// [`Error::OverBudget`], [`Error::OutOfMemory`], [`Error::PlaceUnavailable`]; a device error.
    pub fn device_bytes(&self, len: u64, place: Place) -> Result<DeviceBytes> {
        self.of_device(|| self.committer().device_bytes(place, len))
    }

    /// Whether streams of the caller's can be waited for and told to wait: not where pages live in memory of
    /// the host alone. There [`DeviceBytes::begin`], [`Lease::on`] and their kin say
    /// [`Error::StreamRefused`], and a caller has no kernels to order.
    ///
    /// ```
    /// use remanent::{DeviceChoice, Options, Store};
    /// let store = Store::temporary(Options::default().device(DeviceChoice::Host))?;
    /// assert!(!store.supports_streams());
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// [`Lease::on`]: crate::Lease::on
    #[must_use]
    pub fn supports_streams(&self) -> bool {
        self.engine().device.supports_streams()
    }

    /// The memory of the caller's own, for batches to take bytes from. Its owner is held until the last
    /// handle is gone.
    ///
    /// # Errors
    /// [`Error::MemoryRefused`] where the device can tell that it is not what the caller says, and where
    /// pages live in host memory; a device error.
    pub fn caller_bytes(&self, memory: &CallerMemory) -> Result<DeviceBytes> {
        self.of_device(|| self.committer().adopt(memory))
    }

    /// Hands a page's memory out, and forgets the page, in one commit: what was a page's is the caller's,
    /// with the bytes that the page had, at the address that it had. So weights that were recovered become a
    /// framework's without a copy of them.
    ///
    /// The delete is durable when this returns, whatever [`Ack`](crate::Ack) says: no later open brings the
    /// page back. Nothing of the store uses the memory any more, and work on the streams of leases that have
    /// ended is done. The memory counts in the budget of its place until the last handle to it is dropped. A
    /// page that [lives in the caller's memory](WriteBatch::create_in) gives back the handle that it was
    /// created with.
    ///
    /// ```
    /// use remanent::{Error, Options, Place, Store};
    /// # use remanent::DeviceChoice;
    /// # let options = Options::default().device(DeviceChoice::Host);
    /// let store = Store::temporary(options)?;
    /// let mut batch = store.batch();
    /// batch.create_from(b"recovered".to_vec(), Place::Device(0));
    /// let page = store.commit(batch)?.pages[0];
    ///
    /// let memory = store.release(page)?;
    /// let mut bytes = [0; 9];
    /// memory.read(0, &mut bytes)?;
    /// assert_eq!(&bytes, b"recovered");
    /// memory.write(0, b"elsewhere")?;
    /// assert!(matches!(store.page(page), Err(Error::UnknownPage { .. })));
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::UnknownPage`]; [`Error::Leased`] if a lease is open on it, or it is pinned;
    /// [`Error::PlaceUnavailable`] if it is on disk, and has no memory;
    /// [`Error::Damaged`] as for [`Store::read`]; as for [`Store::commit`]. Nothing changed then. Where the
    /// store is poisoned before the memory is handed out, the page may be gone, and an open tells whether.
    pub fn release(&self, page: PageId) -> Result<DeviceBytes> {
        self.of_device(|| {
            let Engine { applier, leases, log, device, .. } = self.engine();
            let handover = Arc::new(Handover::new(page));
            let mut batch = self.batch();
            batch.hand_over(handover.clone());
            let (point, _) = self.committer().submit(&batch)?;
            let waited = log.wait_durable(point.lsn).and_then(|()| {
                applier.wait_applied(point.lsn)?;
                leases.wait_ended_of(page)
            });
            // Taken in any case: if it comes later, the applier gives it back.
            let given = handover.take();
            match (waited, given) {
                (Ok(()), Some((memory, fence))) => {
                    device.wait(fence)?;
                    self.committer().hand_out(memory)
                }
                (waited, given) => {
                    given.into_iter().for_each(|(memory, fence)| leases.give_up(memory, fence));
                    Err(waited.err().unwrap_or(Error::Closed))
                }
            }
        })
    }

    /// A copy of a page, for kernels to write, in the page's place. [`WriteBatch::capture`] takes what
    /// changes there to the page.
    ///
    /// `width` is that of the page's elements: an element changes as a whole. It must divide the page's
    /// length.
    ///
    /// # Errors
    /// [`Error::UnknownPage`]; [`Error::MemoryRefused`] if the page is no whole number of elements;
    /// [`Error::OverBudget`], [`Error::OutOfMemory`]; [`Error::PlaceUnavailable`] for a page on disk, whose
    /// copy needs memory of its own: [`Store::working_copy_in`]; a device error.
    pub fn working_copy(&self, page: PageId, width: Width, shadow: Shadow) -> Result<WorkingCopy> {
        let info = self.page(page)?;
        let memory = self.device_bytes(info.len, info.place)?;
        self.working_copy_in(page, &memory, width, shadow, Direction::Load)
    }

    /// Makes memory that is there already a working copy of a page: a tensor's, a cache's. It must be as long
    /// as the page. `direction` says whether it takes the page's bytes now, or the page its bytes with the
    /// next capture: so no fresh tensor overwrites a page that was recovered, unless it is told to.
    ///
    /// ```
    /// use remanent::{Direction, Options, Place, Shadow, Store, Width};
    /// # use remanent::DeviceChoice;
    /// # let options = Options::default().device(DeviceChoice::Host);
    /// let store = Store::temporary(options)?;
    /// let mut batch = store.batch();
    /// batch.create_from(b"recovered".to_vec(), Place::Device(0));
    /// let page = store.commit(batch)?.pages[0];
    ///
    /// let tensor = store.device_bytes(9, Place::Device(0))?;
    /// store.working_copy_in(page, &tensor, Width::W1, Shadow::Page, Direction::Load)?;
    /// let mut bytes = [0; 9];
    /// tensor.read(0, &mut bytes)?;
    /// assert_eq!(&bytes, b"recovered");
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::UnknownPage`]; [`Error::MemoryRefused`] if the memory is not as long as the page, no whole
    /// number of elements, or not on their boundary; for a shadow [`Error::OverBudget`] and
    /// [`Error::OutOfMemory`]; for a page on disk [`Error::PlaceUnavailable`] with [`Shadow::Page`], and
    /// [`Error::Damaged`] as for [`Store::read`]; a device error.
    pub fn working_copy_in(
        &self,
        page: PageId,
        memory: &DeviceBytes,
        width: Width,
        shadow: Shadow,
        direction: Direction,
    ) -> Result<WorkingCopy> {
        self.of_device(|| self.committer().working_copy(page, memory.clone(), width, shadow, direction))
    }

    /// Takes the page's bytes to a working copy again, in place of what it holds: after a conflict, or to
    /// drop what was not captured.
    ///
    /// # Errors
    /// [`Error::UnknownPage`]; [`Error::MemoryRefused`] if the page's length changed; [`Error::Damaged`] for
    /// a page on disk, as for [`Store::read`]; a device error.
    pub fn reload(&self, copy: &WorkingCopy) -> Result<()> {
        self.of_device(|| self.committer().load(copy, Direction::Load))
    }

    /// Looks whether the pages in memory are what the batches made them, and names those that were changed
    /// without one: by a kernel of the caller's that wrote to a lease's address, or past the end of memory of
    /// its own.
    ///
    /// The device sums the pages, between batches, which go on; the sums are compared with those that follow
    /// from the newest snapshot and the log. A page of which a snapshot has exactly the present version costs
    /// nothing but its sum; one that changed since is put together on the host, one at a time. A CRC-32
    /// misses one change in four billion.
    ///
    /// A snapshot writes pages that batches changed since the one before, and takes what it finds in memory
    /// for theirs: what a kernel did to such a page is told by an audit before that snapshot, and never by
    /// one after it. Opening the store anew, or a batch that writes the whole page, mends what an audit
    /// found.
    ///
    /// An audit waits for a snapshot that is being taken. It is about the memory of an open store, so it is
    /// nothing that a tool could do from outside.
    ///
    /// ```
    /// use remanent::{Options, Place, Store};
    /// # use remanent::DeviceChoice;
    /// # let options = Options::default().device(DeviceChoice::Host);
    /// let store = Store::temporary(options)?;
    /// let mut batch = store.batch();
    /// let page = batch.create(4096, Place::Device(0)).page();
    /// batch.write(page, 100, b"logged");
    /// store.commit(batch)?;
    ///
    /// let audit = store.audit()?;
    /// assert_eq!((audit.pages, audit.bytes), (1, 4096));
    /// assert!(audit.changed.is_empty(), "{:?}", audit.changed);
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Damaged`] if what a page is made from is damaged on disk; [`Error::OutOfMemory`] if there is
    /// no room on the host for one page; a device error.
    pub fn audit(&self) -> Result<Audit> {
        self.of_device(|| self.auditor().run())
    }

    /// A device's failure concerns the whole store.
    pub(super) fn of_device<T>(&self, call: impl FnOnce() -> Result<T>) -> Result<T> {
        self.check_process()?;
        self.in_store(call().map_err(|error| self.engine().poison.set_by_device(error)))
    }
}
