//! Reads of images: the whole image, its first bytes, or all bytes in pieces. If a read returns `Ok`, all bytes that it
//! returned are verified.

use std::borrow::Cow;
use std::io::{self, BufRead};
use std::ops::{ControlFlow, Range};

use super::codec::decompress_from;
use super::overlay::{Overlay, OverlayHeaderRaw};
use super::{Codec, ImageRef};
use crate::defect::{Damage, Defect, check_limit, reserve, zeros};
use crate::names::{FileName, ReadAt};

/// Number of bytes of an image that are checked at a time.
pub(crate) const CHECKED_AT_ONCE: u64 = 1 << 20;

/// Reads and checks the image of a page of length `len` in pieces, without keeping its bytes.
///
/// # Errors
/// Returns [`Damage`] if the image is missing, truncated or damaged.
pub fn check_image(source: &dyn ReadAt, image: &ImageRef, len: u64) -> Result<(), Damage> {
    stream_image(source, image, len, |_| Ok(()))
}

/// Reads and checks the image of a page of length `len`, and returns the first bytes of the page, at most `len_max`.
/// Memory is allocated only for the returned bytes.
///
/// # Errors
/// Returns [`Damage`] if the image is missing, truncated or damaged.
pub(crate) fn read_image_head(
    source: &dyn ReadAt,
    image: &ImageRef,
    len: u64,
    len_max: u64,
) -> Result<Vec<u8>, Damage> {
    if len <= len_max {
        return read_image(source, image, len);
    }
    let mut head = Vec::new();
    reserve(&mut head, len_max).map_err(|defect| defect.at(FileName::Pages(image.file), image.offset))?;
    stream_image(source, image, len, |piece| -> Result<(), Damage> {
        let missing = len_max as usize - head.len();
        head.extend_from_slice(&piece[..missing.min(piece.len())]);
        Ok(())
    })?;
    Ok(head)
}

/// Reads the image of a page of length `len`, and passes the bytes of the page to `sink` in order and in pieces. Memory
/// is allocated for one piece only.
///
/// The bytes are not proven until this function returns `Ok`. The payload of a compressed image or an overlay is read
/// twice, because its checksum is verified before it is decoded.
///
/// # Errors
/// Returns [`Damage`] if the image is missing, truncated or damaged, or the error that `sink` returned.
pub fn stream_image<E: From<Damage>>(
    source: &dyn ReadAt,
    image: &ImageRef,
    len: u64,
    sink: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), E> {
    match image.codec {
        Codec::Overlay(_) => stream_overlaid(source, image, len, sink),
        Codec::Raw | Codec::Zstd => stream_whole(source, image, len, sink),
    }
}

/// Implements [`stream_image`] for images that are not overlays.
fn stream_whole<E: From<Damage>>(
    source: &dyn ReadAt,
    image: &ImageRef,
    len: u64,
    mut sink: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let (file, offset) = (FileName::Pages(image.file), image.offset);
    let at = |defect: Defect| E::from(defect.at(file, offset));
    check_lies(source, image, len).map_err(at)?;
    if image.codec == Codec::Raw {
        return stream_stored(source, image, sink);
    }
    stream_stored(source, image, |_| Ok::<_, E>(()))?;
    let mut stored = StoredBytes::of(source, image, 0, CHECKED_AT_ONCE).map_err(at)?;
    let (mut sum, mut refused) = (crc32fast::Hasher::new(), None);
    let decompressed = decompress_from(&mut stored, len, |piece| {
        sum.update(piece);
        match sink(piece) {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                refused = Some(error);
                ControlFlow::Break(())
            }
        }
    });
    match (refused, stored.refused) {
        (Some(error), _) => Err(error),
        (None, Some(defect)) => Err(at(defect)),
        (None, None) => {
            decompressed.map_err(at)?;
            check_sum("page", image.raw_crc, sum).map_err(at)
        }
    }
}

/// Implements [`stream_image`] for overlays.
fn stream_overlaid<E: From<Damage>>(
    source: &dyn ReadAt,
    image: &ImageRef,
    len: u64,
    mut sink: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let (file, offset) = (FileName::Pages(image.file), image.offset);
    let at = |defect: Defect| E::from(defect.at(file, offset));
    check_lies(source, image, len).map_err(at)?;
    // Verify the payload before it is interpreted.
    stream_stored(source, image, |_| Ok::<_, E>(()))?;
    let overlay = read_overlay(source, image, len)?;
    let (mut sum, mut done, mut piece) = (crc32fast::Hasher::new(), 0, Vec::new());
    stream_whole(source, overlay.base(), len, |bytes| {
        piece.clear();
        reserve(&mut piece, bytes.len() as u64).map_err(at)?;
        piece.extend_from_slice(bytes);
        let read = |stored_at, part: &mut [u8]| {
            source.read_at(file, offset + stored_at, part).map_err(|error| at(unreadable(error)))
        };
        overlay.apply_pieces(done, &mut piece, read, at)?;
        done += piece.len() as u64;
        sum.update(&piece);
        sink(&piece)
    })?;
    check_sum("page", image.raw_crc, sum).map_err(at)
}

