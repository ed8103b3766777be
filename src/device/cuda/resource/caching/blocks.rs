//! The blocks of a cache: search, split, join and wait. The caller holds the cache's lock during each call.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::{CacheStats, StreamPoint};
use crate::error::Result;

/// The unit of block lengths in bytes. Every block length is a multiple of it.
pub(super) const BLOCK_LEN_MIN: u64 = 512;
/// The longest block, in bytes, that is cut from a short segment.
pub(super) const SHORT_LEN_MAX: u64 = 1 << 20;
/// The length in bytes of a segment for short blocks.
pub(super) const SHORT_SEGMENT_LEN: u64 = 2 << 20;
/// The remainder, in bytes, above which a long free block is split.
const LONG_REST_MIN: u64 = 1 << 20;

/// A free or used part of a segment. The blocks of a segment cover it without gaps.
pub(super) struct Block {
    pub len: u64,
    pub segment: u64,
    pub state: BlockState,
}

pub(super) enum BlockState {
    Used,
    Free,
    /// The block was freed while work may still use it. `wait` is the number of points that must pass. If all that work
    /// is on one stream, that stream may already get the block.
    Waiting {
        wait: u64,
        points_left: usize,
        only: Option<u64>,
    },
}

/// A point that a block waits for. The point is obsolete if the block has been allocated since.
struct AwaitedPoint {
    point: Box<dyn StreamPoint>,
    address: u64,
    /// The number of the wait, which distinguishes it from other waits of a block at the same address.
    wait: u64,
}

#[derive(Default)]
pub(super) struct Cache {
    /// The length of each segment in bytes, by address.
    pub segments: BTreeMap<u64, u64>,
    pub blocks: BTreeMap<u64, Block>,
    /// Free blocks by length and address, in two lists: blocks of short segments, and all others. The first block that
    /// is long enough is the best fit.
    pub free: [BTreeSet<(u64, u64)>; 2],
    /// Addresses of the waiting blocks.
    pub waiting: BTreeSet<u64>,
    /// The waiting blocks that only one stream may reuse, as tuples of the stream's handle, the index of the list in
    /// `free`, the length and the address.
    own: BTreeSet<(u64, usize, u64, u64)>,
    /// Points by stream handle, in the order in which the stream passes them.
    points: BTreeMap<u64, VecDeque<AwaitedPoint>>,
    waits: u64,
    pub stats: CacheStats,
    pub hits: u64,
    pub misses: u64,
}

/// Returns the index of the list for free blocks of a segment of this length.
pub(super) fn list_of(segment_len: u64) -> usize {
    usize::from(segment_len > SHORT_SEGMENT_LEN)
}

/// Returns whether a free block is split when `rest` bytes of it would remain.
fn is_worth_splitting(segment_len: u64, rest: u64) -> bool {
    if list_of(segment_len) == 0 { rest >= BLOCK_LEN_MIN } else { rest > LONG_REST_MIN }
}

impl Cache {
    fn segment_len(&self, block: &Block) -> u64 {
        self.segments[&block.segment]
    }

    fn list(&mut self, address: u64) -> &mut BTreeSet<(u64, u64)> {
        let list = list_of(self.segment_len(&self.blocks[&address]));
        &mut self.free[list]
    }

    /// Returns the address of the shortest free block that is long enough. Of several equally short blocks, returns the
    /// lowest address.
    pub fn best_fit(&self, len: u64) -> Option<u64> {
        let list = usize::from(len > SHORT_LEN_MAX);
        self.free[list].range((len, 0)..).next().map(|(_, address)| *address)
    }

    /// Returns a block that only this stream used before it was freed, if the block fits without a split. A waiting
    /// block cannot be split, because only this stream could use the remainder.
    pub fn exact_block_of_stream(&self, len: u64, stream: u64) -> Option<u64> {
        let list = usize::from(len > SHORT_LEN_MAX);
        let (.., found_len, address) =
            self.own.range((stream, list, len, 0)..=(stream, list, u64::MAX, u64::MAX)).next()?;
        let segment_len = self.segment_len(&self.blocks[address]);
        (!is_worth_splitting(segment_len, found_len - len)).then_some(*address)
    }

    pub fn add_segment(&mut self, address: u64, len: u64) {
        self.segments.insert(address, len);
        self.blocks.insert(address, Block { len, segment: address, state: BlockState::Free });
        self.list(address).insert((len, address));
        self.stats.reserved_bytes += len;
        self.stats.reserved_peak_bytes = self.stats.reserved_peak_bytes.max(self.stats.reserved_bytes);
    }

    /// Allocates a block. The block is split to length `len` if the remainder is long enough.
    pub fn hand_out(&mut self, address: u64, len: u64) {
        let (found_len, segment) = (self.blocks[&address].len, self.blocks[&address].segment);
        self.list(address).remove(&(found_len, address));
        self.end_wait(address);
        let rest = found_len - len;
        let block_len = if is_worth_splitting(self.segments[&segment], rest) {
            self.blocks.insert(address + len, Block { len: rest, segment, state: BlockState::Free });
            self.list(address + len).insert((rest, address + len));
            len
        } else {
            found_len
        };
        self.blocks.insert(address, Block { len: block_len, segment, state: BlockState::Used });
        let stats = &mut self.stats;
        stats.blocks += 1;
        stats.allocated_bytes += block_len;
        stats.allocated_peak_bytes = stats.allocated_peak_bytes.max(stats.allocated_bytes);
    }

