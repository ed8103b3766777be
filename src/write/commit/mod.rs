//! Commits a batch: checks it, logs it, and makes it visible.
//!
//! 1. Without the lock: encode the batch, compute its checksum, and acquire all memory that is needed to apply it.
//!    Nothing is visible yet, and every action can be undone. A batch that contains all of its bytes takes the short
//!    path ([`plain`]). Any other batch is prepared first ([`prepared`]): sources are read, changes of captures are
//!    found, copied pages are read, and whole pages are written to image files.
//! 2. Under the submission lock: check the preconditions, plan the changes, append the batch to the log, update the
//!    table, and pass the batch to the applier ([`draft`]). The Lsn is assigned only now, when payload and checksum are
//!    complete (I1). Batches are logged and applied in the order in which they hold the lock. The lock holder also
//!    performs this step for batches that wait for the lock ([`combine`]).
//!
//! If the Lsn were assigned earlier, a batch that fails afterwards would leave a gap, which recovery treats as the end
//! of the log.
//!
//! A crash before the append loses a batch that was never acknowledged. After the append, recovery replays the batch.

mod plain;
mod prepared;
mod draft;
mod combine;
mod provisioning;
mod page_memory;
mod disk_moves;
mod demoted_reader;
mod fills;
mod batch_images;
mod sources;
mod whole_pages;
mod capture;

use std::sync::Arc;

use remanent_format::op::decode_payload;
use remanent_format::{Defect, LogPoint, PageId, PageTable};

use crate::base::allocation::collected;
use crate::base::cache_padded::CachePadded;
use crate::base::sync::atomic::{AtomicU64, Ordering};
use crate::base::sync::{Mutex, MutexGuard};
use crate::catalog::KnownImages;
use crate::engine::Engine;
use crate::error::{Error, Invalid, Result};
use crate::images::numbers::ImageFiles;
use crate::memory::staging::GrownBytes;
use crate::options::ImageOptions;
use crate::write::batch::WriteBatch;

pub(crate) use capture::DigestKeys;
pub use capture::{InitialCopy, Shadow};
pub(crate) use combine::CombineQueue;
use draft::{Draft, Outcome};
use prepared::PreparedBatch;

/// The number of attempts to prepare a draft without the submission lock. After these attempts, the committer holds the
/// lock while it prepares the draft.
const UNLOCKED_TRIES: usize = 3;

/// Commits batches. All threads that commit to a store share one committer.
pub(crate) struct Committer {
    pub engine: Arc<Engine>,
    /// The page table after the last logged batch. The mutex is the submission lock.
    pub submitted: CachePadded<Mutex<PageTable>>,
    /// The drafts of threads that wait for the submission lock.
    pub waiting: CachePadded<CombineQueue>,
    /// The id of the next new page. An id is allocated before its batch is known to succeed. A failed batch leaves a
    /// gap, which costs nothing.
    pub next_page: CachePadded<AtomicU64>,
    pub files: Arc<ImageFiles>,
    /// The images that the next snapshot can use without writing them again.
    pub known: Arc<KnownImages>,
    /// Whether a background thread takes snapshots when they are due.
    pub takes_snapshots: bool,
    /// The key for the digests of working copies.
    pub digest_keys: Mutex<DigestKeys>,
    /// The options for writing images of whole pages.
    pub images: ImageOptions,
    /// The minimum total length in bytes of whole pages at which a batch writes images of them before it is logged.
    pub ahead_bytes_min: u64,
}

impl Committer {
    /// Acquires the submission lock and returns the page table. No batch is committed while the lock is held.
    pub fn lock(&self) -> MutexGuard<'_, PageTable> {
        self.submitted.lock()
    }

    /// Logs a batch and passes it to the applier. Returns the position in the log after the batch's frame, and the ids
    /// of the pages that the batch creates.
    pub fn submit(&self, batch: &WriteBatch) -> Result<(LogPoint, Vec<PageId>)> {
        self.engine.poison.check()?;
        let _span = tracing::trace_span!("commit").entered();
        batch.check_copies()?;
        let submitted = match batch.is_plain(self.ahead_bytes_min) {
            true => self.submit_plain(batch),
            false => self.submit_prepared(batch),
        };
        submitted.map_err(|error| self.engine.poison.set_by_device(error))
    }

    /// Allocates the ids of `count` new pages. The ids ascend and are never reused, because recovery recognizes a
    /// deleted page by its id alone.
    fn new_pages(&self, count: u64) -> Result<Vec<PageId>> {
        if count == 0 {
            // Most batches create no pages, and then need not access the counter, whose cache line all committers
            // share.
            return Ok(Vec::new());
        }
        let first = self.next_page.fetch_add(count, Ordering::Relaxed);
        collected((first..first + count).map(PageId))
    }

    /// Acquires the resources for an encoded batch, and logs the batch. Returns `None` if the draft is stale, which
    /// means that the caller must prepare it again.
    fn log_draft<'s>(
        &'s self,
        mut draft: Draft,
        mut prepared: Option<&mut PreparedBatch<'s>>,
        locked: Option<MutexGuard<'_, PageTable>>,
    ) -> Result<Option<LogPoint>> {
        let encoded = |defect: Defect| match defect {
            Defect::Memory { needed } => Error::no_memory(needed),
            defect => Error::Invalid(Invalid::Operation { index: 0, reason: defect.to_string() }),
        };
        // The payload is decoded as in recovery: a payload that cannot be decoded must not reach the log.
        let ops = decode_payload(&draft.payload).map_err(encoded)?;
        // Pages that are not loaded must be loaded before the batch is logged. The applier never waits for a load,
        // because it would delay all later batches.
        self.engine.applier.unloaded().wait(ops.iter().filter_map(|at| at.op.page()))?;
        draft.disk_ops = self.disk_ops(&ops, locked.as_deref())?;
        // A page has moved to memory since the batch was encoded. Commands for that page cannot copy from a payload
        // that is in ordinary memory instead of staging memory.
        if matches!(draft.payload, GrownBytes::Plain(_)) && draft.disk_ops.leaves_bytes(&ops) {
            self.release_draft(draft);
            return Ok(None);
        }
        match self.provide(
            &draft.disk_ops,
            &mut draft.staged,
            prepared.as_deref_mut(),
            &ops,
            locked.as_deref(),
        )? {
            Some(provision) => draft.provision = provision,
            None => {
                self.release_draft(draft);
                return Ok(None);
            }
        }

        // If another thread holds the lock, that thread logs the draft. Waiting for the lock would cost a thread switch
        // per batch. Only a draft with resources that this thread must record itself waits for the lock.
        let is_own = prepared.as_mut().is_some_and(|prepared| prepared.is_needed());
        let table = locked.or_else(|| self.submitted.try_lock()).or_else(|| is_own.then(|| self.lock()));
        let outcome = match table {
            Some(mut table) => {
                let appended = self.append(&table, &draft, &ops);
                let outcome = self.hand_over(&mut table, draft, appended, |point, changes| {
                    if let Some(prepared) = &mut prepared {
                        prepared.logged(&self.known, &self.engine.log, point, changes);
                    }
                });
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
                if let Some(prepared) = prepared {
                    prepared.refused(&error);
                }
                Err(error)
            }
        }
    }
}
