//! What a ring of the kernel's (`io_uring`) gains over plain calls, in the places where a store waits for its disk.
//!
//! ```text
//! cargo run --release --manifest-path tests/peers/Cargo.toml --target-dir target/peers -- \
//!     rings DIR [--seconds N] [--json]
//! ```
//!
//! All ways to do the same take turns, round by round. A share is that of the fastest way without a ring in the same
//! round; all figures are medians of the rounds. Time of processors is the whole machine's, which should do nothing else.
//! What a kernel or a file system refuses is left out, and said.
//!
//! Transfers only: no checksum, no copy to a device. A thread that drives a ring could do neither beside it.
//!
//! # What was expected
//!
//! Written down before the first run; `tools/README.md` has what came out.
//!
//! - A group's write: nothing over 1.05. One write is under way, so a ring saves no call. `O_DSYNC` costs it something:
//!   a plain call syncs on the thread that waits, a ring has it done by a worker of the kernel and is woken. At 4 KiB 0.90
//!   to 1.00 of the rate, at 256 KiB 0.97 to 1.00; registered files and memory gain less than 0.02.
//! - Images read past the cache: a ring of 16 within 0.95 to 1.05 of the faster of 4 and 12 threads, with less processor
//!   time; deeper gains nothing.
//! - From the cache: 0.4 to 0.6 on 2 cores, 0.15 to 0.3 on 16. The thread that submits copies the bytes.
//! - Images written past the cache: 0.95 to 1.05. Through it 0.9 to 1.05: the kernel's workers do what threads would.

mod group;
mod images;
mod ring;
mod sample;
mod shown;

use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use crate::aligned::Aligned;
use crate::record;
use sample::Sample;

const ROUNDS: usize = 5;

/// Ways to do the same.
pub struct Group {
    name: String,
    ways: Vec<Way>,
}

/// One of them.
pub struct Way {
    name: String,
    has_ring: bool,
    /// Takes about so long.
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

/// What became of the turns of one way.
pub struct Turns {
    name: String,
    has_ring: bool,
    samples: io::Result<Vec<Sample>>,
}

/// Bytes that are no other piece's.
fn piece(number: u64, len: usize) -> Aligned {
    let mut bytes = Aligned::new(len);
    for (at, word) in bytes.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&record::mix(number << 32 | at as u64).to_le_bytes());
    }
    bytes
}

/// Measures all, for about so many seconds, and prints a table for each group, or an object for each way.
pub fn compare(directory: &Path, seconds: u64, is_json: bool) -> ExitCode {
    let directory = tempfile::tempdir_in(directory).expect("a directory for the files");
    let groups: Vec<Group> =
        group::groups(directory.path()).into_iter().chain(images::groups(directory.path())).collect();
    let ways: usize = groups.iter().map(|group| group.ways.len()).sum();
    let time = Duration::from_secs(seconds) / (ways * ROUNDS) as u32;
    if !is_json {
        println!("{ROUNDS} rounds, {} ms a turn", time.as_millis());
    }
    for group in groups {
        let turns = take_turns(&group.ways, time);
        if is_json { shown::objects(&group.name, turns) } else { shown::table(&group.name, turns) }
    }
    ExitCode::SUCCESS
}

fn take_turns(ways: &[Way], time: Duration) -> Vec<Turns> {
    let new = |way: &Way| Turns { name: way.name.clone(), has_ring: way.has_ring, samples: Ok(Vec::new()) };
    let mut turns: Vec<Turns> = ways.iter().map(new).collect();
    for _ in 0..ROUNDS {
        for (way, turns) in ways.iter().zip(&mut turns) {
            if let Ok(samples) = &mut turns.samples {
                match (way.turn)(time) {
                    Ok(sample) => samples.push(sample),
                    Err(error) => turns.samples = Err(error),
                }
            }
        }
    }
    turns
}
