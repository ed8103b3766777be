//! Conversion of pieces of work to launches: pieces that may run concurrently, and pieces that must wait.
//!
//! Every command that moves or merges bytes is a *piece*: it writes one range and reads others. Pieces are collected in
//! a batch. The batch ends before a piece that writes an area which an earlier piece of the batch reads, or that reads
//! an area which an earlier piece writes. The pieces of the batch then become launches:
//!
//! - Pieces whose targets do not overlap are independent, and long ones are split into parts.
//! - Pieces that overlap keep the order of the list. A hot spot of few bytes becomes one part, which one warp or block
//!   processes. Larger ones become consecutive launches, so that a page that is zeroed and then written whole still
//!   uses the whole GPU.
//!
//! No result therefore depends on scheduling: blocks of one launch run in any order, and launches of one stream run in
//! sequence. A plan contains addresses but makes no driver calls: `translate.rs` checks ranges and provides the
//! addresses, and `launch.rs` executes the plan.

use std::convert::Infallible;
use std::ops::Range;

use super::abi::{
    APPLY_BY_BLOCK, APPLY_BY_WARP, CRC_CHUNK_LEN, CRC_FIRST, CRC_LAST, CombineRow, CrcRow, DIFF_LEN_MAX,
    DiffRow, DigestRow, INDEX_COUNT_MAX, IndexRow, Kernel, PartRow, PieceRow, SELECT_LEN_MAX, ScanRow,
    SelectRow,
};
use super::areas::{Area, AreaSet, Areas};
use super::piece_plan::{PiecePlan, Rows, Stage, TargetRow, are_disjoint};
use super::pinned_reads::WrittenStripes;
use crate::base::parallel;
use crate::device::many_deltas::{Partitioned, THREADS_MAX};
use crate::device::{DIGEST_CHUNK_LEN, DIGEST_LEN, MemoryId, digest_count};

/// The number of digest rows that keep the whole GPU busy. For longer ranges, a row has several chunks: 65,536 rows of
/// one chunk took the host 0.9 ms, while the GPU digested 4 GiB in 1.35 ms.
const DIGEST_BLOCKS_MIN: u64 = 4096;
/// The maximum number of chunks in a digest row. With 8 chunks per row an H100 digests at 0.97 of the rate with one
/// chunk, with 16 at 0.95.
const DIGEST_ROW_CHUNKS_MAX: u64 = 8;

/// A piece, with the areas that it accesses.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlannedPiece {
    /// The kernel's row.
    pub row: PieceRow,
    /// Length of the range that the piece writes, starting at the row's target.
    pub target_len: u64,
    /// The area that the piece writes.
    pub target: Area,
    /// The areas that the piece reads: none, one or two.
    pub sources: [Option<Area>; 2],
}

/// A step of a plan, in the order of one stream. Ranges contain the numbers of rows in the plan's tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LaunchStep {
    /// Applies parts of pieces with a kernel. The range contains the numbers of parts.
    Apply(Kernel, Range<usize>),
    /// Checksums sources, or chunks of sources.
    Crc(Range<usize>),
    /// Combines the remainders of chunks into the checksums of their sources.
    Combine(Range<usize>),
    /// Compares sections of ranges.
    Diff(Range<usize>),
    /// Digests chunks of ranges.
    Digest(Range<usize>),
    /// Writes the indices of the set bits of bitmaps. The first range contains the rows for sections of bitmaps, and
    /// the second range one row for each bitmap.
    Select(Range<usize>, Range<usize>),
    /// Checks sections of lists of indices.
    Validate(Range<usize>),
    /// Copies a long range within the GPU's memory.
    Within { source: u64, target: u64, len: u64 },
    /// Copies a long range from host memory to the GPU's memory.
    Up { source: u64, target: u64, len: u64 },
    /// Copies a long range from the GPU's memory to host memory.
    Down { source: u64, target: u64, len: u64 },
}

