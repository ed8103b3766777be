//! The seam to the memory in which pages live: a queue of commands, not a set of calls.
//!
//! A launch on a GPU costs microseconds while a logged commit should cost one. So work goes to a device as
//! lists of commands, and a caller that needs a result waits for a fence. Memory and staging are named by
//! handles; bytes cross the seam only in staging. `HostDevice` defines what is correct (I11): every other
//! device gives the same bytes for the same lists.
//!
//! The engine holds `Arc<dyn Device>`: one indirect call a list, a few nanoseconds against a launch's
//! microseconds.

#[cfg(feature = "cuda")]
pub mod cuda;
pub mod host;
pub mod multi;
pub(crate) mod spans;
pub(crate) mod sums;
mod stream_guard;
mod bytes;
mod memory_link;
mod lent_ranges;
mod stream_uses;
mod counted;

use std::any::Any;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use remanent_format::ids::Number;
use remanent_format::{Place, Width};

pub use self::bytes::DeviceBytes;
pub use self::counted::{AllocationStats, LaneStats, TransferStats};
pub(crate) use self::counted::{CountedDevice, DeviceCounts};
pub(crate) use self::memory_link::{MemoryLink, MemoryOwner, StoreEnd, drop_when_passed};
pub use self::stream_guard::StreamGuard;
pub use self::stream_uses::Access;
pub(crate) use self::stream_uses::{LastUse, StreamUses};
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

    /// Takes memory of the caller's for page memory, and says in which place it is. It is released like any
    /// other, which leaves it to its owner.
    ///
    /// # Errors
    /// `MemoryRefused` where the device can tell that it is not what the caller says; a device error.
    fn adopt(&self, memory: &CallerMemory) -> Result<(MemoryId, Place)> {
        let reason = format!("{} knows no memory but its own", self.label());
        Err(Error::MemoryRefused { len: memory.byte_len(), reason })
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

/// A stream of the caller's, as the device names it: for a GPU the handle of a CUDA stream (`CUstream`,
/// `cudaStream_t`, `torch.cuda.Stream.cuda_stream`) as a number.
///
/// The code that makes one, by `RawStream::from_cuda`, vouches for the handle, for a driver follows any
/// number that it is given. A device that knows no streams refuses all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RawStream(pub(crate) u64);

impl RawStream {
    /// Whether it is a default stream: every GPU has one by the same handle.
    pub(crate) fn is_default(self) -> bool {
        // The one of old, and the two that CUDA names: legacy, and one a thread.
        self.0 <= 2
    }

    /// The handle as a number.
    #[must_use]
    pub fn handle(self) -> u64 {
        self.0
    }
}

/// A point of a caller's stream, as the device that gave it knows it. Clones are the same point.
#[derive(Clone)]
pub struct StreamEvent(Arc<dyn Any + Send + Sync>);

impl StreamEvent {
    /// A point. For devices.
    pub fn new(point: impl Any + Send + Sync) -> Self {
        Self(Arc::new(point))
    }

    /// What the device made it of.
    ///
    /// # Panics
    /// If another kind of device did.
    #[must_use]
    pub fn of<T: Any>(&self) -> &T {
        self.0.downcast_ref().expect("a point that this device gave")
    }
}

impl std::fmt::Debug for StreamEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StreamEvent")
    }
}

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

/// Work for a lane, in order.
#[derive(Debug, Default)]
pub struct CommandList {
    /// The commands, in order.
    pub commands: Vec<Command>,
    /// The staging that the commands name by index.
    pub staging: Vec<Staging>,
}

/// A range of one of a list's stagings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagingSpan {
    /// Index into [`CommandList::staging`].
    pub index: usize,
    /// Offset of its first byte.
    pub offset: usize,
    /// Number of bytes.
    pub len: usize,
}

