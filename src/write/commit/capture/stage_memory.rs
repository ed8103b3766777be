//! Device memory that contains no page: staging memory of a commit, and memory that callers use.
//!
//! This memory counts toward the budget like pages (I10), and is freed after all work that uses it. A crash loses it.

use std::sync::Arc;

use remanent_format::Place;

use crate::device::{
    CallerMemory, Command, CommandList, DeviceBytes, EngineDevice, Fence, Lane, LastUse, Span, StreamUses,
};
use crate::engine::Engine;
use crate::error::Result;
use crate::memory::arena::{Arena, HandedOut, PageMemory, Purpose};
use crate::write::commit::Committer;

/// Device memory that contains no page and counts toward the budget (I10). Dropping this value frees the memory once
/// all work that was queued in [`Lane::Stage`] has finished.
pub(super) struct StageMemory {
    device: Arc<EngineDevice>,
    arena: Arc<Arena>,
    memory: Option<PageMemory>,
    /// Uses of the memory by the caller's streams. The memory is freed after these uses end.
    uses: Arc<StreamUses>,
}

impl StageMemory {
    /// Creates the value that owns `memory`.
    fn of(engine: &Engine, memory: Option<PageMemory>) -> Self {
        let (device, arena) = (engine.device.clone(), engine.arena.clone());
        Self { device, arena, memory, uses: Arc::default() }
    }

    /// Returns a fence that passes after every list and every stream has finished using this memory.
    fn last_use(&self) -> Result<Option<Fence>> {
        // A lane (device queue) runs its lists in order, so the fence of an empty list follows all lists that use this
        // memory.
        let staged = self.device.submit(Lane::Stage, CommandList::default())?.fence();
        let last = self.uses.last();
        if let LastUse::At(_) = last {
            return self.after_streams(staged);
        }
        Ok((last != LastUse::Unknown).then_some(staged))
    }

    /// Returns a fence that passes after `staged` and after the ended uses of the memory by the caller's streams. The
    /// lane [`Lane::Callers`] waits for the streams, so the calling thread does not.
    fn after_streams(&self, staged: Fence) -> Result<Option<Fence>> {
        self.device.after(Lane::Callers, staged)?;
        Ok(Some(self.device.submit(Lane::Callers, CommandList::default())?.fence()))
    }

    pub fn byte_len(&self) -> u64 {
        self.memory.as_ref().map_or(0, PageMemory::byte_len)
    }

    pub fn part(&self, offset: u64, len: u64) -> Span {
        self.memory.as_ref().expect("there until it is dropped").part(offset, len)
    }
}

impl Drop for StageMemory {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        match self.last_use() {
            Ok(Some(fence)) => self.arena.retire(memory, fence),
            // A stream may use this memory at any later time. If it were freed, the stream could overwrite the page
            // that gets the memory next.
            Ok(None) => tracing::warn!("memory that a stream may use stays allocated"),
            // It is unknown when the lane is done with the memory, so the memory stays allocated and counted.
            Err(error) => tracing::warn!(%error, "memory that contains no page stays allocated"),
        }
    }
}

impl Committer {
    /// Allocates device memory for a caller. The memory is zeroed, so that its old contents are not disclosed.
    ///
    /// # Errors
    /// `OverBudget`, `OutOfMemory`, `Unavailable`; a device error.
    pub fn device_bytes(&self, place: Place, len: u64) -> Result<DeviceBytes> {
        // The memory counts toward the budget of its place, recorded as the caller's (I10).
        let owner = self.stage_memory(Purpose::Caller, place, len)?;
        let span = owner.part(0, len);
        let bytes = self.caller_memory(place, len, owner);
        let zero = Command::Fill { target: span, pattern: [0; 16], width: remanent_format::Width::W1 };
        self.run(vec![zero], Vec::new())?;
        Ok(bytes)
    }

    /// Registers memory that the caller allocated with the device.
    ///
    /// # Errors
    /// `Refused`; a device error.
    pub fn adopt(&self, memory: &CallerMemory) -> Result<DeviceBytes> {
        let Engine { device, arena, .. } = &*self.engine;
        DeviceBytes::adopt(device, memory, arena.link())
    }

    /// Passes the memory of a deleted page to the caller.
    ///
    /// # Errors
    /// A device error.
    pub fn hand_out(&self, page: PageMemory) -> Result<DeviceBytes> {
        let (place, len) = (page.place(), page.byte_len());
        match self.engine.arena.hand_out(page)? {
            HandedOut::Lent(bytes) => Ok(bytes),
            HandedOut::Own(page) => {
                Ok(self.caller_memory(place, len, StageMemory::of(&self.engine, Some(page))))
            }
        }
    }

    /// Returns the caller's handle to memory. `owner` is dropped together with the last clone of the handle, and then
    /// frees the memory.
    fn caller_memory(&self, place: Place, len: u64, owner: StageMemory) -> DeviceBytes {
        let Engine { device, arena, .. } = &*self.engine;
        let (span, uses) = (owner.part(0, len), owner.uses.clone());
        DeviceBytes::new(device.clone(), span, place, arena.link().clone(), uses, owner)
    }

    /// Allocates one piece of device memory that contains no page.
    pub(super) fn stage_memory(&self, purpose: Purpose, place: Place, len: u64) -> Result<StageMemory> {
        self.stage_memories(purpose, place, [len]).map(|[memory]| memory)
    }

    /// Allocates one piece of memory for each of these lengths, or none, so that an error states the total length.
    pub(super) fn stage_memories<const N: usize>(
        &self,
        purpose: Purpose,
        place: Place,
        lens: [u64; N],
    ) -> Result<[StageMemory; N]> {
        let mut memory = self.engine.arena.allocate_all(purpose, &lens.map(|len| (place, len)))?.into_iter();
        Ok(lens.map(|_| StageMemory::of(&self.engine, memory.next())))
    }
}
