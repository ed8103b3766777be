//! Checks a list's commands and converts them to a launch plan.
//!
//! Every range is checked against its memory before anything is queued, because kernels check nothing. A wrong address
//! in a kernel does not fail only one list: it destroys the process's context, and with it the caller's own work on the
//! GPU. A list that violates the contract panics instead, as on the host device.
//!
//! Short copies between host and GPU are pieces, which kernels move with loads and stores on mapped memory. A short
//! copy on the copy engine may wait seconds for long ones. Copies longer than [`SHORT_COPY_LEN_MAX`] use the copy
//! engine.

use remanent_format::Width;

use super::abi::{IndexRow, PieceRow};
use super::areas::Area;
use super::handles::{Allocation, Handles};
use super::piece_plan::TargetRow;
use super::pinned_reads::FoundStripes;
use super::plan::{LaunchPlan, LaunchStep, PlannedPiece, remainder_words, select_rows};
use super::resource::Kind;
use crate::device::digests::check_digests;
use crate::device::many_deltas::{NotPartitioned, has_many_deltas, partition};
use crate::device::{
    Command, IndexList, MemoryId, Payload, Piece, PieceKind, SHORT_COPY_LEN_MAX, Selection, Span, Staging,
    StagingSpan,
};

/// Alignment, in bytes, of each range of scratch on the GPU.
const SCRATCH_ALIGN: u64 = 16;

/// The minimum length, in bytes, of a copy within the GPU's memory that uses the driver's copy function. This function
/// needs no table rows. If a kernel of the store copies 64 MiB, the host and the bus take half as long for the rows as
/// the GPU takes for the copy.
const WITHIN_LEN_MIN: u64 = 4 << 20;

/// A staging buffer of a list, and the address of its bytes.
pub(super) struct StagedBytes<'s> {
    pub bytes: &'s Staging,
    pub address: u64,
}

/// Returns the number of bytes of scratch that a list needs in the GPU's own memory. Many threads write to scratch:
/// storing bits one by one over the bus took longer than the comparison that produced them.
pub(super) fn scratch_len(commands: &[Command]) -> u64 {
    let needed = commands.iter().map(|command| match command {
        Command::Crc { sources, .. } => remainders_len(sources),
        Command::Select { bitmaps, .. } => selection_len(bitmaps),
        Command::Validate { lists, .. } => validation_len(lists),
        _ => 0,
    });
    needed.sum()
}

/// Returns the number of bytes of scratch for the remainders of checksummed chunks.
fn remainders_len(sources: &[Span]) -> u64 {
    (4 * remainder_words(sources.iter().map(|source| source.len))).next_multiple_of(SCRATCH_ALIGN)
}

/// Returns the number of bytes of scratch for the selection of set bits: a count for each row, and a total for each
/// bitmap.
fn selection_len(bitmaps: &[Selection]) -> u64 {
    let rows: u64 = bitmaps.iter().map(|of| select_rows(of.bits.len)).sum();
    (4 * (rows + bitmaps.len() as u64)).next_multiple_of(SCRATCH_ALIGN)
}

/// Returns the number of bytes of scratch for checking lists of indices: one bit for each element that a list's indices
/// can name, and the flags of each list.
fn validation_len(lists: &[IndexList]) -> u64 {
    let seen: u64 = lists.iter().map(seen_len).sum();
    seen + (4 * lists.len() as u64).next_multiple_of(SCRATCH_ALIGN)
}

fn seen_len(list: &IndexList) -> u64 {
    list.bound.div_ceil(8).next_multiple_of(SCRATCH_ALIGN)
}

