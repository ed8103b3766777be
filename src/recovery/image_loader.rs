//! Loads images into device memory with several threads. Each thread reads one piece at a time from the medium to
//! staging while earlier pieces are copied from staging to their pages. Some threads wait for the medium while others
//! compute checksums.
//!
//! If the bytes cross a bus, the command list that copies them also checksums them on the device (I12), and the host
//! does not. The device's checksum covers medium, page cache, staging and bus. If the checksum is wrong, the image is
//! read again from the medium and checksummed by the host. If the host's checksum is wrong too, the image is damaged.
//! If the host's checksum is right, the bytes are uploaded once more. A second wrong checksum on the device means that
//! the device has failed.
//!
//! This module writes nothing to disk, so a crash loses nothing.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::ops::Range;

use remanent_format::image::read::stream_image;
use remanent_format::image::{Codec, ImageRef};
use remanent_format::{Defect, FileName, PageId};

use crate::base::allocation::{append, collected, make_room, push};
use crate::base::parallel;
use crate::base::sync::Mutex;
use crate::base::sync::atomic::{AtomicUsize, Ordering};
use crate::device::sums::{sums_in, sums_len, transfer_corrupted};
use crate::device::{Command, CommandList, EngineDevice, Fence, Lane, Pending, Span, StagingSpan};
use crate::disk::source::DiskSource;
use crate::error::{Error, Result};
use crate::images::read::{FilePiece, ImageRequest, ImageRun, RUN_BYTES, SUMMED_AT_ONCE, SummedBy, runs};
use crate::memory::staging::{StagingBuf, StagingPool};

/// The maximum number of threads that read images. Four threads keep a disk busy. From the page cache, each thread
/// delivers a few gigabytes per second, checksums included, and a GPU accepts fifty gigabytes per second.
const THREADS_MAX: usize = 12;
/// The maximum number of copies in flight while a thread continues to read. A lane executes copies one after the other,
/// and must not run out of them. From the page cache to an H200, 4 copies of 2 MiB reached 39 GB/s, 8 copies 49 GB/s
/// and 12 copies 50 GB/s. More copies would only need more staging memory, which a GPU pins at 1.5 GB/s.
const COPIES_MAX: usize = 12;

/// Reads images from disk, verifies them, and uploads them into the memory of their pages.
#[derive(Clone, Copy)]
pub(crate) struct ImageLoader<'a> {
    pub device: &'a EngineDevice,
    pub staging: &'a StagingPool,
    /// The source of images, which bypasses the page cache for images that were never verified on the medium (I6).
    pub source: &'a DiskSource,
    /// The lanes for uploads, used in rotation, because the bus is briefly idle between two lists of one lane.
    pub lanes: &'a [Lane],
    /// A function that waits until a page's memory is allocated, and returns the memory.
    pub target: &'a (dyn Fn(PageId) -> Result<Span> + Sync),
    /// Whether the device or the host verifies uncompressed images that cross a bus. With `Host`, a damaged image is
    /// detected before any of its bytes is uploaded.
    pub summed_by: SummedBy,
}

