//! Leases. Pages are read in place, and no other thread waits for the reader.
//!
//! The device executes all work as late as permitted, and its streams can be held, as if their kernels did
//! not end. An engine lane that waited for a held stream would panic.

use std::sync::{Arc, Mutex};
use std::thread;

use remanent::device::host::HostDevice;
use remanent::device::{Command, CommandList, Device, Lane, RawStream, Span, StagingSpan};
use remanent::error::Refused;
use remanent::options::{LogOptions, MemoryOptions, SnapshotSchedule};
use remanent::testing::late_device::LateDevice;
use remanent::testing::sim_disk::SimDisk;
use remanent::{
    Ack, Error, Key, Lease, Options, PageId, Place, SnapshotOptions, StatePoint, Store, View, WriteBatch,
};

const LEN: u64 = 64;
const PLACE: Place = Place::Device(0);

/// A store with one page, each of whose bytes is the page's epoch.
struct Bench {
    device: Arc<LateDevice>,
    disk: SimDisk,
    store: Store,
    page: PageId,
}

fn options() -> Options {
    Options::new().log(LogOptions::new().segment_len(16 << 10)).snapshots(SnapshotSchedule::never())
}

fn bench(device: LateDevice, options: Options) -> Bench {
    let (device, disk) = (Arc::new(device), SimDisk::new());
    let store = Store::open_on(Arc::new(disk.clone()), device.clone(), options).unwrap();
    let mut batch = store.batch();
    let page = batch.create(LEN, PLACE).key(Key::new("page").unwrap()).page();
    batch.fill(page, 0, LEN, &[1]);
    let page = store.commit(batch).unwrap().pages[0];
    Bench { device, disk, store, page }
}

fn late_bench() -> Bench {
    bench(LateDevice::new(Arc::new(HostDevice::new())), options())
}

/// The bytes that kernels on a stream have read.
type Seen = Arc<Mutex<Vec<Vec<u8>>>>;

impl Bench {
    /// Fills the page with the number, which is its next epoch.
    fn fill(&self, number: u8) -> remanent::Result<()> {
        let mut batch = self.store.batch();
        // Use two operations, because the page is still in the leased memory only during the first one.
        batch.fill(self.page, 0, LEN / 2, &[number]).fill(self.page, LEN / 2, LEN / 2, &[number]);
        self.store.commit(batch).map(drop)
    }

    fn elsewhere<T: Send>(&self, work: impl FnOnce(&Store, PageId) -> T + Send) -> T {
        thread::scope(|scope| scope.spawn(|| work(&self.store, self.page)).join().unwrap())
    }

    /// Queues a kernel on the stream that reads the leased page.
    fn queue_read(&self, stream: RawStream, lease: &Lease<'_>, seen: &Seen) {
        let source = self.device.span_at(lease.address().unwrap(), lease.byte_len());
        let seen = seen.clone();
        self.device.queue(stream, move |inner| seen.lock().unwrap().push(content(inner, source)));
    }

    fn read(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.store.page(self.page).unwrap().len as usize];
        self.store.read(self.page, 0, &mut bytes).unwrap();
        bytes
    }

    /// Returns the number of bytes of pages, and the number of bytes that were freed but are still in use by
    /// leases.
    fn memory(&self) -> (u64, u64) {
        let places = self.store.stats().places;
        places
            .iter()
            .fold((0, 0), |sum, (_, usage)| (sum.0 + usage.allocated_bytes, sum.1 + usage.retired_bytes))
    }
}

fn content(device: &dyn Device, source: Span) -> Vec<u8> {
    let len = source.len as usize;
    let target = StagingSpan { index: 0, offset: 0, len };
    let commands = vec![Command::Download { source, target }];
    let list = CommandList { commands, staging: vec![device.staging(len).unwrap()] };
    device.submit(Lane::Drain, list).unwrap().finish(device).unwrap()[0].to_vec()
}

fn page_of(number: u8) -> Vec<u8> {
    vec![number; LEN as usize]
}

