//! How a command ends, and the exit code that scripts see.
//!
//! | code | meaning |
//! |---|---|
//! | 0 | fine; also when the reader of standard output went away, as `head` does |
//! | 1 | the store is damaged, or differs from its expected content |
//! | 2 | the call or its surroundings are wrong: options, files, space, permissions |
//! | 3 | another process has the store open |
//! | 130 | Ctrl-C |

use std::io::Write;
use std::process::ExitCode;

/// A command that ran to its end, with all it has to say already said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Nothing is wrong.
    Fine,
    /// Damage or a difference was found and listed.
    Difference,
    /// Ctrl-C; the step under way was finished.
    Interrupted,
}

/// A command that stopped, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The reader of standard output has gone away. That is no fault.
    ClosedPipe,
    /// The store's bytes are damaged.
    Damage(String),
    /// The call, or the world around it, does not allow the command.
    Environment(String),
    /// Another process has the store open.
    Locked(String),
}

/// The result of a command.
pub type Outcome = Result<Ending, Failure>;

/// The exit code of Ctrl-C: 128 and the number of SIGINT.
pub const INTERRUPTED: u8 = 130;

/// Reports a failure on standard error and gives the exit code.
pub fn code(outcome: Outcome) -> ExitCode {
    ExitCode::from(number(outcome))
}

/// Reports a failure on standard error and gives the exit code's number.
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
