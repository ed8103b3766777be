//! An image that was proven whole once, and of which any range can then be read.
//!
//! An image has one checksum, so a part of it is proven only by all of it. The pass that proves it notes
//! where its pieces lie and what each of them sums to: some 24 bytes for each mebibyte of the page. What is
//! read later is held against these sums, so it is what was proven, or an error.
//!
//! Of an image that is stored as it is, a piece is a mebibyte. Of a compressed one it is the frames that make
//! at least as much of the page: a frame is read from its beginning. Frames of another writer may be longer,
//! and then more is decompressed than is asked for; memory is held for a few hundred KiB all the same.
//!
//! An overlay is proven as it is stored, and so is its base. Its table is held, some 24 bytes for each of its
//! pieces: it says what lies over what.

use std::ops::ControlFlow;
use std::sync::Arc;

use super::codec::decompress_frames;
use super::read::{
    CHECKED_AT_ONCE, StoredBytes, check_lies, copy_common, read_overlay, stream_stored, unreadable,
};
use super::{Codec, ImageRef, Overlay, sum_after_change};
use crate::defect::{Damage, Defect, reserve, zeros};
use crate::names::{FileName, ReadAt};

/// Bytes of the page that a piece has, at least, unless it is the last one.
const PIECE_LEN: u64 = CHECKED_AT_ONCE;

/// A part of an image that is proven on its own.
#[derive(Clone, Copy, Debug)]
struct Piece {
    /// Where it begins: bytes from the page's start, and from the payload's.
    page_at: u64,
    stored_at: u64,
    /// CRC-32 of the page's bytes.
    sum: u32,
}

/// An image that was proven whole, with the sums of its pieces.
#[derive(Clone, Debug)]
pub struct ProvenImage {
    image: ImageRef,
    len: u64,
    /// Of an overlay there are none: its payload and its base have theirs.
    pieces: Vec<Piece>,
    overlaid: Option<Box<ProvenOverlay>>,
}

/// An overlay that was proven with its base.
#[derive(Clone, Debug)]
struct ProvenOverlay {
    base: Arc<ProvenImage>,
    /// Its payload, as if that were a page's image.
    payload: ProvenImage,
    overlay: Overlay,
}

impl ProvenImage {
    /// Proves the image of a page of length `len`. A compressed one is read twice, because it is
    /// checked as it is stored first.
    ///
    /// # Errors
    /// [`Damage`] if it is missing, cut short or damaged, or there is no memory.
    pub fn prove(source: &dyn ReadAt, image: &ImageRef, len: u64) -> Result<Self, Damage> {
        Self::prove_over(source, image, len, None)
    }

