//! Moves during other work: other committers, leases, and running snapshots.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, OnceLock, Weak};

use remanent::device::MemoryId;
use remanent::options::Retention;
use remanent::snapshot::SnapshotInfo;
use remanent::{Ack, Lsn, Result, SnapshotOptions, WriteBatch};

use super::*;

/// Independent committers move, resize, write and clone the same page. Whatever their order in the log, the
/// memory agrees with the log.
#[test]
fn concurrent_move_resize_write_keep_page_at_right_place() {
    const ROUNDS: u64 = 60;
    const LEN_MIN: u64 = 256;
    for device in [host(), late(10), two_of(late(11), late(12))] {
        let disk = SimDisk::new();
        let store = open(&disk, &device, small());
        let mut batch = store.batch();
        batch.create(LEN_MIN, Place::Device(0));
        let page = store.commit(batch).unwrap().pages[0];
        let commit = |build: &dyn Fn(&mut WriteBatch)| {
            let mut batch = store.batch();
            build(&mut batch);
            store.commit(batch).unwrap()
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                (0..ROUNDS).for_each(|round| {
                    commit(&|batch| _ = batch.move_to(page, WAY[round as usize % WAY.len()]));
                });
            });
            scope.spawn(|| {
                (0..ROUNDS).for_each(|round| {
                    commit(&|batch| _ = batch.resize(page, LEN_MIN + round % 7 * 100));
                });
            });
            scope.spawn(|| {
                (0..ROUNDS).for_each(|round| {
                    let bytes = [round as u8; 100];
                    commit(&|batch| _ = batch.write(page, round, &bytes).move_to(page, Place::Pinned));
                });
            });
            scope.spawn(|| {
                (0..ROUNDS).for_each(|_| {
                    // A clone is created in the place where its source is at the clone's position in the log.
                    let copy = commit(&|batch| _ = batch.clone_page(page)).pages[0];
                    let lease = store.lease(page).unwrap();
                    assert_eq!(lease.info().len, lease.byte_len());
                    drop(lease);
                    commit(&|batch| _ = batch.delete(copy));
                });
            });
        });
        assert_survives(store, &disk, &device);
    }
}

/// A host device that calls back once before it allocates memory. At this point, a committer has looked up
/// the places of pages but holds no lock.
struct Meddling {
    inner: HostDevice,
    before: Mutex<Option<Meddle>>,
    store: OnceLock<Weak<Store>>,
}

type Meddle = Box<dyn FnOnce(&Store) + Send>;

impl Device for Meddling {
    forward!(inner: label release staging submit reached wait after places_and_abilities);

    fn allocate(&self, place: Place, len: u64) -> Result<MemoryId> {
        let before = self.before.lock().unwrap().take();
        if let Some(before) = before {
            before(&self.store.get().and_then(Weak::upgrade).expect("the store is open"));
        }
        self.inner.allocate(place, len)
    }
}

