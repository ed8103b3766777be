//! The interface to the memory in which pages live: a queue of commands rather than a set of calls.
//!
//! A kernel launch costs microseconds, and a logged commit should cost one. Work is therefore submitted to a
//! device as lists of commands, and a caller that needs a result waits for a fence. Memory and staging are
//! named by handles; bytes cross the interface only in staging. `HostDevice` defines correct behavior (I11):
//! every other device produces the same bytes for the same lists.
//!
//! The engine holds an `Arc<dyn Device>`. The indirect call for each list takes a few nanoseconds, against
//! microseconds for a launch.

#[cfg(feature = "cuda")]
pub mod cuda;
pub mod host;
pub mod multi;
pub(crate) mod spans;
pub(crate) mod sums;
mod digests;
mod commands;
mod staging;
mod streams;
mod stream_guard;
mod bytes;
mod many_deltas;
mod memory_link;
mod lent_ranges;
mod stream_uses;
mod unified;
pub(crate) mod counted;

use std::any::Any;
use std::sync::Arc;

use remanent_format::Place;
use remanent_format::ids::Number;

pub use self::bytes::DeviceBytes;
pub use self::commands::{
    BITMAP_LEN_END, Command, CommandList, INDEX_OUT_OF_BOUNDS, INDEX_TWICE, IndexList, Payload, Piece,
    PieceKind, Selection, StagingSpan,
};
pub(crate) use self::counted::{CountedDevice, DeviceCounts};
pub use self::digests::{
    DIGEST_CHUNK_LEN, DIGEST_KEY_LEN, DIGEST_LEN, DIGEST_SEED_LEN, Digest, digest_count, digest_key,
};
pub(crate) use self::memory_link::{MemoryLink, MemoryOwner, StoreHandle, drop_when_passed};
pub use self::staging::{Pending, ReturnedStaging, Staging, StagingMemory};
pub use self::stream_guard::StreamGuard;
pub use self::stream_uses::Access;
pub(crate) use self::stream_uses::{LastUse, StreamUses};
pub use self::streams::{RawStream, StreamEvent};
pub use self::unified::{UnifiedHint, UnifiedSide, UnifiedSupport};
use crate::disk::FileMemory;
use crate::error::{Error, Refused, Result};
pub use crate::options::caller_memory::{CallerMemory, HostMemory};

/// Memory that holds pages, and the queues through which it is changed.
pub trait Device: Any + Send + Sync {
    /// Returns the device's name for reports, such as `host` or `cuda:0 (NVIDIA H200)`.
    fn label(&self) -> String;

    /// Allocates page memory with unspecified contents. `len` may be 0.
    ///
    /// # Errors
    /// `OutOfMemory`, `PlaceUnavailable`.
    fn allocate(&self, place: Place, len: u64) -> Result<MemoryId>;

    /// Allocates page memory like [`allocate`](Self::allocate), but never waits for the device's work. The
    /// call fails with `OutOfMemory` if the device would first have to free memory or wait.
    ///
    /// # Errors
    /// Same as `allocate`.
    fn allocate_at_once(&self, place: Place, len: u64) -> Result<MemoryId> {
        self.allocate(place, len)
    }

    /// Allocates page memory for several pages, in order, as [`allocate`](Self::allocate) does for each.
    /// Appends the memory to `made`, which must have enough spare capacity. On failure, `made` contains the
    /// memory allocated before the failure.
    ///
    /// # Errors
    /// Same as `allocate`.
    fn allocate_all(&self, pages: &[(Place, u64)], made: &mut Vec<MemoryId>) -> Result<()> {
        for (place, len) in pages {
            made.push(self.allocate(*place, *len)?);
        }
        Ok(())
    }

    /// Returns whether page memory of this length in this place contains zeros when it is allocated. If so, a
    /// new page of any length costs nothing until it is written.
    fn allocates_zeros(&self, _place: Place, _len: u64) -> bool {
        false
    }

    /// Returns whether bytes cross a bus between staging and page memory. If they do, a checksum of one side
    /// proves nothing about the other, so lists checksum page memory with [`Command::Crc`] after a copy into
    /// it and before a copy out of it. Within host memory, a second checksum would read the same bytes again.
    fn crosses_bus(&self) -> bool {
        false
    }

