//! Memory beside pages: what a commit stages for a while, and what callers hold.
//!
//! It is counted in the budget like pages (I10), and goes back after everything that names it. None of it is
//! on disk, so a crash just ends it.

use std::sync::Arc;

use remanent_format::Place;

use super::Committer;
use crate::device::{
    CallerMemory, Command, CommandList, Device, DeviceBytes, Fence, Lane, LastUse, Span, StreamUses,
};
use crate::engine::Engine;
use crate::error::Result;
use crate::memory::arena::{Arena, HandedOut, PageMemory, Purpose};

/// Memory beside pages, counted in the budget like them (I10). It is given back after everything that is
/// in the lane by then.
pub(super) struct StageMemory {
    device: Arc<dyn Device>,
    arena: Arc<Arena>,
    memory: Option<PageMemory>,
    /// What callers' streams do with it.
    uses: Arc<StreamUses>,
}

impl StageMemory {
    /// Memory that goes back when this is dropped.
    fn of(engine: &Engine, memory: Option<PageMemory>) -> Self {
        let (device, arena) = (engine.device.clone(), engine.arena.clone());
        Self { device, arena, memory, uses: Arc::default() }
    }

    /// A fence after every list and every stream's use that names this memory.
    fn last_use(&self) -> Result<Option<Fence>> {
        // One more list in the lane: its fence comes after every list that names this memory.
        let staged = self.device.submit(Lane::Stage, CommandList::default())?.fence();
        let last = self.uses.last();
        if let LastUse::At(_) = last {
            return self.after_streams(staged);
        }
        Ok((last != LastUse::Unknown).then_some(staged))
    }

    /// A fence after this one, and after the work of all streams' uses that have ended. A lane waits for
    /// them, and no thread does.
    fn after_streams(&self, staged: Fence) -> Result<Option<Fence>> {
        self.device.after(Lane::Callers, staged)?;
        Ok(Some(self.device.submit(Lane::Callers, CommandList::default())?.fence()))
    }

    /// Its length in bytes.
    pub fn byte_len(&self) -> u64 {
        self.memory.as_ref().map_or(0, PageMemory::byte_len)
    }

    /// The span of `len` bytes from `offset` on.
    pub fn part(&self, offset: u64, len: u64) -> Span {
        self.memory.as_ref().expect("there until it is dropped").part(offset, len)
    }
}

impl Drop for StageMemory {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        match self.last_use() {
            Ok(Some(fence)) => self.arena.retire(memory, fence),
            // A use whose end is not known. Given to a page, the memory could be written to.
            Ok(None) => tracing::warn!("memory that a stream may use stays allocated"),
            // The lane may still use it, and never says when it is done. It stays counted.
            Err(error) => tracing::warn!(%error, "memory beside pages stays allocated"),
        }
    }
}

impl Committer {
    /// Allocates memory of a device for a caller, filled with zeros: what lay there before is not the
    /// caller's to see.
    ///
    /// # Errors
    /// `OverBudget`, `OutOfMemory`, `PlaceUnavailable`; a device error.
    pub fn device_bytes(&self, place: Place, len: u64) -> Result<DeviceBytes> {
        // Counted as the caller's, in the same budget as pages (I10).
        let owner = self.stage_memory(Purpose::Caller, place, len)?;
        let span = owner.part(0, len);
        let bytes = self.caller_memory(place, len, owner);
        let zero = Command::Fill { target: span, pattern: [0; 16], width: remanent_format::Width::W1 };
        self.run(vec![zero], Vec::new())?;
        Ok(bytes)
    }

    /// Makes memory that the caller allocated known to the device.
    ///
    /// # Errors
    /// `MemoryRefused`; a device error.
    pub fn adopt(&self, memory: &CallerMemory) -> Result<DeviceBytes> {
        let Engine { device, arena, .. } = &*self.engine;
        DeviceBytes::adopt(device, memory, arena.link())
    }

    /// Makes the memory of a page that is gone the caller's.
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

    /// Hands memory to the caller. `owner` lives as long as any handle to it.
    fn caller_memory(&self, place: Place, len: u64, owner: StageMemory) -> DeviceBytes {
        let Engine { device, arena, .. } = &*self.engine;
        let (memory, uses) = (owner.part(0, len).memory, owner.uses.clone());
        DeviceBytes::new(device.clone(), memory, place, len, arena.link().clone(), uses, owner)
    }

    /// Allocates memory beside pages, of one length.
    pub(super) fn stage_memory(&self, purpose: Purpose, place: Place, len: u64) -> Result<StageMemory> {
        self.stage_memories(purpose, place, [len]).map(|[memory]| memory)
    }

    /// Allocates all of these or none, so that the error says at once what they take together.
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
