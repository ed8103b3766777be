//! A window that uses `pwrite` and `fdatasync`, for file systems on which a mapping is unsafe.
//!
//! After `pwrite` returns, the written bytes survive the death of the process, because they are in the page cache.

use std::fs::File;
use std::os::unix::fs::FileExt;

use remanent_format::FileName;

use super::Window;
use crate::error::{Error, IoAction, Result};

/// A window that writes to a file of fixed length through the page cache.
pub(super) struct BufferedWindow {
    file: File,
    name: FileName,
    len: u64,
}

impl BufferedWindow {
    pub(super) fn new(file: File, name: FileName, len: u64) -> Self {
        Self { file, name, len }
    }
}

impl Window for BufferedWindow {
    fn put(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let end = offset.checked_add(bytes.len() as u64);
        assert!(end.is_some_and(|end| end <= self.len), "a put lies within its window");
        self.file
            .write_all_at(bytes, offset)
            .map_err(|source| Error::io(IoAction::Write, self.name, Some(offset), source))
    }

    fn sync(&self, offset: u64, len: u64) -> Result<()> {
        let end = offset.checked_add(len);
        assert!(end.is_some_and(|end| end <= self.len), "a sync lies within its window");
        // This call syncs more than the range, but no narrower call also flushes the device's cache.
        self.file.sync_data().map_err(|source| Error::io(IoAction::Sync, self.name, Some(offset), source))
    }
}
