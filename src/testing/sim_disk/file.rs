//! Files and windows of a simulated disk.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use remanent_format::FileName;
use remanent_format::limits::{GROUP_ALIGN, SECTOR_LEN, align_up};

use super::event::{DiskEvent, SyncPoint};
use super::node::FileId;
use super::{EBADF, ENOSPC, Operation, SimDisk, file_failed};
use crate::base::aligned_buf::is_aligned;
use crate::base::sync::Mutex;
use crate::base::sync::atomic::Ordering;
use crate::disk::{Disk, DiskFile, Window};
use crate::error::{IoAction, Result};
use crate::options::LogIo;

/// An open file of a simulated disk, with the name by which it was opened.
#[derive(Clone)]
pub(super) struct SimFile {
    pub(super) disk: SimDisk,
    pub(super) file: FileName,
    pub(super) id: FileId,
    pub(super) write: bool,
}

impl SimFile {
    /// Records a write. The capacity of the disk and an injected fault may limit the number of bytes written.
    fn store(&self, operation: Operation, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut shared = self.disk.shared.lock();
        if !self.write {
            return Err(io::Error::from_raw_os_error(EBADF));
        }
        assert!(
            !shared.now.node(self.id).is_shared.load(Ordering::Relaxed),
            "{} is written to, and has a name elsewhere",
            self.file
        );
        let fault = shared.fault(operation);
        let unfailed = if fault.is_some() { bytes.len() / 2 } else { bytes.len() };
        let fitting = shared.fitting(self.id, offset, unfailed);
        let (file, id, stored) = (self.file, self.id, Arc::from(&bytes[..fitting]));
        if fitting > 0 {
            shared.record(match operation {
                Operation::Put => DiskEvent::Put { file, id, offset, bytes: stored },
                _ => DiskEvent::Write { file, id, offset, bytes: stored },
            });
        }
        match fault {
            Some(error) => Err(error),
            None if fitting < bytes.len() => Err(io::Error::from_raw_os_error(ENOSPC)),
            None => Ok(()),
        }
    }

    fn sync_range(&self, operation: Operation, point: SyncPoint, offset: u64, len: u64) -> io::Result<()> {
        let mut shared = self.disk.shared.lock();
        let (file, id) = (self.file, self.id);
        if let Some(error) = shared.fault(operation) {
            shared.record(DiskEvent::FailedSync { file, id, offset, len });
            return Err(error);
        }
        if !shared.skips(point) {
            shared.record(match operation {
                Operation::SyncWindow => DiskEvent::SyncWindow { file, id, offset, len },
                _ => DiskEvent::SyncFile { file, id },
            });
        }
        Ok(())
    }

    fn read(&self, operation: Operation, offset: u64, out: &mut [u8], bypassing_cache: bool) -> Result<()> {
        let mut shared = self.disk.shared.lock();
        let read = shared.check(operation).and_then(|()| {
            let node = shared.now.node(self.id);
            let content = if bypassing_cache { &node.durable } else { &node.visible };
            let whole = content.read(offset, out);
            if !bypassing_cache {
                shared.read_ahead.insert(self.id);
            }
            shared.age(self.id, offset, out);
            if whole { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
        });
        read.map_err(file_failed(IoAction::Read, self.file, Some(offset)))
    }
}

impl DiskFile for SimFile {
    fn len(&self) -> Result<u64> {
        Ok(self.disk.shared.lock().now.node(self.id).visible.len())
    }

    /// Returns whether the file has exactly one name. A name on another disk counts even after it is removed.
    fn has_one_name(&self) -> Result<bool> {
        let shared = self.disk.shared.lock();
        let names = shared.now.names_of(self.id);
        Ok(names == 1 && !shared.now.node(self.id).is_shared.load(Ordering::Relaxed))
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.disk.check_writer()?;
        self.store(Operation::Write, offset, bytes).map_err(file_failed(
            IoAction::Write,
            self.file,
            Some(offset),
        ))
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.read(Operation::Read, offset, out, false)
    }

    /// Reads the durable bytes, which may differ from the visible bytes.
    fn read_bypassing_cache(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.read(Operation::ReadBypassingCache, offset, out, true)
    }

    /// Reads like `read_at`, because all bytes are cached.
    fn read_proven(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.read(Operation::ReadProven, offset, out, false)
    }

    /// Returns the ranges whose visible bytes equal those on the medium. Returns no range once any part of the file was
    /// read, because the simulated page cache then contains the whole file.
    fn uncached(&self) -> Vec<Range<u64>> {
        let shared = self.disk.shared.lock();
        if shared.read_ahead.contains(&self.id) {
            return Vec::new();
        }
        let node = shared.now.node(self.id);
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for sector in node.clean_sectors() {
            let start = (sector * SECTOR_LEN) as u64;
            let end = (start + SECTOR_LEN as u64).min(node.durable.len());
            match ranges.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => ranges.push(start..end),
            }
        }
        ranges
    }

    /// Allocates as much of the space as is available. Extends the file to the end of the allocated space.
    fn reserve(&self, offset: u64, end: u64) -> Result<bool> {
        self.disk.check_writer()?;
        let reserve = || {
            let mut shared = self.disk.shared.lock();
            if !self.write {
                return Err(io::Error::from_raw_os_error(EBADF));
            }
            let fault = shared.fault(Operation::Reserve);
            let wanted = (end - offset) as usize;
            let unfailed = if fault.is_some() { wanted / 2 } else { wanted };
            let fitting = shared.fitting(self.id, offset, unfailed);
            if fitting > 0 {
                let (file, id, end) = (self.file, self.id, offset + fitting as u64);
                shared.record(DiskEvent::Reserve { file, id, end });
            }
            match fault {
                Some(error) => Err(error),
                None if fitting < wanted => Err(io::Error::from_raw_os_error(ENOSPC)),
                None => Ok(true),
            }
        };
        reserve().map_err(file_failed(IoAction::Allocate, self.file, Some(offset)))
    }