    /// Frees page memory. The caller must have waited for the fence of its last use.
    ///
    /// # Errors
    /// A device error. An unknown id is a bug in the caller and panics.
    fn release(&self, memory: MemoryId) -> Result<()>;

    /// Frees the memory of several pages, as [`release`](Self::release) does for each. Each entry states the
    /// place of its memory. Calls `failed` with the index of each memory that the device could not free.
    fn release_all(&self, memory: &[(Place, MemoryId)], failed: &mut dyn FnMut(usize, Error)) {
        for (index, (_, memory)) in memory.iter().enumerate() {
            if let Err(error) = self.release(*memory) {
                failed(index, error);
            }
        }
    }

    /// Allocates zeroed host memory that lanes copy from and to.
    ///
    /// # Errors
    /// `OutOfMemory` if the system has no memory left.
    fn staging(&self, len: usize) -> Result<Staging>;

    /// Queues a list on a lane. Its commands run in order, after every earlier list of the lane. The list
    /// owns its staging until the returned [`Pending`] gives it back. Ranges of staging that the list read
    /// have unspecified contents afterwards.
    ///
    /// # Errors
    /// A device error, in which case no command of the list runs.
    fn submit(&self, lane: Lane, list: CommandList) -> Result<Pending>;

    /// Returns the newest fence of the lane that has passed.
    fn reached(&self, lane: Lane) -> u64;

    /// Waits until a fence has passed.
    ///
    /// # Errors
    /// A device error: the lane stopped before the fence.
    fn wait(&self, fence: Fence) -> Result<()>;

    /// Makes all later lists of `lane` run after `fence` has passed.
    ///
    /// # Errors
    /// A device error.
    fn after(&self, lane: Lane, fence: Fence) -> Result<()>;

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

    /// Blocks this thread until the work currently queued in the caller's stream is done. No lane takes part:
    /// a stalled stream blocks only this thread, even if other threads wait for other streams.
    ///
    /// # Errors
    /// `StreamRefused`, a device error.
    fn wait_stream(&self, stream: RawStream) -> Result<()>;

    /// Returns whether the device can wait for callers' streams and make them wait.
    fn supports_streams(&self) -> bool {
        false
    }

    /// Records the current point of a caller's stream. The point can be waited for later, even after the
    /// stream is destroyed.
    ///
    /// # Errors
    /// `StreamRefused`, a device error.
    fn stream_event(&self, stream: RawStream) -> Result<StreamEvent> {
        let reason = "the device gives no points of streams";
        Err(Error::Refused(Refused::Stream { stream: stream.handle(), reason }))
    }

    /// Blocks this thread until a point of a stream has passed. No lane takes part.
    ///
    /// # Errors
    /// A device error.
    fn wait_event(&self, _point: &StreamEvent) -> Result<()> {
        unreachable!("a device that gives no points")
    }

    /// Returns whether a point of a stream has passed.
    ///
    /// # Errors
    /// A device error.
    fn has_passed(&self, _point: &StreamEvent) -> Result<bool> {
        unreachable!("a device that gives no points")
    }

    /// Makes all later work of a caller's stream run after a point of another stream. The host does not wait.
    ///
    /// # Errors
    /// `StreamRefused`, with nothing changed; a device error.
    fn hold_stream(&self, _stream: RawStream, _point: &StreamEvent) -> Result<()> {
        unreachable!("a device that gives no points")
    }

    /// Returns the address of page memory for kernels. The address stays the same until the memory is
    /// released. `None` for memory that kernels cannot reach: host-only memory, and memory of length 0.
    fn address(&self, memory: MemoryId) -> Option<u64>;

    /// Returns the CUDA ordinal of the GPU that owns page memory or has it registered. `None` for host-only
    /// memory.
    fn gpu_of(&self, _memory: MemoryId) -> Option<u32> {
        None
    }

    /// Returns the current bytes of page memory. The returned bytes never change. For current contents, a
    /// caller first waits for the lanes; for later contents, it calls this method again. `None` if the memory
    /// is not in host memory.
    fn bytes(&self, memory: MemoryId) -> Option<PageBytes>;

