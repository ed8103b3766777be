//! Abilities that only some devices have. A caller requests one from the device's [`Abilities`]. If it is
//! missing, the caller takes another path or returns an error.

use remanent_format::Place;

use super::{
    CallerMemory, Device, Fence, Lane, MemoryId, MemoryStats, PageBytes, Pending, RawStream, Span,
    StreamEvent, UnifiedHint, UnifiedSupport,
};
use crate::disk::FileMemory;
use crate::error::{Error, Refused, Result};

/// The abilities of a device. `None` is an ability that the device lacks.
#[derive(Clone, Copy, Default)]
#[expect(missing_debug_implementations, reason = "it contains only references to a device")]
pub struct Abilities<'d> {
    /// Allocations and releases of many pages per call. Without it, there is a call for each page.
    pub bulk: Option<&'d dyn BulkMemory>,
    /// A cache of freed memory. Without it, freed memory returns to its source at once.
    pub cache: Option<&'d dyn MemoryCache>,
    /// Pages in memory that was allocated for another use.
    pub lent: Option<&'d dyn LentMemory>,
    /// Copies to the memory of files. Without it, bytes for a file pass through staging.
    pub files: Option<&'d dyn DeviceFiles>,
    /// Waits between lanes and callers' streams. Without it, there are no streams.
    pub streams: Option<&'d dyn DeviceStreams>,
    /// Addresses for kernels. Without it, kernels cannot reach page memory.
    pub addresses: Option<&'d dyn KernelAddresses>,
    /// Page memory as bytes of the host.
    pub bytes: Option<&'d dyn HostBytes>,
    /// Reads on the caller's thread. Without it, all reads pass through lanes.
    pub direct_reads: Option<&'d dyn DirectReads>,
    /// Memory that moves between a GPU and the host. Without it, [`Place::Unified`] is ordinary host memory.
    pub unified: Option<&'d dyn UnifiedMemory>,
    /// Copies from other devices. Without it, bytes of another device pass through staging.
    pub peers: Option<&'d dyn PeerCopies>,
}

/// Allocates and releases the memory of many pages per call.
pub trait BulkMemory {
    /// Allocates page memory for several pages, in order, as [`Device::allocate`] does for each. Appends the
    /// memory to `made`, which must have enough spare capacity. On failure, `made` contains the memory
    /// allocated before the failure.
    ///
    /// # Errors
    /// Same as `allocate`.
    fn allocate_all(&self, pages: &[(Place, u64)], made: &mut Vec<MemoryId>) -> Result<()>;

    /// Frees the memory of several pages, as [`Device::release`] does for each. Calls `failed` with the index
    /// of each memory that the device could not free.
    fn release_all(&self, memory: &[MemoryId], failed: &mut dyn FnMut(usize, Error));
}

/// Keeps freed memory for later allocations.
pub trait MemoryCache {
    /// Allocates page memory like [`Device::allocate`], but never waits for the device's work. The call fails
    /// with `OutOfMemory` if the device would first have to free memory or wait.
    ///
    /// # Errors
    /// Same as `allocate`.
    fn allocate_at_once(&self, place: Place, len: u64) -> Result<MemoryId>;

    /// Returns memory that no page and no staging uses to its source, and returns the number of bytes freed.
    /// A GPU's driver waits for all work of the GPU, including the caller's own.
    ///
    /// # Errors
    /// A device error.
    fn trim(&self) -> Result<u64>;

    /// Returns the bytes requested and held, by the place whose memory they are. Places that share the memory
    /// of another place are counted there.
    fn memory_stats(&self) -> Vec<(Place, MemoryStats)>;
}

/// Lets pages live in memory that the device did not allocate for them.
pub trait LentMemory {
    /// Makes caller-owned memory usable as page memory, and returns its id and its place. Releasing the id
    /// does not free the memory, which remains with its owner.
    ///
    /// # Errors
    /// `MemoryRefused` if the device detects that the memory is not what the caller claims; a device error.
    fn adopt(&self, memory: &CallerMemory) -> Result<(MemoryId, Place)>;

