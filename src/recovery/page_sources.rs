//! Sorts the pages of a table by their sources. Several threads sort parts of thousands of pages each. With small
//! pages, sorting with a single thread takes a tenth of the time to load the pages.

use std::collections::BTreeMap;

use remanent_format::image::ImageRef;
use remanent_format::manifest::Manifest;
use remanent_format::state::bases::{Base, Bases};
use remanent_format::{Lsn, PageId, PageTable, Place};

use super::page_memory::PageMemories;
use crate::base::allocation::{append, make_room, push};
use crate::base::parallel;
use crate::catalog::ReplayImages;
use crate::error::Result;
use crate::images::read::ImageRequest;

/// The maximum number of threads that sort pages.
const THREADS_MAX: usize = 8;
/// The number of pages for which one more thread is used.
const PAGES_MIN: usize = 8 << 10;

/// The page table to sort by source, and the information by which its pages are classified.
pub(super) struct SourceSorter<'a> {
    pub table: &'a PageTable,
    /// The page table with the places that the pages will have after demotions.
    pub placed: &'a PageTable,
    /// The image and the batch from which each page is rebuilt.
    pub bases: &'a Bases,
    /// The snapshot from which recovery starts, with its complete list of entries.
    pub snapshot: Option<&'a Manifest>,
    /// Whether a frame records `snapshot` as verified (I7).
    pub is_verified: bool,
    /// Whether pages may stay unloaded until they are needed.
    pub may_be_unloaded: bool,
    /// The batch after which replay begins.
    pub from: Lsn,
    /// The newest batch that is known to be durable.
    pub mark: Lsn,
}

/// A page that stays on disk.
pub(super) struct PageOnDisk {
    pub page: PageId,
    pub base: Base,
    pub proof: Proof,
}

/// The time at which the image of a page on disk is verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Proof {
    /// The image was verified on the medium together with its snapshot, or there is no image.
    Recorded,
    /// The open must verify the image, because the new incarnation relies on it (I7).
    Now,
    /// The image is verified when it is read. Only durable batches of the kept log refer to it.
    AtRead,
}

/// The pages of a table, grouped by the source of their bytes. Each list is in page order.
#[derive(Default)]
pub(super) struct PageSources {
    pub images: ImageGroup,
    /// Pages that the log creates. Their memory is filled with zeros before the replay.
    pub zeros: Vec<PageId>,
    /// Pages whose length changes during replay, each with the image or zeros from which replay starts.
    pub resized: Vec<(PageId, Base)>,
    pub on_disk: Vec<PageOnDisk>,
    /// Pages whose bases are newer than the start of the replay. Each tuple contains the page and the newest batch in
    /// its base.
    pub late: Vec<(PageId, Lsn)>,
    /// Images to which the previous snapshot does not refer. Later snapshots may refer to them instead of writing them
    /// again.
    pub replay_images: ReplayImages,
}

/// Images to load, grouped by file. Within a file, images are mostly in page order.
#[derive(Default)]
pub(super) struct ImageGroup {
    /// Images that were verified together with their snapshot, bypassing the page cache.
    pub proven: Vec<Vec<ImageRequest>>,
    pub unproven: Vec<Vec<ImageRequest>>,
    /// Images of pages that stay unloaded when the open returns.
    pub unloaded: Vec<(PageId, ImageRef)>,
}

impl PageSources {
    fn extend(&mut self, later: Self) -> Result<()> {
        let Self { images, zeros, resized, on_disk, late, replay_images } = later;
        let ImageGroup { proven, unproven, unloaded } = images;
        append(&mut self.images.proven, proven)?;
        append(&mut self.images.unproven, unproven)?;
        append(&mut self.images.unloaded, unloaded)?;
        append(&mut self.zeros, zeros)?;
        append(&mut self.resized, resized)?;
        append(&mut self.on_disk, on_disk)?;
        append(&mut self.late, late)?;
        self.replay_images.extend(replay_images);
        Ok(())
    }
}

