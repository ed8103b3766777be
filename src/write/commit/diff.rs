//! The changed elements of staged ranges: how they are found, and brought to the host.
//!
//! 1. **Compare** on the device: one bit for each element, 1 where the staged bytes differ from the page,
//!    in the lane of deltas, or from the copy's shadow.
//! 2. **Number** them there: the indices of the set bits, rising. A bitmap that is so short that it comes
//!    to the host as soon as the count of its bits would is not numbered.
//! 3. **Bring** the shorter form to the host. An index is four bytes, so that is the list of them where
//!    less than one element in thirty-two changed. A bitmap of 1.2 GB of 16-bit elements is 75 MB.
//!
//! The lane of deltas holds the comparison with a page and no more, so that no delta waits for a transfer
//! to the host.
//!
//! Nothing is written, so a crash loses nothing.

use std::ops::Range;

use remanent_format::Width;

use super::Committer;
use super::ranges::{RangeParts, check_epoch, part};
use super::stage_memory::StageMemory;
use crate::device::{Command, CommandList, Fence, Lane, SHORT_COPY_LEN_MAX, Selection, Span, StagingSpan};
use crate::error::{Error, Result};
use crate::memory::staging::StagingBuf;
use crate::write::batch::{CopyShadow, ElementChanges, WorkingCopy};

/// Boundary on which each bitmap, and each list of indices, begins.
const BITMAP_ALIGN: u64 = 16;
/// How many bytes an index takes.
const INDEX_LEN: u64 = 4;

/// Bitmaps, one for each part, with room for all indices that are shorter than the bitmap. A longer list is
/// never brought, so it need not fit.
struct Bitmaps {
    /// One bitmap for each part, with its list of indices.
    selections: Vec<Selection>,
    /// The length of all bitmaps, in bytes.
    len: u64,
}

/// How many bytes the bitmaps of parts take with their indices: two bits for each element, one in the bitmap
/// and one for the indices.
pub(super) fn bitmaps_len(parts: &RangeParts, width: Width) -> u64 {
    parts.iter().map(|(range, _)| 2 * bitmap_len(range, width).next_multiple_of(BITMAP_ALIGN)).sum()
}

impl Bitmaps {
    /// Lays them out in `memory`, part by part.
    fn of(parts: &RangeParts, width: Width, memory: &StageMemory) -> Self {
        let lens = parts.iter().map(|(range, _)| bitmap_len(range, width));
        let mut at = 0;
        let bitmap = |len: u64| {
            // The list lies right after its bitmap, on a boundary of its own.
            let indices_at = at + len.next_multiple_of(BITMAP_ALIGN);
            let bits = memory.part(at, len);
            at = indices_at + len.next_multiple_of(BITMAP_ALIGN);
            Selection { bits, indices: memory.part(indices_at, len / INDEX_LEN * INDEX_LEN) }
        };
        let selections: Vec<Selection> = lens.map(bitmap).collect();
        let len = selections.iter().map(|selection| selection.bits.len).sum();
        Self { selections, len }
    }
}

