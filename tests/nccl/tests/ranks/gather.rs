//! Ranks that open replicas together load each page once, and give the same state as opens that load everything.

use std::path::Path;
use std::time::Duration;

use remanent::nccl::{Communicator, GatherMode, GatherReport, NcclError, Rank};
use remanent::options::{Compression, ImageOptions, MemoryOptions};
use remanent::{DeviceChoice, Error, Options, PageId, Place, Result, Store};
use tempfile::TempDir;

use crate::ground::{Ground, PATIENCE, SHORT, options};

const GPU: Place = Place::Device(0);

/// The lengths of the pages: a page longer than a round, many short ones, an empty one.
fn lens() -> impl Iterator<Item = u64> {
    [3_500_000, 0, 1]
        .into_iter()
        .chain((0..200).map(|number| 1000 + 137 * number))
        .chain([1_200_000, 700_001])
}

/// Returns bytes that occur nowhere else. Half of them are zeros, so that they can be compressed.
fn contents(number: usize, len: u64) -> Vec<u8> {
    let word = |at: u64| (at + 1 + ((number as u64) << 32)).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
    (0..len).map(|at| (word(at / 8) >> (8 * (at % 8)).min(63)) as u8).collect()
}

/// A replica: its directory, its options, and the expected contents of its pages.
struct Replica {
    folder: TempDir,
    compression: Compression,
    pages: Vec<(PageId, Vec<u8>)>,
}

impl Replica {
    /// Creates the store of a rank, with a verified snapshot and a batch after it.
    fn new(gpu: u32, compression: Compression) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = options_of(gpu, compression).open(folder.path()).unwrap();
        let mut batch = store.batch();
        let mut expected: Vec<Vec<u8>> =
            lens().enumerate().map(|(number, len)| contents(number, len)).collect();
        for (number, bytes) in expected.iter().enumerate() {
            let place = if number % 50 == 49 { Place::Pinned } else { GPU };
            batch.create_from(bytes.clone(), place);
        }
        let pages = store.commit(batch).unwrap().pages.to_vec();
        store.snapshot().unwrap();
        let mut batch = store.batch();
        batch.write(pages[0], 100, b"after the snapshot").write(pages[7], 0, b"too");
        store.commit(batch).unwrap();
        expected[0][100..118].copy_from_slice(b"after the snapshot");
        expected[7][..3].copy_from_slice(b"too");
        store.close().unwrap();
        Self { folder, compression, pages: pages.into_iter().zip(expected).collect() }
    }

    /// Opens the replica together with the other ranks.
    fn open(&self, communicator: &Communicator, mode: GatherMode) -> Result<Store> {
        let memory = MemoryOptions::new().gather(communicator, mode);
        options_of(communicator.gpu(), self.compression).memory(memory).open(self.folder.path())
    }

    fn check(&self, store: &Store) {
        for (page, expected) in &self.pages {
            assert!(store.read_to_vec(*page).unwrap() == *expected, "page {page}");
        }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }
}

fn options_of(gpu: u32, compression: Compression) -> Options {
    options().device(DeviceChoice::Cuda(gpu)).images(ImageOptions::new().compression(compression))
}

