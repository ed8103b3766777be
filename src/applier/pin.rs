//! Pins: guarantees that a page keeps its address while batches change it.
//!
//! A lease shows one version, so the page moves to other memory when it is changed. In contrast, a pin keeps one
//! address, which always contains the newest version. A crash ends all pins.

use std::sync::Arc;

use remanent_format::{PageId, PageInfo, StoreId};

use crate::applier::descriptor::MemoryDescriptor;
use crate::applier::{Applier, Leases};
use crate::base::process::ForkGuard;
use crate::device::{EngineDevice, Fence, MemoryId, RawStream};
use crate::error::{Error, Result};

/// A guarantee that a page keeps its address, as needed by a captured CUDA graph, or by a framework that holds pointers
/// to weights. Returned by [`Store::pin`](crate::Store::pin).
///
/// Batches that change the page change it in place and need no room for a copy. Operations that would move the page
/// fail with [`Error::Leased`]: resizing, moving and deleting the page, and restoring the store. Taking a
/// [`Lease`](crate::Lease) of the page fails too, because the lease would need another address for its version.
///
/// A batch does not wait for kernels that read the page, and they may see a partly applied batch. Before committing to
/// a pinned page, wait until its readers are done. After [`Pin::on`], readers see every batch submitted before that
/// call. Kernels must not write to the page, because their writes would not be logged.
///
/// ```
/// use remanent::{DeviceChoice, Error, Options, Place};
/// let store = Options::new().device(DeviceChoice::Host).open_temporary()?;
/// let mut batch = store.batch();
/// let page = batch.create(4, Place::Host).page();
/// let page = store.commit(batch)?.pages[0];
///
/// let pin = store.pin(page)?;
/// let address = pin.address();
/// let mut batch = store.batch();
/// batch.write(page, 0, b"here");
/// store.commit(batch)?;
/// assert_eq!(pin.address(), address);
///
/// let mut batch = store.batch();
/// batch.resize(page, 8);
/// assert!(matches!(store.commit(batch), Err(Error::Leased { .. })));
/// # Ok::<(), remanent::Error>(())
/// ```
pub struct Pin<'s> {
    info: PageInfo,
    memory: MemoryId,
    store: PinSource<'s>,
    /// The guard that ends the pin. A forked process has no pins.
    pinned: ForkGuard<PinGuard>,
}

/// The parts of a store from which a pin is created.
pub(crate) struct PinSource<'s> {
    pub applier: &'s Applier,
    pub leases: &'s Arc<Leases>,
    pub device: &'s Arc<EngineDevice>,
    /// The store's id.
    pub id: StoreId,
}

/// A guard that unpins the page on drop.
struct PinGuard {
    page: PageId,
    leases: Arc<Leases>,
}

impl<'s> Pin<'s> {
    /// Creates the handle of a page that was just pinned in the table of leases. On failure, the page is unpinned.
    pub(crate) fn take(store: PinSource<'s>, page: PageId) -> Result<Self> {
        let pinned = ForkGuard::new(PinGuard { page, leases: store.leases.clone() });
        // The closure runs after every batch that could still have moved the page.
        let (info, memory) = store.applier.turn(move |turn| {
            turn.intact()?;
            let info = turn.applied.table.get(page).ok_or(Error::UnknownPage { page })?;
            Ok((info, turn.applied.memory_of(page)?.span().memory))
        })?;
        Ok(Self { info, memory, store, pinned })
    }

    /// Returns the pinned page.
    #[must_use]
    pub fn page(&self) -> PageId {
        self.info.page
    }

    /// Returns the page's length in bytes, which does not change.
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.info.len
    }

    /// Returns the address at which kernels can access the page's bytes. The address is constant for the lifetime of
    /// the pin. Returns `None` if pages are in host memory only, for a page of length 0, and in a forked child.
    #[must_use]
    pub fn address(&self) -> Option<u64> {
        self.pinned.check().ok()?;
        self.store.device.address(self.memory)
    }

    /// Returns a description of the page's memory, for a transport that registers it.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if [`Pin::address`] returns `None`; [`Error::Forked`].
    pub fn descriptor(&self) -> Result<MemoryDescriptor> {
        self.pinned.check()?;
        MemoryDescriptor::of(self.store.device, self.memory, self.store.id, &self.info)
    }

    /// Waits until every batch submitted before this call is applied to the page's memory.
    ///
    /// # Errors
    /// `Poisoned`, `Forked`; a device error.
    #[cfg(feature = "nixl")]
    pub(crate) fn wait_applied(&self) -> Result<()> {
        let ready = self.batches_so_far()?;
        self.store.device.wait(ready)
    }

    /// Returns the fence that passes once every batch submitted before this call is applied.
    fn batches_so_far(&self) -> Result<Fence> {
        self.pinned.check()?;
        self.store.applier.turn(|turn| Ok(turn.submit(Default::default())?.fence()))
    }

    /// Makes `stream` wait on the device for every batch submitted before this call, so that work enqueued on the
    /// stream after this call observes these batches. The host does not wait.
    ///
    /// # Errors
    /// [`Error::Refused`] if a graph is being captured from the stream, if the stream belongs to another device,
    /// or if pages are in host memory; [`Error::Poisoned`] if the device has failed, now or in an earlier batch;
    /// [`Error::Forked`].
    pub fn on(&self, stream: RawStream) -> Result<&Self> {
        let ready = self.batches_so_far()?;
        self.store.leases.signal(stream, ready)?;
        Ok(self)
    }
}

impl Drop for PinGuard {
    fn drop(&mut self) {
        self.leases.unpin(self.page);
    }
}

impl std::fmt::Debug for Pin<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pin").field("page", &self.info.page).finish_non_exhaustive()
    }
}
