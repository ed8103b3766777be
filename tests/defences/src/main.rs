//! Tests the defences themselves. Disables each check, sync and rule of the list in turn, and expects a test
//! to fail.
//!
//! ```text
//! cargo run --manifest-path tests/defences/Cargo.toml                # each with its own test
//! cargo run --manifest-path tests/defences/Cargo.toml -- NAME…       # those whose name contains one of these
//! cargo run --manifest-path tests/defences/Cargo.toml -- --format    # those with a test of the format crate
//! cargo run --manifest-path tests/defences/Cargo.toml -- --all       # each with every test: hours of a core
//! ```
//!
//! `DEFENCES_JOBS` sets the number of concurrent tests. The default is one test per two cores. A test that
//! runs for more than five minutes counts as failed.

mod list;
mod run;
mod tree;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use list::{Defence, Test, all};
use run::{Binaries, Outcome, build, in_parallel};

/// The test binaries that need the engine.
const OF_THE_ENGINE: [&str; 2] = ["it", "remanent"];

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> std::io::Result<bool> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize()?;
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (flags, names): (Vec<_>, Vec<_>) = arguments.iter().partition(|argument| argument.starts_with("--"));
    let (is_all, is_format) = match flags[..] {
        [] => (false, false),
        [flag] if flag == "--all" => (true, false),
        [flag] if flag == "--format" => (false, true),
        _ => {
            return Err(std::io::Error::other(format!(
                "unknown option {flags:?}; use --all, --format or names of defences"
            )));
        }
    };
    let chosen: Vec<&Defence> = all()
        .filter(|defence| names.is_empty() || names.iter().any(|name| defence.name.contains(name.as_str())))
        .filter(|defence| !is_format || !OF_THE_ENGINE.contains(&defence.killed_by.binary))
        .collect();

    let tree = target.join("defences/tree");
    tree::copy(&root, &tree)?;
    let binaries = build(&tree, &target, is_format)?;
    let passed = if is_all { all_by_all(&binaries, &chosen)? } else { each_by_its_own(&binaries, &chosen)? };
    println!("{}", if passed { "every defence has its test" } else { "NOT every defence has its test" });
    Ok(passed)
}

/// Runs each defence with the test that the list names for it. The test must pass while all defences are
/// enabled.
fn each_by_its_own(binaries: &Binaries, chosen: &[&Defence]) -> std::io::Result<bool> {
    let tests: BTreeSet<Test> = chosen.iter().map(|defence| defence.killed_by).collect();
    let tests: Vec<Test> = tests.into_iter().collect();
    let started = Instant::now();
    let green: Vec<std::io::Result<bool>> = in_parallel(&tests, |test| {
        let outcome = binaries.test(*test, None)?;
        if outcome != Outcome::Green {
            println!("{} {}: {outcome} while every defence is on", test.binary, test.name);
        }
        Ok(outcome == Outcome::Green)
    });
    let red: Vec<std::io::Result<bool>> = in_parallel(chosen, |defence| {
        let begun = Instant::now();
        let outcome = binaries.test(defence.killed_by, Some(defence.name))?;
        let Test { binary, name } = defence.killed_by;
        println!("{:<56} {outcome:<12} {:>5.1?}  {binary} {name}", defence.name, begun.elapsed());
        Ok(outcome != Outcome::Green)
    });
    println!("{} defences, {} tests, {:.0?}", chosen.len(), tests.len(), started.elapsed());
    green.into_iter().chain(red).try_fold(true, |all, is_right| Ok(all & is_right?))
}

/// Runs each defence with every test. Prints the number of failed tests and the name of the first one.
fn all_by_all(binaries: &Binaries, chosen: &[&Defence]) -> std::io::Result<bool> {
    let jobs: Vec<(&Defence, &str)> =
        chosen.iter().flat_map(|defence| binaries.names().map(move |binary| (*defence, binary))).collect();
    let red = in_parallel(&jobs, |(defence, binary)| binaries.red_tests(binary, defence.name));
    let mut by_defence: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for ((defence, binary), red) in jobs.iter().zip(red) {
        by_defence
            .entry(defence.name)
            .or_default()
            .extend(red?.into_iter().map(|test| format!("{binary} {test}")));
    }
    for (defence, red) in &by_defence {
        println!("{defence:<44} {:>4} red; {}", red.len(), red.first().map_or("NONE", String::as_str));
    }
    Ok(by_defence.values().all(|red| !red.is_empty()))
}
