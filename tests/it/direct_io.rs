//! The image I/O that tests combine with each kind of log I/O, and direct logs if the folder for temporary
//! files supports them. If not, tests use a buffered log and print a message that bypasses the capture of
//! test output.

use std::io::Write;

use remanent::disk::{Disk, dir::DirDisk};
use remanent::options::{ImageIo, LogIo};

/// Returns the image I/O for a log I/O, so that tests that iterate over the three kinds of log I/O also cover
/// the three kinds of image I/O.
pub fn image_io(log_io: LogIo) -> ImageIo {
    match log_io {
        LogIo::Mapped => ImageIo::Mapped,
        LogIo::Direct => ImageIo::Direct,
        _ => ImageIo::Buffered,
    }
}

/// Returns the log I/O that tests of direct logs use on this machine.
pub fn log_io() -> LogIo {
    match DirDisk::new(std::env::temp_dir()).refuses(LogIo::Direct).unwrap() {
        None => LogIo::Direct,
        Some(reason) => {
            let thread = std::thread::current();
            let test = thread.name().unwrap_or("a test");
            let mut uncaptured = std::io::stderr();
            writeln!(uncaptured, "SKIPPED on a direct log: {test}: {reason}").unwrap();
            LogIo::Buffered
        }
    }
}
