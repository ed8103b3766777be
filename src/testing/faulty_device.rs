//! A device whose n-th call fails, or whose n-th copy changes a bit, to see that every error is handled.
//!
//! The failed call does nothing else. A fault that takes the context with it makes every later call fail too,
//! as a GPU's does; any other fault strikes once.
//!
//! A copy with a changed bit reports no error, as a bus, staging or host memory that turns a bit over does
//! not.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use remanent_format::{Place, Width};

use crate::base::sync::Mutex;
use crate::device::sums::PROVEN_LEN_MIN;
use crate::device::{
    CallerMemory, Command, CommandList, Device, Fence, Lane, MemoryId, MemoryStats, PageBytes, Payload,
    Pending, Piece, PieceKind, RawStream, Span, Staging, StagingSpan, StreamEvent, UnifiedHint,
    UnifiedSupport,
};
use crate::disk::FileMemory;
use crate::error::{Error, Result};

/// A device that passes everything on to another one until its fault strikes.
pub struct FaultyDevice {
    inner: Arc<dyn Device>,
    state: Mutex<FaultState>,
    crosses_bus: bool,
}

/// A call that can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceCall {
    /// A call of [`Device::allocate`].
    Allocate,
    /// A call of [`Device::release`].
    Release,
    /// A call of [`Device::staging`].
    Staging,
    /// A call of [`Device::submit`].
    Submit,
    /// A call of [`Device::wait`].
    Wait,
    /// A call of [`Device::after`].
    After,
    /// A call of [`Device::wait_external`].
    WaitExternal,
    /// A call of [`Device::signal_external`].
    SignalExternal,
    /// A call of [`Device::adopt`].
    Adopt,
    /// A call of [`Device::wait_stream`].
    WaitStream,
    /// A call of [`Device::alias`].
    Alias,
    /// A call of [`Device::rename`].
    Rename,
    /// A call of [`Device::stream_event`].
    StreamEvent,
    /// A call of [`Device::wait_event`].
    WaitPoint,
    /// A call of [`Device::hold_stream`].
    HoldStream,
    /// A call of [`Device::register`].
    Register,
    /// A call of [`Device::unregister`].
    Unregister,
}

/// The call that fails, and how it fails.
#[derive(Clone, Copy, Debug)]
pub struct DeviceFault {
    /// The calls that count; `None` counts all of them.
    pub call: Option<DeviceCall>,
    /// The number of the failing call among them, from 1, counted from the moment the fault is armed.
    pub nth: u64,
    /// Whether the process's device context goes with it.
    pub context_lost: bool,
}

/// A way across the bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BusWay {
    /// Bytes of [`Command::Upload`].
    Up,
    /// Bytes of a write in a [`Command::Apply`] that is as long as those that are proven where they arrive.
    LongWrites,
    /// Bytes of [`Command::Download`].
    Down,
    /// The sums of [`Command::Crc`] in a list that writes nothing.
    Sums,
    /// The sums of [`Command::Crc`] in a list with a [`Command::Apply`].
    WriteSums,
    /// Bytes of [`Command::Copy`] to the memory of a file.
    File,
    /// Bytes of [`Command::Copy`] from the memory of a file.
    FromFile,
}

/// The copy that changes a bit on its way.
#[derive(Clone, Copy, Debug)]
pub struct BitFlip {
    /// The copies that count.
    pub way: BusWay,
    /// The number of the copy among them, from 1, counted from the moment the flip is armed. Empty copies do
    /// not count.
    pub nth: u64,
    /// How many copies change a bit from then on.
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
    /// The memory of files.
    files: BTreeSet<MemoryId>,
    /// Page memory that was allocated and not released.
    memories: BTreeMap<MemoryId, (Place, u64)>,
    /// Bytes of it by places, and the most that there ever were.
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
    /// A device that does not fail until [`arm`](Self::arm) is called.
    #[must_use]
    pub fn new(inner: Arc<dyn Device>) -> Self {
        let crosses_bus = inner.crosses_bus();
        Self { inner, state: Mutex::default(), crosses_bus }
    }

