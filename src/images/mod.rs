//! Writes image files. Images of pages are appended in chunks, and synced before any record names them.
//!
//! A crash here loses no data. An image file that no manifest, table or batch names has no meaning, and the next open
//! removes the file.

pub(crate) mod disk_pages;
pub(crate) mod numbers;
pub(crate) mod read;
mod write_ahead;
mod compress;
mod in_place;
mod long_pages;
mod writers;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use remanent_format::image::{
    Chunk, ChunkHeader, CompressedBytes, IMAGE_HEADER_BLOCK, ImageFileHeader, ImageHeader, ImagePurpose,
    ImageRef, NewImage,
};
use remanent_format::limits::CHUNK_IMAGES_MAX;
use remanent_format::{Defect, FileName, Folder, PageInfo, Place, StoreId};

use self::compress::compress;
pub(crate) use self::long_pages::{PIECE_BYTES, ReadPass, Sink};
pub(crate) use self::write_ahead::PendingImages;
pub(crate) use self::writers::{ImageWriters, file_count};
use crate::base::aligned_buf::AlignedBuf;
use crate::base::allocation::{collected, make_room, push};
use crate::base::parallel;
use crate::base::sync::Mutex;
use crate::disk::growing::GrowingFile;
use crate::disk::image_spares::ReusedFile;
use crate::disk::{Disk, DiskFile};
use crate::error::{Error, IoAction, Result};
use crate::memory::arena::FileTarget;
use crate::options::{Compression, ImageOptions};

/// The number of image bytes at which a chunk is complete and is written. A longer page has its own chunk.
pub(crate) const CHUNK_BYTES: u64 = 2 << 20;
/// The maximum number of images in a chunk, a bound for stores of tiny pages.
const CHUNK_IMAGES: usize = 4096;
const _: () = assert!(CHUNK_IMAGES <= CHUNK_IMAGES_MAX as usize);
/// The maximum number of threads that create chunks or read them back. One thread checksums and copies more slowly than
/// a disk writes. Four threads were faster than every disk that was measured.
pub(crate) const THREADS_MAX: usize = 4;
/// The maximum number of image files that a snapshot writes.
pub(crate) const IMAGE_FILES_MAX: u64 = THREADS_MAX as u64;
/// The maximum number of page bytes in all chunks that are being created at a time. A single longer page may exceed
/// this number.
const IN_FLIGHT_BYTES: u64 = 32 << 20;

/// Divides pages into chunks of at most `bytes_max` bytes, in order. A page longer than `bytes_max` gets its own chunk.
///
/// # Errors
/// `OutOfMemory`.
pub(crate) fn chunks<T>(pages: &[T], bytes_max: u64, len: impl Fn(&T) -> u64) -> Result<Vec<&[T]>> {
    let mut chunks = Vec::new();
    let mut rest = pages;
    while !rest.is_empty() {
        let (chunk, after) = rest.split_at(next_chunk(bytes_max, rest.iter().map(&len)));
        push(&mut chunks, chunk)?;
        rest = after;
    }
    Ok(chunks)
}

/// Returns the number of images that fit in the next chunk, starting with the first one. `lens` contains the lengths of
/// the images in bytes. The result is at least 1 if there is any image.
fn next_chunk(bytes_max: u64, lens: impl IntoIterator<Item = u64>) -> usize {
    let mut bytes = 0;
    let fits = lens.into_iter().take(CHUNK_IMAGES).take_while(|len| {
        let fits = bytes == 0 || bytes + len <= bytes_max;
        bytes += len;
        fits
    });
    fits.count()
}

/// Returns the number of threads that may create chunks at a time. `longest` is the length of the longest chunk in
/// bytes.
pub(crate) fn chunk_threads(longest: u64) -> usize {
    let fit = IN_FLIGHT_BYTES / longest.max(CHUNK_BYTES);
    parallel::threads((fit as usize).clamp(1, THREADS_MAX))
}

/// A function that fills a slice with the bytes of a page, starting at the given offset of the page.
pub(crate) type PageRead<'r, E> = &'r mut dyn FnMut(&PageInfo, u64, &mut [u8]) -> Result<(), E>;

