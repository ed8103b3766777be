//! The `remanent` command: drives, inspects and verifies stores.
//!
//! Read in this order: `exit.rs` (how commands end), `simulate.rs` (what a replayed trace makes of a
//! store), `replay.rs` and `demo.rs` (the commands that drive one), `weights.rs` and `import.rs` (what a file of
//! weights is in a store), then the inspecting commands, which know the format only and so open what the
//! engine refuses; among them `past.rs` says how an earlier state is put together.

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

use crate::exit::Outcome;
use crate::output::Output;

const ABOUT: &str = "\
The store's directory is always the first argument. Commands that inspect only read, take no lock, and \
decode as much as they can of a damaged store.

Exit codes: 0 fine; 1 damage, or a difference; 2 the call or its surroundings are wrong; 3 another process \
has the store open; 130 Ctrl-C.";

/// Drive, inspect and verify Remanent stores
#[derive(Parser)]
#[command(version, after_help = ABOUT, max_term_width = 110)]
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
}

fn main() -> ExitCode {
    exit::code(run(&Cli::parse()))
}

fn run(cli: &Cli) -> Outcome {
    cli.verbosity.begin(matches!(cli.command, Command::Torture(_)));
    let mut out = Output::stdout();
    if !cli.command.listens() {
        interrupt::end_at_once()?;
    }
    let outcome = match &cli.command {
        Command::Demo(command) => command.run(&mut out),
        Command::Torture(command) => command.run(&mut out),
        Command::Replay(command) => command.run(&mut out),
        Command::Import(command) => command.run(&mut out),
        Command::Export(command) => command.run(&mut out),
        Command::Diff(command) => command.run(&mut out),
        Command::Blame(command) => command.run(&mut out),
        Command::Bisect(command) => command.run(&mut out),
        Command::Info(command) => command.run(&mut out),
        Command::Snapshots(command) => command.run(&mut out),
        Command::Snapshot(command) => command.run(&mut out),
        Command::Restore(command) => command.run(&mut out),
        Command::Fork(command) => command.run(&mut out),
        Command::Prune(command) => command.run(&mut out),
        Command::Pages(command) => command.run(&mut out),
        Command::Log(command) => command.run(&mut out),
        Command::Follow(command) => command.run(&mut out),
        Command::Dump(command) => command.run(&mut out),
        Command::Verify(command) => command.run(&mut out),
        Command::Salvage(command) => command.run(&mut out),
        Command::Doctor(command) => command.run(&mut out),
        Command::Bench(command) => command.run(&mut out),
        Command::Completions(command) => command.run(Cli::command(), &mut out),
    };
    // What was found is shown even where the command then failed.
    out.flush()?;
    outcome
}
