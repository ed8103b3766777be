//! Writes images without the host: the device copies pages directly to the mapped memory of an image file, and reads
//! them back from there when the snapshot is verified. The host writes only the heads of chunks.
//!
//! A chunk is written through a staging buffer on the host ([`super::gather`]) if the budget has no room for the
//! device's copy of it, or if it would lie outside the mapped part of the file. The host then also reads it back.
//!
//! A crash leaves image files that no manifest names.

use std::ops::Range;

use remanent_format::image::{Chunk, ImageRef};
use remanent_format::limits::{FRAME_ALIGN, GROUP_ALIGN, align_up};
use remanent_format::{PageId, PageInfo, Place};

use super::Snapshots;
use super::gather::{ChunkSources, GatheredEntries, GatheredPages, PlacedPage, gathered_sources};
use super::overlays::GatherTarget;
use crate::applier::{Drain, Drained, GatheredBytes};
use crate::base::allocation::{collected, push};
use crate::error::Result;
use crate::images::ImageWriter;

impl Snapshots {
    /// Captures pages as one chunk, and makes the device copy them to their positions in the image file.
    pub(super) fn gather_in_place(
        &self,
        target: &GatherTarget<'_>,
        chunk: &[(PageId, u64)],
    ) -> Result<GatheredEntries> {
        let staging = self.engine.staging.clone();
        let pages = collected(chunk.iter().map(|(page, _)| *page))?;
        let GatheredPages { pages, on_disk, copies: (gathered, chunk_len, place) } = self.gather_by(
            pages,
            |(gathered, ..): &(GatheredBytes, u64, Place)| gathered.fence(),
            move |turn, chunk| {
                let chunk_len = chunk.chunk_len();
                let ChunkSources { place, sources, head_len, len } = chunk;
                Ok((turn.gather_aside(place, sources, len, head_len, chunk_len, &staging)?, chunk_len, place))
            },
        )?;
        // Empty pages have an entry but no image.
        let images: Vec<&(PageInfo, usize)> = collected(pages.iter().filter(|(info, _)| info.len > 0))?;
        let references = match (images.is_empty(), gathered) {
            // All pages are deleted or empty, so there are no images and no chunk.
            (true, GatheredBytes::Aside(copies)) => {
                copies.give_up();
                Vec::new()
            }
            (true, GatheredBytes::Staged(drain)) => {
                self.engine.staging.put(drain.finish(&self.engine.device)?.bytes.into_staging());
                Vec::new()
            }
            (false, GatheredBytes::Staged(drain)) => {
                target.writers.append(|file| self.write_drained(file, &images, drain))?
            }
            (false, GatheredBytes::Aside(copies)) => target.writers.append(|file| {
                let Some((target, offset)) = file.target().zip(file.take_place(chunk_len)) else {
                    let drain = match self.engine.staging.take(chunk_len as usize) {
                        Ok(staged) => copies.drain_to(staged),
                        Err(error) => {
                            copies.give_up();
                            return Err(error);
                        }
                    };
                    return self.write_drained(file, &images, drain);
                };
                let gaps = gaps(&images, chunk_len)?;
                let sums = copies.finish_in_place(&self.engine.device, target, offset, &gaps)?;
                let summed = images.iter().zip(sums).map(|((info, _), sum)| (info, sum.finalize()));
                let summed: Vec<(&PageInfo, u32)> = collected(summed)?;
                let references = file.finish_in_place(offset, chunk_len, &summed, Some(place))?;
                self.progress.copied_in_place(images.iter().map(|(info, _)| info.len).sum());
                Ok(references)
            })?,
        };
        self.chunk_entries(target, chunk, &pages, references, on_disk)
    }

    /// Writes a chunk through a staging buffer on the host.
    fn write_drained(
        &self,
        file: &ImageWriter,
        images: &[&(PageInfo, usize)],
        drain: Drain,
    ) -> Result<Vec<ImageRef>> {
        let Drained { mut bytes, sums } = drain.finish(&self.engine.device)?;
        let images = images.iter().zip(sums).map(|((info, at), sum)| (info, *at, sum.finalize()));
        let images: Vec<(&PageInfo, usize, u32)> = collected(images)?;
        let written = file.write_staged(&images, &mut bytes);
        self.engine.staging.put(bytes.into_staging());
        written
    }

    /// Writes the image of a captured long page to its position in the file, piece by piece.
    pub(super) fn write_gathered_in_place(
        &self,
        file: &ImageWriter,
        info: &PageInfo,
        keep_pace: &dyn Fn(u64) -> Result<()>,
    ) -> Result<PlacedPage> {
        let (page, place) = (info.page, info.place);
        let head_len = Chunk::head_len(1);
        let chunk_len = align_up(head_len + info.len, GROUP_ALIGN);
        let Some((target, offset)) = file.target().zip(file.take_place(chunk_len)) else {
            return Ok(PlacedPage::NoPlace);
        };
        let (mut sum, mut is_in_place) = (crc32fast::Hasher::new(), true);
        for start in (0..info.len).step_by(self.piece_len() as usize) {
            let range = start..info.len.min(start + self.piece_len());
            let staging = self.engine.staging.clone();
            let gathered = self.engine.applier.turn(move |turn| {
                turn.intact()?;
                let Some(sources) = gathered_sources(turn, page, &range)? else { return Ok(None) };
                let len = range.end - range.start;
                let gathered = turn.gather_aside(place, sources, len, 0, len, &staging)?;
                // This range is gathered, so it need not be preserved from later writes.
                turn.gathered(page, range.end, gathered.fence());
                Ok(Some(gathered))
            })?;
            // The captured state is lost. The space that was reserved in the file stays unused, without a chunk head.
            let Some(gathered) = gathered else { return Ok(PlacedPage::Gone) };
            let (at, device) = (offset + head_len + start, &*self.engine.device);
            match gathered {
                GatheredBytes::Aside(copies) => {
                    let sums = copies.finish_in_place(device, target, at, &[])?;
                    sums.iter().for_each(|part| sum.combine(part));
                }
                GatheredBytes::Staged(drain) => {
                    let drained = drain.finish(device)?;
                    drained.sums.iter().for_each(|part| sum.combine(part));
                    let written = file.write_between(at, &drained.bytes);
                    self.engine.staging.put(drained.bytes.into_staging());
                    written?;
                    is_in_place = false;
                }
            }
            // The whole page was counted when its space was reserved, so no bytes are added here.
            keep_pace(0)?;
        }
        let end = head_len + info.len;
        file.write_between(offset + end, &vec![0; (chunk_len - end) as usize])?;
        let from = is_in_place.then_some(place);
        let images = file.finish_in_place(offset, chunk_len, &[(info, sum.finalize())], from)?;
        self.progress.copied_in_place(if is_in_place { info.len } else { 0 });
        Ok(PlacedPage::Written(images[0]))
    }
}

/// Returns the ranges of a chunk that no image covers, starting at the end of the first image. The file must contain
/// zeros in these ranges.
fn gaps(images: &[&(PageInfo, usize)], chunk_len: u64) -> Result<Vec<Range<u64>>> {
    let mut gaps = Vec::new();
    let ends = images.iter().map(|(info, at)| *at as u64 + info.len);
    let next = images.iter().skip(1).map(|(_, at)| *at as u64).chain([chunk_len]);
    for (end, next) in ends.zip(next) {
        assert!(next == chunk_len || next == align_up(end, FRAME_ALIGN), "images that follow each other");
        if end < next {
            push(&mut gaps, end..next)?;
        }
    }
    Ok(gaps)
}
