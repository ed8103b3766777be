//! A device whose n-th call fails, or whose n-th copy flips a bit, to test that every error is handled.
//!
//! The failed call has no other effect. After a fault that loses the context, every later call fails too, as with a
//! GPU. Any other fault occurs once.
//!
//! A copy with a flipped bit reports no error. The flipped bit represents a fault of the bus, of staging or of host
//! memory.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use remanent_format::{Place, Width};

use crate::base::sync::Mutex;
use crate::device::sums::PROVEN_LEN_MIN;
use crate::device::{
    Abilities, CallerMemory, Command, CommandList, Device, DeviceFiles, DeviceStreams, DirectReads, Fence,
    Lane, LentMemory, MemoryCache, MemoryId, MemoryStats, Payload, Pending, Piece, PieceKind, RawStream,
    Span, Staging, StagingSpan, StreamEvent,
};
use crate::disk::FileMemory;
use crate::error::{Error, Result};

/// A device that forwards all calls to another device until its fault occurs.
pub struct FaultyDevice {
    inner: Arc<dyn Device>,
    state: Mutex<FaultState>,
    crosses_bus: bool,
}

/// A call that can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceCall {
    /// A call to [`Device::allocate`].
    Allocate,
    /// A call to [`Device::release`].
    Release,
    /// A call to [`Device::staging`].
    Staging,
    /// A call to [`Device::submit`].
    Submit,
    /// A call to [`Device::wait`].
    Wait,
    /// A call to [`Device::after`].
    After,
    /// A call to [`DeviceStreams::wait_external`].
    WaitExternal,
    /// A call to [`DeviceStreams::signal_external`].
    SignalExternal,
    /// A call to [`LentMemory::adopt`].
    Adopt,
    /// A call to [`LentMemory::alias`].
    Alias,
    /// A call to [`DirectReads::rename`].
    Rename,
    /// A call to [`DeviceStreams::stream_event`].
    StreamEvent,
    /// A call to [`DeviceStreams::wait_event`].
    WaitEvent,
    /// A call to [`DeviceStreams::hold_stream`].
    HoldStream,
    /// A call to [`DeviceFiles::register`].
    Register,
    /// A call to [`DeviceFiles::unregister`].
    Unregister,
}

/// A fault of a [`FaultyDevice`]: the call that fails, and whether the device context is lost.
#[derive(Clone, Copy, Debug)]
pub struct DeviceFault {
    /// The kind of calls to count, or `None` to count all calls.
    pub call: Option<DeviceCall>,
    /// The number of the failing call. Counting starts at 1 when [`FaultyDevice::arm`] is called.
    pub nth: u64,
    /// Whether the fault loses the process's device context.
    pub context_lost: bool,
}

/// The kind of bytes that a device transfers across the bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BusTransfer {
    /// The bytes of a [`Command::Upload`], from the host to the device.
    Up,
    /// The bytes of a write in a [`Command::Apply`] that is long enough to be verified on arrival.
    LongWrites,
    /// The bytes of a [`Command::Download`], from the device to the host.
    Down,
    /// The checksums of a [`Command::Crc`] in a list that writes nothing.
    Sums,
    /// The checksums of a [`Command::Crc`] in a list with a [`Command::Apply`].
    WriteSums,
    /// The bytes of a [`Command::Copy`] to the memory of a file.
    File,
    /// The bytes of a [`Command::Copy`] from the memory of a file.
    FromFile,
}

/// A fault that flips a bit in one or more copies.
#[derive(Clone, Copy, Debug)]
pub struct BitFlip {
    /// The kind of transfers to count.
    pub way: BusTransfer,
    /// The number of the first affected transfer. Counting starts at 1 when [`FaultyDevice::flip`] is called, and skips
    /// empty transfers.
    pub nth: u64,
    /// The number of consecutive transfers in which a bit flips.
    pub times: u64,
}

#[derive(Default)]
struct FaultState {
    flip: Option<BitFlip>,
    copies: u64,
    flipped: u64,
    armed: Option<DeviceFault>,
    counted: u64,
    lost: Option<Error>,
    longest_staging: usize,
    /// The ids of the memory of registered files.
    files: BTreeSet<MemoryId>,
    /// The place and the length in bytes of each page memory that was allocated and not released.
    memories: BTreeMap<MemoryId, (Place, u64)>,
    /// The current and the maximum number of allocated bytes of page memory, by place.
    held: BTreeMap<Place, (u64, u64)>,
}

