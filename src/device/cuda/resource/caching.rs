//! Blocks cut to measure from few segments, by the rules of PyTorch's allocator: lengths are rounded up to
//! 512 bytes, short blocks share segments of 2 MiB and longer ones segments of 20 MiB, a free block is split
//! for a shorter one, and free neighbours become one block again.
//!
//! [`Pool`](super::Pool) never joins blocks, so that freeing one takes no look at others: it is for pages, of
//! which many have the same length. This is for lengths that vary, where blocks of one length would leave no
//! room for another.
//!
//! A block is given back before the work that uses it is done, if its streams are named: the driver's events
//! tell when it is. Until then only work on the same stream may have it, for that comes later in any case.
//!
//! One lock holds all of it. A segment is asked for while it is held, so that two threads do not both ask for
//! one where one would do.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use remanent_format::Place;

use super::MemoryResource;
use crate::base::sync::Mutex;
use crate::device::{MemoryStats, RawStream};
use crate::error::{Error, Result};

/// Lengths are multiples of this.
const BLOCK_LEN_MIN: u64 = 512;
/// The longest block that lies in a short segment.
const SHORT_LEN_MAX: u64 = 1 << 20;
/// The length of a segment for short blocks.
const SHORT_SEGMENT_LEN: u64 = 2 << 20;
/// Blocks of this length and longer are segments of their own.
const ALONE_LEN_MIN: u64 = 10 << 20;
/// The length of a segment for the blocks between.
const LONG_SEGMENT_LEN: u64 = 20 << 20;
/// Segments of one block are multiples of this.
const SEGMENT_ROUND: u64 = 2 << 20;
/// A long free block is split where more than this is left.
const LONG_REST_MIN: u64 = 1 << 20;

/// Streams that tell when their work is done.
pub trait StreamPoints: Send + Sync + 'static {
    /// The point at which the stream is now.
    ///
    /// # Errors
    /// `StreamRefused`, a device error.
    fn point(&self, stream: RawStream) -> Result<Box<dyn StreamPoint>>;
}

/// A point of a stream.
pub trait StreamPoint: Send {
    /// Whether all work before it is done.
    ///
    /// # Errors
    /// A device error.
    fn has_passed(&self) -> Result<bool>;
}

/// Blocks that are split and joined, over another source.
///
/// ```
/// use remanent::device::cuda::resource::{CachingMemory, HostMemory, MemoryResource};
/// let memory = CachingMemory::new(HostMemory);
/// let (one, other) = (memory.allocate(1000)?, memory.allocate(3 << 20)?);
/// let stats = memory.cache_stats();
/// assert_eq!((stats.allocated_bytes, stats.reserved_bytes), (1024 + (3 << 20), 22 << 20));
/// // SAFETY: allocated just now, and nothing uses them.
/// unsafe { memory.free(one, 1000)? };
/// unsafe { memory.free(other, 3 << 20)? };
/// assert_eq!(memory.trim()?, 22 << 20);
/// # Ok::<(), remanent::Error>(())
/// ```
pub struct CachingMemory<R: MemoryResource> {
    upstream: R,
    points: Option<Arc<dyn StreamPoints>>,
    state: Mutex<Cache>,
}

/// Counts and sizes of a [`CachingMemory`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheStats {
    /// Bytes of blocks in use, as they are handed out.
    pub allocated_bytes: u64,
    /// The most that it was since the peaks began.
    pub allocated_peak_bytes: u64,
    /// Bytes of segments.
    pub reserved_bytes: u64,
    /// The most that it was since the peaks began.
    pub reserved_peak_bytes: u64,
    /// Segments held from the source.
    pub segments: u64,
    /// Blocks in use.
    pub blocks: u64,
    /// Blocks that any taker may have.
    pub free_blocks: u64,
    /// Blocks that were given back, and that work on a stream may still use.
    pub waiting_blocks: u64,
    /// Bytes of the free blocks.
    pub free_bytes: u64,
    /// Bytes of the longest free block.
    pub free_longest_bytes: u64,
}

