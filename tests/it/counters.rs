//! Counters of device work are exact, and equal on every device.

use std::sync::Arc;

use remanent::batch::Width;
use remanent::device::host::HostDevice;
use remanent::device::multi::MultiDevice;
use remanent::device::{Device, Lane};
use remanent::options::{LogOptions, SnapshotSchedule};
use remanent::stats::{AllocationStats, LaneStats, Stats};
use remanent::testing::faulty_device::{DeviceCall, DeviceFault, FaultyDevice};
use remanent::testing::late_device::LateDevice;
use remanent::testing::sim_disk::SimDisk;
use remanent::{Ack, Error, Options, PageId, Place, Store, WriteBatch};

use crate::gpu;

const PLACE: Place = Place::Device(0);
const LEN: u64 = 5000;

fn options() -> Options {
    let options = Options::new().ack(Ack::Applied).log(LogOptions::new().segment_len(64 << 10));
    options.snapshots(SnapshotSchedule::never())
}

fn open(device: Arc<dyn Device>) -> Store {
    Store::open_on(Arc::new(SimDisk::new()), device, options()).unwrap()
}

fn host() -> Arc<dyn Device> {
    Arc::new(HostDevice::new())
}

fn commit(store: &Store, build: impl FnOnce(&mut WriteBatch)) -> Vec<PageId> {
    let mut batch = store.batch();
    build(&mut batch);
    store.commit(batch).unwrap().pages
}

/// Returns the number of copies from one place to another, and the number of copied bytes.
fn moved(stats: &Stats, from: Place, to: Place) -> (u64, u64) {
    let moved = stats.transfers.iter().find(|moved| (moved.from, moved.to) == (from, to));
    moved.map_or((0, 0), |moved| (moved.pages, moved.bytes))
}

fn allocations(stats: &Stats, place: Place) -> AllocationStats {
    let found = stats.allocations.iter().find(|(of, _)| *of == place);
    found.map_or(AllocationStats::default(), |(_, stats)| *stats)
}

fn lane(stats: &Stats, lane: Lane) -> LaneStats {
    stats.lanes.iter().find(|(of, _)| *of == lane).unwrap().1
}

/// Runs a workload. Returns the copies that it must make: source and target place, number of ranges, number
/// of bytes.
fn workload(store: &Store, far: Place) -> Vec<(Place, Place, u64, u64)> {
    let page = commit(store, |batch| {
        let page = batch.create(LEN, PLACE).page();
        batch.write(page, 0, &[1; 100]).scatter(page, Width::W4, &[50, 60], &[2; 8]);
    })[0];
    // A fill runs at the place of the page and is not a transfer.
    commit(store, |batch| _ = batch.fill(page, 1000, 100, &[3]).move_to(page, far));
    commit(store, |batch| _ = batch.write(page, 0, &[4; 7]).resize(page, LEN + 1));
    let stats = store.stats();
    let mut rows: Vec<_> =
        stats.transfers.iter().map(|row| (row.from, row.to, row.pages, row.bytes)).collect();
    rows.sort_unstable_by_key(|row| (row.0, row.1));
    rows
}

#[test]
fn every_device_counts_the_bytes_of_deltas_and_moves() {
    let far = Place::Pinned;
    // The sparse delta counts as the range from the start of the page to its last element.
    let expected = [
        (Place::Host, PLACE, 2, 100 + 244),
        (Place::Host, far, 1, 7),
        (PLACE, far, 1, LEN),
        (far, far, 1, LEN),
    ];
    let mut expected = expected.to_vec();
    expected.sort_unstable_by_key(|row| (row.0, row.1));
    let mut devices: Vec<Arc<dyn Device>> = vec![
        host(),
        Arc::new(LateDevice::new(host())),
        Arc::new(FaultyDevice::across_a_bus(host())),
        Arc::new(MultiDevice::new(vec![host(), host()])),
    ];
    devices.extend(gpu::device().map(|gpu| gpu as Arc<dyn Device>));
    for device in devices {
        let store = open(device.clone());
        assert_eq!(workload(&store, far), expected, "{}", device.label());
        let stats = store.stats();
        // The create, the move and the resize make one allocation each.
        assert_eq!(allocations(&stats, PLACE).allocations, 1, "{}", device.label());
        assert_eq!(allocations(&stats, far).allocations, 2, "{}", device.label());
        store.trim().unwrap();
        let stats = store.stats();
        assert_eq!((allocations(&stats, PLACE).frees, allocations(&stats, far).frees), (1, 1));
        assert!(lane(&stats, Lane::Apply).lists >= 3);
        assert_eq!(lane(&stats, Lane::Apply).queued, 0, "every list was seen to end");
    }
}

