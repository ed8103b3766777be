//! Collective operations over page memory and caller-owned memory, ordered with the store's work and with callers'
//! streams.
//!
//! A [`RankTransport`] moves the bytes. This module checks the arguments of an operation, and holds the guards of its
//! memory while the operation is queued.

use std::fmt;
use std::sync::Arc;

use super::bytes::DeviceBytes;
use super::stream_guard::StreamGuard;
use super::stream_uses::Access;
use super::{RawStream, StreamEvent};
use crate::base::process::ForkGuard;
use crate::error::{Error, NcclError, Refused, Result};
use crate::options::{GatherMode, GatherSource, ImageExchange, MemoryOptions};

/// One rank of a communicator, implemented by a library for collective operations.
pub(crate) trait RankTransport: Send + Sync {
    fn rank(&self) -> u32;

    fn ranks(&self) -> u32;

    /// Returns the ordinal of the rank's GPU among those visible to the process.
    fn gpu(&self) -> u32;

    /// Returns the stream on which operations are queued for callers without their own stream.
    fn stream(&self) -> RawStream;

    /// Queues an operation on a stream, and returns the point of the stream after the operation. The caller keeps both
    /// ranges marked as in use at least until the stream reaches that point.
    ///
    /// # Errors
    /// An NCCL error, after which the communicator has ended; `Refused` if the stream cannot be used.
    fn queue(&self, stream: RawStream, of: &Collective) -> Result<QueuedPoint>;

    /// Waits until the stream has reached the point after an operation.
    ///
    /// # Errors
    /// An NCCL error, after which the communicator has ended; a device error.
    fn wait(&self, point: &QueuedPoint) -> Result<()>;

    /// Returns an error if the communicator has ended, or if the library reports an error.
    ///
    /// # Errors
    /// An NCCL error.
    fn check(&self) -> Result<()>;

    /// Ends the communicator and its operations.
    fn abort(&self);
}

/// The point of a stream after a queued operation.
#[derive(Clone, Debug)]
pub(crate) struct QueuedPoint {
    pub event: StreamEvent,
    /// The library's name for the operation.
    pub call: &'static str,
}

/// A collective operation on ranges of GPU memory, which are given by address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Collective {
    pub kind: CollectiveKind,
    pub source: u64,
    pub target: u64,
    /// The number of elements in the source. For a reduce-scatter, the number of elements in the target.
    pub count: usize,
    pub element: Element,
}

/// The kind of an operation.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CollectiveKind {
    AllReduce(Reduction),
    AllGather,
    Broadcast { root: u32 },
    ReduceScatter(Reduction),
}

/// The type of the elements that an operation reduces or copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Element {
    /// A signed integer of one byte.
    I8,
    /// An unsigned integer of one byte.
    U8,
    /// A signed integer of four bytes.
    I32,
    /// An unsigned integer of four bytes.
    U32,
    /// A signed integer of eight bytes.
    I64,
    /// An unsigned integer of eight bytes.
    U64,
    /// A half-precision float.
    F16,
    /// A single-precision float.
    F32,
    /// A double-precision float.
    F64,
    /// A bfloat16: a float of two bytes with the exponent range of a single-precision float.
    Bf16,
}

impl Element {
    /// Returns the length of an element in bytes.
    #[must_use]
    pub fn byte_len(self) -> u64 {
        match self {
            Self::I8 | Self::U8 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }
}

/// The operation that combines the elements of all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reduction {
    /// The sum; integers wrap around.
    Sum,
    /// The product; integers wrap around.
    Product,
    /// The largest element.
    Max,
    /// The smallest element.
    Min,
    /// The sum divided by the number of ranks.
    Average,
}

/// Memory that a collective operation can read: [`DeviceBytes`], or the page of a [`Lease`](crate::Lease).
pub trait CollectiveSource: sealed::Source {}

impl<S: sealed::Source> CollectiveSource for S {}

