//! Death by SIGKILL, in every phase of the engine. A worker process runs a real workload on a real
//! directory and says on a shared board which phases its threads are in and what was acknowledged; the
//! parent kills it while a wanted phase lasts, and then demands two things: every acknowledged batch is
//! there, and the state is, byte for byte, that of the workload after the batch that recovery reached.
//! The next worker goes on from the directory as the kill left it.

mod board;
mod followers;
mod worker;
pub mod workload;

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use remanent::disk::dir::DirReader;
use remanent::phases::Phase;
use remanent::{LogIo, Lsn, Metadata, PageInfo, Store};

use board::{Board, PHASES};
use workload::{Model, Random};

/// How the log is written, and kills wanted in each phase. The default log is a mapped one wherever the
/// file system allows it.
const PLANS: [(Option<LogIo>, usize); 2] = [(None, 19), (Some(LogIo::Buffered), 10)];
const TEST: &str = "kill::nothing_acknowledged_is_lost_by_a_kill_in_any_phase";
const ERRAND_DIRECTORY: &str = "REMANENT_KILL_DIRECTORY";
const ERRAND_BUFFERED: &str = "REMANENT_KILL_BUFFERED";
/// A worker that does not reach a phase for so long hangs. Long, for a machine may be busy with other work.
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn nothing_acknowledged_is_lost_by_a_kill_in_any_phase() {
    // The worker is this very test in another process, told so by its environment: one binary, and no test
    // that does nothing when it is run by itself.
    if let Some(directory) = std::env::var_os(ERRAND_DIRECTORY) {
        let buffered = std::env::var_os(ERRAND_BUFFERED).is_some();
        worker::work(Path::new(&directory), buffered.then_some(LogIo::Buffered));
    }
    let tallies = PLANS.map(|(log_io, wanted)| Ground::new(log_io).kill_in_every_phase(wanted));

    println!("{:<16}{:>10}{:>26}", "killed in", &tallies[0].label, &tallies[1].label);
    for (index, phase) in PHASES.iter().enumerate() {
        let name = format!("{phase:?}");
        println!("{name:<16}{:>10}{:>26}", tallies[0].kills[index], tallies[1].kills[index]);
    }
    println!("{:<16}{:>10}{:>26}", "after its phase", tallies[0].late, tallies[1].late);
    println!("{:<16}{:>10}{:>26}", "batches", tallies[0].batches.0, tallies[1].batches.0);
    for (index, phase) in PHASES.iter().enumerate() {
        let kills: usize = tallies.iter().map(|tally| tally.kills[index]).sum();
        assert!(kills >= 10, "{kills} kills in {phase:?}");
    }
    let kills: usize = tallies.iter().flat_map(|tally| tally.kills).sum();
    assert!(kills >= 200, "{kills} kills");
}

#[test]
fn a_creation_cut_short_is_started_over() {
    let mut random = Random(0);
    let mut cut_short = 0;
    for attempt in 1.. {
        assert!(attempt < 400, "most kills come too late: {cut_short} creations cut short");
        let mut ground = Ground::new(None);
        ground.random = Random(random.next());
        if ground.kill_in(Phase::Recovery) {
            cut_short += 1;
        }
        ground.check_what_is_left(Phase::Recovery);
        std::fs::remove_dir_all(&ground.directory).unwrap();
        if cut_short == 10 {
            return;
        }
    }
}

/// What happened on one ground.
struct Tally {
    label: String,
    /// Kills by which the worker died inside the wanted phase.
    kills: [usize; PHASES.len()],
    /// Kills that came when the phase was over. They are checked like the others and not counted.
    late: usize,
    batches: Lsn,
}

/// A store that one worker after another works on, and what it must hold.
struct Ground {
    directory: PathBuf,
    log_io: Option<LogIo>,
    board: Board,
    model: Model,
    random: Random,
}

impl Ground {
    fn new(log_io: Option<LogIo>) -> Self {
        // Kept until all went well: a failure leaves it for whoever looks into it.
        let directory = tempfile::tempdir().unwrap().keep();
        let board = Board::open(&directory.join("board"));
        Self { directory, log_io, board, model: Model::new(), random: Random(u64::from(log_io.is_some())) }
    }

