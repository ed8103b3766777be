//! A window that uses direct writes. A put copies bytes into the process's own memory. A sync is one write that
//! bypasses the page cache. The write returns when the bytes are on the medium.
//!
//! If every commit waits for a sync, this window needs one system call where the other kinds need two, and the kernel
//! neither copies the bytes nor searches for pages to write back. The disadvantage is that unsynced bytes are lost with
//! the process. A log written through this window therefore reports `Logged` only when it can report `Durable`.
//!
//! `io_uring` gained at most a tenth, for long groups on one of two machines.
//!
//! Direct writes cover whole blocks. A group of frames begins on a block boundary. After the group is written, no
//! further bytes are put into its last block, whose unused bytes are zero.
//!
//! The window's memory contains one group, and is reused by the group after the next. An earlier design mirrored the
//! whole file and used fresh memory for every frame. With 64 KiB per commit, page faults took 30 % of its CPU time,
//! mostly under the log's lock.

use std::fs::File;
use std::io;
use std::mem;

use remanent_format::FileName;
use remanent_format::limits::GROUP_ALIGN;
use rustix::fs::OFlags;

use super::direct_read::reopen;
use super::{Window, ZEROS_LEN_MAX, zeros_by_pieces};
use crate::base::aligned_buf::AlignedBuf;
use crate::base::sync::Mutex;
use crate::error::{Error, IoAction, Result};

/// The flags with which a window's file is opened. With these flags, bytes are on the medium when a write returns.
pub(super) const FLAGS: OFlags =
    OFlags::RDWR.union(OFlags::DIRECT).union(OFlags::DSYNC).union(OFlags::CLOEXEC);

/// The flags with which a file is opened for direct writes of zeros and images, which a separate sync makes durable.
const FILL_FLAGS: OFlags = OFlags::WRONLY.union(OFlags::DIRECT).union(OFlags::CLOEXEC);

/// The minimum length in bytes of a window's memory after the first put.
const MEMORY_LEN_MIN: usize = 128 << 10;
/// The maximum length in bytes of the memory that a window keeps for its next group.
const MEMORY_LEN_KEPT: usize = 4 << 20;

/// A window that writes to a whole file with direct I/O.
pub(super) struct DirectWindow {
    file: File,
    len: u64,
    /// The bytes that the next sync writes. The lock is held during a put, so that puts run one at a time.
    unsynced: Mutex<Unsynced>,
    /// A second buffer. Each sync exchanges it with the buffer in `unsynced`, and holds the lock, because the device
    /// may still read the buffer. `None` after a failed write, whose bytes are lost.
    idle: Mutex<Option<AlignedBuf>>,
    name: FileName,
}

/// The bytes that [`put`](Window::put) stored since the last sync, and their position in the file.
struct Unsynced {
    /// The lowest file offset for the next put. Bytes below this offset are never written again (I5).
    closed: u64,
    /// The file offset of the first byte in `memory`, a multiple of 4096.
    start: u64,
    len: usize,
    memory: AlignedBuf,
}

impl DirectWindow {
    /// Creates a window onto the whole `file`. The file must have been opened with [`FLAGS`], and must be `len` bytes
    /// long.
    pub(super) fn new(file: File, name: FileName, len: u64) -> io::Result<Self> {
        if len == 0 || !len.is_multiple_of(GROUP_ALIGN) {
            let reason = format!("{len} bytes are not whole blocks of {GROUP_ALIGN}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
        }
        let unsynced = Mutex::new(Unsynced { closed: 0, start: 0, len: 0, memory: AlignedBuf::new(0) });
        Ok(Self { file, len, unsynced, idle: Mutex::new(Some(AlignedBuf::new(0))), name })
    }

    fn end(&self, offset: u64, len: u64) -> u64 {
        let end = offset.checked_add(len).filter(|end| *end <= self.len);
        end.expect("a range lies within its window")
    }

    fn failed(&self, action: IoAction, offset: u64) -> impl FnOnce(io::Error) -> Error {
        let name = self.name;
        move |source| Error::io(action, name, Some(offset), source)
    }
}

impl Window for DirectWindow {
    fn put(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.end(offset, bytes.len() as u64);
        let mut unsynced = self.unsynced.lock();
        assert!(offset >= unsynced.closed, "nothing synced is rewritten"); // I5
        unsynced.put(offset, bytes).map_err(self.failed(IoAction::Allocate, offset))
    }

