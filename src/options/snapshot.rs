//! Options of a single snapshot.

/// Options of one snapshot: a name, whether it is exact, and whether the call waits for verification.
///
/// ```
/// use remanent::{Place, SnapshotOptions, Store};
/// let store = Store::temporary()?;
/// let mut batch = store.batch();
/// batch.create(4096, Place::Host);
/// let committed = store.commit(batch)?;
///
/// let exact = store.snapshot_with(SnapshotOptions::new().exact())?;
/// assert_eq!((exact.redo, exact.end), (committed.position.lsn, committed.position.lsn));
/// let named = store.snapshot_with(SnapshotOptions::new().name("before tuning"))?;
/// assert_eq!(named.name.as_deref(), Some("before tuning"));
/// # Ok::<(), remanent::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use = "options do nothing until a snapshot is taken with them"]
pub struct SnapshotOptions {
    pub(crate) name: Option<String>,
    pub(crate) exact: bool,
    pub(crate) only_published: bool,
}

impl SnapshotOptions {
    /// Returns the options that [`Store::snapshot`](crate::Store::snapshot) uses: the snapshot has no name, and is
    /// verified before the call returns.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets a name of 1 to 64 bytes. The name keeps the snapshot until [`Store::prune`](crate::Store::prune) gives the
    /// name up. A named snapshot is always [exact](Self::exact), so it needs no log.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Makes the snapshot contain the state after a single batch: the newest batch submitted before the call, or a
    /// later one. No log is needed to restore that state. Commits continue during the snapshot. A page that changes
    /// before the snapshot has read it is first copied, within the budget of its place.
    ///
    /// To fix the state, batches are paused while every page that may have changed is examined, for about 0.2 µs per
    /// page. A snapshot that is not exact examines a thousand pages at a time and applies batches in between.
    pub fn exact(mut self) -> Self {
        self.exact = true;
        self
    }

    /// Returns as soon as the snapshot is published: it is then durable, and the next open starts from it. The snapshot
    /// is read back in the background. The snapshots and files that it replaces are kept until then.
    ///
    /// [`Store::wait_verified`](crate::Store::wait_verified) and closing the store wait until the snapshot was read
    /// back. If this snapshot has a name, the next snapshot also waits for that before it is published. The reason is
    /// that an open starts from the newest snapshot and relies only on those older snapshots that were read back.
    ///
    /// ```
    /// use remanent::{Place, SnapshotOptions, Store};
    /// let store = Store::temporary()?;
    /// let mut batch = store.batch();
    /// batch.create(4096, Place::Host);
    /// store.commit(batch)?;
    /// let published = store.snapshot_with(SnapshotOptions::new().only_published())?;
    /// assert!(!published.verified);
    /// store.wait_verified()?;
    /// assert!(store.snapshots()[0].verified);
    /// # Ok::<(), remanent::Error>(())
    /// ```
    pub fn only_published(mut self) -> Self {
        self.only_published = true;
        self
    }
}

/// Converts a name to the options for a snapshot with this name.
impl From<&str> for SnapshotOptions {
    fn from(name: &str) -> Self {
        Self::new().name(name)
    }
}

/// Converts a name to the options for a snapshot with this name.
impl From<String> for SnapshotOptions {
    fn from(name: String) -> Self {
        Self::new().name(name)
    }
}
