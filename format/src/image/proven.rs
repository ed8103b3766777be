//! Images whose bytes are verified once. Parts of such an image can then be read without reading the whole image.
//!
//! An image has one checksum, so proving any part of the image requires all of its bytes. The first read records the
//! checksums of pieces. Later reads verify these checksums, and return the proven bytes or an error.
//!
//! A piece of an uncompressed image has 64 KiB, and its record takes four bytes. A piece of a compressed image consists
//! of the frames that contain at least 1 MiB of the page. Its record takes 24 bytes, because frames must be read from
//! their start. Another writer may have produced longer frames. A read from such a frame decompresses more than was
//! requested, but needs only a few hundred KiB of memory.
//!
//! Proving an overlay proves its payload and its base. The table of the overlay stays in memory with about 24 bytes per
//! piece, because it determines which bytes of the page come from the overlay.

use std::ops::ControlFlow;
use std::sync::Arc;

use super::codec::decompress_frames;
use super::read::{
    CHECKED_AT_ONCE, StoredBytes, check_lies, copy_common, read_overlay, read_stored, stream_stored,
    unreadable,
};
use super::{Codec, ImageRef, Overlay, sum_after_change};
use crate::defect::{Damage, Defect, reserve, zeros};
use crate::names::{FileName, ReadAt};

/// Length of a piece of an uncompressed image in bytes. The last piece may be shorter.
const PIECE_LEN: u64 = 64 << 10;
/// Minimum number of page bytes in a piece of a compressed image, except the last piece.
const FRAMES_LEN: u64 = CHECKED_AT_ONCE;

/// Checksums of the pieces of an image, which verify later reads.
#[derive(Clone, Debug)]
enum Pieces {
    /// CRC-32 of every [`PIECE_LEN`] bytes of an uncompressed image.
    Even(Vec<u32>),
    /// Pieces of a compressed image, in the order of their offsets.
    Frames(Vec<Piece>),
}

/// A part of a compressed image that has its own checksum.
#[derive(Clone, Copy, Debug)]
struct Piece {
    /// Offset of the piece in the page, in bytes.
    page_at: u64,
    stored_at: u64,
    /// CRC-32 of the page bytes in the piece.
    sum: u32,
}

impl Pieces {
    fn get(&self, number: usize) -> Option<Piece> {
        match self {
            Self::Even(sums) => {
                let at = number as u64 * PIECE_LEN;
                sums.get(number).map(|sum| Piece { page_at: at, stored_at: at, sum: *sum })
            }
            Self::Frames(pieces) => pieces.get(number).copied(),
        }
    }

    /// Returns the index of the piece that contains the byte at `offset` of the page.
    fn number_at(&self, offset: u64) -> usize {
        match self {
            Self::Even(_) => (offset / PIECE_LEN) as usize,
            Self::Frames(pieces) => pieces.partition_point(|piece| piece.page_at <= offset) - 1,
        }
    }
}

/// An image whose bytes were verified, with the checksums of its pieces. Later reads of parts of the image are verified
/// against these checksums.
#[derive(Clone, Debug)]
pub struct ProvenImage {
    image: ImageRef,
    len: u64,
    /// Checksums of the pieces. Empty for an overlay, whose pieces are in `overlay_proof`.
    pieces: Pieces,
    overlay_proof: Option<Box<ProvenOverlay>>,
}

/// An overlay that was proven together with its base.
#[derive(Clone, Debug)]
struct ProvenOverlay {
    base: Arc<ProvenImage>,
    /// The payload of the overlay. It is proven like the image of a page.
    payload: ProvenImage,
    overlay: Overlay,
}

impl ProvenImage {
    /// Reads and proves the image of a page of length `len`. A compressed image is read twice, because its stored
    /// payload is verified before it is decompressed.
    ///
    /// # Errors
    /// Returns [`Damage`] if the image is missing, truncated or damaged, or if there is not enough memory.
    pub fn prove(source: &dyn ReadAt, image: &ImageRef, len: u64) -> Result<Self, Damage> {
        Self::prove_over(source, image, len, None)
    }

