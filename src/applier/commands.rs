//! Translates a batch's operations to a device's commands.
//!
//! Only operations on bytes become commands. The format crate defines the effect of an operation on the table.

use std::collections::BTreeMap;

use remanent_format::op::{Op, OpAt, masked_bytes_at, scatter_values_at};
use remanent_format::{PageId, Width};

use super::arrival::{ArrivalProof, ArrivalSums, UnsummedWrites, is_proven};
use crate::base::allocation::make_room;
use crate::device::{Command, CommandList, Payload, Piece, PieceKind, Span, Staging};
use crate::error::Result;
use crate::memory::arena::PageMemory;
use crate::memory::staging::{StagingBuf, StagingPool};

/// A command list under construction. The pieces of consecutive operations become one command, so that a
/// device can apply many deltas in one launch.
#[derive(Default)]
pub(crate) struct ListBuilder {
    list: CommandList,
    /// Staging buffers with the converted bytes of the next payload's operations.
    asides: Vec<StagingBuf>,
    payload_bytes: usize,
    /// The expected sums of long writes, with one proof for each batch that has any.
    proofs: Vec<ArrivalProof>,
    /// The long writes that the list does not sum yet.
    unsummed: UnsummedWrites,
    /// The number of commands that copy page memory to page memory.
    copies: usize,
}

/// The location of a batch's payload in a list's staging.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PayloadAt {
    /// The index of the payload's staging buffer in the list.
    pub index: usize,
    /// The offset of the payload's first byte in that buffer.
    pub offset: usize,
}

/// Memory for the list of a batch with many operations. The memory is allocated before the batch is logged, when a
/// failed allocation can still refuse the batch. A list of fewer operations needs only short allocations.
#[derive(Default)]
pub(crate) struct ListRoom {
    commands: Vec<Command>,
    staging: Vec<Staging>,
    asides: Vec<StagingBuf>,
}

/// The maximum number of operations for which a batch brings no memory for its list. Also the number of commands at
/// which a list accepts no further batch.
const SHORT_LIST: usize = 128;
/// The number of copies between pages after which a list is submitted, even if its batch has more of them, so that the
/// device copies while the host prepares the next list.
const COPIES_MAX: usize = if cfg!(shuttle) { 1 } else { 4096 };
/// The number of staging buffers at which a list accepts no further batch.
const STAGINGS_MAX: usize = 1024;

impl ListRoom {
    /// Allocates memory for the maximum number of commands that these operations can become: a copy for a cut, a copy
    /// to a relocation or to new memory, zeros or a delta, and its sum.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn of(ops: &[OpAt<'_>]) -> Result<Self> {
        let mut room = Self::default();
        if ops.len() > SHORT_LIST {
            make_room(&mut room.commands, 3 * ops.len() + proven_count(ops))?;
            // One more staging buffer is for the sums of long writes.
            let asides = ops.iter().filter(|at| needs_aside(&at.op)).count() + 1;
            make_room(&mut room.staging, asides + 1)?;
            make_room(&mut room.asides, asides)?;
        }
        Ok(room)
    }

    /// Returns whether the batch brings no memory for its list.
    pub fn is_empty(&self) -> bool {
        self.commands.capacity() == 0
    }
}