impl CacheStats {
    /// The share of the free bytes that lie in other blocks than the longest one: 0 where all that is free is
    /// one block, towards 1 where it is in many.
    #[must_use]
    pub fn fragmentation(&self) -> f64 {
        if self.free_bytes == 0 {
            return 0.0;
        }
        1.0 - self.free_longest_bytes as f64 / self.free_bytes as f64
    }
}

/// A free or used part of a segment. The blocks of a segment cover it without a gap.
struct Block {
    len: u64,
    segment: u64,
    state: BlockState,
}

enum BlockState {
    Used,
    Free,
    /// Given back while work may still use it. If all that work is on one stream, that stream may have it.
    Waiting {
        points: Vec<Box<dyn StreamPoint>>,
        only: Option<RawStream>,
    },
}

#[derive(Default)]
struct Cache {
    /// The lengths of segments by their addresses.
    segments: BTreeMap<u64, u64>,
    blocks: BTreeMap<u64, Block>,
    /// Free blocks of short segments and of others, by length and address: the first one that is long enough
    /// fits best.
    free: [BTreeSet<(u64, u64)>; 2],
    /// Addresses of the blocks that wait.
    waiting: BTreeSet<u64>,
    stats: CacheStats,
    hits: u64,
    misses: u64,
}

impl<R: MemoryResource> CachingMemory<R> {
    /// A cache that holds nothing yet, and knows no streams.
    #[must_use]
    pub fn new(upstream: R) -> Self {
        Self { upstream, points: None, state: Mutex::default() }
    }

    /// A cache that holds nothing yet, whose blocks may be given back on streams.
    #[must_use]
    pub fn with_streams(upstream: R, points: Arc<dyn StreamPoints>) -> Self {
        Self { upstream, points: Some(points), state: Mutex::default() }
    }

    /// As [`allocate`](MemoryResource::allocate), for work on this stream alone: it may also have a block
    /// that was given back on this stream, before the work that uses it is done.
    ///
    /// # Errors
    /// As for `allocate`.
    pub fn allocate_on(&self, len: u64, stream: RawStream) -> Result<u64> {
        self.take(len, Some(stream))
    }

    /// Takes back memory that work on these streams may still use, as far as it is there by now.
    ///
    /// # Errors
    /// [`Error::StreamRefused`], with nothing taken back, where the cache knows no streams or a graph is
    /// being captured from one; a device error.
    ///
    /// # Safety
    /// As for [`free`](MemoryResource::free), but for the work that is on these streams by now.
    pub unsafe fn free_on(&self, address: u64, len: u64, streams: &[RawStream]) -> Result<()> {
        let point = |stream: &RawStream| match &self.points {
            Some(points) => points.point(*stream),
            None => {
                let reason = "this memory was made without streams";
                Err(Error::StreamRefused { stream: stream.handle(), reason })
            }
        };
        let points = streams.iter().map(point).collect::<Result<Vec<_>>>()?;
        let only = streams.first().filter(|first| streams.iter().all(|stream| stream == *first)).copied();
        let mut state = self.state.lock();
        state.give(address, len);
        if points.is_empty() {
            state.join(address);
        } else {
            state.wait(address, points, only);
        }
        Ok(())
    }

    /// Counts and sizes as they are now.
    #[must_use]
    pub fn cache_stats(&self) -> CacheStats {
        let state = self.state.lock();
        let free = || state.free.iter().flatten();
        CacheStats {
            segments: state.segments.len() as u64,
            free_blocks: free().count() as u64,
            waiting_blocks: state.waiting.len() as u64,
            free_bytes: free().map(|(len, _)| len).sum(),
            free_longest_bytes: free().map(|(len, _)| *len).max().unwrap_or(0),
            ..state.stats
        }
    }