/// A writer that appends images to one file. The file is new or was a spare. Several threads may share the writer. Each
/// thread writes its own chunks, and chunks are in the file in the order in which they were completed.
pub(crate) struct ImageWriter {
    disk: Arc<dyn Disk>,
    store: StoreId,
    compression: Compression,
    /// The maximum number of threads that compress one chunk, or that read chunks back.
    threads_max: usize,
    number: u64,
    /// The image file, for reads after its sync.
    file: Arc<dyn DiskFile>,
    /// The image file, for writes before its sync.
    growing: GrowingFile,
    written: Mutex<WrittenChunks>,
    /// A lock that is held while a chunk reserves its space, and while a chunk of still unknown length is appended.
    /// This lock is acquired before `written`.
    tail: Mutex<()>,
    /// The memory of the file if a device copies images to it, otherwise `None`.
    target: Option<FileTarget>,
    /// Buffers in which chunks are assembled. The buffers are reused, because writing to memory that was used before is
    /// faster.
    areas: Mutex<Vec<Vec<u8>>>,
}

struct WrittenChunks {
    /// The file offset of the next chunk.
    end: u64,
    chunks: Vec<Chunk>,
    /// The chunks whose images a device copied, by file offset. The value is the place from which the device copied.
    placed: BTreeMap<u64, Place>,
}

impl ImageWriter {
    /// Creates image file `number` and returns its writer. If this call or a call of the writer reports that the disk
    /// is full, the caller must abandon the file.
    pub fn create(
        disk: Arc<dyn Disk>,
        store: StoreId,
        number: u64,
        purpose: ImagePurpose,
        options: ImageOptions,
    ) -> Result<Self> {
        let name = FileName::Pages(number);
        let file = disk.create(name).map_err(|error| no_space(number, IMAGE_HEADER_BLOCK, error))?;
        let new = ReusedFile { file, space_len: 0, kept_ready: None };
        Self::over(disk, ImageFileHeader { store, file: number, purpose }, new, None, options)
    }

    /// Starts the image file of `header` in a spare that has been durably renamed to that file (I13). With a target, a
    /// device writes images to the memory of the file.
    fn over(
        disk: Arc<dyn Disk>,
        header: ImageFileHeader,
        reused: ReusedFile,
        target: Option<FileTarget>,
        options: ImageOptions,
    ) -> Result<Self> {
        let ImageFileHeader { store, file: number, .. } = header;
        let ReusedFile { file, space_len, .. } = reused;
        // The block is padded with zeros, because a spare contains the bytes of an older header.
        let mut block = header.encode().to_vec();
        block.resize(IMAGE_HEADER_BLOCK as usize, 0);
        let none = WrittenChunks { end: IMAGE_HEADER_BLOCK, chunks: Vec::new(), placed: BTreeMap::new() };
        let written = Mutex::new(none);
        let ImageOptions { compression, io, .. } = options;
        let (areas, threads_max) = (Mutex::default(), usize::MAX);
        let tail = Mutex::new(());
        let growing = match &target {
            Some(_) => GrowingFile::in_place(file.clone()),
            None => GrowingFile::new(file.clone(), io, space_len),
        };
        let writer = Self {
            disk,
            store,
            compression,
            threads_max,
            number,
            file,
            growing,
            written,
            tail,
            target,
            areas,
        };
        match writer.growing.write_at(0, &block) {
            Ok(()) => Ok(writer),
            Err(error) => {
                writer.abandon();
                Err(no_space(number, IMAGE_HEADER_BLOCK, error))
            }
        }
    }

    /// Writes non-empty pages chunk by chunk, and returns the references to their images in the same order. `read`
    /// fills a slice with a page's bytes, starting at an offset.
    ///
    /// At most one chunk, or one piece of a long page, is in memory at a time. `read` may be called twice for the same
    /// piece.
    pub fn write_pages<E: From<Error>>(
        &self,
        pages: &[PageInfo],
        read: PageRead<'_, E>,
    ) -> Result<Vec<ImageRef>, E> {
        let mut references = Vec::new();
        make_room(&mut references, pages.len())?;
        for chunk in chunks(pages, CHUNK_BYTES, |info| info.len)? {
            references.extend(self.write_read_chunk(chunk, read)?);
        }
        Ok(references)
    }

