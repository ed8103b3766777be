//! Long lives: a store's state after thousands of commits, overwrites, snapshots, restarts, kills and
//! shortages.
//!
//! A worker process has the store open and executes commands. The test selects the commands at random, keeps
//! a model of the expected content, and sometimes kills the worker during a command. After each step, it
//! checks the size of the directory: bytes on disk ≤ 2 × (images named by kept snapshots and by the next one),
//! plus the kept log with the images that its batches wrote, plus a constant. Every few steps, and after each open,
//! it compares every byte.
//!
//! The commands depend on a seed, and the exact times of kills depend on the machine. A failure prints the
//! seed and the last commands, and keeps the directory.
//!
//! | file | content |
//! |---|---|
//! | [`text`] | the commands, as lines |
//! | [`worker`] | the process that has the store open |
//! | [`model`] | the expected content, and bounds of its size |
//! | [`process`] | the worker process, as seen by the test |
//! | [`ground`] | the file system that contains the store |
//! | [`tally`] | counts of the events of a life |
//! | [`restarts`], [`shortages`], [`ages`] | the more difficult steps of a life |
//! | [`bounds`] | the bounds of the directory and the memory |
//!
//! `REMANENT_LIFE_SECONDS=N` makes each life last N seconds instead of a number of steps.
//! `REMANENT_LIFE_ROUNDS=N` runs N lives for each mode of writing the log, as many at a time as there are
//! processors.

pub mod model;
pub mod text;
pub mod worker;
mod process;
mod ground;
mod tally;
mod restarts;
mod shortages;
mod ages;
mod bounds;
mod tiers;

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use remanent::error::NoSuchState;
use remanent::options::LogIo;
use remanent::{Error, Lsn, StatePoint, Store};

use crate::direct_io;
use crate::kill::workload::Random;
use crate::machine::{effort, in_parallel};
use crate::size::{is_full, sized};
use ground::Ground;
use model::{Kept, Model};
use process::Worker;
use restarts::open_with;
use tally::Tally;
use text::{Change, Command, Kind, OpenWith, Pattern};

const TEST: &str = "life::a_long_life_stays_within_its_bounds";
const ERRAND_DIRECTORY: &str = "REMANENT_LIFE_DIRECTORY";
/// Number of steps of a life, unless an environment variable changes it.
const STEPS: u64 = 1000;
/// Number of commands that a failure message includes.
const COMMANDS_TOLD: usize = 40;

/// Maximum length of a page in most batches. A few batches create longer pages.
const PAGE_LEN_MAX: u64 = 64 << 10;
const LONG_PAGE_LEN_MAX: u64 = 4 << 20;
/// Maximum length of a page that exists only for a short time, in a life of `STEPS` steps.
const GIANT_PAGE_LEN_MAX: u64 = 16 << 20;
const GIANT_PAGE_LEN_MAX_LONG: u64 = 1 << 30;
/// If there are fewer pages than the minimum, a batch creates some. If there are more than the maximum, it
/// deletes some.
const PAGES_MIN: usize = 8;
const PAGES_MAX: usize = 24;
/// The lengths of segments that an open may select.
const SEGMENT_LENS: [u64; 4] = [16 << 10, 64 << 10, 256 << 10, 1 << 20];
/// Size of the disk of a life. The store may use only a small part of it.
const DISK_LEN: u64 = 512 << 20;
const DISK_LEN_LONG: u64 = 16 << 30;
const NAMES: [&str; 3] = ["first", "second", "third"];

