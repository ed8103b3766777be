//! The ceiling of every store: the minimum work that makes records durable.
//!
//! # The raw group-commit loop
//!
//! The loop writes to one file, which is completely written and synced in advance like a log segment, and is
//! used as a ring. A thread puts its record into a queue. The first thread that finds no leader becomes the
//! leader: it takes the whole queue, writes it in one piece at the next multiple of 4096 bytes, padded to
//! such a multiple, and syncs once. Then it wakes all others, and the next thread leads. There is no
//! checksum, no header, and no order beyond the queue's. There are two ways to write: `pwrite` and
//! `fdatasync`, or one `pwrite` to a file opened with `O_DIRECT` and `O_DSYNC`. `bench/README.md` compares
//! the loop with fio.
//!
//! A store whose log uses recycled segments writes no more than this. A store without recycled segments
//! writes each byte twice, the first time as a zero.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use rustix::fs::OFlags;

use crate::aligned_buf::{ALIGN, Aligned};

/// The maximum length of the file, in bytes.
pub const FILE_LEN_MAX: u64 = 128 << 20;
/// The minimum length of the file, in bytes.
const FILE_LEN_MIN: u64 = 16 << 20;
/// The number of groups of maximum length that fit into the file, within these limits.
const GROUPS: u64 = 64;

/// How a group is written to the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteMethod {
    /// Into the page cache, then `fdatasync`.
    Synced,
    /// Past the page cache; durable when the write returns.
    Direct,
}

/// The group-commit loop.
pub struct RawLog {
    file: File,
    file_len: u64,
    pub way: WriteMethod,
    state: Mutex<RawLogState>,
    progress: Condvar,
}

struct RawLogState {
    queue: Aligned,
    /// Bytes in the queue.
    filled: usize,
    /// The buffer from which the last leader wrote. The next leader exchanges it with the queue.
    spare: Option<Aligned>,
    /// The number of records queued so far. `durable` is the number of durable records.
    queued: u64,
    durable: u64,
    offset: u64,
    is_led: bool,
    failed: bool,
}

impl RawLog {
    /// Creates a loop over a new file. At most `group_len_max` bytes may be queued at once, up to
    /// [`FILE_LEN_MAX`].
    pub fn new(path: &Path, way: WriteMethod, group_len_max: usize) -> io::Result<Self> {
        let mut file = OpenOptions::new().write(true).create_new(true).open(path)?;
        let file_len = (GROUPS * group_len_max as u64).clamp(FILE_LEN_MIN, FILE_LEN_MAX);
        for at in (0..file_len).step_by(1 << 20) {
            file.write_all_at(&[0; 1 << 20], at)?;
        }
        file.sync_all()?;
        if way == WriteMethod::Direct {
            let flags = OFlags::DIRECT | OFlags::DSYNC;
            file = OpenOptions::new().write(true).custom_flags(flags.bits() as i32).open(path)?;
        }
        let queue = || Aligned::new(group_len_max.next_multiple_of(ALIGN));
        let state = RawLogState {
            queue: queue(),
            filled: 0,
            spare: Some(queue()),
            queued: 0,
            durable: 0,
            offset: 0,
            is_led: false,
            failed: false,
        };
        Ok(Self { file, file_len, way, state: Mutex::new(state), progress: Condvar::new() })
    }

    /// Appends a record and returns when it is durable.
    pub fn commit(&self, record: &[u8]) -> io::Result<()> {
        let mut state = self.lock();
        let (at, end) = (state.filled, state.filled + record.len());
        state.queue[at..end].copy_from_slice(record);
        state.filled = end;
        state.queued += 1;
        let own = state.queued;
        while state.durable < own {
            if state.failed {
                return Err(io::Error::other("another thread's write failed"));
            }
            state = if state.is_led {
                self.progress.wait(state).unwrap_or_else(PoisonError::into_inner)
            } else {
                self.lead(state)?
            };
        }
        Ok(())
    }

    /// Makes all queued records durable.
    fn lead<'a>(&'a self, mut state: MutexGuard<'a, RawLogState>) -> io::Result<MutexGuard<'a, RawLogState>> {
        state.is_led = true;
        let spare = state.spare.take().expect("only the leader takes it");
        let group = std::mem::replace(&mut state.queue, spare);
        let len = std::mem::take(&mut state.filled).next_multiple_of(ALIGN);
        let last = state.queued;
        if state.offset + len as u64 > self.file_len {
            state.offset = 0;
        }
        let offset = state.offset;
        state.offset += len as u64;
        drop(state);
        let written = self.file.write_all_at(&group[..len], offset).and_then(|()| match self.way {
            WriteMethod::Synced => self.file.sync_data(),
            WriteMethod::Direct => Ok(()),
        });
        let mut state = self.lock();
        state.spare = Some(group);
        state.is_led = false;
        match &written {
            Ok(()) => state.durable = last,
            Err(_) => state.failed = true,
        }
        self.progress.notify_all();
        written.map(|()| state)
    }

    fn lock(&self) -> MutexGuard<'_, RawLogState> {
        // A panic in another thread ends the benchmark anyway.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_of_all_threads_are_in_file_when_commit_returns() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("raw");
        let raw = RawLog::new(&path, WriteMethod::Synced, 4 * ALIGN).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4_u8 {
                let (raw, path) = (&raw, &path);
                scope.spawn(move || {
                    for count in 1..=3_u8 {
                        let record = [16 * thread + count; ALIGN];
                        raw.commit(&record).unwrap();
                        let written = std::fs::read(path).unwrap();
                        assert!(written.chunks_exact(ALIGN).any(|found| found == record));
                    }
                });
            }
        });
        let state = raw.lock();
        assert_eq!((state.durable, state.offset), (12, 12 * ALIGN as u64));
    }

    #[test]
    fn file_is_used_as_ring() {
        let dir = tempfile::tempdir().unwrap();
        let raw = RawLog::new(&dir.path().join("raw"), WriteMethod::Synced, 1 << 20).unwrap();
        raw.lock().offset = raw.file_len - ALIGN as u64;
        raw.commit(&[7; ALIGN]).unwrap();
        assert_eq!(raw.lock().offset, raw.file_len);
        raw.commit(&[8; ALIGN]).unwrap();
        assert_eq!(raw.lock().offset, ALIGN as u64);
    }
}
