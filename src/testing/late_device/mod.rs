//! A device that executes every command list as late as its fences permit, to detect callers that do not wait.
//!
//! With the host device, a missing wait is never detected, because every list is complete when `submit` returns. This
//! device only queues lists. A list runs when a caller waits for a fence after the list, on the same lane or through
//! `after`. With a seeded device, a list also runs when the random schedule selects it. The device overwrites all bytes
//! that no caller may rely on: new page memory, staging before a download, and staging after an upload. A caller that
//! reads such bytes finds [`POISON`].
//!
//! The device also emulates callers' streams (`streams`).

mod page_spans;
mod streams;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use remanent_format::{Place, Width};

use self::page_spans::page_spans;
pub use self::streams::StreamWork;
use self::streams::{StreamEntry, Streams};
use crate::base::sync::{Condvar, Mutex};
use crate::device::spans::{overlap, staged_spans};
use crate::device::{
    Abilities, CallerMemory, Command, CommandList, Device, DeviceFiles, DeviceStreams, DirectReads, Fence,
    KernelAddresses, Lane, LentMemory, MemoryId, Pending, RawStream, ReturnedStaging, Span, Staging,
    StagingSpan, StreamEvent,
};
use crate::disk::FileMemory;
use crate::error::{Error, Result};

/// The byte with which the device fills memory whose contents no caller may rely on.
pub const POISON: u8 = 0xA5;

/// The number of low bits of an emulated address that contain the offset in a memory. The bits above them contain the
/// memory id.
const ADDRESS_BITS: u32 = 40;

/// A device that delays command lists as long as possible, and then runs them on another device.
pub struct LateDevice {
    inner: Arc<dyn Device>,
    state: Mutex<LateState>,
    /// Notified when a stream is released or when a thread waits for a stream.
    changed: Condvar,
}

#[derive(Default)]
struct LateState {
    lanes: [LateLane; Lane::ALL.len()],
    streams: Streams,
    /// The length of each page memory in bytes.
    lens: HashMap<MemoryId, u64>,
    /// The state of the random schedule, or `None` if each list runs only when a caller waits for it.
    schedule: Option<u64>,
}

#[derive(Default)]
struct LateLane {
    queue: VecDeque<Entry>,
    /// The newest fence value returned to a caller.
    given: u64,
    reached: u64,
    /// The failure that stopped this lane, or `None`.
    stopped: Option<Error>,
}

enum Entry {
    List {
        list: CommandList,
        returned: Arc<ReturnedStaging>,
    },
    After(Fence),
    /// Waits until the given number of the stream's entries are complete.
    AfterStream(RawStream, u64),
}

impl LateDevice {
    /// Creates a device that runs a list only when a caller waits for it.
    #[must_use]
    pub fn new(inner: Arc<dyn Device>) -> Self {
        Self::drawing(inner, None)
    }

    /// Creates a device that also runs lists during calls selected from `seed`, so that callers that poll make
    /// progress.
    #[must_use]
    pub fn seeded(inner: Arc<dyn Device>, seed: u64) -> Self {
        Self::drawing(inner, Some(seed))
    }

    fn drawing(inner: Arc<dyn Device>, schedule: Option<u64>) -> Self {
        Self {
            inner,
            state: Mutex::new(LateState { schedule, ..LateState::default() }),
            changed: Condvar::new(),
        }
    }

    /// Creates a caller's stream and returns its handle.
    pub fn stream(&self) -> RawStream {
        self.state.lock().streams.make()
    }

    /// Queues work on a stream, like a caller that launches a kernel.
    pub fn queue(&self, stream: RawStream, work: impl FnOnce(&dyn Device) + Send + 'static) {
        self.state.lock().streams.of(stream).push(StreamEntry::Work(Box::new(work)));
    }

    /// Holds a stream if `is_held` is true, otherwise releases it. A held stream runs none of its work.
    pub fn hold(&self, stream: RawStream, is_held: bool) {
        self.state.lock().streams.of(stream).is_held = is_held;
        self.changed.notify_all();
    }

    /// Blocks until another thread waits for `stream`, which must be held.
    pub fn wait_for_waiter(&self, stream: RawStream) {
        let mut state = self.state.lock();
        while state.streams.of(stream).waiting == 0 {
            self.changed.wait(&mut state);
        }
    }

    /// Starts or ends the capture of a graph from a stream, according to `is_captured`.
    pub fn capture(&self, stream: RawStream, is_captured: bool) {
        self.state.lock().streams.of(stream).is_captured = is_captured;
    }

