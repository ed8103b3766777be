//! Pages in the memory of a GPU.
//!
//! Read in this order: `driver` (the calls, located at run time), `errors`, `context` (how calls are made), `resource`,
//! `memory` and `staging`, `handles` (ids of page memory), `caller_memory`, `file_memory`, `completion`, `event`,
//! `lane` and `stream` (fences and callers' streams), `unified` (hints), `pinned_reads` (reads of pinned pages on a
//! caller's thread), `translate` and `plan` (from commands to launches), `kernels`, `launch` and `bulk_copies`
//! (execution of launches), `peer` and `peer_copy` (another GPU's memory), `nccl` (GPUs of several processes). `abi` is
//! the interface between host and kernels, `modules` contains the kernels themselves. [`HostDevice`] defines the result
//! of every list (I11).
//!
//! A list becomes a few launches over tables in pinned memory, followed by one write of the lane's fence. The store
//! never uses the default stream. Only freeing memory to the driver waits for the whole GPU, which happens in a
//! shortage and in [`MemoryCache::trim`]. A crash loses all pages, and the log restores them.
//!
//! [`HostDevice`]: super::host::HostDevice

pub mod abi;
pub mod modules;
#[cfg(feature = "nccl")]
pub mod nccl;
pub mod resource;
mod areas;
mod peer_copy;
mod caller_memory;
mod bulk_copies;
mod context;
mod driver;
mod errors;
mod event;
mod kernels;
mod handles;
mod lane;
mod launch;
mod translate;
mod memory;
mod peer;
mod pinned_reads;
mod file_memory;
mod piece_plan;
mod plan;
mod staging;
mod stream;
mod unified;
mod completion;

use std::any::Any;
use std::sync::{Arc, OnceLock};

use remanent_format::Place;

use self::bulk_copies::BulkQueue;
use self::context::{Context, ContextGuard};
use self::driver::Driver;
use self::event::CudaEvent;
use self::file_memory::RegisteredMappings;
use self::handles::{Allocation, Handles};
use self::kernels::Functions;
use self::lane::{LaneTurn, Timeline};
use self::launch::{Launcher, Layout};
use self::memory::{DeviceBlock, PlaceMemory};
use self::pinned_reads::{PinnedReads, WrittenStripes};
use self::plan::LaunchPlan;
use self::resource::{DriverMemory, Kind, MemoryResource, Pool};
use self::translate::StagedBytes;
use self::unified::UnifiedHints;
use super::{
    Abilities, BulkMemory, CallerMemory, CommandList, Device, DeviceFiles, DeviceStreams, DirectReads, Fence,
    KernelAddresses, Lane, LentMemory, MemoryCache, MemoryId, MemoryStats, PeerCopies, Pending, RawStream,
    ReturnedStaging, Span, Staging, StreamEvent, UnifiedHint, UnifiedMemory, UnifiedSupport,
};
use crate::base::sync::Mutex;
use crate::disk::FileMemory;
use crate::error::{Error, Refused, Result, Unavailable};

/// The maximum length of a slab of pinned memory in bytes, rounded up to whole blocks. A driver pins 1.5 GB/s
/// regardless of the number of calls, and no other part of the process can use the unused part of a slab.
const PINNED_SLAB_LEN_MAX: u64 = 4 << 20;

/// The maximum number of pages allocated per call, which limits the length of temporary lists.
const AT_ONCE: usize = 4096;

/// A device that keeps pages in a GPU's memory, in pinned host memory, and in managed memory.
///
/// `Device(n)` is this GPU's memory for every `n`. `Host` and `Pinned` are both pinned host memory, because
/// the kernels that change pages must be able to access them.
pub struct CudaDevice {
    // Dropped in this order: lanes wait for their streams before memory is freed.
    lanes: [Timeline; Lane::ALL.len()],
    bulk: BulkQueue,
    functions: &'static Functions,
    pages: Handles,
    pinned_reads: PinnedReads,
    files: RegisteredMappings,
    on_gpu: PlaceMemory,
    managed: PlaceMemory,
    hints: UnifiedHints,
    /// Pinned memory for pages in host memory, for staging and for launch tables.
    pinned: PlaceMemory,
    /// The error of a list that was only partly queued. Once it is set, the device queues no more lists.
    stopped: OnceLock<Error>,
    context: &'static Context,
}

