//! A device that counts allocations, the bytes that lists move between places, and the time that lists take.
//!
//! It wraps any other device, so the host device counts like a GPU. A list is counted when it is queued, by
//! the ranges that its commands name. Its time is recorded by the first thread that observes that its fence
//! has passed. A GPU notifies no thread of this, so the recorded time is an upper bound.
//!
//! Counting costs one lookup for each range, one lock for each list, and one addition for each allocation.
//! Bytes that a caller's thread [reads directly](Device::read_now) belong to no list and are not counted.

use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use remanent_format::Place;

use super::many_deltas::map_slices;
use super::{
    CallerMemory, Command, CommandList, Device, Fence, Lane, MemoryId, MemoryStats, PageBytes, Payload,
    Pending, RawStream, Span, Staging, StreamEvent, UnifiedHint, UnifiedSupport,
};
use crate::base::sync::{Instant, Mutex};
use crate::disk::FileMemory;
use crate::error::{Error, Result};

/// Counts of one place's allocations since the store was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct AllocationStats {
    /// Allocations of page memory, including adopted caller-owned memory.
    pub allocations: u64,
    /// Releases of page memory.
    pub frees: u64,
    /// Allocations that failed.
    pub refusals: u64,
}

/// Transfers between two places since the store was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TransferStats {
    /// The source of the bytes; [`Place::Host`] for uploads to the device.
    pub from: Place,
    /// The destination of the bytes; [`Place::Host`] for downloads to the host.
    pub to: Place,
    /// Pages, or ranges of them: each range of each list counts once.
    pub pages: u64,
    /// Total bytes of these ranges. A delta that changes single elements counts all bytes of its range.
    pub bytes: u64,
    /// Lists that moved some of these bytes.
    pub lists: u64,
    /// Total time from the submission of each list until a thread observed that its fence had passed. If a
    /// list moved bytes between several pairs of places, its time is divided by bytes. Lists overlap, so the
    /// total may exceed the elapsed time.
    pub time: Duration,
}

/// Counts of one lane's lists since the store was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LaneStats {
    /// Lists submitted to the lane.
    pub lists: u64,
    /// Lists that no thread has observed to be done.
    pub queued: u64,
    /// The highest value of `queued`.
    pub queued_max: u64,
    /// Waits for a fence that had not passed.
    pub waits: u64,
    /// Total time that threads spent in these waits.
    pub wait_time: Duration,
}

/// A device that counts the work of another device.
pub(crate) struct CountedDevice {
    inner: Arc<dyn Device>,
    counts: Arc<DeviceCounts>,
}

/// The counts, shared by threads.
pub(crate) struct DeviceCounts {
    allocations: [AllocationCount; PLACES],
    transfers: Mutex<BTreeMap<(Place, Place), Moved>>,
    lanes: [Mutex<LaneCount>; Lane::ALL.len()],
}

/// One counter for each place: the slots of devices, and the places of the host.
const PLACES: usize = SLOTS + 4;
const SLOTS: usize = 64;

#[derive(Default)]
struct AllocationCount {
    allocations: AtomicU64,
    frees: AtomicU64,
    refusals: AtomicU64,
}

#[derive(Clone, Copy, Default)]
struct Moved {
    pages: u64,
    bytes: u64,
    lists: u64,
    time: Duration,
}

#[derive(Default)]
struct LaneCount {
    stats: LaneStats,
    /// Lists not yet observed to be done, in order.
    under_way: VecDeque<ListInFlight>,
}

struct ListInFlight {
    fence: u64,
    submitted: Instant,
    moved: ListMoves,
}

/// The bytes that a list moves, by pair of places. Most lists use one pair.
type ListMoves = Vec<((Place, Place), Moved)>;

impl DeviceCounts {
    fn new() -> Self {
        Self {
            allocations: std::array::from_fn(|_| AllocationCount::default()),
            transfers: Mutex::default(),
            lanes: Default::default(),
        }
    }

    /// Returns the allocation counts of each place that has any.
    pub fn allocations(&self) -> Vec<(Place, AllocationStats)> {
        let of = |(number, count): (usize, &AllocationCount)| {
            let [allocations, frees, refusals] = [&count.allocations, &count.frees, &count.refusals]
                .map(|number| number.load(Ordering::Relaxed));
            let stats = AllocationStats { allocations, frees, refusals };
            (stats != AllocationStats::default()).then(|| (place_of(number), stats))
        };
        self.allocations.iter().enumerate().filter_map(of).collect()
    }

