//! Finds the changed elements of staged ranges, and transfers them to the host.
//!
//! 1. **Compare** on the device. The result is a bitmap with one bit per element. A bit is 1 if the staged element
//!    differs from the page (compared in [`Lane::Apply`], the device queue for deltas) or from the working copy's
//!    shadow.
//! 2. **Number** the set bits on the device, which results in a list of their indices in ascending order. This step is
//!    skipped for short bitmaps, whose transfer takes no longer than that of a count.
//! 3. **Transfer** the list or the bitmap to the host, whichever is shorter. An index takes four bytes, so the list is
//!    shorter if less than one element in thirty-two has changed. The bitmap of 1.2 GB of 16-bit elements takes 75 MB.
//!
//! Only the comparison with a page runs in the device queue for deltas, so no delta waits for a transfer to the host.
//!
//! No data is written, so a crash loses nothing.

use std::ops::Range;

use remanent_format::{Epoch, PageId, Width};

use super::ranges::{RangeParts, check_epoch, part};
use super::stage_memory::StageMemory;
use crate::base::allocation::{append, collected, copied, push};
use crate::base::parallel;
use crate::device::{Command, CommandList, Fence, Lane, SHORT_COPY_LEN_MAX, Selection, Span, StagingSpan};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::memory::staging::StagingBuf;
use crate::write::batch::{CopyShadow, ElementChanges, SparseElements, WorkingCopy};
use crate::write::commit::Committer;

/// The alignment in bytes of each bitmap and each list of indices.
const BITMAP_ALIGN: u64 = 16;
/// The length of an index in bytes, as the device writes it.
const INDEX_LEN: u64 = 4;
/// The maximum number of bytes that are compared with pages at a time, between two batches. A longer page is compared
/// as a whole.
const TURN_LEN: u64 = 64 << 20;
/// The number of bytes of indices and bitmaps that one thread reads.
const SHARE_LEN: usize = 256 << 10;
/// The maximum number of threads that read indices and bitmaps.
const HOST_THREADS_MAX: usize = 8;

/// A working copy whose changed elements are to be found, with the memory for the comparison.
pub(super) struct StagedCopy<'a> {
    /// The operation's index in the batch.
    pub step: usize,
    pub copy: &'a WorkingCopy,
    /// The epoch of the page state with which the working copy is compared.
    pub epoch: Epoch,
    /// The ranges of the page, each with its offset in `staged`.
    pub parts: Vec<(Range<u64>, u64)>,
    /// The copy's own memory.
    pub live: Span,
    /// The staged bytes of the working copy, which are compared and then captured.
    pub staged: StageMemory,
    /// The memory for the bitmaps, of [`bitmaps_len`] bytes.
    pub bitmaps: StageMemory,
}

/// The changes that the comparison found in one part of a page.
pub(super) struct PartChanges {
    /// The ranges of elements in which many elements have changed.
    pub runs: Vec<Range<u32>>,
    /// The changed elements outside `runs`.
    pub elements: SparseElements,
}

/// A range of a page, the staged bytes to compare it with, and the memory for the resulting bitmap.
type RangePair = (Range<u64>, Span, Span);

/// Staged ranges of one page that are compared with the page's memory.
struct PageDiff {
    page: PageId,
    epoch: Epoch,
    width: Width,
    pairs: Vec<RangePair>,
}

impl PageDiff {
    /// Returns the number of bytes to compare, or 1 if there are none, so that the number of pages compared at a time
    /// is bounded.
    fn byte_len(&self) -> u64 {
        self.pairs.iter().map(|(range, ..)| range.end - range.start).sum::<u64>().max(1)
    }
}

/// Returns the length in bytes of the memory for the bitmaps and indices of these parts. Each element takes two bits:
/// one in the bitmap, and one in the space for indices.
pub(super) fn bitmaps_len(parts: &RangeParts, width: Width) -> u64 {
    parts.iter().map(|(range, _)| 2 * bitmap_len(range, width).next_multiple_of(BITMAP_ALIGN)).sum()
}

