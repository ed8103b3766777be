//! Reads many images in file order. Neighboring images are read together, as a *run*. Otherwise a store of tiny pages
//! would read from the medium once per page.

use std::borrow::{Borrow, Cow};
use std::collections::BTreeMap;
use std::ops::{DerefMut, Range};

use remanent_format::image::read::check_image;
use remanent_format::image::{Codec, ImageRef};
use remanent_format::limits::GROUP_ALIGN;
use remanent_format::{Damage, Defect, FileName, PageId, PageInfo, Place, ReadAt};

use super::THREADS_MAX;
use crate::base::aligned_buf::AlignedBuf;
use crate::base::allocation::collected;
use crate::base::parallel;
use crate::disk::source::DiskSource;
use crate::error::{Error, Result};

/// The maximum length of a run in bytes, unless the run has a single, longer image. With the remainders of its first
/// and last blocks, a run has at most 4 MiB, the length of a staging buffer.
pub(crate) const RUN_BYTES: u64 = (4 << 20) - 2 * GROUP_ALIGN;

/// The maximum gap in bytes between two images of a run. A disk reads this many bytes in the time of another request.
const GAP_BYTES: u64 = 64 << 10;

/// The number of bytes that are read and checksummed at a time. This many bytes fit in a CPU's L2 cache, and longer
/// reads are not faster.
pub(crate) const SUMMED_AT_ONCE: usize = 512 << 10;

/// A request to read the image of one page.
#[derive(Clone, Copy)]
pub(crate) struct ImageRequest {
    pub page: PageId,
    /// The page's length in bytes.
    pub len: u64,
    pub image: ImageRef,
}

impl ImageRequest {
    /// Returns whether the page is read piece by piece. This is the case for a page that is too long to keep in memory,
    /// and for an image that is an overlay over a base.
    pub fn is_long(&self) -> bool {
        self.len > RUN_BYTES || !self.image.is_whole()
    }
}

/// Returns a read request for each of the given pages that has an image.
pub(crate) fn wanted(
    pages: impl IntoIterator<Item = impl Borrow<PageInfo>>,
    images: &BTreeMap<PageId, ImageRef>,
) -> impl Iterator<Item = ImageRequest> {
    let image = |info: &PageInfo| {
        Some(ImageRequest { page: info.page, len: info.len, image: *images.get(&info.page)? })
    };
    pages.into_iter().filter_map(move |info| image(info.borrow()))
}

/// Images that are close enough together in one file to be read with one read.
pub(crate) struct ImageRun<'a> {
    /// The requests of the run, at least one, in file order.
    images: &'a [ImageRequest],
}

/// Sorts the requests, and groups images that are close together into runs. A long image is a separate run.
pub(crate) fn runs(wanted: &mut [ImageRequest]) -> impl Iterator<Item = ImageRun<'_>> {
    wanted.sort_unstable_by_key(|wanted| (wanted.image.file, wanted.image.offset));
    let same_run = |first: &ImageRef, reached: u64, image: &ImageRef| {
        let end = first.offset + RUN_BYTES.max(first.stored_len);
        let is_near = image.offset <= reached + GAP_BYTES;
        image.file == first.file && image.offset + image.stored_len <= end && is_near
    };
    let mut rest = &*wanted;
    std::iter::from_fn(move || {
        let first = rest.first()?;
        let mut reached = first.image.offset;
        let joins = |wanted: &&ImageRequest| {
            let image = &wanted.image;
            let does = same_run(&first.image, reached, image) && !wanted.is_long();
            reached = reached.max(image.offset + image.stored_len);
            does
        };
        let count = if first.is_long() { 1 } else { rest.iter().take_while(joins).count() };
        let (images, after) = rest.split_at(count);
        rest = after;
        Some(ImageRun { images })
    })
}

impl<'a> ImageRun<'a> {
    pub fn count(&self) -> u64 {
        self.images.len() as u64
    }

    pub fn first_page(&self) -> PageId {
        self.images[0].page
    }

    /// Returns the total stored length of the run's images in bytes, including the bases of overlays.
    pub fn bytes(&self) -> u64 {
        self.images.iter().flat_map(|wanted| wanted.image.files()).map(|(_, stored_len)| stored_len).sum()
    }

