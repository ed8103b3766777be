//! Captures that change much of a page on disk: the page's new bytes go from the device to an image file,
//! once, and the frame names the image. Written to the log, they would wait in host memory for the next
//! snapshot, which would write them a second time.
//!
//! The image is of the staged bytes, from which the batch would be encoded otherwise. A copy with digests is
//! staged wave by wave as its image is written. Several threads write, a page each. The image is synced with
//! its name before the batch is logged, so a frame never names what a crash takes away. A page that comes to
//! memory before its batch is logged gets its changes from the log as ever.

use std::collections::HashMap;

use remanent_format::image::ImageRef;
use remanent_format::op::{Op, OpAt};
use remanent_format::{PageId, PageInfo};

use super::Committer;
use super::batch_images::BatchImages;
use super::capture::{CapturedBytes, Captures, WholeCapture};
use super::device_payload::CapturedDigests;
use super::digests::CopyWaves;
use super::disk_moves::{DiskOps, is_on_disk};
use crate::base::allocation::{collected, copied, insert, push, set_of};
use crate::base::sync::Mutex;
use crate::device::{Lane, Span};
use crate::error::Result;
use crate::write::batch::{ChunkDigests, CopySources, OpImages, WHOLE_PAGE_LEN_MIN};

/// A page of which more than this part changed is written whole: that is read back by one read, and takes no
/// memory until the next snapshot. So is a page whose changes find no room there.
const WHOLE_PART: u64 = 4;

/// Captured pages whose new bytes are in images.
#[derive(Default)]
pub(super) struct CapturedImages<'a> {
    /// The pages, in the order of the images.
    pages: Vec<CapturedPage>,
    /// Their images, which go if the batch is refused.
    pub file: BatchImages<'a>,
}

/// A page that is captured whole.
struct CapturedPage {
    /// The capture's index in the batch.
    step: usize,
    page: PageId,
    /// The digests of its image's chunks, if they are kept.
    digests: ChunkDigests,
}

impl CapturedImages<'_> {
    /// The images, by the operation's index, of the pages that are on disk still.
    pub fn images(&self, is_on_disk: impl Fn(PageId) -> bool) -> impl Iterator<Item = (usize, ImageRef)> {
        let by_step = self.pages.iter().zip(self.file.refs());
        by_step.filter(move |(page, _)| is_on_disk(page.page)).map(|(page, image)| (page.step, image))
    }

    /// The digests of what those of the images hold that the payload names.
    pub fn digests(&self, named: &OpImages) -> Result<CapturedDigests> {
        let mut digests = CapturedDigests::new();
        for page in self.pages.iter().filter(|page| named.contains_key(&page.step)) {
            let ChunkDigests { first, digests: of_page } = &page.digests;
            digests.insert(page.step, vec![ChunkDigests { first: *first, digests: copied(of_page)? }]);
        }
        Ok(digests)
    }

    /// Whether each image of these that the payload names is of a page on disk. The applier makes no bytes in
    /// memory of them.
    pub fn suit(&self, ops: &[OpAt<'_>], disk_ops: &DiskOps) -> bool {
        if self.pages.is_empty() {
            return true;
        }
        let pages = set_of(self.pages.iter().map(|one| one.page));
        let is_one = |op: &Op<'_>| matches!(op, Op::Image { page, .. } if pages.contains(page));
        (0..).zip(ops).all(|(index, at)| !is_one(&at.op) || disk_ops.has(index))
    }
}

impl Committer {
    /// The captured pages on disk that are written whole: those of which much changed, if they are worth an
    /// image file, and those whose changes find no room in memory: in `room` bytes of it, if that is given.
    fn captured_whole<'c>(
        &self,
        captures: &'c Captures<'_>,
        copied: &CopySources,
        room: Option<u64>,
    ) -> Result<Vec<WholeCapture<'c>>> {
        // A copy of a page on disk was made by a caller that knew of the page. Of others nothing is counted.
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
        // Where the store takes snapshots of its own, they make room, and the batch waits for it. Else later
        // batches must find some.
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

    /// Writes images of the captured pages on disk that are written whole. The files and their names are
    /// durable when this returns.
    ///
    /// # Errors
    /// No space or no memory; a device error. All are clean.
    pub(super) fn write_captured(
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

    /// The applier makes no bytes in memory of an image: a page that came to memory since is taken anew.
    #[test]
    fn images_suit_pages_that_are_on_disk_still() {
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
        assert!(captured.suit(&[of(5)], &on_disk(&[0])));
        assert!(!captured.suit(&[of(5)], &on_disk(&[])), "in memory by now");
        assert!(!captured.suit(&[of(4), of(5)], &on_disk(&[0])), "that is another page's");
        assert!(captured.suit(&[of(4)], &on_disk(&[])), "of a page that the caller wrote whole");
        assert!(captured.suit(&[], &on_disk(&[])), "the page's changes are in the payload");
    }
}