/// Plans a list of commands. The list's scratch begins at address `scratch`.
///
/// # Panics
/// If a range exceeds its memory, or if ranges that must have equal lengths differ.
pub(super) fn plan(
    commands: &[Command],
    memories: &Handles,
    staging: &[StagedBytes<'_>],
    scratch: u64,
) -> LaunchPlan {
    let ranges = Ranges { memories, staging };
    let mut planner = ListPlanner { ranges, scratch, plan: LaunchPlan::default() };
    let is_apply = |command: &Command| matches!(command, Command::Apply { .. });
    for alike in commands.chunk_by(|one, next| is_apply(one) && is_apply(next)) {
        if !planner.many_deltas(alike) {
            alike.iter().for_each(|command| planner.command(command));
        }
    }
    planner.plan.flush();
    planner.plan
}

/// Looks up and checks the ranges that commands name.
#[derive(Clone, Copy)]
struct Ranges<'l> {
    memories: &'l Handles,
    staging: &'l [StagedBytes<'l>],
}

/// A delta's row, the kind of memory that the delta writes, and the area that it reads.
struct Delta {
    row: PieceRow,
    kind: Kind,
    source: Area,
}

struct ListPlanner<'l> {
    ranges: Ranges<'l>,
    /// The address of the next free byte of scratch. Commands never share scratch, because a later command is planned
    /// before an earlier one runs.
    scratch: u64,
    plan: LaunchPlan,
}

