//! The speed of a disk when several threads only write or read in pieces, past the page cache if possible.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use remanent_tools::shared::SplitMix64;
use remanent_tools::shared::aligned_buf::{ALIGN, Aligned};
use rustix::fs::{Advice, FallocateFlags, OFlags, fadvise, fallocate};
use rustix::io::Errno;

/// Number of threads that write or read.
pub const THREADS: usize = 4;
/// Length of a piece in bytes.
const PIECE_LEN: usize = 4 << 20;

/// Whether reads bypass the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cache {
    Past,
    Through,
}

/// Opens a file with direct I/O, or through the page cache if the file system does not support it.
fn open_past(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    match options.custom_flags(OFlags::DIRECT.bits() as i32).open(path) {
        Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {
            options.custom_flags(0).open(path)
        }
        opened => opened,
    }
}

/// Returns whether the directory's file system supports direct I/O.
pub fn knows_direct(dir: &Path) -> io::Result<bool> {
    let file = tempfile::NamedTempFile::new_in(dir)?;
    let past = OpenOptions::new().write(true).custom_flags(OFlags::DIRECT.bits() as i32).open(file.path());
    Ok(past.is_ok())
}

/// Returns incompressible bytes.
pub fn random(len: usize) -> Aligned {
    let mut bytes = Aligned::new(len);
    SplitMix64::new(len as u64).fill(&mut bytes);
    bytes
}

/// Writes `bytes` random bytes to new files, one per thread, and syncs them. Returns the files and the time.
pub fn write(dir: &Path, bytes: u64) -> io::Result<(Vec<(PathBuf, u64)>, Duration)> {
    std::fs::create_dir_all(dir)?;
    let len = (bytes / THREADS as u64).next_multiple_of(ALIGN as u64);
    let files: Vec<_> = (0..THREADS).map(|thread| (dir.join(format!("{thread}")), len)).collect();
    let pieces: Vec<_> = files.iter().map(|_| random(PIECE_LEN)).collect();
    let started = Instant::now();
    std::thread::scope(|scope| {
        let writers: Vec<_> = files
            .iter()
            .zip(&pieces)
            .map(|((path, len), piece)| scope.spawn(move || write_file(path, *len, piece)))
            .collect();
        writers.into_iter().try_for_each(|writer| writer.join().expect("no panic"))
    })?;
    Ok((files, started.elapsed()))
}

fn write_file(path: &Path, len: u64, piece: &[u8]) -> io::Result<()> {
    let file = open_past(OpenOptions::new().write(true).create(true).truncate(true), path)?;
    match fallocate(&file, FallocateFlags::empty(), 0, len) {
        // Space is allocated in advance if possible.
        Ok(()) | Err(Errno::OPNOTSUPP) => {}
        Err(error) => return Err(error.into()),
    }
    for at in (0..len).step_by(piece.len()) {
        let here = piece.len().min((len - at) as usize);
        file.write_all_at(&piece[..here], at)?;
    }
    file.sync_all()
}

/// Reads files completely; each thread reads every fourth piece. Returns the time.
pub fn read(files: &[(PathBuf, u64)], cache: Cache) -> io::Result<Duration> {
    let open = |path: &PathBuf| match cache {
        Cache::Past => open_past(OpenOptions::new().read(true), path),
        Cache::Through => File::open(path),
    };
    let opened: Vec<_> =
        files.iter().map(|(path, len)| Ok((open(path)?, *len))).collect::<io::Result<_>>()?;
    let pieces: Vec<_> = (0..THREADS).map(|_| Aligned::new(PIECE_LEN)).collect();
    let started = Instant::now();
    std::thread::scope(|scope| {
        let readers: Vec<_> = pieces
            .into_iter()
            .enumerate()
            .map(|(thread, piece)| {
                let opened = &opened;
                scope.spawn(move || read_pieces(opened, thread, piece))
            })
            .collect();
        readers.into_iter().try_for_each(|reader| reader.join().expect("no panic"))
    })?;
    Ok(started.elapsed())
}

fn read_pieces(files: &[(File, u64)], thread: usize, mut piece: Aligned) -> io::Result<()> {
    // Files differ in length, so the pieces of all files are distributed as one sequence.
    let mut assigned = 0;
    for (file, len) in files {
        for at in (0..*len).step_by(PIECE_LEN) {
            if assigned % THREADS == thread {
                file.read_at(&mut piece, at)?;
            }
            assigned += 1;
        }
    }
    Ok(())
}

/// Syncs files, and asks the kernel to drop them from its page cache.
pub fn forget(files: &[(PathBuf, u64)]) -> io::Result<()> {
    for (path, _) in files {
        let file = File::open(path)?;
        file.sync_all()?;
        fadvise(&file, 0, None, Advice::DontNeed)?;
    }
    Ok(())
}

/// Removes these files.
pub fn remove(files: &[(PathBuf, u64)]) -> io::Result<()> {
    files.iter().try_for_each(|(path, _)| std::fs::remove_file(path))
}