    /// Returns whether [`Device::read_now`] can read any memory.
    fn reads_now(&self) -> bool {
        false
    }

    /// Copies bytes of page memory, starting at `offset`, to `out`. The copy runs on the caller's thread
    /// while lanes continue, and its bytes are those of a single moment between two commands. Returns `false`
    /// immediately, without a copy, if the memory was released, is shorter or is not in host memory, or if a
    /// list that may write to it is still in flight.
    fn read_now(&self, memory: MemoryId, offset: u64, out: &mut [u8]) -> bool {
        let _ = (memory, offset, out);
        false
    }

    /// Returns memory that no page and no staging uses to its source, and returns the number of bytes freed.
    /// A GPU's driver waits for all work of the GPU, including the caller's own. A device that caches no
    /// memory has nothing to free.
    ///
    /// # Errors
    /// A device error.
    fn trim(&self) -> Result<u64> {
        Ok(0)
    }

    /// Returns the bytes requested and held, by the place whose memory they are. Places that share the memory
    /// of another place are counted there. Empty for a device that caches no memory.
    fn memory_stats(&self) -> Vec<(Place, MemoryStats)> {
        Vec::new()
    }

    /// Returns the device's capabilities for page memory in [`Place::Unified`].
    fn unified(&self) -> UnifiedSupport {
        UnifiedSupport::default()
    }

    /// Queues a hint for page memory and returns. The hint ends when the memory is released.
    ///
    /// # Errors
    /// `HintRefused` for memory outside [`Place::Unified`] or if the device does not support hints; a device
    /// error.
    fn hint_unified(&self, memory: MemoryId, _hint: UnifiedHint) -> Result<()> {
        let reason = "the device has no memory that moves between a GPU and the host";
        Err(Error::Refused(Refused::Hint { place: self.place_of(memory), reason }))
    }

    /// Makes caller-owned memory usable as page memory, and returns its id and its place. Releasing the id
    /// does not free the memory, which remains with its owner.
    ///
    /// # Errors
    /// `MemoryRefused` if the device detects that the memory is not what the caller claims; a device error.
    fn adopt(&self, memory: &CallerMemory) -> Result<(MemoryId, Place)> {
        let reason = format!("{} knows no memory but its own", self.label());
        Err(Error::Refused(Refused::Memory { len: memory.byte_len(), reason }))
    }

    /// Registers the memory of a file as a target of copies. Lists name it like page memory; the bytes that
    /// they copy to it become the file's bytes, in [`Place::Host`]. Only [`unregister`](Self::unregister)
    /// ends the registration.
    ///
    /// # Errors
    /// `MemoryRefused`, `OutOfMemory`, a device error. On failure the mapping is removed.
    fn register(&self, memory: Box<dyn FileMemory>) -> Result<MemoryId> {
        let reason = format!("{} copies to no files", self.label());
        Err(Error::Refused(Refused::Memory { len: memory.byte_len(), reason }))
    }

    /// Ends the mapping of a file's memory. The caller must have waited for the fence of its last use.
    ///
    /// # Errors
    /// A device error. The mapping then stays until the process ends, because the device may still write to
    /// it.
    fn unregister(&self, memory: MemoryId) -> Result<()> {
        unreachable!("{memory:?} of a device that registers none")
    }

    /// Returns the place in which page memory was allocated or adopted.
    fn place_of(&self, _memory: MemoryId) -> Place {
        Place::Host
    }

    /// Calls `each` for each move that the commands make, in order, with the source place, the target place
    /// and the number of bytes. Bytes in staging are in [`Place::Host`].
    fn for_each_move(&self, commands: &[Command], each: &mut dyn FnMut(Place, Place, u64)) {
        counted::moves(commands, |memory| self.place_of(memory), each);
    }

    /// Gives a range of page memory an id of its own, so that a page can live in it. The new id is released
    /// like any other. Releasing it leaves the bytes to the memory that contains them, which the caller
    /// releases later.
    ///
    /// # Errors
    /// `MemoryRefused` if the device hands out whole memories only; a device error.
    fn alias(&self, span: Span) -> Result<MemoryId> {
        let reason = format!("{} keeps pages in memory of its own only", self.label());
        Err(Error::Refused(Refused::Memory { len: span.len, reason }))
    }

