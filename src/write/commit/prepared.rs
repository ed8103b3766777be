//! Commits a batch that needs more than its own bytes: bytes from sources, other pages or the device; images of its
//! pages; moves to disk; or caller-owned memory.
//!
//! 1. Once per batch: perform the checks that depend on the batch alone, read the sources, find the changes of
//!    captures, and wait for the streams that produce device bytes. Sources are not read again, because a source may be
//!    slow or return other bytes the next time.
//! 2. Once per draft: read the copied bytes, write images of whole pages, encode the batch, and have the device fill
//!    the placeholders. The versions of all pages that are read without the lock are recorded in the draft.
//! 3. Under the submission lock, check these versions. If they are unchanged, log the draft like that of a plain batch.
//!    Otherwise free the draft's resources and repeat step 2.
//!
//! A crash before the append leaves at most image files that no frame names. The next open removes them.

use std::sync::Arc;

use remanent_format::state::table::Changes;
use remanent_format::{LogPoint, PageId, PageInfo, PageTable, Place};

use super::batch_images::BatchImages;
use super::capture::{CapturedDigests, CapturedImages, Captures, FilledPayload};
use super::disk_moves::{DemotedPages, is_on_disk};
use super::draft::{Draft, SourceVersions};
use super::page_memory::LentPages;
use super::sources::SourceImages;
use super::whole_pages::WholePages;
use super::{Committer, UNLOCKED_TRIES};
use crate::applier::Handover;
use crate::base::allocation::{collected, copied, insert, map_of, push};
use crate::catalog::KnownImages;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::log::Log;
use crate::write::batch::{BatchFacts, CopiedBytes, CopiedPage, CopySources, WriteBatch};

/// The resources, except the payload, that a batch that is not plain holds until it is logged. If the batch has
/// captures or images, only the thread that prepared the batch can log it, because that thread must then record them.
pub(super) struct PreparedBatch<'a> {
    /// The changes that were found in working copies.
    captures: Captures<'a>,
    /// The captured pages on disk whose new contents were written to images as a whole.
    pub captured: CapturedImages<'a>,
    /// The digests of captured chunks, for working copies that are compared by digests.
    digests: CapturedDigests,
    /// The pages whose bytes are read from sources.
    pub sources: SourceImages<'a>,
    /// The place of the device memory in which the bytes for placeholders are collected, or `None` if the payload has
    /// no placeholders.
    gathered_in: Option<Place>,
    /// The caller-owned memory for new pages.
    pub lent: LentPages<'a>,
    /// The receiver of the memory of the page that the batch deletes, if the caller requested this memory.
    pub handover: Option<Arc<Handover>>,
    /// The pages that the batch writes as a whole, with their images. Those that the batch creates already have their
    /// bytes in memory.
    pub whole: WholePages<'a>,
    /// The pages that the batch moves to disk, with their images.
    pub demoted: DemotedPages<'a>,
}

impl Committer {
    /// Commits a batch that is not [plain](WriteBatch::is_plain).
    pub(super) fn submit_prepared(&self, batch: &WriteBatch) -> Result<(LogPoint, Vec<PageId>)> {
        let pages = self.new_pages(batch.new_pages() as u64)?;
        let copies = batch.copy_sources(&pages)?;
        let mut prepared = self.prepare(batch, &pages, &copies)?;
        let (mut tries, mut has_room) = (0, true);
        loop {
            // Copied bytes are read without the lock, because a slow copy from a GPU would block every other committer.
            // After several stale drafts, they are read under the lock, so that the commit makes progress.
            tries += 1;
            let locked = (tries > UNLOCKED_TRIES).then(|| self.lock());
            let draft = self.prepared_draft(batch, &pages, &copies, &mut prepared, locked.as_deref())?;
            match self.log_draft(draft, Some(&mut prepared), locked) {
                Ok(Some(point)) => {
                    self.refresh_shadows(prepared.captures);
                    return Ok((point, pages));
                }
                Ok(None) => {}
                // Other batches or other operations of this batch have used the memory for pending writes. The captured
                // pages are selected again with no memory for pending writes, so that all of them are written to
                // images.
                Err(Error::OverBudget { place: Place::Disk, .. })
                    if has_room && !prepared.captures.is_empty() =>
                {
                    has_room = false;
                    prepared.captured = self.write_captured(&prepared.captures, &copies, Some(0))?;
                }
                Err(error) => return Err(error),
            }
            prepared.whole = WholePages::none(self);
            prepared.demoted = DemotedPages::default();
        }
    }

