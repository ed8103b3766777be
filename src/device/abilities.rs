//! Abilities that only some devices have. A caller requests an ability from the device's [`Abilities`]. If the device
//! lacks the ability, the caller uses another method or returns an error.

use remanent_format::Place;

use super::{
    CallerMemory, Device, Fence, Lane, MemoryId, MemoryStats, PageBytes, Pending, RawStream, Span,
    StreamEvent, UnifiedHint, UnifiedSupport,
};
use crate::disk::FileMemory;
use crate::error::{Error, Refused, Result};

/// The abilities of a device. A field is `None` if the device lacks the ability.
#[derive(Clone, Copy, Default)]
#[expect(missing_debug_implementations, reason = "it contains only references to a device")]
pub struct Abilities<'d> {
    /// Allocates and releases many pages per call. Without this ability, each page needs a call.
    pub bulk: Option<&'d dyn BulkMemory>,
    /// Keeps freed memory for reuse. Without this ability, freed memory returns to its source immediately.
    pub cache: Option<&'d dyn MemoryCache>,
    /// Uses memory that the device did not allocate, such as a caller's, as page memory. Without this ability, the
    /// device allocates the memory of all pages.
    pub lent: Option<&'d dyn LentMemory>,
    /// Copies to the memory of files. Without this ability, bytes for a file pass through staging.
    pub files: Option<&'d dyn DeviceFiles>,
    /// Makes lanes and callers' streams wait for each other. Without this ability, callers have no streams.
    pub streams: Option<&'d dyn DeviceStreams>,
    /// Returns addresses at which kernels access page memory. Without this ability, kernels cannot access it.
    pub addresses: Option<&'d dyn KernelAddresses>,
    /// Returns the contents of page memory as host bytes. Without this ability, bytes of pages are copied through
    /// lanes.
    pub bytes: Option<&'d dyn HostBytes>,
    /// Reads page memory on the caller's thread. Without this ability, all reads pass through lanes.
    pub direct_reads: Option<&'d dyn DirectReads>,
    /// Moves memory between a GPU and the host. Without this ability, [`Place::Unified`] is ordinary host memory.
    pub unified: Option<&'d dyn UnifiedMemory>,
    /// Copies from other devices. Without this ability, bytes of another device pass through staging.
    pub peers: Option<&'d dyn PeerCopies>,
}

/// Allocates and releases the memory of many pages per call.
pub trait BulkMemory {
    /// Allocates page memory for several pages, in order, as [`Device::allocate`] does for each. Appends the ids to
    /// `made`, which must have enough spare capacity. On failure, `made` contains the ids of the memory allocated
    /// before the failure.
    ///
    /// # Errors
    /// Same as `allocate`.
    fn allocate_all(&self, pages: &[(Place, u64)], made: &mut Vec<MemoryId>) -> Result<()>;

    /// Frees the memory of several pages, as [`Device::release`] does for each. Calls `failed` with the index of each
    /// memory that the device could not free, and the error.
    fn release_all(&self, memory: &[MemoryId], failed: &mut dyn FnMut(usize, Error));
}

/// Keeps freed memory for later allocations.
pub trait MemoryCache {
    /// Allocates page memory like [`Device::allocate`], but never waits for the device's work.
    ///
    /// # Errors
    /// Same as `allocate`; also `OutOfMemory` if the device would first have to free memory or wait.
    fn allocate_at_once(&self, place: Place, len: u64) -> Result<MemoryId>;

    /// Returns unused memory, which no page and no staging needs, to its source. Returns the number of bytes freed. A
    /// GPU's driver waits for all work of the GPU, including the caller's own.
    ///
    /// # Errors
    /// A device error.
    fn trim(&self) -> Result<u64>;

    /// Returns the number of bytes requested and held in each place. Places that share the memory of another place are
    /// counted under that place.
    fn memory_stats(&self) -> Vec<(Place, MemoryStats)>;
}

