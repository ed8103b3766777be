//! A file of a store directory. The file can be read and written through the page cache, with direct I/O, and through a
//! mapping.
//!
//! Every method is one or two system calls. The standard library retries system calls that a signal interrupts. An open
//! file is unaffected by renames.

use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::{Arc, Weak};

use remanent_format::FileName;
use remanent_format::limits::GROUP_ALIGN;
use rustix::fs::{Advice, FallocateFlags};
use rustix::io::Errno;

use super::buffered::BufferedWindow;
use super::cached::read_cached;
use super::capabilities::is_in_memory;
use super::direct::{self, DirectWindow};
use super::direct_read::{read_direct, reopen, reopen_direct};
use super::directory::OpenDirectory;
use super::mapped::{self, MappedFile, MappedWindow, PartWindow, duplicate};
use super::{DiskFile, FileMemory, Window, ZEROS_LEN_MAX, zeros_by_pieces};
use crate::base::sync::Mutex;
use crate::error::{Error, IoAction, Result};
use crate::options::LogIo;

/// An open file of a store directory in a real file system.
pub(super) struct DirFile {
    file: File,
    name: FileName,
    /// The directory of the writer that opened the file. The reference is dangling if a reader opened the file.
    writer: Weak<OpenDirectory>,
    /// A second descriptor for reads that bypass the page cache, opened on first use. The inner `None` means that the
    /// file system does not support such reads.
    direct: Mutex<Option<Option<Arc<File>>>>,
    /// A descriptor for writes that bypass the page cache, opened on first use.
    direct_writes: Mutex<Option<Arc<File>>>,
    /// Whether this handle has synced the file. The page cache then contains no bytes that the medium lacks.
    is_synced: Mutex<bool>,
}

impl DirFile {
    pub(super) fn shared(file: File, name: FileName, writer: Weak<OpenDirectory>) -> Arc<dyn DiskFile> {
        Arc::new(Self {
            file,
            name,
            writer,
            direct: Mutex::new(None),
            direct_writes: Mutex::new(None),
            is_synced: Mutex::new(false),
        })
    }

    fn direct(&self) -> Option<Arc<File>> {
        self.direct.lock().get_or_insert_with(|| reopen_direct(&self.file).map(Arc::new)).clone()
    }

    fn bypassing_cache(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        if let Some(direct) = self.direct() {
            match read_direct(&direct, offset, out) {
                // Some file systems accept the flag when a file is opened and reject the read.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => {}
                done => return done,
            }
        }
        // Synced pages are clean, so the kernel can drop them, and the next read then comes from the medium. If the
        // kernel keeps them, the read is served from the page cache.
        let len = NonZeroU64::new(out.len() as u64);
        if len.is_some() {
            let _ = rustix::fs::fadvise(&self.file, offset, len, Advice::DontNeed);
        }
        self.file.read_exact_at(out, offset)
    }

    /// Returns an error if a writer opened this file and another writer has opened the store later, because the file
    /// may now belong to the other writer.
    fn check_writer(&self) -> Result<()> {
        self.writer.upgrade().map_or(Ok(()), |open| open.check_claim())
    }

    fn failed(&self, action: IoAction, offset: u64) -> impl FnOnce(io::Error) -> Error {
        let name = self.name;
        move |source| Error::io(action, name, Some(offset), source)
    }
}

impl DiskFile for DirFile {
    fn len(&self) -> Result<u64> {
        let metadata = self.file.metadata();
        metadata
            .map(|found| found.len())
            .map_err(|source| Error::io(IoAction::Inspect, self.name, None, source))
    }

    fn is_without_holes(&self) -> Result<bool> {
        // The unit of `st_blocks`, regardless of the file system's block size.
        const COUNTED_LEN: u64 = 512;
        let metadata = self.file.metadata();
        metadata
            .map(|found| found.blocks() * COUNTED_LEN >= found.len())
            .map_err(|source| Error::io(IoAction::Inspect, self.name, None, source))
    }

    fn has_one_name(&self) -> Result<bool> {
        let metadata = self.file.metadata();
        metadata
            .map(|found| found.nlink() == 1)
            .map_err(|source| Error::io(IoAction::Inspect, self.name, None, source))
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.check_writer()?;
        self.file.write_all_at(bytes, offset).map_err(self.failed(IoAction::Write, offset))
    }