    fn kill_in_every_phase(mut self, wanted: usize) -> Tally {
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
                    assert!(late < 20 * wanted, "most kills come too late: {kills:?} in {PHASES:?}");
                }
                self.check_what_is_left(phase);
            }
        }
        // The directory itself, after all that was done to it.
        let store = Store::open(self.directory.join("store"), worker::options(self.log_io)).unwrap();
        self.check_store(&store, "after all kills");
        let label = store.recovered().log_io.clone();
        // Before the directory goes: the store's threads still make segments there.
        drop(store);
        std::fs::remove_dir_all(&self.directory).unwrap();
        Tally { label, kills, late, batches: self.model.lsn }
    }

    /// Runs a worker and kills it in this phase. Returns whether it died while the phase lasted.
    fn kill_in(&mut self, phase: Phase) -> bool {
        self.board.start_over();
        let mut worker = Worker::start(&self.directory, self.log_io);
        if phase != Phase::Recovery {
            // Not always in the first commit, or at the first roll, after opening.
            let batches = self.random.below(300);
            worker.wait_until(|| self.board.opened().is_some());
            assert_eq!(self.board.opened(), Some(self.model.lsn), "the worker recovered something else");
            let from = Lsn(self.model.lsn.0 + batches);
            worker.wait_until(|| self.board.begun() >= from);
        }
        // A worker recovers once: on a busy machine this process may be given no time to see it.
        let missed = || phase == Phase::Recovery && self.board.opened().is_some();
        worker.wait_until(|| self.board.is_in(phase) || missed());
        // Some way into the phase: a power of two of nanoseconds, up to about as long as the phase lasts.
        let exponent_max = match phase {
            Phase::Commit => 14,
            Phase::Recovery => 24,
            _ => 20,
        };
        let into = Duration::from_nanos(1 << self.random.below(exponent_max));
        let seen = Instant::now();
        while seen.elapsed() < into {
            std::hint::spin_loop();
        }
        worker.kill();
        self.board.is_in(phase)
    }

    /// Demands what was promised of what the kill left: from the pure rebuild, which reads the directory
    /// itself, and from the engine, which opens a copy, so that the next worker has the same crash to
    /// recover from.
    fn check_what_is_left(&mut self, phase: Phase) {
        let at = format!("killed in {phase:?}, in {}", self.directory.display());
        let left = self.directory.join("store");
        let copy = tempfile::tempdir().unwrap();
        copy_folder(&left, copy.path());
        let store = Store::open(copy.path(), worker::options(self.log_io))
            .unwrap_or_else(|error| panic!("{error}, {at}"));
        let lsn = store.lsn();
        let (acknowledged, begun) = (self.board.acknowledged(), self.board.begun());
        assert!(acknowledged <= lsn, "{acknowledged} was acknowledged, {lsn} recovered; {at}");
        assert!(lsn <= begun, "{begun} was begun, {lsn} recovered; {at}");
        assert!(self.model.lsn <= lsn, "{} was there before, {lsn} now; {at}", self.model.lsn);
        self.model.advance(lsn);
        // Without STORE there is no store yet, and nothing to rebuild.
        if left.join("STORE").exists() {
            self.check_rebuild(&left, &at);
        }
        self.check_store(&store, &at);
    }

    fn check_rebuild(&self, path: &Path, at: &str) {
        let rebuilt = remanent_format::rebuild::rebuild(&DirReader::new(path), &Default::default()).unwrap();
        let (table, contents) = (rebuilt.table, rebuilt.contents);
        assert_eq!(table.lsn(), self.model.lsn, "{at}");
        self.check_state(table.pages(), table.root(), |info| contents[&info.page].clone(), at);
    }

    fn check_store(&self, store: &Store, at: &str) {
        assert_eq!(store.lsn(), self.model.lsn, "{at}");
        let read = |info: &PageInfo| {
            let mut bytes = vec![0; info.len as usize];
            store.read(info.page, 0, &mut bytes).unwrap();
            bytes
        };
        self.check_state(store.pages().unwrap().iter(), &store.root().unwrap(), read, at);
    }

    fn check_state<'a>(
        &self,
        pages: impl Iterator<Item = &'a PageInfo>,
        root: &Metadata,
        read: impl Fn(&PageInfo) -> Vec<u8>,
        at: &str,
    ) {
        assert!(pages.eq(self.model.pages.values().map(|(info, _)| info)), "another page table, {at}");
        assert_eq!(root, &self.model.root(), "{at}");
        for (info, bytes) in self.model.pages.values() {
            assert!(&read(info) == bytes, "page {} differs, {at}", info.page);
        }
    }
}

/// A running worker, which does not outlive the test.
struct Worker(Child);

impl Worker {
    fn start(directory: &Path, log_io: Option<LogIo>) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "--nocapture", TEST]).env(ERRAND_DIRECTORY, directory);
        if log_io.is_some() {
            command.env(ERRAND_BUFFERED, "1");
        }
        // The pipe to its standard input closes when this process ends, however it ends.
        Self(command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap())
    }

    /// Watches the board. It gives the processor away and never sleeps: a phase may last a microsecond.
    fn wait_until(&mut self, seen: impl Fn() -> bool) {
        let started = Instant::now();
        for turn in 1_u64.. {
            if seen() {
                return;
            }
            std::thread::yield_now();
            if turn.is_multiple_of(1024) {
                let ended = self.0.try_wait().unwrap();
                assert!(ended.is_none(), "the worker ended by itself: {ended:?}");
                assert!(started.elapsed() < PATIENCE, "the worker hangs");
            }
        }
    }

    /// SIGKILL, and nothing else, ends it.
    fn kill(mut self) {
        self.0.kill().unwrap();
        let status = self.0.wait().unwrap();
        assert_eq!(status.signal(), Some(9), "the worker ended by itself: {status}");
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // After `kill` there is nobody left, and that is no failure.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn copy_folder(source: &Path, target: &Path) {
    for entry in std::fs::read_dir(source).unwrap() {
        let entry = entry.unwrap();
        let target = target.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            std::fs::create_dir(&target).unwrap();
            copy_folder(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}