    /// Writes all unsynced bytes below the end of the range. `offset` must be a multiple of 4096, and no byte after the
    /// range may have been synced.
    fn sync(&self, offset: u64, len: u64) -> Result<()> {
        assert!(offset.is_multiple_of(GROUP_ALIGN), "a group begins on a block"); // I5
        let end = self.end(offset, len).next_multiple_of(GROUP_ALIGN);
        let mut kept = self.idle.lock();
        let failed_before =
            || self.failed(IoAction::Write, offset)(io::Error::other("an earlier write failed"));
        let mut memory = kept.take().ok_or_else(failed_before)?;
        let taken = self.unsynced.lock().take(end, &mut memory);
        let (start, len) = taken.map_err(self.failed(IoAction::Allocate, end))?;
        assert!(start.is_multiple_of(GROUP_ALIGN)); // I5: every write covers whole blocks.
        write_all(&memory[..len], start, |rest, at| rustix::io::pwrite(&self.file, rest, at))
            .map_err(self.failed(IoAction::Write, start))?;
        *kept = Some(if memory.len() <= MEMORY_LEN_KEPT { memory } else { AlignedBuf::new(0) });
        Ok(())
    }
}

impl Unsynced {
    /// Copies `bytes` to the memory at file offset `offset`. Gaps before and after the bytes are zeroed.
    fn put(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let block = offset - offset % GROUP_ALIGN;
        if self.len == 0 {
            self.start = block;
        } else if block < self.start {
            let more = (self.start - block) as usize;
            self.make_room(self.len + more)?;
            self.memory.copy_within(..self.len, more);
            self.memory[..more].fill(0);
            self.len += more;
            self.start = block;
        }
        let from = (offset - self.start) as usize;
        let to = from + bytes.len();
        self.make_room(to)?;
        if from > self.len {
            self.memory[self.len..from].fill(0);
        }
        self.memory[from..to].copy_from_slice(bytes);
        self.len = self.len.max(to);
        Ok(())
    }

    /// Closes the bytes below `end`, a multiple of 4096, and exchanges the memory with `memory`. Returns the file
    /// offset of the closed bytes, and their length rounded up to whole blocks.
    fn take(&mut self, end: u64, memory: &mut AlignedBuf) -> io::Result<(u64, usize)> {
        self.closed = self.closed.max(end);
        let (start, len) = (self.start, self.len.min(end.saturating_sub(self.start) as usize));
        let rest = len..self.len;
        mem::swap(&mut self.memory, memory);
        self.len = 0;
        if !rest.is_empty() {
            // The bytes of the next group are copied to the new memory.
            self.put(end.max(start), &memory[rest])?;
        }
        let len_in_blocks = len.next_multiple_of(GROUP_ALIGN as usize);
        memory[len..len_in_blocks].fill(0);
        Ok((start, len_in_blocks))
    }

