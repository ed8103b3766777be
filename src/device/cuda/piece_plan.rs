//! Plans pieces that have no hazards between areas: creates their rows and parts, and chooses the pieces that run
//! concurrently.

use std::collections::BTreeMap;
use std::ops::Range;

use super::abi::{MASK_STEPS, PIECE_MASKED, PIECE_PICK, PIECE_SPARSE, PartRow, PieceRow};

/// Length in bytes of a part of a long piece: enough for a block to hide the latency of its reads.
const PART_BYTES: u64 = 32 << 10;
/// The maximum number of parts into which a piece is split.
const PARTS_MAX: u64 = 8192;
/// The maximum number of bytes in a part that a warp processes. A block waits longer for its row, which is in
/// mapped host memory, than it copies: 65,536 pieces of 16 KiB take 541 µs with a warp each (94 % of a device
/// copy) and 687 µs with a block each (74 %). A single piece takes one microsecond more with a warp
/// (`benches/kernels.cu`, H200).
const WARP_BYTES: u64 = 16 << 10;
/// The number of bytes that one block moves in the time that another launch takes.
const LAUNCH_BYTES: u64 = 64 << 10;
/// The limit, in bytes, on the average length of overlapping pieces that one block processes in list order. Longer
/// pieces are split over consecutive launches.
const HOT_BYTES: u64 = 2 << 10;
/// The number of bytes moved for one scattered element: a sector of the GPU's memory.
const SECTOR_BYTES: u64 = 32;

/// A kernel's row, and the length in bytes of the range that the row writes.
#[derive(Clone, Copy, Debug)]
pub(super) struct TargetRow {
    pub row: PieceRow,
    pub target_len: u64,
}

/// The rows of a table, stored as runs that several threads created.
#[derive(Debug)]
pub(super) struct Rows<R> {
    runs: Vec<Vec<R>>,
    len: usize,
}

impl<R> Default for Rows<R> {
    fn default() -> Self {
        Self { runs: Vec::new(), len: 0 }
    }
}

impl<R> Rows<R> {
    /// Appends a run of rows.
    pub fn add(&mut self, run: Vec<R>) {
        if !run.is_empty() {
            self.len += run.len();
            self.runs.push(run);
        }
    }

    /// Returns the number of rows.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the runs of rows, in order.
    pub fn runs(&self) -> &[Vec<R>] {
        &self.runs
    }
}

/// The parts of one launch for each kernel.
#[derive(Debug, Default)]
pub(super) struct Stage {
    pub warps: Vec<PartRow>,
    pub blocks: Vec<PartRow>,
}

impl Stage {
    /// Adds a piece that overlaps no other piece of the stage. `number` is the number of the piece's row.
    pub fn add(&mut self, row: &PieceRow, number: usize) {
        let (first, bytes) = (number as u32, moved(row));
        if bytes <= WARP_BYTES {
            self.warps.push(PartRow::whole(first, 1));
            return;
        }
        let parts = bytes.div_ceil(PART_BYTES).min(PARTS_MAX);
        // A masked piece is split at whole bytes of its bitmap, so that no two parts read one byte for
        // different bits. Other kinds lose nothing by the same boundary.
        let steps = row.steps.div_ceil(parts).next_multiple_of(MASK_STEPS);
        for begin in (0..row.steps).step_by(steps as usize) {
            let end = (begin + steps).min(row.steps);
            self.blocks.push(PartRow { piece_first: first, piece_count: 1, begin, end });
        }
    }
}

/// Pieces as rows, and the parts of each of the consecutive launches.
#[derive(Debug, Default)]
pub(super) struct PiecePlan {
    /// The number of the first row.
    first: usize,
    pub rows: Vec<PieceRow>,
    pub stages: Vec<Stage>,
}

impl PiecePlan {
    /// Plans pieces whose rows begin at `first` of the plan's table. Each piece has one row.
    pub fn of(pieces: &[TargetRow], first: usize) -> Self {
        let mut plan = Self { first, rows: Vec::with_capacity(pieces.len()), stages: Vec::new() };
        let everything = (0, (0..pieces.len()).collect());
        let mut groups: Vec<(usize, Vec<usize>)> = vec![everything];
        // The loop terminates, because each round finishes a group or makes it shorter.
        while let Some((stage, mut group)) = groups.pop() {
            let lens = clusters(pieces, &mut group);
            let mut rest = &group[..];
            for len in lens {
                let (cluster, after) = rest.split_at(len);
                rest = after;
                if let [piece] = cluster {
                    plan.add_single(&pieces[*piece], stage);
                } else if is_hot(pieces, cluster) {
                    plan.one_by_one(pieces, cluster, stage);
                } else {
                    // A single part would leave this work to one block of the GPU. Pieces that no earlier
                    // piece overlaps run in this stage, the others in the next stage, which is a later
                    // launch.
                    let (now, later) = first_round(pieces, cluster);
                    now.into_iter().for_each(|piece| plan.add_single(&pieces[piece], stage));
                    groups.push((stage + 1, later));
                }
            }
        }
        plan
    }

