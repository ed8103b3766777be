//! Drives a store on a simulated disk. Records every batch for the model, and records every acknowledgement
//! as an event of the disk.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use remanent::batch::{Op, Width};
use remanent::device::host::HostDevice;
use remanent::disk::Disk;
use remanent::follow::{FollowFrom, Follower, Replica};
use remanent::snapshot::SnapshotInfo;
use remanent::testing::sim_disk::{Crash, CrashImage, CrashPlan, Moment, SimDisk};
use remanent::{
    Ack, Error, Key, Lsn, Metadata, Options, PageId, Position, SnapshotId, SnapshotOptions, StatePoint,
    Store, Value, View,
};
use remanent_format::state::rebuild::{RebuildOptions, rebuild};

use super::model::{Act, Line, Step, Target, batch, read, rebuilt};
use super::names::Names;
use super::trouble::Trouble;

/// Steele, Lea and Flood's SplitMix64 generator.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8).collect()
    }
}

/// The minimum state that must survive a crash.
#[derive(Clone, Copy, Debug, Default)]
pub struct Floors {
    /// Whether an open has returned, so that the store must exist.
    pub exists: bool,
    pub logged: u64,
    pub durable: u64,
}

impl Floors {
    /// Returns the floors, raised by the acknowledgements that were recorded on a disk.
    pub fn with(mut self, acks: &[u64]) -> Self {
        for ack in acks {
            let lsn = ack >> 1;
            self.exists = true;
            self.logged = self.logged.max(lsn);
            if ack & 1 == 1 {
                self.durable = self.durable.max(lsn);
            }
        }
        self
    }

    /// Returns the floors after a crash. A power cut preserves only durable batches.
    pub fn after(self, crash: Crash) -> Self {
        match crash {
            Crash::Kill => self,
            Crash::Power => Self { logged: self.durable, ..self },
        }
    }
}

/// The maximum length of a page that a [`Writer`] creates, in bytes.
const PAGE_LEN_MAX: usize = 600;

/// Generates valid batches for its own pages.
pub struct Writer {
    name: &'static str,
    random: Random,
    pages: Vec<(Target, usize)>,
    keys: usize,
}

impl Writer {
    pub fn new(name: &'static str, seed: u64) -> Self {
        Self { name, random: Random(seed), pages: Vec::new(), keys: 0 }
    }

    /// Returns a writer that owns all pages at the end of a history. Its keys have not been used before.
    pub fn over(self, line: &Line) -> Self {
        let state = line.at(line.last());
        let pages =
            state.pages.iter().map(|(page, state)| (Target::Page(*page), state.bytes.len())).collect();
        Self { pages, keys: self.keys.max(line.last() as usize * 3), ..self }
    }

    /// Returns the operations of the next batch. Assumes that the batch will be committed.
    fn acts(&mut self) -> Vec<Act> {
        let mut acts = Vec::new();
        let mut created = 0;
        for _ in 0..=self.random.below(3) {
            let kind = match self.pages.len() {
                0 => 0,
                6.. => 7,
                _ => self.random.below(14),
            };
            self.act(kind, &mut created, &mut acts);
        }
        // Every batch changes the root, so that no two states are equal.
        acts.push(Act::SetRoot { name: self.name.to_owned(), value: self.random.next() });
        acts
    }

