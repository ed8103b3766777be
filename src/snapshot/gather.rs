//! Gathering: pages are copied aside in lane order with the deltas, one chunk at a time, and drained into
//! image files, one file per writing thread.
//!
//! The copies run in lane order because a copy concurrent with a delta could contain half of a batch. They
//! are made on the device first because the transfer to the host is slow, and no delta should wait for it.
//!
//! A crash here leaves image files that nothing names.

use std::collections::BTreeMap;
use std::ops::Range;

use remanent_format::image::{Chunk, ImageRef};
use remanent_format::limits::{FRAME_ALIGN, GROUP_ALIGN, align_up};
use remanent_format::manifest::ManifestEntry;
use remanent_format::{PageId, PageInfo, Place};

use super::Snapshots;
use super::overlays::{GatherTarget, paced_pieces};
use crate::applier::{AppliedState, Drain, Drained, Turn};
use crate::base::allocation::{append, collected, make_room, push};
use crate::base::parallel;
use crate::base::phases;
use crate::base::phases::Phase;
use crate::base::sync::{Instant, Mutex};
use crate::catalog::entry;
use crate::device::{CommandList, Fence, Span};
use crate::error::Result;
use crate::images::disk_pages::DiskPage;
use crate::images::{ImageWriter, PIECE_BYTES, ReadPass, Sink, chunks, resize};
use crate::memory::staging::StagingBuf;

/// The minimum length of a piece: shorter pieces are not worth a turn, however short chunks are.
const PIECE_LEN_MIN: u64 = 64;
/// Chunks merged into one where the device copies to files: their bytes are held on the device only.
const IN_PLACE_CHUNKS: u64 = 4;
/// The number of attempts to gather a long page piece by piece before it is gathered whole.
const GATHERS_MAX: usize = 3;

/// Pages caught by one gather, each with the offset of its bytes in staging, where the chunk is built.
pub(super) struct GatheredPages<C> {
    pub pages: Vec<(PageInfo, usize)>,
    /// Pages on disk, which are still to be read.
    pub on_disk: Vec<(PageInfo, DiskPage)>,
    /// The copies, or the transfer to staging.
    pub copies: C,
}

/// The pages of a chunk, and the bytes to copy for it.
pub(super) struct ChunkSources {
    /// The place where the pages are copied aside: that of the first page.
    pub place: Place,
    /// The pages' memory, each with its offset after the chunk's head.
    pub sources: Vec<(Span, u64)>,
    /// The length of the chunk's head.
    pub head_len: u64,
    /// The length of the pages after the head, up to the chunk's final padding.
    pub len: u64,
}

impl ChunkSources {
    /// Returns the length of the chunk.
    pub fn chunk_len(&self) -> u64 {
        align_up(self.head_len + self.len, GROUP_ALIGN)
    }
}

/// The manifest entries of gathered pages.
#[derive(Default)]
pub(super) struct GatheredEntries {
    /// The entries, in ascending order.
    pub entries: Vec<ManifestEntry>,
    /// The pages on disk among them.
    pub on_disk: Vec<GatheredDiskPage>,
}

/// A page on disk as it was gathered, and the image made from it; `None` for an empty page.
pub(crate) struct GatheredDiskPage {
    pub page: PageId,
    pub copy: DiskPage,
    pub image: Option<ImageRef>,
}

/// The source of a long page's bytes.
enum LongPage {
    InMemory(PageInfo),
    OnDisk(PageInfo, DiskPage),
}

/// The outcome of writing a long page in place.
pub(super) enum PlacedPage {
    Written(ImageRef),
    /// The bytes are lost: a batch changed more of the page than could be kept aside.
    Gone,
    /// The file's memory has no room for the page.
    NoPlace,
}

/// The entries of chunks in chunk order, whichever chunk is written first. Entries are merged while other
/// chunks are written: merging after the last one took 4 ms for 65,536 pages on 2 cores.
struct OrderedEntries {
    /// The entries in order, up to the first missing chunk.
    entries: Vec<ManifestEntry>,
    /// The pages on disk among them, in any order.
    on_disk: Vec<GatheredDiskPage>,
    /// The number of chunks merged into `entries`.
    chunks: usize,
    /// Entries of later chunks, which wait for one that is not yet written.
    early: BTreeMap<usize, Vec<ManifestEntry>>,
}

