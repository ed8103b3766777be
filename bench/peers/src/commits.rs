//! Compares the durable commits of several stores, by eight threads, with a raw loop that only writes and
//! syncs groups. Also counts the syncs of each store.
//!
//! ```text
//! cargo run --release --manifest-path bench/peers/Cargo.toml --target-dir target/peers -- \
//!     commits|running DIR [ROUNDS SECONDS [KIB]]
//! ```
//!
//! `commits` opens a new store for each measurement and counts from the first commit. `running` opens each
//! store once and first commits [`WARM_UP`] bytes in records of 64 KiB, so that the store reuses its files if
//! it ever does. The store stays open between measurements. Before each measurement, a quarter of the time is
//! not counted, because the previous store still has background work. `KIB` applies only to `running`.
//!
//! Every store uses its strictest durability. A commit writes one record under a key that only its thread
//! uses. `strace` counts the syncs in a separate run, because it slows down the process. If a store makes
//! fewer syncs than commits, commits share syncs. With eight threads, at most eight commits can share a sync.
//! A store with fewer syncs is not durable, and the program fails.

use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::peers::{Commit, PEERS, Result};
use crate::raw::{RawLog, WriteMethod};
use crate::syncs;

const THREADS: usize = 8;
/// Number of commits per thread while syncs are counted.
const COUNTED: u64 = 25;
const LENS: [usize; 2] = [4 << 10, 64 << 10];
/// The names of the raw loops, and the write method of each.
const RAW: [(&str, WriteMethod); 2] =
    [("raw, pwrite + fdatasync", WriteMethod::Synced), ("raw, O_DIRECT + O_DSYNC", WriteMethod::Direct)];

/// Total length in bytes of the records that a store commits before it is measured. Remanent reuses its first
/// segments after 600 MiB.
const WARM_UP: u64 = 1 << 30;

/// The name of okaywal with as much kept log as Remanent keeps.
const KEEPS_LOG: &str = "okaywal, 256 MiB of log kept";

impl Commit for RawLog {
    fn commit(&self, _: usize, _: u64, record: &[u8]) -> Result<()> {
        Ok(RawLog::commit(self, record)?)
    }
}

/// Returns the names of all measured stores and loops.
fn names() -> impl Iterator<Item = &'static str> {
    RAW.into_iter().map(|(name, _)| name).chain(PEERS.iter().map(|peer| peer.name)).chain([KEEPS_LOG])
}

fn open(name: &str, directory: &Path, len: usize) -> Box<dyn Commit> {
    try_open(name, directory, len).unwrap_or_else(|error| panic!("{name} does not open: {error}"))
}

fn try_open(name: &str, directory: &Path, len: usize) -> Result<Box<dyn Commit>> {
    match RAW.iter().find(|(raw, _)| *raw == name) {
        Some((_, way)) => Ok(Box::new(RawLog::new(&directory.join("raw"), *way, THREADS * len)?)),
        None if name == KEEPS_LOG => crate::peers::okaywal::open_keeping_log(directory),
        None => (crate::peers::named(name).open)(directory, THREADS),
    }
}