#[test]
fn places_of_several_devices_are_distinguished() {
    let store = open(Arc::new(MultiDevice::new(vec![host(), host()])));
    let other = Place::Device(1);
    let page = commit(&store, |batch| _ = batch.create_from(vec![1; 300], PLACE))[0];
    store.ensure(&[page], other).unwrap();
    commit(&store, |batch| _ = batch.write(page, 0, &[2; 9]));
    let stats = store.stats();
    assert_eq!(moved(&stats, Place::Host, PLACE), (1, 300));
    assert_eq!(moved(&stats, PLACE, other), (1, 300));
    assert_eq!(moved(&stats, Place::Host, other), (1, 9));
}

#[test]
fn reads_and_snapshots_are_counted_as_downloads() {
    let late = Arc::new(LateDevice::new(host()));
    let store = open(late);
    let page = commit(&store, |batch| _ = batch.create_from(vec![1; LEN as usize], PLACE))[0];
    assert_eq!(moved(&store.stats(), PLACE, Place::Host), (0, 0));
    store.read(page, 10, &mut [0; 90]).unwrap();
    assert_eq!(moved(&store.stats(), PLACE, Place::Host), (1, 90));
    store.snapshot().unwrap();
    let (_, bytes) = moved(&store.stats(), PLACE, Place::Host);
    // Pages are aligned in the staging area of a snapshot.
    assert!((90 + LEN..90 + LEN + 64).contains(&bytes), "{bytes}");

    // Bytes that the calling thread reads directly do not count as a transfer.
    let store = open(host());
    let page = commit(&store, |batch| _ = batch.create_from(vec![1; LEN as usize], PLACE))[0];
    store.read(page, 10, &mut [0; 90]).unwrap();
    assert_eq!(moved(&store.stats(), PLACE, Place::Host), (0, 0));
}

#[test]
fn counters_report_queued_lists_and_waits() {
    let store = open(Arc::new(LateDevice::new(host())));
    let page = commit(&store, |batch| _ = batch.create(LEN, PLACE))[0];
    // The fills are queued in the lane, and not executed before a caller needs the result.
    for byte in 1..=3 {
        commit(&store, |batch| _ = batch.fill(page, 0, LEN, &[byte]));
    }
    let before = lane(&store.stats(), Lane::Apply);
    assert!(before.queued >= 3 && before.queued_max >= before.queued, "{before:?}");
    let mut bytes = [0; 1];
    store.read(page, 0, &mut bytes).unwrap();
    let after = lane(&store.stats(), Lane::Apply);
    assert_eq!((bytes, after.queued), ([3], 0));
    assert!(after.waits > before.waits && after.lists > before.lists, "{after:?}");
}

#[test]
fn refused_allocation_is_counted() {
    let device = Arc::new(FaultyDevice::new(host()));
    let store = open(device.clone());
    device.arm(DeviceFault { call: Some(DeviceCall::Allocate), nth: 1, context_lost: false });
    let mut batch = store.batch();
    batch.create(LEN, PLACE);
    assert!(matches!(store.commit(batch), Err(Error::Poisoned(_))));
    let counted = allocations(&store.stats(), PLACE);
    assert_eq!((counted.allocations, counted.refusals, counted.frees), (0, 1, 0));
}

