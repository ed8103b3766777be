//! Sends SIGKILL before a system call is executed: before the first call of its kind, the second, … until the
//! worker ends normally. A mapped commit makes no system call, so [`super`] kills the worker there at random
//! times.

use std::io::{ErrorKind, Write};
use std::process::ExitStatus;

use super::scripts::{Part, SCRIPTS};
use super::*;
use crate::machine::skipped;
use crate::machine::strace::{self, Fault, Injection, Strace};

/// The kinds of system calls, by their `strace` names. Calls are counted per thread. The last kind includes all calls.
const CALLS: [&str; 13] = [
    "pwrite64",
    "pread64",
    "fdatasync",
    "fsync",
    "msync",
    "/^rename",
    "/^unlink",
    "ftruncate",
    "fallocate",
    "openat",
    "mmap",
    "mkdir",
    "all",
];

#[test]
fn nothing_acknowledged_is_lost_by_a_kill_at_a_system_call() {
    let kills = CALLS.map(|calls| Fault { calls, fault: "signal=KILL" });
    let Some(sweep) = Sweep::new("kills at system calls", &kills, Part::Steps) else { return };
    let total = sweep.run(effort("REMANENT_KILLS").map(|kills| kills / 2), |_, ended, at| {
        assert!(ended.signal() == Some(9) || ended.code() == Some(0), "the worker ended by itself: {at}");
    });
    println!("{total} kills at system calls");
}

/// The scripts to run with faults, and the store that each script starts from.
pub struct Sweep<'a> {
    before: Vec<Ground>,
    faults: &'a [Fault],
    part: Part,
}

/// The number of workers in which a fault was hit, per script and kind of fault.
type Struck = Vec<Vec<usize>>;

impl<'a> Sweep<'a> {
    /// Returns a sweep, or prints a message and returns `None` if `strace` is not available.
    pub fn new(name: &str, faults: &'a [Fault], part: Part) -> Option<Self> {
        if let Some(reason) = strace::missing() {
            skipped(name, reason);
            return None;
        }
        let scripts: Vec<usize> = (0..SCRIPTS.len()).collect();
        Some(Self { before: in_parallel(&scripts, |script| Ground::before(*script)), faults, part })
    }

    /// Runs workers with one fault each, one worker per script or as many as the environment requests. Prints
    /// and returns the number of faults that were hit. `check` receives the index of the fault, the worker's
    /// exit status and a description of the case.
    #[expect(clippy::print_stdout, reason = "the figures of the long run")]
    pub fn run(&self, enough: Option<usize>, check: impl Fn(usize, ExitStatus, &str) + Sync) -> usize {
        let strike = |script: usize, fault: usize, nth| {
            let injection = Injection { fault: self.faults[fault], nth };
            let check = |ended, at: &str| check(fault, ended, at);
            self.before[script].strike(script, self.part, &injection, &check)
        };
        let struck = match enough {
            Some(enough) => self.at_call_after_call(enough, strike),
            None => self.at_one_call_each(strike),
        };
        println!("{:<34}{}", "", self.row(|fault| fault.calls.to_owned()));
        println!("{:<34}{}", "", self.row(|fault| fault.fault.to_owned()));
        for (script, row) in SCRIPTS.iter().zip(&struck) {
            let counts = row.iter().map(|count| format!("{count:>13}"));
            println!("{:<34}{}", script.name, counts.collect::<String>());
        }
        assert!(
            struck.iter().all(|row| row.iter().sum::<usize>() > 0),
            "a script without a fault: {struck:?}"
        );
        for ground in &self.before {
            std::fs::remove_dir_all(&ground.directory).unwrap();
        }
        struck.iter().flatten().sum()
    }

    fn row(&self, column: impl Fn(&Fault) -> String) -> String {
        self.faults.iter().map(|fault| format!("{:>13}", column(fault))).collect()
    }

    /// Injects one fault per script, at a call of varying kind.
    fn at_one_call_each(&self, strike: impl Fn(usize, usize, u64) -> bool + Sync) -> Struck {
        let scripts: Vec<usize> = (0..SCRIPTS.len()).collect();
        in_parallel(&scripts, |script| {
            let mut random = Random(*script as u64);
            let mut struck = vec![0; self.faults.len()];
            loop {
                let fault = random.below(self.faults.len() as u64) as usize;
                // Count down from a random number to the first call of the kind, because there may be fewer
                // calls.
                let mut nth = 1 + random.below(16);
                loop {
                    if strike(*script, fault, nth) {
                        struck[fault] += 1;
                        return struck;
                    }
                    if nth == 1 {
                        break;
                    }
                    nth = 1 + random.below(nth - 1);
                }
            }
        })
    }

