//! Leases: temporary rights to read a page directly from its memory.
//!
//! A lease shows the page after one batch. Later batches neither wait for the lease nor affect its contents, because
//! the page moves to other memory when the first of them changes it. A crash ends all leases.

use std::marker::PhantomData;
use std::sync::{Arc, OnceLock};

use remanent_format::{Epoch, Lsn, PageId, PageInfo, Place, StoreId};

use crate::applier::descriptor::MemoryDescriptor;
use crate::applier::{Applier, LeaseId, Leases};
use crate::base::process::Process;
use crate::base::sync::Mutex;
use crate::device::{EngineDevice, Fence, MemoryId, PageBytes, RawStream};
use crate::error::{Error, Result, Unavailable};

/// The right to read a page directly from its memory, at an address on the device or as a slice of host memory.
/// Returned by [`Store::lease`].
///
/// The bytes do not change while the lease is held. Batches that change the page still commit, and the first of them
/// moves the page to other memory, for which the budget must have room. From then on, the lease's address contains an
/// old version. To detect this, compare [`Lease::epoch`] with the epoch of [`Store::page`].
///
/// A lease belongs to the value that holds it and not to a thread. Tasks that share a worker thread can lease and
/// commit independently, and the holder of a lease may itself change the page.
///
/// Kernels that read the page must run on streams that were passed to [`Lease::on`]. Such kernels must not write to the
/// page, because their writes would not be logged. The lease ends when it is dropped, but work that is already on those
/// streams may still read the page.
///
/// ```
/// use remanent::{DeviceChoice, Options, Place};
/// let store = Options::new().device(DeviceChoice::Host).open_temporary()?;
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
/// [`Store::lease`]: crate::Store::lease
/// [`Store::page`]: crate::Store::page
pub struct Lease<'s> {
    info: PageInfo,
    lsn: Lsn,
    id: LeaseId,
    memory: MemoryId,
    /// A fence that passes when the memory contains the leased version of the page.
    ready: Fence,
    streams: Mutex<Vec<RawStream>>,
    bytes: OnceLock<Option<PageBytes>>,
    /// Whether the lease has ended.
    is_over: bool,
    opener: Process,
    store: StoreId,
    leases: Arc<Leases>,
    device: Arc<EngineDevice>,
    /// Binds the lifetime of the lease to that of the store.
    _store: PhantomData<&'s ()>,
}

impl<'s> Lease<'s> {
    /// Leases a page in its state after every batch passed to the applier so far. `id` is the lease's entry in
    /// [`Leases`], which must have been added before.
    pub(crate) fn take(
        applier: &Applier,
        leases: &Arc<Leases>,
        device: &Arc<EngineDevice>,
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

    /// Returns the page's information at the start of the lease.
    #[must_use]
    pub fn info(&self) -> &PageInfo {
        &self.info
    }

    /// Returns the leased version of the page.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.info.epoch
    }

    /// Returns the newest batch that the leased bytes reflect.
    #[must_use]
    pub fn lsn(&self) -> Lsn {
        self.lsn
    }

    /// Returns the page's length in bytes.
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.info.len
    }

    /// Returns the address at which kernels can read the page's bytes, after their stream was passed to [`Lease::on`].
    /// The address is constant for the lifetime of the lease. Returns `None` if pages are in host memory only, for a
    /// page of length 0, and in a forked child.
    #[must_use]
    pub fn address(&self) -> Option<u64> {
        self.opener.check().ok()?;
        self.device.address(self.memory)
    }

    /// Returns a description of the page's memory, for a transport that registers it. The call waits until batches in
    /// flight are applied, because the transport uses no stream.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if [`Lease::address`] returns `None`; [`Error::Forked`]; a device error.
    pub fn descriptor(&self) -> Result<MemoryDescriptor> {
        self.opener.check()?;
        self.device.wait(self.ready)?;
        MemoryDescriptor::of(&self.device, self.memory, self.store, &self.info)
    }

    /// Permits work that is enqueued on `stream` after this call to read the page. The stream waits on the device for
    /// batches in flight, and the host does not wait. Several streams may be passed in separate calls.
    ///
    /// # Errors
    /// [`Error::Refused`] if a graph is being captured from the stream, if the stream belongs to another device,
    /// or if pages are in host memory; [`Error::Forked`]; a device error.
    pub fn on(&self, stream: RawStream) -> Result<&Self> {
        self.opener.check()?;
        let mut streams = self.streams.lock();
        self.leases.signal(stream, self.ready)?;
        if !streams.contains(&stream) {
            streams.push(stream);
        }
        Ok(self)
    }

    /// Waits until batches in flight are applied, and returns the page's bytes without a copy.
    ///
    /// A store on a GPU returns no slice for any place, because Rust cannot guarantee a slice that the GPU's kernels
    /// may write to. The bytes of a page in pinned or unified memory are then at [`Lease::address`], for the host and
    /// the GPU alike, and do not change. A caller that can guarantee the behavior of its own kernels may read them
    /// there after this method has waited.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if there is no such slice; [`Error::Forked`]; a device error.
    pub fn bytes(&self) -> Result<&[u8]> {
        self.opener.check()?;
        self.device.wait(self.ready)?;
        match self.bytes.get_or_init(|| self.device.abilities().bytes?.bytes(self.memory)) {
            Some(bytes) => Ok((**bytes).as_ref()),
            None => {
                let reason = match self.info.place {
                    Place::Device(_) => "its bytes are a GPU's: use the lease's address, or `Store::read`",
                    _ => {
                        "a GPU's kernels reach its bytes too, so there is no slice of them: read at the \
                         lease's address, which is the host's as well, or use `Store::read`"
                    }
                };
                Err(Error::Unavailable(Unavailable::Place { place: self.info.place, reason }))
            }
        }
    }

    /// Ends the lease like a drop, but returns errors.
    ///
    /// # Errors
    /// [`Error::Refused`] if a graph is being captured from one of the lease's streams; a device error. In both cases
    /// the page's memory stays leased until the store is closed. [`Error::Forked`] in a forked child, in which case the
    /// parent's lease continues.
    pub fn end(mut self) -> Result<()> {
        self.opener.check()?;
        self.end_now()
    }

    fn end_now(&mut self) -> Result<()> {
        // A lease that is dropped in a forked child still belongs to the parent.
        if std::mem::replace(&mut self.is_over, true) || !self.opener.is_current() {
            return Ok(());
        }
        self.leases.end(self.info.page, self.id, self.streams.get_mut())
    }
}

#[cfg(feature = "nccl")]
impl crate::device::sealed::Source for Lease<'_> {
    fn begin_source(&self, stream: RawStream) -> Result<crate::device::SourceUse> {
        self.on(stream)?;
        let gpu = self.device.gpu_with(self.memory);
        Ok(crate::device::SourceUse { address: self.address(), len: self.info.len, gpu, guard: None })
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
