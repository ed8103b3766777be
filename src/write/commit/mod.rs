//! Commits a batch: checks it, logs it, and makes it visible.
//!
//! 1. Outside the lock: read sources, find the changes of captures, read the sources of clones and copies,
//!    write whole pages ahead, encode, fill in bytes that only the device has, compute the checksum, allocate
//!    page memory, and fill the memory of pages from sources and from disk. Nothing is visible yet, and all
//!    of it can be undone.
//! 2. Under the submission lock: check the preconditions, plan, append (I1: an Lsn is assigned only now, when
//!    payload and checksum are complete), update the table, and hand over to the applier. The order of the
//!    lock is the order of the log and of the lane. The lock holder also does this for batches that wait for
//!    the lock ([`combine`]).
//!
//! An Lsn that was assigned earlier would have to be used in any case: a batch that failed afterwards would
//! leave a gap, which recovery takes for the end of the log.
//!
//! A crash before the append loses a batch that was never acknowledged; after it, recovery replays the
//! batch.

mod device_payload;
mod capture;
mod batch_images;
mod diff;
mod digests;
mod draft;
mod fills;
mod demoted_reader;
mod disk_moves;
mod page_memory;
mod provisioning;
mod ranges;
mod stage_memory;
mod sources;
mod whole_pages;
mod combine;
mod captured_images;

use std::sync::Arc;

use remanent_format::op::decode_payload;
use remanent_format::state::table::Changes;
use remanent_format::{Defect, LogPoint, PageId, PageInfo, PageTable, Place};

use crate::base::allocation::{collected, copied, insert, map_of, push};
use crate::base::cache_padded::CachePadded;
use crate::base::sync::atomic::{AtomicU64, Ordering};
use crate::base::sync::{Mutex, MutexGuard};
use crate::catalog::KnownImages;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::images::numbers::ImageFiles;
use crate::images::{ImageOptions, PendingImages};
use crate::log::{Log, SpacePurpose};
use crate::memory::staging::GrownBytes;
use crate::write::batch::{BatchFacts, CopiedBytes, CopiedPage, CopySources, WriteBatch};

use batch_images::BatchImages;
use capture::Captures;
pub use capture::{InitialCopy, Shadow};
use captured_images::CapturedImages;
pub(crate) use combine::CombineQueue;
use device_payload::{CapturedDigests, FilledPayload};
pub(crate) use digests::DigestKeys;
use disk_moves::{DemotedPages, DiskOps, is_on_disk};
use draft::{Draft, Outcome, SourceVersions};
use page_memory::LentPages;
use sources::SourceImages;
use whole_pages::WholePages;

/// Attempts to read the bytes that a batch copies without the lock. After these, the lock is held during the
/// read.
const COPY_TRIES: usize = 3;

/// Turns batches into commits, for any number of threads.
pub(crate) struct Committer {
    pub engine: Arc<Engine>,
    /// The state after the last logged batch. Its lock is the submission lock.
    pub submitted: CachePadded<Mutex<PageTable>>,
    /// Drafts that wait for the lock holder.
    pub waiting: CachePadded<CombineQueue>,
    /// The next page id. Ids are allocated before a batch is known to succeed. A failed batch leaves a gap,
    /// which costs nothing.
    pub next_page: CachePadded<AtomicU64>,
    pub files: Arc<ImageFiles>,
    /// Images that the next snapshot need not write again.
    pub known: Arc<KnownImages>,
    /// Whether a background thread takes snapshots when they are due.
    pub takes_snapshots: bool,
    /// The key for digests of working copies.
    pub digest_keys: Mutex<DigestKeys>,
    /// How images of whole pages are written.
    pub images: ImageOptions,
    /// A batch that writes at least this many bytes of whole pages writes them ahead.
    pub ahead_bytes_min: u64,
}

/// The work for a batch that only its own committer can do, under the lock, when the batch is logged. A draft
/// with such work is not left to another lock holder.
struct CommitterWork<'a, 's> {
    batch: &'a WriteBatch,
    captures: &'a Captures<'a>,
    /// The digests of captured chunks, for copies that keep digests.
    digests: CapturedDigests,
    /// Pages whose bytes are already in images; those of new pages are in memory as well.
    whole: WholePages<'s>,
    /// Pages whose bytes come from sources.
    sources: &'a mut SourceImages<'s>,
    /// Captured pages on disk.
    captured: &'a mut CapturedImages<'s>,
    /// Pages that move to disk.
    demoted: DemotedPages<'s>,
    /// The caller's memory in which new pages are to live.
    lent: &'a LentPages<'a>,
}