impl OrderedEntries {
    /// Allocates room for the entries of all pages.
    fn of(page_count: usize) -> Result<Self> {
        let mut entries = Vec::new();
        make_room(&mut entries, page_count)?;
        Ok(Self { entries, on_disk: Vec::new(), chunks: 0, early: BTreeMap::new() })
    }

    /// Adds the entries of a chunk, and merges every chunk that is now contiguous with the first.
    fn put(&mut self, chunk: usize, GatheredEntries { entries, mut on_disk }: GatheredEntries) {
        self.on_disk.append(&mut on_disk);
        self.early.insert(chunk, entries);
        // A chunk that closes a gap releases all chunks that waited after it.
        while let Some(mut next) = self.early.remove(&self.chunks) {
            self.entries.append(&mut next);
            self.chunks += 1;
        }
    }
}

impl Snapshots {
    /// Returns the length of one piece of a long page. Pages up to this length are gathered whole.
    pub(super) fn piece_len(&self) -> u64 {
        self.chunk_len.saturating_mul(2).clamp(PIECE_LEN_MIN, PIECE_BYTES)
    }

    /// Returns the number of chunks in which these pages are gathered. No more files than that are created.
    pub(super) fn chunk_count(&self, pages: &[(PageId, u64)]) -> Result<u64> {
        Ok(chunks(pages, self.chunk_len, |(_, len)| *len)?.len() as u64)
    }

    /// Runs phase 2. While one thread checksums and writes a chunk, others gather theirs.
    pub(super) fn gather_all(
        &self,
        target: &GatherTarget<'_>,
        threads: usize,
        pages: &[(PageId, u64)],
        paced: bool,
    ) -> Result<GatheredEntries> {
        // The pace counts from here: time spent in other phases is not made up for.
        let began = Instant::now();
        // Where a device copies to files, each chunk costs kernel launches in addition to its bytes, so fewer
        // chunks are faster.
        let writers = target.writers;
        let chunks_together = if writers.is_in_place() { IN_PLACE_CHUNKS } else { 1 };
        let chunk_len = self.chunk_len.saturating_mul(chunks_together);
        let chunks = chunks(pages, chunk_len, |(_, len)| *len)?;
        let gathered_part = Mutex::new(OrderedEntries::of(pages.len())?);
        let write = |(): &mut (), index: usize| {
            let keep_pace =
                |more| if paced { self.pace.keep(began, writers.byte_len() + more) } else { Ok(()) };
            let entries = match chunks[index].split_last() {
                // A long page at the end of a device's chunk is held whole there, like the pages before it.
                Some((long, others)) if long.1 > self.piece_len() => {
                    let mut gathered = self.gather_chunk(target, others)?;
                    let GatheredEntries { entries, on_disk } = self.gather_long(target, *long, &keep_pace)?;
                    gathered.entries.extend(entries);
                    gathered.on_disk.extend(on_disk);
                    gathered
                }
                _ => self.gather_chunk(target, chunks[index])?,
            };
            gathered_part.lock().put(index, entries);
            keep_pace(0)
        };
        parallel::map_indexed(threads, chunks.len(), || (), write)?;
        let gathered_part = gathered_part.into_inner();
        // A missing entry would be a page lost in the next crash.
        assert!(gathered_part.chunks == chunks.len(), "each chunk was put in its place");
        Ok(GatheredEntries { entries: gathered_part.entries, on_disk: gathered_part.on_disk })
    }