impl ListPlanner<'_> {
    fn command(&mut self, command: &Command) {
        match command {
            Command::Upload { source, target } => self.upload(*source, *target),
            Command::Download { source, target } => self.download(*source, *target),
            Command::Apply { pieces } => {
                self.plan.expect(pieces.len());
                pieces.iter().for_each(|piece| self.apply(piece));
            }
            Command::Copy { source, target } => self.copy(*source, *target),
            Command::Fill { target, pattern, width } => {
                let _whole = elements(target.len, *width);
                let row = PieceRow::fill(self.ranges.address(*target), *pattern, *width, target.len);
                self.piece(row, *target, [None; 2]);
            }
            Command::Gather { sources, target } => {
                for (source, offset) in sources {
                    self.copy(*source, part(*target, *offset, source.len));
                }
            }
            Command::Scatter { source, targets } => {
                for (offset, target) in targets {
                    self.copy(part(*source, *offset, target.len), *target);
                }
            }
            Command::Diff { left, right, width, target } => self.diff(*left, *right, *width, *target),
            Command::Select { bitmaps, target } => self.select(bitmaps, *target),
            Command::Crc { sources, target } => self.crc(sources, *target),
            Command::Digest { sources, key, target } => self.digest(sources, *key, *target),
            Command::Pick { source, width, indices, target } => {
                self.pick(*source, *width, *indices, *target);
            }
            Command::Validate { lists, target } => self.validate(lists, *target),
        }
    }

    /// Adds the deltas of some commands with several threads. Returns `false`, with nothing done, if the deltas are few
    /// or if any payload is not in staging. A staged payload is never written by another delta.
    fn many_deltas(&mut self, commands: &[Command]) -> bool {
        if !has_many_deltas(commands) {
            return false;
        }
        let ranges = self.ranges;
        let pinned = FoundStripes::default();
        let locate = |(): &mut (), piece: &Piece| {
            let Delta { row, kind, source: Area::Staging(_) } = ranges.delta(piece) else {
                return Err(NotPartitioned);
            };
            pinned.add(kind, piece.target.memory);
            let delta = TargetRow { row, target_len: piece.target.len };
            // Two ids in one command list never refer to the same bytes.
            Ok((row.steps > 0).then_some((piece.target.memory.0, delta)))
        };
        let Ok(partitioned) = partition(commands.iter().map(Command::deltas), || (), locate) else {
            return false;
        };
        self.plan.pinned |= pinned.all();
        self.plan.deltas(&partitioned);
        true
    }

    fn upload(&mut self, source: StagingSpan, target: Span) {
        assert_eq!(source.len as u64, target.len, "an upload between ranges of different lengths");
        let (from, to, len) = (self.ranges.staged(source), self.ranges.address(target), target.len);
        // Only long copies to the GPU's own memory use the copy engine. Such a step ends the batch of pieces. The
        // stream preserves the order of copies and kernel launches.
        if len > SHORT_COPY_LEN_MAX && self.ranges.memory(target.memory).kind == Kind::Device {
            self.plan.step(LaunchStep::Up { source: from, target: to, len });
        } else {
            self.piece(PieceRow::dense(to, from, len), target, [Some(Area::Staging(source.index)), None]);
        }
    }

    fn download(&mut self, source: Span, target: StagingSpan) {
        assert_eq!(source.len, target.len as u64, "a download between ranges of different lengths");
        let from = self.ranges.memory(source.memory);
        let area = Area::Memory(from.kind, source.memory.0);
        self.down(from.at(source), area, from.kind == Kind::Device, target);
    }

    /// Adds a copy of bytes to staging.
    fn down(&mut self, source: u64, area: Area, on_gpu: bool, target: StagingSpan) {
        let (to, len) = (self.ranges.staged(target), target.len as u64);
        if len > SHORT_COPY_LEN_MAX && on_gpu {
            self.plan.step(LaunchStep::Down { source, target: to, len });
            return;
        }
        self.plan.piece(PlannedPiece {
            row: PieceRow::dense(to, source, len),
            target_len: len,
            target: Area::Staging(target.index),
            sources: [Some(area), None],
        });
    }

    fn copy(&mut self, source: Span, target: Span) {
        assert_eq!(source.len, target.len, "a copy between ranges of different lengths");
        assert!(!source.overlaps(target), "a copy between overlapping ranges: {source:?}, {target:?}");
        // The memory of a file is used instead of staging, so long copies from and to it also use the copy engine.
        let (from, to) = (self.ranges.memory(source.memory), self.ranges.memory(target.memory));
        let len = target.len;
        if len > SHORT_COPY_LEN_MAX && from.kind == Kind::Device && to.is_file {
            self.plan.step(LaunchStep::Down { source: from.at(source), target: to.at(target), len });
            return;
        }
        if len > SHORT_COPY_LEN_MAX && from.is_file && to.kind == Kind::Device {
            self.plan.step(LaunchStep::Up { source: from.at(source), target: to.at(target), len });
            return;
        }
        if len >= WITHIN_LEN_MIN && from.kind == Kind::Device && to.kind == Kind::Device {
            self.plan.step(LaunchStep::Within { source: from.at(source), target: to.at(target), len });
            return;
        }
        self.plan.piece(PlannedPiece {
            row: PieceRow::dense(to.at(target), from.at(source), len),
            target_len: len,
            target: Area::Memory(to.kind, target.memory.0),
            sources: [Some(Area::Memory(from.kind, source.memory.0)), None],
        });
    }

    fn apply(&mut self, piece: &Piece) {
        let Delta { row, kind, source } = self.ranges.delta(piece);
        // A piece without work, such as a sparse piece without indices, gets no row even if its target is not
        // empty.
        if row.steps > 0 {
            let target = Area::Memory(kind, piece.target.memory.0);
            let sources = [Some(source), None];
            self.plan.piece(PlannedPiece { row, target_len: piece.target.len, target, sources });
        }
    }

    fn diff(&mut self, left: Span, right: Span, width: Width, target: Span) {
        assert_eq!(left.len, right.len, "a diff of ranges of different lengths");
        let bits = elements(left.len, width).div_ceil(8);
        assert_eq!(target.len, bits, "the length of a diff's target");
        let clashes = left.overlaps(target) || right.overlaps(target);
        assert!(!clashes, "a diff to a range that it compares: {left:?}, {right:?}, {target:?}");
        let (from, to) =
            ((self.ranges.address(left), self.ranges.address(right)), self.ranges.address(target));
        self.plan.writes(self.ranges.area(target));
        self.plan.diff(from.0, from.1, to, left.len, width.bytes() as u64);
    }

    fn select(&mut self, bitmaps: &[Selection], target: StagingSpan) {
        assert_eq!(target.len, 4 * bitmaps.len(), "the length of a selection's target");
        // Scratch contains the counts of all rows, followed by the totals.
        let (mut numbers, len) = (self.scratch, selection_len(bitmaps));
        let sums = numbers + 4 * bitmaps.iter().map(|of| select_rows(of.bits.len)).sum::<u64>();
        self.scratch += len;
        let (rows, scans) = (self.plan.selects.len(), self.plan.scans.len());
        for (selection, sum) in bitmaps.iter().zip((sums..).step_by(4)) {
            let Selection { bits, indices } = *selection;
            selection.check();
            let room = u32::try_from(indices.len / 4).unwrap_or(u32::MAX);
            let (from, to) = (self.ranges.address(bits), self.ranges.address(indices));
            self.plan.writes(self.ranges.area(indices));
            self.plan.bitmap(from, bits.len, (to, room), numbers, sum);
            numbers += 4 * select_rows(bits.len);
        }
        // All bitmaps share one step, which needs three launches regardless of their number.
        self.plan.select(rows, scans);
        self.down(sums, Area::Scratch, true, target);
    }

    fn pick(&mut self, source: Span, width: Width, indices: StagingSpan, target: Span) {
        let (bound, count) = (elements(source.len, width), elements(target.len, width));
        assert_eq!(indices.len as u64, 4 * count, "one index for each element");
        assert!(!source.overlaps(target), "picked from and to overlapping ranges: {source:?}, {target:?}");
        let indices_at = self.ranges.staged(indices);
        let index_bytes = &self.ranges.staging[indices.index].bytes[indices.offset..][..indices.len];
        assert!(all_below(index_bytes, bound), "an index that is not within its range");
        let row = PieceRow::pick(
            self.ranges.address(target),
            indices_at,
            self.ranges.address(source),
            count,
            width,
        );
        let sources = [Area::Staging(indices.index), self.ranges.area(source)].map(Some);
        self.piece(row, target, sources);
    }

    fn validate(&mut self, lists: &[IndexList], target: StagingSpan) {
        assert_eq!(target.len, 4 * lists.len(), "the length of a validation's target");
        // Scratch contains one bit per element for all lists, followed by the results. It is zeroed by one piece,
        // because kernels only set bits and add flags.
        let (first, len) = (self.scratch, validation_len(lists));
        let findings = first + lists.iter().map(seen_len).sum::<u64>();
        self.scratch += len;
        self.plan.piece(PlannedPiece {
            row: PieceRow::fill(first, [0; 16], Width::W1, len),
            target_len: len,
            target: Area::Scratch,
            sources: [None; 2],
        });
        let rows = self.plan.indices.len();
        let mut seen = first;
        for (list, finding) in lists.iter().zip((findings..).step_by(4)) {
            let IndexList { indices, bound } = *list;
            assert!(indices.offset.is_multiple_of(4) && indices.len.is_multiple_of(4), "whole indices");
            let count = indices.len / 4;
            let indices = self.ranges.address(indices);
            self.plan.index_list(IndexRow { indices, seen, target: finding, bound, count });
            seen += seen_len(list);
        }
        self.plan.validate(rows);
        self.down(findings, Area::Scratch, true, target);
    }

    fn crc(&mut self, sources: &[Span], target: StagingSpan) {
        assert_eq!(target.len, 4 * sources.len(), "the length of a checksum command's target");
        let staged = self.ranges.staged(target);
        // Without rows, there would be a launch without rows, which the driver rejects.
        if sources.is_empty() {
            return;
        }
        let extents: Vec<(u64, u64)> =
            sources.iter().map(|span| (self.ranges.address(*span), span.len)).collect();
        self.plan.crcs(&extents, (Area::Staging(target.index), staged), self.scratch);
        self.scratch += remainders_len(sources);
    }

    fn digest(&mut self, sources: &[Span], key: Span, target: StagingSpan) {
        check_digests(sources, key, target);
        let extents: Vec<(u64, u64)> =
            sources.iter().map(|span| (self.ranges.address(*span), span.len)).collect();
        let (key, staged) = (self.ranges.address(key), self.ranges.staged(target));
        self.plan.digests(&extents, key, staged);
    }

    fn piece(&mut self, row: PieceRow, target: Span, sources: [Option<Area>; 2]) {
        let area = self.ranges.area(target);
        self.plan.piece(PlannedPiece { row, target_len: target.len, target: area, sources });
    }
}