    fn act(&mut self, kind: usize, created: &mut usize, acts: &mut Vec<Act>) {
        let random = &mut self.random;
        if kind == 0 {
            let len = [0, 1, 16, 100, PAGE_LEN_MAX][random.below(5)];
            self.keys += 1;
            let key = random.below(2) == 0;
            let key = key.then(|| Key::new(format!("{}{}", self.name, self.keys)).expect("a short key"));
            let metadata = match random.below(2) {
                0 => Metadata::new(),
                _ => Metadata::from([("made".to_owned(), Value::from(random.next()))]),
            };
            acts.push(Act::Create { len, key, metadata });
            let page = Target::New(*created);
            *created += 1;
            acts.push(Act::Write { page, offset: 0, bytes: random.bytes(len) });
            self.pages.push((page, len));
            return;
        }
        let chosen = random.below(self.pages.len());
        let (page, len) = self.pages[chosen];
        let act = match kind {
            1 | 2 => {
                let offset = random.below(len + 1);
                let count = random.below(len - offset + 1);
                Act::Write { page, offset, bytes: random.bytes(count) }
            }
            3 => {
                let count = (len / 2).min(1 + random.below(24));
                let (mask, bytes) = (random.bytes(count.div_ceil(8)), random.bytes(count * 2));
                Act::Masked { page, offset: (len / 2 - count) * 2, width: Width::W2, mask, bytes }
            }
            4 => {
                // A few indices are stored uncompressed, and more indices as gaps. They may be in any order.
                let mut indices: Vec<u32> = (0..len as u32 / 4).step_by(7).collect();
                indices.reverse();
                let values = random.bytes(indices.len() * 4);
                Act::Scatter { page, width: Width::W4, indices, values }
            }
            5 => {
                let len = len / 4 * 4;
                Act::Fill { page, offset: 0, len, pattern: random.bytes(4) }
            }
            6 => {
                let len = random.below(PAGE_LEN_MAX);
                self.pages[chosen].1 = len;
                Act::Resize { page, len }
            }
            7 => {
                self.pages.remove(chosen);
                Act::Delete { page }
            }
            8 => {
                let copy = Target::New(*created);
                *created += 1;
                self.pages.push((copy, len));
                Act::Clone { source: page }
            }
            9 | 10 => Act::SetMetadata { page, name: "note".to_owned(), value: random.next() },
            11 => Act::RemoveMetadata { page, name: "note".to_owned() },
            12 => Act::SetRoot { name: format!("{}-more", self.name), value: random.next() },
            _ => Act::RemoveRoot { name: format!("{}-more", self.name) },
        };
        acts.push(act);
    }

    fn committed(&mut self, new: &[PageId]) {
        for (page, _) in &mut self.pages {
            if let Target::New(index) = *page {
                *page = Target::Page(new[index]);
            }
        }
    }
}

/// Opens the store on a simulated disk.
pub fn open(disk: &SimDisk, options: &Options) -> Result<Store, Error> {
    Store::open_on(Arc::new(disk.clone()), Arc::new(HostDevice::new()), options.clone())
}

/// Runs each writer in its own thread, which commits one batch per ack, while this thread runs `meanwhile`.
pub fn commit_concurrently(
    driver: &Driver,
    store: &Store,
    writers: impl IntoIterator<Item = Writer>,
    acks: impl IntoIterator<Item = Ack>,
    meanwhile: impl FnOnce() -> Result<(), Error>,
) -> Result<(), Error> {
    let acks: Vec<Ack> = acks.into_iter().collect();
    std::thread::scope(|scope| {
        let commit_all = |mut writer: Writer| {
            let acks = &acks;
            scope.spawn(move || {
                acks.iter().try_for_each(|ack| driver.commit(store, &mut writer, *ack).map(drop))
            })
        };
        let threads: Vec<_> = writers.into_iter().map(commit_all).collect();
        let done = meanwhile();
        threads.into_iter().try_for_each(|thread| thread.join().expect("no panic")).and(done)
    })
}

/// A driver of a store on one disk. Clones share the disk.
#[derive(Clone)]
pub struct Driver {
    pub disk: SimDisk,
    /// The minimum state that had to survive when this disk was created.
    pub floors: Floors,
    options: Options,
    notes: Arc<Notes>,
    /// The fault that is injected into this life or a later one.
    trouble: Option<Arc<Trouble>>,
}