#[test]
fn a_long_life_stays_within_its_bounds() {
    // The worker is this test in another process.
    if let Some(directory) = std::env::var_os(ERRAND_DIRECTORY) {
        worker::work(Path::new(&directory));
    }
    let seconds = effort("REMANENT_LIFE_SECONDS").map(|seconds| Duration::from_secs(seconds as u64));
    let ways = [LogIo::Mapped, LogIo::Buffered, direct_io::log_io()];
    let is_long = seconds.is_some();
    let lives = effort("REMANENT_LIFE_ROUNDS").unwrap_or(1) * ways.len();
    let jobs: Vec<(u64, LogIo)> = (1..).zip(ways.into_iter().cycle()).take(lives).collect();
    let tallies = in_parallel(&jobs, |(seed, log_io)| {
        let mut life = Life::begin(*seed, *log_io, is_long);
        let started = Instant::now();
        while seconds
            .map_or(life.tally.steps < sized(STEPS / 4, STEPS), |seconds| started.elapsed() < seconds)
        {
            life.step();
        }
        life.end()
    });
    println!("{:<10}{}", "life", Tally::HEADINGS);
    for ((_, log_io), tally) in jobs.iter().zip(&tallies) {
        println!("{:<10}{tally}", log_io.to_string());
        // Even if the random selection of commands changes, every kind of command must still occur.
        let happened = [tally.commits, tally.snapshots, tally.restores, tally.reopenings, tally.kills];
        assert!(happened.iter().all(|count| *count > sized(0, 5)), "{tally:?}");
        assert!(!is_full() || tally.jumps > 5 && tally.giants > 0, "{tally:?}");
    }
    // In a short life the clock may jump only while no snapshot is kept for its age.
    assert!(!is_long || tallies.iter().any(|tally| tally.aged > 0), "no snapshot grew too old: {tallies:?}");
    assert!(!is_full() || tallies.iter().any(|tally| tally.refused > 5), "{tallies:?}");
}

/// A store, the process that has it open, and the model of its content.
struct Life {
    seed: u64,
    random: Random,
    log_io: LogIo,
    ground: Ground,
    worker: Worker,
    with: OpenWith,
    /// The number of milliseconds by which the worker's clock is ahead of this process's clock.
    clock_ms: i64,
    /// The size of the disk.
    disk_len: u64,
    giant_len_max: u64,
    /// The number of snapshots at the time when a giant page was last deleted, or when a restore brought back
    /// the files of an earlier state.
    last_giant: u64,
    model: Model,
    tally: Tally,
    told: VecDeque<String>,
}

impl Life {
    fn begin(seed: u64, log_io: LogIo, is_long: bool) -> Self {
        let (disk_len, giant_len_max) = match is_long {
            true => (DISK_LEN_LONG, GIANT_PAGE_LEN_MAX_LONG),
            false => (DISK_LEN, GIANT_PAGE_LEN_MAX),
        };
        let ground = Ground::new(disk_len);
        let mut random = Random(seed);
        let with = open_with(&mut random, log_io);
        let worker = Worker::start(ground.path());
        let (model, tally, told) = (Model::new(), Tally::default(), VecDeque::new());
        let clock_ms = 0;
        let mut life = Self {
            seed,
            random,
            log_io,
            ground,
            worker,
            with,
            clock_ms,
            disk_len,
            giant_len_max,
            last_giant: 0,
            model,
            tally,
            told,
        };
        life.open();
        life
    }

    fn end(mut self) -> Tally {
        self.compare();
        self.ask(&Command::Close);
        let Self { worker, ground, tally, .. } = self;
        drop(worker);
        ground.remove();
        tally
    }

    fn store(&self) -> PathBuf {
        self.ground.path().join("store")
    }

    /// Fails with all information that is needed to investigate.
    fn fail(&self, message: &str) -> ! {
        let told: Vec<&str> = self.told.iter().map(String::as_str).collect();
        panic!(
            "{message}\nseed {}, {} steps, in {}\nlast commands:\n{}",
            self.seed,
            self.tally.steps,
            self.ground.path().display(),
            told.join("\n")
        );
    }

    fn send_command(&mut self, command: &Command) {
        while self.told.len() >= COMMANDS_TOLD {
            self.told.pop_front();
        }
        self.told.push_back(command.to_string());
        self.worker.send_command(command);
    }

    /// Sends a command to the worker. Returns the words after `ok`, or the error.
    fn try_ask(&mut self, command: &Command) -> Result<String, String> {
        self.send_command(command);
        match self.worker.answer() {
            Ok(answer) => match answer.split_once(' ').unwrap_or((&answer, "")) {
                ("ok", rest) => Ok(rest.to_owned()),
                _ => Err(answer),
            },
            Err(ended) => self.fail(&ended),
        }
    }

    /// Sends a command that must succeed, and returns the answer.
    fn ask(&mut self, command: &Command) -> String {
        self.try_ask(command).unwrap_or_else(|refusal| self.fail(&refusal))
    }

    fn open(&mut self) -> u64 {
        let with = self.with.clone();
        let lsn = self.ask(&Command::Open(with));
        lsn.parse().unwrap()
    }