impl Committer {
    /// Finds what changed in each part of a working copy that is at `epoch` and staged; `memory` holds
    /// [`bitmaps_len`] bytes.
    pub(super) fn changed(
        &self,
        copy: &WorkingCopy,
        epoch: remanent_format::Epoch,
        parts: &RangeParts,
        staged: Span,
        memory: &StageMemory,
    ) -> Result<Vec<ElementChanges>> {
        let (page, width) = (copy.page(), copy.width());
        let bitmaps = Bitmaps::of(parts, width, memory);
        let pairs: Vec<(Range<u64>, Span, Span)> = parts
            .iter()
            .zip(&bitmaps.selections)
            .map(|((range, at), selection)| {
                (range.clone(), part(staged, &(*at..at + range.end - range.start)), selection.bits)
            })
            .collect();
        let diffs = move |other: Span| -> Vec<Command> {
            let diff = |(range, left, target): (Range<u64>, Span, Span)| Command::Diff {
                left,
                right: part(other, &range),
                width,
                target,
            };
            pairs.into_iter().map(diff).collect()
        };
        // 1.
        let mut commands = Vec::new();
        match copy.shadow() {
            // The shadow is the copy's own: no batch writes to it, so no turn is needed.
            CopyShadow::Kept(shadow) => commands = diffs(shadow.span()),
            CopyShadow::Digests(_) => unreachable!("those find chunks, not elements"),
            CopyShadow::Page => {
                self.engine.applier.unloaded().wait([page])?;
                let compared: Fence = self.engine.applier.turn(move |turn| {
                    turn.intact()?;
                    let info = turn.applied.table.get(page).ok_or(Error::UnknownPage { page })?;
                    // In the same turn as the comparison: a batch in between would show as a change of
                    // the copy's.
                    check_epoch(page, epoch, info.epoch)?;
                    let commands = diffs(turn.applied.memory_of(page)?.span());
                    Ok(turn.submit(CommandList { commands, staging: Vec::new() })?.fence())
                })?;
                // The rest is on the lane for staging: numbering and the way to the host hold up no delta.
                self.engine.device.after(Lane::Stage, compared)?;
            }
        }
        // 2.
        let counts = match bitmaps.len {
            0..=SHORT_COPY_LEN_MAX => None,
            _ => Some(self.number(&bitmaps, &mut commands)?),
        };
        // 3.
        self.bring(&bitmaps, counts.as_deref(), commands, width)
    }

    /// Runs the commands, and numbers the bits that they set. Returns how many there are in each bitmap.
    fn number(&self, bitmaps: &Bitmaps, commands: &mut Vec<Command>) -> Result<Vec<u64>> {
        let len = INDEX_LEN as usize * bitmaps.selections.len();
        let target = StagingSpan { index: 0, offset: 0, len };
        commands.push(Command::Select { bitmaps: bitmaps.selections.clone(), target });
        let staging = vec![self.engine.staging.take(len)?.into_staging()];
        let mut returned = self.run(std::mem::take(commands), staging)?;
        let found = StagingBuf::new(returned.pop().expect("one staging went in"), len);
        let counts = indices(&found).map(u64::from).collect();
        self.engine.staging.give(found.into_staging());
        Ok(counts)
    }

    /// Runs the commands, and brings the changes to the host: for each part its indices or its bitmap.
    fn bring(
        &self,
        bitmaps: &Bitmaps,
        counts: Option<&[u64]>,
        mut commands: Vec<Command>,
        width: Width,
    ) -> Result<Vec<ElementChanges>> {
        let mut len = 0;
        let mut brought = Vec::with_capacity(bitmaps.selections.len());
        for (number, Selection { bits, indices }) in bitmaps.selections.iter().enumerate() {
            // The shorter of the two goes over the bus.
            let listed_len = counts.map(|counts| INDEX_LEN * counts[number]);
            let listed_len = listed_len.filter(|listed_len| *listed_len <= indices.len);
            let source = listed_len.map_or(*bits, |len| Span { len, ..*indices });
            let target = StagingSpan { index: 0, offset: len, len: source.len as usize };
            commands.push(Command::Download { source, target });
            brought.push((target, listed_len.is_some()));
            len += target.len;
        }
        let staging = vec![self.engine.staging.take(len)?.into_staging()];
        let mut returned = self.run(commands, staging)?;
        let found = StagingBuf::new(returned.pop().expect("one staging went in"), len);
        let changed = |(at, is_list): (StagingSpan, bool)| {
            let bytes = &found[at.offset..][..at.len];
            if is_list {
                ElementChanges::of(indices(bytes), width)
            } else {
                ElementChanges::of_bitmap(bytes, width)
            }
        };
        let changed = brought.into_iter().map(changed).collect();
        self.engine.staging.give(found.into_staging());
        Ok(changed)
    }
}

/// How many bytes a bitmap of a range's elements takes.
fn bitmap_len(range: &Range<u64>, width: Width) -> u64 {
    ((range.end - range.start) / width.bytes() as u64).div_ceil(8)
}

/// Reads indices as the device writes them.
fn indices(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes
        .chunks_exact(INDEX_LEN as usize)
        .map(|index| u32::from_le_bytes(index.try_into().expect("four bytes")))
}