    /// Proves an image as [`prove`](Self::prove) does. If the image is an overlay over the proven base `known`, this
    /// method does not read most of the base again.
    ///
    /// # Errors
    /// Returns the same [`Damage`] as [`prove`](Self::prove).
    pub fn prove_over(
        source: &dyn ReadAt,
        image: &ImageRef,
        len: u64,
        known: Option<&Arc<Self>>,
    ) -> Result<Self, Damage> {
        match image.codec {
            Codec::Raw | Codec::Zstd => Self::prove_whole(source, image, len),
            Codec::Overlay(_) => Self::prove_overlay(source, image, len, known),
        }
    }

    fn prove_overlay(
        source: &dyn ReadAt,
        image: &ImageRef,
        len: u64,
        known: Option<&Arc<Self>>,
    ) -> Result<Self, Damage> {
        let at = |defect: Defect| defect.at(FileName::Pages(image.file), image.offset);
        image.check(len).map_err(at)?;
        let stored = ImageRef { raw_crc: image.stored_crc, codec: Codec::Raw, ..*image };
        let payload = Self::prove_whole(source, &stored, image.stored_len)?;
        let overlay = read_overlay(source, image, len)?;
        let base = match known.filter(|known| known.image == *overlay.base()) {
            Some(known) => known.clone(),
            None => Arc::new(Self::prove_whole(source, overlay.base(), len)?),
        };
        let proven = Box::new(ProvenOverlay { base, payload, overlay });
        let (found, computed) = (image.raw_crc, proven.sum(source, len)?);
        if found != computed {
            return Err(at(Defect::Checksum { what: "page", found, computed }));
        }
        Ok(Self { image: *image, len, pieces: Pieces::Even(Vec::new()), overlay_proof: Some(proven) })
    }

    /// Returns the base image if this image is an overlay, otherwise this image.
    #[must_use]
    pub fn base(self: &Arc<Self>) -> Arc<Self> {
        self.overlay_proof.as_ref().map_or_else(|| self.clone(), |overlay_proof| overlay_proof.base.clone())
    }

    /// Returns the header and the table of the overlay, or `None` if this image is not an overlay.
    #[must_use]
    pub fn overlay(&self) -> Option<&Overlay> {
        self.overlay_proof.as_ref().map(|overlay_proof| &overlay_proof.overlay)
    }

    /// Returns the reference to the image that was proven.
    #[must_use]
    pub fn image(&self) -> &ImageRef {
        &self.image
    }

    fn prove_whole(source: &dyn ReadAt, image: &ImageRef, len: u64) -> Result<Self, Damage> {
        let (file, offset) = (FileName::Pages(image.file), image.offset);
        let at = |defect: Defect| defect.at(file, offset);
        check_lies(source, image, len).map_err(at)?;
        let (pieces, computed) = match image.codec {
            Codec::Raw => Self::sum_stored(source, image)?,
            _ => Self::sum_frames(source, image, len)?,
        };
        if image.raw_crc != computed {
            return Err(at(Defect::Checksum { what: "page", found: image.raw_crc, computed }));
        }
        Ok(Self { image: *image, len, pieces, overlay_proof: None })
    }

    /// Reads an uncompressed image. Returns the checksums of its pieces, and the checksum of the whole image.
    fn sum_stored(source: &dyn ReadAt, image: &ImageRef) -> Result<(Pieces, u32), Damage> {
        let at = |defect: Defect| defect.at(FileName::Pages(image.file), image.offset);
        let (mut sums, mut whole) = (Vec::new(), crc32fast::Hasher::new());
        reserve_items(&mut sums, image.stored_len.div_ceil(PIECE_LEN)).map_err(at)?;
        read_stored(source, image, |bytes| -> Result<(), Damage> {
            for piece in bytes.chunks(PIECE_LEN as usize) {
                let mut sum = crc32fast::Hasher::new();
                sum.update(piece);
                whole.combine(&sum);
                sums.push(sum.finalize());
            }
            Ok(())
        })?;
        let (found, computed) = (image.stored_crc, whole.finalize());
        if found != computed {
            return Err(at(Defect::Checksum { what: "image", found, computed }));
        }
        Ok((Pieces::Even(sums), computed))
    }

