//! The seam to the memory in which pages live: a queue of commands, not a set of calls.
//!
//! A launch on a GPU costs microseconds while a logged commit should cost one. So work goes to a device as
//! lists of commands, and a caller that needs a result waits for a fence. Memory and staging are named by
//! handles; bytes cross the seam only in staging. `HostDevice` defines what is correct (I11): every other
//! device gives the same bytes for the same lists.
//!
//! The engine holds `Arc<dyn Device>`: one indirect call for each list, a few nanoseconds against a launch's
//! microseconds.

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
mod counted;

use std::any::Any;
use std::sync::Arc;

use remanent_format::Place;
use remanent_format::ids::Number;

pub use self::bytes::DeviceBytes;
pub use self::commands::{
    BITMAP_LEN_END, Command, CommandList, INDEX_OUT_OF_BOUNDS, INDEX_TWICE, IndexList, Payload, Piece,
    PieceKind, Selection, StagingSpan,
};
pub use self::counted::{AllocationStats, LaneStats, TransferStats};
pub(crate) use self::counted::{CountedDevice, DeviceCounts};
pub use self::digests::{
    DIGEST_CHUNK_LEN, DIGEST_KEY_LEN, DIGEST_LEN, DIGEST_SEED_LEN, Digest, digest_count, digest_key,
};
pub(crate) use self::memory_link::{MemoryLink, MemoryOwner, StoreEnd, drop_when_passed};
pub use self::staging::{Pending, ReturnedStaging, Staging, StagingMemory};
pub use self::stream_guard::StreamGuard;
pub use self::stream_uses::Access;
pub(crate) use self::stream_uses::{LastUse, StreamUses};
pub use self::streams::{RawStream, StreamEvent};
pub use self::unified::{UnifiedHint, UnifiedSide, UnifiedSupport};
use crate::disk::FileMemory;
use crate::error::{Error, Result};
pub use crate::options::CallerMemory;

/// A memory that holds pages, and the queues through which it is changed.
pub trait Device: Any + Send + Sync {
    /// The device's name in reports: `host`, `cuda:0 (NVIDIA H200)`.
    fn label(&self) -> String;

    /// Allocates page memory of unspecified content. `len` may be 0.
    ///
    /// # Errors
    /// `OutOfMemory`, `PlaceUnavailable`.
    fn allocate(&self, place: Place, len: u64) -> Result<MemoryId>;

    /// As [`allocate`](Self::allocate), for a caller that must not wait for the device's work. The device is
    /// out of memory as soon as it would have to give something back first, or to wait.
    ///
    /// # Errors
    /// As for `allocate`.
    fn allocate_at_once(&self, place: Place, len: u64) -> Result<MemoryId> {
        self.allocate(place, len)
    }

    /// Allocates page memory for several pages, in their order, as [`allocate`](Self::allocate) does for
    /// each. Adds it to `made`, which has room for it; without success, what was allocated by then.
    ///
    /// # Errors
    /// As for `allocate`.
    fn allocate_all(&self, pages: &[(Place, u64)], made: &mut Vec<MemoryId>) -> Result<()> {
        for (place, len) in pages {
            made.push(self.allocate(*place, *len)?);
        }
        Ok(())
    }

    /// Whether page memory of this length, in this place, holds zeros when it is allocated. Then a new page
    /// costs nothing until it is written to, however long it is.
    fn allocates_zeros(&self, _place: Place, _len: u64) -> bool {
        false
    }

    /// Whether bytes cross a bus between staging and page memory. There a sum of one side says nothing about
    /// the other, and lists sum page memory with [`Command::Crc`] after a copy into it, and before one out of
    /// it. Within the host's memory a second sum would read the same bytes again.
    fn crosses_bus(&self) -> bool {
        false
    }

    /// Gives page memory back. The caller has waited for the fence of its last use.
    ///
    /// # Errors
    /// A device error; an unknown id is a bug of the caller's and panics.
    fn release(&self, memory: MemoryId) -> Result<()>;

