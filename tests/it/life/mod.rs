//! Long lives: a store's state after thousands of commits, overwrites, snapshots, restarts, kills and
//! shortages.
//!
//! A worker process holds the store and does what it is told. The test draws what to tell it, keeps a plain
//! model of what must be there, and kills the worker now and then while a command is under way. After each
//! step it checks the directory by one rule: bytes on disk ≤ 2 × (images that kept snapshots name, and those
//! of the next one) + the kept log with its images written ahead + a constant. Every few steps, and after
//! each opening, it compares every byte.
//!
//! The draws follow from a seed, and the moments of kills from the machine. A failure prints the seed and the
//! last commands, and keeps the directory.
//!
//! | file | what it holds |
//! |---|---|
//! | [`text`] | the commands, as lines |
//! | [`worker`] | the process that holds the store |
//! | [`model`] | what must be there, and what it may take |
//!
//! `REMANENT_LIFE_SECONDS=N` makes each life last that long instead of a number of steps, and
//! `REMANENT_LIFE_ROUNDS=N` runs N lives for each way to write the log, as many at a time as there are
//! processors.

pub mod model;
pub mod text;
pub mod worker;

use std::collections::{BTreeSet, VecDeque};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use remanent::disk::dir::DirReader;
use remanent::{Error, FileName, LogIo, Lsn, SnapshotId, StatePoint, Store};
use remanent_format::state::survey::Survey;

use crate::direct_io;
use crate::kill::workload::Random;
use crate::machine::filler::Filler;
use crate::machine::mounts::{self, Kind as FileSystem, Mount};
use crate::machine::{effort, in_parallel, skipped};
use model::{Kept, Model};
use text::{Change, Command, Kind, OpenWith, Pattern};

const TEST: &str = "life::a_long_life_stays_within_its_bounds";
const ERRAND_DIRECTORY: &str = "REMANENT_LIFE_DIRECTORY";
/// The steps of a life that no environment variable makes longer.
const STEPS: u64 = 1000;
/// A command that takes this long hangs. Long, because a machine may be busy with other work.
const PATIENCE: Duration = Duration::from_secs(120);
/// Commands that a failure prints.
const COMMANDS_TOLD: usize = 40;

/// The longest page that most batches create, and that few do.
const PAGE_LEN_MAX: u64 = 64 << 10;
const LONG_PAGE_LEN_MAX: u64 = 4 << 20;
/// The longest page that is there for a short time, now and then: in a life of some steps, and in a long
/// one.
const GIANT_PAGE_LEN_MAX: u64 = 16 << 20;
const GIANT_PAGE_LEN_MAX_LONG: u64 = 1 << 30;
/// A batch creates while a store has fewer pages, and deletes while it has more.
const PAGES_MIN: usize = 8;
const PAGES_MAX: usize = 24;
/// How long the segments of an opening may be.
const SEGMENT_LENS: [u64; 4] = [16 << 10, 64 << 10, 256 << 10, 1 << 20];
/// The length of a life's disk. The bound of the life is a small part of it.
const DISK_LEN: u64 = 512 << 20;
const DISK_LEN_LONG: u64 = 16 << 30;
/// Spare segments that are being made, or not yet, when a store is closed.
const SPARES_MADE_MAX: u64 = 4;
/// A full disk has up to this much left.
const LEFT_MAX: u64 = 256 << 10;
/// A process that runs short of memory gets this much more: at least the small allocations and a thread's
/// memory, which nothing can refuse.
/// nothing can refuse.
const MEMORY_LEFT_MIN: u64 = 4 << 20;
const MEMORY_LEFT_MAX: u64 = 20 << 20;
/// Commands that are tried while something is short.
const TRIES_MAX: u64 = 8;
const NAMES: [&str; 3] = ["first", "second", "third"];

/// Snapshots after the delete of a giant page, until no file has room for it any more.
const GIANT_SNAPSHOTS: u64 = 5;
/// The number of snapshots that a store keeps.
const SNAPSHOTS_KEPT: usize = 2;
/// The ages up to which an opening keeps every snapshot, and the jumps of the clock.
const KEPT_FOR_MS: [u64; 4] = [0, 0, 60_000, 3_600_000];
const CLOCK_JUMPS_MS: [u64; 4] = [1000, 60_000, 3_600_000, 7 * 24 * 3_600_000];

/// Openings after a snapshot that make the next one due, and the least bytes that each of them takes.
const RESTARTS_MAX: u64 = 16;
const FIRST_SEGMENT_LEN: u64 = 256 << 10;

