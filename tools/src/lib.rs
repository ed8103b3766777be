//! The `remanent` command: drives, inspects and verifies stores.
//!
//! Read in this order: `exit.rs` (how commands end), `simulate.rs` (what a replayed trace makes of a
//! store), `replay.rs` and `demo.rs` (the commands that drive one), `weights.rs` and `import.rs` (what a file of
//! weights is in a store), then the inspecting commands, which know the format only and so open what the
//! engine refuses; among them `past.rs` says how an earlier state is put together.
//!
//! A library, so that a test can run commands by the thousand without a process each: [`run`], [`import()`].

// Modules are listed in reading order.
mod exit;
mod output;
mod table;
mod interrupt;
mod progress;
mod verbosity;
mod json;
mod memory;
mod size;
mod aligned;
mod engine;

mod trace;
mod simulate;
mod check;
mod rule;
mod replay;
mod child;
mod course;
mod demo;
mod torture;

mod dtype;
mod weights;
mod changes;
mod import;

mod store_dir;
mod view;
mod past;
mod snapshot;
mod restore;
mod fork;
mod prune;
mod export;
mod diff;
mod selector;
mod element;
mod blame;
mod bisect;
mod scan;
mod reasons;
mod info;
mod snapshots;
mod pages;
mod log;
mod follow;
mod dump;
mod verify;
mod salvage;

mod doctor;
mod bench;
mod completions;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

pub use crate::exit::{Ending, Failure, Outcome};
pub use crate::import::import;
use crate::output::Output;

const ABOUT: &str = "\
The store's directory is always the first argument. Commands that inspect only read, take no lock, and \
decode as much as they can of a damaged store.

Exit codes: 0 fine; 1 damage, or a difference; 2 the call or its surroundings are wrong; 3 another process \
has the store open; 130 Ctrl-C.";

/// Drive, inspect and verify Remanent stores
#[derive(Parser)]
#[command(name = "remanent", version, after_help = ABOUT, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    verbosity: verbosity::Verbosity,
}

#[derive(Subcommand)]
enum Command {
    Demo(demo::Demo),
    Torture(torture::Torture),
    Replay(replay::Replay),
    Import(import::Import),
    Export(export::Export),
    Diff(diff::Diff),
    Blame(blame::Blame),
    Bisect(bisect::Bisect),
    Info(info::Info),
    Snapshots(snapshots::Snapshots),
    Snapshot(snapshot::Snapshot),
    Restore(restore::Restore),
    Fork(fork::Fork),
    Prune(prune::Prune),
    Pages(pages::Pages),
    Log(log::Log),
    Follow(follow::Follow),
    Dump(dump::Dump),
    Verify(verify::Verify),
    Salvage(salvage::Salvage),
    Doctor(doctor::Doctor),
    Bench(bench::Bench),
    Completions(completions::Completions),
}

impl Command {
    /// Whether the command takes care of Ctrl-C itself: it has something in hand to finish or to remove.
    fn listens(&self) -> bool {
        matches!(
            self,
            Command::Demo(_)
                | Command::Torture(_)
                | Command::Replay(_)
                | Command::Import(_)
                | Command::Export(_)
                | Command::Bisect(_)
                | Command::Snapshot(_)
                | Command::Restore(_)
                | Command::Fork(_)
                | Command::Prune(_)
                | Command::Salvage(_)
                | Command::Doctor(_)
                | Command::Bench(_)
                | Command::Follow(_)
        )
    }

    /// Runs it.
    fn run(&self, out: &mut Output) -> Outcome {
        let outcome = match self {
            Command::Demo(command) => command.run(out),
            Command::Torture(command) => command.run(out),
            Command::Replay(command) => command.run(out),
            Command::Import(command) => command.run(out),
            Command::Export(command) => command.run(out),
            Command::Diff(command) => command.run(out),
            Command::Blame(command) => command.run(out),
            Command::Bisect(command) => command.run(out),
            Command::Info(command) => command.run(out),
            Command::Snapshots(command) => command.run(out),
            Command::Snapshot(command) => command.run(out),
            Command::Restore(command) => command.run(out),
            Command::Fork(command) => command.run(out),
            Command::Prune(command) => command.run(out),
            Command::Pages(command) => command.run(out),
            Command::Log(command) => command.run(out),
            Command::Follow(command) => command.run(out),
            Command::Dump(command) => command.run(out),
            Command::Verify(command) => command.run(out),
            Command::Salvage(command) => command.run(out),
            Command::Doctor(command) => command.run(out),
            Command::Bench(command) => command.run(out),
            Command::Completions(command) => command.run(Cli::command(), out),
        };
        // What was found is shown even where the command then failed.
        out.flush()?;
        outcome
    }
}

/// The command as this process was called: what it finds goes to standard output, why it failed to standard error.
pub fn main() -> ExitCode {
    exit::code(run_here(&Cli::parse()))
}

fn run_here(cli: &Cli) -> Outcome {
    cli.verbosity.begin(matches!(cli.command, Command::Torture(_)));
    if !cli.command.listens() {
        interrupt::end_at_once()?;
    }
    cli.command.run(&mut Output::stdout())
}

/// Runs a command for a caller that goes on after it. `arguments` are what follows the program's name; what would
/// go to standard output goes to `out`.
///
/// # Errors
///
/// What a process would say on standard error before it ends with an exit code of its own; also arguments that
/// are none.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use remanent::Store;
/// use remanent_tools::{Ending, Failure, run};
///
/// let dir = tempfile::tempdir()?;
/// let path = dir.path().to_str().ok_or("no UTF-8")?;
/// assert!(matches!(run(&["verify", path], &mut Vec::new()), Err(Failure::Environment(_))), "no store yet");
///
/// Store::open(dir.path(), remanent::Options::default())?.close()?;
/// let mut out = Vec::new();
/// assert_eq!(run(&["verify", path], &mut out), Ok(Ending::Fine));
/// assert!(out.starts_with(b"clean: "));
/// # Ok(())
/// # }
/// ```
pub fn run(arguments: &[&str], out: &mut Vec<u8>) -> Outcome {
    let cli = Cli::try_parse_from(["remanent"].iter().chain(arguments))
        .map_err(|error| Failure::Environment(error.to_string()))?;
    cli.command.run(&mut Output::new(out))
}