/// One step of a list. Ranges were checked by the caller; a device panics on one that is out of bounds.
#[derive(Clone, Debug)]
pub enum Command {
    /// Staging to page memory; equal lengths.
    Upload {
        /// The bytes copied.
        source: StagingSpan,
        /// The place they go to.
        target: Span,
    },
    /// Page memory to staging; equal lengths.
    Download {
        /// The bytes copied.
        source: Span,
        /// The place they go to.
        target: StagingSpan,
    },
    /// Deltas, in order. Pieces of one page are applied in the order of the list.
    Apply {
        /// The deltas, in order.
        pieces: Vec<Piece>,
    },
    /// Page memory to page memory; equal lengths, not overlapping.
    Copy {
        /// The bytes copied.
        source: Span,
        /// The place they go to.
        target: Span,
    },
    /// Repeats the first `width` bytes of `pattern` over the target, whose length is a multiple of it.
    Fill {
        /// The range that is filled.
        target: Span,
        /// The pattern, in its first `width` bytes.
        pattern: [u8; 16],
        /// Length of the pattern.
        width: Width,
    },
    /// Many pieces into one area: each source to its offset in `target`.
    Gather {
        /// The bytes copied, each with its offset in `target`.
        sources: Vec<(Span, u64)>,
        /// The area they go to.
        target: Span,
    },
    /// One area out to many pieces: each target from its offset in `source`.
    Scatter {
        /// The bytes copied.
        source: Span,
        /// The offset in `source`, and the place that its bytes go to.
        targets: Vec<(u64, Span)>,
    },
    /// One bit an element, lowest bit first: 1 where the two differ. Equal lengths, multiples of `width`.
    Diff {
        /// One range compared.
        left: Span,
        /// The other range compared.
        right: Span,
        /// The element's width.
        width: Width,
        /// The range for the bits: one byte for eight elements, rounded up, overlapping neither.
        target: Span,
    },
    /// The indices of the bits that are set, rising. For each bitmap four little-endian bytes hold the number
    /// of set bits.
    Select {
        /// The bitmaps. None writes where another one reads or writes.
        bitmaps: Vec<Selection>,
        /// The place for the numbers of set bits.
        target: StagingSpan,
    },
    /// CRC-32 of each source, four little-endian bytes each.
    Crc {
        /// The ranges to sum.
        sources: Vec<Span>,
        /// The place for the sums.
        target: StagingSpan,
    },
    /// Single elements, one after the other: element `i` of the target is the one of `source` that index `i`
    /// names.
    Pick {
        /// The elements to pick from.
        source: Span,
        /// The elements' width; both lengths are multiples of it.
        width: Width,
        /// Little-endian u32 indices into `source`, one for each element of `target`.
        indices: StagingSpan,
        /// The place for the picked elements; not overlapping the source.
        target: Span,
    },
    /// Looks at indices that only the device has seen. For each list four little-endian bytes hold the sum of
    /// [`INDEX_OUT_OF_BOUNDS`] and [`INDEX_TWICE`] as they are found, 0 if all indices are good.
    Validate {
        /// The lists to look at.
        lists: Vec<IndexList>,
        /// The place for the findings.
        target: StagingSpan,
    },
}

/// A bitmap in page memory, lowest bit first, and the place for the indices of its set bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Selection {
    /// The bits; fewer bytes than [`BITMAP_LEN_END`].
    pub bits: Span,
    /// Room for little-endian u32, not overlapping the bits; offset and length are multiples of 4. Indices
    /// beyond the room are left out; room beyond the indices stays as it is.
    pub indices: Span,
}

impl Selection {
    /// Refuses a selection that breaks these rules. For devices.
    ///
    /// # Panics
    /// If it breaks one.
    pub fn check(&self) {
        let Self { bits, indices } = *self;
        assert!(bits.len < BITMAP_LEN_END, "a bitmap of {} bytes", bits.len);
        assert!(indices.offset.is_multiple_of(4) && indices.len.is_multiple_of(4), "room for whole indices");
        let are_apart = bits.memory != indices.memory
            || bits.offset.saturating_add(bits.len) <= indices.offset
            || indices.offset.saturating_add(indices.len) <= bits.offset;
        assert!(are_apart, "indices where their bitmap is: {self:?}");
    }
}