/// The recorded batches and acknowledgements of a driver.
struct Notes {
    book: Mutex<Book>,
    /// Notified when a step is recorded.
    written: Condvar,
    /// Replicas of followers, each with the number of disk events before its last read.
    followed: Mutex<Vec<(usize, Replica)>>,
    names: Mutex<Names>,
}

struct Book {
    line: Line,
    /// Steps committed so far, keyed by Lsn. Two threads may record their steps in another order than that of
    /// the log.
    steps: BTreeMap<u64, Step>,
    /// Acknowledgements, as recorded on the disk.
    acks: Vec<u64>,
    /// Whether the store moves pages with its own batches, which must be read from the log.
    has_tiers: bool,
}

impl Driver {
    pub fn new(disk: SimDisk, options: Options, line: Line, floors: Floors) -> Self {
        let book = Book { line, steps: BTreeMap::new(), acks: Vec::new(), has_tiers: false };
        let book = Mutex::new(book);
        let notes = Arc::new(Notes {
            book,
            written: Condvar::new(),
            followed: Mutex::default(),
            names: Mutex::default(),
        });
        Self { disk, floors, options, notes, trouble: None }
    }

    /// Returns the driver with a fault for this life or a later one.
    pub fn in_trouble(self, trouble: &Arc<Trouble>) -> Self {
        let driver = Self { trouble: Some(trouble.clone()), ..self };
        trouble.join(&driver);
        driver
    }

    /// Returns the driver without a fault for its later lives.
    pub fn out_of_trouble(self) -> Self {
        Self { trouble: None, ..self }
    }

    /// Returns the driver of the next life, which has its own disk.
    fn next_life(&self, disk: SimDisk, line: Line, floors: Floors) -> Self {
        let next = Self::new(disk, self.options.clone(), line, floors);
        match &self.trouble {
            Some(trouble) => next.in_trouble(trouble),
            None => next,
        }
    }

    /// Returns the disk as a kill of the process at this moment would leave it. A later power cut may still discard
    /// pending writes.
    pub fn killed(&self) -> Self {
        let disk = self.disk.after_kill(Moment { event: self.disk.events(), tear: None });
        let floors = self.floors.with(&self.notes.book.lock().unwrap().acks).after(Crash::Kill);
        self.next_life(disk, self.line(), floors)
    }

    /// Returns the disk state after a power cut that discards all pending writes.
    pub fn cut_off(&self) -> Self {
        let floors = self.floors.with(&self.notes.book.lock().unwrap().acks).after(Crash::Power);
        self.next_life(self.disk.after_power_cut(), self.line(), floors)
    }

    /// Returns the first crash image from event `from` on for which `is_wanted` returns true, as the disk of
    /// the next life.
    pub fn crashed(&self, from: usize, is_wanted: impl Fn(&SimDisk) -> bool) -> Option<Self> {
        let plan = CrashPlan { events: from..usize::MAX, ..CrashPlan::default() };
        let mut found = None;
        let mut each = |image: CrashImage| {
            if found.is_none() && is_wanted(&image.disk) {
                found = Some(image);
            }
        };
        self.disk.kill_images(&plan, &mut each);
        self.disk.power_images(&plan, &mut each);
        found.map(|image| {
            let floors = self.floors.with(&image.acks).after(image.crash);
            self.next_life(image.disk, self.line(), floors)
        })
    }

    /// Returns the disk state after a kill of the process just after the last event whose description begins
    /// with `event`.
    ///
    /// # Panics
    ///
    /// Panics if there is no such event.
    pub fn killed_after(&self, event: &str) -> Self {
        let history = self.disk.history();
        let at = history.iter().rposition(|entry| entry.starts_with(event)).expect("an event of that kind");
        let acked = history[..at].iter().filter(|entry| entry.starts_with("ack ")).count();
        let disk = self.disk.after_kill(Moment { event: at + 1, tear: None });
        let floors = self.floors.with(&self.notes.book.lock().unwrap().acks[..acked]);
        self.next_life(disk, self.line(), floors)
    }