    /// Returns the transfers between each pair of places.
    pub fn transfers(&self) -> Vec<TransferStats> {
        let of = |((from, to), moved): (&(Place, Place), &Moved)| {
            let Moved { pages, bytes, lists, time } = *moved;
            TransferStats { from: *from, to: *to, pages, bytes, lists, time }
        };
        self.transfers.lock().iter().map(of).collect()
    }

    /// Returns each lane's counts.
    pub fn lanes(&self) -> Vec<(Lane, LaneStats)> {
        Lane::ALL.iter().map(|lane| (*lane, self.lanes[*lane as usize].lock().stats)).collect()
    }

    fn allocated(&self, place: Place, count: u64) {
        self.allocations[number_of(place)].allocations.fetch_add(count, Ordering::Relaxed);
    }

    fn refused(&self, place: Place) {
        self.allocations[number_of(place)].refusals.fetch_add(1, Ordering::Relaxed);
    }

    fn freed(&self, place: Place, count: u64) {
        self.allocations[number_of(place)].frees.fetch_add(count, Ordering::Relaxed);
    }

    /// Counts a queued list.
    fn queued(&self, fence: Fence, submitted: Instant, moved: ListMoves) {
        {
            let mut transfers = self.transfers.lock();
            for (places, of_list) in &moved {
                let sum = transfers.entry(*places).or_default();
                sum.pages += of_list.pages;
                sum.bytes += of_list.bytes;
                sum.lists += 1;
            }
        }
        let mut lane = self.lanes[fence.lane as usize].lock();
        // Threads may arrive here in another order than the lane queued their lists.
        let at = lane.under_way.partition_point(|list| list.fence < fence.value);
        lane.under_way.insert(at, ListInFlight { fence: fence.value, submitted, moved });
        lane.stats.lists += 1;
        lane.stats.queued = lane.under_way.len() as u64;
        lane.stats.queued_max = lane.stats.queued_max.max(lane.stats.queued);
    }

    /// Records that the lane has reached this fence.
    fn reached(&self, lane: Lane, value: u64) {
        let mut done = Vec::new();
        {
            let mut lane = self.lanes[lane as usize].lock();
            while lane.under_way.front().is_some_and(|list| list.fence <= value) {
                done.extend(lane.under_way.pop_front());
            }
            lane.stats.queued = lane.under_way.len() as u64;
        }
        if done.iter().all(|list| list.moved.is_empty()) {
            return;
        }
        let now = Instant::now();
        let mut transfers = self.transfers.lock();
        for ListInFlight { submitted, moved, .. } in done {
            let time = now - submitted;
            let bytes: u64 = moved.iter().map(|(_, moved)| moved.bytes).sum();
            for (places, of_list) in moved {
                let share = of_list.bytes as f64 / bytes.max(1) as f64;
                transfers.entry(places).or_default().time += time.mul_f64(share);
            }
        }
    }
}

/// Calls `each` for each move that the commands make, with the places of the allocations that they name.
/// Empty ranges are skipped.
pub(super) fn moves(
    commands: &[Command],
    place_of: impl Fn(MemoryId) -> Place,
    each: &mut dyn FnMut(Place, Place, u64),
) {
    let place = |span: &Span| place_of(span.memory);
    let mut add = |from: Place, to: Place, bytes: u64| {
        if bytes > 0 {
            each(from, to, bytes);
        }
    };
    for command in commands {
        match command {
            Command::Upload { target, .. } => add(Place::Host, place(target), target.len),
            Command::Download { source, .. } => add(place(source), Place::Host, source.len),
            Command::Copy { source, target } => add(place(source), place(target), source.len),
            Command::Gather { sources, target } => {
                let to = place(target);
                sources.iter().for_each(|(source, _)| add(place(source), to, source.len));
            }
            Command::Scatter { source, targets } => {
                let from = place(source);
                targets.iter().for_each(|(_, target)| add(from, place(target), target.len));
            }
            Command::Apply { pieces } => {
                for piece in pieces {
                    let from = match &piece.payload {
                        Payload::Staging { .. } => Place::Host,
                        Payload::Device(span) => place(span),
                    };
                    add(from, place(&piece.target), piece.target.len);
                }
            }
            // These move only bits, checksums and picked elements between allocations.
            Command::Fill { .. }
            | Command::Diff { .. }
            | Command::Select { .. }
            | Command::Crc { .. }
            | Command::Digest { .. }
            | Command::Pick { .. }
            | Command::Validate { .. } => {}
        }
    }
}

