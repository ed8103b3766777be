//! Captures: what changed in a working copy since it was its page.
//!
//! 1. **Arrive**: the committing thread waits for the stream on which the copy is written. No other
//!    thread does: the caller's kernels may take long.
//! 2. **Stage**: the ranges of several copies are copied aside on the device. From here on the caller may
//!    write to them again. Compared in place instead, the log could get other bytes than were compared.
//! 3. **Compare** the staged bytes with their pages, in the lane of deltas and at the copies' epochs, or with
//!    the copies' shadows: `diff.rs` says how. A copy with digests is compared before it is staged:
//!    `digests.rs`.
//! 4. The batch is encoded from the staged bytes, and logged if the page is still at that epoch. Without
//!    that second look, under the lock, the bytes between two changes of ours would take back changes of
//!    others.
//!
//! A crash on the way loses a batch that no caller was told of; working copies are gone with the process.

use std::collections::HashMap;
use std::ops::Range;

use remanent_format::state::table::Changes;
use remanent_format::{Epoch, PageId, Width};

use super::Committer;
use super::device_payload::CapturedDigests;
use super::diff::{PartChanges, StagedCopy, bitmaps_len};
use super::digests::{CopyLook, unknown_digests};
use super::disk_moves::is_on_disk;
use super::ranges::{RANGE_ALIGN, check_epoch, part, parts};
use super::stage_memory::StageMemory;
use crate::base::allocation::{collected, push};
use crate::device::{Access, Command, CommandList, DIGEST_CHUNK_LEN, Lane, Pending, Span};
use crate::error::{Error, Result};
use crate::images::disk_pages::{DiskPage, pending_bytes_of_elements, pending_bytes_of_write};
use crate::memory::arena::Purpose;
use crate::write::batch::{CapturedPart, CopyShadow, SparseElements, WorkingCopy, WriteBatch};

/// Working copies are compared together until their bitmaps, with room for indices, are this long.
const COMPARED_LEN: u64 = 32 << 20;

/// The captures of a batch, with the memory that they staged.
#[derive(Default)]
pub(super) struct Captures<'a> {
    /// The changed parts, by the index of the capture's operation.
    pub found: HashMap<usize, Vec<CapturedPart>>,
    taken: Vec<Capture<'a>>,
}

/// One capture of a working copy.
struct Capture<'a> {
    /// The operation's index in the batch.
    step: usize,
    copy: &'a WorkingCopy,
    /// The epoch of the state that its changes were found against.
    epoch: Epoch,
    /// The ranges of the page that are staged, each with where it begins in `staged`.
    parts: Vec<(Range<u64>, u64)>,
    /// The copy's bytes as they were captured: from here they go to the payload and to the shadow. `None` for
    /// a copy with digests, which is gathered as it is written.
    staged: Option<StageMemory>,
}

/// A capture that looked at all bytes of a page.
pub(super) struct WholeCapture<'a> {
    /// The operation's index in the batch.
    pub step: usize,
    pub page: PageId,
    pub bytes: CapturedBytes<'a>,
    /// How many bytes changed.
    pub changed: u64,
    /// Bytes of host memory in which the changes wait for a snapshot if the page is on disk, at most.
    pub pending: u64,
}

/// The place of a captured page's bytes.
#[derive(Clone, Copy)]
pub(super) enum CapturedBytes<'a> {
    Staged(Span),
    /// In the copy itself, which lies there and has this key: they are gathered as they are written.
    InCopy(&'a WorkingCopy, Span, Span),
}

/// Bytes that may be pending after the changes of a part, at most.
fn pending_bytes(part: &CapturedPart) -> u64 {
    let count = part.elements.indices.len() as u64;
    let elements = pending_bytes_of_elements(count, part.offset, part.staged.len);
    let runs =
        part.runs.iter().map(|run| pending_bytes_of_write(part.offset + run.start, run.end - run.start));
    runs.fold(elements, u64::saturating_add)
}

impl CapturedBytes<'_> {
    pub fn byte_len(&self) -> u64 {
        match self {
            Self::Staged(span) | Self::InCopy(_, span, _) => span.len,
        }
    }
}

/// The source of a working copy's bytes.
enum LoadedFrom {
    /// The page's memory; the copy is under way.
    Memory(Pending),
    /// The page's image, and what batches wrote since.
    Disk(DiskPage),
}

/// The direction in which bytes go when a caller's memory becomes a working copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Direction {
    /// The page's bytes are copied to the memory at once.
    Load,
    /// The memory stays as it is, and the next capture takes its bytes to the page.
    Store,
}

