//! Durable commits by eight threads, each store in turn, beside a raw loop that writes and syncs groups and does
//! nothing else; and how many syncs the system saw.
//!
//! ```text
//! cargo run --release --manifest-path tests/peers/Cargo.toml --target-dir target/peers -- commits DIR [ROUNDS SECONDS]
//! ```
//!
//! Every store has its strictest durability. A commit is one record under a key of its thread's own. Syncs are
//! counted by `strace`, in a run of their own, for it slows down what it watches: a store that makes fewer of them
//! than there are commits lets commits share them, and with eight threads no sync serves more than eight. What makes
//! fewer than that is not durable, and ends the program with a failure.

use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::peers::{Commit, PEERS, Result};
use crate::raw::{RawLog, Way};
use crate::syncs;

const THREADS: usize = 8;
/// Commits of each thread while syncs are counted.
const COUNTED: u64 = 25;
const LENS: [usize; 2] = [4 << 10, 64 << 10];
/// The raw loops.
const RAW: [(&str, Way); 2] =
    [("raw, pwrite + fdatasync", Way::Synced), ("raw, O_DIRECT + O_DSYNC", Way::Direct)];

/// A log that keeps what Remanent keeps of it.
const KEEPS_LOG: &str = "okaywal, 256 MiB of log kept";

impl Commit for RawLog {
    fn commit(&self, _: usize, _: u64, record: &[u8]) -> Result<()> {
        Ok(RawLog::commit(self, record)?)
    }
}

/// All that take their turns.
fn names() -> impl Iterator<Item = &'static str> {
    RAW.into_iter().map(|(name, _)| name).chain(PEERS.iter().map(|peer| peer.name)).chain([KEEPS_LOG])
}

fn open(name: &str, directory: &Path, len: usize) -> Result<Box<dyn Commit>> {
    match RAW.iter().find(|(raw, _)| *raw == name) {
        Some((_, way)) => Ok(Box::new(RawLog::new(&directory.join("raw"), *way, THREADS * len)?)),
        None if name == KEEPS_LOG => crate::peers::okaywal::open_keeping_log(directory),
        None => (crate::peers::named(name).open)(directory, THREADS),
    }
}

/// Measures all, and prints a table for each length of record.
pub fn compare(directory: &Path, rounds: usize, time: Duration) -> ExitCode {
    let mut are_all_durable = true;
    for len in LENS {
        println!("{THREADS} threads, {} KiB, {rounds} rounds of {} s\n", len >> 10, time.as_secs_f64());
        println!("| | commits/s | of the faster raw loop | syncs for {} commits |", COUNTED * THREADS as u64);
        println!("|---|---|---|---|");
        let mut rates: Vec<Vec<f64>> = names().map(|_| Vec::new()).collect();
        for _ in 0..rounds {
            for (name, rates) in names().zip(&mut rates) {
                rates.push(rate(name, directory, len, time));
            }
        }
        // Each round has its own ceiling.
        let ceilings: Vec<f64> = (0..rounds).map(|round| rates[0][round].max(rates[1][round])).collect();
        for (name, rates) in names().zip(&rates) {
            let shares = rates.iter().zip(&ceilings).map(|(rate, ceiling)| rate / ceiling).collect();
            let syncs = count_syncs(name, directory, len);
            let shown = syncs.map_or_else(|| "no strace here".to_owned(), |syncs| syncs.to_string());
            println!("| {name} | {:.0} | {:.2} | {shown} |", median(rates.clone()), median(shares));
            are_all_durable &= syncs.is_none_or(|syncs| syncs >= COUNTED);
        }
        println!();
    }
    if are_all_durable { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Commits a second, in a new store.
fn rate(name: &str, directory: &Path, len: usize, time: Duration) -> f64 {
    let directory = tempfile::tempdir_in(directory).expect("a directory for a store");
    let store =
        open(name, directory.path(), len).unwrap_or_else(|error| panic!("{name} does not open: {error}"));
    let (over, total) = (AtomicBool::new(false), AtomicU64::new(0));
    let started = Instant::now();
    each_thread(|thread| {
        let mut count = 0;
        while !over.load(Ordering::Relaxed) {
            commit(name, &*store, thread, count, len);
            count += 1;
            if started.elapsed() >= time {
                over.store(true, Ordering::Relaxed);
            }
        }
        total.fetch_add(count, Ordering::Relaxed);
    });
    total.into_inner() as f64 / started.elapsed().as_secs_f64()
}

/// A child's work: so many commits by each thread.
pub fn commit_some(name: &str, directory: &Path, len: usize, count: u64) -> ExitCode {
    let store = open(name, directory, len).unwrap_or_else(|error| panic!("{name} does not open: {error}"));
    each_thread(|thread| (0..count).for_each(|count| commit(name, &*store, thread, count, len)));
    // What a store does when it is closed is no part of its commits.
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

/// Syncs that the commits took: those of a child that commits, less those of one that only opens the store.
fn count_syncs(name: &str, directory: &Path, len: usize) -> Option<u64> {
    let of = |count: u64| {
        let directory = tempfile::tempdir_in(directory).expect("a directory for a store");
        let (store, trace) = (directory.path().join("store"), directory.path().join("trace"));
        std::fs::create_dir(&store).expect("a directory for a store");
        let mut strace = Command::new("strace");
        strace.args(["-f", "-e", syncs::CALLS, "-o"]).arg(&trace).arg(std::env::current_exe().ok()?);
        strace.args(["commit", name]).arg(&store).args([len.to_string(), count.to_string()]);
        let status = strace.stdin(Stdio::null()).status().ok()?;
        assert!(status.success(), "{name} does not commit beside strace: {status}");
        Some(syncs::count(&std::fs::read_to_string(trace).expect("strace wrote a trace")))
    };
    Some(of(COUNTED)?.saturating_sub(of(0)?))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