    /// Creates a plan of pieces that do not overlap, from their rows and parts.
    pub fn apart(rows: Vec<PieceRow>, parts: Stage) -> Self {
        Self { first: 0, rows, stages: vec![parts] }
    }

    /// Adds a piece that overlaps no other piece of its stage.
    fn add_single(&mut self, piece: &TargetRow, stage: usize) {
        let number = self.first + self.rows.len();
        self.rows.push(piece.row);
        self.stage(stage).add(&piece.row, number);
    }

    /// Adds overlapping pieces as one part, in list order.
    fn one_by_one(&mut self, pieces: &[TargetRow], cluster: &[usize], stage: usize) {
        let first = (self.first + self.rows.len()) as u32;
        self.rows.extend(cluster.iter().map(|piece| pieces[*piece].row));
        let part = PartRow::whole(first, cluster.len() as u32);
        let bytes: u64 = cluster.iter().map(|piece| moved(&pieces[*piece].row)).sum();
        let stage = self.stage(stage);
        if bytes <= WARP_BYTES { stage.warps.push(part) } else { stage.blocks.push(part) }
    }

    fn stage(&mut self, number: usize) -> &mut Stage {
        if self.stages.len() <= number {
            self.stages.resize_with(number + 1, Stage::default);
        }
        &mut self.stages[number]
    }
}

/// Returns the approximate number of bytes that a piece moves.
fn moved(row: &PieceRow) -> u64 {
    match row.kind {
        PIECE_SPARSE | PIECE_PICK => row.steps * SECTOR_BYTES,
        PIECE_MASKED => row.steps * u64::from(row.width),
        _ => row.steps,
    }
}

fn extent(piece: &TargetRow) -> Range<u64> {
    piece.row.target..piece.row.target + piece.target_len
}

/// Sorts ranges, each given by its start and its length, and returns whether no two of them overlap.
pub(super) fn are_disjoint(ranges: &mut [(u64, u64)]) -> bool {
    ranges.sort_unstable_by_key(|(start, _)| *start);
    ranges.is_sorted_by(|(start, len), (next, _)| start + len <= *next)
}

/// Sorts pieces and splits them into clusters whose targets do not overlap. Returns the length of each
/// cluster. Within a cluster, pieces keep the order of the list.
fn clusters(pieces: &[TargetRow], group: &mut [usize]) -> Vec<usize> {
    group.sort_unstable_by_key(|piece| pieces[*piece].row.target);
    let (mut lens, mut reach) = (Vec::with_capacity(group.len()), 0);
    for piece in &*group {
        let Range { start, end } = extent(&pieces[*piece]);
        match lens.last_mut().filter(|_| start < reach) {
            Some(len) => *len += 1,
            None => lens.push(1),
        }
        reach = reach.max(end);
    }
    let mut rest = group;
    for len in &lens {
        let (cluster, after) = rest.split_at_mut(*len);
        cluster.sort_unstable();
        rest = after;
    }
    lens
}

/// Returns whether one block should process the cluster.
fn is_hot(pieces: &[TargetRow], cluster: &[usize]) -> bool {
    let bytes: u64 = cluster.iter().map(|piece| moved(&pieces[*piece].row)).sum();
    bytes <= LAUNCH_BYTES || bytes <= HOT_BYTES * cluster.len() as u64
}

/// Returns the pieces that no earlier piece of the cluster overlaps, and the remaining pieces.
fn first_round(pieces: &[TargetRow], cluster: &[usize]) -> (Vec<usize>, Vec<usize>) {
    // The disjoint ranges that earlier pieces of the cluster write, by start address. Pieces that are postponed to a
    // later launch count too, so that no later piece overtakes them.
    let mut covered: BTreeMap<u64, u64> = BTreeMap::new();
    cluster.iter().partition(|piece| {
        let Range { mut start, mut end } = extent(&pieces[**piece]);
        let overlaps = covered.range(..end).next_back().is_some_and(|(_, reach)| *reach > start);
        while let Some((&from, &reach)) =
            covered.range(..=end).next_back().filter(|(_, reach)| **reach >= start)
        {
            covered.remove(&from);
            (start, end) = (start.min(from), end.max(reach));
        }
        covered.insert(start, end);
        !overlaps
    })
}