    /// Lets the peaks begin anew, at what is in use and held now.
    pub fn reset_peaks(&self) {
        let CacheStats { allocated_bytes, allocated_peak_bytes, reserved_bytes, reserved_peak_bytes, .. } =
            &mut self.state.lock().stats;
        (*allocated_peak_bytes, *reserved_peak_bytes) = (*allocated_bytes, *reserved_bytes);
    }

    fn take(&self, len: u64, stream: Option<RawStream>) -> Result<u64> {
        let out_of_memory = || Error::OutOfMemory { place: Place::Device(0), len };
        let block_len = len.max(1).checked_next_multiple_of(BLOCK_LEN_MIN).ok_or_else(out_of_memory)?;
        let segment_len = if block_len <= SHORT_LEN_MAX {
            SHORT_SEGMENT_LEN
        } else if block_len < ALONE_LEN_MIN {
            LONG_SEGMENT_LEN
        } else {
            block_len.checked_next_multiple_of(SEGMENT_ROUND).ok_or_else(out_of_memory)?
        };
        let mut state = self.state.lock();
        state.look_at_waiting()?;
        let found = stream.and_then(|stream| state.own_waiting(block_len, stream));
        let address = match found.or_else(|| state.best_fit(block_len)) {
            Some(address) => {
                state.hits += 1;
                address
            }
            None => {
                let address = self.upstream.allocate(segment_len)?;
                state.misses += 1;
                state.add_segment(address, segment_len);
                address
            }
        };
        state.hand_out(address, block_len);
        Ok(address)
    }
}

/// Which of the two lists a block of a segment of this length is in.
fn list_of(segment_len: u64) -> usize {
    usize::from(segment_len > SHORT_SEGMENT_LEN)
}

