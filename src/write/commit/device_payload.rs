//! Payloads with bytes that only the device has seen.
//!
//! They are gathered on the device first. There the indices are checked and the bytes are summed, and they
//! come to the host as the log and the page will get them. Whatever is written to the caller's memory
//! meanwhile, checksum and bytes are of the same payload.
//!
//! Nothing is logged before this is done, so a crash loses a batch that no caller was told of.

use std::collections::{BTreeSet, HashMap};
use std::convert::Infallible;
use std::sync::Arc;

use crc32fast::Hasher;
use remanent_format::limits::{FRAME_ALIGN, align_up};
use remanent_format::{PageId, PageTable, Place};

use super::Committer;
use crate::base::allocation::{append, collected, push};
use crate::base::parallel;
use crate::device::sums::{changed_on_the_way, sum_each, sums_in, sums_len};
use crate::device::{
    Access, CallerMemory, Command, CommandList, Device, DeviceBytes, Fence, INDEX_OUT_OF_BOUNDS, IndexList,
    Lane, LastUse, Span, Staging, StagingSpan, StreamUses,
};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::memory::arena::{Arena, HandedOut, PageMemory, Purpose};
use crate::memory::staging::{GrowingStaging, StagingBuf};
use crate::write::batch::{DeviceFill, FillSource, WriteBatch};

