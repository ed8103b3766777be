//! Floor 3. Pages in the memory of a GPU.
//!
//! Read in this order: `driver` (what is called, found at run time), `errors`, `context` (how calls are made),
//! `memory` and `staging`, `word`, `lane` and `stream` (what fences are, and the caller's
//! streams beside them), `list` and `plan` (from commands to launches),
//! `functions`, `launch` and `bulk` (how they are done); `abi` is what host and kernels agree on, `modules`
//! the kernels themselves. [`HostDevice`] defines what every list must lead to (I11).
//!
//! A list becomes a few launches over tables in pinned memory and one write of the lane's fence. Nothing here
//! uses the default stream or waits for the whole GPU, but for giving memory back, which only a shortage and
//! [`CudaDevice::trim`] do. A crash loses all of it; the log brings it back.
//!
//! [`HostDevice`]: super::host::HostDevice

pub mod abi;
pub mod modules;
mod bulk;
mod context;
mod driver;
mod errors;
mod functions;
mod lane;
mod launch;
mod list;
mod memory;
mod plan;
mod staging;
mod stream;
mod word;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, RwLock};
use remanent_format::Place;

use self::bulk::BulkQueue;
use self::context::Context;
use self::driver::Driver;
use self::functions::Functions;
use self::lane::{Timeline, Used};
use self::launch::{Launcher, Layout};
use self::list::{Memories, Memory, Scratch, Staged};
use self::memory::{Block, Kind, Slabs};
use super::{CommandList, Device, Fence, Lane, MemoryId, PageBytes, Pending, RawStream, Staging};
use crate::error::{Error, Result};

/// Pages in a GPU's memory, in pinned host memory, and in managed memory.
///
/// `Device(n)` is this GPU's memory whatever the number. `Host` and `Pinned` are both pinned host memory: the
/// kernels that change pages must reach them.
pub struct CudaDevice {
    // Dropped in this order: lanes wait for their streams, then memory goes.
    lanes: [Timeline; Lane::ALL.len()],
    bulk: BulkQueue,
    functions: &'static Functions,
    memories: RwLock<Memories>,
    memory_next: AtomicU64,
    on_gpu: Arc<Slabs>,
    managed: Slabs,
    /// Pages in host memory, staging and tables.
    pinned: Arc<Slabs>,
    /// Why nothing is queued any more: a list was left half queued.
    stopped: OnceLock<Error>,
    context: &'static Context,
}

impl CudaDevice {
    /// The GPU with this number among those that the process sees.
    ///
    /// # Errors
    /// `DeviceUnavailable` names what is missing: the driver, the GPU, something it must be able to do.
    pub fn open(ordinal: u32) -> Result<Self> {
        let unavailable = |reason| Error::DeviceUnavailable { device: format!("cuda:{ordinal}"), reason };
        let context = Context::of(ordinal).map_err(unavailable)?;
        let pinned = Arc::new(Slabs::new(context, Kind::Pinned, Place::Pinned));
        let on_gpu = Arc::new(Slabs::new(context, Kind::Device, Place::Device(0)));
        let lane = |urgent| Timeline::new(context, &pinned, &on_gpu, urgent);
        Ok(Self {
            lanes: [lane(true)?, lane(false)?, lane(false)?, lane(true)?],
            bulk: BulkQueue::new(context),
            functions: Functions::of(context).map_err(|error| unavailable(error.to_string()))?,
            memories: RwLock::default(),
            memory_next: AtomicU64::new(1),
            on_gpu,
            managed: Slabs::new(context, Kind::Managed, Place::Unified),
            pinned,
            stopped: OnceLock::new(),
            context,
        })
    }

    /// How many GPUs the process sees.
    ///
    /// # Errors
    /// `DeviceUnavailable`: there is no driver, or it is too old.
    pub fn count() -> Result<u32> {
        let unavailable = |reason| Error::DeviceUnavailable { device: "cuda".to_owned(), reason };
        let driver = Driver::get().map_err(unavailable)?;
        driver.count().map_err(|code| unavailable(code.to_string()))
    }

    /// Gives memory that no page and no staging uses back to the driver, and returns how many bytes that was.
    /// The driver waits for everything that the GPU has to do, the caller's own work included.
    ///
    /// # Errors
    /// A device error.
    pub fn trim(&self) -> Result<u64> {
        Ok(self.on_gpu.trim()? + self.managed.trim()? + self.pinned.trim()?)
    }

    /// Bytes held from the driver, in use or not: in the GPU's memory, and pinned in the host's.
    #[must_use]
    pub fn reserved_bytes(&self) -> (u64, u64) {
        (self.on_gpu.reserved_bytes() + self.managed.reserved_bytes(), self.pinned.reserved_bytes())
    }

    fn lane(&self, lane: Lane) -> &Timeline {
        &self.lanes[lane as usize]
    }

    fn slabs(&self, kind: Kind) -> &Slabs {
        match kind {
            Kind::Device => &self.on_gpu,
            Kind::Managed => &self.managed,
            Kind::Pinned => &self.pinned,
        }
    }