/// Returns how many of these operations are verified on arrival.
fn proven_count(ops: &[OpAt<'_>]) -> usize {
    ops.iter().filter(|at| is_proven(&at.op)).count()
}

/// Returns whether the payload contains the operation's bytes in a form that a device cannot read.
pub(crate) fn needs_aside(op: &Op<'_>) -> bool {
    match op {
        Op::Scatter { indices, .. } => indices.is_gap_coded() && !indices.is_empty(),
        Op::Image { .. } => true,
        _ => false,
    }
}

/// Returns whether the applier needs only the payload for these operations, provided that they allocate no page memory
/// and change no leased pages.
pub(crate) fn is_payload_enough(ops: &[OpAt<'_>], crosses_bus: bool) -> bool {
    let takes_more = |op: &Op<'_>| needs_aside(op) || (crosses_bus && is_proven(op));
    ops.len() <= SHORT_LIST && !ops.iter().any(|at| takes_more(&at.op))
}

/// Converts the operation's bytes to the form that a device reads, in a staging buffer, if the payload contains another
/// form. Gap-coded indices become indices of four bytes, followed by the elements. `whole` contains the bytes of pages
/// with images.
///
/// # Errors
/// `OutOfMemory`, a device error.
pub(crate) fn stage_aside(
    op: &Op<'_>,
    whole: &BTreeMap<PageId, &[u8]>,
    pool: &StagingPool,
) -> Result<Option<StagingBuf>> {
    match op {
        Op::Image { page, .. } => {
            let bytes = whole.get(page).expect("an image in a batch's log holds a page that it writes");
            let mut staged = pool.take(bytes.len())?;
            staged.copy_from_slice(bytes);
            Ok(Some(staged))
        }
        Op::Scatter { indices, values, .. } if needs_aside(op) => {
            let values_at = scatter_values_at(4 * indices.len());
            let mut staged = pool.take(values_at + values.len())?;
            let (plain, elements) = staged.split_at_mut(values_at);
            indices.copy_to(&mut plain[..4 * indices.len()]);
            elements.copy_from_slice(values);
            Ok(Some(staged))
        }
        _ => Ok(None),
    }
}

impl ListBuilder {
    /// Returns whether the list can accept a batch that brings the memory `room`.
    pub fn has_room(&self, room: &ListRoom) -> bool {
        let is_short = self.list.commands.len() + self.unsummed.len() <= SHORT_LIST
            && self.list.staging.len() <= STAGINGS_MAX;
        room.is_empty() && is_short
    }

    /// Begins an empty list in the memory that a batch brought.
    pub fn begin_in(&mut self, room: ListRoom) {
        assert!(self.is_empty());
        let ListRoom { commands, staging, asides } = room;
        *self = Self { list: CommandList { commands, staging }, asides, ..Self::default() };
    }

    /// Allocates memory for a delta for each of these operations, and its sum.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn make_room(&mut self, ops: &[OpAt<'_>]) -> Result<()> {
        make_room(&mut self.list.commands, ops.len() + proven_count(ops))?;
        make_room(&mut self.asides, ops.iter().filter(|at| needs_aside(&at.op)).count() + 1)?;
        make_room(&mut self.list.staging, self.asides.capacity() + 1)
    }

    /// Appends the operations of another builder for the same payload. Neither builder may have taken a payload yet.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn append(&mut self, mut later: Self) -> Result<()> {
        self.sum_writes();
        later.sum_writes();
        let Self { list, asides, mut proofs, .. } = later;
        assert!(self.list.staging.is_empty() && list.staging.is_empty());
        make_room(&mut self.list.commands, list.commands.len())?;
        make_room(&mut self.asides, asides.len())?;
        make_room(&mut self.proofs, proofs.len())?;
        make_room(&mut self.list.staging, self.asides.len() + asides.len() + 1)?;
        let before = self.asides.len();
        self.list.commands.extend(list.commands.into_iter().map(|mut command| {
            match &mut command {
                // No index changes, so hundreds of thousands of pieces need not be visited.
                _ if before == 0 => {}
                Command::Apply { pieces } => {
                    for piece in pieces {
                        // Index 0 is the payload, which both builders share.
                        if let Payload::Staging { index: index @ 1.., .. } = &mut piece.payload {
                            *index += before;
                        }
                    }
                }
                Command::Crc { target, .. } | Command::Digest { target, .. } => target.index += before,
                _ => {}
            }
            command
        }));
        proofs.iter_mut().for_each(|proof| proof.shift(before));
        self.proofs.append(&mut proofs);
        self.asides.extend(asides);
        Ok(())
    }

    /// Returns the index of the next payload's staging buffer, by which its operations refer to it.
    pub fn payload_index(&self) -> usize {
        self.list.staging.len()
    }

    /// Adds the expected sums of the long writes among the following operations, up to the next payload.
    pub fn prove(&mut self, sums: ArrivalSums) {
        self.asides.push(sums.staging);
        let index = self.payload_index() + self.asides.len();
        self.proofs.push(ArrivalProof::new(index, sums.sums));
    }

    /// Adds the staging buffer of a payload, after the operations of one or more batches in it were added.
    pub fn payload(&mut self, payload: StagingBuf) {
        for staged in std::iter::once(payload).chain(self.asides.drain(..)) {
            self.payload_bytes += staged.len();
            self.list.staging.push(staged.into_staging());
        }
    }

    pub fn payload_bytes(&self) -> usize {
        self.payload_bytes
    }

    /// Returns whether the list has no commands and no staging buffers.
    pub fn is_empty(&self) -> bool {
        self.list.commands.is_empty() && self.list.staging.is_empty() && self.asides.is_empty()
    }

    /// Removes and returns the commands so far as a separate list, if they are many copies and nothing else. Copies
    /// need no staging. Returns `None` if there are other commands, or no memory for the list, and keeps the commands.
    pub fn take_copies(&mut self) -> Option<CommandList> {
        let commands = &mut self.list.commands;
        let is_due =
            self.copies >= COPIES_MAX && self.copies == commands.len() && self.list.staging.is_empty();
        // The commands are moved out, so that their memory remains for the following commands.
        let mut taken = Vec::new();
        if !is_due || taken.try_reserve_exact(commands.len()).is_err() {
            return None;
        }
        taken.append(commands);
        self.copies = 0;
        Some(CommandList { commands: taken, staging: Vec::new() })
    }

    /// Removes and returns the list, and the sums that it computes.
    pub fn take(&mut self) -> (CommandList, Vec<ArrivalProof>) {
        self.sum_writes();
        let Self { list, proofs, .. } = std::mem::take(self);
        (list, proofs)
    }

    /// Adds the operation's change to the bytes of its page, if it changes any. `payload` is the location of the
    /// operation's payload, and `aside` the result of [`stage_aside`].
    pub fn data(
        &mut self,
        at: &OpAt<'_>,
        payload: PayloadAt,
        memory: &PageMemory,
        aside: Option<StagingBuf>,
    ) {
        assert!(aside.is_some() == needs_aside(&at.op));
        let staged = match aside {
            Some(aside) => {
                self.asides.push(aside);
                Payload::Staging { index: payload.index + self.asides.len(), offset: 0 }
            }
            None => Payload::Staging { index: payload.index, offset: payload.offset + at.body_at },
        };
        let Some((offset, len)) = at.op.range().filter(|(_, len)| *len > 0) else { return };
        let target = memory.part(offset, len);
        let kind = match &at.op {
            Op::Write { .. } | Op::Image { .. } => PieceKind::Dense,
            Op::Masked { width, mask, .. } => {
                PieceKind::Masked { width: *width, bytes_at: masked_bytes_at(mask.len()) }
            }
            Op::Scatter { width, indices, .. } => {
                let count = indices.len();
                PieceKind::Sparse { width: *width, count, values_at: scatter_values_at(4 * count) }
            }
            Op::Fill { pattern, .. } => {
                let mut repeated = [0; 16];
                repeated[..pattern.len()].copy_from_slice(pattern);
                let width = Width::from_bytes(pattern.len()).expect("decoded with one of the five widths");
                self.sum_before(target);
                self.list.commands.push(Command::Fill { target, pattern: repeated, width });
                return;
            }
            _ => return,
        };
        let piece = Piece { target, payload: staged, kind };
        // Only a proof of the next payload is extended: the sums of an earlier one are returned in a staging buffer
        // that the list already has.
        let handed_over = self.list.staging.len();
        let proof = self.proofs.last_mut().filter(|proof| proof.index() >= handed_over && is_proven(&at.op));
        let sum = proof.map(ArrivalProof::next_sum);
        self.sum_before(target);
        self.piece(piece);
        if let Some(sum) = sum {
            let is_due = self.unsummed.push(target, sum);
            // A caller's memory may be lent again under another id.
            if is_due || memory.is_lent() {
                self.sum_writes();
            }
        }
    }

    /// Adds the sums of all long writes if the next command changes bytes of such a write, because each sum must cover
    /// its own write.
    fn sum_before(&mut self, target: Span) {
        if self.unsummed.any_in(target) {
            self.sum_writes();
        }
    }

    fn sum_writes(&mut self) {
        self.list.commands.extend(self.unsummed.commands());
    }

    /// Adds a command that zeroes a range.
    pub fn zero(&mut self, target: Span) {
        if target.len > 0 {
            self.sum_before(target);
            self.list.commands.push(Command::Fill { target, pattern: [0; 16], width: Width::W1 });
        }
    }

    /// Zeroes a range like [`zero`](Self::zero), in a list for which no batch allocated memory.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn try_zero(&mut self, target: Span) -> Result<()> {
        make_room(&mut self.list.commands, 1)?;
        self.zero(target);
        Ok(())
    }

    /// Adds a copy from page memory to page memory.
    pub fn copy(&mut self, source: Span, target: Span) {
        if target.len > 0 {
            self.sum_before(target);
            self.list.commands.push(Command::Copy { source, target });
            self.copies += 1;
        }
    }

    fn piece(&mut self, piece: Piece) {
        // If memory for another piece is unavailable, the piece starts a new command. The batch is logged, so this must
        // not fail.
        if let Some(Command::Apply { pieces }) = self.list.commands.last_mut()
            && pieces.try_reserve(1).is_ok()
        {
            pieces.push(piece);
        } else {
            self.list.commands.push(Command::Apply { pieces: vec![piece] });
        }
    }
}