/// Reads the header and the table of the overlay of a page of length `len`. Does not verify the checksum of the
/// payload.
///
/// # Errors
/// Returns [`Damage`] if the header or the table is invalid, contradicts the base in `image`, or belongs to a page of
/// another length.
pub(super) fn read_overlay(source: &dyn ReadAt, image: &ImageRef, len: u64) -> Result<Overlay, Damage> {
    let (file, offset) = (FileName::Pages(image.file), image.offset);
    let read = || {
        let header_len = OverlayHeaderRaw::LEN as u64;
        check_limit("length of an overlay's header", header_len, image.stored_len)?;
        let header = read_range(source, file, offset, header_len)?;
        let head_len = Overlay::decode_head_len(&header, image)?;
        let overlay = Overlay::decode_head(&read_range(source, file, offset, head_len)?)?;
        overlay.check_of(image, len)?;
        Ok(overlay)
    };
    read().map_err(|defect: Defect| defect.at(file, offset))
}

/// Passes the stored payload of an image to `sink` in pieces, and verifies its checksum at the end. The payload is not
/// proven until this function returns `Ok`.
pub(super) fn stream_stored<E: From<Damage>>(
    source: &dyn ReadAt,
    image: &ImageRef,
    mut sink: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let mut sum = crc32fast::Hasher::new();
    read_stored(source, image, |piece| {
        sum.update(piece);
        sink(piece)
    })?;
    let at = |defect: Defect| E::from(defect.at(FileName::Pages(image.file), image.offset));
    check_sum("image", image.stored_crc, sum).map_err(at)
}

/// Passes the stored payload of an image to `sink` in pieces, without verifying its checksum. All pieces except the
/// last have [`CHECKED_AT_ONCE`] bytes.
pub(super) fn read_stored<E: From<Damage>>(
    source: &dyn ReadAt,
    image: &ImageRef,
    mut sink: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let (file, offset) = (FileName::Pages(image.file), image.offset);
    let at = |defect: Defect| E::from(defect.at(file, offset));
    let mut piece = zeros(CHECKED_AT_ONCE.min(image.stored_len)).map_err(at)?;
    let mut done = 0;
    while done < image.stored_len {
        let piece = &mut piece[..CHECKED_AT_ONCE.min(image.stored_len - done) as usize];
        source.read_at(file, offset + done, piece).map_err(|error| at(unreadable(error)))?;
        sink(piece)?;
        done += piece.len() as u64;
    }
    Ok(())
}

fn check_sum(what: &'static str, found: u32, sum: crc32fast::Hasher) -> Result<(), Defect> {
    let computed = sum.finalize();
    if found == computed { Ok(()) } else { Err(Defect::Checksum { what, found, computed }) }
}

/// A buffered reader of the stored payload of an image.
pub(super) struct StoredBytes<'s> {
    source: &'s dyn ReadAt,
    file: FileName,
    /// Offset in the file of the next read.
    at: u64,
    end: u64,
    /// Buffer for the bytes of one read. `BufReader` is not used, because it cannot report a failed allocation.
    buffer: Vec<u8>,
    /// Range of the buffer that was read but not yet consumed.
    buffered: Range<usize>,
    /// The defect of the read that failed, or `None` if no read has failed.
    pub refused: Option<Defect>,
}

impl<'s> StoredBytes<'s> {
    /// Creates a reader of the payload after its first `skipped` bytes. Each read has up to `read_at_once` bytes.
    ///
    /// # Errors
    /// Returns [`Defect::Memory`] if the buffer cannot be allocated.
    pub fn of(
        source: &'s dyn ReadAt,
        image: &ImageRef,
        skipped: u64,
        read_at_once: u64,
    ) -> Result<Self, Defect> {
        let (file, end) = (FileName::Pages(image.file), image.offset + image.stored_len);
        let buffer = zeros(read_at_once.min(image.stored_len))?;
        Ok(Self { source, file, at: image.offset + skipped, end, buffer, buffered: 0..0, refused: None })
    }
}

impl io::BufRead for StoredBytes<'_> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.buffered.is_empty() {
            let len = (self.buffer.len() as u64).min(self.end - self.at);
            let read = self.source.read_at(self.file, self.at, &mut self.buffer[..len as usize]);
            read.inspect_err(|error| self.refused = Some(Defect::of_read(error)))?;
            self.at += len;
            self.buffered = 0..len as usize;
        }
        Ok(&self.buffer[self.buffered.clone()])
    }

    fn consume(&mut self, count: usize) {
        self.buffered.start += count;
    }
}