impl CudaDevice {
    /// Opens the GPU with this number among those visible to the process.
    ///
    /// # Errors
    /// `Unavailable`, which names the missing part: the driver, the GPU, or a required capability.
    pub fn open(ordinal: u32) -> Result<Self> {
        Self::open_with(ordinal, Arc::new(Pool::new(DriverMemory::of(ordinal)?)))
    }

    /// Opens a GPU like [`open`](Self::open), but allocates pages on the GPU from a caller's memory resource,
    /// such as an allocator shared with a framework or one of [`resource`]'s wrappers around the driver.
    /// Pages in host memory, staging and tables still come from the driver.
    ///
    /// ```no_run
    /// use std::sync::Arc;
    /// use remanent::device::cuda::CudaDevice;
    /// use remanent::device::cuda::resource::{DriverMemory, LimitedMemory, Pool};
    /// use remanent::{Options, Store, disk::dir::DirDisk};
    /// // Allocates at most 8 GiB from the driver, including slack.
    /// let memory = Pool::new(LimitedMemory::new(DriverMemory::of(0)?, 8 << 30));
    /// let device = CudaDevice::open_with(0, Arc::new(memory))?;
    /// let store = Store::open_on(Arc::new(DirDisk::new("mystore")), Arc::new(device), Options::new())?;
    /// # drop(store);
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// Same as `open`.
    pub fn open_with(ordinal: u32, on_gpu: Arc<dyn MemoryResource>) -> Result<Self> {
        let unavailable =
            |reason| Error::Unavailable(Unavailable::Device { device: format!("cuda:{ordinal}"), reason });
        let context = Context::of(ordinal).map_err(unavailable)?;
        let driver = |kind| DriverMemory::new(context, kind);
        let pinned = Pool::with_slabs_up_to(PINNED_SLAB_LEN_MAX, driver(Kind::Pinned));
        let pinned = PlaceMemory::new(Place::Pinned, Arc::new(pinned));
        let lane = |is_urgent| Timeline::new(context, &pinned, is_urgent);
        // Commits wait for the lanes [`Lane::Apply`] and [`Lane::Stage`], so these two are urgent.
        Ok(Self {
            lanes: [lane(true)?, lane(false)?, lane(false)?, lane(true)?, lane(false)?],
            bulk: BulkQueue::new(context),
            functions: Functions::of(context).map_err(|error| unavailable(error.to_string()))?,
            pages: Handles::new(),
            pinned_reads: PinnedReads::new(),
            files: RegisteredMappings::default(),
            on_gpu: PlaceMemory::new(Place::Device(0), on_gpu),
            hints: UnifiedHints::default(),
            managed: PlaceMemory::new(Place::Unified, Arc::new(Pool::new(driver(Kind::Managed)))),
            pinned,
            stopped: OnceLock::new(),
            context,
        })
    }

    /// Returns the number of GPUs visible to the process.
    ///
    /// # Errors
    /// `Unavailable` if the driver is missing or too old.
    pub fn count() -> Result<u32> {
        let unavailable =
            |reason| Error::Unavailable(Unavailable::Device { device: "cuda".to_owned(), reason });
        let driver = Driver::get().map_err(unavailable)?;
        driver.count().map_err(|code| unavailable(code.to_string()))
    }

    fn lane(&self, lane: Lane) -> &Timeline {
        &self.lanes[lane as usize]
    }

    fn memory(&self, kind: Kind) -> &PlaceMemory {
        match kind {
            Kind::Device => &self.on_gpu,
            Kind::Managed => &self.managed,
            Kind::Pinned => &self.pinned,
        }
    }

    /// Allocates a block. If memory is short, frees idle memory and tries again.
    fn block(&self, kind: Kind, len: u64) -> Result<DeviceBlock> {
        match self.memory(kind).allocate(len) {
            Err(Error::OutOfMemory { .. }) if self.trim()? > 0 => self.memory(kind).allocate(len),
            other => other,
        }
    }

    /// Creates page memory from a block that `allocate` returns.
    fn page(
        &self,
        place: Place,
        len: u64,
        allocate: impl FnOnce(Kind) -> Result<DeviceBlock>,
    ) -> Result<MemoryId> {
        let kind = self.kind_of(place)?;
        let named = |error| refused_in(place, error);
        let address = if len == 0 { 0 } else { allocate(kind).map_err(named)?.into_raw() };
        Ok(self.pages.insert(Allocation { address, len, kind, is_adopted: false, is_file: false }))
    }

