//! Buffered output to standard output or another writer. A reader that closes the pipe ends the command
//! without an error.

use std::fmt;
use std::io::{self, BufWriter, ErrorKind, Write};

use crate::cli::exit::Failure;

/// The writer of a command's results. Messages and progress go to standard error instead.
pub struct Output<'a>(BufWriter<Box<dyn Write + 'a>>);

impl<'a> Output<'a> {
    /// Returns the process's standard output.
    pub fn stdout() -> Self {
        Self::new(io::stdout())
    }

    /// Wraps any writer.
    pub fn new(writer: impl Write + 'a) -> Self {
        Self(BufWriter::new(Box::new(writer)))
    }

    /// Writes one line.
    pub fn line(&mut self, line: impl fmt::Display) -> Result<(), Failure> {
        writeln!(self.0, "{line}").map_err(lost)
    }

    /// Writes bytes unchanged.
    pub fn bytes(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.0.write_all(bytes).map_err(lost)
    }

    /// Flushes everything written so far.
    pub fn flush(&mut self) -> Result<(), Failure> {
        self.0.flush().map_err(lost)
    }
}

/// Maps a failed write to standard output to a failure.
fn lost(error: io::Error) -> Failure {
    match error.kind() {
        ErrorKind::BrokenPipe => Failure::ClosedPipe,
        _ => Failure::Environment(format!("cannot write to standard output: {error}")),
    }
}