    /// Writes the pages of a single chunk like [`write_pages`](Self::write_pages).
    fn write_read_chunk<E: From<Error>>(
        &self,
        chunk: &[PageInfo],
        read: PageRead<'_, E>,
    ) -> Result<Vec<ImageRef>, E> {
        if let [long] = chunk
            && long.len > PIECE_BYTES
        {
            let mut piece = Vec::new();
            let mut source = |range: Range<u64>, _: ReadPass, sink: Sink<'_>| {
                resize(&mut piece, range.end - range.start)?;
                read(long, range.start, &mut piece)?;
                sink(&piece, crc32fast::hash(&piece))?;
                Ok::<_, E>(true)
            };
            let written = self.write_long(long, PIECE_BYTES, &mut source)?;
            return Ok(vec![written.expect("its bytes are there")]);
        }
        let mut contents = Vec::new();
        make_room(&mut contents, chunk.len())?;
        for info in chunk {
            let mut content = Vec::new();
            resize(&mut content, info.len)?;
            read(info, 0, &mut content)?;
            contents.push(content);
        }
        let images = collected(chunk.iter().zip(contents.iter().map(Vec::as_slice)))?;
        Ok(self.write_chunk(&images)?)
    }

    /// Writes one chunk with the images of `pages`, and returns the references to the images in the same order.
    pub fn write_chunk(&self, pages: &[(&PageInfo, &[u8])]) -> Result<Vec<ImageRef>> {
        let sums = collected(pages.iter().map(|(_, bytes)| crc32fast::hash(bytes)))?;
        self.write_frames(pages, &sums, &self.compress(pages)?)
    }

    /// Writes one chunk of images like [`write_chunk`](Self::write_chunk). The pages are already in `staged`, at the
    /// positions of the chunk's payloads. `pages` contains each page with its offset in `staged` and the CRC-32 of its
    /// bytes.
    ///
    /// The first page must follow the space for the chunk's head. Each other page must start on the first 16-byte
    /// boundary after the previous page. If no page is compressed, `staged` becomes the chunk and is written without a
    /// copy.
    pub fn write_staged(
        &self,
        pages: &[(&PageInfo, usize, u32)],
        staged: &mut [u8],
    ) -> Result<Vec<ImageRef>> {
        let images = {
            let of_page = |(info, at, _): &(&'_ PageInfo, usize, u32)| &staged[*at..*at + info.len as usize];
            let contents = collected(pages.iter().map(|page| (page.0, of_page(page))))?;
            let sums = collected(pages.iter().map(|(.., sum)| *sum))?;
            let frames = self.compress(&contents)?;
            if frames.iter().any(Option::is_some) {
                return self.write_frames(&contents, &sums, &frames);
            }
            collected(pages.iter().map(|(info, _, sum)| new_image(info, *sum, None)))?
        };
        let chunk = self.append_chunk(&images)?;
        let head = self.encode_head(&chunk)?;
        staged[..head.len()].copy_from_slice(&head);
        let mut end = head.len();
        for (header, (_, at, _)) in chunk.images.iter().zip(pages) {
            let start = (header.image.offset - chunk.offset) as usize;
            assert!(start == *at, "a page that does not lie where its image does");
            staged[end..start].fill(0);
            end = start + header.image.stored_len as usize;
        }
        staged[end..chunk.len as usize].fill(0);
        self.write(chunk, staged)
    }

    /// Writes one chunk with the images of `pages`, all uncompressed.
    pub fn write_uncompressed(&self, pages: &[(&PageInfo, &[u8])]) -> Result<Vec<ImageRef>> {
        let sums = collected(pages.iter().map(|(_, bytes)| crc32fast::hash(bytes)))?;
        self.write_frames(pages, &sums, &collected(pages.iter().map(|_| None))?)
    }

    fn encode_head(&self, chunk: &Chunk) -> Result<Vec<u8>> {
        chunk.encode(self.store).map_err(Error::of_memory)
    }

    fn compress(&self, pages: &[(&PageInfo, &[u8])]) -> Result<Vec<Option<Vec<u8>>>> {
        let pages = collected(pages.iter().map(|(_, bytes)| *bytes))?;
        compress(self.compression, &pages, self.threads_max)
    }

    /// Writes one chunk of images with the given checksums. Some of the images are compressed.
    fn write_frames(
        &self,
        pages: &[(&PageInfo, &[u8])],
        sums: &[u32],
        frames: &[Option<Vec<u8>>],
    ) -> Result<Vec<ImageRef>> {
        assert!(pages.iter().all(|(info, bytes)| info.len == bytes.len() as u64));
        let images = pages.iter().zip(sums).zip(frames);
        let images = images.map(|(((info, _), sum), frames)| new_image(info, *sum, frames.as_deref()));
        let chunk = self.append_chunk(&collected(images)?)?;
        // The header, table, payloads and padding are assembled in one buffer and written with one call.
        let mut bytes = self.areas.lock().pop().unwrap_or_default();
        bytes.clear();
        make_room(&mut bytes, chunk.len as usize)?;
        bytes.extend_from_slice(&self.encode_head(&chunk)?);
        for (((_, page), frames), header) in pages.iter().zip(frames).zip(&chunk.images) {
            bytes.resize((header.image.offset - chunk.offset) as usize, 0);
            bytes.extend_from_slice(frames.as_deref().unwrap_or(page));
        }
        bytes.resize(chunk.len as usize, 0);
        let references = self.write(chunk, &bytes)?;
        if bytes.capacity() as u64 <= 2 * CHUNK_BYTES {
            self.areas.lock().push(bytes);
        }
        Ok(references)
    }

    /// Writes a chunk whose content is the first `chunk.len` bytes of `bytes`.
    fn write(&self, chunk: Chunk, bytes: &[u8]) -> Result<Vec<ImageRef>> {
        let (bytes, end) = (&bytes[..chunk.len as usize], chunk.offset + chunk.len);
        self.growing.write_at(chunk.offset, bytes).map_err(|error| no_space(self.number, end, error))?;
        // Starting the write now keeps the disk busy while the next chunks are created, and shortens the sync at the
        // end.
        self.growing.write_back(chunk.offset, chunk.len);
        let references = collected(chunk.images.iter().map(|header| header.image))?;
        push(&mut self.written.lock().chunks, chunk)?;
        Ok(references)
    }

    /// Reserves space in the file for a chunk with `images`, after all other chunks.
    fn append_chunk(&self, images: &[NewImage]) -> Result<Chunk> {
        let _no_other_appends = self.tail.lock();
        let mut written = self.written.lock();
        let chunk = Chunk::plan(self.number, written.end, images)
            .map_err(|defect| Error::from(defect.at(FileName::Pages(self.number), written.end)))?;
        // I7: if chunks of several threads shared bytes, one thread would overwrite bytes of another.
        assert!(chunk.offset >= written.end);
        written.end += chunk.len;
        Ok(chunk)
    }

    /// Returns the number of bytes of the file that were written or are being written.
    pub fn byte_len(&self) -> u64 {
        self.written.lock().end
    }

    /// Makes the image file and its name durable.
    pub fn sync(&self) -> Result<()> {
        self.sync_bytes()?;
        self.disk.sync_folder(Folder::Pages)
    }

    /// Makes the content of the image file durable, but not its name. No write may follow.
    fn sync_bytes(&self) -> Result<()> {
        let len = self.byte_len();
        self.growing.finish(len).map_err(|error| match error {
            // The file's space was already allocated, so this is a failure of the file system.
            Error::Io { action: IoAction::Sync, .. } if !self.growing.gets_space_at_sync() => error,
            error => no_space(self.number, len, error),
        })
    }

    /// Reads all chunks back from the medium and verifies them (I7). A device reads back the images that it copied to
    /// the memory of the file.
    pub fn verify(&self) -> Result<()> {
        let WrittenChunks { chunks, placed, .. } = &*self.written.lock();
        let is_long = |chunk: &Chunk| chunk.images.iter().any(|image| image.len > PIECE_BYTES);
        let short = chunks.iter().filter(|chunk| !is_long(chunk) && !placed.contains_key(&chunk.offset));
        let longest = short.map(|chunk| chunk.len).max().unwrap_or(0);
        let verify = |area: &mut AlignedBuf, index: usize| {
            if let Some(place) = placed.get(&chunks[index].offset) {
                return self.verify_in_place(&chunks[index], *place);
            }
            if is_long(&chunks[index]) && chunks[index].images.len() == 1 {
                return self.verify_long(&chunks[index]);
            }
            let len = chunks[index].len;
            if (area.len() as u64) < len {
                let made = AlignedBuf::try_new(len as usize);
                *area = made.ok_or(Error::OutOfMemory { place: Place::Host, len })?;
            }
            let len = len as usize;
            self.verify_chunk(&chunks[index], &mut area[..len])
        };
        let threads = chunk_threads(longest).min(self.threads_max);
        parallel::map_indexed(threads, chunks.len(), || AlignedBuf::new(0), verify).map(drop)
    }

    fn verify_chunk(&self, chunk: &Chunk, bytes: &mut [u8]) -> Result<()> {
        let file = FileName::Pages(self.number);
        self.file.read_bypassing_cache(chunk.offset, bytes)?;
        self.check_head(chunk, bytes)?;
        for ImageHeader { image, len, .. } in &chunk.images {
            let at = (image.offset - chunk.offset) as usize;
            // The log that could replace the image may be recycled once the snapshot is verified, so a checksum does
            // not suffice: the image must decode to the page.
            image
                .check_content(&bytes[at..at + image.stored_len as usize], *len)
                .map_err(|defect| defect.at(file, image.offset))?;
        }
        Ok(())
    }

    /// Checks that `bytes` begins with the chunk's header and table of images.
    fn check_head(&self, chunk: &Chunk, bytes: &[u8]) -> Result<()> {
        let damaged = |defect: Defect| Error::from(defect.at(FileName::Pages(self.number), chunk.offset));
        let header = ChunkHeader::decode(bytes).map_err(damaged)?;
        header.check_location(self.store, self.number, chunk.offset).map_err(damaged)?;
        if header.decode_table(bytes).map_err(damaged)? != *chunk {
            let what = "chunk that differs from the one written";
            return Err(damaged(Defect::Field { what, found: 0 }));
        }
        Ok(())
    }

    /// Removes the unfinished image file.
    pub fn abandon(self) {
        if let Err(error) = self.disk.remove(FileName::Pages(self.number)) {
            tracing::warn!(%error, "cannot remove an unfinished image file; the next open will");
        }
    }
}

