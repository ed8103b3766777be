//! Bringing images into device memory, by several threads. Each thread has one piece at a time between
//! the medium and staging, while earlier pieces go from staging to their pages: one thread waits for the
//! medium while another checksums.
//!
//! Where the bytes cross a bus, the device sums them in the list that brings them (I12), and the host leaves
//! it at that: the sum over what arrived proves medium, cache, staging and bus at once. A sum that is not the
//! stored one does not say which of these is to blame. So the image is read again from the medium and summed
//! by the host: if the host's sum is wrong too, the image is damaged. If it holds, the bytes go up once more,
//! and a device that changes them again has failed.
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
use crate::device::sums::{changed_on_the_way, sums_in, sums_len};
use crate::device::{Command, CommandList, Device, Fence, Lane, Pending, Span, StagingSpan};
use crate::disk::source::DiskSource;
use crate::error::{Error, Result};
use crate::images::read::{FilePiece, ImageRequest, ImageRun, RUN_BYTES, SUMMED_AT_ONCE, SummedBy, runs};
use crate::memory::staging::{StagingBuf, StagingPool};

/// Threads that read images. Four keep a disk busy. From the page cache each gives a few gigabytes a
/// second, checksums included, and a GPU takes fifty.
const THREADS_MAX: usize = 12;
/// Copies that may be under way when a thread reads on. A lane does them one after the other, but it
/// should never have to wait for the next. From the page cache to an H200, 4 copies of 2 MiB made 39
/// GB/s, 8 made 49, 12 make 50. More would only need more staging, and a GPU pins that at 1.5 GB/s.
const COPIES_MAX: usize = 12;

/// Loads images into the memory of their pages.
#[derive(Clone, Copy)]
pub(crate) struct ImageLoader<'a> {
    pub device: &'a dyn Device,
    pub staging: &'a StagingPool,
    /// Where images are read: past the cache, or through it, as the caller knows of them (I6).
    pub source: &'a DiskSource,
    /// The lanes on which the bytes go up, in turns: between two lists of one lane the bus is idle for a
    /// while.
    pub lanes: &'a [Lane],
    /// Finds the memory of a page; waits until it is allocated.
    pub target: &'a (dyn Fn(PageId) -> Result<Span> + Sync),
    /// The side that proves images stored as they are. Bytes that cross a bus are summed by the device
    /// anyway; with `Host`, a damaged image is found before a byte of it goes up.
    pub summed_by: SummedBy,
}

