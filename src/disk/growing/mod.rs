//! Writes growing files in one of three modes: mapped, buffered or direct. All image files are written by this
//! module. The modes use only operations of `DiskFile`, so that the simulated disk sees each step as a point at
//! which a crash can occur. The contents of the file do not depend on the mode.
//!
//! The steps of every mode except `Buffered`:
//!
//! 1. **Allocate space** in steps before the bytes are written. A full disk is reported in this step, as an error.
//!    Without allocated space, a store into a mapping would kill the process, and a sync could fail.
//! 2. **Write** the bytes, through a mapping or with direct I/O.
//! 3. **Unmap**, then **truncate** the file to its length. If a file is truncated while it is mapped, the next store
//!    kills the process.
//! 4. **Sync** once. The sync also covers stores into mappings that were removed.
//!
//! A reused file already has its space (I13), and is truncated to its new length in step 3.
//!
//! A crash during these steps leaves an unreferenced file. The file may be longer than its contents.

mod blocks;
mod parts;

use std::sync::Arc;

use remanent_format::limits::GROUP_ALIGN;

use self::blocks::BlockWriter;
use self::parts::MappedParts;
use super::DiskFile;
use crate::base::sync::Mutex;
use crate::base::sync::atomic::{AtomicBool, Ordering};
use crate::error::Result;
use crate::options::ImageIo;

/// The minimum number of bytes by which the allocated space grows. The allocated space doubles with each step, up to
/// steps of `STEP_LEN_MAX`, so that a short file uses little space and a long file is extended rarely. Each step is a
/// call that waits for the file system's journal, and starts a new mapping.
const STEP_LEN_MIN: u64 = 64 << 10;
const STEP_LEN_MAX: u64 = 16 << 20;

/// A file that several threads write concurrently. [`finish`](Self::finish) then truncates and syncs the file.
pub(crate) struct GrowingFile {
    file: Arc<dyn DiskFile>,
    way: WriteWay,
    /// Whether [`finish`](Self::finish) was called, successfully or not.
    is_finished: AtomicBool,
}

enum WriteWay {
    Mapped(MappedParts),
    Buffered,
    Direct(BlockWriter),
    /// A device writes most of the file through a mapping that other code owns. The file is never truncated.
    InPlace,
}

impl GrowingFile {
    /// Starts writing a file whose first `space_len` bytes are allocated. The disk must support `io`.
    pub fn new(file: Arc<dyn DiskFile>, io: ImageIo, space_len: u64) -> Self {
        let space = Space::new(file.clone(), space_len);
        let way = match io {
            ImageIo::Mapped => WriteWay::Mapped(MappedParts::new(file.clone(), space)),
            ImageIo::Auto | ImageIo::Buffered => WriteWay::Buffered,
            ImageIo::Direct => WriteWay::Direct(BlockWriter::new(file.clone(), space)),
        };
        Self { file, way, is_finished: AtomicBool::new(false) }
    }

    /// Starts overwriting a file into whose memory a device copies pages. Writes through this value fill the bytes
    /// between the pages. The file keeps its length, because bytes after its last chunk have no meaning (SPEC).
    pub fn in_place(file: Arc<dyn DiskFile>) -> Self {
        Self { file, way: WriteWay::InPlace, is_finished: AtomicBool::new(false) }
    }

    /// Writes all of `bytes` at `offset`, extending the file if needed. Readers of the file may not see the bytes
    /// before [`finish`](Self::finish) returns. Several threads may write concurrently, but not to the same bytes.
    ///
    /// # Errors
    /// I/O errors.
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        // I7: bytes written after the sync would be named by a manifest without being durable.
        assert!(!self.is_finished.load(Ordering::Relaxed), "a finished file is not written to");
        match &self.way {
            WriteWay::Mapped(parts) => parts.write_at(offset, bytes),
            WriteWay::Buffered | WriteWay::InPlace => self.file.write_at(offset, bytes),
            WriteWay::Direct(blocks) => blocks.write_at(offset, bytes),
        }
    }

    /// Starts writing the given range to the medium, so that [`finish`](Self::finish) takes less time.
    pub fn write_back(&self, offset: u64, len: u64) {
        match self.way {
            WriteWay::Mapped(_) | WriteWay::Buffered => self.file.write_back(offset, len),
            WriteWay::Direct(_) | WriteWay::InPlace => {}
        }
    }

    /// Returns whether the file system may allocate space as late as the sync. The sync may then report a full disk.
    pub fn gets_space_at_sync(&self) -> bool {
        matches!(self.way, WriteWay::Buffered)
    }

    /// Makes the first `len` bytes and the length durable, and truncates all later bytes. No write may be in progress
    /// or follow. May be called only once, because a failed sync is never retried.
    ///
    /// # Errors
    /// I/O errors.
    pub fn finish(&self, len: u64) -> Result<()> {
        assert!(!self.is_finished.swap(true, Ordering::Relaxed), "a file is finished once");
        match &self.way {
            WriteWay::Mapped(parts) => parts.unmap(),
            WriteWay::Buffered => {}
            WriteWay::Direct(blocks) => blocks.flush(len)?,
            WriteWay::InPlace => {}
        }
        // A file that a device writes is never truncated, because the device might write to the removed pages.
        let may_be_cut = !matches!(self.way, WriteWay::InPlace);
        if may_be_cut && self.file.len()? != len {
            self.file.cut(len)?;
        }
        self.file.sync()
    }
}