/// The plan of a list of commands.
#[derive(Debug, Default)]
pub(super) struct LaunchPlan {
    pub steps: Vec<LaunchStep>,
    pub pieces: Rows<PieceRow>,
    pub parts: Rows<PartRow>,
    pub crcs: Vec<CrcRow>,
    pub combines: Vec<CombineRow>,
    pub diffs: Vec<DiffRow>,
    pub digests: Vec<DigestRow>,
    pub selects: Vec<SelectRow>,
    pub scans: Vec<ScanRow>,
    pub indices: Vec<IndexRow>,
    /// The stripes of pinned memory that the list writes.
    pub pinned: WrittenStripes,
    /// The areas that the newest checksum step writes.
    summed: Areas,
    batch: PieceBatch,
}

/// Pieces that are not planned yet.
///
/// Most lists change many pages once each. The rows are therefore stored in list order, with the parts that they have
/// if no pieces overlap. Overlapping pieces are ordered only when the batch ends. Planning all pieces at the end made a
/// list of 10,000 deltas take half as long again, because each pass over the rows waits for memory.
#[derive(Debug, Default)]
struct PieceBatch {
    rows: Vec<PieceRow>,
    /// The range that each piece writes: its start address and its length.
    targets: Vec<(u64, u64)>,
    /// The parts of the pieces, valid if no two pieces overlap.
    apart: Stage,
    /// The end address of the newest piece's range.
    reach: u64,
    /// Whether a piece's range began before the end of the previous piece's range.
    is_unordered: bool,
    /// The areas that the pieces write.
    written: AreaSet,
    /// The areas that the pieces read. No piece writes to these areas.
    read: AreaSet,
}

impl PieceBatch {
    /// Adds a piece. `number` is the number of the piece's row.
    fn push(&mut self, piece: &PlannedPiece, number: usize) {
        let (start, len) = (piece.row.target, piece.target_len);
        self.is_unordered |= start < self.reach;
        self.reach = start + len;
        self.rows.push(piece.row);
        self.targets.push((start, len));
        self.apart.add(&piece.row, number);
        self.written.note(piece.target);
        piece.sources.iter().flatten().for_each(|area| self.read.note(*area));
    }

    /// Plans the pieces and removes them from the batch. Their rows begin at number `first`.
    fn plan(&mut self, first: usize) -> PiecePlan {
        let (rows, mut targets) = (std::mem::take(&mut self.rows), std::mem::take(&mut self.targets));
        let apart = std::mem::take(&mut self.apart);
        let is_unordered = std::mem::take(&mut self.is_unordered);
        self.reach = 0;
        self.written.clear();
        self.read.clear();
        let lens = if is_unordered { targets.iter().map(|(_, len)| *len).collect() } else { Vec::new() };
        if !is_unordered || are_disjoint(&mut targets) {
            return PiecePlan::apart(rows, apart);
        }
        let pieces = rows.into_iter().zip(lens).map(|(row, target_len)| TargetRow { row, target_len });
        PiecePlan::of(&pieces.collect::<Vec<_>>(), first)
    }

    /// Returns whether the batch must end before `piece`, because the piece must run in a later launch.
    fn must_end_before(&mut self, piece: &PlannedPiece) -> bool {
        let Self { written, read, .. } = self;
        // The piece would write an area that an earlier piece reads.
        if read.contains(piece.target) {
            return true;
        }
        // The piece would read an area that an earlier piece writes. The newest piece's source need not be looked up
        // again.
        piece.sources.iter().flatten().any(|area| read.newest() != Some(area) && written.contains(*area))
    }
}

impl LaunchPlan {
    /// Reserves capacity for this number of further pieces.
    pub fn expect(&mut self, pieces: usize) {
        self.batch.rows.reserve(pieces);
        self.batch.targets.reserve(pieces);
        self.batch.apart.warps.reserve(pieces);
    }

    /// Adds a piece after all earlier ones.
    pub fn piece(&mut self, piece: PlannedPiece) {
        if piece.target_len == 0 {
            return;
        }
        // Blocks of one launch run in any order, so a launch must end between a write and a read. Write after
        // write needs no flush: `flush` itself keeps the order of overlapping targets.
        if self.batch.must_end_before(&piece) {
            self.flush();
        }
        self.writes(piece.target);
        self.batch.push(&piece, self.pieces.len() + self.batch.rows.len());
        // After a copy within one area, the next access to that area must wait, whether it reads or writes.
        if piece.sources.contains(&Some(piece.target)) {
            self.flush();
        }
    }

