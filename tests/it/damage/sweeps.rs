//! Selects how much is damaged: a sample of all damage, everything, or a part of everything.
//!
//! With `REMANENT_DAMAGE=every`, each bit of every byte is flipped, for a rebuild and an open, each file is truncated
//! to every length, and each sector is replaced by all of its older versions. Each sweep prints a row of counts. The
//! run takes hours of CPU time. `REMANENT_DAMAGE=3/16` runs the third of sixteen parts. Single-threaded processes
//! (`taskset --cpu-list 3`) are faster than the threads of one process, which contend when they map memory.

use std::cell::Cell;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{Verdict, mix};
use crate::files::Files;
use crate::size::sized;

/// A sample has one in this number of cases. The number is odd, because in some sweeps even and odd cases differ.
const SAMPLE_ONE_OF: usize = 5;

/// The index of the part to damage, from 0, and the number of parts. `None` to damage only a sample.
static LONG: LazyLock<Option<(usize, usize)>> = LazyLock::new(|| {
    let told = std::env::var("REMANENT_DAMAGE").ok()?;
    let part = || {
        let (part, parts) = told.split_once('/')?;
        let (part, parts) = (part.parse::<usize>().ok()?, parts.parse().ok()?);
        (1..=parts).contains(&part).then(|| (part - 1, parts))
    };
    let every = (told == "every").then_some((0, 1));
    Some(
        every
            .or_else(part)
            .unwrap_or_else(|| panic!("REMANENT_DAMAGE is {told:?}, not \"every\" or like 3/16")),
    )
});

/// The index of the part to damage, from 0, and the number of parts.
static PART: LazyLock<(usize, usize)> =
    LazyLock::new(|| LONG.unwrap_or_else(|| sized((0, SAMPLE_ONE_OF), (0, 1))));

/// Returns true if all files are damaged in every way.
pub fn is_long() -> bool {
    LONG.is_some()
}

/// Returns true if a case belongs to the selected part.
fn is_here(number: usize) -> bool {
    let (part, parts) = *PART;
    number % parts == part
}

/// Returns the bits of a byte to flip: all of them, or a random one.
pub fn bits(number: usize) -> Range<u64> {
    let random = mix(number as u64) % 8;
    if is_long() { 0..8 } else { random..random + 1 }
}

/// Returns the minimum count for the selected part, given the minimum count for all parts.
pub fn at_least(count: usize) -> usize {
    count / PART.1
}

/// Returns a function that calls `each` for the cases of the selected part.
pub fn here(each: impl Fn(&str, &Files)) -> impl Fn(&str, &Files) {
    let number = Cell::new(0);
    move |what, files| {
        if is_here(number.replace(number.get() + 1)) {
            each(what, files);
        }
    }
}

/// Runs `each` for the numbers up to `count`, or for a sample of them, on all cores, each with its own copy of the
/// files.
pub fn sweep(files: &Files, count: usize, each: impl Fn(&mut Files, usize) + Sync) {
    sweep_part(files, count, *PART, each);
}

/// Like [`sweep`], but without sampling, for sweeps with few cases.
pub fn sweep_all(files: &Files, count: usize, each: impl Fn(&mut Files, usize) + Sync) {
    sweep_part(files, count, LONG.unwrap_or((0, 1)), each);
}

fn sweep_part(
    files: &Files,
    count: usize,
    (part, parts): (usize, usize),
    each: impl Fn(&mut Files, usize) + Sync,
) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, NonZeroUsize::get) {
            scope.spawn(|| {
                let mut files = files.clone();
                loop {
                    let from = next.fetch_add(64, Ordering::Relaxed);
                    if from >= count {
                        break;
                    }
                    (from..count.min(from + 64))
                        .filter(|number| number % parts == part)
                        .for_each(|number| each(&mut files, number));
                }
            });
        }
    });
}

/// Counts of the verdicts.
#[derive(Debug, Default)]
pub struct Count {
    whole: AtomicUsize,
    cut: AtomicUsize,
    traceless: AtomicUsize,
    refused: AtomicUsize,
}

impl Count {
    pub fn add(&self, verdict: Verdict) {
        let count = match verdict {
            Verdict::Whole => &self.whole,
            Verdict::Cut(_) => &self.cut,
            Verdict::Traceless(_) => &self.traceless,
            Verdict::Refused => &self.refused,
        };
        count.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the numbers of whole, cut, traceless and refused results. Also prints them in the long form.
    #[expect(clippy::print_stdout, reason = "a row of the table that the long form comes to")]
    pub fn get(&self, sweep: &str) -> [usize; 4] {
        let counts = [&self.whole, &self.cut, &self.traceless, &self.refused];
        let counts = counts.map(|count| count.load(Ordering::Relaxed));
        let [whole, cut, traceless, refused] = counts;
        let cases: usize = counts.iter().sum();
        println!("| {sweep} | {cases} | {whole} | {cut} | {traceless} | {refused} |");
        counts
    }
}
