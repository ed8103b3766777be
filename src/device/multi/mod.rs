//! Several devices presented as one: `Device(n)` is the n-th device, and every other place belongs to the first. The
//! combined devices are called *parts*.
//!
//! Code that uses a device does not distinguish this one from a single device. A command list is divided among the
//! parts whose memory its commands name. The parts run concurrently, and the list's fence has passed when all of them
//! are done. When a command copies bytes from one part to another, the commands after it form further lists. Devices
//! with a direct path between them, such as two GPUs, wait for each other.
//!
//! The submitting thread waits on the host in two cases only: between two devices without a direct path, and when one
//! device reads staging that another device wrote. Bytes are then copied through staging, one piece at a time. The
//! first device allocates the staging and pins it for all devices.

mod share;
mod split;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use remanent_format::Place;

use self::share::Shares;
use self::split::{PartSpan, SplitPlanner, SplitStep};
use super::{
    Abilities, CallerMemory, Command, CommandList, Device, DeviceFiles, DeviceStreams, DirectReads, Fence,
    HostBytes, KernelAddresses, Lane, LentMemory, MemoryCache, MemoryId, MemoryStats, PageBytes, Pending,
    RawStream, ReturnedStaging, Span, Staging, StagingSpan, StreamEvent, UnifiedHint, UnifiedMemory,
    UnifiedSupport,
};
use crate::base::sync::{Mutex, RwLock};
use crate::disk::FileMemory;
use crate::error::{Error, Refused, Result, Unavailable};

/// The maximum length, in bytes, of a piece that is copied between devices through staging.
const ACROSS_LEN_MAX: u64 = 4 << 20;

/// The points that the parts recorded for one stream, each with the part's index. A default stream may have several.
type PartPoints = Vec<(usize, StreamEvent)>;

/// Several devices presented as one, with slot `n` bound to the n-th device.
pub struct MultiDevice {
    parts: Vec<Arc<dyn Device>>,
    memories: RwLock<HashMap<MemoryId, DeviceAddress>>,
    memory_next: AtomicU64,
    lanes: [MultiLane; Lane::ALL.len()],
}

/// The device that contains an allocation, and the device's own id for it.
#[derive(Clone, Copy, Debug)]
struct DeviceAddress {
    part: usize,
    memory: MemoryId,
}

#[derive(Default)]
struct MultiLane {
    /// The lock that a thread holds while it submits a list, so that every part receives the lists in the same order.
    order: Mutex<()>,
    state: Mutex<LaneState>,
}

#[derive(Default)]
struct LaneState {
    /// The number of the newest fence returned to callers.
    given: u64,
    reached: u64,
    in_flight: VecDeque<SplitList>,
    /// Parts that were instructed to wait and have had no list since. Each of these parts gets a share of the next
    /// list, so that a wait for that list includes the work that the part waits for.
    waiting_parts: BTreeSet<usize>,
    /// The error of a list that was only partly queued. Once it is set, the device queues no more lists.
    stopped: Option<Error>,
}

/// A list of commands, split by device.
struct SplitList {
    shares: Shares,
    /// Memory allocated for the duration of this list.
    temporaries: Vec<DeviceAddress>,
    returned: Arc<ReturnedStaging>,
}

impl MultiDevice {
    /// Combines devices, in the order of their slots.
    ///
    /// # Panics
    /// If `parts` is empty.
    #[must_use]
    pub fn new(parts: Vec<Arc<dyn Device>>) -> Self {
        assert!(!parts.is_empty(), "at least one device");
        Self { parts, memories: RwLock::default(), memory_next: AtomicU64::new(1), lanes: Default::default() }
    }

    fn address_of(&self, memory: MemoryId) -> DeviceAddress {
        let address = self.memories.read().get(&memory).copied();
        address.unwrap_or_else(|| panic!("{memory:?} is no memory of this device"))
    }

    /// Creates an id for an allocation of one part.
    fn name(&self, address: DeviceAddress) -> MemoryId {
        let id = MemoryId(self.memory_next.fetch_add(1, Ordering::Relaxed));
        self.memories.write().insert(id, address);
        id
    }

    /// Allocates memory in the part that serves the place.
    fn allocated(
        &self,
        place: Place,
        allocate: impl FnOnce(&dyn Device) -> Result<MemoryId>,
    ) -> Result<MemoryId> {
        let part = part_of(place);
        let reason = "no device is bound to this slot";
        let device = self.parts.get(part).ok_or(Error::Unavailable(Unavailable::Place { place, reason }))?;
        Ok(self.name(DeviceAddress { part, memory: allocate(&**device)? }))
    }

