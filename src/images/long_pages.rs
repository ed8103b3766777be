//! Images of long pages. They are written piece by piece, so that only one piece is in memory at a time.
//!
//! The length of the image is known only after its last piece is compressed. Therefore no other chunk is appended to
//! the file in the meantime, and the chunk's head, which states the length, is written last. An abandoned image leaves
//! bytes that no head describes. The next chunk overwrites these bytes, or no reader accesses them.
//!
//! A crash here leaves an unreferenced image file, as with any other chunk.

use std::ops::Range;

use remanent_format::image::read::stream_image;
use remanent_format::image::{COMPRESSED_PIECE_LEN, Chunk, CompressedBytes, ImageRef, NewImage};
use remanent_format::{Damage, FileName, PageInfo};

use super::compress::{compress_pieces, pays, pays_by_samples_of, sample_ranges};
use super::{ImageWriter, no_space};
use crate::base::aligned_buf::AlignedBuf;
use crate::disk::source::DiskSource;
use crate::error::{Error, Result};
use crate::options::Compression;

/// The maximum number of bytes of a page that are in memory at a time. A page of at most this length is processed as a
/// whole.
pub(crate) const PIECE_BYTES: u64 = 4 << 20;

/// A function that receives the bytes of one range of a page, and the CRC-32 of these bytes.
pub(crate) type Sink<'s> = &'s mut dyn FnMut(&[u8], u32) -> Result<()>;

/// Whether a [`PieceSource`] may be called again for the same bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadPass {
    /// The caller may request the bytes again: they are only a sample, or the page will be stored uncompressed if
    /// compression does not save enough.
    First,
    /// Neither these bytes nor earlier bytes of the page will be requested again.
    Last,
}

/// A function that passes the bytes of a range of a page to a sink. Returns `false` if the bytes no longer exist.
pub(crate) type PieceSource<'s, E = Error> =
    &'s mut dyn FnMut(Range<u64>, ReadPass, Sink<'_>) -> Result<bool, E>;

/// Returns the ranges of a page of `len` bytes that are processed one at a time.
fn pieces(len: u64, piece_len: u64) -> impl Iterator<Item = Range<u64>> {
    (0..len).step_by(piece_len as usize).map(move |from| from..len.min(from.saturating_add(piece_len)))
}

impl ImageWriter {
    /// Writes one non-empty page as a separate chunk, and returns the reference to its image. Returns `None` without
    /// writing an image if the source could no longer provide the bytes.
    pub fn write_long<E: From<Error>>(
        &self,
        info: &PageInfo,
        piece_len: u64,
        source: PieceSource<'_, E>,
    ) -> Result<Option<ImageRef>, E> {
        let _no_other_appends = self.tail.lock();
        if self.compression != Compression::Off {
            let mut samples = Vec::new();
            for range in sample_ranges(info.len) {
                let is_there = source(range, ReadPass::First, &mut |bytes, _| {
                    samples.push(bytes.to_vec());
                    Ok(())
                })?;
                if !is_there {
                    return Ok(None);
                }
            }
            if pays_by_samples_of(&samples) {
                match self.stream(info, piece_len, source, true)? {
                    Streamed::Image(image) => return Ok(Some(image)),
                    Streamed::Gone => return Ok(None),
                    Streamed::DoesNotPay => {}
                }
            }
        }
        self.stream_uncompressed(info, piece_len, source)
    }