/// After a committer looks up the place of a page and before it logs its batch, another batch moves or
/// resizes the page. Memory of the wrong kind must never be used.
#[test]
fn concurrently_moved_page_ends_where_log_says() {
    type Change = fn(&mut WriteBatch, PageId);
    let to_pinned: Change = |batch, page| _ = batch.move_to(page, Place::Pinned);
    let to_device: Change = |batch, page| _ = batch.move_to(page, Place::Device(0));
    let to_device_shorter: Change = |batch, page| _ = batch.move_to(page, Place::Device(0)).resize(page, 9);
    let longer: Change = |batch, page| _ = batch.resize(page, 2 * LEN);
    let write: Change = |batch, page| _ = batch.write(page, 3, &[7; 9]);
    let to_host: Change = |batch, page| _ = batch.move_to(page, Place::Host);
    let rows = [
        ("a resize", longer, to_pinned, false, (Place::Pinned, 2 * LEN)),
        ("a move", to_pinned, longer, false, (Place::Pinned, 2 * LEN)),
        ("a move elsewhere", to_pinned, to_device, false, (Place::Pinned, LEN)),
        ("a move to the same place", to_pinned, to_pinned, false, (Place::Pinned, LEN)),
        ("a move to where it is by then", to_device, to_device_shorter, false, (Place::Device(0), 9)),
        ("a write to a page that is leased", write, to_pinned, true, (Place::Pinned, LEN)),
    ];
    for (what, change, meddle, is_leased, (place, len)) in rows {
        let device =
            Arc::new(Meddling { inner: HostDevice::new(), before: Mutex::new(None), store: OnceLock::new() });
        let disk = SimDisk::new();
        let store = Store::open_on(Arc::new(disk.clone()), device.clone(), small()).unwrap();
        let store = Arc::new(store);
        device.store.set(Arc::downgrade(&store)).expect("set once");
        let (page, _) = create(&store, Place::Host, 1);
        let lease = || is_leased.then(|| store.lease(page).unwrap());
        let before = lease();
        let commit = move |store: &Store, change: Change| {
            let mut batch = store.batch();
            change(&mut batch, page);
            store.commit(batch).map(drop)
        };
        let ((meddled, has_meddled), (go_on, goes_on)) = (channel(), channel());
        *device.before.lock().unwrap() = Some(Box::new(move |store| {
            commit(store, meddle).unwrap();
            meddled.send(()).unwrap();
            goes_on.recv().unwrap();
        }));
        let behind = std::thread::scope(|scope| {
            let committer = scope.spawn(|| {
                let committed = commit(&store, change);
                // This drops the sender in the callback.
                drop(device.before.lock().unwrap().take());
                committed
            });
            has_meddled.recv().unwrap_or_else(|_| panic!("{what}: no batch meddled"));
            // The page is also leased in its new place. The committer has allocated memory for the old place.
            let behind = lease();
            go_on.send(()).unwrap();
            committer.join().unwrap().unwrap();
            behind
        });
        drop((before, behind));
        let info = store.page(page).unwrap();
        assert_eq!((info.place, info.len, store.lsn()), (place, len, Lsn(3)), "{what}");
        bytes(&store, page);
        assert_eq!(allocated(&store), [(place, len)], "{what}");
        commit(&store, to_host).unwrap();
        assert_survives(Arc::into_inner(store).expect("no other thread has it"), &disk, &host());
    }
}

/// The page's state after each batch is recorded while snapshots of both kinds are taken. Each snapshot
/// contains the state of its Lsn, wherever the page was when it was captured.
#[test]
fn snapshots_during_moves_have_the_places_of_their_batch() {
    const PAGES: u8 = 12;
    const SNAPSHOTS_MIN: usize = 6;
    const BATCHES_MIN: usize = 20;
    for device in devices() {
        let disk = SimDisk::new();
        // Without this acknowledgement level, batches would be logged faster than a device applies them, and
        // a snapshot would wait for an increasing number of them.
        let store =
            open(&disk, &device, small().retention(Retention::new().snapshots_kept(1000)).ack(Ack::Applied));
        let pages: Vec<PageId> =
            (0..PAGES).map(|number| create(&store, Place::Device(0), number).0).collect();
        let mut states = BTreeMap::from([(store.lsn(), store.pages().unwrap().collect::<Vec<_>>())]);
        let (done, count) = (AtomicBool::new(false), AtomicUsize::new(0));
        let snapshots = std::thread::scope(|scope| {
            let snapshots = scope.spawn(|| {
                let mut taken: Vec<SnapshotInfo> = Vec::new();
                while !done.load(Ordering::Acquire) {
                    taken.push(store.snapshot().unwrap());
                    taken.push(store.snapshot_with(SnapshotOptions::new().exact()).unwrap());
                    count.store(taken.len(), Ordering::Release);
                }
                taken
            });
            let is_enough = |round: usize| {
                let is_enough = round >= BATCHES_MIN && count.load(Ordering::Acquire) >= SNAPSHOTS_MIN;
                is_enough || snapshots.is_finished()
            };
            for round in (0..).take_while(|round| !is_enough(*round)) {
                let page = pages[round * 5 % pages.len()];
                let mut batch = store.batch();
                batch.move_to(page, WAY[round % WAY.len()]);
                if round % 3 == 0 {
                    batch.fill(page, round as u64 % LEN / 2, 9, &[round as u8]);
                }
                let lsn = store.commit(batch).unwrap().position.lsn;
                states.insert(lsn, store.pages().unwrap().collect::<Vec<_>>());
            }
            done.store(true, Ordering::Release);
            snapshots.join().unwrap()
        });
        let reader: Arc<dyn Disk> = Arc::new(disk.clone());
        for snapshot in &snapshots {
            let old = View::open_on(&reader, Some(&StatePoint::Snapshot(snapshot.id))).unwrap();
            assert!(old.pages().eq(states[&old.lsn()].iter().cloned()), "{snapshot:?} on {}", device.label());
        }
        assert_survives(store, &disk, &device);
    }
}