fn add_moves(moves: &mut ListMoves, places: (Place, Place), more: Moved) {
    let at = moves.iter().position(|(known, _)| *known == places).unwrap_or_else(|| {
        moves.push((places, Moved::default()));
        moves.len() - 1
    });
    moves[at].1.pages += more.pages;
    moves[at].1.bytes += more.bytes;
}

/// Returns the underlying device, without its counter.
pub(super) fn inner_device(device: &Arc<dyn Device>) -> *const dyn Device {
    let any: &dyn Any = &**device;
    Arc::as_ptr(any.downcast_ref::<CountedDevice>().map_or(device, |counted| &counted.inner))
}

fn number_of(place: Place) -> usize {
    match place {
        Place::Device(slot) => (slot as usize).min(SLOTS - 1),
        Place::Host => SLOTS,
        Place::Pinned => SLOTS + 1,
        Place::Unified => SLOTS + 2,
        _ => SLOTS + 3,
    }
}

fn place_of(number: usize) -> Place {
    match number.checked_sub(SLOTS) {
        None => Place::Device(number as u32),
        Some(0) => Place::Host,
        Some(1) => Place::Pinned,
        Some(2) => Place::Unified,
        Some(_) => Place::Disk,
    }
}

impl CountedDevice {
    /// Wraps `inner` and counts its work from now on.
    pub fn new(inner: Arc<dyn Device>) -> Self {
        Self { inner, counts: Arc::new(DeviceCounts::new()) }
    }

    /// Returns the counts, which outlive the device.
    pub fn counts(&self) -> &Arc<DeviceCounts> {
        &self.counts
    }

    /// Returns the moves that a list makes.
    fn moves(&self, commands: &[Command]) -> ListMoves {
        let of_some = map_slices(commands, |commands| {
            let mut moves = ListMoves::new();
            self.inner.for_each_move(commands, &mut |from, to, bytes| {
                add_moves(&mut moves, (from, to), Moved { pages: 1, bytes, ..Moved::default() });
            });
            moves
        });
        let mut moves = ListMoves::new();
        for (places, moved) in of_some.into_iter().flatten() {
            add_moves(&mut moves, places, moved);
        }
        moves
    }

    fn counted(&self, place: Place, allocated: Result<MemoryId>) -> Result<MemoryId> {
        match &allocated {
            Ok(_) => self.counts.allocated(place, 1),
            Err(_) => self.counts.refused(place),
        }
        allocated
    }
}

impl Device for CountedDevice {
    fn label(&self) -> String {
        self.inner.label()
    }

    fn allocate(&self, place: Place, len: u64) -> Result<MemoryId> {
        self.counted(place, self.inner.allocate(place, len))
    }

    fn allocate_at_once(&self, place: Place, len: u64) -> Result<MemoryId> {
        self.counted(place, self.inner.allocate_at_once(place, len))
    }

    fn allocate_all(&self, pages: &[(Place, u64)], made: &mut Vec<MemoryId>) -> Result<()> {
        let before = made.len();
        let allocated = self.inner.allocate_all(pages, made);
        let count = made.len() - before;
        for of_place in pages[..count].chunk_by(|(one, _), (next, _)| one == next) {
            self.counts.allocated(of_place[0].0, of_place.len() as u64);
        }
        allocated.inspect_err(|_| self.counts.refused(pages[count].0))
    }

    fn allocates_zeros(&self, place: Place, len: u64) -> bool {
        self.inner.allocates_zeros(place, len)
    }

    fn crosses_bus(&self) -> bool {
        self.inner.crosses_bus()
    }

    fn release(&self, memory: MemoryId) -> Result<()> {
        let place = self.inner.place_of(memory);
        self.inner.release(memory)?;
        self.counts.freed(place, 1);
        Ok(())
    }