/// The bytes of an empty store with its reserve.
const EMPTY_BYTES: u64 = 4 << 20;
/// Memory in addition to the pages: for streams, and for the runner of tests.
const MEMORY_OVER_PAGES: u64 = 256 << 20;

#[test]
fn a_long_life_stays_within_its_bounds() {
    // The worker is this very test in another process.
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
        while seconds.map_or(life.tally.steps < STEPS, |seconds| started.elapsed() < seconds) {
            life.step();
        }
        life.end()
    });
    println!("{:<10}{}", "life", Tally::HEADINGS);
    for ((_, log_io), tally) in jobs.iter().zip(&tallies) {
        println!("{:<10}{tally}", log_io.to_string());
        // A change to how lives are drawn must not make this test idle.
        let happened = [tally.commits, tally.snapshots, tally.restores, tally.reopenings, tally.kills];
        assert!(happened.iter().all(|count| *count > 5), "{tally:?}");
        assert!(tally.jumps > 5 && tally.giants > 0, "{tally:?}");
    }
    // In a short life the clock may happen to jump while no snapshot is kept for its age.
    assert!(!is_long || tallies.iter().any(|tally| tally.aged > 0), "no snapshot grew too old: {tallies:?}");
    assert!(tallies.iter().any(|tally| tally.refused > 5), "{tallies:?}");
}

/// Counts of the events in a life.
#[derive(Clone, Debug, Default)]
struct Tally {
    steps: u64,
    commits: u64,
    snapshots: u64,
    restores: u64,
    reopenings: u64,
    kills: u64,
    forks: u64,
    /// Jumps of the clock, snapshots that were too old to stay, and pages that were very long.
    jumps: u64,
    aged: u64,
    giants: u64,
    /// Commands that were refused for want of files, memory or space.
    refused: u64,
    /// The greatest share of its bound that the directory took, in percent, and the most bytes.
    disk_percent_max: u64,
    disk_bytes_max: u64,
    memory_bytes_max: u64,
}

impl Tally {
    const HEADINGS: &str = " steps commits snapshots restores reopenings kills forks jumps aged giants refused  disk max  of bound  memory max";
}

impl std::fmt::Display for Tally {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { steps, commits, snapshots, restores, reopenings, kills, forks, refused, .. } = self;
        let Self { jumps, aged, giants, .. } = self;
        let [disk, memory] = [self.disk_bytes_max, self.memory_bytes_max].map(|bytes| bytes >> 20);
        write!(
            f,
            "{steps:>6} {commits:>7} {snapshots:>9} {restores:>8} {reopenings:>10} {kills:>5} {forks:>5} \
             {jumps:>5} {aged:>4} {giants:>6} {refused:>7} {disk:>5} MiB {:>7} % {memory:>7} MiB",
            self.disk_percent_max
        )
    }
}

/// The place of a store: a file system of its own, so that it can be full, or a temporary folder.
struct Ground {
    folder: PathBuf,
    /// Dropped before the folder in which it is mounted.
    mount: Option<Mount>,
}

impl Ground {
    fn new(len: u64) -> Self {
        // Kept until all went well.
        let folder = tempfile::tempdir().unwrap().keep();
        let mounted = mounts::make(FileSystem::Ext4, &folder.join("image"), len)
            .and_then(|image| Mount::new(&image, folder.join("mounted"), &["-o", "loop"]));
        match mounted {
            Ok(mount) => Self { folder, mount: Some(mount) },
            Err(reason) => {
                skipped("a full disk", &reason);
                Self { folder, mount: None }
            }
        }
    }

    /// The folder that the worker works in.
    fn path(&self) -> &Path {
        self.mount.as_ref().map_or(&self.folder, |mount| &mount.path)
    }

    fn remove(self) {
        drop(self.mount);
        std::fs::remove_dir_all(self.folder).unwrap();
    }
}

/// A store, the process that holds it, and the model of its content.
struct Life {
    seed: u64,
    random: Random,
    log_io: LogIo,
    ground: Ground,
    worker: Worker,
    with: OpenWith,
    /// How far the worker's clock is ahead of this process's, in milliseconds.
    clock_ms: i64,
    /// The length of the disk, and of the longest page that there may be.
    disk_len: u64,
    giant_len_max: u64,
    /// The number of snapshots when a giant page was deleted last, or when a restore brought back the files
    /// of an earlier state.
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

