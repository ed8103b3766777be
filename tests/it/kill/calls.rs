//! SIGKILL at a system call, before it does anything: at the first of its kind, at the second, … until the
//! worker comes to its end. A mapped commit makes no call at all: [`super`] kills there, at random moments.

use std::io::{ErrorKind, Write};
use std::process::ExitStatus;

use super::scripts::{Part, SCRIPTS};
use super::*;
use crate::machine::skipped;
use crate::machine::strace::{self, Injection, Strace};

/// Kinds of calls, by the names that `strace` has for them; each thread of a worker counts its own. The last one
/// is every call whatever.
const CALLS: [&str; 12] = [
    "pwrite64",
    "pread64",
    "fdatasync",
    "fsync",
    "msync",
    "/^rename",
    "/^unlink",
    "ftruncate",
    "openat",
    "mmap",
    "mkdir",
    "all",
];

/// What became of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Killed,
    /// It made fewer calls of the kind.
    Survived,
}

#[test]
fn nothing_acknowledged_is_lost_by_a_kill_at_a_system_call() {
    if let Some(reason) = strace::missing() {
        skipped("kills at system calls", reason);
        return;
    }
    let before = in_parallel(&std::array::from_fn::<usize, { SCRIPTS.len() }, _>(|index| index), |index| {
        Ground::before(*index)
    });
    let kills = match effort("REMANENT_KILLS") {
        Some(kills) => at_call_after_call(&before, kills / 2),
        None => at_one_call_each(&before),
    };
    println!("{:<34}{}", "killed in", CALLS.map(|call| format!("{call:>10}")).concat());
    for (script, row) in SCRIPTS.iter().zip(&kills) {
        println!("{:<34}{}", script.name, row.map(|count| format!("{count:>10}")).concat());
    }
    let total: usize = kills.iter().flatten().sum();
    println!("{total} kills at system calls");
    assert!(kills.iter().all(|row| row.iter().sum::<usize>() > 0), "a script without a kill: {kills:?}");
    for ground in before {
        std::fs::remove_dir_all(ground.directory).unwrap();
    }
}

/// Kills of each script, by the kind of call.
type Kills = Vec<[usize; CALLS.len()]>;

/// One kill a script, at a call of some kind.
fn at_one_call_each(before: &[Ground]) -> Kills {
    let scripts: Vec<usize> = (0..SCRIPTS.len()).collect();
    in_parallel(&scripts, |script| {
        let mut random = Random(*script as u64);
        let mut kills = [0; CALLS.len()];
        loop {
            let call = random.below(CALLS.len() as u64) as usize;
            // Down to the first call of the kind, which there may not be.
            let mut nth = 1 + random.below(16);
            loop {
                if before[*script].kill_at(*script, CALLS[call], nth) == End::Killed {
                    kills[call] += 1;
                    return kills;
                }
                if nth == 1 {
                    break;
                }
                nth = 1 + random.below(nth - 1);
            }
        }
    })
}

/// At the first call of each kind in each script, at the second, … until there are no more, or enough.
fn at_call_after_call(before: &[Ground], enough: usize) -> Kills {
    let mut kills: Kills = vec![[0; CALLS.len()]; SCRIPTS.len()];
    let mut alive: Vec<(usize, usize)> =
        (0..SCRIPTS.len()).flat_map(|script| (0..CALLS.len()).map(move |call| (script, call))).collect();
    for nth in 1.. {
        let ends = in_parallel(&alive, |(script, call)| before[*script].kill_at(*script, CALLS[*call], nth));
        let killed = alive.iter().zip(ends).filter(|(_, end)| *end == End::Killed);
        alive = killed.map(|(job, _)| *job).collect();
        for (script, call) in &alive {
            kills[*script][*call] += 1;
        }
        if alive.is_empty() || kills.iter().flatten().sum::<usize>() >= enough {
            return kills;
        }
    }
    unreachable!("no worker makes so many calls");
}

impl Ground {
    /// What a script finds.
    fn before(script: usize) -> Self {
        let mut ground = Self::new(SCRIPTS[script].log_io());
        if SCRIPTS[script].before > Lsn(0) {
            let ended = Worker::start_script(&ground.directory, script, Part::Before).ended();
            assert!(ended.success(), "{}: {ended}", SCRIPTS[script].name);
        }
        ground.check_what_is_left(&format!("before {}", SCRIPTS[script].name));
        assert_eq!(ground.model.lsn, SCRIPTS[script].before);
        ground
    }

    /// Another directory, with the same in it.
    fn copy(&self) -> Self {
        let directory = tempfile::tempdir().unwrap().keep();
        left::copy_folder(&self.directory, &directory);
        let (board, diary) = (Board::open(&directory.join("board")), directory.join("diary"));
        let (model, diary) = (self.model.of_copy(&diary), Diary::open(&diary));
        let Self { log_io, diary_checked, .. } = *self;
        Self { directory, log_io, board, diary, diary_checked, model, random: Random(0), forks: 0, names: 0 }
    }

    /// Runs the script on a copy, kills it at this call, and checks what is left, killed or not.
    fn kill_at(&self, script: usize, calls: &'static str, nth: u64) -> End {
        let mut ground = self.copy();
        ground.board.start_over();
        let worker = Worker::start_script(&ground.directory, script, Part::Steps);
        let injection = Injection { calls, fault: "signal=KILL", nth };
        let ended = worker.begin_under(&ground.board, &injection);
        let at = format!("at call {nth} of {calls} in {:?} ({ended})", SCRIPTS[script].name);
        let end = match (ended.signal(), ended.code()) {
            (Some(9), _) => End::Killed,
            (_, Some(0)) => End::Survived,
            _ => panic!("the worker ended by itself: {at}, in {}", ground.directory.display()),
        };
        ground.check_what_is_left(&at);
        std::fs::remove_dir_all(&ground.directory).unwrap();
        end
    }
}

impl Worker {
    fn start_script(directory: &Path, script: usize, part: Part) -> Self {
        let mut command = Self::command(directory);
        Self(command.env(ERRAND_PART, format!("{script} {part:?}")).spawn().unwrap())
    }

    /// Lets it begin with a fault before it, and waits for its end.
    fn begin_under(mut self, board: &Board, injection: &Injection) -> ExitStatus {
        self.wait_until(|| board.is_ready());
        let _strace = Strace::attach(self.0.id(), injection).unwrap();
        // The pipe stays open: its end would end the worker. A worker that is killed in the call by which it
        // waits does not hear this.
        match self.0.stdin.as_mut().unwrap().write_all(b"!") {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
            written => written.unwrap(),
        }
        self.ended()
    }

    /// Waits for its end.
    fn ended(&mut self) -> ExitStatus {
        // The pipe is not closed, as `Child::wait` would.
        let stdin = self.0.stdin.take();
        let ended = self.0.wait().unwrap();
        drop(stdin);
        ended
    }
}