    /// Records that the list writes to an area.
    pub fn writes(&mut self, area: Area) {
        if let Area::Memory(kind, id) = area {
            self.pinned |= WrittenStripes::of(kind, MemoryId(id));
        }
    }

    /// Adds many deltas after all earlier pieces. Several threads have distributed the deltas into shares. No delta
    /// reads bytes that another delta writes.
    pub fn deltas(&mut self, partitioned: &Partitioned<TargetRow>) {
        self.flush();
        let mut firsts = Vec::with_capacity(partitioned.count());
        let mut first = self.pieces.len();
        for share in 0..partitioned.count() {
            firsts.push(first);
            first += partitioned.share(share).map(<[_]>::len).sum::<usize>();
        }
        let plan = |(): &mut (), share: usize| {
            let rows = partitioned.share(share).collect::<Vec<_>>().concat();
            Ok::<_, Infallible>(PiecePlan::of(&rows, firsts[share]))
        };
        let Ok(plans) =
            parallel::map_indexed(parallel::threads(THREADS_MAX), partitioned.count(), || (), plan);
        self.launch(plans);
    }

    /// Adds a step that is not a piece. Earlier pieces become launches first, because the step may read bytes
    /// that they write.
    pub fn step(&mut self, step: LaunchStep) {
        self.flush();
        self.steps.push(step);
    }

    /// Adds the comparison of two ranges.
    pub fn diff(&mut self, left: u64, right: u64, target: u64, len: u64, width: u64) {
        let first = self.diffs.len();
        for begin in (0..len).step_by(DIFF_LEN_MAX as usize) {
            self.diffs.push(DiffRow {
                left: left + begin,
                right: right + begin,
                target: target + begin / width / 8,
                len: (len - begin).min(u64::from(DIFF_LEN_MAX)) as u32,
                width: width as u32,
            });
        }
        if self.diffs.len() > first {
            self.step(LaunchStep::Diff(first..self.diffs.len()));
        }
    }

    /// Adds the digests of all chunks of these ranges. The digests are written to `target` in order, without gaps.
    pub fn digests(&mut self, sources: &[(u64, u64)], key: u64, mut target: u64) {
        let first = self.digests.len();
        let chunks: u64 = sources.iter().map(|(_, len)| digest_count(*len)).sum();
        let row_len = DIGEST_CHUNK_LEN * (chunks / DIGEST_BLOCKS_MIN).clamp(1, DIGEST_ROW_CHUNKS_MAX);
        for (source, len) in sources {
            for begin in (0..*len).step_by(row_len as usize) {
                let len = (len - begin).min(row_len);
                let row = DigestRow { source: source + begin, key, target, len: len as u32, reserved: 0 };
                self.digests.push(row);
                target += DIGEST_LEN as u64 * digest_count(len);
            }
        }
        if self.digests.len() > first {
            self.step(LaunchStep::Digest(first..self.digests.len()));
        }
    }

    /// Adds the rows that write the indices of one bitmap's set bits. `target` has space for `room` indices, `numbers`
    /// has four bytes for each row, and `sum` is the address of the total. Call [`LaunchPlan::select`] after the last
    /// bitmap.
    pub fn bitmap(&mut self, bits: u64, len: u64, (target, room): (u64, u32), numbers: u64, sum: u64) {
        let rows = select_rows(len);
        for (row, before) in (0..rows).zip((numbers..).step_by(4)) {
            let begin = row * u64::from(SELECT_LEN_MAX);
            let (len, first) = ((len - begin).min(u64::from(SELECT_LEN_MAX)) as u32, (8 * begin) as u32);
            self.selects.push(SelectRow {
                bits: bits + begin,
                target,
                before,
                len,
                first,
                room,
                reserved: 0,
            });
        }
        self.scans.push(ScanRow { numbers, target: sum, count: rows as u32, reserved: 0 });
    }

    /// Adds the step for all bitmaps added since the rows `first` and `first_scan`.
    pub fn select(&mut self, first: usize, first_scan: usize) {
        if self.scans.len() > first_scan {
            self.step(LaunchStep::Select(first..self.selects.len(), first_scan..self.scans.len()));
        }
    }

