//! What a caller asks of a snapshot.

/// What is asked of one snapshot: a name, an exact state, how far the call waits.
///
/// ```
/// use remanent::{Options, Place, SnapshotOptions, Store};
/// let store = Store::temporary(Options::default())?;
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
    /// A snapshot without a name, verified when the call returns: what
    /// [`Store::snapshot`](crate::Store::snapshot) takes.
    pub fn new() -> Self {
        Self::default()
    }

    /// A name of 1 to 64 bytes, which keeps the snapshot until [`Store::prune`](crate::Store::prune) gives it
    /// up. A snapshot with a name is always [exact](Self::exact), so that it needs no log.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// The state of one moment: that of the newest batch submitted before the call, or of a later one. It
    /// needs no log after it to stand for that state. Commits go on; a page that they change before it is
    /// gathered is copied aside first, within the budget of its place.
    ///
    /// That moment lasts as long as it takes to look at every page that may have changed, some 0.2 µs each:
    /// batches are not applied meanwhile. A snapshot that is not exact looks at a thousand pages at a time,
    /// and lets batches go on between.
    pub fn exact(mut self) -> Self {
        self.exact = true;
        self
    }

    /// The call returns when the snapshot is published: it is durable then, and what an open starts from. It
    /// is read back in the background, and what it takes the place of stays until that is done.
    /// [`Store::wait_verified`](crate::Store::wait_verified) waits for it, and so does closing the store. If
    /// it has a name, so does the next snapshot, before that is published: an open starts from the newest
    /// one, and knows of those before only what was read back.
    ///
    /// ```
    /// use remanent::{Options, Place, SnapshotOptions, Store};
    /// let store = Store::temporary(Options::default())?;
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
