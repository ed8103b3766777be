//! Background snapshots. No test depends on elapsed time: tests control the growth of the log, and an event
//! reports the end of each snapshot.

use std::sync::Arc;
use std::time::Duration;

use remanent::device::host::HostDevice;
use remanent::error::{FileName, Invalid};
use remanent::options::{ImageOptions, LogOptions, SnapshotSchedule};
use remanent::snapshot::SnapshotPhase;
use remanent::testing::sim_disk::SimDisk;
use remanent::{Ack, Error, Lsn, Options, PageId, Place, SnapshotOptions, StatePoint, Store};

use crate::faults::disk_full::{is_held, until};
use crate::faults::watched;
use crate::interrupted_reads::InterruptedDisk;
use crate::with_options::With;

/// A year, which is longer than any test runs.
const NEVER: Duration = Duration::from_secs(365 * 24 * 3600);

fn options() -> Options {
    Options::new().log(LogOptions::new().segment_len(16 << 10)).snapshots(SnapshotSchedule::never())
}

fn open(disk: &SimDisk, options: Options) -> Store {
    Store::open_on(Arc::new(disk.clone()), Arc::new(HostDevice::new()), options).unwrap()
}

fn commit(store: &Store, value: u8) -> Lsn {
    let mut batch = store.batch();
    if store.lsn() == Lsn(0) {
        let page = batch.create(4000, Place::Host).page();
        batch.write(page, 0, &[value; 4000]);
    } else {
        batch.write(PageId(1), 0, &[value; 4000]);
    }
    store.commit(batch).unwrap().position.lsn
}

fn commits(store: &Store, count: u8) {
    (0..count).for_each(|value| assert!(commit(store, value) > Lsn(0)));
}

#[test]
fn grown_log_triggers_snapshot() {
    let disk = SimDisk::new();
    let store = open(&disk, options().with(|options| options.snapshots.log_bytes = Some(20_000)));
    let mut ended = 0;
    for round in 1..=4 {
        // Fewer than five frames of 4 KiB do not suffice. After five frames, a snapshot is taken.
        for value in 0..5 {
            assert_eq!(store.stats().snapshots.taken, ended);
            commit(&store, value);
        }
        ended += 1;
        store.wait_for_snapshots(ended);
        let stats = store.stats().snapshots;
        assert_eq!((stats.taken, stats.failed, stats.phase), (ended, 0, SnapshotPhase::Idle), "{stats:?}");
        assert_eq!((stats.pages_done, stats.pages_total, stats.bytes_done), (1, 1, 4000));
        let newest = store.snapshots().pop().unwrap();
        assert_eq!((newest.end, newest.verified), (Lsn(5 * round), true));
        assert!(matches!(stats.last, Some(Ok(id)) if id == newest.id), "{stats:?}");
    }
    // Two snapshots are kept, and the log after the older of them.
    assert_eq!(store.snapshots().len(), 2);
    store.close().unwrap();
    let store = open(&disk, options());
    assert!(store.recovered().replayed_batches <= 1, "{:?}", store.recovered());
}

#[test]
fn snapshot_interval_requires_a_commit() {
    let store =
        open(&SimDisk::new(), options().with(|options| options.snapshots.interval = Some(Duration::ZERO)));
    commit(&store, 1);
    store.wait_for_snapshots(1);
    // The frames of the snapshot itself and idle seals lengthen the log but do not trigger a snapshot. Only
    // the commit triggers the second snapshot.
    for lsn in 2..6 {
        assert_eq!(commit(&store, 2), Lsn(lsn));
        store.wait_for_snapshots(lsn);
        assert_eq!(store.snapshots().pop().unwrap().end, Lsn(lsn));
        assert_eq!(store.stats().snapshots.taken, lsn);
    }
}

#[test]
fn replayed_bytes_count_toward_snapshot() {
    let disk = SimDisk::new();
    let store = open(&disk, options());
    for value in 0..6 {
        commit(&store, value);
    }
    assert_eq!(store.stats().snapshots.taken, 0);
    drop(store);
    let store = open(
        &disk,
        options().with(|options| {
            options.snapshots.log_bytes = Some(20_000);
            options.snapshots.interval = Some(NEVER);
        }),
    );
    store.wait_for_snapshots(1);
    assert_eq!(store.snapshots().pop().unwrap().end, Lsn(6));
}