impl Committer {
    /// Locks submission and returns the state. Nothing is committed while the lock is held.
    pub fn lock(&self) -> MutexGuard<'_, PageTable> {
        self.submitted.lock()
    }

    /// Logs a batch and hands it to the applier. Returns the end of its frame, and its new pages.
    pub fn submit(&self, batch: &WriteBatch) -> Result<(LogPoint, Vec<PageId>)> {
        self.engine.poison.check()?;
        let _span = tracing::trace_span!("commit").entered();
        self.try_submit(batch).map_err(|error| self.engine.poison.set_by_device(error))
    }

    /// Runs the steps of a submission. If the draft is stale when it gets the lock, repeats them from the
    /// reading of copied bytes on.
    fn try_submit(&self, batch: &WriteBatch) -> Result<(LogPoint, Vec<PageId>)> {
        // Everything that depends on the batch alone is checked first: a batch that is refused here has
        // copied, written and allocated nothing.
        batch.check_copies()?;
        let pages = self.new_pages(batch.new_pages() as u64)?;
        let sources = batch.copy_sources(&pages)?;
        batch.check_captures(&pages)?;
        // Done once, however often the draft is prepared: a source may be slow, and may return other bytes
        // the next time.
        let mut from_sources = self.read_sources(batch, &pages, &sources)?;
        let captures = self.capture(batch)?;
        let mut captured_pages = self.write_captured(&captures, &sources, None)?;
        let created_in = self.arrivals(batch, &pages)?;
        let lent = map_of(batch.lent(&pages));
        let (mut tries, mut has_room) = (0, true);
        loop {
            // Copied bytes are read without the lock, and the versions of their pages are checked under it: a
            // slow copy from a GPU would block every other committer. A batch that loses this race too often
            // reads them under the lock.
            tries += 1;
            let locked = (tries > COPY_TRIES).then(|| self.submitted.lock());
            // From here to the append, everything that is read without the lock is recorded in the draft, and
            // checked again under the lock.
            let (copied, staged) = self.read_copied(&sources, &pages, locked.as_deref())?;
            let whole = self.write_ahead(batch, &pages, &lent, locked.as_deref())?;
            let is_on_disk = |page| match locked.as_deref() {
                Some(table) => is_on_disk(table, page),
                None => is_on_disk(&self.submitted.lock(), page),
            };
            // The frame names the images instead of containing the bytes, so they are written only once.
            let of_whole = whole.pages.iter().map(|whole| whole.step).zip(whole.file.refs());
            let of_captured = captured_pages.images(is_on_disk);
            let images = map_of(of_whole.chain(from_sources.images()).chain(of_captured));
            let mut digests = captured_pages.digests(&images)?;
            let read = &from_sources.short;
            let lens = self.lens(batch, locked.as_deref());
            let captured = &captures.found;
            let found = BatchFacts { copied_whole: &sources.whole, copied, images, read, captured, lens };
            let mut payload = self.engine.staging.take_growing(batch.payload_len(&found))?;
            let blanks = batch.encode(&pages, found, &mut payload)?;
            // Payload and checksum are complete before the draft can reach the lock (I1).
            let FilledPayload { payload, crc: payload_crc, digests: in_payload } =
                self.fill(payload, blanks, created_in, locked.as_deref())?;
            digests.extend(in_payload);
            let only_deletes = batch.only_deletes();
            let draft = Draft {
                payload,
                payload_crc,
                // A batch that only deletes may use the reserve of a full disk: it frees more than it takes.
                purpose: if only_deletes { SpacePurpose::Delete } else { SpacePurpose::User },
                expected: collected(batch.expectations().iter().copied().chain(captures.epochs()))?,
                staged,
                lens: collected(whole.pages.iter().map(|whole| (whole.page, whole.len_before)))?,
                disk_ops: DiskOps::default(),
                provision: None,
            };
            let own = CommitterWork {
                batch,
                captures: &captures,
                digests,
                whole,
                sources: &mut from_sources,
                captured: &mut captured_pages,
                demoted: DemotedPages::default(),
                lent: &lent,
            };
            // A stale draft has given everything back. It is prepared again from the current state.
            match self.log_draft(draft, own, locked) {
                Ok(Some(point)) => {
                    self.refresh_shadows(captures);
                    return Ok((point, pages));
                }
                Ok(None) => {}
                // Other batches took the room, or other operations of this batch need it. Every capture that
                // can be written to an image instead now is.
                Err(Error::OverBudget { place: Place::Disk, .. }) if has_room && !captures.is_empty() => {
                    has_room = false;
                    captured_pages = self.write_captured(&captures, &sources, Some(0))?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Allocates the ids of `count` new pages. They ascend and are never reused: recovery recognizes a
    /// deleted page by its id alone.
    fn new_pages(&self, count: u64) -> Result<Vec<PageId>> {
        if count == 0 {
            // Most batches create nothing. They do not touch the counter, which stays in the caches of other
            // threads.
            return Ok(Vec::new());
        }
        let first = self.next_page.fetch_add(count, Ordering::Relaxed);
        collected((first..first + count).map(PageId))
    }

    /// Writes an image file ahead of its batch, in space that nothing else needs.
    fn in_space<'a>(&self, write: impl FnMut() -> Result<PendingImages<'a>>) -> Result<PendingImages<'a>> {
        let pool = &self.engine.log.pool;
        // The reserve is filled first: the image must not take the space that deletes need on a full disk.
        pool.fill().and_then(|()| pool.with_surplus(write)).map_err(|error| match error {
            // The page changed while it was read. Nothing failed.
            Error::Overtaken { .. } => error,
            error if error.is_passing() => error,
            error => self.engine.poison.set(error),
        })
    }

    /// Writes image files ahead of their batch. `lens` are the pages and their lengths; `read` returns their
    /// bytes piece by piece.
    fn write_read<W>(
        &self,
        lens: &[(PageId, u64)],
        equip: impl Fn() -> W + Sync,
        read: impl Fn(&mut W, &PageInfo, u64, &mut [u8]) -> Result<()> + Sync,
    ) -> Result<PendingImages<'_>> {
        let Self { files, engine, images, .. } = self;
        self.in_space(|| PendingImages::write_read(files, engine.store, *images, lens, &equip, &read))
    }

    /// Reads the bytes that the batch copies, and records the versions of their pages. `pages` are the new
    /// pages, which are not read.
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

    /// Reads a range of a page as of all batches submitted so far. `len` is the expected length of the range.
    fn read_range(
        &self,
        page: PageId,
        len: u64,
        range: impl Fn(&PageInfo) -> (u64, u64) + Clone + Send + 'static,
    ) -> Result<(PageInfo, Vec<u8>)> {
        let Engine { applier, device, staging, .. } = &*self.engine;
        let (info, bytes) = applier.read_proven(&**device, staging, page, len, range)?;
        let read = copied(&bytes)?;
        staging.put(bytes.into_staging());
        Ok((info, read))
    }

    /// Runs the steps from the payload to the log. Returns `None` if the draft is stale.
    fn log_draft<'s>(
        &'s self,
        mut draft: Draft,
        mut own: CommitterWork<'_, 's>,
        locked: Option<MutexGuard<'_, PageTable>>,
    ) -> Result<Option<LogPoint>> {
        let encoded = |defect: Defect| match defect {
            Defect::Memory { needed } => Error::no_memory(needed),
            defect => Error::InvalidOperation { index: 0, reason: defect.to_string() },
        };
        // Decoded as recovery will decode it: a payload that does not decode must not reach the log.
        let ops = decode_payload(&draft.payload).map_err(encoded)?;
        // Before an Lsn is assigned: the applier waits for no page. A logged batch cannot be postponed, so
        // the applier would delay all later batches as well.
        self.engine.applier.unloaded().wait(ops.iter().filter_map(|at| at.op.page()))?;
        draft.disk_ops = self.disk_ops(&ops, locked.as_deref())?;
        // A list of the applier cannot name a plain payload, and a page has moved to memory since.
        if matches!(draft.payload, GrownBytes::Plain(_)) && draft.disk_ops.leaves_bytes(&ops) {
            self.release_draft(draft);
            return Ok(None);
        }
        let staged = &mut draft.staged;
        match self.provide(&draft.disk_ops, staged, &mut own, &ops, locked.as_deref())? {
            Some(provision) => draft.provision = provision,
            None => {
                self.release_draft(draft);
                return Ok(None);
            }
        }

        // A free lock is taken. If another thread holds it, a draft without own work is left to that thread:
        // passing the lock on would cost a thread switch per batch.
        let table = locked.or_else(|| self.submitted.try_lock());
        let table = table.or_else(|| own.is_needed().then(|| self.submitted.lock()));
        let outcome = match table {
            Some(mut table) => {
                let appended = self.append(&table, &draft, &ops);
                let then =
                    |point, changes: &Changes| own.logged(&self.known, &self.engine.log, point, changes);
                let outcome = self.hand_over(&mut table, draft, appended, then);
                // Before the lock is released, this thread logs the drafts that arrived in the meantime.
                self.log_waiting(&mut table);
                outcome
            }
            None => self.log_in_turn(draft)?,
        };
        match outcome {
            Outcome::Logged(point) => Ok(Some(point)),
            Outcome::Stale(draft) => {
                self.release_draft(draft);
                Ok(None)
            }
            Outcome::Refused(error, draft) => {
                self.release_draft(draft);
                own.refused(&error);
                Err(error)
            }
        }
    }
}

impl<'s> CommitterWork<'_, 's> {
    /// Returns whether there is any such work.
    fn is_needed(&mut self) -> bool {
        !self.captures.is_empty() || self.files().iter().any(|file| file.is_any())
    }

    /// Returns the image files of the batch.
    fn files(&mut self) -> [&mut BatchImages<'s>; 4] {
        [&mut self.whole.file, &mut self.sources.file, &mut self.captured.file, &mut self.demoted.file]
    }

    /// Called when the batch is logged.
    fn logged(&mut self, known: &KnownImages, log: &Log, point: LogPoint, changes: &Changes) {
        self.captures.belong_to(changes, &self.digests);
        self.files().into_iter().for_each(|file| file.logged(known, log, point));
    }

    /// Called when the batch is not logged because of `error`.
    fn refused(&mut self, error: &Error) {
        // If the log has failed, it may contain a frame that names the images, so they must remain. Otherwise
        // dropping them removes the file.
        if matches!(error, Error::Poisoned(_)) {
            self.files().into_iter().for_each(BatchImages::leave);
        }
    }
}