    /// Runs all work currently queued on a stream.
    ///
    /// # Errors
    /// A device error if the stream waits for a lane that has stopped.
    ///
    /// # Panics
    /// If the stream is held, or waits for a held stream.
    pub fn synchronize(&self, stream: RawStream) -> Result<()> {
        let mut state = self.state.lock();
        let given = state.streams.of(stream).given;
        self.run_stream_to(&mut state, stream, given)
    }

    /// Returns the span of `len` bytes at an emulated address. A kernel that uses the address would access this span.
    #[must_use]
    pub fn span_at(&self, address: u64, len: u64) -> Span {
        Span { memory: MemoryId(address >> ADDRESS_BITS), offset: address & ((1 << ADDRESS_BITS) - 1), len }
    }

    /// Runs lists until `fence` is reached.
    fn run_to(&self, state: &mut LateState, fence: Fence) -> Result<()> {
        loop {
            let lane = state.lane(fence.lane);
            assert!(fence.value <= lane.given, "{fence:?} was not handed out: the lane gave {}", lane.given);
            if fence.value <= lane.reached {
                return Ok(());
            }
            if let Some(error) = &lane.stopped {
                return Err(error.clone());
            }
            self.run_next(state, fence.lane);
        }
    }

    /// Runs the oldest entry of a lane, if the lane has one. A failure stops the lane, and its later entries never run.
    fn run_next(&self, state: &mut LateState, lane: Lane) {
        let done = match state.lane(lane).queue.pop_front() {
            None => return,
            // The recursion ends, because this fence, and every fence that earlier lists wait for, was returned before
            // this entry was queued.
            Some(Entry::After(fence)) => self.run_to(state, fence),
            Some(Entry::AfterStream(stream, position)) => self.run_stream_to(state, stream, position),
            Some(Entry::List { list, returned }) => self.run_list(lane, list).map(|staging| {
                *returned.lock() = staging;
                state.lane(lane).reached += 1;
            }),
        };
        if let Err(error) = done {
            let lane = state.lane(lane);
            lane.queue.clear();
            lane.stopped = Some(error);
        }
    }

    /// Runs a stream until `position` of its entries are complete.
    fn run_stream_to(&self, state: &mut LateState, stream: RawStream, position: u64) -> Result<()> {
        loop {
            let late = state.streams.of(stream);
            if late.reached >= position {
                return Ok(());
            }
            assert!(!late.is_held, "{stream:?} is held, and a caller waits for it");
            match late.queue.pop_front().expect("as many entries as were given") {
                StreamEntry::Work(work) => work(&*self.inner),
                StreamEntry::After(fence) => self.run_to(state, fence)?,
                StreamEntry::AfterStream(other, position) => self.run_stream_to(state, other, position)?,
            }
            state.streams.of(stream).reached += 1;
        }
    }

    fn run_list(&self, lane: Lane, mut list: CommandList) -> Result<Vec<Staging>> {
        let (read, written) = staged_spans(&list.commands);
        // A range that the list both reads and writes is left unchanged, because the list determines which access comes
        // first.
        let of_one_kind =
            |span: &StagingSpan, others: &[StagingSpan]| !others.iter().any(|other| overlap(*span, *other));
        for span in written.iter().filter(|span| of_one_kind(span, &read)) {
            poison(&mut list.staging, *span);
        }
        let mut staging = self.inner.submit(lane, list)?.finish(&*self.inner)?;
        for span in read.iter().filter(|span| of_one_kind(span, &written)) {
            poison(&mut staging, *span);
        }
        Ok(staging)
    }

    /// Runs the entries that the random schedule selects: none half of the time, otherwise up to three.
    fn run_drawn(&self, state: &mut LateState) {
        let Some(drawn) = state.draw() else { return };
        if drawn & 1 == 0 {
            return;
        }
        for round in 0..1 + (drawn >> 1) % 3 {
            let lane = Lane::ALL[(drawn >> (8 + 8 * round)) as u8 as usize % Lane::ALL.len()];
            if !state.is_held_up(lane, 1) {
                self.run_next(state, lane);
            }
        }
    }
}

/// A point in a stream, reached when `position` of its entries are complete.
#[derive(Clone, Copy)]
struct LatePoint {
    stream: RawStream,
    position: u64,
}

impl LateState {
    /// Panics if a queued list names memory that is being freed.
    fn assert_unused(&self, memory: MemoryId) {
        for entry in self.lanes.iter().flat_map(|lane| &lane.queue) {
            if let Entry::List { list, .. } = entry {
                let named = page_spans(&list.commands).iter().any(|span| span.memory == memory);
                assert!(!named, "{memory:?} is given up while a queued list names it");
            }
        }
    }

