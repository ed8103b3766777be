//! Methods of reading and writing several image files in pieces of 1 MiB.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, OFlags, fallocate};

use super::ring::{Registered, Ring, What};
use super::sample::Sample;
use super::{Group, Way, piece};

const LEN: usize = 1 << 20;
const FILES: usize = 4;
/// Number of pieces in each file that is read.
const PIECES_READ: u64 = 128;
const PIECES_WRITTEN: u64 = 32;

/// Whether transfers bypass the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cache {
    Past,
    Through,
}

impl Cache {
    fn open(self, options: &mut OpenOptions, path: &Path) -> io::Result<File> {
        let flags = if self == Self::Past { OFlags::DIRECT } else { OFlags::empty() };
        options.custom_flags(flags.bits() as i32).open(path)
    }
}

/// Returns the groups of methods. Reads that bypass the page cache are measured first, before other reads
/// fill the cache.
pub fn groups(directory: &Path) -> Vec<Group> {
    let mut groups = Vec::new();
    for (cache, name) in [(Cache::Past, "past the page cache"), (Cache::Through, "from the page cache")] {
        groups.push(Group { name: format!("images read {name}"), ways: readers(directory, cache) });
    }
    for (cache, name) in [(Cache::Past, "past the page cache"), (Cache::Through, "through the page cache")] {
        groups.push(Group {
            name: format!("images written {name}, and synced"),
            ways: writers(directory, cache),
        });
    }
    groups
}

fn readers(directory: &Path, cache: Cache) -> Vec<Way> {
    let by_threads = [1, 4, 12].map(|threads| {
        let directory = directory.to_path_buf();
        let name = format!("pread, {threads} thread{}", if threads == 1 { "" } else { "s" });
        Way::without_ring(&name, move |time| read_by_threads(&to_read(&directory, cache)?, threads, time))
    });
    let plain = Registered::default();
    let registered = Registered { files: true, memory: true, ..plain };
    let workers = Registered { workers: true, ..plain };
    let by_ring = [
        (4, plain, ""),
        (16, plain, ""),
        (32, plain, ""),
        (64, plain, ""),
        (32, registered, ", files and memory registered"),
        (16, workers, ", by the kernel's workers"),
    ];
    let by_ring = by_ring.map(|(depth, registered, how)| {
        let directory = directory.to_path_buf();
        Way::with_ring(&format!("ring of {depth}{how}"), move |time| {
            read_by_ring(&to_read(&directory, cache)?, depth, registered, time)
        })
    });
    by_threads.into_iter().chain(by_ring).collect()
}

fn writers(directory: &Path, cache: Cache) -> Vec<Way> {
    let written = |by: fn(&[File], &mut Sample) -> io::Result<()>| {
        let directory = directory.to_path_buf();
        move |time| write_until(&directory, cache, time, by)
    };
    vec![
        Way::without_ring("pwrite, 4 threads", written(write_by_threads)),
        Way::with_ring("ring of 4", written(write_by_ring::<4>)),
        Way::with_ring("ring of 16", written(write_by_ring::<16>)),
    ]
}

/// Creates the files to read. They are in the page cache only if the reads use it.
fn to_read(directory: &Path, cache: Cache) -> io::Result<Vec<File>> {
    let path = |number: usize| directory.join(format!("read{number}"));
    for number in 0..FILES {
        if !path(number).exists() {
            let mut options = OpenOptions::new();
            let file = Cache::Past.open(options.write(true).create_new(true), &path(number))?;
            for at in 0..PIECES_READ {
                file.write_all_at(&piece(at, LEN), at * LEN as u64)?;
            }
            file.sync_all()?;
        }
    }
    let files: Vec<File> = (0..FILES)
        .map(|number| cache.open(OpenOptions::new().read(true), &path(number)))
        .collect::<io::Result<_>>()?;
    if cache == Cache::Through {
        let mut memory = piece(0, LEN);
        for file in &files {
            (0..PIECES_READ).try_for_each(|at| file.read_exact_at(&mut memory, at * LEN as u64))?;
        }
    }
    Ok(files)
}

/// Returns the file and the offset of piece `number`.
fn place(number: u64) -> (usize, u64) {
    let number = number % (FILES as u64 * PIECES_READ);
    ((number / PIECES_READ) as usize, number % PIECES_READ * LEN as u64)
}

