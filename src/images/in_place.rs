//! Image chunks whose images a device copies directly to the file's memory. The host only reserves space for a chunk
//! and writes its head.
//!
//! 1. **Reserve**: a chunk reserves space of its final length after all other chunks.
//! 2. **Copy**: the device copies the images to this space, and checksums the bytes that it sends
//!    (`snapshot/in_place.rs`).
//! 3. **Head**: the host writes the chunk's head, which contains the checksums, before the images.
//! 4. **Verify**: once the snapshot is published, the device checksums the bytes in the file (I7, I12). The pages'
//!    copies on the device are already freed. If the file contains other bytes, the next open starts from the previous
//!    snapshot.
//!
//! A crash in steps 1 to 3 leaves an unreferenced image file, whose chunks have no heads.

use remanent_format::image::{Chunk, ImageHeader, ImageRef};
use remanent_format::{FileName, PageInfo, Place};

use super::{ImageWriter, new_image, no_space};
use crate::base::aligned_buf::AlignedBuf;
use crate::base::allocation::{collected, push};
use crate::error::{Error, Result};
use crate::memory::arena::FileTarget;

impl ImageWriter {
    /// Returns the memory of the file if a device copies images to it, otherwise `None`.
    pub fn target(&self) -> Option<&FileTarget> {
        self.target.as_ref()
    }

    /// Reserves space for a chunk of `chunk_len` bytes, and returns the offset of the chunk in the file. Returns `None`
    /// if the chunk would not fit in the mapped part of the file. If the caller does not use the space, it remains
    /// without a chunk head, and no reader accesses it.
    pub fn take_place(&self, chunk_len: u64) -> Option<u64> {
        let reach = self.target.as_ref()?.byte_len();
        let _no_other_appends = self.tail.lock();
        let mut written = self.written.lock();
        let offset = written.end;
        let end = offset.checked_add(chunk_len).filter(|end| *end <= reach)?;
        written.end = end;
        Some(offset)
    }

    /// Writes the head of a chunk whose images are already in the file, and returns the references to the images in
    /// page order. `pages` contains each page with the CRC-32 that the device computed for its image.
    ///
    /// `from` is the place from which the device copied the images. `None` means that the device did not copy all
    /// images, and the host reads them back.
    pub fn finish_in_place(
        &self,
        offset: u64,
        chunk_len: u64,
        pages: &[(&PageInfo, u32)],
        from: Option<Place>,
    ) -> Result<Vec<ImageRef>> {
        let images = collected(pages.iter().map(|(info, sum)| new_image(info, *sum, None)))?;
        let chunk = Chunk::plan(self.number, offset, &images)
            .map_err(|defect| Error::from(defect.at(FileName::Pages(self.number), offset)))?;
        // I7: a chunk that is longer than its reserved space would overwrite the next chunk, which another thread
        // wrote.
        assert!(chunk.len == chunk_len, "a chunk that is not as long as its place");
        let head = self.encode_head(&chunk)?;
        self.growing
            .write_at(offset, &head)
            .map_err(|error| no_space(self.number, offset + chunk_len, error))?;
        let references = collected(chunk.images.iter().map(|header| header.image))?;
        let mut written = self.written.lock();
        from.and_then(|from| written.placed.insert(offset, from));
        push(&mut written.chunks, chunk)?;
        Ok(references)
    }

    /// Writes bytes at offset `at` of the file, for the parts of a chunk that no device copies.
    pub fn write_between(&self, at: u64, bytes: &[u8]) -> Result<()> {
        let end = at + bytes.len() as u64;
        self.growing.write_at(at, bytes).map_err(|error| no_space(self.number, end, error))
    }

    /// Verifies a chunk whose images a device copied from `from`. The host reads the chunk's head back, and the device
    /// reads the images back (I7). If the checksums differ, the device computes them once more, because a transient bit
    /// flip must not stop a store.
    pub(super) fn verify_in_place(&self, chunk: &Chunk, from: Place) -> Result<()> {
        let len = Chunk::head_len(chunk.images.len() as u64);
        let no_memory = || Error::OutOfMemory { place: Place::Host, len };
        let mut head = AlignedBuf::try_new(len as usize).ok_or_else(no_memory)?;
        self.file.read_bypassing_cache(chunk.offset, &mut head)?;
        self.check_head(chunk, &head)?;
        let target = self.target.as_ref().expect("a device copied to it");
        let range = |header: &ImageHeader| header.image.offset..header.image.offset + header.image.stored_len;
        let ranges = collected(chunk.images.iter().map(range))?;
        let is_as_sent = || {
            let sums = target.sums(from, &ranges)?;
            Ok::<_, Error>(sums.iter().eq(chunk.images.iter().map(|header| &header.image.stored_crc)))
        };
        if is_as_sent()? || is_as_sent()? { Ok(()) } else { Err(target.transfer_corrupted()) }
    }
}
