//! Floor 6. Bringing images into device memory, by several threads, each with one piece at a time between the medium
//! and staging, while pieces before go from staging to their pages.
//!
//! Nothing on disk changes here, so a crash loses nothing.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::ops::Range;

use remanent_format::image::{Codec, ImageRef};
use remanent_format::{Defect, FileName, PageId};

use crate::crew;
use crate::device::{Command, CommandList, Device, Fence, Lane, Pending, Span, StagingSpan};
use crate::error::{Error, Result};
use crate::runs::{Piece, RUN_BYTES, Run, SUMMED_AT_ONCE, Wanted, runs};
use crate::source::DiskSource;
use crate::staging::{StagingBuf, StagingPool};
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicUsize, Ordering};

/// Threads that read. A disk is busy with four; from the page cache each gives a few gigabytes a second, checksums
/// included, and a GPU takes fifty.
const THREADS_MAX: usize = 12;
/// Copies that may be under way when a thread reads on. A lane does them one after the other, but it should never have
/// to wait for the next: from the page cache to an H200 4 of 2 MiB made 39 GB/s, 8 made 49, and 12 make 50. More would
/// only need more staging, which a GPU pins at 1.5 GB/s.
const COPIES_MAX: usize = 12;
/// Bytes of pages that are decompressed at once, unless a single one is longer. Each is held three times.
const DECODED_BYTES: u64 = 64 << 20;

/// Loads images into the memory of their pages.
pub(super) struct ImageLoader<'a> {
    pub device: &'a dyn Device,
    pub staging: &'a StagingPool,
    pub source: &'a DiskSource,
    /// The lanes on which the bytes go up, in turns: between two lists of one lane the bus is idle for a while.
    pub lanes: &'static [Lane],
    /// The memory of a page.
    pub target: &'a (dyn Fn(PageId) -> Result<Span> + Sync),
}

/// What one thread does at a time.
enum Work<'a> {
    Run(Run<'a>),
    /// This range of a long image, in bytes from the image's start.
    Part(&'a Wanted, Range<u64>),
}

impl Work<'_> {
    fn first_page(&self) -> PageId {
        match self {
            Work::Run(run) => run.first_page(),
            Work::Part(wanted, _) => wanted.page,
        }
    }
}

/// How many threads load images of which the longest that is compressed holds so many bytes; 0 if none is.
pub(super) fn threads(longest_compressed: u64) -> usize {
    crew::threads(threads_for(longest_compressed))
}

fn threads_for(longest_compressed: u64) -> usize {
    let fit = (DECODED_BYTES / longest_compressed.max(RUN_BYTES)).max(1) as usize;
    if longest_compressed == 0 { THREADS_MAX } else { fit.min(THREADS_MAX) }
}

