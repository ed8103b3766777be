//! The level of messages on standard error besides a command's failure. Nothing here or elsewhere is ever
//! coloured, so `NO_COLOR` has nothing to turn off.

use std::io;

use tracing_subscriber::filter::LevelFilter;

use crate::cli::progress;

/// How much is said.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Verbosity {
    /// Say nothing but why a command failed: no progress, no warnings
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    quiet: bool,
    /// Say what the engine does; twice for every detail
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    verbose: u8,
}

impl Verbosity {
    /// Sets the level from now on. If the command is after warnings, they are no news.
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