    /// Adds the rows that check one list of indices. Call [`LaunchPlan::validate`] after the last list.
    pub fn index_list(&mut self, list: IndexRow) {
        for begin in (0..list.count).step_by(INDEX_COUNT_MAX as usize) {
            let count = (list.count - begin).min(INDEX_COUNT_MAX);
            self.indices.push(IndexRow { indices: list.indices + 4 * begin, count, ..list });
        }
    }

    /// Adds the step that checks all lists of indices added since row `first`.
    pub fn validate(&mut self, first: usize) {
        if self.indices.len() > first {
            self.step(LaunchStep::Validate(first..self.indices.len()));
        }
    }

    /// Adds checksums. The checksum of each source is four bytes, written to `sums` in order. Remainders of sources
    /// with several rows are written to `remainders`; [`remainder_words`] returns their number.
    ///
    /// Consecutive calls for different areas share their launches.
    pub fn crcs(&mut self, sources: &[(u64, u64)], (area, sums): (Area, u64), mut remainders: u64) {
        self.flush();
        let (mut first, mut first_combine) = (self.crcs.len(), self.combines.len());
        let is_new_area = self.summed.insert(area);
        match &self.steps[..] {
            [.., LaunchStep::Crc(crcs), LaunchStep::Combine(combines)] if is_new_area => {
                (first, first_combine) = (crcs.start, combines.start);
                self.steps.truncate(self.steps.len() - 2);
            }
            [.., LaunchStep::Crc(crcs)] if is_new_area => {
                first = crcs.start;
                self.steps.pop();
            }
            _ => {
                self.summed.clear();
                self.summed.insert(area);
            }
        }
        for ((source, len), target) in sources.iter().zip((sums..).step_by(4)) {
            let chunks = crc_chunks(*len);
            if chunks == 1 {
                let flags = CRC_FIRST | CRC_LAST;
                self.crcs.push(CrcRow { source: *source, target, len: *len as u32, flags });
                continue;
            }
            // Split from the end, so that only the first chunk is shorter and all chunks combine with one
            // constant.
            let chunk_len = u64::from(CRC_CHUNK_LEN);
            let short = len - (chunks - 1) * chunk_len;
            for chunk in 0..chunks {
                let (begin, len) =
                    if chunk == 0 { (0, short) } else { (short + (chunk - 1) * chunk_len, chunk_len) };
                let first = if chunk == 0 { CRC_FIRST } else { 0 };
                let last = if chunk == chunks - 1 { CRC_LAST } else { 0 };
                self.crcs.push(CrcRow {
                    source: source + begin,
                    target: remainders + 4 * chunk,
                    len: len as u32,
                    flags: first | last,
                });
            }
            self.combines.push(CombineRow { remainders, target, count: chunks as u32, reserved: 0 });
            remainders += 4 * chunks;
        }
        self.steps.push(LaunchStep::Crc(first..self.crcs.len()));
        if self.combines.len() > first_combine {
            self.steps.push(LaunchStep::Combine(first_combine..self.combines.len()));
        }
    }

    /// Plans the pieces added so far, so that later steps run after them.
    pub fn flush(&mut self) {
        if !self.batch.rows.is_empty() {
            let planned = self.batch.plan(self.pieces.len());
            self.launch(vec![planned]);
        }
    }

    /// Adds the launches of some plans. No plan accesses memory of another plan.
    fn launch(&mut self, plans: Vec<PiecePlan>) {
        let stage_count = plans.iter().map(|plan| plan.stages.len()).max().unwrap_or(0);
        let mut stages: Vec<_> = Vec::with_capacity(plans.len());
        for PiecePlan { rows, stages: of_plan, .. } in plans {
            self.pieces.add(rows);
            stages.push(of_plan.into_iter());
        }
        for _ in 0..stage_count {
            let (mut blocks, mut warps) = (Vec::new(), Vec::new());
            for Stage { blocks: of_blocks, warps: of_warps } in stages.iter_mut().filter_map(Iterator::next) {
                blocks.push(of_blocks);
                warps.push(of_warps);
            }
            for (kernel, parts) in [(APPLY_BY_BLOCK, blocks), (APPLY_BY_WARP, warps)] {
                let first = self.parts.len();
                parts.into_iter().for_each(|parts| self.parts.add(parts));
                if self.parts.len() > first {
                    self.steps.push(LaunchStep::Apply(kernel, first..self.parts.len()));
                }
            }
        }
    }
}

