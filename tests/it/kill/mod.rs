//! SIGKILL in every phase of the engine. A worker process runs a real workload on a real directory. It
//! records on a shared board which phases its threads are in, and which batches were acknowledged. The parent
//! kills the worker during a chosen phase. It then checks that every acknowledged batch exists, and that the
//! state is, byte for byte, that of the workload after the last recovered batch. The next worker continues
//! with the directory that the kill left.
//!
//! With `REMANENT_KILLS=N`, there are about N kills, half of them here and half at system calls ([`calls`]).
//! With `REMANENT_KILL_DEVICE=cuda:0`, the pages of the workers and of the checks are on that GPU.

mod board;
mod calls;
mod diary;
mod errors;
mod followers;
mod growth;
mod leftovers;
pub mod model;
mod power;
mod scripts;
mod tiers;
mod worker;
pub mod workload;

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use remanent::options::LogIo;
use remanent::testing::phases::Phase;
use remanent::{Lsn, Store};

use board::{Board, PHASES};
use diary::{Diary, Entry};
use model::Model;
use worker::Manner;
use workload::Random;

use crate::direct_io;
use crate::machine::{effort, in_parallel};
use crate::size::{is_full, sized};

/// Configurations of workers, and the number of kills in each phase. By default, the log is mapped if the
/// file system supports it.
fn plans() -> [(Manner, usize); 4] {
    let plan = |log_io, has_tiers, kills| (Manner { log_io, has_tiers, ..Manner::default() }, kills);
    [
        plan(None, false, 9),
        plan(Some(LogIo::Buffered), false, 6),
        plan(Some(direct_io::log_io()), false, 6),
        plan(None, true, 5),
    ]
}

/// The number of kills over all plans and phases at full size.
const KILLS_A_ROUND: usize = 234;

const TEST: &str = "kill::nothing_acknowledged_is_lost_by_a_kill_in_any_phase";
const ERRAND_DIRECTORY: &str = "REMANENT_KILL_DIRECTORY";
const ERRAND_LOG_IO: &str = "REMANENT_KILL_LOG_IO";
const ERRAND_BACKGROUND: &str = "REMANENT_KILL_BACKGROUND";
const ERRAND_TIERS: &str = "REMANENT_KILL_TIERS";
const ERRAND_PART: &str = "REMANENT_KILL_PART";
/// A worker that does not reach a phase within this time is considered hung. The time is long, because a
/// machine may be busy.
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn nothing_acknowledged_is_lost_by_a_kill_in_any_phase() {
    // The worker is this test in another process, which an environment variable selects. There is therefore
    // only one binary, and no test that does nothing when it runs alone.
    if let Some(directory) = std::env::var_os(ERRAND_DIRECTORY) {
        if let Some((script, part)) = scripts::told() {
            script.perform(Path::new(&directory), part);
        }
        let ways = [LogIo::Mapped, LogIo::Buffered, LogIo::Direct];
        let told = std::env::var(ERRAND_LOG_IO).ok();
        let log_io = told.map(|told| ways.into_iter().find(|way| way.to_string() == told).unwrap());
        let background = std::env::var_os(ERRAND_BACKGROUND).is_some();
        let has_tiers = std::env::var_os(ERRAND_TIERS).is_some();
        worker::work(Path::new(&directory), Manner { log_io, background, has_tiers });
    }
    // In the long form, half of the kills are at system calls. Each round uses new stores.
    let rounds = effort("REMANENT_KILLS").map_or(1, |kills| (kills / 2).div_ceil(KILLS_A_ROUND).max(1));
    let jobs: Vec<(usize, u64)> =
        (0..rounds as u64).flat_map(|round| (0..plans().len()).map(move |plan| (plan, round))).collect();
    let done = in_parallel(&jobs, |(plan, round)| {
        let (manner, wanted) = plans()[*plan];
        Ground::new(manner).kill_in_every_phase(sized(wanted.div_ceil(4), wanted), *round)
    });
    let mut tallies = plans().map(|_| Tally::default());
    for ((plan, _), done) in jobs.iter().zip(done) {
        tallies[*plan].add(done);
    }

    let row = |name: &str, column: &dyn Fn(&Tally) -> String| {
        println!(
            "{name:<16}{}",
            tallies.iter().map(|tally| format!("{:>26}", column(tally))).collect::<String>()
        );
    };
    row("killed in", &|tally| tally.label.clone());
    for (index, phase) in PHASES.iter().enumerate() {
        row(&format!("{phase:?}"), &|tally| tally.kills[index].to_string());
    }
    row("after its phase", &|tally| tally.late.to_string());
    row("forks", &|tally| tally.forks.to_string());
    row("named snapshots", &|tally| tally.names.to_string());
    row("batches", &|tally| tally.batches.to_string());
    let kills: usize = tallies.iter().flat_map(|tally| tally.kills).sum();
    println!("{kills} kills in a phase");
    let checked = |tally: &Tally| tally.forks >= sized(0, 1) && tally.names > sized(0, 10);
    let mut without_tiers = tallies.iter().zip(plans()).filter(|(_, (manner, _))| !manner.has_tiers);
    assert!(without_tiers.all(|(tally, _)| checked(tally)), "forks and names were checked");
    assert!(!is_full() || kills == rounds * KILLS_A_ROUND, "{kills} kills");
}

