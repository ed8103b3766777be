//! A window that uses a shared mapping. A short put copies bytes into memory, without a system call. On a disk, a long
//! put writes to the file instead: the kernel write-protects mapped pages whenever it writes them to the medium, and a
//! page fault for every 4 KiB costs more than a call. Both kinds of put write to the same pages of the page cache.
//!
//! The copied bytes survive the death of the process, because the mapped pages belong to the file.
//!
//! The caller guarantees these conditions for a mapped file (`Disk::window`): every byte was written and synced before,
//! so that no store needs space; the file is neither truncated nor recycled while its window is in use; the file system
//! overwrites in place. If a condition is violated, a store kills the process with SIGBUS, which cannot be turned into
//! an error.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::ptr;

use memmap2::{Advice, MmapOptions, MmapRaw, UncheckedAdvice};
use remanent_format::FileName;

use super::capabilities::{has_no_other_cache, is_in_memory};
use super::{FileMemory, Window};
use crate::base::process::ForkGuard;
use crate::base::sync::Mutex;
use crate::error::{Error, IoAction, Result};
use crate::options::caller_memory::HostMemory;

/// The minimum length in bytes of a put that writes to the file. Commits of 4 KiB take a third less time than with
/// copies, and commits of 64 bytes take twice as long.
const CALL_LEN_MIN: usize = 2 << 10;

/// A window that writes to a whole file through a shared mapping.
///
/// # Why one thread may sync while another puts
///
/// The mapping is accessed only through a raw pointer. No Rust reference to its bytes ever exists, so a store cannot
/// invalidate one. Only `put` stores bytes, and the mutex allows one put at a time. `sync` is a system call that reads
/// no byte of the mapping in this process. The kernel writes the dirty pages in their current state. A page may thus
/// reach the medium while a put is copying into it, half old and half new. The log's checksums detect such a torn group
/// (I3). No caller treats bytes as durable before the end of a sync that began after their put returned.
///
/// The file is read through `pread`.
pub(super) struct MappedWindow {
    /// The mapped memory. In a forked child, these addresses are unmapped or belong to other memory, so the child must
    /// not unmap them.
    map: ForkGuard<MmapRaw>,
    /// The file for long puts, or `None` if all puts copy.
    file: Option<File>,
    /// A lock that is held during a put. The lock makes this module sound regardless of its callers, and costs a few
    /// nanoseconds without contention.
    putting: Mutex<()>,
    name: FileName,
}

/// Returns another descriptor of an open file. Converts EINVAL to EMFILE, because the system reports EINVAL if
/// the limit of open files leaves no number for the new descriptor.
pub(super) fn duplicate(file: &File) -> io::Result<File> {
    file.try_clone().map_err(|error| match error.raw_os_error() {
        Some(libc::EINVAL) => io::Error::from_raw_os_error(libc::EMFILE),
        _ => error,
    })
}

impl MappedWindow {
    /// Maps the whole `file`, shared. Forked children do not inherit the mapping, because their stores would modify the
    /// parent's log.
    pub(super) fn new(file: &File, name: FileName) -> io::Result<Self> {
        let mut window = Self::of(MmapRaw::map_raw(file)?, name)?;
        if !is_in_memory(file)? {
            window.file = Some(duplicate(file)?);
        }
        // Pages evicted from the page cache are read back one by one, for the reason given at `DirFile::write_zeros`.
        window.map.advise(Advice::Random)?;
        Ok(window)
    }

    fn of(map: MmapRaw, name: FileName) -> io::Result<Self> {
        if map.len() == 0 {
            // An empty mapping has no pages to advise about.
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the file is empty"));
        }
        map.advise(Advice::DontFork)?;
        Ok(Self { map: ForkGuard::new(map), file: None, putting: Mutex::new(()), name })
    }

