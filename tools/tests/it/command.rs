//! Runs the command and holds what came back.

use std::process::{Command, Stdio};

/// What a run of the command left behind.
pub struct Run {
    /// The exit code.
    pub code: i32,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
}

/// The command with arguments, not yet started.
pub fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_remanent"));
    command.args(args).stdin(Stdio::null());
    command
}

/// Runs the command to its end.
pub fn run(args: &[&str]) -> Run {
    let output = command(args).output().expect("the command was built beside the test");
    let text = |bytes| String::from_utf8(bytes).expect("output is UTF-8");
    Run {
        code: output.status.code().expect("the command was not killed"),
        out: text(output.stdout),
        err: text(output.stderr),
    }
}

impl Run {
    /// The run, if it ended with this code; else both outputs are shown.
    #[track_caller]
    pub fn expect(self, code: i32) -> Self {
        assert_eq!(self.code, code, "stdout:\n{}\nstderr:\n{}", self.out, self.err);
        self
    }
}
