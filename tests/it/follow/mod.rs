//! Following a store. Every batch arrives once, in order and with the right bytes, whatever happens to the
//! writer, or the follower gets a typed error.
//!
//! The batches are those of the workload of the kill suite, so that the state after every Lsn is known. Other
//! suites also test followers: `kill` with a writer that is killed, and `crash` after every crash.

mod ends;
mod idle;
mod images;
mod marks;
mod races;

use std::sync::Arc;
use std::time::Duration;

use remanent::batch::Op;
use remanent::device::host::HostDevice;
use remanent::disk::Disk;
use remanent::disk::dir::DirDisk;
use remanent::error::Invalid;
use remanent::follow::{FollowFrom, FollowedBatch, Follower, FollowerPosition, Replica};
use remanent::options::{ImageOptions, LogIo, LogOptions};
use remanent::testing::sim_disk::{Moment, SimDisk};
use remanent::{Error, Lsn, Options, PageId, Place, StatePoint, Store};
use remanent_format::state::survey::Survey;

use crate::kill::model::Model;
use crate::kill::workload::{Shape, changes, fill, is_restore, reshape, restore_target};
use crate::with_options::With;

/// Options with small segments, so that a few batches fill several of them.
fn options() -> Options {
    // Short chunks, so that pages on disk of a few hundred bytes have overlays.
    Options::new()
        .log(LogOptions::new().segment_len(16 << 10).reserve_bytes(0))
        .images(ImageOptions::new().chunk_len(4 << 10))
}

/// An open store that commits the workload, and its expected content.
struct Writer {
    store: Store,
    shape: Shape,
    next: Lsn,
}

impl Writer {
    fn open(disk: &Arc<dyn Disk>, options: Options) -> Self {
        let store = Store::open_on(disk.clone(), Arc::new(HostDevice::new()), options).unwrap();
        let (shape, next) = (shape(&store), store.lsn().next());
        Self { store, shape, next }
    }

    /// Commits `count` batches of the workload.
    fn commit(&mut self, count: usize) {
        for _ in 0..count {
            if is_restore(self.next) {
                let position = self.store.restore(StatePoint::Lsn(restore_target(self.next))).unwrap();
                assert_eq!(position.lsn, self.next);
                self.shape = shape(&self.store);
                self.next = self.next.next();
                continue;
            }
            let changes = changes(self.next, &self.shape);
            let mut batch = self.store.batch();
            fill(&mut batch, self.next, &changes);
            let committed = self.store.commit(batch).unwrap();
            assert_eq!(committed.position.lsn, self.next);
            reshape(&mut self.shape, &changes, &committed.pages);
            self.next = self.next.next();
        }
    }
}

fn shape(store: &Store) -> Shape {
    store.pages().unwrap().map(|info| (info.page, info.len)).collect()
}

/// A follower with a replica that is compared with the model after each batch.
struct Reader {
    follower: Follower,
    replica: Replica,
    model: Model,
}

impl Reader {
    fn open(disk: &Arc<dyn Disk>) -> Self {
        let follower = Follower::open_on(disk.clone(), FollowFrom::Beginning).unwrap();
        Self { follower, replica: Replica::default(), model: Model::new() }
    }

    /// Reads the state of the newest snapshot, and follows from there.
    fn from_snapshot(disk: &Arc<dyn Disk>) -> Self {
        Self::try_from_snapshot(disk).unwrap()
    }

    fn try_from_snapshot(disk: &Arc<dyn Disk>) -> Result<Self, Error> {
        let replica = Replica::from_snapshot_on(disk)?;
        let follower = Follower::open_on(disk.clone(), replica.position().into())?;
        let mut model = Model::new();
        model.advance(replica.lsn());
        same(&replica, &model);
        Ok(Self { follower, replica, model })
    }

    /// Continues with a new follower from the position of this one, as another process would.
    fn reopen(&mut self, disk: &Arc<dyn Disk>) -> Result<(), Error> {
        let text = self.follower.position().to_string();
        let position: FollowerPosition = text.parse().unwrap();
        self.follower = Follower::open_on(disk.clone(), FollowFrom::Position(position))?;
        Ok(())
    }

    fn step(&mut self) -> Result<Option<FollowedBatch>, Error> {
        let Some(batch) = self.follower.next(Duration::ZERO)? else { return Ok(None) };
        assert_eq!(batch.lsn(), self.model.lsn.next(), "each batch once, in order");
        assert_eq!(batch.position(), self.follower.position());
        assert!(batch.durable() <= batch.lsn());
        // This call fails if the images of the batch were removed in the meantime.
        self.replica.apply(&batch)?;
        self.model.advance(batch.lsn());
        same(&self.replica, &self.model);
        Ok(Some(batch))
    }