    /// Checks that a block can be freed, and counts it as freed.
    ///
    /// # Panics
    /// If the block is not in use, or is shorter than the length with which it is freed.
    pub fn put_back(&mut self, address: u64, len: u64) {
        let block = self.blocks.get(&address).filter(|block| matches!(block.state, BlockState::Used));
        let block = block.expect("a block in use");
        assert!(len <= block.len, "{len} bytes of a block of {}", block.len);
        self.stats.blocks -= 1;
        self.stats.allocated_bytes -= block.len;
    }

    /// Makes a freed block wait for points. Each point has its stream's handle.
    pub fn wait(&mut self, address: u64, points: Vec<(u64, Box<dyn StreamPoint>)>, only: Option<u64>) {
        self.waits += 1;
        let (wait, points_left) = (self.waits, points.len());
        for (stream, point) in points {
            self.points.entry(stream).or_default().push_back(AwaitedPoint { point, address, wait });
        }
        let block = self.blocks.get_mut(&address).expect("given back just now");
        block.state = BlockState::Waiting { wait, points_left, only };
        let (len, segment) = (block.len, block.segment);
        self.waiting.insert(address);
        if let Some(stream) = only {
            self.own.insert((stream, list_of(self.segments[&segment]), len, address));
        }
    }

    /// Removes a block from the waiting blocks, if it is waiting.
    fn end_wait(&mut self, address: u64) {
        let block = &self.blocks[&address];
        if let BlockState::Waiting { only: Some(stream), .. } = block.state {
            self.own.remove(&(stream, list_of(self.segment_len(block)), block.len, address));
        }
        self.waiting.remove(&address);
    }

    /// Frees a block and joins it with its free neighbors in the segment.
    pub fn join(&mut self, address: u64) {
        let Block { mut len, segment, .. } = self.blocks.remove(&address).expect("a block");
        let mut begin = address;
        let before = self.blocks.range(..address).next_back().map(|(address, _)| *address);
        let after = self.blocks.range(address..).next().map(|(address, _)| *address);
        for neighbour in [before, after].into_iter().flatten() {
            let block = &self.blocks[&neighbour];
            // A neighbor must belong to the same segment: the next segment may begin where this one ends, but is a
            // separate allocation of the source.
            if block.segment == segment && matches!(block.state, BlockState::Free) {
                let joined_len = block.len;
                self.list(neighbour).remove(&(joined_len, neighbour));
                self.blocks.remove(&neighbour);
                (begin, len) = (begin.min(neighbour), len + joined_len);
            }
        }
        self.blocks.insert(begin, Block { len, segment, state: BlockState::Free });
        self.list(begin).insert((len, begin));
    }

    /// Frees the waiting blocks whose work is done. For each stream, the check stops at the first point that has not
    /// passed, because a busy stream may have thousands of points.
    pub fn free_finished(&mut self) -> Result<()> {
        let (mut done, mut checked) = (Vec::new(), Ok(()));
        for points in self.points.values_mut() {
            while let Some(AwaitedPoint { point, address, wait }) = points.front() {
                if let Some(Block { state: BlockState::Waiting { wait: current, points_left, .. }, .. }) =
                    self.blocks.get_mut(address)
                    && current == wait
                {
                    match point.has_passed() {
                        Ok(true) => *points_left -= 1,
                        Ok(false) => break,
                        Err(error) => {
                            checked = Err(error);
                            break;
                        }
                    }
                    if *points_left == 0 {
                        done.push(*address);
                    }
                }
                points.pop_front();
            }
        }
        self.points.retain(|_, points| !points.is_empty());
        for address in done {
            self.end_wait(address);
            self.join(address);
        }
        checked
    }

    /// Asserts that `own` lists exactly the blocks that wait for one stream only.
    #[cfg(test)]
    pub fn check_own(&self) {
        let of_stream = self.blocks.iter().filter_map(|(address, block)| match block.state {
            BlockState::Waiting { only: Some(stream), .. } => {
                Some((stream, list_of(self.segment_len(block)), block.len, *address))
            }
            _ => None,
        });
        assert_eq!(of_stream.collect::<BTreeSet<_>>(), self.own);
    }

    /// Removes and returns the segments that consist of one free block.
    pub fn take_free_segments(&mut self) -> Vec<(u64, u64)> {
        let is_free = |(address, len): &(&u64, &u64)| {
            let block = &self.blocks[*address];
            block.len == **len && matches!(block.state, BlockState::Free)
        };
        let free: Vec<(u64, u64)> =
            self.segments.iter().filter(is_free).map(|(address, len)| (*address, *len)).collect();
        for (address, len) in &free {
            self.list(*address).remove(&(*len, *address));
            self.blocks.remove(address);
            self.segments.remove(address);
            self.stats.reserved_bytes -= len;
        }
        free
    }
}
