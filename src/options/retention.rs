//! The rules for which snapshots and how much log are kept.

use std::collections::BTreeSet;
use std::time::Duration;

use super::invalid;
use crate::error::Result;

/// Rules for which snapshots and how much log are kept. A snapshot is kept as long as one of these rules, its name or a
/// reader requires it. Nothing that a kept snapshot needs is ever removed.
///
/// The rules do not apply to a snapshot if the next one has the same redo point and a later end, because the next one
/// replaces it. Its name or a reader still keeps it.
///
/// ```
/// use remanent::{Options, Retention, SnapshotOptions};
/// let store = Options::new().retention(Retention::new().snapshots_kept(1)).open_temporary()?;
/// store.commit({
///     let mut batch = store.batch();
///     batch.set_root("step", 1u64);
///     batch
/// })?;
/// store.snapshot_with(SnapshotOptions::new().name("first"))?;
/// store.snapshot()?;
///
/// let given_up = store.retention().give_up("first");
/// let would_go = store.would_prune(&given_up)?;
/// assert_eq!(would_go.snapshots[0].name.as_deref(), Some("first"));
/// assert_eq!(store.snapshots().len(), 2, "nothing was done yet");
/// assert_eq!(store.prune(&given_up)?, would_go);
/// assert_eq!(store.snapshots().len(), 1);
/// # Ok::<(), remanent::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Retention {
    /// The number of newest snapshots to keep, at least 1. The log since the oldest of them is also kept.
    pub snapshots_kept: usize,
    /// The age below which a snapshot is kept. The log since the oldest snapshot kept for its age is also kept.
    pub snapshots_kept_for: Duration,
    /// The minimum number of newest log bytes to keep. The newest snapshot that precedes them is also kept.
    pub log_kept: u64,
    /// Names of snapshots that a prune no longer keeps for their names.
    pub names_given_up: BTreeSet<String>,
    /// Whether a prune removes only the snapshots in `names_given_up` and the files that only these snapshots need. All
    /// other snapshots and the whole log are then kept.
    pub names_only: bool,
}

impl Default for Retention {
    fn default() -> Self {
        Self {
            snapshots_kept: 2,
            snapshots_kept_for: Duration::ZERO,
            log_kept: 0,
            names_given_up: BTreeSet::new(),
            names_only: false,
        }
    }
}

impl Retention {
    /// Returns the default rules.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets how many verified snapshots are kept, at least 1, with the log since the oldest of these. Default: 2.
    ///
    /// Increase it to be able to return to older snapshots. With fewer than two, the store cannot recover from a
    /// damaged image by replaying the log from an older snapshot.
    #[must_use]
    pub fn snapshots_kept(mut self, count: usize) -> Self {
        self.snapshots_kept = count;
        self
    }

    /// Sets an age below which snapshots are also kept, with the log since the oldest of these. Default: zero.
    ///
    /// Set it to be able to return to any state of the last hours or days. The age of a snapshot is computed from the
    /// oldest timestamp among it and all later snapshots, so a clock that was temporarily fast does not extend
    /// retention. A timestamp in the future counts as the current time.
    #[must_use]
    pub fn snapshots_kept_for(mut self, age: Duration) -> Self {
        self.snapshots_kept_for = age;
        self
    }

    /// Sets the minimum number of log bytes to keep. The newest snapshot from which these bytes can be replayed is also
    /// kept. Default: 0, which keeps only the log that the kept snapshots need.
    ///
    /// Set it if followers read the log, or to be able to return to any state in this part of the log. Images that
    /// batches wrote before they were logged are kept with the log, but not counted. A log shorter than `bytes` is kept
    /// completely.
    #[must_use]
    pub fn log_kept(mut self, bytes: u64) -> Self {
        self.log_kept = bytes;
        self
    }

    /// Sets whether a prune removes only the snapshots whose names are given up. No other rule then applies. The newest
    /// snapshot is always kept, because the next one shares its images.
    ///
    /// ```
    /// use remanent::{SnapshotOptions, Store};
    /// let store = Store::temporary()?;
    /// for name in ["first", "second"] {
    ///     store.snapshot_with(SnapshotOptions::new().name(name))?;
    /// }
    /// let pruned = store.prune(&store.retention().give_up("first").names_only(true))?;
    /// assert_eq!(pruned.snapshots.len(), 1);
    /// assert_eq!(store.snapshots()[0].name.as_deref(), Some("second"));
    /// # Ok::<(), remanent::Error>(())
    /// ```
    #[must_use]
    pub fn names_only(mut self, names_only: bool) -> Self {
        self.names_only = names_only;
        self
    }

    /// Gives up `name`. A prune removes the snapshot with this name unless another rule or a reader keeps it.
    #[must_use]
    pub fn give_up(mut self, name: impl Into<String>) -> Self {
        self.names_given_up.insert(name.into());
        self
    }

    /// Returns these rules without the names to give up, which apply to a single prune only.
    pub(crate) fn without_given_up_names(self) -> Self {
        Self { names_given_up: BTreeSet::new(), names_only: false, ..self }
    }

    /// Returns an error if the rules keep no snapshot.
    pub(super) fn check(&self) -> Result<()> {
        if self.snapshots_kept == 0 {
            return invalid("retention.snapshots_kept", "at least one snapshot must be kept".to_owned());
        }
        Ok(())
    }
}
