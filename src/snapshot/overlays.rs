//! Decides which pages on disk get an overlay in a snapshot, instead of a whole image. An overlay contains only the
//! pieces that differ from an older whole image, its base.
//!
//! A page gets a whole image in each of these cases:
//!
//! - The page is short.
//! - Most of the page has changed.
//! - The page's current image is not verified, or known to be damaged.
//! - The page's current image is in a file that compaction rewrites, and an overlay would keep that file.
//!
//! A crash leaves image files that no manifest names.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use remanent_format::image::ImageRef;
use remanent_format::{PageId, PageInfo};

use super::Snapshots;
use crate::base::allocation::{collected, push, set_of};
use crate::catalog::KnownImages;
use crate::error::{Error, Result};
use crate::images::disk_pages::{DiskPage, NewOverlay};
use crate::images::{ImageWriters, ReadPass, Sink, resize};

/// A page gets an overlay only if it is longer than the chunk length divided by this number.
const CHUNK_SHARE: u64 = 32;

/// The writers of a snapshot's images, and the rules that choose between overlays and full images.
pub(super) struct GatherTarget<'w> {
    pub writers: &'w ImageWriters,
    pub overlays: OverlayRules,
}

/// The rules that decide which pages on disk get an overlay.
pub(super) struct OverlayRules {
    known: Arc<KnownImages>,
    /// The numbers of the image files that compaction rewrites.
    wasteful: BTreeSet<u64>,
    /// The maximum length in bytes of a page that always gets a whole image.
    whole_max: u64,
}

impl OverlayRules {
    fn allow(&self, page: PageId, copy: &DiskPage) -> bool {
        let Some(image) = copy.image().filter(|_| copy.byte_len() > self.whole_max) else { return false };
        // The last file of the image contains its base, or the image that would become the base.
        let stays = image.image().files().last().is_some_and(|(file, _)| !self.wasteful.contains(&file));
        stays && self.known.may_be_base(page, image.image(), image.is_proven())
    }
}

/// Overlays to be written as one chunk, each with the index of its page.
#[derive(Default)]
struct ShortOverlays<'p> {
    overlays: Vec<(usize, NewOverlay<'p>, Vec<u8>)>,
}

impl Snapshots {
    /// Returns the rules for a snapshot that rewrites the image files `wasteful`.
    pub(super) fn overlay_rules(&self, known: &Arc<KnownImages>, wasteful: &[(u64, u64)]) -> OverlayRules {
        let wasteful = set_of(wasteful.iter().map(|(file, _)| *file));
        OverlayRules { known: known.clone(), wasteful, whole_max: self.chunk_len / CHUNK_SHARE }
    }

    /// Estimates the length in bytes of the images of `pages`. Usually only a part of a page on disk is written, and
    /// files preallocated for full images would reserve unneeded space.
    pub(super) fn expected_bytes(&self, pages: &[(PageId, u64)]) -> Result<u64> {
        if !self.engine.disk_pages.is_any() {
            return Ok(pages.iter().map(|(_, len)| len).sum());
        }
        let (pages, whole_max) = (collected(pages.iter().copied())?, self.chunk_len / CHUNK_SHARE);
        self.engine.applier.turn(move |turn| {
            let expected = |(page, len): &(PageId, u64)| match turn.applied.on_disk.get(*page) {
                Some(copy) if *len > whole_max => copy.next_image_bytes(),
                _ => *len,
            };
            Ok(pages.iter().map(expected).sum())
        })
    }

    /// Writes overlays of those pages for which the rules permit one. Returns one element per page, in order: the
    /// overlay, or `None` if the page needs a whole image.
    pub(super) fn write_overlays(
        &self,
        target: &GatherTarget<'_>,
        pages: &[(PageInfo, DiskPage)],
        keep_pace: &dyn Fn(u64) -> Result<()>,
    ) -> Result<Vec<Option<ImageRef>>> {
        let mut images = collected(pages.iter().map(|_| None))?;
        let mut short = ShortOverlays::default();
        for (number, (info, copy)) in pages.iter().enumerate() {
            if !target.overlays.allow(info.page, copy) {
                continue;
            }
            let mut new = match copy.overlay() {
                Ok(Some(new)) => new,
                // If a part of the base is damaged, a whole image may still be possible, because later writes may cover
                // that part.
                Ok(None) | Err(Error::Damaged(_)) => continue,
                Err(error) => return Err(error),
            };
            let payload = new.payload();
            if payload.len > self.piece_len() {
                images[number] = Some(self.write_long_overlay(target, &mut new, keep_pace)?);
                continue;
            }
            let mut bytes = Vec::new();
            resize(&mut bytes, payload.len)?;
            new.read(0, &mut bytes)?;
            push(&mut short.overlays, (number, new, bytes))?;
        }
        for (number, image) in short.write(target.writers)? {
            images[number] = Some(image);
        }
        Ok(images)
    }

    fn write_long_overlay(
        &self,
        target: &GatherTarget<'_>,
        new: &mut NewOverlay<'_>,
        keep_pace: &dyn Fn(u64) -> Result<()>,
    ) -> Result<ImageRef> {
        let info = new.payload();
        let mut source = paced_pieces(|offset, out| new.read(offset, out), keep_pace);
        let piece_len = self.piece_len();
        let written =
            target.writers.append(|file| file.write_uncompressed_stream(&info, piece_len, &mut source))?;
        drop(source);
        Ok(new.image(&written.expect("its bytes are there")))
    }
}

impl ShortOverlays<'_> {
    /// Writes all overlays as one chunk, because each chunk occupies at least one block of the file system.
    fn write(self, writers: &ImageWriters) -> Result<Vec<(usize, ImageRef)>> {
        if self.overlays.is_empty() {
            return Ok(Vec::new());
        }
        let payloads = collected(self.overlays.iter().map(|(_, new, _)| new.payload()))?;
        let bytes = self.overlays.iter().map(|(.., bytes)| &bytes[..]);
        let pages = collected(payloads.iter().zip(bytes))?;
        let stored = writers.append(|file| file.write_uncompressed(&pages))?;
        let images = self.overlays.iter().zip(stored);
        collected(images.map(|((number, new, _), payload)| (*number, new.image(&payload))))
    }
}

/// Converts `read`, which fills a slice from an offset, to a rate-limited source for an image writer.
pub(super) fn paced_pieces(
    mut read: impl FnMut(u64, &mut [u8]) -> Result<()>,
    keep_pace: &dyn Fn(u64) -> Result<()>,
) -> impl FnMut(Range<u64>, ReadPass, Sink<'_>) -> Result<bool> {
    let (mut done, mut piece) = (0, Vec::new());
    move |range, _, sink| {
        resize(&mut piece, range.end - range.start)?;
        read(range.start, &mut piece)?;
        sink(&piece, crc32fast::hash(&piece))?;
        done += range.end - range.start;
        keep_pace(done)?;
        Ok(true)
    }
}
