//! Writes the images of one snapshot or one batch to several image files concurrently.
//!
//! The kernel allows one thread at a time to write to a file through the page cache. Four threads that append to one
//! file on tmpfs write no faster than one thread: 2.7 GB/s on 2 cores, compared with 5.7 GB/s if two threads have one
//! file each. So each writing thread has its own file during a write. Writing through a mapping or with direct I/O
//! gained less or nothing.
//!
//! A crash here leaves unreferenced image files.

use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;

use remanent_format::image::{IMAGE_HEADER_BLOCK, ImageFileHeader, ImagePurpose, ImageRef};
use remanent_format::{Folder, PageInfo, StoreId};

use super::numbers::ImageFiles;
use super::{CHUNK_BYTES, ImageWriter, PIECE_BYTES, THREADS_MAX, chunk_threads, chunks};
use crate::base::allocation::{collected, make_room};
use crate::base::parallel;
use crate::base::sync::Mutex;
use crate::disk::Disk;
use crate::disk::image_spares::{ImageSpares, ReusedFile};
use crate::error::{Error, Result};
use crate::memory::arena::{FileTarget, RegisteredFile};
use crate::options::ImageOptions;

/// The minimum number of chunks for each additional file. Without this limit, a store would have many small files, and
/// snapshots would rewrite some of them to limit their number.
const CHUNKS_MIN: u64 = 8;

/// A file written in place may be longer than its images. The maximum excess is the length of the images divided by
/// this value, plus `TAIL_MIN`.
const TAIL_SHARE: u64 = 4;
const TAIL_MIN: u64 = 64 << 10;

/// Returns the number of files to which `bytes` bytes are written concurrently, in chunks of `chunk_len` bytes.
pub(crate) fn file_count(bytes: u64, chunk_len: u64, threads: usize) -> u64 {
    (bytes / (CHUNKS_MIN * chunk_len)).clamp(1, threads as u64)
}

/// Returns the number of files to which a batch's pages of the given lengths are written concurrently. No file is
/// empty.
pub(super) fn ahead_file_count<P>(pages: &[P], bytes: u64, len: impl Fn(&P) -> u64) -> Result<u64> {
    let chunks = chunks(pages, CHUNK_BYTES, len)?.len() as u64;
    Ok(file_count(bytes, CHUNK_BYTES, parallel::threads(THREADS_MAX)).min(chunks.max(1)))
}

/// A writer that distributes images among one or more image files.
pub(crate) struct ImageWriters {
    disk: Arc<dyn Disk>,
    spares: Arc<ImageSpares>,
    files: Vec<ImageWriter>,
    /// The number of files that were spares before.
    reused: usize,
    /// The state of each file: the number of threads that append to the file, and the sequence number of its last chunk
    /// among the chunks of all files.
    uses: Mutex<Vec<(usize, u64)>>,
}

impl ImageWriters {
    /// Starts image files with the given numbers, for a snapshot that writes about `len` bytes. Up to `threads_max`
    /// threads compress a chunk, or read chunks back. If this call or a call of the writer reports that the disk is
    /// full, the caller must abandon the files.
    pub fn create(
        image_files: &ImageFiles,
        store: StoreId,
        numbers: Range<u64>,
        len: u64,
        options: ImageOptions,
        threads_max: usize,
    ) -> Result<Self> {
        let mut writers = Self::none(image_files, &numbers);
        if let Err(error) = writers.begin_files(store, numbers, len, options) {
            writers.abandon();
            return Err(error);
        }
        writers.files.iter_mut().for_each(|file| file.threads_max = threads_max);
        Ok(writers)
    }

    /// Starts image files with the given numbers, for a batch that writes about `len` bytes. If this call or a call of
    /// the writer reports that the disk is full, the caller must abandon the files.
    pub fn create_ahead(
        image_files: &ImageFiles,
        store: StoreId,
        numbers: Range<u64>,
        len: u64,
        options: ImageOptions,
    ) -> Result<Self> {
        let mut writers = Self::none(image_files, &numbers);
        let options = options.for_file(len / (numbers.end - numbers.start).max(1));
        for number in numbers {
            let disk = writers.disk.clone();
            match ImageWriter::create(disk, store, number, ImagePurpose::Batch, options) {
                Ok(file) => writers.files.push(file),
                Err(error) => {
                    writers.abandon();
                    return Err(error);
                }
            }
        }
        Ok(writers)
    }