    /// Allocates page memory for `count` pages of the same length.
    fn pages(&self, (place, len): (Place, u64), count: usize, made: &mut Vec<MemoryId>) -> Result<()> {
        let kind = self.kind_of(place)?;
        let mut addresses = Vec::with_capacity(count);
        let allocated = if len == 0 {
            addresses.resize(count, 0);
            Ok(())
        } else {
            match self.memory(kind).allocate_all(len, count, &mut addresses) {
                Err(Error::OutOfMemory { .. }) if self.trim()? > 0 => {
                    let left = count - addresses.len();
                    self.memory(kind).allocate_all(len, left, &mut addresses)
                }
                other => other,
            }
        };
        let page = |address| Allocation { address, len, kind, is_adopted: false, is_file: false };
        self.pages.insert_all(addresses.into_iter().map(page), made);
        allocated.map_err(|error| refused_in(place, error))
    }

    /// Returns the kind of memory that a place's pages use.
    fn kind_of(&self, place: Place) -> Result<Kind> {
        match place {
            Place::Device(_) => Ok(Kind::Device),
            Place::Pinned | Place::Host => Ok(Kind::Pinned),
            Place::Unified if self.context.has_managed_memory => Ok(Kind::Managed),
            Place::Unified => Err(Error::Unavailable(Unavailable::Place {
                place,
                reason: "this GPU has no managed memory",
            })),
            _ => {
                let reason = "a GPU keeps pages in its own memory and in the host's only";
                Err(Error::Unavailable(Unavailable::Place { place, reason }))
            }
        }
    }

    /// Waits until no lane uses any page, then frees all pages.
    fn free_pages(&self) -> Result<()> {
        self.lanes.iter().try_for_each(Timeline::drain).inspect_err(|_| self.files.leave())?;
        self.files.unregister_all(self.context);
        self.pages.drain().into_iter().try_for_each(|page| self.free(page))
    }

    fn free(&self, page: Allocation) -> Result<()> {
        let ended = self.hints.end(self.context, &page);
        if page.len == 0 || page.is_adopted {
            return ended;
        }
        // SAFETY: the block was converted to this raw address for an id that was retired just before.
        unsafe { self.memory(page.kind).block(page.address, page.len) }.free()?;
        ended
    }

    /// Queues a plan. The lane keeps `staging` and `blocks` until the fence has passed.
    ///
    /// # Safety
    /// All ranges that the plan names are in allocated memory. Memory other than `staging` and `blocks` stays allocated
    /// until the fence has passed. Until then, its owner uses it only in lists of this lane, or of lanes that fences
    /// order with this lane.
    unsafe fn queue(
        &self,
        lane: Lane,
        plan: &LaunchPlan,
        staging: Vec<Staging>,
        mut blocks: Vec<DeviceBlock>,
    ) -> Result<Pending> {
        let layout = Layout::of(plan);
        if layout.len > 0 {
            let mut tables = self.block(Kind::Pinned, layout.len as u64)?;
            // SAFETY: the block was allocated with this length just now, and no list names it yet.
            unsafe { layout.write(plan, &mut tables) };
            blocks.push(tables);
        }
        let tables = if layout.len > 0 { blocks.last() } else { None };
        // From here on, this thread holds the lane's lock, so that one list is queued at a time.
        let returned = Arc::new(Mutex::new(staging));
        let timeline = self.lane(lane);
        let turn = timeline.turn();
        let entered = self.context.enter()?;
        let launcher = Launcher {
            context: self.context,
            entered: &entered,
            functions: self.functions,
            bulk: &self.bulk,
            lane: timeline,
        };
        // After a failure the effect of the list is unknown, so no fence is returned for it.
        // SAFETY: the tables were written above, and `end` gives their block and the staging to the lane. The
        // rest is the caller's promise.
        let queued = unsafe { launcher.run(plan, &layout, tables) };
        let value = self.end(turn, &entered, &returned, blocks, queued)?;
        Ok(Pending::new(Fence { lane, value }, returned))
    }

    /// Calls `queue`, which queues command lists, after announcing the pinned memory that the lists write, so that no
    /// thread reads it concurrently.
    fn writing<T>(
        &self,
        lane: Lane,
        written: WrittenStripes,
        queue: impl FnOnce() -> Result<T>,
        fence: impl Fn(&T) -> u64,
    ) -> Result<T> {
        self.pinned_reads.announce(written);
        let queued = queue();
        match &queued {
            Ok(queued) => self.pinned_reads.queued(written, lane, fence(queued)),
            Err(_) if self.check_running().is_ok() => self.pinned_reads.queued(written, lane, 0),
            // A part of the list may have been queued, so the announcement stays in effect.
            Err(_) => {}
        }
        queued
    }