    fn release_all(&self, memory: &[(Place, MemoryId)], failed: &mut dyn FnMut(usize, Error)) {
        let mut kept = Vec::new();
        self.inner.release_all(memory, &mut |index, error| {
            kept.push(index);
            failed(index, error);
        });
        let mut counted = 0;
        for of_place in memory.chunk_by(|(one, _), (next, _)| one == next) {
            let here = counted..counted + of_place.len();
            let kept_here = kept.iter().filter(|index| here.contains(index)).count();
            self.counts.freed(of_place[0].0, (of_place.len() - kept_here) as u64);
            counted = here.end;
        }
    }

    fn staging(&self, len: usize) -> Result<Staging> {
        self.inner.staging(len)
    }

    fn submit(&self, lane: Lane, list: CommandList) -> Result<Pending> {
        let moved = self.moves(&list.commands);
        let submitted = Instant::now();
        let pending = self.inner.submit(lane, list)?;
        self.counts.queued(pending.fence(), submitted, moved);
        Ok(pending)
    }

    fn reached(&self, lane: Lane) -> u64 {
        let reached = self.inner.reached(lane);
        self.counts.reached(lane, reached);
        reached
    }

    fn wait(&self, fence: Fence) -> Result<()> {
        if self.reached(fence.lane) >= fence.value {
            // The device may have to retire its lists even if the fence has passed.
            return self.inner.wait(fence);
        }
        let begun = Instant::now();
        self.inner.wait(fence)?;
        self.counts.reached(fence.lane, fence.value);
        let mut lane = self.counts.lanes[fence.lane as usize].lock();
        lane.stats.waits += 1;
        lane.stats.wait_time += begun.elapsed();
        Ok(())
    }

    fn after(&self, lane: Lane, fence: Fence) -> Result<()> {
        self.inner.after(lane, fence)
    }

    fn wait_external(&self, lane: Lane, stream: RawStream) -> Result<()> {
        self.inner.wait_external(lane, stream)
    }

    fn signal_external(&self, stream: RawStream, fence: Fence) -> Result<()> {
        self.inner.signal_external(stream, fence)
    }

    fn wait_stream(&self, stream: RawStream) -> Result<()> {
        self.inner.wait_stream(stream)
    }

    fn supports_streams(&self) -> bool {
        self.inner.supports_streams()
    }

    fn stream_event(&self, stream: RawStream) -> Result<StreamEvent> {
        self.inner.stream_event(stream)
    }

    fn wait_event(&self, point: &StreamEvent) -> Result<()> {
        self.inner.wait_event(point)
    }

    fn has_passed(&self, point: &StreamEvent) -> Result<bool> {
        self.inner.has_passed(point)
    }

    fn hold_stream(&self, stream: RawStream, point: &StreamEvent) -> Result<()> {
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

    fn reads_now(&self) -> bool {
        self.inner.reads_now()
    }

    fn read_now(&self, memory: MemoryId, offset: u64, out: &mut [u8]) -> bool {
        self.inner.read_now(memory, offset, out)
    }

    fn trim(&self) -> Result<u64> {
        self.inner.trim()
    }

    fn memory_stats(&self) -> Vec<(Place, MemoryStats)> {
        self.inner.memory_stats()
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

    fn adopt(&self, memory: &CallerMemory) -> Result<(MemoryId, Place)> {
        let (id, place) = self.inner.adopt(memory)?;
        self.counts.allocated(place, 1);
        Ok((id, place))
    }

    fn register(&self, memory: Box<dyn FileMemory>) -> Result<MemoryId> {
        self.inner.register(memory)
    }

    fn unregister(&self, memory: MemoryId) -> Result<()> {
        self.inner.unregister(memory)
    }

    fn alias(&self, span: Span) -> Result<MemoryId> {
        let alias = self.inner.alias(span)?;
        self.counts.allocated(self.inner.place_of(alias), 1);
        Ok(alias)
    }

    fn rename(&self, memory: MemoryId) -> Result<MemoryId> {
        self.inner.rename(memory)
    }

    fn origin(&self, memory: MemoryId) -> (u64, u64) {
        self.inner.origin(memory)
    }

    fn copy_from(
        &self,
        lane: Lane,
        other: &dyn Device,
        source: Span,
        target: Span,
    ) -> Result<Option<Pending>> {
        // `other` is a counted device only if the caller wrapped it.
        let other = (other as &dyn Any).downcast_ref::<Self>().map_or(other, |other| &*other.inner);
        self.inner.copy_from(lane, other, source, target)
    }
}