    /// Removes the mapped pages of a range from the page table of the process. Their bytes remain in the page cache,
    /// and the next store to one of these pages maps it again.
    ///
    /// The kernel write-protects each mapped page before it writes the page to the medium. For every 4 KiB, it
    /// interrupts all processors on which the process runs. This call interrupts them only once for the whole
    /// range. It reduced the processor time of a sync of 64 MiB from 0.37 s to 0.02 s, and the committing thread
    /// made 1.6 times as many puts of 4 KiB meanwhile.
    fn unmap_pages(&self, start: usize, len: usize) {
        // SAFETY: the mapping is shared and file-backed, so its pages keep their bytes: stored bytes are in the
        // page cache. No Rust reference to the bytes exists.
        let unmapped = unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, start, len) };
        if let Err(error) = unmapped {
            tracing::debug!(file = %self.name, %error, "the log's pages stay mapped during a sync");
        }
    }

    /// Returns the range as indices into the mapping.
    ///
    /// # Panics
    /// If the range is not within the mapping.
    fn range(&self, offset: u64, len: u64) -> (usize, usize) {
        let end = offset.checked_add(len);
        assert!(end.is_some_and(|end| end <= self.map.len() as u64), "a range lies within its window");
        (offset as usize, len as usize)
    }
}

impl Window for MappedWindow {
    fn put(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let (start, len) = self.range(offset, bytes.len() as u64);
        let _one_put_at_a_time = self.putting.lock();
        if let Some(file) = self.file.as_ref().filter(|_| len >= CALL_LEN_MIN) {
            let written = file.write_all_at(bytes, offset);
            return written.map_err(|source| Error::io(IoAction::Write, self.name, Some(offset), source));
        }
        // SAFETY: `range` has asserted start + len <= map.len(), so the sum stays inside the mapping, which is one
        // allocation of that length and lives as long as `self`.
        let target = unsafe { self.map.as_mut_ptr().add(start) };
        // SAFETY: `bytes` is a live slice of `len` bytes. `target` points at `len` mapped, writable bytes
        // (a writable `MmapRaw`, bounds above). The two cannot overlap: `bytes` is memory that safe code
        // can name, and no reference into the mapping is ever made. The lock excludes other stores.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), target, len) };
        Ok(())
    }

    fn sync(&self, offset: u64, len: u64) -> Result<()> {
        let (start, len) = self.range(offset, len);
        if self.file.is_some() {
            self.unmap_pages(start, len);
        }
        // `msync` of the pages that contain the range. For a file, this is an fsync of the range, so it also flushes
        // the device's cache.
        self.map
            .flush_range(start, len)
            .map_err(|source| Error::io(IoAction::Sync, self.name, Some(offset), source))
    }

    fn prefault(&self, offset: u64, len: u64) {
        let (start, len) = self.range(offset, len);
        // Requests all evicted pages at once. Page faults would read them one by one: 4 MiB took 100 ms on a disk that
        // reads them at once in 3 ms. Kernels before 5.14 lack the second advice. A failing fault is an error here, but
        // raises SIGBUS in a put.
        let requested = self.map.advise_range(Advice::WillNeed, start, len);
        if let Err(error) = requested.and_then(|()| self.map.advise_range(Advice::PopulateWrite, start, len))
        {
            tracing::debug!(file = %self.name, %error, "cannot prefault the memory of the log");
        }
    }
}

/// A window that writes to a part of a file through a shared mapping. Space must be allocated for the part.
pub(super) struct PartWindow(MappedWindow);

impl PartWindow {
    /// Maps `range` of `file`, shared, like [`MappedWindow::new`].
    pub(super) fn new(file: &File, name: FileName, range: Range<u64>) -> io::Result<Self> {
        // A mapping may extend past the end of the file, but a store must not.
        if range.end > file.metadata()?.len() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the part lies past the file's end"));
        }
        let len = (range.end - range.start) as usize;
        let map = MmapOptions::new().offset(range.start).len(len).map_raw(file)?;
        MappedWindow::of(map, name).map(Self)
    }
}