    fn catch_up(&mut self) -> Result<Lsn, Error> {
        while self.step()?.is_some() {}
        Ok(self.replica.lsn())
    }
}

fn same(replica: &Replica, model: &Model) {
    assert_eq!(replica.lsn(), model.lsn);
    let infos = model.state.pages.values().map(|(info, _)| info.clone());
    assert!(replica.pages().eq(infos), "another table at {}", model.lsn);
    assert_eq!(**replica.root(), model.state.root);
    for (info, bytes) in model.state.pages.values() {
        assert!(replica.bytes(info.page) == Some(bytes), "page {} differs at {}", info.page, model.lsn);
    }
}

fn sim() -> (SimDisk, Arc<dyn Disk>) {
    let disk = SimDisk::new();
    (disk.clone(), Arc::new(disk))
}

#[test]
fn every_batch_arrives_once_in_order() {
    let directory = tempfile::tempdir().unwrap();
    for (name, log_io) in [("default", None), ("buffered", Some(LogIo::Buffered))] {
        let disk: Arc<dyn Disk> = Arc::new(DirDisk::new(directory.path().join(name)));
        let options = options().with(|options| options.log.io = log_io);
        let mut writer = Writer::open(&disk, options);
        let mut reader = Reader::open(&disk);
        assert!(reader.step().unwrap().is_none());
        for round in 0..60 {
            writer.commit(1 + round % 7);
            assert_eq!(reader.catch_up().unwrap(), writer.store.lsn());
        }
        assert!(writer.store.stats().log.rolls > 5, "{:?}", writer.store.stats().log);
        // A follower from the beginning has the same content, even if no process has the store open.
        assert_eq!(Reader::open(&disk).catch_up().unwrap(), writer.store.lsn());
        let lsn = writer.store.lsn();
        drop(writer);
        assert_eq!(Reader::open(&disk).catch_up().unwrap(), lsn);
        assert_eq!(reader.catch_up().unwrap(), lsn);
    }
}

#[test]
fn oversized_frame_is_followed() {
    let (_, disk) = sim();
    let mut writer = Writer::open(&disk, options());
    let mut reader = Reader::open(&disk);
    // Every 211th batch creates a page of 80 KiB, whose segment replaces an empty segment of 16 KiB.
    writer.commit(209);
    reader.catch_up().unwrap();
    writer.commit(4);
    assert_eq!(reader.catch_up().unwrap(), writer.store.lsn());
}

#[test]
fn follower_resumes_from_any_position() {
    let (_, disk) = sim();
    let mut writer = Writer::open(&disk, options());
    let mut reader = Reader::open(&disk);
    reader.reopen(&disk).unwrap();
    for _ in 0..80 {
        writer.commit(1);
        writer.store.wait_durable(writer.store.lsn()).unwrap();
        assert!(reader.step().unwrap().is_some());
        reader.reopen(&disk).unwrap();
        assert!(reader.step().unwrap().is_none());
    }
    assert!(writer.store.stats().log.rolls > 2, "{:?}", writer.store.stats().log);
}

#[test]
fn follower_crosses_incarnations_without_repeats() {
    let (_, disk) = sim();
    let mut late = None;
    let mut reader: Option<Reader> = None;
    for life in 0..6 {
        let mut writer = Writer::open(&disk, options());
        let reader = reader.get_or_insert_with(|| Reader::open(&disk));
        let late = late.get_or_insert_with(|| Reader::open(&disk));
        // Some lives commit nothing, and some followers read an incarnation before its first batch.
        if life % 2 == 0 {
            assert!(reader.step().unwrap().is_none());
            assert_eq!(reader.follower.position().incarnation.number, life + 1);
            reader.reopen(&disk).unwrap();
        }
        writer.commit([3, 0, 5, 1, 0, 4][life as usize]);
        reader.catch_up().unwrap();
        drop(writer);
        if life == 3 {
            late.catch_up().unwrap();
            late.reopen(&disk).unwrap();
        }
    }
    let reader = reader.unwrap();
    assert_eq!(reader.model.lsn, Lsn(13));
    let mut late = late.unwrap();
    assert_eq!(late.model.lsn, Lsn(9));
    assert_eq!(late.catch_up().unwrap(), Lsn(13));
    assert_eq!(late.follower.position(), reader.follower.position());
}

