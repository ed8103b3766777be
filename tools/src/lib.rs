//! The `remanent` command. It runs workloads on stores, and inspects and verifies stores.
//!
//! # Map
//!
//! Each folder contains related commands and imports only from the folders below it.
//!
//! | folder | purpose |
//! |---|---|
//! | `torture/` | kills, damage and power cuts on the user's own disk and GPU |
//! | `replay/` | replay of a cache trace into a store that is killed and checked; the demo |
//! | `history/` | comparing, naming, restoring and forking kept states |
//! | `archive/` | archives of stores in an object store; only with the feature `archive` |
//! | `weights/` | safetensors files and their versions |
//! | `inspect/` | the content of a store, read without the engine, so that damaged stores can be inspected |
//! | `read/` | the view of a store directory that these commands share |
//! | `cli/` | exit codes, output, interruption and other parts common to all commands |
//!
//! # As a library
//!
//! The command is also a library, so that a test can run thousands of commands in one process with [`run`] and
//! [`import()`]. [`main_as`] runs the command inside another program, such as the Python package.

mod torture;
#[allow(missing_docs, missing_debug_implementations, reason = "only `shared` makes it public")]
mod replay;
mod history;
#[cfg(feature = "archive")]
mod archive;
mod weights;
mod inspect;
mod read;
#[allow(missing_docs, missing_debug_implementations, reason = "only `shared` makes it public")]
mod cli;

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

pub use crate::cli::exit::{Ending, Failure, Outcome};
use crate::cli::output::Output;
use crate::cli::{completions, exit, interrupt, program, verbosity};
use crate::history::{bisect, blame, diff, fork, prune, restore, salvage, snapshot};
use crate::inspect::{doctor, dump, follow, info, log, pages, snapshots, verify};
use crate::replay::demo;
pub use crate::weights::import::import;
pub use crate::weights::versions::{Version, versions};

/// Parts of the command that the `remanent-bench` program uses. They have no stable API and may change in any release.
#[doc(hidden)]
pub mod shared {
    pub use crate::cli::{
        aligned_buf, engine, exit, interrupt, json, output, program, progress, replacement, size, table,
        verbosity,
    };
    pub use crate::inspect::doctor::file_system_of;
    pub use crate::replay::simulate::SplitMix64;
    pub use crate::replay::trace;
}

const ABOUT: &str = "\
A command that works on a store expects the store directory as its first argument. Commands that inspect a store do \
not modify it, take no lock, and decode the readable parts of a damaged store.

Exit codes:
  0    success
  1    damage or a difference was found
  2    usage or environment error
  3    another process has the store open
  130  interrupted by Ctrl-C";

/// Text that is printed to standard error if the command is run without arguments.
const GUIDE: &str = "\
Remanent keeps pages of GPU and host memory in stores that survive crashes. First steps:

  remanent demo                            kill a store at random times and recover all of it
  remanent import STORE model.safetensors  create a store, or add a version to an existing one
  remanent info STORE                      show what a store contains and whether it is damaged
  remanent verify STORE                    check every byte that a store needs
  remanent doctor DIR                      show how a store would work on this machine

`remanent --help` lists all commands, and `remanent COMMAND --help` describes a command.
";

/// Run, inspect and verify Remanent stores
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
    Import(weights::import::Import),
    Export(weights::export::Export),
    Versions(weights::versions::Versions),
    Diff(diff::Diff),
    Blame(blame::Blame),
    Bisect(bisect::Bisect),
    Info(info::Info),
    Snapshots(snapshots::Snapshots),
    Snapshot(snapshot::Snapshot),
    Restore(restore::Restore),
    Fork(fork::Fork),
    Prune(prune::Prune),
    #[cfg(feature = "archive")]
    Archive(archive::Archive),
    Pages(pages::Pages),
    Log(log::Log),
    Follow(follow::Follow),
    Dump(dump::Dump),
    Verify(verify::Verify),
    Salvage(salvage::Salvage),
    Doctor(doctor::Doctor),
    Completions(completions::Completions),
}

impl Command {
    /// Returns true if the command handles Ctrl-C itself. Such a command first finishes or undoes its current step.
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
                | Command::Follow(_)
        )
    }

    fn run(&self, out: &mut Output) -> Outcome {
        let outcome = match self {
            Command::Demo(command) => command.run(out),
            Command::Torture(command) => command.run(out),
            Command::Replay(command) => command.run(out),
            Command::Import(command) => command.run(out),
            Command::Export(command) => command.run(out),
            Command::Versions(command) => command.run(out),
            Command::Diff(command) => command.run(out),
            Command::Blame(command) => command.run(out),
            Command::Bisect(command) => command.run(out),
            Command::Info(command) => command.run(out),
            Command::Snapshots(command) => command.run(out),
            Command::Snapshot(command) => command.run(out),
            Command::Restore(command) => command.run(out),
            Command::Fork(command) => command.run(out),
            Command::Prune(command) => command.run(out),
            #[cfg(feature = "archive")]
            Command::Archive(command) => command.run(out),
            Command::Pages(command) => command.run(out),
            Command::Log(command) => command.run(out),
            Command::Follow(command) => command.run(out),
            Command::Dump(command) => command.run(out),
            Command::Verify(command) => command.run(out),
            Command::Salvage(command) => command.run(out),
            Command::Doctor(command) => command.run(out),
            Command::Completions(command) => command.run(Cli::command(), out),
        };
        // Print the results so far, even if the command failed.
        out.flush()?;
        outcome
    }
}

/// Runs the command with the arguments of this process. Prints results to standard output, and a failure to standard
/// error.
pub fn main() -> ExitCode {
    match parse(std::env::args_os().skip(1).collect()) {
        Ok(cli) => exit::code(run_here(&cli)),
        Err(error) => error.exit(),
    }
}

/// Parses the arguments after the program's name. Without arguments, returns an error that prints [`GUIDE`].
fn parse(arguments: Vec<OsString>) -> Result<Cli, clap::Error> {
    let name = OsString::from("remanent");
    if arguments.is_empty() {
        Cli::command().override_help(GUIDE).try_get_matches_from([&name])?;
    }
    Cli::try_parse_from(std::iter::once(name).chain(arguments))
}

/// Runs the command inside the process of another program, such as a Python interpreter. Returns the exit code for the
/// process.
///
/// `program` is the command line that starts this command, because some commands start themselves as child processes.
/// `arguments` are the arguments after the program's name.
pub fn main_as(program: Vec<OsString>, arguments: impl IntoIterator<Item = OsString>) -> u8 {
    program::set(program);
    match parse(arguments.into_iter().collect()) {
        Ok(cli) => {
            let code = exit::number(run_here(&cli));
            // Flush, because the process may end without running the exit code of the standard library.
            let _ = std::io::stdout().flush();
            code
        }
        Err(error) => {
            // Ignore the error, because a closed standard output or error has no reader.
            let _ = error.print();
            u8::try_from(error.exit_code()).unwrap_or(2)
        }
    }
}

fn run_here(cli: &Cli) -> Outcome {
    cli.verbosity.begin(matches!(cli.command, Command::Torture(_)));
    if !cli.command.listens() {
        interrupt::end_at_once()?;
    }
    cli.command.run(&mut Output::stdout())
}

/// Runs a command and writes its results to `out`. `arguments` are the arguments after the program's name.
///
/// # Errors
///
/// Returns the failure that a process would print to standard error. Invalid arguments are also a failure.
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
/// Store::open(dir.path())?.close()?;
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
