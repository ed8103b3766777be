//! Copies from staging to pages that are under way, and what the device's sums of them say.

use std::collections::VecDeque;

use super::ImageLoader;
use crate::base::allocation::{collected, make_room, push};
use crate::base::sync::Mutex;
use crate::base::sync::atomic::{AtomicUsize, Ordering};
use crate::device::sums::{sums_in, sums_len};
use crate::device::{Command, CommandList, Fence, Pending, Span, StagingSpan};
use crate::error::Result;
use crate::images::read::ImageRequest;
use crate::memory::staging::StagingBuf;

/// Copies that may be under way when a thread reads on. A lane does them one after the other, but it
/// should never have to wait for the next. From the page cache to an H200, 4 copies of 2 MiB made 39
/// GB/s, 8 made 49, 12 make 50. More would only need more staging, and a GPU pins that at 1.5 GB/s.
const COPIES_MAX: usize = 12;

/// A range of a page on its way up.
#[derive(Clone, Copy)]
pub(super) struct Part {
    /// Its first byte in staging.
    pub at: usize,
    /// Its place in page memory.
    pub target: Span,
    /// The image that it is of.
    pub of: ImageRequest,
    /// Its first byte in the page.
    pub offset: u64,
}

/// Copies from staging to pages that are under way.
pub(super) struct PendingCopies<'a> {
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

impl<'a> PendingCopies<'a> {
    /// No copies so far.
    pub fn new(loader: &'a ImageLoader<'a>) -> Self {
        Self {
            loader,
            begun: AtomicUsize::new(0),
            under_way: Mutex::default(),
            found: Mutex::default(),
        }
    }

    /// The images whose pages have another sum. All copies are done.
    pub fn unlike(self) -> Result<Vec<ImageRequest>> {
        assert!(self.under_way.into_inner().is_empty()); // I12: no copy went without a look at its sum.
        self.found.into_inner().unlike()
    }

    /// Copies bytes to staging, and submits their upload.
    pub fn upload_copy(&self, bytes: &[u8], parts: &[Part]) -> Result<()> {
        if parts.is_empty() {
            return Ok(());
        }
        let mut staged = self.loader.staging.take(bytes.len())?;
        staged.copy_from_slice(bytes);
        self.upload(staged, parts)
    }

    /// Submits the upload of these parts, which lie in `staged`, with their sums where the device makes them.
    pub fn upload(&self, staged: StagingBuf, parts: &[Part]) -> Result<()> {
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
    pub fn finish_but(&self, at_most: usize) -> Result<()> {
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
