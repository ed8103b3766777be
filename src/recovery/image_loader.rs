//! Loads images into device memory with several threads. Each thread moves one piece at a time from the
//! medium to staging, while earlier pieces are copied from staging to their pages: one thread waits for the
//! medium while another computes checksums.
//!
//! Where the bytes cross a bus, the device checksums them in the list that copies them (I12), and the host
//! does not: the sum over the arrived bytes proves medium, cache, staging and bus at once. A sum that differs
//! from the stored one does not say which of these is to blame. So the image is read again from the medium
//! and checksummed by the host: if the host's sum is wrong too, the image is damaged. If it is right, the
//! bytes are uploaded once more, and a device that alters them again has failed.
//!
//! Nothing on disk changes here, so a crash loses nothing.

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
use crate::device::{Command, CommandList, Device, Fence, Lane, Pending, Span, StagingSpan};
use crate::disk::source::DiskSource;
use crate::error::{Error, Result};
use crate::images::read::{FilePiece, ImageRequest, ImageRun, RUN_BYTES, SUMMED_AT_ONCE, SummedBy, runs};
use crate::memory::staging::{StagingBuf, StagingPool};

/// The maximum number of threads that read images. Four keep a disk busy. From the page cache each one
/// delivers a few gigabytes per second, checksums included, and a GPU accepts fifty.
const THREADS_MAX: usize = 12;
/// The maximum number of copies in flight while a thread reads on. A lane executes them one after the other,
/// but should never wait for the next one. From the page cache to an H200, 4 copies of 2 MiB reached 39 GB/s,
/// 8 reached 49 and 12 reach 50. More would only need more staging, which a GPU pins at 1.5 GB/s.
const COPIES_MAX: usize = 12;

/// Loads images into the memory of their pages.
#[derive(Clone, Copy)]
pub(crate) struct ImageLoader<'a> {
    pub device: &'a dyn Device,
    pub staging: &'a StagingPool,
    /// The source of images: past the cache or through it, depending on what the caller knows about them
    /// (I6).
    pub source: &'a DiskSource,
    /// The lanes for uploads, used in turn: the bus idles briefly between two lists of one lane.
    pub lanes: &'a [Lane],
    /// Returns the memory of a page, waiting until it is allocated.
    pub target: &'a (dyn Fn(PageId) -> Result<Span> + Sync),
    /// The side that proves uncompressed images. The device checksums bytes that cross a bus in any case;
    /// with `Host`, a damaged image is detected before any of its bytes is uploaded.
    pub summed_by: SummedBy,
}

