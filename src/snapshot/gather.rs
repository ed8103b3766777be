//! Floor 6. Gathering: pages are copied aside on the device, in lane order with the deltas, and drained from
//! there into an image file. Where the budget leaves no room for the copies, pages go to the host in lane order:
//! that keeps deltas waiting for longer, and a store that fills its budget has its snapshots.
//!
//! A crash here leaves an image file that is nobody's.

use std::time::Instant;

use remanent_format::limits::{FRAME_ALIGN, align_up};
use remanent_format::manifest::ManifestEntry;
use remanent_format::{PageId, PageInfo, Place};

use super::Snapshots;
use crate::arena::PageMemory;
use crate::crew;
use crate::device::{Command, CommandList, Fence, Lane, Pending, Span, StagingSpan};
use crate::error::{Error, Result};
use crate::images::{ImageWriter, chunk_threads, chunks};
use crate::keeping::entry;
use crate::phases::{self, Phase};
use crate::staging::StagingBuf;

/// Pages caught by one gather.
struct Caught {
    pages: Vec<(PageInfo, usize)>,
    len: usize,
    copies: Copies,
}

/// Where the copies are that a gather makes.
enum Copies {
    /// On the device, behind this fence.
    Aside(PageMemory, Fence),
    /// On their way to the host.
    UnderWay(Pending),
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
        let drained = self.drain(caught.copies, caught.len)?;
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
            let len = at as usize;
            let place = caught.first().map_or(Place::Host, |(info, _)| info.place);
            let area = match turn.arena.allocate_scratch(place, at) {
                Ok(area) => Some(area),
                Err(Error::OverBudget { .. } | Error::OutOfMemory { .. }) => None,
                Err(error) => return Err(error),
            };
            let list = match &area {
                Some(area) => {
                    let commands = vec![Command::Gather { sources, target: area.span() }];
                    CommandList { commands, staging: Vec::new() }
                }
                None => {
                    let staged = |at: u64, len| StagingSpan { index: 0, offset: at as usize, len };
                    let download = |(source, at): (Span, u64)| Command::Download {
                        source,
                        target: staged(at, source.len as usize),
                    };
                    let commands = sources.into_iter().map(download).collect();
                    CommandList { commands, staging: vec![staging.take(len)?.into_staging()] }
                }
            };
            let pending = match turn.submit(list) {
                Ok(pending) => pending,
                Err(error) => {
                    area.into_iter().try_for_each(|area| turn.arena.discard(area))?;
                    return Err(error);
                }
            };
            if let Some(cut) = &mut turn.applied.cut {
                cut.retire_used(turn.arena, pending.fence());
            }
            let copies = match area {
                Some(area) => Copies::Aside(area, pending.fence()),
                None => Copies::UnderWay(pending),
            };
            Ok(Caught { pages: caught, len, copies })
        })
    }

    /// Brings copies to the host, on a lane of its own if they are on the device, and gives their memory back.
    fn drain(&self, copies: Copies, len: usize) -> Result<StagingBuf> {
        let drained = match copies {
            Copies::UnderWay(pending) => pending.finish(&*self.device)?,
            Copies::Aside(area, fence) => {
                let (last_use, drained) = match self.queue_drain(&area, fence, len) {
                    Ok(pending) => (pending.fence(), pending.finish(&*self.device)),
                    Err(error) => (fence, Err(error)),
                };
                match &drained {
                    Ok(_) => self.arena.discard(area)?,
                    // It may still be in use.
                    Err(_) => self.arena.retire(area, last_use),
                }
                drained?
            }
        };
        Ok(StagingBuf::new(drained.into_iter().next().expect("one staging went in"), len))
    }

    fn queue_drain(&self, area: &PageMemory, fence: Fence, len: usize) -> Result<Pending> {
        let staging = vec![self.staging.take(len)?.into_staging()];
        self.device.after(Lane::Drain, fence)?;
        let target = StagingSpan { index: 0, offset: 0, len };
        let commands = vec![Command::Download { source: area.span(), target }];
        self.device.submit(Lane::Drain, CommandList { commands, staging })
    }
}