/// The length in bytes from which a bitmap has bits whose number takes more than 32 bits.
pub const BITMAP_LEN_END: u64 = 1 << 29;

/// Indices in page memory, all of which should be different and below a bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexList {
    /// Little-endian u32 indices; offset and length are multiples of 4.
    pub indices: Span,
    /// The number of elements that the indices name.
    pub bound: u64,
}

/// An index is not below its bound.
pub const INDEX_OUT_OF_BOUNDS: u32 = 1;
/// An index is in its list twice.
pub const INDEX_TWICE: u32 = 2;

/// One delta: bytes from a staging (or from page memory) merged into a range of page memory.
#[derive(Clone, Debug)]
pub struct Piece {
    /// The range of page memory concerned. For `Sparse`, the range in which the elements lie.
    pub target: Span,
    /// The place of the delta's bytes.
    pub payload: Payload,
    /// The way they are merged.
    pub kind: PieceKind,
}

/// The place of a delta's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payload {
    /// In one of the list's stagings, from this offset on.
    Staging {
        /// Index into [`CommandList::staging`].
        index: usize,
        /// Offset of the first byte.
        offset: usize,
    },
    /// In a range of page memory.
    Device(Span),
}

/// The way a delta's bytes are merged. Offsets are relative to the payload's first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PieceKind {
    /// `target.len` bytes replace the target.
    Dense,
    /// A bitmap at 0 (one bit an element, lowest bit first), bytes of the whole range at `bytes_at`:
    /// elements whose bit is 1 are replaced.
    Masked {
        /// The element's width; `target.len` is a multiple of it.
        width: Width,
        /// Offset of the bytes.
        bytes_at: usize,
    },
    /// `count` little-endian u32 element indices at 0, all different; the elements' bytes at `values_at`.
    Sparse {
        /// The element's width.
        width: Width,
        /// Number of elements.
        count: usize,
        /// Offset of the values.
        values_at: usize,
    },
}

/// Host memory that a lane copies from or to. It is readable and writable while the caller owns it. While a
/// list owns it no other code can touch it, which is what asynchronous copies demand.
pub struct Staging(Box<dyn StagingMemory>);

/// The memory that a device makes staging of.
pub trait StagingMemory: Any + Send + Sync {
    /// The bytes, to read.
    fn bytes(&self) -> &[u8];
    /// The bytes, to write.
    fn bytes_mut(&mut self) -> &mut [u8];
}

impl StagingMemory for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }
    fn bytes_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl Staging {
    /// Staging made of that memory.
    pub fn new(memory: impl StagingMemory + 'static) -> Self {
        Self(Box::new(memory))
    }

    /// The memory that it is made of. For devices, to tell it from other devices' staging.
    #[must_use]
    pub fn memory(&self) -> &dyn Any {
        &*self.0
    }
}

impl Deref for Staging {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.0.bytes()
    }
}

impl DerefMut for Staging {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.0.bytes_mut()
    }
}

impl std::fmt::Debug for Staging {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Staging({} bytes)", self.len())
    }
}

/// A list in flight. It keeps the list's staging until the fence has passed.
#[derive(Debug)]
pub struct Pending {
    fence: Fence,
    returned: Arc<ReturnedStaging>,
}

/// The place where a device leaves a list's staging when the list is done.
pub type ReturnedStaging = crate::base::sync::Mutex<Vec<Staging>>;

impl Pending {
    /// A list that passes `fence` and whose staging will lie in `returned` by then. For devices.
    #[must_use]
    pub fn new(fence: Fence, returned: Arc<ReturnedStaging>) -> Self {
        Self { fence, returned }
    }

    /// The fence that passes when the list is done.
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.fence
    }

    /// Waits for the fence and gives the staging back, in the list's order.
    ///
    /// # Errors
    /// A device error.
    pub fn finish(self, device: &dyn Device) -> Result<Vec<Staging>> {
        device.wait(self.fence)?;
        Ok(std::mem::take(&mut *self.returned.lock()))
    }
}