    /// As [`new`](Self::new), for a device that takes the way to its memory for a bus.
    #[must_use]
    pub fn across_a_bus(inner: Arc<dyn Device>) -> Self {
        Self { crosses_bus: true, ..Self::new(inner) }
    }

    /// Arms a flip, in place of an earlier one.
    pub fn flip(&self, flip: BitFlip) {
        let mut state = self.state.lock();
        (state.flip, state.copies, state.flipped) = (Some(flip), 0, 0);
    }

    /// The length in bytes of the longest staging that was asked for.
    #[must_use]
    pub fn longest_staging(&self) -> usize {
        self.state.lock().longest_staging
    }

    /// The most bytes of page memory that were allocated in a place at one time.
    #[must_use]
    pub fn peak_bytes(&self, place: Place) -> u64 {
        self.state.lock().held.get(&place).map_or(0, |(_, peak)| *peak)
    }

    /// Ends the flips. Returns how many copies changed a bit.
    pub fn end_flips(&self) -> u64 {
        let mut state = self.state.lock();
        state.flip = None;
        state.flipped
    }

    /// The copies of a way in a list that change a bit now.
    fn flips(&self, way: BusWay, commands: &[Command]) -> Vec<StagingSpan> {
        let mut state = self.state.lock();
        let Some(flip) = state.flip.filter(|flip| flip.way == way) else { return Vec::new() };
        let writes = commands.iter().any(|command| matches!(command, Command::Apply { .. }));
        let sums = if writes { BusWay::WriteSums } else { BusWay::Sums };
        let spans = commands.iter().flat_map(|command| match (way, command) {
            (BusWay::Up, Command::Upload { source, .. }) => vec![*source],
            (BusWay::LongWrites, Command::Apply { pieces }) => pieces.iter().filter_map(long_write).collect(),
            (BusWay::Down, Command::Download { target, .. }) => vec![*target],
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

    /// Changes a bit after each copy to a file, or from one, that does so now, before what follows it in the
    /// list.
    fn flip_files(&self, commands: Vec<Command>) -> Vec<Command> {
        let mut state = self.state.lock();
        let ways = [BusWay::File, BusWay::FromFile];
        let Some(flip) = state.flip.filter(|flip| ways.contains(&flip.way)) else { return commands };
        let mut flipped = Vec::new();
        for command in commands {
            let copied = match &command {
                Command::Copy { source, target } => {
                    let file = if flip.way == BusWay::File { target } else { source };
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
                let bytes = self.inner.bytes(source.memory).expect("page memory of the host");
                let byte = (*bytes).as_ref()[(source.offset + middle) as usize] ^ 0x10;
                let target = Span { offset: target.offset + middle, len: 1, ..target };
                flipped.push(Command::Fill { target, pattern: [byte; 16], width: Width::W1 });
            }
        }
        flipped
    }

    /// Sets the fault, in place of an earlier one that has not struck.
    pub fn arm(&self, fault: DeviceFault) {
        let mut state = self.state.lock();
        state.armed = Some(fault);
        state.counted = 0;
    }

    /// Whether the fault that was set last has struck.
    #[must_use]
    pub fn struck(&self) -> bool {
        self.state.lock().armed.is_none()
    }

    /// Counts a call and fails it if its turn has come.
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

    fn allocate_at_once(&self, place: Place, len: u64) -> Result<MemoryId> {
        self.enter(DeviceCall::Allocate)?;
        let memory = self.inner.allocate_at_once(place, len)?;
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
        // Before it is free for another one.
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
        for way in [BusWay::Up, BusWay::LongWrites] {
            for span in self.flips(way, &list.commands) {
                flip(&mut list.staging, span);
            }
        }
        let ways = [BusWay::Down, BusWay::Sums, BusWay::WriteSums];
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

    fn wait_external(&self, lane: Lane, stream: RawStream) -> Result<()> {
        self.enter(DeviceCall::WaitExternal)?;
        self.inner.wait_external(lane, stream)
    }

    fn signal_external(&self, stream: RawStream, fence: Fence) -> Result<()> {
        self.enter(DeviceCall::SignalExternal)?;
        self.inner.signal_external(stream, fence)
    }

    fn wait_stream(&self, stream: RawStream) -> Result<()> {
        self.enter(DeviceCall::WaitStream)?;
        self.inner.wait_stream(stream)
    }

    fn supports_streams(&self) -> bool {
        self.inner.supports_streams()
    }

    fn stream_event(&self, stream: RawStream) -> Result<StreamEvent> {
        self.enter(DeviceCall::StreamEvent)?;
        self.inner.stream_event(stream)
    }

    fn wait_event(&self, point: &StreamEvent) -> Result<()> {
        self.enter(DeviceCall::WaitPoint)?;
        self.inner.wait_event(point)
    }

    fn has_passed(&self, point: &StreamEvent) -> Result<bool> {
        self.inner.has_passed(point)
    }

    fn hold_stream(&self, stream: RawStream, point: &StreamEvent) -> Result<()> {
        self.enter(DeviceCall::HoldStream)?;
        self.inner.hold_stream(stream, point)
    }

    fn address(&self, memory: MemoryId) -> Option<u64> {
        self.inner.address(memory)
    }

    fn gpu_of(&self, memory: MemoryId) -> Option<u32> {
        self.inner.gpu_of(memory)
    }

    fn bytes(&self, memory: MemoryId) -> Option<PageBytes> {
        self.inner.bytes(memory)
    }

    fn trim(&self) -> Result<u64> {
        self.inner.trim()
    }

    fn memory_stats(&self) -> Vec<(Place, MemoryStats)> {
        self.inner.memory_stats()
    }

    fn adopt(&self, memory: &CallerMemory) -> Result<(MemoryId, Place)> {
        self.enter(DeviceCall::Adopt)?;
        self.inner.adopt(memory)
    }

    fn register(&self, memory: Box<dyn FileMemory>) -> Result<MemoryId> {
        self.enter(DeviceCall::Register)?;
        let file = self.inner.register(memory)?;
        self.state.lock().files.insert(file);
        Ok(file)
    }

    fn unregister(&self, memory: MemoryId) -> Result<()> {
        self.enter(DeviceCall::Unregister)?;
        self.state.lock().files.remove(&memory);
        self.inner.unregister(memory)
    }

    fn unified(&self) -> UnifiedSupport {
        self.inner.unified()
    }

    fn hint_unified(&self, memory: MemoryId, hint: UnifiedHint) -> Result<()> {
        self.inner.hint_unified(memory, hint)
    }

    fn place_of(&self, memory: MemoryId) -> Place {
        self.inner.place_of(memory)
    }

    fn alias(&self, span: Span) -> Result<MemoryId> {
        self.enter(DeviceCall::Alias)?;
        self.inner.alias(span)
    }

    fn rename(&self, memory: MemoryId) -> Result<MemoryId> {
        self.enter(DeviceCall::Rename)?;
        self.inner.rename(memory)
    }

    fn origin(&self, memory: MemoryId) -> (u64, u64) {
        self.inner.origin(memory)
    }
}

/// Turns a bit over in the middle of a range: neither its first byte nor its last one is looked at alone.
fn flip(staging: &mut [Staging], StagingSpan { index, offset, len }: StagingSpan) {
    staging[index][offset + len / 2] ^= 0x10;
}

impl std::fmt::Debug for FaultyDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FaultyDevice").field("device", &self.label()).finish_non_exhaustive()
    }
}

/// The bytes of a long write, as they lie in staging.
fn long_write(piece: &Piece) -> Option<StagingSpan> {
    match (&piece.kind, &piece.payload) {
        (PieceKind::Dense, Payload::Staging { index, offset }) if piece.target.len >= PROVEN_LEN_MIN => {
            Some(StagingSpan { index: *index, offset: *offset, len: piece.target.len as usize })
        }
        _ => None,
    }
}
