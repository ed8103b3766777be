//! Floor 5. Several image files that are written side by side, for one snapshot.
//!
//! The kernel lets one thread at a time write to a file through its cache: four that append to one file of tmpfs write
//! no more than one does (2.7 GB/s on 2 cores, 5.7 with a file for each of two threads; through a mapping, whose pages
//! are zeroed first, 2.9 to 3.4). So each thread has a file of its own.
//!
//! A crash here leaves image files that are nobody's.

use std::ops::Range;
use std::sync::Arc;

use remanent_format::image::ImagePurpose;
use remanent_format::{Folder, StoreId};

use super::ImageWriter;
use crate::crew;
use crate::disk::Disk;
use crate::error::Result;
use crate::options::Compression;
use crate::sync::atomic::{AtomicUsize, Ordering};

/// Chunks for which another file is worth its name and its sync. Of small files a store would have many: beyond a
/// number of them snapshots write the shortest again.
const CHUNKS_MIN: u64 = 8;

/// How many files threads that write so many bytes, in chunks of such a length, have side by side.
pub(crate) fn file_count(bytes: u64, chunk_len: u64, threads: usize) -> u64 {
    (bytes / (CHUNKS_MIN * chunk_len)).clamp(1, threads as u64)
}

/// Appends images to new files, at least one.
pub(crate) struct ImageWriters {
    disk: Arc<dyn Disk>,
    files: Vec<ImageWriter>,
    handed_out: AtomicUsize,
}

impl ImageWriters {
    /// Begins the image files of these numbers. No space is a clean failure here and in the following: who gets it
    /// abandons the files.
    pub fn create(
        disk: Arc<dyn Disk>,
        store: StoreId,
        numbers: Range<u64>,
        purpose: ImagePurpose,
        compression: Compression,
    ) -> Result<Self> {
        let mut writers = Self { disk, files: Vec::new(), handed_out: AtomicUsize::new(0) };
        for number in numbers {
            match ImageWriter::create(writers.disk.clone(), store, number, purpose, compression) {
                Ok(file) => writers.files.push(file),
                Err(error) => {
                    writers.abandon();
                    return Err(error);
                }
            }
        }
        Ok(writers)
    }

    /// The file to which the next thread appends: each has its own if there are as many.
    pub fn next(&self) -> &ImageWriter {
        &self.files[self.handed_out.fetch_add(1, Ordering::Relaxed) % self.files.len()]
    }

    /// Bytes written so far, or being written.
    pub fn byte_len(&self) -> u64 {
        self.files.iter().map(ImageWriter::byte_len).sum()
    }

    /// Makes the files and their names durable. All are synced at once, so that a file system's journal is written once.
    pub fn sync(&self) -> Result<()> {
        let count = self.files.len();
        crew::map(count, count, || (), |(), index| self.files[index].sync_bytes())?;
        self.disk.sync_folder(Folder::Pages)
    }

    /// Reads everything back past the cache and checks it (I7).
    pub fn verify(&self) -> Result<()> {
        self.files.iter().try_for_each(ImageWriter::verify)
    }

    /// Removes the unfinished files.
    pub fn abandon(self) {
        self.files.into_iter().for_each(ImageWriter::abandon);
    }
}
