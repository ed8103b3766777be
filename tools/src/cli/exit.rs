//! Results of commands, and the exit codes that represent them.
//!
//! | code | meaning |
//! |---|---|
//! | 0 | success, including the case that the reader of standard output closed it early, as `head` does |
//! | 1 | the store is damaged, or differs from its expected content |
//! | 2 | usage or environment error: options, files, space, permissions |
//! | 3 | another process has the store open |
//! | 130 | Ctrl-C |

use std::io::Write;
use std::process::ExitCode;

/// The result of a command that ran to completion and printed its results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The command succeeded, and found neither damage nor a difference.
    Fine,
    /// The command found and listed damage or a difference.
    Difference,
    /// Ctrl-C was pressed, and the command finished the current step.
    Interrupted,
}

/// The reason why a command stopped before completion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The reader of standard output closed the pipe. The exit code is 0.
    ClosedPipe,
    /// The bytes of the store are damaged.
    Damage(String),
    /// The arguments or the environment do not permit the command.
    Environment(String),
    /// Another process has the store open.
    Locked(String),
}

/// The result of a command: how it ended, or why it stopped before completion.
pub type Outcome = Result<Ending, Failure>;

/// Exit code after Ctrl-C: 128 plus the signal number of SIGINT.
pub const INTERRUPTED: u8 = 130;

/// Prints a failure to standard error and returns the exit code.
pub fn code(outcome: Outcome) -> ExitCode {
    ExitCode::from(number(outcome))
}

/// Prints a failure to standard error and returns the exit code as a number.
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
        // Ignore the error, because a closed standard error has no reader.
        let _ = writeln!(std::io::stderr(), "remanent: {message}");
    }
    code
}
