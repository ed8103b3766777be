//! An image that was proven whole once, and of which any range can then be read.
//!
//! An image has one checksum, so a part of it is proven only by all of it. The pass that proves it notes what
//! its pieces sum to. What is read later is held against these sums, so it is what was proven, or an error.
//!
//! Of an image that is stored as it is, a piece has 64 KiB, and four bytes are noted for it. Of a compressed
//! one it is the frames that make a mebibyte of the page at least, and some 24 bytes say where they lie: a
//! frame is read from its beginning. Frames of another writer may be longer, and then more is decompressed
//! than is asked for; memory is held for a few hundred KiB all the same.
//!
//! An overlay is proven as it is stored, and so is its base. Its table is held, some 24 bytes for each of its
//! pieces: it says what lies over what.

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

/// Bytes of a piece of an image that is stored as it is, unless it is the last one.
const PIECE_LEN: u64 = 64 << 10;
/// Bytes of the page that a piece of a compressed image has, at least, unless it is the last one.
const FRAMES_LEN: u64 = CHECKED_AT_ONCE;

/// What the pieces of an image sum to, each of which is proven on its own.
#[derive(Clone, Debug)]
enum Pieces {
    /// Of an image that is stored as it is: CRC-32 of each [`PIECE_LEN`] bytes.
    Even(Vec<u32>),
    /// Of a compressed one.
    Frames(Vec<Piece>),
}

/// A part of an image.
#[derive(Clone, Copy, Debug)]
struct Piece {
    /// Where it begins: bytes from the page's start, and from the payload's.
    page_at: u64,
    stored_at: u64,
    /// CRC-32 of the page's bytes.
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

    /// The number of the piece that has the page's byte at `offset`.
    fn number_at(&self, offset: u64) -> usize {
        match self {
            Self::Even(_) => (offset / PIECE_LEN) as usize,
            Self::Frames(pieces) => pieces.partition_point(|piece| piece.page_at <= offset) - 1,
        }
    }
}

/// An image that was proven whole, with the sums of its pieces.
#[derive(Clone, Debug)]
pub struct ProvenImage {
    image: ImageRef,
    len: u64,
    /// Of an overlay there are none: its payload and its base have theirs.
    pieces: Pieces,
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
        Ok(Self { image: *image, len, pieces: Pieces::Even(Vec::new()), overlaid: Some(proven) })
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
        let (pieces, computed) = match image.codec {
            Codec::Raw => Self::sum_stored(source, image)?,
            _ => Self::sum_frames(source, image, len)?,
        };
        if image.raw_crc != computed {
            return Err(at(Defect::Checksum { what: "page", found: image.raw_crc, computed }));
        }
        Ok(Self { image: *image, len, pieces, overlaid: None })
    }

    /// The sums of an image that is stored as it is: of its pieces, and of all of it.
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

    /// The sums of a compressed image.
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

    /// Bytes of the page to be read together where a part of them is wanted, from a whole multiple of that.
    #[must_use]
    pub fn window_len(&self) -> u64 {
        match &self.overlaid {
            Some(overlaid) => overlaid.base.window_len(),
            None if matches!(self.pieces, Pieces::Even(_)) => PIECE_LEN,
            None => FRAMES_LEN,
        }
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
        self.lay_over(source, offset, out)
    }

    fn lay_over(&self, source: &dyn ReadAt, offset: u64, bytes: &mut [u8]) -> Result<(), Damage> {
        let (file, image_at) = self.payload.location();
        let read = |stored_at, part: &mut [u8]| self.payload.read(source, stored_at, part);
        self.overlay.lay_over(offset, bytes, read, |defect| defect.at(file, image_at))
    }

    /// CRC-32 of the page's bytes, which are `len`. Of the base only what lies near a piece is read, and of
    /// what a piece covers nothing.
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
                        self.lay_over(source, at, &mut bytes)?;
                        was
                    }
                };
                sum = sum_after_change(sum, len, window, was, crc32fast::hash(&bytes));
            }
        }
        Ok(sum)
    }
}

/// Bytes of a compressed image that are read at a time where a part of it is wanted.
const DECOMPRESSED_FROM: u64 = 256 << 10;

/// The pieces of a compressed image while it is proven.
struct FrameSums {
    done: Vec<Piece>,
    start: Piece,
    sum: crc32fast::Hasher,
    /// The page's bytes so far.
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

/// Makes room for this number of items, which are all that will come.
fn reserve_items<T>(items: &mut Vec<T>, count: u64) -> Result<(), Defect> {
    let needed = count * size_of::<T>() as u64;
    items.try_reserve_exact(count as usize).map_err(|_| Defect::Memory { needed })
}