impl Ranges<'_> {
    fn delta(&self, piece: &Piece) -> Delta {
        // The memory is looked up once per delta, because for many deltas a lookup takes as long as the rest of this
        // function.
        let written = self.memory(piece.target.memory);
        let (target, len) = (written.at(piece.target), piece.target.len);
        // The payload's address, the minimum number of bytes at that address, and their area.
        let (payload, payload_len, area) = match piece.payload {
            Payload::Staging { index, offset } => {
                let staged = &self.staging[index];
                let left = staged.bytes.len().checked_sub(offset).expect("a payload within its staging");
                (staged.address + offset as u64, left as u64, Area::Staging(index))
            }
            Payload::Device(span) => (self.address(span), span.len, self.area(span)),
        };
        let holds = |at: usize, len: u64| {
            let end = (at as u64).checked_add(len);
            assert!(end.is_some_and(|end| end <= payload_len), "a payload that ends before its piece does");
            payload + at as u64
        };
        let row = match piece.kind {
            PieceKind::Dense => PieceRow::dense(target, holds(0, len), len),
            PieceKind::Masked { width, bytes_at } => {
                let count = elements(len, width);
                let (bitmap, values) = (holds(0, count.div_ceil(8)), holds(bytes_at, len));
                PieceRow::masked(target, bitmap, values, count, width)
            }
            PieceKind::Sparse { width, count, values_at } => {
                let bound = elements(len, width);
                let indices = holds(0, 4 * count as u64);
                let values = holds(values_at, (width.bytes() * count) as u64);
                // The host can read staged indices, so it checks them here. `Validate` checked indices on the
                // device before their batch was logged.
                if let Payload::Staging { index, offset } = piece.payload {
                    let indices = &self.staging[index].bytes[offset..][..4 * count];
                    assert!(all_below(indices, bound), "an index that is not within its range");
                }
                PieceRow::sparse(target, indices, values, count as u64, width)
            }
        };
        Delta { row, kind: written.kind, source: area }
    }

    /// Returns the address at which a span begins. The address of an empty span is arbitrary.
    fn address(&self, span: Span) -> u64 {
        self.memory(span.memory).at(span)
    }

    fn area(&self, span: Span) -> Area {
        Area::Memory(self.memory(span.memory).kind, span.memory.0)
    }

    fn memory(&self, id: MemoryId) -> Allocation {
        self.memories.named(id)
    }

    fn staged(&self, span: StagingSpan) -> u64 {
        let staged = &self.staging[span.index];
        let end = span.offset.checked_add(span.len);
        let within = end.is_some_and(|end| end <= staged.bytes.len());
        assert!(within, "{span:?} is not within its staging of {} bytes", staged.bytes.len());
        staged.address + span.offset as u64
    }
}

/// Returns whether little-endian u32 indices are all below a bound. The loop has no branches, so that it runs at memory
/// speed.
fn all_below(indices: &[u8], bound: u64) -> bool {
    let number = |index: &[u8]| u32::from_le_bytes([index[0], index[1], index[2], index[3]]);
    let highest = indices.chunks_exact(4).map(number).max();
    highest.is_none_or(|index| u64::from(index) < bound)
}

/// Returns the number of elements in `len` bytes. Panics if the last element is incomplete.
fn elements(len: u64, width: Width) -> u64 {
    let width = width.bytes() as u64;
    assert_eq!(len % width, 0, "{len} bytes are not a whole number of elements");
    len / width
}

/// Returns the sub-span of `len` bytes at `offset`. Panics if it exceeds the span.
fn part(span: Span, offset: u64, len: u64) -> Span {
    let within = offset.checked_add(len).is_some_and(|end| end <= span.len);
    assert!(within, "bytes {offset}..+{len} are not within {span:?}");
    Span { memory: span.memory, offset: span.offset + offset, len }
}