    fn lane(&mut self, lane: Lane) -> &mut LateLane {
        &mut self.lanes[lane as usize]
    }

    /// Returns whether the first `entries` entries of a lane can complete only after a held stream is released.
    fn is_held_up(&self, lane: Lane, entries: usize) -> bool {
        let queue = &self.lanes[lane as usize].queue;
        queue.iter().take(entries).any(|entry| match entry {
            Entry::List { .. } => false,
            Entry::After(fence) => self.is_behind_held(*fence),
            Entry::AfterStream(stream, position) => {
                self.streams.is_held(*stream, *position, &|fence| self.is_behind_held(fence))
            }
        })
    }

    /// Returns whether `fence` can be reached only after a held stream is released.
    fn is_behind_held(&self, fence: Fence) -> bool {
        let lane = &self.lanes[fence.lane as usize];
        let lists_left = fence.value.saturating_sub(lane.reached);
        let mut lists = 0;
        let entries = lane.queue.iter().take_while(|entry| {
            let is_before = lists < lists_left;
            lists += u64::from(matches!(entry, Entry::List { .. }));
            is_before
        });
        self.is_held_up(fence.lane, entries.count())
    }

    /// Returns the next random number (SplitMix64), or `None` without a random schedule.
    fn draw(&mut self) -> Option<u64> {
        let state = self.schedule.as_mut()?;
        *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = *state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        Some(z ^ (z >> 31))
    }
}

impl Device for LateDevice {
    fn label(&self) -> String {
        format!("late {}", self.inner.label())
    }

    fn allocate(&self, place: Place, len: u64) -> Result<MemoryId> {
        let memory = self.inner.allocate(place, len)?;
        let target = Span { memory, offset: 0, len };
        let fill = Command::Fill { target, pattern: [POISON; 16], width: Width::W1 };
        let list = CommandList { commands: vec![fill], staging: Vec::new() };
        self.inner.submit(Lane::Drain, list)?.finish(&*self.inner)?;
        self.state.lock().lens.insert(memory, len);
        Ok(memory)
    }

    fn crosses_bus(&self) -> bool {
        // The device reports a bus, so that the code that verifies bytes on both sides of a bus is tested with delayed
        // lists too.
        true
    }

    fn release(&self, memory: MemoryId) -> Result<()> {
        let mut state = self.state.lock();
        state.assert_unused(memory);
        state.lens.remove(&memory);
        self.inner.release(memory)
    }

    fn staging(&self, len: usize) -> Result<Staging> {
        self.inner.staging(len)
    }

    fn submit(&self, lane: Lane, list: CommandList) -> Result<Pending> {
        let mut state = self.state.lock();
        self.run_drawn(&mut state);
        let queued = state.lane(lane);
        if let Some(error) = &queued.stopped {
            return Err(error.clone());
        }
        queued.given += 1;
        let fence = Fence { lane, value: queued.given };
        let returned = Arc::<ReturnedStaging>::default();
        queued.queue.push_back(Entry::List { list, returned: returned.clone() });
        self.run_drawn(&mut state);
        Ok(Pending::new(fence, returned))
    }

    fn reached(&self, lane: Lane) -> u64 {
        let mut state = self.state.lock();
        self.run_drawn(&mut state);
        state.lane(lane).reached
    }

    fn wait(&self, fence: Fence) -> Result<()> {
        self.run_to(&mut self.state.lock(), fence)
    }

    fn after(&self, lane: Lane, fence: Fence) -> Result<()> {
        let mut state = self.state.lock();
        let given = state.lane(fence.lane).given;
        assert!(fence.value <= given, "{fence:?} was not handed out: the lane gave {given}");
        state.lane(lane).queue.push_back(Entry::After(fence));
        Ok(())
    }

    fn read_places(&self, read: &mut dyn FnMut(&dyn Fn(MemoryId) -> Place)) {
        self.inner.read_places(read);
    }

    fn abilities(&self) -> Abilities<'_> {
        let Abilities { lent, files, bytes, unified, .. } = self.inner.abilities();
        Abilities {
            lent: lent.and(Some(self)),
            files: files.and(Some(self)),
            streams: Some(self),
            addresses: Some(self),
            bytes,
            direct_reads: Some(self),
            unified,
            ..Abilities::default()
        }
    }
}