    fn lane(&self, lane: Lane) -> &MultiLane {
        &self.lanes[lane as usize]
    }

    /// Splits a list into steps. Also returns the memory allocated for the duration of the list.
    fn plan(&self, commands: Vec<Command>) -> Result<(Vec<SplitStep>, Vec<DeviceAddress>)> {
        let mut temporaries = Vec::new();
        let mut planner = SplitPlanner {
            address_of: |span: Span| self.address_of(span.memory),
            aside: |part: usize, len| {
                let memory = self.parts[part].allocate(place_of(part), len)?;
                temporaries.push(DeviceAddress { part, memory });
                Ok(Span { memory, offset: 0, len })
            },
            steps: Vec::new(),
            written: Vec::new(),
        };
        let planned = commands.into_iter().try_for_each(|command| planner.command(command));
        let steps = planner.steps;
        match planned {
            Ok(()) => Ok((steps, temporaries)),
            Err(error) => {
                self.release_all(temporaries);
                Err(error)
            }
        }
    }

    /// Queues steps in order. Parts in `waiting_parts` get a list even without commands.
    fn run(
        &self,
        lane: Lane,
        steps: Vec<SplitStep>,
        mut staging: Vec<Staging>,
        mut waiting_parts: BTreeSet<usize>,
    ) -> Result<Shares> {
        let mut commands = Vec::new();
        let mut early = Vec::new();
        for step in steps {
            match step {
                SplitStep::Run(part, command) => commands.push((part, command)),
                SplitStep::Settle => {
                    early.extend(self.begin(lane, &mut commands, &staging)?);
                    for shares in early.drain(..) {
                        shares.finish_into(&self.parts, &mut staging)?;
                    }
                }
                SplitStep::Across { source, target } => {
                    early.extend(self.begin(lane, &mut commands, &staging)?);
                    early.extend(self.copy_across_parts(lane, source, target)?);
                    // The part's next list waits for the copy. A caller that waits for that list thus also waits for
                    // the copy.
                    waiting_parts.insert(source.part);
                }
            }
        }
        Shares::of(&self.parts, lane, commands, staging, &waiting_parts, early)
    }

    /// Queues the commands collected so far. They use copies of the staging, because later steps may read the same
    /// bytes.
    fn begin(
        &self,
        lane: Lane,
        commands: &mut Vec<(usize, Command)>,
        staging: &[Staging],
    ) -> Result<Option<Shares>> {
        if commands.is_empty() {
            return Ok(None);
        }
        Shares::copies(&self.parts, lane, std::mem::take(commands), staging).map(Some)
    }

    /// Copies bytes from the memory of one device to that of another. Returns the copy if it is still in flight.
    fn copy_across_parts(&self, lane: Lane, source: PartSpan, target: PartSpan) -> Result<Option<Shares>> {
        let [from, to] = [source.part, target.part].map(|part| &*self.parts[part]);
        if let Some(peers) = to.abilities().peers
            && let Some(copy) = peers.copy_from(lane, from, source.span, target.span)?
        {
            return Ok(Some(Shares::copy(target.part, copy)));
        }
        self.by_staging(lane, source, target).map(|()| None)
    }

    fn by_staging(&self, lane: Lane, source: PartSpan, target: PartSpan) -> Result<()> {
        let mut staging = self.parts[0].staging(source.span.len.min(ACROSS_LEN_MAX) as usize)?;
        let mut done = 0;
        // The loop runs at least once, so that the bounds of empty ranges are checked too.
        loop {
            let len = ACROSS_LEN_MAX.min(source.span.len - done);
            let (from, to) = (source.piece(done, len), target.piece(done, len));
            let staged = StagingSpan { index: 0, offset: 0, len: len as usize };
            let steps = [
                (from.part, Command::Download { source: from.span, target: staged }),
                (to.part, Command::Upload { source: staged, target: to.span }),
            ];
            for (part, command) in steps {
                let list = CommandList { commands: vec![command], staging: vec![staging] };
                let device = &*self.parts[part];
                let returned = device.submit(lane, list)?.finish(device)?;
                staging = returned.into_iter().next().expect("one staging went in");
            }
            done += len;
            if done == source.span.len {
                return Ok(());
            }
        }
    }