/// Describes a page for the image writer. `crc` is the CRC-32 of the page's bytes. `frames` is the compressed form of
/// the page, or `None` if the page is stored uncompressed.
fn new_image(info: &PageInfo, crc: u32, frames: Option<&[u8]>) -> NewImage {
    let compressed =
        frames.map(|frames| CompressedBytes { len: frames.len() as u64, crc: crc32fast::hash(frames) });
    NewImage { page: info.page, epoch: info.epoch, lsn: info.lsn, len: info.len, crc, compressed }
}

/// Resizes `bytes` to `len` bytes. Returns an error if the allocation fails.
pub(crate) fn resize(bytes: &mut Vec<u8>, len: u64) -> Result<()> {
    make_room(bytes, (len as usize).saturating_sub(bytes.len()))?;
    bytes.resize(len as usize, 0);
    Ok(())
}

/// Converts an error for lack of space to an error that leaves the store unchanged. The store is unchanged because no
/// record names an image that is still being written.
fn no_space(number: u64, needed: u64, error: Error) -> Error {
    if error.is_no_space() { Error::disk_full(FileName::Pages(number), needed) } else { error }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_is_bounded_by_bytes_and_by_images() {
        for (why, lens, expected) in [
            ("nothing", vec![], 0),
            ("as many bytes as there may be", vec![CHUNK_BYTES / 2; 5], 2),
            ("one page that is too long", vec![CHUNK_BYTES + 1, 1], 1),
            ("empty pages before a long one", vec![0, 0, CHUNK_BYTES + 1, 1], 3),
            ("tiny pages", vec![1; 2 * CHUNK_IMAGES], CHUNK_IMAGES),
            ("empty pages", vec![0; 2 * CHUNK_IMAGES], CHUNK_IMAGES),
        ] {
            assert_eq!(next_chunk(CHUNK_BYTES, lens), expected, "{why}");
        }
    }
}