/// Stores pages in memory that the device did not allocate for pages, such as a caller's.
pub trait LentMemory {
    /// Makes caller-owned memory usable as page memory, and returns its id and its place. Releasing the id does not
    /// free the memory.
    ///
    /// # Errors
    /// `Refused` if the memory does not match the caller's description; a device error.
    fn adopt(&self, memory: &CallerMemory) -> Result<(MemoryId, Place)>;

    /// Returns a new id for a range of page memory, so that a page can be stored in the range. The new id is released
    /// like any other. Releasing it does not free the bytes: they remain part of the memory that contains them. The
    /// caller releases that memory after the new id.
    ///
    /// # Errors
    /// A device error.
    fn alias(&self, span: Span) -> Result<MemoryId>;

    /// Returns the address space of page memory, and the offset of its first byte in that space. Two memories share a
    /// byte only if they have the same space and their ranges in it overlap. An id from [`alias`](Self::alias) has the
    /// space of the memory that contains its range.
    fn origin(&self, memory: MemoryId) -> (u64, u64);
}

/// Copies page memory directly to the memory of mapped files.
pub trait DeviceFiles {
    /// Registers the memory of a file as a target of copies. Command lists refer to this memory like page memory, and
    /// the bytes that they copy to it become the bytes of the file. The place of the memory is [`Place::Host`]. Only
    /// [`unregister`](Self::unregister) ends the registration.
    ///
    /// # Errors
    /// `Refused`, `OutOfMemory`, a device error. On failure the mapping is removed.
    fn register(&self, memory: Box<dyn FileMemory>) -> Result<MemoryId>;

    /// Ends the mapping of a file's memory. The caller must have waited for the fence of its last use.
    ///
    /// # Errors
    /// A device error. The mapping then stays until the process ends, because the device may still write to
    /// it.
    fn unregister(&self, memory: MemoryId) -> Result<()>;
}

/// Orders the work of lanes and of callers' streams: either can wait for the other.
pub trait DeviceStreams {
    /// Makes all later lists of `lane` run after the work currently queued in the caller's stream. The host does not
    /// wait. A slow stream delays the whole lane, so use [`Lane::Callers`].
    ///
    /// # Errors
    /// `Refused`, with nothing changed, if the device cannot use the stream; a device error.
    fn wait_external(&self, lane: Lane, stream: RawStream) -> Result<()>;

    /// Makes all later work of the caller's stream run after `fence` has passed. The host does not wait.
    ///
    /// # Errors
    /// `Refused`, with nothing changed, if the device cannot use the stream; a device error.
    fn signal_external(&self, stream: RawStream, fence: Fence) -> Result<()>;

    /// Records the current point of a caller's stream. The point remains valid after the stream is destroyed.
    ///
    /// # Errors
    /// `Refused` if the device cannot use the stream; a device error.
    fn stream_event(&self, stream: RawStream) -> Result<StreamEvent>;

    /// Blocks this thread until a point of a stream has passed. The wait uses no lane, so a stalled stream blocks only
    /// this thread.
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
    /// `Refused`, with nothing changed, if the device cannot use the stream; a device error.
    fn hold_stream(&self, stream: RawStream, point: &StreamEvent) -> Result<()>;
}

/// Returns addresses at which kernels access page memory.
pub trait KernelAddresses {
    /// Returns the address at which kernels access page memory. The address stays the same until the memory is
    /// released. Returns `None` for memory of length 0 and for host-only memory, which kernels cannot access.
    fn address(&self, memory: MemoryId) -> Option<u64>;

    /// Returns the CUDA ordinal of the GPU that owns page memory or has registered it. Returns `None` for host-only
    /// memory.
    fn gpu_of(&self, memory: MemoryId) -> Option<u32>;

    /// Returns the CUDA ordinal of the GPU of a device slot, or `None` for a slot without a GPU.
    fn gpu_at(&self, slot: u32) -> Option<u32>;
}

