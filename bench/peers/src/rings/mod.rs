//! Compares the kernel's `io_uring` with plain calls for the disk transfers that a store waits for.
//!
//! ```text
//! cargo run --release --manifest-path bench/peers/Cargo.toml --target-dir target/peers -- \
//!     rings DIR [--seconds N] [--group WORDS] [--json]
//! ```
//!
//! All methods of a group are measured in turn for 0.2 s each, round by round, until the time is over. With
//! `--group`, only groups with these words in their names are measured. A share is relative to the fastest
//! method without a ring in the same round. All results are medians of the rounds. Processor time is that of
//! the whole machine, which should be idle otherwise. A method that the kernel or the file system rejects is
//! listed and skipped.
//!
//! Only transfers are measured, without checksums and copies to a device. A thread that drives a ring could
//! not do this work at the same time.
//!
//! # What was expected
//!
//! These expectations were written before the first run. `bench/README.md` contains the results.
//!
//! - Writes of a group: at most 1.05. Only one write is in flight, so a ring saves no call. `O_DSYNC` has a
//!   cost: a plain call syncs on the waiting thread, whereas a ring uses a kernel worker, which must wake the
//!   thread. At 4 KiB 0.90 to 1.00 of the rate, and at 256 KiB 0.97 to 1.00. Registered files and memory gain
//!   less than 0.02.
//! - Reads of images that bypass the page cache: a ring of depth 16 reaches 0.95 to 1.05 of the faster of 4
//!   and 12 threads, with less processor time. A deeper ring gains nothing.
//! - Reads from the page cache: 0.4 to 0.6 on 2 cores, and 0.15 to 0.3 on 16 cores, because the submitting
//!   thread copies the bytes.
//! - Writes of images that bypass the page cache: 0.95 to 1.05. Writes through the page cache: 0.9 to 1.05,
//!   because the kernel's workers do the work of the threads.

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

/// Methods of doing the same work, which are compared with each other.
pub struct Group {
    name: String,
    ways: Vec<Way>,
}

/// One method.
pub struct Way {
    name: String,
    has_ring: bool,
    /// Measures the method for about this time.
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

/// The measurements of one method, or the reason why there are none.
pub struct Turns {
    name: String,
    has_ring: bool,
    samples: io::Result<Vec<Sample>>,
}

/// Returns the bytes of piece `number`, which differ from those of all other pieces.
fn piece(number: u64, len: usize) -> Aligned {
    let mut bytes = Aligned::new(len);
    for (at, word) in bytes.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&record::mix(number << 32 | at as u64).to_le_bytes());
    }
    bytes
}

/// The options of a comparison.
pub struct Asked {
    /// Approximate total duration in seconds.
    pub seconds: u64,
    /// Words that the names of the measured groups contain.
    pub group: String,
    pub is_json: bool,
}

impl Default for Asked {
    fn default() -> Self {
        Self { seconds: 60, group: String::new(), is_json: false }
    }
}

/// Measures all groups. Prints a table for each group, or a JSON object for each method.
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
