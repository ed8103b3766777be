//! Payloads with bytes that only the device has seen.
//!
//! The payload is put together on the device: the bytes that the host knows go up, the others are
//! gathered into its blanks. There the indices are checked and the whole is summed, and it comes to the
//! host in one piece, as the log and the page will get it. Whatever is written to the caller's memory
//! meanwhile, checksum and bytes are of the same payload.
//!
//! Nothing is logged before this is done, so a crash loses a batch that no caller was told of.

use std::any::Any;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use remanent_format::{PageId, PageTable, Place};

use super::Committer;
use crate::device::{
    CallerMemory, Command, CommandList, Device, DeviceBytes, INDEX_OUT_OF_BOUNDS, IndexList, Lane, MemoryId,
    Span, Staging, StagingSpan,
};
use crate::error::{Error, Result};
use crate::memory::arena::{Arena, PageMemory, Purpose};
use crate::memory::staging::StagingBuf;
use crate::write::batch::{DeviceFill, FillSource, WriteBatch};

/// Memory beside pages, counted in the budget like them (I10). It is given back after everything that is
/// in the lane by then.
pub(super) struct StageMemory {
    device: Arc<dyn Device>,
    arena: Arc<Arena>,
    memory: Option<PageMemory>,
}

impl StageMemory {
    /// The span of `len` bytes from `offset` on.
    pub fn part(&self, offset: u64, len: u64) -> Span {
        self.memory.as_ref().expect("there until it is dropped").part(offset, len)
    }
}

impl Drop for StageMemory {
    fn drop(&mut self) {
        // One more list in the lane: its fence comes after every list that names this memory.
        let Some(memory) = self.memory.take() else { return };
        match self.device.submit(Lane::Stage, CommandList::default()) {
            Ok(last) => self.arena.retire(memory, last.fence()),
            // The lane may still use it, and never says when it is done. It stays counted: given to a
            // page, it could be written to.
            Err(error) => tracing::warn!(%error, "memory beside pages stays allocated"),
        }
    }
}

/// Memory that belongs to the caller: it is returned to its owner, and never to the arena.
struct CallerPayload {
    device: Arc<dyn Device>,
    memory: MemoryId,
    _owner: Arc<dyn Any + Send + Sync>,
}