/// Returns the contents of page memory as host bytes.
pub trait HostBytes {
    /// Returns a snapshot of the current bytes of page memory. Later lists do not change the returned bytes. To include
    /// the writes of lists in flight, wait for their lanes first. Returns `None` if the memory is not in host memory.
    fn bytes(&self, memory: MemoryId) -> Option<PageBytes>;
}

/// Reads page memory on the caller's thread while lanes continue.
pub trait DirectReads {
    /// Copies bytes of page memory, starting at `offset`, to `out`. The bytes are those of a single moment between two
    /// commands. Returns `false` immediately, without a copy, in these cases:
    ///
    /// - The memory was released, is too short for the range, or is not in host memory.
    /// - A list that may write to the memory is still in flight.
    fn read_now(&self, memory: MemoryId, offset: u64, out: &mut [u8]) -> bool;

    /// Returns a new id for page memory and retires the current one. A read under the old id that has not finished when
    /// this method returns copies nothing. The caller must have waited for the fence of the memory's last use.
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
    /// `Refused` for memory outside [`Place::Unified`] or if the device does not support hints; a device error.
    fn hint(&self, memory: MemoryId, hint: UnifiedHint) -> Result<()>;
}

/// Copies from another device's page memory without blocking the host.
pub trait PeerCopies {
    /// Queues a copy of another device's page memory to memory of this device. The copy runs after all work already
    /// queued on that lane of both devices. Lists queued on the lane later, on either device, run after the copy.
    /// Returns `None`, with nothing queued, if the two devices have no direct path. Until the copy's fence has passed,
    /// no other lane may change the source and no thread may release it.
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

/// Wrappers of the abilities. If the device lacks an ability, a method returns an error, or the result for a device
/// without that ability.
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

    /// Returns the ordinal of the GPU for page memory in GPU memory or unified memory, and `None` for other memory.
    #[cfg(any(feature = "nccl", feature = "nixl"))]
    pub(crate) fn gpu_with(&self, memory: MemoryId) -> Option<u32> {
        let is_on_gpu = matches!(self.place_of(memory), Place::Device(_) | Place::Unified);
        self.abilities().addresses.filter(|_| is_on_gpu)?.gpu_of(memory)
    }

    /// Returns the number of the GPU of a place, which must be a device slot.
    #[cfg(feature = "nccl")]
    pub(crate) fn gpu_at(&self, place: Place) -> Option<u32> {
        let Place::Device(slot) = place else { return None };
        self.abilities().addresses?.gpu_at(slot)
    }

    pub(crate) fn origin(&self, memory: MemoryId) -> (u64, u64) {
        self.abilities().lent.map_or((memory.0, 0), |lent| lent.origin(memory))
    }

    pub(crate) fn rename(&self, memory: MemoryId) -> Result<MemoryId> {
        self.abilities().direct_reads.map_or(Ok(memory), |reads| reads.rename(memory))
    }

    /// Returns the place in which page memory was allocated or adopted.
    pub(crate) fn place_of(&self, memory: MemoryId) -> Place {
        let mut place = Place::Host;
        self.read_places(&mut |place_of| place = place_of(memory));
        place
    }

    pub(crate) fn unified_support(&self) -> UnifiedSupport {
        let on_host = UnifiedSupport { has_pages: true, takes_hints: false };
        self.abilities().unified.map_or(on_host, |unified| unified.support())
    }

    pub(crate) fn hint_unified(&self, memory: MemoryId, hint: UnifiedHint) -> Result<()> {
        let reason = "the device has no memory that moves between a GPU and the host";
        let refused = || Error::Refused(Refused::Hint { place: self.place_of(memory), reason });
        self.abilities().unified.ok_or_else(refused)?.hint(memory, hint)
    }

    pub(crate) fn allocate_at_once(&self, place: Place, len: u64) -> Result<MemoryId> {
        match self.abilities().cache {
            Some(cache) => cache.allocate_at_once(place, len),
            None => self.allocate(place, len),
        }
    }
}
