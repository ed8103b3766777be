//! New overlays. An overlay contains only the changed bytes of a page on disk, and is written in addition to the page's
//! image.
//!
//! An overlay contains every byte that differs from its base, an image of the whole page. These bytes are the pieces of
//! the previous overlay and the later writes of batches. If they are too large a part of the page, the whole page is
//! written instead.

use std::ops::Range;

use remanent_format::image::{ImageRef, Overlay, sum_after_change};
use remanent_format::{FileName, PageId, PageInfo, Place};

use super::DiskPage;
use crate::base::allocation::push;
use crate::error::{Error, Result};
use crate::images::resize;

/// An overlay is written only if the bytes that differ from the base are at most the page's length divided by this
/// value. Otherwise the whole page is written.
const OVERLAY_SHARE: u64 = 8;
/// The maximum gap in bytes between two pieces that are merged into one. A separate piece would need 16 bytes in the
/// table of pieces.
const GAP_BYTES: u64 = 64;
/// The number of bytes of a page per permitted piece of its overlay. Readers keep the table of pieces in memory, so the
/// number of pieces is limited. `PIECES_FREE` pieces are always permitted.
const PIECE_SHARE: u64 = 2 << 10;
const PIECES_FREE: u64 = 64;

/// An overlay that is about to be written. It provides the bytes of its payload for the image writer.
pub(crate) struct NewOverlay<'p> {
    page: &'p DiskPage,
    overlay: Overlay,
    head: Vec<u8>,
    /// The CRC-32 of all bytes of the page.
    sum: u32,
    /// The bytes of the page near the position of the last read.
    window: Window,
}

struct Window {
    at: u64,
    bytes: Vec<u8>,
    /// The number of bytes of the page that are read and verified at a time.
    len: u64,
}

impl Window {
    fn new(len: u64) -> Self {
        Self { at: 0, bytes: Vec::new(), len }
    }

    /// Moves the window to the position that contains `offset` in a page of `len` bytes. Returns the offset of the
    /// window, and the buffer that the caller must fill with the page's bytes.
    fn seek_to(&mut self, offset: u64, len: u64) -> Result<(u64, &mut [u8])> {
        self.at = offset - offset % self.len;
        resize(&mut self.bytes, self.len.min(len - self.at))?;
        Ok((self.at, &mut self.bytes))
    }

    fn end(&self) -> u64 {
        self.at + self.bytes.len() as u64
    }

    fn part(&self, range: &Range<u64>) -> &[u8] {
        &self.bytes[(range.start - self.at) as usize..(range.end - self.at) as usize]
    }
}

impl DiskPage {
    /// Returns an overlay with all bytes that differ from the image of the whole page. Returns `None` if there is no
    /// such image, or if too many bytes differ. Must not run on the applier's thread.
    ///
    /// # Errors
    /// `Damaged`; `OutOfMemory`.
    pub fn overlay(&self) -> Result<Option<NewOverlay<'_>>> {
        let (Some(image), len) = (self.image_below(), self.byte_len()) else { return Ok(None) };
        // A whole image without differences is copied as a whole to another file.
        if image.image().is_whole() && self.written().next().is_none() {
            return Ok(None);
        }
        let is_too_much = |bytes: u64| bytes.saturating_mul(OVERLAY_SHARE) > len;
        if is_too_much(self.written().map(|run| run.end - run.start).sum()) {
            return Ok(None);
        }
        // I7: the contents of the previous overlay must not be lost, so its table is verified first.
        let proven = image.prove()?;
        let before = proven.overlay().map_or(&[][..], Overlay::pieces);
        let pieces = joined(before, self.written())?;
        let at =
            |defect: remanent_format::Defect| Error::from(defect.at(FileName::Pages(image.image().file), 0));
        let overlay = Overlay::new(*proven.base().image(), len, pieces).map_err(at)?;
        let is_in_crumbs = pieces_max(len) < overlay.pieces().len() as u64;
        if is_in_crumbs || is_too_much(overlay.stored_len()) {
            return Ok(None);
        }
        let head = overlay.encode_head().map_err(at)?;
        let sum = self.sum_by_changes(image.image().raw_crc, Window::new(proven.window_len()))?;
        Ok(Some(NewOverlay { page: self, overlay, head, sum, window: Window::new(proven.window_len()) }))
    }

    /// Returns the CRC-32 of the page's bytes, computed from `before`, the CRC-32 of the page's image. Reads only bytes
    /// of the image near changed bytes.
    fn sum_by_changes(&self, before: u32, mut window: Window) -> Result<u32> {
        let (image, len) = (self.image_below().expect("asked before"), self.byte_len());
        let mut sum = before;
        for run in self.written() {
            let mut at = run.start.max(window.end());
            while at < run.end {
                let (start, bytes) = window.seek_to(at, len)?;
                image.read(start, bytes)?;
                let was = crc32fast::hash(bytes);
                self.apply_pieces(start, bytes);
                let range = start..start + bytes.len() as u64;
                sum = sum_after_change(sum, len, range.clone(), was, crc32fast::hash(bytes));
                at = range.end;
            }
        }
        Ok(sum)
    }
}

