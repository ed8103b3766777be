//! Runs the trials. In a trial, one bit is flipped in a copy of a store, and a child process reads the copy.

use std::env;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use crate::FOUND;
use crate::leftovers::Leftovers;
use crate::peers::Peer;
use crate::record::{COUNT, Comparison, mix};

/// Maximum time for opening and reading a store.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// The number of trials with each outcome.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub harmless: u64,
    pub detected: u64,
    pub lost: u64,
    pub wrong: u64,
}

/// The outcome of one trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Harmless,
    Detected,
    Lost,
    Wrong,
}

/// A child process of this program.
pub struct Child;

impl Child {
    fn command(what: &str, peer: &Peer, directory: &Path) -> Command {
        let mut command = Command::new(env::current_exe().expect("this program has a path"));
        command.args([what, peer.name]).arg(directory);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        command
    }

    /// Starts a child that writes all records, kills it, and returns the files that it left.
    pub fn write(peer: &Peer) -> Leftovers {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let mut child = Self::command("write", peer, directory.path()).spawn().expect("a child");
        let mut line = String::new();
        let out = child.stdout.take().expect("it is piped");
        BufReader::new(out).read_line(&mut line).expect("its output can be read");
        assert_eq!(line, "written\n", "{} wrote nothing", peer.name);
        child.kill().expect("it waits to be killed");
        child.wait().expect("it was killed");
        Leftovers::read(directory.path()).expect("what it left can be read")
    }

    fn read(peer: &Peer, directory: &Path) -> Outcome {
        let mut command = Self::command("read", peer, directory);
        let output = command.stderr(Stdio::null()).output().expect("a child");
        // A crash, a panic and an error all count as detected.
        if output.status.code() != Some(FOUND.into()) {
            return Outcome::Detected;
        }
        let said = String::from_utf8_lossy(&output.stdout);
        match said.parse().unwrap_or_else(|error| panic!("{}: {error}", peer.name)) {
            Comparison { wrong: 1.., .. } => Outcome::Wrong,
            Comparison { right: COUNT, .. } => Outcome::Harmless,
            Comparison { .. } => Outcome::Lost,
        }
    }
}

/// Runs `trials` trials on all processors.
pub fn run(peer: &Peer, left: &Leftovers, trials: u64, seed: u64) -> Counts {
    let whole = tempfile::tempdir().expect("a temporary directory");
    left.copy_to(whole.path(), None).expect("there is room for a copy");
    assert_eq!(Child::read(peer, whole.path()), Outcome::Harmless, "{}: nothing was damaged yet", peer.name);
    let (next, counts) = (AtomicU64::new(0), Mutex::new(Counts::default()));
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let trial = next.fetch_add(1, Ordering::Relaxed);
                    if trial >= trials {
                        break;
                    }
                    let bit = mix(seed << 32 | trial) % (left.places() * 8);
                    let copy = tempfile::tempdir().expect("a temporary directory");
                    left.copy_to(copy.path(), Some(bit)).expect("there is room for a copy");
                    let outcome = Child::read(peer, copy.path());
                    let mut counts = counts.lock().expect("no panic");
                    *match outcome {
                        Outcome::Harmless => &mut counts.harmless,
                        Outcome::Detected => &mut counts.detected,
                        Outcome::Lost => &mut counts.lost,
                        Outcome::Wrong => &mut counts.wrong,
                    } += 1;
                }
            });
        }
    });
    counts.into_inner().expect("no panic")
}