    /// Gives a range of page memory an id of its own, so that a page can live in it. The new id is released
    /// like any other. Releasing it leaves the bytes to the memory that contains them, which the caller
    /// releases later.
    ///
    /// # Errors
    /// A device error.
    fn alias(&self, span: Span) -> Result<MemoryId>;

    /// Returns where page memory begins: a space, and an offset in it. Two memories share a byte only if they
    /// have the same space and their ranges in it overlap. An id from [`alias`](Self::alias) has the space of
    /// the memory that contains it.
    fn origin(&self, memory: MemoryId) -> (u64, u64);
}

/// Copies to the memory of files.
pub trait DeviceFiles {
    /// Registers the memory of a file as a target of copies. Lists name it like page memory; the bytes that
    /// they copy to it become the file's bytes, in [`Place::Host`]. Only [`unregister`](Self::unregister)
    /// ends the registration.
    ///
    /// # Errors
    /// `MemoryRefused`, `OutOfMemory`, a device error. On failure the mapping is removed.
    fn register(&self, memory: Box<dyn FileMemory>) -> Result<MemoryId>;

    /// Ends the mapping of a file's memory. The caller must have waited for the fence of its last use.
    ///
    /// # Errors
    /// A device error. The mapping then stays until the process ends, because the device may still write to
    /// it.
    fn unregister(&self, memory: MemoryId) -> Result<()>;
}

/// Orders lanes and callers' streams, in both directions.
pub trait DeviceStreams {
    /// Makes all later lists of `lane` run after the work currently queued in the caller's stream. The host
    /// does not wait. A slow stream delays the whole lane, so use [`Lane::Callers`].
    ///
    /// # Errors
    /// `StreamRefused`, with nothing changed; a device error.
    fn wait_external(&self, lane: Lane, stream: RawStream) -> Result<()>;

    /// Makes all later work of the caller's stream run after `fence` has passed. The host does not wait.
    ///
    /// # Errors
    /// `StreamRefused`, with nothing changed; a device error.
    fn signal_external(&self, stream: RawStream, fence: Fence) -> Result<()>;

    /// Records the current point of a caller's stream. The point can be waited for later, even after the
    /// stream is destroyed.
    ///
    /// # Errors
    /// `StreamRefused`, a device error.
    fn stream_event(&self, stream: RawStream) -> Result<StreamEvent>;

    /// Blocks this thread until a point of a stream has passed. No lane takes part: a stalled stream blocks
    /// only this thread, even if other threads wait for other streams.
    ///
    /// # Errors
    /// A device error.
    fn wait_event(&self, point: &StreamEvent) -> Result<()>;

    /// Returns whether a point of a stream has passed.
    ///
    /// # Errors
    /// A device error.
    fn has_passed(&self, point: &StreamEvent) -> Result<bool>;

    /// Makes all later work of a caller's stream run after a point of another stream. The host does not wait.
    ///
    /// # Errors
    /// `StreamRefused`, with nothing changed; a device error.
    fn hold_stream(&self, stream: RawStream, point: &StreamEvent) -> Result<()>;
}

/// Gives kernels the addresses of page memory.
pub trait KernelAddresses {
    /// Returns the address of page memory for kernels. The address stays the same until the memory is
    /// released. `None` for memory that kernels cannot reach: host-only memory, and memory of length 0.
    fn address(&self, memory: MemoryId) -> Option<u64>;

    /// Returns the CUDA ordinal of the GPU that owns page memory or has it registered. `None` for host-only
    /// memory.
    fn gpu_of(&self, memory: MemoryId) -> Option<u32>;
}

/// Gives the host the bytes of page memory.
pub trait HostBytes {
    /// Returns the current bytes of page memory. The returned bytes never change. For current contents, a
    /// caller first waits for the lanes; for later contents, it calls this method again. `None` if the memory
    /// is not in host memory.
    fn bytes(&self, memory: MemoryId) -> Option<PageBytes>;
}

/// Reads page memory on the caller's thread while lanes continue.
pub trait DirectReads {
    /// Copies bytes of page memory, starting at `offset`, to `out`. The bytes are those of a single moment
    /// between two commands. Returns `false` immediately, without a copy, if the memory was released, is
    /// shorter or is not in host memory, or if a list that may write to it is still in flight.
    fn read_now(&self, memory: MemoryId, offset: u64, out: &mut [u8]) -> bool;