    /// Creates a writer without files.
    fn none(image_files: &ImageFiles, numbers: &Range<u64>) -> Self {
        let uses = Mutex::new(numbers.clone().map(|_| (0, 0)).collect());
        let (disk, spares) = (image_files.disk().clone(), image_files.spares().clone());
        Self { disk, spares, files: Vec::new(), reused: 0, uses }
    }

    /// Starts each image file. A spare of about the file's length is reused, if one exists.
    fn begin_files(
        &mut self,
        store: StoreId,
        numbers: Range<u64>,
        len: u64,
        options: ImageOptions,
    ) -> Result<()> {
        let purpose = ImagePurpose::Snapshot;
        let file_len = IMAGE_HEADER_BLOCK + len / (numbers.end - numbers.start).max(1);
        let (spares, options) = (self.spares.clone(), options.for_file(file_len));
        let mut over = spares.reuse(numbers.clone(), file_len)?;
        self.reused = over.len();
        for number in numbers {
            let disk = self.disk.clone();
            let file = match over.remove(&number) {
                Some(mut reused) => {
                    let target = self.target(number, &mut reused, file_len);
                    let header = ImageFileHeader { store, file: number, purpose };
                    ImageWriter::over(disk, header, reused, target, options)
                }
                None => ImageWriter::create(disk, store, number, purpose, options),
            };
            let undo = |_: &Error| {
                spares.drop_kept_ready(number);
                spares.forget(over.keys());
            };
            self.files.push(file.inspect_err(undo)?);
        }
        Ok(())
    }

    /// Returns the memory of a spare if a device may copy images to it. A file written in place keeps its length. A
    /// spare that is much too long is therefore not written in place, and its resource is dropped so that the file can
    /// be truncated.
    fn target(&self, number: u64, reused: &mut ReusedFile, file_len: u64) -> Option<FileTarget> {
        let kept = reused.kept_ready.take()?;
        let target = kept.downcast::<RegisteredFile>().ok().and_then(|file| file.target());
        let tail_max = file_len / TAIL_SHARE + TAIL_MIN;
        let target = target.filter(|target| target.byte_len() <= file_len.saturating_add(tail_max));
        if target.is_none() {
            self.spares.drop_kept_ready(number);
        }
        target
    }

    /// Returns whether a device copies images to the memory of any of the files.
    pub fn is_in_place(&self) -> bool {
        self.files.iter().any(|file| file.target().is_some())
    }

    /// Returns the number of image files that were spares before.
    pub fn reused_count(&self) -> u64 {
        self.reused as u64
    }

    /// Calls `append` with the file to which the fewest threads are appending. Among several such files, chooses the
    /// file with the oldest last chunk. Thus no file is empty once there are as many chunks as files.
    pub fn append<T>(&self, append: impl FnOnce(&ImageWriter) -> T) -> T {
        let file = {
            let mut uses = self.uses.lock();
            let latest = uses.iter().map(|(_, latest)| *latest).max().unwrap_or(0);
            let file = (0..uses.len()).min_by_key(|file| uses[*file]).expect("at least one file");
            uses[file] = (uses[file].0 + 1, latest + 1);
            file
        };
        let appended = append(&self.files[file]);
        self.uses.lock()[file].0 -= 1;
        appended
    }

    /// Writes non-empty pages that are in memory, with several threads. Returns the references to their images in the
    /// same order.
    pub fn write_all(&self, pages: &[(PageInfo, &[u8])]) -> Result<Vec<ImageRef>> {
        let write = |(): &mut (), file: &ImageWriter, chunk: &[(PageInfo, &[u8])]| match chunk {
            [(info, bytes)] if info.len > PIECE_BYTES => Ok(vec![file.write_long_page(info, bytes)?]),
            _ => file.write_chunk(&collected(chunk.iter().map(|(info, bytes)| (info, *bytes)))?),
        };
        self.write_chunks(pages, |(info, _)| info.len, || (), write)
    }