    /// As [`prove`](Self::prove). If the image is an overlay, and `known` what it lies over, that is not read
    /// again.
    ///
    /// # Errors
    /// As for [`prove`](Self::prove).
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
        Ok(Self { image: *image, len, pieces: Vec::new(), overlaid: Some(proven) })
    }

    /// The image whose pieces are read where no overlay has any: itself, if it is none.
    #[must_use]
    pub fn base(self: &Arc<Self>) -> Arc<Self> {
        self.overlaid.as_ref().map_or_else(|| self.clone(), |overlaid| overlaid.base.clone())
    }

    /// The overlay, if it is one.
    #[must_use]
    pub fn overlay(&self) -> Option<&Overlay> {
        self.overlaid.as_ref().map(|overlaid| &overlaid.overlay)
    }

    /// What manifests say of it.
    #[must_use]
    pub fn image(&self) -> &ImageRef {
        &self.image
    }

    fn prove_whole(source: &dyn ReadAt, image: &ImageRef, len: u64) -> Result<Self, Damage> {
        let (file, offset) = (FileName::Pages(image.file), image.offset);
        let at = |defect: Defect| defect.at(file, offset);
        check_lies(source, image, len).map_err(at)?;
        let mut pieces = Pieces::with_room(len).map_err(at)?;
        if image.codec == Codec::Raw {
            stream_stored(source, image, |piece| -> Result<(), Damage> {
                pieces.add(piece);
                pieces.end(pieces.page_at);
                Ok(())
            })?;
        } else {
            stream_stored(source, image, |_| -> Result<(), Damage> { Ok(()) })?;
            let mut stored = StoredBytes::of(source, image, 0, CHECKED_AT_ONCE).map_err(at)?;
            let decompressed = decompress_frames(&mut stored, len, |bytes, frame_end| {
                pieces.add(bytes);
                if let Some(stored_at) = frame_end
                    && pieces.page_at - pieces.start.page_at >= PIECE_LEN
                {
                    pieces.end(stored_at);
                }
                ControlFlow::Continue(())
            });
            stored.refused.map_or(Ok(()), |defect| Err(at(defect)))?;
            decompressed.map_err(at)?;
            pieces.end(image.stored_len);
        }
        let (found, computed) = (image.raw_crc, pieces.whole.finalize());
        if found != computed {
            return Err(at(Defect::Checksum { what: "page", found, computed }));
        }
        Ok(Self { image: *image, len, pieces: pieces.done, overlaid: None })
    }

    /// Its file, and where it begins there.
    #[must_use]
    pub fn location(&self) -> (FileName, u64) {
        (FileName::Pages(self.image.file), self.image.offset)
    }

    /// Reads the page's bytes from `offset` on. They are those that were proven.
    ///
    /// # Errors
    /// [`Damage`] if the image is not what it was. What `out` holds then does not count.
    ///
    /// # Panics
    /// If the page does not have these bytes.
    pub fn read(&self, source: &dyn ReadAt, offset: u64, out: &mut [u8]) -> Result<(), Damage> {
        let end = offset.checked_add(out.len() as u64).filter(|end| *end <= self.len);
        let end = end.expect("a range of the page");
        if out.is_empty() {
            return Ok(());
        }
        if let Some(overlaid) = &self.overlaid {
            return overlaid.read(source, offset, out);
        }
        let (file, image_at) = self.location();
        let at = |defect: Defect| defect.at(file, image_at);
        let first = self.pieces.partition_point(|piece| piece.page_at <= offset) - 1;
        let last = self.pieces.partition_point(|piece| piece.page_at < end);
        let stop = self.pieces.get(last).map_or(self.len, |piece| piece.page_at);
        let mut wanted = self.pieces[first..last].iter();
        let start = wanted.as_slice()[0];
        let (mut done, mut sum, mut refused) = (start.page_at, crc32fast::Hasher::new(), None);
        let mut take = |mut bytes: &[u8]| {
            while let Some(piece) = wanted.as_slice().first() {
                let piece_end = wanted.as_slice().get(1).map_or(stop, |next| next.page_at);
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
                (bytes, _) = (rest, wanted.next());
            }
            ControlFlow::Break(())
        };
        let read = if self.image.codec == Codec::Raw {
            let mut piece = zeros(PIECE_LEN.min(stop - start.page_at)).map_err(at)?;
            let mut from = start.page_at;
            loop {
                let piece = &mut piece[..PIECE_LEN.min(stop - from) as usize];
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
        self.lay_over(source, offset, out)
    }

    fn lay_over(&self, source: &dyn ReadAt, offset: u64, bytes: &mut [u8]) -> Result<(), Damage> {
        let (file, image_at) = self.payload.location();
        let read = |stored_at, part: &mut [u8]| self.payload.read(source, stored_at, part);
        self.overlay.lay_over(offset, bytes, read, |defect| defect.at(file, image_at))
    }

    /// CRC-32 of the page's bytes, which are `len`. Of the base, what is near a piece is read once.
    fn sum(&self, source: &dyn ReadAt, len: u64) -> Result<u32, Damage> {
        let (file, image_at) = self.payload.location();
        let (mut sum, mut bytes, mut summed_to) = (self.base.image.raw_crc, Vec::new(), 0);
        for piece in self.overlay.pieces() {
            for at in (piece.start - piece.start % PIECE_LEN..piece.end).step_by(PIECE_LEN as usize) {
                if at < summed_to {
                    continue;
                }
                let window = at..len.min(at + PIECE_LEN);
                summed_to = window.end;
                bytes.clear();
                reserve(&mut bytes, window.end - at).map_err(|defect| defect.at(file, image_at))?;
                bytes.resize((window.end - at) as usize, 0);
                self.base.read(source, at, &mut bytes)?;
                let was = crc32fast::hash(&bytes);
                self.lay_over(source, at, &mut bytes)?;
                sum = sum_after_change(sum, len, window, was, crc32fast::hash(&bytes));
            }
        }
        Ok(sum)
    }
}

/// Bytes of a compressed image that are read at a time where a part of it is wanted.
const DECOMPRESSED_FROM: u64 = 256 << 10;

/// The pieces of an image while it is proven.
struct Pieces {
    done: Vec<Piece>,
    start: Piece,
    sum: crc32fast::Hasher,
    /// The page's bytes so far.
    page_at: u64,
    whole: crc32fast::Hasher,
}

impl Pieces {
    fn with_room(len: u64) -> Result<Self, Defect> {
        let mut done = Vec::new();
        let count = len.div_ceil(PIECE_LEN);
        let needed = count * size_of::<Piece>() as u64;
        done.try_reserve_exact(count as usize).map_err(|_| Defect::Memory { needed })?;
        let start = Piece { page_at: 0, stored_at: 0, sum: 0 };
        let (sum, whole) = (crc32fast::Hasher::new(), crc32fast::Hasher::new());
        Ok(Self { done, start, sum, page_at: 0, whole })
    }

    fn add(&mut self, bytes: &[u8]) {
        self.sum.update(bytes);
        self.page_at += bytes.len() as u64;
    }

    /// Here a piece ends, if it has any bytes. The next one begins at `stored_at` in the payload.
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