pub(crate) mod sealed {
    use crate::device::RawStream;
    use crate::error::Result;

    /// The methods of a source, which only this crate implements.
    pub trait Source {
        /// Begins a use of the memory on a stream. Work that is queued on the stream before the returned use is dropped
        /// runs after all writes to the memory.
        ///
        /// # Errors
        /// `Refused`, `Forked`, a device error.
        fn begin_source(&self, stream: RawStream) -> Result<super::SourceUse>;
    }
}

/// A stream's use of the memory that an operation reads.
#[doc(hidden)]
#[derive(Debug)]
pub struct SourceUse {
    /// The address of the memory, or `None` if kernels cannot reach it.
    pub(crate) address: Option<u64>,
    pub(crate) len: u64,
    /// The ordinal of the GPU whose memory contains the bytes.
    pub(crate) gpu: Option<u32>,
    /// The guard that ends with this value. `None` for a page, because its use ends with the lease.
    pub(crate) guard: Option<StreamGuard>,
}

impl sealed::Source for DeviceBytes {
    fn begin_source(&self, stream: RawStream) -> Result<SourceUse> {
        let guard = self.begin(stream, Access::Read)?;
        Ok(SourceUse { address: self.address(), len: self.byte_len(), gpu: self.gpu(), guard: Some(guard) })
    }
}

/// One rank of a group of GPUs that exchange bytes. [`Nccl::join`](crate::nccl::Nccl::join) creates it.
///
/// All ranks must call the same operations in the same order, with the same numbers of bytes. An operation is queued on
/// a stream and returns a [`QueuedCollective`]. It runs after the work that is queued on the stream, and it is ordered
/// with the store's work on its memory in the same way as any other work of a caller's stream:
///
/// - It reads a page of a [`Lease`](crate::Lease) after all batches that the lease includes, and the page's memory is
///   not reused before it has ended, as for a kernel after [`Lease::on`](crate::Lease::on).
/// - It uses [`DeviceBytes`] like work between [`DeviceBytes::begin`] and the end of the guard: after earlier uses of
///   the bytes, and before later ones, such as a batch that writes the bytes to a page. An operation never writes to a
///   page directly, because the write would not be logged.
///
/// Clones represent the same rank. Several threads may use clones, but must agree on the order of their operations. The
/// communicator ends when its last clone is dropped. The drop waits for queued operations, at most for the time limit
/// of [`Rank::timeout`](crate::nccl::Rank::timeout). The library may free its memory only when the other ranks on the
/// host end their communicators too. The drop waits up to two seconds for that, and then leaves it to a background
/// thread.
///
/// The first operation of a kind connects the ranks. The call that queues it may return only after the other ranks have
/// made the same call, or after the time limit. Several ranks in one process therefore each need their own thread.
///
/// If an operation fails or exceeds the time limit, the communicator is aborted. The targets of queued operations then
/// have unspecified contents, and each later call returns [`NcclError::Aborted`]. The other ranks detect this through
/// their own time limits.
///
/// ```no_run
/// use remanent::nccl::{Element, Nccl, Rank, Reduction, UniqueId};
/// use remanent::{DeviceChoice, Options, Place};
/// # fn receive_id() -> UniqueId { unreachable!() }
/// let communicator = Nccl::load()?.join(&receive_id(), Rank::new(1, 2).gpu(1))?;
/// let store = Options::new().device(DeviceChoice::Cuda(1)).open("replica-1")?;
/// let page = store.page_by_key("weights")?;
///
/// let sum = store.device_bytes(page.len, Place::Device(0))?;
/// let lease = store.lease(page.page)?;
/// communicator.all_reduce(&lease, &sum, Element::F32, Reduction::Average)?;
/// drop(lease);
/// let mut batch = store.batch();
/// batch.write_device(page.page, 0, &sum); // waits for the operation
/// store.commit(batch)?;
/// # Ok::<(), remanent::Error>(())
/// ```
#[derive(Clone)]
pub struct Communicator {
    transport: Arc<ForkGuard<Box<dyn RankTransport>>>,
    stream: RawStream,
}