    /// Gives memory of several pages back, as [`release`](Self::release) does for each, with the place
    /// that it is in. Tells `failed` of those that the device does not take back, by their index.
    fn release_all(&self, memory: &[(Place, MemoryId)], failed: &mut dyn FnMut(usize, Error)) {
        for (index, (_, memory)) in memory.iter().enumerate() {
            if let Err(error) = self.release(*memory) {
                failed(index, error);
            }
        }
    }

    /// Host memory that a lane copies from and to; zeroed.
    ///
    /// # Errors
    /// `OutOfMemory`, if the system has none left.
    fn staging(&self, len: usize) -> Result<Staging>;

    /// Queues a list on a lane. Its commands run in order, after every earlier list of the lane; the list
    /// owns its staging until the returned [`Pending`] gives it back. Ranges of staging that the list read
    /// from come back with unspecified content.
    ///
    /// # Errors
    /// A device error; then nothing of the list runs.
    fn submit(&self, lane: Lane, list: CommandList) -> Result<Pending>;

    /// The newest fence of the lane that has passed.
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

    /// Makes all later lists of `lane` run after the work that is in the caller's stream now. The host does
    /// not wait. A slow stream holds up the whole lane, so this is for [`Lane::Callers`].
    ///
    /// # Errors
    /// `StreamRefused`, with nothing changed; a device error.
    fn wait_external(&self, lane: Lane, stream: RawStream) -> Result<()>;

    /// Makes all later work of the caller's stream run after `fence` has passed. The host does not wait.
    ///
    /// # Errors
    /// `StreamRefused`, with nothing changed; a device error.
    fn signal_external(&self, stream: RawStream, fence: Fence) -> Result<()>;

    /// Waits, on this thread, until the work that is in the caller's stream now is done. No lane takes part:
    /// a stream that stands still holds up this thread and no other, even if others wait for other streams.
    ///
    /// # Errors
    /// `StreamRefused`, a device error.
    fn wait_stream(&self, stream: RawStream) -> Result<()>;

    /// Whether callers' streams can be waited for, and told to wait.
    fn supports_streams(&self) -> bool {
        false
    }

    /// The point at which a caller's stream is now. It is waited for later, also when the stream is gone.
    ///
    /// # Errors
    /// `StreamRefused`, a device error.
    fn stream_event(&self, stream: RawStream) -> Result<StreamEvent> {
        let reason = "the device gives no points of streams";
        Err(Error::StreamRefused { stream: stream.handle(), reason })
    }

    /// Waits, on this thread, until a point of a stream has passed. No lane takes part.
    ///
    /// # Errors
    /// A device error.
    fn wait_event(&self, _point: &StreamEvent) -> Result<()> {
        unreachable!("a device that gives no points")
    }

    /// Whether a point of a stream has passed.
    ///
    /// # Errors
    /// A device error.
    fn has_passed(&self, _point: &StreamEvent) -> Result<bool> {
        unreachable!("a device that gives no points")
    }

    /// Makes all later work of a caller's stream run after a point of another one. The host does not wait.
    ///
    /// # Errors
    /// `StreamRefused`, with nothing changed; a device error.
    fn hold_stream(&self, _stream: RawStream, _point: &StreamEvent) -> Result<()> {
        unreachable!("a device that gives no points")
    }

    /// The address at which kernels find page memory. It stays the same until the memory is released. `None`
    /// where no kernel reaches it: memory of the host alone, and memory of length 0.
    fn address(&self, memory: MemoryId) -> Option<u64>;

    /// The GPU that page memory is of, or is registered with, by its CUDA ordinal. `None` for memory of the
    /// host alone.
    fn gpu_of(&self, _memory: MemoryId) -> Option<u32> {
        None
    }

