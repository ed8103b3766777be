//! Commits a batch that contains all of its bytes: encodes it, checks it, appends it to the log, and passes it to the
//! applier.
//!
//! Most batches take this path, which reads no page and writes no file.

use remanent_format::{LogPoint, PageId};

use super::draft::Draft;
use super::{Committer, UNLOCKED_TRIES};
use crate::base::allocation::collected;
use crate::error::Result;
use crate::write::batch::{BatchFacts, WriteBatch};

impl Committer {
    /// Submits a batch that is [plain](WriteBatch::is_plain).
    pub(super) fn submit_plain(&self, batch: &WriteBatch) -> Result<(LogPoint, Vec<PageId>)> {
        let pages = self.new_pages(batch.new_pages() as u64)?;
        let mut tries = 0;
        loop {
            tries += 1;
            let locked = (tries > UNLOCKED_TRIES).then(|| self.lock());
            let facts = BatchFacts::default();
            let mut payload = self.engine.staging.take_growing(batch.payload_len(&facts))?;
            let placeholders = batch.encode(&pages, facts, &mut payload)?;
            assert!(placeholders.is_empty()); // I1: the payload is complete.
            let payload_crc = crc32fast::hash(payload.as_mut());
            let payload = self.grown(payload, locked.as_deref())?;
            let expected = collected(batch.expectations().iter().copied())?;
            let draft = Draft::new(payload, payload_crc, batch.space_purpose(), expected);
            if let Some(point) = self.log_draft(draft, None, locked)? {
                return Ok((point, pages));
            }
            // The draft is stale: one of its pages was moved, resized or leased after the draft was prepared. The loop
            // prepares it again.
        }
    }
}
