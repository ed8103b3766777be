//! Gathers the pages of a snapshot: copies them on the device, one chunk at a time, and writes the copies to image
//! files, one file per thread.
//!
//! The copies run in [`Lane::Apply`](crate::device::Lane::Apply), in order with the deltas. A copy that ran
//! concurrently with a delta could contain a part of a batch. The copies remain on the device until they are
//! transferred to the host in another lane, so that no delta waits for the transfer.
//!
//! A crash leaves image files that no manifest names.

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

/// The minimum length in bytes of a piece of a long page, because each piece interrupts the applier.
const PIECE_LEN_MIN: u64 = 64;
/// The number of chunks that are merged into one if the device copies pages directly to files. Such chunks use no host
/// memory, so they can be longer.
const IN_PLACE_CHUNKS: u64 = 4;
/// The maximum number of attempts to gather a long page piece by piece. After the last failed attempt, the whole page
/// is copied at once.
const GATHERS_MAX: usize = 3;

/// The pages of one chunk, all captured between the same two batches. `pages` contains the offset of each page's bytes
/// in the staging buffer.
pub(super) struct GatheredPages<C> {
    pub pages: Vec<(PageInfo, usize)>,
    /// The captured pages on disk. Their bytes are read after the capture, when the images are written.
    pub on_disk: Vec<(PageInfo, DiskPage)>,
    /// The device's copies of the pages, or their transfer to the staging buffer.
    pub copies: C,
}

/// The memory of the non-empty pages of a chunk, and their positions in the chunk.
pub(super) struct ChunkSources {
    /// The place in which the device allocates the copies, which is the place of the chunk's first page.
    pub place: Place,
    /// The memory of each page, with the offset of the page in bytes after the chunk's head.
    pub sources: Vec<(Span, u64)>,
    /// The length of the chunk's head in bytes, which precedes the pages.
    pub head_len: u64,
    /// The total length of the pages in bytes, without the chunk's head and final padding.
    pub len: u64,
}

impl ChunkSources {
    /// Returns the length of the chunk in bytes, with its head and final padding.
    pub fn chunk_len(&self) -> u64 {
        align_up(self.head_len + self.len, GROUP_ALIGN)
    }
}

/// The manifest entries of the gathered pages of one or more chunks.
#[derive(Default)]
pub(super) struct GatheredEntries {
    /// The entries, in ascending order of page ids.
    pub entries: Vec<ManifestEntry>,
    /// The gathered pages that are on disk, each with its new image.
    pub on_disk: Vec<GatheredDiskPage>,
}

/// A page on disk that was gathered, with its new image. The image is `None` for an empty page.
pub(crate) struct GatheredDiskPage {
    pub page: PageId,
    pub copy: DiskPage,
    pub image: Option<ImageRef>,
}

/// A long page to gather: in memory or on disk.
enum LongPage {
    InMemory(PageInfo),
    OnDisk(PageInfo, DiskPage),
}

/// The outcome of writing a long page directly to the memory of an image file.
pub(super) enum PlacedPage {
    Written(ImageRef),
    /// The captured state was lost, because batches changed more of the page than the limit on preserved bytes.
    Gone,
    /// The mapped part of the image file has no space left for the page.
    NoPlace,
}

/// Collects the manifest entries of chunks in chunk order, although chunks are written in any order.
///
/// Entries are merged while other chunks are written. Merging them after the last chunk took 4 ms for 65,536 pages on 2
/// cores.
struct OrderedEntries {
    /// The merged entries, from the first chunk up to the first chunk that is not yet written.
    entries: Vec<ManifestEntry>,
    /// The gathered pages on disk of all written chunks, in any order.
    on_disk: Vec<GatheredDiskPage>,
    /// The number of chunks whose entries were merged into `entries`.
    chunks: usize,
    /// The entries of written chunks that wait for an earlier chunk, by chunk number.
    early: BTreeMap<usize, Vec<ManifestEntry>>,
}

impl OrderedEntries {
    /// Allocates memory for `page_count` entries.
    fn of(page_count: usize) -> Result<Self> {
        let mut entries = Vec::new();
        make_room(&mut entries, page_count)?;
        Ok(Self { entries, on_disk: Vec::new(), chunks: 0, early: BTreeMap::new() })
    }