impl FaultState {
    fn allocated(&mut self, memory: MemoryId, place: Place, len: u64) {
        self.memories.insert(memory, (place, len));
        let (now, peak) = self.held.entry(place).or_default();
        *now += len;
        *peak = (*peak).max(*now);
    }

    fn released(&mut self, memory: MemoryId) {
        if let Some((place, len)) = self.memories.remove(&memory) {
            self.held.entry(place).or_default().0 -= len;
        }
    }
}

impl FaultyDevice {
    /// Creates a device that does not fail until [`arm`](Self::arm) is called.
    #[must_use]
    pub fn new(inner: Arc<dyn Device>) -> Self {
        let crosses_bus = inner.crosses_bus();
        Self { inner, state: Mutex::default(), crosses_bus }
    }

    /// Creates a device like [`new`](Self::new), but reports that its memory is accessed across a bus.
    #[must_use]
    pub fn across_a_bus(inner: Arc<dyn Device>) -> Self {
        Self { crosses_bus: true, ..Self::new(inner) }
    }

    /// Schedules a bit flip, which replaces an earlier bit flip.
    pub fn flip(&self, flip: BitFlip) {
        let mut state = self.state.lock();
        (state.flip, state.copies, state.flipped) = (Some(flip), 0, 0);
    }

    /// Returns the length in bytes of the longest staging buffer requested so far.
    #[must_use]
    pub fn longest_staging(&self) -> usize {
        self.state.lock().longest_staging
    }

    /// Returns the maximum number of bytes of page memory that were allocated in `place` at the same time.
    #[must_use]
    pub fn peak_bytes(&self, place: Place) -> u64 {
        self.state.lock().held.get(&place).map_or(0, |(_, peak)| *peak)
    }

    /// Stops the bit flips, and returns the number of copies in which a bit was flipped.
    pub fn end_flips(&self) -> u64 {
        let mut state = self.state.lock();
        state.flip = None;
        state.flipped
    }

    /// Returns the staging ranges of a list's transfers of the given kind in which a bit must be flipped.
    fn flips(&self, way: BusTransfer, commands: &[Command]) -> Vec<StagingSpan> {
        let mut state = self.state.lock();
        let Some(flip) = state.flip.filter(|flip| flip.way == way) else { return Vec::new() };
        let writes = commands.iter().any(|command| matches!(command, Command::Apply { .. }));
        let sums = if writes { BusTransfer::WriteSums } else { BusTransfer::Sums };
        let spans = commands.iter().flat_map(|command| match (way, command) {
            (BusTransfer::Up, Command::Upload { source, .. }) => vec![*source],
            (BusTransfer::LongWrites, Command::Apply { pieces }) => {
                pieces.iter().filter_map(long_write).collect()
            }
            (BusTransfer::Down, Command::Download { target, .. }) => vec![*target],
            (_, Command::Crc { target, .. }) if way == sums => vec![*target],
            _ => Vec::new(),
        });
        let mut flipped = Vec::new();
        for span in spans.filter(|span| span.len > 0) {
            state.copies += 1;
            if state.copies >= flip.nth && state.flipped < flip.times {
                state.flipped += 1;
                flipped.push(span);
            }
        }
        flipped
    }

    /// Inserts a bit flip after each affected copy to or from a file, before the next command of the list.
    fn flip_files(&self, commands: Vec<Command>) -> Vec<Command> {
        let mut state = self.state.lock();
        let ways = [BusTransfer::File, BusTransfer::FromFile];
        let Some(flip) = state.flip.filter(|flip| ways.contains(&flip.way)) else { return commands };
        let mut flipped = Vec::new();
        for command in commands {
            let copied = match &command {
                Command::Copy { source, target } => {
                    let file = if flip.way == BusTransfer::File { target } else { source };
                    state.files.contains(&file.memory).then_some((*source, *target))
                }
                _ => None,
            };
            flipped.push(command);
            let Some((source, target)) = copied.filter(|(source, _)| source.len > 0) else { continue };
            state.copies += 1;
            if state.copies >= flip.nth && state.flipped < flip.times {
                state.flipped += 1;
                let middle = source.len / 2;
                let host = self.inner.abilities().bytes.expect("a device of the host");
                let bytes = host.bytes(source.memory).expect("page memory of the host");
                let byte = (*bytes).as_ref()[(source.offset + middle) as usize] ^ 0x10;
                let target = Span { offset: target.offset + middle, len: 1, ..target };
                flipped.push(Command::Fill { target, pattern: [byte; 16], width: Width::W1 });
            }
        }
        flipped
    }