    /// Allocates; where memory is short, what lies idle goes first.
    fn block(&self, kind: Kind, len: u64) -> Result<Block> {
        match self.slabs(kind).allocate(len) {
            Err(Error::OutOfMemory { .. }) if self.trim()? > 0 => self.slabs(kind).allocate(len),
            other => other,
        }
    }

    /// Frees all pages once nothing uses them any more.
    fn free_pages(&self) -> Result<()> {
        for lane in &self.lanes {
            lane.fences().wait(lane.fences().given())?;
        }
        if self.stopped.get().is_some() {
            return Ok(());
        }
        for (_, Memory { block, kind, .. }) in self.memories.write().drain() {
            if let Some(block) = block {
                self.slabs(kind).free(block);
            }
        }
        Ok(())
    }

    fn assert_given(&self, fence: Fence) {
        let given = self.lane(fence.lane).fences().given();
        assert!(fence.value <= given, "{fence:?} was not handed out: the lane gave {given}");
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
        let kind = match place {
            Place::Device(_) => Kind::Device,
            Place::Pinned | Place::Host => Kind::Pinned,
            Place::Unified if self.context.has_managed_memory => Kind::Managed,
            Place::Unified => {
                return Err(Error::PlaceUnavailable { place, reason: "this GPU has no managed memory" });
            }
            _ => {
                let reason = "a GPU keeps pages in its own memory and in the host's only";
                return Err(Error::PlaceUnavailable { place, reason });
            }
        };
        let block = if len == 0 {
            None
        } else {
            let named = |error| match error {
                Error::OutOfMemory { len, .. } => Error::OutOfMemory { place, len },
                other => other,
            };
            Some(self.block(kind, len).map_err(named)?)
        };
        let id = MemoryId(self.memory_next.fetch_add(1, Ordering::Relaxed));
        self.memories.write().insert(id, Memory { block, kind, len });
        Ok(id)
    }

    fn release(&self, memory: MemoryId) -> Result<()> {
        let released = self.memories.write().remove(&memory);
        let Memory { block, kind, .. } =
            released.unwrap_or_else(|| panic!("{memory:?} is no memory of this device"));
        if let Some(block) = block {
            self.slabs(kind).free(block);
        }
        Ok(())
    }

    fn staging(&self, len: usize) -> Result<Staging> {
        match staging::staging(&self.pinned, len) {
            Err(Error::OutOfMemory { .. }) if self.trim()? > 0 => staging::staging(&self.pinned, len),
            other => other,
        }
    }

    fn submit(&self, lane: Lane, list: CommandList) -> Result<Pending> {
        if let Some(error) = self.stopped.get() {
            return Err(error.clone());
        }
        let CommandList { commands, staging } = list;
        // 1. Plan, before anything is queued: what breaks the contract panics here.
        let mut used = Used::default();
        let needed = Scratch::needed(&commands);
        let mut scratch = Scratch::default();
        if needed.pinned > 0 {
            let block = self.block(Kind::Pinned, needed.pinned)?;
            scratch.pinned = block.address;
            used.pinned.push(block);
        }
        if needed.on_gpu > 0 {
            let block = self.block(Kind::Device, needed.on_gpu)?;
            scratch.on_gpu = block.address;
            used.on_gpu = Some(block);
        }
        let staged: Vec<Staged<'_>> =
            staging.iter().map(|bytes| Staged { bytes, address: staging::address_of(bytes) }).collect();
        let plan = list::plan(&commands, &self.memories.read(), &staged, scratch);
        let layout = Layout::of(&plan);
        if layout.len > 0 {
            let tables = self.block(Kind::Pinned, layout.len as u64)?;
            layout.write(&plan, &tables);
            used.pinned.push(tables);
        }
        let tables = if layout.len > 0 { used.pinned.last() } else { None };

        // 2. Queue, one list of the lane at a time.
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
        // 3. The fence behind it. From a failure on, what the list did is not known.
        let queued = launcher.run(&plan, &layout, tables);
        let ended = match queued {
            Ok(()) => turn.end(&entered, &returned, used),
            Err(error) => {
                turn.abandon(&returned, used);
                Err(error)
            }
        };
        let value = ended.map_err(|error| self.stopped.get_or_init(|| error).clone())?;
        Ok(Pending::new(Fence { lane, value }, returned))
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

    fn wait_external(&self, lane: Lane, stream: RawStream) -> Result<()> {
        self.lane(lane).follow_stream(stream)
    }

    fn signal_external(&self, stream: RawStream, fence: Fence) -> Result<()> {
        self.assert_given(fence);
        if self.reached(fence.lane) >= fence.value {
            // Refused alike, whether the fence has passed or not.
            return stream::check(self.context, &self.context.enter()?, stream);
        }
        self.lane(fence.lane).lead_stream(stream)
    }

    fn address(&self, memory: MemoryId) -> Option<u64> {
        let memories = self.memories.read();
        let memory =
            memories.get(&memory).unwrap_or_else(|| panic!("{memory:?} is no memory of this device"));
        memory.block.as_ref().map(|block| block.address)
    }

    fn bytes(&self, _memory: MemoryId) -> Option<PageBytes> {
        None
    }
}