/// Returns the maximum number of pieces in an overlay of a page of `len` bytes.
fn pieces_max(len: u64) -> u64 {
    PIECES_FREE.max(len / PIECE_SHARE)
}

/// Merges two ascending sequences of ranges, and joins ranges with a gap of at most [`GAP_BYTES`].
fn joined(before: &[Range<u64>], written: impl Iterator<Item = Range<u64>>) -> Result<Vec<Range<u64>>> {
    let mut pieces: Vec<Range<u64>> = Vec::new();
    let (mut before, mut written) = (before.iter().cloned().peekable(), written.peekable());
    loop {
        let next = match (before.peek(), written.peek()) {
            (Some(one), Some(other)) if one.start <= other.start => before.next(),
            (Some(_), None) => before.next(),
            _ => written.next(),
        };
        let Some(next) = next else { return Ok(pieces) };
        match pieces.last_mut().filter(|last| next.start <= last.end + GAP_BYTES) {
            Some(last) => last.end = last.end.max(next.end),
            None => push(&mut pieces, next)?,
        }
    }
}

impl NewOverlay<'_> {
    /// Returns a description of the payload for the image writer. The payload appears as a page without an id.
    pub fn payload(&self) -> PageInfo {
        PageInfo::new(PageId(0), self.overlay.stored_len(), Place::Disk)
    }

    /// Fills `out` with bytes of the payload, starting at `offset`.
    ///
    /// # Errors
    /// `Damaged`; `OutOfMemory`.
    pub fn read(&mut self, offset: u64, out: &mut [u8]) -> Result<()> {
        let of_head = self.head.len().saturating_sub(offset as usize).min(out.len());
        let (head, rest) = out.split_at_mut(of_head);
        if of_head > 0 {
            head.copy_from_slice(&self.head[offset as usize..][..of_head]);
        }
        let from = offset + of_head as u64;
        let stored = from..from + rest.len() as u64;
        let Self { page, overlay, window, .. } = self;
        for (stored_at, part) in overlay.stored_in(stored) {
            let target = &mut rest[(stored_at - from) as usize..][..(part.end - part.start) as usize];
            let mut done = part.start;
            while done < part.end {
                if !(window.at..window.end()).contains(&done) {
                    let (start, bytes) = window.seek_to(done, page.byte_len())?;
                    page.read(start, bytes)?;
                }
                let here = done..part.end.min(window.end());
                let within = (here.start - part.start) as usize..(here.end - part.start) as usize;
                target[within].copy_from_slice(window.part(&here));
                done = here.end;
            }
        }
        Ok(())
    }

    /// Returns the reference to the page's new image. `payload` is the reference to the payload that was written.
    pub fn image(&self, payload: &ImageRef) -> ImageRef {
        self.overlay.reference(payload, self.sum)
    }
}
