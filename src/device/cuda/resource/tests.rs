//! Tests of the wrappers over host memory; they need no GPU.

use std::sync::Arc;

use super::*;
use crate::error::Error;

/// Returns a pool, and the limit of `bytes_max` bytes behind the pool, which counts the bytes that the pool holds.
fn pool(bytes_max: u64) -> (Arc<LimitedMemory<HostMemory>>, Pool<Arc<LimitedMemory<HostMemory>>>) {
    let limited = Arc::new(LimitedMemory::new(HostMemory, bytes_max));
    (limited.clone(), Pool::new(limited))
}

fn free(memory: &impl MemoryResource, (address, len): (u64, u64)) -> Result<()> {
    // SAFETY: the tests free what they allocated; where they do not, a guard is in front.
    unsafe { memory.free(address, len) }
}

fn write(address: u64, bytes: &[u8]) {
    // SAFETY: the tests write to what they allocated, and to the canaries around it.
    unsafe { HostMemory.write(address, bytes) }.unwrap();
}

fn read(address: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    // SAFETY: same as `write`.
    unsafe { HostMemory.read(address, &mut bytes) }.unwrap();
    bytes
}

/// Returns a random number, by SplitMix64.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[test]
fn slabs_are_no_longer_than_the_limit() {
    let pool = Pool::with_slabs_up_to(4 << 20, HostMemory);
    let taken: Vec<u64> = (0..20).map(|_| pool.allocate(2 << 20).unwrap()).collect();
    // 2 MiB, then 4 MiB at a time: at most one block too many.
    assert_eq!((pool.stats().used_bytes, pool.stats().reserved_bytes), (40 << 20, 42 << 20));
    let long = pool.allocate(9 << 20).unwrap();
    assert_eq!(pool.stats().reserved_bytes, (42 << 20) + (10 << 20), "a single block, of its class");
    taken.into_iter().for_each(|address| free(&pool, (address, 2 << 20)).unwrap());
    free(&pool, (long, 9 << 20)).unwrap();
    assert_eq!(pool.trim().unwrap(), 52 << 20);
}

/// Allocating many blocks in one call gives the same result as many calls: no two blocks overlap, none is
/// lost, and all counts are the same.
#[test]
fn many_blocks_are_allocated_and_freed_concurrently() {
    for len in [100_u64, 16 << 10, 20 << 20] {
        let (taken, pool) = pool(if len > 1 << 20 { 200 << 20 } else { 30 << 20 });
        let block_len = len.max(256).next_multiple_of(256);
        let mut found: Vec<u64> = vec![7];
        pool.allocate_all(len, 5, &mut found).unwrap();
        // This thread frees blocks that another thread allocated, so they are in another shard.
        let freed = found.split_off(3);
        std::thread::scope(|scope| {
            let free_all = || {
                // SAFETY: allocated above, and nothing uses it.
                unsafe { pool.free_all(&freed, len, &mut |_, error| panic!("{error}")) };
            };
            scope.spawn(free_all).join().unwrap();
        });
        // More than the pool can hold: the blocks allocated before the failure are returned.
        let refused = pool.allocate_all(len, 1 << 20, &mut found);
        assert!(matches!(refused, Err(Error::OutOfMemory { .. })), "{refused:?}");
        assert_eq!(found.remove(0), 7);
        let stats = pool.stats();
        assert_eq!((stats.used_bytes, stats.reserved_bytes), (found.len() as u64 * block_len, taken.bytes()));
        assert_eq!(stats.hits + stats.misses, found.len() as u64 + 3);
        let mut sorted = found.clone();
        sorted.sort_unstable();
        assert!(sorted.windows(2).all(|pair| pair[0] + len <= pair[1]), "no two overlap");
        // SAFETY: allocated above, and nothing uses it.
        unsafe { pool.free_all(&found, len, &mut |_, error| panic!("{error}")) };
        assert_eq!((pool.stats().used_bytes, pool.trim().unwrap()), (0, stats.reserved_bytes));
    }
}

