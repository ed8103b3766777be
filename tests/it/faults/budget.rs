//! Memory budgets and out-of-memory errors. The reported numbers are exact, and the store is unchanged.

use remanent::disk::Disk;
use remanent::error::FileName;
use remanent::options::{MemoryOptions, Retention};
use remanent::{SnapshotId, StatePoint, View};
use remanent_format::state::rebuild::{RebuildOptions, rebuild};
use remanent_format::state::survey::Survey;

use super::*;
use crate::files::{Files, State};

fn within(bytes: u64) -> Options {
    small().memory(MemoryOptions::new().budget(Place::Host, bytes))
}

#[track_caller]
fn over_budget<T: std::fmt::Debug>(result: Result<T>, wanted: (u64, u64, u64)) {
    match result.unwrap_err() {
        Error::OverBudget { place: Place::Host, requested, available, budget } => {
            assert_eq!((requested, available, budget), wanted);
        }
        other => panic!("{other}"),
    }
}

fn create(store: &Store, lens: &[u64]) -> Result<Vec<PageId>> {
    let mut batch = store.batch();
    for len in lens {
        batch.create(*len, Place::Host);
    }
    store.commit(batch).map(|committed| committed.pages)
}

fn allocated(store: &Store) -> (u64, u64) {
    let places = store.stats().places;
    let usage = places.iter().find(|(place, _)| *place == Place::Host).unwrap().1;
    (usage.allocated_bytes, usage.count)
}

#[test]
fn over_budget_batch_is_refused_to_the_byte_without_leak() {
    let disk = SimDisk::new();
    let device = Gauge::host();
    let store = Store::open_on(Arc::new(disk.clone()), device.clone(), within(1000)).unwrap();
    let page = create(&store, &[600]).unwrap()[0];
    over_budget(create(&store, &[401]), (401, 400, 1000));
    over_budget(create(&store, &[300, 300]), (600, 400, 1000));
    let mut batch = store.batch();
    batch.resize(page, 500);
    // The old bytes are kept until the new bytes are written.
    over_budget(store.commit(batch), (500, 400, 1000));
    assert_eq!((allocated(&store), store.lsn().0, device.live()), ((600, 1), 1, 1));
    // Another place has its own budget, which is 0 in this test.
    let mut batch = store.batch();
    batch.create(5000, Place::Device(0));
    let elsewhere = store.commit(batch).unwrap().pages[0];

    let mut batch = store.batch();
    batch.delete(page).delete(elsewhere);
    store.commit(batch).unwrap();
    create(&store, &[1000]).unwrap();
    over_budget(create(&store, &[1]), (1, 0, 1000));
    create(&store, &[0]).unwrap();
    assert_eq!(allocated(&store), (1000, 2));
    drop(store);
    assert_eq!(device.live(), 0);
}

#[test]
fn recovery_refuses_over_budget_table_before_allocating() {
    let disk = SimDisk::new();
    let store = open_on_host(&disk).unwrap();
    let pages = create(&store, &[900, 700, 300]).unwrap();
    store.snapshot().unwrap();
    let mut batch = store.batch();
    batch.delete(pages[0]).resize(pages[1], 100);
    store.commit(batch).unwrap();
    drop(store);

    let device = Gauge::host();
    let opened = Store::open_on(Arc::new(disk.clone()), device.clone(), within(399));
    over_budget(opened, (400, 399, 399));
    assert_eq!(device.allocations.load(Ordering::SeqCst), 0);
    // The total length of the pages in the log exceeds the budget, but the pages never exist at the same
    // time.
    let store = Store::open_on(Arc::new(disk.clone()), device.clone(), within(400)).unwrap();
    assert_eq!(store.lsn().0, 2);
    assert_eq!(allocated(&store), (400, 2));

    // A restore does not exceed the budget either.
    over_budget(store.restore(StatePoint::Snapshot(SnapshotId(1))), (1900, 400, 400));
    assert_eq!((store.lsn().0, allocated(&store)), (2, (400, 2)));
    let mut batch = store.batch();
    batch.set_root("goes", "on");
    store.commit(batch).unwrap();
}

