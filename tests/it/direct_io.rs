//! Direct logs, where the folder for temporary files can have them. Where it cannot, tests say so past the
//! capture of their output and write a buffered log instead.

use std::io::Write;

use remanent::LogIo;
use remanent::disk::{Disk, dir::DirDisk};

/// How a direct log is written here.
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
