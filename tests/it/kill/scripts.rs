//! Short lives of a worker, one step after the other, so that the same call of the system comes at the same
//! point each time: each makes much of one part of the engine.

use std::path::Path;
use std::sync::Arc;
use std::thread;

use remanent::{Ack, LogIo, Lsn, Result};

use super::board::Board;
use super::worker::{Manner, Work, end_with_the_parent};
use super::{ERRAND_PART, PATIENCE};

use crate::direct;

/// What a worker does next.
#[derive(Clone, Copy)]
pub enum Step {
    /// Commits, each waited for.
    Commits(Ack, u64),
    /// Batches submitted one after the other, and then waited for: they share syncs.
    Group(u64),
    /// Batches from three threads.
    Threads(u64),
    Snapshot,
    Exact,
    /// A snapshot with a name; the oldest names are given up.
    Name,
    /// A fork of the newest state.
    Fork,
}
use Step::*;

pub struct Script {
    pub name: &'static str,
    /// `None`: what the file system allows best.
    pub log_io: Option<LogIo>,
    /// Snapshots are the store's own business, too.
    pub background: bool,
    /// So many batches are there before, in a store whose process was killed. 0: no store.
    pub before: Lsn,
    pub steps: &'static [Step],
    /// The store is closed then, opened again, and gets one more batch.
    pub reopens: bool,
}

const fn script(name: &'static str, log_io: Option<LogIo>, before: u64, steps: &'static [Step]) -> Script {
    Script { name, log_io, background: false, before: Lsn(before), steps, reopens: false }
}

const MAPPED: Option<LogIo> = None;
const BUFFERED: Option<LogIo> = Some(LogIo::Buffered);
const DIRECT: Option<LogIo> = Some(LogIo::Direct);
const DURABLE: Step = Commits(Ack::Durable, 4);

/// Batch 29 replaces a long page, 61 is a restore, 211 creates a page that is longer than a segment.
pub const SCRIPTS: [Script; 20] = [
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
];

/// Which part of a script a worker does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// What is there before.
    Before,
    /// The steps, once it is told to begin.
    Steps,
}

impl Script {
    pub fn log_io(&self) -> Option<LogIo> {
        if self.log_io == DIRECT { Some(direct::log_io()) } else { self.log_io }
    }

    /// The worker's whole life. Its store is not closed.
    pub fn perform(&self, directory: &Path, part: Part) -> ! {
        let board = Arc::new(Board::open(&directory.join("board")));
        let manner = Manner { log_io: self.log_io(), background: self.background };
        if part == Part::Before {
            end_with_the_parent();
            let work = Work::open(directory, board, manner).unwrap();
            work.prepare(self.before).unwrap();
            std::process::exit(0);
        }
        board.set_ready();
        // One byte says: begin.
        std::io::Read::read_exact(&mut std::io::stdin(), &mut [0]).unwrap();
        end_with_the_parent();
        // Whoever hangs is not killed by the call that never comes.
        thread::spawn(|| {
            thread::park_timeout(PATIENCE);
            panic!("the worker hangs");
        });
        let work = Work::open(directory, board, manner).unwrap();
        self.steps.iter().try_for_each(|step| work.step(*step)).unwrap();
        self.end(work, manner).unwrap();
        std::process::exit(0);
    }

    /// What comes after the steps.
    fn end(&self, work: Work<'_>, manner: Manner) -> Result<()> {
        if self.reopens {
            work.reopen(manner)?.commit(Ack::Durable)?;
        }
        Ok(())
    }
}

/// The part that this process is told to do, if it is a worker with a script.
pub fn told() -> Option<(&'static Script, Part)> {
    let told = std::env::var(ERRAND_PART).ok()?;
    let (index, part) = told.split_once(' ').unwrap();
    let parts = [Part::Before, Part::Steps];
    let part = parts.into_iter().find(|known| format!("{known:?}") == part).unwrap();
    Some((&SCRIPTS[index.parse::<usize>().unwrap()], part))
}

impl Work<'_> {
    /// A snapshot half way.
    fn prepare(&self, until: Lsn) -> Result<()> {
        while self.store.lsn() < until {
            self.commit(Ack::Logged)?;
            if self.store.lsn().0 == until.0 / 2 {
                self.store.snapshot()?;
            }
        }
        Ok(())
    }

    /// Takes a step; the first error ends it.
    fn step(&self, step: Step) -> Result<()> {
        match step {
            Commits(ack, count) => (0..count).try_for_each(|_| self.commit(ack)),
            Group(count) => {
                let tickets = (0..count).map(|_| self.submit()).collect::<Result<Vec<_>>>()?;
                tickets.iter().flatten().try_for_each(|ticket| self.wait(ticket, Ack::Durable))
            }
            Threads(count) => self.commit_from_threads(Lsn(self.store.lsn().0 + count)),
            Snapshot => self.store.snapshot().map(drop),
            Exact => self.store.snapshot_exact().map(drop),
            Name => self.name(self.store.lsn()),
            Fork => self.fork(self.store.lsn()),
        }
    }

    fn commit_from_threads(&self, until: Lsn) -> Result<()> {
        let commit = |ack| {
            while self.store.lsn() < until {
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