/// Measures all stores and prints a table for each record length.
pub fn compare(directory: &Path, rounds: usize, time: Duration) -> ExitCode {
    let mut are_all_durable = true;
    for len in LENS {
        println!("{THREADS} threads, {} KiB, {rounds} rounds of {} s\n", len >> 10, time.as_secs_f64());
        println!("| | commits/s | of the faster raw loop | syncs for {} commits |", COUNTED * THREADS as u64);
        println!("|---|---|---|---|");
        let found = take_turns(rounds, |turn| {
            let name = names().nth(turn).expect("one turn each");
            let store = Running::open(name, directory, len);
            store.rate(len, Duration::ZERO, time)
        });
        for (name, Medians { rate, share }) in names().zip(found) {
            let syncs = count_syncs(name, directory, len);
            let shown = syncs.map_or_else(|| "no strace here".to_owned(), |syncs| syncs.to_string());
            println!("| {name} | {rate:.0} | {share:.2} | {shown} |");
            are_all_durable &= syncs.is_none_or(|syncs| syncs >= COUNTED);
        }
        println!();
    }
    if are_all_durable { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Measures stores after their warm-up, with records of `len` bytes, or of all lengths if `len` is `None`.
pub fn compare_running(directory: &Path, rounds: usize, time: Duration, len: Option<usize>) -> ExitCode {
    let longest = LENS[LENS.len() - 1];
    let stores: Vec<Running> = names().map(|name| Running::open(name, directory, longest)).collect();
    for store in &stores {
        let count = WARM_UP / (THREADS * longest) as u64;
        each_thread(|thread| (0..count).for_each(|count| store.commit(thread, count, longest)));
    }
    for len in LENS.into_iter().filter(|has| len.is_none_or(|len| len == *has)) {
        println!("{THREADS} threads, {} KiB, {rounds} rounds of {} s\n", len >> 10, time.as_secs_f64());
        println!("| running | commits/s | of the faster raw loop |\n|---|---|---|");
        let found = take_turns(rounds, |turn| stores[turn].rate(len, time / 4, time));
        for (name, Medians { rate, share }) in names().zip(found) {
            println!("| {name} | {rate:.0} | {share:.2} |");
        }
        println!();
    }
    ExitCode::SUCCESS
}

/// The median results of one store.
struct Medians {
    rate: f64,
    /// The rate as a share of the rate of the faster raw loop in the same round.
    share: f64,
}

/// Measures each of [`names`] in turn, round by round. `turn` receives an index into the names and returns
/// the rate.
fn take_turns(rounds: usize, turn: impl Fn(usize) -> f64) -> Vec<Medians> {
    let rounds: Vec<Vec<f64>> = (0..rounds).map(|_| (0..names().count()).map(&turn).collect()).collect();
    let of_store = |store: usize| {
        let rates: Vec<f64> = rounds.iter().map(|rates| rates[store]).collect();
        let shares = rounds.iter().map(|rates| rates[store] / rates[0].max(rates[1])).collect();
        Medians { rate: median(rates), share: median(shares) }
    };
    (0..names().count()).map(of_store).collect()
}

/// An open store and its directory.
struct Running {
    name: &'static str,
    store: Box<dyn Commit>,
    _directory: TempDir,
}

impl Running {
    /// Opens a new store, for records of at most `len` bytes.
    fn open(name: &'static str, directory: &Path, len: usize) -> Self {
        let directory = tempfile::tempdir_in(directory).expect("a directory for a store");
        Self { name, store: open(name, directory.path(), len), _directory: directory }
    }

    fn commit(&self, thread: usize, count: u64, len: usize) {
        commit(self.name, &*self.store, thread, count, len);
    }

    /// Returns the number of commits per second, without the first part of duration `beginning`.
    fn rate(&self, len: usize, beginning: Duration, time: Duration) -> f64 {
        let (over, total) = (AtomicBool::new(false), AtomicU64::new(0));
        let started = Instant::now();
        each_thread(|thread| {
            let (mut count, mut counted) = (0, 0);
            while !over.load(Ordering::Relaxed) {
                self.commit(thread, count, len);
                count += 1;
                let elapsed = started.elapsed();
                counted += u64::from(elapsed >= beginning);
                if elapsed >= beginning + time {
                    over.store(true, Ordering::Relaxed);
                }
            }
            total.fetch_add(counted, Ordering::Relaxed);
        });
        total.into_inner() as f64 / (started.elapsed() - beginning).as_secs_f64()
    }
}

/// Makes `count` commits in each thread. Runs in a child process.
pub fn commit_some(name: &str, directory: &Path, len: usize, count: u64) -> ExitCode {
    let store = open(name, directory, len);
    each_thread(|thread| (0..count).for_each(|count| commit(name, &*store, thread, count, len)));
    // Exit without closing the store, whose work must not be counted.
    std::process::exit(0)
}

fn each_thread(work: impl Fn(usize) + Sync) {
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let work = &work;
            scope.spawn(move || work(thread));
        }
    });
}

fn commit(name: &str, store: &dyn Commit, thread: usize, count: u64, len: usize) {
    let record = vec![count as u8; len];
    store.commit(thread, count, &record).unwrap_or_else(|error| panic!("{name} does not commit: {error}"));
}

/// Returns the number of syncs of the commits: the syncs of a child that commits, minus those of a child that
/// only opens the store.
fn count_syncs(name: &str, directory: &Path, len: usize) -> Option<u64> {
    let of = |count: u64| {
        let directory = tempfile::tempdir_in(directory).expect("a directory for a store");
        let (store, trace) = (directory.path().join("store"), directory.path().join("trace"));
        std::fs::create_dir(&store).expect("a directory for a store");
        let mut strace = Command::new("strace");
        strace.args(["-f", "-e", syncs::CALLS, "-o"]).arg(&trace).arg(std::env::current_exe().ok()?);
        strace.args(["commit", name]).arg(&store).args([len.to_string(), count.to_string()]);
        let status = strace.stdin(Stdio::null()).status().ok()?;
        assert!(status.success(), "{name} does not commit under strace: {status}");
        Some(syncs::count(&std::fs::read_to_string(trace).expect("strace wrote a trace")))
    };
    Some(of(COUNTED)?.saturating_sub(of(0)?))
}

/// Returns the median, which is the upper one of the two middle values for an even number of values.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
