//! The gain of a ring of the kernel's (`io_uring`) over plain calls, where a store waits for its disk.
//!
//! ```text
//! cargo run --release --manifest-path bench/peers/Cargo.toml --target-dir target/peers -- \
//!     rings DIR [--seconds N] [--group WORDS] [--json]
//! ```
//!
//! All ways to do the same take turns of 0.2 s, round by round, as many rounds as there is time for. With
//! `--group` only groups are measured that have these words in their names. A share is that of the fastest
//! way without a ring in the same round; all figures are medians of the rounds. Time of processors is the
//! whole machine's, which should do nothing else. A way that a kernel or a file system refuses is left out,
//! and named.
//!
//! Transfers only: no checksum, no copy to a device. A thread that drives a ring could do neither at the same
//! time.
//!
//! # What was expected
//!
//! Written down before the first run; `bench/README.md` has the results.
//!
//! - A group's write: nothing over 1.05. One write is under way, so a ring saves no call. `O_DSYNC` costs it
//!   something: a plain call syncs on the thread that waits, a ring has it done by a worker of the kernel and
//!   is woken. At 4 KiB 0.90 to 1.00 of the rate, at 256 KiB 0.97 to 1.00; registered files and memory gain
//!   less than 0.02.
//! - Images read past the cache: a ring of 16 within 0.95 to 1.05 of the faster of 4 and 12 threads, with
//!   less processor time; deeper gains nothing.
//! - From the cache: 0.4 to 0.6 on 2 cores, 0.15 to 0.3 on 16. The thread that submits copies the bytes.
//! - Images written past the cache: 0.95 to 1.05. Through it 0.9 to 1.05: the kernel's workers do what
//!   threads would.

mod group;
mod images;
mod ring;
mod sample;
mod report;

use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use crate::aligned_buf::Aligned;
use crate::record;
use sample::Sample;

const TURN: Duration = Duration::from_millis(200);
const ROUNDS_MIN: u64 = 3;

/// Ways to do the same.
pub struct Group {
    name: String,
    ways: Vec<Way>,
}

/// One of the ways.
pub struct Way {
    name: String,
    has_ring: bool,
    /// Takes a turn of about this time.
    turn: Box<dyn Fn(Duration) -> io::Result<Sample>>,
}

impl Way {
    fn with_ring(name: &str, turn: impl Fn(Duration) -> io::Result<Sample> + 'static) -> Self {
        Self { name: name.to_owned(), has_ring: true, turn: Box::new(turn) }
    }

    fn without_ring(name: &str, turn: impl Fn(Duration) -> io::Result<Sample> + 'static) -> Self {
        Self { name: name.to_owned(), has_ring: false, turn: Box::new(turn) }
    }
}

/// The turns of one way, or why it has none.
pub struct Turns {
    name: String,
    has_ring: bool,
    samples: io::Result<Vec<Sample>>,
}

/// Bytes that are different from those of any other piece.
fn piece(number: u64, len: usize) -> Aligned {
    let mut bytes = Aligned::new(len);
    for (at, word) in bytes.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&record::mix(number << 32 | at as u64).to_le_bytes());
    }
    bytes
}

/// The arguments of a comparison.
pub struct Asked {
    /// The time that all of it takes, about.
    pub seconds: u64,
    /// The words in the names of the groups.
    pub group: String,
    pub is_json: bool,
}

impl Default for Asked {
    fn default() -> Self {
        Self { seconds: 60, group: String::new(), is_json: false }
    }
}

/// Measures, and prints a table for each group, or an object for each way.
pub fn compare(directory: &Path, asked: &Asked) -> ExitCode {
    let directory = tempfile::tempdir_in(directory).expect("a directory for the files");
    let all = group::groups(directory.path()).into_iter().chain(images::groups(directory.path()));
    let groups: Vec<Group> = all.filter(|group| group.name.contains(&asked.group)).collect();
    let ways: u64 = groups.iter().map(|group| group.ways.len() as u64).sum();
    assert!(ways > 0, "no group has {:?} in its name", asked.group);
    let rounds = (asked.seconds * 1000 / (ways * TURN.as_millis() as u64)).max(ROUNDS_MIN);
    if !asked.is_json {
        println!("{rounds} rounds");
    }
    for group in groups {
        let turns = take_turns(&group.ways, rounds);
        if asked.is_json { report::objects(&group.name, turns) } else { report::table(&group.name, turns) }
    }
    ExitCode::SUCCESS
}

fn take_turns(ways: &[Way], rounds: u64) -> Vec<Turns> {
    let new = |way: &Way| Turns { name: way.name.clone(), has_ring: way.has_ring, samples: Ok(Vec::new()) };
    let mut turns: Vec<Turns> = ways.iter().map(new).collect();
    for _ in 0..rounds {
        for (way, turns) in ways.iter().zip(&mut turns) {
            if let Ok(samples) = &mut turns.samples {
                match (way.turn)(TURN) {
                    Ok(sample) => samples.push(sample),
                    Err(error) => turns.samples = Err(error),
                }
            }
        }
    }
    turns
}
