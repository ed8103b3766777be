//! Translates the operations of batches to commands for a device.
//!
//! Only operations that change pages' bytes become commands. The format crate defines the effect of an operation on the
//! page table.

use std::collections::BTreeMap;

use remanent_format::op::{Op, OpAt, masked_bytes_at, scatter_values_at};
use remanent_format::{PageId, Width};

use super::arrival::{ArrivalProof, ArrivalSums, UnsummedWrites, is_proven};
use crate::base::allocation::make_room;
use crate::device::{Command, CommandList, Payload, Piece, PieceKind, Span, Staging};
use crate::error::Result;
use crate::memory::arena::PageMemory;
use crate::memory::staging::{StagingBuf, StagingPool};

/// Builds the command list that applies one or more batches. The pieces of consecutive operations become one command,
/// so that a device can apply many deltas in one launch.
#[derive(Default)]
pub(crate) struct ListBuilder {
    list: CommandList,
    /// The staging buffers that contain the converted bytes of the next payload's operations.
    asides: Vec<StagingBuf>,
    payload_bytes: usize,
    /// The expected sums of long writes. Each batch with long writes adds one proof.
    proofs: Vec<ArrivalProof>,
    /// The long writes for which the list contains no sum command yet.
    unsummed: UnsummedWrites,
    /// The number of commands that copy from page memory to page memory.
    copies: usize,
}

/// The location of an operation's payload within the staging buffers of a command list.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PayloadAt {
    /// The index of the payload's staging buffer in the list.
    pub index: usize,
    /// The offset of the payload's first byte in the staging buffer.
    pub offset: usize,
}

/// Memory for the command list of a batch with many operations. The committer allocates this memory before the batch is
/// logged, because a batch can no longer fail once it is logged. Batches with fewer operations need only short
/// allocations.
#[derive(Default)]
pub(crate) struct ListRoom {
    commands: Vec<Command>,
    staging: Vec<Staging>,
    asides: Vec<StagingBuf>,
}

/// The maximum number of operations of a batch that allocates no [`ListRoom`]. A list with more commands accepts no
/// further batch.
const SHORT_LIST: usize = 128;
/// The number of copies between pages after which a list is submitted, so that the device copies while the host
/// prepares the next list. A batch with more copies is divided between lists.
const COPIES_MAX: usize = if cfg!(shuttle) { 1 } else { 4096 };
/// The maximum number of staging buffers in a list that accepts a further batch.
const STAGINGS_MAX: usize = 1024;

impl ListRoom {
    /// Allocates memory for the maximum number of commands that `ops` can become. An operation needs up to four
    /// commands: a copy for a cut, a copy to a relocation or to new memory, zeros or a delta, and its sum.
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

    /// Returns whether no memory was allocated, because the batch has few operations.
    pub fn is_empty(&self) -> bool {
        self.commands.capacity() == 0
    }
}

/// Returns the number of operations whose bytes are verified on arrival.
fn proven_count(ops: &[OpAt<'_>]) -> usize {
    ops.iter().filter(|at| is_proven(&at.op)).count()
}

/// Returns whether the operation's bytes must be converted, because the device cannot read their form in the payload.
pub(crate) fn needs_aside(op: &Op<'_>) -> bool {
    match op {
        Op::Scatter { indices, .. } => indices.is_gap_coded() && !indices.is_empty(),
        Op::Image { .. } => true,
        _ => false,
    }
}

/// Returns whether the applier can apply `ops` with the payload alone. Page memory and relocations of leased pages are
/// not considered.
pub(crate) fn is_payload_enough(ops: &[OpAt<'_>], crosses_bus: bool) -> bool {
    let takes_more = |op: &Op<'_>| needs_aside(op) || (crosses_bus && is_proven(op));
    ops.len() <= SHORT_LIST && !ops.iter().any(|at| takes_more(&at.op))
}

/// Converts an operation's bytes to the form that a device reads, in a staging buffer. Gap-coded indices become indices
/// of four bytes, followed by the elements. The bytes of a page with an image are copied from `whole`. Returns `None`
/// if the device can read the bytes from the payload.
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
    /// Returns whether a batch with the memory `room` can be added to the list. A batch with its own memory needs an
    /// empty list.
    pub fn has_room(&self, room: &ListRoom) -> bool {
        let is_short = self.list.commands.len() + self.unsummed.len() <= SHORT_LIST
            && self.list.staging.len() <= STAGINGS_MAX;
        room.is_empty() && is_short
    }

    /// Begins an empty list in the memory that a batch allocated for it.
    pub fn begin_in(&mut self, room: ListRoom) {
        assert!(self.is_empty());
        let ListRoom { commands, staging, asides } = room;
        *self = Self { list: CommandList { commands, staging }, asides, ..Self::default() };
    }

    /// Allocates memory for one delta and one sum for each of the operations.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn make_room(&mut self, ops: &[OpAt<'_>]) -> Result<()> {
        make_room(&mut self.list.commands, ops.len() + proven_count(ops))?;
        make_room(&mut self.asides, ops.iter().filter(|at| needs_aside(&at.op)).count() + 1)?;
        make_room(&mut self.list.staging, self.asides.capacity() + 1)
    }

    /// Appends the operations of another builder, which belong to the same payload. The payload must not have been
    /// added to either builder yet.
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

    /// Returns the index that the staging buffer of the next payload will have. Operations of that payload refer to the
    /// index.
    pub fn payload_index(&self) -> usize {
        self.list.staging.len()
    }

    /// Adds the expected sums of the long writes in the next payload. Must be called before the operations of that
    /// payload are added.
    pub fn prove(&mut self, sums: ArrivalSums) {
        self.asides.push(sums.staging);
        let index = self.payload_index() + self.asides.len();
        self.proofs.push(ArrivalProof::new(index, sums.sums));
    }

    /// Adds the staging buffer of a payload. Must be called after the operations of all batches in the payload were
    /// added.
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

    /// Removes the commands so far and returns them as a separate list, if they are at least `COPIES_MAX` copies and
    /// nothing else. Copies need no staging. Otherwise, or if no memory for the list is available, returns `None` and
    /// keeps the commands.
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

    /// Removes and returns the list, with the expected sums of its long writes.
    pub fn take(&mut self) -> (CommandList, Vec<ArrivalProof>) {
        self.sum_writes();
        let Self { list, proofs, .. } = std::mem::take(self);
        (list, proofs)
    }

    /// Adds the commands that change the bytes of the operation's page, if the operation changes any. `payload` is the
    /// location of the operation's payload, and `aside` the result of [`stage_aside`].
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

    /// Adds the sum commands of all long writes if the next command changes bytes of one of these writes. Each sum must
    /// be computed before a later command changes the summed bytes.
    fn sum_before(&mut self, target: Span) {
        if self.unsummed.any_in(target) {
            self.sum_writes();
        }
    }

    fn sum_writes(&mut self) {
        self.list.commands.extend(self.unsummed.commands());
    }

    /// Adds a command that fills a range with zeros.
    pub fn zero(&mut self, target: Span) {
        if target.len > 0 {
            self.sum_before(target);
            self.list.commands.push(Command::Fill { target, pattern: [0; 16], width: Width::W1 });
        }
    }

    /// Adds a command that fills a range with zeros, like [`zero`](Self::zero). For lists for which no batch allocated
    /// memory.
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
