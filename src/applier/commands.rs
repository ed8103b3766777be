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

/// Builds the command list that applies one or more batches. Consecutive operations become pieces of one command, so
/// that a device can apply many deltas in one kernel launch.
#[derive(Default)]
pub(crate) struct ListBuilder {
    list: CommandList,
    /// The staging buffers with converted operations of the payload that will be added next. See [`stage_aside`].
    asides: Vec<StagingBuf>,
    payload_bytes: usize,
    /// The expected checksums of long writes, with one entry per batch that has long writes.
    proofs: Vec<ArrivalProof>,
    /// The long writes for which the list contains no checksum command yet.
    unsummed: UnsummedWrites,
    /// The number of commands that copy from page memory to page memory.
    copies: usize,
}

/// The location of a payload in the staging buffers of a command list.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PayloadAt {
    /// The index of the payload's staging buffer in the list.
    pub index: usize,
    /// The offset of the payload's first byte in the staging buffer.
    pub offset: usize,
}

/// Memory for the command list of a batch with many operations. The committer allocates it before the batch is logged,
/// because a logged batch must not fail for lack of memory. For batches with fewer operations, the list's own capacity
/// suffices.
#[derive(Default)]
pub(crate) struct ListRoom {
    commands: Vec<Command>,
    staging: Vec<Staging>,
    asides: Vec<StagingBuf>,
}

/// The maximum number of operations of a batch that needs no [`ListRoom`]. Once a list has more commands, no further
/// batch is added to it.
const SHORT_LIST: usize = 128;
/// The number of copies between pages at which a list is submitted. The device then copies while the host prepares the
/// next list. A batch with more copies is divided between lists.
const COPIES_MAX: usize = if cfg!(shuttle) { 1 } else { 4096 };
/// The maximum number of staging buffers in a list that accepts a further batch.
const STAGINGS_MAX: usize = 1024;

impl ListRoom {
    /// Allocates memory for the maximum number of commands that `ops` can become. An operation needs up to four
    /// commands: a copy that preserves the page for a snapshot, a copy to new memory, a fill with zeros or a delta, and
    /// a checksum.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn of(ops: &[OpAt<'_>]) -> Result<Self> {
        let mut room = Self::default();
        if ops.len() > SHORT_LIST {
            make_room(&mut room.commands, 3 * ops.len() + proven_count(ops))?;
            // One more staging buffer receives the checksums of long writes.
            let asides = ops.iter().filter(|at| needs_aside(&at.op)).count() + 1;
            make_room(&mut room.staging, asides + 1)?;
            make_room(&mut room.asides, asides)?;
        }
        Ok(room)
    }

    /// Returns whether the batch has so few operations that it needs no separate memory.
    pub fn is_empty(&self) -> bool {
        self.commands.capacity() == 0
    }
}

