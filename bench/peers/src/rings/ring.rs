//! An `io_uring` with its own memory. All transfers have the same length.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use io_uring::squeue::{Entry, Flags};
use io_uring::types::Fd;
use io_uring::{IoUring, opcode};

use super::piece;
use crate::aligned_buf::Aligned;

/// The kind of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    Read,
    Write,
    /// A sync of the whole file. No bytes are transferred.
    Sync,
}

/// What is registered with the kernel in advance, and how transfers are executed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Registered {
    /// Whether the files are registered.
    pub files: bool,
    /// Whether the memory is registered.
    pub memory: bool,
    /// Whether kernel workers execute all transfers, without an attempt on the submitting thread.
    pub workers: bool,
}

/// A ring, with one piece of memory for each transfer that can be in flight.
pub struct Ring<'f> {
    ring: IoUring,
    files: &'f [File],
    registered: Registered,
    pieces: Vec<Aligned>,
    /// The transfer in flight that uses each piece.
    under_way: Vec<Option<What>>,
}

impl<'f> Ring<'f> {
    /// Creates a ring for transfers of `len` bytes between files and memory.
    ///
    /// # Errors
    /// Returns an error of the kernel, for example if `io_uring` is not available or not permitted.
    pub fn new(files: &'f [File], depth: usize, len: usize, registered: Registered) -> io::Result<Self> {
        let entries = u32::try_from(depth).expect("a small number");
        // One thread submits, and completions are processed only when this thread waits. This needs the least
        // work, but requires Linux 6.1.
        let frugal = IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(entries);
        let ring = frugal.or_else(|error| match error.raw_os_error() {
            Some(libc::EINVAL) => IoUring::new(entries),
            _ => Err(error),
        })?;
        let pieces: Vec<Aligned> = (0..depth).map(|number| piece(number as u64, len)).collect();
        if registered.files {
            let descriptors: Vec<_> = files.iter().map(AsRawFd::as_raw_fd).collect();
            ring.submitter().register_files(&descriptors)?;
        }
        if registered.memory {
            let area = |piece: &Aligned| libc::iovec { iov_base: piece.as_ptr() as *mut _, iov_len: len };
            let areas: Vec<_> = pieces.iter().map(area).collect();
            // SAFETY: each piece is `len` bytes long and is dropped after the ring.
            unsafe { ring.submitter().register_buffers(&areas)? };
        }
        Ok(Self { ring, files, registered, under_way: vec![None; depth], pieces })
    }

    /// Returns the maximum number of transfers in flight.
    pub fn depth(&self) -> usize {
        self.pieces.len()
    }

    /// Queues a transfer with a piece of memory that no other transfer uses. The next [`Self::finish_one`]
    /// submits the transfer.
    pub fn begin(&mut self, what: What, piece: usize, file: usize, offset: u64) {
        assert!(self.under_way[piece].is_none(), "a piece is in one transfer at a time");
        let entry = self.entry(what, piece, file, offset).user_data(piece as u64);
        // SAFETY: the file lives as long as the ring. So does the piece, whose drop waits for transfers under
        // way; no other code looks at it.
        unsafe { self.ring.submission().push(&entry) }.expect("there is an entry for each piece");
        self.under_way[piece] = Some(what);
    }

    fn entry(&mut self, what: What, piece: usize, file: usize, offset: u64) -> Entry {
        let Registered { files, memory, workers } = self.registered;
        let fd = Fd(if files { file as i32 } else { self.files[file].as_raw_fd() });
        let (len, index) = (self.pieces[piece].len() as u32, piece as u16);
        let at = self.pieces[piece].as_mut_ptr();
        let entry = match (what, memory) {
            (What::Read, false) => opcode::Read::new(fd, at, len).offset(offset).build(),
            (What::Read, true) => opcode::ReadFixed::new(fd, at, len, index).offset(offset).build(),
            (What::Write, false) => opcode::Write::new(fd, at, len).offset(offset).build(),
            (What::Write, true) => opcode::WriteFixed::new(fd, at, len, index).offset(offset).build(),
            (What::Sync, _) => opcode::Fsync::new(fd).build(),
        };
        let mut flags = Flags::empty();
        flags.set(Flags::FIXED_FILE, files);
        flags.set(Flags::ASYNC, workers);
        entry.flags(flags)
    }

    /// Waits until a transfer is complete, and returns the index of its piece, which is free again.
    ///
    /// # Errors
    /// Returns the error of the transfer, or an error if too few bytes were transferred.
    pub fn finish_one(&mut self) -> io::Result<usize> {
        let done = loop {
            if let Some(done) = self.ring.completion().next() {
                break done;
            }
            match self.ring.submit_and_wait(1) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
                _ => {}
            }
        };
        let piece = done.user_data() as usize;
        let what = self.under_way[piece].take().expect("it was under way");
        let len = if what == What::Sync { 0 } else { self.pieces[piece].len() };
        match done.result() {
            moved if moved == len as i32 => Ok(piece),
            code @ ..0 => Err(io::Error::from_raw_os_error(-code)),
            moved => Err(io::Error::other(format!("a transfer of {len} bytes moved {moved}"))),
        }
    }
}

impl Drop for Ring<'_> {
    fn drop(&mut self) {
        while self.under_way.iter().any(Option::is_some) {
            let before = self.under_way.clone();
            if self.finish_one().is_err() && self.under_way == before {
                // Transfers in flight can no longer be awaited, so their memory is leaked.
                std::mem::forget(std::mem::take(&mut self.pieces));
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    const LEN: usize = 4096;

    #[test]
    fn written_bytes_are_read_with_any_registrations() {
        let file = tempfile::tempfile().expect("a file");
        let files = [file];
        for registered in [false, true].map(|is| Registered { files: is, memory: is, workers: is }) {
            let mut ring = match Ring::new(&files, 2, LEN, registered) {
                Ok(ring) => ring,
                Err(error) => return eprintln!("SKIPPED: no rings here: {error}"),
            };
            files[0].set_len(0).expect("it can be cut");
            ring.begin(What::Write, 0, 0, 0);
            ring.begin(What::Write, 1, 0, LEN as u64);
            let mut finished = [(); 2].map(|()| ring.finish_one().expect("a write"));
            finished.sort_unstable();
            assert_eq!(finished, [0, 1]);
            ring.begin(What::Sync, 0, 0, 0);
            assert_eq!(ring.finish_one().expect("a sync"), 0);
            let mut found = vec![0; 2 * LEN];
            files[0].read_exact_at(&mut found, 0).expect("both are there");
            assert!(found[..LEN] == *piece(0, LEN) && found[LEN..] == *piece(1, LEN));

            ring.begin(What::Read, 1, 0, 0);
            assert_eq!(ring.finish_one().expect("a read"), 1);
            assert!(*ring.pieces[1] == *piece(0, LEN));
            ring.begin(What::Read, 1, 0, LEN as u64 + 1);
            let error = ring.finish_one().expect_err("it ends a byte early");
            assert_eq!(error.to_string(), "a transfer of 4096 bytes moved 4095");
        }
    }
}