impl Communicator {
    pub(crate) fn new(transport: impl RankTransport + 'static) -> Self {
        let stream = transport.stream();
        Self { transport: Arc::new(ForkGuard::new(Box::new(transport))), stream }
    }

    /// Returns this rank's number.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.transport.rank()
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.transport.ranks()
    }

    /// Returns the number of the rank's GPU among those visible to the process.
    #[must_use]
    pub fn gpu(&self) -> u32 {
        self.transport.gpu()
    }

    /// Returns the stream on which operations are queued: the communicator's own stream, unless [`on`](Self::on) set
    /// another.
    #[must_use]
    pub fn stream(&self) -> RawStream {
        self.stream
    }

    /// Returns a handle to the same rank that queues its operations on a caller's stream.
    #[must_use]
    pub fn on(&self, stream: RawStream) -> Self {
        Self { stream, ..self.clone() }
    }

    /// Queues an operation that combines the sources of all ranks and writes the result to the target of every rank.
    /// Source and target may be the same bytes.
    ///
    /// # Errors
    /// [`Error::Refused`] for memory that is not on the rank's GPU, that a page uses, or whose length does not fit;
    /// [`Error::Nccl`]; [`Error::Forked`]; a device error.
    pub fn all_reduce(
        &self,
        source: &impl CollectiveSource,
        target: &DeviceBytes,
        element: Element,
        reduction: Reduction,
    ) -> Result<QueuedCollective> {
        self.queue(CollectiveKind::AllReduce(reduction), source, target, element)
    }

    /// Queues a copy of the sources of all ranks, in rank order, to the target of every rank. The target is as long as
    /// all sources together. The source may be the rank's own part of the target.
    ///
    /// # Errors
    /// Same as [`all_reduce`](Self::all_reduce).
    pub fn all_gather(
        &self,
        source: &impl CollectiveSource,
        target: &DeviceBytes,
    ) -> Result<QueuedCollective> {
        self.queue(CollectiveKind::AllGather, source, target, Element::U8)
    }

    /// Queues a copy of the source of rank `root` to the target of every rank. The sources of other ranks are not read.
    /// Source and target may be the same bytes.
    ///
    /// # Errors
    /// Same as [`all_reduce`](Self::all_reduce); also [`NcclError::NoSuchRank`].
    pub fn broadcast(
        &self,
        root: u32,
        source: &impl CollectiveSource,
        target: &DeviceBytes,
    ) -> Result<QueuedCollective> {
        if root >= self.ranks() {
            return Err(NcclError::NoSuchRank { rank: root, ranks: self.ranks() }.into());
        }
        self.queue(CollectiveKind::Broadcast { root }, source, target, Element::U8)
    }

    /// Queues an operation that combines the sources of all ranks and writes one part of the result to the target of
    /// each rank, in rank order. The source is as long as the targets of all ranks together. The target may be the
    /// rank's own part of the source.
    ///
    /// # Errors
    /// Same as [`all_reduce`](Self::all_reduce).
    pub fn reduce_scatter(
        &self,
        source: &impl CollectiveSource,
        target: &DeviceBytes,
        element: Element,
        reduction: Reduction,
    ) -> Result<QueuedCollective> {
        self.queue(CollectiveKind::ReduceScatter(reduction), source, target, element)
    }

    fn queue(
        &self,
        kind: CollectiveKind,
        source: &impl CollectiveSource,
        target: &DeviceBytes,
        element: Element,
    ) -> Result<QueuedCollective> {
        let transport = self.transport()?;
        let (source, written) =
            (source.begin_source(self.stream)?, target.begin(self.stream, Access::Write)?);
        let to = SourceUse {
            address: target.address(),
            len: target.byte_len(),
            gpu: target.gpu(),
            guard: Some(written),
        };
        let point = match self.checked(kind, &source, &to, element)? {
            Some(collective) => Some(transport.queue(self.stream, &collective)?),
            None => None,
        };
        for guard in [source.guard, to.guard].into_iter().flatten() {
            guard.end()?;
        }
        Ok(QueuedCollective { communicator: self.clone(), point })
    }

    /// Returns the operation on these ranges, or `None` if they are empty.
    ///
    /// # Errors
    /// `Refused` if the lengths of the ranges do not match each other or the element, or if a range is not on the
    /// rank's GPU.
    fn checked(
        &self,
        kind: CollectiveKind,
        source: &SourceUse,
        target: &SourceUse,
        element: Element,
    ) -> Result<Option<Collective>> {
        let ranks = u64::from(self.ranks());
        let refused = |len, reason: String| Err(Error::Refused(Refused::Memory { len, reason }));
        let (sources, targets) = match kind {
            CollectiveKind::AllReduce(_) | CollectiveKind::Broadcast { .. } => (1, 1),
            CollectiveKind::AllGather => (ranks, 1),
            CollectiveKind::ReduceScatter(_) => (1, ranks),
        };
        let lens = [source.len.checked_mul(sources), target.len.checked_mul(targets)];
        if lens[0] != lens[1] || lens[0].is_none() {
            let reason = format!("the operation of {ranks} ranks writes {} bytes elsewhere", target.len);
            return refused(source.len, reason);
        }
        let part_len = source.len.min(target.len);
        if !part_len.is_multiple_of(element.byte_len()) {
            return refused(part_len, format!("it is no multiple of {} bytes", element.byte_len()));
        }
        if part_len == 0 {
            return Ok(None);
        }
        let address = |of: &SourceUse| match of.address {
            Some(address) if of.gpu == Some(self.gpu()) => Ok(address),
            _ => {
                let reason =
                    format!("it is not memory of GPU {}, which belongs to rank {}", self.gpu(), self.rank());
                Err(Error::Refused(Refused::Memory { len: of.len, reason }))
            }
        };
        let (from, to) = (address(source)?, address(target)?);
        let own = u64::from(self.rank()) * part_len;
        let in_place = match kind {
            CollectiveKind::AllReduce(_) | CollectiveKind::Broadcast { .. } => from == to,
            CollectiveKind::AllGather => from == to + own,
            CollectiveKind::ReduceScatter(_) => to == from + own,
        };
        if !in_place && from < to + target.len && to < from + source.len {
            return refused(
                source.len,
                "the operation writes to a part of it that is not this rank's".to_owned(),
            );
        }
        let count = usize::try_from(part_len / element.byte_len()).unwrap_or(usize::MAX);
        Ok(Some(Collective { kind, source: from, target: to, count, element }))
    }

    /// Returns an error if the communicator has ended or the library has reported an error for this rank.
    ///
    /// # Errors
    /// [`NcclError::Failed`], [`NcclError::Aborted`]; [`Error::Forked`].
    pub fn check(&self) -> Result<()> {
        self.transport()?.check()
    }

    /// Ends the communicator and its queued operations, whose targets then have unspecified contents. A call that waits
    /// for an operation or for other ranks returns [`NcclError::Aborted`].
    pub fn abort(&self) {
        // The parent's communicator continues if its forked child calls this.
        if let Ok(transport) = self.transport() {
            transport.abort();
        }
    }

    /// Returns the transport, for exchanges of the store's own memory.
    ///
    /// # Errors
    /// `Forked`.
    pub(crate) fn transport(&self) -> Result<&dyn RankTransport> {
        Ok(&**self.transport.check()?)
    }
}