    /// Returns the only image of the run, or `None` if the run has several images.
    pub fn only(&self) -> Option<&'a ImageRequest> {
        if let [only] = self.images { Some(only) } else { None }
    }

    /// Returns the damaged images of the run, each with its damage. If reading the whole run fails, the images are read
    /// one by one. An image that is longer than [`RUN_BYTES`] is read piece by piece.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn damaged(&self, source: &DiskSource) -> Result<Vec<(ImageRef, Damage)>> {
        let is_long = self.images.iter().any(ImageRequest::is_long);
        let read = (!is_long).then(|| self.read(source, aligned).ok()).flatten();
        let check = |wanted: &ImageRequest| check_image(source, &wanted.image, wanted.len).err();
        let damage = |(wanted, damage): (&ImageRequest, Option<Damage>)| Some((wanted.image, damage?));
        match &read {
            Some(read) => {
                let pages = self.pages(read, SummedBy::Host).map(Result::err);
                collected(self.images.iter().zip(pages).filter_map(damage))
            }
            None => collected(self.images.iter().map(|wanted| (wanted, check(wanted))).filter_map(damage)),
        }
    }

    /// Reads the run into memory that `take` allocates. If the file ends too early, `take` is not called.
    pub fn read<B: DerefMut<Target = [u8]>>(
        &self,
        source: &DiskSource,
        take: impl FnOnce(usize) -> Result<B>,
    ) -> Result<FilePiece<B>> {
        let first = &self.images[0].image;
        // Images overlap only in a forged manifest. The last image may then not have the highest end.
        let ends = self.images.iter().map(|wanted| wanted.image.offset + wanted.image.stored_len);
        FilePiece::read(source, first.file, first.offset..ends.max().expect("at least one"), take)
    }

    /// Returns the pages in the piece that [`ImageRun::read`] returned, each with the offset of its stored bytes in the
    /// piece.
    ///
    /// This call verifies the images whose checksums the host compares. The host always compares the checksums of
    /// compressed images, before it decompresses the images (I9).
    pub fn pages<'b, B: DerefMut<Target = [u8]>>(
        &self,
        read: &'b FilePiece<B>,
        summed_by: SummedBy,
    ) -> impl Iterator<Item = Result<(&'a ImageRequest, usize, Cow<'b, [u8]>), Damage>> {
        self.images.iter().map(move |wanted| {
            let image = &wanted.image;
            let at = (image.offset - read.start) as usize;
            let stored = &read.bytes[at..at + image.stored_len as usize];
            let content = match (image.codec, summed_by) {
                (Codec::Raw, SummedBy::Device) => image.check(wanted.len).map(|()| stored.into()),
                _ => image.decode(stored.into(), wanted.len),
            };
            let content = content.map_err(|defect| defect.at(FileName::Pages(image.file), image.offset))?;
            Ok((wanted, at, content))
        })
    }
}

/// The processor that compares an image's bytes with its checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SummedBy {
    /// The host verifies the bytes before it passes any of them to the caller.
    Host,
    /// The device compares the bytes after they have arrived in its memory.
    Device,
}

/// A range of an image file in memory. The range consists of whole blocks, except at the end of the file, so that a
/// direct read fills the memory without a copy.
pub(crate) struct FilePiece<B> {
    /// The offset of the range in the file.
    pub start: u64,
    pub bytes: B,
}

impl<B: DerefMut<Target = [u8]>> FilePiece<B> {
    /// Reads the blocks that contain `range` into memory that `take` allocates.
    pub fn read(
        source: &DiskSource,
        file: u64,
        range: Range<u64>,
        take: impl FnOnce(usize) -> Result<B>,
    ) -> Result<Self> {
        Self::read_by(source, file, range, take, usize::MAX, |_| {})
    }

    /// Reads blocks like [`read`](Self::read), and also computes the CRC-32 of `range` while the bytes are in the CPU's
    /// cache. Reading and checksumming from the page cache then takes an eighth less time than in two passes.
    pub fn read_summed(
        source: &DiskSource,
        file: u64,
        range: Range<u64>,
        take: impl FnOnce(usize) -> Result<B>,
    ) -> Result<(Self, u32)> {
        let mut sum = crc32fast::Hasher::new();
        let mut at = range.start - range.start % GROUP_ALIGN;
        let piece = Self::read_by(source, file, range.clone(), take, SUMMED_AT_ONCE, |block| {
            let [from, to] = [range.start, range.end].map(|end| end.saturating_sub(at) as usize);
            sum.update(&block[from.min(block.len())..to.min(block.len())]);
            at += block.len() as u64;
        })?;
        Ok((piece, sum.finalize()))
    }

    /// Reads the file `at_once` bytes at a time, and calls `each` with the bytes of each read.
    fn read_by(
        source: &DiskSource,
        file: u64,
        range: Range<u64>,
        take: impl FnOnce(usize) -> Result<B>,
        at_once: usize,
        mut each: impl FnMut(&[u8]),
    ) -> Result<Self> {
        let name = FileName::Pages(file);
        let at = |defect: Defect| defect.at(name, range.start);
        let unreadable = |error: std::io::Error| at(Defect::of_read(&error));
        let have = source.len(name).map_err(unreadable)?.ok_or_else(|| at(Defect::Missing))?;
        // I9: the range comes from a manifest or a frame, so it is checked before memory is allocated for it.
        if have < range.end {
            return Err(at(Defect::Truncated { needed: range.end, have }).into());
        }
        let start = range.start - range.start % GROUP_ALIGN;
        let end = range.end.next_multiple_of(GROUP_ALIGN).min(have);
        let mut bytes = take((end - start) as usize)?;
        let mut from = start;
        for block in bytes.chunks_mut(at_once) {
            let read = source.read_at(name, from, block).map_err(|error| at(Defect::of_read(&error)));
            read.map_err(|damage| source.error_of(damage))?;
            each(block);
            from += block.len() as u64;
        }
        Ok(Self { start, bytes })
    }
}