    /// Adds the entries of a written chunk, and merges all chunks up to the first chunk that is not yet written.
    fn put(&mut self, chunk: usize, GatheredEntries { entries, mut on_disk }: GatheredEntries) {
        self.on_disk.append(&mut on_disk);
        self.early.insert(chunk, entries);
        // This chunk may be the one for which later chunks have waited.
        while let Some(mut next) = self.early.remove(&self.chunks) {
            self.entries.append(&mut next);
            self.chunks += 1;
        }
    }
}

impl Snapshots {
    /// Returns the length in bytes of one piece of a long page. A page of at most this length is gathered in one copy.
    pub(super) fn piece_len(&self) -> u64 {
        self.chunk_len.saturating_mul(2).clamp(PIECE_LEN_MIN, PIECE_BYTES)
    }

    /// Returns the number of chunks that contain `pages`. A snapshot writes no more files than chunks.
    pub(super) fn chunk_count(&self, pages: &[(PageId, u64)]) -> Result<u64> {
        Ok(chunks(pages, self.chunk_len, |(_, len)| *len)?.len() as u64)
    }

    /// Performs phase 2. Several threads gather chunks, so that one writes a chunk while others gather.
    pub(super) fn gather_all(
        &self,
        target: &GatherTarget<'_>,
        threads: usize,
        pages: &[(PageId, u64)],
        paced: bool,
    ) -> Result<GatheredEntries> {
        // The rate limit counts from here. Time spent in earlier phases does not allow a higher rate.
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
                // A long page is the last one of its chunk. If the device copies to files, the pages before it are
                // gathered separately.
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
        // A page without an entry would be lost in the next crash.
        assert!(gathered_part.chunks == chunks.len(), "each chunk was put in its place");
        Ok(GatheredEntries { entries: gathered_part.entries, on_disk: gathered_part.on_disk })
    }

    /// Gathers a long page piece by piece, and writes each piece before the next one is gathered. Gathering a page of
    /// one gigabyte at once took three to four times its length of host memory.
    ///
    /// The image still contains a single state of the page: before a batch overwrites a part that is not gathered yet,
    /// that part is copied. If these copies exceed a limit, gathering starts again. After [`GATHERS_MAX`] attempts, the
    /// whole page is copied at once.
    fn gather_long(
        &self,
        target: &GatherTarget<'_>,
        (page, len): (PageId, u64),
        keep_pace: &dyn Fn(u64) -> Result<()>,
    ) -> Result<GatheredEntries> {
        let _phase = phases::enter(Phase::SnapshotGather);
        self.engine.applier.unloaded().wait([page])?;
        // A page that is written constantly might never be gathered piece by piece.
        for _ in 0..GATHERS_MAX {
            // `None` means that the page was deleted since it was chosen. The record of the delete becomes a tombstone.
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
            // This runs even after a failure. Otherwise the applier would continue to copy parts of the page before
            // each write.
            self.engine.applier.turn(move |turn| {
                if let Some(cut) = &mut turn.applied.cut {
                    cut.take(page)?;
                    // Commands in flight may still read the preserved copy, so its memory is freed after them.
                    let last_use = turn.submit(CommandList::default())?.fence();
                    if let Some(cut) = &mut turn.applied.cut {
                        cut.retire_used(turn.arena, last_use);
                    }
                }
                turn.end_gather(page)
            })?;
            // Errors are returned only here, after the applier has stopped preserving the page.
            let image = written?;
            if image.is_some() || info.len == 0 {
                self.progress.gathered(1, len);
                let entries = vec![entry(&info, image)];
                return Ok(GatheredEntries { entries, on_disk: Vec::new() });
            }
        }
        // Copying the whole page at once takes its full length of memory, but cannot fail because of writes.
        tracing::debug!(%page, "a long page changes faster than it is gathered; copying the whole page at once");
        self.gather_chunk(target, &[(page, len)])
    }

    /// Starts to gather a long page, and returns `None` if the page was deleted. Until the page is gathered, its
    /// current state is preserved. For an exact snapshot, the cut already preserves the state at the snapshot's batch.
    fn begin_gather(&self, page: PageId) -> Result<Option<LongPage>> {
        self.engine.applier.turn(move |turn| {
            turn.intact()?;
            if let Some((info, copy)) = take_on_disk(turn, page)? {
                return Ok(Some(LongPage::OnDisk(info, copy)));
            }
            // An exact snapshot needs the state at the cut, not the current one.
            if let Some(cut) = &turn.applied.cut
                && let Some((info, _)) = cut.find(page)?
            {
                return Ok(Some(LongPage::InMemory(info)));
            }
            let Some(info) = turn.applied.table.get(page) else { return Ok(None) };
            // From here on, parts of the page are copied before a batch writes to them.
            if turn.applied.cut.is_none() {
                turn.begin_gather(info.clone());
            }
            Ok(Some(LongPage::InMemory(info)))
        })
    }