impl ImageExchange for Communicator {
    fn rank(&self) -> u32 {
        self.rank()
    }

    fn ranks(&self) -> u32 {
        self.ranks()
    }

    fn gpu(&self) -> u32 {
        self.gpu()
    }

    fn gather(&self, source: u64, target: u64, len: u64) -> Result<()> {
        let transport = self.transport()?;
        let count = usize::try_from(len).unwrap_or(usize::MAX);
        let of = Collective { kind: CollectiveKind::AllGather, source, target, count, element: Element::U8 };
        transport.wait(&transport.queue(self.stream, &of)?)
    }
}

impl MemoryOptions {
    /// Sets the ranks with which an open shares the loading of pages. Default: none. The open then loads all pages
    /// itself.
    ///
    /// Use it for replicas: each rank opens its own store, and all stores have the same pages in the same snapshot.
    /// Each rank then reads only a share of the images from disk and sends it over its own bus. The other images arrive
    /// from the other GPUs. Every page that arrives is verified with the checksum in the rank's own manifest.
    ///
    /// All ranks must open their stores at the same time, each with its own rank of the same communicator, and only one
    /// store at a time. Pages in host memory, on disk, or on other GPUs than the communicator's are loaded as without
    /// this option. All pages are loaded as without this option in the following cases, which
    /// [`RecoveryReport::gather`] reports:
    ///
    /// - The snapshots of two ranks differ in a page, or one rank's open fails.
    /// - A rank has too little memory for the exchange, which needs at least 2 MiB for two ranks and uses up to 1 GiB.
    /// - The mode is [`GatherMode::IfFaster`], and the pages have less than 64 MiB or the link is slower than 100 GB/s.
    ///
    /// Images of a snapshot that is not recorded as verified are read by each rank from its own disk. The images that a
    /// rank did not read are verified by its next [scrub](crate::Store::scrub).
    ///
    /// If a rank ends during the open, the opens of the others fail with an [`Error::Nccl`] after the time limit of
    /// [`Rank::timeout`](crate::nccl::Rank::timeout). A failed open changes nothing, so the next open finds the same
    /// state.
    ///
    /// ```no_run
    /// use remanent::nccl::{GatherMode, Nccl, Rank, UniqueId};
    /// use remanent::options::MemoryOptions;
    /// use remanent::{DeviceChoice, Options};
    /// # let (id, rank) = (UniqueId::from_bytes([0; 128]), 0);
    /// let communicator = Nccl::load()?.join(&id, Rank::new(rank, 8).gpu(rank))?;
    /// let memory = MemoryOptions::new().gather(&communicator, GatherMode::IfFaster);
    /// let options = Options::new().device(DeviceChoice::Cuda(rank)).memory(memory);
    /// let store = options.open(format!("replica-{rank}"))?;
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// [`RecoveryReport::gather`]: crate::store::RecoveryReport::gather
    #[must_use]
    pub fn gather(mut self, communicator: &Communicator, mode: GatherMode) -> Self {
        self.gather = Some(GatherSource { exchange: Arc::new(communicator.clone()), mode });
        self
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator")
            .field("rank", &self.rank())
            .field("ranks", &self.ranks())
            .field("gpu", &self.gpu())
            .finish_non_exhaustive()
    }
}

/// A handle to a collective operation that is queued on a stream. Dropping the handle does not cancel the operation.
#[derive(Debug)]
pub struct QueuedCollective {
    communicator: Communicator,
    /// The point of the stream after the operation, or `None` if the operation has no bytes.
    point: Option<QueuedPoint>,
}

impl QueuedCollective {
    /// Waits until the operation is complete on this rank. The time limit applies only to this wait: if another rank is
    /// missing and no thread waits, the stream remains blocked until [`Communicator::abort`] is called.
    ///
    /// # Errors
    /// [`NcclError::TimedOut`], [`NcclError::Failed`], [`NcclError::Aborted`]: the target has unspecified contents.
    /// [`Error::Forked`]; a device error.
    pub fn wait(&self) -> Result<()> {
        let transport = self.communicator.transport()?;
        self.point.iter().try_for_each(|point| transport.wait(point))
    }
}
