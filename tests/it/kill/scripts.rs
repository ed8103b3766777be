//! Short, fixed sequences of a worker's steps, so that the same system call comes at the same point each
//! time. Each sequence tests one part of the engine.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;

use remanent::error::Remedy;
use remanent::options::LogIo;
use remanent::{Ack, Error, Lsn, Result, SnapshotOptions};
use remanent_format::Defect;

use super::board::Board;
use super::worker::{Manner, Work, end_with_the_parent};
use super::{ERRAND_PART, PATIENCE};

use crate::direct_io;

/// A step of a worker.
#[derive(Clone, Copy)]
pub enum Step {
    /// Commits this many batches, and waits for each batch.
    Commits(Ack, u64),
    /// Submits this many batches and then waits for all of them, so that they share syncs.
    Group(u64),
    /// Commits this many batches from each of three threads.
    Threads(u64),
    Snapshot,
    Exact,
    /// Takes a named snapshot, and releases the oldest names.
    Name,
    /// Forks the newest state.
    Fork,
    /// Demotes all pages by one tier.
    Demote,
    /// Promotes pages to the first tier until it is full.
    Promote,
    /// Prefetches pages in another thread.
    Prefetch,
}
use Step::*;

pub struct Script {
    pub name: &'static str,
    /// The mode of writing the log. `None` selects the best mode that the file system supports.
    pub log_io: Option<LogIo>,
    /// Whether the store takes snapshots in the background.
    pub background: bool,
    pub has_tiers: bool,
    /// The number of batches that a killed process has committed before. If the number is 0, there is no
    /// store.
    pub before: Lsn,
    pub steps: &'static [Step],
    /// Whether the store is then closed and reopened, and gets one more batch.
    pub reopens: bool,
}

const fn script(name: &'static str, log_io: Option<LogIo>, before: u64, steps: &'static [Step]) -> Script {
    Script { name, log_io, background: false, has_tiers: false, before: Lsn(before), steps, reopens: false }
}

const fn tiers(name: &'static str, log_io: Option<LogIo>, steps: &'static [Step]) -> Script {
    Script { has_tiers: true, ..script(name, log_io, 40, steps) }
}

const MAPPED: Option<LogIo> = None;
const BUFFERED: Option<LogIo> = Some(LogIo::Buffered);
const DIRECT: Option<LogIo> = Some(LogIo::Direct);
const DURABLE: Step = Commits(Ack::Durable, 4);

/// The scripts. Batch 29 replaces a long page, batch 61 is a restore, and batch 211 creates a page that is
/// longer than a segment.
pub const SCRIPTS: [Script; 25] = [
    script("creation, mapped", MAPPED, 0, &[DURABLE]),
    script("creation, direct", DIRECT, 0, &[DURABLE]),
    script("an open after a kill, mapped", MAPPED, 40, &[]),
    script("an open after a kill, buffered", BUFFERED, 40, &[]),
    script("an open after a kill, direct", DIRECT, 40, &[]),
    script("durable commits, mapped", MAPPED, 20, &[DURABLE, DURABLE]),
    script("durable commits, buffered", BUFFERED, 20, &[DURABLE, DURABLE]),
    script("durable commits, direct", DIRECT, 20, &[DURABLE, DURABLE]),
    script("groups, buffered", BUFFERED, 62, &[Group(12), Group(12)]),
    script("threads, direct", DIRECT, 62, &[Threads(20)]),
    script("rolls, mapped", MAPPED, 62, &[Group(55)]),
    script("rolls, buffered", BUFFERED, 122, &[Group(55)]),
    script("whole pages ahead of their batch", MAPPED, 27, &[DURABLE]),
    script("a frame longer than a segment", DIRECT, 209, &[DURABLE]),
    script("snapshots, one after the other", MAPPED, 40, &[Snapshot, DURABLE, Snapshot, DURABLE, Snapshot]),
    script("exact snapshots", BUFFERED, 30, &[Exact, DURABLE, Exact]),
    script("names", MAPPED, 30, &[Name, DURABLE, Name, DURABLE, Name, DURABLE, Name]),
    Script { background: true, ..script("snapshots in the background", MAPPED, 62, &[Threads(40)]) },
    script("a restore", BUFFERED, 58, &[DURABLE, Snapshot]),
    Script { reopens: true, ..script("a fork, a close, an open", MAPPED, 40, &[Fork]) },
    tiers("pages go down and come back, mapped", MAPPED, &[Demote, Promote, DURABLE, Demote, Promote]),
    tiers("pages go down and come back, direct", DIRECT, &[Demote, Promote, Snapshot, Demote, Promote]),
    tiers("evictions, buffered", BUFFERED, &[Commits(Ack::Logged, 12), Snapshot, DURABLE]),
    tiers("pages come ahead, mapped", MAPPED, &[Demote, Demote, Prefetch, Threads(12), Prefetch]),
    Script { reopens: true, ..tiers("an open of tiers", MAPPED, &[Demote]) },
];