    /// Writes pages like [`write_all`](Self::write_all), with bytes that `read` provides. `read` provides the pages of
    /// a chunk or one piece of a long page at a time. Each page is read by one thread, with the state that `equip`
    /// created for that thread.
    pub fn write_read<W>(
        &self,
        pages: &[PageInfo],
        equip: impl Fn() -> W + Sync,
        read: impl Fn(&mut W, &PageInfo, u64, &mut [u8]) -> Result<()> + Sync,
    ) -> Result<Vec<ImageRef>> {
        let write = |with: &mut W, file: &ImageWriter, chunk: &[PageInfo]| {
            file.write_read_chunk(chunk, &mut |info, offset, out| read(with, info, offset, out))
        };
        self.write_chunks(pages, |info| info.len, equip, write)
    }

    fn write_chunks<P: Sync, W>(
        &self,
        pages: &[P],
        len: impl Fn(&P) -> u64,
        equip: impl Fn() -> W + Sync,
        write: impl Fn(&mut W, &ImageWriter, &[P]) -> Result<Vec<ImageRef>> + Sync,
    ) -> Result<Vec<ImageRef>> {
        let chunks = chunks(pages, CHUNK_BYTES, &len)?;
        let longest = pages.iter().map(|page| len(page).min(PIECE_BYTES)).max().unwrap_or(0);
        let write = |with: &mut W, index: usize| self.append(|file| write(with, file, chunks[index]));
        let written = parallel::map_indexed(chunk_threads(longest), chunks.len(), equip, write)?;
        let mut references = Vec::new();
        make_room(&mut references, pages.len())?;
        written.into_iter().for_each(|chunk| references.extend(chunk));
        assert!(references.len() == pages.len()); // I7: one image per page, in the same order.
        Ok(references)
    }

    /// Returns the number of bytes of all files that were written or are being written.
    pub fn byte_len(&self) -> u64 {
        self.files.iter().map(ImageWriter::byte_len).sum()
    }

    /// Makes the files and their names durable (I7). All files are synced concurrently, so that a file system's journal
    /// is written once.
    ///
    /// # Errors
    /// I/O errors. A lack of space leaves the store unchanged only if no other file failed for another reason.
    pub fn sync(&self) -> Result<()> {
        let count = self.files.len();
        let sync = |(): &mut (), index: usize| Ok::<_, Infallible>(self.files[index].sync_bytes());
        let Ok(synced) = parallel::map_indexed(count, count, || (), sync);
        let failures: Vec<Error> = synced.into_iter().filter_map(Result::err).collect();
        let is_worse = |error: &&Error| !matches!(error, Error::DiskFull { .. });
        match failures.iter().find(is_worse).or(failures.first()) {
            Some(error) => Err(error.clone()),
            None => self.disk.sync_folder(Folder::Pages),
        }
    }

    /// Reads all files back from the medium and verifies them (I7).
    pub fn verify(&self) -> Result<()> {
        self.files.iter().try_for_each(ImageWriter::verify)
    }

    /// Removes the unfinished image files.
    pub fn abandon(self) {
        for mut file in self.files {
            // The memory is unmapped first, because the file's space is freed only when no mapping refers to it.
            file.target = None;
            self.spares.drop_kept_ready(file.number);
            file.abandon();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batch_uses_one_nonempty_file_per_thread() {
        let threads = parallel::threads(THREADS_MAX) as u64;
        for (why, lens, expected) in [
            ("a short batch", vec![1 << 20; 8], 1),
            ("one long page is one chunk", vec![1 << 30], 1),
            ("two of them are two", vec![1 << 30; 2], threads.min(2)),
            ("many pages", vec![1 << 20; 200], threads),
        ] {
            assert_eq!(ahead_file_count(&lens, lens.iter().sum(), |len| *len).unwrap(), expected, "{why}");
        }
    }
}
