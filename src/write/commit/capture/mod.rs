//! Captures find the changes in a working copy since it last equaled its page.
//!
//! 1. **Arrive**: wait on the host for the stream that writes the working copy. No device queue waits, because the
//!    caller's kernels may take long.
//! 2. **Stage**: copy the examined ranges to separate device memory. From here on the caller may modify the working
//!    copy again. Without staging, the log could contain other bytes than were compared.
//! 3. **Compare** the staged bytes with their pages, at the epochs of the working copies, or with the copies' shadows
//!    ([`diff`]). A working copy with digests is compared before it is staged ([`digests`]).
//! 4. Encode the batch from the staged bytes, and log it if the page still has the same epoch. Without this second
//!    check, which is made under the submission lock, unchanged bytes between two captured changes would overwrite the
//!    changes of other batches.
//!
//! A crash before the batch is logged loses a batch that was never acknowledged. Working copies end with the process.

mod device_payload;
mod diff;
mod digests;
mod ranges;
mod stage_memory;
mod captured_images;

use std::collections::BTreeMap;
use std::ops::Range;

use remanent_format::state::table::Changes;
use remanent_format::{Epoch, PageId, Width};

use super::Committer;
use super::disk_moves::is_on_disk;
use crate::base::allocation::{collected, push};
use crate::device::{Access, Command, CommandList, DIGEST_CHUNK_LEN, Lane, Pending, Span};
use crate::error::{Error, Refused, Result, Unavailable};
use crate::images::disk_pages::{DiskPage, pending_bytes_of_elements, pending_bytes_of_write};
use crate::memory::arena::Purpose;
use crate::write::batch::{CapturedPart, CopyShadow, SparseElements, WorkingCopy, WriteBatch};

pub(super) use captured_images::CapturedImages;
pub(super) use device_payload::{CapturedDigests, FilledPayload};
use diff::{PartChanges, StagedCopy, bitmaps_len};
pub(crate) use digests::DigestKeys;
use digests::{DigestScan, unknown_digests};
use ranges::{RANGE_ALIGN, check_epoch, part, parts};
use stage_memory::StageMemory;

/// The maximum total length in bytes of the bitmaps and index lists of working copies that are compared together.
const COMPARED_LEN: u64 = 32 << 20;

/// The captures of a batch: the changes that were found, and the staged bytes of the working copies.
#[derive(Default)]
pub(super) struct Captures<'a> {
    /// The parts of pages in which changes were found, by the index of the capture operation.
    pub found: BTreeMap<usize, Vec<CapturedPart>>,
    taken: Vec<Capture<'a>>,
}

/// One capture of a working copy.
struct Capture<'a> {
    /// The operation's index in the batch.
    step: usize,
    copy: &'a WorkingCopy,
    /// The epoch of the page state with which the working copy was compared.
    epoch: Epoch,
    /// The staged ranges of the page, each with its offset in `staged`.
    parts: Vec<(Range<u64>, u64)>,
    /// The captured bytes, which are copied to the payload and to the shadow. `None` for a working copy with digests,
    /// whose bytes are staged only while the payload or the image is written.
    staged: Option<StageMemory>,
}

/// A capture that examined all bytes of its page, with the amount of changes that it found.
pub(super) struct WholeCapture<'a> {
    /// The operation's index in the batch.
    pub step: usize,
    pub page: PageId,
    pub bytes: CapturedBytes<'a>,
    /// The number of bytes of the page that have changed.
    pub changed: u64,
    /// An upper bound of the host memory, in bytes, that the changes take until the next snapshot if the page is on
    /// disk.
    pub pending: u64,
}

/// The location of the bytes of a captured page.
#[derive(Clone, Copy)]
pub(super) enum CapturedBytes<'a> {
    /// The bytes were copied to this span of staging memory.
    Staged(Span),
    /// The bytes are still in the working copy, at the first span, and are copied to staging memory piece by piece
    /// while an image is written. The second span contains the key for digests.
    InCopy(&'a WorkingCopy, Span, Span),
}

