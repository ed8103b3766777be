//! Direct logs, where the folder for temporary files supports them. Elsewhere tests write a buffered log
//! instead and say so, past the capture of their output.

use std::io::Write;

use remanent::LogIo;
use remanent::disk::{Disk, dir::DirDisk};

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