impl Window for PartWindow {
    /// Stores bytes after populating their memory. A single call populates all pages. If a page fault fails, the call
    /// returns an error, whereas a store would raise SIGBUS. A page fault can fail because a file system may not
    /// provide space that it has allocated.
    fn put(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let (start, len) = self.0.range(offset, bytes.len() as u64);
        match self.0.map.advise_range(Advice::PopulateWrite, start, len) {
            // Kernels before 5.14 lack this advice.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            populated => {
                populated.map_err(|source| Error::io(IoAction::Map, self.0.name, Some(offset), source))?
            }
        }
        self.0.put(offset, bytes)
    }

    fn sync(&self, offset: u64, len: u64) -> Result<()> {
        self.0.sync(offset, len)
    }
}

/// The memory of a whole file in an in-memory file system, through a shared mapping. Forked children do not inherit the
/// mapping. Otherwise the next store to a pinned page would copy the page for one of the two processes.
pub(super) struct MappedFile {
    map: ForkGuard<MmapRaw>,
}

impl MappedFile {
    /// Maps the whole `file`. The file's space must be fully allocated.
    pub(super) fn new(file: &File) -> io::Result<Self> {
        let map = MmapRaw::map_raw(file)?;
        if map.len() == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the file is empty"));
        }
        map.advise(Advice::DontFork)?;
        Ok(Self { map: ForkGuard::new(map) })
    }

    /// Returns the address of the first byte of `range`.
    ///
    /// # Panics
    /// If the range is not within the mapping.
    fn at(&self, range: &Range<usize>) -> *mut u8 {
        assert!(range.start <= range.end && range.end <= self.map.len(), "a range lies within its file");
        // SAFETY: the start is at most the mapping's length, by the assertion.
        unsafe { self.map.as_mut_ptr().add(range.start) }
    }
}

impl FileMemory for MappedFile {
    fn address(&self) -> u64 {
        self.map.as_ptr() as u64
    }
}

impl HostMemory for MappedFile {
    fn byte_len(&self) -> u64 {
        self.map.len() as u64
    }

    fn bytes(&self, range: Range<usize>) -> &[u8] {
        let start = self.at(&range);
        // SAFETY: the range lies in the mapping, which is readable and lives as long as `self`. Nothing else
        // changes these bytes meanwhile. The store has the lock on its directory. The owner of this value is
        // the host device, all of whose lanes write through `bytes_mut`, under the lock of the memory's block.
        // A GPU's lanes, `Drain` and `Load`, write to the address instead, and then the owner,
        // `RegisteredMappings`, borrows no bytes.
        unsafe { std::slice::from_raw_parts(start, range.len()) }
    }

    fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        let start = self.at(&range);
        // SAFETY: as for `bytes`; the mapping is writable, and the borrow exclusive.
        unsafe { std::slice::from_raw_parts_mut(start, range.len()) }
    }
}

/// The maximum length of a file whose cached pages are queried, in bytes. The query needs one byte per page.
const QUERIED_LEN_MAX: u64 = 1 << 30;