/// Returns an upper bound of the host memory, in bytes, that the changes of a part take while they are pending.
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

/// The source from which a working copy is loaded.
enum LoadedFrom {
    /// The page's memory. The copy from this memory to the working copy is in flight.
    Memory(Pending),
    /// The page's image on disk, to which later writes of batches must be applied.
    Disk(DiskPage),
}

/// The direction of the first copy between a page and the caller's memory that becomes its working copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum InitialCopy {
    /// The page's bytes are copied to the memory immediately.
    Load,
    /// The memory remains unchanged, and the next capture copies its bytes to the page.
    Store,
}

/// The data with which a working copy is compared to find the changes that kernels made in the copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Shadow {
    /// The page itself. This shadow takes no additional memory. The comparison runs in the queue of deltas, between two
    /// deltas. Not available for a page on disk, because such a page has no memory to compare with.
    Page,
    /// A separate copy in this place, with the length of the page and counted in the budget. Every capture updates this
    /// copy. Deltas of other pages do not wait for the comparison.
    Kept(remanent_format::Place),
    /// Digests of the earlier contents, which take sixteen bytes of host memory for each chunk of 64 KiB. A capture
    /// logs whole chunks, and takes device memory for only 16 MiB of them at a time. Captured ranges are widened to
    /// chunks.
    ///
    /// The changes must fit in a batch. If more of a page in memory has changed, capture its ranges one after another.
    ///
    /// A change that leaves the digest of its chunk unchanged is not captured. For bytes that were chosen without
    /// knowledge of the key, the probability is below 2^-100 per chunk and capture. The store draws the key at random
    /// after each open and never writes it to disk.
    Digest,
}

impl Captures<'_> {
    /// Returns whether the batch captures nothing.
    pub fn is_empty(&self) -> bool {
        self.taken.is_empty()
    }

    /// Returns the captures that examined a whole page and found a change.
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

    /// Returns the captured pages, with the epochs that they must have when the batch is logged.
    pub fn epochs(&self) -> impl Iterator<Item = (PageId, Epoch)> {
        self.taken.iter().map(|capture| (capture.copy.page(), capture.epoch))
    }

    /// Advances the working copies to the new state of their pages after the batch is logged, so that the next capture
    /// finds only later changes. `digests` contains the digests of the captured chunks.
    pub fn belong_to(&self, changes: &Changes, digests: &CapturedDigests) {
        for capture in &self.taken {
            let mut pages = changes.pages().iter().filter(|(page, _)| *page == capture.copy.page());
            // If the same batch also deletes the page, there is no page state to advance to.
            if let Some((_, Some(info))) = pages.next() {
                let digests = digests.get(&capture.step).into_iter().flatten();
                capture.copy.captured(capture.epoch, info.epoch, digests);
            }
        }
    }
}

