//! The interface to the memory in which pages are stored. Work on that memory is queued as lists of commands.
//!
//! A kernel launch costs microseconds, and a logged commit should need only one. Work is therefore submitted to a
//! device as lists of commands, and a caller that needs a result waits for a fence. Handles identify memory and
//! staging. Bytes cross the interface only in staging. `HostDevice` defines correct behavior (I11): every other device
//! produces the same bytes for the same lists.
//!
//! The engine holds an `EngineDevice`, which counts the work of an `Arc<dyn Device>`. The indirect call for each list
//! takes a few nanoseconds, against microseconds for a launch.

#[cfg(feature = "cuda")]
pub mod cuda;
pub mod host;
pub mod multi;
pub(crate) mod spans;
pub(crate) mod sums;
mod digests;
#[cfg(feature = "nccl")]
mod digest_tree;
mod commands;
mod staging;
mod streams;
mod stream_guard;
mod bytes;
#[cfg(feature = "nccl")]
mod communicator;
mod many_deltas;
mod memory_link;
mod lent_ranges;
mod stream_uses;
mod unified;
mod abilities;
pub(crate) mod counts;

use std::any::Any;
use std::sync::Arc;

use remanent_format::Place;
use remanent_format::ids::Number;

pub use self::abilities::{
    Abilities, BulkMemory, DeviceFiles, DeviceStreams, DirectReads, HostBytes, KernelAddresses, LentMemory,
    MemoryCache, PeerCopies, UnifiedMemory,
};
pub use self::bytes::DeviceBytes;
pub use self::commands::{
    BITMAP_LEN_END, Command, CommandList, INDEX_OUT_OF_BOUNDS, INDEX_TWICE, IndexList, Payload, Piece,
    PieceKind, Selection, StagingSpan,
};
#[cfg(feature = "nccl")]
pub(crate) use self::communicator::{
    Collective, CollectiveKind, QueuedPoint, RankTransport, SourceUse, sealed,
};
#[cfg(feature = "nccl")]
pub use self::communicator::{CollectiveSource, Communicator, Element, QueuedCollective, Reduction};
pub(crate) use self::counts::EngineDevice;
#[cfg(feature = "nccl")]
pub(crate) use self::digest_tree::{digest_of_bytes, digest_of_chunks};
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
use crate::error::Result;
pub use crate::options::caller_memory::{CallerMemory, HostMemory};

/// A closure that receives a function, which maps page memory to its place: the argument of [`Device::read_places`].
pub type ReadPlaces<'a> = &'a mut dyn FnMut(&dyn Fn(MemoryId) -> Place);

/// A device: the memory that contains pages, and the queues through which it is changed.
///
/// Every device implements these methods. [`abilities`](Self::abilities) returns the abilities that only some devices
/// have.
pub trait Device: Any + Send + Sync {
    /// Returns the device's name for reports, such as `host` or `cuda:0 (NVIDIA H200)`.
    fn label(&self) -> String;

    /// Allocates page memory with unspecified contents. `len` may be 0.
    ///
    /// # Errors
    /// `OutOfMemory`; `Unavailable` if the device has no memory in the place.
    fn allocate(&self, place: Place, len: u64) -> Result<MemoryId>;

    /// Returns whether page memory of this length in this place contains zeros when it is allocated. If so, a new page
    /// needs no command to clear its memory.
    fn allocates_zeros(&self, _place: Place, _len: u64) -> bool {
        false
    }

    /// Frees page memory. The caller must have waited for the fence of its last use.
    ///
    /// # Errors
    /// A device error. An unknown id is a bug in the caller and panics.
    fn release(&self, memory: MemoryId) -> Result<()>;

    /// Calls `read` with a function that returns the place in which page memory was allocated or adopted. Nothing is
    /// allocated, and a device locks its table at most once for all lookups.
    fn read_places(&self, read: ReadPlaces<'_>);

    /// Returns whether bytes cross a bus between staging and page memory. If they do, lists checksum page memory with
    /// [`Command::Crc`] after a copy into it and before a copy out of it, because a checksum of staging proves nothing
    /// about page memory. Within host memory, a second checksum would read the same bytes again.
    fn crosses_bus(&self) -> bool {
        false
    }

    /// Allocates zeroed host memory that lanes copy from and to.
    ///
    /// # Errors
    /// `OutOfMemory` if the system has no memory left.
    fn staging(&self, len: usize) -> Result<Staging>;

    /// Queues a list on a lane. Its commands run in order, after every earlier list of the lane. The list owns its
    /// staging until [`Pending::finish`] returns it. Afterwards, ranges of staging that the list read have unspecified
    /// contents.
    ///
    /// # Errors
    /// A device error. No command of the list runs in this case.
    fn submit(&self, lane: Lane, list: CommandList) -> Result<Pending>;

    /// Returns the number of the newest fence of the lane that has passed.
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

    /// Returns the abilities that this device has beyond the methods of this trait.
    fn abilities(&self) -> Abilities<'_> {
        Abilities::default()
    }
}

/// Counts of the requests to a memory source, and the bytes that it holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryStats {
    /// Bytes that the source has obtained from the driver, in use or idle.
    pub reserved_bytes: u64,
    /// Bytes in use, including the bytes added by rounding lengths up.
    pub used_bytes: u64,
    /// Allocations served from memory that the source already held.
    pub hits: u64,
    /// Allocations for which the source requested memory from the driver.
    pub misses: u64,
}

/// Shared bytes of page memory. The bytes stay valid after the page memory is released.
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

/// The length, in bytes, of the longest *short* copy between page memory and the host. A short copy takes only
/// microseconds and waits for no other copy. A longer copy occupies its lane for its whole duration. If other work
/// waits for that lane, submit the copy to [`Lane::Drain`].
pub const SHORT_COPY_LEN_MAX: u64 = 64 << 10;

/// An ordered queue of device work. Each lane serves one purpose, so that slow work delays only its own lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lane {
    /// Work that must observe commits in order: deltas, reads and gathers. Only the applier submits to this lane.
    Apply,
    /// Bulk copies to the host: snapshot pages and long reads. Another lane has first copied the bytes to memory that
    /// no commit changes.
    Drain,
    /// Work that waits for callers' streams, which may stall. No other lane ever waits for this lane.
    Callers,
    /// A committer's work before its batch is logged: gathers, verification and checksums. This lane delays no other
    /// lane and waits for no bulk copies of other lanes.
    Stage,
    /// Page loads while the store is in use. Loads alternate between this lane and [`Lane::Drain`]: while the device
    /// checksums the bytes that one lane copied, the other lane uses the bus.
    Load,
}

impl Lane {
    /// All lanes, in the order of their numbers.
    pub const ALL: [Self; 5] = [Self::Apply, Self::Drain, Self::Callers, Self::Stage, Self::Load];
}

/// A point in a lane. A fence passes when all lists submitted to the lane before it are done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fence {
    /// The lane to which the fence belongs.
    pub lane: Lane,
    /// The fence's number, which rises from 1 in each lane. Fence 0 has always passed.
    pub value: u64,
}
