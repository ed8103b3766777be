//! Pages in host memory: the device that defines correct behavior (I11).
//!
//! Every list runs inside `submit`, on the caller's thread, so a fence has already passed when `submit` returns it. The
//! code is deliberately plain: kernels must produce the bytes that these loops produce. Read [`Device`] first; commands
//! are in `commands.rs`, deltas in `deltas.rs`. A crash loses all pages, and the log restores them.
//!
//! Locks: the table of allocations is locked only for lookups, so a long copy never delays `allocate`. Each allocation
//! has its own lock or shares that of its slab (`memory.rs`), so lanes run concurrently. No command waits for a lock
//! while it holds another one, so commands cannot deadlock. A command that needs several locks acquires them only if
//! all are free.

mod memory;
mod commands;
mod deltas;

use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use remanent_format::Place;
use remanent_format::limits::GROUP_ALIGN;
use zerocopy::FromZeros;

use self::memory::{HostAllocation, HostBlock, HostMemories};
use super::{
    Abilities, BulkMemory, CallerMemory, CommandList, Device, DeviceFiles, DirectReads, Fence, HostBytes,
    Lane, LentMemory, MemoryId, PageBytes, Pending, Span, Staging, StagingMemory,
};
use crate::base::aligned_buf::AlignedBuf;
use crate::base::sync::Mutex;
use crate::base::sync::locks::RwLock;
use crate::device::HostMemory;
use crate::disk::FileMemory;
use crate::error::{Error, Refused, Result, Unavailable};

/// The minimum length, in bytes, of a run of consecutive deltas that several threads apply.
const WIDE_BYTES_MIN: u64 = 4 << 20;

/// The number of allocations made or released per lock acquisition. Between acquisitions, other threads can look up
/// allocations.
const AT_ONCE: usize = 256;

/// A device that keeps the pages of every place in ordinary memory. Only [`Place::Disk`] is unavailable.
#[derive(Debug)]
pub struct HostDevice {
    memories: RwLock<HostMemories>,
    lanes: [HostLane; Lane::ALL.len()],
    label: String,
    /// The minimum length, in bytes, of a run of consecutive deltas that several threads apply.
    wide_bytes_min: u64,
}

/// A lane, which runs one list at a time, in the order of the `submit` calls.
#[derive(Debug, Default)]
struct HostLane {
    running: Mutex<()>,
    reached: AtomicU64,
}

impl Default for HostDevice {
    fn default() -> Self {
        Self::new()
    }
}

impl HostDevice {
    /// Creates a device without allocations.
    #[must_use]
    pub fn new() -> Self {
        Self {
            memories: RwLock::default(),
            lanes: Default::default(),
            label: "host".to_owned(),
            wide_bytes_min: WIDE_BYTES_MIN,
        }
    }

    /// Sets the minimum length, in bytes, of a run of deltas that several threads apply. Tests set a low value, so that
    /// short lists suffice.
    #[doc(hidden)]
    #[must_use]
    pub fn parallel_from(mut self, bytes: u64) -> Self {
        self.wide_bytes_min = bytes;
        self
    }

    /// Creates a device whose label states why the host is used instead of a GPU.
    #[must_use]
    pub fn replacing_gpu(reason: impl Display) -> Self {
        Self { label: format!("host, no GPU: {reason}"), ..Self::new() }
    }

    fn memory(&self, id: MemoryId) -> HostAllocation {
        self.memories.read().get(id).clone()
    }

    fn check_place(&self, place: Place) -> Result<()> {
        match place {
            Place::Device(_) | Place::Pinned | Place::Host | Place::Unified => Ok(()),
            _ => {
                let reason = "the host device keeps pages in host memory only";
                Err(Error::Unavailable(Unavailable::Place { place, reason }))
            }
        }
    }

    fn lane(&self, lane: Lane) -> &HostLane {
        &self.lanes[lane as usize]
    }

    /// Panics if a fence has not passed. Lists run at submission, so `submit` never returned such a fence, and a wait
    /// for it would never end.
    fn assert_passed(&self, fence: Fence) {
        let reached = self.reached(fence.lane);
        assert!(fence.value <= reached, "{fence:?} was not handed out: the lane is at {reached}");
    }
}

impl Device for HostDevice {
    fn label(&self) -> String {
        self.label.clone()
    }

    fn allocate(&self, place: Place, len: u64) -> Result<MemoryId> {
        self.check_place(place)?;
        match HostAllocation::long_only(place, len)? {
            Some(memory) => Ok(self.memories.write().insert(memory)),
            None => self.memories.write().insert_short(place, len),
        }
    }

    /// Returns `true` only for long memory, which the system zeroes on first access. A slab's slot may
    /// contain bytes of an earlier page.
    fn allocates_zeros(&self, _place: Place, len: u64) -> bool {
        !HostAllocation::is_short(len)
    }