/// According to the log, the page was 1 TiB long before its length was reduced. Only the final length needs
/// memory.
#[test]
fn budget_for_final_length_suffices_for_shrunk_page() {
    const LONG: u64 = 54_321;
    let options = || within(64 << 10);
    for caught in [false, true] {
        let disk = SimDisk::new();
        let store = Store::open_on(Arc::new(disk.clone()), Gauge::host(), options()).unwrap();
        let page = create(&store, &[100]).unwrap()[0];
        let commit = |change: &dyn Fn(&mut remanent::WriteBatch)| {
            let mut batch = store.batch();
            change(&mut batch);
            store.commit(batch).unwrap();
        };
        commit(&|batch| _ = batch.fill(page, 0, 100, &[1]));
        if caught {
            store.snapshot().unwrap();
        }
        commit(&|batch| {
            _ = batch.resize(page, LONG).write(page, 90, &[2; 40]).write(page, LONG - 9, &[3; 9])
        });
        commit(&|batch| _ = batch.fill(page, 110, 8 * 1000, &[4, 5, 6, 7, 8, 9, 10, 11]).resize(page, 50));
        commit(&|batch| _ = batch.resize(page, LONG).fill(page, 60, 8 * 10, &[4, 5, 6, 7, 8, 9, 10, 11]));
        commit(&|batch| _ = batch.resize(page, 125));
        let state = State::of(&store);
        drop(store);

        let mut files = Files::of(&disk);
        let mut replaced = 0;
        for segment in files.segments() {
            let bytes = files.0.get_mut(&segment).unwrap();
            for at in (0..bytes.len() - 8).step_by(8) {
                if bytes[at..at + 8] == LONG.to_le_bytes() {
                    bytes[at..at + 8].copy_from_slice(&(1_u64 << 40).to_le_bytes());
                    replaced += 1;
                }
            }
        }
        assert_eq!(replaced, 2);
        files.fit();
        let disk = files.disk();
        let few = RebuildOptions { page_bytes_max: 125, ..RebuildOptions::default() };
        assert_eq!(State::rebuilt(&rebuild(&files, &few).unwrap()), state);
        let seen = View::open_on(&(Arc::new(disk.clone()) as Arc<dyn Disk>), None).unwrap();
        let mut bytes = vec![0; 125];
        seen.read(page, 0, &mut bytes).unwrap();
        assert_eq!(bytes, state.contents[&page]);
        let store = Store::open_on(Arc::new(disk), Gauge::host(), options()).unwrap();
        assert_eq!(State::of(&store), state);
    }
}

#[test]
fn out_of_memory_changes_nothing() {
    let disk = SimDisk::new();
    let device = Gauge::host();
    let store = open(&disk, device.clone()).unwrap();
    let mut line = Line::begin(&store);
    line.commits(&store, 5).unwrap();
    // An allocation fails for the first or the second page of a batch.
    for left in [0, 1] {
        device.allow(left);
        let error = create(&store, &[10, 20, 30]).unwrap_err();
        assert!(matches!(error, Error::OutOfMemory { place: Place::Host, .. }), "{error}");
        // Only the earlier pages have memory. The memory that they replaced is free.
        assert_eq!((device.live(), store.lsn().0), (2, line.logged));
    }
    device.allow(0);
    // A snapshot succeeds even without additional memory.
    store.snapshot().unwrap();
    line.check(&store, line.logged);
    device.allow(u64::MAX);
    line.commits(&store, 5).unwrap();
    store.snapshot().unwrap();
    drop(store);
    assert_eq!(device.live(), 0);

    // Memory can also be exhausted while pages are loaded.
    device.allow(1);
    assert!(matches!(open(&disk, device.clone()), Err(Error::OutOfMemory { .. })));
    assert_eq!(device.live(), 0);
    line.check(&open_on_host(&disk).unwrap(), line.logged);
}

/// An older snapshot would need the same memory, so the open reports the page without memory, even if the
/// image of another page is damaged.
#[test]
fn out_of_memory_during_load_is_not_damage() {
    let disk = SimDisk::new();
    let store =
        open_with(&disk, Gauge::host(), small().retention(Retention::new().snapshots_kept(1))).unwrap();
    // Create more pages than are allocated in one call.
    create(&store, &[8; 300]).unwrap();
    store.snapshot().unwrap();
    store.close().unwrap();

    let mut files = Files::of(&disk);
    let manifest = Survey::read(&files).unwrap().snapshot(SnapshotId(1)).unwrap();
    let image = manifest.entries[0].image.unwrap();
    files.0.get_mut(&FileName::Pages(image.file)).unwrap()[image.offset as usize] ^= 1;
    let is_before =
        |file: &FileName| matches!(file, FileName::Segment(number) if *number < manifest.redo.segment);
    files.0.retain(|file, _| !is_before(file));
    let disk = files.disk();
    let device = Gauge::host();
    let refused = open(&disk, device.clone()).unwrap_err();
    assert!(
        matches!(&refused, Error::Damaged(damage) if damage.file == FileName::Pages(image.file)),
        "{refused}"
    );
    device.allow(299);
    let refused = open(&disk, device.clone()).unwrap_err();
    assert!(matches!(refused, Error::OutOfMemory { place: Place::Host, len: 8 }), "{refused}");
    assert_eq!(device.live(), 0);
}