    /// Ends a list and returns its fence. If a part of the list could not be queued, the device queues no more lists.
    fn end(
        &self,
        turn: LaneTurn<'_>,
        entered: &ContextGuard<'_>,
        returned: &Arc<ReturnedStaging>,
        blocks: Vec<DeviceBlock>,
        queued: Result<()>,
    ) -> Result<u64> {
        let ended = match queued {
            Ok(()) => turn.end(entered, returned, blocks),
            Err(error) => {
                turn.abandon(returned, blocks);
                Err(error)
            }
        };
        ended.map_err(|error| self.stopped.get_or_init(|| error).clone())
    }

    /// Returns an error if an earlier list was left partly queued.
    fn check_running(&self) -> Result<()> {
        self.stopped.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    fn assert_given(&self, fence: Fence) {
        let given = self.lane(fence.lane).fences().given();
        assert!(fence.value <= given, "{fence:?} was not handed out: the lane gave {given}");
    }
}

/// Returns the place of page memory.
fn place_of(page: &Allocation) -> Place {
    if page.is_file { Place::Host } else { caller_memory::place_of(page.kind) }
}

/// Adds the place of the failed allocation to an error.
fn refused_in(place: Place, error: Error) -> Error {
    match error {
        Error::OutOfMemory { len, .. } => Error::OutOfMemory { place, len },
        other => other,
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        if let Err(error) = self.free_pages() {
            tracing::warn!(%error, "page memory stays allocated");
        }
    }
}

impl Device for CudaDevice {
    fn label(&self) -> String {
        format!("cuda:{} ({})", self.context.ordinal, self.context.name)
    }

    fn allocate(&self, place: Place, len: u64) -> Result<MemoryId> {
        self.page(place, len, |kind| self.block(kind, len))
    }

    fn crosses_bus(&self) -> bool {
        true
    }

    fn release(&self, memory: MemoryId) -> Result<()> {
        // A thread that reads the memory has looked it up by this id, and finishes before the id is removed.
        let page = self.pinned_reads.without_readers(memory, || self.pages.remove(memory));
        self.free(page.unwrap_or_else(|| panic!("{memory:?} is no memory of this device")))
    }

    fn staging(&self, len: usize) -> Result<Staging> {
        match staging::staging(&self.pinned, len) {
            Err(Error::OutOfMemory { .. }) if self.trim()? > 0 => staging::staging(&self.pinned, len),
            other => other,
        }
    }

    fn submit(&self, lane: Lane, list: CommandList) -> Result<Pending> {
        self.check_running()?;
        let CommandList { commands, staging } = list;
        // The plan is made before anything is queued. A list that violates the contract panics here.
        let mut blocks = Vec::new();
        let mut scratch = 0;
        let scratch_len = translate::scratch_len(&commands);
        if scratch_len > 0 {
            let block = self.block(Kind::Device, scratch_len)?;
            scratch = block.address;
            blocks.push(block);
        }
        let staged: Vec<StagedBytes<'_>> =
            staging.iter().map(|bytes| StagedBytes { bytes, address: staging::address_of(bytes) }).collect();
        let plan = translate::plan(&commands, &self.pages, &staged, scratch);
        // SAFETY: `translate::plan` checked that page memory and staging contain the ranges. The owner of page
        // memory is the engine's arena, which releases memory, and uses it in other lanes, only after the
        // fences of the lists that name it, as `release` and `after` require.
        let queue = || unsafe { self.queue(lane, &plan, staging, blocks) };
        self.writing(lane, plan.pinned, queue, |pending| pending.fence().value)
    }

    fn reached(&self, lane: Lane) -> u64 {
        self.lane(lane).fences().reached()
    }

    fn wait(&self, fence: Fence) -> Result<()> {
        self.assert_given(fence);
        self.lane(fence.lane).fences().wait(fence.value)
    }

    fn after(&self, lane: Lane, fence: Fence) -> Result<()> {
        self.assert_given(fence);
        if lane == fence.lane || self.reached(fence.lane) >= fence.value {
            return Ok(());
        }
        self.lane(lane).follow(self.lane(fence.lane))
    }

    fn read_places(&self, read: &mut dyn FnMut(&dyn Fn(MemoryId) -> Place)) {
        read(&|memory| place_of(&self.pages.named(memory)));
    }

