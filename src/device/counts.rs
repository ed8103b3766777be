//! The device of an engine, and the counts of its work: allocations, the bytes that lists move between places, and the
//! time that lists take.
//!
//! Work is counted in the same way on every device, including the host device. A list is counted when it is queued, by
//! the ranges that its commands name. Its time is recorded by the first thread that observes that its fence has passed.
//! A GPU notifies no thread of this, so the recorded time is an upper bound.
//!
//! Counting costs one lookup for each range, one lock for each list, and one addition for each allocation. Bytes that a
//! caller's thread [reads directly](super::DirectReads) belong to no list and are not counted.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Deref;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use remanent_format::Place;

use super::many_deltas::map_slices;
use super::{
    CallerMemory, Command, CommandList, Device, Fence, Lane, MemoryId, Payload, Pending, Span, Staging,
};
use crate::base::sync::{Instant, Mutex};
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
    /// Number of ranges moved. Each range of each list counts once, whether it is a page or a part of one.
    pub pages: u64,
    /// Total bytes of the ranges moved. A delta that changes single elements counts all bytes of its range.
    pub bytes: u64,
    /// Number of lists that moved bytes from `from` to `to`.
    pub lists: u64,
    /// Total time from the submission of each list until a thread observed that its fence had passed. If a list moved
    /// bytes between several pairs of places, its time is divided among them in proportion to the bytes. Lists overlap,
    /// so the total may exceed the elapsed time.
    pub time: Duration,
}

/// Counts of one lane's lists since the store was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LaneStats {
    /// Lists submitted to the lane.
    pub lists: u64,
    /// Submitted lists whose completion no thread has observed yet.
    pub queued: u64,
    /// The highest value of `queued` since the store was opened.
    pub queued_max: u64,
    /// Number of times that a thread waited for a fence that had not passed.
    pub waits: u64,
    /// Total time that threads waited for fences of the lane.
    pub wait_time: Duration,
}

/// A device wrapped with counters. The engine calls its device only through this type, so all of the device's work is
/// counted.
pub(crate) struct EngineDevice {
    inner: Arc<dyn Device>,
    counts: DeviceCounts,
}

/// The counts of one device's work, shared by threads.
pub(crate) struct DeviceCounts {
    allocations: [AllocationCount; PLACES],
    transfers: Mutex<BTreeMap<(Place, Place), Moved>>,
    lanes: [Mutex<LaneCount>; Lane::ALL.len()],
}

/// The number of allocation counters: one for each device slot, and one for each other place.
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
    /// Lists whose completion no thread has observed yet, in the order of submission.
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

    /// Returns the allocation counts of each place with at least one allocation or failure.
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

    fn allocated(&self, place: Place) {
        self.allocations[number_of(place)].allocations.fetch_add(1, Ordering::Relaxed);
    }

    fn refused(&self, place: Place) {
        self.allocations[number_of(place)].refusals.fetch_add(1, Ordering::Relaxed);
    }

    fn freed(&self, place: Place) {
        self.allocations[number_of(place)].frees.fetch_add(1, Ordering::Relaxed);
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
        // Several threads submit lists, so they may arrive here in another order than that of the lane.
        let at = lane.under_way.partition_point(|list| list.fence < fence.value);
        lane.under_way.insert(at, ListInFlight { fence: fence.value, submitted, moved });
        lane.stats.lists += 1;
        lane.stats.queued = lane.under_way.len() as u64;
        lane.stats.queued_max = lane.stats.queued_max.max(lane.stats.queued);
    }

    /// Records that the fence with this value has passed, and with it all earlier fences of the lane.
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