#[test]
fn million_allocations_do_not_grow_memory() {
    let (taken, pool) = pool(u64::MAX);
    let mut random = 1;
    let mut live: Vec<(u64, u64)> = Vec::new();
    let mut after_a_tenth = 0;
    for cycle in 0..1_000_000_u32 {
        // Lengths from one byte to 64 KiB, mostly short. Occasionally a block that needs a slab of its own.
        let power = next(&mut random) % 17;
        let len = if cycle % 10_000 == 0 { 20 << 20 } else { 1 + next(&mut random) % (1 << power) };
        live.push((pool.allocate(len).unwrap(), len));
        if live.len() > 1000 {
            let released = (next(&mut random) % live.len() as u64) as usize;
            free(&pool, live.swap_remove(released)).unwrap();
        }
        if cycle == 100_000 {
            after_a_tenth = taken.bytes();
        }
    }
    assert!(taken.bytes() <= after_a_tenth + after_a_tenth / 4, "{} after {after_a_tenth}", taken.bytes());
    let stats = pool.stats();
    assert_eq!((stats.reserved_bytes, stats.hits + stats.misses), (taken.bytes(), 1_000_000));
    assert!(stats.misses < 1000, "{stats:?}");
    live.into_iter().for_each(|block| free(&pool, block).unwrap());
    assert_eq!(pool.stats().used_bytes, 0);
    assert_eq!((pool.trim().unwrap(), taken.bytes()), (stats.reserved_bytes, 0));
}

#[test]
fn threads_share_free_memory_but_no_bytes() {
    let (taken, pool) = pool(u64::MAX);
    std::thread::scope(|scope| {
        for thread in 1..=4_u8 {
            let pool = &pool;
            scope.spawn(move || {
                let mut random = u64::from(thread);
                let mut live = Vec::new();
                for round in 0..20_000_usize {
                    let len = 1 + next(&mut random) % 600;
                    let address = pool.allocate(len).unwrap();
                    assert!(address.is_multiple_of(ALIGN));
                    write(address, &vec![thread; len as usize]);
                    live.push((address, len));
                    if live.len() > 50 {
                        let (address, len) = live.swap_remove(round % 50);
                        assert!(read(address, len as usize).iter().all(|byte| *byte == thread));
                        free(pool, (address, len)).unwrap();
                    }
                }
                live.into_iter().for_each(|block| free(pool, block).unwrap());
            });
        }
    });
    let held = taken.bytes();
    assert_eq!((pool.trim().unwrap(), taken.bytes()), (held, 0));
}

#[test]
fn freed_block_is_reused_by_other_thread() {
    let (taken, pool) = pool(2 << 20);
    // All blocks of the only slab that the limit allows.
    let blocks: Vec<u64> = (0..(2 << 20) / 256).map(|_| pool.allocate(256).unwrap()).collect();
    assert!(matches!(pool.allocate(256), Err(Error::OutOfMemory { .. })));
    std::thread::scope(|scope| {
        let freed = blocks.iter().map(|address| free(&pool, (*address, 256)));
        freed.collect::<Result<()>>().unwrap();
        let again =
            scope.spawn(|| blocks.iter().map(|_| pool.allocate(256).unwrap()).collect::<Vec<u64>>().len());
        assert_eq!(again.join().unwrap(), blocks.len());
    });
    assert_eq!((taken.bytes(), pool.stats().misses), (2 << 20, 1));
    blocks.into_iter().for_each(|address| free(&pool, (address, 256)).unwrap());
}

#[test]
fn only_empty_slabs_are_given_back() {
    let (taken, pool) = pool(u64::MAX);
    let blocks: Vec<u64> = (0..20_000).map(|_| pool.allocate(256).unwrap()).collect();
    let held = taken.bytes();
    assert_eq!(held, (2 + 4) << 20, "two slabs");
    // One block of the second slab stays.
    let (kept, freed) = blocks.split_last().unwrap();
    freed.iter().for_each(|address| free(&pool, (*address, 256)).unwrap());
    write(*kept, &[7; 256]);
    assert_eq!((pool.trim().unwrap(), taken.bytes()), (2 << 20, 4 << 20));
    // Free blocks of the remaining slab are still usable, and none of the freed slab is.
    let left = (4 << 20) / 256 - 1;
    let mut again: Vec<u64> = (0..left).map(|_| pool.allocate(256).unwrap()).collect();
    assert_eq!((taken.bytes(), pool.stats().reserved_bytes), (4 << 20, 4 << 20));
    again.push(pool.allocate(256).unwrap());
    assert!(taken.bytes() > 4 << 20, "all that is there is in use");
    again.iter().for_each(|address| write(*address, &[8; 256]));
    assert_eq!(read(*kept, 256), [7; 256]);
    again.into_iter().chain([*kept]).for_each(|address| free(&pool, (address, 256)).unwrap());
    let held = taken.bytes();
    assert_eq!((pool.trim().unwrap(), taken.bytes(), pool.trim().unwrap()), (held, 0, 0));
    assert_eq!(pool.stats().reserved_bytes, 0);
}