    /// Returns where page memory begins: a space, and an offset in it. Two memories share a byte only if they
    /// have the same space and their ranges in it overlap. An id from [`Device::alias`] has the space of the
    /// memory that contains it.
    fn origin(&self, memory: MemoryId) -> (u64, u64) {
        (memory.0, 0)
    }

    /// Gives page memory a new id and retires the current one: a read under the old id that has not finished
    /// when this method returns reads nothing. The caller must have waited for the fence of the memory's last
    /// use. A device that [supports `read_now`](Self::reads_now) must implement this method.
    ///
    /// # Errors
    /// A device error. An unknown id is a bug in the caller and panics.
    fn rename(&self, memory: MemoryId) -> Result<MemoryId> {
        Ok(memory)
    }

    /// Queues a copy of another device's page memory to memory of this device, after all work queued on that
    /// lane of both devices. Lists queued on the lane later, on either device, run after the copy. The host
    /// does not wait. Returns `None`, with nothing queued, if the two devices have no direct path. Until the
    /// copy's fence has passed, the caller must not let another lane change the source or a thread release
    /// it.
    ///
    /// # Errors
    /// A device error; a part of the copy may have been queued.
    fn copy_from(
        &self,
        _lane: Lane,
        _other: &dyn Device,
        _source: Span,
        _target: Span,
    ) -> Result<Option<Pending>> {
        Ok(None)
    }
}

/// Request counts and byte totals of a memory source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryStats {
    /// Bytes obtained from the driver, in use or idle.
    pub reserved_bytes: u64,
    /// Bytes in use, after rounding up to the sizes handed out.
    pub used_bytes: u64,
    /// Allocations served from memory already held.
    pub hits: u64,
    /// Allocations requested from the driver.
    pub misses: u64,
}

/// Shared bytes of page memory. They stay valid after the memory is released.
pub type PageBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// A device's id for an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemoryId(pub u64);

impl Number for MemoryId {
    fn number(self) -> u64 {
        self.0
    }

    fn of(number: u64) -> Self {
        Self(number)
    }
}

/// A range of page memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The allocation that contains the range.
    pub memory: MemoryId,
    /// Offset of the first byte.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
}

impl Span {
    /// Returns whether the two ranges share a byte.
    pub(crate) fn overlaps(self, other: Self) -> bool {
        let before = |a: Self, b: Self| a.offset.saturating_add(a.len) <= b.offset;
        self.memory == other.memory && !before(self, other) && !before(other, self)
    }
}

/// The length, in bytes, of the longest copy between page memory and the host that takes only microseconds
/// and waits for no other copy. A longer copy occupies its lane for its whole duration, so it belongs in
/// [`Lane::Drain`] if other work waits for the lane.
pub const SHORT_COPY_LEN_MAX: u64 = 64 << 10;

/// An ordered queue of device work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lane {
    /// Deltas, reads and gathers: work that must see commits in order. Only the applier submits to it.
    Apply,
    /// Bulk copies to the host of bytes that another lane copied aside: snapshot pages and long reads.
    Drain,
    /// Work that waits for callers' streams, which may stall. No other lane ever waits for this one.
    Callers,
    /// A committer's work before its batch is logged: gathers, verification and checksums. It delays no other
    /// lane and waits for no bulk copies of other lanes.
    Stage,
    /// Page loads while the store is in use, alternating with [`Lane::Drain`]: while the device checksums the
    /// bytes that one lane brought, the other lane uses the bus.
    Load,
}

impl Lane {
    /// All lanes, in the order of their numbers.
    pub const ALL: [Self; 5] = [Self::Apply, Self::Drain, Self::Callers, Self::Stage, Self::Load];
}

/// A point in a lane that passes when every list up to it is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fence {
    /// The lane to which the fence belongs.
    pub lane: Lane,
    /// The fence's number, rising from 1 in each lane. Fence 0 has always passed.
    pub value: u64,
}