    /// Opens the store with options of this life only.
    pub fn open_with(&self, options: Options) -> Result<Store, Error> {
        let store = open(&self.disk, &options)?;
        self.adopt(&store);
        Ok(store)
    }

    /// Opens the store with options that have tiers. The whole log is kept.
    pub fn open_with_tiers(&self, options: Options) -> Result<Store, Error> {
        let store = self.open_with(options)?;
        self.notes.book.lock().unwrap().has_tiers = true;
        Ok(store)
    }

    /// Opens the store with the driver's options.
    pub fn open(&self) -> Result<Store, Error> {
        let store = open(&self.disk, &self.options)?;
        self.adopt(&store);
        Ok(store)
    }

    /// Continues from the state that an open recovered. This state is durable, and lost batches are removed
    /// from the history.
    pub fn adopt(&self, store: &Store) {
        let lsn = store.recovered().position.lsn;
        let mut line = self.line();
        assert!(lsn.0 <= line.last(), "batch {lsn} was recovered, and {} is the last one", line.last());
        line.cut(lsn.0);
        {
            let mut book = self.notes.book.lock().unwrap();
            (book.line, book.steps) = (line, BTreeMap::new());
        }
        self.acked(Ack::Durable, lsn);
    }

    /// Commits the writer's next batch.
    pub fn commit(&self, store: &Store, writer: &mut Writer, ack: Ack) -> Result<Lsn, Error> {
        let acts = writer.acts();
        let (lsn, new) = self.commit_acts(store, acts, ack)?;
        writer.committed(&new);
        Ok(lsn)
    }

    /// Commits these operations as one batch.
    pub fn commit_acts(&self, store: &Store, acts: Vec<Act>, ack: Ack) -> Result<(Lsn, Vec<PageId>), Error> {
        let ticket = store.submit(batch(store, &acts))?;
        let (lsn, new) = (ticket.position().lsn, ticket.pages().to_vec());
        self.notes.book.lock().unwrap().steps.insert(lsn.0, Step::Batch { acts, new: new.clone() });
        self.notes.written.notify_all();
        ticket.wait(Ack::Logged)?;
        self.acked(Ack::Logged, lsn);
        ticket.wait(ack)?;
        if ack == Ack::Durable {
            self.acked(ack, lsn);
        }
        Ok((lsn, new))
    }

    pub fn wait_durable(&self, store: &Store, lsn: Lsn) -> Result<(), Error> {
        store.wait_durable(lsn)?;
        self.acked(Ack::Durable, lsn);
        Ok(())
    }

    /// Takes a snapshot, which makes its state durable.
    pub fn snapshot(&self, store: &Store) -> Result<SnapshotInfo, Error> {
        let info = store.snapshot()?;
        self.acked(Ack::Durable, info.end);
        Ok(info)
    }

    /// Takes a snapshot without waiting until it is verified.
    pub fn publish(&self, store: &Store) -> Result<SnapshotInfo, Error> {
        let info = store.snapshot_with(SnapshotOptions::new().only_published())?;
        self.acked(Ack::Durable, info.end);
        Ok(info)
    }

    /// Takes an exact snapshot, which contains the state of its batch without the log.
    pub fn snapshot_exact(&self, store: &Store) -> Result<SnapshotInfo, Error> {
        let info = store.snapshot_with(SnapshotOptions::new().exact())?;
        assert_eq!(info.redo, info.end);
        self.acked(Ack::Durable, info.end);
        let options =
            RebuildOptions { base: Some(info.id), until: Some(info.end), ..RebuildOptions::default() };
        let alone = rebuild(&self.disk, &options).expect("nothing is damaged");
        assert_eq!((alone.table.lsn(), alone.batches), (info.end, 0));
        let difference = self.line_up_to(info.end.0).at(info.end.0).difference(&rebuilt(&alone));
        assert_eq!(difference, None, "the exact snapshot at batch {}", info.end);
        Ok(info)
    }

