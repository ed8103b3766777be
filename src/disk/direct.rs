//! Floor 3. A window by direct writes: a put is a copy into the process's own memory, a sync is one write past
//! the page cache that returns when the medium has the bytes.
//!
//! Where every commit waits for a sync, this takes one system call where others take two, and the kernel neither
//! copies the bytes nor looks for pages to write back. The price: until a sync, what was put dies with the
//! process. So a log that is written this way says `Logged` only when it can say `Durable`.
//!
//! Direct writes go in whole blocks. A group of frames begins on one, nothing is put behind it into its last
//! one, and the rest of that one is zeros, as it was.

use std::fs::File;
use std::io;
use std::ptr;
use std::slice;

use memmap2::{Advice, MmapMut, MmapRaw};
use remanent_format::FileName;
use remanent_format::limits::{GROUP_ALIGN, align_up};
use rustix::fs::OFlags;

use super::Window;
use crate::error::{Error, Result};
use crate::sync::Mutex;

/// How a file is opened for a window: what is written is on the medium when the write returns.
pub(super) const FLAGS: OFlags =
    OFlags::RDWR.union(OFlags::DIRECT).union(OFlags::DSYNC).union(OFlags::CLOEXEC);

/// A window onto the whole of a file.
///
/// # Why one thread may sync while another puts
///
/// The shadow is reached through a raw pointer only. A sync first moves `closed` to its end; a put below
/// `closed` panics, for it would rewrite what is synced (I5). So while a sync reads its range nobody stores
/// into it, and stores elsewhere do not touch it.
pub(super) struct DirectWindow {
    file: File,
    /// What was put, at the offsets of the file; as long as the file. Memory that nothing was put into is not
    /// there.
    shadow: MmapRaw,
    /// Where the next put may begin. Held during a put, so that one runs at a time.
    closed: Mutex<u64>,
    name: FileName,
}

impl DirectWindow {
    /// A window onto the whole of `file`, which was opened with [`FLAGS`] and is `len` bytes long.
    pub(super) fn new(file: File, name: FileName, len: u64) -> io::Result<Self> {
        if len == 0 || !len.is_multiple_of(GROUP_ALIGN) {
            let reason = format!("{len} bytes are not whole blocks of {GROUP_ALIGN}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
        }
        let shadow = MmapRaw::from(MmapMut::map_anon(usize::try_from(len).map_err(io::Error::other)?)?);
        shadow.advise(Advice::DontFork)?;
        Ok(Self { file, shadow, closed: Mutex::new(0), name })
    }

    fn end(&self, offset: u64, len: u64) -> u64 {
        let end = offset.checked_add(len).filter(|end| *end <= self.shadow.len() as u64);
        end.expect("a range lies within its window")
    }
}

impl Window for DirectWindow {
    fn put(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.end(offset, bytes.len() as u64);
        let closed = self.closed.lock();
        assert!(offset >= *closed, "nothing synced is rewritten");
        // SAFETY: `end` has asserted that the range lies inside the shadow, which is one allocation and lives
        // as long as `self`.
        let target = unsafe { self.shadow.as_mut_ptr().add(offset as usize) };
        // SAFETY: `bytes` is a live slice, `target` points at as many writable bytes. They cannot overlap: the
        // only references into the shadow are made by `sync`, for a range below `closed`, and this one is not
        // below it. The lock excludes other stores.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len()) };
        Ok(())
    }

    /// `offset` is a multiple of 4096, and nothing was synced behind it.
    fn sync(&self, offset: u64, len: u64) -> Result<()> {
        assert!(offset.is_multiple_of(GROUP_ALIGN), "a group begins on a block");
        let end = align_up(self.end(offset, len), GROUP_ALIGN);
        {
            let mut closed = self.closed.lock();
            *closed = end.max(*closed);
        }
        // SAFETY: `end` has asserted that the range lies inside the shadow, which is one allocation and lives as
        // long as `self`; rounding up stays inside, for its length is a multiple of the block's.
        let start = unsafe { self.shadow.as_ptr().add(offset as usize) };
        // SAFETY: so many bytes are there, and they are below `closed` from here on, so that nobody stores into
        // them while this reference lives.
        let blocks = unsafe { slice::from_raw_parts(start, (end - offset) as usize) };
        write_all(blocks, offset, |rest, at| rustix::io::pwrite(&self.file, rest, at))
            .map_err(|source| Error::io("write", self.name, Some(offset), source))
    }
}

/// Writes whole blocks by a `write` that may stop short, or be interrupted: it goes on where it stopped; inside a
/// block it cannot.
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

    /// A file and a window onto it; `None`, said aloud, where files cannot be written directly.
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
    fn what_is_put_is_in_the_file_when_it_is_synced_and_not_before() {
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

    /// A frame without a payload puts nothing right behind its header, where the window may end.
    #[test]
    fn a_put_of_nothing_may_lie_behind_what_is_synced_and_at_the_windows_end() {
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
    fn what_is_synced_cannot_be_put_anew() {
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
    fn short_and_interrupted_writes_are_gone_on_with() {
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
        // Nothing, and a part of a block, are no progress that could be gone on with.
        for len in [0, 100, 4096 + 512] {
            let error = write_all(&blocks, 0, |_, _| Ok(len)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::WriteZero, "{len}");
        }
        let error = write_all(&blocks, 0, |_, _| Err(Errno::IO)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::IO.raw_os_error()));
    }

    #[test]
    fn a_file_that_is_not_whole_blocks_is_refused() {
        for len in [0, 1, 4095, 4097] {
            let file = tempfile::tempfile().unwrap();
            assert!(DirectWindow::new(file, FileName::Segment(0), len).is_err(), "{len}");
        }
    }
}
