//! Two writers of one store, because no lock excludes the second. The first writer is superseded. It
//! acknowledges no more batches, and changes no file of the second writer.

mod file_systems;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use remanent::device::host::HostDevice;
use remanent::disk::Disk;
use remanent::error::Remedy;
use remanent::options::LogIo;
use remanent::testing::sim_disk::{SimDisk, SyncPoint};
use remanent::{Ack, Error, Options, PageId, Place, Result, Store, Ticket};

use crate::files::small;
use crate::machine::{alone_for, effort, in_parallel};
use crate::with_options::With;

/// Environment variable for the number of steps in a history after the first open.
const STEPS: &str = "REMANENT_WRITERS_STEPS";

/// A call of one of the two writers. The number selects the writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Open(usize),
    /// Commits a batch and waits until it is durable.
    Commit(usize),
    /// Submits a batch. The wait until it is durable comes later or never.
    Submit(usize),
    Wait(usize),
    Snapshot(usize),
    Prune(usize),
    Close(usize),
}

impl Step {
    fn writer(self) -> usize {
        match self {
            Self::Open(writer)
            | Self::Commit(writer)
            | Self::Submit(writer)
            | Self::Wait(writer)
            | Self::Snapshot(writer)
            | Self::Prune(writer)
            | Self::Close(writer) => writer,
        }
    }
}

/// Returns all histories of this many steps that begin with the first writer's open.
fn histories(len: usize) -> Vec<Vec<Step>> {
    let mut all = vec![vec![Step::Open(0)]];
    for _ in 0..len {
        let longer = |history: Vec<Step>| {
            let next: Vec<Step> = (0..2).flat_map(|writer| possible(&history, writer)).collect();
            next.into_iter().map(move |step| [&history[..], &[step]].concat())
        };
        all = all.into_iter().flat_map(longer).collect();
    }
    // Other tests cover histories with one writer.
    all.retain(|history| history.contains(&Step::Open(1)));
    all
}

/// Returns the steps of a writer that are possible after a history.
fn possible(history: &[Step], writer: usize) -> Vec<Step> {
    let of_writer = |step: &&Step| step.writer() == writer;
    let next: &[fn(usize) -> Step] = match history.iter().rev().find(of_writer) {
        None | Some(Step::Close(_)) => &[Step::Open],
        Some(Step::Submit(_)) => &[Step::Wait, Step::Commit, Step::Snapshot, Step::Prune, Step::Close],
        Some(_) => &[Step::Commit, Step::Submit, Step::Snapshot, Step::Prune, Step::Close],
    };
    next.iter().map(|step| step(writer)).collect()
}

fn superseded(error: &Error) -> bool {
    matches!(error, Error::Poisoned(cause) if matches!(**cause, Error::Superseded { .. }))
}

/// Two writers, and the expected content of the store.
struct Writers {
    disk: SimDisk,
    options: Options,
    stores: [Option<Store>; 2],
    /// Submitted batches that were not awaited yet, with their numbers.
    tickets: [Option<(u64, Ticket)>; 2],
    page: PageId,
    /// The writer that opened the store last.
    newest: usize,
    /// The newest number whose batch was acknowledged as durable.
    durable: u64,
    /// Later numbers that the newest writer submitted.
    submitted: Vec<u64>,
    last: u64,
    /// The number that the newest writer found at its open. It includes smaller numbers of the other writer.
    found: u64,
}

impl Writers {
    fn new(io: LogIo) -> Self {
        let disk = SimDisk::without_locks();
        let options = small().ack(Ack::Durable).with(|options| options.log.io = Some(io));
        let store = open(&disk, &options).unwrap();
        let mut batch = store.batch();
        batch.create(8, Place::Host);
        let page = store.commit(batch).unwrap().pages[0];
        store.close().unwrap();
        Self {
            disk,
            options,
            stores: [None, None],
            tickets: [None, None],
            page,
            newest: 0,
            durable: 0,
            submitted: Vec::new(),
            last: 0,
            found: 0,
        }
    }

    fn number(&self, store: &Store) -> u64 {
        let mut bytes = [0; 8];
        store.read(self.page, 0, &mut bytes).unwrap();
        u64::from_le_bytes(bytes)
    }

