//! Pieces that wait for none of another area, as rows and as parts of launches: which of them run at the same
//! time.

use std::collections::BTreeMap;
use std::ops::Range;

use super::abi::{MASK_STEPS, PIECE_MASKED, PIECE_PICK, PIECE_SPARSE, PartRow, PieceRow};

/// Bytes of a part of a long piece: enough for a block to hide the latency of its reads.
const PART_BYTES: u64 = 32 << 10;
/// The most parts that a piece is cut into.
const PARTS_MAX: u64 = 8192;
/// Parts of up to this many bytes are a warp's. A block waits longer for its row, which lies in mapped host
/// memory, than it copies. 65,536 pieces of 16 KiB take 541 µs with a warp each (94 % of a device copy) and
/// 687 µs with a block each (74 %). One piece alone takes a microsecond more by a warp (`benches/kernels.cu`,
/// H200).
const WARP_BYTES: u64 = 16 << 10;
/// Bytes that one block moves, working alone, in the time that one more launch takes.
const LAUNCH_BYTES: u64 = 64 << 10;
/// Overlapping pieces of up to this many bytes on the average are a hot spot, worked through by one block.
const HOT_BYTES: u64 = 2 << 10;
/// Bytes that move where an element is scattered: a sector of the GPU's memory.
const SECTOR_BYTES: u64 = 32;

/// A kernel's row, and the length of the range that it writes to.
#[derive(Clone, Copy, Debug)]
pub(super) struct TargetRow {
    pub row: PieceRow,
    pub target_len: u64,
}

/// The rows of a table, in runs that several threads made.
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
    /// Adds rows after those that are there.
    pub fn add(&mut self, run: Vec<R>) {
        if !run.is_empty() {
            self.len += run.len();
            self.runs.push(run);
        }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// The runs that they lie in, in their order.
    pub fn runs(&self) -> &[Vec<R>] {
        &self.runs
    }
}

/// Parts of one launch each.
#[derive(Debug, Default)]
pub(super) struct Stage {
    pub warps: Vec<PartRow>,
    pub blocks: Vec<PartRow>,
}

impl Stage {
    /// Adds a piece that overlaps no other one here; `number` is that of its row.
    pub fn add(&mut self, row: &PieceRow, number: usize) {
        let (first, bytes) = (number as u32, moved(row));
        if bytes <= WARP_BYTES {
            self.warps.push(PartRow::whole(first, 1));
            return;
        }
        let parts = bytes.div_ceil(PART_BYTES).min(PARTS_MAX);
        // A masked piece is cut at whole bytes of its bitmap, so that no two parts read one byte for
        // different bits. Other kinds lose nothing by the same boundary.
        let steps = row.steps.div_ceil(parts).next_multiple_of(MASK_STEPS);
        for begin in (0..row.steps).step_by(steps as usize) {
            let end = (begin + steps).min(row.steps);
            self.blocks.push(PartRow { piece_first: first, piece_count: 1, begin, end });
        }
    }
}

/// Pieces as rows, and the parts of the launches that follow each other.
#[derive(Debug, Default)]
pub(super) struct PiecePlan {
    /// The number of the first row.
    first: usize,
    pub rows: Vec<PieceRow>,
    pub stages: Vec<Stage>,
}

impl PiecePlan {
    /// Plans pieces whose rows begin at `first` of the plan's table. Each has one row.
    pub fn of(pieces: &[TargetRow], first: usize) -> Self {
        let mut plan = Self { first, rows: Vec::with_capacity(pieces.len()), stages: Vec::new() };
        let everything = (0, (0..pieces.len()).collect());
        let mut groups: Vec<(usize, Vec<usize>)> = vec![everything];
        // Each round either ends with a group or makes it smaller, so this ends.
        while let Some((stage, mut group)) = groups.pop() {
            let lens = clusters(pieces, &mut group);
            let mut rest = &group[..];
            for len in lens {
                let (cluster, after) = rest.split_at(len);
                rest = after;
                if let [piece] = cluster {
                    plan.alone(&pieces[*piece], stage);
                } else if is_hot(pieces, cluster) {
                    plan.one_by_one(pieces, cluster, stage);
                } else {
                    // One part would leave the GPU to one block here. Pieces that no earlier one overlaps go
                    // now, the others at the next stage, which is a later launch.
                    let (now, later) = first_round(pieces, cluster);
                    now.into_iter().for_each(|piece| plan.alone(&pieces[piece], stage));
                    groups.push((stage + 1, later));
                }
            }
        }
        plan
    }

    /// The plan of pieces of which none overlaps another, with their parts.
    pub fn apart(rows: Vec<PieceRow>, parts: Stage) -> Self {
        Self { first: 0, rows, stages: vec![parts] }
    }

    /// Adds a piece that overlaps no other of its stage.
    fn alone(&mut self, piece: &TargetRow, stage: usize) {
        let number = self.first + self.rows.len();
        self.rows.push(piece.row);
        self.stage(stage).add(&piece.row, number);
    }

    /// Adds pieces that overlap as one part, in the order of the list.
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

/// The number of bytes that a piece moves, roughly.
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

/// Whether no two of these ranges overlap, each with its start and its length. Sorts them.
pub(super) fn are_apart(ranges: &mut [(u64, u64)]) -> bool {
    ranges.sort_unstable_by_key(|(start, _)| *start);
    ranges.is_sorted_by(|(start, len), (next, _)| start + len <= *next)
}

/// Sorts pieces and takes them apart where no target reaches across. Returns the length of each cluster.
/// Within a cluster pieces keep the order of the list.
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

/// Whether one block should work through the cluster.
fn is_hot(pieces: &[TargetRow], cluster: &[usize]) -> bool {
    let bytes: u64 = cluster.iter().map(|piece| moved(&pieces[*piece].row)).sum();
    bytes <= LAUNCH_BYTES || bytes <= HOT_BYTES * cluster.len() as u64
}

/// The pieces that no earlier one of the cluster overlaps, and the rest.
fn first_round(pieces: &[TargetRow], cluster: &[usize]) -> (Vec<usize>, Vec<usize>) {
    // Ranges that earlier pieces cover, disjoint, by their starts. Pieces that are put off count too: a later
    // piece must not overtake them.
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
