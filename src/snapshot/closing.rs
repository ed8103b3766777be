//! The snapshot that a close takes: of a log in many pieces, or where the log takes space that the rules of
//! retention do not ask for.
//!
//! A closed store takes about the bytes of the states that it keeps. A log of pages that were written again
//! and again is longer than those pages, so that a snapshot of them is shorter. Its cost follows from what
//! changed: it writes each changed page once, and is taken only where the log since the snapshot before is
//! longer than a tenth of all pages.
//!
//! A crash here is a crash in a snapshot.

use remanent_format::Lsn;

use super::{SnapshotRequest, Snapshots};
use crate::catalog::Catalog;
use crate::error::Result;

/// A log is longer than the pages are if it is by this share of them, and by [`ALLOWANCE_BYTES`].
const ALLOWANCE_SHARE: u64 = 10;
/// About the bytes of a snapshot of a few pages: manifest, heads, paddings.
const ALLOWANCE_BYTES: u64 = 96 << 10;

impl Snapshots {
    /// Takes a snapshot before the store closes, if its log consists of too many runs, or takes space in
    /// vain. A process that is started often and ends soon is never alive long enough for the thread to take
    /// it, and each run takes a segment.
    pub fn take_at_close(&self) -> Result<()> {
        // Asked first without the catalog's lock: a snapshot in the background may hold it for long.
        if !self.is_due_at_close(&self.catalog.latest().catalog)? {
            return Ok(());
        }
        let mut catalog = self.catalog.lock();
        // One that was being taken meanwhile may have made this one needless.
        if !self.is_due_at_close(&catalog)? {
            return Ok(());
        }
        let replaces_log = self.replaces_log(&catalog);
        self.take(&mut catalog, &SnapshotRequest::default())?;
        // Until there are as many snapshots as are wanted, a retention keeps the log from before the first of
        // them in place of the others. A closed store keeps those that there are.
        let count = catalog.snapshots.len().min(self.retention.snapshots_kept);
        if replaces_log && count < self.retention.snapshots_kept && !self.engine.applier.unloaded().is_any() {
            self.prune(&mut catalog, &self.retention.clone().snapshots_kept(count))?;
        }
        Ok(())
    }

    fn is_due_at_close(&self, catalog: &Catalog) -> Result<bool> {
        let last = *self.last.lock();
        let (lsn, log_bytes) = self.engine.log.length();
        if lsn <= last.lsn {
            return Ok(false);
        }
        let behind_bytes = log_bytes.saturating_add_signed(last.bytes.saturating_neg());
        Ok(last.is_in_pieces()
            || self.replaces_log(catalog) && self.is_log_too_long(catalog, lsn, behind_bytes)?)
    }

    /// Whether the rules keep no log from before a snapshot that is taken now.
    fn replaces_log(&self, catalog: &Catalog) -> bool {
        let has_start = catalog.snapshots.values().any(|kept| catalog.reaches(kept));
        let keeps_start = self.retention.snapshots_kept > 1 || !self.retention.snapshots_kept_for.is_zero();
        self.retention.log_kept == 0 && !(has_start && keeps_start)
    }

    /// Whether newest snapshot and log take more than the pages do.
    fn is_log_too_long(&self, catalog: &Catalog, lsn: Lsn, behind_bytes: u64) -> Result<bool> {
        // The last batch may be on its way to the applier, with the pages that it makes.
        self.engine.applier.wait_applied(lsn)?;
        let pages_bytes: u64 =
            self.engine.applier.turn(|turn| Ok(turn.applied.table.lens().map(|(_, _, len)| len).sum()))?;
        let image_bytes = catalog.snapshots.values().next_back().map_or(0, |newest| newest.info.bytes);
        let allowed = pages_bytes.saturating_add(pages_bytes / ALLOWANCE_SHARE + ALLOWANCE_BYTES);
        Ok(image_bytes.saturating_add(behind_bytes) > allowed)
    }
}
