//! A file that occupies the space of a file system until it is dropped.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

pub struct Filler(PathBuf);

impl Filler {
    /// Occupies all space except `left` bytes, according to the free space that the file system reports.
    pub fn but(folder: &Path, left: u64) -> Self {
        let path = folder.join("filler");
        let file = File::create(&path).unwrap();
        let mut len = 0;
        loop {
            // The number includes the blocks reserved for root, because tests that fill a disk run as root.
            let free = rustix::fs::statvfs(folder).map(|told| told.f_bfree * told.f_frsize).unwrap();
            // Space that the file system reserves cannot be allocated in smaller requests either.
            let wanted = free.saturating_sub(left) / 4096 * 4096;
            let flags = rustix::fs::FallocateFlags::empty();
            if wanted == 0 || rustix::fs::fallocate(&file, flags, len, wanted).is_err() {
                return Self(path);
            }
            len += wanted;
        }
    }

    /// Occupies all space, the last part of it byte by byte, until the file system fails a write.
    pub fn all(folder: &Path) -> Self {
        let filler = Self::but(folder, 2 << 20);
        let mut file = File::options().append(true).open(&filler.0).unwrap();
        for len in [64 << 10, 4 << 10, 512] {
            let full = loop {
                if let Err(error) = file.write_all(&vec![1; len]).and_then(|()| file.sync_data()) {
                    break error;
                }
            };
            assert_eq!(full.kind(), io::ErrorKind::StorageFull, "{full}");
        }
        filler
    }

    /// Frees this number of bytes.
    pub fn leave(&self, bytes: u64) {
        let file = File::options().write(true).open(&self.0).unwrap();
        file.set_len(file.metadata().unwrap().len().checked_sub(bytes).unwrap()).unwrap();
        file.sync_all().unwrap();
    }
}

impl Drop for Filler {
    fn drop(&mut self) {
        std::fs::remove_file(&self.0).unwrap();
    }
}