    /// Retires the lists whose parts are done, in the lane's order.
    fn settle(&self, lane: Lane, state: &mut LaneState) {
        while let Some(list) = state.in_flight.front() {
            if !list.shares.fences().all(|(part, fence)| self.parts[part].reached(lane) >= fence.value) {
                return;
            }
            let list = state.in_flight.pop_front().expect("looked at just now");
            match list.shares.finish(&self.parts) {
                Ok(staging) => *list.returned.lock() = staging,
                Err(error) => {
                    state.stopped.get_or_insert(error);
                    return;
                }
            }
            self.release_all(list.temporaries);
            state.reached += 1;
        }
    }

    /// Returns the fences that must pass before this fence passes, one for each part.
    fn points(&self, fence: Fence) -> Result<BTreeMap<usize, Fence>> {
        let mut state = self.lane(fence.lane).state.lock();
        assert!(fence.value <= state.given, "{fence:?} was not handed out: the lane gave {}", state.given);
        self.settle(fence.lane, &mut state);
        let left = fence.value.saturating_sub(state.reached) as usize;
        if left > state.in_flight.len() {
            let stopped = state.stopped.clone();
            return Err(stopped.expect("a list that was given a fence is under way, done, or lost"));
        }
        // A part's fences rise from list to list, so the last one covers all earlier ones.
        let lists = state.in_flight.iter().take(left);
        Ok(lists.flat_map(|list| list.shares.fences()).collect())
    }

    /// Calls `call` on the device that owns the caller's stream, and returns that device's index with the result. For a
    /// default stream, calls all devices, because each device has a default stream with that handle.
    ///
    /// # Errors
    /// `Refused` if all devices reject the stream; a device error.
    fn with_stream<T>(
        &self,
        stream: RawStream,
        call: impl Fn(&dyn DeviceStreams) -> Result<T>,
    ) -> Result<Vec<(usize, T)>> {
        let (mut accepted, mut refused) = (Vec::new(), None);
        for (part, device) in self.parts.iter().enumerate() {
            match device.streams(stream).and_then(&call) {
                Ok(answer) => accepted.push((part, answer)),
                // The stream may belong to another part.
                Err(error @ Error::Refused(Refused::Stream { .. })) => _ = refused.get_or_insert(error),
                Err(error) => return Err(error),
            }
            if !accepted.is_empty() && !stream.is_default() {
                break;
            }
        }
        if accepted.is_empty() {
            return Err(refused.expect("there is at least one device, and it refused"));
        }
        Ok(accepted)
    }

    /// Returns the streams ability of a part that has recorded a point.
    fn streams_of(&self, part: usize) -> &dyn DeviceStreams {
        self.parts[part].abilities().streams.expect("it recorded the point")
    }

    fn release_all(&self, memory: Vec<DeviceAddress>) {
        for DeviceAddress { part, memory } in memory {
            if let Err(error) = self.parts[part].release(memory) {
                tracing::warn!(%error, "cannot release the memory of a list");
            }
        }
    }
}

/// Returns the index of the part that owns the memory of a place.
fn part_of(place: Place) -> usize {
    match place {
        Place::Device(slot) => slot as usize,
        _ => 0,
    }
}

/// Returns the place of a part's own memory.
fn place_of(part: usize) -> Place {
    Place::Device(part as u32)
}

/// Translates a place of a part to the place under which this device presents it.
fn placed(part: usize, place: Place) -> Place {
    if matches!(place, Place::Device(_)) { place_of(part) } else { place }
}

impl Device for MultiDevice {
    fn label(&self) -> String {
        self.parts.iter().map(|part| part.label()).collect::<Vec<_>>().join(" and ")
    }

    fn allocate(&self, place: Place, len: u64) -> Result<MemoryId> {
        self.allocated(place, |device| device.allocate(place, len))
    }

    fn allocates_zeros(&self, place: Place, len: u64) -> bool {
        self.parts.get(part_of(place)).is_some_and(|device| device.allocates_zeros(place, len))
    }

    fn crosses_bus(&self) -> bool {
        self.parts.iter().any(|part| part.crosses_bus())
    }

    fn release(&self, memory: MemoryId) -> Result<()> {
        let DeviceAddress { part, memory: own } = self.address_of(memory);
        self.parts[part].release(own)?;
        self.memories.write().remove(&memory);
        Ok(())
    }

    fn staging(&self, len: usize) -> Result<Staging> {
        self.parts[0].staging(len)
    }