/// The next open omits an incarnation without a commit from the line. The position of a follower in this
/// incarnation is still valid if its Lsn and chain hash match.
#[test]
fn positions_in_omitted_incarnations_stay_valid() {
    let (sim, disk) = sim();
    Writer::open(&disk, options()).commit(4);
    let mut readers = Vec::new();
    for number in 2..6 {
        let _writer = Writer::open(&disk, options());
        let mut reader = Reader::open(&disk);
        assert_eq!(reader.catch_up().unwrap(), Lsn(4));
        assert_eq!(reader.follower.position().incarnation.number, number);
        readers.push((reader.follower.position(), reader));
    }
    let mut writer = Writer::open(&disk, options());
    writer.commit(1);
    let survey = Survey::read(&sim).unwrap();
    assert_eq!(survey.log.line().len(), 2, "all but the first and the newest were left out");
    for (position, mut running) in readers {
        assert_eq!(running.catch_up().unwrap(), Lsn(5), "from {position}");
        let from = |position| {
            let mut follower = Follower::open_on(disk.clone(), FollowFrom::Position(position))?;
            Ok::<_, Error>(follower.next(Duration::ZERO)?.map(|batch| batch.position().lsn))
        };
        assert_eq!(from(position).unwrap(), Some(Lsn(5)), "from {position}");
        // Test a batch that a crash lost, and a batch that the store never had.
        let (lsn, chain) = (Lsn(5), position.chain ^ 1);
        for wrong in [FollowerPosition { lsn, ..position }, FollowerPosition { chain, ..position }] {
            let answer = from(wrong);
            assert!(matches!(answer, Err(Error::Diverged { .. })), "from {wrong}: {answer:?}");
        }
    }
}

#[test]
fn copied_tail_is_not_delivered_twice() {
    let mut copied = 0;
    for handed in 0..=6 {
        let (sim, disk) = sim();
        let mut writer = Writer::open(&disk, options());
        let mut reader = Reader::open(&disk);
        writer.commit(6);
        // So soon after a batch, no mark covers the batch, so recovery copies it into the next incarnation.
        let killed: Arc<dyn Disk> = Arc::new(sim.after_kill(Moment { event: sim.events(), tear: None }));
        for _ in 0..handed {
            assert!(reader.step().unwrap().is_some());
        }
        drop(writer);
        let mut writer = Writer::open(&killed, options());
        copied += writer.store.recovered().copied_batches;
        writer.commit(2);
        reader.reopen(&killed).unwrap();
        assert_eq!(reader.catch_up().unwrap(), Lsn(8));
        assert_eq!(reader.follower.position().incarnation, writer.store.recovered().position.incarnation);
    }
    assert!(copied > 0, "no tail was copied");
}

#[test]
fn follower_receives_restore_as_one_batch() {
    let (_, disk) = sim();
    let writer = Writer::open(&disk, options());
    let store = &writer.store;
    let (mut follower, mut replica) =
        (Follower::open_on(disk.clone(), FollowFrom::Beginning).unwrap(), Replica::default());
    let mut batch = store.batch();
    let (kept, changed, gone) = (
        batch.create(8, Place::Host).page(),
        batch.create(8, Place::Host).page(),
        batch.create(8, Place::Host).page(),
    );
    batch.write(kept, 0, b"kept").write(changed, 0, b"before").write(gone, 0, b"gone").set_root("step", 1u64);
    let [kept, changed, gone] = store.commit(batch).unwrap().pages[..] else { panic!("three pages") };
    let snapshot = store.snapshot().unwrap();
    let mut batch = store.batch();
    batch.write(changed, 0, b"after!").delete(gone).set_root("step", 2u64);
    let new = batch.create(4, Place::Host).page();
    batch.write(new, 0, b"new");
    store.commit(batch).unwrap();
    while let Some(batch) = follower.next(Duration::ZERO).unwrap() {
        replica.apply(&batch).unwrap();
    }
    assert_eq!((replica.lsn(), replica.pages().len()), (Lsn(2), 3));

    let restored_at = store.restore(StatePoint::Snapshot(snapshot.id)).unwrap();
    let batch = follower.next(Duration::ZERO).unwrap().expect("the restore is logged");
    assert_eq!(batch.position().batch(), restored_at);
    assert_eq!(batch.operations().iter().map(Op::kind).collect::<Vec<_>>(), ["restore"]);
    let restored = batch.restored().expect("it is a restore");
    assert_eq!(restored.of(), snapshot.end);
    assert_eq!(restored.read(gone).unwrap(), b"gone\0\0\0\0");
    assert!(matches!(restored.read(PageId(99)), Err(Error::UnknownPage { .. })));
    replica.apply(&batch).unwrap();
    let check = |replica: &Replica| {
        assert!(replica.pages().eq(store.pages().unwrap()));
        assert_eq!(replica.root(), &store.root().unwrap());
        for (page, bytes) in [(kept, b"kept\0\0\0\0"), (changed, b"before\0\0"), (gone, b"gone\0\0\0\0")] {
            assert_eq!(replica.bytes(page), Some(&bytes[..]));
        }
    };
    check(&replica);
    assert!(matches!(replica.apply(&batch), Err(Error::Invalid(Invalid::OutOfOrder { .. }))));

    // New epochs are above those before the restore.
    let mut batch = store.batch();
    batch.set_metadata(kept, "seen", true);
    store.commit(batch).unwrap();
    replica.apply(&follower.next(Duration::ZERO).unwrap().expect("it is logged")).unwrap();
    check(&replica);
    check(
        &Replica::from_snapshot_on(&disk)
            .and_then(|mut replica| {
                let mut follower = Follower::open_on(disk.clone(), replica.position().into())?;
                while let Some(batch) = follower.next(Duration::ZERO)? {
                    replica.apply(&batch)?;
                }
                Ok(replica)
            })
            .unwrap(),
    );
}