impl io::Read for StoredBytes<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let held = self.fill_buf()?;
        let count = out.len().min(held.len());
        out[..count].copy_from_slice(&held[..count]);
        self.consume(count);
        Ok(count)
    }
}

/// Reads and checks the image of a page of length `len`.
///
/// # Errors
/// Returns [`Damage`] if the image is missing, truncated or damaged, or if there is not enough memory.
pub fn read_image(source: &dyn ReadAt, image: &ImageRef, len: u64) -> Result<Vec<u8>, Damage> {
    let file = FileName::Pages(image.file);
    let at = |defect: Defect| defect.at(file, image.offset);
    // The payload of an uncompressed image is the page. The payload of a short compressed image is also read as a
    // whole.
    if !image.is_whole() || (image.codec != Codec::Raw && len > CHECKED_AT_ONCE) {
        let mut bytes = Vec::new();
        stream_image(source, image, len, |piece| -> Result<(), Damage> {
            if bytes.is_empty() {
                reserve(&mut bytes, len).map_err(at)?;
            }
            bytes.extend_from_slice(piece);
            Ok(())
        })?;
        return Ok(bytes);
    }
    let stored = read_range(source, file, image.offset, image.stored_len).map_err(at)?;
    image.decode(stored.into(), len).map(Cow::into_owned).map_err(at)
}

/// Reads and checks the image of a page of length `out.len()`. After an error, the contents of `out` are unspecified.
///
/// # Errors
/// Returns [`Damage`] if the image is missing, truncated or damaged.
pub fn read_image_into(source: &dyn ReadAt, image: &ImageRef, out: &mut [u8]) -> Result<(), Damage> {
    let (file, len) = (FileName::Pages(image.file), out.len() as u64);
    let at = |defect: Defect| defect.at(file, image.offset);
    if image.codec != Codec::Raw {
        let mut rest = out;
        return stream_image(source, image, len, |piece| {
            let (filled, after) = std::mem::take(&mut rest).split_at_mut(piece.len());
            filled.copy_from_slice(piece);
            rest = after;
            Ok(())
        });
    }
    check_lies(source, image, len).map_err(at)?;
    let (mut sum, mut done) = (crc32fast::Hasher::new(), 0);
    // Checksum each piece while it is in the processor's cache.
    for piece in out.chunks_mut(CHECKED_AT_ONCE as usize) {
        source.read_at(file, image.offset + done, piece).map_err(|error| at(unreadable(error)))?;
        sum.update(piece);
        done += piece.len() as u64;
    }
    check_sum("image", image.stored_crc, sum).map_err(at)
}

/// Checks that `image` is a valid reference for a page of length `len`, and that the image file contains the whole
/// payload. A truncated image is therefore reported before any read.
pub(super) fn check_lies(source: &dyn ReadAt, image: &ImageRef, len: u64) -> Result<(), Defect> {
    image.check(len)?;
    check_range(source, FileName::Pages(image.file), image.offset, image.stored_len)
}

/// Checks that the file contains the whole range.
pub(super) fn check_range(source: &dyn ReadAt, file: FileName, offset: u64, len: u64) -> Result<(), Defect> {
    let file_len = source.len(file).map_err(unreadable)?.ok_or(Defect::Missing)?;
    let end = offset.saturating_add(len);
    if end > file_len { Err(Defect::Truncated { needed: end, have: file_len }) } else { Ok(()) }
}

/// Reads a range of a file. A range that exceeds the file is rejected before memory is allocated (I9).
pub(crate) fn read_range(
    source: &dyn ReadAt,
    file: FileName,
    offset: u64,
    len: u64,
) -> Result<Vec<u8>, Defect> {
    check_range(source, file, offset, len)?;
    let mut bytes = zeros(len)?;
    source.read_at(file, offset, &mut bytes).map_err(unreadable)?;
    Ok(bytes)
}

pub(crate) fn unreadable(error: std::io::Error) -> Defect {
    Defect::of_read(&error)
}

/// Copies the bytes of a page that both slices contain from `bytes` to `target`. `bytes` starts at `bytes_at` of the
/// page, and `target` starts at `target_at`.
pub(crate) fn copy_common(target: &mut [u8], target_at: u64, bytes: &[u8], bytes_at: u64) {
    let end = target_at.saturating_add(target.len() as u64).min(bytes_at.saturating_add(bytes.len() as u64));
    let start = target_at.max(bytes_at);
    if start < end {
        let within = |at: u64| (start - at) as usize..(end - at) as usize;
        target[within(target_at)].copy_from_slice(&bytes[within(bytes_at)]);
    }
}
