//! Stores whose GPU pages are in blocks of a caching allocator that the caller's own work also uses.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use remanent::device::cuda::CudaDevice;
use remanent::device::cuda::resource::{
    CacheStats, CachingMemory, DriverMemory, LimitedMemory, MemoryResource,
};
use remanent::error::Refused;
use remanent::options::SnapshotSchedule;
use remanent::testing::sim_disk::SimDisk;
use remanent::{Ack, Error, Options, PageId, Place, Result, Store};

use super::PLACE;
use crate::faults::disk_full::until;
use crate::gpu::{self, Caller};
use crate::kill::workload::Random;

const MIB: u64 = 1 << 20;

/// A source of driver memory with a limit in bytes. It counts refused allocations.
struct Driver {
    limited: LimitedMemory<DriverMemory>,
    refusals: AtomicU64,
}

// SAFETY: the memory comes unchanged from the inner source.
unsafe impl MemoryResource for Driver {
    fn allocate(&self, len: u64) -> Result<u64> {
        self.limited.allocate(len).inspect_err(|_| _ = self.refusals.fetch_add(1, Ordering::Relaxed))
    }

    unsafe fn free(&self, address: u64, len: u64) -> Result<()> {
        // SAFETY: the caller upholds the contract of the called function.
        unsafe { self.limited.free(address, len) }
    }
}

type Cache = Arc<CachingMemory<Arc<Driver>>>;

/// Creates a cache of at most this number of bytes. Returns the memory source and the cache.
fn cache(bytes_max: u64) -> (Arc<Driver>, Cache) {
    let driver = || DriverMemory::of(0).expect("the GPU was there just now");
    let limited = LimitedMemory::new(driver(), bytes_max);
    let source = Arc::new(Driver { limited, refusals: AtomicU64::new(0) });
    (source.clone(), Arc::new(CachingMemory::with_streams(source, Arc::new(driver()))))
}

fn open(disk: &SimDisk, memory: &Cache) -> Store {
    let gpu = CudaDevice::open_with(0, memory.clone()).unwrap();
    let options = Options::new().snapshots(SnapshotSchedule::never()).ack(Ack::Applied);
    Store::open_on(Arc::new(disk.clone()), Arc::new(gpu), options).unwrap()
}

/// Creates pages of these lengths, each filled with the given byte.
fn create(store: &Store, pages: &[(u64, u8)]) -> Result<Vec<PageId>> {
    let mut batch = store.batch();
    for (len, byte) in pages {
        let page = batch.create(*len, PLACE).page();
        batch.fill(page, 0, *len, &[*byte]);
    }
    Ok(store.commit(batch)?.pages)
}

/// Deletes pages. Waits until their memory has returned to the cache, which then has `left` blocks.
fn delete(store: &Store, memory: &Cache, pages: &[PageId], left: u64) {
    let mut batch = store.batch();
    pages.iter().for_each(|page| _ = batch.delete(*page));
    store.commit(batch).unwrap();
    until(|| {
        // An allocation frees memory that the lanes no longer use.
        drop(store.device_bytes(1, Place::Pinned).unwrap());
        memory.cache_stats().blocks == left
    });
}

fn content(store: &Store, page: PageId) -> Vec<u8> {
    store.read_to_vec(page).unwrap()
}