/// A unit of work that a loading thread completes before it takes another.
enum LoadStep<'a> {
    Run(ImageRun<'a>),
    /// A range of a long image, relative to the start of the image.
    Part(&'a ImageRequest, Range<u64>),
    /// A long page with a compressed image.
    Compressed(&'a ImageRequest),
}

impl LoadStep<'_> {
    /// Returns the page and the offset in the page of a unit of work. The loader sorts its work by this key.
    fn key(&self) -> (PageId, u64) {
        match self {
            LoadStep::Run(run) => (run.first_page(), 0),
            LoadStep::Part(wanted, range) => (wanted.page, range.start),
            LoadStep::Compressed(wanted) => (wanted.page, 0),
        }
    }
}

/// Returns the number of threads that load images.
pub(crate) fn threads() -> usize {
    parallel::threads(THREADS_MAX)
}

impl ImageLoader<'_> {
    /// Loads and verifies images in any order with several threads, and returns after all images have arrived. A long
    /// image is read in parts, so that each thread needs only a few megabytes of memory.
    ///
    /// The images must be grouped by file, because sorting all of them together took a tenth of the time to load small
    /// pages.
    ///
    /// # Errors
    /// [`Error::Damaged`] for a damaged image, or a device error. After a device error, command lists that name the
    /// memory may still be in flight.
    pub fn load<'i>(
        &self,
        images: impl Iterator<Item = &'i mut [ImageRequest]>,
        threads: usize,
    ) -> Result<()> {
        let mut unlike = self.load_once(images, threads)?;
        if unlike.is_empty() {
            return Ok(());
        }
        let device = self.device.label();
        tracing::warn!(
            device,
            images = unlike.len(),
            "checksums of images on the device do not match; reading the images again"
        );
        // This time the images are read from the medium and the host computes the checksums, so only an image that is
        // really damaged causes an error.
        let medium = self.source.on_medium();
        let again = ImageLoader { source: &medium, summed_by: SummedBy::Host, ..*self };
        let unlike = again.load_once(std::iter::once(&mut *unlike), threads)?;
        if unlike.is_empty() { Ok(()) } else { Err(transfer_corrupted(self.device, "pages")) }
    }

    /// Loads images once. Returns the images whose checksum, as computed by the device, differs from the stored one. If
    /// the device computes no checksums, the host verifies every image.
    fn load_once<'i>(
        &self,
        images: impl Iterator<Item = &'i mut [ImageRequest]>,
        threads: usize,
    ) -> Result<Vec<ImageRequest>> {
        // One thread sorts the images of each file and splits them into runs.
        let into_work = |images: &'i mut [ImageRequest]| collected(runs(images).flat_map(split));
        let parts = parallel::for_each(threads, images, into_work)?;
        let mut work: Vec<LoadStep<'_>> = Vec::new();
        parts.into_iter().try_for_each(|part| append(&mut work, part))?;
        // The work is sorted in the order in which another thread allocates the pages' memory, so that threads rarely
        // wait for memory. The parts of an image stay together, as `check_parts` requires. A stable sort could panic
        // for lack of memory.
        work.sort_unstable_by_key(LoadStep::key);
        let copies = PendingCopies {
            loader: self,
            begun: AtomicUsize::new(0),
            under_way: Mutex::default(),
            found: Mutex::default(),
        };
        let checksums = parallel::map_indexed(
            threads,
            work.len(),
            || (),
            |(), index| match &work[index] {
                LoadStep::Run(run) => self.load_run(run, &copies).map(|()| None),
                LoadStep::Part(wanted, range) => self.load_part(wanted, range, &copies),
                LoadStep::Compressed(wanted) => self.load_compressed(wanted, &copies).map(|()| None),
            },
        );
        // Even after an error, all copies must end, because the caller frees the memory to which they write.
        copies.finish_all_but(0)?;
        check_parts(work.iter().zip(checksums?))?;
        copies.found.into_inner().unlike()
    }

    /// Returns whether the device or the host verifies an uncompressed image.
    fn summed_by(&self) -> SummedBy {
        if self.device.crosses_bus() { self.summed_by } else { SummedBy::Host }
    }

    /// Loads a run of images, which are close together in a file, with a single read.
    fn load_run(&self, run: &ImageRun<'_>, copies: &PendingCopies<'_>) -> Result<()> {
        // The run is read directly into staging, in whole blocks of the medium, which contain the requested bytes.
        let read = run.read(self.source, |len| self.staging.take(len))?;
        // Uncompressed pages are uploaded from the buffer that they were read to. Decompressed bytes are collected and
        // uploaded together.
        let (mut stored, mut decoded, mut decoded_bytes) = (Vec::new(), Vec::new(), Vec::new());
        for page in run.pages(&read, self.summed_by()) {
            // An error means that the host found a wrong checksum before any byte was uploaded. The device checks the
            // other pages after the upload.
            let (wanted, at, content) = page?;
            let target = (self.target)(wanted.page)?;
            match content {
                Cow::Borrowed(_) => push(&mut stored, Part { at, target, of: *wanted, offset: 0 })?,
                Cow::Owned(content) => {
                    let at = decoded_bytes.len();
                    push(&mut decoded, Part { at, target, of: *wanted, offset: 0 })?;
                    make_room(&mut decoded_bytes, content.len())?;
                    decoded_bytes.extend_from_slice(&content);
                    if decoded_bytes.len() as u64 >= RUN_BYTES {
                        copies.upload_copy(&decoded_bytes, &decoded)?;
                        decoded.clear();
                        decoded_bytes.clear();
                    }
                }
            }
        }
        copies.upload_copy(&decoded_bytes, &decoded)?;
        copies.upload(read.bytes, &stored)
    }

    /// Decompresses a page piece by piece, so that host memory never contains the whole page. The page is verified
    /// after the last piece is uploaded, and no reader can access the page before.
    fn load_compressed(&self, wanted: &ImageRequest, copies: &PendingCopies<'_>) -> Result<()> {
        let target = (self.target)(wanted.page)?;
        // One piece of staging fills while earlier ones are uploaded.
        let (mut filling, mut at) = (StagingFill::default(), 0);
        let loaded = stream_image(self.source, &wanted.image, wanted.len, |mut bytes| -> Result<()> {
            while !bytes.is_empty() {
                let staged = match &mut filling.staged {
                    Some(staged) => staged,
                    none => none.insert(self.staging.take(RUN_BYTES.min(wanted.len - at) as usize)?),
                };
                let (now, later) = bytes.split_at(bytes.len().min(staged.len() - filling.filled));
                staged[filling.filled..][..now.len()].copy_from_slice(now);
                filling.filled += now.len();
                bytes = later;
                if filling.filled == staged.len() {
                    let StagingFill { staged, filled } = std::mem::take(&mut filling);
                    let target = Span { offset: at, len: filled as u64, ..target };
                    let part = Part { at: 0, target, of: *wanted, offset: at };
                    copies.upload(staged.expect("just filled"), &[part])?;
                    at += filled as u64;
                }
            }
            Ok(())
        });
        // A part of the image that cannot be fetched from an archive is not damage.
        loaded.map_err(|error| self.source.cause_of(error))
    }

    /// Loads a part of a long image, and returns the part's checksum if the host computes it.
    fn load_part(
        &self,
        wanted: &ImageRequest,
        range: &Range<u64>,
        copies: &PendingCopies<'_>,
    ) -> Result<Option<u32>> {
        let ImageRef { file, offset, .. } = wanted.image;
        // I9: the image's length is checked against the page's before the image is read.
        wanted.image.check(wanted.len).map_err(|defect| defect.at(FileName::Pages(file), offset))?;
        // The parts of an image are verified together, after all of them are uploaded.
        let in_file = offset + range.start..offset + range.end;
        let take = |len| self.staging.take(len);
        let (read, checksum) = match self.summed_by() {
            SummedBy::Host => {
                let (read, checksum) = FilePiece::read_summed(self.source, file, in_file, take)?;
                (read, Some(checksum))
            }
            SummedBy::Device => (FilePiece::read(self.source, file, in_file, take)?, None),
        };
        let (at, len) = ((offset + range.start - read.start) as usize, range.end - range.start);
        let target = Span { offset: range.start, len, ..(self.target)(wanted.page)? };
        copies.upload(read.bytes, &[Part { at, target, of: *wanted, offset: range.start }])?;
        Ok(checksum)
    }
}

