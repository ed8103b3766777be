//! Calls for the caller's own kernels: device memory, working copies of pages, and audits of page memory.

use std::sync::Arc;

use remanent_format::{PageId, Place, Width};

use crate::applier::Handover;
use crate::device::{CallerMemory, DeviceBytes};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::history::audit::Audit;
use crate::store::Store;
use crate::write::batch::WorkingCopy;
use crate::write::commit::{InitialCopy, Shadow};

#[cfg(doc)]
use crate::write::batch::WriteBatch;

impl Store {
    /// Allocates `len` bytes of zeroed device memory. Kernels can write to this memory, and batches can read from it.
    ///
    /// The memory counts toward the budget of its place, together with the pages in that place. The memory is freed
    /// when the last handle to it is dropped. By then the caller's kernels must have finished using the memory.
    ///
    /// # Errors
    /// [`Error::OverBudget`], [`Error::OutOfMemory`], [`Error::Unavailable`]; a device error.
    pub fn device_bytes(&self, len: u64, place: Place) -> Result<DeviceBytes> {
        self.of_device(|| self.committer().device_bytes(place, len))
    }

    /// Returns whether the store can order its work with the caller's streams. Returns `false` if all pages are in host
    /// memory. [`DeviceBytes::begin`], [`Lease::on`] and similar calls then return [`Error::Refused`].
    ///
    /// ```
    /// use remanent::{DeviceChoice, Options};
    /// let store = Options::new().device(DeviceChoice::Host).open_temporary()?;
    /// assert!(!store.supports_streams());
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// [`Lease::on`]: crate::Lease::on
    #[must_use]
    pub fn supports_streams(&self) -> bool {
        self.engine().device.abilities().streams.is_some()
    }

    /// Returns a handle to the caller's own memory, from which batches can take bytes. The owner of the memory is kept
    /// alive until the last handle is dropped.
    ///
    /// # Errors
    /// [`Error::Refused`] if pages are in host memory, or if the memory does not match the caller's description; a
    /// device error.
    pub fn caller_bytes(&self, memory: &CallerMemory) -> Result<DeviceBytes> {
        self.of_device(|| self.committer().adopt(memory))
    }

    /// Deletes a page and returns its memory to the caller, in one commit. The memory keeps its contents and its
    /// address, so recovered weights can become a framework's tensors without a copy.
    ///
    /// When this call returns, the delete is durable regardless of [`Ack`](crate::Ack), so a later open does not
    /// restore the page. The store no longer uses the memory, and the work of ended leases on their streams is
    /// complete. The memory counts toward the budget of its place until the last handle to it is dropped. For a page
    /// [created in caller-owned memory](WriteBatch::create_in), the call returns the handle that the page was created
    /// with.
    ///
    /// ```
    /// use remanent::{Error, Options, Place};
    /// # use remanent::DeviceChoice;
    /// # let options = Options::new().device(DeviceChoice::Host);
    /// let store = options.open_temporary()?;
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
    /// These leave the store unchanged: [`Error::UnknownPage`]; [`Error::Leased`] if the page is leased or pinned;
    /// [`Error::Unavailable`] if the page is on disk and has no memory; [`Error::Damaged`] as for [`Store::read`];
    /// the errors of [`Store::commit`]. If the store is poisoned before the memory is returned, the page may or may not
    /// be deleted.
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
            // `take` must be called even if a wait has failed. If the applier stores the memory after this call, it
            // frees the memory itself.
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

    /// Copies a page to new memory in the same place, for kernels to modify. [`WriteBatch::capture`] adds the kernels'
    /// changes to a batch.
    ///
    /// `width` is the width of the page's elements, and must divide the page's length. An element always changes as a
    /// whole.
    ///
    /// # Errors
    /// [`Error::UnknownPage`]; [`Error::Refused`] if the page is not a whole number of elements; [`Error::OverBudget`],
    /// [`Error::OutOfMemory`]; [`Error::Unavailable`] for a page on disk, which needs memory from the caller
    /// ([`Store::working_copy_in`]); a device error.
    pub fn working_copy(&self, page: PageId, width: Width, shadow: Shadow) -> Result<WorkingCopy> {
        let info = self.page(page)?;
        let memory = self.device_bytes(info.len, info.place)?;
        self.working_copy_in(page, &memory, width, shadow, InitialCopy::Load)
    }