impl Committer {
    /// Finds the changes in the working copies that the batch captures.
    pub(super) fn capture<'a>(&self, batch: &'a WriteBatch) -> Result<Captures<'a>> {
        let mut captures = Captures::default();
        let _span = batch.captures().next().map(|_| tracing::debug_span!("capture").entered());
        let (mut scans, mut staged, mut bitmaps_len) = (Vec::new(), Vec::new(), 0);
        for (index, copy, ranges) in batch.captures() {
            copy.bytes().check_device(&self.engine.device)?;
            // This check rejects a copy of an older page state before it is compared. The epoch is checked again under
            // the submission lock.
            let (page, epoch) = (copy.page(), copy.epoch());
            let info = self.submitted.lock().get(page).ok_or(Error::UnknownPage { page })?;
            check_epoch(page, epoch, info.epoch)?;
            // A page that still has this epoch has the same length as when the copy was created.
            let of = (epoch, info.len);
            if let CopyShadow::Digests(key) = copy.shadow() {
                push(&mut scans, self.begin_scan(index, copy, of, ranges, key.span())?)?;
                continue;
            }
            let mut begun = self.begin_capture(index, copy, of, ranges);
            if matches!(begun, Err(Error::OverBudget { .. })) && !staged.is_empty() {
                // The bitmaps of the copies collected so far are freed only when these copies are compared.
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
        self.scan(&mut scans)?;
        for scan in scans {
            captures.found.insert(scan.step, changed_chunks(&scan)?);
            let DigestScan { step, copy, epoch, parts, .. } = scan;
            captures.taken.push(Capture { step, copy, epoch, parts, staged: None });
        }
        Ok(captures)
    }

    /// Performs step 1 of the module documentation for one working copy, and allocates the memory for steps 2 and 3.
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
        // One allocation for both: otherwise a capture could fail halfway, with an error that states less than the
        // total that it needs.
        let [staged, bitmaps] = self.stage_memories(Purpose::Stage, copy.bytes().place(), lens)?;
        Ok(StagedCopy { step, copy, epoch, parts, live, staged, bitmaps })
    }

    /// Performs steps 2 and 3 for several working copies, which share the command list and the wait of each step.
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
            // The encoder looks the parts up by the operation's index.
            captures.found.insert(step, collected(found)?);
            captures.taken.push(Capture { step, copy, epoch, parts, staged: Some(staged) });
        }
        Ok(())
    }

    /// Copies the captured bytes to the shadows after the batch is logged. If that fails for a shadow, the state of its
    /// working copy is unknown. The copy's epoch is then set to 0, so that every later capture fails.
    pub(super) fn refresh_shadows(&self, captures: Captures<'_>) {
        for Capture { copy, parts, staged, .. } in captures.taken {
            let (CopyShadow::Kept(shadow), Some(staged)) = (copy.shadow(), staged) else { continue };
            // The shadow must equal the captured bytes. The caller may have modified the copy since, so the staged
            // bytes are the source.
            let copies = parts.iter().map(|(range, at)| Command::Copy {
                source: staged.part(*at, range.end - range.start),
                target: part(shadow.span(), range),
            });
            let list = CommandList { commands: copies.collect(), staging: Vec::new() };
            // Later comparisons with the shadow run in the same lane (device queue), so they see this copy.
            if let Err(error) = self.engine.device.submit(Lane::Stage, list) {
                copy.belongs_to(Epoch(0), Vec::new());
                let error = self.engine.poison.set_by_device(error);
                tracing::error!(%error, page = %copy.page(), "a working copy's shadow is lost");
            }
        }
    }

    /// Turns caller-owned memory into a working copy of a page.
    ///
    /// # Errors
    /// `UnknownPage`, `Refused`; the errors of allocating a shadow; a device error.
    pub fn working_copy(
        &self,
        page: PageId,
        memory: crate::device::DeviceBytes,
        width: Width,
        shadow: Shadow,
        initial_copy: InitialCopy,
    ) -> Result<WorkingCopy> {
        memory.check_device(&self.engine.device)?;
        memory.check_unused()?;
        let len = memory.byte_len();
        // Changes are found by elements, so the copy must be a whole number of elements and aligned to them.
        if !len.is_multiple_of(width.bytes() as u64) {
            let reason = format!("its length is not a whole number of elements of {} bytes", width.bytes());
            return Err(Error::Refused(Refused::Memory { len, reason }));
        }
        if memory.address().is_some_and(|address| !address.is_multiple_of(width.bytes() as u64)) {
            let reason = format!("it does not begin on a boundary of {} bytes", width.bytes());
            return Err(Error::Refused(Refused::Memory { len, reason }));
        }
        let shadow = match shadow {
            Shadow::Page if is_on_disk(&self.submitted.lock(), page) => {
                let reason = "a page on disk has no memory to compare a working copy with: keep a shadow \
                              (`Shadow::Kept`) or digests (`Shadow::Digest`), or move the page to memory";
                return Err(Error::Unavailable(Unavailable::Place {
                    place: remanent_format::Place::Disk,
                    reason,
                }));
            }
            Shadow::Page => CopyShadow::Page,
            Shadow::Kept(place) => CopyShadow::Kept(self.device_bytes(place, len)?),
            Shadow::Digest => CopyShadow::Digests(self.digest_key(memory.place())?),
        };
        let copy = WorkingCopy::new(page, width, memory, shadow);
        self.load(&copy, initial_copy)?;
        Ok(copy)
    }

    /// Copies the page's bytes to a working copy and its shadow, or only to the shadow if `initial_copy` is
    /// [`InitialCopy::Store`].
    ///
    /// # Errors
    /// `UnknownPage`; `Refused` if the page and the copy differ in length; a device error.
    pub fn load(&self, copy: &WorkingCopy, initial_copy: InitialCopy) -> Result<()> {
        copy.bytes().check_device(&self.engine.device)?;
        copy.bytes().check_unused()?;
        // Kernels that still write to the memory must finish first, or they would overwrite the page's bytes.
        let memory = copy.bytes().arrived(Access::Write)?;
        let len = memory.len;
        let (kept, key) = match copy.shadow() {
            CopyShadow::Page => (None, None),
            CopyShadow::Kept(shadow) => (Some(shadow.span()), None),
            CopyShadow::Digests(key) => (None, Some(key.span())),
        };
        let is_loaded = initial_copy == InitialCopy::Load;
        let targets: Vec<Span> = is_loaded.then_some(memory).into_iter().chain(kept).collect();
        // Until the copy is completely loaded, it belongs to no page state, and captures are rejected.
        copy.belongs_to(Epoch(0), Vec::new());
        let page = copy.page();
        self.engine.applier.unloaded().wait([page])?;
        let to = targets.clone();
        // Epoch and bytes are read together, between two batches, so that they belong to the same state.
        let (epoch, bytes) = self.engine.applier.turn(move |turn| {
            turn.intact()?;
            let info = turn.applied.table.get(page).ok_or(Error::UnknownPage { page })?;
            if info.len != len {
                let reason = format!("page {page} is {} bytes long", info.len);
                return Err(Error::Refused(Refused::Memory { len, reason }));
            }
            if let Some(on_disk) = turn.applied.on_disk.get(page) {
                return Ok((info.epoch, LoadedFrom::Disk(on_disk.clone())));
            }
            let source = turn.applied.memory_of(page)?.span();
            let commands = to.into_iter().map(|target| Command::Copy { source, target }).collect();
            Ok((info.epoch, LoadedFrom::Memory(turn.submit(CommandList { commands, staging: Vec::new() })?)))
        })?;
        match bytes {
            LoadedFrom::Memory(pending) => _ = self.engine.device.finish(pending)?,
            LoadedFrom::Disk(on_disk) => self.load_from_disk(page, &on_disk, &targets)?,
        }
        let digests = match key {
            None => Vec::new(),
            Some(key) if is_loaded => {
                let parts = parts(page, None, len, DIGEST_CHUNK_LEN)?;
                self.all_digests(parts.iter().map(|(range, _)| part(memory, range)), key)?
            }
            // The memory is unrelated to the page's contents, so the next capture logs all of it.
            Some(_) => unknown_digests(len)?,
        };
        copy.belongs_to(epoch, digests);
        Ok(())
    }

    /// Copies the bytes of a page from disk to the first target, and from there to the other targets.
    fn load_from_disk(&self, page: PageId, on_disk: &DiskPage, targets: &[Span]) -> Result<()> {
        let Some((first, others)) = targets.split_first() else { return Ok(()) };
        self.fill_page(page, on_disk, *first)?;
        let copies = others.iter().map(|target| Command::Copy { source: *first, target: *target });
        self.run(collected(copies)?, Vec::new()).map(drop)
    }
}

/// Returns the changed chunks of a scanned working copy. The bytes of the chunks remain in the copy until they are
/// written to the payload or an image.
fn changed_chunks(scan: &DigestScan<'_>) -> Result<Vec<CapturedPart>> {
    let found = scan.changed()?.into_iter().map(|run| {
        let (staged, len) = (part(scan.live, &run), run.end - run.start);
        let (key, runs) = (Some(scan.key), std::iter::once(0..len).collect());
        CapturedPart { offset: run.start, staged, key, runs, elements: SparseElements::default() }
    });
    collected(found)
}