/// Allocates the space of a file in steps, before bytes are written.
struct Space {
    file: Arc<dyn DiskFile>,
    made: Mutex<MadeSpace>,
}

#[derive(Clone, Copy)]
struct MadeSpace {
    /// The end offset of the allocated space. Every byte below this offset is allocated.
    end: u64,
    /// Whether the file system can allocate space without writing. `true` until an attempt shows otherwise.
    is_possible: bool,
}

impl Space {
    fn new(file: Arc<dyn DiskFile>, len: u64) -> Self {
        // Mapped parts must begin at a page boundary.
        let end = len - len % STEP_LEN_MIN;
        Self { file, made: Mutex::new(MadeSpace { end, is_possible: true }) }
    }

    /// Allocates space for all bytes below `end`. Returns the end of the allocated space. The result is less than `end`
    /// only if the file system cannot allocate space without writing.
    fn reach(&self, end: u64) -> Result<u64> {
        let mut made = self.made.lock();
        if made.end >= end || !made.is_possible {
            return Ok(made.end);
        }
        let needed = end.next_multiple_of(GROUP_ALIGN);
        let step = made.end.clamp(STEP_LEN_MIN, STEP_LEN_MAX);
        let wanted = needed.max(made.end + step).next_multiple_of(STEP_LEN_MIN);
        let reached = match self.file.reserve(made.end, wanted) {
            // The bytes may fit even if the whole step does not. Without this retry, the disk would be reported full
            // too early.
            Err(error) if error.is_no_space() => {
                self.file.reserve(made.end, needed).map(|done| (done, needed))
            }
            reserved => reserved.map(|done| (done, wanted)),
        };
        match reached? {
            (true, end) => made.end = end,
            (false, _) => made.is_possible = false,
        }
        Ok(made.end)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use remanent_format::{FileName, Folder};

    use super::*;
    use crate::disk::Disk;
    use crate::disk::dir::DirDisk;
    use crate::testing::sim_disk::SimDisk;

    const WAYS: [ImageIo; 3] = [ImageIo::Mapped, ImageIo::Buffered, ImageIo::Direct];
    const NAME: FileName = FileName::Pages(1);

    /// Creates a file that is written in mode `io`, or returns `None` if the disk does not support the mode.
    fn growing(disk: &dyn Disk, io: ImageIo) -> Option<(Arc<dyn DiskFile>, GrowingFile)> {
        disk.make_folder(Folder::Root).unwrap();
        disk.make_folder(Folder::Pages).unwrap();
        if let Some(reason) = disk.refuses_images(io).unwrap() {
            eprintln!("SKIPPED: {io} images on {}: {reason}", disk.label());
            return None;
        }
        let file = disk.create(NAME).unwrap();
        Some((file.clone(), GrowingFile::new(file, io, 0)))
    }

    fn bytes(seed: usize, len: usize) -> Vec<u8> {
        (0..len).map(|at| ((at + seed) % 251) as u8 + 1).collect()
    }

    /// Writes a file like an image file: with whole chunks, a long image in pieces with its head last, and abandoned
    /// long images whose space the next images reuse. Returns the expected contents of the file.
    fn write(growing: &GrowingFile) -> Vec<u8> {
        let mut expected = Vec::new();
        let mut put = |offset: usize, bytes: &[u8]| {
            growing.write_at(offset as u64, bytes).unwrap();
            expected.resize(expected.len().max(offset + bytes.len()), 0);
            expected[offset..offset + bytes.len()].copy_from_slice(bytes);
        };
        put(0, &bytes(1, 4096));
        put(4096, &bytes(2, 3 * 4096));
        let mut start = 4 * 4096;
        for (round, (lens, is_given_up)) in [
            (&[100_000, 30_000, 5][..], true),
            (&[70_001, 4096, 3], false),
            (&[2_000_000, 1_500_007], true),
            (&[10, 20, 4000, 3 * 65_536], false),
            (&[1], true),
        ]
        .into_iter()
        .enumerate()
        {
            let mut at = start + 176;
            for (piece, len) in lens.iter().enumerate() {
                put(at, &bytes(7 * round + piece, *len));
                growing.write_back(at as u64, *len as u64);
                at += len;
            }
            if !is_given_up {
                let end = at.next_multiple_of(4096);
                put(at, &vec![0; end - at]);
                put(start, &bytes(round, 176));
                start = end;
            }
        }
        put(start, &bytes(9, 2 * 4096));
        expected.truncate(start + 2 * 4096);
        growing.finish(expected.len() as u64).unwrap();
        expected
    }

    #[test]
    fn all_ways_leave_the_same_bytes() {
        let directory = tempfile::tempdir().unwrap();
        for io in WAYS {
            let real = DirDisk::new(directory.path().join(io.to_string()));
            let simulated = SimDisk::new();
            let disks: [&dyn Disk; 2] = [&real, &simulated];
            for disk in disks {
                let Some((file, growing)) = growing(disk, io) else { continue };
                let expected = write(&growing);
                assert_eq!(file.len().unwrap(), expected.len() as u64, "{io} on {}", disk.label());
                let mut found = vec![0; expected.len()];
                file.read_bypassing_cache(0, &mut found).unwrap();
                assert!(found == expected, "{io} on {}: read past the cache", disk.label());
                file.read_at(0, &mut found).unwrap();
                assert!(found == expected, "{io} on {}: read", disk.label());
            }
        }
    }

    #[test]
    fn partial_block_rewrite_keeps_other_bytes() {
        let directory = tempfile::tempdir().unwrap();
        for io in WAYS {
            let disk = DirDisk::new(directory.path().join(io.to_string()));
            let Some((file, growing)) = growing(&disk, io) else { continue };
            let mut expected = bytes(1, 3 * 4096);
            growing.write_at(0, &expected).unwrap();
            growing.write_at(5000, b"again").unwrap();
            expected[5000..5005].copy_from_slice(b"again");
            growing.finish(expected.len() as u64).unwrap();
            let mut found = vec![0; expected.len()];
            file.read_at(0, &mut found).unwrap();
            assert!(found == expected, "{io}");
        }
    }

    #[test]
    fn threads_write_at_once() {
        const LEN: usize = 3 << 20;
        let directory = tempfile::tempdir().unwrap();
        for io in WAYS {
            let disk = DirDisk::new(directory.path().join(io.to_string()));
            let Some((file, growing)) = growing(&disk, io) else { continue };
            let both = Barrier::new(2);
            std::thread::scope(|scope| {
                for thread in 0..2 {
                    let (growing, both) = (&growing, &both);
                    scope.spawn(move || {
                        both.wait();
                        for at in (thread * 4096..LEN).step_by(2 * 4096) {
                            growing.write_at(at as u64, &bytes(at, 4096)).unwrap();
                        }
                    });
                }
            });
            growing.finish(LEN as u64).unwrap();
            let mut found = vec![0; LEN];
            file.read_at(0, &mut found).unwrap();
            let is_right = |(index, block): (usize, &[u8])| block == bytes(index * 4096, 4096);
            assert!(found.chunks(4096).enumerate().all(is_right), "{io}");
        }
    }

    /// Space is allocated in steps that are longer than the next write. A step that does not fit is not an error.
    #[test]
    fn disk_is_full_exactly_when_bytes_do_not_fit() {
        for io in WAYS {
            for (room, fits) in [(40 << 12, true), ((40 << 12) - 1, false)] {
                let disk = SimDisk::new();
                let (_, growing) = growing(&disk, io).unwrap();
                disk.set_capacity(Some(room));
                let written = (0..20)
                    .try_for_each(|chunk| growing.write_at(chunk * 8192, &bytes(chunk as usize, 8192)));
                assert_eq!(written.is_ok(), fits, "{io}: {written:?}");
                match written {
                    Ok(()) => growing.finish(40 << 12).unwrap(),
                    Err(error) => assert!(error.is_no_space(), "{io}: {error}"),
                }
            }
        }
    }

    /// A device may still write to the pages that truncation would remove.
    #[test]
    fn a_file_that_a_device_writes_keeps_its_length() {
        let disk = SimDisk::new();
        let (file, growing) = growing(&disk, ImageIo::Buffered).unwrap();
        growing.write_at(0, &bytes(1, 8192)).unwrap();
        growing.finish(8192).unwrap();
        let growing = GrowingFile::in_place(file.clone());
        growing.write_at(0, &bytes(2, 4096)).unwrap();
        growing.finish(4096).unwrap();
        assert_eq!(file.len().unwrap(), 8192);
    }

    /// Direct writes leave the page cache to other programs.
    #[test]
    fn direct_writes_leave_nothing_in_the_page_cache() {
        let directory = tempfile::tempdir().unwrap();
        for (io, is_cached) in [(ImageIo::Buffered, true), (ImageIo::Direct, false)] {
            let disk = DirDisk::new(directory.path().join(io.to_string()));
            let Some((file, growing)) = growing(&disk, io) else { continue };
            let len = 1 << 20;
            growing.write_at(0, &bytes(1, len)).unwrap();
            growing.finish(len as u64).unwrap();
            let uncached: u64 = file.uncached().iter().map(|range| range.end - range.start).sum();
            if uncached == 0 && io == ImageIo::Direct {
                eprintln!("SKIPPED: the file system of {} has a cache of its own", disk.label());
                continue;
            }
            assert_eq!(uncached == len as u64, !is_cached, "{io}");
        }
    }

    #[test]
    #[should_panic(expected = "a finished file is not written to")]
    fn finished_file_is_immutable() {
        let (_, growing) = growing(&SimDisk::new(), ImageIo::Mapped).unwrap();
        growing.finish(0).unwrap();
        let _refused = growing.write_at(0, &[1]);
    }
}