#[test]
fn interrupted_creation_is_restarted() {
    let mut random = Random(0);
    let mut cut_short = 0;
    for attempt in 1.. {
        assert!(attempt < 400, "most kills come too late: {cut_short} creations cut short");
        let mut ground = Ground::new(Manner::default());
        ground.random = Random(random.next());
        if ground.kill_in(Phase::Recovery) {
            cut_short += 1;
        }
        ground.check_what_is_left("in Recovery");
        std::fs::remove_dir_all(&ground.directory).unwrap();
        if cut_short == 10 {
            return;
        }
    }
}

/// Counts of the events under one plan.
#[derive(Default)]
struct Tally {
    label: String,
    /// Kills during the intended phase.
    kills: [usize; PHASES.len()],
    /// Kills that came too late, after the phase. They are checked like the others but not counted.
    late: usize,
    /// Forks and named snapshots that were compared with the model.
    forks: usize,
    names: usize,
    batches: u64,
}

impl Tally {
    fn add(&mut self, other: Self) {
        self.label = other.label;
        for (sum, kills) in self.kills.iter_mut().zip(other.kills) {
            *sum += kills;
        }
        self.late += other.late;
        self.forks += other.forks;
        self.names += other.names;
        self.batches += other.batches;
    }
}

/// A store that one worker after another uses, and its expected content.
struct Ground {
    directory: PathBuf,
    /// The configuration of the workers, except for snapshots.
    manner: Manner,
    board: Board,
    diary: Diary,
    /// Number of diary entries that were checked against the files after a kill.
    diary_checked: usize,
    model: Model,
    random: Random,
    /// Number of forks and named snapshots that passed their check.
    forks: usize,
    names: usize,
}

impl Ground {
    fn new(manner: Manner) -> Self {
        let log_io = manner.log_io;
        // The directory is removed only after success, so that it can be examined after a failure.
        let in_memory = if log_io.is_none() { tempfile::tempdir_in(worker::IN_MEMORY).ok() } else { None };
        let directory = in_memory.unwrap_or_else(|| tempfile::tempdir().unwrap()).keep();
        let (board, diary) = (Board::open(&directory.join("board")), directory.join("diary"));
        let (model, diary) = (Model::with_diary(&diary), Diary::open(&diary));
        let model = if manner.has_tiers { model.with_tiers() } else { model };
        let random = Random(u64::from(log_io.is_some()));
        Self { directory, manner, board, diary, diary_checked: 0, model, random, forks: 0, names: 0 }
    }

    fn kill_in_every_phase(mut self, wanted: usize, seed: u64) -> Tally {
        self.random = Random(seed);
        let mut kills = [0; PHASES.len()];
        let mut late = 0;
        while kills.iter().any(|count| *count < wanted) {
            for (index, phase) in PHASES.into_iter().enumerate() {
                if kills[index] == wanted {
                    continue;
                }
                if self.kill_in(phase) {
                    kills[index] += 1;
                } else {
                    late += 1;
                    // A fast machine commits in a microsecond, and a signal takes several microseconds.
                    assert!(late < 100 * wanted, "most kills come too late: {kills:?} in {PHASES:?}");
                }
                self.check_what_is_left(&format!("in {phase:?}"));
            }
        }
        // Open the directory itself after all these kills.
        let path = self.directory.join("store");
        let store = self.manner.options(&path).open(&path).unwrap();
        self.check_store(&store, "after all kills");
        let tiers = if self.manner.has_tiers { ", tiers" } else { "" };
        let label = store.recovered().log_io.clone() + tiers;
        // Drop the store before its directory is removed, because its threads still create segments there.
        drop(store);
        std::fs::remove_dir_all(&self.directory).unwrap();
        let Self { forks, names, model, .. } = self;
        Tally { label, kills, late, forks, names, batches: model.lsn.0 }
    }