/// A manual snapshot resets the log growth that triggers a background snapshot.
#[test]
fn manual_snapshot_resets_log_growth() {
    let store = open(&SimDisk::new(), options().with(|options| options.snapshots.log_bytes = Some(20_000)));
    // Repeat, because the background thread may notice a trigger late.
    for taken in 1..=20 {
        commits(&store, 4);
        store.snapshot().unwrap();
        assert_eq!(store.stats().snapshots.taken, taken);
    }
    commits(&store, 5);
    store.wait_for_snapshots(21);
    assert_eq!(store.snapshots().pop().unwrap().end, Lsn(85));
}

/// A background snapshot is triggered while the caller takes a snapshot. The caller's snapshot covers most of
/// the log growth, so no background snapshot follows.
#[test]
fn long_manual_snapshot_is_not_followed_by_needless_one() {
    const ROUNDS: u64 = 20;
    const LEN: u64 = 16 << 20;
    let store = open(
        &SimDisk::new(),
        options().with(|options| {
            options.log.segment_len = 1 << 20;
            options.snapshots.log_bytes = Some(16 * 4096);
        }),
    );
    commit(&store, 0);
    let mut batch = store.batch();
    batch.create(LEN, Place::Host);
    let page = store.commit(batch).unwrap().pages[0];
    for round in 1..=ROUNDS {
        let mut batch = store.batch();
        batch.fill(page, 0, LEN, &[round as u8]);
        store.commit(batch).unwrap();
        std::thread::scope(|scope| {
            let snapshot = scope.spawn(|| store.snapshot().unwrap());
            while store.stats().snapshots.phase == SnapshotPhase::Idle && !snapshot.is_finished() {
                std::thread::yield_now();
            }
            // Log growth after the start of the snapshot. It triggers another snapshot only if the thread
            // ignores the current one.
            commits(&store, 10);
        });
        assert_eq!(store.stats().snapshots.taken, round);
    }
    // These commits trigger a snapshot. None was taken since the last manual snapshot.
    commits(&store, 10);
    store.wait_for_snapshots(ROUNDS + 1);
    let stats = store.stats().snapshots;
    assert_eq!((stats.taken, stats.failed), (ROUNDS + 1, 0), "{stats:?}");
    assert!(store.snapshots().pop().unwrap().end > Lsn(ROUNDS * 11 + 2));
}

#[test]
fn full_disk_is_reported_and_retried() {
    let disk = SimDisk::new();
    // Each commit triggers a snapshot. After a failure, the thread retries when the log has grown by an
    // eighth of the trigger. An idle seal is shorter than that.
    let rules = options().with(|options| {
        options.snapshots.log_bytes = Some(4000);
        options.snapshots.interval = Some(NEVER);
        options.log = LogOptions::new().segment_len(1 << 20).reserve_bytes(4 << 20);
    });
    let store = open(&disk, rules);
    commit(&store, 0);
    store.wait_for_snapshots(1);
    // Until the spare segments for opens exist, commits can fail on a full disk. The disk stays full even if
    // a segment under construction is discarded.
    until(|| is_held(&disk, 4));
    disk.set_capacity(Some(0));
    commit(&store, 1);
    store.wait_for_snapshots(2);
    let stats = store.stats().snapshots;
    assert_eq!((stats.taken, stats.failed), (1, 1));
    assert!(matches!(stats.last, Some(Err(Error::DiskFull { .. }))), "{stats:?}");
    // A failed snapshot does not block commits, and the next commit makes the thread retry.
    disk.set_capacity(None);
    commit(&store, 2);
    store.wait_for_snapshots(3);
    let stats = store.stats().snapshots;
    assert_eq!((stats.taken, stats.failed), (2, 1), "{stats:?}");
    assert_eq!(store.snapshots().pop().unwrap().end, Lsn(3));
    store.close().unwrap();
}