    /// Writes the image of a page whose gathering has begun. Returns `None` if batches changed more of the page than
    /// the limit on preserved bytes.
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
                // `None`: batches changed more of the page than the limit on preserved bytes.
                let Some(sources) = gathered_sources(turn, page, &range)? else { return Ok(None) };
                let drain = turn.drain(place, sources, len, staged, 0, Some(&staging))?;
                // This range is not read again, so it need not be preserved any longer.
                if pass == ReadPass::Last {
                    turn.gathered(page, range.end, drain.fence());
                }
                Ok(Some(drain))
            })?;
            let Some(drain) = drain else { return Ok(false) };
            // The applier does not wait for the transfer, so batches are applied meanwhile.
            let drained = drain.finish(&self.engine.device)?;
            // The staging buffer is returned before the error is checked.
            let taken = sink(&drained.bytes, drained.sum());
            self.engine.staging.put(drained.bytes.into_staging());
            taken?;
            // The rate limit counts bytes when they are gathered, before they are in the file.
            gathered += len;
            keep_pace(gathered)?;
            Ok(true)
        };
        file.write_long(info, self.piece_len(), &mut piece)
    }

    /// Gathers pages, transfers them to the host, and writes them as one chunk.
    ///
    /// The staging buffer is allocated on this thread before the applier captures the pages. A GPU pins memory at only
    /// 1.5 GB/s, and the applier must not wait for that.
    fn gather_chunk(&self, target: &GatherTarget<'_>, chunk: &[(PageId, u64)]) -> Result<GatheredEntries> {
        if chunk.is_empty() {
            return Ok(GatheredEntries::default());
        }
        let _phase = phases::enter(Phase::SnapshotGather);
        // Pages that are not loaded yet can be among them: compaction rewrites their file, or their image is damaged.
        self.engine.applier.unloaded().wait(chunk.iter().map(|(page, _)| *page))?;
        if target.writers.is_in_place() {
            return self.gather_in_place(target, chunk);
        }
        // The buffer has the length of the chunk in the file: head, payloads and padding. The chunk is written from
        // this buffer.
        let len: u64 = chunk.iter().map(|(_, len)| align_up(*len, FRAME_ALIGN)).sum();
        let chunk_len = align_up(Chunk::head_len(chunk.len() as u64) + len, GROUP_ALIGN);
        let staged = self.engine.staging.take(chunk_len as usize)?;
        let gathered_part = self.gather(collected(chunk.iter().map(|(page, _)| *page))?, staged)?;
        // The copies of the non-empty pages, in page order, each with its checksum.
        let Drained { mut bytes, sums } = gathered_part.copies.finish(&self.engine.device)?;
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

    /// Writes images of pages on disk, one piece of a page at a time, and returns the entries in the order of `pages`.
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
            assert!(image.is_some() || info.len == 0); // I7: every page that the manifest names is written.
            push(&mut gathered.entries, entry(&info, image))?;
            push(&mut gathered.on_disk, GatheredDiskPage { page: info.page, copy, image })?;
        }
        Ok(gathered)
    }

    /// Builds the manifest entries of the gathered pages of a chunk. `images` contains the images of the non-empty
    /// pages, in page order, and `on_disk` the pages on disk.
    pub(super) fn chunk_entries(
        &self,
        target: &GatherTarget<'_>,
        chunk: &[(PageId, u64)],
        pages: &[(PageInfo, usize)],
        images: Vec<ImageRef>,
        on_disk: Vec<(PageInfo, DiskPage)>,
    ) -> Result<GatheredEntries> {
        // Deleted pages count too, so that the progress reaches the total.
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

    /// Captures `pages` in order with the deltas, and starts to transfer them to the staging buffer `staged`.
    fn gather(&self, pages: Vec<PageId>, staged: StagingBuf) -> Result<GatheredPages<Drain>> {
        let staging = self.engine.staging.clone();
        self.gather_by(pages, Drain::fence, move |turn, chunk| {
            // The buffer is shortened to the chunk's current length, because pages may have been resized or deleted
            // since they were chosen.
            let staged = staging.shorten(staged, chunk.chunk_len() as usize)?;
            turn.drain(chunk.place, chunk.sources, chunk.len, staged, chunk.head_len, Some(&staging))
        })
    }

    /// Captures `pages` between two batches. Calls `copy` to copy the pages in memory; `fence` returns the fence of
    /// that copy. Skips deleted pages, because the applier records their deletes.
    pub(super) fn gather_by<C: Send + 'static>(
        &self,
        pages: Vec<PageId>,
        fence: fn(&C) -> Fence,
        copy: impl FnOnce(&Turn<'_>, ChunkSources) -> Result<C> + Send + 'static,
    ) -> Result<GatheredPages<C>> {
        // Table entries and bytes are captured between the same two batches, so that they belong to one state.
        self.engine.applier.turn(move |turn| {
            turn.intact()?;
            let (mut gathered_part, mut on_disk) = (Vec::new(), Vec::new());
            make_room(&mut gathered_part, pages.len())?;
            for page in pages {
                if let Some(page) = take_on_disk(turn, page)? {
                    push(&mut on_disk, page)?;
                    continue;
                }
                // The page is removed from the cut, which then no longer preserves it.
                let kept = match &mut turn.applied.cut {
                    // If a batch has changed the page since the cut, an exact snapshot uses the copy that preserves the
                    // earlier state.
                    Some(cut) => cut.take(page)?,
                    None => None,
                };
                gathered_part.push(match kept {
                    Some((info, memory)) => (info, memory.span()),
                    None => match turn.applied.table.get(page) {
                        Some(info) => (info.clone(), turn.applied.memory[page].span()),
                        // The page was deleted since it was chosen.
                        None => continue,
                    },
                });
            }
            // All pages are copied to memory in the place of the first one, and transferred from there.
            let place = gathered_part.first().map_or(Place::Host, |(info, _)| info.place);
            let images = gathered_part.iter().filter(|(info, _)| info.len > 0).count();
            // The head's length depends on the number of images. The transfer puts each page at its final offset after
            // the head.
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
            // Copies in the cut that this command list reads are freed after it, not only at the end of the snapshot.
            if let Some(cut) = &mut turn.applied.cut {
                cut.retire_used(turn.arena, fence(&copies));
            }
            Ok(GatheredPages { pages, on_disk, copies })
        })
    }
}