fn read_by_threads(files: &[File], threads: usize, time: Duration) -> io::Result<Sample> {
    let next = AtomicU64::new(0);
    let mut pieces: Vec<_> = (0..threads as u64).map(|number| piece(number, LEN)).collect();
    let mut sample = Sample::default();
    sample.during(|sample| {
        let started = Instant::now();
        let read = |memory: &mut [u8]| -> io::Result<()> {
            while started.elapsed() < time {
                let (file, offset) = place(next.fetch_add(1, Ordering::Relaxed));
                files[file].read_exact_at(memory, offset)?;
            }
            Ok(())
        };
        thread::scope(|scope| {
            let readers: Vec<_> = pieces.iter_mut().map(|memory| scope.spawn(|| read(memory))).collect();
            readers.into_iter().try_for_each(|reader| reader.join().expect("no panic"))
        })?;
        sample.add(next.load(Ordering::Relaxed), LEN);
        Ok(())
    })?;
    Ok(sample)
}

fn read_by_ring(files: &[File], depth: usize, registered: Registered, time: Duration) -> io::Result<Sample> {
    let mut ring = Ring::new(files, depth, LEN, registered)?;
    let mut sample = Sample::default();
    sample.during(|sample| {
        let started = Instant::now();
        let may_begin = |_| started.elapsed() < time;
        sample.add(keep_full(&mut ring, What::Read, may_begin, place)?, LEN);
        Ok(())
    })?;
    Ok(sample)
}

/// Submits transfers until the time is over, and keeps as many in flight as the ring is deep. Waits for all
/// of them and returns their number.
fn keep_full(
    ring: &mut Ring<'_>,
    what: What,
    may_begin: impl Fn(u64) -> bool,
    place: impl Fn(u64) -> (usize, u64),
) -> io::Result<u64> {
    let (mut begun, mut under_way) = (0, 0);
    let mut free: Vec<usize> = (0..ring.depth()).collect();
    loop {
        while !free.is_empty() && may_begin(begun) {
            let (file, offset) = place(begun);
            ring.begin(what, free.pop().expect("one is free"), file, offset);
            begun += 1;
            under_way += 1;
        }
        if under_way == 0 {
            return Ok(begun);
        }
        free.push(ring.finish_one()?);
        under_way -= 1;
    }
}

/// Writes new files repeatedly until the time is over, at least once. Creating and removing the files is not
/// included in the time.
fn write_until(
    directory: &Path,
    cache: Cache,
    time: Duration,
    by: fn(&[File], &mut Sample) -> io::Result<()>,
) -> io::Result<Sample> {
    let mut sample = Sample::default();
    let paths: Vec<PathBuf> = (0..FILES).map(|number| directory.join(format!("written{number}"))).collect();
    while sample.took < time {
        let files: Vec<File> = paths.iter().map(|path| to_write(path, cache)).collect::<io::Result<_>>()?;
        by(&files, &mut sample)?;
        drop(files);
        paths.iter().try_for_each(std::fs::remove_file)?;
    }
    Ok(sample)
}

/// Creates a file with preallocated space.
fn to_write(path: &Path, cache: Cache) -> io::Result<File> {
    let file = cache.open(OpenOptions::new().write(true).create(true).truncate(true), path)?;
    fallocate(&file, FallocateFlags::empty(), 0, PIECES_WRITTEN * LEN as u64)?;
    Ok(file)
}

/// Writes each file on a separate thread.
fn write_by_threads(files: &[File], sample: &mut Sample) -> io::Result<()> {
    let pieces: Vec<_> = (0..FILES as u64).map(|number| piece(number, LEN)).collect();
    sample.during(|sample| {
        let write = |file: &File, piece: &[u8]| {
            (0..PIECES_WRITTEN).try_for_each(|at| file.write_all_at(piece, at * LEN as u64))?;
            file.sync_all()
        };
        thread::scope(|scope| {
            let writers: Vec<_> =
                files.iter().zip(&pieces).map(|(file, piece)| scope.spawn(|| write(file, piece))).collect();
            writers.into_iter().try_for_each(|writer| writer.join().expect("no panic"))
        })?;
        sample.add(FILES as u64 * PIECES_WRITTEN, LEN);
        Ok(())
    })
}

/// Writes all files on one thread, one piece of each in turn, then syncs all files at once.
fn write_by_ring<const DEPTH: usize>(files: &[File], sample: &mut Sample) -> io::Result<()> {
    let mut ring = Ring::new(files, DEPTH, LEN, Registered::default())?;
    sample.during(|sample| {
        let count = FILES as u64;
        let turn = |number: u64| ((number % count) as usize, number / count * LEN as u64);
        let written = keep_full(&mut ring, What::Write, |begun| begun < count * PIECES_WRITTEN, turn)?;
        keep_full(&mut ring, What::Sync, |begun| begun < count, |number| (number as usize, 0))?;
        sample.add(written, LEN);
        Ok(())
    })
}
