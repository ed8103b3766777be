//! Writes the whole pages of a batch to images before the batch is logged. Concurrently fills the memory of those pages
//! that the batch creates.
//!
//! Memory is filled in pieces of a few megabytes, so that a batch of any length needs little staging memory. A GPU pins
//! new staging memory at 1.5 GB/s. Staging a batch of 512 MiB as a whole took longer than its transfer over the bus.
//! The applier finds the memory filled, and later batches do not wait for the transfer.
//!
//! An existing page may be read until the batch is logged, so its memory is not filled here. The applier copies its new
//! bytes from staging memory.
//!
//! A failure or a crash before the batch is logged leaves neither images nor memory.

use remanent_format::{PageId, PageTable, Place};

use super::Committer;
use super::batch_images::BatchImages;
use super::page_memory::{LANES, LentPages, ReadyMemory};
use crate::base::allocation::{collected, push};
use crate::base::parallel;
use crate::device::Span;
use crate::error::Result;
use crate::images::PendingImages;
use crate::memory::arena::{PageMemory, Purpose};
use crate::write::batch::{WholePage, WriteBatch};

/// The number of bytes that one command list uploads, which is the length of a staging buffer.
const PIECE_LEN: u64 = 4 << 20;
/// The number of bytes that one command list uploads if the transfer crosses no bus. A piece this short is still in the
/// processor's cache when it is copied from the staging buffer.
const CACHED_PIECE_LEN: u64 = 512 << 10;
/// The maximum number of threads that fill memory. One additional thread writes the images.
const THREADS_MAX: usize = 3;

/// The pages that a batch writes as a whole, with their images. Empty if the pages are too short to justify an image
/// file.
pub(super) struct WholePages<'a> {
    /// The pages, in the order of their operations.
    pub pages: Vec<WholePage<'a>>,
    /// The images of the pages. Their files are removed if the batch fails.
    pub file: BatchImages<'a>,
    /// The filled memory of the pages that the batch creates.
    pub memory: ReadyMemory<'a>,
}

impl<'a> WholePages<'a> {
    /// Returns a value without pages, images and memory.
    pub fn none(committer: &'a Committer) -> Self {
        let memory = ReadyMemory::new(committer, []);
        Self { pages: Vec::new(), file: BatchImages::default(), memory }
    }
}

/// A part of a page's bytes, and the memory that receives it.
type Part<'a> = (Span, &'a [u8]);

