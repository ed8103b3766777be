//! The rules for how much of the past is kept.

use std::collections::BTreeSet;
use std::time::Duration;

use super::invalid;
use crate::error::Result;

/// Rules for which snapshots and how much log are kept. A snapshot is kept as long as one of these rules, its
/// name or a reader requires it; nothing that a kept snapshot needs is ever removed. If the next snapshot has
/// the same redo point and a later end, a snapshot is kept only for its name or a reader, because the next
/// snapshot replaces it.
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
    /// The number of newest snapshots to keep, with the log since the oldest of them; at least 1.
    pub snapshots_kept: usize,
    /// Snapshots younger than this are kept, with the log since the oldest of them.
    pub snapshots_kept_for: Duration,
    /// The minimum number of log bytes to keep, with the newest snapshot that precedes them.
    pub log_kept: u64,
    /// Names that no longer keep their snapshots.
    pub names_given_up: BTreeSet<String>,
    /// Whether a prune removes only the snapshots in `names_given_up` and the files that only they need. All
    /// other snapshots and the whole log are kept.
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
    /// Returns the defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets how many verified snapshots are kept, with the log since the oldest of them; at least 1. Default:
    /// 2.
    ///
    /// Increase it to be able to return to older snapshots. With fewer than two, the store cannot recover from
    /// a damaged image by replaying the log from an older snapshot.
    #[must_use]
    pub fn snapshots_kept(mut self, count: usize) -> Self {
        self.snapshots_kept = count;
        self
    }

    /// Keeps snapshots younger than `age` in addition, with the log since the oldest of them. Default: zero.
    ///
    /// Set it to be able to return to any state of the last hours or days. The age of a snapshot is computed
    /// from the oldest timestamp of it and all later ones, so a clock that was temporarily fast does not extend
    /// retention. A timestamp in the future counts as now.
    #[must_use]
    pub fn snapshots_kept_for(mut self, age: Duration) -> Self {
        self.snapshots_kept_for = age;
        self
    }

    /// Sets the minimum number of log bytes to keep, with the newest snapshot from which they can be replayed.
    /// Default: 0, which keeps only the log that the kept snapshots need.
    ///
    /// Set it if followers read the log, or to be able to return to any state in this range. Images written in
    /// advance of the batches in it are also kept, but not counted. While the log is shorter, all of it is
    /// kept, from its beginning.
    #[must_use]
    pub fn log_kept(mut self, bytes: u64) -> Self {
        self.log_kept = bytes;
        self
    }

    /// Sets whether a prune removes only the snapshots whose names are given up and applies no other rule.
    /// The newest snapshot is kept in any case, because the next one shares its images.
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

    /// Gives up `name`: its snapshot is removed unless something else keeps it.
    #[must_use]
    pub fn give_up(mut self, name: impl Into<String>) -> Self {
        self.names_given_up.insert(name.into());
        self
    }

    /// Returns the rules without the part that applies to a single prune.
    pub(crate) fn standing(self) -> Self {
        Self { names_given_up: BTreeSet::new(), names_only: false, ..self }
    }

    /// Rejects rules that keep no snapshot.
    pub(super) fn check(&self) -> Result<()> {
        if self.snapshots_kept == 0 {
            return invalid("retention.snapshots_kept", "at least one snapshot must be kept".to_owned());
        }
        Ok(())
    }
}
