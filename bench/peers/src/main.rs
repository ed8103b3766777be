//! Measures how several stores react to one flipped bit after an unclean exit.
//!
//! For each store, a child process writes 50 records and is killed. Each record is acknowledged as durable
//! before the next one is written. In each trial, one bit of the written bytes is flipped in a copy of the
//! files, and a second child process opens the copy and reads all records. Child processes are used because
//! some stores crash.
//!
//! ```text
//! cargo run --release --manifest-path bench/peers/Cargo.toml --target-dir target/peers -- [TRIALS] [SEED]
//! ```
//!
//! The bit is in the file with the most written bytes, which is the log if the store has one. Ranges of
//! zeros, which are padding or were never written, are not damaged. The result is one of:
//!
//! - *harmless*: all records exist and are correct;
//! - *detected*: an error, a report of a truncation, or a crash;
//! - *silently lost*: records are missing without an error;
//! - *silently wrong*: the store returns a record that was never written.
//!
//! With `commits` or `running` as the first argument, the program compares durable commits instead
//! (`commits.rs`). `blocks` replays a cache trace on stores of blocks (`blocks.rs`). `rings` compares methods
//! of writing and reading files (`rings/mod.rs`).

mod blocks;
mod commits;
mod leftovers;
mod peers;
// The raw loop is that of `remanent-bench commit`, with its memory buffers.
#[path = "../../../tools/src/cli/aligned_buf.rs"]
mod aligned_buf;
#[path = "../../src/raw.rs"]
mod raw;
mod record;
mod rings;
mod syncs;
mod trial;

use std::env;
use std::io::{self, Read};
use std::path::Path;
use std::process::ExitCode;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use peers::{Found, PEERS, Peer};
use trial::{Child, Counts};

/// Exit code of a child that prints its records to standard output.
const FOUND: u8 = 0;
/// Exit code of a child whose store reported damage.
const TOLD: u8 = 10;

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["write", peer, directory] => write(peers::named(peer), Path::new(directory)),
        ["read", peer, directory] => read(peers::named(peer), Path::new(directory)),
        ["commit", name, directory, len, count] => {
            commits::commit_some(name, Path::new(directory), number(len) as usize, number(count))
        }
        ["commits", directory] => commits::compare(Path::new(directory), 5, Duration::from_secs(1)),
        ["commits", directory, rounds, seconds] => {
            let seconds = Duration::from_secs(number(seconds));
            commits::compare(Path::new(directory), number(rounds).max(1) as usize, seconds)
        }
        ["running", directory] => {
            commits::compare_running(Path::new(directory), 5, Duration::from_secs(1), None)
        }
        ["running", directory, rounds, seconds, ref kib @ ..] => {
            let (rounds, seconds) = (number(rounds).max(1) as usize, Duration::from_secs(number(seconds)));
            let len = kib.first().map(|kib| number(kib) as usize * 1024);
            commits::compare_running(Path::new(directory), rounds, seconds, len)
        }
        ["blocks", directory, trace, ref options @ ..] => {
            let option = |at: usize, default: u64| options.get(at).map_or(default, |text| number(text));
            let asked = blocks::Asked {
                requests: option(0, 400) as usize,
                percent: option(1, 10),
                kib: option(2, 64).max(1),
                rounds: option(3, 1).max(1) as usize,
            };
            blocks::compare(Path::new(directory), Path::new(trace), &asked)
        }
        ["rings", directory, ref options @ ..] => rings(Path::new(directory), options),
        [] => compare(300, 1),
        [trials] => compare(number(trials), 1),
        [trials, seed] => compare(number(trials), number(seed)),
        _ => panic!(
            "usage: peers [TRIALS] [SEED] | commits DIR [ROUNDS SECONDS] | running DIR [ROUNDS SECONDS [KIB]] | blocks DIR TRACE [REQUESTS PERCENT KIB [ROUNDS]] | rings DIR [--seconds N] [--group WORDS] [--json]"
        ),
    }
}

fn rings(directory: &Path, options: &[&str]) -> ExitCode {
    let mut asked = rings::Asked::default();
    let mut options = options.iter();
    while let Some(option) = options.next() {
        match (*option, options.as_slice().first()) {
            ("--json", _) => asked.is_json = true,
            ("--seconds", Some(seconds)) => asked.seconds = number(seconds),
            ("--group", Some(words)) => asked.group = words.to_string(),
            _ => panic!("usage: peers rings DIR [--seconds N] [--group WORDS] [--json]"),
        }
        if *option != "--json" {
            options.next();
        }
    }
    rings::compare(directory, &asked)
}

fn number(text: &str) -> u64 {
    text.parse().expect("TRIALS, SEED, ROUNDS and SECONDS are whole numbers")
}

/// Writes all records, prints a line, and waits with the store open until the parent kills this process.
fn write(peer: &Peer, directory: &Path) -> ExitCode {
    let written = (peer.write)(directory, &|| {
        println!("written");
        // The parent kills this process. If the parent dies, the read returns.
        let _ended = io::stdin().read(&mut [0]);
    });
    written.unwrap_or_else(|error| panic!("{} cannot write: {error}", peer.name));
    ExitCode::FAILURE
}

/// Reads all records and prints the result of the comparison.
fn read(peer: &Peer, directory: &Path) -> ExitCode {
    // A hang counts as detected, so the wait is limited.
    let (answered, answer) = mpsc::channel::<()>();
    thread::spawn(move || {
        if answer.recv_timeout(trial::PATIENCE) == Err(RecvTimeoutError::Timeout) {
            std::process::exit(TOLD.into());
        }
    });
    let found = (peer.read)(directory);
    drop(answered);
    match found {
        Ok(Found { records, reported: None }) => {
            println!("{}", record::compare(&records));
            ExitCode::from(FOUND)
        }
        Ok(Found { reported: Some(what), .. }) => {
            println!("{what}");
            ExitCode::from(TOLD)
        }
        Err(error) => {
            println!("{error}");
            ExitCode::from(TOLD)
        }
    }
}

fn compare(trials: u64, seed: u64) -> ExitCode {
    println!("{} records, {trials} trials, seed {seed}\n", record::COUNT);
    println!("| | bytes damaged | harmless | detected | silently lost | silently wrong |");
    println!("|---|---|---|---|---|---|");
    let mut is_ours_sound = true;
    for peer in PEERS {
        let left = Child::write(peer);
        let counts = trial::run(peer, &left, trials, seed);
        let Counts { harmless, detected, lost, wrong } = counts;
        println!(
            "| {} | {} of {} | {harmless} | {detected} | {lost} | {wrong} |",
            peer.name,
            left.places(),
            left.target().display()
        );
        is_ours_sound &= peer.name != "remanent" || lost + wrong == 0;
    }
    if is_ours_sound { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