/// Bytes that one thread sums.
const SUMMED_ALONE_LEN: usize = 1 << 20;
/// Threads that sum a payload.
const SUM_THREADS_MAX: usize = 4;
/// The length from which combining two sums is cheaper than summing again.
const COMBINED_LEN_MIN: u64 = 4 << 10;

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

    /// Runs commands on the lane for staging, and waits for them. Not in the lane of deltas: batches
    /// would wait for this one.
    pub(super) fn run(&self, commands: Vec<Command>, staging: Vec<Staging>) -> Result<Vec<Staging>> {
        self.engine
            .device
            .submit(Lane::Stage, CommandList { commands, staging })?
            .finish(&*self.engine.device)
    }

    /// Waits for the streams on which the batch's bytes are made. Returns the place in which they are put
    /// together, if there are any. `pages` are the ids of the new pages.
    ///
    /// The committing thread waits, not the lane: a caller's stream may stand still for long.
    pub(super) fn arrivals(&self, batch: &WriteBatch, pages: &[PageId]) -> Result<Option<Place>> {
        let mut streams = BTreeSet::new();
        for bytes in batch.device_bytes() {
            bytes.check_device(&self.engine.device)?;
            bytes.wait_uses(Access::Read)?;
            streams.extend(bytes.stream());
        }
        // Each stream once, however many ranges are made on it.
        for stream in streams {
            self.engine.device.wait_stream(stream)?;
        }
        for (_, memory) in batch.lent(pages) {
            memory.check_device(&self.engine.device)?;
            memory.check_process()?;
            // The store writes there next: over the bytes of a kernel that still runs, or under them.
            memory.arrived(Access::Write)?;
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
    /// One list does the device's part, in this order:
    ///
    /// 1. The caller's bytes are gathered. From here on the caller may write to its memory.
    /// 2. Each blank's bytes are summed, and the lists of indices are checked.
    /// 3. They come down, each to its blank.
    ///
    /// Then the host sums what arrived. Only where both sums agree does the batch go on: logged with the
    /// device's sum, bytes that changed on their way would be damage that the next open lays to the disk.
    pub(super) fn fill(
        &self,
        mut payload: GrowingStaging,
        blanks: Vec<DeviceFill>,
        born_in: Option<Place>,
    ) -> Result<(StagingBuf, u32)> {
        let Some(place) = born_in.filter(|_| !blanks.is_empty()) else {
            let crc = crc32fast::hash(payload.as_mut());
            return Ok((self.engine.staging.grown(payload)?, crc));
        };
        let mut staged = self.engine.staging.grown(payload)?;
        let device = &*self.engine.device;
        // One after the other, each where a kernel reads it best.
        let mut area_len = 0;
        let offset_of = |blank: &DeviceFill| {
            let at = area_len;
            area_len = align_up(at + blank.byte_len(), FRAME_ALIGN);
            at
        };
        let offsets = collected(blanks.iter().map(offset_of))?;
        // All of it lies on the device for a while: it is summed there, and is never longer than a frame may
        // be.
        let area = self.stage_memory(Purpose::Stage, place, area_len)?;
        let (mut sources, mut picks, mut copies) = (Vec::new(), Vec::new(), Vec::new());
        let (mut lists, mut steps, mut indices) = (Vec::new(), Vec::new(), Vec::new());
        for (blank, at) in blanks.iter().zip(offsets) {
            let target = area.part(at, blank.byte_len());
            push(&mut copies, BlankCopy { at: blank.at, source: target })?;
            match &blank.content {
                FillSource::Bytes(span) => push(&mut sources, (*span, at))?,
                // The device checks them before the log has them: applied, a wrong index would write
                // outside of its page.
                FillSource::Indices { span, bound, step } => {
                    push(&mut sources, (*span, at))?;
                    push(&mut lists, IndexList { indices: target, bound: *bound })?;
                    push(&mut steps, *step)?;
                }
                FillSource::Elements { source, width, indices: picked } => {
                    // Picked from the staged copy by indices that the host knows: only the elements cross
                    // the bus.
                    let at = StagingSpan { index: 2, offset: indices.len(), len: 4 * picked.len() };
                    push(&mut picks, Command::Pick { source: *source, width: *width, indices: at, target })?;
                    append(&mut indices, picked.iter().flat_map(|index| index.to_le_bytes()))?;
                }
            }
        }
        let found_len = 4 * lists.len();
        let mut commands = vec![Command::Gather { sources, target: area.part(0, area_len) }];
        append(&mut commands, picks)?;
        let target = StagingSpan { index: 3, offset: 0, len: found_len };
        commands.push(Command::Validate { lists, target });
        bring_down(&mut commands, &copies, device.crosses_bus())?;
        let mut picked = self.engine.staging.take(indices.len())?;
        picked.copy_from_slice(&indices);
        let (len, sums_len) = (staged.len(), sums_len(copies.len()));
        let sums = self.engine.staging.take(sums_len)?;
        let found = self.engine.staging.take(found_len)?;
        let staging = [staged, sums, picked, found].map(StagingBuf::into_staging);
        let mut returned = self.run(commands, staging.into())?.into_iter();
        let mut next = |len| StagingBuf::new(returned.next().expect("as many as went in"), len);
        staged = next(len);
        let (mut sums, picked, found) = (next(sums_len), next(indices.len()), next(found_len));
        // A wrong index would write outside of the page, and a repeated one has no defined result on a
        // device: both are refused before the batch is logged. A word a list: 0 if its indices hold.
        let wrong = steps.into_iter().zip(sums_in(&found)).find(|(_, wrong)| *wrong != 0);
        for staging in [picked, found] {
            self.engine.staging.give(staging.into_staging());
        }
        if let Some((index, wrong)) = wrong {
            for staging in [staged, sums] {
                self.engine.staging.give(staging.into_staging());
            }
            let reason = if wrong & INDEX_OUT_OF_BOUNDS != 0 {
                "an index is not within the page: it counts elements from the page's start".to_owned()
            } else {
                "an element is given twice".to_owned()
            };
            return Err(Error::InvalidOperation { index, reason });
        }
        let is_summed = device.crosses_bus();
        let mut crc = proven_sum(&staged, &copies, is_summed.then_some(&*sums));
        if crc.is_none() {
            // I12. The bytes are still there: a bit that turned over once must not refuse a commit.
            tracing::warn!(device = device.label(), "a payload changed on its way to the host: once more");
            let mut commands = Vec::new();
            bring_down(&mut commands, &copies, is_summed)?;
            let again = self.run(commands, vec![staged.into_staging(), sums.into_staging()])?;
            let mut again = again.into_iter();
            let mut next = |len| StagingBuf::new(again.next().expect("as many as went in"), len);
            (staged, sums) = (next(len), next(sums_len));
            crc = proven_sum(&staged, &copies, Some(&*sums));
        }
        self.engine.staging.give(sums.into_staging());
        let crc = crc.ok_or_else(|| changed_on_the_way(device, "a payload"))?;
        Ok((staged, crc))
    }
}

/// Bytes of a payload that the device has.
struct BlankCopy {
    /// The place of its blank in the payload.
    at: usize,
    /// The bytes on the device.
    source: Span,
}

/// Adds the commands that bring bytes down to their blanks, in staging 0, with their sums in staging 1.
fn bring_down(commands: &mut Vec<Command>, copies: &[BlankCopy], is_summed: bool) -> Result<()> {
    if is_summed {
        push(commands, sum_each(collected(copies.iter().map(|copy| copy.source))?, 1))?;
    }
    let download = |copy: &BlankCopy| {
        let target = StagingSpan { index: 0, offset: copy.at, len: copy.source.len as usize };
        Command::Download { source: copy.source, target }
    };
    append(commands, copies.iter().map(download))
}

/// CRC-32 of a payload; `None` if what arrived in a blank is not what the device summed. Each byte is summed
/// once.
fn proven_sum(payload: &[u8], copies: &[BlankCopy], of_device: Option<&[u8]>) -> Option<u32> {
    let mut whole = Hasher::new();
    // Between two blanks lie bytes that the host knows. Blanks come in their order, and none overlaps
    // another.
    let mut known_from = 0;
    let mut of_device = of_device.map(sums_in);
    for BlankCopy { at, source } in copies {
        let end = at + source.len as usize;
        whole.update(&payload[known_from..*at]);
        known_from = end;
        let sum = sum_of(&payload[*at..end]);
        if let Some(of_device) = &mut of_device
            && of_device.next() != Some(sum)
        {
            return None;
        }
        if source.len < COMBINED_LEN_MIN {
            whole.update(&payload[*at..end]);
        } else {
            whole.combine(&Hasher::new_with_initial_len(sum, source.len));
        }
    }
    whole.update(&payload[known_from..]);
    Some(whole.finalize())
}

/// CRC-32 of bytes that just arrived, by several threads if they are many: a GPU sends several times as fast
/// as one thread sums.
fn sum_of(bytes: &[u8]) -> u32 {
    let parts: Vec<&[u8]> = bytes.chunks(SUMMED_ALONE_LEN).collect();
    let sum = |(): &mut (), index: usize| {
        let mut sum = Hasher::new();
        sum.update(parts[index]);
        Ok::<_, Infallible>(sum)
    };
    let Ok(sums) = parallel::map_indexed(parallel::threads(SUM_THREADS_MAX), parts.len(), || (), sum);
    let mut whole = Hasher::new();
    sums.iter().for_each(|sum| whole.combine(sum));
    whole.finalize()
}