/// Maximum number of failures of one worker. Each thread of a store may hit a fault once.
const FAILURES_MAX: usize = 16;

/// The part of a script that a worker executes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The batches that are committed before the steps.
    Before,
    /// The steps, after the start signal.
    Steps,
    /// The steps, with a system call that will fail. The consequence is checked and reported as an [`End`].
    Failing,
}

/// The consequence of a failing system call, which the worker reports as its exit status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// No call of the store failed.
    Unnoticed = 0,
    /// The store was not opened.
    NotOpened = 3,
    /// A call failed and poisoned the store.
    Poisoned = 4,
    /// A call failed, and the store continued to work.
    WentOn = 5,
    /// A fork failed, and its source continued to work. Even a failed sync affected only a file that belongs
    /// to no store.
    WithoutFork = 6,
}

impl End {
    pub const ALL: [Self; 5] =
        [Self::Unnoticed, Self::NotOpened, Self::Poisoned, Self::WentOn, Self::WithoutFork];
}

impl Script {
    pub fn manner(&self) -> Manner {
        let log_io = if self.log_io == DIRECT { Some(direct_io::log_io()) } else { self.log_io };
        Manner { log_io, background: self.background, has_tiers: self.has_tiers }
    }

    /// Executes the worker's part and exits. Its store is not closed.
    pub fn perform(&self, directory: &Path, part: Part) -> ! {
        let board = Arc::new(Board::open(&directory.join("board")));
        let manner = self.manner();
        if part == Part::Before {
            end_with_the_parent();
            let work = Work::open(directory, board, manner).unwrap();
            work.prepare(self.before).unwrap();
            std::process::exit(0);
        }
        board.set_ready();
        // The parent sends one byte as the signal to begin.
        std::io::Read::read_exact(&mut std::io::stdin(), &mut [0]).unwrap();
        end_with_the_parent();
        // A hung worker does not reach the call that would kill it, so a timeout ends the worker.
        thread::spawn(|| {
            thread::park_timeout(PATIENCE);
            panic!("the worker hangs");
        });
        let end = match (Work::open(directory, board, manner), part) {
            (Ok(work), Part::Failing) => self.live_with_failure(work, manner),
            (Err(error), Part::Failing) => {
                check_remedy(&error);
                End::NotOpened
            }
            (work, _) => {
                self.live(work.unwrap(), manner).unwrap();
                End::Unnoticed
            }
        };
        std::process::exit(end as i32);
    }

    fn live(&self, work: Work<'_>, manner: Manner) -> Result<()> {
        self.steps.iter().try_for_each(|step| work.step(*step))?;
        self.end(work, manner)
    }

    fn live_with_failure(&self, work: Work<'_>, manner: Manner) -> End {
        if let Err(error) = self.steps.iter().try_for_each(|step| work.step(*step)) {
            check_remedy(&error);
            // The failed call may belong to a fork after the commit.
            let is_of_fork = work.fork_failed.load(Ordering::Relaxed);
            return match work.go_on() {
                End::WentOn if is_of_fork => End::WithoutFork,
                end => end,
            };
        }
        match self.end(work, manner) {
            Ok(()) => End::Unnoticed,
            Err(error) => {
                check_remedy(&error);
                End::NotOpened
            }
        }
    }