impl LentMemory for LateDevice {
    fn adopt(&self, memory: &CallerMemory) -> Result<(MemoryId, Place)> {
        let (id, place) = self.inner.lent(memory.byte_len())?.adopt(memory)?;
        self.state.lock().lens.insert(id, memory.byte_len());
        Ok((id, place))
    }

    fn alias(&self, span: Span) -> Result<MemoryId> {
        let id = self.inner.lent(span.len)?.alias(span)?;
        self.state.lock().lens.insert(id, span.len);
        Ok(id)
    }

    fn origin(&self, memory: MemoryId) -> (u64, u64) {
        self.inner.origin(memory)
    }
}

impl DeviceFiles for LateDevice {
    fn register(&self, memory: Box<dyn FileMemory>) -> Result<MemoryId> {
        self.inner.files(memory.byte_len())?.register(memory)
    }

    fn unregister(&self, memory: MemoryId) -> Result<()> {
        let state = self.state.lock();
        state.assert_unused(memory);
        self.inner.abilities().files.expect("it registered the memory").unregister(memory)
    }
}

impl DeviceStreams for LateDevice {
    fn wait_external(&self, lane: Lane, stream: RawStream) -> Result<()> {
        let mut state = self.state.lock();
        let position = state.streams.usable(stream)?.given;
        state.lane(lane).queue.push_back(Entry::AfterStream(stream, position));
        Ok(())
    }

    fn signal_external(&self, stream: RawStream, fence: Fence) -> Result<()> {
        let mut state = self.state.lock();
        let given = state.lane(fence.lane).given;
        assert!(fence.value <= given, "{fence:?} was not handed out: the lane gave {given}");
        state.streams.usable(stream)?.push(StreamEntry::After(fence));
        Ok(())
    }

    fn stream_event(&self, stream: RawStream) -> Result<StreamEvent> {
        let position = self.state.lock().streams.usable(stream)?.given;
        Ok(StreamEvent::new(LatePoint { stream, position }))
    }

    fn wait_event(&self, point: &StreamEvent) -> Result<()> {
        let LatePoint { stream, position } = *point.of();
        let mut state = self.state.lock();
        state.streams.of(stream).waiting += 1;
        self.changed.notify_all();
        while state.streams.is_held(stream, position, &|fence| state.is_behind_held(fence)) {
            self.changed.wait(&mut state);
        }
        state.streams.of(stream).waiting -= 1;
        self.run_stream_to(&mut state, stream, position)
    }

    fn has_passed(&self, point: &StreamEvent) -> Result<bool> {
        let LatePoint { stream, position } = *point.of();
        Ok(self.state.lock().streams.of(stream).reached >= position)
    }

    fn hold_stream(&self, stream: RawStream, point: &StreamEvent) -> Result<()> {
        let LatePoint { stream: other, position } = *point.of();
        let mut state = self.state.lock();
        state.streams.usable(stream)?.push(StreamEntry::AfterStream(other, position));
        Ok(())
    }
}

impl KernelAddresses for LateDevice {
    /// Returns the emulated address of a memory. The address cannot be accessed, but [`LateDevice::span_at`] converts
    /// it to a span.
    fn address(&self, memory: MemoryId) -> Option<u64> {
        let state = self.state.lock();
        let len = state.lens.get(&memory).unwrap_or_else(|| panic!("{memory:?} is no memory of this device"));
        (*len > 0).then_some(memory.0 << ADDRESS_BITS)
    }

    fn gpu_of(&self, memory: MemoryId) -> Option<u32> {
        self.inner.abilities().addresses?.gpu_of(memory)
    }

    fn gpu_at(&self, slot: u32) -> Option<u32> {
        self.inner.abilities().addresses?.gpu_at(slot)
    }
}

impl DirectReads for LateDevice {
    /// Returns `false`: a list that was not run yet may write to any memory.
    fn read_now(&self, _memory: MemoryId, _offset: u64, _out: &mut [u8]) -> bool {
        false
    }

    fn rename(&self, memory: MemoryId) -> Result<MemoryId> {
        let mut state = self.state.lock();
        state.assert_unused(memory);
        let renamed = self.inner.rename(memory)?;
        let len = state.lens.remove(&memory).expect("memory of this device");
        state.lens.insert(renamed, len);
        Ok(renamed)
    }
}

fn poison(staging: &mut [Staging], span: StagingSpan) {
    staging[span.index][span.offset..][..span.len].fill(POISON);
}

impl std::fmt::Debug for LateDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LateDevice").field("device", &self.label()).finish_non_exhaustive()
    }
}