#[test]
fn lease_shows_old_page_during_commits() {
    let bench = late_bench();
    let (stream, seen) = (bench.device.stream(), Seen::default());
    let lease = bench.store.lease(bench.page).unwrap();
    lease.on(stream).unwrap();
    bench.queue_read(stream, &lease, &seen);
    bench.device.hold(stream, true);
    let address = lease.address();
    for number in 2..=5 {
        bench.fill(number).unwrap();
        assert_eq!(bench.read(), page_of(number));
    }
    bench.queue_read(stream, &lease, &seen);
    assert_eq!((lease.address(), lease.epoch().0, lease.lsn().0), (address, 1, 1));
    assert_eq!(lease.bytes().unwrap(), page_of(1));
    // There is one copy of the page, however many batches are committed.
    assert_eq!(bench.memory(), (2 * LEN, 0));
    assert_ne!(bench.store.lease(bench.page).unwrap().address(), address);
    drop(lease);
    // The kernel that reads the page is still on the stream.
    bench.fill(6).unwrap();
    assert_eq!((bench.read(), bench.memory()), (page_of(6), (LEN, LEN)));
    assert!(seen.lock().unwrap().is_empty());
    bench.device.hold(stream, false);
    bench.device.synchronize(stream).unwrap();
    assert_eq!(*seen.lock().unwrap(), [page_of(1), page_of(1)]);
    bench.store.close().unwrap();
}

#[test]
fn lease_orders_stream_after_earlier_batches_without_host_wait() {
    let bench = late_bench();
    let (stream, seen) = (bench.device.stream(), Seen::default());
    bench.fill(2).unwrap();
    let lease = bench.store.lease(bench.page).unwrap();
    lease.on(stream).unwrap().on(stream).unwrap();
    bench.queue_read(stream, &lease, &seen);
    assert_eq!(bench.device.reached(Lane::Apply), 0);
    bench.device.synchronize(stream).unwrap();
    assert_eq!(*seen.lock().unwrap(), [page_of(2)]);
}

#[test]
fn a_ticket_lets_a_stream_wait_for_its_batch() {
    let bench = late_bench();
    let (stream, seen) = (bench.device.stream(), Seen::default());
    let lease = bench.store.lease(bench.page).unwrap();
    let source = bench.device.span_at(lease.address().unwrap(), LEN);
    drop(lease);
    let mut batch = bench.store.batch();
    batch.fill(bench.page, 0, LEN, &[2]);
    let ticket = bench.store.submit(batch).unwrap();
    ticket.wait_on(stream).unwrap();
    assert_eq!(bench.device.reached(Lane::Apply), 0, "the host waited");
    let kernel = seen.clone();
    bench.device.queue(stream, move |inner| kernel.lock().unwrap().push(content(inner, source)));
    bench.device.synchronize(stream).unwrap();
    assert_eq!(*seen.lock().unwrap(), [page_of(2)]);
    bench.device.capture(stream, true);
    assert!(matches!(ticket.wait_on(stream), Err(Error::Refused(Refused::Stream { .. }))));
}

#[test]
fn stream_work_may_read_after_lease_ends() {
    let bench = late_bench();
    let (stream, seen) = (bench.device.stream(), Seen::default());
    bench.device.hold(stream, true);
    let lease = bench.store.lease(bench.page).unwrap();
    lease.on(stream).unwrap();
    bench.queue_read(stream, &lease, &seen);
    lease.end().unwrap();
    // The page did not change during its lease. This is the first batch that finds its memory in use.
    bench.fill(2).unwrap();
    bench.fill(3).unwrap();
    assert_eq!((bench.read(), bench.memory()), (page_of(3), (LEN, LEN)));
    bench.device.hold(stream, false);
    bench.device.synchronize(stream).unwrap();
    assert_eq!(*seen.lock().unwrap(), [page_of(1)]);
    let lease = bench.store.lease(bench.page).unwrap();
    lease.on(stream).unwrap();
    lease.end().unwrap();
    bench.device.wait(bench.device.submit(Lane::Callers, CommandList::default()).unwrap().fence()).unwrap();
    // No stream still uses the page, so the page keeps its address.
    let address = bench.store.lease(bench.page).unwrap().address();
    bench.fill(4).unwrap();
    assert_eq!(bench.store.lease(bench.page).unwrap().address(), address);
}