/// Returns the number of four-byte words of scratch that the checksums of sources of these lengths need.
pub(super) fn remainder_words(lens: impl Iterator<Item = u64>) -> u64 {
    lens.map(crc_chunks).filter(|chunks| *chunks > 1).sum()
}

/// Returns the number of rows for a bitmap of `len` bytes.
pub(super) fn select_rows(len: u64) -> u64 {
    len.div_ceil(u64::from(SELECT_LEN_MAX))
}

fn crc_chunks(len: u64) -> u64 {
    len.div_ceil(u64::from(CRC_CHUNK_LEN)).max(1)
}

#[cfg(test)]
mod tests {
    use super::super::resource::Kind;
    use super::*;

    /// Returns a random number, by SplitMix64.
    fn next(state: &mut u64) -> u64 {
        *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (*state ^ (*state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Applies a part to `memory`, as a warp or a block would.
    fn run_part(plan: &LaunchPlan, part: &PartRow, memory: &mut [u8]) {
        let first = part.piece_first as usize;
        let rows = plan.pieces.runs().iter().flatten();
        for row in rows.skip(first).take(part.piece_count as usize) {
            for step in part.begin..part.end.min(row.steps) {
                memory[(row.target + step) as usize] = memory[(row.payload + step) as usize];
            }
        }
    }

    /// Creates random dense pieces between two pages and a staging buffer. The pieces write and read each other's
    /// bytes.
    fn drawn_pieces(seed: u64) -> Vec<PlannedPiece> {
        let mut state = seed;
        let mut below = |limit: u64| next(&mut state) % limit;
        let longest = [300_000, 20_000, 300][(seed % 3) as usize];
        let count = [3, 30, 200][(seed / 3 % 3) as usize];
        let piece = |_| {
            let len = 1 + below(longest);
            let target = below(2);
            let source = (target + below(3)) % 3;
            // Within one area, from one half to the other, in either direction.
            let (len, room) = if source == target { (len.min(AREA / 4), AREA / 2) } else { (len, AREA) };
            let halves = if source == target { [0, 1] } else { [0, 0] };
            let first = below(2) as usize;
            let mut place = |area: u64, half: u64| area * AREA + half * AREA / 2 + below(room - len);
            let row = PieceRow::dense(place(target, halves[first]), place(source, halves[1 - first]), len);
            // Two kinds of memory, or two allocations of one kind.
            let other = if seed.is_multiple_of(2) { Kind::Pinned } else { Kind::Device };
            let area = |number| match number {
                0 => Area::Memory(Kind::Device, 0),
                1 => Area::Memory(other, 1),
                _ => Area::Staging(0),
            };
            PlannedPiece { row, target_len: len, target: area(target), sources: [Some(area(source)), None] }
        };
        (0..count).map(piece).collect()
    }

    const AREA: u64 = 400_000;

    #[test]
    fn no_result_depends_on_which_part_runs_first() {
        for seed in 0..45 {
            let pieces = drawn_pieces(seed);
            let start: Vec<u8> = (0..3 * AREA).scan(seed, |state, _| Some(next(state) as u8)).collect();
            let mut expected = start.clone();
            for piece in &pieces {
                let row = piece.row;
                let from = row.payload as usize;
                expected.copy_within(from..from + row.steps as usize, row.target as usize);
            }
            let mut plan = LaunchPlan::default();
            pieces.iter().for_each(|piece| plan.piece(*piece));
            plan.flush();
            for backwards in [false, true] {
                let mut found = start.clone();
                for step in &plan.steps {
                    let LaunchStep::Apply(_, range) = step else { panic!("pieces become parts: {step:?}") };
                    let parts = plan.parts.runs().iter().flatten();
                    let mut parts: Vec<&PartRow> = parts.skip(range.start).take(range.len()).collect();
                    if backwards {
                        parts.reverse();
                    }
                    parts.into_iter().for_each(|part| run_part(&plan, part, &mut found));
                }
                assert!(found == expected, "seed {seed}, backwards: {backwards}");
            }
        }
    }

    fn dense(target: u64, len: u64) -> PlannedPiece {
        let row = PieceRow::dense(target, 1 << 40, len);
        let sources = [Some(Area::Staging(0)), None];
        PlannedPiece { row, target_len: len, target: Area::Memory(Kind::Device, 0), sources }
    }

    fn planned(pieces: &[PlannedPiece]) -> LaunchPlan {
        let mut plan = LaunchPlan::default();
        pieces.iter().for_each(|piece| plan.piece(*piece));
        plan.flush();
        plan
    }

    #[test]
    fn launch_count_is_minimal() {
        let launches = |pieces: &[PlannedPiece]| planned(pieces).steps.len();
        // Many deltas, each to another page.
        let apart: Vec<PlannedPiece> = (0..1000).map(|page| dense(page * 4096, 256)).collect();
        assert_eq!(launches(&apart), 1);
        // Many writes to the same few bytes become one part, regardless of their number.
        let hot = planned(&vec![dense(64, 8); 1000]);
        assert_eq!((hot.steps.len(), hot.parts.len()), (1, 1));
        // A long page that is zeroed and then written: both pieces are split to use the whole GPU.
        let zeroed_and_written = planned(&[dense(0, 10 << 20), dense(0, 10 << 20)]);
        assert_eq!((zeroed_and_written.steps.len(), zeroed_and_written.parts.len()), (2, 640));
        // A piece that reads bytes which an earlier piece writes runs in a later launch.
        let download = PlannedPiece {
            target: Area::Staging(1),
            sources: [Some(Area::Memory(Kind::Device, 0)), None],
            ..dense(1 << 41, 8)
        };
        assert_eq!(launches(&[dense(0, 8), download]), 2);
        assert_eq!(launches(&[]), 0);
    }

    #[test]
    fn checksum_prefixes_and_suffixes_are_removed() {
        let chunk = u64::from(CRC_CHUNK_LEN);
        let mut plan = LaunchPlan::default();
        plan.crcs(&[(0, 5), (1000, 2 * chunk + 1), (9, 0)], (Area::Staging(0), 1 << 20), 1 << 30);
        let rows: Vec<(u64, u32, u32)> =
            plan.crcs.iter().map(|row| (row.source, row.len, row.flags)).collect();
        let both = CRC_FIRST | CRC_LAST;
        let long = [(1000, 1, CRC_FIRST), (1001, CRC_CHUNK_LEN, 0), (1001 + chunk, CRC_CHUNK_LEN, CRC_LAST)];
        assert_eq!(rows, [&[(0, 5, both)], &long[..], &[(9, 0, both)]].concat());
        let CombineRow { remainders, target, count, .. } = plan.combines[0];
        assert_eq!((remainders, target, count), (1 << 30, (1 << 20) + 4, 3));
        assert_eq!(remainder_words([5, 2 * chunk + 1, 0].into_iter()), 3);
    }

    #[test]
    fn checksums_that_follow_each_other_share_launches() {
        let long = u64::from(CRC_CHUNK_LEN) + 1;
        let mut plan = LaunchPlan::default();
        plan.piece(dense(0, 8));
        plan.crcs(&[(0, 8)], (Area::Staging(1), 1 << 20), 1 << 30);
        plan.crcs(&[(64, long)], (Area::Staging(2), 1 << 21), 1 << 31);
        plan.crcs(&[(0, 4), (4, long)], (Area::Staging(3), 1 << 22), 1 << 32);
        assert_eq!(
            plan.steps,
            [LaunchStep::Apply(APPLY_BY_WARP, 0..1), LaunchStep::Crc(0..6), LaunchStep::Combine(0..2)]
        );
        // A piece may change bytes that were checksummed, so later checksums are another launch.
        plan.piece(dense(0, 8));
        plan.crcs(&[(0, 8)], (Area::Staging(4), 1 << 20), 1 << 30);
        assert_eq!(plan.steps[3..], [LaunchStep::Apply(APPLY_BY_WARP, 1..2), LaunchStep::Crc(6..7)]);
        // Checksums that may overwrite the results of others also need a separate launch.
        plan.crcs(&[(0, 8)], (Area::Staging(4), 1 << 20), 1 << 30);
        plan.crcs(&[(8, 8)], (Area::Staging(1), 1 << 20), 1 << 30);
        assert_eq!(plan.steps[5..], [LaunchStep::Crc(7..9)]);
    }
}