    /// For each script and kind of call, injects a fault at the first call, the second, … until there are no
    /// more calls or the requested number of workers is reached.
    fn at_call_after_call(&self, enough: usize, strike: impl Fn(usize, usize, u64) -> bool + Sync) -> Struck {
        let mut struck = vec![vec![0; self.faults.len()]; SCRIPTS.len()];
        let kinds = |script| (0..self.faults.len()).map(move |fault| (script, fault));
        let mut alive: Vec<(usize, usize)> = (0..SCRIPTS.len()).flat_map(kinds).collect();
        for nth in 1.. {
            let met = in_parallel(&alive, |(script, fault)| strike(*script, *fault, nth));
            alive = alive.iter().zip(met).filter(|(_, met)| *met).map(|(job, _)| *job).collect();
            for (script, fault) in &alive {
                struck[*script][*fault] += 1;
            }
            if alive.is_empty() || struck.iter().flatten().sum::<usize>() >= enough {
                return struck;
            }
        }
        unreachable!("no worker makes this many calls");
    }
}

impl Ground {
    /// Creates the store that a script starts from.
    fn before(script: usize) -> Self {
        let mut ground = Self::new(SCRIPTS[script].manner());
        if SCRIPTS[script].before > Lsn(0) {
            let ended = Worker::start_script(&ground.directory, script, Part::Before).ended();
            assert!(ended.success(), "{}: {ended}", SCRIPTS[script].name);
        }
        ground.check_what_is_left(&format!("before {}", SCRIPTS[script].name));
        assert_eq!(ground.model.lsn, SCRIPTS[script].before);
        ground
    }

    /// Returns a copy of the directory.
    fn copy(&self) -> Self {
        let directory = tempfile::tempdir().unwrap().keep();
        leftovers::copy_folder(&self.directory, &directory);
        let (board, diary) = (Board::open(&directory.join("board")), directory.join("diary"));
        let (model, diary) = (self.model.of_copy(&diary), Diary::open(&diary));
        let Self { manner, diary_checked, .. } = *self;
        Self { directory, manner, board, diary, diary_checked, model, random: Random(0), forks: 0, names: 0 }
    }

    /// Runs the script with this fault on a copy, and then checks the files. Returns true if a call hit the
    /// fault.
    fn strike(
        &self,
        script: usize,
        part: Part,
        injection: &Injection,
        check: &impl Fn(ExitStatus, &str),
    ) -> bool {
        let mut ground = self.copy();
        ground.board.start_over();
        // Create the folder here, so that the fault does not hit its creation by the worker.
        std::fs::create_dir_all(ground.directory.join("forks")).unwrap();
        let worker = Worker::start_script(&ground.directory, script, part);
        let (ended, struck) = worker.begin_under(&ground, injection);
        let Injection { fault: Fault { calls, fault }, nth } = injection;
        let name = SCRIPTS[script].name;
        let at = format!("{fault} at call {nth} of {calls} in {name:?} ({ended})");
        check(ended, &format!("{at}, in {}", ground.directory.display()));
        ground.check_what_is_left(&at);
        std::fs::remove_dir_all(&ground.directory).unwrap();
        struck
    }
}

impl Worker {
    fn start_script(directory: &Path, script: usize, part: Part) -> Self {
        let mut command = Self::command(directory);
        Self(command.env(ERRAND_PART, format!("{script} {part:?}")).spawn().unwrap())
    }

    /// Starts the worker's steps with an injected fault, and waits for the worker to end. Also returns true
    /// if a call hit the fault.
    fn begin_under(mut self, ground: &Ground, injection: &Injection) -> (ExitStatus, bool) {
        self.wait_until("readiness", || ground.board.is_ready());
        let strace = Strace::attach(self.0.id(), injection, &ground.directory.join("strace")).unwrap();
        // The pipe stays open, because closing it would end the worker. A worker that was killed while it
        // waited does not receive the byte.
        match self.0.stdin.as_mut().unwrap().write_all(b"!") {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
            written => written.unwrap(),
        }
        let ended = self.ended();
        let struck = ended.signal() == Some(9) || strace.struck();
        (ended, struck)
    }

    /// Waits for the worker to end.
    fn ended(&mut self) -> ExitStatus {
        // Unlike `Child::wait`, this method does not close the pipe.
        let stdin = self.0.stdin.take();
        let ended = self.0.wait().unwrap();
        drop(stdin);
        ended
    }
}
