//! A store on a simulated disk with writers that count, and the state that a crash would leave.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use remanent::device::Device;
use remanent::device::host::HostDevice;
use remanent::disk::Disk;
use remanent::error::{FileName, Folder};
use remanent::options::{LogOptions, ScrubSchedule, SnapshotSchedule};
use remanent::testing::sim_disk::{SimDisk, Tears};
use remanent::testing::sync::{Instant, Mutex};
use remanent::{Ack, Lsn, Options, PageId, Place, Store, Value, WriteBatch};
use remanent_format::state::rebuild::{RebuildOptions, RebuiltStore, rebuild};

use crate::archive::Files;
use crate::runner::Time;

/// Length of each page in bytes.
pub const PAGE_LEN: u64 = 64;

/// A store, its disk, and the acknowledged counts.
pub struct Ground {
    pub disk: SimDisk,
    pub store: Store,
    time: Time,
    began: Instant,
    /// The count of the newest acknowledged batch, per level and writer.
    acked: Mutex<BTreeMap<(&'static str, usize), u64>>,
    writers: Vec<[PageId; 2]>,
}

/// Options with small segments, and without background snapshots and scrubs.
pub fn options() -> Options {
    let options = Options::new().log(log());
    options.snapshots(SnapshotSchedule::never()).scrubs(ScrubSchedule::new().interval(None))
}

/// The log options.
pub fn log() -> LogOptions {
    LogOptions::new().segment_len(16 << 10).reserve_bytes(0)
}

/// The content of a store: the count of each writer.
type Counts = BTreeMap<usize, u64>;

impl Ground {
    /// Creates a store with two pages for each writer, at count 0.
    pub fn new(time: Time, options: Options, writers: usize) -> Self {
        Self::on(time, options, writers, Arc::new(HostDevice::new()))
    }

    /// Creates such a store on a device.
    pub fn on(time: Time, options: Options, writers: usize, device: Arc<dyn Device>) -> Self {
        let disk = SimDisk::new();
        let store = Store::open_on(Arc::new(disk.clone()), device, options).unwrap();
        let mut batch = store.batch();
        for _ in 0..2 * writers {
            batch.create(PAGE_LEN, Place::Host);
        }
        let pages = store.commit(batch).unwrap().pages;
        store.wait_durable(store.lsn()).unwrap();
        let writers = pages.chunks(2).map(|pair| [pair[0], pair[1]]).collect();
        Self { disk, store, time, began: Instant::now(), acked: Mutex::default(), writers }
    }

    /// Returns the two pages of a writer.
    pub fn pages(&self, writer: usize) -> [PageId; 2] {
        self.writers[writer]
    }

    /// Returns the batch that sets a writer's count, in both of its pages and in the root.
    pub fn batch(&self, writer: usize, count: u64) -> WriteBatch {
        let mut batch = self.store.batch();
        for page in self.pages(writer) {
            batch.fill(page, 0, PAGE_LEN, &count.to_le_bytes());
        }
        batch.set_root(format!("{writer}"), count);
        batch
    }

    /// Commits a count, waits for the acknowledgement, and checks the state that a crash at this point would
    /// leave.
    pub fn count(&self, writer: usize, count: u64, ack: Ack) -> remanent::Result<Lsn> {
        let ticket = self.store.submit(self.batch(writer, count))?;
        ticket.wait(Ack::Logged)?;
        self.acked(Ack::Logged, writer, count);
        ticket.wait(ack)?;
        self.acked(ack, writer, count);
        Ok(ticket.position().lsn)
    }

    /// Commits the counts from 1 to `last`.
    pub fn count_to(&self, last: u64, writer: usize, ack: Ack) {
        for count in 1..=last {
            self.count(writer, count, ack).unwrap();
        }
    }

    /// Records an acknowledgement. Its batch must survive from now on.
    pub fn acked(&self, ack: Ack, writer: usize, count: u64) {
        let survives = match ack {
            Ack::Logged => Some("kill"),
            Ack::Durable => Some("power cut"),
            _ => None,
        };
        if let Some(crash) = survives {
            self.acked.lock().insert((crash, writer), count);
        }
        self.check();
    }

    /// Returns the disk as a kill of the process at this moment would leave it.
    pub fn after_kill(&self) -> (Lsn, Counts) {
        let now = self.disk.events();
        let moment = self.disk.moments(now..now, Tears::None).pop().expect("now");
        counts(&self.disk.after_kill(moment), &self.writers)
    }

    /// Returns the oldest state that a power cut now could leave.
    pub fn after_power_cut(&self) -> (Lsn, Counts) {
        counts(&self.disk.after_power_cut(), &self.writers)
    }