    /// Performs step 1 of the module documentation, once for a batch.
    fn prepare<'a>(
        &'a self,
        batch: &'a WriteBatch,
        pages: &[PageId],
        copies: &CopySources,
    ) -> Result<PreparedBatch<'a>> {
        // These checks come first, so that a rejected batch has copied, written and allocated nothing.
        batch.check_captures(pages)?;
        let sources = self.read_sources(batch, pages, copies)?;
        let captures = self.capture(batch)?;
        let captured = self.write_captured(&captures, copies, None)?;
        let gathered_in = self.arrivals(batch, pages)?;
        let (lent, handover) = (map_of(batch.lent(pages)), batch.handover());
        let none = PreparedBatch::none(self);
        Ok(PreparedBatch { captures, captured, sources, gathered_in, lent, handover, ..none })
    }

    /// Performs step 2 of the module documentation, for one draft of a batch.
    fn prepared_draft<'a>(
        &'a self,
        batch: &'a WriteBatch,
        pages: &[PageId],
        copies: &CopySources,
        prepared: &mut PreparedBatch<'a>,
        locked: Option<&PageTable>,
    ) -> Result<Draft> {
        let (copied, staged) = self.read_copied(copies, pages, locked)?;
        prepared.whole = self.write_ahead(batch, pages, &prepared.lent, locked)?;
        let PreparedBatch { captures, captured, sources, whole, .. } = &*prepared;
        let is_on_disk = |page| match locked {
            Some(table) => is_on_disk(table, page),
            None => is_on_disk(&self.lock(), page),
        };
        // The frame names these images instead of containing the bytes, so the bytes are written only once.
        let of_whole = whole.pages.iter().map(|whole| whole.step).zip(whole.file.refs());
        let images = map_of(of_whole.chain(sources.images()).chain(captured.images(is_on_disk)));
        let mut digests = captured.digests(&images)?;
        let lens = self.lens(batch, locked);
        let facts = BatchFacts {
            copied_whole: &copies.whole,
            copied,
            images,
            read: &sources.short,
            captured: &captures.found,
            lens,
        };
        let mut payload = self.engine.staging.take_growing(batch.payload_len(&facts))?;
        let placeholders = batch.encode(pages, facts, &mut payload)?;
        // Payload and checksum are complete before the draft can reach the lock (I1).
        let FilledPayload { payload, crc, digests: in_payload } =
            self.fill(payload, placeholders, prepared.gathered_in, locked)?;
        digests.extend(in_payload);
        let expected = collected(batch.expectations().iter().copied().chain(captures.epochs()))?;
        let lens = collected(whole.pages.iter().map(|whole| (whole.page, whole.len_before)))?;
        prepared.digests = digests;
        Ok(Draft { staged, lens, ..Draft::new(payload, crc, batch.space_purpose(), expected) })
    }

    /// Reads the bytes that the batch copies, and records the versions of their pages. `pages` contains the ids of the
    /// new pages, which are not read.
    fn read_copied(
        &self,
        sources: &CopySources,
        pages: &[PageId],
        locked: Option<&PageTable>,
    ) -> Result<(CopiedBytes, SourceVersions)> {
        let mut read = CopiedBytes::default();
        let mut versions = Vec::new();
        for &page in sources.whole.iter().filter(|page| pages.binary_search(page).is_err()) {
            let len_in = |table: &PageTable| table.get(page).map_or(0, |info| info.len);
            let len = locked.map_or_else(|| len_in(&self.submitted.lock()), len_in);
            let (info, bytes) = self.read_range(page, len, |info| (0, info.len))?;
            let (place, metadata) = (info.place, (*info.metadata).clone());
            insert(&mut read.whole, page, CopiedPage { place, metadata, bytes })?;
            push(&mut versions, (page, info.lsn))?;
        }
        for (index, page, range) in &sources.ranges {
            let (offset, len) = (range.start, range.end - range.start);
            let (info, bytes) = self.read_range(*page, len, move |_| (offset, len))?;
            insert(&mut read.ranges, *index, bytes)?;
            push(&mut versions, (*page, info.lsn))?;
        }
        Ok((read, versions))
    }

    /// Reads a range of a page after all batches submitted so far are applied. `range` computes the range from the
    /// page's information, and `len` is its expected length.
    fn read_range(
        &self,
        page: PageId,
        len: u64,
        range: impl Fn(&PageInfo) -> (u64, u64) + Clone + Send + 'static,
    ) -> Result<(PageInfo, Vec<u8>)> {
        let Engine { applier, device, staging, .. } = &*self.engine;
        let (info, bytes) = applier.read_proven(device, staging, page, len, range)?;
        let read = copied(&bytes)?;
        staging.put(bytes.into_staging());
        Ok((info, read))
    }
}

impl<'a> PreparedBatch<'a> {
    /// Returns a value without resources, for a batch that needs only its payload.
    pub fn none(committer: &'a Committer) -> Self {
        Self {
            captures: Captures::default(),
            captured: CapturedImages::default(),
            digests: CapturedDigests::new(),
            sources: SourceImages::default(),
            gathered_in: None,
            lent: LentPages::new(),
            handover: None,
            whole: WholePages::none(committer),
            demoted: DemotedPages::default(),
        }
    }

    /// Returns whether there are captures or images. Only the thread that owns this value can then log the batch,
    /// because it must call [`logged`](Self::logged).
    pub fn is_needed(&mut self) -> bool {
        !self.captures.is_empty() || self.files().iter().any(|file| file.is_any())
    }

    fn files(&mut self) -> [&mut BatchImages<'a>; 4] {
        [&mut self.whole.file, &mut self.sources.file, &mut self.captured.file, &mut self.demoted.file]
    }

    /// Records that the batch is logged. Advances working copies to the new state of their pages, and keeps the image
    /// files.
    pub fn logged(&mut self, known: &KnownImages, log: &Log, point: LogPoint, changes: &Changes) {
        self.captures.belong_to(changes, &self.digests);
        self.files().into_iter().for_each(|file| file.logged(known, log, point));
    }

    /// Records that the batch failed with `error`. Keeps the image files if the log may contain a frame that names
    /// them.
    pub fn refused(&mut self, error: &Error) {
        // A failed log poisons the store, and may contain the batch's frame. After any other error, dropping the images
        // removes their files.
        if matches!(error, Error::Poisoned(_)) {
            self.files().into_iter().for_each(BatchImages::leave);
        }
    }
}