/// `publish_metrics` reports the same values of tiers and disk pages as `stats`.
#[cfg(feature = "metrics")]
#[test]
fn metrics_match_stats() {
    use std::collections::BTreeMap;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU64, Ordering};

    use metrics::{
        Counter, CounterFn, Gauge, GaugeFn, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit,
    };
    use remanent::options::MemoryOptions;
    use remanent::tiers::Tiers;

    #[derive(Default)]
    struct Number(AtomicU64);

    impl CounterFn for Number {
        fn increment(&self, _: u64) {
            unreachable!("counters are published as they are")
        }
        fn absolute(&self, value: u64) {
            self.0.store(value, Ordering::Relaxed);
        }
    }

    impl GaugeFn for Number {
        fn increment(&self, _: f64) {
            unreachable!("gauges are published as they are")
        }
        fn decrement(&self, _: f64) {
            unreachable!("gauges are published as they are")
        }
        fn set(&self, value: f64) {
            // The value is stored in billionths, because seconds would be rounded to zero.
            self.0.store((value * 1e9).round() as u64, Ordering::Relaxed);
        }
    }

    /// Published numbers, keyed by name and labels. Gauges are in billionths.
    #[derive(Default)]
    struct Numbers(Mutex<BTreeMap<String, Arc<Number>>>);

    impl Numbers {
        fn of(&self, key: &Key) -> Arc<Number> {
            // The first label identifies the store.
            let labels: Vec<_> = key.labels().skip(1).map(|label| label.value().to_owned()).collect();
            let name = format!("{} {}", key.name(), labels.join(" "));
            self.0.lock().unwrap().entry(name.trim_end().to_owned()).or_default().clone()
        }
    }

    impl Recorder for Numbers {
        fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
            Counter::from_arc(self.of(key))
        }
        fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
            Gauge::from_arc(self.of(key))
        }
        fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
            unreachable!("there are none")
        }
    }

    let options = options()
        .memory(MemoryOptions::new().budget(PLACE, 4 * LEN))
        .tiers(Tiers::new([PLACE, Place::Disk]).free_part(4));
    let store = Store::open_on(Arc::new(SimDisk::new()), host(), options).unwrap();
    let mut pages = Vec::new();
    for _ in 0..12 {
        let mut batch = store.batch();
        batch.create_from(vec![1; LEN as usize], PLACE);
        pages.extend(store.commit(batch).unwrap().pages);
    }
    for page in &pages {
        store.ensure(&[*page], PLACE).unwrap();
        store.ensure(&[*page], PLACE).unwrap();
    }
    store.demote(&pages[10..]).unwrap();
    let mut batch = store.batch();
    batch.write(pages[11], 0, &[1; 9]);
    store.commit(batch).unwrap();

    // The thread that moves pages between tiers may still be working.
    let (stats, numbers) = loop {
        let (before, numbers) = (store.stats(), Numbers::default());
        metrics::with_local_recorder(&numbers, || store.publish_metrics());
        let after = store.stats();
        let is_still =
            (&before.tiers, &before.moves, before.on_disk) == (&after.tiers, &after.moves, after.on_disk);
        if is_still {
            break (after, numbers);
        }
    };
    let numbers = numbers.0.into_inner().unwrap();
    let number = |name: &str| {
        let found = numbers.get(name).unwrap_or_else(|| panic!("no {name} among {:?}", numbers.keys()));
        found.0.load(Ordering::Relaxed)
    };
    let giga = |value: u64| value * 1_000_000_000;
    assert_eq!(number("remanent_disk_pages"), giga(stats.on_disk.pages));
    assert_eq!(number("remanent_disk_bytes"), giga(stats.on_disk.bytes));
    assert_eq!(number("remanent_pending_bytes"), giga(stats.pending_bytes));
    assert!(stats.pending_bytes > 0 && stats.on_disk.bytes == stats.on_disk.pages * LEN);
    assert!(stats.tiers.len() == 2 && stats.moves.len() == 2, "{:?} {:?}", stats.tiers, stats.moves);
    for tier in &stats.tiers {
        let of = |what: &str| number(&format!("remanent_tier_{what} {}", tier.place));
        assert_eq!([of("hits"), of("misses"), of("evictions")], [tier.hits, tier.misses, tier.evictions]);
        assert_eq!((of("waits"), of("wait_seconds")), (tier.waits, tier.waited.as_nanos() as u64));
    }
    for moved in &stats.moves {
        let of = |what: &str| number(&format!("remanent_move_{what} {} {}", moved.from, moved.to));
        assert_eq!((of("pages"), of("bytes")), (moved.pages, moved.bytes));
        assert_eq!(of("seconds"), moved.took.as_nanos() as u64);
    }
}