    /// Runs one command, which a kill may interrupt, and checks all invariants.
    fn step(&mut self) {
        self.tally.steps += 1;
        match self.random.below(100) {
            0..=59 => self.commit(),
            60..=71 => self.snapshot(),
            72..=75 => self.prune(),
            76..=78 => self.restore(),
            79..=82 => self.reopen(),
            83 => self.open_and_close_often(),
            84..=88 => self.kill(),
            89 => self.fork(),
            90..=92 => drop(self.ask(&Command::Follow)),
            93 => drop(self.ask(&Command::Scrub)),
            94 => drop(self.ask(&Command::ForkProcess)),
            95 => self.run_short_of_memory(),
            96 => self.run_short_of_files(),
            97 => self.run_short_of_space(),
            98 => self.jump(),
            _ if self.random.below(4) == 0 => self.have_a_giant_page(),
            _ => self.compare(),
        }
        self.check_disk();
        self.check_memory();
    }

    fn commit(&mut self) {
        let changes = self.draw_batch();
        self.commit_changes(changes);
    }

    fn draw_batch(&mut self) -> Vec<Change> {
        let random = &mut self.random;
        let state = self.model.now();
        let mut changes = Vec::new();
        let mut pages: Vec<(u64, u64)> = state.pages.iter().map(|(id, page)| (*id, page.len)).collect();
        let mut keys: Vec<String> = (0..6).map(|key| format!("key-{key}")).collect();
        keys.retain(|key| state.pages.values().all(|page| page.key.as_ref() != Some(key)));
        for _ in 0..=random.below(4) {
            let pattern = Pattern(random.next());
            let is_long = random.below(12) == 0;
            let len = match random.below(8) {
                0 => 0,
                1 => 1 + random.below(64),
                _ if is_long => random.below(LONG_PAGE_LEN_MAX),
                _ => 8 * random.below(PAGE_LEN_MAX / 8),
            };
            let wants_page = pages.len() < PAGES_MIN || pages.len() < PAGES_MAX && random.below(4) == 0;
            if wants_page || pages.is_empty() {
                let key = if random.below(3) == 0 { keys.pop() } else { None };
                changes.push(match random.below(2) {
                    0 => Change::Create { len, key },
                    _ => Change::CreateFrom { len, key, pattern },
                });
                continue;
            }
            // Change each page at most once per batch, because the model suite tests several changes of one
            // page.
            let (page, page_len) = pages.swap_remove(random.below(pages.len() as u64) as usize);
            changes.push(match random.below(10) {
                0..=1 => Change::Delete { page },
                2..=4 => Change::Replace { page, len, pattern },
                5 => Change::Resize { page, len },
                6 => Change::SetRoot { value: pattern.0 },
                _ => {
                    let len = random.below(page_len.min(PAGE_LEN_MAX) + 1);
                    let offset = random.below(page_len - len + 1);
                    Change::Write { page, offset, len, pattern }
                }
            });
        }
        changes
    }

    fn snapshot(&mut self) {
        let kept = self.kept();
        let kind = match self.random.below(6) {
            0..=2 => Kind::Fuzzy,
            3 => Kind::Published,
            4 => Kind::Exact,
            _ => match NAMES.iter().find(|name| kept.iter().all(|kept| kept.name.as_deref() != Some(name))) {
                Some(name) => Kind::Named((*name).to_owned()),
                None => Kind::Exact,
            },
        };
        self.ask(&Command::Snapshot(kind));
        self.tally.snapshots += 1;
    }

    /// Creates a very long page, writes parts of it, takes snapshots, and deletes it.
    fn have_a_giant_page(&mut self) {
        let len = 1 + self.random.below(self.giant_len_max);
        self.commit_changes(vec![Change::Create { len, key: None }]);
        let page = *self.model.now().pages.keys().next_back().expect("it was created");
        for _ in 0..=self.random.below(3) {
            for _ in 0..=self.random.below(4) {
                let written = self.random.below(len.min(PAGE_LEN_MAX) + 1);
                let offset = self.random.below(len - written + 1);
                let pattern = Pattern(self.random.next());
                self.commit_changes(vec![Change::Write { page, offset, len: written, pattern }]);
            }
            match self.random.below(3) {
                0 => self.snapshot(),
                1 => self.reopen(),
                _ => self.compare(),
            }
            self.check_disk();
            self.check_memory();
        }
        self.delete_giant_pages();
        self.ask(&Command::Snapshot(Kind::Fuzzy));
        self.tally.snapshots += 1;
        self.tally.giants += 1;
    }