    /// Takes a snapshot that is kept until its name is released.
    pub fn snapshot_named(&self, store: &Store, name: &str) -> Result<SnapshotInfo, Error> {
        self.named(store, name, SnapshotOptions::new())
    }

    /// Takes a named snapshot without waiting until it is verified.
    pub fn publish_named(&self, store: &Store, name: &str) -> Result<SnapshotInfo, Error> {
        self.named(store, name, SnapshotOptions::new().only_published())
    }

    fn named(&self, store: &Store, name: &str, options: SnapshotOptions) -> Result<SnapshotInfo, Error> {
        let info = store.snapshot_with(options.name(name))?;
        self.acked(Ack::Durable, info.end);
        self.notes.names.lock().unwrap().told(self.disk.events(), name);
        Ok(info)
    }

    /// Releases a name. Removes only the snapshot with this name, or all snapshots that are no longer kept.
    /// Returns the removed snapshots.
    pub fn give_up(&self, store: &Store, name: &str, is_alone: bool) -> Result<Vec<SnapshotInfo>, Error> {
        self.notes.names.lock().unwrap().given_up(self.disk.events(), name);
        Ok(store.prune(&store.retention().give_up(name).names_only(is_alone))?.snapshots)
    }

    /// Returns the names of snapshots, with the events at which they changed.
    pub fn names(&self) -> Names {
        self.notes.names.lock().unwrap().clone()
    }

    /// Creates pages of `len` bytes in a batch each.
    pub fn create_pages(
        &self,
        store: &Store,
        random: &mut Random,
        count: usize,
        len: usize,
    ) -> Result<Vec<PageId>, Error> {
        let mut pages = Vec::new();
        for _ in 0..count {
            let acts = vec![
                Act::Create { len, key: None, metadata: Metadata::new() },
                Act::Write { page: Target::New(0), offset: 0, bytes: random.bytes(len) },
            ];
            pages.extend(self.commit_acts(store, acts, Ack::Logged)?.1);
        }
        Ok(pages)
    }

    /// Changes all of these pages in one batch.
    pub fn change(&self, store: &Store, random: &mut Random, pages: &[PageId]) -> Result<(), Error> {
        let write =
            |page: &PageId| Act::Write { page: Target::Page(*page), offset: 3, bytes: random.bytes(20) };
        let acts = pages.iter().map(write).collect();
        self.commit_acts(store, acts, Ack::Logged).map(drop)
    }

    pub fn restore(&self, store: &Store, snapshot: SnapshotInfo) -> Result<(), Error> {
        let SnapshotInfo { id, end, .. } = snapshot;
        self.restored(store, end.0, || store.restore(StatePoint::Snapshot(SnapshotId(id.0))))
    }

    /// Restores the state after a batch.
    pub fn restore_to(&self, store: &Store, to: u64) -> Result<(), Error> {
        self.restored(store, to, || store.restore(StatePoint::Lsn(Lsn(to))))
    }

    /// Records a restore before it is executed, because a failed restore may still be in the log.
    fn restored(
        &self,
        store: &Store,
        to: u64,
        restore: impl FnOnce() -> Result<Position, Error>,
    ) -> Result<(), Error> {
        let lsn = Lsn(store.lsn().0 + 1);
        self.notes.book.lock().unwrap().steps.insert(lsn.0, Step::Restore { to });
        assert_eq!(restore()?.lsn, lsn, "no other thread commits meanwhile");
        self.acked(Ack::Durable, lsn);
        Ok(())
    }

    /// Forks the state after a batch to an empty disk. Once the fork has returned, the disk must contain that
    /// state.
    pub fn fork(&self, lsn: u64, target: SimDisk) -> Result<Self, Error> {
        let line = self.line_up_to(lsn).forked(lsn);
        let target = self.next_life(target, line, Floors::default());
        let disks = [&self.disk, &target.disk].map(|disk| Arc::new(disk.clone()) as Arc<dyn Disk>);
        View::open_on(&disks[0], Some(&StatePoint::Lsn(Lsn(lsn))))?.fork_on(&disks[1])?;
        target.acked(Ack::Durable, Lsn(lsn));
        Ok(target)
    }

