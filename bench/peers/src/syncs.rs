//! Counts the syncs in a trace of `strace`.

use std::collections::{BTreeMap, BTreeSet};

/// The system calls to trace: syncs, writes to files that sync each write, and calls that open and close such
/// files.
pub const CALLS: &str = "trace=openat,close,fsync,fdatasync,msync,sync,syncfs,write,pwrite64,writev,pwritev,pwritev2,io_uring_setup";

/// Returns the number of syncs in a trace of `strace -f`: sync calls, and writes to files opened with
/// `O_DSYNC` or `O_SYNC`.
///
/// # Panics
/// Panics if the process uses `io_uring`, because a trace does not show its writes.
pub fn count(trace: &str) -> u64 {
    let mut count = 0;
    let mut synced_files = BTreeSet::new();
    // Whether the file that each thread is opening syncs each write.
    let mut opening = BTreeMap::new();
    for line in trace.lines() {
        let Some((thread, call)) = line.split_once(' ') else { continue };
        let call = call.trim_start();
        let name = call.split(['(', ' ']).next().unwrap_or_default();
        match name {
            "fsync" | "fdatasync" | "sync" | "syncfs" => count += 1,
            "msync" => count += u64::from(call.contains("MS_SYNC")),
            "openat" => {
                opening.insert(thread, call.contains("O_DSYNC") || call.contains("O_SYNC"));
            }
            "close" => drop(descriptor(call).map(|file| synced_files.remove(&file))),
            "write" | "pwrite64" | "writev" | "pwritev" | "pwritev2" => {
                let is_synced = descriptor(call).is_some_and(|file| synced_files.contains(&file));
                count += u64::from(is_synced || call.contains("RWF_DSYNC") || call.contains("RWF_SYNC"));
            }
            "io_uring_setup" => panic!("an io_uring: its writes are not seen"),
            _ => {}
        }
        let is_opened = name == "openat" || call.starts_with("<... openat resumed>");
        let opened = call.rsplit_once("= ").and_then(|(_, result)| result.trim().parse::<u32>().ok());
        if let (true, Some(file)) = (is_opened, opened) {
            if opening.remove(thread) == Some(true) {
                synced_files.insert(file);
            } else {
                synced_files.remove(&file);
            }
        }
    }
    count
}

/// Returns the file descriptor that is the first argument of a call.
fn descriptor(call: &str) -> Option<u32> {
    let behind = call.split_once('(')?.1;
    behind[..behind.find(|c: char| !c.is_ascii_digit())?].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn syncs_are_calls_and_writes_to_files_that_sync() {
        let trace = r#"7 openat(AT_FDCWD, "a", O_RDWR|O_DIRECT|O_DSYNC) = 3
7 openat(AT_FDCWD, "b", O_RDWR) = 4
7 pwrite64(3, "x"..., 4096, 0) = 4096
7 pwrite64(4, "x"..., 4096, 0) = 4096
8 openat(AT_FDCWD, "c", O_RDWR|O_DSYNC <unfinished ...>
7 fdatasync(4 <unfinished ...>
8 <... openat resumed>) = 5
7 <... fdatasync resumed>) = 0
8 write(5, "x"..., 4096) = 4096
7 close(3) = 0
7 openat(AT_FDCWD, "d", O_RDWR) = 3
7 pwrite64(3, "x"..., 4096, 0) = 4096
7 msync(0x7f, 4096, MS_SYNC) = 0
7 msync(0x7f, 4096, MS_ASYNC) = 0
7 +++ exited with 0 +++
"#;
        assert_eq!(count(trace), 4);
    }
}