/// One piece of work of a loading thread.
enum LoadStep<'a> {
    Run(ImageRun<'a>),
    /// A range of a long image, in bytes from the start of the image.
    Part(&'a ImageRequest, Range<u64>),
    /// A long page that is compressed.
    Compressed(&'a ImageRequest),
}

impl LoadStep<'_> {
    /// Returns the sort key of a piece of work: its page, and its offset in the page.
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
    /// Loads and proves images in any order with several threads, and returns when all have arrived. A long
    /// image is read in parts, so that no more than a few megabytes per thread are held at a time. The images
    /// come grouped by file: sorting all of them at once took a tenth of the time of loading small pages.
    ///
    /// # Errors
    /// [`Error::Damaged`]; or a device error, after which lists that name the memory may still be in flight.
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
        tracing::warn!(device, images = unlike.len(), "the device's sums are not those of the images");
        // Read from the medium and checksummed by the host: only a damaged image fails here.
        let medium = self.source.on_medium();
        let again = ImageLoader { source: &medium, summed_by: SummedBy::Host, ..*self };
        let unlike = again.load_once(std::iter::once(&mut *unlike), threads)?;
        if unlike.is_empty() { Ok(()) } else { Err(transfer_corrupted(self.device, "pages")) }
    }

    /// Loads images, and returns those for which the device's sum differs from the stored one. If the device
    /// does not checksum, the host proves all of them.
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
        // In the order in which memory is allocated concurrently, so that threads wait for it as little as
        // possible. The parts of an image stay together, as `check_parts` requires. A stable sort would
        // allocate memory infallibly.
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
        // Also after an error: a caller that gives the memory back must know that no copy still writes to it.
        copies.finish_all_but(0)?;
        check_parts(work.iter().zip(checksums?))?;
        copies.found.into_inner().unlike()
    }

    /// Returns the side that proves an uncompressed image.
    fn summed_by(&self) -> SummedBy {
        if self.device.crosses_bus() { self.summed_by } else { SummedBy::Host }
    }

    /// Loads a run: images that are close together in a file, read at once.
    fn load_run(&self, run: &ImageRun<'_>, copies: &PendingCopies<'_>) -> Result<()> {
        // Read directly into staging, in whole blocks of the medium: the wanted bytes are somewhere within.
        let read = run.read(self.source, |len| self.staging.take(len))?;
        // Uncompressed pages are uploaded from the buffer that they were read to. Decompressed bytes are
        // collected and uploaded together.
        let (mut stored, mut decoded, mut decoded_bytes) = (Vec::new(), Vec::new(), Vec::new());
        for page in run.pages(&read, self.summed_by()) {
            // Proven by its checksum here, before any byte is uploaded, or by the device after arrival.
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

    /// Decompresses a page piece by piece, so that it is never whole in host memory. The page is proven once
    /// all of it is uploaded; until then no reader can see it.
    fn load_compressed(&self, wanted: &ImageRequest, copies: &PendingCopies<'_>) -> Result<()> {
        let target = (self.target)(wanted.page)?;
        // One piece of staging fills while earlier ones are uploaded.
        let (mut filling, mut at) = (StagingFill::default(), 0);
        stream_image(self.source, &wanted.image, wanted.len, |mut bytes| -> Result<()> {
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
        })
    }

    /// Loads a part of a long image, and returns the part's checksum if the host computes it.
    fn load_part(
        &self,
        wanted: &ImageRequest,
        range: &Range<u64>,
        copies: &PendingCopies<'_>,
    ) -> Result<Option<u32>> {
        let ImageRef { file, offset, .. } = wanted.image;
        // I9: the image's length is checked against the page's before any of it is used.
        wanted.image.check(wanted.len).map_err(|defect| defect.at(FileName::Pages(file), offset))?;
        // Only a part: it is proven together with the others, after all were uploaded.
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

/// Bytes collected in staging, to be uploaded when it is full.
#[derive(Default)]
struct StagingFill {
    staged: Option<StagingBuf>,
    /// The number of bytes filled.
    filled: usize,
}

/// A range of a page in upload.
#[derive(Clone, Copy)]
struct Part {
    /// Its offset in staging.
    at: usize,
    /// Its destination in page memory.
    target: Span,
    /// The image that it belongs to.
    of: ImageRequest,
    /// Its offset in the page.
    offset: u64,
}

/// Copies in flight from staging to pages.
struct PendingCopies<'a> {
    /// The loader whose device and staging the copies use.
    loader: &'a ImageLoader<'a>,
    /// Counts submitted lists, so that lanes take turns.
    begun: AtomicUsize,
    /// The copies, approximately oldest first: threads add theirs as they come.
    under_way: Mutex<VecDeque<Copies>>,
    /// The device's sums of completed copies.
    found: Mutex<FoundSums>,
}

/// A list that uploads parts of pages.
struct Copies {
    pending: Pending,
    /// The parts that the device checksums.
    summed: Vec<Part>,
}

/// The device's sums, as far as they do not prove a page.
#[derive(Default)]
struct FoundSums {
    /// Images whose page has a different sum.
    unlike: Vec<ImageRequest>,
    /// Parts of pages, each with its sum: only together do they prove a page.
    parts: Vec<(Part, u32)>,
}

impl FoundSums {
    /// Adds the sum of a part that arrived.
    fn add(&mut self, part: &Part, sum: u32) -> Result<()> {
        if part.target.len < part.of.len {
            push(&mut self.parts, (*part, sum))
        } else if sum != part.of.image.raw_crc {
            push(&mut self.unlike, part.of)
        } else {
            Ok(())
        }
    }

    /// Returns the images whose pages have a different sum.
    fn unlike(self) -> Result<Vec<ImageRequest>> {
        let Self { mut unlike, mut parts } = self;
        parts.sort_unstable_by_key(|(part, _)| (part.of.page, part.offset));
        for of_page in parts.chunk_by(|(one, _), (next, _)| one.of.page == next.of.page) {
            let mut sum = crc32fast::Hasher::new();
            let mut end = 0;
            for (part, of_part) in of_page {
                // I6: a gap would be bytes of the page that no sum proves.
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

    /// Submits the upload of these parts of `staged`, with their sums if the device computes them.
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
            // After the copies in the same list, so that the sums cover the arrived bytes.
            pool.add_sums(&mut list, collected(summed.iter().map(|part| part.target))?)?;
        }
        // Any order will do: a counter is enough to spread the lists.
        let turn = self.begun.fetch_add(1, Ordering::Relaxed) % lanes.len();
        let pending = device.submit(lanes[turn], list)?;
        self.under_way.lock().push_back(Copies { pending, summed });
        // The thread that adds a copy waits for the oldest one, which bounds the staging of all threads
        // together.
        self.finish_all_but(COPIES_MAX)
    }

    /// Waits for the oldest copies until at most `at_most` are in flight, and returns their staging. Staging
    /// of copies that are already done is returned as well and reused next: on the host it is still in the
    /// processor's cache.
    fn finish_all_but(&self, at_most: usize) -> Result<()> {
        // A fence that was reached costs no wait.
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
            let staging = pending.finish(self.loader.device)?;
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

/// Splits a run into pieces of work. A run is one piece, unless it is a single long image, which is
/// checksummed while it is read and proven once all its parts have arrived.
fn split(run: ImageRun<'_>) -> Vec<LoadStep<'_>> {
    let long = |wanted: &&ImageRequest| {
        wanted.image.codec == Codec::Raw && wanted.image.stored_len > SUMMED_AT_ONCE as u64
    };
    let Some(only) = run.only() else { return vec![LoadStep::Run(run)] };
    if only.is_long() && only.image.codec != Codec::Raw {
        // A compressed image is one stream: no part of it can be read without the preceding ones.
        return vec![LoadStep::Compressed(only)];
    }
    let Some(wanted) = Some(only).filter(long) else { return vec![LoadStep::Run(run)] };
    // Uncompressed, so that parts of the image are parts of the page.
    let parts = (0..wanted.image.stored_len).step_by(RUN_BYTES as usize);
    parts.map(|at| LoadStep::Part(wanted, at..wanted.image.stored_len.min(at + RUN_BYTES))).collect()
}

/// Proves the images that were read in parts, from the parts' checksums in order.
fn check_parts<'a>(parts: impl Iterator<Item = (&'a LoadStep<'a>, Option<u32>)>) -> Result<()> {
    let mut so_far = crc32fast::Hasher::new();
    for (work, checksum) in parts {
        let (LoadStep::Part(ImageRequest { image, .. }, range), Some(checksum)) = (work, checksum) else {
            continue;
        };
        let damaged = |defect: Defect| Error::from(defect.at(FileName::Pages(image.file), image.offset));
        // The checksums of the parts combine to that of the whole: no byte is summed twice.
        so_far.combine(&crc32fast::Hasher::new_with_initial_len(checksum, range.end - range.start));
        if range.end == image.stored_len {
            // The last part: only now is the image proven, and the open may continue (I6).
            let (found, computed) = (image.stored_crc, std::mem::take(&mut so_far).finalize());
            if found != computed {
                return Err(damaged(Defect::Checksum { what: "image", found, computed }));
            }
        }
    }
    Ok(())
}