/// A staging buffer that collects bytes and is uploaded when it is full.
#[derive(Default)]
struct StagingFill {
    staged: Option<StagingBuf>,
    filled: usize,
}

/// A range of a page that a command list uploads from a staging buffer.
#[derive(Clone, Copy)]
struct Part {
    /// The offset of the range in the staging buffer.
    at: usize,
    /// The page memory that receives the range.
    target: Span,
    /// The request whose image contains the range.
    of: ImageRequest,
    /// The offset of the range in its page.
    offset: u64,
}

/// The queue of copies in flight from staging to pages, and the checksums of completed copies.
struct PendingCopies<'a> {
    /// The loader that provides the device and the staging pool.
    loader: &'a ImageLoader<'a>,
    /// The number of command lists submitted so far, from which the next lane is computed.
    begun: AtomicUsize,
    /// The copies in flight. The order is only approximately oldest first, because several threads add copies.
    under_way: Mutex<VecDeque<Copies>>,
    /// The checksums that the device computed for completed copies.
    found: Mutex<FoundSums>,
}

/// A submitted command list that uploads parts of pages from staging.
struct Copies {
    pending: Pending,
    /// The uploaded parts whose checksums the list also computes on the device.
    summed: Vec<Part>,
}

/// The checksums computed by the device that are wrong, or that cover only a part of a page.
#[derive(Default)]
struct FoundSums {
    /// The requests whose page has a wrong checksum.
    unlike: Vec<ImageRequest>,
    /// Parts of pages with their checksums. A page is verified by combining the checksums of all its parts.
    parts: Vec<(Part, u32)>,
}