/// Returns the number of operations whose bytes are verified on arrival.
fn proven_count(ops: &[OpAt<'_>]) -> usize {
    ops.iter().filter(|at| is_proven(&at.op)).count()
}

/// Returns whether the device cannot read the operation's bytes in their encoding in the payload. They must then be
/// converted by [`stage_aside`].
pub(crate) fn needs_aside(op: &Op<'_>) -> bool {
    match op {
        Op::Scatter { indices, .. } => indices.is_gap_coded() && !indices.is_empty(),
        Op::Image { .. } => true,
        _ => false,
    }
}

/// Returns whether the payload suffices for the applier to apply `ops`, without converted bytes or checksums. Page
/// memory is not considered.
pub(crate) fn is_payload_enough(ops: &[OpAt<'_>], crosses_bus: bool) -> bool {
    let takes_more = |op: &Op<'_>| needs_aside(op) || (crosses_bus && is_proven(op));
    ops.len() <= SHORT_LIST && !ops.iter().any(|at| takes_more(&at.op))
}

/// Converts an operation's bytes to an encoding that devices can read, in a separate staging buffer. Indices stored as
/// gaps become indices of four bytes, followed by the elements. For a page whose bytes are in an image, the bytes are
/// copied from `whole`. Returns `None` if the device can read the bytes from the payload.
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
    /// Returns whether a batch with the list memory `room` can be added to this list. A batch that has allocated list
    /// memory needs an empty list.
    pub fn has_room(&self, room: &ListRoom) -> bool {
        let is_short = self.list.commands.len() + self.unsummed.len() <= SHORT_LIST
            && self.list.staging.len() <= STAGINGS_MAX;
        room.is_empty() && is_short
    }

    /// Replaces the empty list with a list in the memory that a batch has allocated for its list.
    pub fn begin_in(&mut self, room: ListRoom) {
        assert!(self.is_empty());
        let ListRoom { commands, staging, asides } = room;
        *self = Self { list: CommandList { commands, staging }, asides, ..Self::default() };
    }

    /// Reserves memory for one delta and one checksum command for each of the operations.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn make_room(&mut self, ops: &[OpAt<'_>]) -> Result<()> {
        make_room(&mut self.list.commands, ops.len() + proven_count(ops))?;
        make_room(&mut self.asides, ops.iter().filter(|at| needs_aside(&at.op)).count() + 1)?;
        make_room(&mut self.list.staging, self.asides.capacity() + 1)
    }

    /// Appends the operations of another builder. Both builders contain operations of the same payload, which must not
    /// have been added to either of them yet.
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
                // No index changes, so the pieces, of which there may be hundreds of thousands, are not visited.
                _ if before == 0 => {}
                Command::Apply { pieces } => {
                    for piece in pieces {
                        // Index 0 is the payload, which both builders share. All other indices shift.
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

    /// Adds the expected checksums of the long writes in the payload that will be added next. Must be called before the
    /// operations of that payload are added.
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

    /// If the list consists of at least [`COPIES_MAX`] copies between pages and nothing else, removes them and returns
    /// them as a separate list, so that the device can start them. Otherwise, or if memory for the separate list is
    /// unavailable, returns `None` and changes nothing.
    pub fn take_copies(&mut self) -> Option<CommandList> {
        let commands = &mut self.list.commands;
        let is_due =
            self.copies >= COPIES_MAX && self.copies == commands.len() && self.list.staging.is_empty();
        // The commands are moved out instead of the whole vector, so that its allocation remains for later commands.
        let mut taken = Vec::new();
        if !is_due || taken.try_reserve_exact(commands.len()).is_err() {
            return None;
        }
        taken.append(commands);
        self.copies = 0;
        Some(CommandList { commands: taken, staging: Vec::new() })
    }

    /// Removes and returns the list and the expected checksums of its long writes.
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
        // Only the checksums of the payload that will be added next are extended. The checksums of earlier payloads are
        // returned in a staging buffer that the list already has.
        let handed_over = self.list.staging.len();
        let proof = self.proofs.last_mut().filter(|proof| proof.index() >= handed_over && is_proven(&at.op));
        let sum = proof.map(ArrivalProof::next_sum);
        self.sum_before(target);
        self.piece(piece);
        if let Some(sum) = sum {
            let is_due = self.unsummed.push(target, sum);
            // Checksums of a write to caller-owned memory are computed immediately, because the memory may contain a
            // page with another id by the time of the next write.
            if is_due || memory.is_lent() {
                self.sum_writes();
            }
        }
    }

    /// Adds the checksum commands of all long writes if the next command changes bytes of one of them. A checksum must
    /// be computed before a later command changes the bytes.
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

    /// Adds a command that fills a range with zeros, like [`zero`](Self::zero), to a list for which no batch has
    /// allocated memory.
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
        // If there is no memory for another piece of the last command, the piece starts a new command. An error is not
        // possible here, because the batch is already logged.
        if let Some(Command::Apply { pieces }) = self.list.commands.last_mut()
            && pieces.try_reserve(1).is_ok()
        {
            pieces.push(piece);
        } else {
            self.list.commands.push(Command::Apply { pieces: vec![piece] });
        }
    }
}