    fn release(&self, memory: MemoryId) -> Result<()> {
        // The memory is removed under the lock, and freed after the lock is released.
        let released = self.memories.write().remove(memory);
        drop(released);
        Ok(())
    }

    fn staging(&self, len: usize) -> Result<Staging> {
        let out_of_memory = || Error::OutOfMemory { place: Place::Host, len: len as u64 };
        // No direct read fills less than a block, so short staging needs no block alignment.
        if len < GROUP_ALIGN as usize {
            return Ok(Staging::new(u8::new_vec_zeroed(len).map_err(|_| out_of_memory())?));
        }
        Ok(Staging::new(HostStaging(AlignedBuf::try_new(len).ok_or_else(out_of_memory)?)))
    }

    fn submit(&self, lane: Lane, list: CommandList) -> Result<Pending> {
        let CommandList { commands, mut staging } = list;
        let lane_state = self.lane(lane);
        let running = lane_state.running.lock();
        self.run_all(commands, &mut staging);
        // Only this code changes the counter, under the lane's lock. The release ordering makes the bytes visible to a
        // thread that observes the fence as passed.
        let value = lane_state.reached.load(Ordering::Relaxed) + 1;
        lane_state.reached.store(value, Ordering::Release);
        drop(running);
        Ok(Pending::new(Fence { lane, value }, Arc::new(Mutex::new(staging))))
    }

    fn reached(&self, lane: Lane) -> u64 {
        self.lane(lane).reached.load(Ordering::Acquire)
    }

    fn wait(&self, fence: Fence) -> Result<()> {
        self.assert_passed(fence);
        Ok(())
    }

    fn after(&self, _lane: Lane, fence: Fence) -> Result<()> {
        self.assert_passed(fence);
        Ok(())
    }

    /// Acquires one lock for all lookups, because lists name thousands of allocations.
    fn read_places(&self, read: &mut dyn FnMut(&dyn Fn(MemoryId) -> Place)) {
        let memories = self.memories.read();
        read(&|memory| memories.get(memory).place());
    }

    fn abilities(&self) -> Abilities<'_> {
        Abilities {
            bulk: Some(self),
            lent: Some(self),
            files: Some(self),
            bytes: Some(self),
            direct_reads: Some(self),
            ..Abilities::default()
        }
    }
}

impl BulkMemory for HostDevice {
    /// Allocates the long memory of each chunk first and without the lock, because the system may have to
    /// zero it.
    fn allocate_all(&self, pages: &[(Place, u64)], made: &mut Vec<MemoryId>) -> Result<()> {
        for pages in pages.chunks(AT_ONCE) {
            let (mut long, mut refused) = (Vec::new(), None);
            for (place, len) in pages {
                match self.check_place(*place).and_then(|()| HostAllocation::long_only(*place, *len)) {
                    Ok(memory) => long.push((*place, *len, memory)),
                    Err(error) => {
                        refused = Some(error);
                        break;
                    }
                }
            }
            let mut memories = self.memories.write();
            for (place, len, memory) in long {
                made.push(match memory {
                    Some(memory) => memories.insert(memory),
                    None => memories.insert_short(place, len)?,
                });
            }
            if let Some(error) = refused {
                return Err(error);
            }
        }
        Ok(())
    }

    fn release_all(&self, memory: &[MemoryId], _failed: &mut dyn FnMut(usize, Error)) {
        for memory in memory.chunks(AT_ONCE) {
            let mut memories = self.memories.write();
            let released: Vec<_> = memory.iter().map(|memory| memories.remove(*memory)).collect();
            drop(memories);
            drop(released);
        }
    }
}

impl HostBytes for HostDevice {
    fn bytes(&self, memory: MemoryId) -> Option<PageBytes> {
        let bytes = self.memory(memory).share();
        Some(bytes)
    }
}

impl DirectReads for HostDevice {
    fn read_now(&self, memory: MemoryId, offset: u64, out: &mut [u8]) -> bool {
        let found = self.memories.read().find(memory).cloned();
        let Some(found) = found.filter(|found| found.has(offset, out.len() as u64)) else { return false };
        found.read(Span { memory, offset, len: out.len() as u64 }, |bytes| out.copy_from_slice(bytes));
        true
    }

    fn rename(&self, memory: MemoryId) -> Result<MemoryId> {
        let mut memories = self.memories.write();
        // A thread that has looked the block up under its old id may still be reading it. Locking the block's bytes
        // below waits for that thread.
        let block = memories.get(memory).block().clone();
        let renamed = memories.rename(memory);
        drop(memories);
        drop(block.bytes.write());
        Ok(renamed)
    }
}