impl ImageLoader<'_> {
    /// Loads and proves images, in no order, by several threads, and returns when they are there. A long one is read
    /// in parts, so that no more than a few megabytes a thread are held at a time; one that is long and compressed is
    /// held whole. They come by files: sorted among all of them, those of small pages took a tenth of the time that
    /// loading them takes.
    ///
    /// # Errors
    /// [`Error::Damaged`]; a device error, after which lists that name the memory may still be under way.
    pub fn load<'i>(&self, images: impl Iterator<Item = &'i mut [Wanted]>, threads: usize) -> Result<()> {
        let into_work =
            |images: &'i mut [Wanted]| Ok::<_, Infallible>(runs(images).flat_map(split).collect::<Vec<_>>());
        let Ok(work) = crew::share(threads, images, into_work);
        let mut work: Vec<Work<'_>> = work.into_iter().flatten().collect();
        // As memory is allocated, which goes on meanwhile. The parts of an image stay together.
        work.sort_by_key(Work::first_page);
        let copies = Copies { loader: self, begun: AtomicUsize::new(0), under_way: Mutex::default() };
        let checksums = crew::map(
            threads,
            work.len(),
            || (),
            |(), index| match &work[index] {
                Work::Run(run) => self.load_run(run, &copies).map(|()| None),
                Work::Part(wanted, range) => self.load_part(wanted, range, &copies).map(Some),
            },
        );
        // Whatever became of the reading: who gives the memory back must know that nothing writes to it.
        copies.finish_but(0)?;
        check_parts(work.iter().zip(checksums?))
    }

    fn load_run(&self, run: &Run<'_>, copies: &Copies<'_>) -> Result<()> {
        let read = run.read(self.source, |len| self.staging.take(len))?;
        // Pages that are stored as they are go up from where they were read; what is compressed is gathered
        // elsewhere.
        let (mut stored, mut decoded, mut decoded_bytes) = (Vec::new(), Vec::new(), Vec::new());
        for page in run.pages(&read) {
            let (page, at, content) = page?;
            let target = (self.target)(page)?;
            match content {
                Cow::Borrowed(_) => stored.push((at, target)),
                Cow::Owned(content) => {
                    decoded.push((decoded_bytes.len(), target));
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

    /// Returns the part's checksum.
    fn load_part(&self, wanted: &Wanted, range: &Range<u64>, copies: &Copies<'_>) -> Result<u32> {
        let ImageRef { file, offset, .. } = wanted.image;
        wanted.image.check(wanted.len).map_err(|defect| defect.at(FileName::Pages(file), offset))?;
        let in_file = offset + range.start..offset + range.end;
        let (read, checksum) = Piece::read_summed(self.source, file, in_file, |len| self.staging.take(len))?;
        let (at, len) = ((offset + range.start - read.start) as usize, range.end - range.start);
        let target = Span { offset: range.start, len, ..(self.target)(wanted.page)? };
        copies.upload(read.bytes, &[(at, target)])?;
        Ok(checksum)
    }
}

/// Copies from staging to pages that were begun and not waited for.
struct Copies<'a> {
    loader: &'a ImageLoader<'a>,
    begun: AtomicUsize,
    /// The oldest first, or nearly so.
    under_way: Mutex<VecDeque<Pending>>,
}

impl Copies<'_> {
    fn upload_copy(&self, bytes: &[u8], pages: &[(usize, Span)]) -> Result<()> {
        if pages.is_empty() {
            return Ok(());
        }
        let mut staged = self.loader.staging.take(bytes.len())?;
        staged.copy_from_slice(bytes);
        self.upload(staged, pages)
    }

    /// Begins to bring what lies at these places of `staged` up.
    fn upload(&self, staged: StagingBuf, pages: &[(usize, Span)]) -> Result<()> {
        let upload = |(at, target): &(usize, Span)| {
            let source = StagingSpan { index: 0, offset: *at, len: target.len as usize };
            Command::Upload { source, target: *target }
        };
        let commands = pages.iter().filter(|(_, target)| target.len > 0).map(upload).collect();
        let list = CommandList { commands, staging: vec![staged.into_staging()] };
        let turn = self.begun.fetch_add(1, Ordering::Relaxed) % self.loader.lanes.len();
        let pending = self.loader.device.submit(self.loader.lanes[turn], list)?;
        self.under_way.lock().push_back(pending);
        self.finish_but(COPIES_MAX)
    }

    /// Waits for the oldest copies, until at most so many are under way, and gives their staging back. That of copies
    /// that are done already is used for the next ones: on the host it is in the processor's cache.
    fn finish_but(&self, at_most: usize) -> Result<()> {
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

/// A run is one piece of work, but for one that is a single long image: that is summed while it is read, and proven when
/// all its parts are there.
fn split(run: Run<'_>) -> Vec<Work<'_>> {
    let long = |wanted: &&Wanted| {
        wanted.image.codec == Codec::Raw && wanted.image.stored_len > SUMMED_AT_ONCE as u64
    };
    let Some(wanted) = run.only().filter(long) else { return vec![Work::Run(run)] };
    let parts = (0..wanted.image.stored_len).step_by(RUN_BYTES as usize);
    parts.map(|at| Work::Part(wanted, at..wanted.image.stored_len.min(at + RUN_BYTES))).collect()
}

/// Proves the images that were read in parts: these come in their order.
fn check_parts<'a>(parts: impl Iterator<Item = (&'a Work<'a>, Option<u32>)>) -> Result<()> {
    let mut so_far = crc32fast::Hasher::new();
    for (work, checksum) in parts {
        let (Work::Part(Wanted { image, .. }, range), Some(checksum)) = (work, checksum) else { continue };
        let damaged = |defect: Defect| Error::from(defect.at(FileName::Pages(image.file), image.offset));
        so_far.combine(&crc32fast::Hasher::new_with_initial_len(checksum, range.end - range.start));
        if range.end == image.stored_len {
            let (found, computed) = (image.stored_crc, std::mem::take(&mut so_far).finalize());
            if found != computed {
                return Err(damaged(Defect::Checksum { what: "image", found, computed }));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_decompressed_at_once_is_bounded() {
        assert_eq!(threads_for(0), THREADS_MAX, "nothing is decompressed");
        for longest in [1, RUN_BYTES, RUN_BYTES + 1, DECODED_BYTES / 4, DECODED_BYTES / 2 + 1, DECODED_BYTES]
        {
            let threads = threads_for(longest);
            assert!((1..=THREADS_MAX).contains(&threads));
            assert!(threads as u64 * longest <= DECODED_BYTES, "{threads} pages of {longest} bytes");
        }
        assert_eq!(threads_for(DECODED_BYTES / 4), 4);
        assert_eq!(threads_for(u64::MAX), 1, "one is always loaded");
    }
}
