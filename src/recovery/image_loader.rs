//! Bringing images into device memory, by several threads. Each thread has one piece at a time between
//! the medium and staging, while earlier pieces go from staging to their pages: one thread waits for the
//! medium while another checksums.
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
use crate::device::{Command, CommandList, Device, Fence, Lane, Pending, Span, StagingSpan};
use crate::disk::source::DiskSource;
use crate::error::{Error, Result};
use crate::images::read::{FilePiece, ImageRequest, ImageRun, RUN_BYTES, SUMMED_AT_ONCE, runs};
use crate::memory::staging::{StagingBuf, StagingPool};

/// Threads that read images. Four keep a disk busy. From the page cache each gives a few gigabytes a
/// second, checksums included, and a GPU takes fifty.
const THREADS_MAX: usize = 12;
/// Copies that may be under way when a thread reads on. A lane does them one after the other, but it
/// should never have to wait for the next. From the page cache to an H200, 4 copies of 2 MiB made 39
/// GB/s, 8 made 49, 12 make 50. More would only need more staging, and a GPU pins that at 1.5 GB/s.
const COPIES_MAX: usize = 12;
/// Loads images into the memory of their pages.
pub(super) struct ImageLoader<'a> {
    pub device: &'a dyn Device,
    pub staging: &'a StagingPool,
    /// Where images are read: past the cache, or through it, as the caller knows of them (I6).
    pub source: &'a DiskSource,
    /// The lanes on which the bytes go up, in turns: between two lists of one lane the bus is idle for a
    /// while.
    pub lanes: &'static [Lane],
    /// Finds the memory of a page; waits until it is allocated.
    pub target: &'a (dyn Fn(PageId) -> Result<Span> + Sync),
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
pub(super) fn threads() -> usize {
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
        // Each file's images are put in order by one thread, and cut into runs.
        let into_work = |images: &'i mut [ImageRequest]| collected(runs(images).flat_map(split));
        let parts = parallel::for_each(threads, images, into_work)?;
        let mut work: Vec<LoadStep<'_>> = Vec::new();
        parts.into_iter().try_for_each(|part| append(&mut work, part))?;
        // In the order in which memory is allocated, which goes on meanwhile: so a thread waits for it
        // least. The parts of an image stay together, as `check_parts` demands.
        // (A stable sort takes memory that cannot be refused.)
        work.sort_unstable_by_key(LoadStep::key);
        let copies = PendingCopies { loader: self, begun: AtomicUsize::new(0), under_way: Mutex::default() };
        let checksums = parallel::map_indexed(
            threads,
            work.len(),
            || (),
            |(), index| match &work[index] {
                LoadStep::Run(run) => self.load_run(run, &copies).map(|()| None),
                LoadStep::Part(wanted, range) => self.load_part(wanted, range, &copies).map(Some),
                LoadStep::Compressed(wanted) => self.load_compressed(wanted, &copies).map(|()| None),
            },
        );
        // Also after an error: a caller that gives the memory back must know that no copy writes to it
        // any more.
        copies.finish_but(0)?;
        check_parts(work.iter().zip(checksums?))
    }

    /// Loads a run: images that lie close to each other in a file, read at one go.
    fn load_run(&self, run: &ImageRun<'_>, copies: &PendingCopies<'_>) -> Result<()> {
        // Straight into staging, whole blocks of the medium: the bytes that count lie somewhere within.
        let read = run.read(self.source, |len| self.staging.take(len))?;
        // Pages that are stored as they are go up from where they were read. Decompressed bytes are
        // gathered, and go up together.
        let (mut stored, mut decoded, mut decoded_bytes) = (Vec::new(), Vec::new(), Vec::new());
        for page in run.pages(&read) {
            // Proven by its checksum here, before a byte of it goes up.
            let (page, at, content) = page?;
            let target = (self.target)(page)?;
            match content {
                Cow::Borrowed(_) => push(&mut stored, (at, target))?,
                Cow::Owned(content) => {
                    push(&mut decoded, (decoded_bytes.len(), target))?;
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
                    let part = Span { offset: at, len: filled as u64, ..target };
                    copies.upload(staged.expect("just filled"), &[(0, part)])?;
                    at += filled as u64;
                }
            }
            Ok(())
        })
    }

    /// Loads a part of a long image, and returns the part's checksum.
    fn load_part(
        &self,
        wanted: &ImageRequest,
        range: &Range<u64>,
        copies: &PendingCopies<'_>,
    ) -> Result<u32> {
        let ImageRef { file, offset, .. } = wanted.image;
        // I9: the image's length is held against the page's before any of it is used.
        wanted.image.check(wanted.len).map_err(|defect| defect.at(FileName::Pages(file), offset))?;
        // Only a part: it is proven with the others, when all have gone up.
        let in_file = offset + range.start..offset + range.end;
        let (read, checksum) =
            FilePiece::read_summed(self.source, file, in_file, |len| self.staging.take(len))?;
        let (at, len) = ((offset + range.start - read.start) as usize, range.end - range.start);
        let target = Span { offset: range.start, len, ..(self.target)(wanted.page)? };
        copies.upload(read.bytes, &[(at, target)])?;
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

/// Copies from staging to pages that are under way.
struct PendingCopies<'a> {
    /// Whose device and staging the copies use.
    loader: &'a ImageLoader<'a>,
    /// Counts the lists that were submitted, so that lanes take turns.
    begun: AtomicUsize,
    /// The oldest first, or nearly so: threads add theirs as they come.
    under_way: Mutex<VecDeque<Pending>>,
}

impl PendingCopies<'_> {
    /// Copies bytes to staging, and submits their upload.
    fn upload_copy(&self, bytes: &[u8], pages: &[(usize, Span)]) -> Result<()> {
        if pages.is_empty() {
            return Ok(());
        }
        let mut staged = self.loader.staging.take(bytes.len())?;
        staged.copy_from_slice(bytes);
        self.upload(staged, pages)
    }

    /// Submits the upload of what lies at these places of `staged`.
    fn upload(&self, staged: StagingBuf, pages: &[(usize, Span)]) -> Result<()> {
        let upload = |(at, target): &(usize, Span)| {
            let source = StagingSpan { index: 0, offset: *at, len: target.len as usize };
            Command::Upload { source, target: *target }
        };
        let commands = collected(pages.iter().filter(|(_, target)| target.len > 0).map(upload))?;
        let list = CommandList { commands, staging: vec![staged.into_staging()] };
        // Any order will do: a counter is enough to spread the lists.
        let turn = self.begun.fetch_add(1, Ordering::Relaxed) % self.loader.lanes.len();
        let pending = self.loader.device.submit(self.loader.lanes[turn], list)?;
        self.under_way.lock().push_back(pending);
        // The thread that adds a copy waits for the oldest: so staging is bounded for all of them together.
        self.finish_but(COPIES_MAX)
    }

    /// Waits for the oldest copies until at most `at_most` are under way, and gives their staging back.
    /// Staging of copies that are done already is given back, too, and used for the next ones: on the
    /// host it is in the processor's cache.
    fn finish_but(&self, at_most: usize) -> Result<()> {
        // A fence that was reached costs no wait.
        let is_done = |pending: &Pending| {
            let Fence { lane, value } = pending.fence();
            value <= self.loader.device.reached(lane)
        };
        let oldest = || {
            let mut under_way = self.under_way.lock();
            let is_due = under_way.len() > at_most || under_way.front().is_some_and(is_done);
            if is_due { under_way.pop_front() } else { None }
        };
        while let Some(pending) = oldest() {
            for staging in pending.finish(self.loader.device)? {
                self.loader.staging.give(staging);
            }
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
