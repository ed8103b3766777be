//! Overlays. An overlay stores the changed pieces of a long page, and refers to an image of the whole page.
//!
//! If only a small part of a page on disk changes, a snapshot does not write the whole page. It writes an *overlay*,
//! which contains the changed pieces and a reference to the *base*, the image that the pieces modify. The base is never
//! an overlay itself, so a read of a page needs at most two images.
//!
//! ```text
//! 0      header (64 bytes): the base, and the number of pieces
//! 64     table: offset and length in the page of each piece, ascending
//! ...    the pieces' bytes, back to back
//! ```
//!
//! The payload of an overlay has one checksum, like the payload of every image. A second checksum covers the page that
//! results from applying the pieces to the base.

use std::ops::Range;

use super::codec::{Codec, OverlayBase};
use super::image_ref::ImageRef;
use crate::defect::{Defect, array, check_equal, check_limit, check_zeros, reserve, reserve_items, slice};
use crate::layout::layout;

/// Number of page bytes whose overlay pieces are read in one call.
const READ_TOGETHER: usize = 1 << 20;

/// Magic bytes at the start of an overlay's payload.
pub const OVERLAY_MAGIC: [u8; 8] = *b"RMNTOVER";

layout! {
    /// The encoded header of an overlay. The table of pieces follows.
    pub struct OverlayHeaderRaw: 64 {
        /// Magic bytes, always `RMNTOVER`.
        0 => magic: [u8; 8],
        /// Number of the image file that contains the base.
        8 => base_file: u64,
        /// Offset of the base's payload, in bytes from the start of the image file `base_file`.
        16 => base_offset: u64,
        /// Length of the base's stored payload in bytes.
        24 => base_stored_len: u64,
        /// CRC-32 of the base's stored payload.
        32 => base_stored_crc: u32,
        /// CRC-32 of the page's bytes in the base.
        36 => base_raw_crc: u32,
        /// Length in bytes of the page. The page has the same length in the base.
        40 => page_len: u64,
        /// Number of pieces in the overlay.
        48 => piece_count: u32,
        /// Number that represents the codec of the base, 0 or 1.
        52 => base_codec: u8,
        /// Reserved, always zero.
        53 => reserved: [u8; 11],
    }
}

layout! {
    /// The encoded description of a piece in the table of an overlay.
    pub struct OverlayPieceRaw: 16 {
        /// Offset of the piece in the page, in bytes.
        0 => offset: u64,
        /// Length of the piece in bytes.
        8 => len: u64,
    }
}

/// The decoded header and table of an overlay: the reference to its base, and the ranges of its pieces.
///
/// ```
/// use remanent_format::image::{Codec, ImageRef, Overlay};
/// let (stored_len, crc) = (1 << 20, 7);
/// let base =
///     ImageRef { file: 3, offset: 4096, stored_len, stored_crc: crc, raw_crc: crc, codec: Codec::Raw };
/// let overlay = Overlay::new(base, 1 << 20, vec![0..4, 5000..5100])?;
/// let head = overlay.encode_head()?;
/// assert_eq!(overlay.stored_len(), head.len() as u64 + 4 + 100);
/// assert_eq!(Overlay::decode_head(&head)?, overlay);
/// # Ok::<(), remanent_format::Defect>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overlay {
    base: ImageRef,
    len: u64,
    pieces: Vec<Range<u64>>,
    /// Offset in the payload of each piece's bytes. The last element is the length of the payload.
    stored_at: Vec<u64>,
}

impl Overlay {
    /// Creates an overlay that replaces the ranges `pieces` of `base`, for a page of `len` bytes.
    ///
    /// # Errors
    /// Returns a [`Defect`] if the base is an overlay or an image of a page of another length. Returns a [`Defect`] if
    /// there are no pieces or too many, or if the pieces are empty, do not ascend or exceed the page. Returns
    /// [`Defect::Memory`] if there is not enough memory.
    pub fn new(base: ImageRef, len: u64, pieces: Vec<Range<u64>>) -> Result<Self, Defect> {
        if let Codec::Overlay(_) = base.codec {
            return Err(Defect::Field {
                what: "codec of an overlay's base",
                found: base.codec.to_raw().into(),
            });
        }
        base.check(len)?;
        // A manifest must be able to name the base.
        OverlayBase { file: base.file, stored_len: base.stored_len }.check()?;
        check_limit("number of an overlay's pieces", pieces.len() as u64, u32::MAX.into())?;
        let mut stored_at = Vec::new();
        reserve_items(&mut stored_at, pieces.len() + 1)?;
        let (mut at, mut end) = (head_len(pieces.len() as u64), 0);
        for piece in &pieces {
            check_limit("end of an overlay's piece", piece.end, len)?;
            if piece.start < end || piece.is_empty() {
                return Err(Defect::Field { what: "start of an overlay's piece", found: piece.start });
            }
            stored_at.push(at);
            (at, end) = (at + (piece.end - piece.start), piece.end);
        }
        if pieces.is_empty() {
            return Err(Defect::Field { what: "number of an overlay's pieces", found: 0 });
        }
        stored_at.push(at);
        Ok(Self { base, len, pieces, stored_at })
    }