#[test]
fn deleted_or_moved_page_leaves_memory_to_lease() {
    type Change = fn(&mut remanent::WriteBatch, PageId);
    let changes: [Change; 3] = [
        |batch, page| _ = batch.delete(page),
        |batch, page| _ = batch.resize(page, 2 * LEN),
        |batch, page| _ = batch.write(page, 0, &[9; LEN as usize]).resize(page, 2).fill(page, 0, 2, &[8]),
    ];
    for change in changes {
        let bench = late_bench();
        let (stream, seen) = (bench.device.stream(), Seen::default());
        let lease = bench.store.lease(bench.page).unwrap();
        lease.on(stream).unwrap();
        bench.queue_read(stream, &lease, &seen);
        bench.device.hold(stream, true);
        bench.elsewhere(|store, page| {
            let mut batch = store.batch();
            change(&mut batch, page);
            store.commit(batch).unwrap();
            let applied = bench.device.submit(Lane::Apply, CommandList::default()).unwrap().fence();
            bench.device.wait(applied).unwrap();
            // An allocation first frees unused memory.
            let mut batch = store.batch();
            let other = batch.create(LEN, PLACE).page();
            batch.fill(other, 0, LEN, &[7]);
            store.commit(batch).unwrap();
        });
        drop(lease);
        let mut batch = bench.store.batch();
        batch.note("after all of that");
        bench.store.submit(batch).unwrap().wait(Ack::Applied).unwrap();
        bench.device.hold(stream, false);
        bench.device.synchronize(stream).unwrap();
        assert_eq!(*seen.lock().unwrap(), [page_of(1)]);
        bench.store.close().unwrap();
    }
}

/// Two tasks run on one worker thread of an async runtime. One holds a lease across an await, and the other
/// commits.
#[test]
fn lease_allows_batches_of_its_thread() {
    type Change = fn(&mut WriteBatch, PageId);
    let changes: [(Change, Option<Vec<u8>>); 3] = [
        (|batch, page| _ = batch.fill(page, 0, LEN, &[2]), Some(page_of(2))),
        (|batch, page| _ = batch.resize(page, 1), Some(vec![1])),
        (|batch, page| _ = batch.delete(page), None),
    ];
    for (change, expected) in changes {
        let bench = late_bench();
        let lease = bench.store.lease(bench.page).unwrap();
        let of_the_other_task = bench.store.lease(bench.page).unwrap();
        let mut batch = bench.store.batch();
        change(&mut batch, bench.page);
        bench.store.commit(batch).unwrap();
        let is_there = bench.store.page(bench.page).is_ok();
        assert_eq!(is_there.then(|| bench.read()), expected);
        // The leases still contain the old bytes.
        drop(of_the_other_task);
        assert_eq!((lease.bytes().unwrap(), lease.epoch().0), (&page_of(1)[..], 1));
        drop(lease);
        bench.store.close().unwrap();
    }
}

#[test]
fn batch_without_room_for_relocation_fails_before_logging() {
    let memory = MemoryOptions::new().budget(PLACE, 2 * LEN - 1);
    let bench = bench(LateDevice::new(Arc::new(HostDevice::new())), options().memory(memory));
    let lease = bench.store.lease(bench.page).unwrap();
    let error = bench.fill(2).unwrap_err();
    assert!(matches!(error, Error::OverBudget { requested: LEN, .. }), "{error}");
    assert_eq!((bench.store.lsn().0, bench.read(), bench.memory()), (1, page_of(1), (LEN, 0)));
    drop(lease);
    bench.fill(2).unwrap();
    assert_eq!(bench.read(), page_of(2));
}