/// Random operations create, write, resize and delete pages, and take snapshots. No two pages share a byte,
/// the store and its next open read the written bytes, and at the end all memory is released to the driver.
#[test]
fn pages_in_cached_blocks_survive_reopen() {
    let Some(_) = gpu::device() else { return };
    for seed in 0..2 {
        let (disk, mut random) = (SimDisk::new(), Random(seed));
        let mut expected: BTreeMap<PageId, Vec<u8>> = BTreeMap::new();
        for opening in 0..3 {
            let (driver, memory) = cache(u64::MAX);
            let store = open(&disk, &memory);
            for (page, bytes) in &expected {
                assert!(content(&store, *page) == *bytes, "seed {seed}, opening {opening}, page {page}");
            }
            for step in 0..25_u8 {
                let mut batch = store.batch();
                let picked =
                    expected.keys().nth(random.below(expected.len().max(1) as u64) as usize).copied();
                match (random.below(8), picked) {
                    (0..4, _) | (_, None) => {
                        // Choose lengths of blocks in short and in long segments.
                        let bound = [600, 5000, 100_000, MIB + 300_000][random.below(4) as usize];
                        let bytes = vec![step; 1 + random.below(bound) as usize];
                        batch.create_from(bytes.clone(), PLACE);
                        expected.insert(store.commit(batch).unwrap().pages[0], bytes);
                    }
                    (4, Some(page)) => {
                        batch.delete(page);
                        store.commit(batch).unwrap();
                        expected.remove(&page);
                    }
                    (5, Some(page)) => {
                        let bytes = expected.get_mut(&page).unwrap();
                        bytes.resize(1 + random.below(200_000) as usize, 0);
                        batch.resize(page, bytes.len() as u64);
                        store.commit(batch).unwrap();
                    }
                    (6, Some(page)) => {
                        let bytes = expected.get_mut(&page).unwrap();
                        let (at, len) = (random.below(bytes.len() as u64) as usize, bytes.len());
                        bytes[at..].fill(!step);
                        batch.fill(page, at as u64, (len - at) as u64, &[!step]);
                        store.commit(batch).unwrap();
                    }
                    _ => _ = store.snapshot().unwrap(),
                }
            }
            for (page, bytes) in &expected {
                assert!(content(&store, *page) == *bytes, "seed {seed}, opening {opening}, page {page}");
            }
            let leases: Vec<_> = expected.keys().map(|page| store.lease(*page).unwrap()).collect();
            let mut ranges: Vec<(u64, u64)> =
                leases.iter().map(|lease| (lease.address().unwrap(), lease.byte_len())).collect();
            ranges.sort_unstable();
            let overlap = ranges.windows(2).find(|two| two[0].0 + two[0].1 > two[1].0);
            assert_eq!(overlap, None, "seed {seed}, opening {opening}");
            drop(leases);
            let stats = memory.cache_stats();
            let bytes: u64 = expected.values().map(|bytes| bytes.len() as u64).sum();
            assert!(stats.blocks >= expected.len() as u64 && stats.allocated_bytes >= bytes, "{stats:?}");
            assert_eq!(stats.reserved_bytes, driver.limited.bytes());
            store.close().unwrap();
            let stats = memory.cache_stats();
            assert_eq!((stats.blocks, stats.allocated_bytes, stats.waiting_blocks), (0, 0, 0), "{stats:?}");
            assert_eq!((memory.trim().unwrap(), driver.limited.bytes()), (stats.reserved_bytes, 0));
        }
    }
}

#[test]
fn counts_peaks_and_fragmentation_match_pages() {
    let Some(_) = gpu::device() else { return };
    let (driver, memory) = cache(u64::MAX);
    let store = open(&SimDisk::new(), &memory);
    let counts = |stats: CacheStats| {
        [stats.segments, stats.blocks, stats.free_blocks, stats.free_bytes, stats.free_longest_bytes]
    };
    assert_eq!(counts(memory.cache_stats()), [0; 5], "a store without pages");
    let lens = [512, 513, MIB, MIB + 1, 10 * MIB, 11 * MIB + 1];
    let pages = create(&store, &lens.map(|len| (len, 1))).unwrap();
    let stats = memory.cache_stats();
    // The remainder of the last block's segment is too short for another block.
    let blocks = [512, 1024, MIB, MIB + 512, 10 * MIB, 12 * MIB];
    let (allocated, reserved) = (blocks.iter().sum::<u64>(), (2 + 20 + 12) * MIB);
    assert_eq!((stats.allocated_bytes, stats.reserved_bytes), (allocated, reserved));
    let rests = [MIB - 1536, 9 * MIB - 512];
    assert_eq!(counts(stats), [3, 6, 2, rests[0] + rests[1], rests[1]]);
    delete(&store, &memory, &pages[1..5], 2);
    let stats = memory.cache_stats();
    assert_eq!(counts(stats), [3, 2, 2, 22 * MIB - 512, 20 * MIB]);
    assert!((stats.fragmentation() - 2.0 / 22.0).abs() < 1e-3, "{}", stats.fragmentation());
    assert_eq!((stats.allocated_peak_bytes, stats.reserved_peak_bytes), (allocated, reserved));
    memory.reset_peaks();
    store.trim().unwrap();
    let stats = memory.cache_stats();
    assert_eq!((stats.allocated_peak_bytes, stats.reserved_peak_bytes), (12 * MIB + 512, reserved));
    assert_eq!((stats.reserved_bytes, driver.limited.bytes()), (14 * MIB, 14 * MIB));
    let of_store = store.stats().device_memory.into_iter().find(|(place, _)| *place == PLACE);
    let of_store = of_store.expect("the GPU's memory").1;
    assert_eq!((of_store.used_bytes, of_store.reserved_bytes), (12 * MIB + 512, 14 * MIB));
}

