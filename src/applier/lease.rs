//! A lease: the right to read a page where it lies, for a while.
//!
//! A lease shows the page as it was after one batch. Later batches do not wait for the lease, and it does not
//! see them: the page moves to other memory when the first of them changes it. A crash ends all leases.

use std::marker::PhantomData;
use std::sync::{Arc, OnceLock};

use remanent_format::{Epoch, Lsn, PageId, PageInfo, Place, StoreId};

use crate::applier::descriptor::MemoryDescriptor;
use crate::applier::{Applier, LeaseId, Leases};
use crate::base::process::Process;
use crate::base::sync::Mutex;
use crate::device::{Device, Fence, MemoryId, PageBytes, RawStream};
use crate::error::{Error, Result};

/// The right to read a page where it lies: at an address on the device, or as a slice of host memory.
///
/// The bytes stay what they were when the lease began. Batches that change the page meanwhile are committed
/// as ever. The first of them moves the page to other memory, and the budget must have room for that. From
/// then on the lease's address is that of an older version: compare [`Lease::epoch`] with that of
/// [`Store::page`].
///
/// A lease belongs to the value that holds it, not to a thread. Tasks that share a worker thread lease and
/// commit as they would on threads of their own, and the holder itself may change the page.
///
/// Kernels that read the page run on streams of the caller's that were named to [`Lease::on`]. They never
/// write to it: their writes would not be logged. The lease ends when it is dropped. Work that is on those
/// streams by then may still read the page.
///
/// ```
/// use remanent::{DeviceChoice, Options, Place, Store};
/// let store = Store::temporary(Options::default().device(DeviceChoice::Host))?;
/// let mut batch = store.batch();
/// let page = batch.create(4, Place::Host).page();
/// batch.write(page, 0, b"then");
/// let page = store.commit(batch)?.pages[0];
///
/// let lease = store.lease(page)?;
/// assert_eq!(lease.bytes()?, b"then");
/// let mut batch = store.batch();
/// batch.write(page, 0, b"now!");
/// store.commit(batch)?;
/// assert_eq!(lease.bytes()?, b"then");
/// assert!(lease.epoch() < store.page(page)?.epoch);
/// # Ok::<(), remanent::Error>(())
/// ```
///
/// [`Store::page`]: crate::Store::page
pub struct Lease<'s> {
    info: PageInfo,
    lsn: Lsn,
    id: LeaseId,
    memory: MemoryId,
    /// The page is what the lease shows once this fence has passed.
    ready: Fence,
    streams: Mutex<Vec<RawStream>>,
    bytes: OnceLock<Option<PageBytes>>,
    /// Whether the lease has ended.
    is_over: bool,
    opener: Process,
    store: StoreId,
    leases: Arc<Leases>,
    device: Arc<dyn Device>,
    /// Keeps the store open as long as the lease.
    _store: PhantomData<&'s ()>,
}

impl<'s> Lease<'s> {
    /// Leases a page as it is after every batch handed to the applier so far. The lease has begun already.
    pub(crate) fn take(
        applier: &Applier,
        leases: &Arc<Leases>,
        device: &Arc<dyn Device>,
        store: StoreId,
        page: PageId,
        id: LeaseId,
    ) -> Result<Self> {
        let named = leases.clone();
        let taken = applier.turn(move |turn| {
            let info = turn.applied.table.get(page).ok_or(Error::UnknownPage { page })?;
            let ready = turn.submit(Default::default())?.fence();
            let memory = turn.applied.memory_of(page)?.span().memory;
            named.name(page, id, memory);
            Ok((info, turn.applied.point.lsn, memory, ready))
        });
        let (info, lsn, memory, ready) = taken.inspect_err(|_| leases.cancel(page, id))?;
        Ok(Self {
            info,
            lsn,
            id,
            memory,
            ready,
            streams: Mutex::default(),
            bytes: OnceLock::new(),
            is_over: false,
            opener: Process::current(),
            store,
            leases: leases.clone(),
            device: device.clone(),
            _store: PhantomData,
        })
    }