    /// Reads a compressed image. Returns the checksums of its pieces, and the checksum of the whole page.
    fn sum_frames(source: &dyn ReadAt, image: &ImageRef, len: u64) -> Result<(Pieces, u32), Damage> {
        let at = |defect: Defect| defect.at(FileName::Pages(image.file), image.offset);
        stream_stored(source, image, |_| -> Result<(), Damage> { Ok(()) })?;
        let mut frames = FrameSums::with_room(len).map_err(at)?;
        let mut stored = StoredBytes::of(source, image, 0, CHECKED_AT_ONCE).map_err(at)?;
        let decompressed = decompress_frames(&mut stored, len, |bytes, frame_end| {
            frames.add(bytes);
            if let Some(stored_at) = frame_end
                && frames.page_at - frames.start.page_at >= FRAMES_LEN
            {
                frames.end(stored_at);
            }
            ControlFlow::Continue(())
        });
        stored.refused.map_or(Ok(()), |defect| Err(at(defect)))?;
        decompressed.map_err(at)?;
        frames.end(image.stored_len);
        Ok((Pieces::Frames(frames.done), frames.whole.finalize()))
    }

    /// Returns the recommended length of a read, in bytes of the page. Reads that start at multiples of this length are
    /// fastest.
    #[must_use]
    pub fn window_len(&self) -> u64 {
        match &self.overlay_proof {
            Some(overlay_proof) => overlay_proof.base.window_len(),
            None if matches!(self.pieces, Pieces::Even(_)) => PIECE_LEN,
            None => FRAMES_LEN,
        }
    }

    /// Returns the image file, and the offset of the payload in the file.
    #[must_use]
    pub fn location(&self) -> (FileName, u64) {
        (FileName::Pages(self.image.file), self.image.offset)
    }

    /// Reads proven bytes of the page from `offset` on.
    ///
    /// # Errors
    /// Returns [`Damage`] if the image has changed since it was proven. The contents of `out` are then unspecified.
    ///
    /// # Panics
    /// Panics if the range exceeds the page.
    pub fn read(&self, source: &dyn ReadAt, offset: u64, out: &mut [u8]) -> Result<(), Damage> {
        let end = offset.checked_add(out.len() as u64).filter(|end| *end <= self.len);
        let end = end.expect("a range of the page");
        if out.is_empty() {
            return Ok(());
        }
        if let Some(overlay_proof) = &self.overlay_proof {
            return overlay_proof.read(source, offset, out);
        }
        let (file, image_at) = self.location();
        let at = |defect: Defect| defect.at(file, image_at);
        let (mut number, last) = (self.pieces.number_at(offset), self.pieces.number_at(end - 1));
        let end_of = |number: usize| self.pieces.get(number + 1).map_or(self.len, |next| next.page_at);
        let start = self.pieces.get(number).expect("a piece has it");
        let stop = end_of(last);
        let (mut done, mut sum, mut refused) = (start.page_at, crc32fast::Hasher::new(), None);
        let mut take = |mut bytes: &[u8]| {
            while let Some(piece) = self.pieces.get(number).filter(|_| number <= last) {
                let piece_end = end_of(number);
                let (of_piece, rest) = bytes.split_at(bytes.len().min((piece_end - done) as usize));
                sum.update(of_piece);
                copy_common(out, offset, of_piece, done);
                done += of_piece.len() as u64;
                if done < piece_end {
                    return ControlFlow::Continue(());
                }
                let computed = std::mem::take(&mut sum).finalize();
                if computed != piece.sum {
                    refused = Some(Defect::Checksum { what: "piece of a page", found: piece.sum, computed });
                    return ControlFlow::Break(());
                }
                (bytes, number) = (rest, number + 1);
            }
            ControlFlow::Break(())
        };
        let read = if self.image.codec == Codec::Raw {
            let mut piece = zeros(CHECKED_AT_ONCE.min(stop - start.page_at)).map_err(at)?;
            let mut from = start.page_at;
            loop {
                let piece = &mut piece[..CHECKED_AT_ONCE.min(stop - from) as usize];
                source.read_at(file, image_at + from, piece).map_err(|error| at(unreadable(error)))?;
                from += piece.len() as u64;
                if take(piece).is_break() {
                    break Ok(());
                }
            }
        } else {
            let stored = StoredBytes::of(source, &self.image, start.stored_at, DECOMPRESSED_FROM);
            let mut stored = stored.map_err(at)?;
            let decompressed =
                decompress_frames(&mut stored, self.len - start.page_at, |bytes, _| take(bytes));
            stored.refused.map_or(decompressed, Err)
        };
        match refused {
            Some(defect) => Err(at(defect)),
            None => read.map_err(at),
        }
    }
}