    fn submit(&self, lane: Lane, list: CommandList) -> Result<Pending> {
        let multi_lane = self.lane(lane);
        let _order = multi_lane.order.lock();
        if let Some(error) = &multi_lane.state.lock().stopped {
            return Err(error.clone());
        }
        let (steps, temporaries) = self.plan(list.commands)?;
        let waiting_parts = std::mem::take(&mut multi_lane.state.lock().waiting_parts);
        let shares = self.run(lane, steps, list.staging, waiting_parts);
        let mut state = multi_lane.state.lock();
        let shares = shares.map_err(|error| state.stopped.insert(error).clone())?;
        state.given += 1;
        let returned = Arc::<ReturnedStaging>::default();
        state.in_flight.push_back(SplitList { shares, temporaries, returned: returned.clone() });
        self.settle(lane, &mut state);
        Ok(Pending::new(Fence { lane, value: state.given }, returned))
    }

    fn reached(&self, lane: Lane) -> u64 {
        let mut state = self.lane(lane).state.lock();
        self.settle(lane, &mut state);
        state.reached
    }

    fn wait(&self, fence: Fence) -> Result<()> {
        for (part, point) in self.points(fence)? {
            self.parts[part].wait(point)?;
        }
        // This call frees the resources of completed lists, so that their staging is available.
        self.points(fence).map(drop)
    }

    fn after(&self, lane: Lane, fence: Fence) -> Result<()> {
        // If another part copies from a part, that part gets a list after the copy. Waiting for each part's last list
        // is therefore sufficient.
        for (part, point) in self.points(fence)? {
            self.parts[part].after(lane, point)?;
            self.lane(lane).state.lock().waiting_parts.insert(part);
        }
        Ok(())
    }

    fn read_places(&self, read: &mut dyn FnMut(&dyn Fn(MemoryId) -> Place)) {
        read(&|memory| {
            let DeviceAddress { part, memory } = self.address_of(memory);
            placed(part, self.parts[part].place_of(memory))
        });
    }

    fn abilities(&self) -> Abilities<'_> {
        let has_streams = self.parts.iter().any(|part| part.abilities().streams.is_some());
        Abilities {
            cache: Some(self),
            lent: Some(self),
            files: self.parts[0].abilities().files.and(Some(self)),
            streams: has_streams.then_some(self as &dyn DeviceStreams),
            addresses: Some(self),
            bytes: Some(self),
            direct_reads: Some(self),
            unified: Some(self),
            ..Abilities::default()
        }
    }
}

impl MemoryCache for MultiDevice {
    fn allocate_at_once(&self, place: Place, len: u64) -> Result<MemoryId> {
        self.allocated(place, |device| device.allocate_at_once(place, len))
    }

    fn trim(&self) -> Result<u64> {
        self.parts.iter().filter_map(|part| part.abilities().cache).map(|cache| cache.trim()).sum()
    }

    fn memory_stats(&self) -> Vec<(Place, MemoryStats)> {
        let of_part = |(part, device): (usize, &Arc<dyn Device>)| {
            let stats = device.abilities().cache.map_or_else(Vec::new, |cache| cache.memory_stats());
            stats.into_iter().map(move |(place, stats)| (placed(part, place), stats))
        };
        self.parts.iter().enumerate().flat_map(of_part).collect()
    }
}

impl LentMemory for MultiDevice {
    fn adopt(&self, memory: &CallerMemory) -> Result<(MemoryId, Place)> {
        let mut refused = None;
        for (part, device) in self.parts.iter().enumerate() {
            match device.lent(memory.byte_len()).and_then(|lent| lent.adopt(memory)) {
                // The memory may belong to another part.
                Err(error @ Error::Refused(Refused::Memory { .. })) => _ = refused.get_or_insert(error),
                Err(error) => return Err(error),
                Ok((own, place)) => {
                    return Ok((self.name(DeviceAddress { part, memory: own }), placed(part, place)));
                }
            }
        }
        Err(refused.expect("at least one device was asked"))
    }

    fn alias(&self, span: Span) -> Result<MemoryId> {
        let DeviceAddress { part, memory } = self.address_of(span.memory);
        let alias = self.parts[part].lent(span.len)?.alias(Span { memory, ..span })?;
        Ok(self.name(DeviceAddress { part, memory: alias }))
    }

    fn origin(&self, memory: MemoryId) -> (u64, u64) {
        let DeviceAddress { part, memory } = self.address_of(memory);
        self.parts[part].origin(memory)
    }
}

impl DeviceFiles for MultiDevice {
    /// Registers the file with the first device, which also pins the staging of all parts.
    fn register(&self, memory: Box<dyn FileMemory>) -> Result<MemoryId> {
        let memory = self.parts[0].files(memory.byte_len())?.register(memory)?;
        Ok(self.name(DeviceAddress { part: 0, memory }))
    }

    fn unregister(&self, memory: MemoryId) -> Result<()> {
        let DeviceAddress { part, memory: own } = self.address_of(memory);
        self.memories.write().remove(&memory);
        self.parts[part].abilities().files.expect("it registered the memory").unregister(own)
    }
}