/// One piece of work of a loading thread.
enum LoadStep<'a> {
    Run(ImageRun<'a>),
    /// This range of a long image, in bytes from the image's start.
    Part(&'a ImageRequest, Range<u64>),
    /// A long page that is compressed.
    Compressed(&'a ImageRequest),
}

impl LoadStep<'_> {
    /// What pieces of work are put in order by: their page, and their place in it.
    fn key(&self) -> (PageId, u64) {
        match self {
            LoadStep::Run(run) => (run.first_page(), 0),
            LoadStep::Part(wanted, range) => (wanted.page, range.start),
            LoadStep::Compressed(wanted) => (wanted.page, 0),
        }
    }
}

/// How many threads load images.
pub(crate) fn threads() -> usize {
    parallel::threads(THREADS_MAX)
}

impl ImageLoader<'_> {
    /// Loads and proves images, in no order, by several threads, and returns when they are there. A long
    /// image is read in parts, so that no more than a few megabytes a thread are held at a time. The
    /// images come grouped by file: sorting all of them at once took a tenth of the time of loading small
    /// pages.
    ///
    /// # Errors
    /// [`Error::Damaged`]; a device error, after which lists that name the memory may still be under way.
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
        // From the medium, and summed by the host: an image that fails here is damaged, and no other is.
        let medium = self.source.on_medium();
        let again = ImageLoader { source: &medium, summed_by: SummedBy::Host, ..*self };
        let unlike = again.load_once(std::iter::once(&mut *unlike), threads)?;
        if unlike.is_empty() { Ok(()) } else { Err(changed_on_the_way(self.device, "pages")) }
    }

    /// Loads images, and returns those for which the device's sum is not the image's. Where the device does
    /// not sum, the host proves all of them.
    fn load_once<'i>(
        &self,
        images: impl Iterator<Item = &'i mut [ImageRequest]>,
        threads: usize,
    ) -> Result<Vec<ImageRequest>> {
        // Each file's images are put in order by one thread, and cut into runs.
        let into_work = |images: &'i mut [ImageRequest]| collected(runs(images).flat_map(split));
        let parts = parallel::for_each(threads, images, into_work)?;
        let mut work: Vec<LoadStep<'_>> = Vec::new();
        parts.into_iter().try_for_each(|part| append(&mut work, part))?;
        // In the order in which memory is allocated, which goes on meanwhile: so a thread waits for it
        // least. The parts of an image stay together, as `check_parts` demands.
        // (A stable sort takes memory that cannot be refused.)
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
        // Also after an error: a caller that gives the memory back must know that no copy writes to it
        // any more.
        copies.finish_but(0)?;
        check_parts(work.iter().zip(checksums?))?;
        copies.found.into_inner().unlike()
    }

    /// The side that proves an image which is stored as it is.
    fn summed_by(&self) -> SummedBy {
        if self.device.crosses_bus() { self.summed_by } else { SummedBy::Host }
    }

    /// Loads a run: images that lie close to each other in a file, read at one go.
    fn load_run(&self, run: &ImageRun<'_>, copies: &PendingCopies<'_>) -> Result<()> {
        // Straight into staging, whole blocks of the medium: the bytes that count lie somewhere within.
        let read = run.read(self.source, |len| self.staging.take(len))?;
        // Pages that are stored as they are go up from where they were read. Decompressed bytes are
        // gathered, and go up together.
        let (mut stored, mut decoded, mut decoded_bytes) = (Vec::new(), Vec::new(), Vec::new());
        for page in run.pages(&read, self.summed_by()) {
            // Proven by its checksum here, before a byte of it goes up, or by the device when it is there.
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

    /// Decompresses a page piece by piece, so that it is never whole in host memory. It is proven when
    /// all of it has gone up; until then no reader gets to see it.
    fn load_compressed(&self, wanted: &ImageRequest, copies: &PendingCopies<'_>) -> Result<()> {
        let target = (self.target)(wanted.page)?;
        // One piece of staging fills while those before it go up.
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

    /// Loads a part of a long image, and returns the part's checksum if the host makes it.
    fn load_part(
        &self,
        wanted: &ImageRequest,
        range: &Range<u64>,
        copies: &PendingCopies<'_>,
    ) -> Result<Option<u32>> {
        let ImageRef { file, offset, .. } = wanted.image;
        // I9: the image's length is held against the page's before any of it is used.
        wanted.image.check(wanted.len).map_err(|defect| defect.at(FileName::Pages(file), offset))?;
        // Only a part: it is proven with the others, when all have gone up.
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

/// Bytes gathered in staging, which go up when it is full.
#[derive(Default)]
struct StagingFill {
    staged: Option<StagingBuf>,
    /// How many bytes of it are filled.
    filled: usize,
}

/// A range of a page on its way up.
#[derive(Clone, Copy)]
struct Part {
    /// Its first byte in staging.
    at: usize,
    /// Its place in page memory.
    target: Span,
    /// The image that it is of.
    of: ImageRequest,
    /// Its first byte in the page.
    offset: u64,
}

/// Copies from staging to pages that are under way.
struct PendingCopies<'a> {
    /// Whose device and staging the copies use.
    loader: &'a ImageLoader<'a>,
    /// Counts the lists that were submitted, so that lanes take turns.
    begun: AtomicUsize,
    /// The oldest first, or nearly so: threads add theirs as they come.
    under_way: Mutex<VecDeque<Copies>>,
    /// What the device's sums of the copies that are done say.
    found: Mutex<FoundSums>,
}

/// A list that brings parts of pages up.
struct Copies {
    pending: Pending,
    /// The parts that the device sums.
    summed: Vec<Part>,
}

/// The device's sums, as far as they do not prove a page.
#[derive(Default)]
struct FoundSums {
    /// Images whose page has another sum.
    unlike: Vec<ImageRequest>,
    /// Parts of pages, each with its sum: they prove a page only together.
    parts: Vec<(Part, u32)>,
}

impl FoundSums {
    /// Takes the sum of what arrived.
    fn add(&mut self, part: &Part, sum: u32) -> Result<()> {
        if part.target.len < part.of.len {
            push(&mut self.parts, (*part, sum))
        } else if sum != part.of.image.raw_crc {
            push(&mut self.unlike, part.of)
        } else {
            Ok(())
        }
    }

    /// The images whose pages have another sum.
    fn unlike(self) -> Result<Vec<ImageRequest>> {
        let Self { mut unlike, mut parts } = self;
        parts.sort_unstable_by_key(|(part, _)| (part.of.page, part.offset));
        for of_page in parts.chunk_by(|(one, _), (next, _)| one.of.page == next.of.page) {
            let mut sum = crc32fast::Hasher::new();
            let mut end = 0;
            for (part, of_part) in of_page {
                // I6: a hole would be bytes of the page that no sum proves.
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
    /// Copies bytes to staging, and submits their upload.
    fn upload_copy(&self, bytes: &[u8], parts: &[Part]) -> Result<()> {
        if parts.is_empty() {
            return Ok(());
        }
        let mut staged = self.loader.staging.take(bytes.len())?;
        staged.copy_from_slice(bytes);
        self.upload(staged, parts)
    }

    /// Submits the upload of these parts, which lie in `staged`, with their sums where the device makes them.
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
            // After the copies, in one list: the sums are of what arrived.
            pool.add_sums(&mut list, collected(summed.iter().map(|part| part.target))?)?;
        }
        // Any order will do: a counter is enough to spread the lists.
        let turn = self.begun.fetch_add(1, Ordering::Relaxed) % lanes.len();
        let pending = device.submit(lanes[turn], list)?;
        self.under_way.lock().push_back(Copies { pending, summed });
        // The thread that adds a copy waits for the oldest: so staging is bounded for all of them together.
        self.finish_but(COPIES_MAX)
    }

    /// Waits for the oldest copies until at most `at_most` are under way, and gives their staging back.
    /// Staging of copies that are done already is given back, too, and used for the next ones: on the
    /// host it is in the processor's cache.
    fn finish_but(&self, at_most: usize) -> Result<()> {
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
            staging.into_iter().for_each(|used| self.loader.staging.give(used));
        }
        Ok(())
    }
}

/// Cuts a run into pieces of work. A run is one piece, unless it is a single long image: that one is
/// summed while it is read, and proven when all its parts are there.
fn split(run: ImageRun<'_>) -> Vec<LoadStep<'_>> {
    let long = |wanted: &&ImageRequest| {
        wanted.image.codec == Codec::Raw && wanted.image.stored_len > SUMMED_AT_ONCE as u64
    };
    let Some(only) = run.only() else { return vec![LoadStep::Run(run)] };
    if only.is_long() && only.image.codec != Codec::Raw {
        // A compressed image is one stream: no part of it can be read without those before.
        return vec![LoadStep::Compressed(only)];
    }
    let Some(wanted) = Some(only).filter(long) else { return vec![LoadStep::Run(run)] };
    // Stored as it is, so that parts of the image are parts of the page.
    let parts = (0..wanted.image.stored_len).step_by(RUN_BYTES as usize);
    parts.map(|at| LoadStep::Part(wanted, at..wanted.image.stored_len.min(at + RUN_BYTES))).collect()
}

/// Proves the images that were read in parts, by the checksums of the parts, which come in their order.
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
            // The last part: only now is the image proven, and the open may go on (I6).
            let (found, computed) = (image.stored_crc, std::mem::take(&mut so_far).finalize());
            if found != computed {
                return Err(damaged(Defect::Checksum { what: "image", found, computed }));
            }
        }
    }
    Ok(())
}