    fn abilities(&self) -> Abilities<'_> {
        Abilities {
            bulk: Some(self),
            cache: Some(self),
            lent: Some(self),
            files: Some(self),
            streams: Some(self),
            addresses: Some(self),
            bytes: None,
            direct_reads: Some(self),
            unified: Some(self),
            peers: Some(self),
        }
    }
}

impl BulkMemory for CudaDevice {
    fn allocate_all(&self, pages: &[(Place, u64)], made: &mut Vec<MemoryId>) -> Result<()> {
        let mut runs = pages.chunk_by(|one, next| one == next).flat_map(|alike| alike.chunks(AT_ONCE));
        runs.try_for_each(|alike| self.pages(alike[0], alike.len(), made))
    }

    fn release_all(&self, memory: &[MemoryId], failed: &mut dyn FnMut(usize, Error)) {
        // Threads that read any of this memory have looked it up by id, and finish before the ids are removed.
        let removed = self.pinned_reads.without_any_reader(|| self.pages.remove_all(memory.iter().copied()));
        let named = |(page, memory): (Option<Allocation>, &MemoryId)| {
            page.unwrap_or_else(|| panic!("{memory:?} is no memory of this device"))
        };
        let pages: Vec<Allocation> = removed.into_iter().zip(memory).map(named).collect();
        let mut first = 0;
        for alike in pages.chunk_by(Allocation::is_freed_with) {
            let [page, ..] = alike else { continue };
            if page.len > 0 && !page.is_adopted && page.kind != Kind::Managed {
                let addresses: Vec<u64> = alike.iter().map(|page| page.address).collect();
                // SAFETY: the blocks were converted to these raw addresses for ids that were retired just
                // before; all have this kind and length.
                unsafe {
                    self.memory(page.kind).free_all(&addresses, page.len, &mut |index, error| {
                        failed(first + index, error);
                    });
                }
            } else {
                for (index, page) in alike.iter().enumerate() {
                    if let Err(error) = self.free(*page) {
                        failed(first + index, error);
                    }
                }
            }
            first += alike.len();
        }
    }
}

impl MemoryCache for CudaDevice {
    fn allocate_at_once(&self, place: Place, len: u64) -> Result<MemoryId> {
        self.page(place, len, |kind| self.memory(kind).allocate(len))
    }

    fn trim(&self) -> Result<u64> {
        Ok(self.on_gpu.trim()? + self.managed.trim()? + self.pinned.trim()?)
    }

    fn memory_stats(&self) -> Vec<(Place, MemoryStats)> {
        [&self.on_gpu, &self.managed, &self.pinned].map(|memory| (memory.place, memory.stats())).to_vec()
    }
}

impl LentMemory for CudaDevice {
    fn adopt(&self, memory: &CallerMemory) -> Result<(MemoryId, Place)> {
        let kind = caller_memory::kind_of(self.context, &self.context.enter()?, memory)?;
        let (address, len) = (memory.address(), memory.byte_len());
        let id = self.pages.insert(Allocation { address, len, kind, is_adopted: true, is_file: false });
        Ok((id, caller_memory::place_of(kind)))
    }

    fn alias(&self, span: Span) -> Result<MemoryId> {
        let whole = self.pages.named(span.memory);
        let (address, kind) = (whole.at(span), whole.kind);
        // Marked as adopted: releasing the alias leaves the bytes to the memory that contains them.
        let alias = Allocation { address, len: span.len, kind, is_adopted: true, is_file: false };
        Ok(self.pages.insert(alias))
    }

    /// Returns space 0 and the address, because the driver's addresses are unique across all GPUs and pinned memory.
    fn origin(&self, memory: MemoryId) -> (u64, u64) {
        (0, self.pages.named(memory).address)
    }
}

impl DeviceFiles for CudaDevice {
    fn register(&self, memory: Box<dyn FileMemory>) -> Result<MemoryId> {
        let (address, len) = (memory.address(), memory.byte_len());
        self.files.register(self.context, memory)?;
        let file = Allocation { address, len, kind: Kind::Pinned, is_adopted: true, is_file: true };
        Ok(self.pages.insert(file))
    }

    fn unregister(&self, memory: MemoryId) -> Result<()> {
        let file = self.pages.remove(memory).filter(|file| file.is_file);
        let file = file.unwrap_or_else(|| panic!("{memory:?} is no file's memory of this device"));
        self.files.unregister(self.context, file.address)
    }
}

impl DeviceStreams for CudaDevice {
    fn wait_external(&self, lane: Lane, stream: RawStream) -> Result<()> {
        self.lane(lane).follow_stream(stream)
    }