/// The bytes that a working copy is compared with, to find its changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Shadow {
    /// The page itself. This takes no memory; it is done in the queue of deltas, between two of them. Not for
    /// a page on disk, which has no memory to compare with.
    Page,
    /// A copy of its own in this place, as long as the page and counted in the budget, which every capture
    /// takes along. Deltas of other pages do not wait for the comparison.
    Kept(remanent_format::Place),
    /// Digests of what it was: sixteen bytes of the host's memory for each chunk of 64 KiB. Captures log
    /// whole chunks, and take no memory on the device but for 16 MiB of them at a time. Ranges are widened to
    /// chunks.
    ///
    /// What goes to the log has the limits of a batch: of a page in memory of which more changed, ranges are
    /// captured one after the other.
    ///
    /// A change that leaves its chunk's digest as it was is not captured. That has a probability below 2^-100
    /// a chunk and capture, whatever the bytes are, if they were chosen without the key, which the store
    /// draws at random when it is opened and never writes.
    Digest,
}

impl Captures<'_> {
    /// Whether the batch captures nothing.
    pub fn is_empty(&self) -> bool {
        self.taken.is_empty()
    }

    /// The captures that looked at all of their page, and found a change.
    pub fn of_whole_pages(&self) -> impl Iterator<Item = WholeCapture<'_>> {
        self.taken.iter().filter_map(|capture| {
            let Capture { step, copy, parts, staged, .. } = capture;
            let (found, len) = (self.found.get(step)?, copy.bytes().byte_len());
            let looked_at: u64 = parts.iter().map(|(range, _)| range.end - range.start).sum();
            if looked_at != len {
                return None;
            }
            let bytes = match staged {
                Some(staged) => CapturedBytes::Staged(staged.part(0, len)),
                None => CapturedBytes::InCopy(copy, copy.bytes().span(), found.first()?.key?),
            };
            let changed = found.iter().map(|part| part.changed_bytes(copy.width())).sum();
            let pending = found.iter().map(pending_bytes).fold(0, u64::saturating_add);
            (changed > 0).then_some(WholeCapture { step: *step, page: copy.page(), bytes, changed, pending })
        })
    }

    /// The captured pages, with the epochs at which they must be when the batch is logged.
    pub fn epochs(&self) -> impl Iterator<Item = (PageId, Epoch)> {
        self.taken.iter().map(|capture| (capture.copy.page(), capture.epoch))
    }

    /// The batch is logged: from now on the copies belong to the state that it makes of their pages, so
    /// that the next capture finds only what changed since. `digests` are those of the chunks that the batch
    /// has.
    pub fn belong_to(&self, changes: &Changes, digests: &CapturedDigests) {
        for capture in &self.taken {
            let mut pages = changes.pages().iter().filter(|(page, _)| *page == capture.copy.page());
            // A page that the same batch deletes has no state for the copy to belong to.
            if let Some((_, Some(info))) = pages.next() {
                let digests = digests.get(&capture.step).into_iter().flatten();
                capture.copy.captured(capture.epoch, info.epoch, digests);
            }
        }
    }
}