    /// Starts a worker. Alternates between workers with background snapshots and workers that take their own.
    fn start_worker(&mut self) -> Worker {
        self.board.start_over();
        Worker::start(&self.directory, Manner { background: self.random.below(2) == 0, ..self.manner })
    }

    /// Runs a worker and kills it in this phase. Returns true if it died during the phase.
    fn kill_in(&mut self, phase: Phase) -> bool {
        let mut worker = self.start_worker();
        if phase != Phase::Recovery {
            // Do not always kill during the first commit or the first change of the segment after the open.
            let batches = self.random.below(120);
            worker.wait_until("opening", || self.board.opened().is_some());
            assert_eq!(self.board.opened(), Some(self.model.lsn), "the worker recovered something else");
            let from = Lsn(self.model.lsn.0 + batches);
            worker.wait_until("its batches", || self.board.begun() >= from);
        }
        // Recovery happens only once per worker. On a busy machine, this process may be scheduled too late to
        // observe it.
        let missed = || phase == Phase::Recovery && self.board.opened().is_some();
        worker.wait_until(&format!("{phase:?}"), || self.board.is_in(phase) || missed());
        // Wait for a part of the phase: a power of two of nanoseconds, up to about the duration of the phase.
        let exponent_max = match phase {
            Phase::Commit => 14,
            Phase::Recovery => 24,
            _ => 20,
        };
        let into = Duration::from_nanos(1 << self.random.below(exponent_max));
        spin(into);
        worker.kill();
        self.board.is_in(phase)
    }
}

/// Busy-waits for this duration.
fn spin(time: Duration) {
    let started = Instant::now();
    while started.elapsed() < time {
        std::hint::spin_loop();
    }
}

/// A running worker. It is killed when this value is dropped.
struct Worker(Child);

impl Worker {
    fn start(directory: &Path, manner: Manner) -> Self {
        let mut command = Self::command(directory);
        if let Some(log_io) = manner.log_io {
            command.env(ERRAND_LOG_IO, log_io.to_string());
        }
        if manner.background {
            command.env(ERRAND_BACKGROUND, "1");
        }
        if manner.has_tiers {
            command.env(ERRAND_TIERS, "1");
        }
        Self(command.spawn().unwrap())
    }

    /// Returns the command that runs this test in another process.
    fn command(directory: &Path) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "--nocapture", TEST]).env(ERRAND_DIRECTORY, directory);
        // The pipe to the worker's standard input is closed when this process ends in any way.
        command.stdin(Stdio::piped()).stdout(Stdio::null());
        command
    }

    /// Polls the board until the condition is true. The loop yields but never sleeps, because a phase may
    /// last a microsecond.
    fn wait_until(&mut self, what: &str, seen: impl Fn() -> bool) {
        let started = Instant::now();
        for turn in 1_u64.. {
            if seen() {
                return;
            }
            std::thread::yield_now();
            if turn.is_multiple_of(1024) {
                self.check();
                assert!(started.elapsed() < PATIENCE, "no {what} in {PATIENCE:?}: {}", self.threads());
            }
        }
    }

    /// Asserts that the worker is still running.
    fn check(&mut self) {
        let ended = self.0.try_wait().unwrap();
        assert!(ended.is_none(), "the worker ended by itself: {ended:?}");
    }

    /// Returns where each thread waits, as far as the kernel reports it. This output must suffice to explain
    /// a hang that occurs once in a thousand kills on another machine.
    fn threads(&self) -> String {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.0.id())).into_iter().flatten().flatten();
        let told = tasks.map(|task| {
            let of = |file: &str| std::fs::read_to_string(task.path().join(file)).unwrap_or_default();
            format!("\n{:<16} in {}, call {}", of("comm").trim(), of("wchan"), of("syscall").trim())
        });
        told.collect()
    }

    /// Ends the worker with SIGKILL.
    fn kill(mut self) {
        self.0.kill().unwrap();
        let status = self.0.wait().unwrap();
        assert_eq!(status.signal(), Some(9), "the worker ended by itself: {status}");
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // The process may already have ended, which is not a failure.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
