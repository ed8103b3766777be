//! Floor 6. Gathering: pages are caught in lane order with the deltas, a chunk at a time, and drained into an
//! image file.
//!
//! A crash here leaves an image file that is nobody's.

use remanent_format::limits::{FRAME_ALIGN, align_up};
use remanent_format::manifest::ManifestEntry;
use remanent_format::{PageId, PageInfo, Place};

use super::Snapshots;
use crate::applier::Drain;
use crate::crew;
use crate::error::{Error, Result};
use crate::images::{ImageWriter, chunk_threads, chunks};
use crate::keeping::entry;
use crate::phases::{self, Phase};
use crate::staging::StagingBuf;
use crate::sync::Instant;

/// Pages caught by one gather, each with where its bytes begin.
struct Caught {
    pages: Vec<(PageInfo, usize)>,
    copies: Drain,
}

impl Snapshots {
    /// Phase 2. While one chunk is checksummed and written, others are gathered.
    pub(super) fn gather_all(
        &self,
        writer: &ImageWriter,
        pages: &[(PageId, u64)],
        paced: bool,
    ) -> Result<Vec<ManifestEntry>> {
        let began = Instant::now();
        let chunks = chunks(pages, |(_, len)| *len);
        let longest = pages.iter().map(|(_, len)| *len).max().unwrap_or(0);
        // Who is to be slow needs no help.
        let threads = if paced { 1 } else { chunk_threads(longest) };
        let write = |(): &mut (), index: usize| {
            let entries = self.gather_chunk(writer, chunks[index])?;
            if paced {
                self.pace.keep(began, writer.byte_len())?;
            }
            Ok::<_, Error>(entries)
        };
        let mut entries = crew::map(threads, chunks.len(), || (), write)?.concat();
        entries.sort_unstable_by_key(|entry| entry.page);
        Ok(entries)
    }

    /// Gathers pages, brings them to the host, and writes them as one chunk.
    fn gather_chunk(&self, writer: &ImageWriter, chunk: &[(PageId, u64)]) -> Result<Vec<ManifestEntry>> {
        let _phase = phases::enter(Phase::SnapshotGather);
        // To be written again though nothing changed them: their file is wasteful, or damaged.
        self.applier.cold().wait(chunk.iter().map(|(page, _)| *page))?;
        let len: u64 = chunk.iter().map(|(_, len)| align_up(*len, FRAME_ALIGN)).sum();
        let staged = self.staging.take(len as usize)?;
        let caught = self.gather(chunk.iter().map(|(page, _)| *page).collect(), staged)?;
        let drained = caught.copies.finish(&*self.device)?;
        let images: Vec<(&PageInfo, &[u8])> = caught
            .pages
            .iter()
            .filter(|(info, _)| info.len > 0)
            .map(|(info, at)| (info, &drained[*at..*at + info.len as usize]))
            .collect();
        let references = if images.is_empty() { Vec::new() } else { writer.write_chunk(&images)? };
        self.staging.give(drained.into_staging());
        self.progress.gathered(chunk.len() as u64, chunk.iter().map(|(_, len)| len).sum());
        let mut references = references.into_iter();
        let entry =
            |(info, _): &(PageInfo, usize)| entry(info, if info.len > 0 { references.next() } else { None });
        Ok(caught.pages.iter().map(entry).collect())
    }

    /// Catches pages in lane order with the deltas, on their way to `staged`. Pages that are gone are left out.
    fn gather(&self, pages: Vec<PageId>, staged: StagingBuf) -> Result<Caught> {
        let staging = self.staging.clone();
        self.applier.turn(move |turn| {
            turn.intact()?;
            let mut caught = Vec::with_capacity(pages.len());
            let mut sources = Vec::new();
            let mut at = 0;
            for page in pages {
                let kept = match &mut turn.applied.cut {
                    Some(cut) => cut.take(page)?,
                    None => None,
                };
                let (info, source) = match kept {
                    Some((info, memory)) => (info, memory.span()),
                    None => match turn.applied.table.get(page) {
                        Some(info) => (info.clone(), turn.applied.memory[page].span()),
                        None => continue,
                    },
                };
                if info.len > 0 {
                    sources.push((source, at));
                }
                let here = at as usize;
                at = align_up(at + info.len, FRAME_ALIGN);
                caught.push((info, here));
            }
            let place = caught.first().map_or(Place::Host, |(info, _)| info.place);
            let copies = turn.drain(place, sources, at, staged, &staging)?;
            if let Some(cut) = &mut turn.applied.cut {
                cut.retire_used(turn.arena, copies.fence());
            }
            Ok(Caught { pages: caught, copies })
        })
    }
}
