//! Tests of the cache: the rules for its blocks, and concurrent threads.

use std::collections::{BTreeMap, HashMap};

use super::super::{ALIGN, HostMemory, LimitedMemory};
use super::blocks::{BlockState, list_of};
use super::*;
use crate::base::sync::atomic::{AtomicU64, Ordering};
use crate::error::Refused;

const MIB: u64 = 1 << 20;

type Limited = Arc<LimitedMemory<HostMemory>>;

/// Streams whose work is done when a test finishes it. The map contains, for each stream, the number of queued points
/// and the number of passed points. The counter is the number of queries.
#[derive(Default)]
struct Streams(Arc<Mutex<HashMap<RawStream, (u64, u64)>>>, Arc<AtomicU64>);

struct Point(Streams, RawStream, u64);

impl StreamPoints for Streams {
    fn point(&self, stream: RawStream) -> Result<Box<dyn StreamPoint>> {
        let mut streams = self.0.lock();
        let (queued, _) = streams.entry(stream).or_default();
        *queued += 1;
        Ok(Box::new(Point(Streams(self.0.clone(), self.1.clone()), stream, *queued)))
    }
}

impl StreamPoint for Point {
    fn has_passed(&self) -> Result<bool> {
        self.0.1.fetch_add(1, Ordering::Relaxed);
        Ok(self.0.0.lock()[&self.1].1 >= self.2)
    }
}

impl Streams {
    /// Returns how many times the cache has queried whether a point has passed.
    fn requested(&self) -> u64 {
        self.1.load(Ordering::Relaxed)
    }

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
    // SAFETY: the tests free what they allocated, and use none of it afterwards.
    unsafe { memory.free_on(address, len, streams) }.unwrap();
}

/// Checks the invariants of a cache.
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
    state.check_own();
}

#[test]
fn lengths_are_rounded_and_two_segment_kinds_exist() {
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
fn block_splits_best_fit_and_merges_on_free() {
    let (_, _, memory) = cache();
    let blocks: Vec<u64> = (0..4).map(|_| memory.allocate(256 << 10).unwrap()).collect();
    free(&memory, blocks[0], 256 << 10, &[]);
    free(&memory, blocks[2], 256 << 10, &[]);
    // Of two blocks of the same length, the one with the lower address is used, not the remainder of the segment.
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

/// A block that work may still use is available to the work's stream immediately, and to other streams when the work is
/// done. Its segment is not freed before that.
#[test]
fn block_is_reused_only_after_its_work_ends() {
    let (limited, streams, memory) = cache();
    let [one, other] = [RawStream(7), RawStream(8)];
    let first = memory.allocate_on(12 * MIB, one).unwrap();
    free(&memory, first, 12 * MIB, &[one, one]);
    assert_eq!((memory.trim().unwrap(), memory.cache_stats().waiting_blocks), (0, 1));
    let elsewhere = [memory.allocate(12 * MIB).unwrap(), memory.allocate_on(12 * MIB, other).unwrap()];
    assert!(!elsewhere.contains(&first));
    assert_eq!(memory.allocate_on(12 * MIB, one).unwrap(), first, "later on the same stream");
    check(&memory);
    // A block used by two streams is available to neither before both are done.
    free(&memory, first, 12 * MIB, &[one, other]);
    streams.finish(one);
    assert_ne!(memory.allocate_on(12 * MIB, one).unwrap(), first);
    streams.finish(other);
    assert_eq!(memory.allocate(12 * MIB).unwrap(), first);
    free(&memory, first, 12 * MIB, &[]);
    assert_eq!((memory.trim().unwrap(), limited.bytes()), (12 * MIB, 36 * MIB));

    let without = CachingMemory::new(limited);
    let address = without.allocate(1).unwrap();
    // SAFETY: allocated above, and nothing uses it.
    let refused = unsafe { without.free_on(address, 1, &[one]) };
    assert!(matches!(refused, Err(Error::Refused(Refused::Stream { stream: 7, .. }))), "{refused:?}");
    free(&without, address, 1, &[]);
}

/// The handle denotes a different stream in each thread, so the work of one thread does not run after that of another.
#[test]
fn per_thread_stream_block_waits_for_event_on_any_thread() {
    let (_, streams, memory) = cache();
    let of_thread = RawStream(2);
    let first = memory.allocate_on(12 * MIB, of_thread).unwrap();
    free(&memory, first, 12 * MIB, &[of_thread]);
    let second = memory.allocate_on(12 * MIB, of_thread).unwrap();
    assert_ne!(second, first);
    streams.finish(of_thread);
    assert_eq!(memory.allocate_on(12 * MIB, of_thread).unwrap(), first);
    free(&memory, first, 12 * MIB, &[]);
    free(&memory, second, 12 * MIB, &[]);
}

#[test]
fn allocation_checks_one_point_of_busy_stream() {
    let (_, streams, memory) = cache();
    let [one, other] = [RawStream(7), RawStream(8)];
    let blocks: Vec<u64> = (0..300).map(|_| memory.allocate(600).unwrap()).collect();
    blocks.iter().for_each(|block| free(&memory, *block, 600, &[one]));
    assert_eq!((memory.cache_stats().waiting_blocks, streams.requested()), (300, 0));
    for _ in 0..20 {
        memory.allocate(600).unwrap();
    }
    assert_eq!(streams.requested(), 20);
    // A block that was allocated on its own stream no longer waits. After it is freed again, it waits for a later
    // point.
    let again: Vec<u64> = (0..100).map(|_| memory.allocate_on(600, one).unwrap()).collect();
    assert!(again.iter().all(|block| blocks.contains(block)) && streams.requested() <= 120);
    again[..50].iter().for_each(|block| free(&memory, *block, 600, &[one, other]));
    streams.finish(one);
    check(&memory);
    let requested = streams.requested();
    memory.allocate(600).unwrap();
    // One query for each of the 200 blocks that still wait and the 50 that wait again, and one for the first block of
    // the other stream.
    assert_eq!((streams.requested() - requested, memory.cache_stats().waiting_blocks), (251, 50));
    streams.finish(other);
    memory.allocate(600).unwrap();
    check(&memory);
    assert_eq!(memory.cache_stats().waiting_blocks, 0);
}

/// Random histories: live blocks do not overlap, free neighbors are one block, a trim leaves no free segment,
/// and everything is freed in the end.
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
                    assert!(before.is_none_or(|(begin, len)| begin + len <= address), "seed {seed}, {step}");
                    assert!(after.is_none_or(|(begin, _)| address + len <= *begin), "seed {seed}, {step}");
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

/// Threads allocate and free concurrently. No thread finds bytes of another thread in its blocks.
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
                    // SAFETY: the bytes belong to this thread until it frees them.
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
