//! A pin: the promise that a page stays where it is, while batches go on changing it.
//!
//! A lease shows one version, and so the page moves when it is changed. A pin is the reverse: one address,
//! which always holds the newest version. A crash ends all pins.

use std::sync::Arc;

use remanent_format::{PageId, PageInfo, StoreId};

use crate::applier::descriptor::MemoryDescriptor;
use crate::applier::{Applier, Leases};
use crate::base::process::ForkGuard;
use crate::device::{Device, MemoryId, RawStream};
use crate::error::{Error, Result};

/// The promise that a page keeps its address. A captured CUDA graph needs it, and so does a framework that
/// holds pointers to weights.
///
/// Batches that change the page change it there, without room for a copy. An operation that would take the
/// page elsewhere is refused with [`Error::Leased`]: resizing, moving and deleting it, restoring the store,
/// and a [`Lease`](crate::Lease) of it, because the lease would need another address for the version that it
/// shows.
///
/// A batch does not wait for kernels that read the page, and they may see parts of it: a caller that commits
/// to a pinned page lets its readers finish before. Readers see the batches submitted before a call of
/// [`Pin::on`]. They must not write: their writes would not be logged.
///
/// ```
/// use remanent::{DeviceChoice, Error, Options, Place, Store};
/// let store = Store::temporary(Options::default().device(DeviceChoice::Host))?;
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
    /// The pin itself. A process that was forked from this one has no pins.
    pinned: ForkGuard<PinGuard>,
}

/// The parts of a store that pins are made with.
pub(crate) struct PinSource<'s> {
    pub applier: &'s Applier,
    pub leases: &'s Arc<Leases>,
    pub device: &'s Arc<dyn Device>,
    /// The store's id.
    pub id: StoreId,
}

/// Ends its pin when it is dropped.
struct PinGuard {
    page: PageId,
    leases: Arc<Leases>,
}

impl<'s> Pin<'s> {
    /// Takes a page that was pinned just now. It is unpinned if this fails.
    pub(crate) fn take(store: PinSource<'s>, page: PageId) -> Result<Self> {
        let pinned = ForkGuard::new(PinGuard { page, leases: store.leases.clone() });
        // A turn comes after every batch that could still have moved the page.
        let (info, memory) = store.applier.turn(move |turn| {
            turn.intact()?;
            let info = turn.applied.table.get(page).ok_or(Error::UnknownPage { page })?;
            Ok((info, turn.applied.memory_of(page)?.span().memory))
        })?;
        Ok(Self { info, memory, store, pinned })
    }

    /// The page that is pinned.
    #[must_use]
    pub fn page(&self) -> PageId {
        self.info.page
    }

    /// The page's length in bytes, which stays the same.
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.info.len
    }

    /// The address at which kernels find the page's bytes. It stays the same as long as the pin. `None` where
    /// pages live in memory of the host alone, for a page of length 0, and in a forked child.
    #[must_use]
    pub fn address(&self) -> Option<u64> {
        self.pinned.check().ok()?;
        self.store.device.address(self.memory)
    }

    /// Describes the page's memory, for a transport that registers it.
    ///
    /// # Errors
    /// [`Error::PlaceUnavailable`] where [`Pin::address`] has none; [`Error::Forked`].
    pub fn descriptor(&self) -> Result<MemoryDescriptor> {
        self.pinned.check()?;
        MemoryDescriptor::of(&**self.store.device, self.memory, self.store.id, &self.info)
    }

    /// Lets work that is put on the caller's stream from now on see every batch submitted before the call.
    /// The stream waits on the device for batches that are still under way; the host does not wait.
    ///
    /// # Errors
    /// [`Error::StreamRefused`] if a graph is being captured from the stream, if it is another device's, or
    /// if pages live in host memory; [`Error::Poisoned`] if the device failed, now or with a batch before;
    /// [`Error::Forked`].
    pub fn on(&self, stream: RawStream) -> Result<&Self> {
        self.pinned.check()?;
        let ready = self.store.applier.turn(|turn| Ok(turn.submit(Default::default())?.fence()))?;
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