    /// Returns the reference to the base, which the pieces modify.
    #[must_use]
    pub fn base(&self) -> &ImageRef {
        &self.base
    }

    /// Returns the pieces as ranges of the page, in ascending order.
    #[must_use]
    pub fn pieces(&self) -> &[Range<u64>] {
        &self.pieces
    }

    /// Returns the length of the payload in bytes.
    #[must_use]
    pub fn stored_len(&self) -> u64 {
        *self.stored_at.last().expect("the end at least")
    }

    /// Returns the reference to this overlay, for an entry of a manifest. `payload` is the reference to the stored
    /// payload, and `page_crc` is the CRC-32 of the resulting page.
    #[must_use]
    pub fn reference(&self, payload: &ImageRef, page_crc: u32) -> ImageRef {
        let base = OverlayBase { file: self.base.file, stored_len: self.base.stored_len };
        ImageRef { raw_crc: page_crc, codec: Codec::Overlay(base), ..*payload }
    }

    /// Finds the pieces in a range of the payload, in order. Each item is an offset in the payload, and the range of
    /// the page whose bytes are stored at this offset.
    pub fn stored_in(&self, stored: Range<u64>) -> impl Iterator<Item = (u64, Range<u64>)> {
        let first = self.stored_at.partition_point(|at| *at <= stored.start).saturating_sub(1);
        let pieces = self.pieces[first.min(self.pieces.len())..].iter().zip(&self.stored_at[first..]);
        let in_range = pieces.take_while(move |(_, at)| **at < stored.end);
        in_range.filter_map(move |(piece, at)| {
            let from = stored.start.max(*at);
            let to = stored.end.min(at + (piece.end - piece.start));
            (from < to).then(|| (from, piece.start + (from - at)..piece.start + (to - at)))
        })
    }

    /// Finds the pieces that overlap a range of the page, in order, and clips them to the range. Each item is an offset
    /// in the payload, and the range of the page whose bytes are stored at this offset.
    pub(super) fn pieces_in(&self, range: Range<u64>) -> impl Iterator<Item = (u64, Range<u64>)> {
        let first = self.pieces.partition_point(|piece| piece.end <= range.start);
        let pieces = self.pieces[first..].iter().zip(&self.stored_at[first..]);
        pieces.take_while(move |(piece, _)| piece.start < range.end).map(move |(piece, at)| {
            let part = piece.start.max(range.start)..piece.end.min(range.end);
            (at + (part.start - piece.start), part)
        })
    }

    /// Overwrites `bytes`, a part of the base that starts at `offset` of the page, with the pieces.
    ///
    /// `read` fills a slice from an offset of the payload. One call reads all pieces in [`READ_TOGETHER`] bytes of the
    /// page, because the payload stores the pieces back to back. `refused` converts the defect of a failed allocation.
    pub(super) fn apply_pieces<E>(
        &self,
        offset: u64,
        bytes: &mut [u8],
        mut read: impl FnMut(u64, &mut [u8]) -> Result<(), E>,
        refused: impl Fn(Defect) -> E,
    ) -> Result<(), E> {
        let mut stored = Vec::new();
        for (at, window) in (offset..).step_by(READ_TOGETHER).zip(bytes.chunks_mut(READ_TOGETHER)) {
            let pieces = || self.pieces_in(at..at + window.len() as u64);
            let Some((start, _)) = pieces().next() else { continue };
            let len: u64 = pieces().map(|(_, part)| part.end - part.start).sum();
            stored.clear();
            reserve(&mut stored, len).map_err(&refused)?;
            stored.resize(len as usize, 0);
            read(start, &mut stored)?;
            for (stored_at, part) in pieces() {
                let source = &stored[(stored_at - start) as usize..][..(part.end - part.start) as usize];
                window[(part.start - at) as usize..(part.end - at) as usize].copy_from_slice(source);
            }
        }
        Ok(())
    }