/// Captures a page on disk: for an exact snapshot, in its state at the snapshot's batch, otherwise in its current
/// state. Returns `None` for a page in memory.
fn take_on_disk(turn: &mut Turn<'_>, page: PageId) -> Result<Option<(PageInfo, DiskPage)>> {
    let AppliedState { table, on_disk, cut, .. } = &mut *turn.applied;
    if let Some(cut) = cut {
        if let Some(kept) = cut.take_on_disk(page)? {
            return Ok(Some(kept));
        }
        // The cut preserves the page in memory, so the page was moved to disk after the cut.
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

/// Returns the memory that contains a range of a page that is being gathered, each span with its offset in the range.
/// Returns `None` if batches changed more of the page than the limit on preserved bytes.
pub(super) fn gathered_sources(
    turn: &Turn<'_>,
    page: PageId,
    range: &Range<u64>,
) -> Result<Option<Vec<(Span, u64)>>> {
    // If a batch has changed the page since an exact cut, the cut has a copy of its earlier state. Otherwise the page's
    // own memory contains that state.
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

    /// Threads write their chunks in any order. The entries of a manifest must be in ascending order, or opening the
    /// store fails.
    #[test]
    fn entries_come_in_the_order_of_their_chunks() {
        let chunk = |number: u64| {
            let page = |page| entry(&PageInfo::new(PageId(page), 0, Place::Host), None);
            (3 * number..3 * number + number % 4).map(page).collect::<Vec<_>>()
        };
        let expected: Vec<ManifestEntry> = (0..12).flat_map(chunk).collect();
        // Steps of 5, 7 and 11 chunks, modulo 12, visit every chunk.
        for step in [1, 5, 7, 11] {
            let mut gathered_part = OrderedEntries::of(expected.len()).unwrap();
            let gathered = |number| GatheredEntries { entries: chunk(number as u64), on_disk: Vec::new() };
            (0..12).map(|at| at * step % 12).for_each(|number| gathered_part.put(number, gathered(number)));
            assert_eq!(gathered_part.entries, expected, "{step}");
        }
    }
}