    /// Deletes pages that are too long to be compared often.
    fn delete_giant_pages(&mut self) {
        let pages = self.model.now().pages.iter();
        let giants = pages.filter(|(_, page)| page.len > LONG_PAGE_LEN_MAX);
        let deletes: Vec<Change> = giants.map(|(page, _)| Change::Delete { page: *page }).collect();
        if !deletes.is_empty() {
            self.commit_changes(deletes);
            self.last_giant = self.tally.snapshots;
        }
    }

    fn commit_changes(&mut self, changes: Vec<Change>) {
        self.ask(&Command::Commit(changes.clone()));
        self.model.commit(&changes);
        self.tally.commits += 1;
    }

    /// Returns the snapshots that the store keeps.
    fn kept(&mut self) -> Vec<Kept> {
        let list = self.ask(&Command::Snapshots);
        let parse = |snapshot: &str| {
            let words: Vec<&str> = snapshot.split(':').collect();
            let name = (words[2] != "-").then(|| words[2].to_owned());
            let [redo, end, id, unix_ms] = [0, 1, 3, 4].map(|at: usize| words[at].parse().unwrap());
            Kept { id, unix_ms, redo, end, name }
        };
        list.split_whitespace().map(parse).collect()
    }

    /// Returns true if the store takes background snapshots.
    fn is_in_background(&self) -> bool {
        self.with.snapshot_log_bytes.is_some()
    }

    /// Selects a batch that the store guarantees to be restorable: one after the oldest snapshot that keeps
    /// its log, or that of a named snapshot.
    fn draw_past(&mut self) -> Option<u64> {
        let kept = self.kept();
        let oldest = kept.iter().filter(|kept| kept.name.is_none()).map(|kept| kept.end).min()?;
        let named: Vec<u64> = kept.iter().filter(|kept| kept.name.is_some()).map(|kept| kept.end).collect();
        if !named.is_empty() && self.random.below(3) == 0 {
            return Some(named[self.random.below(named.len() as u64) as usize]);
        }
        Some(oldest + self.random.below(self.model.lsn() - oldest + 1))
    }

    fn restore(&mut self) {
        let Some(lsn) = self.draw_past() else { return };
        match self.try_ask(&Command::RestoreTo(lsn)) {
            Ok(_) => self.model.restore(lsn),
            // A background snapshot has moved the restore window.
            Err(refusal)
                if refusal.starts_with("refused NoSuchState(OutsideWindow") && self.is_in_background() =>
            {
                return;
            }
            Err(refusal) => self.fail(&refusal),
        }
        self.tally.restores += 1;
        self.compare();
        self.delete_giant_pages();
        self.last_giant = self.tally.snapshots;
    }

    /// Forks an earlier state. Checks that the fork has that state and can be used, and that it does not
    /// affect this store.
    fn fork(&mut self) {
        let Some(lsn) = self.draw_past() else { return };
        let folder = self.ground.path().join("fork");
        let point = StatePoint::Lsn(Lsn(lsn));
        let made = Store::open_at(self.store(), &point).and_then(|old| old.fork(&folder));
        if matches!(made, Err(Error::NoSuchState(NoSuchState::OutsideWindow { .. })))
            && self.is_in_background()
        {
            return;
        }
        let opened = made.and_then(|_| worker::options(&self.with).open(&folder));
        let fork = opened.unwrap_or_else(|error| self.fail(&format!("a fork at batch {lsn}: {error}")));
        if fork.lsn() != Lsn(lsn) {
            self.fail(&format!("a fork at batch {lsn} is at {}", fork.lsn()));
        }
        let mut batch = fork.batch();
        batch.set_root("fork", 1_u64);
        fork.commit(batch).and_then(|_| fork.snapshot()).unwrap();
        fork.close().unwrap();
        std::fs::remove_dir_all(folder).unwrap();
        self.tally.forks += 1;
    }

    /// Compares every byte of every page.
    fn compare(&mut self) {
        let found = self.ask(&Command::State);
        let expected = self.model.now().line(self.model.lsn());
        if found != expected {
            self.fail(&format!("the store's state differs\nfound    {found}\nexpected {expected}"));
        }
    }
}
