//! Floor 5. Writing image files: pages' bytes in chunks, appended and synced before anything names them.
//!
//! A crash here loses nothing: an image file that no manifest, no table and no batch names is nobody's.

mod ahead;
mod compress;

use std::borrow::Cow;
use std::sync::Arc;

use remanent_format::image::{
    Chunk, ChunkHeader, Compressed, IMAGE_HEADER_BLOCK, ImageFileHeader, ImageHeader, ImagePurpose, ImageRef,
    NewImage,
};
use remanent_format::limits::CHUNK_IMAGES_MAX;
use remanent_format::{Defect, FileName, Folder, PageInfo, StoreId};

pub(crate) use self::ahead::WrittenAhead;
use self::compress::compress;
use crate::disk::{Disk, DiskFile};
use crate::error::{Error, Result};
use crate::options::Compression;

/// A chunk is written when its images reach this many bytes; a longer page has a chunk of its own.
const CHUNK_BYTES: u64 = 2 << 20;
/// Images of one chunk: a bound for stores of tiny pages.
const CHUNK_IMAGES: usize = 4096;
const _: () = assert!(CHUNK_IMAGES <= CHUNK_IMAGES_MAX as usize);

/// How many images, with these lengths in bytes, go into the next chunk: at least one, if there is one.
pub(crate) fn next_chunk(lens: impl IntoIterator<Item = u64>) -> usize {
    let mut bytes = 0;
    let fits = lens.into_iter().take(CHUNK_IMAGES).take_while(|len| {
        let fits = bytes == 0 || bytes + len <= CHUNK_BYTES;
        bytes += len;
        fits
    });
    fits.count()
}

/// Appends images to one new file.
pub(crate) struct ImageWriter {
    disk: Arc<dyn Disk>,
    store: StoreId,
    compression: Compression,
    number: u64,
    file: Arc<dyn DiskFile>,
    offset: u64,
    chunks: Vec<Chunk>,
}

impl ImageWriter {
    /// Begins image file `number`. No space is a clean failure here and in the following: who gets it
    /// abandons the file.
    pub fn create(
        disk: Arc<dyn Disk>,
        store: StoreId,
        number: u64,
        purpose: ImagePurpose,
        compression: Compression,
    ) -> Result<Self> {
        let name = FileName::Pages(number);
        let file = disk.create(name).map_err(|error| no_space(number, IMAGE_HEADER_BLOCK, error))?;
        let mut block = ImageFileHeader { store, file: number, purpose }.encode().to_vec();
        block.resize(IMAGE_HEADER_BLOCK as usize, 0);
        let (offset, chunks) = (IMAGE_HEADER_BLOCK, Vec::new());
        let writer = Self { disk, store, compression, number, file, offset, chunks };
        match writer.file.write_at(0, &block) {
            Ok(()) => Ok(writer),
            Err(error) => {
                writer.abandon();
                Err(no_space(number, IMAGE_HEADER_BLOCK, error))
            }
        }
    }