    /// Extends the memory to at least `len` bytes.
    fn make_room(&mut self, len: usize) -> io::Result<()> {
        if self.memory.len() < len {
            let longer = len.saturating_mul(2).max(MEMORY_LEN_MIN).next_multiple_of(GROUP_ALIGN as usize);
            let mut longer = AlignedBuf::try_new(longer).ok_or(io::ErrorKind::OutOfMemory)?;
            longer[..self.len].copy_from_slice(&self.memory[..self.len]);
            self.memory = longer;
        }
        Ok(())
    }
}

/// Writes zeros to whole blocks of a file with direct I/O. Writing zeros through the page cache takes six times the CPU
/// time. Each later direct write then costs an eighth more, because the kernel has to find and drop the cached pages.
///
/// Allocating the space without writing zeros is no alternative, because each sync would then also wait for the file
/// system's journal. With groups of 256 KiB, ext4 wrote 333 MB/s instead of 578 MB/s.
pub(super) fn write_zeros(file: &File, offset: u64, end: u64) -> io::Result<()> {
    if offset == end {
        return Ok(());
    }
    let file = open_writer(file)?;
    zeros_by_pieces(offset, end, ZEROS_LEN_MAX, |at, zeros| write_blocks(&file, at, zeros))
}

/// Reopens the file for writes that bypass the page cache.
pub(super) fn open_writer(file: &File) -> io::Result<File> {
    Ok(reopen(file, FILL_FLAGS)?)
}

/// Writes whole blocks from aligned memory to a file that was opened for direct writes.
pub(super) fn write_blocks(file: &File, offset: u64, blocks: &[u8]) -> io::Result<()> {
    write_all(blocks, offset, |rest, at| rustix::io::pwrite(file, rest, at))
}

/// Writes whole blocks with `write`. Repeats a write that was interrupted or wrote fewer bytes. A write that ends
/// inside a block is an error.
fn write_all(
    blocks: &[u8],
    offset: u64,
    write: impl Fn(&[u8], u64) -> rustix::io::Result<usize>,
) -> io::Result<()> {
    let mut done = 0;
    while done < blocks.len() {
        match write(&blocks[done..], offset + done as u64) {
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
            Ok(written) if written == 0 || !(written as u64).is_multiple_of(GROUP_ALIGN) => {
                return Err(io::ErrorKind::WriteZero.into());
            }
            Ok(written) => done += written,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    const LEN: usize = 4 * 4096;

    /// Creates a file and a window onto it. Returns `None`, with a message, if files cannot be written directly.
    fn with_window() -> Option<(tempfile::NamedTempFile, DirectWindow)> {
        let named = tempfile::NamedTempFile::new().unwrap();
        named.as_file().write_all_at(&[7; LEN], 0).unwrap();
        named.as_file().sync_all().unwrap();
        match rustix::fs::open(named.path(), FLAGS, rustix::fs::Mode::empty()) {
            Ok(file) => {
                let window = DirectWindow::new(file.into(), FileName::Segment(0), LEN as u64).unwrap();
                Some((named, window))
            }
            Err(error) => {
                eprintln!("SKIPPED: no direct writes in {}: {error}", named.path().display());
                None
            }
        }
    }

    fn found(named: &tempfile::NamedTempFile) -> Vec<u8> {
        std::fs::read(named.path()).unwrap()
    }

    #[test]
    fn put_bytes_reach_file_only_at_sync() {
        let Some((named, window)) = with_window() else { return };
        let mut expected = vec![7; LEN];
        window.put(4096, b"payload").unwrap();
        window.put(4103, b"behind it").unwrap();
        assert!(found(&named) == expected);
        window.sync(4096, 16).unwrap();
        expected[4096..8192].fill(0);
        expected[4096..4112].copy_from_slice(b"payloadbehind it");
        assert!(found(&named) == expected);

        window.put(8192, &[3; 5000]).unwrap();
        window.sync(8192, 5000).unwrap();
        expected[8192..].fill(0);
        expected[8192..][..5000].fill(3);
        assert!(found(&named) == expected);
    }

    /// A frame without a payload results in a put of no bytes directly after its header, possibly at the end of the
    /// window.
    #[test]
    fn empty_put_is_valid_in_synced_range_and_at_window_end() {
        let Some((named, window)) = with_window() else { return };
        for offset in [0, 4096, 12288] {
            window.put(offset + 80, &[]).unwrap();
            window.put(offset, &[9; 80]).unwrap();
            window.sync(offset, 80).unwrap();
            let block = &found(&named)[offset as usize..][..4096];
            assert!(block[..80] == [9; 80] && block[80..] == [0; 4016], "the block at {offset}");
        }
        window.put(LEN as u64, &[]).unwrap();
        window.sync(LEN as u64, 0).unwrap();
        assert!(found(&named)[4096 + 80..12288] == [[0; 4016].as_slice(), &[7; 4096]].concat());
    }

    #[test]
    fn put_into_synced_range_panics() {
        let Some((named, window)) = with_window() else { return };
        window.put(4096, &[1; 10]).unwrap();
        window.sync(4096, 10).unwrap();
        let before = found(&named);
        for (offset, len) in
            [(0, 1), (4106, 1), (8191, 1), (LEN as u64, 1), (LEN as u64 - 1, 2), (u64::MAX, 1)]
        {
            let put = || window.put(offset, &vec![1; len]);
            assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(put)).is_err(), "{offset}+{len}");
        }
        let sync = || window.sync(4106, 1);
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(sync)).is_err());
        window.put(8192, &[2]).unwrap();
        window.sync(8192, 1).unwrap();
        assert!(found(&named)[..8192] == before[..8192]);
    }

    #[test]
    fn one_thread_syncs_while_another_puts() {
        let Some((named, window)) = with_window() else { return };
        window.put(0, &[1; 4096]).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| window.sync(0, 4096).unwrap());
            for offset in 4096..LEN {
                window.put(offset as u64, &[(offset % 251) as u8]).unwrap();
            }
        });
        window.sync(4096, LEN as u64 - 4096).unwrap();
        let expected = (0..LEN).map(|offset| if offset < 4096 { 1 } else { (offset % 251) as u8 });
        assert!(found(&named).into_iter().eq(expected));
    }

    #[test]
    fn reused_memory_leaks_no_old_bytes() {
        let Some((named, window)) = with_window() else { return };
        window.put(0, &[1; 4096]).unwrap();
        window.put(4096, &[2; 4096]).unwrap();
        // The sync does not include the second block, so the block moves to the memory of the next sync.
        window.sync(0, 4096).unwrap();
        assert!(found(&named)[4096..] == [7; LEN - 4096]);
        window.sync(4096, 4096).unwrap();
        // As for a frame, a payload is put before its header. Another header is put in the block before it.
        window.put(12288 + 80, &[3; 100]).unwrap();
        window.put(8192 + 16, &[4; 10]).unwrap();
        window.sync(8192, 4096 + 180).unwrap();
        let mut expected = [[1; 4096], [2; 4096], [0; 4096], [0; 4096]].concat();
        expected[8192 + 16..][..10].fill(4);
        expected[12288 + 80..][..100].fill(3);
        assert!(found(&named) == expected);
        window.sync(8192, 4096 + 180).unwrap();
        assert!(found(&named) == expected, "what is synced is not written again");
    }

    #[test]
    fn sync_after_failed_write_is_refused() {
        let Some((named, window)) = with_window() else { return };
        let read_only = OFlags::RDONLY.union(OFlags::DIRECT);
        let file = rustix::fs::open(named.path(), read_only, rustix::fs::Mode::empty()).unwrap();
        let window = DirectWindow { file: file.into(), ..window };
        window.put(0, &[1; 10]).unwrap();
        for _ in 0..2 {
            let error = window.sync(0, 10).unwrap_err();
            assert!(matches!(error, Error::Io { action: IoAction::Write, .. }), "{error}");
            assert_eq!(error.offset(), Some(0));
        }
    }

    #[test]
    fn short_and_interrupted_writes_are_resumed() {
        use std::cell::RefCell;

        use rustix::io::Errno;

        let blocks: Vec<u8> = (0..LEN).map(|index| (index % 251) as u8).collect();
        let medium = RefCell::new(vec![0; 4096 + LEN]);
        let calls = RefCell::new(vec![Err(Errno::INTR), Ok(4096), Err(Errno::INTR), Ok(8192), Ok(4096)]);
        let write = |bytes: &[u8], at: u64| {
            let len = calls.borrow_mut().remove(0)?;
            medium.borrow_mut()[at as usize..][..len].copy_from_slice(&bytes[..len]);
            Ok(len)
        };
        write_all(&blocks, 4096, write).unwrap();
        assert!(medium.borrow()[4096..] == blocks && calls.borrow().is_empty());
        // A write of no bytes, or of part of a block, is not progress that can be resumed.
        for len in [0, 100, 4096 + 512] {
            let error = write_all(&blocks, 0, |_, _| Ok(len)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::WriteZero, "{len}");
        }
        let error = write_all(&blocks, 0, |_, _| Err(Errno::IO)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::IO.raw_os_error()));
    }

    #[test]
    fn partial_block_file_is_refused() {
        for len in [0, 1, 4095, 4097] {
            let file = tempfile::tempfile().unwrap();
            assert!(DirectWindow::new(file, FileName::Segment(0), len).is_err(), "{len}");
        }
    }
}
