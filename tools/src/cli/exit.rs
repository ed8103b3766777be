//! How a command ends, and the exit code that scripts see.
//!
//! | code | meaning |
//! |---|---|
//! | 0 | success; also if the reader of standard output closed it early, as `head` does |
//! | 1 | the store is damaged, or differs from its expected content |
//! | 2 | usage or environment error: options, files, space, permissions |
//! | 3 | another process has the store open |
//! | 130 | Ctrl-C |

use std::io::Write;
use std::process::ExitCode;

/// The ending of a command that ran to completion and has printed its results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Nothing is wrong.
    Fine,
    /// Damage or a difference was found and listed.
    Difference,
    /// Ctrl-C was pressed; the current step was finished.
    Interrupted,
}

/// The reason why a command stopped early.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The reader of standard output closed it. This is not an error.
    ClosedPipe,
    /// The store's bytes are damaged.
    Damage(String),
    /// The arguments or the environment do not allow the command.
    Environment(String),
    /// Another process has the store open.
    Locked(String),
}

/// The result of a command.
pub type Outcome = Result<Ending, Failure>;

/// The exit code after Ctrl-C: 128 plus the number of SIGINT.
pub const INTERRUPTED: u8 = 130;

/// Reports a failure on standard error and returns the exit code.
pub fn code(outcome: Outcome) -> ExitCode {
    ExitCode::from(number(outcome))
}

/// Reports a failure on standard error and returns the exit code as a number.
pub fn number(outcome: Outcome) -> u8 {
    let (code, message) = match outcome {
        Ok(Ending::Fine) | Err(Failure::ClosedPipe) => (0, None),
        Ok(Ending::Difference) => (1, None),
        Ok(Ending::Interrupted) => (INTERRUPTED, None),
        Err(Failure::Damage(message)) => (1, Some(message)),
        Err(Failure::Environment(message)) => (2, Some(message)),
        Err(Failure::Locked(message)) => (3, Some(message)),
    };
    if let Some(message) = message {
        // If standard error is closed, the message has no reader.
        let _ = writeln!(std::io::stderr(), "remanent: {message}");
    }
    code
}