impl Drop for CallerPayload {
    /// Lists that name it were waited for, all but copies to shadows: those read the store's own memory.
    fn drop(&mut self) {
        if let Err(error) = self.device.release(self.memory) {
            tracing::warn!(%error, "a caller's memory stays known to the device");
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
        let bytes = self.caller_memory(span.memory, place, len, owner);
        let zero = Command::Fill { target: span, pattern: [0; 16], width: remanent_format::Width::W1 };
        self.run(vec![zero], Vec::new())?;
        Ok(bytes)
    }

    /// Makes memory that the caller allocated known to the device.
    ///
    /// # Errors
    /// `MemoryRefused`; a device error.
    pub fn adopt(&self, memory: &CallerMemory) -> Result<DeviceBytes> {
        let (id, place) = self.engine.device.adopt(memory)?;
        let owner = CallerPayload { device: self.engine.device.clone(), memory: id, _owner: memory.owner() };
        Ok(self.caller_memory(id, place, memory.byte_len(), owner))
    }

    /// Hands memory to the caller. `owner` lives as long as any handle to it.
    fn caller_memory(
        &self,
        memory: MemoryId,
        place: Place,
        len: u64,
        owner: impl Any + Send + Sync,
    ) -> DeviceBytes {
        let poison = self.engine.poison.clone();
        // An error in reading or writing it poisons the store: the device has failed, and with it the pages.
        let heard = move |error| poison.set_by_device(error);
        DeviceBytes::new(self.engine.device.clone(), memory, place, len, owner, heard)
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
        let (device, arena) = (&self.engine.device, &self.engine.arena);
        Ok(lens.map(|_| StageMemory { device: device.clone(), arena: arena.clone(), memory: memory.next() }))
    }

    /// Runs commands on the lane for staging, and waits for them. Not in the lane of deltas: batches
    /// would wait for this one.
    pub(super) fn run(&self, commands: Vec<Command>, staging: Vec<Staging>) -> Result<Vec<Staging>> {
        self.engine
            .device
            .submit(Lane::Stage, CommandList { commands, staging })?
            .finish(&*self.engine.device)
    }

    /// Waits for the streams on which the batch's bytes are made. Returns the place in which they are put
    /// together, if there are any.
    ///
    /// The committing thread waits, not the lane: a caller's stream may stand still for long.
    pub(super) fn arrivals(&self, batch: &WriteBatch) -> Result<Option<Place>> {
        let mut streams = BTreeSet::new();
        for bytes in batch.device_bytes() {
            bytes.check_device(&self.engine.device)?;
            streams.extend(bytes.stream());
        }
        // Each stream once, however many ranges are made on it.
        for stream in streams {
            self.engine.device.wait_stream(stream)?;
        }
        let captured = batch.captures().map(|(_, copy, _)| copy.bytes());
        Ok(batch.device_bytes().chain(captured).next().map(DeviceBytes::place))
    }

    /// The lengths of the pages whose changed elements only the device knows. They are looked at again
    /// under the lock, when the highest index is known.
    pub(super) fn lens(&self, batch: &WriteBatch, locked: Option<&PageTable>) -> HashMap<PageId, u64> {
        let mut pages = batch.scattered_pages().peekable();
        if pages.peek().is_none() {
            return HashMap::new();
        }
        let in_table = |table: &PageTable| {
            pages.filter_map(|page| table.get(page).map(|info| (page, info.len))).collect()
        };
        match locked {
            Some(table) => in_table(table),
            None => in_table(&self.submitted.lock()),
        }
    }

    /// Completes the payload, whose blanks are zeros so far, and returns its checksum with it.
    ///
    /// One list does all of it, in this order:
    ///
    /// 1. Known bytes go up, and the caller's are gathered into the blanks. From here on the caller may
    ///    write to its memory.
    /// 2. The whole is summed, and the lists of indices are checked.
    /// 3. It comes down.
    pub(super) fn fill(
        &self,
        staged: StagingBuf,
        blanks: Vec<DeviceFill>,
        born_in: Option<Place>,
    ) -> Result<(StagingBuf, u32)> {
        let Some(place) = born_in.filter(|_| !blanks.is_empty()) else {
            let crc = crc32fast::hash(&staged);
            return Ok((staged, crc));
        };
        let len = staged.len();
        // The whole payload lies on the device for a while: it is summed there, and is never longer than
        // a frame may be.
        let area = self.stage_memory(Purpose::Stage, place, len as u64)?;
        let whole = area.part(0, len as u64);
        let (mut uploads, mut sources, mut picks) = (Vec::new(), Vec::new(), Vec::new());
        let (mut lists, mut steps, mut indices) = (Vec::new(), Vec::new(), Vec::new());
        // Between two blanks lie bytes that the host knows.
        let mut known_from = 0;
        for blank in &blanks {
            let blank_len = match &blank.content {
                FillSource::Bytes(span) | FillSource::Indices { span, .. } => span.len,
                FillSource::Elements { width, indices, .. } => (indices.len() * width.bytes()) as u64,
            };
            uploads.push(known_from..blank.at);
            // Blanks come in their order, and none overlaps another.
            known_from = blank.at + blank_len as usize;
            let target = area.part(blank.at as u64, blank_len);
            match &blank.content {
                FillSource::Bytes(span) => sources.push((*span, blank.at as u64)),
                // The device checks them before the log has them: applied, a wrong index would write
                // outside of its page.
                FillSource::Indices { span, bound, step } => {
                    sources.push((*span, blank.at as u64));
                    lists.push(IndexList { indices: target, bound: *bound });
                    steps.push(*step);
                }
                FillSource::Elements { source, width, indices: picked } => {
                    // Picked from the staged copy by indices that the host knows: only the elements cross
                    // the bus.
                    let at = StagingSpan { index: 2, offset: indices.len(), len: 4 * picked.len() };
                    picks.push(Command::Pick { source: *source, width: *width, indices: at, target });
                    indices.extend(picked.iter().flat_map(|index| index.to_le_bytes()));
                }
            }
        }
        uploads.push(known_from..len);
        let mut commands = Vec::new();
        for known in uploads.into_iter().filter(|known| !known.is_empty()) {
            let source = StagingSpan { index: 0, offset: known.start, len: known.len() };
            let target = area.part(known.start as u64, known.len() as u64);
            commands.push(Command::Upload { source, target });
        }
        // After the uploads, in one list: a device does its commands in their order.
        commands.push(Command::Gather { sources, target: whole });
        commands.extend(picks);
        let results_len = 4 * lists.len() + 4;
        let results = |offset, len| StagingSpan { index: 1, offset, len };
        commands.push(Command::Crc { sources: vec![whole], target: results(0, 4) });
        commands.push(Command::Validate { lists, target: results(4, results_len - 4) });
        commands.push(Command::Download { source: whole, target: StagingSpan { index: 0, offset: 0, len } });
        let mut indices_staged = self.engine.staging.take(indices.len())?;
        indices_staged.copy_from_slice(&indices);
        let found = self.engine.staging.take(results_len)?;
        let staging = [staged, found, indices_staged].map(StagingBuf::into_staging);
        let mut returned = self.run(commands, staging.into())?.into_iter();
        let mut next = |len| StagingBuf::new(returned.next().expect("as many as went in"), len);
        let (staged, found, indices) = (next(len), next(results_len), next(indices.len()));
        // The checksum first, then a word a list: 0 if its indices hold.
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|byte| found[4 * at + byte]));
        let crc = word(0);
        // A wrong index would write outside of the page, and a repeated one has no defined result on a
        // device: both are refused before the batch is logged.
        let wrong = steps.into_iter().zip((1..).map(word)).find(|(_, wrong)| *wrong != 0);
        for staging in [found, indices] {
            self.engine.staging.give(staging.into_staging());
        }
        match wrong {
            None => Ok((staged, crc)),
            Some((index, wrong)) => {
                self.engine.staging.give(staged.into_staging());
                let reason = if wrong & INDEX_OUT_OF_BOUNDS != 0 {
                    "an index is not within the page: it counts elements from the page's start".to_owned()
                } else {
                    "an element is given twice".to_owned()
                };
                Err(Error::InvalidOperation { index, reason })
            }
        }
    }
}