impl Committer {
    /// Writes the batch's whole pages to an image file if they are long enough to justify the file, and fills the
    /// memory of the pages that the batch creates. On return, the file and its name are durable, because recovery must
    /// find every file that a frame names.
    ///
    /// The length of an existing page is read without the lock, and checked again under the lock. If the page was
    /// resized in between, the batch no longer writes all of its bytes.
    pub(super) fn write_ahead<'a>(
        &'a self,
        batch: &'a WriteBatch,
        pages: &[PageId],
        lent: &LentPages<'_>,
        locked: Option<&PageTable>,
    ) -> Result<WholePages<'a>> {
        let len_in = |table: &PageTable, page| table.get(page).map(|info| info.len);
        let whole = batch.whole_pages(pages, self.ahead_bytes_min, |page| match locked {
            Some(table) => len_in(table, page),
            None => len_in(&self.submitted.lock(), page),
        })?;
        if whole.is_empty() {
            return Ok(WholePages::none(self));
        }
        let contents = collected(whole.iter().map(|whole| (whole.page, whole.bytes)))?;
        let bytes = whole.iter().map(|whole| whole.bytes.len() as u64).sum();
        let write = || PendingImages::write(&self.files, self.engine.store, self.images, &contents);
        let (made, memory) = self.allocate_ready(&whole, lent)?;
        let mut parts = Vec::new();
        let planned = made
            .iter()
            .zip(&memory)
            .try_for_each(|(whole, memory)| push(&mut parts, (memory.span(), whole.bytes)));
        let (filled, written) =
            parallel::join(|| planned.and_then(|()| self.fill_parts(&parts)), || self.in_space(bytes, write));
        if let Err(error) = filled {
            self.discard_filling(memory);
            return Err(error);
        }
        let memory = ReadyMemory::new(self, made.iter().map(|whole| whole.page).zip(memory));
        let of = whole.iter().map(|whole| Some((whole.page, whole.bytes.len() as u64)));
        let file = BatchImages::new(written?, collected(of)?);
        Ok(WholePages { pages: whole, file, memory })
    }

    /// Allocates memory for the pages that the batch creates in the store's own memory.
    fn allocate_ready<'a>(
        &self,
        whole: &[WholePage<'a>],
        lent: &LentPages<'_>,
    ) -> Result<(Vec<WholePage<'a>>, Vec<PageMemory>)> {
        let is_made = |whole: &&WholePage<'_>| {
            whole.created_in.is_some_and(|place| place != Place::Disk) && !lent.contains_key(&whole.page)
        };
        let made = collected(whole.iter().filter(is_made).copied())?;
        let place_of = |whole: &WholePage<'_>| {
            (whole.created_in.expect("only those are made"), whole.bytes.len() as u64)
        };
        let memory = self.allocate_all(Purpose::Page, &collected(made.iter().map(place_of))?)?;
        Ok((made, memory))
    }

    /// Uploads bytes to page memory, piece by piece, with several threads.
    fn fill_parts(&self, parts: &[Part<'_>]) -> Result<()> {
        let at_once = if self.engine.device.crosses_bus() { PIECE_LEN } else { CACHED_PIECE_LEN };
        let pieces = pieces(parts, at_once)?;
        let threads = parallel::threads(THREADS_MAX + 1).saturating_sub(1).max(1);
        let lane = |index: usize| LANES[index % LANES.len()];
        let upload = |(): &mut (), index: usize| self.engine.staging.upload_each(lane(index), &pieces[index]);
        parallel::map_indexed(threads, pieces.len(), || (), upload).map(drop)
    }
}

/// Groups parts into pieces of at most `at_once` bytes. Short parts are combined, and long parts are split.
fn pieces<'a>(parts: &[Part<'a>], at_once: u64) -> Result<Vec<Vec<Part<'a>>>> {
    let (mut pieces, mut piece, mut free) = (Vec::new(), Vec::new(), at_once);
    for (span, bytes) in parts {
        let mut at = 0;
        while at < span.len {
            let len = free.min(span.len - at);
            let target = Span { offset: span.offset + at, len, ..*span };
            push(&mut piece, (target, &bytes[at as usize..(at + len) as usize]))?;
            (free, at) = (free - len, at + len);
            if free == 0 {
                push(&mut pieces, std::mem::take(&mut piece))?;
                free = at_once;
            }
        }
    }
    if !piece.is_empty() {
        push(&mut pieces, piece)?;
    }
    Ok(pieces)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::MemoryId;

    #[test]
    fn pieces_are_short_and_have_all_bytes_in_order() {
        let bytes: Vec<u8> = (0..100).collect();
        let of = |memory, range: std::ops::Range<usize>| {
            let span = Span { memory: MemoryId(memory), offset: 0, len: range.len() as u64 };
            (span, &bytes[range])
        };
        let parts = [of(1, 0..3), of(2, 3..3), of(3, 3..40), of(4, 40..50), of(5, 50..60)];
        let pieces = pieces(&parts, 10).unwrap();
        let lens = pieces.iter().map(|piece| piece.iter().map(|(span, _)| span.len).sum::<u64>());
        assert_eq!(lens.collect::<Vec<_>>(), [10; 6]);
        let joined: Vec<u8> = pieces.iter().flatten().flat_map(|(_, bytes)| bytes.to_vec()).collect();
        assert_eq!(joined, bytes[..60]);
        for (span, part) in pieces.iter().flatten() {
            let (whole, of) = parts.iter().find(|(whole, _)| whole.memory == span.memory).unwrap();
            assert!(span.offset + span.len <= whole.len);
            assert_eq!(of[span.offset as usize..][..span.len as usize], **part);
        }
        assert!(super::pieces(&[], 10).unwrap().is_empty());
        let last = super::pieces(&parts[..3], 30).unwrap();
        assert_eq!(last.iter().map(Vec::len).collect::<Vec<_>>(), [2, 1], "the last piece is short");
    }
}