/// Freed memory that work on a stream may still use is reused only for later work on the same stream, until
/// the driver reports that the stream has completed the work.
#[test]
fn page_never_gets_block_in_use_by_stream() {
    const LEN: u64 = 12 * MIB;
    gpu::alone(|| {
        let Some(caller) = Caller::new() else { return };
        let (driver, memory) = cache(u64::MAX);
        let store = open(&SimDisk::new(), &memory);
        // Run operations that may wait for the whole GPU once before a stream is blocked.
        let warm = create(&store, &[(LEN, 1), (LEN, 2), (LEN, 3)]).unwrap();
        assert!(content(&store, warm[2]) == vec![3; LEN as usize]);
        delete(&store, &memory, &warm, 0);
        let [one, other] = [(); 2].map(|()| caller.stream());
        let source = caller.memory(LEN);

        let block = memory.allocate_on(LEN, one.raw()).unwrap();
        let hold = one.hold();
        one.copy(block, source.address, LEN);
        // SAFETY: the work that uses the block is on this stream.
        unsafe { memory.free_on(block, LEN, &[one.raw()]) }.unwrap();
        let pages = create(&store, &[(LEN, 5)]).unwrap();
        let addresses = |page| store.lease(page).unwrap().address().unwrap();
        assert_ne!(addresses(pages[0]), block, "the stream's copy would land in the page");
        let elsewhere = memory.allocate_on(LEN, other.raw()).unwrap();
        assert_ne!(elsewhere, block);
        assert_eq!(memory.cache_stats().waiting_blocks, 1);
        let again = memory.allocate_on(LEN, one.raw()).unwrap();
        assert_eq!(again, block, "later work on the stream comes after the copy");
        // If two streams use a block, both must have completed their work.
        one.copy(block, source.address, LEN);
        // SAFETY: the work that uses the block is on these streams.
        unsafe { memory.free_on(block, LEN, &[one.raw(), other.raw()]) }.unwrap();
        other.synchronize();
        assert!(!one.is_done() && memory.allocate_on(LEN, other.raw()).unwrap() != block);
        hold.let_go();
        one.synchronize();
        let pages = [pages[0], create(&store, &[(LEN, 6)]).unwrap()[0]];
        assert_eq!(addresses(pages[1]), block, "a page of the store's, once the copy is done");
        for (page, byte) in pages.into_iter().zip([5, 6]) {
            assert!(content(&store, page) == vec![byte; LEN as usize], "page {page}");
        }
        assert_eq!(memory.cache_stats().waiting_blocks, 0);
        assert_eq!(driver.refusals.load(Ordering::Relaxed), 0);
    });
}

/// While a graph is being captured, no event can mark a point in its stream, so memory that the graph uses is
/// not reused.
#[test]
fn block_in_captured_graph_is_not_reclaimed() {
    gpu::alone(|| {
        let Some(caller) = Caller::new() else { return };
        let (_, memory) = cache(u64::MAX);
        let stream = caller.stream();
        let block = memory.allocate_on(MIB, stream.raw()).unwrap();
        let capture = stream.capture();
        // SAFETY: no work uses the block.
        let refused = unsafe { memory.free_on(block, MIB, &[stream.raw()]) }.unwrap_err();
        assert!(matches!(refused, Error::Refused(Refused::Stream { .. })), "{refused}");
        let stats = memory.cache_stats();
        assert_eq!((stats.blocks, stats.waiting_blocks), (1, 0), "it is still the caller's");
        drop(capture.end());
        // SAFETY: no work uses the block.
        unsafe { memory.free_on(block, MIB, &[stream.raw()]) }.unwrap();
        stream.synchronize();
        assert_eq!(memory.trim().unwrap(), 2 * MIB);
    });
}