impl Committer {
    /// Finds what changed in the working copies that the batch captures.
    pub(super) fn capture<'a>(&self, batch: &'a WriteBatch) -> Result<Captures<'a>> {
        let mut captures = Captures::default();
        let _span = batch.captures().next().map(|_| tracing::debug_span!("capture").entered());
        let (mut looks, mut staged, mut bitmaps_len) = (Vec::new(), Vec::new(), 0);
        for (index, copy, ranges) in batch.captures() {
            copy.bytes().check_device(&self.engine.device)?;
            // Refused here already, a copy of an older state costs no comparison. The epoch is checked again
            // under the lock.
            let (page, epoch) = (copy.page(), copy.epoch());
            let info = self.submitted.lock().get(page).ok_or(Error::UnknownPage { page })?;
            check_epoch(page, epoch, info.epoch)?;
            // A page of that epoch has the length that it had when the copy was made of it.
            let of = (epoch, info.len);
            if let CopyShadow::Digests(key) = copy.shadow() {
                push(&mut looks, self.begin_look(index, copy, of, ranges, key.span())?)?;
                continue;
            }
            let mut begun = self.begin_capture(index, copy, of, ranges);
            if matches!(begun, Err(Error::OverBudget { .. })) && !staged.is_empty() {
                // The bitmaps of those before take room until they are compared.
                self.compare(std::mem::take(&mut staged), &mut captures)?;
                bitmaps_len = 0;
                begun = self.begin_capture(index, copy, of, ranges);
            }
            let of_copy = begun?;
            bitmaps_len += of_copy.bitmaps.byte_len();
            push(&mut staged, of_copy)?;
            if bitmaps_len >= COMPARED_LEN {
                self.compare(std::mem::take(&mut staged), &mut captures)?;
                bitmaps_len = 0;
            }
        }
        self.compare(staged, &mut captures)?;
        self.look(&mut looks)?;
        for look in looks {
            captures.found.insert(look.step, changed_chunks(&look)?);
            let CopyLook { step, copy, epoch, parts, .. } = look;
            captures.taken.push(Capture { step, copy, epoch, parts, staged: None });
        }
        Ok(captures)
    }

    /// Step 1 for a working copy, and the memory for the next two.
    fn begin_capture<'a>(
        &self,
        step: usize,
        copy: &'a WorkingCopy,
        (epoch, page_len): (Epoch, u64),
        ranges: Option<&[Range<u64>]>,
    ) -> Result<StagedCopy<'a>> {
        let parts = parts(copy.page(), ranges, page_len, RANGE_ALIGN)?;
        let len = parts.last().map_or(0, |(range, at)| at + range.end - range.start);
        let live = copy.bytes().arrived(Access::Read)?;
        let lens = [len, bitmaps_len(&parts, copy.width())];
        // Both are claimed at once: claimed one after the other, a capture could fail half way, for a sum
        // that no error had named.
        let [staged, bitmaps] = self.stage_memories(Purpose::Stage, copy.bytes().place(), lens)?;
        Ok(StagedCopy { step, copy, epoch, parts, live, staged, bitmaps })
    }

    /// Steps 2 and 3 for some of the working copies, which share each list and each wait.
    fn compare<'a>(&self, copies: Vec<StagedCopy<'a>>, captures: &mut Captures<'a>) -> Result<()> {
        if copies.is_empty() {
            return Ok(());
        }
        let mut gathers = Vec::new();
        for StagedCopy { parts, live, staged, .. } in &copies {
            let sources = collected(parts.iter().map(|(range, at)| (part(*live, range), *at)))?;
            push(&mut gathers, Command::Gather { sources, target: staged.part(0, staged.byte_len()) })?;
        }
        self.run(gathers, Vec::new())?;
        let mut changed = self.changed(&copies)?.into_iter();
        for StagedCopy { step, copy, epoch, parts, staged, .. } in copies {
            let width = copy.width().bytes() as u64;
            let in_bytes = |run: Range<u32>| u64::from(run.start) * width..u64::from(run.end) * width;
            let found =
                parts.iter().zip(&mut changed).map(|((range, at), PartChanges { runs, elements })| {
                    let runs = runs.into_iter().map(in_bytes).collect();
                    let staged = staged.part(*at, range.end - range.start);
                    CapturedPart { offset: range.start, staged, key: None, runs, elements }
                });
            // By the operation's index: the encoder comes to it there, in the batch's order.
            captures.found.insert(step, collected(found)?);
            captures.taken.push(Capture { step, copy, epoch, parts, staged: Some(staged) });
        }
        Ok(())
    }

    /// Takes the captured bytes to the shadows, once the batch is logged. A copy whose shadow cannot
    /// follow is of no known state any more: epoch 0, at which no capture succeeds.
    pub(super) fn refresh_shadows(&self, captures: Captures<'_>) {
        for Capture { copy, parts, staged, .. } in captures.taken {
            let (CopyShadow::Kept(shadow), Some(staged)) = (copy.shadow(), staged) else { continue };
            // From the staged bytes, not from the copy: its owner may have written to it since.
            let copies = parts.iter().map(|(range, at)| Command::Copy {
                source: staged.part(*at, range.end - range.start),
                target: part(shadow.span(), range),
            });
            let list = CommandList { commands: copies.collect(), staging: Vec::new() };
            // The next use of the shadow is on the same lane, so it comes after this.
            if let Err(error) = self.engine.device.submit(Lane::Stage, list) {
                copy.belongs_to(Epoch(0), Vec::new());
                let error = self.engine.poison.set_by_device(error);
                tracing::error!(%error, page = %copy.page(), "a working copy's shadow is lost");
            }
        }
    }

    /// Makes memory of the caller's a working copy of a page.
    ///
    /// # Errors
    /// `UnknownPage`, `MemoryRefused`; the errors of allocating a shadow; a device error.
    pub fn working_copy(
        &self,
        page: PageId,
        memory: crate::device::DeviceBytes,
        width: Width,
        shadow: Shadow,
        direction: Direction,
    ) -> Result<WorkingCopy> {
        memory.check_device(&self.engine.device)?;
        memory.check_unused()?;
        let len = memory.byte_len();
        // Changes are found by elements, so the copy must be a whole number of them, on their boundary.
        if !len.is_multiple_of(width.bytes() as u64) {
            let reason = format!("that is no whole number of elements of {} bytes", width.bytes());
            return Err(Error::MemoryRefused { len, reason });
        }
        if memory.address().is_some_and(|address| !address.is_multiple_of(width.bytes() as u64)) {
            let reason = format!("it does not begin on a boundary of {} bytes", width.bytes());
            return Err(Error::MemoryRefused { len, reason });
        }
        let shadow = match shadow {
            Shadow::Page if is_on_disk(&self.submitted.lock(), page) => {
                let reason = "a page on disk has no memory to compare a working copy with: keep a shadow \
                              (`Shadow::Kept`) or digests (`Shadow::Digest`), or move the page to memory";
                return Err(Error::PlaceUnavailable { place: remanent_format::Place::Disk, reason });
            }
            Shadow::Page => CopyShadow::Page,
            Shadow::Kept(place) => CopyShadow::Kept(self.device_bytes(place, len)?),
            Shadow::Digest => CopyShadow::Digests(self.digest_key(memory.place())?),
        };
        let copy = WorkingCopy::new(page, width, memory, shadow);
        self.load(&copy, direction)?;
        Ok(copy)
    }

    /// Copies the page's bytes to a working copy and its shadow, or to the shadow alone.
    ///
    /// # Errors
    /// `UnknownPage`, `MemoryRefused` if the page's length is not the copy's; a device error.
    pub fn load(&self, copy: &WorkingCopy, direction: Direction) -> Result<()> {
        copy.bytes().check_device(&self.engine.device)?;
        copy.bytes().check_unused()?;
        // Kernels that still write to it come before: their bytes would land on top of the page's.
        let memory = copy.bytes().arrived(Access::Write)?;
        let len = memory.len;
        let (kept, key) = match copy.shadow() {
            CopyShadow::Page => (None, None),
            CopyShadow::Kept(shadow) => (Some(shadow.span()), None),
            CopyShadow::Digests(key) => (None, Some(key.span())),
        };
        let is_loaded = direction == Direction::Load;
        let targets: Vec<Span> = is_loaded.then_some(memory).into_iter().chain(kept).collect();
        // Half loaded, it is of no state: a capture in between is refused.
        copy.belongs_to(Epoch(0), Vec::new());
        let page = copy.page();
        self.engine.applier.unloaded().wait([page])?;
        let to = targets.clone();
        // In one turn: epoch and bytes are of one state, in lane order with the batches.
        let (epoch, bytes) = self.engine.applier.turn(move |turn| {
            turn.intact()?;
            let info = turn.applied.table.get(page).ok_or(Error::UnknownPage { page })?;
            if info.len != len {
                let reason = format!("page {page} is {} bytes long", info.len);
                return Err(Error::MemoryRefused { len, reason });
            }
            if let Some(on_disk) = turn.applied.on_disk.get(page) {
                return Ok((info.epoch, LoadedFrom::Disk(on_disk.clone())));
            }
            let source = turn.applied.memory_of(page)?.span();
            let commands = to.into_iter().map(|target| Command::Copy { source, target }).collect();
            Ok((info.epoch, LoadedFrom::Memory(turn.submit(CommandList { commands, staging: Vec::new() })?)))
        })?;
        match bytes {
            LoadedFrom::Memory(pending) => _ = pending.finish(&*self.engine.device)?,
            LoadedFrom::Disk(on_disk) => self.load_from_disk(page, &on_disk, &targets)?,
        }
        let digests = match key {
            None => Vec::new(),
            Some(key) if is_loaded => {
                let parts = parts(page, None, len, DIGEST_CHUNK_LEN)?;
                self.all_digests(parts.iter().map(|(range, _)| part(memory, range)), key)?
            }
            // Nothing is known of the page: the next capture takes all of the copy.
            Some(_) => unknown_digests(len)?,
        };
        copy.belongs_to(epoch, digests);
        Ok(())
    }

    /// Copies the bytes of a page on disk to all of the targets: from disk to the first one, and from there
    /// to the others.
    fn load_from_disk(&self, page: PageId, on_disk: &DiskPage, targets: &[Span]) -> Result<()> {
        let Some((first, others)) = targets.split_first() else { return Ok(()) };
        self.fill_page(page, on_disk, *first)?;
        let copies = others.iter().map(|target| Command::Copy { source: *first, target: *target });
        self.run(collected(copies)?, Vec::new()).map(drop)
    }
}

/// The changed chunks of a copy that was looked at. Their bytes stay in the copy until they are written.
fn changed_chunks(look: &CopyLook<'_>) -> Result<Vec<CapturedPart>> {
    let found = look.changed()?.into_iter().map(|run| {
        let (staged, len) = (part(look.live, &run), run.end - run.start);
        let (key, runs) = (Some(look.key), std::iter::once(0..len).collect());
        CapturedPart { offset: run.start, staged, key, runs, elements: SparseElements::default() }
    });
    collected(found)
}