impl DeviceStreams for MultiDevice {
    fn wait_external(&self, lane: Lane, stream: RawStream) -> Result<()> {
        let parts = self.with_stream(stream, |streams| streams.wait_external(lane, stream))?;
        self.lane(lane).state.lock().waiting_parts.extend(parts.into_iter().map(|(part, ())| part));
        Ok(())
    }

    fn signal_external(&self, stream: RawStream, fence: Fence) -> Result<()> {
        let points = self.points(fence)?;
        let (mut accepted, mut refused) = (false, Vec::new());
        for (part, device) in self.parts.iter().enumerate() {
            let point = points.get(&part).copied().unwrap_or(Fence { value: 0, ..fence });
            match device.streams(stream).and_then(|streams| streams.signal_external(stream, point)) {
                Ok(()) => accepted = true,
                Err(error @ Error::Refused(Refused::Stream { .. })) => refused.push((device, point, error)),
                Err(error) => return Err(error),
            }
        }
        if !accepted {
            return refused.into_iter().next().map_or(Ok(()), |(_, _, error)| Err(error));
        }
        // If a part cannot make another part's stream wait, this thread waits instead.
        refused.into_iter().try_for_each(|(device, point, _)| device.wait(point))
    }

    fn stream_event(&self, stream: RawStream) -> Result<StreamEvent> {
        let points: PartPoints = self.with_stream(stream, |streams| streams.stream_event(stream))?;
        Ok(StreamEvent::new(points))
    }

    fn wait_event(&self, point: &StreamEvent) -> Result<()> {
        point.of::<PartPoints>().iter().try_for_each(|(part, point)| self.streams_of(*part).wait_event(point))
    }

    fn has_passed(&self, point: &StreamEvent) -> Result<bool> {
        for (part, point) in point.of::<PartPoints>() {
            if !self.streams_of(*part).has_passed(point)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn hold_stream(&self, stream: RawStream, point: &StreamEvent) -> Result<()> {
        for (part, point) in point.of::<PartPoints>() {
            match self.streams_of(*part).hold_stream(stream, point) {
                // The stream belongs to another part, which cannot wait for this point, so this thread waits
                // instead.
                Err(Error::Refused(Refused::Stream { .. })) => {
                    self.with_stream(stream, |streams| streams.stream_event(stream))?;
                    self.streams_of(*part).wait_event(point)?;
                }
                held => held?,
            }
        }
        Ok(())
    }
}

impl KernelAddresses for MultiDevice {
    fn address(&self, memory: MemoryId) -> Option<u64> {
        let DeviceAddress { part, memory } = self.address_of(memory);
        self.parts[part].abilities().addresses?.address(memory)
    }

    fn gpu_of(&self, memory: MemoryId) -> Option<u32> {
        let DeviceAddress { part, memory } = self.address_of(memory);
        self.parts[part].abilities().addresses?.gpu_of(memory)
    }

    fn gpu_at(&self, slot: u32) -> Option<u32> {
        self.parts.get(slot as usize)?.abilities().addresses?.gpu_at(0)
    }
}

impl HostBytes for MultiDevice {
    fn bytes(&self, memory: MemoryId) -> Option<PageBytes> {
        let DeviceAddress { part, memory } = self.address_of(memory);
        self.parts[part].abilities().bytes?.bytes(memory)
    }
}

impl DirectReads for MultiDevice {
    /// Returns `false`: all reads pass through lanes.
    fn read_now(&self, _memory: MemoryId, _offset: u64, _out: &mut [u8]) -> bool {
        false
    }

    fn rename(&self, memory: MemoryId) -> Result<MemoryId> {
        let DeviceAddress { part, memory: own } = self.address_of(memory);
        let renamed = self.parts[part].rename(own)?;
        self.memories.write().remove(&memory);
        Ok(self.name(DeviceAddress { part, memory: renamed }))
    }
}

impl UnifiedMemory for MultiDevice {
    /// Returns the capabilities of the part that owns [`Place::Unified`].
    fn support(&self) -> UnifiedSupport {
        self.parts[part_of(Place::Unified)].unified_support()
    }

    fn hint(&self, memory: MemoryId, hint: UnifiedHint) -> Result<()> {
        let DeviceAddress { part, memory } = self.address_of(memory);
        self.parts[part].hint_unified(memory, hint)
    }
}

impl std::fmt::Debug for MultiDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MultiDevice").field("device", &self.label()).finish_non_exhaustive()
    }
}