#[test]
fn trim_returns_memory_to_driver() {
    const LEN: u64 = 512 * MIB;
    gpu::alone(|| {
        let Some(caller) = Caller::new() else { return };
        let (driver, memory) = cache(u64::MAX);
        let store = open(&SimDisk::new(), &memory);
        let pages = create(&store, &[(12 * MIB, 1), (5000, 2)]).unwrap();
        let page = store.lease(pages[0]).unwrap().address().unwrap();
        let block = memory.allocate(LEN).unwrap();
        store.trim().unwrap();
        assert_eq!(driver.limited.bytes(), LEN + 14 * MIB, "all of it is in use");
        delete(&store, &memory, &pages[..1], 2);
        // SAFETY: the block was allocated above, and no work uses it.
        unsafe { memory.free(block, LEN) }.unwrap();
        let (held, free) = (driver.limited.bytes(), caller.free_bytes());
        assert!(held == LEN + 14 * MIB && caller.knows(page) && caller.knows(block), "{held} in the cache");
        // A trim also frees the store's pinned memory.
        assert!(store.trim().unwrap() >= LEN + 12 * MIB);
        assert_eq!(driver.limited.bytes(), 2 * MIB);
        assert!(!caller.knows(page) && !caller.knows(block), "the driver has them back");
        // Other processes may use the GPU concurrently, but not that much of its memory.
        assert!(caller.free_bytes() >= free + LEN / 2, "{free} and then {} free", caller.free_bytes());
        assert!(content(&store, pages[1]) == vec![2; 5000], "the other page's segment stays");
    });
}

/// When the driver has no memory left, the cache releases its free blocks. If that is not sufficient, the
/// allocation fails with an error, and no block changes.
#[test]
fn refused_allocation_first_empties_cache() {
    let Some(_) = gpu::device() else { return };
    let (driver, memory) = cache(64 * MIB);
    let store = open(&SimDisk::new(), &memory);
    let refusals = || driver.refusals.load(Ordering::Relaxed);
    let pages = create(&store, &[(20 * MIB, 1), (24 * MIB, 2), (700, 3)]).unwrap();
    delete(&store, &memory, &pages[..2], 1);
    assert_eq!((driver.limited.bytes(), refusals()), (46 * MIB, 0));
    let long = create(&store, &[(40 * MIB, 4)]).unwrap()[0];
    assert_eq!((driver.limited.bytes(), refusals()), (42 * MIB, 1), "refused once, and asked again");
    assert!(content(&store, long) == vec![4; 40 * MIB as usize]);
    // The second length exceeds the memory of any GPU.
    for len in [24 * MIB, 1 << 40] {
        let before = refusals();
        let refused = create(&store, &[(len, 5)]).unwrap_err();
        assert!(
            matches!(refused, Error::OutOfMemory { place: PLACE, len: requested } if requested == len),
            "{refused}"
        );
        assert!(refusals() > before);
    }
    delete(&store, &memory, &[long], 1);
    let again = create(&store, &[(24 * MIB, 6)]).unwrap()[0];
    assert!(content(&store, again) == vec![6; 24 * MIB as usize]);
    assert!(content(&store, pages[2]) == vec![3; 700], "a page from before");

    // The driver itself refuses this allocation.
    let (driver, memory) = cache(u64::MAX);
    let store = open(&SimDisk::new(), &memory);
    let pages = create(&store, &[(12 * MIB, 1)]).unwrap();
    delete(&store, &memory, &pages, 0);
    let refused = create(&store, &[(1 << 40, 5)]).unwrap_err();
    assert!(matches!(refused, Error::OutOfMemory { place: PLACE, len } if len == 1 << 40), "{refused}");
    assert_eq!(driver.limited.bytes(), 0, "what was cached is the driver's again");
}