    /// Schedules a fault, which replaces an earlier fault that has not occurred.
    pub fn arm(&self, fault: DeviceFault) {
        let mut state = self.state.lock();
        state.armed = Some(fault);
        state.counted = 0;
    }

    /// Returns whether the fault that was scheduled last has occurred.
    #[must_use]
    pub fn struck(&self) -> bool {
        self.state.lock().armed.is_none()
    }

    /// Counts a call, and returns an error if the fault occurs now.
    fn enter(&self, call: DeviceCall) -> Result<()> {
        let mut state = self.state.lock();
        if let Some(error) = &state.lost {
            return Err(error.clone());
        }
        let Some(fault) = state.armed.filter(|fault| fault.call.is_none_or(|counted| counted == call)) else {
            return Ok(());
        };
        state.counted += 1;
        if state.counted < fault.nth {
            return Ok(());
        }
        state.armed = None;
        let error = Error::Device {
            reason: format!("{call:?} failed as arranged"),
            context_lost: fault.context_lost,
        };
        if fault.context_lost {
            state.lost = Some(error.clone());
        }
        Err(error)
    }
}

impl Device for FaultyDevice {
    fn label(&self) -> String {
        format!("faulty {}", self.inner.label())
    }

    fn allocate(&self, place: Place, len: u64) -> Result<MemoryId> {
        self.enter(DeviceCall::Allocate)?;
        let memory = self.inner.allocate(place, len)?;
        self.state.lock().allocated(memory, place, len);
        Ok(memory)
    }

    fn allocates_zeros(&self, place: Place, len: u64) -> bool {
        self.inner.allocates_zeros(place, len)
    }

    fn crosses_bus(&self) -> bool {
        self.crosses_bus
    }

    fn release(&self, memory: MemoryId) -> Result<()> {
        self.enter(DeviceCall::Release)?;
        // The record is removed before the memory is released, because its id may be reused immediately afterwards.
        self.state.lock().released(memory);
        self.inner.release(memory)
    }

    fn staging(&self, len: usize) -> Result<Staging> {
        self.enter(DeviceCall::Staging)?;
        let longest = &mut self.state.lock().longest_staging;
        *longest = len.max(*longest);
        self.inner.staging(len)
    }

    fn submit(&self, lane: Lane, list: CommandList) -> Result<Pending> {
        self.enter(DeviceCall::Submit)?;
        let mut list = list;
        list.commands = self.flip_files(list.commands);
        for way in [BusTransfer::Up, BusTransfer::LongWrites] {
            for span in self.flips(way, &list.commands) {
                flip(&mut list.staging, span);
            }
        }
        let ways = [BusTransfer::Down, BusTransfer::Sums, BusTransfer::WriteSums];
        let down: Vec<StagingSpan> = ways.iter().flat_map(|way| self.flips(*way, &list.commands)).collect();
        let pending = self.inner.submit(lane, list)?;
        if down.is_empty() {
            return Ok(pending);
        }
        let fence = pending.fence();
        let mut returned = pending.finish(&*self.inner)?;
        down.into_iter().for_each(|span| flip(&mut returned, span));
        Ok(Pending::new(fence, Arc::new(returned.into())))
    }

    fn reached(&self, lane: Lane) -> u64 {
        self.inner.reached(lane)
    }

    fn wait(&self, fence: Fence) -> Result<()> {
        self.enter(DeviceCall::Wait)?;
        self.inner.wait(fence)
    }

    fn after(&self, lane: Lane, fence: Fence) -> Result<()> {
        self.enter(DeviceCall::After)?;
        self.inner.after(lane, fence)
    }

    fn read_places(&self, read: &mut dyn FnMut(&dyn Fn(MemoryId) -> Place)) {
        self.inner.read_places(read);
    }

    fn abilities(&self) -> Abilities<'_> {
        let inner = self.inner.abilities();
        Abilities {
            bulk: None,
            cache: Some(self),
            lent: inner.lent.and(Some(self)),
            files: inner.files.and(Some(self)),
            streams: inner.streams.and(Some(self)),
            direct_reads: Some(self),
            peers: None,
            ..inner
        }
    }
}