    /// Writes pages, none of them empty, chunk by chunk: `load` gives the bytes of each, by its index. No more
    /// than a chunk of them is held at a time. The references come back in the same order.
    pub fn write_pages<'b, E: From<Error>>(
        &mut self,
        pages: &[PageInfo],
        mut load: impl FnMut(usize) -> Result<Cow<'b, [u8]>, E>,
    ) -> Result<Vec<ImageRef>, E> {
        let mut references = Vec::with_capacity(pages.len());
        while references.len() < pages.len() {
            let first = references.len();
            let count = next_chunk(pages[first..].iter().map(|info| info.len));
            let contents = (first..first + count).map(&mut load).collect::<Result<Vec<_>, E>>()?;
            let chunk: Vec<(&PageInfo, &[u8])> =
                pages[first..].iter().zip(contents.iter().map(Cow::as_ref)).collect();
            references.extend(self.write_chunk(&chunk)?);
        }
        Ok(references)
    }

    /// Writes one chunk of images; the references come back in the same order.
    pub fn write_chunk(&mut self, pages: &[(&PageInfo, &[u8])]) -> Result<Vec<ImageRef>> {
        let contents: Vec<&[u8]> = pages.iter().map(|(_, bytes)| *bytes).collect();
        let frames = compress(self.compression, &contents);
        let images: Vec<NewImage> = pages
            .iter()
            .zip(&frames)
            .map(|((info, bytes), frames)| {
                assert!(info.len == bytes.len() as u64);
                let compressed = frames
                    .as_ref()
                    .map(|frames| Compressed { len: frames.len() as u64, crc: crc32fast::hash(frames) });
                NewImage {
                    page: info.page,
                    epoch: info.epoch,
                    lsn: info.lsn,
                    len: info.len,
                    crc: crc32fast::hash(bytes),
                    compressed,
                }
            })
            .collect();
        let chunk = Chunk::plan(self.number, self.offset, &images)
            .map_err(|defect| Error::from(defect.at(FileName::Pages(self.number), self.offset)))?;
        // One buffer, one write: header, table, payloads, padding.
        let mut bytes = chunk.encode(self.store);
        bytes.resize(chunk.len as usize, 0);
        for ((page, frames), header) in contents.iter().zip(&frames).zip(&chunk.images) {
            let payload = frames.as_deref().unwrap_or(page);
            let at = (header.image.offset - chunk.offset) as usize;
            bytes[at..at + payload.len()].copy_from_slice(payload);
        }
        let needed = self.offset + chunk.len;
        self.file.write_at(self.offset, &bytes).map_err(|error| no_space(self.number, needed, error))?;
        self.offset += chunk.len;
        let references = chunk.images.iter().map(|header| header.image).collect();
        self.chunks.push(chunk);
        Ok(references)
    }

    /// Bytes written so far.
    pub fn byte_len(&self) -> u64 {
        self.offset
    }

    /// Makes the file and its name durable.
    pub fn sync(&self) -> Result<()> {
        self.file.sync().map_err(|error| no_space(self.number, self.offset, error))?;
        self.disk.sync_folder(Folder::Pages)
    }

    /// Reads everything back past the cache and checks it (I7).
    pub fn verify(&self) -> Result<()> {
        let file = FileName::Pages(self.number);
        let mut bytes = Vec::new();
        for chunk in &self.chunks {
            bytes.resize(chunk.len as usize, 0);
            self.file.read_past_cache(chunk.offset, &mut bytes)?;
            let damaged = |defect: Defect| Error::from(defect.at(file, chunk.offset));
            let header = ChunkHeader::decode(&bytes).map_err(damaged)?;
            header.check_place(self.store, self.number, chunk.offset).map_err(damaged)?;
            let found = header.decode_table(&bytes).map_err(damaged)?;
            for ImageHeader { image, len, .. } in &found.images {
                let at = (image.offset - chunk.offset) as usize;
                // The log that could replace an image goes on its word: the page must come out of it.
                image
                    .check_content(&bytes[at..at + image.stored_len as usize], *len)
                    .map_err(|defect| defect.at(file, image.offset))?;
            }
            if found != *chunk {
                return Err(damaged(Defect::Field {
                    what: "chunk that differs from the one written",
                    found: 0,
                }));
            }
        }
        Ok(())
    }

    /// Removes the unfinished file.
    pub fn abandon(self) {
        if let Err(error) = self.disk.remove(FileName::Pages(self.number)) {
            tracing::warn!(%error, "cannot remove an unfinished image file; the next open will");
        }
    }
}

/// Where images are made, no space is a clean failure.
fn no_space(number: u64, needed: u64, error: Error) -> Error {
    if error.is_no_space() { Error::DiskFull { file: FileName::Pages(number), needed } } else { error }
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
            ("empty pages beside one", vec![0, 0, CHUNK_BYTES + 1, 1], 3),
            ("tiny pages", vec![1; 2 * CHUNK_IMAGES], CHUNK_IMAGES),
            ("empty pages", vec![0; 2 * CHUNK_IMAGES], CHUNK_IMAGES),
        ] {
            assert_eq!(next_chunk(lens), expected, "{why}");
        }
    }
}