/// Returns the ranges of a file, in whole pages, that are not in the page cache. Two kinds of files always appear to be
/// fully cached: files that the process neither owns nor may write, and files of a file system that may have a cache of
/// its own.
pub(super) fn uncached(file: &File) -> io::Result<Vec<Range<u64>>> {
    let len = file.metadata()?.len();
    if !(1..=QUERIED_LEN_MAX).contains(&len) || !has_no_other_cache(file)? {
        return Ok(Vec::new());
    }
    let map = MmapOptions::new().len(len as usize).map_raw_read_only(file)?;
    let page_len = rustix::param::page_size();
    let mut pages = vec![0_u8; map.len().div_ceil(page_len)];
    // SAFETY: the range is the whole of a mapping that lives as long as `map`, and `pages` has a byte for each of its
    // pages, as the call requires. No byte of the mapping is read.
    if unsafe { libc::mincore(map.as_mut_ptr().cast(), map.len(), pages.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // Only the lowest bit has a defined meaning.
    let runs = pages.chunk_by(|one, next| one & 1 == next & 1).scan(0, |start, run| {
        let at = *start;
        *start = at + run.len();
        Some((run[0] & 1, at..*start))
    });
    let bytes =
        |pages: Range<usize>| (pages.start * page_len) as u64..((pages.end * page_len) as u64).min(len);
    Ok(runs.filter(|(is_cached, _)| *is_cached == 0).map(|(_, pages)| bytes(pages)).collect())
}

/// Returns the number of minor page faults of the calling thread so far, which is the tenth field of its `stat` file.
/// The second field is a name that may contain spaces, so the fields are counted from its closing parenthesis.
#[cfg(test)]
pub(super) fn faults() -> u64 {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
    let (_, behind_name) = stat.rsplit_once(')').unwrap();
    behind_name.split_whitespace().nth(7).unwrap().parse().unwrap()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    const LEN: usize = 3 * 4096 + 100;

    fn with_window() -> (File, MappedWindow) {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[0; LEN], 0).unwrap();
        let window = MappedWindow::new(&file, FileName::Segment(0)).unwrap();
        (file, window)
    }

    #[test]
    fn put_bytes_are_in_file_before_sync() {
        let (file, window) = with_window();
        let mut expected = vec![0; LEN];
        for (offset, bytes) in [(0, &b"start"[..]), (4093, b"across"), (LEN - 3, b"end"), (LEN, b"")] {
            window.put(offset as u64, bytes).unwrap();
            expected[offset..offset + bytes.len()].copy_from_slice(bytes);
            let mut found = vec![0; LEN];
            file.read_exact_at(&mut found, 0).unwrap();
            assert!(found == expected, "after the put at {offset}");
        }
        for (offset, len) in [(0, LEN), (4093, 6), (LEN - 3, 3), (LEN, 0)] {
            window.sync(offset as u64, len as u64).unwrap();
        }
    }

    #[test]
    fn a_put_or_sync_outside_the_window_panics_and_stores_nothing() {
        let (file, window) = with_window();
        for (offset, len) in [(LEN as u64, 1), (LEN as u64 - 1, 2), (u64::MAX, 1), (u64::MAX, 0)] {
            let put = || window.put(offset, &vec![1; len]);
            assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(put)).is_err(), "{offset}+{len}");
            let sync = || window.sync(offset, len as u64);
            assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(sync)).is_err(), "{offset}+{len}");
        }
        let mut found = vec![1; LEN];
        file.read_exact_at(&mut found, 0).unwrap();
        assert!(found.iter().all(|byte| *byte == 0));
    }

    #[test]
    fn one_thread_syncs_while_another_puts() {
        let (file, window) = with_window();
        std::thread::scope(|scope| {
            let putter = scope.spawn(|| {
                for offset in 0..LEN {
                    window.put(offset as u64, &[(offset % 251) as u8]).unwrap();
                }
            });
            while !putter.is_finished() {
                window.sync(0, LEN as u64).unwrap();
            }
        });
        let mut found = vec![0; LEN];
        file.read_exact_at(&mut found, 0).unwrap();
        assert!(found.iter().enumerate().all(|(offset, byte)| *byte == (offset % 251) as u8));
    }

    #[test]
    fn dropped_cache_ranges_are_uncached_until_read() {
        let page_len = rustix::param::page_size() as u64;
        let len = 64 * page_len + 10;
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&vec![1; len as usize], 0).unwrap();
        assert_eq!(uncached(&file).unwrap(), [], "it was just written");
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        if uncached(&file).unwrap().is_empty() {
            eprintln!("SKIPPED: this file system keeps in memory what it is advised to drop");
            return;
        }
        assert_eq!(uncached(&file).unwrap(), std::slice::from_ref(&(0..len)));
        // With this advice, the kernel does not read ahead.
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).unwrap();
        file.read_exact_at(&mut [0], 5 * page_len).unwrap();
        assert_eq!(uncached(&file).unwrap(), [0..5 * page_len, 6 * page_len..len]);
    }

    #[test]
    fn puts_into_prefaulted_memory_do_not_fault() {
        const PAGES: u64 = 64;
        let page_len = rustix::param::page_size() as u64;
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&vec![7; (2 * PAGES * page_len) as usize], 0).unwrap();
        let window = MappedWindow::new(&file, FileName::Segment(0)).unwrap();
        let put = |pages: Range<u64>| {
            let before = faults();
            pages.for_each(|page| window.put(page * page_len + 1, b"stored").unwrap());
            faults() - before
        };
        // A fault maps its page and, where one write filled several pages, the neighbors of that page.
        assert!(put(0..PAGES) > 0);
        window.prefault(PAGES * page_len + 1, PAGES * page_len - 1);
        // Some pages fault again if another process makes the system write back all dirty pages.
        assert!(put(PAGES..2 * PAGES) < PAGES / 16);
        let mut found = vec![0; 2 * page_len as usize];
        file.read_exact_at(&mut found, (2 * PAGES - 2) * page_len).unwrap();
        let expected = |at: usize| match at % page_len as usize {
            inside @ 1..7 => b"stored"[inside - 1],
            _ => 7,
        };
        assert!((0..found.len()).all(|at| found[at] == expected(at)));
    }

    #[test]
    fn unqueryable_files_have_no_uncached_ranges() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(uncached(&file).unwrap(), []);
        file.set_len(QUERIED_LEN_MAX + 1).unwrap();
        assert_eq!(uncached(&file).unwrap(), []);
    }

    /// The kernel shows the flag "do not copy on fork" as `dc`.
    #[test]
    fn a_forked_child_does_not_get_the_mapping() {
        let (_file, window) = with_window();
        let start = format!("{:x}-", window.map.as_ptr() as usize);
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = maps.lines().skip_while(|line| !line.starts_with(&start));
        let flags = lines.find(|line| line.starts_with("VmFlags:")).unwrap();
        assert!(flags.split_whitespace().any(|flag| flag == "dc"), "{flags}");
    }

    #[test]
    fn put_goes_to_mapped_offset_never_past_file_end() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[7; LEN], 0).unwrap();
        let part = PartWindow::new(&file, FileName::Pages(1), 4096..LEN as u64).unwrap();
        part.put(1, b"part").unwrap();
        let mut found = vec![0; LEN];
        file.read_exact_at(&mut found, 0).unwrap();
        assert_eq!(&found[4096..4102], b"\x07part\x07");
        let outside = || part.put((LEN - 4096) as u64, &[1]);
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(outside)).is_err());
        assert!(PartWindow::new(&file, FileName::Pages(1), 4096..LEN as u64 + 1).is_err());
    }

    /// If another program truncates the file, a put returns an error instead of raising SIGBUS.
    #[test]
    fn write_to_truncated_mapping_is_an_error() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[7; LEN], 0).unwrap();
        let part = PartWindow::new(&file, FileName::Pages(1), 4096..LEN as u64).unwrap();
        file.set_len(4096).unwrap();
        let error = part.put(0, b"part").unwrap_err();
        assert!(matches!(error, Error::Io { action: IoAction::Map, .. }), "{error}");
    }

    #[test]
    fn an_empty_file_and_a_read_only_one_are_refused() {
        let empty = tempfile::tempfile().unwrap();
        assert!(MappedWindow::new(&empty, FileName::Segment(0)).is_err());
        let named = tempfile::NamedTempFile::new().unwrap();
        named.as_file().write_all_at(&[0; LEN], 0).unwrap();
        let read_only = File::open(named.path()).unwrap();
        assert!(MappedWindow::new(&read_only, FileName::Segment(0)).is_err());
    }
}