/// Divides the memory for bitmaps among the parts of a copy. Each bitmap is followed by space of the same length for
/// the list of indices. A list that would be longer than its bitmap is never transferred, so it need not fit.
fn selections_of<'c>(copy: &'c StagedCopy<'_>) -> impl Iterator<Item = Selection> + use<'c> {
    let lens = copy.parts.iter().map(|(range, _)| bitmap_len(range, copy.copy.width()));
    let mut at = 0;
    lens.map(move |len| {
        // The list follows its bitmap at the next aligned offset.
        let indices_at = at + len.next_multiple_of(BITMAP_ALIGN);
        let bits = copy.bitmaps.part(at, len);
        at = indices_at + len.next_multiple_of(BITMAP_ALIGN);
        Selection { bits, indices: copy.bitmaps.part(indices_at, len / INDEX_LEN * INDEX_LEN) }
    })
}

impl Committer {
    /// Finds the changes in each part of these copies, in order. The copies share the command list and the wait of each
    /// step.
    pub(super) fn changed(&self, copies: &[StagedCopy<'_>]) -> Result<Vec<PartChanges>> {
        let selections = collected(copies.iter().flat_map(selections_of))?;
        // Step 1 of the module documentation.
        let mut commands = Vec::new();
        let mut of_pages: Vec<PageDiff> = Vec::new();
        let mut bits = selections.iter().map(|selection| selection.bits);
        for StagedCopy { copy, epoch, parts, staged, .. } in copies {
            let pair = |(range, at): &(Range<u64>, u64)| {
                let bits = bits.next().expect("a bitmap for each part");
                (range.clone(), staged.part(*at, range.end - range.start), bits)
            };
            let pairs = collected(parts.iter().map(pair))?;
            match copy.shadow() {
                // No batch modifies the shadow, because it belongs to this copy alone. The comparison therefore need
                // not run between two batches.
                CopyShadow::Kept(shadow) => append(&mut commands, diffs(pairs, shadow.span(), copy.width()))?,
                CopyShadow::Digests(_) => unreachable!("those find chunks, not elements"),
                CopyShadow::Page => {
                    let (page, epoch, width) = (copy.page(), *epoch, copy.width());
                    push(&mut of_pages, PageDiff { page, epoch, width, pairs })?;
                }
            }
        }
        self.compare_with_pages(of_pages)?;
        // Step 2.
        let counts = match selections.iter().map(|selection| selection.bits.len).sum() {
            0..=SHORT_COPY_LEN_MAX => None,
            _ => Some(self.number(&selections, &mut commands)?),
        };
        // Step 3.
        let widths = copies.iter().flat_map(|of| of.parts.iter().map(|_| of.copy.width()));
        self.download(&selections, counts.as_deref(), commands, &collected(widths)?)
    }

    /// Compares staged bytes with their pages in [`Lane::Apply`], the device queue for deltas. The later steps run in
    /// [`Lane::Stage`] and delay no delta.
    ///
    /// The comparison is divided into parts of bounded length, each of which runs on the applier between two batches.
    /// Batches and reads wait for at most one part.
    fn compare_with_pages(&self, of_pages: Vec<PageDiff>) -> Result<()> {
        let Engine { applier, device, .. } = &*self.engine;
        applier.unloaded().wait(of_pages.iter().map(|of| of.page))?;
        let mut rest = of_pages.into_iter().peekable();
        while rest.peek().is_some() {
            let (mut of_turn, mut len) = (Vec::new(), 0);
            while let Some(of_page) = rest.next_if(|of| len == 0 || len + of.byte_len() <= TURN_LEN) {
                len += of_page.byte_len();
                push(&mut of_turn, of_page)?;
            }
            let compared: Fence = applier.turn(move |turn| {
                turn.intact()?;
                let mut commands = Vec::new();
                for PageDiff { page, epoch, width, pairs } in of_turn {
                    let info = turn.applied.table.get(page).ok_or(Error::UnknownPage { page })?;
                    // The epoch is checked together with the comparison. A batch that ran in between would look like a
                    // change in the copy.
                    check_epoch(page, epoch, info.epoch)?;
                    let memory = turn.applied.memory_of(page)?.span();
                    append(&mut commands, diffs(pairs, memory, width))?;
                }
                Ok(turn.submit(CommandList { commands, staging: Vec::new() })?.fence())
            })?;
            // The bitmaps are freed after the pending work of [`Lane::Stage`]. This list writes to them in another
            // lane, so that lane must wait for it. This call precedes the next comparison, which may fail and free the
            // bitmaps.
            device.after(Lane::Stage, compared)?;
        }
        Ok(())
    }

    /// Runs `commands`, which compute the bitmaps, and then numbers the set bits. Returns the number of set bits in
    /// each bitmap.
    fn number(&self, selections: &[Selection], commands: &mut Vec<Command>) -> Result<Vec<u64>> {
        let len = INDEX_LEN as usize * selections.len();
        let target = StagingSpan { index: 0, offset: 0, len };
        push(commands, Command::Select { bitmaps: copied(selections)?, target })?;
        let staging = vec![self.engine.staging.take(len)?.into_staging()];
        let mut returned = self.run(std::mem::take(commands), staging)?;
        let found = StagingBuf::new(returned.pop().expect("one staging went in"), len);
        let counts = collected(indices(&found).map(u64::from));
        self.engine.staging.put(found.into_staging());
        counts
    }

    /// Runs `commands`, and transfers the changes of each part to the host, as a list of indices or as a bitmap.
    /// Without `counts`, all parts are transferred as bitmaps. `widths` contains the element width of each part.
    fn download(
        &self,
        selections: &[Selection],
        counts: Option<&[u64]>,
        mut commands: Vec<Command>,
        widths: &[Width],
    ) -> Result<Vec<PartChanges>> {
        let mut len = 0;
        let mut brought = Vec::new();
        for (number, Selection { bits, indices }) in selections.iter().enumerate() {
            // The shorter form crosses the bus.
            let listed_len = counts.map(|counts| INDEX_LEN * counts[number]);
            let listed_len = listed_len.filter(|listed_len| *listed_len <= indices.len);
            let source = listed_len.map_or(*bits, |len| Span { len, ..*indices });
            let target = StagingSpan { index: 0, offset: len, len: source.len as usize };
            push(&mut commands, Command::Download { source, target })?;
            push(&mut brought, (target, listed_len.is_some()))?;
            len += target.len;
        }
        let staging = vec![self.engine.staging.take(len)?.into_staging()];
        let mut returned = self.run(commands, staging)?;
        let found = StagingBuf::new(returned.pop().expect("one staging went in"), len);
        let changes_of = |part: usize| {
            let (at, is_list) = &brought[part];
            let (bytes, width) = (&found[at.offset..][..at.len], widths[part]);
            let changed = match is_list {
                true => ElementChanges::of(indices(bytes), width)?,
                false => ElementChanges::of_bitmap(bytes, width)?,
            };
            Ok(PartChanges { runs: changed.runs, elements: SparseElements::new(changed.elements)? })
        };
        let threads = parallel::threads(HOST_THREADS_MAX.min(1 + len / SHARE_LEN));
        let changed = parallel::map_indexed(threads, brought.len(), || (), |(), part| changes_of(part));
        self.engine.staging.put(found.into_staging());
        changed
    }
}

/// Returns the commands that compare ranges of `other`, the memory of a page or shadow, with staged bytes.
fn diffs(pairs: Vec<RangePair>, other: Span, width: Width) -> impl Iterator<Item = Command> {
    pairs.into_iter().map(move |(range, left, target)| Command::Diff {
        left,
        right: part(other, &range),
        width,
        target,
    })
}

/// Returns the length in bytes of the bitmap of a range's elements.
fn bitmap_len(range: &Range<u64>, width: Width) -> u64 {
    ((range.end - range.start) / width.bytes() as u64).div_ceil(8)
}

/// Decodes the list of indices that the device wrote.
fn indices(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes
        .chunks_exact(INDEX_LEN as usize)
        .map(|index| u32::from_le_bytes(index.try_into().expect("four bytes")))
}
