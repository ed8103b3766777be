//! Captures that change much of a page on disk. The page's new contents are written once, from the device to an image
//! file, and the batch's frame names the image. Logged changes would instead occupy host memory until the next
//! snapshot, which would write the page a second time.
//!
//! The image is written from staged bytes, like the payload. If a working copy is compared by digests, its bytes are
//! staged piece by piece while the image is written. Several threads write one page each. The image and its name are
//! synced before the batch is logged, so that every file that a frame names survives a crash. If a page moves to memory
//! before its batch is logged, its changes are logged as usual.

use std::collections::HashMap;

use remanent_format::image::ImageRef;
use remanent_format::op::{Op, OpAt};
use remanent_format::{PageId, PageInfo};

use super::device_payload::CapturedDigests;
use super::digests::CopyWaves;
use super::{CapturedBytes, Captures, WholeCapture};
use crate::base::allocation::{collected, copied, insert, push, set_of};
use crate::base::sync::Mutex;
use crate::device::{Lane, Span};
use crate::error::Result;
use crate::write::batch::{ChunkDigests, CopySources, OpImages, WHOLE_PAGE_LEN_MIN};
use crate::write::commit::Committer;
use crate::write::commit::batch_images::BatchImages;
use crate::write::commit::disk_moves::{DiskOps, is_on_disk};

/// The inverse of the share of changed bytes above which a captured page on disk is written to an image as a whole. The
/// page can then be read with one read, and its changes take no host memory until the next snapshot. A page is also
/// written as a whole if its changes do not fit in host memory.
const WHOLE_PART: u64 = 4;

/// The captured pages whose new bytes are in images, with these images.
#[derive(Default)]
pub(in crate::write::commit) struct CapturedImages<'a> {
    /// The pages, in the order of the images.
    pages: Vec<CapturedPage>,
    /// The images of the pages. Their files are removed if the batch fails.
    pub file: BatchImages<'a>,
}

/// A captured page on disk whose bytes are written to an image as a whole.
struct CapturedPage {
    /// The capture's index in the batch.
    step: usize,
    page: PageId,
    /// The digests of the chunks in the image, or empty if the working copy is not compared by digests.
    digests: ChunkDigests,
}

impl CapturedImages<'_> {
    /// Returns the images of the pages that are still on disk, each with the operation's index.
    pub fn images(&self, is_on_disk: impl Fn(PageId) -> bool) -> impl Iterator<Item = (usize, ImageRef)> {
        let by_step = self.pages.iter().zip(self.file.refs());
        by_step.filter(move |(page, _)| is_on_disk(page.page)).map(|(page, image)| (page.step, image))
    }

    /// Returns the digests of the captured chunks in the images that the payload names.
    pub fn digests(&self, named: &OpImages) -> Result<CapturedDigests> {
        let mut digests = CapturedDigests::new();
        for page in self.pages.iter().filter(|page| named.contains_key(&page.step)) {
            let ChunkDigests { first, digests: of_page } = &page.digests;
            digests.insert(page.step, vec![ChunkDigests { first: *first, digests: copied(of_page)? }]);
        }
        Ok(digests)
    }

    /// Returns whether all pages with captured images in the payload are still on disk. If one has moved to memory, the
    /// draft is stale, because the applier cannot load a captured image into memory.
    pub fn are_on_disk(&self, ops: &[OpAt<'_>], disk_ops: &DiskOps) -> bool {
        if self.pages.is_empty() {
            return true;
        }
        let pages = set_of(self.pages.iter().map(|one| one.page));
        let is_one = |op: &Op<'_>| matches!(op, Op::Image { page, .. } if pages.contains(page));
        (0..).zip(ops).all(|(index, at)| !is_one(&at.op) || disk_ops.has(index))
    }
}