    /// Writes zeros in pieces whose length suits a window with mode `io`.
    ///
    /// The kernel may keep the bytes of one write in its page cache as a single folio of that length. A folio is
    /// written back as a whole. When zeros in a mapped log were written 256 KiB at a time, syncing 4 KiB of the log
    /// wrote 256 KiB (Linux 6.18, ext4), and a store into the same folio waited for that write. Therefore zeros in a
    /// mapped log are written page by page.
    fn write_zeros(&self, offset: u64, end: u64, io: LogIo) -> Result<()> {
        let piece_len = match io {
            LogIo::Mapped => rustix::param::page_size() as u64,
            LogIo::Direct | LogIo::Buffered => ZEROS_LEN_MAX,
        };
        let direct = match io {
            LogIo::Direct => offset.next_multiple_of(GROUP_ALIGN).min(end),
            LogIo::Mapped | LogIo::Buffered => end,
        };
        self.check_writer()?;
        zeros_by_pieces(offset, direct, piece_len, |at, zeros| {
            // The claim is checked once for all pieces, which may be as short as a page.
            self.file.write_all_at(zeros, at).map_err(self.failed(IoAction::Write, at))
        })?;
        direct::write_zeros(&self.file, direct, end).map_err(self.failed(IoAction::Write, direct))
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(out, offset).map_err(self.failed(IoAction::Read, offset))
    }

    fn read_bypassing_cache(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.bypassing_cache(offset, out).map_err(self.failed(IoAction::Read, offset))
    }

    /// Reads cached bytes from the page cache and others from the medium, after syncing the file once. A store that a
    /// program has just copied without a sync may exist only in the cache, so the sync must come first (I6). The sync
    /// of a clean file is cheap.
    fn read_proven(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let mut is_synced = self.is_synced.lock();
        if !*is_synced {
            self.sync()?;
            *is_synced = true;
        }
        drop(is_synced);
        let cached = read_cached(&self.file, offset, out);
        match &mut out[cached..] {
            [] => Ok(()),
            rest => self
                .bypassing_cache(offset + cached as u64, rest)
                .map_err(self.failed(IoAction::Read, offset)),
        }
    }

    /// Returns the ranges of the file that are not cached. If the system cannot report them, the result is empty, so
    /// that readers read all bytes from the medium (I6).
    fn uncached(&self) -> Vec<Range<u64>> {
        mapped::uncached(&self.file).unwrap_or_default()
    }

    fn reserve(&self, offset: u64, end: u64) -> Result<bool> {
        self.check_writer()?;
        loop {
            match rustix::fs::fallocate(&self.file, FallocateFlags::empty(), offset, end - offset) {
                Ok(()) => return Ok(true),
                Err(Errno::INTR) => {}
                Err(Errno::OPNOTSUPP | Errno::NOSYS) => return Ok(false),
                Err(errno) => return Err(self.failed(IoAction::Allocate, offset)(errno.into())),
            }
        }
    }

    fn write_direct(&self, offset: u64, blocks: &[u8]) -> Result<()> {
        self.check_writer()?;
        let opened = {
            let mut opened = self.direct_writes.lock();
            match &*opened {
                Some(file) => file.clone(),
                None => {
                    let file =
                        direct::open_writer(&self.file).map_err(self.failed(IoAction::Open, offset))?;
                    opened.insert(Arc::new(file)).clone()
                }
            }
        };
        direct::write_blocks(&opened, offset, blocks).map_err(self.failed(IoAction::Write, offset))
    }

    fn cut(&self, len: u64) -> Result<()> {
        self.check_writer()?;
        self.file.set_len(len).map_err(self.failed(IoAction::Truncate, len))
    }

    fn mapped_part(&self, range: Range<u64>) -> Result<Box<dyn Window>> {
        self.check_writer()?;
        let failed = self.failed(IoAction::Map, range.start);
        Ok(Box::new(PartWindow::new(&self.file, self.name, range).map_err(failed)?))
    }

    fn memory(&self) -> Result<Option<Box<dyn FileMemory>>> {
        let failed = |source| Error::io(IoAction::Map, self.name, None, source);
        // A store into a byte without allocated space would allocate the space or fail.
        if !is_in_memory(&self.file).map_err(|errno| failed(errno.into()))? || !self.is_without_holes()? {
            return Ok(None);
        }
        Ok(Some(Box::new(MappedFile::new(&self.file).map_err(failed)?)))
    }

    /// Advises the kernel to drop the cached pages of the range. The kernel then starts to write dirty pages back, and
    /// the call does not wait for these writes.
    fn write_back(&self, offset: u64, len: u64) {
        let _advice = rustix::fs::fadvise(&self.file, offset, NonZeroU64::new(len), Advice::DontNeed);
    }

    fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(|source| Error::io(IoAction::Sync, self.name, None, source))
    }

    fn window(&self, io: LogIo) -> Result<Box<dyn Window>> {
        let failed = |source| Error::io(IoAction::Map, self.name, None, source);
        Ok(match io {
            LogIo::Mapped => Box::new(MappedWindow::new(&self.file, self.name).map_err(failed)?),
            LogIo::Buffered => {
                let file = duplicate(&self.file).map_err(failed)?;
                Box::new(BufferedWindow::new(file, self.name, self.len()?))
            }
            LogIo::Direct => {
                let file = reopen(&self.file, direct::FLAGS).map_err(|errno| failed(errno.into()))?;
                Box::new(DirectWindow::new(file, self.name, self.len()?).map_err(failed)?)
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use remanent_format::Folder;

    use super::super::Disk;
    use super::super::dir::DirDisk;
    use super::super::direct_read::BOUNCE_LEN_MAX;
    use super::*;

    #[test]
    fn window_padding_is_zeros() {
        let directory = tempfile::tempdir().unwrap();
        let disk = DirDisk::new(directory.path());
        let len = 3 << 20;
        for (number, io) in [(1, LogIo::Direct), (2, LogIo::Buffered), (3, LogIo::Mapped)] {
            let name = FileName::Temporary(Folder::Root, number);
            let file = disk.create(name).unwrap();
            file.write_at(0, &[7; 5000]).unwrap();
            file.write_zeros(5000, len, io).unwrap();
            file.sync().unwrap();
            let path = directory.path().join(name.name());
            let cached = read_cached(&File::open(&path).unwrap(), 8192, &mut [0; 4096]);
            if io == LogIo::Direct && disk.refuses(io).unwrap().is_some() {
                eprintln!("SKIPPED: no direct writes in {}", path.display());
            } else {
                assert_eq!(cached > 0, io != LogIo::Direct, "{io}");
            }
            let found = std::fs::read(path).unwrap();
            assert_eq!(found.len() as u64, len, "{io}");
            assert!(found[..5000] == [7; 5000] && found[5000..].iter().all(|byte| *byte == 0), "{io}");
        }
    }

    /// If the page cache stored several pages as one unit (a folio), a sync would write all of them, and a store into
    /// any of them would wait.
    #[test]
    fn mapped_page_sync_affects_only_its_page() {
        let directory = tempfile::tempdir().unwrap();
        let disk = DirDisk::new(directory.path());
        if let Some(reason) = disk.refuses(LogIo::Mapped).unwrap() {
            eprintln!("SKIPPED: no mapped log in {}: {reason}", directory.path().display());
            return;
        }
        let file = disk.create(FileName::Temporary(Folder::Root, 1)).unwrap();
        let len = 1 << 20;
        file.write_zeros(0, len, LogIo::Mapped).unwrap();
        file.sync().unwrap();
        let window = file.window(LogIo::Mapped).unwrap();
        window.prefault(0, len);
        let page_len = rustix::param::page_size() as u64;
        let put = |at: u64| {
            let before = mapped::faults();
            window.put(at, b"stored").unwrap();
            mapped::faults() - before
        };
        let mut faults = 0;
        for at in (0..len).step_by(page_len as usize) {
            faults += put(at);
            window.sync(at, page_len).unwrap();
        }
        // Some pages fault again if another process makes the system write back all dirty pages.
        assert!(faults < len / page_len / 4, "{faults}");
    }

    /// Reads that bypass the page cache return the same bytes for every alignment of offset, length and end of file.
    #[test]
    fn reads_past_the_cache_need_no_alignment() {
        let directory = tempfile::tempdir().unwrap();
        let disk = DirDisk::new(directory.path());
        let file = disk.create(FileName::Store).unwrap();
        let len = 2 * BOUNCE_LEN_MAX + 5000;
        let bytes: Vec<u8> = (0..len).map(|index| (index % 251) as u8).collect();
        file.write_at(0, &bytes).unwrap();
        file.sync().unwrap();
        // An open file remains readable after it is renamed.
        disk.rename(FileName::Store, FileName::Temporary(Folder::Root, 1)).unwrap();
        for (offset, len) in [
            (0, len),
            (1, len - 1),
            (0, 0),
            (4095, 2),
            (4096, 4096),
            (len - 1, 1),
            (len - 5001, 5001),
            (123, BOUNCE_LEN_MAX),
        ] {
            let mut out = vec![0; len];
            file.read_bypassing_cache(offset as u64, &mut out).unwrap();
            assert!(out == bytes[offset..offset + len], "{offset}+{len}");
        }
        for (offset, len) in [(len, 1), (len - 1, 2), (len + 5000, 1), (0, len + 1)] {
            let error = file.read_bypassing_cache(offset as u64, &mut vec![0; len]).unwrap_err();
            let Error::Io { source, .. } = &error else { panic!("{error}") };
            assert_eq!(source.kind(), io::ErrorKind::UnexpectedEof, "{offset}+{len}");
        }
    }

    #[test]
    fn plain_direct_read_equals_cached_read() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("STORE"), b"some bytes").unwrap();
        let file = File::open(directory.path().join("STORE")).unwrap();
        // Simulates a file system without direct reads.
        let file = DirFile {
            file,
            name: FileName::Store,
            writer: Weak::new(),
            direct: Mutex::new(Some(None)),
            direct_writes: Mutex::new(None),
            is_synced: Mutex::new(false),
        };
        let mut out = [0; 5];
        file.read_bypassing_cache(5, &mut out).unwrap();
        assert_eq!(&out, b"bytes");
        assert_eq!(file.read_bypassing_cache(6, &mut out).unwrap_err().offset(), Some(6));
    }
}