    /// Gives page memory a new id and retires the current one: a read under the old id that has not finished
    /// when this method returns reads nothing. The caller must have waited for the fence of the memory's last
    /// use.
    ///
    /// # Errors
    /// A device error. An unknown id is a bug in the caller and panics.
    fn rename(&self, memory: MemoryId) -> Result<MemoryId>;
}

/// Moves page memory in [`Place::Unified`] between a GPU and the host.
pub trait UnifiedMemory {
    /// Returns the device's capabilities for page memory in [`Place::Unified`].
    fn support(&self) -> UnifiedSupport;

    /// Queues a hint for page memory and returns. The hint ends when the memory is released.
    ///
    /// # Errors
    /// `HintRefused` for memory outside [`Place::Unified`] or if the device does not support hints; a device
    /// error.
    fn hint(&self, memory: MemoryId, hint: UnifiedHint) -> Result<()>;
}

/// Copies from another device's page memory without a wait on the host.
pub trait PeerCopies {
    /// Queues a copy of another device's page memory to memory of this device, after all work queued on that
    /// lane of both devices. Lists queued on the lane later, on either device, run after the copy. Returns
    /// `None`, with nothing queued, if the two devices have no direct path. Until the copy's fence has passed,
    /// the caller must not let another lane change the source or a thread release it.
    ///
    /// # Errors
    /// A device error; a part of the copy may have been queued.
    fn copy_from(
        &self,
        lane: Lane,
        other: &dyn Device,
        source: Span,
        target: Span,
    ) -> Result<Option<Pending>>;
}

/// Abilities as typed results: an error, or the path that other devices take, if the ability is missing.
impl dyn Device + '_ {
    pub(crate) fn streams(&self, stream: RawStream) -> Result<&dyn DeviceStreams> {
        let reason = "pages live in host memory, not on a GPU";
        self.abilities().streams.ok_or(Error::Refused(Refused::Stream { stream: stream.handle(), reason }))
    }

    pub(crate) fn wait_stream(&self, stream: RawStream) -> Result<()> {
        let streams = self.streams(stream)?;
        streams.wait_event(&streams.stream_event(stream)?)
    }

    pub(crate) fn lent(&self, len: u64) -> Result<&dyn LentMemory> {
        let reason = || format!("{} keeps pages only in memory that it allocates for them", self.label());
        self.abilities().lent.ok_or_else(|| Error::Refused(Refused::Memory { len, reason: reason() }))
    }

    pub(crate) fn files(&self, len: u64) -> Result<&dyn DeviceFiles> {
        let reason = || format!("{} copies to no files", self.label());
        self.abilities().files.ok_or_else(|| Error::Refused(Refused::Memory { len, reason: reason() }))
    }

    pub(crate) fn address(&self, memory: MemoryId) -> Option<u64> {
        self.abilities().addresses?.address(memory)
    }

    pub(crate) fn origin(&self, memory: MemoryId) -> (u64, u64) {
        self.abilities().lent.map_or((memory.0, 0), |lent| lent.origin(memory))
    }

    pub(crate) fn rename(&self, memory: MemoryId) -> Result<MemoryId> {
        self.abilities().direct_reads.map_or(Ok(memory), |reads| reads.rename(memory))
    }

    pub(crate) fn unified_support(&self) -> UnifiedSupport {
        let on_host = UnifiedSupport { has_pages: true, takes_hints: false };
        self.abilities().unified.map_or(on_host, |unified| unified.support())
    }

    pub(crate) fn hint_unified(&self, memory: MemoryId, hint: UnifiedHint) -> Result<()> {
        let reason = "the device has no memory that moves between a GPU and the host";
        let refused = || Error::Refused(Refused::Hint { place: self.places_of(&[memory])[0], reason });
        self.abilities().unified.ok_or_else(refused)?.hint(memory, hint)
    }

    pub(crate) fn allocate_at_once(&self, place: Place, len: u64) -> Result<MemoryId> {
        match self.abilities().cache {
            Some(cache) => cache.allocate_at_once(place, len),
            None => self.allocate(place, len),
        }
    }
}