impl FoundSums {
    /// Adds the checksum of a part that has arrived on the device.
    fn add(&mut self, part: &Part, sum: u32) -> Result<()> {
        if part.target.len < part.of.len {
            push(&mut self.parts, (*part, sum))
        } else if sum != part.of.image.raw_crc {
            push(&mut self.unlike, part.of)
        } else {
            Ok(())
        }
    }

    /// Returns the requests whose pages have a wrong checksum.
    fn unlike(self) -> Result<Vec<ImageRequest>> {
        let Self { mut unlike, mut parts } = self;
        parts.sort_unstable_by_key(|(part, _)| (part.of.page, part.offset));
        for of_page in parts.chunk_by(|(one, _), (next, _)| one.of.page == next.of.page) {
            let mut sum = crc32fast::Hasher::new();
            let mut end = 0;
            for (part, of_part) in of_page {
                // I6: without this check, a missing part would belong to the page without being covered by a checksum.
                assert!(part.offset == end, "a part of a page without its sum");
                end += part.target.len;
                sum.combine(&crc32fast::Hasher::new_with_initial_len(*of_part, part.target.len));
            }
            let of = of_page[0].0.of;
            assert!(end == of.len, "the last part of a page without its sum"); // I6
            if sum.finalize() != of.image.raw_crc {
                push(&mut unlike, of)?;
            }
        }
        Ok(unlike)
    }
}