    /// Writes bytes that every reader sees immediately. The bytes are pending until they are synced.
    fn write_direct(&self, offset: u64, blocks: &[u8]) -> Result<()> {
        self.disk.check_writer()?;
        assert!(is_aligned(offset, blocks), "direct writes go in whole blocks, from aligned memory");
        let written = self.store(Operation::WriteDirect, offset, blocks);
        written.map_err(file_failed(IoAction::Write, self.file, Some(offset)))
    }

    fn cut(&self, len: u64) -> Result<()> {
        self.disk.check_writer()?;
        let mut shared = self.disk.shared.lock();
        shared.check(Operation::Cut).map_err(file_failed(IoAction::Truncate, self.file, Some(len)))?;
        assert!(!shared.mapped.contains_key(&self.id), "a file that is mapped is not cut");
        let (file, id) = (self.file, self.id);
        shared.record(DiskEvent::SetLen { file, id, len });
        Ok(())
    }

    fn mapped_part(&self, range: Range<u64>) -> Result<Box<dyn Window>> {
        self.disk.check_writer()?;
        let mut shared = self.disk.shared.lock();
        shared.check(Operation::MapPart).map_err(file_failed(IoAction::Map, self.file, Some(range.start)))?;
        let len = shared.now.node(self.id).visible.len();
        assert!(range.end <= len, "a part of {} bytes that has no space is mapped", range.end - len);
        *shared.mapped.entry(self.id).or_default() += 1;
        Ok(Box::new(SimPart { file: self.clone(), range }))
    }

    fn sync(&self) -> Result<()> {
        let point = SyncPoint::File(self.file);
        let len = self.len()?;
        self.sync_range(Operation::Sync, point, 0, len).map_err(file_failed(IoAction::Sync, self.file, None))
    }

    fn window(&self, io: LogIo) -> Result<Box<dyn Window>> {
        if !self.write {
            return Err(file_failed(IoAction::Map, self.file, None)(io::Error::from_raw_os_error(EBADF)));
        }
        let checked = self.disk.shared.lock().check(Operation::Window);
        checked.map_err(file_failed(IoAction::Map, self.file, None))?;
        let window = SimWindow { len: self.len()?, file: self.clone() };
        Ok(match io {
            LogIo::Mapped | LogIo::Buffered => Box::new(window),
            LogIo::Direct => Box::new(SimDirectWindow { window, put: Mutex::default() }),
        })
    }
}

/// A window of a simulated file. It provides only the guarantees of the trait: a sync makes only its own range durable.
struct SimWindow {
    file: SimFile,
    len: u64,
}

impl Window for SimWindow {
    fn put(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let end = offset.checked_add(bytes.len() as u64);
        assert!(end.is_some_and(|end| end <= self.len), "a put lies within its window");
        let name = self.file.file;
        self.file.store(Operation::Put, offset, bytes).map_err(file_failed(
            IoAction::Write,
            name,
            Some(offset),
        ))
    }

    fn sync(&self, offset: u64, len: u64) -> Result<()> {
        let end = offset.checked_add(len);
        assert!(end.is_some_and(|end| end <= self.len), "a sync lies within its window");
        let point = SyncPoint::Window(self.file.file);
        let synced = self.file.sync_range(Operation::SyncWindow, point, offset, len);
        synced.map_err(file_failed(IoAction::Sync, self.file.file, Some(offset)))
    }
}

/// A mapped part of a file. A put to a mapped part never fails for lack of space.
struct SimPart {
    file: SimFile,
    range: Range<u64>,
}

impl Window for SimPart {
    fn put(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let at = self.range.start + offset;
        assert!(at + bytes.len() as u64 <= self.range.end, "a put lies within its part");
        self.file.store(Operation::Put, at, bytes).map_err(file_failed(
            IoAction::Write,
            self.file.file,
            Some(at),
        ))
    }

    fn sync(&self, offset: u64, len: u64) -> Result<()> {
        let (at, name) = (self.range.start + offset, self.file.file);
        let synced = self.file.sync_range(Operation::SyncWindow, SyncPoint::Window(name), at, len);
        synced.map_err(file_failed(IoAction::Sync, name, Some(at)))
    }
}

impl Drop for SimPart {
    fn drop(&mut self) {
        let mut shared = self.file.disk.shared.lock();
        let parts = shared.mapped.get_mut(&self.file.id).expect("a part counts until it is dropped");
        *parts -= 1;
        if *parts == 0 {
            shared.mapped.remove(&self.file.id);
        }
    }
}

/// A window whose puts reach the file in whole blocks when the window is synced.
struct SimDirectWindow {
    window: SimWindow,
    put: Mutex<Vec<(u64, Vec<u8>)>>,
}

impl Window for SimDirectWindow {
    fn put(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        // No sync covers an empty put directly after a frame, so it would never leave the list.
        if !bytes.is_empty() {
            self.put.lock().push((offset, bytes.to_vec()));
        }
        Ok(())
    }

    fn sync(&self, offset: u64, len: u64) -> Result<()> {
        assert!(offset.is_multiple_of(GROUP_ALIGN), "a group begins on a block");
        let mut blocks = vec![0; align_up(len, GROUP_ALIGN) as usize];
        for (at, bytes) in self.put.lock().extract_if(.., |(at, _)| *at < offset + len) {
            let at = at.checked_sub(offset).expect("puts are synced in their order") as usize;
            blocks[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        self.window.put(offset, &blocks)?;
        self.window.sync(offset, blocks.len() as u64)
    }
}
