//! Ways to make a group of the log durable: one write to a file that was written before, past the page cache,
//! which returns when the medium has it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::OFlags;

use super::ring::{Ring, Told, What};
use super::sample::Sample;
use super::{Group, Way, piece};

/// Bytes of the file: those of a segment.
const FILE_LEN: u64 = 16 << 20;
const LENS: [usize; 3] = [4 << 10, 64 << 10, 256 << 10];

/// A group for each length.
pub fn groups(directory: &Path) -> Vec<Group> {
    let path = directory.join("segment");
    LENS.map(|len| Group { name: format!("a group's write, {} KiB", len >> 10), ways: ways(&path, len) })
        .into()
}

fn ways(path: &Path, len: usize) -> Vec<Way> {
    let by_ring = |name: &str, told: Told| {
        let path = path.to_path_buf();
        Way::with_ring(name, move |time| ring(&path, len, told, time))
    };
    let path: PathBuf = path.to_path_buf();
    vec![
        Way::without_ring("pwrite", move |time| calls(&path, len, time)),
        by_ring("ring", Told::default()),
        by_ring("ring, file registered", Told { files: true, ..Told::default() }),
        by_ring("ring, file and memory registered", Told { files: true, memory: true, ..Told::default() }),
    ]
}

/// The file of a segment, with every byte written.
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

fn ring(path: &Path, len: usize, told: Told, time: Duration) -> io::Result<Sample> {
    let files = [segment(path)?];
    let mut ring = Ring::new(&files, 1, len, told)?;
    one_by_one(len, time, |offset| {
        ring.begin(What::Write, 0, 0, offset);
        ring.finish_one().map(drop)
    })
}

/// Writes at one offset after the other, in a circle.
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