    /// The page as it was when the lease began: length, metadata, place.
    #[must_use]
    pub fn info(&self) -> &PageInfo {
        &self.info
    }

    /// The version of the page that is leased.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.info.epoch
    }

    /// The newest batch whose changes the page's bytes include.
    #[must_use]
    pub fn lsn(&self) -> Lsn {
        self.lsn
    }

    /// The page's length in bytes.
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.info.len
    }

    /// The address at which kernels find the page's bytes, once a stream was named to [`Lease::on`]. It stays
    /// the same as long as the lease. `None` where pages live in memory of the host alone, for a page of
    /// length 0, and in a forked child.
    #[must_use]
    pub fn address(&self) -> Option<u64> {
        self.opener.check().ok()?;
        self.device.address(self.memory)
    }

    /// Describes the page's memory, for a transport that registers it. Waits until batches that are under way
    /// are applied: the transport knows no stream.
    ///
    /// # Errors
    /// [`Error::PlaceUnavailable`] where [`Lease::address`] has none; [`Error::Forked`]; a device error.
    pub fn descriptor(&self) -> Result<MemoryDescriptor> {
        self.opener.check()?;
        self.device.wait(self.ready)?;
        MemoryDescriptor::of(&*self.device, self.memory, self.store, &self.info)
    }

    /// Lets work that is put on the caller's stream from now on read the page. The stream waits on the device
    /// for batches that are still under way; the host does not wait. May be called for several streams.
    ///
    /// # Errors
    /// [`Error::StreamRefused`] if a graph is being captured from the stream, if it is another device's, or
    /// if pages live in host memory; [`Error::Forked`]; a device error.
    pub fn on(&self, stream: RawStream) -> Result<&Self> {
        self.opener.check()?;
        let mut streams = self.streams.lock();
        self.leases.signal(stream, self.ready)?;
        if !streams.contains(&stream) {
            streams.push(stream);
        }
        Ok(self)
    }

    /// The page's bytes, where they lie. Waits until batches that are under way are applied.
    ///
    /// There is no slice where pages are on a GPU, in whatever place: Rust cannot vouch for a slice that a
    /// GPU's kernels may write to. The bytes of a page in host memory, pinned or managed, are at the lease's
    /// address for the host as for the GPU, and stay what they are. A caller that vouches for its own kernels
    /// reads them there once this method has waited.
    ///
    /// # Errors
    /// [`Error::PlaceUnavailable`] if there is no such slice; [`Error::Forked`]; a device error.
    pub fn bytes(&self) -> Result<&[u8]> {
        self.opener.check()?;
        self.device.wait(self.ready)?;
        match self.bytes.get_or_init(|| self.device.bytes(self.memory)) {
            Some(bytes) => Ok((**bytes).as_ref()),
            None => {
                let reason = match self.info.place {
                    Place::Device(_) => "its bytes are a GPU's: use the lease's address, or `Store::read`",
                    _ => {
                        "a GPU's kernels reach its bytes too, so there is no slice of them: read at the \
                         lease's address, which is the host's as well, or use `Store::read`"
                    }
                };
                Err(Error::PlaceUnavailable { place: self.info.place, reason })
            }
        }
    }

    /// Ends the lease, as dropping it does, and reports whether that went well.
    ///
    /// # Errors
    /// [`Error::StreamRefused`] if a graph is being captured from one of its streams now; a device error. The
    /// page's memory then stays leased until the store is closed. [`Error::Forked`]: the parent's lease goes
    /// on.
    pub fn end(mut self) -> Result<()> {
        self.opener.check()?;
        self.end_now()
    }

    fn end_now(&mut self) -> Result<()> {
        // A lease that is dropped in a forked child is still the parent's.
        if std::mem::replace(&mut self.is_over, true) || !self.opener.is_current() {
            return Ok(());
        }
        self.leases.end(self.info.page, self.id, self.streams.get_mut())
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.end_now() {
            tracing::warn!(%error, page = %self.info.page, "the page's memory stays leased");
        }
    }
}

impl std::fmt::Debug for Lease<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lease").field("page", &self.info.page).field("lsn", &self.lsn).finish_non_exhaustive()
    }
}
