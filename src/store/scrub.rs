//! Scrubs: finding damage on disk while memory can mend it.

use super::Store;
use crate::base::pace::Pace;
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
#[cfg(doc)]
use crate::options::Options;
use crate::snapshot::{ScrubReport, SnapshotRequest};

impl Store {
    /// Reads what lies on disk and is needed, past the cache, as fast as it can: STORE, the kept snapshots
    /// with their images, and the log from the oldest of them up to the last durable batch. Damage is mended
    /// from memory: where a snapshot or the log is damaged, a snapshot is taken that needs nothing of that.
    /// Commits go on meanwhile. One at a time; a second caller waits, and one in the background goes on at
    /// full speed meanwhile. [`Options::scrub_interval`] has it done in the background.
    ///
    /// What a snapshot that is damaged holds of the past is not in memory any more, and stays damaged; it
    /// goes as other snapshots go.
    ///
    /// ```
    /// use remanent::{Options, Place, Store};
    /// let store = Store::temporary(Options::default())?;
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
    /// [`Error::Damaged`] if not even the names in a folder can be read; [`Error::DiskFull`] if STORE or a
    /// manifest is damaged and there is no space to write it anew; [`Error::Poisoned`] after a failure. What
    /// keeps the snapshot from being taken is told in [`ScrubReport::mended`].
    pub fn scrub(&self) -> Result<ScrubReport> {
        self.check_process()?;
        self.in_store(self.parts.scrub.run(&Pace::default(), SnapshotRequest::default()))
    }

    /// Waits until `count` scrubs have ended since the store was opened, well or not: for tests, which must
    /// not guess when one in the background is through.
    #[doc(hidden)]
    pub fn wait_for_scrubs(&self, count: u64) {
        if self.check_process().is_err() {
            return;
        }
        self.parts.scrub.wait_ended(count);
    }
}
