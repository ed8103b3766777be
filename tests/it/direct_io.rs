//! The ways to write images that go with those to write the log; and direct logs, where the folder for
//! temporary files supports them. Elsewhere tests write a buffered log instead and say so, past the capture
//! of their output.

use std::io::Write;

use remanent::disk::{Disk, dir::DirDisk};
use remanent::options::{ImageIo, LogIo};

/// The way to write images that goes with a way to write the log: so tests of each of three logs are tests of
/// each way to write images, too.
pub fn image_io(log_io: LogIo) -> ImageIo {
    match log_io {
        LogIo::Mapped => ImageIo::Mapped,
        LogIo::Direct => ImageIo::Direct,
        _ => ImageIo::Buffered,
    }
}

/// The way in which tests write a direct log here.
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