    /// Executes the end of the script, after the steps.
    fn end(&self, work: Work<'_>, manner: Manner) -> Result<()> {
        if self.reopens {
            work.reopen(manner)?.commit(Ack::Durable)?;
        }
        Ok(())
    }
}

/// Asserts the error's remedy. A failed system call is not the caller's fault, and it is damage only if bytes
/// cannot be read.
fn check_remedy(error: &Error) {
    match error {
        Error::Poisoned(cause) => check_remedy(cause),
        Error::Damaged(damage) => assert!(matches!(damage.defect, Defect::Unreadable(_)), "{error}"),
        error => assert!(matches!(error.remedy(), Remedy::Reopen | Remedy::FreeSpace), "{error}"),
    }
}

/// Returns the script and the part that this process was started with, or `None` if it is not a worker with a
/// script.
pub fn told() -> Option<(&'static Script, Part)> {
    let told = std::env::var(ERRAND_PART).ok()?;
    let (index, part) = told.split_once(' ').unwrap();
    let parts = [Part::Before, Part::Steps, Part::Failing];
    let part = parts.into_iter().find(|known| format!("{known:?}") == part).unwrap();
    Some((&SCRIPTS[index.parse::<usize>().unwrap()], part))
}

impl Work<'_> {
    /// Commits the batches that precede the steps, and takes a snapshot halfway.
    fn prepare(&self, until: Lsn) -> Result<()> {
        while self.next() <= until {
            let number = self.next();
            self.commit(Ack::Logged)?;
            if number.0 == until.0 / 2 {
                self.store.snapshot()?;
            }
        }
        Ok(())
    }

    /// Executes a step. Returns the first error.
    fn step(&self, step: Step) -> Result<()> {
        match step {
            Commits(ack, count) => (0..count).try_for_each(|_| self.commit(ack)),
            Group(count) => {
                let tickets = (0..count).map(|_| self.submit()).collect::<Result<Vec<_>>>()?;
                tickets.iter().flatten().try_for_each(|ticket| self.wait(ticket, Ack::Durable))
            }
            Threads(count) => self.commit_from_threads(Lsn(self.next().0 + count)),
            Snapshot => self.store.snapshot().map(drop),
            Exact => self.store.snapshot_with(SnapshotOptions::new().exact()).map(drop),
            Name => self.name(self.store.lsn()),
            Fork => self.fork(self.store.lsn()),
            Demote => self.demote_all(),
            Promote => self.promote_some(),
            Prefetch => self.prefetch_some(),
        }
    }

    /// Uses the store after a failure. Either the store works, or it is poisoned and acknowledges no more
    /// batches.
    fn go_on(&self) -> End {
        for _ in 0..FAILURES_MAX {
            match self.commit(Ack::Durable).and_then(|()| self.store.snapshot()) {
                Ok(_) => return End::WentOn,
                Err(error @ Error::Poisoned(_)) => {
                    check_remedy(&error);
                    let commit = self.commit(Ack::Logged);
                    assert!(matches!(commit, Err(Error::Poisoned(_))), "a commit after {error}: {commit:?}");
                    let snapshot = self.store.snapshot();
                    assert!(matches!(snapshot, Err(Error::Poisoned(_))), "a snapshot after {error}");
                    return End::Poisoned;
                }
                Err(error) => check_remedy(&error),
            }
        }
        panic!("a fault that strikes each thread once keeps the store from going on");
    }

    fn commit_from_threads(&self, until: Lsn) -> Result<()> {
        let commit = |ack| {
            while self.next() < until {
                self.commit(ack)?;
            }
            Ok(())
        };
        thread::scope(|scope| {
            let threads =
                [Ack::Durable, Ack::Durable, Ack::Logged].map(|ack| scope.spawn(move || commit(ack)));
            threads.into_iter().try_for_each(|thread| thread.join().unwrap())
        })
    }
}
