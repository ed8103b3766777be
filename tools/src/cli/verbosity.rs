//! The level of messages on standard error. A command always prints its failure. Output is never colored, so `NO_COLOR`
//! has no effect.

use std::io;

use tracing_subscriber::filter::LevelFilter;

use crate::cli::progress;

/// The `--quiet` and `--verbose` flags.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Verbosity {
    /// Print only errors to standard error
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    quiet: bool,
    /// Print messages of the engine to standard error; repeat for more detail
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    verbose: u8,
}

impl Verbosity {
    /// Sets the level of messages. If `expects_warnings` is true, warnings are hidden, because the command causes them
    /// deliberately.
    pub fn begin(self, expects_warnings: bool) {
        if self.quiet {
            progress::be_quiet();
        }
        let level = match (self.quiet, self.verbose) {
            (true, _) => LevelFilter::OFF,
            (false, 0) if expects_warnings => LevelFilter::ERROR,
            (false, 0) => LevelFilter::WARN,
            (false, 1) => LevelFilter::INFO,
            (false, _) => LevelFilter::TRACE,
        };
        tracing_subscriber::fmt().with_max_level(level).with_writer(io::stderr).without_time().init();
    }
}