    /// Fails with all that is needed to look into it.
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

    fn tell(&mut self, command: &Command) {
        while self.told.len() >= COMMANDS_TOLD {
            self.told.pop_front();
        }
        self.told.push_back(command.to_string());
        self.worker.tell(command);
    }

    /// The worker's answer: the words after `ok`, or the refusal.
    fn try_ask(&mut self, command: &Command) -> Result<String, String> {
        self.tell(command);
        match self.worker.answer() {
            Ok(answer) => match answer.split_once(' ').unwrap_or((&answer, "")) {
                ("ok", rest) => Ok(rest.to_owned()),
                _ => Err(answer),
            },
            Err(ended) => self.fail(&ended),
        }
    }

    /// The answer to a command that must not be refused.
    fn ask(&mut self, command: &Command) -> String {
        self.try_ask(command).unwrap_or_else(|refusal| self.fail(&refusal))
    }

    fn open(&mut self) -> u64 {
        let with = self.with.clone();
        let lsn = self.ask(&Command::Open(with));
        lsn.parse().unwrap()
    }

    /// Runs one command, or one that a kill cuts short, and checks what must hold after it.
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
            // One change a page and batch: several changes to one page are the model suite's business.
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

    fn prune(&mut self) {
        let kept = self.kept();
        let names: Vec<String> = kept.into_iter().filter_map(|kept| kept.name).collect();
        let give_up =
            (!names.is_empty()).then(|| names[self.random.below(names.len() as u64) as usize].clone());
        let snapshots_kept = 1 + self.random.below(3) as usize;
        let before = self.kept();
        let earliest = self.now_ms();
        self.ask(&Command::Prune { snapshots_kept, give_up });
        let latest = self.now_ms();
        let after = self.kept();
        self.check_ages(snapshots_kept, &before, &after, earliest, latest);
    }

    /// The time by the worker's clock.
    fn now_ms(&self) -> u64 {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("a time after 1970");
        u64::try_from(now.as_millis()).expect("a time in this age").saturating_add_signed(self.clock_ms)
    }

    /// Checks a prune by the rule of ages: a snapshot is as old as the oldest time that it or a later one
    /// names, and a time in the future ages nothing.
    fn check_ages(&mut self, count: usize, before: &[Kept], after: &[Kept], earliest: u64, latest: u64) {
        // A thin snapshot stands in for the one before. Which of them counts is the business of others.
        if before.windows(2).any(|pair| pair[0].redo == pair[1].redo) {
            return;
        }
        for (at, kept) in before.iter().enumerate().filter(|(_, kept)| kept.name.is_none()) {
            // Named ones may be without the log, and are then none of the newest.
            let later = before[at..].iter().skip(1).filter(|later| later.name.is_none()).count();
            let time = before[at..].iter().map(|later| later.unix_ms).min().expect("itself");
            let stays = after.iter().any(|other| other.id == kept.id);
            let is_young = latest.saturating_sub(time) < self.with.kept_for_ms;
            let is_old = later >= count && earliest.saturating_sub(time) >= self.with.kept_for_ms;
            if is_young && !stays || is_old && stays {
                let (id, max) = (kept.id, self.with.kept_for_ms);
                self.fail(&format!("{earliest} to {latest}: {id} stays: {stays}; up to {max}: {before:?}"));
            }
            self.tally.aged += u64::from(is_old && self.with.kept_for_ms > 0);
        }
    }

    /// The wall clock jumps to another time, while the store is open or between two openings of it.
    fn jump(&mut self) {
        let by = i64::try_from(CLOCK_JUMPS_MS[self.random.below(4) as usize]).expect("less than a year");
        self.clock_ms = match self.random.below(4) {
            0 => 0,
            1 => -by,
            _ => by,
        };
        // Two that may grow old.
        for _ in 0..SNAPSHOTS_KEPT {
            self.commit();
            self.ask(&Command::Snapshot(Kind::Fuzzy));
            self.tally.snapshots += 1;
        }
        let is_between = self.random.below(2) == 0;
        if is_between {
            self.ask(&Command::Close);
            self.with.kept_for_ms = KEPT_FOR_MS[2];
        }
        self.set_clock();
        if is_between {
            self.open();
            self.model.reopen();
        }
        // While a page is unloaded, nothing goes.
        self.compare();
        let (mut before, earliest) = (self.kept(), self.now_ms());
        self.ask(&Command::Snapshot(Kind::Fuzzy));
        let (after, latest) = (self.kept(), self.now_ms());
        let is_new = |kept: &&Kept| before.iter().all(|other| other.id != kept.id);
        let taken: Vec<Kept> = after.iter().filter(is_new).cloned().collect();
        before.extend(taken);
        self.check_ages(SNAPSHOTS_KEPT, &before, &after, earliest, latest);
        self.tally.snapshots += 1;
        self.tally.jumps += 1;
    }

