//! Every failure is reported as a typed error without a hang, and all acknowledged batches exist afterwards.
//!
//! The cases use a small store whose state at every Lsn is known ([`Line`]), on a simulated disk and on
//! devices with injected faults. Each case has a time limit, so a hang is also a failure.

mod bit_flips;
mod budget;
mod device_errors;
mod disk_errors;
pub(crate) mod disk_full;
mod refusals;
mod shortages;
mod spares;
mod waiters;

use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use remanent::device::host::HostDevice;
use remanent::device::{CommandList, Device, Lane, MemoryId, Pending};
use remanent::options::{LogOptions, SnapshotSchedule};
use remanent::testing::sim_disk::{DiskFault, Operation, SimDisk};
use remanent::{
    Ack, Error, Lsn, Options, PageId, Place, Position, Result, SnapshotId, StatePoint, Store, Value,
};

/// Length of the page whose bytes identify the state.
const PAGE_LEN: u64 = 3000;

/// Runs a case in a thread with this name, which a panic message contains. The case fails after a minute, a
/// thousand times its usual duration.
pub fn watched(name: &str, case: impl FnOnce() + Send + 'static) {
    watched_for(Duration::from_secs(60), name, case);
}

/// Like [`watched`], but with this time limit.
pub fn watched_for(limit: Duration, name: &str, case: impl FnOnce() + Send + 'static) {
    let (sender, done) = channel::<()>();
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
        // The sender is dropped however the case ends, which wakes the waiting thread.
        let _sender = sender;
        case();
    });
    let ended = done.recv_timeout(limit);
    assert_eq!(ended, Err(RecvTimeoutError::Disconnected), "{name} hangs");
    if let Err(panic) = thread.unwrap().join() {
        resume_unwind(panic);
    }
}

/// Number of runs without a hit fault after which no more faults are expected.
const TRIES: usize = 3;

/// Runs `case` with a failure of the first, the second, … of these operations, each this number of times and
/// with this error, until there are no more operations. `case` returns true if the fault was hit.
fn at_every_fault(
    operations: &[Operation],
    kinds: &[(usize, i32)],
    case: impl Fn(DiskFault) -> bool + Send + Sync + Copy + 'static,
) {
    for &operation in operations {
        for &(times, errno) in kinds {
            for skip in 0.. {
                let fault = DiskFault { operation, skip, times, errno };
                let strikes = || {
                    let struck = Arc::new(AtomicBool::new(false));
                    let told = struck.clone();
                    watched(&format!("{fault:?}"), move || told.store(case(fault), Ordering::SeqCst));
                    struck.load(Ordering::SeqCst)
                };
                // A thread of the store may not have made the call before the case ended.
                if !(0..TRIES).any(|_| strikes()) {
                    assert!(skip > 0, "there is no {operation:?} at all");
                    break;
                }
            }
        }
    }
}

fn small() -> Options {
    Options::new().log(LogOptions::new().segment_len(16 << 10)).snapshots(SnapshotSchedule::never())
}

fn open(disk: &SimDisk, device: Arc<dyn Device>) -> Result<Store> {
    open_with(disk, device, small())
}

fn open_with(disk: &SimDisk, device: Arc<dyn Device>, options: Options) -> Result<Store> {
    Store::open_on(Arc::new(disk.clone()), device, options)
}

fn open_on_host(disk: &SimDisk) -> Result<Store> {
    open(disk, Arc::new(HostDevice::new()))
}

/// The history of a store. Each batch fills the page with its own Lsn, sets the root's `step` to this Lsn,
/// and replaces a second page. A segment has space for only a few of these batches.
#[derive(Clone, Debug, Default)]
struct Line {
    page: PageId,
    second: PageId,
    /// The expected `step` of each Lsn.
    steps: Vec<u64>,
    /// The newest batch that was acknowledged as logged.
    logged: u64,
    /// The newest batch that was acknowledged as durable.
    durable: u64,
}

impl Line {
    fn begin(store: &Store) -> Self {
        let mut batch = store.batch();
        let page = batch.create(PAGE_LEN, Place::Host).page();
        batch.create(1, Place::Device(0));
        batch.fill(page, 0, PAGE_LEN, &1u64.to_le_bytes()).set_root("step", 1u64);
        let committed = store.commit(batch).unwrap();
        store.wait_durable(committed.position.lsn).unwrap();
        let [page, second] = committed.pages[..] else { panic!("{committed:?}") };
        Self { page, second, steps: vec![0, 1], logged: 1, durable: 1 }
    }

    fn commit(&mut self, store: &Store, ack: Ack) -> Result<()> {
        self.commit_with_note(store, ack, 2500)
    }

    fn commit_with_note(&mut self, store: &Store, ack: Ack, note_len: usize) -> Result<()> {
        let lsn = self.logged + 1;
        let mut batch = store.batch();
        batch.fill(self.page, 0, PAGE_LEN, &lsn.to_le_bytes()).set_root("step", lsn);
        batch.delete(self.second).create(100, Place::Device(0));
        batch.note("n".repeat(note_len));
        self.steps.truncate(lsn as usize);
        self.steps.push(lsn);
        let ticket = store.submit(batch)?;
        assert_eq!(ticket.position().lsn.0, lsn);
        self.second = ticket.pages()[0];
        ticket.wait(Ack::Logged)?;
        self.logged = lsn;
        ticket.wait(ack)?;
        if ack == Ack::Durable {
            self.durable = lsn;
        }
        Ok(())
    }