/// Whether a free block is worth splitting where this is left of it.
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

    /// The shortest free block that is long enough; of several, the one at the lowest address.
    fn best_fit(&self, len: u64) -> Option<u64> {
        let list = usize::from(len > SHORT_LEN_MAX);
        self.free[list].range((len, 0)..).next().map(|(_, address)| *address)
    }

    /// A block that was given back on this stream alone, and that fits as it is: no part of it could be given
    /// to another taker.
    fn own_waiting(&self, len: u64, stream: RawStream) -> Option<u64> {
        let fits = |address: &&u64| {
            let block = &self.blocks[address];
            let is_own =
                matches!(block.state, BlockState::Waiting { only: Some(only), .. } if only == stream);
            let segment_len = self.segment_len(block);
            let is_of_list = list_of(segment_len) == usize::from(len > SHORT_LEN_MAX);
            is_own && is_of_list && block.len >= len && !is_worth_splitting(segment_len, block.len - len)
        };
        self.waiting.iter().find(fits).copied()
    }

    fn add_segment(&mut self, address: u64, len: u64) {
        self.segments.insert(address, len);
        self.blocks.insert(address, Block { len, segment: address, state: BlockState::Free });
        self.list(address).insert((len, address));
        self.stats.reserved_bytes += len;
        self.stats.reserved_peak_bytes = self.stats.reserved_peak_bytes.max(self.stats.reserved_bytes);
    }

    /// Hands out a block, cut to this length if the rest is worth it.
    fn hand_out(&mut self, address: u64, len: u64) {
        let (found_len, segment) = (self.blocks[&address].len, self.blocks[&address].segment);
        self.list(address).remove(&(found_len, address));
        self.waiting.remove(&address);
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

    /// Counts a block as given back.
    ///
    /// # Panics
    /// If it is not in use, or is shorter than the length that it is given back with.
    fn give(&mut self, address: u64, len: u64) {
        let block = self.blocks.get(&address).filter(|block| matches!(block.state, BlockState::Used));
        let block = block.expect("a block in use");
        assert!(len <= block.len, "{len} bytes of a block of {}", block.len);
        self.stats.blocks -= 1;
        self.stats.allocated_bytes -= block.len;
    }

    fn wait(&mut self, address: u64, points: Vec<Box<dyn StreamPoint>>, only: Option<RawStream>) {
        let block = self.blocks.get_mut(&address).expect("given back just now");
        block.state = BlockState::Waiting { points, only };
        self.waiting.insert(address);
    }

    /// Makes a block free, and one with its free neighbours in the segment.
    fn join(&mut self, address: u64) {
        let Block { mut len, segment, .. } = self.blocks.remove(&address).expect("a block");
        let mut begin = address;
        let before = self.blocks.range(..address).next_back().map(|(address, _)| *address);
        let after = self.blocks.range(address..).next().map(|(address, _)| *address);
        for neighbour in [before, after].into_iter().flatten() {
            let block = &self.blocks[&neighbour];
            // The next segment of the source's may begin where this one ends: it is another allocation.
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

    /// Makes those blocks free whose work is done by now.
    fn look_at_waiting(&mut self) -> Result<()> {
        let mut done = Vec::new();
        for address in &self.waiting {
            let BlockState::Waiting { points, .. } = &self.blocks[address].state else { continue };
            let mut passed = true;
            for point in points {
                passed = passed && point.has_passed()?;
            }
            if passed {
                done.push(*address);
            }
        }
        for address in done {
            self.waiting.remove(&address);
            self.join(address);
        }
        Ok(())
    }

    /// Takes out the segments that are one free block.
    fn take_free_segments(&mut self) -> Vec<(u64, u64)> {
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

// SAFETY: a block lies within a segment that the source within gave; the blocks of a segment do not overlap,
// and one that was handed out is neither free nor waiting until it is given back. One that waits is handed
// out on the stream whose work uses it, and so after that work, or when its points have passed. Segments
// begin at multiples of `ALIGN`, and so do their blocks, whose lengths are multiples of 512.
unsafe impl<R: MemoryResource> MemoryResource for CachingMemory<R> {
    fn allocate(&self, len: u64) -> Result<u64> {
        self.take(len, None)
    }

    unsafe fn free(&self, address: u64, len: u64) -> Result<()> {
        // SAFETY: nothing uses the memory, on any stream.
        unsafe { self.free_on(address, len, &[]) }
    }

    fn trim(&self) -> Result<u64> {
        let free = {
            let mut state = self.state.lock();
            state.look_at_waiting()?;
            state.take_free_segments()
        };
        let mut trimmed = Ok(0);
        for (address, len) in free {
            // SAFETY: the source gave it, it is one free block, and it is in no list any more.
            let freed = unsafe { self.upstream.free(address, len) };
            // A segment that is not taken back keeps no other.
            trimmed = trimmed.and_then(|bytes| freed.map(|()| bytes + len));
        }
        Ok(trimmed? + self.upstream.trim()?)
    }

    fn stats(&self) -> MemoryStats {
        let Cache { stats, hits, misses, .. } = &*self.state.lock();
        MemoryStats {
            reserved_bytes: stats.reserved_bytes,
            used_bytes: stats.allocated_bytes,
            hits: *hits,
            misses: *misses,
        }
    }
}

impl<R: MemoryResource> Drop for CachingMemory<R> {
    /// Segments with blocks that were never given back, or whose work is not done, stay allocated: something
    /// may still use them.
    fn drop(&mut self) {
        if let Err(error) = self.trim() {
            tracing::warn!(%error, "memory could not be given back to the driver");
        }
        let still_reserved = self.state.get_mut().stats.reserved_bytes;
        if still_reserved > 0 {
            tracing::warn!(bytes = still_reserved, "memory that is still in use stays allocated");
        }
    }
}

impl<R: MemoryResource> std::fmt::Debug for CachingMemory<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CachingMemory").field("stats", &self.cache_stats()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::super::{ALIGN, HostMemory, LimitedMemory};
    use super::*;
    use crate::base::sync::atomic::{AtomicU64, Ordering};

    const MIB: u64 = 1 << 20;

    type Limited = Arc<LimitedMemory<HostMemory>>;

    /// Streams whose work is done when a test says so: each stream's work up to a number.
    #[derive(Default)]
    struct Streams(Arc<Mutex<HashMap<RawStream, (u64, u64)>>>);

    struct Point(Arc<Mutex<HashMap<RawStream, (u64, u64)>>>, RawStream, u64);

    impl StreamPoints for Streams {
        fn point(&self, stream: RawStream) -> Result<Box<dyn StreamPoint>> {
            let mut streams = self.0.lock();
            let (queued, _) = streams.entry(stream).or_default();
            *queued += 1;
            Ok(Box::new(Point(self.0.clone(), stream, *queued)))
        }
    }

    impl StreamPoint for Point {
        fn has_passed(&self) -> Result<bool> {
            Ok(self.0.lock()[&self.1].1 >= self.2)
        }
    }

    impl Streams {
        fn finish(&self, stream: RawStream) {
            let mut streams = self.0.lock();
            let (queued, done) = streams.entry(stream).or_default();
            *done = *queued;
        }
    }

    fn cache() -> (Limited, Arc<Streams>, CachingMemory<Limited>) {
        let (limited, streams) =
            (Arc::new(LimitedMemory::new(HostMemory, u64::MAX)), Arc::new(Streams::default()));
        let memory = CachingMemory::with_streams(limited.clone(), streams.clone());
        (limited, streams, memory)
    }

    fn free(memory: &CachingMemory<Limited>, address: u64, len: u64, streams: &[RawStream]) {
        // SAFETY: the tests give back what they allocated, and use none of it.
        unsafe { memory.free_on(address, len, streams) }.unwrap();
    }

    /// What must hold of a cache at any time.
    fn check(memory: &CachingMemory<Limited>) {
        let state = memory.state.lock();
        let mut blocks = state.blocks.iter().peekable();
        for (address, len) in &state.segments {
            let (mut at, mut was_free) = (*address, false);
            while let Some((begin, block)) = blocks.next_if(|(begin, _)| **begin < address + len) {
                assert_eq!(
                    (*begin, block.segment),
                    (at, *address),
                    "a gap, an overlap, or a block of no segment"
                );
                assert!(block.len > 0 && block.len.is_multiple_of(BLOCK_LEN_MIN));
                let is_free = matches!(block.state, BlockState::Free);
                assert!(!(is_free && was_free), "two free blocks side by side");
                let is_listed = state.free[list_of(*len)].contains(&(block.len, at));
                assert_eq!(is_free, is_listed);
                assert_eq!(matches!(block.state, BlockState::Waiting { .. }), state.waiting.contains(begin));
                (at, was_free) = (at + block.len, is_free);
            }
            assert_eq!(at, address + len, "the end of a segment");
        }
        assert!(blocks.next().is_none(), "a block of no segment");
        let used = state.blocks.values().filter(|block| matches!(block.state, BlockState::Used));
        let (count, bytes) = used.fold((0, 0), |(count, bytes), block| (count + 1, bytes + block.len));
        assert_eq!((state.stats.blocks, state.stats.allocated_bytes), (count, bytes));
        assert_eq!(state.stats.reserved_bytes, state.segments.values().sum::<u64>());
    }

    #[test]
    fn lengths_are_rounded_and_segments_are_of_two_kinds() {
        for (len, block_len, segment_len) in [
            (1, 512, 2 * MIB),
            (512, 512, 2 * MIB),
            (513, 1024, 2 * MIB),
            (MIB, MIB, 2 * MIB),
            (MIB + 1, MIB + 512, 20 * MIB),
            (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
            (10 * MIB, 10 * MIB, 10 * MIB),
            (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
            (12 * MIB - 1, 12 * MIB, 12 * MIB),
        ] {
            let (limited, _, memory) = cache();
            let address = memory.allocate(len).unwrap();
            let stats = memory.cache_stats();
            assert_eq!((stats.allocated_bytes, stats.reserved_bytes), (block_len, segment_len), "{len}");
            assert_eq!((limited.bytes(), stats.blocks, stats.segments), (segment_len, 1, 1));
            check(&memory);
            free(&memory, address, len, &[]);
            assert_eq!((memory.trim().unwrap(), limited.bytes()), (segment_len, 0));
        }
        let (_, _, memory) = cache();
        assert!(matches!(memory.allocate(u64::MAX), Err(Error::OutOfMemory { len: u64::MAX, .. })));
    }

    #[test]
    fn a_block_is_cut_from_the_shortest_that_fits_and_joined_again() {
        let (_, _, memory) = cache();
        let blocks: Vec<u64> = (0..4).map(|_| memory.allocate(256 << 10).unwrap()).collect();
        free(&memory, blocks[0], 256 << 10, &[]);
        free(&memory, blocks[2], 256 << 10, &[]);
        // Of two of one length the lower one, and not the rest of the segment.
        assert_eq!(memory.allocate(1000).unwrap(), blocks[0]);
        assert_eq!(memory.allocate(256 << 10).unwrap(), blocks[2]);
        let stats = memory.cache_stats();
        assert_eq!((stats.free_blocks, stats.free_longest_bytes), (2, MIB));
        assert!((stats.fragmentation() - 0.2).abs() < 0.01, "{}", stats.fragmentation());
        for (block, len) in [(1, 256 << 10), (0, 1000), (3, 256 << 10), (2, 256 << 10)] {
            free(&memory, blocks[block], len, &[]);
            check(&memory);
        }
        let stats = memory.cache_stats();
        assert_eq!((stats.free_blocks, stats.free_bytes, stats.blocks), (1, 2 * MIB, 0));
        assert!(stats.fragmentation() == 0.0);
        assert_eq!((stats.allocated_peak_bytes, stats.reserved_peak_bytes), (MIB, 2 * MIB));
        memory.reset_peaks();
        assert_eq!(memory.cache_stats().allocated_peak_bytes, 0);
    }

    /// A block that work may still use goes to that work's stream at once, to others when the work is done,
    /// and its segment is not given back before.
    #[test]
    fn a_block_waits_for_the_work_that_uses_it() {
        let (limited, streams, memory) = cache();
        let [one, other] = [RawStream(7), RawStream(8)];
        let first = memory.allocate_on(12 * MIB, one).unwrap();
        free(&memory, first, 12 * MIB, &[one, one]);
        assert_eq!((memory.trim().unwrap(), memory.cache_stats().waiting_blocks), (0, 1));
        let elsewhere = [memory.allocate(12 * MIB).unwrap(), memory.allocate_on(12 * MIB, other).unwrap()];
        assert!(!elsewhere.contains(&first));
        assert_eq!(memory.allocate_on(12 * MIB, one).unwrap(), first, "later on the same stream");
        check(&memory);
        // Of two streams it is neither's before both are done.
        free(&memory, first, 12 * MIB, &[one, other]);
        streams.finish(one);
        assert_ne!(memory.allocate_on(12 * MIB, one).unwrap(), first);
        streams.finish(other);
        assert_eq!(memory.allocate(12 * MIB).unwrap(), first);
        free(&memory, first, 12 * MIB, &[]);
        assert_eq!((memory.trim().unwrap(), limited.bytes()), (12 * MIB, 36 * MIB));

        let without = CachingMemory::new(limited);
        let address = without.allocate(1).unwrap();
        // SAFETY: allocated just now, and nothing uses it.
        let refused = unsafe { without.free_on(address, 1, &[one]) };
        assert!(matches!(refused, Err(Error::StreamRefused { stream: 7, .. })), "{refused:?}");
        free(&without, address, 1, &[]);
    }

    /// Random histories: live blocks do not overlap, free neighbours are one block, a trim leaves no segment
    /// that is free, and all comes back in the end.
    #[test]
    fn the_rules_hold_after_every_step_of_random_histories() {
        for seed in 0..40_u64 {
            let mut state = seed;
            let mut below = |bound: u64| {
                state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
                let mixed = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
                let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
                (mixed ^ (mixed >> 31)) % bound
            };
            let (limited, streams, memory) = cache();
            let all = [RawStream(3), RawStream(4), RawStream(5)];
            let mut live: BTreeMap<u64, u64> = BTreeMap::new();
            for step in 0..300 {
                match below(10) {
                    0..5 => {
                        let bound = [600, 100_000, 3 * MIB, 12 * MIB][below(4) as usize];
                        let len = 1 + below(bound);
                        let stream = all[below(3) as usize];
                        let address = match below(2) {
                            0 => memory.allocate(len).unwrap(),
                            _ => memory.allocate_on(len, stream).unwrap(),
                        };
                        assert!(address.is_multiple_of(ALIGN));
                        let before = live.range(..=address).next_back();
                        let after = live.range(address..).next();
                        assert!(
                            before.is_none_or(|(begin, len)| begin + len <= address),
                            "seed {seed}, {step}"
                        );
                        assert!(
                            after.is_none_or(|(begin, _)| address + len <= *begin),
                            "seed {seed}, {step}"
                        );
                        live.insert(address, len);
                    }
                    5..8 => {
                        let picked = live.iter().nth(below(live.len().max(1) as u64) as usize);
                        if let Some((address, len)) = picked.map(|(address, len)| (*address, *len)) {
                            live.remove(&address);
                            let count = below(4).saturating_sub(1) as usize;
                            free(&memory, address, len, &all[below(2) as usize..][..count]);
                        }
                    }
                    8 => streams.finish(all[below(3) as usize]),
                    _ => {
                        let (held, trimmed) = (limited.bytes(), memory.trim().unwrap());
                        assert_eq!(limited.bytes(), held - trimmed, "a trim gives back what it says");
                        let state = memory.state.lock();
                        let is_whole = |(address, len): (&u64, &u64)| {
                            let block = &state.blocks[address];
                            block.len == *len && matches!(block.state, BlockState::Free)
                        };
                        assert!(!state.segments.iter().any(is_whole), "seed {seed}, {step}");
                    }
                }
                check(&memory);
                assert_eq!(memory.cache_stats().reserved_bytes, limited.bytes());
                assert_eq!(memory.cache_stats().blocks, live.len() as u64);
            }
            live.into_iter().for_each(|(address, len)| free(&memory, address, len, &[]));
            all.iter().for_each(|stream| streams.finish(*stream));
            memory.trim().unwrap();
            assert_eq!((limited.bytes(), memory.cache_stats().segments), (0, 0), "seed {seed}");
        }
    }

    /// Threads take and give at the same time; none sees another's bytes.
    #[test]
    fn threads_never_share_bytes() {
        let (limited, _, memory) = cache();
        let rounds = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for thread in 1..=4_u64 {
                let (memory, rounds) = (&memory, &rounds);
                scope.spawn(move || {
                    for round in 0..2000_u64 {
                        let len = 8 + thread * round % 3000;
                        let address = memory.allocate(len).unwrap();
                        // SAFETY: the bytes are this thread's until it gives them back.
                        unsafe { (address as *mut u64).write(thread) };
                        std::thread::yield_now();
                        // SAFETY: the same.
                        let seen = unsafe { (address as *const u64).read() };
                        assert_eq!(seen, thread);
                        free(memory, address, len, &[]);
                        rounds.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(rounds.into_inner(), 8000);
        check(&memory);
        assert_eq!((memory.trim().unwrap() > 0, limited.bytes()), (true, 0));
    }
}