    fn set_clock(&mut self) {
        let clock = Command::Clock(self.clock_ms);
        self.ask(&clock);
    }

    /// A very long page is there for a while: created, written sparsely, in snapshots, and deleted.
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

    /// Snapshots that the store keeps.
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

    /// Whether the store takes snapshots by itself.
    fn is_in_background(&self) -> bool {
        self.with.snapshot_log_bytes.is_some()
    }

    /// A batch in the window that the store promises: from the oldest snapshot that keeps its log on, or the
    /// end of a named one.
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
            // A snapshot that the store took by itself has moved the window on.
            Err(refusal) if refusal.starts_with("refused OutsideWindow") && self.is_in_background() => return,
            Err(refusal) => self.fail(&refusal),
        }
        self.tally.restores += 1;
        self.compare();
        self.delete_giant_pages();
        self.last_giant = self.tally.snapshots;
    }

    fn reopen(&mut self) {
        self.ask(&Command::Close);
        self.with = open_with(&mut self.random, self.log_io);
        let lsn = self.open();
        self.model.reopen();
        if lsn != self.model.lsn() {
            self.fail(&format!("opened at batch {lsn}, closed at {}", self.model.lsn()));
        }
        self.tally.reopenings += 1;
        self.compare();
    }

    /// Opens that commit nothing leave the disk as it was, but for spare segments: a close may come while
    /// they are made. The snapshot comes first because this number of openings makes one due, which would
    /// write the images of changed pages.
    fn open_and_close_often(&mut self) {
        self.reopen();
        self.ask(&Command::Snapshot(Kind::Fuzzy));
        self.tally.snapshots += 1;
        let before = self.disk_bytes_after_opens(4);
        let after = self.disk_bytes_after_opens(12);
        if after > before + SPARES_MADE_MAX * self.with.segment_len {
            self.fail(&format!("twelve opens that committed nothing took {} bytes", after - before));
        }
    }

    /// The bytes of the closed store's directory after this number of further closes and opens.
    fn disk_bytes_after_opens(&mut self, opens: usize) -> u64 {
        for _ in 0..opens {
            self.ask(&Command::Close);
            self.open();
        }
        self.ask(&Command::Close);
        let taken = disk_bytes(&self.store());
        self.open();
        taken
    }

    /// SIGKILL at some moment of a command, and the state that the next process finds.
    fn kill(&mut self) {
        let changes = self.draw_batch();
        let command = match self.random.below(5) {
            0..=1 => Command::Commit(changes.clone()),
            2 => Command::Snapshot(Kind::Fuzzy),
            3 => Command::Snapshot(Kind::Exact),
            _ => Command::Close,
        };
        self.tell(&command);
        let pause = Duration::from_nanos(1 << self.random.below(26));
        std::thread::park_timeout(pause);
        self.worker.kill();
        self.told.push_back("(killed)".to_owned());
        self.tally.kills += 1;
        self.start_again();
        if self.random.below(3) == 0 {
            self.kill_an_opening();
        }
        let (lsn, before) = (self.open(), self.model.lsn());
        match (command, lsn.checked_sub(before)) {
            (_, Some(0)) => {}
            (Command::Commit(changes), Some(1)) => self.model.commit(&changes),
            _ => self.fail(&format!("opened at batch {lsn}, {before} was acknowledged")),
        }
        self.model.reopen();
        self.compare();
    }

    fn kill_an_opening(&mut self) {
        let with = self.with.clone();
        self.tell(&Command::Open(with));
        let pause = Duration::from_nanos(1 << self.random.below(24));
        std::thread::park_timeout(pause);
        self.worker.kill();
        self.told.push_back("(killed)".to_owned());
        self.tally.kills += 1;
        self.start_again();
    }

    /// A new process, by the same clock.
    fn start_again(&mut self) {
        self.worker = Worker::start(self.ground.path());
        self.set_clock();
    }

    /// A fork of an earlier state holds it, goes on, and takes nothing from this store.
    fn fork(&mut self) {
        let Some(lsn) = self.draw_past() else { return };
        let folder = self.ground.path().join("fork");
        let point = StatePoint::Lsn(Lsn(lsn));
        let made = Store::open_at(self.store(), &point).and_then(|old| old.fork(&folder));
        if matches!(made, Err(Error::OutsideWindow { .. })) && self.is_in_background() {
            return;
        }
        let opened = made.and_then(|_| Store::open(&folder, worker::options(&self.with)));
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

    /// A command of a process that may open few more files is done or refused, and costs the store nothing.
    fn run_short_of_files(&mut self) {
        // A caller that needs a page that is not loaded waits until the shortage ends.
        self.compare();
        let left = self.random.below(6);
        self.ask(&Command::FilesLeft(Some(left)));
        self.try_while_short();
        self.ask(&Command::FilesLeft(None));
        self.commit();
        self.compare();
    }

    /// The same for a process that gets little more memory.
    fn run_short_of_memory(&mut self) {
        self.compare();
        let left = MEMORY_LEFT_MIN + self.random.below(MEMORY_LEFT_MAX - MEMORY_LEFT_MIN);
        self.ask(&Command::MemoryLeft(Some(left)));
        self.try_while_short();
        self.ask(&Command::MemoryLeft(None));
        self.commit();
        self.compare();
    }

    fn try_while_short(&mut self) {
        for _ in 0..=self.random.below(TRIES_MAX) {
            let changes = self.draw_batch();
            let command = match self.random.below(3) {
                0..=1 => Command::Commit(changes.clone()),
                _ => Command::Snapshot(Kind::Fuzzy),
            };
            match (&command, self.try_ask(&command)) {
                (Command::Commit(changes), Ok(_)) => self.model.commit(changes),
                (_, Ok(_)) => {}
                (_, Err(refusal)) if refusal.starts_with("refused Poisoned") => self.fail(&refusal),
                (command, Err(_)) => self.refused(command),
            }
        }
    }

    fn refused(&mut self, command: &Command) {
        if let Command::Commit(changes) = command {
            self.model.refuse(changes);
        }
        self.tally.refused += 1;
    }

    /// On a full disk each command is done or refused, and costs the store nothing; an opening and a close
    /// are done.
    fn run_short_of_space(&mut self) {
        if self.ground.mount.is_none() {
            return;
        }
        let left = 4096 * self.random.below(LEFT_MAX / 4096);
        let filler = Filler::but(self.ground.path(), left);
        self.told.push_back(format!("(the disk has {left} bytes left)"));
        for _ in 0..=self.random.below(TRIES_MAX) {
            let changes = self.draw_batch();
            let command = match self.random.below(6) {
                0..=2 => Command::Commit(changes.clone()),
                3 => Command::Snapshot(Kind::Fuzzy),
                4 => Command::Prune { snapshots_kept: 1, give_up: None },
                _ => {
                    self.reopen();
                    continue;
                }
            };
            match (&command, self.try_ask(&command)) {
                (Command::Commit(changes), Ok(_)) => self.model.commit(changes),
                (_, Ok(_)) => {}
                (command, Err(refusal)) if refusal.starts_with("refused DiskFull") => self.refused(command),
                (_, Err(refusal)) => self.fail(&refusal),
            }
            self.compare();
        }
        drop(filler);
        self.told.push_back("(the disk has space again)".to_owned());
        self.commit();
    }

    /// Compares every byte of every page.
    fn compare(&mut self) {
        let found = self.ask(&Command::State);
        let expected = self.model.now().line(self.model.lsn());
        if found != expected {
            self.fail(&format!("the store's state differs\nfound    {found}\nexpected {expected}"));
        }
    }

    fn check_disk(&mut self) {
        let kept = self.kept();
        // Added are the bytes that the segment in use, the one after it and spares are short of full, of the
        // longest that any opening chose; the spares that wait; and the runs after two snapshots. Each run
        // begins with a segment that may be empty.
        let longest = SEGMENT_LENS.into_iter().max().expect("there are some");
        let spares = self.disk_len / 100 + longest;
        let constant = EMPTY_BYTES + 8 * longest + spares + 2 * (RESTARTS_MAX + 1) * FIRST_SEGMENT_LEN;
        let mut bound = self.model.disk_bytes_max(&kept, constant);
        let found = disk_bytes(&self.store());
        if found > bound {
            bound += self.bytes_beside_giants(&kept);
        }
        self.tally.disk_bytes_max = self.tally.disk_bytes_max.max(found);
        self.tally.disk_percent_max = self.tally.disk_percent_max.max(100 * found / bound);
        if found > bound {
            self.fail(&format!("the directory takes {found} bytes, and may take {bound}; kept: {kept:?}"));
        }
    }

    /// The bytes of files that stay whole for a short image beside one of a giant page. Where a named
    /// snapshot names the short one, they stay as long as it does. Where others do, or a restored state, the
    /// snapshot after the next one has written it again, and two more take the place of those.
    fn bytes_beside_giants(&self, kept: &[Kept]) -> u64 {
        let is_recent = self.tally.snapshots <= self.last_giant + GIANT_SNAPSHOTS;
        let stays = |kept: &&Kept| is_recent || kept.name.is_some();
        let directory = self.store();
        let files = || -> Option<BTreeSet<u64>> {
            let survey = Survey::read(&DirReader::new(&directory)).ok()?;
            let mut files = BTreeSet::new();
            for kept in kept.iter().filter(stays) {
                let entries = survey.entries(SnapshotId(kept.id)).ok()?;
                files.extend(entries.filter_map(|entry| entry.image).map(|image| image.file));
            }
            Some(files)
        };
        let len = |file| {
            std::fs::metadata(directory.join(FileName::Pages(file).to_string())).map_or(0, |file| file.len())
        };
        let files = files().unwrap_or_default();
        files.into_iter().map(len).filter(|len| *len > LONG_PAGE_LEN_MAX).sum()
    }

    fn check_memory(&mut self) {
        let found: u64 = self.ask(&Command::Peak).parse().unwrap();
        self.tally.memory_bytes_max = self.tally.memory_bytes_max.max(found);
        // A giant page is in the store, in the follower's replica, and perhaps aside for a snapshot.
        let bound = MEMORY_OVER_PAGES + LONG_PAGE_LEN_MAX * PAGES_MAX as u64 + 3 * self.giant_len_max;
        if found > bound {
            self.fail(&format!(
                "the process took {found} bytes, and its pages {}",
                self.model.now().page_bytes()
            ));
        }
    }
}