    /// Makes `count` commits, every third one durable.
    fn commits(&mut self, store: &Store, count: usize) -> Result<()> {
        (0..count)
            .try_for_each(|index| self.commit(store, if index % 3 == 2 { Ack::Durable } else { Ack::Logged }))
    }

    fn restore(&mut self, store: &Store, snapshot: SnapshotId) -> Result<()> {
        let kept = store.snapshots();
        let end = kept.iter().find(|kept| kept.id == snapshot).unwrap().end;
        self.go_back(store, end, || store.restore(StatePoint::Snapshot(snapshot)))
    }

    fn restore_to(&mut self, store: &Store, target: Lsn) -> Result<()> {
        self.go_back(store, target, || store.restore(StatePoint::Lsn(target)))
    }

    fn go_back(
        &mut self,
        store: &Store,
        target: Lsn,
        restore: impl FnOnce() -> Result<Position>,
    ) -> Result<()> {
        let lsn = self.logged + 1;
        self.steps.truncate(lsn as usize);
        self.steps.push(self.steps[target.0 as usize]);
        assert_eq!(restore()?.lsn.0, lsn);
        (self.logged, self.durable) = (lsn, lsn);
        self.second = store.pages()?.last().unwrap().page;
        Ok(())
    }

    /// Makes commits that fill segments, takes snapshots that recycle segments, and restores a state. Stops
    /// at the first error.
    fn work(&mut self, store: &Store) -> Result<()> {
        // This batch is longer than all earlier batches, so that no idle staging memory is long enough.
        self.commit_with_note(store, Ack::Logged, 5000)?;
        for _ in 0..3 {
            self.commits(store, 7)?;
            store.snapshot()?;
        }
        self.commits(store, 2)?;
        self.restore(store, store.snapshots()[0].id)?;
        self.commits(store, 3)
    }

    /// Checks that the store is in a state of the history that is not older than `at_least`.
    fn check(&self, store: &Store, at_least: u64) {
        let lsn = store.lsn().0;
        assert!(lsn >= at_least, "{at_least} was acknowledged, {lsn} is there");
        assert!((lsn as usize) < self.steps.len(), "{lsn} was never committed");
        self.check_read(store).unwrap();
    }

    /// Reads all pages. The bytes must be right, or the read must fail.
    fn check_read(&self, store: &Store) -> Result<()> {
        let lsn = store.lsn();
        let step = self.steps[lsn.0 as usize];
        assert_eq!(store.root()?["step"], Value::U64(step), "the root of {lsn}");
        assert_eq!(store.pages()?.len(), 2);
        let mut bytes = vec![0; PAGE_LEN as usize];
        assert_eq!(store.read(self.page, 0, &mut bytes)?, lsn);
        let whole = bytes.chunks(8).all(|word| word == step.to_le_bytes());
        assert!(whole, "the page at {lsn} is {:?}…, not full of {step}", &bytes[..8]);
        Ok(())
    }
}

/// Checks that commits, snapshots and restores fail with the same cause. Returns this cause.
fn poisoned(store: &Store) -> Arc<Error> {
    let cause = |result: Result<()>| match result {
        Err(Error::Poisoned(cause)) => cause,
        other => panic!("not poisoned: {other:?}"),
    };
    let mut batch = store.batch();
    batch.set_root("after", true);
    let committed = cause(store.commit(batch).map(drop));
    let snapshot = cause(store.snapshot().map(drop));
    let restored = cause(store.restore(StatePoint::Snapshot(SnapshotId(1))).map(drop));
    assert_eq!([snapshot.to_string(), restored.to_string()], [committed.to_string(), committed.to_string()]);
    committed
}

/// A device that counts allocations, and that fails, delays or panics on request.
pub struct Gauge {
    inner: Arc<dyn Device>,
    /// Number of allocations that have not been released.
    live: AtomicI64,
    /// Number of allocations that were made.
    allocations: AtomicU64,
    /// Number of allocations that succeed before one fails for lack of memory.
    allocations_left: AtomicU64,
    panics: AtomicBool,
}

impl Gauge {
    fn new(inner: Arc<dyn Device>) -> Arc<Self> {
        Arc::new(Self {
            inner,
            live: AtomicI64::new(0),
            allocations: AtomicU64::new(0),
            allocations_left: AtomicU64::new(u64::MAX),
            panics: AtomicBool::new(false),
        })
    }

    pub fn host() -> Arc<Self> {
        Self::new(Arc::new(HostDevice::new()))
    }

    pub fn live(&self) -> i64 {
        self.live.load(Ordering::SeqCst)
    }

    /// Lets this number of further allocations succeed.
    pub fn allow(&self, allocations: u64) {
        self.allocations_left.store(allocations, Ordering::SeqCst);
    }
}

impl Device for Gauge {
    forward!(inner: label staging reached wait after places_and_abilities);

    fn allocate(&self, place: Place, len: u64) -> Result<MemoryId> {
        let left = self
            .allocations_left
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        left.map_err(|_| Error::OutOfMemory { place, len })?;
        let memory = self.inner.allocate(place, len)?;
        self.allocations.fetch_add(1, Ordering::SeqCst);
        self.live.fetch_add(1, Ordering::SeqCst);
        Ok(memory)
    }

    fn release(&self, memory: MemoryId) -> Result<()> {
        self.inner.release(memory)?;
        self.live.fetch_sub(1, Ordering::SeqCst);
        Ok(())
    }

    fn submit(&self, lane: Lane, list: CommandList) -> Result<Pending> {
        assert!(!self.panics.load(Ordering::SeqCst), "as arranged");
        self.inner.submit(lane, list)
    }
}