/// Calls `each` for each move that the commands make, in list order, with the source place, the target place and the
/// number of bytes. Bytes in staging are in [`Place::Host`]. Empty ranges are skipped.
fn moves(
    commands: &[Command],
    place_of: &dyn Fn(MemoryId) -> Place,
    mut each: impl FnMut(Place, Place, u64),
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
            // These commands move only bits, checksums or picked elements between allocations, which are not counted.
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

impl EngineDevice {
    pub fn new(inner: Arc<dyn Device>) -> Arc<Self> {
        Arc::new(Self { inner, counts: DeviceCounts::new() })
    }

    pub fn counts(&self) -> &DeviceCounts {
        &self.counts
    }

    /// Returns whether two engines share a device, and therefore its memory.
    pub fn is_same(&self, other: &Self) -> bool {
        ptr::addr_eq(Arc::as_ptr(&self.inner), Arc::as_ptr(&other.inner))
    }

    pub fn allocate(&self, place: Place, len: u64) -> Result<MemoryId> {
        self.counted(place, self.inner.allocate(place, len))
    }

    pub fn allocate_at_once(&self, place: Place, len: u64) -> Result<MemoryId> {
        self.counted(place, self.inner.allocate_at_once(place, len))
    }

    pub fn allocate_all(&self, pages: &[(Place, u64)], made: &mut Vec<MemoryId>) -> Result<()> {
        let before = made.len();
        let allocated = match self.inner.abilities().bulk {
            Some(bulk) => bulk.allocate_all(pages, made),
            None => pages.iter().try_for_each(|(place, len)| {
                made.push(self.inner.allocate(*place, *len)?);
                Ok(())
            }),
        };
        let count = made.len() - before;
        pages[..count].iter().for_each(|(place, _)| self.counts.allocated(*place));
        allocated.inspect_err(|_| self.counts.refused(pages[count].0))
    }

    fn counted(&self, place: Place, allocated: Result<MemoryId>) -> Result<MemoryId> {
        match &allocated {
            Ok(_) => self.counts.allocated(place),
            Err(_) => self.counts.refused(place),
        }
        allocated
    }

    pub fn adopt(&self, memory: &CallerMemory) -> Result<(MemoryId, Place)> {
        let (id, place) = self.inner.lent(memory.byte_len())?.adopt(memory)?;
        self.counts.allocated(place);
        Ok((id, place))
    }

    pub fn alias(&self, place: Place, span: Span) -> Result<MemoryId> {
        let alias = self.inner.lent(span.len)?.alias(span)?;
        self.counts.allocated(place);
        Ok(alias)
    }

    pub fn release(&self, memory: MemoryId) -> Result<()> {
        let place = self.inner.place_of(memory);
        self.inner.release(memory)?;
        self.counts.freed(place);
        Ok(())
    }

    /// Frees the memory of several pages. `memory` contains each page's place and memory id. Returns the index and the
    /// error of each memory that the device could not free.
    pub fn release_all(&self, memory: &[(Place, MemoryId)]) -> Vec<(usize, Error)> {
        let ids: Vec<MemoryId> = memory.iter().map(|(_, memory)| *memory).collect();
        let mut kept = Vec::new();
        match self.inner.abilities().bulk {
            Some(bulk) => bulk.release_all(&ids, &mut |index, error| kept.push((index, error))),
            None => {
                let released = ids.iter().map(|memory| self.inner.release(*memory));
                kept.extend(released.enumerate().filter_map(|(index, result)| Some((index, result.err()?))));
            }
        }
        for (index, (place, _)) in memory.iter().enumerate() {
            if !kept.iter().any(|(kept, _)| *kept == index) {
                self.counts.freed(*place);
            }
        }
        kept
    }

    pub fn submit(&self, lane: Lane, list: CommandList) -> Result<Pending> {
        let moved = self.moves(&list.commands);
        let submitted = Instant::now();
        let pending = self.inner.submit(lane, list)?;
        self.counts.queued(pending.fence(), submitted, moved);
        Ok(pending)
    }

    fn moves(&self, commands: &[Command]) -> ListMoves {
        let of_some = map_slices(commands, |commands| {
            let mut found = ListMoves::new();
            self.inner.read_places(&mut |place_of| {
                moves(commands, place_of, |from, to, bytes| {
                    add_moves(&mut found, (from, to), Moved { pages: 1, bytes, ..Moved::default() });
                });
            });
            found
        });
        let mut moves = ListMoves::new();
        for (places, moved) in of_some.into_iter().flatten() {
            add_moves(&mut moves, places, moved);
        }
        moves
    }

    pub fn reached(&self, lane: Lane) -> u64 {
        let reached = self.inner.reached(lane);
        self.counts.reached(lane, reached);
        reached
    }

    pub fn wait(&self, fence: Fence) -> Result<()> {
        if self.reached(fence.lane) >= fence.value {
            // A device may free the resources of completed lists in this call, so it is made even if the fence has
            // passed.
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

    pub fn finish(&self, pending: Pending) -> Result<Vec<Staging>> {
        self.wait(pending.fence())?;
        Ok(pending.take())
    }
}

/// Forwards the methods that are not counted. Finish a [`Pending`] with [`EngineDevice::finish`], which counts the
/// wait.
impl Deref for EngineDevice {
    type Target = dyn Device;

    fn deref(&self) -> &Self::Target {
        &*self.inner
    }
}