    /// Encodes the header and the table, which are the first bytes of the payload. The caller must append the bytes of
    /// the pieces.
    ///
    /// # Errors
    /// Returns [`Defect::Memory`] if there is not enough memory.
    pub fn encode_head(&self) -> Result<Vec<u8>, Defect> {
        let mut out = Vec::new();
        reserve(&mut out, head_len(self.pieces.len() as u64))?;
        let raw = OverlayHeaderRaw {
            magic: OVERLAY_MAGIC,
            base_file: self.base.file,
            base_offset: self.base.offset,
            base_stored_len: self.base.stored_len,
            base_stored_crc: self.base.stored_crc,
            base_raw_crc: self.base.raw_crc,
            page_len: self.len,
            piece_count: self.pieces.len() as u32,
            base_codec: self.base.codec.to_raw(),
            reserved: [0; 11],
        };
        out.extend_from_slice(&raw.to_bytes());
        for piece in &self.pieces {
            let row = OverlayPieceRaw { offset: piece.start, len: piece.end - piece.start };
            out.extend_from_slice(&row.to_bytes());
        }
        Ok(out)
    }

    /// Decodes the header and the table of an overlay (SPEC O1 to O3).
    ///
    /// # Errors
    /// Returns a [`Defect`] if the header or the table is invalid.
    pub fn decode_head(bytes: &[u8]) -> Result<Self, Defect> {
        let raw = decode_header(bytes)?;
        let count = raw.piece_count as usize;
        let table = slice(bytes, OverlayHeaderRaw::LEN, count * OverlayPieceRaw::LEN)?;
        let mut pieces = Vec::new();
        reserve_items(&mut pieces, count)?;
        for row in table.chunks_exact(OverlayPieceRaw::LEN) {
            let row = OverlayPieceRaw::from_bytes(array(row, 0)?);
            pieces.push(row.offset..row.offset.saturating_add(row.len));
        }
        let base = ImageRef {
            file: raw.base_file,
            offset: raw.base_offset,
            stored_len: raw.base_stored_len,
            stored_crc: raw.base_stored_crc,
            raw_crc: raw.base_raw_crc,
            codec: Codec::from_raw(raw.base_codec)?,
        };
        Self::new(base, raw.page_len, pieces)
    }

    /// Decodes the header of an overlay, and returns the length in bytes of the header and the table together.
    ///
    /// # Errors
    /// Returns a [`Defect`] if the header is invalid, or if the table is longer than the payload (I9).
    pub(super) fn decode_head_len(bytes: &[u8], image: &ImageRef) -> Result<u64, Defect> {
        let len = head_len(decode_header(bytes)?.piece_count.into());
        check_limit("length of an overlay's table", len, image.stored_len)?;
        Ok(len)
    }

    /// Checks that the overlay has the base that `image` names, and belongs to a page of length `len` (SPEC O4 and O5).
    ///
    /// # Errors
    /// Returns a [`Defect`] if a length or the base differs.
    pub(super) fn check_of(&self, image: &ImageRef, len: u64) -> Result<(), Defect> {
        let Codec::Overlay(base) = image.codec else {
            return Err(Defect::Field { what: "codec of an overlay", found: image.codec.to_raw().into() });
        };
        check_equal("stored length of an overlay", image.stored_len, self.stored_len())?;
        check_equal("page length in an overlay", self.len, len)?;
        check_equal("image file of an overlay's base", self.base.file, base.file)?;
        check_equal("stored length of an overlay's base", self.base.stored_len, base.stored_len)
    }
}

fn decode_header(bytes: &[u8]) -> Result<OverlayHeaderRaw, Defect> {
    let raw = OverlayHeaderRaw::from_bytes(array(bytes, 0)?);
    if raw.magic != OVERLAY_MAGIC {
        return Err(Defect::Magic { expected: "header of an overlay" });
    }
    check_zeros("reserved overlay bytes", &raw.reserved)?;
    Ok(raw)
}

/// Returns the length in bytes of the header and the table of an overlay with `piece_count` pieces.
fn head_len(piece_count: u64) -> u64 {
    OverlayHeaderRaw::LEN as u64 + piece_count * OverlayPieceRaw::LEN as u64
}

/// Returns the CRC-32 of a page of `len` bytes after the range `piece` changed. `before` is the checksum of the page
/// before the change. `was` and `is` are the checksums of the range before and after the change.
///
/// ```
/// use remanent_format::image::sum_after_change;
/// let (before, after) = (b"remanent pages", b"remanent bytes");
/// let [was, is] = [crc32fast::hash(b"pag"), crc32fast::hash(b"byt")];
/// assert_eq!(sum_after_change(crc32fast::hash(before), 14, 9..12, was, is), crc32fast::hash(after));
/// ```
#[must_use]
pub fn sum_after_change(before: u32, len: u64, piece: Range<u64>, was: u32, is: u32) -> u32 {
    // A CRC is linear. The difference of the piece's checksums, shifted past all bytes after the piece, is the
    // difference of the page's checksums.
    let mut moved = crc32fast::Hasher::new_with_initial_len(was ^ is, piece.end - piece.start);
    moved.combine(&crc32fast::Hasher::new_with_initial_len(0, len - piece.end));
    before ^ moved.finalize()
}

#[cfg(test)]
mod tests;
