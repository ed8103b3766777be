//! Standard output, or another writer in its place: buffered lines. A reader that goes away ends the command
//! quietly.

use std::fmt;
use std::io::{self, BufWriter, ErrorKind, Write};

use crate::cli::exit::Failure;

/// The target of a command's results. Messages and progress go to standard error instead.
pub struct Output<'a>(BufWriter<Box<dyn Write + 'a>>);

impl<'a> Output<'a> {
    /// The process's standard output.
    pub fn stdout() -> Self {
        Self::new(io::stdout())
    }

    /// Whatever takes bytes.
    pub fn new(writer: impl Write + 'a) -> Self {
        Self(BufWriter::new(Box::new(writer)))
    }

    /// Writes one line.
    pub fn line(&mut self, line: impl fmt::Display) -> Result<(), Failure> {
        writeln!(self.0, "{line}").map_err(lost)
    }

    /// Writes bytes as they are.
    pub fn bytes(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.0.write_all(bytes).map_err(lost)
    }

    /// Hands everything written so far to the reader.
    pub fn flush(&mut self) -> Result<(), Failure> {
        self.0.flush().map_err(lost)
    }
}

/// The meaning of a failed write to standard output.
fn lost(error: io::Error) -> Failure {
    match error.kind() {
        ErrorKind::BrokenPipe => Failure::ClosedPipe,
        _ => Failure::Environment(format!("cannot write to standard output: {error}")),
    }
}