impl ProvenOverlay {
    fn read(&self, source: &dyn ReadAt, offset: u64, out: &mut [u8]) -> Result<(), Damage> {
        let range = offset..offset + out.len() as u64;
        let is_covered = self.overlay.pieces_in(range.clone()).next().is_some_and(|(_, part)| part == range);
        if !is_covered {
            self.base.read(source, offset, out)?;
        }
        self.apply_pieces(source, offset, out)
    }

    fn apply_pieces(&self, source: &dyn ReadAt, offset: u64, bytes: &mut [u8]) -> Result<(), Damage> {
        let (file, image_at) = self.payload.location();
        let read = |stored_at, part: &mut [u8]| self.payload.read(source, stored_at, part);
        self.overlay.apply_pieces(offset, bytes, read, |defect| defect.at(file, image_at))
    }

    /// Computes the CRC-32 of a page of `len` bytes. Of an uncompressed base, only windows that the pieces of the
    /// overlay partly cover are read. Of a compressed base, all windows that the pieces touch are read.
    fn sum(&self, source: &dyn ReadAt, len: u64) -> Result<u32, Damage> {
        let (file, image_at) = self.payload.location();
        let (mut sum, mut bytes, mut summed_to) = (self.base.image.raw_crc, Vec::new(), 0);
        let window_len = self.base.window_len();
        for piece in self.overlay.pieces() {
            for at in (piece.start - piece.start % window_len..piece.end).step_by(window_len as usize) {
                if at < summed_to {
                    continue;
                }
                let window = at..len.min(at + window_len);
                summed_to = window.end;
                bytes.clear();
                reserve(&mut bytes, window.end - at).map_err(|defect| defect.at(file, image_at))?;
                bytes.resize((window.end - at) as usize, 0);
                let was = match &self.base.pieces {
                    Pieces::Even(sums) => {
                        self.read(source, at, &mut bytes)?;
                        sums[(at / PIECE_LEN) as usize]
                    }
                    Pieces::Frames(_) => {
                        self.base.read(source, at, &mut bytes)?;
                        let was = crc32fast::hash(&bytes);
                        self.apply_pieces(source, at, &mut bytes)?;
                        was
                    }
                };
                sum = sum_after_change(sum, len, window, was, crc32fast::hash(&bytes));
            }
        }
        Ok(sum)
    }
}

/// Number of compressed bytes that are read at a time to decompress a part of an image.
const DECOMPRESSED_FROM: u64 = 256 << 10;

/// Computes the checksums of the pieces of a compressed image while its frames are decompressed.
struct FrameSums {
    done: Vec<Piece>,
    start: Piece,
    sum: crc32fast::Hasher,
    /// Number of page bytes that were decompressed so far.
    page_at: u64,
    whole: crc32fast::Hasher,
}

impl FrameSums {
    fn with_room(len: u64) -> Result<Self, Defect> {
        let mut done = Vec::new();
        reserve_items(&mut done, len.div_ceil(FRAMES_LEN))?;
        let start = Piece { page_at: 0, stored_at: 0, sum: 0 };
        let (sum, whole) = (crc32fast::Hasher::new(), crc32fast::Hasher::new());
        Ok(Self { done, start, sum, page_at: 0, whole })
    }

    fn add(&mut self, bytes: &[u8]) {
        self.sum.update(bytes);
        self.page_at += bytes.len() as u64;
    }

    /// Ends the current piece unless it is empty. The next piece starts at `stored_at` in the payload.
    fn end(&mut self, stored_at: u64) {
        let Self { done, start, sum, page_at, whole } = self;
        if start.page_at < *page_at {
            let sum = std::mem::take(sum);
            whole.combine(&sum);
            done.push(Piece { sum: sum.finalize(), ..*start });
            *start = Piece { page_at: *page_at, stored_at, sum: 0 };
        }
    }
}

fn reserve_items<T>(items: &mut Vec<T>, count: u64) -> Result<(), Defect> {
    let needed = count * size_of::<T>() as u64;
    items.try_reserve_exact(count as usize).map_err(|_| Defect::Memory { needed })
}
