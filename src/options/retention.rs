//! The rules that say how much of the past is kept.

use std::collections::BTreeSet;
use std::time::Duration;

/// Which snapshots are kept, and how much log. A snapshot is kept as long as one of these rules, its name or
/// a reader wants it; nothing that a kept snapshot needs is ever removed. A snapshot that begins where the
/// next one begins, and does not go as far, is kept for its name or a reader only: the next one stands in its
/// place.
///
/// ```
/// use remanent::{Options, SnapshotOptions, Store};
/// let store = Store::temporary(Options::default().snapshots_kept(1))?;
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
    /// This number of the newest snapshots is kept, with the log since the oldest of them; at least 1.
    pub snapshots_kept: usize,
    /// Snapshots that are younger than this are kept, with the log since.
    pub snapshots_kept_for: Duration,
    /// The newest snapshot with at least this many bytes of log after it is kept, with that log.
    pub log_kept: u64,
    /// Names that keep a snapshot no longer.
    pub names_given_up: BTreeSet<String>,
    /// If set, only the snapshots whose names are given up go, with the files that only they need. All other
    /// snapshots stay, and all of the log.
    pub names_only: bool,
}

/// The rules of [`Options::default`](super::Options).
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
    /// Keeps another number of snapshots.
    #[must_use]
    pub fn snapshots_kept(mut self, count: usize) -> Self {
        self.snapshots_kept = count;
        self
    }

    /// Keeps snapshots up to another age.
    #[must_use]
    pub fn snapshots_kept_for(mut self, age: Duration) -> Self {
        self.snapshots_kept_for = age;
        self
    }

    /// Keeps another length of log, in bytes.
    #[must_use]
    pub fn log_kept(mut self, bytes: u64) -> Self {
        self.log_kept = bytes;
        self
    }

    /// Whether only the snapshots go whose names are given up, and no other rule is applied. The newest
    /// snapshot stays in any case: the next one shares its images.
    ///
    /// ```
    /// use remanent::{Options, SnapshotOptions, Store};
    /// let store = Store::temporary(Options::default())?;
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

    /// Gives this name up: the snapshot that has it goes, unless something else keeps it.
    #[must_use]
    pub fn give_up(mut self, name: impl Into<String>) -> Self {
        self.names_given_up.insert(name.into());
        self
    }
}