impl Committer {
    /// Selects the captured pages on disk that are written to images as a whole:
    ///
    /// - pages with many changes, if these pages together justify an image file,
    /// - pages whose changes do not fit in host memory.
    ///
    /// `room` is the number of bytes of host memory for changes. `None` applies the default limit.
    fn captured_whole<'c>(
        &self,
        captures: &'c Captures<'_>,
        copied: &CopySources,
        room: Option<u64>,
    ) -> Result<Vec<WholeCapture<'c>>> {
        // A store that never had a page on disk has no captures of such pages.
        if !self.engine.disk_pages.is_any() {
            return Ok(Vec::new());
        }
        let (mut whole, mut others) = (Vec::new(), Vec::new());
        for capture in captures.of_whole_pages() {
            let len = capture.bytes.byte_len();
            if len >= WHOLE_PAGE_LEN_MIN
                && !copied.whole.contains(&capture.page)
                && is_on_disk(&self.submitted.lock(), capture.page)
            {
                let is_whole = capture.changed.saturating_mul(WHOLE_PART) > len;
                push(if is_whole { &mut whole } else { &mut others }, capture)?;
            }
        }
        let bytes = |pages: &[WholeCapture<'_>]| pages.iter().map(|page| page.bytes.byte_len()).sum::<u64>();
        if bytes(&whole) < self.ahead_bytes_min {
            others.append(&mut whole);
        }
        // With automatic snapshots, the batch may use all of the memory: a snapshot frees it, and the commit waits for
        // that. Otherwise, half of what is free remains for later batches.
        let disk_pages = &self.engine.disk_pages;
        let all = if self.takes_snapshots { disk_pages.pending_max() } else { disk_pages.room() / 2 };
        let mut room = room.unwrap_or(all);
        others.sort_unstable_by_key(|capture| capture.pending);
        for capture in others {
            match room.checked_sub(capture.pending) {
                Some(left) => room = left,
                None => push(&mut whole, capture)?,
            }
        }
        Ok(whole)
    }

    /// Writes images of the captured pages on disk that are written as a whole. On return, the files and their names
    /// are durable.
    ///
    /// # Errors
    /// `DiskFull`; `OutOfMemory`; a device error. After an error, no files remain.
    pub(in crate::write::commit) fn write_captured(
        &self,
        captures: &Captures<'_>,
        copied: &CopySources,
        room: Option<u64>,
    ) -> Result<CapturedImages<'_>> {
        let whole = self.captured_whole(captures, copied, room)?;
        if whole.is_empty() {
            return Ok(CapturedImages::default());
        }
        let lens = collected(whole.iter().map(|capture| (capture.page, capture.bytes.byte_len())))?;
        let mut sources: HashMap<PageId, (CapturedBytes<'_>, Mutex<ChunkDigests>)> = HashMap::new();
        for capture in &whole {
            let digests = Mutex::new(ChunkDigests { first: 0, digests: Vec::new() });
            insert(&mut sources, capture.page, (capture.bytes, digests))?;
        }
        let read = |waves: &mut CopyWaves<'_>, info: &PageInfo, offset: u64, out: &mut [u8]| {
            let (bytes, digests) = &sources[&info.page];
            match *bytes {
                CapturedBytes::Staged(all) => {
                    let source = Span { offset: all.offset + offset, len: out.len() as u64, ..all };
                    self.engine.staging.download(Lane::Stage, source, out)
                }
                CapturedBytes::InCopy(copy, live, key) => {
                    waves.read(copy, (live, key), offset, out, &mut digests.lock())
                }
            }
        };
        let ahead = self.write_read(&lens, || CopyWaves::new(self), read)?;
        let mut captured = |capture: &WholeCapture<'_>| {
            let (_, digests) = sources.remove(&capture.page).expect("each page is captured once");
            CapturedPage { step: capture.step, page: capture.page, digests: digests.into_inner() }
        };
        let pages = collected(whole.iter().map(&mut captured))?;
        let file = BatchImages::new(ahead, collected(lens.into_iter().map(Some))?);
        Ok(CapturedImages { pages, file })
    }
}

#[cfg(test)]
mod tests {
    use remanent_format::image::Codec;

    use super::*;

    /// If a page has moved to memory, the batch is encoded again, because the applier cannot load a captured image into
    /// memory.
    #[test]
    fn images_are_used_only_for_pages_still_on_disk() {
        let digests = ChunkDigests { first: 0, digests: Vec::new() };
        let pages = vec![CapturedPage { step: 0, page: PageId(5), digests }];
        let captured = CapturedImages { pages, file: BatchImages::default() };
        let image = ImageRef {
            file: 1,
            offset: 4096,
            stored_len: 4096,
            codec: Codec::Raw,
            stored_crc: 0,
            raw_crc: 0,
        };
        let of = |page| OpAt { body_at: 0, op: Op::Image { page: PageId(page), len: 4096, image } };
        let on_disk = |on_disk: &[usize]| DiskOps { on_disk: on_disk.to_vec(), ..DiskOps::default() };
        assert!(captured.are_on_disk(&[of(5)], &on_disk(&[0])));
        assert!(!captured.are_on_disk(&[of(5)], &on_disk(&[])), "in memory by now");
        assert!(!captured.are_on_disk(&[of(4), of(5)], &on_disk(&[0])), "that is another page's");
        assert!(captured.are_on_disk(&[of(4)], &on_disk(&[])), "of a page that the caller wrote whole");
        assert!(captured.are_on_disk(&[], &on_disk(&[])), "the page's changes are in the payload");
    }
}