#[test]
fn batches_after_the_first_need_no_room_for_a_copy() {
    let memory = MemoryOptions::new().budget(PLACE, 2 * LEN);
    let bench = bench(LateDevice::new(Arc::new(HostDevice::new())), options().memory(memory));
    let lease = bench.store.lease(bench.page).unwrap();
    // The page leaves the leased memory before the next batch is submitted.
    (2..6).for_each(|number| {
        bench.fill(number).unwrap();
        assert_eq!(bench.read(), page_of(number));
    });
    assert_eq!((lease.bytes().unwrap(), bench.memory()), (&page_of(1)[..], (2 * LEN, 0)));
}

#[test]
fn leased_memory_is_freed_after_store_work() {
    let bench = late_bench();
    let lease = bench.store.lease(bench.page).unwrap();
    bench.fill(2).unwrap();
    // After this lease, the applier has reached the batch, and the copy from the leased memory has not been
    // executed.
    drop(bench.store.lease(bench.page).unwrap());
    drop(lease);
    assert_eq!(bench.device.reached(Lane::Apply), 0);
    let callers = bench.device.submit(Lane::Callers, CommandList::default()).unwrap().fence();
    bench.device.wait(callers).unwrap();
    // An allocation first frees unused memory. The device must not lose memory that commands still use.
    let mut batch = bench.store.batch();
    batch.create(LEN, PLACE);
    bench.store.commit(batch).unwrap();
    assert_eq!((bench.read(), bench.memory()), (page_of(2), (2 * LEN, 0)));
}

#[test]
fn a_restore_waits_for_no_lease() {
    let bench = late_bench();
    let stream = bench.device.stream();
    bench.fill(2).unwrap();
    let lease = bench.store.lease(bench.page).unwrap();
    lease.on(stream).unwrap();
    let restore = || bench.store.restore(StatePoint::Lsn(remanent::Lsn(1)));
    assert!(matches!(restore(), Err(Error::Leased { page }) if page == bench.page));
    assert!(matches!(
        bench.elsewhere(|store, _| store.restore(StatePoint::Lsn(remanent::Lsn(1)))),
        Err(Error::Leased { .. })
    ));
    assert_eq!((bench.store.lsn().0, bench.read()), (2, page_of(2)));
    drop(lease);
    // The store waits for work that is already on the stream.
    let seen = Seen::default();
    let lease = bench.store.lease(bench.page).unwrap();
    lease.on(stream).unwrap();
    bench.queue_read(stream, &lease, &seen);
    drop(lease);
    restore().unwrap();
    assert_eq!((bench.read(), &*seen.lock().unwrap()), (page_of(1), &vec![page_of(2)]));
}

#[test]
fn exact_snapshot_and_lease_copy_page_separately() {
    for delete in [false, true] {
        let bench = late_bench();
        let snapshot = bench.store.snapshot_with(SnapshotOptions::new().exact()).unwrap();
        bench.fill(2).unwrap();
        let (stream, seen) = (bench.device.stream(), Seen::default());
        let lease = bench.store.lease(bench.page).unwrap();
        lease.on(stream).unwrap();
        bench.queue_read(stream, &lease, &seen);
        bench.device.hold(stream, true);
        let exact = bench.elsewhere(|store, page| {
            thread::scope(|scope| {
                let exact = scope.spawn(|| store.snapshot_with(SnapshotOptions::new().exact()).unwrap());
                let mut batch = store.batch();
                if delete {
                    batch.delete(page)
                } else {
                    batch.fill(page, 0, LEN, &[3])
                };
                store.commit(batch).unwrap();
                exact.join().unwrap()
            })
        });
        assert!(exact.end > snapshot.end);
        drop(lease);
        bench.device.hold(stream, false);
        bench.device.synchronize(stream).unwrap();
        assert_eq!(*seen.lock().unwrap(), [page_of(2)]);
        let at = StatePoint::Snapshot(exact.id);
        let disk: Arc<dyn remanent::disk::Disk> = Arc::new(bench.disk.clone());
        let old = View::open_on(&disk, Some(&at)).unwrap();
        let mut bytes = page_of(0);
        match old.read(bench.page, 0, &mut bytes) {
            Ok(_) => assert_eq!(bytes, page_of(exact.end.0 as u8)),
            Err(error) => assert!(delete && exact.end.0 == 3, "{error}"),
        }
    }
}