impl PendingCopies<'_> {
    /// Copies bytes to staging and submits their upload.
    fn upload_copy(&self, bytes: &[u8], parts: &[Part]) -> Result<()> {
        if parts.is_empty() {
            return Ok(());
        }
        let mut staged = self.loader.staging.take(bytes.len())?;
        staged.copy_from_slice(bytes);
        self.upload(staged, parts)
    }

    /// Submits the upload of `parts` from the buffer `staged`. If the device computes checksums, the list includes
    /// them.
    fn upload(&self, staged: StagingBuf, parts: &[Part]) -> Result<()> {
        let ImageLoader { device, staging: pool, lanes, .. } = *self.loader;
        let parts = || parts.iter().filter(|part| part.target.len > 0);
        let upload = |part: &Part| {
            let source = StagingSpan { index: 0, offset: part.at, len: part.target.len as usize };
            Command::Upload { source, target: part.target }
        };
        let mut commands = Vec::new();
        make_room(&mut commands, parts().count() + 1)?;
        commands.extend(parts().map(upload));
        let mut list = CommandList { commands, staging: vec![staged.into_staging()] };
        let summed = if device.crosses_bus() { collected(parts().copied())? } else { Vec::new() };
        if !summed.is_empty() {
            // The checksum commands follow the copies in the same list, so that they read the copied bytes.
            pool.add_sums(&mut list, collected(summed.iter().map(|part| part.target))?)?;
        }
        // Any lane may execute any list, so a counter distributes them.
        let turn = self.begun.fetch_add(1, Ordering::Relaxed) % lanes.len();
        let pending = device.submit(lanes[turn], list)?;
        self.under_way.lock().push_back(Copies { pending, summed });
        // A thread that adds a copy waits for the oldest one, which bounds the staging of all threads together.
        self.finish_all_but(COPIES_MAX)
    }

    /// Waits for the oldest copies until at most `at_most` are in flight, and returns their staging buffers to the
    /// pool. Staging buffers of other completed copies are returned as well. The next read uses one of them, because its
    /// memory is still in the processor's cache.
    fn finish_all_but(&self, at_most: usize) -> Result<()> {
        // Waiting for a fence that has passed costs nothing.
        let is_done = |copies: &Copies| {
            let Fence { lane, value } = copies.pending.fence();
            value <= self.loader.device.reached(lane)
        };
        let oldest = || {
            let mut under_way = self.under_way.lock();
            let is_due = under_way.len() > at_most || under_way.front().is_some_and(is_done);
            if is_due { under_way.pop_front() } else { None }
        };
        while let Some(Copies { pending, summed }) = oldest() {
            let staging = self.loader.device.finish(pending)?;
            if !summed.is_empty() {
                let sums = &staging[1][..sums_len(summed.len())];
                let mut found = self.found.lock();
                summed.iter().zip(sums_in(sums)).try_for_each(|(part, sum)| found.add(part, sum))?;
            }
            staging.into_iter().for_each(|used| self.loader.staging.put(used));
        }
        Ok(())
    }
}

/// Splits a run into units of work. A run of several images is one unit. A single long image is split into parts, which
/// are checksummed while they are read. The image is verified after its last part has arrived.
fn split(run: ImageRun<'_>) -> Vec<LoadStep<'_>> {
    let long = |wanted: &&ImageRequest| {
        wanted.image.codec == Codec::Raw && wanted.image.stored_len > SUMMED_AT_ONCE as u64
    };
    let Some(only) = run.only() else { return vec![LoadStep::Run(run)] };
    if only.is_long() && only.image.codec != Codec::Raw {
        // A compressed image is one stream: no part of it can be read without the preceding parts.
        return vec![LoadStep::Compressed(only)];
    }
    let Some(wanted) = Some(only).filter(long) else { return vec![LoadStep::Run(run)] };
    // The image is uncompressed, so parts of the image are parts of the page.
    let parts = (0..wanted.image.stored_len).step_by(RUN_BYTES as usize);
    parts.map(|at| LoadStep::Part(wanted, at..wanted.image.stored_len.min(at + RUN_BYTES))).collect()
}

/// Verifies the images that were read in parts. `parts` yields the checksums of the parts in order.
fn check_parts<'a>(parts: impl Iterator<Item = (&'a LoadStep<'a>, Option<u32>)>) -> Result<()> {
    let mut so_far = crc32fast::Hasher::new();
    for (work, checksum) in parts {
        let (LoadStep::Part(ImageRequest { image, .. }, range), Some(checksum)) = (work, checksum) else {
            continue;
        };
        let damaged = |defect: Defect| Error::from(defect.at(FileName::Pages(image.file), image.offset));
        // The checksums of the parts combine to the checksum of the whole, so no byte is summed twice.
        so_far.combine(&crc32fast::Hasher::new_with_initial_len(checksum, range.end - range.start));
        if range.end == image.stored_len {
            // The last part completes the checksum, and the open may rely on the image (I6).
            let (found, computed) = (image.stored_crc, std::mem::take(&mut so_far).finalize());
            if found != computed {
                return Err(damaged(Defect::Checksum { what: "image", found, computed }));
            }
        }
    }
    Ok(())
}