    /// Gathers a long page piece by piece, writing each piece before the next one is gathered. Holding it
    /// whole took three to four times its length of host memory for a page of one gigabyte.
    ///
    /// The image is still that of a single moment: parts that a batch is about to write are copied aside
    /// first, up to a limit. If batches change more than that, the page is started again, and finally
    /// gathered whole.
    fn gather_long(
        &self,
        target: &GatherTarget<'_>,
        (page, len): (PageId, u64),
        keep_pace: &dyn Fn(u64) -> Result<()>,
    ) -> Result<GatheredEntries> {
        let _phase = phases::enter(Phase::SnapshotGather);
        self.engine.applier.unloaded().wait([page])?;
        // A page under constant writes may never be caught piece by piece, so attempts are limited.
        for _ in 0..GATHERS_MAX {
            // `None`: the page was deleted since it was chosen. The record of the delete becomes a tombstone.
            let info = match self.begin_gather(page)? {
                Some(LongPage::InMemory(info)) => info,
                Some(LongPage::OnDisk(info, copy)) => {
                    self.progress.gathered(1, len);
                    return self.write_on_disk(target, vec![(info, copy)], keep_pace);
                }
                None => {
                    self.progress.gathered(1, len);
                    return Ok(GatheredEntries::default());
                }
            };
            // An empty page has no image and takes no space in a file.
            let written = match info.len {
                0 => Ok(None),
                _ => target.writers.append(|file| {
                    match self.write_gathered_in_place(file, &info, keep_pace)? {
                        PlacedPage::NoPlace => self.write_gathered(file, &info, keep_pace),
                        PlacedPage::Gone => Ok(None),
                        PlacedPage::Written(image) => Ok(Some(image)),
                    }
                }),
            };
            // Caught or not, the applier must stop watching the page: otherwise every batch that writes to it
            // would be copied aside for nothing.
            self.engine.applier.turn(move |turn| {
                if let Some(cut) = &mut turn.applied.cut {
                    cut.take(page)?;
                    // Pieces of the kept copy may still be in flight: its memory is freed after them.
                    let last_use = turn.submit(CommandList::default())?.fence();
                    if let Some(cut) = &mut turn.applied.cut {
                        cut.retire_used(turn.arena, last_use);
                    }
                }
                turn.end_gather(page)
            })?;
            // Checked after the turn, so that an error does not leave the applier watching the page forever.
            let image = written?;
            if image.is_some() || info.len == 0 {
                self.progress.gathered(1, len);
                let entries = vec![entry(&info, image)];
                return Ok(GatheredEntries { entries, on_disk: Vec::new() });
            }
        }
        // Gathering the page whole, in one turn, takes its full length of memory but always ends.
        tracing::debug!(%page, "a long page changes faster than it is gathered: it is gathered whole");
        self.gather_chunk(target, &[(page, len)])
    }

    /// Starts catching a page; returns `None` if it was deleted. For an exact snapshot the cut already keeps
    /// its bytes.
    fn begin_gather(&self, page: PageId) -> Result<Option<LongPage>> {
        self.engine.applier.turn(move |turn| {
            turn.intact()?;
            if let Some((info, copy)) = take_on_disk(turn, page)? {
                return Ok(Some(LongPage::OnDisk(info, copy)));
            }
            // The cut takes precedence: an exact snapshot is of the cut's moment, not of this one.
            if let Some(cut) = &turn.applied.cut
                && let Some((info, _)) = cut.find(page)?
            {
                return Ok(Some(LongPage::InMemory(info)));
            }
            let Some(info) = turn.applied.table.get(page) else { return Ok(None) };
            // From now on, a batch that is about to write to the page keeps its old bytes aside.
            if turn.applied.cut.is_none() {
                turn.begin_gather(info.clone());
            }
            Ok(Some(LongPage::InMemory(info)))
        })
    }