    /// Turns existing memory, such as a tensor or a cache, into a working copy of a page. The memory must have the same
    /// length as the page.
    ///
    /// `initial_copy` states the direction of the first copy: from the page to the memory now, or from the memory to
    /// the page at the next capture. An explicit direction prevents a newly allocated tensor from overwriting a
    /// recovered page by accident.
    ///
    /// ```
    /// use remanent::batch::{InitialCopy, Shadow, Width};
    /// use remanent::{Options, Place};
    /// # use remanent::DeviceChoice;
    /// # let options = Options::new().device(DeviceChoice::Host);
    /// let store = options.open_temporary()?;
    /// let mut batch = store.batch();
    /// batch.create_from(b"recovered".to_vec(), Place::Device(0));
    /// let page = store.commit(batch)?.pages[0];
    ///
    /// let tensor = store.device_bytes(9, Place::Device(0))?;
    /// store.working_copy_in(page, &tensor, Width::W1, Shadow::Page, InitialCopy::Load)?;
    /// let mut bytes = [0; 9];
    /// tensor.read(0, &mut bytes)?;
    /// assert_eq!(&bytes, b"recovered");
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::UnknownPage`]; [`Error::Refused`] if the memory has a different length than the page, is not a
    /// whole number of elements, or is not aligned to them; [`Error::OverBudget`] and [`Error::OutOfMemory`] for the
    /// shadow; for a page on disk, [`Error::Unavailable`] with [`Shadow::Page`] and [`Error::Damaged`] as for
    /// [`Store::read`]; a device error.
    pub fn working_copy_in(
        &self,
        page: PageId,
        memory: &DeviceBytes,
        width: Width,
        shadow: Shadow,
        initial_copy: InitialCopy,
    ) -> Result<WorkingCopy> {
        self.of_device(|| self.committer().working_copy(page, memory.clone(), width, shadow, initial_copy))
    }

    /// Reloads a working copy from its page and discards the copy's contents. Use this after a conflict, or to drop
    /// changes that were not captured.
    ///
    /// # Errors
    /// [`Error::UnknownPage`]; [`Error::Refused`] if the page's length has changed; [`Error::Damaged`] for a page
    /// on disk, as for [`Store::read`]; a device error.
    pub fn reload(&self, copy: &WorkingCopy) -> Result<()> {
        self.of_device(|| self.committer().load(copy, InitialCopy::Load))
    }

    /// Compares page memory with the committed batches, and returns the pages that were modified without a batch, for
    /// example by a kernel that wrote to a leased address or past the end of its own memory.
    ///
    /// The device computes a checksum of each page, in steps that run between two batches. The audit compares these
    /// checksums with those that the newest snapshot and the log imply. If a snapshot contains the current version of a
    /// page, its check costs only the checksum. All other pages are rebuilt on the host, one at a time. A CRC-32 misses
    /// one change in four billion.
    ///
    /// A snapshot writes the current memory of every page that batches changed since the previous snapshot. A stray
    /// write to such a page is therefore detected only by an audit before that snapshot. To repair a reported page,
    /// reopen the store or commit a batch that overwrites the whole page.
    ///
    /// An audit waits for a snapshot in progress. The audit needs the memory of an open store, so no external tool can
    /// run it.
    ///
    /// ```
    /// use remanent::{Options, Place};
    /// # use remanent::DeviceChoice;
    /// # let options = Options::new().device(DeviceChoice::Host);
    /// let store = options.open_temporary()?;
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
    /// [`Error::Damaged`] if the data on disk from which a page is rebuilt is damaged; [`Error::OutOfMemory`] if the
    /// host has no memory for one page; a device error.
    pub fn audit(&self) -> Result<Audit> {
        self.of_device(|| self.auditor().run())
    }

    /// Runs `call`. If `call` returns a device error, poisons the store.
    pub(super) fn of_device<T>(&self, call: impl FnOnce() -> Result<T>) -> Result<T> {
        self.check_process()?;
        self.in_store(call().map_err(|error| self.engine().poison.set_by_device(error)))
    }
}