    /// The bytes of page memory as they are now. They are never seen to change: a caller that wants them up
    /// to date waits for the lanes first, and asks again later. `None` where they do not lie in memory of the
    /// host.
    fn bytes(&self, memory: MemoryId) -> Option<PageBytes>;

    /// Whether [`Device::read_now`] may read any memory.
    fn reads_now(&self) -> bool {
        false
    }

    /// Copies bytes of page memory from `offset` on to `out`, on the caller's thread and while lanes go on.
    /// The bytes are those of one moment between two commands. Returns at once whether it did: not where the
    /// memory has been released, is shorter, or does not lie in memory of the host, nor where a list that may
    /// write to it has yet to pass.
    fn read_now(&self, memory: MemoryId, offset: u64, out: &mut [u8]) -> bool {
        let _ = (memory, offset, out);
        false
    }

    /// Gives memory that no page and no staging uses back to its source, and returns how many bytes that was.
    /// A GPU's driver waits for everything that the GPU has to do, the caller's own work included. A device
    /// that keeps nothing back has nothing to give.
    ///
    /// # Errors
    /// A device error.
    fn trim(&self) -> Result<u64> {
        Ok(0)
    }

    /// The bytes asked for and held, by the places that share them; empty for a device that keeps nothing
    /// back. Places that share another one's memory are counted there.
    fn memory_stats(&self) -> Vec<(Place, MemoryStats)> {
        Vec::new()
    }

    /// What it can do for page memory in [`Place::Unified`].
    fn unified(&self) -> UnifiedSupport {
        UnifiedSupport::default()
    }

    /// Gives a hint for page memory, which ends when the memory is released. Returns when the hint is queued.
    ///
    /// # Errors
    /// `HintRefused` for memory in another place than [`Place::Unified`], or where the device takes no hints;
    /// a device error.
    fn hint_unified(&self, memory: MemoryId, _hint: UnifiedHint) -> Result<()> {
        let reason = "the device has no memory that moves between a GPU and the host";
        Err(Error::HintRefused { place: self.place_of(memory), reason })
    }

    /// Takes memory of the caller's for page memory, and says in which place it is. It is released like any
    /// other, which leaves it to its owner.
    ///
    /// # Errors
    /// `MemoryRefused` where the device can tell that it is not what the caller says; a device error.
    fn adopt(&self, memory: &CallerMemory) -> Result<(MemoryId, Place)> {
        let reason = format!("{} knows no memory but its own", self.label());
        Err(Error::MemoryRefused { len: memory.byte_len(), reason })
    }

    /// Takes the memory of a file for a target of copies. Lists name it as they name page memory: the bytes
    /// that they copy to it are the file's, and lie in [`Place::Host`]. It is given back by
    /// [`unregister`](Self::unregister), and by nothing else.
    ///
    /// # Errors
    /// `MemoryRefused`, `OutOfMemory`, a device error. Then the mapping is gone.
    fn register(&self, memory: Box<dyn FileMemory>) -> Result<MemoryId> {
        let reason = format!("{} copies to no files", self.label());
        Err(Error::MemoryRefused { len: memory.byte_len(), reason })
    }

    /// Ends the mapping of a file's memory. The caller has waited for the fence of its last use.
    ///
    /// # Errors
    /// A device error. The mapping then stays until the process ends: the device may still write to it.
    fn unregister(&self, memory: MemoryId) -> Result<()> {
        unreachable!("{memory:?} of a device that registers none")
    }

    /// The place that page memory was allocated in, or adopted in.
    fn place_of(&self, _memory: MemoryId) -> Place {
        Place::Host
    }

    /// Tells what commands move, in their order: from which place, to which one, and how many bytes. Bytes
    /// that lie in staging are in [`Place::Host`].
    fn tell_moves(&self, commands: &[Command], tell: &mut dyn FnMut(Place, Place, u64)) {
        counted::moves(commands, |memory| self.place_of(memory), tell);
    }

