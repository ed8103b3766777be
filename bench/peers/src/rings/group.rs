//! Methods of making a group of the log durable. Each writes to a preallocated and already written file with
//! direct I/O, and returns once the medium has stored the bytes.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::OFlags;

use super::ring::{Registered, Ring, What};
use super::sample::Sample;
use super::{Group, Way, piece};

/// Length of the file in bytes, which is that of a segment.
const FILE_LEN: u64 = 16 << 20;
const LENS: [usize; 3] = [4 << 10, 64 << 10, 256 << 10];

/// Returns a group of methods for each length of a log group.
pub fn groups(directory: &Path) -> Vec<Group> {
    let path = directory.join("segment");
    LENS.map(|len| Group { name: format!("a group's write, {} KiB", len >> 10), ways: ways(&path, len) })
        .into()
}

fn ways(path: &Path, len: usize) -> Vec<Way> {
    let by_ring = |name: &str, registered: Registered| {
        let path = path.to_path_buf();
        Way::with_ring(name, move |time| ring(&path, len, registered, time))
    };
    let path: PathBuf = path.to_path_buf();
    vec![
        Way::without_ring("pwrite", move |time| calls(&path, len, time)),
        by_ring("ring", Registered::default()),
        by_ring("ring, file registered", Registered { files: true, ..Registered::default() }),
        by_ring(
            "ring, file and memory registered",
            Registered { files: true, memory: true, ..Registered::default() },
        ),
    ]
}

/// Creates the file of a segment and writes every byte.
fn segment(path: &Path) -> io::Result<File> {
    if !path.exists() {
        let file = File::create_new(path)?;
        for at in (0..FILE_LEN).step_by(1 << 20) {
            file.write_all_at(&piece(at, 1 << 20), at)?;
        }
        file.sync_all()?;
    }
    let flags = OFlags::DIRECT | OFlags::DSYNC;
    OpenOptions::new().write(true).custom_flags(flags.bits() as i32).open(path)
}

fn calls(path: &Path, len: usize, time: Duration) -> io::Result<Sample> {
    let (file, group) = (segment(path)?, piece(0, len));
    one_by_one(len, time, |offset| file.write_all_at(&group, offset))
}

fn ring(path: &Path, len: usize, registered: Registered, time: Duration) -> io::Result<Sample> {
    let files = [segment(path)?];
    let mut ring = Ring::new(&files, 1, len, registered)?;
    one_by_one(len, time, |offset| {
        ring.begin(What::Write, 0, 0, offset);
        ring.finish_one().map(drop)
    })
}

/// Writes at consecutive offsets, and starts again at the end of the file.
fn one_by_one(
    len: usize,
    time: Duration,
    mut write: impl FnMut(u64) -> io::Result<()>,
) -> io::Result<Sample> {
    let mut sample = Sample::default();
    sample.during(|sample| {
        let started = Instant::now();
        let mut before = Duration::ZERO;
        for offset in (0..FILE_LEN).step_by(len).cycle() {
            write(offset)?;
            let now = started.elapsed();
            sample.times.push(now - before);
            sample.add(1, len);
            before = now;
            if now >= time {
                break;
            }
        }
        Ok(())
    })?;
    Ok(sample)
}