    /// Opens the store, which must contain the newest durable number or a later one that was logged.
    fn open(&mut self) -> Store {
        let store = open(&self.disk, &self.options).unwrap();
        let found = self.number(&store);
        let expected = [&[self.durable][..], &self.submitted].concat();
        assert!(expected.contains(&found), "{found} is not one of {expected:?}");
        (self.durable, self.submitted, self.found) = (found, Vec::new(), found);
        store
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Open(writer) => {
                let store = self.open();
                (self.stores[writer], self.newest) = (Some(store), writer);
            }
            Step::Commit(writer) => {
                let committed = self.submit(writer).and_then(|ticket| ticket.wait(Ack::Durable));
                if self.expect(writer, committed.map(drop)) {
                    self.all_durable();
                }
            }
            Step::Submit(writer) => match self.submit(writer) {
                Ok(ticket) => self.tickets[writer] = Some((self.last, ticket)),
                Err(error) => assert!(writer != self.newest && superseded(&error), "{error}"),
            },
            Step::Wait(writer) => {
                let Some((number, ticket)) = self.tickets[writer].take() else { return };
                match ticket.wait(Ack::Durable) {
                    Ok(_) if writer == self.newest => self.all_durable(),
                    // The batch was durable before the other writer opened the store, so that writer found
                    // it.
                    Ok(_) => assert!(number <= self.found, "{number} was acknowledged, and is lost"),
                    Err(error) => assert!(writer != self.newest && superseded(&error), "{error}"),
                }
            }
            Step::Snapshot(writer) => {
                let taken = self.store(writer).snapshot().map(drop);
                if self.expect(writer, taken) {
                    self.all_durable();
                }
            }
            Step::Prune(writer) => {
                let store = self.store(writer);
                let pruned = store.prune(&store.retention().snapshots_kept(1).log_kept(0));
                match pruned {
                    Ok(_) => {}
                    Err(error) => assert!(writer != self.newest && superseded(&error), "{error}"),
                }
            }
            Step::Close(writer) => {
                self.tickets[writer] = None;
                let closed = self.stores[writer].take().unwrap().close();
                match closed {
                    Ok(()) if writer == self.newest => self.all_durable(),
                    Ok(()) => {}
                    Err(error) => assert!(writer != self.newest && superseded(&error), "{error}"),
                }
            }
        }
    }

    fn store(&self, writer: usize) -> &Store {
        self.stores[writer].as_ref().unwrap()
    }

    /// Records that all batches that the newest writer submitted are durable.
    fn all_durable(&mut self) {
        self.durable = self.submitted.drain(..).next_back().unwrap_or(self.durable);
    }

    fn submit(&mut self, writer: usize) -> Result<Ticket> {
        self.last += 1;
        if writer == self.newest {
            self.submitted.push(self.last);
        }
        let store = self.store(writer);
        let mut batch = store.batch();
        batch.write(self.page, 0, &self.last.to_le_bytes());
        store.submit(batch)
    }

    /// Asserts that a call of the newest writer succeeds, and that a call of the other writer fails. Returns
    /// true if the writer is the newest.
    fn expect(&self, writer: usize, outcome: Result<()>) -> bool {
        match outcome {
            Ok(()) => assert_eq!(writer, self.newest, "a superseded writer acknowledged"),
            Err(error) => {
                assert!(writer != self.newest && superseded(&error), "{error}");
                assert_eq!(error.remedy(), Remedy::Reopen);
            }
        }
        writer == self.newest
    }
}

fn open(disk: &SimDisk, options: &Options) -> Result<Store> {
    let disk = Arc::new(disk.for_another_writer());
    Store::open_on(disk, Arc::new(HostDevice::new()), options.clone())
}

fn live(history: &[Step], io: LogIo) {
    let mut writers = Writers::new(io);
    history.iter().for_each(|step| writers.step(*step));
    // The newest writer is dropped last, so that no write of the other writer follows.
    let newest = writers.newest;
    for writer in [1 - newest, newest] {
        if writers.stores[writer].is_some() {
            writers.step(Step::Close(writer));
        }
    }
    let store = writers.open();
    store.snapshot().unwrap();
    let scrubbed = store.scrub().unwrap();
    assert!(scrubbed.damage.is_empty(), "{scrubbed:?}");
    store.close().unwrap();
}

#[test]
fn every_history_of_two_writers_without_locks_stays_whole() {
    alone_for(Duration::from_secs(3600), || {
        let steps = effort(STEPS).unwrap_or(3);
        let ways = [LogIo::Mapped, LogIo::Direct];
        let all: Vec<(usize, Vec<Step>)> = histories(steps).into_iter().enumerate().collect();
        assert!(all.len() > 50);
        let failures = in_parallel(&all, |(index, history)| {
            let run = || live(history, ways[index % ways.len()]);
            std::panic::catch_unwind(run).err().map(|_| format!("{history:?}"))
        });
        let failures: Vec<String> = failures.into_iter().flatten().collect();
        assert!(
            failures.is_empty(),
            "{} of {}: {:#?}",
            failures.len(),
            all.len(),
            &failures[..failures.len().min(5)]
        );
    });
}

/// The other writer may announce itself and read the log before the frame is written. The next sync relies on
/// the check before the frame, so only the sync after it detects the other writer.
#[test]
fn a_sync_that_another_writer_overlaps_is_not_acknowledged() {
    for io in [LogIo::Mapped, LogIo::Direct] {
        let mut overlaps = 0;
        for _ in 0..50 {
            let writers = Writers::new(io);
            let store = open(&writers.disk, &writers.options).unwrap();
            let is_synced = Arc::new(AtomicBool::new(false));
            let mut batch = store.batch();
            batch.write(writers.page, 0, &[1; 8]);
            let sync = is_synced.clone();
            writers.disk.skip_syncs(move |point| {
                sync.fetch_or(matches!(point, SyncPoint::Window(_)), Ordering::SeqCst);
                false
            });
            let ticket = store.submit(batch).unwrap();
            let _other = writers.disk.for_another_writer().lock().unwrap();
            // The store syncs automatically after a while. If that sync came first, the batch may be
            // acknowledged.
            let overlaps_now = !is_synced.load(Ordering::SeqCst);
            match ticket.wait(Ack::Durable) {
                Err(error) => assert!(superseded(&error), "{error}"),
                Ok(()) => assert!(!overlaps_now, "{io}: acknowledged after another writer's announcement"),
            }
            overlaps += usize::from(overlaps_now);
        }
        assert!(overlaps > 0, "{io}: no sync was overlapped");
    }
}