#[test]
fn shortage_shrinks_slab_before_failing() {
    let (taken, pool) = pool((2 + 2) << 20);
    let all: Vec<u64> = (0..2 * (2 << 20) / 1024).map(|_| pool.allocate(1024).unwrap()).collect();
    assert_eq!(taken.bytes(), 4 << 20, "the second slab would have been of 4 MiB");
    for len in [1024, 1 << 20, 1 << 30, u64::MAX] {
        let error = pool.allocate(len).unwrap_err();
        assert!(matches!(error, Error::OutOfMemory { .. }), "{len}: {error}");
    }
    let used = pool.stats().used_bytes;
    assert_eq!(used, 4 << 20, "a failed allocation is not counted");
    all.into_iter().for_each(|address| free(&pool, (address, 1024)).unwrap());
    // Idle memory of one class serves another after a trim.
    assert!(pool.allocate(4 << 20).is_err());
    assert_eq!(pool.trim().unwrap(), 4 << 20);
    let long = pool.allocate(4 << 20).unwrap();
    free(&pool, (long, 4 << 20)).unwrap();
}

#[test]
fn limit_is_exact_despite_failures() {
    let alone = LimitedMemory::new(HostMemory, 100);
    assert!(matches!(alone.allocate(101), Err(Error::OutOfMemory { len: 101, .. })));
    free(&alone, (alone.allocate(100).unwrap(), 100)).unwrap();
    let memory = LimitedMemory::new(LimitedMemory::new(HostMemory, 150), 200);
    let first = memory.allocate(100).unwrap();
    assert!(memory.allocate(101).is_err(), "over its own");
    assert!(memory.allocate(60).is_err(), "over the other's");
    assert_eq!(memory.bytes(), 100);
    let second = memory.allocate(50).unwrap();
    for block in [(first, 100), (second, 50)] {
        free(&memory, block).unwrap();
    }
    assert_eq!(memory.bytes(), 0);
}

/// Returns a guard in front of a stack with every other wrapper.
fn guarded() -> GuardedMemory<impl MemoryResource, HostMemory> {
    let driver = LoggedMemory::new(LimitedMemory::new(HostMemory, 64 << 20), "driver");
    GuardedMemory::new(LoggedMemory::new(Pool::new(driver), "pool"), HostMemory)
}

#[test]
fn guarded_memory_is_poisoned_on_allocate_and_free() {
    let memory = guarded();
    for len in [1, 63, 64, 100_000, 3 << 20] {
        let address = memory.allocate(len).unwrap();
        assert!(address.is_multiple_of(ALIGN));
        assert!(read(address, len as usize).iter().all(|byte| *byte == 0xDB), "{len} bytes, given");
        write(address, &vec![1; len as usize]);
        free(&memory, (address, len)).unwrap();
        // The pool keeps the memory, so the test can still read it.
        assert!(read(address, len as usize).iter().all(|byte| *byte == 0xDB), "{len} bytes, freed");
    }
    assert_eq!((memory.live(), memory.stats().used_bytes), (vec![], 0));
    assert!(memory.trim().unwrap() > 0);
}

#[test]
fn guard_detects_misuse_and_leaks() {
    type Misuse = fn(u64, u64) -> (u64, u64);
    let rows: [(&str, Misuse); 6] = [
        ("the byte 1 before them was written", |address, len| {
            write(address - 1, &[0]);
            (address, len)
        }),
        ("the byte 64 before them was written", |address, len| {
            write(address - 64, &[0]);
            (address, len)
        }),
        ("byte 0 past the end was written", |address, len| {
            write(address + len, &[0]);
            (address, len)
        }),
        ("byte 63 past the end was written", |address, len| {
            write(address + len + 63, &[0]);
            (address, len)
        }),
        ("are freed as 99", |address, _| (address, 99)),
        ("are freed and not allocated", |address, len| (address + 1, len)),
    ];
    for (found, misuse) in rows {
        let memory = guarded();
        let live = [memory.allocate(100).unwrap(), memory.allocate(200).unwrap()];
        let error = free(&memory, misuse(live[0], 100)).unwrap_err();
        assert!(error.to_string().contains(found), "{found}: {error}");
        free(&memory, (live[1], 200)).unwrap();
        let twice = free(&memory, (live[1], 200)).unwrap_err();
        assert!(twice.to_string().contains("freed and not allocated"), "{twice}");
    }
    let memory = guarded();
    let left = memory.allocate(5).unwrap();
    assert_eq!(memory.live(), [(left, 5)]);
    free(&memory, (left, 5)).unwrap();
}