    /// Writes the image of a caught page. Returns `None` if a batch changed more of it than could be kept
    /// aside.
    fn write_gathered(
        &self,
        file: &ImageWriter,
        info: &PageInfo,
        keep_pace: &dyn Fn(u64) -> Result<()>,
    ) -> Result<Option<ImageRef>> {
        let (page, place) = (info.page, info.place);
        let mut gathered = 0;
        // Compression reads some pieces twice: first as a sample, and again if they are stored uncompressed.
        let mut piece = |range: Range<u64>, pass: ReadPass, sink: Sink<'_>| {
            let len = range.end - range.start;
            let staging = self.engine.staging.clone();
            let staged = staging.take(len as usize)?;
            let drain = self.engine.applier.turn(move |turn| {
                turn.intact()?;
                // More was written than could be kept aside: this catch is lost.
                let Some(sources) = gathered_sources(turn, page, &range)? else { return Ok(None) };
                let drain = turn.drain(place, sources, len, staged, 0, Some(&staging))?;
                // The last pass has read this range: later writes to it need not be kept aside.
                if pass == ReadPass::Last {
                    turn.gathered(page, range.end, drain.fence());
                }
                Ok(Some(drain))
            })?;
            let Some(drain) = drain else { return Ok(false) };
            // Waits outside the lane: batches are applied meanwhile.
            let drained = drain.finish(&*self.engine.device)?;
            // Return the staging before looking at the error.
            let taken = sink(&drained.bytes, drained.sum());
            self.engine.staging.put(drained.bytes.into_staging());
            taken?;
            // The pace counts bytes when they are gathered, before they are in the file.
            gathered += len;
            keep_pace(gathered)?;
            Ok(true)
        };
        file.write_long(info, self.piece_len(), &mut piece)
    }

    /// Gathers pages, transfers them to the host, and writes them as one chunk.
    ///
    /// The staging buffer is as long as the chunk and is allocated before the turn: a GPU pins memory at 1.5
    /// GB/s, and the applier would wait for that.
    fn gather_chunk(&self, target: &GatherTarget<'_>, chunk: &[(PageId, u64)]) -> Result<GatheredEntries> {
        if chunk.is_empty() {
            return Ok(GatheredEntries::default());
        }
        let _phase = phases::enter(Phase::SnapshotGather);
        // A page may be unloaded here although no batch changed it, because its file is wasteful or its image
        // damaged.
        self.engine.applier.unloaded().wait(chunk.iter().map(|(page, _)| *page))?;
        if target.writers.is_in_place() {
            return self.gather_in_place(target, chunk);
        }
        // As long as the chunk in the file: head, payloads and padding. The chunk is written from the buffer
        // that it was drained to.
        let len: u64 = chunk.iter().map(|(_, len)| align_up(*len, FRAME_ALIGN)).sum();
        let chunk_len = align_up(Chunk::head_len(chunk.len() as u64) + len, GROUP_ALIGN);
        let staged = self.engine.staging.take(chunk_len as usize)?;
        let gathered_part = self.gather(collected(chunk.iter().map(|(page, _)| *page))?, staged)?;
        // The copies of the non-empty pages, in page order, each with its checksum.
        let Drained { mut bytes, sums } = gathered_part.copies.finish(&*self.engine.device)?;
        // Empty pages have an entry but no image.
        let images = gathered_part.pages.iter().filter(|(info, _)| info.len > 0).zip(sums);
        let images: Vec<(&PageInfo, usize, u32)> =
            collected(images.map(|((info, at), sum)| (info, *at, sum.finalize())))?;
        // One thread at a time appends to a file, so the images of a chunk are contiguous.
        let references = match images.is_empty() {
            true => Vec::new(),
            false => target.writers.append(|file| file.write_staged(&images, &mut bytes))?,
        };
        self.engine.staging.put(bytes.into_staging());
        self.chunk_entries(target, chunk, &gathered_part.pages, references, gathered_part.on_disk)
    }

    /// Writes images of pages on disk without holding any of them in memory whole, and returns their entries
    /// in the order of `pages`.
    fn write_on_disk(
        &self,
        target: &GatherTarget<'_>,
        pages: Vec<(PageInfo, DiskPage)>,
        keep_pace: &dyn Fn(u64) -> Result<()>,
    ) -> Result<GatheredEntries> {
        let mut gathered = GatheredEntries::default();
        let (writers, overlays) = (target.writers, self.write_overlays(target, &pages, keep_pace)?);
        for ((info, copy), overlay) in pages.into_iter().zip(overlays) {
            let image = match info.len {
                0 => None,
                _ if overlay.is_some() => overlay,
                len if len > self.piece_len() => writers.append(|file| {
                    let mut source = paced_pieces(|offset, out| copy.read(offset, out), keep_pace);
                    file.write_long(&info, self.piece_len(), &mut source)
                })?,
                len => {
                    let mut bytes = Vec::new();
                    resize(&mut bytes, len)?;
                    copy.read(0, &mut bytes)?;
                    writers.append(|file| file.write_chunk(&[(&info, &bytes)]))?.pop()
                }
            };
            assert!(image.is_some() || info.len == 0); // I7: everything that the manifest names is written.
            push(&mut gathered.entries, entry(&info, image))?;
            push(&mut gathered.on_disk, GatheredDiskPage { page: info.page, copy, image })?;
        }
        Ok(gathered)
    }

    /// Builds the entries of a chunk whose pages were gathered. `images` are those of the non-empty pages, in
    /// page order.
    pub(super) fn chunk_entries(
        &self,
        target: &GatherTarget<'_>,
        chunk: &[(PageId, u64)],
        pages: &[(PageInfo, usize)],
        images: Vec<ImageRef>,
        on_disk: Vec<(PageInfo, DiskPage)>,
    ) -> Result<GatheredEntries> {
        // Deleted pages count too, so that the progress adds up to the total.
        self.progress.gathered(chunk.len() as u64, chunk.iter().map(|(_, len)| len).sum());
        let mut images = images.into_iter();
        let entry =
            |(info, _): &(PageInfo, usize)| entry(info, if info.len > 0 { images.next() } else { None });
        let in_memory = collected(pages.iter().map(entry))?;
        if on_disk.is_empty() {
            return Ok(GatheredEntries { entries: in_memory, on_disk: Vec::new() });
        }
        let mut gathered = self.write_on_disk(target, on_disk, &|_| Ok(()))?;
        append(&mut gathered.entries, in_memory)?;
        gathered.entries.sort_unstable_by_key(|entry| entry.page);
        Ok(gathered)
    }

    /// Catches pages in lane order with the deltas, and starts draining them to `staged`.
    fn gather(&self, pages: Vec<PageId>, staged: StagingBuf) -> Result<GatheredPages<Drain>> {
        let staging = self.engine.staging.clone();
        self.gather_by(pages, Drain::fence, move |turn, chunk| {
            // Shortened to the chunk's current length: pages may have been resized or deleted since they were
            // chosen.
            let staged = staging.shorten(staged, chunk.chunk_len() as usize)?;
            turn.drain(chunk.place, chunk.sources, chunk.len, staged, chunk.head_len, Some(&staging))
        })
    }

    /// Catches pages in lane order with the deltas, copying them with `copy`; `fence` returns the end of that
    /// use. Deleted pages are skipped: the applier records meanwhile which batch deleted each.
    pub(super) fn gather_by<C: Send + 'static>(
        &self,
        pages: Vec<PageId>,
        fence: fn(&C) -> Fence,
        copy: impl FnOnce(&Turn<'_>, ChunkSources) -> Result<C> + Send + 'static,
    ) -> Result<GatheredPages<C>> {
        // The turn fixes the moment of the snapshot for these pages: table entries and bytes are captured
        // together.
        self.engine.applier.turn(move |turn| {
            turn.intact()?;
            let (mut gathered_part, mut on_disk) = (Vec::new(), Vec::new());
            make_room(&mut gathered_part, pages.len())?;
            for page in pages {
                if let Some(page) = take_on_disk(turn, page)? {
                    push(&mut on_disk, page)?;
                    continue;
                }
                // Taken out of the cut, so that later batches need not keep the page.
                let kept = match &mut turn.applied.cut {
                    // An exact snapshot has the page as of the cut, if a batch changed it since.
                    Some(cut) => cut.take(page)?,
                    None => None,
                };
                gathered_part.push(match kept {
                    Some((info, memory)) => (info, memory.span()),
                    None => match turn.applied.table.get(page) {
                        Some(info) => (info.clone(), turn.applied.memory[page].span()),
                        // Deleted since it was chosen.
                        None => continue,
                    },
                });
            }
            // All pages are copied aside in the place of the first one, and drained from there.
            let place = gathered_part.first().map_or(Place::Host, |(info, _)| info.place);
            let images = gathered_part.iter().filter(|(info, _)| info.len > 0).count();
            // The length of the chunk's head depends on its number of images. Payloads are drained to their
            // final position after it.
            let head_len = Chunk::head_len(images as u64);
            let mut sources = Vec::new();
            make_room(&mut sources, images)?;
            let mut at = 0;
            let pages = gathered_part.into_iter().map(|(info, source)| {
                if info.len > 0 {
                    sources.push((source, at));
                }
                let here = (head_len + at) as usize;
                at = align_up(at + info.len, FRAME_ALIGN);
                (info, here)
            });
            let pages = collected(pages)?;
            let copies = copy(turn, ChunkSources { place, sources, head_len, len: at })?;
            // Copies that the cut kept aside are freed after this use, not only at the end of the snapshot.
            if let Some(cut) = &mut turn.applied.cut {
                cut.retire_used(turn.arena, fence(&copies));
            }
            Ok(GatheredPages { pages, on_disk, copies })
        })
    }
}