    fn signal_external(&self, stream: RawStream, fence: Fence) -> Result<()> {
        self.assert_given(fence);
        if self.reached(fence.lane) >= fence.value {
            // The stream is checked even if the fence has passed, so that errors do not depend on timing.
            return stream::check(self.context, &self.context.enter()?, stream);
        }
        self.lane(fence.lane).lead_stream(stream)
    }

    fn stream_event(&self, stream: RawStream) -> Result<StreamEvent> {
        stream::point(self.context, stream).map(StreamEvent::new)
    }

    fn wait_event(&self, point: &StreamEvent) -> Result<()> {
        point.of::<CudaEvent>().wait()
    }

    fn has_passed(&self, point: &StreamEvent) -> Result<bool> {
        point.of::<CudaEvent>().is_reached()
    }

    fn hold_stream(&self, stream: RawStream, point: &StreamEvent) -> Result<()> {
        stream::hold(self.context, stream, point.of::<CudaEvent>())
    }
}

impl KernelAddresses for CudaDevice {
    fn address(&self, memory: MemoryId) -> Option<u64> {
        let page = self.pages.named(memory);
        (page.len > 0).then_some(page.address)
    }

    fn gpu_of(&self, _memory: MemoryId) -> Option<u32> {
        Some(self.context.ordinal)
    }

    fn gpu_at(&self, slot: u32) -> Option<u32> {
        (slot == 0).then_some(self.context.ordinal)
    }
}

impl DirectReads for CudaDevice {
    fn read_now(&self, memory: MemoryId, offset: u64, out: &mut [u8]) -> bool {
        let read = self.pinned_reads.read(memory, &self.lanes, || {
            let Some(page) = self.pages.get(memory) else { return false };
            let is_within = offset.checked_add(out.len() as u64).is_some_and(|end| end <= page.len);
            if page.kind != Kind::Pinned || page.is_adopted || !is_within {
                return false;
            }
            if !out.is_empty() {
                let source = (page.address + offset) as *const u8;
                // SAFETY: the range is in pinned memory, which the host accesses at the same address. It is
                // allocated, because a release first retires the id, which waits for this read.
                // Nothing writes to it during the read: every list that writes to it is done, the next one
                // waits for this read, and callers' kernels must not write to pages. `out` belongs to the
                // caller and does not overlap the range.
                unsafe { std::ptr::copy_nonoverlapping(source, out.as_mut_ptr(), out.len()) };
            }
            true
        });
        read == Some(true)
    }

    fn rename(&self, memory: MemoryId) -> Result<MemoryId> {
        let renamed = self.pinned_reads.without_readers(memory, || self.pages.remove(memory));
        Ok(self.pages.insert(renamed.unwrap_or_else(|| panic!("{memory:?} is no memory of this device"))))
    }
}

impl UnifiedMemory for CudaDevice {
    fn support(&self) -> UnifiedSupport {
        let Context { has_managed_memory, takes_hints, .. } = *self.context;
        UnifiedSupport { has_pages: has_managed_memory, takes_hints: has_managed_memory && takes_hints }
    }

    fn hint(&self, memory: MemoryId, hint: UnifiedHint) -> Result<()> {
        let page = self.pages.named(memory);
        let refused = |reason| Err(Error::Refused(Refused::Hint { place: place_of(&page), reason }));
        if page.kind != Kind::Managed {
            return refused("only a page in unified memory moves between a GPU and the host by itself");
        }
        if !self.context.takes_hints {
            return refused("this GPU does not share memory with the host page by page");
        }
        if page.len == 0 {
            return Ok(());
        }
        self.hints.apply(self.context, &page, hint, self.lane(Lane::Load).stream())
    }
}

impl PeerCopies for CudaDevice {
    fn copy_from(
        &self,
        lane: Lane,
        other: &dyn Device,
        source: Span,
        target: Span,
    ) -> Result<Option<Pending>> {
        self.check_running()?;
        let Some(other) = (other as &dyn Any).downcast_ref::<Self>() else { return Ok(None) };
        let queue = || peer_copy::copy(self, other, lane, source, target);
        let fence = |queued: &Option<Pending>| queued.as_ref().map_or(0, |pending| pending.fence().value);
        let written = WrittenStripes::of(self.pages.named(target.memory).kind, target.memory);
        self.writing(lane, written, queue, fence)
    }
}

impl std::fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaDevice").field("device", &self.label()).finish_non_exhaustive()
    }
}