    /// Writes a page that is in memory as a separate chunk, like [`write_long`](Self::write_long).
    pub(super) fn write_long_page(&self, info: &PageInfo, bytes: &[u8]) -> Result<ImageRef> {
        assert!(info.len == bytes.len() as u64);
        let mut source = |range: Range<u64>, _: ReadPass, sink: Sink<'_>| {
            let bytes = &bytes[range.start as usize..range.end as usize];
            sink(bytes, crc32fast::hash(bytes)).map(|()| true) as Result<bool>
        };
        let written = self.write_long(info, PIECE_BYTES, &mut source)?;
        Ok(written.expect("the bytes are at hand"))
    }

    /// Writes bytes of any length as a separate, uncompressed chunk, like [`write_long`](Self::write_long).
    pub fn write_uncompressed_stream<E: From<Error>>(
        &self,
        info: &PageInfo,
        piece_len: u64,
        source: PieceSource<'_, E>,
    ) -> Result<Option<ImageRef>, E> {
        let _no_other_appends = self.tail.lock();
        self.stream_uncompressed(info, piece_len, source)
    }

    fn stream_uncompressed<E: From<Error>>(
        &self,
        info: &PageInfo,
        piece_len: u64,
        source: PieceSource<'_, E>,
    ) -> Result<Option<ImageRef>, E> {
        match self.stream(info, piece_len, source, false)? {
            Streamed::Image(image) => Ok(Some(image)),
            Streamed::Gone | Streamed::DoesNotPay => Ok(None),
        }
    }

    fn stream<E: From<Error>>(
        &self,
        info: &PageInfo,
        piece_len: u64,
        source: PieceSource<'_, E>,
        is_compressed: bool,
    ) -> Result<Streamed, E> {
        let start = self.written.lock().end;
        let payload = start + Chunk::head_len(1);
        let full = |end: u64| move |error: Error| no_space(self.number, end, error);
        let (mut raw, mut stored) = (crc32fast::Hasher::new(), crc32fast::Hasher::new());
        let mut at = payload;
        for range in pieces(info.len, piece_len) {
            let (wanted, mut pays_so_far) = (range.end - range.start, true);
            let from = at;
            let pass = if is_compressed { ReadPass::First } else { ReadPass::Last };
            let is_there = source(range, pass, &mut |bytes, sum| {
                assert!(bytes.len() as u64 == wanted);
                raw.combine(&crc32fast::Hasher::new_with_initial_len(sum, wanted));
                if !is_compressed {
                    let end = at + wanted;
                    self.growing.write_at(at, bytes).map_err(full(end))?;
                    at = end;
                    return Ok(());
                }
                let starts = (0..bytes.len()).step_by(COMPRESSED_PIECE_LEN);
                let parts: Vec<(usize, Range<usize>)> =
                    starts.map(|from| (0, from..bytes.len().min(from + COMPRESSED_PIECE_LEN))).collect();
                for frame in compress_pieces(&[bytes], &parts, self.threads_max) {
                    // A page that could not be compressed is stored uncompressed, which is always valid.
                    let Some(frame) = frame else {
                        pays_so_far = false;
                        return Ok(());
                    };
                    stored.update(&frame);
                    let end = at + frame.len() as u64;
                    self.growing.write_at(at, &frame).map_err(full(end))?;
                    at = end;
                }
                pays_so_far = pays(info.len, at - payload);
                Ok(())
            })?;
            if !is_there {
                return Ok(Streamed::Gone);
            }
            if !pays_so_far {
                return Ok(Streamed::DoesNotPay);
            }
            // Starting the write now keeps the disk busy while the next piece is compressed, and shortens the sync at
            // the end.
            self.growing.write_back(from, at - from);
        }
        let image = NewImage {
            page: info.page,
            epoch: info.epoch,
            lsn: info.lsn,
            len: info.len,
            crc: raw.finalize(),
            compressed: is_compressed.then(|| CompressedBytes { len: at - payload, crc: stored.finalize() }),
        };
        let chunk = Chunk::plan(self.number, start, &[image])
            .map_err(|defect| Error::from(defect.at(FileName::Pages(self.number), start)))?;
        let end = chunk.offset + chunk.len;
        assert!(end >= at); // I7: the head, which is written last, covers every byte of the image.
        let padding = vec![0; (end - at) as usize];
        self.growing.write_at(at, &padding).map_err(full(end))?;
        self.growing.write_at(start, &self.encode_head(&chunk)?).map_err(full(end))?;
        let image = chunk.images[0].image;
        let mut written = self.written.lock();
        written.end = end;
        written.chunks.push(chunk);
        Ok(Streamed::Image(image))
    }

    /// Reads the chunk of a long page back from the medium and verifies it (I7).
    pub(super) fn verify_long(&self, chunk: &Chunk) -> Result<()> {
        let mut head = AlignedBuf::new(Chunk::head_len(1) as usize);
        self.file.read_bypassing_cache(chunk.offset, &mut head)?;
        self.check_head(chunk, &head)?;
        let source = DiskSource::bypassing_cache(self.disk.clone());
        let header = &chunk.images[0];
        stream_image(&source, &header.image, header.len, |_| Ok::<_, Damage>(()))?;
        Ok(())
    }
}

/// The outcome of writing an image piece by piece.
enum Streamed {
    Image(ImageRef),
    /// The source could no longer provide the bytes of the page.
    Gone,
    /// No image was written, because compression does not save enough space.
    DoesNotPay,
}