/// Runs `work` for each replica in a thread of its own.
fn each<T: Send>(
    communicators: &[Communicator],
    replicas: &[Replica],
    work: impl Fn(&Communicator, &Replica) -> T + Sync,
) -> Vec<T> {
    std::thread::scope(|scope| {
        let work = &work;
        let running: Vec<_> = communicators
            .iter()
            .zip(replicas)
            .map(|(communicator, replica)| scope.spawn(move || work(communicator, replica)))
            .collect();
        running.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn report(store: &Store) -> GatherReport {
    store.recovered().gather.clone().expect("the ranks have exchanged headers")
}

/// The pages on the GPU that have an image, and their bytes.
fn shared() -> (u64, u64) {
    let on_gpu = lens().enumerate().filter(|(number, len)| number % 50 != 49 && *len > 0);
    on_gpu.fold((0, 0), |(count, bytes), (_, len)| (count + 1, bytes + len))
}

#[test]
fn ranks_exchange_pages_so_that_each_is_loaded_once() {
    let Some((ground, _turn)) = Ground::get() else { return };
    let ranks = if ground.is_simulated() { 3 } else { 2 };
    for compression in [Compression::Off, Compression::Zstd] {
        let replicas: Vec<_> = (0..ranks).map(|gpu| Replica::new(gpu, compression)).collect();
        let communicators = ground.join(ranks, PATIENCE);
        let reports = each(&communicators, &replicas, |communicator, replica| {
            let store = replica.open(communicator, GatherMode::Always).unwrap();
            replica.check(&store);
            assert!(store.agrees(communicator).unwrap().is_equal());
            let mut batch = store.batch();
            batch.write(PageId(1), 0, b"the store continues");
            store.commit(batch).unwrap();
            report(&store)
        });
        let (pages, bytes) = shared();
        for report in &reports {
            assert_eq!(report.stopped, None);
            assert_eq!(report.loaded_pages + report.received_pages, pages);
            assert_eq!(report.loaded_bytes + report.received_bytes, bytes);
        }
        assert_eq!(reports.iter().map(|report| report.loaded_pages).sum::<u64>(), pages, "each page once");
    }
}

/// The bytes that a rank did not load came from another rank, and not from its own files: those are damaged.
#[test]
fn received_pages_are_not_read_from_disk() {
    let Some((ground, _turn)) = Ground::get() else { return };
    let replicas = [0, 1].map(|gpu| Replica::new(gpu, Compression::Off));
    // The last page is in the share of rank 1, so rank 0 does not read its own image of it.
    flip(replicas[0].path(), &replicas[0].pages.last().unwrap().1);
    let communicators = ground.join(2, PATIENCE);
    each(&communicators, &replicas, |communicator, replica| {
        let store = replica.open(communicator, GatherMode::Always).unwrap();
        assert_eq!(report(&store).stopped, None);
        replica.check(&store);
    });
    // Without the other rank the damage is found.
    let alone = options_of(0, Compression::Off).open(replicas[0].path());
    assert!(matches!(alone, Err(Error::Damaged(_))), "{alone:?}");
}

/// Flips a bit of an image, which is found by its bytes in the image files.
fn flip(store: &Path, bytes: &[u8]) {
    for entry in std::fs::read_dir(store.join("pages")).unwrap() {
        let path = entry.unwrap().path();
        let mut file = std::fs::read(&path).unwrap();
        let found = file.windows(64).position(|window| *window == bytes[bytes.len() - 64..]);
        if let Some(at) = found {
            file[at] ^= 1;
            std::fs::write(&path, file).unwrap();
            return;
        }
    }
    panic!("no image has these bytes");
}

#[test]
fn rank_that_cannot_load_its_share_stops_the_exchange() {
    let Some((ground, _turn)) = Ground::get() else { return };
    let replicas = [0, 1].map(|gpu| Replica::new(gpu, Compression::Off));
    // The last page is in the share of rank 1, whose image of it is damaged.
    flip(replicas[1].path(), &replicas[1].pages.last().unwrap().1);
    let communicators = ground.join(2, PATIENCE);
    let results = each(&communicators, &replicas, |communicator, replica| {
        let store = replica.open(communicator, GatherMode::Always)?;
        replica.check(&store);
        communicator.check()?;
        Ok::<_, Error>(report(&store))
    });
    let stopped = results[0].as_ref().unwrap().stopped.as_deref();
    assert_eq!(stopped, Some("rank 1 did not load its share"));
    assert!(matches!(results[1], Err(Error::Damaged(_))), "{:?}", results[1]);
}

#[test]
fn differing_replicas_load_all_pages_themselves() {
    let Some((ground, _turn)) = Ground::get() else { return };
    let replicas = [0, 1].map(|gpu| Replica::new(gpu, Compression::Off));
    let store = options_of(1, Compression::Off).open(replicas[1].path()).unwrap();
    let mut batch = store.batch();
    batch.write(replicas[1].pages[5].0, 3, b"!");
    store.commit(batch).unwrap();
    store.snapshot().unwrap();
    let mut batch = store.batch();
    batch.write(replicas[1].pages[5].0, 3, &replicas[1].pages[5].1[3..4]);
    store.commit(batch).unwrap();
    store.close().unwrap();
    let communicators = ground.join(2, PATIENCE);
    each(&communicators, &replicas, |communicator, replica| {
        let store = replica.open(communicator, GatherMode::Always).unwrap();
        let report = report(&store);
        assert_eq!(report.stopped.as_deref(), Some("the pages of rank 1 differ from those of rank 0"));
        assert_eq!(report.received_pages, 0);
        replica.check(&store);
    });
}

#[test]
fn exchange_is_skipped_on_slow_link_or_for_few_bytes() {
    let Some((ground, _turn)) = Ground::simulated() else { return };
    let replicas = [0, 1].map(|gpu| Replica::new(gpu, Compression::Off));
    let communicators = ground.join(2, PATIENCE);
    each(&communicators, &replicas, |communicator, replica| {
        let store = replica.open(communicator, GatherMode::IfFaster).unwrap();
        let stopped = report(&store).stopped.unwrap();
        assert_eq!(stopped, format!("the pages have only {} bytes", shared().1));
        replica.check(&store);
        drop(store);
        // Long enough to measure the link, which is far slower here than a link between GPUs.
        let store = options_of(communicator.gpu(), Compression::Off).open(replica.path()).unwrap();
        let mut batch = store.batch();
        batch.create_from(vec![7; 64 << 20], GPU);
        store.commit(batch).unwrap();
        store.snapshot().unwrap();
        store.close().unwrap();
        let store = replica.open(communicator, GatherMode::IfFaster).unwrap();
        let stopped = report(&store).stopped.unwrap();
        assert!(stopped.starts_with("the link between the ranks has "), "{stopped}");
        replica.check(&store);
    });
}

#[test]
fn rank_without_memory_for_a_round_stops_the_exchange() {
    let Some((ground, _turn)) = Ground::get() else { return };
    let replicas = [0, 1].map(|gpu| Replica::new(gpu, Compression::Off));
    let communicators = ground.join(2, PATIENCE);
    let on_gpu = shared().1;
    each(&communicators, &replicas, |communicator, replica| {
        for (left, stopped) in [(1 << 20, Some("rank 1 does not participate")), (3 << 20, None)] {
            let memory = MemoryOptions::new().gather(communicator, GatherMode::Always);
            let memory = if communicator.rank() == 1 { memory.budget(GPU, on_gpu + left) } else { memory };
            let options = options_of(communicator.gpu(), Compression::Off).memory(memory);
            let store = options.open(replica.path()).unwrap();
            assert_eq!(report(&store).stopped.as_deref(), stopped);
            replica.check(&store);
        }
    });
}

#[test]
fn failed_or_creating_open_is_reported_at_once() {
    let Some((ground, _turn)) = Ground::get() else { return };
    let replicas = [0, 1].map(|gpu| Replica::new(gpu, Compression::Off));
    let communicators = ground.join(2, PATIENCE);
    let new = tempfile::tempdir().unwrap();
    for is_refused in [false, true] {
        let started = std::time::Instant::now();
        each(&communicators, &replicas, |communicator, replica| {
            if communicator.rank() == 0 {
                let store = replica.open(communicator, GatherMode::Always).unwrap();
                assert_eq!(report(&store).stopped.as_deref(), Some("rank 1 does not participate"));
                replica.check(&store);
                return;
            }
            let memory = MemoryOptions::new().gather(communicator, GatherMode::Always);
            let options = options_of(1, Compression::Off).memory(memory);
            if is_refused {
                let refused = options.identity("another").open(replica.path());
                assert!(matches!(refused, Err(Error::Mismatch(_))), "{refused:?}");
            } else {
                options.open(new.path().join("store")).unwrap();
            }
        });
        assert!(started.elapsed() < PATIENCE / 2);
    }
}

#[test]
fn missing_rank_fails_the_open_which_then_succeeds() {
    let Some((ground, _turn)) = Ground::get() else { return };
    let replica = Replica::new(0, Compression::Off);
    let communicators = ground.join(2, SHORT);
    let error = replica.open(&communicators[0], GatherMode::Always).unwrap_err();
    let Error::Nccl(error) = error else { panic!("{error}") };
    assert!(matches!(*error, NcclError::TimedOut { rank: 0, call: "ncclAllGather", .. }), "{error}");
    // An aborted communicator fails at once.
    let aborted = replica.open(&communicators[0], GatherMode::Always);
    assert!(matches!(aborted, Err(Error::Nccl(_))), "{aborted:?}");
    drop(communicators);
    let store = options_of(0, Compression::Off).open(replica.path()).unwrap();
    replica.check(&store);
    assert_eq!(store.recovered().gather, None);
}

/// Each call of the library fails once in an open of two ranks: in the header, in the measurement, and in each round.
#[test]
fn failing_rank_in_any_round_leaves_correct_replicas() {
    let Some((ground, _turn)) = Ground::simulated() else { return };
    let replicas = [0, 1].map(|gpu| Replica::new(gpu, Compression::Off));
    let mut is_reached = true;
    let (mut round, mut attempts) = (0, 0);
    while is_reached {
        let communicators = ground.join(2, Duration::from_millis(300));
        ground.arm_nth("ncclAllGather", round + 1, 3);
        let results = each(&communicators, &replicas, |communicator, replica| {
            let store = replica.open(communicator, GatherMode::Always)?;
            replica.check(&store);
            Ok::<_, Error>(())
        });
        is_reached = ground.disarm();
        let is_late = !is_reached && results.iter().any(Result::is_err);
        for result in results {
            assert!(
                result.is_ok() != is_reached || matches!(result, Err(Error::Nccl(_))),
                "call {round}: {result:?}"
            );
        }
        drop(communicators);
        for (gpu, replica) in (0..).zip(&replicas) {
            replica.check(&options_of(gpu, Compression::Off).open(replica.path()).unwrap());
        }
        if is_late {
            // On a busy machine a rank reached its time limit before the call.
            attempts += 1;
            assert!(attempts < 50, "call {round} is never reached");
            is_reached = true;
            continue;
        }
        round += 1;
    }
    assert!(round > 6, "{round} calls");
}

#[test]
fn single_rank_opens_as_without_the_option() {
    let Some((ground, _turn)) = Ground::get() else { return };
    let replica = Replica::new(0, Compression::Off);
    let id = ground.nccl.unique_id().unwrap();
    let communicator = ground.nccl.join(&id, Rank::new(0, 1)).unwrap();
    let store = replica.open(&communicator, GatherMode::IfFaster).unwrap();
    assert_eq!(store.recovered().gather, None);
    replica.check(&store);
}

#[test]
fn communicator_of_another_gpu_is_refused() {
    let Some((ground, _turn)) = Ground::get() else { return };
    let replica = Replica::new(0, Compression::Off);
    let communicators = ground.join(2, SHORT);
    let memory = MemoryOptions::new().gather(&communicators[1], GatherMode::Always);
    let refused = options_of(0, Compression::Off).memory(memory).open(replica.path());
    assert!(matches!(refused, Err(Error::Unavailable(_))), "{refused:?}");
}
