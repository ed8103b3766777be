//! Buffered output of results. If the reader closes the pipe, the command ends without an error.

use std::fmt;
use std::io::{self, BufWriter, ErrorKind, Write};

use crate::cli::exit::Failure;

/// The writer of a command's results. Messages and progress are written to standard error.
pub struct Output<'a>(BufWriter<Box<dyn Write + 'a>>);

impl<'a> Output<'a> {
    /// Returns a writer to standard output.
    pub fn stdout() -> Self {
        Self::new(io::stdout())
    }

    pub fn new(writer: impl Write + 'a) -> Self {
        Self(BufWriter::new(Box::new(writer)))
    }

    /// Writes `line` and a newline.
    pub fn line(&mut self, line: impl fmt::Display) -> Result<(), Failure> {
        writeln!(self.0, "{line}").map_err(lost)
    }

    /// Writes bytes without a newline.
    pub fn bytes(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.0.write_all(bytes).map_err(lost)
    }

    /// Flushes all buffered output.
    pub fn flush(&mut self) -> Result<(), Failure> {
        self.0.flush().map_err(lost)
    }
}

/// Converts an error of a write to standard output to a failure.
fn lost(error: io::Error) -> Failure {
    match error.kind() {
        ErrorKind::BrokenPipe => Failure::ClosedPipe,
        _ => Failure::Environment(format!("cannot write to standard output: {error}")),
    }
}