impl LentMemory for HostDevice {
    fn adopt(&self, memory: &CallerMemory) -> Result<(MemoryId, Place)> {
        let Ok(bytes) = memory.owner().downcast::<CallerBytes>() else {
            let reason = "it is a GPU's, and pages live in host memory here".to_owned();
            return Err(Error::Refused(Refused::Memory { len: memory.byte_len(), reason }));
        };
        let adopted = self.memories.write().insert(HostAllocation::of(bytes.block.clone(), bytes.place));
        Ok((adopted, bytes.place))
    }

    fn alias(&self, span: Span) -> Result<MemoryId> {
        let mut memories = self.memories.write();
        let alias = memories.get(span.memory).alias(span);
        Ok(memories.insert(alias))
    }

    fn origin(&self, memory: MemoryId) -> (u64, u64) {
        let memory = self.memory(memory);
        let (block, (within, _)) = (memory.block(), memory.extent());
        match block.external_address() {
            // Two handles may refer to the same externally owned bytes, so such bytes are identified by their address.
            Some(address) => (0, address + within),
            None => (Arc::as_ptr(block).addr() as u64, within),
        }
    }
}

impl DeviceFiles for HostDevice {
    fn register(&self, memory: Box<dyn FileMemory>) -> Result<MemoryId> {
        let block = Arc::new(HostBlock::external(memory));
        Ok(self.memories.write().insert(HostAllocation::of(block, Place::Host)))
    }

    fn unregister(&self, memory: MemoryId) -> Result<()> {
        self.release(memory)
    }
}

/// The owner of a caller's memory that consists of host bytes.
struct CallerBytes {
    block: Arc<HostBlock>,
    place: Place,
}

impl CallerMemory {
    /// Wraps host bytes as caller-owned memory in this place, for a store whose pages are in host memory. Code that
    /// brings its own memory can then run, and be tested, without a GPU. A GPU rejects such memory. To read the bytes
    /// back, pass the same value to [`Store::caller_bytes`](crate::Store::caller_bytes).
    ///
    /// ```
    /// use remanent::device::CallerMemory;
    /// use remanent::{Options, Place};
    /// # use remanent::DeviceChoice;
    /// # let options = Options::new().device(DeviceChoice::Host);
    /// let store = options.open_temporary()?;
    /// let tensor = CallerMemory::from_vec(b"its bytes".to_vec(), Place::Device(0));
    /// let bytes = store.caller_bytes(&tensor)?;
    /// let mut found = [0; 5];
    /// bytes.read(4, &mut found)?;
    /// assert_eq!(&found, b"bytes");
    /// # Ok::<(), remanent::Error>(())
    /// ```
    #[must_use]
    pub fn from_vec(bytes: Vec<u8>, place: Place) -> Self {
        Self::of_block(HostBlock::of(bytes), place)
    }

    /// Wraps host memory that another object owns, such as an array that is trained in place, for a store
    /// whose pages are in host memory. A GPU rejects it; pass the GPU's own pinned memory with
    /// `CallerMemory::from_cuda`.
    ///
    /// ```
    /// use std::ops::Range;
    /// use remanent::batch::{InitialCopy, Shadow, Width};
    /// use remanent::device::{CallerMemory, HostMemory};
    /// use remanent::{Options, Place};
    /// # use remanent::DeviceChoice;
    /// # let options = Options::new().device(DeviceChoice::Host);
    ///
    /// struct Array(Box<[u8]>);
    ///
    /// impl HostMemory for Array {
    ///     fn byte_len(&self) -> u64 {
    ///         self.0.len() as u64
    ///     }
    ///     fn bytes(&self, range: Range<usize>) -> &[u8] {
    ///         &self.0[range]
    ///     }
    ///     fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8] {
    ///         &mut self.0[range]
    ///     }
    /// }
    ///
    /// let store = options.open_temporary()?;
    /// let mut batch = store.batch();
    /// batch.create(5, Place::Host);
    /// let page = store.commit(batch)?.pages[0];
    ///
    /// let array = CallerMemory::from_host(Array((*b"array").into()), Place::Host);
    /// let array = store.caller_bytes(&array)?;
    /// let copy = store.working_copy_in(page, &array, Width::W1, Shadow::Page, InitialCopy::Store)?;
    /// let mut batch = store.batch();
    /// batch.capture(&copy);
    /// store.commit(batch)?;
    /// assert_eq!(store.read_to_vec(page)?, b"array");
    /// # Ok::<(), remanent::Error>(())
    /// ```
    #[must_use]
    pub fn from_host(memory: impl HostMemory + 'static, place: Place) -> Self {
        Self::of_block(HostBlock::external(Box::new(memory)), place)
    }

    /// Wraps a block. The value has no address: only the host device accesses the bytes, and the bytes of a vector may
    /// move when they are changed.
    fn of_block(block: HostBlock, place: Place) -> Self {
        let len = block.byte_len();
        Self { address: 0, len, owner: Arc::new(CallerBytes { block: Arc::new(block), place }) }
    }
}