/// Allocates aligned host memory of `len` bytes, or returns `OutOfMemory`.
fn aligned(len: usize) -> Result<AlignedBuf> {
    AlignedBuf::try_new(len).ok_or(Error::OutOfMemory { place: Place::Host, len: len as u64 })
}

/// Reads and verifies all requested images, with several threads.
///
/// # Errors
/// [`crate::Error::Damaged`] if an image is damaged.
pub(crate) fn prove(source: &DiskSource, wanted: impl IntoIterator<Item = ImageRequest>) -> Result<()> {
    let damaged = damaged(source, &mut collected(wanted)?, THREADS_MAX)?;
    damaged.into_iter().next().map_or(Ok(()), |(_, damage)| Err(damage.into()))
}

/// Reads the requested images with up to `threads_max` threads, and returns the damaged images, each with its damage.
/// An image longer than [`RUN_BYTES`] is read piece by piece.
///
/// # Errors
/// `OutOfMemory`, or the system's error if another resource ran short. A shortage is not damage, because the images may
/// be intact.
pub(crate) fn damaged(
    source: &DiskSource,
    wanted: &mut [ImageRequest],
    threads_max: usize,
) -> Result<Vec<(ImageRef, Damage)>> {
    let runs = collected(runs(wanted))?;
    let threads = parallel::threads(THREADS_MAX.min(threads_max));
    let damaged = |(): &mut (), index: usize| runs[index].damaged(source);
    let found = parallel::map_indexed(threads, runs.len(), || (), damaged)?;
    match found.iter().flatten().find(|(_, damage)| damage.defect.is_shortage()) {
        Some((_, shortage)) => Err(shortage.clone().into()),
        None => collected(found.into_iter().flatten()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use remanent_format::Folder;

    use super::*;
    use crate::disk::Disk;
    use crate::testing::sim_disk::SimDisk;

    #[test]
    fn summed_piece_equals_range_and_its_sum() {
        let disk = SimDisk::new();
        disk.make_folder(Folder::Pages).unwrap();
        let len = 2 * SUMMED_AT_ONCE + 9000;
        let bytes: Vec<u8> = (0..len).map(|at| (at % 251) as u8).collect();
        disk.create(FileName::Pages(1)).and_then(|file| file.write_at(0, &bytes)).unwrap();
        let source = DiskSource::new(Arc::new(disk));
        let block = GROUP_ALIGN as usize;
        for range in [
            0..len,
            0..1,
            block - 1..block + 1,
            100..SUMMED_AT_ONCE,
            block + 7..block + SUMMED_AT_ONCE + 5,
            // The range ends or begins at a boundary of the blocks that are read at a time.
            3 * block..3 * block + SUMMED_AT_ONCE,
            SUMMED_AT_ONCE - 1..len - 1,
        ] {
            let in_file = range.start as u64..range.end as u64;
            let (summed, sum) = FilePiece::read_summed(&source, 1, in_file.clone(), aligned).unwrap();
            let read = FilePiece::read(&source, 1, in_file, aligned).unwrap();
            assert_eq!((summed.start, &*summed.bytes), (read.start, &*read.bytes), "{range:?}");
            assert_eq!(sum, crc32fast::hash(&bytes[range.clone()]), "{range:?}");
        }
    }

    /// Only a forged manifest names overlapping images. Each image is checked against its own entry, and no byte past
    /// its end is read.
    #[test]
    fn overlapping_images_are_allowed() {
        let disk = SimDisk::new();
        disk.make_folder(Folder::Pages).unwrap();
        let bytes: Vec<u8> = (0..9000).map(|at| (at % 251) as u8).collect();
        disk.create(FileName::Pages(1)).and_then(|file| file.write_at(0, &bytes)).unwrap();
        let source = DiskSource::new(Arc::new(disk));
        let image = |page, range: Range<usize>, is_sound: bool| {
            let crc = crc32fast::hash(&bytes[range.clone()]) ^ u32::from(!is_sound);
            let (offset, stored_len) = (range.start as u64, range.len() as u64);
            let image =
                ImageRef { file: 1, offset, stored_len, stored_crc: crc, raw_crc: crc, codec: Codec::Raw };
            ImageRequest { page: PageId(page), len: stored_len, image }
        };
        let outer_and_inner = |is_sound| vec![image(1, 4096..8000, true), image(2, 4112..4200, is_sound)];
        let mut wanted = outer_and_inner(true);
        let run = runs(&mut wanted).next().expect("both are one run");
        let read = run.read(&source, aligned).unwrap();
        let pages =
            run.pages(&read, SummedBy::Host).map(|page| page.map(|(of, _, content)| (of.page, content)));
        let pages: Vec<_> = pages.map(Result::unwrap).collect();
        assert_eq!(
            pages,
            [(PageId(1), bytes[4096..8000].into()), (PageId(2), Cow::from(&bytes[4112..4200]))]
        );
        prove(&source, outer_and_inner(true)).unwrap();

        let refused = prove(&source, outer_and_inner(false)).unwrap_err();
        let Error::Damaged(damage) = &refused else { panic!("{refused}") };
        assert_eq!((damage.file, damage.offset), (FileName::Pages(1), 4112));
    }
}