#[test]
fn unwaitable_streams_are_refused_and_lease_continues() {
    let bench = late_bench();
    let (stream, foreign) = (bench.device.stream(), LateDevice::new(Arc::new(HostDevice::new())).stream());
    let lease = bench.store.lease(bench.page).unwrap();
    bench.device.capture(stream, true);
    for refused in [lease.on(stream), lease.on(foreign)] {
        let error = refused.unwrap_err();
        assert!(matches!(error, Error::Refused(Refused::Stream { .. })), "{error}");
    }
    assert_eq!(lease.bytes().unwrap(), page_of(1));
    bench.device.capture(stream, false);
    lease.on(stream).unwrap();
    bench.device.capture(stream, true);
    // The store cannot determine when the work of the stream ends, so the memory is never reused.
    assert!(matches!(lease.end(), Err(Error::Refused(Refused::Stream { .. }))));
    bench.fill(2).unwrap();
    assert_eq!((bench.read(), bench.memory()), (page_of(2), (2 * LEN, 0)));
    bench.store.close().unwrap();
}

#[test]
fn leaked_lease_blocks_nothing() {
    let bench = late_bench();
    std::mem::forget(bench.store.lease(bench.page).unwrap());
    bench.fill(2).unwrap();
    assert_eq!(bench.read(), page_of(2));
    bench.store.close().unwrap();
    let store = Store::open_on(Arc::new(bench.disk), bench.device, options()).unwrap();
    assert_eq!(store.page(bench.page).unwrap().epoch.0, 2);
}

#[test]
fn lease_of_missing_page_is_refused() {
    let bench = late_bench();
    for _ in 0..2 {
        let error = bench.store.lease(PageId(77)).unwrap_err();
        assert!(matches!(error, Error::UnknownPage { page: PageId(77) }), "{error}");
    }
    bench.store.restore(StatePoint::Lsn(remanent::Lsn(1))).unwrap();
    let empty = bench.elsewhere(|store, _| {
        let mut batch = store.batch();
        batch.create(0, PLACE);
        store.commit(batch).unwrap().pages[0]
    });
    let lease = bench.store.lease(empty).unwrap();
    assert_eq!((lease.address(), lease.bytes().unwrap()), (None, &[][..]));
}

/// With concurrent writers and readers, a lease contains one version of the page until it ends.
#[test]
fn leases_among_many_batches_always_show_one_version() {
    const ROUNDS: u8 = 120;
    for seed in 0..3 {
        println!("schedule of seed {seed}");
        let bench = bench(LateDevice::seeded(Arc::new(HostDevice::new()), seed), options());
        let stream = bench.device.stream();
        thread::scope(|scope| {
            scope.spawn(|| {
                for number in 2..=ROUNDS {
                    let mut batch = bench.store.batch();
                    batch.fill(bench.page, 0, LEN / 2, &[number]).fill(
                        bench.page,
                        LEN / 2,
                        LEN / 2,
                        &[number],
                    );
                    bench.store.submit(batch).unwrap().wait(Ack::Applied).unwrap();
                }
            });
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut last = 0;
                    while last < ROUNDS {
                        let lease = bench.store.lease(bench.page).unwrap();
                        lease.on(stream).unwrap();
                        let number = lease.epoch().0 as u8;
                        let (source, seen) = (lease.address().unwrap(), Seen::default());
                        let (source, kernel) = (bench.device.span_at(source, LEN), seen.clone());
                        bench.device.queue(stream, move |inner| {
                            kernel.lock().unwrap().push(content(inner, source));
                        });
                        assert_eq!(lease.bytes().unwrap(), page_of(number));
                        drop(lease);
                        bench.device.synchronize(stream).unwrap();
                        assert_eq!(*seen.lock().unwrap(), [page_of(number)]);
                        assert!(number >= last);
                        last = number;
                    }
                });
            }
        });
        assert_eq!(bench.read(), page_of(ROUNDS));
        bench.store.close().unwrap();
    }
}
