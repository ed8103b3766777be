//! Floor 6. Gathering: pages are copied aside on the device, in lane order with the deltas, and drained from
//! there into an image file.
//!
//! A crash here leaves an image file that is nobody's.

use std::time::Instant;

use remanent_format::limits::{FRAME_ALIGN, align_up};
use remanent_format::manifest::ManifestEntry;
use remanent_format::{PageId, PageInfo};

use super::Snapshots;
use crate::crew;
use crate::device::{Command, CommandList, Fence, Lane, MemoryId, Span, StagingSpan};
use crate::error::{Error, Result};
use crate::images::{ImageWriter, chunk_threads, chunks};
use crate::keeping::entry;
use crate::phases::{self, Phase};
use crate::staging::StagingBuf;

/// Pages caught by one gather.
struct Caught {
    pages: Vec<(PageInfo, usize)>,
    area: MemoryId,
    len: usize,
    fence: Fence,
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
        let caught = self.gather(chunk.iter().map(|(page, _)| *page).collect())?;
        let drained = self.drain(&caught)?;
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

    /// Copies pages aside on the device, in lane order with the deltas. Pages that are gone are left out.
    fn gather(&self, pages: Vec<PageId>) -> Result<Caught> {
        let device = self.device.clone();
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
                        Some(info) => (info.clone(), turn.applied.memory[&page].span()),
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
            // The area is scratch: it lives for one chunk and belongs to no page, so no budget covers it.
            let place = caught.first().map_or(remanent_format::Place::Host, |(info, _)| info.place);
            let area = device.allocate(place, at)?;
            let target = Span { memory: area, offset: 0, len: at };
            let list =
                CommandList { commands: vec![Command::Gather { sources, target }], staging: Vec::new() };
            match turn.submit(list) {
                Ok(pending) => {
                    let fence = pending.fence();
                    if let Some(cut) = &mut turn.applied.cut {
                        cut.retire_used(turn.arena, fence);
                    }
                    Ok(Caught { pages: caught, area, len: at as usize, fence })
                }
                Err(error) => {
                    give_back(device.release(area));
                    Err(error)
                }
            }
        })
    }

    /// Brings a gathered area to the host, on a lane of its own, and gives the area back.
    fn drain(&self, caught: &Caught) -> Result<StagingBuf> {
        let Caught { area, len, fence, .. } = *caught;
        let queued = self.staging.take(len).and_then(|staging| {
            self.device.after(Lane::Drain, fence)?;
            let source = Span { memory: area, offset: 0, len: len as u64 };
            let target = StagingSpan { index: 0, offset: 0, len };
            let commands = vec![Command::Download { source, target }];
            self.device.submit(Lane::Drain, CommandList { commands, staging: vec![staging.into_staging()] })
        });
        let drained = match queued {
            // An area whose last use cannot be waited for is not given back: it may still be in use.
            Ok(pending) => pending.finish(&*self.device)?,
            Err(error) => {
                give_back(self.device.wait(fence).and_then(|()| self.device.release(area)));
                return Err(error);
            }
        };
        self.device.release(area)?;
        Ok(StagingBuf::new(drained.into_iter().next().expect("one staging went in"), len))
    }
}

/// After a failure: a second one, in giving scratch memory back, is only noted.
fn give_back(released: Result<()>) {
    if let Err(error) = released {
        tracing::warn!(%error, "cannot give a gathered area back");
    }
}