    /// Asserts that a crash now would preserve all batches that were acknowledged before.
    pub fn check(&self) {
        let acked = self.acked.lock().clone();
        let (_, killed) = self.after_kill();
        let (_, cut) = self.after_power_cut();
        for ((crash, writer), count) in acked {
            let left = if crash == "kill" { killed[&writer] } else { cut[&writer] };
            assert!(
                left >= count,
                "a {crash} leaves writer {writer} at {left}, and {count} was acknowledged"
            );
        }
    }

    /// Returns a writer's count in a rebuilt state.
    pub fn count_of(&self, writer: usize, rebuilt: &RebuiltStore) -> u64 {
        count_in(rebuilt, writer, &self.writers[writer])
    }

    /// Returns the number of bytes of page memory in use.
    pub fn used_bytes(&self) -> u64 {
        let stats = self.store.stats();
        stats.places.iter().map(|(_, usage)| usage.allocated_bytes).sum()
    }

    /// Reads a writer's first page, and asserts that a kill of the process would preserve the count. Returns
    /// the count.
    pub fn read(&self, writer: usize) -> u64 {
        let mut read = vec![0; PAGE_LEN as usize];
        let lsn = self.store.read(self.pages(writer)[0], 0, &mut read).unwrap();
        let count = u64::from_le_bytes(read[..8].try_into().expect("8 bytes"));
        assert_eq!(read, bytes(count));
        let (left, counts) = self.after_kill();
        assert!(left >= lsn, "batch {lsn} was read, and a kill leaves {left}"); // I1
        assert!(counts[&writer] >= count);
        count
    }

    /// Asserts that no work took longer than `time`, unless the schedule lets work take arbitrarily long.
    pub fn took_at_most(&self, time: Duration) {
        took_at_most(self.time, self.began, time);
    }

    /// Closes the store. Asserts that a power cut then preserves all batches up to the last submitted one,
    /// and that no more than `time` has passed.
    pub fn close(self, newest: Lsn, time: Duration) {
        assert_eq!(self.close_moving(time), newest, "the store was closed");
    }

    /// Like [`close`](Self::close), for a store that moves pages with its own batches. Returns the last
    /// batch.
    pub fn close_moving(self, time: Duration) -> Lsn {
        let submitted = self.store.lsn();
        self.store.close().unwrap();
        took_at_most(self.time, self.began, time);
        let (lsn, counts) = counts(&self.disk.after_power_cut(), &self.writers);
        assert!(lsn >= submitted, "the store was closed");
        for ((_, writer), count) in self.acked.into_inner() {
            assert!(counts[&writer] >= count);
        }
        lsn
    }
}

fn took_at_most(time: Time, since: Instant, at_most: Duration) {
    let took = since.elapsed();
    assert!(time == Time::Hasty || took <= at_most, "{took:?} went by before a thread was woken");
}

/// Returns the state on a disk.
fn counts(disk: &SimDisk, writers: &[[PageId; 2]]) -> (Lsn, Counts) {
    let rebuilt = rebuild(&files(disk), &RebuildOptions::default()).expect("nothing is damaged");
    let counts =
        writers.iter().enumerate().map(|(writer, pages)| (writer, count_in(&rebuilt, writer, pages)));
    (rebuilt.table.lsn(), counts.collect())
}

/// Returns a writer's count. Asserts that each of its batches is complete.
fn count_in(rebuilt: &RebuiltStore, writer: usize, pages: &[PageId; 2]) -> u64 {
    let root = rebuilt.table.root().get(&writer.to_string()).cloned().unwrap_or(Value::U64(0));
    let Value::U64(count) = root else { panic!("writer {writer} is at {root:?}") };
    for page in pages {
        assert_eq!(rebuilt.contents[page], bytes(count), "page {page} of writer {writer}");
    }
    count
}

/// Copies the files of a disk that no thread uses, so that reading them does not involve the scheduler.
pub fn files(disk: &SimDisk) -> Files {
    let folders = [Folder::Root, Folder::Log, Folder::Pages, Folder::Snapshots];
    let names = folders.into_iter().flat_map(|folder| {
        let names = Disk::list(disk, folder).expect("no fault is left on a copy");
        names.into_iter().filter_map(move |name| FileName::parse(folder, &name))
    });
    Files(names.filter_map(|file| Some((file, disk.bytes(file)?))).collect())
}

/// Returns the bytes of a page at a count.
pub fn bytes(count: u64) -> Vec<u8> {
    count.to_le_bytes().repeat(PAGE_LEN as usize / 8)
}