/// At one byte per second, a snapshot would take an hour. Closing the store cancels the snapshot and loses no
/// data.
#[test]
fn close_cancels_slow_snapshot() {
    let disk = SimDisk::new();
    let slow = options().with(|options| {
        options.snapshots.log_bytes = Some(20_000);
        options.snapshots.bytes_per_second = Some(1);
    });
    let store = open(&disk, slow.clone().ack(Ack::Durable));
    commits(&store, 5);
    let stats = loop {
        let stats = store.stats().snapshots;
        if stats.pages_done > 0 {
            break stats;
        }
        std::thread::yield_now();
    };
    assert_eq!((stats.phase, stats.taken), (SnapshotPhase::Gather, 0));
    commit(&store, 9);
    store.close().unwrap();
    let store = open(&disk, options());
    assert_eq!((store.recovered().position.lsn, store.snapshots().len()), (Lsn(6), 0));
    // A snapshot requested by the caller is not rate-limited.
    drop(store);
    let store = open(&disk, slow.with(|options| options.snapshots.log_bytes = None));
    assert_eq!(store.snapshot().unwrap().end, Lsn(6));
}

/// The images and the manifest are long enough to be written in several parts.
#[test]
fn background_snapshot_is_verified_by_its_writer_thread() {
    let disk = SimDisk::new();
    let watched = Arc::new(InterruptedDisk::never(&disk));
    let rules = options().images(ImageOptions::new().chunk_len(16 << 10)).with(|options| {
        options.log.segment_len = 1 << 20;
        options.snapshots.log_bytes = Some(1 << 20);
    });
    let store = Store::open_on(watched.clone(), Arc::new(HostDevice::new()), rules).unwrap();
    watched.bypassing_cache();
    let mut batch = store.batch();
    for _ in 0..20_000 {
        let page = batch.create(64, Place::Host).page();
        batch.write(page, 0, &[1; 64]);
    }
    store.commit(batch).unwrap();
    store.wait_for_snapshots(1);
    assert_eq!(store.stats().snapshots.taken, 1);
    assert!(disk.bytes(FileName::Manifest(1)).unwrap().len() > 3 << 20);
    assert_eq!(watched.bypassing_cache().len(), 1);
    store.close().unwrap();
}

/// Returns a store with a running background snapshot that would take an hour.
fn with_a_slow_snapshot() -> Store {
    let slow = options().with(|options| {
        options.snapshots.log_bytes = Some(20_000);
        options.snapshots.bytes_per_second = Some(1);
    });
    let store = open(&SimDisk::new(), slow);
    commits(&store, 5);
    while store.stats().snapshots.pages_done == 0 {
        std::thread::yield_now();
    }
    store
}

#[test]
fn query_does_not_wait_for_snapshot() {
    watched("a query", || {
        let store = with_a_slow_snapshot();
        assert_eq!(store.snapshots(), []);
        let pruned = store.would_prune(&store.retention()).unwrap();
        assert_eq!(
            (pruned.snapshots.len(), pruned.files.len()),
            (0, 0),
            "what is being written stays: {pruned:?}"
        );
        let stats = store.stats().snapshots;
        assert_eq!((stats.phase, stats.taken), (SnapshotPhase::Gather, 0), "it is being written still");
    });
}

#[test]
fn waiting_caller_lifts_snapshot_rate_limit() {
    type Call = fn(&Store) -> remanent::Result<()>;
    let calls: [(&str, Call); 8] = [
        ("snapshot", |store| store.snapshot().map(drop)),
        ("publish_snapshot", |store| store.snapshot_with(SnapshotOptions::new().only_published()).map(drop)),
        ("snapshot_named", |store| store.snapshot_with(SnapshotOptions::new().name("name")).map(drop)),
        ("prune", |store| store.prune(&store.retention()).map(drop)),
        ("restore_to", |store| store.restore(StatePoint::Lsn(Lsn(3))).map(drop)),
        ("audit", |store| store.audit().map(drop)),
        ("scrub", |store| store.scrub().map(drop)),
        ("wait_verified", |store| store.wait_verified()),
    ];
    for (name, call) in calls {
        watched(name, move || {
            let store = with_a_slow_snapshot();
            call(&store).unwrap();
            assert!(store.stats().snapshots.taken > 0, "{name}: the slow one is finished, not given up");
            store.close().unwrap();
        });
    }
}

#[test]
fn zero_snapshot_rate_is_refused() {
    let refused =
        Options::new().snapshots(SnapshotSchedule::new().bytes_per_second(0)).open_temporary().unwrap_err();
    assert!(
        matches!(refused, Error::Invalid(Invalid::Option { option: "snapshots.bytes_per_second", .. })),
        "{refused}"
    );
}
