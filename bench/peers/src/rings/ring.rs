//! A ring of the kernel's (`io_uring`) whose transfers all have the same length, and memory of the ring's
//! own.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use io_uring::squeue::{Entry, Flags};
use io_uring::types::Fd;
use io_uring::{IoUring, opcode};

use super::piece;
use crate::aligned_buf::Aligned;

/// A transfer that the kernel is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    Read,
    Write,
    /// A sync of all of the file; no bytes are moved.
    Sync,
}

/// The resources that the kernel is told of beforehand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Told {
    /// It is told of the files, once for all transfers.
    pub files: bool,
    /// It is told of the memory likewise.
    pub memory: bool,
    /// It is told to leave each transfer to a worker of its own, and not to try it first on the thread that
    /// submits.
    pub workers: bool,
}

/// A ring, and as many pieces of memory as transfers can be under way.
pub struct Ring<'f> {
    ring: IoUring,
    files: &'f [File],
    told: Told,
    pieces: Vec<Aligned>,
    /// The transfer that each piece is used for.
    under_way: Vec<Option<What>>,
}

impl<'f> Ring<'f> {
    /// A ring for transfers of `len` bytes, between these files and memory.
    ///
    /// # Errors
    /// Those of the kernel: some have no rings, and some refuse them.
    pub fn new(files: &'f [File], depth: usize, len: usize, told: Told) -> io::Result<Self> {
        let entries = u32::try_from(depth).expect("a small number");
        // One thread submits, and completions wait until it asks: the least work, where a kernel knows of it
        // (6.1).
        let frugal = IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(entries);
        let ring = frugal.or_else(|error| match error.raw_os_error() {
            Some(libc::EINVAL) => IoUring::new(entries),
            _ => Err(error),
        })?;
        let pieces: Vec<Aligned> = (0..depth).map(|number| piece(number as u64, len)).collect();
        if told.files {
            let descriptors: Vec<_> = files.iter().map(AsRawFd::as_raw_fd).collect();
            ring.submitter().register_files(&descriptors)?;
        }
        if told.memory {
            let area = |piece: &Aligned| libc::iovec { iov_base: piece.as_ptr() as *mut _, iov_len: len };
            let areas: Vec<_> = pieces.iter().map(area).collect();
            // SAFETY: each piece is `len` bytes long and is dropped after the ring.
            unsafe { ring.submitter().register_buffers(&areas)? };
        }
        Ok(Self { ring, files, told, under_way: vec![None; depth], pieces })
    }

    /// The number of transfers that can be under way.
    pub fn depth(&self) -> usize {
        self.pieces.len()
    }

    /// Begins a transfer with a piece of memory that no other one uses. The kernel hears of it with the next
    /// [`Self::finish_one`].
    pub fn begin(&mut self, what: What, piece: usize, file: usize, offset: u64) {
        assert!(self.under_way[piece].is_none(), "a piece is in one transfer at a time");
        let entry = self.entry(what, piece, file, offset).user_data(piece as u64);
        // SAFETY: the file lives as long as the ring. So does the piece, whose drop waits for transfers under
        // way; no other code looks at it.
        unsafe { self.ring.submission().push(&entry) }.expect("there is an entry for each piece");
        self.under_way[piece] = Some(what);
    }

    fn entry(&mut self, what: What, piece: usize, file: usize, offset: u64) -> Entry {
        let Told { files, memory, workers } = self.told;
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

    /// Waits until a transfer is over, and says which piece is free again.
    ///
    /// # Errors
    /// The transfer's, and that it moved less than it should.
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
                // Transfers under way can be waited for no more: their memory is never used again.
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
    fn what_is_written_is_read_whatever_the_kernel_is_told() {
        let file = tempfile::tempfile().expect("a file");
        let files = [file];
        for told in [false, true].map(|is| Told { files: is, memory: is, workers: is }) {
            let mut ring = match Ring::new(&files, 2, LEN, told) {
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
