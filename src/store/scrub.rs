//! Starts scrubs, which find damage on disk while memory still contains the data to repair it.

use super::Store;
use crate::base::pace::Pace;
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
#[cfg(doc)]
use crate::options::Options;
use crate::snapshot::{ScrubReport, SnapshotRequest};

impl Store {
    /// Reads all data on disk that the store needs, bypassing the page cache and at full speed, and repairs damage from
    /// memory.
    ///
    /// A scrub reads STORE, the kept snapshots with their images, and the log from the oldest kept snapshot to the last
    /// durable batch. If a snapshot or the log is damaged, the scrub takes a new snapshot that needs none of the
    /// damaged data. Commits continue. Scrubs run one at a time, and a second caller waits. If a background scrub is in
    /// progress, it completes at full speed. [`Options::scrubs`] schedules background scrubs.
    ///
    /// Memory no longer contains the earlier state of a damaged snapshot, so that snapshot remains damaged. Retention
    /// removes it like any other snapshot.
    ///
    /// ```
    /// use remanent::{Place, Store};
    /// let store = Store::temporary()?;
    /// let mut batch = store.batch();
    /// batch.create(4096, Place::Host);
    /// store.commit(batch)?;
    /// store.snapshot()?;
    /// let scrubbed = store.scrub()?;
    /// assert_eq!((scrubbed.images, scrubbed.damage.len()), (1, 0));
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Damaged`] if the file names of a folder cannot be read; [`Error::DiskFull`] if STORE or a manifest is
    /// damaged and there is no space to rewrite it; [`Error::Poisoned`] after a failure. If the repairing snapshot
    /// cannot be taken, [`ScrubReport::mended`] contains the reason.
    pub fn scrub(&self) -> Result<ScrubReport> {
        self.check_process()?;
        self.in_store(self.parts.scrub.run(&Pace::default(), SnapshotRequest::default()))
    }

    /// Waits until `count` scrubs have ended since the store was opened, successfully or not. Tests use this to wait
    /// for a background scrub.
    #[doc(hidden)]
    pub fn wait_for_scrubs(&self, count: u64) {
        if self.check_process().is_err() {
            return;
        }
        self.parts.scrub.wait_ended(count);
    }
}