#[test]
fn follower_neither_writes_nor_locks() {
    let (sim, disk) = sim();
    let mut writer = Writer::open(&disk, options());
    writer.commit(20);
    writer.store.snapshot().unwrap();
    writer.commit(3);
    writer.store.close().unwrap();
    let events = sim.events();
    Reader::from_snapshot(&disk).catch_up().unwrap();
    let mut reader = Reader::from_snapshot(&disk);
    reader.reopen(&disk).unwrap();
    assert_eq!(reader.catch_up().unwrap(), Lsn(23));
    assert_eq!(sim.events(), events, "{:#?}", &sim.history()[events..]);
    // A writer may open the store while the follower exists.
    Writer::open(&disk, options()).commit(1);
    assert_eq!(reader.catch_up().unwrap(), Lsn(24));
}

#[test]
fn waiting_follower_wakes_on_batch_or_timeout() {
    let directory = tempfile::tempdir().unwrap();
    let disk: Arc<dyn Disk> = Arc::new(DirDisk::new(directory.path()));
    for log_io in [None, Some(LogIo::Buffered)] {
        let mut writer = Writer::open(&disk, options().with(|options| options.log.io = log_io));
        let mut reader = Reader::open(&disk);
        reader.catch_up().unwrap();
        assert!(reader.follower.next(Duration::from_millis(30)).unwrap().is_none());
        let lsn = writer.next;
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| reader.follower.next(Duration::MAX).unwrap().unwrap().lsn());
            writer.commit(1);
            assert_eq!(waiting.join().unwrap(), lsn);
        });
    }
}

#[test]
fn following_without_store_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    for from in [FollowFrom::Beginning, FollowFrom::Snapshot] {
        let refused = Follower::open(directory.path(), from).map(drop);
        assert!(matches!(refused, Err(Error::NoStore { found: None, .. })), "{refused:?}");
    }
    assert!(matches!(Replica::from_snapshot(directory.path()), Err(Error::NoStore { found: None, .. })));
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
}

/// The system may limit a user to a hundred inotify instances.
#[test]
fn the_followers_of_a_store_share_one_watch() {
    crate::machine::alone(|| {
        let directory = tempfile::tempdir().unwrap();
        let store =
            Options::new().log(LogOptions::new().segment_len(64 << 10)).open(directory.path()).unwrap();
        let mut followers: Vec<Follower> =
            (0..300).map(|_| Follower::open(directory.path(), FollowFrom::Beginning).unwrap()).collect();
        let watches = || {
            let open = std::fs::read_dir("/proc/self/fd").unwrap();
            let names = open.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
            names.filter(|name| name.to_string_lossy().contains("inotify")).count()
        };
        assert_eq!(watches(), 1);
        store.commit(store.batch()).unwrap();
        for follower in &mut followers {
            assert_eq!(follower.next(std::time::Duration::from_secs(60)).unwrap().unwrap().lsn(), Lsn(1));
        }
        // The watch is removed together with the last follower.
        followers.truncate(1);
        assert_eq!(watches(), 1);
    });
}