/// Staging in an aligned buffer, into which direct reads can write without a copy.
struct HostStaging(AlignedBuf);

impl StagingMemory for HostStaging {
    fn bytes(&self) -> &[u8] {
        &self.0
    }
    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

#[cfg(test)]
mod tests {
    use remanent_format::Width;

    use super::super::{Command, Payload, Piece, PieceKind};
    use super::*;

    #[test]
    fn direct_reads_fill_staging_without_copy() {
        let device = HostDevice::new();
        for len in [4096, 100_000, 4 << 20] {
            let staging = device.staging(len).unwrap();
            assert_eq!((staging.len(), staging.as_ptr().addr() % 4096), (len, 0));
        }
        // No direct read fills less than a block.
        assert!([0, 1, 4095].iter().all(|len| *device.staging(*len).unwrap() == *vec![0; *len]));
        let Err(error) = device.staging(usize::MAX) else { panic!("that much cannot be had") };
        assert!(matches!(error, Error::OutOfMemory { place: Place::Host, .. }), "{error}");
    }

    /// Renamed memory passes to another page. A reader with the old id must not get the bytes of that page.
    #[test]
    fn memory_is_readable_only_by_newest_handle() {
        let device = HostDevice::new();
        for len in [64, 5000, 200_000] {
            let first = device.allocate(Place::Host, len).unwrap();
            let target = Span { memory: first, offset: 0, len };
            let fill = Command::Fill { target, pattern: [7; 16], width: Width::W1 };
            let list = CommandList { commands: vec![fill], staging: Vec::new() };
            device.submit(Lane::Apply, list).unwrap().finish(&device).unwrap();
            let mut out = [0; 10];
            assert!(device.read_now(first, 5, &mut out) && out == [7; 10]);
            let second = device.rename(first).unwrap();
            let mut out = [0; 10];
            assert!(!device.read_now(first, 5, &mut out) && out == [0; 10], "{len} bytes under the old name");
            assert!(device.read_now(second, 5, &mut out) && out == [7; 10]);
            device.release(second).unwrap();
            assert!(!device.read_now(second, 5, &mut out));
        }
    }

    /// Deltas of every kind over a few pages, both long pages and pages that share a slab, in several
    /// commands with occasional fills between them.
    #[test]
    fn many_threads_yield_same_bytes_as_one() {
        let (one, many) = (HostDevice::new().parallel_from(u64::MAX), HostDevice::new().parallel_from(1));
        let lens = [64, 200, 900, 5000, 70_000, 200_000];
        let memories = |device: &HostDevice| lens.map(|len| device.allocate(Place::Host, len).unwrap());
        let pages = memories(&one);
        assert_eq!(pages, memories(&many), "the names that both give");
        let mut drawn = 5_u64;
        let mut random = |below: u64| {
            drawn = drawn.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (drawn >> 33) % below
        };
        for round in 0..40 {
            let mut commands = Vec::new();
            let mut payload = one.staging(256 << 10).unwrap();
            payload.iter_mut().for_each(|byte| *byte = random(256) as u8);
            for _ in 0..6 {
                let mut pieces = Vec::new();
                for _ in 0..100 {
                    // Mostly the first bytes of a page, so that deltas overlap.
                    let at = random(lens.len() as u64) as usize;
                    let len = (8 + 8 * random(1 + lens[at] / 16)).min(lens[at]);
                    let offset = random(3) * random(1 + (lens[at] - len) / 2).min(16);
                    let (target, from) = (Span { memory: pages[at], offset, len }, random(1000) as usize);
                    let payload = Payload::Staging { index: 0, offset: 4 * from };
                    let is_masked = len < 10_000 && random(3) == 0;
                    let masked = PieceKind::Masked { width: Width::W1, bytes_at: len.div_ceil(8) as usize };
                    let kind = if is_masked { masked } else { PieceKind::Dense };
                    pieces.push(Piece { target, payload, kind });
                }
                commands.push(Command::Apply { pieces });
                if random(3) == 0 {
                    let target = Span { memory: pages[3], offset: 0, len: 3000 };
                    commands.push(Command::Fill { target, pattern: [round; 16], width: Width::W1 });
                }
            }
            for device in [&one, &many] {
                let mut staging = device.staging(payload.len()).unwrap();
                staging.copy_from_slice(&payload);
                let list = CommandList { commands: commands.clone(), staging: vec![staging] };
                device.submit(Lane::Apply, list).unwrap();
            }
            for (page, len) in pages.iter().zip(lens) {
                let bytes = |device: &HostDevice| device.bytes(*page).unwrap();
                let (one, many) = (bytes(&one), bytes(&many));
                assert!((*one).as_ref() == (*many).as_ref(), "the page of {len} bytes in round {round}");
            }
        }
    }
}