/// Takes a page that is on disk now or was at the cut: as of the cut if there is one, otherwise as it is now.
/// Returns `None` for a page in memory.
fn take_on_disk(turn: &mut Turn<'_>, page: PageId) -> Result<Option<(PageInfo, DiskPage)>> {
    let AppliedState { table, on_disk, cut, .. } = &mut *turn.applied;
    if let Some(cut) = cut {
        if let Some(kept) = cut.take_on_disk(page)? {
            return Ok(Some(kept));
        }
        // Changed since the cut and kept aside in memory: the page was moved to disk only after the cut.
        if cut.find(page)?.is_some() {
            return Ok(None);
        }
    }
    let Some(copy) = on_disk.get(page).cloned() else { return Ok(None) };
    let info = table.get(page).expect("a page on disk is in the table");
    if let Some(cut) = cut {
        let kept = cut.take(page)?;
        assert!(kept.is_none(), "looked at just now");
    }
    Ok(Some((info, copy)))
}

/// Returns the memory that holds a range of a page being caught, each part with its offset in the range.
/// Returns `None` if a batch wrote more of the page than could be kept aside.
pub(super) fn gathered_sources(
    turn: &Turn<'_>,
    page: PageId,
    range: &Range<u64>,
) -> Result<Option<Vec<(Span, u64)>>> {
    // If a batch changed the page since the cut, its old bytes are in the cut; otherwise in the page's own
    // memory.
    let Some(cut) = &turn.applied.cut else { return Ok(turn.gather_spans(page, range.start, range.end)) };
    let len = range.end - range.start;
    let source = match cut.find(page)? {
        Some((_, memory)) => memory.part(range.start, len),
        None => turn.applied.memory[page].part(range.start, len),
    };
    Ok(Some(vec![(source, 0)]))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Threads finish their chunks in any order; a manifest's entries must ascend, or an open refuses it.
    #[test]
    fn entries_come_in_the_order_of_their_chunks() {
        let chunk = |number: u64| {
            let page = |page| entry(&PageInfo::new(PageId(page), 0, Place::Host), None);
            (3 * number..3 * number + number % 4).map(page).collect::<Vec<_>>()
        };
        let expected: Vec<ManifestEntry> = (0..12).flat_map(chunk).collect();
        // Any order will do: 5, 7 and 11 have no common divisor with 12.
        for step in [1, 5, 7, 11] {
            let mut gathered_part = OrderedEntries::of(expected.len()).unwrap();
            let gathered = |number| GatheredEntries { entries: chunk(number as u64), on_disk: Vec::new() };
            (0..12).map(|at| at * step % 12).for_each(|number| gathered_part.put(number, gathered(number)));
            assert_eq!(gathered_part.entries, expected, "{step}");
        }
    }
}