/// Draws other options for each opening.
fn open_with(random: &mut Random, log_io: LogIo) -> OpenWith {
    OpenWith {
        log_io: log_io.to_string(),
        segment_len: SEGMENT_LENS[random.below(4) as usize],
        on_demand: random.below(2) == 0,
        compressed: random.below(2) == 0,
        snapshot_log_bytes: [None, Some(128 << 10), Some(4 << 20)][random.below(3) as usize],
        kept_for_ms: KEPT_FOR_MS[random.below(4) as usize],
    }
}

/// The bytes that the files of a directory take.
fn disk_bytes(directory: &Path) -> u64 {
    let mut sum = 0;
    // A file that goes meanwhile takes nothing.
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let Ok(metadata) = std::fs::symlink_metadata(entry.path()) else { continue };
        sum += if metadata.is_dir() { disk_bytes(&entry.path()) } else { metadata.blocks() * 512 };
    }
    sum
}

/// The process that holds the store, with its pipes.
struct Worker {
    process: Child,
    input: ChildStdin,
    answers: Receiver<String>,
}

impl Worker {
    fn start(folder: &Path) -> Self {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "--nocapture", TEST]).env(ERRAND_DIRECTORY, folder.join("store"));
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (process.stdin.take().unwrap(), process.stdout.take().unwrap());
        let (sender, answers) = mpsc::channel();
        // A reader of its own, so that waiting for an answer has an end. It ends with the process.
        std::thread::spawn(move || pass_on(output, &sender));
        Self { process, input, answers }
    }

    fn tell(&mut self, command: &Command) {
        // A process that is gone is noticed by the answer that does not come.
        let _ = writeln!(self.input, "{command}").and_then(|()| self.input.flush());
    }

    fn answer(&mut self) -> Result<String, String> {
        self.answers.recv_timeout(PATIENCE).map_err(|error| match error {
            mpsc::RecvTimeoutError::Timeout => format!("no answer in {PATIENCE:?}"),
            mpsc::RecvTimeoutError::Disconnected => format!("the worker ended: {:?}", self.process.wait()),
        })
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // After a kill there is no process, and that is no failure.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn pass_on(output: ChildStdout, answers: &mpsc::Sender<String>) {
    for line in BufReader::new(output).lines().map_while(Result::ok) {
        let Some(answer) = line.strip_prefix(worker::ANSWER) else { continue };
        if answers.send(answer.to_owned()).is_err() {
            return;
        }
    }
}