    /// Records the position of a follower. After every later crash, the follower must be able to continue, or
    /// must get an error with the reason.
    pub fn note_follower(&self, replica: &Replica) {
        self.notes.followed.lock().unwrap().push((self.disk.events(), replica.clone()));
    }

    /// Returns the replicas of the followers, each with the number of disk events before its last read.
    pub fn followed(&self) -> Vec<(usize, Replica)> {
        self.notes.followed.lock().unwrap().clone()
    }

    /// Closes the store, which makes all batches durable.
    pub fn close(&self, store: Store) -> Result<(), Error> {
        let lsn = store.lsn();
        store.close()?;
        self.acked(Ack::Durable, lsn);
        Ok(())
    }

    /// Asserts that the open store has the model's state.
    pub fn check(&self, store: &Store) {
        let line = self.line();
        let difference = line.at(line.last()).difference(&read(store).expect("an open store can be read"));
        assert_eq!(difference, None, "before any crash, at batch {}", line.last());
    }

    /// Waits until the batch at `position`, which moved pages, is acknowledged at this level.
    pub fn moved(&self, store: &Store, position: Option<Position>, ack: Ack) -> Result<(), Error> {
        let Some(Position { lsn, .. }) = position else { return Ok(()) };
        self.acked(Ack::Logged, lsn);
        if ack == Ack::Durable { self.wait_durable(store, lsn) } else { Ok(()) }
    }

    /// Returns the history so far.
    pub fn line(&self) -> Line {
        self.note_moves();
        self.line_up_to(u64::MAX)
    }

    /// Reads the batches that the store itself committed from the log, and records them. These batches only
    /// move pages.
    fn note_moves(&self) {
        let mut book = self.notes.book.lock().unwrap();
        if !book.has_tiers {
            return;
        }
        let disk: Arc<dyn Disk> = Arc::new(self.disk.clone());
        // At the end of the log, even after a fault, there is nothing more to record.
        let Ok(mut follower) = Follower::open_on(disk, FollowFrom::Beginning) else { return };
        while let Ok(Some(batch)) = follower.next(Duration::ZERO) {
            let lsn = batch.lsn().0;
            if lsn <= book.line.last() || book.steps.contains_key(&lsn) {
                continue;
            }
            let acts = batch.operations().into_iter().map(|op| match op {
                Op::Move { page, place } => Act::Move { page: Target::Page(page), place },
                op => panic!("the store committed {op:?} on its own"),
            });
            let acts = acts.collect();
            book.steps.insert(lsn, Step::Batch { acts, new: Vec::new() });
        }
    }

    /// Returns the history up to this Lsn. A batch may be in the log and in a snapshot before the committing
    /// thread has recorded it, so this method waits for the record.
    fn line_up_to(&self, last: u64) -> Line {
        let mut book = self.notes.book.lock().unwrap();
        let is_there = |book: &Book| {
            last == u64::MAX || (book.line.last() + 1..=last).all(|lsn| book.steps.contains_key(&lsn))
        };
        while !is_there(&book) {
            book = self.notes.written.wait(book).unwrap();
        }
        let mut line = book.line.clone();
        for (lsn, step) in book.steps.range(..=last) {
            assert_eq!(*lsn, line.last() + 1, "Lsns are dense");
            line.push(step);
        }
        line
    }

    fn acked(&self, ack: Ack, lsn: Lsn) {
        let ack = lsn.0 << 1 | u64::from(ack == Ack::Durable);
        self.notes.book.lock().unwrap().acks.push(ack);
        self.disk.note_ack(ack);
    }
}