impl SourceSorter<'_> {
    /// Groups all pages of the table by the source of their bytes. Several threads may share the work. The boundaries
    /// between their pages are also boundaries of allocation pieces.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn sort(&self, memories: &PageMemories<'_>) -> Result<PageSources> {
        // Starting a thread pays off only for thousands of pages.
        let threads = parallel::threads(THREADS_MAX).min(self.table.lens().len().div_ceil(PAGES_MIN)).max(1);
        // There is one part per thread. Many small parts would scatter their images across the heap, among long-lived
        // memory.
        let parts = parallel::for_each(threads, memories.parts(threads), |part| self.sort_between(part))?;
        let mut parts = parts.into_iter();
        let mut sorted = parts.next().unwrap_or_default();
        parts.try_for_each(|part| sorted.extend(part))?;
        Ok(sorted)
    }

    /// Groups the pages from `first` to `last` by the source of their bytes.
    ///
    /// The images that a verified snapshot names were verified on the medium (I7), no writer changes them, and each has
    /// its checksum. Therefore they may be read through the page cache. If pages are loaded on demand, pages that no
    /// batch has changed since the snapshot are left unloaded, and images of pages on disk that only durable batches of
    /// the log name are verified when they are read. The next snapshot verifies them before it counts as verified.
    fn sort_between(&self, (first, last): (PageId, PageId)) -> Result<PageSources> {
        let Self { table, placed, bases, snapshot, is_verified, may_be_unloaded, from, mark } = *self;
        let mut sorted = PageSources::default();
        let any_on_disk = placed.lens_between(first, last).any(|(_, place, _)| place == Place::Disk);
        // The images are counted first, because growing vectors would leave holes in the heap, about 35 bytes per page.
        let mut counts: BTreeMap<u64, usize> = BTreeMap::new();
        let images = bases.range(first, last).filter_map(|(_, base)| base.image);
        images.for_each(|image| *counts.entry(image.file).or_default() += 1);
        let (mut proven, mut unproven) = (BTreeMap::<u64, Vec<ImageRequest>>::new(), BTreeMap::new());
        // The pages of both lists are in ascending order.
        let entries = snapshot.map_or(&[][..], |snapshot| &snapshot.entries);
        let mut named = entries[entries.partition_point(|entry| entry.page < first)..].iter().peekable();
        for (page, base) in bases.range(first, last) {
            while named.next_if(|entry| entry.page < page).is_some() {}
            let named = named.next_if(|entry| entry.page == page);
            if base.lsn > from {
                // The image was gathered after `redo`. It contains some batches that replay must skip.
                push(&mut sorted.late, (page, base.lsn))?;
            }
            let is_named = |image| named.is_some_and(|entry| entry.image == Some(image));
            let is_proven = |image| is_verified && is_named(image);
            if any_on_disk && placed.get(page).is_some_and(|info| info.place == Place::Disk) {
                let was_on_disk = table.get(page).is_some_and(|info| info.place == Place::Disk);
                let may_wait = may_be_unloaded && was_on_disk && base.lsn <= mark;
                let proof = match base.image {
                    Some(image) if !is_named(image) && may_wait => Proof::AtRead,
                    Some(image) if !is_proven(image) => Proof::Now,
                    _ => Proof::Recorded,
                };
                sorted.replay_images.note(page, named, &base, table, proof != Proof::AtRead);
                push(&mut sorted.on_disk, PageOnDisk { page, base, proof })?;
                continue;
            }
            sorted.replay_images.note(page, named, &base, table, true);
            match base.image {
                _ if base.resized => push(&mut sorted.resized, (page, base))?,
                Some(image) => {
                    let is_proven = is_proven(image);
                    let is_unchanged = || table.get(page).is_some_and(|info| info.lsn == base.lsn);
                    // If a batch has changed the page, the page must be loaded now, because the log is not read again
                    // later.
                    if may_be_unloaded && is_proven && is_unchanged() {
                        push(&mut sorted.images.unloaded, (page, image))?;
                        continue;
                    }
                    let to_load = if is_proven { &mut proven } else { &mut unproven };
                    let of_file = to_load.entry(image.file).or_default();
                    if of_file.capacity() == 0 {
                        make_room(of_file, counts[&image.file])?;
                    }
                    of_file.push(ImageRequest { page, len: base.len, image });
                }
                None => push(&mut sorted.zeros, page)?,
            }
        }
        sorted.images.proven.extend(proven.into_values());
        sorted.images.unproven.extend(unproven.into_values());
        Ok(sorted)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use remanent_format::image::Codec;
    use remanent_format::manifest::ManifestEntry;
    use remanent_format::{Epoch, LogPoint, PageInfo};

    use super::*;
    use crate::catalog::{entry, sample};

    /// The number of pages in the test, which is large enough for each part to contain each kind of page.
    const PAGES: u64 = 1000;
    /// The batch after which the replay begins.
    const REDO: Lsn = Lsn(500);

    /// Returns an image for a page, in one of three files.
    fn image(page: u64) -> ImageRef {
        let (file, offset) = (1 + page % 3, 64 * page);
        ImageRef { file, offset, stored_len: 64, stored_crc: 1, raw_crc: 1, codec: Codec::Raw }
    }

    /// Returns the information of a page that batch `lsn` changed last.
    fn info(page: u64, lsn: u64) -> PageInfo {
        let mut info = PageInfo::new(PageId(page), 64, Place::Host);
        (info.epoch, info.lsn) = (Epoch(1), Lsn(lsn));
        info
    }

    /// Returns a snapshot without every eleventh page, which the log creates.
    fn snapshot() -> Manifest {
        // Some pages were gathered after the point at which replay begins.
        let named = |page| entry(&info(page, if page % 7 == 0 { 501 } else { 400 }), Some(image(page)));
        let entries: Vec<ManifestEntry> = (1..=PAGES).filter(|page| page % 11 != 0).map(named).collect();
        let redo = LogPoint { lsn: REDO, ..LogPoint::default() };
        Manifest { redo, next_page: PAGES + 1, ..sample::base(entries) }
    }

    /// Tests pages of each kind in each part: unchanged since the snapshot, changed by a batch, loaded from a batch's
    /// image, resized, created, and deleted.
    #[test]
    fn page_sources_are_equal_in_parts_or_at_once() {
        let snapshot = snapshot();
        let mut bases = Bases::of_snapshot(Arc::new(snapshot.clone()));
        let mut pages: Vec<PageInfo> = Vec::new();
        for page in 1..=PAGES {
            let base = |image, lsn| Base { image, len: 64, lsn: Lsn(lsn), resized: false };
            let before = bases.get(PageId(page)).map_or(700, |base| base.lsn.0);
            pages.push(info(page, if page % 5 == 0 { 800 } else { before }));
            match page % 13 {
                _ if page % 11 == 0 => bases.insert(PageId(page), base(None, 699)),
                1 => {
                    bases.insert(PageId(page), base(Some(image(page + 5000)), pages[page as usize - 1].lsn.0))
                }
                2 => bases.insert(PageId(page), Base { resized: true, ..base(Some(image(page)), 400) }),
                3 => bases.remove(PageId(page)),
                _ => {}
            }
        }
        pages.retain(|info| bases.get(info.page).is_some());
        let table = PageTable::from_parts(pages, Arc::default(), PAGES + 1, Epoch(1), Lsn(800));
        for (is_verified, may_be_unloaded) in [(false, false), (true, false), (true, true), (false, true)] {
            let sorting = SourceSorter {
                table: &table,
                placed: &table,
                bases: &bases,
                snapshot: Some(&snapshot),
                is_verified,
                may_be_unloaded,
                from: REDO,
                mark: Lsn(800),
            };
            let sources_of = |sorted: PageSources| {
                let PageSources { images, zeros, resized, on_disk, late, replay_images } = sorted;
                assert!(on_disk.is_empty());
                // Within a part, images are grouped by file.
                let wanted = |images: Vec<Vec<ImageRequest>>| -> BTreeMap<_, _> {
                    images.into_iter().flatten().map(|wanted| (wanted.page, wanted.image)).collect()
                };
                let images = (wanted(images.proven), wanted(images.unproven), images.unloaded);
                (images, zeros, resized, late, replay_images)
            };
            let whole = sources_of(sorting.sort_between((PageId(1), PageId(PAGES))).unwrap());
            let ((proven, unproven, unloaded), zeros, resized, late, replay_images) = &whole;
            assert_eq!(
                (proven.is_empty(), unloaded.is_empty()),
                (!is_verified, !(is_verified && may_be_unloaded))
            );
            assert!(!unproven.is_empty() && !late.is_empty() && *replay_images != ReplayImages::default());
            let count = proven.len() + unproven.len() + unloaded.len() + zeros.len() + resized.len();
            assert_eq!(count, table.pages().len());
            let of = |wanted: fn(u64) -> bool| (1..=PAGES).filter(move |page| wanted(*page)).map(PageId);
            assert!(zeros.iter().copied().eq(of(|page| page % 11 == 0)));
            assert!(resized.iter().map(|(page, _)| *page).eq(of(|page| page % 11 != 0 && page % 13 == 2)));
            let is_late = |(page, base): (PageId, Base)| (base.lsn > REDO).then_some((page, base.lsn));
            assert!(late.iter().copied().eq(bases.iter().filter_map(is_late)));
            for part_len in [1, 250, 333] {
                let mut sorted = PageSources::default();
                for first in (1..=PAGES).step_by(part_len as usize) {
                    let part = sorting.sort_between((PageId(first), PageId(first + part_len - 1)));
                    sorted.extend(part.unwrap()).unwrap();
                }
                assert!(sources_of(sorted) == whole, "parts of {part_len}");
            }
        }
    }
}