impl MemoryCache for FaultyDevice {
    fn allocate_at_once(&self, place: Place, len: u64) -> Result<MemoryId> {
        self.enter(DeviceCall::Allocate)?;
        let memory = self.inner.allocate_at_once(place, len)?;
        self.state.lock().allocated(memory, place, len);
        Ok(memory)
    }

    fn trim(&self) -> Result<u64> {
        self.inner.abilities().cache.map_or(Ok(0), |cache| cache.trim())
    }

    fn memory_stats(&self) -> Vec<(Place, MemoryStats)> {
        self.inner.abilities().cache.map_or_else(Vec::new, |cache| cache.memory_stats())
    }
}

impl LentMemory for FaultyDevice {
    fn adopt(&self, memory: &CallerMemory) -> Result<(MemoryId, Place)> {
        self.enter(DeviceCall::Adopt)?;
        self.inner.lent(memory.byte_len())?.adopt(memory)
    }

    fn alias(&self, span: Span) -> Result<MemoryId> {
        self.enter(DeviceCall::Alias)?;
        self.inner.lent(span.len)?.alias(span)
    }

    fn origin(&self, memory: MemoryId) -> (u64, u64) {
        self.inner.origin(memory)
    }
}

impl DeviceFiles for FaultyDevice {
    fn register(&self, memory: Box<dyn FileMemory>) -> Result<MemoryId> {
        self.enter(DeviceCall::Register)?;
        let file = self.inner.files(memory.byte_len())?.register(memory)?;
        self.state.lock().files.insert(file);
        Ok(file)
    }

    fn unregister(&self, memory: MemoryId) -> Result<()> {
        self.enter(DeviceCall::Unregister)?;
        self.state.lock().files.remove(&memory);
        self.inner.abilities().files.expect("it registered the memory").unregister(memory)
    }
}

impl DeviceStreams for FaultyDevice {
    fn wait_external(&self, lane: Lane, stream: RawStream) -> Result<()> {
        self.enter(DeviceCall::WaitExternal)?;
        self.inner.streams(stream)?.wait_external(lane, stream)
    }

    fn signal_external(&self, stream: RawStream, fence: Fence) -> Result<()> {
        self.enter(DeviceCall::SignalExternal)?;
        self.inner.streams(stream)?.signal_external(stream, fence)
    }

    fn stream_event(&self, stream: RawStream) -> Result<StreamEvent> {
        self.enter(DeviceCall::StreamEvent)?;
        self.inner.streams(stream)?.stream_event(stream)
    }

    fn wait_event(&self, point: &StreamEvent) -> Result<()> {
        self.enter(DeviceCall::WaitEvent)?;
        self.inner.abilities().streams.expect("it recorded the point").wait_event(point)
    }

    fn has_passed(&self, point: &StreamEvent) -> Result<bool> {
        self.inner.abilities().streams.expect("it recorded the point").has_passed(point)
    }

    fn hold_stream(&self, stream: RawStream, point: &StreamEvent) -> Result<()> {
        self.enter(DeviceCall::HoldStream)?;
        self.inner.streams(stream)?.hold_stream(stream, point)
    }
}

impl DirectReads for FaultyDevice {
    /// Returns `false`, so that all reads pass through lanes, whose calls can fail.
    fn read_now(&self, _memory: MemoryId, _offset: u64, _out: &mut [u8]) -> bool {
        false
    }

    fn rename(&self, memory: MemoryId) -> Result<MemoryId> {
        self.enter(DeviceCall::Rename)?;
        self.inner.rename(memory)
    }
}

/// Flips a bit in the middle of a range. The first and last bytes are left unchanged, because they might be checked
/// separately.
fn flip(staging: &mut [Staging], StagingSpan { index, offset, len }: StagingSpan) {
    staging[index][offset + len / 2] ^= 0x10;
}

impl std::fmt::Debug for FaultyDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FaultyDevice").field("device", &self.label()).finish_non_exhaustive()
    }
}

/// Returns the staging span of the bytes of a long write, or `None` for any other piece.
fn long_write(piece: &Piece) -> Option<StagingSpan> {
    match (&piece.kind, &piece.payload) {
        (PieceKind::Dense, Payload::Staging { index, offset }) if piece.target.len >= PROVEN_LEN_MIN => {
            Some(StagingSpan { index: *index, offset: *offset, len: piece.target.len as usize })
        }
        _ => None,
    }
}