    /// Gives a range of page memory a name of its own, so that a page can live there. The new name is
    /// released like any other. That leaves the bytes to the memory in which they lie, which the caller
    /// releases later.
    ///
    /// # Errors
    /// `MemoryRefused` where the device gives out whole memories only; a device error.
    fn alias(&self, span: Span) -> Result<MemoryId> {
        let reason = format!("{} keeps pages in memory of its own only", self.label());
        Err(Error::MemoryRefused { len: span.len, reason })
    }

    /// Where page memory begins: a space, and an offset in it. Two memories share a byte only if they are of
    /// one space and their ranges there overlap. A name from [`Device::alias`] is of the space of its memory.
    fn origin(&self, memory: MemoryId) -> (u64, u64) {
        (memory.0, 0)
    }

    /// Gives page memory another name, and takes its present one out of use: a read under that name that is
    /// not over when this returns reads nothing. The caller has waited for the fence of its last use. A
    /// device that [reads now](Self::reads_now) must have this method.
    ///
    /// # Errors
    /// A device error; an unknown name is a bug of the caller's and panics.
    fn rename(&self, memory: MemoryId) -> Result<MemoryId> {
        Ok(memory)
    }

    /// Queues a copy of another device's page memory to memory of this one, after everything that is queued
    /// on that lane of both. Lists queued on it later, on either device, run after the copy. The host does
    /// not wait. `None`, with nothing queued, where the two know no such way. Until the copy's fence has
    /// passed, the caller lets no other lane change the source, and lets no thread release it.
    ///
    /// # Errors
    /// A device error; a part may have been queued.
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

/// The requests to a source of memory, and the bytes that it holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryStats {
    /// Bytes held from the driver, in use or idle.
    pub reserved_bytes: u64,
    /// Bytes in use, rounded up as they are handed out.
    pub used_bytes: u64,
    /// Allocations that were served from memory held already.
    pub hits: u64,
    /// Allocations that the driver was asked for.
    pub misses: u64,
}

/// Bytes of page memory, shared. They outlive it.
pub type PageBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// A device's own name for an allocation.
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
    /// The allocation that it lies in.
    pub memory: MemoryId,
    /// Offset of its first byte.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
}

impl Span {
    /// Whether a byte lies in both ranges.
    pub(crate) fn overlaps(self, other: Self) -> bool {
        let before = |a: Self, b: Self| a.offset.saturating_add(a.len) <= b.offset;
        self.memory == other.memory && !before(self, other) && !before(other, self)
    }
}

/// The longest copy between page memory and the host, in bytes, that is done in microseconds and waits for no
/// other one. A longer one holds up its lane for as long as it takes, so it belongs in [`Lane::Drain`] where
/// others wait for the lane.
pub const SHORT_COPY_LEN_MAX: u64 = 64 << 10;

/// An ordered queue of device work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lane {
    /// Deltas, reads, gathers: work that must see commits in order. Only the applier submits here.
    Apply,
    /// Bulk copies to the host of bytes that were copied aside in another lane: snapshots' pages, long reads.
    Drain,
    /// Work that waits for callers' streams, which may stand still: no other lane ever waits for it.
    Callers,
    /// Work of a committer before its batch is logged: it gathers, proves and sums. It holds up no other
    /// lane, and waits for no bulk copies of others.
    Stage,
    /// Pages that are loaded while the store is in use, in turns with [`Lane::Drain`]: while the device sums
    /// what one lane brought, the other one uses the bus.
    Load,
}

impl Lane {
    /// All lanes, in the order of their numbers.
    pub const ALL: [Self; 5] = [Self::Apply, Self::Drain, Self::Callers, Self::Stage, Self::Load];
}

/// A point in a lane: passed when every list up to it is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fence {
    /// The lane that it is a point of.
    pub lane: Lane,
    /// Rising from 1 in each lane; 0 has always passed.
    pub value: u64,
}
